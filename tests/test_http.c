/* tests/test_http.c - the API over a socket: answers, streams, every refusal, who sees what.
 *
 * Responsible for: both forms, whole and streamed, what reaches the service, statuses with their
 * headers, the key, the host, pages and figures.
 * Not responsible for: members of requests (test_http_request.c), load and time (test_http_load.c).
 *
 * Fails with BREAK_BODY_LIMIT (bodies of any length) and BREAK_STATUS_OWNER (everybody sees all).
 */
#include "tools/http.h"

#include "tests/support_http.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHAT "/v1/chat/completions"
#define KEY_A "Authorization: Bearer " HTTP_KEY_A "\r\n"
#define KEY_B "Authorization: Bearer " HTTP_KEY_B "\r\n"
#define HOST "Host: localhost\r\n"
#define TYPE "Content-Type: application/json\r\n"
#define SAY(text)                                                                                  \
    "{\"model\":\"tiny-1\",\"messages\":[{\"role\":\"user\",\"content\":\"" text "\"}]"

/* A member by its path of names and numbers; fails the test when it is not there. */
static const cJSON *member(const cJSON *root, const char *path) {
    char copy[128], *rest = copy, *name = NULL;
    snprintf(copy, sizeof copy, "%s", path);
    while ((name = strsep(&rest, ".")) != NULL && root != NULL)
        root = cJSON_IsArray(root) ? cJSON_GetArrayItem(root, (int)strtol(name, NULL, 10))
                                   : cJSON_GetObjectItemCaseSensitive(root, name);
    if (root == NULL)
        fail_msg("no %s", path);
    return root;
}

static const char *text_of(const cJSON *root, const char *path) {
    const char *text = cJSON_GetStringValue(member(root, path));
    if (text == NULL)
        fail_msg("%s is no string", path);
    return text;
}

static cJSON *body(const struct http_world *world) {
    cJSON *root = cJSON_ParseWithLength(world->body, world->body_bytes);
    if (root == NULL)
        fail_msg("no JSON: `%s`", world->body);
    return root;
}

static void assert_header(struct http_world *world, const char *name, const char *wanted) {
    char value[256];
    const char *found = support_http_header(world, name, value);
    if (found == NULL || strcmp(found, wanted) != 0)
        fail_msg("%s: `%s`, not `%s`", name, found != NULL ? found : "(none)", wanted);
}

static void assert_error(struct http_world *world, int status, const char *code,
                         const char *param) {
    cJSON *root = body(world);
    if (world->status != status || strcmp(text_of(root, "error.code"), code) != 0)
        fail_msg("%d %s, not %d %s", world->status, world->body, status, code);
    const cJSON *given = member(root, "error.param");
    if (param == NULL)
        assert_true(cJSON_IsNull(given));
    else
        assert_string_equal(cJSON_GetStringValue(given), param);
    assert_true(strlen(text_of(root, "error.message")) > 5);
    assert_true(strlen(text_of(root, "error.type")) > 5);
    assert_header(world, "Content-Type", "application/json");
    cJSON_Delete(root);
}

/* --- whole answers */

static void a_chat_is_answered(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_post(
                         world, CHAT,
                         SAY("say one two  three") ",\"temperature\":0.5,\"seed\":11,\"top_p\":0.9,"
                                                   "\"max_tokens\":50,\"stop\":[\"a\",\"END\"],"
                                                   "\"session\":\"notes\"}"),
                     200);
    cJSON *root = body(world);
    assert_string_equal(text_of(root, "object"), "chat.completion");
    assert_int_equal(strncmp(text_of(root, "id"), "chatcmpl-", 9), 0);
    assert_true(member(root, "created")->valuedouble > 1.6e9);
    assert_string_equal(text_of(root, "model"), "Tiny-1");
    assert_string_equal(text_of(root, "choices.0.message.role"), "assistant");
    assert_string_equal(text_of(root, "choices.0.message.content"), "one two  three");
    assert_string_equal(text_of(root, "choices.0.finish_reason"), "stop");
    assert_true(cJSON_IsNull(member(root, "choices.0.logprobs")));
    assert_int_equal(member(root, "usage.prompt_tokens")->valueint, 12);
    assert_int_equal(member(root, "usage.completion_tokens")->valueint, 3);
    assert_int_equal(member(root, "usage.total_tokens")->valueint, 15);
    assert_int_equal(member(root, "usage.prompt_tokens_details.cached_tokens")->valueint, 9);
    assert_string_equal(text_of(root, "coldplane.session"), "notes");
    assert_string_equal(text_of(root, "coldplane.woken_from"), "disk");
    assert_string_equal(text_of(root, "coldplane.receipt"), "0000000000abcdef");
    assert_int_equal(member(root, "coldplane.tokens_prefilled")->valueint, 3);
    assert_int_equal(member(root, "coldplane.tier_blocks.K8V4")->valueint, 2);
    cJSON_Delete(root);
    /* What reached the service. */
    const struct serve *serve = &world->serve;
    assert_string_equal(serve->text, "say one two  three");
    assert_string_equal(serve->session, "notes");
    assert_string_equal(serve->stop, "END");
    assert_int_equal(serve->request.stop_count, 2);
    assert_int_equal(serve->request.tokens_max, 50);
    assert_int_equal(serve->request.sampler.seed, 11);
    assert_true(serve->request.sampler.temperature == 0.5f);
    assert_int_equal(serve->request.owner[0], 1);
}

static void what_is_not_said_has_its_usual_value(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_post(world, CHAT, SAY("say x") "}"), 200);
    uint64_t seed = world->serve.request.sampler.seed;
    assert_int_equal(world->serve.request.tokens_max, 4096);
    assert_true(world->serve.request.sampler.temperature == 1);
    assert_string_equal(world->serve.session, "");
    assert_int_equal(support_http_post(world, CHAT, SAY("say x") "}"), 200);
    assert_true(world->serve.request.sampler.seed != seed);
    assert_int_equal(support_http_post(world, "/v1/completions", "{\"prompt\":\"say x\"}"), 200);
    assert_int_equal(world->serve.request.tokens_max, 16);
}

static void a_header_names_a_session(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_call(world, "POST", CHAT,
                                       HOST KEY_A TYPE "X-Coldplane-Session: by header\r\n",
                                       SAY("say x") "}"),
                     200);
    assert_string_equal(world->serve.session, "by header");
    assert_int_equal(support_http_call(world, "POST", CHAT,
                                       HOST KEY_A TYPE "X-Coldplane-Session: other\r\n",
                                       SAY("say x") ",\"session\":\"this\"}"),
                     400);
    assert_error(world, 400, "invalid_value", "session");
    assert_int_equal(support_http_call(world, "POST", CHAT,
                                       HOST KEY_A TYPE "X-Coldplane-Session: a/b\r\n",
                                       SAY("say x") "}"),
                     400);
    assert_error(world, 400, "invalid_value", "X-Coldplane-Session");
}

static void log_probabilities_have_both_forms(void **state) {
    struct http_world *world = *state;
    assert_int_equal(
        support_http_post(world, CHAT, SAY("say a b") ",\"logprobs\":true,\"top_logprobs\":2}"),
        200);
    cJSON *root = body(world);
    const cJSON *content = member(root, "choices.0.logprobs.content");
    assert_int_equal(cJSON_GetArraySize(content), 2);
    assert_string_equal(text_of(content, "1.token"), "<1>");
    assert_int_equal(member(content, "1.bytes.0")->valueint, '<');
    assert_true(member(content, "1.logprob")->valuedouble == -0.5);
    assert_int_equal(cJSON_GetArraySize(member(content, "1.top_logprobs")), 2);
    assert_string_equal(text_of(content, "1.top_logprobs.1.token"), "<2>");
    cJSON_Delete(root);
    assert_int_equal(support_http_post(world, "/v1/completions",
                                       "{\"prompt\":\"say \xc3\xa9 b\",\"logprobs\":2}"),
                     200);
    root = body(world);
    assert_string_equal(text_of(root, "object"), "text_completion");
    assert_string_equal(text_of(root, "choices.0.text"), "\xc3\xa9 b");
    assert_string_equal(text_of(root, "choices.0.logprobs.tokens.1"), "<1>");
    assert_int_equal(member(root, "choices.0.logprobs.text_offset.1")->valueint, 2);
    assert_true(member(root, "choices.0.logprobs.top_logprobs.0.<1>")->valuedouble == -1.5);
    cJSON_Delete(root);
}

/* A whole answer's lie in memory until it ends: so many are not begun. */
static void too_many_log_probabilities_are_refused(void **state) {
    struct http_world *world = *state;
    support_http_post(world, CHAT,
                      SAY("say a b") ",\"logprobs\":true,\"top_logprobs\":15,"
                                     "\"max_tokens\":2049}");
    assert_error(world, 400, "invalid_value", "top_logprobs");
    support_http_post(world, "/v1/completions",
                      "{\"prompt\":\"say a\",\"logprobs\":1,\"max_tokens\":16385}");
    assert_error(world, 400, "invalid_value", "logprobs");
    assert_int_equal(support_http_post(world, CHAT,
                                       SAY("say a b") ",\"logprobs\":true,\"top_logprobs\":15,"
                                                      "\"max_tokens\":2048}"),
                     200);
    assert_int_equal(support_http_post(world, CHAT,
                                       SAY("say a b") ",\"logprobs\":true,\"top_logprobs\":15,"
                                                      "\"stream\":true,\"max_tokens\":2049}"),
                     200);
}

static void a_limit_is_told(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_post(world, CHAT, SAY("count 9") ",\"max_tokens\":4}"), 200);
    cJSON *root = body(world);
    assert_string_equal(text_of(root, "choices.0.message.content"), "0 1 2 3 ");
    assert_string_equal(text_of(root, "choices.0.finish_reason"), "length");
    cJSON_Delete(root);
}

/* --- streams */

enum { EVENTS_MAX = 64 };
struct events {
    cJSON *items[EVENTS_MAX];
    int count, done;
};

static void read_events(const struct http_world *world, struct events *events) {
    *events = (struct events){.count = 0};
    for (const char *at = world->body; *at != 0;) {
        const char *end = strstr(at, "\n\n");
        assert_non_null(end);
        assert_int_equal(strncmp(at, "data: ", 6), 0);
        assert_false(events->done);
        if (strncmp(at, "data: [DONE]", 12) == 0)
            events->done = 1;
        else
            events->items[events->count++] = cJSON_ParseWithLength(at + 6, (size_t)(end - at) - 6);
        assert_true(events->count < EVENTS_MAX);
        at = end + 2;
    }
    for (int i = 0; i < events->count; i++)
        assert_non_null(events->items[i]);
}

static void drop_events(struct events *events) {
    for (int i = 0; i < events->count; i++)
        cJSON_Delete(events->items[i]);
}

static void a_chat_is_streamed(void **state) {
    struct http_world *world = *state;
    struct events events;
    assert_int_equal(support_http_post(world, CHAT,
                                       SAY("say one two") ",\"stream\":true,"
                                                          "\"stream_options\":{\"include_usage\":"
                                                          "true}}"),
                     200);
    assert_header(world, "Content-Type", "text/event-stream; charset=utf-8");
    read_events(world, &events);
    assert_true(events.done);
    assert_int_equal(events.count, 4);
    assert_string_equal(text_of(events.items[0], "object"), "chat.completion.chunk");
    assert_string_equal(text_of(events.items[0], "choices.0.delta.role"), "assistant");
    assert_string_equal(text_of(events.items[0], "choices.0.delta.content"), "one ");
    assert_true(cJSON_IsNull(member(events.items[0], "choices.0.finish_reason")));
    assert_true(cJSON_IsNull(member(events.items[0], "usage")));
    assert_string_equal(text_of(events.items[1], "choices.0.delta.content"), "two");
    assert_null(cJSON_GetObjectItem(member(events.items[1], "choices.0.delta"), "role"));
    assert_string_equal(text_of(events.items[2], "choices.0.finish_reason"), "stop");
    assert_int_equal(cJSON_GetArraySize(member(events.items[3], "choices")), 0);
    assert_int_equal(member(events.items[3], "usage.total_tokens")->valueint, 14);
    assert_string_equal(text_of(events.items[3], "coldplane.woken_from"), "disk");
    assert_string_equal(text_of(events.items[0], "id"), text_of(events.items[3], "id"));
    drop_events(&events);
}

static void a_completion_is_streamed(void **state) {
    struct http_world *world = *state;
    struct events events;
    assert_int_equal(support_http_post(world, "/v1/completions",
                                       "{\"prompt\":\"say one two\",\"stream\":true,"
                                       "\"logprobs\":1}"),
                     200);
    read_events(world, &events);
    assert_true(events.done);
    assert_int_equal(events.count, 3);
    assert_string_equal(text_of(events.items[1], "choices.0.text"), "two");
    assert_string_equal(text_of(events.items[1], "choices.0.logprobs.tokens.0"), "<1>");
    assert_int_equal(member(events.items[1], "choices.0.logprobs.text_offset.0")->valueint, 4);
    assert_string_equal(text_of(events.items[2], "choices.0.finish_reason"), "stop");
    assert_string_equal(text_of(events.items[2], "coldplane.session"), "chat-1");
    assert_null(cJSON_GetObjectItem(events.items[2], "usage"));
    drop_events(&events);
}

static void characters_stay_whole(void **state) {
    struct http_world *world = *state;
    struct events events;
    assert_int_equal(support_http_post(world, CHAT, SAY("split") ",\"stream\":true}"), 200);
    read_events(world, &events);
    assert_int_equal(events.count, 2);
    assert_string_equal(text_of(events.items[0], "choices.0.delta.content"), "\xf0\x9f\x98\x80");
    drop_events(&events);
    assert_int_equal(support_http_post(world, CHAT, SAY("nothing") ",\"stream\":true}"), 200);
    read_events(world, &events);
    assert_true(events.done);
    assert_int_equal(events.count, 1);
    assert_string_equal(text_of(events.items[0], "choices.0.delta.role"), "assistant");
    drop_events(&events);
}

static void an_error_in_a_stream_is_told(void **state) {
    struct http_world *world = *state;
    struct events events;
    assert_int_equal(support_http_post(world, CHAT, SAY("late device") ",\"stream\":true}"), 200);
    read_events(world, &events);
    assert_false(events.done);
    assert_int_equal(events.count, 2);
    assert_string_equal(text_of(events.items[1], "error.code"), "device_error");
    drop_events(&events);
    /* Before the first piece there is a status to say it with. */
    assert_int_equal(support_http_post(world, CHAT, SAY("fail busy") ",\"stream\":true}"), 429);
    assert_error(world, 429, "rate_limit_exceeded", NULL);
}

/* --- refusals */

static void errors_of_turns_have_their_statuses(void **state) {
    struct http_world *world = *state;
    support_http_post(world, CHAT, SAY("fail busy") "}");
    assert_error(world, 429, "rate_limit_exceeded", NULL);
    assert_header(world, "Retry-After", "7");
    support_http_post(world, CHAT, SAY("fail no-slots") "}");
    assert_error(world, 503, "no_slots", NULL);
    assert_header(world, "Retry-After", "2");
    support_http_post(world, CHAT, SAY("fail limit") "}");
    assert_error(world, 400, "context_length_exceeded", NULL);
    support_http_post(world, CHAT, SAY("fail not-found") "}");
    assert_error(world, 404, "session_not_found", NULL);
    support_http_post(world, CHAT, SAY("fail corrupt") "}");
    assert_error(world, 500, "session_corrupt", NULL);
    assert_header(world, "X-Should-Retry", "false");
    assert_non_null(strstr(world->refusal, "500 as the prompt says"));
}

static void headers_alone_refuse(void **state) {
    struct http_world *world = *state;
    static const struct {
        const char *method, *path, *headers, *body;
        int status;
        const char *code;
    } cases[] = {
        {"POST", CHAT, "Host: evil.example\r\n" KEY_A TYPE, "{}", 403, "host_not_allowed"},
        {"GET", "/health", "Host: evil.example\r\n", NULL, 403, "host_not_allowed"},
        {"GET", "/v2/models", HOST KEY_A, NULL, 404, "unknown_url"},
        {"GET", "/v1/models/none", HOST KEY_A, NULL, 404, "model_not_found"},
        {"GET", CHAT, HOST KEY_A, NULL, 405, "method_not_supported"},
        {"OPTIONS", CHAT, HOST "Origin: http://evil.example\r\n", NULL, 405,
         "method_not_supported"},
        {"DELETE", "/v1/models", HOST KEY_A, NULL, 405, "method_not_supported"},
        {"POST", CHAT, HOST TYPE, "{}", 401, "invalid_api_key"},
        {"POST", CHAT, HOST TYPE "Authorization: Bearer nope\r\n", "{}", 401, "invalid_api_key"},
        {"GET", "/v1/models", HOST, NULL, 401, "invalid_api_key"},
        {"GET", "/ready", HOST, NULL, 401, "invalid_api_key"},
        {"GET", "/metrics", HOST, NULL, 401, "invalid_api_key"},
        {"GET", "/status", HOST, NULL, 401, "invalid_api_key"},
        {"POST", CHAT, HOST KEY_A, "{}", 415, "unsupported_media_type"},
        {"POST", CHAT, HOST KEY_A "Content-Type: text/plain\r\n", "{}", 415,
         "unsupported_media_type"},
        {"POST", CHAT, HOST KEY_A "Content-Type: application/jsonx\r\n", "{}", 415,
         "unsupported_media_type"},
        {"POST", CHAT, HOST KEY_A TYPE, NULL, 411, "length_required"},
        {"POST", CHAT, HOST KEY_A TYPE, "{\"messages\":[", 400, "invalid_json"},
        {"POST", CHAT, HOST KEY_A TYPE, "", 400, "invalid_json"},
        {"POST", CHAT, HOST KEY_A TYPE, SAY("say x") ",\"model\":\"x\"}", 400, "invalid_value"},
        {"POST", CHAT, HOST KEY_A TYPE,
         "{\"model\":\"gpt-9\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", 404,
         "model_not_found"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int status = support_http_call(world, cases[i].method, cases[i].path, cases[i].headers,
                                       cases[i].body);
        if (status != cases[i].status)
            fail_msg("%s %s: %d", cases[i].method, cases[i].path, status);
        cJSON *root = body(world);
        assert_string_equal(text_of(root, "error.code"), cases[i].code);
        cJSON_Delete(root);
        if (status == 405)
            assert_header(world, "Allow", strcmp(cases[i].path, CHAT) == 0 ? "POST" : "GET, HEAD");
        if (status == 401)
            assert_header(world, "WWW-Authenticate", "Bearer");
        char value[256];
        assert_null(support_http_header(world, "Access-Control-Allow-Origin", value));
    }
    assert_int_equal(world->serve.turns, 0);
}

/* The same connection goes on after a refusal. */
static void a_refusal_keeps_the_connection(void **state) {
    struct http_world *world = *state;
    static const char refused[] =
        "POST " CHAT " HTTP/1.1\r\n" HOST TYPE "Content-Length: 2\r\n\r\n{}";
    static const char good[] = "GET /health HTTP/1.1\r\n" HOST "\r\n";
    int client = support_http_connect(world);
    for (int i = 0; i < 3; i++) {
        support_http_send(client, refused, sizeof refused - 1);
        assert_int_equal(support_http_receive(world, client), 1);
        assert_error(world, 401, "invalid_api_key", NULL);
        support_http_send(client, good, sizeof good - 1);
        assert_int_equal(support_http_receive(world, client), 1);
        assert_int_equal(world->status, 200);
    }
    close(client);
}

/* BREAK_BODY_LIMIT. */
static void a_body_has_a_limit(void **state) {
    struct http_world *world = *state;
    static char json[600];
    world->options.limits.body_bytes = 512;
    support_http_again(world);
    /* The last that fits, white space included, then one byte more. */
    int bytes = snprintf(json, sizeof json, SAY("say x") "}");
    memset(json + bytes, ' ', 512 - (size_t)bytes);
    assert_int_equal(support_http_post(world, CHAT, json), 200);
    json[512] = ' ';
    support_http_post(world, CHAT, json);
    assert_error(world, 413, "request_too_large", NULL);
    /* In chunks, where no length tells it beforehand. */
    int client = support_http_connect(world);
    char request[1200];
    int count = snprintf(request, sizeof request,
                         "POST " CHAT " HTTP/1.1\r\n" HOST KEY_A TYPE
                         "Transfer-Encoding: chunked\r\n\r\n201\r\n%.513s\r\n0\r\n\r\n",
                         json);
    support_http_send(client, request, (size_t)count);
    assert_int_equal(support_http_receive(world, client), 1);
    assert_error(world, 413, "request_too_large", NULL);
    count = snprintf(request, sizeof request,
                     "POST " CHAT " HTTP/1.1\r\n" HOST KEY_A TYPE
                     "Transfer-Encoding: chunked\r\n\r\n200\r\n%.512s\r\n0\r\n\r\n",
                     json);
    support_http_send(client, request, (size_t)count);
    assert_int_equal(support_http_receive(world, client), 1);
    assert_int_equal(world->status, 200);
    close(client);
}

static void bodies_share_a_limit(void **state) {
    struct http_world *world = *state;
    world->options.limits.bodies_bytes = 1000;
    support_http_again(world);
    support_http_post(world, CHAT, SAY("say x") "}");
    assert_error(world, 503, "no_memory", NULL);
    assert_header(world, "Retry-After", "1");
    assert_int_equal(support_http_get(world, "/v1/models"), 200);
}

/* BREAK_STATUS_OWNER. */
static void owners_stay_apart(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_call(world, "POST", CHAT, HOST KEY_B TYPE, SAY("say x") "}"),
                     200);
    assert_int_equal(world->serve.request.owner[0], 2);
    assert_int_equal(support_http_call(world, "GET", "/status", HOST KEY_B, NULL), 200);
    cJSON *root = body(world);
    assert_int_equal(cJSON_GetArraySize(member(root, "sessions")), 1);
    assert_string_equal(text_of(root, "sessions.0.name"), "other owner");
    assert_int_equal(cJSON_GetArraySize(member(root, "receipts")), 2);
    cJSON_Delete(root);
    assert_int_equal(support_http_get(world, "/status"), 200);
    root = body(world);
    assert_int_equal(member(root, "tokens.made")->valueint, 1);
    assert_int_equal(cJSON_GetArraySize(member(root, "sessions")), 4);
    assert_int_equal(cJSON_GetArraySize(member(root, "receipts")), 3);
    assert_null(strstr(world->body, "other owner"));
    cJSON_Delete(root);
    /* Without keys everybody is the operator. */
    world->options.key_count = 0;
    support_http_again(world);
    assert_int_equal(support_http_call(world, "GET", "/status", HOST, NULL), 200);
    root = body(world);
    assert_int_equal(cJSON_GetArraySize(member(root, "sessions")), 5);
    cJSON_Delete(root);
    assert_int_equal(support_http_call(world, "POST", CHAT, HOST TYPE, SAY("say x") "}"), 200);
    assert_int_equal(world->serve.request.owner[0], 0);
}

/* --- what is not a turn */

static void models_are_listed(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_get(world, "/v1/models"), 200);
    cJSON *root = body(world);
    assert_string_equal(text_of(root, "object"), "list");
    assert_string_equal(text_of(root, "data.0.id"), "Tiny-1");
    cJSON_Delete(root);
    assert_int_equal(support_http_get(world, "/v1/models/Tiny-1"), 200);
    root = body(world);
    assert_string_equal(text_of(root, "object"), "model");
    cJSON_Delete(root);
}

/* Its id as it is listed, in any case, without its end, or `default`: anything else is told what
 * there is. */
static void the_model_has_few_names(void **state) {
    struct http_world *world = *state;
    static const struct {
        const char *name;
        int status;
    } names[] = {{"Tiny-1", 200},  {"tiny-1.GGUF", 200}, {"TINY-1", 200},   {"default", 200},
                 {"Default", 200}, {"tiny", 404},        {"tiny-1.", 404},  {".gguf", 404},
                 {"gpt-4o", 404},  {"tiny-10", 404},     {"tiny-1.gg", 404}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, "/v1/models/%s", names[i].name);
        int listed = support_http_get(world, text);
        snprintf(text, sizeof text,
                 "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}]}",
                 names[i].name);
        int answered = support_http_post(world, CHAT, text);
        if (listed != names[i].status || answered != names[i].status)
            fail_msg("model %s: %d listed, %d answered", names[i].name, listed, answered);
        cJSON *root = body(world);
        if (answered == 404) {
            assert_string_equal(text_of(root, "error.code"), "model_not_found");
            assert_string_equal(text_of(root, "error.type"), "invalid_request_error");
            assert_string_equal(text_of(root, "error.param"), "model");
            assert_non_null(strstr(text_of(root, "error.message"), "Tiny-1"));
        } else {
            assert_string_equal(text_of(root, "model"), "Tiny-1");
        }
        cJSON_Delete(root);
    }
}

static void health_and_readiness_differ(void **state) {
    struct http_world *world = *state;
    assert_int_equal(support_http_call(world, "GET", "/health", HOST, NULL), 200);
    assert_int_equal(support_http_get(world, "/ready"), 200);
    world->serve.is_ready = 0;
    assert_int_equal(support_http_get(world, "/ready"), 503);
    assert_error(world, 503, "not_ready", NULL);
    assert_int_equal(support_http_call(world, "GET", "/health", HOST, NULL), 200);
}

static void metrics_are_prometheus_text(void **state) {
    struct http_world *world = *state;
    static const char *const lines[] = {
        "coldplane_slots 4096\n", "coldplane_slots_free 2890\n",
        /* 28 blocks of 12 slots; the blocks of sessions asleep take none. */
        "coldplane_slots_read{tier=\"K8V4\"} 336\n", "coldplane_slots_read{tier=\"K6V4\"} 160\n",
        "coldplane_sessions{state=\"sleeping\"} 2\n",
        "# TYPE coldplane_spill_bytes_total counter\n", "coldplane_spill_bytes_total 190345216\n",
        "coldplane_spill_seconds_total 0.812000\n", "coldplane_restore_bytes_total 152043520\n",
        "coldplane_proofs_total{result=\"equal\"} 7\n",
        "coldplane_proofs_total{result=\"different\"} 0\n",
        "coldplane_completion_tokens_total 8123\n", "coldplane_requests 1\n",
        "coldplane_write_budget_wait_seconds 0.000000\n"};
    assert_int_equal(support_http_get(world, "/metrics"), 200);
    assert_header(world, "Content-Type", "text/plain; version=0.0.4; charset=utf-8");
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (strstr(world->body, lines[i]) == NULL)
            fail_msg("no line `%s` in:\n%s", lines[i], world->body);
    assert_null(strstr(world->body, "notes"));
    /* Every line is a comment or a name, perhaps labels, and a number. */
    for (char *rest = world->body, *at = NULL; (at = strsep(&rest, "\n")) != NULL && *at != 0;) {
        char *number = strrchr(at, ' '), *end = NULL;
        assert_non_null(number);
        if (*at == '#')
            continue;
        assert_int_equal(strncmp(at, "coldplane_", 10), 0);
        (void)strtod(number, &end);
        assert_int_equal(*end, 0);
    }
}

static void the_page_is_whole_and_closed(void **state) {
    struct http_world *world = *state;
    char policy[600];
    char value[256];
    assert_int_equal(support_http_call(world, "GET", "/", HOST, NULL), 200);
    assert_header(world, "Content-Type", "text/html; charset=utf-8");
    assert_header(world, "X-Content-Type-Options", "nosniff");
    snprintf(policy, sizeof policy, "%s",
             support_http_header(world, "Content-Security-Policy", value));
    assert_non_null(strstr(policy, "default-src 'none'"));
    assert_null(strstr(policy, "unsafe"));
    assert_int_equal(strncmp(world->body, "<!doctype html>", 15), 0);
    assert_non_null(strstr(world->body, "</html>"));
    /* Nothing comes from elsewhere but the name of a name space. */
    const char *at = strstr(world->body, "://");
    assert_non_null(at);
    assert_null(strstr(at + 1, "://"));
    assert_int_equal(strncmp(at, "://www.w3.org/2000/svg'", 23), 0);
    assert_null(strstr(world->body, "innerHTML"));
}

static void heads_have_no_body(void **state) {
    struct http_world *world = *state;
    static const char two[] = "HEAD /health HTTP/1.1\r\n" HOST "\r\n"
                              "GET /health HTTP/1.1\r\n" HOST "Connection: close\r\n\r\n";
    char all[2048];
    size_t count = 0, more = 0;
    int client = support_http_connect(world);
    support_http_send(client, two, sizeof two - 1);
    while ((more = support_http_some(client, all + count, sizeof all - 1 - count)) > 0)
        count += more;
    all[count] = 0;
    close(client);
    /* Two heads, one body. */
    const char *body_at = strstr(all, "{\"status\"");
    assert_non_null(body_at);
    assert_null(strstr(body_at + 1, "{\"status\""));
    assert_non_null(strstr(strstr(all, "200 OK") + 1, "200 OK"));
}

static void addresses_are_checked(void **state) {
    struct http_world *world = *state;
    struct http *second = NULL;
    struct kv_diag diag;
    struct http_options options = world->options;
    options.address = "localhost";
    assert_int_equal(http_open(&options, &second, &diag), KV_ERR_INVALID);
    assert_non_null(strstr(diag.text, "`localhost`"));
    options.address = "127.0.0.1";
    options.port = http_port(world->http);
    assert_int_equal(http_open(&options, &second, &diag), KV_ERR_IO);
    assert_non_null(strstr(diag.text, "127.0.0.1"));
    assert_null(second);
    http_close(NULL);
}

#define SERVED(test)                                                                               \
    cmocka_unit_test_setup_teardown(test, support_http_set_up, support_http_tear_down)

TESTING_MAIN(SERVED(a_chat_is_answered), SERVED(what_is_not_said_has_its_usual_value),
             SERVED(a_header_names_a_session), SERVED(log_probabilities_have_both_forms),
             SERVED(too_many_log_probabilities_are_refused), SERVED(a_limit_is_told),
             SERVED(a_chat_is_streamed), SERVED(a_completion_is_streamed),
             SERVED(characters_stay_whole), SERVED(an_error_in_a_stream_is_told),
             SERVED(errors_of_turns_have_their_statuses), SERVED(headers_alone_refuse),
             SERVED(a_refusal_keeps_the_connection), SERVED(a_body_has_a_limit),
             SERVED(bodies_share_a_limit), SERVED(owners_stay_apart), SERVED(models_are_listed),
             SERVED(the_model_has_few_names), SERVED(health_and_readiness_differ),
             SERVED(metrics_are_prometheus_text), SERVED(the_page_is_whole_and_closed),
             SERVED(heads_have_no_body), SERVED(addresses_are_checked))
