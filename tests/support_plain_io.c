/* tests/support_plain_io.c - the door to the file system without threads.
 *
 * Responsible for: a queue that does at once what it is told.
 * Not responsible for: file calls (store/io_files.h).
 */
#include "tests/support_plain_io.h"

#include "store/base/alloc.h"
#include "store/io_files.h"

#include <errno.h>

struct plain_queue {
    struct io_queue base;
    const struct kv_alloc *alloc;
    uint32_t depth, count;
    struct io_completion done[IO_DEPTH_MAX];
};

static int plain_open(void *context, const struct io_queue_options *options,
                      struct io_queue **out) {
    (void)context;
    struct plain_queue *queue = kv_alloc_zeroed(options->alloc, 1, sizeof *queue);
    if (queue == NULL)
        return ENOMEM;
    queue->alloc = options->alloc;
    queue->depth = options->depth;
    *out = &queue->base;
    return 0;
}

static int plain_close(void *context, struct io_queue *base, uint64_t timeout_ns) {
    struct plain_queue *queue = (struct plain_queue *)(void *)base;
    (void)context;
    (void)timeout_ns;
    kv_alloc_release(queue->alloc, queue);
    return 0;
}

static const char *plain_name(void *context, const struct io_queue *queue) {
    (void)context;
    (void)queue;
    return "plain";
}

static const char *plain_fallback(void *context, const struct io_queue *queue) {
    (void)context;
    return queue->fallback;
}

static int plain_submit(void *context, struct io_queue *base, const struct io_request *request) {
    struct plain_queue *queue = (struct plain_queue *)(void *)base;
    (void)context;
    if (queue->count == queue->depth)
        return EAGAIN;
    struct io_completion *done = &queue->done[queue->count++];
    *done = (struct io_completion){.tag = request->tag};
    done->error = io_files_transfer(request, &done->done_bytes);
    return 0;
}

static int plain_wait(void *context, struct io_queue *base, uint64_t timeout_ns,
                      struct io_completion *done, uint32_t room, uint32_t *taken_out) {
    struct plain_queue *queue = (struct plain_queue *)(void *)base;
    (void)context;
    (void)timeout_ns;
    for (*taken_out = 0; queue->count > 0 && *taken_out < room; (*taken_out)++)
        done[*taken_out] = queue->done[--queue->count];
    return 0;
}

static int plain_sync(void *context, int file) {
    (void)context;
    (void)file;
    return 0;
}

/* Memory has no blocks to be taken ahead. */
static int plain_allocate(void *context, int file, uint64_t size_bytes) {
    return io_files_truncate(context, file, size_bytes);
}

static const struct io_door plain_door = {.name = "plain",
                                          .open = io_files_open,
                                          .close = io_files_close,
                                          .make_dir = io_files_make_dir,
                                          .rename = io_files_rename,
                                          .remove = io_files_remove,
                                          .info = io_files_info,
                                          .info_at = io_files_info_at,
                                          .list = io_files_list,
                                          .allocate = plain_allocate,
                                          .truncate = io_files_truncate,
                                          .punch = io_files_punch,
                                          .free_space = io_files_free_space,
                                          .read = io_files_read,
                                          .write = io_files_write,
                                          .sync = plain_sync,
                                          .lock = io_files_lock,
                                          .random = io_files_random,
                                          .queue_open = plain_open,
                                          .queue_close = plain_close,
                                          .queue_name = plain_name,
                                          .queue_fallback = plain_fallback,
                                          .submit = plain_submit,
                                          .wait = plain_wait};

const struct io_door *support_plain_io_door(void) {
    return &plain_door;
}
