/* tests/support_client.h - an HTTP client for programs with many threads.
 *
 * Responsible for: one request on a connection of its own, its whole answer, and when each event of
 * a stream arrived.
 * Not responsible for: JSON, retrying; it never ends the program or the test.
 *
 * Threads: any.
 * Units: bytes, nanoseconds of the monotonic clock.
 */
#ifndef TESTS_SUPPORT_CLIENT_H
#define TESTS_SUPPORT_CLIENT_H

#include <stddef.h>
#include <stdint.h>

struct client_reply {
    int status;  /* 0: no whole answer came */
    char *bytes; /* all that came; owned */
    size_t count, capacity;
    const char *body;   /* in bytes, terminated; chunks as they came */
    uint64_t *event_ns; /* of a stream: when each `data: {` was there; owned */
    size_t event_count, event_capacity;
};

struct client_call {
    uint16_t port; /* of 127.0.0.1 */
    const char *key;
    const char *method, *path;
    const char *body; /* JSON, or NULL */
};
/* 1 when a whole answer came, whatever its status. The caller releases the reply in every case. */
int client_ask(const struct client_call *call, struct client_reply *reply_out);
void client_reply_release(struct client_reply *reply);

#endif
