/* tests/test_http_request.c - what a request may say, what refuses it, and who may ask.
 *
 * Responsible for: strict JSON, every member of both forms with its types and ranges, the name of
 * the member in each refusal, memory that ends; keys and hosts.
 * Not responsible for: HTTP (test_http.c).
 *
 * Fails with BREAK_JSON_DEPTH (values nest without end), BREAK_REQUEST_TYPES (a text for a number),
 * BREAK_KEY_PREFIX (the beginning of a key is the key), BREAK_HOST_SUFFIX (a host that begins with
 * ours is ours).
 */
#include "tools/http_request.h"

#include "tests/testing.h"
#include "tools/http_guard.h"
#include "tools/http_json.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- JSON */

static void json_is_taken_as_the_standard_says(void **state) {
    static const char *const good[] = {
        "{}", " [1, -0, 0.5, 1e9, 1E-9, true, false, null, \"\"]\r\n",
        "\"\\u00e9\\ud83d\\ude00 \xf0\x9f\x98\x80 \\\"\\/\\b\"", "{\"a\":{\"b\":[[]]}}", "7"};
    static const char *const bad[] = {"",
                                      "{",
                                      "[1,]",
                                      "{\"a\"}",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "01",
                                      "+1",
                                      ".5",
                                      "1.",
                                      "1e",
                                      "-",
                                      "nul",
                                      "truex",
                                      "[1 2]",
                                      "\"\t\"",
                                      "\"\\x\"",
                                      "\"\\u00g0\"",
                                      "\"\\u0000\"",
                                      "\"\\ud83d\"",
                                      "\"\\ude00\"",
                                      "\"\\ud83d\\u0041\"",
                                      "\"\xff\"",
                                      "\"\xc0\xaf\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"",
                                      "{} {}",
                                      "[1]]",
                                      "'a'",
                                      "NaN"};
    struct kv_diag diag;
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_int_equal(http_json_check(good[i], strlen(good[i]), &diag), KV_OK);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (http_json_check(bad[i], strlen(bad[i]), &diag) != KV_ERR_INVALID)
            fail_msg("taken: `%s`", bad[i]);
        assert_non_null(strstr(diag.text, "not JSON: byte "));
    }
    /* A zero byte ends nothing. */
    assert_int_equal(http_json_check("1\0", 2, &diag), KV_ERR_INVALID);
}

/* BREAK_JSON_DEPTH. */
static void json_is_bounded(void **state) {
    enum { ITEMS = HTTP_JSON_VALUES_MAX + 8 };
    char *text = malloc(2 * (size_t)ITEMS + 4);
    struct kv_diag diag;
    (void)state;
    assert_non_null(text);
    memset(text, '[', 2 * HTTP_JSON_DEPTH_MAX);
    memset(text + HTTP_JSON_DEPTH_MAX, ']', HTTP_JSON_DEPTH_MAX);
    assert_int_equal(http_json_check(text, 2 * HTTP_JSON_DEPTH_MAX, &diag), KV_OK);
    memset(text, '[', HTTP_JSON_DEPTH_MAX + 1);
    memset(text + HTTP_JSON_DEPTH_MAX + 1, ']', HTTP_JSON_DEPTH_MAX + 1);
    assert_int_equal(http_json_check(text, 2 * HTTP_JSON_DEPTH_MAX + 2, &diag), KV_ERR_LIMIT);
    text[0] = '[';
    for (size_t i = 0; i < ITEMS; i++)
        memcpy(text + 1 + 2 * i, "1,", 2);
    memcpy(text + 2 * (size_t)ITEMS - 1, "1]", 2);
    assert_int_equal(http_json_check(text, 2 * (size_t)ITEMS + 1, &diag), KV_ERR_LIMIT);
    free(text);
}

static void any_bytes_become_a_string(void **state) {
    cJSON *root = cJSON_CreateObject();
    (void)state;
    http_json_text(root, "a", "x\0y\xff", 4);
    http_json_text(root, "b", "", 0);
    char *text = cJSON_PrintUnformatted(root);
    assert_string_equal(text, "{\"a\":\"x\xef\xbf\xbdy\xef\xbf\xbd\",\"b\":\"\"}");
    cJSON_free(text);
    cJSON_Delete(root);
}

/* --- requests */

static enum kv_err parse(enum http_form form, const char *json, struct http_request *out,
                         struct http_error *error) {
    return http_request_parse(form, json, strlen(json), kv_alloc_system(), out, error);
}

static void everything_of_a_chat_is_taken(void **state) {
    static const char json[] =
        "{\"model\":\"m\",\"messages\":[{\"role\":\"developer\",\"content\":\"Be \\\"brief\\\".\"},"
        "{\"role\":\"user\",\"name\":\"x\",\"content\":[{\"type\":\"text\",\"text\":\"one\"},"
        "{\"type\":\"text\",\"text\":\"\"},{\"text\":\"two\",\"type\":\"text\"}]},"
        "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[],\"refusal\":null}],"
        "\"max_completion_tokens\":5,\"temperature\":0,\"top_p\":0.25,\"seed\":-2,"
        "\"stop\":[\"a\",\"b\\n\",\"c\",\"d\"],\"stream\":true,"
        "\"stream_options\":{\"include_usage\":true},\"logprobs\":true,\"top_logprobs\":3,"
        "\"session\":\"n\\u00e9\",\"n\":1,\"tools\":[],\"logit_bias\":{},\"presence_penalty\":0.0,"
        "\"response_format\":{\"type\":\"text\"},\"user\":\"u\",\"unknown\":{\"a\":[1]},"
        "\"tool_choice\":\"auto\",\"modalities\":[\"text\"],\"frequency_penalty\":null}";
    struct http_request request;
    struct http_error error;
    (void)state;
    assert_int_equal(parse(HTTP_CHAT, json, &request, &error), KV_OK);
    assert_int_equal(error.status, 0);
    assert_string_equal(request.model, "m");
    assert_string_equal(request.session, "n\xc3\xa9");
    assert_int_equal(request.message_count, 3);
    assert_int_equal(request.messages[0].role, TEMPLATE_SYSTEM);
    assert_memory_equal(request.messages[0].text, "Be \"brief\".", 11);
    assert_int_equal(request.messages[1].role, TEMPLATE_USER);
    assert_int_equal(request.messages[1].text_bytes, 8);
    assert_memory_equal(request.messages[1].text, "one\n\ntwo", 8);
    assert_int_equal(request.messages[2].role, TEMPLATE_ASSISTANT);
    assert_int_equal(request.messages[2].text_bytes, 0);
    assert_int_equal(request.tokens_max, 5);
    assert_true(request.has_temperature && request.temperature == 0);
    assert_true(request.has_top_p && request.top_p == 0.25f);
    assert_true(request.has_seed && request.seed == (uint64_t)-2);
    assert_int_equal(request.stop_count, 4);
    assert_string_equal(request.stops[1], "b\n");
    assert_true(request.stream && request.include_usage && request.logprobs);
    assert_int_equal(request.top_logprobs, 3);
    http_request_release(&request, kv_alloc_system());
}

static void everything_of_a_completion_is_taken(void **state) {
    struct http_request request;
    struct http_error error;
    (void)state;
    assert_int_equal(
        parse(HTTP_COMPLETION,
              "{\"prompt\":[\"once\"],\"max_tokens\":99999999,\"logprobs\":0,"
              "\"stop\":\"x\",\"echo\":false,\"suffix\":\"\",\"best_of\":1,\"top_p\":0,"
              "\"messages\":7}",
              &request, &error),
        KV_OK);
    assert_int_equal(request.prompt_bytes, 4);
    assert_string_equal(request.prompt, "once");
    assert_int_equal(request.tokens_max, 1048576);
    assert_true(request.logprobs && request.top_logprobs == 0);
    assert_true(request.top_p > 0);
    assert_int_equal(request.stop_count, 1);
    assert_false(request.stream || request.has_temperature || request.has_seed);
    http_request_release(&request, kv_alloc_system());
    assert_int_equal(parse(HTTP_COMPLETION, "{\"prompt\":\"\"}", &request, &error), KV_OK);
    http_request_release(&request, kv_alloc_system());
}

#define CHAT_WITH(member) "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]," member "}"
#define MESSAGE(member) "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{" member "}]}"
#define PROMPT_WITH(member) "{\"prompt\":\"x\"," member "}"

static const struct refused {
    enum http_form form;
    const char *json, *param, *code;
} refused[] = {
    {HTTP_CHAT, "", "", "invalid_json"},
    {HTTP_CHAT, "{\"messages\":", "", "invalid_json"},
    {HTTP_CHAT, "[]", "", "invalid_type"},
    {HTTP_CHAT, "{}", "messages", "missing_required_parameter"},
    {HTTP_CHAT, "{\"messages\":null}", "messages", "missing_required_parameter"},
    {HTTP_CHAT, "{\"messages\":{}}", "messages", "invalid_type"},
    {HTTP_CHAT, "{\"messages\":[]}", "messages", "invalid_value"},
    {HTTP_CHAT, "{\"messages\":[7]}", "messages[0]", "invalid_type"},
    {HTTP_CHAT, MESSAGE("\"content\":\"y\""), "messages[1].role", "missing_required_parameter"},
    {HTTP_CHAT, MESSAGE("\"role\":1,\"content\":\"y\""), "messages[1].role", "invalid_type"},
    {HTTP_CHAT, MESSAGE("\"role\":\"tool\",\"content\":\"y\""), "messages[1].role",
     "unsupported_value"},
    {HTTP_CHAT, MESSAGE("\"role\":\"function\",\"content\":\"y\""), "messages[1].role",
     "unsupported_value"},
    {HTTP_CHAT, MESSAGE("\"role\":\"system\",\"content\":\"y\""), "messages[1].role",
     "unsupported_value"},
    {HTTP_CHAT, MESSAGE("\"role\":\"user\""), "messages[1].content", "missing_required_parameter"},
    {HTTP_CHAT, MESSAGE("\"role\":\"user\",\"content\":5"), "messages[1].content", "invalid_type"},
    {HTTP_CHAT, MESSAGE("\"role\":\"user\",\"content\":[5]"), "messages[1].content[0]",
     "invalid_type"},
    {HTTP_CHAT, MESSAGE("\"role\":\"user\",\"content\":[{\"text\":\"y\"}]"),
     "messages[1].content[0].type", "missing_required_parameter"},
    {HTTP_CHAT, MESSAGE("\"role\":\"user\",\"content\":[{\"type\":\"text\"}]"),
     "messages[1].content[0].text", "missing_required_parameter"},
    {HTTP_CHAT, MESSAGE("\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]"),
     "messages[1].content[0]", "unsupported_value"},
    {HTTP_CHAT, MESSAGE("\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{}]"),
     "messages[1].tool_calls", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"model\":3"), "model", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"session\":\"\""), "session", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"session\":\"a/b\""), "session", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"session\":\"a\\nb\""), "session", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"session\":[]"), "session", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"max_tokens\":0"), "max_tokens", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"max_tokens\":1.5"), "max_tokens", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"max_tokens\":\"9\""), "max_tokens", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"max_tokens\":1e99"), "max_tokens", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"max_tokens\":5,\"max_completion_tokens\":5"), "max_completion_tokens",
     "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"max_tokens\":5,\"max_tokens\":5"), "max_tokens", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"temperature\":\"hot\""), "temperature", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"temperature\":2.5"), "temperature", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"temperature\":-1"), "temperature", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"top_p\":true"), "top_p", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"top_p\":1.01"), "top_p", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"seed\":0.5"), "seed", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"seed\":1e300"), "seed", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"stop\":1"), "stop", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"stop\":[1]"), "stop", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"stop\":\"\""), "stop", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\"]"), "stop", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"stream\":1"), "stream", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"stream\":true,\"stream_options\":7"), "stream_options",
     "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"stream\":true,\"stream_options\":{\"include_usage\":1}"),
     "stream_options.include_usage", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"stream_options\":{}"), "stream_options", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"logprobs\":3"), "logprobs", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"top_logprobs\":3"), "top_logprobs", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"logprobs\":true,\"top_logprobs\":21"), "top_logprobs",
     "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"n\":2"), "n", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"n\":\"1\""), "n", "invalid_type"},
    {HTTP_CHAT, CHAT_WITH("\"presence_penalty\":1"), "presence_penalty", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"frequency_penalty\":3"), "frequency_penalty", "invalid_value"},
    {HTTP_CHAT, CHAT_WITH("\"logit_bias\":{\"5\":1}"), "logit_bias", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"tools\":[{}]"), "tools", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"functions\":[{}]"), "functions", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"tool_choice\":\"required\""), "tool_choice", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"response_format\":{\"type\":\"json_object\"}"), "response_format.type",
     "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"response_format\":{}"), "response_format.type",
     "missing_required_parameter"},
    {HTTP_CHAT, CHAT_WITH("\"modalities\":[\"audio\"]"), "modalities", "unsupported_value"},
    {HTTP_CHAT, CHAT_WITH("\"audio\":{}"), "audio", "unsupported_value"},
    {HTTP_COMPLETION, "{}", "prompt", "missing_required_parameter"},
    {HTTP_COMPLETION, "{\"prompt\":7}", "prompt", "invalid_type"},
    {HTTP_COMPLETION, "{\"prompt\":[]}", "prompt", "invalid_type"},
    {HTTP_COMPLETION, "{\"prompt\":[\"a\",\"b\"]}", "prompt", "unsupported_value"},
    {HTTP_COMPLETION, "{\"prompt\":[1,2]}", "prompt", "unsupported_value"},
    {HTTP_COMPLETION, PROMPT_WITH("\"logprobs\":true"), "logprobs", "invalid_type"},
    {HTTP_COMPLETION, PROMPT_WITH("\"logprobs\":21"), "logprobs", "invalid_value"},
    {HTTP_COMPLETION, PROMPT_WITH("\"best_of\":2"), "best_of", "unsupported_value"},
    {HTTP_COMPLETION, PROMPT_WITH("\"echo\":true"), "echo", "unsupported_value"},
    {HTTP_COMPLETION, PROMPT_WITH("\"suffix\":\"y\""), "suffix", "unsupported_value"},
};

/* BREAK_REQUEST_TYPES. */
static void every_mistake_names_its_member(void **state) {
    struct http_request request;
    struct http_error error;
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const struct refused *at = &refused[i];
        if (parse(at->form, at->json, &request, &error) == KV_OK)
            fail_msg("taken: %s", at->json);
        if (strcmp(error.param, at->param) != 0 || strcmp(error.code, at->code) != 0)
            fail_msg("%s: `%s` %s, not `%s` %s", at->json, error.param, error.code, at->param,
                     at->code);
        assert_int_equal(error.status, 400);
        assert_true(strlen(error.diag.text) > 5);
        assert_null(request.memory);
        assert_null(request.messages);
    }
}

static void memory_may_end_anywhere(void **state) {
    static const char json[] = CHAT_WITH("\"stop\":\"x\"");
    (void)state;
    for (uint64_t k = 1;; k++) {
        struct testing_alloc testing;
        struct http_request request;
        struct http_error error;
        testing_alloc_init(&testing, k);
        enum kv_err err =
            http_request_parse(HTTP_CHAT, json, strlen(json), &testing.alloc, &request, &error);
        if (testing.failed_count == 0) {
            assert_int_equal(err, KV_OK);
            http_request_release(&request, &testing.alloc);
            assert_int_equal(testing.live_count, 0);
            assert_true(k > 2);
            return;
        }
        assert_int_equal(err, KV_ERR_NOMEM);
        assert_int_equal(error.status, 503);
        assert_int_equal(testing.live_count, 0);
    }
}

/* --- errors */

static void every_code_has_a_status(void **state) {
    static const struct {
        enum kv_err err;
        int status, waits;
    } cases[] = {{KV_ERR_BUSY, 429, 1},     {KV_ERR_NO_SLOTS, 503, 1},  {KV_ERR_INVALID, 400, 0},
                 {KV_ERR_LIMIT, 400, 0},    {KV_ERR_NOT_FOUND, 404, 0}, {KV_ERR_MISMATCH, 409, 0},
                 {KV_ERR_VERSION, 409, 0},  {KV_ERR_CORRUPT, 500, 0},   {KV_ERR_PROOF, 500, 0},
                 {KV_ERR_NO_SPACE, 503, 1}, {KV_ERR_CANCELLED, 408, 0}, {KV_ERR_DEVICE, 500, 0},
                 {KV_ERR_IO, 500, 0},       {KV_ERR_NOMEM, 503, 1},     {KV_ERR_COUNT, 500, 0}};
    struct kv_diag diag = {"what \"was\" wrong"};
    struct http_error error;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        http_error_from(&error, cases[i].err, &diag, 0);
        assert_int_equal(error.status, cases[i].status);
        assert_int_equal(error.retry_after_seconds > 0, cases[i].waits);
    }
    http_error_from(&error, KV_ERR_CANCELLED, &diag, 3);
    assert_int_equal(error.status, 503);
    assert_int_equal(error.retry_after_seconds, 3);
    http_error_from(&error, KV_ERR_BUSY, &diag, 30);
    assert_int_equal(error.retry_after_seconds, 30);
    char *json = http_error_json(&error);
    assert_string_equal(json, "{\"error\":{\"message\":\"what \\\"was\\\" wrong\","
                              "\"type\":\"requests\",\"param\":null,"
                              "\"code\":\"rate_limit_exceeded\"}}");
    cJSON_free(json);
}

/* --- who may ask */

/* BREAK_KEY_PREFIX. */
static void only_the_whole_key_is_the_key(void **state) {
    static const struct http_key keys[] = {{"abcdef", {1}}, {"abcxyz", {2, 9}}};
    char longest[HTTP_KEY_BYTES_MAX + 16] = "Bearer ";
    uint8_t owner[HTTP_OWNER_BYTES];
    (void)state;
    assert_true(http_guard_key(keys, 2, "Bearer abcdef", owner));
    assert_int_equal(owner[0], 1);
    assert_true(http_guard_key(keys, 2, "bearer  abcxyz", owner));
    assert_true(owner[0] == 2 && owner[1] == 9);
    static const char *const wrong[] = {"Bearer abc",     "Bearer abcdefg", "Bearer abcde",
                                        "Bearer ",        "Bearer",         "abcdef",
                                        "Basic abcdef",   "Bearer ABCDEF",  "",
                                        "Bearer abcdef ", "Bearer a"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        if (http_guard_key(keys, 2, wrong[i], owner))
            fail_msg("taken: `%s`", wrong[i]);
        assert_int_equal(owner[0], 0);
    }
    assert_false(http_guard_key(keys, 2, NULL, owner));
    assert_false(http_guard_key(keys, 0, "Bearer abcdef", owner));
    memset(longest + 7, 'x', HTTP_KEY_BYTES_MAX + 8);
    assert_false(http_guard_key(keys, 2, longest, owner));
}

/* BREAK_HOST_SUFFIX. */
static void only_our_hosts_are_ours(void **state) {
    static const char *const names[] = {"box.example", "192.0.2.7"};
    static const char *const good[] = {"localhost",   "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080",
                                       "box.example", "Box.Example:80", "192.0.2.7"};
    static const char *const bad[] = {"",           "evil.example", "localhost.evil.example",
                                      "localhostx", "[::2]",        "127.0.0.1.example:80",
                                      "localhost:", "localhost:8x", "box.example.evil:8",
                                      "[::1",       ":80"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_true(http_guard_host(good[i], names, 2));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (http_guard_host(bad[i], names, 2))
            fail_msg("taken: `%s`", bad[i]);
    assert_false(http_guard_host(NULL, names, 2));
}

TESTING_MAIN(cmocka_unit_test(json_is_taken_as_the_standard_says),
             cmocka_unit_test(json_is_bounded), cmocka_unit_test(any_bytes_become_a_string),
             cmocka_unit_test(everything_of_a_chat_is_taken),
             cmocka_unit_test(everything_of_a_completion_is_taken),
             cmocka_unit_test(every_mistake_names_its_member),
             cmocka_unit_test(memory_may_end_anywhere), cmocka_unit_test(every_code_has_a_status),
             cmocka_unit_test(only_the_whole_key_is_the_key),
             cmocka_unit_test(only_our_hosts_are_ours))
