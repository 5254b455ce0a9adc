/* tests/test_layout.c - sizes, places and bit maps of kernels/layout.h.
 *
 * Responsible for: bijectivity of every map, golden values worked out by hand from DESIGN 4.1,
 * places that tile a slot without gap or overlap, dense pages, positions.
 * Not responsible for: values of codes (test_seal.c).
 */
#include "kernels/layout.h"

#include "tests/testing.h"

#include <string.h>

static const struct layout_geometry smol = {30, 3, 64};
static const struct layout_geometry llama = {32, 8, 128};

static void maps_are_bijective(void **state) {
    (void)state;
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_VX; stream++) {
            uint8_t tile[64 * 128 / 2];
            struct layout_geometry geometry = {1, 1, dim};
            uint32_t bytes = layout_tile_bytes(&geometry, stream);
            uint32_t width = layout_plane_width(stream);

            assert_true(bytes <= sizeof tile);
            memset(tile, 0, sizeof tile);
            for (uint32_t i = 0; i < 64 * dim; i++) {
                struct layout_bits at = layout_bits(stream, dim, i / dim, i % dim);
                uint32_t field = ((1u << width) - 1) << at.bit;
                assert_true(at.byte < bytes && field < 256);
                assert_int_equal(tile[at.byte] & field, 0);
                tile[at.byte] |= (uint8_t)field;
            }
            for (uint32_t i = 0; i < bytes; i++)
                assert_int_equal(tile[i], 0xFF);
        }
    }
}

struct golden {
    enum layout_stream stream;
    uint32_t dim, t, d, byte, bit;
};

/* From the table by hand; t = 45: g 5, mt 2, hf 1; d = 55: ks 1, i 1, e 3, L 21; Lv 30, dt 3, hi 0,
 * b 3, kv 1, mh 0, w 7. t = 3, d = 122 at D = 128: g 0, mt 1, hf 1, ks 3, i 1, e 2, L 2; Lv 8,
 * dt 7, hi 1, b 1, kv 0, mh 1, w 14. */
static const struct golden goldens[] = {
    {LAYOUT_KH, 64, 45, 55, (2 * 32 + 21) * 16 + 8 + 4 + 3, 0},
    {LAYOUT_KM, 64, 45, 55, (2 * 32 + 21) * 8 + 4 + 2, 4},
    {LAYOUT_KL, 64, 45, 55, (2 * 32 + 21) * 8 + 4 + 2, 2},
    {LAYOUT_VB, 64, 45, 55, (32 + 30) * 16 + 12 + 3, 2},
    {LAYOUT_VR1, 64, 45, 55, 30 * 16 + 12 + 3, 0},
    {LAYOUT_VR2, 64, 45, 55, 30 * 16 + 12 + 3, 1},
    {LAYOUT_VX, 64, 45, 55, (3 * 32 + 30) * 16 + 8 + 2, 4},
    {LAYOUT_KH, 128, 3, 122, ((2 + 1) * 32 + 2) * 16 + 8 + 4 + 2, 0},
    {LAYOUT_KM, 128, 3, 122, (32 + 2) * 16 + 12 + 1, 4},
    {LAYOUT_KL, 128, 3, 122, (32 + 2) * 16 + 12 + 1, 2},
    {LAYOUT_VB, 128, 3, 122, (3 * 32 + 8) * 16 + 8 + 1, 4},
    {LAYOUT_VR1, 128, 3, 122, (32 + 8) * 16 + 12 + 1, 7},
    {LAYOUT_VR2, 128, 3, 122, (32 + 8) * 16 + 12 + 1, 6},
    {LAYOUT_VX, 128, 3, 122, (7 * 32 + 8) * 16 + 4 + 1, 0},
    {LAYOUT_KH, 64, 0, 0, 0, 4},
    {LAYOUT_KM, 64, 0, 0, 0, 2},
    {LAYOUT_KL, 64, 0, 0, 0, 0},
    {LAYOUT_VB, 64, 0, 0, 0, 2},
    {LAYOUT_VR1, 64, 0, 0, 0, 1},
    {LAYOUT_VR2, 64, 0, 0, 0, 0},
    {LAYOUT_VX, 64, 0, 0, 3, 4},
};

static void maps_have_golden_values(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++) {
        const struct golden *g = &goldens[i];
        struct layout_bits at = layout_bits(g->stream, g->dim, g->t, g->d);
        assert_int_equal(at.byte, g->byte);
        assert_int_equal(at.bit, g->bit);
    }
}

static void sizes_are_those_of_the_design(void **state) {
    static const uint32_t slots[LAYOUT_TIER_COUNT] = {16, 12, 10, 9, 8, 11, 10, 32, 16, 13};

    (void)state;
    assert_int_equal(layout_slot_bytes(&llama), 1 << 20);
    assert_int_equal(layout_slot_bytes(&smol), 180 * 1024);
    assert_int_equal(layout_meta_frame_bytes(&smol), 30 * 3 * 1024);
    assert_int_equal(layout_stream_bytes(&smol, LAYOUT_META), 30 * 3 * 1024);
    assert_int_equal(layout_stream_bytes(&smol, LAYOUT_KH), 4 * 180 * 1024);
    assert_int_equal(layout_stream_bytes(&smol, LAYOUT_PAGE), 30 * 3 * 2 * 64 * 64 * 2);
    assert_int_equal(layout_stream_bytes(&smol, LAYOUT_BF16), 4 * 30 * 3 * 2 * 64 * 64 * 2);
    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        assert_int_equal(layout_tier_slots(tier), slots[tier]);
    struct layout_geometry odd = {3, 5, 64};
    assert_int_equal(layout_slot_raw_bytes(&odd), 15 * 32 * 64);
    assert_int_equal(layout_slot_bytes(&odd), 32768);
    assert_int_equal(layout_tier_k_bits(LAYOUT_K6V3), 6);
    assert_int_equal(layout_tier_v_bits(LAYOUT_K6V3), 3);
    assert_string_equal(layout_tier_name(LAYOUT_K6V3), "K6V3");
    assert_string_equal(layout_stream_name(LAYOUT_VR2), "VR2");
    assert_string_equal(layout_tier_name((enum layout_tier)99), "unknown");
}

static void geometry_is_checked(void **state) {
    struct layout_geometry bad[] = {{0, 3, 64}, {1, 0, 64},   {1, 1, 0},
                                    {1, 1, 96}, {513, 1, 64}, {1, 257, 128}};

    (void)state;
    assert_true(layout_geometry_valid(&smol) && layout_geometry_valid(&llama));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(layout_geometry_valid(&bad[i]));
}

/* Every tile starts where the one before ended, slot after slot. */
static void tiles_fill_their_slots(void **state) {
    struct layout_geometry geometry = {3, 5, 64};

    (void)state;
    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_META; stream++) {
        uint64_t next = 0, slot_bytes = layout_slot_raw_bytes(&geometry);
        for (uint32_t i = 0; i < 3 * 5 * 4; i++) {
            struct layout_at at = {i / 20, i / 4 % 5, i % 4};
            struct layout_place place = layout_tile(&geometry, stream, at);
            uint64_t off = stream == LAYOUT_META ? 0 : place.slot * slot_bytes;
            assert_int_equal(off + place.off, next);
            next += layout_tile_bytes(&geometry, stream);
            if (stream != LAYOUT_META)
                assert_true(place.off + layout_tile_bytes(&geometry, stream) <= slot_bytes);
        }
        assert_int_equal(next, layout_stream_bytes(&geometry, stream));
    }
}

static void runs_fill_their_page(void **state) {
    struct layout_geometry geometry = {3, 5, 128};
    uint64_t next = 0, slot_bytes = layout_slot_raw_bytes(&geometry);

    (void)state;
    for (uint32_t i = 0; i < 3 * 5 * 8; i++) {
        struct layout_at at = {i / 40, i / 8 % 5, 0};
        struct layout_place place = layout_run(&geometry, at, i / 4 % 2, i % 4);
        assert_true(place.slot < LAYOUT_PAGE_SLOTS);
        assert_int_equal(place.slot * slot_bytes + place.off, next);
        next += 16 * 2 * 128;
    }
    assert_int_equal(next, layout_stream_bytes(&geometry, LAYOUT_PAGE));
}

enum { DENSE_MAX = 3 * 2 * 2 * 64 * 64 * 2 };

static void dense_pages_round_trip(void **state) {
    static const uint32_t counts[] = {1, 15, 16, 17, 48, 63, 64};
    static uint8_t slots[8][4096 * 4], back[8][4096 * 4], dense[DENSE_MAX];
    struct layout_geometry geometry = {3, 2, 64};
    struct testing_random random;
    const uint8_t *from[8];
    uint8_t *to[8];

    (void)state;
    testing_random_init(&random, testing_seed("dense", 5));
    for (uint32_t i = 0; i < 8; i++) {
        testing_random_bytes(&random, slots[i], sizeof slots[i]);
        from[i] = slots[i];
        to[i] = back[i];
    }
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        uint32_t n = counts[c];
        assert_int_equal(layout_dense_bytes(&geometry, n), 3 * 2 * 2 * n * 64 * 2);
        layout_pack(&geometry, from, n, dense);
        memset(back, 0xEE, sizeof back);
        layout_unpack(&geometry, dense, n, to);
        for (uint32_t i = 0; i < 3 * 2 * 2 * 64; i++) {
            struct layout_at at = {i / 256, i / 128 % 2, 0};
            uint32_t value = i / 64 % 2, t = i % 64;
            struct layout_place place = layout_run(&geometry, at, value, t / 16);
            uint64_t off = place.off + t % 16 * 128;
            if (t < n) {
                assert_memory_equal(back[place.slot] + off, slots[place.slot] + off, 128);
                assert_memory_equal(dense + ((uint64_t)(i / 64) * n + t) * 128,
                                    slots[place.slot] + off, 128);
            } else {
                assert_int_equal(back[place.slot][off], 0xEE);
            }
        }
    }
}

static void positions_divide_tokens(void **state) {
    (void)state;
    for (uint64_t n = 0; n < 3000; n++) {
        uint64_t blocks = layout_sealed_blocks(n);
        uint32_t window = layout_window_tokens(n);
        assert_int_equal(layout_sink_tokens(n) + 256 * blocks + window, n);
        assert_true(window <= LAYOUT_WINDOW_TOKENS_MAX);
        assert_true(layout_window_pages(n) <= LAYOUT_WINDOW_PAGES_MAX);
        assert_true(blocks == 0 || window >= LAYOUT_WINDOW_TOKENS_MIN);
    }
    assert_int_equal(layout_sealed_blocks(575), 0);
    assert_int_equal(layout_sealed_blocks(576), 1);
    assert_int_equal(layout_window_tokens(576), 256);
    assert_int_equal(layout_window_pages(575), 8);
    assert_int_equal(layout_sealed_blocks(1048576), 4094);
}

TESTING_MAIN(cmocka_unit_test(maps_are_bijective), cmocka_unit_test(maps_have_golden_values),
             cmocka_unit_test(sizes_are_those_of_the_design), cmocka_unit_test(geometry_is_checked),
             cmocka_unit_test(tiles_fill_their_slots), cmocka_unit_test(runs_fill_their_page),
             cmocka_unit_test(dense_pages_round_trip), cmocka_unit_test(positions_divide_tokens))
