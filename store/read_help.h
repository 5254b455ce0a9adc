/* store/read_help.h - threads that unzip and digest behind the reading one.
 *
 * Responsible for: a bounded ring of extents that have arrived, begun in order by threads of its
 * own and, where they fall behind, by the reading thread; handing back what is over.
 * Not responsible for: the work itself (store_read.c).
 *
 * Threads: all calls from the reading thread; `work` runs on any of them, and on threads that let
 * whoever computes go first (store/base/polite.h).
 * Units: none.
 */
#ifndef STORE_READ_HELP_H
#define STORE_READ_HELP_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { READ_HELP_ITEMS_MAX = 128, READ_HELP_THREADS_MAX = 16 };

/* `thread` is 0 on the reading thread, 1 … `running` on the helpers. */
typedef void (*read_help_work)(void *context, size_t index, int thread);

struct read_help { /* zero: there is no helper */
    read_help_work work;
    void *context;
    uint32_t running; /* helpers */
    pthread_t threads[READ_HELP_THREADS_MAX];
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t given, over;
    size_t todo[READ_HELP_ITEMS_MAX];
    uint32_t todo_first, todo_count;
    size_t done[READ_HELP_ITEMS_MAX];
    uint32_t done_first, done_count;
    uint32_t busy;   /* items that helpers have in hand */
    uint32_t seated; /* helpers that know their number */
    int closed;
};

/* Starts `threads` helpers, 1 … READ_HELP_THREADS_MAX, or as many as the system gives: returns how
 * many. With 0 the caller does all work itself. */
uint32_t read_help_start(struct read_help *help, uint32_t threads, read_help_work work,
                         void *context);
/* Waits for the helpers' end; nothing may be in their hands. Safe on one that never started. */
void read_help_stop(struct read_help *help);

/* 1: taken. 0: the ring is full; take one back with read_help_take and try again. */
int read_help_give(struct read_help *help, size_t index);
/* The next item that is over; with `wait`, or a full ring, it is waited for. Beside a single helper
 * this thread works one off that the helper has not begun; of several one is over sooner than that,
 * and meanwhile nothing would be read. 0 when there is none, with `wait` only when the ring is
 * empty. */
int read_help_take(struct read_help *help, int wait, size_t *index_out);

#endif
