/* tools/control.c - commands of others in the daemon.
 *
 * Responsible for: the listening socket, one thread for each client, stopping.
 * Not responsible for: the other side (control_ask.c).
 */
#include "tools/control.h"

#include "tools/control_wire.h"
#include "tools/relay.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t second_ns = 1000000000;
enum { HEAD_WAIT_SECONDS = 5 };

struct control {
    struct control_settings settings;
    int listener, over; /* an eventfd */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t gone;
    struct client *clients;
    uint32_t count;
    int stopping;
};

struct client {
    struct control *control;
    struct client *next;
    int socket;
    int spare; /* came in beyond CONTROL_CLIENTS_MAX */
    pid_t pid;
    int streams[CONTROL_WIRE_STREAMS];
    char *texts; /* COLDPLANE_HOME, then the arguments */
    char *argv[CONTROL_TEXTS_MAX + 1];
    uint32_t text_count;
};

/* --- one client */

static void say(struct control *control, const char *what, const char *more) {
    char line[512];
    if (control->settings.log == NULL)
        return;
    snprintf(line, sizeof line, "control %s %s", what, more);
    control->settings.log(control->settings.log_context, line);
}

static int may_ask(struct client *client) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(client->socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return 0;
    client->pid = peer.pid;
    return peer.uid == 0 || peer.uid == geteuid();
}

static int get_head(struct client *client, uint8_t head[CONTROL_WIRE_HEAD_BYTES]) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof client->streams)];
    } control;
    struct iovec piece = {head, CONTROL_WIRE_HEAD_BYTES};
    struct msghdr message = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    if (recvmsg(client->socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) !=
        CONTROL_WIRE_HEAD_BYTES)
        return 0;
    const struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    if (part == NULL || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
        return 0;
    size_t bytes = part->cmsg_len - CMSG_LEN(0);
    if (bytes > sizeof client->streams)
        bytes = sizeof client->streams;
    memcpy(client->streams, CMSG_DATA(part), bytes);
    return bytes == sizeof client->streams;
}

/* 0 for what is none of our heads, or too much. */
static int get_texts(struct client *client, const uint8_t head[CONTROL_WIRE_HEAD_BYTES]) {
    const struct kv_alloc *alloc = client->control->settings.alloc;
    uint32_t count = kv_get_u32(head + 8), bytes = kv_get_u32(head + 12);
    if (kv_get_u32(head) != CONTROL_WIRE_MAGIC || kv_get_u32(head + 4) != CONTROL_WIRE_VERSION ||
        count < 2 || count > CONTROL_TEXTS_MAX || bytes == 0 || bytes > CONTROL_BYTES_MAX)
        return 0;
    client->texts = kv_alloc_zeroed(alloc, bytes, 1);
    if (client->texts == NULL || !control_wire_get(client->socket, client->texts, bytes) ||
        client->texts[bytes - 1] != 0)
        return 0;
    char *at = client->texts;
    for (; client->text_count < count && at < client->texts + bytes; client->text_count++) {
        client->argv[client->text_count] = at;
        at += strlen(at) + 1;
    }
    return client->text_count == count && at == client->texts + bytes;
}

static int run_command(struct client *client) {
    const struct control_settings *settings = &client->control->settings;
    struct cmd cmd = {.program = "coldplaned",
                      .host = settings->host,
                      .home = client->argv[0],
                      .asker = client->pid,
                      .spare = client->spare,
                      .alloc = settings->alloc,
                      .clock = settings->clock,
                      .folder = client->streams[3],
                      .signals = client->socket};
    int code = CMD_EXIT_DEVICE;
    cmd.in = fdopen(client->streams[0], "r");
    cmd.direct[0] = fdopen(client->streams[1], "w");
    cmd.direct[1] = fdopen(client->streams[2], "w");
    cmd.relay = relay_open(settings->alloc, client->streams[1], client->streams[2], client->socket);
    if (cmd.in != NULL && cmd.direct[0] != NULL && cmd.direct[1] != NULL && cmd.relay != NULL) {
        cmd.out = relay_output(cmd.relay);
        cmd.err = relay_error(cmd.relay);
        code = cmd_main(&cmd, (int)client->text_count - 1, client->argv + 1);
    }
    relay_close(cmd.relay);
    FILE *streams[3] = {cmd.in, cmd.direct[0], cmd.direct[1]};
    for (int i = 0; i < 3; i++) {
        if (streams[i] != NULL) {
            fclose(streams[i]);
            client->streams[i] = -1;
        }
    }
    return code;
}

static void answer(int socket, uint32_t code) {
    uint8_t bytes[CONTROL_WIRE_ANSWER_BYTES];
    kv_put_u32(bytes, CONTROL_WIRE_MAGIC);
    kv_put_u32(bytes + 4, code);
    (void)control_wire_put(socket, bytes, sizeof bytes);
}

static void client_drop(struct client *client) {
    struct control *control = client->control;
    pthread_mutex_lock(&control->lock);
    struct client **at = &control->clients;
    while (*at != client)
        at = &(*at)->next;
    *at = client->next;
    pthread_mutex_unlock(&control->lock);
    close(client->socket);
    for (int i = 0; i < CONTROL_WIRE_STREAMS; i++)
        if (client->streams[i] >= 0)
            close(client->streams[i]);
    kv_alloc_release(control->settings.alloc, client->texts);
    kv_alloc_release(control->settings.alloc, client);
    pthread_mutex_lock(&control->lock);
    control->count--;
    pthread_cond_broadcast(&control->gone);
    pthread_mutex_unlock(&control->lock);
}

static void *client_main(void *context) {
    struct client *client = context;
    uint8_t head[CONTROL_WIRE_HEAD_BYTES] = {0};
    /* Nobody holds a place here without saying what for. */
    const struct timeval patience = {HEAD_WAIT_SECONDS, 0};
    (void)setsockopt(client->socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (may_ask(client) && get_head(client, head) && get_texts(client, head)) {
        const char *name = client->text_count > 2 ? client->argv[2] : "";
        int code = run_command(client);
        (void)serve_settle(client->control->settings.serve, UINT64_MAX);
        char text[64];
        snprintf(text, sizeof text, "%.32s exit=%d", name, code);
        say(client->control, "command", text);
        answer(client->socket, (uint32_t)code);
    } else {
        if (kv_get_u32(head) == CONTROL_WIRE_MAGIC && kv_get_u32(head + 4) != CONTROL_WIRE_VERSION)
            answer(client->socket, CONTROL_WIRE_OTHER);
        say(client->control, "refused", "somebody who said nothing that is understood");
    }
    client_drop(client);
    return NULL;
}

/* --- listening */

static void begin_client(struct control *control, int socket) {
    struct client *client = kv_alloc_zeroed(control->settings.alloc, 1, sizeof *client);
    pthread_attr_t detached;
    pthread_t thread;
    if (client == NULL) {
        close(socket);
        return;
    }
    client->control = control;
    client->socket = socket;
    memset(client->streams, -1, sizeof client->streams);
    pthread_mutex_lock(&control->lock);
    int stopping = control->stopping;
    int taken = !stopping && control->count < CONTROL_CLIENTS_MAX + CONTROL_CLIENTS_SPARE;
    if (taken) {
        client->spare = control->count >= CONTROL_CLIENTS_MAX;
        client->next = control->clients;
        control->clients = client;
        control->count++;
    }
    pthread_mutex_unlock(&control->lock);
    if (!taken) {
        if (!stopping)
            answer(socket, CONTROL_WIRE_FULL);
        close(socket);
        say(control, "refused", stopping ? "one who came to the end" : "one more than are let in");
        kv_alloc_release(control->settings.alloc, client);
        return;
    }
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, client_main, client) != 0)
        client_drop(client);
    pthread_attr_destroy(&detached);
}

static void *listen_main(void *context) {
    struct control *control = context;
    struct pollfd waits[2] = {{.fd = control->over, .events = POLLIN},
                              {.fd = control->listener, .events = POLLIN}};
    for (;;) {
        if (poll(waits, 2, -1) < 0)
            continue;
        if (waits[0].revents != 0)
            return NULL;
        int socket = accept4(control->listener, NULL, NULL, SOCK_CLOEXEC);
        if (socket >= 0)
            begin_client(control, socket);
    }
}

/* What an earlier daemon left is ours to replace: we hold the store's lock. */
static enum kv_err make_listener(struct control *control, struct kv_diag *diag) {
    const char *store = control->settings.host->config->store;
    struct sockaddr_un address;
    int folder = control_wire_address(store, &address);
    int error = 0;
    if (folder < 0)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "store %s", store);
    control->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    (void)unlinkat(folder, "control", 0);
    if (control->listener < 0 || fchmod(control->listener, 0600) != 0 ||
        bind(control->listener, (const struct sockaddr *)&address, sizeof address) != 0 ||
        fchmodat(folder, "control", 0600, 0) != 0 || listen(control->listener, 16) != 0)
        error = errno;
    close(folder);
    return error == 0 ? KV_OK
                      : kv_diag_errno(diag, KV_ERR_IO, error, "control socket %s/control", store);
}

enum kv_err control_open(const struct control_settings *settings, struct control **control_out,
                         struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    pthread_condattr_t monotonic;
    struct control *control = kv_alloc_zeroed(settings->alloc, 1, sizeof *control);
    if (control == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the control socket");
    control->settings = *settings;
    control->listener = -1;
    pthread_mutex_init(&control->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&control->gone, &monotonic);
    pthread_condattr_destroy(&monotonic);
    control->over = eventfd(0, EFD_CLOEXEC);
    if (control->over < 0)
        KV_TRY(kv_diag_errno(diag, KV_ERR_IO, errno, "control socket"));
    KV_TRY(make_listener(control, diag));
    if (pthread_create(&control->thread, NULL, listen_main, control) != 0)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "cannot start the control thread"));
    *control_out = control;
    control = NULL;
done:
    if (control != NULL)
        control->stopping = 1;
    control_close(control);
    return err;
}

int control_stop(struct control *control, uint64_t wait_ns) {
    const uint64_t one = 1;
    uint64_t until_ns = kv_clock_now_ns(kv_clock_system()) + wait_ns;
    const struct timespec until = {(time_t)(until_ns / second_ns), (long)(until_ns % second_ns)};
    int late = 0;
    pthread_mutex_lock(&control->lock);
    int first = !control->stopping;
    control->stopping = 1;
    for (const struct client *client = control->clients; client != NULL; client = client->next)
        (void)shutdown(client->socket, SHUT_RD);
    pthread_mutex_unlock(&control->lock);
    if (first && write(control->over, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(control->thread, NULL);
    pthread_mutex_lock(&control->lock);
    while (control->count > 0 && !late)
        late = pthread_cond_timedwait(&control->gone, &control->lock, &until) != 0;
    int all = control->count == 0;
    pthread_mutex_unlock(&control->lock);
    return all;
}

uint32_t control_clients(struct control *control) {
    if (control == NULL)
        return 0;
    pthread_mutex_lock(&control->lock);
    uint32_t count = control->count;
    pthread_mutex_unlock(&control->lock);
    return count;
}

void control_close(struct control *control) {
    if (control == NULL)
        return;
    assert(control->stopping && control->count == 0); /* its threads use what goes now */
    if (control->listener >= 0) {
        struct sockaddr_un address;
        int folder = control_wire_address(control->settings.host->config->store, &address);
        if (folder >= 0) {
            (void)unlinkat(folder, "control", 0);
            close(folder);
        }
        close(control->listener);
    }
    if (control->over >= 0)
        close(control->over);
    pthread_cond_destroy(&control->gone);
    pthread_mutex_destroy(&control->lock);
    kv_alloc_release(control->settings.alloc, control);
}
