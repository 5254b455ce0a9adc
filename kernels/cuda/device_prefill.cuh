/* kernels/cuda/device_prefill.cuh - what the walks of prefill attention share.
 *
 * Responsible for: a CTA's place in the work, the running softmax of a warp's rows, asking for the
 * sealed pages of a sequence in order.
 * Not responsible for: products (device_walk_mma.cuh, device_walk_wgmma.cuh), BF16 pages
 * (device_plain.cuh).
 *
 * Threads: device code; a warp unless named otherwise.
 * Units: query vectors, pages, bytes of shared memory.
 */
#ifndef KERNELS_CUDA_DEVICE_PREFILL_CUH
#define KERNELS_CUDA_DEVICE_PREFILL_CUH

#include "kernels/cuda/device_wgmma.cuh"

/* One warp's running softmax: rows g and g + 8 of its sixteen; value[n] dims 8n + 2c, + 1. */
template <int DIM> struct rows_state {
    float max[2];
    float sum[2]; /* of the lane's own columns */
    float value[DIM / 8][4];
};

struct prefill {
    struct kvops_attend args;
    const struct kvops_seq *seq;
    uint8_t *shared;
    uint32_t group;
    uint32_t head;
    uint32_t row;    /* layer * kv_heads + head */
    uint32_t first;  /* query vector of the tile: row of the sequence * group + head of the group */
    uint32_t count;  /* query vectors of the sequence */
    uint32_t groups; /* of four warps, that have all rows of the tile */
    uint32_t part, parts;            /* of the pages: CTAs that share a tile */
    uint32_t block_first, block_end; /* sealed blocks of this part */
};

/* --- parts */

/* A sequence of few tiles, such as a question, would have as many CTAs per KV head, each of which
 * walks all blocks alone. So several share a tile, and what they have is joined by a kernel after
 * this one. */
enum {
    PREFILL_PARTS = TILE_WGMMA ? KVOPS_PARTS : 1,
    PREFILL_FEW_TILES = KVOPS_PART_VECTORS / TILE_QUERIES
};

/* The CTA's place in the work; 0: there is none for it. Grid: (sequence, tile or part of one, KV
 * head), so that sequences of equal blocks read them together. */
static __device__ __forceinline__ int prefill_place(struct prefill &at) {
    uint32_t blocks = at.seq->block_count;

    at.group = at.args.q_heads / at.args.pool.geometry.kv_heads;
    at.row = at.args.layer * at.args.pool.geometry.kv_heads + at.head;
    at.count = at.seq->row_count * at.group;
    at.groups = TILE_GROUPS;
    at.parts = at.count <= PREFILL_FEW_TILES * TILE_QUERIES ? PREFILL_PARTS : 1;
    at.part = blockIdx.y % at.parts;
    at.first = blockIdx.y / at.parts * TILE_QUERIES;
    at.block_first = blocks * at.part / at.parts;
    at.block_end = blocks * (at.part + 1) / at.parts;
    return at.first < at.count;
}

/* Where a lane leaves what its part has of a tile; `tiles`: of every sequence. */
template <int DIM>
static __device__ __forceinline__ float *part_area(const struct kvops_attend &args, uint32_t tiles,
                                                   uint32_t tile, uint32_t part) {
    uint64_t index = ((uint64_t)blockIdx.x * args.pool.geometry.kv_heads + blockIdx.z) * tiles;

    return args.partials +
           ((index + tile) * KVOPS_PARTS + part) * (DIM / 2 + 4) * TILE_GROUP_THREADS + threadIdx.x;
}

/* Row maxima joined; x becomes weights, the sums grow; returns what older values are worth. */
template <int DIM>
static __device__ __forceinline__ void softmax_rows(float (&x)[4][4], rows_state<DIM> &state,
                                                    float (&keep)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = state.max[r], sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++)
            top = fmaxf(top, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        float base = top == -INFINITY ? 0.0f : top; /* a row that has seen nothing yet */
        keep[r] = state_exp2(__fsub_rn(state.max[r], base));
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                x[n][i] = state_exp2(__fsub_rn(x[n][i], base));
                sum = __fadd_rn(sum, x[n][i]);
            }
        state.max[r] = top;
        state.sum[r] = __fmaf_rn(state.sum[r], keep[r], sum);
    }
}

static __device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *(uint32_t *)&pair;
}

/* What older values are worth, where a maximum of the warp has grown. */
template <int DIM>
static __device__ __forceinline__ void keep_values(const float (&keep)[2], rows_state<DIM> &state) {
    if (!__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f))
        return;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        state.value[i / 4][i % 4] = __fmul_rn(state.value[i / 4][i % 4], keep[i % 4 / 2]);
}

/* Values of two tiles of eight dims added. */
template <int DIM>
static __device__ __forceinline__ void add_values(const float (&fresh)[2][4], uint32_t n,
                                                  float factor, rows_state<DIM> &state) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            state.value[n + tile][i] = __fmaf_rn(fresh[tile][i], factor, state.value[n + tile][i]);
}

/* A warp asks for pages of visible blocks ahead of their use; the next block's slots are looked up
 * a block ahead. */
struct asking {
    const struct kvops_block *blocks; /* of the sequence, as it says */
    const uint64_t *hidden;
    uint32_t block_count;
    uint32_t entry; /* of the row's tiles in a block, and the first tile in its slot */
    uint32_t rest;
    lane_stream stream;
    lane_block now;
    lane_look later;
    uint32_t block;  /* of `later`, or the end */
    uint32_t page;   /* next page from the start of `now`; 4 or more: in `later` */
    uint32_t count;  /* pages asked for */
    uint32_t step;   /* from one page to the next */
    uint32_t stages; /* the first of those that take pages in turn */
    uint32_t stage_count;
};

static __device__ __forceinline__ void look_up(uint32_t block, asking &ask) {
    while (block < ask.block_count && state_hidden(ask.hidden, block))
        block++;
    ask.block = block;
    if (block >= ask.block_count)
        return;
    ask.later.entries = (const uint32_t *)&ask.blocks[block] + ask.entry;
    ask.later.rest = ask.rest;
    ask.later.slot = *ask.later.entries;
    ask.later.tier = ask.blocks[block].tier;
}

template <int DIM, class map>
static __device__ __forceinline__ void ask_page(const struct prefill &at, asking &ask) {
    uint32_t stage = ask.stages + ask.count++ % ask.stage_count;

    if (ask.page >= LAYOUT_BLOCK_PAGES && ask.block < ask.block_count) {
        ask.now = lane_block_of(ask.stream, ask.later);
        ask.page -= LAYOUT_BLOCK_PAGES;
        look_up(ask.block + 1, ask);
    }
    if (ask.page >= LAYOUT_BLOCK_PAGES) {
        if (!PAGE_BULK_COPY)
            piece_commit();
        return;
    }
    if (threadIdx.x % 32 == 0) /* before the request, whose end shows it to who waits for that */
        ((uint32_t *)(at.shared + map::STREAMS))[stage] = ask.now.streams;
    page_request<DIM, true>(ask.stream, ask.now, ask.page,
                            shared_address(at.shared + map::STAGES + stage * map::STAGE_BYTES),
                            shared_address(at.shared + map::BARRIERS + stage * 8));
    ask.page += ask.step;
}

/* For the warp that asks: visible pages first, first + step .., by turns into so many stages of
 * its own. */
template <int DIM, class map>
static __device__ __forceinline__ void asking_start(const struct prefill &at, uint32_t first,
                                                    uint32_t step, uint32_t stages, asking &ask) {
    uint32_t lane = threadIdx.x % 32;

    ask.blocks = at.seq->blocks;
    ask.hidden = at.seq->hidden_blocks;
    ask.block_count = at.block_end;
    ask.stream = lane_stream_of<DIM>(at.args.pool);
    ask.entry = ask.stream.table + at.row * LAYOUT_BLOCK_PAGES / ask.stream.tiles_per_slot;
    ask.rest = at.row * LAYOUT_BLOCK_PAGES % ask.stream.tiles_per_slot;
    ask.page = LAYOUT_BLOCK_PAGES + first;
    ask.step = step;
    ask.stages = first * stages;
    ask.stage_count = stages;
    if (lane < stages)
        barrier_init(shared_address(at.shared + map::BARRIERS + (ask.stages + lane) * 8));
    __syncwarp();
    look_up(at.block_first, ask);
}

/* Of this part. */
static __device__ __forceinline__ uint32_t visible_pages(const struct prefill &at) {
    uint32_t blocks = at.block_end - at.block_first;

    for (uint32_t block = at.block_first; at.seq->hidden_blocks && block < at.block_end;) {
        uint32_t end = min((block / 64 + 1) * 64, at.block_end);
        uint64_t mask = end - block < 64 ? (1ull << (end - block)) - 1 : ~0ull;
        blocks -= __popcll(at.seq->hidden_blocks[block / 64] >> block % 64 & mask);
        block = end;
    }
    return blocks * LAYOUT_BLOCK_PAGES;
}

#endif
