/* kernels/kvops.h - operations on the KV cache: seal, page decode, attention.
 *
 * Responsible for: one argument struct per operation and the table that runs them.
 * Not responsible for: which tier a block is read at, memory, threads: the caller decides and owns.
 *
 * As in ops.h an operation is a set of independent items: kvops_x_items(args) says how many, a call
 * does items [first_item, end_item), and any split over threads gives the same bits. `scratch` has
 * kvops_x_scratch_bytes(args), 64-byte aligned, one per thread, meaningless before and after.
 *
 * Attention sums in a fixed tree, so the bits of a row depend on its own tokens and tiers alone:
 * page -> block (4 pages) -> run (4 blocks) -> node (4 runs) -> all nodes in order, then one
 * Hadamard, then sinks, window pages in order, chunk pages in order; every step folds left, and a
 * leaf that is absent or hidden is left out exactly. Both schedules (prefill and decode) and every
 * host twin use this tree; the bits of plain C and AVX2 differ within the bound in host/leaf.h.
 *
 * Threads: pure on their arguments; items of one call may run on any threads at once.
 * Units: tokens, rows, slot indices; strides in elements; shapes [slowest]..[fastest].
 */
#ifndef KERNELS_KVOPS_H
#define KERNELS_KVOPS_H

#include "kernels/layout.h"

enum {
    KVOPS_CHUNK_ROWS_MAX = 256,
    KVOPS_TILE_QUERIES = 96, /* rows times group of one prefill item, about */
    KVOPS_GROUP_MAX = 16,    /* query heads per KV head */
    KVOPS_PARTS = 8,         /* of a sequence's blocks, where a device shares few rows among many */
    KVOPS_PART_VECTORS = 256 /* rows times group that are few */
};

/* The device pool: slot i at slots + i * layout_slot_bytes, META frame i at meta + i *
 * layout_meta_frame_bytes. Both 64-byte aligned. */
struct kvops_pool {
    struct layout_geometry geometry;
    uint8_t *slots;
    uint8_t *meta;
};

/* A sealed block as attention reads it: streams at layout_stream_table() in `slot` (KH 0..3, KM
 * 4..5, KL 6..7, VB 8..9, VR1 10, VR2 11, VX 12..15; BF16 0..31, FP8 0..15, K8I4 0..12). Entries of
 * streams that `tier` does not read are ignored. The blocks of one sequence are all planes, all
 * BF16, all FP8 or all K8I4. */
struct kvops_block {
    uint32_t slot[LAYOUT_BLOCK_SLOTS];
    uint32_t meta_frame;
    uint8_t tier; /* enum layout_tier: the tier to read at */
};

struct kvops_page {
    uint32_t slot[LAYOUT_PAGE_SLOTS]; /* BF16 page or sinks */
};

/* Encodes 256 window tokens, all layers and heads. Item: layer * kv_heads + head. */
struct kvops_seal {
    struct kvops_pool pool;
    struct kvops_page pages[LAYOUT_BLOCK_PAGES]; /* read */
    struct kvops_block block; /* written: the streams of block.tier (not BF16), META with planes */
    int32_t *bad_token; /* [items], written: first token (0..255) whose K or V is not finite or
                                 too large for a scale (absmax > 65504 * 128; V of K8I4: 65504), or
                                 -1 */
};
/* After all items: 1 and the first bad layer and token, or 0 when every vector was encoded. */
int kvops_seal_bad(const struct kvops_seal *args, uint32_t *layer_out, uint32_t *token_out);

/* Rows of a chunk into one BF16 page: tokens [page_token, page_token + count) of the page, at most
 * up to its end. chunk is [layer][K, V][kv_head][chunk_rows][dim]. Item: a layer. */
struct kvops_append {
    struct kvops_pool pool;
    const uint16_t *chunk;
    uint32_t chunk_rows;
    uint32_t first_row;
    uint32_t count;
    struct kvops_page page;
    uint32_t page_token;
};

/* Reads one page at a tier, in the rotated domain (FP8 and V of K8I4: as it is). One item. BF16 is
 * not a tier here. */
struct kvops_decode_page {
    struct kvops_pool pool;
    const struct kvops_block *block;
    struct layout_at at;
    float *k;        /* [64][dim]: scale * (code + half step) */
    float *v;        /* [64][dim], unbiasing factor included */
    int8_t *k_codes; /* [64][dim]: 8-bit codes with the bits that the tier lacks zero; e4m3 bits */
    int8_t *v_codes;
};

/* One sequence in a batch of attention. All tokens of blocks, sinks and window are visible to every
 * row; row i also sees tokens 0..i of the chunk (NULL chunk_k: no chunk). A hidden leaf is treated
 * as absent: bit b % 64 of hidden_blocks[b / 64], bit p of hidden_pages for window page p. */
struct kvops_seq {
    const struct kvops_block *blocks;
    uint32_t block_count;
    struct kvops_page sinks;
    uint32_t sink_tokens; /* 0..64 */
    const struct kvops_page *window;
    uint32_t window_tokens;  /* 0..512, pages filled in order */
    const uint16_t *chunk_k; /* BF16 [kv_head][token][dim], token 0 = the seq's first row */
    const uint16_t *chunk_v;
    size_t chunk_head_stride;      /* elements from one kv head to the next */
    const uint64_t *hidden_blocks; /* NULL: none */
    uint32_t hidden_pages;
    uint32_t first_row; /* in q and out; rows are consecutive positions */
    uint32_t row_count; /* 1..KVOPS_CHUNK_ROWS_MAX; decode: 1 */
};

/* out[row][q_head][dim] = attention of q[row][q_head][dim] (fp32 after RoPE, 64-byte aligned, rows
 * contiguous) in one layer, scaled by 1/sqrt(dim). q_heads = kv_heads * group. A row that sees no
 * token at all gives zeros. NaN in q gives NaN in that row's head. */
struct kvops_attend {
    struct kvops_pool pool;
    uint32_t layer;
    uint32_t q_heads;
    const float *q;
    float *out;
    const struct kvops_seq *seqs;
    uint32_t seq_count;
    float *partials;        /* decode and combine: kvops_partial_bytes, 64-byte aligned */
    uint64_t partial_bytes; /* prefill on a device only: of partials, kvops_part_bytes or more */
};
uint64_t kvops_partial_bytes(const struct kvops_attend *args);
/* For the parts of one sequence; with more, more sequences run at once. */
uint64_t kvops_part_bytes(const struct kvops_attend *args);

/* Items: seal, layer and head; prefill, (seq, kv head, tile of rows); decode, (seq, kv head, run of
 * 4 blocks or tail page); combine, (seq, q head), after every decode item has ended. Sequences of
 * more than one row are for prefill; decode takes row_count 1 only. */
uint32_t kvops_seal_items(const struct kvops_seal *args);
uint32_t kvops_append_items(const struct kvops_append *args);
uint32_t kvops_prefill_items(const struct kvops_attend *args);
uint32_t kvops_decode_items(const struct kvops_attend *args);
uint32_t kvops_combine_items(const struct kvops_attend *args);
size_t kvops_seal_scratch_bytes(const struct kvops_seal *args);
size_t kvops_prefill_scratch_bytes(const struct kvops_attend *args);
size_t kvops_decode_scratch_bytes(const struct kvops_attend *args);
size_t kvops_combine_scratch_bytes(const struct kvops_attend *args);

struct kvops_table {
    const char *name; /* "host-c" or "host-avx2" */
    void (*seal)(const struct kvops_seal *args, uint32_t first_item, uint32_t end_item,
                 void *scratch);
    void (*append)(const struct kvops_append *args, uint32_t first_item, uint32_t end_item);
    void (*decode_page)(const struct kvops_decode_page *args);
    void (*prefill)(const struct kvops_attend *args, uint32_t first_item, uint32_t end_item,
                    void *scratch);
    void (*decode)(const struct kvops_attend *args, uint32_t first_item, uint32_t end_item,
                   void *scratch);
    void (*combine)(const struct kvops_attend *args, uint32_t first_item, uint32_t end_item,
                    void *scratch);
};

const struct kvops_table *kvops_host_c(void);
/* Only to be called into on a CPU with AVX2, FMA and F16C (ops_cpu_has_avx2 in ops.h). */
const struct kvops_table *kvops_host_avx2(void);

#endif
