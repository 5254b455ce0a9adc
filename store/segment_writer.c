/* store/segment_writer.c - appending to segments with many writes in flight.
 *
 * Responsible for: packing what is filled in into 1 MiB buffers, giving them to the door as soon as
 * they are full, and leaving nothing behind the tail that was not committed.
 * Not responsible for: what the bytes are.
 *
 * A failed write makes the writer fail until segment_rollback; a failed sync for ever, because the
 * kernel may then hold pages for clean that never reached the disk; and a stalled write (no answer
 * within the deadline) too, because it may still reach the disk at any later time.
 */
#include "store/segment.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* A batch goes on with the next segment while writes to the ones before are in flight. Each is cut
 * and synced when its last write has come back, beside writes to later ones. */
enum { ENDED_MAX = 16 };
struct ended {
    int file;
    uint32_t number;
    uint64_t bytes;
};

struct segment_writer {
    struct segment_writer_options options;
    uint8_t *staging;      /* buffer_count × SEGMENT_BUFFER_BYTES */
    uint32_t buffer_count; /* no more than a segment and the next one's beginning fill */
    struct io_queue *queue;
    uint8_t busy[SEGMENT_BUFFERS];     /* 1: in flight */
    uint32_t numbers[SEGMENT_BUFFERS]; /* of the segments that they go to */
    uint64_t sizes[SEGMENT_BUFFERS];
    int current; /* buffer being filled, -1 none */
    size_t current_bytes;
    uint64_t current_off; /* in the file, of its first byte */
    uint32_t in_flight;
    int file;                      /* of segment `at.segment`, -1 not open */
    struct ended ended[ENDED_MAX]; /* open, maybe with writes in flight; not cut or synced yet */
    uint32_t ended_count;
    int direct;
    uint64_t allocated_end;
    struct fmt_place at;        /* end of what was filled in */
    struct fmt_place committed; /* the tail */
    uint64_t reserved_end;
    uint64_t uncommitted_bytes;
    int names_dirty; /* seg/ has names that were not synced */
    int error;       /* errno of the first failed write */
    int stalled;
    int sync_failed; /* for ever */
    int left;        /* nothing is cut any more */
    int ends;        /* the next reservation begins a segment */
    char fallback[160];
    struct segment_counts counts;
};

static const struct io_door *door_of(const struct segment_writer *writer) {
    return writer->options.door;
}

enum kv_err segment_writer_make(const struct segment_writer_options *options,
                                struct segment_writer **out, struct kv_diag *diag) {
    struct segment_writer *writer = kv_alloc_zeroed(options->alloc, 1, sizeof *writer);
    if (writer == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the store's writer");
    *writer = (struct segment_writer){.options = *options,
                                      .current = -1,
                                      .file = -1,
                                      .direct = options->direct_wanted,
                                      .at = options->tail,
                                      .committed = options->tail};
    uint64_t useful = 1 + options->segment_bytes / SEGMENT_BUFFER_BYTES;
    uint32_t count = useful < SEGMENT_BUFFERS ? (uint32_t)useful : SEGMENT_BUFFERS;
    writer->buffer_count = count;
    writer->staging = kv_alloc_large(options->alloc, (size_t)count * SEGMENT_BUFFER_BYTES);
    if (writer->staging == NULL) {
        kv_alloc_release(options->alloc, writer);
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %u MiB of write buffers", count);
    }
    struct io_queue_options queue = {.depth = count,
                                     .buffers = writer->staging,
                                     .buffer_count = count,
                                     .buffer_bytes = SEGMENT_BUFFER_BYTES,
                                     .alloc = options->alloc};
    int error = options->door->queue_open(options->door->context, &queue, &writer->queue);
    if (error != 0) {
        kv_alloc_release(options->alloc, writer->staging);
        kv_alloc_release(options->alloc, writer);
        return kv_diag_errno(diag, error == ENOMEM ? KV_ERR_NOMEM : KV_ERR_IO, error,
                             "cannot open a queue for writing");
    }
    snprintf(writer->fallback, sizeof writer->fallback, "%s",
             options->door->queue_fallback(options->door->context, writer->queue));
    *out = writer;
    return KV_OK;
}

/* Waits until a write has ended, or for all of them. */
static void collect(struct segment_writer *writer, int all) {
    const struct io_door *door = door_of(writer);
    struct io_completion done[SEGMENT_BUFFERS];
    uint64_t begin_ns = kv_clock_now_ns(writer->options.clock);
    int want_more = writer->in_flight != 0;
    while (want_more && !writer->stalled) {
        uint32_t taken = 0;
        int error = door->wait(door->context, writer->queue, writer->options.deadline_ns, done,
                               SEGMENT_BUFFERS, &taken);
        if (error != 0) {
            writer->stalled = 1;
            writer->error = writer->error == 0 ? error : writer->error;
        }
        for (uint32_t i = 0; i < taken; i++) {
            size_t index = (size_t)done[i].tag;
            assert(index < writer->buffer_count && writer->busy[index]);
            int failed = done[i].error;
            if (failed == 0 && done[i].done_bytes != writer->sizes[index])
                failed = EIO;
            if (failed != 0 && writer->error == 0)
                writer->error = failed;
            writer->busy[index] = 0;
            writer->in_flight--;
        }
        want_more = all && writer->in_flight != 0;
    }
    writer->counts.wait_ns += kv_clock_now_ns(writer->options.clock) - begin_ns;
}

static enum kv_err check(const struct segment_writer *writer, struct kv_diag *diag) {
    return segment_error(diag, writer->error, "write", writer->at.segment);
}

/* Gives the current buffer to the door. */
static void launch(struct segment_writer *writer) {
    const struct io_door *door = door_of(writer);
    int index = writer->current;
    if (index < 0)
        return;
    assert(writer->current_bytes % STORE_PAGE_BYTES == 0);
    writer->current = -1;
    if (writer->error != 0)
        return;
    struct io_request request = {.file = writer->file,
                                 .write = 1,
                                 .buffer = index,
                                 .bytes = writer->staging + (size_t)index * SEGMENT_BUFFER_BYTES,
                                 .count = writer->current_bytes,
                                 .off = writer->current_off,
                                 .tag = (uint64_t)index};
    int error = door->submit(door->context, writer->queue, &request);
    if (error != 0) {
        writer->error = error;
        return;
    }
    writer->busy[index] = 1;
    writer->numbers[index] = writer->at.segment;
    writer->sizes[index] = request.count;
    writer->in_flight++;
    writer->counts.writes++;
    writer->counts.written_bytes += request.count;
    if (writer->in_flight > writer->counts.in_flight_max)
        writer->counts.in_flight_max = writer->in_flight;
}

/* A free buffer whose first byte will stand at the end of what was filled in. */
static enum kv_err take_buffer(struct segment_writer *writer, struct kv_diag *diag) {
    if (writer->in_flight == writer->buffer_count)
        collect(writer, 0);
    if (writer->error != 0)
        return check(writer, diag);
    int index = 0;
    while (writer->busy[index])
        index++;
    writer->current = index;
    writer->current_bytes = 0;
    writer->current_off = writer->at.off;
    return KV_OK;
}

static int open_file(struct segment_writer *writer) {
    const struct io_door *door = door_of(writer);
    char name[SEGMENT_NAME_BYTES];
    struct io_file_info info = {0};
    segment_name(writer->at.segment, name);
    int file = -1;
    int error = EINVAL;
    if (writer->options.direct_wanted)
        error = door->open(door->context, writer->options.dir, name,
                           IO_WRITE | IO_CREATE | IO_DIRECT, &file);
    if (error == EINVAL && writer->options.direct_wanted && writer->fallback[0] == 0)
        snprintf(writer->fallback, sizeof writer->fallback,
                 "O_DIRECT is refused by this file system: buffered files");
    if (error == EINVAL)
        error = door->open(door->context, writer->options.dir, name, IO_WRITE | IO_CREATE, &file);
    if (error != 0)
        return error;
    error = door->info(door->context, file, &info);
    /* What stands behind the tail was never acknowledged. */
    if (error == 0 && info.size_bytes > writer->at.off)
        error = door->truncate(door->context, file, writer->at.off);
    if (error != 0) {
        door->close(door->context, file);
        return error;
    }
    writer->file = file;
    writer->direct = info.is_direct;
#ifdef BREAK_DIRECT_FLAG
    writer->direct = writer->options.direct_wanted;
#endif
    writer->allocated_end = writer->at.off;
    writer->names_dirty |= writer->at.off == 0;
    /* Bytes that the index counts on are gone: nothing may be put in their place. */
    return info.size_bytes < writer->at.off ? ESPIPE : 0;
}

static int close_file(struct segment_writer *writer) {
    const struct io_door *door = door_of(writer);
    if (writer->file < 0)
        return 0;
    int error = door->truncate(door->context, writer->file, writer->at.off);
    int closed = door->close(door->context, writer->file);
    writer->file = -1;
    return error != 0 ? error : closed;
}

static int sync_file(struct segment_writer *writer, int file) {
    uint64_t begin_ns = kv_clock_now_ns(writer->options.clock);
    int error = 0;
#ifndef BREAK_SYNC
    if (file >= 0)
        error = door_of(writer)->sync(door_of(writer)->context, file);
#endif
    writer->counts.syncs += file >= 0;
    writer->counts.sync_ns += kv_clock_now_ns(writer->options.clock) - begin_ns;
    writer->sync_failed |= error != 0;
    return error;
}

/* Closes the first of the ended segments, cut and durable when `keep`; none of its writes is in
 * flight. */
static int close_first(struct segment_writer *writer, int keep) {
    const struct io_door *door = door_of(writer);
    const struct ended ended = writer->ended[0];
    int error = 0;
#ifndef BREAK_ENDED_SYNC
    if (keep) {
        error = door->truncate(door->context, ended.file, ended.bytes);
        if (error == 0)
            error = sync_file(writer, ended.file);
    }
#endif
    int closed = door->close(door->context, ended.file);
    writer->ended_count--;
    memmove(writer->ended, writer->ended + 1, writer->ended_count * sizeof writer->ended[0]);
    return error == 0 && keep ? closed : error;
}

/* All of them; after one that failed the others are only closed. */
static enum kv_err close_ended(struct segment_writer *writer, int keep, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    while (writer->ended_count > 0) {
        uint32_t number = writer->ended[0].number;
        int error = close_first(writer, keep && err == KV_OK);
        if (error != 0 && err == KV_OK) {
            writer->error = error;
            err = segment_error(diag, error, "end", number);
        }
    }
    return err;
}

static int has_writes(const struct segment_writer *writer, uint32_t number) {
    int has = 0;
    for (uint32_t i = 0; i < writer->buffer_count; i++)
        has |= writer->busy[i] && writer->numbers[i] == number;
    return has;
}

/* Called when as much as possible is in flight, for the disk to go on with meanwhile. */
static enum kv_err close_written(struct segment_writer *writer, struct kv_diag *diag) {
#ifdef BREAK_ENDED_BESIDE
    return KV_OK;
#endif
    if (writer->ended_count == 0 || writer->error != 0 ||
        has_writes(writer, writer->ended[0].number))
        return KV_OK;
    uint32_t number = writer->ended[0].number;
    writer->error = close_first(writer, 1);
    return segment_error(diag, writer->error, "end", number);
}

/* Ends the open segment for good and goes to the start of the next. */
static enum kv_err next_segment(struct segment_writer *writer, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    if (writer->at.segment >= SEGMENT_NUMBER_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "the store has used up all segment numbers");
    launch(writer);
    if (writer->ended_count == ENDED_MAX) {
        collect(writer, 1);
        err = check(writer, diag);
        if (err == KV_OK)
            err = close_ended(writer, 1, diag);
    }
    if (err == KV_OK)
        err = check(writer, diag);
    if (err != KV_OK)
        return err;
    if (writer->file >= 0)
        writer->ended[writer->ended_count++] =
            (struct ended){writer->file, writer->at.segment, writer->at.off};
    writer->file = -1;
    writer->at = (struct fmt_place){writer->at.segment + 1, 0};
    return KV_OK;
}

/* A whole segment ahead only where it takes at most half of what the disk has left: the index lives
 * there too. */
static uint64_t ahead(const struct segment_writer *writer, uint64_t need_end, uint64_t room_bytes) {
    const struct io_door *door = door_of(writer);
    uint64_t want = writer->options.segment_bytes;
    uint64_t left = 0;
    if (room_bytes < want && writer->at.off + room_bytes < want)
        want = writer->at.off + room_bytes;
    want = want & ~(uint64_t)(STORE_PAGE_BYTES - 1);
    if (want > need_end && door->free_space(door->context, writer->file, &left) == 0 &&
        want - writer->at.off > left / 2)
        want = need_end;
    return want > need_end ? want : need_end;
}

static int preallocate(struct segment_writer *writer, uint64_t need_end, uint64_t room_bytes) {
    const struct io_door *door = door_of(writer);
    if (need_end <= writer->allocated_end)
        return 0;
    uint64_t want = ahead(writer, need_end, room_bytes);
    int error = door->allocate(door->context, writer->file, want);
    if ((error == ENOSPC || error == EDQUOT || error == EFBIG) && want > need_end) {
        /* What a failed allocation has got is given back first. */
        want = need_end;
        error = door->truncate(door->context, writer->file, writer->at.off);
        if (error == 0)
            error = door->allocate(door->context, writer->file, want);
    }
    if (error == EOPNOTSUPP || error == ENOSYS) {
        want = UINT64_MAX; /* written without */
        error = 0;
    }
    if (error == 0)
        writer->allocated_end = want;
    return error;
}

/* A file that is shorter than the index says has lost bytes: nothing may be put in their place, so
 * the next segment begins. */
static int open_tail(struct segment_writer *writer) {
    int error = open_file(writer);
    if (error != ESPIPE)
        return error;
    door_of(writer)->close(door_of(writer)->context, writer->file);
    writer->file = -1;
    writer->at = (struct fmt_place){writer->at.segment + 1, 0};
    writer->committed = writer->at;
    return open_file(writer);
}

enum kv_err segment_probe(struct segment_writer *writer, int *direct_out, struct kv_diag *diag) {
    int error = writer->file >= 0 ? 0 : open_tail(writer);
    *direct_out = writer->direct;
    return segment_error(diag, error, "open for writing", writer->at.segment);
}

void segment_end(struct segment_writer *writer) {
    writer->ends = 1;
}

enum kv_err segment_reserve(struct segment_writer *writer, uint64_t bytes, uint64_t room_bytes,
                            struct fmt_place *out, struct kv_diag *diag) {
    uint64_t padded = kv_round_up(bytes, STORE_PAGE_BYTES);
    enum kv_err err = check(writer, diag);
    if (err == KV_OK && writer->at.off != 0 &&
        (writer->ends || writer->at.off + padded > writer->options.segment_bytes))
        err = next_segment(writer, diag);
    writer->ends = 0;
    if (err != KV_OK)
        return err;
    int error = writer->file >= 0 ? 0 : open_tail(writer);
    if (error == 0)
        error = preallocate(writer, writer->at.off + padded, room_bytes);
    if (error != 0) {
        writer->error = error;
        return segment_error(diag, error, "extend", writer->at.segment);
    }
    writer->reserved_end = writer->at.off + padded;
    *out = writer->at;
    return KV_OK;
}

enum kv_err segment_fill(struct segment_writer *writer, const void *bytes, size_t count,
                         struct kv_diag *diag) {
    const uint8_t *from = bytes;
    assert(writer->at.off + count <= writer->reserved_end);
    while (count != 0) {
        if (writer->current < 0) {
            enum kv_err err = take_buffer(writer, diag);
            if (err != KV_OK)
                return err;
        }
        size_t room = SEGMENT_BUFFER_BYTES - writer->current_bytes;
        size_t take = count < room ? count : room;
        uint8_t *to = writer->staging + (size_t)writer->current * SEGMENT_BUFFER_BYTES;
        if (from != NULL) {
            memcpy(to + writer->current_bytes, from, take);
            from += take;
        } else {
            memset(to + writer->current_bytes, 0, take);
        }
        writer->current_bytes += take;
        writer->at.off += take;
        writer->uncommitted_bytes += take;
        count -= take;
        if (writer->current_bytes == SEGMENT_BUFFER_BYTES) {
            launch(writer);
            enum kv_err err = close_written(writer, diag);
            if (err != KV_OK)
                return err;
        }
    }
    return check(writer, diag);
}

enum kv_err segment_pad(struct segment_writer *writer, struct kv_diag *diag) {
    size_t over = (size_t)(writer->at.off % STORE_PAGE_BYTES);
    return over == 0 ? check(writer, diag)
                     : segment_fill(writer, NULL, STORE_PAGE_BYTES - over, diag);
}

enum kv_err segment_flush(struct segment_writer *writer, struct kv_diag *diag) {
    launch(writer);
    collect(writer, 1);
    return check(writer, diag);
}

enum kv_err segment_sync(struct segment_writer *writer, struct kv_diag *diag) {
    const struct io_door *door = door_of(writer);
    enum kv_err err = segment_flush(writer, diag);
    if (err != KV_OK)
        return err;
    err = close_ended(writer, 1, diag);
    if (err != KV_OK)
        return err;
    int error = sync_file(writer, writer->file);
    if (error == 0 && writer->names_dirty) {
        uint64_t begin_ns = kv_clock_now_ns(writer->options.clock);
#ifndef BREAK_SYNC_NAMES
        error = door->sync(door->context, writer->options.dir);
#endif
        writer->counts.sync_ns += kv_clock_now_ns(writer->options.clock) - begin_ns;
        writer->names_dirty = error != 0;
        writer->sync_failed |= error != 0;
    }
    return segment_error(diag, error, "sync", writer->at.segment);
}

void segment_commit(struct segment_writer *writer) {
    assert(writer->current < 0 && writer->in_flight == 0 && writer->error == 0);
    assert(writer->ended_count == 0);
    writer->committed = writer->at;
    writer->uncommitted_bytes = 0;
}

/* Removes the files of segments behind the committed one. */
static int remove_later(struct segment_writer *writer) {
    const struct io_door *door = door_of(writer);
    int error = 0;
    for (uint32_t number = writer->at.segment; number > writer->committed.segment; number--) {
        char name[SEGMENT_NAME_BYTES];
        segment_name(number, name);
        int failed = door->remove(door->context, writer->options.dir, name);
        if (failed != 0 && failed != ENOENT)
            error = failed;
    }
    return error;
}

void segment_leave(struct segment_writer *writer) {
#ifndef BREAK_HALF_KNOWN
    writer->left = 1;
#endif
}

enum kv_err segment_rollback(struct segment_writer *writer, struct kv_diag *diag) {
    writer->current = -1;
    collect(writer, 1);
    if (writer->stalled)
        return check(writer, diag);
    int error = 0;
    (void)close_ended(writer, 0, NULL);
    if (writer->at.segment != writer->committed.segment) {
        if (writer->file >= 0)
            door_of(writer)->close(door_of(writer)->context, writer->file);
        writer->file = -1;
        error = remove_later(writer);
        writer->names_dirty = 1;
        writer->at = writer->committed;
        if (error == 0)
            error = open_tail(writer);
    } else if (writer->file >= 0) {
        writer->at = writer->committed;
        error = door_of(writer)->truncate(door_of(writer)->context, writer->file, writer->at.off);
        writer->allocated_end = writer->at.off;
    }
    writer->uncommitted_bytes = 0;
    if (error == 0 && writer->sync_failed)
        error = EIO;
    writer->error = error;
    return segment_error(diag, error, "cut back", writer->committed.segment);
}

int segment_writer_drop(struct segment_writer *writer) {
    if (writer == NULL)
        return 1;
    const struct io_door *door = door_of(writer);
    const struct kv_alloc *alloc = writer->options.alloc;
    int quiet = !writer->stalled;
    /* A write that has come back in the meantime does no more harm. */
    if (door->queue_close(door->context, writer->queue, quiet ? writer->options.deadline_ns : 0) !=
        0)
        return 0;
    (void)close_ended(writer, 0, NULL);
    if (writer->file >= 0 && writer->left)
        door->close(door->context, writer->file);
    else if (writer->file >= 0) {
        writer->at = writer->committed;
        close_file(writer);
    }
    kv_alloc_release(alloc, writer->staging);
    kv_alloc_release(alloc, writer);
    return 1;
}

struct fmt_place segment_tail(const struct segment_writer *writer) {
    return writer->at;
}

uint64_t segment_uncommitted_bytes(const struct segment_writer *writer) {
    return writer->uncommitted_bytes;
}

struct segment_counts segment_take_counts(struct segment_writer *writer) {
    struct segment_counts counts = writer->counts;
    writer->counts = (struct segment_counts){0};
    return counts;
}

int segment_is_direct(const struct segment_writer *writer) {
    return writer->direct;
}

const char *segment_door_name(const struct segment_writer *writer) {
    return door_of(writer)->queue_name(door_of(writer)->context, writer->queue);
}

const char *segment_fallback(const struct segment_writer *writer) {
    return writer->fallback;
}
