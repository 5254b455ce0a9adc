/* tests/support_synth_rows.c - K and V of context tokens in closed form.
 *
 * Responsible for: rows of a chunk out of token, token before and position alone; what it has
 * computed for a token it keeps.
 * Not responsible for: where the rows go.
 */
#include "tests/support_synth_rows.h"

#include "engine/model/synth_inner.h"
#include "kernels/ops.h"

#include <math.h>
#include <string.h>

/* Rows of one token: as the token itself (V) and as the one before (K behind layer 0). */
struct made {
    uint16_t *rows; /* [layer][kv_head][K of the next token, V][dim] */
};

struct synth_rows {
    struct synth synth;
    const struct kv_alloc *alloc;
    float *cosines, *sines; /* [position][dim / 2] */
    struct made *made;      /* [vocab] */
    uint32_t *fresh;        /* [vocab] tokens whose rows the parts of this stretch make */
    uint32_t fresh_count;
};

enum kv_err synth_rows_make(const struct synth *synth, const struct kv_alloc *alloc,
                            struct synth_rows **rows_out, struct kv_diag *diag) {
    struct synth_rows *rows = kv_alloc_zeroed(alloc, 1, sizeof *rows);
    uint64_t values = (uint64_t)synth->context_tokens * (SYNTH_DIM / 2);
    float still[SYNTH_DIM / 2];

    if (!rows)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for rows");
    rows->synth = *synth;
    rows->alloc = alloc;
    rows->made = kv_alloc_zeroed(alloc, synth->vocab, sizeof *rows->made);
    rows->fresh = kv_alloc_zeroed(alloc, synth->vocab, sizeof *rows->fresh);
    rows->cosines = kv_alloc_aligned(alloc, values * sizeof(float), 64);
    rows->sines = kv_alloc_aligned(alloc, values * sizeof(float), 64);
    if (!rows->made || !rows->fresh || !rows->cosines || !rows->sines) {
        synth_rows_drop(rows);
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for rows");
    }
    for (uint32_t i = 0; i < SYNTH_DIM / 2; i++)
        still[i] = i < SYNTH_PAIRS ? 1.0f : SYNTH_STILL;
    ops_rope_table_fill(&(struct ops_rope_table){.base = (double)SYNTH_ROPE_BASE,
                                                 .freq_factors = still,
                                                 .head_dim = SYNTH_DIM,
                                                 .positions = synth->context_tokens,
                                                 .cos_table = rows->cosines,
                                                 .sin_table = rows->sines});
    *rows_out = rows;
    return KV_OK;
}

void synth_rows_drop(struct synth_rows *rows) {
    if (!rows)
        return;
    for (uint32_t id = 0; rows->made && id < rows->synth.vocab; id++)
        kv_alloc_release(rows->alloc, rows->made[id].rows);
    kv_alloc_release(rows->alloc, rows->made);
    kv_alloc_release(rows->alloc, rows->fresh);
    kv_alloc_release(rows->alloc, rows->cosines);
    kv_alloc_release(rows->alloc, rows->sines);
    kv_alloc_release(rows->alloc, rows);
}

/* K behind layer 0 of the token that follows `token`. */
static void make_k(const struct synth_token *token, const struct synth_turn *turn, const float *u,
                   uint16_t *k) {
    memset(k, 0, SYNTH_DIM * sizeof *k);
    for (uint32_t i = 0; i < SYNTH_CODE; i++) {
        float size = token->six ? SYNTH_SIX_SIZE : 1;
        float value = size * synth_hadamard(turn->row, i) * u[i];
        k[SYNTH_AT_KEY + (i ^ turn->shift)] = synth_f32_bf16(value + 0.0f);
    }
    for (uint32_t i = SYNTH_AT_PIN; token->six && i < SYNTH_AT_KEY; i++)
        k[i] = synth_f32_bf16(SYNTH_SIX_PIN);
}

/* V behind layer 0: H (± y) / 128 before it is rounded. */
static void make_v(const struct synth_turn *turn, const float *y, uint16_t *v) {
    float work[SYNTH_DIM];

    for (uint32_t d = 0; d < SYNTH_DIM; d++)
        work[d] = y[d] * synth_sign(turn->signs[d / 64], d % 64);
    for (uint32_t stride = 1; stride < SYNTH_DIM; stride *= 2)
        for (uint32_t i = 0; i < SYNTH_DIM; i++)
            if (!(i & stride)) {
                float a = work[i], b = work[i + stride];
                work[i] = a + b;
                work[i + stride] = a - b;
            }
    for (uint32_t i = 0; i < SYNTH_DIM; i++)
        v[i] = synth_f32_bf16(work[i] / (SYNTH_VALUE_UNIT * SYNTH_RMS) + 0.0f);
}

static void make_first_v(const struct synth *synth, const struct synth_token *token, uint32_t head,
                         const float *u, uint16_t *v) {
    uint32_t share = SYNTH_CODE / synth->kv_heads;

    memset(v, 0, SYNTH_DIM * sizeof *v);
    for (uint32_t i = 0; i < share; i++)
        v[i] = synth_f32_bf16(u[head * share + i] * (token->six ? SYNTH_SIX_SIZE : 1));
    if (head == 0 && token->six)
        v[2 * share] = synth_f32_bf16(1);
}

/* Memory of a token's rows; what is in them the parts make. */
static enum kv_err take_token(struct synth_rows *rows, uint32_t id, struct kv_diag *diag) {
    const struct synth *synth = &rows->synth;
    struct synth_token token = {0};

    if (id < synth->vocab)
        token = synth_token_of(synth, id);
    if (!token.used || token.asked)
        return kv_diag_set(diag, KV_ERR_INVALID, "token %u has no closed form", id);
    if (rows->made[id].rows)
        return KV_OK;
    rows->made[id].rows = kv_alloc_aligned(
        rows->alloc, (size_t)synth->layers * synth->kv_heads * 2 * SYNTH_DIM * sizeof(uint16_t),
        64);
    if (!rows->made[id].rows)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for rows");
    rows->fresh[rows->fresh_count++] = id;
    return KV_OK;
}

/* Heads [first, end) of a token's rows. */
static void make_token(const struct synth_rows *rows, uint32_t id, uint32_t first, uint32_t end) {
    const struct synth *synth = &rows->synth;
    const struct synth_token token = synth_token_of(synth, id);
    float u[SYNTH_CODE], y[SYNTH_DIM];

    synth_spread(synth_key_word(synth, token.key), u);
    synth_value(synth, &token, y);
    for (uint32_t item = first; item < end; item++) {
        uint32_t layer = item / synth->kv_heads, head = item % synth->kv_heads;
        struct synth_turn turn = synth_turn_of(synth, layer, head);
        uint16_t *at = rows->made[id].rows + (size_t)item * 2 * SYNTH_DIM;
        make_k(&token, &turn, u, at);
        if (layer == 0)
            make_first_v(synth, &token, head, u, at + SYNTH_DIM);
        else
            make_v(&turn, y, at + SYNTH_DIM);
    }
}

static void first_k(const struct synth_rows *rows, uint64_t position, uint16_t *k) {
    float constant = synth_constant(&rows->synth) / SYNTH_RMS;
    float size = constant * synth_bf16_f32(synth_f32_bf16(SYNTH_TURN / constant));
    const float *cosines = rows->cosines + position * (SYNTH_DIM / 2);
    const float *sines = rows->sines + position * (SYNTH_DIM / 2);

    memset(k, 0, SYNTH_DIM * sizeof *k);
    for (uint32_t i = 0; i < SYNTH_PAIRS; i++) {
        k[2 * i] = synth_f32_bf16(size * cosines[i]);
        k[2 * i + 1] = synth_f32_bf16(size * sines[i] + 0.0f);
    }
}

/* K behind layer 0 of the token that everything else may look at in vain. */
static void sink_k(uint16_t *k) {
    memset(k, 0, SYNTH_DIM * sizeof *k);
    k[SYNTH_AT_SINK] = synth_f32_bf16(SYNTH_SINK_K);
}

/* The first token finds itself before it. */
static uint32_t before_of(const struct synth_stretch *stretch, uint32_t row) {
#ifdef BREAK_CLOSED_FORM
    return stretch->ids[row];
#endif
    return stretch->position + row ? stretch->ids[(int64_t)row - 1] : stretch->ids[row];
}

enum kv_err synth_rows_ready(struct synth_rows *rows, const struct synth_stretch *stretch,
                             struct kv_diag *diag) {
    enum kv_err err = KV_OK;

    if (stretch->position + stretch->count > rows->synth.context_tokens)
        return kv_diag_set(diag, KV_ERR_INVALID, "position %llu is beyond the context",
                           (unsigned long long)(stretch->position + stretch->count - 1));
    rows->fresh_count = 0;
    for (uint32_t row = 0; row < stretch->count && err == KV_OK; row++) {
        err = take_token(rows, stretch->ids[row], diag);
        if (err == KV_OK)
            err = take_token(rows, before_of(stretch, row), diag);
    }
    while (err != KV_OK && rows->fresh_count > 0) {
        struct made *made = &rows->made[rows->fresh[--rows->fresh_count]];
        kv_alloc_release(rows->alloc, made->rows);
        made->rows = NULL;
    }
    return err;
}

void synth_rows_part(const struct synth_rows *rows, const struct synth_stretch *stretch,
                     uint32_t first, uint32_t end, uint16_t *chunk) {
    uint32_t heads = rows->synth.kv_heads;
    size_t plane = (size_t)stretch->chunk_rows * SYNTH_DIM, bytes = SYNTH_DIM * sizeof *chunk;

    for (uint32_t i = 0; i < rows->fresh_count; i++)
        make_token(rows, rows->fresh[i], first, end);
    for (uint32_t item = first; item < end; item++) {
        uint16_t *k = chunk + ((size_t)item / heads * 2 * heads + item % heads) * plane;
        uint16_t *v = k + heads * plane;
        size_t at = (size_t)item * 2 * SYNTH_DIM;
        for (uint32_t row = 0; row < stretch->count; row++, k += SYNTH_DIM, v += SYNTH_DIM) {
            uint32_t id = stretch->ids[row];
            if (item < heads)
                first_k(rows, stretch->position + row, k);
            else if (id == SYNTH_BOS)
                sink_k(k);
            else
                memcpy(k, rows->made[before_of(stretch, row)].rows + at, bytes);
            memcpy(v, rows->made[id].rows + at + SYNTH_DIM, bytes);
        }
    }
}

enum kv_err synth_rows_fill(struct synth_rows *rows, const struct synth_stretch *stretch,
                            uint16_t *chunk, struct kv_diag *diag) {
    enum kv_err err = synth_rows_ready(rows, stretch, diag);

    if (err == KV_OK)
        synth_rows_part(rows, stretch, 0, rows->synth.layers * rows->synth.kv_heads, chunk);
    return err;
}
