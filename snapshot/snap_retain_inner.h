/* snapshot/snap_retain_inner.h - what the two files of snap_retain.h share.
 *
 * Responsible for: adding to the log in the batch that does what it tells.
 * Not responsible for: anything outside them.
 *
 * Threads: as snap_retain.h.
 * Units: as snap_retain.h.
 */
#ifndef SNAPSHOT_SNAP_RETAIN_INNER_H
#define SNAPSHOT_SNAP_RETAIN_INNER_H

#include "snapshot/snap_retain.h"
#include "store/store_batch.h"

enum kv_err snap_retain_add(struct store *store, struct store_batch *batch,
                            const struct snap_retain_action *action, struct kv_diag *diag);

#endif
