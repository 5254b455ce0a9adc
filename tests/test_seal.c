/* tests/test_seal.c - the code of K and V: seal and page decode of kernels/kvops.h.
 *
 * Responsible for: codes and scales against double precision, C and AVX2 equal in every byte on all
 * kinds of input, nesting of tiers, refusal of what no scale can hold, no byte outside the streams.
 * Not responsible for: attention (test_attention.c), the maps themselves (test_layout.c).
 */
#include "kernels/kvops.h"

#include "kernels/ops.h"
#include "tests/support_kv.h"
#include "tests/testing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct support_kv_split together = {1000, 0};

static double half_to_double(uint16_t bits) {
    int exponent = bits >> 10 & 31;

    if (exponent == 0)
        return ldexp(bits & 1023, -24);
    return ldexp(1024 + (bits & 1023), exponent - 25);
}

static uint16_t meta_at(const struct support_kv *kv, const struct kvops_block *block,
                        struct layout_at at, uint32_t index) {
    struct layout_place place = layout_tile(&kv->pool.geometry, LAYOUT_META, at);
    const uint8_t *meta = kv->pool.meta +
                          block->meta_frame * layout_meta_frame_bytes(&kv->pool.geometry) +
                          place.off + 2 * index;

    return (uint16_t)(meta[0] | meta[1] << 8);
}

/* y = H x / sqrt(dim) straight from the definition. */
static void hadamard(const uint16_t *x, uint32_t dim, double *y) {
    for (uint32_t i = 0; i < dim; i++) {
        double sum = 0;
        for (uint32_t d = 0; d < dim; d++)
            sum += (__builtin_popcount(i & d) & 1 ? -1 : 1) * (double)support_kv_f32(x[d]);
        y[i] = sum / sqrt(dim);
    }
}

struct decoded {
    float k[64 * 128], v[64 * 128];
    int8_t k_codes[64 * 128], v_codes[64 * 128];
};

static void decode(const struct support_kv *kv, const struct kvops_block *block,
                   struct layout_at at, struct decoded *out) {
    struct kvops_decode_page args = {kv->pool, block,        at,          out->k,
                                     out->v,   out->k_codes, out->v_codes};

    kvops_host_c()->decode_page(&args);
}

/* One vector: scale is the least fp16 that holds it, codes are floor(y / s) but for rounding. */
static void check_vector(const uint16_t *x, uint32_t dim, uint16_t scale_bits,
                         const int8_t *codes) {
    double y[128], absmax = 0, scale = half_to_double(scale_bits);

    hadamard(x, dim, y);
    for (uint32_t d = 0; d < dim; d++)
        absmax = fmax(absmax, fabs(y[d]));
    assert_true(scale_bits >= 0x0400 && scale_bits < 0x7c00);
    assert_true(absmax <= 128 * scale * (1 + 1e-6));
    if (scale_bits > 0x0400)
        assert_true(absmax >= 128 * half_to_double((uint16_t)(scale_bits - 1)) * (1 - 1e-6));
    for (uint32_t d = 0; d < dim; d++) {
        double error = fabs((codes[d] + 0.5) * scale - y[d]);
        assert_true(error <= scale * 0.5 + absmax * 1e-6);
    }
}

/* BREAK_SCALE_DOWN cuts the scale instead of rounding it up. */
static void codes_match_double_precision(void **state) {
    (void)state;
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        struct support_kv kv;
        struct decoded page;

        support_kv_init(&kv, (struct layout_geometry){2, 3, dim}, 300, testing_seed("codes", dim));
        struct kvops_block block = support_kv_block(&kv, kvops_host_c(), 20, LAYOUT_K8V8);
        for (uint32_t i = 0; i < 2 * 3 * 4; i++) {
            struct layout_at at = {i / 12, i / 4 % 3, i % 4};
            decode(&kv, &block, at, &page);
            for (uint32_t t = 0; t < 64; t++) {
                uint32_t token = 20 + at.page * 64 + t;
                check_vector(support_kv_source(&kv, 0, at, token), dim, meta_at(&kv, &block, at, t),
                             page.k_codes + t * dim);
                check_vector(support_kv_source(&kv, 1, at, token), dim,
                             meta_at(&kv, &block, at, 64 + t), page.v_codes + t * dim);
            }
        }
        support_kv_release(&kv);
    }
}

/* Every lower tier is the top code with its low bits gone, at the documented value. */
static void tiers_nest(void **state) {
    static const double factors[] = {[8] = 1, [4] = 1.0073, [3] = 1.0161, [2] = 1.0372};
    struct support_kv kv;
    static struct decoded top, low;
    struct layout_at at = {1, 1, 2};

    (void)state;
    support_kv_init(&kv, (struct layout_geometry){2, 2, 64}, 300, testing_seed("nest", 7));
    struct kvops_block block = support_kv_block(&kv, kvops_host_c(), 0, LAYOUT_K8V8);
    decode(&kv, &block, at, &top);
    for (uint32_t tier = LAYOUT_K8V8; tier < LAYOUT_TIER_BF16; tier++) {
        uint32_t k_bits = layout_tier_k_bits(tier), v_bits = layout_tier_v_bits(tier);
        block.tier = (uint8_t)tier;
        decode(&kv, &block, at, &low);
        for (uint32_t i = 0; i < 64 * 64; i++) {
            double k_scale = half_to_double(meta_at(&kv, &block, at, i / 64));
            double v_scale = half_to_double(meta_at(&kv, &block, at, 64 + i / 64));
            int k_code = top.k_codes[i] >> (8 - k_bits), v_code = top.v_codes[i] >> (8 - v_bits);
            double k = (k_code + 0.5) * (1 << (8 - k_bits)) * k_scale;
            double v = (v_code + 0.5) * (1 << (8 - v_bits)) * v_scale * factors[v_bits];
            assert_int_equal(low.k_codes[i], k_code * (1 << (8 - k_bits)));
            assert_int_equal(low.v_codes[i], v_code * (1 << (8 - v_bits)));
            assert_true(fabs(low.k[i] - k) <= 1e-6 * fabs(k));
            assert_true(fabs(low.v[i] - v) <= 1e-6 * fabs(v));
        }
    }
    support_kv_release(&kv);
}

enum kind { RANDOM, HUGE_VALUES, TINY, ZERO, SUBNORMAL, ONE_SPIKE, ANY_BITS, KIND_COUNT };

static uint16_t value_of(enum kind kind, struct testing_random *random, uint32_t i) {
    float x = testing_random_f32(random);

    switch (kind) {
    case RANDOM:
        return support_kv_bf16(x * 3);
    case HUGE_VALUES:
        return support_kv_bf16(x * 1e6f);
    case TINY:
        return support_kv_bf16(x * 1e-4f);
    case ZERO:
        return (uint16_t)(x < 0 ? 0x8000 : 0);
    case SUBNORMAL:
        return (uint16_t)(testing_random_u64(random) & 0x807f);
    case ONE_SPIKE:
        return support_kv_bf16(i == 17 ? 900.0f : x * 1e-3f);
    default:
        return (uint16_t)testing_random_u64(random);
    }
}

static void fill(struct support_kv *kv, enum kind kind, struct testing_random *random) {
    uint32_t dim = kv->pool.geometry.head_dim;
    size_t count = (size_t)kv->pool.geometry.layers * kv->pool.geometry.kv_heads * kv->tokens;

    for (size_t i = 0; i < count * dim; i++) {
        kv->k[i] = value_of(kind, random, i % dim);
        kv->v[i] = value_of(kind, random, i % dim);
    }
}

/* Seals with both twins into pools that started equal; `args` is left as the C twin saw it. */
static void seal_both(struct support_kv *kv, struct kvops_seal *args, int32_t *bad) {
    size_t slots = kv->slot_count * layout_slot_bytes(&kv->pool.geometry);
    size_t meta = kv->frame_count * layout_meta_frame_bytes(&kv->pool.geometry);
    uint8_t *slots_copy = malloc(slots), *meta_copy = malloc(meta);
    struct kvops_seal other = *args;

    assert_true(slots_copy && meta_copy);
    memcpy(slots_copy, kv->pool.slots, slots);
    memcpy(meta_copy, kv->pool.meta, meta);
    args->bad_token = bad;
    support_kv_seal(kvops_host_c(), args, together);
    if (ops_cpu_has_avx2()) {
        other.pool.slots = slots_copy;
        other.pool.meta = meta_copy;
        other.bad_token = bad + kvops_seal_items(args);
        support_kv_seal(kvops_host_avx2(), &other, (struct support_kv_split){1, 1});
        assert_memory_equal(slots_copy, kv->pool.slots, slots);
        assert_memory_equal(meta_copy, kv->pool.meta, meta);
        assert_memory_equal(bad, other.bad_token, kvops_seal_items(args) * sizeof *bad);
    }
    free(slots_copy);
    free(meta_copy);
}

static void prepare(struct support_kv *kv, struct kvops_seal *args, enum layout_tier tier) {
    memset(args, 0, sizeof *args);
    args->pool = kv->pool;
    for (uint32_t i = 0; i < layout_tier_slots(LAYOUT_K8V8); i++)
        args->block.slot[i] = kv->order[kv->slots_used++];
    for (uint32_t page = 0; page < 4; page++)
        args->pages[page] = support_kv_page(kv, page * 64, 64);
    args->block.tier = (uint8_t)tier;
}

static void twins_agree_in_every_byte(void **state) {
    static const enum layout_tier tiers[] = {LAYOUT_K8V8, LAYOUT_K8V4, LAYOUT_K6V4, LAYOUT_K6V3,
                                             LAYOUT_K8V2};
    struct testing_random random;
    int32_t bad[2 * 6];

    (void)state;
    if (!ops_cpu_has_avx2())
        testing_skip("no AVX2 here");
    testing_random_init(&random, testing_seed("twins", 11));
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        for (uint32_t kind = 0; kind < KIND_COUNT; kind++) {
            struct support_kv kv;
            struct kvops_seal args;

            support_kv_init(&kv, (struct layout_geometry){2, 3, dim}, 256, kind);
            fill(&kv, kind, &random);
            prepare(&kv, &args, tiers[kind % 5]);
            seal_both(&kv, &args, bad);
            for (uint32_t item = 0; item < 6; item++)
                assert_int_equal(bad[item] >= 0, kind == ANY_BITS);
            support_kv_release(&kv);
        }
    }
}

/* Streams that the tier lacks, and slots that nobody named, keep every byte. */
static void nothing_else_is_written(void **state) {
    struct support_kv kv;
    struct kvops_seal args;
    int32_t bad[2 * 6];
    uint64_t slot_bytes;

    (void)state;
    support_kv_init(&kv, (struct layout_geometry){2, 3, 64}, 256, testing_seed("else", 3));
    slot_bytes = layout_slot_bytes(&kv.pool.geometry);
    prepare(&kv, &args, LAYOUT_K8V4);
    uint8_t *before = malloc(kv.slot_count * slot_bytes);
    assert_non_null(before);
    memcpy(before, kv.pool.slots, kv.slot_count * slot_bytes);
    seal_both(&kv, &args, bad);
    for (uint32_t i = 0; i < kv.slot_count; i++) {
        uint32_t slot = kv.order[i];
        int same =
            !memcmp(before + slot * slot_bytes, kv.pool.slots + slot * slot_bytes, slot_bytes);
        assert_int_equal(same, i >= 12);
    }
    for (uint64_t i = layout_meta_frame_bytes(&kv.pool.geometry);
         i < kv.frame_count * layout_meta_frame_bytes(&kv.pool.geometry); i++)
        assert_int_equal(kv.pool.meta[i], 0xFF);
    free(before);
    support_kv_release(&kv);
}

struct poison {
    uint16_t bits;
    int bad;
};

/* Infinity, NaN, and finite values beyond the largest scale are named by layer and token. */
static void what_no_scale_holds_is_refused(void **state) {
    static const struct poison poisons[] = {{0x7f80, 1}, {0xff80, 1}, {0x7fc1, 1},
                                            {0x7f7f, 1}, {0x4c7f, 0}, {0x4cff, 1}};

    (void)state;
    for (size_t i = 0; i < sizeof poisons / sizeof poisons[0]; i++) {
        struct support_kv kv;
        struct kvops_seal args;
        int32_t bad[2 * 6];
        uint32_t layer = 99, token = 999;
        struct layout_at at = {1, 2, 0};

        support_kv_init(&kv, (struct layout_geometry){2, 3, 64}, 256, 5);
        memcpy((uint16_t *)support_kv_source(&kv, i % 2, at, 201) + 7, &poisons[i].bits, 2);
        prepare(&kv, &args, LAYOUT_K8V8);
        seal_both(&kv, &args, bad);
        assert_int_equal(kvops_seal_bad(&args, &layer, &token), poisons[i].bad);
        if (poisons[i].bad) {
            assert_int_equal(layer, 1);
            assert_int_equal(token, 201);
        }
        support_kv_release(&kv);
    }
}

/* A vector without content takes the smallest normal scale and reads back as nearly nothing. */
static void empty_vectors_stay_small(void **state) {
    static struct decoded page;
    struct support_kv kv;
    struct testing_random random;
    struct layout_at at = {0, 0, 1};

    (void)state;
    testing_random_init(&random, testing_seed("empty", 2));
    for (uint32_t kind = ZERO; kind <= SUBNORMAL; kind++) {
        support_kv_init(&kv, (struct layout_geometry){1, 1, 64}, 256, 5);
        fill(&kv, kind, &random);
        struct kvops_block block = support_kv_block(&kv, kvops_host_c(), 0, LAYOUT_K8V8);
        decode(&kv, &block, at, &page);
        for (uint32_t i = 0; i < 64 * 64; i++) {
            assert_int_equal(meta_at(&kv, &block, at, i / 64), 0x0400);
            assert_true(page.k_codes[i] == 0 || page.k_codes[i] == -1);
            assert_true(fabsf(page.v[i]) <= 0x1p-15f);
        }
        support_kv_release(&kv);
    }
}

TESTING_MAIN(cmocka_unit_test(codes_match_double_precision), cmocka_unit_test(tiers_nest),
             cmocka_unit_test(twins_agree_in_every_byte), cmocka_unit_test(nothing_else_is_written),
             cmocka_unit_test(what_no_scale_holds_is_refused),
             cmocka_unit_test(empty_vectors_stay_small))
