/* kernels/cuda/bench_attention.cu - runs the cases of cuda_bench.h.
 *
 * Responsible for: which cases there are, what is compared with what, that a wrong answer ends the
 * run: attention goes through struct kvops_attend of the host twin as well.
 * Not responsible for: the kernels timed here.
 */
#include "kernels/cuda/bench_step.cuh"

#define ATTENTION_ERROR_MAX 5e-4
#define RESERVE_BYTES (6ull << 30) /* activations, plans, the target of the copy come from it */

/* --- attention of sequence 0 against the host twin: only slots that hold the layer are fetched */

static void fetch_slots(bench &bench, std::vector<uint32_t *> &wanted, uint8_t *to) {
    for (uint32_t i = 0; i < wanted.size() && !bench.error; i++) {
        bench_ok(bench, cudaMemcpy(to + i * bench_slot_bytes,
                                   bench.pool.slots + *wanted[i] * bench_slot_bytes,
                                   bench_slot_bytes, cudaMemcpyDeviceToHost));
        *wanted[i] = i;
    }
}

static void want_block(struct kvops_block &block, uint32_t layer, std::vector<uint32_t *> &wanted) {
    static const struct layout_geometry geometry = {BENCH_LAYERS, BENCH_KV_HEADS, BENCH_DIM};
    uint32_t streams = layout_tier_streams((enum layout_tier)block.tier);

    if (block.tier == LAYOUT_TIER_BF16) {
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
            wanted.push_back(&block.slot[p * LAYOUT_PAGE_SLOTS + layer / 4]);
        return;
    }
    for (uint32_t s = LAYOUT_KH; s <= LAYOUT_VX; s++)
        if (streams >> s & 1)
            wanted.push_back(
                &block.slot[layout_stream_table((enum layout_stream)s) +
                            layout_tile(&geometry, (enum layout_stream)s, {layer, 0, 0}).slot]);
}

/* Memory of the host aligned as the twins want it. */
struct aligned {
    std::vector<uint64_t> words;
    uint8_t *at;

    explicit aligned(size_t bytes) : words(bytes / 8 + 16, ~0ull) {
        at = (uint8_t *)(((uintptr_t)words.data() + 63) / 64 * 64);
    }
};

/* `chunk` is the K and V of the row itself, [2][kv head][dim], or empty. */
static double twin_error(bench &bench, bench_scene &scene, uint32_t layer, const float *q,
                         const float *out, const std::vector<uint16_t> &chunk) {
    const struct kvops_table *host = ops_cpu_has_avx2() ? kvops_host_avx2() : kvops_host_c();
    std::vector<struct kvops_block> blocks = scene.blocks[0];
    struct kvops_page window[LAYOUT_WINDOW_PAGES_MAX];
    struct kvops_attend args = scene.args;
    struct kvops_seq seq = scene.host[0];
    std::vector<uint32_t *> wanted;
    double errors = 0, norms = 0;

    memcpy(window, bench.pages[0] + 1, sizeof window);
    for (struct kvops_block &block : blocks)
        want_block(block, layer, wanted);
    for (struct kvops_page &page : window)
        wanted.push_back(&page.slot[layer / 4]);
    wanted.push_back(&seq.sinks.slot[layer / 4]);
    aligned slots(wanted.size() * bench_slot_bytes);
    aligned meta(bench.block_count * layout_meta_frame_bytes(&bench.pool.geometry));
    aligned query(STEP_HIDDEN * 4), answer(STEP_HIDDEN * 4), own(2 * STEP_KV * 2);
    fetch_slots(bench, wanted, slots.at);
    if (bench_ok(bench,
                 cudaMemcpy(meta.at, bench.pool.meta,
                            bench.block_count * layout_meta_frame_bytes(&bench.pool.geometry),
                            cudaMemcpyDeviceToHost)))
        memcpy(query.at, q, STEP_HIDDEN * 4);
    args.pool.slots = slots.at;
    args.pool.meta = meta.at;
    seq.blocks = blocks.data();
    seq.window = window;
    seq.chunk_k = seq.chunk_v = NULL;
    if (!chunk.empty()) {
        memcpy(own.at, chunk.data(), chunk.size() * 2);
        seq.chunk_k = (const uint16_t *)own.at;
        seq.chunk_v = seq.chunk_k + STEP_KV;
        seq.chunk_head_stride = BENCH_DIM;
    }
    args.layer = layer;
    args.seqs = &seq;
    args.seq_count = 1;
    args.q = (const float *)query.at;
    args.out = (float *)answer.at;
    aligned partials(kvops_partial_bytes(&args));
    args.partials = (float *)partials.at;
    aligned scratch(kvops_decode_scratch_bytes(&args) + kvops_combine_scratch_bytes(&args));
    if (bench.error)
        return 1;
    host->decode(&args, 0, kvops_decode_items(&args), scratch.at);
    host->combine(&args, 0, kvops_combine_items(&args), scratch.at);
    for (uint32_t i = 0; i < STEP_HIDDEN; i++) {
        errors += pow((double)args.out[i] - out[i], 2);
        norms += pow((double)args.out[i], 2);
    }
    return norms > 0 ? sqrt(errors / norms) : 1;
}

static void report(bench &bench, struct cuda_bench_result result, const bench_case &what,
                   bench_time time) {
    result.tier = what.name;
    result.batch = what.batch;
    result.tokens = bench.options.tokens;
    result.median_ms = time.median_ms;
    result.p99_ms = time.p99_ms;
    result.of_copy = result.all_bytes / (time.median_ms * 1e-3) / bench.device.copy_rate;
    result.of_read = result.all_bytes / (time.median_ms * 1e-3) / bench.device.read_rate;
    result.repeats = bench.options.repeats;
    if (!bench.error)
        bench.options.result(bench.options.context, &result);
}

/* --- attention alone: 32 layers one behind the other */

static void run_attention(bench &bench, const bench_case &what) {
    size_t mark = bench.owned.size(), row = (size_t)what.batch * STEP_HIDDEN;
    uint32_t layer = what.tier % 2 ? BENCH_LAYERS - 1 : 9;
    struct cuda_bench_result result = {};
    bench_scene scene;

    bench_make_scene(bench, scene, what, false);
    struct kvops_seq *seqs = bench_upload(bench, scene.mirror);
    float *q = bench_take<float>(bench, BENCH_LAYERS * row);
    float *out = bench_take<float>(bench, BENCH_LAYERS * row);
    bench_fill(bench, q, BENCH_LAYERS * row * 4, BENCH_FLOATS, 7);
    cudaGraphExec_t exec = bench_capture(bench, [&] {
        for (uint32_t l = 0; l < BENCH_LAYERS; l++) {
            struct kvops_attend args = scene.args;
            args.layer = l;
            args.seqs = seqs;
            args.q = q + l * row;
            args.out = out + l * row;
            bench_attend(bench, scene, args, l > 0 ? (int)bench.ops.overlap : 0);
        }
    });
    bench_time time = bench_measure(bench, [&] { bench_launch(bench, exec); });
    std::vector<float> host_q(STEP_HIDDEN), host_out(STEP_HIDDEN);
    bench_fetch(bench, host_q, q + layer * row);
    bench_fetch(bench, host_out, out + layer * row);
    result.error = twin_error(bench, scene, layer, host_q.data(), host_out.data(), {});
    if (!(result.error < ATTENTION_ERROR_MAX))
        bench_fail(bench, "wrong answer: attention differs from the host twin");
    result.kind = CUDA_BENCH_ATTENTION;
    result.kv_bytes = result.all_bytes = scene.layer_bytes * BENCH_LAYERS;
    report(bench, result, what, time);
    if (exec)
        (void)cudaGraphExecDestroy(exec);
    bench_drop(bench, mark);
}

/* --- the step */

static void check_step(bench &bench, const step &step, bench_scene &scene,
                       std::vector<float> &first_logits, double *error_out) {
    enum { LAYER = 17 };
    const step_layer &layer = step.layer[LAYER];
    std::vector<float> q(STEP_HIDDEN), out(STEP_HIDDEN), logits(STEP_VOCAB);
    std::vector<uint16_t> all(2 * step.rows * STEP_KV), own;

    bench_fetch(bench, q, layer.q);
    bench_fetch(bench, out, layer.attended);
    bench_fetch(bench, all, layer.chunk);
    bench_fetch(bench, logits, step.logits);
    for (uint32_t i = 0; i < 2 * BENCH_KV_HEADS; i++) {
        auto row = all.begin() + i * step.rows * BENCH_DIM;
        own.insert(own.end(), row, row + BENCH_DIM);
    }
    *error_out = twin_error(bench, scene, LAYER, q.data(), out.data(), own);
    if (!(*error_out < ATTENTION_ERROR_MAX))
        bench_fail(bench, "wrong answer: attention inside the step differs from the host twin");
    step_check_end(bench, step, scene, LAYER);
    step_check(bench, step, LAYER);
    if (first_logits.empty())
        first_logits = logits;
    else if (memcmp(first_logits.data(), logits.data(), logits.size() * sizeof(float)) != 0)
        bench_fail(bench, "wrong answer: a sequence's logits depend on its batch");
}

static void seal_once(bench &bench, int32_t *bad) {
    struct kvops_seal args = {};

    args.pool = bench.pool;
    args.block = bench.planes[bench.batch_max - 1][0]; /* only sequence 0 is compared */
    memcpy(args.pages, bench.pages[0] + 1, sizeof args.pages);
    args.bad_token = bad;
    bench_ok(bench, cuda_kvops_seal(&args, bench.stream));
}

/* The same step with attention left out: the difference is what attention costs inside it. */
static void run_step(bench &bench, step &step, const bench_case &what, bool seal,
                     std::vector<float> &first_logits) {
    size_t mark = bench.owned.size();
    struct cuda_bench_result result = {};
    bench_scene scene;
    bench_time with, without, sealing;

    bench_make_scene(bench, scene, what, true);
    step_make_activations(bench, step, scene, what.batch);
    int32_t *bad = bench_take<int32_t>(bench, BENCH_LAYERS * BENCH_KV_HEADS);
    cudaGraphExec_t all = bench_capture(bench, [&] { step_record(bench, step, scene, true); });
    cudaGraphExec_t rest = bench_capture(bench, [&] { step_record(bench, step, scene, false); });
    without = bench_measure(bench, [&] { bench_launch(bench, rest); });
    with = bench_measure(bench, [&] { bench_launch(bench, all); });
    check_step(bench, step, scene, first_logits, &result.error);
    result.kv_bytes = scene.layer_bytes * BENCH_LAYERS;
    result.kind = CUDA_BENCH_STEP;
    result.all_bytes = result.kv_bytes + step.weight_bytes;
    report(bench, result, what, with);
    with.median_ms -= without.median_ms;
    with.p99_ms -= without.median_ms;
    result.kind = CUDA_BENCH_IN_STEP;
    result.all_bytes = result.kv_bytes;
    report(bench, result, what, with);
    if (seal) {
        sealing = bench_measure(bench, [&] {
            bench_launch(bench, all);
            seal_once(bench, bad);
        });
        result.kind = CUDA_BENCH_SEAL;
        result.all_bytes = result.kv_bytes + step.weight_bytes;
        report(bench, result, what, sealing);
    }
    if (all)
        (void)cudaGraphExecDestroy(all);
    if (rest)
        (void)cudaGraphExecDestroy(rest);
    bench_drop(bench, mark);
}

/* --- the run */

static void open_device(bench &bench) {
    struct cudaDeviceProp properties;
    int sm_khz = 0, memory_khz = 0;
    size_t spare, total;

    if (!bench_ok(bench, cudaGetDeviceProperties(&properties, 0)) ||
        !bench_ok(bench, cuda_ops_open(&bench.ops)) ||
        !bench_ok(bench, cuda_kvops_open(&bench.kvops)) ||
        !bench_ok(bench, cudaMemGetInfo(&spare, &total)) ||
        !bench_ok(bench, cudaDeviceGetAttribute(&sm_khz, cudaDevAttrClockRate, 0)) ||
        !bench_ok(bench, cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, 0)) ||
        !bench_ok(bench, cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking)))
        return;
    memcpy(bench.device.name, properties.name, sizeof bench.device.name);
    bench.device.name[sizeof bench.device.name - 1] = 0;
    bench.device.multiprocessors = (uint32_t)properties.multiProcessorCount;
    bench.device.sm_mhz_max = (uint32_t)sm_khz / 1000;
    bench.device.memory_mhz = (uint32_t)memory_khz / 1000;
    bench.block_count = (uint32_t)layout_sealed_blocks(bench.options.tokens);
    bench.batch_max = bench.options.batch_max;
    while (bench.batch_max > 0 && bench_slots_for(bench, bench.batch_max) * bench_slot_bytes +
                                          (15ull << 30) + RESERVE_BYTES >
                                      spare)
        bench.batch_max--;
    if (bench.batch_max == 0)
        bench_fail(bench, "too little device memory: ask for fewer tokens");
}

static void run_cases(bench &bench) {
    const bench_case alone[] = {{"BF16", LAYOUT_TIER_BF16, 1},
                                {"K8V4", LAYOUT_K8V4, 1},
                                {"K6V4", LAYOUT_K6V4, 1},
                                {"K6V2", LAYOUT_K6V2, 1},
                                {"by age", BENCH_BY_AGE, 1}};
    const bench_case steps[] = {
        {"K8V4", LAYOUT_K8V4, 1}, {"K6V4", LAYOUT_K6V4, 1}, {"by age", BENCH_BY_AGE, 1}};
    uint32_t batches[2] = {1, bench.batch_max};
    step step = {};

    for (uint32_t b = 0; b < (batches[1] > 1 ? 2 : 1); b++)
        for (bench_case what : alone) {
            what.batch = batches[b];
            if (what.batch == 1 || what.tier != LAYOUT_TIER_BF16)
                run_attention(bench, what);
        }
    step_make_weights(bench, step);
    for (bench_case what : steps) {
        std::vector<float> first_logits;
        for (uint32_t b = 0; b < (batches[1] > 1 ? 2 : 1); b++) {
            what.batch = batches[b];
            run_step(bench, step, what, what.batch == 1 && batches[1] > 1, first_logits);
        }
    }
}

extern "C" const char *cuda_bench_run(const struct cuda_bench_options *options) {
    std::unique_ptr<bench> run(new bench());

    run->options = *options;
    run->random = 2026;
    open_device(*run);
    if (!run->error)
        bench_make_pool(*run);
    size_t mark = run->owned.size();
    bench_rates(*run);
    bench_drop(*run, mark);
    if (!run->error) {
        options->device(options->context, &run->device);
        run_cases(*run);
    }
    if (run->stream)
        (void)cudaStreamSynchronize(run->stream);
    bench_drop(*run, 0);
    if (run->stream)
        (void)cudaStreamDestroy(run->stream);
    return run->error;
}
