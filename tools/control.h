/* tools/control.h - commands of others in the daemon, over a socket beside the store.
 *
 * Responsible for: the socket STORE/control (0600, peers of the same user or root), taking argument
 * lists with the standard streams and folder of whoever asks, running each on a thread of its own,
 * its exit code; asking from the other side.
 * Not responsible for: what a command does (cmd_main.c, cmd_host.h).
 *
 * The stream: a head of 16 bytes (magic, version, count of texts, their bytes), then COLDPLANE_HOME
 * and the arguments, each ended by a zero byte; with the head travel four descriptors: standard
 * input, output, error, folder. Then 'I' for a ctrl-C, 'T' for leave; closing it leaves too. The
 * answer is 8 bytes: magic, exit code, or that no more are taken. Words are little-endian.
 *
 * Threads: control_open and control_close by one owner; control_ask by any.
 * Units: bytes.
 */
#ifndef TOOLS_CONTROL_H
#define TOOLS_CONTROL_H

#include "tools/cmd.h"
#include "tools/serve.h"

/* Some more are let in for what tells who is at work. */
enum { CONTROL_CLIENTS_MAX = 64, CONTROL_CLIENTS_SPARE = 8 };
enum { CONTROL_TEXTS_MAX = 256, CONTROL_BYTES_MAX = 8 << 20 };

struct control;
struct control_settings {
    struct serve *serve;
    const struct cmd_host *host; /* borrowed until control_close */
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    void (*log)(void *context, const char *line); /* may be NULL */
    void *log_context;
};
/* IO (the socket cannot be made), NOMEM. */
enum kv_err control_open(const struct control_settings *settings, struct control **control_out,
                         struct kv_diag *diag);
/* Nobody else is let in, those at work are asked to leave; 1 when all have within `wait_ns`. */
int control_stop(struct control *control, uint64_t wait_ns);
/* Commands at work, whoever has not said yet what for among them. Any thread; NULL: 0. */
uint32_t control_clients(struct control *control);
void control_close(struct control *control); /* after a stop that returned 1; NULL is allowed */

/* Has the daemon that holds config->store run the arguments; INT, TERM and HUP are handed on.
 * NOT_FOUND: there is none. BUSY: it takes no more. VERSION: it does not understand this program.
 * IO: it ended meanwhile. CANCELLED: it does not answer: TERM and HUP after some seconds, and
 * three INTs at once, leave it alone with the command. */
enum kv_err control_ask(const struct config *config, int argc, char **argv, int *code_out,
                        struct kv_diag *diag);

#endif
