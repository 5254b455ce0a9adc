/* tools/baton.c - a lock whose holder is the engine's scheduler thread.
 *
 * Responsible for: handing over to the one that has waited longest. A plain mutex would let a
 * thread that steps in a loop take it again and again.
 * Not responsible for: anything under the lock.
 */
#include "tools/baton.h"

#include <assert.h>
#include <string.h>

struct baton_waiter {
    struct baton_waiter *next;
    pthread_t thread;
    pthread_cond_t turn;
    int mine;
};

void baton_init(struct baton *baton) {
    memset(baton, 0, sizeof *baton);
    pthread_mutex_init(&baton->lock, NULL);
}

void baton_release(struct baton *baton) {
    assert(!baton->held && baton->first == NULL);
    pthread_mutex_destroy(&baton->lock);
}

static void hold(struct baton *baton, pthread_t thread) {
    baton->held = 1;
    baton->holder = thread;
}

static void wait_in_line(struct baton *baton) {
    struct baton_waiter self = {.thread = pthread_self()};
    pthread_cond_init(&self.turn, NULL);
#ifdef BREAK_BATON_ORDER
    self.next = baton->first;
    baton->first = &self;
    if (baton->last == NULL)
        baton->last = &self;
#else
    if (baton->last != NULL)
        baton->last->next = &self;
    else
        baton->first = &self;
    baton->last = &self;
#endif
    while (!self.mine)
        pthread_cond_wait(&self.turn, &baton->lock);
    pthread_cond_destroy(&self.turn);
}

void baton_take(struct baton *baton) {
    pthread_mutex_lock(&baton->lock);
    assert(!baton->held || !pthread_equal(baton->holder, pthread_self()));
    if (baton->held)
        wait_in_line(baton);
    else
        hold(baton, pthread_self());
    pthread_mutex_unlock(&baton->lock);
}

/* The next in line holds it before this call returns: nobody gets in between. */
void baton_give(struct baton *baton) {
    pthread_mutex_lock(&baton->lock);
    assert(baton->held && pthread_equal(baton->holder, pthread_self()));
    struct baton_waiter *next = baton->first;
    baton->held = 0;
    if (next != NULL) {
        baton->first = next->next;
        if (baton->first == NULL)
            baton->last = NULL;
        hold(baton, next->thread);
        next->mine = 1;
        pthread_cond_signal(&next->turn);
    }
    pthread_mutex_unlock(&baton->lock);
}

int baton_is_mine(struct baton *baton) {
    pthread_mutex_lock(&baton->lock);
    int mine = baton->held && pthread_equal(baton->holder, pthread_self());
    pthread_mutex_unlock(&baton->lock);
    return mine;
}
