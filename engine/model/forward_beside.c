/* engine/model/forward_beside.c - a run in pieces, between which others run.
 *
 * Responsible for: memory of its own for what a piece leaves to the next, which layers and which
 * rows of logits come next.
 * Not responsible for: what a layer or a tile of logits is (forward.c), when the next piece runs.
 *
 * Between two layers a row is its x alone: attention reads K and V of its own layer. So a piece is
 * its operations and nothing else: it is told nothing, and nothing is copied or waited for. Of one
 * that fails whoever waits next is told, who may be another's step: so faults are counted.
 */
#include "engine/model/forward.h"

#include "engine/model/forward_inner.h"

#include <string.h>

struct forward_beside {
    struct forward *forward;
    struct kvops_pool pool;
    struct forward_seq *seqs; /* the caller's */
    struct forward_rows rows;
    struct forward_own own;
    uint64_t faults;                /* of the device before */
    uint32_t wanted, fetched, tile; /* rows of logits: in all, so far, and of the last tile */
    uint32_t next_seq, next_row;
};

static void use(struct forward_beside *beside) {
#ifdef BREAK_FORWARD_KEPT
    beside->own.x = beside->forward->step.x;
#endif
    beside->forward->own = &beside->own;
}

static void leave(struct forward_beside *beside) {
    beside->forward->own = &beside->forward->step;
}

/* Sequences that do not share their blocks with the one in front. */
static uint32_t different(const struct forward_seq *seqs, uint32_t count) {
    uint32_t found = 0;

    for (uint32_t i = 0; i < count; i++)
        found += i == 0 || seqs[i].kv.blocks != seqs[i - 1].kv.blocks;
    return found;
}

static int take_memory(struct forward_beside *beside, uint32_t count, uint32_t rows) {
    struct forward *forward = beside->forward;
    struct forward_own *own = &beside->own;
    uint64_t x_bytes = (uint64_t)rows * forward->geometry.hidden * sizeof(float);
    uint64_t logits = (uint64_t)forward->geometry.vocab * sizeof(float);

    x_bytes = kv_round_up(x_bytes, FORWARD_ALIGN_BYTES);
    own->control_bytes =
        forward_inner_control_bytes(forward, count, different(beside->seqs, count));
    own->x = device_get(forward->device, x_bytes + own->control_bytes);
    own->control = own->x ? (uint8_t *)own->x + x_bytes : NULL;
    own->control_host = kv_alloc_aligned(forward->alloc, own->control_bytes, FORWARD_ALIGN_BYTES);
    own->bad_host = kv_alloc_zeroed(forward->alloc, rows, sizeof *own->bad_host);
    own->seqs = kv_alloc_zeroed(forward->alloc, count, sizeof *own->seqs);
    logits *= beside->wanted < FORWARD_HEAD_ROWS ? beside->wanted : FORWARD_HEAD_ROWS;
    own->logits_host = device_host_get(forward->device, logits ? logits : 1);
    return own->x && own->control_host && own->bad_host && own->seqs && own->logits_host;
}

static uint32_t first_wanted(const struct forward_seq *seq) {
    return seq->logits == FORWARD_NONE  ? seq->kv.row_count
           : seq->logits == FORWARD_ALL ? seq->logits_first
                                        : seq->kv.row_count - 1;
}

enum kv_err forward_beside_make(struct forward *forward, const struct kvops_pool *pool,
                                struct forward_seq *seqs, uint32_t count,
                                struct forward_beside **beside_out) {
    struct forward_beside *beside = kv_alloc_zeroed(forward->alloc, 1, sizeof *beside);
    uint32_t rows = 0;

    if (!beside)
        return KV_ERR_NOMEM;
    beside->forward = forward;
    beside->pool = *pool;
    beside->seqs = seqs;
    beside->own.plan = 1;
    beside->faults = forward->device->faults;
    for (uint32_t i = 0; i < count; i++) {
        rows += seqs[i].kv.row_count;
        beside->wanted += seqs[i].kv.row_count - first_wanted(&seqs[i]);
    }
    beside->next_row = first_wanted(&seqs[0]);
    if (!take_memory(beside, count, rows)) {
        forward_beside_drop(beside);
        return KV_ERR_NOMEM;
    }
    memset(beside->own.control_host, 0, beside->own.control_bytes);
    use(beside);
    beside->rows = forward_inner_begin(forward, &beside->pool, seqs, count);
    leave(beside);
    *beside_out = beside;
    return KV_OK;
}

void forward_beside_drop(struct forward_beside *beside) {
    struct forward *forward;

    if (!beside)
        return;
    forward = beside->forward;
    if (beside->own.x)
        device_put(forward->device, beside->own.x);
    device_host_put(forward->device, beside->own.logits_host);
    kv_alloc_release(forward->alloc, beside->own.control_host);
    kv_alloc_release(forward->alloc, beside->own.bad_host);
    kv_alloc_release(forward->alloc, beside->own.seqs);
    kv_alloc_release(forward->alloc, beside);
}

void forward_beside_layers(struct forward_beside *beside, uint32_t first, uint32_t end) {
    use(beside);
    forward_inner_plan(beside->forward, &beside->rows);
    forward_inner_layers(beside->forward, &beside->rows, first, end, 0);
    leave(beside);
}

int forward_beside_has_rows(const struct forward_beside *beside) {
    return beside->fetched < beside->wanted;
}

/* The rows of the next tile, in the order of their sequences. */
static void fill_tile(struct forward_beside *beside) {
    for (beside->tile = 0; beside->tile < FORWARD_HEAD_ROWS && forward_beside_has_rows(beside);) {
        const struct forward_seq *seq = &beside->seqs[beside->next_seq];
        if (beside->next_row == seq->kv.row_count) {
            beside->next_row = first_wanted(++seq);
            beside->next_seq++;
            continue;
        }
        beside->own.head_rows[beside->tile++] =
            (struct forward_head_row){beside->next_seq, beside->next_row++};
        beside->fetched++;
    }
}

enum kv_err forward_beside_rows(struct forward_beside *beside) {
    struct forward_wanted wanted = {0, 0};
    enum kv_err err;

    fill_tile(beside);
    wanted.rows = beside->tile;
    use(beside);
    forward_inner_plan(beside->forward, &beside->rows);
    err = forward_inner_tile(beside->forward, beside->seqs, &beside->rows, &wanted);
    leave(beside);
#ifdef BREAK_PIECE_FAULT
    return err;
#endif
    return beside->forward->device->faults == beside->faults ? err : KV_ERR_DEVICE;
}

void forward_beside_give(struct forward_beside *beside, uint32_t part, uint32_t parts) {
    for (uint32_t i = 0; i < beside->tile; i++)
        if (beside->own.head_rows[i].seq % parts == part)
            forward_inner_give(beside->forward, &beside->own, beside->seqs, i);
}
