/* tests/test_top.c - `coldplane top` printed once and on a terminal.
 *
 * Responsible for: what a frame says, that it fits 80 columns, that q leaves the terminal as it
 * was.
 * Not responsible for: the numbers themselves (test_cli.c, test_tree.c).
 */
#include "tests/support_cli.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { SEEN_BYTES = 1 << 16, PATIENCE_MS = 60000 };

static void make_sessions(struct cli *cli) {
    char *text = calloc(1, 4000);
    assert_non_null(text);
    for (int i = 0; i < 660; i++)
        memcpy(text + 6 * i, "words ", 6);
    cli_call(cli, "run", "trip", "--prompt", text, "--max-tokens", "4", "--ages", "256,512", NULL);
    cli_good(cli);
    free(text);
    cli_call(cli, "fork", "trip",
             "a name that is far longer than any column of eighty could ever hold", NULL);
    cli_good(cli);
    cli_call(cli, "pin", "trip", NULL);
    cli_good(cli);
}

static void one_picture(void **state) {
    struct cli *cli = *state;
    make_sessions(cli);
    cli_call(cli, "top", "--once", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "\n2 sessions"));
    assert_non_null(strstr(cli->out, "\nwriter none\n"));
    assert_non_null(strstr(cli->out, " pinned "));
    assert_null(strchr(cli->out, '\033'));
    for (const char *line = cli->out; *line != 0; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 80);
    cli_call(cli, "top", "--json", NULL);
    cli_good(cli);
    const cJSON *first = cJSON_GetArrayItem(cli_member(cli, "sessions"), 0);
    const char *bar = cJSON_GetObjectItem(first, "tier_bar")->valuestring;
    assert_int_equal(strlen(bar), 16);
    assert_true(strchr(bar, '6') != NULL && strchr(bar, '3') != NULL && strchr(bar, 'w') != NULL);
}

static void the_writer_is_named(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 32];
    make_sessions(cli);
    snprintf(path, sizeof path, "%s/LOCK", cli->store);
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    assert_int_equal(flock(file, LOCK_EX | LOCK_NB), 0);
    cli_call(cli, "top", "--once", NULL);
    cli_good(cli);
    assert_null(strstr(cli->out, "\nwriter none\n"));
    close(file);
}

static void nothing_to_show_is_said(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "top", "--once", NULL);
    cli_refused(cli, 2, "there is none");
}

static pid_t start(int *file_out) {
    char program[TESTING_PATH_BYTES];
    struct winsize size = {.ws_row = 12, .ws_col = 80};
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 32);
    assert_true(length > 0);
    program[length] = 0;
    for (int i = 0; i < 2; i++)
        *strrchr(program, '/') = 0;
    memcpy(program + strlen(program), "/coldplane", sizeof "/coldplane");
    pid_t child = forkpty(file_out, NULL, NULL, &size);
    assert_true(child >= 0);
    if (child == 0) {
        execl(program, "coldplane", "top", (char *)NULL);
        _exit(126);
    }
    return child;
}

/* Reads until `text` was seen, or, for NULL, until the other side is gone. */
static void read_until(int file, const char *text, char *seen) {
    size_t count = strlen(seen);
    while (text == NULL || strstr(seen, text) == NULL) {
        struct pollfd wait = {.fd = file, .events = POLLIN};
        if (poll(&wait, 1, PATIENCE_MS) != 1)
            fail_msg("waited for `%s`; seen: %s", text != NULL ? text : "the end", seen);
        ssize_t got = read(file, seen + count, SEEN_BYTES - 1 - count);
        if (got <= 0 && text == NULL)
            return;
        assert_true(got > 0);
        count += (size_t)got;
        seen[count] = 0;
    }
}

static void q_leaves_the_terminal_as_it_was(void **state) {
    struct cli *cli = *state;
    static char seen[SEEN_BYTES];
    struct termios after;
    int file = -1, status = 0;
    make_sessions(cli);
    memset(seen, 0, sizeof seen);
    pid_t child = start(&file);
    read_until(file, "q leaves", seen);
    read_until(file, "\033[J", seen);
    assert_true(write(file, "q", 1) == 1);
    read_until(file, "\033[?1049l", seen);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(tcgetattr(file, &after), 0);
    assert_int_equal(after.c_lflag & (ECHO | ICANON), ECHO | ICANON);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_non_null(strstr(seen, "\033[?1049h"));
    assert_non_null(strstr(seen, "\033[?25h"));
    close(file);
}

#define CLI_TEST(name) cmocka_unit_test_setup_teardown(name, cli_set_up, cli_tear_down)
TESTING_MAIN(CLI_TEST(one_picture), CLI_TEST(the_writer_is_named),
             CLI_TEST(nothing_to_show_is_said), CLI_TEST(q_leaves_the_terminal_as_it_was))
