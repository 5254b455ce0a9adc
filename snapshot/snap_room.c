/* snapshot/snap_room.c - gc when it is needed, and buckets of tokens.
 *
 * Responsible for: the contract of snap_room.h.
 * Not responsible for: moving bytes (store/store_gc.c).
 */
#include "snapshot/snap_room.h"

#include "store/store_gc.h"

/* Holes cost nothing; then segments at half live; then what costs more to give back. */
static const uint32_t percents[3] = {STORE_GC_LIVE_PERCENT, STORE_GC_LIVE_PERCENT, 85};

static uint64_t empty(struct store *store, uint32_t live_percent, int punch_only) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    options.live_percent = live_percent;
    options.punch_only = punch_only;
    /* An error behind the first segments leaves them freed all the same. */
    (void)store_gc(store, &options, &report, NULL);
    return report.segment_bytes_after < report.segment_bytes_before
               ? report.segment_bytes_before - report.segment_bytes_after
               : 0;
}

uint64_t snap_room_empty(struct store *store, uint32_t live_percent) {
    uint64_t bytes = empty(store, live_percent, 1);
    return bytes != 0 ? bytes : empty(store, live_percent, 0);
}

int snap_room_make(struct store *store) {
#ifdef BREAK_ROOM
    return 0;
#endif
    for (int i = 0; i < 3; i++)
        if (empty(store, percents[i], i == 0) != 0)
            return 1;
    return 0;
}

void snap_room_bucket_init(struct snap_room_bucket *bucket, uint64_t bytes, uint64_t span_ns,
                           uint64_t now_ns) {
    *bucket = (struct snap_room_bucket){.per_ns = (double)bytes / (double)span_ns,
                                        .capacity = (double)bytes,
                                        .level = (double)bytes,
                                        .at_ns = now_ns};
}

static void fill(struct snap_room_bucket *bucket, uint64_t now_ns) {
    if (now_ns > bucket->at_ns)
        bucket->level += (double)(now_ns - bucket->at_ns) * bucket->per_ns;
    bucket->at_ns = now_ns;
    if (bucket->level > bucket->capacity)
        bucket->level = bucket->capacity;
}

void snap_room_bucket_take(struct snap_room_bucket *bucket, uint64_t bytes, uint64_t now_ns) {
    if (bucket->per_ns <= 0)
        return;
    fill(bucket, now_ns);
#ifndef BREAK_BUCKET
    bucket->level -= (double)bytes;
#endif
}

uint64_t snap_room_bucket_wait(struct snap_room_bucket *bucket, uint64_t now_ns) {
    if (bucket->per_ns <= 0)
        return 0;
    fill(bucket, now_ns);
    return bucket->level > 0 ? 0 : (uint64_t)(-bucket->level / bucket->per_ns) + 1;
}
