/* store/store_inner.h - what the files of the store share: the handle itself.
 *
 * Responsible for: struct store and the few calls between store_open.c, store_batch.c,
 * store_read.c, recover.c and rebuild.c.
 * Not responsible for: anything outside store/.
 *
 * Threads: fields above `lock` are set at open and then constant; those below it are guarded by
 * it, except `writer` and what follows it, which belong to the thread that has the batch. `lock`
 * is never held across I/O.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_INNER_H
#define STORE_STORE_INNER_H

#include "store/codec.h"
#include "store/fmt.h"
#include "store/index.h"
#include "store/segment.h"
#include "store/store.h"
#include "store/store_batch.h"
#include "store/store_read.h"

#include <pthread.h>

enum { STORE_INNER_READERS_IDLE = 4 };

struct reader; /* store_read.c: a queue with its staging */
struct store_ram;

struct store_batch {
    struct store *store;
    int open;
    enum kv_err err; /* of the first failed call: commit returns it */
    struct kv_diag diag;
    uint8_t *record; /* room for the head, then the operations; kept from batch to batch */
    size_t record_capacity;
    size_t record_bytes;
    uint32_t op_count;
    uint64_t extent_id_first;
    uint64_t extent_id_next;
    struct fmt_place begin;
    struct store_commit_stats stats;
    enum store_cause cause;
    uint64_t spare; /* of the byte budget, that this batch must leave */
    int removes;    /* it takes no more of the disk than it needs */
    uint8_t extents[STORE_EXTENTS_MAX * FMT_EXTENT_BYTES]; /* of the record being put */
};

struct store {
    struct store_options options; /* dir is not kept */
    uint8_t id[FMT_ID_BYTES];
    int dir;
    int seg_dir;
    int lock_file;        /* -1 when read-only */
    int counts_no_blocks; /* the file system does not say what a file takes: its size counts */
    struct index *index;
    struct store_ram *ram; /* NULL: nothing is kept in memory; it has a lock of its own */

    pthread_mutex_t lock;
    struct fmt_state state;
    uint64_t segment_bytes; /* that all files take up to the tail: without holes */
    uint32_t segment_count;
    int refuses_writes;
    int direct;
    const char *door_name;
    char fallback[160];
    char opened[STORE_NOTE_BYTES];
    struct reader *idle[STORE_INNER_READERS_IDLE];
    uint32_t idle_count;
    struct reader *lost; /* with reads that never came back */
    struct store_written_sum written[STORE_CAUSES];
    uint64_t written_bytes; /* since the store was opened */
    uint32_t hold_count;    /* store_hold: segments must stay */

    struct segment_writer *writer; /* NULL when read-only */
    struct codec *codec;
    struct store_batch batch;
    int reserve_file; /* -1: none; store_reserve.h */
    int reserve_taken;
};

/* store_open.c */
/* Appends a sentence to what store_stats shows as `opened`. */
void store_inner_note(struct store *store, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* What a segment takes of the disk, of its first `end` bytes. */
uint64_t store_inner_taken(const struct store *store, const struct io_file_info *info,
                           uint64_t end);

/* recover.c */
struct recover_list { /* batch records found on disk, unsorted */
    struct fmt_batch *items;
    size_t count;
    size_t capacity;
    int any_store; /* 1: also those of other stores */
};
/* The segments that are there, ascending, into *numbers_out (released by the caller). */
enum kv_err recover_segments(struct store *store, uint32_t **numbers_out, size_t *count_out,
                             struct kv_diag *diag);
/* Adds every batch record of this store in one segment from an offset on; *nonzero_end_out is the
 * end of the last page that is not all zeros. */
enum kv_err recover_scan(struct store *store, struct fmt_place from, struct recover_list *list,
                         uint64_t *nonzero_end_out, struct kv_diag *diag);
/* The store id that every batch record in the segments names. CORRUPT: none does, or two ids. */
enum kv_err recover_id(struct store *store, uint8_t id_out[FMT_ID_BYTES], struct kv_diag *diag);
/* The same up to an offset, a multiple of a page. */
struct recover_range {
    struct fmt_place from;
    uint64_t end;
};
enum kv_err recover_scan_range(struct store *store, const struct recover_range *range,
                               struct recover_list *list, uint64_t *nonzero_end_out,
                               struct kv_diag *diag);
/* Reads a whole batch record into *record_out (released by the caller). */
enum kv_err recover_load(struct store *store, const struct fmt_batch *batch, uint8_t **record_out,
                         struct kv_digest *digest_out, struct kv_diag *diag);
/* CORRUPT when what fills the record's last page is not zero: a sign of damage nearby, nothing is
 * believed from it. */
enum kv_err recover_padding(struct store *store, const struct fmt_batch *batch,
                            struct kv_diag *diag);
/* Reads and digests every extent that the batch wrote. */
enum kv_err recover_verify(struct store *store, const struct fmt_batch *batch,
                           const uint8_t *record, struct kv_diag *diag);
/* Applies a loaded batch to an index and brings *state up to date. */
enum kv_err recover_apply(struct index *index, const struct fmt_batch *batch, const uint8_t *record,
                          struct fmt_state *state, struct kv_diag *diag);
/* Index there: takes over complete batches behind the tail, cuts off the rest. */
enum kv_err recover_forward(struct store *store, struct kv_diag *diag);

/* rebuild.c: makes index/ anew from the segments; the caller holds the lock and has index closed.
 */
enum kv_err rebuild_index(struct store *store, const char *dir_path, struct kv_diag *diag);

/* store_batch.c: what counts against the byte budget, without options.reserve_bytes. */
uint64_t store_inner_used(struct store *store);
/* For what gives space back: the batch may use options.reserve_bytes. */
enum kv_err store_inner_begin_reserve(struct store *store, struct store_batch **out,
                                      struct kv_diag *diag);
/* Appends bytes as an extent is stored; the caller takes its id and puts the entry. */
enum kv_err store_inner_put_bytes(struct store_batch *batch, const void *bytes, size_t count,
                                  struct fmt_place *place_out, struct kv_diag *diag);
enum kv_err store_inner_put_entry(struct store_batch *batch, const void *key, size_t key_bytes,
                                  const struct fmt_entry *entry, struct kv_diag *diag);

/* store_read.c */
/* Reads and digests the extents of an entry whose id is at least `id_min`. */
struct store_read_entry_args {
    const void *key;
    size_t key_bytes;
    const struct fmt_entry *entry;
    uint64_t id_min;
};
enum kv_err store_read_entry(struct store *store, const struct store_read_entry_args *args,
                             struct store_read_stats *stats, struct kv_diag *diag);
void store_read_release_all(struct store *store); /* idle and lost readers, at close */

#endif
