/* kernels/cuda/device_tile.cuh - a page of K and V as 16-bit tiles for many query rows.
 *
 * Responsible for: the shared memory of a prefill CTA, BF16 pages to tiles, products of 16 query
 * rows with 32 tokens.
 * Not responsible for: softmax, order of pages (kv_prefill.cu).
 *
 * A code is held as a whole number: K as 2c + 1 (K6: 2c + 4), V likewise with the half step of its
 * tier, all exact in fp16, so only q and p are rounded. K lies [token][dim], V [dim][token] for
 * planes and [token][dim] for BF16, in chunks of 16 bytes swizzled against bank conflicts.
 *
 * Threads: device code; loads by a group of four warps, products by one warp.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_TILE_CUH
#define KERNELS_CUDA_DEVICE_TILE_CUH

#include "kernels/cuda/device_piece.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && PAGE_BULK_COPY
#define TILE_WGMMA 1
#else
#define TILE_WGMMA 0
#endif

/* Groups of four warps in a CTA: with the products of sm_90a three, with those of sm_80 two. Planes
 * on sm_90a have groups and a map of their own (device_walk_wgmma.cuh), until they are done. */
enum { TILE_QUERIES = 64, TILE_GROUP_THREADS = 128, TILE_GROUPS = TILE_WGMMA ? 3 : 2 };
enum { TILE_THREADS = TILE_GROUPS * TILE_GROUP_THREADS };

/* Shared memory. Three groups have their BF16 queries where two have stages. */
template <int DIM, int GROUPS> struct tile_map {
    static constexpr uint32_t STAGE_COUNT = GROUPS == 3 ? 6 : 3;
    static constexpr uint32_t ROTATED = 0; /* fp16 queries [64][DIM] */
    static constexpr uint32_t BUFFERS = GROUPS == 3 ? 128 * DIM : 384 * DIM;
    static constexpr uint32_t BUFFER_BYTES = 256 * DIM; /* K 128 DIM, V 128 DIM */
    static constexpr uint32_t SCALES = BUFFERS + GROUPS * BUFFER_BYTES;
    static constexpr uint32_t SCALE_BYTES = 132 * 4;                 /* [64] K, [64] V, factors */
    static constexpr uint32_t STEPS = SCALES + GROUPS * SCALE_BYTES; /* [64] worth of a rotated q */
    static constexpr uint32_t BARRIERS = STEPS + TILE_QUERIES * 4;
    static constexpr uint32_t STREAMS = BARRIERS + STAGE_COUNT * 8; /* of the page in a stage */
    static constexpr uint32_t STAGES = (STREAMS + STAGE_COUNT * 4 + 127) / 128 * 128;
    static constexpr uint32_t STAGE_BYTES = stage_map<DIM>::WIDE;      /* a page as it is stored */
    static constexpr uint32_t HIGH = GROUPS == 3 ? STAGES : 128 * DIM; /* BF16 queries, larger */
    static constexpr uint32_t LOW = HIGH + 128 * DIM;                  /* and smaller part */
    static constexpr uint32_t BYTES = STAGES + STAGE_COUNT * STAGE_BYTES;
};
template <int DIM> using tile_here = tile_map<DIM, TILE_GROUPS>;

/* Barrier of a group of four warps. */
static __device__ __forceinline__ void tile_sync(uint32_t group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

/* Offset of dim d of a row of queries, K or BF16 V. */
template <int DIM> static __device__ __forceinline__ uint32_t row_off(uint32_t row, uint32_t d) {
    return row * 2 * DIM + ((d / 8) ^ ((row ^ row >> 3) & 7)) * 16 + d % 8 * 2;
}

/* Offset of token t of dim d in V of a sealed page. */
static __device__ __forceinline__ uint32_t column_off(uint32_t d, uint32_t t) {
    return d * 128 + ((t / 8) ^ (d & 7)) * 16 + t % 8 * 2;
}

/* Bytes `which` of u as fp16 2u - 256 + half. */
static __device__ __forceinline__ uint32_t widen_pair(uint32_t u, uint32_t which, __half2 half) {
    uint32_t bits = __byte_perm(u, 0x64646464, which); /* 1024 + u */
    __half2 x = __hfma2(*(__half2 *)&bits, __float2half2_rn(2.0f), __float2half2_rn(-2304.0f));
    x = __hadd2(x, half);
    return *(uint32_t *)&x;
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

/* First byte of run lane % 4 of K (lanes 0..3) or V (4..7), or of anything where no token of it may
 * be read. */
template <int DIM>
static __device__ __forceinline__ const uint8_t *tile_run(const struct kvops_pool &pool,
                                                          const tile_source &from, uint32_t row) {
    uint32_t run = threadIdx.x % 4, value = threadIdx.x / 4 % 2;

    if (run * PIECE_TOKENS >= from.tokens)
        return pool.slots;
    if (!from.slots)
        return (const uint8_t *)((value ? from.chunk_v : from.chunk_k) + run * PIECE_TOKENS * DIM);
    piece at = piece_of_page<DIM>(pool, from.slots, row, run);
    return value ? at.v : at.k;
}

/* Requests a page, by a group; tokens beyond the count become zeros. A warp copies 512 bytes of a
 * run. */
template <int DIM>
static __device__ __forceinline__ void
tile_request(const struct kvops_pool &pool, const tile_source &from, uint32_t row, uint32_t to) {
    constexpr uint32_t RUN = 32 * DIM, CHUNKS = DIM / 8;
    uint64_t mine = (uint64_t)tile_run<DIM>(pool, from, row);

#pragma unroll
    for (uint32_t i = 0; i < 8 * RUN / 16 / TILE_GROUP_THREADS; i++) {
        uint32_t index = i * TILE_GROUP_THREADS + threadIdx.x % TILE_GROUP_THREADS,
                 which = index / (RUN / 16);
        uint32_t t = which % 4 * PIECE_TOKENS + index / CHUNKS % PIECE_TOKENS;
        const uint8_t *run = (const uint8_t *)__shfl_sync(~0u, mine, which);
        uint32_t valid = t < from.tokens ? 16 : 0;
        copy_16(to + which / 4 * 128 * DIM + row_off<DIM>(t, index % CHUNKS * 8),
                run + (valid ? index % (RUN / 16) * 16 : 0), valid);
    }
    piece_commit();
}

/* --- products of one warp: 16 query rows from `first`, 32 tokens */

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
