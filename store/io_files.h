/* store/io_files.h - what both doors to the file system share.
 *
 * Responsible for: the plain file calls of io.h, the transfer loop, the base of every queue.
 * Not responsible for: queues themselves (io_uring.c, io_posix.c).
 *
 * Threads: pure calls; see io.h.
 * Units: bytes.
 */
#ifndef STORE_IO_FILES_H
#define STORE_IO_FILES_H

#include "store/io.h"

/* First member of every implementation's queue. */
struct io_queue {
    char fallback[160];
};

/* One system call moves at most this much: the kernel stops at 0x7ffff000. */
#define IO_FILES_CALL_BYTES_MAX ((size_t)1 << 30)

/* A read that ended in the middle of a sector has met the end of the file: going on from there
 * would be refused with O_DIRECT. */
enum { IO_FILES_SECTOR_BYTES = 512 };

/* The file calls of io.h, for the tables of both doors. */
int io_files_open(void *context, int dir, const char *name, int flags, int *file_out);
int io_files_close(void *context, int file);
int io_files_make_dir(void *context, int dir, const char *name);
int io_files_rename(void *context, int dir, const char *from, const char *to);
int io_files_remove(void *context, int dir, const char *name);
int io_files_info(void *context, int file, struct io_file_info *out);
int io_files_info_at(void *context, int dir, const char *name, struct io_file_info *out);
int io_files_list(void *context, int dir, int (*each)(void *argument, const char *name),
                  void *argument);
int io_files_allocate(void *context, int file, uint64_t size_bytes);
int io_files_truncate(void *context, int file, uint64_t size_bytes);
int io_files_punch(void *context, int file, uint64_t off, uint64_t bytes);
int io_files_free_space(void *context, int file, uint64_t *bytes_out);
int io_files_read(void *context, int file, void *bytes, size_t count, uint64_t off,
                  size_t *done_out);
int io_files_write(void *context, int file, const void *bytes, size_t count, uint64_t off);
int io_files_sync(void *context, int file);
int io_files_lock(void *context, int file);
int io_files_random(void *context, void *bytes, size_t count);
#define IO_FILES_CALLS                                                                             \
    .open = io_files_open, .close = io_files_close, .make_dir = io_files_make_dir,                 \
    .rename = io_files_rename, .remove = io_files_remove, .info = io_files_info,                   \
    .info_at = io_files_info_at, .list = io_files_list, .allocate = io_files_allocate,             \
    .truncate = io_files_truncate, .punch = io_files_punch, .free_space = io_files_free_space,     \
    .read = io_files_read, .write = io_files_write, .sync = io_files_sync, .lock = io_files_lock,  \
    .random = io_files_random

/* Moves all of it, continuing after interrupted and partial calls. A read may end early at the end
 * of the file. Returns 0 or errno. */
int io_files_transfer(const struct io_request *request, uint64_t *done_out);

#endif
