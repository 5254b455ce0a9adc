/* engine/model/forward.c - one step of the model over a batch of rows.
 *
 * Responsible for: what the device is told of a step, the order of operations in a layer, attention
 * as chunk or as single rows, rows that need logits, finding values that are not finite.
 * Not responsible for: packing and workspace (forward_make.c), runs in pieces (forward_beside.c).
 */
#include "engine/model/forward.h"

#include "engine/model/forward_inner.h"

#include <assert.h>
#include <string.h>

/* Loops over a fixed count become vector instructions, one over a whole row does not. */
static int row_is_finite(const float *values, uint32_t count) {
    enum { LANES = 16 };
    uint32_t bad[LANES] = {0}, any = 0, bits, i = 0;

    for (; i + LANES <= count; i += LANES)
        for (uint32_t lane = 0; lane < LANES; lane++) {
            memcpy(&bits, values + i + lane, sizeof bits);
            bad[lane] |= (bits & 0x7f800000u) == 0x7f800000u;
        }
    for (; i < count; i++) {
        memcpy(&bits, values + i, sizeof bits);
        any |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    for (uint32_t lane = 0; lane < LANES; lane++)
        any |= bad[lane];
    return !any;
}

static void note_bad(struct forward_seq *seq, uint32_t row, uint32_t layer) {
    if (seq->bad_layer >= 0)
        return;
    seq->bad_layer = (int32_t)layer;
    seq->bad_row = row;
}

/* The marks of the rows become the first layer, and in it the first row, of their sequence. */
static void apply_marks(const struct forward *forward, struct forward_seq *seqs, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        struct forward_seq *seq = &seqs[i];
        for (uint32_t row = 0; row < seq->kv.row_count; row++) {
            int32_t layer = forward->own->bad_host[seq->kv.first_row + row];
            if (layer < 0 || (seq->bad_layer >= 0 && layer >= seq->bad_layer))
                continue;
            seq->bad_layer = layer;
            seq->bad_row = row;
        }
    }
}

static void place_seq(struct forward *forward, struct forward_seq *seq, uint32_t first_row) {
    uint32_t *ids =
        (uint32_t *)(forward->own->control_host + forward_inner_ids(forward)) + first_row;
    uint32_t *position =
        (uint32_t *)(forward->own->control_host + forward_inner_positions(forward)) + first_row;

    assert(first_row + seq->kv.row_count <= forward->rows_max);
    seq->kv.first_row = first_row;
    seq->bad_layer = -1;
    seq->bad_row = 0;
    for (uint32_t row = 0; row < seq->kv.row_count; row++) {
        assert(seq->position + row < forward->positions);
        ids[row] = seq->ids[row];
        position[row] = (uint32_t)(seq->position + row);
#ifdef BREAK_POSITION
        position[row] = row;
#endif
    }
}

/* Places the rows of all sequences one after another, single ones first; returns how many there
 * are. */
static uint32_t place_rows(struct forward *forward, struct forward_seq *seqs, uint32_t count) {
    uint32_t rows = 0, singles = 0;

    for (int leading = 1; leading >= 0; leading--)
        for (uint32_t i = 0; i < count; i++) {
            uint32_t own = seqs[i].kv.row_count;
            int leads = own == 1;
#ifdef BREAK_SINGLES_FIRST
            leads = 1;
#endif
            assert(own >= 1);
            if (leads != leading)
                continue;
            place_seq(forward, &seqs[i], rows);
            singles += own == 1;
            rows += own;
        }
    assert(singles <= forward->singles_max && count <= forward->seqs_max);
    assert(rows - singles <= FORWARD_CHUNK_ROWS);
    memset(forward->own->control_host + forward_inner_bad(forward), 0xff, rows * sizeof(int32_t));
    return rows;
}

/* Appends to the control block; returns where the device will find it. */
static const void *tell(struct forward *forward, const void *from, uint64_t bytes) {
    uint64_t off = forward->own->told_bytes;

    assert(off + bytes <= forward->own->control_bytes);
    if (bytes)
        memcpy(forward->own->control_host + off, from, bytes);
    forward->own->told_bytes = kv_round_up(off + bytes, FORWARD_ALIGN_BYTES);
    return forward->own->control + off;
}

static int is_same(const struct kvops_seq *a, const struct kvops_seq *b) {
    return a->blocks == b->blocks && a->block_count == b->block_count && a->window == b->window &&
           a->window_tokens == b->window_tokens;
}

/* Sequence `at` as the device sees it, but for the layer's chunk. One over the same blocks and
 * pages as another in front of it shares them. */
static void tell_seq(struct forward *forward, struct kvops_seq *told, uint32_t at) {
    const struct kvops_seq *seqs = forward->own->seqs, *seq = &seqs[at];
    uint32_t pages = (seq->window_tokens + LAYOUT_PAGE_TOKENS - 1) / LAYOUT_PAGE_TOKENS, like = 0;

    while (like < at && !is_same(&seqs[like], seq))
        like++;
    told[at] = *seq;
    told[at].blocks = like < at
                          ? told[like].blocks
                          : tell(forward, seq->blocks, seq->block_count * sizeof *seq->blocks);
    told[at].window =
        like < at ? told[like].window : tell(forward, seq->window, pages * sizeof *seq->window);
    if (seq->hidden_blocks)
        told[at].hidden_blocks =
            tell(forward, seq->hidden_blocks, (seq->block_count + 63) / 64 * sizeof(uint64_t));
}

static uint16_t *chunk_of(const struct forward *forward, uint32_t layer, uint32_t value,
                          uint32_t row) {
    const struct weights_geometry *g = &forward->geometry;
    size_t head_stride = (size_t)forward->rows_max * g->head_dim;

    return forward->chunk + ((size_t)layer * 2 + value) * g->kv_heads * head_stride +
           (size_t)row * g->head_dim;
}

/* Builds the control block of a step, single rows before chunks, and sends it off. Returns how many
 * single rows there are. */
static uint32_t tell_step(struct forward *forward, const struct forward_seq *seqs, uint32_t count) {
    struct kvops_seq *told =
        (struct kvops_seq *)(forward->own->control_host + forward_inner_seqs(forward));
    struct device_copy copy = {forward->own->control, forward->own->control_host, 0};
    uint32_t singles = 0, at = 0, layers = forward->geometry.layers;

    for (uint32_t i = 0; i < count; i++)
        singles += seqs[i].kv.row_count == 1;
    forward->own->told_bytes = kv_round_up(
        forward_inner_seqs(forward) + (uint64_t)layers * count * sizeof *told, FORWARD_ALIGN_BYTES);
    for (int single = 1; single >= 0; single--)
        for (uint32_t i = 0; i < count; i++) {
            struct kvops_seq *seq = &forward->own->seqs[at];
            if ((seqs[i].kv.row_count == 1) != single)
                continue;
            *seq = seqs[i].kv;
#ifdef BREAK_MANY_CHUNKS
            if (at > singles)
                *seq = forward->own->seqs[singles];
#endif
            seq->chunk_head_stride = (size_t)forward->rows_max * forward->geometry.head_dim;
            seq->chunk_k = chunk_of(forward, 0, 0, seq->first_row);
            seq->chunk_v = chunk_of(forward, 0, 1, seq->first_row);
            tell_seq(forward, told, at++);
        }
    for (uint32_t layer = layers; layer-- > 0;)
        for (uint32_t i = 0; i < count; i++) {
            struct kvops_seq *seq = &told[(size_t)layer * count + i];
            *seq = told[i];
            seq->chunk_k = chunk_of(forward, layer, 0, seq->first_row);
            seq->chunk_v = chunk_of(forward, layer, 1, seq->first_row);
        }
    copy.bytes = forward->own->told_bytes;
    (void)device_copy_in(forward->device, DEVICE_STEP, &copy, 1);
    return singles;
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

static struct ops_rmsnorm norm(const struct forward *forward, const float *x, const float *gain,
                               float *y, uint32_t rows) {
    return (struct ops_rmsnorm){.x = x,
                                .gain = gain,
                                .y = y,
                                .x_stride = forward->geometry.hidden,
                                .y_stride = forward->geometry.hidden,
                                .rows = rows,
                                .width = forward->geometry.hidden,
                                .eps = forward->geometry.rms_eps};
}

/* x += weight * y for one weight. */
static void add_product(struct forward *forward, const struct ops_weight *weight, const float *y,
                        const struct forward_rows *rows) {
    struct ops_matmul args = product(weight, y, forward->own->x, rows->count);
    struct device_matmuls products = {&args, 1, rows->singles, DEVICE_MATMUL, NULL, NULL};

    args.residual = forward->own->x;
    device_matmul(forward->device, &products);
}

static void project(struct forward *forward, const struct forward_layer *weights, uint32_t layer,
                    const struct forward_rows *over) {
    const struct weights_geometry *g = &forward->geometry;
    uint32_t rows = over->count;
    struct ops_matmul args[3] = {product(&weights->q, forward->normed, forward->q, rows),
                                 product(&weights->k, forward->normed, forward->k, rows),
                                 product(&weights->v, forward->normed, forward->v, rows)};
    struct ops_rmsnorm first =
        norm(forward, forward->own->x, weights->attn_norm, forward->normed, rows);
    struct device_matmuls products = {args, 3, over->singles, DEVICE_MATMUL, &first, NULL};
    struct ops_rope rope = {
        .q = forward->q,
        .k = forward->k,
        .v = forward->v,
        .q_stride = (size_t)g->heads * g->head_dim,
        .kv_stride = (size_t)g->kv_heads * g->head_dim,
        .dest = forward->dest + (size_t)layer * forward->rows_max,
        .positions = (const uint32_t *)(forward->own->control + forward_inner_positions(forward)),
        .cos_table = forward->cos_table,
        .sin_table = forward->sin_table,
        .rows = rows,
        .q_heads = g->heads,
        .kv_heads = g->kv_heads,
        .head_dim = g->head_dim,
        .pairing = g->rope == WEIGHTS_ROPE_ADJACENT ? OPS_PAIR_ADJACENT : OPS_PAIR_HALVES};

    device_matmul(forward->device, &products);
    device_rope(forward->device, &rope);
}

/* With addresses of the host. */
static enum layout_tier tier_of(const struct forward *forward, uint32_t seq) {
    const struct kvops_seq *here = &forward->own->seqs[seq];

    return here->block_count ? (enum layout_tier)here->blocks[0].tier : LAYOUT_TIER_BF16;
}

/* Chunks that one launch may attend to: a few questions about a long session fill a device only
 * together. */
static int is_alike(const struct forward *forward, uint32_t a, uint32_t b) {
    enum layout_tier one = tier_of(forward, a), other = tier_of(forward, b);

    return one == other || (!layout_tier_is_control(one) && !layout_tier_is_control(other));
}

static void attend(struct forward *forward, const struct forward_rows *rows, uint32_t layer) {
    const struct kvops_seq *seqs =
        (const struct kvops_seq *)(forward->own->control + forward_inner_seqs(forward)) +
        (size_t)layer * rows->seqs;
    struct kvops_attend args = {.pool = *rows->pool,
                                .layer = layer,
                                .q_heads = forward->geometry.heads,
                                .q = forward->q,
                                .out = forward->attended,
                                .seqs = seqs,
                                .seq_count = rows->singles,
                                .partials = forward->partials,
                                .partial_bytes = forward->partial_bytes};

    if (rows->singles)
        device_decode(forward->device, &args);
    for (uint32_t i = rows->singles, end; i < rows->seqs; i = end) {
        uint32_t longest = forward->own->seqs[i].row_count;
        for (end = i + 1; end < rows->seqs && is_alike(forward, i, end); end++)
            if (forward->own->seqs[end].row_count > longest)
                longest = forward->own->seqs[end].row_count;
        args.seqs = seqs + i;
        args.seq_count = end - i;
        device_prefill(forward->device, &args, longest, tier_of(forward, i));
    }
}

static void feed_forward(struct forward *forward, const struct forward_layer *weights,
                         const struct forward_rows *over) {
    uint32_t rows = over->count;
    struct ops_matmul args[2] = {product(&weights->gate, forward->normed, forward->gate, rows),
                                 product(&weights->up, forward->normed, forward->up, rows)};
    struct ops_rmsnorm first =
        norm(forward, forward->own->x, weights->ffn_norm, forward->normed, rows);
    struct device_matmuls products = {args, 2, over->singles, DEVICE_MATMUL, &first, forward->gate};

    device_matmul(forward->device, &products);
    add_product(forward, &weights->down, forward->gate, over);
}

static void check(struct forward *forward, uint32_t layer, uint32_t rows) {
    struct ops_finite args = {.x = forward->own->x,
                              .bad =
                                  (int32_t *)(forward->own->control + forward_inner_bad(forward)),
                              .x_stride = forward->geometry.hidden,
                              .rows = rows,
                              .width = forward->geometry.hidden,
                              .mark = (int32_t)layer};

    device_finite(forward->device, &args);
}

void forward_inner_layers(struct forward *forward, const struct forward_rows *rows, uint32_t first,
                          uint32_t end, int find) {
    struct ops_embed embed = {
        .table = forward->embedding,
        .ids = (const uint32_t *)(forward->own->control + forward_inner_ids(forward)),
        .out = forward->own->x,
        .out_stride = forward->geometry.hidden,
        .rows = rows->count};

    if (first == 0)
        device_embed(forward->device, &embed);
    for (uint32_t layer = first; layer < end; layer++) {
        const struct forward_layer *weights = &forward->layer[layer];
        project(forward, weights, layer, rows);
        attend(forward, rows, layer);
        add_product(forward, &weights->o, forward->attended, rows);
        feed_forward(forward, weights, rows);
        if (find || layer + 1 == forward->geometry.layers)
            check(forward, layer, rows->count);
    }
}

/* Waits for the marks of `rows` rows, and for what is wanted. */
static enum kv_err wait_for(struct forward *forward, uint32_t rows,
                            const struct forward_wanted *wanted) {
    struct device_copy copies[2] = {{forward->own->bad_host,
                                     forward->own->control + forward_inner_bad(forward),
                                     rows * sizeof(int32_t)}};
    uint64_t count = wanted->rows;

    if (wanted->top)
        copies[1] = (struct device_copy){forward->top_host, forward->top,
                                         count * wanted->top * sizeof *forward->top};
    else if (forward->own->logits_host)
        copies[1] = (struct device_copy){forward->own->logits_host, forward->logits,
                                         count * forward->geometry.vocab * sizeof(float)};
    return device_copy_out(forward->device, DEVICE_STEP, copies, copies[1].bytes ? 2 : 1);
}

/* The marks of all rows, and what is wanted. When a row is bad the step is computed once more, from
 * the same K and V, to say which layer made it so. */
static enum kv_err fetch(struct forward *forward, const struct forward_rows *rows,
                         const struct forward_wanted *wanted) {
    static const struct forward_wanted nothing = {0, 0};
    struct device_copy clear = {forward->own->control + forward_inner_bad(forward),
                                forward->own->control_host + forward_inner_bad(forward),
                                rows->count * sizeof(int32_t)};
    enum kv_err err = wait_for(forward, rows->count, wanted);

    for (uint32_t row = 0; err == KV_OK && row < rows->count; row++) {
        if (forward->own->bad_host[row] != (int32_t)forward->geometry.layers - 1)
            continue;
        err = device_copy_in(forward->device, DEVICE_STEP, &clear, 1);
        forward_inner_layers(forward, rows, 0, forward->geometry.layers, 1);
        return err == KV_OK ? wait_for(forward, rows->count, &nothing) : err;
    }
    return err;
}

/* Rows that follow each other are normalised in one go. */
static void head_norm(const struct forward *forward, const struct forward_seq *seqs,
                      uint32_t count) {
    uint32_t hidden = forward->geometry.hidden;

    for (uint32_t first = 0, end; first < count; first = end) {
        const struct forward_head_row *at = &forward->own->head_rows[first];
        uint32_t row = seqs[at->seq].kv.first_row + at->row;
        for (end = first + 1; end < count; end++) {
            at = &forward->own->head_rows[end];
            if (seqs[at->seq].kv.first_row + at->row != row + end - first)
                break;
        }
        struct ops_rmsnorm args =
            norm(forward, forward->own->x + (size_t)row * hidden, forward->output_norm,
                 forward->normed + (size_t)first * hidden, end - first);
        device_rmsnorm(forward->device, &args);
    }
}

/* How many of the best do for every row of the tile; 0: one of them needs all logits. */
static uint32_t best_wanted(const struct forward *forward, const struct forward_seq *seqs,
                            uint32_t count) {
    uint32_t most = 0;

    for (uint32_t i = 0; i < count && forward->top_host; i++) {
        const struct forward_seq *seq = &seqs[forward->own->head_rows[i].seq];
        if (seq->logits != FORWARD_LAST || !seq->top)
            return 0;
        most = seq->top > most ? seq->top : most;
    }
    assert(most <= OPS_TOP_MAX && most <= forward->geometry.vocab);
    return most;
}

void forward_inner_give(const struct forward *forward, const struct forward_own *own,
                        struct forward_seq *seqs, uint32_t index) {
    const struct forward_head_row *at = &own->head_rows[index];
    struct forward_seq *seq = &seqs[at->seq];
    float *all = own->logits_host;

    if (!all)
        all = device_mapped(forward->device, forward->logits);
    all += (size_t)index * forward->geometry.vocab;
#ifdef BREAK_ROW_BITS
    all[0] *= index ? 1.000001f : 1;
#endif
    if (!row_is_finite(all, forward->geometry.vocab))
        note_bad(seq, at->row, forward->geometry.layers);
    if (seq->row && (seq->bad_layer < 0 || at->row < seq->bad_row))
        seq->row(seq->context, at->row, all);
}

/* What is not finite comes first. */
static void give_best(struct forward *forward, struct forward_seq *seqs, uint32_t index,
                      uint32_t top) {
    const struct forward_head_row *at = &forward->own->head_rows[index];
    struct forward_seq *seq = &seqs[at->seq];
    const struct ops_candidate *best = forward->top_host + (size_t)index * top;

    if (!row_is_finite(&best->logit, 1))
        note_bad(seq, at->row, forward->geometry.layers);
    if (seq->bad_layer < 0)
        seq->best(seq->context, best, seq->top);
}

enum kv_err forward_inner_tile(struct forward *forward, struct forward_seq *seqs,
                               const struct forward_rows *rows,
                               const struct forward_wanted *wanted) {
    struct ops_matmul args =
        product(&forward->output, forward->normed, forward->logits, wanted->rows);
    struct device_matmuls products = {&args, 1, wanted->rows, DEVICE_HEAD, NULL, NULL};
    struct ops_top top = {forward->logits, forward->top,  args.y_stride,
                          wanted->rows,    args.weight.n, wanted->top};
    enum kv_err err;

    if (wanted->rows) {
        head_norm(forward, seqs, wanted->rows);
        device_matmul(forward->device, &products);
    }
    if (wanted->top)
        device_top(forward->device, &top);
    err = fetch(forward, rows, wanted);
#ifdef BREAK_DEVICE_ERROR
    err = KV_OK;
#endif
    if (err == KV_OK)
        apply_marks(forward, seqs, rows->seqs);
    return err;
}

static enum kv_err head_tile(struct forward *forward, struct forward_seq *seqs,
                             const struct forward_rows *rows, uint32_t count) {
    const struct forward_wanted wanted = {count, best_wanted(forward, seqs, count)};
    enum kv_err err = forward_inner_tile(forward, seqs, rows, &wanted);

    for (uint32_t i = 0; err == KV_OK && i < count; i++)
        if (wanted.top)
            give_best(forward, seqs, i, wanted.top);
        else
            forward_inner_give(forward, forward->own, seqs, i);
    return err;
}

static enum kv_err give_logits(struct forward *forward, struct forward_seq *seqs,
                               const struct forward_rows *all) {
    uint32_t filled = 0, tiles = 0;
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < all->seqs; i++) {
        uint32_t rows = seqs[i].kv.row_count;
        uint32_t row = seqs[i].logits == FORWARD_ALL ? seqs[i].logits_first : rows - 1;
        if (seqs[i].logits == FORWARD_NONE)
            continue;
        for (; row < rows && err == KV_OK; row++) {
            forward->own->head_rows[filled++] = (struct forward_head_row){i, row};
            if (filled == FORWARD_HEAD_ROWS) {
                err = head_tile(forward, seqs, all, filled);
                filled = 0;
                tiles++;
            }
        }
    }
    return err == KV_OK && (filled || !tiles) ? head_tile(forward, seqs, all, filled) : err;
}

void forward_inner_plan(struct forward *forward, const struct forward_rows *rows) {
    const struct kvops_attend planned = {.pool = *rows->pool,
                                         .q_heads = forward->geometry.heads,
                                         .seqs = forward->own->seqs,
                                         .seq_count = rows->singles};

    if (rows->singles)
        device_plan(forward->device, forward->own->plan, &planned);
}

struct forward_rows forward_inner_begin(struct forward *forward, const struct kvops_pool *pool,
                                        struct forward_seq *seqs, uint32_t count) {
    struct forward_rows rows = {pool, place_rows(forward, seqs, count), count, 0};

    if (rows.count)
        rows.singles = tell_step(forward, seqs, count);
    return rows;
}

enum kv_err forward_run(struct forward *forward, const struct kvops_pool *pool,
                        struct forward_seq *seqs, uint32_t count) {
    struct forward_rows rows = forward_inner_begin(forward, pool, seqs, count);
    uint32_t layers = forward->geometry.layers;

    if (!rows.count)
        return KV_OK;
    forward_inner_plan(forward, &rows);
    /* Chunks differ in their rows, so only steps of single rows come again. */
    if (rows.singles < count) {
        forward_inner_layers(forward, &rows, 0, layers, 0);
    } else if (device_repeat_begin(forward->device, count)) {
        forward_inner_layers(forward, &rows, 0, layers, 0);
        device_repeat_end(forward->device);
    }
    return give_logits(forward, seqs, &rows);
}

uint32_t forward_layers(const struct forward *forward) {
    return forward->geometry.layers;
}

const uint16_t *forward_chunk(const struct forward *forward) {
    return forward->chunk;
}

uint32_t forward_chunk_rows(const struct forward *forward) {
    return forward->rows_max;
}

enum kv_err forward_put_chunk(struct forward *forward, const uint16_t *chunk) {
    const struct weights_geometry *g = &forward->geometry;
    struct device_copy copy = {forward->chunk, chunk,
                               (uint64_t)g->layers * 2 * g->kv_heads * forward->rows_max *
                                   g->head_dim * sizeof *chunk};

    return device_copy_in(forward->device, DEVICE_STEP, &copy, 1);
}
