/* tools/http_error.c - what an answer that refuses says: status, the error object, headers.
 *
 * Responsible for: see http_error.h.
 * Not responsible for: the sentences (whoever found the error).
 */
#include "tools/http_error.h"

#include "tools/json_text.h"

#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stdio.h>

enum { RETRY_USUAL_SECONDS = 2 };

void http_error_set(struct http_error *error, int status, const char *code, const char *format,
                    ...) {
    char text[KV_DIAG_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    *error = (struct http_error){.status = status, .code = code};
    kv_diag_set(&error->diag, KV_ERR_INVALID, "%s", text);
}

void http_error_from(struct http_error *error, enum kv_err err, const struct kv_diag *diag,
                     uint32_t retry_after_seconds) {
    static const struct row {
        enum kv_err err;
        int status;
        const char *code;
        int wait, final;
    } rows[] = {{KV_ERR_BUSY, 429, "rate_limit_exceeded", 1, 0},
                {KV_ERR_NO_SLOTS, 503, "no_slots", 1, 0},
                {KV_ERR_INVALID, 400, "invalid_value", 0, 0},
                {KV_ERR_LIMIT, 400, "context_length_exceeded", 0, 0},
                {KV_ERR_NOT_FOUND, 404, "session_not_found", 0, 0},
                {KV_ERR_EXISTS, 409, "session_exists", 0, 1},
                {KV_ERR_MISMATCH, 409, "session_mismatch", 0, 1},
                {KV_ERR_VERSION, 409, "session_version", 0, 1},
                {KV_ERR_CORRUPT, 500, "session_corrupt", 0, 1},
                {KV_ERR_PROOF, 500, "session_proof_failed", 0, 1},
                {KV_ERR_CANCELLED, 408, "timeout", 0, 0},
                {KV_ERR_NO_SPACE, 503, "no_space", 1, 0},
                {KV_ERR_NOMEM, 503, "no_memory", 1, 0},
                {KV_ERR_IO, 500, "io_error", 0, 0},
                {KV_ERR_DEVICE, 500, "device_error", 0, 0}};
    static const struct row other = {KV_ERR_COUNT, 500, "internal_error", 0, 0};
    /* Another one may be there soon. */
    static const struct row ending = {KV_ERR_CANCELLED, 503, "service_ending", 1, 0};
    const struct row *row = &other;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].err == err)
            row = &rows[i];
    if (err == KV_ERR_CANCELLED && retry_after_seconds > 0)
        row = &ending;
    http_error_set(error, row->status, row->code, "%s",
                   diag->text[0] != 0 ? diag->text : kv_err_name(err));
    error->final = row->final;
    if (row->wait)
        error->retry_after_seconds =
            retry_after_seconds > 0 ? retry_after_seconds : RETRY_USUAL_SECONDS;
}

static const char *type_of(int status) {
    return status >= 500   ? "server_error"
           : status == 429 ? "requests"
           : status == 403 ? "request_forbidden"
                           : "invalid_request_error";
}

char *http_error_json(const struct http_error *error) {
    cJSON *root = cJSON_CreateObject();
    cJSON *inner = cJSON_AddObjectToObject(root, "error");
    json_text(inner, "message", error->diag.text);
    cJSON_AddStringToObject(inner, "type", type_of(error->status));
    if (error->param[0] != 0)
        json_text(inner, "param", error->param);
    else
        cJSON_AddNullToObject(inner, "param");
    cJSON_AddStringToObject(inner, "code", error->code);
    char *text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    return text;
}
