/* snapshot/snap_gc.h - which records die.
 *
 * Responsible for: putting into a batch the deletions that follow from a save, a wake or a removal.
 * Not responsible for: freeing space in segments (store/), or when a batch commits.
 *
 * Threads: whichever owns the batch.
 * Units: counts.
 * Errors: CORRUPT, VERSION (a record), IO, NOMEM; of the batch NO_SPACE and LIMIT.
 */
#ifndef SNAPSHOT_SNAP_GC_H
#define SNAPSHOT_SNAP_GC_H

#include "engine/record.h"
#include "store/store.h"
#include "store/store_batch.h"

struct snap_gc {
    struct store *store;
    const struct kv_alloc *alloc;
    struct store_batch *batch;
};

/* Reads one snapshot record. NOT_FOUND, CORRUPT, VERSION, IO, NOMEM. */
enum kv_err snap_gc_snapshot(struct store *store, uint64_t snapshot,
                             struct record_snapshot *record_out, struct kv_diag *diag);
enum kv_err snap_gc_name(struct store *store, const char *name, struct record_name *record_out,
                         struct kv_diag *diag);

/* Deletes the block records of `lineage` at index `first` and beyond. */
enum kv_err snap_gc_blocks_from(const struct snap_gc *gc, uint64_t lineage, uint32_t first,
                                struct kv_diag *diag);
/* Invariant 8: deletes blocks beyond the largest count of every snapshot of session `name`, whose
 * head must still be `head`: BUSY otherwise, since what stands there is then of a newer life. */
struct snap_gc_trim_args {
    const char *name;
    uint64_t lineage, head;
};
enum kv_err snap_gc_trim(const struct snap_gc *gc, const struct snap_gc_trim_args *args,
                         struct kv_diag *diag);
/* One snapshot more (+1) or less (-1) uses the page; at none it is deleted. */
enum kv_err snap_gc_page_uses(const struct snap_gc *gc, uint64_t page, int change,
                              struct kv_diag *diag);
/* Deletes one lineage's blocks and its record, in a batch of their own. No batch is open. */
enum kv_err snap_gc_drop_lineage(struct snap_gc *gc, uint64_t lineage, struct kv_diag *diag);
/* Deletes lineages that neither a snapshot nor another lineage uses: what a program wrote through
 * and never saved. For a store that nobody else writes to; one without room keeps them until there
 * is some. */
enum kv_err snap_gc_unsaved(struct store *store, const struct kv_alloc *alloc,
                            struct kv_diag *diag);

#endif
