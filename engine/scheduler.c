/* engine/scheduler.c - one step: who runs, in which batch, and what becomes of the rows.
 *
 * Responsible for: choosing rows, slots for blocks to be sealed, running the batch, then for each
 * session seal, append, tiers, sampling; events. Also fill.h, which takes the same path without the
 * forward.
 * Not responsible for: arithmetic (model/forward.c), tiers (session_tiers.c).
 *
 * Order within a step, the same with any neighbours: forward over the tiers of n_kv before the
 * step; seal from the window; append the rows to the window; n_kv moves; tiers for the next step.
 */
#include "engine/engine_inner.h"
#include "engine/fill_ahead.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

struct step {
    struct engine *engine;
    struct engine_event *events;
    uint32_t event_count;
    struct kv_diag *diag;
};

static struct engine_event *emit(struct step *step, const struct session *session,
                                 enum engine_event_kind kind) {
    struct engine_event *event = &step->events[step->event_count++];

    assert(step->event_count <= 2 * step->engine->settings.sessions_max + 1);
    *event = (struct engine_event){
        .session = (struct session *)session, .kind = kind, .n_kv = session->n_kv};
    return event;
}

static void done(struct step *step, struct session *session, enum engine_done reason) {
    engine_inner_end_request(session);
    emit(step, session, ENGINE_DONE)->done = reason;
}

static void fail(struct step *step, struct session *session, enum kv_err err) {
    if (session->sealing) {
        block_drop(session->sealing);
        session->sealing = NULL;
    }
    session->logits_n_kv = 0;
    engine_inner_end_request(session);
    emit(step, session, ENGINE_FAILED)->err = err;
}

/* --- sampling */

static void note_answer(struct session *session) {
    struct image_span *last = session->role_count ? &session->roles[session->role_count - 1] : NULL;

    if (last && last->role == IMAGE_ASSISTANT && last->end == session->n - 1) {
        last->end = session->n;
        return;
    }
    assert(session->role_count < session->roles_capacity);
    session->roles[session->role_count++] =
        (struct image_span){IMAGE_ASSISTANT, session->n - 1, session->n};
}

static struct sampler_settings settings_of(const struct session *session) {
    const struct image_sampler *sampler = &session->sampler;

    return (struct sampler_settings){sampler->temperature, sampler->top_p, sampler->top_k,
                                     sampler->seed};
}

static enum kv_err pick(const struct session *session, uint32_t *id_out, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    struct sampler_settings settings = settings_of(session);
    struct sampler_row row = {session->logits, engine->model.vocab_count, session->n};
    struct sampler_best best = {session->best, session->best_count, session->n};

    return session->best_count ? sampler_pick_best(&settings, &best, id_out, diag)
                               : sampler_pick(&settings, &row, engine->candidates, id_out, diag);
}

static void sample(struct step *step, struct session *session) {
    struct engine *engine = step->engine;
    uint32_t id;
    enum kv_err err = pick(session, &id, step->diag);

    if (err != KV_OK) {
        fail(step, session, err);
        return;
    }
    engine_inner_token_saw(session, session->n);
    session->ids[session->n++] = id;
    session->kept_end = session->n;
    session->tokens_left--;
    note_answer(session);
    emit(step, session, ENGINE_TOKEN)->token = (int32_t)id;
    if (tokenizer_is_stop(engine->tokenizer, id))
        done(step, session, ENGINE_DONE_STOP);
    else if (session->n >= engine->model.context_tokens)
        done(step, session, ENGINE_DONE_CONTEXT);
    else if (session->tokens_left == 0)
        done(step, session, ENGINE_DONE_LENGTH);
}

/* --- choosing rows */

static void stop_cancelled(struct step *step) {
    struct engine *engine = step->engine;

    for (uint32_t i = 0; i < engine->session_count; i++)
        if (engine->sessions[i]->cancelled)
            done(step, engine->sessions[i], ENGINE_DONE_CANCELLED);
}

static int may_step(const struct session *session) {
    return session->state == SESSION_ACTIVE || session->state == SESSION_SAVING ||
           session->state == SESSION_PARTIAL;
}

static struct session *next_to_prefill(const struct engine *engine) {
    struct session *next = NULL;

    for (uint32_t i = 0; i < engine->session_count; i++) {
        struct session *session = engine->sessions[i];
        if (may_step(session) && session->fed_end > session->n_kv &&
            (!next || session->last_prefill_turn < next->last_prefill_turn))
            next = session;
    }
    return next;
}

static uint32_t chunk_rows(const struct session *session) {
    uint64_t end = (session->n_kv / FORWARD_CHUNK_ROWS + 1) * FORWARD_CHUNK_ROWS;

    end = end < session->fed_end ? end : session->fed_end;
    return (uint32_t)(end - session->n_kv);
}

static void choose(struct step *step) {
    struct engine *engine = step->engine;
    struct session *prefill = next_to_prefill(engine);

    engine->batch_count = 0;
    for (uint32_t i = 0; i < engine->session_count; i++) {
        struct session *session = engine->sessions[i];
        session->step_is_prefill = session == prefill;
        session->step_rows = 0;
        if (session->step_is_prefill)
            session->step_rows = chunk_rows(session);
        else if (may_step(session) && session->generating && session->fed_end <= session->n_kv)
            session->step_rows = 1;
        if (session->step_rows)
            engine->batch[engine->batch_count++] = session;
    }
    if (prefill)
        prefill->last_prefill_turn = ++engine->prefill_turn;
}

/* --- slots for blocks to be sealed */

static enum kv_err prepare_seal(struct session *session, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    uint64_t n_kv = session->n_kv + session->step_rows;
    uint32_t streams = layout_tier_streams(image_top(engine_inner_policy(session)));
    struct engine_inner_need need = {session, slots_of(streams), 0, 1};
    enum kv_err err;

    assert(layout_sealed_blocks(n_kv) <= session->block_count + 1);
    if (layout_sealed_blocks(n_kv) <= session->block_count)
        return KV_OK;
    need.allowance = engine_inner_coarsened(session, n_kv);
    err = engine_inner_room(engine, &need, diag);
    if (err != KV_OK) {
        kv_diag_prefix(diag, "session '%s' cannot grow beyond %llu tokens", session->name,
                       (unsigned long long)session->n_kv);
        return err;
    }
    session->sealing = block_make(&engine->blocks, session->block_count, streams);
    if (streams & 1u << LAYOUT_BF16) {
        /* The four oldest pages become the block as they are; the window gets new ones. */
        slots_take(&engine->slots, LAYOUT_BLOCK_SLOTS, session->sealing->map.slot);
    }
    return KV_OK;
}

static void prepare(struct step *step) {
    struct engine *engine = step->engine;

    for (uint32_t i = 0; i < engine->batch_count; i++) {
        enum kv_err err = KV_OK;
        if (engine->batch[i])
            err = prepare_seal(engine->batch[i], step->diag);
        if (err != KV_OK) {
            fail(step, engine->batch[i], err);
            engine->batch[i] = NULL;
        }
    }
}

/* --- the rows */

static void take_row(void *context, uint32_t row, const float *logits) {
    struct session *session = context;

    if (session->observe)
        session->observe(session->observe_context, session->n_kv + row, logits);
    if (row + 1 == session->step_rows)
        memcpy(session->logits, logits, session->engine->model.vocab_count * sizeof *logits);
}

static void take_best(void *context, const struct ops_candidate *top, uint32_t count) {
    struct session *session = context;

    for (uint32_t i = 0; i < count; i++)
        session->best[i] = (struct sampler_candidate){top[i].logit, top[i].id};
    session->best_count = count;
#ifdef BREAK_BEST
    session->best[0] = session->best[count - 1];
#endif
}

/* Only who samples in this very step: what a step leaves for later is whole rows. */
static uint32_t best_of(const struct session *session) {
    struct sampler_settings settings = settings_of(session);

    _Static_assert((int)SAMPLER_TOP_MAX <= (int)OPS_TOP_MAX, "a device gives that many");
    if (!session->generating || session->whole_rows)
        return 0;
    return sampler_wanted(&settings, session->engine->model.vocab_count);
}

struct kvops_seq engine_inner_seq(const struct session *session) {
    return (struct kvops_seq){.blocks = session->views,
                              .block_count = session->block_count,
                              .sinks = session->window.sinks,
                              .sink_tokens = layout_sink_tokens(session->n_kv),
                              .window = session->window.pages,
                              .window_tokens = engine_inner_window_tokens(session)};
}

enum kv_err engine_inner_bad(const struct session *session, const struct forward_seq *seq,
                             struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_DEVICE,
                       "session '%s': a value that is not finite after layer %d at token %llu",
                       session->name, seq->bad_layer,
                       (unsigned long long)(seq->position + seq->bad_row));
}

static void fill_seq(struct session *session, struct forward_seq *seq_out) {
    int last = session->n_kv + session->step_rows >= session->fed_end;

    *seq_out = (struct forward_seq){.kv = engine_inner_seq(session),
                                    .ids = session->ids + session->n_kv,
                                    .position = session->n_kv,
                                    .row = take_row,
                                    .top = best_of(session),
                                    .best = take_best,
                                    .context = session};
    session->best_count = 0;
    seq_out->kv.row_count = session->step_rows;
    seq_out->logits = session->observe ? FORWARD_ALL : last ? FORWARD_LAST : FORWARD_NONE;
}

static enum kv_err seal(struct session *session, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    struct block *block = session->sealing;
    enum layout_tier tier = image_top(engine_inner_policy(session));
    const uint32_t *ids = session->ids + LAYOUT_SINK_TOKENS + block->index * LAYOUT_BLOCK_TOKENS;

    if (tier == LAYOUT_TIER_BF16) {
        for (uint32_t i = 0; i < LAYOUT_BLOCK_SLOTS; i++) {
            session->fresh[i] = block->map.slot[i];
            block->map.slot[i] =
                session->window.pages[i / LAYOUT_PAGE_SLOTS].slot[i % LAYOUT_PAGE_SLOTS];
        }
        window_turn(&session->window, &engine->slots, session->fresh);
    } else {
        struct kvops_seal args = {
            .pool = engine->slots.pool, .block = block->map, .bad_token = engine->bad_tokens};
        struct device_copy bad = {engine->bad_host, engine->bad_tokens,
                                  kvops_seal_items(&args) * sizeof(int32_t)};
        uint32_t layer, token;
        memcpy(args.pages, session->window.pages, sizeof args.pages);
        args.block.tier = (uint8_t)tier;
        device_seal(engine->device, &args);
        if (device_copy_out(engine->device, DEVICE_STEP, &bad, 1) != KV_OK)
            return engine_inner_device(engine, diag);
        args.bad_token = engine->bad_host;
        if (kvops_seal_bad(&args, &layer, &token))
            return kv_diag_set(diag, KV_ERR_DEVICE,
                               "session '%s': K or V of layer %u at token %llu cannot be encoded",
                               session->name, layer,
                               (unsigned long long)(LAYOUT_SINK_TOKENS + token +
                                                    block->index * LAYOUT_BLOCK_TOKENS));
        window_turn(&session->window, &engine->slots, NULL);
    }
    for (uint32_t i = 0; i < LAYOUT_BLOCK_TOKENS; i++)
        kv_put_u32(block->ids + 4 * (size_t)i, ids[i]);
    session->sealing = NULL;
    engine_inner_push_block(session, block, tier);
    return KV_OK;
}

static void tell_sealed(struct session *session) {
    const struct engine_hooks *hooks = &session->engine->settings.hooks;
    struct block *block = session->blocks[session->block_count - 1];

    if (!hooks->block_sealed)
        return;
    block->state = BLOCK_WRITING;
    block_hold(block);
    hooks->block_sealed(hooks->context, session, block);
}

static enum kv_err append(struct session *session, const struct forward_seq *seq,
                          struct kv_diag *diag) {
    struct engine *engine = session->engine;
    struct window_rows rows = {.chunk = forward_chunk(engine->forward),
                               .chunk_rows = forward_chunk_rows(engine->forward),
                               .first_row = seq->kv.first_row,
                               .count = session->step_rows,
                               .position = session->n_kv,
                               .sealed_blocks = session->block_count};

    if (window_append(&session->window, engine->device, &engine->slots, &rows) != KV_OK)
        return engine_inner_device(engine, diag);
    engine_inner_rows_saw(session);
    session->n_kv += session->step_rows;
    session->unrun = 0;
    if (session->step_is_prefill)
        session->tokens_prefilled += session->step_rows;
    else
        session->tokens_decoded += session->step_rows;
    return KV_OK;
}

/* What one session's rows lead to. */
static void commit(struct step *step, struct session *session, const struct forward_seq *seq) {
    uint64_t before = session->n_kv;
    int sealed = session->sealing != NULL;
    enum kv_err err = KV_OK;

    if (seq->bad_layer >= 0)
        err = engine_inner_bad(session, seq, step->diag);
    if (err == KV_OK && sealed)
        err = seal(session, step->diag);
    if (err != KV_OK) {
        fail(step, session, err);
        return;
    }
#ifdef BREAK_LATE_TIERS
    engine_inner_review(session);
#endif
    err = append(session, seq, step->diag);
    if (err != KV_OK) {
        /* Sealed or half written: what it has in memory fits no token count any more. */
        fail(step, session, err);
        (void)session_move(session, SESSION_FAILED);
        return;
    }
    if (session->n_kv >= session->fed_end)
        session->logits_n_kv = session->best_count ? 0 : session->n_kv;
#ifndef BREAK_LATE_TIERS
    engine_inner_review_step(session, before, sealed);
#endif
    if (sealed)
        tell_sealed(session);
    if (session->step_is_prefill)
        emit(step, session, ENGINE_PREFILLED);
    if (session->n_kv < session->fed_end)
        return;
    if (session->generating)
        sample(step, session);
    else
        done(step, session, ENGINE_DONE_FED);
}

/* Runs the batch in groups that fit the workspace. */
static void run_groups(struct step *step) {
    struct engine *engine = step->engine;

    for (uint32_t first = 0; first < engine->batch_count;) {
        struct session *members[FORWARD_SINGLES_MAX + 1];
        uint32_t count = 0;
        for (; first < engine->batch_count && count < engine->singles_max; first++) {
            struct session *session = engine->batch[first];
            if (!session)
                continue;
            fill_seq(session, &engine->seqs[count]);
            members[count++] = session;
        }
        enum kv_err err = forward_run(engine->forward, &engine->slots.pool, engine->seqs, count);
        if (err != KV_OK)
            (void)engine_inner_device(engine, step->diag);
        for (uint32_t i = 0; i < count; i++) {
            if (err == KV_OK)
                commit(step, members[i], &engine->seqs[i]);
            else
                fail(step, members[i], err);
        }
    }
}

/* A session that generates with nothing pending: its logits are those of the last step. */
static void sample_without_rows(struct step *step) {
    struct engine *engine = step->engine;

    for (uint32_t i = 0; i < engine->batch_count; i++) {
        struct session *session = engine->batch[i];
        if (session->step_is_prefill || session->n > session->n_kv)
            continue;
        engine->batch[i] = NULL;
        sample(step, session);
    }
}

enum kv_err engine_step(struct engine *engine, struct engine_event *events, uint32_t *count_out,
                        struct kv_diag *diag) {
    struct step step = {engine, events, 0, diag};

    if (engine->stepping)
        return kv_diag_set(diag, KV_ERR_BUSY, "the engine is in a step: a hook must not step");
    engine->stepping = 1;
    (void)engine_balance(engine);
    stop_cancelled(&step);
    choose(&step);
    sample_without_rows(&step);
    prepare(&step);
    engine->committing = 1;
    run_groups(&step);
    engine->committing = 0;
    engine->batch_count = 0;
    engine->stepping = 0;
    *count_out = step.event_count;
    return engine->device->lost ? engine_inner_device(engine, diag) : KV_OK;
}

/* --- rows that somebody else has computed */

uint32_t fill_chunk_rows(const struct engine *engine) {
    return forward_chunk_rows(engine->forward);
}

uint64_t fill_chunk_bytes(const struct engine *engine) {
    const struct layout_geometry *g = &engine->model.geometry;

    return (uint64_t)g->layers * 2 * g->kv_heads * forward_chunk_rows(engine->forward) *
           g->head_dim * sizeof(uint16_t);
}

static enum kv_err fill_chunk(struct session *session, struct fill_ahead *ahead,
                              struct kv_diag *diag) {
    struct engine *engine = session->engine;
    const uint16_t *chunk;
    enum kv_err err = prepare_seal(session, diag);

    if (err == KV_OK)
        err = fill_ahead_next(ahead, &chunk, diag);
    if (err == KV_OK && forward_put_chunk(engine->forward, chunk) != KV_OK)
        err = engine_inner_device(engine, diag);
    return err;
}

enum kv_err fill_session(struct session *session, const struct fill *fill, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    const struct forward_seq seq = {.bad_layer = -1};
    struct engine_event events[4];
    struct fill_ahead *ahead = NULL;
    enum kv_err err = KV_OK;

    if (engine->stepping || session->n > session->n_kv)
        return kv_diag_set(diag, KV_ERR_BUSY, "session '%s' has tokens that wait to be computed",
                           session->name);
    KV_TRY(session_feed(session, fill->ids, fill->count, IMAGE_RAW, diag));
    session->step_is_prefill = 1;
    err = fill_ahead_make(session, fill, &ahead, diag);
    if (err != KV_OK)
        engine_inner_end_request(session);
    while (err == KV_OK && session->n_kv < session->fed_end) {
        struct step step = {engine, events, 0, diag};
        session->step_rows = chunk_rows(session);
        err = fill_chunk(session, ahead, diag);
        if (err != KV_OK)
            fail(&step, session, err);
        else
            commit(&step, session, &seq);
        for (uint32_t i = 0; i < step.event_count; i++)
            if (events[i].kind == ENGINE_FAILED)
                err = events[i].err;
    }
    session->logits_n_kv = 0;
done:
    fill_ahead_drop(ahead);
    return err;
}
