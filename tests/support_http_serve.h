/* tests/support_http_serve.h - a service that does as its prompt says.
 *
 * Responsible for: struct serve and what the HTTP side calls of tools/serve.h, as a fake, so that
 * it is tested alone.
 * Not responsible for: HTTP (support_http.h).
 *
 * The fake obeys the last message, or the prompt:
 *     say TEXT      one piece for each word
 *     count N       N pieces
 *     wait          until the client is gone, or the deadline
 *     hold          the same behind one piece
 *     fail NAME     an error, by its kv_err_name
 *     late NAME     one piece, then that error
 *     split         a character of four bytes over two tokens
 *     nothing       an answer without a piece
 *
 * Threads: any.
 * Units: none.
 */
#ifndef TESTS_SUPPORT_HTTP_SERVE_H
#define TESTS_SUPPORT_HTTP_SERVE_H

#include "tests/testing.h"
#include "tools/serve.h"

struct serve {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Of the newest turn. */
    struct serve_request request; /* pointers are gone */
    char text[256], session[IMAGE_NAME_BYTES_MAX + 1], stop[64];
    uint32_t turns, running, cancelled, stopped_by_piece;
    int is_ready;
    /* What serve_picture gives. */
    const struct serve_picture *picture;
};

/* Waits until `count` of the fake is at least `wanted`; fails the test after ten seconds. */
void support_http_await(struct serve *serve, const uint32_t *count, uint32_t wanted);

#endif
