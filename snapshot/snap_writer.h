/* snapshot/snap_writer.h - who may write to the store.
 *
 * Responsible for: one holder at a time, in the order of asking; lending it to all who want it.
 * Not responsible for: what is written.
 *
 * The scheduler thread never waits for it as such (snap_spill_writer_take): it says that it wants
 * it, waits while others are the scheduler thread, and tries again.
 *
 * Threads: any.
 * Units: turns.
 */
#ifndef SNAPSHOT_SNAP_WRITER_H
#define SNAPSHOT_SNAP_WRITER_H

#include <pthread.h>
#include <stdint.h>

struct snap_writer {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t asked, served; /* turns; the one that is served is held when it was asked for */
    uint32_t wanted;        /* of the scheduler's threads, between two tries */
};

void snap_writer_init(struct snap_writer *writer);
void snap_writer_release(struct snap_writer *writer);
void snap_writer_take(struct snap_writer *writer);
/* 0: somebody has it or waits for it. */
int snap_writer_try(struct snap_writer *writer);
void snap_writer_give(struct snap_writer *writer);
void snap_writer_want(struct snap_writer *writer, int change);
/* The holder gives it to everybody who waits for it or wants it now, and has it again. 1 when there
 * was anybody. */
int snap_writer_lend(struct snap_writer *writer);

#endif
