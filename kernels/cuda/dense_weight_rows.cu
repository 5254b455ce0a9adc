/* kernels/cuda/dense_weight_rows.cu - packed weights as rows of BF16.
 *
 * Responsible for: struct ops_weight of every type as the products take it, bit-equal to the host's
 * ops_weight_rows.
 * Not responsible for: packing (kernels/host/), the products (dense_matmul.cu).
 *
 * Once for every weight, when a model is loaded. Moves the packed bytes and 2 bytes a value.
 * Expected: 0.3 of the copy rate, less than the copy from the host that precedes it.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 256 };

/* Thread: one k of an output, so that writes are contiguous; the panel's unit stays in L1. */
static __global__ void __launch_bounds__(THREADS)
    weight_rows_kernel(const __grid_constant__ struct ops_weight packed, uint16_t *rows) {
    uint64_t k = blockIdx.x * (uint64_t)THREADS + threadIdx.x, unit_bytes;

    if (k >= packed.k)
        return;
    unit_bytes = dense_unit_bytes(packed.type);
    for (uint32_t n = blockIdx.y; n < packed.n; n += gridDim.y) {
        const uint8_t *unit =
            packed.bytes +
            ((uint64_t)(n / OPS_PANEL) * (packed.k / OPS_K_UNIT) + k / OPS_K_UNIT) * unit_bytes;
        rows[(uint64_t)n * packed.k + k] =
            dense_to_bf16(dense_widen(packed.type, unit, n % OPS_PANEL, (uint32_t)k % OPS_K_UNIT));
    }
}

extern "C" cudaError_t cuda_ops_weight_rows(const struct ops_weight *packed, uint16_t *rows,
                                            cudaStream_t stream) {
    dim3 grid((packed->k + THREADS - 1) / THREADS, packed->n < 65535 ? packed->n : 65535);

    weight_rows_kernel<<<grid, THREADS, 0, stream>>>(*packed, rows);
    return cudaGetLastError();
}
