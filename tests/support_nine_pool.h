/* tests/support_nine_pool.h - how many slots users need: by arithmetic, and as the engine has them.
 *
 * Responsible for: the recipes of the demonstration, slots by stream and tier from the bits of a
 * tier alone (neither layout.h nor policy.h is asked), the same counted block by block, users that
 * fit into a pool.
 * Not responsible for: filling sessions (support_nine.h).
 *
 * Threads: the scheduler thread.
 * Units: slots, blocks, tokens.
 */
#ifndef TESTS_SUPPORT_NINE_POOL_H
#define TESTS_SUPPORT_NINE_POOL_H

#include "engine/engine.h"
#include "engine/transfer.h"

/* The first NINE_CURVES have a curve of their own each; with the others users are only counted. */
enum { NINE_RECIPES = 18, NINE_CURVES = 15, NINE_TEXT_BYTES = 240 };
/* Watermarks under policy pressure, as the programs have them by default. */
enum { NINE_LOW_PERCENT = 5, NINE_HIGH_PERCENT = 15 };

/* Ages are parts of 131,072 tokens, in 32,768ths; they shrink with the length of a user. */
struct nine_recipe {
    const char *name;
    enum image_recipe recipe;
    uint32_t age_count, ages[IMAGE_AGES_MAX];
    int top_k8v8, pressure;
    uint32_t users_goal; /* of 131,072 tokens in 54.8 GiB; 0: none was set */
    uint32_t best_goal;  /* in our own best use of 78.6 GiB */
};
const struct nine_recipe *nine_recipe_at(uint32_t index); /* NULL past the last */
const struct nine_recipe *nine_recipe_find(const char *name, size_t bytes);
struct image_policy nine_recipe_policy(const struct nine_recipe *recipe, uint64_t tokens);

struct nine_pool {
    uint64_t streams[LAYOUT_STREAM_COUNT]; /* slots; META: frames */
    uint64_t blocks[LAYOUT_TIER_COUNT];
    uint64_t slots; /* of all streams */
};
/* Adds what a session of `n_kv` tokens holds when all its blocks are durable. Under pressure which
 * blocks have taken which step depends on when slots were short, so that is taken from the policy
 * of the session itself (its `ends`); what follows from it in slots is arithmetic all the same. */
void nine_pool_predict(const struct image_policy *policy, uint64_t n_kv, struct nine_pool *pool);
/* Adds what it holds. */
void nine_pool_count(const struct session *session, struct nine_pool *pool);
/* 1 when they agree to the slot and, with `used`, with the pool's own count; else what differs. */
int nine_pool_equal(const struct nine_pool *predicted, const struct nine_pool *counted,
                    uint64_t used, char text_out[NINE_TEXT_BYTES]);

struct nine_room {
    uint64_t bytes, slot_bytes, frame_bytes;
    uint32_t reserve;
};
uint32_t nine_pool_fit(const struct nine_room *room, const struct image_policy *policy,
                       uint64_t n_kv);

#endif
