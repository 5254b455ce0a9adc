/* tests/test_workers.c - items are shared out over threads, each exactly once.
 *
 * Responsible for: every item once for many counts, grains and thread counts, run after run; writes
 * visible to the owner; thread limits.
 * Not responsible for: speed.
 */
#include "engine/device/workers.h"

#include "tests/testing.h"

#include <string.h>

enum { ITEMS_MAX = 5000 };

struct work {
    uint32_t done[ITEMS_MAX];
    uint32_t grain, threads;
};

static void count_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    struct work *work = context;

    assert_true(first < end && end <= ITEMS_MAX && thread < work->threads);
    for (uint32_t i = first; i < end; i++)
        work->done[i]++;
}

/* BREAK_LAST_PART leaves the last items out. */
static void every_item_once(void **state) {
    static struct work work;
    struct testing_random random;

    (void)state;
    testing_random_init(&random, testing_seed("items", 4));
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct workers *workers = NULL;
        assert_int_equal(workers_make(kv_alloc_system(), threads, &workers, NULL), KV_OK);
        work.threads = threads;
        for (uint32_t round = 0; round < 2000; round++) {
            uint32_t items =
                (uint32_t)testing_random_below(&random, round % 10 ? 50 : ITEMS_MAX + 1);
            memset(work.done, 0, sizeof work.done);
            workers_run(workers, items, 1 + (uint32_t)testing_random_below(&random, 9), count_items,
                        &work);
            for (uint32_t i = 0; i < ITEMS_MAX; i++)
                if (work.done[i] != (i < items))
                    fail_msg("item %u of %u done %u times", i, items, work.done[i]);
        }
        workers_drop(workers);
    }
}

static void limits_are_named(void **state) {
    struct workers *workers = NULL;
    struct testing_alloc alloc;
    struct kv_diag diag = {""};

    (void)state;
    assert_int_equal(workers_make(kv_alloc_system(), 0, &workers, &diag), KV_ERR_INVALID);
    assert_non_null(strstr(diag.text, "256"));
    assert_int_equal(workers_make(kv_alloc_system(), 257, &workers, &diag), KV_ERR_INVALID);
    for (uint64_t k = 1; k <= 2; k++) {
        testing_alloc_init(&alloc, k);
        assert_int_equal(workers_make(&alloc.alloc, 3, &workers, &diag), KV_ERR_NOMEM);
        assert_int_equal(alloc.live_count, 0);
    }
    assert_null(workers);
}

TESTING_MAIN(cmocka_unit_test(every_item_once), cmocka_unit_test(limits_are_named))
