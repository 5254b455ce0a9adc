/* tools/control_ask.c - asking the daemon that holds a store to run a command.
 *
 * Responsible for: sending arguments, streams and folder, handing signals on, waiting.
 * Not responsible for: printing: the daemon does, to the streams that were sent.
 */
#include "tools/control.h"
#include "tools/control_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

static const uint64_t second_ns = 1000000000;
/* Longer than a daemon that ends waits for its commands. */
enum { LEAVE_SECONDS = 10, PRESSES_MAX = 3, LOOK_AGAIN_MS = 100 };

/* -1 when nobody listens. */
static int reach(const char *store) {
    struct sockaddr_un address;
    int folder = control_wire_address(store, &address);
    if (folder < 0)
        return -1;
    int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (client >= 0 && connect(client, (const struct sockaddr *)&address, sizeof address) != 0) {
        close(client);
        client = -1;
    }
    close(folder);
    return client;
}

static int send_head(int client, const uint8_t head[CONTROL_WIRE_HEAD_BYTES], int folder) {
    int streams[CONTROL_WIRE_STREAMS] = {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO, folder};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof streams)];
    } control;
    struct iovec piece = {(void *)head, CONTROL_WIRE_HEAD_BYTES};
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof streams);
    memcpy(CMSG_DATA(part), streams, sizeof streams);
    return sendmsg(client, &message, MSG_NOSIGNAL) == CONTROL_WIRE_HEAD_BYTES;
}

static int send_texts(int client, const char *home, int argc, char **argv) {
    int good = control_wire_put(client, home, strlen(home) + 1);
    for (int i = 0; good && i < argc; i++)
        good = control_wire_put(client, argv[i], strlen(argv[i]) + 1);
    return good;
}

static int send_all(int client, const struct config *config, int argc, char **argv) {
    uint8_t head[CONTROL_WIRE_HEAD_BYTES];
    uint64_t bytes = strlen(config->home) + 1;
    for (int i = 0; i < argc; i++)
        bytes += strlen(argv[i]) + 1;
    int folder = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        folder = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    kv_put_u32(head, CONTROL_WIRE_MAGIC);
    kv_put_u32(head + 4, CONTROL_WIRE_VERSION);
    kv_put_u32(head + 8, (uint32_t)argc + 1);
    kv_put_u32(head + 12, (uint32_t)(bytes < CONTROL_BYTES_MAX ? bytes : CONTROL_BYTES_MAX + 1));
    int good = send_head(client, head, folder) && send_texts(client, config->home, argc, argv);
    if (folder >= 0)
        close(folder);
    return good;
}

static int take_signals(sigset_t *before_out) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &set, before_out) != 0)
        return -1;
    return signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

/* How long somebody has wanted to leave. */
struct leaving {
    uint64_t until_ns; /* 0: nobody does */
    uint64_t pressed_ns;
    int presses; /* of ctrl-C, each soon after the one before */
};

static void note_signal(struct leaving *leaving, int is_interrupt) {
    uint64_t now_ns = kv_clock_now_ns(kv_clock_system());
    if (!is_interrupt && leaving->until_ns == 0)
        leaving->until_ns = now_ns + LEAVE_SECONDS * second_ns;
    if (!is_interrupt)
        return;
    leaving->presses = now_ns - leaving->pressed_ns < second_ns ? leaving->presses + 1 : 1;
    leaving->pressed_ns = now_ns;
}

/* A daemon that has not answered may be held up for ever, by a disk or a debugger: then it is left
 * with the command, as when this program dies. */
static int may_leave(const struct leaving *leaving) {
    return leaving->presses >= PRESSES_MAX ||
           (leaving->until_ns != 0 && kv_clock_now_ns(kv_clock_system()) >= leaving->until_ns);
}

/* Until the answer is there; what the person at the terminal wants goes to the daemon. */
static enum kv_err await_answer(int client, int signals,
                                uint8_t answer[CONTROL_WIRE_ANSWER_BYTES]) {
    struct pollfd waits[2] = {{.fd = client, .events = POLLIN}, {.fd = signals, .events = POLLIN}};
    struct leaving leaving = {0};
    struct signalfd_siginfo info;
    for (;;) {
        if (poll(waits, 2, leaving.until_ns != 0 ? LOOK_AGAIN_MS : -1) < 0 && errno != EINTR)
            return KV_ERR_IO;
        while (signals >= 0 && read(signals, &info, sizeof info) == (ssize_t)sizeof info) {
            (void)send(client, info.ssi_signo == SIGINT ? "I" : "T", 1,
                       MSG_NOSIGNAL | MSG_DONTWAIT);
            note_signal(&leaving, info.ssi_signo == SIGINT);
        }
        if (waits[0].revents != 0)
            return control_wire_get(client, answer, CONTROL_WIRE_ANSWER_BYTES) &&
                           kv_get_u32(answer) == CONTROL_WIRE_MAGIC
                       ? KV_OK
                       : KV_ERR_IO;
        if (may_leave(&leaving))
            return KV_ERR_CANCELLED;
    }
}

/* The terminal as it was, where the daemon had it and can give it back no more. */
static void give_back(const struct termios *before, int is_terminal) {
    if (is_terminal && tcgetpgrp(STDIN_FILENO) == getpgrp())
        (void)tcsetattr(STDIN_FILENO, TCSANOW, before);
}

static enum kv_err no_answer(const struct config *config, enum kv_err err, struct kv_diag *diag) {
    if (err == KV_ERR_CANCELLED)
        return kv_diag_set(diag, err,
                           "the daemon that holds store %s has not answered; left it, and what it "
                           "was doing ends as if this program had died",
                           config->store);
    return kv_diag_set(diag, KV_ERR_IO,
                       "the daemon that holds store %s ended before the command did; see its log "
                       "and run the command again",
                       config->store);
}

enum kv_err control_ask(const struct config *config, int argc, char **argv, int *code_out,
                        struct kv_diag *diag) {
    uint8_t answer[CONTROL_WIRE_ANSWER_BYTES];
    sigset_t before;
    struct termios terminal;
    int client = reach(config->store);
    if (client < 0)
        return KV_ERR_NOT_FOUND;
    int is_terminal = tcgetattr(STDIN_FILENO, &terminal) == 0;
    int signals = take_signals(&before);
    /* Who is turned away may be told so before all was said. */
    (void)send_all(client, config, argc, argv);
    enum kv_err err = await_answer(client, signals, answer);
    close(client);
    if (err != KV_OK)
        give_back(&terminal, is_terminal);
    if (signals >= 0) {
        close(signals);
        (void)sigprocmask(SIG_SETMASK, &before, NULL);
    }
    if (err != KV_OK)
        return no_answer(config, err, diag);
    if (kv_get_u32(answer + 4) == CONTROL_WIRE_OTHER)
        return kv_diag_set(diag, KV_ERR_VERSION,
                           "the daemon that holds store %s is of another version than this "
                           "program; restart coldplaned",
                           config->store);
    if (kv_get_u32(answer + 4) == CONTROL_WIRE_FULL)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "the daemon that holds store %s lets nobody more in: %d commands are at "
                           "work or have not said what they want; run this again later",
                           config->store, CONTROL_CLIENTS_MAX + CONTROL_CLIENTS_SPARE);
    *code_out = (int)kv_get_u32(answer + 4);
    return KV_OK;
}
