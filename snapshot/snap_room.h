/* snapshot/snap_room.h - room for a batch that found none, and how fast blocks may be written.
 *
 * Responsible for: emptying sparse segments when the budget or the disk is short; the token buckets
 * of the write budget.
 * Not responsible for: which records die.
 *
 * Threads: snap_room_make: the spill thread, no batch open; a bucket: under its owner's lock.
 * Units: bytes, nanoseconds.
 */
#ifndef SNAPSHOT_SNAP_ROOM_H
#define SNAPSHOT_SNAP_ROOM_H

#include "store/store.h"

/* 1 when space was given back, so that one more try is worth it. */
int snap_room_make(struct store *store);

/* Empties segments that are less than `live_percent` live, as far as that can be done; the bytes
 * given back. A plane is a twelfth to a sixth of a block, so what gives up planes leaves segments
 * that are still mostly live. */
enum { SNAP_ROOM_LOWERED_PERCENT = 97 };
uint64_t snap_room_empty(struct store *store, uint32_t live_percent);

/* Fills at a rate up to a capacity; what must be written at once takes it below zero. */
struct snap_room_bucket {
    double per_ns; /* 0: unbounded */
    double capacity, level;
    uint64_t at_ns;
};
/* `bytes` per `span_ns`; 0 bytes is unbounded. Begins full. */
void snap_room_bucket_init(struct snap_room_bucket *bucket, uint64_t bytes, uint64_t span_ns,
                           uint64_t now_ns);
void snap_room_bucket_take(struct snap_room_bucket *bucket, uint64_t bytes, uint64_t now_ns);
/* Until it is above zero again; 0 when it is. */
uint64_t snap_room_bucket_wait(struct snap_room_bucket *bucket, uint64_t now_ns);

#endif
