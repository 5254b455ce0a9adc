/* store/reader.h - what one call of store_read reads with: a queue, its memory, files, codecs.
 *
 * Responsible for: making them, keeping idle ones with the store, putting those aside whose reads
 * never came back.
 * Not responsible for: reading (store_read.c).
 *
 * Threads: one owner between take and give; these two from any.
 * Units: bytes.
 */
#ifndef STORE_READER_H
#define STORE_READER_H

#include "store/codec.h"
#include "store/io.h"
#include "store/read_help.h"
#include "store/store.h"

enum {
    /* Pieces of the staging, which is 8 MiB in all (store_read.c says why); a request in flight
     * has some that lie side by side. */
    READER_STAGING_COUNT = IO_DEPTH_MAX,
    READER_STAGING_BYTES = 1 << 17,
    READER_FILES_MAX = 128,  /* segments open at once */
    READER_PACKED_MAX = 128, /* compressed extents that are held at once */
    READER_CODECS_MAX = READ_HELP_THREADS_MAX + 1
};

struct reader {
    struct reader *next_lost;
    struct io_queue *queue;
    uint8_t *staging;      /* registered with the queue, as one buffer */
    uint64_t staging_busy; /* a bit for each piece */
    /* Segments that are open; a lost reader keeps them as long as its queue. */
    uint32_t numbers[READER_FILES_MAX];
    int files[READER_FILES_MAX];
    uint32_t file_count;
    /* Compressed extents lie here from their first read to their unzipping. */
    uint8_t *packed;
    size_t packed_bytes;
    struct {
        size_t off, bytes; /* bytes 0: unused */
    } ranges[READER_PACKED_MAX];
    int direct;                              /* since it was taken */
    struct codec *codecs[READER_CODECS_MAX]; /* of the reading thread and of its helpers */
};

/* NOMEM, IO. */
enum kv_err reader_take(struct store *store, struct reader **out, struct kv_diag *diag);
/* `stalled`: reads are in flight that may never come back; it is closed with the store. */
void reader_give(struct store *store, struct reader *reader, int stalled);

/* The first `count` codecs, ready for frames of so many raw bytes that are shuffled, and that go
 * to several places; see codec_prepare. NOMEM. */
enum kv_err reader_codecs(struct store *store, struct reader *reader, uint32_t count,
                          size_t shuffled, size_t apart);
/* A place in the staging for a request of up to so much, the first free one, so that what was used
 * last is used again; NULL: there is none now. */
uint8_t *reader_staging_get(struct reader *reader, size_t count);
/* NULL is allowed. */
void reader_staging_put(struct reader *reader, const uint8_t *at, size_t count);

/* Room for `bytes` of compressed extents; it only grows, while nothing is held. NOMEM. */
enum kv_err reader_packed(struct store *store, struct reader *reader, size_t bytes);
/* A multiple of a page from it; NULL: no gap is large enough. */
uint8_t *reader_packed_get(struct reader *reader, size_t bytes);
void reader_packed_put(struct reader *reader, const uint8_t *at); /* NULL is allowed */
/* Looks up or opens a segment. */
enum kv_err reader_file(struct store *store, struct reader *reader, uint32_t segment, int *file_out,
                        struct kv_diag *diag);
void reader_close_files(struct store *store, struct reader *reader);

#endif
