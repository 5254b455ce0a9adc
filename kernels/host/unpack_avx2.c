/* kernels/host/unpack_avx2.c - planes of one page to signed 8-bit codes in panels, and back.
 *
 * Responsible for: what unpack_avx2.h says. The bit moves are those of a GPU fragment: the field
 * that must move is stored so that one rotation moves both of its parts.
 * Not responsible for: being the specification (layout.c is; tests compare every bit).
 *
 * K is expanded first and then transposed 8 tokens by 32 dims; V is transposed while still packed,
 * because its bytes already hold neighbours of both axes in their bits.
 */
#include "kernels/host/unpack_avx2.h"

#include "kernels/host/vector_avx2.h"

#define INLINE VECTOR_AVX2_INLINE

INLINE __m256i load(const uint8_t *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

INLINE __m256i mask8(int byte) {
    return _mm256_set1_epi8((char)byte);
}

INLINE __m256i rotate4(__m256i x) {
    return _mm256_or_si256(_mm256_slli_epi32(x, 4), _mm256_srli_epi32(x, 28));
}

INLINE __m256i rotate2(__m256i x) {
    return _mm256_or_si256(_mm256_slli_epi32(x, 2), _mm256_srli_epi32(x, 30));
}

/* *first = (a & m) | (b & ~m), *second = (b & m) | (a & ~m). */
INLINE void exchange(__m256i a, __m256i b, __m256i m, __m256i *first, __m256i *second) {
    __m256i moved = _mm256_and_si256(_mm256_xor_si256(a, b), m);

    *first = _mm256_xor_si256(b, moved);
    *second = _mm256_xor_si256(a, moved);
}

/* In each half: row r of the result holds bytes 2r and 2r + 1 of all eight inputs, 8 and 8. */
INLINE void transpose8(__m256i r[8]) {
    __m256i a[8], b[8];
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
        a[i + 4] = _mm256_unpackhi_epi8(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_unpacklo_epi16(a[4 * i], a[4 * i + 1]);
        b[4 * i + 1] = _mm256_unpackhi_epi16(a[4 * i], a[4 * i + 1]);
        b[4 * i + 2] = _mm256_unpacklo_epi16(a[4 * i + 2], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi16(a[4 * i + 2], a[4 * i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        int from = i / 2 * 4 + i % 2;
        r[2 * i] = _mm256_unpacklo_epi32(b[from], b[from + 2]);
        r[2 * i + 1] = _mm256_unpackhi_epi32(b[from], b[from + 2]);
    }
}

INLINE void store_halves(int8_t *low, int8_t *high, __m256i x) {
    _mm_store_si128((__m128i *)low, _mm256_castsi256_si128(x));
    _mm_store_si128((__m128i *)high, _mm256_extracti128_si256(x, 1));
}

/* --- K */

/* The words of rows L = 4g .. 4g + 3 and dims 64 * kk .. of one token pair, in the order
 * [L0 ks0, L0 ks1, L2 ks0, L2 ks1 | L1 .., L3 ..]. */
INLINE __m256i k_words(const uint8_t *tile, uint32_t row, uint32_t dim, uint32_t kk) {
    if (dim == 64)
        return _mm256_permute4x64_epi64(load(tile + row * 8), 0xD8);
    __m256i low = load(tile + row * 16), high = load(tile + row * 16 + 32);
    return kk ? _mm256_unpackhi_epi64(low, high) : _mm256_unpacklo_epi64(low, high);
}

/* 4 x 32 codes of tokens 8g + 2mt and + 1: out[2 * i + hf]. */
INLINE void k_expand(const struct leaf_planes *page, uint32_t dim, int k8, uint32_t row,
                     uint32_t kk, __m256i out[4]) {
    uint32_t mt = row / 32, unit = (mt * (dim / 64) + kk) * 32 + row % 32;
    __m256 ha = _mm256_castsi256_ps(load(page->plane[LAYOUT_KH] + unit * 16));
    __m256 hb = _mm256_castsi256_ps(load(page->plane[LAYOUT_KH] + unit * 16 + 32));
    __m256i h0 = _mm256_castps_si256(_mm256_shuffle_ps(ha, hb, 0x88));
    __m256i h1 = _mm256_castps_si256(_mm256_shuffle_ps(ha, hb, 0xDD));
    __m256i m = k_words(page->plane[LAYOUT_KM], row, dim, kk), n0, n1, rest;

    /* rest = (l & CC) | (m & 33): the fields of i = 1, two bits low. */
    if (k8) {
        exchange(m, k_words(page->plane[LAYOUT_KL], row, dim, kk), mask8(0xCC), &n0, &rest);
    } else {
        n0 = _mm256_and_si256(m, mask8(0xCC));
        rest = _mm256_and_si256(m, mask8(0x33));
    }
    n1 = rotate2(rest);
    exchange(h0, n0, mask8(0xF0), &out[0], &rest);
    out[1] = rotate4(rest);
    exchange(h1, n1, mask8(0xF0), &out[2], &rest);
    out[3] = rotate4(rest);
}

INLINE void unpack_k(const struct leaf_planes *page, uint32_t dim, int k8, int8_t *panels) {
    for (uint32_t g = 0; g < 8; g++) {
        for (uint32_t kk = 0; kk < dim / 64; kk++) {
            __m256i codes[2][8];
#pragma GCC unroll 16
            for (uint32_t mt = 0; mt < 4; mt++) {
                __m256i four[4];
                k_expand(page, dim, k8, mt * 32 + 4 * g, kk, four);
                codes[0][2 * mt] = four[0];
                codes[0][2 * mt + 1] = four[1];
                codes[1][2 * mt] = four[2];
                codes[1][2 * mt + 1] = four[3];
            }
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 2; i++) {
                transpose8(codes[i]);
#pragma GCC unroll 16
                for (uint32_t r = 0; r < 8; r++) {
                    uint32_t word = r / 2;
                    uint32_t d = 32 * (2 * kk + word % 2) + 16 * i + 8 * (word / 2) + 2 * (r % 2);
                    int8_t *at = panels + (g * dim + d) * 8;
                    store_halves(at, at + 4 * 8, codes[i][r]);
                }
            }
        }
    }
}

void unpack_avx2_k(const struct leaf_planes *page, int8_t *panels) {
    int k8 = page->plane[LAYOUT_KL] != NULL;

    if (page->dim == 64 && k8)
        unpack_k(page, 64, 1, panels);
    else if (page->dim == 64)
        unpack_k(page, 64, 0, panels);
    else if (k8)
        unpack_k(page, 128, 1, panels);
    else
        unpack_k(page, 128, 0, panels);
}

/* --- V */

/* Eight rows d & 7 of a tile whose rows have 64 bytes, transposed: result r, byte j of half h =
 * byte 2r + j / 8 of the unit of token group 2 * tp + h and dim j % 8. */
INLINE void v_rows(const uint8_t *tile, uint32_t tp, __m256i r[8]) {
#pragma GCC unroll 16
    for (uint32_t dl = 0; dl < 8; dl++)
        r[dl] = load(tile + dl * 64 + tp * 32);
    transpose8(r);
}

/* VX with the fields of hi = 0 moved beside those of hi = 1: nibble hi of byte b. */
INLINE void vx_rows(const uint8_t *tile, uint32_t tp, __m256i r[8]) {
    const __m256i back = _mm256_setr_epi8(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14, 3,
                                          0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14);
#pragma GCC unroll 16
    for (uint32_t dl = 0; dl < 8; dl++) {
        __m256i x = load(tile + dl * 64 + tp * 32);
        __m256i low = _mm256_srli_epi16(_mm256_shuffle_epi8(x, back), 4);
        __m256i high = _mm256_slli_epi16(x, 4);
        r[dl] = _mm256_or_si256(_mm256_and_si256(low, mask8(0x0F)),
                                _mm256_and_si256(high, mask8(0xF0)));
    }
    transpose8(r);
}

/* Refinement bits of kv = 0 and kv = 1: VR1 in odd, VR2 in even bits, as pairs under the base. */
INLINE void v_refine(__m256i r1, __m256i r2, __m256i *kv0, __m256i *kv1) {
    __m256i swapped;

    exchange(r1, r2, mask8(0xAA), kv0, &swapped);
    *kv1 = _mm256_or_si256(_mm256_and_si256(_mm256_add_epi8(swapped, swapped), mask8(0xAA)),
                           _mm256_and_si256(_mm256_srli_epi16(swapped, 1), mask8(0x55)));
}

struct v_target {
    int8_t *panels;
    uint32_t panel; /* d / 8 of hi = 0 */
    uint32_t token; /* of mh = 0 in the lower half; the upper half is 16 later */
};

/* One register of nibbles (low: hi = 0) and, for V8, of low bits, to rows token and token + 1. */
INLINE void v_store(struct v_target to, __m256i nibbles, const __m256i *low) {
    __m256i hi0 = _mm256_and_si256(_mm256_slli_epi16(nibbles, 4), mask8(0xF0));
    __m256i hi1 = _mm256_and_si256(nibbles, mask8(0xF0));
    int8_t *at = to.panels + (to.panel * LAYOUT_PAGE_TOKENS + to.token) * 8;
    int8_t *next = at + LAYOUT_PAGE_TOKENS * 8;

    if (low) {
        hi0 = _mm256_or_si256(hi0, _mm256_and_si256(*low, mask8(0x0F)));
        hi1 = _mm256_or_si256(hi1, _mm256_and_si256(_mm256_srli_epi16(*low, 4), mask8(0x0F)));
    }
    store_halves(at, at + 16 * 8, hi0);
    store_halves(next, next + 16 * 8, hi1);
}

/* Both token parities mh of one register of base fields; rr holds their refinement pairs. */
INLINE void v_expand(struct v_target to, __m256i base, __m256i rr, const __m256i low[2], int v8) {
    __m256i n0, n1;

    base = _mm256_xor_si256(base, mask8(0xAA)); /* the top bit of code + 128 back to code */
    exchange(base, rr, mask8(0xCC), &n0, &n1);
    n1 = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(n1, 2), mask8(0xCC)),
                         _mm256_and_si256(_mm256_srli_epi16(n1, 2), mask8(0x33)));
    v_store(to, n0, v8 ? &low[0] : NULL);
    to.token += 2;
    v_store(to, n1, v8 ? &low[1] : NULL);
}

/* Registers VB [4x + 2kv + t3] of dims 32 * dq .. + 31 of one token half. */
INLINE void v_quarter(const struct leaf_planes *page, uint32_t bits, struct v_target to,
                      uint32_t dq, const __m256i *refine) {
    const uint8_t *vb = page->plane[LAYOUT_VB] + dq * 512;
    uint32_t tp = to.token / 32;
    __m256i base[8], low[2][8], none[2] = {{0}, {0}};

    v_rows(vb, tp, base);
#pragma GCC unroll 16
    for (uint32_t x = 0; bits == 8 && x < 2; x++)
        vx_rows(page->plane[LAYOUT_VX] + (2 * dq + x) * 512, tp, low[x]);
#pragma GCC unroll 16
    for (uint32_t r = 0; r < 8; r++) {
        uint32_t x = r / 4, kv = r / 2 % 2, t3 = r % 2, dt = (2 * dq + x) % 4;
        struct v_target at = {to.panels, 4 * dq + 2 * x, tp * 32 + 8 * t3 + 4 * kv};
        __m256i rr = bits > 2 ? refine[(dt * 2 + t3) * 2 + kv] : none[0];
        if (bits == 8) {
            __m256i pair[2] = {low[x][4 * kv + t3], low[x][4 * kv + 2 + t3]};
            v_expand(at, base[r], rr, pair, 1);
        } else {
            v_expand(at, base[r], rr, none, 0);
        }
    }
}

INLINE void unpack_v(const struct leaf_planes *page, uint32_t dim, uint32_t bits, int8_t *panels) {
    for (uint32_t tp = 0; tp < 2; tp++) {
        for (uint32_t dh = 0; dh < dim / 64; dh++) {
            __m256i r1[8] = {{0}}, r2[8] = {{0}}, refine[16];
            if (bits > 2)
                v_rows(page->plane[LAYOUT_VR1] + dh * 512, tp, r1);
            if (bits > 3)
                v_rows(page->plane[LAYOUT_VR2] + dh * 512, tp, r2);
#pragma GCC unroll 16
            for (uint32_t r = 0; bits > 2 && r < 8; r++)
                v_refine(r1[r], r2[r], &refine[2 * r], &refine[2 * r + 1]);
            for (uint32_t dq = 2 * dh; dq < 2 * dh + 2; dq++) {
                struct v_target to = {panels, 0, tp * 32};
                v_quarter(page, bits, to, dq, refine);
            }
        }
    }
}

INLINE void unpack_v_dim(const struct leaf_planes *page, uint32_t dim, int8_t *panels) {
    if (page->plane[LAYOUT_VX])
        unpack_v(page, dim, 8, panels);
    else if (page->plane[LAYOUT_VR2])
        unpack_v(page, dim, 4, panels);
    else if (page->plane[LAYOUT_VR1])
        unpack_v(page, dim, 3, panels);
    else
        unpack_v(page, dim, 2, panels);
}

void unpack_avx2_v(const struct leaf_planes *page, int8_t *panels) {
    if (page->dim == 64)
        unpack_v_dim(page, 64, panels);
    else
        unpack_v_dim(page, 128, panels);
}

/* --- writing, a word of four bytes at a time */

static uint32_t get_word(const void *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static void put_word(uint8_t *tile, uint32_t off, uint32_t word) {
    memcpy(tile + off, &word, sizeof word);
}

static uint32_t rotate_right(uint32_t word, uint32_t bits) {
    return word >> bits | word << (32 - bits);
}

/* The exact inverse of k_expand for one row L and one 32-dim step ks. */
static void write_k_words(const struct leaf_planes *page, uint32_t row, uint32_t ks,
                          const int8_t *codes) {
    const uint32_t high = 0xF0F0F0F0u, pairs = 0xCCCCCCCCu;
    uint32_t dim = page->dim, mt = row / 32, line = row % 32;
    uint32_t t = 8 * (line / 4) + 2 * mt, d = 32 * ks + 4 * (line % 4);
    uint32_t kh = ((mt * (dim / 64) + ks / 2) * 32 + line) * 16 + 8 * (ks & 1), n[2];

    for (uint32_t i = 0; i < 2; i++) {
        uint32_t even = get_word(codes + t * dim + d + 16 * i);
        uint32_t odd = rotate_right(get_word(codes + (t + 1) * dim + d + 16 * i), 4);
        put_word(page->plane[LAYOUT_KH], kh + 4 * i, (even & high) | (odd & ~high));
        n[i] = (odd & high) | (even & ~high);
    }
    n[1] = rotate_right(n[1], 2);
    put_word(page->plane[LAYOUT_KM], row * (dim / 8) + 4 * ks, (n[0] & pairs) | (n[1] & ~pairs));
    if (page->plane[LAYOUT_KL])
        put_word(page->plane[LAYOUT_KL], row * (dim / 8) + 4 * ks,
                 (n[1] & pairs) | (n[0] & ~pairs));
}

void unpack_avx2_write_k(const struct leaf_planes *page, const int8_t *codes) {
    for (uint32_t row = 0; row < 128; row++)
        for (uint32_t ks = 0; ks < page->dim / 32; ks++)
            write_k_words(page, row, ks, codes);
}

/* Offset codes of the four tokens of one word: 16 * tq + {0, 1, 8, 9} from `codes`. */
static uint32_t v_word(const int8_t *codes, uint32_t dim) {
    uint32_t word = (uint32_t)(uint8_t)codes[0] | (uint32_t)(uint8_t)codes[dim] << 8 |
                    (uint32_t)(uint8_t)codes[8 * dim] << 16 |
                    (uint32_t)(uint8_t)codes[9 * dim] << 24;
    return word ^ 0x80808080u;
}

/* All words of unit `line` = 4 * (d & 7) + (t >> 4) and 16 dims dt. */
static void write_v_words(const struct leaf_planes *page, uint32_t dt, uint32_t line,
                          const int8_t *codes) {
    const uint32_t high = 0xF0F0F0F0u, pairs = 0xCCCCCCCCu, odd = 0xAAAAAAAAu;
    uint32_t dim = page->dim, refine[2];
    uint32_t plane = ((dt / 4) * 32 + line) * 16 + 4 * (dt % 4);

    for (uint32_t kv = 0; kv < 2; kv++) {
        uint32_t n[2], w = 2 * dt + kv;
        for (uint32_t mh = 0; mh < 2; mh++) {
            const int8_t *at =
                codes + (16 * (line % 4) + 4 * kv + 2 * mh) * dim + 16 * dt + line / 4;
            uint32_t w0 = v_word(at, dim), w1 = v_word(at + 8, dim);
            n[mh] = (w0 >> 4 & ~high) | (w1 & high);
            if (page->plane[LAYOUT_VX])
                put_word(page->plane[LAYOUT_VX], (dt * 32 + line) * 16 + 4 * (2 * kv + mh),
                         (rotate_right(w0, 4) & high) | (w1 & ~high));
        }
        put_word(page->plane[LAYOUT_VB], ((w / 4) * 32 + line) * 16 + 4 * (w % 4),
                 (n[0] & pairs) | (n[1] >> 2 & ~pairs));
        refine[kv] = (n[0] & ~pairs) | (n[1] << 2 & pairs);
    }
    if (page->plane[LAYOUT_VR1])
        put_word(page->plane[LAYOUT_VR1], plane, (refine[0] & odd) | (refine[1] & odd) >> 1);
    if (page->plane[LAYOUT_VR2])
        put_word(page->plane[LAYOUT_VR2], plane, (refine[0] & ~odd) | (refine[1] & ~odd) << 1);
}

void unpack_avx2_write_v(const struct leaf_planes *page, const int8_t *codes) {
    for (uint32_t dt = 0; dt < page->dim / 16; dt++)
        for (uint32_t line = 0; line < 32; line++)
            write_v_words(page, dt, line, codes);
}
