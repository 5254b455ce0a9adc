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

enum { PLAIN_SHARES = 4 }; /* CTAs that join the parts of a tile */

/* --- queries */

/* The lane's values of query vector j of the tile, zeros beyond the last. */
template <int DIM>
static __device__ __forceinline__ void load_query(const struct prefill &at, uint32_t j,
                                                  float (&y)[DIM / 32]) {
    uint32_t index = at.first + j;
    uint64_t row = ((uint64_t)at.seq->first_row + index / at.group) * at.args.q_heads +
                   at.head * at.group + index % at.group;
    const float *from = at.args.q + row * DIM + threadIdx.x % 32 * (DIM / 32);

#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        y[i] = j < TILE_QUERIES && index < at.count ? from[i] : 0.0f;
}

/* use(j, values) for the query vectors of a warp; the next one is on its way meanwhile. */
template <int DIM, class F>
static __device__ __forceinline__ void each_query(const struct prefill &at, F &&use) {
    float y[DIM / 32], next[DIM / 32];

    load_query<DIM>(at, threadIdx.x / 32, next);
#pragma unroll 1
    for (uint32_t j = threadIdx.x / 32; j < TILE_QUERIES; j += at.groups * 4) {
#pragma unroll
        for (int i = 0; i < DIM / 32; i++)
            y[i] = next[i];
        load_query<DIM>(at, j + at.groups * 4, next);
        use(j, y);
    }
}

/* For BF16 tokens: two BF16 a value. For K8I4 rotated, and half the sum of every query. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void prepare_split(const struct prefill &at) {
    using map = tile_here<DIM>;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;

    each_query<DIM>(at, [&](uint32_t j, float(&y)[DIM / 32]) {
        float sum = 0.0f;
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
    });
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

    for (uint32_t index = at.part * at.groups + group; plain_page(at, index, block_pages, page);
         index += at.parts * at.groups) {
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

/* A lane's rows for another to join, STRIDE floats apart. */
template <int DIM, int STRIDE>
static __device__ __forceinline__ void leave_rows(float *area, const rows_state<DIM> &state) {
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        area[i * STRIDE] = state.value[i / 4][i % 4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        area[(DIM / 2 + 2 * r) * STRIDE] = state.max[r];
        area[(DIM / 2 + 2 * r + 1) * STRIDE] = state.sum[r];
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

/* Joins what the parts of a tile left, in order. Grid: (sequence, a share of the values of a tile,
 * KV head). */
template <int DIM>
static __global__ void __launch_bounds__(TILE_GROUP_THREADS)
    join_kernel(const __grid_constant__ struct kvops_attend args) {
    constexpr uint32_t OWN = DIM / 2 / PLAIN_SHARES, STRIDE = TILE_GROUP_THREADS;
    struct prefill at = {args, &args.seqs[blockIdx.x], NULL, 0, blockIdx.z};
    uint32_t tile = blockIdx.y / PLAIN_SHARES, first = blockIdx.y % PLAIN_SHARES * OWN;
    float more[KVOPS_PARTS][OWN], own[KVOPS_PARTS][4];
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, values[OWN] = {};

    at.group = args.q_heads / args.pool.geometry.kv_heads;
    at.count = at.seq->row_count * at.group;
    at.first = tile * TILE_QUERIES;
    if (at.count > PREFILL_FEW_TILES * TILE_QUERIES || at.first >= at.count)
        return;
#pragma unroll
    for (uint32_t part = 0; part < KVOPS_PARTS; part++) {
        const float *area = part_area<DIM>(args, gridDim.y / PLAIN_SHARES, tile, part);
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++)
            more[part][i] = __ldcg(area + (first + i) * STRIDE);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            own[part][i] = __ldcg(area + (DIM / 2 + i) * STRIDE);
    }
#pragma unroll
    for (uint32_t part = 0; part < KVOPS_PARTS; part++) {
        float keep[2], take[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = fmaxf(max[r], own[part][2 * r]), base = top == -INFINITY ? 0.0f : top;
            keep[r] = state_exp2(__fsub_rn(max[r], base));
            take[r] = state_exp2(__fsub_rn(own[part][2 * r], base));
            max[r] = top;
            sum[r] = __fmaf_rn(sum[r], keep[r], __fmul_rn(own[part][2 * r + 1], take[r]));
        }
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++)
            values[i] =
                __fmaf_rn(values[i], keep[i % 4 / 2], __fmul_rn(more[part][i], take[i % 4 / 2]));
    }
    write_values<DIM>(at, first, OWN, values, sum);
}

/* Joins the groups' sums of every row, in order, and writes it, or leaves it to be joined. */
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
        leave_rows<DIM, 32>(area + (warp / 4 - 1) * AREA, state);
    __syncthreads();
    if (warp >= 4)
        return;
    for (uint32_t group = 0; group + 1 < at.groups; group++)
        join_rows<DIM>(area + group * AREA, state);
    if (at.parts == 1)
        write_values<DIM>(at, 0, DIM / 2, &state.value[0][0], state.sum);
    else /* few tiles have a place for each, many in the batch one for as many as are few */
        leave_rows<DIM, TILE_GROUP_THREADS>(
            part_area<DIM>(at.args, min(gridDim.y / KVOPS_PARTS, (uint32_t)PREFILL_FEW_TILES),
                           at.first / TILE_QUERIES, at.part),
            state);
}

/* Kernels over the same CTAs, with what a CTA of each has. */
struct plain_kernel {
    void (*run)(struct kvops_attend);
    uint32_t threads, shared_bytes;
};
struct plain_kernels {
    struct plain_kernel of[2];
    uint32_t count;
};

static cudaError_t plain_start(const struct plain_kernels *kernels, const struct kvops_attend *args,
                               uint32_t ctas, cudaStream_t stream) {
    dim3 grid(args->seq_count, ctas, args->pool.geometry.kv_heads);
    cudaError_t error = cudaSuccess;

    for (uint32_t i = 0; error == cudaSuccess && i < kernels->count; i++) {
        const struct plain_kernel *kernel = &kernels->of[i];
        error = cudaFuncSetAttribute(kernel->run, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)kernel->shared_bytes);
        if (error != cudaSuccess)
            break;
        kernel->run<<<grid, kernel->threads, kernel->shared_bytes, stream>>>(*args);
        error = cudaGetLastError();
    }
    return error;
}

/* Sequences of few tiles in parts, as many at a time as `partials` has room for; the bits of a row
 * do not depend on what else is launched. */
template <int DIM>
static cudaError_t plain_parts(const struct plain_kernels *kernels, const struct kvops_attend *args,
                               uint32_t tiles, cudaStream_t stream) {
    uint32_t few = tiles < PREFILL_FEW_TILES ? tiles : (uint32_t)PREFILL_FEW_TILES;
    uint64_t room = args->partial_bytes / (kvops_part_bytes(args) / PREFILL_FEW_TILES * few);
    uint32_t ctas = few * KVOPS_PARTS > tiles ? few * KVOPS_PARTS : tiles;
    struct kvops_attend some = *args;
    cudaError_t error = room == 0 ? cudaErrorInvalidValue : cudaSuccess;

    for (uint32_t done = 0; error == cudaSuccess && done < args->seq_count;
         done += some.seq_count) {
        uint32_t left = args->seq_count - done;
        some.seqs = args->seqs + done;
        some.seq_count = left < room ? left : (uint32_t)room;
        error = plain_start(kernels, &some, ctas, stream);
        if (error != cudaSuccess)
            break;
        dim3 grid(some.seq_count, few * PLAIN_SHARES, args->pool.geometry.kv_heads);
        join_kernel<DIM><<<grid, TILE_GROUP_THREADS, 0, stream>>>(some);
        error = cudaGetLastError();
    }
    return error;
}

static cudaError_t plain_major(int *major_out) {
    int device;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(major_out, cudaDevAttrComputeCapabilityMajor, device);
#ifdef CUDA_KVOPS_CP_ASYNC
    *major_out = 8;
#endif
    return error;
}

/* For sequences of up to so many rows: `wgmma` where it can run, else `mma`. */
template <int DIM>
static cudaError_t plain_launch(void (*mma)(struct kvops_attend), const struct plain_kernels *wgmma,
                                const struct kvops_attend *args, uint32_t row_count_max,
                                cudaStream_t stream) {
    uint32_t group = args->q_heads / args->pool.geometry.kv_heads;
    uint32_t tiles = (row_count_max * group + TILE_QUERIES - 1) / TILE_QUERIES;
    struct plain_kernels old = {{{mma, 2 * TILE_GROUP_THREADS, tile_map<DIM, 2>::BYTES}}, 1};
    int major = 0;
    cudaError_t error = plain_major(&major);

    if (error != cudaSuccess || args->seq_count == 0)
        return error;
    if (major < 9)
        return plain_start(&old, args, tiles, stream);
    if (tiles > PREFILL_FEW_TILES && args->seq_count == 1)
        return plain_start(wgmma, args, tiles, stream);
    return plain_parts<DIM>(wgmma, args, tiles, stream);
}

/* Sequences of FP8 or K8I4 (kv_control_prefill.cu). */
cudaError_t control_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                            enum layout_tier tier, cudaStream_t stream);

#endif
