/* tests/test_daemon.c - coldplaned as a process, and the command line beside it.
 *
 * Responsible for: every command gives the same output and exit code through the daemon as without
 * it; starting, refusing to start, ending under load, dying, what happens to files underneath.
 * Not responsible for: HTTP (test_http*.c), answers under load (test_serve.c).
 */
#include "tests/support_daemon.h"
#include "tests/testing.h"

#include <arpa/inet.h>
#include <cjson/cJSON.h>
#include <ctype.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* --- the same with and without */

struct step {
    const char *args[10];
    const char *input;
};

static const struct step steps[] = {
    {{"run", "a", "--prompt", "hello there"}, NULL},
    {{"run", "a", "--prompt", "and now?"}, NULL},
    {{"run", "a", "--prompt", "-"}, "from a pipe\n"},
    {{"run", "a", "--prompt", ""}, NULL},
    {{"run", "a/b", "--prompt", "x"}, NULL},
    {{"run", "a", "--prompt", "x", "--no-such-flag"}, NULL},
    {{"snapshot", "a", "--tag", "red"}, NULL},
    {{"snapshot", "a", "--tag", "red"}, NULL},
    {{"snapshot", "nobody"}, NULL},
    {{"fork", "a", "b"}, NULL},
    {{"fork", "a", "b"}, NULL},
    {{"fork", "a@red", "r"}, NULL},
    {{"fork", "nobody", "x"}, NULL},
    {{"run", "b", "--prompt", "on another way"}, NULL},
    {{"rename", "b", "c"}, NULL},
    {{"rename", "b", "d"}, NULL},
    {{"rename", "c", "a"}, NULL},
    {{"run", "c", "--prompt", "under a new name"}, NULL},
    {{"pin", "c"}, NULL},
    {{"rm", "c"}, NULL},
    {{"unpin", "c"}, NULL},
    {{"pin", "nobody"}, NULL},
    {{"expire", "c"}, NULL},
    {{"expire", "c", "--undo"}, NULL},
    {{"needle", "plant", "a", "--key", "colour", "--value", "green"}, NULL},
    {{"needle", "add", "a", "--key", "k", "--ask", "what?", "--expect", "nowhere said"}, NULL},
    {{"needle", "ls", "a"}, NULL},
    {{"needle", "rm", "a", "--key", "nothing"}, NULL},
    {{"needle", "check", "a"}, NULL},
    {{"needle", "check", "a", "--key", "nothing"}, NULL},
    {{"needle", "check", "nobody"}, NULL},
    {{"restore", "a"}, NULL},
    {{"restore", "r"}, NULL},
    {{"restore", "nobody"}, NULL},
    {{"restore", "a@red"}, NULL},
    {{"restore", "a@blue"}, NULL},
    {{"run", "a", "--prompt", "after going back"}, NULL},
    {{"rollback", "a", "--to", "30"}, NULL},
    {{"rollback", "a", "--to", "999999"}, NULL},
    {{"rollback", "nobody", "--to", "3"}, NULL},
    {{"run", "a", "--prompt", "after the rollback"}, NULL},
    {{"chat", "-s", "talk"}, "hello\n/save one\n/retry\n/edit another thing\n/fork two\n/quit\n"},
    {{"chat", "-s", "talk"}, "and again\n/nothing\n"},
    {{"run", "two", "--prompt", "the fork goes on"}, NULL},
    {{"rm", "a@red"}, NULL},
    {{"rm", "a@red"}, NULL},
    {{"rm", "c"}, NULL},
    {{"rm", "nobody"}, NULL},
    {{"gc", "--dry-run"}, NULL},
    {{"gc"}, NULL},
    {{"scrub"}, NULL},
    {{"scrub", "--rate", "1GiB"}, NULL},
    {{"gc", "--rate", "1GiB"}, NULL},
    {{"verify"}, NULL},
    {{"audit"}, NULL},
    {{"fsck"}, NULL},
    {{"fsck", "--read-data"}, NULL},
    {{"fsck", "--repair"}, NULL},
    {{"fsck", "--rebuild-index"}, NULL},
    {{"rm", "r", "--purge"}, NULL},
    {{"rm", "r", "--purge"}, NULL},
    {{"fsck", "--read-data"}, NULL},
    {{"export", "a", "/nonexistent/x"}, NULL},
    {{"run", "a", "--prompt", "last", "--json"}, NULL},
};
enum { STEPS = sizeof steps / sizeof steps[0] };

static int is_unit(const char *word, size_t length) {
    static const char *const units[] = {"ns", "µs", "ms", "s", "B", "KiB", "MiB"};
    length -= length > 1 && word[length - 1] == ',';
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strlen(units[i]) == length && memcmp(word, units[i], length) == 0)
            return 1;
    return 0;
}

/* Ids, times, sizes, which stage was slowest and columns are of the run; all else must be the same.
 * Words are parted by spaces and line ends. */
static void without_numbers(char *text) {
    char *out = text;
    int bound = 0;
    for (const char *at = text; *at != 0;) {
        size_t length = strcspn(at, " \n");
        int digits = 0;
        for (size_t i = 0; i < length; i++)
            digits |= isdigit((unsigned char)at[i]);
        if (length == 0) {
            if (*at == '\n' || out == text || out[-1] != ' ')
                *out++ = *at;
            at++;
            continue;
        }
        if (digits || bound || is_unit(at, length)) {
            *out++ = '#';
        } else {
            memmove(out, at, length);
            out += length;
        }
        bound = length == 2 && memcmp(at, "by", 2) == 0;
        at += length;
    }
    *out = 0;
}

struct outcome {
    int code;
    char *out, *err;
};

static struct outcome run_step(struct cli *cli, const struct step *step) {
    const char *const *a = step->args;
    cli->input = step->input;
    cli_call(cli, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], NULL);
    without_numbers(cli->out);
    without_numbers(cli->err);
    return (struct outcome){cli->code, strdup(cli->out), strdup(cli->err)};
}

/* How the session came back is not said where it was awake already: the line of a chat, and the
 * receipt of a command that wakes on its way. */
static void drop_waking(char *text) {
    char *out = text;
    int inside = 0;
    for (char *line = text; *line != 0;) {
        size_t length = strcspn(line, "\n");
        length += line[length] == '\n';
        inside = strncmp(line, "restore of", 10) == 0 || (inside && line[0] == ' ');
        if (!inside && strncmp(line, "woken", 5) != 0 && strncmp(line, "restored", 8) != 0) {
            memmove(out, line, length);
            out += length;
        }
        line += length;
    }
    *out = 0;
}

static void compare(const struct step *step, const struct outcome *alone,
                    const struct outcome *with) {
    int wakes = strcmp(step->args[0], "restore") == 0;
    int json = step->args[4] != NULL && strcmp(step->args[4], "--json") == 0;
    const struct outcome *both[] = {alone, with};
    for (int i = 0; i < 2 && !wakes; i++) {
        drop_waking(both[i]->out);
        drop_waking(both[i]->err);
    }
    if (with->code != alone->code || (!json && strcmp(with->out, alone->out) != 0) ||
        strcmp(with->err, alone->err) != 0)
        fail_msg("%s %s: alone %d\n%s%s\nwith the daemon %d\n%s%s", step->args[0],
                 step->args[1] != NULL ? step->args[1] : "", alone->code, alone->out, alone->err,
                 with->code, with->out, with->err);
}

static void every_command_is_the_same(void **state) {
    struct cli *cli = *state;
    static struct outcome alone[STEPS];
    struct daemon_run run = {0};
    char moved[TESTING_PATH_BYTES + 32];
    for (int i = 0; i < STEPS; i++)
        alone[i] = run_step(cli, &steps[i]);
    snprintf(moved, sizeof moved, "%s-alone", cli->store);
    assert_int_equal(rename(cli->store, moved), 0);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    for (int i = 0; i < STEPS; i++) {
        struct outcome with = run_step(cli, &steps[i]);
        compare(&steps[i], &alone[i], &with);
        free(with.out);
        free(with.err);
        free(alone[i].out);
        free(alone[i].err);
    }
    /* The daemon did the work: it says so. */
    assert_true(daemon_said(&run, "control command run exit=0"));
    assert_true(daemon_said(&run, "control command scrub exit=0"));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

/* Only the daemon knows its slots, who is awake and what waits. */
static void top_tells_what_the_daemon_knows(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    cli_call(cli, "run", "a", "--prompt", "x", NULL);
    cli_good(cli);
    cli_call(cli, "top", "--once", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "\nslots  [#"));
    assert_non_null(strstr(cli->out, "1 awake, 0 to spill\n"));
    assert_non_null(strstr(cli->out, " idle "));
    for (const char *line = cli->out; *line != 0; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 80);
    cli_call(cli, "top", "--json", NULL);
    cli_good(cli);
    const cJSON *first = cJSON_GetArrayItem(cli_member(cli, "sessions"), 0);
    assert_string_equal(cJSON_GetObjectItem(first, "state")->valuestring, "idle");
    assert_true(cli_member(cli, "slots_used")->valuedouble > 0);
    assert_true(daemon_said(&run, "control command top exit=0"));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    cli_call(cli, "top", "--once", NULL);
    cli_good(cli);
    assert_null(strstr(cli->out, "\nslots"));
}

static void what_a_daemon_cannot_do_is_refused(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    cli_call(cli, "run", "a", "--prompt", "x", "--threads", "2", NULL);
    cli_refused(cli, 3, "--threads: the daemon");
    cli_call(cli, "run", "a", "--prompt", "x", "--threads", "1", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGINT), 0);
}

/* --- starting */

static void a_daemon_that_must_not_start_does_not(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0}, second = {0};
    struct stat info;
    char key[TESTING_PATH_BYTES + 16];
    int code = 0;
    snprintf(key, sizeof key, "%s/key", cli->home);
    assert_false(daemon_start(cli, &run, &code, "--listen", "0.0.0.0:0", NULL));
    assert_int_equal(code, 1);
    assert_true(daemon_said(&run, "--remote"));
    assert_false(
        daemon_start(cli, &run, &code, "--listen", "0.0.0.0:0", "--remote", "--no-key", NULL));
    assert_int_equal(code, 1);
    assert_true(daemon_said(&run, "--no-key"));
    assert_false(daemon_start(cli, &run, &code, "--listen", "localhost:80", NULL));
    assert_int_equal(code, 1);
    /* What HTTP has no use for is refused and not passed over. */
    assert_false(daemon_start(cli, &run, &code, "--system", "be kind", NULL));
    assert_int_equal(code, 1);
    assert_true(daemon_said(&run, "--system means nothing to `coldplaned`; `coldplaned --help`"));
    assert_false(daemon_start(cli, &run, &code, "--sistem", "be kind", NULL));
    assert_int_equal(code, 1);
    assert_true(daemon_said(&run, "--sistem: no such flag; `coldplaned --help` lists its flags"));
    assert_false(daemon_start(cli, &run, &code, "--wake", "recompute", NULL));
    assert_int_equal(code, 1);
    assert_true(daemon_said(&run, "--wake"));
    assert_int_not_equal(stat(key, &info), 0);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    assert_int_equal(stat(key, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(info.st_size, 3 + 64 + 1);
    assert_false(daemon_start(cli, &second, &code, NULL, NULL));
    assert_int_equal(code, 3);
    assert_true(daemon_said(&second, "coldplaned"));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    assert_int_equal(chmod(key, 0644), 0);
    assert_false(daemon_start(cli, &run, &code, NULL, NULL));
    assert_int_equal(code, 1);
    assert_true(daemon_said(&run, "chmod 600"));
    assert_int_equal(chmod(key, 0600), 0);
    assert_true(daemon_start(cli, &run, NULL, "--listen", "0.0.0.0:0", "--remote", NULL));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

/* The control socket is open already when the port turns out to be taken. */
static void a_port_that_is_taken_ends_the_start_in_order(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    char listen_at[32], control[TESTING_PATH_BYTES + 32];
    int code = 0, taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(taken, (struct sockaddr *)&address, size), 0);
    assert_int_equal(listen(taken, 1), 0);
    assert_int_equal(getsockname(taken, (struct sockaddr *)&address, &size), 0);
    snprintf(listen_at, sizeof listen_at, "127.0.0.1:%u", ntohs(address.sin_port));
    assert_false(daemon_start(cli, &run, &code, "--listen", listen_at, NULL));
    close(taken);
    assert_in_range(code, 1, 127); /* it ended by itself */
    assert_true(daemon_said(&run, "cannot listen at 127.0.0.1 port"));
    snprintf(control, sizeof control, "%s/control", cli->store);
    assert_int_not_equal(access(control, F_OK), 0);
}

/* --- ending */

enum { CLIENTS = 4, TURNS_MOST = 100 };

static void stop_path(const struct cli *cli, char path[TESTING_PATH_BYTES + 16]) {
    snprintf(path, TESTING_PATH_BYTES + 16, "%s/stop", cli->home);
}

/* A client of its own process: talks until the file `stop` is there or it is refused; exits with
 * how often it was answered. */
static pid_t talker(struct cli *cli, int index) {
    char name[8], stop[TESTING_PATH_BYTES + 16];
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid != 0)
        return pid;
    stop_path(cli, stop);
    snprintf(name, sizeof name, "s%d", index);
    int turns = 0;
    while (turns < TURNS_MOST && access(stop, F_OK) != 0 &&
           daemon_client_end(daemon_client(NULL, "run", name, "-p", "go on", NULL)) == 0)
        turns++;
    _exit(turns);
}

static uint64_t turns_of(struct cli *cli, int index) {
    char name[8];
    int users = 0;
    snprintf(name, sizeof name, "s%d", index);
    cli_call(cli, "show", name, "--json", NULL);
    cli_good(cli);
    const cJSON *turn;
    cJSON_ArrayForEach(turn, cli_member(cli, "session.turns")) {
        const char *role = cJSON_GetStringValue(cJSON_GetObjectItem(turn, "role"));
        users += role != NULL && strcmp(role, "user") == 0;
    }
    return (uint64_t)users;
}

/* Until every client was answered once. */
static void await_saves(const struct daemon_run *run) {
    for (int i = 0; i < CLIENTS; i++) {
        char text[32];
        snprintf(text, sizeof text, "save session=s%d ", i);
        while (!daemon_said(run, text))
            /* tidy-allow: wait the log has no event */
            poll(NULL, 0, 5);
    }
}

static void ending_under_load_keeps_every_answered_turn(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    char stop[TESTING_PATH_BYTES + 16];
    pid_t talkers[CLIENTS];
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    for (int i = 0; i < CLIENTS; i++)
        talkers[i] = talker(cli, i);
    await_saves(&run);
    stop_path(cli, stop);
    fclose(fopen(stop, "we"));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    for (int i = 0; i < CLIENTS; i++) {
        int answered = daemon_client_end(talkers[i]);
        assert_in_range(answered, 1, TURNS_MOST);
        assert_true(turns_of(cli, i) >= (uint64_t)answered);
    }
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    for (int i = 0; i < CLIENTS; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%d", i);
        cli_call(cli, "run", name, "-p", "once more", "--json", NULL);
        cli_good(cli);
        assert_string_equal(cli_text(cli, "session"), "woken");
        assert_string_equal(cli_text(cli, "woken.fingerprint"), "bits-equal");
    }
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

static void say_three(struct cli *cli, struct daemon_run *run, char answers[3][512]) {
    static const char *const says[] = {"the first thing", "the second thing", "the third thing"};
    for (int i = 0; i < 3; i++) {
        cli_call(cli, "run", "a", "-p", says[i], "--json", NULL);
        cli_good(cli);
        snprintf(answers[i], 512, "%s", cli_text(cli, "text"));
        if (run == NULL)
            continue;
        assert_int_equal(daemon_end(run, SIGKILL), 128 + SIGKILL);
        assert_true(daemon_start(cli, run, NULL, NULL, NULL));
    }
}

static void a_daemon_that_was_killed_goes_on_where_it_was(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    char moved[TESTING_PATH_BYTES + 32], alone[3][512], killed[3][512];
    say_three(cli, NULL, alone);
    snprintf(moved, sizeof moved, "%s-alone", cli->store);
    assert_int_equal(rename(cli->store, moved), 0);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    say_three(cli, &run, killed);
    for (int i = 0; i < 3; i++)
        assert_string_equal(killed[i], alone[i]);
    /* What it left behind stops nobody. */
    assert_int_equal(daemon_end(&run, SIGKILL), 128 + SIGKILL);
    cli_call(cli, "run", "a", "-p", "alone again", NULL);
    cli_good(cli);
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
}

/* --- clients that stop or die */

static void a_client_that_stops_or_dies_leaves_the_session_whole(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const int signals[] = {SIGINT, SIGTERM, SIGKILL};
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    for (int i = 0; i < 3; i++) {
        char name[8], first;
        int output = -1;
        snprintf(name, sizeof name, "w%d", i);
        /* Seven thousand tokens unless somebody stops it: it does not end by itself before. */
        pid_t client =
            daemon_client(&output, "run", name, "-p", "count for ever", "-n", "7000", NULL);
        assert_int_equal(read(output, &first, 1), 1);
        assert_int_equal(kill(client, signals[i]), 0);
        int code = daemon_client_end(client);
        close(output);
        assert_int_equal(code, signals[i] == SIGKILL ? 128 + SIGKILL : 3);
        /* It stands in line behind the one that is ending. */
        cli_call(cli, "run", name, "-p", "what was that?", "--json", NULL);
        cli_good(cli);
        cli_call(cli, "show", name, "--json", NULL);
        cli_good(cli);
        assert_in_range((uint64_t)cli_number(cli, "session.tokens"), 50, 5000);
    }
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
}

/* A signal that was sent and not taken yet; one more of it would be lost. */
static int has_pending(pid_t pid, int signal) {
    char path[64], line[256];
    unsigned long long pending = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "ShdPnd: %llx", &pending) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return pending >> (signal - 1) & 1;
}

/* Held up for ever, as by a disk: ctrl-C again and again leaves it; the command ends later. */
static void a_daemon_that_does_not_answer_is_left(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    char first;
    int output = -1;
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    pid_t client = daemon_client(&output, "run", "a", "-p", "count for ever", "-n", "7000", NULL);
    assert_int_equal(read(output, &first, 1), 1);
    assert_int_equal(kill(run.pid, SIGSTOP), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kill(client, SIGINT), 0);
        while (has_pending(client, SIGINT))
            sched_yield();
    }
    assert_int_equal(daemon_client_end(client), 3);
    close(output);
    assert_int_equal(kill(run.pid, SIGCONT), 0);
    cli_call(cli, "run", "a", "-p", "what was that?", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    cli_call(cli, "restore", "a", NULL);
    cli_good(cli);
}

/* How many threads it has. */
static unsigned long threads_of(const struct daemon_run *run) {
    char path[64];
    struct stat info;
    snprintf(path, sizeof path, "/proc/%d/task", (int)run->pid);
    assert_int_equal(stat(path, &info), 0);
    return (unsigned long)info.st_nlink;
}

/* A pipe that nobody opens on its other side holds the command: the daemon ends without it and says
 * so. */
static void a_command_that_does_not_end_is_left_behind(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    char path[TESTING_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/fifo", cli->home);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    unsigned long before = threads_of(&run);
    pid_t client = daemon_client(NULL, "import", path, NULL);
    /* The command's own, and the one that hands on what it prints. */
    while (threads_of(&run) < before + 2)
        /* tidy-allow: wait a command that begins has no event */
        poll(NULL, 0, 5);
    assert_int_equal(daemon_end(&run, SIGTERM), 3);
    assert_true(daemon_said(&run, "a command does not end"));
    assert_false(daemon_said(&run, "every session is durable"));
    assert_int_not_equal(daemon_client_end(client), 0);
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
}

/* Reading a pipe that may never give anything keeps nobody else from saving, nor the daemon from
 * ending. */
static void an_import_that_never_comes_stops_nobody(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    char path[TESTING_PATH_BYTES + 16];
    int left = 1;
    snprintf(path, sizeof path, "%s/fifo", cli->home);
    assert_int_equal(mkfifo(path, 0600), 0);
    int fifo = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(write(fifo, "cold", 4), 4);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    pid_t client = daemon_client(NULL, "import", path, NULL);
    while (left > 0) {
        assert_int_equal(ioctl(fifo, FIONREAD, &left), 0);
        /* tidy-allow: wait that a pipe was read is no event */
        poll(NULL, 0, 5);
    }
    cli_call(cli, "run", "a", "-p", "hello", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    assert_int_equal(daemon_client_end(client), 3);
    close(fifo);
}

/* A chat whose standard error is a pipe that is full. */
static pid_t chat_unheard(int *unread_out) {
    static const char full[4096];
    char program[TESTING_PATH_BYTES];
    int ends[2];
    cli_program("coldplane", program);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    assert_int_equal(fcntl(ends[0], F_SETPIPE_SZ, 4096), 4096);
    assert_int_equal(write(ends[1], full, sizeof full), sizeof full);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(open("/dev/null", O_RDWR), STDIN_FILENO);
        dup2(ends[1], STDERR_FILENO);
        alarm(CLI_SECONDS_MAX);
        execl(program, "coldplane", "chat", "-s", "a", NULL);
        _exit(126);
    }
    close(ends[1]);
    *unread_out = ends[0];
    return pid;
}

/* One who does not read what is said keeps nobody else from being answered, nor the daemon from
 * ending. */
static void a_client_that_reads_nothing_stops_nobody(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    int unread = -1;
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    pid_t client = chat_unheard(&unread);
    /* Several, since nothing says when the chat has greeted. */
    for (int i = 0; i < 20; i++) {
        cli_call(cli, "run", "b", "-p", "hello", NULL);
        cli_good(cli);
    }
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    close(unread);
    (void)daemon_client_end(client);
}

/* --- the world underneath */

/* The model is read at the start: what becomes of its file matters at the next one only. */
static void a_model_that_is_replaced_matters_at_the_next_start(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    cli_call(cli, "run", "a", "-p", "hello", NULL);
    cli_good(cli);
    cli_write_model(cli, 2, 8192);
    cli_call(cli, "run", "a", "-p", "and on", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    cli_call(cli, "run", "a", "-p", "now?", NULL);
    cli_refused(cli, 3, "model");
    cli_call(cli, "run", "new", "-p", "now?", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    cli_write_model(cli, 1, 8192);
    cli_call(cli, "run", "a", "-p", "as before", NULL);
    cli_good(cli);
}

/* A store at its limit refuses what is new by name, stays whole, and takes again when emptied. */
static void a_full_store_refuses_and_recovers(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    char name[8];
    int count = 0;
    assert_true(daemon_start(cli, &run, NULL, "--store-max", "6MiB", NULL));
    do {
        snprintf(name, sizeof name, "f%d", count++);
        cli_call(cli, "run", name, "-p", "fill it", NULL);
    } while (cli->code == 0 && count < 200);
    cli_refused(cli, 3, "store-max");
    assert_true(count > 2);
    cli_call(cli, "ls", NULL);
    cli_good(cli);
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "f%d", i);
        cli_call(cli, "rm", name, NULL);
        cli_good(cli);
    }
    cli_call(cli, "gc", NULL);
    cli_good(cli);
    cli_call(cli, "run", "after", "-p", "there is room again", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

static void without_memory_for_sleepers_the_disk_serves(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    assert_true(daemon_start(cli, &run, NULL, "--ram-tier", "0", "--sessions", "1", NULL));
    for (int i = 0; i < 2; i++) {
        cli_call(cli, "run", "a", "-p", "hello", NULL);
        cli_good(cli);
        cli_call(cli, "run", "b", "-p", "hello", NULL);
        cli_good(cli);
    }
    cli_call(cli, "run", "a", "-p", "again", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "session"), "woken");
    assert_true(cli_number(cli, "woken.door_bytes") > 0);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

#define DAEMON(test) cmocka_unit_test_setup_teardown(test, cli_set_up, cli_tear_down)

TESTING_MAIN(DAEMON(every_command_is_the_same), DAEMON(top_tells_what_the_daemon_knows),
             DAEMON(what_a_daemon_cannot_do_is_refused),
             DAEMON(a_daemon_that_must_not_start_does_not),
             DAEMON(a_port_that_is_taken_ends_the_start_in_order),
             DAEMON(ending_under_load_keeps_every_answered_turn),
             DAEMON(a_daemon_that_was_killed_goes_on_where_it_was),
             DAEMON(a_client_that_stops_or_dies_leaves_the_session_whole),
             DAEMON(a_daemon_that_does_not_answer_is_left),
             DAEMON(a_command_that_does_not_end_is_left_behind),
             DAEMON(an_import_that_never_comes_stops_nobody),
             DAEMON(a_client_that_reads_nothing_stops_nobody),
             DAEMON(a_model_that_is_replaced_matters_at_the_next_start),
             DAEMON(a_full_store_refuses_and_recovers),
             DAEMON(without_memory_for_sleepers_the_disk_serves))
