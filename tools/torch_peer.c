/* tools/torch_peer.c - torch's attention timed by the script that this program carries.
 *
 * Responsible for: what torch_peer.h says.
 * Not responsible for: python3, which is looked for in the PATH.
 */
#include "tools/torch_peer.h"

#include "gpu_peer_py.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINE_BYTES = 256 };

int torch_peer_line(struct torch_peer *out, const char *line) {
    struct cuda_bench_peer peer = {.rows = 0};

    if (sscanf(line, "peer %23s %u %u %lf %lf", peer.name, &peer.rows, &peer.tokens,
               &peer.median_us, &peer.p99_us) == 5 &&
        peer.median_us > 0) {
        if (out->count < TORCH_PEER_MAX)
            out->peers[out->count++] = peer;
        return 1;
    }
    snprintf(out->note, sizeof out->note, "%.*s", (int)strcspn(line, "\n"), line);
    return 0;
}

/* The script, its output at the other end of the pipe; 0 or an error number. */
static int start(int to, pid_t *child_out) {
    char *const arguments[] = {(char[]){"python3"}, (char[]){"-c"}, (char[]){GPU_PEER_PY}, NULL};
    posix_spawn_file_actions_t actions;
    int err = posix_spawn_file_actions_init(&actions);
    if (err != 0)
        return err;
    err = posix_spawn_file_actions_adddup2(&actions, to, STDOUT_FILENO);
    if (err == 0)
        err = posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    if (err == 0)
        err = posix_spawnp(child_out, "python3", &actions, NULL, arguments, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    return err;
}

void torch_peer_run(struct torch_peer *out) {
    char line[LINE_BYTES];
    int ends[2] = {-1, -1}, status = 0;
    pid_t child = -1;
    memset(out, 0, sizeof *out);
    int err = pipe2(ends, O_CLOEXEC) == 0 ? start(ends[1], &child) : errno;
    if (ends[1] >= 0)
        (void)close(ends[1]);
    FILE *file = ends[0] >= 0 ? fdopen(ends[0], "r") : NULL;
    while (err == 0 && file != NULL && fgets(line, sizeof line, file) != NULL)
        (void)torch_peer_line(out, line);
    if (file != NULL)
        fclose(file);
    if (err == 0)
        (void)waitpid(child, &status, 0);
    if (err != 0)
        snprintf(out->note, sizeof out->note, "python3 does not start: %s", strerror(err));
    else if (out->count == 0 && out->note[0] == 0)
        snprintf(out->note, sizeof out->note, "python3 said nothing (status %d)", status);
}
