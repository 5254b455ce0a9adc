/* engine/kv/policy.h - which tier each block is read at, and which planes may go or must come.
 *
 * Responsible for: the decision, as a pure function: state in, move out.
 * Not responsible for: carrying the moves out (block.h, the session).
 *
 * Disk timing never changes a tier that only coarsens: a plane that is no longer read is freed
 * once the block is durable, whenever that is. A finer tier is read once its planes are there;
 * until then the block stays at its old tier.
 *
 * Threads: pure.
 * Units: streams are masks of 1u << enum layout_stream.
 */
#ifndef ENGINE_KV_POLICY_H
#define ENGINE_KV_POLICY_H

#include "engine/image.h"
#include "kernels/layout.h"

struct policy_block {
    enum layout_tier tier; /* this session reads it at, now */
    uint32_t resident;     /* streams with valid bytes */
    uint32_t arriving;     /* being read back */
    uint32_t unavailable;  /* could not be read back */
    uint32_t others;       /* streams that other sessions read */
    int durable;
};

struct policy_move {
    uint32_t block;
    enum layout_tier tier; /* to read at from now on */
    uint32_t free;         /* planes to free */
    uint32_t want;         /* planes to read back */
    uint32_t idle;         /* planes that nobody reads and that wait for their write */
};

/* The move of one block. `move_out->block` is `index`. */
void policy_block_move(const struct image_policy *policy, uint64_t n_kv, uint32_t index,
                       const struct policy_block *block, struct policy_move *move_out);
/* Slots of a session of `n_kv` tokens, window and sinks included, nothing waiting; under pressure
 * the fewest that it can be brought to while one block is sealed at the top. */
uint64_t policy_plan(const struct image_policy *policy, uint64_t n_kv);

#endif
