/* tests/test_life.c - the whole life of a session: chat, seal, save, die, wake, go on.
 *
 * Responsible for: restored = never evicted, bit for bit, on the tiny random model.
 * Not responsible for: what goes wrong (test_snapshot.c, test_restore.c).
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

static void chat_and_save(const struct life_options *options) {
    struct life life;
    life_open(options, &life);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    struct session *plain = life_session(&life, "plain", IMAGE_RECIPE_BF16);
    life_say(session, 1, FIRST_TURN, ANSWER, NULL);
    life_say(plain, 2, 700, ANSWER, NULL);
    struct receipt receipt = life_save(&life, session, 0);
    assert_int_equal(receipt.err, KV_OK);
    assert_true(receipt.door_bytes > 0);
    life_save(&life, plain, 0);
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
    assert_int_equal(receipt.digests_checked, 1 + receipt.pages + 7 * tiers[LAYOUT_K8V4] +
                                                  6 * tiers[LAYOUT_K6V4] + 5 * tiers[LAYOUT_K6V3] +
                                                  4 * tiers[LAYOUT_K6V2]);
    assert_true(tiers[LAYOUT_K8V4] > 0 && tiers[LAYOUT_K6V4] > 0);
    life_say(session, 3, SECOND_TURN, GREEDY, &woken);
    never_evicted(*options, IMAGE_RECIPE_V3, 1, FIRST_TURN, &control);
    life_same_turn(&control, &woken);
    struct session_info info;
    session_info(session, &info);
    assert_int_equal(info.tokens_prefilled, SECOND_TURN + 1);

    session = life_wake(&life, "plain", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.raw_bytes[LAYOUT_META], 0);
    assert_true(receipt.raw_bytes[LAYOUT_BF16] > 0);
    life_say(session, 3, SECOND_TURN, GREEDY, &woken);
    never_evicted(*options, IMAGE_RECIPE_BF16, 2, 700, &control);
    life_same_turn(&control, &woken);
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

TESTING_MAIN(cmocka_unit_test(woken_is_never_evicted_in_avx2),
             cmocka_unit_test(woken_is_never_evicted_in_c))
