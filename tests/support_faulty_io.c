/* tests/support_faulty_io.c - the door that breaks on request.
 *
 * Responsible for: the contract of support_faulty_io.h.
 * Not responsible for: choosing k (the tests sweep it).
 */
#include "tests/support_faulty_io.h"

#include "store/base/alloc.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { STALL_LIMIT_SECONDS = 60 };

/* What a change had in its place before, until a sync makes it final. */
struct undo {
    int file; /* duplicate of the descriptor */
    uint64_t size_before;
    uint64_t off;
    size_t count;
    uint8_t *before;
};

struct faulty_io {
    struct io_door door;
    const struct io_door *under;
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t changed;
    struct faulty_io_plan plan;
    struct faulty_io_counts counts;
    int released;
    struct undo *undos;
    size_t undo_count;
    size_t undo_capacity;
};

struct faulty_queue {
    struct io_queue *under;
    uint32_t depth;
    uint32_t in_flight; /* in the queue below */
    uint32_t writes_in_flight;
    uint8_t is_write[1 << 16]; /* by tag: both users number their requests from 0 */
    struct io_request held[IO_DEPTH_MAX];
    uint32_t held_count;
    struct io_completion ready[IO_DEPTH_MAX];
    uint32_t ready_count;
};

static struct faulty_io *self(void *context) {
    return context;
}

static void *need(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "faulty_io: no memory\n");
        abort();
    }
    return memory;
}

/* Undoes a random part of what was not synced: each change alone, last first. */
static void cut_power(struct faulty_io *faulty) {
    uint64_t random = faulty->plan.seed * 2862933555777941757u + 3037000493u;
    for (size_t i = faulty->undo_count; i-- > 0;) {
        struct undo *undo = &faulty->undos[i];
        random = random * 6364136223846793005u + 1442695040888963407u;
        if ((random >> 60) < 6)
            continue;
        if (undo->count != 0 &&
            pwrite(undo->file, undo->before, undo->count, (off_t)undo->off) != (ssize_t)undo->count)
            _exit(87);
        if (ftruncate(undo->file, (off_t)undo->size_before) != 0)
            _exit(87);
    }
}

static _Noreturn void die(struct faulty_io *faulty) {
    if (faulty->plan.power_cut)
        cut_power(faulty);
    if (faulty->plan.before_exit != NULL)
        faulty->plan.before_exit(faulty->plan.context, faulty->plan.at);
    _exit(FAULTY_IO_EXIT_STATUS);
}

/* Counts an operation under the lock. 1 when the plan strikes it. */
static int strikes(struct faulty_io *faulty, enum faulty_io_op op) {
    struct faulty_io_plan *plan = &faulty->plan;
    if ((plan->ops & op) == 0)
        return 0;
    faulty->counts.ops++;
    if (plan->action == FAULTY_IO_COUNT || faulty->counts.ops < plan->at ||
        (faulty->counts.ops > plan->at && !plan->lasting))
        return 0;
    faulty->counts.hits++;
    return 1;
}

/* For an operation that is not a transfer: 0 or the errno to give. */
static int strike_simple(struct faulty_io *faulty, enum faulty_io_op op) {
    int error = 0;
    pthread_mutex_lock(&faulty->lock);
    if (strikes(faulty, op)) {
        if (faulty->plan.action == FAULTY_IO_DIE || faulty->plan.action == FAULTY_IO_TEAR_AND_DIE)
            die(faulty);
        if (faulty->plan.action == FAULTY_IO_FAIL || faulty->plan.action == FAULTY_IO_TEAR)
            error = faulty->plan.error;
    }
    pthread_mutex_unlock(&faulty->lock);
    return error;
}

static void remember(struct faulty_io *faulty, int file, uint64_t off, size_t count) {
    if (!faulty->plan.power_cut)
        return;
    struct io_file_info info;
    if (faulty->under->info(faulty->under->context, file, &info) != 0)
        return;
    if (faulty->undo_count == faulty->undo_capacity) {
        faulty->undo_capacity = faulty->undo_capacity == 0 ? 64 : faulty->undo_capacity * 2;
        faulty->undos = need(realloc(faulty->undos, faulty->undo_capacity * sizeof *faulty->undos));
    }
    struct undo *undo = &faulty->undos[faulty->undo_count];
    *undo = (struct undo){.file = dup(file), .size_before = info.size_bytes};
    if (count != 0 && off < info.size_bytes) {
        size_t there = info.size_bytes - off < count ? (size_t)(info.size_bytes - off) : count;
        undo->before = need(aligned_alloc(4096, (there + 4095) & ~(size_t)4095));
        ssize_t got = pread(undo->file, undo->before, there, (off_t)off);
        undo->off = off;
        undo->count = got > 0 ? (size_t)got : 0;
    }
    faulty->undo_count++;
}

/* A sync of the file makes its changes final. */
static void forget(struct faulty_io *faulty, int file) {
    size_t kept = 0;
    struct stat synced = {0};
    if (file >= 0 && fstat(file, &synced) != 0)
        return;
    for (size_t i = 0; i < faulty->undo_count; i++) {
        struct undo *undo = &faulty->undos[i];
        struct stat own = {0};
        /* Whichever descriptor it was changed through. */
        if (file < 0 || (fstat(undo->file, &own) == 0 && own.st_ino == synced.st_ino &&
                         own.st_dev == synced.st_dev)) {
            close(undo->file);
            free(undo->before);
        } else {
            faulty->undos[kept++] = *undo;
        }
    }
    faulty->undo_count = kept;
}

static void write_half(struct faulty_io *faulty, const struct io_request *request) {
    size_t half = request->count / 2 & ~(size_t)4095;
    if (request->count < 8192)
        half = request->count / 2;
    struct io_file_info info = {0};
    faulty->under->info(faulty->under->context, request->file, &info);
    if (info.is_direct)
        half &= ~(size_t)511;
    if (half != 0)
        faulty->under->write(faulty->under->context, request->file, request->bytes, half,
                             request->off);
}

/* What happens to one transfer. */
enum verdict { PASS, FAIL, HOLD };

static enum verdict judge(struct faulty_io *faulty, const struct io_request *request,
                          int may_hold) {
    enum verdict verdict = PASS;
    pthread_mutex_lock(&faulty->lock);
    if (request->write) {
        faulty->counts.writes++;
        faulty->counts.write_bytes += request->count;
    } else {
        faulty->counts.reads++;
        faulty->counts.read_bytes += request->count;
    }
    if (strikes(faulty, request->write ? FAULTY_IO_WRITE : FAULTY_IO_READ)) {
        enum faulty_io_action action = faulty->plan.action;
        int tear = action == FAULTY_IO_TEAR || action == FAULTY_IO_TEAR_AND_DIE;
        if (tear && request->write) {
            remember(faulty, request->file, request->off, request->count);
            write_half(faulty, request);
        }
        if (action == FAULTY_IO_DIE || action == FAULTY_IO_TEAR_AND_DIE)
            die(faulty);
        if (action == FAULTY_IO_FAIL || action == FAULTY_IO_TEAR)
            verdict = FAIL;
        if (action == FAULTY_IO_STALL && may_hold && !faulty->released) {
            verdict = HOLD;
            faulty->counts.stalled++;
            pthread_cond_broadcast(&faulty->changed);
        }
    }
    if (verdict == PASS && request->write)
        remember(faulty, request->file, request->off, request->count);
    pthread_mutex_unlock(&faulty->lock);
    return verdict;
}

static int faulty_open(void *context, int dir, const char *name, int flags, int *file_out) {
    struct faulty_io *faulty = self(context);
    int error = (flags & IO_CREATE) != 0 ? strike_simple(faulty, FAULTY_IO_NAME) : 0;
    return error != 0 ? error
                      : faulty->under->open(faulty->under->context, dir, name, flags, file_out);
}

static int faulty_close(void *context, int file) {
    struct faulty_io *faulty = self(context);
    return faulty->under->close(faulty->under->context, file);
}

static int faulty_make_dir(void *context, int dir, const char *name) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_NAME);
    return error != 0 ? error : faulty->under->make_dir(faulty->under->context, dir, name);
}

static int faulty_rename(void *context, int dir, const char *from, const char *to) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_NAME);
    return error != 0 ? error : faulty->under->rename(faulty->under->context, dir, from, to);
}

static int faulty_remove(void *context, int dir, const char *name) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_NAME);
    return error != 0 ? error : faulty->under->remove(faulty->under->context, dir, name);
}

static int faulty_info(void *context, int file, struct io_file_info *out) {
    struct faulty_io *faulty = self(context);
    return faulty->under->info(faulty->under->context, file, out);
}

static int faulty_info_at(void *context, int dir, const char *name, struct io_file_info *out) {
    struct faulty_io *faulty = self(context);
    return faulty->under->info_at(faulty->under->context, dir, name, out);
}

static int faulty_list(void *context, int dir, int (*each)(void *argument, const char *name),
                       void *argument) {
    struct faulty_io *faulty = self(context);
    return faulty->under->list(faulty->under->context, dir, each, argument);
}

static int faulty_allocate(void *context, int file, uint64_t size_bytes) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_SPACE);
    if (error != 0)
        return error;
    pthread_mutex_lock(&faulty->lock);
    remember(faulty, file, 0, 0);
    pthread_mutex_unlock(&faulty->lock);
    return faulty->under->allocate(faulty->under->context, file, size_bytes);
}

static int faulty_truncate(void *context, int file, uint64_t size_bytes) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_SPACE);
    return error != 0 ? error : faulty->under->truncate(faulty->under->context, file, size_bytes);
}

/* What was there is remembered as for a write: a power cut may bring it back. */
static int faulty_punch(void *context, int file, uint64_t off, uint64_t bytes) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_SPACE);
    if (error != 0)
        return error;
    pthread_mutex_lock(&faulty->lock);
    remember(faulty, file, off, (size_t)bytes);
    pthread_mutex_unlock(&faulty->lock);
    return faulty->under->punch(faulty->under->context, file, off, bytes);
}

static int faulty_free_space(void *context, int file, uint64_t *bytes_out) {
    struct faulty_io *faulty = self(context);
    return faulty->under->free_space(faulty->under->context, file, bytes_out);
}

static int faulty_read(void *context, int file, void *bytes, size_t count, uint64_t off,
                       size_t *done_out) {
    struct faulty_io *faulty = self(context);
    struct io_request request = {.file = file, .bytes = bytes, .count = count, .off = off};
    if (judge(faulty, &request, 0) == FAIL)
        return faulty->plan.error;
    return faulty->under->read(faulty->under->context, file, bytes, count, off, done_out);
}

static int faulty_write(void *context, int file, const void *bytes, size_t count, uint64_t off) {
    struct faulty_io *faulty = self(context);
    struct io_request request = {
        .file = file, .write = 1, .bytes = (void *)(uintptr_t)bytes, .count = count, .off = off};
    if (judge(faulty, &request, 0) == FAIL)
        return faulty->plan.error;
    return faulty->under->write(faulty->under->context, file, bytes, count, off);
}

static int faulty_sync(void *context, int file) {
    struct faulty_io *faulty = self(context);
    int error = strike_simple(faulty, FAULTY_IO_SYNC);
    if (error != 0)
        return error;
    error = faulty->under->sync(faulty->under->context, file);
    pthread_mutex_lock(&faulty->lock);
    faulty->counts.syncs++;
    if (error == 0)
        forget(faulty, file);
    pthread_mutex_unlock(&faulty->lock);
    return error;
}

static int faulty_lock(void *context, int file) {
    struct faulty_io *faulty = self(context);
    return faulty->under->lock(faulty->under->context, file);
}

static int faulty_random(void *context, void *bytes, size_t count) {
    struct faulty_io *faulty = self(context);
    return faulty->under->random(faulty->under->context, bytes, count);
}

static struct faulty_queue *queue_of(struct io_queue *queue) {
    return (struct faulty_queue *)(void *)queue;
}

static int faulty_queue_open(void *context, const struct io_queue_options *options,
                             struct io_queue **out) {
    struct faulty_io *faulty = self(context);
    struct faulty_queue *queue = need(calloc(1, sizeof *queue));
    queue->depth = options->depth;
    int error = faulty->under->queue_open(faulty->under->context, options, &queue->under);
    if (error != 0) {
        free(queue);
        return error;
    }
    *out = (struct io_queue *)(void *)queue;
    return 0;
}

static int faulty_queue_close(void *context, struct io_queue *base, uint64_t timeout_ns) {
    struct faulty_io *faulty = self(context);
    struct faulty_queue *queue = queue_of(base);
    pthread_mutex_lock(&faulty->lock);
    int held = queue->held_count != 0 && !faulty->released;
    pthread_mutex_unlock(&faulty->lock);
    if (held)
        return ETIMEDOUT;
    int error = faulty->under->queue_close(faulty->under->context, queue->under, timeout_ns);
    if (error == 0)
        free(queue);
    return error;
}

static const char *faulty_queue_name(void *context, const struct io_queue *base) {
    struct faulty_io *faulty = self(context);
    const struct faulty_queue *queue = (const void *)base;
    return faulty->under->queue_name(faulty->under->context, queue->under);
}

static const char *faulty_queue_fallback(void *context, const struct io_queue *base) {
    struct faulty_io *faulty = self(context);
    const struct faulty_queue *queue = (const void *)base;
    return faulty->under->queue_fallback(faulty->under->context, queue->under);
}

static int pass_down(struct faulty_io *faulty, struct faulty_queue *queue,
                     const struct io_request *request) {
    int error = faulty->under->submit(faulty->under->context, queue->under, request);
    if (error == 0)
        queue->in_flight++;
    return error;
}

static int faulty_submit(void *context, struct io_queue *base, const struct io_request *request) {
    struct faulty_io *faulty = self(context);
    struct faulty_queue *queue = queue_of(base);
    if (queue->in_flight + queue->held_count + queue->ready_count == queue->depth)
        return EAGAIN;
    int error = 0;
    switch (judge(faulty, request, 1)) {
    case PASS:
        error = pass_down(faulty, queue, request);
        break;
    case FAIL:
        queue->ready[queue->ready_count++] =
            (struct io_completion){.tag = request->tag, .error = faulty->plan.error};
        break;
    case HOLD:
        queue->held[queue->held_count++] = *request;
        break;
    }
    if (error == 0 && request->write) {
        queue->is_write[request->tag & 0xffff] = 1;
        queue->writes_in_flight++;
        pthread_mutex_lock(&faulty->lock);
        if (queue->writes_in_flight > faulty->counts.in_flight_max)
            faulty->counts.in_flight_max = queue->writes_in_flight;
        pthread_mutex_unlock(&faulty->lock);
    }
    return error;
}

static struct timespec deadline_after(uint64_t timeout_ns) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    uint64_t seconds = timeout_ns / 1000000000u < 1000000 ? timeout_ns / 1000000000u : 1000000;
    uint64_t rest = (uint64_t)at.tv_nsec + timeout_ns % 1000000000u;
    at.tv_sec += (time_t)(seconds + rest / 1000000000u);
    at.tv_nsec = (long)(rest % 1000000000u);
    return at;
}

/* When only held requests are left: waits for their release and passes them down. */
static int wait_for_release(struct faulty_io *faulty, struct faulty_queue *queue,
                            uint64_t timeout_ns) {
    struct timespec end = deadline_after(timeout_ns);
    int error = 0;
    pthread_mutex_lock(&faulty->lock);
    while (error == 0 && !faulty->released)
        error = pthread_cond_timedwait(&faulty->changed, &faulty->lock, &end);
    if (faulty->released && faulty->counts.stalled >= queue->held_count)
        faulty->counts.stalled -= queue->held_count;
    pthread_mutex_unlock(&faulty->lock);
    if (error != 0)
        return ETIMEDOUT;
    for (uint32_t i = 0; i < queue->held_count && error == 0; i++)
        error = pass_down(faulty, queue, &queue->held[i]);
    queue->held_count = 0;
    return error;
}

static int faulty_wait(void *context, struct io_queue *base, uint64_t timeout_ns,
                       struct io_completion *done, uint32_t room, uint32_t *taken_out) {
    struct faulty_io *faulty = self(context);
    struct faulty_queue *queue = queue_of(base);
    uint32_t taken = 0;
    int error = 0;
    while (queue->ready_count != 0 && taken < room)
        done[taken++] = queue->ready[--queue->ready_count];
    if (taken == 0 && queue->in_flight == 0 && queue->held_count != 0)
        error = wait_for_release(faulty, queue, timeout_ns);
    if (error == 0 && taken == 0 && queue->in_flight != 0) {
        error = faulty->under->wait(faulty->under->context, queue->under, timeout_ns, done, room,
                                    &taken);
        queue->in_flight -= taken;
    }
    for (uint32_t i = 0; i < taken; i++) {
        queue->writes_in_flight -= queue->is_write[done[i].tag & 0xffff];
        queue->is_write[done[i].tag & 0xffff] = 0;
    }
    *taken_out = taken;
    return error;
}

struct faulty_io *faulty_io_make(const struct io_door *under) {
    struct faulty_io *faulty = need(calloc(1, sizeof *faulty));
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&faulty->lock, NULL);
    pthread_cond_init(&faulty->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    faulty->under = under;
    faulty->door = (struct io_door){
        .name = under->name,
        .context = faulty,
        .open = faulty_open,
        .close = faulty_close,
        .make_dir = faulty_make_dir,
        .rename = faulty_rename,
        .remove = faulty_remove,
        .info = faulty_info,
        .info_at = faulty_info_at,
        .list = faulty_list,
        .allocate = faulty_allocate,
        .truncate = faulty_truncate,
        .punch = faulty_punch,
        .free_space = faulty_free_space,
        .read = faulty_read,
        .write = faulty_write,
        .sync = faulty_sync,
        .lock = faulty_lock,
        .random = faulty_random,
        .queue_open = faulty_queue_open,
        .queue_close = faulty_queue_close,
        .queue_name = faulty_queue_name,
        .queue_fallback = faulty_queue_fallback,
        .submit = faulty_submit,
        .wait = faulty_wait,
    };
    return faulty;
}

void faulty_io_drop(struct faulty_io *faulty) {
    if (faulty == NULL)
        return;
    forget(faulty, -1);
    free(faulty->undos);
    pthread_cond_destroy(&faulty->changed);
    pthread_mutex_destroy(&faulty->lock);
    free(faulty);
}

const struct io_door *faulty_io_door(struct faulty_io *faulty) {
    return &faulty->door;
}

void faulty_io_arm(struct faulty_io *faulty, const struct faulty_io_plan *plan) {
    pthread_mutex_lock(&faulty->lock);
    forget(faulty, -1);
    faulty->plan = *plan;
    faulty->released = 0;
    memset(&faulty->counts, 0, sizeof faulty->counts);
    pthread_mutex_unlock(&faulty->lock);
}

void faulty_io_release(struct faulty_io *faulty) {
    pthread_mutex_lock(&faulty->lock);
    faulty->released = 1;
    faulty->plan.action = FAULTY_IO_COUNT;
    pthread_cond_broadcast(&faulty->changed);
    pthread_mutex_unlock(&faulty->lock);
}

struct faulty_io_counts faulty_io_counts(struct faulty_io *faulty) {
    pthread_mutex_lock(&faulty->lock);
    struct faulty_io_counts counts = faulty->counts;
    pthread_mutex_unlock(&faulty->lock);
    return counts;
}

void faulty_io_cut_power(struct faulty_io *faulty) {
    pthread_mutex_lock(&faulty->lock);
    cut_power(faulty);
    pthread_mutex_unlock(&faulty->lock);
}

void faulty_io_await_stall(struct faulty_io *faulty) {
    struct timespec limit;
    int error = 0;
    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_sec += STALL_LIMIT_SECONDS;
    pthread_mutex_lock(&faulty->lock);
    while (faulty->counts.stalled == 0 && error == 0)
        error = pthread_cond_timedwait(&faulty->changed, &faulty->lock, &limit);
    uint64_t stalled = faulty->counts.stalled;
    pthread_mutex_unlock(&faulty->lock);
    if (stalled == 0) {
        fprintf(stderr, "no request was held within %d s\n", STALL_LIMIT_SECONDS);
        abort();
    }
}
