/* tests/test_read_help.c - every item given is worked off once and comes back once.
 *
 * Responsible for: the bound of the ring, the reading thread stepping in, order, the end.
 * Not responsible for: what the work is (test_store_read.c).
 */
#include "store/read_help.h"

#include "tests/testing.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>

enum { ITEMS = 1000 };

struct job {
    pthread_mutex_t gate; /* held: the helper stands still inside its work */
    int gated;
    atomic_uint worked[ITEMS];
    int thread[ITEMS];
    int priority[READ_HELP_THREADS_MAX + 1];
    int meet; /* 1: they wait for each other inside the work */
    pthread_barrier_t all;
    atomic_uint met[READ_HELP_THREADS_MAX + 1];
};

static void work(void *context, size_t index, int thread) {
    struct job *job = context;
    job->priority[thread] = getpriority(PRIO_PROCESS, 0);
    if (thread != 0 && job->gated) {
        pthread_mutex_lock(&job->gate);
        pthread_mutex_unlock(&job->gate);
    }
    if (job->meet != 0)
        pthread_barrier_wait(&job->all);
    atomic_fetch_add(&job->met[thread], 1);
    job->worked[index]++;
    job->thread[index] = thread;
}

static void all_back_once(uint32_t threads) {
    static struct job job;
    unsigned back[ITEMS] = {0};
    size_t index;
    struct read_help help;
    memset(&job, 0, sizeof job);
    assert_int_equal(read_help_start(&help, threads, work, &job), threads);
    for (size_t i = 0; i < ITEMS; i++) {
        while (!read_help_give(&help, i)) {
            if (read_help_take(&help, 0, &index))
                back[index]++;
        }
    }
    while (read_help_take(&help, 1, &index))
        back[index]++;
    for (size_t i = 0; i < ITEMS; i++) {
        assert_int_equal(back[i], 1);
        assert_int_equal(job.worked[i], 1);
    }
    assert_int_equal(read_help_take(&help, 0, &index), 0);
    read_help_stop(&help);
    read_help_stop(&help);
    int own = getpriority(PRIO_PROCESS, 0); /* higher is later, 19 the last; twin: BREAK_POLITE */
    for (uint32_t i = 1; i <= threads; i++)
        if (job.met[i] != 0)
            assert_true(job.priority[i] > own || own == 19);
}

static void all_come_back_once(void **state) {
    (void)state;
    all_back_once(1);
    all_back_once(5);
    all_back_once(READ_HELP_THREADS_MAX);
}

/* As many are at work at once as were started, each under a number of its own: they wait for each
 * other inside the work. Twin: BREAK_HELP_SEAT. */
static void helpers_work_beside(void **state) {
    (void)state;
    enum { HELPERS = 4 };
    static struct job job;
    struct read_help help;
    size_t index;
    memset(&job, 0, sizeof job);
    job.meet = 1;
    pthread_barrier_init(&job.all, NULL, HELPERS);
    assert_int_equal(read_help_start(&help, HELPERS, work, &job), HELPERS);
    for (size_t i = 0; i < HELPERS; i++)
        assert_int_equal(read_help_give(&help, i), 1);
    for (unsigned waiting = HELPERS; waiting != 0;) {
        waiting -= (unsigned)read_help_take(&help, 0, &index);
        sched_yield();
    }
    for (int i = 1; i <= HELPERS; i++)
        assert_int_equal(job.met[i], 1);
    read_help_stop(&help);
    pthread_barrier_destroy(&job.all);
}

/* A helper that stands still: the ring takes as many as it says, then this thread works. */
static void full_ring_is_helped(void **state) {
    (void)state;
    static struct job job;
    size_t index = SIZE_MAX;
    struct read_help help;
    memset(&job, 0, sizeof job);
    job.gated = 1;
    pthread_mutex_init(&job.gate, NULL);
    pthread_mutex_lock(&job.gate);
    assert_int_equal(read_help_start(&help, 1, work, &job), 1);
    for (size_t i = 0; i < READ_HELP_ITEMS_MAX; i++)
        assert_int_equal(read_help_give(&help, i), 1);
    assert_int_equal(read_help_give(&help, READ_HELP_ITEMS_MAX), 0);
    assert_int_equal(read_help_take(&help, 0, &index), 1);
    assert_int_equal(job.worked[index], 1);
    assert_int_equal(job.thread[index], 0);
    assert_true(index <= 1); /* the oldest that the helper has not in hand */
    assert_int_equal(read_help_give(&help, READ_HELP_ITEMS_MAX), 1);
    pthread_mutex_unlock(&job.gate);
    unsigned count = 1;
    while (read_help_take(&help, 1, &index))
        count++;
    assert_int_equal(count, READ_HELP_ITEMS_MAX + 1);
    for (size_t i = 0; i <= READ_HELP_ITEMS_MAX; i++)
        assert_int_equal(job.worked[i], 1);
    read_help_stop(&help);
    pthread_mutex_destroy(&job.gate);
}

static void nothing_started_stops(void **state) {
    (void)state;
    struct read_help help = {0};
    read_help_stop(&help);
    assert_int_equal(help.running, 0);
}

TESTING_MAIN(cmocka_unit_test(all_come_back_once), cmocka_unit_test(helpers_work_beside),
             cmocka_unit_test(full_ring_is_helped), cmocka_unit_test(nothing_started_stops))
