/* kernels/cuda/device_dense.cuh - what the dense kernels share.
 *
 * Responsible for: widening a packed weight, rounding to BF16, launches that may start before the
 * preceding kernel of the stream has ended (programmatic dependent launch, sm_90).
 * Not responsible for: any operation.
 *
 * A kernel launched with `overlap` calls dense_wait_for_previous before it touches what a kernel
 * writes; since every kernel here waits before it ends, all earlier kernels have ended then too.
 *
 * Threads: device functions; dense_launch on any thread.
 * Units: bytes where named.
 */
#ifndef KERNELS_CUDA_DEVICE_DENSE_CUH
#define KERNELS_CUDA_DEVICE_DENSE_CUH

#include <cuda_fp16.h>

#include "kernels/cuda/cuda_ops.h"

static __device__ __forceinline__ void dense_let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ __forceinline__ void dense_wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct dense_grid {
    dim3 ctas;
    dim3 threads;
    uint32_t shared_bytes;
    cudaStream_t stream;
    uint32_t overlap;
};

static inline cudaError_t dense_launch(const void *kernel, const struct dense_grid &grid,
                                       void **arguments) {
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid.ctas;
    config.blockDim = grid.threads;
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = grid.stream;
    config.attrs = &attribute;
    config.numAttrs = grid.overlap ? 1 : 0;
    return cudaLaunchKernelExC(&config, kernel, arguments);
}

/* For launchers without a struct cuda_ops_device; two cached queries. */
static inline uint32_t dense_can_overlap() {
    int device, major = 0;

    if (cudaGetDevice(&device) == cudaSuccess)
        (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
}

/* The norm with its result rounded to BF16 in [rows][width] instead of y (dense_norm.cu). */
extern "C" cudaError_t dense_norm_rounded(const struct ops_rmsnorm *args, uint16_t *rounded,
                                          cudaStream_t stream);

/* 1 / sqrt(mean of squares + eps) by one warp, the same in every lane, in the order of the twin:
 * element i in lane i % 32, then halves. `load` gives element i. */
template <class F>
static __device__ __forceinline__ float dense_inverse_rms(uint32_t width, float eps, F &&load) {
    enum { AHEAD = 32 };
    uint32_t lane = threadIdx.x % 32, i = lane;
    float sum = 0.0f;

    for (; i + 32 * (AHEAD - 1) < width; i += 32 * AHEAD) {
        float v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            v[j] = load(i + 32 * j);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            sum = __fadd_rn(sum, __fmul_rn(v[j], v[j]));
    }
    for (; i < width; i += 32) {
        float v = load(i);
        sum = __fadd_rn(sum, __fmul_rn(v, v));
    }
#pragma unroll
    for (uint32_t half = 16; half > 0; half /= 2)
        sum = __fadd_rn(sum, __shfl_down_sync(~0u, sum, half));
    float mean = __fdiv_rn(__shfl_sync(~0u, sum, 0), (float)width);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

/* The steps of kernels/host/dense.h, every operation rounded alone. */
static __device__ __forceinline__ float dense_exp_as_host(float x) {
    float clamped = fmaxf(x < 88.0f ? x : 88.0f, -87.0f);
    float shifted = __fadd_rn(__fmul_rn(clamped, 0x1.715476p+0f), 0x1.8p+23f);
    float n = __fsub_rn(shifted, 0x1.8p+23f);
    float r = __fsub_rn(clamped, __fmul_rn(n, 0x1.63p-1f));
    float p = 0x1.6d11fep-10f;

    r = __fsub_rn(r, __fmul_rn(n, -0x1.bd0106p-13f));
    p = __fadd_rn(__fmul_rn(p, r), 0x1.120c62p-7f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.555518p-5f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.5554dcp-3f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r);
    p = __fadd_rn(p, 1.0f);
    p = __fmul_rn(p, __uint_as_float((__float_as_uint(shifted) + 127) << 23));
    return x > 88.0f ? INFINITY : p;
}

static __device__ __forceinline__ float dense_swiglu(float gate, float up) {
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, dense_exp_as_host(-gate))), up);
}

/* Nearest, ties to even; a NaN keeps its sign and high bits and becomes quiet. */
static __device__ __forceinline__ uint16_t dense_to_bf16(float value) {
    uint32_t bits = __float_as_uint(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static __device__ __forceinline__ uint32_t dense_unit_bytes(enum ops_type type) {
    return type == OPS_F32    ? OPS_K_UNIT * OPS_PANEL * 4
           : type == OPS_Q8_0 ? OPS_PANEL * 2 + OPS_K_UNIT * OPS_PANEL
           : type == OPS_Q4_0 ? OPS_PANEL * 2 + OPS_K_UNIT * OPS_PANEL / 2
           : type == OPS_Q4_1 ? OPS_PANEL * 4 + OPS_K_UNIT * OPS_PANEL / 2
                              : OPS_K_UNIT * OPS_PANEL * 2;
}

static __device__ __forceinline__ float dense_half_at(const uint8_t *unit, uint32_t index) {
    return __half2float(__ushort_as_half(((const uint16_t *)unit)[index]));
}

/* Input k of a unit for one lane of its panel. */
static __device__ __forceinline__ float dense_widen(enum ops_type type, const uint8_t *unit,
                                                    uint32_t lane, uint32_t k) {
    const uint8_t *codes = unit + (type == OPS_Q4_1 ? OPS_PANEL * 4 : OPS_PANEL * 2);
    uint32_t i = k * OPS_PANEL + lane;

    if (type == OPS_F32)
        return ((const float *)unit)[i];
    if (type == OPS_F16)
        return dense_half_at(unit, i);
    if (type == OPS_BF16)
        return __uint_as_float((uint32_t)((const uint16_t *)unit)[i] << 16);
    float scale = dense_half_at(unit, lane);
    if (type == OPS_Q8_0)
        return __fmul_rn((float)(int8_t)codes[i], scale);
    float add = type == OPS_Q4_1 ? dense_half_at(unit, OPS_PANEL + lane) : __fmul_rn(-8.0f, scale);
    uint32_t code = codes[k * 8 + lane % 8] >> (lane < 8 ? 0 : 4) & 15;
    return __fadd_rn(__fmul_rn((float)code, scale), add);
}

#endif
