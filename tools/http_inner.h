/* tools/http_inner.h - what the files of the HTTP side share.
 *
 * Responsible for: the server, a connection, one request on its way from headers to the last byte
 * of the answer (an exchange).
 * Not responsible for: anything outside tools/http*.c.
 *
 * An exchange belongs to the thread of libmicrohttpd until it is suspended, then to its worker,
 * which gives it back by resuming; a stream is shared meanwhile, under the lock. It goes when both
 * have let go. Order of locks: ours is never held in a call that waits for libmicrohttpd's.
 *
 * Threads: as marked.
 * Units: bytes, nanoseconds of monotonic time.
 */
#ifndef TOOLS_HTTP_INNER_H
#define TOOLS_HTTP_INNER_H

#include "tools/http.h"
#include "tools/http_error.h"
#include "tools/http_request.h"

#include <microhttpd.h>
#include <pthread.h>

/* What is under way when all is stopping may take so long to go out. */
#define HTTP_CLOSE_NS UINT64_C(2000000000)
enum { HTTP_ID_BYTES = 40, HTTP_SESSION_BYTES = IMAGE_NAME_BYTES_MAX + 1 };

/* HTTP_CUT: ended by the watcher, not yet noticed by libmicrohttpd. */
enum http_phase { HTTP_HEAD, HTTP_BODY, HTTP_TURN, HTTP_WRITE, HTTP_CUT };

/* One for each connection; under the lock. */
struct http_connection {
    struct http_connection *next;
    int fd;
    enum http_phase phase;
    uint64_t since_ns, progress_ns;
};

enum http_route {
    HTTP_NO_ROUTE,
    HTTP_ROUTE_CHAT,
    HTTP_ROUTE_COMPLETION,
    HTTP_ROUTE_MODELS,
    HTTP_ROUTE_MODEL,
    HTTP_ROUTE_HEALTH,
    HTTP_ROUTE_READY,
    HTTP_ROUTE_METRICS,
    HTTP_ROUTE_STATUS,
    HTTP_ROUTE_PAGE
};

struct http_exchange {
    struct http *http;
    struct MHD_Connection *mhd;
    struct http_connection *connection; /* NULL once completed; under the lock */
    enum http_route route;
    const char *subject; /* behind /v1/models/, borrowed from the URL while headers are read */
    uint64_t number;
    char id[HTTP_ID_BYTES];
    char session[HTTP_SESSION_BYTES]; /* of the header; "" none */
    uint8_t owner[HTTP_OWNER_BYTES];
    struct http_error error; /* status 0: none */
    /* The body; taken by the worker. */
    char *body;
    size_t body_count, body_capacity, charged_bytes;
    uint64_t received_bytes;
    int worker_begun;
    /* From here on under the lock. */
    int references; /* the connection, the worker */
    struct MHD_Response *response;
    int status;
    int suspended;
    int gone; /* the connection is over */
    /* The stream: a ring that libmicrohttpd's thread reads. */
    char *ring;
    size_t first, count;
    int streaming, finished, failed;
    pthread_cond_t room;
};

struct http {
    struct http_options options;
    const struct kv_alloc *alloc;
    struct MHD_Daemon *daemon;
    uint16_t port;
    char address_name[HTTP_HOST_BYTES]; /* as a Host header says it */
    pthread_t watcher;
    int watching;
    pthread_mutex_t lock;
    pthread_mutex_t parsing; /* one body is made into a tree at a time */
    pthread_cond_t changed;  /* a worker or an exchange ended; stopping */
    struct http_connection *connections;
    uint64_t bodies_bytes, next_id;
    uint64_t tokens_made; /* by turns that are not over, too */
    uint32_t workers, exchanges;
    uint64_t opened_ns;
    int stopping;
};

/* --- http_reply.c: on libmicrohttpd's thread, or by a worker that makes its response */

struct MHD_Response *http_reply_text(const char *text, size_t bytes, const char *type);
/* `json` is freed with cJSON_free; NULL gives NULL. */
struct MHD_Response *http_reply_json(char *json);
struct MHD_Response *http_reply_error(const struct http_error *error);
struct MHD_Response *http_reply_page(void);
struct MHD_Response *http_reply_health(int key_wanted);
struct MHD_Response *http_reply_ready(void);
struct MHD_Response *http_reply_models(const char *model);
struct MHD_Response *http_reply_model(const char *model);

/* --- http_turn.c */

/* The worker of an exchange whose body is whole. */
void *http_turn_worker(void *exchange);
/* Gives the exchange its response and wakes its connection. Takes the response; NULL: 503. */
void http_turn_reply(struct http_exchange *exchange, int status, struct MHD_Response *response);
/* Lets go of the exchange for its worker, which is none any more. */
void http_turn_end(struct http_exchange *exchange);

/* --- http_stream.c */

/* The response that reads the ring. NULL without memory. */
struct MHD_Response *http_stream_response(struct http_exchange *exchange);
/* Waits for room. 0: the client is gone, took nothing for too long, or all is stopping. */
int http_stream_write(struct http_exchange *exchange, const char *bytes, size_t count);
/* `failed` ends the connection in a way that a client sees. */
void http_stream_finish(struct http_exchange *exchange, int failed);
/* 1 when nobody waits for the answer any more. */
int http_stream_is_gone(struct http_exchange *exchange);

/* --- http_watch.c */

void *http_watch(void *http);

/* --- http_status.c */

/* The document of /status, sessions and receipts of one owner only, for cJSON_free; NULL without
 * memory. The text of /metrics, for kv_alloc_release. */
char *http_status_json(struct http *http, const uint8_t owner[HTTP_OWNER_BYTES]);
char *http_status_metrics(struct http *http);
/* 0 and an error while no requests are taken. */
int http_status_ready(struct http *http, struct http_error *error_out);

/* --- http.c */

/* 1 for the one model that runs: its id of /v1/models in any case, with or without `.gguf`, or
 * `default`. */
int http_is_model(const struct http *http, const char *name);
void http_no_model(const struct http *http, const char *name, struct http_error *error_out);
uint64_t http_now_ns(const struct http *http);
/* Of the exchange's connection, if it is still there; under the lock. */
void http_set_phase(struct http_exchange *exchange, enum http_phase phase);
/* Waits for `cond` under the lock, until `until_ns` at most. */
void http_wait(struct http *http, pthread_cond_t *cond, uint64_t until_ns);
void http_let_go(struct http_exchange *exchange); /* of one reference; without the lock */

#endif
