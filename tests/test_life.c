/* tests/test_life.c - the whole life of a session: chat, seal, save, die, wake, go on.
 *
 * Responsible for: restored = never evicted, bit for bit, on the tiny random model.
 * Not responsible for: what goes wrong (test_snapshot.c, test_restore.c).
 * Broken twin: BREAK_SAVED_LOGITS.
 */
#include "tests/support_life.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FIRST_TURN = 1100, ANSWER = 20, SECOND_TURN = 300, GREEDY = 32 };

/* Runs `call` in a process of its own that ends without closing anything. */
static void in_a_process_that_is_killed(void (*call)(const struct life_options *options),
                                        const struct life_options *options) {
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        call(options);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Recipes of one tier, whose blocks are one stream each. */
static const struct {
    const char *name;
    enum image_recipe recipe;
    enum layout_stream stream;
} plains[] = {{"plain", IMAGE_RECIPE_BF16, LAYOUT_BF16},
              {"eight bits", IMAGE_RECIPE_FP8, LAYOUT_FP8},
              {"groups", IMAGE_RECIPE_V1, LAYOUT_K8I4}};
enum { PLAINS = sizeof plains / sizeof plains[0] };

static void chat_and_save(const struct life_options *options) {
    struct life life;
    life_open(options, &life);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, FIRST_TURN, ANSWER, NULL);
    for (int i = 0; i < PLAINS; i++) {
        struct session *plain = life_session(&life, plains[i].name, plains[i].recipe);
        life_say(plain, 2, 700, ANSWER, NULL);
        life_save(&life, plain, 0);
    }
    struct receipt receipt = life_save(&life, session, 0);
    assert_int_equal(receipt.err, KV_OK);
    assert_true(receipt.door_bytes > 0);
    /* What comes after the save is lost with the process, and must not come back. */
    life_say(session, 99, 400, 4, NULL);
    snapshot_drain(life.snapshot);
}

/* The same two turns in an engine that never evicts, in other slots and order. */
static void never_evicted(struct life_options options, enum image_recipe recipe, uint64_t seed,
                          uint32_t first, struct life_turn *turn_out) {
    char dir[TESTING_PATH_BYTES];
    struct life life;
    testing_temp_dir(dir);
    options.dir = dir;
    options.engine.shuffle_seed = 0;
    life_open(&options, &life);
    struct session *session = life_session(&life, "control", recipe);
    life_say(session, seed, first, ANSWER, NULL);
    life_say(session, 3, SECOND_TURN, GREEDY, turn_out);
    life_close(&life);
}

static void wake_and_compare(const struct life_options *options) {
    struct life life;
    struct receipt receipt;
    struct life_turn control, woken;
    life_open(options, &life);
    /* Others take slots first, so that nothing lands where it was. */
    struct session *other = life_session(&life, "other", IMAGE_RECIPE_V3);
    life_say(other, 50, 900, 3, NULL);
    struct session *session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.tokens_prefilled, 0);
    assert_int_equal(receipt.tokens_reused, FIRST_TURN + ANSWER - 1);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_true(receipt.door_bytes > 0);
    assert_int_equal(receipt.digests_failed, 0);
    const uint32_t *tiers = receipt.tier_blocks;
    assert_int_equal(receipt.digests_checked, 1 + receipt.pages + 8 * tiers[LAYOUT_K8V4] +
                                                  7 * tiers[LAYOUT_K6V4] + 6 * tiers[LAYOUT_K6V3] +
                                                  5 * tiers[LAYOUT_K6V2]);
    assert_true(tiers[LAYOUT_K8V4] > 0 && tiers[LAYOUT_K6V4] > 0);
    life_say(session, 3, SECOND_TURN, GREEDY, &woken);
    never_evicted(*options, IMAGE_RECIPE_V3, 1, FIRST_TURN, &control);
    life_same_turn(&control, &woken);
    struct session_info info;
    session_info(session, &info);
    assert_int_equal(info.tokens_prefilled, SECOND_TURN + 1);

    for (int i = 0; i < PLAINS; i++) {
        session = life_wake(&life, plains[i].name, &receipt);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
        assert_int_equal(receipt.raw_bytes[LAYOUT_META], 0);
        assert_true(receipt.raw_bytes[plains[i].stream] > 0);
        life_say(session, 3, SECOND_TURN, GREEDY, &woken);
        never_evicted(*options, plains[i].recipe, 2, 700, &control);
        life_same_turn(&control, &woken);
        session_drop(session);
    }
    life_close(&life);
}

static void whole_life(enum engine_simd simd) {
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.engine.simd = simd;
    in_a_process_that_is_killed(chat_and_save, &options);
    options.engine.shuffle_seed = 12345;
    wake_and_compare(&options);
}

static void woken_is_never_evicted_in_c(void **state) {
    (void)state;
    whole_life(ENGINE_SIMD_C);
}

static void woken_is_never_evicted_in_avx2(void **state) {
    (void)state;
    if (!__builtin_cpu_supports("avx2"))
        testing_skip("this machine has no AVX2");
    whole_life(ENGINE_SIMD_AVX2);
}

static struct image_policy ages(uint64_t first, uint64_t second, uint64_t third) {
    return (struct image_policy){
        .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {first, second, third}};
}

static void set_ages(struct session *session, const struct image_policy *policy) {
    struct kv_diag diag = {""};
    if (session_set_policy(session, policy, &diag) != KV_OK)
        fail_msg("session_set_policy: %s", diag.text);
    while (session_promoting(session))
        engine_apply(session_engine(session));
}

/* Demoted, asleep, awake, promoted, with no token in between: as if never demoted. */
static void demoted_and_promoted_is_never_demoted(void **state) {
    (void)state;
    const struct image_policy fine = ages(8000, 8000, 8000);
    const struct image_policy coarse = ages(0, 256, 512);
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct life_turn twin_turn, turn;
    struct receipt receipt;
    struct session_info info;
    life_begin(dir, &life);
    struct session *twin = life_session(&life, "twin", IMAGE_RECIPE_V3);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    set_ages(twin, &fine);
    set_ages(session, &fine);
    life_say(twin, 1, 1500, 4, NULL);
    life_say(session, 1, 1500, 4, NULL);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], info.blocks);
    uint32_t slots_fine = info.slots;

    snapshot_drain(life.snapshot);
    engine_apply(life.engine);
    set_ages(session, &coarse);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], 0);
    assert_true(info.slots < slots_fine);
    life_sleep(&life, session);
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.tier_blocks[LAYOUT_K8V4], 0);
    assert_int_equal(receipt.raw_bytes[LAYOUT_KL], 0);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    set_ages(session, &fine);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], info.blocks);
    assert_int_equal(info.tokens_prefilled + info.tokens_decoded, 0);
    struct kv_digest a = life_resident(twin), b = life_resident(session);
    assert_memory_equal(a.bytes, b.bytes, KV_DIGEST_BYTES);
    life_say(twin, 3, SECOND_TURN, GREEDY, &twin_turn);
    life_say(session, 3, SECOND_TURN, GREEDY, &turn);
    life_same_turn(&twin_turn, &turn);

    /* Coarser tiers do change the answer, so the comparison above can fail. */
    set_ages(session, &coarse);
    life_say(twin, 4, 20, GREEDY, &twin_turn);
    life_say(session, 4, 20, GREEDY, &turn);
    assert_memory_not_equal(twin_turn.rows.bytes, turn.rows.bytes, KV_DIGEST_BYTES);
    life_close(&life);
}

/* Short sessions: partial sinks, sinks alone, one window page, no block yet. */
static void short_sessions_wake(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 128, 319, 320, 575, 576, 577};
    char dir[TESTING_PATH_BYTES];
    struct life life;
    life_begin(dir, &life);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct life_turn kept, woken;
        struct receipt receipt;
        struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
        life_say(session, i, lengths[i], 0, NULL);
        life_save(&life, session, 0);
        life_say(session, 3, 5, 6, &kept);
        session_drop(session);
        session = life_wake(&life, "chat", &receipt);
        assert_int_equal(receipt.tokens_reused, lengths[i]);
        life_say(session, 3, 5, 6, &woken);
        life_same_turn(&kept, &woken);
        session_drop(session);
        /* A block of the dropped life may still be on its way, and batches come one at a time. */
        snapshot_drain(life.snapshot);
        assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "chat", NULL), KV_OK);
    }
    life_close(&life);
}

/* With nothing pending there is nothing to continue from once it is saved, slept since or not;
 * before, there is. BREAK_SAVED_LOGITS lets the one that never slept go on. */
static void nothing_pending_is_the_same_slept_or_not(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct kv_diag diag = {""};
    life_begin(dir, &life);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 700, 0, NULL);
    life_save(&life, session, 0);
    enum kv_err kept = session_generate(session, 3, &diag);
    session_drop(session);
    session = life_wake(&life, "chat", NULL);
    enum kv_err woken = session_generate(session, 3, &diag);
    assert_int_equal(kept, KV_ERR_INVALID);
    assert_int_equal(woken, kept);
    assert_non_null(strstr(diag.text, "feed something first"));
    life_say(session, 2, 20, 3, NULL);
    life_save(&life, session, 0); /* one token is pending now */
    assert_int_equal(session_generate(session, 3, &diag), KV_OK);
    support_engine_run(life.engine);
    session_drop(session);
    session = life_wake(&life, "chat", NULL);
    assert_int_equal(session_generate(session, 3, &diag), KV_OK);
    support_engine_run(life.engine);
    life_close(&life);
}

/* Another numerics id: proof by the best tokens and a bound, and the receipt says so. */
static void another_numerics_id_is_proven_by_bound(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    if (!__builtin_cpu_supports("avx2"))
        testing_skip("this machine has no AVX2");
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.engine.simd = ENGINE_SIMD_C;
    life_open(&options, &life);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 3, NULL);
    life_sleep(&life, session);
    life_close(&life);
    options.engine.simd = ENGINE_SIMD_AVX2;
    life_open(&options, &life);
    life_wake(&life, "chat", &receipt);
    printf("plain C against AVX2: largest difference of the best logits %.3g\n",
           (double)receipt.fingerprint_max_diff);
    assert_int_equal(receipt.fingerprint, RECEIPT_TOP_EQUAL);
    life_close(&life);
}

TESTING_MAIN(cmocka_unit_test(woken_is_never_evicted_in_avx2),
             cmocka_unit_test(woken_is_never_evicted_in_c),
             cmocka_unit_test(demoted_and_promoted_is_never_demoted),
             cmocka_unit_test(short_sessions_wake),
             cmocka_unit_test(nothing_pending_is_the_same_slept_or_not),
             cmocka_unit_test(another_numerics_id_is_proven_by_bound))
