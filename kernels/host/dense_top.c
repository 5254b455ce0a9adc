/* kernels/host/dense_top.c - the best tokens of a row of logits, in plain C.
 *
 * Responsible for: the specification of struct ops_top.
 * Not responsible for: choosing among them (engine/model/sampler.c).
 */
#include "kernels/ops.h"

#include <assert.h>
#include <math.h>

/* What is not finite goes first, so that it is seen; then the larger logit; then the lower id. */
static int before(struct ops_candidate a, struct ops_candidate b) {
    int a_finite = isfinite(a.logit) != 0, b_finite = isfinite(b.logit) != 0;

    if (a_finite != b_finite)
        return b_finite;
    if (a_finite && a.logit != b.logit)
        return a.logit > b.logit;
    return a.id < b.id;
}

void ops_top_select(const struct ops_top *args, uint32_t first_row, uint32_t end_row) {
    assert(args->k >= 1 && args->k <= OPS_TOP_MAX && args->k <= args->count);
    for (uint32_t row = first_row; row < end_row; row++) {
        struct ops_candidate *top = args->top + (size_t)row * args->k;
        uint32_t held = 0;
        for (uint32_t id = 0; id < args->count; id++) {
            struct ops_candidate one = {args->logits[row * args->stride + id], id};
            if (held == args->k && !before(one, top[held - 1]))
                continue;
            uint32_t at = held < args->k ? held++ : held - 1;
            for (; at > 0 && before(one, top[at - 1]); at--)
                top[at] = top[at - 1];
            top[at] = one;
        }
    }
}
