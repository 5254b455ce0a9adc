/* kernels/host/vector_avx2.h - register-sized steps that several AVX2 files share.
 *
 * Responsible for: the Hadamard butterflies, sums and maxima across a register, exponential. Loops
 * over registers carry an unroll pragma: at -O2 their arrays would live in memory otherwise.
 * Not responsible for: memory beyond a load; only *_avx2.c files may include this.
 *
 * Threads: pure.
 * Units: 8 floats to a register.
 */
#ifndef KERNELS_HOST_VECTOR_AVX2_H
#define KERNELS_HOST_VECTOR_AVX2_H

#include <immintrin.h>

#include "kernels/host/leaf.h"

#define VECTOR_AVX2_INLINE static inline __attribute__((always_inline))

/* Lanes with bit `stride` clear become a + b, the others a - b: the same two operations on the same
 * operands as the plain loop, so the bits are equal. */
VECTOR_AVX2_INLINE __m256 vector_avx2_butterfly(__m256 x, __m256 other, int upper_lanes) {
    __m256 sum = _mm256_add_ps(x, other), difference = _mm256_sub_ps(other, x);

    switch (upper_lanes) {
    case 0xAA:
        return _mm256_blend_ps(sum, difference, 0xAA);
    case 0xCC:
        return _mm256_blend_ps(sum, difference, 0xCC);
    default:
        return _mm256_blend_ps(sum, difference, 0xF0);
    }
}

/* Normalised Hadamard of 8 * count values, count 8 or 16. */
VECTOR_AVX2_INLINE void vector_avx2_rotate(__m256 *x, int count) {
    __m256 root = _mm256_set1_ps(leaf_root((uint32_t)count * 8));
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        x[i] = vector_avx2_butterfly(x[i], _mm256_permute_ps(x[i], 0xB1), 0xAA);
        x[i] = vector_avx2_butterfly(x[i], _mm256_permute_ps(x[i], 0x4E), 0xCC);
        x[i] = vector_avx2_butterfly(x[i], _mm256_permute2f128_ps(x[i], x[i], 1), 0xF0);
    }
#pragma GCC unroll 16
    for (int stride = 1; stride < count; stride *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) {
            if (i & stride)
                continue;
            __m256 a = x[i], b = x[i + stride];
            x[i] = _mm256_add_ps(a, b);
            x[i + stride] = _mm256_sub_ps(a, b);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        x[i] = _mm256_mul_ps(x[i], root);
}

VECTOR_AVX2_INLINE __m256 vector_avx2_from_bf16(const uint16_t *at) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));

    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

VECTOR_AVX2_INLINE float vector_avx2_max(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

VECTOR_AVX2_INLINE float vector_avx2_sum(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* leaf_exp with fused steps: within 2 ulp of it, exactly 1 at 0, NaN stays NaN. */
VECTOR_AVX2_INLINE __m256 vector_avx2_exp(__m256 x) {
    __m256 round = _mm256_set1_ps(DENSE_EXP_ROUND);
    __m256 clamped = _mm256_max_ps(_mm256_set1_ps(DENSE_EXP_MIN), x);
    __m256 shifted = _mm256_fmadd_ps(clamped, _mm256_set1_ps(DENSE_EXP_LOG2E), round);
    __m256 n = _mm256_sub_ps(shifted, round);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(DENSE_EXP_LN2_HIGH), clamped);
    __m256 p = _mm256_set1_ps(DENSE_EXP_C6);
    __m256i power;

    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(DENSE_EXP_LN2_LOW), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(DENSE_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(DENSE_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(DENSE_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(DENSE_EXP_C2));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    power = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}

#endif
