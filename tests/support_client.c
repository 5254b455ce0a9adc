/* tests/support_client.c - an HTTP client for programs with many threads.
 *
 * Responsible for: see support_client.h.
 * Not responsible for: connections that stay: the server is asked to close each one.
 */
#include "tests/support_client.h"

#include "store/base/clock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { READ_BYTES = 16384, SECONDS_MAX = 300, HEAD_BYTES = 1024 };

static const char event_mark[] = "data: {";

static int open_socket(uint16_t port) {
    const struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct timeval patience = {.tv_sec = SECONDS_MAX};
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (client < 0)
        return -1;
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(client, (const struct sockaddr *)&address, sizeof address) == 0)
        return client;
    close(client);
    return -1;
}

static int send_all(int client, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t sent = send(client, bytes, count, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return 0;
        bytes += sent;
        count -= (size_t)sent;
    }
    return 1;
}

static int send_call(int client, const struct client_call *call) {
    char head[HEAD_BYTES];
    size_t body_bytes = call->body != NULL ? strlen(call->body) : 0;
    int bytes = snprintf(head, sizeof head,
                         "%s %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"
                         "Content-Type: application/json\r\nConnection: close\r\n"
                         "Content-Length: %zu\r\n\r\n",
                         call->method, call->path, call->key, body_bytes);
    return bytes > 0 && bytes < HEAD_BYTES && send_all(client, head, (size_t)bytes) &&
           (body_bytes == 0 || send_all(client, call->body, body_bytes));
}

static int grow(void *items, size_t *capacity, size_t wanted, size_t each) {
    void **at = items;
    if (wanted <= *capacity)
        return 1;
    size_t more = 2 * wanted;
    void *grown = realloc(*at, more * each);
    if (grown == NULL)
        return 0;
    *at = grown;
    *capacity = more;
    return 1;
}

/* Events that are whole up to their mark; `seen` is how far was looked. */
static int note_events(struct client_reply *reply, size_t *seen) {
    uint64_t now_ns = kv_clock_now_ns(kv_clock_system());
    const char *at = reply->bytes + *seen;
    while ((at = strstr(at, event_mark)) != NULL) {
        if (!grow(&reply->event_ns, &reply->event_capacity, reply->event_count + 1,
                  sizeof *reply->event_ns))
            return 0;
        reply->event_ns[reply->event_count++] = now_ns;
        at += sizeof event_mark - 1;
        *seen = (size_t)(at - reply->bytes);
    }
    /* A mark may be cut by what has come so far. */
    size_t back = sizeof event_mark - 2;
    if (reply->count > *seen + back)
        *seen = reply->count - back;
    return 1;
}

static int receive(int client, struct client_reply *reply) {
    size_t seen = 0;
    for (;;) {
        if (!grow(&reply->bytes, &reply->capacity, reply->count + READ_BYTES + 1, 1))
            return 0;
        ssize_t count = recv(client, reply->bytes + reply->count, READ_BYTES, 0);
        if (count < 0 && errno == EINTR) /* with a time limit, any signal ends it */
            continue;
        if (count < 0)
            return 0;
        reply->count += (size_t)count;
        reply->bytes[reply->count] = 0;
        if (count == 0)
            return 1;
        if (!note_events(reply, &seen))
            return 0;
    }
}

/* 1 when the body is as long as its head says, or its last chunk is there. */
static int is_whole(struct client_reply *reply) {
    char *end = strstr(reply->bytes, "\r\n\r\n");
    if (strncmp(reply->bytes, "HTTP/1.1 ", 9) != 0 || end == NULL)
        return 0;
    reply->body = end + 4;
    size_t body_bytes = reply->count - (size_t)(reply->body - reply->bytes);
    const char *length = strcasestr(reply->bytes, "\r\nContent-Length:");
    if (length != NULL && length < end)
        return body_bytes == strtoul(length + 17, NULL, 10);
    return body_bytes >= 5 && strcmp(reply->bytes + reply->count - 5, "0\r\n\r\n") == 0;
}

int client_ask(const struct client_call *call, struct client_reply *reply_out) {
    memset(reply_out, 0, sizeof *reply_out);
    int client = open_socket(call->port);
    if (client < 0)
        return 0;
    int whole = send_call(client, call) && receive(client, reply_out) && is_whole(reply_out);
    close(client);
    if (whole)
        reply_out->status = (int)strtol(reply_out->bytes + 9, NULL, 10);
    return whole;
}

void client_reply_release(struct client_reply *reply) {
    free(reply->bytes);
    free(reply->event_ns);
    memset(reply, 0, sizeof *reply);
}
