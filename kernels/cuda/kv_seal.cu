/* kernels/cuda/kv_seal.cu - BF16 window pages to planes and META, bit-equal to the host twin.
 *
 * Responsible for: the bit maps of DESIGN section 4.1, one page of one layer and KV head per CTA;
 * the launcher.
 * Not responsible for: codes and scales (device_seal.cuh), FP8 and K8I4 (kv_control_seal.cu),
 * choosing slots, digests (kv_digest.cu).
 *
 * Moves, per page, layer and KV head at head_dim 128: 32,768 B in, 12,544 B (K8V4) or 16,640 B
 * (K8V8) out; a block of 32 layers and 8 KV heads 46 MB. Expected: 60 us on an H200, bound by
 * shuffles and shared memory, not by device memory. Every product, sum and quotient is an
 * intrinsic that rounds alone, so nothing is contracted.
 *
 * Digests are not taken in the same pass. Measured for a block of 12 MiB: 30 us more in the step
 * (kv_digest.cu, a launch of its own), against 0.7 ms of the writer's thread (17.6 GB/s, one core)
 * beside a disk that takes longer for the block. Taken from the copy that is written they are those
 * of the very bytes on disk; taken here the writer would have to take them again to compare.
 */
#include "kernels/cuda/device_seal.cuh"

enum { WARPS = 8, THREADS = 32 * WARPS };

/* Codes of a page, rows padded so that reads across tokens meet different banks. */
template <int DIM> struct page_codes {
    static constexpr int ROW = DIM + 4;
    int8_t value[2][LAYOUT_PAGE_TOKENS][ROW]; /* K codes, V codes plus 128 */
    uint16_t scale[2][LAYOUT_PAGE_TOKENS];
};

/* Tile of a plane, or NULL when the tier has none. */
template <int DIM>
static __device__ __forceinline__ uint32_t *
tile_at(const struct kvops_seal &args, enum layout_stream stream, uint32_t slots, uint32_t tile) {
    uint32_t tiles = args.pool.geometry.layers * args.pool.geometry.kv_heads * 4;
    uint32_t table = stream == LAYOUT_KH    ? 0
                     : stream == LAYOUT_KM  ? 4
                     : stream == LAYOUT_KL  ? 6
                     : stream == LAYOUT_VB  ? 8
                     : stream == LAYOUT_VR1 ? 10
                     : stream == LAYOUT_VR2 ? 11
                                            : 12;
    uint32_t per_slot = tiles / slots, slot = args.block.slot[table + tile / per_slot];
    uint64_t stride = (tiles * 8 * DIM + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT;

    return (uint32_t *)(args.pool.slots + slot * stride * LAYOUT_SLOT_UNIT +
                        (uint64_t)(tile % per_slot) * 8 * DIM * slots);
}

static __device__ __forceinline__ uint32_t fields(uint32_t codes, int shift) {
    return codes >> shift & 0x03030303;
}

static __device__ __forceinline__ uint32_t byte_down(uint32_t x) {
    return __funnelshift_r(x, x, 8);
}

/* Words of the K planes: thread (mt, ks, lane 4g + c) joins tokens 8g + 2mt and the next. */
template <int DIM>
static __device__ __forceinline__ void write_k(const struct kvops_seal &args,
                                               const page_codes<DIM> &page, uint32_t streams,
                                               uint32_t tile) {
    for (uint32_t task = threadIdx.x; task < 4 * DIM; task += THREADS) {
        uint32_t lane = task % 32, ks = task / 32 % (DIM / 32), mt = task / DIM;
        uint32_t t = 8 * (lane / 4) + 2 * mt, d = 32 * ks + 4 * (lane % 4);
        uint32_t w[2][2]; /* [hf][i] */
        for (int n = 0; n < 4; n++)
            w[n / 2][n % 2] = *(const uint32_t *)&page.value[0][t + n / 2][d + 16 * (n % 2)];
        uint32_t *high = tile_at<DIM>(args, LAYOUT_KH, 4, tile) +
                         ((mt * (DIM / 64) + ks / 2) * 32 + lane) * 4 + 2 * (ks % 2);
        uint32_t at = (mt * 32 + lane) * (DIM / 32) + ks;
        for (int i = 0; i < 2; i++)
            high[i] = (w[0][i] & 0xF0F0F0F0) | (w[1][i] >> 4 & 0x0F0F0F0F);
        tile_at<DIM>(args, LAYOUT_KM, 2, tile)[at] =
            fields(w[0][0], 2) << 2 | byte_down(fields(w[1][0], 2)) << 6 | fields(w[0][1], 2) |
            byte_down(fields(w[1][1], 2)) << 4;
        if (streams >> LAYOUT_KL & 1)
            tile_at<DIM>(args, LAYOUT_KL, 2, tile)[at] =
                fields(w[0][0], 0) | byte_down(fields(w[1][0], 0)) << 4 |
                byte_down(fields(w[0][1], 0)) << 6 | byte_down(fields(w[1][1], 0)) << 2;
    }
}

/* Words of the V planes: thread (dt, lane 4(d & 7) + (t >> 4)) owns 32 values. */
template <int DIM>
static __device__ __forceinline__ void write_v(const struct kvops_seal &args,
                                               const page_codes<DIM> &page, uint32_t streams,
                                               uint32_t tile) {
    uint32_t lane = threadIdx.x % 32, dt = threadIdx.x / 32;
    uint32_t base[2] = {0, 0}, r1 = 0, r2 = 0, x[4] = {0, 0, 0, 0};

    if (dt >= DIM / 16)
        return;
#pragma unroll
    for (uint32_t n = 0; n < 32; n++) {
        uint32_t b = n % 4, hi = n / 4 % 2, kv = n / 8 % 2, mh = n / 16;
        uint32_t t = 16 * (lane % 4) + 8 * (b / 2) + 4 * kv + 2 * mh + b % 2;
        uint32_t u = (uint8_t)page.value[1][t][16 * dt + 8 * hi + lane / 4];
        base[kv] |= (u >> 6) << (8 * b + 4 * hi + 2 - 2 * mh);
        r1 |= (u >> 5 & 1) << (8 * b + 4 * hi + 1 - kv + 2 * mh);
        r2 |= (u >> 4 & 1) << (8 * b + 4 * hi + kv + 2 * mh);
        x[2 * kv + mh] |= (u & 15) << (8 * ((b + 3 + hi) % 4) + 4 - 4 * hi);
    }
    uint32_t *low = tile_at<DIM>(args, LAYOUT_VB, 2, tile) + (dt / 2 * 32 + lane) * 4 + dt % 2 * 2;
    uint32_t at = (dt / 4 * 32 + lane) * 4 + dt % 4;
    low[0] = base[0];
    low[1] = base[1];
    if (streams >> LAYOUT_VR1 & 1)
        tile_at<DIM>(args, LAYOUT_VR1, 1, tile)[at] = r1;
    if (streams >> LAYOUT_VR2 & 1)
        tile_at<DIM>(args, LAYOUT_VR2, 1, tile)[at] = r2;
    if (streams >> LAYOUT_VX & 1)
        *(uint4 *)(tile_at<DIM>(args, LAYOUT_VX, 4, tile) + (dt * 32 + lane) * 4) =
            make_uint4(x[0], x[1], x[2], x[3]);
}

/* Grid: (page, layer * kv_heads + head). */
template <int DIM>
static __global__ void __launch_bounds__(THREADS)
    seal_kernel(const __grid_constant__ struct kvops_seal args, uint32_t streams) {
    __shared__ __align__(16) page_codes<DIM> page;
    uint32_t row = blockIdx.y, index = blockIdx.x, tile = row * LAYOUT_BLOCK_PAGES + index;
    uint64_t frame_bytes = (uint64_t)args.pool.geometry.layers * args.pool.geometry.kv_heads * 1024;

    for (uint32_t n = threadIdx.x / 32; n < 2 * LAYOUT_PAGE_TOKENS; n += WARPS) {
        uint32_t value = n / LAYOUT_PAGE_TOKENS, t = n % LAYOUT_PAGE_TOKENS;
        const uint16_t *x = token_at<DIM>(args.pool, args.pages[index], row, value, t);
        bool good = encode<DIM>(x, page.value[value][t], value ? 0x80 : 0, &page.scale[value][t]);
        if (!good && threadIdx.x % 32 == 0) /* -1 is the largest unsigned number */
            atomicMin((unsigned *)&args.bad_token[row], index * LAYOUT_PAGE_TOKENS + t);
    }
    __syncthreads();
    write_k<DIM>(args, page, streams, tile);
    write_v<DIM>(args, page, streams, tile);
    if (threadIdx.x < 2 * LAYOUT_PAGE_TOKENS) {
        uint16_t *meta = (uint16_t *)(args.pool.meta + args.block.meta_frame * frame_bytes +
                                      (uint64_t)tile * LAYOUT_META_TILE_BYTES);
        meta[threadIdx.x] =
            page.scale[threadIdx.x / LAYOUT_PAGE_TOKENS][threadIdx.x % LAYOUT_PAGE_TOKENS];
    }
}

extern "C" cudaError_t cuda_kvops_seal(const struct kvops_seal *args, cudaStream_t stream) {
    uint32_t items = args->pool.geometry.layers * args->pool.geometry.kv_heads;
    uint32_t streams = layout_tier_streams((enum layout_tier)args->block.tier);
    dim3 grid(LAYOUT_BLOCK_PAGES, items);
    cudaError_t error = cudaMemsetAsync(args->bad_token, 0xFF, items * sizeof(int32_t), stream);

    if (error != cudaSuccess)
        return error;
    if (layout_tier_is_control((enum layout_tier)args->block.tier))
        return seal_control(args, stream);
    if (args->pool.geometry.head_dim == 64)
        seal_kernel<64><<<grid, THREADS, 0, stream>>>(*args, streams);
    else
        seal_kernel<128><<<grid, THREADS, 0, stream>>>(*args, streams);
    return cudaGetLastError();
}
