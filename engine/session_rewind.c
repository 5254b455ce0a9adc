/* engine/session_rewind.c - a session goes back to its first n tokens.
 *
 * Responsible for: which blocks and window tokens stay, what is to be prefilled again, and cutting
 * roles, needles and policies at the new end.
 * Not responsible for: what is durable of it (snapshot/), or stepping.
 *
 * Sealed blocks cannot become window tokens again, so going back behind the window's first token
 * leaves the last 256 to 511 tokens without KV; they are prefilled against the blocks that stay.
 */
#include "engine/engine_inner.h"

static void drop_blocks(struct session *session, uint32_t keep) {
    engine_inner_review_soon(session->engine);
    while (session->block_count > keep) {
        uint32_t last = --session->block_count;
        block_reader(session->blocks[last], session->views[last].tier, -1);
        block_drop(session->blocks[last]);
    }
}

static int stands_before(const struct image_needle *needle, uint64_t n) {
    int before = 1;

    for (uint32_t i = 0; i < needle->span_count; i++)
        before &= needle->spans[i].end <= n;
    return before;
}

/* What was asked at an end that is gone says nothing of a later one of the same length: not asked,
 * until the next explicit snapshot. */
static void forget_answers(struct session *session) {
    struct image_probe probes[IMAGE_PROBES_MAX];
    uint32_t kept = 0;

    for (uint32_t i = 0; i < session->needle_count; i++)
        session->needles[i].asked_n_kv = 0;
    for (uint32_t i = 0; i < session->probe_count; i++) {
        probes[kept] = session->probes[i];
        probes[kept].asked_n_kv = 0;
        kept += probes[kept].end <= session->n;
    }
    transfer_set_probes(session, probes, kept);
}

static void cut_text(struct session *session, uint64_t n) {
    uint32_t kept = 0;

    while (session->role_count && session->roles[session->role_count - 1].first >= n)
        session->role_count--;
    if (session->role_count && session->roles[session->role_count - 1].end > n)
        session->roles[session->role_count - 1].end = n;
    for (uint32_t i = 0; i < session->needle_count; i++) {
        if (stands_before(&session->needles[i], n))
            session->needles[kept++] = session->needles[i];
        else
            engine_inner_needle_release(session->engine, &session->needles[i]);
    }
    session->needle_count = kept;
#ifndef BREAK_REWIND_ASKED
    forget_answers(session);
#endif
    struct image_policy now = *engine_inner_policy(session);
    session->promoting = 0;
    while (session->policy_count > 1 &&
           session->policies[session->policy_count - 1].from_n_kv > session->n_kv)
        session->policy_count--;
    /* What was given up under pressure is not read finer for going back; new blocks are. */
    for (uint32_t i = 0; now.pressure && i < IMAGE_AGES_MAX; i++)
        if (now.ends[i] > session->block_count)
            now.ends[i] = session->block_count;
    if (now.pressure)
        engine_inner_record_policy(session, &now);
}

enum kv_err session_rewind(struct session *session, uint64_t n, struct kv_diag *diag) {
    uint64_t pending = n > 0 ? n - 1 : 0;
    uint32_t keep = (uint32_t)layout_sealed_blocks(n);

    if (session->state != SESSION_IDLE || engine_inner_has_work(session) || session->asked)
        return kv_diag_set(diag, KV_ERR_BUSY, "session '%s' is %s: wait until it is idle",
                           session->name,
                           session->asked ? "being asked" : session_state_name(session->state));
    if (n >= session->n)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "session '%s' has %llu tokens: it can go back to a number below that, "
                           "not to %llu",
                           session->name, (unsigned long long)session->n, (unsigned long long)n);
    session->n = n;
    if (layout_sealed_blocks(pending) == session->block_count) {
        session->n_kv = pending;
    } else {
#ifdef BREAK_REWIND
        keep++;
#endif
        drop_blocks(session, keep);
        session->n_kv = LAYOUT_SINK_TOKENS + (uint64_t)keep * LAYOUT_BLOCK_TOKENS;
        if (session->n_kv > pending)
            session->n_kv = pending;
    }
    cut_text(session, n);
    session->kept_end = n;
    session->logits_n_kv = 0;
    /* A session of one pending token could not be saved: that token is read again. */
#ifdef BREAK_REWIND_FIRST
    session->fed_end = n - session->n_kv > 1 ? n : session->n_kv;
#else
    session->fed_end = n - session->n_kv > 1 || session->n_kv == 0 ? n : session->n_kv;
#endif
    session->last_used_ns = kv_clock_now_ns(session->engine->settings.clock);
    engine_inner_review(session);
    if (session->fed_end > session->n_kv)
        (void)session_move(session, SESSION_ACTIVE);
    return KV_OK;
}

void session_reseed(struct session *session, uint64_t seed) {
    session->sampler.seed = seed;
}

enum kv_err session_resample(struct session *session, const struct image_sampler *sampler,
                             struct kv_diag *diag) {
    const struct sampler_settings settings = {sampler->temperature, sampler->top_p, sampler->top_k,
                                              sampler->seed};
    enum kv_err err = sampler_check(&settings, diag);

    if (err == KV_OK)
        session->sampler = *sampler;
    return err;
}
