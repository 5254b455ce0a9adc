/* tests/test_alloc.c - the door to memory and the helpers on top of it.
 *
 * Responsible for: zeroing, alignment, copies, growth, overflow and failure of each request.
 * Not responsible for: who allocates what.
 */
#include "store/base/alloc.h"

#include "tests/testing.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void zeroed_memory_is_zero(void **state) {
    (void)state;
    struct testing_alloc testing; /* its memory is filled with 0xA5 before we see it */
    testing_alloc_init(&testing, 0);
    uint8_t *memory = kv_alloc_zeroed(&testing.alloc, 37, 13);
    assert_non_null(memory);
    for (size_t i = 0; i < 37 * 13; i++)
        assert_int_equal(memory[i], 0);
    kv_alloc_release(&testing.alloc, memory);
    assert_int_equal(testing.live_count, 0);
}

static void sizes_that_overflow_give_null(void **state) {
    (void)state;
    struct testing_alloc testing;
    testing_alloc_init(&testing, 0);
    assert_null(kv_alloc_zeroed(&testing.alloc, SIZE_MAX / 2, 3));
    assert_null(kv_alloc_copy(&testing.alloc, "", SIZE_MAX));
    void *items = NULL;
    size_t capacity = 0;
    assert_int_equal(kv_alloc_grow(&testing.alloc, &items, &capacity, SIZE_MAX, 1), 0);
    assert_int_equal(kv_alloc_grow(&testing.alloc, &items, &capacity, SIZE_MAX / 8, 64), 0);
    assert_null(items);
    assert_int_equal(capacity, 0);
    assert_int_equal(testing.request_count, 0);
}

static void memory_has_the_alignment_asked_for(void **state) {
    (void)state;
    for (size_t align = 1; align <= 65536; align *= 2) {
        void *memory = kv_alloc_aligned(kv_alloc_system(), 100, align);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % align, 0);
        memset(memory, 1, 100);
        kv_alloc_release(kv_alloc_system(), memory);
    }
    void *nothing = kv_alloc_aligned(kv_alloc_system(), 0, 8);
    assert_non_null(nothing);
    kv_alloc_release(kv_alloc_system(), nothing);
    kv_alloc_release(kv_alloc_system(), NULL);
}

/* 1 when the system was asked for large pages where `at` lies. */
static int is_large(const void *at) {
    char line[512];
    int here = 0, large = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long first = 0, end = 0;
        if (sscanf(line, "%lx-%lx ", &first, &end) == 2)
            here = (uintptr_t)at >= first && (uintptr_t)at < end;
        else if (here && strncmp(line, "VmFlags:", 8) == 0)
            large |= strstr(line, " hg") != NULL;
    }
    fclose(maps);
    return large;
}

/* BREAK_ALLOC_LARGE asks for none. */
static void much_memory_is_of_large_pages(void **state) {
    (void)state;
    const size_t bytes = KV_ALLOC_LARGE_BYTES + 12345;
    uint8_t *much = kv_alloc_large(kv_alloc_system(), bytes);
    uint8_t *little = kv_alloc_large(kv_alloc_system(), 5000);
    assert_non_null(much);
    assert_non_null(little);
    assert_int_equal((uintptr_t)much % 4096, 0);
    assert_int_equal((uintptr_t)little % 4096, 0);
    memset(much, 1, bytes);
    memset(little, 1, 5000);
    if (access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0)
        assert_true(is_large(much));
    assert_false(is_large(little));
    kv_alloc_release(kv_alloc_system(), much);
    kv_alloc_release(kv_alloc_system(), little);
}

static void a_copy_is_terminated(void **state) {
    (void)state;
    struct testing_alloc testing;
    testing_alloc_init(&testing, 0);
    char *copy = kv_alloc_copy(&testing.alloc, "session", 4);
    assert_memory_equal(copy, "sess", 5);
    char *empty = kv_alloc_copy(&testing.alloc, NULL, 0);
    assert_int_equal(empty[0], 0);
    kv_alloc_release(&testing.alloc, copy);
    kv_alloc_release(&testing.alloc, empty);
    assert_int_equal(testing.live_count, 0);
}

static void growing_keeps_the_content_and_doubles(void **state) {
    (void)state;
    struct testing_alloc testing;
    testing_alloc_init(&testing, 0);
    uint32_t *items = NULL;
    size_t capacity = 0;
    for (uint32_t i = 0; i < 5000; i++) {
        void *memory = items;
        assert_true(kv_alloc_grow(&testing.alloc, &memory, &capacity, i + 1u, sizeof *items));
        items = memory;
        assert_true(capacity > i);
        items[i] = i * 2654435761u;
    }
    for (uint32_t i = 0; i < 5000; i++)
        assert_int_equal(items[i], i * 2654435761u);
    assert_true(testing.request_count <= 12); /* 8, 16 … 8192 */
    kv_alloc_release(&testing.alloc, items);
    assert_int_equal(testing.live_count, 0);
}

static void failed_growth_changes_nothing(void **state) {
    (void)state;
    struct testing_alloc testing;
    testing_alloc_init(&testing, 2);
    void *items = NULL;
    size_t capacity = 0;
    assert_true(kv_alloc_grow(&testing.alloc, &items, &capacity, 8, 1));
    memcpy(items, "content", 8);
    void *before = items;
    assert_false(kv_alloc_grow(&testing.alloc, &items, &capacity, 9, 1));
    assert_ptr_equal(items, before);
    assert_int_equal(capacity, 8);
    assert_string_equal(items, "content");
    assert_int_equal(testing.failed_count, 1);
    kv_alloc_release(&testing.alloc, items);
    assert_int_equal(testing.live_count, 0);
}

static void each_helper_passes_a_failure_on(void **state) {
    (void)state;
    struct testing_alloc testing;
    testing_alloc_init(&testing, 1);
    assert_null(kv_alloc_zeroed(&testing.alloc, 3, 3));
    testing_alloc_init(&testing, 1);
    assert_null(kv_alloc_aligned(&testing.alloc, 3, 64));
    testing_alloc_init(&testing, 1);
    assert_null(kv_alloc_copy(&testing.alloc, "x", 1));
    assert_int_equal(testing.live_count, 0);
}

TESTING_MAIN(cmocka_unit_test(zeroed_memory_is_zero),
             cmocka_unit_test(sizes_that_overflow_give_null),
             cmocka_unit_test(much_memory_is_of_large_pages),
             cmocka_unit_test(memory_has_the_alignment_asked_for),
             cmocka_unit_test(a_copy_is_terminated),
             cmocka_unit_test(growing_keeps_the_content_and_doubles),
             cmocka_unit_test(failed_growth_changes_nothing),
             cmocka_unit_test(each_helper_passes_a_failure_on))
