/* kernels/host/kv_seal_avx2.c - BF16 pages to planes with AVX2; every bit as in kv_seal.c.
 *
 * Responsible for: the same operations as the plain form, eight at a time: no fused product, IEEE
 * division, the scale rounded up by the conversion itself.
 * Not responsible for: the order of bits in the planes (unpack_avx2.c).
 */
#include "kernels/host/unpack_avx2.h"
#include "kernels/host/vector_avx2.h"

/* 1 when every lane of every register is finite and within the largest scale. */
VECTOR_AVX2_INLINE int within(const __m256 *x, int count, float limit, float *absmax_out) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 max = _mm256_setzero_ps(), good = _mm256_cmp_ps(max, max, _CMP_EQ_OQ);
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        __m256 size = _mm256_and_ps(x[i], magnitude);
        good = _mm256_and_ps(good, _mm256_cmp_ps(size, _mm256_set1_ps(limit), _CMP_LE_OQ));
        max = _mm256_max_ps(max, size);
    }
    *absmax_out = vector_avx2_max(max);
    return _mm256_movemask_ps(good) == 0xff;
}

VECTOR_AVX2_INLINE __m256i code_of(__m256 y, __m256 scale) {
    __m256 code = _mm256_floor_ps(_mm256_div_ps(y, scale));

    code = _mm256_max_ps(code, _mm256_set1_ps(-128.0f));
    return _mm256_cvttps_epi32(_mm256_min_ps(code, _mm256_set1_ps(127.0f)));
}

VECTOR_AVX2_INLINE uint16_t scale_of(float absmax) {
    __m128i half = _mm_cvtps_ph(_mm_set_ss(absmax * 0x1p-7f), _MM_FROUND_TO_POS_INF);
    uint16_t bits = (uint16_t)_mm_extract_epi16(half, 0);

    return bits < LEAF_SCALE_MIN_BITS ? LEAF_SCALE_MIN_BITS : bits;
}

/* Codes of one vector of 8 * count values and its scale; 0 when no scale can hold it. */
VECTOR_AVX2_INLINE int encode(const uint16_t *x, int count, int8_t *codes, uint16_t *scale_out) {
    __m256 y[LEAF_DIM_MAX / 8];
    float absmax;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        y[i] = vector_avx2_from_bf16(x + 8 * i);
    int good = within(y, count, 0x1.fffffep+127f, &absmax);
    vector_avx2_rotate(y, count);
    good &= within(y, count, LEAF_ABSMAX_LIMIT, &absmax);
    if (!good) {
        memset(codes, 0, (size_t)count * 8);
        *scale_out = LEAF_SCALE_MIN_BITS;
        return 0;
    }
    *scale_out = scale_of(absmax);
    __m256 scale = _mm256_set1_ps(dense_f16_f32(*scale_out));
#pragma GCC unroll 16
    for (int i = 0; i < count; i += 2) {
        __m256i words = _mm256_packs_epi32(code_of(y[i], scale), code_of(y[i + 1], scale));
        words = _mm256_permute4x64_epi64(words, 0xD8);
        __m128i bytes =
            _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(codes + 8 * i), bytes);
    }
    return 1;
}

static int encode_vector(const uint16_t *x, uint32_t dim, int8_t *codes, uint16_t *scale_out) {
    return dim == 64 ? encode(x, 8, codes, scale_out) : encode(x, 16, codes, scale_out);
}

static void write_planes(const struct leaf_planes *page, const int8_t *k_codes,
                         const int8_t *v_codes) {
    unpack_avx2_write_k(page, k_codes);
    unpack_avx2_write_v(page, v_codes);
}

const struct leaf_coder leaf_coder_avx2 = {encode_vector, write_planes};
