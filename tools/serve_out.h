/* tools/serve_out.h - what of an answer goes out, token by token.
 *
 * Responsible for: whole characters, stop texts, log-probabilities, the pieces of a request.
 * Not responsible for: when tokens come or what becomes of the session (serve_turn.c).
 *
 * Threads: the request's; serve_out_note on the stepping thread, before the token is told.
 * Units: bytes, tokens.
 */
#ifndef TOOLS_SERVE_OUT_H
#define TOOLS_SERVE_OUT_H

#include "engine/model/tokenizer.h"
#include "tools/serve.h"

#include <stdatomic.h>

struct serve_out {
    struct serve *serve;
    const struct serve_request *request;
    const struct tokenizer *tokenizer;
    uint32_t vocab_count;
    struct tokenizer_stream stream;
    char *text;
    size_t text_bytes, text_capacity, sent_bytes;
    size_t stop_bytes_max;          /* of the longest stop */
    struct serve_logprob *logprobs; /* [tokens_max][1 + top_logprobs], the token's own first */
    atomic_uint noted; /* whole in `logprobs`: the engine thread writes while the turn's reads */
    uint32_t tokens_max;
    uint64_t token_count, first_ns;
    int stopped, found_stop, refused; /* refused: `piece` said 0 and is not asked again */
    enum serve_finish finish;         /* why it was stopped */
    enum kv_err err;
};

/* INVALID (stops, top_logprobs), NOMEM. */
enum kv_err serve_out_begin(struct serve_out *out, struct serve *serve,
                            const struct serve_request *request, uint32_t tokens_max,
                            struct kv_diag *diag);
void serve_out_note(struct serve_out *out, const float *logits, uint32_t token);
void serve_out_tokens(struct serve_out *out, const uint32_t *tokens, size_t count);
void serve_out_stop(struct serve_out *out, enum serve_finish finish);
int serve_out_is_stopped(const struct serve_out *out);
/* How many of the answer's first tokens are shown whole: those behind them are a stop's, or came
 * after the end. */
uint64_t serve_out_shown(const struct serve_out *out, const uint32_t *tokens, uint64_t count);
/* The engine's own end of it. */
void serve_out_done(struct serve_out *out, enum engine_done done);
/* What was held back goes out; text, finish and count go into the answer. Releases. NOMEM. */
enum kv_err serve_out_end(struct serve_out *out, struct serve_answer *answer);

#endif
