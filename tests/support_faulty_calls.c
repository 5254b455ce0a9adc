/* tests/support_faulty_calls.c - system calls that are interrupted and move less than asked.
 *
 * Responsible for: the contract of support_faulty_calls.h.
 * Not responsible for: what a caller makes of it.
 */
#include "tests/support_faulty_calls.h"

#include <errno.h>
#include <liburing.h>
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

/* --- io_uring */

int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);
int __real_io_uring_wait_cqe_timeout(struct io_uring *ring, struct io_uring_cqe **cqe,
                                     struct __kernel_timespec *timeout);
int __wrap_io_uring_wait_cqe_timeout(struct io_uring *ring, struct io_uring_cqe **cqe,
                                     struct __kernel_timespec *timeout);

/* Cuts what stands on the ring and has not been handed over. */
int __wrap_io_uring_submit(struct io_uring *ring) {
    if (is_interrupted())
        return -EINTR;
    for (unsigned at = ring->sq.sqe_head; at != ring->sq.sqe_tail; at++) {
        struct io_uring_sqe *entry = &ring->sq.sqes[at & ring->sq.ring_mask];
        if (entry->opcode != IORING_OP_NOP)
            entry->len = (unsigned)cut_short(entry->len);
    }
    return __real_io_uring_submit(ring);
}

int __wrap_io_uring_wait_cqe_timeout(struct io_uring *ring, struct io_uring_cqe **cqe,
                                     struct __kernel_timespec *timeout) {
    return is_interrupted() ? -EINTR : __real_io_uring_wait_cqe_timeout(ring, cqe, timeout);
}
