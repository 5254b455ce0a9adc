/* tools/daemon_http.h - the daemon's settings as those of its HTTP side.
 *
 * Responsible for: keys, names of hosts, the model's name, one log line for each refusal.
 * Not responsible for: HTTP (http.h), reading settings (config.h) and keys (daemon_key.h).
 *
 * Threads: one owner; log lines from any.
 * Units: none.
 */
#ifndef TOOLS_DAEMON_HTTP_H
#define TOOLS_DAEMON_HTTP_H

#include "tools/config.h"
#include "tools/daemon_key.h"
#include "tools/daemon_listen.h"
#include "tools/serve.h"

struct daemon_http;
/* All of it outlives the result. */
struct daemon_http_settings {
    struct serve *serve;
    const struct config *config;
    const struct daemon_keys *keys;
    const struct daemon_listen *listen;
    const struct kv_clock *clock;
    const struct kv_alloc *alloc;
    void (*log)(void *context, const char *line); /* any thread */
};
/* Says in the log where it listens. INVALID (--hosts), IO (the address), NOMEM. */
enum kv_err daemon_http_open(const struct daemon_http_settings *settings,
                             struct daemon_http **http_out, struct kv_diag *diag);
/* http_close; NULL is allowed. */
void daemon_http_close(struct daemon_http *http);

#endif
