/* tools/http.h - the HTTP side of the daemon: OpenAI's API, health, metrics, the status page.
 *
 * Responsible for: listening, who may ask (key, Host, content type), bounded bodies, connections,
 * answers and waiting, streams, one thread for each turn that is asked for.
 * Not responsible for: turns (serve.h), JSON of requests (http_request.h) and answers
 * (http_answer.h), making keys, the control socket.
 *
 * No request is read beyond its limits, and none is answered before it was read, or refused: a
 * client that cannot be told in peace is told nothing. A client that leaves ends its turn, and so
 * does closing the sending half of its connection. What a client does not take waits in a buffer of
 * HTTP_STREAM_BYTES_MAX; then its turn waits, `stall_ns` at most, then it ends.
 *
 * Threads: http_open and http_close by one owner; inside one thread of libmicrohttpd, one that
 * watches the connections, and one for each running request.
 * Units: bytes, nanoseconds of monotonic time.
 */
#ifndef TOOLS_HTTP_H
#define TOOLS_HTTP_H

#include "engine/image.h"
#include "store/base/alloc.h"
#include "store/base/clock.h"
#include "tools/http_guard.h"

enum {
    HTTP_BODY_BYTES_MAX = 64 << 20,    /* of one request */
    HTTP_BODIES_BYTES_MAX = 256 << 20, /* of all that are received or at work */
    HTTP_CONNECTIONS_MAX = 256,
    HTTP_LOGPROBS_MAX = 32768, /* of an answer that is no stream: a token has 1 + top_logprobs */
    HTTP_CONNECTION_BYTES = 32 << 10, /* request line and headers */
    HTTP_STREAM_BYTES_MAX = 256 << 10
};

/* 0 is no default: every field is set by the caller; http_limits_usual gives the usual ones. */
struct http_limits {
    uint32_t connections;
    uint32_t idle_seconds; /* a connection without a request, or nothing read of an answer */
    uint64_t body_bytes, bodies_bytes;
    uint64_t head_ns;  /* from the connection, or the answer before, to the end of the headers */
    uint64_t body_ns;  /* without a byte of the body */
    uint64_t read_ns;  /* the whole body */
    uint64_t stall_ns; /* a turn waits for its client to take what is there */
    uint64_t write_ns; /* from the end of a turn until all is taken */
    uint64_t turn_ns;  /* of one turn, waiting included */
};
void http_limits_usual(struct http_limits *limits_out);

struct serve;
struct http_options {
    struct serve *serve; /* outlives it */
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    const char *address; /* numeric, IPv4 or IPv6 */
    uint16_t port;       /* 0: any free one */
    const struct http_key *keys;
    size_t key_count;         /* 0: nobody needs one, and all are the operator */
    const char *const *names; /* hosts, besides localhost and the address */
    size_t name_count;
    const char *model;            /* its name in answers */
    struct image_sampler sampler; /* what a request does not say */
    uint32_t tokens_max;          /* of a chat that does not say */
    uint64_t seed;                /* printed; of ids and of turns without a seed */
    struct http_limits limits;
    /* One line for each request that was refused or failed; never its text. May be NULL. */
    void (*log)(void *context, const char *request_id, int status, const char *said);
    void *context;
};

struct http;
/* INVALID: the address; IO: it cannot be listened at, with the port in use named; NOMEM. Strings
 * and keys are borrowed until http_close. */
enum kv_err http_open(const struct http_options *options, struct http **http_out,
                      struct kv_diag *diag);
uint16_t http_port(const struct http *http);
/* Takes no new connection, ends running turns as if their clients had left, lets answers that are
 * ready go out for two seconds, returns when no thread of it is left. NULL is allowed. */
void http_close(struct http *http);

#endif
