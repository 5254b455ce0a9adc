/* engine/model/sampler.h - from logits to the next token.
 *
 * Responsible for: greedy choice, temperature, top-k, top-p, the random numbers, and the helpers
 * that read a row of logits (log-probability, margin, best k).
 * Not responsible for: computing logits.
 *
 * There is no generator state: the random number for a position is a function of seed and position
 * alone, so that a restored session goes on as the never-evicted one. Order of the filters:
 * temperature, then top-k, then top-p over what is left; then the token whose cumulative
 * probability, in order of falling logit (ties: lower id first), passes the random number. All
 * arithmetic is plain C with its own exp and log, in double, but that a sum over a whole row takes
 * sixteen at a time in float (relative error below 2^-22): equal bits on every machine.
 *
 * Threads: pure.
 * Units: positions; natural logarithms.
 */
#ifndef ENGINE_MODEL_SAMPLER_H
#define ENGINE_MODEL_SAMPLER_H

#include <stdint.h>

#include "store/base/diag.h"

#define SAMPLER_TOP_K_ALL UINT32_MAX

/* Every field is set by the caller. */
struct sampler_settings {
    float temperature; /* 0 is greedy; at most 100 */
    float top_p;       /* above 0, at most 1; 1 keeps all */
    uint32_t top_k;    /* at least 1; SAMPLER_TOP_K_ALL keeps all */
    uint64_t seed;
};

struct sampler_candidate {
    float logit;
    uint32_t id;
};

/* One row. `position` is that of the token to be chosen. */
struct sampler_row {
    const float *logits;
    uint32_t count;
    uint64_t position;
};

/* KV_ERR_INVALID, naming the setting and its range. */
enum kv_err sampler_check(const struct sampler_settings *settings, struct kv_diag *diag);

/* `scratch` has row->count elements. KV_ERR_DEVICE: a logit is not finite; the diag names position
 * and token. KV_ERR_INVALID: as sampler_check, or an empty row. */
enum kv_err sampler_pick(const struct sampler_settings *settings, const struct sampler_row *row,
                         struct sampler_candidate *scratch, uint32_t *id_out, struct kv_diag *diag);

/* A device can send the best candidates instead of a row: how many decide as all `count` would, at
 * most SAMPLER_TOP_MAX; 0 when the whole row is needed. */
enum { SAMPLER_TOP_MAX = 64 };
uint32_t sampler_wanted(const struct sampler_settings *settings, uint32_t count);
/* Bit for bit the choice of sampler_pick over a row whose sampler_wanted best are `top`, as
 * sampler_top orders them. Errors as sampler_pick; INVALID also when `count` is not what is
 * wanted. */
struct sampler_best {
    const struct sampler_candidate *top;
    uint32_t count;
    uint64_t position;
};
enum kv_err sampler_pick_best(const struct sampler_settings *settings,
                              const struct sampler_best *best, uint32_t *id_out,
                              struct kv_diag *diag);

/* The k largest by falling logit, ties by lower id; k ≤ row->count. KV_ERR_DEVICE as above,
 * KV_ERR_INVALID when k is out of range. */
enum kv_err sampler_top(const struct sampler_row *row, uint32_t k,
                        struct sampler_candidate *top_out, struct kv_diag *diag);

/* Both in as few looks at the row as they take: the greedy choice (lower id on ties), and the log
 * of the softmax at `id`, within 2^-22. Errors as of sampler_log_prob. */
struct sampler_expected {
    uint32_t best;
    double log_prob;
};
enum kv_err sampler_expect(const struct sampler_row *row, uint32_t id,
                           struct sampler_expected *expected_out, struct kv_diag *diag);
/* Log of the softmax at `id`, likewise. KV_ERR_DEVICE, KV_ERR_INVALID (id out of range) as
 * above. */
enum kv_err sampler_log_prob(const struct sampler_row *row, uint32_t id, double *log_prob_out,
                             struct kv_diag *diag);

/* In [0, 1), 53 random bits: seed and position each go through a 64-bit finaliser (two rounds of
 * xor-shift and odd multiply), so that neighbouring positions and seeds are unrelated. */
double sampler_random(uint64_t seed, uint64_t position);

#endif
