/* tests/gpu_dense.cu - the CUDA twins of ops.h against plain C, bit for bit.
 *
 * Responsible for: embedding in every weight type, RMS norm, RoPE with both pairings, SwiGLU over
 * ordinary and extreme values, add; strides and odd sizes; nothing written beyond the rows. Matrix
 * products against double precision within their bound, and the bits of a row beside any others,
 * single rows and rows of chunks alike.
 * Not responsible for: attention and seal (gpu_parity.cu). Ends with `N passed, N failed`.
 * `gpu_dense quick` does a few cases of each.
 */
#include "kernels/cuda/cuda_ops.h"
#include "tests/gpu_scene.cuh"

static int passed, failed;
static gpu_random source = {4711};

template <class T> struct twin {
    std::vector<T> host;
    T *device;

    explicit twin(size_t count, uint8_t fill = 0xFF) : host(count) {
        memset((void *)host.data(), fill, count * sizeof(T));
        GPU_TRY(cudaMalloc((void **)&device, count * sizeof(T)));
    }
    ~twin() {
        cudaFree(device);
    }
    void send() {
        GPU_TRY(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    void normal(float size) {
        for (T &x : host)
            x = (T)(source.normal() * size);
    }
    bool same() {
        std::vector<T> back(host.size());
        GPU_TRY(cudaMemcpy(back.data(), device, back.size() * sizeof(T), cudaMemcpyDeviceToHost));
        return memcmp(back.data(), host.data(), back.size() * sizeof(T)) == 0;
    }
};

static void check(bool good, const char *what, uint32_t detail) {
    good ? passed++ : failed++;
    if (!good)
        printf("FAIL %s %u\n", what, detail);
}

static void test_norm(uint32_t width, uint32_t rows) {
    twin<float> x(rows * (width + 5)), y(rows * (width + 3)), gain(width);
    struct ops_rmsnorm host = {
        x.host.data(), gain.host.data(), y.host.data(), width + 5, width + 3, rows, width, 1e-5f};
    struct ops_rmsnorm device = host;

    x.normal(3.0f);
    gain.normal(1.0f);
    x.send(), y.send(), gain.send();
    device.x = x.device, device.y = y.device, device.gain = gain.device;
    ops_host_c()->rmsnorm(&host, 0, rows, NULL);
    GPU_TRY(cuda_ops_rmsnorm(&device, 0));
    check(y.same(), "rmsnorm", width);
}

static void test_rope(uint32_t dim, enum ops_pairing pairing) {
    enum { ROWS = 5, Q_HEADS = 6, KV_HEADS = 2, POSITIONS = 300, TOKENS = 8 };
    twin<float> q(ROWS * (Q_HEADS * dim + 4)), k(ROWS * (KV_HEADS * dim + 2)), v(k.host.size());
    twin<float> cosines(POSITIONS * dim / 2), sines(POSITIONS * dim / 2);
    twin<uint16_t> chunk(2 * KV_HEADS * TOKENS * dim);
    twin<uint32_t> positions(ROWS);
    twin<struct ops_kv_dest> dest(ROWS);
    struct ops_rope_table table = {10000.0,          NULL, dim, POSITIONS, cosines.host.data(),
                                   sines.host.data()};
    struct ops_rope host = {}, device;

    ops_rope_table_fill(&table);
    q.normal(2.0f), k.normal(2.0f), v.normal(2.0f);
    host.q = q.host.data(), host.k = k.host.data(), host.v = v.host.data();
    host.q_stride = Q_HEADS * dim + 4, host.kv_stride = KV_HEADS * dim + 2;
    host.rows = ROWS, host.q_heads = Q_HEADS, host.kv_heads = KV_HEADS, host.head_dim = dim;
    host.pairing = pairing;
    host.cos_table = cosines.host.data(), host.sin_table = sines.host.data();
    host.positions = positions.host.data(), host.dest = dest.host.data();
    device = host;
    for (uint32_t i = 0; i < ROWS; i++) {
        positions.host[i] = source.below(POSITIONS);
        dest.host[i] = {chunk.device + i * dim, chunk.device + (KV_HEADS * TOKENS + i) * dim,
                        TOKENS * dim};
    }
    q.send(), k.send(), v.send(), cosines.send(), sines.send(), chunk.send();
    positions.send(), dest.send();
    device.q = q.device, device.k = k.device, device.v = v.device;
    device.cos_table = cosines.device, device.sin_table = sines.device;
    device.positions = positions.device, device.dest = dest.device;
    GPU_TRY(cuda_ops_rope(&device, 0));
    for (uint32_t i = 0; i < ROWS; i++)
        dest.host[i] = {chunk.host.data() + i * dim,
                        chunk.host.data() + (KV_HEADS * TOKENS + i) * dim, TOKENS * dim};
    ops_host_c()->rope(&host, 0, ROWS, NULL);
    check(q.same(), "rope q", dim);
    check(chunk.same(), "rope k and v", dim);
}

static void test_values(size_t count) {
    static const float odd[] = {0.0f, -0.0f, 87.5f, -87.5f, 88.5f, -1e30f, 1e30f, 1e-30f};
    twin<float> a(count), b(count), y(count + 7), z(count + 7);
    struct ops_swiglu swiglu = {a.host.data(), b.host.data(), y.host.data(), count};
    struct ops_add add = {a.host.data(), b.host.data(), z.host.data(), count};
    struct ops_swiglu swiglu_device = {a.device, b.device, y.device, count};
    struct ops_add add_device = {a.device, b.device, z.device, count};

    a.normal(8.0f), b.normal(1.0f);
    for (size_t i = 0; i < count; i += 3)
        a.host[i] = i % 2 ? a.host[i] : odd[i / 3 % 8];
    a.send(), b.send(), y.send(), z.send();
    ops_host_c()->swiglu(&swiglu, 0, ops_swiglu_items(&swiglu), NULL);
    ops_host_c()->add(&add, 0, ops_add_items(&add), NULL);
    GPU_TRY(cuda_ops_swiglu(&swiglu_device, 0));
    GPU_TRY(cuda_ops_add(&add_device, 0));
    check(y.same(), "swiglu", (uint32_t)count);
    check(z.same(), "add", (uint32_t)count);
}

/* Random bytes as a table; exponents of fp16 and fp32 are kept small so that no NaN occurs. */
static void test_embed(enum ops_type type) {
    enum { N = 75, K = 320, ROWS = 9 };
    twin<uint8_t> table(ops_weight_bytes(type, N, K));
    twin<uint32_t> ids(ROWS);
    twin<float> out(ROWS * (K + 8));
    std::vector<uint8_t> tensor(ops_tensor_bytes(type, N, K));
    struct ops_embed host = {}, device;

    for (size_t i = 0; i < tensor.size(); i++)
        tensor[i] = (uint8_t)source.below(type == OPS_F32 || i % 2 ? 64 : 256);
    host.table.type = type, host.table.n = N, host.table.k = K;
    host.table.bytes = table.host.data();
    ops_weight_pack(&host.table, tensor.data(), table.host.data(), 0, (N + 15) / 16);
    for (uint32_t i = 0; i < ROWS; i++)
        ids.host[i] = i == 0 ? N - 1 : source.below(N);
    host.ids = ids.host.data(), host.out = out.host.data();
    host.out_stride = K + 8, host.rows = ROWS;
    device = host;
    device.table.bytes = table.device, device.ids = ids.device, device.out = out.device;
    table.send(), ids.send(), out.send();
    ops_host_c()->embed(&host, 0, ROWS, NULL);
    GPU_TRY(cuda_ops_embed(&device, 0));
    check(out.same(), "embed", type);
}

/* Weights of every type as BF16 rows. */
static void test_weight_rows(enum ops_type type) {
    enum { N = 75, K = 320 };
    twin<uint8_t> packed(ops_weight_bytes(type, N, K));
    twin<uint16_t> rows(N * K + 7);
    std::vector<uint8_t> tensor(ops_tensor_bytes(type, N, K));
    std::vector<float> scratch(K * OPS_PANEL);
    struct ops_weight host = {type, N, K, packed.host.data()}, device = host;

    for (size_t i = 0; i < tensor.size(); i++)
        tensor[i] = (uint8_t)source.below(type == OPS_F32 || i % 2 ? 64 : 256);
    ops_weight_pack(&host, tensor.data(), packed.host.data(), 0, (N + 15) / 16);
    packed.send(), rows.send();
    device.bytes = packed.device;
    ops_weight_rows(&host, rows.host.data(), 0, (N + 15) / 16, scratch.data());
    GPU_TRY(cuda_ops_weight_rows(&device, rows.device, 0));
    check(rows.same(), "weight rows", type);
}

/* Three products over the same x, the second with a residual in place, for rows [first, +rows) of x
 * and y; rows and columns around them must stay as they were. */
struct matmul_scene {
    enum { ROWS = 300, PAD = 4 };
    uint32_t n[3], k;
    std::vector<std::vector<uint16_t>> weight;
    std::vector<uint16_t *> on_device;
    std::vector<float> x, residual;
    float *x_device, *y_device[3];
    uint16_t *scratch;
    struct cuda_ops_device device;
    uint32_t y_pad;

    size_t stride(int i) const {
        return n[i] + y_pad;
    }
    matmul_scene(uint32_t n0, uint32_t n1, uint32_t n2, uint32_t depth,
                 struct cuda_gemm *gemm = NULL)
        : n{n0, n1, n2}, k(depth), y_pad(gemm ? 4 : 3) {
        GPU_TRY(cuda_ops_open(&device));
        device.gemm = gemm;
        for (uint32_t i = 0; i < 3 && gemm; i++)
            cuda_gemm_pin(gemm, n[i], k);
        x.resize(ROWS * (k + PAD));
        for (float &value : x)
            value = source.normal();
        residual.resize(ROWS * stride(1));
        for (float &value : residual)
            value = source.normal();
        GPU_TRY(cudaMalloc((void **)&x_device, x.size() * 4));
        GPU_TRY(cudaMalloc((void **)&scratch, cuda_ops_matmul_scratch_bytes(ROWS, 0, k)));
        GPU_TRY(cudaMemcpy(x_device, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
        for (int i = 0; i < 3; i++) {
            uint16_t *at;
            weight.emplace_back((size_t)n[i] * k);
            for (uint16_t &value : weight[i])
                value = gpu_bf16(source.normal() * 0.05f);
            GPU_TRY(cudaMalloc((void **)&at, weight[i].size() * 2));
            GPU_TRY(cudaMemcpy(at, weight[i].data(), weight[i].size() * 2, cudaMemcpyHostToDevice));
            on_device.push_back(at);
            GPU_TRY(cudaMalloc((void **)&y_device[i], ROWS * stride(i) * 4));
        }
    }
    ~matmul_scene() {
        cudaFree(x_device), cudaFree(scratch);
        for (int i = 0; i < 3; i++)
            cudaFree(on_device[i]), cudaFree(y_device[i]);
    }
    std::vector<float> start(int i) const {
        if (i == 1)
            return residual;
        return std::vector<float>(ROWS * stride(i), -77.0f);
    }
    /* Of them `singles` are single rows. In a graph, where a stream is given. */
    std::vector<std::vector<float>> run(uint32_t first, uint32_t rows, uint32_t singles,
                                        cudaStream_t recorded = 0) {
        std::vector<std::vector<float>> y;
        struct ops_matmul args[3] = {};
        struct cuda_ops_matmul launch = {&device, args, 3, singles, scratch, recorded, NULL, NULL};
        for (int i = 0; i < 3; i++) {
            y.push_back(start(i));
            GPU_TRY(cudaMemcpy(y_device[i], y[i].data(), y[i].size() * 4, cudaMemcpyHostToDevice));
            args[i].weight = {OPS_BF16, n[i], k, (const uint8_t *)on_device[i]};
            args[i].x = x_device + first * (k + PAD);
            args[i].x_stride = k + PAD;
            args[i].y = y_device[i] + first * stride(i);
            args[i].y_stride = stride(i);
            args[i].residual = i == 1 ? args[i].y : NULL;
            args[i].rows = rows;
        }
        if (recorded)
            replay(launch);
        else
            GPU_TRY(cuda_ops_matmul(&launch));
        for (int i = 0; i < 3; i++)
            GPU_TRY(cudaMemcpy(y[i].data(), y_device[i], y[i].size() * 4, cudaMemcpyDeviceToHost));
        return y;
    }
    static void replay(const struct cuda_ops_matmul &launch) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        GPU_TRY(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal));
        GPU_TRY(cuda_ops_matmul(&launch));
        GPU_TRY(cudaStreamEndCapture(launch.stream, &graph));
        GPU_TRY(cudaGraphInstantiate(&exec, graph, 0));
        GPU_TRY(cudaGraphLaunch(exec, launch.stream));
        GPU_TRY(cudaStreamSynchronize(launch.stream));
        GPU_TRY(cudaGraphExecDestroy(exec));
        GPU_TRY(cudaGraphDestroy(graph));
    }
};

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Two products of equal n with the norm before and SwiGLU behind them: the bits of four kernels.
 * With `gemm` the rows behind the first eleventh are of a chunk. */
static void test_around(uint32_t n, uint32_t k, struct cuda_gemm *gemm = NULL) {
    enum { ROWS = 140 };
    matmul_scene scene(n, n, 1, k, gemm);
    twin<float> raw(ROWS * (k + 4)), gain(k), inner(ROWS * n + 9), expected(ROWS * n + 9);
    float *y, *gate, *up;
    struct ops_rmsnorm norm = {};
    struct ops_matmul args[2] = {};
    struct cuda_ops_matmul launch = {&scene.device, args, 2, 0, scene.scratch, 0, NULL, NULL};

    raw.normal(3.0f), gain.normal(1.0f);
    raw.send(), gain.send();
    GPU_TRY(cudaMalloc((void **)&y, ROWS * k * 4));
    GPU_TRY(cudaMalloc((void **)&gate, ROWS * n * 4));
    GPU_TRY(cudaMalloc((void **)&up, ROWS * n * 4));
    norm = {raw.device, gain.device, y, k + 4, k, 0, k, 1e-5f};
    for (uint32_t rows : {1u, 2u, 3u, 8u, 9u, 16u, 17u, 64u, 65u, (uint32_t)ROWS}) {
        struct ops_swiglu swiglu = {gate, up, expected.device, (size_t)rows * n};
        norm.rows = rows;
        launch.singles = gemm ? rows / 11 : rows;
        for (int i = 0; i < 2; i++) {
            args[i] = {{OPS_BF16, n, k, (const uint8_t *)scene.on_device[i]},
                       y,
                       NULL,
                       i ? up : gate,
                       k,
                       n,
                       rows};
        }
        launch.norm = NULL, launch.glu = NULL;
        expected.send(), inner.send();
        GPU_TRY(cuda_ops_rmsnorm(&norm, 0));
        GPU_TRY(cuda_ops_matmul(&launch));
        GPU_TRY(cuda_ops_swiglu(&swiglu, 0));
        GPU_TRY(cudaMemset(y, 0xFF, ROWS * k * 4));
        GPU_TRY(cudaMemset(gate, 0xFF, ROWS * n * 4));
        GPU_TRY(cudaMemset(up, 0xFF, ROWS * n * 4));
        launch.norm = &norm, launch.glu = inner.device;
        GPU_TRY(cuda_ops_matmul(&launch));
        GPU_TRY(cudaMemcpy(inner.host.data(), expected.device, inner.host.size() * 4,
                           cudaMemcpyDeviceToHost));
        check(inner.same(), "norm, products, swiglu in one", rows * 100000 + k);
        memset((void *)inner.host.data(), 0xFF, inner.host.size() * 4);
    }
    cudaFree(y), cudaFree(gate), cudaFree(up);
}

/* |y - exact| over its bound, worst of the outputs; exact in double over fp32 x. */
static double worst_of_bound(const matmul_scene &scene, int i, const std::vector<float> &y,
                             uint32_t row) {
    double worst = 0;

    for (uint32_t n = 0; n < scene.n[i]; n++) {
        double sum = 0, size = 0;
        for (uint32_t k = 0; k < scene.k; k++) {
            double product = (double)scene.x[row * (scene.k + scene.PAD) + k] *
                             from_bf16(scene.weight[i][(size_t)n * scene.k + k]);
            sum += product;
            size += fabs(product);
        }
        size_t at = row * scene.stride(i) + n;
        sum += i == 1 ? scene.residual[at] : 0;
        double bound =
            (0x1p-8 + (scene.k / 16.0 + 2 * scene.k + 10) * 0x1p-23) * size + 0x1p-23 * fabs(sum);
        worst = fmax(worst, fabs(y[at] - sum) / bound);
    }
    return worst;
}

typedef std::vector<std::vector<float>> outputs;

struct row_span {
    uint32_t first, rows, singles;
};

/* y has the span's single rows as in `own`, the others as in `chunk`, and nothing else. */
static void check_rows(const matmul_scene &scene, const outputs &y, const row_span &span,
                       const outputs &own, const outputs &chunk, const char *what) {
    for (int i = 0; i < 3; i++) {
        std::vector<float> expected = scene.start(i);
        size_t stride = scene.stride(i);
        for (uint32_t row = span.first; row < span.first + span.rows; row++) {
            const outputs &from = row < span.first + span.singles ? own : chunk;
            memcpy(&expected[row * stride], &from[i][row * stride], scene.n[i] * 4);
        }
        check(memcmp(y[i].data(), expected.data(), expected.size() * 4) == 0, what,
              span.first * 1000 + span.rows);
    }
}

static void test_matmul(uint32_t n0, uint32_t n1, uint32_t n2, uint32_t k) {
    static const uint32_t spans[][2] = {{0, 1},   {5, 1},   {3, 8},    {3, 9},  {1, 16},
                                        {2, 17},  {0, 33},  {0, 64},   {7, 65}, {0, 128},
                                        {4, 200}, {0, 256}, {11, 265}, {299, 1}};
    matmul_scene scene(n0, n1, n2, k);
    outputs all = scene.run(0, scene.ROWS, scene.ROWS);
    double worst = 0;

    for (int i = 0; i < 3; i++)
        for (uint32_t row = 0; row < scene.ROWS; row += 97)
            worst = fmax(worst, worst_of_bound(scene, i, all[i], row));
    printf("matmul %u %u %u x %u: worst error %.3f of its bound\n", n0, n1, n2, k, worst);
    check(worst < 1 && worst > 0, "matmul bound", k);
    for (const uint32_t *span : spans) {
        outputs y = scene.run(span[0], span[1], span[1]);
        check_rows(scene, y, {span[0], span[1], span[1]}, all, all, "matmul rows beside others");
    }
}

/* Rows of chunks by the library: within the bound; the bits of a row are the same for every number
 * of rows, at every place, beside single rows (which have those of our kernels) and beside rows
 * that are not finite, recorded or not. */
static void test_chunk(struct cuda_gemm *gemm, uint32_t n0, uint32_t n1, uint32_t n2, uint32_t k) {
    static const uint32_t counts[] = {1, 2, 15, 16, 17, 64, 100, 255, 256};
    static const row_span beside[] = {{0, 257, 1},  {3, 100, 2},   {7, 265, 9},
                                      {0, 140, 17}, {30, 270, 14}, {1, 299, 70}};
    matmul_scene scene(n0, n1, n2, k, gemm);
    outputs own = scene.run(0, scene.ROWS, scene.ROWS), all = scene.run(0, 256, 0);
    outputs shifted = scene.run(scene.ROWS - 256, 256, 0);
    double worst = 0;
    cudaStream_t stream;

    for (uint32_t i = 0; i < 3; i++) {
        struct ops_matmul args = {};
        size_t stride = scene.stride(i);
        args.weight = {OPS_BF16, scene.n[i], k, NULL};
        args.y_stride = stride;
        check(cuda_gemm_takes(gemm, &args), "an algorithm is pinned", scene.n[i]);
        for (uint32_t row = 0; row < 256; row += 85)
            worst = fmax(worst, worst_of_bound(scene, i, all[i], row));
        memcpy(&all[i][256 * stride], &shifted[i][256 * stride], (scene.ROWS - 256) * stride * 4);
    }
    check_rows(scene, shifted, {scene.ROWS - 256, 256, 0}, own, all, "chunk, shifted");
    check(own != all, "chunks are multiplied by the library", k);
    printf("chunk %u %u %u x %u: worst error %.3f of its bound\n", n0, n1, n2, k, worst);
    check(worst < 1 && worst > 0, "chunk bound", k);
    for (uint32_t rows : counts)
        for (uint32_t first : {0u, 7u, scene.ROWS - rows})
            check_rows(scene, scene.run(first, rows, 0), {first, rows, 0}, own, all, "chunk rows");
    for (const row_span &span : beside)
        check_rows(scene, scene.run(span.first, span.rows, span.singles), span, own, all,
                   "chunk rows beside single rows");
    GPU_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check_rows(scene, scene.run(2, 200, 9, stream), {2, 200, 9}, own, all, "chunk rows, recorded");
    GPU_TRY(cudaStreamDestroy(stream));
    std::vector<float> bad(2 * (k + scene.PAD), NAN);
    std::fill(bad.begin() + k + scene.PAD, bad.end(), INFINITY);
    GPU_TRY(cudaMemcpy(scene.x_device + 20 * (k + scene.PAD), bad.data(), bad.size() * 4,
                       cudaMemcpyHostToDevice));
    outputs hurt = scene.run(0, 256, 3);
    for (uint32_t i = 0; i < 3; i++) {
        size_t stride = scene.stride(i);
        check(isnan(hurt[i][20 * stride]) && !isfinite(hurt[i][21 * stride]), "NaN stays", k);
        memcpy(&hurt[i][20 * stride], &all[i][20 * stride], 2 * stride * 4);
    }
    check_rows(scene, hurt, {0, 256, 3}, own, all, "chunk rows beside NaN");
}

/* The residual of a chunk's rows in memory of its own. */
static void test_residual(struct cuda_gemm *gemm) {
    enum { N = 2752, K = 1536 };
    matmul_scene scene(64, N, 64, K, gemm);
    std::vector<float> expected = scene.run(0, 256, 0)[1], y(expected.size(), -77.0f);
    size_t stride = scene.stride(1);
    struct ops_matmul args = {};
    struct cuda_ops_matmul launch = {&scene.device, &args, 1, 0, scene.scratch, 0, NULL, NULL};
    float *residual;

    args.weight = {OPS_BF16, N, K, (const uint8_t *)scene.on_device[1]};
    check(cuda_gemm_takes(gemm, &args), "the residual goes to the library", N);
    GPU_TRY(cudaMalloc((void **)&residual, y.size() * 4));
    GPU_TRY(cudaMemcpy(residual, scene.residual.data(), y.size() * 4, cudaMemcpyHostToDevice));
    GPU_TRY(cudaMemcpy(scene.y_device[1], y.data(), y.size() * 4, cudaMemcpyHostToDevice));
    args.x = scene.x_device, args.x_stride = K + scene.PAD;
    args.y = scene.y_device[1], args.y_stride = stride;
    args.residual = residual;
    args.rows = 256;
    GPU_TRY(cuda_ops_matmul(&launch));
    GPU_TRY(cudaMemcpy(y.data(), scene.y_device[1], y.size() * 4, cudaMemcpyDeviceToHost));
    GPU_TRY(cudaFree(residual));
    for (uint32_t row = 0; row < scene.ROWS; row++)
        for (size_t i = row < 256 ? N : 0; i < stride; i++)
            expected[row * stride + i] = -77.0f;
    check(memcmp(y.data(), expected.data(), y.size() * 4) == 0, "chunk, residual apart", N);
}

/* Where the library does not pay, rows of chunks have the bits of single rows. */
static void test_few_weights(struct cuda_gemm *gemm) {
    matmul_scene scene(576, 192, 1536, 576, gemm);
    outputs own = scene.run(0, scene.ROWS, scene.ROWS);

    check_rows(scene, scene.run(0, 256, 0), {0, 256, 0}, own, own, "chunk of few weights");
}

/* As many shapes as there is room for are pinned at a time. */
static void test_pins(struct cuda_gemm *gemm) {
    uint32_t n = 8;

    for (; gemm->shape_count < CUDA_GEMM_SHAPES; n += 8)
        cuda_gemm_pin(gemm, n, 64);
    cuda_gemm_pin(gemm, n, 64);
    check(gemm->shape_count == CUDA_GEMM_SHAPES && strlen(gemm->text) == gemm->text_bytes,
          "pinned shapes end", n);
}

static void test_chunks(void) {
    static const uint32_t shapes[][4] = {{4096, 576, 2688, 576},
                                         {64, 2816, 32, 1536},
                                         {1024, 256, 4096, 4096},
                                         {64, 4096, 32, 14336},
                                         {1024, 512, 14336, 4096}};
    static struct cuda_gemm gemm;
    const char *why = cuda_gemm_open(&gemm);

    if (why) {
        printf("skipped: rows of chunks by cuBLASLt: %s\n", why);
        return;
    }
    for (const uint32_t *shape : shapes)
        test_chunk(&gemm, shape[0], shape[1], shape[2], shape[3]);
    printf("%s", gemm.text);
    cuda_gemm_close(&gemm);
    check(cuda_gemm_open(&gemm) == NULL && gemm.shape_count == 0, "opened again", 0);
    test_around(3712, 576, &gemm);
    test_around(464, 4608, &gemm);
    test_residual(&gemm);
    test_few_weights(&gemm);
    test_pins(&gemm);
    cuda_gemm_close(&gemm);
}

/* Ties, zeros of both signs and, in the last row, values that are not finite. */
static void test_top(uint32_t count, uint32_t k) {
    enum { ROWS = 3 };
    size_t stride = count + 5;
    twin<float> logits(ROWS * stride);
    twin<struct ops_candidate> top(ROWS * k + 2);
    struct ops_top host = {logits.host.data(), top.host.data(), stride, ROWS, count, k};
    struct ops_top device = {logits.device, top.device, stride, ROWS, count, k};
    void *scratch;

    for (float &x : logits.host)
        x = source.below(4) == 0 ? -0.0f : roundf(source.normal() * 64) / 16;
    if (count > 40) {
        logits.host[2 * stride + 37] = -INFINITY;
        logits.host[2 * stride + 39] = NAN;
    }
    logits.send(), top.send();
    GPU_TRY(cudaMalloc(&scratch, cuda_ops_top_scratch_bytes(&device)));
    ops_top_select(&host, 0, ROWS);
    GPU_TRY(cuda_ops_top(&device, scratch, 0));
    check(top.same(), "top", count * 100 + k);
    GPU_TRY(cudaFree(scratch));
}

/* A few cases of everything, for tools that make kernels a thousand times slower. */
static void test_quickly(void) {
    test_norm(576, 3);
    test_rope(64, OPS_PAIR_HALVES);
    test_rope(128, OPS_PAIR_ADJACENT);
    test_values(5000);
    test_embed(OPS_Q4_1);
    test_weight_rows(OPS_Q8_0);
    test_top(3000, 40);
    test_around(64, 64);
    test_matmul(64, 130, 16, 64);
}

int main(int argc, char **argv) {
    static const enum ops_type types[] = {OPS_F32, OPS_F16, OPS_BF16, OPS_Q8_0, OPS_Q4_0, OPS_Q4_1};
    static const uint32_t widths[] = {1, 31, 64, 576, 4096, 12288, 14336};

    if (argc > 1 && strcmp(argv[1], "quick") == 0) {
        test_quickly();
        printf("%d passed, %d failed\n", passed, failed);
        return failed != 0;
    }
    for (uint32_t width : widths)
        test_norm(width, 7);
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        test_rope(dim, OPS_PAIR_ADJACENT);
        test_rope(dim, OPS_PAIR_HALVES);
    }
    test_values(1);
    test_values(14336 * 9);
    test_values(1300001);
    for (enum ops_type type : types)
        test_embed(type);
    for (enum ops_type type : types)
        test_weight_rows(type);
    for (uint32_t k : {1u, 10u, 64u})
        for (uint32_t count : {64u, 1000u, 1024u, 49152u, 128256u})
            test_top(count, k);
    test_top(1, 1);
    test_around(1536, 576);
    test_around(33, 64);
    test_around(1000, 4096);
    test_around(40, 4608);
    test_matmul(576, 192, 192, 576);
    test_matmul(1, 130, 47, 32);
    test_matmul(150, 576, 33, 1536);
    test_matmul(1024, 256, 4096, 4096);
    test_matmul(64, 257, 16, 14336);
    test_chunks();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
