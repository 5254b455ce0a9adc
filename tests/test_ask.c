/* tests/test_ask.c - a question in pieces of a layer, between which others step.
 *
 * Responsible for: the bits of every row of a question that others step in the midst of; that they
 * do, behind every layer; that rows are looked at, and pages packed, while others may step.
 * Not responsible for: what is asked (test_probe.c, test_cli_needle.c), who steps (test_beside.c).
 *
 * Fails with BREAK_ASK_BREATHE (nobody steps before the last piece), BREAK_FORWARD_KEPT (a piece
 * goes on from what somebody else's step has left) and BREAK_FREEZE_AWAY (pages are packed by who
 * holds the engine).
 */
#include "engine/engine_inner.h"
#include "tests/support_engine.h"
#include "tests/testing.h"

#include <string.h>

enum { TOKENS = 900, TALK = 700, ASKS = 4, ROWS = 12, MANY = 20 };

static uint32_t ids[TOKENS], talk[TALK];

struct scene {
    struct engine *engine;
    struct session *talking;
    int others; /* step whenever they may */
    int away;
    uint32_t breaths, small, tokens, times_away;
};

static int on_breathe(void *context, int small) {
    struct scene *scene = context;
    struct engine_event events[2 * 8 + 1];
    struct kv_diag diag = {""};
    uint32_t count = 0;

    if (!scene->others)
        return 0;
    scene->breaths++;
    scene->small += small != 0;
    /* A synth model ends each of its turns at once. */
    if (scene->talking->state == SESSION_IDLE)
        assert_int_equal(session_generate(scene->talking, 5, &diag), KV_OK);
    assert_int_equal(engine_step(scene->engine, events, &count, &diag), KV_OK);
    for (uint32_t i = 0; i < count; i++)
        scene->tokens += events[i].kind == ENGINE_TOKEN || events[i].kind == ENGINE_PREFILLED;
    return 1;
}

static void on_away(void *context) {
    struct scene *scene = context;

    scene->away++;
    scene->times_away++;
}

static void on_back(void *context) {
    ((struct scene *)context)->away--;
}

struct heard {
    const struct scene *scene;
    struct kv_digest rows[ASKS][ROWS + 1];
    uint32_t count, away;
    uint32_t vocab;
};

static void on_row(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct heard *heard = context;

    assert_true(ask < ASKS && row <= ROWS);
    heard->rows[ask][row] = kv_digest_of(logits, heard->vocab * sizeof *logits);
    heard->count++;
    heard->away += heard->scene->away > 0;
}

/* Single rows and chunks, at the tiers of the session and at the floor, with a hole and without. */
static void ask_all(struct session *session, const struct scene *scene, struct heard *heard) {
    const struct session_range hole = {200, 300};
    struct session_ask asks[ASKS] = {
        {.ids = ids, .count = 1},
        {.ids = ids + 5, .count = ROWS, .rows_first = 3},
        {.ids = ids + 40, .count = ROWS, .hide = &hole, .hide_count = 1},
        {.ids = ids + 60, .count = ROWS, .floor = 1, .rows_first = ROWS - 1}};
    struct engine_model model;
    struct kv_diag diag = {""};

    engine_model(scene->engine, &model);
    memset(heard, 0, sizeof *heard);
    heard->scene = scene;
    heard->vocab = model.vocab_count;
    if (session_ask_all(session, asks, ASKS, on_row, heard, &diag) != KV_OK)
        fail_msg("%s", diag.text);
}

static int want_all(void *context, uint64_t first, uint32_t tokens) {
    (void)context, (void)first, (void)tokens;
    return 1;
}

/* A session that is held still is packed page by page while others may step. */
static void freeze(struct scene *scene, struct session *asked) {
    struct transfer_frozen frozen;
    struct kv_diag diag = {""};

    scene->times_away = 0;
    session_ask_begin(asked);
    assert_int_equal(transfer_freeze(asked, want_all, NULL, &frozen, &diag), KV_OK);
    session_ask_end(asked);
    assert_true(frozen.page_count > 1 && frozen.sinks.tokens > 0);
    assert_int_equal(scene->times_away, frozen.page_count + 1);
    assert_int_equal(scene->away, 0);
    transfer_frozen_release(scene->engine, &frozen);
}

static void others_step_within_a_question(void **state) {
    static struct heard alone, beside;
    struct scene scene = {0};
    struct support_engine_options options = support_engine_default();
    struct image_fingerprint prints[SESSION_PRINTS], print;
    struct kv_diag diag = {""};

    (void)state;
    options.poison = 1;
    options.hooks =
        (struct engine_hooks){.context = &scene, .away = on_away, .back = on_back, on_breathe};
    scene.engine = support_engine_synth(&options, "synth:small");
    uint32_t layers = scene.engine->model.geometry.layers;
    support_engine_ids(testing_seed("ids", 5), 256, ids, TOKENS);
    support_engine_ids(testing_seed("talk", 6), 256, talk, TALK);
    struct session *asked = support_engine_session(scene.engine, "asked", IMAGE_RECIPE_V3);
    scene.talking = support_engine_session(scene.engine, "talking", IMAGE_RECIPE_V3);
    support_engine_feed(asked, ids, TOKENS);
    /* Whole, then in pieces where nobody steps. */
    scene.engine->settings.hooks.breathe = NULL;
    ask_all(asked, &scene, &alone);
    scene.engine->settings.hooks.breathe = on_breathe;
    ask_all(asked, &scene, &beside);
    assert_memory_equal(beside.rows, alone.rows, sizeof alone.rows);
    assert_int_equal(alone.away, 0);
    assert_int_equal(session_fingerprint(asked, 1, &print, &diag), KV_OK);
    assert_int_equal(session_feed(scene.talking, talk, TALK, IMAGE_USER, &diag), KV_OK);
    assert_int_equal(session_generate(scene.talking, 5, &diag), KV_OK);
    scene.others = 1;
    for (uint32_t i = 0; i < MANY; i++) {
        scene.breaths = scene.small = scene.tokens = 0;
        ask_all(asked, &scene, &beside);
        assert_int_equal(scene.breaths, layers - 1);
        assert_int_equal(scene.small, scene.breaths);
        assert_true(scene.tokens > 0);
        assert_int_equal(beside.count, alone.count);
        assert_int_equal(beside.away, beside.count);
        assert_memory_equal(beside.rows, alone.rows, sizeof alone.rows);
    }
    assert_int_equal(session_fingerprints(asked, prints, &diag), KV_OK);
    assert_memory_equal(&prints[1], &print, sizeof print);
    scene.others = 0;
    assert_int_equal(session_fingerprint(asked, 0, &print, &diag), KV_OK);
    assert_memory_equal(&prints[0], &print, sizeof print);
    freeze(&scene, asked);
    assert_true(alone.count == 1 + ROWS - 3 + ROWS + 1);
    engine_close(scene.engine);
}

TESTING_MAIN(cmocka_unit_test(others_step_within_a_question))
