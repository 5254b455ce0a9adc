/* kernels/host/kv_leaf.c - one page of attention in plain C: the specification.
 *
 * Responsible for: reading codes bit by bit through the maps of layout.h, the arithmetic of one
 * page, page decode, the tables kvops_host_c and kvops_host_avx2.
 * Not responsible for: speed, order of pages (kv_attend.c), writing codes (kv_seal.c).
 *
 * Order inside a tile: k [dim][64 tokens], v [64 tokens][dim].
 */
#include <assert.h>
#include <math.h>

#include "kernels/host/leaf.h"

/* Fields of `stream` added to the codes of a page, [64][dim]. */
static void read_plane(const uint8_t *tile, enum layout_stream stream, uint32_t dim,
                       uint8_t *codes) {
    uint32_t shift = layout_plane_shift(stream);
    uint32_t mask = (1u << layout_plane_width(stream)) - 1;

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        for (uint32_t d = 0; d < dim; d++) {
            struct layout_bits at = layout_bits(stream, dim, t, d);
            codes[t * dim + d] |= (uint8_t)((tile[at.byte] >> at.bit & mask) << shift);
        }
    }
}

/* Codes as signed values; V planes hold the code plus 128, so its top bit is flipped. */
static void read_codes(const struct leaf_planes *page, int8_t *k_codes, int8_t *v_codes) {
    uint32_t count = LAYOUT_PAGE_TOKENS * page->dim;

    memset(k_codes, 0, count);
    memset(v_codes, 0, count);
    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_VX; stream++)
        if (page->plane[stream])
            read_plane(page->plane[stream], stream, page->dim,
                       (uint8_t *)(stream <= LAYOUT_KL ? k_codes : v_codes));
    for (uint32_t i = 0; i < count; i++)
        v_codes[i] = (int8_t)((uint8_t)v_codes[i] ^ 0x80);
}

static float meta_scale(const struct leaf_planes *page, uint32_t value, uint32_t t) {
    return dense_f16_f32(dense_get_u16(page->meta + 2 * (value * LAYOUT_PAGE_TOKENS + t)));
}

static void widen_planes(const struct leaf_planes *page, struct leaf_tile *tile) {
    int8_t k_codes[LAYOUT_PAGE_TOKENS * LEAF_DIM_MAX];
    int8_t v_codes[LAYOUT_PAGE_TOKENS * LEAF_DIM_MAX];

    read_codes(page, k_codes, v_codes);
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        for (uint32_t d = 0; d < page->dim; d++) {
            tile->k[d * LAYOUT_PAGE_TOKENS + t] = (float)k_codes[t * page->dim + d];
            tile->v[t * page->dim + d] = (float)v_codes[t * page->dim + d];
        }
        tile->k_scale[t] = meta_scale(page, 0, t) * leaf_root(page->dim);
        tile->v_scale[t] = meta_scale(page, 1, t) * leaf_v_factor(page->tier);
    }
    tile->k_half = leaf_k_half(page->tier);
    tile->v_half = leaf_v_half(page->tier);
    tile->dim = page->dim;
    tile->tokens = LAYOUT_PAGE_TOKENS;
}

static void widen_runs(const struct leaf_runs *page, struct leaf_tile *tile) {
    memset(tile->k, 0, sizeof tile->k);
    for (uint32_t t = 0; t < page->tokens; t++) {
        size_t off = (size_t)(t % LAYOUT_RUN_TOKENS) * page->dim;
        const uint16_t *k = page->k[t / LAYOUT_RUN_TOKENS] + off;
        const uint16_t *v = page->wide ? NULL : page->v[t / LAYOUT_RUN_TOKENS] + off;
        for (uint32_t d = 0; d < page->dim; d++) {
            tile->k[d * LAYOUT_PAGE_TOKENS + t] = dense_bf16_f32(k[d]);
            tile->v[t * page->dim + d] = v ? dense_bf16_f32(v[d]) : page->wide[t * page->dim + d];
        }
    }
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        tile->k_scale[t] = leaf_root(page->dim);
        tile->v_scale[t] = 1.0f;
    }
    tile->k_half = 0.0f;
    tile->v_half = 0.0f;
    tile->dim = page->dim;
    tile->tokens = page->tokens;
}

static void attend_row(const struct leaf_tile *tile, const struct leaf_queries *queries,
                       uint32_t row, struct leaf_state out) {
    uint32_t dim = tile->dim, seen = leaf_seen(queries, row, tile->tokens);
    const float *q = queries->q + (size_t)row * dim;
    float *acc = out.acc + (size_t)row * dim;
    float x[LAYOUT_PAGE_TOKENS], max = -INFINITY, sum = 0.0f, weights = 0.0f;

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++)
        x[t] = tile->k_half * queries->sums[row];
    for (uint32_t d = 0; d < dim; d++)
        for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++)
            x[t] += q[d] * tile->k[d * LAYOUT_PAGE_TOKENS + t];
    for (uint32_t t = 0; t < seen; t++) {
        x[t] *= tile->k_scale[t];
        max = x[t] > max || x[t] != x[t] ? x[t] : max;
    }
    for (uint32_t t = 0; t < seen; t++) {
        float p = leaf_exp(x[t] - max);
        sum += p;
        x[t] = p * tile->v_scale[t];
        weights += x[t];
    }
    for (uint32_t d = 0; d < dim; d++)
        acc[d] = tile->v_half * weights;
    for (uint32_t t = 0; t < seen; t++)
        for (uint32_t d = 0; d < dim; d++)
            acc[d] += x[t] * tile->v[t * dim + d];
    out.max[row] = max;
    out.sum[row] = sum;
}

static void attend(const struct leaf_tile *tile, const struct leaf_queries *queries,
                   struct leaf_state out) {
    for (uint32_t row = 0; row < queries->rows; row++)
        attend_row(tile, queries, row, out);
}

static void attend_planes(const struct leaf_planes pages[2], const struct leaf_queries *queries,
                          struct leaf_tile *work, struct leaf_state out) {
    widen_planes(&pages[0], work);
    attend(work, queries, out);
}

static void fold(struct leaf_state into, struct leaf_state from, uint32_t rows, uint32_t dim) {
    for (uint32_t row = 0; row < rows; row++) {
        float *acc = into.acc + (size_t)row * dim;
        const float *add = from.acc + (size_t)row * dim;

        if (from.sum[row] == 0.0f)
            continue;
        if (into.sum[row] == 0.0f) {
            into.max[row] = from.max[row];
            into.sum[row] = from.sum[row];
            memcpy(acc, add, dim * sizeof *acc);
            continue;
        }
        float max = into.max[row] > from.max[row] ? into.max[row] : from.max[row];
        float keep = leaf_exp(into.max[row] - max), take = leaf_exp(from.max[row] - max);
        into.max[row] = max;
        into.sum[row] = into.sum[row] * keep + from.sum[row] * take;
        for (uint32_t d = 0; d < dim; d++)
            acc[d] = acc[d] * keep + add[d] * take;
    }
}

static void rotate(float *values, uint32_t rows, uint32_t dim) {
    for (uint32_t row = 0; row < rows; row++, values += dim) {
        for (uint32_t stride = 1; stride < dim; stride *= 2) {
            for (uint32_t d = 0; d < dim; d++) {
                if (d & stride)
                    continue;
                float a = values[d], b = values[d + stride];
                values[d] = a + b;
                values[d + stride] = a - b;
            }
        }
        for (uint32_t d = 0; d < dim; d++)
            values[d] *= leaf_root(dim);
    }
}

const struct leaf_table leaf_table_c = {widen_planes,  widen_runs, attend,
                                        attend_planes, fold,       rotate};

static void decode_page(const struct kvops_decode_page *args) {
    if (layout_tier_is_control(args->block->tier)) {
        leaf_decode_control(args);
        return;
    }
    struct leaf_planes page = leaf_planes_at(&args->pool, args->block, args->at);
    float k_half = leaf_k_half(page.tier), v_half = leaf_v_half(page.tier);

    read_codes(&page, args->k_codes, args->v_codes);
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++) {
        float k_scale = meta_scale(&page, 0, t);
        float v_scale = meta_scale(&page, 1, t) * leaf_v_factor(page.tier);
        for (uint32_t i = t * page.dim; i < (t + 1) * page.dim; i++) {
            args->k[i] = k_scale * ((float)args->k_codes[i] + k_half);
            args->v[i] = v_scale * ((float)args->v_codes[i] + v_half);
        }
    }
}

/* --- the tables */

static void seal_c(const struct kvops_seal *args, uint32_t first, uint32_t end, void *scratch) {
    leaf_seal(&leaf_coder_c, args, (struct leaf_range){first, end}, scratch);
}

static void seal_avx2(const struct kvops_seal *args, uint32_t first, uint32_t end, void *scratch) {
    leaf_seal(&leaf_coder_avx2, args, (struct leaf_range){first, end}, scratch);
}

static void prefill_c(const struct kvops_attend *args, uint32_t first, uint32_t end,
                      void *scratch) {
    leaf_prefill(&leaf_table_c, args, (struct leaf_range){first, end}, scratch);
}

static void decode_c(const struct kvops_attend *args, uint32_t first, uint32_t end, void *scratch) {
    leaf_decode(&leaf_table_c, args, (struct leaf_range){first, end}, scratch);
}

static void combine_c(const struct kvops_attend *args, uint32_t first, uint32_t end,
                      void *scratch) {
    leaf_combine(&leaf_table_c, args, (struct leaf_range){first, end}, scratch);
}

static void prefill_avx2(const struct kvops_attend *args, uint32_t first, uint32_t end,
                         void *scratch) {
    leaf_prefill(&leaf_table_avx2, args, (struct leaf_range){first, end}, scratch);
}

static void decode_avx2(const struct kvops_attend *args, uint32_t first, uint32_t end,
                        void *scratch) {
    leaf_decode(&leaf_table_avx2, args, (struct leaf_range){first, end}, scratch);
}

static void combine_avx2(const struct kvops_attend *args, uint32_t first, uint32_t end,
                         void *scratch) {
    leaf_combine(&leaf_table_avx2, args, (struct leaf_range){first, end}, scratch);
}

const struct kvops_table *kvops_host_c(void) {
    static const struct kvops_table table = {"host-c",  seal_c,   leaf_append, decode_page,
                                             prefill_c, decode_c, combine_c};
    return &table;
}

const struct kvops_table *kvops_host_avx2(void) {
    static const struct kvops_table table = {"host-avx2",  seal_avx2,   leaf_append, decode_page,
                                             prefill_avx2, decode_avx2, combine_avx2};
    return &table;
}
