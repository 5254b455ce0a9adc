/* engine/fill.h - a session's tokens with K and V that somebody else has computed.
 *
 * Responsible for: taking rows chunk by chunk on the path of a prefill: seal, append, tiers, hooks.
 * Not responsible for: where the rows come from (a closed form in tests/): nothing is computed or
 * checked here.
 *
 * For tests and demonstrations at lengths where a prefill would only burn time.
 *
 * Threads: the scheduler thread, between steps; `ready` and `rows` run on others meanwhile.
 * Units: tokens; elements [layer][K, V][kv_head][chunk_rows][dim].
 */
#ifndef ENGINE_FILL_H
#define ENGINE_FILL_H

#include "engine/session.h"

struct fill_stretch {
    const uint32_t *ids; /* ids[-1] is the token before, unless position is 0 */
    uint64_t position;
    uint32_t count;
    uint32_t chunk_rows;
};
/* What the rows of a stretch need beforehand: stretch by stretch, in order. */
typedef enum kv_err (*fill_ready)(void *context, const struct fill_stretch *stretch,
                                  struct kv_diag *diag);
/* Rows of heads [first, end), counted over layers x kv_heads: on several threads at once. */
typedef void (*fill_rows)(void *context, const struct fill_stretch *stretch, uint32_t first,
                          uint32_t end, uint16_t *chunk);

struct fill {
    const uint32_t *ids;
    uint32_t count;
    fill_ready ready;
    fill_rows rows;
    void *context;
    uint32_t threads; /* that make rows, ahead of the caller, who seals them; the same bits */
};
/* Appends the ids as one span IMAGE_RAW, IDLE afterwards, nothing to sample from until something is
 * fed. After an error the session has the whole chunks before it. Errors of session_feed (BUSY also
 * while tokens wait for their prefill), of `ready`, and as for a step: NO_SLOTS, DEVICE, NOMEM. */
enum kv_err fill_session(struct session *session, const struct fill *fill, struct kv_diag *diag);

/* Of a chunk, as `rows` writes it. */
uint64_t fill_chunk_bytes(const struct engine *engine);
uint32_t fill_chunk_rows(const struct engine *engine);

#endif
