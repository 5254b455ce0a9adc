/* store/store_scrub.h - everything read again, slowly.
 *
 * Responsible for: reading and digesting every record's extents at a bounded rate, going on where
 * the last run ended, naming the first bad extent of each record; then every segment once, for the
 * batch records that a rebuild would need.
 * Not responsible for: whose records they are (snapshot/snap_care.h) or mending them.
 *
 * Progress is a record of the store's own; a store open for reading begins at the front each time.
 *
 * Threads: the thread that owns batches, with none open.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_SCRUB_H
#define STORE_STORE_SCRUB_H

#include "store/store_fsck.h"

struct store_scrub_args {
    struct store *store;
    uint64_t bytes_per_second; /* 0: unbounded */
    int restart;               /* from the front, whatever was read before */
    /* Called behind every record, to stay within the rate; non-zero ends the run, and the next one
     * goes on there. NULL is allowed without a rate. */
    int (*pause)(void *context, uint64_t ns);
    void (*progress)(void *context, uint64_t done_bytes, uint64_t all_bytes); /* NULL is allowed */
    /* Called behind every record: until it returns others may own batches. Not while the segments
     * are looked at, behind the last record. NULL: nobody else writes. */
    void (*lend)(void *context);
    /* A record whose extents are not what was put, named by its first bad one; or what is wrong
     * with a batch record. */
    void (*bad)(void *context, const struct store_fsck_finding *finding);
    void *context;
};

struct store_scrub_report {
    uint64_t pass;         /* number of this pass, from 1 */
    uint64_t records, bad; /* read in this run; findings */
    uint64_t read_bytes;   /* in this run, at the I/O door */
    uint64_t pass_bytes;   /* in this pass so far */
    uint64_t last_end_ns;  /* wall time at which a pass last ended; 0 never */
    int resumed, finished;
};

/* KV_OK whatever was found. KV_ERR_IO, KV_ERR_NO_SPACE, KV_ERR_NOMEM, KV_ERR_INVALID. */
enum kv_err store_scrub(const struct store_scrub_args *args, struct store_scrub_report *report_out,
                        struct kv_diag *diag);

#endif
