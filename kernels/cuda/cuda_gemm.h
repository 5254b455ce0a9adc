/* kernels/cuda/cuda_gemm.h - products of many rows by cuBLASLt, which is found at run time.
 *
 * Responsible for: loading the library, one pinned algorithm for every shape of weights, running
 * it.
 * Not responsible for: rounding rows to BF16, few rows (dense_matmul.cu).
 *
 * An algorithm is the first of the library's own order for CUDA_GEMM_ROWS rows that sums k in one
 * piece (no split, no workspace, so nothing to share sums through) and runs with any number of rows
 * up to that. It is then used for every number of rows: the bits of a row depend on x, W, k, the
 * algorithm and the library's version, not on the rows beside it.
 *
 * Threads: one call at a time for a struct. The library stays loaded until the program ends.
 * Units: as in ops.h.
 */
#ifndef KERNELS_CUDA_CUDA_GEMM_H
#define KERNELS_CUDA_CUDA_GEMM_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/ops.h"

enum {
    CUDA_GEMM_ROWS = 256,
    CUDA_GEMM_SHAPES = 16, /* more are left to other kernels */
    CUDA_GEMM_CALLS = 16,
    CUDA_GEMM_TEXT_BYTES = 1280
};

struct cuda_gemm_shape {
    uint32_t n, k;
    uint64_t algorithm[8];
    int usable;
};

/* All zero before cuda_gemm_open; then all but `text` is private. */
struct cuda_gemm {
    void *call[CUDA_GEMM_CALLS];
    void *handle, *product, *w, *x, *y;
    uint32_t shape_count;
    struct cuda_gemm_shape shapes[CUDA_GEMM_SHAPES];
    char text[CUDA_GEMM_TEXT_BYTES]; /* lines: the version, a pinned algorithm each; its length … */
    uint32_t text_bytes;             /* … is this */
};

/* For the current device. NULL, or what is wrong (static text): then the struct can only be closed,
 * pins nothing and takes nothing. */
const char *cuda_gemm_open(struct cuda_gemm *gemm);
void cuda_gemm_close(struct cuda_gemm *gemm);

/* Chooses an algorithm for weights [n][k], unless it has. Costs milliseconds. */
void cuda_gemm_pin(struct cuda_gemm *gemm, uint32_t n, uint32_t k);

/* 1: the shape is pinned, the rows of y are aligned as the algorithm wants. */
int cuda_gemm_takes(const struct cuda_gemm *gemm, const struct ops_matmul *args);

/* Of args that are taken, any number of rows; x is their BF16 [row][k], 16-byte aligned as
 * weight.bytes (BF16 [n][k]) is. args->x is not looked at. */
cudaError_t cuda_gemm_multiply(struct cuda_gemm *gemm, const struct ops_matmul *args,
                               const uint16_t *x, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
