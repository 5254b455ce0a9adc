/* restore/rest_load.h - from extents into reserved slots, every digest checked.
 *
 * Responsible for: the order of reads, digests on a second thread while reads go on.
 * Not responsible for: reserving or publishing (transfer.h), reading itself (rest_fetch.h).
 *
 * Threads: the caller reads, and others may step meanwhile; a thread that lives for the call and
 * lets whoever computes go first digests. A look is pure.
 * Units: bytes, nanoseconds.
 */
#ifndef RESTORE_REST_LOAD_H
#define RESTORE_REST_LOAD_H

#include "restore/rest_fetch.h"
#include "restore/rest_plan.h"
#include "restore/restore.h"
#include "store/store_read.h"

/* One item that has landed, on the device and, as a whole, where the processor can see it. KV_OK:
 * its digest is right and its numbers are numbers. Else CORRUPT with what can be done about it, or
 * the device's error. */
struct rest_load_landed {
    const struct rest_fetch_item *item;
    const void *bytes; /* NULL: the item's pieces, which are memory of the processor */
    enum kv_err err;   /* of the digest */
    const struct kv_digest *found;
};
enum kv_err rest_load_look(const struct rest_load_landed *landed, struct kv_diag *diag);

/* What one call of store_read has taken, into the receipt. */
void rest_load_stats(struct receipt *receipt, const struct store_read_stats *stats);
/* And one item that is in its place. */
void rest_load_count(struct receipt *receipt, const struct rest_fetch_item *item);

/* Fills everything that `load` reserved from the list, which it takes. Adds bytes, digests and
 * times to the receipt. On an error *in_doubt_out says whether a late read may still write into the
 * slots: then they must stay reserved. CORRUPT, IO, DEVICE, NOMEM, CANCELLED. */
struct rest_load_args {
    const struct restore_source *source;
    const struct rest_plan *plan;
    struct transfer_load *load;
    const struct restore_options *options;
    struct receipt *receipt;
};
enum kv_err rest_load_run(const struct rest_load_args *args, struct rest_fetch *fetch,
                          int *in_doubt_out, struct kv_diag *diag);

#endif
