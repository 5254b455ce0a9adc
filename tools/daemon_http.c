/* tools/daemon_http.c - the daemon's settings as those of its HTTP side.
 *
 * Responsible for: see daemon_http.h.
 * Not responsible for: when it is opened and closed (coldplaned.c).
 */
#include "tools/daemon_http.h"

#include "tools/http.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { HOSTS_MAX = 32, NAME_BYTES = 256, LINE_BYTES = 1024 };

_Static_assert((int)CONFIG_REQUESTS_MAX <= (int)HTTP_CONNECTIONS_MAX, "a request has a connection");

struct daemon_http {
    struct daemon_http_settings settings;
    struct http *http;
    struct http_key *keys;
    char hosts[CONFIG_PATH_BYTES];
    const char *names[HOSTS_MAX];
    size_t name_count;
    char model[NAME_BYTES];
};

static void hear(void *context, const char *request_id, int status, const char *said) {
    struct daemon_http *http = context;
    char line[LINE_BYTES];
    snprintf(line, sizeof line, "refused request=%s status=%d %s", request_id, status, said);
    http->settings.log(NULL, line);
}

/* The file's name without folder and ending: what clients are to call it. */
static void name_model(struct daemon_http *http) {
    const char *path = http->settings.config->model;
    const char *slash = strrchr(path, '/');
    const char *name = slash != NULL ? slash + 1 : path;
    size_t bytes = strlen(name);
    static const char ending[] = ".gguf";
    if (bytes > sizeof ending - 1 && strcmp(name + bytes - (sizeof ending - 1), ending) == 0)
        bytes -= sizeof ending - 1;
    snprintf(http->model, sizeof http->model, "%.*s", (int)bytes, name);
}

static enum kv_err split_hosts(struct daemon_http *http, struct kv_diag *diag) {
    const char *hosts = http->settings.config->hosts;
    char *rest = http->hosts, *name = NULL;
    if (hosts == NULL)
        return KV_OK;
    snprintf(http->hosts, sizeof http->hosts, "%s", hosts);
    while ((name = strsep(&rest, ",")) != NULL) {
        name += strspn(name, " ");
        name[strcspn(name, " ")] = 0;
        if (*name == 0)
            continue;
        if (http->name_count == HOSTS_MAX || strlen(name) >= HTTP_HOST_BYTES)
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "--hosts: at most %d names of less than %d bytes", HOSTS_MAX,
                               HTTP_HOST_BYTES);
        http->names[http->name_count++] = name;
    }
    return KV_OK;
}

static enum kv_err take_keys(struct daemon_http *http, struct kv_diag *diag) {
    const struct daemon_keys *keys = http->settings.keys;
    http->keys = kv_alloc_zeroed(http->settings.alloc, keys->count + 1, sizeof *http->keys);
    if (http->keys == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu keys", keys->count);
    for (size_t i = 0; i < keys->count; i++) {
        http->keys[i].text = keys->items[i].text;
        memcpy(http->keys[i].owner, keys->items[i].owner, sizeof http->keys[i].owner);
    }
    return KV_OK;
}

static enum kv_err listen_now(struct daemon_http *http, struct kv_diag *diag) {
    const struct daemon_http_settings *settings = &http->settings;
    char line[LINE_BYTES];
    struct http_options options = {.serve = settings->serve,
                                   .alloc = settings->alloc,
                                   .clock = settings->clock,
                                   .address = settings->listen->address,
                                   .port = settings->listen->port,
                                   .keys = http->keys,
                                   .key_count = settings->keys->count,
                                   .names = http->names,
                                   .name_count = http->name_count,
                                   .model = http->model,
                                   .sampler = settings->config->sampler,
                                   .tokens_max = settings->config->tokens_max,
                                   .seed = kv_clock_wall_ns(settings->clock),
                                   .log = hear,
                                   .context = http};
    http_limits_usual(&options.limits);
    enum kv_err err = http_open(&options, &http->http, diag);
    if (err != KV_OK)
        return err;
    snprintf(line, sizeof line, "http address=%s port=%u model=%s keys=%zu seed=%" PRIu64,
             options.address, http_port(http->http), http->model, options.key_count, options.seed);
    settings->log(NULL, line);
    return KV_OK;
}

enum kv_err daemon_http_open(const struct daemon_http_settings *settings,
                             struct daemon_http **http_out, struct kv_diag *diag) {
    struct daemon_http *http = kv_alloc_zeroed(settings->alloc, 1, sizeof *http);
    if (http == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for HTTP");
    http->settings = *settings;
    name_model(http);
    enum kv_err err = split_hosts(http, diag);
    if (err == KV_OK)
        err = take_keys(http, diag);
    if (err == KV_OK)
        err = listen_now(http, diag);
    if (err == KV_OK)
        *http_out = http;
    else
        daemon_http_close(http);
    return err;
}

void daemon_http_close(struct daemon_http *http) {
    if (http == NULL)
        return;
    http_close(http->http);
    const struct kv_alloc *alloc = http->settings.alloc;
    kv_alloc_release(alloc, http->keys);
    kv_alloc_release(alloc, http);
}
