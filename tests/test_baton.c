/* tests/test_baton.c - who holds the baton, and who is next.
 *
 * Responsible for: one holder at a time, whoever waits longest comes first, also against a thread
 * that takes it again and again.
 * Not responsible for: what is done under it (test_serve.c).
 * Broken twins: BREAK_BATON_ORDER.
 */
#include "tools/baton.h"

#include "tests/testing.h"

#include <stdatomic.h>
#include <string.h>

enum { THREADS = 8, ROUNDS = 2000 };

struct shared {
    struct baton baton;
    uint64_t count; /* only the holder touches it */
    int order[THREADS], order_count;
    atomic_int inside, wrong, waiting;
};

struct worker {
    struct shared *shared;
    int index;
};

static void *count_main(void *context) {
    struct shared *shared = ((struct worker *)context)->shared;
    for (int i = 0; i < ROUNDS; i++) {
        baton_take(&shared->baton);
        if (atomic_fetch_add(&shared->inside, 1) != 0 || !baton_is_mine(&shared->baton))
            atomic_store(&shared->wrong, 1);
        shared->count++;
        atomic_fetch_sub(&shared->inside, 1);
        baton_give(&shared->baton);
    }
    return NULL;
}

static void one_holds_it_at_a_time(void **state) {
    (void)state;
    struct shared shared;
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    memset(&shared, 0, sizeof shared);
    baton_init(&shared.baton);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){&shared, i};
        assert_int_equal(pthread_create(&threads[i], NULL, count_main, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(shared.wrong, 0);
    assert_int_equal(shared.count, THREADS * ROUNDS);
    assert_false(baton_is_mine(&shared.baton));
    baton_release(&shared.baton);
}

static void *wait_main(void *context) {
    struct worker *worker = context;
    struct shared *shared = worker->shared;
    baton_take(&shared->baton);
    shared->order[shared->order_count++] = worker->index;
    baton_give(&shared->baton);
    return NULL;
}

/* Each in line is on its own thread's stack: where an end is another one, another has come. */
static void wait_for_another(struct baton *baton, const struct baton_waiter *first,
                             const struct baton_waiter *last) {
    int same = 1;
    while (same) {
        pthread_mutex_lock(&baton->lock);
        same = baton->first == first && baton->last == last;
        pthread_mutex_unlock(&baton->lock);
    }
}

/* Each is known to stand in line before the next one asks. */
static void who_waits_longest_is_next(void **state) {
    (void)state;
    struct shared shared;
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    memset(&shared, 0, sizeof shared);
    baton_init(&shared.baton);
    baton_take(&shared.baton);
    for (int i = 0; i < THREADS; i++) {
        const struct baton_waiter *first = shared.baton.first, *last = shared.baton.last;
        workers[i] = (struct worker){&shared, i};
        assert_int_equal(pthread_create(&threads[i], NULL, wait_main, &workers[i]), 0);
        wait_for_another(&shared.baton, first, last);
    }
    /* Giving and asking again at once: the others come first. */
    baton_give(&shared.baton);
    baton_take(&shared.baton);
    int before = shared.order_count;
    baton_give(&shared.baton);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(before, THREADS);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(shared.order[i], i);
    baton_release(&shared.baton);
}

TESTING_MAIN(cmocka_unit_test(one_holds_it_at_a_time), cmocka_unit_test(who_waits_longest_is_next))
