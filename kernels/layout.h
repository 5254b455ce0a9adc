/* kernels/layout.h - where every stored byte of K and V lies, in slots and on disk.
 *
 * Responsible for: streams, tiers, sizes, tile order, the bit maps of DESIGN section 4.1, BF16 page
 * order, and which tokens are sinks, blocks and window.
 * Not responsible for: values of codes (kvops.h), owning slots, digests.
 *
 * The numbers of streams and tiers are stored; they never change. Geometry is checked once with
 * layout_geometry_valid; every other function trusts its arguments (an assert is our own bug).
 *
 * Threads: pure.
 * Units: bytes, slots, tokens; a slot ordinal counts the slots of one stream from 0.
 */
#ifndef KERNELS_LAYOUT_H
#define KERNELS_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

enum {
    LAYOUT_PAGE_TOKENS = 64,
    LAYOUT_BLOCK_TOKENS = 256,
    LAYOUT_BLOCK_PAGES = 4,
    LAYOUT_SINK_TOKENS = 64,
    LAYOUT_WINDOW_TOKENS_MIN = 256, /* once a block is sealed */
    LAYOUT_WINDOW_TOKENS_MAX = 511,
    LAYOUT_WINDOW_PAGES_MAX = 8,
    LAYOUT_PAGE_SLOTS = 8,   /* slots of a BF16 page */
    LAYOUT_BLOCK_SLOTS = 32, /* slots of a BF16 block */
    LAYOUT_RUN_TOKENS = 16,  /* tokens of a BF16 run, which never straddles a slot */
    LAYOUT_META_TILE_BYTES = 256,
    LAYOUT_HALF_TOKENS = 32, /* of a page whose values are one byte each */
    LAYOUT_V_ENTRY = 8,      /* V's first slot in streams FP8 and K8I4 … */
    LAYOUT_GROUP_ENTRY = 12, /* … and that of scales and minima in K8I4 */
    LAYOUT_GROUP_DIMS = 64,  /* values of V that share a scale and a minimum */
    LAYOUT_SLOT_UNIT = 4096,
    LAYOUT_LAYERS_MAX = 512,
    LAYOUT_KV_HEADS_MAX = 256
};

/* The planes come first, so that a plane's number is its bit in a stream mask. */
enum layout_stream {
    LAYOUT_KH = 0,     /* K bits 7..4 of the code */
    LAYOUT_KM = 1,     /* K bits 3..2 */
    LAYOUT_KL = 2,     /* K bits 1..0 */
    LAYOUT_VB = 3,     /* V bits 7..6 */
    LAYOUT_VR1 = 4,    /* V bit 5 */
    LAYOUT_VR2 = 5,    /* V bit 4 */
    LAYOUT_VX = 6,     /* V bits 3..0 */
    LAYOUT_META = 7,   /* fp16 scales: a frame beside the slots, no slot */
    LAYOUT_BF16 = 8,   /* a whole block unsealed: four BF16 pages, page p in slots 8p..8p+7 */
    LAYOUT_PAGE = 9,   /* BF16 window page */
    LAYOUT_SINKS = 10, /* BF16 page of the first 64 tokens */
    LAYOUT_FP8 = 11,   /* a whole block of recipe fp8: K in slots 0..7, V in 8..15 */
    LAYOUT_K8I4 = 12,  /* … of recipe v1: K in slots 0..7, V in 8..11, scales and minima in 12 */
    LAYOUT_STREAM_COUNT
};

enum layout_tier {
    LAYOUT_K8V8 = 0,
    LAYOUT_K8V4 = 1,
    LAYOUT_K6V4 = 2,
    LAYOUT_K6V3 = 3,
    LAYOUT_K6V2 = 4,
    LAYOUT_K8V3 = 5,
    LAYOUT_K8V2 = 6,
    LAYOUT_TIER_BF16 = 7,
    LAYOUT_TIER_FP8 = 8, /* those behind BF16 are the codes of the control recipes */
    LAYOUT_TIER_K8I4 = 9,
    LAYOUT_TIER_COUNT
};

struct layout_geometry {
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim; /* 64 or 128 */
};

/* 1 when the kernels can hold it: both counts from 1 to their maximum, head_dim 64 or 128. */
int layout_geometry_valid(const struct layout_geometry *geometry);
const char *layout_stream_name(enum layout_stream stream); /* "KH", ... ; never NULL */
const char *layout_tier_name(enum layout_tier tier);       /* "K8V4", ... ; never NULL */

/* 1 for a stream of a sealed block, 0 for window pages, sinks and what is no stream. */
int layout_stream_of_block(uint32_t stream);
uint32_t layout_stream_slots(enum layout_stream stream); /* 0 for META */
uint32_t layout_tier_streams(enum layout_tier tier);     /* mask of 1u << stream, META included */
uint32_t layout_tier_slots(enum layout_tier tier);       /* per block */
/* First entry of a plane in a block's slot table of 32 (kvops_block.slot); a whole block: 0. */
uint32_t layout_stream_table(enum layout_stream stream);
uint32_t layout_tier_k_bits(enum layout_tier tier); /* 8 or 6; BF16: 16 */
uint32_t layout_tier_v_bits(enum layout_tier tier); /* 8, 4, 3 or 2; BF16: 16 */
int layout_tier_is_control(enum layout_tier tier);  /* FP8 and K8I4 */

uint64_t layout_slot_raw_bytes(const struct layout_geometry *geometry);   /* layers*heads*32*dim */
uint64_t layout_slot_bytes(const struct layout_geometry *geometry);       /* padded to 4 KiB */
uint64_t layout_meta_frame_bytes(const struct layout_geometry *geometry); /* layers*heads*1024 */
/* Stored bytes of a whole stream: META one frame, else raw slot bytes times slots. On disk the
 * slots follow each other without padding, in slot order. */
uint64_t layout_stream_bytes(const struct layout_geometry *geometry, enum layout_stream stream);
/* Bytes of one page of 64 tokens of one layer and head in a plane or META. */
uint32_t layout_tile_bytes(const struct layout_geometry *geometry, enum layout_stream stream);

struct layout_place {
    uint32_t slot; /* ordinal within the stream; 0 for META */
    uint64_t off;  /* bytes into that slot, or into the META frame */
};
/* One page of one layer and head inside a block, as the kernels address it. */
struct layout_at {
    uint32_t layer;
    uint32_t head;
    uint32_t page; /* 0..3 in the block */
};
struct layout_place layout_tile(const struct layout_geometry *geometry, enum layout_stream stream,
                                struct layout_at at);
/* The 16 tokens 16 * run .. 16 * run + 15 of K (value 0) or V (value 1) of a BF16 page: 32 *
 * head_dim bytes [token][dim] in one slot. `at.page` is ignored: a page has its own 8 slots. */
struct layout_place layout_run(const struct layout_geometry *geometry, struct layout_at at,
                               uint32_t value, uint32_t run);

/* Byte within a tile and lowest bit of the field of token t (0..63), dim d. Not for META. */
struct layout_bits {
    uint32_t byte;
    uint32_t bit;
};
struct layout_bits layout_bits(enum layout_stream stream, uint32_t head_dim, uint32_t t,
                               uint32_t d);
/* Bits of a value in a plane (4, 2 or 1) and where they stand in the 8-bit code. */
uint32_t layout_plane_width(enum layout_stream stream);
uint32_t layout_plane_shift(enum layout_stream stream);

/* The control codes hold one page after the other, [layer][kv_head] in each. K of both, and V of
 * FP8 from LAYOUT_V_ENTRY on: tokens 32 * half .. 32 * half + 31, 32 * head_dim bytes
 * [token][dim], in one of eight slots. */
struct layout_place layout_half(const struct layout_geometry *geometry, struct layout_at at,
                                uint32_t half);
/* V of K8I4: 32 * head_dim bytes [token][dim / 2], the even dim in the low bits; slot 0..3 from
 * LAYOUT_V_ENTRY on. */
struct layout_place layout_nibbles(const struct layout_geometry *geometry, struct layout_at at);
/* Scales of K8I4: 8 * head_dim bytes: fp16 s_k[64], then for each token and group of 64 dims of V
 * fp16 scale and minimum, then zeros; slot 0 from LAYOUT_GROUP_ENTRY on. */
struct layout_place layout_groups(const struct layout_geometry *geometry, struct layout_at at);

/* A BF16 page on disk holds its n tokens only: [layer][kv_head][K, V][n][dim]. `slots` are the 8
 * addresses of the page's slots; `dense` has layout_dense_bytes. n is 1..64. */
uint64_t layout_dense_bytes(const struct layout_geometry *geometry, uint32_t tokens);
void layout_pack(const struct layout_geometry *geometry, const uint8_t *const slots[8],
                 uint32_t tokens, uint8_t *dense);
void layout_unpack(const struct layout_geometry *geometry, const uint8_t *dense, uint32_t tokens,
                   uint8_t *const slots[8]);

/* How n_kv tokens divide: sinks + 256 * blocks + window. */
uint32_t layout_sink_tokens(uint64_t n_kv);
uint64_t layout_sealed_blocks(uint64_t n_kv); /* max(0, floor((n_kv - 320) / 256)) */
uint32_t layout_window_tokens(uint64_t n_kv);
uint32_t layout_window_pages(uint64_t n_kv);

#endif
