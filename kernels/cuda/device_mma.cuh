/* kernels/cuda/device_mma.cuh - the instructions that the matrix products are made of.
 *
 * Responsible for: asynchronous copies into shared memory, one tensor core step of BF16, rounding
 * eight values to BF16.
 * Not responsible for: tiles, the order of sums (dense_matmul.cu).
 *
 * Threads: device functions; a warp together where it multiplies.
 * Units: bytes of shared memory; BF16 pairs in words.
 */
#ifndef KERNELS_CUDA_DEVICE_MMA_CUH
#define KERNELS_CUDA_DEVICE_MMA_CUH

#include <cuda_bf16.h>
#include <stdint.h>

static __device__ __forceinline__ void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}

/* Of what is read once a step, with copy_once_policy: the rest of L2 stays there, and with it the
 * tables that the next attention has to look into before it can ask for anything. */
static __device__ __forceinline__ void copy16_once(uint32_t to, const void *from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy)
                 : "memory");
}

static __device__ __forceinline__ uint64_t copy_once_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

static __device__ __forceinline__ uint4 shared_get(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void mma(float acc[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Half a unit of k: `low` and `high` hold 8 weights of outputs g and g + 8, `b` 8 values of a row.
 * The halves come in order, other sums in between, as an MMA waits for the last one on its sum. */
template <int HALF>
static __device__ __forceinline__ void multiply(float acc[4], const uint4 &low, const uint4 &high,
                                                const uint4 &b) {
    if (HALF == 0)
        mma(acc, {low.x, high.x, low.y, high.y}, b.x, b.y);
    else
        mma(acc, {low.z, high.z, low.w, high.w}, b.z, b.w);
}

static __device__ __forceinline__ uint32_t pair_bf16(float first, float second) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *(const uint32_t *)&pair;
}

static __device__ __forceinline__ uint4 eight_bf16(const float4 &first, const float4 &second) {
    return make_uint4(pair_bf16(first.x, first.y), pair_bf16(first.z, first.w),
                      pair_bf16(second.x, second.y), pair_bf16(second.z, second.w));
}

#endif
