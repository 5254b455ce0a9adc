/* tools/http_answer.c - what a turn gave, as the JSON that OpenAI clients read.
 *
 * Responsible for: see http_answer.h.
 * Not responsible for: the order of chunks (http_turn.c).
 */
#include "tools/http_answer.h"

#include "tools/http_json.h"
#include "tools/json_text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { TOKEN_TEXT_BYTES = 256 };

static int is_chat(const struct http_answer *answer) {
    return answer->request->form == HTTP_CHAT;
}

/* --- log probabilities */

static size_t token_text(const struct http_answer *answer, uint32_t token,
                         char text[TOKEN_TEXT_BYTES]) {
    return serve_token_bytes(answer->serve, token, text, TOKEN_TEXT_BYTES);
}

static void add_token(const struct http_answer *answer, cJSON *to, uint32_t token, float logprob) {
    char text[TOKEN_TEXT_BYTES];
    size_t bytes = token_text(answer, token, text);
    http_json_text(to, "token", text, bytes);
    cJSON_AddNumberToObject(to, "logprob", (double)logprob);
    cJSON *list = cJSON_AddArrayToObject(to, "bytes");
    for (size_t i = 0; i < bytes; i++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber((unsigned char)text[i]));
}

static cJSON *item_of_array(cJSON *array) {
    cJSON *item = cJSON_CreateObject();
    if (item != NULL && !cJSON_AddItemToArray(array, item)) {
        cJSON_Delete(item);
        item = NULL;
    }
    return item;
}

static void add_chat_logprob(const struct http_answer *answer, cJSON *logprobs,
                             const struct serve_piece *piece) {
    cJSON *content = cJSON_GetObjectItemCaseSensitive(logprobs, "content");
    if (content == NULL) {
        content = cJSON_AddArrayToObject(logprobs, "content");
        cJSON_AddNullToObject(logprobs, "refusal");
    }
    cJSON *item = item_of_array(content);
    add_token(answer, item, piece->token, piece->logprob);
    cJSON *top = cJSON_AddArrayToObject(item, "top_logprobs");
    for (uint32_t i = 0; i < piece->top_count; i++)
        add_token(answer, item_of_array(top), piece->top[i].token, piece->top[i].logprob);
}

static cJSON *list_of(cJSON *object, const char *name) {
    cJSON *list = cJSON_GetObjectItemCaseSensitive(object, name);
    return list != NULL ? list : cJSON_AddArrayToObject(object, name);
}

/* The older form: parallel lists. Two tokens of the same text are one member, the likelier one. */
static void add_old_logprob(struct http_answer *answer, cJSON *logprobs,
                            const struct serve_piece *piece) {
    char text[TOKEN_TEXT_BYTES];
    size_t bytes = token_text(answer, piece->token, text);
    http_json_text(list_of(logprobs, "tokens"), NULL, text, bytes);
    cJSON_AddItemToArray(list_of(logprobs, "token_logprobs"),
                         cJSON_CreateNumber((double)piece->logprob));
    cJSON *top = item_of_array(list_of(logprobs, "top_logprobs"));
    for (uint32_t i = 0; i < piece->top_count; i++) {
        cJSON *one = cJSON_CreateArray();
        bytes = token_text(answer, piece->top[i].token, text);
        http_json_text(one, NULL, text, bytes);
        const char *name = cJSON_GetStringValue(cJSON_GetArrayItem(one, 0));
        if (name != NULL && cJSON_GetObjectItemCaseSensitive(top, name) == NULL)
            cJSON_AddNumberToObject(top, name, (double)piece->top[i].logprob);
        cJSON_Delete(one);
    }
    cJSON_AddItemToArray(list_of(logprobs, "text_offset"),
                         cJSON_CreateNumber((double)answer->text_offset));
    for (size_t i = 0; i < piece->text_bytes; i++)
        answer->text_offset += ((unsigned char)piece->text[i] & 0xc0) != 0x80;
}

static void add_logprob(struct http_answer *answer, cJSON *logprobs,
                        const struct serve_piece *piece) {
    if (is_chat(answer))
        add_chat_logprob(answer, logprobs, piece);
    else
        add_old_logprob(answer, logprobs, piece);
}

int http_answer_collect(struct http_answer *answer, const struct serve_piece *piece) {
    if (!piece->has_token)
        return 1;
    if (answer->logprobs == NULL)
        answer->logprobs = cJSON_CreateObject();
    if (answer->logprobs != NULL)
        add_logprob(answer, answer->logprobs, piece);
    return answer->logprobs != NULL;
}

/* --- what all objects share */

static cJSON *begin(const struct http_answer *answer, int chunk) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "id", answer->id);
    cJSON_AddStringToObject(root, "object",
                            !is_chat(answer) ? "text_completion"
                            : chunk          ? "chat.completion.chunk"
                                             : "chat.completion");
    cJSON_AddNumberToObject(root, "created", (double)answer->created_seconds);
    json_text(root, "model", answer->model);
    return root;
}

static cJSON *add_choice(cJSON *root) {
    cJSON *choice = item_of_array(cJSON_AddArrayToObject(root, "choices"));
    cJSON_AddNumberToObject(choice, "index", 0);
    return choice;
}

static void add_finish(cJSON *choice, const struct serve_answer *given) {
    /* A context that is full is a limit on tokens to a client, as max_tokens is. */
    int stop = given->finish == SERVE_STOP;
    cJSON_AddStringToObject(choice, "finish_reason", stop ? "stop" : "length");
}

static void add_usage(cJSON *root, const struct serve_answer *given) {
    cJSON *usage = cJSON_AddObjectToObject(root, "usage");
    json_text_u64(usage, "prompt_tokens", given->tokens_prompt);
    json_text_u64(usage, "completion_tokens", given->tokens_completion);
    json_text_u64(usage, "total_tokens", given->tokens_prompt + given->tokens_completion);
    cJSON *details = cJSON_AddObjectToObject(usage, "prompt_tokens_details");
    json_text_u64(details, "cached_tokens", given->tokens_reused);
}

static void add_coldplane(cJSON *root, const struct serve_answer *given) {
    static const char *const found[] = {"new", "device", "ram", "disk"};
    char receipt[24];
    cJSON *own = cJSON_AddObjectToObject(root, "coldplane");
    json_text(own, "session", given->session);
    json_text_u64(own, "tokens_reused", given->tokens_reused);
    json_text_u64(own, "tokens_prefilled", given->tokens_prefilled);
    json_text_u64(own, "first_difference", given->first_difference);
    cJSON_AddStringToObject(own, "woken_from", found[given->found]);
    cJSON *tiers = cJSON_AddObjectToObject(own, "tier_blocks");
    for (int tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        if (given->tier_blocks[tier] > 0)
            cJSON_AddNumberToObject(tiers, layout_tier_name((enum layout_tier)tier),
                                    given->tier_blocks[tier]);
    snprintf(receipt, sizeof receipt, "%016" PRIx64, given->receipt_id);
    if (given->receipt_id > 0)
        cJSON_AddStringToObject(own, "receipt", receipt);
    else
        cJSON_AddNullToObject(own, "receipt");
}

static char *print(cJSON *root) {
    char *text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    return text;
}

/* --- whole answers */

char *http_answer_whole(struct http_answer *answer, const struct serve_answer *given) {
    cJSON *root = begin(answer, 0);
    cJSON *choice = add_choice(root);
    if (is_chat(answer)) {
        cJSON *message = cJSON_AddObjectToObject(choice, "message");
        cJSON_AddStringToObject(message, "role", "assistant");
        http_json_text(message, "content", given->text, given->text_bytes);
        cJSON_AddNullToObject(message, "refusal");
    } else {
        http_json_text(choice, "text", given->text, given->text_bytes);
    }
    if (answer->logprobs != NULL && cJSON_AddItemToObject(choice, "logprobs", answer->logprobs))
        answer->logprobs = NULL;
    else
        cJSON_AddNullToObject(choice, "logprobs");
    add_finish(choice, given);
    add_usage(root, given);
    add_coldplane(root, given);
    return print(root);
}

/* --- chunks */

static void add_text(struct http_answer *answer, cJSON *choice, const char *text, size_t bytes) {
    if (!is_chat(answer)) {
        http_json_text(choice, "text", text, bytes);
        return;
    }
    cJSON *delta = cJSON_AddObjectToObject(choice, "delta");
    if (!answer->begun)
        cJSON_AddStringToObject(delta, "role", "assistant");
    if (text != NULL)
        http_json_text(delta, "content", text, bytes);
    answer->begun = 1;
}

char *http_answer_piece(struct http_answer *answer, const struct serve_piece *piece) {
    cJSON *root = begin(answer, 1);
    cJSON *choice = add_choice(root);
    add_text(answer, choice, piece->text, piece->text_bytes);
    if (answer->request->logprobs && piece->has_token)
        add_logprob(answer, cJSON_AddObjectToObject(choice, "logprobs"), piece);
    else
        cJSON_AddNullToObject(choice, "logprobs");
    cJSON_AddNullToObject(choice, "finish_reason");
    if (answer->request->include_usage)
        cJSON_AddNullToObject(root, "usage");
    return print(root);
}

char *http_answer_finish(struct http_answer *answer, const struct serve_answer *given) {
    cJSON *root = begin(answer, 1);
    cJSON *choice = add_choice(root);
    add_text(answer, choice, is_chat(answer) ? NULL : "", 0);
    cJSON_AddNullToObject(choice, "logprobs");
    add_finish(choice, given);
    if (answer->request->include_usage)
        cJSON_AddNullToObject(root, "usage");
    else
        add_coldplane(root, given);
    return print(root);
}

char *http_answer_usage(struct http_answer *answer, const struct serve_answer *given) {
    cJSON *root = begin(answer, 1);
    cJSON_AddArrayToObject(root, "choices");
    add_usage(root, given);
    add_coldplane(root, given);
    return print(root);
}

void http_answer_release(struct http_answer *answer) {
    cJSON_Delete(answer->logprobs);
    answer->logprobs = NULL;
}
