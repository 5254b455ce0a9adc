/* kernels/cuda/dense_embed.cu - rows of a packed table, widened to fp32.
 *
 * Responsible for: struct ops_embed on the device over the panels of kernels/host/dense.h,
 * bit-equal to the host twin.
 * Not responsible for: packing, matrix products over packed weights.
 *
 * Moves, per value of a row, the 16 lanes of its panel unit at worst (the table is shared with the
 * output product, whose order it keeps) and 4 bytes out. Expected: 2 us for a decode step.
 */
#include <cuda_fp16.h>

#include "kernels/cuda/cuda_ops.h"

enum { THREADS = 256 };

static __device__ __forceinline__ uint32_t unit_bytes(enum ops_type type) {
    return type == OPS_F32    ? OPS_K_UNIT * OPS_PANEL * 4
           : type == OPS_Q8_0 ? OPS_PANEL * 2 + OPS_K_UNIT * OPS_PANEL
           : type == OPS_Q4_0 ? OPS_PANEL * 2 + OPS_K_UNIT * OPS_PANEL / 2
           : type == OPS_Q4_1 ? OPS_PANEL * 4 + OPS_K_UNIT * OPS_PANEL / 2
                              : OPS_K_UNIT * OPS_PANEL * 2;
}

static __device__ __forceinline__ float half_at(const uint8_t *unit, uint32_t index) {
    return __half2float(__ushort_as_half(((const uint16_t *)unit)[index]));
}

/* Input k of a unit for one lane of its panel. */
static __device__ __forceinline__ float widen(enum ops_type type, const uint8_t *unit,
                                              uint32_t lane, uint32_t k) {
    const uint8_t *codes = unit + (type == OPS_Q4_1 ? OPS_PANEL * 4 : OPS_PANEL * 2);
    uint32_t i = k * OPS_PANEL + lane;

    if (type == OPS_F32)
        return ((const float *)unit)[i];
    if (type == OPS_F16)
        return half_at(unit, i);
    if (type == OPS_BF16)
        return __uint_as_float((uint32_t)((const uint16_t *)unit)[i] << 16);
    float scale = half_at(unit, lane);
    if (type == OPS_Q8_0)
        return __fmul_rn((float)(int8_t)codes[i], scale);
    float add = type == OPS_Q4_1 ? half_at(unit, OPS_PANEL + lane) : __fmul_rn(-8.0f, scale);
    uint32_t code = codes[k * 8 + lane % 8] >> (lane < 8 ? 0 : 4) & 15;
    return __fadd_rn(__fmul_rn((float)code, scale), add);
}

static __global__ void __launch_bounds__(THREADS)
    embed_kernel(const __grid_constant__ struct ops_embed args) {
    uint32_t k = blockIdx.y * THREADS + threadIdx.x, id = args.ids[blockIdx.x];
    uint64_t bytes = unit_bytes(args.table.type);

    if (k >= args.table.k)
        return;
    const uint8_t *unit =
        args.table.bytes +
        ((uint64_t)(id / OPS_PANEL) * (args.table.k / OPS_K_UNIT) + k / OPS_K_UNIT) * bytes;
    args.out[blockIdx.x * args.out_stride + k] =
        widen(args.table.type, unit, id % OPS_PANEL, k % OPS_K_UNIT);
}

extern "C" cudaError_t cuda_ops_embed(const struct ops_embed *args, cudaStream_t stream) {
    if (args->rows > 0)
        embed_kernel<<<dim3(args->rows, (args->table.k + THREADS - 1) / THREADS), THREADS, 0,
                       stream>>>(*args);
    return cudaGetLastError();
}
