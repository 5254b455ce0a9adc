/* kernels/host/kv_seal.c - BF16 pages to planes in plain C: the specification of the code.
 *
 * Responsible for: DESIGN section 4 steps 1-3, writing each field through the maps of layout.h,
 * which vectors are refused; items and scratch of seal for every twin.
 * Not responsible for: speed (kv_seal_avx2.c gives the same bits), choosing slots.
 *
 * Every operation rounds alone: no fused product, IEEE division; so twins agree in every bit.
 */
#include <assert.h>
#include <math.h>

#include "kernels/host/leaf.h"

uint32_t kvops_seal_items(const struct kvops_seal *args) {
    return args->pool.geometry.layers * args->pool.geometry.kv_heads;
}

size_t kvops_seal_scratch_bytes(const struct kvops_seal *args) {
    return 2 * (size_t)LAYOUT_PAGE_TOKENS * args->pool.geometry.head_dim;
}

int kvops_seal_bad(const struct kvops_seal *args, uint32_t *layer_out, uint32_t *token_out) {
    for (uint32_t item = 0; item < kvops_seal_items(args); item++) {
        if (args->bad_token[item] < 0)
            continue;
        *layer_out = item / args->pool.geometry.kv_heads;
        *token_out = (uint32_t)args->bad_token[item];
        return 1;
    }
    return 0;
}

/* absmax / 128 as fp16, rounded up, at least the smallest normal number. */
static uint16_t scale_of(float absmax) {
    uint32_t bits = dense_f32_bits(absmax * 0x1p-7f);
    uint32_t half;

    if (absmax <= 0x1p-7f)
        return LEAF_SCALE_MIN_BITS;
    half = (bits >> 13) - ((127 - 15) << 10);
#ifdef BREAK_SCALE_DOWN
    return (uint16_t)half;
#endif
    return (uint16_t)(half + ((bits & 0x1fff) != 0));
}

static float rotated_absmax(float *y, uint32_t dim) {
    float absmax = 0.0f;

    leaf_table_c.rotate(y, 1, dim);
    for (uint32_t d = 0; d < dim; d++)
        absmax = fabsf(y[d]) > absmax || y[d] != y[d] ? fabsf(y[d]) : absmax;
    return absmax;
}

/* Codes of one vector and its scale; 0 and zero codes when no scale can hold it. */
static int encode(const uint16_t *x, uint32_t dim, int8_t *codes, uint16_t *scale_out) {
    float y[LEAF_DIM_MAX];
    int finite = 1;

    for (uint32_t d = 0; d < dim; d++) {
        y[d] = dense_bf16_f32(x[d]);
        finite &= fabsf(y[d]) < INFINITY;
    }
    float absmax = rotated_absmax(y, dim);
    if (!finite || !(absmax <= LEAF_ABSMAX_LIMIT)) {
        memset(codes, 0, dim);
        *scale_out = LEAF_SCALE_MIN_BITS;
        return 0;
    }
    *scale_out = scale_of(absmax);
    float scale = dense_f16_f32(*scale_out);
    for (uint32_t d = 0; d < dim; d++) {
        float code = floorf(y[d] / scale);
        code = code < -128.0f ? -128.0f : code;
        codes[d] = (int8_t)(code > 127.0f ? 127.0f : code);
    }
    return 1;
}

/* Writes the fields of one plane; `flip` is 0x80 for V, whose planes hold the code plus 128. */
static void write_plane(uint8_t *tile, enum layout_stream stream, const int8_t *codes,
                        uint32_t dim) {
    uint32_t shift = layout_plane_shift(stream), width = layout_plane_width(stream);
    uint32_t mask = (1u << width) - 1, flip = stream >= LAYOUT_VB ? 0x80 : 0;

    memset(tile, 0, LAYOUT_PAGE_TOKENS * dim * width / 8);
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        for (uint32_t d = 0; d < dim; d++) {
            struct layout_bits at = layout_bits(stream, dim, t, d);
            uint32_t code = (uint8_t)codes[t * dim + d] ^ flip;
            tile[at.byte] |= (uint8_t)((code >> shift & mask) << at.bit);
        }
    }
}

static void write_planes(const struct leaf_planes *page, const int8_t *k_codes,
                         const int8_t *v_codes) {
    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_VX; stream++)
        if (page->plane[stream])
            write_plane(page->plane[stream], stream, stream <= LAYOUT_KL ? k_codes : v_codes,
                        page->dim);
}

const struct leaf_coder leaf_coder_c = {encode, write_planes};

static void put_scale(uint8_t *meta, uint32_t index, uint16_t scale) {
    meta[2 * index] = (uint8_t)scale;
    meta[2 * index + 1] = (uint8_t)(scale >> 8);
}

/* Encodes page `at.page`; returns its first bad token or -1. */
static int32_t seal_page(const struct leaf_coder *coder, const struct kvops_seal *args,
                         struct layout_at at, int8_t *codes) {
    uint32_t dim = args->pool.geometry.head_dim;
    struct leaf_runs runs =
        leaf_runs_at(&args->pool, args->pages[at.page].slot, at, LAYOUT_PAGE_TOKENS);
    struct leaf_planes planes = leaf_planes_at(&args->pool, &args->block, at);
    int8_t *v_codes = codes + LAYOUT_PAGE_TOKENS * dim;
    int32_t bad = -1;

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        uint32_t run = t / LAYOUT_RUN_TOKENS, off = t % LAYOUT_RUN_TOKENS * dim;
        uint16_t k_scale, v_scale;
        int good = coder->encode(runs.k[run] + off, dim, codes + t * dim, &k_scale);
        good &= coder->encode(runs.v[run] + off, dim, v_codes + t * dim, &v_scale);
        if (!good && bad < 0)
            bad = (int32_t)t;
        put_scale(planes.meta, t, k_scale);
        put_scale(planes.meta, LAYOUT_PAGE_TOKENS + t, v_scale);
    }
    coder->write(&planes, codes, v_codes);
    return bad;
}

void leaf_seal(const struct leaf_coder *coder, const struct kvops_seal *args,
               struct leaf_range items, void *scratch) {
    uint32_t heads = args->pool.geometry.kv_heads;

    if (layout_tier_is_control(args->block.tier)) {
        leaf_seal_control(coder, args, items);
        return;
    }
    assert(args->block.tier < LAYOUT_TIER_BF16);
    for (uint32_t item = items.first; item < items.end; item++) {
        args->bad_token[item] = -1;
        for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++) {
            struct layout_at at = {item / heads, item % heads, page};
            int32_t bad = seal_page(coder, args, at, scratch);
            if (bad >= 0 && args->bad_token[item] < 0)
                args->bad_token[item] = bad + (int32_t)(page * LAYOUT_PAGE_TOKENS);
        }
    }
}
