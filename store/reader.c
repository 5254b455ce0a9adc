/* store/reader.c - what one call of store_read reads with.
 *
 * Responsible for: what reader.h says.
 * Not responsible for: reading (store_read.c).
 */
#include "store/reader.h"

#include "store/read_help.h"
#include "store/segment.h"
#include "store/store_inner.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

void reader_close_files(struct store *store, struct reader *reader) {
    const struct io_door *door = store->options.door;
    while (reader->file_count != 0)
        door->close(door->context, reader->files[--reader->file_count]);
}

static void reader_drop(struct store *store, struct reader *reader, uint64_t timeout_ns) {
    const struct io_door *door = store->options.door;
    if (reader == NULL)
        return;
    /* While the kernel may still write into the staging it cannot be given back; nor can a file be
     * closed: what is still to be read by its number would be read from whatever gets that next. */
    if (reader->queue != NULL && door->queue_close(door->context, reader->queue, timeout_ns) != 0)
        return;
    reader_close_files(store, reader);
    for (uint32_t i = 0; i < READER_CODECS_MAX; i++)
        codec_drop(reader->codecs[i]);
    kv_alloc_release(store->options.alloc, reader->packed);
    kv_alloc_release(store->options.alloc, reader->staging);
    kv_alloc_release(store->options.alloc, reader);
}

static enum kv_err reader_make(struct store *store, struct reader **out, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    const struct kv_alloc *alloc = store->options.alloc;
    enum kv_err err = KV_OK;
    struct reader *reader = kv_alloc_zeroed(alloc, 1, sizeof *reader);
    if (reader == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a reader");
    reader->staging = kv_alloc_large(alloc, (size_t)READER_STAGING_COUNT * READER_STAGING_BYTES);
    if (reader->staging == NULL || codec_make(alloc, &reader->codecs[0]) != KV_OK)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a reader"));
    struct io_queue_options options = {.depth = IO_DEPTH_MAX,
                                       .buffers = reader->staging,
                                       .buffer_count = 1,
                                       .buffer_bytes =
                                           (size_t)READER_STAGING_COUNT * READER_STAGING_BYTES,
                                       .alloc = alloc};
    int error = door->queue_open(door->context, &options, &reader->queue);
    if (error != 0)
        KV_TRY(kv_diag_errno(diag, error == ENOMEM ? KV_ERR_NOMEM : KV_ERR_IO, error,
                             "cannot open a queue for reading"));
    reader->direct = 1;
    *out = reader;
    reader = NULL;
done:
    reader_drop(store, reader, 0);
    return err;
}

enum kv_err reader_take(struct store *store, struct reader **out, struct kv_diag *diag) {
    struct reader *reader = NULL;
    pthread_mutex_lock(&store->lock);
    if (store->idle_count != 0)
        reader = store->idle[--store->idle_count];
    pthread_mutex_unlock(&store->lock);
    if (reader == NULL)
        return reader_make(store, out, diag);
    reader->direct = 1;
    *out = reader;
    return KV_OK;
}

void reader_give(struct store *store, struct reader *reader, int stalled) {
    pthread_mutex_lock(&store->lock);
    if (stalled) {
        reader->next_lost = store->lost;
        store->lost = reader;
        reader = NULL;
    } else if (store->idle_count < STORE_INNER_READERS_IDLE) {
        store->idle[store->idle_count++] = reader;
        reader = NULL;
    }
    pthread_mutex_unlock(&store->lock);
    reader_drop(store, reader, store->options.deadline_ns);
}

void store_read_release_all(struct store *store) {
    while (store->idle_count != 0)
        reader_drop(store, store->idle[--store->idle_count], store->options.deadline_ns);
    while (store->lost != NULL) {
        struct reader *reader = store->lost;
        store->lost = reader->next_lost;
        reader_drop(store, reader, store->options.deadline_ns);
    }
}

enum kv_err reader_codecs(struct store *store, struct reader *reader, uint32_t count,
                          size_t shuffled, size_t apart) {
    enum kv_err err = KV_OK;
    assert(count <= READER_CODECS_MAX);
    for (uint32_t i = 0; i < count && err == KV_OK; i++) {
        if (reader->codecs[i] == NULL)
            err = codec_make(store->options.alloc, &reader->codecs[i]);
        if (err == KV_OK)
            err = codec_prepare(reader->codecs[i], shuffled, apart);
    }
    return err;
}

/* The pieces that `count` bytes from piece `first` on lie in. */
static uint64_t pieces_of(uint32_t first, size_t count) {
    uint32_t pieces = (uint32_t)((count + READER_STAGING_BYTES - 1) / READER_STAGING_BYTES);
    assert(first + pieces <= READER_STAGING_COUNT && pieces < 64);
    return (((uint64_t)1 << pieces) - 1) << first;
}

uint8_t *reader_staging_get(struct reader *reader, size_t count) {
    const size_t all = (size_t)READER_STAGING_COUNT * READER_STAGING_BYTES;
    for (size_t off = 0; off + count <= all; off += READER_STAGING_BYTES) {
        uint64_t pieces = pieces_of((uint32_t)(off / READER_STAGING_BYTES), count);
        if ((reader->staging_busy & pieces) != 0)
            continue;
#ifndef BREAK_STAGING
        reader->staging_busy |= pieces;
#endif
        return reader->staging + off;
    }
    return NULL;
}

void reader_staging_put(struct reader *reader, const uint8_t *at, size_t count) {
    if (at == NULL)
        return;
    size_t first = (size_t)(at - reader->staging) / READER_STAGING_BYTES;
    reader->staging_busy &= ~pieces_of((uint32_t)first, count);
}

enum kv_err reader_packed(struct store *store, struct reader *reader, size_t bytes) {
    const struct kv_alloc *alloc = store->options.alloc;
#ifdef BREAK_PACKED_ROOM
    bytes = (size_t)64 << 20;
#endif
    if (bytes <= reader->packed_bytes)
        return KV_OK;
    kv_alloc_release(alloc, reader->packed);
    reader->packed = kv_alloc_large(alloc, bytes);
    reader->packed_bytes = reader->packed != NULL ? bytes : 0;
#ifdef BREAK_PACKED_ROOM
    memset(reader->packed, 1, bytes);
#endif
    return reader->packed != NULL ? KV_OK : KV_ERR_NOMEM;
}

static int packed_is_free(const struct reader *reader, size_t off, size_t bytes) {
    if (bytes > reader->packed_bytes || off > reader->packed_bytes - bytes)
        return 0;
    for (uint32_t i = 0; i < READER_PACKED_MAX; i++)
        if (reader->ranges[i].bytes != 0 && off < reader->ranges[i].off + reader->ranges[i].bytes &&
            reader->ranges[i].off < off + bytes)
            return 0;
    return 1;
}

/* The first gap: there are few ranges, and each is as long as many pages. */
uint8_t *reader_packed_get(struct reader *reader, size_t bytes) {
    size_t best = SIZE_MAX;
    uint32_t unused = READER_PACKED_MAX;
    if (packed_is_free(reader, 0, bytes))
        best = 0;
    for (uint32_t i = 0; i < READER_PACKED_MAX; i++) {
        size_t off = reader->ranges[i].off + reader->ranges[i].bytes;
        if (reader->ranges[i].bytes == 0)
            unused = i;
        else if (off < best && packed_is_free(reader, off, bytes))
            best = off;
    }
    if (best == SIZE_MAX || unused == READER_PACKED_MAX)
        return NULL;
    reader->ranges[unused].off = best;
    reader->ranges[unused].bytes = bytes;
    return reader->packed + best;
}

void reader_packed_put(struct reader *reader, const uint8_t *at) {
    for (uint32_t i = 0; i < READER_PACKED_MAX && at != NULL; i++)
        if (reader->ranges[i].bytes != 0 && at == reader->packed + reader->ranges[i].off)
            reader->ranges[i].bytes = 0;
}

enum kv_err reader_file(struct store *store, struct reader *reader, uint32_t segment, int *file_out,
                        struct kv_diag *diag) {
    for (uint32_t i = reader->file_count; i-- > 0;) {
        if (reader->numbers[i] == segment) {
            *file_out = reader->files[i];
            return KV_OK;
        }
    }
    assert(reader->file_count < READER_FILES_MAX);
    struct segment_open_args args = {store->options.door, store->seg_dir, segment,
                                     store->options.direct_wanted};
    int direct = 0;
    enum kv_err err = segment_open_read(&args, file_out, &direct, diag);
    if (err != KV_OK)
        return err;
    reader->direct &= direct;
    reader->numbers[reader->file_count] = segment;
    reader->files[reader->file_count++] = *file_out;
    return KV_OK;
}
