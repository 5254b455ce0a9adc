/* tools/http_answer.h - what a turn gave, as the JSON that OpenAI clients read.
 *
 * Responsible for: whole answers and the chunks of a stream, in both forms: choices, log
 * probabilities, usage, and the `coldplane` object: where the session was and what it cost.
 * Not responsible for: running the turn and sending (http_turn.c), error objects (http_error.h).
 *
 * Threads: an http_answer has one owner.
 * Units: bytes, tokens, natural logarithms, seconds since 1970.
 */
#ifndef TOOLS_HTTP_ANSWER_H
#define TOOLS_HTTP_ANSWER_H

#include "tools/http_request.h"
#include "tools/serve.h"

struct cJSON;

struct http_answer {
    const struct http_request *request;
    struct serve *serve; /* for the text of a token */
    const char *id, *model;
    int64_t created_seconds;
    /* state */
    struct cJSON *logprobs; /* of a whole answer, collected piece by piece; owned */
    size_t text_offset;     /* characters so far, for the older form */
    int begun;              /* the first chunk went out */
};

/* Takes the log probabilities of a piece of a whole answer. 0 without memory. */
int http_answer_collect(struct http_answer *answer, const struct serve_piece *piece);
/* Texts are for cJSON_free; NULL without memory. */
char *http_answer_whole(struct http_answer *answer, const struct serve_answer *given);
/* The next chunk; the first of a chat also names the role. */
char *http_answer_piece(struct http_answer *answer, const struct serve_piece *piece);
/* The chunk with the finish reason and, where usage was asked for, the one behind it. The one that
 * is last carries the `coldplane` object. */
char *http_answer_finish(struct http_answer *answer, const struct serve_answer *given);
char *http_answer_usage(struct http_answer *answer, const struct serve_answer *given);
void http_answer_release(struct http_answer *answer);

#endif
