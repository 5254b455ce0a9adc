/* store/io_files.c - plain file calls behind the door.
 *
 * Responsible for: never following a symbolic link, continuing interrupted and partial transfers.
 * Not responsible for: queues, and what a failure means.
 */
#include "store/io_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#ifdef BREAK_LINKS
enum { NOFOLLOW = 0 };
#else
enum { NOFOLLOW = O_NOFOLLOW };
#endif

/* O_NONBLOCK keeps open from waiting for the other end of a planted pipe; on a file it must go
 * again, since io_uring would then give back EAGAIN instead of waiting. */
static int check_opened(int file) {
    struct stat info;
    int flags = fcntl(file, F_GETFL);
    if (flags < 0 || fcntl(file, F_SETFL, flags & ~O_NONBLOCK) != 0 || fstat(file, &info) != 0)
        return errno;
    return S_ISREG(info.st_mode) || S_ISDIR(info.st_mode) ? 0 : ENOTSUP;
}

int io_files_open(void *context, int dir, const char *name, int flags, int *file_out) {
    (void)context;
    int how = O_CLOEXEC | O_NONBLOCK | NOFOLLOW | ((flags & IO_WRITE) != 0 ? O_RDWR : O_RDONLY);
    if ((flags & IO_CREATE) != 0)
        how |= O_CREAT;
    if ((flags & IO_EXCLUSIVE) != 0)
        how |= O_EXCL;
    if ((flags & IO_DIRECT) != 0)
        how |= O_DIRECT;
    if ((flags & IO_DIRECTORY) != 0)
        how |= O_DIRECTORY;
    int file;
    do
        file = openat(dir, name, how, 0600);
    while (file < 0 && errno == EINTR);
    if (file < 0)
        return errno;
    int error = check_opened(file);
    if (error == 0)
        *file_out = file;
    else
        close(file);
    return error;
}

int io_files_close(void *context, int file) {
    (void)context;
    /* EINTR: Linux has closed the descriptor all the same. */
    return close(file) == 0 || errno == EINTR ? 0 : errno;
}

int io_files_make_dir(void *context, int dir, const char *name) {
    (void)context;
    return mkdirat(dir, name, 0700) == 0 ? 0 : errno;
}

int io_files_rename(void *context, int dir, const char *from, const char *to) {
    (void)context;
    return renameat(dir, from, dir, to) == 0 ? 0 : errno;
}

int io_files_remove(void *context, int dir, const char *name) {
    (void)context;
    if (unlinkat(dir, name, 0) == 0)
        return 0;
    if (errno == EISDIR || errno == EPERM)
        return unlinkat(dir, name, AT_REMOVEDIR) == 0 ? 0 : errno;
    return errno;
}

static void describe(const struct stat *stat, struct io_file_info *out) {
    *out = (struct io_file_info){
        .size_bytes = (uint64_t)stat->st_size,
        .stored_bytes = (uint64_t)stat->st_blocks * 512,
        .is_regular = S_ISREG(stat->st_mode),
        .is_symlink = S_ISLNK(stat->st_mode),
    };
}

int io_files_info(void *context, int file, struct io_file_info *out) {
    (void)context;
    struct stat stat;
    if (fstat(file, &stat) != 0)
        return errno;
    describe(&stat, out);
    int flags = fcntl(file, F_GETFL);
    if (flags < 0)
        return errno;
    out->is_direct = (flags & O_DIRECT) != 0;
    return 0;
}

int io_files_info_at(void *context, int dir, const char *name, struct io_file_info *out) {
    (void)context;
    struct stat stat;
    if (fstatat(dir, name, &stat, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    describe(&stat, out);
    return 0;
}

int io_files_list(void *context, int dir, int (*each)(void *argument, const char *name),
                  void *argument) {
    (void)context;
    /* Opened anew: a duplicate would share the position of the caller's descriptor. */
    int file = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0)
        return errno;
    DIR *list = fdopendir(file);
    if (list == NULL) {
        int error = errno;
        close(file);
        return error;
    }
    errno = 0;
    for (struct dirent *item; (item = readdir(list)) != NULL; errno = 0) {
        if (strcmp(item->d_name, ".") == 0 || strcmp(item->d_name, "..") == 0)
            continue;
        if (each(argument, item->d_name) != 0) {
            errno = 0;
            break;
        }
    }
    int error = errno;
    closedir(list);
    return error;
}

int io_files_allocate(void *context, int file, uint64_t size_bytes) {
    (void)context;
    struct stat stat;
    int result;
    if (fstat(file, &stat) != 0)
        return errno;
    /* From its end: what is a hole in front of it stays one. */
    off_t end = stat.st_size;
#ifdef BREAK_PUNCH_FILLED
    end = 0;
#endif
    if ((uint64_t)end >= size_bytes)
        return 0;
    do
        result = fallocate(file, 0, end, (off_t)size_bytes - end);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

int io_files_truncate(void *context, int file, uint64_t size_bytes) {
    (void)context;
    int result;
    do
        result = ftruncate(file, (off_t)size_bytes);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

int io_files_punch(void *context, int file, uint64_t off, uint64_t bytes) {
    (void)context;
    int result;
    do
        result =
            fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off, (off_t)bytes);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

int io_files_free_space(void *context, int file, uint64_t *bytes_out) {
    (void)context;
    struct statvfs disk;
    if (fstatvfs(file, &disk) != 0)
        return errno;
    *bytes_out = (uint64_t)disk.f_bavail * disk.f_frsize;
    return 0;
}

int io_files_transfer(const struct io_request *request, uint64_t *done_out) {
    uint64_t done = 0;
    int error = 0;
    while (done < request->count) {
        size_t take = request->count - (size_t)done;
        if (take > IO_FILES_CALL_BYTES_MAX)
            take = IO_FILES_CALL_BYTES_MAX;
        char *at = (char *)request->bytes + done;
        off_t off = (off_t)(request->off + done);
        ssize_t moved = request->write ? pwrite(request->file, at, take, off)
                                       : pread(request->file, at, take, off);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            error = errno;
        else if (moved == 0 && request->write)
            error = EIO;
        if (moved <= 0)
            break;
        done += (uint64_t)moved;
        if (!request->write && moved % IO_FILES_SECTOR_BYTES != 0)
            break;
    }
    *done_out = done;
    return error;
}

int io_files_read(void *context, int file, void *bytes, size_t count, uint64_t off,
                  size_t *done_out) {
    (void)context;
    struct io_request request = {.file = file, .bytes = bytes, .count = count, .off = off};
    uint64_t done = 0;
    int error = io_files_transfer(&request, &done);
    if (error == 0)
        *done_out = (size_t)done;
    return error;
}

int io_files_write(void *context, int file, const void *bytes, size_t count, uint64_t off) {
    (void)context;
    struct io_request request = {
        .file = file, .write = 1, .bytes = (void *)(uintptr_t)bytes, .count = count, .off = off};
    uint64_t done = 0;
    return io_files_transfer(&request, &done);
}

int io_files_sync(void *context, int file) {
    (void)context;
    struct stat stat;
    if (fstat(file, &stat) != 0)
        return errno;
    /* A directory's entries are not "data" to every file system. */
    int result;
    do
        result = S_ISDIR(stat.st_mode) ? fsync(file) : fdatasync(file);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

int io_files_lock(void *context, int file) {
    (void)context;
    return flock(file, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
}

int io_files_random(void *context, void *bytes, size_t count) {
    (void)context;
    /* Up to 256 bytes come whole or not at all. */
    if (count > 256)
        return EINVAL;
    /* tidy-allow: random an id that no other store has cannot come from a seed */
    ssize_t got = getrandom(bytes, count, 0);
    if (got < 0)
        return errno;
    return (size_t)got == count ? 0 : EIO;
}
