/* kernels/cuda/device_wgmma.cuh - a page of K and V as fp16 tiles for wgmma (sm_90a).
 *
 * Responsible for: products of a warpgroup and their order, tiles in the layout they read, planes
 * into such tiles by one warpgroup.
 * Not responsible for: softmax, order of pages (kv_prefill.cu), sm_80 (device_tile.cuh).
 *
 * Tiles have rows of 128 bytes, sixteen-byte chunks of a row swapped by row % 8, as the 128-byte
 * swizzle of a descriptor has it; 64 dims to a part. Queries and K are [part][row][64 dims], V is
 * [dim][64 tokens]. Of sixteen tokens 8h + 4k + i of a page, row and column 8k + 4h + i hold one:
 * with that order eight values of V lie together in one thread, and no store of eight meets another
 * in a bank. Codes as in device_tile.cuh: 2c + half step.
 *
 * Threads: device code, one warpgroup of 128 threads.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_WGMMA_CUH
#define KERNELS_CUDA_DEVICE_WGMMA_CUH

#include "kernels/cuda/device_tile.cuh"

/* Offset of byte `byte` of a row of 128 bytes. */
static __device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t byte) {
    return row * 128 + ((byte / 16) ^ (row & 7)) * 16 + byte % 16;
}

/* Offset of dim d of a row of queries or K. Of 32 dims those that one thread converts, 4c .. 4c + 3
 * and 16 + 4c .., lie together in chunk c. */
static __device__ __forceinline__ uint32_t part_off(uint32_t row, uint32_t d) {
    uint32_t place = d / 32 % 2 * 32 + d % 16 / 4 * 8 + d / 16 % 2 * 4 + d % 4;
    return d / 64 * 8192 + swizzled(row, place * 2);
}

#if TILE_WGMMA

/* --- products */

/* Groups of eight rows lie 1,024 bytes apart; 128-byte swizzle. A tile `off` bytes further on has a
 * descriptor larger by off / 16. */
static __device__ __forceinline__ uint64_t tile_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* A number of the warp, known to the compiler as the same in all lanes. */
static __device__ __forceinline__ uint32_t group_index_of(uint32_t index) {
    return __shfl_sync(~0u, index, 0);
}

/* Warpgroup of the CTA. */
static __device__ __forceinline__ uint32_t group_index() {
    return group_index_of(threadIdx.x / TILE_GROUP_THREADS);
}

static __device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/* Keeps the compiler from moving or copying accumulators while products are under way. */
template <int N> static __device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* Keeps the registers of A as they are until here. */
static __device__ __forceinline__ void wgmma_keep(const uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        asm volatile("" ::"r"(a[i / 4][i % 4]) : "memory");
}

/* --- warpgroups */

/* Registers of every thread of the warpgroup from here on. */
template <int MORE> static __device__ __forceinline__ void group_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
}

template <int LESS> static __device__ __forceinline__ void group_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LESS));
}

/* --- products */

/* d = q k^T: 64 rows of A and 64 of B, sixteen dims, both in shared memory. */
static __device__ __forceinline__ void wgmma_first_logits(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 0, 1, 1, 0, 0; "
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]),
                   "=f"(d[6]), "=f"(d[7]), "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]),
                   "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]), "=f"(d[17]),
                   "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
                   "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]),
                   "=f"(d[30]), "=f"(d[31])
                 : "l"(a), "l"(b));
}

/* d += q k^T: 64 rows of A and 64 of B, sixteen dims, both in shared memory. */
static __device__ __forceinline__ void wgmma_logits(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, 0; "
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b));
}

/* d += p v: 64 rows, sixteen tokens of A in registers, of B in shared memory. */
static __device__ __forceinline__ void wgmma_values(float (&d)[32], const uint32_t (&a)[4],
                                                    uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0; "
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void wgmma_values(float (&d)[64], const uint32_t (&a)[4],
                                                    uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, "
                 "%33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "
                 "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 0; "
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* x = queries times K of a page, begun and committed. */
template <int DIM>
static __device__ __forceinline__ void begin_logits(uint32_t q, uint32_t k, float (&x)[32]) {
    wgmma_begin();
    uint64_t a = tile_descriptor(q), b = tile_descriptor(k);
    wgmma_first_logits(x, a, b);
#pragma unroll
    for (uint32_t ks = 1; ks < DIM / 16; ks++) {
        uint32_t off = (ks / 4 * 8192 + ks % 4 * 32) / 16;
        wgmma_logits(x, a + off, b + off);
    }
    wgmma_commit();
}

/* values += weights times V of a page, begun and committed. */
template <int DIM>
static __device__ __forceinline__ void begin_values(const uint32_t (&weights)[4][4], uint32_t v,
                                                    float (&values)[DIM / 2]) {
    wgmma_hold(values);
    wgmma_begin();
#pragma unroll
    for (uint32_t ks = 0; ks < 4; ks++)
        wgmma_values(values, weights[ks], tile_descriptor(v) + ks * 2);
    wgmma_commit();
}

/* --- planes to tiles */

/* Bytes `which` of u as fp16 2u - 256 + half step; `bias` is -2304 + half step where that is an
 * fp16 number, else -2304, and the half step is one. */
template <bool ONE>
static __device__ __forceinline__ uint32_t widen_bytes(uint32_t u, uint32_t which, __half2 bias) {
    uint32_t bits = __byte_perm(u, 0x64646464, which); /* 1024 + u */
    __half2 x = __hfma2(*(__half2 *)&bits, __float2half2_rn(2.0f), bias);

    if (ONE)
        x = __hadd2(x, __float2half2_rn(1.0f));
    return *(uint32_t *)&x;
}

/* Warp mt of the group: tokens 8g + 2mt and the next, all dims. LOW: eight bits, else six. */
template <int DIM, bool LOW>
static __device__ __forceinline__ void part_put_k_of(uint8_t *k, uint32_t stage) {
    using map = stage_map<DIM>;
    const __half2 bias = __float2half2_rn(LOW ? -2304.0f : -2300.0f);
    uint32_t mt = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32_t row = g / 2 * 16 + mt / 2 * 8 + g % 2 * 4 + mt % 2 * 2, middle[4], low[4];
    uint4 high;

    load_k_plane<DIM>(middle, stage + map::KM + (mt * 32 + lane) * (DIM / 8), true);
    load_k_plane<DIM>(low, stage + map::KL + (mt * 32 + lane) * (DIM / 8), LOW);
#pragma unroll
    for (uint32_t ks = 0; ks < DIM / 32; ks++) { /* two words of KH each, biased */
        if (ks % 2 == 0)
            high = load_16(stage + map::KH + ((mt * (DIM / 64) + ks / 2) * 32 + lane) * 16);
        uint32_t a[4];
        join_k(a, (ks % 2 ? high.z : high.x) ^ 0x88888888, (ks % 2 ? high.w : high.y) ^ 0x88888888,
               middle[ks], low[ks]);
#pragma unroll
        for (uint32_t n = 0; n < 2; n++)
            *(uint4 *)(k + part_off(row + n, 32 * ks + 4 * c)) = make_uint4(
                widen_bytes<LOW>(a[n], 0x4140, bias), widen_bytes<LOW>(a[n], 0x4342, bias),
                widen_bytes<LOW>(a[2 + n], 0x4140, bias), widen_bytes<LOW>(a[2 + n], 0x4342, bias));
    }
}

template <int DIM>
static __device__ __forceinline__ void part_put_k(uint8_t *k, uint32_t stage, uint32_t streams) {
    if (streams >> LAYOUT_KL & 1)
        part_put_k_of<DIM, true>(k, stage);
    else
        part_put_k_of<DIM, false>(k, stage);
}

/* Words dt and dt + 1 of a plane of V, or word dt alone when there is one tile to a warp. */
template <int DIM> static __device__ __forceinline__ uint2 load_v_words(uint32_t at, bool have) {
    uint2 words = make_uint2(0, 0);

    if (have && DIM == 128)
        words = load_8(at);
    else if (have)
        words.x = load_4(at);
    return words;
}

/* What a lane reads of V but for VX: base codes of every tile, planes of all. */
template <int DIM> struct v_words { uint2 base[DIM / 64], one, two; };

template <int DIM>
static __device__ __forceinline__ v_words<DIM> load_v(uint32_t stage, uint32_t streams) {
    using map = stage_map<DIM>;
    constexpr uint32_t TILES = DIM / 64;
    uint32_t first = threadIdx.x / 32 % 4 * TILES, lane = threadIdx.x % 32;
    uint32_t at = ((first / 4 * 32 + lane) * 4 + first % 4) * 4;
    v_words<DIM> words;

    if constexpr (DIM == 128) { /* two tiles lie together */
        uint4 both = load_16(stage + map::VB + (first / 2 * 32 + lane) * 16);
        words.base[0] = make_uint2(both.x, both.y);
        words.base[1] = make_uint2(both.z, both.w);
    } else {
        words.base[0] = load_8(stage + map::VB + (first / 2 * 32 + lane) * 16 + first % 2 * 8);
    }
    words.one = load_v_words<DIM>(stage + map::VR1 + at, streams >> LAYOUT_VR1 & 1);
    words.two = load_v_words<DIM>(stage + map::VR2 + at, streams >> LAYOUT_VR2 & 1);
    return words;
}

/* Warp w of the group: DIM / 64 tiles of 16 dims, all tokens. */
template <int DIM, bool EIGHT>
static __device__ __forceinline__ void part_put_v_of(uint8_t *v, uint32_t stage, uint32_t streams,
                                                     const v_words<DIM> &words) {
    using map = stage_map<DIM>;
    constexpr uint32_t TILES = DIM / 64;
    uint32_t first = threadIdx.x / 32 % 4 * TILES;
    uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    bool three = streams >> LAYOUT_VR1 & 1, four = streams >> LAYOUT_VR2 & 1;
    const __half2 bias = __float2half2_rn(EIGHT   ? -2304.0f
                                          : four  ? -2288.0f
                                          : three ? -2272.0f
                                                  : -2240.0f);

#pragma unroll
    for (uint32_t i = 0; i < TILES; i++) {
        uint32_t dt = first + i, a[2][4];
        uint32_t r1 = i ? words.one.y : words.one.x, r2 = i ? words.two.y : words.two.x;
        uint2 base = words.base[i];
        uint4 x = make_uint4(0, 0, 0, 0);
        if (EIGHT)
            x = load_16(stage + map::VX + (dt * 32 + lane) * 16);
        join_v<true>(a[0], base.x, select_bits(r1, r2, 0xAAAAAAAA), x.x, x.y, EIGHT);
        join_v<true>(a[1], base.y, select_bits(r1 << 1, r2 >> 1, 0xAAAAAAAA), x.z, x.w, EIGHT);
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) { /* eight tokens of one dim */
            uint32_t hi = n % 2, kv = n / 2, near = a[kv][hi], far = a[kv][2 + hi];
            if (hi == 0 && !EIGHT)
                near <<= 4, far <<= 4;
            *(uint4 *)(v + swizzled(16 * dt + 8 * hi + g, 32 * c + 16 * kv)) = make_uint4(
                widen_bytes<EIGHT>(near, 0x4140, bias), widen_bytes<EIGHT>(far, 0x4140, bias),
                widen_bytes<EIGHT>(near, 0x4342, bias), widen_bytes<EIGHT>(far, 0x4342, bias));
        }
    }
}

template <int DIM>
static __device__ __forceinline__ void part_put_v(uint8_t *v, uint32_t stage, uint32_t streams,
                                                  const v_words<DIM> &words) {
    if (streams >> LAYOUT_VX & 1)
        part_put_v_of<DIM, true>(v, stage, streams, words);
    else
        part_put_v_of<DIM, false>(v, stage, streams, words);
}

#endif

#endif
