/* tests/support_daemon.h - coldplaned as a process, and clients that are not waited for.
 *
 * Responsible for: starting it over a struct cli's home, knowing when it is ready, ending it,
 * starting the command line program beside the test.
 * Not responsible for: what they say.
 *
 * Threads: the main thread.
 * Units: none.
 */
#ifndef TESTS_SUPPORT_DAEMON_H
#define TESTS_SUPPORT_DAEMON_H

#include "tests/support_cli.h"

#include <sys/types.h>

struct daemon_run {
    pid_t pid;           /* 0: none */
    const char *program; /* NULL: the one that was built */
    char log[TESTING_PATH_BYTES + 32];
};

/* Flags up to NULL, added to --listen 127.0.0.1:0. 1 when it is ready; 0 when it ended before that,
 * with *code_out its exit code (may be NULL). */
int daemon_start(struct cli *cli, struct daemon_run *run, int *code_out, const char *flag, ...)
    __attribute__((sentinel));
/* Sends the signal and waits: exit code, or 128 + signal. */
int daemon_end(struct daemon_run *run, int signal);
/* 1 when the log holds the text. */
int daemon_said(const struct daemon_run *run, const char *text);

/* The command line program; arguments up to NULL. `output_out` NULL: its output is thrown away,
 * else a pipe with it, which the caller closes. */
pid_t daemon_client(int *output_out, const char *argument, ...) __attribute__((sentinel));
int daemon_client_end(pid_t pid); /* its exit code, or 128 + signal */

#endif
