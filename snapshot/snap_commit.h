/* snapshot/snap_commit.h - from blocks and a frozen session to one batch.
 *
 * Responsible for: the records of a batch, the block chain, the image's digests and root.
 * Not responsible for: order between batches (snap_spill.h) or applying results.
 *
 * Threads: the spill thread; snap_commit_branch the scheduler's, with nothing queued.
 * Units: bytes, nanoseconds.
 */
#ifndef SNAPSHOT_SNAP_COMMIT_H
#define SNAPSHOT_SNAP_COMMIT_H

#include "snapshot/snap_spill.h"
#include "store/store_batch.h"

/* Commits blocks of any lines in one batch. Each item gets its result; a failure leaves the reason
 * in its line. */
void snap_commit_blocks(struct snapshot *snapshot, struct snap_item **items, uint32_t count);
/* Commits a save. The ticket gets result, diag, receipt and the durable state after it. */
void snap_commit_save(struct snapshot *snapshot, struct snap_item *item);
/* Records the lineage of a new session that is cut from the stored one `source`, before its first
 * save. Codes as snap_retain_begin. */
enum kv_err snap_commit_branch(struct snapshot *snapshot, const struct transfer_durable *durable,
                               const char *name, const char *source, struct kv_diag *diag);

/* Worst case of one record with its extents, for store_batch_begin and for plans. */
enum { SNAP_COMMIT_RECORD_BYTES = RECORD_KEY_BYTES_MAX + RECORD_OUT_BYTES };
uint64_t snap_commit_extent_bytes(uint64_t raw_bytes);

#endif
