/* store/read_help.h - a second thread that unzips and digests behind the reading one.
 *
 * Responsible for: a bounded ring of extents that have arrived, worked off in order by one thread
 * of its own and, where it falls behind, by the reading thread; handing back what is over.
 * Not responsible for: the work itself (store_read.c).
 *
 * Threads: all calls from the reading thread; `work` runs on either.
 * Units: none.
 */
#ifndef STORE_READ_HELP_H
#define STORE_READ_HELP_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { READ_HELP_ITEMS_MAX = 16 };

/* `thread` is 0 on the reading thread and 1 on the helper. */
typedef void (*read_help_work)(void *context, size_t index, int thread);

struct read_help { /* zero: there is no helper */
    read_help_work work;
    void *context;
    int running;
    pthread_t thread;
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t given, over;
    size_t todo[READ_HELP_ITEMS_MAX];
    uint32_t todo_first, todo_count;
    size_t done[READ_HELP_ITEMS_MAX];
    uint32_t done_first, done_count;
    uint32_t busy; /* items that the helper has in hand: 0 or 1 */
    int closed;
};

/* 0 when the system gives no thread: then the caller does all work itself. */
int read_help_start(struct read_help *help, read_help_work work, void *context);
/* Waits for the helper's end; nothing may be in its hands. Safe on one that never started. */
void read_help_stop(struct read_help *help);

/* 1: taken. 0: the ring is full; take one back with read_help_take and try again. */
int read_help_give(struct read_help *help, size_t index);
/* The next item that is over, worked off by this thread where the helper has not begun with it
 * and `wait` is set or the ring is full. 0 when there is none, with `wait` only when the ring is
 * empty. */
int read_help_take(struct read_help *help, int wait, size_t *index_out);

#endif
