/* tests/support_daemon.c - coldplaned as a process, and clients that are not waited for.
 *
 * Responsible for: the contract of support_daemon.h. It is ready when it says so as it would to
 * systemd.
 * Not responsible for: HTTP.
 */
#include "tests/support_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ARGS_MAX = 32 };

static int code_of(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int wait_for(pid_t pid) {
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return code_of(status);
}

/* Where the daemon tells that it is ready. */
static int listen_for_ready(const struct cli *cli, char path[TESTING_PATH_BYTES + 16]) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(path, TESTING_PATH_BYTES + 16, "%s/notify", cli->home);
    unlink(path);
    assert_true(strlen(path) < sizeof address.sun_path);
    memcpy(address.sun_path, path, strlen(path) + 1);
    int listener = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_true(listener >= 0);
    assert_int_equal(bind(listener, (const struct sockaddr *)&address, sizeof address), 0);
    return listener;
}

static int await_ready(int listener, pid_t pid) {
    char said[64] = "";
    int handle = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd waits[2] = {{.fd = listener, .events = POLLIN}, {.fd = handle, .events = POLLIN}};
    assert_true(handle >= 0);
    assert_true(poll(waits, 2, CLI_SECONDS_MAX * 1000) > 0);
    close(handle);
    if ((waits[0].revents & POLLIN) == 0)
        return 0;
    assert_true(recv(listener, said, sizeof said - 1, 0) > 0);
    assert_string_equal(said, "READY=1");
    return 1;
}

static _Noreturn void become(const char *program, const char *const *argv, int out, int err) {
    int in = open("/dev/null", O_RDONLY);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    alarm(CLI_SECONDS_MAX);
    execv(program, (char **)argv);
    _exit(126);
}

int daemon_start(struct cli *cli, struct daemon_run *run, int *code_out, const char *flag, ...) {
    char program[TESTING_PATH_BYTES], notify[TESTING_PATH_BYTES + 16];
    const char *argv[ARGS_MAX + 1] = {"coldplaned", "--listen", "127.0.0.1:0"};
    int argc = 3;
    va_list list;
    va_start(list, flag);
    for (const char *at = flag; at != NULL; at = va_arg(list, const char *)) {
        assert_true(argc < ARGS_MAX);
        argv[argc++] = at;
    }
    va_end(list);
    cli_program("coldplaned", program);
    if (run->program != NULL)
        snprintf(program, sizeof program, "%s", run->program);
    int listener = listen_for_ready(cli, notify);
    snprintf(run->log, sizeof run->log, "%s/daemon.log", cli->home);
    int log = open(run->log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    run->pid = fork();
    assert_true(run->pid >= 0);
    if (run->pid == 0) {
        setenv("NOTIFY_SOCKET", notify, 1);
        become(program, argv, log, log);
    }
    close(log);
    int ready = await_ready(listener, run->pid);
    close(listener);
    if (ready)
        return 1;
    int code = wait_for(run->pid);
    run->pid = 0;
    if (code_out != NULL)
        *code_out = code;
    return 0;
}

int daemon_end(struct daemon_run *run, int signal) {
    assert_int_equal(kill(run->pid, signal), 0);
    int code = wait_for(run->pid);
    run->pid = 0;
    return code;
}

int daemon_said(const struct daemon_run *run, const char *text) {
    static char log[CLI_OUTPUT_BYTES];
    FILE *file = fopen(run->log, "re");
    assert_non_null(file);
    size_t bytes = fread(log, 1, sizeof log - 1, file);
    log[bytes] = 0;
    fclose(file);
    return strstr(log, text) != NULL;
}

pid_t daemon_client(int *output_out, const char *argument, ...) {
    char program[TESTING_PATH_BYTES];
    const char *argv[ARGS_MAX + 1] = {"coldplane"};
    int argc = 1, ends[2];
    va_list list;
    va_start(list, argument);
    for (const char *at = argument; at != NULL; at = va_arg(list, const char *)) {
        assert_true(argc < ARGS_MAX);
        argv[argc++] = at;
    }
    va_end(list);
    cli_program("coldplane", program);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int nowhere = open("/dev/null", O_WRONLY);
        become(program, argv, output_out != NULL ? ends[1] : nowhere, nowhere);
    }
    close(ends[1]);
    if (output_out != NULL)
        *output_out = ends[0];
    else
        close(ends[0]);
    return pid;
}

int daemon_client_end(pid_t pid) {
    return wait_for(pid);
}
