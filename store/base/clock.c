/* store/base/clock.c - the system's clocks behind the door.
 *
 * Responsible for: the only reads of the clock in the tree.
 * Not responsible for: formatting times.
 */
#include "store/base/clock.h"

#include <stddef.h>
#include <time.h>

static uint64_t read_ns(clockid_t which) {
    struct timespec now = {0, 0};
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t system_monotonic_ns(void *context) {
    (void)context;
    return read_ns(CLOCK_MONOTONIC);
}

static uint64_t system_wall_ns(void *context) {
    (void)context;
    return read_ns(CLOCK_REALTIME);
}

static const struct kv_clock system_clock = {system_monotonic_ns, system_wall_ns, NULL};

const struct kv_clock *kv_clock_system(void) {
    return &system_clock;
}

uint64_t kv_clock_now_ns(const struct kv_clock *clock) {
    return clock->monotonic_ns(clock->context);
}

uint64_t kv_clock_wall_ns(const struct kv_clock *clock) {
    return clock->wall_ns(clock->context);
}
