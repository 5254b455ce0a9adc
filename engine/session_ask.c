/* engine/session_ask.c - throwaway questions: a forward that leaves no trace.
 *
 * Responsible for: rows after a session's own, holes, the floor of the ladder, fingerprints; pieces
 * of a few layers where others step between two.
 * Not responsible for: what is asked (needle.c) or what an answer means.
 */
#include "engine/engine_inner.h"

#include <assert.h>
#include <string.h>

enum {
    BATCH_MAX = FORWARD_TOGETHER_MAX, /* questions of one batch */
    GIVERS = 12,                      /* threads that give out its rows, at most */
    /* Rows of one where others step between two, unless one question has more: eight short
     * questions and two fingerprints, so that a wake reads its memory once. */
    ROWS_BESIDE = 128,
    /* And layers of it at a time, or more where nobody does: over 131,072 tokens attention of so
     * many rows takes a twelfth of a step for each layer, that of a few single rows a fortieth. */
    LAYERS_BESIDE = 1,
    LAYERS_OF_SINGLES = 4,
    /* Steps of others between two pieces where nobody waits for the answers: most then have none
     * beside them. */
    PATIENCE = 3
};

struct ask {
    session_ask_row row;
    void *context;
    uint32_t index;
    uint32_t skip; /* rows in front of the first that is counted */
    struct kvops_block *views;
    uint64_t *bits;
};

static void give_row(void *context, uint32_t row, const float *logits) {
    const struct ask *ask = context;

    if (row >= ask->skip)
        ask->row(ask->context, ask->index, row - ask->skip, logits);
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

/* A batch of questions and what they were asked with. */
struct batch {
    struct session *session;
    struct ask asks[BATCH_MAX];
    struct forward_seq seqs[BATCH_MAX];
    uint32_t ids[FORWARD_CHUNK_ROWS];
    uint32_t count, rows, singles;
};

static uint32_t rows_of(const struct session *session, const struct session_ask *ask) {
    return ask->count + (session->n > session->n_kv);
}

static int fits(const struct batch *batch, const struct session_ask *ask) {
    const struct engine *engine = batch->session->engine;
    uint32_t rows = engine->settings.hooks.breathe ? ROWS_BESIDE : FORWARD_CHUNK_ROWS;
    uint32_t more = rows_of(batch->session, ask);

    return batch->count == 0 || (batch->count < BATCH_MAX && batch->rows + more <= rows &&
                                 batch->singles + (more == 1) <= engine->singles_max);
}

static enum kv_err add(struct batch *batch, const struct session_ask *ask, const struct ask *given,
                       struct kv_diag *diag) {
    const struct session *session = batch->session;
    uint32_t pending = session->n > session->n_kv;
    uint32_t *ids = batch->ids + batch->rows;
    struct ask *own = &batch->asks[batch->count];
    struct forward_seq *seq = &batch->seqs[batch->count];
    enum kv_err err;

    *own = *given;
    own->skip = ask->count ? pending : 0;
    *seq = (struct forward_seq){.kv = engine_inner_seq(session),
                                .ids = ids,
                                .position = session->n_kv,
                                .logits = FORWARD_ALL,
                                .logits_first = own->skip + ask->rows_first,
                                .row = give_row,
                                .context = own};
    batch->count++;
    batch->rows += seq->kv.row_count = rows_of(session, ask);
    batch->singles += seq->kv.row_count == 1;
    if (pending)
        ids[0] = session->ids[session->n_kv];
    if (ask->count)
        memcpy(ids + pending, ask->ids, ask->count * sizeof *ids);
    if (ask->floor) {
        KV_TRY(floor_views(session, &own->views, diag));
        seq->kv.blocks = own->views;
    }
    err = ask->hide_count ? hide(session, ask, &seq->kv, &own->bits, diag) : KV_OK;
done:
    return err;
}

static int breathe(const struct session *session, int small) {
#ifdef BREAK_ASK_BREATHE
    return 0;
#endif
    int stepped = 0;

#ifdef BREAK_PATIENCE
    return engine_breathe(session->engine, small);
#endif
    for (int left = session->patient ? PATIENCE : 1; left > 0; left--) {
        if (engine_inner_has_work(session) || !engine_breathe(session->engine, small))
            break;
        stepped = 1;
    }
    return stepped;
}

/* 1 when others may step within the batch. */
static int is_shared(const struct session *session) {
    const struct engine *engine = session->engine;

    return engine->settings.hooks.breathe && !engine->stepping && !engine_inner_has_work(session);
}

/* All layers, a few at a time, so that who decodes beside it hardly notices; larger and larger
 * pieces where nobody does, or nobody may. Never more than are there. */
static enum kv_err run_layers(struct batch *batch, struct forward_beside *beside, int shared,
                              struct kv_diag *diag) {
    struct engine *engine = batch->session->engine;
    uint32_t layers = forward_layers(engine->forward), there = 0;
    uint32_t each = batch->rows > batch->count ? LAYERS_BESIDE : LAYERS_OF_SINGLES;

    for (uint32_t first = 0, end; first < layers; first = end) {
        /* In front of the first too: to build the questions takes as long as a layer. */
        if (shared && !breathe(batch->session, 1) && first > 0 && each < layers)
            each *= 2;
        enum kv_err err = engine_inner_layers_wait(batch->session, first, &there, diag);
        if (err != KV_OK)
            return err;
        end = shared && there - first > each ? first + each : there;
        forward_beside_layers(beside, first, end);
    }
    return KV_OK;
}

/* Threads that give out rows, each those of some questions; begun before there are any, because to
 * begin them takes as long as to score a row. */
struct crew {
    struct forward_beside *beside;
    uint32_t parts; /* the first ones are of threads, the others of the caller */
    uint32_t begun, seated;
    pthread_t threads[GIVERS];
    pthread_mutex_t lock;
    pthread_cond_t moved;
    /* Under the lock. */
    uint32_t tile, left; /* times that rows were there; threads that still give the last ones */
    int over;
};

static void *give_main(void *context) {
    struct crew *crew = context;

    pthread_mutex_lock(&crew->lock);
    uint32_t part = crew->seated++;
    for (uint32_t given = 0; !crew->over;) {
        if (crew->tile == given) {
            pthread_cond_wait(&crew->moved, &crew->lock);
            continue;
        }
        given = crew->tile;
        pthread_mutex_unlock(&crew->lock);
        forward_beside_give(crew->beside, part, crew->parts);
        pthread_mutex_lock(&crew->lock);
        if (--crew->left == 0)
            pthread_cond_broadcast(&crew->moved);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

static void crew_begin(struct crew *crew, struct forward_beside *beside, uint32_t questions) {
    *crew = (struct crew){.beside = beside, .parts = questions < GIVERS ? questions : GIVERS};
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->moved, NULL);
    while (crew->begun + 1 < crew->parts &&
           pthread_create(&crew->threads[crew->begun], NULL, give_main, crew) == 0)
        crew->begun++;
}

/* To score a row of a large vocabulary takes a processor as long as a layer takes a device. What no
 * thread is there for is done here. */
static void crew_give(struct crew *crew) {
    pthread_mutex_lock(&crew->lock);
    crew->tile++;
    crew->left = crew->begun;
    pthread_cond_broadcast(&crew->moved);
    pthread_mutex_unlock(&crew->lock);
    for (uint32_t part = crew->begun; part < crew->parts; part++)
        forward_beside_give(crew->beside, part, crew->parts);
    pthread_mutex_lock(&crew->lock);
    while (crew->left != 0)
        pthread_cond_wait(&crew->moved, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
}

static void crew_end(struct crew *crew) {
    pthread_mutex_lock(&crew->lock);
    crew->over = 1;
    pthread_cond_broadcast(&crew->moved);
    pthread_mutex_unlock(&crew->lock);
    while (crew->begun > 0)
        pthread_join(crew->threads[--crew->begun], NULL);
    pthread_cond_destroy(&crew->moved);
    pthread_mutex_destroy(&crew->lock);
}

/* What becomes of a row takes the processor a while. */
static enum kv_err give_rows(struct batch *batch, struct crew *crew, int shared,
                             struct kv_diag *diag) {
    struct engine *engine = batch->session->engine;
    struct forward_beside *beside = crew->beside;
    int away = !engine->stepping;

    do {
        if (shared)
            (void)breathe(batch->session, 1);
        if (forward_beside_rows(beside) != KV_OK)
            return engine_inner_device(engine, diag);
        if (away)
            engine_away(engine);
        crew_give(crew);
        if (away)
            engine_back(engine);
    } while (forward_beside_has_rows(beside));
    return KV_OK;
}

static enum kv_err run_whole(struct batch *batch, struct kv_diag *diag) {
    struct engine *engine = batch->session->engine;
    uint32_t layers = forward_layers(engine->forward);
    enum kv_err err = KV_OK;

    for (uint32_t there = 0; err == KV_OK && there < layers;)
        err = engine_inner_layers_wait(batch->session, there, &there, diag);
    if (err == KV_OK &&
        forward_run(engine->forward, &engine->slots.pool, batch->seqs, batch->count) != KV_OK)
        err = engine_inner_device(engine, diag);
    return err;
}

static enum kv_err run_pieces(struct batch *batch, struct forward_beside *beside, int shared,
                              struct kv_diag *diag) {
    struct crew crew;

    crew_begin(&crew, beside, batch->count);
    enum kv_err err = run_layers(batch, beside, shared, diag);
    if (err == KV_OK)
        err = give_rows(batch, &crew, shared, diag);
    crew_end(&crew);
    return err;
}

/* In pieces where others may step, or layers are missing; where there is no memory for that it
 * holds others up instead. */
static enum kv_err run(struct batch *batch, struct kv_diag *diag) {
    struct engine *engine = batch->session->engine;
    struct forward_beside *beside = NULL;
    int shared = is_shared(batch->session);
    enum kv_err err = KV_OK;

    if (batch->count == 0)
        return KV_OK;
    if (shared || batch->session->gate.closed)
        (void)forward_beside_make(engine->forward, &engine->slots.pool, batch->seqs, batch->count,
                                  &beside);
    KV_TRY(beside ? run_pieces(batch, beside, shared, diag) : run_whole(batch, diag));
    for (uint32_t i = 0; i < batch->count; i++)
        if (batch->seqs[i].bad_layer >= 0)
            KV_TRY(engine_inner_bad(batch->session, &batch->seqs[i], diag));
done:
    forward_beside_drop(beside);
    return err;
}

static void empty(struct batch *batch) {
    const struct kv_alloc *alloc = batch->session->engine->settings.alloc;

    for (uint32_t i = 0; i < batch->count; i++) {
        kv_alloc_release(alloc, batch->asks[i].views);
        kv_alloc_release(alloc, batch->asks[i].bits);
    }
    batch->count = batch->rows = batch->singles = 0;
}

void session_ask_begin(struct session *session) {
    session->asked++;
}

void session_ask_end(struct session *session) {
    assert(session->asked > 0);
    session->asked--;
    if (!session->asked)
        session->along = 0;
    if (!session->asked && session->late) {
        session->late = 0;
        engine_inner_review(session);
    }
}

void session_ask_patiently(struct session *session, int patient) {
    session->patient = patient;
}

void session_ask_breathe(struct session *session) {
    assert(session->asked > 0);
    (void)breathe(session, 0);
}

static enum kv_err ask_all(struct session *session, const struct session_ask *asks, uint32_t count,
                           session_ask_row row, void *context, struct kv_diag *diag) {
    struct batch batch = {.session = session};
    enum kv_err err = KV_OK;

    session_ask_begin(session);
    for (uint32_t i = 0; i < count; i++) {
        const struct ask given = {.row = row, .context = context, .index = i};
        KV_TRY(check(session, &asks[i], rows_of(session, &asks[i]), diag));
        if (!fits(&batch, &asks[i])) {
            KV_TRY(run(&batch, diag));
            empty(&batch);
            session_ask_breathe(session);
        }
        KV_TRY(add(&batch, &asks[i], &given, diag));
    }
    err = run(&batch, diag);
done:
    empty(&batch);
    session_ask_end(session);
    return err;
}

struct one {
    session_row row;
    void *context;
};

static void give_one(void *context, uint32_t ask, uint64_t row, const float *logits) {
    const struct one *one = context;

    (void)ask;
    one->row(one->context, row, logits);
}

enum kv_err session_ask(struct session *session, const struct session_ask *ask, session_row row,
                        void *context, struct kv_diag *diag) {
    struct one one = {row, context};

    return session_ask_all(session, ask, 1, give_one, &one, diag);
}

struct print {
    struct engine *engine;
    struct image_fingerprint *fingerprints[SESSION_PRINTS];
    enum kv_err errs[SESSION_PRINTS];
};

static void take_print(void *context, uint32_t ask, uint64_t position, const float *logits) {
    struct print *print = context;
    struct image_fingerprint *fingerprint = print->fingerprints[ask];
    struct sampler_row row = {logits, print->engine->model.vocab_count, 0};
    struct sampler_candidate top[IMAGE_TOP];
    uint32_t count = row.count < IMAGE_TOP ? row.count : IMAGE_TOP;

    (void)position;
    fingerprint->logits = kv_digest_of(logits, row.count * sizeof *logits);
    print->errs[ask] = sampler_top(&row, count, top, NULL);
    for (uint32_t i = 0; print->errs[ask] == KV_OK && i < count; i++) {
        fingerprint->top_ids[i] = (int32_t)top[i].id;
        fingerprint->top_logits[i] = top[i].logit;
    }
}

static enum kv_err print_err(const struct print *print, struct kv_diag *diag) {
    for (int i = 0; i < SESSION_PRINTS; i++)
        if (print->errs[i] != KV_OK)
            return kv_diag_set(diag, print->errs[i], "the logits of a fingerprint have no best");
    return KV_OK;
}

/* What is asked for a fingerprint: the pending token alone, or the last one once more. */
static struct session_ask print_ask(const struct session *session, int floor) {
    struct session_ask ask = {.floor = floor};

    if (session->n == session->n_kv && session->n_kv) {
        ask.ids = &session->ids[session->n_kv - 1];
        ask.count = 1;
    }
    return ask;
}

/* At the tiers given, in one batch. */
static enum kv_err take_prints(struct session *session, const int *floors, uint32_t count,
                               struct image_fingerprint *prints_out, struct kv_diag *diag) {
    struct print print = {session->engine, {&prints_out[0], &prints_out[count - 1]}, {KV_OK}};
    struct session_ask asks[2] = {print_ask(session, floors[0]),
                                  print_ask(session, floors[count - 1])};
    enum kv_err err;

    for (uint32_t i = 0; i < count; i++)
        prints_out[i] = (struct image_fingerprint){.n_kv = session->n_kv};
    err = ask_all(session, asks, count, take_print, &print, diag);
    return err == KV_OK ? print_err(&print, diag) : err;
}

enum kv_err session_fingerprint(struct session *session, int floor,
                                struct image_fingerprint *fingerprint_out, struct kv_diag *diag) {
    struct image_fingerprint print;
    enum kv_err err = take_prints(session, &floor, 1, &print, diag);

    if (err == KV_OK)
        *fingerprint_out = print;
    return err;
}

/* --- fingerprints that go along with a question */

struct along {
    struct print print;
    uint32_t count;
    _Atomic uint32_t given;
    session_ask_row row;
    void *context;
};

static void give_along(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct along *along = context;

    if (ask >= along->count) {
        along->row(along->context, ask - along->count, row, logits);
        return;
    }
    take_print(&along->print, ask, row, logits);
    along->given++;
}

enum kv_err session_ask_all(struct session *session, const struct session_ask *asks, uint32_t count,
                            session_ask_row row, void *context, struct kv_diag *diag) {
    struct session_ask all[BATCH_MAX];
    struct image_fingerprint prints[SESSION_PRINTS] = {{.n_kv = session->n_kv},
                                                       {.n_kv = session->n_kv}};
    struct along along = {
        {session->engine, {&prints[0], &prints[1]}, {KV_OK}}, session->along, 0, row, context};
    enum kv_err err;

#ifdef BREAK_ALONG
    return ask_all(session, asks, count, row, context, diag);
#endif
    if (!along.count || count == 0 || count > BATCH_MAX - along.count)
        return ask_all(session, asks, count, row, context, diag);
    for (uint32_t i = 0; i < along.count; i++)
        all[i] = print_ask(session, session->along_floors[i]);
    memcpy(all + along.count, asks, count * sizeof *asks);
    err = ask_all(session, all, along.count + count, give_along, &along, diag);
    err = err == KV_OK ? print_err(&along.print, diag) : err;
    if (along.given == along.count && print_err(&along.print, NULL) == KV_OK) {
        session->along = 0;
        memcpy(session->prints, prints, sizeof prints);
    }
    return err;
}

static void want_along(struct session *session, uint32_t count, int floor) {
    assert(session->asked > 0);
    session->along = count;
    session->along_floors[0] = floor;
    session->along_floors[1] = 1;
}

void session_fingerprint_along(struct session *session, int floor) {
    want_along(session, 1, floor);
}

void session_fingerprints_along(struct session *session) {
    want_along(session, SESSION_PRINTS, 0);
}

static enum kv_err take_along(struct session *session, uint32_t count,
                              struct image_fingerprint *prints_out, struct kv_diag *diag) {
    int alone = session->along > 0;

    session->along = 0;
    if (alone)
        return take_prints(session, session->along_floors, count, prints_out, diag);
    memcpy(prints_out, session->prints, count * sizeof *prints_out);
    return KV_OK;
}

enum kv_err session_fingerprint_take(struct session *session,
                                     struct image_fingerprint *fingerprint_out,
                                     struct kv_diag *diag) {
    return take_along(session, 1, fingerprint_out, diag);
}

enum kv_err session_fingerprints_take(struct session *session,
                                      struct image_fingerprint prints_out[SESSION_PRINTS],
                                      struct kv_diag *diag) {
    return take_along(session, SESSION_PRINTS, prints_out, diag);
}
