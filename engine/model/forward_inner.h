/* engine/model/forward_inner.h - what stands behind a struct forward.
 *
 * Responsible for: what forward_make.c fills, forward.c and forward_beside.c use.
 * Not responsible for: anything outside these three files.
 *
 * Threads: as forward.h.
 * Units: elements.
 */
#ifndef ENGINE_MODEL_FORWARD_INNER_H
#define ENGINE_MODEL_FORWARD_INNER_H

#include "engine/model/forward.h"
#include "store/base/bytes.h"

enum { FORWARD_ALIGN_BYTES = 64 };

struct forward_layer {
    const float *attn_norm, *ffn_norm;
    struct ops_weight q, k, v, o, gate, up, down;
};

struct forward_head_row {
    uint32_t seq, row;
};

/* What is a run's own, whatever runs between two pieces of it. What it is told beside its tensors
 * is built by the processor and copied in one piece: ids, positions and marks [rows_max] each, then
 * [layer][seq] sequences and what they point at. */
struct forward_own {
    uint32_t plan;    /* of its single rows, which the device keeps */
    float *x;         /* [rows][hidden] */
    uint8_t *control; /* the device's copy of control_host */
    uint64_t control_bytes;
    uint8_t *control_host;
    uint64_t told_bytes;    /* of it */
    float *logits_host;     /* [FORWARD_HEAD_ROWS][vocab]; NULL where the device's are mapped */
    int32_t *bad_host;      /* [rows_max] */
    struct kvops_seq *seqs; /* with host pointers; chunks come last */
    struct forward_head_row head_rows[FORWARD_HEAD_ROWS];
};

struct forward {
    const struct kv_alloc *alloc;
    struct device *device;
    struct weights_geometry geometry;
    uint32_t singles_max, rows_max, positions;

    uint8_t *weights; /* one allocation of the device */
    uint64_t weight_bytes;
    struct forward_layer *layer;
    struct ops_weight embedding, output;
    const float *output_norm;
    struct kv_digest tables; /* of the RoPE tables */

    uint8_t *workspace; /* one allocation of the device, the members below point into it */
    uint64_t workspace_bytes;
    float *cos_table, *sin_table; /* [positions][head_dim / 2] */
    float *normed;                /* [rows_max][hidden] */
    float *q, *attended;          /* [rows_max][heads][head_dim] */
    float *k, *v;                 /* [rows_max][kv_heads][head_dim] */
    float *gate, *up;             /* [rows_max][ffn] */
    float *logits;                /* [FORWARD_HEAD_ROWS][vocab] */
    struct ops_candidate *top;    /* [FORWARD_HEAD_ROWS][OPS_TOP_MAX] */
    float *partials;
    uint64_t partial_bytes;
    uint16_t *chunk;          /* [layers][K, V][kv_heads][rows_max][head_dim] */
    struct ops_kv_dest *dest; /* [layers][rows_max], into chunk */

    struct ops_candidate *top_host; /* as top; NULL where the device has none */
    uint32_t seqs_max;
    struct forward_own step; /* of whole runs */
    struct forward_own *own; /* of the one that is running */
};

/* What a layer is computed over. */
struct forward_rows {
    const struct kvops_pool *pool;
    uint32_t count, seqs, singles; /* single rows come first */
};
/* What a tile of the head gives besides the marks: whole rows of logits, or the best of each. */
struct forward_wanted {
    uint32_t rows; /* 0: nothing */
    uint32_t top;  /* of each row; 0: all logits */
};

/* All of them for the run that forward->own is. Tells the device of all rows. */
struct forward_rows forward_inner_begin(struct forward *forward, const struct kvops_pool *pool,
                                        struct forward_seq *seqs, uint32_t count);
/* Before the layers of a piece. */
void forward_inner_plan(struct forward *forward, const struct forward_rows *rows);
/* A value that is not finite stays so in its row, so looking once behind the last layer is enough;
 * `find` looks behind every one. */
void forward_inner_layers(struct forward *forward, const struct forward_rows *rows, uint32_t first,
                          uint32_t end, int find);
/* Fetches what is wanted of the rows in own->head_rows[0 … wanted->rows), at most one tile, and the
 * marks of all rows. DEVICE. */
enum kv_err forward_inner_tile(struct forward *forward, struct forward_seq *seqs,
                               const struct forward_rows *rows,
                               const struct forward_wanted *wanted);
/* Gives row `index` of the tile that was fetched last to its sequence. Where own has logits of its
 * own others may run meanwhile. */
void forward_inner_give(const struct forward *forward, const struct forward_own *own,
                        struct forward_seq *seqs, uint32_t index);
/* Bytes that a run's sequences are told in; they share what they point at. */
uint64_t forward_inner_control_bytes(const struct forward *forward, uint32_t seqs,
                                     uint32_t different);

/* Places of the parts of the control block. */
static inline uint64_t forward_inner_ids(const struct forward *forward) {
    (void)forward;
    return 0;
}
static inline uint64_t forward_inner_positions(const struct forward *forward) {
    return (uint64_t)forward->rows_max * sizeof(uint32_t);
}
static inline uint64_t forward_inner_bad(const struct forward *forward) {
    return 2ull * forward->rows_max * sizeof(uint32_t);
}
static inline uint64_t forward_inner_seqs(const struct forward *forward) {
    return kv_round_up(3ull * forward->rows_max * sizeof(uint32_t), FORWARD_ALIGN_BYTES);
}

#endif
