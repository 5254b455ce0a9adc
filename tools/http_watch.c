/* tools/http_watch.c - connections that take too long for what they are doing are ended.
 *
 * Responsible for: headers and bodies that trickle in, answers that are not taken.
 * Not responsible for: silence (libmicrohttpd's own limit), turns (they have a deadline).
 *
 * libmicrohttpd counts silence only, so one byte in a while would hold a connection for ever. Here
 * the socket is shut, which it sees as a client that left.
 *
 * BREAK_WATCH lets everybody take their time.
 */
#include "tools/http_inner.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { TICK_PARTS = 4, TICK_NS_MAX = 1000000000, ANSWER_BYTES = 512 };

/* Nothing of this request was answered yet, so that nobody else writes to the socket. */
static void send_timeout(int fd) {
    struct http_error error;
    char answer[ANSWER_BYTES];
    http_error_set(&error, 408, "timeout", "the request did not arrive in time");
    char *json = http_error_json(&error);
    if (json == NULL)
        return;
    int bytes = snprintf(answer, sizeof answer,
                         "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
                         "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                         strlen(json), json);
    cJSON_free(json);
    if (bytes > 0 && (size_t)bytes < sizeof answer)
        (void)send(fd, answer, (size_t)bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void look_at(const struct http *http, struct http_connection *connection, uint64_t now_ns) {
    const struct http_limits *limits = &http->options.limits;
    uint64_t since_ns = now_ns - connection->since_ns;
    int asks = (connection->phase == HTTP_HEAD && since_ns > limits->head_ns) ||
               (connection->phase == HTTP_BODY &&
                (now_ns - connection->progress_ns > limits->body_ns || since_ns > limits->read_ns));
    int takes = connection->phase == HTTP_WRITE && since_ns > limits->write_ns;
    if (!asks && !takes)
        return;
#ifndef BREAK_WATCH
    if (asks)
        send_timeout(connection->fd);
    (void)shutdown(connection->fd, SHUT_RDWR);
    connection->phase = HTTP_CUT;
#endif
}

static uint64_t tick(const struct http_limits *limits) {
    uint64_t least = limits->head_ns;
    least = limits->body_ns < least ? limits->body_ns : least;
    least = limits->read_ns < least ? limits->read_ns : least;
    least = limits->write_ns < least ? limits->write_ns : least;
    return least / TICK_PARTS < TICK_NS_MAX ? least / TICK_PARTS : TICK_NS_MAX;
}

void *http_watch(void *context) {
    struct http *http = context;
    uint64_t tick_ns = tick(&http->options.limits);
    pthread_mutex_lock(&http->lock);
    while (!http->stopping) {
        http_wait(http, &http->changed, http_now_ns(http) + tick_ns);
        uint64_t now_ns = http_now_ns(http);
        for (struct http_connection *at = http->connections; at != NULL; at = at->next)
            look_at(http, at, now_ns);
    }
    pthread_mutex_unlock(&http->lock);
    return NULL;
}
