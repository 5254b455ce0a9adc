/* kernels/cuda/dense_norm.cu - RMS norm of rows, bit-equal to the host twin.
 *
 * Responsible for: struct ops_rmsnorm on the device.
 * Not responsible for: adding the residual (dense_values.cu).
 *
 * Moves 8 bytes a value, and the gain. Expected: 2 to 3 us for a decode step (one row of 4,096 is
 * bound by latency), 0.8 of the copy rate for hundreds of rows. A CTA per row keeps the row in
 * shared memory; one warp sums it in the order of the twin: element i in lane i % 32, then halves.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 256, LANES = 32, WIDTH_SHARED_MAX = 8192 };

/* x comes from shared memory where the row fits. */
static __device__ __forceinline__ float sum_of_squares(const float *x, uint32_t width) {
    uint32_t lane = threadIdx.x;
    float sum = 0.0f;

#pragma unroll 8
    for (uint32_t i = lane; i < width; i += LANES)
        sum = __fadd_rn(sum, __fmul_rn(x[i], x[i]));
#pragma unroll
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        sum = __fadd_rn(sum, __shfl_down_sync(~0u, sum, half));
    return sum;
}

static __global__ void __launch_bounds__(THREADS)
    norm_kernel(const __grid_constant__ struct ops_rmsnorm args, uint32_t kept) {
    extern __shared__ float row[];
    __shared__ float inverse;
    const float *x = args.x + blockIdx.x * args.x_stride;
    float *y = args.y + blockIdx.x * args.y_stride;

    dense_let_next_start();
    dense_wait_for_previous();
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        row[i] = x[i];
    __syncthreads();
    if (kept)
        x = row;
    if (threadIdx.x < LANES) {
        float mean = __fdiv_rn(sum_of_squares(x, args.width), (float)args.width);
        if (threadIdx.x == 0)
            inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.eps)));
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < args.width; i += THREADS)
        y[i] = __fmul_rn(__fmul_rn(x[i], inverse), args.gain[i]);
}

extern "C" cudaError_t cuda_ops_rmsnorm(const struct ops_rmsnorm *args, cudaStream_t stream) {
    uint32_t kept = args->width <= WIDTH_SHARED_MAX ? args->width : 0;

    void *arguments[] = {(void *)args, &kept};

    if (args->rows == 0)
        return cudaSuccess;
    return dense_launch((const void *)norm_kernel,
                        {dim3(args->rows), dim3(THREADS), kept * (uint32_t)sizeof(float), stream,
                         dense_can_overlap()},
                        arguments);
}
