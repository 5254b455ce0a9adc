/* tests/test_cli.c - the command line program, run as a process on a tiny model.
 *
 * Responsible for: what each command prints and ends with when all is well: text, JSON, receipts.
 * Not responsible for: mistakes and damage (test_cli_errors.c).
 */
#include "tests/support_cli.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *long_text(size_t words) {
    size_t room = words * 8 + 1, at = 0;
    char *text = calloc(1, room);
    for (size_t i = 0; i < words; i++)
        at += (size_t)snprintf(text + at, room - at, "w%zu ", i * 7919 % 1000);
    return text;
}

/* Long enough for sealed blocks at several tiers. */
static void make_long_session(struct cli *cli, const char *name) {
    char *text = long_text(500);
    cli->input = text;
    cli_call(cli, "run", name, "--prompt", "-", "--json", NULL);
    free(text);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.tokens") > 900);
}

static void every_command_has_help(void **state) {
    struct cli *cli = *state;
    static const char *const names[] = {
        "chat",   "run",  "ls",    "show",     "snapshot", "restore", "needle",
        "verify", "rm",   "stats", "tokenize", "bench",    "version", "help",
        "gc",     "fsck", "scrub", "export",   "import",   "audit",   "fork",
        "rename", "pin",  "unpin", "rollback", "receipt",  "top"};
    cli_call(cli, "help", NULL);
    cli_good(cli);
    char overview[8192];
    snprintf(overview, sizeof overview, "%.8000s", cli->out);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char command[64];
        snprintf(command, sizeof command, "\n  %s ", names[i]);
        assert_non_null(strstr(overview, command));
        cli_call(cli, names[i], "--help", NULL);
        cli_good(cli);
        snprintf(command, sizeof command, "usage: coldplane %s", names[i]);
        assert_non_null(strstr(cli->out, command));
        assert_non_null(strstr(cli->out, "--json"));
        if (strcmp(names[i], "version") != 0)
            assert_non_null(strstr(cli->out, "\nExamples:\n  "));
    }
    cli_call(cli, "--help", NULL);
    cli_good(cli);
    assert_string_equal(cli->out, overview);
}

static void version_and_settings_are_shown(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "version", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "store_format") == 1);
    assert_true(strlen(cli_text(cli, "version")) > 0);
    cli_call(cli, "--show-config", "--threads", "2", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "\nthreads = 2\n"));
    assert_non_null(strstr(cli->out, "\nages = 256,512,768\n"));
}

static void tokenize_gives_ids(void **state) {
    struct cli *cli = *state;
    cli->input = "hello, world";
    cli_call(cli, "tokenize", "--json", NULL);
    cli_good(cli);
    int count = (int)cli_number(cli, "count");
    assert_true(count > 0 && count <= 12);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "ids")), count);
    double first = cli_number(cli, "ids.0");
    cli->input = "hello, world";
    cli_call(cli, "tokenize", NULL);
    cli_good(cli);
    assert_true(strtod(cli->out, NULL) == first);
    cli->input = "<|im_end|>";
    cli_call(cli, "tokenize", "--json", "--special", NULL);
    assert_true(cli_number(cli, "count") == 1);
    cli->input = "<|im_end|>";
    cli_call(cli, "tokenize", "--json", NULL);
    assert_true(cli_number(cli, "count") > 1);
    cli_call(cli, "tokenize", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "count") == 0);
}

/* CASE-01: what was saved is read back, and only the new question is computed. */
static void a_session_goes_on_where_it_was(void **state) {
    struct cli *cli = *state;
    make_long_session(cli, "travel");
    assert_string_equal(cli_text(cli, "session"), "new");
    assert_true(cli_number(cli, "receipt.door_bytes") > 0);
    double tokens = cli_number(cli, "receipt.tokens");
    cli_call(cli, "run", "travel", "--prompt", "and now?", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "session"), "woken");
    double reused = cli_number(cli, "woken.tokens_reused");
    assert_true(reused == tokens || reused == tokens - 1);
    assert_true(cli_number(cli, "woken.tokens_prefilled") == 0);
    assert_true(cli_number(cli, "woken.door_bytes") > 0);
    assert_true(cli_number(cli, "woken.blocks") >= 2);
    assert_true(cli_number(cli, "woken.digests_failed") == 0);
    assert_string_equal(cli_text(cli, "woken.fingerprint"), "bits-equal");
    double fed = cli_number(cli, "tokens_fed"), made = cli_number(cli, "tokens_generated");
    assert_true(cli_number(cli, "receipt.tokens") == tokens + fed + made);
    assert_true(made >= 1 && made <= 8);
}

/* The same words give the same answer, through sleep or not, and nothing is replayed (CASE-06). */
static void an_answer_does_not_depend_on_sleep(void **state) {
    struct cli *cli = *state;
    char awake[4096], asleep[4096];
    cli->input = "one\ntwo\n";
    cli_call(cli, "chat", "--session", "awake", NULL);
    cli_good(cli);
    snprintf(awake, sizeof awake, "%.4000s", cli->out);
    cli->input = "one\n";
    cli_call(cli, "chat", "--session", "asleep", NULL);
    size_t first = (size_t)snprintf(asleep, sizeof asleep, "%.2000s", cli->out);
    cli->input = "two\n";
    cli_call(cli, "chat", "--session", "asleep", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->err, "fingerprint bits-equal"));
    snprintf(asleep + first, sizeof asleep - first, "%.2000s", cli->out);
    assert_string_equal(awake, asleep);
}

static void chat_knows_its_commands(void **state) {
    struct cli *cli = *state;
    cli->input = "/help\nhello there, this is a first message\n/save\n/quit\nnever said\n";
    cli_call(cli, "chat", "-s", "a", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->err, "session a, new, 0 tokens"));
    assert_non_null(strstr(cli->err, "/sleep"));
    assert_non_null(strstr(cli->err, "saved: "));
    cli->input = "/sleep\nnever said\n";
    cli_call(cli, "chat", "-s", "a", NULL);
    cli_good(cli);
    cli_call(cli, "ls", "--json", NULL);
    assert_true(cJSON_IsTrue(cli_member(cli, "sessions.0.asleep")));
    assert_true(cli_number(cli, "sessions.0.snapshots") == 2);
    cli_call(cli, "show", "a", "--json", NULL);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "session.turns")), 3);
}

static void stored_sessions_are_listed_shown_and_verified(void **state) {
    struct cli *cli = *state;
    make_long_session(cli, "long");
    double tokens = cli_number(cli, "receipt.tokens");
    cli_call(cli, "run", "short", "-p", "hi", NULL);
    cli_good(cli);
    cli_call(cli, "ls", "--json", NULL);
    cli_good(cli);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), 2);
    assert_string_equal(cli_text(cli, "sessions.0.name"), "long");
    assert_true(cli_number(cli, "sessions.0.tokens") == tokens);
    assert_true(cli_number(cli, "sessions.0.stored_bytes") > 4096);
    cli_call(cli, "ls", NULL);
    assert_non_null(strstr(cli->out, "  long\n"));
    assert_non_null(strstr(cli->out, "  short\n"));
    cli_call(cli, "show", "long", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "session.tokens") == tokens);
    assert_true(cli_number(cli, "session.tier_blocks.K6V3") >= 1);
    assert_true(cli_number(cli, "session.tier_blocks.K6V2") >= 1);
    assert_string_equal(cli_text(cli, "session.turns.0.role"), "system");
    assert_string_equal(cli_text(cli, "session.turns.2.role"), "assistant");
    cli_call(cli, "show", "long", NULL);
    assert_non_null(strstr(cli->out, "K6V2 × "));
    cli_call(cli, "verify", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "sessions.1.result"), "ok");
    assert_true(cli_number(cli, "sessions.0.blocks") >= 2);
    assert_true(cli_number(cli, "sessions.0.stored_bytes") > 4096);
    cli_call(cli, "verify", "short", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "1 session verified"));
    cli_call(cli, "stats", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "live_bytes") > 0);
    assert_true(strlen(cli_text(cli, "door")) > 0);
    cli_call(cli, "stats", NULL);
    assert_non_null(strstr(cli->out, "segments"));
}

static void how_kv_is_kept_is_told(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "run", "p", "-p", "hi", "--recipe", "v2", "--policy", "pressure", "--top", "k8v8",
             NULL);
    cli_good(cli);
    cli_call(cli, "show", "p", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "session.recipe"), "v2");
    assert_string_equal(cli_text(cli, "session.policy"), "pressure");
    assert_string_equal(cli_text(cli, "session.top"), "K8V8");
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "session.stepped_blocks")), 3);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "session.history")), 1);
    cli_call(cli, "show", "p", NULL);
    assert_non_null(strstr(cli->out, "v2, pressure, top K8V8, blocks lowered 0/0/0"));
    /* Made once: what is said later is of new sessions. */
    cli_call(cli, "restore", "p", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.recipe"), "v2");
    assert_string_equal(cli_text(cli, "receipt.history.0.policy"), "pressure");
    assert_true(cli_number(cli, "receipt.history.0.from") == 0);
    cli_call(cli, "run", "q", "-p", "hi", "--policy", "pressure", "--ages", "512", NULL);
    cli_refused(cli, 1, "policy pressure knows no ages");
}

static void snapshot_and_restore_print_receipts(void **state) {
    struct cli *cli = *state;
    make_long_session(cli, "a");
    cli_call(cli, "snapshot", "a", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.operation"), "save");
    assert_true(cli_number(cli, "woken.tokens_prefilled") == 0);
    cli_call(cli, "restore", "a", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.operation"), "restore");
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    assert_true(cli_number(cli, "receipt.wall_ns") > 0);
    assert_true(cli_number(cli, "receipt.digests_checked") > 10);
    cli_call(cli, "restore", "a", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "restore of session a: ok"));
    assert_non_null(strstr(cli->out, "bits-equal"));
}

static void rm_removes_one_and_leaves_the_rest(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "run", "a", "-p", "hi", NULL);
    cli_call(cli, "run", "b", "-p", "ho", NULL);
    cli_call(cli, "rm", "a", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "removed.name"), "a");
    cli_call(cli, "restore", "a", NULL);
    cli_refused(cli, 2, "a");
    cli_call(cli, "restore", "b", NULL);
    cli_good(cli);
    cli_call(cli, "ls", "--json", NULL);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), 1);
}

/* A random model answers nothing right, so the needle is recorded and honestly not kept. */
static void needles_are_planted_listed_and_checked(void **state) {
    struct cli *cli = *state;
    make_long_session(cli, "a");
    cli_call(cli, "needle", "ls", "a", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "no needles"));
    cli_call(cli, "needle", "plant", "a", "--key", "green lamp", "--value", "4817", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.key"), "green lamp");
    assert_true(cJSON_IsFalse(cli_member(cli, "needles.0.kept")));
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "failed");
    assert_true(cli_number(cli, "needles.0.logp") < 0);
    assert_true(cli_number(cli, "receipt.needles.recorded") == 1);
    cli_call(cli, "needle", "ls", "a", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.key"), "green lamp");
    assert_true(cli_number(cli, "needles.0.spans.0.first") > 900);
    cli_call(cli, "needle", "ls", "a", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "not kept: 1."));
    cli_call(cli, "needle", "check", "a", "--key", "green lamp", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "failed");
    cli_call(cli, "snapshot", "a", NULL);
    cli_good(cli);
    cli_call(cli, "needle", "ls", "a", NULL);
    assert_non_null(strstr(cli->out, "green lamp: failed (log-probability "));
    cli_call(cli, "needle", "check", "a", "--key", "red lamp", "--json", NULL);
    cli_refused(cli, 2, "it has: green lamp");
    cli_call(cli, "needle", "plant", "a", "--key", "green lamp", "--value", "1", NULL);
    cli_refused(cli, 3, "has it already");
}

/* CASE-37 */
static void bench_restore_refuses_an_empty_store(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "run", "other", "-p", "hi", NULL);
    cli_call(cli, "bench", "restore", "--tokens", "700", "--json", NULL);
    cli_refused(cli, 2, "--build makes it");
    cli_call(cli, "bench", "restore", "--tokens", "700", "--build", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "restore.tokens_reused") >= 690);
    assert_true(cli_number(cli, "restore.tokens_prefilled") == 0);
    assert_true(cli_number(cli, "restore.door_bytes") > 0);
    assert_true(cli_number(cli, "plain_reader_bytes") > 0);
    assert_true(cli_number(cli, "prefill_ns") > 0);
    assert_true(cli_number(cli, "first_token.eager_bytes") > 0);
    assert_true(cli_number(cli, "first_token.eager_bytes") <
                cli_number(cli, "first_token.exact_bytes"));
    assert_true(cli_number(cli, "first_token.ram_bytes") > 0);
    assert_true(cli_number(cli, "bytes_at_rest_per_token") > 0);
    assert_true(strlen(cli_text(cli, "host.cpu")) > 0);
    cli_call(cli, "bench", "restore", "--tokens", "700", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "× faster"));
    cli_call(cli, "restore", "bench-700", "--restore", "eager", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.tiers"), "eager");
    assert_true(cli_number(cli, "receipt.coarse_blocks") == 1);
    assert_string_equal(cli_text(cli, "refined.operation"), "refine");
    assert_true(cli_number(cli, "refined.blocks") == 1);
    assert_true(cli_number(cli, "refined.coarse_blocks") == 0);
    cli_call(cli, "restore", "bench-700", "--restore", "soon", NULL);
    cli_refused(cli, 1, "none of exact|eager");
}

static void bench_store_names_door_and_depth(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "bench", "store", "--size", "16MiB", "--json", NULL);
    cli_good(cli);
    assert_true(strlen(cli_text(cli, "door")) > 0);
    assert_true(cli_number(cli, "writes_in_flight_most") >= 8);
    assert_true(cli_number(cli, "write_commit.bytes") > 0);
    assert_true(cli_number(cli, "read_and_digest.ns") > 0);
    cli_call(cli, "ls", NULL);
    cli_refused(cli, 2, "store");
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

TESTING_MAIN(TEST(every_command_has_help), TEST(version_and_settings_are_shown),
             TEST(tokenize_gives_ids), TEST(a_session_goes_on_where_it_was),
             TEST(an_answer_does_not_depend_on_sleep), TEST(chat_knows_its_commands),
             TEST(stored_sessions_are_listed_shown_and_verified), TEST(how_kv_is_kept_is_told),
             TEST(snapshot_and_restore_print_receipts), TEST(rm_removes_one_and_leaves_the_rest),
             TEST(needles_are_planted_listed_and_checked),
             TEST(bench_restore_refuses_an_empty_store), TEST(bench_store_names_door_and_depth))
