/* kernels/host/kv_control.c - the codes of the control recipes fp8 and v1, in plain C: their
 * specification.
 *
 * Responsible for: both codes, seal and page decode of whole blocks, a page of them as BF16 tokens
 * for the walk of attention.
 * Not responsible for: arithmetic of attention (the twin's own, as over a BF16 page), K's scale and
 * code in K8I4: those of kv_seal.c.
 *
 * FP8: e4m3 with scale 1, nearest, ties to even; finite values beyond 448 become 448, and NaN is
 * never written. K8I4: K as int8 after Hadamard with s_k, V unrotated in groups of 64 dims: minimum
 * as fp16 rounded down, scale (maximum - minimum) / 15 as fp16 rounded up, at least the smallest
 * normal one; code floor((x - minimum) / scale + 1/2) up to 15; value minimum + scale * code. A
 * vector that is refused is written as zero codes, zero minima and the smallest scales. Every
 * operation rounds alone. Attention sees FP8 as BF16 tokens, exactly; K of K8I4 as whole numbers
 * with the half step through the sum of the query, its V in fp32.
 */
#include <assert.h>
#include <math.h>

#include "kernels/host/leaf.h"

enum { NIBBLE_MAX = 15, E4M3_MAX = 0x7e };

#define E4M3_NORMAL_MIN 0x1p-6f
#define E4M3_LARGEST 448.0f
#define HALF_LARGEST 65504.0f
#define HALF_NORMAL_MIN 0x1p-14f

/* One page of one layer and head. */
struct control_page {
    uint8_t *k[2]; /* halves of 32 tokens */
    uint8_t *v[2]; /* FP8 */
    uint8_t *nibbles;
    uint8_t *groups;
    uint32_t dim;
    enum layout_tier tier;
};

static struct control_page page_at(const struct kvops_pool *pool, const struct kvops_block *block,
                                   struct layout_at at) {
    const struct layout_geometry *geometry = &pool->geometry;
    uint64_t slot_bytes = layout_slot_bytes(geometry);
    struct control_page page = {.dim = geometry->head_dim, .tier = block->tier};
    const uint32_t *v_slots = block->slot + LAYOUT_V_ENTRY;
    struct layout_place place;

    assert(layout_tier_is_control(block->tier));
    for (uint32_t half = 0; half < 2; half++) {
        place = layout_half(geometry, at, half);
        page.k[half] = pool->slots + block->slot[place.slot] * slot_bytes + place.off;
        if (page.tier == LAYOUT_TIER_FP8)
            page.v[half] = pool->slots + v_slots[place.slot] * slot_bytes + place.off;
    }
    if (page.tier == LAYOUT_TIER_FP8)
        return page;
    place = layout_nibbles(geometry, at);
    page.nibbles = pool->slots + v_slots[place.slot] * slot_bytes + place.off;
    place = layout_groups(geometry, at);
    page.groups = pool->slots + block->slot[LAYOUT_GROUP_ENTRY] * slot_bytes + place.off;
    return page;
}

static void put_u16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

static uint8_t *half_row(uint8_t *const halves[2], uint32_t dim, uint32_t t) {
    return halves[t / LAYOUT_HALF_TOKENS] + (size_t)(t % LAYOUT_HALF_TOKENS) * dim;
}

/* Scale and minimum of group g of token t. */
static uint8_t *group_at(const struct control_page *page, uint32_t t, uint32_t g) {
    uint32_t count = page->dim / LAYOUT_GROUP_DIMS;
    return page->groups + 2 * LAYOUT_PAGE_TOKENS + (size_t)(t * count + g) * 4;
}

/* --- e4m3 */

static uint8_t e4m3_of(float x) {
    uint32_t sign = dense_f32_bits(x) >> 31 << 7, code;
    float size = fabsf(x);

    if (size >= E4M3_LARGEST)
        code = E4M3_MAX;
    else if (size < E4M3_NORMAL_MIN) /* the sum has the code in its last bits */
        code = dense_f32_bits(size + 0x1p14f) - dense_f32_bits(0x1p14f);
    else
        code = ((dense_f32_bits(size) + 0x7ffff + (dense_f32_bits(size) >> 20 & 1)) >> 20) -
               ((127 - 7) << 3);
#ifdef BREAK_E4M3_WRAP
    code = size >= E4M3_LARGEST ? 0x7f : code;
#endif
    return (uint8_t)(sign | code);
}

/* Exact: four bits of mantissa. */
static uint16_t e4m3_bf16(uint8_t code) {
    float size = dense_bits_f32((uint32_t)(code & 0x7f) << 20) * 0x1p120f;
    return (uint16_t)(dense_f32_bits(size) >> 16 | (uint32_t)(code & 0x80) << 8);
}

/* 0 and zero codes when a value is not finite. */
static int encode_e4m3(const uint16_t *x, uint32_t dim, uint8_t *codes) {
    for (uint32_t d = 0; d < dim; d++) {
        if ((x[d] & 0x7f80) == 0x7f80) {
            memset(codes, 0, dim);
            return 0;
        }
        codes[d] = e4m3_of(dense_bf16_f32(x[d]));
    }
    return 1;
}

/* --- groups of four bits */

/* fp16 at or below x, or at or above it; |x| at most the largest. Never -0. */
static uint16_t half_toward(float x, int up) {
    float size = fabsf(x), scaled = size * 0x1p24f;
    int away = up == (x > 0.0f);
    uint32_t half;

    if (size < HALF_NORMAL_MIN) {
        half = (uint32_t)scaled;
        half += away && (float)half != scaled;
    } else {
        half = (dense_f32_bits(size) >> 13) - ((127 - 15) << 10);
        half += away && (dense_f32_bits(size) & 0x1fff) != 0;
    }
    return (uint16_t)(half | (x < 0.0f && half != 0 ? 0x8000 : 0));
}

static float group_value(const uint8_t *group, uint32_t code) {
    float scale = dense_f16_f32(dense_get_u16(group));
    float product = scale * (float)code;
    return dense_f16_f32(dense_get_u16(group + 2)) + product;
}

/* 64 values that fp16 can hold into 32 bytes, scale and minimum. */
static void encode_group(const uint16_t *x, uint8_t *nibbles, uint8_t *group) {
    float low = INFINITY, high = -INFINITY;

    for (uint32_t d = 0; d < LAYOUT_GROUP_DIMS; d++) {
        float value = dense_bf16_f32(x[d]);
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    uint16_t low_bits = half_toward(low, 0);
    float least = dense_f16_f32(low_bits);
    uint16_t scale_bits = half_toward((high - least) / (float)NIBBLE_MAX, 1);
    if (scale_bits < LEAF_SCALE_MIN_BITS)
        scale_bits = LEAF_SCALE_MIN_BITS;
    float scale = dense_f16_f32(scale_bits);
    put_u16(group, scale_bits);
    put_u16(group + 2, low_bits);
    memset(nibbles, 0, LAYOUT_GROUP_DIMS / 2);
    for (uint32_t d = 0; d < LAYOUT_GROUP_DIMS; d++) {
        float code = floorf((dense_bf16_f32(x[d]) - least) / scale + 0.5f);
        uint32_t nibble = code > (float)NIBBLE_MAX ? NIBBLE_MAX : (uint32_t)code;
        nibbles[d / 2] |= (uint8_t)(nibble << 4 * (d % 2));
    }
}

/* 0, and the codes of zeros, when fp16 cannot hold a value. */
static int encode_groups(const struct control_page *page, const uint16_t *x, uint32_t t) {
    static const uint16_t none[LAYOUT_GROUP_DIMS];
    uint32_t dim = page->dim;
    uint8_t *nibbles = page->nibbles + (size_t)t * dim / 2;
    int good = 1;

    for (uint32_t d = 0; d < dim; d++)
        good &= fabsf(dense_bf16_f32(x[d])) <= HALF_LARGEST;
    for (uint32_t g = 0; g < dim / LAYOUT_GROUP_DIMS; g++)
        encode_group(good ? x + g * LAYOUT_GROUP_DIMS : none, nibbles + g * LAYOUT_GROUP_DIMS / 2,
                     group_at(page, t, g));
    return good;
}

/* --- seal */

static int encode_token(const struct leaf_coder *coder, const struct control_page *page,
                        const uint16_t *const x[2], uint32_t t) {
    uint8_t *k = half_row(page->k, page->dim, t);
    uint16_t scale;

    if (page->tier == LAYOUT_TIER_FP8) {
        int k_good = encode_e4m3(x[0], page->dim, k);
        return encode_e4m3(x[1], page->dim, half_row(page->v, page->dim, t)) && k_good;
    }
    int good = coder->encode(x[0], page->dim, (int8_t *)k, &scale);
    put_u16(page->groups + 2 * t, scale);
    return encode_groups(page, x[1], t) && good;
}

static int32_t seal_page(const struct leaf_coder *coder, const struct kvops_seal *args,
                         struct layout_at at) {
    uint32_t dim = args->pool.geometry.head_dim;
    struct leaf_runs runs =
        leaf_runs_at(&args->pool, args->pages[at.page].slot, at, LAYOUT_PAGE_TOKENS);
    struct control_page page = page_at(&args->pool, &args->block, at);
    int32_t bad = -1;

    if (page.groups)
        memset(page.groups, 0, (size_t)8 * dim);
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        uint32_t run = t / LAYOUT_RUN_TOKENS, off = t % LAYOUT_RUN_TOKENS * dim;
        const uint16_t *const x[2] = {runs.k[run] + off, runs.v[run] + off};
        if (!encode_token(coder, &page, x, t) && bad < 0)
            bad = (int32_t)t;
    }
    return bad;
}

void leaf_seal_control(const struct leaf_coder *coder, const struct kvops_seal *args,
                       struct leaf_range items) {
    uint32_t heads = args->pool.geometry.kv_heads;

    for (uint32_t item = items.first; item < items.end; item++) {
        args->bad_token[item] = -1;
        for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++) {
            int32_t bad =
                seal_page(coder, args, (struct layout_at){item / heads, item % heads, page});
            if (bad >= 0 && args->bad_token[item] < 0)
                args->bad_token[item] = bad + (int32_t)(page * LAYOUT_PAGE_TOKENS);
        }
    }
}

/* --- reading */

/* One token as attention reads it: K of K8I4 without its scale. */
static void read_token(const struct control_page *page, uint32_t t, uint16_t *k, float *v) {
    const uint8_t *k_codes = half_row(page->k, page->dim, t);

    if (page->tier == LAYOUT_TIER_FP8) {
        const uint8_t *v_codes = half_row(page->v, page->dim, t);
        for (uint32_t d = 0; d < page->dim; d++) {
            k[d] = e4m3_bf16(k_codes[d]);
            v[d] = dense_bf16_f32(e4m3_bf16(v_codes[d]));
        }
        return;
    }
    for (uint32_t d = 0; d < page->dim; d++) {
        uint32_t code = page->nibbles[((size_t)t * page->dim + d) / 2] >> 4 * (d % 2) & 15;
        k[d] = dense_f32_bf16((float)(int8_t)k_codes[d]);
        v[d] = group_value(group_at(page, t, d / LAYOUT_GROUP_DIMS), code);
    }
}

static float k_scale_at(const struct control_page *page, uint32_t t) {
    return page->groups ? dense_f16_f32(dense_get_u16(page->groups + 2 * t)) : 1.0f;
}

void leaf_widen_control(const struct leaf_table *leaf, const struct kvops_pool *pool,
                        const struct kvops_block *block, struct layout_at at,
                        struct leaf_tile *tile) {
    _Alignas(64) uint16_t k[LAYOUT_PAGE_TOKENS * LEAF_DIM_MAX];
    _Alignas(64) float v[LAYOUT_PAGE_TOKENS * LEAF_DIM_MAX];
    struct control_page page = page_at(pool, block, at);
    struct leaf_runs runs = {.wide = v, .dim = page.dim, .tokens = LAYOUT_PAGE_TOKENS};

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++)
        read_token(&page, t, k + t * page.dim, v + t * page.dim);
    for (uint32_t run = 0; run < LEAF_RUNS; run++)
        runs.k[run] = k + run * LAYOUT_RUN_TOKENS * page.dim;
    leaf->widen_runs(&runs, tile);
    if (page.tier != LAYOUT_TIER_K8I4)
        return;
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++)
        tile->k_scale[t] = k_scale_at(&page, t) * leaf_root(page.dim);
    tile->k_half = 0.5f;
}

void leaf_decode_control(const struct kvops_decode_page *args) {
    struct control_page page = page_at(&args->pool, args->block, args->at);
    uint16_t k[LEAF_DIM_MAX];
    float half = page.tier == LAYOUT_TIER_K8I4 ? 0.5f : 0.0f;

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        const uint8_t *k_codes = half_row(page.k, page.dim, t);
        read_token(&page, t, k, args->v + (size_t)t * page.dim);
        for (uint32_t d = 0; d < page.dim; d++) {
            uint32_t i = t * page.dim + d;
            args->k[i] = k_scale_at(&page, t) * (dense_bf16_f32(k[d]) + half);
            args->k_codes[i] = (int8_t)k_codes[d];
            args->v_codes[i] = page.nibbles ? (int8_t)(page.nibbles[i / 2] >> 4 * (i % 2) & 15)
                                            : (int8_t)half_row(page.v, page.dim, t)[d];
        }
    }
}
