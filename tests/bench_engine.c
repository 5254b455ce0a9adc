/* tests/bench_engine.c - prefill, decode and the quality of tiers on the default model.
 *
 * Responsible for: printing what bench_model and bench_quality measure, beside plain C.
 * Not responsible for: the product's own bench command (tools/).
 *
 * Usage: bench_engine [threads] [deepest]. Ids are a fixed mix, not text: speed does not depend on
 * them.
 */
#include "engine/bench_model.h"
#include "tests/support_engine.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>

static void print_phase(const char *name, uint32_t depth, const struct bench_model_phase *phase,
                        const struct bench_model_result *result) {
    double rate = (double)result->rate_flops / (double)result->rate_ns;

    if (!phase->tokens)
        return;
    printf("%-8s depth %5u: %6llu tokens, %8.1f tok/s, %5.1f GFLOP/s = %4.1f %% of the FMA rate\n",
           name, depth, (unsigned long long)phase->tokens,
           (double)phase->tokens * 1e9 / (double)phase->ns,
           (double)phase->flops / (double)phase->ns,
           100 * (double)phase->flops / (double)phase->ns / rate);
    for (uint32_t i = 0; i < result->class_count; i++)
        if (phase->class_ns[i])
            printf("    %-20s %5.1f %%\n", result->class_names[i],
                   100 * (double)phase->class_ns[i] / (double)phase->ns);
}

static void bench(enum engine_simd simd, uint32_t threads, uint32_t deepest) {
    struct support_engine_options options = support_engine_default();
    struct bench_model_options bench = {.policy = {IMAGE_RECIPE_V3, 1, {32768}},
                                        .depths = {0, 2048, deepest},
                                        .depth_count = deepest ? 3 : 2,
                                        .decode_tokens = 32,
                                        .rate_iterations = 100000000};
    static uint32_t ids[8192];
    struct bench_model_result result;
    struct kv_diag diag = {""};

    options.simd = simd;
    options.threads = threads;
    struct engine *engine = support_engine_real(&options);
    struct engine_model model;
    engine_model(engine, &model);
    support_engine_ids(1, model.vocab_count, ids, 8192);
    bench.ids = ids;
    bench.id_count = 8192;
    if (bench_model(engine, &bench, &result, &diag) != KV_OK)
        fail_msg("bench_model: %s", diag.text);
    printf("%s, %u threads, FMA rate %.1f GFLOP/s, weights %.1f MB\n", model.simd_name, threads,
           (double)result.rate_flops / (double)result.rate_ns, (double)model.weight_bytes / 1e6);
    for (uint32_t i = 0; i < result.depth_count; i++) {
        print_phase("prefill", result.depths[i].depth, &result.depths[i].prefill, &result);
        print_phase("decode", result.depths[i].depth, &result.depths[i].decode, &result);
    }
    engine_close(engine);
}

int main(int argc, char **argv) {
    uint32_t threads = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 2;
    uint32_t deepest = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 7680;

    if (!testing_model_path())
        return 77;
    bench(ENGINE_SIMD_AUTO, threads, deepest);
    return 0;
}
