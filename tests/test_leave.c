/* tests/test_leave.c - a session that goes gives its blocks back in pieces.
 *
 * Responsible for: others that step between two pieces, who may need all of its slots at once; that
 * nothing is left behind, and all of it is poisoned.
 * Not responsible for: who steps (test_beside.c), one block (test_pool.c).
 *
 * Fails with BREAK_LEAVE: there are no slots, though a session is just going; and with
 * BREAK_SAME_NAME.
 */
#include "engine/engine_inner.h"
#include "engine/fill.h"
#include "tests/support_engine.h"
#include "tests/testing.h"

#include <stdlib.h>

enum { BLOCKS = 40, TOKENS = (BLOCKS + 2) * LAYOUT_BLOCK_TOKENS };

struct scene {
    struct engine *engine;
    int greedy; /* between two pieces all that the session had is wanted; 2: of engine_relieve */
    uint32_t breaths, free_at_first, free_at_last;
};

static uint32_t ids[TOKENS];

static enum kv_err no_need(void *context, const struct fill_stretch *stretch,
                           struct kv_diag *diag) {
    (void)context;
    (void)stretch;
    (void)diag;
    return KV_OK;
}

/* Ones, of every head. */
static void ones(void *context, const struct fill_stretch *stretch, uint32_t first, uint32_t end,
                 uint16_t *chunk) {
    size_t each = 2 * (size_t)stretch->chunk_rows * 128;

    (void)context;
    for (uint32_t layer = 0; layer < 4; layer++)
        for (uint32_t value = 0; value < 2; value++)
            for (uint32_t head = 0; head < 2; head++)
                for (size_t i = 0;
                     layer * 2 + head >= first && layer * 2 + head < end && i < each / 2; i++)
                    chunk[((layer * 2 + value) * 2 + head) * each / 2 + i] = 0x3f80;
}

static int on_breathe(void *context, int small) {
    struct scene *scene = context;
    struct engine *engine = scene->engine;
    struct engine_inner_need need = {NULL, 0, 0, 0};
    struct engine_slots slots;
    struct kv_diag diag = {""};

    assert_true(small);
    assert_null(session_find(engine, "goes"));
    if (scene->breaths++ == 0)
        scene->free_at_first = engine->slots.free_count;
    need.slots = engine->slots.free_count + 50;
    engine_slots(engine, &slots);
    assert_int_equal(slots.free + slots.leaving, slots.total);
    if (scene->greedy == 1)
        assert_int_equal(engine_inner_room(engine, &need, &diag), KV_OK);
    else if (scene->greedy)
        assert_int_equal(engine_relieve(engine, need.slots), slots.leaving - WINDOW_SLOTS);
    scene->free_at_last = engine->slots.free_count;
    return 1;
}

static void drop_one(struct scene *scene) {
    const struct fill fill = {ids, TOKENS, no_need, ones, NULL, 1};
    struct engine *engine = scene->engine;
    struct session *session = support_engine_session(engine, "goes", IMAGE_RECIPE_V3);
    struct kv_diag diag = {""};
    uint32_t all = engine->slots.total;

    if (fill_session(session, &fill, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    assert_int_equal(session->block_count, BLOCKS);
    uint32_t held = all - engine->slots.free_count;
    scene->breaths = 0;
    session_drop(session);
    assert_int_equal(scene->breaths, 1);
    assert_null(engine->leaving);
    assert_int_equal(engine->slots.free_count, all);
    assert_int_equal(engine->blocks.free_count, engine->slots.frames);
    assert_true(scene->free_at_first < all && scene->free_at_first > all - held);
    if (scene->greedy)
        assert_int_equal(scene->free_at_last, all - WINDOW_SLOTS);
    uint16_t *pool = malloc(engine->slots.pool_bytes);
    const struct device_copy copy = {pool, engine->slots.pool.slots, engine->slots.pool_bytes};
    assert_int_equal(device_copy_out(engine->device, DEVICE_STEP, &copy, 1), KV_OK);
    for (uint64_t i = 0; i < engine->slots.pool_bytes / 2; i++)
        if (pool[i] != SLOTS_POISON)
            fail_msg("value %llu is not poisoned", (unsigned long long)i);
    free(pool);
}

static void others_step_while_one_leaves(void **state) {
    struct scene scene = {0};
    struct support_engine_options options = support_engine_default();

    (void)state;
    options.poison = 1;
    options.slots = 1200;
    options.hooks = (struct engine_hooks){.context = &scene, .breathe = on_breathe};
    scene.engine = support_engine_synth(&options, "synth:small");
    support_engine_ids(testing_seed("ids", 11), 256, ids, TOKENS);
    drop_one(&scene);
    for (scene.greedy = 1; scene.greedy <= 2; scene.greedy++)
        drop_one(&scene);
    engine_close(scene.engine);
}

/* --- one leaves to make room for another */

struct crowding {
    struct engine *engine;
    int breaths;
    enum kv_err err;
};

static int leave_for(void *context, struct session *session, uint32_t slots) {
    struct crowding *crowding = context;
    struct session *goes = session_find(crowding->engine, "goes");

    (void)session, (void)slots;
    if (goes)
        session_drop(goes);
    return goes != NULL;
}

static int come_between(void *context, int small) {
    const struct session_settings settings = support_engine_greedy("new", IMAGE_RECIPE_V3);
    struct crowding *crowding = context;
    struct session *session = NULL;
    struct kv_diag diag = {""};

    (void)small;
    if (crowding->breaths++ == 0)
        crowding->err = session_create(crowding->engine, &settings, &session, &diag);
    return 1;
}

/* BREAK_SAME_NAME: there are two of one name. */
static void a_name_that_was_taken_meanwhile_is_refused(void **state) {
    const struct fill fill = {ids, TOKENS, no_need, ones, NULL, 1};
    const struct session_settings settings = support_engine_greedy("new", IMAGE_RECIPE_V3);
    struct crowding crowding = {.err = KV_ERR_IO};
    struct support_engine_options options = support_engine_default();
    struct session *session = NULL;
    struct kv_diag diag = {""};
    char name[] = "a";

    (void)state;
    options.slots = 1200;
    options.sessions_max = 16;
    options.hooks = (struct engine_hooks){.context = &crowding};
    struct engine *engine = crowding.engine = support_engine_synth(&options, "synth:small");
    if (fill_session(support_engine_session(engine, "goes", IMAGE_RECIPE_V3), &fill, &diag))
        fail_msg("%s", diag.text);
    for (; slots_available(&engine->slots, 0) >= WINDOW_SLOTS; name[0]++)
        (void)support_engine_session(engine, name, IMAGE_RECIPE_V3);
    engine->settings.hooks.slots_low = leave_for;
    engine->settings.hooks.breathe = come_between;
    uint32_t count = engine->session_count;
    assert_int_equal(session_create(engine, &settings, &session, &diag), KV_ERR_EXISTS);
    assert_int_equal(crowding.err, KV_OK);
    assert_int_equal(engine->session_count, count);
    assert_null(session_find(engine, "goes"));
    engine->settings.hooks.breathe = NULL;
    engine_close(engine);
}

TESTING_MAIN(cmocka_unit_test(others_step_while_one_leaves),
             cmocka_unit_test(a_name_that_was_taken_meanwhile_is_refused))
