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
        end > UINT64_MAX - FORWARD_ALIGN_BYTES) {
        cutter->overflow = 1;
        return NULL;
    }
    cutter->off = kv_round_up(end, FORWARD_ALIGN_BYTES);
    return at;
}

/* A pass over the model's tensors. */
struct packing {
    struct forward *forward;
    struct cutter cutter;
    struct kv_diag *diag;
};

static enum kv_err pack(struct packing *packing, const struct weights_matrix *matrix,
                        const char *name, struct ops_weight *weight_out) {
    enum device_use use = weight_out == &packing->forward->embedding ? DEVICE_TABLE : DEVICE_FACTOR;
    struct device *device = packing->forward->device;
    enum ops_type type = (enum ops_type)matrix->type;
    uint64_t bytes = device_weight_bytes(device, use, type, matrix->rows, matrix->columns);
    uint8_t *held;

    if (bytes == 0)
        return kv_diag_set(packing->diag, KV_ERR_MISMATCH,
                           "tensor %s (%s, %u x %u) cannot be computed with: use another file",
                           name, gguf_type_name(matrix->type), matrix->rows, matrix->columns);
    held = cut(&packing->cutter, bytes, 1);
    *weight_out = (struct ops_weight){type, matrix->rows, matrix->columns, held};
    if (held && device_weight_load(device, use, weight_out, matrix->data) != KV_OK)
        return kv_diag_set(packing->diag, KV_ERR_DEVICE, "tensor %s: %s", name, device->trouble);
    return KV_OK;
}

static enum kv_err keep(struct packing *packing, const float *values, uint32_t count,
                        const float **kept_out) {
    float *kept = cut(&packing->cutter, count, sizeof *kept);
    struct device_copy copy = {kept, values, count * sizeof *kept};

    *kept_out = kept;
    return kept ? device_copy_in(packing->forward->device, DEVICE_STEP, &copy, 1) : KV_OK;
}

/* One pass over all tensors: sizes with base NULL, contents otherwise. */
static enum kv_err pack_all(struct packing *packing, const struct weights *weights) {
    struct forward *forward = packing->forward;
    const struct weights_geometry *g = &forward->geometry;
    enum kv_err err;

    KV_TRY(pack(packing, &weights->token_embd, "token_embd", &forward->embedding));
    forward->output = forward->embedding;
    if (!g->tied || forward->device->apart)
        KV_TRY(pack(packing, &weights->output, "output", &forward->output));
    KV_TRY(keep(packing, weights->output_norm, g->hidden, &forward->output_norm));
    for (uint32_t i = 0; i < g->layers; i++) {
        const struct weights_layer *from = &weights->layer[i];
        struct forward_layer *to = &forward->layer[i];
        KV_TRY(keep(packing, from->attn_norm, g->hidden, &to->attn_norm));
        KV_TRY(keep(packing, from->ffn_norm, g->hidden, &to->ffn_norm));
        KV_TRY(pack(packing, &from->attn_q, "attn_q", &to->q));
        KV_TRY(pack(packing, &from->attn_k, "attn_k", &to->k));
        KV_TRY(pack(packing, &from->attn_v, "attn_v", &to->v));
        KV_TRY(pack(packing, &from->attn_output, "attn_output", &to->o));
        KV_TRY(pack(packing, &from->ffn_gate, "ffn_gate", &to->gate));
        KV_TRY(pack(packing, &from->ffn_up, "ffn_up", &to->up));
        KV_TRY(pack(packing, &from->ffn_down, "ffn_down", &to->down));
    }
    err = packing->cutter.overflow
              ? kv_diag_set(packing->diag, KV_ERR_LIMIT, "the model is too large")
              : KV_OK;
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

/* Blocks of one sequence, those behind a question past the context included. */
static uint64_t blocks_max(const struct forward *forward) {
    return forward->positions / LAYOUT_BLOCK_TOKENS + 1;
}

uint64_t forward_inner_control_bytes(const struct forward *forward, uint32_t seqs,
                                     uint32_t different) {
    uint64_t align = FORWARD_ALIGN_BYTES;
    uint64_t pointed = blocks_max(forward) * sizeof(struct kvops_block) +
                       LAYOUT_WINDOW_PAGES_MAX * sizeof(struct kvops_page) + 2 * align;
    uint64_t hidden = (blocks_max(forward) / 64 + 1) * sizeof(uint64_t) + align;

    return forward_inner_seqs(forward) + align + different * pointed +
           seqs * (forward->geometry.layers * sizeof(struct kvops_seq) + hidden);
}

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t partial_bytes(const struct forward *forward) {
    static const uint16_t chunk;
    struct kvops_seq seq = {.block_count = (uint32_t)blocks_max(forward),
                            .sink_tokens = LAYOUT_SINK_TOKENS,
                            .window_tokens = LAYOUT_PAGE_TOKENS * LAYOUT_WINDOW_PAGES_MAX,
                            .chunk_k = &chunk,
                            .chunk_v = &chunk,
                            .row_count = 1};
    struct kvops_attend args = largest_attend(forward, &seq);

    return larger(forward->singles_max * kvops_partial_bytes(&args), kvops_part_bytes(&args));
}

static void cut_workspace(struct forward *forward, struct cutter *cutter) {
    const struct weights_geometry *g = &forward->geometry;
    uint64_t rows = forward->rows_max;
    uint64_t half = g->head_dim / 2;

    forward->cos_table = cut(cutter, forward->positions, half * sizeof(float));
    forward->sin_table = cut(cutter, forward->positions, half * sizeof(float));
    forward->step.x = cut(cutter, rows * g->hidden, sizeof(float));
    forward->normed = cut(cutter, rows * g->hidden, sizeof(float));
    forward->q = cut(cutter, rows * g->heads * g->head_dim, sizeof(float));
    forward->attended = cut(cutter, rows * g->heads * g->head_dim, sizeof(float));
    forward->k = cut(cutter, rows * g->kv_heads * g->head_dim, sizeof(float));
    forward->v = cut(cutter, rows * g->kv_heads * g->head_dim, sizeof(float));
    forward->gate = cut(cutter, rows * g->ffn, sizeof(float));
    forward->up = cut(cutter, rows * g->ffn, sizeof(float));
    forward->logits = cut(cutter, (uint64_t)FORWARD_HEAD_ROWS * g->vocab, sizeof(float));
    forward->top =
        cut(cutter, (uint64_t)FORWARD_HEAD_ROWS * OPS_TOP_MAX, sizeof(struct ops_candidate));
    forward->partial_bytes = partial_bytes(forward);
    forward->partials = cut(cutter, forward->partial_bytes, 1);
    forward->chunk =
        cut(cutter, (uint64_t)g->layers * 2 * g->kv_heads * rows, g->head_dim * sizeof(uint16_t));
    forward->dest = cut(cutter, g->layers * rows, sizeof(struct ops_kv_dest));
    forward->step.control_bytes =
        forward_inner_control_bytes(forward, forward->seqs_max, forward->seqs_max);
    forward->step.control = cut(cutter, forward->step.control_bytes, 1);
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
    struct packing packing = {.forward = forward, .diag = diag};
    enum kv_err err;

    forward->layer =
        kv_alloc_zeroed(forward->alloc, forward->geometry.layers, sizeof *forward->layer);
    if (!forward->layer)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the model's weights");
    KV_TRY(pack_all(&packing, weights));
    forward->weight_bytes = packing.cutter.off;
    forward->weights = device_get(forward->device, forward->weight_bytes);
    if (!forward->weights)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %llu bytes of weights",
                           (unsigned long long)forward->weight_bytes);
    packing.cutter = (struct cutter){.base = forward->weights};
    KV_TRY(pack_all(&packing, weights));
done:
    return err;
}

static struct kv_digest tables_digest(const struct ops_rope_table *table, size_t bytes) {
    struct kv_digest_state state;

    kv_digest_init(&state);
    kv_digest_update(&state, table->cos_table, bytes);
    kv_digest_update(&state, table->sin_table, bytes);
    return kv_digest_final(&state);
}

static enum kv_err make_tables(struct forward *forward, const struct weights *weights,
                               struct kv_diag *diag) {
    uint64_t values = (uint64_t)forward->positions * (forward->geometry.head_dim / 2);
    float *both = kv_alloc_aligned(forward->alloc, 2 * values * sizeof *both, FORWARD_ALIGN_BYTES);
    struct ops_rope_table table = {.base = (double)forward->geometry.rope_base,
                                   .freq_factors = weights->rope_freqs,
                                   .head_dim = forward->geometry.head_dim,
                                   .positions = forward->positions,
                                   .cos_table = both,
                                   .sin_table = both ? both + values : NULL};
    struct device_copy copies[2] = {{forward->cos_table, table.cos_table, values * sizeof(float)},
                                    {forward->sin_table, table.sin_table, values * sizeof(float)}};
    enum kv_err err;

    if (!both)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the tables of positions");
    ops_rope_table_fill(&table);
    forward->tables = tables_digest(&table, values * sizeof(float));
    err = device_copy_in(forward->device, DEVICE_STEP, copies, 2);
    kv_alloc_release(forward->alloc, both);
    return err;
}

/* Where K and V of a row go is the same in every step. */
static enum kv_err make_dest(struct forward *forward, struct kv_diag *diag) {
    const struct weights_geometry *g = &forward->geometry;
    size_t count = (size_t)g->layers * forward->rows_max;
    size_t head_stride = (size_t)forward->rows_max * g->head_dim;
    struct ops_kv_dest *dest = kv_alloc_zeroed(forward->alloc, count, sizeof *dest);
    struct device_copy copy = {forward->dest, dest, count * sizeof *dest};
    enum kv_err err;

    if (!dest)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a workspace");
    for (size_t i = 0; i < count; i++) {
        uint16_t *k = forward->chunk + i / forward->rows_max * 2 * g->kv_heads * head_stride +
                      i % forward->rows_max * g->head_dim;
        dest[i] = (struct ops_kv_dest){k, k + g->kv_heads * head_stride, head_stride};
    }
    err = device_copy_in(forward->device, DEVICE_STEP, &copy, 1);
    kv_alloc_release(forward->alloc, dest);
    return err;
}

/* The processor's side of a step. */
static enum kv_err make_host(struct forward *forward, struct kv_diag *diag) {
    uint64_t logits = (uint64_t)FORWARD_HEAD_ROWS * forward->geometry.vocab * sizeof(float);
    struct forward_own *own = &forward->step;

    own->control_host = kv_alloc_aligned(forward->alloc, own->control_bytes, FORWARD_ALIGN_BYTES);
    own->bad_host = device_host_get(forward->device, forward->rows_max * sizeof(int32_t));
    own->seqs = kv_alloc_zeroed(forward->alloc, forward->seqs_max, sizeof *own->seqs);
    if (!device_mapped(forward->device, forward->logits)) {
        own->logits_host = device_host_get(forward->device, logits);
        if (!own->logits_host)
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for logits");
    }
    if (device_has_top(forward->device)) {
        forward->top_host = device_host_get(
            forward->device, (uint64_t)FORWARD_HEAD_ROWS * OPS_TOP_MAX * sizeof *forward->top_host);
        if (!forward->top_host)
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for candidates");
    }
    if (!own->control_host || !own->bad_host || !own->seqs)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for what a step is told");
    memset(own->control_host, 0, own->control_bytes);
    return KV_OK;
}

static enum kv_err make_workspace(struct forward *forward, const struct weights *weights,
                                  struct kv_diag *diag) {
    struct cutter cutter = {0};
    enum kv_err err;

    cut_workspace(forward, &cutter);
    forward->workspace_bytes = cutter.off;
    if (!cutter.overflow)
        forward->workspace = device_get(forward->device, cutter.off);
    if (!forward->workspace || device_scratch(forward->device, scratch_bytes(forward)) != KV_OK)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a workspace of %llu bytes",
                           (unsigned long long)forward->workspace_bytes);
    cutter = (struct cutter){.base = forward->workspace};
    cut_workspace(forward, &cutter);
    KV_TRY(make_tables(forward, weights, diag));
    KV_TRY(make_dest(forward, diag));
    KV_TRY(make_host(forward, diag));
    KV_TRY(device_wait(forward->device, DEVICE_STEP));
done:
    return err;
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
    forward->seqs_max = FORWARD_TOGETHER_MAX + settings->singles_max;
    forward->own = &forward->step;
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
    device_host_put(forward->device, forward->step.logits_host);
    device_host_put(forward->device, forward->top_host);
    device_host_put(forward->device, forward->step.bad_host);
    kv_alloc_release(forward->alloc, forward->step.control_host);
    kv_alloc_release(forward->alloc, forward->step.seqs);
    kv_alloc_release(forward->alloc, forward->layer);
    kv_alloc_release(forward->alloc, forward);
}

uint64_t forward_weight_bytes(const struct forward *forward) {
    return forward->weight_bytes;
}

struct kv_digest forward_tables_digest(const struct forward *forward) {
    return forward->tables;
}
