/* engine/session_tiers.c - the tiers of a session's blocks, and the planes that go or come.
 *
 * Responsible for: carrying out what policy.h decides, changing the policy, the blocks a session
 * points at.
 * Not responsible for: the decision, or reading planes back (hooks.planes_wanted).
 */
#include "engine/engine_inner.h"

#include <assert.h>
#include <string.h>

enum kv_err engine_inner_check_policy(const struct image_policy *policy, struct kv_diag *diag) {
    const char *wrong = image_policy_wrong(policy);

    return wrong ? kv_diag_set(diag, KV_ERR_INVALID, "tier policy: %s", wrong) : KV_OK;
}

void engine_inner_push_block(struct session *session, struct block *block, enum layout_tier tier) {
    uint32_t index = session->block_count;

    assert(index < session->block_capacity && block->index == index);
    session->blocks[index] = block;
    session->views[index] = block->map;
    session->views[index].tier = (uint8_t)tier;
    block_reader(block, tier, 1);
    session->block_count++;
}

static struct policy_move move_of(const struct session *session, uint32_t index, uint64_t n_kv) {
    const struct block *block = session->blocks[index];
    struct policy_block state = {.tier = session->views[index].tier,
                                 .resident = block->resident,
                                 .arriving = block->arriving,
                                 .unavailable = block->unavailable,
                                 .durable = block->state == BLOCK_DURABLE};
    struct policy_move move;

    state.others = block_read_by_others(block, state.tier);
    if (!session->promoting) {
        policy_block_move(engine_inner_policy(session), n_kv, index, &state, &move);
        return move;
    }
    policy_block_move(&session->promoted, n_kv, index, &state, &move);
#ifndef BREAK_PROMOTE_EARLY
    move.tier = state.tier; /* until all of the promotion is there (session_pressure.c) */
#endif
    return move;
}

static void ask_for_planes(struct session *session, struct block *block, uint32_t streams) {
    const struct engine_hooks *hooks = &session->engine->settings.hooks;

    if (!hooks->planes_wanted || slots_available(&session->engine->slots, 0) < slots_of(streams))
        return;
    block_expect(block, streams);
    engine_inner_expect(session, block);
}

/* Between two questions, and between two layers of one, a block is read as it was. */
static void hold_still(struct session *session, uint32_t index, struct policy_move *move) {
    enum layout_tier tier = (enum layout_tier)session->views[index].tier;

#ifdef BREAK_ASKED_TIER
    return;
#endif
    if (!session->asked || move->tier == tier)
        return;
    move->tier = tier;
    move->free &= ~layout_tier_streams(tier);
    move->idle &= ~layout_tier_streams(tier);
    session->late = 1;
}

void engine_inner_review_block(struct session *session, uint32_t index) {
    struct policy_move move = move_of(session, index, session->n_kv);
    struct block *block = session->blocks[index];

    hold_still(session, index, &move);
    block_read_at(block, session->views[index].tier, move.tier);
    if (move.free)
        block_free(block, move.free);
    block_set_idle(block, slots_of(move.idle));
    session->settled &= move.want == 0;
    if (move.want && !block->arriving && !session->held)
        ask_for_planes(session, block, move.want);
    session->views[index] = block->map;
    session->views[index].tier = (uint8_t)move.tier;
}

void engine_inner_review(struct session *session) {
    session->settled = 1;
    slots_gather(&session->engine->slots);
    for (uint32_t i = 0; i < session->block_count; i++)
        engine_inner_review_block(session, i);
    slots_gather_end(&session->engine->slots);
}

void engine_inner_review_soon(struct engine *engine) {
    for (uint32_t i = 0; i < engine->session_count; i++)
        engine->sessions[i]->settled = 0;
}

/* Blocks at `age` or beyond. */
static uint64_t aged(uint64_t n_kv, uint64_t age) {
    uint64_t first = age + LAYOUT_SINK_TOKENS + LAYOUT_BLOCK_TOKENS;

    return n_kv < first ? 0 : (n_kv - first) / LAYOUT_BLOCK_TOKENS + 1;
}

/* 1 when the policy gives a block that was there before another tier now. */
static int tiers_move(const struct session *session, uint64_t before) {
    const struct image_policy *policy = engine_inner_policy(session);
    int move = policy->pressure || session->promoting;

#ifdef BREAK_REVIEW_STEP
    return 0;
#endif
    for (uint32_t i = 0; i < policy->age_count && !move; i++)
        move = aged(before, policy->ages[i]) != aged(session->n_kv, policy->ages[i]);
    return move;
}

void engine_inner_review_step(struct session *session, uint64_t before, int sealed) {
    if (!session->settled || tiers_move(session, before))
        engine_inner_review(session);
    else if (sealed)
        engine_inner_review_block(session, session->block_count - 1);
}

uint32_t engine_inner_coarsened(const struct session *session, uint64_t n_kv) {
    uint32_t slots = 0;

    for (uint32_t i = 0; i < session->block_count; i++) {
        struct policy_move move = move_of(session, i, n_kv);
        uint32_t waiting = session->blocks[i]->idle_slots;
        uint32_t unread = slots_of(move.free | move.idle);
        slots += unread > waiting ? unread - waiting : 0;
    }
    return slots;
}

/* Slots of all planes that `policy` would read and that are neither here nor on their way. */
static uint32_t missing_slots(const struct session *session, const struct image_policy *policy) {
    uint32_t slots = 0;

    for (uint32_t i = 0; i < session->block_count; i++) {
        const struct block *block = session->blocks[i];
        uint32_t wanted = layout_tier_streams(image_tier(policy, i, session->n_kv));
        slots += slots_of(wanted & ~block->resident & ~block->arriving);
    }
    return slots;
}

void engine_inner_forget_policy(struct session *session) {
    struct image_policy_change *policies = session->policies;
    uint32_t oldest = image_policy_equal(&policies[0].policy, &policies[1].policy) ? 2 : 0;

    assert(session->policy_count > oldest + 1);
    memmove(policies + oldest, policies + oldest + 1,
            (session->policy_count - oldest - 1) * sizeof *policies);
    session->policy_count--;
}

/* A policy said twice in a row is the mark of mixed history (image_mixed_from): that entry stays,
 * and no other is made to look like it. */
void engine_inner_record_policy(struct session *session, const struct image_policy *policy) {
    struct image_policy_change *last = &session->policies[session->policy_count - 1];
    int first = session->policy_count == 1;
    int marked = !first && image_policy_equal(&last->policy, &last[-1].policy);

    if (image_policy_equal(&last->policy, policy))
        return;
    /* Changed and changed back between two tokens. */
    if (last->from_n_kv == session->n_kv && !marked && !first &&
        image_policy_equal(&last[-1].policy, policy)) {
        session->policy_count--;
        return;
    }
    if (last->from_n_kv != session->n_kv || marked) {
        if (session->policy_count == IMAGE_POLICIES_MAX)
            engine_inner_forget_policy(session);
        last = &session->policies[session->policy_count++];
    }
    *last = (struct image_policy_change){session->n_kv, *policy};
}

enum kv_err session_set_policy(struct session *session, const struct image_policy *policy,
                               struct kv_diag *diag) {
    const struct image_policy *now = engine_inner_policy(session);
    struct engine_inner_need need = {session, 0, 0, 0};
    enum kv_err err = engine_inner_check_policy(policy, diag);

    if (err != KV_OK)
        return err;
    if (policy->recipe != now->recipe || !policy->top_k8v8 != !now->top_k8v8)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "recipe and top of session '%s' are fixed: start a new session",
                           session->name);
    if (policy->pressure || now->pressure)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "session '%s': only the ages of policy age can be changed",
                           session->name);
    if (session->state == SESSION_FAILED || session->asked)
        return kv_diag_set(diag, KV_ERR_BUSY, "session '%s' %s", session->name,
                           session->asked ? "is being asked: try again later" : "has failed");
    if (session->policy_count == IMAGE_POLICIES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "session '%s' has changed its policy %d times",
                           session->name, IMAGE_POLICIES_MAX);
    need.slots = missing_slots(session, policy);
    if (need.slots) {
        err = engine_inner_room(session->engine, &need, diag);
        if (err != KV_OK)
            return err;
    }
    session->held = 0;
    engine_inner_record_policy(session, policy);
    for (uint32_t i = 0; i < session->block_count; i++)
        session->blocks[i]->unavailable = 0;
    engine_inner_review_soon(session->engine); /* others may share them */
    engine_inner_review(session);
    return KV_OK;
}
