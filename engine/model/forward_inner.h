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

    uint8_t *weights; /* one allocation */
    uint64_t weight_bytes;
    struct forward_layer *layer;
    struct ops_weight embedding, output;
    const float *output_norm;

    uint8_t *workspace; /* one allocation, the members below point into it */
    uint64_t workspace_bytes;
    float *cos_table, *sin_table; /* [positions][head_dim / 2] */
    float *x, *normed;            /* [rows_max][hidden] */
    float *q, *attended;          /* [rows_max][heads][head_dim] */
    float *k, *v;                 /* [rows_max][kv_heads][head_dim] */
    float *gate, *up;             /* [rows_max][ffn] */
    float *head_x;                /* [FORWARD_HEAD_ROWS][hidden] */
    float *logits;                /* [FORWARD_HEAD_ROWS][vocab] */
    float *partials;
    uint16_t *chunk; /* [layers][K, V][kv_heads][rows_max][head_dim] */
    uint32_t *ids, *position;
    struct ops_kv_dest *dest;
    struct kvops_seq *single_seqs; /* [singles_max] */
    struct kvops_seq chunk_seq;
    struct forward_head_row head_rows[FORWARD_HEAD_ROWS];
};

#endif
