/* engine/model/template.c - chat turns as text and as token ids.
 *
 * Responsible for: one rendering of the turns into control tokens and text, and two sinks for it.
 * Not responsible for: recognising templates (template_make.c).
 */
#include "engine/model/template_inner.h"

#include <string.h>

/* What people write is tokenized with special parsing off. */
#ifdef BREAK_TYPED_CONTROL
enum { TYPED_FLAGS = TOKENIZER_PARSE_SPECIAL };
#else
enum { TYPED_FLAGS = 0 };
#endif

/* Where a rendering goes: `ids` NULL is text. Text between two control tokens is collected first,
 * because it must be tokenized as one string. */
struct sink {
    const struct template *tmpl;
    struct tokenizer_ids *ids;
    struct template_spans *spans;
    struct kv_diag *diag;
    char *out;
    size_t capacity_bytes;
    size_t used;
    char *segment;
    size_t segment_capacity;
    size_t segment_bytes;
};

static enum kv_err put_text(struct sink *sink, const char *text, size_t bytes) {
    if (bytes == 0)
        return KV_OK;
    if (sink->ids == NULL) {
        if (sink->used <= sink->capacity_bytes && bytes <= sink->capacity_bytes - sink->used)
            memcpy(sink->out + sink->used, text, bytes);
        sink->used += bytes;
        return KV_OK;
    }
    if (!kv_alloc_grow(sink->tmpl->alloc, (void **)&sink->segment, &sink->segment_capacity,
                       sink->segment_bytes + bytes, 1))
        return kv_diag_set(sink->diag, KV_ERR_NOMEM, "no memory to render the chat");
    memcpy(sink->segment + sink->segment_bytes, text, bytes);
    sink->segment_bytes += bytes;
    return KV_OK;
}

/* Tokenizes what is collected. Too many ids are counted on, so that the end knows the need. */
static enum kv_err flush(struct sink *sink) {
    if (sink->segment_bytes == 0)
        return KV_OK;
    enum kv_err err = tokenizer_encode(sink->tmpl->tokenizer, sink->segment, sink->segment_bytes,
                                       TYPED_FLAGS, sink->ids, sink->diag);
    sink->segment_bytes = 0;
    return err == KV_ERR_LIMIT ? KV_OK : err;
}

static enum kv_err put_control(struct sink *sink, uint32_t id) {
    if (sink->ids == NULL) {
        struct gguf_text piece = tokenizer_piece(sink->tmpl->tokenizer, id);
        return put_text(sink, piece.bytes, (size_t)piece.size_bytes);
    }
    enum kv_err err = flush(sink);
    if (err != KV_OK)
        return err;
    if (sink->ids->count < sink->ids->capacity)
        sink->ids->items[sink->ids->count] = id;
    sink->ids->count++;
    return KV_OK;
}

static enum kv_err put_literal(struct sink *sink, const char *text) {
    return put_text(sink, text, strlen(text));
}

static int is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Llama-3 strips white space around a message; an open one keeps its end, it goes on. */
static enum kv_err put_message_text(struct sink *sink, const char *text, size_t bytes, int open) {
    if (sink->tmpl->kind == TEMPLATE_LLAMA3) {
        while (bytes != 0 && is_space(text[0])) {
            text++;
            bytes--;
        }
        while (bytes != 0 && !open && is_space(text[bytes - 1]))
            bytes--;
    }
    return put_text(sink, text, bytes);
}

static const char *role_name(enum template_role role) {
    static const char *const names[TEMPLATE_ROLE_COUNT] = {"system", "user", "assistant"};
    return (unsigned)role < TEMPLATE_ROLE_COUNT ? names[role] : "unknown";
}

static enum kv_err put_opening(struct sink *sink, enum template_role role) {
    const struct template *tmpl = sink->tmpl;
    enum kv_err err = KV_OK;
    KV_TRY(put_control(sink, tmpl->open_id));
    KV_TRY(put_literal(sink, role_name(role)));
    if (tmpl->kind == TEMPLATE_LLAMA3)
        KV_TRY(put_control(sink, tmpl->header_end_id));
    KV_TRY(put_literal(sink, tmpl->kind == TEMPLATE_LLAMA3 ? "\n\n" : "\n"));
    if (role == TEMPLATE_SYSTEM)
        KV_TRY(put_text(sink, tmpl->preamble, tmpl->preamble_bytes));
done:
    return err;
}

static enum kv_err put_after_end(struct sink *sink) {
    return sink->tmpl->kind == TEMPLATE_CHATML ? put_literal(sink, "\n") : KV_OK;
}

/* What stands before a span is tokenized first, so that its first position is known. */
static enum kv_err begin_span(struct sink *sink, enum template_role role) {
    enum kv_err err = sink->ids == NULL ? KV_OK : flush(sink);
    if (err == KV_OK && sink->spans != NULL && sink->spans->count < sink->spans->capacity)
        sink->spans->items[sink->spans->count] =
            (struct template_span){.role = role, .first = sink->ids->count};
    return err;
}

static enum kv_err end_span(struct sink *sink) {
    enum kv_err err = sink->ids == NULL ? KV_OK : flush(sink);
    if (err == KV_OK && sink->spans != NULL) {
        if (sink->spans->count < sink->spans->capacity)
            sink->spans->items[sink->spans->count].end = sink->ids->count;
        sink->spans->count++;
    }
    return err;
}

static enum kv_err put_message(struct sink *sink, const struct template_message *message,
                               int open) {
    enum kv_err err = KV_OK;
    KV_TRY(begin_span(sink, message->role));
    KV_TRY(put_opening(sink, message->role));
    KV_TRY(put_message_text(sink, message->text, message->text_bytes, open));
    if (!open) {
        KV_TRY(put_control(sink, sink->tmpl->end_id));
        KV_TRY(put_after_end(sink));
    }
    KV_TRY(end_span(sink));
done:
    return err;
}

static enum kv_err check_turns(const struct template_turns *turns, struct kv_diag *diag) {
    if (turns->count > TEMPLATE_MESSAGES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "%zu messages at once; at most %d are possible",
                           turns->count, TEMPLATE_MESSAGES_MAX);
    if ((turns->flags & TEMPLATE_OPEN_LAST) && (turns->count == 0 || (turns->flags & TEMPLATE_ASK)))
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "an open last message needs a message and excludes the opening of an "
                           "answer");
    for (size_t i = 0; i < turns->count; i++) {
        unsigned role = (unsigned)turns->messages[i].role;
        if (role >= TEMPLATE_ROLE_COUNT)
            return kv_diag_set(diag, KV_ERR_INVALID, "message %zu has an unknown role", i);
        if (role == TEMPLATE_SYSTEM && (i != 0 || !(turns->flags & TEMPLATE_FIRST)))
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "message %zu is a system message; only the first of a "
                               "conversation can be one",
                               i);
    }
    return KV_OK;
}

static enum kv_err put_beginning(struct sink *sink, const struct template_turns *turns) {
    const struct template *tmpl = sink->tmpl;
    enum kv_err err = KV_OK;
    if (turns->flags & TEMPLATE_END_TURN)
        KV_TRY(put_control(sink, tmpl->end_id));
    if (turns->flags & TEMPLATE_AFTER_END)
        KV_TRY(put_after_end(sink));
    if (!(turns->flags & TEMPLATE_FIRST))
        goto done;
    if (tmpl->bos_id != TOKENIZER_NONE)
        KV_TRY(put_control(sink, (uint32_t)tmpl->bos_id));
    if ((turns->count == 0 || turns->messages[0].role != TEMPLATE_SYSTEM) &&
        (tmpl->system_bytes != 0 || tmpl->preamble_bytes != 0)) {
        struct template_message system = {
            .role = TEMPLATE_SYSTEM, .text = tmpl->system, .text_bytes = tmpl->system_bytes};
        KV_TRY(put_message(sink, &system, 0));
    }
done:
    return err;
}

static enum kv_err render(struct sink *sink, const struct template_turns *turns) {
    enum kv_err err = KV_OK;
    KV_TRY(check_turns(turns, sink->diag));
    KV_TRY(put_beginning(sink, turns));
    for (size_t i = 0; i < turns->count; i++) {
        int open = i + 1 == turns->count && (turns->flags & TEMPLATE_OPEN_LAST);
        KV_TRY(put_message(sink, &turns->messages[i], open));
    }
    if (turns->flags & TEMPLATE_ASK) {
        KV_TRY(begin_span(sink, TEMPLATE_ASSISTANT));
        KV_TRY(put_opening(sink, TEMPLATE_ASSISTANT));
        KV_TRY(end_span(sink));
    }
    if (sink->ids != NULL)
        KV_TRY(flush(sink));
done:
    return err;
}

static enum kv_err take_text(const struct sink *sink, size_t *size_bytes_out) {
    *size_bytes_out = sink->used;
    if (sink->used > sink->capacity_bytes)
        return kv_diag_set(sink->diag, KV_ERR_LIMIT,
                           "the chat has %zu bytes; there is room for %zu", sink->used,
                           sink->capacity_bytes);
    return KV_OK;
}

enum kv_err template_text(const struct template *tmpl, const struct template_turns *turns,
                          char *text_out, size_t capacity_bytes, size_t *size_bytes_out,
                          struct kv_diag *diag) {
    struct sink sink = {
        .tmpl = tmpl, .diag = diag, .out = text_out, .capacity_bytes = capacity_bytes};
    enum kv_err err = render(&sink, turns);
    return err == KV_OK ? take_text(&sink, size_bytes_out) : err;
}

enum kv_err template_opening(const struct template *tmpl, enum template_role role, char *text_out,
                             size_t capacity_bytes, size_t *size_bytes_out, struct kv_diag *diag) {
    struct sink sink = {
        .tmpl = tmpl, .diag = diag, .out = text_out, .capacity_bytes = capacity_bytes};
    enum kv_err err = put_opening(&sink, role);
    return err == KV_OK ? take_text(&sink, size_bytes_out) : err;
}

enum kv_err template_ids(const struct template *tmpl, const struct template_turns *turns,
                         struct tokenizer_ids *ids, struct template_spans *spans,
                         struct kv_diag *diag) {
    struct sink sink = {.tmpl = tmpl, .ids = ids, .spans = spans, .diag = diag};
    struct tokenizer_ids ids_before = *ids;
    size_t spans_before = spans == NULL ? 0 : spans->count;
    enum kv_err err = render(&sink, turns);
    kv_alloc_release(tmpl->alloc, sink.segment);
    if (err != KV_OK)
        *ids = ids_before;
    else if (ids->count > ids->capacity)
        err = kv_diag_set(diag, KV_ERR_LIMIT, "the chat needs %zu tokens; there is room for %zu",
                          ids->count, ids->capacity);
    else if (spans != NULL && spans->count > spans->capacity)
        err = kv_diag_set(diag, KV_ERR_LIMIT, "the chat has %zu messages; there is room for %zu",
                          spans->count, spans->capacity);
    if (err != KV_OK && spans != NULL)
        spans->count = spans_before;
    return err;
}

uint32_t template_end_id(const struct template *tmpl) {
    return tmpl->end_id;
}

enum template_kind template_kind(const struct template *tmpl) {
    return tmpl->kind;
}

struct gguf_text template_default_system(const struct template *tmpl) {
    return (struct gguf_text){.bytes = tmpl->system, .size_bytes = tmpl->system_bytes};
}
