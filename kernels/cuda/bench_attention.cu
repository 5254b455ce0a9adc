/* kernels/cuda/bench_attention.cu - runs the cases of cuda_bench.h.
 *
 * Responsible for: which cases there are, what is compared with what, that a wrong answer ends the
 * run: attention goes through struct kvops_attend of the host twin as well.
 * Not responsible for: the kernels timed here.
 */
#include "kernels/cuda/bench_goals.cuh"
#include "kernels/cuda/bench_smaller.cuh"

#define ATTENTION_ERROR_MAX 5e-4
#define RESERVE_BYTES (6ull << 30) /* activations, plans, the target of the copy come from it */

static struct cuda_bench_result result_of(const bench &bench, const bench_case &what) {
    struct cuda_bench_result result = {};

    result.tier = what.name;
    result.batch = what.batch;
    result.tokens = what.tokens;
    result.ragged = what.tokens == 0;
    if (result.ragged)
        result.tokens = bench.options.tokens;
    return result;
}

/* --- attention alone: 32 layers one behind the other */

static void run_attention(bench &bench, const bench_case &what) {
    size_t mark = bench.owned.size(), row = (size_t)what.batch * STEP_HIDDEN;
    uint32_t layer = what.tier % 2 ? BENCH_LAYERS - 1 : 9;
    struct cuda_bench_result result = result_of(bench, what);
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
    result.error = bench_twin_error(bench, scene, layer, host_q.data(), host_out.data(), {});
    if (!(result.error < ATTENTION_ERROR_MAX))
        bench_fail(bench, "wrong answer: attention differs from the host twin");
    result.kind = CUDA_BENCH_ATTENTION;
    result.kv_bytes = result.all_bytes = scene.layer_bytes * BENCH_LAYERS;
    bench_report(bench, result, time);
    if (exec)
        (void)cudaGraphExecDestroy(exec);
    bench_drop(bench, mark);
}

/* --- bits: every sequence of a batch alone, call by call, with other units */

/* Attention of all layers into `out`: as one graph or call by call. */
static void attend_all(bench &bench, bench_scene &scene, const float *q, float *out, bool graph) {
    size_t row = (size_t)scene.host.size() * STEP_HIDDEN;
    struct kvops_seq *seqs = bench_upload(bench, scene.mirror);
    auto record = [&] {
        for (uint32_t l = 0; l < BENCH_LAYERS; l++) {
            struct kvops_attend args = scene.args;
            args.layer = l;
            args.seqs = seqs;
            args.q = q + l * row;
            args.out = out + l * row;
            bench_attend(bench, scene, args, graph && l > 0 ? (int)bench.ops.overlap : 0);
        }
    };
    cudaGraphExec_t exec = graph ? bench_capture(bench, record) : NULL;

    if (exec) {
        bench_launch(bench, exec);
        bench_ok(bench, cudaStreamSynchronize(bench.stream));
        (void)cudaGraphExecDestroy(exec);
    } else {
        record();
        bench_ok(bench, cudaStreamSynchronize(bench.stream));
    }
}

static size_t differences(const std::vector<float> &batch, const std::vector<float> &alone,
                          uint32_t count, uint32_t s) {
    size_t different = 0;

    for (uint32_t l = 0; l < BENCH_LAYERS; l++)
        for (size_t i = 0; i < STEP_HIDDEN; i++)
            different +=
                memcmp(&alone[l * STEP_HIDDEN + i],
                       &batch[((size_t)l * count + s) * STEP_HIDDEN + i], sizeof(float)) != 0;
    return different;
}

static void run_bits(bench &bench, const bench_case &what) {
    size_t mark = bench.owned.size(), row = (size_t)what.batch * STEP_HIDDEN;
    std::vector<float> batch(BENCH_LAYERS * row), alone(BENCH_LAYERS * STEP_HIDDEN);
    struct cuda_bench_result result = result_of(bench, what);
    bench_scene scene;

    bench_make_scene(bench, scene, what, false);
    float *q = bench_take<float>(bench, BENCH_LAYERS * row);
    float *own = bench_take<float>(bench, BENCH_LAYERS * STEP_HIDDEN);
    float *out = bench_take<float>(bench, BENCH_LAYERS * row);
    bench_fill(bench, q, BENCH_LAYERS * row * 4, BENCH_FLOATS, 7);
    attend_all(bench, scene, q, out, true);
    bench_fetch(bench, batch, out);
    for (uint32_t s = 0; s < what.batch && !bench.error; s++) {
        bench_case one = {what.name, what.tier, 1, bench_tokens(bench, what, s), s, s % 4};
        size_t inner = bench.owned.size();
        bench_scene single;
        bench_make_scene(bench, single, one, false);
        for (uint32_t l = 0; l < BENCH_LAYERS; l++)
            bench_ok(bench,
                     cudaMemcpyAsync(own + l * STEP_HIDDEN, q + l * row + s * STEP_HIDDEN,
                                     STEP_HIDDEN * 4, cudaMemcpyDeviceToDevice, bench.stream));
        attend_all(bench, single, own, out, false);
        alone.assign(alone.size(), NAN);
        bench_fetch(bench, alone, out);
        result.different += differences(batch, alone, what.batch, s);
        bench_drop(bench, inner);
    }
    if (result.different)
        bench_fail(bench, "wrong answer: a sequence's attention depends on its batch");
    result.kind = CUDA_BENCH_BITS;
    bench_report(bench, result, {0, 0});
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
    *error_out = bench_twin_error(bench, scene, LAYER, q.data(), out.data(), own);
    if (!(*error_out < ATTENTION_ERROR_MAX))
        bench_fail(bench, "wrong answer: attention inside the step differs from the host twin");
    step_check_end(bench, step, scene, LAYER);
    step_check(bench, step, LAYER);
    if (first_logits.empty())
        first_logits = logits;
    else if (memcmp(first_logits.data(), logits.data(), logits.size() * sizeof(float)) != 0)
        bench_fail(bench, "wrong answer: a sequence's logits depend on its batch");
}

/* The same step with attention left out, in turns: the difference is what attention costs inside
 * it. And, of batches that are not ragged, the step in which every sequence seals a block, other
 * sequences than the one compared. */
static bench_times time_step(bench &bench, step &step, const bench_case &what, bench_scene &scene) {
    int32_t *bad = bench_take<int32_t>(bench, BENCH_LAYERS * BENCH_KV_HEADS);
    cudaGraphExec_t all = bench_capture(bench, [&] { step_record(bench, step, scene, true); });
    cudaGraphExec_t rest = bench_capture(bench, [&] { step_record(bench, step, scene, false); });
    std::vector<std::function<void()>> runs = {[&] { bench_launch(bench, rest); },
                                               [&] { bench_launch(bench, all); }};

    if (bench.batch_max > 1 && what.tokens != 0)
        runs.push_back([&] {
            bench_launch(bench, all);
            for (uint32_t i = 0; i < what.batch; i++) {
                struct kvops_seal args = smaller_seal_of(bench, i, bad);
                bench_ok(bench, cuda_kvops_seal(&args, bench.stream));
            }
        });
    bench_times ms = bench_turns(bench, runs);
    if (all)
        (void)cudaGraphExecDestroy(all);
    if (rest)
        (void)cudaGraphExecDestroy(rest);
    return ms;
}

static void report_step(bench &bench, const step &step, struct cuda_bench_result result,
                        const bench_times &ms) {
    std::vector<float> attention(ms[0].size());

    for (size_t i = 0; i < attention.size(); i++)
        attention[i] = ms[1][i] - ms[0][i];
    result.kind = CUDA_BENCH_IN_STEP;
    result.all_bytes = result.kv_bytes;
    bench_report(bench, result, bench_time_of(attention));
    result.kind = CUDA_BENCH_STEP;
    result.all_bytes = result.kv_bytes + step.weight_bytes;
    bench_report(bench, result, bench_time_of(ms[1]));
    result.kind = CUDA_BENCH_STEP_SEAL;
    if (ms.size() > 2)
        bench_report(bench, result, bench_time_of(ms[2]));
}

/* Kernel by kernel first, then recorded and timed, then checked: the logits must be the same. */
static void run_step(bench &bench, step &step, const bench_case &what,
                     std::vector<float> &first_logits) {
    size_t mark = bench.owned.size();
    struct cuda_bench_result result = result_of(bench, what);
    std::vector<float> called(STEP_VOCAB);
    bench_scene scene;

    bench_make_scene(bench, scene, what, true);
    step_make_activations(bench, step, scene, what.batch);
    step_record(bench, step, scene, true);
    bench_ok(bench, cudaStreamSynchronize(bench.stream));
    bench_fetch(bench, called, step.logits);
    bench_times ms = time_step(bench, step, what, scene);
    check_step(bench, step, scene, first_logits, &result.error);
    if (!bench.error && memcmp(called.data(), first_logits.data(), STEP_VOCAB * sizeof(float)) != 0)
        bench_fail(bench, "wrong answer: a recorded step has other logits");
    result.kv_bytes = scene.layer_bytes * BENCH_LAYERS;
    report_step(bench, step, result, ms);
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

static void run_alone(bench &bench, uint32_t nine) {
    uint32_t tokens = bench.options.tokens;
    const bench_case alone[] = {
        {"BF16", LAYOUT_TIER_BF16, 1, tokens, 0, 0},   {"K8V4", LAYOUT_K8V4, 1, tokens, 0, 0},
        {"K6V4", LAYOUT_K6V4, 1, tokens, 0, 0},        {"K6V2", LAYOUT_K6V2, 1, tokens, 0, 0},
        {"by age", BENCH_BY_AGE, 1, tokens, 0, 0},     {"mixed", BENCH_QUARTERS, 1, tokens, 0, 0},
        {"K8V4", LAYOUT_K8V4, nine, tokens, 0, 0},     {"K6V4", LAYOUT_K6V4, nine, tokens, 0, 0},
        {"K6V2", LAYOUT_K6V2, nine, tokens, 0, 0},     {"by age", BENCH_BY_AGE, nine, tokens, 0, 0},
        {"mixed", BENCH_QUARTERS, nine, tokens, 0, 0}, {"mixed", BENCH_QUARTERS, nine, 0, 0, 0}};
    const bench_case bits[] = {{"K8V4", LAYOUT_K8V4, nine, tokens, 0, 0},
                               {"K8V4", LAYOUT_K8V4, 2, tokens, 0, 0},
                               {"mixed", BENCH_QUARTERS, nine, 0, 0, 0}};

    for (const bench_case &what : alone)
        if (what.batch == 1 || nine > 1)
            run_attention(bench, what);
    for (const bench_case &what : bits)
        if (nine > 1)
            run_bits(bench, what);
    if (tokens < SMALLER_CONTEXT)
        return;
    run_attention(bench, {"K8V4", LAYOUT_K8V4, 1, BENCH_SHORT_TOKENS, 0, 0});
    smaller_prefill(bench, "K8V4", LAYOUT_K8V4);
    smaller_prefill(bench, "K6V4", LAYOUT_K6V4);
    smaller_prefill(bench, "BF16", LAYOUT_TIER_BF16);
}

static void run_cases(bench &bench) {
    uint32_t tokens = bench.options.tokens, nine = bench.batch_max;
    const bench_case steps[] = {{"K8V4", LAYOUT_K8V4, 0, tokens, 0, 0},
                                {"K6V4", LAYOUT_K6V4, 0, tokens, 0, 0},
                                {"by age", BENCH_BY_AGE, 0, tokens, 0, 0}};
    step step = {};

    run_alone(bench, nine);
    step_make_weights(bench, step);
    for (bench_case what : steps) {
        std::vector<float> first_logits;
        for (uint32_t batch : {1u, nine}) {
            what.batch = batch;
            if (batch == 1 || nine > 1)
                run_step(bench, step, what, first_logits);
            if (nine == 1)
                break;
        }
    }
    if (nine > 1) {
        std::vector<float> first_logits;
        run_step(bench, step, {"mixed", BENCH_QUARTERS, nine, 0, 0, 0}, first_logits);
    }
    smaller_seal(bench);
    smaller_copies(bench);
    smaller_digests(bench, BENCH_PLANE_SLOTS, CUDA_BENCH_DIGEST_BLOCK);
    smaller_digests(bench,
                    (uint32_t)std::min<uint64_t>(SMALLER_DIGEST_SLOTS, bench.slot_count / 8 * 4),
                    CUDA_BENCH_DIGEST);
}

extern "C" int cuda_bench_built(void) {
    return 1;
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
    }
    if (!run->error && options->result) {
        run_cases(*run);
        bench_goals(*run);
    }
    if (run->stream)
        (void)cudaStreamSynchronize(run->stream);
    bench_drop(*run, 0);
    if (run->stream)
        (void)cudaStreamDestroy(run->stream);
    return run->error;
}
