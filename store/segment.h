/* store/segment.h - append-only segment files.
 *
 * Responsible for: names, the writer (staging buffers, several writes in flight, preallocation,
 * sync, cutting back) and opening a segment for reading.
 * Not responsible for: what is appended, the byte budget, when to commit (store_batch.c).
 *
 * Threads: a writer has one owner thread; segment_open_read from any.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_SEGMENT_H
#define STORE_SEGMENT_H

#include "store/base/alloc.h"
#include "store/base/clock.h"
#include "store/base/diag.h"
#include "store/fmt.h"
#include "store/io.h"

enum {
    SEGMENT_NAME_BYTES = 16,
    SEGMENT_BUFFER_BYTES = 1 << 20,
    SEGMENT_BUFFERS = 16,
    SEGMENT_NUMBER_MAX = 99999999
};

/* "00000001.seg". */
void segment_name(uint32_t number, char name_out[SEGMENT_NAME_BYTES]);
/* 0 when the name is not that of a segment. */
uint32_t segment_number(const char *name);

/* Translates an errno of the door with the sentence "WHAT: reason". */
enum kv_err segment_error(struct kv_diag *diag, int error, const char *what, uint32_t number);

/* Direct where wanted and possible; *direct_out is read back from the file.
 * KV_ERR_CORRUPT missing, or a symbolic link; KV_ERR_IO. */
struct segment_open_args {
    const struct io_door *door;
    int dir; /* seg/ */
    uint32_t number;
    int direct_wanted;
};
enum kv_err segment_open_read(const struct segment_open_args *args, int *file_out, int *direct_out,
                              struct kv_diag *diag);

struct segment_counts {
    uint64_t writes;
    uint64_t written_bytes;
    uint64_t in_flight_max;
    uint64_t wait_ns;
    uint64_t sync_ns;
    uint64_t syncs; /* of segments */
};

struct segment_writer; /* owns its staging, queue and open file */

struct segment_writer_options {
    const struct io_door *door;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    int dir;
    int direct_wanted;
    uint64_t segment_bytes;
    uint64_t deadline_ns;
    struct fmt_place tail; /* files behind it are gone already */
};

/* KV_ERR_NOMEM, KV_ERR_IO. */
enum kv_err segment_writer_make(const struct segment_writer_options *options,
                                struct segment_writer **out, struct kv_diag *diag);
/* Opens the file at the tail, so that what it is can be told. KV_ERR_IO, KV_ERR_NO_SPACE. */
enum kv_err segment_probe(struct segment_writer *writer, int *direct_out, struct kv_diag *diag);
/* Cuts the open file at the tail. Returns 0 when a stalled write may still be in the kernel: then
 * its memory is left alone and the store's lock must stay held. NULL is allowed. */
int segment_writer_drop(struct segment_writer *writer);

/* Where the next `bytes` (rounded up to pages) go; all of them must then be filled in. `room_bytes`
 * bounds preallocation: how far the files may grow. KV_ERR_NO_SPACE, KV_ERR_IO, KV_ERR_LIMIT. */
enum kv_err segment_reserve(struct segment_writer *writer, uint64_t bytes, uint64_t room_bytes,
                            struct fmt_place *out, struct kv_diag *diag);
/* Copies bytes behind what was filled in before; may wait for a buffer. KV_ERR_NO_SPACE,
 * KV_ERR_IO. */
enum kv_err segment_fill(struct segment_writer *writer, const void *bytes, size_t count,
                         struct kv_diag *diag);
/* Zeros up to the next page. Codes as segment_fill. */
enum kv_err segment_pad(struct segment_writer *writer, struct kv_diag *diag);
/* All written, none in flight; not yet durable. */
enum kv_err segment_flush(struct segment_writer *writer, struct kv_diag *diag);
/* All durable, new files' names too. A failure here cannot be repeated: KV_ERR_IO,
 * KV_ERR_NO_SPACE. */
enum kv_err segment_sync(struct segment_writer *writer, struct kv_diag *diag);
/* What comes next begins a segment of its own. */
void segment_end(struct segment_writer *writer);
/* What was appended stays. */
void segment_commit(struct segment_writer *writer);
/* Back to the last commit. KV_ERR_IO: something is left behind the tail, or a sync has failed
 * before: the writer is of no more use. */
enum kv_err segment_rollback(struct segment_writer *writer, struct kv_diag *diag);
/* Nobody knows whether what was appended is committed: closing leaves it, the next open decides. */
void segment_leave(struct segment_writer *writer);

struct fmt_place segment_tail(const struct segment_writer *writer);
uint64_t segment_uncommitted_bytes(const struct segment_writer *writer);
struct segment_counts segment_take_counts(struct segment_writer *writer); /* and sets them to 0 */
/* In force: of the open file, else of the last one. */
int segment_is_direct(const struct segment_writer *writer);
const char *segment_door_name(const struct segment_writer *writer);
const char *segment_fallback(const struct segment_writer *writer); /* "" or why */

#endif
