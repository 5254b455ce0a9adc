/* tests/test_device.c - devices that the processor cannot look into, and that fail.
 *
 * Responsible for: sessions behind the wall of support_wall.h and beside it have the same bits,
 * each wakes what the other saved, no device address is followed, what a failed call costs whom;
 * best tokens instead of rows of logits choose the same.
 * Not responsible for: arithmetic; real accelerators (gpu_engine.c).
 * Broken twins: BREAK_REACH follows addresses of the device; BREAK_DEVICE_ERROR does not look at
 * what a copy out says; BREAK_PIECE_FAULT takes a question's rows for right when another's step was
 * told of the piece that failed.
 */
#include "engine/engine_inner.h"
#include "tests/support_life.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { EVENTS = 2 * 1024 + 1 };

struct fixture {
    char dir[TESTING_PATH_BYTES];
    struct life_options options;
    struct life life;
};

static void open_fixture(struct fixture *f, int wall) {
    testing_temp_dir(f->dir);
    f->options = life_default(f->dir);
    support_wall_set(wall);
    life_open(&f->options, &f->life);
    /* Who believes otherwise ends the program, maybe in a thread that cmocka does not watch. */
    assert_int_equal(transfer_mapped(f->life.engine), !wall);
}

static void reopen(struct fixture *f, int wall) {
    life_close(&f->life);
    support_wall_set(wall);
    life_open(&f->options, &f->life);
}

/* 1,900 tokens reach every tier of the ladder; the last page is not full. */
static struct kv_digest live(struct life *life, const char *name, struct life_turn turns[2]) {
    struct session *session = life_session(life, name, IMAGE_RECIPE_V3);
    struct kv_digest resident;

    life_say(session, 1, 64 + 256 * 6 + 300, 3, &turns[0]);
    life_say(session, 2, 40, 3, &turns[1]);
    resident = life_resident(session);
    life_sleep(life, session);
    return resident;
}

/* BREAK_REACH */
static void both_sides_of_the_wall_are_equal(void **state) {
    struct fixture f;
    struct life_turn turns[2][2], after[2];
    struct kv_digest resident[2];
    uint64_t calls = support_wall_calls();

    (void)state;
    open_fixture(&f, 1);
    resident[1] = live(&f.life, "walled", turns[1]);
    assert_true(support_wall_calls() > calls + 300);
    reopen(&f, 0);
    calls = support_wall_calls();
    resident[0] = live(&f.life, "plain", turns[0]);
    assert_int_equal(support_wall_calls(), calls);
    assert_memory_equal(&resident[0], &resident[1], sizeof resident[0]);
    life_same_turn(&turns[0][0], &turns[1][0]);
    life_same_turn(&turns[0][1], &turns[1][1]);
    for (int wall = 0; wall < 2; wall++) {
        struct receipt receipt;
        struct session *session;
        if (wall)
            reopen(&f, 1);
        session = life_wake(&f.life, wall ? "plain" : "walled", &receipt);
        struct kv_digest woken = life_resident(session);
        assert_memory_equal(&woken, &resident[0], sizeof woken);
        life_say(session, 3, 300, 3, &after[wall]);
    }
    life_same_turn(&after[0], &after[1]);
    life_close(&f.life);
}

/* Generates in two sessions beside each other, one of which is looked at when `watched`; how many
 * tokens, as one may end early. */
static uint32_t generate(struct life *life, const struct image_sampler *sampler, int watched,
                         uint32_t ids_out[2][24]) {
    static struct engine_event events[EVENTS];
    struct session *sessions[2] = {life_session(life, "x", IMAGE_RECIPE_V3),
                                   life_session(life, "y", IMAGE_RECIPE_V3)};
    uint32_t ids[80], count = 1, filled[2] = {0, 0};
    struct kv_diag diag = {""};

    memset(ids_out, 0, 2 * sizeof ids_out[0]);
    support_engine_ids(21, 200, ids, 80);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(session_resample(sessions[i], sampler, &diag), KV_OK);
        assert_int_equal(session_feed(sessions[i], ids + 7 * i, 60, IMAGE_USER, &diag), KV_OK);
        assert_int_equal(session_generate(sessions[i], 24, &diag), KV_OK);
    }
    session_whole_rows(sessions[1], watched);
    while (count) {
        assert_int_equal(engine_step(life->engine, events, &count, &diag), KV_OK);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t which = events[i].session == sessions[1];
            assert_int_not_equal(events[i].kind, ENGINE_FAILED);
            if (events[i].kind != ENGINE_TOKEN)
                continue;
            ids_out[which][filled[which]++] = events[i].token;
            if (which && watched)
                assert_non_null(session_logits(sessions[1]));
        }
    }
    for (uint32_t i = 0; i < 2; i++)
        session_drop(sessions[i]);
    return filled[0] + filled[1];
}

/* BREAK_BEST: the last of the best tokens stands for the first. */
static void the_best_tokens_decide_as_all_would(void **state) {
    static const struct image_sampler samplers[] = {
        {.temperature = 0, .top_p = 1, .top_k = 1 << 30, .seed = 1},
        {.temperature = 0.9f, .top_p = 0.95f, .top_k = 40, .seed = 7},
        {.temperature = 1.5f, .top_p = 1, .top_k = 64, .seed = 8},
        {.temperature = 1, .top_p = 1, .top_k = 1 << 30, .seed = 9}};
    uint32_t tokens = 0;
    struct fixture f;

    (void)state;
    open_fixture(&f, 0);
    for (size_t i = 0; i < sizeof samplers / sizeof samplers[0]; i++) {
        uint32_t plain[2][24], walled[2][24], watched[2][24];
        reopen(&f, 0);
        tokens += generate(&f.life, &samplers[i], 0, plain);
        reopen(&f, 1);
        generate(&f.life, &samplers[i], 0, walled);
        generate(&f.life, &samplers[i], 1, watched);
        assert_memory_equal(plain, walled, sizeof plain);
        assert_memory_equal(plain, watched, sizeof plain);
    }
    print_message("%u tokens sampled\n", tokens);
    assert_true(tokens > 60);
    life_close(&f.life);
}

/* Feeds 20 ids to each session that is given; returns how many of them failed, and the call's
 * error through err_out. */
static uint32_t feed_all(struct life *life, struct session **sessions, uint32_t count,
                         enum kv_err *err_out) {
    static struct engine_event events[EVENTS];
    uint32_t ids[20], event_count = 1, failed = 0;
    struct kv_diag diag = {""};

    support_engine_ids(9, 200, ids, 20);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(session_feed(sessions[i], ids, 20, IMAGE_USER, &diag), KV_OK);
    *err_out = KV_OK;
    while (event_count && *err_out == KV_OK) {
        *err_out = engine_step(life->engine, events, &event_count, &diag);
        for (uint32_t i = 0; i < event_count; i++) {
            failed += events[i].kind == ENGINE_FAILED;
            if (events[i].kind == ENGINE_FAILED)
                assert_non_null(strstr(diag.text, "the wall"));
        }
    }
    return failed;
}

/* BREAK_DEVICE_ERROR */
static void a_failed_step_costs_its_request_only(void **state) {
    struct fixture f;
    struct session *sessions[2];
    struct life_turn turn, again;
    struct session_info info;
    enum kv_err err;

    (void)state;
    open_fixture(&f, 1);
    sessions[0] = life_session(&f.life, "a", IMAGE_RECIPE_V3);
    sessions[1] = life_session(&f.life, "b", IMAGE_RECIPE_V3);
    support_wall_break(SUPPORT_WALL_FAILS_ONCE);
    assert_int_equal(feed_all(&f.life, sessions, 2, &err), 1);
    assert_int_equal(err, KV_OK);
    session_info(sessions[0], &info);
    assert_int_equal(info.n, 0);
    session_info(sessions[1], &info);
    assert_int_equal(info.n_kv, 20);
    life_say(sessions[0], 5, 500, 4, &turn);
    life_say(life_session(&f.life, "twin", IMAGE_RECIPE_V3), 5, 500, 4, &again);
    life_same_turn(&turn, &again);
    life_close(&f.life);
}

/* The first piece of a question fails, and a step of another session comes before the next. */
static struct {
    struct engine *engine;
    uint32_t breaths, failed;
} stepping;

static int step_after_a_fault(void *context, int small) {
    static struct engine_event events[EVENTS];
    struct kv_diag diag = {""};
    uint32_t count = 0;

    (void)context, (void)small;
    if (stepping.breaths++ == 0) {
        support_wall_break(SUPPORT_WALL_ATTENTION);
        return 1;
    }
    assert_int_equal(engine_step(stepping.engine, events, &count, &diag), KV_OK);
    for (uint32_t i = 0; i < count; i++)
        stepping.failed += events[i].kind == ENGINE_FAILED;
    return 1;
}

/* BREAK_PIECE_FAULT */
static void a_failed_piece_fails_its_question(void **state) {
    struct fixture f;
    struct image_fingerprint print, again = {0};
    uint32_t ids[20] = {3, 4, 5};
    struct kv_diag diag = {""};

    (void)state;
    open_fixture(&f, 1);
    struct session *asked = life_session(&f.life, "asked", IMAGE_RECIPE_V3);
    struct session *talks = life_session(&f.life, "talks", IMAGE_RECIPE_V3);
    life_say(asked, 5, 700, 2, NULL);
    assert_int_equal(session_fingerprint(asked, 0, &print, &diag), KV_OK);
    assert_int_equal(session_feed(talks, ids, 20, IMAGE_USER, &diag), KV_OK);
    stepping.engine = f.life.engine;
    f.life.engine->settings.hooks.breathe = step_after_a_fault;
    assert_int_equal(session_fingerprint(asked, 0, &again, &diag), KV_ERR_DEVICE);
    assert_non_null(strstr(diag.text, "the wall fails once"));
    /* Who was told first is as it was before its step. */
    assert_int_equal(stepping.failed, 1);
    assert_int_equal(session_fingerprint(asked, 0, &again, &diag), KV_OK);
    assert_memory_equal(&again, &print, sizeof print);
    f.life.engine->settings.hooks.breathe = NULL;
    life_say(talks, 5, 20, 2, NULL);
    life_close(&f.life);
}

static void rows_that_were_not_kept_fail_the_session(void **state) {
    struct fixture f;
    struct session *session;
    struct session_info info;
    struct receipt receipt;
    enum kv_err err;

    (void)state;
    open_fixture(&f, 1);
    session = life_session(&f.life, "a", IMAGE_RECIPE_V3);
    life_say(session, 5, 400, 2, NULL);
    life_save(&f.life, session, 1);
    support_wall_break(SUPPORT_WALL_APPEND);
    assert_int_equal(feed_all(&f.life, &session, 1, &err), 1);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_FAILED);
    session_drop(session);
    session = life_wake(&f.life, "a", &receipt);
    life_say(session, 6, 20, 2, NULL);
    life_close(&f.life);
}

static void a_lost_device_ends_the_engine_and_nothing_else(void **state) {
    struct fixture f;
    struct life_turn turns[2];
    struct session *session;
    struct receipt receipt;
    struct kv_digest resident;
    struct kv_diag diag = {""};
    enum kv_err err;

    (void)state;
    open_fixture(&f, 1);
    resident = live(&f.life, "safe", turns);
    session = life_session(&f.life, "a", IMAGE_RECIPE_V3);
    support_wall_break(SUPPORT_WALL_LOST);
    assert_int_equal(feed_all(&f.life, &session, 1, &err), 1);
    assert_int_equal(err, KV_ERR_DEVICE);
    life_refuse(&f.life, "safe", KV_ERR_DEVICE, &diag);
    reopen(&f, 1);
    session = life_wake(&f.life, "safe", &receipt);
    struct kv_digest woken = life_resident(session);
    assert_memory_equal(&woken, &resident, sizeof woken);
    life_close(&f.life);
}

/* A wake that cannot place its bytes is refused and takes nothing; a block that cannot be copied
 * out stays volatile and is written with the next save. */
static void failed_copies_lose_nothing(void **state) {
    struct fixture f;
    struct life_turn turns[2];
    struct engine_slots before, after;
    struct session *session;
    struct receipt receipt;
    struct kv_digest resident, woken;
    struct kv_diag diag = {""};

    (void)state;
    open_fixture(&f, 1);
    resident = live(&f.life, "safe", turns);
    engine_slots(f.life.engine, &before);
    support_wall_break(SUPPORT_WALL_COPY_IN);
    life_refuse(&f.life, "safe", KV_ERR_DEVICE, &diag);
    engine_slots(f.life.engine, &after);
    assert_int_equal(before.free, after.free);
    session = life_wake(&f.life, "safe", &receipt);
    woken = life_resident(session);
    assert_memory_equal(&woken, &resident, sizeof woken);
    support_wall_break(SUPPORT_WALL_COPY_OUT);
    life_say(session, 8, 600, 1, NULL);
    snapshot_drain(f.life.snapshot);
    life_save(&f.life, session, 1);
    resident = life_resident(session);
    life_sleep(&f.life, session);
    woken = life_resident(life_wake(&f.life, "safe", &receipt));
    assert_memory_equal(&woken, &resident, sizeof woken);
    life_close(&f.life);
}

/* At one place from its first use on, and nobody has it twice. */
static void one_lands_at_a_time(void **state) {
    enum { BYTES = 1 << 20 };
    struct fixture f;

    (void)state;
    open_fixture(&f, 1);
    uint8_t *at = transfer_landing_take(f.life.engine, BYTES);
    assert_non_null(at);
    memset(at, 1, BYTES);
    assert_null(transfer_landing_take(f.life.engine, BYTES));
    transfer_landing_give(f.life.engine);
    assert_null(transfer_landing_take(f.life.engine, BYTES + 1));
    assert_ptr_equal(transfer_landing_take(f.life.engine, BYTES / 2), at);
    transfer_landing_give(f.life.engine);
    life_close(&f.life);
}

TESTING_MAIN(cmocka_unit_test(one_lands_at_a_time),
             cmocka_unit_test(both_sides_of_the_wall_are_equal),
             cmocka_unit_test(the_best_tokens_decide_as_all_would),
             cmocka_unit_test(a_failed_step_costs_its_request_only),
             cmocka_unit_test(a_failed_piece_fails_its_question),
             cmocka_unit_test(rows_that_were_not_kept_fail_the_session),
             cmocka_unit_test(a_lost_device_ends_the_engine_and_nothing_else),
             cmocka_unit_test(failed_copies_lose_nothing))
