/* tests/support_serve.c - a service for many threads over a tiny model.
 *
 * Responsible for: the contract of support_serve.h.
 * Not responsible for: HTTP, sockets.
 */
#include "tests/support_serve.h"

#include "tests/support_tiny_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int serving_set_up(void **state) {
    struct serving *serving = calloc(1, sizeof *serving);
    struct tiny_model_options options = tiny_model_default();
    testing_temp_dir(serving->home);
    snprintf(serving->store, sizeof serving->store, "%s/store", serving->home);
    snprintf(serving->model, sizeof serving->model, "%s/tiny.gguf", serving->home);
    tiny_model_write(&options, serving->model);
    service_settings_usual(&serving->settings);
    serving->settings.model_path = serving->model;
    serving->settings.store_dir = serving->store;
    serving->settings.threads = 1;
    serving->settings.slot_budget_bytes = 16 << 20;
    serving->settings.reserve_slots = 16;
    serving->settings.poison_free_slots = 1;
    serving->settings.shuffle_seed = testing_seed("shuffle", 7);
    serving->serve_settings =
        (struct serve_settings){.requests_max = 64, .wait_ns = 60000000000, .tokens_max = 32};
    *state = serving;
    return 0;
}

int serving_tear_down(void **state) {
    struct serving *serving = *state;
    serving_close(serving);
    free(serving);
    return 0;
}

void serving_open(struct serving *serving) {
    enum kv_err err = service_open(&serving->settings, &serving->service, &serving->diag);
    if (err == KV_OK)
        err =
            serve_open(serving->service, &serving->serve_settings, &serving->serve, &serving->diag);
    if (err != KV_OK)
        fail_msg("serve_open: %s", serving->diag.text);
}

void serving_close(struct serving *serving) {
    serve_close(serving->serve);
    service_close(serving->service);
    serving->serve = NULL;
    serving->service = NULL;
}

struct serve_request serving_request(struct serving_chat *chat, const char *session,
                                     uint32_t tokens_max) {
    for (size_t i = 0; i < chat->count; i++)
        chat->messages[i] =
            (struct template_message){i % 2 == 0 ? TEMPLATE_USER : TEMPLATE_ASSISTANT,
                                      chat->texts[i], strlen(chat->texts[i])};
    return (struct serve_request){.request_id = "test",
                                  .session = session,
                                  .messages = chat->messages,
                                  .message_count = chat->count,
                                  .tokens_max = tokens_max,
                                  .sampler = {0.0f, 1.0f, 50, 1},
                                  .deadline_ns = UINT64_MAX};
}
