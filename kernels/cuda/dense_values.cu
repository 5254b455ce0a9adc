/* kernels/cuda/dense_values.cu - SwiGLU, add and patterns, value by value.
 *
 * Responsible for: struct ops_swiglu and struct ops_add on the device, bit-equal to the host twin;
 * filling slots with a pattern.
 * Not responsible for: fusing them into matrix products.
 *
 * Moves 12 bytes a value. Expected: 2 us for a decode step, 0.9 of the copy rate for long rows; 32
 * slots of 1 MiB are filled at twice the copy rate, 8 us.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS)
    swiglu_kernel(const __grid_constant__ struct ops_swiglu args) {
    dense_let_next_start();
    dense_wait_for_previous();
    for (uint64_t i = blockIdx.x * (uint64_t)THREADS + threadIdx.x; i < args.count;
         i += (uint64_t)gridDim.x * THREADS)
        args.y[i] = dense_swiglu(args.gate[i], args.up[i]);
}

static __global__ void __launch_bounds__(THREADS)
    add_kernel(const __grid_constant__ struct ops_add args) {
    dense_let_next_start();
    dense_wait_for_previous();
    for (uint64_t i = blockIdx.x * (uint64_t)THREADS + threadIdx.x; i < args.count;
         i += (uint64_t)gridDim.x * THREADS)
        args.y[i] = __fadd_rn(args.a[i], args.b[i]);
}

static uint32_t ctas_of(size_t count) {
    const size_t ctas = (count + THREADS - 1) / THREADS, most = 4096;
    return (uint32_t)(ctas < most ? ctas : most);
}

static cudaError_t launch(const void *kernel, const void *args, size_t count, cudaStream_t stream) {
    void *arguments[] = {(void *)args};

    if (count == 0)
        return cudaSuccess;
    return dense_launch(
        kernel, {dim3(ctas_of(count)), dim3(THREADS), 0, stream, dense_can_overlap()}, arguments);
}

extern "C" cudaError_t cuda_ops_swiglu(const struct ops_swiglu *args, cudaStream_t stream) {
    return launch((const void *)swiglu_kernel, args, args->count, stream);
}

extern "C" cudaError_t cuda_ops_add(const struct ops_add *args, cudaStream_t stream) {
    return launch((const void *)add_kernel, args, args->count, stream);
}

/* As many parts as the arguments of a kernel, at most 4 KiB, have room for. */
struct fill {
    enum { PARTS = 480 };
    uint32_t two;
    uint64_t bytes;
    void *part[PARTS];
};

/* Starts when all that came before has ended: what it fills may have been read until then. */
static __global__ void __launch_bounds__(THREADS)
    fill_kernel(const __grid_constant__ struct fill args) {
    uint4 *to = (uint4 *)args.part[blockIdx.y];

    for (uint64_t i = blockIdx.x * (uint64_t)THREADS + threadIdx.x; i < args.bytes / sizeof *to;
         i += (uint64_t)gridDim.x * THREADS)
        to[i] = make_uint4(args.two, args.two, args.two, args.two);
}

extern "C" cudaError_t cuda_ops_fill(const struct cuda_ops_fill *args, cudaStream_t stream) {
    const uint32_t ctas = ctas_of(args->bytes / sizeof(uint4)), most = fill::PARTS;
    struct fill fill = {args->pattern * 0x10001u, args->bytes, {NULL}};
    cudaError_t error = cudaSuccess;

    for (uint32_t done = 0; ctas && done < args->count && error == cudaSuccess; done += most) {
        uint32_t each = args->count - done < most ? args->count - done : most;
        for (uint32_t i = 0; i < each; i++)
            fill.part[i] = args->part[done + i];
        fill_kernel<<<dim3(ctas, each), THREADS, 0, stream>>>(fill);
        error = cudaGetLastError();
    }
    return error;
}
