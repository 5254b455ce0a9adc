/* kernels/cuda/device_unit.cuh - a unit of decode attention: its blocks, queries, BF16 tokens.
 *
 * Responsible for: what both schedules of decode share: reading the plan, queries in the forms that
 * the products want, walking BF16 tokens, writing a partial.
 * Not responsible for: walking sealed pages and joining warps (kv_decode.cu, kv_decode_short.cu).
 *
 * A unit is attended to by one CTA for GROUPS groups of four query heads of one KV head.
 *
 * Threads: device code; a warp unless named otherwise.
 * Units: blocks, pieces of 16 tokens, bytes of shared memory.
 */
#ifndef KERNELS_CUDA_DEVICE_UNIT_CUH
#define KERNELS_CUDA_DEVICE_UNIT_CUH

#include "kernels/cuda/device_piece.cuh"

/* Queries of a unit in shared memory. */
template <int DIM, int GROUPS> struct query_map {
    static constexpr uint32_t CODES = 0;                         /* [group][8 columns][DIM] int8 */
    static constexpr uint32_t SPLIT = GROUPS * 8 * DIM;          /* [group][8 columns][DIM] BF16 */
    static constexpr uint32_t HEADS = SPLIT + GROUPS * 16 * DIM; /* scale, sum of every head */
    static constexpr uint32_t BYTES = HEADS + GROUPS * 32;
};

/* What one CTA works with. */
struct cta {
    struct kvops_attend args;
    struct cuda_kvops_plan plan;
    uint8_t *queries; /* query_map */
    uint32_t group;
    uint32_t row_in_layer; /* layer * kv_heads */
};

/* Blocks of a warp in a unit, as indices of the sequence. Fields are loaded and not looked at, so
 * that a range can be fetched a unit ahead without waiting. */
struct block_range {
    const struct kvops_seq *seq;
    const struct kvops_block *blocks;
    const uint64_t *hidden;
    uint32_t count; /* blocks of the sequence */
    uint32_t first;
    uint32_t last; /* the end, if the sequence reaches it */
    uint32_t head;
};

static __device__ __forceinline__ struct cuda_kvops_unit unit_at(const struct cta &cta,
                                                                 uint32_t round) {
    const uint4 *units = (const uint4 *)cta.plan.units;
    uint4 words = __ldg(units + (uint64_t)round * cta.plan.ctas + blockIdx.x);
    return *(const struct cuda_kvops_unit *)&words;
}

static __device__ __forceinline__ block_range range_of(const struct cta &cta,
                                                       const struct cuda_kvops_unit &unit) {
    uint32_t warp = threadIdx.x / 32;
    bool node = unit.kind == CUDA_KVOPS_NODE;
    block_range range;

    /* One sequence alone is known before the unit is: a load less to wait for. */
    range.seq = &cta.args.seqs[cta.args.seq_count == 1 ? 0 : unit.seq];
    range.blocks = range.seq->blocks;
    range.hidden = range.seq->hidden_blocks;
    range.count = range.seq->block_count;
    range.first =
        node ? (unit.first + warp) * STATE_RUN_BLOCKS : unit.first * STATE_RUN_BLOCKS + warp;
    range.last = node ? range.first + STATE_RUN_BLOCKS : range.first + 1;
    range.head = unit.head;
    return range;
}

static __device__ __forceinline__ uint32_t range_end(const block_range &range) {
    return min(range.last, range.count);
}

/* First visible block at or after `block`, or the end. */
static __device__ __forceinline__ uint32_t visible(const block_range &range, uint32_t block) {
    while (block < range_end(range) && state_hidden(range.hidden, block))
        block++;
    return block;
}

static __device__ __forceinline__ bool over_planes(const struct cuda_kvops_unit &unit) {
    return unit.kind != CUDA_KVOPS_END && unit.code == CUDA_KVOPS_PLANES;
}

/* --- queries */

/* Two fp16 numbers whose sum is x to 2^-25 or to 22 bits, the larger in the low half. */
static __device__ __forceinline__ uint32_t split_f16(float x) {
    __half high = __float2half_rn(x);
    __half low = __float2half_rn(__fsub_rn(x, __half2float(high)));
    return (uint32_t)__half_as_ushort(high) | (uint32_t)__half_as_ushort(low) << 16;
}

static __device__ __forceinline__ void put_pair(uint16_t *to, uint32_t stride, uint32_t pair) {
    to[0] = (uint16_t)pair;
    to[stride] = (uint16_t)(pair >> 16);
}

/* Head `slot` of the unit, by one warp: rotated in two bytes a value, plain in two BF16. For FP8
 * plain in two fp16 instead of either, scaled as the bytes are. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void prepare_head(const struct cta &cta,
                                                    const struct cuda_kvops_unit &unit,
                                                    uint32_t q_row, uint32_t slot) {
    using map = query_map<DIM, GROUPS>;
    constexpr int OWN = DIM / 32;
    uint32_t lane = threadIdx.x % 32;
    uint32_t row = unit.part * GROUPS * STATE_HEADS + slot;
    uint64_t head = (uint64_t)q_row * cta.args.q_heads + unit.head * cta.group + row;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    uint16_t *split = (uint16_t *)(cta.queries + map::SPLIT) + 2 * slot * DIM + lane * OWN;
    bool fp8 = unit.code == CUDA_KVOPS_FP8;
    float y[OWN], top = 0.0f;
    int sum = 0;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        y[i] = row < cta.group ? cta.args.q[head * DIM + lane * OWN + i] : 0.0f;
        if (!fp8)
            put_pair(split + i, DIM, split_bf16(__fmul_rn(y[i], root * STATE_LOG2E)));
    }
    if (!fp8)
        state_rotate<DIM>(y);
#pragma unroll
    for (int i = 0; i < OWN; i++)
        top = fabsf(y[i]) > top || y[i] != y[i] ? fabsf(y[i]) : top;
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) {
        float other = __shfl_xor_sync(~0u, top, stride);
        top = other > top || other != other ? other : top;
    }
    float to_steps = top > 0.0f ? __fdiv_rn(32639.0f, top) : 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int8_t *codes = (int8_t *)(cta.queries + map::CODES) + 2 * slot * DIM + lane * OWN + i;
        float steps = __fmul_rn(y[i], to_steps);
        int code = min(max(__float2int_rn(steps), -32639), 32639);
        int high = (code + 128) >> 8;
        codes[0] = (int8_t)high;
        codes[DIM] = (int8_t)(code - 256 * high);
        sum += code;
        if (fp8)
            put_pair(split + i, DIM, split_f16(steps));
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) {
        float *heads = (float *)(cta.queries + map::HEADS);
        heads[slot] = __fmul_rn(__fdiv_rn(top, 32639.0f), root * STATE_LOG2E);
        ((int *)heads)[GROUPS * STATE_HEADS + slot] = sum;
    }
}

template <int DIM, int GROUPS>
static __device__ __forceinline__ void load_queries(const struct cta &cta,
                                                    page_queries<DIM> (&q)[GROUPS]) {
    using map = query_map<DIM, GROUPS>;
    uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const float *heads = (const float *)(cta.queries + map::HEADS);

#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        const uint8_t *from = cta.queries + map::CODES + (8 * n + g) * DIM + 4 * c;
#pragma unroll
        for (int ks = 0; ks < DIM / 32; ks++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                q[n].b[ks][i] = *(const uint32_t *)(from + ks * 32 + i * 16);
        q[n].scale = heads[STATE_HEADS * n + c];
        q[n].sum = ((const int *)heads)[STATE_HEADS * (GROUPS + n) + c];
    }
}

/* --- pieces: sixteen of BF16 per block, or those of one tail page per warp; eight half pages of a
 * control code per block */

struct piece_walk {
    block_range range;
    const uint32_t *slots; /* of the tail page, or NULL: the chunk */
    uint32_t page;         /* tail page; UINT32_MAX: blocks */
    uint32_t tokens;       /* of the tail page that may be read */
    uint32_t use;          /* next piece to attend to */
    uint32_t get;          /* next piece to request */
    uint32_t end;
    uint32_t used;
    uint32_t filled;
    uint32_t code;    /* enum cuda_kvops_code */
    uint32_t log;     /* 2^log pieces per block */
    uint32_t slot[3]; /* control codes: of K, V and groups of piece `get`, as they arrive */
    bool settled;     /* no kernel of this step has written what is read */
};

/* Tail page `page`: sinks, window pages in order, chunk pages in order. */
static __device__ __forceinline__ void tail_start(const struct kvops_seq *seq, uint32_t page,
                                                  piece_walk &walk) {
    uint32_t pages = state_pages(seq->window_tokens), tokens = seq->sink_tokens;

    walk.slots = seq->sinks.slot;
    if (page > pages) {
        uint32_t first = (page - 1 - pages) * LAYOUT_PAGE_TOKENS;
        walk.slots = NULL;
        tokens = seq->chunk_k && seq->row_count > first ? seq->row_count - first : 0;
    } else if (page > 0) {
        walk.slots = seq->window[page - 1].slot;
        tokens = seq->window_tokens - (page - 1) * LAYOUT_PAGE_TOKENS;
        tokens = seq->hidden_pages >> (page - 1) & 1 ? 0 : tokens;
    }
    walk.page = page;
    walk.tokens = min(tokens, (uint32_t)LAYOUT_PAGE_TOKENS);
    walk.use = 0;
    walk.end = (walk.tokens + PIECE_TOKENS - 1) / PIECE_TOKENS;
    walk.settled = page < pages;
}

static __device__ __forceinline__ void
piece_start(const struct cta &cta, const struct cuda_kvops_unit &unit, piece_walk &walk) {
    walk.range = range_of(cta, unit);
    walk.used = walk.filled = 0;
    walk.code = unit.code;
    walk.log = unit.code == CUDA_KVOPS_BF16 ? 4 : 3;
    if (unit.kind == CUDA_KVOPS_TAIL) {
        tail_start(walk.range.seq, unit.first + threadIdx.x / 32, walk);
    } else {
        walk.page = UINT32_MAX;
        walk.use = visible(walk.range, walk.range.first) << walk.log;
        walk.end = range_end(walk.range) << walk.log;
        walk.settled = true;
    }
    walk.get = walk.use;
}

template <int DIM>
static __device__ __forceinline__ piece piece_at(const struct cta &cta, const piece_walk &walk,
                                                 uint32_t index) {
    const struct kvops_seq *seq = walk.range.seq;
    uint32_t row = cta.row_in_layer + walk.range.head;
    piece at;

    if (walk.page == UINT32_MAX)
        return piece_of_page<DIM>(cta.args.pool,
                                  seq->blocks[index / 16].slot + index / 4 % 4 * LAYOUT_PAGE_SLOTS,
                                  row, index % 4);
    if (walk.slots) {
        at = piece_of_page<DIM>(cta.args.pool, walk.slots, row, index);
    } else {
        uint32_t page = walk.page - 1 - state_pages(seq->window_tokens);
        uint64_t first = page * LAYOUT_PAGE_TOKENS + index * PIECE_TOKENS;
        uint64_t off = walk.range.head * seq->chunk_head_stride + first * DIM;
        at.k = (const uint8_t *)(seq->chunk_k + off);
        at.v = (const uint8_t *)(seq->chunk_v + off);
    }
    at.tokens = min(walk.tokens - index * PIECE_TOKENS, (uint32_t)PIECE_TOKENS);
    return at;
}

/* The piece after `index`: blocks that are hidden are stepped over. */
static __device__ __forceinline__ uint32_t piece_after(const piece_walk &walk, uint32_t index) {
    index++;
    if (walk.page == UINT32_MAX && (index & ((1u << walk.log) - 1)) == 0)
        index = visible(walk.range, index >> walk.log) << walk.log;
    return index;
}

/* Requests until STAGES pieces are under way; one commit group each, empty at the end. */
template <int DIM, int STAGES>
static __device__ __forceinline__ void piece_fill(const struct cta &cta, uint32_t ring,
                                                  piece_walk &walk) {
    for (; walk.filled < walk.used + STAGES; walk.filled++) {
        if (walk.get < walk.end) {
            piece_request<DIM>(piece_at<DIM>(cta, walk, walk.get),
                               ring + walk.filled % STAGES * 64 * DIM);
            walk.get = piece_after(walk, walk.get);
        }
        piece_commit();
    }
}

/* into = the blocks of the warp, or its tail page. */
template <int DIM, int STAGES, int GROUPS>
static __device__ __forceinline__ void attend_pieces(const struct cta &cta, uint32_t ring,
                                                     piece_walk &walk,
                                                     state<DIM / 8> (&into)[GROUPS]) {
    uint32_t q = shared_address(cta.queries + query_map<DIM, GROUPS>::SPLIT);
    bool tail = walk.page != UINT32_MAX;
    piece_state<DIM> leaf[GROUPS];

#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        piece_clear(leaf[n]);
    while (walk.use < walk.end) {
        piece_fill<DIM, STAGES>(cta, ring, walk);
        piece_wait<STAGES>();
        uint32_t tokens = tail ? walk.tokens - walk.use * PIECE_TOKENS : PIECE_TOKENS;
        piece_attend<DIM>(ring + walk.used % STAGES * 64 * DIM, q, tokens, leaf);
        uint32_t next = piece_after(walk, walk.use);
        if (next >= walk.end || (!tail && next / 16 != walk.use / 16)) {
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                state<DIM / 8> block;
                piece_leaf_end<DIM>(leaf[n], block);
                state_fold(into[n], block);
                piece_clear(leaf[n]);
            }
        }
        walk.use = next;
        walk.used++;
    }
    piece_wait_all();
}

/* --- partials */

/* Dim of value `index` of a lane's DIM / 8: the control codes leave them as their bytes lie. */
static __device__ __forceinline__ uint32_t dim_of(uint32_t code, uint32_t index, uint32_t g) {
    if (code == CUDA_KVOPS_FP8)
        return index / 2 * 16 + 2 * g + index % 2;
    if (code == CUDA_KVOPS_K8I4)
        return index / 4 * 32 + 4 * g + index % 4;
    return index / 2 * 16 + index % 2 * 8 + g;
}

/* Values [first, first + N) of a lane's DIM / 8 to the partial `item`; `group` is the group of four
 * query heads. */
template <int DIM, int N>
static __device__ __forceinline__ void
write_partial(const struct cta &cta, const struct cuda_kvops_unit &unit, uint32_t item,
              uint32_t group, uint32_t first, const state<N> &from) {
    uint32_t lane = threadIdx.x % 32, g = lane / 4, heads = state_round16(cta.group);
    uint32_t row = group * STATE_HEADS + lane % 4;
    float *partial = cta.args.partials + (uint64_t)item * state_partial_floats(cta.group, DIM);

    if (row >= cta.group)
        return;
    if (first == 0 && g == 0) {
        partial[row] = from.max;
        partial[heads + row] = from.sum;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        partial[2 * heads + row * DIM + dim_of(unit.code, first + i, g)] = from.acc[i];
}

/* --- joining the warps of a run */

/* Left fold of the states of four warps; each does a quarter of the values and writes them. */
template <int DIM>
static __device__ __forceinline__ void unit_merge(const struct cta &cta, float *area,
                                                  const struct cuda_kvops_unit &unit,
                                                  uint32_t group, const state<DIM / 8> &mine) {
    constexpr int COUNT = DIM / 8, QUARTER = COUNT / STATE_RUN_BLOCKS, FLOATS = COUNT * 32 + 8;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *to = area + warp * FLOATS;
    state<QUARTER> total;

    if (lane < STATE_HEADS) {
        to[lane] = mine.max;
        to[STATE_HEADS + lane] = mine.sum;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        to[8 + i * 32 + lane] = mine.acc[i];
    __syncthreads();
    state_clear(total);
#pragma unroll
    for (int from = 0; from < STATE_RUN_BLOCKS; from++) {
        const float *at = area + from * FLOATS;
        state<QUARTER> part;
        part.max = at[lane % 4];
        part.sum = at[STATE_HEADS + lane % 4];
#pragma unroll
        for (int i = 0; i < QUARTER; i++)
            part.acc[i] = at[8 + (warp * QUARTER + i) * 32 + lane];
        state_fold(total, part);
    }
    write_partial<DIM>(cta, unit, unit.item, group, warp * QUARTER, total);
}

/* --- the schedule for little work (kv_decode_short.cu) */

cudaError_t decode_short_open(uint32_t ctas_out[2]);
cudaError_t decode_short_launch(const struct cuda_kvops_launch *launch);

#endif
