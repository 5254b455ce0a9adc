/* tests/test_cli_manual.c - the man page and the completion say what the program knows.
 *
 * Responsible for: every command and flag stands in both; bash takes the completion, and it
 * completes commands, flags, words and session names.
 * Not responsible for: the help text (test_cli.c).
 */
#include "tests/support_cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const commands[] = {"chat", "snapshot", "fork", "rollback", "needle", "receipt"};

static void the_page_has_every_command(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "help", "man", NULL);
    cli_good(cli);
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char line[64];
        snprintf(line, sizeof line, "\n.SS coldplane %s ", commands[i]);
        assert_non_null(strstr(cli->out, line));
    }
    assert_non_null(strstr(cli->out, "\n  \\-\\-store DIR"));
    /* What begins with a point would be a request of roff. */
    for (const char *at = cli->out; (at = strstr(at, "\n.")) != NULL; at += 2)
        assert_true((at[2] >= 'A' && at[2] <= 'Z') || strncmp(at, "\n.nf", 4) == 0 ||
                    strncmp(at, "\n.fi", 4) == 0);
}

/* What bash offers behind `line`, words with a space between. */
static void complete(struct cli *cli, const char *line, char *out, size_t room) {
    char script[TESTING_PATH_BYTES + 64], command[4096];
    snprintf(script, sizeof script, "%s/completion", cli->home);
    cli_call(cli, "help", "bash", NULL);
    cli_good(cli);
    FILE *file = fopen(script, "w");
    assert_non_null(file);
    assert_true(fputs(cli->out, file) >= 0);
    assert_int_equal(fclose(file), 0);
    snprintf(
        command, sizeof command,
        "bash -c 'coldplane() { printf \"tokens name\\n    12 ant\\n    13 bee  (pinned)\\n\"; }\n"
        "source %s; COMP_WORDS=(%s); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _coldplane;\n"
        "echo ${COMPREPLY[@]}'",
        script, line);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t got = fread(out, 1, room - 1, pipe);
    out[got] = 0;
    assert_int_equal(pclose(pipe), 0);
}

static void bash_completes(void **state) {
    struct cli *cli = *state;
    char found[4096];
    if (system("command -v bash >/dev/null") != 0)
        testing_skip("this machine has no bash");
    complete(cli, "coldplane roll", found, sizeof found);
    assert_string_equal(found, "rollback\n");
    complete(cli, "coldplane rollback ant --t", found, sizeof found);
    assert_non_null(strstr(found, "--to\n"));
    assert_null(strstr(found, "--tag"));
    complete(cli, "coldplane needle pl", found, sizeof found);
    assert_string_equal(found, "plant\n");
    complete(cli, "coldplane fork b", found, sizeof found);
    assert_string_equal(found, "bee\n");
    complete(cli, "coldplane show \"\"", found, sizeof found);
    assert_string_equal(found, "ant bee\n");
    complete(cli, "coldplane stats a", found, sizeof found);
    assert_string_equal(found, "\n");
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(the_page_has_every_command, cli_set_up, cli_tear_down),
             cmocka_unit_test_setup_teardown(bash_completes, cli_set_up, cli_tear_down))
