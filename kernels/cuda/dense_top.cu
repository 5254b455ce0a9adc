/* kernels/cuda/dense_top.cu - the best tokens of rows of logits, bit-equal to the host twin.
 *
 * Responsible for: struct ops_top on the device, so that a step sends a few candidates to the host
 * instead of all logits.
 * Not responsible for: choosing among them.
 *
 * Moves 4 bytes a logit, once. Expected: 12 us for one row of 128,256 and k = 64, three launches; 7
 * for k = 1. A CTA sorts 1,024 keys and keeps the best k; that repeats until one CTA is left. A key
 * is the logit in order-keeping bits, then the id turned round, so that no two are equal.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 512, SLICE = 2 * THREADS };

struct level {
    struct ops_top args;
    const uint64_t *from; /* [row][count] keys; NULL: from the logits */
    uint64_t *to;         /* [row][slice][k] keys; NULL: to args.top */
    uint32_t count;
};

static __device__ __forceinline__ uint64_t key_of(float logit, uint32_t id) {
    uint32_t bits = __float_as_uint(logit);

    if ((bits & 0x7f800000) == 0x7f800000)
        bits = 0xffffffff; /* not finite: before all others */
    else if (bits == 0x80000000)
        bits = 0x80000000; /* -0 is 0 */
    else
        bits ^= bits >> 31 ? 0xffffffff : 0x80000000;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}

static __device__ __forceinline__ void sort_falling(uint64_t *keys) {
    uint32_t i = threadIdx.x;

    for (uint32_t size = 2; size <= SLICE; size *= 2)
        for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
            uint32_t low = i / stride * stride * 2 + i % stride, high = low + stride;
            bool falling = (low & size) == 0;
            uint64_t a = keys[low], b = keys[high];
            if ((a < b) == falling) {
                keys[low] = b;
                keys[high] = a;
            }
            __syncthreads();
        }
}

static __global__ void __launch_bounds__(THREADS)
    top_kernel(const __grid_constant__ struct level level) {
    __shared__ uint64_t keys[SLICE];
    const float *logits = level.args.logits + blockIdx.y * level.args.stride;

    dense_let_next_start();
    dense_wait_for_previous();
    for (uint32_t i = threadIdx.x; i < SLICE; i += THREADS) {
        uint32_t at = blockIdx.x * SLICE + i;
        keys[i] = at >= level.count ? 0
                  : level.from      ? level.from[(uint64_t)blockIdx.y * level.count + at]
                                    : key_of(logits[at], at);
    }
    __syncthreads();
    sort_falling(keys);
    for (uint32_t i = threadIdx.x; i < level.args.k; i += THREADS) {
        uint32_t id = ~(uint32_t)keys[i];
        if (level.to)
            level.to[((uint64_t)blockIdx.y * gridDim.x + blockIdx.x) * level.args.k + i] = keys[i];
        else
            level.args.top[(uint64_t)blockIdx.y * level.args.k + i] = {logits[id], id};
    }
}

static uint64_t kept(uint32_t count, uint32_t k) {
    return (uint64_t)((count + SLICE - 1) / SLICE) * k;
}

extern "C" size_t cuda_ops_top_scratch_bytes(const struct ops_top *args) {
    return 2 * args->rows * kept(args->count, args->k) * sizeof(uint64_t);
}

extern "C" cudaError_t cuda_ops_top(const struct ops_top *args, void *scratch,
                                    cudaStream_t stream) {
    uint64_t *half[2] = {(uint64_t *)scratch,
                         (uint64_t *)scratch + args->rows * kept(args->count, args->k)};
    struct level level = {*args, NULL, NULL, args->count};
    void *arguments[] = {&level};
    cudaError_t error = cudaSuccess;
    bool last = args->rows == 0;

    for (uint32_t round = 0; !last && error == cudaSuccess; round++) {
        dim3 grid((level.count + SLICE - 1) / SLICE, args->rows);
        last = grid.x == 1;
        level.to = last ? NULL : half[round % 2];
        error = dense_launch((const void *)top_kernel,
                             {grid, dim3(THREADS), 0, stream, dense_can_overlap()}, arguments);
        level.from = level.to;
        level.count = grid.x * args->k;
    }
    return error;
}
