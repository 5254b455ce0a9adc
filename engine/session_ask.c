/* engine/session_ask.c - throwaway questions: a forward that leaves no trace.
 *
 * Responsible for: rows after a session's own, holes, the floor of the ladder, fingerprints.
 * Not responsible for: what is asked (needle.c) or what an answer means.
 */
#include "engine/engine_inner.h"

#include <string.h>

struct ask {
    session_row row;
    void *context;
    uint32_t skip; /* rows in front of the first that is given out */
};

static void give_row(void *context, uint32_t row, const float *logits) {
    const struct ask *ask = context;

    if (row >= ask->skip)
        ask->row(ask->context, row - ask->skip, logits);
}

/* Copies of the blocks at the ladder's floor. */
static enum kv_err floor_views(const struct session *session, struct kvops_block **views_out,
                               struct kv_diag *diag) {
    enum layout_tier tier = image_floor(engine_inner_policy(session));
    struct kvops_block *views = kv_alloc_copy(session->engine->settings.alloc, session->views,
                                              session->block_count * sizeof *session->views);

    if (!views)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a question to session '%s'",
                           session->name);
    for (uint32_t i = 0; i < session->block_count; i++)
        views[i].tier = (uint8_t)tier;
    *views_out = views;
    return KV_OK;
}

static int overlaps(const struct session_range *range, uint64_t first, uint64_t end) {
    return range->first < end && first < range->end;
}

static enum kv_err hide(const struct session *session, const struct session_ask *ask,
                        struct kvops_seq *seq, uint64_t **bits_out, struct kv_diag *diag) {
    uint64_t window_first =
        LAYOUT_SINK_TOKENS + (uint64_t)session->block_count * LAYOUT_BLOCK_TOKENS;
    uint64_t *bits = kv_alloc_zeroed(session->engine->settings.alloc, session->block_count / 64 + 1,
                                     sizeof *bits);

    if (!bits)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a question to session '%s'",
                           session->name);
    for (uint32_t i = 0; i < ask->hide_count; i++) {
        for (uint32_t b = 0; b < session->block_count; b++) {
            uint64_t first = LAYOUT_SINK_TOKENS + (uint64_t)b * LAYOUT_BLOCK_TOKENS;
            if (overlaps(&ask->hide[i], first, first + LAYOUT_BLOCK_TOKENS))
#ifdef BREAK_HOLE
                bits[0] |= 0;
#else
                bits[b / 64] |= 1ull << b % 64;
#endif
        }
        for (uint32_t p = 0; p < LAYOUT_WINDOW_PAGES_MAX; p++) {
            uint64_t first = window_first + (uint64_t)p * LAYOUT_PAGE_TOKENS;
            if (overlaps(&ask->hide[i], first, first + LAYOUT_PAGE_TOKENS))
                seq->hidden_pages |= 1u << p;
        }
    }
    seq->hidden_blocks = bits;
    *bits_out = bits;
    return KV_OK;
}

static enum kv_err check(const struct session *session, const struct session_ask *ask,
                         uint32_t rows, struct kv_diag *diag) {
    const struct engine_model *model = &session->engine->model;

    if (session->n - session->n_kv > 1 || session->fed_end > session->n_kv)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "session '%s' has fed tokens that are not prefilled yet", session->name);
    if (session->engine->committing)
        return kv_diag_set(diag, KV_ERR_BUSY, "a hook of a running step must not ask");
    if (session->state == SESSION_FAILED)
        return kv_diag_set(diag, KV_ERR_BUSY, "session '%s' has failed", session->name);
    if (rows == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "nothing to ask session '%s'", session->name);
    if (rows > FORWARD_CHUNK_ROWS || ask->count >= FORWARD_CHUNK_ROWS)
        return kv_diag_set(diag, KV_ERR_LIMIT, "a question of %u tokens: use at most %d",
                           ask->count, FORWARD_CHUNK_ROWS - 1);
    if (session->n_kv + rows > (uint64_t)model->context_tokens + FORWARD_BEYOND)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "a question of %u tokens at position %llu passes the context of %u",
                           rows, (unsigned long long)session->n_kv, model->context_tokens);
    for (uint32_t i = 0; i < ask->count; i++)
        if (ask->ids[i] >= model->vocab_count)
            return kv_diag_set(diag, KV_ERR_INVALID, "token id %u is outside the vocabulary of %u",
                               ask->ids[i], model->vocab_count);
    return KV_OK;
}

enum kv_err session_ask(struct session *session, const struct session_ask *ask, session_row row,
                        void *context, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    uint32_t pending = session->n > session->n_kv;
    uint32_t rows = ask->count + pending;
    struct ask given = {row, context, ask->count ? pending : 0};
    uint32_t ids[FORWARD_CHUNK_ROWS];
    struct forward_seq seq = {.kv = engine_inner_seq(session),
                              .ids = ids,
                              .position = session->n_kv,
                              .logits = FORWARD_ALL,
                              .row = give_row,
                              .context = &given};
    struct kvops_block *views = NULL;
    uint64_t *bits = NULL;
    enum kv_err err;

    KV_TRY(check(session, ask, rows, diag));
    if (pending)
        ids[0] = session->ids[session->n_kv];
    if (ask->count)
        memcpy(ids + pending, ask->ids, ask->count * sizeof *ids);
    seq.kv.row_count = rows;
    if (ask->floor) {
        KV_TRY(floor_views(session, &views, diag));
        seq.kv.blocks = views;
    }
    if (ask->hide_count)
        KV_TRY(hide(session, ask, &seq.kv, &bits, diag));
    if (forward_run(engine->forward, &engine->slots.pool, &seq, 1) != KV_OK)
        err = engine_inner_device(engine, diag);
    else if (seq.bad_layer >= 0)
        err = engine_inner_bad(session, &seq, diag);
done:
    kv_alloc_release(engine->settings.alloc, views);
    kv_alloc_release(engine->settings.alloc, bits);
    return err;
}

struct one_of_all {
    uint32_t ask;
    session_ask_row row;
    void *context;
};

static void give_row_of(void *context, uint64_t row, const float *logits) {
    const struct one_of_all *one = context;

    one->row(one->context, one->ask, row, logits);
}

enum kv_err session_ask_all(struct session *session, const struct session_ask *asks, uint32_t count,
                            session_ask_row row, void *context, struct kv_diag *diag) {
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < count && err == KV_OK; i++) {
        struct one_of_all one = {i, row, context};
        err = session_ask(session, &asks[i], give_row_of, &one, diag);
    }
    return err;
}

struct print {
    struct engine *engine;
    struct image_fingerprint *fingerprint;
    enum kv_err err;
    struct kv_diag *diag;
};

static void take_print(void *context, uint64_t position, const float *logits) {
    struct print *print = context;
    struct sampler_row row = {logits, print->engine->model.vocab_count, 0};
    struct sampler_candidate top[IMAGE_TOP];
    uint32_t count = row.count < IMAGE_TOP ? row.count : IMAGE_TOP;

    (void)position;
    print->fingerprint->logits = kv_digest_of(logits, row.count * sizeof *logits);
    print->err = sampler_top(&row, count, top, print->diag);
    for (uint32_t i = 0; print->err == KV_OK && i < count; i++) {
        print->fingerprint->top_ids[i] = (int32_t)top[i].id;
        print->fingerprint->top_logits[i] = top[i].logit;
    }
}

enum kv_err session_fingerprint(struct session *session, int floor,
                                struct image_fingerprint *fingerprint_out, struct kv_diag *diag) {
    struct image_fingerprint fingerprint = {.n_kv = session->n_kv};
    struct print print = {session->engine, &fingerprint, KV_OK, diag};
    struct session_ask ask = {.floor = floor};
    enum kv_err err;

    if (session->n == session->n_kv && session->n_kv) {
        ask.ids = &session->ids[session->n_kv - 1];
        ask.count = 1;
    }
    err = session_ask(session, &ask, take_print, &print, diag);
    if (err == KV_OK)
        err = print.err;
    if (err == KV_OK)
        *fingerprint_out = fingerprint;
    return err;
}
