/* kernels/cuda/kv_combine.cu - joins the partials of decode attention into its output.
 *
 * Responsible for: nodes, Hadamard of the sum over blocks, tail pages, division; its launcher.
 * Not responsible for: computing partials (kv_decode.cu).
 *
 * Moves dim * 4 bytes per query head and node of 4,096 tokens (0.5 MiB at 131,072 tokens, 32 query
 * heads of 128) and as much per tail page. Expected: 2 to 3 us, half of it launch and latency. One
 * CTA per query head and sequence. Warp w sums nodes w, w + 8 ..; the eight sums are folded in
 * order; then tail pages in order. The order depends on node numbers alone.
 */
#include "kernels/cuda/device_state.cuh"

enum { WARPS = 8, THREADS = 32 * WARPS };

/* One query head's place in the partials of its (sequence, KV head). */
struct partial_rows {
    const float *first;
    uint32_t stride; /* floats from one item to the next */
    uint32_t heads;  /* floats from a maximum to its sum */
    uint32_t row;
};

template <int DIM>
static __device__ __forceinline__ void load_partial(const partial_rows &rows, uint32_t item,
                                                    state<DIM / 32> &out) {
    const float *at = rows.first + (uint64_t)item * rows.stride;
    const float *acc = at + 2 * rows.heads + rows.row * DIM + threadIdx.x % 32 * (DIM / 32);

    out.max = at[rows.row];
    out.sum = at[rows.heads + rows.row];
    if (DIM == 128) {
        float4 v = *(const float4 *)acc;
        out.acc[0] = v.x, out.acc[1] = v.y, out.acc[DIM / 64] = v.z, out.acc[DIM / 32 - 1] = v.w;
    } else {
        float2 v = *(const float2 *)acc;
        out.acc[0] = v.x, out.acc[1] = v.y;
    }
}

/* into = nodes `warp`, `warp` + 8 .. of the sequence, bit i of `split` for the i-th of them. Four
 * partials are loaded at once: the runs of a split node, or as many whole nodes as follow each
 * other. At most 256 nodes: 1,048,576 tokens. */
template <int DIM>
static __device__ __forceinline__ void sum_nodes(const partial_rows &rows, uint32_t split,
                                                 uint32_t runs, state<DIM / 32> &into) {
    uint32_t nodes = (runs + STATE_NODE_RUNS - 1) / STATE_NODE_RUNS, done;

    state_clear(into);
    for (uint32_t node = threadIdx.x / 32; node < nodes; node += done * WARPS, split >>= done) {
        state<DIM / 32> part[4];
        bool cut = split & 1;
        uint32_t whole = split ? min(4u, (uint32_t)__ffs(split) - 1) : 4;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t run = cut ? 4 * node + i : 4 * (node + i * WARPS);
            part[i].sum = 0.0f;
            if (run < runs && (cut || i < whole))
                load_partial<DIM>(rows, run, part[i]);
        }
        if (cut) {
#pragma unroll
            for (int i = 1; i < 4; i++)
                state_fold(part[0], part[i]);
            state_fold(into, part[0]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                state_fold(into, part[i]);
        }
        done = cut ? 1 : whole;
    }
}

template <int DIM>
static __device__ __forceinline__ void put_state(float *to, const state<DIM / 32> &from) {
    uint32_t lane = threadIdx.x % 32;

    to[0] = from.max;
    to[1] = from.sum;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        to[2 + lane * (DIM / 32) + i] = from.acc[i];
}

/* into = the states of an area joined at once: one maximum, then sums in order. */
template <int DIM>
static __device__ __forceinline__ void join_area(const float (*area)[2 + DIM], uint32_t count,
                                                 state<DIM / 32> &into) {
    uint32_t first = 2 + threadIdx.x % 32 * (DIM / 32);
    state<DIM / 32> total;

    state_clear(total);
    total.max = into.sum == 0.0f ? -INFINITY : into.max;
#pragma unroll
    for (uint32_t i = 0; i < WARPS; i++)
        if (i < count && area[i][1] != 0.0f)
            total.max = fmaxf(total.max, area[i][0]);
    if (into.sum != 0.0f) {
        float keep = state_exp2(__fsub_rn(into.max, total.max));
        total.sum = __fmul_rn(into.sum, keep);
#pragma unroll
        for (int d = 0; d < DIM / 32; d++)
            total.acc[d] = __fmul_rn(into.acc[d], keep);
    }
#pragma unroll
    for (uint32_t i = 0; i < WARPS; i++) {
        float sum = i < count ? area[i][1] : 0.0f;
        float take = sum == 0.0f ? 0.0f : state_exp2(__fsub_rn(area[i][0], total.max));
        total.sum = __fmaf_rn(sum, take, total.sum);
#pragma unroll
        for (int d = 0; d < DIM / 32; d++)
            total.acc[d] = __fmaf_rn(sum == 0.0f ? 0.0f : area[i][first + d], take, total.acc[d]);
    }
    into = total;
}

/* Small enough to wait on a multiprocessor beside two CTAs of decode. */
template <int DIM>
static __global__ void __launch_bounds__(THREADS, 3)
    combine_kernel(struct kvops_attend args, struct cuda_kvops_plan plan) {
    constexpr int OWN = DIM / 32;
    __shared__ float area[WARPS][2 + DIM];
    const struct kvops_seq *seq = &args.seqs[blockIdx.y];
    uint32_t heads = args.pool.geometry.kv_heads, group = args.q_heads / heads;
    uint32_t head = blockIdx.x / group, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t runs = state_runs(seq), tails = state_tails(seq);
    uint32_t nodes = (runs + STATE_NODE_RUNS - 1) / STATE_NODE_RUNS;
    bool rotated = seq->block_count > 0 && seq->blocks[0].tier < LAYOUT_TIER_BF16;
    uint32_t first = plan.seqs[2 * blockIdx.y] + head * (runs + tails);
    partial_rows rows = {NULL, state_partial_floats(group, DIM), state_round16(group),
                         blockIdx.x % group};
    state<OWN> total, tail;

    state_let_next_start();
    rows.first = args.partials + (uint64_t)first * rows.stride;
    uint32_t own = warp + lane * WARPS, at = plan.seqs[2 * blockIdx.y + 1] + head * nodes;
    uint32_t split = __ballot_sync(~0u, own < nodes && plan.splits[at + own]);
    state_wait_for_previous();
    tail.sum = 0.0f;
    if (warp < tails)
        load_partial<DIM>(rows, runs + warp, tail);
    sum_nodes<DIM>(rows, split, runs, total);
    put_state<DIM>(area[warp], total);
    __syncthreads();
    state_clear(total);
    if (warp == 0)
        join_area<DIM>(area, WARPS, total);
    __syncthreads();
    if (warp < tails)
        put_state<DIM>(area[warp], tail);
    __syncthreads();
    if (warp > 0)
        return;
    if (rotated)
        state_rotate<DIM>(total.acc);
    join_area<DIM>(area, min(tails, (uint32_t)WARPS), total);
    for (uint32_t i = WARPS; i < tails; i++) {
        load_partial<DIM>(rows, runs + i, tail);
        state_fold(total, tail);
    }
    float *out = args.out + ((uint64_t)seq->first_row * args.q_heads + blockIdx.x) * DIM;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        out[lane * OWN + i] = total.sum == 0.0f ? 0.0f : __fdiv_rn(total.acc[i], total.sum);
}

extern "C" cudaError_t cuda_kvops_combine(const struct cuda_kvops_launch *launch) {
    struct kvops_attend args = *launch->args;
    struct cuda_kvops_plan plan = *launch->plan;
    cudaLaunchConfig_t config = {};
    void *arguments[] = {&args, &plan};

    config.gridDim = dim3(args.q_heads, args.seq_count);
    config.blockDim = dim3(THREADS);
    config.stream = launch->stream;
    return state_launch(args.pool.geometry.head_dim == 64 ? (const void *)combine_kernel<64>
                                                          : (const void *)combine_kernel<128>,
                        &config, launch->overlap, arguments);
}
