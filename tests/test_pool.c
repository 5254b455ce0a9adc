/* tests/test_pool.c - the slot pool, blocks, the window and the queue of posts.
 *
 * Responsible for: budget and order of slots, poison, the reserve, reference counts of blocks,
 * pages that turn over, posts from another thread in order.
 * Not responsible for: what a session does with them (test_session, test_engine).
 */
#include "engine/kv/block.h"
#include "engine/kv/posts.h"
#include "engine/kv/slots.h"
#include "engine/kv/window.h"
#include "tests/testing.h"

#include <pthread.h>
#include <string.h>

static const struct layout_geometry geometry = {2, 2, 64};

static struct device *open_device(void) {
    struct device_host_settings settings = {kv_alloc_system(), kv_clock_system(), DEVICE_SIMD_C, 1};
    struct device *device = NULL;

    assert_int_equal(device_host_open(&settings, &device, NULL), KV_OK);
    return device;
}

static struct slots_settings usual(struct device *device, uint32_t groups) {
    return (struct slots_settings){.alloc = kv_alloc_system(),
                                   .device = device,
                                   .geometry = geometry,
                                   .budget_bytes = groups * (8 * layout_slot_bytes(&geometry) +
                                                             layout_meta_frame_bytes(&geometry)),
                                   .reserve = 8,
                                   .poison = 1};
}

static int is_poisoned(const uint8_t *bytes, uint64_t size) {
    for (uint64_t i = 0; i < size; i += 2)
        if (bytes[i] != 0xff || bytes[i + 1] != 0x7f)
            return 0;
    return 1;
}

static void the_budget_becomes_slots(void **state) {
    struct device *device = open_device();
    struct slots_settings settings = usual(device, 20);
    struct slots slots;
    struct kv_diag diag = {""};

    (void)state;
    settings.budget_bytes += 100; /* a rest that is no whole group */
    assert_int_equal(slots_init(&settings, &slots, &diag), KV_OK);
    assert_int_equal(slots.total, 160);
    assert_int_equal(slots.frames, 20);
    assert_true(slots.pool_bytes <= settings.budget_bytes);
    assert_int_equal((uintptr_t)slots.pool.slots % 4096, 0);
    for (uint32_t i = 0; i < slots.total; i++)
        assert_true(is_poisoned(slots_at(&slots, i), slots.slot_bytes));
    slots_release(&slots);
    settings.budget_bytes = 9 * 8 * layout_slot_bytes(&geometry);
    assert_int_equal(slots_init(&settings, &slots, &diag), KV_ERR_NO_SLOTS);
    assert_non_null(strstr(diag.text, "72"));
    slots_release(&slots);
    settings.budget_bytes = UINT64_MAX;
    assert_int_equal(slots_init(&settings, &slots, &diag), KV_ERR_LIMIT);
    slots_release(&slots);
    device_close(device);
}

static void every_slot_is_given_once(void **state) {
    static const uint64_t seeds[] = {0, 1, 2};
    struct device *device = open_device();
    uint32_t first[160], taken[160];

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct slots_settings settings = usual(device, 20);
        struct slots slots;
        uint8_t seen[160] = {0};
        settings.shuffle_seed = seeds[i];
        assert_int_equal(slots_init(&settings, &slots, NULL), KV_OK);
        slots_take(&slots, 160, taken);
        for (uint32_t k = 0; k < 160; k++) {
            assert_true(taken[k] < 160);
            assert_false(seen[taken[k]]++);
        }
        if (i == 0)
            memcpy(first, taken, sizeof first);
        else
            assert_memory_not_equal(first, taken, sizeof first);
        assert_int_equal(slots.free_count, 0);
        assert_int_equal(slots.peak_used, 160);
        memset(slots_at(&slots, 5), 1, slots.slot_bytes);
        slots_put(&slots, taken, 160);
        assert_true(is_poisoned(slots_at(&slots, 5), slots.slot_bytes));
        assert_int_equal(slots.free_count, 160);
        slots_release(&slots);
    }
    for (uint32_t k = 1; k < 160; k++)
        assert_int_equal(first[k], first[k - 1] + 1);
    device_close(device);
}

/* What is free is poisoned at the end, what is taken again before somebody writes to it.
 * BREAK_GATHER poisons what they wrote. */
static void poison_goes_together(void **state) {
    struct device *device = open_device();
    struct slots_settings settings = usual(device, 100);
    static uint32_t taken[800];
    struct slots slots;

    (void)state;
    assert_int_equal(slots_init(&settings, &slots, NULL), KV_OK);
    slots_take(&slots, 800, taken);
    memset(slots.pool.slots, 1, 800 * slots.slot_bytes);
    slots_gather(&slots);
    slots_gather(&slots);
    slots_put(&slots, taken, 800);
    slots_spoil_frame(&slots, 3);
    slots_gather_end(&slots);
    assert_false(is_poisoned(slots_at(&slots, taken[799]), slots.slot_bytes));
    slots_gather_end(&slots);
    for (uint32_t i = 0; i < 800; i++)
        assert_true(is_poisoned(slots_at(&slots, taken[i]), slots.slot_bytes));
    slots_gather(&slots);
    slots_take(&slots, 2, taken);
    slots_put(&slots, taken, 1);
    slots_spoil(&slots, taken + 1, 1);
    memset(slots_at(&slots, taken[1]), 1, slots.slot_bytes);
    slots_put(&slots, taken + 1, 1);
    slots_take(&slots, 1, taken);
    memset(slots_at(&slots, taken[0]), 1, slots.slot_bytes);
    slots_gather_end(&slots);
    assert_int_equal(*slots_at(&slots, taken[0]), 1);
    slots_release(&slots);
    device_close(device);
}

static void the_reserve_serves_what_waits(void **state) {
    struct device *device = open_device();
    struct slots_settings settings = usual(device, 20);
    struct slots slots;
    uint32_t taken[160];

    (void)state;
    assert_int_equal(slots_init(&settings, &slots, NULL), KV_OK);
    assert_int_equal(slots_available(&slots, 0), 152);
    slots.waiting = 3;
    assert_int_equal(slots_available(&slots, 0), 155);
    assert_int_equal(slots_available(&slots, 2), 157);
    slots.waiting = 100;
    assert_int_equal(slots_available(&slots, 0), 160);
    slots.waiting = 0;
    slots_take(&slots, 155, taken);
    assert_int_equal(slots_available(&slots, 0), 0);
    assert_int_equal(slots_available(&slots, 8), 5);
    slots_release(&slots);
    device_close(device);
}

/* BREAK_HELD_BLOCK gives a block back under its writer. */
static void a_block_lives_while_somebody_needs_it(void **state) {
    struct device *device = open_device();
    struct slots_settings settings = usual(device, 20);
    uint32_t k8v4 = layout_tier_streams(LAYOUT_K8V4), kl = 1u << LAYOUT_KL;
    struct slots slots;
    struct block_table table;

    (void)state;
    assert_int_equal(slots_init(&settings, &slots, NULL), KV_OK);
    assert_int_equal(block_table_init(kv_alloc_system(), &slots, NULL, &table), KV_OK);
    assert_int_equal(table.free_count, 20);
    struct block *block = block_make(&table, 7, k8v4);
    assert_int_equal(slots.free_count, 160 - 12);
    block_reader(block, LAYOUT_K8V4, 1);
    block_reader(block, LAYOUT_K6V2, 1);
    assert_int_equal(block_read_by_others(block, LAYOUT_K6V2), k8v4);
    assert_int_equal(block_read_by_others(block, LAYOUT_K8V4), layout_tier_streams(LAYOUT_K6V2));
    block_read_at(block, LAYOUT_K8V4, LAYOUT_K6V4);
    assert_int_equal(block_read_by_others(block, LAYOUT_K6V2), layout_tier_streams(LAYOUT_K6V4));
    block_free(block, kl);
    assert_int_equal(slots.free_count, 160 - 10);
    block_expect(block, kl);
    assert_int_equal(slots.free_count, 160 - 12);
    block_settle(block, KV_ERR_IO);
    assert_int_equal(slots.free_count, 160 - 10);
    assert_int_equal(block->unavailable, kl);
    block_expect(block, kl);
    block_settle(block, KV_OK);
    assert_int_equal(block->resident, k8v4);
    block_hold(block);
    memset(slots_frame(&slots, block->map.meta_frame), 1, slots.frame_bytes);
    block_drop(block);
    assert_int_equal(slots.waiting, 12);
    assert_int_equal(slots.free_count, 160 - 12);
    uint32_t frame = block->map.meta_frame;
    block_let_go(block);
    assert_int_equal(slots.waiting, 0);
    assert_int_equal(slots.free_count, 160);
    assert_int_equal(table.free_count, 20);
    assert_true(is_poisoned(slots_frame(&slots, frame), slots.frame_bytes));
    block_table_release(&table);
    slots_release(&slots);
    device_close(device);
}

/* --- the window */

enum { ROWS = 40 };

static uint16_t value_of(uint32_t layer, uint32_t value, uint32_t head, uint64_t token,
                         uint32_t dim) {
    return (uint16_t)(token * 131 + layer * 17 + value * 7 + head * 3 + dim);
}

static void fill_chunk(uint16_t *chunk, uint64_t first, uint32_t count) {
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t value = 0; value < 2; value++)
            for (uint32_t head = 0; head < 2; head++)
                for (uint32_t row = 0; row < count; row++)
                    for (uint32_t dim = 0; dim < 64; dim++)
                        chunk[((((layer * 2 + value) * 2 + head) * ROWS) + row) * 64 + dim] =
                            value_of(layer, value, head, first + row, dim);
}

static void expect_page(const struct slots *slots, const struct kvops_page *page, uint64_t first) {
    static uint8_t dense[64 * 2 * 2 * 2 * 64 * 2];
    const uint8_t *addresses[8];
    const uint8_t *at = dense;

    for (uint32_t i = 0; i < 8; i++)
        addresses[i] = slots_at(slots, page->slot[i]);
    layout_pack(&geometry, addresses, 64, dense);
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t head = 0; head < 2; head++)
            for (uint32_t value = 0; value < 2; value++)
                for (uint32_t token = 0; token < 64; token++)
                    for (uint32_t dim = 0; dim < 64; dim++, at += 2)
                        assert_int_equal(at[0] | at[1] << 8,
                                         value_of(layer, value, head, first + token, dim));
}

static void rows_reach_their_pages(void **state) {
    static uint16_t chunk[2 * 2 * 2 * ROWS * 64];
    struct device *device = open_device();
    struct slots_settings settings = usual(device, 20);
    struct slots slots;
    struct window window;
    uint64_t n_kv = 0;

    (void)state;
    assert_int_equal(slots_init(&settings, &slots, NULL), KV_OK);
    window_take(&window, &slots);
    assert_int_equal(slots.free_count, 160 - 72);
    while (n_kv < 576) {
        uint32_t count = 576 - n_kv < ROWS ? (uint32_t)(576 - n_kv) : ROWS;
        struct window_rows rows = {chunk, ROWS, 0, count, n_kv, 0};
        fill_chunk(chunk, n_kv, count);
        window_append(&window, device, &slots, &rows);
        n_kv += count;
    }
    expect_page(&slots, &window.sinks, 0);
    for (uint32_t page = 0; page < 8; page++)
        expect_page(&slots, &window.pages[page], 64 + 64 * page);
    window_turn(&window, &slots, NULL);
    for (uint32_t page = 0; page < 4; page++) {
        expect_page(&slots, &window.pages[page], 64 + 256 + 64 * page);
        assert_true(is_poisoned(slots_at(&slots, window.pages[4 + page].slot[3]), 64));
    }
    window_put(&window, &slots);
    assert_int_equal(slots.free_count, 160);
    slots_release(&slots);
    device_close(device);
}

/* --- posts */

enum { POSTS = 1000 };

struct poster {
    struct posts *posts;
    struct post post[POSTS];
    uint32_t *ran;
};

struct numbered {
    struct poster *poster;
    uint32_t number;
};

static struct numbered numbered[POSTS];

static void run_in_order(void *context) {
    const struct numbered *mine = context;

    assert_int_equal(*mine->poster->ran, mine->number);
    ++*mine->poster->ran;
}

static void *push_all(void *context) {
    struct poster *poster = context;

    for (uint32_t i = 0; i < POSTS; i++) {
        numbered[i] = (struct numbered){poster, i};
        poster->post[i] = (struct post){.call = run_in_order, .context = &numbered[i]};
        posts_push(poster->posts, &poster->post[i]);
    }
    return NULL;
}

static void posts_run_in_order(void **state) {
    static struct poster poster;
    struct posts posts;
    pthread_t thread;
    uint32_t ran = 0;

    (void)state;
    posts_init(&posts);
    assert_int_equal(posts_apply(&posts), 0);
    poster.posts = &posts;
    poster.ran = &ran;
    assert_int_equal(pthread_create(&thread, NULL, push_all, &poster), 0);
    while (ran < POSTS)
        posts_apply(&posts);
    pthread_join(thread, NULL);
    assert_int_equal(ran, POSTS);
    posts_release(&posts);
}

TESTING_MAIN(cmocka_unit_test(the_budget_becomes_slots), cmocka_unit_test(every_slot_is_given_once),
             cmocka_unit_test(poison_goes_together),
             cmocka_unit_test(the_reserve_serves_what_waits),
             cmocka_unit_test(a_block_lives_while_somebody_needs_it),
             cmocka_unit_test(rows_reach_their_pages), cmocka_unit_test(posts_run_in_order))
