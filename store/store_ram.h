/* store/store_ram.h - extents that stay in memory, within a byte budget.
 *
 * Responsible for: copies of stored extents by id, who has brought them (an owner's number, opaque
 * here), giving up whole owners that were used longest ago, forgetting what a batch deletes.
 * Not responsible for: what is worth keeping. A read takes from here only where it asks for it
 * (store_read_args.ram): whoever checks the disk must not.
 *
 * An extent here is the one on disk: same id, digest and size. Its bytes are checked like those of
 * the disk, by the read or by whoever digests where they land. They are overwritten when they go.
 *
 * What is resident, tables included, never passes the budget: it is looked at before memory is
 * taken, for one extent as for many, and an owner that is larger than the budget is not kept.
 *
 * Threads: any; open before the second.
 * Units: bytes.
 */
#ifndef STORE_STORE_RAM_H
#define STORE_STORE_RAM_H

#include "store/store_read.h"

/* Once, for a store that is open; 0 keeps nothing and takes no memory. It ends with the store.
 * NOMEM; LIMIT when the budget has no room for the tables. */
enum kv_err store_ram_open(struct store *store, uint64_t bytes_max, struct kv_diag *diag);

/* 1 when all of them fit beside each other: owners used longest ago have gone until those that are
 * not here yet fit too, never `owner` itself, and those of `owner` that are not among them. 0, and
 * nothing has changed: they are more than the budget, or nothing is kept. */
struct store_ram_set {
    uint64_t owner;
    const struct store_extent *const *extents;
    size_t count;
};
int store_ram_room(struct store *store, const struct store_ram_set *set);

/* Copies one extent's bytes, which lie in the pieces; an extent that is here gets the new owner.
 * LIMIT when the budget has no room for it, NOMEM: it is not kept. */
enum kv_err store_ram_keep(struct store *store, uint64_t owner, const struct store_extent *extent,
                           const struct iovec *pieces, uint32_t piece_count);
/* The same where the bytes are elsewhere: `fill` puts them there, all of them. Its error is
 * returned, and nothing is kept. */
typedef enum kv_err (*store_ram_filling)(void *context, uint8_t *bytes);
struct store_ram_fill {
    uint64_t owner;
    const struct store_extent *extent;
    store_ram_filling fill;
    void *context;
};
enum kv_err store_ram_fill(struct store *store, const struct store_ram_fill *args);
/* Reads those that are not here from the disk, digests checked. LIMIT as above; codes of
 * store_read. What has come until then stays. `stats_out` may be NULL. */
enum kv_err store_ram_bring(struct store *store, const struct store_ram_set *set,
                            struct store_read_stats *stats_out, struct kv_diag *diag);

/* The bytes of one that is here, not checked, until they are returned: they stay although it goes
 * meanwhile, and count. 0: it is not here. */
struct store_ram_loan {
    const void *bytes; /* NULL: nothing is lent */
    void *kept;
};
int store_ram_borrow(struct store *store, const struct store_extent *extent,
                     struct store_ram_loan *loan_out);
void store_ram_return(struct store *store, struct store_ram_loan *loan); /* of nothing: allowed */

/* Where extents lie from now on, for instance where an accelerator copies from fastest. `get` gives
 * memory of whole pages or NULL: then that extent lies in ordinary memory. Both are called by any
 * thread, until store_close has returned. */
struct store_ram_memory {
    void *(*get)(void *context, uint64_t bytes);
    void (*put)(void *context, void *at);
    void *context;
};
void store_ram_lie(struct store *store, const struct store_ram_memory *memory);

/* Waits for the batch, if any, that has taken away here what the index still has: what was brought
 * after it began may be of records that are gone once this returns. Not for who commits. */
void store_ram_settle(struct store *store);

/* The owner was used just now: others go before it. */
void store_ram_touch(struct store *store, uint64_t owner);
void store_ram_forget(struct store *store, uint64_t owner);
/* 1 when something that this owner brought is here. */
int store_ram_has(struct store *store, uint64_t owner);

struct store_ram_stats {
    uint64_t bytes_max, bytes, bytes_peak; /* tables included */
    uint64_t extents, owners;
    uint64_t apart_bytes; /* of extents that lie in store_ram_memory */
    uint64_t evicted;     /* owners that went for others */
};
void store_ram_stats(struct store *store, struct store_ram_stats *out);

#endif
