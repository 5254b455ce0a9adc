/* tools/cmd_bench_model.c - bench model and bench kv-quality.
 *
 * Responsible for: an engine without a store, the licence texts as ids, the figures in print beside
 * what the peer reaches on a machine of this kind.
 * Not responsible for: measuring (engine/bench_model.c, engine/bench_quality.c).
 */
#include "tools/cmd_bench.h"

#include "engine/bench_model.h"
#include "engine/bench_quality.h"
#include "engine/model/tokenizer.h"
#include "tools/json_text.h"
#include "tools/licences.h"
#include "tools/progress.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

enum {
    MODEL_TOKENS = 2048, /* deepest decode, unless --tokens says otherwise */
    MIDDLE_TOKENS = 2048,
    PLAIN_TOKENS = 512, /* the same in plain C, which is slow */
    DECODE_TOKENS = 32,
    QUALITY_TOKENS = 8192,
    RATE_ITERATIONS = 100000000
};

/* llama.cpp, 2 threads, f16 cache, on a 2-core x86 machine with AVX-512. Its deepest prefill was of
 * 8,000 tokens. */
static const struct peer {
    uint32_t depth;
    double prefill, decode; /* tokens per second; 0: not measured */
} peers[] = {{0, 0, 203}, {512, 490, 0}, {2048, 406, 99.5}, {7680, 230, 39.9}};

struct bench {
    struct cmd *cmd;
    struct engine *engine;
    uint32_t *ids;
    uint32_t id_count;
    struct progress progress;
    int on_cpu; /* whatever the settings say */
};

static void close_bench(struct bench *bench) {
    kv_alloc_release(bench->cmd->alloc, bench->ids);
    bench->ids = NULL;
    if (bench->engine != NULL)
        engine_close(bench->engine);
    bench->engine = NULL;
}

static enum kv_err take_ids(struct bench *bench, uint32_t want, struct kv_diag *diag) {
    const struct kv_alloc *alloc = bench->cmd->alloc;
    char *text = NULL;
    enum kv_err err = licences_text(alloc, 6 * (uint64_t)want, &text, diag);
    if (err != KV_OK)
        return err;
    size_t bytes = strlen(text);
    struct tokenizer_ids ids = {NULL, bytes, 0, 0};
    ids.items = kv_alloc_zeroed(alloc, bytes, sizeof *ids.items);
    if (ids.items == NULL)
        err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu ids", bytes);
    if (err == KV_OK)
        err = tokenizer_encode(engine_tokenizer(bench->engine), text, bytes, 0, &ids, diag);
    kv_alloc_release(alloc, text);
    if (err == KV_OK && ids.count < want)
        err =
            kv_diag_set(diag, KV_ERR_LIMIT,
                        "bench: the licence texts give %zu tokens; take fewer --tokens", ids.count);
    bench->ids = ids.items;
    bench->id_count = (uint32_t)(ids.count < want ? ids.count : want);
    return err;
}

static enum kv_err open_bench(struct bench *bench, enum engine_simd simd, uint32_t tokens,
                              struct kv_diag *diag) {
    const struct config *config = bench->cmd->config;
    uint8_t *model = NULL;
    uint64_t model_bytes = 0;
    const struct engine_settings settings = {.alloc = bench->cmd->alloc,
                                             .clock = bench->cmd->clock,
                                             .device = bench->on_cpu ? ENGINE_DEVICE_CPU
                                                                     : config->device.kind,
                                             .cuda_index = config->device.index,
                                             .device_memory_bytes = config->device_bytes,
                                             .graphs = 1,
                                             .simd = simd,
                                             .threads = config->threads,
                                             .sessions_max = 16,
                                             .slot_budget_bytes = config->slots_bytes};
    enum kv_err err =
        service_read_model(config->model, bench->cmd->alloc, &model, &model_bytes, diag);
    if (err == KV_OK)
        err = engine_open(&settings, model, (size_t)model_bytes, &bench->engine, diag);
    kv_alloc_release(bench->cmd->alloc, model);
    return err == KV_OK ? take_ids(bench, tokens, diag) : err;
}

/* Which sources and compiler made these figures: the numerics id stands for them. */
static void tell_build(const struct bench *bench) {
    char id[KV_DIGEST_HEX_BYTES];
    struct engine_model model;
    engine_model(bench->engine, &model);
    kv_digest_hex(&model.identity.numerics, id);
    if (bench->cmd->result != NULL)
        json_text(bench->cmd->result, "numerics", id);
    else
        printf("numerics id             %s, instructions %s\n", id, model.simd_name);
}

/* --- speed */

static double rate(const struct bench_model_phase *phase) {
    return phase->ns == 0 ? 0 : (double)phase->tokens * 1e9 / (double)phase->ns;
}

static double share_of_fma(const struct bench_model_phase *phase,
                           const struct bench_model_result *result) {
    if (phase->ns == 0 || result->rate_flops == 0)
        return 0;
    return (double)phase->flops / (double)phase->ns /
           ((double)result->rate_flops / (double)result->rate_ns);
}

static void phase_json(cJSON *to, const char *name, const struct bench_model_phase *phase,
                       const struct bench_model_result *result) {
    cJSON *item = cJSON_AddObjectToObject(to, name);
    cJSON *profile = NULL;
    cJSON_AddNumberToObject(item, "tokens", (double)phase->tokens);
    cJSON_AddNumberToObject(item, "ns", (double)phase->ns);
    cJSON_AddNumberToObject(item, "tokens_per_s", rate(phase));
    cJSON_AddNumberToObject(item, "share_of_fma_rate", share_of_fma(phase, result));
    profile = cJSON_AddObjectToObject(item, "profile_ns");
    for (uint32_t i = 0; i < result->class_count; i++)
        if (phase->class_ns[i] != 0)
            cJSON_AddNumberToObject(profile, result->class_names[i], (double)phase->class_ns[i]);
}

static void phase_text(const char *name, const struct bench_model_depth *at,
                       const struct bench_model_result *result) {
    int decode = name[0] == 'd';
    const struct bench_model_phase *phase = decode ? &at->decode : &at->prefill;
    if (phase->tokens == 0)
        return;
    printf("%-8s %6" PRIu32 "  %8.1f tokens/s", name, at->depth, rate(phase));
    if (result->rate_flops != 0)
        printf("  %5.1f %% of the FMA rate", 100 * share_of_fma(phase, result));
    for (size_t i = 0; i < sizeof peers / sizeof peers[0]; i++) {
        double peer = decode ? peers[i].decode : peers[i].prefill;
        if (peers[i].depth == at->depth && peer > 0)
            printf("  (peer %.1f)", peer);
    }
    printf("\n");
    for (uint32_t i = 0; i < result->class_count; i++)
        if (phase->class_ns[i] * 100 >= phase->ns)
            printf("    %-20s %5.1f %%\n", result->class_names[i],
                   100 * (double)phase->class_ns[i] / (double)phase->ns);
}

static void tell_speed(struct bench *bench, const char *name,
                       const struct bench_model_result *result) {
    struct engine_model model;
    engine_model(bench->engine, &model);
    double fma = result->rate_ns == 0 ? 0 : (double)result->rate_flops / (double)result->rate_ns;
    if (bench->cmd->result == NULL) {
        printf("%s on %s: instructions %s, FMA rate %.1f GFLOP/s, weights %.1f MB\n", name,
               model.device_name, model.simd_name, fma, (double)model.weight_bytes / 1e6);
        for (uint32_t i = 0; i < result->depth_count; i++) {
            phase_text("prefill", &result->depths[i], result);
            phase_text("decode", &result->depths[i], result);
        }
        return;
    }
    cJSON *to = cJSON_AddObjectToObject(bench->cmd->result, name);
    json_text(to, "simd", model.simd_name);
    cJSON_AddNumberToObject(to, "fma_gflops", fma);
    cJSON_AddNumberToObject(to, "weight_bytes", (double)model.weight_bytes);
    cJSON *depths = cJSON_AddArrayToObject(to, "depths");
    for (uint32_t i = 0; i < result->depth_count; i++) {
        cJSON *depth = cJSON_CreateObject();
        cJSON_AddNumberToObject(depth, "depth", result->depths[i].depth);
        phase_json(depth, "prefill", &result->depths[i].prefill, result);
        phase_json(depth, "decode", &result->depths[i].decode, result);
        cJSON_AddItemToArray(depths, depth);
    }
}

/* From the parts between depths to whole prefills, as the peer counts them. The single token that
 * goes before the decode at depth 0 is left out. */
static void add_up(struct bench_model_result *result) {
    for (uint32_t i = 2; i < result->depth_count; i++) {
        const struct bench_model_phase *before = &result->depths[i - 1].prefill;
        struct bench_model_phase *phase = &result->depths[i].prefill;
        phase->tokens += before->tokens;
        phase->ns += before->ns;
        phase->flops += before->flops;
        for (uint32_t k = 0; k < result->class_count; k++)
            phase->class_ns[k] += before->class_ns[k];
    }
}

static void on_progress(void *context, uint32_t done, uint32_t tokens) {
    progress_update(context, done, tokens);
}

static enum kv_err measure_speed(struct bench *bench, enum engine_simd simd, uint32_t deepest,
                                 struct bench_model_result *result, struct kv_diag *diag) {
    enum kv_err err = open_bench(bench, simd, deepest + DECODE_TOKENS + 1, diag);
    if (err != KV_OK)
        return err;
    struct bench_model_options options = {.ids = bench->ids,
                                          .id_count = bench->id_count,
                                          .policy = bench->cmd->config->policy,
                                          .depths = {0, PLAIN_TOKENS},
                                          .depth_count = 2,
                                          .decode_tokens = DECODE_TOKENS,
                                          .rate_iterations = RATE_ITERATIONS};
    if (deepest > MIDDLE_TOKENS)
        options.depths[options.depth_count++] = MIDDLE_TOKENS;
    if (deepest > PLAIN_TOKENS)
        options.depths[options.depth_count++] = deepest;
    progress_begin(&bench->progress, stderr, bench->cmd->clock, "measuring", "tokens");
    options.progress = on_progress;
    options.context = &bench->progress;
    err = bench_model(bench->engine, &options, result, diag);
    progress_end(&bench->progress);
    if (err == KV_OK)
        add_up(result);
    return err;
}

enum kv_err cmd_bench_model(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct bench bench = {.cmd = cmd};
    struct bench_model_result fast, plain;
    uint32_t deepest = (uint32_t)cmd_bench_tokens(cmd, MODEL_TOKENS);
    KV_TRY(measure_speed(&bench, cmd->config->simd, deepest, &fast, diag));
    cmd_bench_host(cmd);
    tell_build(&bench);
    tell_speed(&bench, "engine", &fast);
    close_bench(&bench);
    if (fast.rate_flops == 0) /* a GPU: plain C says nothing about it */
        goto done;
    bench.on_cpu = 1;
    KV_TRY(measure_speed(&bench, ENGINE_SIMD_C, PLAIN_TOKENS, &plain, diag));
    tell_speed(&bench, "plain_c", &plain);
    double prefill = rate(&fast.depths[1].prefill) / rate(&plain.depths[1].prefill);
    double decode = rate(&fast.depths[1].decode) / rate(&plain.depths[1].decode);
    if (cmd->result != NULL) {
        cJSON_AddNumberToObject(cmd->result, "prefill_over_plain_c", prefill);
        cJSON_AddNumberToObject(cmd->result, "decode_over_plain_c", decode);
    } else {
        printf("beside plain C at %d tokens: prefill %.1f ×, decode %.1f × as fast\n", PLAIN_TOKENS,
               prefill, decode);
    }
done:
    close_bench(&bench);
    return err;
}

/* --- quality */

static void quality_json(cJSON *to, const struct bench_quality_result *result) {
    cJSON_AddNumberToObject(to, "perplexity_bf16", result->perplexity);
    cJSON_AddNumberToObject(to, "bf16_bytes_per_token", result->bf16_bytes_per_token);
    cJSON *rows = cJSON_AddArrayToObject(to, "tiers");
    for (uint32_t i = 0; i < result->row_count; i++) {
        const struct bench_quality_row *row = &result->rows[i];
        cJSON *item = cJSON_CreateObject();
        json_text(item, "tier", layout_tier_name(row->tier));
        cJSON_AddBoolToObject(item, "spoilt", row->spoilt);
        cJSON_AddNumberToObject(item, "positions", (double)row->positions);
        cJSON_AddNumberToObject(item, "kl_mean", row->kl_mean);
        cJSON_AddNumberToObject(item, "kl_999", row->kl_999);
        cJSON_AddNumberToObject(item, "same_top", row->same_top);
        cJSON_AddNumberToObject(item, "perplexity_ratio", row->perplexity_ratio);
        cJSON_AddNumberToObject(item, "bytes_per_token", row->bytes_per_token);
        cJSON_AddItemToArray(rows, item);
    }
}

static void quality_text(const struct bench_quality_result *result) {
    printf("perplexity in bf16 %.4f, %.0f bytes per token\n", result->perplexity,
           result->bf16_bytes_per_token);
    printf("%-22s %9s %12s %12s %9s %11s %9s\n", "tier", "positions", "KL mean", "KL 99.9 %",
           "same top", "perplexity", "bytes");
    for (uint32_t i = 0; i < result->row_count; i++) {
        const struct bench_quality_row *row = &result->rows[i];
        printf("%-4s %-17s %9" PRIu64 " %12.6f %12.6f %8.2f%% %10.5f× %9.0f\n",
               layout_tier_name(row->tier), row->spoilt ? "one page spoilt" : "", row->positions,
               row->kl_mean, row->kl_999, 100 * row->same_top, row->perplexity_ratio,
               row->bytes_per_token);
    }
}

enum kv_err cmd_bench_quality(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct bench bench = {.cmd = cmd};
    struct bench_quality_result result;
    uint32_t tokens = (uint32_t)cmd_bench_tokens(cmd, QUALITY_TOKENS);
    const struct image_policy *policy = &cmd->config->policy;
    if (policy->recipe == IMAGE_RECIPE_BF16)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "bench kv-quality: recipe bf16 is what the tiers are compared with; "
                           "take --recipe v3, v2, v1 or fp8");
    KV_TRY(open_bench(&bench, cmd->config->simd, tokens, diag));
    progress_begin(&bench.progress, stderr, cmd->clock, "comparing the tiers", "tokens");
    const struct bench_quality_options options = {.ids = bench.ids,
                                                  .id_count = bench.id_count,
                                                  .recipe = policy->recipe,
                                                  .top_k8v8 = policy->top_k8v8,
                                                  .first_position =
                                                      LAYOUT_SINK_TOKENS + LAYOUT_BLOCK_TOKENS * 2,
                                                  .spoil = 1,
                                                  .progress = on_progress,
                                                  .context = &bench.progress};
    err = bench_quality(bench.engine, &options, &result, diag);
    progress_end(&bench.progress);
    KV_TRY(err);
    cmd_bench_host(cmd);
    tell_build(&bench);
    if (cmd->result != NULL)
        quality_json(cmd->result, &result);
    else
        quality_text(&result);
done:
    close_bench(&bench);
    return err;
}
