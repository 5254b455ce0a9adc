/* tests/test_pressure.c - slots that run short: who gives up which planes, and gets them back.
 *
 * Responsible for: the policy `pressure` as a function against one that moves a block at a time;
 * over the tiny model a pool of half the need, promotion, the guard of one just woken; lives of
 * recipe v2 and of top tier K8V8 with the order in which their planes leave the store.
 * Not responsible for: policy `age` (test_policy.c), plain sleep for slots (test_service.c).
 *
 * Fails with BREAK_PRESSURE_VOLATILE (planes go that are nowhere else), BREAK_PRESSURE_STEPS (a
 * second step overtakes a first one), BREAK_PRESSURE_HISTORY (a move is not told),
 * BREAK_PROMOTE_EARLY (blocks are read finer before the policy says so), BREAK_PRESSURE_AGE (policy
 * `age` is not left alone), BREAK_JUST_WOKEN (one just woken makes room) and BREAK_LOWER_V2 (KL
 * leaves a block whose floor reads it).
 */
#include "engine/kv/pressure.h"

#include "snapshot/snap_lower.h"
#include "tests/support_life.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"
#include "tools/service.h"

#include <stdio.h>
#include <string.h>

/* --- the policy */

static struct pressure_session view(uint32_t index, uint32_t blocks, uint64_t used, int active) {
    return (struct pressure_session){.index = index,
                                     .policy = {.recipe = IMAGE_RECIPE_V3, .pressure = 1},
                                     .blocks = blocks,
                                     .durable = blocks,
                                     .active = active,
                                     .last_used_ns = used};
}

static void same_move(struct pressure_move move, uint32_t index, uint32_t step, uint32_t first,
                      uint32_t end) {
    assert_int_equal(move.index, index);
    assert_int_equal(move.step, step);
    assert_int_equal(move.first, first);
    assert_int_equal(move.end, end);
}

static void the_coldest_goes_first(void **state) {
    (void)state;
    struct pressure_session all[] = {view(0, 4, 10, 1), view(1, 3, 30, 0), view(2, 5, 20, 0)};
    struct pressure_move moves[3 * IMAGE_AGES_MAX];
    struct pressure_state at = {.free = 9, .low = 10, .high = 20};
    /* 11 slots: six blocks give two each: all five of session 2, then one of session 1. */
    assert_int_equal(pressure_moves(&at, all, 3, moves), 2);
    same_move(moves[0], 2, 0, 0, 5);
    same_move(moves[1], 1, 0, 0, 1);
    assert_int_equal(moves[0].promote, 0);
    /* Everything takes the first step before anything takes the second. */
    at.wanted = 14;
    assert_int_equal(pressure_moves(&at, all, 3, moves), 3);
    same_move(moves[0], 1, 0, 1, 3);
    same_move(moves[1], 0, 0, 0, 4);
    same_move(moves[2], 2, 1, 0, 2);
    /* Back in the reverse order, as far as it fits: 1 + 1 + 2 of seven. */
    at = (struct pressure_state){.free = 25, .low = 10, .high = 18};
    assert_int_equal(pressure_moves(&at, all, 3, moves), 2);
    same_move(moves[0], 2, 1, 0, 2);
    same_move(moves[1], 0, 0, 2, 4);
    assert_int_equal(moves[1].promote, 1);
    /* Between the marks nothing moves; nor where planes cannot be read. */
    at.free = 18;
    assert_int_equal(pressure_moves(&at, all, 3, moves), 0);
    at.free = 100;
    for (int i = 0; i < 3; i++)
        all[i].stuck = 5;
    assert_int_equal(pressure_moves(&at, all, 3, moves), 0);
}

static void what_is_being_written_stays(void **state) {
    (void)state;
    struct pressure_session all[] = {view(0, 4, 10, 0), view(1, 4, 20, 0)};
    struct pressure_move moves[2 * IMAGE_AGES_MAX];
    const struct pressure_state at = {.wanted = 100};
    all[0].durable = 3;
    all[1].durable = 0;
    assert_int_equal(pressure_moves(&at, all, 2, moves), 1);
    same_move(moves[0], 0, 0, 0, 3);
    assert_int_equal(pressure_moves(&at, all, 2, moves), 0);
    all[0].durable = all[1].durable = 4;
    assert_int_equal(pressure_moves(&at, all, 2, moves), 2 + 2 * 2);
    for (int i = 0; i < 2; i++)
        for (uint32_t b = 0; b < 4; b++)
            assert_int_equal(image_tier(&all[i].policy, b, 0), LAYOUT_K6V2);
}

/* One block at a time: the coldest that may take a step, by looking at all. */
enum { MODEL_SESSIONS = 4, MODEL_BLOCKS = 6 };

static uint32_t slots_after(const struct image_policy *policy, uint32_t step) {
    return layout_tier_slots(image_step_tier(policy, step));
}

static int demote_one(struct pressure_session *all, uint32_t steps[][MODEL_BLOCKS]) {
    int found = 0;
    uint32_t at = 0, block = 0, waiting = 0;
    for (uint32_t i = 0; i < MODEL_SESSIONS; i++)
        waiting |= all[i].durable < all[i].blocks;
    for (uint32_t i = 0; i < MODEL_SESSIONS; i++) {
        for (uint32_t b = 0; b < all[i].durable; b++) {
            uint32_t step = steps[i][b];
            if (step >= image_steps(&all[i].policy) || (step > 0 && waiting))
                continue;
            int colder = !found || step < steps[at][block];
            if (found && step == steps[at][block] && i != at)
                colder = all[i].active != all[at].active
                             ? all[at].active
                             : all[i].last_used_ns < all[at].last_used_ns;
            if (!colder)
                continue;
            found = 1;
            at = i;
            block = b;
        }
    }
    if (!found)
        return 0;
    steps[at][block]++;
    return (int)(slots_after(&all[at].policy, steps[at][block] - 1) -
                 slots_after(&all[at].policy, steps[at][block]));
}

static void ranges_are_what_single_blocks_give(void **state) {
    (void)state;
    struct testing_random random;
    testing_random_init(&random, testing_seed("pools", 5));
    for (uint32_t round = 0; round < 2000; round++) {
        struct pressure_session all[MODEL_SESSIONS];
        struct pressure_move moves[MODEL_SESSIONS * IMAGE_AGES_MAX];
        uint32_t steps[MODEL_SESSIONS][MODEL_BLOCKS] = {{0}};
        for (uint32_t i = 0; i < MODEL_SESSIONS; i++) {
            all[i] = view(i, 1 + (uint32_t)testing_random_below(&random, MODEL_BLOCKS),
                          100 * i + testing_random_below(&random, 50) + (i % 2 ? 0 : 150),
                          (int)testing_random_below(&random, 2));
            all[i].policy.recipe = i % 2 ? IMAGE_RECIPE_V2 : IMAGE_RECIPE_V3;
            all[i].policy.top_k8v8 = (int)testing_random_below(&random, 2);
            if (testing_random_below(&random, 8) == 0)
                all[i].durable = (uint32_t)testing_random_below(&random, all[i].blocks + 1);
        }
        int need = 1 + (int)testing_random_below(&random, 120), freed = 0;
        const struct pressure_state at = {.wanted = (uint32_t)need};
        struct pressure_session sorted[MODEL_SESSIONS];
        memcpy(sorted, all, sizeof all);
        uint32_t made = pressure_moves(&at, sorted, MODEL_SESSIONS, moves);
        for (int got = 1; freed < need && got > 0; freed += got)
            got = demote_one(all, steps);
        for (uint32_t i = 0; i < MODEL_SESSIONS; i++) {
            const struct pressure_session *session = &sorted[i];
            assert_null(image_policy_wrong(&session->policy));
            for (uint32_t b = 0; b < session->blocks; b++)
                assert_int_equal(image_tier(&session->policy, b, 0),
                                 image_step_tier(&session->policy, steps[session->index][b]));
        }
        /* Given back slot by slot, everything is as it was. */
        for (uint32_t left = 1; left > 0 && made > 0;) {
            const struct pressure_state back = {.free = 16};
            left = pressure_moves(&back, sorted, MODEL_SESSIONS, moves);
        }
        for (uint32_t i = 0; i < MODEL_SESSIONS; i++)
            assert_int_equal(sorted[i].policy.ends[0], 0);
    }
}

/* --- sessions */

static struct session *make(struct life *life, const char *name, struct image_policy policy) {
    struct session_settings settings = support_engine_greedy(name, policy.recipe);
    struct session *session = NULL;
    struct kv_diag diag = {""};
    settings.policy = policy;
    if (session_create(life->engine, &settings, &session, &diag) != KV_OK)
        fail_msg("session_create: %s", diag.text);
    return session;
}

static const struct image_policy pressed = {.recipe = IMAGE_RECIPE_V3, .pressure = 1};

static void settle(struct life *life) {
    snapshot_drain(life->snapshot);
    while (engine_balance(life->engine))
        continue;
}

/* 264 slots, marks of 10 and 25 percent: two sessions of 1,500 tokens do not fit at the top. */
static void open_tight(char dir[TESTING_PATH_BYTES], struct life *life_out) {
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.engine.slots = 264;
    options.slots_low_percent = 10;
    options.slots_high_percent = 25;
    life_open(&options, life_out);
}

static void promoted_is_never_demoted(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct session_info info;
    struct receipt receipt;
    open_tight(dir, &life);
    struct session *session = make(&life, "chat", pressed);
    life_say(session, 1, 1500, 4, NULL);
    settle(&life);
    session_info(session, &info);
    uint32_t blocks = info.blocks, slots = info.slots;
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], blocks);
    assert_int_equal(info.policy_count, 1);
    const struct kv_digest never = life_resident(session);
    const struct life_twin twin = life_twin(session);

    struct session *other = make(&life, "other", pressed);
    life_say(other, 2, 1500, 4, NULL);
    session_info(session, &info);
    assert_true(info.slots < slots);
    assert_true(info.tier_blocks[LAYOUT_K8V4] < blocks);
    assert_int_equal(info.policy_count, 2);
    assert_int_equal(info.policies[0].policy.ends[0], 0);
    assert_true(info.policies[1].policy.ends[0] > 0);
    assert_true(info.policies[1].from_n_kv == info.n_kv);
    const struct life_twin lowered = life_twin(session);
    assert_memory_not_equal(lowered.logits.bytes, twin.logits.bytes, KV_DIGEST_BYTES);

    /* Asleep and awake as it is: lowered, with its history. */
    life_sleep(&life, session);
    settle(&life);
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.history_count, 2);
    assert_int_equal(receipt.mixed_from, 0);
    struct life_twin again = life_twin(session);
    life_same_twin(&lowered, &again);

    life_sleep(&life, other);
    settle(&life);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], blocks);
    assert_int_equal(info.slots, slots);
    /* Changed and changed back with no token between: nothing was ever read otherwise. */
    assert_int_equal(info.policy_count, 1);
    const struct kv_digest now = life_resident(session);
    assert_memory_equal(now.bytes, never.bytes, KV_DIGEST_BYTES);
    again = life_twin(session);
    life_same_twin(&twin, &again);
    life_close(&life);
}

static void same_as_policy(struct session *session) {
    struct session_info info;
    uint32_t wanted[16] = {0};
    session_info(session, &info);
    for (uint32_t b = 0; b < info.blocks; b++)
        wanted[image_tier(&info.policy, b, info.n_kv)]++;
    assert_memory_equal(wanted, info.tier_blocks, sizeof wanted);
}

/* While planes of a promotion come, what is read is what the policy in force says. */
static void tiers_change_when_the_policy_does(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct session_info info;
    open_tight(dir, &life);
    struct session *session = make(&life, "chat", pressed);
    struct session *other = make(&life, "other", pressed);
    life_say(session, 1, 1500, 4, NULL);
    life_say(other, 2, 1500, 4, NULL);
    settle(&life);
    life_say(session, 6, 3, 2, NULL);
    life_sleep(&life, other);
    int seen = 0;
    for (int more = 1; more;) {
        more = engine_balance(life.engine);
        seen += more;
        same_as_policy(session);
    }
    assert_true(seen > 0);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], info.blocks);
    assert_int_equal(info.policy_count, 3);
    assert_true(info.policies[2].from_n_kv == info.n_kv);
    life_sleep(&life, session);
    struct receipt receipt;
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.history_count, 3);
    assert_true(receipt.history[1].policy.ends[0] > 0);
    life_close(&life);
}

/* The planes of one block cannot be read: it stays as it is with those before it, in every respect;
 * the newer ones come back. */
static void a_lost_plane_holds_up_older_blocks_only(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct session_info info;
    struct store_extent extent;
    struct receipt receipt;
    uint8_t bytes[4096];
    open_tight(dir, &life);
    struct session *session = make(&life, "chat", pressed);
    struct session *other = make(&life, "other", pressed);
    life_say(session, 1, 1500, 4, NULL);
    life_say(other, 2, 1500, 4, NULL);
    settle(&life);
    life_sleep(&life, session);
    session = life_wake(&life, "chat", NULL);
    struct record_snapshot head = life_head(&life, "chat", NULL);
    struct record_key key = record_key_block(head.lineage, 1);
    life_extent(&life, &key, LAYOUT_KL, &extent);
    extent.stored_bytes = sizeof bytes;
    life_disk(dir, &extent, bytes, 0);
    bytes[7] ^= 1;
    life_disk(dir, &extent, bytes, 1);
    life_sleep(&life, other);
    for (int more = 1; more;) {
        more = engine_balance(life.engine);
        same_as_policy(session);
    }
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], info.blocks - 2);
    const struct life_twin twin = life_twin(session);
    life_sleep(&life, session);
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    const struct life_twin woken = life_twin(session);
    life_same_twin(&twin, &woken);
    life_close(&life);
}

/* At the floor for want of slots, and up again when there are some: the history has both. */
static void one_that_fits_at_the_floor_comes_up(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct session_info info;
    struct receipt receipt;
    struct session *session;
    struct kv_diag diag = {""};
    const struct restore_options at_floor = {.tiers = RECEIPT_TIERS_FLOOR};
    life_begin(dir, &life);
    session = make(&life, "chat", pressed);
    life_say(session, 1, 1500, 4, NULL);
    const struct kv_digest never = life_resident(session);
    const struct life_twin twin = life_twin(session);
    life_sleep(&life, session);
    if (restore_wake(&life.source, "chat", &at_floor, &session, &receipt, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], info.blocks);
    assert_int_equal(receipt.history_count, 2);
    assert_int_equal(receipt.policy.ends[2], info.blocks);
    assert_int_equal(receipt.mixed_from, 0);
    same_as_policy(session);
    settle(&life);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], info.blocks);
    const struct kv_digest now = life_resident(session);
    assert_memory_equal(now.bytes, never.bytes, KV_DIGEST_BYTES);
    const struct life_twin again = life_twin(session);
    life_same_twin(&twin, &again);
    life_close(&life);
}

/* Beside one under pressure, on too few slots, one by age answers as if it were alone. */
static void age_is_left_alone(void **state) {
    (void)state;
    static const struct image_policy by_age = {
        .recipe = IMAGE_RECIPE_V3, .age_count = 1, .ages = {700}};
    struct life_turn turns[2][2];
    struct session_info info;
    for (int crowded = 0; crowded < 2; crowded++) {
        char dir[TESTING_PATH_BYTES];
        struct life life;
        open_tight(dir, &life);
        struct session *session = make(&life, "age", by_age);
        life_say(session, 1, 1400, 8, &turns[crowded][0]);
        if (crowded) {
            struct session *other = make(&life, "other", pressed);
            life_say(other, 2, 1700, 4, NULL);
            settle(&life); /* only what is durable goes */
            session_info(other, &info);
            assert_true(info.policy_count > 1);
        }
        settle(&life);
        life_say(session, 3, 60, 16, &turns[crowded][1]);
        session_info(session, &info);
        assert_int_equal(info.policy_count, 1);
        life_close(&life);
    }
    for (int turn = 0; turn < 2; turn++)
        life_same_turn(&turns[0][turn], &turns[1][turn]);
}

/* More changes than a history has room for: the newest stay, and it says where it begins. */
static void a_long_history_forgets_its_beginning(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct session_info info;
    struct receipt receipt;
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    life_open(&options, &life);
    struct session *session = make(&life, "chat", pressed);
    life_say(session, 1, 620, 1, NULL);
    for (uint32_t i = 0; i < IMAGE_POLICIES_MAX; i++) {
        snapshot_drain(life.snapshot);
        engine_apply(life.engine);
        (void)engine_relieve(life.engine, options.engine.slots);
        session_info(session, &info);
        assert_int_equal(info.tier_blocks[LAYOUT_K6V2], 1);
        life_say(session, 10 + i, 1, 2, NULL);
        settle(&life);
        session_info(session, &info);
        assert_int_equal(info.tier_blocks[LAYOUT_K8V4], 1);
    }
    assert_int_equal(info.policy_count, IMAGE_POLICIES_MAX);
    assert_true(info.policies[0].from_n_kv > 0);
    assert_int_equal(info.mixed_from, 0);
    const struct life_twin twin = life_twin(session);
    life_sleep(&life, session);
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.history_count, IMAGE_POLICIES_MAX);
    const struct life_twin woken = life_twin(session);
    life_same_twin(&twin, &woken);
    life_close(&life);
}

/* --- half the need */

enum { SESSIONS = 4, TURNS = 5, TURN_TOKENS = 500 };

struct half {
    struct service *service;
    char model[TESTING_PATH_BYTES + 16], store[TESTING_PATH_BYTES + 16];
    uint32_t receipts, lowered; /* of sleeps and wakes, and those with a history */
    uint32_t ids[SESSIONS][TURNS * (TURN_TOKENS + 8)];
    uint64_t counts[SESSIONS];
};

static uint64_t take_receipt(void *context, const struct receipt *receipt) {
    struct half *half = context;
    assert_int_equal(receipt->err, KV_OK);
    assert_true(receipt->history_count >= 1);
    assert_true(
        image_policy_equal(&receipt->history[receipt->history_count - 1].policy, &receipt->policy));
    half->receipts++;
    half->lowered += receipt->history_count > 1;
    if (receipt->operation == RECEIPT_RESTORE) {
        assert_int_equal(receipt->fingerprint, RECEIPT_BITS_EQUAL);
        assert_int_equal(receipt->tokens_prefilled, 0);
    }
    return 0;
}

static void open_half(struct half *half, uint32_t slots) {
    struct tiny_model_options options = tiny_model_default();
    const struct layout_geometry geometry = {options.layers, options.kv_heads, options.head_dim};
    char dir[TESTING_PATH_BYTES];
    struct service_settings settings;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    snprintf(half->model, sizeof half->model, "%s/tiny.gguf", dir);
    snprintf(half->store, sizeof half->store, "%s/store", dir);
    tiny_model_write(&options, half->model);
    service_settings_usual(&settings);
    settings.model_path = half->model;
    settings.store_dir = half->store;
    settings.threads = 1;
    settings.slot_budget_bytes =
        slots / 8 * (8 * layout_slot_bytes(&geometry) + layout_meta_frame_bytes(&geometry));
    settings.reserve_slots = 16;
    settings.poison_free_slots = 1;
    settings.probes = 0;
    settings.slots_low_percent = 5;
    settings.slots_high_percent = 10;
    settings.policy = pressed;
    settings.receipt = take_receipt;
    settings.receipt_context = half;
    if (service_open(&settings, &half->service, &diag) != KV_OK)
        fail_msg("service_open: %s", diag.text);
}

static struct session *awake(struct half *half, uint32_t index, enum service_found *found_out) {
    const struct service_lookup lookup = {.create = 1};
    struct service_opened opened;
    struct session *session = NULL;
    struct kv_diag diag = {""};
    char name[8];
    snprintf(name, sizeof name, "s%u", index);
    if (service_session(half->service, name, &lookup, &session, &opened, &diag) != KV_OK)
        fail_msg("%s: %s", name, diag.text);
    *found_out = opened.found;
    return session;
}

static void still_all_there(struct half *half, uint32_t index, struct session *session) {
    struct session_info info;
    session_info(session, &info);
    assert_true(info.n == half->counts[index]);
    assert_memory_equal(info.ids, half->ids[index], info.n * sizeof *info.ids);
}

static void remember(struct half *half, uint32_t index, struct session *session) {
    struct session_info info;
    session_info(session, &info);
    half->counts[index] = info.n;
    assert_true(info.n <= sizeof half->ids[index] / sizeof half->ids[index][0]);
    memcpy(half->ids[index], info.ids, info.n * sizeof *info.ids);
}

static void half_the_need_is_enough(void **state) {
    (void)state;
    static struct half half;
    struct testing_random random;
    struct life_twin twins[SESSIONS];
    int has_twin[SESSIONS] = {0};
    uint32_t compared = 0, woken = 0;
    struct kv_diag diag = {""};
    struct receipt receipt;
    const uint64_t tokens = TURNS * (TURN_TOKENS + 4);
    const struct image_policy top = {.recipe = IMAGE_RECIPE_V3};
    memset(&half, 0, sizeof half);
    testing_random_init(&random, testing_seed("half", 3));
    open_half(&half, 128);
    uint32_t need = SESSIONS * engine_plan_slots(service_engine(half.service), &top, tokens);
    service_close(half.service);
    open_half(&half, need / 2);
    for (uint32_t turn = 0; turn < SESSIONS * TURNS; turn++) {
        uint32_t index = turn % SESSIONS;
        enum service_found found;
        struct session *session = awake(&half, index, &found);
        woken += found == SERVICE_WOKEN;
        if (found != SERVICE_NEW)
            still_all_there(&half, index, session);
        if (found == SERVICE_WOKEN && has_twin[index]) {
            struct life_twin now = life_twin(session);
            life_same_twin(&twins[index], &now);
            compared++;
        }
        has_twin[index] = 0;
        life_say(session, 100 + turn, TURN_TOKENS, 4, NULL);
        remember(&half, index, session);
        uint32_t other = (uint32_t)testing_random_below(&random, SESSIONS);
        char name[8];
        snprintf(name, sizeof name, "s%u", other);
        session = session_find(service_engine(half.service), name);
        if (session == NULL)
            continue;
        twins[other] = life_twin(session);
        has_twin[other] = 1;
        if (service_sleep(half.service, session, &receipt, &diag) != KV_OK)
            fail_msg("%s", diag.text);
    }
    struct engine_slots slots;
    engine_slots(service_engine(half.service), &slots);
    printf("%u slots for a need of %u: %u wakes, %u twins, %u of %u receipts with a history\n",
           slots.total, need, woken, compared, half.lowered, half.receipts);
    assert_true(compared >= 5);
    assert_true(half.lowered > 0);
    service_close(half.service);
}

/* --- one that was just woken */

static void one_just_woken_runs_first(void **state) {
    (void)state;
    static struct half half;
    enum service_found found;
    struct kv_diag diag = {""};
    struct receipt receipt;
    struct session *session;
    memset(&half, 0, sizeof half);
    open_half(&half, 208);
    for (uint32_t i = 0; i < 2; i++) {
        session = awake(&half, i, &found);
        life_say(session, i, 1400, 2, NULL);
        if (service_sleep(half.service, session, &receipt, &diag) != KV_OK)
            fail_msg("%s", diag.text);
    }
    session = awake(&half, 0, &found);
    assert_int_equal(found, SERVICE_WOKEN);
    assert_int_equal(service_wake(half.service, "s1", NULL, &session, &receipt, &diag),
                     KV_ERR_NO_SLOTS);
    assert_non_null(session = session_find(service_engine(half.service), "s0"));
    life_say(session, 9, 5, 2, NULL);
    session = awake(&half, 1, &found);
    assert_int_equal(found, SERVICE_WOKEN);
    assert_null(session_find(service_engine(half.service), "s0"));
    service_close(half.service);
}

/* --- other ladders */

static uint32_t lower(struct life *life, const char *name, enum layout_stream stream) {
    struct record_snapshot head = life_head(life, name, NULL);
    const struct snap_lower_args args = {.store = life->store,
                                         .alloc = kv_alloc_system(),
                                         .lineage = head.lineage,
                                         .blocks = head.block_count,
                                         .streams = 1u << stream};
    struct snap_lower_sum sum;
    struct kv_diag diag = {""};
    if (snap_lower_lineage(&args, &sum, &diag) != KV_OK)
        fail_msg("snap_lower_lineage: %s", diag.text);
    return sum.blocks;
}

/* Sealed, lowered by age, asleep, awake, talked to like one that never slept; then its planes leave
 * the store in the order of its ladder. */
static void life_of(struct image_policy policy, const enum layout_stream *leaving,
                    const uint32_t *leave) {
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    struct session_info info;
    struct life_turn twin_turn, turn;
    life_begin(dir, &life);
    struct session *twin = make(&life, "twin", policy);
    struct session *session = make(&life, "chat", policy);
    life_say(twin, 1, 2000, 3, NULL);
    life_say(session, 1, 2000, 3, NULL);
    session_info(session, &info);
    for (uint32_t step = 0; step <= image_steps(&policy); step++)
        assert_true(info.tier_blocks[image_step_tier(&policy, step)] > 0);
    snapshot_drain(life.snapshot);
    engine_apply(life.engine);
    session_info(session, &info);
    assert_int_equal(info.slots, engine_plan_slots(life.engine, &policy, info.n_kv));
    const struct kv_digest before = life_resident(session);
    life_sleep(&life, session);
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.policy.recipe, policy.recipe);
    for (int i = 0; i < LAYOUT_TIER_COUNT; i++)
        assert_int_equal(receipt.tier_blocks[i], info.tier_blocks[i]);
    assert_int_equal(receipt.raw_bytes[LAYOUT_VX] > 0, policy.top_k8v8);
    const struct kv_digest after = life_resident(session);
    assert_memory_equal(after.bytes, before.bytes, KV_DIGEST_BYTES);
    life_say(twin, 3, 300, 32, &twin_turn);
    life_say(session, 3, 300, 32, &turn);
    life_same_turn(&twin_turn, &turn);
    life_sleep(&life, session);

    enum layout_tier best = image_top(&policy);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t count = lower(&life, "chat", leaving[i]);
        assert_int_equal(count > 0, leave[i]);
        if (leave[i])
            best = image_tier_without(&policy, best, 1u << leaving[i]);
        session = life_wake(&life, "chat", &receipt);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
        for (uint32_t step = 0; image_step_tier(&policy, step) != best; step++)
            assert_int_equal(receipt.tier_blocks[image_step_tier(&policy, step)], 0);
        assert_true(receipt.tier_blocks[best] > 0);
        session_drop(session);
    }
    assert_int_equal(best, image_floor(&policy));
    life_close(&life);
}

static const enum layout_stream leaving[] = {LAYOUT_VX, LAYOUT_KL, LAYOUT_VR2, LAYOUT_VR1};

static void recipe_v2_keeps_k(void **state) {
    static const uint32_t leave[] = {0, 0, 1, 1};
    (void)state;
    life_of((struct image_policy){.recipe = IMAGE_RECIPE_V2, .age_count = 2, .ages = {512, 1024}},
            leaving, leave);
}

static void k8v8_stands_in_front(void **state) {
    static const uint32_t leave[] = {1, 1, 1, 1}, leave_v2[] = {1, 0, 1, 1};
    (void)state;
    life_of((struct image_policy){.recipe = IMAGE_RECIPE_V3,
                                  .age_count = 4,
                                  .ages = {512, 768, 1024, 1280},
                                  .top_k8v8 = 1},
            leaving, leave);
    life_of(
        (struct image_policy){
            .recipe = IMAGE_RECIPE_V2, .age_count = 3, .ages = {512, 768, 1024}, .top_k8v8 = 1},
        leaving, leave_v2);
}

TESTING_MAIN(cmocka_unit_test(the_coldest_goes_first),
             cmocka_unit_test(what_is_being_written_stays),
             cmocka_unit_test(ranges_are_what_single_blocks_give),
             cmocka_unit_test(promoted_is_never_demoted),
             cmocka_unit_test(tiers_change_when_the_policy_does),
             cmocka_unit_test(a_lost_plane_holds_up_older_blocks_only),
             cmocka_unit_test(one_that_fits_at_the_floor_comes_up),
             cmocka_unit_test(age_is_left_alone),
             cmocka_unit_test(a_long_history_forgets_its_beginning),
             cmocka_unit_test(half_the_need_is_enough), cmocka_unit_test(one_just_woken_runs_first),
             cmocka_unit_test(recipe_v2_keeps_k), cmocka_unit_test(k8v8_stands_in_front))
