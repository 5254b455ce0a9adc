/* kernels/cuda/dense_embed.cu - rows of a packed table, widened to fp32.
 *
 * Responsible for: struct ops_embed on the device over the panels of kernels/host/dense.h,
 * bit-equal to the host twin.
 * Not responsible for: packing, matrix products over packed weights.
 *
 * Moves, per value of a row, the 16 lanes of its panel unit at worst (the table is shared with the
 * output product, whose order it keeps) and 4 bytes out. Expected: 2 us for a decode step.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS)
    embed_kernel(const __grid_constant__ struct ops_embed args) {
    uint32_t k = blockIdx.y * THREADS + threadIdx.x, id;
    uint64_t bytes = dense_unit_bytes(args.table.type);

    dense_let_next_start();
    dense_wait_for_previous();
    if (k >= args.table.k)
        return;
    id = args.ids[blockIdx.x];
    const uint8_t *unit =
        args.table.bytes +
        ((uint64_t)(id / OPS_PANEL) * (args.table.k / OPS_K_UNIT) + k / OPS_K_UNIT) * bytes;
    args.out[blockIdx.x * args.out_stride + k] =
        dense_widen(args.table.type, unit, id % OPS_PANEL, k % OPS_K_UNIT);
}

extern "C" cudaError_t cuda_ops_embed(const struct ops_embed *args, cudaStream_t stream) {
    void *arguments[] = {(void *)args};

    if (args->rows == 0)
        return cudaSuccess;
    return dense_launch((const void *)embed_kernel,
                        {dim3(args->rows, (args->table.k + THREADS - 1) / THREADS), dim3(THREADS),
                         0, stream, dense_can_overlap()},
                        arguments);
}
