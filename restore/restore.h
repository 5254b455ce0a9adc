/* restore/restore.h - from durable bytes back to a live session, proven.
 *
 * Responsible for: plan, reserve, fetch, load, digest, publish, prove, receipt.
 * Not responsible for: making room (tools/), writing anything (snapshot/), or prefilling: nothing
 * is ever recomputed here.
 *
 * Everything lands in reserved slots that no session can see, or, from the RAM tier, in those of
 * one that is WAKING and does nothing but show that it is right; a failure frees them and changes
 * nothing else. No session goes on before every digest is right.
 *
 * Threads: the engine's scheduler thread; reads and digests overlap inside.
 * Units: bytes, tokens, nanoseconds.
 * Errors: NOT_FOUND (an older snapshot that is kept no more, too), EXISTS (already resident),
 * MISMATCH (field and both values), VERSION, CORRUPT (record, stream and what differs), NO_SLOTS
 * (need and have), IO, NOMEM, DEVICE, PROOF (bytes were right but the fingerprint or a kept needle
 * was not; the session is dropped again), CANCELLED.
 */
#ifndef RESTORE_RESTORE_H
#define RESTORE_RESTORE_H

#include "engine/engine.h"
#include "engine/receipt.h"
#include "engine/transfer.h"
#include "store/store.h"
#include "store/store_read.h"

struct restore_refine;
struct restore_source {
    struct store *store; /* reading is enough */
    struct engine *engine;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    struct restore_refine *refine; /* NULL: what comes behind sessions gets no receipt */
};
/* 0 from the callback cancels: the shadow is freed. */
typedef int (*restore_progress)(void *context, uint64_t bytes_done, uint64_t bytes_all);
struct restore_options {
    int skip_needles;    /* only fingerprint and probes; the receipt says so */
    uint32_t probes_max; /* so many of the probes are asked, 0: none */
    uint64_t snapshot; /* one of the session's older ones, 0: its head. What was woken from an older
                            one cannot be saved: its head stands elsewhere */
    /* Another name for the session on the device, NULL: its own. Such a session cannot be saved
     * before snapshot_branch has made it a new one. */
    const char *as;
    /* EAGER: the session answers once the ladder's floor is in and proven; the rest comes behind
     * its steps. FLOOR: it stays there (session_refine). */
    enum receipt_tiers tiers;
    restore_progress progress;
    void *progress_context;
};

/* What a wake of `name` (of its head with `snapshot` 0) needs, from records and image alone. */
struct restore_plan {
    uint64_t snapshot, n, n_kv;
    uint32_t blocks, pages, slots;
    uint32_t floor_slots; /* enough for RECEIPT_TIERS_FLOOR */
    uint32_t tier_blocks[16];
    uint64_t raw_bytes, stored_bytes;
};
enum kv_err restore_plan(const struct restore_source *source, const char *name, uint64_t snapshot,
                         struct restore_plan *plan_out, struct kv_diag *diag);

/* Wakes the snapshot of `name` that the options say. The receipt is filled on success and on
 * failure. */
enum kv_err restore_wake(const struct restore_source *source, const char *name,
                         const struct restore_options *options, struct session **session_out,
                         struct receipt *receipt_out, struct kv_diag *diag);

/* For engine_hooks.planes_wanted; context is a struct restore_source. Only posts: before each step
 * the missing planes of one block are read and digests compared; those of a block come all or none
 * (transfer_planes_arrived). Where a read timed out they are lost: the slots stay reserved, the
 * engine must then be closed behind the store. */
void restore_planes_wanted(void *context, struct session *session, struct block *block);

/* Accounts of what comes behind sessions that were woken eagerly. NOMEM. Closed when the engine has
 * nothing left to apply. */
enum kv_err restore_refine_open(const struct kv_alloc *alloc, struct restore_refine **refine_out);
void restore_refine_close(struct restore_refine *refine);
/* 1 and the receipt of a session whose planes have all come, or were given up: then `err` and
 * `reason` say the first that could not be read, and the session is whole at a coarser tier. */
int restore_refined(const struct restore_source *source, struct receipt *receipt_out);

/* Lets the RAM tier lie where the engine's device copies from fastest, if that is not everywhere.
 * Once, before anything is kept; the engine is closed behind the store then. */
void restore_lie(struct store *store, struct engine *engine);
/* The RAM tier (store/store_ram.h), under the number of the session's lineage; nothing is done
 * where it keeps nothing. `session` is saved as it is and about to leave the device: what a wake
 * would read stays in memory, all of it or, where it is more than the budget, nothing. */
void restore_keep(const struct restore_source *source, struct session *session);
/* The same from the disk, for a session that is asleep. LIMIT: more than the budget, or no tier;
 * NOT_FOUND, CORRUPT, IO, NOMEM. */
enum kv_err restore_prefetch(const struct restore_source *source, const char *name,
                             struct store_read_stats *stats_out, struct kv_diag *diag);

/* Reads and digests every extent of a session's head snapshot, and of the older ones that stay,
 * without an engine and checks image, root and block chain: `coldplane verify`. */
struct restore_check {
    uint32_t snapshots, extents, blocks, pages;
    uint64_t stored_bytes;
};
enum kv_err restore_verify(struct store *store, const struct kv_alloc *alloc, const char *name,
                           struct restore_check *check_out, struct kv_diag *diag);

/* Writes one snapshot of `name`, with every block and page that it needs, to `put`, as
 * snapshot/EXPORT.md says; without an engine. Every digest is checked on the way. What `put`
 * returns ends it. */
struct restore_export_args {
    struct store *store;
    const struct kv_alloc *alloc;
    const char *name;
    uint64_t snapshot; /* one of the session's older ones, 0: its head */
    enum kv_err (*put)(void *context, const void *bytes, size_t count, struct kv_diag *diag);
    void *context;
    restore_progress progress; /* may be NULL */
    void *progress_context;
};
struct restore_exported {
    uint64_t snapshot, n, n_kv, bytes;
    uint32_t blocks, pages;
};
enum kv_err restore_export(const struct restore_export_args *args,
                           struct restore_exported *exported_out, struct kv_diag *diag);

/* The image of a session's head snapshot, root digest checked; for `show` and tests. */
enum kv_err restore_image(struct store *store, const struct kv_alloc *alloc, const char *name,
                          struct image *image_out, struct kv_diag *diag);

#endif
