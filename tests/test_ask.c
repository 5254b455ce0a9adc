/* tests/test_ask.c - a question in pieces of a layer, between which others step.
 *
 * Responsible for: the bits of every row of a question that others step in the midst of; that they
 * do, behind every layer; that rows are looked at, and pages packed, while others may step; that a
 * question follows layers that arrive one after another.
 * Not responsible for: what is asked (test_probe.c, test_cli_needle.c), who steps (test_beside.c).
 *
 * Fails with BREAK_ASK_BREATHE (nobody steps before the last piece), BREAK_FORWARD_KEPT (a piece
 * goes on from what somebody else's step has left), BREAK_FREEZE_AWAY (pages are packed by who
 * holds the engine), BREAK_LAYER_GATE (a question reads what has not arrived) and BREAK_PATIENCE
 * (others step once where nobody waits for the answers).
 */
#include "engine/engine_inner.h"
#include "tests/support_engine.h"
#include "tests/testing.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 900, TALK = 700, ASKS = 4, ROWS = 12, MANY = 20 };

static uint32_t ids[TOKENS], talk[TALK];

struct bringer;

struct scene {
    struct bringer *bringer; /* brings a layer whenever this thread waits; or NULL */
    struct engine *engine;
    struct session *talking, *also; /* also: asked within a question; or NULL */
    struct image_fingerprint print; /* of it */
    int others;                     /* step whenever they may */
    int away;
    uint32_t breaths, small, tokens, times_away;
};

/* Two questions in pieces at once. */
static void ask_within(struct scene *scene) {
    struct session *also = scene->also;
    struct image_fingerprint print;
    struct kv_diag diag = {""};

    scene->also = NULL;
    if (session_fingerprint(also, 0, &print, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    assert_memory_equal(&print, &scene->print, sizeof print);
}

static int on_breathe(void *context, int small) {
    struct scene *scene = context;
    struct engine_event events[2 * 8 + 1];
    struct kv_diag diag = {""};
    uint32_t count = 0;

    if (!scene->others)
        return 0;
    if (scene->also)
        ask_within(scene);
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

/* --- layers that arrive */

struct bringer {
    struct session *session;
    struct transfer_part parts[64];
    uint8_t *bytes[64];
    uint32_t count, layers, fails_at;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint32_t wanted; /* layers, under the lock */
};

/* Layer `layer` of a part, of which [layer] is the first dimension. From `bytes`, or poison. */
static void put_layer(const struct bringer *bringer, const struct transfer_part *part,
                      const uint8_t *bytes, uint32_t layer) {
    uint64_t first = layer * (part->size / bringer->layers), at = 0;
    uint64_t end = first + part->size / bringer->layers;
    struct transfer_part own = {.stream = part->stream, .size = end - first};
    uint8_t *poison = malloc(own.size);

    assert_non_null(poison);
    memset(poison, 0xff, own.size);
    for (uint32_t i = 0; i < part->piece_count; at += part->pieces[i++].size) {
        uint64_t from = at > first ? at : first;
        uint64_t to = at + part->pieces[i].size < end ? at + part->pieces[i].size : end;
        if (from < to)
            own.pieces[own.piece_count++] =
                (struct transfer_piece){(uint8_t *)part->pieces[i].bytes + (from - at), to - from};
    }
    assert_int_equal(
        transfer_part_write(session_engine(bringer->session), &own, bytes ? bytes + first : poison),
        KV_OK);
    free(poison);
}

static void put_all(const struct bringer *bringer, uint32_t layer, int poison) {
    for (uint32_t i = 0; i < bringer->count; i++)
        put_layer(bringer, &bringer->parts[i], poison ? NULL : bringer->bytes[i], layer);
}

static void want(struct bringer *bringer, uint32_t more) {
    pthread_mutex_lock(&bringer->lock);
    bringer->wanted += more;
    pthread_cond_signal(&bringer->moved);
    pthread_mutex_unlock(&bringer->lock);
}

static void *bring_main(void *context) {
    struct bringer *bringer = context;

    for (uint32_t layer = 0; layer < bringer->layers; layer++) {
        pthread_mutex_lock(&bringer->lock);
        while (bringer->wanted <= layer)
            pthread_cond_wait(&bringer->moved, &bringer->lock);
        pthread_mutex_unlock(&bringer->lock);
        if (layer == bringer->fails_at) {
            transfer_layers_failed(bringer->session, KV_ERR_IO);
            return NULL;
        }
        put_all(bringer, layer, 0);
        transfer_layers_arrived(bringer->session, layer + 1);
    }
    return NULL;
}

/* The session is WAKING, all its planes are poison, and the bringer waits for the first to wait. */
static void begin_bringing(struct bringer *bringer, struct session *session, uint32_t fails_at) {
    struct engine *engine = session_engine(session);

    *bringer = (struct bringer){.session = session, .fails_at = fails_at};
    bringer->layers = engine->model.geometry.layers;
    for (uint32_t b = 0; b < session->block_count; b++)
        bringer->count += transfer_block_parts(session->blocks[b], bringer->parts + bringer->count);
    assert_true(bringer->count > 0 && bringer->count <= 64);
    for (uint32_t i = 0; i < bringer->count; i++) {
        bringer->bytes[i] = malloc(bringer->parts[i].size);
        assert_int_equal(transfer_part_read(engine, &bringer->parts[i], bringer->bytes[i]), KV_OK);
    }
    for (uint32_t layer = 0; layer < bringer->layers; layer++)
        put_all(bringer, layer, 1);
    assert_int_equal(session_move(session, SESSION_SLEEPING), KV_OK);
    assert_int_equal(session_move(session, SESSION_WAKING), KV_OK);
    transfer_layers_expect(session);
    pthread_mutex_init(&bringer->lock, NULL);
    pthread_cond_init(&bringer->moved, NULL);
    assert_int_equal(pthread_create(&bringer->thread, NULL, bring_main, bringer), 0);
}

static void end_bringing(struct bringer *bringer) {
    want(bringer, bringer->layers);
    pthread_join(bringer->thread, NULL);
    pthread_cond_destroy(&bringer->moved);
    pthread_mutex_destroy(&bringer->lock);
    for (uint32_t layer = bringer->fails_at; layer < bringer->layers; layer++)
        put_all(bringer, layer, 0);
    for (uint32_t i = 0; i < bringer->count; i++)
        free(bringer->bytes[i]);
    assert_int_equal(session_move(bringer->session, SESSION_IDLE), KV_OK);
}

static void on_away(void *context) {
    struct scene *scene = context;

    if (scene->bringer)
        want(scene->bringer, 1);
    scene->away++;
    scene->times_away++;
}

static void on_back(void *context) {
    ((struct scene *)context)->away--;
}

struct heard {
    const struct scene *scene;
    struct kv_digest rows[ASKS][ROWS + 1];
    _Atomic uint32_t count, away; /* rows of different questions come at once */
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
    assert_int_equal(scene->times_away, 1);
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
        /* In front of each layer, and before the logits. */
        assert_int_equal(scene.breaths, layers + 1);
        assert_int_equal(scene.small, scene.breaths);
        assert_true(scene.tokens > 0);
        assert_int_equal(beside.count, alone.count);
        assert_int_equal(beside.away, beside.count);
        assert_memory_equal(beside.rows, alone.rows, sizeof alone.rows);
    }
    scene.breaths = 0;
    session_ask_patiently(asked, 1);
    ask_all(asked, &scene, &beside);
    session_ask_patiently(asked, 0);
    assert_int_equal(scene.breaths, 3 * (layers + 1));
    assert_memory_equal(beside.rows, alone.rows, sizeof alone.rows);
    scene.also = support_engine_session(scene.engine, "also", IMAGE_RECIPE_V3);
    scene.others = 0;
    support_engine_feed(scene.also, ids + 100, TOKENS - 100);
    assert_int_equal(session_fingerprint(scene.also, 0, &scene.print, &diag), KV_OK);
    scene.others = 1;
    ask_all(asked, &scene, &beside);
    assert_memory_equal(beside.rows, alone.rows, sizeof alone.rows);
    assert_null(scene.also);
    session_ask_begin(asked);
    session_fingerprints_along(asked);
    assert_int_equal(session_fingerprints_take(asked, prints, &diag), KV_OK);
    session_ask_end(asked);
    assert_memory_equal(&prints[1], &print, sizeof print);
    scene.others = 0;
    assert_int_equal(session_fingerprint(asked, 0, &print, &diag), KV_OK);
    assert_memory_equal(&prints[0], &print, sizeof print);
    freeze(&scene, asked);
    assert_true(alone.count == 1 + ROWS - 3 + ROWS + 1);
    engine_close(scene.engine);
}

/* One that fails, one where others step, one where nobody may. */
static void ask_as_layers_arrive(struct scene *scene, struct session *asked,
                                 const struct heard *alone) {
    static struct heard beside;
    struct bringer bringer;
    struct image_fingerprint print;
    struct kv_diag diag = {""};
    uint32_t layers = scene->engine->model.geometry.layers;

    begin_bringing(&bringer, asked, layers / 2);
    scene->bringer = &bringer;
    enum kv_err err = session_fingerprint(asked, 0, &print, &diag);
    scene->bringer = NULL;
    end_bringing(&bringer);
    assert_int_equal(err, KV_ERR_IO);
    assert_non_null(strstr(diag.text, "did not arrive"));
    transfer_layers_arrived(asked, layers);
    for (int shared = 1; shared >= 0; shared--) {
        /* What had failed has come after all. */
        assert_int_equal(session_fingerprint(asked, 0, &print, &diag), KV_OK);
        scene->others = shared;
        scene->engine->settings.hooks.breathe = shared ? on_breathe : NULL;
        begin_bringing(&bringer, asked, layers);
        scene->times_away = 0;
        scene->bringer = &bringer;
        ask_all(asked, scene, &beside);
        scene->bringer = NULL;
        end_bringing(&bringer);
        assert_int_equal(scene->away, 0);
        assert_true(scene->times_away >= layers);
        assert_memory_equal(beside.rows, alone->rows, sizeof alone->rows);
        /* From now on nobody waits. */
        scene->others = 0;
        scene->engine->settings.hooks.breathe = NULL;
        scene->times_away = 0;
        ask_all(asked, scene, &beside);
        assert_int_equal(scene->times_away, 0);
        assert_memory_equal(beside.rows, alone->rows, sizeof alone->rows);
    }
}

/* Planes of poison behind the second layer: whole and in pieces the same words about it. */
static void say_what_is_bad(struct scene *scene, struct session *asked) {
    struct bringer bringer;
    struct image_fingerprint print;
    struct kv_diag whole = {""}, pieces = {""};
    uint32_t there = 0;

    begin_bringing(&bringer, asked, scene->engine->model.geometry.layers);
    want(&bringer, 2);
    assert_int_equal(engine_inner_layers_wait(asked, 1, &there, NULL), KV_OK);
    transfer_layers_arrived(asked, bringer.layers);
    assert_true(asked->gate.closed);
    assert_int_equal(session_fingerprint(asked, 0, &print, &pieces), KV_ERR_DEVICE);
    assert_false(asked->gate.closed);
    assert_int_equal(session_fingerprint(asked, 0, &print, &whole), KV_ERR_DEVICE);
    assert_non_null(strstr(whole.text, "not finite after layer 2 "));
    assert_string_equal(pieces.text, whole.text);
    end_bringing(&bringer);
    assert_int_equal(session_fingerprint(asked, 0, &print, &whole), KV_OK);
}

static void a_question_follows_the_layers(void **state) {
    static struct heard alone;
    struct scene scene = {0};
    struct support_engine_options options = support_engine_default();
    struct kv_diag diag = {""};

    (void)state;
    options.hooks = (struct engine_hooks){.context = &scene, .away = on_away, .back = on_back};
    scene.engine = support_engine_synth(&options, "synth:small");
    support_engine_ids(testing_seed("ids", 5), 256, ids, TOKENS);
    support_engine_ids(testing_seed("talk", 6), 256, talk, TALK);
    struct session *asked = support_engine_session(scene.engine, "asked", IMAGE_RECIPE_V3);
    scene.talking = support_engine_session(scene.engine, "talking", IMAGE_RECIPE_V3);
    support_engine_feed(asked, ids, TOKENS);
    ask_all(asked, &scene, &alone);
    assert_int_equal(session_feed(scene.talking, talk, TALK, IMAGE_USER, &diag), KV_OK);
    assert_int_equal(session_generate(scene.talking, 5, &diag), KV_OK);
    ask_as_layers_arrive(&scene, asked, &alone);
    say_what_is_bad(&scene, asked);
    engine_close(scene.engine);
}

TESTING_MAIN(cmocka_unit_test(others_step_within_a_question),
             cmocka_unit_test(a_question_follows_the_layers))
