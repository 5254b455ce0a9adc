/* restore/rest_fetch.h - the list of reads that fills a shadow, as they lie on the disk.
 *
 * Responsible for: which extent goes where, and in which order.
 * Not responsible for: running the reads or digests (rest_load.c).
 *
 * Where a session is to answer at the ladder's floor at first, the shadow has no place for more
 * yet (transfer_load_begin): then the list is that much shorter.
 *
 * Threads: one owner.
 * Units: bytes.
 */
#ifndef RESTORE_REST_FETCH_H
#define RESTORE_REST_FETCH_H

#include "engine/transfer.h"
#include "restore/rest_plan.h"

#include <sys/uio.h>

enum { REST_FETCH_LABEL_BYTES = 48 };
/* The stream of token ids, which go into no slot. */
#define REST_FETCH_IDS LAYOUT_STREAM_COUNT

struct rest_fetch_item {
    const struct store_extent *extent; /* in the plan */
    enum layout_stream stream;         /* or REST_FETCH_IDS */
    uint32_t piece_count;
    struct iovec *pieces; /* where the read lands: the place itself, or memory on the way to it */
    struct transfer_part place;
    char label[REST_FETCH_LABEL_BYTES]; /* "block 3, stream VR1" */
};

struct rest_fetch {
    const struct kv_alloc *alloc;
    struct rest_fetch_item *items;
    struct iovec *pieces;
    uint8_t *ids; /* of all blocks, as they are stored; NULL: the plan's image has them */
    size_t count, piece_count;
    size_t room;        /* items that there can be */
    size_t page_count;  /* the first ones: sinks and window */
    size_t whole_count; /* and scales behind them: what every layer needs */
    uint64_t raw_bytes;
    int listed; /* the others, too */
};

/* What every layer needs: sinks, window, scales. NOMEM; CORRUPT when an extent's size is not that
 * of its place. Release in every case. */
enum kv_err rest_fetch_begin(const struct rest_plan *plan, struct transfer_load *load,
                             struct rest_fetch *fetch_out, struct kv_diag *diag);
/* All others behind, in the order of blocks, unless they are listed; what is there stays where it
 * is, and others may read it meanwhile. CORRUPT as above. */
enum kv_err rest_fetch_rest(const struct rest_plan *plan, struct transfer_load *load,
                            struct rest_fetch *fetch, struct kv_diag *diag);
/* Pages in front; each kind in the order in which it lies on the disk. */
void rest_fetch_sort(struct rest_fetch *fetch);
void rest_fetch_release(struct rest_fetch *fetch);
/* 1: the place is out of the processor's reach, so the bytes must land elsewhere first. */
int rest_fetch_is_far(const struct rest_fetch_item *item, int mapped);
/* Where the item lands, as transfer.h describes it. */
struct transfer_part rest_fetch_part(const struct rest_fetch_item *item);

#endif
