/* snapshot/snap_care.h - the stored sessions looked after as a whole.
 *
 * Responsible for: which records no session uses (gc), whether names, snapshots, pages, blocks and
 * counts agree (fsck), which sessions a record belongs to (scrub).
 * Not responsible for: extents and segments (store/), reading images (restore/).
 *
 * Threads: the one that has the store, with nothing queued or with the writer taken
 * (snapshot_writer_take). Blocks that a resident session has written beyond its snapshots look
 * unused: whoever has such sessions says so (`open`).
 * Units: records.
 */
#ifndef SNAPSHOT_SNAP_CARE_H
#define SNAPSHOT_SNAP_CARE_H

#include "store/store.h"

struct snapshot;

struct snap_care_report {
    uint64_t sessions, snapshots; /* that are stored */
    uint64_t dead_snapshots, dead_pages, dead_blocks, dead_lineages;
    uint64_t counts_mended;
    char trouble[256]; /* why nothing was deleted; "" when nothing is wrong */
};

struct snap_care_collect_args {
    struct store *store;
    const struct kv_alloc *alloc;
    struct snapshot *open; /* writes for resident sessions: their lineages stay; NULL: none */
    int dry_run;           /* only counts */
};
/* Deletes records that no session uses. When a session cannot be followed to its end nothing is
 * deleted: what it uses is not known. IO, NO_SPACE, NOMEM, INVALID. */
enum kv_err snap_care_collect(const struct snap_care_collect_args *args,
                              struct snap_care_report *report_out, struct kv_diag *diag);

struct snap_care_finding {
    const char *kind;    /* a constant word such as "page-count" */
    const char *session; /* "" when it belongs to none */
    int is_note;         /* 1: garbage or a count, nobody loses anything */
    const char *text;
};
typedef void (*snap_care_each)(void *context, const struct snap_care_finding *finding);
struct snap_care_check_args {
    struct store *store;
    const struct kv_alloc *alloc;
    struct snapshot *open; /* as above */
    int repair;            /* counts are written right, unused records deleted; nothing else */
    snap_care_each each;
    void *context;
};
/* KV_OK whatever was found. IO, NO_SPACE, NOMEM. */
enum kv_err snap_care_check(const struct snap_care_check_args *args,
                            struct snap_care_report *report_out, struct kv_diag *diag);

/* Who uses records: made once, asked often. */
struct snap_care_owners;
/* IO, NOMEM. */
enum kv_err snap_care_owners_make(struct store *store, const struct kv_alloc *alloc,
                                  struct snap_care_owners **out, struct kv_diag *diag);
void snap_care_owners_drop(struct snap_care_owners *owners); /* NULL is allowed */
/* Calls `each` once for every session that uses the record; returns how many. */
typedef void (*snap_care_owner)(void *context, const char *session);
uint32_t snap_care_owners_of(const struct snap_care_owners *owners, const void *key,
                             size_t key_bytes, snap_care_owner each, void *context);

/* Snapshots, of the sessions that use the record, which do not use it themselves: what is left when
 * it is lost. IO, NOMEM; a chain that breaks ends there. */
struct record_snapshot;
typedef void (*snap_care_survivor)(void *context, const char *session,
                                   const struct record_snapshot *record);
enum kv_err snap_care_survivors(const struct snap_care_owners *owners, struct store *store,
                                const uint8_t *key, size_t key_bytes, snap_care_survivor each,
                                void *context);

#endif
