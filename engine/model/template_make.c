/* engine/model/template_make.c - recognises the chat template of a model file.
 *
 * Responsible for: telling ChatML and Llama-3 by their control tokens, taking default texts out of
 * the template's literals, finding the control tokens in the vocabulary.
 * Not responsible for: rendering (template.c).
 */
#include "engine/model/template_inner.h"

#include <stdio.h>
#include <string.h>

#include "store/base/bytes.h"

enum { DATE_BYTES_MAX = 32, PREAMBLE_BYTES = 160 };

/* The place of a literal in a text, or NULL. */
static const char *find(struct gguf_text text, const char *literal) {
    return text.size_bytes == 0
               ? NULL
               : memmem(text.bytes, (size_t)text.size_bytes, literal, strlen(literal));
}

static struct gguf_text behind(struct gguf_text text, const char *at) {
    return (struct gguf_text){.bytes = at,
                              .size_bytes = text.size_bytes - (uint64_t)(at - text.bytes)};
}

/* Copies a literal, with \n and escaped quotes resolved; returns the bytes. */
static size_t unescape(const char *from, size_t bytes, char *to) {
    size_t used = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (from[i] == '\\' && i + 1 < bytes) {
            i++;
            to[used++] = from[i] == 'n' ? '\n' : from[i] == 't' ? '\t' : from[i];
        } else {
            to[used++] = from[i];
        }
    }
    return used;
}

/* 1 when the text goes on past the end of its literal: at a quote that is not escaped, or, outside
 * of quotes, at a brace. */
static int leaves_literal(struct gguf_text text, char quote) {
    for (uint64_t i = 0; i < text.size_bytes; i++) {
        if (quote != '{' && text.bytes[i] == '\\')
            i++;
        else if (text.bytes[i] == quote)
            return 1;
    }
    return 0;
}

/* A literal `<|im_start|>system`, line break, text, `<|im_end|>` inside one pair of quotes, or
 * outside any: the text is what the template says when the conversation has no system message.
 * The quote, '{' when there is none, or 0 when there is no such literal. */
static char find_default_system(struct gguf_text text, struct gguf_text *system_out) {
    static const char opening[] = "<|im_start|>system", closing[] = "<|im_end|>";
    const char *begin = text.bytes;
    for (const char *at; (at = find(text, opening)) != NULL;) {
        char quote = at > begin && (at[-1] == '\'' || at[-1] == '"') ? at[-1] : '{';
        text = behind(text, at + strlen(opening));
        size_t skip = 0;
        if (text.size_bytes >= 1 && text.bytes[0] == '\n')
            skip = 1;
        else if (quote != '{' && text.size_bytes >= 2 && memcmp(text.bytes, "\\n", 2) == 0)
            skip = 2;
        const char *end = find(text, closing);
        if (skip == 0 || end == NULL || end <= text.bytes + skip)
            continue;
        struct gguf_text found = {text.bytes + skip, (uint64_t)(end - text.bytes) - skip};
        if (leaves_literal(found, quote))
            continue;
        *system_out = found;
        return quote;
    }
    return 0;
}

static enum kv_err take_default_system(struct template *tmpl, struct gguf_text text) {
    struct gguf_text found;
    char quote = find_default_system(text, &found);
    if (quote == 0)
        return KV_OK;
    tmpl->system = kv_alloc_copy(tmpl->alloc, found.bytes, (size_t)found.size_bytes);
    if (tmpl->system == NULL)
        return KV_ERR_NOMEM;
    tmpl->system_bytes = (size_t)found.size_bytes;
    if (quote != '{')
        tmpl->system_bytes = unescape(found.bytes, (size_t)found.size_bytes, tmpl->system);
    return KV_OK;
}

/* Llama-3.1 and later put two dates in front of the system message. "Today" is the date that the
 * template itself falls back to: the same conversation gives the same ids on every day. */
static enum kv_err take_preamble(struct template *tmpl, struct gguf_text text) {
    static const char cutoff[] = "Cutting Knowledge Date: December 2023";
    static const char setting[] = "set date_string = \"";
    char preamble[PREAMBLE_BYTES];
    const char *date = "26 Jul 2024";
    int date_bytes = (int)strlen(date);
    if (find(text, cutoff) == NULL)
        return KV_OK;
    const char *at = find(text, setting);
    if (at != NULL) {
        struct gguf_text rest = behind(text, at + strlen(setting));
        const char *end = memchr(rest.bytes, '"', (size_t)rest.size_bytes);
        if (end != NULL && end - rest.bytes <= DATE_BYTES_MAX) {
            date = rest.bytes;
            date_bytes = (int)(end - rest.bytes);
        }
    }
    int bytes =
        snprintf(preamble, sizeof preamble, "%s\nToday Date: %.*s\n\n", cutoff, date_bytes, date);
    tmpl->preamble = kv_alloc_copy(tmpl->alloc, preamble, (size_t)bytes);
    tmpl->preamble_bytes = (size_t)bytes;
    return tmpl->preamble == NULL ? KV_ERR_NOMEM : KV_OK;
}

/* A control token by its text. One that is not of control type would be read out of what people
 * write, and could end a turn. */
static enum kv_err need_control(const struct tokenizer *tokenizer, const char *text,
                                uint32_t *id_out, struct kv_diag *diag) {
    int32_t id = tokenizer_special(tokenizer, text);
    if (id == TOKENIZER_NONE || !tokenizer_is_control(tokenizer, (uint32_t)id))
        return kv_diag_set(diag, KV_ERR_MISMATCH,
                           "the chat template needs the control token %s, which the vocabulary "
                           "does not have; use a chat model",
                           text);
    *id_out = (uint32_t)id;
    return KV_OK;
}

static enum kv_err recognise(const struct template_make_args *args, enum template_kind *kind_out,
                             struct gguf_text *text_out, struct kv_diag *diag) {
    struct gguf_text text = {0};
    enum kv_err err = gguf_string(args->gguf, "tokenizer.chat_template", &text, NULL);
    *text_out = text;
    if (args->name != NULL) {
        int chatml = strcmp(args->name, "chatml") == 0;
        if (!chatml && strcmp(args->name, "llama-3") != 0)
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "the chat template \"%s\" does not exist; use chatml or llama-3",
                               args->name);
        *kind_out = chatml ? TEMPLATE_CHATML : TEMPLATE_LLAMA3;
        return KV_OK;
    }
    int chatml = find(text, "<|im_start|>") != NULL && find(text, "<|im_end|>") != NULL;
    int llama3 = find(text, "<|start_header_id|>") != NULL && find(text, "<|eot_id|>") != NULL;
    if (err == KV_OK && chatml != llama3 && find(text, "<|im_sep|>") == NULL) {
        *kind_out = chatml ? TEMPLATE_CHATML : TEMPLATE_LLAMA3;
        return KV_OK;
    }
    return kv_diag_set(diag, KV_ERR_MISMATCH,
                       "the model file %s; choose one with `--template chatml` or `--template "
                       "llama-3`",
                       err != KV_OK ? "has no chat template"
                                    : "has a chat template of an unknown kind");
}

static enum kv_err find_controls(struct template *tmpl, struct kv_diag *diag) {
    const struct tokenizer *tokenizer = tmpl->tokenizer;
    uint32_t bos = 0;
    enum kv_err err = KV_OK;
    tmpl->bos_id = TOKENIZER_NONE;
    if (tmpl->kind == TEMPLATE_CHATML) {
        KV_TRY(need_control(tokenizer, "<|im_start|>", &tmpl->open_id, diag));
        KV_TRY(need_control(tokenizer, "<|im_end|>", &tmpl->end_id, diag));
        goto done;
    }
    KV_TRY(need_control(tokenizer, "<|start_header_id|>", &tmpl->open_id, diag));
    KV_TRY(need_control(tokenizer, "<|end_header_id|>", &tmpl->header_end_id, diag));
    KV_TRY(need_control(tokenizer, "<|eot_id|>", &tmpl->end_id, diag));
    KV_TRY(need_control(tokenizer, "<|begin_of_text|>", &bos, diag));
    tmpl->bos_id = (int32_t)bos;
done:
    return err;
}

enum kv_err template_make(const struct template_make_args *args, const struct kv_alloc *alloc,
                          struct template **template_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct gguf_text text = {0};
    struct template *tmpl = kv_alloc_zeroed(alloc, 1, sizeof *tmpl);
    if (tmpl == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the chat template");
    tmpl->alloc = alloc;
    tmpl->tokenizer = args->tokenizer;
    KV_TRY(recognise(args, &tmpl->kind, &text, diag));
    KV_TRY(find_controls(tmpl, diag));
    err =
        tmpl->kind == TEMPLATE_CHATML ? take_default_system(tmpl, text) : take_preamble(tmpl, text);
    if (err != KV_OK) {
        kv_diag_set(diag, err, "no memory for the chat template");
        goto done;
    }
    *template_out = tmpl;
    tmpl = NULL;
done:
    template_drop(tmpl);
    return err;
}

void template_drop(struct template *tmpl) {
    if (tmpl == NULL)
        return;
    kv_alloc_release(tmpl->alloc, tmpl->system);
    kv_alloc_release(tmpl->alloc, tmpl->preamble);
    kv_alloc_release(tmpl->alloc, tmpl);
}

struct kv_digest template_digest(const struct template *tmpl) {
    const uint32_t numbers[] = {(uint32_t)tmpl->kind,          tmpl->open_id,
                                tmpl->header_end_id,           tmpl->end_id,
                                (uint32_t)tmpl->bos_id,        (uint32_t)tmpl->system_bytes,
                                (uint32_t)tmpl->preamble_bytes};
    struct kv_digest_state state;
    kv_digest_init(&state);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        uint8_t bytes[4];
        kv_put_u32(bytes, numbers[i]);
        kv_digest_update(&state, bytes, sizeof bytes);
    }
    kv_digest_update(&state, tmpl->system, tmpl->system_bytes);
    kv_digest_update(&state, tmpl->preamble, tmpl->preamble_bytes);
    return kv_digest_final(&state);
}
