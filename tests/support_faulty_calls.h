/* tests/support_faulty_calls.h - system calls that are interrupted and move less than asked.
 *
 * Responsible for: standing in front of pread, pwrite, fdatasync and, of io_uring, submitting and
 * waiting (the linker sends them here: --wrap, see Makefile): every second call is interrupted, the
 * others move at most so many bytes; a request on the ring is cut before the kernel sees it.
 * Not responsible for: what a caller makes of it.
 *
 * Threads: any; armed by the main thread.
 * Units: bytes, calls.
 */
#ifndef TESTS_SUPPORT_FAULTY_CALLS_H
#define TESTS_SUPPORT_FAULTY_CALLS_H

#include <stddef.h>
#include <stdint.h>

/* `bytes_max` 0: nothing is done to any call. */
void faulty_calls_arm(size_t bytes_max);
struct faulty_calls_counts {
    uint64_t interrupted, cut;
};
struct faulty_calls_counts faulty_calls_counts(void);

#endif
