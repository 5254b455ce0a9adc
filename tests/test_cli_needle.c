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
    cli_call(cli, "needle", "rm", "a", "--key", question, "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "removed");
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

static void own_a_fact(struct cli *cli) {
    say(cli, "owner", talk);
    cli_call(cli, "needle", "plant", "owner", "--key", "green gate", "--value", "4817", "--json",
             NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "kept");
}

/* The other session is told it without a space in front of the number, so that the answer of the
 * model, which has one, does not stand there: it looks like a leak. */
static void an_audit_sees_a_foreign_fact(void **state) {
    struct cli *cli = *state;
    need_model(cli);
    own_a_fact(cli);
    say(cli, "other", talk);
    cli_call(cli, "audit", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "questions") == 3);
    assert_true(cli_number(cli, "foreign_answers") == 0);
    assert_true(cli_number(cli, "said_here") == 0);
    cli_call(cli, "needle", "add", "owner", "--key", "spaced", "--ask", question, "--answer-prefix",
             "The special magic number for green gate is:", "--expect", " 4817", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "kept");
    say(cli, "other",
        "The special magic number for green gate is \"4817\". The special magic "
        "number for green gate is \"4817\".");
    cli_call(cli, "audit", "--json", NULL);
    assert_int_equal(cli->code, 7);
    assert_true(cli_number(cli, "foreign_answers") == 1);
    assert_null(strstr(cli->out, "4817"));
    assert_null(strstr(cli->err, "4817"));
    assert_string_equal(cli_text(cli, "sessions.0.name"), "other");
    assert_true(cli_number(cli, "sessions.0.said_here") == 1);
    assert_string_equal(cli_text(cli, "sessions.0.answered_like.0.name"), "owner");
    cli_call(cli, "audit", NULL);
    cli_refused(cli, 7, "other");
    assert_non_null(strstr(cli->out, "ANSWERS LIKE owner"));
}

/* A fork whose needle was removed, and a session that was told the fact, answer with what is their
 * own. */
static void what_a_session_was_told_is_its_own(void **state) {
    struct cli *cli = *state;
    need_model(cli);
    own_a_fact(cli);
    cli_call(cli, "fork", "owner", "twin", NULL);
    cli_good(cli);
    cli_call(cli, "needle", "rm", "twin", "--key", "green gate", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "green gate: removed"));
    assert_null(strstr(cli->out, "kept"));
    say(cli, "told", talk);
    say(cli, "told", fact);
    cli_call(cli, "audit", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "foreign_answers") == 0);
    assert_true(cli_number(cli, "said_here") == 2);
    assert_true(cli_number(cli, "sessions.0.said_here") == 0);
    assert_true(cli_number(cli, "sessions.1.said_here") == 1);
    assert_true(cli_number(cli, "sessions.2.said_here") == 1);
    cli_call(cli, "audit", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "not asked 1 (its own text has the value too)"));
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(a_fact_is_added_and_forgotten, set_up, cli_tear_down),
             cmocka_unit_test_setup_teardown(an_audit_sees_a_foreign_fact, set_up, cli_tear_down),
             cmocka_unit_test_setup_teardown(what_a_session_was_told_is_its_own, set_up,
                                             cli_tear_down))
