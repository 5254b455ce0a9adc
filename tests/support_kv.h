/* tests/support_kv.h - a pool of KV slots with random content, for kernels' tests and benches.
 *
 * Responsible for: random BF16 K and V of one sequence, slots handed out in shuffled order out of
 * a pool filled with NaN patterns, blocks sealed by a given table, the sequence of a length.
 * Not responsible for: checking anything.
 *
 * Threads: one owner.
 * Units: tokens and slots.
 */
#ifndef TESTS_SUPPORT_KV_H
#define TESTS_SUPPORT_KV_H

#include "kernels/kvops.h"

#include <stddef.h>
#include <stdint.h>

enum { SUPPORT_KV_BLOCKS_MAX = 64 };

struct support_kv {
    struct kvops_pool pool;
    uint32_t slot_count;
    uint32_t frame_count;
    uint32_t *order; /* slots in the order in which they are given out */
    uint32_t slots_used;
    uint32_t frames_used;
    uint32_t tokens;
    uint16_t *k; /* [layer][kv_head][token][dim], BF16 */
    uint16_t *v;
    struct kvops_block blocks[SUPPORT_KV_BLOCKS_MAX];
    struct kvops_page window[LAYOUT_WINDOW_PAGES_MAX];
};

/* Room for `tokens` tokens with every stream of every block resident. Ends the test on failure. */
void support_kv_init(struct support_kv *kv, struct layout_geometry geometry, uint32_t tokens,
                     uint64_t seed);
void support_kv_release(struct support_kv *kv);

const uint16_t *support_kv_source(const struct support_kv *kv, uint32_t value, struct layout_at at,
                                  uint32_t token);
/* Tokens [first, first + count) of all layers and heads into a fresh page. */
struct kvops_page support_kv_page(struct support_kv *kv, uint32_t first, uint32_t count);
/* Tokens [first, first + 256) sealed with all streams, or as BF16, to be read at `tier`; the
 * entries of streams that the tier does not read point nowhere. */
struct kvops_block support_kv_block(struct support_kv *kv, const struct kvops_table *table,
                                    uint32_t first, enum layout_tier tier);
/* The first `n_kv` tokens as sinks, blocks (tier of block b = tiers[b % tier_count]) and window. */
struct kvops_seq support_kv_seq(struct support_kv *kv, const struct kvops_table *table,
                                uint32_t n_kv, const enum layout_tier *tiers, uint32_t tier_count);

/* Runs every item of seal, prefill, or decode and combine, with fresh scratch. `step` items per
 * call, from the last to the first when `backwards`. */
struct support_kv_split {
    uint32_t step;
    int backwards;
};
void support_kv_seal(const struct kvops_table *table, const struct kvops_seal *args,
                     struct support_kv_split split);
void support_kv_prefill(const struct kvops_table *table, const struct kvops_attend *args,
                        struct support_kv_split split);
void support_kv_decode(const struct kvops_table *table, struct kvops_attend *args,
                       struct support_kv_split split);

uint16_t support_kv_bf16(float value); /* cut, not rounded */
float support_kv_f32(uint16_t bits);

#endif
