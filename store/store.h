/* store/store.h - durable records with extents: open, look up, list, count.
 *
 * Responsible for: a directory that one process writes and any number read. A record is a key, a
 * short value and the extents it owns; it becomes visible, whole, when its batch commits
 * (store_batch.h) and its extents are read with store_read.h.
 * Not responsible for: what keys, values and extents mean; which records should die.
 *
 * Threads: after store_open any thread may call what is declared here; store_close when no other
 * call is running. One handle per directory and process (an LMDB rule). No internal lock is held
 * across an I/O wait and no index transaction stays open after a call returns.
 * Units: bytes, nanoseconds, monotonic clock.
 */
#ifndef STORE_STORE_H
#define STORE_STORE_H

#include "store/base/alloc.h"
#include "store/base/clock.h"
#include "store/base/diag.h"
#include "store/base/digest.h"
#include "store/base/err.h"

#include <stddef.h>
#include <stdint.h>

enum {
    STORE_KEY_BYTES_MAX = 511,
    STORE_VALUE_BYTES_MAX = 48 * 1024,
    STORE_EXTENTS_MAX = 256, /* per record */
    STORE_KINDS_MAX = 32,    /* kinds are 0 … 31, chosen by the caller */
    STORE_PAGE_BYTES = 4096,
    STORE_FORMAT_VERSION = 1
};
#define STORE_EXTENT_BYTES_MAX ((uint64_t)1 << 30)
#define STORE_BYTES_UNLIMITED UINT64_MAX

struct store;
struct io_door; /* store/io.h */

struct store_options {
    const char *dir;        /* its parent must exist; borrowed for the call */
    int read_only;          /* 1: takes no lock and changes nothing (but see store_open) */
    int create;             /* 1: a writer makes the store where there is none */
    int inspect;            /* 1, with read_only: a damaged index is KV_ERR_CORRUPT, not mended */
    int rebuild_index;      /* 1: a writer makes the index anew from the segments */
    int direct_wanted;      /* 1: O_DIRECT where the file system takes it */
    uint64_t bytes_max;     /* hard budget for DIR, or STORE_BYTES_UNLIMITED */
    uint64_t reserve_bytes; /* of it, only for removals and gc, so that a full store empties */
    uint64_t segment_bytes; /* a multiple of 4 KiB in [1 MiB, 1 GiB]; 64 MiB is usual */
    uint64_t deadline_ns;   /* longest wait for one read or write; 30 s is usual */
    uint32_t helpers;       /* threads that unzip behind one that reads; 1 … 16, 0 is 1 */
    const char *program;    /* written into LOCK for whoever finds it held */
    void (*progress)(void *context, uint64_t done, uint64_t all); /* segments read for a rebuild
                                                 of the index while it opens; NULL is allowed */
    void *progress_context;
    const struct io_door *door; /* these three are borrowed until store_close */
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
};

/* Options with the usual values, the best door of this machine and the system's allocator. */
struct store_options store_options_usual(const char *dir, const char *program);

/* Sets the budget, an eighth of it (at most 32 MiB) as its reserve, and segments small enough for
 * gc to work inside it. */
void store_options_limit(struct store_options *options, uint64_t bytes_max);

/* Opens, creating DIR (0700) when a writer that may do so finds none. Finishes or drops what a
 * crash left, and rebuilds a missing or damaged index from the segments (a read-only open does so
 * only if it can have the lock). *out is written on KV_OK only.
 * KV_ERR_INVALID options, or DIR is a file, a symbolic link or a folder of other things;
 * KV_ERR_NOT_FOUND no store there and none is to be made; KV_ERR_BUSY another writer (diag names
 * it), KV_ERR_VERSION newer format, KV_ERR_CORRUPT a store that lost FORMAT, or a symbolic link
 * inside it; KV_ERR_IO, KV_ERR_NO_SPACE, KV_ERR_NOMEM. */
enum kv_err store_open(const struct store_options *options, struct store **out,
                       struct kv_diag *diag);

/* Makes the index anew from the segments while the store is open for writing: what LMDB has freed
 * of the one before is gone with it. Readers of this process go on; those of others are told
 * to open again (KV_ERR_IO). `note_out` says what was found, as store_stats does of an opening.
 * The thread that owns batches, with none open. KV_ERR_MISMATCH segments and index do not say the
 * same, and nothing was changed; KV_ERR_INVALID read-only, KV_ERR_BUSY a batch is open,
 * KV_ERR_CORRUPT, KV_ERR_IO, KV_ERR_NO_SPACE, KV_ERR_NOMEM: as it was, or nothing more is written.
 */
enum { STORE_NOTE_BYTES = 320 };
enum kv_err store_reindex(struct store *store, char note_out[STORE_NOTE_BYTES],
                          struct kv_diag *diag);

/* NULL is allowed. Cuts the open segment at its tail. No batch may be open. */
void store_close(struct store *store);

struct store_extent {
    uint64_t id;             /* unique in the store, never used again */
    uint8_t kind;            /* the caller's */
    uint8_t codec;           /* enum codec_id, codec.h */
    uint32_t segment;        /* the file seg/%08u.seg */
    uint64_t off;            /* a multiple of 4 KiB */
    uint64_t raw_bytes;      /* what was put */
    uint64_t stored_bytes;   /* in the file, before padding to 4 KiB */
    struct kv_digest digest; /* of the raw bytes */
};

/* Owned copy; store_record_release frees it. */
struct store_record {
    uint8_t key[STORE_KEY_BYTES_MAX];
    uint32_t key_bytes;
    uint32_t value_bytes;
    uint32_t extent_count;
    uint8_t *value;               /* inside one allocation with extents */
    struct store_extent *extents; /* in the order they were put */
    void *memory;
};

/* KV_ERR_NOT_FOUND, KV_ERR_CORRUPT index value, KV_ERR_INVALID key size, KV_ERR_IO, KV_ERR_NOMEM.
 * *out is written on KV_OK only. */
enum kv_err store_get(struct store *store, const void *key, size_t key_bytes,
                      struct store_record *out, struct kv_diag *diag);
enum kv_err store_exists(struct store *store, const void *key, size_t key_bytes, int *exists_out,
                         struct kv_diag *diag);
void store_record_release(struct store *store, struct store_record *record);

/* Position of a walk over all keys that begin with `prefix`, in byte order; fill the first two
 * fields, zero the rest. Each step is a look-up of its own: batches may commit in between. */
struct store_walk {
    const void *prefix; /* borrowed until the walk is over */
    size_t prefix_bytes;
    size_t after_bytes;
    uint8_t after[STORE_KEY_BYTES_MAX];
};

/* Codes as store_get; KV_ERR_NOT_FOUND ends the walk. After KV_ERR_CORRUPT the walk stands behind
 * the damaged record and can go on. */
enum kv_err store_next(struct store *store, struct store_walk *walk, struct store_record *out,
                       struct kv_diag *diag);

/* Between these, what store_get has given can be read: gc leaves segments in place. Count up and
 * down, any thread; a second process that reads beside gc looks its record up again instead. */
void store_hold(struct store *store);
void store_unhold(struct store *store);
/* Number of the last batch, also one that another process has committed; 0 when it cannot be read.
 */
uint64_t store_sequence(struct store *store);
/* Several records that name each other, read while others commit, here or in another process: what
 * one has named may be gone before it is read. `while (store_look(store, &look, err, diag)) err =
 * …;` with `look` zeroed reads once, and again where `err` is CORRUPT and a batch came meanwhile,
 * STORE_LOOKS_MAX times at most, each time with a clear diag. */
enum { STORE_LOOKS_MAX = 8 };
struct store_look {
    uint64_t sequence;
    int count; /* of looks, the one under way too */
};
int store_look(struct store *store, struct store_look *look, enum kv_err err, struct kv_diag *diag);

/* Why something was written. */
enum store_cause {
    STORE_CAUSE_OTHER,
    STORE_CAUSE_BLOCKS, /* sealed blocks, in the background */
    STORE_CAUSE_SAVE,
    STORE_CAUSE_REMOVAL,
    STORE_CAUSE_GC,
    STORE_CAUSE_CARE, /* marks of scrub, repairs */
    STORE_CAUSES
};
struct store_written_sum {
    uint64_t batches;
    uint64_t user_bytes;   /* of the parts put, before compression */
    uint64_t device_bytes; /* at the I/O door, with padding and batch records; without the index */
};
/* Device bytes that this handle has written since it was opened. */
uint64_t store_written(struct store *store);

struct store_stats {
    const char *door_name; /* "io_uring" or "posix": what is in force, not what was asked for */
    int direct;            /* O_DIRECT as read back from the open files' flags */
    char fallback[160];    /* why something weaker than wanted was chosen; "" when nothing was */
    char opened
        [STORE_NOTE_BYTES]; /* what store_open repaired, dropped or rebuilt; "" when nothing */
    uint64_t records;
    uint64_t live_bytes;    /* stored bytes of live extents, padded */
    uint64_t garbage_bytes; /* of dead extents and batch records */
    uint64_t segment_bytes; /* that the files take up to the tail: live + garbage, without holes */
    uint64_t index_bytes;
    uint64_t kept_bytes; /* of RESERVE, so that a full disk can be emptied */
    uint64_t bytes_max;
    uint64_t room_bytes; /* of it, for what is put; the reserve is not counted */
    uint64_t batches;    /* sequence number of the last committed batch */
    uint32_t segments;
    /* Since the store was made; blocks behind the last batch of another cause are forgotten. */
    struct store_written_sum written[STORE_CAUSES];
    int refuses_writes; /* after a failed sync or index commit, until reopened */
};

void store_stats_get(struct store *store, struct store_stats *out);

#endif
