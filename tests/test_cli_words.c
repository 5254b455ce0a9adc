/* tests/test_cli_words.c - words that cannot be meant, as a user of the command line writes them.
 *
 * Responsible for: one clear line that names the remedy, refused before anything is made or loaded.
 * Not responsible for: damage and limits (test_cli_errors.c).
 */
#include "tests/support_cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* Words that cannot be meant leave nothing behind: neither a store nor, where it was not there, the
 * home folder. */
static void what_is_refused_makes_nothing(void **state) {
    struct cli *cli = *state;
    static const char *const wrong[][6] = {
        {"run", "trip@draft", "-p", "x"},
        {"chat", "-s", "trip@draft"},
        {"run", "a", "-p", "x", "-m", "synth:nothing"},
        {"run", "a", "-p", "x", "-m", "/nowhere/model.gguf"},
        {"chat", "-m", "/nowhere/model.gguf"},
        {"import", "/nowhere/file.cpx"},
        {"import", "/nowhere", "--any-model"},
        {"import", "/", "--any-model"},
        {"import", "/dev/null"},
        {"import", "/proc/self/exe", "--any-model"},
        {"import", "/dev/null", "--as", "trip@draft"},
        {"bench", "rates", "-m", "/nowhere/model.gguf"},
        {"bench", "restore", "--build", "-m", "/nowhere/model.gguf"},
        {"snapshot", "a"},
        {"restore", "a"},
        {"restore", "a@t"},
        {"fork", "a", "b"},
        {"rollback", "a", "--to", "9"},
        {"rename", "a", "b"},
        {"pin", "a"},
        {"unpin", "a"},
        {"needle", "plant", "a", "--key=k", "--value=v"},
        {"needle", "check", "a"},
        {"needle", "rm", "a", "--key=k"},
        {"rm", "a"},
        {"rm", "a", "--purge"},
        {"expire", "a"},
        {"gc"},
        {"gc", "--dry-run"},
        {"fsck"},
        {"fsck", "--repair"},
        {"fsck", "--rebuild-index"},
        {"scrub"},
        {"verify"},
        {"audit"},
        {"ls"},
        {"show", "a"},
        {"stats"},
        {"ps"}};
    char home[TESTING_PATH_BYTES + 16], config[TESTING_PATH_BYTES + 16];
    snprintf(home, sizeof home, "%s/home", cli->home);
    snprintf(config, sizeof config, "--model=%s", cli->model);
    for (int fresh = 0; fresh < 2; fresh++) {
        for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
            const char *const *w = wrong[i];
            cli_call(cli, w[0], w[1], w[2], w[3], w[4], w[5], NULL);
            cli_refused(cli, cli->code, "");
            if (cli->code != 1 && cli->code != 2 && cli->code != 4)
                fail_msg("%s %s: %d, %s", w[0], w[1], cli->code, cli->err);
            if (access(fresh ? home : cli->store, F_OK) == 0)
                fail_msg("%s %s has made something", w[0], w[1] != NULL ? w[1] : "");
        }
        setenv("COLDPLANE_HOME", home, 1);
    }
    cli_call(cli, "run", "a", "-p", "x", "-n", "1", config, NULL);
    cli_good(cli);
}

/* A file, a link and somebody's folder are wrong words, whoever asks; nothing is damaged. */
static void what_is_no_store_ends_with_1(void **state) {
    struct cli *cli = *state;
    char folder[TESTING_PATH_BYTES + 16], file[TESTING_PATH_BYTES + 32],
        link[TESTING_PATH_BYTES + 16];
    snprintf(folder, sizeof folder, "%s/letters", cli->home);
    snprintf(file, sizeof file, "%s/letter", folder);
    snprintf(link, sizeof link, "%s/link", cli->home);
    assert_int_equal(mkdir(folder, 0700), 0);
    FILE *letter = fopen(file, "we");
    assert_non_null(letter);
    assert_int_equal(fclose(letter), 0);
    cli_call(cli, "run", "a", "-p", "hello", NULL);
    cli_good(cli);
    assert_int_equal(symlink(cli->store, link), 0);
    const char *const stores[][2] = {{file, "it is no store but a file"},
                                     {folder, "not a store; use an empty directory"},
                                     {link, "a symbolic link: give the directory itself"}};
    static const char *const commands[][4] = {{"ls"},
                                              {"show", "a"},
                                              {"stats"},
                                              {"ps"},
                                              {"top"},
                                              {"gc"},
                                              {"fsck"},
                                              {"scrub"},
                                              {"verify"},
                                              {"audit"},
                                              {"rm", "a"},
                                              {"restore", "a"},
                                              {"run", "a", "-p", "x"},
                                              {"chat"}};
    for (size_t s = 0; s < sizeof stores / sizeof stores[0]; s++)
        for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
            const char *const *c = commands[i];
            cli_call(cli, "--store", stores[s][0], c[0], c[1], c[2], c[3], NULL);
            cli_refused(cli, 1, stores[s][1]);
        }
    cli_call(cli, "verify", "a", NULL);
    cli_good(cli);
}

static void a_session_given_as_an_argument_is_named(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "chat", "notes", NULL);
    cli_refused(cli, 1, "for session notes write `coldplane chat --session notes`");
    cli_call(cli, "chat", "my", "notes", NULL);
    cli_refused(cli, 1, "too many arguments");
    cli_call(cli, "run", "--session", "notes", "-p", "x", NULL);
    cli_refused(cli, 1, "usage: coldplane run NAME --prompt TEXT");
    cli_call(cli, "ls", "notes", NULL);
    cli_refused(cli, 1, "ls: too many arguments; usage: coldplane ls\n");
    assert_int_not_equal(access(cli->store, F_OK), 0);
}

/* What the store alone says is said before a model is read: here there is none. */
static void what_the_store_knows_needs_no_model(void **state) {
    struct cli *cli = *state;
    static const struct {
        int code;
        const char *said, *words[6];
    } wrong[] = {
        {3, "session a has a tag red already: take another, or", {"snapshot", "a", "--tag=red"}},
        {2, "session zz: not in this store", {"snapshot", "zz"}},
        {2, "session zz: not in this store", {"snapshot", "zz", "--tag=red"}},
        {2, "session zz: not in this store", {"restore", "zz"}},
        {2, "session zz: not in this store", {"restore", "zz@red"}},
        {2, "session a has no tag blue", {"restore", "a@blue"}},
        {2, "session zz: not in this store", {"rollback", "zz", "--to=3"}},
        {1, "session a has ", {"rollback", "a", "--to=99999"}},
        {1, "session a has 6 turns", {"rollback", "a", "--to=turn:9"}},
        {1, "--to x: write a number of tokens", {"rollback", "a", "--to=x"}},
        {3, "needle k: the session has it", {"needle", "plant", "a", "--key=k", "--value=v"}},
        {3,
         "needle k: the session has it",
         {"needle", "add", "a", "--key=k", "--ask=what?", "--expect=v"}},
        {2, "needle x: not in this session; it has: k", {"needle", "rm", "a", "--key=x"}},
        {2, "needle x: not in this session; it has: k", {"needle", "check", "a", "--key=x"}},
        {2, "session zz: not in this store", {"needle", "check", "zz"}},
        {2, "only restore, fork, export and rm take a tag: leave @red out", {"show", "a@red"}},
        {2, "only restore, fork, export and rm take a tag: leave @red out", {"verify", "a@red"}},
        {2, "only restore, fork, export and rm take a tag: leave @red out", {"snapshot", "a@red"}},
        {2, "session zz@red: not in this store; `coldplane ls`", {"show", "zz@red"}},
        {1, "'@' stands between a session and its tag", {"run", "a@red", "-p", "x"}},
        {1, "'@' stands between a session and its tag", {"chat", "-s", "a@red"}}};
    for (int i = 0; i < 2; i++) {
        cli_call(cli, "run", "a", "-p", "hello there, how are you", NULL);
        cli_good(cli);
    }
    cli_call(cli, "needle", "plant", "a", "--key=k", "--value=v", NULL);
    cli_good(cli);
    cli_call(cli, "snapshot", "a", "--tag", "red", NULL);
    cli_good(cli);
    assert_int_equal(unlink(cli->model), 0);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const char *const *w = wrong[i].words;
        cli_call(cli, w[0], w[1], w[2], w[3], w[4], w[5], NULL);
        cli_refused(cli, wrong[i].code, wrong[i].said);
    }
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

TESTING_MAIN(TEST(what_is_refused_makes_nothing), TEST(what_is_no_store_ends_with_1),
             TEST(a_session_given_as_an_argument_is_named),
             TEST(what_the_store_knows_needs_no_model))
