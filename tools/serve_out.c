/* tools/serve_out.c - what of an answer goes out, token by token.
 *
 * Responsible for: the contract of serve_out.h.
 * Not responsible for: the sampler; log-probabilities are those of the unscaled logits.
 *
 * With stop texts as many bytes are held back as the longest of them could still need.
 */
#include "tools/serve_out.h"

#include "engine/model/sampler.h"
#include "tools/serve_inner.h"

#include <inttypes.h>
#include <string.h>

enum { PIECE_BYTES = 512 };

enum kv_err serve_out_begin(struct serve_out *out, struct serve *serve,
                            const struct serve_request *request, uint32_t tokens_max,
                            struct kv_diag *diag) {
    struct engine_model model;
    engine_model(service_engine(serve->service), &model);
    *out = (struct serve_out){.serve = serve,
                              .request = request,
                              .tokenizer = engine_tokenizer(service_engine(serve->service)),
                              .vocab_count = model.vocab_count,
                              .tokens_max = tokens_max};
    if (request->stop_count > SERVE_STOPS_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "%zu stop texts: at most %d are understood",
                           request->stop_count, SERVE_STOPS_MAX);
    for (size_t i = 0; i < request->stop_count; i++) {
        size_t bytes = strlen(request->stops[i]);
        if (bytes == 0 || bytes > SERVE_STOP_BYTES_MAX)
            return kv_diag_set(diag, KV_ERR_INVALID, "a stop text has 1 to %d bytes, not %zu",
                               SERVE_STOP_BYTES_MAX, bytes);
        out->stop_bytes_max = bytes > out->stop_bytes_max ? bytes : out->stop_bytes_max;
    }
    if (!request->logprobs)
        return KV_OK;
    if (request->top_logprobs > SERVE_LOGPROBS_MAX || request->top_logprobs > model.vocab_count)
        return kv_diag_set(diag, KV_ERR_INVALID, "top_logprobs is %" PRIu32 ": at most %d",
                           request->top_logprobs, SERVE_LOGPROBS_MAX);
    out->logprobs = kv_alloc_zeroed(&serve->alloc, (size_t)tokens_max * (1 + request->top_logprobs),
                                    sizeof *out->logprobs);
    return out->logprobs != NULL
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the log-probabilities");
}

void serve_out_note(struct serve_out *out, const float *logits, uint32_t token) {
    struct sampler_candidate top[SERVE_LOGPROBS_MAX];
    const struct sampler_row row = {logits, out->vocab_count, 0};
    uint32_t wanted = out->request->top_logprobs;
    double logprob = 0;
    uint32_t index = atomic_load(&out->noted);
    if (logits == NULL || index >= out->tokens_max ||
        sampler_log_prob(&row, token, &logprob, NULL) != KV_OK ||
        (wanted > 0 && sampler_top(&row, wanted, top, NULL) != KV_OK))
        return;
    struct serve_logprob *at = &out->logprobs[(size_t)index * (1 + wanted)];
    double sum = (double)logits[token] - logprob;
    at[0] = (struct serve_logprob){token, (float)logprob};
    for (uint32_t i = 0; i < wanted; i++)
        at[1 + i] = (struct serve_logprob){top[i].id, (float)((double)top[i].logit - sum)};
    atomic_store(&out->noted, index + 1);
}

void serve_out_stop(struct serve_out *out, enum serve_finish finish) {
    if (out->stopped)
        return;
    out->stopped = 1;
    out->finish = finish;
}

int serve_out_is_stopped(const struct serve_out *out) {
    return out->stopped;
}

static void keep(struct serve_out *out, const char *text, size_t bytes) {
    void *items = out->text;
    if (bytes == 0 || out->found_stop || out->err != KV_OK)
        return;
    if (!kv_alloc_grow(&out->serve->alloc, &items, &out->text_capacity, out->text_bytes + bytes + 1,
                       1)) {
        out->err = KV_ERR_NOMEM;
        serve_out_stop(out, SERVE_CANCELLED);
        return;
    }
    out->text = items;
    memcpy(out->text + out->text_bytes, text, bytes);
    out->text_bytes += bytes;
    out->text[out->text_bytes] = 0;
}

/* Looks at what was not sent: nothing of a stop is ever sent. */
static void find_stop(struct serve_out *out) {
    size_t first = out->text_bytes;
    for (size_t i = 0; i < out->request->stop_count; i++) {
        const char *stop = out->request->stops[i];
        const char *at = memmem(out->text + out->sent_bytes, out->text_bytes - out->sent_bytes,
                                stop, strlen(stop));
        if (at != NULL && (size_t)(at - out->text) < first)
            first = (size_t)(at - out->text);
    }
    if (first == out->text_bytes)
        return;
    out->text_bytes = first;
    out->text[first] = 0;
    out->found_stop = 1;
    serve_out_stop(out, SERVE_STOP);
}

/* How much of the text is safe to send: no stop can begin before it. */
static size_t safe_bytes(const struct serve_out *out, int last) {
    size_t held = out->stop_bytes_max > 0 ? out->stop_bytes_max - 1 : 0;
    if (last || out->found_stop)
        return out->text_bytes;
    size_t safe = out->text_bytes > held ? out->text_bytes - held : 0;
    while (safe > out->sent_bytes && ((unsigned char)out->text[safe] & 0xc0) == 0x80)
        safe--;
    return safe > out->sent_bytes ? safe : out->sent_bytes;
}

static void send_piece(struct serve_out *out, const uint32_t *token, int last) {
    const struct serve_request *request = out->request;
    struct serve_piece piece = {.text = ""};
    if (out->text_bytes > out->sent_bytes && out->request->stop_count > 0)
        find_stop(out);
    size_t safe = safe_bytes(out, last);
    if (safe > out->sent_bytes) {
        piece.text = out->text + out->sent_bytes;
        piece.text_bytes = safe - out->sent_bytes;
    }
    out->sent_bytes = safe;
    if (token != NULL) {
        piece.has_token = 1;
        piece.token = *token;
    }
    if (token != NULL && out->logprobs != NULL && out->token_count <= atomic_load(&out->noted)) {
        const struct serve_logprob *at =
            &out->logprobs[(out->token_count - 1) * (1 + (size_t)request->top_logprobs)];
        piece.logprob = at[0].logprob;
        piece.top = at + 1;
        piece.top_count = request->top_logprobs;
    }
    if (request->piece == NULL || out->refused || (!piece.has_token && piece.text_bytes == 0))
        return;
    out->refused = !request->piece(request->context, &piece);
    if (out->refused)
        serve_out_stop(out, SERVE_CANCELLED);
}

void serve_out_tokens(struct serve_out *out, const uint32_t *tokens, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char text[TOKENIZER_STREAM_GROWTH * (PIECE_BYTES + 4)];
        uint32_t token = tokens[i];
        if (out->first_ns == 0)
            out->first_ns = kv_clock_now_ns(out->serve->clock);
        out->token_count++;
        /* One or two may come after the answer has ended: they are the session's alone. */
        if (out->stopped || tokenizer_is_control(out->tokenizer, token) ||
            tokenizer_is_stop(out->tokenizer, token))
            continue;
        struct gguf_text piece = tokenizer_piece(out->tokenizer, token);
        for (uint64_t at = 0; at < piece.size_bytes; at += PIECE_BYTES) {
            uint64_t left = piece.size_bytes - at;
            size_t part = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
            keep(out, text, tokenizer_stream_push(&out->stream, piece.bytes + at, part, text));
        }
        send_piece(out, &token, 0);
    }
}

void serve_out_done(struct serve_out *out, enum engine_done done) {
    if (out->stopped)
        return;
    out->finish = done == ENGINE_DONE_LENGTH      ? SERVE_LENGTH
                  : done == ENGINE_DONE_CONTEXT   ? SERVE_CONTEXT
                  : done == ENGINE_DONE_CANCELLED ? SERVE_CANCELLED
                                                  : SERVE_STOP;
}

uint64_t serve_out_shown(const struct serve_out *out, const uint32_t *tokens, uint64_t count) {
    struct tokenizer_stream stream = {.held_count = 0};
    size_t bytes = 0;
    uint64_t shown = 0;
    for (uint64_t i = 0; i < count && bytes <= out->text_bytes; i++) {
        char text[TOKENIZER_STREAM_GROWTH * (PIECE_BYTES + 4)];
        struct gguf_text piece = tokenizer_piece(out->tokenizer, tokens[i]);
        if (tokenizer_is_control(out->tokenizer, tokens[i]))
            break;
        for (uint64_t at = 0; at < piece.size_bytes; at += PIECE_BYTES) {
            uint64_t left = piece.size_bytes - at;
            size_t part = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
            bytes += tokenizer_stream_push(&stream, piece.bytes + at, part, text);
        }
        if (bytes <= out->text_bytes && stream.held_count == 0)
            shown = i + 1;
    }
    return shown;
}

enum kv_err serve_out_end(struct serve_out *out, struct serve_answer *answer) {
    char text[16];
    if (out->serve == NULL)
        return KV_OK;
    if (!out->stopped) {
        keep(out, text, tokenizer_stream_end(&out->stream, text));
        send_piece(out, NULL, 1);
    } else if (!out->found_stop) {
        send_piece(out, NULL, 1);
    }
    if (out->text == NULL)
        out->text = kv_alloc_zeroed(&out->serve->alloc, 1, 1);
    if (out->text == NULL)
        out->err = KV_ERR_NOMEM;
    answer->text = out->text;
    answer->text_bytes = out->text_bytes;
    answer->finish = out->finish;
    answer->tokens_completion = out->token_count;
    kv_alloc_release(&out->serve->alloc, out->logprobs);
    return out->err;
}
