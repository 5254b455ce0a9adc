/* engine/model/forward_inner.h - what stands behind a struct forward.
 *
 * Responsible for: what forward_make.c fills and forward.c uses.
 * Not responsible for: anything outside these two files.
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
    float *x, *normed;            /* [rows_max][hidden] */
    float *q, *attended;          /* [rows_max][heads][head_dim] */
    float *k, *v;                 /* [rows_max][kv_heads][head_dim] */
    float *gate, *up;             /* [rows_max][ffn] */
    float *logits;                /* [FORWARD_HEAD_ROWS][vocab] */
    struct ops_candidate *top;    /* [FORWARD_HEAD_ROWS][OPS_TOP_MAX] */
    float *partials;
    uint16_t *chunk;          /* [layers][K, V][kv_heads][rows_max][head_dim] */
    struct ops_kv_dest *dest; /* [layers][rows_max], into chunk */
    uint8_t *control;         /* the device's copy of control_host */
    uint64_t control_bytes;

    /* What a step is told beside its tensors, built by the processor and copied in one piece: ids,
     * positions and marks [rows_max] each, then [layer][seq] sequences and what they point at. */
    uint8_t *control_host;
    uint64_t told_bytes; /* of it, in this step */
    float *logits_host;  /* [FORWARD_HEAD_ROWS][vocab]; NULL where the device's are mapped */
    struct ops_candidate *top_host; /* as top; NULL where the device has none */
    int32_t *bad_host;              /* [rows_max] */
    struct kvops_seq *seqs;         /* [singles_max + 1], with host pointers; chunks come last */
    struct forward_head_row head_rows[FORWARD_HEAD_ROWS];
};

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
