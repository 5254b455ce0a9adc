/* engine/model/forward_make.c - weights packed for the kernels, and the workspace of a step.
 *
 * Responsible for: sizes, one allocation for weights and one for the workspace, RoPE tables, the
 * scratch that the kernels need at most.
 * Not responsible for: the step (forward.c).
 */
#include "engine/model/forward_inner.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

enum { ALIGN_BYTES = 64 };

/* Hands out parts of one allocation; a pass with base NULL only adds up. */
struct cutter {
    uint8_t *base;
    uint64_t off;
    int overflow;
};

static void *cut(struct cutter *cutter, uint64_t count, uint64_t bytes_each) {
    uint64_t bytes, end;
    uint8_t *at = cutter->base ? cutter->base + cutter->off : NULL;

    if (!kv_mul_u64(count, bytes_each, &bytes) || !kv_add_u64(cutter->off, bytes, &end) ||
        end > UINT64_MAX - ALIGN_BYTES) {
        cutter->overflow = 1;
        return NULL;
    }
    cutter->off = kv_round_up(end, ALIGN_BYTES);
    return at;
}

static enum kv_err pack(struct cutter *cutter, const struct weights_matrix *matrix,
                        const char *name, struct ops_weight *weight_out, struct kv_diag *diag) {
    enum ops_type type = (enum ops_type)matrix->type;
    uint64_t bytes = ops_weight_bytes(type, matrix->rows, matrix->columns);
    uint8_t *packed;

    if (bytes == 0)
        return kv_diag_set(diag, KV_ERR_MISMATCH,
                           "tensor %s (%s, %u x %u) cannot be computed with: use another file",
                           name, gguf_type_name(matrix->type), matrix->rows, matrix->columns);
    packed = cut(cutter, bytes, 1);
    *weight_out = (struct ops_weight){type, matrix->rows, matrix->columns, packed};
    if (packed)
        ops_weight_pack(weight_out, matrix->data, packed, 0,
                        (matrix->rows + OPS_PANEL - 1) / OPS_PANEL);
    return KV_OK;
}

static const float *keep(struct cutter *cutter, const float *values, uint32_t count) {
    float *kept = cut(cutter, count, sizeof *kept);

    if (kept)
        memcpy(kept, values, count * sizeof *kept);
    return kept;
}

/* One pass over all tensors: sizes with base NULL, contents otherwise. */
static enum kv_err pack_all(struct forward *forward, struct cutter *cutter,
                            const struct weights *weights, struct kv_diag *diag) {
    const struct weights_geometry *g = &forward->geometry;
    enum kv_err err;

    KV_TRY(pack(cutter, &weights->token_embd, "token_embd", &forward->embedding, diag));
    forward->output = forward->embedding;
    if (!g->tied)
        KV_TRY(pack(cutter, &weights->output, "output", &forward->output, diag));
    forward->output_norm = keep(cutter, weights->output_norm, g->hidden);
    for (uint32_t i = 0; i < g->layers; i++) {
        const struct weights_layer *from = &weights->layer[i];
        struct forward_layer *to = &forward->layer[i];
        to->attn_norm = keep(cutter, from->attn_norm, g->hidden);
        to->ffn_norm = keep(cutter, from->ffn_norm, g->hidden);
        KV_TRY(pack(cutter, &from->attn_q, "attn_q", &to->q, diag));
        KV_TRY(pack(cutter, &from->attn_k, "attn_k", &to->k, diag));
        KV_TRY(pack(cutter, &from->attn_v, "attn_v", &to->v, diag));
        KV_TRY(pack(cutter, &from->attn_output, "attn_output", &to->o, diag));
        KV_TRY(pack(cutter, &from->ffn_gate, "ffn_gate", &to->gate, diag));
        KV_TRY(pack(cutter, &from->ffn_up, "ffn_up", &to->up, diag));
        KV_TRY(pack(cutter, &from->ffn_down, "ffn_down", &to->down, diag));
    }
    err = cutter->overflow ? kv_diag_set(diag, KV_ERR_LIMIT, "the model is too large") : KV_OK;
done:
    return err;
}

static struct kvops_attend largest_attend(const struct forward *forward,
                                          const struct kvops_seq *seq) {
    const struct weights_geometry *g = &forward->geometry;

    return (struct kvops_attend){.pool = {.geometry = {g->layers, g->kv_heads, g->head_dim}},
                                 .q_heads = g->heads,
                                 .seqs = seq,
                                 .seq_count = 1};
}

static uint64_t partial_bytes(const struct forward *forward) {
    static const uint16_t chunk;
    struct kvops_seq seq = {.block_count = forward->positions / LAYOUT_BLOCK_TOKENS + 1,
                            .sink_tokens = LAYOUT_SINK_TOKENS,
                            .window_tokens = LAYOUT_PAGE_TOKENS * LAYOUT_WINDOW_PAGES_MAX,
                            .chunk_k = &chunk,
                            .chunk_v = &chunk,
                            .row_count = 1};
    struct kvops_attend args = largest_attend(forward, &seq);

    return kvops_partial_bytes(&args);
}

static void cut_workspace(struct forward *forward, struct cutter *cutter) {
    const struct weights_geometry *g = &forward->geometry;
    uint64_t rows = forward->rows_max;
    uint64_t half = g->head_dim / 2;

    forward->cos_table = cut(cutter, forward->positions, half * sizeof(float));
    forward->sin_table = cut(cutter, forward->positions, half * sizeof(float));
    forward->x = cut(cutter, rows * g->hidden, sizeof(float));
    forward->normed = cut(cutter, rows * g->hidden, sizeof(float));
    forward->q = cut(cutter, rows * g->heads * g->head_dim, sizeof(float));
    forward->attended = cut(cutter, rows * g->heads * g->head_dim, sizeof(float));
    forward->k = cut(cutter, rows * g->kv_heads * g->head_dim, sizeof(float));
    forward->v = cut(cutter, rows * g->kv_heads * g->head_dim, sizeof(float));
    forward->gate = cut(cutter, rows * g->ffn, sizeof(float));
    forward->up = cut(cutter, rows * g->ffn, sizeof(float));
    forward->head_x = cut(cutter, (uint64_t)FORWARD_HEAD_ROWS * g->hidden, sizeof(float));
    forward->logits = cut(cutter, (uint64_t)FORWARD_HEAD_ROWS * g->vocab, sizeof(float));
    forward->partials = cut(cutter, forward->singles_max, partial_bytes(forward));
    forward->chunk =
        cut(cutter, (uint64_t)g->layers * 2 * g->kv_heads * rows, g->head_dim * sizeof(uint16_t));
    forward->ids = cut(cutter, rows, sizeof(uint32_t));
    forward->position = cut(cutter, rows, sizeof(uint32_t));
    forward->dest = cut(cutter, rows, sizeof(struct ops_kv_dest));
    forward->single_seqs = cut(cutter, forward->singles_max, sizeof(struct kvops_seq));
}

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t scratch_bytes(const struct forward *forward) {
    const struct weights_geometry *g = &forward->geometry;
    struct kvops_seq seq = {.row_count = FORWARD_CHUNK_ROWS};
    struct kvops_attend attend = largest_attend(forward, &seq);
    struct kvops_seal seal = {.pool = attend.pool};
    uint32_t widest = (uint32_t)larger(larger(g->hidden, g->ffn), g->heads * g->head_dim);
    struct ops_matmul matmul = {.weight = {.k = widest, .n = widest}, .rows = 1};
    uint64_t bytes = ops_matmul_scratch_bytes(&matmul);

    bytes = larger(bytes, kvops_prefill_scratch_bytes(&attend));
    bytes = larger(bytes, kvops_decode_scratch_bytes(&attend));
    bytes = larger(bytes, kvops_combine_scratch_bytes(&attend));
    return larger(bytes, kvops_seal_scratch_bytes(&seal));
}

static enum kv_err make_weights(struct forward *forward, const struct weights *weights,
                                struct kv_diag *diag) {
    struct cutter cutter = {0};
    enum kv_err err;

    forward->layer =
        kv_alloc_zeroed(forward->alloc, forward->geometry.layers, sizeof *forward->layer);
    if (!forward->layer)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the model's weights");
    KV_TRY(pack_all(forward, &cutter, weights, diag));
    forward->weight_bytes = cutter.off;
    forward->weights = device_get(forward->device, forward->weight_bytes);
    if (!forward->weights)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %llu bytes of weights",
                           (unsigned long long)forward->weight_bytes);
    cutter = (struct cutter){.base = forward->weights};
    KV_TRY(pack_all(forward, &cutter, weights, diag));
done:
    return err;
}

static enum kv_err make_workspace(struct forward *forward, const struct weights *weights,
                                  struct kv_diag *diag) {
    struct cutter cutter = {0};
    struct ops_rope_table table;

    cut_workspace(forward, &cutter);
    forward->workspace_bytes = cutter.off;
    if (!cutter.overflow)
        forward->workspace = device_get(forward->device, cutter.off);
    if (!forward->workspace || device_scratch(forward->device, scratch_bytes(forward)) != KV_OK)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a workspace of %llu bytes",
                           (unsigned long long)forward->workspace_bytes);
    cutter = (struct cutter){.base = forward->workspace};
    cut_workspace(forward, &cutter);
    table = (struct ops_rope_table){.base = (double)forward->geometry.rope_base,
                                    .freq_factors = weights->rope_freqs,
                                    .head_dim = forward->geometry.head_dim,
                                    .positions = forward->positions,
                                    .cos_table = forward->cos_table,
                                    .sin_table = forward->sin_table};
    ops_rope_table_fill(&table);
    return KV_OK;
}

enum kv_err forward_make(const struct forward_settings *settings, const struct weights *weights,
                         struct forward **forward_out, struct kv_diag *diag) {
    struct forward *forward = kv_alloc_zeroed(settings->alloc, 1, sizeof *forward);
    enum kv_err err;

    if (!forward)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the model");
    assert(settings->singles_max >= 1 && settings->singles_max <= FORWARD_SINGLES_MAX);
    forward->alloc = settings->alloc;
    forward->device = settings->device;
    forward->geometry = weights->geometry;
    forward->singles_max = settings->singles_max;
    forward->rows_max = FORWARD_CHUNK_ROWS + settings->singles_max;
    forward->positions = weights->geometry.context_tokens + FORWARD_BEYOND;
    KV_TRY(make_weights(forward, weights, diag));
    KV_TRY(make_workspace(forward, weights, diag));
    *forward_out = forward;
    forward = NULL;
done:
    forward_drop(forward);
    return err;
}

void forward_drop(struct forward *forward) {
    if (!forward)
        return;
    if (forward->weights)
        device_put(forward->device, forward->weights);
    if (forward->workspace)
        device_put(forward->device, forward->workspace);
    kv_alloc_release(forward->alloc, forward->layer);
    kv_alloc_release(forward->alloc, forward);
}

uint64_t forward_weight_bytes(const struct forward *forward) {
    return forward->weight_bytes;
}

uint64_t forward_workspace_bytes(const struct forward *forward) {
    return forward->workspace_bytes;
}

struct kv_digest forward_tables_digest(const struct forward *forward) {
    size_t bytes = (size_t)forward->positions * (forward->geometry.head_dim / 2) * sizeof(float);
    struct kv_digest_state state;

    kv_digest_init(&state);
    kv_digest_update(&state, forward->cos_table, bytes);
    kv_digest_update(&state, forward->sin_table, bytes);
    return kv_digest_final(&state);
}
