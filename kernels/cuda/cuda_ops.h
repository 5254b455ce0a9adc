/* kernels/cuda/cuda_ops.h - launchers of the CUDA twins of ops.h.
 *
 * Responsible for: embedding, RMS norm, RoPE with the BF16 write of K and V, SwiGLU, add, matrix
 * products over BF16 weights, the best tokens, copies and patterns.
 * Not responsible for: memory, streams.
 *
 * As in cuda_kvops.h the argument struct is read on the host during the call and every pointer in
 * it, those in ops_kv_dest included, is an address of the device. All items are done; the results
 * are the bits of the host twins (a NaN may have another payload), those of the matrix product
 * within the bound in dense_matmul.cu.
 *
 * Threads: any thread may launch.
 * Units: as in ops.h.
 */
#ifndef KERNELS_CUDA_CUDA_OPS_H
#define KERNELS_CUDA_CUDA_OPS_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/cuda/cuda_gemm.h"
#include "kernels/ops.h"

cudaError_t cuda_ops_embed(const struct ops_embed *args, cudaStream_t stream);
cudaError_t cuda_ops_rmsnorm(const struct ops_rmsnorm *args, cudaStream_t stream);
cudaError_t cuda_ops_rope(const struct ops_rope *args, cudaStream_t stream);
cudaError_t cuda_ops_swiglu(const struct ops_swiglu *args, cudaStream_t stream);
cudaError_t cuda_ops_add(const struct ops_add *args, cudaStream_t stream);
cudaError_t cuda_ops_finite(const struct ops_finite *args, cudaStream_t stream);

/* `scratch`: cuda_ops_top_scratch_bytes, 8-byte aligned. */
size_t cuda_ops_top_scratch_bytes(const struct ops_top *args);
cudaError_t cuda_ops_top(const struct ops_top *args, void *scratch, cudaStream_t stream);

/* Between pinned memory and the device, either way, in no order among themselves; not within a
 * recording. */
enum { CUDA_OPS_COPIES_MAX = 64 };
struct cuda_ops_copies {
    uint32_t count;
    void *to[CUDA_OPS_COPIES_MAX];
    const void *from[CUDA_OPS_COPIES_MAX];
    size_t bytes[CUDA_OPS_COPIES_MAX];
};
cudaError_t cuda_ops_copy(const struct cuda_ops_copies *copies, cudaStream_t stream);

/* Into the device's memory from pinned memory, read by threads: it shares the bus with larger
 * copies instead of waiting for those of other streams. All of it is there before anything behind
 * it starts, overlapping or not. Fastest where both are 16-byte aligned. */
cudaError_t cuda_ops_read(void *to, const void *from, size_t bytes, cudaStream_t stream);

/* A 16-bit pattern into equal parts, 16-byte aligned; bytes a multiple of 16. */
struct cuda_ops_fill {
    uint32_t count;
    uint16_t pattern;
    uint64_t bytes; /* of a part */
    void *const *part;
};
cudaError_t cuda_ops_fill(const struct cuda_ops_fill *args, cudaStream_t stream);

/* Of the current device; must succeed once per device before cuda_ops_matmul. */
struct cuda_ops_device {
    uint32_t thin_ctas[3];  /* CTAs at once: to 2 rows, to 8, to 16 */
    uint32_t overlap;       /* 1 when a kernel may start before the preceding one has ended */
    struct cuda_gemm *gemm; /* NULL, or what multiplies rows of chunks; the caller sets it */
};
cudaError_t cuda_ops_open(struct cuda_ops_device *device_out);

/* Products that share x, x_stride, rows and k. Here weight.type is OPS_BF16 and weight.bytes is
 * BF16 [n][k] row by row (cuda_ops_weight_rows), 16-byte aligned as x is; x_stride is a multiple of
 * 4. The first `singles` rows are of kernels of ours; the others, rows of chunks, go through
 * device->gemm if that takes all products and they have CUDA_OPS_LIBRARY_WEIGHTS weights together,
 * else they are as the first. A row's bits depend on x, W, k, n and that class alone, whatever rows
 * are beside it. Weights may be read before the preceding kernel of the stream has ended;
 * everything else is read after its end. */
enum {
    CUDA_OPS_PRODUCTS_MAX = 4,
    CUDA_OPS_LIBRARY_WEIGHTS = 1 << 22 /* below, a call of the library costs more than it saves */
};
struct cuda_ops_matmul {
    const struct cuda_ops_device *device;
    const struct ops_matmul *args;
    uint32_t count;    /* 1 .. CUDA_OPS_PRODUCTS_MAX */
    uint32_t singles;  /* 0 .. rows */
    uint16_t *scratch; /* cuda_ops_matmul_scratch_bytes, 16-byte aligned; NULL when that is 0 */
    cudaStream_t stream;
    /* NULL, or the norm whose y is x: done first, y may stay unwritten. Its rows, width and
     * y_stride are those of x; its x is 16-byte aligned, x_stride a multiple of 4. */
    const struct ops_rmsnorm *norm;
    /* NULL, or [rows][n] of SwiGLU over exactly two products, gate and up, of equal n, without
     * residual: done last; their y, contiguous, may stay unwritten. */
    float *glu;
};
size_t cuda_ops_matmul_scratch_bytes(uint32_t rows, uint32_t singles, uint32_t k);
cudaError_t cuda_ops_matmul(const struct cuda_ops_matmul *launch);

/* rows[n][k] = the packed weights, any type, rounded to BF16 (nearest even): the bits of
 * ops_weight_rows. Synchronise before the first product that reads them. */
cudaError_t cuda_ops_weight_rows(const struct ops_weight *packed, uint16_t *rows,
                                 cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
