/* engine/probe.h - spans of a session's own text, asked to see that its memory is reachable.
 *
 * Responsible for: choosing spans over depth, tiers and block boundaries, keeping those that can
 * fail, asking them again.
 * Not responsible for: facts that a user states (needle.h), when probes are asked (snapshot/,
 * restore/).
 *
 * A probe is PROBE_QUESTION tokens of the session's text and the PROBE_ANSWER tokens behind them.
 * It is asked as one teacher-forced throwaway chunk of just these tokens, on top of the session: a
 * memory that can be reached repeats what came next. Passed: every argmax of the answer agrees. It
 * is kept only if it passed, and with the blocks and window pages under the span hidden did not
 * pass and lost at least NEEDLE_DROP_NATS of the answer's log-probability.
 *
 * Threads: the scheduler thread.
 * Units: tokens, nats.
 * Errors: BUSY (fed tokens without KV), LIMIT (no room for a question at the end of the context),
 * DEVICE, NOMEM.
 */
#ifndef ENGINE_PROBE_H
#define ENGINE_PROBE_H

#include "engine/engine.h"
#include "engine/transfer.h"

enum { PROBE_QUESTION = 16, PROBE_ANSWER = 3, PROBE_TRIES = 3 };

/* What a session's length and policy say, pure: place `index` of `count`, try `try` of PROBE_TRIES.
 * Every zone (a run of blocks of one tier, then the window) gets its share of the places, even
 * depths within it; every second place lies across the boundary of two blocks or pages. 0 when
 * there is no such place. */
struct probe_text {
    uint64_t n_kv;
    const struct image_policy *policy;
};
int probe_place(const struct probe_text *text, uint32_t index, uint32_t count, uint32_t try_index,
                struct image_probe *probe_out);

struct probe_report {
    uint32_t tried;  /* spans asked plain */
    uint32_t passed; /* of them */
    uint32_t kept;
    uint32_t rows; /* tokens computed for it */
};
/* Chooses up to `count` (at most IMAGE_PROBES_MAX) anew; the session's probes are then these. */
enum kv_err probe_choose(struct session *session, uint32_t count, struct probe_report *report_out,
                         struct kv_diag *diag);

struct probe_result {
    int passed;
    float logp;
};
/* Asks probes [first, end) of the session in one batch, with their holes when `hole` is set. */
struct probe_asking {
    uint32_t first, end;
    int hole;
};
enum kv_err probe_ask(struct session *session, const struct probe_asking *asking,
                      struct probe_result *results_out, struct kv_diag *diag);

#endif
