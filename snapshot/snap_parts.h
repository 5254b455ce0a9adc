/* snapshot/snap_parts.h - a sealed block, or a frozen page, as the parts of its record.
 *
 * Responsible for: ids and streams in the order of the record, in memory of the processor.
 * Not responsible for: the record (snap_commit.h), zip and digest (snap_ahead.h).
 *
 * Threads: one at a time for each block; it is held meanwhile.
 * Units: bytes, nanoseconds.
 */
#ifndef SNAPSHOT_SNAP_PARTS_H
#define SNAPSHOT_SNAP_PARTS_H

#include "snapshot/snap_spill.h"
#include "store/store_batch.h"

struct snap_parts {
    struct iovec pieces[RECORD_BLOCK_EXTENTS_MAX][32];
    struct store_part parts[RECORD_BLOCK_EXTENTS_MAX]; /* of `pieces`: it stays where it is */
    uint32_t count;
    uint32_t streams; /* 1 << stream of each but the ids */
    uint8_t *copy;    /* NULL: the processor reaches the block itself */
    uint64_t copy_ns;
};

/* NOMEM, DEVICE: nothing is to be dropped. */
enum kv_err snap_parts_take(struct snapshot *snapshot, const struct snap_item *item,
                            struct snap_parts *parts_out, struct kv_diag *diag);
/* Page `page` of a save: 0 the sinks, then the window's. */
int snap_parts_has_page(const struct transfer_frozen *frozen, uint32_t page);
void snap_parts_page(const struct transfer_frozen *frozen, uint32_t page,
                     struct snap_parts *parts_out);
void snap_parts_drop(struct snapshot *snapshot, struct snap_parts *parts);

/* 1: an extent of this kind lies behind those that every wake reads; at the floor of v2 KL, which
 * is the first of those behind, is read too. */
int snap_parts_behind(uint8_t kind);
/* How an extent of this kind is tried to be made smaller. */
enum store_codec_hint snap_parts_hint(uint8_t kind);

#endif
