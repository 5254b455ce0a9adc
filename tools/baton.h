/* tools/baton.h - a lock whose holder is the engine's scheduler thread.
 *
 * Responsible for: one holder at a time, in the order of asking.
 * Not responsible for: what the holder may do (service.h).
 *
 * Threads: any. A thread that holds it does not ask again.
 * Units: none.
 */
#ifndef TOOLS_BATON_H
#define TOOLS_BATON_H

#include <pthread.h>

struct baton_waiter;
struct baton {
    pthread_mutex_t lock;
    struct baton_waiter *first, *last; /* in the order of asking; each on its thread's stack */
    pthread_t holder;
    int held;
};

void baton_init(struct baton *baton);
void baton_release(struct baton *baton); /* nobody holds it or waits */
void baton_take(struct baton *baton);
void baton_give(struct baton *baton);
/* 1 when the calling thread is the holder. */
int baton_is_mine(struct baton *baton);

#endif
