/* tools/http_reply.c - responses that need no turn: texts, errors, models, the page.
 *
 * Responsible for: bodies with the headers that belong to them.
 * Not responsible for: when they are sent (http.c).
 */
#include "tools/http_inner.h"

#include "http_page_html.h"
#include "tools/json_text.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

static const char json_type[] = "application/json";

/* Nothing here is for a cache, and nothing is what its type does not say. */
static struct MHD_Response *with_headers(struct MHD_Response *response, const char *type) {
    if (response == NULL)
        return NULL;
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    (void)MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    return response;
}

struct MHD_Response *http_reply_text(const char *text, size_t bytes, const char *type) {
    return with_headers(
        MHD_create_response_from_buffer(bytes, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY),
        type);
}

struct MHD_Response *http_reply_json(char *json) {
    struct MHD_Response *response =
        json != NULL ? http_reply_text(json, strlen(json), json_type) : NULL;
    cJSON_free(json);
    return response;
}

struct MHD_Response *http_reply_error(const struct http_error *error) {
    char seconds[16];
    struct MHD_Response *response = http_reply_json(http_error_json(error));
    if (response == NULL)
        return NULL;
    snprintf(seconds, sizeof seconds, "%u", error->retry_after_seconds);
    if (error->retry_after_seconds > 0)
        (void)MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, seconds);
    if (error->final)
        (void)MHD_add_response_header(response, "X-Should-Retry", "false");
    if (error->allow != NULL)
        (void)MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, error->allow);
    if (error->status == 401)
        (void)MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    return response;
}

struct MHD_Response *http_reply_page(void) {
    struct MHD_Response *response = with_headers(
        MHD_create_response_from_buffer(sizeof HTTP_PAGE_HTML - 1,
                                        (void *)(uintptr_t)HTTP_PAGE_HTML, MHD_RESPMEM_PERSISTENT),
        "text/html; charset=utf-8");
    if (response == NULL)
        return NULL;
    (void)MHD_add_response_header(response, "Content-Security-Policy", HTTP_PAGE_POLICY);
    (void)MHD_add_response_header(response, "Referrer-Policy", "no-referrer");
    (void)MHD_add_response_header(response, "X-Frame-Options", "DENY");
    (void)MHD_add_response_header(response, "Cross-Origin-Opener-Policy", "same-origin");
    (void)MHD_add_response_header(response, "Cross-Origin-Resource-Policy", "same-origin");
    return response;
}

struct MHD_Response *http_reply_ready(void) {
    static const char text[] = "{\"status\":\"ok\"}";
    return http_reply_text(text, sizeof text - 1, json_type);
}

/* The page cannot know otherwise without an error in its console. */
struct MHD_Response *http_reply_health(int key_wanted) {
    char text[64];
    int bytes = snprintf(text, sizeof text, "{\"status\":\"ok\",\"key_wanted\":%s}",
                         key_wanted ? "true" : "false");
    return http_reply_text(text, (size_t)bytes, json_type);
}

static void fill_model(cJSON *to, const char *model) {
    json_text(to, "id", model);
    cJSON_AddStringToObject(to, "object", "model");
    cJSON_AddNumberToObject(to, "created", 0);
    cJSON_AddStringToObject(to, "owned_by", "coldplane");
}

static struct MHD_Response *reply_tree(cJSON *root) {
    char *json = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    return http_reply_json(json);
}

struct MHD_Response *http_reply_model(const char *model) {
    cJSON *root = cJSON_CreateObject();
    fill_model(root, model);
    return reply_tree(root);
}

struct MHD_Response *http_reply_models(const char *model) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "object", "list");
    cJSON *data = cJSON_AddArrayToObject(root, "data");
    cJSON *item = cJSON_CreateObject();
    fill_model(item, model);
    if (!cJSON_AddItemToArray(data, item))
        cJSON_Delete(item);
    return reply_tree(root);
}
