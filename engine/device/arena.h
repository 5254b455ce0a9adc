/* engine/device/arena.h - parts of one reservation of memory.
 *
 * Responsible for: handing out ranges and taking them back, the first gap that fits.
 * Not responsible for: the memory, which is never looked at.
 *
 * Threads: one owner.
 * Units: bytes.
 */
#ifndef ENGINE_DEVICE_ARENA_H
#define ENGINE_DEVICE_ARENA_H

#include <stdint.h>

/* Weights, workspace, pool and a dozen that grow; and what each of 64 requests that are asked in
 * pieces keeps between two of them. */
enum { ARENA_RANGES_MAX = 96, ARENA_UNIT_BYTES = 4096 };

struct arena {
    uint8_t *base;
    uint64_t bytes;
    struct {
        uint64_t off, bytes; /* bytes 0: unused */
    } ranges[ARENA_RANGES_MAX];
};

/* A multiple of ARENA_UNIT_BYTES from the base; NULL: no gap is large enough, too many ranges. */
void *arena_get(struct arena *arena, uint64_t bytes);
void arena_put(struct arena *arena, const void *at);
/* Behind the last range. */
uint64_t arena_room(const struct arena *arena);

#endif
