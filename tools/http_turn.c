/* tools/http_turn.c - one worker: a whole body, a turn, an answer or a stream.
 *
 * Responsible for: reading the request, filling in what it does not say, the turn, sending what
 * comes of it, the pictures behind /ready, /metrics and /status.
 * Not responsible for: JSON (http_request.c, http_answer.c), how a stream flows (http_stream.c).
 *
 * A stream begins with its first piece: what is refused before has a status of its own.
 *
 * BREAK_TURN_GONE goes on for a client that left.
 */
#include "tools/http_inner.h"

#include "tools/http_answer.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct turn_state {
    struct http_exchange *exchange;
    struct http_answer answer;
    int begun;  /* a stream that was begun */
    int failed; /* a piece could not be kept or sent */
};

void http_turn_reply(struct http_exchange *exchange, int status, struct MHD_Response *response) {
    struct http *http = exchange->http;
    struct http_error error;
    if (response == NULL) {
        struct kv_diag diag;
        kv_diag_set(&diag, KV_ERR_NOMEM, "not enough memory for the answer");
        http_error_from(&error, KV_ERR_NOMEM, &diag, 0);
        response = http_reply_error(&error);
        status = error.status;
    }
    pthread_mutex_lock(&http->lock);
    exchange->response = response;
    exchange->status = status;
    exchange->suspended = 0;
    pthread_mutex_unlock(&http->lock);
    MHD_resume_connection(exchange->mhd);
}

static void reply_error(struct http_exchange *exchange, const struct http_error *error) {
    const struct http_options *options = &exchange->http->options;
    if (options->log != NULL)
        options->log(options->context, exchange->id, error->status, error->diag.text);
    http_turn_reply(exchange, error->status, http_reply_error(error));
}

/* --- what the turn says meanwhile */

/* Takes the text, which is for cJSON_free. */
static int send_event(struct http_exchange *exchange, char *json) {
    int sent = json != NULL && http_stream_write(exchange, "data: ", 6) &&
               http_stream_write(exchange, json, strlen(json)) &&
               http_stream_write(exchange, "\n\n", 2);
    cJSON_free(json);
    return sent;
}

static int begin_stream(struct turn_state *state) {
    if (state->begun)
        return 1;
    struct MHD_Response *response = http_stream_response(state->exchange);
    if (response == NULL)
        return 0;
    state->begun = 1;
    http_turn_reply(state->exchange, 200, response);
    return 1;
}

static int is_gone(void *context) {
#ifdef BREAK_TURN_GONE
    (void)context;
    return 0;
#else
    struct turn_state *state = context;
    return http_stream_is_gone(state->exchange);
#endif
}

static int take_piece(void *context, const struct serve_piece *piece) {
    struct turn_state *state = context;
    const struct http_request *request = state->answer.request;
    if (state->failed || is_gone(state))
        return 0;
    pthread_mutex_lock(&state->exchange->http->lock);
    state->exchange->http->tokens_made += piece->has_token != 0;
    pthread_mutex_unlock(&state->exchange->http->lock);
    if (piece->text_bytes == 0 && !request->logprobs)
        return 1;
    if (!request->stream && !request->logprobs)
        return 1;
    if (!request->stream)
        state->failed = !http_answer_collect(&state->answer, piece);
    else
        state->failed = !begin_stream(state) ||
                        !send_event(state->exchange, http_answer_piece(&state->answer, piece));
    return !state->failed;
}

/* --- the turn */

/* Two turns without a seed never share one, and the printed seed repeats them all. */
static uint64_t seed_of(const struct http_exchange *exchange) {
    uint64_t mixed = exchange->http->options.seed + exchange->number * UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ mixed >> 31;
}

static uint32_t tokens_max_of(const struct http_exchange *exchange,
                              const struct http_request *request) {
    const uint32_t completion_usual = 16; /* as OpenAI's */
    if (request->tokens_max > 0)
        return request->tokens_max;
    return request->form == HTTP_CHAT ? exchange->http->options.tokens_max : completion_usual;
}

static void fill(const struct turn_state *state, struct serve_request *out) {
    struct http_exchange *exchange = state->exchange;
    const struct http_options *options = &exchange->http->options;
    const struct http_request *request = state->answer.request;
    *out =
        (struct serve_request){.request_id = exchange->id,
                               .session = request->session != NULL    ? request->session
                                          : exchange->session[0] != 0 ? exchange->session
                                                                      : NULL,
                               .messages = request->messages,
                               .message_count = request->message_count,
                               .prompt = request->prompt,
                               .prompt_bytes = request->prompt_bytes,
                               .tokens_max = tokens_max_of(exchange, request),
                               .sampler = options->sampler,
                               .stops = request->stops,
                               .stop_count = request->stop_count,
                               .logprobs = request->logprobs,
                               .top_logprobs = request->top_logprobs,
                               .deadline_ns = http_now_ns(exchange->http) + options->limits.turn_ns,
                               .piece = take_piece,
                               .cancelled = is_gone,
                               .context = (void *)(uintptr_t)state};
    memcpy(out->owner, exchange->owner, sizeof out->owner);
    if (request->has_temperature)
        out->sampler.temperature = request->temperature;
    if (request->has_top_p)
        out->sampler.top_p = request->top_p;
    out->sampler.seed = request->has_seed ? request->seed : seed_of(exchange);
}

/* What the stream ends with. */
static void finish_stream(struct turn_state *state, const struct serve_answer *given,
                          const struct http_error *error) {
    struct http_exchange *exchange = state->exchange;
    struct http_answer *answer = &state->answer;
    int sent = 0;
    if (error != NULL)
        sent = send_event(exchange, http_error_json(error));
    else
        sent = send_event(exchange, http_answer_finish(answer, given)) &&
               (!answer->request->include_usage ||
                send_event(exchange, http_answer_usage(answer, given))) &&
               http_stream_write(exchange, "data: [DONE]\n\n", 14);
    http_stream_finish(exchange, !sent);
}

static void run_turn(struct turn_state *state) {
    struct http_exchange *exchange = state->exchange;
    struct serve *serve = exchange->http->options.serve;
    struct serve_request request;
    struct serve_answer given;
    struct http_error error;
    struct kv_diag diag;
    memset(&given, 0, sizeof given);
    kv_diag_clear(&diag);
    fill(state, &request);
    enum kv_err err = serve_turn(serve, &request, &given, &diag);
    if (err == KV_OK && state->failed) {
        err = KV_ERR_NOMEM;
        kv_diag_set(&diag, err, "not enough memory for the answer");
    }
    if (err != KV_OK)
        http_error_from(&error, err, &diag, given.retry_after_seconds);
    if (err == KV_OK && state->answer.request->stream && !begin_stream(state))
        http_turn_reply(exchange, 503, NULL);
    else if (state->begun && state->failed)
        http_stream_finish(exchange, 1); /* what is missing in it must not look whole */
    else if (state->begun)
        finish_stream(state, &given, err == KV_OK ? NULL : &error);
    else if (err != KV_OK)
        reply_error(exchange, &error);
    else
        http_turn_reply(exchange, 200, http_reply_json(http_answer_whole(&state->answer, &given)));
    serve_answer_release(serve, &given);
}

/* --- the request */

/* The texts that were copied out of it go on counting until the turn is over. */
static void drop_body(struct http_exchange *exchange, int texts_stay) {
    struct http *http = exchange->http;
    size_t stays_bytes = texts_stay ? exchange->body_count : 0;
    kv_alloc_release(http->alloc, exchange->body);
    exchange->body = NULL;
    exchange->body_count = exchange->body_capacity = 0;
    pthread_mutex_lock(&http->lock);
    http->bodies_bytes -= exchange->charged_bytes;
    http->bodies_bytes += stays_bytes;
    exchange->charged_bytes = stays_bytes;
    pthread_mutex_unlock(&http->lock);
}

/* What a body cannot say alone. */
static int check_request(const struct http_exchange *exchange, const struct http_request *request,
                         struct http_error *error) {
    const uint32_t tokens_max = tokens_max_of(exchange, request), each = 1 + request->top_logprobs;
    if (request->model != NULL && !http_is_model(exchange->http, request->model)) {
        http_no_model(exchange->http, request->model, error);
    } else if (request->session != NULL && exchange->session[0] != 0 &&
               strcmp(request->session, exchange->session) != 0) {
        http_error_set(error, 400, "invalid_value",
                       "'session' and the header X-Coldplane-Session name two sessions");
        snprintf(error->param, sizeof error->param, "session");
    } else if (request->logprobs && !request->stream && tokens_max > HTTP_LOGPROBS_MAX / each) {
        /* They stay in memory until the answer is whole. */
        http_error_set(error, 400, "invalid_value",
                       "log-probabilities of %" PRIu32 " tokens with %" PRIu32
                       " each are more than "
                       "the %d of one answer; ask for fewer tokens, or for a stream",
                       tokens_max, each, HTTP_LOGPROBS_MAX);
        snprintf(error->param, sizeof error->param, "%s",
                 request->form == HTTP_CHAT ? "top_logprobs" : "logprobs");
    }
    return error->status == 0;
}

static void complete(struct http_exchange *exchange, enum http_form form) {
    struct http *http = exchange->http;
    struct http_request request;
    struct http_error error;
    char id[HTTP_ID_BYTES + 16];
    pthread_mutex_lock(&http->parsing);
    enum kv_err err = http_request_parse(form, exchange->body, exchange->body_count, http->alloc,
                                         &request, &error);
    pthread_mutex_unlock(&http->parsing);
    drop_body(exchange, err == KV_OK);
    if (err != KV_OK) {
        reply_error(exchange, &error);
        return;
    }
    if (check_request(exchange, &request, &error)) {
        snprintf(id, sizeof id, "%s-%s", form == HTTP_CHAT ? "chatcmpl" : "cmpl", exchange->id);
        struct turn_state state = {
            .exchange = exchange,
            .answer = {.request = &request,
                       .serve = http->options.serve,
                       .id = id,
                       .model = http->options.model,
                       .created_seconds =
                           (int64_t)(kv_clock_wall_ns(http->options.clock) / 1000000000)}};
        run_turn(&state);
        http_answer_release(&state.answer);
    } else {
        reply_error(exchange, &error);
    }
    http_request_release(&request, http->alloc);
}

/* --- pictures */

static void reply_metrics(struct http_exchange *exchange) {
    char *text = http_status_metrics(exchange->http);
    struct MHD_Response *response =
        text != NULL
            ? http_reply_text(text, strlen(text), "text/plain; version=0.0.4; charset=utf-8")
            : NULL;
    kv_alloc_release(exchange->http->alloc, text);
    http_turn_reply(exchange, 200, response);
}

static void reply_ready(struct http_exchange *exchange) {
    struct http_error error;
    if (http_status_ready(exchange->http, &error))
        http_turn_reply(exchange, 200, http_reply_ready());
    else
        http_turn_reply(exchange, error.status, http_reply_error(&error));
}

void *http_turn_worker(void *context) {
    struct http_exchange *exchange = context;
    switch (exchange->route) {
    case HTTP_ROUTE_CHAT:
        complete(exchange, HTTP_CHAT);
        break;
    case HTTP_ROUTE_COMPLETION:
        complete(exchange, HTTP_COMPLETION);
        break;
    case HTTP_ROUTE_METRICS:
        reply_metrics(exchange);
        break;
    case HTTP_ROUTE_READY:
        reply_ready(exchange);
        break;
    default:
        http_turn_reply(exchange, 200,
                        http_reply_json(http_status_json(exchange->http, exchange->owner)));
        break;
    }
    http_turn_end(exchange);
    return NULL;
}

void http_turn_end(struct http_exchange *exchange) {
    struct http *http = exchange->http;
    http_let_go(exchange);
    pthread_mutex_lock(&http->lock);
    http->workers--;
    pthread_cond_broadcast(&http->changed);
    pthread_mutex_unlock(&http->lock);
}
