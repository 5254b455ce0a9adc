/* tools/http_stream.c - the bytes of a stream on their way from a turn to a client that reads.
 *
 * Responsible for: the ring between a worker and libmicrohttpd's thread, waking either, noticing
 * that the client left or reads nothing.
 * Not responsible for: what the bytes say (http_turn.c).
 *
 * BREAK_STREAM_WAIT writes over what the client has not read yet.
 */
#include "tools/http_inner.h"

#include <poll.h>
#include <string.h>

static void take(struct http_exchange *exchange, char *out, size_t count) {
    size_t run = HTTP_STREAM_BYTES_MAX - exchange->first;
    run = run < count ? run : count;
    memcpy(out, exchange->ring + exchange->first, run);
    memcpy(out + run, exchange->ring, count - run);
    exchange->first = (exchange->first + count) % HTTP_STREAM_BYTES_MAX;
    exchange->count -= count;
}

static void put(struct http_exchange *exchange, const char *bytes, size_t count) {
    size_t end = (exchange->first + exchange->count) % HTTP_STREAM_BYTES_MAX;
    size_t run = HTTP_STREAM_BYTES_MAX - end;
    run = run < count ? run : count;
    memcpy(exchange->ring + end, bytes, run);
    memcpy(exchange->ring, bytes + run, count - run);
    exchange->count += count;
}

/* --- on libmicrohttpd's thread */

/* Bytes, or 0 when there are none yet, or how the stream ended. */
static ssize_t read_ring(struct http_exchange *exchange, char *out, size_t capacity) {
    size_t count = exchange->count < capacity ? exchange->count : capacity;
    if (exchange->failed)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (count > 0) {
        take(exchange, out, count);
        pthread_cond_broadcast(&exchange->room);
        return (ssize_t)count;
    }
    return exchange->finished ? MHD_CONTENT_READER_END_OF_STREAM : 0;
}

/* Suspends only when there is still nothing after it: a worker that wrote in between would
 * otherwise have nobody to wake. */
static ssize_t read_stream(void *context, uint64_t position, char *out, size_t capacity) {
    struct http_exchange *exchange = context;
    struct http *http = exchange->http;
    (void)position;
    pthread_mutex_lock(&http->lock);
    ssize_t count = read_ring(exchange, out, capacity);
    pthread_mutex_unlock(&http->lock);
    if (count != 0)
        return count;
    MHD_suspend_connection(exchange->mhd);
    pthread_mutex_lock(&http->lock);
    int empty = exchange->count == 0 && !exchange->finished;
    exchange->suspended = empty;
    pthread_mutex_unlock(&http->lock);
    if (!empty)
        MHD_resume_connection(exchange->mhd);
    return 0;
}

struct MHD_Response *http_stream_response(struct http_exchange *exchange) {
    struct http *http = exchange->http;
    char *ring = kv_alloc_aligned(http->alloc, HTTP_STREAM_BYTES_MAX, 1);
    struct MHD_Response *response =
        ring == NULL ? NULL
                     : MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_stream,
                                                         exchange, NULL);
    if (response == NULL) {
        kv_alloc_release(http->alloc, ring);
        return NULL;
    }
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                  "text/event-stream; charset=utf-8");
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL,
                                  "no-store, no-transform");
    (void)MHD_add_response_header(response, "X-Accel-Buffering", "no");
    pthread_mutex_lock(&http->lock);
    exchange->ring = ring;
    exchange->streaming = 1;
    pthread_mutex_unlock(&http->lock);
    return response;
}

/* --- on the worker's thread */

/* 1: the caller resumes the connection, without the lock. */
static int claim_wake(struct http_exchange *exchange) {
    int wake = exchange->suspended;
    exchange->suspended = 0;
    return wake;
}

/* With the lock. A half-closed connection counts as left: what leaves looks the same. */
static int is_gone(const struct http_exchange *exchange) {
    if (exchange->gone || exchange->connection == NULL || exchange->connection->phase == HTTP_CUT)
        return 1;
    struct pollfd socket = {exchange->connection->fd, POLLRDHUP, 0};
    return poll(&socket, 1, 0) > 0 && socket.revents & (POLLRDHUP | POLLHUP | POLLERR);
}

int http_stream_is_gone(struct http_exchange *exchange) {
    pthread_mutex_lock(&exchange->http->lock);
    int gone = is_gone(exchange) || exchange->http->stopping;
    pthread_mutex_unlock(&exchange->http->lock);
    return gone;
}

/* With the lock. 0 when the wait is in vain. Where all is stopping the turns end, and what they say
 * last still goes out to who reads it. */
static int wait_for_room(struct http_exchange *exchange) {
#ifndef BREAK_STREAM_WAIT
    struct http *http = exchange->http;
    const uint64_t look_ns = 200000000;
    uint64_t begun_ns = http_now_ns(http);
    while (exchange->count == HTTP_STREAM_BYTES_MAX) {
        uint64_t now_ns = http_now_ns(http), until_ns = begun_ns + http->options.limits.stall_ns;
        if (http->stopping && until_ns > begun_ns + HTTP_CLOSE_NS)
            until_ns = begun_ns + HTTP_CLOSE_NS;
        if (is_gone(exchange) || now_ns >= until_ns)
            return 0;
        http_wait(http, &exchange->room, now_ns + look_ns < until_ns ? now_ns + look_ns : until_ns);
    }
#else
    exchange->count = 0;
#endif
#ifdef BREAK_STOPPED_STREAM
    return !is_gone(exchange) && !exchange->http->stopping;
#endif
    return !is_gone(exchange);
}

int http_stream_write(struct http_exchange *exchange, const char *bytes, size_t count) {
    struct http *http = exchange->http;
    int alive = 1;
    while (count > 0 && alive) {
        pthread_mutex_lock(&http->lock);
        alive = wait_for_room(exchange);
        size_t room = HTTP_STREAM_BYTES_MAX - exchange->count;
        size_t run = !alive ? 0 : room < count ? room : count;
        put(exchange, bytes, run);
        int wake = claim_wake(exchange);
        pthread_mutex_unlock(&http->lock);
        if (wake)
            MHD_resume_connection(exchange->mhd);
        bytes += run;
        count -= run;
    }
    return alive;
}

void http_stream_finish(struct http_exchange *exchange, int failed) {
    struct http *http = exchange->http;
    pthread_mutex_lock(&http->lock);
    exchange->finished = 1;
    exchange->failed = failed;
    http_set_phase(exchange, HTTP_WRITE);
    int wake = claim_wake(exchange);
    pthread_mutex_unlock(&http->lock);
    if (wake)
        MHD_resume_connection(exchange->mhd);
}
