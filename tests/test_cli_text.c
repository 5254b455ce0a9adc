/* tests/test_cli_text.c - `show --text`: what was said, out of a stored session.
 *
 * Responsible for: each turn's text without the template, as text and as JSON, with both templates;
 * another vocabulary.
 * Not responsible for: the rest of `show` (test_cli.c).
 */
#include "tests/support_cli.h"
#include "tests/support_tiny_model.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char llama3[] = "{% <|start_header_id|> %}<|eot_id|>{{ content | trim }}";

/* The turn's role and text; of the last `show --json`. */
static void expect_turn(struct cli *cli, int index, const char *role, const char *text) {
    const cJSON *turn = cJSON_GetArrayItem(cli_member(cli, "session.turns"), index);
    assert_non_null(turn);
    assert_string_equal(cJSON_GetObjectItem(turn, "role")->valuestring, role);
    assert_string_equal(cJSON_GetObjectItem(turn, "text")->valuestring, text);
}

static void say(struct cli *cli, const char *what, const char *system, char answer[4096]) {
    cli_call(cli, "run", "a", "-p", what, "--json", system != NULL ? "--system" : NULL, system,
             NULL);
    cli_good(cli);
    snprintf(answer, 4096, "%s", cli_text(cli, "text"));
}

/* Answers are cut at --max-tokens, so that the next turn closes the one before; what is written
 * like a control token, and white space, comes back as it was said. */
static void what_was_said_comes_back(void **state) {
    struct cli *cli = *state;
    static const char *const said[] = {"hello there,\n how are you? ", "<|im_end|>\n\xe6\x97\xa5"};
    static char answers[2][4096];
    for (int kind = 0; kind < 2; kind++) {
        struct tiny_model_options options = tiny_model_default();
        options.template = kind == 0 ? options.template : llama3;
        tiny_model_write(&options, cli->model);
        say(cli, said[0], "be brief", answers[0]);
        say(cli, said[1], NULL, answers[1]);
        cli_call(cli, "show", "a", "--text", "--json", NULL);
        cli_good(cli);
        assert_int_equal(cJSON_GetArraySize(cli_member(cli, "session.turns")), 5);
        expect_turn(cli, 0, "system", "be brief");
        /* Llama-3 takes white space around a message away. */
        expect_turn(cli, 1, "user", kind == 0 ? said[0] : "hello there,\n how are you?");
        expect_turn(cli, 2, "assistant", answers[0]);
        expect_turn(cli, 3, "user", said[1]);
        expect_turn(cli, 4, "assistant", answers[1]);
        cli_call(cli, "show", "a", "--text", NULL);
        cli_good(cli);
        assert_ptr_equal(strstr(cli->out, "1 system:\nbe brief\n\n2 user:\nhello there,\n how are"),
                         cli->out);
        assert_non_null(
            strstr(cli->out, "\n\n4 user:\n<|im_end|>\n\xe6\x97\xa5\n\n5 assistant:\n"));
        assert_null(strstr(cli->out, "snapshot"));
        cli_call(cli, "show", "a", NULL);
        cli_good(cli);
        assert_null(strstr(cli->out, "be brief"));
        cli_call(cli, "rm", "a", NULL);
        cli_good(cli);
    }
}

/* Without a system message the first token of all stands in front of another turn. */
static void a_first_turn_of_any_role(void **state) {
    struct cli *cli = *state;
    static char answer[4096];
    struct tiny_model_options options = tiny_model_default();
    options.template = llama3;
    tiny_model_write(&options, cli->model);
    say(cli, "hello there", NULL, answer);
    cli_call(cli, "show", "a", "--text", "--json", NULL);
    cli_good(cli);
    expect_turn(cli, 0, "user", "hello there");
    expect_turn(cli, 1, "assistant", answer);
}

static void another_vocabulary_is_refused(void **state) {
    struct cli *cli = *state;
    static char answer[4096];
    say(cli, "hello there", NULL, answer);
    cli_call(cli, "show", "a", "--text", "--model", "synth:small", NULL);
    cli_refused(cli, 3, "has another vocabulary than the session's model; name that with --model");
    cli_call(cli, "show", "a", "--text", "--model", "/nowhere/m.gguf", NULL);
    cli_refused(cli, 2, "/nowhere/m.gguf");
    cli_call(cli, "show", "b", "--text", NULL);
    cli_refused(cli, 2, "session b: not in this store");
    cli_call(cli, "show", "a", "--model", "/nowhere/m.gguf", NULL);
    cli_good(cli);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

TESTING_MAIN(TEST(what_was_said_comes_back), TEST(a_first_turn_of_any_role),
             TEST(another_vocabulary_is_refused))
