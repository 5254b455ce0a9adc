/* tests/gpu_synth.c - the synth model of 8B geometry on a GPU: facts over its whole context.
 *
 * Responsible for: the closed form of K and V against real prefills at four depths; facts at every
 * tier and edge of a short and a full session, absent keys, two sessions that hold the same keys,
 * a tier map that lies; times; all as text and JSON. Ends with `N passed, N failed`.
 * Not responsible for: single kernels (gpu_parity.cu), small geometry (test_synth.c).
 *
 * Usage: gpu_synth OUT.json COMMIT [cpu]; `cpu` is synth:small on the processor, to try the
 * program.
 */
#include "engine/engine_inner.h"
#include "tests/support_synth.h"
#include "tests/support_tally.h"
#include "tools/service.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHORT_TOKENS = 4096, FACTS_MAX = 192, ABSENT = 64, STRETCH = 255, STRETCHES = 3 };
enum { FILL_THREADS = 8 };

static FILE *results;
static struct synth synth;
static struct engine *engine;
static struct synth_rows *rows;

static void open_all(int cpu) {
    struct engine_settings settings = {.alloc = kv_alloc_system(),
                                       .clock = kv_clock_system(),
                                       .device = cpu ? ENGINE_DEVICE_CPU : ENGINE_DEVICE_CUDA,
                                       .device_memory_bytes = UINT64_MAX,
                                       .graphs = 1,
                                       .threads = cpu ? 2 : 16,
                                       .sessions_max = 32,
                                       .slot_budget_bytes = (uint64_t)(cpu ? 256 : 10240) << 20,
                                       .poison_free_slots = 1,
                                       .shuffle_seed = 7};
    const char *name = cpu ? "synth:small" : "synth:8b";
    struct engine_model model;
    struct kv_diag diag = {""};
    uint8_t *bytes = NULL;
    uint64_t size = 0;
    double begun = tally_seconds(), made, opened;

    tally_need(synth_parse(name, &synth, &diag), &diag, name);
    tally_need(service_read_model(name, kv_alloc_system(), &bytes, &size, &diag), &diag, name);
    made = tally_seconds();
    tally_need(engine_open(&settings, bytes, size, &engine, &diag), &diag, "engine_open");
    opened = tally_seconds();
    kv_alloc_release(kv_alloc_system(), bytes);
    tally_need(synth_rows_make(&synth, kv_alloc_system(), &rows, &diag), &diag, "rows");
    engine_model(engine, &model);
    printf("     %s on %s: %.2f GB made in %.1f s, opened in %.1f s, tables of rows %.1f s\n", name,
           model.device_name, (double)size * 1e-9, made - begun, opened - made,
           tally_seconds() - opened);
    fprintf(results,
            " \"model\": \"%s\", \"device\": \"%s\", \"made_s\": %.2f, \"opened_s\": %.2f,\n", name,
            model.device_name, made - begun, opened - made);
}

/* --- a session */

struct scene {
    const char *name;
    struct session *session;
    uint32_t *ids;
    uint32_t tokens, count, graded;
    struct support_synth_fact facts[FACTS_MAX];
};

/* A quarter of the length at each tier. */
static struct session *make_session(const char *name, uint32_t tokens) {
    struct session_settings settings = {
        .name = name,
        .policy = {.recipe = IMAGE_RECIPE_V3,
                   .age_count = 3,
                   .ages = {tokens / 4, tokens / 2, tokens / 4 * 3}},
        .sampler = {.top_p = 1, .top_k = 1, .seed = 1}};
    struct session *session = NULL;
    struct kv_diag diag = {""};

    tally_need(session_create(engine, &settings, &session, &diag), &diag, "session_create");
    return session;
}

/* Words of facts: keys of both sessions, then two values for each of the first, then the second's;
 * the last are absent. */
static uint32_t facts_most(void) {
    uint32_t most = (synth.words / 2 - 8) / 5;

    return most < FACTS_MAX ? most : FACTS_MAX;
}

/* Both sessions ask the same keys; values are their own. A graded word stands in one place, or the
 * loop behind it would be read at two tiers. */
static void add(struct scene *scene, enum support_synth_kind kind, uint64_t at, uint32_t own) {
    struct support_synth_fact *fact = &scene->facts[scene->count];
    uint32_t value = facts_most() * (1 + 2 * own) + 2 * scene->count;

    if (scene->count == facts_most())
        return;
    *fact = (struct support_synth_fact){kind, scene->count, value, value + 1, at};
    if (kind == SUPPORT_GRADED)
        fact->value = synth.words - synth.families + (2 * scene->graded++ + own) % synth.families;
    support_synth_plant(fact, scene->ids);
    scene->count++;
}

static void plan(struct scene *scene, const char *name, uint32_t tokens, uint32_t own) {
    uint32_t blocks = (uint32_t)layout_sealed_blocks(tokens);
    uint32_t stride = 4 * blocks / (facts_most() - 4) + 1;

    *scene = (struct scene){.name = name, .tokens = tokens};
    scene->ids = calloc(tokens + STRETCH + 1, sizeof *scene->ids);
    scene->session = make_session(name, tokens);
    support_synth_filler(&synth, 11 + own, scene->ids, tokens + STRETCH + 1);
    add(scene, SUPPORT_GRADED, tokens - 200, own);
    add(scene, SUPPORT_SIX, tokens - 100, own);
    add(scene, SUPPORT_PLAIN, tokens - SUPPORT_SYNTH_PAIR - 1, own);
    add(scene, SUPPORT_PLAIN, 20, own);
    for (uint32_t block = 0; block < blocks; block += stride) {
        uint64_t first = LAYOUT_SINK_TOKENS + (uint64_t)block * LAYOUT_BLOCK_TOKENS;
        add(scene, SUPPORT_GRADED, first + 100, own);
        add(scene, SUPPORT_SIX, first + 2 * LAYOUT_PAGE_TOKENS - 3, own);
        add(scene, SUPPORT_PLAIN, first + LAYOUT_BLOCK_TOKENS - 1, own);
        add(scene, SUPPORT_PLAIN, first + LAYOUT_PAGE_TOKENS - 1, own);
    }
}

/* --- closed form */

static void tell_difference(const char *what, const struct support_synth_difference *difference) {
    char text[256];

    snprintf(text, sizeof text,
             "%s: %llu elements, %llu zeros are nearly zero, %llu are the next value behind a "
             "second key, %llu wrong (by %u)",
             what, (unsigned long long)difference->elements,
             (unsigned long long)difference->nearly_zero, (unsigned long long)difference->rounded,
             (unsigned long long)difference->wrong, difference->steps_max);
    (void)tally_check(difference->elements > 0 && difference->wrong == 0, text);
    fprintf(
        results,
        " \"%s\": {\"elements\": %llu, \"nearly_zero\": %llu, \"rounded\": %llu, \"wrong\": %llu, "
        "\"steps_max\": %u},\n",
        what, (unsigned long long)difference->elements, (unsigned long long)difference->nearly_zero,
        (unsigned long long)difference->rounded, (unsigned long long)difference->wrong,
        difference->steps_max);
}

static void compare(const struct fill_stretch *stretch, uint16_t *chunks[2],
                    struct support_synth_difference *difference) {
    struct kv_diag diag = {""};

    tally_need(support_synth_last(engine, chunks[0], &diag), &diag, "the last chunk");
    tally_need(support_synth_rows(rows, stretch, chunks[1], &diag), &diag, "closed form");
    support_synth_compare(&synth, stretch, chunks[0], chunks[1], difference);
}

static void ignore(void *context, uint64_t row, const float *logits) {
    (void)context;
    (void)row;
    (void)logits;
}

/* K and V of the tokens that follow, computed for real behind what the session has. */
static void compare_ahead(struct scene *scene, uint16_t *chunks[2]) {
    struct support_synth_difference difference = {0};
    uint64_t from = scene->session->n_kv;
    const struct fill_stretch stretch = {scene->ids + from, from, STRETCH, fill_chunk_rows(engine)};
    const struct session_ask ask = {
        .ids = scene->ids + from, .count = STRETCH, .rows_first = STRETCH - 1};
    struct kv_diag diag = {""};
    char what[64];
    double begun = tally_seconds();

    tally_need(session_ask(scene->session, &ask, ignore, NULL, &diag), &diag, "session_ask");
    snprintf(what, sizeof what, "prefill of 255 at %llu", (unsigned long long)from);
    printf("     %s: %.1f ms\n", what, (tally_seconds() - begun) * 1e3);
    compare(&stretch, chunks, &difference);
    tell_difference(what, &difference);
}

/* Every chunk of the short session is computed for real. */
static void prefill(struct scene *scene, uint16_t *chunks[2]) {
    struct support_synth_difference difference = {0};
    struct engine_event events[128];
    struct kv_diag diag = {""};
    double begun = tally_seconds();

    tally_need(session_feed(scene->session, scene->ids, scene->tokens, IMAGE_RAW, &diag), &diag,
               "feed");
    for (uint64_t from = 0; from < scene->tokens; from = scene->session->n_kv) {
        uint32_t count;
        tally_need(engine_step(engine, events, &count, &diag), &diag, "engine_step");
        for (uint32_t i = 0; i < count; i++)
            if (events[i].kind == ENGINE_FAILED)
                tally_need(events[i].err, &diag, "a step");
        const struct fill_stretch stretch = {scene->ids + from, from,
                                             (uint32_t)(scene->session->n_kv - from),
                                             fill_chunk_rows(engine)};
        compare(&stretch, chunks, &difference);
    }
    printf("     %u tokens prefilled and compared in %.2f s\n", scene->tokens,
           tally_seconds() - begun);
    tell_difference("prefill of the short session", &difference);
}

static void fill_up(struct scene *scene, uint16_t *chunks[2]) {
    struct kv_diag diag = {""};
    double took = 0;

    for (uint32_t part = 1; part <= STRETCHES; part++) {
        uint64_t from = scene->session->n_kv;
        uint64_t end = (uint64_t)scene->tokens * part / STRETCHES;
        const struct fill fill =
            support_synth_fill(rows, scene->ids + from, (uint32_t)(end - from), FILL_THREADS);
        double begun = tally_seconds();
        tally_need(fill_session(scene->session, &fill, &diag), &diag, "fill_session");
        took += tally_seconds() - begun;
        compare_ahead(scene, chunks);
    }
    printf("     %u tokens filled in %.2f s\n", scene->tokens, took);
    fprintf(results, " \"filled\": {\"tokens\": %u, \"s\": %.2f},\n", scene->tokens, took);
}

/* --- answers */

static enum layout_tier tier_of(const struct scene *scene, const struct support_synth_fact *fact) {
    const struct session *session = scene->session;
    uint64_t at = fact->at + 1;
    uint64_t window = LAYOUT_SINK_TOKENS + (uint64_t)session->block_count * LAYOUT_BLOCK_TOKENS;

    return at < LAYOUT_SINK_TOKENS || at >= window
               ? LAYOUT_TIER_BF16
               : (enum layout_tier)session->views[(at - LAYOUT_SINK_TOKENS) / LAYOUT_BLOCK_TOKENS]
                     .tier;
}

struct tally {
    uint32_t asked, right;
    float margin;
};

static void ask_all(const struct scene *scene, const struct scene *other, const char *what) {
    struct support_synth_answer answers[FACTS_MAX];
    struct tally tallies[LAYOUT_TIER_COUNT] = {0};
    uint32_t right = 0, thief = 0;
    char text[160];
    double begun = tally_seconds();

    support_synth_ask(scene->session, scene->facts, scene->count, answers);
    printf("     %s: %u questions in %.2f s\n", what, scene->count, tally_seconds() - begun);
    for (uint32_t i = 0; i < scene->count; i++) {
        enum layout_tier tier = tier_of(scene, &scene->facts[i]);
        struct tally *tally = &tallies[tier];
        int good = answers[i].id == support_synth_expect(&synth, &scene->facts[i], tier);
        tally->margin = tally->asked == 0 || answers[i].margin < tally->margin ? answers[i].margin
                                                                               : tally->margin;
        tally->asked++;
        tally->right += good;
        right += good;
        thief += i < other->count &&
                 answers[i].id == support_synth_expect(&synth, &other->facts[i],
                                                       tier_of(other, &other->facts[i]));
        if (!good)
            printf("     fact %u (kind %d at %llu, %s): %u by %.1f\n", i, (int)scene->facts[i].kind,
                   (unsigned long long)scene->facts[i].at, layout_tier_name(tier), answers[i].id,
                   (double)answers[i].margin);
    }
    snprintf(text, sizeof text, "%s: %u of %u right, %u of another session", what, right,
             scene->count, thief);
    (void)tally_check(right == scene->count && thief == 0, text);
    fprintf(results, " \"%s\": {\"tokens\": %u, \"asked\": %u, \"right\": %u, \"thief\": %u", what,
            scene->tokens, scene->count, right, thief);
    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++) {
        if (!tallies[tier].asked)
            continue;
        printf("       %-5s %3u of %3u, least margin %.1f\n",
               layout_tier_name((enum layout_tier)tier), tallies[tier].right, tallies[tier].asked,
               (double)tallies[tier].margin);
        fprintf(results, ", \"%s\": [%u, %u, %.1f]", layout_tier_name((enum layout_tier)tier),
                tallies[tier].right, tallies[tier].asked, (double)tallies[tier].margin);
    }
    fprintf(results, "},\n");
}

static void ask_absent(const struct scene *scene) {
    struct support_synth_fact absent[ABSENT] = {0};
    struct support_synth_answer answers[ABSENT];
    uint32_t nothing = 0, count = synth.words / 2 - 5 * facts_most();
    char text[96];

    count = count < ABSENT ? count : ABSENT;
    for (uint32_t i = 0; i < count; i++)
        absent[i] =
            (struct support_synth_fact){.kind = SUPPORT_ABSENT, .key = synth.words / 2 - count + i};
    support_synth_ask(scene->session, absent, count, answers);
    for (uint32_t i = 0; i < count; i++)
        nothing += answers[i].id == SYNTH_NOTHING;
    snprintf(text, sizeof text, "%s: %u of %u absent keys give nothing", scene->name, nothing,
             count);
    (void)tally_check(nothing == count && count > 0, text);
}

/* Blocks read at the tier below the map's: the answers name what was read, which is not the map. */
static void lie(struct scene *scene, const struct scene *other) {
    struct kvops_block *views = scene->session->views;
    uint32_t blocks = scene->session->block_count, moved = 0;

    for (uint32_t block = 0; block < blocks; block++)
        if (views[block].tier != LAYOUT_K6V2) {
            views[block].tier =
                (uint8_t)(views[block].tier == LAYOUT_K8V4 ? LAYOUT_K6V3 : LAYOUT_K6V2);
            moved++;
        }
    (void)tally_check(moved > blocks / 2, "tiers were lowered behind the policy's back");
    ask_all(scene, other, "lowered");
}

int main(int argc, char **argv) {
    int cpu = argc > 3 && strcmp(argv[3], "cpu") == 0;
    static struct scene brief, full;
    uint16_t *chunks[2];

    if (argc < 3)
        return printf("usage: gpu_synth OUT.json COMMIT [cpu]\n"), 2;
    results = fopen(argv[1], "w");
    if (!results || setvbuf(stdout, NULL, _IOLBF, 0) != 0)
        return 2;
    fprintf(results, "{\"commit\": \"%s\",\n", argv[2]);
    open_all(cpu);
    for (uint32_t i = 0; i < 2; i++)
        chunks[i] = calloc(1, fill_chunk_bytes(engine));
    plan(&brief, "short", cpu ? SHORT_TOKENS / 2 : SHORT_TOKENS, 0);
    plan(&full, "full", synth.context_tokens - STRETCH - 1, 1);
    prefill(&brief, chunks);
    ask_all(&brief, &full, "short");
    fill_up(&full, chunks);
    ask_all(&full, &brief, "full");
    ask_absent(&full);
    ask_absent(&brief);
    lie(&full, &brief);
    fprintf(results, " \"passed\": %d, \"failed\": %d}\n", tally_passed(), tally_failed());
    fclose(results);
    return tally_end();
}
