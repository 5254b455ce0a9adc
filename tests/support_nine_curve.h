/* tests/support_nine_curve.h - one recipe with more and more users, and users that fit into a pool.
 *
 * Responsible for: filling users one after the other, steps of all of them in one batch at chosen
 * counts, slots predicted and counted, needles at the largest count.
 * Not responsible for: sleep and wake (support_nine_life.h), printing (nine.c).
 *
 * Threads: the scheduler thread.
 * Units: nanoseconds, slots, bytes.
 */
#ifndef TESTS_SUPPORT_NINE_CURVE_H
#define TESTS_SUPPORT_NINE_CURVE_H

#include "tests/support_nine.h"

enum { NINE_POINTS = 6, NINE_WARM = 4, NINE_STEPS_MAX = 4096 };

struct nine_point {
    uint32_t users, steps;
    double p50_ms, p99_ms;
    double tokens_s;            /* of all users, over the whole of the steps */
    uint64_t slots, step_bytes; /* step_bytes: weights and resident KV, read once each */
    struct nine_pool pool;      /* as counted */
};
struct nine_curve {
    const struct nine_recipe *recipe;
    struct image_policy policy;
    struct nine_point points[NINE_POINTS];
    uint32_t point_count;
    uint32_t wanted, largest;   /* users; fewer than wanted: the pool is full */
    char full[NINE_TEXT_BYTES]; /* what the engine said then */
    struct nine_pool predicted, counted;
    uint64_t used;
    int equal;
    char differs[NINE_TEXT_BYTES];
    struct nine_score score;
    struct nine_kept kept;
    double filled_s; /* of that many tokens */
    uint64_t filled_tokens;
};

/* Users stay awake afterwards, their needles registered; `users` of them, or as many as fit. */
enum kv_err nine_curve_run(struct nine *nine, const struct nine_recipe *recipe, uint32_t users,
                           uint32_t steps, struct nine_curve *curve_out, struct kv_diag *diag);

/* How many users of settings->tokens the engine takes before it has no slots, under each recipe
 * that has a goal, beside what arithmetic says about the same pool. */
struct nine_fit {
    uint32_t predicted, counted;
};
enum kv_err nine_fit_run(const struct nine_settings *settings, struct nine_fit fits[NINE_RECIPES],
                         struct kv_diag *diag);

#endif
