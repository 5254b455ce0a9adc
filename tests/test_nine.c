/* tests/test_nine.c - the nine users at the small geometry, and that their checks can fail.
 *
 * Responsible for: slots by arithmetic against the engine under every recipe, users that fit, the
 * goals of 131,072 tokens by arithmetic; needles, thieves and what is invented; wakes that are not
 * proven; a short life of more sessions than are awake; the whole program; the plotting tool.
 * Not responsible for: 8B geometry (make gpu-demo).
 *
 * Fails with BREAK_NINE_THIEF (a thief is not counted), BREAK_NINE_SLOT (arithmetic is off by one
 * slot), BREAK_NINE_UNPROVEN (every wake counts as proven), BREAK_NINE_KEPT (a needle that the hole
 * does not hurt counts as kept) and BREAK_NINE_SHORT (steps of fewer count as steps of all).
 */
#include "tests/support_nine_curve.h"
#include "tests/support_nine_save.h"
#include "tests/support_nine_wake.h"
#include "tests/testing.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOKENS = 3000, USERS = 3, SESSIONS = 5 };

static struct nine nine;

static void must(enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK)
        fail_msg("error %d: %s", (int)err, diag->text);
}

static struct nine_settings small(void) {
    return (struct nine_settings){.model = "synth:small",
                                  .tokens = TOKENS,
                                  .seed = 3,
                                  .device = ENGINE_DEVICE_CPU,
                                  .threads = 1,
                                  .device_memory_bytes = UINT64_MAX,
                                  .pool_bytes = UINT64_C(64) << 20,
                                  .reserve_slots = 64};
}

/* --- slots */

/* The table of the goals: 54.8 GiB, slots of 1 MiB, frames of 256 KiB, 131,072 tokens. */
static void the_goals_of_users_follow_from_arithmetic(void **state) {
    (void)state;
    const struct nine_room room = {(uint64_t)(54.8 * 1024) << 20, 1 << 20, 1 << 18, 0};
    uint32_t compared = 0;

    for (uint32_t i = 0; i < NINE_RECIPES; i++) {
        const struct nine_recipe *recipe = nine_recipe_at(i);
        struct image_policy policy = nine_recipe_policy(recipe, 131072);
        if (!recipe->users_goal)
            continue;
        assert_int_equal(nine_pool_fit(&room, &policy, 131072), recipe->users_goal);
        compared++;
    }
    assert_int_equal(compared, 6);
    assert_null(nine_recipe_at(NINE_RECIPES));
    assert_null(nine_recipe_find("v", 1));
}

/* Fails with BREAK_NINE_SLOT. */
static void every_recipe_agrees_to_the_slot_and_answers(void **state) {
    (void)state;
    struct nine_settings settings = small();
    struct nine_curve curve;
    struct kv_diag diag = {""};
    char text[NINE_TEXT_BYTES];
    uint32_t users = testing_quick() ? 1 : USERS;

    settings.tokens = NINE_TOKENS_MIN;
    must(nine_open(&settings, users, &nine, &diag), &diag);
    for (uint32_t i = 0; i < NINE_RECIPES; i++) {
        uint32_t tiers = 0;
        must(nine_curve_run(&nine, nine_recipe_at(i), users, 2, &curve, &diag), &diag);
        if (!curve.equal)
            fail_msg("%s: %s", curve.recipe->name, curve.differs);
        if (!nine_score_good(&curve.score))
            fail_msg("%s: %s", curve.recipe->name, curve.score.first_wrong);
        assert_int_equal(curve.largest, users);
        assert_int_equal(curve.score.asked, users * NINE_ASKS);
        int control =
            curve.policy.recipe == IMAGE_RECIPE_FP8 || curve.policy.recipe == IMAGE_RECIPE_V1;
        assert_int_equal(curve.score.graded, control ? 0 : users * 4);
        if (curve.kept.kept != curve.kept.asked)
            fail_msg("%s: %s", curve.recipe->name, curve.kept.first_unkept);
        assert_int_equal(curve.kept.asked, users * NINE_NEEDLES);
        assert_int_equal(curve.kept.least, NINE_NEEDLES);
        assert_int_equal(curve.kept.depths[0].asked, 0);
        for (uint32_t depth = 1; depth < NINE_DEPTHS; depth++)
            assert_true(curve.kept.depths[depth].right >= users);
        assert_int_equal(curve.score.absent, users * (NINE_ABSENT + (control ? 4 : 0)));
        for (uint32_t tier = 0; tier < LAYOUT_TIER_BF16; tier++)
            tiers += curve.score.tiers[tier].asked > 0;
        if (strcmp(curve.recipe->name, "v3-quarters") == 0)
            assert_int_equal(tiers, 4);
        curve.predicted.slots--;
        assert_false(nine_pool_equal(&curve.predicted, &curve.counted, curve.used, text));
        curve.predicted.slots++;
        curve.counted.streams[LAYOUT_PAGE]++;
        assert_false(nine_pool_equal(&curve.predicted, &curve.counted, curve.used, text));
        nine_drop_all(&nine);
    }
    nine_close(&nine);
}

static void pressure_lowers_what_does_not_fit_and_is_counted(void **state) {
    (void)state;
    struct nine_settings settings = small();
    struct nine_curve curve;
    struct kv_diag diag = {""};

    settings.pool_bytes = UINT64_C(24) << 20;
    must(nine_open(&settings, USERS, &nine, &diag), &diag);
    must(nine_curve_run(&nine, nine_recipe_find("v3-pressure-k8v8", 16), USERS, 2, &curve, &diag),
         &diag);
    if (!curve.equal)
        fail_msg("%s", curve.differs);
    if (!nine_score_good(&curve.score))
        fail_msg("%s", curve.score.first_wrong);
    assert_int_equal(curve.largest, USERS);
    assert_int_equal(curve.counted.blocks[LAYOUT_K8V8], 0);
    assert_true(curve.counted.blocks[LAYOUT_K8V4] > 0 && curve.counted.blocks[LAYOUT_K6V4] > 0);
    /* Nobody is there to bring planes back, and a smaller crowd of the same pool says so. */
    nine_drop(&nine, 0);
    nine_settle(&nine);
    for (int i = 0; i < 3; i++)
        (void)engine_balance(nine.engine);
    nine_drop_all(&nine);
    struct engine_slots slots;
    engine_slots(nine.engine, &slots);
    assert_int_equal(slots.used, 0);
    nine_close(&nine);
}

static void as_many_users_fit_as_arithmetic_says(void **state) {
    (void)state;
    struct nine_settings settings = small();
    struct nine_fit fits[NINE_RECIPES] = {{0}};
    struct kv_diag diag = {""};
    uint32_t counted = 0;

    settings.tokens = NINE_TOKENS_MIN;
    /* Between one slot too few and one more than enough for another user. */
    for (uint64_t kib = 28 << 10; kib < (28 << 10) + 2 * 960; kib += 960) {
        settings.pool_bytes = kib << 10;
        must(nine_fit_run(&settings, fits, &diag), &diag);
        for (uint32_t i = 0; i < NINE_RECIPES; i++) {
            if (fits[i].predicted != fits[i].counted)
                fail_msg("%s, %llu KiB: %u users predicted, %u counted", nine_recipe_at(i)->name,
                         (unsigned long long)kib, fits[i].predicted, fits[i].counted);
            counted += fits[i].counted;
        }
    }
    assert_true(counted > 2 * 20);
}

static void a_full_pool_is_said(void **state) {
    (void)state;
    struct nine_settings settings = small();
    struct nine_curve curve;
    struct kv_diag diag = {""};

    settings.pool_bytes = UINT64_C(24) << 20;
    must(nine_open(&settings, USERS, &nine, &diag), &diag);
    must(nine_curve_run(&nine, nine_recipe_find("bf16", 4), USERS, 1, &curve, &diag), &diag);
    assert_in_range(curve.largest, 1, USERS - 1);
    assert_true(curve.full[0] != 0 && curve.equal);
    assert_int_equal(curve.points[curve.point_count - 1].users, curve.largest);
    nine_close(&nine);
}

/* --- answers */

/* Fails with BREAK_NINE_THIEF. */
static void a_thief_is_counted_and_so_is_what_is_invented(void **state) {
    (void)state;
    const struct nine_settings settings = small();
    struct support_synth_answer answers[2][NINE_ASKS];
    struct nine_score score = {0};
    struct nine_curve curve;
    struct kv_diag diag = {""};

    must(nine_open(&settings, 2, &nine, &diag), &diag);
    must(nine_curve_run(&nine, nine_recipe_find("v3", 2), 2, 1, &curve, &diag), &diag);
    for (uint32_t i = 0; i < 2; i++)
        must(nine_ask(&nine, i, answers[i], &diag), &diag);
    nine_judge(&nine, 0, TOKENS, answers[1], &score);
    assert_int_equal(score.right, NINE_FOREIGN + NINE_ABSENT);
    assert_int_equal(score.thief, NINE_FACTS);
    assert_false(nine_score_good(&score));
    memset(&score, 0, sizeof score);
    answers[0][NINE_FACTS].id = answers[1][NINE_FACTS - 1].id;            /* the other's own key */
    answers[0][NINE_ASKS - 1].id = synth_answer_id(nine.synth.words / 2); /* nobody's value */
    nine_judge(&nine, 0, TOKENS, answers[0], &score);
    assert_int_equal(score.right, NINE_ASKS - 2);
    assert_int_equal(score.thief, 1);
    assert_int_equal(score.invented, 1);
    assert_false(nine_score_good(&score));
    nine_close(&nine);
}

/* Fails with BREAK_NINE_KEPT. */
static void a_needle_that_the_hole_does_not_hurt_is_not_kept(void **state) {
    (void)state;
    const struct nine_settings settings = small();
    struct needle_result results[NINE_NEEDLES];
    struct nine_kept kept = {0};
    struct kv_diag diag = {""};

    must(nine_open(&settings, 1, &nine, &diag), &diag);
    nine.policy = nine_recipe_policy(nine_recipe_find("v3", 2), TOKENS);
    must(nine_add(&nine, 0, &diag), &diag);
    must(nine_keep(&nine, 0, &kept, &diag), &diag);
    assert_int_equal(kept.kept, NINE_NEEDLES);
    assert_int_equal(kept.first_unkept[0], 0);
    for (uint32_t i = 0; i < NINE_NEEDLES; i++)
        results[i] = (struct needle_result){1, 1, 1, -1, -20};
    results[3].kept = 0;
    results[3].logp_hole = -2;
    nine_count_kept(&nine, 0, TOKENS, results, &kept);
    assert_int_equal(kept.kept, 2 * NINE_NEEDLES - 1);
    assert_int_equal(kept.least, NINE_NEEDLES - 1);
    assert_true(kept.first_unkept[0] != 0);
    nine_close(&nine);
}

/* --- wakes */

/* Fails with BREAK_NINE_UNPROVEN. */
static void a_wake_is_proven_by_every_part_of_its_receipt(void **state) {
    (void)state;
    const struct receipt good = {.operation = RECEIPT_RESTORE,
                                 .fingerprint = RECEIPT_BITS_EQUAL,
                                 .digests_checked = 9,
                                 .needles_kept = NINE_NEEDLES,
                                 .needles_asked = NINE_NEEDLES,
                                 .needles_passed = NINE_NEEDLES};
    struct receipt bad[8];
    char text[NINE_TEXT_BYTES];

    assert_true(nine_wake_proven(&good, text));
    assert_true(nine_sleep_kept(&good));
    for (uint32_t i = 0; i < 8; i++)
        bad[i] = good;
    bad[0].fingerprint = RECEIPT_TOP_EQUAL;
    bad[1].tokens_prefilled = 1;
    bad[2].digests_failed = 1;
    bad[3].needles_passed--;
    bad[4].needles_asked = bad[4].needles_passed = 0;
    bad[5].err = KV_ERR_PROOF;
    bad[6].digests_checked = 0;
    bad[7].needles_kept--;
    assert_false(nine_sleep_kept(&bad[7]) || nine_sleep_kept(&bad[3]) || nine_sleep_kept(&bad[4]));
    for (uint32_t i = 0; i < 8; i++)
        if (nine_wake_proven(&bad[i], text) || text[0] == 0)
            fail_msg("receipt %u counts as proven", i);
}

static void more_sessions_than_are_awake_live(void **state) {
    (void)state;
    struct nine_settings settings = small();
    struct nine_life *life = calloc(1, sizeof *life);
    char dir[TESTING_PATH_BYTES], store[TESTING_PATH_BYTES + 8];
    struct kv_diag diag = {""};
    struct receipt receipt;

    testing_temp_dir(dir);
    snprintf(store, sizeof store, "%s/store", dir);
    settings.dir = store;
    settings.mixed = 1;
    must(nine_open(&settings, SESSIONS, &nine, &diag), &diag);
    must(nine_store(&nine, &diag), &diag);
    nine.policy = nine_recipe_policy(nine_recipe_find("v3-quarters", 11), TOKENS);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        must(nine_add(&nine, i, &diag), &diag);
        must(nine_register(&nine, i, &diag), &diag);
        if (i >= USERS) {
            must(nine_sleep(&nine, i, &receipt, &diag), &diag);
            assert_true(nine_sleep_kept(&receipt));
        }
    }
    must(nine_live(&nine, 1, life, &diag), &diag);
    if (life->proven != life->wakes)
        fail_msg("%s", life->first_unproven);
    assert_true(life->wakes > SESSIONS - USERS && life->move_count > 0);
    assert_true(life->seen.quiet.count >= 20 && life->seen.moving.count > 0);
    /* Each rest by itself is around one; what goes on beside a move is no less by magnitudes. */
    assert_in_range((int)(nine_gaps_part(&life->seen.quiet, 0.5) * 100), 90, 110);
    assert_true(nine_gaps_part(&life->seen.quiet, 0) > 0);
    assert_true(nine_gaps_part(&life->seen.moving, 0.5) > 0.3);
    const struct nine_steps *steps = life->seen.holds->steps;
    assert_true(steps[NINE_NOT_MOVING].count >= 20);
    assert_true(steps[NINE_SLEEPS].count > 0 && steps[NINE_WAKES].count > 0);
    assert_int_equal(life->score.users, SESSIONS);
    assert_true(nine.sleeps > 0 && nine.sleeps_kept == nine.sleeps);
    if (!nine_score_good(&life->score))
        fail_msg("%s", life->score.first_wrong);
    assert_true(nine_store_need(&nine, SESSIONS) > nine_store_need(&nine, SESSIONS - 1));
    nine_life_release(life);
    free(life);
    nine_close(&nine);
}

/* A user who has no context left is awake all the same. Fails with BREAK_NINE_SHORT. */
static void a_step_that_not_everybody_takes_is_no_gap(void **state) {
    (void)state;
    enum { ROOM = 320, MORE = 6 };
    struct nine_settings settings = small();
    struct nine_seen seen = {.short_steps = 0};
    struct nine_decoder decoder;
    struct kv_diag diag = {""};

    settings.mixed = 1;
    must(nine_open(&settings, 2, &nine, &diag), &diag);
    nine.policy = nine_recipe_policy(nine_recipe_find("v3", 2), TOKENS);
    for (uint32_t i = 0; i < 2; i++)
        must(nine_add(&nine, i, &diag), &diag);
    nine.synth.context_tokens = nine.users[0].tokens + ROOM + MORE;
    must(nine_decoder_begin(&nine, &seen, &decoder, &diag), &diag);
    baton_take(&nine.baton);
    while (seen.short_steps < MORE && seen.quiet.count < 8 * MORE)
        nine_decoder_rest(&decoder, 0, 1);
    baton_give(&nine.baton);
    must(nine_decoder_end(&decoder, KV_OK, &diag), &diag);
    assert_true(seen.short_steps >= MORE);
    assert_in_range(seen.quiet.count + seen.moving.count, 1, MORE + 1);
    nine_seen_release(&seen);
    nine_close(&nine);
}

/* --- what wakes are measured against */

static void a_prefill_is_added_up_along_straight_lines(void **state) {
    (void)state;
    const struct nine_prefill prefill = {.depths = {128, 384, 640, 896, 1152},
                                         .chunk_ms = {1, 2, 4, 4, 3}};
    const struct {
        uint64_t depth;
        double ms;
    } at[] = {{128, 1}, {256, 1.5}, {384, 2}, {512, 3}, {800, 4}, {1152, 3}, {0, 0.5}, {1280, 2.5}};
    static_assert(NINE_PAIRS == 9, "a wake for each pair");
    struct nine_wakes wakes = {.kinds = {[NINE_EAGER] = {{3, 4, 1, 0},
                                                         {1, 9, 2, 0},
                                                         {2, 8, 3, 0},
                                                         {0, 20, 4, 0},
                                                         {9, 0, 5, 0},
                                                         {4, 5, 6, 0},
                                                         {5, 6, 7, 0},
                                                         {6, 2, 8, 0},
                                                         {7, 1, 9, 0}}}};

    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++)
        if (nine_prefill_chunk_ms(&prefill, at[i].depth) != at[i].ms)
            fail_msg("at %llu: %f", (unsigned long long)at[i].depth,
                     nine_prefill_chunk_ms(&prefill, at[i].depth));
    assert_int_equal(nine_wakes_median(&wakes, NINE_EAGER).door_bytes, 6);
    wakes.kinds[NINE_EAGER][0].wake_ns = 100;
    assert_int_equal(nine_wakes_median(&wakes, NINE_EAGER).door_bytes, 7);
}

/* --- programs */

static int run(const char *command) {
    int status = system(command);

    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The short session of support_nine_save.h is not much shorter here; bytes are checked
 * against arithmetic. */
static void saves_write_what_is_new(void **state) {
    (void)state;
    struct nine_settings settings = small();
    static struct nine_saves saves;
    char dir[TESTING_PATH_BYTES], store[TESTING_PATH_BYTES + 8];
    struct kv_diag diag = {""};

    testing_temp_dir(dir);
    must(nine_open(&settings, USERS, &nine, &diag), &diag);
    nine.policy = nine_recipe_policy(nine_recipe_find("v3", 2), TOKENS);
    must(nine_add(&nine, 0, &diag), &diag);
    must(nine_save_run(&nine, dir, &saves, &diag), &diag);
    nine_save_tell(&saves);
    assert_int_equal(saves.others, 1);
    for (uint32_t i = 0; i < NINE_SAVE_PAIRS; i++) {
        const struct nine_save_pair *pair = &saves.pairs[i];
        assert_int_equal(pair->receipt.blocks, layout_sealed_blocks(pair->receipt.tokens));
        assert_int_equal(pair->receipt.tokens_reused, 0);
        assert_true(pair->plain.bytes >= pair->receipt.door_bytes);
        assert_true(i == 0 || nine_save_over_plain(pair - 1) <= nine_save_over_plain(pair));
    }
    assert_true(saves.seen.quiet.count > 0);
    assert_true(saves.seen.holds->steps[NINE_NOT_MOVING].count > 0);
    assert_true(saves.held_ns > 0 && saves.held_most_ns <= saves.held_ns);
    for (uint32_t i = 0; i < NINE_SAVE_USERS; i++)
        for (uint32_t k = 0; k < NINE_SAVE_STEPS; k++) {
            const struct nine_save_step *step = &saves.lengths[i].steps[k];
            assert_int_equal(step->receipt.blocks, step->tokens / LAYOUT_BLOCK_TOKENS);
            assert_true(step->bytes > 0 && step->bytes <= step->allowed_bytes);
        }
    snprintf(store, sizeof store, "%s/saves", dir);
    assert_int_not_equal(access(store, F_OK), 0);
    assert_null(nine.users[0].session); /* it made room */
    nine_save_release(&saves);
    nine_close(&nine);
}

/* The folder of this program, where nine lies too. */
static void folder_of_programs(char path_out[TESTING_PATH_BYTES]) {
    ssize_t bytes = readlink("/proc/self/exe", path_out, TESTING_PATH_BYTES - 1);

    assert_true(bytes > 0);
    path_out[bytes] = 0;
    *strrchr(path_out, '/') = 0;
}

/* Whatever was run of the story, nothing of it may look like the whole. */
static void parts_are_not_called_the_whole(void **state) {
    (void)state;
    char self[TESTING_PATH_BYTES], dir[TESTING_PATH_BYTES], command[1024];
    static const struct {
        const char *parts, *table, *file; /* what must be there … */
        const char *not_table;            /* … and what must not */
    } runs[] = {
        {"memory", "^ONLY PARTS of the story: memory$", "pinned_copy_ms", "Saves|disk  *awake"},
        {"wakes", "disk  *awake after", "plain_reader", "More than are awake|user-03"},
        {"fit,prefill", "straight lines", "\"prefill\"", "A wake alone|Saves"},
        {"life", "exchanges while others decode", "\"life\"", "A wake alone|Users that fit"}};

    folder_of_programs(self);
    testing_temp_dir(dir);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i += testing_quick() ? 2 : 1) {
        snprintf(command, sizeof command,
                 "%s/nine --quick --users 2 --sessions 3 --recipes bf16,v3-quarters --parts %s "
                 "--out %s >%s/text && ! grep -Eq 'WRONG|P(roven|ROVEN)|bf16: |%s' %s/text && "
                 "grep -q 'Only parts of the story were run' %s/text && grep -Eq '%s' %s/text && "
                 "grep -q '\"whole\":.*false' %s/nine_overview.json && "
                 "grep -q '%s' %s/nine_overview.json",
                 self, runs[i].parts, dir, dir, runs[i].not_table, dir, dir, runs[i].table, dir,
                 dir, runs[i].file, dir);
        if (run(command) != 0)
            fail_msg("--parts %s: %s", runs[i].parts, command);
    }
    snprintf(command, sizeof command, "%s/nine --quick --parts memory,dinner >%s/text 2>&1", self,
             dir);
    assert_int_equal(run(command), 2);
}

static void the_whole_program_runs(void **state) {
    (void)state;
    char self[TESTING_PATH_BYTES], dir[TESTING_PATH_BYTES], command[1024];

    folder_of_programs(self);
    testing_temp_dir(dir);
    snprintf(command, sizeof command,
             "%s/nine --quick %s --out %s --commit test >%s/text && "
             "test -s %s/nine_overview.json && test -s %s/nine_v3-quarters.json && "
             "! grep -q WRONG %s/text && grep -q 'memory awake after' %s/text && "
             "grep -q ' Proven[.]$' %s/text && "
             "grep -q '\"whole\":.*true' %s/nine_overview.json && "
             "grep -q 'wake from memory over a pinned copy' %s/nine_overview.json",
             self, testing_quick() ? "--users 2 --sessions 3 --recipes v3-quarters" : "", dir, dir,
             dir, dir, dir, dir, dir, dir, dir);
    assert_int_equal(run(command), 0);
    /* Where users are lowered, and sleep and wake like that. How many blocks are lowered depends
     * on when blocks become durable: planes that wait for it free nothing yet. */
    snprintf(command, sizeof command,
             "%s/nine --quick --recipes v3-pressure-k8v8 --pool 18MiB >%s/text && "
             "! grep -q WRONG %s/text && grep -Eq 'by tier.*(K8V4|K6V4) [1-9]' %s/text",
             self, dir, dir, dir);
    assert_int_equal(run(command), 0);
    snprintf(command, sizeof command, "%s/nine --recipes v3,v4 >%s/text 2>&1", self, dir);
    assert_int_equal(run(command), 2);
    snprintf(command, sizeof command, "%s/nine --tokens 12 >%s/text 2>&1", self, dir);
    assert_int_equal(run(command), 1);
    snprintf(command, sizeof command,
             "%s/nine --quick --store /nonexistent 2>&1 | grep -q 'No such file'", self);
    assert_int_equal(run(command), 0);
    snprintf(command, sizeof command, "%s/nine --no-such-option >%s/text 2>&1", self, dir);
    assert_int_equal(run(command), 2);
    snprintf(command, sizeof command,
             "python3 tools/plot_users.py --check %s/nine_v3-quarters.json >%s/text", dir, dir);
    assert_int_equal(run(command), 0);
    snprintf(command, sizeof command,
             "sed '0,/\"recipe\"/b;s/\"recipe\":\\t\"v3-quarters\"/\"recipe\": \"v2\"/' "
             "%s/nine_v3-quarters.json >%s/mixed.json && "
             "python3 tools/plot_users.py --check %s/mixed.json 2>%s/text",
             dir, dir, dir, dir);
    assert_int_equal(run(command), 3);
    snprintf(command, sizeof command, "grep -q 'never joined' %s/text", dir);
    assert_int_equal(run(command), 0);
}

TESTING_MAIN(cmocka_unit_test(the_goals_of_users_follow_from_arithmetic),
             cmocka_unit_test(every_recipe_agrees_to_the_slot_and_answers),
             cmocka_unit_test(pressure_lowers_what_does_not_fit_and_is_counted),
             cmocka_unit_test(as_many_users_fit_as_arithmetic_says),
             cmocka_unit_test(a_full_pool_is_said),
             cmocka_unit_test(a_thief_is_counted_and_so_is_what_is_invented),
             cmocka_unit_test(a_needle_that_the_hole_does_not_hurt_is_not_kept),
             cmocka_unit_test(a_wake_is_proven_by_every_part_of_its_receipt),
             cmocka_unit_test(more_sessions_than_are_awake_live),
             cmocka_unit_test(a_step_that_not_everybody_takes_is_no_gap),
             cmocka_unit_test(saves_write_what_is_new),
             cmocka_unit_test(a_prefill_is_added_up_along_straight_lines),
             cmocka_unit_test(parts_are_not_called_the_whole),
             cmocka_unit_test(the_whole_program_runs))
