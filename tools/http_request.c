/* tools/http_request.c - the JSON body of a completion request as a struct, and what refuses one.
 *
 * Responsible for: one table with a row for each member, and what each row takes.
 * Not responsible for: see http_request.h.
 *
 * Texts are copied out of the tree, which is dropped before this returns: what a request holds
 * while it waits is never more than its body.
 *
 * BREAK_REQUEST_TYPES takes a text where a number must stand.
 */
#include "tools/http_request.h"

#include "engine/image.h"
#include "tools/http_json.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CHAT = 1 << HTTP_CHAT, COMPLETION = 1 << HTTP_COMPLETION, BOTH = CHAT | COMPLETION };

struct parse {
    struct http_request *request;
    struct http_error *error;
    const struct kv_alloc *alloc;
    char *at; /* where the next text goes in request->memory */
    int has_stream_options, has_top_logprobs, has_tokens_max;
};

/* --- refusing */

static enum kv_err refuse(struct parse *parse, const char *param, const char *code) {
    struct http_error *error = parse->error;
    error->status = 400;
    error->code = code;
    snprintf(error->param, sizeof error->param, "%s", param);
    return KV_ERR_INVALID;
}

static const char *type_name(const cJSON *item) {
    switch (item->type & 0xff) {
    case cJSON_String:
        return "a string";
    case cJSON_Number:
        return "a number";
    case cJSON_Array:
        return "an array";
    case cJSON_Object:
        return "an object";
    case cJSON_NULL:
        return "null";
    default:
        return "a boolean";
    }
}

static enum kv_err refuse_type(struct parse *parse, const char *param, const char *wanted,
                               const cJSON *item) {
    kv_diag_set(&parse->error->diag, KV_ERR_INVALID, "'%s' must be %s, not %s", param, wanted,
                type_name(item));
    return refuse(parse, param, "invalid_type");
}

static enum kv_err refuse_value(struct parse *parse, const char *param, const char *why) {
    kv_diag_set(&parse->error->diag, KV_ERR_INVALID, "'%s' %s", param, why);
    return refuse(parse, param, "invalid_value");
}

static enum kv_err refuse_unsupported(struct parse *parse, const char *param, const char *what) {
    kv_diag_set(&parse->error->diag, KV_ERR_INVALID, "'%s': %s not supported here", param, what);
    return refuse(parse, param, "unsupported_value");
}

static enum kv_err refuse_missing(struct parse *parse, const char *param) {
    kv_diag_set(&parse->error->diag, KV_ERR_INVALID, "'%s' is required", param);
    return refuse(parse, param, "missing_required_parameter");
}

/* --- taking values */

static const char *keep(struct parse *parse, const char *text) {
    size_t bytes = strlen(text);
    char *kept = parse->at;
    memcpy(kept, text, bytes + 1);
    parse->at += bytes + 1;
    return kept;
}

static enum kv_err take_number(struct parse *parse, const cJSON *item, double low, double high,
                               double *out) {
    char why[80];
#ifndef BREAK_REQUEST_TYPES
    if (!cJSON_IsNumber(item))
        return refuse_type(parse, item->string, "a number", item);
#endif
    if (!(item->valuedouble >= low && item->valuedouble <= high)) {
        snprintf(why, sizeof why, "must be from %.0f to %.0f", low, high);
        return refuse_value(parse, item->string, why);
    }
    *out = item->valuedouble;
    return KV_OK;
}

static enum kv_err take_whole(struct parse *parse, const cJSON *item, double low, double high,
                              double *out) {
    if (!cJSON_IsNumber(item) || item->valuedouble != floor(item->valuedouble))
        return refuse_type(parse, item->string, "an integer", item);
    return take_number(parse, item, low, high, out);
}

static enum kv_err take_bool(struct parse *parse, const cJSON *item, const char *param, int *out) {
    if (!cJSON_IsBool(item))
        return refuse_type(parse, param, "a boolean", item);
    *out = cJSON_IsTrue(item);
    return KV_OK;
}

static enum kv_err take_model(struct parse *parse, const cJSON *item) {
    if (!cJSON_IsString(item))
        return refuse_type(parse, item->string, "a string", item);
    parse->request->model = keep(parse, item->valuestring);
    return KV_OK;
}

int http_request_is_session(const char *text) {
    size_t bytes = strlen(text);
    return bytes > 0 && bytes <= IMAGE_NAME_BYTES_MAX && strchr(text, '/') == NULL &&
           text_is_plain(text);
}

static enum kv_err take_session(struct parse *parse, const cJSON *item) {
    if (!cJSON_IsString(item))
        return refuse_type(parse, item->string, "a string", item);
    if (!http_request_is_session(item->valuestring))
        return refuse_value(parse, item->string,
                            "must be 1 to 128 bytes without `/` and control characters");
    parse->request->session = keep(parse, item->valuestring);
    return KV_OK;
}

static enum kv_err take_tokens(struct parse *parse, const cJSON *item) {
    double value = 0;
    if (parse->has_tokens_max)
        return refuse_value(parse, item->string,
                            "cannot stand beside the other of 'max_tokens' and "
                            "'max_completion_tokens'");
    enum kv_err err = take_whole(parse, item, 1, UINT32_MAX, &value);
    parse->request->tokens_max =
        value < IMAGE_TOKENS_MAX ? (uint32_t)value : (uint32_t)IMAGE_TOKENS_MAX;
    parse->has_tokens_max = 1;
    return err;
}

static enum kv_err take_temperature(struct parse *parse, const cJSON *item) {
    double value = 0;
    enum kv_err err = take_number(parse, item, 0, 2, &value);
    parse->request->temperature = (float)value;
    parse->request->has_temperature = 1;
    return err;
}

static enum kv_err take_top_p(struct parse *parse, const cJSON *item) {
    double value = 0;
    enum kv_err err = take_number(parse, item, 0, 1, &value);
    /* 0 keeps the likeliest token alone, as the smallest share above it does. */
    parse->request->top_p = (float)value > 0 ? (float)value : 0x1p-126f;
    parse->request->has_top_p = 1;
    return err;
}

static enum kv_err take_seed(struct parse *parse, const cJSON *item) {
    double value = 0;
    enum kv_err err = take_whole(parse, item, -0x1p63, 0x1p63, &value);
    /* Beyond 2^53 a JSON number is what a double makes of it, the same each time. */
    parse->request->seed = value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
    parse->request->has_seed = 1;
    return err;
}

static enum kv_err take_stream(struct parse *parse, const cJSON *item) {
    return take_bool(parse, item, item->string, &parse->request->stream);
}

static enum kv_err take_stream_options(struct parse *parse, const cJSON *item) {
    if (!cJSON_IsObject(item))
        return refuse_type(parse, item->string, "an object", item);
    parse->has_stream_options = 1;
    const cJSON *usage = cJSON_GetObjectItemCaseSensitive(item, "include_usage");
    if (usage == NULL || cJSON_IsNull(usage))
        return KV_OK;
    return take_bool(parse, usage, "stream_options.include_usage", &parse->request->include_usage);
}

static enum kv_err take_one(struct parse *parse, const cJSON *item) {
    double value = 0;
    if (!cJSON_IsNumber(item) || item->valuedouble != floor(item->valuedouble))
        return refuse_type(parse, item->string, "an integer", item);
    if (item->valuedouble != 1)
        return refuse_unsupported(parse, item->string, "other than 1 is");
    return take_number(parse, item, 1, 1, &value);
}

static enum kv_err take_stop_text(struct parse *parse, const cJSON *item, const char *param) {
    if (!cJSON_IsString(item))
        return refuse_type(parse, param, "a string or an array of strings", item);
    if (item->valuestring[0] == 0)
        return refuse_value(parse, param, "must not be empty");
    parse->request->stops[parse->request->stop_count++] = keep(parse, item->valuestring);
    return KV_OK;
}

static enum kv_err take_stop(struct parse *parse, const cJSON *item) {
    const cJSON *text = NULL;
    if (!cJSON_IsArray(item))
        return take_stop_text(parse, item, item->string);
    cJSON_ArrayForEach(text, item) {
        if (parse->request->stop_count == HTTP_STOPS_MAX)
            return refuse_value(parse, item->string, "must hold at most 4 strings");
        enum kv_err err = take_stop_text(parse, text, item->string);
        if (err != KV_OK)
            return err;
    }
    return KV_OK;
}

/* A boolean with its own count in a chat, the count itself in the older form. */
static enum kv_err take_logprobs(struct parse *parse, const cJSON *item) {
    double value = 0;
    if (parse->request->form == HTTP_CHAT)
        return take_bool(parse, item, item->string, &parse->request->logprobs);
    enum kv_err err = take_whole(parse, item, 0, HTTP_TOP_LOGPROBS_MAX, &value);
    parse->request->logprobs = 1;
    parse->request->top_logprobs = (uint32_t)value;
    return err;
}

static enum kv_err take_top_logprobs(struct parse *parse, const cJSON *item) {
    double value = 0;
    enum kv_err err = take_whole(parse, item, 0, HTTP_TOP_LOGPROBS_MAX, &value);
    parse->request->top_logprobs = (uint32_t)value;
    parse->has_top_logprobs = 1;
    return err;
}

/* What may be given as long as it changes nothing. */
static enum kv_err take_penalty(struct parse *parse, const cJSON *item) {
    double value = 0;
    enum kv_err err = take_number(parse, item, -2, 2, &value);
    return err == KV_OK && value != 0 ? refuse_unsupported(parse, item->string, "a penalty is")
                                      : err;
}

static enum kv_err take_empty_array(struct parse *parse, const cJSON *item) {
    if (!cJSON_IsArray(item))
        return refuse_type(parse, item->string, "an array", item);
    return item->child == NULL ? KV_OK : refuse_unsupported(parse, item->string, "calls are");
}

static enum kv_err take_empty_object(struct parse *parse, const cJSON *item) {
    if (!cJSON_IsObject(item))
        return refuse_type(parse, item->string, "an object", item);
    return item->child == NULL ? KV_OK : refuse_unsupported(parse, item->string, "it is");
}

static enum kv_err take_tool_choice(struct parse *parse, const cJSON *item) {
    int idle = cJSON_IsString(item) &&
               (strcmp(item->valuestring, "none") == 0 || strcmp(item->valuestring, "auto") == 0);
    return idle ? KV_OK : refuse_unsupported(parse, item->string, "calls are");
}

static enum kv_err take_format(struct parse *parse, const cJSON *item) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(item, "type");
    if (!cJSON_IsObject(item))
        return refuse_type(parse, item->string, "an object", item);
    if (!cJSON_IsString(type))
        return refuse_missing(parse, "response_format.type");
    return strcmp(type->valuestring, "text") == 0
               ? KV_OK
               : refuse_unsupported(parse, "response_format.type", "other than \"text\" is");
}

static enum kv_err take_modalities(struct parse *parse, const cJSON *item) {
    const cJSON *one = NULL;
    if (!cJSON_IsArray(item))
        return refuse_type(parse, item->string, "an array", item);
    cJSON_ArrayForEach(one, item) {
        if (!cJSON_IsString(one) || strcmp(one->valuestring, "text") != 0)
            return refuse_unsupported(parse, item->string, "other than \"text\" is");
    }
    return KV_OK;
}

static enum kv_err take_nothing(struct parse *parse, const cJSON *item) {
    return refuse_unsupported(parse, item->string, "it is");
}

static enum kv_err take_echo(struct parse *parse, const cJSON *item) {
    int echo = 0;
    enum kv_err err = take_bool(parse, item, item->string, &echo);
    return err == KV_OK && echo ? refuse_unsupported(parse, item->string, "it is") : err;
}

static enum kv_err take_suffix(struct parse *parse, const cJSON *item) {
    if (!cJSON_IsString(item))
        return refuse_type(parse, item->string, "a string", item);
    return item->valuestring[0] == 0 ? KV_OK : refuse_unsupported(parse, item->string, "it is");
}

static enum kv_err take_prompt(struct parse *parse, const cJSON *item) {
    if (cJSON_IsArray(item) && item->child != NULL && item->child->next == NULL &&
        cJSON_IsString(item->child))
        item = item->child;
    else if (cJSON_IsArray(item) && cJSON_IsString(item->child))
        return refuse_unsupported(parse, "prompt", "more than one text is");
    else if (cJSON_IsArray(item) && item->child != NULL)
        return refuse_unsupported(parse, "prompt", "token ids instead of text are");
    if (!cJSON_IsString(item))
        return refuse_type(parse, "prompt", "a string", item);
    parse->request->prompt_bytes = strlen(item->valuestring);
    parse->request->prompt = keep(parse, item->valuestring);
    return KV_OK;
}

/* --- messages */

static enum kv_err take_role(struct parse *parse, const cJSON *item, size_t index,
                             enum template_role *out) {
    static const struct {
        const char *name;
        enum template_role role;
    } roles[] = {{"system", TEMPLATE_SYSTEM},
                 {"developer", TEMPLATE_SYSTEM},
                 {"user", TEMPLATE_USER},
                 {"assistant", TEMPLATE_ASSISTANT}};
    char param[HTTP_PARAM_BYTES], what[64];
    snprintf(param, sizeof param, "messages[%zu].role", index);
    if (item == NULL || cJSON_IsNull(item))
        return refuse_missing(parse, param);
    if (!cJSON_IsString(item))
        return refuse_type(parse, param, "a string", item);
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
        if (strcmp(item->valuestring, roles[i].name) != 0)
            continue;
        *out = roles[i].role;
        if (*out == TEMPLATE_SYSTEM && index > 0)
            return refuse_unsupported(parse, param, "a system message that is not the first is");
        return KV_OK;
    }
    snprintf(what, sizeof what, "the role \"%.30s\" is", item->valuestring);
    return refuse_unsupported(parse, param, what);
}

static enum kv_err take_part(struct parse *parse, const cJSON *part, const char *where,
                             size_t number) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(part, "type");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(part, "text");
    char param[HTTP_PARAM_BYTES], what[64];
    snprintf(param, sizeof param, "%s[%zu]", where, number);
    if (!cJSON_IsObject(part))
        return refuse_type(parse, param, "an object", part);
    if (!cJSON_IsString(type)) {
        snprintf(param, sizeof param, "%s[%zu].type", where, number);
        return type == NULL ? refuse_missing(parse, param)
                            : refuse_type(parse, param, "a string", type);
    }
    if (strcmp(type->valuestring, "text") != 0) {
        snprintf(what, sizeof what, "a part of type \"%.24s\" is", type->valuestring);
        return refuse_unsupported(parse, param, what);
    }
    if (!cJSON_IsString(text)) {
        snprintf(param, sizeof param, "%s[%zu].text", where, number);
        return text == NULL ? refuse_missing(parse, param)
                            : refuse_type(parse, param, "a string", text);
    }
    if (number > 0)
        *parse->at++ = '\n';
    size_t bytes = strlen(text->valuestring);
    memcpy(parse->at, text->valuestring, bytes);
    parse->at += bytes;
    return KV_OK;
}

static enum kv_err take_content(struct parse *parse, const cJSON *item, size_t index,
                                struct template_message *message) {
    char param[HTTP_PARAM_BYTES];
    const cJSON *part = NULL;
    size_t number = 0;
    snprintf(param, sizeof param, "messages[%zu].content", index);
    if (item == NULL || cJSON_IsNull(item))
        return refuse_missing(parse, param);
    char *text = parse->at;
    if (cJSON_IsString(item)) {
        (void)keep(parse, item->valuestring);
        parse->at--;
    } else if (cJSON_IsArray(item)) {
        cJSON_ArrayForEach(part, item) {
            enum kv_err err = take_part(parse, part, param, number++);
            if (err != KV_OK)
                return err;
        }
    } else {
        return refuse_type(parse, param, "a string or an array of parts", item);
    }
    message->text = text;
    message->text_bytes = (size_t)(parse->at - text);
    return KV_OK;
}

static enum kv_err take_message(struct parse *parse, const cJSON *item, size_t index) {
    static const char *const calls[] = {"tool_calls", "function_call", "audio"};
    struct template_message *message = &parse->request->messages[index];
    char param[HTTP_PARAM_BYTES];
    snprintf(param, sizeof param, "messages[%zu]", index);
    if (!cJSON_IsObject(item))
        return refuse_type(parse, param, "an object", item);
    enum kv_err err =
        take_role(parse, cJSON_GetObjectItemCaseSensitive(item, "role"), index, &message->role);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0] && err == KV_OK; i++) {
        const cJSON *call = cJSON_GetObjectItemCaseSensitive(item, calls[i]);
        snprintf(param, sizeof param, "messages[%zu].%s", index, calls[i]);
        if (call != NULL && !cJSON_IsNull(call) && !(cJSON_IsArray(call) && call->child == NULL))
            err = refuse_unsupported(parse, param, "it is");
    }
    return err != KV_OK ? err
                        : take_content(parse, cJSON_GetObjectItemCaseSensitive(item, "content"),
                                       index, message);
}

static enum kv_err take_messages(struct parse *parse, const cJSON *item) {
    const cJSON *message = NULL;
    size_t count = 0;
    if (!cJSON_IsArray(item))
        return refuse_type(parse, item->string, "an array", item);
    cJSON_ArrayForEach(message, item) count++;
    if (count == 0)
        return refuse_value(parse, item->string, "must not be empty");
    if (count > TEMPLATE_MESSAGES_MAX)
        return refuse_value(parse, item->string, "must hold at most 65536 messages");
    parse->request->messages =
        kv_alloc_zeroed(parse->alloc, count, sizeof *parse->request->messages);
    if (parse->request->messages == NULL)
        return KV_ERR_NOMEM;
    cJSON_ArrayForEach(message, item) {
        enum kv_err err = take_message(parse, message, parse->request->message_count++);
        if (err != KV_OK)
            return err;
    }
    return KV_OK;
}

/* --- the table */

static const struct member {
    const char *name;
    int forms;
    enum kv_err (*take)(struct parse *parse, const cJSON *item);
} members[] = {
    {"model", BOTH, take_model},
    {"messages", CHAT, take_messages},
    {"prompt", COMPLETION, take_prompt},
    {"session", BOTH, take_session},
    {"max_tokens", BOTH, take_tokens},
    {"max_completion_tokens", CHAT, take_tokens},
    {"temperature", BOTH, take_temperature},
    {"top_p", BOTH, take_top_p},
    {"seed", BOTH, take_seed},
    {"stop", BOTH, take_stop},
    {"stream", BOTH, take_stream},
    {"stream_options", BOTH, take_stream_options},
    {"logprobs", BOTH, take_logprobs},
    {"top_logprobs", CHAT, take_top_logprobs},
    {"n", BOTH, take_one},
    {"best_of", COMPLETION, take_one},
    {"presence_penalty", BOTH, take_penalty},
    {"frequency_penalty", BOTH, take_penalty},
    {"logit_bias", BOTH, take_empty_object},
    {"tools", CHAT, take_empty_array},
    {"functions", CHAT, take_empty_array},
    {"tool_choice", CHAT, take_tool_choice},
    {"function_call", CHAT, take_tool_choice},
    {"response_format", CHAT, take_format},
    {"modalities", CHAT, take_modalities},
    {"audio", CHAT, take_nothing},
    {"web_search_options", CHAT, take_nothing},
    {"echo", COMPLETION, take_echo},
    {"suffix", COMPLETION, take_suffix},
};
enum { MEMBERS = sizeof members / sizeof members[0] };

static enum kv_err take_members(struct parse *parse, const cJSON *root) {
    const cJSON *item = NULL;
    uint64_t seen = 0;
    cJSON_ArrayForEach(item, root) {
        for (size_t i = 0; i < MEMBERS; i++) {
            const struct member *member = &members[i];
            if (!(member->forms & 1 << parse->request->form) ||
                strcmp(member->name, item->string) != 0)
                continue;
            if (seen & UINT64_C(1) << i)
                return refuse_value(parse, member->name, "stands there twice");
            seen |= UINT64_C(1) << i;
            enum kv_err err = cJSON_IsNull(item) ? KV_OK : member->take(parse, item);
            if (err != KV_OK)
                return err;
        }
    }
    return KV_OK;
}

static enum kv_err check_together(struct parse *parse) {
    const struct http_request *request = parse->request;
    if (request->form == HTTP_CHAT && request->messages == NULL)
        return refuse_missing(parse, "messages");
    if (request->form == HTTP_COMPLETION && request->prompt == NULL)
        return refuse_missing(parse, "prompt");
    if (parse->has_stream_options && !request->stream)
        return refuse_value(parse, "stream_options", "needs 'stream': true");
    if (parse->has_top_logprobs && !request->logprobs)
        return refuse_value(parse, "top_logprobs", "needs 'logprobs': true");
    return KV_OK;
}

static enum kv_err parse_tree(struct parse *parse, const char *bytes, size_t count) {
    enum kv_err err = http_json_check(bytes, count, &parse->error->diag);
    if (err != KV_OK) {
        (void)refuse(parse, "", "invalid_json");
        return err;
    }
    cJSON *root = cJSON_ParseWithLength(bytes, count);
    if (root == NULL)
        return KV_ERR_NOMEM;
    if (!cJSON_IsObject(root)) {
        kv_diag_set(&parse->error->diag, KV_ERR_INVALID, "the body must be a JSON object, not %s",
                    type_name(root));
        err = refuse(parse, "", "invalid_type");
    } else {
        err = take_members(parse, root);
    }
    cJSON_Delete(root);
    return err == KV_OK ? check_together(parse) : err;
}

enum kv_err http_request_parse(enum http_form form, const char *bytes, size_t count,
                               const struct kv_alloc *alloc, struct http_request *request_out,
                               struct http_error *error_out) {
    struct parse parse = {.request = request_out, .error = error_out, .alloc = alloc};
    *request_out = (struct http_request){.form = form};
    *error_out = (struct http_error){0};
    /* A text is shorter than what stood for it in the body: quotes, escapes, braces of parts. */
    request_out->memory = kv_alloc_aligned(alloc, count + 1, 1);
    parse.at = request_out->memory;
    enum kv_err err = parse.at == NULL ? KV_ERR_NOMEM : parse_tree(&parse, bytes, count);
    if (err == KV_ERR_NOMEM) {
        struct kv_diag diag;
        kv_diag_set(&diag, err, "not enough memory to read the request");
        http_error_from(error_out, err, &diag, 0);
    }
    if (err != KV_OK)
        http_request_release(request_out, alloc);
    return err;
}

void http_request_release(struct http_request *request, const struct kv_alloc *alloc) {
    kv_alloc_release(alloc, request->messages);
    kv_alloc_release(alloc, request->memory);
    *request = (struct http_request){0};
}
