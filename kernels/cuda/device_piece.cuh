/* kernels/cuda/device_piece.cuh - BF16 tokens of attention, sixteen at a time.
 *
 * Responsible for: where the runs of 16 tokens of a BF16 page, block or chunk lie, copying a piece
 * (K and V of one run) into shared memory, attention of four query heads over it.
 * Not responsible for: order of pieces (kv_decode.cu), sealed pages (device_page.cuh).
 *
 * A piece is 64 * dim bytes. q and p are each split in two BF16 numbers, 16 bits of mantissa; the
 * products are exact and are summed in fp32 by mma.m16n8k16. Tokens beyond the count are filled
 * with zeros by the copy, never read. Rows in shared memory are swizzled by chunks of 16 bytes.
 *
 * Threads: device code, one warp; the pieces belong to their warp.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_PIECE_CUH
#define KERNELS_CUDA_DEVICE_PIECE_CUH

#include "kernels/cuda/device_page.cuh"

#include <cuda_bf16.h>

enum { PIECE_TOKENS = LAYOUT_RUN_TOKENS };

struct piece {
    const uint8_t *k;
    const uint8_t *v;
    uint32_t tokens; /* 1..16 that may be read and seen */
};

/* Run `run` of a page whose eight slots are given. */
template <int DIM>
static __device__ __forceinline__ piece piece_of_page(const struct kvops_pool &pool,
                                                      const uint32_t *slots, uint32_t row,
                                                      uint32_t run) {
    uint32_t per_slot = pool.geometry.layers * pool.geometry.kv_heads;
    uint64_t stride = (per_slot * 32 * DIM + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT;
    uint32_t k = row * 8 + run, v = k + 4;
    piece at;

    stride *= LAYOUT_SLOT_UNIT;
    at.k = pool.slots + slots[k / per_slot] * stride + (uint64_t)(k % per_slot) * 32 * DIM;
    at.v = pool.slots + slots[v / per_slot] * stride + (uint64_t)(v % per_slot) * 32 * DIM;
    at.tokens = PIECE_TOKENS;
    return at;
}

template <int DIM> static __device__ __forceinline__ uint32_t piece_bytes() {
    return 64 * DIM;
}

/* Chunk of 16 bytes of a token within K or V of a piece. */
template <int DIM>
static __device__ __forceinline__ uint32_t piece_chunk(uint32_t token, uint32_t chunk) {
    return token * 2 * DIM + (chunk ^ (token & 7)) * 16;
}

/* Requests a piece; tokens beyond the count become zeros. One commit group. */
template <int DIM>
static __device__ __forceinline__ void piece_request(const piece &from, uint32_t to) {
    constexpr uint32_t CHUNKS = DIM / 8;
    uint32_t lane = threadIdx.x % 32;

    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < PIECE_TOKENS * CHUNKS / 32; i++) {
        uint32_t token = (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
        uint32_t valid = token < from.tokens ? 16 : 0;
        uint64_t off = valid ? (uint64_t)token * 2 * DIM + chunk * 16 : 0;
        copy_16(to + piece_chunk<DIM>(token, chunk), from.k + off, valid);
        copy_16(to + 32 * DIM + piece_chunk<DIM>(token, chunk), from.v + off, valid);
    }
}

static __device__ __forceinline__ void piece_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The oldest of STAGES requests is there. */
template <int STAGES> static __device__ __forceinline__ void piece_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
}

static __device__ __forceinline__ void piece_wait_all() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}

static __device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}

static __device__ __forceinline__ void load_matrices_across(uint32_t (&a)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}

static __device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two BF16 numbers whose sum is x to 16 bits, the larger in the low half. */
static __device__ __forceinline__ uint32_t split_bf16(float x) {
    __nv_bfloat16 high = __float2bfloat16_rn(x);
    __nv_bfloat16 low = __float2bfloat16_rn(__fsub_rn(x, __bfloat162float(high)));
    return (uint32_t)__bfloat16_as_ushort(high) | (uint32_t)__bfloat16_as_ushort(low) << 16;
}

/* Softmax so far with fp32 accumulators of the tensor cores: acc[dt][0 and 1] add up to dim
 * 16dt + g, [2 and 3] to dim 16dt + 8 + g of head c. */
template <int DIM> struct piece_state {
    float max;
    float sum;
    float acc[DIM / 16][4];
};

template <int DIM> static __device__ __forceinline__ void piece_clear(piece_state<DIM> &into) {
    into.max = -INFINITY;
    into.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 16 * 4; i++)
        into.acc[i / 4][i % 4] = 0.0f;
}

/* Logits of tokens g and g + 8 for head c of every group, in units of log2; `q` is the address of
 * the split queries [group][8 columns][DIM] in shared memory. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void piece_logits(uint32_t at, uint32_t q, uint32_t tokens,
                                                    float (&x)[GROUPS][2]) {
    uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float even[GROUPS][4] = {}, odd[GROUPS][4] = {};
    uint32_t a[4], token = lane % 16, half = lane / 16;

#pragma unroll
    for (int ks = 0; ks < DIM / 16; ks++) {
        load_matrices(a, at + piece_chunk<DIM>(token, 2 * ks + half));
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            uint32_t from = q + (8 * n + g) * 2 * DIM + ks * 32 + c * 4;
            mma_bf16(ks % 2 ? odd[n] : even[n], a, load_4(from), load_4(from + 16));
        }
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        x[n][0] = __fadd_rn(__fadd_rn(even[n][0], odd[n][0]), __fadd_rn(even[n][1], odd[n][1]));
        x[n][1] = __fadd_rn(__fadd_rn(even[n][2], odd[n][2]), __fadd_rn(even[n][3], odd[n][3]));
        x[n][0] = g < tokens ? x[n][0] : -INFINITY;
        x[n][1] = g + 8 < tokens ? x[n][1] : -INFINITY;
    }
}

/* Joins the piece with the logits `x`. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void piece_join(uint32_t at, const float (&x)[GROUPS][2],
                                                  piece_state<DIM> (&into)[GROUPS]) {
    uint32_t lane = threadIdx.x % 32, token = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
    uint32_t b[GROUPS][2];

#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        float max = fmaxf(into[n].max, state_head_max(fmaxf(x[n][0], x[n][1])));
        float keep = state_exp2(__fsub_rn(into[n].max, max));
        float p0 = state_exp2(__fsub_rn(x[n][0], max)), p1 = state_exp2(__fsub_rn(x[n][1], max));
        b[n][0] = transpose(split_bf16(p0));
        b[n][1] = transpose(split_bf16(p1));
        into[n].max = max;
        into[n].sum = __fmaf_rn(into[n].sum, keep, __fadd_rn(p0, p1));
        if (__any_sync(~0u, keep != 1.0f)) {
#pragma unroll
            for (int i = 0; i < DIM / 16 * 4; i++)
                into[n].acc[i / 4][i % 4] = __fmul_rn(into[n].acc[i / 4][i % 4], keep);
        }
    }
#pragma unroll
    for (int dt = 0; dt < DIM / 16; dt++) {
        uint32_t a[4];
        load_matrices_across(a, at + 32 * DIM + piece_chunk<DIM>(token, 2 * dt + half));
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            mma_bf16(into[n].acc[dt], a, b[n][0], b[n][1]);
    }
}

template <int DIM, int GROUPS>
static __device__ __forceinline__ void piece_attend(uint32_t at, uint32_t q, uint32_t tokens,
                                                    piece_state<DIM> (&into)[GROUPS]) {
    float x[GROUPS][2];

    piece_logits<DIM>(at, q, tokens, x);
    piece_join<DIM>(at, x, into);
}

template <int DIM>
static __device__ __forceinline__ void piece_leaf_end(const piece_state<DIM> &from,
                                                      state<DIM / 8> &leaf) {
    leaf.max = from.max;
    leaf.sum = state_head_sum(from.sum);
#pragma unroll
    for (int dt = 0; dt < DIM / 16; dt++) {
        leaf.acc[2 * dt] = __fadd_rn(from.acc[dt][0], from.acc[dt][1]);
        leaf.acc[2 * dt + 1] = __fadd_rn(from.acc[dt][2], from.acc[dt][3]);
    }
}

#endif
