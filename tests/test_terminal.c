/* tests/test_terminal.c - chat and progress as seen on a terminal.
 *
 * Responsible for: line editing, ctrl-C while a message is read, while an answer is made (beside a
 * daemon, too) and at the prompt, SIGTERM, what is saved after each; the progress line. Everything
 * runs on a pseudo terminal of its own.
 * Not responsible for: chat through a pipe (test_cli.c).
 */
#include "tests/support_cli.h"
#include "tests/support_daemon.h"
#include "tools/progress.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { SEEN_BYTES = 1 << 18, PATIENCE_MS = 60000 };

struct terminal {
    pid_t child;
    int file;
    char seen[SEEN_BYTES];
    size_t count, from; /* what was seen before `from` has been matched already */
};

static void open_terminal(struct terminal *terminal, const char *longest) {
    char program[TESTING_PATH_BYTES];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 32);
    assert_true(length > 0);
    program[length] = 0;
    for (int i = 0; i < 2; i++)
        *strrchr(program, '/') = 0;
    memcpy(program + strlen(program), "/coldplane", sizeof "/coldplane");
    memset(terminal, 0, sizeof *terminal);
    terminal->child = forkpty(&terminal->file, NULL, NULL, NULL);
    assert_true(terminal->child >= 0);
    if (terminal->child == 0) {
        setenv("TERM", "dumb", 1);
        execl(program, "coldplane", "chat", "-s", "t", "-n", longest, (char *)NULL);
        _exit(126);
    }
}

/* Reads until `text` comes; fails the test when it does not. */
static void expect(struct terminal *terminal, const char *text) {
    for (;;) {
        struct pollfd wait = {.fd = terminal->file, .events = POLLIN};
        const char *found = strstr(terminal->seen + terminal->from, text);
        if (found != NULL) {
            terminal->from = (size_t)(found - terminal->seen) + strlen(text);
            return;
        }
        ssize_t got = -1;
        if (terminal->count < SEEN_BYTES - 4096 && poll(&wait, 1, PATIENCE_MS) == 1)
            got = read(terminal->file, terminal->seen + terminal->count, 4095);
        if (got <= 0)
            fail_msg("`%s` never came; seen:\n%s", text, terminal->seen);
        terminal->count += (size_t)got;
        terminal->seen[terminal->count] = 0;
    }
}

/* Waits until the editor holds the terminal (1) or has given it back (0). What is typed before it
 * holds it is echoed by the terminal itself; a ctrl-C before it gives it back is a character. */
static void await_editor(struct terminal *terminal, int holds) {
    struct termios mode;
    do {
        assert_int_equal(tcgetattr(terminal->file, &mode), 0);
        sched_yield();
    } while (((mode.c_lflag & ICANON) == 0) != holds);
}

static void expect_prompt(struct terminal *terminal) {
    expect(terminal, "> ");
    await_editor(terminal, 1);
}

static void type(struct terminal *terminal, const char *text) {
    assert_int_equal(write(terminal->file, text, strlen(text)), strlen(text));
}

/* Drains what is left, so that the program can end. Returns its exit code. */
static int ended(struct terminal *terminal) {
    char rest[4096];
    int status = 0;
    while (read(terminal->file, rest, sizeof rest) > 0)
        continue;
    assert_int_equal(waitpid(terminal->child, &status, 0), terminal->child);
    close(terminal->file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void a_line_is_edited_answered_and_saved(void **state) {
    struct cli *cli = *state;
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "8");
    expect(terminal, "session t, new, 0 tokens");
    expect_prompt(terminal);
    type(terminal, "hellp\x08o, caf\xc3\xa9 \xf0\x9f\x98\x80\n");
    expect_prompt(terminal);
    type(terminal, "/save\n");
    expect(terminal, "saved: ");
    expect_prompt(terminal);
    type(terminal, "\x04");
    assert_int_equal(ended(terminal), 0);
    cli_call(cli, "ls", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "sessions.0.tokens") > 30);
    free(terminal);
}

/* Nobody types for a second: the session goes to sleep, and wakes for the next line. */
static void an_idle_session_sleeps_and_wakes(void **state) {
    struct cli *cli = *state;
    struct terminal *terminal = calloc(1, sizeof *terminal);
    char path[TESTING_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/config", cli->home);
    FILE *config = fopen(path, "a");
    assert_non_null(config);
    fprintf(config, "idle-seconds = 1\nprobes = 0\n");
    assert_int_equal(fclose(config), 0);
    open_terminal(terminal, "8");
    expect(terminal, "session t, new, 0 tokens");
    expect_prompt(terminal);
    type(terminal, "hello there\n");
    expect_prompt(terminal);
    do {
        cli_call(cli, "show", "t", "--json", NULL);
        cli_good(cli);
    } while (!cJSON_IsTrue(cli_member(cli, "session.asleep")));
    /* Its receipt is written down behind the batch that says so. */
    do {
        cli_call(cli, "receipt", "--json", NULL);
        cli_good(cli);
    } while (strcmp(cli_text(cli, "receipts.0.operation"), "save") == 0);
    assert_string_equal(cli_text(cli, "receipts.0.operation"), "sleep");
    assert_string_equal(cli_text(cli, "receipts.0.name"), "t");
    type(terminal, "are you there?\n");
    expect(terminal, "woken: ");
    expect(terminal, "bits-equal");
    expect_prompt(terminal);
    type(terminal, "/quit\n");
    assert_int_equal(ended(terminal), 0);
    free(terminal);
}

static void stop_an_answer(struct cli *cli) {
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "7000");
    expect_prompt(terminal);
    type(terminal, "go on for ever\n");
    expect(terminal, "ever\r\n");
    await_editor(terminal, 0);
    type(terminal, "\x03");
    expect(terminal, "(stopped; saved so far)");
    expect_prompt(terminal);
    type(terminal, "/quit\n");
    assert_int_equal(ended(terminal), 0);
    cli_call(cli, "restore", "t", "--json", NULL);
    cli_good(cli);
    double tokens = cli_number(cli, "receipt.tokens");
    assert_true(tokens > 30 && tokens < 7000);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    free(terminal);
}

static void ctrl_c_stops_an_answer_and_keeps_it(void **state) {
    stop_an_answer(*state);
}

/* The same where a daemon holds the store. */
static void play_beside_daemon(struct cli *cli, void (*play)(struct cli *cli)) {
    struct daemon_run run = {0};
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    play(cli);
    assert_true(daemon_said(&run, "control command chat exit=0"));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

static void ctrl_c_stops_an_answer_of_a_daemon(void **state) {
    play_beside_daemon(*state, stop_an_answer);
}

/* A line of many tokens, the last word of which the terminal has shown: ctrl-C comes while it is
 * read. What is said of that begins with `said`. */
static void stop_in_a_message(struct terminal *terminal, const char *said) {
    char line[1600] = "";
    for (int i = 0; strlen(line) + 16 < sizeof line; i++)
        snprintf(line + strlen(line), 16, "%x ", i * 2654435 % 65521);
    snprintf(line + strlen(line), 16, "over\n");
    type(terminal, line);
    expect(terminal, "over\r\n");
    await_editor(terminal, 0);
    type(terminal, "\x03");
    expect(terminal, said);
    expect_prompt(terminal);
}

static double tokens_of(struct cli *cli) {
    cli_call(cli, "show", "t", "--json", NULL);
    cli_good(cli);
    return cli_number(cli, "session.tokens");
}

static void take_a_message_back(struct cli *cli) {
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "4");
    expect_prompt(terminal);
    type(terminal, "hello\n");
    expect_prompt(terminal);
    double tokens = tokens_of(cli);
    stop_in_a_message(terminal, "session t: stopped while the message was read, at token ");
    assert_non_null(strstr(terminal->seen, "; nothing of it is kept, say it again"));
    assert_true(tokens_of(cli) == tokens);
    type(terminal, "and again\n");
    expect_prompt(terminal);
    assert_true(tokens_of(cli) > tokens);
    type(terminal, "/quit\n");
    assert_int_equal(ended(terminal), 0);
    free(terminal);
}

static void ctrl_c_takes_a_message_back(void **state) {
    take_a_message_back(*state);
}

static void ctrl_c_takes_a_message_of_a_daemon_back(void **state) {
    play_beside_daemon(*state, take_a_message_back);
}

/* A session of one turn, saved, and a chat that cannot save more: the disk that is full is a limit
 * of the child's files. */
struct full_disk {
    struct terminal *terminal;
    struct rlimit before;
    double tokens; /* that are saved */
};

static struct full_disk chat_on_full_disk(struct cli *cli) {
    struct full_disk full = {.terminal = calloc(1, sizeof *full.terminal)};
    char segment[TESTING_PATH_BYTES + 32];
    struct stat info;
    cli_call(cli, "run", "t", "-p", "hello", NULL);
    cli_good(cli);
    full.tokens = tokens_of(cli);
    snprintf(segment, sizeof segment, "%s/seg/00000001.seg", cli->store);
    assert_int_equal(stat(segment, &info), 0);
    open_terminal(full.terminal, "4");
    expect_prompt(full.terminal);
    assert_int_equal(prlimit(full.terminal->child, RLIMIT_FSIZE, NULL, &full.before), 0);
    const struct rlimit cut = {(rlim_t)info.st_size, full.before.rlim_max};
    assert_int_equal(prlimit(full.terminal->child, RLIMIT_FSIZE, &cut, NULL), 0);
    type(full.terminal, "unsaved words\n");
    expect(full.terminal, "File too large");
    expect_prompt(full.terminal);
    assert_true(tokens_of(cli) == full.tokens);
    return full;
}

static void make_room(const struct full_disk *full) {
    assert_int_equal(prlimit(full->terminal->child, RLIMIT_FSIZE, &full->before, NULL), 0);
}

/* An answer that could not be saved is nowhere else: what was read of the next message stays with
 * it, and how to take that out is said. */
static void a_message_behind_an_unsaved_answer_stays(void **state) {
    struct cli *cli = *state;
    struct full_disk full = chat_on_full_disk(cli);
    char rollback[64];
    unsigned long n = 0;
    make_room(&full);
    stop_in_a_message(full.terminal, "stopped; the message was cut at token ");
    const char *remedy = strstr(full.terminal->seen, "saved so; `coldplane rollback t --to ");
    assert_non_null(remedy);
    assert_int_equal(sscanf(remedy, "saved so; `coldplane rollback t --to %lu`", &n), 1);
    type(full.terminal, "/quit\n");
    assert_int_equal(ended(full.terminal), 0);
    assert_true(tokens_of(cli) > (double)n && (double)n > full.tokens);
    snprintf(rollback, sizeof rollback, "%lu", n);
    cli_call(cli, "rollback", "t", "--to", rollback, NULL);
    cli_good(cli);
    cli_call(cli, "show", "t", "--text", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "4 user:\nunsaved words\n"));
    assert_null(strstr(cli->out, "6 user:"));
    free(full.terminal);
}

/* At the end there may be room for it; else leaving says what is lost. */
static void what_could_not_be_saved_is_saved_at_the_end(void **state) {
    struct cli *cli = *state;
    struct full_disk full = chat_on_full_disk(cli);
    make_room(&full);
    type(full.terminal, "/quit\n");
    expect(full.terminal, "saved: ");
    assert_int_equal(ended(full.terminal), 0);
    assert_true(tokens_of(cli) > full.tokens);
    free(full.terminal);
    full = chat_on_full_disk(cli);
    type(full.terminal, "/quit\n");
    expect(full.terminal, "what was said since the last save is lost: session t was not saved: ");
    assert_int_equal(ended(full.terminal), 5);
    assert_true(tokens_of(cli) == full.tokens);
    free(full.terminal);
}

static void an_unknown_command_is_not_said_to_the_model(void **state) {
    (void)state;
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "4");
    expect_prompt(terminal);
    type(terminal, "/sve\n");
    expect(terminal, "/sve: no such command; /help lists them");
    expect_prompt(terminal);
    type(terminal, "/save\n");
    expect(terminal, "nothing to save");
    expect_prompt(terminal);
    type(terminal, "/quit\n");
    assert_int_equal(ended(terminal), 0);
    free(terminal);
}

static void ctrl_c_twice_at_the_prompt_leaves(void **state) {
    (void)state;
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "4");
    expect_prompt(terminal);
    type(terminal, "half a li");
    expect(terminal, "half a li");
    const char *behind = terminal->seen + terminal->from;
    type(terminal, "\x03");
    expect(terminal, "ctrl-C again");
    /* The prompt comes once, behind what is said. */
    const char *again = strstr(behind, "> ");
    assert_true(again == NULL || again > strstr(behind, "(ctrl-C"));
    expect_prompt(terminal);
    type(terminal, "\x03");
    assert_int_equal(ended(terminal), 0);
    free(terminal);
}

static void a_signal_to_end_leaves_what_was_saved(void **state) {
    struct cli *cli = *state;
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "4");
    expect_prompt(terminal);
    type(terminal, "hello\n");
    expect_prompt(terminal);
    kill(terminal->child, SIGTERM);
    assert_int_equal(ended(terminal), 0);
    cli_call(cli, "restore", "t", NULL);
    cli_good(cli);
    free(terminal);
}

/* The daemon had the terminal and cannot give it back. */
static void a_terminal_is_given_back_when_a_daemon_dies(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    struct terminal *terminal = calloc(1, sizeof *terminal);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    open_terminal(terminal, "4");
    expect_prompt(terminal);
    assert_int_equal(daemon_end(&run, SIGKILL), 128 + SIGKILL);
    expect(terminal, "ended before the command did");
    await_editor(terminal, 0);
    assert_int_equal(ended(terminal), 5);
    free(terminal);
}

/* --- progress */

static uint64_t hand_clock(void *context) {
    return *(uint64_t *)context;
}

static void progress_waits_a_second_and_cleans_up(void **state) {
    (void)state;
    int ours = -1, theirs = -1;
    uint64_t now_ns = 5;
    char seen[512] = "";
    struct progress progress;
    const struct kv_clock clock = {hand_clock, hand_clock, &now_ns};
    assert_int_equal(openpty(&ours, &theirs, NULL, NULL, NULL), 0);
    FILE *out = fdopen(theirs, "w");
    progress_begin(&progress, out, &clock, "reading", "tokens");
    progress_update(&progress, 1, 100);
    now_ns += 900000000;
    progress_update(&progress, 2, 100);
    progress_end(&progress);
    now_ns += 200000000;
    progress_update(&progress, 25, 100);
    now_ns += 100000000; /* too soon for another line */
    progress_update(&progress, 26, 100);
    progress_end(&progress);
    static const char expected[] = "\r\033[Kreading: 25 of 100 tokens, 25 %\r\033[K";
    /* What was written at once may come in pieces. */
    for (size_t count = 0; count < sizeof expected - 1;) {
        ssize_t got = read(ours, seen + count, sizeof seen - 1 - count);
        assert_true(got > 0);
        count += (size_t)got;
    }
    assert_string_equal(seen, expected);
    fclose(out);
    close(ours);
}

static void progress_is_silent_without_a_terminal(void **state) {
    (void)state;
    uint64_t now_ns = 0;
    struct progress progress;
    const struct kv_clock clock = {hand_clock, hand_clock, &now_ns};
    FILE *out = tmpfile();
    progress_begin(&progress, out, &clock, "reading", "tokens");
    now_ns = 10000000000;
    progress_update(&progress, 1, 2);
    progress_end(&progress);
    assert_int_equal(ftell(out), 0);
    fclose(out);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

/* Reading a long model takes a while in which nobody looks at signals; LOCK says that it began. */
static void a_signal_ends_what_is_being_opened(void **state) {
    struct cli *cli = *state;
    char lock[TESTING_PATH_BYTES + 32], want[32], text[64];
    int status = 0;
    cli_call(cli, "run", "t", "-p", "hello", NULL); /* a store that is there is opened first */
    cli_good(cli);
    assert_int_equal(truncate(cli->model, INT64_C(1) << 31), 0);
    snprintf(lock, sizeof lock, "%s/LOCK", cli->store);
    struct terminal *terminal = calloc(1, sizeof *terminal);
    open_terminal(terminal, "4");
    snprintf(want, sizeof want, "pid %ld ", (long)terminal->child);
    do {
        FILE *file = fopen(lock, "re");
        memset(text, 0, sizeof text);
        if (file != NULL && fread(text, 1, sizeof text - 1, file) == 0)
            text[0] = 0;
        if (file != NULL)
            fclose(file);
        sched_yield();
    } while (strncmp(text, want, strlen(want)) != 0);
    assert_int_equal(kill(terminal->child, SIGTERM), 0);
    assert_int_equal(waitpid(terminal->child, &status, 0), terminal->child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    close(terminal->file);
    free(terminal);
}

TESTING_MAIN(TEST(a_line_is_edited_answered_and_saved), TEST(ctrl_c_stops_an_answer_and_keeps_it),
             TEST(ctrl_c_stops_an_answer_of_a_daemon), TEST(ctrl_c_takes_a_message_back),
             TEST(ctrl_c_takes_a_message_of_a_daemon_back),
             TEST(a_message_behind_an_unsaved_answer_stays),
             TEST(what_could_not_be_saved_is_saved_at_the_end),
             TEST(an_idle_session_sleeps_and_wakes),
             TEST(an_unknown_command_is_not_said_to_the_model),
             TEST(ctrl_c_twice_at_the_prompt_leaves), TEST(a_signal_ends_what_is_being_opened),
             TEST(a_signal_to_end_leaves_what_was_saved),
             TEST(a_terminal_is_given_back_when_a_daemon_dies),
             cmocka_unit_test(progress_waits_a_second_and_cleans_up),
             cmocka_unit_test(progress_is_silent_without_a_terminal))
