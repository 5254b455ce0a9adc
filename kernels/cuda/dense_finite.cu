/* kernels/cuda/dense_finite.cu - rows that hold a value that is not finite.
 *
 * Responsible for: struct ops_finite on the device, equal to the host twin.
 * Not responsible for: what is done about such a row.
 *
 * Moves 4 bytes per value. Expected: 2 us for a decode step, bound by latency. Grid: a CTA per row.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS)
    finite_kernel(const __grid_constant__ struct ops_finite args) {
    const float *x = args.x + blockIdx.x * args.x_stride;
    int bad = 0;

    dense_let_next_start();
    dense_wait_for_previous();
    for (uint32_t i = threadIdx.x; i < args.width; i += THREADS)
        bad |= (__float_as_uint(x[i]) & 0x7f800000u) == 0x7f800000u;
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0 && bad && args.bad[blockIdx.x] < 0)
        args.bad[blockIdx.x] = args.mark;
}

extern "C" cudaError_t cuda_ops_finite(const struct ops_finite *args, cudaStream_t stream) {
    void *arguments[] = {(void *)args};

    if (args->rows == 0)
        return cudaSuccess;
    return dense_launch((const void *)finite_kernel,
                        {dim3(args->rows), dim3(THREADS), 0, stream, dense_can_overlap()},
                        arguments);
}
