/* store/store_gc.h - space that nobody uses given back.
 *
 * Responsible for: holes where dead extents were (store_punch.h), then moving live extents out of
 * sparse segments under the rules of a batch, restating what only such a segment's batch records
 * say, and removing it.
 * Not responsible for: which records live (a record lives until a batch deletes it).
 *
 * A segment goes only after the batch that replaces it has been committed, so a power cut at any
 * point leaves the old place or the new one. A rebuild from what is left gives the same records:
 * deleted ones stay deleted.
 *
 * Threads: the thread that owns batches, with none open; readers go on, see store_hold.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_GC_H
#define STORE_STORE_GC_H

#include "store/store.h"

enum { STORE_GC_LIVE_PERCENT = 50 };

struct store_gc_options {
    uint32_t live_percent;     /* a segment with less is sparse; 1 … 100, usually 50 */
    int dry_run;               /* counts and changes nothing */
    int punch_only;            /* moves nothing, so it writes nothing */
    int punch_every;           /* where hardly anything is dead, too: nothing dead stays readable */
    int with_open;             /* the segment that is written to as well: the next one begins */
    uint64_t bytes_per_second; /* 0: unbounded */
    /* Called to stay within the rate, and between segments with 0; non-zero ends the run early.
     * NULL is allowed without a rate. */
    int (*pause)(void *context, uint64_t ns);
    void (*progress)(void *context, uint64_t done_bytes, uint64_t all_bytes); /* NULL is allowed */
    /* Called behind every segment that was moved: until it returns others may own batches. What
     * they have written is looked at before the next one. NULL: nobody else writes. */
    void (*lend)(void *context);
    void *context;
};
/* Usual values: 50 %, unbounded. */
struct store_gc_options store_gc_options_usual(void);

struct store_gc_report {
    uint32_t segments_before, segments_after;
    uint64_t segment_bytes_before, segment_bytes_after; /* that the files take */
    uint64_t live_bytes;
    uint32_t sparse;                     /* segments chosen */
    uint32_t removed;                    /* of these; a dry run: that would be */
    uint32_t held;                       /* left for readers; the next run takes them */
    uint32_t damaged;                    /* left because a live extent in them cannot be read */
    uint64_t moved_extents, moved_bytes; /* padded; a dry run: that would be */
    uint64_t restated;                   /* records and deletions written again without extents */
    uint64_t written_bytes;              /* at the I/O door */
    uint64_t punched_bytes;              /* given back in place (store_punch.h) */
    uint64_t freed_bytes;                /* the same and what the files removed took then */
    int no_holes;                        /* the file system cannot punch */
    int stopped;                         /* by `pause` */
    char trouble[200];                   /* the first reason why a segment was left; "" when none */
};

/* KV_ERR_LIMIT: the byte budget does not hold what a segment keeps beside the segment, and the text
 * says how much that is; KV_ERR_NO_SPACE: the disk does not. What was freed until then stays freed,
 * and the report says how much. KV_ERR_INVALID read-only or options, KV_ERR_BUSY a batch is open,
 * KV_ERR_CORRUPT an index entry, KV_ERR_IO, KV_ERR_NOMEM. The report is written in every case. */
enum kv_err store_gc(struct store *store, const struct store_gc_options *options,
                     struct store_gc_report *report_out, struct kv_diag *diag);

#endif
