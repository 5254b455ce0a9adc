/* engine/bench_quality.c - what each tier costs in quality, against our own BF16 KV.
 *
 * Responsible for: the lockstep of sessions and the sums over positions.
 * Not responsible for: printing.
 */
#include "engine/bench_quality.h"

#include "engine/engine_inner.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A chunk's logits of the reference are kept while the others run over it. */
enum { CHUNK = 64, SPOIL_EXPONENT = 3 };

struct side { /* a session at one tier */
    struct session *session;
    struct bench_quality_row *row;
    double kl_sum, log_prob_sum;
    uint64_t same;
    float *kl; /* [positions], for the quantile */
};

struct run {
    struct engine *engine;
    const struct bench_quality_options *options;
    struct engine_event *events;
    struct session *reference;
    struct side sides[BENCH_QUALITY_ROWS];
    uint32_t side_count;
    float *logits;     /* [CHUNK][vocab] of the reference */
    double *log_total; /* [CHUNK] */
    uint32_t *largest; /* [CHUNK] */
    uint64_t chunk_first;
    struct side *side; /* that is running, or NULL: the reference */
    double log_prob_sum;
    uint64_t positions;
};

static uint32_t argmax(const float *logits, uint32_t count) {
    uint32_t best = 0;

    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static double log_total(const float *logits, uint32_t count, float most) {
    double sum = 0;

    for (uint32_t i = 0; i < count; i++)
        sum += (double)expf(logits[i] - most);
    return (double)most + log(sum);
}

static int counted(const struct run *run, uint64_t position) {
    return position >= run->options->first_position && position + 1 < run->options->id_count;
}

static void take_reference(struct run *run, uint64_t position, const float *logits) {
    uint32_t vocab = run->engine->model.vocab_count;
    uint64_t at = position - run->chunk_first;

    memcpy(run->logits + at * vocab, logits, vocab * sizeof *logits);
    run->largest[at] = argmax(logits, vocab);
    run->log_total[at] = log_total(logits, vocab, logits[run->largest[at]]);
    if (!counted(run, position))
        return;
    run->log_prob_sum += (double)logits[run->options->ids[position + 1]] - run->log_total[at];
    run->positions++;
}

static void take_side(struct run *run, uint64_t position, const float *logits) {
    uint32_t vocab = run->engine->model.vocab_count;
    uint64_t at = position - run->chunk_first;
    const float *reference = run->logits + at * vocab;
    struct side *side = run->side;
    uint32_t largest = argmax(logits, vocab);
    double total = log_total(logits, vocab, logits[largest]);
    double reference_total = run->log_total[at], kl = 0;

    if (!counted(run, position))
        return;
    for (uint32_t i = 0; i < vocab; i++) {
        double p = (double)expf((float)((double)reference[i] - reference_total));
        kl += p * ((double)reference[i] - reference_total - (double)logits[i] + total);
    }
    side->kl[position - run->options->first_position] = (float)kl;
    side->kl_sum += kl;
    side->same += largest == run->largest[at];
    side->log_prob_sum += (double)logits[run->options->ids[position + 1]] - total;
}

static void take_row(void *context, uint64_t position, const float *logits) {
    struct run *run = context;

    if (run->side)
        take_side(run, position, logits);
    else
        take_reference(run, position, logits);
}

static enum kv_err feed(struct run *run, struct session *session, uint32_t count,
                        struct kv_diag *diag) {
    uint32_t events = 1;
    enum kv_err err =
        session_feed(session, run->options->ids + run->chunk_first, count, IMAGE_RAW, diag);

    while (err == KV_OK && events) {
        err = engine_step(run->engine, run->events, &events, diag);
        for (uint32_t i = 0; err == KV_OK && i < events; i++)
            if (run->events[i].kind == ENGINE_FAILED)
                err = run->events[i].err;
    }
    return err;
}

/* --- a page that is wrong */

/* The exponents of 64 fp16 scales raised. */
static void raise_scales(uint8_t *scales) {
    for (uint32_t token = 0; token < LAYOUT_PAGE_TOKENS; token++)
        scales[2 * token + 1] += SPOIL_EXPONENT << 2;
}

/* The exponents of K of page 1 in every layer and head, in a copy of META, of
 * the slot with the scales of K8I4, or of one of the two slots of FP8 that hold nothing else. */
static void spoil_copy(const struct layout_geometry *g, enum layout_tier tier, uint8_t *copy) {
    if (tier == LAYOUT_TIER_FP8) {
        for (uint64_t i = 0; i < layout_slot_raw_bytes(g); i++) {
            uint32_t size = (copy[i] & 0x7fu) + (SPOIL_EXPONENT << 3);
            copy[i] = (uint8_t)((copy[i] & 0x80) | (size < 0x7e ? size : 0x7e));
        }
        return;
    }
    for (uint32_t row = 0; row < g->layers * g->kv_heads; row++) {
        struct layout_at page = {row / g->kv_heads, row % g->kv_heads, 1};
        raise_scales(copy + (tier == LAYOUT_TIER_K8I4 ? layout_groups(g, page).off
                                                      : layout_tile(g, LAYOUT_META, page).off));
    }
}

static enum kv_err spoil(struct session *session, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    struct slots *slots = &engine->slots;
    const struct kvops_block *map = &session->blocks[0]->map;
    const struct layout_geometry *g = &slots->pool.geometry;
    enum layout_tier tier = session->views[0].tier;
    uint32_t first = tier == LAYOUT_TIER_FP8 ? 2 : LAYOUT_GROUP_ENTRY;
    uint64_t bytes = layout_tier_is_control(tier) ? layout_slot_raw_bytes(g) : slots->frame_bytes;
    uint8_t *copy = kv_alloc_aligned(engine->settings.alloc, bytes, 64);
    enum kv_err err = KV_OK;

    if (!copy)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a frame");
    for (uint32_t part = 0; err == KV_OK && part < (tier == LAYOUT_TIER_FP8 ? 2 : 1); part++) {
        uint8_t *at = layout_tier_is_control(tier) ? slots_at(slots, map->slot[first + part])
                                                   : slots_frame(slots, map->meta_frame);
        struct device_copy out = {copy, at, bytes}, in = {at, copy, bytes};
        err = device_copy_out(engine->device, DEVICE_STEP, &out, 1);
        spoil_copy(g, tier, copy);
        if (err == KV_OK)
            err = device_copy_in(engine->device, DEVICE_STEP, &in, 1);
    }
    kv_alloc_release(engine->settings.alloc, copy);
    return err == KV_OK ? KV_OK : engine_inner_device(engine, diag);
}

/* --- sessions */

static enum kv_err open_session(struct run *run, const char *name, struct image_policy policy,
                                struct session **session_out, struct kv_diag *diag) {
    struct session_settings settings = {
        .name = name, .policy = policy, .sampler = {.top_p = 1, .top_k = 1}};
    enum kv_err err = session_create(run->engine, &settings, session_out, diag);

    if (err == KV_OK)
        session_observe(*session_out, take_row, run);
    return err;
}

/* Every block at the tier after `step` steps, whatever its age. */
static struct image_policy policy_at(const struct bench_quality_options *options, uint32_t step) {
    return (struct image_policy){
        .recipe = options->recipe, .top_k8v8 = options->top_k8v8, .age_count = step};
}

static double bytes_per_token(const struct engine *engine, enum layout_tier tier) {
    const struct layout_geometry *g = &engine->model.geometry;
    uint64_t bytes = layout_tier_slots(tier) * layout_slot_raw_bytes(g);

    if (layout_tier_streams(tier) & 1u << LAYOUT_META)
        bytes += layout_meta_frame_bytes(g);
    return (double)bytes / LAYOUT_BLOCK_TOKENS;
}

static enum kv_err open_all(struct run *run, struct bench_quality_result *result,
                            struct kv_diag *diag) {
    const struct kv_alloc *alloc = run->engine->settings.alloc;
    uint32_t vocab = run->engine->model.vocab_count;
    const struct image_policy top = policy_at(run->options, 0);
    uint32_t tier_count = image_steps(&top) + 1;
    enum kv_err err;

    result->row_count = tier_count + (run->options->spoil != 0);
    run->events =
        kv_alloc_zeroed(alloc, 2 * run->engine->settings.sessions_max + 1, sizeof *run->events);
    run->logits = kv_alloc_zeroed(alloc, (size_t)CHUNK * vocab, sizeof *run->logits);
    run->log_total = kv_alloc_zeroed(alloc, CHUNK, sizeof *run->log_total);
    run->largest = kv_alloc_zeroed(alloc, CHUNK, sizeof *run->largest);
    if (!run->events || !run->logits || !run->log_total || !run->largest)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the quality bench");
    KV_TRY(open_session(
        run, "bench quality bf16",
        (struct image_policy){.recipe = IMAGE_RECIPE_BF16, .age_count = 0, .ages = {0}},
        &run->reference, diag));
    for (uint32_t i = 0; i < result->row_count; i++) {
        struct side *side = &run->sides[i];
        uint32_t step = i < tier_count ? i : 0;
        enum layout_tier tier = image_step_tier(&top, step);
        char name[64];
        snprintf(name, sizeof name, "bench quality %u", i);
        side->row = &result->rows[i];
        *side->row =
            (struct bench_quality_row){.tier = tier,
                                       .spoilt = i == tier_count,
                                       .bytes_per_token = bytes_per_token(run->engine, tier)};
        side->kl = kv_alloc_zeroed(alloc, run->options->id_count, sizeof *side->kl);
        if (!side->kl)
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the quality bench");
        KV_TRY(open_session(run, name, policy_at(run->options, step), &side->session, diag));
        run->side_count++;
    }
done:
    return err;
}

static enum kv_err run_chunks(struct run *run, struct kv_diag *diag) {
    const struct bench_quality_options *options = run->options;
    enum kv_err err = KV_OK;

    for (run->chunk_first = 0; run->chunk_first < options->id_count && err == KV_OK;
         run->chunk_first += CHUNK) {
        uint64_t left = options->id_count - run->chunk_first;
        uint32_t count = left < CHUNK ? (uint32_t)left : CHUNK;
        run->side = NULL;
        err = feed(run, run->reference, count, diag);
        for (uint32_t i = 0; i < run->side_count && err == KV_OK; i++) {
            uint32_t blocks = run->sides[i].session->block_count;
            run->side = &run->sides[i];
            err = feed(run, run->sides[i].session, count, diag);
            if (run->sides[i].row->spoilt && blocks == 0 && run->sides[i].session->block_count)
                err = spoil(run->sides[i].session, diag);
        }
        if (options->progress)
            options->progress(options->context, (uint32_t)run->chunk_first + count,
                              options->id_count);
    }
    return err;
}

static int by_value(const void *a, const void *b) {
    float one = *(const float *)a, two = *(const float *)b;

    return (one > two) - (one < two);
}

static void sum_up(struct run *run, struct bench_quality_result *result) {
    double n = (double)run->positions;

    result->perplexity = exp(-run->log_prob_sum / n);
    result->bf16_bytes_per_token = bytes_per_token(run->engine, LAYOUT_TIER_BF16);
    for (uint32_t i = 0; i < run->side_count; i++) {
        struct side *side = &run->sides[i];
        side->row->positions = run->positions;
        side->row->kl_mean = side->kl_sum / n;
        side->row->same_top = (double)side->same / n;
        side->row->perplexity_ratio = exp((run->log_prob_sum - side->log_prob_sum) / n);
        qsort(side->kl, run->positions, sizeof *side->kl, by_value);
        side->row->kl_999 = (double)side->kl[run->positions - 1 - run->positions / 1000];
    }
}

uint64_t bench_quality_slots(const struct bench_quality_options *options) {
    const struct image_policy top = policy_at(options, 0);
    uint64_t blocks = layout_sealed_blocks(options->id_count);
    /* Nothing is durable, so every block keeps its top tier's slots. */
    uint64_t coded = blocks * layout_tier_slots(image_top(&top)) + WINDOW_SLOTS;

    return blocks * LAYOUT_BLOCK_SLOTS + WINDOW_SLOTS +
           coded * (image_steps(&top) + 1 + (options->spoil != 0));
}

enum kv_err bench_quality(struct engine *engine, const struct bench_quality_options *options,
                          struct bench_quality_result *result_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = engine->settings.alloc;
    struct run run = {.engine = engine, .options = options};
    struct bench_quality_result result = {.row_count = 0};
    uint64_t needed = bench_quality_slots(options);
    enum kv_err err;

    if (options->id_count < options->first_position + 2 ||
        options->id_count > engine->model.context_tokens)
        return kv_diag_set(diag, KV_ERR_INVALID, "%u tokens: use %u to %u", options->id_count,
                           options->first_position + 2, engine->model.context_tokens);
    if (slots_available(&engine->slots, 0) < needed)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "%llu slots are needed and %u are free: use a larger slot budget",
                           (unsigned long long)needed, slots_available(&engine->slots, 0));
    KV_TRY(open_all(&run, &result, diag));
    KV_TRY(run_chunks(&run, diag));
    sum_up(&run, &result);
    *result_out = result;
done:
    for (uint32_t i = 0; i < BENCH_QUALITY_ROWS; i++) {
        if (run.sides[i].session)
            session_drop(run.sides[i].session);
        kv_alloc_release(alloc, run.sides[i].kl);
    }
    if (run.reference)
        session_drop(run.reference);
    kv_alloc_release(alloc, run.events);
    kv_alloc_release(alloc, run.logits);
    kv_alloc_release(alloc, run.log_total);
    kv_alloc_release(alloc, run.largest);
    return err;
}
