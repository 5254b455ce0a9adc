/* tools/http_guard.h - who may ask: the key, and the name that the client believes to talk to.
 *
 * Responsible for: comparing a bearer key with all keys in a time that depends on none of them; a
 * Host header that is ours, so that a web page whose name was made to point here gets nothing.
 * Not responsible for: making and keeping keys (tools/coldplaned.c).
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef TOOLS_HTTP_GUARD_H
#define TOOLS_HTTP_GUARD_H

#include <stddef.h>
#include <stdint.h>

enum { HTTP_KEY_BYTES_MAX = 256, HTTP_OWNER_BYTES = 16, HTTP_HOST_BYTES = 256 };

struct http_key {
    const char *text; /* 1 to HTTP_KEY_BYTES_MAX bytes */
    uint8_t owner[HTTP_OWNER_BYTES];
};

/* `authorization` is the header or NULL. 1 and the owner when it is `Bearer KEY` of one of them.
 * The time depends on the length of what was sent, the number of keys and nothing else. */
int http_guard_key(const struct http_key *keys, size_t count, const char *authorization,
                   uint8_t owner_out[HTTP_OWNER_BYTES]);

/* 1 when `host`, with or without a port (any: a tunnel changes it), is localhost, 127.0.0.1, [::1]
 * or one of `names`. Case does not matter; NULL and "" are refused. */
int http_guard_host(const char *host, const char *const *names, size_t count);

#endif
