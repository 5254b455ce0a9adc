/* tests/test_cli_tree.c - tags, forks, going back and names as a user types them.
 *
 * Responsible for: these commands' sentences, JSON and exit codes, and /retry, /edit, /fork, /save.
 * Not responsible for: bytes and bits (test_tree.c).
 */
#include "tests/support_cli.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void say(struct cli *cli, const char *name, const char *text) {
    cli_call(cli, "run", name, "--prompt", text, "--max-tokens", "12", "--json", NULL);
    cli_good(cli);
}

static double tokens_of(struct cli *cli, const char *name) {
    cli_call(cli, "show", name, "--json", NULL);
    cli_good(cli);
    return cli_number(cli, "session.tokens");
}

static void fsck_is_clean(struct cli *cli) {
    cli_call(cli, "fsck", "--read-data", "--json", NULL);
    cli_good(cli);
    cli_call(cli, "gc", "--dry-run", "--json", NULL);
    cli_good(cli);
}

static void tags_can_be_restored(void **state) {
    struct cli *cli = *state;
    say(cli, "trip", "words for the first while");
    double first = tokens_of(cli, "trip");
    cli_call(cli, "snapshot", "trip", "--tag", "draft", "--json", NULL);
    cli_good(cli);
    cli_call(cli, "snapshot", "trip", "--tag", "draft", NULL);
    cli_refused(cli, 3, "has a tag draft already");
    cli_call(cli, "snapshot", "trip", "--tag", "a@b", NULL);
    cli_refused(cli, 1, "leave it out");
    assert_null(strstr(cli->out, "restore of")); /* before anything was woken */
    say(cli, "trip", "and some more of them");
    double second = tokens_of(cli, "trip");
    assert_true(second > first);
    cli_call(cli, "restore", "trip@none", NULL);
    cli_refused(cli, 2, "has no tag none");
    cli_call(cli, "restore", "trip@draft", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    assert_string_equal(cli_text(cli, "kept_tag"), "before-restore-1");
    assert_int_equal(cli_number(cli, "receipt.tokens_prefilled"), 0);
    assert_true(tokens_of(cli, "trip") == first);
    cli_call(cli, "show", "trip", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "\n    before-restore-1  "));
    assert_non_null(strstr(cli->out, "\n    draft  "));
    cli_call(cli, "restore", "trip@before-restore-1", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "before it: tag before-restore-2"));
    assert_true(tokens_of(cli, "trip") == second);
    cli_call(cli, "rm", "trip@draft", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "removed trip@draft"));
    cli_call(cli, "rm", "trip@draft", NULL);
    cli_refused(cli, 2, "has no tag draft");
    cli_call(cli, "ls", "--json", NULL);
    cli_good(cli);
    const cJSON *listed = cJSON_GetArrayItem(cli_member(cli, "sessions"), 0);
    assert_int_equal(cJSON_GetObjectItem(listed, "tags")->valueint, 2);
    fsck_is_clean(cli);
}

static void forks_live_on_their_own(void **state) {
    struct cli *cli = *state;
    say(cli, "trip", "words for the first while");
    cli_call(cli, "snapshot", "trip", "--tag", "draft", NULL);
    cli_good(cli);
    say(cli, "trip", "and some more of them");
    cli_call(cli, "fork", "trip", "copy", NULL);
    cli_good(cli);
    cli_call(cli, "fork", "trip@draft", "older", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "forked.name"), "older");
    cli_call(cli, "fork", "trip", "copy", NULL);
    cli_refused(cli, 3, "already");
    cli_call(cli, "fork", "nobody", "x", NULL);
    cli_refused(cli, 2, "nobody");
    cli_call(cli, "fork", "trip", "a/b", NULL);
    cli_refused(cli, 1, "'/'");
    cli_call(cli, "run", "trip@new", "--prompt", "hi", NULL);
    cli_refused(cli, 1, "'@' stands between a session and its tag");
    cli_call(cli, "run", "  ", "--prompt", "hi", NULL);
    cli_refused(cli, 1, "blanks alone");
    cli_call(cli, "rename", "trip", "trip@new", NULL);
    cli_refused(cli, 1, "'@' stands between a session and its tag");
    cli_call(cli, "fork", "trip@", "x", NULL);
    cli_refused(cli, 1, "the tag is empty");
    cli_call(cli, "snapshot", "trip", "--tag", "", NULL);
    cli_refused(cli, 1, "the tag is empty");
    assert_true(tokens_of(cli, "older") < tokens_of(cli, "copy"));
    assert_true(tokens_of(cli, "copy") == tokens_of(cli, "trip"));
    cli_call(cli, "rm", "trip", "--purge", "--json", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli_text(cli, "purged.limits"), "beyond this program"));
    double freed = cli_number(cli, "purged.freed_bytes");
    cli_call(cli, "stats", "--json", NULL);
    cli_good(cli);
    /* Nothing but batch records is left of what was removed; ext4 counts one more block for a file
     * of more than four pieces. */
    assert_true(freed >= 4096);
    assert_true(cli_number(cli, "garbage_bytes") <=
                4096 * (cli_number(cli, "batches") + cli_number(cli, "segments")));
    fsck_is_clean(cli);
    cli_call(cli, "restore", "copy", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    say(cli, "older", "something else");
    cli_call(cli, "rename", "older", "newer", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "older is now newer"));
    cli_call(cli, "restore", "newer", NULL);
    cli_good(cli);
    cli_call(cli, "rename", "newer", "copy", NULL);
    cli_refused(cli, 3, "already");
    cli_call(cli, "pin", "copy", NULL);
    cli_good(cli);
    cli_call(cli, "rm", "copy", NULL);
    cli_refused(cli, 3, "unpin");
    cli_call(cli, "ls", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "copy  (pinned)"));
    cli_call(cli, "unpin", "copy", NULL);
    cli_good(cli);
    cli_call(cli, "rm", "copy", NULL);
    cli_good(cli);
    fsck_is_clean(cli);
}

static void rollback_says_what_it_costs(void **state) {
    struct cli *cli = *state;
    char *text = calloc(1, 4000);
    assert_non_null(text);
    for (int i = 0; i < 660; i++)
        memcpy(text + 6 * i, "words ", 6);
    say(cli, "trip", "first words");
    double first = tokens_of(cli, "trip");
    say(cli, "trip", text);
    double second = tokens_of(cli, "trip");
    assert_true(second > 900);
    free(text);
    cli_call(cli, "rollback", "trip", NULL);
    cli_refused(cli, 1, "add --to N");
    cli_call(cli, "rollback", "trip", "--to", "soon", NULL);
    cli_refused(cli, 1, "a number of tokens");
    cli_call(cli, "rollback", "trip", "--to", "0", NULL);
    cli_refused(cli, 1, "a number of tokens");
    cli_call(cli, "rollback", "trip", "--to", "turn:99", NULL);
    cli_refused(cli, 1, "turns");
    cli_call(cli, "rollback", "trip", "--to", "99999", NULL);
    cli_refused(cli, 1, "go back to fewer");
    char near_end[24];
    snprintf(near_end, sizeof near_end, "%.0f", second - 3);
    cli_call(cli, "rollback", "trip", "--to", near_end, "--json", NULL);
    cli_good(cli);
    assert_int_equal(cli_number(cli, "rolled_back.tokens_prefilled"), 0);
    assert_string_equal(cli_text(cli, "rolled_back.kept_tag"), "before-restore-1");
    cli_call(cli, "rollback", "trip", "--to", "700", "--json", NULL);
    cli_good(cli);
    assert_int_equal(cli_number(cli, "rolled_back.blocks_kept"), 1);
    assert_int_equal(cli_number(cli, "receipt.tokens_prefilled"), 700 - 320);
    assert_true(tokens_of(cli, "trip") == 700);
    cli_call(cli, "show", "trip", "--json", NULL);
    cli_good(cli);
    cli_call(cli, "rollback", "trip", "--to", "turn:3", NULL);
    cli_good(cli);
    assert_true(tokens_of(cli, "trip") <= first);
    cli_call(cli, "restore", "trip@before-restore-1", NULL);
    cli_good(cli);
    assert_true(tokens_of(cli, "trip") == second);
    fsck_is_clean(cli);
}

/* Seeds decide what /retry says, so with a temperature it differs; /edit changes the question. */
static void chat_can_be_told_again(void **state) {
    struct cli *cli = *state;
    cli->input =
        "hello there\n/retry\n/retry\n/edit something else\n/fork other\n/save mark\n/retry x\n";
    cli_call(cli, "chat", "--session", "talk", "--max-tokens", "24", "--temperature", "3", "--seed",
             "1", "--json", NULL);
    assert_int_equal(cli->code, 1); /* the last line is no command; all before it are done */
    assert_non_null(strstr(cli->err, "/retry x: no such command"));
    const cJSON *turns = cli_member(cli, "turns");
    assert_int_equal(cJSON_GetArraySize(turns), 4);
    const char *answers[4];
    for (int i = 0; i < 4; i++) {
        const cJSON *turn = cJSON_GetArrayItem(turns, i);
        answers[i] = cJSON_GetObjectItem(turn, "text")->valuestring;
        assert_true(cJSON_IsTrue(cJSON_GetObjectItem(turn, "saved")));
        double fed = cJSON_GetObjectItem(turn, "tokens_fed")->valuedouble;
        assert_int_equal(fed == 0, i == 1 || i == 2);
    }
    assert_string_not_equal(answers[0], answers[1]);
    assert_string_not_equal(answers[1], answers[2]);
    cli_call(cli, "show", "talk", "--json", NULL);
    cli_good(cli);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "session.tag_list")), 4);
    assert_string_equal(cli_text(cli, "session.tag"), "mark");
    assert_true(tokens_of(cli, "other") == tokens_of(cli, "talk"));
    cli_call(cli, "restore", "talk@before-restore-1", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    fsck_is_clean(cli);
}

static void nothing_to_tell_again_is_said(void **state) {
    struct cli *cli = *state;
    cli->input = "/retry\n";
    cli_call(cli, "chat", "--session", "talk", NULL);
    assert_int_equal(cli->code, 2);
    assert_non_null(strstr(cli->err, "does not end with an answer"));
    cli->input = "/edit\n";
    cli_call(cli, "chat", "--session", "talk", NULL);
    assert_int_equal(cli->code, 1);
    assert_non_null(strstr(cli->err, "write /edit TEXT"));
}

/* The first message: nothing stands before it but the system message. */
static void the_first_message_can_be_edited(void **state) {
    struct cli *cli = *state;
    cli->input = "hello there\n/edit other words\n";
    cli_call(cli, "chat", "--session", "talk", "--max-tokens", "8", "--json", NULL);
    cli_good(cli);
    cli->input = "other words\n";
    cli_call(cli, "chat", "--session", "twin", "--max-tokens", "8", "--json", NULL);
    cli_good(cli);
    cli_call(cli, "show", "twin", "--json", NULL);
    cli_good(cli);
    char print[64];
    snprintf(print, sizeof print, "%s", cli_text(cli, "session.lineage"));
    double tokens = cli_number(cli, "session.tokens");
    assert_true(tokens_of(cli, "talk") == tokens);
    fsck_is_clean(cli);
}

#define CLI_TEST(name) cmocka_unit_test_setup_teardown(name, cli_set_up, cli_tear_down)
TESTING_MAIN(CLI_TEST(tags_can_be_restored), CLI_TEST(forks_live_on_their_own),
             CLI_TEST(rollback_says_what_it_costs), CLI_TEST(chat_can_be_told_again),
             CLI_TEST(nothing_to_tell_again_is_said), CLI_TEST(the_first_message_can_be_edited))
