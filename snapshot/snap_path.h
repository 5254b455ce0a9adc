/* snapshot/snap_path.h - whose blocks a lineage reads.
 *
 * Responsible for: following a lineage to its parents in the store, and the chain over its blocks.
 * Not responsible for: the rule itself (record.h).
 *
 * Threads: any.
 * Units: blocks.
 */
#ifndef SNAPSHOT_SNAP_PATH_H
#define SNAPSHOT_SNAP_PATH_H

#include "engine/record.h"
#include "store/store.h"

/* A record_get; context is the struct store. CORRUPT when it is missing, VERSION, IO, NOMEM. */
enum kv_err snap_path_get(void *store, uint64_t lineage, struct record_lineage *out,
                          struct kv_diag *diag);
/* The lineage that owns block `count` - 1 of `lineage`, what a new one is cut from; 0 for none. */
enum kv_err snap_path_owner(struct store *store, uint64_t lineage, uint32_t count,
                            uint64_t *owner_out, struct kv_diag *diag);
/* The block chain over the first `count` blocks of `lineage`, from their records. NOMEM also. */
enum kv_err snap_path_chain(struct store *store, uint64_t lineage, uint32_t count,
                            struct kv_digest *chain_out, struct kv_diag *diag);

#endif
