/* kernels/host/dense_matmul_avx2.c - the matrix product with AVX2, FMA and F16C.
 *
 * Responsible for: the twin that fuses each step. Few rows: weights are widened in registers,
 * straight from the packed form, for three panels at once so that the fused steps do not wait for
 * each other. Many rows: a panel is widened once into scratch and met by 6 rows at a time.
 * Not responsible for: another order. Both ways run k ascending in one accumulator per output, so a
 * row has the same bits whichever is taken.
 */
#include "kernels/host/dense.h"

#include <assert.h>
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* Scales and addends of the 16 lanes of one unit. */
struct scales {
    __m256 scale[2];
    __m256 add[2];
};

/* The 16 weights of one k. */
struct wide {
    __m256 half[2];
};

INLINE __m256 load_halves(const uint8_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

INLINE uint32_t code_offset(enum ops_type type) {
    if (type == OPS_Q4_1)
        return OPS_PANEL * 4;
    return type == OPS_Q4_0 || type == OPS_Q8_0 ? OPS_PANEL * 2 : 0;
}

INLINE struct scales load_scales(enum ops_type type, const uint8_t *unit) {
    struct scales s = {{_mm256_setzero_ps(), _mm256_setzero_ps()},
                       {_mm256_setzero_ps(), _mm256_setzero_ps()}};

    if (code_offset(type) == 0)
        return s;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        s.scale[i] = load_halves(unit + 16 * i);
        if (type == OPS_Q4_1)
            s.add[i] = load_halves(unit + OPS_PANEL * 2 + 16 * i);
        else if (type == OPS_Q4_0)
            s.add[i] = _mm256_mul_ps(s.scale[i], _mm256_set1_ps(-8.0f));
    }
    return s;
}

/* `codes` points at the first k of the unit. */
INLINE struct wide widen(enum ops_type type, const struct scales *s, const uint8_t *codes,
                         uint32_t k) {
    struct wide w;

    if (type == OPS_Q4_0 || type == OPS_Q4_1) {
        __m256i pair = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + k * 8)));
        __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(pair, _mm256_set1_epi32(15)));
        __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(pair, 4));
        w.half[0] = _mm256_fmadd_ps(low, s->scale[0], s->add[0]);
        w.half[1] = _mm256_fmadd_ps(high, s->scale[1], s->add[1]);
        return w;
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const uint8_t *at = codes + k * OPS_PANEL + 8 * i;
        if (type == OPS_Q8_0) {
            __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
            w.half[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(code), s->scale[i]);
        } else if (type == OPS_F32) {
            w.half[i] = _mm256_loadu_ps((const float *)(codes + k * OPS_PANEL * 4 + 32 * i));
        } else {
            at = codes + k * OPS_PANEL * 2 + 16 * i;
            if (type == OPS_F16)
                w.half[i] = load_halves(at);
            else
                w.half[i] = _mm256_castsi256_ps(_mm256_slli_epi32(
                    _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
        }
    }
    return w;
}

INLINE void store_sums(const struct ops_matmul *args, uint32_t panel, uint32_t row, __m256 low,
                       __m256 high) {
    uint32_t first = panel * OPS_PANEL;
    size_t off = row * args->y_stride + first;

    if (args->weight.n - first < OPS_PANEL) {
        float sums[OPS_PANEL];
        _mm256_storeu_ps(sums, low);
        _mm256_storeu_ps(sums + 8, high);
        dense_store(args, panel, row, sums);
        return;
    }
    if (args->residual) {
        low = _mm256_add_ps(_mm256_loadu_ps(args->residual + off), low);
        high = _mm256_add_ps(_mm256_loadu_ps(args->residual + off + 8), high);
    }
    _mm256_storeu_ps(args->y + off, low);
    _mm256_storeu_ps(args->y + off + 8, high);
}

/* panels x rows, both known at compile time, straight from the packed form. */
INLINE void direct(const struct ops_matmul *args, uint32_t panel, uint32_t row, enum ops_type type,
                   const uint32_t panels, const uint32_t rows) {
    uint32_t unit_bytes = dense_unit_bytes(type);
    uint64_t panel_bytes = (uint64_t)(args->weight.k / OPS_K_UNIT) * unit_bytes;
    const uint8_t *unit = dense_panel(&args->weight, panel);
    const uint8_t *next = unit + panels * panel_bytes;
    const float *x = args->x + row * args->x_stride;
    __m256 acc[3][5][2];
    struct scales s[3];

#pragma GCC unroll 3
    for (uint32_t p = 0; p < panels; p++) {
#pragma GCC unroll 5
        for (uint32_t r = 0; r < rows; r++)
            acc[p][r][0] = acc[p][r][1] = _mm256_setzero_ps();
    }
    for (uint32_t left = args->weight.k; left > 0; left -= OPS_K_UNIT, unit += unit_bytes) {
#pragma GCC unroll 3
        for (uint32_t p = 0; p < panels; p++)
            s[p] = load_scales(type, unit + p * panel_bytes);
#pragma GCC unroll 24
        for (uint32_t line = 0; line < panels * unit_bytes; line += 64)
            _mm_prefetch((const char *)next + line, _MM_HINT_T0);
        next += panels * unit_bytes;
        for (uint32_t k = 0; k < OPS_K_UNIT; k++, x++) {
#pragma GCC unroll 3
            for (uint32_t p = 0; p < panels; p++) {
                const uint8_t *codes = unit + p * panel_bytes + code_offset(type);
                struct wide w = widen(type, &s[p], codes, k);
#pragma GCC unroll 5
                for (uint32_t r = 0; r < rows; r++) {
                    __m256 value = _mm256_broadcast_ss(x + r * args->x_stride);
                    acc[p][r][0] = _mm256_fmadd_ps(value, w.half[0], acc[p][r][0]);
                    acc[p][r][1] = _mm256_fmadd_ps(value, w.half[1], acc[p][r][1]);
                }
            }
        }
    }
#pragma GCC unroll 3
    for (uint32_t p = 0; p < panels; p++) {
#pragma GCC unroll 5
        for (uint32_t r = 0; r < rows; r++)
            store_sums(args, panel + p, row + r, acc[p][r][0], acc[p][r][1]);
    }
}

INLINE void direct_rows(const struct ops_matmul *args, const struct dense_tile *tile,
                        enum ops_type type) {
    uint32_t row = tile->first_row;
    uint32_t panel = tile->first_panel;

    switch (tile->end_row - row) {
    case 1:
        for (; panel + 3 <= tile->end_panel; panel += 3)
            direct(args, panel, row, type, 3, 1);
        for (; panel < tile->end_panel; panel++)
            direct(args, panel, row, type, 1, 1);
        return;
    case 2:
        for (; panel + 2 <= tile->end_panel; panel += 2)
            direct(args, panel, row, type, 2, 2);
        for (; panel < tile->end_panel; panel++)
            direct(args, panel, row, type, 1, 2);
        return;
    case 3:
        for (; panel < tile->end_panel; panel++)
            direct(args, panel, row, type, 1, 3);
        return;
    case 4:
        for (; panel < tile->end_panel; panel++)
            direct(args, panel, row, type, 1, 4);
        return;
    default:
        assert(tile->end_row - row == DENSE_DIRECT_ROWS);
        for (; panel < tile->end_panel; panel++)
            direct(args, panel, row, type, 1, 5);
    }
}

/* rows x 16 from a widened panel: 12 accumulators for 6 rows leave two registers for weights. */
INLINE void tile_rows(const struct ops_matmul *args, const float *wide, uint32_t panel,
                      uint32_t row, const uint32_t rows) {
    const float *x = args->x + row * args->x_stride;
    size_t stride = args->x_stride;
    __m256 acc[DENSE_ROW_TILE][2];

#pragma GCC unroll 6
    for (uint32_t r = 0; r < rows; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (uint32_t k = 0; k < args->weight.k; k++, x++, wide += OPS_PANEL) {
        __m256 low = _mm256_load_ps(wide);
        __m256 high = _mm256_load_ps(wide + 8);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            __m256 value = _mm256_broadcast_ss(x + r * stride);
            acc[r][0] = _mm256_fmadd_ps(value, low, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(value, high, acc[r][1]);
        }
    }
#pragma GCC unroll 6
    for (uint32_t r = 0; r < rows; r++)
        store_sums(args, panel, row + r, acc[r][0], acc[r][1]);
}

INLINE void widen_panel(const struct ops_weight *weight, uint32_t panel, enum ops_type type,
                        float *wide) {
    uint64_t panel_bytes = (uint64_t)(weight->k / OPS_K_UNIT) * dense_unit_bytes(type);
    const uint8_t *unit = dense_panel(weight, panel);

    for (uint32_t left = weight->k; left > 0; left -= OPS_K_UNIT) {
        struct scales s = load_scales(type, unit);
        for (uint32_t k = 0; k < OPS_K_UNIT; k++, wide += OPS_PANEL) {
            struct wide w = widen(type, &s, unit + code_offset(type), k);
            _mm256_storeu_ps(wide, w.half[0]);
            _mm256_storeu_ps(wide + 8, w.half[1]);
        }
        /* The next panel is on its way while this one is multiplied. */
        for (uint32_t off = 0; off < dense_unit_bytes(type); off += 64)
            _mm_prefetch((const char *)unit + panel_bytes + off, _MM_HINT_T1);
        unit += dense_unit_bytes(type);
    }
}

static void tile_panel(const struct ops_matmul *args, const struct dense_tile *tile, uint32_t panel,
                       const float *wide) {
    uint32_t row = tile->first_row;

    while (row < tile->end_row) {
        uint32_t left = tile->end_row - row;
        /* 7 to 11 rows go in two near halves: fewer than 4 leave the FMA units waiting. */
        uint32_t count = left > 6 && left < 12 ? (left + 1) / 2 : left;
        switch (count) {
        case 1:
            tile_rows(args, wide, panel, row, 1);
            return;
        case 2:
            tile_rows(args, wide, panel, row, 2);
            return;
        case 3:
            tile_rows(args, wide, panel, row, 3);
            return;
        case 4:
            tile_rows(args, wide, panel, row, 4);
            row += 4;
            break;
        case 5:
            tile_rows(args, wide, panel, row, 5);
            row += 5;
            break;
        default:
            tile_rows(args, wide, panel, row, 6);
            row += DENSE_ROW_TILE;
        }
    }
}

INLINE void multiply(const struct ops_matmul *args, uint32_t first_item, uint32_t end_item,
                     float *scratch, enum ops_type type) {
    for (uint32_t item = first_item; item < end_item; item++) {
        struct dense_tile tile = dense_tile_of(args, item);
        if (tile.end_row - tile.first_row <= DENSE_DIRECT_ROWS) {
            direct_rows(args, &tile, type);
            continue;
        }
        for (uint32_t panel = tile.first_panel; panel < tile.end_panel; panel++) {
            widen_panel(&args->weight, panel, type, scratch);
            tile_panel(args, &tile, panel, scratch);
        }
    }
}

/* One function per type, so that each is compiled for its format alone. */
#define BY_TYPE(TYPE)                                                                              \
    static void multiply_##TYPE(const struct ops_matmul *args, uint32_t first_item,                \
                                uint32_t end_item, float *scratch) {                               \
        multiply(args, first_item, end_item, scratch, OPS_##TYPE);                                 \
    }                                                                                              \
    static void widen_##TYPE(const struct ops_weight *weight, uint32_t panel, float *wide) {       \
        widen_panel(weight, panel, OPS_##TYPE, wide);                                              \
    }
BY_TYPE(F32)
BY_TYPE(F16)
BY_TYPE(BF16)
BY_TYPE(Q8_0)
BY_TYPE(Q4_0)
BY_TYPE(Q4_1)

void dense_matmul_avx2(const struct ops_matmul *args, uint32_t first_item, uint32_t end_item,
                       void *scratch) {
    assert(args->rows >= 1 && args->rows <= OPS_ROWS_MAX);
    switch (args->weight.type) {
    case OPS_F32:
        multiply_F32(args, first_item, end_item, scratch);
        return;
    case OPS_F16:
        multiply_F16(args, first_item, end_item, scratch);
        return;
    case OPS_BF16:
        multiply_BF16(args, first_item, end_item, scratch);
        return;
    case OPS_Q8_0:
        multiply_Q8_0(args, first_item, end_item, scratch);
        return;
    case OPS_Q4_0:
        multiply_Q4_0(args, first_item, end_item, scratch);
        return;
    case OPS_Q4_1:
        multiply_Q4_1(args, first_item, end_item, scratch);
    }
}

void dense_widen_avx2(const struct ops_weight *weight, uint32_t panel, float *wide_out) {
    switch (weight->type) {
    case OPS_F32:
        widen_F32(weight, panel, wide_out);
        return;
    case OPS_F16:
        widen_F16(weight, panel, wide_out);
        return;
    case OPS_BF16:
        widen_BF16(weight, panel, wide_out);
        return;
    case OPS_Q8_0:
        widen_Q8_0(weight, panel, wide_out);
        return;
    case OPS_Q4_0:
        widen_Q4_0(weight, panel, wide_out);
        return;
    case OPS_Q4_1:
        widen_Q4_1(weight, panel, wide_out);
    }
}

/* Twelve chains of fused steps that touch no memory: the most the processor can do. */
uint64_t dense_fma_rate_avx2(uint64_t iterations) {
    enum { CHAINS = 12, STEPS = 64 };
    __m256 factor = _mm256_set1_ps(0.5f), term = _mm256_set1_ps(1.0f);
    __m256 a = term, b = term, c = term, d = term, e = term, f = term;
    __m256 g = term, h = term, i = term, j = term, k = term, l = term;

    for (uint64_t n = 0; n < iterations * STEPS; n++) {
        a = _mm256_fmadd_ps(a, factor, term);
        b = _mm256_fmadd_ps(b, factor, term);
        c = _mm256_fmadd_ps(c, factor, term);
        d = _mm256_fmadd_ps(d, factor, term);
        e = _mm256_fmadd_ps(e, factor, term);
        f = _mm256_fmadd_ps(f, factor, term);
        g = _mm256_fmadd_ps(g, factor, term);
        h = _mm256_fmadd_ps(h, factor, term);
        i = _mm256_fmadd_ps(i, factor, term);
        j = _mm256_fmadd_ps(j, factor, term);
        k = _mm256_fmadd_ps(k, factor, term);
        l = _mm256_fmadd_ps(l, factor, term);
        /* Twelve chains look alike to the compiler: this keeps it from computing only one. */
        __asm__ volatile("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f));
        __asm__ volatile("" : "+x"(g), "+x"(h), "+x"(i), "+x"(j), "+x"(k), "+x"(l));
    }
    return iterations * STEPS * CHAINS * 8 * 2;
}
