/* engine/model/forward.h - one step of the model over a batch of rows.
 *
 * Responsible for: weights packed for the device, the workspace, and from token ids to logits; the
 * K and V of the rows stay in the workspace until the next step.
 * Not responsible for: writing them into pages, sealing, tiers, sampling.
 *
 * The bits of a row depend on its own sequence alone: not on the other rows, its place, threads.
 *
 * Threads: the scheduler thread.
 * Units: rows, positions, bytes.
 * Errors: NOMEM, MISMATCH (a tensor type that the kernels do not hold).
 */
#ifndef ENGINE_MODEL_FORWARD_H
#define ENGINE_MODEL_FORWARD_H

#include "engine/device/device.h"
#include "engine/model/weights.h"
#include "kernels/kvops.h"
#include "store/base/alloc.h"
#include "store/base/diag.h"
#include "store/base/digest.h"

enum {
    FORWARD_CHUNK_ROWS = 256,  /* of all sequences that have more than one row … */
    FORWARD_SINGLES_MAX = 128, /* … and of all that have one */
    FORWARD_HEAD_ROWS = 32,    /* logits are computed for so many rows at a time */
    FORWARD_TOGETHER_MAX = 32, /* sequences of a run in pieces */
    FORWARD_BEYOND = 256       /* positions past the context that a question may use */
};

struct forward;
struct forward_settings {
    const struct kv_alloc *alloc;
    struct device *device;
    uint32_t singles_max; /* 1 … FORWARD_SINGLES_MAX */
};
/* `weights` and the bytes behind it are borrowed for the call only. */
enum kv_err forward_make(const struct forward_settings *settings, const struct weights *weights,
                         struct forward **forward_out, struct kv_diag *diag);
void forward_drop(struct forward *forward); /* NULL is allowed */
uint64_t forward_weight_bytes(const struct forward *forward);
/* Of the RoPE tables, which come from the C library: part of the numerics id. */
struct kv_digest forward_tables_digest(const struct forward *forward);

enum forward_logits { FORWARD_NONE, FORWARD_LAST, FORWARD_ALL };
/* Row `row` of the sequence; the logits are valid during the call only. */
typedef void (*forward_row)(void *context, uint32_t row, const float *logits);
/* The best of the last row, in the order of ops_top_select; valid during the call only. */
typedef void (*forward_best)(void *context, const struct ops_candidate *top, uint32_t count);

struct forward_seq {
    struct kvops_seq kv; /* host pointers: blocks, sinks, window and what is hidden; the rest is
                            filled in here */
    const uint32_t *ids; /* [kv.row_count], every id below the vocabulary */
    uint64_t position;   /* of the first row */
    enum forward_logits logits;
    uint32_t logits_first; /* FORWARD_ALL: the first row whose logits are wanted */
    forward_row row;
    /* FORWARD_LAST: so many of the best tokens will do (0: none, at most OPS_TOP_MAX). `best` then
     * gets them where the device offers it and no other sequence needs its row; else `row` is
     * called as ever. */
    uint32_t top;
    forward_best best;
    void *context;
    /* Written: */
    uint32_t bad_row;  /* the first row with a value that is not finite … */
    int32_t bad_layer; /* … after this layer (layers: in its logits), or -1 */
};
/* At most singles_max of one row, singles_max + FORWARD_TOGETHER_MAX in all. Logits of a bad row
 * are not given out. DEVICE: the step was not computed, whatever `row` was given. */
enum kv_err forward_run(struct forward *forward, const struct kvops_pool *pool,
                        struct forward_seq *seqs, uint32_t count);

/* A run in pieces, between which others may run; the bits are those of forward_run. `seqs` and all
 * that they point at stay as they are until it is dropped. What it needs beside the workspace is
 * its own, so that a piece is a few operations that nobody waits for. */
struct forward_beside;
uint32_t forward_layers(const struct forward *forward);
/* At most FORWARD_TOGETHER_MAX, and singles_max of one row. NOMEM. */
enum kv_err forward_beside_make(struct forward *forward, const struct kvops_pool *pool,
                                struct forward_seq *seqs, uint32_t count,
                                struct forward_beside **beside_out);
/* NULL is allowed. What it has enqueued may still run: device memory is used again in order. */
void forward_beside_drop(struct forward_beside *beside);
/* Layers [first, end): all of them from 0 to forward_layers, in order. */
void forward_beside_layers(struct forward_beside *beside, uint32_t first, uint32_t end);
/* Behind the layers, once and while it has rows: waits for some of them. DEVICE, of any piece: no
 * row that was given counts. */
int forward_beside_has_rows(const struct forward_beside *beside);
enum kv_err forward_beside_rows(struct forward_beside *beside);
/* Calls `row` for those, and writes what is bad; others may run meanwhile, on another thread. One
 * of `parts` calls that may go on at once: all rows of a sequence are of the same. */
void forward_beside_give(struct forward_beside *beside, uint32_t part, uint32_t parts);

/* K and V of the last run's rows, on the device: [layer][K, V][kv_head][forward_chunk_rows][dim].
 * A sequence's rows begin at seq.kv.first_row. */
const uint16_t *forward_chunk(const struct forward *forward);
uint32_t forward_chunk_rows(const struct forward *forward);
/* Other K and V in their place, of the processor's memory. DEVICE. */
enum kv_err forward_put_chunk(struct forward *forward, const uint16_t *chunk);

#endif
