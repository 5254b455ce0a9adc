/* tests/support_faulty_io.h - a door to the file system that breaks on request.
 *
 * Responsible for: standing in front of a real door, counting what passes, and failing, tearing,
 * stalling or dying at the k-th operation of chosen kinds; on request a power cut, in which writes
 * that were not synced are partly undone.
 * Not responsible for: LMDB's own I/O, which no door can reach.
 *
 * Threads: calls pass from any thread under one lock; arm and release from any thread; a queue
 * keeps its one owner.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_FAULTY_IO_H
#define TESTS_SUPPORT_FAULTY_IO_H

#include "store/io.h"

#include <pthread.h>

enum faulty_io_op {
    FAULTY_IO_WRITE = 1 << 0, /* a submitted or plain write */
    FAULTY_IO_READ = 1 << 1,
    FAULTY_IO_SYNC = 1 << 2,
    FAULTY_IO_SPACE = 1 << 3, /* allocate, truncate, punch */
    FAULTY_IO_NAME = 1 << 4,  /* create, make_dir, rename, remove */
    FAULTY_IO_CHANGES = FAULTY_IO_WRITE | FAULTY_IO_SYNC | FAULTY_IO_SPACE | FAULTY_IO_NAME
};

enum faulty_io_action {
    FAULTY_IO_COUNT, /* only counts */
    FAULTY_IO_FAIL,  /* the k-th gets `error`; with `lasting` all later ones too */
    FAULTY_IO_TEAR,  /* the k-th write: its first half is written, then it fails with `error` */
    FAULTY_IO_DIE,   /* instead of the k-th the process ends, as by SIGKILL */
    FAULTY_IO_TEAR_AND_DIE,
    FAULTY_IO_STALL /* the k-th submitted request waits until faulty_io_release */
};

enum { FAULTY_IO_EXIT_STATUS = 86 }; /* of the process that died here */

struct faulty_io_plan {
    enum faulty_io_action action;
    unsigned ops;  /* which operations count towards k */
    uint64_t at;   /* k, from 1 */
    int error;     /* errno for FAIL and TEAR */
    int lasting;   /* 1: every counted operation from the k-th on */
    int power_cut; /* 1: dying also undoes a random part of what was not synced */
    uint64_t seed; /* of that part */
    void (*before_exit)(void *context, uint64_t k); /* may print; NULL is allowed */
    void *context;
};

struct faulty_io_counts {
    uint64_t ops;  /* operations of the plan's kinds since arm */
    uint64_t hits; /* how often the plan struck */
    uint64_t writes, write_bytes, reads, read_bytes, syncs;
    uint64_t in_flight_max; /* submitted writes on one queue */
    uint64_t stalled;       /* requests being held now */
};

struct faulty_io; /* opaque */

/* Never fails (ends the test program when there is no memory). `under` is borrowed. */
struct faulty_io *faulty_io_make(const struct io_door *under);
void faulty_io_drop(struct faulty_io *faulty);

/* The door to give to store_options.door; valid until faulty_io_drop. */
const struct io_door *faulty_io_door(struct faulty_io *faulty);

/* Sets all counts to zero and starts the plan. */
void faulty_io_arm(struct faulty_io *faulty, const struct faulty_io_plan *plan);
void faulty_io_release(struct faulty_io *faulty); /* lets stalled requests go, disarms */
struct faulty_io_counts faulty_io_counts(struct faulty_io *faulty);
/* The power fails now, for a plan with power_cut: what was not synced is partly undone. */
void faulty_io_cut_power(struct faulty_io *faulty);
/* Waits until at least one request is being held; ends the program when none is after a minute. */
void faulty_io_await_stall(struct faulty_io *faulty);

#endif
