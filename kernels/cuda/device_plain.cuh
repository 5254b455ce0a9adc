/* kernels/cuda/device_plain.cuh - prefill attention over tokens in BF16.
 *
 * Responsible for: queries in two BF16 a value, attention of 64 query vectors over BF16 pages in
 * order, joining the groups of a CTA, the output, launching such a kernel.
 * Not responsible for: sealed pages (device_walk_mma.cuh, device_walk_wgmma.cuh), the control codes
 * (kv_control_prefill.cu).
 *
 * Threads: device code; a CTA unless named otherwise.
 * Units: query vectors, pages, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_PLAIN_CUH
#define KERNELS_CUDA_DEVICE_PLAIN_CUH

#include "kernels/cuda/device_prefill.cuh"

/* --- queries */

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

/* For BF16 tokens: two BF16 a value. For K8I4 rotated, and half the sum of every query. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void prepare_split(const struct prefill &at) {
    using map = tile_here<DIM>;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    float y[DIM / 32];

    for (uint32_t j = threadIdx.x / 32; j < TILE_QUERIES; j += TILE_THREADS / 32) {
        float sum = 0.0f;
        load_query<DIM>(at, j, y);
        if (CODES)
            state_rotate<DIM>(y);
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint32_t off = row_off<DIM>(j, threadIdx.x % 32 * (DIM / 32) + i);
            uint32_t pair = split_bf16(__fmul_rn(y[i], root * STATE_LOG2E));
            sum = __fmaf_rn(y[i], root * STATE_LOG2E, sum);
            *(uint16_t *)(at.shared + map::HIGH + off) = (uint16_t)pair;
            *(uint16_t *)(at.shared + map::LOW + off) = (uint16_t)(pair >> 16);
        }
        if constexpr (CODES) {
#pragma unroll
            for (int stride = 16; stride > 0; stride /= 2)
                sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, stride));
            if (threadIdx.x % 32 == 0)
                ((float *)(at.shared + map::STEPS))[j] = __fmul_rn(sum, 0.5f);
        }
    }
}

/* --- one page */

/* Logits of 32 tokens from `token` of a page whose K is at `k`, as far as they are products. */
template <int DIM>
static __device__ __forceinline__ void plain_logits(const struct prefill &at, uint32_t k,
                                                    uint32_t token, float (&x)[4][4]) {
    using map = tile_here<DIM>;
    uint32_t first = threadIdx.x / 32 % 4 * 16;

    tile_logits<DIM, false>(shared_address(at.shared + map::HIGH), first, k, token, x);
    tile_logits<DIM, false>(shared_address(at.shared + map::LOW), first, k, token, x);
}

/* Joins these 32 tokens, whose V is at `v`, with logits `x`. */
template <int DIM>
static __device__ __forceinline__ void plain_join(uint32_t v, uint32_t token, float (&x)[4][4],
                                                  rows_state<DIM> &state) {
    uint32_t lane = threadIdx.x % 32, b[4], high[2][4], low[2][4];
    float keep[2];

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

/* 32 tokens from `token` of a BF16 page whose K is at `k`; rows g and g + 8 of the warp see the
 * first `seen` of the page. */
template <int DIM>
static __device__ __forceinline__ void attend_plain(const struct prefill &at, uint32_t k,
                                                    uint32_t token, const uint32_t (&seen)[2],
                                                    rows_state<DIM> &state) {
    uint32_t c = threadIdx.x % 4;
    float x[4][4] = {};

    plain_logits<DIM>(at, k, token, x);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = token + 8 * n + 2 * c + i % 2 < seen[i / 2] ? x[n][i] : -INFINITY;
    plain_join<DIM>(k + 128 * DIM, token, x, state);
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

/* Group h of all parts takes pages h, h + all groups .., each in the group's buffer. */
template <int DIM>
static __device__ __forceinline__ void walk_plain(const struct prefill &at, uint32_t block_pages,
                                                  rows_state<DIM> &state) {
    using map = tile_here<DIM>;
    uint32_t group = threadIdx.x / TILE_GROUP_THREADS, seen[2];
    uint32_t own = at.first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    uint32_t buffer = shared_address(at.shared + map::BUFFERS + group * map::BUFFER_BYTES);
    tile_source page;

    for (uint32_t index = at.part * TILE_GROUPS + group; plain_page(at, index, block_pages, page);
         index += at.parts * TILE_GROUPS) {
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

/* Writes `count` of a lane's values, from its `first`, that belong to rows g and g + 8. */
template <int DIM>
static __device__ __forceinline__ void write_values(const struct prefill &at, uint32_t first,
                                                    uint32_t count, const float *values,
                                                    const float (&sum)[2]) {
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        uint32_t index = at.first + warp * 16 + g + 8 * r;
        uint64_t to = ((uint64_t)at.seq->first_row + index / at.group) * at.args.q_heads +
                      at.head * at.group + index % at.group;
        if (index >= at.count)
            continue;
#pragma unroll
        for (uint32_t i = 0; i < count; i++)
            if (i % 4 / 2 == r)
                at.args.out[to * DIM + (first + i) / 4 * 8 + 2 * c + i % 2] =
                    sum[r] == 0.0f ? 0.0f : __fdiv_rn(values[i], sum[r]);
    }
}

/* Every CTA of a cluster joins what all parts have, in order, for a share of the values, and writes
 * it; `area` is the lane's own, which nobody else reads any more. */
template <int DIM>
static __device__ __forceinline__ void join_parts(const struct prefill &at, float *area,
                                                  const rows_state<DIM> &state) {
    constexpr uint32_t OWN = DIM / 2 / PREFILL_PARTS;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, values[OWN] = {};
    uint32_t first = at.part * OWN;
    bool works = threadIdx.x < TILE_GROUP_THREADS;

    if (works)
        leave_rows<DIM>(area, state);
    cluster_sync();
    for (uint32_t part = 0; works && part < PREFILL_PARTS; part++) {
        float keep[2], take[2], more[OWN];
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++)
            more[i] = cluster_load(area + (first + i) * 32, part);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float own = cluster_load(area + (DIM / 2 + 2 * r) * 32, part);
            float top = fmaxf(max[r], own), base = top == -INFINITY ? 0.0f : top;
            keep[r] = state_exp2(__fsub_rn(max[r], base));
            take[r] = state_exp2(__fsub_rn(own, base));
            max[r] = top;
            own = cluster_load(area + (DIM / 2 + 2 * r + 1) * 32, part);
            sum[r] = __fmaf_rn(sum[r], keep[r], __fmul_rn(own, take[r]));
        }
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++)
            values[i] = __fmaf_rn(values[i], keep[i % 4 / 2], __fmul_rn(more[i], take[i % 4 / 2]));
    }
    cluster_sync(); /* nobody's memory goes while it is read */
    if (works)
        write_values<DIM>(at, first, OWN, values, sum);
}

/* Joins the groups' sums of every row, in order, then the parts', and writes it. */
template <int DIM>
static __device__ __forceinline__ void finish(const struct prefill &at, rows_state<DIM> &state) {
    constexpr uint32_t AREA = 4 * 32 * (DIM / 2 + 4); /* of a group */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    for (uint32_t group = 0; warp < 4 && group + 1 < TILE_GROUPS; group++)
        join_rows<DIM>(area + group * AREA, state);
    if (at.parts > 1)
        join_parts<DIM>(at, area, state);
    else if (warp < 4)
        write_values<DIM>(at, 0, DIM / 2, &state.value[0][0], state.sum);
}

/* One of the kernels over the tiles of so many rows of every sequence; `parts` CTAs each. */
template <int DIM>
static cudaError_t plain_start(void (*kernel)(struct kvops_attend), const struct kvops_attend *args,
                               uint32_t tiles, uint32_t parts, int major, cudaStream_t stream) {
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    struct kvops_attend copy = *args;

    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {parts, 1, 1};
    config.gridDim = dim3(tiles * parts, args->pool.geometry.kv_heads, args->seq_count);
    config.blockDim = dim3((major >= 9 ? 3 : 2) * TILE_GROUP_THREADS);
    config.dynamicSmemBytes = major >= 9 ? tile_map<DIM, 3>::BYTES : tile_map<DIM, 2>::BYTES;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = parts > 1;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)config.dynamicSmemBytes);
    return error == cudaSuccess ? cudaLaunchKernelEx(&config, kernel, copy) : error;
}

/* Sequences of few tiles go in clusters, where there are any, and the others without, so that the
 * bits of a row do not depend on what else is launched. */
template <int DIM>
static cudaError_t plain_launch(void (*kernel)(struct kvops_attend),
                                const struct kvops_attend *args, uint32_t row_count_max,
                                cudaStream_t stream) {
    uint32_t group = args->q_heads / args->pool.geometry.kv_heads;
    uint32_t tiles = (row_count_max * group + TILE_QUERIES - 1) / TILE_QUERIES;
    int device, major = 0;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
#ifdef CUDA_KVOPS_CP_ASYNC
    major = 8;
#endif
    if (error != cudaSuccess || args->seq_count == 0)
        return error;
    uint32_t few = tiles < PREFILL_FEW_TILES ? tiles : (uint32_t)PREFILL_FEW_TILES;
    if (major >= 9 && (tiles == few || args->seq_count > 1))
        error = plain_start<DIM>(kernel, args, few, PREFILL_PARTS, major, stream);
    if (error == cudaSuccess && (major < 9 || tiles > few))
        error = plain_start<DIM>(kernel, args, tiles, 1, major, stream);
    return error;
}

/* Sequences of FP8 or K8I4 (kv_control_prefill.cu). */
cudaError_t control_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                            enum layout_tier tier, cudaStream_t stream);

#endif
