/* tests/support_served.h - coldplaned as a child, and commands to it, for programs with threads.
 *
 * Responsible for: starting it on a free port over a folder of its own, knowing when it is ready,
 * ending it; running `coldplane` beside it and giving back what that said.
 * Not responsible for: tests with one thread (support_daemon.h); it never ends the program.
 *
 * Threads: served_start and served_end by one owner while nobody asks; served_command any.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_SERVED_H
#define TESTS_SUPPORT_SERVED_H

#include <stdint.h>
#include <sys/types.h>

struct cJSON;

enum { SERVED_ARGS_MAX = 48, SERVED_PATH_BYTES = 512 };

struct served {
    char home[SERVED_PATH_BYTES];       /* COLDPLANE_HOME; made by the caller */
    const char *flags[SERVED_ARGS_MAX]; /* beside --listen, up to NULL */
    pid_t pid;                          /* 0: not running */
    _Atomic uint16_t port;              /* another after a restart, which clients meet */
    char said[512];                     /* why it did not start: the end of its log */
};

/* 1 when it is ready. The log is home/daemon.log, appended. */
int served_start(struct served *served);
/* Sends the signal and waits; exit code, or 128 + signal. */
int served_end(struct served *served, int signal);

/* `coldplane ARGUMENTS… --json`, up to NULL: its exit code, 126 when it could not be run. The
 * document, NULL when it said none, is for cJSON_Delete. */
int served_command(const struct served *served, struct cJSON **document_out, const char *argument,
                   ...) __attribute__((sentinel));

#endif
