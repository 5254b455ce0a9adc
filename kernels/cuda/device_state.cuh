/* kernels/cuda/device_state.cuh - softmax state, folds and warp helpers of the attention kernels.
 *
 * Responsible for: the state of one query head spread over lanes, its fold (the only place where
 * two states join), Hadamard over a warp, dependent launch, sizes of partials.
 * Not responsible for: reading pages (kv_decode.cu, kv_decode_bf16.cuh), order of nodes
 * (kv_combine.cu).
 *
 * Every product and sum is an explicit intrinsic: the compiler contracts nothing, so a fold gives
 * the same bits wherever it is compiled. Maxima are in units of log2.
 *
 * Threads: device code, one warp unless named otherwise.
 * Units: floats, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_STATE_CUH
#define KERNELS_CUDA_DEVICE_STATE_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/cuda_kvops.h"

enum { STATE_HEADS = 4, STATE_RUN_BLOCKS = 4, STATE_NODE_RUNS = 4 };

#define STATE_LOG2E 1.4426950408889634f

/* N values of one head; sum 0: nothing. */
template <int N> struct state {
    float max;
    float sum;
    float acc[N];
};

static __device__ __forceinline__ float state_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int N> static __device__ __forceinline__ void state_clear(state<N> &into) {
    into.max = -INFINITY;
    into.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
        into.acc[i] = 0.0f;
}

/* into = into then from. */
template <int N>
static __device__ __forceinline__ void state_fold(state<N> &into, const state<N> &from) {
    bool skip = from.sum == 0.0f, copy = into.sum == 0.0f;
    float max = fmaxf(into.max, from.max);
    float keep = state_exp2(__fsub_rn(into.max, max)), take = state_exp2(__fsub_rn(from.max, max));

    if (skip)
        return;
    into.sum = copy ? from.sum : __fmaf_rn(into.sum, keep, __fmul_rn(from.sum, take));
    into.max = copy ? from.max : max;
#pragma unroll
    for (int i = 0; i < N; i++)
        into.acc[i] =
            copy ? from.acc[i] : __fmaf_rn(into.acc[i], keep, __fmul_rn(from.acc[i], take));
}

/* Hadamard of the DIM values of a vector held by a warp, lane l having DIM/32 l .. ; the order and
 * rounding of the host twin. */
template <int DIM> static __device__ __forceinline__ void state_rotate(float (&y)[DIM / 32]) {
    constexpr int OWN = DIM / 32;
    const float root = DIM == 64 ? 0.125f : 0x1.6a09e6p-4f;
    unsigned lane = threadIdx.x % 32;

#pragma unroll
    for (int stride = 1; stride < OWN; stride *= 2)
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (!(i & stride)) {
                float a = y[i], b = y[i + stride];
                y[i] = __fadd_rn(a, b);
                y[i + stride] = __fsub_rn(a, b);
            }
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2)
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            float other = __shfl_xor_sync(~0u, y[i], stride);
            y[i] = lane & stride ? __fsub_rn(other, y[i]) : __fadd_rn(y[i], other);
        }
#pragma unroll
    for (int i = 0; i < OWN; i++)
        y[i] = __fmul_rn(y[i], root);
}

/* Lanes with the same lane % 4 hold the same head: their maximum, their sum. */
static __device__ __forceinline__ float state_head_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

static __device__ __forceinline__ float state_head_sum(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 4));
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 8));
    return __fadd_rn(x, __shfl_xor_sync(~0u, x, 16));
}

/* The next kernel of the stream may start; its own wait still waits for this one's end. */
static __device__ __forceinline__ void state_let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ __forceinline__ void state_wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Partials as the host twin lays them out: max[group], sum[group], acc[group][dim]. */
static __host__ __device__ __forceinline__ uint32_t state_round16(uint32_t floats) {
    return (floats + 15) / 16 * 16;
}

static __host__ __device__ __forceinline__ uint32_t state_partial_floats(uint32_t group,
                                                                         uint32_t dim) {
    return state_round16(2 * state_round16(group) + group * dim);
}

static __host__ __device__ __forceinline__ uint32_t state_pages(uint32_t tokens) {
    return (tokens + LAYOUT_PAGE_TOKENS - 1) / LAYOUT_PAGE_TOKENS;
}

static __host__ __device__ __forceinline__ uint32_t state_runs(const struct kvops_seq *seq) {
    return (seq->block_count + STATE_RUN_BLOCKS - 1) / STATE_RUN_BLOCKS;
}

static __host__ __device__ __forceinline__ uint32_t state_tails(const struct kvops_seq *seq) {
    return 1 + state_pages(seq->window_tokens) + (seq->chunk_k ? state_pages(seq->row_count) : 0);
}

static __device__ __forceinline__ bool state_hidden(const uint64_t *hidden, uint32_t block) {
    return hidden && (hidden[block / 64] >> (block % 64) & 1);
}

static inline cudaError_t state_launch(const void *kernel, cudaLaunchConfig_t *config, int overlap,
                                       void **arguments) {
    cudaLaunchAttribute attribute = {};

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config->attrs = &attribute;
    config->numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelExC(config, kernel, arguments);
}

#endif
