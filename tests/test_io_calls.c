/* tests/test_io_calls.c - both doors over calls that are interrupted and move too little.
 *
 * Responsible for: a store whose every second call is interrupted and whose transfers come in
 * pieces of 4 KiB, 512 or 1,536 bytes is the same store.
 * Not responsible for: errors (test_store_batch.c, sweep.c).
 */
#include "store/io.h"
#include "store/store.h"
#include "tests/support_faulty_calls.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>

static void a_store_over(const struct io_door *door, size_t bytes_max, int direct) {
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.door = door;
    options.direct_wanted = direct;
    faulty_calls_arm(bytes_max);
    struct store *store = support_store_open(&options);
    for (unsigned i = 0; i < 12; i += 4)
        assert_int_equal(support_store_commit(store, i, i + 4, 1, NULL), KV_OK);
    store_close(store);
    support_store_remove_index(dir);
    store = support_store_open(&options);
    for (unsigned i = 0; i < 12; i++)
        assert_true(support_store_matches(store, i, 1, i % 2));
    struct faulty_calls_counts counts = faulty_calls_counts();
    faulty_calls_arm(0);
    for (unsigned i = 0; i < 12; i++)
        assert_true(support_store_matches(store, i, 1, i % 2));
    store_close(store);
    printf("%s, pieces of %zu bytes: %llu calls interrupted, %llu cut short\n", door->name,
           bytes_max, (unsigned long long)counts.interrupted, (unsigned long long)counts.cut);
    assert_true(counts.interrupted > 10 && counts.cut > 10);
}

static void pages(void **state) {
    (void)state;
    a_store_over(io_uring_door(), 4096, 1);
    a_store_over(io_posix_door(), 4096, 1);
}

static void sectors(void **state) {
    (void)state;
    a_store_over(io_uring_door(), 512, 0);
    a_store_over(io_posix_door(), 512, 0);
}

static void three_sectors(void **state) {
    (void)state;
    a_store_over(io_uring_door(), 1536, 0);
    a_store_over(io_posix_door(), 1536, 0);
}

TESTING_MAIN(cmocka_unit_test(pages), cmocka_unit_test(sectors), cmocka_unit_test(three_sectors))
