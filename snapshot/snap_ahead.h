/* snapshot/snap_ahead.h - blocks and pages made ready by helpers before their batch takes them.
 *
 * Responsible for: threads that copy queued blocks from the device, zip and digest them and the
 * pages of saves, in the order of the queue and never more than some at a time; several threads at
 * the extents of one block; handing each to the spill thread.
 * Not responsible for: batches and their order (snap_commit.h), which are as without helpers: so
 * is what is stored, for the put decides what is kept zipped.
 *
 * While the spill thread waits for the disk the helpers go on with later batches. What no
 * helper has begun when its turn comes is made ready by the spill thread itself.
 *
 * Threads: add by the scheduler's, take and end by the spill thread; end by the scheduler's, too,
 * of an item that was never queued.
 * Units: blocks and pages, nanoseconds.
 */
#ifndef SNAPSHOT_SNAP_AHEAD_H
#define SNAPSHOT_SNAP_AHEAD_H

#include "snapshot/snap_parts.h"
#include "store/store_pack.h"

enum { SNAP_AHEAD_HELPERS_MAX = 16 };

struct snap_ahead; /* NULL: there are no helpers */

/* One that is ready. */
struct snap_ready {
    struct snap_parts parts;
    struct store_packed packed[RECORD_BLOCK_EXTENTS_MAX];
    uint64_t zip_ns, zip_most_ns; /* of all its extents; of the one that took longest */
    uint8_t *room;                /* of what is zipped; kept from block to block */
    size_t room_bytes;
    int taken;
    enum kv_err err; /* it could not be made ready: whoever takes it does it again */

    /* snap_ahead.c's: who may still begin with what. */
    struct snap_job *job;
    uint64_t number;                          /* of jobs begun so far */
    uint8_t order[RECORD_BLOCK_EXTENTS_MAX];  /* of extents, those that take longest first */
    size_t room_at[RECORD_BLOCK_EXTENTS_MAX]; /* where each has its room */
    uint32_t extents, begun, ended;           /* extents is 0 until they are there */
};

/* `snapshot` has its engine, store, allocator and clock. Fewer helpers than asked for, even none,
 * where the system gives no more threads. NOMEM. */
enum kv_err snap_ahead_open(struct snapshot *snapshot, uint32_t helpers,
                            struct snap_ahead **ahead_out, struct kv_diag *diag);
/* Nothing is queued any more. */
void snap_ahead_close(struct snap_ahead *ahead);
uint32_t snap_ahead_helpers(const struct snap_ahead *ahead);
/* Jobs that are ready or in work: at most SNAP_AHEAD_MORE above the helpers, who go on with later
 * ones while the first in the queue takes longer. Any thread. */
enum { SNAP_AHEAD_MORE = 12 };
uint32_t snap_ahead_held(struct snap_ahead *ahead);

/* The item is in the queue, or it is a save that will be. */
void snap_ahead_add(struct snap_ahead *ahead, struct snap_item *item);
/* Waits for a helper that has begun. NULL: the caller does the work. */
struct snap_ready *snap_ahead_take(struct snap_ahead *ahead, struct snap_job *job);
/* No helper has anything of the item from now on; whatever was ready of it is gone. */
void snap_ahead_end(struct snap_ahead *ahead, struct snap_item *item);

#endif
