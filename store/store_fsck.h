/* store/store_fsck.h - do segments, batch records and index say the same?
 *
 * Responsible for: replaying the chain of batch records in memory and comparing it with the index
 * record for record, both ways; places of extents; counts; digests on request.
 * Not responsible for: what records mean (snapshot/snap_care.h), rebuilding (store_options).
 *
 * Every segment is read once, every extent once more with read_data.
 *
 * Threads: one owner, no batch open; a writer beside it would look like damage.
 * Units: bytes, records.
 */
#ifndef STORE_STORE_FSCK_H
#define STORE_STORE_FSCK_H

#include "store/store.h"

enum store_fsck_kind {
    STORE_FSCK_ENTRY,        /* an index entry fails its check */
    STORE_FSCK_PLACE,        /* an extent in a segment that is missing or too short */
    STORE_FSCK_OVERLAP,      /* two extents share bytes */
    STORE_FSCK_DATA,         /* an extent does not match its digest (read_data) */
    STORE_FSCK_BATCH,        /* a batch record is missing or damaged */
    STORE_FSCK_NOT_IN_INDEX, /* the segments say that a record lives, the index has none */
    STORE_FSCK_NOT_IN_CHAIN, /* only the index says so: a rebuild would lose it */
    STORE_FSCK_COUNTS,       /* the index's totals are not those of its entries */
    STORE_FSCK_TAIL,         /* bytes behind the last batch, cut by the next writer: a note */
    STORE_FSCK_PADDING,      /* bits turned behind a batch record, where nothing is: a note */
    STORE_FSCK_KINDS
};
const char *store_fsck_name(enum store_fsck_kind kind); /* a constant word */

struct store_fsck_finding {
    enum store_fsck_kind kind;
    int is_note;        /* 1: nothing is lost and nothing is wrong */
    const uint8_t *key; /* of the record it touches; NULL when of none */
    size_t key_bytes;
    const char *text;
};

struct store_fsck_report {
    uint64_t records, extents, batches, segments;
    uint64_t damage, notes; /* findings */
    uint64_t restated;      /* by repair */
    int index_wrong;        /* a rebuild of the index mends it */
    uint64_t read_bytes;
};

struct store_fsck_args {
    struct store *store;
    int read_data;
    int repair; /* records that only the index knows are put into the chain again */
    void (*each)(void *context, const struct store_fsck_finding *finding);
    void (*progress)(void *context, uint64_t done_bytes, uint64_t all_bytes); /* NULL is allowed */
    /* Called behind every segment and, with read_data, every record; non-zero ends the run, and
     * what was to be repaired is as before. NULL is allowed. */
    int (*pause)(void *context, uint64_t read_bytes);
    void *context;
};

/* KV_OK whatever was found. KV_ERR_IO, KV_ERR_NO_SPACE (repair), KV_ERR_NOMEM, KV_ERR_INVALID
 * (repair of a store open for reading), KV_ERR_BUSY (ended by `pause`). */
enum kv_err store_fsck(const struct store_fsck_args *args, struct store_fsck_report *report_out,
                       struct kv_diag *diag);

#endif
