/* kernels/cuda/device_walk_wgmma.cuh - sealed pages of prefill attention with wgmma (sm_90a).
 *
 * Responsible for: attention of 64 query vectors over planes by two pairs of warpgroups.
 * Not responsible for: sm_80 (device_walk_mma.cuh), BF16 pages (device_plain.cuh).
 *
 * Of a pair one warpgroup makes tiles of pages and the other multiplies them; a warp of a fifth
 * warpgroup asks for the pair's pages and puts their scales. Each pair has all 64 query vectors and
 * pages of its own, in two stages as they are stored and two buffers of tiles and scales.
 *
 * Threads: device code, warpgroups of 128 threads.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_WALK_WGMMA_CUH
#define KERNELS_CUDA_DEVICE_WALK_WGMMA_CUH

#include "kernels/cuda/device_prefill.cuh"

/* Threads: multipliers of both pairs, makers of both, servers. */
enum {
    PAIR_COUNT = 2,
    PAIR_DEPTH = 2, /* stages, and buffers, of a pair */
    PAIR_MAKERS = PAIR_COUNT * TILE_GROUP_THREADS,
    PAIR_SERVERS = 2 * PAIR_MAKERS,
    PAIR_THREADS = PAIR_SERVERS + TILE_GROUP_THREADS,
    PAIR_REGISTERS = 160, /* of a thread that multiplies, of one that makes, of one that serves */
    PAIR_MAKER_REGISTERS = 64,
    PAIR_SERVER_REGISTERS = 32
};

/* Shared memory while planes are walked. */
template <int DIM> struct pair_map {
    static constexpr uint32_t COUNT = PAIR_COUNT * PAIR_DEPTH;
    static constexpr uint32_t ROTATED = 0; /* fp16 queries [64][DIM] */
    static constexpr uint32_t BUFFERS = 128 * DIM;
    static constexpr uint32_t BUFFER_BYTES = 256 * DIM; /* K 128 DIM, V 128 DIM */
    static constexpr uint32_t SCALES = BUFFERS + COUNT * BUFFER_BYTES;
    static constexpr uint32_t SCALE_BYTES = 132 * 4;                /* [64] K, [64] V, factors */
    static constexpr uint32_t STEPS = SCALES + COUNT * SCALE_BYTES; /* [64] worth of a rotated q */
    static constexpr uint32_t BARRIERS = STEPS + TILE_QUERIES * 4;
    static constexpr uint32_t STREAMS = BARRIERS + COUNT * 8; /* of the page in a stage */
    static constexpr uint32_t STAGES = (STREAMS + COUNT * 4 + 127) / 128 * 128;
    static constexpr uint32_t STAGE_BYTES = stage_map<DIM>::WIDE; /* a page as it is stored */
    static constexpr uint32_t BYTES = STAGES + COUNT * STAGE_BYTES;
};

#if TILE_WGMMA

/* --- who waits for whom: one barrier of each kind for every buffer or stage */

enum {
    PAIR_READY = 1,                         /* tiles and scales are there */
    PAIR_FREE = PAIR_READY + 4,             /* and needed no more */
    PAIR_READ = PAIR_FREE + 4,              /* a stage has been made tiles */
    PAIR_ALL = 2 * TILE_GROUP_THREADS + 32, /* of a pair */
    PAIR_READERS = TILE_GROUP_THREADS + 32  /* makers and server */
};

template <int COUNT> static __device__ __forceinline__ void pair_sync(uint32_t barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

template <int COUNT> static __device__ __forceinline__ void pair_arrive(uint32_t barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

/* Buffer or stage of page n of a pair. */
static __device__ __forceinline__ uint32_t pair_index(uint32_t pair, uint32_t n) {
    return pair * PAIR_DEPTH + n % PAIR_DEPTH;
}

/* Pages of the part that are a pair's. */
static __device__ __forceinline__ uint32_t pair_pages(const struct prefill &at, uint32_t pair) {
    return (visible_pages(at) + PAIR_COUNT - 1 - pair) / PAIR_COUNT;
}

/* Waits for page n, whose stage is `index`; returns its streams. */
template <int DIM>
static __device__ __forceinline__ uint32_t pair_await(const struct prefill &at, uint32_t index,
                                                      uint32_t n) {
    using map = pair_map<DIM>;

    page_wait<2>(shared_address(at.shared + map::BARRIERS + index * 8), n / PAIR_DEPTH % 2);
    return ((const uint32_t *)(at.shared + map::STREAMS))[index];
}

/* --- scales and weights */

/* Scales of a page in shared memory, by one warp: of K, of V, then what values summed so far are to
 * be multiplied by and what they are worth after that. V's are taken relative to a power of two
 * that no scale of the warpgroup's pages has passed, and hold the factor of the tier. */
template <int DIM>
static __device__ __forceinline__ void put_scales(uint32_t meta, uint32_t streams, float *to,
                                                  float &widest) {
    uint32_t lane = threadIdx.x % 32, k_bits = load_4(meta + 4 * lane);
    uint32_t v_bits = load_4(meta + 128 + 4 * lane);
    float2 k = __half22float2(*(const __half2 *)&k_bits);
    float2 v = __half22float2(*(const __half2 *)&v_bits);
    float factor = __fmul_rn(0.5f, page_v_factor(streams)), before = widest;
    float top = fmaxf(v.x, v.y);

#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, stride));
    top = __fmul_rn(top, factor);
    if (top > widest) /* the next power of two: scales are normal numbers */
        widest = __uint_as_float((__float_as_uint(top) & 0x7F800000) + 0x00800000);
    factor = __fdividef(factor, widest);
    to += (lane / 4 % 2 * 2 + lane % 2) * 16 + lane / 8 * 4 + lane / 2 % 2 * 2;
    *(float2 *)to = k;
    *(float2 *)(to + 64) = make_float2(__fmul_rn(v.x, factor), __fmul_rn(v.y, factor));
    if (lane == 0) {
        to[128] = before == widest ? 1.0f : __fdividef(before, widest); /* lane 0 has moved by 0 */
        to[129] = widest;
    }
}

/* Scales of the sixteen tokens whose columns the lane has, in order. */
static __device__ __forceinline__ void take_scales(const float *from, float (&out)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        float4 four = *(const float4 *)(from + threadIdx.x % 4 * 16 + i);
        out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
}

/* Weights of a page out of its logits, joined into the running softmax; x[4j + 2r + i] is row
 * g + 8r, column 8j + 2c + i of the page. */
template <int DIM>
static __device__ __forceinline__ void weigh(float (&x)[32], const float *scales,
                                             const float (&steps)[2], rows_state<DIM> &state,
                                             float (&keep)[2]) {
    float k[16], v[16];

    take_scales(scales, k);
    take_scales(scales + 64, v);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            float &y = x[4 * (n / 2) + 2 * r + n % 2];
            y = __fmul_rn(y, k[n]);
            top = fmaxf(top, y);
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(state.max[r], __fmul_rn(top, steps[r]));
        float base = top == -INFINITY ? 0.0f : top;
        keep[r] = state_exp2(__fsub_rn(state.max[r], base));
#pragma unroll
        for (int n = 0; n < 16; n++) {
            float &y = x[4 * (n / 2) + 2 * r + n % 2];
            y = state_exp2(__fmaf_rn(y, steps[r], -base));
            sum = __fadd_rn(sum, y);
            y = __fmul_rn(y, v[n]);
        }
        state.max[r] = top;
        state.sum[r] = __fmaf_rn(state.sum[r], keep[r], sum);
    }
}

/* --- servers */

/* Asks for the pages of a pair, two ahead, and puts their scales. */
template <int DIM> static __device__ __forceinline__ void serve_pair(const struct prefill &at) {
    using map = pair_map<DIM>;
    uint32_t pair = group_index_of((threadIdx.x - PAIR_SERVERS) / 32);
    uint32_t pages = pair < PAIR_COUNT ? pair_pages(at, pair) : 0;
    float widest = 0.0f;
    asking ask = {};

    if (pair < PAIR_COUNT) {
        asking_start<DIM, map>(at, pair, PAIR_COUNT, PAIR_DEPTH, ask);
        for (uint32_t n = 0; n < PAIR_DEPTH; n++)
            ask_page<DIM, map>(at, ask);
    }
    __syncthreads();
    for (uint32_t n = 0; n < pages; n++) {
        uint32_t index = pair_index(pair, n), streams = pair_await<DIM>(at, index, n);
        uint32_t stage = shared_address(at.shared + map::STAGES + index * map::STAGE_BYTES);
        if (n >= PAIR_DEPTH)
            pair_sync<PAIR_ALL>(PAIR_FREE + index);
        put_scales<DIM>(stage + stage_map<DIM>::META, streams,
                        (float *)(at.shared + map::SCALES + index * map::SCALE_BYTES), widest);
        pair_arrive<PAIR_ALL>(PAIR_READY + index);
        pair_sync<PAIR_READERS>(PAIR_READ + index);
        ask_page<DIM, map>(at, ask);
    }
}

/* --- makers */

template <int DIM> static __device__ __forceinline__ void make_tiles(const struct prefill &at) {
    using map = pair_map<DIM>;
    uint32_t pair = group_index_of((threadIdx.x - PAIR_MAKERS) / TILE_GROUP_THREADS);
    uint32_t pages = pair_pages(at, pair);

    __syncthreads();
    for (uint32_t n = 0; n < pages; n++) {
        uint32_t index = pair_index(pair, n), streams = pair_await<DIM>(at, index, n);
        uint32_t stage = shared_address(at.shared + map::STAGES + index * map::STAGE_BYTES);
        uint8_t *k = at.shared + map::BUFFERS + index * map::BUFFER_BYTES;
        if (n >= PAIR_DEPTH)
            pair_sync<PAIR_ALL>(PAIR_FREE + index);
        v_words<DIM> words = load_v<DIM>(stage, streams);
        part_put_k<DIM>(k, stage, streams);
        part_put_v<DIM>(k + 128 * DIM, stage, streams, words);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        pair_arrive<PAIR_ALL>(PAIR_READY + index);
        pair_arrive<PAIR_READERS>(PAIR_READ + index);
    }
}

/* --- multipliers */

/* What a warpgroup has of its pages, with the weights of the one whose values are being summed. */
template <int DIM> struct page_sums {
    float steps[2]; /* logit units of rows g and g + 8 */
    float values[DIM / 2];
    uint32_t weights[4][4];
};

/* Weights of a page out of its logits; what values summed so far are worth then. */
template <int DIM>
static __device__ __forceinline__ void join_page(float (&x)[32], const float *scales,
                                                 page_sums<DIM> &sums, rows_state<DIM> &state) {
    float keep[2];

    weigh<DIM>(x, scales, sums.steps, state, keep);
    keep[0] = __fmul_rn(keep[0], scales[128]);
    keep[1] = __fmul_rn(keep[1], scales[128]);
    if (__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f))
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            sums.values[i] = __fmul_rn(sums.values[i], keep[i % 4 / 2]);
#pragma unroll
    for (int i = 0; i < 16; i++) /* the accumulators of two tiles of columns are a fragment */
        sums.weights[i / 4][i % 4] = pack_f16(x[2 * i], x[2 * i + 1]);
}

/* All sealed blocks, for the multipliers. Pair p takes visible pages p, p + 2 .. */
template <int DIM, class F>
static __device__ __forceinline__ void walk_planes(const struct prefill &at, rows_state<DIM> &state,
                                                   F &&prepare) {
    using map = pair_map<DIM>;
    uint32_t pair = group_index(), pages = pair_pages(at, pair);
    uint32_t q = shared_address(at.shared + map::ROTATED);
    const float *step = (const float *)(at.shared + map::STEPS) + threadIdx.x % 128 / 32 * 16;
    page_sums<DIM> sums = {};

    prepare();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the queries */
    __syncthreads();
    for (int r = 0; r < 2; r++) /* codes are held doubled */
        sums.steps[r] = __fmul_rn(step[threadIdx.x % 32 / 4 + 8 * r], 0.5f);
    for (uint32_t n = 0; n < pages; n++) {
        uint32_t index = pair_index(pair, n);
        uint32_t k = shared_address(at.shared + map::BUFFERS + index * map::BUFFER_BYTES);
        float x[32];
        pair_sync<PAIR_ALL>(PAIR_READY + index);
        begin_logits<DIM>(q, k, x);
        wgmma_wait();
        wgmma_hold(x);
        join_page<DIM>(x, (const float *)(at.shared + map::SCALES + index * map::SCALE_BYTES), sums,
                       state);
        begin_values<DIM>(sums.weights, k + 128 * DIM, sums.values);
        wgmma_wait();
        wgmma_hold(sums.values);
        wgmma_keep(sums.weights);
        if (n + PAIR_DEPTH < pages)
            pair_arrive<PAIR_ALL>(PAIR_FREE + index);
    }
    uint32_t last = pair_index(pair, pages - 1);
    float worth =
        pages ? ((float *)(at.shared + map::SCALES + last * map::SCALE_BYTES))[129] : 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        state.value[i / 4][i % 4] = pages ? __fmul_rn(sums.values[i], worth) : 0.0f;
    __syncthreads();
}

#endif

#endif
