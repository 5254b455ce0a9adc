/* kernels/cuda/device_tile.cuh - a page of K and V as 16-bit tiles for many query rows.
 *
 * Responsible for: the shared memory of a prefill CTA, planes to fp16 tiles, BF16 pages to tiles,
 * products of 16 query rows with 32 tokens.
 * Not responsible for: softmax, order of pages (kv_prefill.cu).
 *
 * A code is held as a whole number: K as 2c + 1 (K6: 2c + 4), V likewise with the half step of its
 * tier, all exact in fp16, so only q and p are rounded. K lies [token][dim], V [dim][token] for
 * planes and [token][dim] for BF16, in chunks of 16 bytes swizzled against bank conflicts.
 *
 * Threads: device code; loads by the whole CTA of 256 threads, products by one warp.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_TILE_CUH
#define KERNELS_CUDA_DEVICE_TILE_CUH

#include "kernels/cuda/device_piece.cuh"

enum { TILE_THREADS = 256, TILE_QUERIES = 64, TILE_STAGES = 3 };

template <int DIM> struct tile_map {
    static constexpr uint32_t ROTATED = 0;      /* fp16 queries [64][DIM] */
    static constexpr uint32_t HIGH = 128 * DIM; /* BF16 queries, larger and smaller part */
    static constexpr uint32_t LOW = 256 * DIM;
    static constexpr uint32_t BUFFERS = 384 * DIM; /* two of K 128 DIM, V 128 DIM */
    static constexpr uint32_t BUFFER_BYTES = 256 * DIM;
    static constexpr uint32_t STAGES = BUFFERS + 2 * BUFFER_BYTES; /* pages as they are stored */
    static constexpr uint32_t STAGE_BYTES = stage_map<DIM>::WIDE;
    static constexpr uint32_t SCALES = STAGES + TILE_STAGES * STAGE_BYTES;
    static constexpr uint32_t SCALE_BYTES = 132 * 4;            /* [64] K, [64] V, factor */
    static constexpr uint32_t STEPS = SCALES + 2 * SCALE_BYTES; /* [64] worth of a rotated q */
    static constexpr uint32_t BARRIERS = STEPS + TILE_QUERIES * 4;
    static constexpr uint32_t STREAMS = BARRIERS + TILE_STAGES * 8; /* of the page in a stage */
    static constexpr uint32_t BYTES = STREAMS + TILE_STAGES * 4;
};

/* Offset of dim d of a row of queries, K or BF16 V. */
template <int DIM> static __device__ __forceinline__ uint32_t row_off(uint32_t row, uint32_t d) {
    return row * 2 * DIM + ((d / 8) ^ ((row ^ row >> 3) & 7)) * 16 + d % 8 * 2;
}

/* Offset of token t of dim d in V of a sealed page. */
static __device__ __forceinline__ uint32_t column_off(uint32_t d, uint32_t t) {
    return d * 128 + ((t / 8) ^ (d & 7)) * 16 + t % 8 * 2;
}

/* --- sealed pages: from a stage that holds one to 16-bit tiles, by all threads */

/* Bytes `which` of u as fp16 2u - 256 + half. */
static __device__ __forceinline__ uint32_t widen_pair(uint32_t u, uint32_t which, __half2 half) {
    uint32_t bits = __byte_perm(u, 0x64646464, which); /* 1024 + u */
    __half2 x = __hfma2(*(__half2 *)&bits, __float2half2_rn(2.0f), __float2half2_rn(-2304.0f));
    x = __hadd2(x, half);
    return *(uint32_t *)&x;
}

template <int DIM>
static __device__ __forceinline__ void tile_put_k(uint8_t *k, uint32_t stage, uint32_t streams) {
    using map = stage_map<DIM>;
    bool have = streams >> LAYOUT_KL & 1;
    __half2 half = __float2half2_rn(have ? 1.0f : 4.0f);
    uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < DIM / 64; i++) { /* four times DIM tasks: two words of KH each */
        uint32_t task = threadIdx.x / 32 + i * (TILE_THREADS / 32), ks = task % (DIM / 32);
        uint32_t mt = task / (DIM / 32), at = ((mt * 32 + lane) * (DIM / 32) + ks) * 4, a[4];
        uint32_t t = 8 * (lane / 4) + 2 * mt, d = 32 * ks + 4 * (lane % 4);
        uint2 high =
            load_8(stage + map::KH + ((mt * (DIM / 64) + ks / 2) * 32 + lane) * 16 + ks % 2 * 8);
        uint32_t middle = load_4(stage + map::KM + at);
        join_k(a, high.x, high.y, middle, have ? load_4(stage + map::KL + at) : 0);
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
            uint32_t u = a[n] ^ 0x80808080;
            *(uint2 *)(k + row_off<DIM>(t + n % 2, d + 16 * (n / 2))) =
                make_uint2(widen_pair(u, 0x4140, half), widen_pair(u, 0x4342, half));
        }
    }
}

template <int DIM>
static __device__ __forceinline__ void tile_put_v(uint8_t *v, uint32_t stage, uint32_t streams) {
    using map = stage_map<DIM>;
    uint32_t lane = threadIdx.x % 32, dt = threadIdx.x / 32, a[2][4];
    uint32_t at = ((dt / 4 * 32 + lane) * 4 + dt % 4) * 4;
    bool eight = streams >> LAYOUT_VX & 1, three = streams >> LAYOUT_VR1 & 1;
    bool four = streams >> LAYOUT_VR2 & 1;
    __half2 half = __float2half2_rn(eight ? 1.0f : four ? 16.0f : three ? 32.0f : 64.0f);

    if (dt >= DIM / 16)
        return;
    uint2 base = load_8(stage + map::VB + (dt / 2 * 32 + lane) * 16 + dt % 2 * 8);
    uint32_t r1 = three ? load_4(stage + map::VR1 + at) : 0;
    uint32_t r2 = four ? load_4(stage + map::VR2 + at) : 0;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (eight)
        x = load_16(stage + map::VX + (dt * 32 + lane) * 16);
    join_v<true>(a[0], base.x, select_bits(r1, r2, 0xAAAAAAAA), x.x, x.y, eight);
    join_v<true>(a[1], base.y, select_bits(r1 << 1, r2 >> 1, 0xAAAAAAAA), x.z, x.w, eight);
#pragma unroll
    for (uint32_t n = 0; n < 4; n++)
        a[n / 2][n % 2 * 2] = eight ? a[n / 2][n % 2 * 2] : a[n / 2][n % 2 * 2] << 4;
#pragma unroll
    for (uint32_t n = 0; n < 4; n++) { /* eight tokens of one dim */
        uint32_t hi = n % 2, j = n / 2, which = j ? 0x4342 : 0x4140;
        uint32_t d = 16 * dt + 8 * hi + lane / 4, t = 16 * (lane % 4) + 8 * j;
        *(uint4 *)(v + column_off(d, t)) =
            make_uint4(widen_pair(a[0][hi], which, half), widen_pair(a[0][2 + hi], which, half),
                       widen_pair(a[1][hi], which, half), widen_pair(a[1][2 + hi], which, half));
    }
}

/* Scales, by one warp: of K halved, of V relative to the page's largest, and the factor that
 * undoes it. */
static __device__ __forceinline__ void tile_put_scales(float *to, uint32_t meta, uint32_t streams) {
    uint32_t lane = threadIdx.x % 32, k_bits = load_4(meta + 4 * lane);
    uint32_t v_bits = load_4(meta + 128 + 4 * lane);
    float2 k = __half22float2(*(const __half2 *)&k_bits);
    float2 v = __half22float2(*(const __half2 *)&v_bits);
    float widest = fmaxf(v.x, v.y);

#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2)
        widest = fmaxf(widest, __shfl_xor_sync(~0u, widest, stride));
    to[2 * lane] = __fmul_rn(k.x, 0.5f);
    to[2 * lane + 1] = __fmul_rn(k.y, 0.5f);
    to[64 + 2 * lane] = __fdiv_rn(v.x, widest);
    to[64 + 2 * lane + 1] = __fdiv_rn(v.y, widest);
    if (lane == 0)
        to[128] = __fmul_rn(__fmul_rn(widest, 0.5f), page_v_factor(streams));
}

/* --- BF16 pages */

/* Where a page of 64 tokens lies: eight slots, or rows of a chunk. */
struct tile_source {
    const uint32_t *slots;
    const uint16_t *chunk_k;
    const uint16_t *chunk_v;
    uint32_t tokens; /* that may be read */
    uint32_t first;  /* of a chunk page, in the chunk */
};

/* Requests a page; tokens beyond the count become zeros. */
template <int DIM>
static __device__ __forceinline__ void
tile_request(const struct kvops_pool &pool, const tile_source &from, uint32_t row, uint32_t to) {
    constexpr uint32_t CHUNKS = DIM / 8;

#pragma unroll
    for (uint32_t i = 0; i < 2 * LAYOUT_PAGE_TOKENS * CHUNKS / TILE_THREADS; i++) {
        uint32_t index = i * TILE_THREADS + threadIdx.x, value = index / (64 * CHUNKS);
        uint32_t t = index / CHUNKS % 64, chunk = index % CHUNKS, valid = t < from.tokens ? 16 : 0;
        const uint8_t *at = pool.slots;
        if (valid && from.slots) {
            piece run = piece_of_page<DIM>(pool, from.slots, row, t / PIECE_TOKENS);
            at = (value ? run.v : run.k) + t % PIECE_TOKENS * 2 * DIM + chunk * 16;
        } else if (valid) {
            at = (const uint8_t *)((value ? from.chunk_v : from.chunk_k) + (uint64_t)t * DIM) +
                 chunk * 16;
        }
        copy_16(to + value * 128 * DIM + row_off<DIM>(t, chunk * 8), at, valid);
    }
    piece_commit();
}

/* --- products of one warp: 16 query rows from `first`, 32 tokens */

static __device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* x[n] += q K^T for tokens token + 8n .. of rows first + g (values 0, 1) and first + 8 + g. */
template <int DIM, bool HALF>
static __device__ __forceinline__ void tile_logits(uint32_t q, uint32_t first, uint32_t k,
                                                   uint32_t token, float (&x)[4][4]) {
    uint32_t lane = threadIdx.x % 32, a[4], b[4];

#pragma unroll
    for (uint32_t ks = 0; ks < DIM / 16; ks++) {
        load_matrices(a, q + row_off<DIM>(first + lane % 16, 16 * ks + lane / 16 * 8));
#pragma unroll
        for (uint32_t n = 0; n < 4; n += 2) {
            load_matrices(b, k + row_off<DIM>(token + 8 * n + lane / 16 * 8 + lane % 8,
                                              16 * ks + lane / 8 % 2 * 8));
            if (HALF) {
                mma_f16(x[n], a, b[0], b[1]);
                mma_f16(x[n + 1], a, b[2], b[3]);
            } else {
                mma_bf16(x[n], a, b[0], b[1]);
                mma_bf16(x[n + 1], a, b[2], b[3]);
            }
        }
    }
}

#endif
