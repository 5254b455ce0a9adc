/* tests/support_http.h - the HTTP side over a fake service, and a client that speaks HTTP.
 *
 * Responsible for: serving, requests over a socket, answers cut into status, headers and body,
 * chunks joined.
 * Not responsible for: the fake (support_http_serve.h), what a test expects.
 *
 * Threads: a world and a connection have one owner.
 * Units: bytes, nanoseconds.
 */
#ifndef TESTS_SUPPORT_HTTP_H
#define TESTS_SUPPORT_HTTP_H

#include "tests/support_http_serve.h"
#include "tools/http.h"

enum { HTTP_REPLY_BYTES = 8 << 20 };

struct http_world {
    struct serve serve;
    struct http_options options;
    struct http_key keys[2];
    struct http *http;
    /* The newest answer. */
    char reply[HTTP_REPLY_BYTES];
    size_t reply_bytes;
    int status;
    char *headers, *body; /* in reply; body terminated, chunks joined */
    size_t body_bytes;
    char refusal[256];
};

#define HTTP_KEY_A "key-of-the-first-owner"
#define HTTP_KEY_B "key-of-the-second-owner"

/* cmocka set-up and tear-down: *state is a struct http_world that is being served. */
int support_http_set_up(void **state);
int support_http_tear_down(void **state);
/* Serves anew with the options as they are now. */
void support_http_again(struct http_world *world);
void support_http_fill(struct http_world *world); /* options of set-up; nothing is served */

/* A connection of a client; fails the test when there is none. */
int support_http_connect(const struct http_world *world);
void support_http_send(int socket, const char *bytes, size_t count);
/* One answer, to its end; fails the test on bytes that are none. 0 when the connection ended before
 * the first byte. */
int support_http_receive(struct http_world *world, int socket);
/* Bytes as they come, at least one; 0 at the end. */
size_t support_http_some(int socket, char *out, size_t capacity);

/* One request on a connection of its own. `headers` are whole lines, NULL for the usual ones (host,
 * key A, type). Returns the status. */
int support_http_get(struct http_world *world, const char *path);
int support_http_post(struct http_world *world, const char *path, const char *json);
int support_http_call(struct http_world *world, const char *method, const char *path,
                      const char *headers, const char *body);
/* The value of a header of the newest answer, or NULL. */
const char *support_http_header(struct http_world *world, const char *name, char out[256]);

#endif
