/* tests/support_fuzz_request.c - any bytes as the body of a completion request.
 *
 * Responsible for: see support_fuzz_request.h.
 * Not responsible for: HTTP around it, which is libmicrohttpd's.
 */
#include "tests/support_fuzz_request.h"

#include "tools/http_guard.h"
#include "tools/http_request.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

static void must(int holds) {
    if (!holds)
        abort();
}

static void check_text(const struct http_request *request, const char *text, size_t count) {
    must(text >= request->memory && strlen(text) < count &&
         text + strlen(text) < request->memory + count);
}

static void check_request(const struct http_request *request, size_t count) {
    if (request->form == HTTP_CHAT)
        must(request->message_count > 0 && request->prompt == NULL);
    else
        must(request->prompt != NULL && strlen(request->prompt) == request->prompt_bytes);
    for (size_t i = 0; i < request->message_count; i++) {
        const struct template_message *message = &request->messages[i];
        must(message->text >= request->memory &&
             message->text + message->text_bytes <= request->memory + count);
        must(memchr(message->text, 0, message->text_bytes) == NULL);
        must(message->role < TEMPLATE_ROLE_COUNT && (message->role != TEMPLATE_SYSTEM || i == 0));
    }
    if (request->model != NULL)
        check_text(request, request->model, count);
    if (request->session != NULL)
        must(http_request_is_session(request->session));
    for (size_t i = 0; i < request->stop_count; i++) {
        check_text(request, request->stops[i], count);
        must(request->stops[i][0] != 0);
    }
    must(request->stop_count <= HTTP_STOPS_MAX && request->top_logprobs <= HTTP_TOP_LOGPROBS_MAX);
    must(!request->has_temperature || (request->temperature >= 0 && request->temperature <= 2));
    must(!request->has_top_p || (request->top_p > 0 && request->top_p <= 1));
    must(request->tokens_max <= 1048576);
}

static void check_error(const struct http_error *error) {
    must(error->status == 400 && error->code != NULL && error->diag.text[0] != 0);
    char *json = http_error_json(error);
    must(json != NULL);
    cJSON *tree = cJSON_Parse(json);
    must(tree != NULL);
    cJSON_Delete(tree);
    cJSON_free(json);
}

int support_fuzz_request(const uint8_t *bytes, size_t count) {
    static const struct http_key key = {"some-key", {1}};
    static const char *const names[] = {"box.example"};
    const struct kv_alloc *alloc = kv_alloc_system();
    struct http_request request;
    struct http_error error;
    uint8_t owner[HTTP_OWNER_BYTES];
    if (count == 0)
        return 0;
    enum http_form form = bytes[0] % 2 == 0 ? HTTP_CHAT : HTTP_COMPLETION;
    /* An own copy, so that a byte read beyond it is noticed. */
    char *text = kv_alloc_aligned(alloc, count, 1);
    must(text != NULL);
    memcpy(text, bytes + 1, count - 1);
    enum kv_err err = http_request_parse(form, text, count - 1, alloc, &request, &error);
    if (err == KV_OK)
        check_request(&request, count);
    else
        check_error(&error);
    http_request_release(&request, alloc);
    text[count - 1] = 0;
    must(http_guard_host(text, names, 1) == 0 || count > 5);
    must(http_guard_key(&key, 1, text, owner) == 0 || strstr(text, "some-key") != NULL);
    kv_alloc_release(alloc, text);
    return err == KV_OK;
}
