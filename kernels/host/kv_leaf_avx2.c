/* kernels/host/kv_leaf_avx2.c - one page of attention with AVX2 and FMA.
 *
 * Responsible for: widening a page to float panels, the register-blocked products for a tile of
 * query rows, the products of a few rows straight from 8-bit panels, fold, rotate.
 * Not responsible for: moving bits (unpack_avx2.c), order of pages (kv_attend.c).
 *
 * Every output has one accumulator that starts at half * sum and takes one fused product per step,
 * k ascending, whatever the number of rows or the form of the panel: so tiles of any size, and
 * 8-bit and float panels of the same codes, give equal bits. The last + 0 makes -0 and 0 the same,
 * since rows that see fewer tokens of a page add products with weight 0.
 *
 * Cost per sealed page of 64 x 64: 1024 fused products per query row, 1024 conversions, about 1700
 * bit moves; 6272 bytes read at K8V4.
 */
#include <math.h>

#include "kernels/host/unpack_avx2.h"
#include "kernels/host/vector_avx2.h"

#define INLINE VECTOR_AVX2_INLINE

enum { ROWS = 6, FEW_ROWS = 4, PANEL = 8 };

/* --- widening */

static void widen_codes(const int8_t *codes, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += PANEL) {
        __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        _mm256_store_ps(out + i, _mm256_cvtepi32_ps(wide));
    }
}

static void widen_scales(const struct leaf_planes *page, struct leaf_tile *tile) {
    __m256 root = _mm256_set1_ps(leaf_root(page->dim));
    __m256 factor = _mm256_set1_ps(leaf_v_factor(page->tier));
    const uint8_t *v_meta = page->meta + 2 * LAYOUT_PAGE_TOKENS;

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t += 8) {
        __m256 k = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(page->meta + 2 * t)));
        __m256 v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(v_meta + 2 * t)));
        _mm256_store_ps(tile->k_scale + t, _mm256_mul_ps(k, root));
        _mm256_store_ps(tile->v_scale + t, _mm256_mul_ps(v, factor));
    }
    tile->k_half = leaf_k_half(page->tier);
    tile->v_half = leaf_v_half(page->tier);
    tile->dim = page->dim;
    tile->tokens = LAYOUT_PAGE_TOKENS;
}

static void widen_planes(const struct leaf_planes *page, struct leaf_tile *tile) {
    _Alignas(64) int8_t codes[LAYOUT_PAGE_TOKENS * LEAF_DIM_MAX];

    unpack_avx2_k(page, codes);
    widen_codes(codes, LAYOUT_PAGE_TOKENS * page->dim, tile->k);
    unpack_avx2_v(page, codes);
    widen_codes(codes, LAYOUT_PAGE_TOKENS * page->dim, tile->v);
    widen_scales(page, tile);
}

/* 8 tokens x 8 dims of BF16 to [dim][token]; tokens from `count` on are zero. */
static void transpose_bf16(const uint16_t *from, uint32_t dim, uint32_t count, float *to) {
    __m128i r[8], a[8], b[8];
#pragma GCC unroll 16
    for (uint32_t t = 0; t < 8; t++)
        r[t] = t < count ? _mm_loadu_si128((const __m128i *)(from + t * dim)) : _mm_setzero_si128();
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        a[i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        a[i + 4] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        int at = i / 4 * 4 + i / 2 % 2;
        __m128i eight =
            i % 2 ? _mm_unpackhi_epi64(b[at], b[at + 2]) : _mm_unpacklo_epi64(b[at], b[at + 2]);
        __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
        _mm256_store_ps(to + i * PANEL, _mm256_castsi256_ps(wide));
    }
}

/* Row t of a run, and the lines of 8 rows from `t` on, which lie in one run. */
INLINE const uint16_t *run_row(const uint16_t *const runs[LEAF_RUNS], uint32_t dim, uint32_t t) {
    return runs[t / LAYOUT_RUN_TOKENS] + t % LAYOUT_RUN_TOKENS * dim;
}

INLINE void prefetch_rows(const uint16_t *rows, uint32_t dim) {
    for (uint32_t at = 0; at < 8 * dim; at += 32)
        _mm_prefetch((const char *)(rows + at), _MM_HINT_T0);
}

static void widen_runs(const struct leaf_runs *page, struct leaf_tile *tile) {
    uint32_t dim = page->dim;

    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t += 8) {
        uint32_t count = page->tokens > t ? page->tokens - t : 0;
        if (!count) {
            memset(tile->k + t * dim, 0, PANEL * dim * sizeof *tile->k);
            continue;
        }
        if (count > 8)
            prefetch_rows(run_row(page->k, dim, t + 8), dim);
        if (!page->wide)
            prefetch_rows(run_row(page->v, dim, t), dim);
        for (uint32_t d = 0; d < dim; d += PANEL)
            transpose_bf16(run_row(page->k, dim, t) + d, dim, count, tile->k + t * dim + d * PANEL);
    }
    for (uint32_t t = 0; t < page->tokens; t++) {
        const uint16_t *from = page->wide ? NULL : run_row(page->v, dim, t);
        for (uint32_t d = 0; d < dim; d += PANEL)
            _mm256_store_ps(tile->v + (d / PANEL * LAYOUT_PAGE_TOKENS + t) * PANEL,
                            from ? vector_avx2_from_bf16(from + d)
                                 : _mm256_load_ps(page->wide + t * dim + d));
    }
    for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t += 8) {
        _mm256_store_ps(tile->k_scale + t, _mm256_set1_ps(leaf_root(dim)));
        _mm256_store_ps(tile->v_scale + t, _mm256_set1_ps(1.0f));
    }
    tile->k_half = 0.0f;
    tile->v_half = 0.0f;
    tile->dim = dim;
    tile->tokens = page->tokens;
}

/* --- products: out[row][8 * panel ..] = start[row] + sum over k of a[row][k] * b[panel][k][8] */

struct product {
    const float *a;
    size_t a_stride;
    const void *b;       /* float or int8_t panels */
    size_t panel_stride; /* values from one panel to the next */
    uint32_t steps;
    const float *start;
    float *out;
    size_t out_stride;
};

/* Eight values of one step of a panel, `at` values from the start. */
INLINE __m256 panel_at(const void *b, int bytes, size_t at) {
    if (bytes) {
        const int8_t *codes = (const int8_t *)b + at;
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
    }
    return _mm256_load_ps((const float *)b + at);
}

INLINE void multiply(const struct product *p, int bytes, int rows, int panels, size_t first) {
    const size_t a_stride = p->a_stride, b_stride = p->panel_stride;
    const uint32_t steps = p->steps;
    const float *a_at = p->a;
    size_t b_at = first * b_stride;
    __m256 acc[ROWS][8], a[3];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int j = 0; j < panels; j++)
            acc[r][j] = _mm256_set1_ps(p->start[r]);
    for (uint32_t k = 0; k < steps; k++, a_at++, b_at += PANEL) {
        if (rows <= 3) {
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                a[r] = _mm256_broadcast_ss(a_at + (size_t)r * a_stride);
#pragma GCC unroll 16
            for (int j = 0; j < panels; j++) {
                __m256 b = panel_at(p->b, bytes, b_at + (size_t)j * b_stride);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++)
                    acc[r][j] = _mm256_fmadd_ps(a[r], b, acc[r][j]);
            }
            continue;
        }
        __m256 b0 = panel_at(p->b, bytes, b_at), b1 = panel_at(p->b, bytes, b_at + b_stride);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            a[0] = _mm256_broadcast_ss(a_at + (size_t)r * a_stride);
            acc[r][0] = _mm256_fmadd_ps(a[0], b0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(a[0], b1, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int j = 0; j < panels; j++)
            _mm256_store_ps(p->out + (size_t)r * p->out_stride + (first + (size_t)j) * PANEL,
                            _mm256_add_ps(acc[r][j], _mm256_setzero_ps()));
}

/* Few rows take more panels at a time, so that enough sums run side by side. */
INLINE void multiply_rows(const struct product *p, int bytes, uint32_t rows, size_t panels) {
    size_t step = rows == 1 ? 8 : rows <= 3 ? 4 : 2;

    for (size_t first = 0; first < panels; first += step) {
        switch (rows) {
        case 1:
            multiply(p, bytes, 1, 8, first);
            break;
        case 2:
            multiply(p, bytes, 2, 4, first);
            break;
        case 3:
            multiply(p, bytes, 3, 4, first);
            break;
        case 4:
            multiply(p, bytes, 4, 2, first);
            break;
        case 5:
            multiply(p, bytes, 5, 2, first);
            break;
        default:
            multiply(p, bytes, 6, 2, first);
            break;
        }
    }
}

static void multiply_floats(const struct product *p, uint32_t rows, size_t panels) {
    multiply_rows(p, 0, rows, panels);
}

static void multiply_bytes(const struct product *p, uint32_t rows, size_t panels) {
    multiply_rows(p, 1, rows, panels);
}

typedef void (*multiply_fn)(const struct product *p, uint32_t rows, size_t panels);

/* --- softmax of one page */

static const int32_t lane_masks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

/* All ones in the lanes t .. t + 7 that are below `seen`. */
INLINE __m256 lanes_below(uint32_t seen, uint32_t t) {
    uint32_t count = seen > t ? seen - t : 0;
    const int32_t *from = lane_masks + 8 - (count < 8 ? count : 8);

    return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)from));
}

struct softmax {
    float max;
    float sum;
    float start; /* v_half * sum of weights */
};

INLINE __m256 sum_of(const __m256 v[8]) {
    return _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(v[0], v[1]), _mm256_add_ps(v[2], v[3])),
                         _mm256_add_ps(_mm256_add_ps(v[4], v[5]), _mm256_add_ps(v[6], v[7])));
}

/* x[64] raw sums to weights in place; tokens from `seen` on get weight 0. A NaN may be lost in the
 * maximum but not in the weights and their sum. */
INLINE struct softmax softmax_lanes(const struct leaf_tile *tile, uint32_t seen, float *x) {
    const __m256 lowest = _mm256_set1_ps(-INFINITY);
    struct softmax row;
    __m256 v[8], max = lowest;
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 8; i++) {
        v[i] = _mm256_mul_ps(_mm256_load_ps(x + 8 * i), _mm256_load_ps(tile->k_scale + 8 * i));
        if (seen < LAYOUT_PAGE_TOKENS)
            v[i] = _mm256_blendv_ps(lowest, v[i], lanes_below(seen, 8 * i));
        max = _mm256_max_ps(max, v[i]);
    }
    row.max = vector_avx2_max(max);
    max = _mm256_set1_ps(row.max);
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 8; i++) {
        v[i] = vector_avx2_exp(_mm256_sub_ps(v[i], max));
        if (seen < LAYOUT_PAGE_TOKENS)
            v[i] = _mm256_and_ps(v[i], lanes_below(seen, 8 * i));
    }
    row.sum = vector_avx2_sum(sum_of(v));
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 8; i++) {
        v[i] = _mm256_mul_ps(v[i], _mm256_load_ps(tile->v_scale + 8 * i));
        _mm256_store_ps(x + 8 * i, v[i]);
    }
    row.start = tile->v_half * vector_avx2_sum(sum_of(v));
    return row;
}

static struct softmax softmax_row(const struct leaf_tile *tile, uint32_t seen, float *x) {
    if (seen == LAYOUT_PAGE_TOKENS)
        return softmax_lanes(tile, LAYOUT_PAGE_TOKENS, x);
    return softmax_lanes(tile, seen, x);
}

/* --- one page */

struct page_use {
    const struct leaf_tile *tile;
    const void *k_panels;
    const void *v_panels;
    multiply_fn multiply_panels;
};

static void attend_rows(const struct page_use *use, const struct leaf_queries *queries,
                        uint32_t first, uint32_t rows, struct leaf_state out) {
    _Alignas(64) float x[ROWS * LAYOUT_PAGE_TOKENS];
    float start[ROWS];
    uint32_t dim = use->tile->dim, steps = 0;
    struct product k = {queries->q + (size_t)first * dim,
                        dim,
                        use->k_panels,
                        (size_t)dim * PANEL,
                        dim,
                        start,
                        x,
                        LAYOUT_PAGE_TOKENS};
    struct product v = {x,
                        LAYOUT_PAGE_TOKENS,
                        use->v_panels,
                        LAYOUT_PAGE_TOKENS * PANEL,
                        0,
                        start,
                        out.acc + (size_t)first * dim,
                        dim};

    for (uint32_t r = 0; r < rows; r++)
        start[r] = use->tile->k_half * queries->sums[first + r];
    use->multiply_panels(&k, rows, LAYOUT_PAGE_TOKENS / PANEL);
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t seen = leaf_seen(queries, first + r, use->tile->tokens);
        struct softmax row = {-INFINITY, 0.0f, 0.0f};
        if (seen)
            row = softmax_row(use->tile, seen, x + r * LAYOUT_PAGE_TOKENS);
        else
            memset(x + r * LAYOUT_PAGE_TOKENS, 0, LAYOUT_PAGE_TOKENS * sizeof *x);
        out.max[first + r] = row.max;
        out.sum[first + r] = row.sum;
        start[r] = row.start;
        steps = seen > steps ? seen : steps;
    }
    v.steps = steps;
    use->multiply_panels(&v, rows, dim / PANEL);
}

static void attend(const struct leaf_tile *tile, const struct leaf_queries *queries,
                   struct leaf_state out) {
    struct page_use use = {tile, tile->k, tile->v, multiply_floats};

    for (uint32_t first = 0; first < queries->rows; first += ROWS) {
        uint32_t left = queries->rows - first;
        attend_rows(&use, queries, first, left < ROWS ? left : ROWS, out);
    }
}

/* Tiles lie anywhere in the pool, too short for the hardware to see them coming. */
INLINE void prefetch_planes(const struct leaf_planes *page, enum layout_stream first,
                            enum layout_stream last) {
    for (uint32_t stream = first; stream <= last; stream++) {
        uint32_t bytes = page->dim * layout_plane_width(stream) * (LAYOUT_PAGE_TOKENS / 8);
        for (uint32_t at = 0; page->plane[stream] && at < bytes; at += 64)
            _mm_prefetch((const char *)page->plane[stream] + at, _MM_HINT_T0);
    }
}

/* The codes stay 8 bits wide, in the scratch that a widened page would take. */
static void attend_planes(const struct leaf_planes pages[2], const struct leaf_queries *queries,
                          struct leaf_tile *work, struct leaf_state out) {
    struct page_use use = {work, work->k, work->v, multiply_bytes};

    prefetch_planes(&pages[1], LAYOUT_KH, LAYOUT_KH);
    unpack_avx2_k(&pages[0], (int8_t *)work->k);
    prefetch_planes(&pages[1], LAYOUT_KM, LAYOUT_KL);
    unpack_avx2_v(&pages[0], (int8_t *)work->v);
    prefetch_planes(&pages[1], LAYOUT_VB, LAYOUT_VX);
    for (uint32_t at = 0; at < LAYOUT_META_TILE_BYTES; at += 64)
        _mm_prefetch((const char *)pages[1].meta + at, _MM_HINT_T0);
    widen_scales(&pages[0], work);
    for (uint32_t first = 0; first < queries->rows; first += FEW_ROWS) {
        uint32_t left = queries->rows - first;
        attend_rows(&use, queries, first, left < FEW_ROWS ? left : FEW_ROWS, out);
    }
}

/* --- joining */

INLINE void fold_row(float *acc, const float *add, uint32_t dim, const float scale[2]) {
    __m256 keep = _mm256_set1_ps(scale[0]), take = _mm256_set1_ps(scale[1]);

    for (uint32_t d = 0; d < dim; d += PANEL) {
        __m256 sum = _mm256_mul_ps(_mm256_load_ps(add + d), take);
        _mm256_store_ps(acc + d, _mm256_fmadd_ps(_mm256_load_ps(acc + d), keep, sum));
    }
}

static void fold_one(struct leaf_state into, struct leaf_state from, uint32_t row, uint32_t dim) {
    float *acc = into.acc + (size_t)row * dim;
    const float *add = from.acc + (size_t)row * dim;
    float max = into.max[row] > from.max[row] ? into.max[row] : from.max[row];
    __m256 shift = _mm256_setr_ps(into.max[row] - max, from.max[row] - max, 0, 0, 0, 0, 0, 0);
    _Alignas(32) float scale[8];

    if (from.sum[row] == 0.0f)
        return;
    if (into.sum[row] == 0.0f) {
        into.max[row] = from.max[row];
        into.sum[row] = from.sum[row];
        memcpy(acc, add, dim * sizeof *acc);
        return;
    }
    _mm256_store_ps(scale, vector_avx2_exp(shift));
    into.max[row] = max;
    into.sum[row] = into.sum[row] * scale[0] + from.sum[row] * scale[1];
    fold_row(acc, add, dim, scale);
}

static void fold(struct leaf_state into, struct leaf_state from, uint32_t rows, uint32_t dim) {
    for (uint32_t row = 0; row < rows; row++)
        fold_one(into, from, row, dim);
}

INLINE void rotate_rows(float *values, uint32_t rows, int count) {
    for (uint32_t row = 0; row < rows; row++, values += count * PANEL) {
        __m256 x[LEAF_DIM_MAX / PANEL];
#pragma GCC unroll 16
        for (int i = 0; i < count; i++)
            x[i] = _mm256_load_ps(values + i * PANEL);
        vector_avx2_rotate(x, count);
#pragma GCC unroll 16
        for (int i = 0; i < count; i++)
            _mm256_store_ps(values + i * PANEL, x[i]);
    }
}

static void rotate(float *values, uint32_t rows, uint32_t dim) {
    if (dim == 64)
        rotate_rows(values, rows, 8);
    else
        rotate_rows(values, rows, 16);
}

const struct leaf_table leaf_table_avx2 = {widen_planes,  widen_runs, attend,
                                           attend_planes, fold,       rotate};
