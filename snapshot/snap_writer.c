/* snapshot/snap_writer.c - who may write to the store.
 *
 * Responsible for: the contract of snap_writer.h.
 * Not responsible for: the queue of what is to be written (snap_spill.c).
 */
#include "snapshot/snap_writer.h"

#include "store/base/clock.h"

#include <time.h>

static const uint64_t second_ns = 1000000000;

void snap_writer_init(struct snap_writer *writer) {
    pthread_condattr_t monotonic;
    *writer = (struct snap_writer){.asked = 0};
    pthread_mutex_init(&writer->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&writer->moved, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void snap_writer_release(struct snap_writer *writer) {
    pthread_cond_destroy(&writer->moved);
    pthread_mutex_destroy(&writer->lock);
}

/* The lock is held. */
static void take(struct snap_writer *writer) {
    uint64_t turn = writer->asked++;
    while (writer->served != turn)
        pthread_cond_wait(&writer->moved, &writer->lock);
}

/* The lock is held. */
static void give(struct snap_writer *writer) {
    writer->served++;
    pthread_cond_broadcast(&writer->moved);
}

void snap_writer_take(struct snap_writer *writer) {
    pthread_mutex_lock(&writer->lock);
    take(writer);
    pthread_mutex_unlock(&writer->lock);
}

int snap_writer_try(struct snap_writer *writer) {
    pthread_mutex_lock(&writer->lock);
    int taken = writer->asked == writer->served;
    if (taken)
        writer->asked++;
    pthread_mutex_unlock(&writer->lock);
    return taken;
}

void snap_writer_give(struct snap_writer *writer) {
    pthread_mutex_lock(&writer->lock);
    give(writer);
    pthread_mutex_unlock(&writer->lock);
}

void snap_writer_want(struct snap_writer *writer, int change) {
    pthread_mutex_lock(&writer->lock);
    writer->wanted += (uint32_t)change;
    pthread_cond_broadcast(&writer->moved);
    pthread_mutex_unlock(&writer->lock);
}

int snap_writer_lend(struct snap_writer *writer) {
    int late = 0;
    pthread_mutex_lock(&writer->lock);
    int anybody = writer->asked - writer->served > 1 || writer->wanted > 0;
#ifdef BREAK_WRITER_LEND
    anybody = 0;
#endif
    if (anybody) {
        uint64_t until_ns = kv_clock_now_ns(kv_clock_system()) + second_ns;
        const struct timespec until = {(time_t)(until_ns / second_ns),
                                       (long)(until_ns % second_ns)};
        give(writer);
        /* One that wants it may have to wait to be the scheduler thread again, but not for ever. */
        while (writer->wanted > 0 && !late)
            late = pthread_cond_timedwait(&writer->moved, &writer->lock, &until) != 0;
        take(writer);
    }
    pthread_mutex_unlock(&writer->lock);
    return anybody;
}
