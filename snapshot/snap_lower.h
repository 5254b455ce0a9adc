/* snapshot/snap_lower.h - refinement planes that leave stored blocks.
 *
 * Responsible for: taking planes out of block records, their digests left behind so that the block
 * chain stays what it was; keeping a block whose refinement plane is damaged at a lower tier.
 * Not responsible for: choosing sessions (snap_retain.h), the space in segments (store/), or proof:
 * the next wake compares the fingerprint of the ladder's floor.
 *
 * Only VX, KL, VR2 and VR1 can leave, in the order of the block's ladder (recipe v2 has no KL in
 * it): what its floor needs never does.
 *
 * Threads: the one that owns batches.
 * Units: blocks, bytes; streams are masks of 1u << enum layout_stream.
 * Errors: NOT_FOUND, CORRUPT, IO, NO_SPACE, NOMEM.
 */
#ifndef SNAPSHOT_SNAP_LOWER_H
#define SNAPSHOT_SNAP_LOWER_H

#include "snapshot/snap_gc.h"

struct snap_lower_sum {
    uint32_t blocks;
    uint64_t bytes; /* stored bytes of what left, padded */
};

/* Takes these streams, and those above them in each block's ladder, out of the first `blocks`
 * blocks of a lineage as far as they still have them; nothing leaves a block whose ladder's floor
 * needs one of them. In batches: a power cut leaves each block as it was or without the planes. */
struct snap_lower_args {
    struct store *store;
    const struct kv_alloc *alloc;
    uint64_t lineage;
    uint32_t blocks, streams;
};
enum kv_err snap_lower_lineage(const struct snap_lower_args *args, struct snap_lower_sum *sum_out,
                               struct kv_diag *diag);

/* Reads every extent of a block record. */
struct snap_lower_found {
    uint32_t bad;         /* streams that are not what was put; ids count as META */
    uint32_t drop;        /* what would have to leave; 0: nothing helps */
    enum layout_tier top; /* the best tier that is left then */
    int kept;             /* 1: they have left */
};
struct snap_lower_look {
    struct store *store;
    const struct kv_alloc *alloc;
    const uint8_t *key; /* of a block record; another kind is INVALID */
    size_t key_bytes;
    int keep; /* 1: what only refines and is bad leaves, in a batch; 0: nothing changes */
};
enum kv_err snap_lower_examine(const struct snap_lower_look *look,
                               struct snap_lower_found *found_out, struct kv_diag *diag);

#endif
