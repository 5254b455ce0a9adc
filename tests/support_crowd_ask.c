/* tests/support_crowd_ask.c - one request of a chat to the daemon, and what its answer says.
 *
 * Responsible for: see support_crowd_ask.h.
 * Not responsible for: what is asked.
 */
#include "tests/support_crowd_ask.h"

#include "tests/support_client.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct attempt {
    const char *key, *session;
    const cJSON *messages;
    uint32_t tokens_max;
    struct crowd_answer *answer;
    char said[300]; /* with another status than 200 */
};

static char *make_body(const struct attempt *attempt) {
    cJSON *body = cJSON_CreateObject();
    cJSON_AddNumberToObject(body, "temperature", 0);
    cJSON_AddNumberToObject(body, "max_tokens", attempt->tokens_max);
    if (attempt->session != NULL)
        cJSON_AddStringToObject(body, "session", attempt->session);
    cJSON_AddItemToObject(body, "messages", cJSON_Duplicate(attempt->messages, 1));
    char *text = cJSON_PrintUnformatted(body);
    cJSON_Delete(body);
    return text;
}

static uint64_t number_of(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) && item->valuedouble > 0 ? (uint64_t)item->valuedouble : 0;
}

static int copy_text(const cJSON *object, const char *name, char *out, size_t capacity) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
    if (text == NULL || strlen(text) >= capacity)
        return 0;
    memcpy(out, text, strlen(text) + 1);
    return 1;
}

/* 1 when everything that an answer must have is there, a receipt too. */
static int read_answer(const char *body, struct crowd_answer *answer_out) {
    static const char *const found[] = {"new", "device", "ram", "disk"};
    char woken[16] = "", receipt[32];
    cJSON *root = cJSON_Parse(body);
    const cJSON *choice = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(root, "choices"), 0);
    const cJSON *message = cJSON_GetObjectItemCaseSensitive(choice, "message");
    const cJSON *usage = cJSON_GetObjectItemCaseSensitive(root, "usage");
    const cJSON *own = cJSON_GetObjectItemCaseSensitive(root, "coldplane");
    memset(answer_out, 0, sizeof *answer_out);
    int good = copy_text(message, "content", answer_out->text, sizeof answer_out->text) &&
               copy_text(own, "session", answer_out->session, sizeof answer_out->session) &&
               copy_text(own, "woken_from", woken, sizeof woken) &&
               copy_text(own, "receipt", receipt, sizeof receipt);
    answer_out->tokens_prompt = number_of(usage, "prompt_tokens");
    answer_out->tokens_completion = number_of(usage, "completion_tokens");
    answer_out->tokens_reused = number_of(own, "tokens_reused");
    answer_out->tokens_prefilled = number_of(own, "tokens_prefilled");
    uint32_t place = 0;
    while (place < CROWD_FOUND_COUNT && strcmp(found[place], woken) != 0)
        place++;
    answer_out->found = (enum crowd_found)place;
    cJSON_Delete(root);
    return good && place < CROWD_FOUND_COUNT && answer_out->tokens_prompt > 0;
}

/* The status; 0: no whole answer. */
static int attempt(struct crowd *crowd, struct attempt *attempt) {
    struct client_reply reply;
    char *body = make_body(attempt);
    const struct client_call call = {.port = crowd->served.port,
                                     .key = attempt->key,
                                     .method = "POST",
                                     .path = "/v1/chat/completions",
                                     .body = body};
    int status = body != NULL && client_ask(&call, &reply) ? reply.status : 0;
    if (status == 200 && !read_answer(reply.body, attempt->answer))
        status = -1;
    if (status != 200)
        snprintf(attempt->said, sizeof attempt->said, "status %d %s", status,
                 status != 0 ? reply.body : "no answer");
    if (body != NULL)
        client_reply_release(&reply);
    cJSON_free(body);
    return status;
}

int support_crowd_ask_alone(struct crowd *crowd, const char *key, const char *session,
                            const cJSON *messages, struct crowd_answer *answer_out) {
    struct attempt one = {key, session, messages, CROWD_ANSWER_TOKENS, answer_out, ""};
    return attempt(crowd, &one);
}

/* Another chat's value in the answer: the one thing that must never be. */
static int is_foreign(struct crowd *crowd, const struct crowd_chat *chat, const char *text) {
    for (uint32_t i = 0; i < crowd->options.chats; i++)
        for (uint32_t k = 0; i != chat->index && k < CROWD_FACTS; k++)
            if (strstr(text, crowd->chats[i].values[k]) != NULL) {
                support_crowd_inner_fail(crowd, "chat %u answers with a value of chat %u: %.200s",
                                         chat->index, i, text);
                return 1;
            }
    return 0;
}

static void count(struct crowd *crowd, const struct crowd_chat *chat,
                  const struct crowd_answer *answer) {
    struct crowd_counts *counts = &crowd->counts;
    const char *text = answer->text;
#ifdef BREAK_CROWD_FOREIGN
    text = crowd->chats[(chat->index + 1) % crowd->options.chats].values[0];
#endif
    int foreign = is_foreign(crowd, chat, text);
    pthread_mutex_lock(&crowd->lock);
    counts->requests++;
    counts->foreign += (uint64_t)foreign;
    counts->found[answer->found]++;
    counts->tokens_prompt += answer->tokens_prompt;
    counts->tokens_completion += answer->tokens_completion;
    counts->tokens_reused += answer->tokens_reused;
    counts->tokens_prefilled += answer->tokens_prefilled;
    pthread_mutex_unlock(&crowd->lock);
}

/* 1 when the daemon was told to end while the request was at it, and another one is there. */
static int await_next(struct crowd *crowd, uint32_t generation) {
    pthread_mutex_lock(&crowd->lock);
    int ended = crowd->ending || crowd->generation != generation;
    while (ended && crowd->generation == generation && crowd->reason[0] == 0)
        pthread_cond_wait(&crowd->moved, &crowd->lock);
    ended = ended && crowd->reason[0] == 0;
    crowd->counts.retried += (uint64_t)ended;
    pthread_mutex_unlock(&crowd->lock);
    return ended;
}

int support_crowd_ask(struct crowd *crowd, const struct crowd_chat *chat, const cJSON *messages,
                      struct crowd_answer *answer_out) {
    struct attempt one = {chat->key,  chat->names_itself ? chat->own_name : NULL,
                          messages,   CROWD_ANSWER_TOKENS,
                          answer_out, ""};
    uint32_t generation;
    int status;
    do {
        pthread_mutex_lock(&crowd->lock);
        generation = crowd->generation;
        pthread_mutex_unlock(&crowd->lock);
        status = attempt(crowd, &one);
    } while ((status == 0 || status == 503) && await_next(crowd, generation));
    if (status != 200)
        return support_crowd_inner_fail(crowd, "chat %u: %s", chat->index, one.said);
    count(crowd, chat, answer_out);
    return 1;
}

int support_crowd_ask_briefly(struct crowd *crowd, const struct crowd_chat *chat,
                              const cJSON *messages, struct crowd_answer *answer_out) {
    struct attempt one = {
        chat->key, chat->names_itself ? chat->own_name : NULL, messages, 1, answer_out, ""};
    if (attempt(crowd, &one) == 200)
        return 1;
    return support_crowd_inner_fail(crowd, "chat %u: %s", chat->index, one.said);
}
