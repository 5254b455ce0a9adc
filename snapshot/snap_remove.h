/* snapshot/snap_remove.h - one older snapshot removed, and everything that dies with it.
 *
 * Responsible for: deleting it in one batch with its uses of pages, lineages and blocks that
 * nothing else refers to, and the pointer of the next newer one.
 * Not responsible for: which one goes, or whole sessions (snapshot_remove).
 *
 * Threads: the one that owns batches, with none open.
 * Units: bytes.
 */
#ifndef SNAPSHOT_SNAP_REMOVE_H
#define SNAPSHOT_SNAP_REMOVE_H

#include "store/store.h"
#include "store/store_batch.h"

struct snap_remove_args {
    struct store *store;
    const struct kv_alloc *alloc;
    const char *name;
    uint64_t snapshot; /* of this session and not its head */
    int is_busy;       /* the session is resident: blocks that no snapshot counts may be its own */
    /* Last in the batch, with the stored bytes that it makes garbage; may be NULL. */
    enum kv_err (*also)(void *context, struct store_batch *batch, uint64_t bytes,
                        struct kv_diag *diag);
    void *context;
};
/* NOT_FOUND, INVALID (the head), CORRUPT, IO, NO_SPACE, NOMEM. */
enum kv_err snap_remove_one(const struct snap_remove_args *args, struct kv_diag *diag);

#endif
