/* tests/test_cli_move.c - export and import as a user types them.
 *
 * Responsible for: files, pipes, exit codes and sentences of these two commands.
 * Not responsible for: what stands in the file (test_export.c).
 */
#include "tests/support_cli.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *path_in(const struct cli *cli, const char *name) {
    static char paths[4][TESTING_PATH_BYTES + 32];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", cli->home, name);
    return path;
}

static void make_session(struct cli *cli) {
    cli_call(cli, "run", "trip", "--prompt", "words for a longer while", "--max-tokens", "60",
             NULL);
    cli_good(cli);
}

static void cut_file(const char *path, off_t by) {
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(truncate(path, info.st_size - by), 0);
}

static void a_file_goes_out_and_comes_back(void **state) {
    struct cli *cli = *state;
    struct stat info;
    make_session(cli);
    const char *file = path_in(cli, "trip.cpx");
    cli_call(cli, "export", "trip", file, "--json", NULL);
    cli_good(cli);
    assert_int_equal(stat(file, &info), 0);
    assert_int_equal((double)info.st_size == cli_number(cli, "exported.bytes"), 1);
    assert_int_equal(info.st_mode & 0777, 0600);
    double tokens = cli_number(cli, "exported.tokens");
    cli_call(cli, "export", "trip", file, NULL);
    cli_refused(cli, 3, "name another");
    cli_call(cli, "import", file, NULL);
    cli_refused(cli, 3, "import --as");
    cli_call(cli, "import", file, "--as", "back", "--posix-io", "--json", NULL);
    cli_good(cli);
    assert_int_equal(cli_number(cli, "imported.tokens") == tokens, 1);
    cli_call(cli, "restore", "back", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    cut_file(file, 1);
    cli_call(cli, "import", file, "--as", "cut", NULL);
    cli_refused(cli, 4, "it was cut");
    cli_call(cli, "show", "cut", NULL);
    cli_refused(cli, 2, "not in this store");
}

static void what_cannot_be_done_is_said(void **state) {
    struct cli *cli = *state;
    make_session(cli);
    cli_call(cli, "export", "nobody", path_in(cli, "x"), NULL);
    cli_refused(cli, 2, "session nobody: not in this store; `coldplane ls`");
    cli_call(cli, "export", "nobody@noon", path_in(cli, "x"), NULL);
    cli_refused(cli, 2, "session nobody: not in this store; `coldplane ls`");
    cli_call(cli, "export", "trip@noon", path_in(cli, "x"), NULL);
    cli_refused(cli, 2, "noon");
    cli_call(cli, "export", "trip", path_in(cli, "no/folder"), NULL);
    cli_refused(cli, 2, "cannot be made");
    cli_call(cli, "export", "trip", "-", "--json", NULL);
    assert_int_equal(cli->code, 1);
    cli_call(cli, "import", path_in(cli, "none"), NULL);
    cli_refused(cli, 2, "cannot be read");
    cli->input = "This is a letter and no export of anything.";
    cli_call(cli, "import", "-", NULL);
    cli_refused(cli, 4, "not an export");
    const char *file = path_in(cli, "trip.cpx");
    cli_call(cli, "export", "trip", file, NULL);
    cli_good(cli);
    cli_write_model(cli, 2, 8192);
    cli_call(cli, "import", file, "--as", "other", NULL);
    cli_refused(cli, 3, "weights");
    cli_call(cli, "import", file, "--as", "other", "--any-model", NULL);
    cli_good(cli);
    cli_call(cli, "restore", "other", NULL);
    cli_refused(cli, 3, "weights");
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(a_file_goes_out_and_comes_back, cli_set_up,
                                             cli_tear_down),
             cmocka_unit_test_setup_teardown(what_cannot_be_done_is_said, cli_set_up,
                                             cli_tear_down))
