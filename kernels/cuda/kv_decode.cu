/* kernels/cuda/kv_decode.cu - attention of one query row per sequence over blocks of any tier.
 *
 * Responsible for: the kernel that walks pages in the tree of kvops.h and writes one partial per
 * unit of the plan, and its launcher.
 * Not responsible for: choosing units (kv_plan.cu), joining partials (kv_combine.cu).
 *
 * Moves the stored bytes of the tiers read, each once: per page, KV head and layer 12,544 B at
 * K8V4, 10,496 K6V4, 8,448 K6V2, 32,768 BF16, 16,384 FP8, 12,928 K8I4 (head_dim 128), plus 2 KiB
 * of partial per 1,024 or 4,096 tokens. Expected with combine, on an H200: those bytes at 0.87 of
 * the read rate for one sequence of 131,072 tokens at K8V4, 0.95 for nine; eight query heads to a
 * KV head 0.82, 0.91. A layer costs 6 to 7 us beside its bytes: its last pages, combine, the next
 * queries.
 *
 * Four warps a CTA, two CTAs a multiprocessor (a limit on registers that let CTAs of combine wait
 * beside them made every page slower and gained nothing), every warp with a ring of its own: two
 * sealed pages (bulk copies on sm_90, cp.async on sm_80) or three pieces, of 16 BF16 tokens or of
 * 32 of a control code (device_control_walk.cuh). VX is not in the ring but brought to L2 with its
 * page: one block of K8V8 must not cost all others a CTA a multiprocessor. Tree: a warp takes
 * blocks page by page; a run is four blocks and a node four runs, folded left. A NODE unit gives a
 * warp a run, a RUN unit gives it a block; the folds are the same, so are the bits.
 *
 * Against the twin: q has 16 bits of its largest rotated value, so a logit differs by at most
 * sum_d |(c_d + half) s_k| * max|Hq| / 65278 / sqrt(dim) + 2^-22 |logit|; p * v_scale has 16 bits
 * of its page's maximum, so an output by at most 2^-16 * max|V| (page maxima weigh at most the
 * sum) on top of 2 * max|logit difference| * max|V|. K8I4 likewise; BF16 and FP8 tokens: q and p
 * to 2^-17.
 */
#include "kernels/cuda/device_control_walk.cuh"

#include <algorithm>

enum { WARPS = 4, THREADS = 32 * WARPS, PIECE_STAGES = 3 };

/* Shared memory: rings, merge area, queries, barriers. */
template <int DIM, int GROUPS> struct shared_map {
    static constexpr uint32_t STAGE = stage_map<DIM>::NARROW;
    static constexpr uint32_t RING =
        2 * STAGE > PIECE_STAGES * 64 * DIM ? 2 * STAGE : PIECE_STAGES * 64 * DIM;
    static constexpr uint32_t MERGE = WARPS * RING;
    static constexpr uint32_t MERGE_BYTES = WARPS * (DIM / 8 * 128 + 32);
    static constexpr uint32_t QUERIES = MERGE + MERGE_BYTES;
    static constexpr uint32_t BARRIERS = QUERIES + query_map<DIM, GROUPS>::BYTES;
    static constexpr uint32_t BYTES = BARRIERS + WARPS * 2 * 8;
};

/* --- sealed blocks: the next block's pages are requested while this one's are used */

/* The block after the one at hand, in this unit or the next. */
struct ahead {
    block_range range;
    uint32_t round;
    uint32_t block;
    bool more;
    lane_look look;  /* of it */
    lane_block from; /* of it, once its first page was requested */
};

template <int DIM> struct page_ring {
    uint32_t stages;
    uint32_t barriers;

    __device__ __forceinline__ void request(const lane_stream &stream, const lane_block &block,
                                            uint32_t page, uint32_t half) const {
        page_request<DIM, false>(stream, block, page, stages + half * stage_map<DIM>::NARROW,
                                 barriers + half * 8);
    }
};

/* What a warp works with on planes. */
template <int DIM> struct page_work {
    page_ring<DIM> ring;
    lane_stream stream;
    ahead at;
    uint32_t round;     /* of the unit at hand */
    bool follows;       /* the next unit is over planes too */
    block_range follow; /* its blocks */
};

/* Looks up block `block` of at.range, if it has it. */
template <int DIM>
static __device__ __forceinline__ void ahead_look(const struct cta &cta, page_work<DIM> &work,
                                                  uint32_t block) {
    ahead &at = work.at;

    at.block = visible(at.range, block);
    at.more = at.block < range_end(at.range);
    if (at.more)
        at.look = lane_look_at(work.stream, &at.range.blocks[at.block],
                               (cta.row_in_layer + at.range.head) * LAYOUT_BLOCK_PAGES);
}

template <int DIM>
static __device__ __forceinline__ void ahead_next(const struct cta &cta, page_work<DIM> &work) {
    ahead &at = work.at;

    ahead_look(cta, work, at.block + 1);
    if (at.more || !work.follows)
        return;
    at.range = work.follow;
    at.round = work.round + 1;
    ahead_look(cta, work, at.range.first);
}

/* Starts the ring with the first block of `range`, unless the previous unit has done so. */
template <int DIM>
static __device__ __forceinline__ void ahead_start(const struct cta &cta, page_work<DIM> &work,
                                                   const block_range &range) {
    ahead &at = work.at;

    if (at.more && at.round == work.round)
        return;
    at.range = range;
    at.round = work.round;
    ahead_look(cta, work, range.first);
    if (!at.more)
        return;
    at.from = lane_block_of(work.stream, at.look);
    work.ring.request(work.stream, at.from, 0, 0);
    work.ring.request(work.stream, at.from, 1, 1);
}

/* out = the block whose first two pages are under way. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void attend_block(const struct cta &cta, page_work<DIM> &work,
                                                    const page_queries<DIM> (&q)[GROUPS],
                                                    state<DIM / 8> (&out)[GROUPS]) {
    constexpr uint32_t STAGE = stage_map<DIM>::NARROW;
    const page_ring<DIM> &ring = work.ring;
    ahead &at = work.at;
    lane_block block = at.from;
    leaf_state<DIM / 8> leaf[GROUPS];

#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        leaf_clear(leaf[n]);
    ahead_next(cta, work);
    at.from = block; /* requested from until its last page is */
#pragma unroll 1
    for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++) {
        const uint4 *extra = NULL;
        if (block.streams >> LAYOUT_VX & 1)
            extra = page_extra(work.stream, block, page);
        page_wait<2>(ring.barriers + page % 2 * 8, page / 2);
        page_attend<DIM>(ring.stages + page % 2 * STAGE, extra, block.streams, q, leaf);
        if (page == 2 && at.more)
            at.from = lane_block_of(work.stream, at.look);
        if (page < 2 || at.more)
            ring.request(work.stream, at.from, (page + 2) % 4, page % 2);
        else if (!PAGE_BULK_COPY)
            piece_commit();
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        page_leaf_end(leaf[n], out[n]);
}

/* --- joining the warps */

template <int DIM, int GROUPS>
static __device__ __forceinline__ void merge_groups(const struct cta &cta, float *area,
                                                    const struct cuda_kvops_unit &unit,
                                                    const state<DIM / 8> (&mine)[GROUPS]) {
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        if (n > 0)
            __syncthreads();
        unit_merge<DIM>(cta, area, unit, unit.part * GROUPS + n, mine[n]);
    }
}

/* --- the kernel */

/* Starts the ring with the pieces of `unit`, if it has pieces and they can be read already. */
template <int DIM>
static __device__ __forceinline__ void pieces_start(const struct cta &cta,
                                                    const struct cuda_kvops_unit &unit,
                                                    uint32_t ring, piece_walk &walk) {
    if (unit.kind == CUDA_KVOPS_END || over_planes(unit))
        return;
    piece_start(cta, unit, walk);
    if (unit.code == CUDA_KVOPS_FP8)
        control_start<DIM, false>(cta, ring, walk);
    else if (unit.code == CUDA_KVOPS_K8I4)
        control_start<DIM, true>(cta, ring, walk);
    else if (walk.settled)
        piece_fill<DIM, PIECE_STAGES>(cta, ring, walk);
}

/* Where a CTA is: the unit at hand and what is known of the next, whose queries shared memory
 * holds. */
struct place {
    struct cuda_kvops_unit unit;
    struct cuda_kvops_unit next;
    block_range range; /* of the unit, over planes */
    uint32_t q_row;
    uint32_t prepared;
};

template <int DIM, int GROUPS>
static __device__ __forceinline__ void attend_unit(const struct cta &cta, page_work<DIM> &work,
                                                   place &place, piece_walk &walk) {
    float *area = (float *)(cta.queries - shared_map<DIM, GROUPS>::MERGE_BYTES);
    const struct cuda_kvops_unit &unit = place.unit;
    uint32_t key = ((unit.seq * 256 + unit.head) * 8 + unit.part) * 2 + 2;
    state<DIM / 8> total[GROUPS];

    key += unit.code == CUDA_KVOPS_FP8; /* whose queries are others */
    if (key != place.prepared)
        for (uint32_t slot = threadIdx.x / 32; slot < GROUPS * STATE_HEADS; slot += WARPS)
            prepare_head<DIM, GROUPS>(cta, unit, place.q_row, slot);
    place.prepared = key;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        state_clear(total[n]);
    if (over_planes(unit)) {
        page_queries<DIM> q[GROUPS];
        load_queries<DIM>(cta, q);
        ahead_start(cta, work, place.range);
        while (work.at.more && work.at.round == work.round) {
            state<DIM / 8> leaf[GROUPS];
            attend_block<DIM>(cta, work, q, leaf);
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
                state_fold(total[n], leaf[n]);
        }
    } else if (unit.code == CUDA_KVOPS_FP8) {
        attend_control<DIM, false>(cta, work.ring.stages, walk, total);
    } else if (unit.code == CUDA_KVOPS_K8I4) {
        attend_control<DIM, true>(cta, work.ring.stages, walk, total);
    } else {
        attend_pieces<DIM, PIECE_STAGES>(cta, work.ring.stages, walk, total);
    }
    bool there = walk.page < state_tails(place.range.seq);
    pieces_start<DIM>(cta, place.next, work.ring.stages, walk);
    if (unit.kind != CUDA_KVOPS_TAIL) {
        merge_groups<DIM>(cta, area, unit, total);
        return;
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        if (there)
            write_partial<DIM>(cta, unit, unit.item + threadIdx.x / 32, unit.part * GROUPS + n, 0,
                               total[n]);
    __syncthreads(); /* the queries may change now */
}

/* Units of the CTA one after the other; of the next one everything is fetched while one is at
 * hand, because a load takes as long as the copies queued in front of it. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void attend_units(const struct cta &cta, page_work<DIM> &work,
                                                    place &place, piece_walk &walk) {
    for (work.round = 0;; work.round++) {
        struct cuda_kvops_unit after = {};
        uint32_t next_row = cta.args.seqs[place.next.seq].first_row;
        if (place.next.kind != CUDA_KVOPS_END)
            after = unit_at(cta, work.round + 2);
        work.follow = range_of(cta, place.next);
        work.follows = over_planes(place.next);
        attend_unit<DIM, GROUPS>(cta, work, place, walk);
        if (place.next.kind == CUDA_KVOPS_END)
            return;
        place.unit = place.next;
        place.next = after;
        place.range = work.follow;
        place.q_row = next_row;
    }
}

template <int DIM, int GROUPS>
static __global__ void __launch_bounds__(THREADS, 2)
    decode_kernel(struct kvops_attend args, struct cuda_kvops_plan plan) {
    using map = shared_map<DIM, GROUPS>;
    extern __shared__ __align__(128) uint8_t shared[];
    uint32_t warp = threadIdx.x / 32;
    struct cta cta = {args, plan, shared + map::QUERIES, args.q_heads / args.pool.geometry.kv_heads,
                      args.layer * args.pool.geometry.kv_heads};
    page_work<DIM> work = {};
    place place = {unit_at(cta, 0), unit_at(cta, 1), {}, 0, 0};
    piece_walk walk = {};

    state_let_next_start();
    work.ring = {shared_address(shared + warp * map::RING),
                 shared_address(shared + map::BARRIERS + warp * 16)};
    work.stream = lane_stream_of<DIM>(args.pool);
    if (threadIdx.x % 32 == 0) {
        barrier_init(work.ring.barriers);
        barrier_init(work.ring.barriers + 8);
    }
    __syncwarp();
    if (place.unit.kind == CUDA_KVOPS_END)
        return;
    place.range = range_of(cta, place.unit);
    place.q_row = place.range.seq->first_row;
    if (over_planes(place.unit)) {
        ahead_start(cta, work, place.range);
    } else {
        pieces_start<DIM>(cta, place.unit, work.ring.stages, walk);
    }
    state_wait_for_previous();
    attend_units<DIM, GROUPS>(cta, work, place, walk);
}

/* --- host */

template <int DIM, int GROUPS> static cudaError_t open_kernel(uint32_t *ctas_out) {
    const void *kernel = (const void *)decode_kernel<DIM, GROUPS>;
    constexpr uint32_t bytes = shared_map<DIM, GROUPS>::BYTES;
    int device, count, per_count;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_count, kernel, THREADS, bytes);
    if (error == cudaSuccess && per_count == 0)
        error = cudaErrorLaunchOutOfResources;
    if (error == cudaSuccess)
        *ctas_out = (uint32_t)(count * per_count);
    return error;
}

template <int DIM> static cudaError_t open_dim(struct cuda_kvops_device *device) {
    cudaError_t error = open_kernel<DIM, 1>(&device->ctas[DIM / 128]);
    uint32_t ctas = 0;

    if (error == cudaSuccess)
        error = open_kernel<DIM, 2>(&ctas);
    if (error == cudaSuccess) /* a plan is for either */
        device->ctas[DIM / 128] = std::min(device->ctas[DIM / 128], ctas);
    return error;
}

extern "C" cudaError_t cuda_kvops_open(struct cuda_kvops_device *device_out) {
    cudaError_t error = open_dim<64>(device_out);

    if (error == cudaSuccess)
        error = open_dim<128>(device_out);
    return error == cudaSuccess ? decode_short_open(device_out->short_ctas) : error;
}

template <int DIM, int GROUPS>
static cudaError_t launch_kernel(const struct cuda_kvops_launch *at) {
    struct kvops_attend args = *at->args;
    struct cuda_kvops_plan plan = *at->plan;
    cudaLaunchConfig_t config = {};
    void *arguments[] = {&args, &plan};

    config.gridDim = dim3(plan.ctas);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = shared_map<DIM, GROUPS>::BYTES;
    config.stream = at->stream;
    return state_launch((const void *)decode_kernel<DIM, GROUPS>, &config, at->overlap, arguments);
}

template <int DIM> static cudaError_t launch_dim(const struct cuda_kvops_launch *launch) {
    return launch->plan->form & CUDA_KVOPS_EIGHT ? launch_kernel<DIM, 2>(launch)
                                                 : launch_kernel<DIM, 1>(launch);
}

extern "C" cudaError_t cuda_kvops_decode(const struct cuda_kvops_launch *launch) {
    if (launch->plan->form & CUDA_KVOPS_BRIEF)
        return decode_short_launch(launch);
    return launch->args->pool.geometry.head_dim == 64 ? launch_dim<64>(launch)
                                                      : launch_dim<128>(launch);
}
