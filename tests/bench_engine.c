/* tests/bench_engine.c - prefill, decode and the quality of tiers on the default model.
 *
 * Responsible for: printing what bench_model and bench_quality measure.
 * Not responsible for: the product's own bench command (tools/).
 *
 * Usage: bench_engine [threads] [deepest], or bench_engine quality [threads] [tokens]. For speed
 * the ids are a fixed mix, not text: speed does not depend on them.
 */
#include "engine/bench_model.h"
#include "engine/bench_quality.h"
#include "engine/model/tokenizer.h"
#include "tests/support_engine.h"
#include "tests/testing.h"
#include "tools/licences.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* The licence texts as ids; returns how many of `count` there are. */
static uint32_t read_text(struct engine *engine, uint32_t *ids, uint32_t count) {
    struct licences_document document = {0, 1, (uint64_t)count * 6, NULL, 0};
    struct licences *licences = NULL;
    struct kv_diag diag = {""};
    char *text = NULL;
    struct tokenizer_ids out = {NULL, 0, 0, 0};

    if (licences_load(kv_alloc_system(), &licences, &diag) != KV_OK ||
        licences_document(licences, &document, &text, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    out.capacity = strlen(text) + 1;
    out.items = malloc(out.capacity * sizeof *out.items);
    assert_int_equal(tokenizer_encode(engine_tokenizer(engine), text, strlen(text), 0, &out, &diag),
                     KV_OK);
    count = out.count < count ? (uint32_t)out.count : count;
    memcpy(ids, out.items, count * sizeof *ids);
    free(out.items);
    kv_alloc_release(kv_alloc_system(), text);
    licences_drop(licences);
    return count;
}

static void tell(void *context, uint32_t done, uint32_t tokens) {
    (void)context;
    if (done % 1024 == 0)
        fprintf(stderr, "%u of %u tokens\n", done, tokens);
}

static void quality(uint32_t threads, uint32_t tokens) {
    struct support_engine_options options = support_engine_default();
    struct bench_quality_options bench = {.first_position = 512, .spoil = 1, .progress = tell};
    static uint32_t ids[8192];
    struct bench_quality_result result;
    struct kv_diag diag = {""};

    options.threads = threads;
    options.slots = (uint32_t)bench_quality_slots(tokens, 1) + 8;
    struct engine *engine = support_engine_real(&options);
    bench.ids = ids;
    bench.id_count = read_text(engine, ids, tokens);
    if (bench_quality(engine, &bench, &result, &diag) != KV_OK)
        fail_msg("bench_quality: %s", diag.text);
    printf("%u tokens of licence texts, bf16: perplexity %.4f, %.0f bytes per token\n",
           bench.id_count, result.perplexity, result.bf16_bytes_per_token);
    for (uint32_t i = 0; i < result.row_count; i++) {
        const struct bench_quality_row *row = &result.rows[i];
        printf("%-5s %-7s KL %.3e  99.9 %% %.3e  same top %.2f %%  perplexity ratio %.5f  %.0f "
               "bytes per token\n",
               layout_tier_name(row->tier), row->spoilt ? "spoilt" : "", row->kl_mean, row->kl_999,
               100 * row->same_top, row->perplexity_ratio, row->bytes_per_token);
    }
    engine_close(engine);
}

static uint32_t number(int argc, char **argv, int index, uint32_t usual) {
    return argc > index ? (uint32_t)strtoul(argv[index], NULL, 10) : usual;
}

int main(int argc, char **argv) {
    if (!testing_model_path())
        return 77;
    if (argc > 1 && strcmp(argv[1], "quality") == 0)
        quality(number(argc, argv, 2, 2), number(argc, argv, 3, 8192));
    else
        bench(ENGINE_SIMD_AUTO, number(argc, argv, 1, 2), number(argc, argv, 2, 7680));
    return 0;
}
