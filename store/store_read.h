/* store/store_read.h - extents from disk into memory, many at a time.
 *
 * Responsible for: a deep queue of reads in the order given, without helpers straight into the
 * destination where it is 4 KiB-aligned, unzipping bounded by the size known before, digests,
 * deadlines.
 * Not responsible for: finding extents (store_get) or digests on a device (verify = 0).
 *
 * Threads: any number of calls at once, each with its own reads.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_READ_H
#define STORE_STORE_READ_H

#include "store/store.h"

#include <sys/uio.h>

struct store_read {
    const struct store_extent *extent; /* as store_get gave it */
    const struct iovec *pieces;        /* destination; sizes add up to extent->raw_bytes exactly */
    uint32_t piece_count;
    uint8_t verify;    /* 1: digest here; 0: the caller digests where the bytes land */
    const char *label; /* named in the diag: record and stream; may be NULL */
    /* Results. */
    enum kv_err result;
    uint8_t in_doubt; /* 1: timed out, and the kernel may still write to the destination: its
                         memory must not be used again before store_close has returned */
};

/* Called on the reading thread as soon as one read is over, well or not; must not call the store.
 */
typedef void (*store_read_done)(void *context, size_t read_index);

/* Asked on the reading thread before a read is begun, in order: 1 when its pieces may be filled, 0
 * when not yet. With `wait` nothing is under way: it returns when they may, or 0: no more is read,
 * and the results of all that have not begun are CANCELLED. */
typedef int (*store_read_room)(void *context, size_t read_index, int wait);

struct store_read_args {
    struct store_read *reads;
    size_t count;
    store_read_done done; /* may be NULL, as the next */
    store_read_room room;
    void *context;
    int ram;    /* 1: extents that are kept in memory (store_ram.h) are taken from there */
    int helper; /* 1: unzip and digest on store_options.helpers threads while later reads are under
                   way, which pays from a few extents on, and read by way of a few pages that stay;
                   0: all on the calling thread */
};

struct store_read_stats {
    const char *door_name;
    int direct;
    uint64_t read_bytes; /* at the I/O door, padding included */
    uint64_t raw_bytes;
    uint64_t ram_bytes;    /* of raw_bytes, taken from memory */
    uint64_t placed_bytes; /* of raw_bytes, read without a copy */
    uint64_t reads;
    uint64_t in_flight_max;
    uint64_t wait_ns;             /* handing over to the disk and waiting for it */
    uint64_t unzip_ns, digest_ns; /* of all threads together */
    uint32_t helpers;             /* threads that unzipped beside the calling one, at most */
    uint64_t digests;             /* extents checked here */
};

/* Reads all; goes on after a failed one. Returns KV_OK when every result is KV_OK, else the result
 * of the first failed read in order, with its sentence in the diag; one that was not read because
 * of another (CANCELLED) only where there is no other. Destinations of failed reads hold anything.
 * `stats_out` may be NULL.
 * KV_ERR_CORRUPT digest, padding, frame or length; KV_ERR_IO, also a deadline ("timed out");
 * KV_ERR_INVALID pieces that do not fit the extent; KV_ERR_CANCELLED; KV_ERR_NOMEM. */
enum kv_err store_read(struct store *store, const struct store_read_args *args,
                       struct store_read_stats *stats_out, struct kv_diag *diag);

/* One extent as a whole, for what is looked at by the processor. */
struct store_read_whole {
    const struct store_extent *extent;
    const struct kv_alloc *alloc;
    const char *label;              /* not NULL */
    struct store_read_stats *stats; /* may be NULL */
    int ram;                        /* as in store_read_args */
};

/* Page-aligned memory of `alloc` with the extent's verified bytes, the caller's to release. What a
 * late read may still write to is kept for ever instead. Codes of store_read. */
enum kv_err store_read_whole(struct store *store, const struct store_read_whole *args,
                             uint8_t **bytes_out, struct kv_diag *diag);

/* Reads and digests every extent of one record into memory of its own. Codes of store_get and
 * store_read; adds to *stats (may be NULL) instead of replacing it. */
enum kv_err store_read_check(struct store *store, const void *key, size_t key_bytes,
                             struct store_read_stats *stats, struct kv_diag *diag);

#endif
