/* store/io.h - the door to the file system.
 *
 * Responsible for: every system call on files that the store makes (LMDB keeps its own), as one
 * table of functions with two implementations that behave the same: io_uring.c and io_posix.c.
 * Tests put a faulty door in front of either.
 * Not responsible for: names and layout (segment.c, store_open.c) or retry policy. Interrupted and
 * partial transfers are continued behind the door; requests of any size are split there.
 *
 * Functions return 0 or a positive errno value instead of enum kv_err, because callers decide by
 * errno (EINVAL from O_DIRECT, ENOSPC, EROFS); segment.c and store_open.c translate once. Files
 * and directories are descriptors; names are relative to a directory descriptor, one component
 * long, and never followed when they are symbolic links.
 *
 * Threads: a door's functions from any thread; a queue has one owner thread at a time.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_IO_H
#define STORE_IO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct kv_alloc;

enum io_open_flag {
    IO_READ = 0,
    IO_WRITE = 1 << 0,     /* read and write */
    IO_CREATE = 1 << 1,    /* mode 0600 */
    IO_EXCLUSIVE = 1 << 2, /* with IO_CREATE: EEXIST when there */
    IO_DIRECT = 1 << 3,    /* EINVAL where the file system refuses it */
    IO_DIRECTORY = 1 << 4
};

enum { IO_BUFFER_NONE = -1, IO_DEPTH_MAX = 64, IO_BUFFERS_MAX = 32 };

struct io_queue; /* made by queue_open; its content belongs to the door */

struct io_request {
    int file;
    int write;    /* 1 write, 0 read */
    int buffer;   /* index of the registered buffer that holds `bytes`, or IO_BUFFER_NONE */
    void *bytes;  /* borrowed until the completion has been taken */
    size_t count; /* a multiple of 4 KiB, as `off` and the address, when the file is direct */
    uint64_t off;
    uint64_t tag; /* returned with the completion */
};

struct io_completion {
    uint64_t tag;
    uint64_t done_bytes; /* less than asked with error 0 only for a read that met the end of file */
    int error;
};

struct io_queue_options {
    uint32_t depth; /* [1, IO_DEPTH_MAX] requests in flight */
    void *buffers;  /* buffer_count × buffer_bytes, 4 KiB-aligned, borrowed until queue_close */
    uint32_t buffer_count; /* [0, IO_BUFFERS_MAX] */
    size_t buffer_bytes;
    const struct kv_alloc *alloc;
};

struct io_file_info {
    uint64_t size_bytes;
    uint64_t stored_bytes; /* that it takes on the disk: less than its size where it has holes */
    int is_regular;
    int is_symlink;
    int is_direct; /* O_DIRECT really set; by descriptor only */
};

struct io_door {
    const char *name; /* what it does when nothing stands in its way: "io_uring", "posix" */
    void *context;
    int (*open)(void *context, int dir, const char *name, int flags, int *file_out);
    int (*close)(void *context, int file);
    int (*make_dir)(void *context, int dir, const char *name); /* 0700 */
    int (*rename)(void *context, int dir, const char *from, const char *to);
    int (*remove)(void *context, int dir, const char *name);
    int (*info)(void *context, int file, struct io_file_info *out);
    int (*info_at)(void *context, int dir, const char *name, struct io_file_info *out);
    /* Calls `each` for every name but "." and "..", in no order; stops when it returns non-zero. */
    int (*list)(void *context, int dir, int (*each)(void *argument, const char *name),
                void *argument);
    /* Grows it, with blocks for what is new. EOPNOTSUPP possible. */
    int (*allocate)(void *context, int file, uint64_t size_bytes);
    int (*truncate)(void *context, int file, uint64_t size_bytes);
    /* Gives whole blocks back; the bytes read as zeros and the size stays. EOPNOTSUPP possible. */
    int (*punch)(void *context, int file, uint64_t off, uint64_t bytes);
    int (*free_space)(void *context, int file, uint64_t *bytes_out); /* of its file system */
    int (*read)(void *context, int file, void *bytes, size_t count, uint64_t off, size_t *done_out);
    int (*write)(void *context, int file, const void *bytes, size_t count, uint64_t off);
    int (*sync)(void *context, int file);                    /* fdatasync; fsync for a directory */
    int (*lock)(void *context, int file);                    /* exclusive, EWOULDBLOCK when held */
    int (*random)(void *context, void *bytes, size_t count); /* for the store id only */

    int (*queue_open)(void *context, const struct io_queue_options *options, struct io_queue **out);
    /* Waits until nothing is in flight or, for a stalled device, at most `timeout_ns`; ETIMEDOUT
     * says that the kernel may still use the buffers, and the queue is leaked on purpose. */
    int (*queue_close)(void *context, struct io_queue *queue, uint64_t timeout_ns);
    const char *(*queue_name)(void *context, const struct io_queue *queue);     /* in force */
    const char *(*queue_fallback)(void *context, const struct io_queue *queue); /* "" or why */
    /* EAGAIN when depth requests are in flight. */
    int (*submit)(void *context, struct io_queue *queue, const struct io_request *request);
    /* At least one completion unless nothing is in flight (0 taken) or the time is over
     * (ETIMEDOUT). */
    int (*wait)(void *context, struct io_queue *queue, uint64_t timeout_ns,
                struct io_completion *done, uint32_t room, uint32_t *taken_out);
};

/* Both never fail and own nothing. A queue of the first that the kernel refuses becomes one of the
 * second and says why. */
const struct io_door *io_uring_door(void);
const struct io_door *io_posix_door(void);
const struct io_door *io_best_door(void);

#endif
