/* kernels/cuda/kv_prefill.cu - attention of the rows of a chunk over blocks of any tier.
 *
 * Responsible for: struct kvops_attend for sequences of 1 to KVOPS_CHUNK_ROWS_MAX rows; launcher.
 * Not responsible for: a single row at memory speed (kv_decode.cu).
 *
 * Moves the stored bytes of the sequence once per 64 query vectors (16 rows of four heads), mostly
 * out of L2. Expected: 4 * rows * group * tokens * dim operations at 180 TFLOP/s at 8,192 tokens
 * and 240 at 131,072 on an H200; bound by turning planes into fp16 and by softmax, which take the
 * issue slots that three warps a scheduler can fill. A CTA takes 64 query vectors of one KV head;
 * every group of four warps has all of them and pages of its own, each joined to a running
 * softmax; the groups join at the end in order, so the bits of a row depend on its sequence and
 * its place in the chunk alone. Groups: three with wgmma (sm_90a), two with mma.sync (sm_80),
 * where the two share the sealed pages.
 *
 * Against the twin: q and p are rounded to fp16 (2^-12) over planes, split in two BF16 (2^-17) over
 * BF16 tokens: a logit differs by at most 2^-11 |q| |k| / sqrt(dim), an output by 2^-10 * max|V| on
 * top of 2 * max|logit difference| * max|V|. With wgmma p * v_scale is rounded relative to the
 * largest V scale so far, and summed where sums may be truncated: 2^-24 of the largest a page more.
 */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CUDA_KVOPS_CP_ASYNC)
#include "kernels/cuda/device_walk_wgmma.cuh"
#else
#include "kernels/cuda/device_walk_mma.cuh"
#endif

/* --- queries */

/* Offset of dim d of a rotated query. */
template <int DIM> static __device__ __forceinline__ uint32_t query_off(uint32_t row, uint32_t d) {
    return TILE_WGMMA ? part_off(row, d) : row_off<DIM>(row, d);
}

/* The lane's values of query vector j of the tile, zeros beyond the last. */
template <int DIM>
static __device__ __forceinline__ void load_query(const struct prefill &at, uint32_t j,
                                                  float (&y)[DIM / 32]) {
    uint32_t index = at.first + j;
    uint64_t from = ((uint64_t)at.seq->first_row + index / at.group) * at.args.q_heads +
                    at.head * at.group + index % at.group;

#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        y[i] = index < at.count ? at.args.q[from * DIM + threadIdx.x % 32 * (DIM / 32) + i] : 0.0f;
}

/* For BF16 pages: two BF16 a value. */
template <int DIM> static __device__ __forceinline__ void prepare_plain(const struct prefill &at) {
    using map = tile_here<DIM>;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    float y[DIM / 32];

    for (uint32_t j = threadIdx.x / 32; j < TILE_QUERIES; j += TILE_THREADS / 32) {
        load_query<DIM>(at, j, y);
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint32_t off = row_off<DIM>(j, threadIdx.x % 32 * (DIM / 32) + i);
            uint32_t pair = split_bf16(__fmul_rn(y[i], root * STATE_LOG2E));
            *(uint16_t *)(at.shared + map::HIGH + off) = (uint16_t)pair;
            *(uint16_t *)(at.shared + map::LOW + off) = (uint16_t)(pair >> 16);
        }
    }
}

/* For planes: rotated, fp16 relative to the largest value. */
template <int DIM>
static __device__ __forceinline__ void prepare_rotated(const struct prefill &at) {
    using map = tile_here<DIM>;
    constexpr int OWN = DIM / 32;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    uint32_t lane = threadIdx.x % 32;
    float y[OWN];

    for (uint32_t j = threadIdx.x / 32; j < TILE_QUERIES; j += TILE_THREADS / 32) {
        float top = 0.0f;
        load_query<DIM>(at, j, y);
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
    }
}

/* --- one page */

/* 32 tokens from `token` of a BF16 page whose K is at `k`; rows g and g + 8 of the warp see the
 * first `seen` of the page. */
template <int DIM>
static __device__ __forceinline__ void attend_plain(const struct prefill &at, uint32_t k,
                                                    uint32_t token, const uint32_t (&seen)[2],
                                                    rows_state<DIM> &state) {
    using map = tile_here<DIM>;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4, b[4];
    uint32_t first = warp % 4 * 16, v = k + 128 * DIM, high[2][4], low[2][4];
    float x[4][4] = {}, keep[2];

    tile_logits<DIM, false>(shared_address(at.shared + map::HIGH), first, k, token, x);
    tile_logits<DIM, false>(shared_address(at.shared + map::LOW), first, k, token, x);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = token + 8 * n + 2 * c + i % 2 < seen[i / 2] ? x[n][i] : -INFINITY;
    softmax_rows(x, state, keep);
    keep_values(keep, state);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t one = split_bf16(x[n][2 * r]), two = split_bf16(x[n][2 * r + 1]);
            high[n / 2][n % 2 * 2 + r] = __byte_perm(one, two, 0x5410);
            low[n / 2][n % 2 * 2 + r] = __byte_perm(one, two, 0x7632);
        }
#pragma unroll
    for (uint32_t n = 0; n < DIM / 8; n += 2) {
        float fresh[2][4] = {};
#pragma unroll
        for (uint32_t ks = 0; ks < 2; ks++) {
            load_matrices_across(
                b, v + row_off<DIM>(token + 16 * ks + lane % 16, 8 * n + lane / 16 * 8));
            mma_bf16(fresh[0], high[ks], b[0], b[1]);
            mma_bf16(fresh[1], high[ks], b[2], b[3]);
            mma_bf16(fresh[0], low[ks], b[0], b[1]);
            mma_bf16(fresh[1], low[ks], b[2], b[3]);
        }
        add_values(fresh, n, 1.0f, state);
    }
}

/* --- pages in order */

/* Of the last row of the tile, in the chunk. */
static __device__ __forceinline__ uint32_t last_position(const struct prefill &at) {
    return (min(at.first + TILE_QUERIES, at.count) - 1) / at.group;
}

/* BF16 page `index`: those of BF16 blocks, then sinks, window, and chunk as far as a row of the
 * tile sees it. 0: no such page. */
static __device__ __forceinline__ int plain_page(const struct prefill &at, uint32_t index,
                                                 uint32_t block_pages, tile_source &out) {
    const struct kvops_seq *seq = at.seq;
    uint32_t window = state_pages(seq->window_tokens), tail = index - block_pages;

    out.chunk_k = out.chunk_v = NULL;
    out.first = 0;
    if (index < block_pages) {
        out.slots = seq->blocks[index / 4].slot + index % 4 * LAYOUT_PAGE_SLOTS;
        out.tokens = state_hidden(seq->hidden_blocks, index / 4) ? 0 : LAYOUT_PAGE_TOKENS;
    } else if (tail == 0) {
        out.slots = seq->sinks.slot;
        out.tokens = seq->sink_tokens;
    } else if (tail <= window) {
        uint32_t left = seq->window_tokens - (tail - 1) * LAYOUT_PAGE_TOKENS;
        out.slots = seq->window[tail - 1].slot;
        out.tokens = seq->hidden_pages >> (tail - 1) & 1 ? 0 : left;
    } else {
        out.first = (tail - 1 - window) * LAYOUT_PAGE_TOKENS;
        if (!seq->chunk_k || out.first > last_position(at))
            return 0;
        uint64_t off =
            at.head * seq->chunk_head_stride + (uint64_t)out.first * at.args.pool.geometry.head_dim;
        out.slots = NULL;
        out.chunk_k = seq->chunk_k + off;
        out.chunk_v = seq->chunk_v + off;
        out.tokens = seq->row_count - out.first;
    }
    out.tokens = min(out.tokens, (uint32_t)LAYOUT_PAGE_TOKENS);
    return 1;
}

/* Group h takes pages h, h + TILE_GROUPS .., each in the group's buffer. */
template <int DIM>
static __device__ __forceinline__ void walk_plain(const struct prefill &at, uint32_t block_pages,
                                                  rows_state<DIM> &state) {
    using map = tile_here<DIM>;
    uint32_t group = threadIdx.x / TILE_GROUP_THREADS, seen[2];
    uint32_t own = at.first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    uint32_t buffer = shared_address(at.shared + map::BUFFERS + group * map::BUFFER_BYTES);
    tile_source page;

    for (uint32_t index = group; plain_page(at, index, block_pages, page); index += TILE_GROUPS) {
        if (page.tokens == 0)
            continue;
        tile_request<DIM>(at.args.pool, page, at.row, buffer);
        piece_wait_all();
        tile_sync(group);
        for (uint32_t r = 0; r < 2; r++) {
            uint32_t position = (own + 8 * r) / at.group; /* a chunk page shows 0..position */
            uint32_t shown = position >= page.first ? position - page.first + 1 : 0;
            seen[r] = page.slots ? page.tokens : min(page.tokens, shown);
        }
#pragma unroll 1
        for (uint32_t token = 0; token < page.tokens; token += 32)
            attend_plain<DIM>(at, buffer, token, seen, state);
        tile_sync(group);
    }
    __syncthreads();
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

/* A group's rows in shared memory, for the first group. */
template <int DIM>
static __device__ __forceinline__ void leave_rows(float *area, const rows_state<DIM> &state) {
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        area[i * 32] = state.value[i / 4][i % 4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        area[(DIM / 2 + 2 * r) * 32] = state.max[r];
        area[(DIM / 2 + 2 * r + 1) * 32] = state.sum[r];
    }
}

template <int DIM>
static __device__ __forceinline__ void join_rows(const float *area, rows_state<DIM> &state) {
    float keep[2], take[2];

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float max = area[(DIM / 2 + 2 * r) * 32], sum = area[(DIM / 2 + 2 * r + 1) * 32];
        float top = fmaxf(state.max[r], max), base = top == -INFINITY ? 0.0f : top;
        keep[r] = state_exp2(__fsub_rn(state.max[r], base));
        take[r] = state_exp2(__fsub_rn(max, base));
        state.max[r] = top;
        state.sum[r] = __fmaf_rn(state.sum[r], keep[r], __fmul_rn(sum, take[r]));
    }
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        state.value[i / 4][i % 4] = __fmaf_rn(state.value[i / 4][i % 4], keep[i % 4 / 2],
                                              __fmul_rn(area[i * 32], take[i % 4 / 2]));
}

/* Joins the groups' sums of every row, in order, and writes it. */
template <int DIM>
static __device__ __forceinline__ void finish(const struct prefill &at, rows_state<DIM> &state) {
    constexpr uint32_t AREA = 4 * 32 * (DIM / 2 + 4); /* of a group */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float *area =
        (float *)(at.shared + tile_here<DIM>::BUFFERS) + warp % 4 * 32 * (DIM / 2 + 4) + lane;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        state.sum[r] = __fadd_rn(state.sum[r], __shfl_xor_sync(~0u, state.sum[r], 1));
        state.sum[r] = __fadd_rn(state.sum[r], __shfl_xor_sync(~0u, state.sum[r], 2));
    }
    if (warp >= 4)
        leave_rows<DIM>(area + (warp / 4 - 1) * AREA, state);
    __syncthreads();
    if (warp >= 4)
        return;
    for (uint32_t group = 0; group + 1 < TILE_GROUPS; group++)
        join_rows<DIM>(area + group * AREA, state);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t index = at.first + warp * 16 + g + 8 * r;
        uint64_t to = ((uint64_t)at.seq->first_row + index / at.group) * at.args.q_heads +
                      at.head * at.group + index % at.group;
        if (index >= at.count)
            continue;
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            if (i % 4 / 2 == r)
                at.args.out[to * DIM + i / 4 * 8 + 2 * c + i % 2] =
                    state.sum[r] == 0.0f ? 0.0f
                                         : __fdiv_rn(state.value[i / 4][i % 4], state.sum[r]);
    }
}

/* Grid: (tile of query vectors, KV head, sequence). */
template <int DIM>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    prefill_kernel(const __grid_constant__ struct kvops_attend args) {
    extern __shared__ __align__(1024) uint8_t shared[];
    struct prefill at = {args, &args.seqs[blockIdx.z], shared, 0, blockIdx.y, 0, 0, 0};
    rows_state<DIM> state = {};

    at.group = args.q_heads / args.pool.geometry.kv_heads;
    at.row = args.layer * args.pool.geometry.kv_heads + at.head;
    at.first = blockIdx.x * TILE_QUERIES;
    at.count = at.seq->row_count * at.group;
    if (at.first >= at.count)
        return;
    bool planes = at.seq->block_count > 0 && at.seq->blocks[0].tier != LAYOUT_TIER_BF16;
    state.max[0] = state.max[1] = -INFINITY;
    if (planes) {
        prepare_rotated<DIM>(at);
        walk_planes<DIM>(at, state);
        rotate_values<DIM>(at, state);
    }
    prepare_plain<DIM>(at);
    __syncthreads();
    walk_plain<DIM>(at, planes ? 0 : at.seq->block_count * LAYOUT_BLOCK_PAGES, state);
    finish<DIM>(at, state);
}

template <int DIM>
static cudaError_t launch(const struct kvops_attend *args, uint32_t row_count_max,
                          cudaStream_t stream) {
    uint32_t heads = args->pool.geometry.kv_heads, group = args->q_heads / heads;
    uint32_t tiles = (row_count_max * group + TILE_QUERIES - 1) / TILE_QUERIES;
    int device, major = 0;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
#ifdef CUDA_KVOPS_CP_ASYNC
    major = 8;
#endif
    int bytes = major >= 9 ? tile_map<DIM, 3>::BYTES : tile_map<DIM, 2>::BYTES;
    int threads = (major >= 9 ? 3 : 2) * TILE_GROUP_THREADS;
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(prefill_kernel<DIM>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess || args->seq_count == 0)
        return error;
    prefill_kernel<DIM><<<dim3(tiles, heads, args->seq_count), threads, bytes, stream>>>(*args);
    return cudaGetLastError();
}

extern "C" cudaError_t cuda_kvops_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                                          cudaStream_t stream) {
    return args->pool.geometry.head_dim == 64 ? launch<64>(args, row_count_max, stream)
                                              : launch<128>(args, row_count_max, stream);
}
