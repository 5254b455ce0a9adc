/* tools/http_error.h - what an answer that refuses says: status, the error object, headers.
 *
 * Responsible for: the one mapping from error codes to statuses, the object {"error": {message,
 * type, param, code}}.
 * Not responsible for: sending it (http.c, http_turn.c).
 *
 * Threads: pure.
 * Units: seconds where the name says so.
 */
#ifndef TOOLS_HTTP_ERROR_H
#define TOOLS_HTTP_ERROR_H

#include "store/base/diag.h"

#include <stdint.h>

enum { HTTP_PARAM_BYTES = 96 };

/* `code` and `allow` are constants. */
struct http_error {
    int status; /* 0: none */
    const char *code;
    char param[HTTP_PARAM_BYTES]; /* "": null */
    struct kv_diag diag;          /* the message */
    uint32_t retry_after_seconds; /* 0: no such header */
    int final;         /* 1: trying again would not help, though the status lets clients think so */
    const char *allow; /* with 405: the methods that are */
};

void http_error_set(struct http_error *error, int status, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* What serve_turn returned. `diag` names the thing; 0 seconds: the usual wait where one is due.
 * BUSY 429, NO_SLOTS 503, INVALID and LIMIT 400, NOT_FOUND 404, MISMATCH and VERSION 409, CANCELLED
 * 408 (its time was up) or with seconds 503 (the service ends), NO_SPACE and NOMEM 503, all others
 * 500. */
void http_error_from(struct http_error *error, enum kv_err err, const struct kv_diag *diag,
                     uint32_t retry_after_seconds);

/* The object as text for cJSON_free; NULL without memory. */
char *http_error_json(const struct http_error *error);

#endif
