/* engine/model/forward.c - one step of the model over a batch of rows.
 *
 * Responsible for: the order of operations in a layer, attention as chunk or as single rows, rows
 * that need logits, finding values that are not finite.
 * Not responsible for: packing and workspace (forward_make.c).
 */
#include "engine/model/forward.h"

#include "engine/model/forward_inner.h"

#include <assert.h>
#include <string.h>

static int row_is_finite(const float *values, uint32_t count) {
    uint32_t bad = 0;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return !bad;
}

static void note_bad(struct forward_seq *seq, uint32_t row, uint32_t layer) {
    if (seq->bad_layer >= 0)
        return;
    seq->bad_layer = (int32_t)layer;
    seq->bad_row = row;
}

static void check_rows(const struct forward *forward, struct forward_seq *seqs, uint32_t count,
                       uint32_t layer) {
    uint32_t hidden = forward->geometry.hidden;

    for (uint32_t i = 0; i < count; i++)
        for (uint32_t row = 0; row < seqs[i].kv.row_count && seqs[i].bad_layer < 0; row++) {
            const float *x = forward->x + (size_t)(seqs[i].kv.first_row + row) * hidden;
            if (!row_is_finite(x, hidden))
                note_bad(&seqs[i], row, layer);
        }
}

/* Places the rows of all sequences one after another; returns how many there are. */
static uint32_t place_rows(struct forward *forward, struct forward_seq *seqs, uint32_t count) {
    uint32_t rows = 0, chunks = 0;

    for (uint32_t i = 0; i < count; i++) {
        struct forward_seq *seq = &seqs[i];
        assert(seq->kv.row_count >= 1 && seq->kv.row_count <= FORWARD_CHUNK_ROWS);
        chunks += seq->kv.row_count > 1;
        seq->kv.first_row = rows;
        seq->bad_layer = -1;
        seq->bad_row = 0;
        for (uint32_t row = 0; row < seq->kv.row_count; row++, rows++) {
            assert(rows < forward->rows_max);
            assert(seq->position + row < forward->positions);
            forward->ids[rows] = seq->ids[row];
            forward->position[rows] = (uint32_t)(seq->position + row);
#ifdef BREAK_POSITION
            forward->position[rows] = row;
#endif
        }
    }
    assert(chunks <= 1 && count - chunks <= forward->singles_max);
    return rows;
}

static uint16_t *chunk_of(const struct forward *forward, uint32_t layer, uint32_t value,
                          uint32_t row) {
    const struct weights_geometry *g = &forward->geometry;
    size_t head_stride = (size_t)forward->rows_max * g->head_dim;

    return forward->chunk + ((size_t)layer * 2 + value) * g->kv_heads * head_stride +
           (size_t)row * g->head_dim;
}

static struct ops_matmul product(const struct ops_weight *weight, const float *x, float *y,
                                 uint32_t rows) {
    return (struct ops_matmul){.weight = *weight,
                               .x = x,
                               .y = y,
                               .x_stride = weight->k,
                               .y_stride = weight->n,
                               .rows = rows};
}

static void norm(struct forward *forward, const float *x, const float *gain, float *y,
                 uint32_t rows) {
    struct ops_rmsnorm args = {.x = x,
                               .gain = gain,
                               .y = y,
                               .x_stride = forward->geometry.hidden,
                               .y_stride = forward->geometry.hidden,
                               .rows = rows,
                               .width = forward->geometry.hidden,
                               .eps = forward->geometry.rms_eps};

    device_rmsnorm(forward->device, &args);
}

/* x += weight * y for one weight. */
static void add_product(struct forward *forward, const struct ops_weight *weight, const float *y,
                        uint32_t rows) {
    struct ops_matmul args = product(weight, y, forward->x, rows);
    struct device_matmuls products = {&args, 1, DEVICE_MATMUL};

    args.residual = forward->x;
    device_matmul(forward->device, &products);
}

static void project(struct forward *forward, const struct forward_layer *weights, uint32_t layer,
                    uint32_t rows) {
    const struct weights_geometry *g = &forward->geometry;
    struct ops_matmul args[3] = {product(&weights->q, forward->normed, forward->q, rows),
                                 product(&weights->k, forward->normed, forward->k, rows),
                                 product(&weights->v, forward->normed, forward->v, rows)};
    struct device_matmuls products = {args, 3, DEVICE_MATMUL};
    struct ops_rope rope = {.q = forward->q,
                            .k = forward->k,
                            .v = forward->v,
                            .q_stride = (size_t)g->heads * g->head_dim,
                            .kv_stride = (size_t)g->kv_heads * g->head_dim,
                            .dest = forward->dest,
                            .positions = forward->position,
                            .cos_table = forward->cos_table,
                            .sin_table = forward->sin_table,
                            .rows = rows,
                            .q_heads = g->heads,
                            .kv_heads = g->kv_heads,
                            .head_dim = g->head_dim,
                            .pairing = g->rope == WEIGHTS_ROPE_ADJACENT ? OPS_PAIR_ADJACENT
                                                                        : OPS_PAIR_HALVES};

    device_matmul(forward->device, &products);
    for (uint32_t row = 0; row < rows; row++)
        forward->dest[row] =
            (struct ops_kv_dest){chunk_of(forward, layer, 0, row), chunk_of(forward, layer, 1, row),
                                 (size_t)forward->rows_max * g->head_dim};
    device_rope(forward->device, &rope);
}

static void attend(struct forward *forward, const struct kvops_pool *pool,
                   const struct forward_seq *seqs, uint32_t count, uint32_t layer) {
    struct kvops_attend args = {.pool = *pool,
                                .layer = layer,
                                .q_heads = forward->geometry.heads,
                                .q = forward->q,
                                .out = forward->attended,
                                .partials = forward->partials};
    uint32_t singles = 0;

    for (uint32_t i = 0; i < count; i++) {
        int single = seqs[i].kv.row_count == 1;
        struct kvops_seq *seq = single ? &forward->single_seqs[singles++] : &forward->chunk_seq;
        *seq = seqs[i].kv;
        seq->chunk_k = chunk_of(forward, layer, 0, seq->first_row);
        seq->chunk_v = chunk_of(forward, layer, 1, seq->first_row);
        seq->chunk_head_stride = (size_t)forward->rows_max * forward->geometry.head_dim;
    }
    if (singles) {
        args.seqs = forward->single_seqs;
        args.seq_count = singles;
        device_decode(forward->device, &args);
    }
    if (singles < count) {
        args.seqs = &forward->chunk_seq;
        args.seq_count = 1;
        device_prefill(forward->device, &args);
    }
}

static void feed_forward(struct forward *forward, const struct forward_layer *weights,
                         uint32_t rows) {
    struct ops_matmul args[2] = {product(&weights->gate, forward->normed, forward->gate, rows),
                                 product(&weights->up, forward->normed, forward->up, rows)};
    struct device_matmuls products = {args, 2, DEVICE_MATMUL};
    struct ops_swiglu swiglu = {.gate = forward->gate,
                                .up = forward->up,
                                .y = forward->gate,
                                .count = (size_t)rows * forward->geometry.ffn};

    device_matmul(forward->device, &products);
    device_swiglu(forward->device, &swiglu);
    add_product(forward, &weights->down, forward->gate, rows);
}

/* Logits of the rows in forward->head_rows[0 … count), one tile. */
static void head_tile(struct forward *forward, struct forward_seq *seqs, uint32_t count) {
    uint32_t hidden = forward->geometry.hidden;
    struct ops_matmul args = product(&forward->output, forward->normed, forward->logits, count);
    struct device_matmuls products = {&args, 1, DEVICE_HEAD};

    for (uint32_t i = 0; i < count; i++) {
        const struct forward_head_row *at = &forward->head_rows[i];
        memcpy(forward->head_x + (size_t)i * hidden,
               forward->x + (size_t)(seqs[at->seq].kv.first_row + at->row) * hidden,
               hidden * sizeof(float));
    }
    norm(forward, forward->head_x, forward->output_norm, forward->normed, count);
    device_matmul(forward->device, &products);
#ifdef BREAK_ROW_BITS
    for (uint32_t i = 1; i < count; i++)
        forward->logits[(size_t)i * forward->geometry.vocab] *= 1.000001f;
#endif
    for (uint32_t i = 0; i < count; i++) {
        const struct forward_head_row *at = &forward->head_rows[i];
        struct forward_seq *seq = &seqs[at->seq];
        const float *logits = forward->logits + (size_t)i * forward->geometry.vocab;
        if (!row_is_finite(logits, forward->geometry.vocab))
            note_bad(seq, at->row, forward->geometry.layers);
        if (seq->row && (seq->bad_layer < 0 || at->row < seq->bad_row))
            seq->row(seq->context, at->row, logits);
    }
}

static void give_logits(struct forward *forward, struct forward_seq *seqs, uint32_t count) {
    uint32_t filled = 0;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t rows = seqs[i].kv.row_count;
        uint32_t row = seqs[i].logits == FORWARD_ALL ? 0 : rows - 1;
        if (seqs[i].logits == FORWARD_NONE)
            continue;
        for (; row < rows; row++) {
            forward->head_rows[filled++] = (struct forward_head_row){i, row};
            if (filled == FORWARD_HEAD_ROWS) {
                head_tile(forward, seqs, filled);
                filled = 0;
            }
        }
    }
    if (filled)
        head_tile(forward, seqs, filled);
}

void forward_run(struct forward *forward, const struct kvops_pool *pool, struct forward_seq *seqs,
                 uint32_t count) {
    uint32_t rows = place_rows(forward, seqs, count);
    struct ops_embed embed = {.table = forward->embedding,
                              .ids = forward->ids,
                              .out = forward->x,
                              .out_stride = forward->geometry.hidden,
                              .rows = rows};

    if (!rows)
        return;
    device_embed(forward->device, &embed);
    for (uint32_t layer = 0; layer < forward->geometry.layers; layer++) {
        const struct forward_layer *weights = &forward->layer[layer];
        norm(forward, forward->x, weights->attn_norm, forward->normed, rows);
        project(forward, weights, layer, rows);
        attend(forward, pool, seqs, count, layer);
        add_product(forward, &weights->o, forward->attended, rows);
        norm(forward, forward->x, weights->ffn_norm, forward->normed, rows);
        feed_forward(forward, weights, rows);
        check_rows(forward, seqs, count, layer);
    }
    give_logits(forward, seqs, count);
}

const uint16_t *forward_chunk(const struct forward *forward) {
    return forward->chunk;
}

uint32_t forward_chunk_rows(const struct forward *forward) {
    return forward->rows_max;
}
