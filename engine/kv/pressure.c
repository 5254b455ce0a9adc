/* engine/kv/pressure.c - which blocks take or give back a step of the ladder when slots are short.
 *
 * Responsible for: the contract of pressure.h.
 * Not responsible for: slots, blocks, sessions.
 */
#include "engine/kv/pressure.h"

#include <stdlib.h>

static int colder(const void *a, const void *b) {
    const struct pressure_session *x = a, *y = b;

    if (!x->active != !y->active)
        return x->active ? 1 : -1;
    if (x->last_used_ns != y->last_used_ns)
        return x->last_used_ns < y->last_used_ns ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Slots that one block gives up with the step; 0 where the ladder has none. */
static uint32_t gain(const struct image_policy *policy, uint32_t step) {
    if (step >= image_steps(policy))
        return 0;
    return layout_tier_slots(image_step_tier(policy, step)) -
           layout_tier_slots(image_step_tier(policy, step + 1));
}

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static uint32_t demote(uint32_t needed, struct pressure_session *sessions, uint32_t count,
                       struct pressure_move *moves_out) {
    uint32_t made = 0;
    int waiting = 0;

    for (uint32_t step = 0; step < IMAGE_AGES_MAX && !waiting; step++) {
        for (uint32_t i = 0; i < count && needed > 0; i++) {
            struct pressure_session *session = &sessions[i];
            uint32_t *end = &session->policy.ends[step];
            uint32_t each = gain(&session->policy, step);
            uint32_t behind = step == 0 ? session->blocks : end[-1];
#ifdef BREAK_PRESSURE_VOLATILE
            session->durable = session->blocks;
#endif
            waiting |= step == 0 && session->durable < session->blocks;
            behind = least(behind, session->durable);
            if (each == 0 || *end >= behind)
                continue;
            uint32_t taken = least(behind - *end, (needed + each - 1) / each);
            moves_out[made++] = (struct pressure_move){session->index, step, *end, *end + taken, 0};
            *end += taken;
            needed -= least(needed, taken * each);
        }
#ifdef BREAK_PRESSURE_STEPS
        waiting = 0;
#endif
    }
    return made;
}

static uint32_t promote(uint32_t budget, struct pressure_session *sessions, uint32_t count,
                        struct pressure_move *moves_out) {
    uint32_t made = 0, blocks = PRESSURE_BRING_MAX;

    for (uint32_t step = IMAGE_AGES_MAX; step-- > 0;) {
        for (uint32_t i = count; i-- > 0;) {
            struct pressure_session *session = &sessions[i];
            uint32_t *end = &session->policy.ends[step];
            uint32_t each = gain(&session->policy, step);
            uint32_t before = step + 1 < IMAGE_AGES_MAX ? end[1] : 0;
            if (before < session->stuck)
                before = session->stuck;
            if (each == 0 || *end <= before)
                continue;
            uint32_t given = least(least(*end - before, budget / each), blocks);
            if (given > 0)
                moves_out[made++] =
                    (struct pressure_move){session->index, step, *end - given, *end, 1};
            *end -= given;
            budget -= given * each;
            blocks -= given;
            if (*end > before) /* the reverse order: nothing overtakes it */
                return made;
        }
    }
    return made;
}

uint32_t pressure_moves(const struct pressure_state *state, struct pressure_session *sessions,
                        uint32_t count, struct pressure_move *moves_out) {
    if (count == 0)
        return 0;
    qsort(sessions, count, sizeof *sessions, colder);
    if (state->wanted > 0)
        return demote(state->wanted, sessions, count, moves_out);
    if (state->free < state->low)
        return demote(state->high - state->free, sessions, count, moves_out);
    if (state->free > state->high)
        return promote(state->free - state->high, sessions, count, moves_out);
    return 0;
}
