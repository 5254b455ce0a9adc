/* kernels/cuda/kv_prefill.cu - attention of the rows of a chunk over blocks of any tier.
 *
 * Responsible for: struct kvops_attend for sequences of 1 to KVOPS_CHUNK_ROWS_MAX rows; launcher.
 * Not responsible for: a single row at memory speed (kv_decode.cu), how tokens in BF16 are walked
 * (device_plain.cuh), the control codes (kv_control_prefill.cu).
 *
 * Moves the stored bytes of the sequence once per 64 query vectors (16 rows of four heads), mostly
 * out of L2. Expected: 4 * rows * group * tokens * dim operations at 325 TFLOP/s at 131,072 tokens
 * on an H200; bound by turning planes into fp16 and by softmax. A CTA takes 64 query vectors of one
 * KV head; every group of four warps that multiplies has all of them and pages of its own, each
 * joined to a running softmax; the groups join at the end in order. Groups: over planes two with
 * wgmma (sm_90a), each with another that makes tiles for it and a warp that asks for its pages, or
 * with mma (sm_80) two that share the pages; over BF16 blocks three (sm_90a) or two. With wgmma a
 * sequence of up to four tiles, as of a question, has eight CTAs a tile, each with an eighth of its
 * blocks; another kernel joins what they leave, in order. So the bits of a row depend on its
 * sequence, its place in the chunk, and on whether the sequence has more than four tiles of it.
 *
 * Against the twin: q and p are rounded to fp16 (2^-12) over planes, split in two BF16 (2^-17) over
 * BF16 tokens: a logit differs by at most 2^-11 |q| |k| / sqrt(dim), an output by 2^-10 * max|V| on
 * top of 2 * max|logit difference| * max|V|. With wgmma p * v_scale is rounded relative to the
 * largest V scale so far, and summed where sums may be truncated: 2^-24 of the largest a page more.
 */
#include "kernels/cuda/device_plain.cuh"

#include "kernels/cuda/device_walk_wgmma.cuh"
#if !TILE_WGMMA
#include "kernels/cuda/device_walk_mma.cuh"
#endif

/* --- queries */

/* Offset of dim d of a rotated query. */
template <int DIM> static __device__ __forceinline__ uint32_t query_off(uint32_t row, uint32_t d) {
    return TILE_WGMMA ? part_off(row, d) : row_off<DIM>(row, d);
}

/* For planes: rotated, fp16 relative to the largest value. */
template <int DIM, class map>
static __device__ __forceinline__ void prepare_rotated(const struct prefill &at) {
    constexpr int OWN = DIM / 32;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    uint32_t lane = threadIdx.x % 32;

    each_query<DIM>(at, [&](uint32_t j, float(&y)[OWN]) {
        float top = 0.0f;
        state_rotate<DIM>(y);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            top = fmaxf(top, fabsf(y[i]));
#pragma unroll
        for (int stride = 16; stride > 0; stride /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, stride));
        float to_one = top > 0.0f ? __fdiv_rn(1.0f, top) : 1.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++)
            *(__half *)(at.shared + map::ROTATED + query_off<DIM>(j, lane * OWN + i)) =
                __float2half_rn(__fmul_rn(y[i], to_one));
        if (lane == 0)
            ((float *)(at.shared + map::STEPS))[j] = __fmul_rn(top, root * STATE_LOG2E);
    });
}

/* Hadamard of the values of all rows, through the shared memory of the buffers. */
template <int DIM>
static __device__ __forceinline__ void rotate_values(const struct prefill &at,
                                                     rows_state<DIM> &state) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float *area = (float *)(at.shared + tile_here<DIM>::BUFFERS) + warp * 16 * DIM;

#pragma unroll
    for (int i = 0; i < DIM / 8 * 4; i++)
        area[(g + i % 4 / 2 * 8) * DIM + i / 4 * 8 + 2 * c + i % 2] = state.value[i / 4][i % 4];
    __syncwarp();
    for (int row = 0; row < 16; row++) {
        float y[DIM / 32];
#pragma unroll
        for (int i = 0; i < DIM / 32; i++)
            y[i] = area[row * DIM + lane * (DIM / 32) + i];
        state_rotate<DIM>(y);
#pragma unroll
        for (int i = 0; i < DIM / 32; i++)
            area[row * DIM + lane * (DIM / 32) + i] = y[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DIM / 8 * 4; i++)
        state.value[i / 4][i % 4] = area[(g + i % 4 / 2 * 8) * DIM + i / 4 * 8 + 2 * c + i % 2];
    __syncthreads();
}

/* Rows of the tile over everything but planes, joined to what there is of those. */
template <int DIM>
static __device__ __forceinline__ void end_rows(const struct prefill &at, uint32_t block_pages,
                                                rows_state<DIM> &state) {
    prepare_split<DIM, false>(at);
    __syncthreads();
    walk_plain<DIM>(at, block_pages, state);
    finish<DIM>(at, state);
}

static __device__ __forceinline__ bool has_planes(const struct prefill &at) {
    return at.seq->block_count > 0 && at.seq->blocks[0].tier != LAYOUT_TIER_BF16;
}

/* Sequences of planes, with wgmma. Grid: (sequence, tile of query vectors or part of one, KV
 * head). */
template <int DIM>
static __global__ void __launch_bounds__(PAIR_THREADS, 1)
    planes_kernel(const __grid_constant__ struct kvops_attend args) {
#if TILE_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    struct prefill at = {args, &args.seqs[blockIdx.x], shared, 0, blockIdx.z};

    if (!prefill_place(at) || !has_planes(at))
        return;
    at.groups = PAIR_COUNT;
    if (threadIdx.x >= PAIR_SERVERS) {
        group_shrink<PAIR_SERVER_REGISTERS>();
        serve_pair<DIM>(at);
        return;
    }
    if (threadIdx.x >= PAIR_MAKERS) {
        group_shrink<PAIR_MAKER_REGISTERS>();
        make_tiles<DIM>(at);
        return;
    }
    group_grow<PAIR_REGISTERS>();
    rows_state<DIM> state = {};
    state.max[0] = state.max[1] = -INFINITY;
    walk_planes<DIM>(at, state, [&] { prepare_rotated<DIM, pair_map<DIM>>(at); });
    rotate_values<DIM>(at, state);
    end_rows<DIM>(at, 0, state);
#endif
}

/* Sequences of BF16 blocks or none; with mma of planes as well. Grid: likewise. */
template <int DIM>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    prefill_kernel(const __grid_constant__ struct kvops_attend args) {
    extern __shared__ __align__(1024) uint8_t shared[];
    struct prefill at = {args, &args.seqs[blockIdx.x], shared, 0, blockIdx.z};
    rows_state<DIM> state = {};

    if (!prefill_place(at) || (TILE_WGMMA && has_planes(at)))
        return;
    bool planes = has_planes(at);
    state.max[0] = state.max[1] = -INFINITY;
#if !TILE_WGMMA
    if (planes) {
        walk_planes<DIM>(at, state, [&] { prepare_rotated<DIM, tile_here<DIM>>(at); });
        rotate_values<DIM>(at, state);
    }
#endif
    end_rows<DIM>(at, planes ? 0 : at.seq->block_count * LAYOUT_BLOCK_PAGES, state);
}

/* With wgmma every kernel leaves the other's sequences out, and one sequence has a tier. */
template <int DIM>
static cudaError_t launch(const struct kvops_attend *args, uint32_t row_count_max,
                          enum layout_tier tier, cudaStream_t stream) {
    uint32_t plain = tile_map<DIM, 3>::BYTES, pairs = pair_map<DIM>::BYTES;
    struct plain_kernels wgmma = {};

    if (args->seq_count > 1 || tier != LAYOUT_TIER_BF16)
        wgmma.of[wgmma.count++] = {planes_kernel<DIM>, PAIR_THREADS, pairs > plain ? pairs : plain};
    if (args->seq_count > 1 || tier == LAYOUT_TIER_BF16)
        wgmma.of[wgmma.count++] = {prefill_kernel<DIM>, 3 * TILE_GROUP_THREADS, plain};
    return plain_launch<DIM>(prefill_kernel<DIM>, &wgmma, args, row_count_max, stream);
}

extern "C" cudaError_t cuda_kvops_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                                          enum layout_tier tier, cudaStream_t stream) {
    if (layout_tier_is_control(tier))
        return control_prefill(args, row_count_max, tier, stream);
    return args->pool.geometry.head_dim == 64 ? launch<64>(args, row_count_max, tier, stream)
                                              : launch<128>(args, row_count_max, tier, stream);
}
