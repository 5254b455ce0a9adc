/* tests/support_cli.c - the command line program as a process of its own.
 *
 * Responsible for: see support_cli.h.
 * Not responsible for: what the program should say.
 */
#include "tests/support_cli.h"

#include "engine/model/utf8.h"
#include "tests/support_tiny_model.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

void cli_write_model(struct cli *cli, uint64_t seed, uint32_t context_tokens) {
    struct tiny_model_options options = tiny_model_default();
    options.seed = seed;
    options.context_tokens = context_tokens;
    tiny_model_write(&options, cli->model);
}

int cli_set_up(void **state) {
    char text[1024];
    struct cli *cli = calloc(1, sizeof *cli);
    testing_temp_dir(cli->home);
    snprintf(cli->store, sizeof cli->store, "%s/store", cli->home);
    snprintf(cli->model, sizeof cli->model, "%s/tiny.gguf", cli->home);
    cli_write_model(cli, 1, 8192);
    snprintf(text, sizeof text,
             "model = %s\nslots-memory = 48MiB\nreserve-slots = 16\nthreads = 1\n"
             "temperature = 0\nmax-tokens = 8\nages = 256,512,768\n",
             cli->model);
    char path[TESTING_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/config", cli->home);
    write_file(path, text, strlen(text));
    setenv("COLDPLANE_HOME", cli->home, 1);
    *state = cli;
    return 0;
}

int cli_tear_down(void **state) {
    struct cli *cli = *state;
    cJSON_Delete(cli->json);
    free(cli);
    return 0;
}

/* build/CONFIG/tests/test_cli → build/CONFIG/coldplane */
void cli_program(const char *name, char out[TESTING_PATH_BYTES]) {
    ssize_t length = readlink("/proc/self/exe", out, TESTING_PATH_BYTES - 32);
    assert_true(length > 0);
    out[length] = 0;
    for (int i = 0; i < 2; i++)
        *strrchr(out, '/') = 0;
    snprintf(out + strlen(out), 32, "/%s", name);
}

static int open_temporary(const char *home, const char *name, char path[TESTING_PATH_BYTES + 16]) {
    snprintf(path, TESTING_PATH_BYTES + 16, "%s/%s", home, name);
    return open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static void read_back(const char *path, char *out) {
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    size_t bytes = fread(out, 1, CLI_OUTPUT_BYTES - 1, file);
    out[bytes] = 0;
    fclose(file);
}

/* cJSON itself takes any bytes; other readers do not. */
static int is_utf8(const char *text) {
    size_t left = strlen(text);
    int length = 1;
    for (const uint8_t *at = (const uint8_t *)text; left > 0 && length > 0; at += length) {
        length = utf8_length(at, left);
        left -= length > 0 ? (size_t)length : 0;
    }
    return left == 0;
}

int cli_call(struct cli *cli, const char *argument, ...) {
    char program[TESTING_PATH_BYTES], paths[3][TESTING_PATH_BYTES + 16];
    const char *argv[CLI_ARGS_MAX + 2] = {"coldplane"};
    int argc = 1, wants_json = 0, status = 0;
    va_list list;
    va_start(list, argument);
    for (const char *at = argument; at != NULL; at = va_arg(list, const char *)) {
        assert_true(argc < CLI_ARGS_MAX);
        wants_json |= strcmp(at, "--json") == 0 && strcmp(argv[argc - 1], "--prompt") != 0;
        argv[argc++] = at;
    }
    va_end(list);
    cli_program("coldplane", program);
    int in = open_temporary(cli->home, "stdin", paths[0]);
    int out = open_temporary(cli->home, "stdout", paths[1]);
    int err = open_temporary(cli->home, "stderr", paths[2]);
    assert_true(in >= 0 && out >= 0 && err >= 0);
    if (cli->input != NULL)
        assert_int_equal(pwrite(in, cli->input, strlen(cli->input), 0), strlen(cli->input));
    cli->input = NULL;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(in, STDIN_FILENO);
        dup2(out, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        for (int fd = 0; fd < 3; fd++)
            if ((cli->closed >> fd & 1) != 0)
                close(fd);
        alarm(CLI_SECONDS_MAX);
        /* Too much memory is refused as by the C library, not by ending the program. */
        setenv("ASAN_OPTIONS", "allocator_may_return_null=1", 0);
        execv(program, (char **)argv);
        _exit(126);
    }
    cli->closed = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    close(in);
    close(out);
    close(err);
    read_back(paths[1], cli->out);
    read_back(paths[2], cli->err);
    cli->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (cli->code > 7)
        fail_msg("`%s %s` ended with %d:\n%s%s", program, argument, cli->code, cli->out, cli->err);
    cJSON_Delete(cli->json);
    cli->json = wants_json && is_utf8(cli->out) ? cJSON_Parse(cli->out) : NULL;
    if (wants_json && cli->json == NULL)
        fail_msg("`%s` gave no JSON:\n%s", argument, cli->out);
    return cli->code;
}

void cli_refused(const struct cli *cli, int code, const char *said) {
    const char *line_end = strchr(cli->err, '\n');
    int one_line = line_end != NULL && line_end[1] == 0;
    if (cli->code != code || strncmp(cli->err, "coldplane: ", 11) != 0 || !one_line ||
        strstr(cli->err, said) == NULL)
        fail_msg("ended with %d, not %d, or the line lacks `%s`:\n%s%s", cli->code, code, said,
                 cli->out, cli->err);
    if (cli->json != NULL) {
        assert_true(strlen(cli_text(cli, "error.code")) > 0);
        assert_non_null(strstr(cli_text(cli, "error.text"), said));
    }
}

void cli_good(const struct cli *cli) {
    if (cli->code != 0)
        fail_msg("ended with %d:\n%s%s", cli->code, cli->out, cli->err);
}

const cJSON *cli_member(const struct cli *cli, const char *path) {
    const cJSON *at = cli->json;
    const char *rest = path;
    assert_non_null(at);
    while (at != NULL && *rest != 0) {
        char name[64] = "";
        size_t length = strcspn(rest, ".");
        assert_true(length < sizeof name);
        memcpy(name, rest, length);
        at = cJSON_IsArray(at) ? cJSON_GetArrayItem(at, (int)strtol(name, NULL, 10))
                               : cJSON_GetObjectItemCaseSensitive(at, name);
        rest += length + (rest[length] == '.');
    }
    if (at == NULL)
        fail_msg("no %s in\n%s", path, cli->out);
    return at;
}

const char *cli_text(const struct cli *cli, const char *path) {
    const char *text = cJSON_GetStringValue(cli_member(cli, path));
    assert_non_null(text);
    return text;
}

double cli_number(const struct cli *cli, const char *path) {
    const cJSON *member = cli_member(cli, path);
    assert_true(cJSON_IsNumber(member));
    return cJSON_GetNumberValue(member);
}

/* Asked before anything changes: in a chroot the root is no mount, and a namespace of our own would
 * leave the program's own path behind for the tests after this one. */
void cli_own_mounts_or_skip(void) {
    struct statx root = {0};
    if (statx(AT_FDCWD, "/", 0, 0, &root) != 0 ||
        (root.stx_attributes & STATX_ATTR_MOUNT_ROOT) == 0)
        testing_skip("the root of this process is no mount of its own");
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        testing_skip("this account may not mount a small tmpfs");
}
