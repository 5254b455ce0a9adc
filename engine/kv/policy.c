/* engine/kv/policy.c - which tier each block is read at, and which planes may go or must come.
 *
 * Responsible for: the decision.
 * Not responsible for: carrying it out.
 */
#include "engine/kv/policy.h"

void policy_block_move(const struct image_policy *policy, uint64_t n_kv, uint32_t index,
                       const struct policy_block *block, struct policy_move *move_out) {
    /* Of planes that cannot be had the next tier down the ladder makes do without. */
    enum layout_tier wanted_tier = image_tier_without(policy, image_tier(policy, index, n_kv),
                                                      block->unavailable & ~block->resident);
    uint32_t wanted = layout_tier_streams(wanted_tier);
    uint32_t missing = wanted & ~block->resident;
    uint32_t kept, unread;

    *move_out = (struct policy_move){.block = index, .tier = block->tier};
    if (!missing)
        move_out->tier = wanted_tier;
    else
        move_out->want = missing & ~block->arriving & ~block->unavailable;
    kept = layout_tier_streams(move_out->tier) | wanted | block->others;
    unread = block->resident & ~kept;
#ifdef BREAK_FREE_VOLATILE
    move_out->free = unread;
    return;
#endif
    if (block->durable)
        move_out->free = unread;
    else
        move_out->idle = unread;
}

uint64_t policy_plan(const struct image_policy *policy, uint64_t n_kv) {
    uint64_t slots = LAYOUT_PAGE_SLOTS * (LAYOUT_WINDOW_PAGES_MAX + 1);
    uint64_t blocks = layout_sealed_blocks(n_kv);

    if (policy->pressure)
        return slots + blocks * layout_tier_slots(image_floor(policy)) +
               (blocks
                    ? layout_tier_slots(image_top(policy)) - layout_tier_slots(image_floor(policy))
                    : 0);
    for (uint64_t block = 0; block < blocks; block++)
        slots += layout_tier_slots(image_tier(policy, block, n_kv));
    return slots;
}
