/* kernels/cuda/kv_control.cu - decode attention over blocks of FP8 and K8I4, the control codes.
 *
 * Responsible for: one partial per run of such a sequence and KV head; the launcher, which runs
 * before the kernel of the plan, whose units are everything else.
 * Not responsible for: sinks, window and chunk (units of the plan), joining partials
 * (kv_combine.cu: every node of such a sequence is split into its runs).
 *
 * Moves the stored bytes once per four query heads: per page, KV head and layer 16,384 B (FP8) or
 * 12,928 B (K8I4) at head_dim 128. Bound by turning them into BF16: about the time of BF16 tokens
 * (134 us a layer at 131,072 tokens on an H200, BF16 126), so these codes save room and no time
 * here. They are here to be compared with, and nothing is tuned. A CTA is one run, a warp one
 * block of it, in pieces of 16 tokens as device_piece.cuh attends to them; the next piece is on its
 * way in registers.
 *
 * Against the twin: values are the twin's, q and p are split in two BF16 (2^-17), so the bound of
 * kv_decode.cu for BF16 tokens holds.
 */
#include "kernels/cuda/device_control.cuh"
#include "kernels/cuda/device_unit.cuh"

enum { WARPS = STATE_RUN_BLOCKS, THREADS = 32 * WARPS };

template <int DIM> struct control_map {
    static constexpr uint32_t PIECE = 64 * DIM;
    static constexpr uint32_t QUERIES = WARPS * PIECE;     /* [8 columns][DIM] BF16 */
    static constexpr uint32_t HALVES = QUERIES + 16 * DIM; /* half the sum of each head's q */
    static constexpr uint32_t BYTES = HALVES + STATE_HEADS * 4;
};

/* A piece as it is stored, spread over the lanes. */
template <int DIM, bool CODES> struct raw_piece {
    uint4 k[DIM / 32];
    uint4 v[CODES ? DIM / 64 : DIM / 32];
    uint32_t group[DIM / 64];
    float scale[2]; /* of K of tokens g and g + 8 */
};

template <int DIM, bool CODES>
static __device__ __forceinline__ void load_raw(const struct kvops_pool &pool,
                                                const struct kvops_block &block, uint32_t row,
                                                uint32_t index, raw_piece<DIM, CODES> &raw) {
    uint32_t lane = threadIdx.x % 32, run = index % 4;
    control_page page = control_page_of<DIM, CODES>(pool, block.slot, row, index / 4);
    const uint4 *k = (const uint4 *)(page.k[run / 2] + run % 2 * 16 * DIM);
    const uint4 *v =
        (const uint4 *)(CODES ? page.v[0] + run * 8 * DIM : page.v[run / 2] + run % 2 * 16 * DIM);

#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        raw.k[i] = __ldg(k + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < (CODES ? DIM / 64 : DIM / 32); i++)
        raw.v[i] = __ldg(v + i * 32 + lane);
    if constexpr (CODES) {
        const uint32_t *groups = (const uint32_t *)(page.groups + 128) + run * 16 * (DIM / 64);
        const uint16_t *scales = (const uint16_t *)page.groups + run * 16 + lane / 4;
#pragma unroll
        for (uint32_t i = 0; i < DIM / 64; i++)
            raw.group[i] = __ldg(groups + (i * 32 + lane) / 2);
        raw.scale[0] = __half2float(__ushort_as_half(__ldg(scales)));
        raw.scale[1] = __half2float(__ushort_as_half(__ldg(scales + 8)));
    }
}

template <int DIM, bool CODES>
static __device__ __forceinline__ void put_piece(const raw_piece<DIM, CODES> &raw, uint8_t *to) {
    uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < DIM / 32; i++) {
        uint32_t index = i * 32 + lane, token = index / (DIM / 16), chunk = index % (DIM / 16) * 2;
        uint4 wide[2];
        control_widen<CODES>(raw.k[i], wide);
        *(uint4 *)(to + piece_chunk<DIM>(token, chunk)) = wide[0];
        *(uint4 *)(to + piece_chunk<DIM>(token, chunk + 1)) = wide[1];
        if constexpr (!CODES) {
            control_widen<false>(raw.v[i], wide);
            *(uint4 *)(to + 32 * DIM + piece_chunk<DIM>(token, chunk)) = wide[0];
            *(uint4 *)(to + 32 * DIM + piece_chunk<DIM>(token, chunk + 1)) = wide[1];
        }
    }
    if constexpr (CODES) {
#pragma unroll
        for (uint32_t i = 0; i < DIM / 64; i++) {
            uint32_t index = i * 32 + lane, token = index / (DIM / 32),
                     chunk = index % (DIM / 32) * 4;
            const uint32_t bits[4] = {raw.v[i].x, raw.v[i].y, raw.v[i].z, raw.v[i].w};
#pragma unroll
            for (uint32_t n = 0; n < 4; n++)
                *(uint4 *)(to + 32 * DIM + piece_chunk<DIM>(token, chunk + n)) =
                    control_nibbles(bits[n], raw.group[i]);
        }
    }
}

/* The warp's head: its q in two BF16 a value, rotated for K8I4. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void prepare_query(const struct cta &cta, uint32_t q_row,
                                                     const struct cuda_kvops_unit &unit,
                                                     float *halves) {
    constexpr int OWN = DIM / 32;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    uint32_t slot = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t row = unit.part * STATE_HEADS + slot;
    uint64_t head = (uint64_t)q_row * cta.args.q_heads + unit.head * cta.group + row;
    float y[OWN], sum = 0.0f;

#pragma unroll
    for (int i = 0; i < OWN; i++)
        y[i] = row < cta.group ? cta.args.q[head * DIM + lane * OWN + i] : 0.0f;
    if (CODES)
        state_rotate<DIM>(y);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float x = __fmul_rn(y[i], root * STATE_LOG2E);
        uint32_t pair = split_bf16(x);
        uint16_t *to = (uint16_t *)cta.queries + 2 * slot * DIM + lane * OWN + i;
        to[0] = (uint16_t)pair;
        to[DIM] = (uint16_t)(pair >> 16);
        sum = __fadd_rn(sum, x);
    }
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, stride));
    if (lane == 0)
        halves[slot] = __fmul_rn(sum, 0.5f);
}

template <int DIM, bool CODES>
static __device__ __forceinline__ void
attend_block(const struct cta &cta, const struct kvops_block &block, uint32_t row, uint8_t *stage,
             float half, state<DIM / 8> &out) {
    constexpr uint32_t PIECES = LAYOUT_BLOCK_TOKENS / PIECE_TOKENS;
    uint32_t q = shared_address(cta.queries), at = shared_address(stage);
    raw_piece<DIM, CODES> raw;
    piece_state<DIM> leaf[1];

    piece_clear(leaf[0]);
    load_raw<DIM, CODES>(cta.args.pool, block, row, 0, raw);
#pragma unroll 1
    for (uint32_t index = 0; index < PIECES; index++) {
        float x[1][2], scale[2] = {raw.scale[0], raw.scale[1]};
        __syncwarp();
        put_piece<DIM, CODES>(raw, stage);
        __syncwarp();
        if (index + 1 < PIECES)
            load_raw<DIM, CODES>(cta.args.pool, block, row, index + 1, raw);
        piece_logits<DIM>(at, q, PIECE_TOKENS, x);
        if (CODES) {
            x[0][0] = __fmul_rn(__fadd_rn(x[0][0], half), scale[0]);
            x[0][1] = __fmul_rn(__fadd_rn(x[0][1], half), scale[1]);
        }
        piece_join<DIM>(at, x, leaf);
    }
    piece_leaf_end<DIM>(leaf[0], out);
}

/* Grid: (run, KV head * parts + part, sequence); those of other tiers end at once. */
template <int DIM, bool CODES>
static __global__ void __launch_bounds__(THREADS, 4)
    control_kernel(struct kvops_attend args, struct cuda_kvops_plan plan) {
    using map = control_map<DIM>;
    __shared__ __align__(128) uint8_t shared[map::BYTES];
    const struct kvops_seq *seq = &args.seqs[blockIdx.z];
    struct cta cta = {args, plan, shared + map::QUERIES, args.q_heads / args.pool.geometry.kv_heads,
                      args.layer * args.pool.geometry.kv_heads};
    uint32_t parts = (cta.group + STATE_HEADS - 1) / STATE_HEADS, warp = threadIdx.x / 32;
    uint32_t runs = state_runs(seq), block = blockIdx.x * STATE_RUN_BLOCKS + warp;
    float *halves = (float *)(shared + map::HALVES);
    struct cuda_kvops_unit unit = {};
    state<DIM / 8> total;

    if (blockIdx.x >= runs || seq->blocks[0].tier != (CODES ? LAYOUT_TIER_K8I4 : LAYOUT_TIER_FP8))
        return;
    unit.head = (uint8_t)(blockIdx.y / parts);
    unit.part = (uint8_t)(blockIdx.y % parts);
    unit.item = plan.seqs[2 * blockIdx.z] + unit.head * (runs + state_tails(seq)) + blockIdx.x;
    prepare_query<DIM, CODES>(cta, seq->first_row, unit, halves);
    __syncthreads();
    state_clear(total);
    if (block < seq->block_count && !state_hidden(seq->hidden_blocks, block))
        attend_block<DIM, CODES>(cta, seq->blocks[block], cta.row_in_layer + unit.head,
                                 shared + warp * map::PIECE, halves[threadIdx.x % 4], total);
    __syncthreads(); /* the pieces are done with: the states are joined where they were */
    unit_merge<DIM>(cta, (float *)shared, unit, unit.part, total);
}

template <int DIM, bool CODES>
static cudaError_t launch(const struct cuda_kvops_launch *at, uint32_t runs) {
    const struct kvops_attend *args = at->args;
    uint32_t heads = args->pool.geometry.kv_heads, group = args->q_heads / heads;
    dim3 grid(runs, heads * ((group + STATE_HEADS - 1) / STATE_HEADS), args->seq_count);

    if (runs == 0)
        return cudaSuccess;
    control_kernel<DIM, CODES><<<grid, THREADS, 0, at->stream>>>(*args, *at->plan);
    return cudaGetLastError();
}

cudaError_t control_launch(const struct cuda_kvops_launch *at) {
    const uint32_t *runs = at->plan->control_runs;
    bool small = at->args->pool.geometry.head_dim == 64;
    cudaError_t error = small ? launch<64, false>(at, runs[0]) : launch<128, false>(at, runs[0]);

    if (error != cudaSuccess)
        return error;
    return small ? launch<64, true>(at, runs[1]) : launch<128, true>(at, runs[1]);
}
