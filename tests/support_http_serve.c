/* tests/support_http_serve.c - a service that does as its prompt says.
 *
 * Responsible for: see support_http_serve.h.
 * Not responsible for: the client (support_http.c).
 */
#include "tests/support_http_serve.h"

#include "kernels/layout.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fake_turn {
    struct serve *serve;
    const struct serve_request *request;
    struct serve_answer *answer;
    char text[1 << 16];
    size_t bytes;
};

/* A token is a number of up to three letters here: its decimal digits are its text. */
size_t serve_token_bytes(struct serve *serve, uint32_t token, char *out, size_t capacity) {
    char text[16];
    (void)serve;
    int bytes = snprintf(text, sizeof text, "<%u>", token);
    size_t count = (size_t)bytes < capacity ? (size_t)bytes : capacity;
    memcpy(out, text, count);
    return count;
}

static int give(struct fake_turn *turn, const char *text, size_t bytes) {
    uint32_t number = (uint32_t)turn->answer->tokens_completion;
    struct serve_logprob top[SERVE_LOGPROBS_MAX];
    for (uint32_t i = 0; i < turn->request->top_logprobs; i++)
        top[i] = (struct serve_logprob){number + i, -0.5f - (float)i};
    struct serve_piece piece = {.text = text,
                                .text_bytes = bytes,
                                .has_token = 1,
                                .token = number,
                                .logprob = -0.5f,
                                .top = top,
                                .top_count = turn->request->top_logprobs};
    if (turn->bytes + bytes < sizeof turn->text) {
        memcpy(turn->text + turn->bytes, text, bytes);
        turn->bytes += bytes;
    }
    turn->answer->tokens_completion++;
    if (turn->answer->tokens_completion >= turn->request->tokens_max)
        turn->answer->finish = SERVE_LENGTH;
    if (turn->request->piece != NULL && !turn->request->piece(turn->request->context, &piece)) {
        pthread_mutex_lock(&turn->serve->lock);
        turn->serve->stopped_by_piece++;
        pthread_cond_broadcast(&turn->serve->changed);
        pthread_mutex_unlock(&turn->serve->lock);
        turn->answer->finish = SERVE_CANCELLED;
        return 0;
    }
    return turn->answer->finish == SERVE_STOP;
}

static void say(struct fake_turn *turn, const char *text) {
    while (*text != 0) {
        size_t bytes = strcspn(text, " ");
        bytes += strspn(text + bytes, " ");
        if (!give(turn, text, bytes))
            return;
        text += bytes;
    }
}

static void count_up(struct fake_turn *turn, uint64_t count) {
    char text[32];
    for (uint64_t i = 0; i < count; i++) {
        int bytes = snprintf(text, sizeof text, "%llu ", (unsigned long long)i);
        if (!give(turn, text, (size_t)bytes))
            return;
    }
}

static enum kv_err wait_for_the_end(struct fake_turn *turn) {
    struct pollfd none = {-1, 0, 0};
    const uint64_t most_ns = 15000000000; /* a test that fails must end all the same */
    uint64_t end_ns = kv_clock_now_ns(kv_clock_system()) + most_ns;
    if (end_ns > turn->request->deadline_ns)
        end_ns = turn->request->deadline_ns;
    while (kv_clock_now_ns(kv_clock_system()) < end_ns) {
        if (turn->request->cancelled != NULL && turn->request->cancelled(turn->request->context)) {
            pthread_mutex_lock(&turn->serve->lock);
            turn->serve->cancelled++;
            pthread_cond_broadcast(&turn->serve->changed);
            pthread_mutex_unlock(&turn->serve->lock);
            turn->answer->finish = SERVE_CANCELLED;
            return KV_OK;
        }
        (void)poll(&none, 1, 2);
    }
    return KV_ERR_CANCELLED;
}

static enum kv_err named(const char *name) {
    for (int err = 0; err < KV_ERR_COUNT; err++)
        if (strcmp(kv_err_name((enum kv_err)err), name) == 0)
            return (enum kv_err)err;
    abort();
}

static enum kv_err obey(struct fake_turn *turn, const char *text, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    if (strncmp(text, "say ", 4) == 0)
        say(turn, text + 4);
    else if (strncmp(text, "count ", 6) == 0)
        count_up(turn, strtoull(text + 6, NULL, 10));
    else if (strcmp(text, "wait") == 0)
        err = wait_for_the_end(turn);
    else if (strcmp(text, "hold") == 0)
        err = give(turn, "held", 4) ? wait_for_the_end(turn) : KV_OK;
    else if (strncmp(text, "fail ", 5) == 0)
        err = named(text + 5);
    else if (strcmp(text, "split") == 0 && give(turn, "", 0))
        (void)give(turn, "\xf0\x9f\x98\x80", 4);
    else if (strncmp(text, "late ", 5) == 0) {
        say(turn, "begun");
        err = named(text + 5);
    }
    turn->answer->retry_after_seconds = err == KV_ERR_BUSY ? 7 : 0;
    return err == KV_OK ? KV_OK : kv_diag_set(diag, err, "as the prompt says: %s", text);
}

static const char *remember(struct serve *serve, const struct serve_request *request) {
    const struct template_message *last =
        request->message_count > 0 ? &request->messages[request->message_count - 1] : NULL;
    const char *text = last != NULL ? last->text : request->prompt;
    size_t bytes = last != NULL ? last->text_bytes : request->prompt_bytes;
    char *copy = calloc(1, bytes + 1);
    if (copy == NULL)
        abort();
    memcpy(copy, text, bytes);
    pthread_mutex_lock(&serve->lock);
    serve->request = *request;
    snprintf(serve->text, sizeof serve->text, "%s", copy);
    snprintf(serve->session, sizeof serve->session, "%s",
             request->session != NULL ? request->session : "");
    snprintf(serve->stop, sizeof serve->stop, "%s",
             request->stop_count > 0 ? request->stops[request->stop_count - 1] : "");
    serve->turns++;
    serve->running++;
    pthread_cond_broadcast(&serve->changed);
    pthread_mutex_unlock(&serve->lock);
    return copy;
}

enum kv_err serve_turn(struct serve *serve, const struct serve_request *request,
                       struct serve_answer *answer_out, struct kv_diag *diag) {
    struct fake_turn *turn = calloc(1, sizeof *turn);
    if (turn == NULL)
        abort();
    char *text = (char *)(uintptr_t)remember(serve, request);
    *answer_out = (struct serve_answer){.tokens_prompt = 12,
                                        .tokens_reused = 9,
                                        .tokens_prefilled = 3,
                                        .first_difference = 9,
                                        .found = SERVE_DISK,
                                        .receipt_id = 0xabcdef,
                                        .tier_blocks = {[LAYOUT_K8V4] = 2}};
    snprintf(answer_out->session, sizeof answer_out->session, "%s",
             request->session != NULL ? request->session : "chat-1");
    *turn = (struct fake_turn){.serve = serve, .request = request, .answer = answer_out};
    enum kv_err err = obey(turn, text, diag);
    answer_out->text = calloc(1, turn->bytes + 1);
    answer_out->text_bytes = turn->bytes;
    if (answer_out->text == NULL)
        abort();
    memcpy(answer_out->text, turn->text, turn->bytes);
    free(text);
    free(turn);
    pthread_mutex_lock(&serve->lock);
    serve->running--;
    pthread_cond_broadcast(&serve->changed);
    pthread_mutex_unlock(&serve->lock);
    return err;
}

void serve_answer_release(struct serve *serve, struct serve_answer *answer) {
    (void)serve;
    free(answer->text);
    answer->text = NULL;
}

int serve_is_ready(struct serve *serve) {
    pthread_mutex_lock(&serve->lock);
    int is_ready = serve->is_ready;
    pthread_mutex_unlock(&serve->lock);
    return is_ready;
}

enum kv_err serve_picture(struct serve *serve, struct serve_picture *picture_out,
                          struct kv_diag *diag) {
    (void)diag;
    *picture_out = *serve->picture;
    return KV_OK;
}

enum kv_err serve_picture_stored(struct serve *serve, struct serve_picture *picture, int with_tiers,
                                 struct kv_diag *diag) {
    (void)serve, (void)picture, (void)with_tiers, (void)diag;
    return KV_OK;
}

void serve_picture_release(struct serve *serve, struct serve_picture *picture) {
    (void)serve;
    (void)picture;
}

void support_http_await(struct serve *serve, const uint32_t *count, uint32_t wanted) {
    struct timespec until;
    int late = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 10;
    pthread_mutex_lock(&serve->lock);
    while (*count < wanted && !late)
        late = pthread_cond_clockwait(&serve->changed, &serve->lock, CLOCK_MONOTONIC, &until) != 0;
    uint32_t reached = *count;
    pthread_mutex_unlock(&serve->lock);
    assert_true(reached >= wanted);
}
