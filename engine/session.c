/* engine/session.c - one conversation on the device: its life, what is fed, what it reports.
 *
 * Responsible for: creating and dropping, names, feeding, generating, cancelling, information.
 * Not responsible for: stepping (scheduler.c), tiers (session_tiers.c), questions (session_ask.c).
 */
#include "engine/session.h"

#include "engine/engine_inner.h"
#include "engine/model/utf8.h"
#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

/* Blocks that a session gives back between two steps of others: poison for as many goes in a few
 * calls, and takes the device as long as a hundredth of a step that reads nine such sessions. */
enum { BLOCKS_BESIDE = 32 };

/* Characters that are not seen or turn what stands beside them: U+00AD, U+061C, U+180E, U+200B to
 * 200F, U+2028 to 202E, U+2060 to 206F, U+FEFF. `at` is a valid character of `length` bytes. */
static int is_unseen(const unsigned char *at, int length) {
    uint32_t c = 0;
    if (length == 2)
        c = (at[0] & 0x1fU) << 6 | (at[1] & 0x3fU);
    else if (length == 3)
        c = (at[0] & 0x0fU) << 12 | (at[1] & 0x3fU) << 6 | (at[2] & 0x3fU);
    return c == 0xad || c == 0x61c || c == 0x180e || (c >= 0x200b && c <= 0x200f) ||
           (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff;
}

enum kv_err session_check_name(const char *name, struct kv_diag *diag) {
    const unsigned char *at = (const unsigned char *)name;
    size_t size = strlen(name);

    if (size == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "the session name is empty: use 1 to %d bytes",
                           IMAGE_NAME_BYTES_MAX);
    if (size > IMAGE_NAME_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "the session name has %zu bytes: use at most %d bytes", size,
                           IMAGE_NAME_BYTES_MAX);
    while (*at) {
        int length = utf8_length(at, size - (size_t)(at - (const unsigned char *)name));
        if (length <= 0)
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "the session name is not valid UTF-8 at byte %zu",
                               (size_t)(at - (const unsigned char *)name));
        if (*at == '/')
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "the session name '%s' has a '/': leave it out", name);
        if (*at < 0x20 || *at == 0x7f || (at[0] == 0xc2 && at[1] < 0xa0))
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "the session name has a control character at byte %zu",
                               (size_t)(at - (const unsigned char *)name));
        if (is_unseen(at, length))
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "the session name has an unseen character at byte %zu, so that two "
                               "names could look alike: leave it out",
                               (size_t)(at - (const unsigned char *)name));
        at += length;
    }
    /* Names are not paths here, but they become file names where people keep exports. */
    if (at[-1] == '.')
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "the session name '%s' ends with a '.': leave it out", name);
    return KV_OK;
}

enum kv_err session_check_new_name(const char *name, struct kv_diag *diag) {
    enum kv_err err = session_check_name(name, diag);
    if (err != KV_OK)
        return err;
    if (strchr(name, '@') != NULL)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "a new session cannot be named '%s': '@' stands between a session and "
                           "its tag; leave it out, or `coldplane fork NAME@TAG NEW` to go on from "
                           "a tag",
                           name);
    if (name[strspn(name, " ")] == 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "a new session cannot have a name of blanks alone: use letters");
    return KV_OK;
}

enum kv_err engine_inner_session_make(struct engine *engine, const char *name,
                                      struct session **session_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = engine->settings.alloc;
    struct session *session = kv_alloc_zeroed(alloc, 1, sizeof *session);

    if (session)
        session->logits = kv_alloc_zeroed(alloc, engine->model.vocab_count, sizeof(float));
    if (!session || !session->logits) {
        kv_alloc_release(alloc, session);
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for session '%s'", name);
    }
    session->engine = engine;
    pthread_mutex_init(&session->gate.lock, NULL);
    pthread_cond_init(&session->gate.moved, NULL);
    memcpy(session->name, name, strlen(name) + 1);
    session->last_used_ns = kv_clock_now_ns(engine->settings.clock);
    *session_out = session;
    return KV_OK;
}

void engine_inner_needle_release(struct engine *engine, struct image_needle *needle) {
    const struct kv_alloc *alloc = engine->settings.alloc;

    kv_alloc_release(alloc, needle->key);
    kv_alloc_release(alloc, needle->ask);
    kv_alloc_release(alloc, needle->answer_prefix);
    kv_alloc_release(alloc, needle->expect);
}

static void release_needles(struct session *session) {
    for (uint32_t i = 0; i < session->needle_count; i++)
        engine_inner_needle_release(session->engine, &session->needles[i]);
    kv_alloc_release(session->engine->settings.alloc, session->needles);
}

/* The last `most` of its blocks. */
static void drop_blocks(struct session *session, uint32_t most) {
    struct slots *slots = &session->engine->slots;

    slots_gather(slots);
    for (; most > 0 && session->block_count > 0; most--) {
        uint32_t i = --session->block_count;
        block_reader(session->blocks[i], session->views[i].tier, -1);
        block_drop(session->blocks[i]);
    }
    slots_gather_end(slots);
    engine_inner_review_soon(session->engine);
}

int engine_inner_leave(struct engine *engine) {
    int left = 0;

#ifdef BREAK_LEAVE
    return 0;
#endif
    for (struct session *at = engine->leaving; at; at = at->next_leaving) {
        left |= at->block_count > 0;
        drop_blocks(at, at->block_count);
    }
    return left;
}

uint32_t engine_inner_leaving(const struct engine *engine) {
    uint32_t slots = 0;

    for (const struct session *at = engine->leaving; at; at = at->next_leaving) {
        slots += at->has_window ? WINDOW_SLOTS : 0;
        for (uint32_t i = 0; i < at->block_count; i++)
            slots += slots_of(at->blocks[i]->resident | at->blocks[i]->arriving);
    }
    return slots;
}

static void leave(struct session *session) {
    struct engine *engine = session->engine;
    struct session **at = &engine->leaving;

    session->next_leaving = engine->leaving;
    engine->leaving = session;
    drop_blocks(session, BLOCKS_BESIDE);
    while (session->block_count > 0) {
        (void)engine_breathe(engine, 1);
        drop_blocks(session, BLOCKS_BESIDE);
    }
    while (*at != session)
        at = &(*at)->next_leaving;
    *at = session->next_leaving;
}

void engine_inner_session_release(struct session *session) {
    struct engine *engine = session->engine;
    const struct kv_alloc *alloc = engine->settings.alloc;

    if (session->sealing)
        block_drop(session->sealing);
    leave(session);
    if (session->has_window)
        window_put(&session->window, &engine->slots);
    release_needles(session);
    pthread_cond_destroy(&session->gate.moved);
    pthread_mutex_destroy(&session->gate.lock);
    kv_alloc_release(alloc, session->ids);
    kv_alloc_release(alloc, session->roles);
    kv_alloc_release(alloc, session->blocks);
    kv_alloc_release(alloc, session->views);
    kv_alloc_release(alloc, session->logits);
    kv_alloc_release(alloc, session);
}

enum kv_err engine_inner_can_add(struct engine *engine, const char *name, struct kv_diag *diag) {
    if (session_find(engine, name))
        return kv_diag_set(diag, KV_ERR_EXISTS, "session '%s' is there already", name);
    if (engine->session_count >= engine->settings.sessions_max)
        return kv_diag_set(diag, KV_ERR_NO_SLOTS,
                           "%u sessions are resident, which is the maximum: put one to sleep",
                           engine->session_count);
    return KV_OK;
}

void engine_inner_add(struct engine *engine, struct session *session) {
    assert(engine->session_count < engine->settings.sessions_max);
    engine->sessions[engine->session_count++] = session;
}

static enum kv_err check_settings(struct engine *engine, const struct session_settings *settings,
                                  struct kv_diag *diag) {
    const struct image_sampler *sampler = &settings->sampler;
    struct sampler_settings checked = {sampler->temperature, sampler->top_p, sampler->top_k,
                                       sampler->seed};
    enum kv_err err;

    KV_TRY(session_check_name(settings->name, diag));
    KV_TRY(sampler_check(&checked, diag));
    KV_TRY(engine_inner_check_policy(&settings->policy, diag));
    KV_TRY(engine_inner_can_add(engine, settings->name, diag));
done:
    return err;
}

enum kv_err session_create(struct engine *engine, const struct session_settings *settings,
                           struct session **session_out, struct kv_diag *diag) {
    struct engine_inner_need need = {NULL, WINDOW_SLOTS, 0, 0};
    struct session *session = NULL;
    enum kv_err err;

    KV_TRY(check_settings(engine, settings, diag));
    KV_TRY(engine_inner_session_make(engine, settings->name, &session, diag));
    KV_TRY(engine_inner_room(engine, &need, diag));
#ifndef BREAK_SAME_NAME
    /* Others may have stepped while a session left to make that room. */
    KV_TRY(engine_inner_can_add(engine, settings->name, diag));
#endif
    window_take(&session->window, &engine->slots);
    session->has_window = 1;
    session->policies[0].policy = settings->policy;
    session->policy_count = 1;
    session->sampler = settings->sampler;
    engine_inner_add(engine, session);
    *session_out = session;
    session = NULL;
done:
    if (session)
        engine_inner_session_release(session);
    return err;
}

void session_drop(struct session *session) {
    struct engine *engine = session->engine;

    assert(session->asked == 0);
    for (uint32_t i = 0; i < engine->batch_count; i++)
        if (engine->batch[i] == session)
            engine->batch[i] = NULL;
    for (uint32_t i = 0; i < engine->session_count; i++) {
        if (engine->sessions[i] != session)
            continue;
        memmove(engine->sessions + i, engine->sessions + i + 1,
                (engine->session_count - i - 1) * sizeof *engine->sessions);
        engine->session_count--;
        break;
    }
    engine_inner_session_release(session);
}

struct session *session_find(struct engine *engine, const char *name) {
    for (uint32_t i = 0; i < engine->session_count; i++)
        if (strcmp(engine->sessions[i]->name, name) == 0)
            return engine->sessions[i];
    return NULL;
}

struct session *session_at(struct engine *engine, uint32_t index) {
    return index < engine->session_count ? engine->sessions[index] : NULL;
}

struct engine *session_engine(const struct session *session) {
    return session->engine;
}

void session_brief(const struct session *session, struct session_info *info_out) {
    *info_out = (struct session_info){
        .name = session->name,
        .state = session->state,
        .n = session->n,
        .n_kv = session->n_kv,
        .blocks = session->block_count,
        .window_tokens = engine_inner_window_tokens(session),
        .sink_tokens = layout_sink_tokens(session->n_kv),
        .last_used_ns = session->last_used_ns,
        .tokens_prefilled = session->tokens_prefilled,
        .tokens_decoded = session->tokens_decoded,
        .ids = session->ids,
        .roles = session->roles,
        .role_count = session->role_count,
        .policy = *engine_inner_policy(session),
        .sampler = session->sampler,
        .held_at_floor = session->held,
        .seen = session->seen,
        .seen_count = session->seen_count,
        .mixed_from = image_mixed_from(session->policies, session->policy_count),
        .policies = session->policies,
        .policy_count = session->policy_count,
        .unrun = session->unrun && engine_inner_policy(session)->pressure};
}

void session_info(const struct session *session, struct session_info *info_out) {
    enum layout_tier coarsest;

    session_brief(session, info_out);
    info_out->slots = session->has_window ? WINDOW_SLOTS : 0;
    if (session->block_count)
        info_out->coarse_blocks = engine_inner_coarse(session, &coarsest);
    for (uint32_t i = 0; i < session->block_count; i++) {
        const struct block *block = session->blocks[i];
        info_out->blocks_durable += block->state == BLOCK_DURABLE;
        info_out->slots += slots_of(block->resident | block->arriving);
        info_out->tier_blocks[session->views[i].tier]++;
    }
}

/* Grows arrays that share one capacity; the capacity moves only when all have grown. */
static int grow_blocks(struct session *session, size_t needed) {
    const struct kv_alloc *alloc = session->engine->settings.alloc;
    size_t for_blocks = session->block_capacity, for_views = session->block_capacity;
    void *blocks = session->blocks, *views = session->views;
    int grown = kv_alloc_grow(alloc, &blocks, &for_blocks, needed, sizeof *session->blocks);

    session->blocks = blocks;
    grown = grown && kv_alloc_grow(alloc, &views, &for_views, needed, sizeof *session->views);
    session->views = views;
    if (grown)
        session->block_capacity = for_blocks < for_views ? for_blocks : for_views;
    return grown;
}

enum kv_err engine_inner_reserve(struct session *session, uint64_t n, struct kv_diag *diag) {
    const struct kv_alloc *alloc = session->engine->settings.alloc;
    void *ids = session->ids, *roles = session->roles;
    int grown = kv_alloc_grow(alloc, &ids, &session->ids_capacity, n, sizeof *session->ids);

    session->ids = ids;
    grown = grown && kv_alloc_grow(alloc, &roles, &session->roles_capacity,
                                   session->role_count + 2u, sizeof *session->roles);
    session->roles = roles;
    if (!grown || !grow_blocks(session, layout_sealed_blocks(n) + 1))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %llu tokens of session '%s'",
                           (unsigned long long)n, session->name);
    return KV_OK;
}

static enum kv_err may_work(const struct session *session, struct kv_diag *diag) {
    enum session_state state = session->state;
    const char *does = session->generating ? "generating" : session_state_name(state);
    int may = state == SESSION_IDLE || state == SESSION_ACTIVE || state == SESSION_SAVING ||
              state == SESSION_PARTIAL;

#ifndef BREAK_FED_WHILE_ASKED
    if (session->asked) {
        does = "being asked";
        may = 0;
    }
#endif
    return may && !session->generating && !session->cancelled
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_BUSY, "session '%s' is %s: wait until it is idle",
                             session->name, does);
}

static void begin_work(struct session *session) {
    session->last_used_ns = kv_clock_now_ns(session->engine->settings.clock);
    session->cancelled = 0;
    if (session->state == SESSION_IDLE)
        (void)session_move(session, SESSION_ACTIVE);
}

enum kv_err session_feed(struct session *session, const uint32_t *ids, uint32_t count,
                         enum image_role role, struct kv_diag *diag) {
    const struct engine_model *model = &session->engine->model;
    enum kv_err err = may_work(session, diag);

    if (err != KV_OK)
        return err;
    if (count == 0 || role < IMAGE_SYSTEM || role > IMAGE_RAW)
        return kv_diag_set(diag, KV_ERR_INVALID, "nothing to feed to session '%s', or no role",
                           session->name);
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= model->vocab_count)
            return kv_diag_set(diag, KV_ERR_INVALID, "token id %u is outside the vocabulary of %u",
                               ids[i], model->vocab_count);
    if (session->n + count > model->context_tokens)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "session '%s' has %llu tokens and %u more do not fit into the context "
                           "of %u: start a new session",
                           session->name, (unsigned long long)session->n, count,
                           model->context_tokens);
    err = engine_inner_reserve(session, session->n + count, diag);
    if (err != KV_OK)
        return err;
    if (session->fed_end <= session->n_kv)
        session->kept_end = session->n;
    memcpy(session->ids + session->n, ids, count * sizeof *ids);
    session->roles[session->role_count++] =
        (struct image_span){role, session->n, session->n + count};
    session->n += count;
    session->fed_end = session->n;
    begin_work(session);
    return KV_OK;
}

enum kv_err session_generate(struct session *session, uint32_t tokens_max, struct kv_diag *diag) {
    const struct engine_model *model = &session->engine->model;
    uint64_t end = session->n + tokens_max;
    enum kv_err err = may_work(session, diag);

    if (err != KV_OK)
        return err;
    if (tokens_max == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "0 tokens to generate: ask for 1 or more");
    if (session->n >= model->context_tokens)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "session '%s' fills the context of %u tokens: start a new session",
                           session->name, model->context_tokens);
    /* Logits are not saved: one that is woken at this token has none to continue from, so one that
     * was saved here and never slept does not either. */
    int saved_here = session->durable.snapshot != 0 && session->durable.n_kv == session->n_kv;
#ifdef BREAK_SAVED_LOGITS
    saved_here = 0;
#endif
    if (session->n == session->n_kv &&
        (session->n == 0 || session->logits_n_kv != session->n_kv || saved_here))
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "session '%s' has nothing to continue from: feed something first",
                           session->name);
    err = engine_inner_reserve(session, end < model->context_tokens ? end : model->context_tokens,
                               diag);
    if (err != KV_OK)
        return err;
    session->generating = 1;
    session->tokens_left = tokens_max;
    begin_work(session);
    return KV_OK;
}

void session_cancel(struct session *session) {
    if (engine_inner_has_work(session))
        session->cancelled = 1;
}

const float *session_logits(const struct session *session) {
    return session->logits_n_kv ? session->logits : NULL;
}

void session_whole_rows(struct session *session, int wanted) {
    session->whole_rows = wanted;
}

void session_observe(struct session *session, session_row row, void *context) {
    session->observe = row;
    session->observe_context = context;
}

int engine_inner_has_work(const struct session *session) {
    return session->generating || session->fed_end > session->n_kv;
}

void engine_inner_end_request(struct session *session) {
    if (session->fed_end > session->n_kv) {
        uint64_t n = session->kept_end > session->n_kv ? session->kept_end : session->n_kv;
#ifdef BREAK_CANCEL
        n = session->n;
#endif
        session->n = n;
        while (session->role_count && session->roles[session->role_count - 1].first >= n)
            session->role_count--;
        if (session->role_count && session->roles[session->role_count - 1].end > n)
            session->roles[session->role_count - 1].end = n;
        session->fed_end = session->n_kv;
    }
    session->generating = 0;
    session->cancelled = 0;
    session->tokens_left = 0;
    if (session->state == SESSION_ACTIVE)
        (void)session_move(session, SESSION_IDLE);
}
