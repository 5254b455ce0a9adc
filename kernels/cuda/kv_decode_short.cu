/* kernels/cuda/kv_decode_short.cu - decode attention where there is too little for a warp to do.
 *
 * Responsible for: the schedule of kv_decode.cu's units for few tokens: one unit per CTA, a warp
 * per page; its launcher.
 * Not responsible for: deciding when (kv_plan.cu), anything but the order of work: the products,
 * the folds and so the bits are those of kv_decode.cu.
 *
 * Moves what kv_decode.cu moves. Up to one CTA of 16 warps per multiprocessor, about 12,000 tokens
 * of eight KV heads on an H200: there the time is that of a chain, not of the bytes, and the four
 * pages that a warp of kv_decode.cu takes one after the other are side by side here. Expected: 9 us
 * a layer with combine at 4,096 tokens, half of it two launches and their latency. A warp leaves
 * its page as integers, a maximum and sums; then four warps a block join the four pages in order,
 * each a quarter of the values, and four warps the blocks.
 */
#include "kernels/cuda/device_unit.cuh"

enum { WARPS = 16, THREADS = 32 * WARPS, QUARTERS = 4, TAIL_STAGES = 4 };

/* Shared memory: a page per warp, queries, barriers. Four pages hold the pieces of one tail page; a
 * page that was used holds what is left of it. */
template <int DIM> struct short_map {
    static constexpr uint32_t STAGE = stage_map<DIM>::NARROW;
    static constexpr uint32_t QUERIES = WARPS * STAGE;
    static constexpr uint32_t BARRIERS = QUERIES + query_map<DIM, 1>::BYTES;
    static constexpr uint32_t BYTES = BARRIERS + WARPS * 8;
    static constexpr uint32_t BLOCKS = (DIM / 8 + 4) * 128; /* in a used page: state of a block */
};

/* A page as left to the warps that join: rows of 32 lanes. */
template <int DIM>
static __device__ __forceinline__ void leave_page(uint32_t stage, const uint4 *extra,
                                                  uint32_t streams,
                                                  const page_weights (&weights)[1], float *to) {
    float value[DIM / 8];
    auto keep = [&](int, int dt, float low, float high) {
        value[2 * dt] = low;
        value[2 * dt + 1] = high;
    };

    if (extra)
        page_values<DIM, true>(stage, extra, streams, weights, keep);
    else
        page_values<DIM, false>(stage, extra, streams, weights, keep);
    __syncwarp(); /* the page may be written over */
    to[0] = weights[0].top;
    to[32] = weights[0].widest;
    to[64] = weights[0].sum;
    to[96] = weights[0].steps;
#pragma unroll
    for (int i = 0; i < DIM / 8; i++)
        to[(4 + i) * 32] = value[i];
}

/* A quarter of the values of a block from its four pages. */
template <int DIM>
static __device__ __forceinline__ void join_pages(const uint8_t *pages, uint32_t streams,
                                                  uint32_t quarter, state<DIM / 32> &out) {
    leaf_state<DIM / 32> leaf;

    leaf_clear(leaf);
#pragma unroll
    for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++) {
        const float *from =
            (const float *)(pages + page * short_map<DIM>::STAGE) + threadIdx.x % 32;
        page_weights weights = {{}, from[0], from[32], from[64], from[96]};
        page_worth worth = page_join(weights, streams, leaf);
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) /* pairs of low and high as page_attend sums them */
            leaf.acc[i] =
                __fmaf_rn(from[(4 + quarter * (DIM / 32) + i) * 32], i % 2 ? worth.high : worth.low,
                          __fmul_rn(leaf.acc[i], worth.keep));
    }
    page_leaf_end(leaf, out);
}

/* The warp's page of a run: asked for, attended to, joined. */
struct short_page {
    lane_stream stream;
    lane_block block;
    bool there;
};

template <int DIM>
static __device__ __forceinline__ void ask_page(const struct cta &cta, const block_range &range,
                                                uint32_t stage, uint32_t barrier,
                                                short_page &page) {
    page.there = range.first < range_end(range) && !state_hidden(range.hidden, range.first);
    if (!page.there)
        return;
    page.stream = lane_stream_of<DIM>(cta.args.pool);
    page.block = lane_block_of(page.stream,
                               lane_look_at(page.stream, &range.blocks[range.first],
                                            (cta.row_in_layer + range.head) * LAYOUT_BLOCK_PAGES));
    page_request<DIM, false>(page.stream, page.block, threadIdx.x / 32 % LAYOUT_BLOCK_PAGES, stage,
                             barrier);
}

template <int DIM>
static __device__ __forceinline__ void attend_run(const struct cta &cta,
                                                  const struct cuda_kvops_unit &unit,
                                                  uint8_t *shared, const short_page &page) {
    using map = short_map<DIM>;
    constexpr int QUARTER = DIM / 32;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *own = shared + warp * map::STAGE;
    state<QUARTER> block, total;

    if (page.there) {
        page_queries<DIM> q[1];
        page_weights weights[1];
        float x[1][8];
        const uint4 *extra = NULL;
        load_queries<DIM>(cta, q);
        if (page.block.streams >> LAYOUT_VX & 1)
            extra = page_extra(page.stream, page.block, warp % LAYOUT_BLOCK_PAGES);
        page_wait<1>(shared_address(shared + map::BARRIERS + warp * 8), 0);
        page_logits<DIM>(shared_address(own), page.block.streams, q, x);
        page_softmax<DIM>(shared_address(own), x[0], q[0].scale, weights[0]);
        leave_page<DIM>(shared_address(own), extra, page.block.streams, weights,
                        (float *)own + lane);
    }
    __syncthreads();
    state_clear(block);
    if (page.there)
        join_pages<DIM>(shared + warp / 4 * 4 * map::STAGE, page.block.streams, warp % 4, block);
    float *to = (float *)(own + map::BLOCKS) + lane;
    to[0] = block.max;
    to[32] = block.sum;
#pragma unroll
    for (int i = 0; i < QUARTER; i++)
        to[(2 + i) * 32] = block.acc[i];
    __syncthreads();
    if (warp >= QUARTERS)
        return;
    state_clear(total);
#pragma unroll
    for (uint32_t n = 0; n < STATE_RUN_BLOCKS; n++) {
        const float *from =
            (const float *)(shared + (4 * n + warp) * map::STAGE + map::BLOCKS) + lane;
        block.max = from[0];
        block.sum = from[32];
#pragma unroll
        for (int i = 0; i < QUARTER; i++)
            block.acc[i] = from[(2 + i) * 32];
        state_fold(total, block);
    }
    write_partial<DIM>(cta, unit, unit.item, unit.part, warp * QUARTER, total);
}

/* Warps 0 to 3 take a tail page each, whose pieces are all asked for at once. */
template <int DIM>
static __device__ __forceinline__ void attend_tails(const struct cta &cta,
                                                    const struct cuda_kvops_unit &unit,
                                                    uint32_t ring, piece_walk &walk) {
    state<DIM / 8> total[1];

    if (threadIdx.x / 32 >= STATE_NODE_RUNS || walk.page >= state_tails(walk.range.seq))
        return;
    state_clear(total[0]);
    attend_pieces<DIM, TAIL_STAGES>(cta, ring, walk, total);
    write_partial<DIM>(cta, unit, unit.item + threadIdx.x / 32, unit.part, 0, total[0]);
}

template <int DIM>
static __global__ void __launch_bounds__(THREADS, 1)
    decode_short_kernel(struct kvops_attend args, struct cuda_kvops_plan plan) {
    using map = short_map<DIM>;
    extern __shared__ __align__(128) uint8_t shared[];
    uint32_t warp = threadIdx.x / 32;
    struct cta cta = {args, plan, shared + map::QUERIES, args.q_heads / args.pool.geometry.kv_heads,
                      args.layer * args.pool.geometry.kv_heads};
    struct cuda_kvops_unit unit = unit_at(cta, 0);
    uint32_t ring = shared_address(shared + warp % STATE_NODE_RUNS * 4 * map::STAGE);
    uint32_t barrier = shared_address(shared + map::BARRIERS + warp * 8);
    piece_walk walk = {};
    short_page page = {};

    state_let_next_start();
    if (threadIdx.x % 32 == 0)
        barrier_init(barrier);
    __syncwarp();
    if (unit.kind == CUDA_KVOPS_END)
        return;
    walk.range = range_of(cta, unit);
    if (over_planes(unit)) { /* warps 4b .. 4b + 3: block b of the run */
        walk.range.first = unit.first * STATE_RUN_BLOCKS + warp / LAYOUT_BLOCK_PAGES;
        walk.range.last = walk.range.first + 1;
        ask_page<DIM>(cta, walk.range, shared_address(shared + warp * map::STAGE), barrier, page);
    } else if (warp < STATE_NODE_RUNS) {
        piece_start(cta, unit, walk);
        if (walk.settled)
            piece_fill<DIM, TAIL_STAGES>(cta, ring, walk);
    }
    uint32_t q_row = walk.range.seq->first_row;
    state_wait_for_previous();
    if (warp < STATE_HEADS)
        prepare_head<DIM, 1>(cta, unit, q_row, warp);
    __syncthreads();
    if (over_planes(unit))
        attend_run<DIM>(cta, unit, shared, page);
    else
        attend_tails<DIM>(cta, unit, ring, walk);
}

template <int DIM> static cudaError_t open_kernel(uint32_t *ctas_out) {
    const void *kernel = (const void *)decode_short_kernel<DIM>;
    int device, count, room;
    cudaError_t error = cudaGetDevice(&device);

    *ctas_out = 0;
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess || room < (int)short_map<DIM>::BYTES)
        return error; /* this device has no room for it: plans do without */
    *ctas_out = (uint32_t)count;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                short_map<DIM>::BYTES);
}

cudaError_t decode_short_open(uint32_t ctas_out[2]) {
    cudaError_t error = open_kernel<64>(&ctas_out[0]);

    return error == cudaSuccess ? open_kernel<128>(&ctas_out[1]) : error;
}

cudaError_t decode_short_launch(const struct cuda_kvops_launch *launch) {
    struct kvops_attend args = *launch->args;
    struct cuda_kvops_plan plan = *launch->plan;
    int small = args.pool.geometry.head_dim == 64;
    cudaLaunchConfig_t config = {};
    void *arguments[] = {&args, &plan};

    config.gridDim = dim3(plan.ctas);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = small ? short_map<64>::BYTES : short_map<128>::BYTES;
    config.stream = launch->stream;
    return state_launch(small ? (const void *)decode_short_kernel<64>
                              : (const void *)decode_short_kernel<128>,
                        &config, launch->overlap, arguments);
}
