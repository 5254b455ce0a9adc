/* kernels/cuda/kv_decode.cu - attention of one query row per sequence over blocks of any tier.
 *
 * Responsible for: the kernel that walks pages in the tree of kvops.h and writes one partial per
 * unit of the plan, and its launcher.
 * Not responsible for: choosing units (kv_plan.cu), joining partials (kv_combine.cu).
 *
 * Moves the stored bytes of the tiers read, each once: per page, KV head and layer 12,544 B at
 * K8V4, 10,496 K6V4, 8,448 K6V2, 32,768 BF16 (head_dim 128), plus 2 KiB of partial per 1,024 or
 * 4,096 tokens. Expected with combine, on an H200: those bytes at 0.87 of the read rate for one
 * sequence of 131,072 tokens at K8V4, 0.94 for nine; 10 us a layer below 8,192 tokens.
 *
 * Four warps a CTA, two CTAs a multiprocessor, every warp with a ring of its own: two sealed pages
 * (bulk copies on sm_90, cp.async on sm_80) or three pieces of 16 BF16 tokens. Tree: a warp takes
 * blocks page by page; a run is four blocks and a node four runs, folded left. A NODE unit gives a
 * warp a run, a RUN unit gives it a block; the folds are the same, so are the bits.
 *
 * Against the twin: q has 16 bits of its largest rotated value, so a logit differs by at most
 * sum_d |(c_d + half) s_k| * max|Hq| / 65278 / sqrt(dim) + 2^-22 |logit|; p * v_scale has 16 bits
 * of its page's maximum, so an output by at most 2^-16 * max|V| (page maxima weigh at most the
 * sum) on top of 2 * max|logit difference| * max|V|. BF16 tokens: q and p to 2^-17.
 */
#include "kernels/cuda/device_piece.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS };

/* Shared memory: rings, merge area, queries, barriers. */
template <int DIM, bool WIDE> struct shared_map {
    static constexpr uint32_t STAGE = WIDE ? stage_map<DIM>::WIDE : stage_map<DIM>::NARROW;
    static constexpr uint32_t RING =
        2 * STAGE > PIECE_STAGES * 64 * DIM ? 2 * STAGE : PIECE_STAGES * 64 * DIM;
    static constexpr uint32_t MERGE = WARPS * RING;
    static constexpr uint32_t MERGE_BYTES = WARPS * (DIM / 8 + 2) * 128;
    static constexpr uint32_t CODES = MERGE + MERGE_BYTES; /* [8 columns][DIM] int8 */
    static constexpr uint32_t SPLIT = CODES + 8 * DIM;     /* [8 columns][DIM] BF16 */
    static constexpr uint32_t HEADS = SPLIT + 16 * DIM;    /* [4] scale, [4] sum */
    static constexpr uint32_t BARRIERS = HEADS + 32;
    static constexpr uint32_t BYTES = BARRIERS + WARPS * 2 * 8;
};

/* What one CTA works with. */
struct cta {
    struct kvops_attend args;
    struct cuda_kvops_plan plan;
    uint8_t *shared;
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
    bool node = unit.kind == CUDA_KVOPS_NODE || unit.kind == CUDA_KVOPS_NODE_BF16;
    block_range range;

    range.seq = &cta.args.seqs[unit.seq];
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
    return unit.kind == CUDA_KVOPS_NODE || unit.kind == CUDA_KVOPS_RUN;
}

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

template <int DIM, bool WIDE> struct page_ring {
    uint32_t stages;
    uint32_t barriers;

    __device__ __forceinline__ void request(const lane_stream &stream, const lane_block &block,
                                            uint32_t page, uint32_t half) const {
        page_request(stream, block, page, stages + half * shared_map<DIM, WIDE>::STAGE,
                     barriers + half * 8);
    }
};

/* What a warp works with on planes. */
template <int DIM, bool WIDE> struct page_work {
    page_ring<DIM, WIDE> ring;
    lane_stream stream;
    ahead at;
    uint32_t round;     /* of the unit at hand */
    bool follows;       /* the next unit is over planes too */
    block_range follow; /* its blocks */
};

/* Looks up block `block` of at.range, if it has it. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void ahead_look(const struct cta &cta, page_work<DIM, WIDE> &work,
                                                  uint32_t block) {
    ahead &at = work.at;

    at.block = visible(at.range, block);
    at.more = at.block < range_end(at.range);
    if (at.more)
        at.look = lane_look_at(work.stream, &at.range.blocks[at.block],
                               (cta.row_in_layer + at.range.head) * LAYOUT_BLOCK_PAGES);
}

template <int DIM, bool WIDE>
static __device__ __forceinline__ void ahead_next(const struct cta &cta,
                                                  page_work<DIM, WIDE> &work) {
    ahead &at = work.at;

    ahead_look(cta, work, at.block + 1);
    if (at.more || !work.follows)
        return;
    at.range = work.follow;
    at.round = work.round + 1;
    ahead_look(cta, work, at.range.first);
}

/* Starts the ring with the first block of `range`, unless the previous unit has done so. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void
ahead_start(const struct cta &cta, page_work<DIM, WIDE> &work, const block_range &range) {
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
template <int DIM, bool WIDE>
static __device__ __forceinline__ void
attend_block(const struct cta &cta, page_work<DIM, WIDE> &work, const page_queries<DIM> &q,
             state<DIM / 8> &out) {
    const page_ring<DIM, WIDE> &ring = work.ring;
    ahead &at = work.at;
    lane_block block = at.from;
    leaf_state<DIM> leaf = {-INFINITY, 0.0f, 0.0f, {}};

    ahead_next(cta, work);
    at.from = block; /* requested from until its last page is */
#pragma unroll 1
    for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++) {
        page_wait(ring.barriers + page % 2 * 8, page / 2);
        page_attend<DIM, WIDE>(ring.stages + page % 2 * shared_map<DIM, WIDE>::STAGE, block, q,
                               leaf);
        if (page == 2 && at.more)
            at.from = lane_block_of(work.stream, at.look);
        if (page < 2 || at.more)
            ring.request(work.stream, at.from, (page + 2) % 4, page % 2);
        else if (!PAGE_BULK_COPY)
            piece_commit();
    }
    page_leaf_end<DIM>(leaf, out);
    if (!WIDE && (block.streams >> LAYOUT_VX & 1))
        out.sum = NAN; /* the caller chose the narrow form: an answer must not look right */
}

/* --- queries */

/* Warp w prepares head 4 * part + w: rotated in two bytes a value, plain in two BF16. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void
prepare_head(const struct cta &cta, const struct cuda_kvops_unit &unit, uint32_t q_row) {
    using map = shared_map<DIM, WIDE>;
    constexpr int OWN = DIM / 32;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t row = unit.part * STATE_HEADS + warp;
    uint64_t head = (uint64_t)q_row * cta.args.q_heads + unit.head * cta.group + row;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    float y[OWN], top = 0.0f;
    int sum = 0;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        uint32_t d = lane * OWN + i;
        y[i] = row < cta.group ? cta.args.q[head * DIM + d] : 0.0f;
        uint32_t pair = split_bf16(__fmul_rn(y[i], root * STATE_LOG2E));
        uint16_t *split = (uint16_t *)(cta.shared + map::SPLIT) + 2 * warp * DIM + d;
        split[0] = (uint16_t)pair;
        split[DIM] = (uint16_t)(pair >> 16);
    }
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
        int8_t *codes = (int8_t *)(cta.shared + map::CODES) + 2 * warp * DIM + lane * OWN + i;
        int code = min(max(__float2int_rn(__fmul_rn(y[i], to_steps)), -32639), 32639);
        int high = (code + 128) >> 8;
        codes[0] = (int8_t)high;
        codes[DIM] = (int8_t)(code - 256 * high);
        sum += code;
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) {
        float *heads = (float *)(cta.shared + map::HEADS);
        heads[warp] = __fmul_rn(__fdiv_rn(top, 32639.0f), root * STATE_LOG2E);
        ((int *)heads)[STATE_HEADS + warp] = sum;
    }
}

template <int DIM, bool WIDE>
static __device__ __forceinline__ void load_queries(const struct cta &cta, page_queries<DIM> &q) {
    using map = shared_map<DIM, WIDE>;
    uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const float *heads = (const float *)(cta.shared + map::HEADS);

#pragma unroll
    for (int ks = 0; ks < DIM / 32; ks++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            q.b[ks][i] =
                *(const uint32_t *)(cta.shared + map::CODES + g * DIM + ks * 32 + i * 16 + 4 * c);
    q.scale = heads[c];
    q.sum = ((const int *)heads)[STATE_HEADS + c];
}

/* --- BF16 pieces: sixteen per block, or those of one tail page per warp */

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
    bool settled; /* no kernel of this step has written what is read */
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
    if (unit.kind == CUDA_KVOPS_TAIL) {
        tail_start(walk.range.seq, unit.first + threadIdx.x / 32, walk);
    } else {
        walk.page = UINT32_MAX;
        walk.use = visible(walk.range, walk.range.first) * 16;
        walk.end = range_end(walk.range) * 16;
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
    if (walk.page == UINT32_MAX && index % 16 == 0)
        index = visible(walk.range, index / 16) * 16;
    return index;
}

/* Requests until PIECE_STAGES pieces are under way; one commit group each, empty at the end. */
template <int DIM>
static __device__ __forceinline__ void piece_fill(const struct cta &cta, uint32_t ring,
                                                  piece_walk &walk) {
    for (; walk.filled < walk.used + PIECE_STAGES; walk.filled++) {
        if (walk.get < walk.end) {
            piece_request<DIM>(piece_at<DIM>(cta, walk, walk.get),
                               ring + walk.filled % PIECE_STAGES * 64 * DIM);
            walk.get = piece_after(walk, walk.get);
        }
        piece_commit();
    }
}

/* into = the blocks of the warp, or its tail page. */
template <int DIM>
static __device__ __forceinline__ void attend_pieces(const struct cta &cta, uint32_t ring,
                                                     uint32_t q, piece_walk &walk,
                                                     state<DIM / 8> &into) {
    bool tail = walk.page != UINT32_MAX;
    piece_state<DIM> leaf;

    piece_clear(leaf);
    while (walk.use < walk.end) {
        piece_fill<DIM>(cta, ring, walk);
        piece_wait();
        uint32_t tokens = tail ? walk.tokens - walk.use * PIECE_TOKENS : PIECE_TOKENS;
        piece_attend<DIM>(ring + walk.used % PIECE_STAGES * 64 * DIM, q, tokens, leaf);
        uint32_t next = piece_after(walk, walk.use);
        if (next >= walk.end || (!tail && next / 16 != walk.use / 16)) {
            state<DIM / 8> block;
            piece_leaf_end<DIM>(leaf, block);
            state_fold(into, block);
            piece_clear(leaf);
        }
        walk.use = next;
        walk.used++;
    }
    piece_wait_all();
}

/* --- joining the warps */

/* Values [first, first + N) of a lane's DIM / 8 to the partial `item`. */
template <int DIM, int N>
static __device__ __forceinline__ void write_partial(const struct cta &cta, uint32_t item,
                                                     uint32_t part, uint32_t first,
                                                     const state<N> &from) {
    uint32_t lane = threadIdx.x % 32, g = lane / 4, heads = state_round16(cta.group);
    uint32_t row = part * STATE_HEADS + lane % 4;
    float *partial = cta.args.partials + (uint64_t)item * state_partial_floats(cta.group, DIM);

    if (row >= cta.group)
        return;
    if (first == 0 && g == 0) {
        partial[row] = from.max;
        partial[heads + row] = from.sum;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t index = first + i, d = index / 2 * 16 + index % 2 * 8 + g;
        partial[2 * heads + row * DIM + d] = from.acc[i];
    }
}

/* Left fold of the warps' states; each warp does a quarter of the values and writes them. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void
merge(const struct cta &cta, const struct cuda_kvops_unit &unit, const state<DIM / 8> &mine) {
    constexpr int COUNT = DIM / 8, QUARTER = COUNT / WARPS;
    float *area = (float *)(cta.shared + shared_map<DIM, WIDE>::MERGE);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *to = area + warp * (COUNT + 2) * 32 + lane;
    state<QUARTER> total;

    to[0] = mine.max;
    to[32] = mine.sum;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        to[(2 + i) * 32] = mine.acc[i];
    __syncthreads();
    state_clear(total);
#pragma unroll
    for (int from = 0; from < WARPS; from++) {
        const float *at = area + from * (COUNT + 2) * 32 + lane;
        state<QUARTER> part;
        part.max = at[0];
        part.sum = at[32];
#pragma unroll
        for (int i = 0; i < QUARTER; i++)
            part.acc[i] = at[(2 + warp * QUARTER + i) * 32];
        state_fold(total, part);
    }
    write_partial<DIM>(cta, unit.item, unit.part, warp * QUARTER, total);
}

/* --- the kernel */

/* Where a CTA is: the unit at hand and what is known of the next, whose queries shared memory
 * holds. */
struct place {
    struct cuda_kvops_unit unit;
    struct cuda_kvops_unit next;
    block_range range; /* of the unit, over planes */
    uint32_t q_row;
    uint32_t prepared;
};

template <int DIM, bool WIDE>
static __device__ __forceinline__ void
attend_unit(const struct cta &cta, page_work<DIM, WIDE> &work, place &place, piece_walk &walk) {
    using map = shared_map<DIM, WIDE>;
    const struct cuda_kvops_unit &unit = place.unit;
    uint32_t key = (unit.seq * 256 + unit.head) * 8 + unit.part + 1;
    state<DIM / 8> total;

    if (key != place.prepared)
        prepare_head<DIM, WIDE>(cta, unit, place.q_row);
    place.prepared = key;
    __syncthreads();
    state_clear(total);
    if (over_planes(unit)) {
        page_queries<DIM> q;
        load_queries<DIM, WIDE>(cta, q);
        ahead_start(cta, work, place.range);
        while (work.at.more && work.at.round == work.round) {
            state<DIM / 8> leaf;
            attend_block<DIM, WIDE>(cta, work, q, leaf);
            state_fold(total, leaf);
        }
        merge<DIM, WIDE>(cta, unit, total);
        return;
    }
    attend_pieces<DIM>(cta, work.ring.stages, shared_address(cta.shared + map::SPLIT), walk, total);
    if (unit.kind != CUDA_KVOPS_TAIL) {
        merge<DIM, WIDE>(cta, unit, total);
        return;
    }
    if (walk.page < state_tails(walk.range.seq))
        write_partial<DIM>(cta, unit.item + threadIdx.x / 32, unit.part, 0, total);
    __syncthreads(); /* the queries may change now */
}

/* Units of the CTA one after the other; of the next one everything is fetched while one is at
 * hand, because a load takes as long as the copies queued in front of it. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void
attend_units(const struct cta &cta, page_work<DIM, WIDE> &work, place &place, piece_walk &walk) {
    for (work.round = 0;; work.round++) {
        struct cuda_kvops_unit after = {};
        uint32_t next_row = cta.args.seqs[place.next.seq].first_row;
        if (place.next.kind != CUDA_KVOPS_END)
            after = unit_at(cta, work.round + 2);
        work.follow = range_of(cta, place.next);
        work.follows = over_planes(place.next);
        attend_unit<DIM, WIDE>(cta, work, place, walk);
        if (place.next.kind == CUDA_KVOPS_END)
            return;
        place.unit = place.next;
        place.next = after;
        place.range = work.follow;
        place.q_row = next_row;
        if (!over_planes(place.unit)) {
            piece_start(cta, place.unit, walk);
            piece_fill<DIM>(cta, work.ring.stages, walk);
        }
    }
}

template <int DIM, bool WIDE>
static __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2)
    decode_kernel(struct kvops_attend args, struct cuda_kvops_plan plan) {
    using map = shared_map<DIM, WIDE>;
    extern __shared__ __align__(128) uint8_t shared[];
    uint32_t warp = threadIdx.x / 32;
    struct cta cta = {args, plan, shared, args.q_heads / args.pool.geometry.kv_heads,
                      args.layer * args.pool.geometry.kv_heads};
    page_work<DIM, WIDE> work = {};
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
    place.q_row = args.seqs[place.unit.seq].first_row;
    if (over_planes(place.unit)) {
        place.range = range_of(cta, place.unit);
        ahead_start(cta, work, place.range);
    } else {
        piece_start(cta, place.unit, walk);
        if (walk.settled)
            piece_fill<DIM>(cta, work.ring.stages, walk);
    }
    state_wait_for_previous();
    attend_units<DIM, WIDE>(cta, work, place, walk);
}

/* --- host */

template <int DIM, bool WIDE> static cudaError_t open_kernel(uint32_t *ctas_out) {
    const void *kernel = (const void *)decode_kernel<DIM, WIDE>;
    int device, count, per_count;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     shared_map<DIM, WIDE>::BYTES);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_count, kernel, THREADS,
                                                              shared_map<DIM, WIDE>::BYTES);
    if (error == cudaSuccess && per_count == 0)
        error = cudaErrorLaunchOutOfResources;
    if (error == cudaSuccess)
        *ctas_out = (uint32_t)(count * per_count);
    return error;
}

extern "C" cudaError_t cuda_kvops_open(struct cuda_kvops_device *device_out) {
    cudaError_t error = open_kernel<64, false>(&device_out->ctas[0]);

    if (error == cudaSuccess)
        error = open_kernel<128, false>(&device_out->ctas[1]);
    if (error == cudaSuccess)
        error = open_kernel<64, true>(&device_out->wide_ctas[0]);
    if (error == cudaSuccess)
        error = open_kernel<128, true>(&device_out->wide_ctas[1]);
    return error;
}

template <int DIM, bool WIDE> static cudaError_t launch_kernel(const struct cuda_kvops_launch *at) {
    struct kvops_attend args = *at->args;
    struct cuda_kvops_plan plan = *at->plan;
    cudaLaunchConfig_t config = {};
    void *arguments[] = {&args, &plan};

    config.gridDim = dim3(plan.ctas);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = shared_map<DIM, WIDE>::BYTES;
    config.stream = at->stream;
    return state_launch((const void *)decode_kernel<DIM, WIDE>, &config, at->overlap, arguments);
}

extern "C" cudaError_t cuda_kvops_decode(const struct cuda_kvops_launch *launch) {
    if (launch->args->pool.geometry.head_dim == 64)
        return launch->plan->wide ? launch_kernel<64, true>(launch)
                                  : launch_kernel<64, false>(launch);
    return launch->plan->wide ? launch_kernel<128, true>(launch)
                              : launch_kernel<128, false>(launch);
}
