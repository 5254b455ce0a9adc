/* tests/test_kv_control.c - the codes of the control recipes fp8 and v1: seal and page decode.
 *
 * Responsible for: every BF16 value through e4m3 against the list of its numbers, K and V of K8I4
 * against double precision, zeros, constants, refusals, C and AVX2 equal in every byte, no byte
 * outside the streams, where halves, nibbles and groups stand, the stored bytes of a block of each.
 * Not responsible for: attention over them (test_attention.c).
 * Broken twins: BREAK_E4M3_WRAP.
 */
#include "kernels/kvops.h"
#include "kernels/ops.h"
#include "store/base/digest.h"
#include "tests/support_kv.h"
#include "tests/testing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One block of one layer and head, its values set by the test. */
struct scene {
    struct support_kv kv;
    struct kvops_seal seal;
    uint32_t dim;
    int32_t bad[8];
};

static void scene_init(struct scene *scene, uint32_t dim, enum layout_tier tier) {
    memset(scene, 0, sizeof *scene);
    support_kv_init(&scene->kv, (struct layout_geometry){1, 1, dim}, 256,
                    testing_seed("control", 3));
    scene->dim = dim;
    scene->seal = (struct kvops_seal){.pool = scene->kv.pool, .bad_token = scene->bad};
    memset(&scene->seal.block, 0xFF, sizeof scene->seal.block);
    scene->seal.block.tier = (uint8_t)tier;
    for (uint32_t i = 0; i < layout_tier_slots(tier); i++)
        scene->seal.block.slot[i] = scene->kv.order[scene->kv.slots_used++];
    for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
        scene->seal.pages[p] = support_kv_page(&scene->kv, p * 64, 64);
}

static void scene_release(struct scene *scene) {
    support_kv_release(&scene->kv);
}

/* Token 0..255 of K or V in the window, to be written to. */
static uint16_t *token_at(const struct scene *scene, uint32_t value, uint32_t token) {
    struct layout_at at = {0, 0, 0};
    uint32_t run = token % 64 / LAYOUT_RUN_TOKENS;
    struct layout_place place = layout_run(&scene->kv.pool.geometry, at, value, run);
    uint32_t slot = scene->seal.pages[token / 64].slot[place.slot];

    return (uint16_t *)(scene->kv.pool.slots + slot * layout_slot_bytes(&scene->kv.pool.geometry) +
                        place.off) +
           token % LAYOUT_RUN_TOKENS * scene->dim;
}

static void seal_with(struct scene *scene, const struct kvops_table *table) {
    support_kv_seal(table, &scene->seal, (struct support_kv_split){1, 0});
}

struct decoded {
    float k[64 * 128], v[64 * 128];
    int8_t k_codes[64 * 128], v_codes[64 * 128];
};

static void decode(const struct scene *scene, uint32_t page, struct decoded *out) {
    struct kvops_decode_page args = {scene->kv.pool, &scene->seal.block, {0, 0, page}, out->k,
                                     out->v,         out->k_codes,       out->v_codes};
    kvops_host_c()->decode_page(&args);
}

/* --- e4m3 */

static double e4m3_value(uint32_t code) {
    uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    double size = exponent ? ldexp(8 + mantissa, (int)exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80 ? -size : size;
}

/* The code nearest to |x|, an even one of two that are as near; 448 beyond that. */
static uint32_t e4m3_nearest(double x) {
    uint32_t best = 0;
    for (uint32_t code = 1; code < 0x7f; code++) {
        double nearer = fabs(e4m3_value(best) - fabs(x)), this = fabs(e4m3_value(code) - fabs(x));
        if (this < nearer || (this == nearer && code % 2 == 0))
            best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

/* BREAK_E4M3_WRAP lets what is too large become NaN. */
static void every_bf16_becomes_the_nearest_e4m3(void **state) {
    static struct decoded page;
    struct scene scene;
    uint32_t next = 0, seen = 0;

    (void)state;
    scene_init(&scene, 128, LAYOUT_TIER_FP8);
    while (next < 0x10000) {
        uint32_t first = next;
        for (uint32_t i = 0; i < 2 * 256 * 128; i++) {
            uint16_t bits = 0;
            while (next < 0x10000 && (next & 0x7f80) == 0x7f80)
                next++;
            if (next < 0x10000)
                bits = (uint16_t)next++;
            token_at(&scene, i / (256 * 128), i / 128 % 256)[i % 128] = bits;
        }
        seal_with(&scene, kvops_host_c());
        assert_int_equal(scene.bad[0], -1);
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++) {
            decode(&scene, p, &page);
            for (uint32_t i = 0; i < 2 * 64 * 128; i++) {
                uint32_t value = i / (64 * 128), at = i % (64 * 128);
                uint16_t bits = token_at(&scene, value, p * 64 + at / 128)[at % 128];
                uint8_t code = (uint8_t)(value ? page.v_codes : page.k_codes)[at];
                float read = (value ? page.v : page.k)[at];
                uint32_t expected = e4m3_nearest((double)support_kv_f32(bits));
                assert_int_equal(code, expected);
                assert_true((double)read == e4m3_value(expected));
            }
        }
        seen += next - first;
    }
    assert_int_equal(seen, 0x10000);
    scene_release(&scene);
}

/* --- K8I4 */

static double half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31;
    double size = exponent ? ldexp(1024 + (bits & 1023), exponent - 25) : ldexp(bits & 1023, -24);
    return bits & 0x8000 ? -size : size;
}

static uint16_t groups_u16(const struct scene *scene, uint32_t page, uint32_t off) {
    const struct layout_geometry *geometry = &scene->kv.pool.geometry;
    struct layout_place place = layout_groups(geometry, (struct layout_at){0, 0, page});
    const uint8_t *at = scene->kv.pool.slots +
                        scene->seal.block.slot[LAYOUT_GROUP_ENTRY] * layout_slot_bytes(geometry) +
                        place.off + off;
    return (uint16_t)(at[0] | at[1] << 8);
}

/* Minimum the largest fp16 below, scale the least fp16 that reaches the maximum in 15 steps. */
static void check_group(const uint16_t *x, uint16_t scale_bits, uint16_t low_bits,
                        const int8_t *codes, const float *values) {
    double scale = half_value(scale_bits), least = half_value(low_bits);
    double low = INFINITY, high = -INFINITY;

    for (uint32_t d = 0; d < 64; d++) {
        low = fmin(low, (double)support_kv_f32(x[d]));
        high = fmax(high, (double)support_kv_f32(x[d]));
    }
    assert_true(least <= low);
    uint16_t next = low_bits & 0x8000 ? (uint16_t)(low_bits - 1) : (uint16_t)(low_bits + 1);
    assert_true(low_bits == 0x8000 || half_value(next == 0x8000 ? 0 : next) > low);
    assert_true(scale_bits >= 0x0400 && scale_bits < 0x7c00);
    assert_true((high - least) / 15 <= scale * (1 + 1e-6));
    if (scale_bits > 0x0400)
        assert_true((high - least) / 15 >= half_value((uint16_t)(scale_bits - 1)) * (1 - 1e-6));
    for (uint32_t d = 0; d < 64; d++) {
        double value = (double)support_kv_f32(x[d]), exact = least + scale * codes[d];
        assert_true(codes[d] >= 0 && codes[d] <= 15);
        assert_true(fabs(exact - value) <= scale * (0.5 + 1e-5));
        assert_true(fabs((double)values[d] - exact) <= ldexp(fabs(exact), -23));
    }
}

static void v_is_min_max_in_groups(void **state) {
    static struct decoded page;
    (void)state;
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        struct scene scene;
        scene_init(&scene, dim, LAYOUT_TIER_K8I4);
        for (uint32_t t = 0; t < 256; t++) /* sizes from far below fp16's normal numbers up */
            for (uint32_t d = 0; d < dim; d++)
                token_at(&scene, 1, t)[d] = support_kv_bf16(
                    support_kv_f32(token_at(&scene, 1, t)[d]) * ldexpf(1, (int)(t % 36) - 22));
        seal_with(&scene, kvops_host_c());
        assert_int_equal(scene.bad[0], -1);
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++) {
            decode(&scene, p, &page);
            for (uint32_t i = 0; i < 64 * dim / 64; i++) {
                uint32_t t = i / (dim / 64), g = i % (dim / 64), at = t * dim + g * 64;
                check_group(token_at(&scene, 1, p * 64 + t) + g * 64,
                            groups_u16(&scene, p, 128 + 4 * i),
                            groups_u16(&scene, p, 128 + 4 * i + 2), page.v_codes + at, page.v + at);
            }
            for (uint32_t off = 128 + 4 * dim; off < 8 * dim; off += 2)
                assert_int_equal(groups_u16(&scene, p, off), 0);
        }
        scene_release(&scene);
    }
}

/* K of v1 is the code that the planes hold, byte for byte. */
static void k_is_the_code_of_the_planes(void **state) {
    static struct decoded page, planes;
    (void)state;
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        struct scene scene;
        scene_init(&scene, dim, LAYOUT_TIER_K8I4);
        seal_with(&scene, kvops_host_c());
        struct kvops_block block = support_kv_block(&scene.kv, kvops_host_c(), 0, LAYOUT_K8V8);
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++) {
            struct kvops_decode_page args = {scene.kv.pool, &block,         {0, 0, p},     planes.k,
                                             planes.v,      planes.k_codes, planes.v_codes};
            kvops_host_c()->decode_page(&args);
            decode(&scene, p, &page);
            assert_memory_equal(page.k_codes, planes.k_codes, 64 * dim);
            assert_memory_equal(page.k, planes.k, 64 * dim * sizeof(float));
        }
        scene_release(&scene);
    }
}

static void set_token(const struct scene *scene, uint32_t value, uint32_t t, uint16_t bits) {
    for (uint32_t d = 0; d < scene->dim; d++)
        token_at(scene, value, t)[d] = bits;
}

/* Zeros of either sign and constants come back exactly where the code has them. */
static void zeros_and_constants_are_exact(void **state) {
    static const float constants[] = {0.0f, -0.0f, 1.0f, -3.5f, 0.0078125f, 240.0f, -448.0f};
    static struct decoded page;
    (void)state;
    for (uint32_t tier = LAYOUT_TIER_FP8; tier <= LAYOUT_TIER_K8I4; tier++) {
        struct scene scene;
        scene_init(&scene, 128, tier);
        for (uint32_t t = 0; t < 7; t++)
            for (uint32_t value = 0; value < 2; value++)
                set_token(&scene, value, t, support_kv_bf16(constants[t]));
        seal_with(&scene, kvops_host_c());
        decode(&scene, 0, &page);
        for (uint32_t i = 0; i < 7 * 128; i++) {
            assert_true(page.v[i] == constants[i / 128]);
            if (tier == LAYOUT_TIER_FP8)
                assert_true(page.k[i] == constants[i / 128]);
        }
        if (tier == LAYOUT_TIER_K8I4)
            for (uint32_t t = 0; t < 2; t++) {
                assert_int_equal(groups_u16(&scene, 0, 128 + 8 * t), 0x0400);
                assert_int_equal(groups_u16(&scene, 0, 128 + 8 * t + 2), 0);
                assert_int_equal(groups_u16(&scene, 0, 2 * t), 0x0400);
            }
        scene_release(&scene);
    }
}

/* --- refusals, twins, places */

static void what_cannot_be_held_is_named(void **state) {
    static const struct {
        uint32_t tier, value;
        float x;
        int refused;
    } cases[] = {
        {LAYOUT_TIER_FP8, 0, NAN, 1},       {LAYOUT_TIER_FP8, 1, -INFINITY, 1},
        {LAYOUT_TIER_FP8, 1, 3e38f, 0},     {LAYOUT_TIER_K8I4, 1, NAN, 1},
        {LAYOUT_TIER_K8I4, 1, 66000.0f, 1}, {LAYOUT_TIER_K8I4, 1, -65280.0f, 0},
        {LAYOUT_TIER_K8I4, 0, INFINITY, 1}, {LAYOUT_TIER_K8I4, 0, 66000.0f, 0},
    };
    static struct decoded page;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct scene scene;
        scene_init(&scene, 64, cases[i].tier);
        token_at(&scene, cases[i].value, 130)[17] = support_kv_bf16(cases[i].x);
        if (cases[i].x != cases[i].x)
            token_at(&scene, cases[i].value, 130)[17] = 0x7fc0;
        seal_with(&scene, kvops_host_c());
        assert_int_equal(scene.bad[0], cases[i].refused ? 130 : -1);
        decode(&scene, 2, &page);
        for (uint32_t d = 0; cases[i].refused && d < 64; d++) /* zero codes, whatever came before */
            assert_int_equal((cases[i].value ? page.v_codes : page.k_codes)[2 * 64 + d], 0);
        scene_release(&scene);
    }
}

static void twins_write_the_same_bytes(void **state) {
    (void)state;
    if (!ops_cpu_has_avx2())
        return;
    for (uint32_t dim = 64; dim <= 128; dim *= 2)
        for (uint32_t tier = LAYOUT_TIER_FP8; tier <= LAYOUT_TIER_K8I4; tier++) {
            struct support_kv kv[2];
            for (int i = 0; i < 2; i++) {
                support_kv_init(&kv[i], (struct layout_geometry){3, 3, dim}, 300, 5);
                support_kv_block(&kv[i], i ? kvops_host_avx2() : kvops_host_c(), 20, tier);
            }
            assert_memory_equal(kv[0].pool.slots, kv[1].pool.slots,
                                kv[0].slot_count * layout_slot_bytes(&kv[0].pool.geometry));
            support_kv_release(&kv[0]);
            support_kv_release(&kv[1]);
        }
}

/* Every byte of the raw slots is written, and nothing else of the pool. */
static void a_block_fills_its_slots(void **state) {
    struct layout_geometry geometry = {3, 3, 64};
    uint64_t slot_bytes = layout_slot_bytes(&geometry), raw = layout_slot_raw_bytes(&geometry);
    (void)state;
    for (uint32_t tier = LAYOUT_TIER_FP8; tier <= LAYOUT_TIER_K8I4; tier++) {
        struct support_kv kv;
        uint64_t written = 0, kept = 0;
        uint32_t slots = layout_tier_slots(tier);
        support_kv_init(&kv, geometry, 300, 5);
        memset(kv.pool.slots, 0xFF, kv.slot_count * slot_bytes); /* e4m3 never has this byte */
        struct kvops_block block = support_kv_block(&kv, kvops_host_c(), 20, tier);
        for (uint32_t slot = 0; slot < kv.slot_count; slot++) {
            const uint8_t *bytes = kv.pool.slots + slot * slot_bytes;
            uint32_t own = 0;
            while (own < slots && block.slot[own] != slot)
                own++;
            for (uint64_t i = 0; i < slot_bytes; i++) {
                written += own < slots && i < raw && bytes[i] != 0xFF;
                kept += (own == slots || i >= raw) && bytes[i] == 0xFF;
            }
        }
        assert_int_equal(kept, kv.slot_count * slot_bytes - slots * raw);
        if (tier == LAYOUT_TIER_FP8)
            assert_int_equal(written, slots * raw);
        else /* a code of K and two of V may well be all ones */
            assert_true(written > slots * raw * 9 / 10);
        support_kv_release(&kv);
    }
}

/* Any sign and mantissa, sizes from 2^-7 to below 2^9: beyond what e4m3 holds. Made of whole
 * numbers, so that every machine has the same. */
static void fill_window(const struct scene *scene) {
    uint64_t state = 20261130;
    for (uint32_t i = 0; i < 2 * 256 * scene->dim; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        uint32_t bits = (uint32_t)(state >> 33);
        token_at(scene, i / (256 * scene->dim), i / scene->dim % 256)[i % scene->dim] =
            (uint16_t)((bits & 0x807f) | (120 + (bits >> 16 & 15)) << 7);
    }
}

/* Both digests were computed once, by the code that stood when this test was written: whoever
 * changes what is stored makes sessions that are asleep unreadable. */
static void stored_bytes_stay_the_same(void **state) {
    static const char *const known[] = {"78fd5df0a4e86752ee67194f293ecfdd",
                                        "82a7c86d5067bd43d1e9eccb075a1249"};
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        enum layout_tier tier = i ? LAYOUT_TIER_K8I4 : LAYOUT_TIER_FP8;
        struct kv_digest_state digest;
        char text[KV_DIGEST_HEX_BYTES];
        struct scene scene;
        scene_init(&scene, 128, tier);
        fill_window(&scene);
        seal_with(&scene, kvops_host_c());
        assert_int_equal(scene.bad[0], -1);
        kv_digest_init(&digest);
        for (uint32_t slot = 0; slot < layout_tier_slots(tier); slot++)
            kv_digest_update(&digest,
                             scene.kv.pool.slots + scene.seal.block.slot[slot] *
                                                       layout_slot_bytes(&scene.kv.pool.geometry),
                             layout_slot_raw_bytes(&scene.kv.pool.geometry));
        struct kv_digest final = kv_digest_final(&digest);
        kv_digest_hex(&final, text);
        assert_string_equal(text, known[i]);
        scene_release(&scene);
    }
}

static void places_do_not_overlap(void **state) {
    struct layout_geometry geometry = {3, 5, 64};
    uint64_t raw = layout_slot_raw_bytes(&geometry), next[3] = {0};
    (void)state;
    for (uint32_t i = 0; i < 4 * 15; i++) {
        struct layout_at at = {i % 15 / 5, i % 5, i / 15};
        for (uint32_t half = 0; half < 2; half++) {
            struct layout_place place = layout_half(&geometry, at, half);
            assert_true(place.slot < 8 && place.off + 32 * 64 <= raw);
            assert_int_equal(place.slot * raw + place.off, next[0]);
            next[0] += 32 * 64;
        }
        struct layout_place place = layout_nibbles(&geometry, at);
        assert_true(place.slot < 4 && place.off + 32 * 64 <= raw);
        assert_int_equal(place.slot * raw + place.off, next[1]);
        next[1] += 32 * 64;
        place = layout_groups(&geometry, at);
        assert_int_equal(place.slot, 0);
        assert_int_equal(place.off, next[2]);
        next[2] += 8 * 64;
    }
    assert_int_equal(next[0], 8 * raw);
    assert_int_equal(next[1], 4 * raw);
    assert_int_equal(next[2], raw);
    assert_int_equal(layout_stream_slots(LAYOUT_FP8), 16);
    assert_int_equal(layout_stream_slots(LAYOUT_K8I4), 13);
    assert_true(layout_stream_of_block(LAYOUT_K8I4) && layout_stream_of_block(LAYOUT_META));
    assert_false(layout_stream_of_block(LAYOUT_PAGE) || layout_stream_of_block(LAYOUT_SINKS));
    assert_false(layout_stream_of_block(LAYOUT_STREAM_COUNT));
}

TESTING_MAIN(cmocka_unit_test(every_bf16_becomes_the_nearest_e4m3),
             cmocka_unit_test(v_is_min_max_in_groups),
             cmocka_unit_test(k_is_the_code_of_the_planes),
             cmocka_unit_test(zeros_and_constants_are_exact),
             cmocka_unit_test(what_cannot_be_held_is_named),
             cmocka_unit_test(twins_write_the_same_bytes),
             cmocka_unit_test(a_block_fills_its_slots),
             cmocka_unit_test(stored_bytes_stay_the_same), cmocka_unit_test(places_do_not_overlap))
