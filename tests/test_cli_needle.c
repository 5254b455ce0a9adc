/* tests/test_cli_needle.c - needle add and rm, audit, probes in receipts, with the real model.
 *
 * Responsible for: these commands as a user types them, and that an audit can fail.
 * Not responsible for: scores (test_probe.c), commands with a random model (test_cli.c).
 */
#include "tests/support_cli.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const talk =
    "We talk about my garden today. There is an apple tree, a long bed of roses, a small pond with "
    "two frogs and a wooden bench, and in the evening the neighbours come over the fence and sit "
    "with us until it is dark. In winter nothing grows there but moss, and we read about seeds.";
static const char *const fact = "One of the special magic numbers for green gate is: 4817. The "
                                "special magic number for green gate is: 4817.";
static const char *const question =
    "What is the special magic number for green gate mentioned in the text?";
static const char *const prefix = "The special magic number for green gate is: ";

/* The real model stands where the tiny one was. MODEL names it for the next test, since the home,
 * and with it the usual place of models, changes with cli_set_up. */
static int set_up(void **state) {
    const char *path = testing_model_path();
    if (path != NULL)
        setenv("MODEL", path, 1);
    if (cli_set_up(state) != 0)
        return -1;
    struct cli *cli = *state;
    return path == NULL || (unlink(cli->model) == 0 && symlink(getenv("MODEL"), cli->model) == 0)
               ? 0
               : -1;
}

static void need_model(const struct cli *cli) {
    struct stat info;
    if (lstat(cli->model, &info) != 0 || !S_ISLNK(info.st_mode))
        testing_skip("there is no model");
}

static void say(struct cli *cli, const char *name, const char *text) {
    cli_call(cli, "run", name, "--prompt", text, "--max-tokens", "4", NULL);
    cli_good(cli);
}

static void a_fact_is_added_and_forgotten(void **state) {
    struct cli *cli = *state;
    need_model(cli);
    say(cli, "a", talk);
    say(cli, "a", fact);
    cli_call(cli, "needle", "add", "a", "--ask", question, "--expect", "4817", NULL);
    cli_good(cli);
    cli_call(cli, "needle", "add", "a", "--ask", question, "--expect", "4817", NULL);
    cli_refused(cli, 3, "already");
    cli_call(cli, "needle", "rm", "a", "--key", question, NULL);
    cli_good(cli);
    cli_call(cli, "needle", "add", "a", "--key", "gate", "--ask", question, "--expect", "4817",
             "--answer-prefix", prefix, "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "kept");
    cli_call(cli, "needle", "add", "a", "--ask", question, "--expect", "5555", NULL);
    cli_refused(cli, 2, "does not stand in this session");
    cli_call(cli, "needle", "add", "a", "--ask", question, NULL);
    cli_refused(cli, 1, "--expect");
    cli_call(cli, "needle", "rm", "a", "--key", "moon", NULL);
    cli_refused(cli, 2, "gate");
    cli_call(cli, "snapshot", "a", "--probes", "3", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.probes.tried") >= 3);
    double kept = cli_number(cli, "receipt.probes.kept");
    assert_true(kept >= 1);
    cli_call(cli, "restore", "a", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.probes.passed") == kept);
    assert_true(cli_number(cli, "receipt.needles.passed") == 1);
    cli_call(cli, "restore", "a", "--probes", "0", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.probes.asked") == 0);
}

/* A session in which another one's fact was said answers with it: that must be seen. */
static void an_audit_sees_a_foreign_fact(void **state) {
    struct cli *cli = *state;
    need_model(cli);
    say(cli, "owner", talk);
    cli_call(cli, "needle", "plant", "owner", "--key", "green gate", "--value", "4817", "--json",
             NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "kept");
    say(cli, "other", talk);
    cli_call(cli, "audit", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "questions") == 3);
    assert_true(cli_number(cli, "foreign_answers") == 0);
    say(cli, "other", fact);
    cli_call(cli, "audit", "--json", NULL);
    assert_int_equal(cli->code, 7);
    assert_true(cli_number(cli, "foreign_answers") >= 1);
    assert_null(strstr(cli->out, "4817"));
    assert_null(strstr(cli->err, "4817"));
    assert_string_equal(cli_text(cli, "sessions.0.name"), "other");
    assert_string_equal(cli_text(cli, "sessions.0.answered_like.0.name"), "owner");
    cli_call(cli, "audit", NULL);
    cli_refused(cli, 7, "other");
    assert_non_null(strstr(cli->out, "ANSWERS LIKE owner"));
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(a_fact_is_added_and_forgotten, set_up, cli_tear_down),
             cmocka_unit_test_setup_teardown(an_audit_sees_a_foreign_fact, set_up, cli_tear_down))
