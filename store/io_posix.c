/* store/io_posix.c - the door with plain system calls and a few threads.
 *
 * Responsible for: the same queue behaviour as io_uring.c where the kernel has no io_uring or
 * refuses it: several requests in flight, completions in any order, deadlines.
 * Not responsible for: file calls (io_files.c).
 */
#include "store/io.h"

#include "store/base/alloc.h"
#include "store/base/bytes.h"
#include "store/base/clock.h"
#include "store/io_files.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

enum { THREADS_MAX = 8 };

enum slot_state { SLOT_FREE, SLOT_QUEUED, SLOT_RUNNING, SLOT_DONE };

struct slot {
    enum slot_state state;
    uint64_t order; /* of submission: workers take the oldest */
    struct io_request request;
    struct io_completion completion;
};

struct posix_queue {
    struct io_queue base;
    const struct kv_alloc *alloc;
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t work;
    pthread_cond_t done;
    uint32_t depth;
    uint64_t submitted;
    int stopping;
    uint32_t thread_count;
    pthread_t threads[THREADS_MAX];
    struct slot slots[IO_DEPTH_MAX];
};

static struct posix_queue *inner(struct io_queue *queue) {
    return (struct posix_queue *)(void *)queue;
}

static struct slot *oldest_queued(struct posix_queue *queue) {
    struct slot *oldest = NULL;
    for (uint32_t i = 0; i < queue->depth; i++) {
        struct slot *slot = &queue->slots[i];
        if (slot->state == SLOT_QUEUED && (oldest == NULL || slot->order < oldest->order))
            oldest = slot;
    }
    return oldest;
}

static void *worker(void *argument) {
    struct posix_queue *queue = argument;
    pthread_mutex_lock(&queue->lock);
    while (!queue->stopping) {
        struct slot *slot = oldest_queued(queue);
        if (slot == NULL) {
            pthread_cond_wait(&queue->work, &queue->lock);
            continue;
        }
        slot->state = SLOT_RUNNING;
        struct io_request request = slot->request;
        pthread_mutex_unlock(&queue->lock);
        struct io_completion completion = {.tag = request.tag};
        completion.error = io_files_transfer(&request, &completion.done_bytes);
        pthread_mutex_lock(&queue->lock);
        slot->completion = completion;
        slot->state = SLOT_DONE;
        pthread_cond_signal(&queue->done);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* Signals belong to the program's own threads. */
static uint32_t start_workers(struct posix_queue *queue) {
    sigset_t all;
    sigset_t old;
    uint32_t wanted = queue->depth < THREADS_MAX ? queue->depth : THREADS_MAX;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    uint32_t count = 0;
    while (count < wanted && pthread_create(&queue->threads[count], NULL, worker, queue) == 0)
        count++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return count;
}

static void stop_workers(struct posix_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->stopping = 1;
    pthread_cond_broadcast(&queue->work);
    pthread_mutex_unlock(&queue->lock);
    for (uint32_t i = 0; i < queue->thread_count; i++)
        pthread_join(queue->threads[i], NULL);
}

static void release(struct posix_queue *queue) {
    pthread_cond_destroy(&queue->done);
    pthread_cond_destroy(&queue->work);
    pthread_mutex_destroy(&queue->lock);
    kv_alloc_release(queue->alloc, queue);
}

static int queue_open(void *context, const struct io_queue_options *options,
                      struct io_queue **out) {
    (void)context;
    assert(options->depth >= 1 && options->depth <= IO_DEPTH_MAX);
    struct posix_queue *queue = kv_alloc_zeroed(options->alloc, 1, sizeof *queue);
    if (queue == NULL)
        return ENOMEM;
    queue->alloc = options->alloc;
    queue->depth = options->depth;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->work, NULL);
    pthread_cond_init(&queue->done, &attributes);
    pthread_condattr_destroy(&attributes);
    queue->thread_count = start_workers(queue);
    if (queue->thread_count == 0) {
        release(queue);
        return EAGAIN;
    }
    *out = &queue->base;
    return 0;
}

/* The system's clock, not the caller's: the kernel counts in it. */
static struct timespec deadline_after(uint64_t timeout_ns) {
    uint64_t now = kv_clock_now_ns(kv_clock_system());
    uint64_t end = 0;
    if (!kv_add_u64(now, timeout_ns, &end) || end > (uint64_t)INT64_MAX)
        end = (uint64_t)INT64_MAX;
    return (struct timespec){.tv_sec = (time_t)(end / 1000000000u),
                             .tv_nsec = (long)(end % 1000000000u)};
}

static uint32_t count_state(const struct posix_queue *queue, enum slot_state state) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < queue->depth; i++)
        count += queue->slots[i].state == state;
    return count;
}

static int queue_close(void *context, struct io_queue *base, uint64_t timeout_ns) {
    (void)context;
    struct posix_queue *queue = inner(base);
    struct timespec end = deadline_after(timeout_ns);
    int error = 0;
    pthread_mutex_lock(&queue->lock);
    for (uint32_t i = 0; i < queue->depth; i++) {
        if (queue->slots[i].state == SLOT_QUEUED)
            queue->slots[i].state = SLOT_FREE;
    }
    while (error == 0 && count_state(queue, SLOT_RUNNING) != 0)
        error = pthread_cond_timedwait(&queue->done, &queue->lock, &end);
    pthread_mutex_unlock(&queue->lock);
    if (error != 0)
        return ETIMEDOUT;
    stop_workers(queue);
    release(queue);
    return 0;
}

static const char *queue_name(void *context, const struct io_queue *queue) {
    (void)context;
    (void)queue;
    return "posix";
}

static const char *queue_fallback(void *context, const struct io_queue *queue) {
    (void)context;
    return queue->fallback;
}

static int queue_submit(void *context, struct io_queue *base, const struct io_request *request) {
    (void)context;
    struct posix_queue *queue = inner(base);
    int error = EAGAIN;
    pthread_mutex_lock(&queue->lock);
    for (uint32_t i = 0; i < queue->depth; i++) {
        struct slot *slot = &queue->slots[i];
        if (slot->state != SLOT_FREE)
            continue;
        slot->state = SLOT_QUEUED;
        slot->order = queue->submitted++;
        slot->request = *request;
        pthread_cond_signal(&queue->work);
        error = 0;
        break;
    }
    pthread_mutex_unlock(&queue->lock);
    return error;
}

static int queue_wait(void *context, struct io_queue *base, uint64_t timeout_ns,
                      struct io_completion *done, uint32_t room, uint32_t *taken_out) {
    (void)context;
    struct posix_queue *queue = inner(base);
    struct timespec end = deadline_after(timeout_ns);
    uint32_t taken = 0;
    int error = 0;
    pthread_mutex_lock(&queue->lock);
    while (error == 0 && count_state(queue, SLOT_DONE) == 0 &&
           count_state(queue, SLOT_FREE) != queue->depth)
        error = pthread_cond_timedwait(&queue->done, &queue->lock, &end);
    for (uint32_t i = 0; i < queue->depth && taken < room; i++) {
        struct slot *slot = &queue->slots[i];
        if (slot->state != SLOT_DONE)
            continue;
        done[taken++] = slot->completion;
        slot->state = SLOT_FREE;
    }
    pthread_mutex_unlock(&queue->lock);
    *taken_out = taken;
    return taken == 0 && error != 0 ? ETIMEDOUT : 0;
}

static const struct io_door posix_door = {
    .name = "posix",
    IO_FILES_CALLS,
    .queue_open = queue_open,
    .queue_close = queue_close,
    .queue_name = queue_name,
    .queue_fallback = queue_fallback,
    .submit = queue_submit,
    .wait = queue_wait,
};

const struct io_door *io_posix_door(void) {
    return &posix_door;
}
