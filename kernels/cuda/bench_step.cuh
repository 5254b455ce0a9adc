/* kernels/cuda/bench_step.cuh - a whole decode step of the Llama-3.1-8B geometry, random weights.
 *
 * Responsible for: weights and activations, the kernels of a step in order, checks of what they
 * computed.
 * Not responsible for: sequences and timing (bench_scene.cuh), which cases there are.
 *
 * Every layer has activations of its own, so that all of them can be looked at after a step.
 *
 * Threads: one owner.
 * Units: values; bytes where named.
 */
#ifndef KERNELS_CUDA_BENCH_STEP_CUH
#define KERNELS_CUDA_BENCH_STEP_CUH

#include "kernels/cuda/bench_scene.cuh"

enum {
    STEP_HIDDEN = 4096,
    STEP_KV = BENCH_KV_HEADS * BENCH_DIM,
    STEP_FFN = 14336,
    STEP_VOCAB = 128256,
    STEP_POSITIONS = 16, /* rows of the RoPE table; which one is read changes no time */
    STEP_TOP = 40,       /* candidates sent to the host */
    STEP_TABLE_ROWS = 16 /* of the embedding: a step reads one a sequence */
};

enum step_weight { STEP_Q, STEP_K, STEP_V, STEP_O, STEP_GATE, STEP_UP, STEP_DOWN, STEP_WEIGHTS };

static const uint32_t step_shape[STEP_WEIGHTS][2] = {
    {STEP_HIDDEN, STEP_HIDDEN}, {STEP_KV, STEP_HIDDEN},  {STEP_KV, STEP_HIDDEN},
    {STEP_HIDDEN, STEP_HIDDEN}, {STEP_FFN, STEP_HIDDEN}, {STEP_FFN, STEP_HIDDEN},
    {STEP_HIDDEN, STEP_FFN}};

struct step_layer { /* [row][...] each */
    float *x;       /* before the layer */
    float *normed, *q, *k, *v, *attended, *middle, *normed_ffn, *gate, *up, *inner;
    uint16_t *chunk; /* [K, V][kv head][row][dim] */
    struct ops_kv_dest *dest;
    struct kvops_seq *seqs;
};

struct step {
    uint32_t rows;
    const uint16_t *weight[BENCH_LAYERS][STEP_WEIGHTS];
    const uint16_t *head;
    const uint8_t *table; /* packed BF16 */
    const float *gain;
    const float *cosines, *sines;
    const uint32_t *ids, *positions;
    double weight_bytes;
    step_layer layer[BENCH_LAYERS];
    float *x, *normed, *logits;
    uint16_t *rounded;
    uint16_t *chunk; /* [layer], as the layers have it */
    struct ops_candidate *top;
    void *top_scratch;
};

/* Once for all cases. */
static inline void step_make_weights(bench &bench, step &step) {
    std::vector<float> cosines(STEP_POSITIONS * BENCH_DIM / 2), sines(cosines.size());
    struct ops_rope_table table = {500000.0,       NULL,           BENCH_DIM,
                                   STEP_POSITIONS, cosines.data(), sines.data()};
    std::vector<uint32_t> ids(CUDA_BENCH_BATCH_MAX), positions(CUDA_BENCH_BATCH_MAX);
    size_t layer = 0, head = (size_t)STEP_VOCAB * STEP_HIDDEN;

    for (const uint32_t *shape : step_shape)
        layer += (size_t)shape[0] * shape[1];
    uint16_t *at = bench_take<uint16_t>(bench, BENCH_LAYERS * layer + head);
    bench_fill(bench, at, (BENCH_LAYERS * layer + head) * 2, BENCH_WEIGHTS, 99);
    step.weight_bytes = (BENCH_LAYERS * layer + head) * 2.0;
    for (uint32_t l = 0; l < BENCH_LAYERS; l++)
        for (uint32_t w = 0; w < STEP_WEIGHTS; w++) {
            step.weight[l][w] = at;
            at += (size_t)step_shape[w][0] * step_shape[w][1];
        }
    step.head = at;
    uint8_t *packed = bench_take<uint8_t>(bench, STEP_TABLE_ROWS * STEP_HIDDEN * 2);
    float *gain = bench_take<float>(bench, STEP_HIDDEN);
    bench_fill(bench, packed, STEP_TABLE_ROWS * STEP_HIDDEN * 2, BENCH_VALUES, 98);
    bench_fill(bench, gain, STEP_HIDDEN * 4, BENCH_FLOATS, 97);
    step.table = packed;
    step.gain = gain;
    ops_rope_table_fill(&table);
    step.cosines = bench_upload(bench, cosines);
    step.sines = bench_upload(bench, sines);
    for (uint32_t i = 0; i < CUDA_BENCH_BATCH_MAX; i++)
        ids[i] = i, positions[i] = i + 1;
    step.ids = bench_upload(bench, ids);
    step.positions = bench_upload(bench, positions);
}

static inline void step_make_layer(bench &bench, step &step, step_layer &layer,
                                   const bench_scene &scene) {
    uint32_t rows = step.rows;
    std::vector<struct ops_kv_dest> dest(rows);
    std::vector<struct kvops_seq> seqs = scene.mirror;

    layer.normed = bench_take<float>(bench, rows * STEP_HIDDEN);
    layer.q = bench_take<float>(bench, rows * STEP_HIDDEN);
    layer.k = bench_take<float>(bench, rows * STEP_KV);
    layer.v = bench_take<float>(bench, rows * STEP_KV);
    layer.attended = bench_take<float>(bench, rows * STEP_HIDDEN);
    layer.middle = bench_take<float>(bench, rows * STEP_HIDDEN);
    layer.normed_ffn = bench_take<float>(bench, rows * STEP_HIDDEN);
    layer.gate = bench_take<float>(bench, rows * STEP_FFN);
    layer.up = bench_take<float>(bench, rows * STEP_FFN);
    layer.inner = bench_take<float>(bench, rows * STEP_FFN);
    for (uint32_t r = 0; r < rows; r++) {
        uint16_t *k = layer.chunk + r * BENCH_DIM, *v = k + rows * STEP_KV;
        dest[r] = {k, v, rows * BENCH_DIM};
        seqs[r].chunk_k = k;
        seqs[r].chunk_v = v;
        seqs[r].chunk_head_stride = rows * BENCH_DIM;
    }
    layer.dest = bench_upload(bench, dest);
    layer.seqs = bench_upload(bench, seqs);
}

static inline void step_make_activations(bench &bench, step &step, const bench_scene &scene,
                                         uint32_t rows) {
    struct ops_top top = {NULL, NULL, STEP_VOCAB, rows, STEP_VOCAB, STEP_TOP};

    step.rows = rows;
    step.chunk = bench_take<uint16_t>(bench, BENCH_LAYERS * 2 * rows * STEP_KV);
    step.top = bench_take<struct ops_candidate>(bench, rows * STEP_TOP);
    step.top_scratch = bench_take<uint8_t>(bench, cuda_ops_top_scratch_bytes(&top));
    for (step_layer &layer : step.layer) {
        layer.chunk = step.chunk + (&layer - step.layer) * 2 * rows * STEP_KV;
        layer.x = bench_take<float>(bench, rows * STEP_HIDDEN);
        step_make_layer(bench, step, layer, scene);
    }
    step.x = bench_take<float>(bench, rows * STEP_HIDDEN);
    step.normed = bench_take<float>(bench, rows * STEP_HIDDEN);
    step.rounded =
        bench_take<uint16_t>(bench, cuda_ops_matmul_scratch_bytes(rows, rows, STEP_FFN) / 2 + 16);
    step.logits = bench_take<float>(bench, (size_t)rows * STEP_VOCAB);
}

/* --- the kernels of a step */

static inline struct ops_matmul step_product(const step &step, const uint16_t *weight,
                                             const uint32_t *shape, const float *x, float *y) {
    struct ops_matmul args = {};

    args.weight = {OPS_BF16, shape[0], shape[1], (const uint8_t *)weight};
    args.x = x;
    args.y = y;
    args.x_stride = shape[1];
    args.y_stride = shape[0];
    args.rows = step.rows;
    return args;
}

/* What goes with a product: the norm before it, the SwiGLU behind it. */
struct step_around {
    const float *norm_x, *norm_y;
    float *glu;
};

static inline void step_multiply(bench &bench, const step &step, const struct ops_matmul *args,
                                 uint32_t count, const step_around &around) {
    struct ops_rmsnorm norm = {around.norm_x, step.gain,   (float *)around.norm_y,
                               STEP_HIDDEN,   STEP_HIDDEN, step.rows,
                               STEP_HIDDEN,   1e-5f};
    struct cuda_ops_matmul launch = {&bench.ops,
                                     args,
                                     count,
                                     step.rows,
                                     step.rounded,
                                     bench.stream,
                                     around.norm_x ? &norm : NULL,
                                     around.glu};

    bench_ok(bench, cuda_ops_matmul(&launch));
}

static inline void step_project(bench &bench, const step &step, uint32_t l) {
    const step_layer &layer = step.layer[l];
    const uint16_t *const *weight = step.weight[l];
    struct ops_matmul args[3] = {
        step_product(step, weight[STEP_Q], step_shape[STEP_Q], layer.normed, layer.q),
        step_product(step, weight[STEP_K], step_shape[STEP_K], layer.normed, layer.k),
        step_product(step, weight[STEP_V], step_shape[STEP_V], layer.normed, layer.v)};
    struct ops_rope rope = {};

    step_multiply(bench, step, args, 3, {layer.x, layer.normed, NULL});
    rope.q = layer.q, rope.k = layer.k, rope.v = layer.v;
    rope.q_stride = STEP_HIDDEN, rope.kv_stride = STEP_KV;
    rope.dest = layer.dest;
    rope.positions = step.positions;
    rope.cos_table = step.cosines, rope.sin_table = step.sines;
    rope.rows = step.rows;
    rope.q_heads = BENCH_Q_HEADS, rope.kv_heads = BENCH_KV_HEADS, rope.head_dim = BENCH_DIM;
    rope.pairing = OPS_PAIR_ADJACENT;
    bench_ok(bench, cuda_ops_rope(&rope, bench.stream));
}

static inline void step_feed_forward(bench &bench, const step &step, uint32_t l, float *out) {
    const step_layer &layer = step.layer[l];
    const uint16_t *const *weight = step.weight[l];
    struct ops_matmul wide[2] = {
        step_product(step, weight[STEP_GATE], step_shape[STEP_GATE], layer.normed_ffn, layer.gate),
        step_product(step, weight[STEP_UP], step_shape[STEP_UP], layer.normed_ffn, layer.up)};
    struct ops_matmul down =
        step_product(step, weight[STEP_DOWN], step_shape[STEP_DOWN], layer.inner, out);

    step_multiply(bench, step, wide, 2, {layer.middle, layer.normed_ffn, layer.inner});
    down.residual = layer.middle;
    step_multiply(bench, step, &down, 1, {});
}

/* Where the row of a sequence goes: behind its window. */
static inline struct kvops_append step_append_of(const bench &bench, const step &step,
                                                 const bench_scene &scene, uint32_t seq) {
    uint32_t at = scene.host[seq].window_tokens;
    struct kvops_append args = {};

    args.pool = bench.pool;
    args.chunk = step.chunk;
    args.chunk_rows = step.rows;
    args.first_row = seq;
    args.count = 1;
    args.page = bench.pages[seq][1 + at / LAYOUT_PAGE_TOKENS];
    args.page_token = at % LAYOUT_PAGE_TOKENS;
    return args;
}

/* The head, the best candidates, the rows of K and V into their pages. */
static inline void step_end(bench &bench, const step &step, const bench_scene &scene) {
    static const uint32_t head_shape[2] = {STEP_VOCAB, STEP_HIDDEN};
    struct ops_matmul head = step_product(step, step.head, head_shape, step.normed, step.logits);
    struct ops_top top = {step.logits, step.top, STEP_VOCAB, step.rows, STEP_VOCAB, STEP_TOP};

    step_multiply(bench, step, &head, 1, {step.x, step.normed, NULL});
    bench_ok(bench, cuda_ops_top(&top, step.top_scratch, bench.stream));
    for (uint32_t seq = 0; seq < step.rows; seq++) {
        struct kvops_append append = step_append_of(bench, step, scene, seq);
        bench_ok(bench, cuda_kvops_append(&append, bench.stream));
    }
}

/* Everything from token ids to candidates; `attention` 0 leaves decode and combine out. */
static inline void step_record(bench &bench, const step &step, bench_scene &scene, bool attention) {
    struct ops_embed embed = {};

    embed.table = {OPS_BF16, STEP_TABLE_ROWS, STEP_HIDDEN, step.table};
    embed.ids = step.ids;
    embed.out = step.layer[0].x;
    embed.out_stride = STEP_HIDDEN;
    embed.rows = step.rows;
    bench_ok(bench, cuda_ops_embed(&embed, bench.stream));
    for (uint32_t l = 0; l < BENCH_LAYERS; l++) {
        const step_layer &layer = step.layer[l];
        struct kvops_attend args = scene.args;
        step_project(bench, step, l);
        args.layer = l;
        args.seqs = layer.seqs;
        args.q = layer.q;
        args.out = layer.attended;
        if (attention)
            bench_attend(bench, scene, args, (int)bench.ops.overlap);
        struct ops_matmul out = step_product(step, step.weight[l][STEP_O], step_shape[STEP_O],
                                             attention ? layer.attended : layer.q, layer.middle);
        out.residual = layer.x;
        step_multiply(bench, step, &out, 1, {});
        step_feed_forward(bench, step, l, l + 1 < BENCH_LAYERS ? step.layer[l + 1].x : step.x);
    }
    step_end(bench, step, scene);
}

/* --- what a step must have computed */

static inline float step_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* 17 outputs spread over a product, every row: within the bound of dense_matmul.cu. */
static inline void step_check_product(bench &bench, const struct ops_matmul &args,
                                      const char *why) {
    enum { OUTPUTS = 17 };
    uint32_t n = args.weight.n, depth = args.weight.k;
    std::vector<float> x((size_t)args.rows * depth), y((size_t)args.rows * n), before(y.size());
    std::vector<uint16_t> weight(depth);

    bench_fetch(bench, x, args.x);
    bench_fetch(bench, y, args.y);
    if (args.residual)
        bench_fetch(bench, before, args.residual);
    for (uint32_t i = 0; i < OUTPUTS && !bench.error; i++) {
        uint32_t output = (uint32_t)((uint64_t)(n - 1) * i / (OUTPUTS - 1));
        bench_fetch(bench, weight, (const uint16_t *)args.weight.bytes + (size_t)output * depth);
        for (uint32_t row = 0; row < args.rows; row++) {
            double sum = before[(size_t)row * n + output], size = fabs(sum);
            for (uint32_t k = 0; k < depth; k++) {
                double product = (double)x[(size_t)row * depth + k] * step_float(weight[k]);
                sum += product;
                size += fabs(product);
            }
            double bound = (0x1p-8 + (depth / 16.0 + 2.0 * depth + 12) * 0x1p-23) * size;
            if (!(fabs(y[(size_t)row * n + output] - sum) <= bound))
                bench_fail(bench, why);
        }
    }
}

static inline void step_check_same(bench &bench, const std::vector<float> &host,
                                   const float *device, const char *why) {
    std::vector<float> back(host.size());

    bench_fetch(bench, back, device);
    if (!bench.error && memcmp(back.data(), host.data(), host.size() * sizeof(float)) != 0)
        bench_fail(bench, why);
}

static inline void step_norm(bench &bench, const step &step, const float *x, float *y) {
    struct ops_rmsnorm args = {x,           step.gain, y,           STEP_HIDDEN,
                               STEP_HIDDEN, step.rows, STEP_HIDDEN, 1e-5f};

    bench_ok(bench, cuda_ops_rmsnorm(&args, bench.stream));
}

/* What a step did with norm and SwiGLU inside the products, once more with kernels of their own:
 * the bits must be the same. Leaves normed, gate and up of the layer written. */
static inline void step_check_apart(bench &bench, const step &step, uint32_t l) {
    const step_layer &layer = step.layer[l];
    const uint16_t *const *weight = step.weight[l];
    std::vector<float> v(step.rows * STEP_KV), inner(step.rows * STEP_FFN);
    struct ops_matmul project =
        step_product(step, weight[STEP_V], step_shape[STEP_V], layer.normed, layer.v);
    struct ops_matmul wide[2] = {
        step_product(step, weight[STEP_GATE], step_shape[STEP_GATE], layer.normed_ffn, layer.gate),
        step_product(step, weight[STEP_UP], step_shape[STEP_UP], layer.normed_ffn, layer.up)};
    struct ops_swiglu swiglu = {layer.gate, layer.up, layer.inner, inner.size()};

    bench_fetch(bench, v, layer.v);
    bench_fetch(bench, inner, layer.inner);
    step_norm(bench, step, layer.x, layer.normed);
    step_norm(bench, step, layer.middle, layer.normed_ffn);
    step_norm(bench, step, step.x, step.normed);
    step_multiply(bench, step, &project, 1, {});
    step_multiply(bench, step, wide, 2, {});
    bench_ok(bench, cuda_ops_swiglu(&swiglu, bench.stream));
    bench_ok(bench, cudaStreamSynchronize(bench.stream));
    step_check_same(bench, v, layer.v, "wrong answer: norm inside a product");
    step_check_same(bench, inner, layer.inner, "wrong answer: SwiGLU inside a product");
}

/* The candidates against the host twin, the appended K and V of layer l against the chunk. */
static inline void step_check_end(bench &bench, const step &step, const bench_scene &scene,
                                  uint32_t l) {
    std::vector<float> logits((size_t)step.rows * STEP_VOCAB);
    std::vector<struct ops_candidate> top(step.rows * STEP_TOP), host(top.size());
    std::vector<uint16_t> row(BENCH_DIM), kept(BENCH_DIM);
    struct ops_top args = {logits.data(), host.data(), STEP_VOCAB, step.rows, STEP_VOCAB, STEP_TOP};

    bench_fetch(bench, logits, step.logits);
    bench_fetch(bench, top, step.top);
    ops_top_select(&args, 0, step.rows);
    if (!bench.error && memcmp(top.data(), host.data(), top.size() * sizeof top[0]) != 0)
        bench_fail(bench, "wrong answer: the best candidates");
    for (uint32_t i = 0; i < 2 * BENCH_KV_HEADS && !bench.error; i++) {
        struct kvops_append append = step_append_of(bench, step, scene, step.rows - 1);
        uint32_t value = i / BENCH_KV_HEADS, token = append.page_token;
        struct layout_at at = {l, i % BENCH_KV_HEADS, 0};
        struct layout_place place =
            layout_run(&bench.pool.geometry, at, value, token / LAYOUT_RUN_TOKENS);
        bench_fetch(bench, row, step.layer[l].chunk + (i * step.rows + step.rows - 1) * BENCH_DIM);
        bench_fetch(bench, kept,
                    (const uint16_t *)(bench.pool.slots +
                                       append.page.slot[place.slot] * bench_slot_bytes +
                                       place.off) +
                        token % LAYOUT_RUN_TOKENS * BENCH_DIM);
        if (row != kept)
            bench_fail(bench, "wrong answer: K and V behind the window");
    }
}

/* Norm and SwiGLU of one layer against their twins, its products and the head by sample. */
static inline void step_check(bench &bench, const step &step, uint32_t l) {
    static const uint32_t head_shape[2] = {STEP_VOCAB, STEP_HIDDEN};
    const step_layer &layer = step.layer[l];
    const uint16_t *const *weight = step.weight[l];
    uint32_t rows = step.rows;
    std::vector<float> x(rows * STEP_HIDDEN), gain(STEP_HIDDEN), y(x.size());
    std::vector<float> gate(rows * STEP_FFN), up(gate.size()), inner(gate.size());
    struct ops_rmsnorm norm = {x.data(),    gain.data(), y.data(),    STEP_HIDDEN,
                               STEP_HIDDEN, rows,        STEP_HIDDEN, 1e-5f};
    struct ops_swiglu swiglu = {gate.data(), up.data(), inner.data(), gate.size()};

    step_check_apart(bench, step, l);
    bench_fetch(bench, x, layer.x);
    bench_fetch(bench, gain, step.gain);
    bench_fetch(bench, gate, layer.gate);
    bench_fetch(bench, up, layer.up);
    ops_host_c()->rmsnorm(&norm, 0, rows, NULL);
    ops_host_c()->swiglu(&swiglu, 0, ops_swiglu_items(&swiglu), NULL);
    step_check_same(bench, y, layer.normed, "wrong answer: norm");
    step_check_same(bench, inner, layer.inner, "wrong answer: SwiGLU");
    step_check_product(
        bench, step_product(step, weight[STEP_V], step_shape[STEP_V], layer.normed, layer.v),
        "wrong answer: product with W_v");
    struct ops_matmul out =
        step_product(step, weight[STEP_O], step_shape[STEP_O], layer.attended, layer.middle);
    out.residual = layer.x;
    step_check_product(bench, out, "wrong answer: product with W_o");
    step_check_product(
        bench, step_product(step, weight[STEP_UP], step_shape[STEP_UP], layer.normed_ffn, layer.up),
        "wrong answer: product with W_up");
    struct ops_matmul down = step_product(step, weight[STEP_DOWN], step_shape[STEP_DOWN],
                                          layer.inner, step.layer[l + 1].x);
    down.residual = layer.middle;
    step_check_product(bench, down, "wrong answer: product with W_down");
    step_check_product(bench, step_product(step, step.head, head_shape, step.normed, step.logits),
                       "wrong answer: logits");
}

#endif
