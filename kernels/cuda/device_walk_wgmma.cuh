/* kernels/cuda/device_walk_wgmma.cuh - sealed pages of prefill attention with wgmma (sm_90a).
 *
 * Responsible for: attention of 64 query vectors over planes by three warpgroups.
 * Not responsible for: sm_80 (device_walk_mma.cuh), BF16 pages (kv_prefill.cu).
 *
 * Every warpgroup has all 64 query vectors, and a page of its own at a time: tiles, softmax, sums.
 * Nothing is shared but the queries, so that one converts codes while another multiplies.
 *
 * Threads: device code, warpgroups of 128 threads.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_WALK_WGMMA_CUH
#define KERNELS_CUDA_DEVICE_WALK_WGMMA_CUH

#include "kernels/cuda/device_prefill.cuh"

#if TILE_WGMMA

enum { GROUP_STAGES = 2 };

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

/* What a warpgroup has of its pages, with the weights of the one whose values are being summed. */
template <int DIM> struct page_sums {
    float steps[2]; /* logit units of rows g and g + 8 */
    float widest;   /* power of two, in the warp that puts scales */
    float values[DIM / 2];
    uint32_t weights[4][4];
};

/* Logits to values of one page that is in `stage`; K is a tile already, V becomes one. */
template <int DIM>
static __device__ __forceinline__ void attend_stage(const struct prefill &at, uint32_t stage,
                                                    uint32_t streams, page_sums<DIM> &sums,
                                                    rows_state<DIM> &state) {
    using map = tile_here<DIM>;
    uint32_t group = group_index();
    uint8_t *k = at.shared + map::BUFFERS + group * map::BUFFER_BYTES, *v = k + 128 * DIM;
    const float *scales = (const float *)(at.shared + map::SCALES + group * map::SCALE_BYTES);
    float x[32], keep[2];

    begin_logits<DIM>(shared_address(at.shared + map::ROTATED), shared_address(k), x);
    part_put_v<DIM>(v, stage, streams);
    wgmma_wait();
    wgmma_hold(x);
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
    group_sync(group);
    begin_values<DIM>(sums.weights, shared_address(v), sums.values);
}

/* Waits for page n of the warpgroup, makes K a tile and returns the streams of the page. */
template <int DIM>
static __device__ __forceinline__ uint32_t take_k(const struct prefill &at, uint32_t n,
                                                  uint32_t pages, float &widest) {
    using map = tile_here<DIM>;
    uint32_t group = group_index(), index = group * GROUP_STAGES + n % GROUP_STAGES;

    if (n >= pages)
        return 0;
    page_wait<2>(shared_address(at.shared + map::BARRIERS + index * 8), n / GROUP_STAGES % 2);
    uint32_t streams = ((const uint32_t *)(at.shared + map::STREAMS))[index];
    uint32_t stage = shared_address(at.shared + map::STAGES + index * map::STAGE_BYTES);
    part_put_k<DIM>(at.shared + map::BUFFERS + group * map::BUFFER_BYTES, stage, streams);
    if (threadIdx.x / 32 % 4 == 3)
        put_scales<DIM>(stage + stage_map<DIM>::META, streams,
                        (float *)(at.shared + map::SCALES + group * map::SCALE_BYTES), widest);
    return streams;
}

/* All sealed blocks. Warpgroup h takes visible pages h, h + 3 .., in tiles of its own; its first
 * warp asks for them two ahead, for the first before `prepare` makes the queries. The sums of one
 * page run while K of the next is converted, its logits while V is. */
template <int DIM, class F>
static __device__ __forceinline__ void walk_planes(const struct prefill &at, rows_state<DIM> &state,
                                                   F &&prepare) {
    using map = tile_here<DIM>;
    uint32_t group = group_index(), pages = visible_pages(at);
    const float *step = (const float *)(at.shared + map::STEPS) + threadIdx.x % 128 / 32 * 16;
    page_sums<DIM> sums = {};
    bool asks = threadIdx.x % TILE_GROUP_THREADS < 32;
    asking ask = {};

    pages = (pages + TILE_GROUPS - 1 - group) / TILE_GROUPS; /* of this group */
    if (asks) {
        asking_start<DIM>(at, group, TILE_GROUPS, GROUP_STAGES, ask);
        for (uint32_t n = 0; n < GROUP_STAGES; n++)
            ask_page<DIM>(at, ask);
    }
    prepare();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the queries */
    __syncthreads();
    for (int r = 0; r < 2; r++) /* codes are held doubled */
        sums.steps[r] = __fmul_rn(step[threadIdx.x % 32 / 4 + 8 * r], 0.5f);
    for (uint32_t n = 0, streams = take_k<DIM>(at, 0, pages, sums.widest); n < pages; n++) {
        uint32_t index = group * GROUP_STAGES + n % GROUP_STAGES;
        group_sync(group);
        attend_stage<DIM>(at, shared_address(at.shared + map::STAGES + index * map::STAGE_BYTES),
                          streams, sums, state);
        if (asks)
            ask_page<DIM>(at, ask);
        streams = take_k<DIM>(at, n + 1, pages, sums.widest);
        wgmma_wait();
        wgmma_hold(sums.values);
        wgmma_keep(sums.weights);
    }
    __syncthreads(); /* the last scales are in no other warp's way any more */
    float worth = ((float *)(at.shared + map::SCALES + group * map::SCALE_BYTES))[129];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        state.value[i / 4][i % 4] = pages ? __fmul_rn(sums.values[i], worth) : 0.0f;
    __syncthreads();
}

#endif

#endif
