/* tests/test_clock.c - the door to time.
 *
 * Responsible for: calls that reach the clock behind the door, units, and a clock that runs.
 * Not responsible for: anybody's deadlines.
 */
#include "store/base/clock.h"

#include "tests/testing.h"

#include <time.h>

static uint64_t own_monotonic(void *context) {
    return *(uint64_t *)context + 1;
}

static uint64_t own_wall(void *context) {
    return *(uint64_t *)context + 2;
}

static void a_clock_of_our_own_is_asked(void **state) {
    (void)state;
    uint64_t base = 40;
    struct kv_clock clock_own = {own_monotonic, own_wall, &base};
    assert_int_equal(kv_clock_now_ns(&clock_own), 41);
    assert_int_equal(kv_clock_wall_ns(&clock_own), 42);
}

static void the_system_clock_counts_nanoseconds(void **state) {
    (void)state;
    const struct kv_clock *clock_system = kv_clock_system();
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    uint64_t now_ns = kv_clock_now_ns(clock_system);
    clock_gettime(CLOCK_MONOTONIC, &after);
    assert_true(now_ns >= (uint64_t)before.tv_sec * 1000000000u + (uint64_t)before.tv_nsec);
    assert_true(now_ns <= (uint64_t)after.tv_sec * 1000000000u + (uint64_t)after.tv_nsec);
    uint64_t wall_s = kv_clock_wall_ns(clock_system) / 1000000000u;
    assert_true(wall_s + 2 >= (uint64_t)time(NULL) && wall_s <= (uint64_t)time(NULL) + 2);
}

TESTING_MAIN(cmocka_unit_test(a_clock_of_our_own_is_asked),
             cmocka_unit_test(the_system_clock_counts_nanoseconds))
