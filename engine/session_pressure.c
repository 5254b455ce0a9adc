/* engine/session_pressure.c - sessions under policy `pressure` give up planes and get them back.
 *
 * Responsible for: the state that kv/pressure.h decides on, carrying its moves out between steps,
 * in agreement with this: what a session's policy in force says is what attention reads. A finer
 * tier is therefore put in force only once every plane of the move is there, and all at once.
 * Not responsible for: the decision, or reading planes back (hooks.planes_wanted).
 */
#include "engine/engine_inner.h"
#include "engine/kv/pressure.h"

#include <string.h>

/* A session that is being saved, proved or asked stays as it is. */
static int may_move(const struct session *session) {
#ifndef BREAK_PRESSURE_ASKED
    if (session->asked)
        return 0;
#endif
#ifdef BREAK_PRESSURE_AGE
    return session->state == SESSION_IDLE || session->state == SESSION_ACTIVE;
#endif
    return engine_inner_policy(session)->pressure &&
           (session->state == SESSION_IDLE || session->state == SESSION_ACTIVE);
}

static struct pressure_session view_of(const struct session *session, uint32_t index) {
    struct pressure_session view = {.index = index,
                                    .policy = *engine_inner_policy(session),
                                    .blocks = session->block_count,
                                    .active = engine_inner_has_work(session) || session->unrun,
                                    .last_used_ns = session->last_used_ns};
    uint32_t all = layout_tier_streams(image_top(&view.policy));

    while (view.durable < view.blocks && session->blocks[view.durable]->state == BLOCK_DURABLE)
        view.durable++;
    for (uint32_t i = 0; i < view.blocks; i++)
        if (session->blocks[i]->unavailable & all)
            view.stuck = i + 1;
    return view;
}

static uint32_t decide(struct engine *engine, uint32_t wanted) {
    const struct engine_settings *settings = &engine->settings;
    uint64_t total = engine->slots.total;
    const struct pressure_state state = {
        .free = slots_available(&engine->slots, 0),
        .low = (uint32_t)(total * settings->slots_low_percent / 100),
        .high = (uint32_t)(total * settings->slots_high_percent / 100),
        .wanted = wanted};
    uint32_t count = 0;

    for (uint32_t i = 0; i < engine->session_count; i++)
        if (may_move(engine->sessions[i]))
            engine->pressed[count++] = view_of(engine->sessions[i], i);
    return pressure_moves(&state, engine->pressed, count, engine->moves);
}

/* --- down */

static void give_up_promotion(struct session *session) {
    if (!session->promoting)
        return;
    session->promoting = 0;
    engine_inner_review(session);
}

static struct image_policy after(const struct session *session, const struct pressure_move *move) {
    struct image_policy policy = *engine_inner_policy(session);

    policy.ends[move->step] = move->promote ? move->first : move->end;
#ifdef BREAK_PRESSURE_AGE
    policy.pressure = 1;
#endif
    return policy;
}

static void take_step(struct session *session, const struct pressure_move *move) {
    struct image_policy policy = after(session, move);

    session->promoting = 0;
#ifdef BREAK_PRESSURE_HISTORY
    session->policies[session->policy_count - 1].policy = policy;
#else
    engine_inner_record_policy(session, &policy);
#endif
    engine_inner_review(session);
}

uint32_t engine_inner_relieve(struct engine *engine, uint32_t wanted) {
    uint32_t before = engine->slots.free_count, freed, count;

    for (uint32_t i = 0; i < engine->session_count; i++)
        give_up_promotion(engine->sessions[i]);
    freed = engine->slots.free_count - before;
    if (wanted > 0 && freed >= wanted)
        return freed;
    count = decide(engine, wanted > 0 ? wanted - freed : 0);
    for (uint32_t i = 0; i < count; i++)
        if (!engine->moves[i].promote)
            take_step(engine->sessions[engine->moves[i].index], &engine->moves[i]);
    return engine->slots.free_count - before;
}

uint32_t engine_relieve(struct engine *engine, uint32_t slots) {
    uint32_t have = slots_available(&engine->slots, 0), before = engine->slots.free_count;

    if (have >= slots)
        return 0;
    if (engine_inner_leave(engine) && engine->slots.free_count > before)
        return engine->slots.free_count - before;
    return engine_inner_relieve(engine, slots - have);
}

/* --- up */

static void begin_promotion(struct engine *engine, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const struct pressure_move *move = &engine->moves[i];
        struct session *session = engine->sessions[move->index];
        if (!session->promoting)
            session->promoted = *engine_inner_policy(session);
        session->promoted.ends[move->step] = move->first;
        session->promoting = 1;
    }
    for (uint32_t i = 0; i < engine->session_count; i++)
        if (engine->sessions[i]->promoting)
            engine_inner_review(engine->sessions[i]);
}

/* 1 while planes are still on their way. */
static int end_promotion(struct session *session) {
    int missing = 0, lost = 0;

    for (uint32_t i = 0; i < session->block_count; i++) {
        const struct block *block = session->blocks[i];
        uint32_t wanted = layout_tier_streams(image_tier(&session->promoted, i, session->n_kv));
        uint32_t absent = wanted & ~block->resident;
        missing |= absent != 0;
        if (absent & ~block->arriving & ~block->unavailable)
            engine_inner_review_block(session, i);
        /* In doubt, unreadable, or no slots for it. */
        lost |= (absent & (block->lost | ~block->arriving)) != 0;
    }
    if (missing && !lost)
        return 1;
    session->promoting = 0;
    if (!lost)
        engine_inner_record_policy(session, &session->promoted);
    engine_inner_review(session);
    return 0;
}

static int balance(struct engine *engine) {
    uint32_t free = slots_available(&engine->slots, 0), count;
    int any = 0, raised = 0, coming = 0;

    for (uint32_t i = 0; i < engine->session_count; i++) {
        struct session *session = engine->sessions[i];
        if (!may_move(session))
            continue;
        any = 1;
        if (session->promoting)
            coming |= end_promotion(session);
        raised |= engine_inner_policy(session)->ends[0] > 0;
    }
    if (!any)
        return 0;
    if (free < (uint64_t)engine->slots.total * engine->settings.slots_low_percent / 100) {
        if (!engine_inner_leave(engine))
            (void)engine_inner_relieve(engine, 0);
        return 0;
    }
    if (coming || !raised || !engine->settings.hooks.planes_wanted)
        return coming;
    count = decide(engine, 0);
    if (count == 0 || !engine->moves[0].promote)
        return 0;
    begin_promotion(engine, count);
    return 1;
}

int engine_balance(struct engine *engine) {
    int applied = engine_apply(engine);

    return balance(engine) || applied;
}
