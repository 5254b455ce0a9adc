/* kernels/cuda/kv_prefill.cu - attention of the rows of a chunk over blocks of any tier.
 *
 * Responsible for: struct kvops_attend for sequences of 1 to KVOPS_CHUNK_ROWS_MAX rows; launcher.
 * Not responsible for: a single row at memory speed (kv_decode.cu).
 *
 * Moves the stored bytes of the sequence once per 64 query vectors (16 rows of four heads), mostly
 * out of L2. Expected: 4 * rows * group * tokens * dim operations at 120 to 140 TFLOP/s on an H200;
 * bound by latency, two warps a scheduler. A CTA takes 64 query vectors of one KV head:
 * four pairs of warps with 16 each, a warp of a pair taking one half of every page. Pages are
 * visited in the order of kvops.h, each joined to a running softmax; the halves join at the end, so
 * the bits of a row depend on its sequence and its place in the chunk alone.
 *
 * Against the twin: q and p are rounded to fp16 (2^-12) over planes, split in two BF16 (2^-17) over
 * BF16 tokens: a logit differs by at most 2^-11 |q| |k| / sqrt(dim), an output by 2^-10 * max|V| on
 * top of 2 * max|logit difference| * max|V|.
 */
#include "kernels/cuda/device_tile.cuh"

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
    uint32_t row;   /* layer * kv_heads + head */
    uint32_t first; /* query vector of the tile: row of the sequence * group + head of the group */
    uint32_t count; /* query vectors of the sequence */
};

/* --- queries */

template <int DIM>
static __device__ __forceinline__ void prepare_queries(const struct prefill &at) {
    using map = tile_map<DIM>;
    constexpr int OWN = DIM / 32;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    uint32_t lane = threadIdx.x % 32;

    for (uint32_t j = threadIdx.x / 32; j < TILE_QUERIES; j += TILE_THREADS / 32) {
        uint32_t index = at.first + j;
        uint64_t from = ((uint64_t)at.seq->first_row + index / at.group) * at.args.q_heads +
                        at.head * at.group + index % at.group;
        float y[OWN], top = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            uint32_t d = lane * OWN + i, off = row_off<DIM>(j, d);
            y[i] = index < at.count ? at.args.q[from * DIM + d] : 0.0f;
            uint32_t pair = split_bf16(__fmul_rn(y[i], root * STATE_LOG2E));
            *(uint16_t *)(at.shared + map::HIGH + off) = (uint16_t)pair;
            *(uint16_t *)(at.shared + map::LOW + off) = (uint16_t)(pair >> 16);
        }
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
            *(__half *)(at.shared + map::ROTATED + row_off<DIM>(j, lane * OWN + i)) =
                __float2half_rn(__fmul_rn(y[i], to_one));
        if (lane == 0)
            ((float *)(at.shared + map::STEPS))[j] = __fmul_rn(top, root * STATE_LOG2E);
    }
}

/* --- one page */

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

template <int DIM>
static __device__ __forceinline__ void attend_planes(const struct prefill &at, uint32_t buffer,
                                                     rows_state<DIM> &state) {
    using map = tile_map<DIM>;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4;
    uint32_t first = warp / 2 * 16, token = warp % 2 * 32, a[2][4], b[4];
    uint32_t k = shared_address(at.shared + map::BUFFERS + buffer * map::BUFFER_BYTES);
    uint32_t v = k + 128 * DIM;
    const float *scale = (const float *)(at.shared + map::SCALES + buffer * map::SCALE_BYTES);
    const float *steps = (const float *)(at.shared + map::STEPS) + first + lane / 4;
    float x[4][4] = {}, keep[2];

    tile_logits<DIM, true>(shared_address(at.shared + map::ROTATED), first, k, token, x);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = __fmul_rn(__fmul_rn(x[n][i], steps[i / 2 * 8]),
                                scale[token + 8 * n + 2 * c + i % 2]);
    softmax_rows(x, state, keep);
    keep_values(keep, state);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float s0 = scale[64 + token + 8 * n + 2 * c], s1 = scale[64 + token + 8 * n + 2 * c + 1];
        a[n / 2][n % 2 * 2] = pack_f16(__fmul_rn(x[n][0], s0), __fmul_rn(x[n][1], s1));
        a[n / 2][n % 2 * 2 + 1] = pack_f16(__fmul_rn(x[n][2], s0), __fmul_rn(x[n][3], s1));
    }
#pragma unroll
    for (uint32_t n = 0; n < DIM / 8; n += 2) {
        float fresh[2][4] = {};
#pragma unroll
        for (uint32_t ks = 0; ks < 2; ks++) {
            load_matrices(b, v + column_off(8 * n + lane / 16 * 8 + lane % 8,
                                            token + 16 * ks + lane / 8 % 2 * 8));
            mma_f16(fresh[0], a[ks], b[0], b[1]);
            mma_f16(fresh[1], a[ks], b[2], b[3]);
        }
        add_values(fresh, n, scale[128], state);
    }
}

/* A BF16 page: `seen` tokens for rows g and g + 8 of the warp. */
template <int DIM>
static __device__ __forceinline__ void attend_plain(const struct prefill &at, uint32_t buffer,
                                                    const uint32_t (&seen)[2],
                                                    rows_state<DIM> &state) {
    using map = tile_map<DIM>;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4, b[4];
    uint32_t first = warp / 2 * 16, token = warp % 2 * 32, high[2][4], low[2][4];
    uint32_t k = shared_address(at.shared + map::BUFFERS + buffer * map::BUFFER_BYTES);
    uint32_t v = k + 128 * DIM;
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

/* Warp 0 asks for the pages of visible blocks, three pages ahead of their use; the next block's
 * slots are looked up a block ahead. */
struct asking {
    lane_stream stream;
    lane_block now;
    lane_look later;
    uint32_t block; /* of `later`, or the end */
    uint32_t page;  /* next page of `now`; 4: take `later` */
    uint32_t count; /* pages asked for */
};

static __device__ __forceinline__ void look_up(const struct prefill &at, uint32_t block,
                                               asking &ask) {
    const struct kvops_seq *seq = at.seq;

    while (block < seq->block_count && state_hidden(seq->hidden_blocks, block))
        block++;
    ask.block = block;
    if (block < seq->block_count)
        ask.later = lane_look_at(ask.stream, &seq->blocks[block], at.row * LAYOUT_BLOCK_PAGES);
}

template <int DIM>
static __device__ __forceinline__ void ask_page(const struct prefill &at, asking &ask) {
    using map = tile_map<DIM>;
    uint32_t stage = ask.count++ % TILE_STAGES;

    if (ask.page == LAYOUT_BLOCK_PAGES && ask.block < at.seq->block_count) {
        ask.now = lane_block_of(ask.stream, ask.later);
        ask.page = 0;
        look_up(at, ask.block + 1, ask);
    }
    if (ask.page == LAYOUT_BLOCK_PAGES) {
        if (!PAGE_BULK_COPY)
            piece_commit();
        return;
    }
    page_request(ask.stream, ask.now, ask.page++,
                 shared_address(at.shared + map::STAGES + stage * map::STAGE_BYTES),
                 shared_address(at.shared + map::BARRIERS + stage * 8));
    if (threadIdx.x == 0)
        ((uint32_t *)(at.shared + map::STREAMS))[stage] = ask.now.streams;
}

template <int DIM>
static __device__ __forceinline__ void put_tile(const struct prefill &at, uint32_t page) {
    using map = tile_map<DIM>;
    uint32_t stage = page % TILE_STAGES, buffer = page % 2;
    uint32_t from = shared_address(at.shared + map::STAGES + stage * map::STAGE_BYTES);
    uint32_t streams = ((const uint32_t *)(at.shared + map::STREAMS))[stage];
    uint8_t *k = at.shared + map::BUFFERS + buffer * map::BUFFER_BYTES;

    tile_put_k<DIM>(k, from, streams);
    tile_put_v<DIM>(k + 128 * DIM, from, streams);
    if (threadIdx.x / 32 == TILE_THREADS / 32 - 1)
        tile_put_scales((float *)(at.shared + map::SCALES + buffer * map::SCALE_BYTES),
                        from + stage_map<DIM>::META, streams);
}

static __device__ __forceinline__ uint32_t visible_pages(const struct kvops_seq *seq) {
    uint32_t blocks = seq->block_count;

    for (uint32_t word = 0; seq->hidden_blocks && word * 64 < seq->block_count; word++) {
        uint32_t left = seq->block_count - word * 64;
        uint64_t mask = left < 64 ? (1ull << left) - 1 : ~0ull;
        blocks -= __popcll(seq->hidden_blocks[word] & mask);
    }
    return blocks * LAYOUT_BLOCK_PAGES;
}

/* All sealed blocks. While page n is used, n + 1 becomes tiles and n + 2, n + 3 are on their way;
 * warp 0 alone waits for copies, the barrier of the CTA shows them to all. */
template <int DIM>
static __device__ __forceinline__ void walk_planes(const struct prefill &at,
                                                   rows_state<DIM> &state) {
    using map = tile_map<DIM>;
    uint32_t pages = visible_pages(at.seq), barriers = shared_address(at.shared + map::BARRIERS);
    bool asks = threadIdx.x < 32;
    asking ask = {};

    if (asks) {
        ask.stream = lane_stream_of<DIM>(at.args.pool);
        ask.page = LAYOUT_BLOCK_PAGES;
        if (threadIdx.x < TILE_STAGES)
            barrier_init(barriers + threadIdx.x * 8);
        __syncwarp();
        look_up(at, 0, ask);
        for (uint32_t n = 0; n < TILE_STAGES - 1; n++)
            ask_page<DIM>(at, ask);
        if (pages > 0)
            page_wait(barriers, 0);
        ask_page<DIM>(at, ask);
    }
    __syncthreads();
    if (pages > 0)
        put_tile<DIM>(at, 0);
    if (asks && pages > 1)
        page_wait(barriers + 8, 0);
    for (uint32_t n = 0; n < pages; n++) {
        __syncthreads();
        if (asks)
            ask_page<DIM>(at, ask);
        attend_planes<DIM>(at, n % 2, state);
        if (n + 1 < pages)
            put_tile<DIM>(at, n + 1);
        if (asks && n + 2 < pages)
            page_wait(barriers + (n + 2) % TILE_STAGES * 8, (n + 2) / TILE_STAGES % 2);
    }
    __syncthreads();
}

/* BF16 page `index`: those of BF16 blocks, then sinks, window, chunk. 0: no such page. */
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
        if (!seq->chunk_k || out.first >= seq->row_count)
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

template <int DIM>
static __device__ __forceinline__ void walk_plain(const struct prefill &at, uint32_t block_pages,
                                                  rows_state<DIM> &state) {
    using map = tile_map<DIM>;
    uint32_t buffers = shared_address(at.shared + map::BUFFERS), seen[2];
    uint32_t own = at.first + threadIdx.x / 64 * 16 + threadIdx.x % 32 / 4;
    tile_source page, next;
    int more = plain_page(at, 0, block_pages, page);

    tile_request<DIM>(at.args.pool, page, at.row, buffers);
    for (uint32_t index = 0; more; index++) {
        more = plain_page(at, index + 1, block_pages, next);
        if (more)
            tile_request<DIM>(at.args.pool, next, at.row,
                              buffers + (index + 1) % 2 * map::BUFFER_BYTES);
        else
            piece_commit();
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        for (uint32_t r = 0; r < 2; r++) {
            uint32_t position = (own + 8 * r) / at.group; /* a chunk page shows 0..position */
            uint32_t shown = position >= page.first ? position - page.first + 1 : 0;
            seen[r] = page.slots ? page.tokens : min(page.tokens, shown);
        }
        if (page.tokens)
            attend_plain<DIM>(at, index % 2, seen, state);
        __syncthreads();
        page = next;
    }
}

/* Hadamard of the values of all rows, through the shared memory of the buffers. */
template <int DIM>
static __device__ __forceinline__ void rotate_values(const struct prefill &at,
                                                     rows_state<DIM> &state) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float *area = (float *)(at.shared + tile_map<DIM>::BUFFERS) + warp * 16 * DIM;

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

/* Joins the two halves of every row and writes it. */
template <int DIM>
static __device__ __forceinline__ void finish(const struct prefill &at, rows_state<DIM> &state) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float *area = (float *)(at.shared + tile_map<DIM>::BUFFERS) + warp / 2 * 32 * (DIM / 2 + 4);

#pragma unroll
    for (int r = 0; r < 2; r++) {
        state.sum[r] = __fadd_rn(state.sum[r], __shfl_xor_sync(~0u, state.sum[r], 1));
        state.sum[r] = __fadd_rn(state.sum[r], __shfl_xor_sync(~0u, state.sum[r], 2));
    }
    if (warp % 2) {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            area[i * 32 + lane] = state.value[i / 4][i % 4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            area[(DIM / 2 + 2 * r) * 32 + lane] = state.max[r];
            area[(DIM / 2 + 2 * r + 1) * 32 + lane] = state.sum[r];
        }
    }
    __syncthreads();
    if (warp % 2)
        return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t index = at.first + warp / 2 * 16 + g + 8 * r;
        float max = area[(DIM / 2 + 2 * r) * 32 + lane];
        float sum = area[(DIM / 2 + 2 * r + 1) * 32 + lane];
        float top = fmaxf(state.max[r], max), base = top == -INFINITY ? 0.0f : top;
        float keep = state_exp2(__fsub_rn(state.max[r], base));
        float take = state_exp2(__fsub_rn(max, base));
        float total = __fmaf_rn(state.sum[r], keep, __fmul_rn(sum, take));
        uint64_t to = ((uint64_t)at.seq->first_row + index / at.group) * at.args.q_heads +
                      at.head * at.group + index % at.group;
        if (index >= at.count)
            continue;
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) {
            if (i % 4 / 2 != r)
                continue;
            float value =
                __fmaf_rn(state.value[i / 4][i % 4], keep, __fmul_rn(area[i * 32 + lane], take));
            at.args.out[to * DIM + i / 4 * 8 + 2 * c + i % 2] =
                total == 0.0f ? 0.0f : __fdiv_rn(value, total);
        }
    }
}

/* Grid: (tile of query vectors, KV head, sequence). */
template <int DIM>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    prefill_kernel(const __grid_constant__ struct kvops_attend args) {
    extern __shared__ __align__(128) uint8_t shared[];
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
    prepare_queries<DIM>(at);
    __syncthreads();
    if (planes) {
        walk_planes<DIM>(at, state);
        rotate_values<DIM>(at, state);
    }
    walk_plain<DIM>(at, planes ? 0 : at.seq->block_count * LAYOUT_BLOCK_PAGES, state);
    finish<DIM>(at, state);
}

template <int DIM>
static cudaError_t launch(const struct kvops_attend *args, uint32_t row_count_max,
                          cudaStream_t stream) {
    uint32_t heads = args->pool.geometry.kv_heads, group = args->q_heads / heads;
    uint32_t tiles = (row_count_max * group + TILE_QUERIES - 1) / TILE_QUERIES;
    cudaError_t error = cudaFuncSetAttribute(
        prefill_kernel<DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, tile_map<DIM>::BYTES);

    if (error != cudaSuccess || args->seq_count == 0)
        return error;
    prefill_kernel<DIM>
        <<<dim3(tiles, heads, args->seq_count), TILE_THREADS, tile_map<DIM>::BYTES, stream>>>(
            *args);
    return cudaGetLastError();
}

extern "C" cudaError_t cuda_kvops_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                                          cudaStream_t stream) {
    return args->pool.geometry.head_dim == 64 ? launch<64>(args, row_count_max, stream)
                                              : launch<128>(args, row_count_max, stream);
}
