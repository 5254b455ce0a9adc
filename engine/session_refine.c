/* engine/session_refine.c - sessions that are awake at less than their tier map.
 *
 * Responsible for: asking for the planes that come behind, when that is over, and what the tokens
 * computed meanwhile saw: the mark of mixed history and the tier of each.
 * Not responsible for: which planes a policy gives (kv/policy.h), or reading them.
 */
#include "engine/engine_inner.h"

#include <string.h>

uint32_t engine_inner_coarse(const struct session *session, enum layout_tier *coarsest_out) {
    uint32_t count = 0;

    *coarsest_out = session->block_count ? session->views[0].tier : LAYOUT_TIER_BF16;
    for (uint32_t i = 0; i < session->block_count; i++) {
        enum layout_tier tier = session->views[i].tier;
        count += tier != image_tier(engine_inner_policy(session), i, session->n_kv);
        if (layout_tier_slots(tier) < layout_tier_slots(*coarsest_out))
            *coarsest_out = tier;
    }
    return count;
}

/* Mixed history begins where a block is first read at a coarser tier than its policy gives: from
 * then on the tier history repeats its policy. */
void engine_inner_mark_mixed(struct session *session) {
    if (image_mixed_from(session->policies, session->policy_count))
        return;
    if (session->policy_count == IMAGE_POLICIES_MAX)
        engine_inner_forget_policy(session);
    session->policies[session->policy_count] =
        (struct image_policy_change){session->n_kv, *engine_inner_policy(session)};
    session->policy_count++;
}

void engine_inner_rows_saw(struct session *session) {
    struct receipt_seen *saw = &session->step_seen;

    if (!session->watched)
        return;
    saw->coarse_blocks = engine_inner_coarse(session, &saw->coarsest);
#ifndef BREAK_EAGER_MARK
    if (saw->coarse_blocks)
        engine_inner_mark_mixed(session);
#endif
}

void engine_inner_token_saw(struct session *session, uint64_t position) {
    const struct receipt_seen *saw = &session->step_seen;
    struct receipt_seen *last =
        session->seen_count ? &session->seen[session->seen_count - 1] : NULL;

    if (!session->watched)
        return;
    int same = last && last->end == position && last->coarsest == saw->coarsest &&
               !last->coarse_blocks == !saw->coarse_blocks;
    if (!same && session->seen_count < RECEIPT_SEEN_MAX) {
        last = &session->seen[session->seen_count++];
        *last = (struct receipt_seen){position, position, saw->coarsest, 0};
    }
    /* With no room for another run the last one says the coarsest that any of its tokens saw. */
    last->end = position + 1;
    if (layout_tier_slots(saw->coarsest) < layout_tier_slots(last->coarsest))
        last->coarsest = saw->coarsest;
    if (saw->coarse_blocks > last->coarse_blocks)
        last->coarse_blocks = saw->coarse_blocks;
}

void engine_inner_expect(struct session *session, struct block *block) {
    const struct engine_hooks *hooks = &session->engine->settings.hooks;

    /* As for a load: nothing of the slots' last owners may come after what is read. */
    (void)device_wait(session->engine->device, DEVICE_STEP);
    block_hold(block);
    hooks->planes_wanted(hooks->context, session, block);
}

void engine_inner_partial_over(struct session *session) {
    if (session->state == SESSION_PARTIAL && !session_promoting(session))
        (void)session_move(session, SESSION_IDLE);
}

int session_promoting(const struct session *session) {
    for (uint32_t i = 0; i < session->block_count; i++)
        if (session->blocks[i]->arriving & ~session->blocks[i]->lost)
            return 1;
    return 0;
}

void session_refine(struct session *session) {
    int expecting = session->expecting;

    session->held = 0;
    session->expecting = 0;
    for (uint32_t i = 0; expecting && i < session->block_count; i++) {
        struct block *block = session->blocks[i];
        if (!block->arriving)
            continue;
        if (session->engine->settings.hooks.planes_wanted)
            engine_inner_expect(session, block);
        else
            block_settle(block, KV_ERR_NOT_FOUND);
    }
    engine_inner_review(session);
    if (session->state == SESSION_WAKING) {
        (void)session_move(session, SESSION_PARTIAL);
        engine_inner_partial_over(session);
    }
}
