/* tests/test_engine.c - the bits of a session do not depend on its neighbours.
 *
 * Responsible for: equal logits at every row of the batch beside random neighbours that join and
 * leave, beside a prefill, with 1 and 2 threads, also where single rows and chunks are multiplied
 * differently; one failed session leaves the others alone;
 * running out of slots; decode beside a writer that holds blocks.
 * Not responsible for: whether the bits are right (test_forward, test_oracle).
 */
#include "engine/model/tokenizer.h"
#include "tests/support_engine.h"
#include "tests/support_shelf.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROMPT = 800, FED = 60, NEIGHBOURS = 7, EVENTS = 64 };

struct trace {
    struct kv_digest rows[PROMPT + FED + 8];
    uint32_t count;
    uint64_t first;
    uint32_t vocab;
};

static void take_row(void *context, uint64_t position, const float *logits) {
    struct trace *trace = context;

    if (trace->count == 0)
        trace->first = position;
    assert_int_equal(position, trace->first + trace->count);
    trace->rows[trace->count++] = kv_digest_of(logits, trace->vocab * sizeof *logits);
}

static uint32_t vocab_of(struct engine *engine) {
    struct engine_model model;

    engine_model(engine, &model);
    return model.vocab_count;
}

/* Ages so small that all four tiers are in use within PROMPT tokens. */
static struct session *tiered_session(struct engine *engine, const char *name) {
    struct session_settings settings = support_engine_greedy(name, IMAGE_RECIPE_V3);
    struct session *session = NULL;

    settings.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {300, 400, 500}};
    assert_int_equal(session_create(engine, &settings, &session, NULL), KV_OK);
    return session;
}

/* --- random neighbours */

struct crowd {
    struct engine *engine;
    struct testing_random random;
    struct session *watched;
    uint32_t made, before;
};

static void add_neighbour(struct crowd *crowd) {
    char name[32];
    uint32_t ids[300], count = 1 + (uint32_t)testing_random_below(&crowd->random, 300);
    struct session *session;

    snprintf(name, sizeof name, "neighbour %u", crowd->made++);
    session = tiered_session(crowd->engine, name);
    support_engine_ids(crowd->made, vocab_of(crowd->engine), ids, count);
    assert_int_equal(session_feed(session, ids, count, IMAGE_USER, NULL), KV_OK);
    assert_int_equal(
        session_generate(session, 1 + (uint32_t)testing_random_below(&crowd->random, 40), NULL),
        KV_OK);
}

/* Now and then one leaves, one comes, one is fed a long text. */
static void stir(struct crowd *crowd) {
    uint32_t count = 0;

    while (session_at(crowd->engine, count))
        count++;
    if (count > 1 && testing_random_below(&crowd->random, 6) == 0) {
        struct session *leaves =
            session_at(crowd->engine, (uint32_t)testing_random_below(&crowd->random, count));
        if (leaves != crowd->watched) {
            session_drop(leaves);
            count--;
        }
    }
    if (count < NEIGHBOURS + 1 && testing_random_below(&crowd->random, 3) == 0)
        add_neighbour(crowd);
}

static void step(struct engine *engine, int failures_allowed) {
    struct engine_event events[EVENTS];
    struct kv_diag diag = {""};
    uint32_t count;

    assert_int_equal(engine_step(engine, events, &count, &diag), KV_OK);
    for (uint32_t i = 0; i < count; i++)
        if (events[i].kind == ENGINE_FAILED && !failures_allowed)
            fail_msg("a session failed: %s", diag.text);
}

static int busy(const struct session *session) {
    struct session_info info;

    session_info(session, &info);
    return info.state == SESSION_ACTIVE;
}

/* The watched session's life: a prompt, then FED single tokens that are its own sampled ones. */
static void live(struct crowd *crowd, struct trace *trace, int alone) {
    uint32_t ids[PROMPT];
    struct session *session = crowd->watched;

    trace->count = 0;
    trace->vocab = vocab_of(crowd->engine);
    session_observe(session, take_row, trace);
    support_engine_ids(99, trace->vocab, ids, PROMPT);
    assert_int_equal(session_feed(session, ids, PROMPT, IMAGE_USER, NULL), KV_OK);
    while (busy(session)) {
        if (!alone)
            stir(crowd);
        step(crowd->engine, 0);
    }
    while (trace->count < PROMPT + FED) {
        uint32_t left = PROMPT + FED - trace->count;
        /* An end token stops generation early, at the same place in every run. */
        assert_int_equal(session_generate(session, left, NULL), KV_OK);
        while (busy(session)) {
            if (!alone)
                stir(crowd);
            step(crowd->engine, 0);
        }
        if (trace->count < PROMPT + FED)
            assert_int_equal(session_feed(session, ids, 1, IMAGE_USER, NULL), KV_OK);
        while (busy(session))
            step(crowd->engine, 0);
    }
}

static void expect_equal(const struct trace *trace, const struct trace *alone) {
    assert_int_equal(trace->count, alone->count);
    for (uint32_t i = 0; i < trace->count; i++)
        if (memcmp(&trace->rows[i], &alone->rows[i], sizeof trace->rows[i]) != 0)
            fail_msg("row %u differs from the session alone", i);
}

static void run_once(const struct support_engine_options *options, uint32_t before,
                     struct trace *trace) {
    struct crowd crowd = {.engine = support_engine_tiny(options)};
    int alone = before == UINT32_MAX;

    testing_random_init(&crowd.random, 1000 + before);
    for (uint32_t i = 0; !alone && i < before; i++)
        add_neighbour(&crowd);
    crowd.watched = tiered_session(crowd.engine, "watched");
    live(&crowd, trace, alone);
    engine_close(crowd.engine);
}

/* BREAK_ROW_BITS lets the place in the batch reach the logits; BREAK_SINGLES_FIRST leaves rows in
 * the order of their sessions, so that rows of chunks are taken for single ones. */
static void every_row_beside_neighbours(enum engine_simd simd) {
    static struct trace alone, trace;
    struct support_engine_options options = support_engine_default();
    struct support_shelf shelf = {.hold = 0};
    uint32_t last = testing_quick() ? 2 : NEIGHBOURS;

    options.simd = simd;
    options.sessions_max = NEIGHBOURS + 2;
    options.slots = 4000;
    run_once(&options, UINT32_MAX, &alone);
    assert_true(alone.count >= PROMPT + FED);
    for (uint32_t before = 0; before < last; before++) {
        options.threads = 1 + before % 2;
        options.poison = 1;
        options.shuffle_seed = testing_seed("shuffle", before + 1);
        options.hooks = support_shelf_hooks(&shelf);
        run_once(&options, before, &trace);
        support_shelf_release(&shelf);
        expect_equal(&trace, &alone);
    }
}

/* On a device whose chunks have bits of their own, which its logits show. */
static void bits_beside_neighbours_avx2(void **state) {
    static struct trace equal, apart;
    struct support_engine_options options = support_engine_default();

    (void)state;
    run_once(&options, UINT32_MAX, &equal);
    support_wall_classes(1);
    run_once(&options, UINT32_MAX, &apart);
    assert_memory_not_equal(&equal.rows[0], &apart.rows[0], sizeof equal.rows[0]);
    every_row_beside_neighbours(ENGINE_SIMD_AUTO);
    support_wall_classes(0);
}

static void bits_beside_neighbours_c(void **state) {
    (void)state;
    every_row_beside_neighbours(ENGINE_SIMD_C);
}

/* --- failures stay with their session */

static uint32_t used(struct engine *engine) {
    struct engine_slots slots;

    engine_slots(engine, &slots);
    return slots.used;
}

static void a_spoilt_block_fails_its_session_only(void **state) {
    struct support_engine_options options = support_engine_default();
    struct support_shelf shelf = {.hold = 1};
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    struct engine_event events[EVENTS];
    struct kv_diag diag = {""};
    struct session_info before, after;
    uint32_t ids[700], count, failed = 0, tokens = 0;

    (void)state;
    options.hooks = support_shelf_hooks(&shelf);
    struct engine *engine = support_engine_tiny(&options);
    struct session *good = support_engine_session(engine, "good", IMAGE_RECIPE_V3);
    struct session *bad = support_engine_session(engine, "bad", IMAGE_RECIPE_V3);
    support_engine_ids(3, vocab_of(engine), ids, 700);
    support_engine_feed(good, ids, 100);
    support_engine_feed(bad, ids, 700);
    assert_int_equal(shelf.held_count, 1);
    transfer_block_parts(shelf.held[0], parts);
    assert_int_equal(parts[0].stream, LAYOUT_META);
    uint8_t *nans = malloc(parts[0].size);
    for (uint64_t i = 0; i < parts[0].size; i += 2)
        memcpy(nans + i, "\xff\x7f", 2);
    assert_int_equal(transfer_part_write(engine, &parts[0], nans), KV_OK);
    free(nans);
    session_info(bad, &before);
    assert_int_equal(session_generate(good, 5, NULL), KV_OK);
    assert_int_equal(session_generate(bad, 5, NULL), KV_OK);
    do {
        assert_int_equal(engine_step(engine, events, &count, &diag), KV_OK);
        for (uint32_t i = 0; i < count; i++) {
            failed += events[i].kind == ENGINE_FAILED;
            if (events[i].kind == ENGINE_FAILED) {
                assert_ptr_equal(events[i].session, bad);
                assert_int_equal(events[i].err, KV_ERR_DEVICE);
                assert_non_null(strstr(diag.text, "bad"));
                assert_non_null(strstr(diag.text, "layer"));
            }
            tokens += events[i].kind == ENGINE_TOKEN && events[i].session == good;
        }
    } while (count);
    assert_int_equal(failed, 1);
    assert_true(tokens >= 1);
    session_info(bad, &after);
    assert_int_equal(after.n_kv, before.n_kv);
    assert_true(after.n - after.n_kv <= 1);
    assert_int_equal(after.state, SESSION_IDLE);
    support_shelf_answer(&shelf, 1);
    engine_close(engine);
    support_shelf_release(&shelf);
}

/* Feeds `session` in steps until it fails for lack of slots. */
static uint64_t feed_until_full(struct session *session, const uint32_t *ids) {
    struct engine *engine = session_engine(session);
    struct engine_event events[EVENTS];
    struct session_info info;

    for (;;) {
        uint32_t count = 1;
        assert_int_equal(session_feed(session, ids, 256, IMAGE_USER, NULL), KV_OK);
        while (count) {
            struct kv_diag diag = {""};
            assert_int_equal(engine_step(engine, events, &count, &diag), KV_OK);
            for (uint32_t i = 0; i < count; i++)
                if (events[i].kind == ENGINE_FAILED) {
                    assert_int_equal(events[i].err, KV_ERR_NO_SLOTS);
                    assert_ptr_equal(events[i].session, session);
                    session_info(session, &info);
                    assert_int_equal(info.n, info.n_kv);
                    assert_int_equal(info.state, SESSION_IDLE);
                    return info.n_kv;
                }
        }
    }
}

static void slots_run_out_for_one_session(void **state) {
    struct support_engine_options options = support_engine_default();
    uint32_t ids[256], before;
    struct session_info info;
    struct session *refused = NULL;
    struct session_settings settings = support_engine_greedy("third", IMAGE_RECIPE_V3);
    struct kv_diag diag = {""};

    (void)state;
    options.slots = 72 * 2 + 12 * 4 + 16;
    options.reserve = 16;
    struct engine *engine = support_engine_tiny(&options);
    struct session *large = support_engine_session(engine, "large", IMAGE_RECIPE_V3);
    struct session *small = support_engine_session(engine, "small", IMAGE_RECIPE_V3);
    support_engine_ids(5, vocab_of(engine), ids, 256);
    support_engine_feed(small, ids, 200);
    uint64_t full = feed_until_full(large, ids);
    assert_true(full >= 320 + 4 * 256);
    before = used(engine);
    assert_true(before <= 72 * 2 + 12 * 4);
    assert_int_equal(session_create(engine, &settings, &refused, &diag), KV_ERR_NO_SLOTS);
    assert_non_null(strstr(diag.text, "72 slots"));
    assert_int_equal(used(engine), before);
    /* Both still work. */
    support_engine_generate(small, 4);
    support_engine_feed(large, ids, 1);
    session_info(large, &info);
    assert_int_equal(info.n_kv, full + 1);
    /* Room again: the large one goes on. */
    session_drop(small);
    support_engine_feed(large, ids, 256);
    session_info(large, &info);
    assert_true(info.n_kv >= full + 256);
    session_drop(large);
    assert_int_equal(used(engine), 0);
    engine_close(engine);
}

static int drop_small(void *context, struct session *for_session, uint32_t slots) {
    struct engine *engine = session_engine(for_session);
    struct session *small = session_find(engine, "small");

    (void)slots;
    ++*(uint32_t *)context;
    if (!small)
        return 0;
    session_drop(small);
    return 1;
}

static void the_hook_makes_room(void **state) {
    struct support_engine_options options = support_engine_default();
    uint32_t ids[256], asked = 0;

    (void)state;
    options.slots = 72 * 2 + 12 * 2;
    options.hooks = (struct engine_hooks){.context = &asked, .slots_low = drop_small};
    struct engine *engine = support_engine_tiny(&options);
    struct session *small = support_engine_session(engine, "small", IMAGE_RECIPE_V3);
    struct session *large = support_engine_session(engine, "large", IMAGE_RECIPE_V3);
    support_engine_ids(5, vocab_of(engine), ids, 256);
    /* The small one is dropped while it stands in the batch of the running step. */
    assert_int_equal(session_feed(small, ids, 200, IMAGE_USER, NULL), KV_OK);
    assert_int_equal(session_generate(small, 100, NULL), KV_OK);
    for (uint32_t i = 0; i < 5; i++)
        support_engine_feed(large, ids, 256);
    assert_true(asked >= 1);
    assert_null(session_find(engine, "small"));
    engine_close(engine);
}

/* --- writers */

static void decode_goes_on_beside_a_writer(void **state) {
    struct support_engine_options options = support_engine_default();
    struct support_shelf shelf = {.hold = 1};
    struct session_info info;
    uint32_t ids[1400], while_held;

    (void)state;
    options.hooks = support_shelf_hooks(&shelf);
    options.slots = 800;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = tiered_session(engine, "s");
    support_engine_ids(6, vocab_of(engine), ids, 1400);
    support_engine_feed(session, ids, 1400);
    session_info(session, &info);
    assert_int_equal(shelf.held_count, 4);
    assert_int_equal(info.blocks_durable, 0);
    assert_int_equal(info.slots, 72 + 4 * 12);
    support_engine_generate(session, 3);
    while_held = used(engine);
    support_shelf_answer(&shelf, 1);
    engine_apply(engine);
    session_info(session, &info);
    assert_int_equal(info.blocks_durable, 4);
    assert_int_equal(info.slots, engine_plan_slots(engine, &info.policy, info.n_kv));
    assert_true(used(engine) < while_held);
    /* A writer that fails leaves the block whole, and it is offered again. */
    support_engine_feed(session, ids, 256);
    assert_int_equal(shelf.held_count, 1);
    session_drop(session);
    assert_int_equal(used(engine), 12);
    support_shelf_answer(&shelf, 0);
    engine_apply(engine);
    assert_int_equal(used(engine), 0);
    engine_close(engine);
    support_shelf_release(&shelf);
}

TESTING_MAIN(cmocka_unit_test(bits_beside_neighbours_avx2),
             cmocka_unit_test(bits_beside_neighbours_c),
             cmocka_unit_test(a_spoilt_block_fails_its_session_only),
             cmocka_unit_test(slots_run_out_for_one_session), cmocka_unit_test(the_hook_makes_room),
             cmocka_unit_test(decode_goes_on_beside_a_writer))
