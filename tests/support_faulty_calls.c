/* tests/support_faulty_calls.c - system calls that are interrupted and move less than asked.
 *
 * Responsible for: the contract of support_faulty_calls.h.
 * Not responsible for: what a caller makes of it.
 */
#include "tests/support_faulty_calls.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/types.h>

static atomic_size_t bytes_most;
static atomic_ullong calls, interrupted, cut;

ssize_t __real_pread(int file, void *bytes, size_t count, off_t off);
ssize_t __real_pwrite(int file, const void *bytes, size_t count, off_t off);
int __real_fdatasync(int file);
ssize_t __wrap_pread(int file, void *bytes, size_t count, off_t off);
ssize_t __wrap_pwrite(int file, const void *bytes, size_t count, off_t off);
int __wrap_fdatasync(int file);

void faulty_calls_arm(size_t bytes_max) {
    atomic_store(&bytes_most, bytes_max);
    atomic_store(&calls, 0);
    atomic_store(&interrupted, 0);
    atomic_store(&cut, 0);
}

struct faulty_calls_counts faulty_calls_counts(void) {
    return (struct faulty_calls_counts){atomic_load(&interrupted), atomic_load(&cut)};
}

static int is_interrupted(void) {
    if (atomic_load(&bytes_most) == 0 || atomic_fetch_add(&calls, 1) % 2 != 0)
        return 0;
    atomic_fetch_add(&interrupted, 1);
    errno = EINTR;
    return 1;
}

static size_t cut_short(size_t count) {
    size_t most = atomic_load(&bytes_most);
    if (most == 0 || count <= most)
        return count;
    atomic_fetch_add(&cut, 1);
    return most;
}

ssize_t __wrap_pread(int file, void *bytes, size_t count, off_t off) {
    return is_interrupted() ? -1 : __real_pread(file, bytes, cut_short(count), off);
}

ssize_t __wrap_pwrite(int file, const void *bytes, size_t count, off_t off) {
    return is_interrupted() ? -1 : __real_pwrite(file, bytes, cut_short(count), off);
}

int __wrap_fdatasync(int file) {
    return is_interrupted() ? -1 : __real_fdatasync(file);
}
