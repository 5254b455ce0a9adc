/* tests/test_store_bench.c - the benchmark measures what it says, or fails.
 *
 * Responsible for: figures with bytes behind them, depth, truth about door and O_DIRECT, no
 * remains.
 * Not responsible for: the figures themselves.
 * Broken twins: BREAK_BENCH_RANGE.
 */
#include "store/store_bench.h"

#include "store/io.h"
#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct store_bench_options bench_options(const char *dir) {
    return (struct store_bench_options){.store = store_options_usual(dir, "bench"),
                                        .total_bytes = (uint64_t)96 << 20,
                                        .extent_bytes = 1 << 20,
                                        .batch_bytes = 16 << 20,
                                        .seed = 7};
}

/* Fails with BREAK_BENCH_RANGE. */
static void measures_both_doors(void **state) {
    (void)state;
    for (int door = 0; door < 2; door++) {
        char parent[TESTING_PATH_BYTES];
        char dir[400];
        struct store_bench_result result;
        struct kv_diag diag = {""};
        testing_temp_dir(parent);
        snprintf(dir, sizeof dir, "%s/bench", parent);
        struct store_bench_options options = bench_options(dir);
        options.store.door = door == 0 ? io_uring_door() : io_posix_door();
        assert_int_equal(store_bench(&options, &result, &diag), KV_OK);
        assert_int_equal(result.write.bytes, (uint64_t)192 << 20);
        assert_int_equal(result.read.bytes, result.write.bytes);
        assert_int_equal(result.read_check.bytes, result.write.bytes);
        assert_int_equal(result.plain_read.bytes, result.write.bytes);
        assert_true(result.write.in_flight_max >= 8);
        assert_int_equal(result.pairs, 12);
        /* Five batches to a pair; each had one commit and each segment one fdatasync. */
        assert_int_equal(result.batches, 5 * 12);
        assert_int_equal(result.index_commits, result.batches);
        assert_true(result.segments > result.batches);
        assert_int_equal(result.syncs, result.segments);
        assert_true(result.write_sync_ns > 0 && result.write_index_ns > 0);
        assert_true(result.write_wait_ns + result.write_sync_ns + result.write_index_ns <
                    result.write.ns);
        assert_true(result.write_speed.median > 0);
        assert_true(result.write_speed.p99 <= result.write_speed.median);
        assert_true(result.nine_turns.p99 >= result.nine_turns.median);
        assert_true(result.nine_blocks.median > result.nine_turns.median / 100);
        assert_true(result.nine_blocks_plain.median > 0.05 &&
                    result.nine_blocks_plain.p99 >= result.nine_blocks_plain.median);
        assert_true(result.read.in_flight_max >= 16);
        assert_string_equal(result.door_name, options.store.door->name);
        assert_int_equal(access(dir, F_OK), -1);
        print_message("%s direct %d: write %.2f of plain %.2f GB/s, read %.2f (checked %.2f) of "
                      "plain %.2f GB/s\n",
                      result.door_name, result.direct,
                      (double)result.write.bytes / (double)result.write.ns,
                      (double)result.plain_write.bytes / (double)result.plain_write.ns,
                      (double)result.read.bytes / (double)result.read.ns,
                      (double)result.read_check.bytes / (double)result.read_check.ns,
                      (double)result.plain_read.bytes / (double)result.plain_read.ns);
    }
}

static void refuses_what_it_cannot_measure(void **state) {
    (void)state;
    char parent[TESTING_PATH_BYTES];
    char dir[400];
    struct store_bench_result result = {.door_name = "untouched"};
    struct kv_diag diag = {""};
    testing_temp_dir(parent);
    struct store_bench_options options = bench_options(parent);
    assert_int_equal(store_bench(&options, &result, &diag), KV_ERR_EXISTS);
    snprintf(dir, sizeof dir, "%s/bench", parent);
    options = bench_options(dir);
    options.total_bytes = 0;
    assert_int_equal(store_bench(&options, &result, &diag), KV_ERR_INVALID);
    options = bench_options(dir);
    options.store.bytes_max = 20 << 20;
    assert_int_equal(store_bench(&options, &result, &diag), KV_ERR_NO_SPACE);
    assert_int_equal(access(dir, F_OK), -1);
    struct faulty_io *faulty = faulty_io_make(io_best_door());
    options = bench_options(dir);
    options.store.door = faulty_io_door(faulty);
    faulty_io_arm(faulty,
                  &(struct faulty_io_plan){
                      .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_READ, .at = 20, .error = EIO});
    assert_int_equal(store_bench(&options, &result, &diag), KV_ERR_IO);
    assert_int_equal(access(dir, F_OK), -1);
    assert_string_equal(result.door_name, "untouched");
    faulty_io_drop(faulty);
}

TESTING_MAIN(cmocka_unit_test(measures_both_doors),
             cmocka_unit_test(refuses_what_it_cannot_measure))
