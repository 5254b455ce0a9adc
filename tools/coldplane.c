/* tools/coldplane.c - the command line program.
 *
 * Responsible for: main: the process, its streams.
 * Not responsible for: everything else (cmd_main.c).
 */
#include "tools/cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

/* A standard descriptor that the caller closed would be given to the next file that is opened, so
 * that answers land in the store's files. Each gets a stand-in on which its use fails: input only
 * writes, output only reads. */
static void hold_standard_descriptors(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
            return;
}

int main(int argc, char **argv) {
    struct cmd cmd = {.program = "coldplane",
                      .alloc = kv_alloc_system(),
                      .clock = kv_clock_system(),
                      .folder = AT_FDCWD,
                      .in = stdin,
                      .out = stdout,
                      .err = stderr,
                      .signals = -1};
    hold_standard_descriptors();
    setlocale(LC_CTYPE, "C.UTF-8");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit of files is a full disk */
    int code = cmd_main(&cmd, argc, argv);
    if (cmd.signals >= 0)
        close(cmd.signals);
    return code;
}
