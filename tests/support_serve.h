/* tests/support_serve.h - a service for many threads over a tiny model.
 *
 * Responsible for: a folder with model and store, opening and closing the service and what serves
 * it, requests with a text each.
 * Not responsible for: what the answers should be.
 *
 * Threads: the main thread, but for serving_ask.
 * Units: as serve.h.
 */
#ifndef TESTS_SUPPORT_SERVE_H
#define TESTS_SUPPORT_SERVE_H

#include "tests/testing.h"
#include "tools/serve.h"

struct serving {
    char home[TESTING_PATH_BYTES];
    char store[TESTING_PATH_BYTES + 16], model[TESTING_PATH_BYTES + 16];
    struct service_settings settings;
    struct serve_settings serve_settings;
    struct service *service;
    struct serve *serve;
    struct kv_diag diag;
};

/* cmocka set-up and tear-down: *state is a struct serving, not open yet. */
int serving_set_up(void **state);
int serving_tear_down(void **state);
void serving_open(struct serving *serving);
void serving_close(struct serving *serving);

/* A request of `count` messages, user and assistant in turns, in session `session` (NULL: a new
 * one); temperature 0, no limits. */
enum { SERVING_MESSAGES_MAX = 16 };
struct serving_chat {
    const char *texts[SERVING_MESSAGES_MAX];
    size_t count;
    struct template_message messages[SERVING_MESSAGES_MAX];
};
struct serve_request serving_request(struct serving_chat *chat, const char *session,
                                     uint32_t tokens_max);

#endif
