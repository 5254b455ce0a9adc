/* kernels/cuda/device_control.cuh - pages of the control codes as BF16, for prefill and seal.
 *
 * Responsible for: where a page of FP8 or K8I4 lies, sixteen stored bytes to BF16 in registers.
 * Not responsible for: writing them (kv_control_seal.cu), order of pages, products, decode
 * (device_control_walk.cuh).
 *
 * FP8 becomes exactly the numbers of the host twin, V of K8I4 the nearest BF16 to them; K of K8I4
 * becomes whole numbers, which BF16 holds, and is scaled behind the products.
 *
 * Threads: device code, any thread.
 * Units: bytes, tokens, dims.
 */
#ifndef KERNELS_CUDA_DEVICE_CONTROL_CUH
#define KERNELS_CUDA_DEVICE_CONTROL_CUH

#include "kernels/cuda/device_state.cuh"

#include <cuda_bf16.h>

struct control_page {
    uint8_t *k[2];   /* halves of 32 tokens */
    uint8_t *v[2];   /* K8I4: the nibbles at [0] */
    uint8_t *groups; /* K8I4: scales of K, then scale and minimum of every group of V */
};

/* Page `page` of row layer * kv_heads + head; CODES: K8I4. */
template <int DIM, bool CODES>
static __device__ __forceinline__ control_page control_page_of(const struct kvops_pool &pool,
                                                               const uint32_t *slots, uint32_t row,
                                                               uint32_t page) {
    uint32_t rows = pool.geometry.layers * pool.geometry.kv_heads, at = page * rows + row;
    uint64_t stride = (rows * 32 * DIM + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT;
    control_page out = {};

    stride *= LAYOUT_SLOT_UNIT;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t ordinal = 2 * at + half, slot = ordinal / rows;
        uint64_t off = (uint64_t)(ordinal % rows) * 32 * DIM;
        out.k[half] = pool.slots + slots[slot] * stride + off;
        if (!CODES)
            out.v[half] = pool.slots + slots[LAYOUT_V_ENTRY + slot] * stride + off;
    }
    if (CODES) {
        out.v[0] = pool.slots + slots[LAYOUT_V_ENTRY + page] * stride + (uint64_t)row * 32 * DIM;
        out.groups = pool.slots + slots[LAYOUT_GROUP_ENTRY] * stride + (uint64_t)at * 8 * DIM;
    }
    return out;
}

static __device__ __forceinline__ uint32_t control_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

/* Four e4m3 bytes: exponent and mantissa moved into place are the value times 2^-120. */
static __device__ __forceinline__ uint2 control_e4m3(uint32_t bytes) {
    const uint32_t up = 0x7B807B80; /* 2^120, twice */
    uint32_t word[2] = {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};

#pragma unroll
    for (int i = 0; i < 2; i++) {
        word[i] = (word[i] & 0x80008000) | (word[i] & 0x7f007f00) >> 4;
        __nv_bfloat162 pair = __hmul2(*(__nv_bfloat162 *)&word[i], *(const __nv_bfloat162 *)&up);
        word[i] = *(uint32_t *)&pair;
    }
    return make_uint2(word[0], word[1]);
}

/* Four int8. */
static __device__ __forceinline__ uint2 control_int8(uint32_t bytes) {
    uint32_t u = bytes ^ 0x80808080;
    float x[4];

#pragma unroll
    for (int i = 0; i < 4; i++) /* 2^23 + 128 + the number */
        x[i] = __fsub_rn(__uint_as_float(__byte_perm(u, 0x4B000000, 0x7440 | i)), 8388736.0f);
    return make_uint2(control_pack(x[0], x[1]), control_pack(x[2], x[3]));
}

/* Sixteen K values, or V of FP8. */
template <bool CODES>
static __device__ __forceinline__ void control_widen(const uint4 &raw, uint4 (&out)[2]) {
    uint2 a = CODES ? control_int8(raw.x) : control_e4m3(raw.x);
    uint2 b = CODES ? control_int8(raw.y) : control_e4m3(raw.y);
    uint2 c = CODES ? control_int8(raw.z) : control_e4m3(raw.z);
    uint2 d = CODES ? control_int8(raw.w) : control_e4m3(raw.w);
    out[0] = make_uint4(a.x, a.y, b.x, b.y);
    out[1] = make_uint4(c.x, c.y, d.x, d.y);
}

/* Eight V values of K8I4; `group` holds scale and minimum. */
static __device__ __forceinline__ uint4 control_nibbles(uint32_t bits, uint32_t group) {
    float scale = __half2float(__ushort_as_half((uint16_t)group));
    float least = __half2float(__ushort_as_half((uint16_t)(group >> 16)));
    float x[8];

#pragma unroll
    for (int i = 0; i < 8; i++) {
        float code = __fsub_rn(__uint_as_float(0x4B000000 | (bits >> 4 * i & 15)), 8388608.0f);
        x[i] = __fadd_rn(least, __fmul_rn(scale, code));
    }
    return make_uint4(control_pack(x[0], x[1]), control_pack(x[2], x[3]), control_pack(x[4], x[5]),
                      control_pack(x[6], x[7]));
}

#endif
