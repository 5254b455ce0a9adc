/* tests/test_policy.c - which tier a block is read at and which planes go or come.
 *
 * Responsible for: the decision on its own, over random states and by hand; the plan of slots.
 * Not responsible for: carrying it out (test_session, test_transfer).
 */
#include "engine/kv/policy.h"

#include "engine/kv/slots.h"
#include "tests/testing.h"

#define MASK(stream) (1u << (stream))

static const struct image_policy ages = {
    .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};

static struct policy_move move_at(const struct policy_block *block, uint64_t n_kv) {
    struct policy_move move;

    policy_block_move(&ages, n_kv, 0, block, &move);
    return move;
}

/* Block 0 ends at 320; a step of the ladder comes at 320 + age. */
static void tiers_follow_the_distance(void **state) {
    static const struct {
        uint64_t n_kv;
        enum layout_tier tier;
    } cases[] = {{576, LAYOUT_K8V4},  {831, LAYOUT_K8V4},  {832, LAYOUT_K6V4},
                 {1343, LAYOUT_K6V4}, {1344, LAYOUT_K6V3}, {1855, LAYOUT_K6V3},
                 {1856, LAYOUT_K6V2}, {99999, LAYOUT_K6V2}};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct policy_block block = {.tier = LAYOUT_K8V4,
                                     .resident = layout_tier_streams(LAYOUT_K8V4)};
        struct policy_move move = move_at(&block, cases[i].n_kv);
        uint32_t unread = layout_tier_streams(LAYOUT_K8V4) & ~layout_tier_streams(cases[i].tier);
        assert_int_equal(move.tier, cases[i].tier);
        assert_int_equal(move.free, 0);
        assert_int_equal(move.idle, unread);
        block.durable = 1;
        move = move_at(&block, cases[i].n_kv);
        assert_int_equal(move.free, unread);
        assert_int_equal(move.idle, 0);
        assert_int_equal(move.want, 0);
    }
}

static void a_finer_tier_waits_for_its_planes(void **state) {
    struct policy_block block = {.tier = LAYOUT_K6V2,
                                 .resident = layout_tier_streams(LAYOUT_K6V2) | MASK(LAYOUT_VR1),
                                 .durable = 1};
    uint32_t missing = MASK(LAYOUT_KL) | MASK(LAYOUT_VR2);

    (void)state;
    struct policy_move move = move_at(&block, 600);
    assert_int_equal(move.tier, LAYOUT_K6V2);
    assert_int_equal(move.want, missing);
    assert_int_equal(move.free, 0); /* VR1 is not read now, but will be */
    block.arriving = MASK(LAYOUT_KL);
    assert_int_equal(move_at(&block, 600).want, MASK(LAYOUT_VR2));
    block.arriving = 0;
    block.unavailable = missing;
    assert_int_equal(move_at(&block, 600).want, 0);
    assert_int_equal(move_at(&block, 600).tier, LAYOUT_K6V3); /* the best without these */
    block.unavailable = MASK(LAYOUT_KL);
    assert_int_equal(move_at(&block, 600).want, MASK(LAYOUT_VR2));
    block.resident |= MASK(LAYOUT_VR2);
    assert_int_equal(move_at(&block, 600).tier, LAYOUT_K6V4);
    block.resident |= missing;
    assert_int_equal(move_at(&block, 600).tier, LAYOUT_K8V4);
}

static void what_others_read_stays(void **state) {
    struct policy_block block = {.tier = LAYOUT_K8V4,
                                 .resident = layout_tier_streams(LAYOUT_K8V4),
                                 .others = layout_tier_streams(LAYOUT_K6V3),
                                 .durable = 1};

    (void)state;
    struct policy_move move = move_at(&block, 5000);
    assert_int_equal(move.tier, LAYOUT_K6V2);
    assert_int_equal(move.free, MASK(LAYOUT_KL) | MASK(LAYOUT_VR2));
}

/* BREAK_FREE_VOLATILE frees what is nowhere else. */
/* Whatever the state: nothing that is read is freed, nothing is wanted that is here. */
static void random_states_are_safe(void **state) {
    struct testing_random random;

    (void)state;
    testing_random_init(&random, testing_seed("states", 9));
    for (uint32_t i = 0; i < 100000; i++) {
        static const enum layout_tier ladder[] = {LAYOUT_K8V4, LAYOUT_K6V4, LAYOUT_K6V3,
                                                  LAYOUT_K6V2};
        enum layout_tier tier = ladder[testing_random_below(&random, 4)];
        uint32_t extra = (uint32_t)testing_random_below(&random, 256);
        struct policy_block block = {.tier = tier, .resident = layout_tier_streams(tier) | extra};
        block.arriving = (uint32_t)testing_random_below(&random, 128) & ~block.resident;
        block.durable = (int)testing_random_below(&random, 2);
        uint64_t n_kv = 576 + testing_random_below(&random, 3000);
        struct policy_move move = move_at(&block, n_kv);
        uint32_t read = layout_tier_streams(move.tier);
        assert_int_equal(read & ~block.resident, 0);
        assert_int_equal(read & (move.free | move.idle), 0);
        assert_int_equal(move.free & ~block.resident, 0);
        assert_int_equal(move.want & (block.resident | block.arriving), 0);
        assert_true(!move.free || block.durable);
        assert_true(!move.idle || !block.durable);
        assert_true(move.tier == tier || move.tier == image_tier(&ages, 0, n_kv));
    }
}

static void plans_count_tiers(void **state) {
    static const struct image_policy bf16 = {
        .recipe = IMAGE_RECIPE_BF16, .age_count = 0, .ages = {0}};
    static const struct image_policy fp8 = {.recipe = IMAGE_RECIPE_FP8};
    static const struct image_policy v1 = {.recipe = IMAGE_RECIPE_V1};

    (void)state;
    assert_int_equal(policy_plan(&ages, 0), 72);
    assert_int_equal(policy_plan(&ages, 575), 72);
    assert_int_equal(policy_plan(&ages, 576), 72 + 12);
    /* 2,048 tokens: six blocks at distances 1728, 1472, 1216, 960, 704 and 448. */
    assert_int_equal(policy_plan(&ages, 2048), 72 + 8 + 9 + 9 + 10 + 10 + 12);
    assert_int_equal(policy_plan(&bf16, 2048), 72 + 6 * 32);
    assert_int_equal(policy_plan(&fp8, 2048), 72 + 6 * 16);
    assert_int_equal(policy_plan(&v1, 2048), 72 + 6 * 13);
    /* Sessions of 131,072 tokens in 54.8 GiB of slots of 1 MiB. */
    assert_int_equal(56115 / policy_plan(&bf16, 131072), 3);
    assert_int_equal(56115 / policy_plan(&fp8, 131072), 6);
    assert_int_equal(56115 / policy_plan(&v1, 131072), 8);
    assert_int_equal(slots_of(layout_tier_streams(LAYOUT_K6V3)), 9);
    assert_int_equal(slots_of(0), 0);
}

TESTING_MAIN(cmocka_unit_test(tiers_follow_the_distance),
             cmocka_unit_test(a_finer_tier_waits_for_its_planes),
             cmocka_unit_test(what_others_read_stays), cmocka_unit_test(random_states_are_safe),
             cmocka_unit_test(plans_count_tiers))
