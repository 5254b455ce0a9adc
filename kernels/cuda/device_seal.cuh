/* kernels/cuda/device_seal.cuh - one vector of BF16 to int8 codes and a scale, by a warp.
 *
 * Responsible for: DESIGN section 4 steps 1-3, where a token of a BF16 page lies.
 * Not responsible for: planes (kv_seal.cu), the codes of FP8 and of V in K8I4 (kv_control_seal.cu).
 *
 * Threads: device code, one warp.
 * Units: tokens, dims.
 */
#ifndef KERNELS_CUDA_DEVICE_SEAL_CUH
#define KERNELS_CUDA_DEVICE_SEAL_CUH

#include "kernels/cuda/device_state.cuh"

#define SCALE_MIN_BITS 0x0400
#define ABSMAX_LIMIT 8384512.0f

/* Address of the run of 16 tokens that token `t` of K (0) or V (1) of a page lies in. */
template <int DIM>
static __device__ __forceinline__ const uint16_t *
token_at(const struct kvops_pool &pool, const struct kvops_page &page, uint32_t row, uint32_t value,
         uint32_t t) {
    uint32_t per_slot = pool.geometry.layers * pool.geometry.kv_heads;
    uint32_t ordinal = row * 8 + value * 4 + t / LAYOUT_RUN_TOKENS;
    uint64_t stride = (per_slot * 32 * DIM + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT;
    const uint8_t *slot = pool.slots + page.slot[ordinal / per_slot] * stride * LAYOUT_SLOT_UNIT;

    return (const uint16_t *)(slot + (uint64_t)(ordinal % per_slot) * 32 * DIM) +
           t % LAYOUT_RUN_TOKENS * DIM;
}

/* absmax / 128 as fp16, rounded up, at least the smallest normal number. */
static __device__ __forceinline__ uint16_t scale_of(float absmax) {
    uint32_t bits = __float_as_uint(__fmul_rn(absmax, 0x1p-7f));

    if (absmax <= 0x1p-7f)
        return SCALE_MIN_BITS;
    return (uint16_t)((bits >> 13) - ((127 - 15) << 10) + ((bits & 0x1fff) != 0));
}

/* One vector by one warp; false when no scale can hold it. */
template <int DIM>
static __device__ __forceinline__ bool encode(const uint16_t *x, int8_t *codes, uint32_t flip,
                                              uint16_t *scale_out) {
    constexpr int OWN = DIM / 32;
    uint32_t lane = threadIdx.x % 32;
    float y[OWN], absmax = 0.0f;
    bool finite = true;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        y[i] = __uint_as_float((uint32_t)x[lane * OWN + i] << 16);
        finite = finite && fabsf(y[i]) < INFINITY;
    }
    state_rotate<DIM>(y);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        finite = finite && fabsf(y[i]) <= ABSMAX_LIMIT;
        absmax = fmaxf(absmax, fabsf(y[i]));
    }
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2)
        absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, stride));
    finite = __all_sync(~0u, finite);
    uint16_t bits = finite ? scale_of(absmax) : (uint16_t)SCALE_MIN_BITS;
    float scale = __half2float(__ushort_as_half(bits));
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float code = floorf(__fdiv_rn(y[i], scale));
        code = fminf(fmaxf(code, -128.0f), 127.0f);
        codes[lane * OWN + i] = (int8_t)((finite ? (int)code : 0) ^ flip);
    }
    if (lane == 0)
        *scale_out = bits;
    return finite;
}

/* Blocks of FP8 and K8I4 (kv_control_seal.cu); bad_token is set already. */
cudaError_t seal_control(const struct kvops_seal *args, cudaStream_t stream);

#endif
