/* tools/http.c - listening, headers and bodies: a request until it is whole or refused.
 *
 * Responsible for: http_open and http_close, routes, what headers alone refuse, receiving bodies
 * within their limits, starting the worker of a request.
 * Not responsible for: what workers do (http_turn.c), streams (http_stream.c), time limits of
 * connections (http_watch.c).
 *
 * A refused request is read to its end, without being kept, before it is answered: closing a
 * connection over unread bytes takes the answer away from many clients. A body that is too long by
 * its own account is answered at once.
 *
 * BREAK_BODY_LIMIT takes bodies of any length.
 */
#include "tools/http_inner.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { NS_PER_SECOND = 1000000000, BODY_FIRST_BYTES = 4096 };

void http_limits_usual(struct http_limits *limits_out) {
    const uint64_t second = NS_PER_SECOND;
    *limits_out = (struct http_limits){.connections = HTTP_CONNECTIONS_MAX,
                                       .idle_seconds = 60,
                                       .body_bytes = HTTP_BODY_BYTES_MAX,
                                       .bodies_bytes = HTTP_BODIES_BYTES_MAX,
                                       .head_ns = 75 * second,
                                       .body_ns = 30 * second,
                                       .read_ns = 300 * second,
                                       .stall_ns = 30 * second,
                                       .write_ns = 300 * second,
                                       .turn_ns = 1800 * second};
}

/* --- shared by the files of the HTTP side */

uint64_t http_now_ns(const struct http *http) {
    return kv_clock_now_ns(http->options.clock);
}

void http_set_phase(struct http_exchange *exchange, enum http_phase phase) {
    struct http_connection *connection = exchange->connection;
    if (connection == NULL || connection->phase == HTTP_CUT)
        return;
    connection->phase = phase;
    connection->since_ns = connection->progress_ns = http_now_ns(exchange->http);
}

void http_wait(struct http *http, pthread_cond_t *cond, uint64_t until_ns) {
    struct timespec until = {(time_t)(until_ns / NS_PER_SECOND), (long)(until_ns % NS_PER_SECOND)};
    (void)pthread_cond_clockwait(cond, &http->lock, CLOCK_MONOTONIC, &until);
}

void http_let_go(struct http_exchange *exchange) {
    struct http *http = exchange->http;
    pthread_mutex_lock(&http->lock);
    int left = --exchange->references;
    if (left == 0) {
        http->bodies_bytes -= exchange->charged_bytes;
        http->exchanges--;
        pthread_cond_broadcast(&http->changed);
    }
    pthread_mutex_unlock(&http->lock);
    if (left > 0)
        return;
    if (exchange->response != NULL)
        MHD_destroy_response(exchange->response);
    pthread_cond_destroy(&exchange->room);
    kv_alloc_release(http->alloc, exchange->ring);
    kv_alloc_release(http->alloc, exchange->body);
    kv_alloc_release(http->alloc, exchange);
}

/* --- headers */

static const struct route {
    const char *path;
    enum http_route route;
    int posts, open; /* open: without a key */
} routes[] = {{"/v1/chat/completions", HTTP_ROUTE_CHAT, 1, 0},
              {"/v1/completions", HTTP_ROUTE_COMPLETION, 1, 0},
              {"/v1/models", HTTP_ROUTE_MODELS, 0, 0},
              {"/v1/models/", HTTP_ROUTE_MODEL, 0, 0},
              {"/health", HTTP_ROUTE_HEALTH, 0, 1},
              {"/ready", HTTP_ROUTE_READY, 0, 0},
              {"/metrics", HTTP_ROUTE_METRICS, 0, 0},
              {"/status", HTTP_ROUTE_STATUS, 0, 0},
              {"/", HTTP_ROUTE_PAGE, 0, 1}};

static const struct route *find_route(const char *url) {
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++)
        if (routes[i].route == HTTP_ROUTE_MODEL
                ? strncmp(url, routes[i].path, strlen(routes[i].path)) == 0
                : strcmp(url, routes[i].path) == 0)
            return &routes[i];
    return NULL;
}

static const char *header(const struct http_exchange *exchange, const char *name) {
    return MHD_lookup_connection_value(exchange->mhd, MHD_HEADER_KIND, name);
}

static int is_json(const char *type) {
    static const char json[] = "application/json";
    if (type == NULL || strncasecmp(type, json, sizeof json - 1) != 0)
        return 0;
    char next = type[sizeof json - 1];
    return next == 0 || next == ';' || next == ' ';
}

static void judge_body(struct http_exchange *exchange) {
    struct http_error *error = &exchange->error;
    const char *length = header(exchange, MHD_HTTP_HEADER_CONTENT_LENGTH);
    if (!is_json(header(exchange, MHD_HTTP_HEADER_CONTENT_TYPE)))
        http_error_set(error, 415, "unsupported_media_type",
                       "the content type must be application/json");
    else if (length == NULL && header(exchange, MHD_HTTP_HEADER_TRANSFER_ENCODING) == NULL)
        http_error_set(error, 411, "length_required",
                       "a body with Content-Length, or a chunked one, is needed");
#ifndef BREAK_BODY_LIMIT
    else if (length != NULL &&
             strtoull(length, NULL, 10) > exchange->http->options.limits.body_bytes)
        http_error_set(error, 413, "request_too_large",
                       "the body is longer than %" PRIu64 " bytes, the most that is taken",
                       exchange->http->options.limits.body_bytes);
#endif
}

static void judge_session(struct http_exchange *exchange) {
    const char *session = header(exchange, "X-Coldplane-Session");
    if (session == NULL)
        return;
    if (!http_request_is_session(session)) {
        http_error_set(&exchange->error, 400, "invalid_value",
                       "'X-Coldplane-Session' must be 1 to 128 bytes without `/` and control "
                       "characters");
        snprintf(exchange->error.param, sizeof exchange->error.param, "X-Coldplane-Session");
        return;
    }
    snprintf(exchange->session, sizeof exchange->session, "%s", session);
}

static void judge_headers(struct http_exchange *exchange, const char *url, const char *method) {
    const struct http_options *options = &exchange->http->options;
    struct http_error *error = &exchange->error;
    const char *host = header(exchange, MHD_HTTP_HEADER_HOST);
    if (!http_guard_host(host, options->names, options->name_count) &&
        !http_guard_host(host, &(const char *){exchange->http->address_name}, 1)) {
        http_error_set(error, 403, "host_not_allowed",
                       "the Host header names no host of this server; --hosts allows more names");
        return;
    }
    const struct route *route = find_route(url);
    if (route == NULL) {
        http_error_set(error, 404, "unknown_url", "there is no %.40s %.200s", method, url);
        return;
    }
    int is_get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    if (route->posts ? strcmp(method, "POST") != 0 : !is_get) {
        http_error_set(error, 405, "method_not_supported", "%.200s does not take %.40s", url,
                       method);
        error->allow = route->posts ? "POST" : "GET, HEAD";
        return;
    }
    if (options->key_count > 0 && !route->open &&
        !http_guard_key(options->keys, options->key_count,
                        header(exchange, MHD_HTTP_HEADER_AUTHORIZATION), exchange->owner)) {
        http_error_set(error, 401, "invalid_api_key",
                       "no key or a wrong one: send the one in the daemon's key file as "
                       "`Authorization: Bearer KEY`");
        return;
    }
    exchange->route = route->route;
    exchange->subject = url + strlen(route->path);
    if (route->posts)
        judge_body(exchange);
    if (route->posts && error->status == 0)
        judge_session(exchange);
}

/* --- one request */

static struct http_exchange *begin(struct http *http, struct MHD_Connection *mhd) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct http_exchange *exchange = kv_alloc_zeroed(http->alloc, 1, sizeof *exchange);
    if (exchange == NULL || info == NULL || info->socket_context == NULL) {
        kv_alloc_release(http->alloc, exchange);
        return NULL;
    }
    exchange->http = http;
    exchange->mhd = mhd;
    exchange->references = 1;
    pthread_cond_init(&exchange->room, NULL);
    pthread_mutex_lock(&http->lock);
    exchange->connection = info->socket_context;
    http_set_phase(exchange, HTTP_BODY);
    http->exchanges++;
    exchange->number = http->next_id++;
    snprintf(exchange->id, sizeof exchange->id, "%08" PRIx64 "%08" PRIx64,
             http->options.seed & UINT32_MAX, exchange->number);
    pthread_mutex_unlock(&http->lock);
    return exchange;
}

static void say(struct http_exchange *exchange, const struct http_error *error) {
    const struct http_options *options = &exchange->http->options;
    if (options->log != NULL)
        options->log(options->context, exchange->id, error->status, error->diag.text);
}

static enum MHD_Result send_response(struct http_exchange *exchange, int status,
                                     struct MHD_Response *response) {
    if (response == NULL)
        return MHD_NO;
    struct http *http = exchange->http;
    pthread_mutex_lock(&http->lock);
    if (!exchange->streaming)
        http_set_phase(exchange, HTTP_WRITE);
    pthread_mutex_unlock(&http->lock);
    (void)MHD_add_response_header(response, "X-Request-Id", exchange->id);
    enum MHD_Result result = MHD_queue_response(exchange->mhd, (unsigned)status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result send_error(struct http_exchange *exchange) {
    say(exchange, &exchange->error);
    return send_response(exchange, exchange->error.status, http_reply_error(&exchange->error));
}

/* A body that is refused goes on being read, up to twice the limit; then the connection ends. */
static enum MHD_Result receive(struct http_exchange *exchange, const char *bytes, size_t *count) {
    struct http *http = exchange->http;
    const struct http_limits *limits = &http->options.limits;
    size_t taken = *count;
    *count = 0;
    exchange->received_bytes += taken;
    pthread_mutex_lock(&http->lock);
    if (exchange->connection != NULL)
        exchange->connection->progress_ns = http_now_ns(http);
    pthread_mutex_unlock(&http->lock);
    if (exchange->received_bytes > 2 * limits->body_bytes)
        return MHD_NO;
    if (exchange->error.status != 0)
        return MHD_YES;
#ifndef BREAK_BODY_LIMIT
    if (exchange->received_bytes > limits->body_bytes) {
        http_error_set(&exchange->error, 413, "request_too_large",
                       "the body is longer than %" PRIu64 " bytes, the most that is taken",
                       limits->body_bytes);
        return MHD_YES;
    }
#endif
    void *body = exchange->body;
    size_t needed = exchange->body_count + taken;
    int grown = kv_alloc_grow(http->alloc, &body, &exchange->body_capacity,
                              needed > BODY_FIRST_BYTES ? needed : BODY_FIRST_BYTES, 1);
    exchange->body = body;
    pthread_mutex_lock(&http->lock);
    http->bodies_bytes += exchange->body_capacity - exchange->charged_bytes;
    exchange->charged_bytes = exchange->body_capacity;
    int full = http->bodies_bytes > limits->bodies_bytes;
    pthread_mutex_unlock(&http->lock);
    if (!grown || full) {
        http_error_set(&exchange->error, 503, "no_memory",
                       "too many long requests are being received; try again");
        exchange->error.retry_after_seconds = 1;
        return MHD_YES;
    }
    memcpy(exchange->body + exchange->body_count, bytes, taken);
    exchange->body_count += taken;
    return MHD_YES;
}

/* Suspended before the worker may resume it. */
static enum MHD_Result start_worker(struct http_exchange *exchange) {
    struct http *http = exchange->http;
    pthread_attr_t attributes;
    pthread_t thread;
    exchange->worker_begun = 1;
    pthread_mutex_lock(&http->lock);
    int stopping = http->stopping;
    if (!stopping) {
        http->workers++;
        exchange->references++;
        exchange->suspended = 1;
        http_set_phase(exchange, HTTP_TURN);
    }
    pthread_mutex_unlock(&http->lock);
    if (stopping) {
        http_error_set(&exchange->error, 503, "stopping", "the server is being stopped");
        return send_error(exchange);
    }
    MHD_suspend_connection(exchange->mhd);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attributes, http_turn_worker, exchange);
    pthread_attr_destroy(&attributes);
    if (failed) {
        http_error_set(&exchange->error, 503, "no_memory", "no thread for this request");
        exchange->error.retry_after_seconds = 1;
        http_turn_reply(exchange, 503, http_reply_error(&exchange->error));
        http_turn_end(exchange);
    }
    return MHD_YES;
}

/* Without the end that the file's name may have. */
static size_t stem_of(const char *name) {
    static const char end[] = ".gguf";
    size_t length = strlen(name), more = sizeof end - 1;
    return length > more && strcasecmp(name + length - more, end) == 0 ? length - more : length;
}

int http_is_model(const struct http *http, const char *name) {
    const char *model = http->options.model;
    size_t stem = stem_of(name);
    return strcasecmp(name, "default") == 0 ||
           (stem == stem_of(model) && strncasecmp(name, model, stem) == 0);
}

void http_no_model(const struct http *http, const char *name, struct http_error *error_out) {
    http_error_set(error_out, 404, "model_not_found",
                   "The model `%.100s` does not exist here: `%.100s` is what runs, also called "
                   "`default`; /v1/models lists it",
                   name, http->options.model);
    snprintf(error_out->param, sizeof error_out->param, "model");
}

static enum MHD_Result send_model(struct http_exchange *exchange) {
    if (http_is_model(exchange->http, exchange->subject))
        return send_response(exchange, 200, http_reply_model(exchange->http->options.model));
    http_no_model(exchange->http, exchange->subject, &exchange->error);
    return send_error(exchange);
}

/* The request is whole. */
static enum MHD_Result answer(struct http_exchange *exchange) {
    if (exchange->error.status != 0)
        return send_error(exchange);
    switch (exchange->route) {
    case HTTP_ROUTE_MODELS:
        return send_response(exchange, 200, http_reply_models(exchange->http->options.model));
    case HTTP_ROUTE_MODEL:
        return send_model(exchange);
    case HTTP_ROUTE_HEALTH:
        return send_response(exchange, 200,
                             http_reply_health(exchange->http->options.key_count > 0));
    case HTTP_ROUTE_PAGE:
        return send_response(exchange, 200, http_reply_page());
    default:
        return start_worker(exchange);
    }
}

static enum MHD_Result send_ready(struct http_exchange *exchange) {
    struct http *http = exchange->http;
    pthread_mutex_lock(&http->lock);
    struct MHD_Response *response = exchange->response;
    exchange->response = NULL;
    pthread_mutex_unlock(&http->lock);
    return send_response(exchange, exchange->status, response);
}

// clang-format off: the waiver must stand where the body begins
static enum MHD_Result handle(void *context, struct MHD_Connection *mhd, const char *url,
                              const char *method, const char *version, const char *upload,
                              /* tidy-allow: parameters libmicrohttpd calls it with these */
                              size_t *upload_bytes, void **exchange_out) {
    // clang-format on
    struct http_exchange *exchange = *exchange_out;
    (void)version;
    if (exchange == NULL) {
        exchange = begin(context, mhd);
        if (exchange == NULL)
            return MHD_NO;
        *exchange_out = exchange;
        judge_headers(exchange, url, method);
        /* What is not sent yet need not be, and what is far too long will not be read. */
        return exchange->error.status == 413 || (exchange->error.status != 0 &&
                                                 header(exchange, MHD_HTTP_HEADER_EXPECT) != NULL)
                   ? send_error(exchange)
                   : MHD_YES;
    }
    if (*upload_bytes > 0)
        return receive(exchange, upload, upload_bytes);
    if (exchange->worker_begun)
        return send_ready(exchange);
    exchange->subject = url + (exchange->route == HTTP_ROUTE_MODEL ? strlen("/v1/models/") : 0);
    return answer(exchange);
}

static void completed(void *context, struct MHD_Connection *mhd, void **exchange_at,
                      enum MHD_RequestTerminationCode code) {
    struct http *http = context;
    struct http_exchange *exchange = *exchange_at;
    (void)mhd;
    (void)code;
    if (exchange == NULL)
        return;
    *exchange_at = NULL;
    pthread_mutex_lock(&http->lock);
    http_set_phase(exchange, HTTP_HEAD);
    exchange->connection = NULL;
    exchange->gone = 1;
    pthread_cond_broadcast(&exchange->room);
    pthread_mutex_unlock(&http->lock);
    http_let_go(exchange);
}

/* --- connections */

static void connection_changed(void *context, struct MHD_Connection *mhd, void **at,
                               enum MHD_ConnectionNotificationCode code) {
    struct http *http = context;
    struct http_connection *connection = *at;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        connection = kv_alloc_zeroed(http->alloc, 1, sizeof *connection);
        *at = connection;
        if (connection == NULL || info == NULL)
            return;
        connection->fd = info->connect_fd;
        connection->phase = HTTP_HEAD;
        connection->since_ns = connection->progress_ns = http_now_ns(http);
        pthread_mutex_lock(&http->lock);
        connection->next = http->connections;
        http->connections = connection;
        pthread_mutex_unlock(&http->lock);
    } else if (connection != NULL) {
        pthread_mutex_lock(&http->lock);
        struct http_connection **link = &http->connections;
        while (*link != NULL && *link != connection)
            link = &(*link)->next;
        if (*link != NULL)
            *link = connection->next;
        pthread_mutex_unlock(&http->lock);
        kv_alloc_release(http->alloc, connection);
        *at = NULL;
    }
}

/* --- opening and closing */

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static enum kv_err read_address(struct http *http, union address *out, struct kv_diag *diag) {
    const struct http_options *options = &http->options;
    *out = (union address){0};
    if (inet_pton(AF_INET, options->address, &out->v4.sin_addr) == 1) {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons(options->port);
        snprintf(http->address_name, sizeof http->address_name, "%s", options->address);
    } else if (inet_pton(AF_INET6, options->address, &out->v6.sin6_addr) == 1) {
        out->v6.sin6_family = AF_INET6;
        out->v6.sin6_port = htons(options->port);
        snprintf(http->address_name, sizeof http->address_name, "[%s]", options->address);
    } else {
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "`%s` is no IPv4 or IPv6 address to listen at, such as 127.0.0.1 or ::1",
                           options->address);
    }
    return KV_OK;
}

static enum kv_err start(struct http *http, struct kv_diag *diag) {
    const struct http_options *options = &http->options;
    union address address;
    enum kv_err err = read_address(http, &address, diag);
    if (err != KV_OK)
        return err;
    unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME;
    if (address.any.sa_family == AF_INET6)
        flags |= MHD_USE_IPv6;
    errno = 0;
    http->daemon = MHD_start_daemon(
        flags, options->port, NULL, NULL, handle, http, MHD_OPTION_SOCK_ADDR, &address.any,
        MHD_OPTION_CONNECTION_LIMIT, options->limits.connections, MHD_OPTION_CONNECTION_TIMEOUT,
        options->limits.idle_seconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)HTTP_CONNECTION_BYTES, MHD_OPTION_NOTIFY_COMPLETED, completed, http,
        MHD_OPTION_NOTIFY_CONNECTION, connection_changed, http, MHD_OPTION_END);
    if (http->daemon == NULL)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "cannot listen at %s port %u",
                             options->address, options->port);
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_BIND_PORT);
    http->port = info != NULL ? info->port : options->port;
    http->watching = pthread_create(&http->watcher, NULL, http_watch, http) == 0;
    return http->watching ? KV_OK : kv_diag_set(diag, KV_ERR_NOMEM, "no thread for the server");
}

enum kv_err http_open(const struct http_options *options, struct http **http_out,
                      struct kv_diag *diag) {
    struct http *http = kv_alloc_zeroed(options->alloc, 1, sizeof *http);
    if (http == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "not enough memory for the server");
    http->options = *options;
    http->alloc = options->alloc;
    http->opened_ns = kv_clock_now_ns(options->clock);
    pthread_mutex_init(&http->lock, NULL);
    pthread_mutex_init(&http->parsing, NULL);
    pthread_cond_init(&http->changed, NULL);
    enum kv_err err = start(http, diag);
    if (err != KV_OK) {
        http_close(http);
        return err;
    }
    *http_out = http;
    return KV_OK;
}

uint16_t http_port(const struct http *http) {
    return http->port;
}

/* Workers end because they see that all is stopping; what they said goes out if it can. */
static void wind_down(struct http *http) {
    MHD_socket listening = http->daemon != NULL ? MHD_quiesce_daemon(http->daemon) : -1;
    if (listening != MHD_INVALID_SOCKET)
        close(listening);
    pthread_mutex_lock(&http->lock);
    http->stopping = 1;
    pthread_cond_broadcast(&http->changed);
    while (http->workers > 0)
        pthread_cond_wait(&http->changed, &http->lock);
    uint64_t until_ns = http_now_ns(http) + HTTP_CLOSE_NS;
    while (http->exchanges > 0 && http_now_ns(http) < until_ns)
        http_wait(http, &http->changed, until_ns);
    pthread_mutex_unlock(&http->lock);
}

void http_close(struct http *http) {
    if (http == NULL)
        return;
    wind_down(http);
    if (http->watching)
        pthread_join(http->watcher, NULL);
    if (http->daemon != NULL)
        MHD_stop_daemon(http->daemon);
    pthread_cond_destroy(&http->changed);
    pthread_mutex_destroy(&http->parsing);
    pthread_mutex_destroy(&http->lock);
    kv_alloc_release(http->alloc, http);
}
