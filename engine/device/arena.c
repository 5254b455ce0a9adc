/* engine/device/arena.c - parts of one reservation of memory.
 *
 * Responsible for: what arena.h says.
 * Not responsible for: speed: there are few ranges, which come and go with the engine.
 */
#include "engine/device/arena.h"

#include "store/base/bytes.h"

#include <assert.h>

static int is_free(const struct arena *arena, uint64_t off, uint64_t bytes) {
    uint64_t end;

    if (!kv_add_u64(off, bytes, &end) || end > arena->bytes)
        return 0;
    for (uint32_t i = 0; i < ARENA_RANGES_MAX; i++)
        if (arena->ranges[i].bytes && off < arena->ranges[i].off + arena->ranges[i].bytes &&
            arena->ranges[i].off < end)
#ifdef BREAK_ARENA_OVERLAP
            return 1;
#else
            return 0;
#endif
    return 1;
}

void *arena_get(struct arena *arena, uint64_t bytes) {
    uint64_t best = UINT64_MAX;
    uint32_t unused = ARENA_RANGES_MAX;

    if (bytes > UINT64_MAX - ARENA_UNIT_BYTES)
        return NULL;
    bytes = kv_round_up(bytes ? bytes : 1, ARENA_UNIT_BYTES);
    if (is_free(arena, 0, bytes))
        best = 0;
    for (uint32_t i = 0; i < ARENA_RANGES_MAX; i++) {
        uint64_t off = arena->ranges[i].off + arena->ranges[i].bytes;
        if (!arena->ranges[i].bytes)
            unused = i;
        else if (off < best && is_free(arena, off, bytes))
            best = off;
    }
    if (best == UINT64_MAX || unused == ARENA_RANGES_MAX)
        return NULL;
    arena->ranges[unused].off = best;
    arena->ranges[unused].bytes = bytes;
    return arena->base + best;
}

void arena_put(struct arena *arena, const void *at) {
    uint64_t off = (uint64_t)((const uint8_t *)at - arena->base);

    for (uint32_t i = 0; i < ARENA_RANGES_MAX; i++) {
        if (!arena->ranges[i].bytes || arena->ranges[i].off != off)
            continue;
        arena->ranges[i].bytes = 0;
        return;
    }
    assert(!"a range that was never handed out");
}

uint64_t arena_room(const struct arena *arena) {
    uint64_t end = 0;

    for (uint32_t i = 0; i < ARENA_RANGES_MAX; i++)
        if (arena->ranges[i].bytes && arena->ranges[i].off + arena->ranges[i].bytes > end)
            end = arena->ranges[i].off + arena->ranges[i].bytes;
    return arena->bytes - end;
}
