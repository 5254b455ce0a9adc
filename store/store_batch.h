/* store/store_batch.h - records that become visible, durably, as one.
 *
 * Responsible for: putting, changing and deleting records in a batch, and the account of what a
 * commit wrote. When store_batch_commit returns KV_OK all of it survives a power cut; before that
 * no reader and no later open sees any of it.
 * Not responsible for: reading (store.h, store_read.h).
 *
 * Threads: one batch at a time, and one thread from begin to commit or abandon; other threads may
 * read meanwhile, also while this one waits for the disk.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_BATCH_H
#define STORE_STORE_BATCH_H

#include "store/store.h"

#include <sys/uio.h>

enum { STORE_PIECES_MAX = 64, STORE_BATCH_OPS_MAX = 1 << 20 };
#define STORE_BATCH_RECORD_BYTES_MAX ((uint64_t)64 << 20) /* all keys, values, places of a batch */

/* How to try to make an extent smaller. Tried on 1 extent in 16 of a kind while it does not pay,
 * on all while it does; kept only where it saves 8 % or more. */
enum store_codec_hint {
    STORE_RAW,         /* never tried */
    STORE_ZSTD,        /* for what has no long matches (codec.c) */
    STORE_SHUFFLE_ZSTD /* bytes of 2-byte elements parted first: BF16 */
};

struct store_part {
    uint8_t kind; /* < STORE_KINDS_MAX; the unit of the compression sample and of the account */
    enum store_codec_hint hint;
    const struct iovec
        *pieces;          /* the extent's bytes in order; total in [1, STORE_EXTENT_BYTES_MAX] */
    uint32_t piece_count; /* [1, STORE_PIECES_MAX] */
    uint8_t behind; /* 1: lies behind the put's other parts, so that these can be read in one go */
};

struct store_put {
    const void *key; /* [1, STORE_KEY_BYTES_MAX] */
    size_t key_bytes;
    const void *value; /* [0, STORE_VALUE_BYTES_MAX] */
    size_t value_bytes;
    const struct store_part *parts; /* [0, STORE_EXTENTS_MAX] */
    size_t part_count;
};

struct store_batch; /* belongs to the store; ended by commit or abandon */

/* `worst_bytes` is the caller's bound on the raw bytes of all parts, each rounded up to 4 KiB,
 * plus all keys and values; 0 promises nothing. A batch that could pass bytes_max is refused here,
 * or at the put that would pass it, before those bytes are written. Puts leave room behind for
 * batches that only delete.
 * KV_ERR_NO_SPACE (need and have in the diag), KV_ERR_BUSY a batch is open, KV_ERR_INVALID the
 * store is read-only, KV_ERR_IO writing was given up after a failed sync: reopen. */
enum kv_err store_batch_begin(struct store *store, uint64_t worst_bytes, struct store_batch **out,
                              struct kv_diag *diag);

/* For a batch that mostly deletes: it may use the budget's reserve_bytes, and while it puts no
 * extent the budget never refuses it, also where bytes_max was set below what is stored. Codes as
 * above. */
enum kv_err store_batch_begin_removal(struct store *store, struct store_batch **out,
                                      struct kv_diag *diag);

/* Why the batch is written, for the account in store_stats; BLOCKS leaves the account in memory
 * until the next batch of another cause keeps it. */
void store_batch_cause(struct store_batch *batch, enum store_cause cause);

/* Puts or replaces a record. The parts' bytes have been taken when this returns. After an error the
 * batch can only be abandoned (commit returns the same error).
 * KV_ERR_INVALID, KV_ERR_LIMIT sizes and counts, KV_ERR_NO_SPACE, KV_ERR_IO, KV_ERR_NOMEM. */
enum kv_err store_batch_put(struct store_batch *batch, const struct store_put *put,
                            struct kv_diag *diag);

/* The same with what stands ready of the parts (store_pack.h), one for each of them. */
struct store_packed;
enum kv_err store_batch_put_packed(struct store_batch *batch, const struct store_put *put,
                                   const struct store_packed *packed, struct kv_diag *diag);

struct store_commit_stats {
    const char *door_name;
    int direct;
    uint64_t written_bytes; /* everything handed to the I/O door: extents, padding, batch record */
    uint64_t record_bytes;  /* the batch record's share of it */
    uint64_t raw_bytes;     /* of the parts put */
    uint64_t stored_bytes;  /* of the same, padded to 4 KiB */
    uint64_t raw_by_kind[STORE_KINDS_MAX];
    uint64_t stored_by_kind[STORE_KINDS_MAX]; /* padded */
    uint64_t writes;
    uint64_t in_flight_max; /* most writes in flight at one time */
    uint64_t pack_ns;       /* of what the puts zipped themselves */
    uint64_t write_ns;      /* begin of the batch to the last write's end, waiting only */
    uint64_t sync_ns;
    uint64_t index_ns;
    uint64_t sequence;      /* of this batch */
    uint64_t syncs;         /* fdatasyncs of segments; their folder is not counted */
    uint64_t index_commits; /* as the index counts them */
    uint32_t segments;      /* that this batch wrote to or ended */
};

/* Replaces the value and keeps the extents; sees what this batch has done. KV_ERR_NOT_FOUND leaves
 * the batch usable; other codes as store_batch_put, and KV_ERR_CORRUPT. */
enum kv_err store_batch_update(struct store_batch *batch, const void *key, size_t key_bytes,
                               const void *value, size_t value_bytes, struct kv_diag *diag);

/* The same, and the extents of the kinds in the mask leave the record; the parts of `put` are not
 * looked at. */
enum kv_err store_batch_shrink(struct store_batch *batch, const struct store_put *put,
                               uint32_t drop_kinds, struct kv_diag *diag);

/* Deleting a key that is not there is allowed and does nothing. Codes as store_batch_put. */
enum kv_err store_batch_delete(struct store_batch *batch, const void *key, size_t key_bytes,
                               struct kv_diag *diag);

/* Ends the batch in every case: on KV_OK it is durable, on an error it is gone, the files are cut
 * back and older data is untouched. A batch without changes writes nothing. `stats_out` may be
 * NULL; it is written in every case. After KV_ERR_IO from a sync or a half-known index commit the
 * store takes no further batch until it is reopened (a failed sync cannot be repeated); reads go
 * on.
 * KV_ERR_NO_SPACE, KV_ERR_IO, KV_ERR_LIMIT, KV_ERR_NOMEM, or what an earlier put returned. */
enum kv_err store_batch_commit(struct store_batch *batch, struct store_commit_stats *stats_out,
                               struct kv_diag *diag);

/* NULL is allowed. */
void store_batch_abandon(struct store_batch *batch);

#endif
