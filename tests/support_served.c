/* tests/support_served.c - coldplaned as a child, and commands to it, for programs with threads.
 *
 * Responsible for: see support_served.h.
 * Not responsible for: what either says.
 */
#include "tests/support_served.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { START_MS_MAX = 300000, LOG_BYTES = 1 << 16, SAID_BYTES = 1 << 22 };

extern char **environ;

/* build/CONFIG/tests/this → build/CONFIG/NAME */
static int find_program(const char *name, char out[SERVED_PATH_BYTES]) {
    ssize_t length = readlink("/proc/self/exe", out, SERVED_PATH_BYTES - 32);
    if (length <= 0)
        return 0;
    out[length] = 0;
    for (int i = 0; i < 2; i++) {
        char *slash = strrchr(out, '/');
        if (slash == NULL)
            return 0;
        *slash = 0;
    }
    snprintf(out + strlen(out), SERVED_PATH_BYTES - strlen(out), "/%s", name);
    return 1;
}

static int listen_for_ready(const struct served *served, char path[SERVED_PATH_BYTES]) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(path, SERVED_PATH_BYTES, "%.480s/notify", served->home);
    unlink(path);
    if (strlen(path) >= sizeof address.sun_path)
        return -1;
    memcpy(address.sun_path, path, strlen(path) + 1);
    int listener = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (listener >= 0 && bind(listener, (const struct sockaddr *)&address, sizeof address) == 0)
        return listener;
    if (listener >= 0)
        close(listener);
    return -1;
}

/* The environment with one more; made before the fork, since other threads may hold locks then. */
static char **environment_with(char **added) {
    size_t count = 0, extra = 0, used = 0;
    while (environ[count] != NULL)
        count++;
    while (added[extra] != NULL)
        extra++;
    char **all = calloc(count + extra + 1, sizeof *all);
    for (size_t i = 0; all != NULL && i < extra; i++)
        all[used++] = added[i];
    for (size_t i = 0; all != NULL && i < count; i++) {
        size_t taken = 0;
        for (size_t k = 0; k < extra; k++)
            taken |= strncmp(environ[i], added[k], strcspn(added[k], "=") + 1) == 0;
        if (!taken)
            all[used++] = environ[i];
    }
    return all;
}

struct start {
    const char *program;
    const char *const *argv;
    char **environment;
    int in, out, err;
};

/* It ends with its parent: a failed run leaves no daemon. */
static pid_t start_child(const struct start *start) {
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(start->in, STDIN_FILENO);
    dup2(start->out, STDOUT_FILENO);
    dup2(start->err, STDERR_FILENO);
    execve(start->program, (char **)start->argv, start->environment);
    _exit(126);
}

static int code_of(pid_t pid) {
    int status = 0;
    if (pid <= 0 || waitpid(pid, &status, 0) != pid)
        return 126;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void read_end(const char *path, char *out, size_t capacity) {
    out[0] = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    off_t size = lseek(file, 0, SEEK_END);
    off_t first = size > (off_t)capacity - 1 ? size - (off_t)capacity + 1 : 0;
    ssize_t got = pread(file, out, capacity - 1, first);
    out[got > 0 ? got : 0] = 0;
    close(file);
}

static int is_ready(int listener, pid_t pid) {
    char said[64] = "";
    int handle = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd waits[2] = {{.fd = listener, .events = POLLIN}, {.fd = handle, .events = POLLIN}};
    if (handle < 0)
        return 0;
    int got = poll(waits, 2, START_MS_MAX);
    close(handle);
    return got > 0 && (waits[0].revents & POLLIN) != 0 &&
           recv(listener, said, sizeof said - 1, 0) > 0 && strstr(said, "READY=1") != NULL;
}

/* The newest one that the log names. */
static uint16_t find_port(const char *log) {
    char text[LOG_BYTES];
    unsigned long port = 0;
    read_end(log, text, sizeof text);
    for (const char *at = text; (at = strstr(at, " port=")) != NULL; at++)
        port = strtoul(at + 6, NULL, 10);
    return port <= UINT16_MAX ? (uint16_t)port : 0;
}

int served_start(struct served *served) {
    char program[SERVED_PATH_BYTES], notify[SERVED_PATH_BYTES], log[SERVED_PATH_BYTES];
    char home_set[SERVED_PATH_BYTES + 32], notify_set[SERVED_PATH_BYTES + 32];
    const char *argv[SERVED_ARGS_MAX + 4] = {"coldplaned", "--listen", "127.0.0.1:0"};
    int argc = 3;
    for (int i = 0; i < SERVED_ARGS_MAX && served->flags[i] != NULL; i++)
        argv[argc++] = served->flags[i];
    snprintf(log, sizeof log, "%.480s/daemon.log", served->home);
    int listener = listen_for_ready(served, notify);
    int out = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    snprintf(home_set, sizeof home_set, "COLDPLANE_HOME=%s", served->home);
    snprintf(notify_set, sizeof notify_set, "NOTIFY_SOCKET=%s", notify);
    char **environment = environment_with((char *[]){home_set, notify_set, NULL});
    const struct start start = {program, argv, environment, in, out, out};
    served->pid =
        listener >= 0 && out >= 0 && environment != NULL && find_program("coldplaned", program)
            ? start_child(&start)
            : -1;
    int ready = served->pid > 0 && is_ready(listener, served->pid);
    free(environment);
    close(listener);
    close(out);
    close(in);
    served->port = find_port(log);
    if (ready && served->port != 0)
        return 1;
    read_end(log, served->said, sizeof served->said);
    if (served->pid > 0)
        served_end(served, SIGKILL);
    served->pid = 0;
    return 0;
}

int served_end(struct served *served, int signal) {
    kill(served->pid, signal);
    int code = code_of(served->pid);
    served->pid = 0;
    return code;
}

static char *read_all(int from) {
    size_t used = 0;
    ssize_t got = 0;
    char *text = malloc(SAID_BYTES);
    while (text != NULL && used + 1 < SAID_BYTES &&
           (got = read(from, text + used, SAID_BYTES - 1 - used)) > 0)
        used += (size_t)got;
    if (text != NULL)
        text[used] = 0;
    return text;
}

int served_command(const struct served *served, cJSON **document_out, const char *argument, ...) {
    char program[SERVED_PATH_BYTES], home_set[SERVED_PATH_BYTES + 32];
    const char *argv[SERVED_ARGS_MAX + 4] = {"coldplane"};
    int argc = 1, pipes[2] = {-1, -1};
    va_list list;
    va_start(list, argument);
    for (const char *at = argument; at != NULL && argc < SERVED_ARGS_MAX;
         at = va_arg(list, const char *))
        argv[argc++] = at;
    va_end(list);
    argv[argc] = "--json";
    *document_out = NULL;
    snprintf(home_set, sizeof home_set, "COLDPLANE_HOME=%s", served->home);
    char **environment = environment_with((char *[]){home_set, NULL});
    int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (environment == NULL || nowhere < 0 || pipe2(pipes, O_CLOEXEC) != 0 ||
        !find_program("coldplane", program))
        return 126;
    const struct start start = {program, argv, environment, nowhere, pipes[1], nowhere};
    pid_t pid = start_child(&start);
    close(pipes[1]);
    close(nowhere);
    free(environment);
    char *text = read_all(pipes[0]);
    close(pipes[0]);
    int code = code_of(pid);
    *document_out = text != NULL ? cJSON_Parse(text) : NULL;
    free(text);
    return code;
}
