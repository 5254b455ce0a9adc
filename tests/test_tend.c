/* tests/test_tend.c - sessions that go to sleep by themselves.
 *
 * Responsible for: the policy as a function, and the loop over the tiny model: who sleeps, who
 * stays, that steps of others go on meanwhile.
 * Not responsible for: what is saved (test_snapshot.c), waiting at a prompt (tools/).
 * Broken twins: BREAK_TEND_HIGH, BREAK_TEND_LEAVING, BREAK_TEND_USED.
 */
#include "snapshot/snap_tend.h"

#include "engine/engine_inner.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

/* --- the policy */

static void idle_sessions_go_in_their_order(void **state) {
    (void)state;
    const struct snap_tend_settings settings = {.idle_ns = 100};
    struct snap_tend_view views[] = {{50, 1, 0}, {20, 1, 1}, {10, 0, 0}, {30, 1, 0}};
    struct snap_tend_state at = {.now_ns = 60, .slots_free = 0};
    struct snap_tend_pick pick = snap_tend_choose(&settings, &at, views, 4);
    assert_int_equal(pick.cause, SNAP_TEND_NOBODY);
    assert_int_equal(pick.wait_ns, 60); /* until 120 */
    at.now_ns = 119;
    assert_int_equal(snap_tend_choose(&settings, &at, views, 4).wait_ns, 1);
    at.now_ns = 120;
    pick = snap_tend_choose(&settings, &at, views, 4);
    assert_int_equal(pick.cause, SNAP_TEND_IDLE);
    assert_int_equal(pick.index, 1);
    at.budget_wait_ns = 7;
    pick = snap_tend_choose(&settings, &at, views, 4);
    assert_int_equal(pick.cause, SNAP_TEND_NOBODY);
    assert_int_equal(pick.wait_ns, 7);
    at.now_ns = 10; /* a clock that went back makes nobody old */
    assert_int_equal(snap_tend_choose(&settings, &at, views, 4).wait_ns, 100);
    const struct snap_tend_settings never = {.idle_ns = 0};
    at.now_ns = 1u << 30;
    pick = snap_tend_choose(&never, &at, views, 4);
    assert_int_equal(pick.cause, SNAP_TEND_NOBODY);
    assert_true(pick.wait_ns == SNAP_TEND_NEVER);
    assert_true(snap_tend_choose(&settings, &at, views, 0).wait_ns == SNAP_TEND_NEVER);
}

/* From below the low mark on until the high one is reached, whatever the budget says.
 * Fails with BREAK_TEND_HIGH. */
static void slots_are_filled_to_the_high_mark(void **state) {
    (void)state;
    const struct snap_tend_settings settings = {.slots_low = 100, .slots_high = 200};
    const struct snap_tend_view views[] = {{50, 1, 0}, {20, 1, 0}};
    struct snap_tend_state at = {.now_ns = 60, .slots_free = 100, .budget_wait_ns = 5};
    int filling = 0;
    static const struct {
        uint32_t free;
        int sleeps;
    } course[] = {{150, 0}, {100, 0}, {99, 1}, {120, 1}, {199, 1}, {200, 0}, {150, 0}, {99, 1}};
    for (size_t i = 0; i < sizeof course / sizeof course[0]; i++) {
        at.slots_free = course[i].free;
        at.filling = filling;
        const struct snap_tend_pick pick = snap_tend_choose(&settings, &at, views, 2);
        assert_int_equal(pick.cause == SNAP_TEND_SLOTS, course[i].sleeps);
        assert_true(!course[i].sleeps || pick.index == 1);
        filling = pick.filling;
    }
    /* One that was just woken goes for idleness only. */
    const struct snap_tend_view woken[] = {{50, 1, 0}, {20, 1, 1}};
    const struct snap_tend_settings both = {.idle_ns = 10, .slots_low = 100, .slots_high = 200};
    at = (struct snap_tend_state){.now_ns = 60, .slots_free = 50};
    assert_int_equal(snap_tend_choose(&both, &at, woken, 2).index, 0);
    assert_int_equal(snap_tend_choose(&both, &at, woken + 1, 1).cause, SNAP_TEND_NOBODY);
    at.slots_free = 200;
    assert_int_equal(snap_tend_choose(&both, &at, woken, 2).index, 1);
}

/* --- the loop */

struct fixture {
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct snap_tend *tend;
};

static void begin(struct fixture *f, const struct snap_tend_settings *settings,
                  uint64_t bytes_max) {
    struct kv_diag diag = {""};
    testing_temp_dir(f->dir);
    struct life_options options = life_default(f->dir);
    options.bytes_max = bytes_max;
    options.limited = bytes_max != STORE_BYTES_UNLIMITED;
    life_open(&options, &f->life);
    if (snap_tend_open(f->life.snapshot, settings, &f->tend, &diag) != KV_OK)
        fail_msg("snap_tend_open: %s", diag.text);
}

static void end(struct fixture *f) {
    snap_tend_close(f->tend);
    life_close(&f->life);
}

static struct session *talk(struct fixture *f, const char *name, uint64_t seed) {
    struct session *session = session_find(f->life.engine, name);
    if (session == NULL)
        session = life_session(&f->life, name, IMAGE_RECIPE_V3);
    life_say(session, seed, 700, 3, NULL);
    return session;
}

static uint32_t resident(struct fixture *f) {
    uint32_t count = 0;
    while (session_at(f->life.engine, count) != NULL)
        count++;
    return count;
}

/* Until nothing changes any more; the loop itself never waits. */
static uint64_t run(struct fixture *f) {
    uint64_t wait_ns;
    while ((wait_ns = snap_tend_step(f->tend)) <= 5000000)
        engine_apply(f->life.engine);
    return wait_ns;
}

struct kept_receipts {
    struct receipt last;
    uint32_t count;
};

static void keep(void *context, const struct receipt *receipt) {
    struct kept_receipts *kept = context;
    kept->last = *receipt;
    kept->count++;
}

static void all_go_to_sleep_and_come_back(void **state) {
    (void)state;
    struct kept_receipts kept = {.count = 0};
    const struct snap_tend_settings settings = {
        .idle_ns = 1, .receipt = keep, .receipt_context = &kept};
    struct kv_digest before[3];
    struct fixture f;
    char name[8];
    begin(&f, &settings, STORE_BYTES_UNLIMITED);
    for (uint32_t i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "s%u", i);
        before[i] = life_resident(talk(&f, name, i + 1));
    }
    transfer_durable(session_find(f.life.engine, "s1"))->pinned = 1;
    assert_true(run(&f) == SNAP_TEND_NEVER);
    assert_int_equal(resident(&f), 1);
    assert_non_null(session_find(f.life.engine, "s1"));
    assert_int_equal(snap_tend_report(f.tend)->slept_idle, 2);
    /* Each left its receipt, as a sleep. */
    assert_int_equal(kept.count, 2);
    assert_int_equal(kept.last.operation, RECEIPT_SLEEP);
    assert_int_equal(kept.last.err, KV_OK);
    assert_string_equal(kept.last.name, "s2");
    assert_true(kept.last.tokens > 0 && kept.last.door_bytes > 0);
    for (uint32_t i = 0; i < 3; i += 2) {
        struct receipt receipt;
        snprintf(name, sizeof name, "s%u", i);
        struct kv_digest after = life_resident(life_wake(&f.life, name, &receipt));
        assert_memory_equal(&after, &before[i], sizeof after);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    }
    end(&f);
}

/* BREAK_TEND_LEAVING: another goes to sleep for slots that are just coming. */
static void slots_get_free_in_order_of_use(void **state) {
    (void)state;
    struct engine_slots slots;
    struct fixture f;
    struct snap_tend_settings settings = {.idle_ns = 0};
    begin(&f, &settings, STORE_BYTES_UNLIMITED);
    for (uint32_t i = 0; i < 3; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%u", i);
        talk(&f, name, i + 1);
    }
    talk(&f, "s0", 9);
    assert_true(run(&f) == SNAP_TEND_NEVER);
    assert_int_equal(resident(&f), 3);
    snap_tend_close(f.tend);
    engine_slots(f.life.engine, &slots);
    struct session_info info;
    session_info(session_find(f.life.engine, "s1"), &info);
    /* Short by one slot; the high mark needs two of them asleep. */
    settings.slots_low = slots.free + 1;
    settings.slots_high = slots.free + 2 * info.slots - 8;
    assert_int_equal(snap_tend_open(f.life.snapshot, &settings, &f.tend, NULL), KV_OK);
    /* As while one is being dropped: what it gives back will do. */
    f.life.engine->leaving = session_find(f.life.engine, "s1");
    assert_true(snap_tend_step(f.tend) == SNAP_TEND_NEVER);
    f.life.engine->leaving = NULL;
    assert_true(run(&f) == SNAP_TEND_NEVER);
    assert_int_equal(snap_tend_report(f.tend)->slept_slots, 2);
    assert_int_equal(resident(&f), 1);
    assert_non_null(session_find(f.life.engine, "s0"));
    end(&f);
}

/* A session that is used between freeze and commit stays, with what was said to it; others decode
 * on while it is written.
 * Fails with BREAK_TEND_USED. */
static void who_is_used_meanwhile_stays(void **state) {
    (void)state;
    const struct snap_tend_settings settings = {.idle_ns = 1};
    struct fixture f;
    struct session_info info;
    struct kv_diag diag = {""};
    uint32_t ids[40];
    struct receipt receipt;
    begin(&f, &settings, STORE_BYTES_UNLIMITED);
    struct session *session = talk(&f, "s", 1);
    session_info(session, &info);
    uint64_t n = info.n;
    assert_true(snap_tend_step(f.tend) <= 5000000); /* begins */
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_SAVING);
    support_engine_ids(5, 200, ids, 40);
    assert_int_equal(session_feed(session, ids, 40, IMAGE_USER, &diag), KV_OK);
    support_engine_run(f.life.engine);
    while (snap_tend_report(f.tend)->kept + snap_tend_report(f.tend)->slept_idle == 0)
        snap_tend_step(f.tend);
    assert_int_equal(snap_tend_report(f.tend)->kept, 1);
    session = session_find(f.life.engine, "s");
    assert_non_null(session);
    session_info(session, &info);
    assert_int_equal(info.n, n + 40);
    struct kv_digest before = life_resident(session);
    assert_true(run(&f) == SNAP_TEND_NEVER);
    assert_int_equal(resident(&f), 0);
    struct kv_digest after = life_resident(life_wake(&f.life, "s", &receipt));
    assert_memory_equal(&after, &before, sizeof after);
    assert_int_equal(receipt.tokens, n + 40);
    /* Settling ends a save and drops nobody. */
    while (snap_tend_step(f.tend) != 5000000)
        ;
    snap_tend_settle(f.tend);
    assert_int_equal(resident(&f), 1);
    end(&f);
}

static void who_cannot_be_saved_stays_whole(void **state) {
    (void)state;
    struct kept_receipts kept = {.count = 0};
    const struct snap_tend_settings settings = {
        .idle_ns = 1, .receipt = keep, .receipt_context = &kept};
    struct fixture f;
    begin(&f, &settings, 1 << 20);
    struct session *session = talk(&f, "s", 1);
    struct kv_digest before = life_resident(session);
    uint64_t wait_ns = run(&f);
    assert_true(wait_ns > SNAP_TEND_RETRY_NS / 2 && wait_ns <= SNAP_TEND_RETRY_NS);
    assert_int_equal(snap_tend_report(f.tend)->failed, 1);
    assert_int_equal(kept.count, 1);
    assert_int_equal(kept.last.err, KV_ERR_NO_SPACE);
    assert_true(strlen(snap_tend_report(f.tend)->note) > 10);
    struct kv_digest after = life_resident(session_find(f.life.engine, "s"));
    assert_memory_equal(&after, &before, sizeof after);
    end(&f);
    struct snap_tend_settings wrong = {.slots_low = 2, .slots_high = 1};
    struct kv_diag diag = {""};
    begin(&f, &settings, STORE_BYTES_UNLIMITED);
    struct snap_tend *tend = NULL;
    assert_int_equal(snap_tend_open(f.life.snapshot, &wrong, &tend, &diag), KV_ERR_INVALID);
    end(&f);
}

TESTING_MAIN(cmocka_unit_test(idle_sessions_go_in_their_order),
             cmocka_unit_test(slots_are_filled_to_the_high_mark),
             cmocka_unit_test(all_go_to_sleep_and_come_back),
             cmocka_unit_test(slots_get_free_in_order_of_use),
             cmocka_unit_test(who_is_used_meanwhile_stays),
             cmocka_unit_test(who_cannot_be_saved_stays_whole))
