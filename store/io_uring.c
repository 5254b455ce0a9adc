/* store/io_uring.c - the door with io_uring queues.
 *
 * Responsible for: rings with registered buffers, continued partial transfers, deadlines, and
 * giving the POSIX queue with a reason where the kernel refuses a ring.
 * Not responsible for: file calls (io_files.c). Files are not registered: a request moves up to 1
 * MiB, beside which the saved look-up is nothing, and a descriptor number that is closed and used
 * again would go on meaning the old file.
 */
#include "store/io.h"

#include "store/base/alloc.h"
#include "store/base/clock.h"
#include "store/io_files.h"

#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <string.h>

/* Marks a ring entry that could not be submitted and was taken back. */
#define NOBODY UINT64_MAX

struct flight {
    int used;
    uint64_t done_bytes;
    struct io_request request;
};

struct ring_queue {
    struct io_queue base;
    const struct kv_alloc *alloc;
    struct io_queue *posix; /* set: everything goes there and the rest is unused */
    struct io_uring ring;
    uint32_t buffer_count; /* registered */
    uint32_t depth;
    uint32_t in_flight;
    struct flight flights[IO_DEPTH_MAX];
};

static struct ring_queue *inner(struct io_queue *queue) {
    return (struct ring_queue *)(void *)queue;
}

static const struct ring_queue *inner_const(const struct io_queue *queue) {
    return (const struct ring_queue *)(const void *)queue;
}

static void register_buffers(struct ring_queue *queue, const struct io_queue_options *options) {
    struct iovec buffers[IO_BUFFERS_MAX];
    uint32_t count = options->buffer_count;
    assert(count <= IO_BUFFERS_MAX);
    for (uint32_t i = 0; i < count; i++)
        buffers[i] = (struct iovec){(char *)options->buffers + i * options->buffer_bytes,
                                    options->buffer_bytes};
    int error = count == 0 ? 0 : -io_uring_register_buffers(&queue->ring, buffers, count);
    queue->buffer_count = error == 0 ? count : 0;
    if (error != 0) {
        char text[64] = "";
        snprintf(queue->base.fallback, sizeof queue->base.fallback,
                 "buffers are not registered with io_uring (%s): raise the memlock limit",
                 strerror_r(error, text, sizeof text));
    }
}

static int queue_open(void *context, const struct io_queue_options *options,
                      struct io_queue **out) {
    (void)context;
    assert(options->depth >= 1 && options->depth <= IO_DEPTH_MAX);
    struct ring_queue *queue = kv_alloc_zeroed(options->alloc, 1, sizeof *queue);
    if (queue == NULL)
        return ENOMEM;
    queue->alloc = options->alloc;
    queue->depth = options->depth;
    int error = -io_uring_queue_init(IO_DEPTH_MAX, &queue->ring, 0);
    if (error == 0 && (queue->ring.features & IORING_FEAT_EXT_ARG) == 0) {
        io_uring_queue_exit(&queue->ring);
        error = ENOSYS; /* before 5.11 a wait with a deadline would use up a request */
    }
    if (error == 0) {
        register_buffers(queue, options);
    } else {
        char text[64] = "";
        snprintf(queue->base.fallback, sizeof queue->base.fallback,
                 "io_uring is refused here (%s): using POSIX calls",
                 strerror_r(error, text, sizeof text));
        const struct io_door *posix = io_posix_door();
        error = posix->queue_open(posix->context, options, &queue->posix);
        if (error != 0) {
            kv_alloc_release(queue->alloc, queue);
            return error;
        }
    }
    *out = &queue->base;
    return 0;
}

/* Puts what is left of a flight on the ring. */
static int launch(struct ring_queue *queue, uint32_t index) {
    struct flight *flight = &queue->flights[index];
    const struct io_request *request = &flight->request;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&queue->ring);
    assert(sqe != NULL); /* the ring is as large as the largest depth */
    size_t left = request->count - (size_t)flight->done_bytes;
    unsigned take = (unsigned)(left < IO_FILES_CALL_BYTES_MAX ? left : IO_FILES_CALL_BYTES_MAX);
    char *at = (char *)request->bytes + flight->done_bytes;
    uint64_t off = request->off + flight->done_bytes;
    int buffer = request->buffer < (int)queue->buffer_count ? request->buffer : IO_BUFFER_NONE;
    if (request->write && buffer >= 0)
        io_uring_prep_write_fixed(sqe, request->file, at, take, off, buffer);
    else if (request->write)
        io_uring_prep_write(sqe, request->file, at, take, off);
    else if (buffer >= 0)
        io_uring_prep_read_fixed(sqe, request->file, at, take, off, buffer);
    else
        io_uring_prep_read(sqe, request->file, at, take, off);
    io_uring_sqe_set_data64(sqe, index);
    int result;
    do
        result = io_uring_submit(&queue->ring);
    while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
    if (result >= 0)
        return 0;
    /* The entry stays on the ring and would go with the next submit, into memory that its caller
     * no longer lends: it becomes a no-op whose completion nobody waits for. */
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data64(sqe, NOBODY);
    return -result;
}

static int queue_submit(void *context, struct io_queue *base, const struct io_request *request) {
    (void)context;
    struct ring_queue *queue = inner(base);
    if (queue->posix != NULL)
        return io_posix_door()->submit(NULL, queue->posix, request);
    if (queue->in_flight == queue->depth)
        return EAGAIN;
    uint32_t index = 0;
    while (queue->flights[index].used)
        index++;
    queue->flights[index] = (struct flight){.used = 1, .request = *request};
    int error = launch(queue, index);
    if (error != 0)
        queue->flights[index].used = 0;
    else
        queue->in_flight++;
    return error;
}

/* 1 when the flight is over and *done is filled in; 0 when its rest has been launched again. */
static int land(struct ring_queue *queue, uint32_t index, int result, struct io_completion *done) {
    struct flight *flight = &queue->flights[index];
    const struct io_request *request = &flight->request;
    int error = 0;
    if (result == -EINTR || result == -EAGAIN) {
        error = launch(queue, index);
        if (error == 0)
            return 0;
    } else if (result < 0) {
        error = -result;
    } else if (result == 0) {
        error = request->write ? EIO : 0;
    } else {
        flight->done_bytes += (uint64_t)result;
        int more = flight->done_bytes < request->count &&
                   (request->write || result % IO_FILES_SECTOR_BYTES == 0);
        if (more) {
            error = launch(queue, index);
            if (error == 0)
                return 0;
        }
    }
    *done = (struct io_completion){request->tag, flight->done_bytes, error};
    flight->used = 0;
    queue->in_flight--;
    return 1;
}

/* The system's clock, not the caller's: the kernel counts in it. */
static uint64_t now_ns(void) {
    return kv_clock_now_ns(kv_clock_system());
}

/* Waits for one entry on the ring. 0, ETIMEDOUT or another errno. */
static int wait_entry(struct ring_queue *queue, uint64_t end_ns) {
    struct io_uring_cqe *cqe = NULL;
    for (;;) {
        uint64_t now = now_ns();
        uint64_t left = end_ns > now ? end_ns - now : 0;
        struct __kernel_timespec wait = {.tv_sec = (long long)(left / 1000000000u),
                                         .tv_nsec = (long long)(left % 1000000000u)};
        int result = io_uring_wait_cqe_timeout(&queue->ring, &cqe, &wait);
        if (result == 0)
            return 0;
        if (result == -ETIME)
            return ETIMEDOUT;
        if (result != -EINTR && result != -EAGAIN)
            return -result;
    }
}

static int queue_wait(void *context, struct io_queue *base, uint64_t timeout_ns,
                      struct io_completion *done, uint32_t room, uint32_t *taken_out) {
    (void)context;
    struct ring_queue *queue = inner(base);
    if (queue->posix != NULL)
        return io_posix_door()->wait(NULL, queue->posix, timeout_ns, done, room, taken_out);
    uint64_t now = now_ns();
    uint64_t end_ns = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
    uint32_t taken = 0;
    while (taken == 0 && queue->in_flight != 0) {
        int error = wait_entry(queue, end_ns);
        if (error != 0) {
            *taken_out = 0;
            return error;
        }
        struct io_uring_cqe *cqe = NULL;
        while (taken < room && io_uring_peek_cqe(&queue->ring, &cqe) == 0) {
            uint32_t index = (uint32_t)io_uring_cqe_get_data64(cqe);
            int result = cqe->res;
            int nobody = io_uring_cqe_get_data64(cqe) == NOBODY;
            io_uring_cqe_seen(&queue->ring, cqe);
            if (nobody)
                continue;
            assert(index < IO_DEPTH_MAX && queue->flights[index].used);
            taken += (uint32_t)land(queue, index, result, &done[taken]);
        }
    }
    *taken_out = taken;
    return 0;
}

static int queue_close(void *context, struct io_queue *base, uint64_t timeout_ns) {
    struct ring_queue *queue = inner(base);
    struct io_completion done[16];
    uint32_t taken = 0;
    int error = 0;
    if (queue->posix != NULL) {
        error = io_posix_door()->queue_close(NULL, queue->posix, timeout_ns);
    } else {
        while (error == 0 && queue->in_flight != 0)
            error = queue_wait(context, base, timeout_ns, done, 16, &taken);
        if (error == 0)
            io_uring_queue_exit(&queue->ring);
    }
    if (error != 0)
        return ETIMEDOUT;
    kv_alloc_release(queue->alloc, queue);
    return 0;
}

static const char *queue_name(void *context, const struct io_queue *queue) {
    (void)context;
    return inner_const(queue)->posix != NULL ? "posix" : "io_uring";
}

static const char *queue_fallback(void *context, const struct io_queue *queue) {
    (void)context;
    return queue->fallback;
}

static const struct io_door uring_door = {
    .name = "io_uring",
    IO_FILES_CALLS,
    .queue_open = queue_open,
    .queue_close = queue_close,
    .queue_name = queue_name,
    .queue_fallback = queue_fallback,
    .submit = queue_submit,
    .wait = queue_wait,
};

const struct io_door *io_uring_door(void) {
    return &uring_door;
}

const struct io_door *io_best_door(void) {
    return &uring_door;
}
