/* engine/bench_quality.h - what each tier costs in quality, against our own BF16 KV.
 *
 * Responsible for: one text, teacher-forced through a bf16 session and through one v3 session per
 * tier in lockstep; the distance of their next-token distributions.
 * Not responsible for: choosing the text, printing.
 *
 * Every sealed block is read at the tier in question from the step after it was sealed; sinks and
 * window are BF16 as always. With `spoil` one more session runs at the finest tier whose K scales
 * of one page, in every layer and head, are wrong: it must look broken, else the measurement
 * itself is blind.
 *
 * The engine must have no hooks: nothing is written anywhere.
 *
 * Threads: the scheduler thread, with no other session working.
 * Units: nats; positions; bytes per token of the tail.
 * Errors: as engine.h.
 */
#ifndef ENGINE_BENCH_QUALITY_H
#define ENGINE_BENCH_QUALITY_H

#include "engine/engine.h"

enum { BENCH_QUALITY_ROWS = IMAGE_AGES_MAX + 2 }; /* a ladder's tiers, and one spoilt */

struct bench_quality_options {
    const uint32_t *ids;
    uint32_t id_count;        /* at most the context */
    enum image_recipe recipe; /* whose ladder or one tier, not bf16 … */
    int top_k8v8;             /* … and with K8V8 in front or without */
    uint32_t first_position;  /* earlier ones are not counted: nothing is sealed there */
    int spoil;
    void (*progress)(void *context, uint32_t tokens_done, uint32_t tokens); /* may be NULL */
    void *context;
};

struct bench_quality_row {
    enum layout_tier tier;
    int spoilt;
    uint64_t positions;
    double kl_mean, kl_999;  /* of the bf16 distribution from this one's */
    double same_top;         /* share of positions with the same largest logit */
    double perplexity_ratio; /* over the text's own next tokens */
    double bytes_per_token;  /* slots and scales of a block at this tier */
};
struct bench_quality_result {
    struct bench_quality_row rows[BENCH_QUALITY_ROWS]; /* the spoilt one last */
    uint32_t row_count;
    double perplexity; /* of the bf16 session */
    double bf16_bytes_per_token;
};
/* Needs slots for all sessions at once: INVALID names how many. */
enum kv_err bench_quality(struct engine *engine, const struct bench_quality_options *options,
                          struct bench_quality_result *result_out, struct kv_diag *diag);
/* Slots that a run needs. */
uint64_t bench_quality_slots(const struct bench_quality_options *options);

#endif
