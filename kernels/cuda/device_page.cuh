/* kernels/cuda/device_page.cuh - one sealed page of attention on integer tensor cores.
 *
 * Responsible for: where the streams of a page lie, copying a page into a stage of shared memory,
 * logits and weighted values of four query heads over a page that is there.
 * Not responsible for: order of pages (kv_decode.cu), BF16 pages (device_piece.cuh).
 *
 * Per page of 64 tokens at head_dim 128: 12,544 B at K8V4, about 700 warp instructions. Codes enter
 * mma.m16n8k32 as bytes; the maps of layout.h are in fragment order, so K takes nine operations per
 * 16 codes and V twenty per 32. Fragment coordinates: lane = 4g + c; K rows are tokens 8g + 2mt +
 * hf, columns 2h and 2h + 1 the high and low bytes of q of head h; V rows are dims 16dt + 8hi + g,
 * columns the bytes of p * v_scale in 1/65535 of the page's own maximum.
 *
 * Threads: device code, one warp; a stage belongs to its warp.
 * Units: bytes of shared memory, tokens.
 */
#ifndef KERNELS_CUDA_DEVICE_PAGE_CUH
#define KERNELS_CUDA_DEVICE_PAGE_CUH

#include "kernels/cuda/device_state.cuh"

/* Where a stage holds the streams; VX last: decode leaves it out of its stages (NARROW), or every
 * batch with one block of K8V8 would have fewer pages on their way. */
template <int DIM> struct stage_map {
    static constexpr uint32_t KH = 0, KM = 32 * DIM, KL = 48 * DIM, VB = 64 * DIM, VR1 = 80 * DIM,
                              VR2 = 88 * DIM, META = 96 * DIM, VX = 96 * DIM + 256;
    static constexpr uint32_t NARROW = VX, WIDE = VX + 32 * DIM;
};

/* --- copying: lanes 0..7 each own one stream, in the order of enum layout_stream */

struct lane_stream {
    const uint8_t *base; /* slots, or META frames for lane 7 */
    uint32_t stride;     /* bytes of a slot or frame */
    uint32_t tile_bytes;
    uint32_t tiles_per_slot;
    uint32_t table; /* first entry in kvops_block, read as words */
    uint32_t to;    /* offset in a stage */
};

/* A page of a block as the lane's stream sees it. */
struct lane_block {
    const uint8_t *first;    /* tile of page 0 */
    const uint32_t *entries; /* slots of the stream */
    uint32_t rest;           /* tile of page 0 within its slot */
    uint32_t streams;        /* of the tier it is read at */
    uint32_t page_bytes;     /* of all streams */
};

template <int DIM>
static __device__ __forceinline__ lane_stream lane_stream_of(const struct kvops_pool &pool) {
    using map = stage_map<DIM>;
    uint32_t lane = threadIdx.x % 32, tiles = pool.geometry.layers * pool.geometry.kv_heads;
    /* One digit per stream, the first in the lowest place. */
    uint32_t slots = 0x14112224u >> (4 * (lane & 7)) & 15;
    uint32_t table = 0x0CBA8640u >> (4 * (lane & 7)) & 15;
    lane_stream stream;

    stream.stride = (tiles * 32 * DIM + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT * LAYOUT_SLOT_UNIT;
    stream.base = pool.slots;
    stream.tile_bytes = 8 * DIM * slots;
    stream.tiles_per_slot = tiles * 4 / slots;
    stream.table = table;
    stream.to = lane == 0   ? map::KH
                : lane == 1 ? map::KM
                : lane == 2 ? map::KL
                : lane == 3 ? map::VB
                : lane == 4 ? map::VR1
                : lane == 5 ? map::VR2
                : lane == 6 ? map::VX
                            : map::META;
    if (lane == LAYOUT_META) {
        stream.base = pool.meta;
        stream.stride = tiles * 4 * LAYOUT_META_TILE_BYTES;
        stream.tile_bytes = LAYOUT_META_TILE_BYTES;
        stream.tiles_per_slot = tiles * 4;
        stream.table = LAYOUT_BLOCK_SLOTS;
    }
    return stream;
}

/* What layout_tier_streams says, a byte per tier; BF16 has none here. */
static __device__ __forceinline__ uint32_t page_streams(uint32_t tier) {
    return (uint32_t)(0x008f9f8b9bbbbfffull >> (8 * tier)) & 0xff;
}

/* A block looked up: its numbers may still be on their way, nothing here waits for them. */
struct lane_look {
    const uint32_t *entries;
    uint32_t rest;
    uint32_t slot;
    uint32_t tier;
};

static __device__ __forceinline__ lane_look lane_look_at(const lane_stream &stream,
                                                         const struct kvops_block *block,
                                                         uint32_t tile) {
    lane_look look;

    look.entries = (const uint32_t *)block + stream.table + tile / stream.tiles_per_slot;
    look.rest = tile % stream.tiles_per_slot;
    look.slot = *look.entries;
    look.tier = block->tier;
    return look;
}

/* Waits for what was looked up. */
static __device__ __forceinline__ lane_block lane_block_of(const lane_stream &stream,
                                                           lane_look look) {
    uint32_t lane = threadIdx.x % 32;
    lane_block at;

    /* Keeps the compiler from computing with the numbers, and so waiting, earlier than here. */
    asm volatile("" : "+r"(look.slot), "+r"(look.tier));

    at.entries = look.entries;
    at.rest = look.rest;
    at.streams = page_streams(look.tier);
    bool mine = lane < 8 && (at.streams >> lane & 1);
    at.page_bytes = __reduce_add_sync(~0u, mine ? stream.tile_bytes : 0);
    at.first = stream.base + (uint64_t)(mine ? look.slot : 0) * stream.stride +
               (uint64_t)at.rest * stream.tile_bytes;
    return at;
}

static __device__ __forceinline__ uint32_t shared_address(const void *at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

static __device__ __forceinline__ void copy_16(uint32_t to, const void *from, uint32_t valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
}

#if __CUDA_ARCH__ >= 900 && !defined(CUDA_KVOPS_CP_ASYNC)
#define PAGE_BULK_COPY 1
#else
#define PAGE_BULK_COPY 0
#endif

static __device__ __forceinline__ void barrier_init(uint32_t barrier) {
#if PAGE_BULK_COPY
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
            barrier)
        : "memory");
#else
    (void)barrier;
#endif
}

/* Copies the tiles that lanes 0..7 point to, sixteen bytes a lane at a time. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void copy_streams(uint32_t streams, const uint8_t *from,
                                                    uint32_t stage) {
    using map = stage_map<DIM>;
    constexpr uint32_t SLOTS[] = {4, 2, 2, 2, 1, 1, 4};
    constexpr uint32_t TO[] = {map::KH,  map::KM,  map::KL, map::VB,
                               map::VR1, map::VR2, map::VX, map::META};
    uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t bytes = i == LAYOUT_META ? LAYOUT_META_TILE_BYTES : 8 * DIM * SLOTS[i % 7];
        if (!WIDE && i == LAYOUT_VX)
            continue;
        const uint8_t *source = (const uint8_t *)__shfl_sync(~0u, (uint64_t)from, i) + 16 * lane;
        if (streams >> i & 1)
#pragma unroll
            for (uint32_t at = 0; at < bytes; at += 512)
                if (at + 512 <= bytes || at + 16 * lane < bytes)
                    copy_16(stage + TO[i] + at + 16 * lane, source + at, 16);
    }
}

/* The lane's tile of page `page`. */
static __device__ __forceinline__ const uint8_t *page_tile(const lane_stream &stream,
                                                           const lane_block &block, uint32_t page) {
    uint32_t lane = threadIdx.x % 32, tile = block.rest + page;

    if (lane >= 8 || !(block.streams >> lane & 1) || tile < stream.tiles_per_slot)
        return block.first + page * stream.tile_bytes;
    return stream.base + (uint64_t)block.entries[tile / stream.tiles_per_slot] * stream.stride +
           (uint64_t)(tile % stream.tiles_per_slot) * stream.tile_bytes;
}

/* VX of page `page`, which the block has. */
static __device__ __forceinline__ const uint4 *page_extra(const lane_stream &stream,
                                                          const lane_block &block, uint32_t page) {
    uint64_t at = (uint64_t)page_tile(stream, block, page);

    return (const uint4 *)__shfl_sync(~0u, at, LAYOUT_VX);
}

/* Requests page `page` of the block into a stage. Every lane of the warp has read what the stage
 * held before. WIDE: VX too, which else is only brought near. */
template <int DIM, bool WIDE>
static __device__ __forceinline__ void page_request(const lane_stream &stream,
                                                    const lane_block &block, uint32_t page,
                                                    uint32_t stage, uint32_t barrier) {
    uint32_t lane = threadIdx.x % 32, bytes = block.page_bytes;
    const uint8_t *from = page_tile(stream, block, page);
    bool mine = lane < 8 && (block.streams >> lane & 1);

    __syncwarp();
    if (!WIDE && (block.streams >> LAYOUT_VX & 1)) {
        const uint8_t *extra = (const uint8_t *)page_extra(stream, block, page);
        if (lane < DIM / 4)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(extra + 128 * lane));
        mine = mine && lane != LAYOUT_VX;
        bytes -= 32 * DIM;
    }
#if PAGE_BULK_COPY
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
    __syncwarp();
    if (mine)
        asm volatile("{\n.reg .b64 first;\n"
                     "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
                     "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1], %2, [%3], first;\n}" ::"r"(stage + stream.to),
                     "l"(from), "r"(stream.tile_bytes), "r"(barrier)
                     : "memory");
#else
    (void)barrier;
    (void)mine;
    (void)bytes;
    copy_streams<DIM, WIDE>(block.streams, from, stage);
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for a stage of a ring of STAGES, the oldest request; `parity` flips each time a stage is
 * used. */
template <int STAGES>
static __device__ __forceinline__ void page_wait(uint32_t barrier, uint32_t parity) {
#if PAGE_BULK_COPY
    asm volatile("{\n.reg .pred done;\nWAIT_PAGE:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra HAVE_PAGE;\nbra WAIT_PAGE;\nHAVE_PAGE:\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#else
    (void)barrier;
    (void)parity;
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
#endif
}

/* --- arithmetic */

/* Four query heads of one KV head as the K product wants them. */
template <int DIM> struct page_queries {
    uint32_t b[DIM / 32][2];
    float scale; /* of the lane's head (lane % 4): q step * log2 e / sqrt(dim) */
    int sum;     /* of its 16-bit q */
};

/* Bits of a where the mask has ones, else of b; the compiler alone would take two operations. */
static __device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
    return out;
}

static __device__ __forceinline__ uint32_t rotate_left(uint32_t x, int bits) {
    return __funnelshift_l(x, x, bits);
}

static __device__ __forceinline__ uint4 load_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

static __device__ __forceinline__ uint2 load_8(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

static __device__ __forceinline__ uint32_t load_4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

static __device__ __forceinline__ void mma_s8(int (&c)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void mma_u8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* The DIM/32 words of a lane in a two-bit plane of K, zero where the tier lacks it. */
template <int DIM>
static __device__ __forceinline__ void load_k_plane(uint32_t (&words)[4], uint32_t at, bool have) {
    words[0] = words[1] = words[2] = words[3] = 0;
    if (!have)
        return;
    if (DIM == 128) {
        uint4 v = load_16(at);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
        uint2 v = load_8(at);
        words[0] = v.x, words[1] = v.y;
    }
}

/* Codes of 16 tokens and 32 dims out of a word of each plane (two of KH). */
static __device__ __forceinline__ void join_k(uint32_t (&a)[4], uint32_t high0, uint32_t high1,
                                              uint32_t middle, uint32_t low) {
    uint32_t n0 = select_bits(middle, low, 0xCCCCCCCC);
    uint32_t n1 = rotate_left(select_bits(low, middle, 0xCCCCCCCC), 2);

    a[0] = select_bits(high0, n0, 0xF0F0F0F0);
    a[1] = rotate_left(select_bits(n0, high0, 0xF0F0F0F0), 4);
    a[2] = select_bits(high1, n1, 0xF0F0F0F0);
    a[3] = rotate_left(select_bits(n1, high1, 0xF0F0F0F0), 4);
}

/* Sixteen-bit q times codes: x[n][j] for tokens 8g + j of head c of group n, half step included. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void page_logits(uint32_t stage, uint32_t streams,
                                                   const page_queries<DIM> (&q)[GROUPS],
                                                   float (&x)[GROUPS][8]) {
    using map = stage_map<DIM>;
    uint32_t lane = threadIdx.x % 32;
    bool low = streams >> LAYOUT_KL & 1;

    uint32_t m[4][4], l[4][4];
    uint4 h[4][DIM / 64];

    /* All loads before the first product: a warp that is alone with its page waits for few. */
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
        load_k_plane<DIM>(m[mt], stage + map::KM + (mt * 32 + lane) * (DIM / 8), true);
        load_k_plane<DIM>(l[mt], stage + map::KL + (mt * 32 + lane) * (DIM / 8), low);
#pragma unroll
        for (int i = 0; i < DIM / 64; i++)
            h[mt][i] = load_16(stage + map::KH + ((mt * (DIM / 64) + i) * 32 + lane) * 16);
    }
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
        int c[GROUPS][4];
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            c[n][0] = c[n][2] = 0;
            c[n][1] = c[n][3] = low ? q[n].sum >> 1 : 2 * q[n].sum;
        }
#pragma unroll
        for (int ks = 0; ks < DIM / 32; ks += 2) {
            uint4 high = h[mt][ks / 2];
            uint32_t a[4];
            join_k(a, high.x, high.y, m[mt][ks], l[mt][ks]);
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
                mma_s8(c[n], a, q[n].b[ks]);
            join_k(a, high.z, high.w, m[mt][ks + 1], l[mt][ks + 1]);
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
                mma_s8(c[n], a, q[n].b[ks + 1]);
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            x[n][2 * mt] = (float)(c[n][0] * 256 + c[n][1]);
            x[n][2 * mt + 1] = (float)(c[n][2] * 256 + c[n][3]);
        }
    }
}

static __device__ __forceinline__ void load_scales(uint32_t at, float (&s)[8]) {
    uint4 v = load_16(at);
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = __half22float2(*(const __half2 *)&words[i]);
        s[2 * i] = pair.x;
        s[2 * i + 1] = pair.y;
    }
}

/* Unbiasing factor, and the half step less 128 in units of 16 codes, as host/leaf.h has them. */
static __device__ __forceinline__ float page_v_factor(uint32_t streams) {
    return streams >> LAYOUT_VX & 1    ? 1.0f
           : streams >> LAYOUT_VR2 & 1 ? 1.0073f
           : streams >> LAYOUT_VR1 & 1 ? 1.0161f
                                       : 1.0372f;
}

static __device__ __forceinline__ float page_v_offset(uint32_t streams) {
    return streams >> LAYOUT_VX & 1    ? 7.96875f
           : streams >> LAYOUT_VR2 & 1 ? 7.5f
           : streams >> LAYOUT_VR1 & 1 ? 7.0f
                                       : 6.0f;
}

/* Weights of the page in 16-bit fixed point, as the V product wants them, relative to the page's
 * own largest logit and V scale; sum and steps are a lane's own share. */
struct page_weights {
    uint32_t b[4]; /* tokens 8g + 2mt, +1 after the transposition */
    float top;     /* largest logit of the lane's head */
    float widest;  /* largest V scale */
    float sum;     /* of weights */
    float steps;   /* of weights times V scales, in steps of the fixed point */
};

/* A block so far; sum and zero are a lane's own share. `zero` gathers the offset of V's codes. N
 * values: of all dims, or of the part of them that a warp folds. */
template <int N> struct leaf_state {
    float max;
    float sum;
    float zero;
    float acc[N];
};

template <int N> static __device__ __forceinline__ void leaf_clear(leaf_state<N> &into) {
    into.max = -INFINITY;
    into.sum = into.zero = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
        into.acc[i] = 0.0f;
}

/* Logits x, in units of x_scale, to the weights of the page. */
template <int DIM>
static __device__ __forceinline__ void page_softmax(uint32_t stage, float (&x)[8], float x_scale,
                                                    page_weights &out) {
    uint32_t g = threadIdx.x % 32 / 4, bits = 0;
    float scale[8], top = -INFINITY, widest = 0.0f;

    load_scales(stage + stage_map<DIM>::META + 16 * g, scale);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x[j] = __fmul_rn(x[j], scale[j]);
        top = fmaxf(top, x[j]);
    }
    load_scales(stage + stage_map<DIM>::META + 128 + 16 * g, scale);
#pragma unroll
    for (int j = 0; j < 8; j++)
        widest = fmaxf(widest, scale[j]);
    top = state_head_max(top);
    out.widest = state_head_max(widest);
    /* Rounded down, or the largest weight passes 65535 where logits are in the hundreds. */
    float to_steps = __fdividef(65535.0f, out.widest), low = __fmul_rd(top, -x_scale);
    out.top = -low;
    out.sum = 0.0f;
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
        uint32_t w[2];
#pragma unroll
        for (int hf = 0; hf < 2; hf++) {
            float p = state_exp2(__fmaf_rn(x[2 * mt + hf], x_scale, low));
            out.sum = __fadd_rn(out.sum, p);
            w[hf] =
                __float_as_uint(__fmaf_rn(__fmul_rn(p, scale[2 * mt + hf]), to_steps, 8388608.0f));
            bits += w[hf];
        }
        out.b[mt] = transpose(__byte_perm(w[0], w[1], 0x4051));
    }
    out.steps = (float)(int)(bits - 8u * 0x4B000000u);
}

/* What joining a page multiplies by. */
struct page_worth {
    float keep; /* the accumulators of the leaf */
    float low;  /* dims 16dt + g of the integer product */
    float high; /* dims 16dt + 8 + g */
};

/* Everything of the page but its values joined into the leaf. */
template <int N>
static __device__ __forceinline__ page_worth page_join(const page_weights &page, uint32_t streams,
                                                       leaf_state<N> &leaf) {
    float max = fmaxf(leaf.max, page.top);
    float keep = state_exp2(__fsub_rn(leaf.max, max)), take = state_exp2(__fsub_rn(page.top, max));
    float step = __fmul_rn(__fmul_rn(take, __fmul_rn(page.widest, 16.0f / 65535.0f)),
                           page_v_factor(streams));
    page_worth worth;

    leaf.max = max;
    leaf.sum = __fmaf_rn(leaf.sum, keep, __fmul_rn(page.sum, take));
    leaf.zero =
        __fmaf_rn(leaf.zero, keep, __fmul_rn(__fmul_rn(page.steps, page_v_offset(streams)), step));
    worth.keep = keep;
    worth.high = __fmul_rn(step, 0.0625f);
    worth.low = streams >> LAYOUT_VX & 1 ? worth.high : step;
    return worth;
}

/* V codes of 16 dims and the 32 tokens with (t >> 2) & 1 = kv: registers of one product. `pair` is
 * VR1 and VR2 joined for kv. */
template <bool WIDE>
static __device__ __forceinline__ void join_v(uint32_t (&a)[4], uint32_t base, uint32_t pair,
                                              uint32_t x0, uint32_t x1, bool eight) {
    uint32_t n0 = select_bits(base, pair, 0xCCCCCCCC);
    uint32_t n1 = select_bits(base << 2, pair >> 2, 0xCCCCCCCC);

    a[0] = n0 & 0x0F0F0F0F;
    a[1] = n0 & 0xF0F0F0F0;
    a[2] = n1 & 0x0F0F0F0F;
    a[3] = n1 & 0xF0F0F0F0;
    if (WIDE && eight) {
        a[0] = rotate_left(select_bits(x0, n0, 0xF0F0F0F0), 4);
        a[1] = select_bits(n0, x0, 0xF0F0F0F0);
        a[2] = rotate_left(select_bits(x1, n1, 0xF0F0F0F0), 4);
        a[3] = select_bits(n1, x1, 0xF0F0F0F0);
    }
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* Integer products of V and the weights of GROUPS times four heads, given out as put(group, dt,
 * low, high): dim 16dt + g and dim 16dt + 8 + g of head c of the group. WIDE: of a page with VX,
 * which is at `extra`. */
template <int DIM, bool WIDE, int GROUPS, class F>
static __device__ __forceinline__ void page_values(uint32_t stage, const uint4 *extra,
                                                   uint32_t streams,
                                                   const page_weights (&weights)[GROUPS], F &&put) {
    using map = stage_map<DIM>;
    uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int four = 0; four < DIM / 64; four++) {
        uint4 r1 = {0, 0, 0, 0}, r2 = {0, 0, 0, 0}, base = {0, 0, 0, 0}, x = {0, 0, 0, 0};
        if (streams >> LAYOUT_VR1 & 1)
            r1 = load_16(stage + map::VR1 + (four * 32 + lane) * 16);
        if (streams >> LAYOUT_VR2 & 1)
            r2 = load_16(stage + map::VR2 + (four * 32 + lane) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int dt = 4 * four + i, c[GROUPS][4] = {};
            uint32_t a[4], p1 = word_of(r1, i), p2 = word_of(r2, i);
            if (i % 2 == 0)
                base = load_16(stage + map::VB + (dt / 2 * 32 + lane) * 16);
            if (WIDE)
                x = __ldcs(extra + dt * 32 + lane);
            join_v<WIDE>(a, word_of(base, 2 * (i % 2)), select_bits(p1, p2, 0xAAAAAAAA), x.x, x.y,
                         WIDE);
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
                mma_u8(c[n], a, weights[n].b[0], weights[n].b[1]);
            join_v<WIDE>(a, word_of(base, 2 * (i % 2) + 1),
                         select_bits(p1 << 1, p2 >> 1, 0xAAAAAAAA), x.z, x.w, WIDE);
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                mma_u8(c[n], a, weights[n].b[2], weights[n].b[3]);
                put(n, dt, (float)(c[n][0] * 256 + c[n][1]), (float)(c[n][2] * 256 + c[n][3]));
            }
        }
    }
}

/* leaf = leaf and the page in `stage`. acc[2dt] is dim 16dt + g, acc[2dt + 1] dim 16dt + 8 + g of
 * head c. `extra` is read where the page has VX. */
template <int DIM, int GROUPS>
static __device__ __forceinline__ void
page_attend(uint32_t stage, const uint4 *extra, uint32_t streams,
            const page_queries<DIM> (&q)[GROUPS], leaf_state<DIM / 8> (&leaf)[GROUPS]) {
    page_weights weights[GROUPS];
    page_worth worth[GROUPS];
    float x[GROUPS][8];

    page_logits<DIM>(stage, streams, q, x);
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        page_softmax<DIM>(stage, x[n], q[n].scale, weights[n]);
        worth[n] = page_join(weights[n], streams, leaf[n]);
        if (__any_sync(~0u, worth[n].keep != 1.0f)) {
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                leaf[n].acc[i] = __fmul_rn(leaf[n].acc[i], worth[n].keep);
        }
    }
    auto add = [&](int n, int dt, float low, float high) {
        float *acc = &leaf[n].acc[2 * dt];
        acc[0] = __fmaf_rn(low, worth[n].low, acc[0]);
        acc[1] = __fmaf_rn(high, worth[n].high, acc[1]);
    };
    if (streams >> LAYOUT_VX & 1)
        page_values<DIM, true>(stage, extra, streams, weights, add);
    else
        page_values<DIM, false>(stage, extra, streams, weights, add);
}

/* Takes the offset of V's codes out and joins the lanes' sums: the state of a block. */
template <int N>
static __device__ __forceinline__ void page_leaf_end(const leaf_state<N> &leaf, state<N> &out) {
    float zero = state_head_sum(leaf.zero);

    out.max = leaf.max;
    out.sum = state_head_sum(leaf.sum);
#pragma unroll
    for (int i = 0; i < N; i++)
        out.acc[i] = __fsub_rn(leaf.acc[i], zero);
}

#endif
