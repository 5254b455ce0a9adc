/* kernels/cuda/kv_control_prefill.cu - prefill attention over blocks of FP8 and K8I4.
 *
 * Responsible for: the rows of a chunk of such sequences, whole; the launcher.
 * Not responsible for: tokens in BF16 (device_plain.cuh), other tiers (kv_prefill.cu).
 *
 * Moves what kv_prefill.cu moves. A group of four warps turns a page into BF16 tiles, then attends
 * to it as to a BF16 page, in the time of one (5.0 ms a layer at 131,072 tokens, H200). Nothing
 * overlaps within a group and nothing is tuned: these codes are here to be compared with. The bits
 * of a row depend on what they depend on there.
 *
 * Against the twin: V of K8I4 is rounded to BF16 (2^-9), other values are the twin's; q and p are
 * split in two BF16 (2^-17): far within the bound of kv_prefill.cu.
 */
#include "kernels/cuda/device_control.cuh"
#include "kernels/cuda/device_plain.cuh"

/* The page into a group's buffer, K and V [token][dim]; scales of K behind. By a group. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void put_page(const control_page &page, uint8_t *buffer,
                                                float *scale) {
    uint32_t thread = threadIdx.x % TILE_GROUP_THREADS;

#pragma unroll
    for (uint32_t value = 0; value < (CODES ? 1 : 2); value++)
#pragma unroll
        for (uint32_t i = 0; i < DIM / 32; i++) {
            uint32_t index = i * TILE_GROUP_THREADS + thread;
            uint32_t t = index / (DIM / 16), d = index % (DIM / 16) * 16;
            const uint8_t *half =
                value ? page.v[t / LAYOUT_HALF_TOKENS] : page.k[t / LAYOUT_HALF_TOKENS];
            uint8_t *to = buffer + value * 128 * DIM;
            uint4 wide[2];
            control_widen<CODES>(__ldg((const uint4 *)(half + t % LAYOUT_HALF_TOKENS * DIM + d)),
                                 wide);
            *(uint4 *)(to + row_off<DIM>(t, d)) = wide[0];
            *(uint4 *)(to + row_off<DIM>(t, d + 8)) = wide[1];
        }
    if constexpr (CODES) {
#pragma unroll
        for (uint32_t i = 0; i < DIM / 64; i++) {
            uint32_t index = i * TILE_GROUP_THREADS + thread;
            uint32_t t = index / (DIM / 32), d = index % (DIM / 32) * 32;
            uint4 raw = __ldg((const uint4 *)page.v[0] + index);
            uint32_t group = __ldg((const uint32_t *)(page.groups + 128) + t * (DIM / 64) + d / 64);
            const uint32_t bits[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (uint32_t n = 0; n < 4; n++)
                *(uint4 *)(buffer + 128 * DIM + row_off<DIM>(t, d + 8 * n)) =
                    control_nibbles(bits[n], group);
        }
        if (thread < LAYOUT_PAGE_TOKENS)
            scale[thread] =
                __half2float(__ushort_as_half(__ldg((const uint16_t *)page.groups + thread)));
    }
}

/* Group h takes pages h, h + TILE_GROUPS .. of the blocks. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void walk_blocks(const struct prefill &at,
                                                   rows_state<DIM> &state) {
    using map = tile_here<DIM>;
    uint32_t group = threadIdx.x / TILE_GROUP_THREADS, lane = threadIdx.x % 32, c = lane % 4;
    uint8_t *buffer = at.shared + map::BUFFERS + group * map::BUFFER_BYTES;
    float *scale = (float *)(at.shared + map::SCALES + group * map::SCALE_BYTES);
    const float *halves =
        (const float *)(at.shared + map::STEPS) + threadIdx.x / 32 % 4 * 16 + lane / 4;
    uint32_t k = shared_address(buffer), pages = at.block_end * LAYOUT_BLOCK_PAGES;

    for (uint32_t index = at.block_first * LAYOUT_BLOCK_PAGES + group; index < pages;
         index += TILE_GROUPS) {
        if (state_hidden(at.seq->hidden_blocks, index / LAYOUT_BLOCK_PAGES))
            continue;
        put_page<DIM, CODES>(control_page_of<DIM, CODES>(
                                 at.args.pool, at.seq->blocks[index / LAYOUT_BLOCK_PAGES].slot,
                                 at.row, index % LAYOUT_BLOCK_PAGES),
                             buffer, scale);
        tile_sync(group);
#pragma unroll 1
        for (uint32_t token = 0; token < LAYOUT_PAGE_TOKENS; token += 32) {
            float x[4][4] = {};
            plain_logits<DIM>(at, k, token, x);
            if constexpr (CODES) {
#pragma unroll
                for (int i = 0; i < 16; i++)
                    x[i / 4][i % 4] = __fmul_rn(__fadd_rn(x[i / 4][i % 4], halves[i % 4 / 2 * 8]),
                                                scale[token + 8 * (i / 4) + 2 * c + i % 2]);
            }
            plain_join<DIM>(k + 128 * DIM, token, x, state);
        }
        tile_sync(group);
    }
    __syncthreads();
}

/* Grid: (sequence, tile of query vectors or part of one, KV head). */
template <int DIM, bool CODES>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    control_prefill_kernel(const __grid_constant__ struct kvops_attend args) {
    extern __shared__ __align__(1024) uint8_t shared[];
    struct prefill at = {args, &args.seqs[blockIdx.x], shared, 0, blockIdx.z};
    rows_state<DIM> state = {};

    if (!prefill_place(at))
        return;
    state.max[0] = state.max[1] = -INFINITY;
    prepare_split<DIM, CODES>(at);
    __syncthreads();
    walk_blocks<DIM, CODES>(at, state);
    if (CODES) {
        prepare_split<DIM, false>(at);
        __syncthreads();
    }
    walk_plain<DIM>(at, 0, state);
    finish<DIM>(at, state);
}

template <int DIM, bool CODES>
static cudaError_t launch(const struct kvops_attend *args, uint32_t row_count_max,
                          cudaStream_t stream) {
    struct plain_kernels wgmma = {
        {{control_prefill_kernel<DIM, CODES>, 3 * TILE_GROUP_THREADS, tile_map<DIM, 3>::BYTES}}, 1};

    return plain_launch<DIM>(control_prefill_kernel<DIM, CODES>, &wgmma, args, row_count_max,
                             stream);
}

cudaError_t control_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                            enum layout_tier tier, cudaStream_t stream) {
    bool small = args->pool.geometry.head_dim == 64;

    if (tier == LAYOUT_TIER_FP8)
        return small ? launch<64, false>(args, row_count_max, stream)
                     : launch<128, false>(args, row_count_max, stream);
    return small ? launch<64, true>(args, row_count_max, stream)
                 : launch<128, true>(args, row_count_max, stream);
}
