/* tests/test_pinned.c - buffers are handed out to one at a time, kept, and freed once.
 *
 * Responsible for: random gets and puts, which buffer serves again, the limits.
 * Not responsible for: pinning (gpu_engine.c).
 */
#include "engine/device/pinned.h"

#include "tests/testing.h"

#include <stdlib.h>
#include <string.h>

struct source {
    uint32_t taken, given;
    int empty;
    struct pinned *pinned; /* NULL: nobody looks whether its lock is free */
    uint32_t locked;
};

static void look(struct source *source) {
    if (!source->pinned)
        return;
    if (pthread_mutex_trylock(&source->pinned->lock) == 0)
        pthread_mutex_unlock(&source->pinned->lock);
    else
        source->locked++;
}

static void *take(void *context, uint64_t bytes) {
    struct source *source = context;

    look(source);
    if (source->empty)
        return NULL;
    source->taken++;
    return malloc((size_t)bytes);
}

static void give(void *context, void *at) {
    struct source *source = context;

    look(source);
    source->given++;
    free(at);
}

/* BREAK_PINNED_TAKEN: a buffer is handed out twice. */
static void nobody_shares_a_buffer(void **state) {
    uint8_t *held[PINNED_MAX];
    uint64_t sizes[PINNED_MAX];
    struct source source = {0};
    struct testing_random random;
    struct pinned pinned;
    uint32_t count = 0;

    (void)state;
    testing_random_init(&random, testing_seed("pinned", 12));
    pinned_init(&pinned, take, give, &source);
    for (uint32_t round = 0; round < 5000; round++) {
        if (count && (count == PINNED_MAX || testing_random_below(&random, 2))) {
            uint32_t which = (uint32_t)testing_random_below(&random, count);
            for (uint64_t i = 0; i < sizes[which]; i++)
                assert_int_equal(held[which][i], (uint8_t)(uintptr_t)held[which]);
            pinned_put(&pinned, held[which]);
            held[which] = held[--count];
            sizes[which] = sizes[count];
            continue;
        }
        sizes[count] = 1 + testing_random_below(&random, 3000);
        held[count] = pinned_get(&pinned, sizes[count]);
        assert_non_null(held[count]);
        for (uint32_t i = 0; i < count; i++)
            assert_ptr_not_equal(held[i], held[count]);
        memset(held[count], (int)(uint8_t)(uintptr_t)held[count], (size_t)sizes[count]);
        count++;
    }
    pinned_release(&pinned);
    assert_int_equal(source.taken, source.given);
    assert_true(source.taken < 2500);
}

static void what_is_given_back_serves_again(void **state) {
    enum { LARGE = 64 << 20 };
    struct source source = {0};
    struct pinned pinned;

    (void)state;
    pinned_init(&pinned, take, give, &source);
    uint8_t *large = pinned_get(&pinned, LARGE);
    pinned_put(&pinned, large);
    assert_ptr_equal(pinned_get(&pinned, LARGE / 2), large);
    pinned_put(&pinned, large);
    /* Far too large for a page: that gets one of its own. */
    uint8_t *small = pinned_get(&pinned, 4096);
    assert_ptr_not_equal(small, large);
    assert_int_equal(source.taken, 2);
    pinned_put(&pinned, NULL);
    for (uint32_t i = 1; i < PINNED_MAX; i++)
        assert_non_null(pinned_get(&pinned, LARGE / 4096));
    assert_null(pinned_get(&pinned, 1));
    pinned_put(&pinned, small);
    source.empty = 1;
    assert_null(pinned_get(&pinned, 8192));
    source.empty = 0;
    assert_non_null(pinned_get(&pinned, 8192));
    pinned_release(&pinned);
    assert_int_equal(source.taken, source.given);
}

/* Pinning takes as long as many steps, each of which asks pinned_has. BREAK_PINNED_LOCK: the list
 * is locked meanwhile. */
static void nobody_waits_while_one_is_pinned(void **state) {
    struct source source = {0};
    struct pinned pinned;
    uint8_t *held[PINNED_MAX];

    (void)state;
    pinned_init(&pinned, take, give, &source);
    source.pinned = &pinned;
    for (uint32_t i = 0; i < PINNED_MAX; i++)
        held[i] = pinned_get(&pinned, 4096);
    for (uint32_t i = 0; i < PINNED_MAX; i++)
        pinned_put(&pinned, held[i]);
    assert_non_null(pinned_get(&pinned, 8192));
    assert_int_equal(source.taken, PINNED_MAX + 1);
    assert_int_equal(source.given, 1);
    assert_int_equal(source.locked, 0);
    source.pinned = NULL;
    pinned_release(&pinned);
    assert_int_equal(source.taken, source.given);
}

/* Wakes of much the same size: the second takes what the first had. */
static void a_little_more_is_no_new_one(void **state) {
    struct source source = {0};
    struct pinned pinned;

    (void)state;
    pinned_init(&pinned, take, give, &source);
    pinned_put(&pinned, pinned_get(&pinned, (uint64_t)129 << 20));
    pinned_put(&pinned, pinned_get(&pinned, ((uint64_t)129 << 20) + 4096));
    pinned_put(&pinned, pinned_get(&pinned, (uint64_t)132 << 20));
    assert_int_equal(source.taken, 1);
    pinned_release(&pinned);
}

/* --- large ones */

struct fixing {
    struct source source;
    struct testing_alloc testing;
    void *at[PINNED_MAX]; /* fixed now */
    uint32_t count, refused;
    int refuses;
};

static int fix(void *context, void *at, uint64_t bytes) {
    struct fixing *fixing = context;

    look(&fixing->source);
    for (uint32_t i = 0; bytes == 0 && i < fixing->count; i++) {
        if (fixing->at[i] != at)
            continue;
        fixing->at[i] = fixing->at[--fixing->count];
        return 1;
    }
    fixing->refused += bytes == 0 || fixing->refuses;
    if (bytes == 0 || fixing->refuses)
        return 0;
    assert_true(fixing->count < PINNED_MAX);
    fixing->at[fixing->count++] = at;
    return 1;
}

/* BREAK_PINNED_FIXED frees memory that is still pinned. */
static void large_ones_are_pinned_where_they_are(void **state) {
    struct fixing fixing = {.refuses = 0};
    struct pinned pinned;
    enum { MUCH = KV_ALLOC_LARGE_BYTES };

    (void)state;
    testing_alloc_init(&fixing.testing, 0);
    pinned_init(&pinned, take, give, &fixing);
    pinned_large(&pinned, &fixing.testing.alloc, fix);
    fixing.source.pinned = &pinned;
    uint8_t *small = pinned_get(&pinned, MUCH / 2), *large = pinned_get(&pinned, MUCH);
    assert_non_null(small);
    assert_non_null(large);
    assert_int_equal(fixing.source.taken, 1);
    assert_int_equal(fixing.count, 1);
    assert_int_equal((uintptr_t)large % 4096, 0);
    memset(large, 1, MUCH);
    pinned_put(&pinned, large);
    assert_ptr_equal(pinned_get(&pinned, MUCH), large);
    assert_true(pinned_has(&pinned, large, MUCH));
    /* What cannot be pinned, or is not there, is taken. */
    fixing.refuses = 1;
    assert_non_null(pinned_get(&pinned, 2 * (uint64_t)MUCH));
    assert_int_equal(fixing.refused, 1);
    assert_int_equal(fixing.source.taken, 2);
    fixing.refuses = 0;
    fixing.testing.fail_at = fixing.testing.request_count + 1;
    assert_non_null(pinned_get(&pinned, 3 * (uint64_t)MUCH));
    assert_int_equal(fixing.source.taken, 3);
    assert_int_equal(fixing.testing.live_count, 1);
    /* One that is not fixed gives its place to one that is, and the other way round. */
    for (uint32_t i = 4; i < PINNED_MAX; i++)
        assert_non_null(pinned_get(&pinned, 4096));
    pinned_put(&pinned, small);
    small = pinned_get(&pinned, 4 * (uint64_t)MUCH);
    assert_non_null(small);
    assert_int_equal(fixing.count, 2);
    pinned_put(&pinned, small);
    fixing.refuses = 1;
    assert_non_null(pinned_get(&pinned, 6 * (uint64_t)MUCH));
    assert_int_equal(fixing.count, 1);
    assert_int_equal(fixing.source.locked, 0);
    fixing.source.pinned = NULL;
    pinned_release(&pinned);
    assert_int_equal(fixing.count, 0);
    assert_int_equal(fixing.testing.live_count, 0);
    assert_int_equal(fixing.source.taken, fixing.source.given);
}

/* BREAK_PINNED_END: only the first byte is looked at. */
static void a_range_is_in_one_buffer_or_in_none(void **state) {
    struct source source = {0};
    struct pinned pinned;

    (void)state;
    pinned_init(&pinned, take, give, &source);
    assert_int_equal(pinned_has(&pinned, NULL, 0), 0);
    uint8_t *at = pinned_get(&pinned, 1000);
    assert_int_equal(pinned_has(&pinned, at, 1000), 1);
    assert_int_equal(pinned_has(&pinned, at + 400, 600), 1);
    assert_int_equal(pinned_has(&pinned, at + 400, 601), 0);
    assert_int_equal(pinned_has(&pinned, at, UINT64_MAX), 0);
    assert_int_equal(pinned_has(&pinned, at - 1, 1), 0);
    pinned_put(&pinned, at);
    assert_int_equal(pinned_has(&pinned, at, 1000), 1);
    pinned_release(&pinned);
}

/* Whole sessions come and go: no range is handed out twice, all are within a piece, and pieces
 * serve again. BREAK_SLABS_GAP: a gap is taken that is too short. */
static void what_stays_long_shares_pieces(void **state) {
    enum { HELD = 300 };
    struct {
        uint8_t *at;
        uint64_t bytes;
    } held[HELD] = {{NULL, 0}};
    struct source source = {0};
    struct testing_random random;
    struct pinned pinned;

    (void)state;
    testing_random_init(&random, testing_seed("slabs", 13));
    pinned_init(&pinned, take, give, &source);
    for (uint32_t round = 0; round < 4000; round++) {
        uint32_t which = (uint32_t)testing_random_below(&random, HELD);
        uint8_t mark = (uint8_t)which;
        uint8_t *at = held[which].at;
        if (at) {
            for (uint64_t k = 0; k < held[which].bytes; k += 4096)
                assert_int_equal(at[k], mark);
            pinned_put(&pinned, at);
            held[which].at = NULL;
            continue;
        }
        held[which].bytes = 1 + testing_random_below(&random, 1 << 20);
        held[which].at = at = pinned_keep(&pinned, held[which].bytes);
        assert_non_null(at);
        assert_int_equal(pinned_has(&pinned, at, held[which].bytes), 1);
        for (uint64_t k = 0; k < held[which].bytes; k += 4096)
            at[k] = mark;
    }
    /* Half of 300 are held at a time, half a MiB each. */
    assert_in_range(source.taken, 1, 4);
    assert_null(pinned_keep(&pinned, (uint64_t)SLABS_BYTES + 1));
    source.empty = 1;
    while (pinned_keep(&pinned, SLABS_BYTES / 2))
        ;
    pinned_release(&pinned);
    assert_int_equal(source.taken, source.given);
}

TESTING_MAIN(cmocka_unit_test(nobody_shares_a_buffer),
             cmocka_unit_test(what_is_given_back_serves_again),
             cmocka_unit_test(nobody_waits_while_one_is_pinned),
             cmocka_unit_test(a_little_more_is_no_new_one),
             cmocka_unit_test(large_ones_are_pinned_where_they_are),
             cmocka_unit_test(a_range_is_in_one_buffer_or_in_none),
             cmocka_unit_test(what_stays_long_shares_pieces))
