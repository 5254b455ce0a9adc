/* tools/coldplaned.c - the daemon: one store, one engine, many clients.
 *
 * Responsible for: main: settings, what listens where, signals, log lines, the order of beginning
 * and ending, telling systemd.
 * Not responsible for: turns (serve.h), HTTP (daemon_http.h), commands of others (control.h), keys
 * (daemon_key.h).
 *
 * The first TERM or INT ends it: no new request is taken, answers under way may end within
 * stop-seconds, every session is made durable. A second one ends the answers at their next token.
 * A device that is lost ends it as TERM does, with an exit code that starts it again where systemd
 * watches: what was saved is safe.
 * A command that does not end is left behind with its session, which stays as it was last saved:
 * then the log names it, and the exit code is not 0.
 */
#include "tools/cmd.h"
#include "tools/control.h"
#include "tools/daemon_http.h"
#include "tools/daemon_key.h"
#include "tools/daemon_listen.h"
#include "tools/daemon_notify.h"
#include "tools/receipt_keep.h"
#include "tools/serve.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <locale.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

static const uint64_t second_ns = 1000000000;
enum { CONTROL_WAIT_SECONDS = 5 };

struct daemon {
    struct config config;
    struct cmd cmd;
    struct cmd_host host;
    struct service *service;
    struct serve *serve;
    struct control *control;
    struct daemon_listen listen;
    struct daemon_keys keys;
    struct daemon_http *http;
    char receipts_dir[CONFIG_PATH_BYTES + 16];
    struct receipt_keep keep;
    atomic_int lost;                   /* the device is; set by the thread that has found out */
    atomic_flag collecting, scrubbing; /* as in struct cmd_host */
};

/* --- log: whole lines, so that threads do not mix theirs */

static void log_line(void *context, const char *line) {
    char whole[1200], clean[1200];
    size_t used = 0;
    (void)context;
    snprintf(whole, sizeof whole, "coldplaned: %s", line);
    for (const char *at = whole; *at != 0 && used + 2 < sizeof clean; at++)
        clean[used++] = (unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at;
    clean[used++] = '\n';
    if (write(STDERR_FILENO, clean, used) < 0)
        return; /* nobody reads it any more */
}

static void log_text(const char *what, const char *text) {
    char line[1100];
    snprintf(line, sizeof line, "%s%s", what, text);
    log_line(NULL, line);
}

/* --- beginning */

static void on_changed(void *context, const char *name) {
    struct daemon *daemon = context;
    struct kv_diag diag = {""};
    enum kv_err err =
        name != NULL ? serve_note(daemon->serve, name, &diag) : serve_refresh(daemon->serve, &diag);
    if (err != KV_OK)
        log_text("sessions are not found by their text: ", diag.text);
}

static enum kv_err check(struct daemon *daemon, struct kv_diag *diag) {
    const struct config *config = &daemon->config;
    if (config->word_count > 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "%s: coldplaned takes no command; `coldplaned --help` lists its flags",
                           config->words[0]);
    enum kv_err err = config_check_flags(
        config, CONFIG_ENGINE | CONFIG_CREATE | CONFIG_TURN | CONFIG_WRITE | CONFIG_SERVE,
        "coldplaned", diag);
    if (err == KV_OK)
        err = daemon_listen_parse(config->listen, &daemon->listen, diag);
    if (err != KV_OK || daemon->listen.is_local)
        return err;
    if (!config->remote)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "--listen %s can be reached from other machines; add --remote when that "
                           "is meant",
                           config->listen);
    if (config->no_key)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "--no-key: not with --listen %s: without a key everybody could ask",
                           config->listen);
    return KV_OK;
}

static void on_lost(void *context) {
    struct daemon *daemon = context;
    daemon->lost = 1;
    log_line(NULL, "the device is lost");
    (void)kill(getpid(), SIGTERM);
}

static enum kv_err begin(struct daemon *daemon, struct kv_diag *diag) {
    struct config *config = &daemon->config;
    enum kv_err err =
        cmd_open_service(&daemon->cmd, CMD_CREATE, NULL, NULL, &daemon->service, diag);
    if (err != KV_OK)
        return err;
    service_on_lost(daemon->service, on_lost, daemon);
    daemon->keep = cmd_receipts(&daemon->cmd, daemon->receipts_dir);
    if (!config->no_key)
        err = daemon_keys_open(config->home, daemon->cmd.alloc, &daemon->keys, diag);
    if (err != KV_OK)
        return err;
    const struct serve_settings settings = {.requests_max = config->requests_max,
                                            .wait_ns = config->wait_seconds * second_ns,
                                            .tokens_max = config->tokens_max,
                                            .keep = &daemon->keep,
                                            .log = log_line,
                                            .log_text = config->log_text};
    err = serve_open(daemon->service, &settings, &daemon->serve, diag);
    if (err != KV_OK)
        return err;
    daemon->host = (struct cmd_host){.service = daemon->service,
                                     .serve = daemon->serve,
                                     .config = config,
                                     .changed = on_changed,
                                     .context = daemon,
                                     .control = &daemon->control,
                                     .collecting = &daemon->collecting,
                                     .scrubbing = &daemon->scrubbing};
    const struct control_settings control = {.serve = daemon->serve,
                                             .host = &daemon->host,
                                             .alloc = daemon->cmd.alloc,
                                             .clock = daemon->cmd.clock,
                                             .log = log_line};
    err = control_open(&control, &daemon->control, diag);
    if (err != KV_OK)
        return err;
    const struct daemon_http_settings http = {.serve = daemon->serve,
                                              .config = config,
                                              .keys = &daemon->keys,
                                              .listen = &daemon->listen,
                                              .clock = daemon->cmd.clock,
                                              .alloc = daemon->cmd.alloc,
                                              .log = log_line};
    return daemon_http_open(&http, &daemon->http, diag);
}

static void tell_begun(const struct daemon *daemon) {
    struct engine_model model;
    struct store_stats stats;
    char line[900];
    engine_model(service_engine(daemon->service), &model);
    store_stats_get(service_store(daemon->service), &stats);
    snprintf(line, sizeof line, "ready store=%.300s device=%.60s door=%s records=%" PRIu64,
             daemon->config.store, model.device_name, stats.door_name, stats.records);
    log_line(NULL, line);
    if (model.device_note[0] != 0)
        log_text("note ", model.device_note);
}

/* --- the end */

/* Looks for a second signal while the first one is obeyed. */
struct second_signal {
    struct serve *serve;
    int signals, over; /* `over` is an eventfd */
};

static void *watch_signals(void *context) {
    const struct second_signal *second = context;
    struct pollfd waits[2] = {{.fd = second->over, .events = POLLIN},
                              {.fd = second->signals, .events = POLLIN}};
    struct signalfd_siginfo info;
    for (;;) {
        if (poll(waits, 2, -1) < 0)
            continue;
        if (waits[0].revents != 0)
            return NULL;
        if (read(second->signals, &info, sizeof info) != (ssize_t)sizeof info)
            continue;
        log_line(NULL, "stopping at once");
        serve_hurry(second->serve);
    }
}

/* What a command waits for may never come, as with a pipe that nobody opens, nor the disk that
 * receipts go to: then the process ends around them, and says that not all of it is saved. */
static _Noreturn void leave_behind(const char *whom, enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK)
        log_text("", diag->text);
    log_text(whom, "; leaving without");
    _exit(cmd_exit_code(err != KV_OK ? err : KV_ERR_BUSY));
}

/* Ends the process when it would wait for ever. */
static void let_end(struct daemon *daemon, int alone, enum kv_err err, const struct kv_diag *diag) {
    int told =
        daemon->serve == NULL || serve_settle(daemon->serve, CONTROL_WAIT_SECONDS * second_ns);
    if (!told)
        log_line(NULL, "receipts of what was done last cannot be written down");
    if (!alone || !told)
        leave_behind(alone ? "receipts do not end" : "a command does not end", err, diag);
}

/* Returns what could not be made durable. */
static enum kv_err end(struct daemon *daemon, struct kv_diag *diag) {
    const uint64_t one = 1;
    struct second_signal second = {daemon->serve, daemon->cmd.signals, eventfd(0, EFD_CLOEXEC)};
    pthread_t thread;
    int watched = second.over >= 0 && pthread_create(&thread, NULL, watch_signals, &second) == 0;
    /* Commands save at their end, so they end before what is left is saved. */
    int alone = control_stop(daemon->control, CONTROL_WAIT_SECONDS * second_ns);
    enum kv_err err = serve_stop(daemon->serve, daemon->config.stop_seconds * second_ns, diag);
    daemon_http_close(daemon->http); /* answers that are ready go out */
    daemon->http = NULL;
    if (watched && write(second.over, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(thread, NULL);
    if (second.over >= 0)
        close(second.over);
    let_end(daemon, alone, err, diag);
    return err;
}

static void close_all(struct daemon *daemon) {
    daemon_http_close(daemon->http);
    control_close(daemon->control);
    serve_close(daemon->serve);
    service_close(daemon->service);
    daemon_keys_close(&daemon->keys);
}

/* --- main */

static void help(void) {
    printf("usage: coldplaned [flags]\n"
           "Holds one store and one engine and answers many clients: OpenAI's API over HTTP, and\n"
           "the commands of `coldplane` over the socket STORE/control.\n\nFlags:\n");
    config_help(CONFIG_COMMON | CONFIG_SERVE | CONFIG_ENGINE | CONFIG_CREATE | CONFIG_TURN |
                    CONFIG_WRITE,
                stdout);
    printf("\nSettings stand in COLDPLANE_HOME/config, too. The key for HTTP is in\n"
           "COLDPLANE_HOME/key and made at the first start; one key a line. TERM makes every\n"
           "session durable and ends with 0; with 3 when a command does not end within 5 s: its\n"
           "session stays as it was last saved, and the log names it.\n");
}

static void show_json(const struct config *config) {
    cJSON *result = cJSON_CreateObject();
    config_show_json(config, result);
    char *text = cJSON_Print(result);
    printf("%s\n", text != NULL ? text : "{}");
    cJSON_free(text);
    cJSON_Delete(result);
}

/* 1 when that was all that was wanted. */
static int explain(struct daemon *daemon) {
    struct config *config = &daemon->config;
    if (config->help)
        help();
    else if (config->show && config->json)
        show_json(config);
    else if (config->show)
        config_show(config, stdout);
    else if (config->version)
        (void)cmd_version(&daemon->cmd, NULL);
    return config->help || config->show || config->version;
}

static void await_signal(int signals) {
    struct pollfd waits = {.fd = signals, .events = POLLIN};
    struct signalfd_siginfo info;
    while (poll(&waits, 1, -1) < 0 || read(signals, &info, sizeof info) != (ssize_t)sizeof info)
        continue;
}

static enum kv_err run(struct daemon *daemon, struct kv_diag *diag) {
    enum kv_err err = check(daemon, diag);
    if (err != KV_OK)
        return err;
    cmd_take_signals(&daemon->cmd);
    err = begin(daemon, diag);
    if (err == KV_OK) {
        tell_begun(daemon);
        daemon_notify("READY=1");
        await_signal(daemon->cmd.signals);
        log_line(NULL, "stopping");
        daemon_notify("STOPPING=1");
        err = end(daemon, diag);
        if (daemon->lost)
            err = kv_diag_set(diag, KV_ERR_DEVICE,
                              "the device is lost; what was saved is safe: start again");
    } else {
        int alone = daemon->control == NULL ||
                    control_stop(daemon->control, CONTROL_WAIT_SECONDS * second_ns);
        let_end(daemon, alone, err, diag);
    }
    close_all(daemon);
    return err;
}

int main(int argc, char **argv) {
    const struct kv_alloc *alloc = kv_alloc_system();
    struct kv_diag diag = {""};
    struct daemon *daemon = kv_alloc_zeroed(alloc, 1, sizeof *daemon);
    if (daemon == NULL)
        return CMD_EXIT_DEVICE;
    setlocale(LC_CTYPE, "C.UTF-8");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit of files is a full disk */
    daemon->cmd = (struct cmd){.config = &daemon->config,
                               .program = "coldplaned",
                               .alloc = alloc,
                               .clock = kv_clock_system(),
                               .folder = AT_FDCWD,
                               .in = stdin,
                               .out = stdout,
                               .err = stderr,
                               .signals = -1};
    enum kv_err err = config_load(argc, argv, &daemon->config, &diag);
    if (err == KV_OK && !explain(daemon))
        err = run(daemon, &diag);
    if (err != KV_OK)
        log_text("", diag.text);
    else if (daemon->service != NULL)
        log_line(NULL, "stopped; every session is durable");
    kv_alloc_release(alloc, daemon);
    return cmd_exit_code(err);
}
