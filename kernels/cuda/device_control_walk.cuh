/* kernels/cuda/device_control_walk.cuh - decode attention over blocks of FP8 and K8I4.
 *
 * Responsible for: half pages of the control codes through a warp's ring, attention of GROUPS times
 * four query heads over them.
 * Not responsible for: units and joining warps (kv_decode.cu), prefill (kv_control_prefill.cu).
 *
 * Moves the stored bytes: per page, KV head and layer 16,384 B (FP8) or 12,928 B (K8I4) at head_dim
 * 128. They lie in shared memory as they are stored, swizzled, and become numbers in registers on
 * the way into a product: FP8 becomes fp16, q and the weights are two fp16 each. K8I4 is multiplied
 * as bytes, q and the weights in 16 bits as for planes; the scale is in the weight, the minimum of
 * a group is summed beside. V is read across as 16-bit units, so a lane has two (FP8) or four
 * (K8I4) neighbouring dims: dim_of says which. About 1,200 warp instructions a page.
 *
 * Threads: device code, one warp; the ring belongs to its warp.
 * Units: bytes of shared memory, half pages of 32 tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_CONTROL_WALK_CUH
#define KERNELS_CUDA_DEVICE_CONTROL_WALK_CUH

#include "kernels/cuda/device_unit.cuh"

#include <type_traits>

enum { CONTROL_STAGES = 3 };

/* Where a stage holds a half page. */
template <int DIM, bool CODES> struct control_map {
    static constexpr uint32_t V_ROW = CODES ? DIM / 2 : DIM, V = 32 * DIM, SCALES = V + 32 * V_ROW,
                              GROUPS = SCALES + 64, STAGE = 64 * DIM;
};

/* --- copying */

/* Chunk of 16 bytes of a token: eight tokens' chunks of one place lie in different banks. */
template <uint32_t ROW>
static __device__ __forceinline__ uint32_t control_chunk(uint32_t token, uint32_t chunk) {
    return token * ROW + (chunk ^ (token * ROW / 128 % (ROW / 16))) * 16;
}

/* Where a lane reads its row of four matrices: token lane % 16, chunks 0 and 1. Chunks c and c + 1
 * (c even) are at this ^ 16c, the next 16 tokens 16 rows on. `at` is a multiple of 128. */
template <uint32_t ROW> static __device__ __forceinline__ uint32_t control_row(uint32_t at) {
    uint32_t lane = threadIdx.x % 32;

    return at + control_chunk<ROW>(lane % 16, lane / 16);
}

/* 32 tokens. Four lines of 128 bytes at a time: rows as long as that swap halves every time. */
template <uint32_t ROW>
static __device__ __forceinline__ void control_copy(uint32_t to, const uint8_t *from) {
    uint32_t lane = threadIdx.x % 32, swap = ROW == 128 ? 64 : 0;

    to += control_chunk<ROW>(lane / (ROW / 16), lane % (ROW / 16));
    from += 16 * lane;
#pragma unroll
    for (uint32_t i = 0; i < ROW / 16; i++)
        copy_16((i % 2 ? to ^ swap : to) + i * 512, from + i * 512, 16);
}

/* Looks up the slots of half page `get`: their numbers may still be on their way. */
template <bool CODES>
static __device__ __forceinline__ void control_look(const struct cta &cta, piece_walk &walk) {
    uint32_t rows = cta.args.pool.geometry.layers * cta.args.pool.geometry.kv_heads;
    uint32_t page = walk.get / 2 % LAYOUT_BLOCK_PAGES;
    bool second = 2 * (cta.row_in_layer + walk.range.head) + walk.get % 2 >= rows;

    if (walk.get >= walk.end)
        return;
    const uint32_t *slots = walk.range.blocks[walk.get >> walk.log].slot;
    walk.slot[0] = slots[2 * page + second];
    walk.slot[1] = slots[LAYOUT_V_ENTRY + (CODES ? page : 2 * page + second)];
    if (CODES)
        walk.slot[2] = slots[LAYOUT_GROUP_ENTRY];
}

/* Requests half page `get`, which was looked up. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void control_request(const struct cta &cta,
                                                       const piece_walk &walk, uint32_t to) {
    using map = control_map<DIM, CODES>;
    const struct kvops_pool &pool = cta.args.pool;
    uint32_t rows = pool.geometry.layers * pool.geometry.kv_heads, lane = threadIdx.x % 32;
    uint32_t row = cta.row_in_layer + walk.range.head, half = walk.get % 2;
    uint32_t page = walk.get / 2 % LAYOUT_BLOCK_PAGES, place = 2 * row + half;
    uint64_t stride = (rows * 32 * DIM + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT;

    stride *= LAYOUT_SLOT_UNIT;
    place -= place >= rows ? rows : 0;
    const uint8_t *k = pool.slots + walk.slot[0] * stride + (uint64_t)place * 32 * DIM;
    const uint8_t *v = pool.slots + walk.slot[1] * stride +
                       (CODES ? (uint64_t)(2 * row + half) * 16 * DIM : (uint64_t)place * 32 * DIM);
    __syncwarp();
    control_copy<DIM>(to, k);
    control_copy<map::V_ROW>(to + map::V, v);
    if (CODES && lane < 4 + DIM / 8) {
        const uint8_t *groups =
            pool.slots + walk.slot[2] * stride + (uint64_t)(page * rows + row) * 8 * DIM;
        groups += lane < 4 ? half * 64 : 64 + half * 2 * DIM;
        copy_16(to + map::SCALES + lane * 16, groups + lane * 16, 16);
    }
}

/* Requests until the ring is full; one commit group each, empty at the end. */
template <int DIM, bool CODES>
static __device__ __forceinline__ void control_fill(const struct cta &cta, uint32_t ring,
                                                    piece_walk &walk) {
    for (; walk.filled < walk.used + CONTROL_STAGES; walk.filled++) {
        if (walk.get < walk.end) {
            control_request<DIM, CODES>(
                cta, walk, ring + walk.filled % CONTROL_STAGES * control_map<DIM, CODES>::STAGE);
            walk.get = piece_after(walk, walk.get);
            control_look<CODES>(cta, walk);
        }
        piece_commit();
    }
}

template <int DIM, bool CODES>
static __device__ __forceinline__ void control_start(const struct cta &cta, uint32_t ring,
                                                     piece_walk &walk) {
    control_look<CODES>(cta, walk);
    control_fill<DIM, CODES>(cta, ring, walk);
}

/* --- arithmetic: x[n][i] is of token 8i + g, head c of group n */

/* Four e4m3 bytes as fp16, exactly. */
static __device__ __forceinline__ uint2 control_f16(uint32_t bytes) {
    uint2 out;
#if __CUDA_ARCH__ >= 890 && !defined(CUDA_KVOPS_CP_ASYNC)
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(out.x), "=r"(out.y)
        : "r"(bytes));
#else /* exponent and mantissa moved into place are the value times 2^-8 */
    const uint32_t up = 0x5C005C00; /* 2^8, twice */
    uint32_t word[2] = {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};

#pragma unroll
    for (int i = 0; i < 2; i++) {
        word[i] = (word[i] & 0x80008000) | (word[i] & 0x7f007f00) >> 1;
        __half2 pair = __hmul2(*(__half2 *)&word[i], *(const __half2 *)&up);
        word[i] = *(uint32_t *)&pair;
    }
    out = make_uint2(word[0], word[1]);
#endif
    return out;
}

static __device__ __forceinline__ float control_half(uint32_t bits) {
    return __half2float(__ushort_as_half((uint16_t)bits));
}

static __device__ __forceinline__ uint32_t load_2(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

/* Four query heads in two fp16 a value, for FP8. */
template <int DIM> struct split_queries {
    uint32_t b[DIM / 16][2];
    float scale;
};

template <int DIM, int GROUPS>
static __device__ __forceinline__ void load_queries(const struct cta &cta,
                                                    split_queries<DIM> (&q)[GROUPS]) {
    using map = query_map<DIM, GROUPS>;
    uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32_t at = shared_address(cta.queries + map::SPLIT) + g * 2 * DIM + c * 8;

#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
#pragma unroll
        for (int ks = 0; ks < DIM / 16; ks++) {
            uint2 pair = load_8(at + n * 16 * DIM + ks * 32);
            q[n].b[ks][0] = pair.x;
            q[n].b[ks][1] = pair.y;
        }
        q[n].scale = ((const float *)(cta.queries + map::HEADS))[STATE_HEADS * n + c];
    }
}

template <int DIM, int GROUPS>
static __device__ __forceinline__ void
control_logits(uint32_t at, const split_queries<DIM> (&q)[GROUPS], float (&x)[GROUPS][4]) {
    uint32_t from = control_row<DIM>(at);

#pragma unroll
    for (uint32_t tile = 0; tile < 2; tile++) {
        float sum[GROUPS][2][4] = {};
#pragma unroll
        for (int ks = 0; ks < DIM / 16; ks += 2) {
            uint32_t w[4];
            load_matrices(w, (from ^ 16 * ks) + 16 * DIM * tile);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint2 near = control_f16(w[2 * i]), far = control_f16(w[2 * i + 1]);
                uint32_t a[4] = {near.x, far.x, near.y, far.y};
#pragma unroll
                for (int n = 0; n < GROUPS; n++)
                    mma_f16(sum[n][i], a, q[n].b[ks + i][0], q[n].b[ks + i][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const float(&s)[2][4] = sum[n];
            float near = __fadd_rn(__fadd_rn(s[0][0], s[1][0]), __fadd_rn(s[0][1], s[1][1]));
            float far = __fadd_rn(__fadd_rn(s[0][2], s[1][2]), __fadd_rn(s[0][3], s[1][3]));
            x[n][2 * tile] = __fmul_rn(near, q[n].scale);
            x[n][2 * tile + 1] = __fmul_rn(far, q[n].scale);
        }
    }
}

/* Bytes of K times q in two bytes, half step included. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void
control_logits(uint32_t at, const page_queries<DIM> (&q)[GROUPS], float (&x)[GROUPS][4]) {
    uint32_t scales = at + control_map<DIM, true>::SCALES + threadIdx.x % 32 / 4 * 2;
    uint32_t from = control_row<DIM>(at);

#pragma unroll
    for (uint32_t tile = 0; tile < 2; tile++) {
        int sum[GROUPS][4];
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            sum[n][0] = sum[n][2] = 0;
            sum[n][1] = sum[n][3] = q[n].sum >> 1;
        }
#pragma unroll
        for (int ks = 0; ks < DIM / 32; ks++) {
            uint32_t w[4];
            load_matrices(w, (from ^ 32 * ks) + 16 * DIM * tile);
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
                mma_s8(sum[n], w, q[n].b[ks]);
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float scale =
                    __fmul_rn(control_half(load_2(scales + 32 * tile + 16 * i)), q[n].scale);
                int whole = sum[n][2 * i] * 256 + sum[n][2 * i + 1];
                x[n][2 * tile + i] = __fmul_rn((float)whole, scale);
            }
    }
}

/* Joins the half page with the logits `x`: FP8. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void control_join(uint32_t at, const float (&x)[GROUPS][4],
                                                    piece_state<DIM> (&leaf)[GROUPS]) {
    uint32_t from = control_row<DIM>(at + control_map<DIM, false>::V), b[GROUPS][4];

#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        float top = fmaxf(fmaxf(x[n][0], x[n][1]), fmaxf(x[n][2], x[n][3])), p[4];
        float max = fmaxf(leaf[n].max, state_head_max(top));
        float keep = state_exp2(__fsub_rn(leaf[n].max, max));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = state_exp2(__fsub_rn(x[n][i], max));
            b[n][i] = transpose(split_f16(p[i]));
        }
        leaf[n].max = max;
        leaf[n].sum =
            __fmaf_rn(leaf[n].sum, keep, __fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[2], p[3])));
        if (__any_sync(~0u, keep != 1.0f)) {
#pragma unroll
            for (int i = 0; i < DIM / 16 * 4; i++)
                leaf[n].acc[i / 4][i % 4] = __fmul_rn(leaf[n].acc[i / 4][i % 4], keep);
        }
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int dt = 0; dt < DIM / 16; dt += 2) {
            uint32_t w[4];
            load_matrices_across(w, (from ^ 16 * dt) + 16 * DIM * tile);
#pragma unroll
            for (int i = 0; i < 2; i++) { /* two tokens of one dim, then of the next */
                uint2 near = control_f16(__byte_perm(w[2 * i], 0, 0x3120));
                uint2 far = control_f16(__byte_perm(w[2 * i + 1], 0, 0x3120));
                uint32_t a[4] = {near.x, near.y, far.x, far.y};
#pragma unroll
                for (int n = 0; n < GROUPS; n++)
                    mma_f16(leaf[n].acc[dt + i], a, b[n][2 * tile], b[n][2 * tile + 1]);
            }
        }
}

template <int DIM>
static __device__ __forceinline__ void control_end(const piece_state<DIM> &leaf,
                                                   state<DIM / 8> &out) {
    piece_leaf_end<DIM>(leaf, out);
}

template <int DIM> static __device__ __forceinline__ void control_clear(piece_state<DIM> &leaf) {
    piece_clear(leaf);
}

/* A block of K8I4 so far; sum and the minima by groups of 64 dims are a lane's own shares. */
template <int DIM> struct nibble_leaf {
    float max;
    float sum;
    float least[DIM / 64];
    float acc[DIM / 8];
};

/* Weights of a half page relative to its own largest logit, joined into the leaf but for values;
 * returns what they are worth in it. */
template <int DIM>
static __device__ __forceinline__ float control_weights(const float (&x)[4], float (&p)[4],
                                                        nibble_leaf<DIM> &leaf) {
    float top = state_head_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
    float max = fmaxf(leaf.max, top), keep = state_exp2(__fsub_rn(leaf.max, max));
    float take = state_exp2(__fsub_rn(top, max));

#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] = state_exp2(__fsub_rn(x[i], top));
    float sum = __fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[2], p[3]));
    leaf.max = max;
    leaf.sum = __fmaf_rn(leaf.sum, keep, __fmul_rn(sum, take));
    if (__any_sync(~0u, keep != 1.0f)) {
#pragma unroll
        for (int i = 0; i < DIM / 64; i++)
            leaf.least[i] = __fmul_rn(leaf.least[i], keep);
#pragma unroll
        for (int i = 0; i < DIM / 8; i++)
            leaf.acc[i] = __fmul_rn(leaf.acc[i], keep);
    }
    return take;
}

/* Joins the half page with the logits `x`: K8I4, p * scale in 16 bits of the group's largest. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void control_join(uint32_t at, const float (&x)[GROUPS][4],
                                                    nibble_leaf<DIM> (&leaf)[GROUPS]) {
    using map = control_map<DIM, true>;
    uint32_t lane = threadIdx.x % 32, from = control_row<map::V_ROW>(at + map::V);
    float p[GROUPS][4], take[GROUPS];

#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        take[n] = control_weights(x[n], p[n], leaf[n]);
#pragma unroll
    for (int group = 0; group < DIM / 64; group++) {
        uint32_t near[4], far[4], b[GROUPS][2];
        float scale[4], least[4], worth[GROUPS];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t token = 8 * i + lane / 4;
            uint32_t pair = load_4(at + map::GROUPS + (token * (DIM / 64) + group) * 4);
            scale[i] = control_half(pair);
            least[i] = control_half(pair >> 16);
        }
        float widest = state_head_max(fmaxf(fmaxf(scale[0], scale[1]), fmaxf(scale[2], scale[3])));
        float to_steps = __fdividef(65535.0f, widest);
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            float sum = 0.0f;
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float weight = __fmul_rn(p[n][i], scale[i]);
                w[i] = __float_as_uint(__fmaf_rn(weight, to_steps, 8388608.0f));
                sum = __fmaf_rn(p[n][i], least[i], sum);
            }
            b[n][0] = transpose(__byte_perm(w[0], w[1], 0x4051));
            b[n][1] = transpose(__byte_perm(w[2], w[3], 0x4051));
            leaf[n].least[group] = __fmaf_rn(sum, take[n], leaf[n].least[group]);
            worth[n] = __fmul_rn(take[n], __fmul_rn(widest, 1.0f / 65535.0f));
        }
        load_matrices_across(near, from ^ 32 * group);
        load_matrices_across(far, (from ^ 32 * group) + 16 * map::V_ROW);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* two dims for four lanes each, the second in high nibbles */
            uint32_t pick = i % 2 ? 0x7351 : 0x6240;
            uint32_t u = __byte_perm(near[i / 2 * 2], near[i / 2 * 2 + 1], pick);
            uint32_t v = __byte_perm(far[i / 2 * 2], far[i / 2 * 2 + 1], pick);
            uint32_t a[4] = {u & 0x0F0F0F0F, u & 0xF0F0F0F0, v & 0x0F0F0F0F, v & 0xF0F0F0F0};
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                float *acc = &leaf[n].acc[8 * group + 2 * i];
                int c[4] = {};
                mma_u8(c, a, b[n][0], b[n][1]);
                acc[0] = __fmaf_rn((float)(c[0] * 256 + c[1]), worth[n], acc[0]);
                acc[1] =
                    __fmaf_rn((float)(c[2] * 256 + c[3]), __fmul_rn(worth[n], 0.0625f), acc[1]);
            }
        }
    }
}

template <int DIM>
static __device__ __forceinline__ void control_end(const nibble_leaf<DIM> &leaf,
                                                   state<DIM / 8> &out) {
    out.max = leaf.max;
    out.sum = state_head_sum(leaf.sum);
#pragma unroll
    for (int group = 0; group < DIM / 64; group++) {
        float least = state_head_sum(leaf.least[group]);
#pragma unroll
        for (int i = 8 * group; i < 8 * group + 8; i++)
            out.acc[i] = __fadd_rn(leaf.acc[i], least);
    }
}

template <int DIM> static __device__ __forceinline__ void control_clear(nibble_leaf<DIM> &leaf) {
    leaf = {};
    leaf.max = -INFINITY;
}

/* into = the blocks of the warp. */
template <int DIM, bool CODES, int GROUPS>
static __device__ __forceinline__ void attend_control(const struct cta &cta, uint32_t ring,
                                                      piece_walk &walk,
                                                      state<DIM / 8> (&into)[GROUPS]) {
    std::conditional_t<CODES, page_queries<DIM>, split_queries<DIM>> q[GROUPS];
    std::conditional_t<CODES, nibble_leaf<DIM>, piece_state<DIM>> leaf[GROUPS];

    load_queries<DIM>(cta, q);
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        control_clear<DIM>(leaf[n]);
#pragma unroll 1
    while (walk.use < walk.end) {
        uint32_t at = ring + walk.used % CONTROL_STAGES * control_map<DIM, CODES>::STAGE;
        float x[GROUPS][4];
        control_fill<DIM, CODES>(cta, ring, walk);
        piece_wait<CONTROL_STAGES>();
        control_logits<DIM>(at, q, x);
        control_join<DIM>(at, x, leaf);
        uint32_t next = piece_after(walk, walk.use);
        if (next >= walk.end || (next ^ walk.use) >> walk.log) {
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                state<DIM / 8> block;
                control_end<DIM>(leaf[n], block);
                state_fold(into[n], block);
                control_clear<DIM>(leaf[n]);
            }
        }
        walk.use = next;
        walk.used++;
    }
    piece_wait_all();
}

#endif
