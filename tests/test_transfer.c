/* tests/test_transfer.c - sessions leave the device and come back as themselves.
 *
 * Responsible for: freeze, drop, load and continue against a twin never dropped, bit for bit;
 * demote, drop, load, promote; loads that are abandoned or refused; needles and durable state.
 * Not responsible for: bytes on disk (snapshot/, restore/).
 */
#include "engine/transfer.h"

#include "store/base/bytes.h"

#include "tests/support_engine.h"
#include "tests/support_shelf.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { ROWS = 64 };

struct trace {
    struct kv_digest rows[ROWS];
    uint32_t count, vocab;
};

static void take_row(void *context, uint64_t position, const float *logits) {
    struct trace *trace = context;

    (void)position;
    assert_true(trace->count < ROWS);
    trace->rows[trace->count++] = kv_digest_of(logits, trace->vocab * sizeof *logits);
}

static struct engine_model model_of(struct engine *engine) {
    struct engine_model model;

    engine_model(engine, &model);
    return model;
}

static const struct image_policy tiered = {
    .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {300, 500, 700}};
static const struct image_policy coarse = {
    .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {0, 0, 0}};

static struct session *make_session(struct engine *engine, const char *name,
                                    const struct image_policy *policy, float temperature) {
    struct session_settings settings = support_engine_greedy(name, policy->recipe);
    struct session *session = NULL;

    settings.policy = *policy;
    settings.sampler.temperature = temperature;
    settings.sampler.seed = 77;
    assert_int_equal(session_create(engine, &settings, &session, NULL), KV_OK);
    return session;
}

static struct engine *make_engine(struct support_shelf *shelf, uint64_t shuffle) {
    struct support_engine_options options = support_engine_default();

    options.hooks = support_shelf_hooks(shelf);
    options.poison = 1;
    options.shuffle_seed = shuffle;
    options.slots = 1200;
    options.threads = 2;
    return support_engine_tiny(&options);
}

/* Feeds the same text in one go to a session of `policy`. */
static void feed_text(struct session *session, uint32_t count) {
    static uint32_t ids[8192];

    support_engine_ids(11, model_of(session_engine(session)).vocab_count, ids, count);
    support_engine_feed(session, ids, count);
}

/* A question and an answer; every row's logits. */
static void go_on(struct session *session, struct trace *trace) {
    uint32_t ids[20];

    trace->vocab = model_of(session_engine(session)).vocab_count;
    trace->count = 0;
    session_observe(session, take_row, trace);
    support_engine_ids(12, trace->vocab, ids, 20);
    support_engine_feed(session, ids, 20);
    support_engine_generate(session, 12);
    support_engine_feed(session, ids, 9);
    session_observe(session, NULL, NULL);
}

static void expect_equal(const struct trace *a, const struct trace *b) {
    assert_true(a->count > 28);
    assert_int_equal(a->count, b->count);
    for (uint32_t i = 0; i < a->count; i++)
        if (memcmp(&a->rows[i], &b->rows[i], sizeof a->rows[i]) != 0)
            fail_msg("row %u differs", i);
}

static void expect_equal_sessions(struct session *a, struct session *b) {
    struct session_info one, two;

    session_info(a, &one);
    session_info(b, &two);
    assert_int_equal(one.n, two.n);
    assert_int_equal(one.n_kv, two.n_kv);
    assert_int_equal(one.blocks, two.blocks);
    assert_memory_equal(one.ids, two.ids, one.n * sizeof *one.ids);
    assert_memory_equal(one.tier_blocks, two.tier_blocks, sizeof one.tier_blocks);
    assert_int_equal(one.slots, two.slots);
}

/* BREAK_PARTIAL_PAGE loses a token of a short page; BREAK_LATE_TIERS lets the tiers of a live
 * session lag a step behind those of a woken one, BREAK_REVIEW_STEP by more. */
/* One length: never dropped against saved, dropped and loaded in another engine. */
static void wake_at(uint32_t tokens, const struct image_policy *policy, int pending) {
    static struct trace kept, woken;
    struct support_shelf shelf = {.hold = 0};
    struct engine *engine = make_engine(&shelf, 1);
    struct engine *other = make_engine(&shelf, 2);
    struct session *session = make_session(engine, "s", policy, 0.8f);
    struct support_shelf_saved saved;
    struct image_fingerprint now;
    struct session_info info;
    struct session *back;

    feed_text(session, tokens);
    if (pending)
        support_engine_generate(session, 1);
    support_shelf_save(session, &saved);
    back = support_shelf_load(other, &shelf, &saved, 0);
    assert_int_equal(session_fingerprint(back, 0, &now, NULL), KV_OK);
    assert_memory_equal(&now.logits, &saved.fingerprint.logits, sizeof now.logits);
    assert_memory_equal(now.top_ids, saved.fingerprint.top_ids, sizeof now.top_ids);
    session_info(back, &info);
    assert_int_equal(info.tokens_prefilled, 0);
    go_on(session, &kept);
    go_on(back, &woken);
    expect_equal(&kept, &woken);
    expect_equal_sessions(session, back);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    engine_close(other);
    support_shelf_release(&shelf);
}

static void woken_equals_never_dropped(void **state) {
    static const uint32_t lengths[] = {1, 63, 64, 65, 200, 319, 320, 575, 576, 600, 1400, 2304};
    static const struct image_policy bf16 = {
        .recipe = IMAGE_RECIPE_BF16, .age_count = 0, .ages = {0}};

    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        wake_at(lengths[i], &tiered, i % 2 == 0);
        wake_at(lengths[i], i % 2 ? &tiered : &bf16, i % 2);
    }
}

static void demoted_and_promoted_equals_never_demoted(void **state) {
    static struct trace kept, woken;
    struct support_shelf shelf = {.hold = 0};
    struct support_shelf_saved saved;
    struct session_info info;

    (void)state;
    struct engine *engine = make_engine(&shelf, 3);
    struct session *twin = make_session(engine, "twin", &tiered, 0);
    struct session *session = make_session(engine, "s", &tiered, 0);
    feed_text(twin, 2000);
    feed_text(session, 2000);
    assert_int_equal(session_set_policy(session, &coarse, NULL), KV_OK);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], 6);
    assert_int_equal(info.slots, 72 + 6 * 8);
    support_shelf_save(session, &saved);
    session_drop(session);
    shelf.planes_read = 0;
    session = support_shelf_load(engine, &shelf, &saved, 0);
    assert_int_equal(shelf.planes_read, 6 * 4);
    shelf.delay = 1;
    assert_int_equal(session_set_policy(session, &tiered, NULL), KV_OK);
    assert_true(session_promoting(session));
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], 6);
    support_shelf_answer(&shelf, 1);
    engine_apply(engine);
    assert_false(session_promoting(session));
    assert_true(shelf.planes_read > 6 * 4);
    go_on(twin, &kept);
    go_on(session, &woken);
    expect_equal(&kept, &woken);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    support_shelf_release(&shelf);
}

/* What comes while a session is asked is read once nobody asks any more. Fails with
 * BREAK_ASKED_TIER. */
static void planes_that_come_between_two_questions_wait(void **state) {
    struct support_shelf shelf = {.hold = 0};
    struct image_fingerprint before, now;
    struct session_info info;

    (void)state;
    struct engine *engine = make_engine(&shelf, 4);
    struct session *session = make_session(engine, "s", &coarse, 0);
    feed_text(session, 1400);
    engine_apply(engine);
    assert_int_equal(session_fingerprint(session, 0, &before, NULL), KV_OK);
    shelf.delay = 1;
    assert_int_equal(session_set_policy(session, &tiered, NULL), KV_OK);
    assert_true(session_promoting(session));
    session_ask_begin(session);
    session_ask_begin(session);
    support_shelf_answer(&shelf, 1);
    engine_apply(engine);
    assert_false(session_promoting(session));
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], 4);
    assert_true(info.coarse_blocks > 0);
    assert_int_equal(session_fingerprint(session, 0, &now, NULL), KV_OK);
    assert_memory_equal(&before.logits, &now.logits, sizeof now.logits);
    session_ask_end(session);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], 4);
    session_ask_end(session);
    session_info(session, &info);
    assert_int_equal(info.coarse_blocks, 0);
    assert_true(info.tier_blocks[LAYOUT_K6V2] < 4);
    engine_close(engine);
    support_shelf_release(&shelf);
}

static void planes_that_cannot_be_read_leave_the_tier(void **state) {
    struct support_shelf shelf = {.hold = 0};
    struct session_info info, after;
    struct trace trace;

    (void)state;
    struct engine *engine = make_engine(&shelf, 4);
    struct session *session = make_session(engine, "s", &coarse, 0);
    feed_text(session, 1400);
    engine_apply(engine);
    session_info(session, &info);
    shelf.deny = 1;
    assert_int_equal(session_set_policy(session, &tiered, NULL), KV_OK);
    engine_apply(engine);
    assert_false(session_promoting(session));
    session_info(session, &after);
    assert_int_equal(after.tier_blocks[LAYOUT_K6V2], 4);
    assert_int_equal(after.slots, info.slots);
    go_on(session, &trace);
    /* Dropped while planes are on their way: the reader still has its slots. */
    shelf.deny = 0;
    shelf.delay = 1;
    assert_int_equal(session_set_policy(session, &tiered, NULL), KV_OK);
    assert_true(shelf.wanted_count > 0);
    struct block *first = shelf.wanted[0].block;
    uint32_t held = shelf.wanted_count;
    session_drop(session);
    assert_true(transfer_block_index(first) < 4);
    for (uint32_t i = 0; i < held; i++)
        transfer_planes_arrived(session, shelf.wanted[i].block, KV_ERR_IO);
    engine_apply(engine);
    struct engine_slots slots;
    engine_slots(engine, &slots);
    assert_int_equal(slots.used, 0);
    engine_close(engine);
    support_shelf_release(&shelf);
}

static void a_floor_load_answers_and_is_smaller(void **state) {
    struct support_shelf shelf = {.hold = 0};
    struct support_shelf_saved saved;
    struct image_fingerprint floor, now;
    struct session_info info;

    (void)state;
    struct engine *engine = make_engine(&shelf, 5);
    struct session *session = make_session(engine, "s", &tiered, 0);
    feed_text(session, 1400);
    assert_int_equal(session_fingerprint(session, 1, &floor, NULL), KV_OK);
    support_shelf_save(session, &saved);
    assert_memory_not_equal(&floor.logits, &saved.fingerprint.logits, sizeof floor.logits);
    session_drop(session);
    session = support_shelf_load(engine, &shelf, &saved, 1);
    session_info(session, &info);
    assert_int_equal(info.slots, 72 + 4 * 8);
    assert_int_equal(session_fingerprint(session, 1, &now, NULL), KV_OK);
    assert_memory_equal(&floor.logits, &now.logits, sizeof now.logits);
    assert_int_equal(session_fingerprint(session, 0, &now, NULL), KV_OK);
    assert_memory_equal(&floor.logits, &now.logits, sizeof now.logits);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    support_shelf_release(&shelf);
}

/* --- loads that do not happen */

static uint32_t used(struct engine *engine) {
    struct engine_slots slots;

    engine_slots(engine, &slots);
    return slots.used;
}

static void an_abandoned_load_changes_nothing(void **state) {
    static struct trace kept, beside;
    struct support_shelf shelf = {.hold = 0};
    struct support_shelf_saved saved;

    (void)state;
    struct engine *engine = make_engine(&shelf, 6);
    struct session *session = make_session(engine, "s", &tiered, 0);
    feed_text(session, 1400);
    support_shelf_save(session, &saved);
    go_on(session, &kept);
    session_drop(session);
    struct session *witness = make_session(engine, "witness", &tiered, 0);
    feed_text(witness, 1400);
    uint32_t before = used(engine);
    struct transfer_load *load = support_shelf_begin(engine, &shelf, &saved, 0);
    assert_true(used(engine) > before);
    assert_null(session_find(engine, "s"));
    transfer_load_abandon(load);
    assert_int_equal(used(engine), before);
    /* Same text, same policy: the witness gives what the saved one gave. */
    go_on(witness, &beside);
    expect_equal(&kept, &beside);
    session = support_shelf_load(engine, &shelf, &saved, 0);
    go_on(session, &beside);
    expect_equal(&kept, &beside);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    support_shelf_release(&shelf);
}

static void expect_refused(struct engine *engine, struct image *image, enum kv_err expected,
                           const char *word) {
    struct transfer_load *load = NULL;
    struct kv_diag diag = {""};
    uint32_t before = used(engine);

    assert_int_equal(transfer_load_begin(engine, image, 0, &load, &diag), expected);
    assert_null(load);
    if (!strstr(diag.text, word))
        fail_msg("'%s' does not say '%s'", diag.text, word);
    assert_int_equal(used(engine), before);
}

static void images_that_do_not_fit_are_refused(void **state) {
    struct support_shelf shelf = {.hold = 0};
    struct support_shelf_saved saved;
    struct image *image = &saved.frozen.image, whole;

    (void)state;
    struct engine *engine = make_engine(&shelf, 7);
    struct session *session = make_session(engine, "s", &tiered, 0);
    feed_text(session, 1400);
    support_shelf_save(session, &saved);
    whole = *image;
    expect_refused(engine, image, KV_ERR_EXISTS, "'s'");
    session_drop(session);
    image->block_count++;
    expect_refused(engine, image, KV_ERR_CORRUPT, "blocks");
    *image = whole;
    image->pages[1].first += 64;
    expect_refused(engine, image, KV_ERR_CORRUPT, "page");
    *image = whole;
    image->sinks.tokens = 5;
    expect_refused(engine, image, KV_ERR_CORRUPT, "sinks");
    *image = whole;
    image->n_kv = image->n + 1;
    expect_refused(engine, image, KV_ERR_CORRUPT, "token counts");
    *image = whole;
    image->policy_count = 0;
    expect_refused(engine, image, KV_ERR_CORRUPT, "policies");
    *image = whole;
    image->ids[7] = 1u << 30;
    expect_refused(engine, image, KV_ERR_CORRUPT, "vocabulary");
    image->ids[7] = 1;
    image->model.tensors.bytes[3] ^= 1;
    expect_refused(engine, image, KV_ERR_MISMATCH, "weights");
    *image = whole;
    image->model.geometry.layers++;
    expect_refused(engine, image, KV_ERR_MISMATCH, "layer");
    *image = whole;
    /* A pool too small for it: need and have are named. */
    struct support_engine_options options = support_engine_default();
    options.slots = 104;
    struct engine *small = support_engine_tiny(&options);
    expect_refused(small, image, KV_ERR_NO_SLOTS, "slots are needed");
    engine_close(small);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    support_shelf_release(&shelf);
}

/* Token ids may come behind the image, and are looked at as those of an image are.
 * BREAK_IDS_VOCABULARY takes any number. */
static void ids_that_come_later_are_looked_at(void **state) {
    struct support_shelf shelf = {.hold = 0};
    struct support_shelf_saved saved;
    struct session *session = NULL;
    struct session_info info;
    struct kv_diag diag = {""};
    uint8_t ids[3 * 4];

    (void)state;
    struct engine *engine = make_engine(&shelf, 7);
    session = make_session(engine, "s", &tiered, 0);
    feed_text(session, 700);
    support_shelf_save(session, &saved);
    session_drop(session);
    struct transfer_load *load = support_shelf_begin(engine, &shelf, &saved, 0);
    for (uint32_t i = 0; i < 3; i++)
        kv_put_u32(ids + (size_t)4 * i, 40 + i);
    assert_int_equal(transfer_load_ids(load, 100, ids, 3, &diag), KV_OK);
    kv_put_u32(ids + 8, 1u << 30);
    assert_int_equal(transfer_load_ids(load, 400, ids, 3, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "token 402 is outside the vocabulary"));
    assert_int_equal(transfer_load_publish(load, &session, &diag), KV_OK);
    session_info(session, &info);
    assert_int_equal(info.ids[99], saved.frozen.image.ids[99]);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(info.ids[100 + i], 40 + i);
    assert_int_equal(info.ids[402], saved.frozen.image.ids[402]);
    session_drop(session);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    support_shelf_release(&shelf);
}

static void needles_and_durable_state_travel(void **state) {
    struct support_shelf shelf = {.hold = 0};
    struct support_shelf_saved saved;
    struct image_needle needle = {.key = (char *)"colour",
                                  .ask = (char *)"Which?",
                                  .answer_prefix = (char *)"It is",
                                  .expect = (char *)" blue",
                                  .span_count = 1,
                                  .spans = {{IMAGE_USER, 3, 9}},
                                  .kept = 1};
    uint32_t count;

    (void)state;
    struct engine *engine = make_engine(&shelf, 8);
    struct session *session = make_session(engine, "s", &tiered, 0);
    feed_text(session, 300);
    assert_int_equal(transfer_add_needle(session, &needle, NULL), KV_OK);
    assert_int_equal(transfer_add_needle(session, &needle, NULL), KV_ERR_EXISTS);
    support_shelf_save(session, &saved);
    saved.frozen.image.lineage = 4711;
    session_drop(session);
    session = support_shelf_load(engine, &shelf, &saved, 0);
    struct image_needle *back = transfer_needles(session, &count);
    assert_int_equal(count, 1);
    assert_string_equal(back[0].key, "colour");
    assert_string_equal(back[0].expect, " blue");
    assert_int_equal(back[0].spans[0].end, 9);
    assert_int_equal(back[0].kept, 1);
    assert_int_equal(transfer_durable(session)->lineage, 4711);
    assert_int_equal(transfer_durable(session)->page_count, saved.frozen.image.page_count);
    transfer_frozen_release(engine, &saved.frozen);
    engine_close(engine);
    support_shelf_release(&shelf);
}

TESTING_MAIN(cmocka_unit_test(woken_equals_never_dropped),
             cmocka_unit_test(demoted_and_promoted_equals_never_demoted),
             cmocka_unit_test(planes_that_come_between_two_questions_wait),
             cmocka_unit_test(planes_that_cannot_be_read_leave_the_tier),
             cmocka_unit_test(a_floor_load_answers_and_is_smaller),
             cmocka_unit_test(an_abandoned_load_changes_nothing),
             cmocka_unit_test(images_that_do_not_fit_are_refused),
             cmocka_unit_test(ids_that_come_later_are_looked_at),
             cmocka_unit_test(needles_and_durable_state_travel))
