/* kernels/cuda/cuda_ops.h - launchers of the CUDA twins of ops.h.
 *
 * Responsible for: embedding, RMS norm, RoPE with the BF16 write of K and V, SwiGLU, add.
 * Not responsible for: matrix products (cuBLASLt, engine/device), memory, streams.
 *
 * As in cuda_kvops.h the argument struct is read on the host during the call and every pointer in
 * it, those in ops_kv_dest included, is an address of the device. All items are done; the results
 * are the bits of the host twins (a NaN may have another payload).
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

#include "kernels/ops.h"

cudaError_t cuda_ops_embed(const struct ops_embed *args, cudaStream_t stream);
cudaError_t cuda_ops_rmsnorm(const struct ops_rmsnorm *args, cudaStream_t stream);
cudaError_t cuda_ops_rope(const struct ops_rope *args, cudaStream_t stream);
cudaError_t cuda_ops_swiglu(const struct ops_swiglu *args, cudaStream_t stream);
cudaError_t cuda_ops_add(const struct ops_add *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
