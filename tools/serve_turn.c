/* tools/serve_turn.c - one request from its text to a saved session.
 *
 * Responsible for: the order: seat, render, place, lease, wake, agree, room, feed, listen, save;
 * what is undone when one fails.
 * Not responsible for: which session (serve_find.c), what goes out while tokens arrive
 * (serve_out.c).
 *
 * The ids of the whole request are made first; what the session has of them stays, by text where
 * ids differ (engine/agree.h), and the rest is fed. At least one token is always fed, since logits
 * are not saved.
 */
#include "engine/agree.h"
#include "engine/model/tokenizer.h"
#include "engine/transfer.h"
#include "tools/hearing.h"
#include "tools/serve_find.h"
#include "tools/serve_inner.h"
#include "tools/serve_out.h"
#include "tools/turn.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOVES_MAX = 8 };
static const uint64_t look_again_ns = 50000000;

struct turning {
    struct serve *serve;
    struct service *service;
    const struct serve_request *request;
    struct serve_answer *answer;
    struct turn_rendered rendered;
    struct serve_place place;
    struct service_lease lease;
    struct session *session;
    struct serve_out out;
    uint32_t tokens_max, slots;
    uint64_t receipt_number;   /* of the save; 0: none */
    uint64_t patience_ns;      /* when waiting for a session or for slots ends */
    uint64_t prefilled_before; /* by the session object */
    int changed;               /* the session is not what was saved any more */
};

static uint64_t now(const struct turning *turning) {
    return kv_clock_now_ns(turning->serve->clock);
}

/* --- the seat */

static enum kv_err take_seat(struct turning *turning, struct kv_diag *diag) {
    struct serve *serve = turning->serve;
    enum kv_err err = KV_OK;
    pthread_mutex_lock(&serve->lock);
    serve->totals.requests++;
    if (serve->stopping)
        err = kv_diag_set(diag, KV_ERR_CANCELLED, "the service is ending; try again later");
    else if (serve->requests >= serve->settings.requests_max)
        err = kv_diag_set(diag, KV_ERR_BUSY,
                          "%" PRIu32 " requests are at work and waiting already; try again later",
                          serve->requests);
    else
        serve->requests++;
    serve->totals.refused += err != KV_OK;
    pthread_mutex_unlock(&serve->lock);
    return err;
}

static void leave_seat(struct turning *turning, enum kv_err err) {
    struct serve *serve = turning->serve;
    const struct serve_answer *answer = turning->answer;
    pthread_mutex_lock(&serve->lock);
    serve->requests--;
    serve->totals.failed += err != KV_OK;
    serve->totals.cancelled += err == KV_OK && answer->finish == SERVE_CANCELLED;
    serve->totals.tokens_prompt += answer->tokens_prompt;
    serve->totals.tokens_completion += answer->tokens_completion;
    serve->totals.tokens_reused += answer->tokens_reused;
    serve->totals.tokens_prefilled += answer->tokens_prefilled;
    pthread_cond_broadcast(&serve->gone);
    pthread_mutex_unlock(&serve->lock);
}

static int is_gone(void *context) {
    struct turning *turning = context;
    const struct serve_request *request = turning->request;
    return serve_inner_hurry(turning->serve) ||
           (request->cancelled != NULL && request->cancelled(request->context));
}

/* While another request may give slots back it is worth waiting. */
static int may_wait(struct turning *turning, enum kv_err err) {
    if (err != KV_ERR_NO_SLOTS || now(turning) >= turning->patience_ns || is_gone(turning) ||
        !service_has_others(turning->service, &turning->lease))
        return 0;
    service_await(turning->service, look_again_ns);
    return 1;
}

/* --- what is asked */

static enum kv_err render_prompt(struct turning *turning, struct kv_diag *diag) {
    const struct serve_request *request = turning->request;
    struct service *service = turning->service;
    const struct tokenizer *tokenizer = engine_tokenizer(service_engine(service));
    struct turn_rendered *rendered = &turning->rendered;
    if (request->prompt_bytes > TOKENIZER_TEXT_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "the prompt is longer than %d bytes",
                           TOKENIZER_TEXT_BYTES_MAX);
    rendered->ids.capacity = request->prompt_bytes + 1;
    rendered->ids.items =
        kv_alloc_zeroed(service_alloc(service), rendered->ids.capacity, sizeof(uint32_t));
    if (rendered->ids.items == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the prompt");
    return tokenizer_encode(tokenizer, request->prompt, request->prompt_bytes, TOKENIZER_ADD_BOS,
                            &rendered->ids, diag);
}

/* The answer gets what the context has left. */
static enum kv_err fit_context(struct turning *turning, struct kv_diag *diag) {
    uint64_t count = turning->answer->tokens_prompt;
    struct engine_model model;
    engine_model(service_engine(turning->service), &model);
    if (count >= model.context_tokens)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "the messages have %" PRIu64 " tokens; this model's context is %" PRIu32
                           " with the answer; shorten them",
                           count, model.context_tokens);
    uint64_t left = model.context_tokens - count;
    if (turning->tokens_max > left)
        turning->tokens_max = (uint32_t)left;
    return KV_OK;
}

static enum kv_err render(struct turning *turning, struct kv_diag *diag) {
    const struct serve_request *request = turning->request;
    const struct template_turns turns = {.messages = request->messages,
                                         .count = request->message_count,
                                         .flags = TEMPLATE_FIRST | TEMPLATE_ASK};
    enum kv_err err = request->messages != NULL
                          ? turn_render(turning->service, &turns, &turning->rendered, diag)
                          : render_prompt(turning, diag);
    if (err != KV_OK)
        return err;
    if (turning->rendered.ids.count == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "the prompt is empty");
    turning->answer->tokens_prompt = turning->rendered.ids.count;
    turning->tokens_max =
        request->tokens_max > 0 ? request->tokens_max : turning->serve->settings.tokens_max;
    return fit_context(turning, diag);
}

/* --- the session */

static int on_wake(void *context, uint64_t done, uint64_t all) {
    (void)done, (void)all;
    return !is_gone(context);
}

static enum kv_err open_place(struct turning *turning, struct service_opened *opened,
                              struct kv_diag *diag) {
    const struct serve_place *place = &turning->place;
    if (place->from.forks) {
        const struct prefix_fork fork = {&place->from, place->session, on_wake, turning};
        enum kv_err err =
            prefix_fork(turning->serve->prefix, &fork, &turning->session, opened, diag);
        turning->changed = err == KV_OK;
        return err;
    }
    static const uint8_t operator[SERVE_OWNER_BYTES];
    const uint8_t *owner = turning->request->owner;
    const struct service_lookup lookup = {
        .create = place->create,
        .owner = memcmp(owner, operator, sizeof operator) != 0 ? owner : NULL,
        .progress = on_wake,
        .progress_context = turning};
    return service_session(turning->service, place->session, &lookup, &turning->session, opened,
                           diag);
}

static enum kv_err wake(struct turning *turning, struct kv_diag *diag) {
    static const enum serve_found found[] = {SERVE_DEVICE, SERVE_DISK, SERVE_NEW};
    struct service_opened opened;
    uint64_t begun = now(turning);
    enum kv_err err;
    int brought = 0;
    do {
        kv_diag_clear(diag);
        err = open_place(turning, &opened, diag);
        /* Whoever stands in line for slots need not wait for the disk afterwards. */
        if (err == KV_ERR_NO_SLOTS && !brought && !turning->place.from.forks) {
            struct store_read_stats stats;
            (void)service_prefetch(turning->service, turning->place.session, &stats, NULL);
            brought = 1;
        }
    } while (may_wait(turning, err));
    turning->answer->wake_ns = now(turning) - begun;
    turning->answer->found = found[opened.found];
    if (opened.found == SERVICE_WOKEN && opened.receipt.ram_bytes != 0 &&
        opened.receipt.door_bytes == 0)
        turning->answer->found = SERVE_RAM;
    return err;
}

/* How far the session holds the request, all but its last token: that is always fed. */
static void compare(struct turning *turning, const struct session_info *info,
                    struct agree *agree_out) {
    struct engine *engine = service_engine(turning->service);
    const struct tokenizer_ids *ids = &turning->rendered.ids;
    const struct agree_args args = {.tokenizer = engine_tokenizer(engine),
                                    .tmpl = engine_template(engine),
                                    .stored = info->ids,
                                    .stored_count = info->n,
                                    .roles = info->roles,
                                    .role_count = info->role_count,
                                    .request = ids->items,
                                    .request_count = ids->count - 1,
                                    .flags = AGREE_DROPPED_REASONING};
    agree_find(&args, agree_out);
}

/* Back to the last token that both have; what stood behind it stays under a tag. */
static enum kv_err go_back(struct turning *turning, uint64_t *feed_from_out, struct kv_diag *diag) {
    const struct prefix_place *from = &turning->place.from;
    struct serve_answer *answer = turning->answer;
    struct session_info info;
    struct agree agree;
    uint64_t again = 0;
    enum kv_err err = KV_OK;
    session_info(turning->session, &info);
    compare(turning, &info, &agree);
    answer->first_difference = from->forks ? from->differ_token : agree.differ_token;
    turning->prefilled_before = info.tokens_prefilled;
    if (from->forks) {
        turning->prefilled_before = 0;
        again = info.tokens_prefilled;
    }
    uint64_t keep = agree.stored_tokens;
    if (keep < info.n) {
        turning->changed = 1;
        err = turn_rewind(turning->service, turning->session, keep, &again, diag);
    }
    answer->tokens_reused = (keep < info.n_kv ? keep : info.n_kv) - again;
    *feed_from_out = agree.request_tokens;
    /* As many as the session has them, which may be cut otherwise than the request. */
    answer->tokens_prompt = keep + turning->rendered.ids.count - agree.request_tokens;
    return err == KV_OK ? fit_context(turning, diag) : err;
}

static enum kv_err make_room(struct turning *turning, struct kv_diag *diag) {
    struct session_info info;
    session_info(turning->session, &info);
    turning->slots = engine_plan_slots(service_engine(turning->service), &info.policy,
                                       turning->answer->tokens_prompt + turning->tokens_max);
    uint32_t more = turning->slots > info.slots ? turning->slots - info.slots : 0;
    enum kv_err err;
    do {
        kv_diag_clear(diag);
        err = service_make_room(turning->service, more, turning->session, diag);
    } while (may_wait(turning, err));
    return err;
}

static enum kv_err feed_span(struct turning *turning, uint64_t first, uint64_t end,
                             enum image_role role, struct kv_diag *diag) {
    return end <= first ? KV_OK
                        : session_feed(turning->session, turning->rendered.ids.items + first,
                                       (uint32_t)(end - first), role, diag);
}

/* Span by span from token `at` on; the last one takes what stands behind it. */
static enum kv_err feed(struct turning *turning, uint64_t at, struct kv_diag *diag) {
    const struct template_spans *spans = &turning->rendered.spans;
    uint64_t count = turning->rendered.ids.count;
    enum kv_err err = KV_OK;
    for (size_t i = 0; i < spans->count && err == KV_OK; i++) {
        uint64_t end = i + 1 == spans->count ? count : spans->items[i].end;
        err = feed_span(turning, at, end, turn_role(spans->items[i].role), diag);
        at = end > at ? end : at;
    }
    return err == KV_OK ? feed_span(turning, at, count, IMAGE_RAW, diag) : err;
}

static enum kv_err start(struct turning *turning, struct kv_diag *diag) {
    uint64_t at = 0;
    enum kv_err err = KV_OK;
    KV_TRY(session_resample(turning->session, &turning->request->sampler, diag));
    session_whole_rows(turning->session, turning->request->logprobs);
    KV_TRY(go_back(turning, &at, diag));
    KV_TRY(make_room(turning, diag));
    turning->changed = 1;
    KV_TRY(feed(turning, at, diag));
    KV_TRY(session_generate(turning->session, turning->tokens_max, diag));
done:
    return err;
}

/* A session that nobody named goes on only as long as all of it is in the request; somebody else
 * may have gone on with it, or have removed it, before its lease was ours. */
static int has_moved(struct turning *turning, enum kv_err err) {
    struct session_info info;
    struct agree agree;
    if (!turning->place.from.found)
        return 0;
    if (err == KV_ERR_NOT_FOUND || err == KV_ERR_EXISTS)
        return 1;
    /* Records that a wake misses are damage, unless the snapshot has gone as a whole. */
    if (err == KV_ERR_CORRUPT)
        return !prefix_is_there(turning->serve->prefix, &turning->place.from);
    if (err != KV_OK || turning->place.from.forks)
        return 0;
    session_info(turning->session, &info);
    compare(turning, &info, &agree);
    return agree.stored_tokens < info.n;
}

static enum kv_err try_place(struct turning *turning, struct kv_diag *diag) {
    const struct serve_find find = {turning->request, &turning->rendered};
    char who[SERVICE_WHO_BYTES];
    const struct service_patience patience = {turning->patience_ns, is_gone, turning, who};
    struct serve_place *place = &turning->place;
    uint64_t begun = now(turning);
    snprintf(who, sizeof who, "request %.48s", turning->request->request_id);
    enum kv_err err = serve_find_place(turning->serve, &find, place, diag);
    if (err == KV_OK)
        err = service_lease(turning->service, place->session, &patience, &turning->lease, diag);
    turning->answer->wait_ns += now(turning) - begun;
    if (err != KV_OK)
        return err;
    memcpy(turning->answer->session, place->session, sizeof place->session);
    return wake(turning, diag);
}

/* The store's budget is not the context's. */
static enum kv_err save_session(struct turning *turning, struct kv_diag *diag) {
    struct receipt receipt;
    enum kv_err err = service_save(turning->service, turning->session, 0, &receipt, diag);
    return err == KV_ERR_LIMIT ? KV_ERR_NO_SPACE : err;
}

static enum kv_err take_session(struct turning *turning, struct kv_diag *diag) {
    enum kv_err err = try_place(turning, diag);
    for (int i = 0; i < MOVES_MAX && has_moved(turning, err); i++) {
        /* An answer that could not be saved is not in what was found: it stays so until it is. */
        if (err == KV_OK && !service_is_saved(turning->session)) {
            err = save_session(turning, diag);
            if (err != KV_OK)
                return err;
        }
        turning->session = NULL;
        service_lease_end(turning->service, &turning->lease);
        (void)prefix_note(turning->serve->prefix, turning->place.from.name, NULL);
        kv_diag_clear(diag);
        err = try_place(turning, diag);
    }
    if (!has_moved(turning, err))
        return err;
    turning->session = NULL;
    return kv_diag_set(diag, KV_ERR_BUSY,
                       "session %s is changed by others all the time; try again later",
                       turning->place.from.name);
}

/* --- the answer */

static void on_heard(void *context, const struct hearing_heard *heard, int *stop_out) {
    struct turning *turning = context;
    serve_out_tokens(&turning->out, heard->tokens, heard->token_count);
    if (heard->over) {
        serve_out_done(&turning->out, heard->done);
        return;
    }
    if (now(turning) >= turning->request->deadline_ns)
        serve_out_stop(&turning->out, SERVE_DEADLINE);
    else if (is_gone(turning))
        serve_out_stop(&turning->out, SERVE_CANCELLED);
    *stop_out = serve_out_is_stopped(&turning->out);
}

static void on_token(void *context, struct session *session, uint32_t token) {
    struct turning *turning = context;
    serve_out_note(&turning->out, session_logits(session), token);
}

static enum kv_err answer(struct turning *turning, struct kv_diag *diag) {
    struct hearing_ear ear = {.session = turning->session,
                              .slots_planned = turning->slots,
                              .token = turning->request->logprobs ? on_token : NULL,
                              .context = turning};
    struct session_info info;
    uint64_t begun = now(turning);
    enum kv_err err = turn_listen(turning->service, &ear, on_heard, turning, diag);
    session_info(turning->session, &info);
    turning->answer->tokens_prefilled = info.tokens_prefilled - turning->prefilled_before;
    memcpy(turning->answer->tier_blocks, info.tier_blocks, sizeof info.tier_blocks);
    uint64_t first_ns = turning->out.first_ns != 0 ? turning->out.first_ns : now(turning);
    turning->answer->prefill_ns = first_ns - begun;
    turning->answer->decode_ns = now(turning) - first_ns;
    return err;
}

/* The client sends back what it was shown: tokens behind that would make the next turn a branch.
 * Where they cannot be taken back for nothing, it is one. */
static void take_back(struct turning *turning) {
    struct session_info info;
    uint64_t begin = turning->answer->tokens_prompt;
    session_info(turning->session, &info);
#ifdef BREAK_TAKE_BACK
    return;
#endif
    if (!serve_out_is_stopped(&turning->out) || info.n <= begin)
        return;
    uint64_t n = begin + serve_out_shown(&turning->out, info.ids + begin, info.n - begin);
    if (n < info.n && layout_sealed_blocks(n - 1) == info.blocks)
        (void)session_rewind(turning->session, n, NULL);
}

static enum kv_err save(struct turning *turning, struct kv_diag *diag) {
    struct session_info info;
    uint64_t begun = now(turning);
    session_info(turning->session, &info);
    /* Nothing was prefilled before it was stopped. */
    if (info.n_kv == 0)
        return kv_diag_set(diag, KV_ERR_CANCELLED, "stopped before anything was read");
    enum kv_err err = save_session(turning, diag);
    turning->answer->save_ns = now(turning) - begun;
    turning->receipt_number = service_receipt_id(turning->service);
    /* One that is new and that nobody named is found by what is stored alone: it would only hold
     * slots. */
    turning->changed = err != KV_OK && turning->request->session == NULL && turning->place.create;
    return err;
}

/* What is resident is then what is stored, or nothing. */
static void undo(struct turning *turning) {
    struct session_info info;
    if (turning->session == NULL)
        return;
    session_info(turning->session, &info);
    if (turning->changed || info.n == 0)
        service_drop(turning->service, turning->session);
    turning->session = NULL;
}

static enum kv_err run(struct turning *turning, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    service_enter(turning->service);
    KV_TRY(take_session(turning, diag));
    KV_TRY(start(turning, diag));
    KV_TRY(answer(turning, diag));
    take_back(turning);
    KV_TRY(save(turning, diag));
done:
    if (err != KV_OK)
        undo(turning);
    service_lease_end(turning->service, &turning->lease);
    service_leave(turning->service);
    turning->answer->receipt_id = serve_receipt_await(turning->serve, turning->receipt_number);
    return err;
}

static void log_turn(const struct turning *turning, enum kv_err err, const struct kv_diag *diag) {
    static const char *const found[] = {"new", "device", "ram", "disk"};
    const struct serve_answer *answer = turning->answer;
    serve_inner_log(
        turning->serve,
        "turn request=%s session=%s %s prompt=%" PRIu64 " reused=%" PRIu64 " completion=%" PRIu64
        " wait_ms=%" PRIu64 " wake_ms=%" PRIu64 " prefill_ms=%" PRIu64 " decode_ms=%" PRIu64
        " save_ms=%" PRIu64 "%s%s",
        turning->request->request_id, answer->session, found[answer->found], answer->tokens_prompt,
        answer->tokens_reused, answer->tokens_completion, answer->wait_ns / 1000000,
        answer->wake_ns / 1000000, answer->prefill_ns / 1000000, answer->decode_ns / 1000000,
        answer->save_ns / 1000000, err != KV_OK ? " failed: " : "", err != KV_OK ? diag->text : "");
}

/* A turn that was cancelled may be had from the service that comes after this one. */
static int is_ending(struct serve *serve) {
    pthread_mutex_lock(&serve->lock);
    int stopping = serve->stopping;
    pthread_mutex_unlock(&serve->lock);
    return stopping;
}

/* Only where it was asked for, and no more than a line holds. */
static void log_text(const struct turning *turning) {
    const struct serve_request *request = turning->request;
    const struct template_message *last =
        request->message_count > 0 ? &request->messages[request->message_count - 1] : NULL;
    const char *asked = last != NULL ? last->text : request->prompt;
    size_t bytes = last != NULL ? last->text_bytes : request->prompt_bytes;
    if (!turning->serve->settings.log_text || asked == NULL)
        return;
    serve_inner_log(turning->serve, "text request=%s asked: %.*s", request->request_id,
                    (int)(bytes < 700 ? bytes : 700), asked);
    serve_inner_log(turning->serve, "text request=%s answered: %.700s", request->request_id,
                    turning->answer->text != NULL ? turning->answer->text : "");
}

static uint32_t retry_after(const struct turning *turning, enum kv_err err) {
    return err == KV_ERR_BUSY || err == KV_ERR_NO_SLOTS ||
                   (err == KV_ERR_CANCELLED && is_ending(turning->serve))
               ? 1 + (uint32_t)(turning->serve->settings.wait_ns / 4000000000u)
               : 0;
}

enum kv_err serve_turn(struct serve *serve, const struct serve_request *request,
                       struct serve_answer *answer_out, struct kv_diag *diag) {
    struct kv_diag own = {""};
    struct turning turning = {
        .serve = serve, .service = serve->service, .request = request, .answer = answer_out};
    memset(answer_out, 0, sizeof *answer_out);
    enum kv_err err = take_seat(&turning, &own);
    if (err == KV_OK) {
        uint64_t until_ns = now(&turning) + serve->settings.wait_ns;
        turning.patience_ns = until_ns < request->deadline_ns ? until_ns : request->deadline_ns;
        err = render(&turning, &own);
        if (err == KV_OK)
            err = serve_out_begin(&turning.out, serve, request, turning.tokens_max, &own);
        if (err == KV_OK)
            err = run(&turning, &own);
        enum kv_err ended = serve_out_end(&turning.out, answer_out);
        if (err == KV_OK && ended != KV_OK)
            err = kv_diag_set(&own, ended, "no memory for the text of the answer");
        turn_rendered_release(serve->service, &turning.rendered);
        leave_seat(&turning, err);
    }
    answer_out->retry_after_seconds = retry_after(&turning, err);
    log_turn(&turning, err, &own);
    log_text(&turning);
    return err == KV_OK ? KV_OK : kv_diag_set(diag, err, "%s", own.text);
}

void serve_answer_release(struct serve *serve, struct serve_answer *answer) {
    kv_alloc_release(&serve->alloc, answer->text);
    answer->text = NULL;
}
