/* store/store_gone.h - which batches gc has taken out of the chain.
 *
 * Responsible for: the store's own record of sequences whose batch records stood in removed
 * segments, so that a rebuild can tell them from batches that are lost.
 * Not responsible for: restating what they said (store_gc.c).
 *
 * The record has a key of the store's own: it begins with a zero byte, and walks do not show it.
 *
 * Threads: one owner.
 * Units: sequences of batches.
 */
#ifndef STORE_STORE_GONE_H
#define STORE_STORE_GONE_H

#include "store/index.h"
#include "store/store_batch.h"

/* Keys that begin with these bytes belong to the store itself. */
#define STORE_GONE_OWN_PREFIX "\0store/"
enum { STORE_GONE_OWN_BYTES = 7, STORE_GONE_RANGES_MAX = 3000 };

struct store_gone_range {
    uint64_t first, end;
};
struct store_gone {
    const struct kv_alloc *alloc;
    struct store_gone_range *ranges; /* ascending, not touching; room for RANGES_MAX */
    size_t count;
};

/* Empty when there is no such record. CORRUPT, IO, NOMEM. */
enum kv_err store_gone_load(struct index *index, const struct kv_alloc *alloc,
                            struct store_gone *out, struct kv_diag *diag);
void store_gone_release(struct store_gone *gone);
/* KV_ERR_LIMIT beyond RANGES_MAX ranges. */
enum kv_err store_gone_add(struct store_gone *gone, uint64_t sequence, struct kv_diag *diag);
/* How many sequences of [first, end) are not in it. */
uint64_t store_gone_missing(const struct store_gone *gone, uint64_t first, uint64_t end);
enum kv_err store_gone_put(const struct store_gone *gone, struct store_batch *batch,
                           struct kv_diag *diag);

#endif
