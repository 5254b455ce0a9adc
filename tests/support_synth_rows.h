/* tests/support_synth_rows.h - K and V of a synth model's context tokens, without a prefill.
 *
 * Responsible for: rows of a chunk out of token, token before and position alone.
 * Not responsible for: where they go (engine/fill.h), the model (engine/model/synth.h).
 *
 * Closed form: K and V of a context token depend on it, the token before and the position alone.
 * Sealed planes and META have equal bits; in BF16, elements that are zero in the closed form may be
 * up to SYNTH_ZERO_MAX. It does not hold for question tokens, the five tokens behind one, and the
 * token behind a " …VI" (there one element in a thousand may be another BF16 value).
 *
 * Threads: one owner, but for synth_rows_part.
 * Units: tokens; elements [layer][K, V][kv_head][row][dim].
 */
#ifndef TESTS_SUPPORT_SYNTH_ROWS_H
#define TESTS_SUPPORT_SYNTH_ROWS_H

#include "engine/model/synth.h"

#define SYNTH_ZERO_MAX 1e-30f

struct synth_rows;
/* NOMEM. */
enum kv_err synth_rows_make(const struct synth *synth, const struct kv_alloc *alloc,
                            struct synth_rows **rows_out, struct kv_diag *diag);
void synth_rows_drop(struct synth_rows *rows); /* NULL is allowed */
/* Rows [0, count) of a chunk of `chunk_rows`: ids[-1] is the token before, unless position is 0. */
struct synth_stretch {
    const uint32_t *ids;
    uint64_t position;
    uint32_t count, chunk_rows;
};
/* What a stretch's tokens need, once. NOMEM, INVALID (a token without a closed form). */
enum kv_err synth_rows_ready(struct synth_rows *rows, const struct synth_stretch *stretch,
                             struct kv_diag *diag);
/* Heads [first, end) of layers x kv_heads, of the stretch that is ready; any threads, beside each
 * other and beside nothing else. Every head is asked for once before another stretch is ready:
 * rows of tokens that are new are made here. */
void synth_rows_part(const struct synth_rows *rows, const struct synth_stretch *stretch,
                     uint32_t first, uint32_t end, uint16_t *chunk);
/* Both, of all heads. */
enum kv_err synth_rows_fill(struct synth_rows *rows, const struct synth_stretch *stretch,
                            uint16_t *chunk, struct kv_diag *diag);

#endif
