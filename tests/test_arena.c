/* tests/test_arena.c - ranges of one reservation never overlap and come back whole.
 *
 * Responsible for: random gets and puts against a map of bytes, the limits.
 * Not responsible for: memory (nothing is looked at).
 * Broken twin: BREAK_ARENA_OVERLAP takes every gap for free.
 */
#include "engine/device/arena.h"

#include "tests/testing.h"

#include <string.h>

enum { UNITS = 256, HELD_MAX = 24 };

struct held {
    uint8_t *at;
    uint32_t units;
};

static void mark(uint8_t *map, const struct arena *arena, const struct held *held, int to) {
    uint64_t first = (uint64_t)(held->at - arena->base) / ARENA_UNIT_BYTES;

    assert_int_equal((held->at - arena->base) % ARENA_UNIT_BYTES, 0);
    assert_true(first + held->units <= UNITS);
    for (uint32_t i = 0; i < held->units; i++) {
        assert_int_equal(map[first + i], !to);
        map[first + i] = (uint8_t)to;
    }
}

/* BREAK_ARENA_OVERLAP */
static void ranges_never_overlap(void **state) {
    static uint8_t map[UNITS];
    struct arena arena = {.base = (uint8_t *)(uintptr_t)0x7f0000000000,
                          .bytes = (uint64_t)UNITS * ARENA_UNIT_BYTES};
    struct held held[HELD_MAX];
    struct testing_random random;
    uint32_t count = 0, full = 0;

    (void)state;
    testing_random_init(&random, testing_seed("ranges", 12));
    for (uint32_t round = 0; round < 20000; round++) {
        if (count && (count == HELD_MAX || testing_random_below(&random, 2))) {
            uint32_t which = (uint32_t)testing_random_below(&random, count);
            mark(map, &arena, &held[which], 0);
            arena_put(&arena, held[which].at);
            held[which] = held[--count];
            continue;
        }
        uint64_t bytes = 1 + testing_random_below(&random, 40 * ARENA_UNIT_BYTES);
        struct held one = {arena_get(&arena, bytes),
                           (uint32_t)((bytes + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES)};
        full += one.at == NULL;
        if (!one.at)
            continue;
        mark(map, &arena, &one, 1);
        held[count++] = one;
        assert_true(arena_room(&arena) <= arena.bytes - bytes);
    }
    assert_true(full > 100);
    while (count)
        arena_put(&arena, held[--count].at);
    assert_int_equal(arena_room(&arena), arena.bytes);
    assert_ptr_equal(arena_get(&arena, arena.bytes), arena.base);
}

static void what_does_not_fit_is_refused(void **state) {
    struct arena arena = {.base = (uint8_t *)(uintptr_t)0x7f0000000000,
                          .bytes = (uint64_t)UNITS * ARENA_UNIT_BYTES};

    (void)state;
    assert_null(arena_get(&arena, arena.bytes + 1));
    assert_null(arena_get(&arena, UINT64_MAX));
    for (uint32_t i = 0; i < ARENA_RANGES_MAX; i++)
        assert_non_null(arena_get(&arena, 0));
    assert_null(arena_get(&arena, 1));
    assert_int_equal(arena_room(&arena), (UNITS - ARENA_RANGES_MAX) * (uint64_t)ARENA_UNIT_BYTES);
}

TESTING_MAIN(cmocka_unit_test(ranges_never_overlap), cmocka_unit_test(what_does_not_fit_is_refused))
