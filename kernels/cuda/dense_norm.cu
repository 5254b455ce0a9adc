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

enum { THREADS = 512, LANES = 32, WIDTH_SHARED_MAX = 8192 };

/* `rounded` is [row][width] BF16; then y is not written. */
template <bool ROUNDED>
static __global__ void __launch_bounds__(THREADS)
    norm_kernel(const __grid_constant__ struct ops_rmsnorm args, uint32_t kept, uint16_t *rounded) {
    extern __shared__ float row[];
    __shared__ float inverse;
    const float *x = args.x + blockIdx.x * args.x_stride;

    dense_let_next_start();
    dense_wait_for_previous();
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        row[i] = x[i];
    __syncthreads();
    if (kept)
        x = row;
    if (threadIdx.x < LANES) {
        float own = dense_inverse_rms(args.width, args.eps, [x](uint32_t i) { return x[i]; });
        if (threadIdx.x == 0)
            inverse = own;
    }
    __syncthreads();
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < args.width; i += THREADS) {
        float y = __fmul_rn(__fmul_rn(x[i], inverse), args.gain[i]);
        if (ROUNDED)
            rounded[blockIdx.x * (uint64_t)args.width + i] = dense_to_bf16(y);
        else
            args.y[blockIdx.x * args.y_stride + i] = y;
    }
}

static cudaError_t launch(const void *kernel, const struct ops_rmsnorm *args, uint16_t *rounded,
                          cudaStream_t stream) {
    uint32_t kept = args->width <= WIDTH_SHARED_MAX ? args->width : 0;
    void *arguments[] = {(void *)args, &kept, &rounded};

    if (args->rows == 0)
        return cudaSuccess;
    return dense_launch(kernel,
                        {dim3(args->rows), dim3(THREADS), kept * (uint32_t)sizeof(float), stream,
                         dense_can_overlap()},
                        arguments);
}

extern "C" cudaError_t cuda_ops_rmsnorm(const struct ops_rmsnorm *args, cudaStream_t stream) {
    return launch((const void *)norm_kernel<false>, args, NULL, stream);
}

extern "C" cudaError_t dense_norm_rounded(const struct ops_rmsnorm *args, uint16_t *rounded,
                                          cudaStream_t stream) {
    return launch((const void *)norm_kernel<true>, args, rounded, stream);
}
