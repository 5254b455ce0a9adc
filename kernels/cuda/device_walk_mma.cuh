/* kernels/cuda/device_walk_mma.cuh - sealed pages of prefill attention with mma.sync (sm_80).
 *
 * Responsible for: planes to fp16 tiles by the whole CTA, attention of 64 query vectors over them.
 * Not responsible for: sm_90a (device_walk_wgmma.cuh), BF16 pages (device_plain.cuh).
 *
 * A page is a tile for all eight warps: warp w takes rows 16 (w % 4) .. and one half of the tokens.
 *
 * Threads: device code, 256 threads.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_WALK_MMA_CUH
#define KERNELS_CUDA_DEVICE_WALK_MMA_CUH

#include "kernels/cuda/device_prefill.cuh"

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

template <int DIM>
static __device__ __forceinline__ void put_tile(const struct prefill &at, uint32_t page) {
    using map = tile_here<DIM>;
    uint32_t stage = page % map::STAGE_COUNT, buffer = page % 2;
    uint32_t from = shared_address(at.shared + map::STAGES + stage * map::STAGE_BYTES);
    uint32_t streams = ((const uint32_t *)(at.shared + map::STREAMS))[stage];
    uint8_t *k = at.shared + map::BUFFERS + buffer * map::BUFFER_BYTES;

    tile_put_k<DIM>(k, from, streams);
    tile_put_v<DIM>(k + 128 * DIM, from, streams);
    if (threadIdx.x / 32 == TILE_THREADS / 32 - 1)
        tile_put_scales((float *)(at.shared + map::SCALES + buffer * map::SCALE_BYTES),
                        from + stage_map<DIM>::META, streams);
}

template <int DIM>
static __device__ __forceinline__ void attend_planes(const struct prefill &at, uint32_t buffer,
                                                     rows_state<DIM> &state) {
    using map = tile_here<DIM>;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4;
    uint32_t first = warp % 4 * 16, token = warp / 4 * 32, a[2][4], b[4];
    uint32_t k = shared_address(at.shared + map::BUFFERS + buffer * map::BUFFER_BYTES);
    uint32_t v = k + 128 * DIM;
    const float *scale = (const float *)(at.shared + map::SCALES + buffer * map::SCALE_BYTES);
    const float *steps = (const float *)(at.shared + map::STEPS) + first + lane / 4;
    float x[4][4] = {}, keep[2];

    tile_logits<DIM, true>(shared_address(at.shared + map::ROTATED), first, k, token, x);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = __fmul_rn(__fmul_rn(x[n][i], steps[i / 2 * 8]),
                                scale[token + 8 * n + 2 * c + i % 2]);
    softmax_rows(x, state, keep);
    keep_values(keep, state);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float s0 = scale[64 + token + 8 * n + 2 * c], s1 = scale[64 + token + 8 * n + 2 * c + 1];
        a[n / 2][n % 2 * 2] = pack_f16(__fmul_rn(x[n][0], s0), __fmul_rn(x[n][1], s1));
        a[n / 2][n % 2 * 2 + 1] = pack_f16(__fmul_rn(x[n][2], s0), __fmul_rn(x[n][3], s1));
    }
#pragma unroll
    for (uint32_t n = 0; n < DIM / 8; n += 2) {
        float fresh[2][4] = {};
#pragma unroll
        for (uint32_t ks = 0; ks < 2; ks++) {
            load_matrices(b, v + column_off(8 * n + lane / 16 * 8 + lane % 8,
                                            token + 16 * ks + lane / 8 % 2 * 8));
            mma_f16(fresh[0], a[ks], b[0], b[1]);
            mma_f16(fresh[1], a[ks], b[2], b[3]);
        }
        add_values(fresh, n, scale[128], state);
    }
}

/* All sealed blocks. While page n is used, n + 1 becomes tiles and n + 2, n + 3 are on their way;
 * warp 0 alone waits for copies, the barrier of the CTA shows them to all. */
template <int DIM, class F>
static __device__ __forceinline__ void walk_planes(const struct prefill &at, rows_state<DIM> &state,
                                                   F &&prepare) {
    using map = tile_here<DIM>;
    uint32_t pages = visible_pages(at), barriers = shared_address(at.shared + map::BARRIERS);
    bool asks = threadIdx.x < 32;
    asking ask = {};

    prepare();
    if (asks) {
        asking_start<DIM, map>(at, 0, 1, map::STAGE_COUNT, ask);
        for (uint32_t n = 0; n < map::STAGE_COUNT - 1; n++)
            ask_page<DIM, map>(at, ask);
        if (pages > 0)
            page_wait<2>(barriers, 0);
        ask_page<DIM, map>(at, ask);
    }
    __syncthreads();
    if (pages > 0)
        put_tile<DIM>(at, 0);
    if (asks && pages > 1)
        page_wait<2>(barriers + 8, 0);
    for (uint32_t n = 0; n < pages; n++) {
        __syncthreads();
        if (asks)
            ask_page<DIM, map>(at, ask);
        attend_planes<DIM>(at, n % 2, state);
        if (n + 1 < pages)
            put_tile<DIM>(at, n + 1);
        if (asks && n + 2 < pages)
            page_wait<2>(barriers + (n + 2) % map::STAGE_COUNT * 8, (n + 2) / map::STAGE_COUNT % 2);
    }
    __syncthreads();
}

#endif
