/* tests/support_nine_pool.c - how many slots users need: by arithmetic, and as the engine has them.
 *
 * Responsible for: what support_nine_pool.h says.
 * Not responsible for: filling sessions.
 */
#include "tests/support_nine_pool.h"

#include <stdio.h>
#include <string.h>

/* A slot holds one bit of every value of a block: so many bits of K and of V are so many slots. */
static const struct {
    uint32_t k_bits, v_bits, more; /* more: scales and minima of K8I4 */
} bits[LAYOUT_TIER_COUNT] = {
    [LAYOUT_K8V8] = {8, 8, 0},      [LAYOUT_K8V4] = {8, 4, 0},        [LAYOUT_K6V4] = {6, 4, 0},
    [LAYOUT_K6V3] = {6, 3, 0},      [LAYOUT_K6V2] = {6, 2, 0},        [LAYOUT_K8V3] = {8, 3, 0},
    [LAYOUT_K8V2] = {8, 2, 0},      [LAYOUT_TIER_BF16] = {16, 16, 0}, [LAYOUT_TIER_FP8] = {8, 8, 0},
    [LAYOUT_TIER_K8I4] = {8, 4, 1},
};
enum { SINKS = 64, BLOCK = 256, WINDOW_LEAST = 256, PAGE_SLOTS = 8, WINDOW_PAGES = 8 };

static const struct nine_recipe recipes[NINE_RECIPES] = {
    {"bf16", IMAGE_RECIPE_BF16, 0, {0}, 0, 0, 3, 0},
    {"fp8", IMAGE_RECIPE_FP8, 0, {0}, 0, 0, 6, 0},
    {"v1", IMAGE_RECIPE_V1, 0, {0}, 0, 0, 8, 0},
    {"v2", IMAGE_RECIPE_V2, 1, {32768}, 0, 0, 0, 0},
    {"v2-quarters", IMAGE_RECIPE_V2, 2, {32768, 65536}, 0, 0, 9, 0},
    {"v2-pressure", IMAGE_RECIPE_V2, 0, {0}, 0, 1, 0, 0},
    {"v2-k8v8", IMAGE_RECIPE_V2, 1, {32768}, 1, 0, 0, 0},
    {"v2-quarters-k8v8", IMAGE_RECIPE_V2, 2, {32768, 65536}, 1, 0, 0, 0},
    {"v2-pressure-k8v8", IMAGE_RECIPE_V2, 0, {0}, 1, 1, 0, 0},
    {"v3", IMAGE_RECIPE_V3, 1, {32768}, 0, 0, 10, 0},
    {"v3-quarters", IMAGE_RECIPE_V3, 3, {32768, 65536, 98304}, 0, 0, 0, 0},
    {"v3-pressure", IMAGE_RECIPE_V3, 0, {0}, 0, 1, 0, 0},
    {"v3-k8v8", IMAGE_RECIPE_V3, 1, {32768}, 1, 0, 0, 0},
    {"v3-quarters-k8v8", IMAGE_RECIPE_V3, 3, {32768, 65536, 98304}, 1, 0, 0, 0},
    {"v3-pressure-k8v8", IMAGE_RECIPE_V3, 0, {0}, 1, 1, 0, 0},
    {"v3-k8v4", IMAGE_RECIPE_V3, 0, {0}, 0, 0, 0, 9},
    {"v3-k6v4", IMAGE_RECIPE_V3, 1, {0}, 0, 0, 0, 11},
    {"v3-k6v2", IMAGE_RECIPE_V3, 3, {0, 0, 0}, 0, 0, 13, 14},
};

const struct nine_recipe *nine_recipe_at(uint32_t index) {
    return index < NINE_RECIPES ? &recipes[index] : NULL;
}

const struct nine_recipe *nine_recipe_find(const char *name, size_t bytes) {
    for (uint32_t i = 0; i < NINE_RECIPES; i++)
        if (strlen(recipes[i].name) == bytes && memcmp(recipes[i].name, name, bytes) == 0)
            return &recipes[i];
    return NULL;
}

struct image_policy nine_recipe_policy(const struct nine_recipe *recipe, uint64_t tokens) {
    struct image_policy policy = {.recipe = recipe->recipe,
                                  .age_count = recipe->age_count,
                                  .top_k8v8 = recipe->top_k8v8,
                                  .pressure = recipe->pressure};
    for (uint32_t i = 0; i < recipe->age_count; i++)
        policy.ages[i] = recipe->ages[i] * tokens / 131072;
    return policy;
}

static enum layout_tier tier_after(const struct image_policy *policy, uint32_t steps) {
    static const enum layout_tier v3[] = {LAYOUT_K8V8, LAYOUT_K8V4, LAYOUT_K6V4, LAYOUT_K6V3,
                                          LAYOUT_K6V2};
    static const enum layout_tier v2[] = {LAYOUT_K8V8, LAYOUT_K8V4, LAYOUT_K8V3, LAYOUT_K8V2};
    uint32_t at = steps + (policy->top_k8v8 ? 0 : 1);

    switch (policy->recipe) {
    case IMAGE_RECIPE_BF16:
        return LAYOUT_TIER_BF16;
    case IMAGE_RECIPE_FP8:
        return LAYOUT_TIER_FP8;
    case IMAGE_RECIPE_V1:
        return LAYOUT_TIER_K8I4;
    case IMAGE_RECIPE_V2:
        return v2[at];
    default:
        return v3[at];
    }
}

static void predict_block(enum layout_tier tier, struct nine_pool *pool) {
    uint32_t k = bits[tier].k_bits, v = bits[tier].v_bits;

    pool->blocks[tier]++;
    pool->streams[LAYOUT_META] +=
        tier != LAYOUT_TIER_BF16 && tier != LAYOUT_TIER_FP8 && tier != LAYOUT_TIER_K8I4;
    pool->slots += k + v + bits[tier].more;
    if (tier == LAYOUT_TIER_BF16) {
        pool->streams[LAYOUT_BF16] += k + v;
    } else if (tier == LAYOUT_TIER_FP8) {
        pool->streams[LAYOUT_FP8] += k + v;
    } else if (tier == LAYOUT_TIER_K8I4) {
        pool->streams[LAYOUT_K8I4] += k + v + bits[tier].more;
    } else {
        pool->streams[LAYOUT_KH] += 4;
        pool->streams[LAYOUT_KM] += 2;
        pool->streams[LAYOUT_KL] += k == 8 ? 2 : 0;
        pool->streams[LAYOUT_VB] += 2;
        pool->streams[LAYOUT_VR1] += v >= 3;
        pool->streams[LAYOUT_VR2] += v >= 4;
        pool->streams[LAYOUT_VX] += v == 8 ? 4 : 0;
    }
}

static enum layout_tier tier_of(const struct image_policy *policy, uint64_t block, uint64_t n_kv) {
    uint64_t distance = n_kv - (SINKS + (block + 1) * BLOCK);
    uint32_t steps = 0;

    while (steps < policy->age_count && distance >= policy->ages[steps])
        steps++;
    while (policy->pressure && steps < IMAGE_AGES_MAX && block < policy->ends[steps])
        steps++;
    return tier_after(policy, steps);
}

void nine_pool_predict(const struct image_policy *policy, uint64_t n_kv, struct nine_pool *pool) {
    uint64_t blocks = n_kv < SINKS + WINDOW_LEAST ? 0 : (n_kv - SINKS - WINDOW_LEAST) / BLOCK;

    for (uint64_t block = 0; block < blocks; block++)
        predict_block(tier_of(policy, block, n_kv), pool);
    pool->streams[LAYOUT_SINKS] += PAGE_SLOTS;
    pool->streams[LAYOUT_PAGE] += WINDOW_PAGES * PAGE_SLOTS;
    pool->slots += PAGE_SLOTS + WINDOW_PAGES * PAGE_SLOTS;
#ifdef BREAK_NINE_SLOT
    pool->slots++;
    pool->streams[LAYOUT_KH]++;
#endif
}

void nine_pool_count(const struct session *session, struct nine_pool *pool) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    struct session_info info;
    uint64_t held = 0;

    session_info(session, &info);
    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        pool->blocks[tier] += info.tier_blocks[tier];
    for (uint32_t block = 0; block < info.blocks; block++) {
        uint32_t count = transfer_block_parts(transfer_session_block(session, block), parts);
        for (uint32_t i = 0; i < count; i++) {
            pool->streams[parts[i].stream] += parts[i].piece_count;
            held += parts[i].stream == LAYOUT_META ? 0 : parts[i].piece_count;
        }
    }
    pool->streams[LAYOUT_SINKS] += PAGE_SLOTS;
    pool->streams[LAYOUT_PAGE] += info.slots - held - PAGE_SLOTS;
    pool->slots += info.slots;
}

int nine_pool_equal(const struct nine_pool *predicted, const struct nine_pool *counted,
                    uint64_t used, char text_out[NINE_TEXT_BYTES]) {
    text_out[0] = 0;
    for (uint32_t i = 0; i < LAYOUT_STREAM_COUNT; i++)
        if (predicted->streams[i] != counted->streams[i]) {
            snprintf(text_out, NINE_TEXT_BYTES, "stream %s: %llu slots predicted, %llu counted",
                     layout_stream_name((enum layout_stream)i),
                     (unsigned long long)predicted->streams[i],
                     (unsigned long long)counted->streams[i]);
            return 0;
        }
    for (uint32_t i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (predicted->blocks[i] != counted->blocks[i]) {
            snprintf(text_out, NINE_TEXT_BYTES, "tier %s: %llu blocks predicted, %llu counted",
                     layout_tier_name((enum layout_tier)i),
                     (unsigned long long)predicted->blocks[i],
                     (unsigned long long)counted->blocks[i]);
            return 0;
        }
    if (predicted->slots != counted->slots || predicted->slots != used) {
        snprintf(text_out, NINE_TEXT_BYTES,
                 "%llu slots predicted, %llu counted in sessions, %llu in the pool",
                 (unsigned long long)predicted->slots, (unsigned long long)counted->slots,
                 (unsigned long long)used);
        return 0;
    }
    return 1;
}

uint32_t nine_pool_fit(const struct nine_room *room, const struct image_policy *policy,
                       uint64_t n_kv) {
    struct nine_pool one = {0}, sealed = {0}, newest = {0};
    uint64_t groups = room->bytes / (8 * room->slot_bytes + room->frame_bytes), blocks = 0, users;
    uint64_t spare;

    nine_pool_predict(policy, n_kv, &one);
    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        blocks += one.blocks[tier];
    if (8 * groups < room->reserve || blocks == 0)
        return 0;
    /* A block is sealed at the top whatever it becomes at once. */
    predict_block(tier_after(policy, 0), &sealed);
    predict_block(tier_of(policy, blocks - 1, n_kv), &newest);
    spare = room->reserve + sealed.slots - newest.slots;
    users = 8 * groups < spare ? 0 : (8 * groups - spare) / one.slots;
    return (uint32_t)(blocks > 0 && groups / blocks < users ? groups / blocks : users);
}
