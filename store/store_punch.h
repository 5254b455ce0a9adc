/* store/store_punch.h - dead extents given back to the file system where they stand.
 *
 * Responsible for: finding the pages of segments that belong to no live extent and to no batch
 * record, in the open segment too, and punching holes there.
 * Not responsible for: moving what lives (store_gc.c).
 *
 * It writes nothing, so it works on a disk without a single free block. What is dead is what the
 * index says, whose last commit is durable, so a power cut finds old bytes or zeros in places that
 * nobody reads. Batch records stay: a rebuild needs them. So do the extents of the last batch, also
 * those that it has replaced itself: a rebuild reads them to know whether that batch is whole.
 *
 * Threads: the thread that owns batches, with none open; see store_hold.
 * Units: bytes.
 */
#ifndef STORE_STORE_PUNCH_H
#define STORE_STORE_PUNCH_H

#include "store/store.h"

struct store_punch_report {
    uint64_t punched_bytes; /* that the files take less now; a dry run: would */
    uint32_t segments;      /* with dead bytes */
    uint32_t held;          /* left for readers */
    uint32_t damaged;       /* left because a batch record in them cannot be read */
    int refused;            /* the file system has no holes */
    char trouble[200];      /* the first reason why a segment was left; "" when none */
};

struct store_punch_args {
    struct store *store;
    int dry_run; /* counts and changes nothing */
    int every;   /* 1: segments with hardly anything dead too; takes reading all gaps */
    /* Told once for each segment, and what it takes less, or would. NULL is allowed. */
    void (*each)(void *context, uint32_t segment, uint64_t bytes);
    void *context;
};
/* KV_ERR_CORRUPT an index entry, KV_ERR_IO, KV_ERR_NOMEM; the report is written in every case. */
enum kv_err store_punch(const struct store_punch_args *args, struct store_punch_report *report_out,
                        struct kv_diag *diag);

#endif
