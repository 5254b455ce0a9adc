/* tests/test_cli_json.c - what the program says of itself, and its JSON for a strict reader.
 *
 * Responsible for: JSON that is UTF-8 whatever bytes were given, help and settings as JSON.
 * Not responsible for: what commands put into their JSON (test_cli.c, test_cli_errors.c).
 */
#include "tests/support_cli.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cli_call itself fails the test when a document is not UTF-8. */
static void any_bytes_give_valid_json(void **state) {
    struct cli *cli = *state;
    char store[TESTING_PATH_BYTES + 32];
    snprintf(store, sizeof store, "%s/caf\xe9", cli->home);
    cli_call(cli, "ls", "--store", store, "--json", NULL);
    cli_refused(cli, 2, "there is none");
    assert_non_null(strstr(cli_text(cli, "error.text"), "caf\xef\xbf\xbd: there is none"));
    cli_call(cli, "run", "a", "-p", "hi \xff there", "--store", store, "--json", NULL);
    cli_good(cli);
    cli_call(cli, "stats", "--store", store, "--json", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli_text(cli, "store"), "caf\xef\xbf\xbd"));
    cli_call(cli, "fr\xff", "--json", NULL);
    cli_refused(cli, 1, "no such command");
    cli_call(cli, "--threads", "\xc3", "--json", "ls", NULL);
    cli_refused(cli, 1, "--threads");
    cli_call(cli, "run", "a", "-p", "x", "-m", "\xed\xa0\x80", "--json", NULL);
    cli_refused(cli, 2, "model file");
}

static void needles_of_odd_bytes_are_refused(void **state) {
    struct cli *cli = *state;
    static const char *const odd[] = {"a\xff", "a\nb", "\x1b[2J", "a\xe2\x80\xae", "\xc2\x9b"};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        cli_call(cli, "needle", "plant", "a", "--key", odd[i], "--value", "1", "--json", NULL);
        cli_refused(cli, 1, "--key is not one line of UTF-8");
        cli_call(cli, "needle", "plant", "a", "--key", "k", "--value", odd[i], "--json", NULL);
        cli_refused(cli, 1, "--value is not one line of UTF-8");
    }
}

static void the_settings_are_json_when_asked(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "--show-config", "--json", "--seed", "18446744073709551615", "--ages", "512,1024",
             "--store-max", "3MiB", "--system", "be\xff", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "18446744073709551615"));
    assert_true(cli_number(cli, "settings.store-max") == 3 << 20);
    assert_true(cli_number(cli, "settings.ages.1") == 1024);
    assert_string_equal(cli_text(cli, "settings.recipe"), "v3");
    assert_string_equal(cli_text(cli, "settings.store"), cli->store);
    assert_string_equal(cli_text(cli, "settings.system"), "be\xef\xbf\xbd");
    assert_true(cJSON_IsTrue(cli_member(cli, "settings.json")));
    cli_call(cli, "--show-config", "--json", "--recipe", "bf16", NULL);
    assert_true(cJSON_IsNull(cli_member(cli, "settings.store-max")));
    assert_true(cJSON_IsNull(cli_member(cli, "settings.system")));
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "settings.ages")), 0);
}

/* Of one action of a command, both ways of asking. */
static void help_of_an_action_is_its_own(void **state) {
    struct cli *cli = *state;
    static const char *const forms[][3] = {{"needle", "plant", "--help"},
                                           {"help", "needle", "plant"}};
    for (size_t i = 0; i < 2; i++) {
        cli_call(cli, forms[i][0], forms[i][1], forms[i][2], NULL);
        cli_good(cli);
        assert_non_null(strstr(cli->out, "usage: coldplane needle plant NAME [flags]"));
        assert_non_null(strstr(cli->out, "plant: states the fact"));
        assert_non_null(strstr(cli->out, "keeps it only if")); /* its second line */
        assert_non_null(strstr(cli->out, "coldplane needle plant travel"));
        assert_null(strstr(cli->out, "check: asks"));
        assert_null(strstr(cli->out, "coldplane needle ls travel"));
    }
    cli_call(cli, "needle", "bogus", "--help", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "check: asks"));
}

static void help_is_json_when_asked(void **state) {
    struct cli *cli = *state;
    static const char *const forms[][3] = {{"needle", "--help", "--json"},
                                           {"help", "needle", "--json"}};
    for (size_t i = 0; i < 2; i++) {
        cli_call(cli, forms[i][0], forms[i][1], forms[i][2], NULL);
        cli_good(cli);
        assert_int_equal(cJSON_GetArraySize(cli_member(cli, "commands")), 1);
        assert_string_equal(cli_text(cli, "commands.0.name"), "needle");
        assert_non_null(strstr(cli_text(cli, "commands.0.help"), "plant:"));
        assert_non_null(strstr(cli_text(cli, "commands.0.examples"), "coldplane needle"));
    }
    cli_call(cli, "--help", "--json", NULL);
    cli_good(cli);
    assert_true(cJSON_GetArraySize(cli_member(cli, "commands")) > 10);
    cli_call(cli, "help", "bogus", "--json", NULL);
    cli_refused(cli, 1, "bogus: no such command; `coldplane help` lists them: chat, run, ls, ");
    cli_call(cli, "bogus", "--help", NULL);
    cli_refused(cli, 1, "bogus: no such command; `coldplane help` lists them: chat, run, ls, ");
}

static void a_value_is_no_flag(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "run", "a", "--prompt", "--json", NULL);
    cli_good(cli);
    assert_int_not_equal(cli->out[0], '{');
    cli_call(cli, "show", "b", "--prompt", "--json", NULL);
    cli_refused(cli, 1, "--prompt means nothing to `show`");
    assert_int_equal(cli->out[0], 0);
}

static void a_chat_is_one_document(void **state) {
    struct cli *cli = *state;
    cli->input = "hello\nand then?\n/quit\n";
    cli_call(cli, "chat", "-s", "talk", "-n", "4", "--json", NULL);
    cli_good(cli);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "turns")), 2);
    assert_string_equal(cli_text(cli, "turns.0.session"), "new");
    assert_string_equal(cli_text(cli, "turns.1.session"), "resident");
    assert_true(cli_number(cli, "turns.1.receipt.tokens") >
                cli_number(cli, "turns.0.receipt.tokens"));
    cli->input = "go on\n";
    cli_call(cli, "chat", "-s", "talk", "-n", "4", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "turns.0.session"), "woken");
    assert_string_equal(cli_text(cli, "turns.0.woken.fingerprint"), "bits-equal");
    assert_true(cli_number(cli, "turns.0.woken.tokens_prefilled") == 0);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

TESTING_MAIN(TEST(any_bytes_give_valid_json), TEST(needles_of_odd_bytes_are_refused),
             TEST(the_settings_are_json_when_asked), TEST(help_is_json_when_asked),
             TEST(help_of_an_action_is_its_own), TEST(a_value_is_no_flag),
             TEST(a_chat_is_one_document))
