/* store/base/clock.h - the door to time.
 *
 * Responsible for: a monotonic clock for durations and deadlines and a wall clock for stamps, both
 * behind an interface that tests replace.
 * Not responsible for: sleeping or timers.
 *
 * Threads: any.
 * Units: nanoseconds; wall time since 1970-01-01 UTC. Wall time may jump; nothing but stamps
 * depends on it.
 */
#ifndef STORE_BASE_CLOCK_H
#define STORE_BASE_CLOCK_H

#include <stdint.h>

struct kv_clock {
    uint64_t (*monotonic_ns)(void *context);
    uint64_t (*wall_ns)(void *context);
    void *context;
};

const struct kv_clock *kv_clock_system(void);
uint64_t kv_clock_now_ns(const struct kv_clock *clock);
uint64_t kv_clock_wall_ns(const struct kv_clock *clock);

#endif
