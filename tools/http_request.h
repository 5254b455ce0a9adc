/* tools/http_request.h - the JSON body of a completion request as a struct, and what refuses one.
 *
 * Responsible for: every member of /v1/chat/completions and /v1/completions that is known here: its
 * type, its range, refusing by name what would change the answer and does not exist here.
 * Not responsible for: HTTP (http.h), defaults of what was not given, the model's own limits.
 *
 * Members that are unknown are ignored; `null` is as not given; a member given twice is refused.
 *
 * Threads: pure.
 * Units: bytes, tokens.
 */
#ifndef TOOLS_HTTP_REQUEST_H
#define TOOLS_HTTP_REQUEST_H

#include "engine/model/template.h"
#include "store/base/alloc.h"
#include "tools/http_error.h"

enum { HTTP_STOPS_MAX = 4, HTTP_TOP_LOGPROBS_MAX = 20 };

enum http_form { HTTP_CHAT, HTTP_COMPLETION };

struct http_request {
    enum http_form form;
    char *memory; /* owns every text below */
    struct template_message *messages;
    size_t message_count; /* chat */
    const char *prompt;   /* completion */
    size_t prompt_bytes;
    const char *model, *session; /* NULL: not given */
    uint32_t tokens_max;         /* 0: not given */
    int has_temperature, has_top_p, has_seed;
    float temperature, top_p;
    uint64_t seed;
    const char *stops[HTTP_STOPS_MAX];
    size_t stop_count;
    int stream, include_usage;
    int logprobs;
    uint32_t top_logprobs;
};

/* INVALID and LIMIT: a client's mistake, status 400; NOMEM: 503. On an error the request is empty
 * and error_out is filled. Else the caller releases the request; the bytes are no longer needed. */
enum kv_err http_request_parse(enum http_form form, const char *bytes, size_t count,
                               const struct kv_alloc *alloc, struct http_request *request_out,
                               struct http_error *error_out);
/* 1 when the text can name a session: 1 to 128 bytes of UTF-8, no `/`, no control characters. */
int http_request_is_session(const char *text);
void http_request_release(struct http_request *request, const struct kv_alloc *alloc);

#endif
