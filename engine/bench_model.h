/* engine/bench_model.h - how fast prefill and decode run, and where the time goes.
 *
 * Responsible for: one session driven through given depths, timed, with the time per class of
 * operation; the multiply-add rate of the same cores for comparison.
 * Not responsible for: text (the caller has ids), printing, other engines' figures.
 *
 * Threads: the scheduler thread, with no other session working.
 * Units: tokens, nanoseconds, floating-point operations (a multiply-add counts 2).
 * Errors: as engine.h.
 */
#ifndef ENGINE_BENCH_MODEL_H
#define ENGINE_BENCH_MODEL_H

#include "engine/engine.h"

enum { BENCH_MODEL_DEPTHS_MAX = 8, BENCH_MODEL_CLASSES_MAX = 16 };

struct bench_model_options {
    const uint32_t *ids; /* at least the last depth + decode_tokens of them */
    uint32_t id_count;
    struct image_policy policy;
    uint32_t depths[BENCH_MODEL_DEPTHS_MAX]; /* rising; 0 means after one token */
    uint32_t depth_count;
    uint32_t decode_tokens;                                          /* timed at each depth */
    uint64_t rate_iterations;                                        /* of the multiply-add loop */
    void (*progress)(void *context, uint32_t done, uint32_t tokens); /* NULL is allowed */
    void *context;
};

struct bench_model_phase {
    uint64_t tokens, ns;
    uint64_t flops; /* of matrix products and attention */
    uint64_t class_ns[BENCH_MODEL_CLASSES_MAX];
};
struct bench_model_depth {
    uint32_t depth;
    struct bench_model_phase prefill; /* from the depth before to this one */
    struct bench_model_phase decode;
};
struct bench_model_result {
    struct bench_model_depth depths[BENCH_MODEL_DEPTHS_MAX];
    uint32_t depth_count, class_count, threads;
    const char *class_names[BENCH_MODEL_CLASSES_MAX];
    uint64_t rate_flops, rate_ns; /* all threads together */
};
enum kv_err bench_model(struct engine *engine, const struct bench_model_options *options,
                        struct bench_model_result *result_out, struct kv_diag *diag);

#endif
