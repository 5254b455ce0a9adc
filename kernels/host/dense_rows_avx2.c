/* kernels/host/dense_rows_avx2.c - norm, RoPE and SwiGLU with AVX2, equal in bits to plain C.
 *
 * Responsible for: the same operations in the same order as dense_rows.c, eight lanes at a time;
 * nothing is fused here, because a fused step would round differently.
 * Not responsible for: the definitions (dense_rows.c, dense.h).
 */
#include "kernels/host/dense.h"

#include <assert.h>
#include <immintrin.h>

static float mean_square(const float *x, uint32_t width) {
    __m256 acc[4];
    float lanes[DENSE_NORM_LANES];
    uint32_t i = 0;

    for (int part = 0; part < 4; part++)
        acc[part] = _mm256_setzero_ps();
    for (; i + DENSE_NORM_LANES <= width; i += DENSE_NORM_LANES) {
        for (int part = 0; part < 4; part++) {
            __m256 value = _mm256_loadu_ps(x + i + 8 * part);
            acc[part] = _mm256_add_ps(acc[part], _mm256_mul_ps(value, value));
        }
    }
    for (int part = 0; part < 4; part++)
        _mm256_storeu_ps(lanes + 8 * part, acc[part]);
    for (; i < width; i++)
        lanes[i % DENSE_NORM_LANES] += x[i] * x[i];
    for (uint32_t half = DENSE_NORM_LANES / 2; half > 0; half /= 2) {
        for (uint32_t lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    }
    return lanes[0] / (float)width;
}

void dense_rmsnorm_avx2(const struct ops_rmsnorm *args, uint32_t first_item, uint32_t end_item,
                        void *scratch) {
    (void)scratch;
    for (uint32_t row = first_item; row < end_item; row++) {
        const float *x = args->x + row * args->x_stride;
        float *y = args->y + row * args->y_stride;
        __m128 sum = _mm_set_ss(mean_square(x, args->width) + args->eps);
        float inverse = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(sum));
        __m256 inverses = _mm256_set1_ps(inverse);
        uint32_t i = 0;

        for (; i + 8 <= args->width; i += 8) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverses);
            _mm256_storeu_ps(y + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(args->gain + i)));
        }
        for (; i < args->width; i++)
            y[i] = x[i] * inverse * args->gain[i];
    }
}

/* (c0 c1 c2 c3) becomes (c0 c0 c1 c1 c2 c2 c3 c3). */
static __m256 twice(const float *four) {
    __m256 values = _mm256_castps128_ps256(_mm_loadu_ps(four));
    return _mm256_permutevar8x32_ps(values, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

static void rotate_adjacent(const float *x, const float *cosines, const float *sines, uint32_t dim,
                            float *y) {
    for (uint32_t d = 0; d < dim; d += 8) {
        __m256 value = _mm256_loadu_ps(x + d);
        __m256 swapped = _mm256_permute_ps(value, 0xb1);
        __m256 along = _mm256_mul_ps(value, twice(cosines + d / 2));
        __m256 across = _mm256_mul_ps(swapped, twice(sines + d / 2));
        _mm256_storeu_ps(y + d, _mm256_addsub_ps(along, across));
    }
}

static void rotate_halves(const float *x, const float *cosines, const float *sines, uint32_t dim,
                          float *y) {
    uint32_t half = dim / 2;

    for (uint32_t i = 0; i < half; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + half + i);
        __m256 c = _mm256_loadu_ps(cosines + i), s = _mm256_loadu_ps(sines + i);
        _mm256_storeu_ps(y + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(y + half + i, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
    }
}

static void rotate_head(const struct ops_rope *args, const float *x, uint32_t position, float *y) {
    const float *cosines = args->cos_table + (size_t)position * (args->head_dim / 2);
    const float *sines = args->sin_table + (size_t)position * (args->head_dim / 2);

    if (args->pairing == OPS_PAIR_ADJACENT)
        rotate_adjacent(x, cosines, sines, args->head_dim, y);
    else
        rotate_halves(x, cosines, sines, args->head_dim, y);
}

static void narrow(const float *x, uint32_t count, uint16_t *y) {
    for (uint32_t i = 0; i < count; i += 8) {
        __m256 value = _mm256_loadu_ps(x + i);
        __m256i bits = _mm256_castps_si256(value);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        __m256i rounded = _mm256_add_epi32(bits, bias);
        __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
        __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
        __m256i high =
            _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16);
        __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128((__m128i *)(y + i), packed);
    }
}

void dense_rope_avx2(const struct ops_rope *args, uint32_t first_item, uint32_t end_item,
                     void *scratch) {
    uint32_t dim = args->head_dim;

    (void)scratch;
    assert(dim % 16 == 0 && dim <= OPS_HEAD_DIM_MAX);
    for (uint32_t row = first_item; row < end_item; row++) {
        const struct ops_kv_dest *dest = args->dest + row;
        for (uint32_t head = 0; head < args->q_heads; head++) {
            float *q = args->q + row * args->q_stride + (size_t)head * dim;
            rotate_head(args, q, args->positions[row], q);
        }
        for (uint32_t head = 0; head < args->kv_heads; head++) {
            size_t off = row * args->kv_stride + (size_t)head * dim;
            float rotated[OPS_HEAD_DIM_MAX];
            rotate_head(args, args->k + off, args->positions[row], rotated);
            narrow(rotated, dim, dest->k + head * dest->head_stride);
            narrow(args->v + off, dim, dest->v + head * dest->head_stride);
        }
    }
}

/* dense_exp, eight lanes. */
static __m256 exponential(__m256 x) {
    __m256 clamped = _mm256_min_ps(x, _mm256_set1_ps(DENSE_EXP_MAX));
    clamped = _mm256_max_ps(clamped, _mm256_set1_ps(DENSE_EXP_MIN));
    __m256 round = _mm256_set1_ps(DENSE_EXP_ROUND);
    __m256 scaled = _mm256_mul_ps(clamped, _mm256_set1_ps(DENSE_EXP_LOG2E));
    __m256 shifted = _mm256_add_ps(scaled, round);
    __m256 n = _mm256_sub_ps(shifted, round);
    __m256 r = _mm256_sub_ps(clamped, _mm256_mul_ps(n, _mm256_set1_ps(DENSE_EXP_LN2_HIGH)));
    r = _mm256_sub_ps(r, _mm256_mul_ps(n, _mm256_set1_ps(DENSE_EXP_LN2_LOW)));
    __m256 p = _mm256_set1_ps(DENSE_EXP_C6);
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(DENSE_EXP_C5));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(DENSE_EXP_C4));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(DENSE_EXP_C3));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(DENSE_EXP_C2));
    p = _mm256_add_ps(_mm256_mul_ps(p, _mm256_mul_ps(r, r)), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    __m256 beyond = _mm256_cmp_ps(x, _mm256_set1_ps(DENSE_EXP_MAX), _CMP_GT_OQ);
    return _mm256_blendv_ps(p, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)), beyond);
}

void dense_swiglu_avx2(const struct ops_swiglu *args, uint32_t first_item, uint32_t end_item,
                       void *scratch) {
    (void)scratch;
    for (uint32_t item = first_item; item < end_item; item++) {
        size_t i = dense_item_first(item);
        size_t end = dense_item_end(item, args->count);
        for (; i + 8 <= end; i += 8) {
            __m256 gate = _mm256_loadu_ps(args->gate + i);
            __m256 minus = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
            __m256 below = _mm256_add_ps(_mm256_set1_ps(1.0f), exponential(minus));
            __m256 product =
                _mm256_mul_ps(_mm256_div_ps(gate, below), _mm256_loadu_ps(args->up + i));
            _mm256_storeu_ps(args->y + i, product);
        }
        for (; i < end; i++)
            args->y[i] = dense_swiglu(args->gate[i], args->up[i]);
    }
}
