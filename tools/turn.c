/* tools/turn.c - text into a session and answers out of it.
 *
 * Responsible for: what must stand between the last token and the next message, feeding by role,
 * the stepping loop, the answer's text.
 * Not responsible for: scheduling (engine) or durability (snapshot).
 */
#include "tools/turn.h"

#include "engine/model/tokenizer.h"
#include "store/base/bytes.h"
#include "tools/hearing.h"

#include <inttypes.h>
#include <string.h>

/* What the session's last tokens leave open. An answer that was cut off has no end token, one that
 * ended has its end token but not the text behind it; a fed message has both. */
static unsigned open_flags(const struct service *service, const struct session_info *info,
                           struct engine *engine) {
    const struct tokenizer *tokenizer = engine_tokenizer(engine);
    uint32_t end_id = template_end_id(engine_template(engine));
    (void)service;
    if (info->n == 0)
        return TEMPLATE_FIRST;
    if (info->ids[info->n - 1] == end_id)
        return TEMPLATE_AFTER_END;
    for (uint64_t i = info->n; i > 0 && info->ids[i - 1] != end_id; i--)
#ifdef BREAK_OPEN_TURN
        if (0)
#else
        if (tokenizer_is_control(tokenizer, info->ids[i - 1]))
#endif
            return TEMPLATE_END_TURN | TEMPLATE_AFTER_END;
    return 0;
}

void turn_rendered_release(struct service *service, struct turn_rendered *rendered) {
    kv_alloc_release(service_alloc(service), rendered->ids.items);
    kv_alloc_release(service_alloc(service), rendered->spans.items);
}

enum kv_err turn_render(struct service *service, const struct template_turns *turns,
                        struct turn_rendered *rendered_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = service_alloc(service);
    const struct template *tmpl = engine_template(service_engine(service));
    struct turn_rendered rendered;
    memset(&rendered, 0, sizeof rendered);
    uint64_t bytes = template_default_system(tmpl).size_bytes + 256;
    for (size_t i = 0; i < turns->count; i++)
        if (!kv_add_u64(bytes, turns->messages[i].text_bytes + 64, &bytes) ||
            turns->messages[i].text_bytes > TOKENIZER_TEXT_BYTES_MAX)
            return kv_diag_set(diag, KV_ERR_LIMIT, "the text is longer than %d bytes",
                               TOKENIZER_TEXT_BYTES_MAX);
    rendered.ids.capacity = bytes;
    rendered.ids.items = kv_alloc_zeroed(alloc, bytes, sizeof *rendered.ids.items);
    rendered.spans.capacity = turns->count + 2;
    rendered.spans.items =
        kv_alloc_zeroed(alloc, rendered.spans.capacity, sizeof *rendered.spans.items);
    enum kv_err err =
        rendered.ids.items != NULL && rendered.spans.items != NULL
            ? KV_OK
            : kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a text of %" PRIu64 " bytes", bytes);
    if (err == KV_OK)
        err = template_ids(tmpl, turns, &rendered.ids, &rendered.spans, diag);
    if (err == KV_OK)
        *rendered_out = rendered;
    else
        turn_rendered_release(service, &rendered);
    return err;
}

enum image_role turn_role(enum template_role role) {
    switch (role) {
    case TEMPLATE_SYSTEM:
        return IMAGE_SYSTEM;
    case TEMPLATE_USER:
        return IMAGE_USER;
    default:
        return IMAGE_ASSISTANT;
    }
}

/* A session that woke at the floor for want of slots gets its planes once there are slots for all
 * of them; until then it needs those of its new blocks only. */
static uint32_t need_at_floor(struct service *service, struct session *session,
                              const struct session_info *info, uint32_t need) {
    struct engine *engine = service_engine(service);
    struct engine_slots slots;
    engine_slots(engine, &slots);
    uint32_t free = slots.free > slots.reserve ? slots.free - slots.reserve : 0;
    if (need <= info->slots + free) {
        session_refine(session);
        return need;
    }
    return info->slots + need - engine_plan_slots(engine, &info->policy, info->n_kv);
}

/* Refuses before anything is fed: context first, then slots. */
static enum kv_err admit(struct service *service, struct session *session, uint64_t new_tokens,
                         uint64_t tokens_max, uint32_t *slots_out, struct kv_diag *diag) {
    struct session_info info;
    struct engine_model model;
    session_info(session, &info);
    engine_model(service_engine(service), &model);
    uint64_t end = info.n + new_tokens;
    if (end + (tokens_max > 0) > model.context_tokens)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "session %s: %" PRIu64 " tokens and %" PRIu64 " new ones do not fit the "
                           "model's context of %" PRIu32
                           "; shorten the text or begin a new session",
                           info.name, info.n, new_tokens, model.context_tokens);
    uint64_t longest = end + tokens_max;
    if (longest > model.context_tokens)
        longest = model.context_tokens;
    uint32_t need = engine_plan_slots(service_engine(service), &info.policy, longest);
    if (info.held_at_floor) {
        need = need_at_floor(service, session, &info, need);
        session_info(session, &info); /* it may have taken its planes' slots */
    }
    *slots_out = need;
    return need > info.slots ? service_make_room(service, need - info.slots, session, diag) : KV_OK;
}

static enum kv_err feed(struct session *session, const struct turn_rendered *rendered,
                        struct kv_diag *diag) {
    size_t at = 0;
    for (size_t i = 0; i < rendered->spans.count; i++) {
        const struct template_span *span = &rendered->spans.items[i];
        size_t end = i + 1 == rendered->spans.count ? rendered->ids.count : span->end;
        if (end == at)
            continue;
        enum kv_err err = session_feed(session, rendered->ids.items + at, (uint32_t)(end - at),
                                       turn_role(span->role), diag);
        if (err != KV_OK)
            return err;
        at = end;
    }
    return KV_OK;
}

/* --- one session's work, from feeding to its last word */

struct running {
    struct service *service;
    struct session *session;
    const struct turn_options *options;
    struct turn_result *result;
    struct tokenizer_stream stream;
    size_t text_capacity;
    uint32_t slots;
    uint64_t n_kv_before, n_kv_told, started_ns, decode_from_ns;
    enum kv_err err;
};

static enum kv_err begin(struct running *running, struct kv_diag *diag) {
    struct service *service = running->service;
    struct session *session = running->session;
    const struct turn_options *options = running->options;
    struct session_info info;
    struct turn_rendered rendered;
    session_info(session, &info);
    struct template_turns turns = {.messages = options->messages,
                                   .count = options->message_count,
                                   .flags = open_flags(service, &info, service_engine(service))};
    if (options->tokens_max > 0)
        turns.flags |= TEMPLATE_ASK;
    memset(&rendered, 0, sizeof rendered);
    enum kv_err err = KV_OK;
    if (!options->resume)
        KV_TRY(turn_render(service, &turns, &rendered, diag));
    KV_TRY(admit(service, session, rendered.ids.count, options->tokens_max, &running->slots, diag));
    running->result->tokens_fed = rendered.ids.count;
    KV_TRY(feed(session, &rendered, diag));
    if (options->tokens_max > 0)
        KV_TRY(session_generate(session, options->tokens_max, diag));
done:
    turn_rendered_release(service, &rendered);
    return err;
}

/* Clients that are gone and deadlines are looked at so often at least. */
static const uint64_t listen_ns = 50000000;

enum kv_err turn_listen(struct service *service, struct hearing_ear *ear, turn_heard heard,
                        void *context, struct kv_diag *diag) {
    struct hearing_heard now = {0};
    int stop = 0, stopped = 0;
    service_listen(service, ear);
    service_leave(service);
    while (!now.over) {
        service_hear(service, ear, listen_ns, &now);
        heard(context, &now, &stop);
        if (!stop || stopped || now.over)
            continue;
        stopped = 1;
        service_enter(service);
        session_cancel(ear->session);
        service_leave(service);
    }
    service_enter(service);
    service_deafen(service, ear);
    return now.err == KV_OK ? KV_OK : kv_diag_set(diag, now.err, "%s", now.diag.text);
}

struct working {
    const struct turn_work *work;
    uint64_t n_kv;
    int stopped;
};

static void on_work(void *context, const struct hearing_heard *heard, int *stop_out) {
    struct working *working = context;
    const struct turn_work *work = working->work;
    if (heard->n_kv > working->n_kv && work->prefilled != NULL)
        work->prefilled(work->context, heard->n_kv, heard->n_kv);
    working->n_kv = heard->n_kv > working->n_kv ? heard->n_kv : working->n_kv;
    if (!heard->over && !working->stopped && work->cancelled != NULL &&
        work->cancelled(work->context))
        working->stopped = 1;
    *stop_out = working->stopped;
}

enum kv_err turn_work(struct service *service, struct session *session,
                      const struct turn_work *work, struct kv_diag *diag) {
    struct hearing_ear ear = {.session = session};
    struct working working = {.work = work};
    enum kv_err err = turn_listen(service, &ear, on_work, &working, diag);
    if (err == KV_OK && working.stopped)
        err = kv_diag_set(diag, KV_ERR_CANCELLED, "stopped");
    return err;
}

static void answer_text(struct running *running, const char *text, size_t bytes) {
    struct turn_result *result = running->result;
    const struct kv_alloc *alloc = service_alloc(running->service);
    void *items = result->text;
    if (bytes == 0)
        return;
    if (!kv_alloc_grow(alloc, &items, &running->text_capacity, result->text_bytes + bytes + 1, 1)) {
        running->err = KV_ERR_NOMEM;
        return;
    }
    result->text = items;
    memcpy(result->text + result->text_bytes, text, bytes);
    result->text_bytes += bytes;
    result->text[result->text_bytes] = 0;
    if (running->options->stream != NULL &&
        !running->options->stream(running->options->context, text, bytes))
        result->cancelled = 1;
}

static void answer_token(struct running *running, uint32_t token) {
    const struct tokenizer *tokenizer = engine_tokenizer(service_engine(running->service));
    char text[TOKENIZER_STREAM_GROWTH * (512 + 4)];
    running->result->tokens_generated++;
    if (tokenizer_is_control(tokenizer, token) || tokenizer_is_stop(tokenizer, token))
        return;
    struct gguf_text piece = tokenizer_piece(tokenizer, token);
    for (uint64_t at = 0; at < piece.size_bytes; at += 512) {
        size_t part = piece.size_bytes - at < 512 ? (size_t)(piece.size_bytes - at) : 512;
        size_t bytes = tokenizer_stream_push(&running->stream, piece.bytes + at, part, text);
        answer_text(running, text, bytes);
    }
}

static void tell_prefilled(struct running *running, uint64_t n_kv) {
    const struct turn_options *options = running->options;
    uint64_t done = n_kv - running->n_kv_before;
    if (options->prefilled == NULL || n_kv <= running->n_kv_told || running->decode_from_ns != 0)
        return;
    running->n_kv_told = n_kv;
    if (done > running->result->tokens_fed)
        done = running->result->tokens_fed;
    options->prefilled(options->context, done, running->result->tokens_fed);
}

static void on_heard(void *context, const struct hearing_heard *heard, int *stop_out) {
    struct running *running = context;
    const struct turn_options *options = running->options;
    tell_prefilled(running, heard->n_kv);
    if (heard->token_count > 0 && running->decode_from_ns == 0)
        running->decode_from_ns = kv_clock_now_ns(service_clock(running->service));
    for (size_t i = 0; i < heard->token_count; i++)
        answer_token(running, heard->tokens[i]);
    if (heard->over)
        running->result->done = heard->done;
    else if (!running->result->cancelled && options->cancelled != NULL &&
             options->cancelled(options->context))
        running->result->cancelled = 1;
    *stop_out = running->result->cancelled;
}

static void finish_answer(struct running *running) {
    struct turn_result *result = running->result;
    uint64_t end_ns = kv_clock_now_ns(service_clock(running->service));
    char text[16];
    size_t bytes = tokenizer_stream_end(&running->stream, text);
    answer_text(running, text, bytes);
    uint64_t decode_from_ns = running->decode_from_ns != 0 ? running->decode_from_ns : end_ns;
    result->prefill_ns = decode_from_ns - running->started_ns;
    result->decode_ns = end_ns - decode_from_ns;
}

/* Half a message is not what anybody said: an answer behind it would answer something else. */
static enum kv_err stopped_reading(struct running *running, uint64_t n_before,
                                   struct kv_diag *diag) {
    struct turn_result *result = running->result;
    struct session_info info;
    session_info(running->session, &info);
    uint64_t end = n_before + result->tokens_fed;
    result->tokens_unread = result->cancelled && info.n < end ? end - info.n : 0;
#ifdef BREAK_HALF_MESSAGE
    return KV_OK;
#endif
    if (result->tokens_unread == 0 || !running->options->take_back)
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_CANCELLED,
                       "session %s: stopped while the message was read, at token %" PRIu64
                       " of %" PRIu64 "; nothing of it is kept, say it again",
                       info.name, result->tokens_fed - result->tokens_unread, result->tokens_fed);
}

enum kv_err turn_run(struct service *service, struct session *session,
                     const struct turn_options *options, struct turn_result *result_out,
                     struct kv_diag *diag) {
    struct running running = {
        .service = service, .session = session, .options = options, .result = result_out};
    struct session_info info;
    memset(result_out, 0, sizeof *result_out);
    session_info(session, &info);
    running.n_kv_before = running.n_kv_told = info.n_kv;
    running.started_ns = kv_clock_now_ns(service_clock(service));
    enum kv_err err = begin(&running, diag);
    struct hearing_ear ear = {.session = session, .slots_planned = running.slots};
    if (err == KV_OK)
        err = turn_listen(service, &ear, on_heard, &running, diag);
    if (err != KV_OK)
        return err;
    finish_answer(&running);
    if (running.err != KV_OK)
        return kv_diag_set(diag, running.err, "no memory for the text of the answer");
    err = stopped_reading(&running, info.n, diag);
    if (err == KV_OK && options->save)
        err = service_save(service, session, 0, &result_out->receipt, diag);
    result_out->saved = options->save && err == KV_OK;
    return err;
}

void turn_result_release(struct service *service, struct turn_result *result) {
    kv_alloc_release(service_alloc(service), result->text);
    memset(result, 0, sizeof *result);
}

/* --- going back */

/* Blocks that were far from the end are near it now: finer planes come before a step reads. */
static enum kv_err prefill_again(struct service *service, struct session *session,
                                 struct kv_diag *diag) {
    const struct turn_work work = {.prefilled = NULL};
    struct session_info info;
    while (session_promoting(session) && engine_apply(service_engine(service)))
        ;
    session_info(session, &info);
    return info.state == SESSION_ACTIVE ? turn_work(service, session, &work, diag) : KV_OK;
}

enum kv_err turn_rewind(struct service *service, struct session *session, uint64_t n,
                        uint64_t *prefilled_out, struct kv_diag *diag) {
    struct session_info before, after;
    session_info(session, &before);
    enum kv_err err = snapshot_rewind(service_snapshot(service), session, n, diag);
    if (err != KV_OK)
        return err;
    err = prefill_again(service, session, diag);
    session_info(session, &after);
    *prefilled_out = after.tokens_prefilled - before.tokens_prefilled;
    return err;
}

enum kv_err turn_branch(struct service *service, struct session *session, uint64_t n,
                        struct kv_diag *diag) {
    enum kv_err err = snapshot_branch(service_snapshot(service), session, n, diag);
    return err == KV_OK ? prefill_again(service, session, diag) : err;
}

enum kv_err turn_last(struct service *service, struct session *session, struct turn_last *last_out,
                      struct kv_diag *diag) {
    const struct template_turns opening = {.flags = TEMPLATE_ASK};
    struct session_info info;
    struct turn_rendered rendered;
    session_info(session, &info);
    const struct image_span *answer = info.role_count > 1 ? &info.roles[info.role_count - 1] : NULL;
    if (answer == NULL || answer->role != IMAGE_ASSISTANT || answer[-1].role != IMAGE_USER)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                           "session %s does not end with an answer to a message", info.name);
    enum kv_err err = turn_render(service, &opening, &rendered, diag);
    if (err != KV_OK)
        return err;
    size_t count = rendered.ids.count;
    if (answer->first + count >= answer->end ||
        memcmp(info.ids + answer->first, rendered.ids.items, count * sizeof *info.ids) != 0)
        err = kv_diag_set(diag, KV_ERR_NOT_FOUND,
                          "session %s ends with an answer that does not begin as the template says",
                          info.name);
    else
        *last_out = (struct turn_last){answer[-1].first, answer->first + count};
    turn_rendered_release(service, &rendered);
    return err;
}

/* --- documents */

struct document_progress {
    const struct turn_document *document;
};

static void on_document(void *context, uint64_t tokens_done, uint64_t tokens_all) {
    const struct turn_document *document = ((struct document_progress *)context)->document;
    if (document->prefilled != NULL)
        document->prefilled(document->context, tokens_done, tokens_all);
}

static size_t whole_characters(const char *text, size_t bytes, size_t text_bytes) {
    while (bytes > 0 && bytes < text_bytes && ((unsigned char)text[bytes] & 0xc0) == 0x80)
        bytes--;
    return bytes;
}

/* The longest cut, found by halving, since tokens do not add up across a cut. */
static enum kv_err cut_document(struct service *service, unsigned flags,
                                const struct turn_document *document, uint64_t room_tokens,
                                size_t *bytes_out, struct kv_diag *diag) {
    size_t fits = 0, too_long = document->text_bytes + 1;
    while (too_long - fits > 1) {
        size_t bytes = fits + (too_long - fits) / 2;
        size_t cut = whole_characters(document->text, bytes, document->text_bytes);
        if (cut <= fits)
            cut = bytes;
        struct template_message message = {TEMPLATE_USER, document->text, cut};
        struct template_turns turns = {&message, 1, flags};
        struct turn_rendered rendered;
        enum kv_err err = turn_render(service, &turns, &rendered, diag);
        if (err != KV_OK)
            return err;
        if (rendered.ids.count <= room_tokens)
            fits = cut;
        else
            too_long = bytes;
        turn_rendered_release(service, &rendered);
    }
    *bytes_out = whole_characters(document->text, fits, document->text_bytes);
    return KV_OK;
}

enum kv_err turn_feed_document(struct service *service, struct session *session,
                               const struct turn_document *document, struct kv_diag *diag) {
    struct session_info info;
    struct document_progress progress = {document};
    size_t bytes = 0;
    session_info(session, &info);
    uint64_t room = document->tokens_end > info.n ? document->tokens_end - info.n : 0;
    unsigned flags = open_flags(service, &info, service_engine(service));
    enum kv_err err = cut_document(service, flags, document, room, &bytes, diag);
    if (err != KV_OK)
        return err;
    if (bytes == 0)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "session %s: a document up to token %" PRIu64
                           " has no room behind %" PRIu64 " tokens",
                           info.name, document->tokens_end, info.n);
    struct template_message message = {TEMPLATE_USER, document->text, bytes};
    const struct turn_options options = {
        .messages = &message, .message_count = 1, .prefilled = on_document, .context = &progress};
    struct turn_result result;
    err = turn_run(service, session, &options, &result, diag);
    turn_result_release(service, &result);
    return err;
}
