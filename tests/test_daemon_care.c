/* tests/test_daemon_care.c - what an operator asks of a daemon that is at work.
 *
 * Responsible for: ps, commands beyond those that are let in, questions to sessions that are awake,
 * purge and fsck beside them.
 * Not responsible for: that output and exit codes are those without a daemon (test_daemon.c).
 */
#include "tests/support_daemon.h"
#include "tests/support_store.h"
#include "tests/testing.h"
#include "tools/control.h"
#include "tools/control_wire.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* One session in what `ps --json` says. */
static const cJSON *ps_of(struct cli *cli, const char *name) {
    const cJSON *item;
    cli_call(cli, "ps", "--json", NULL);
    cli_good(cli);
    cJSON_ArrayForEach(item, cli_member(cli, "sessions")) {
        const char *here = cJSON_GetStringValue(cJSON_GetObjectItem(item, "name"));
        if (here != NULL && strcmp(here, name) == 0)
            return item;
    }
    return NULL;
}

static const char *state_of(struct cli *cli, const char *name) {
    const cJSON *item = ps_of(cli, name);
    return item != NULL ? cJSON_GetStringValue(cJSON_GetObjectItem(item, "state")) : "nowhere";
}

static double number_of(struct cli *cli, const char *name, const char *member) {
    const cJSON *item = ps_of(cli, name);
    assert_non_null(item);
    return cJSON_GetNumberValue(cJSON_GetObjectItem(item, member));
}

static void start_with(struct cli *cli, struct daemon_run *run, const char *const *names) {
    assert_true(daemon_start(cli, run, NULL, NULL, NULL));
    for (; *names != NULL; names++) {
        cli_call(cli, "run", *names, "-p", "hello there", NULL);
        cli_good(cli);
    }
}

/* Seven thousand tokens unless somebody stops it: this prompt does not end by itself before. The
 * first has come when it returns. */
static pid_t talk_for_long(int *output_out) {
    char first;
    pid_t client =
        daemon_client(output_out, "run", "long", "-p", "count for ever", "-n", "7000", NULL);
    assert_int_equal(read(*output_out, &first, 1), 1);
    return client;
}

/* --- ps */

static void ps_tells_who_is_where(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", "b", NULL};
    char by[64];
    int output = -1;
    cli_call(cli, "ps", NULL);
    cli_refused(cli, 2, "there is none");
    start_with(cli, &run, names);
    cli_call(cli, "pin", "b", NULL);
    cli_good(cli);
    assert_string_equal(state_of(cli, "a"), "idle");
    assert_string_equal(state_of(cli, "b"), "asleep"); /* as `pin` leaves it */
    assert_true(number_of(cli, "a", "slots") > 0 && number_of(cli, "a", "tokens") > 10);
    assert_true(number_of(cli, "b", "slots") == 0 && number_of(cli, "b", "tokens") > 10);
    assert_true(cJSON_IsTrue(cli_member(cli, "daemon")));
    assert_int_equal((int)cli_number(cli, "commands"), 1); /* this one */
    pid_t works = talk_for_long(&output);
    pid_t waits = daemon_client(NULL, "run", "long", "-p", "and then?", NULL);
    while (number_of(cli, "long", "waiting") != 1)
        /* tidy-allow: wait a command that stands in line has no event */
        poll(NULL, 0, 5);
    const cJSON *item = ps_of(cli, "long");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(item, "state")), "working");
    snprintf(by, sizeof by, "run, pid %d", (int)works);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(item, "by")), by);
    cli_call(cli, "ps", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "3 sessions: 1 working, 1 awake, 1 asleep; writer pid "));
    assert_non_null(strstr(cli->out, " long  (1 wait)\n"));
    assert_non_null(strstr(cli->out, " b  (pinned)\n"));
    assert_int_equal(kill(works, SIGTERM), 0);
    assert_int_equal(daemon_client_end(works), 3);
    assert_int_equal(daemon_client_end(waits), 0);
    close(output);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    /* Without one all are asleep, and nobody writes. */
    cli_call(cli, "ps", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "3 sessions: 0 working, 0 awake, 3 asleep; writer none\n"));
    assert_null(strstr(cli->out, "slots "
                                 "of"));
    assert_string_equal(state_of(cli, "a"), "asleep");
    assert_true(cJSON_IsFalse(cli_member(cli, "daemon")));
}

/* A program that is no daemon tells nobody what it does. */
static void ps_names_a_writer_that_tells_nothing(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 16];
    cli_call(cli, "run", "a", "-p", "hello", NULL);
    cli_good(cli);
    snprintf(path, sizeof path, "%s/LOCK", cli->store);
    int lock = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(pwrite(lock, "pid 1 chat\n", 11, 0), 11);
    assert_int_equal(flock(lock, LOCK_EX), 0);
    cli_call(cli, "ps", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "; writer pid 1 chat\nwhom that program has awake, only"));
    close(lock);
    cli_call(cli, "ps", NULL);
    cli_good(cli);
    assert_null(strstr(cli->out, "whom that"));
}

/* A disk with hardly anything left: ps repeats it as long as it is so. */
static void ps_repeats_that_the_disk_is_full(void **state) {
    struct cli *cli = *state;
    char store[TESTING_PATH_BYTES + 64];
    cli_own_mounts_or_skip();
    snprintf(store, sizeof store, "%s/small", cli->home);
    assert_int_equal(mkdir(store, 0700), 0);
    if (mount("tmpfs", store, "tmpfs", 0, "size=96m") != 0)
        testing_skip("this account may not mount a tmpfs");
    cli_call(cli, "run", "a", "-p", "hello", "--store", store, NULL);
    cli_good(cli);
    cli_call(cli, "ps", "--store", store, NULL);
    cli_good(cli);
    assert_null(strstr(cli->out, "WARNING"));
    support_store_fill_disk(store);
    for (int i = 0; i < 2; i++) {
        cli_call(cli, "ps", "--store", store, NULL);
        cli_good(cli);
        assert_non_null(strstr(cli->out, "WARNING the disk has only "));
    }
    support_store_unfill_disk(store);
    cli_call(cli, "ps", "--store", store, NULL);
    cli_good(cli);
    assert_null(strstr(cli->out, "WARNING"));
    umount(store);
}

/* The disk under a daemon: what cannot be saved is refused and said, nothing is lost, and all goes
 * on once there is room. */
static void a_full_disk_under_a_daemon_is_survived(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    cli_own_mounts_or_skip();
    assert_int_equal(mkdir(cli->store, 0700), 0);
    if (mount("tmpfs", cli->store, "tmpfs", 0, "size=96m") != 0)
        testing_skip("this account may not mount a tmpfs");
    static const char *const names[] = {"a", NULL};
    start_with(cli, &run, names);
    double tokens = number_of(cli, "a", "tokens");
    support_store_fill_disk(cli->store);
    cli_call(cli, "run", "a", "-p", "no room for this", NULL);
    cli_refused(cli, 5, "space");
    cli_call(cli, "ps", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "WARNING the disk has only "));
    assert_true(number_of(cli, "a", "tokens") >= tokens);
    support_store_unfill_disk(cli->store);
    cli_call(cli, "run", "a", "-p", "now there is", "--json", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    cli_call(cli, "restore", "a", NULL);
    cli_good(cli);
    umount(cli->store);
}

/* --- more than are let in */

static int connect_and_say_nothing(const struct cli *cli) {
    struct sockaddr_un address;
    int folder = control_wire_address(cli->store, &address);
    int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(folder >= 0 && client >= 0);
    assert_int_equal(connect(client, (const struct sockaddr *)&address, sizeof address), 0);
    close(folder);
    return client;
}

static void who_comes_last_is_told(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", NULL};
    int clients[CONTROL_CLIENTS_MAX + CONTROL_CLIENTS_SPARE];
    int count = 0;
    start_with(cli, &run, names);
    while (count < CONTROL_CLIENTS_MAX)
        clients[count++] = connect_and_say_nothing(cli);
    cli_call(cli, "run", "a", "-p", "x", NULL);
    cli_refused(cli, 3, "which is all it takes; `coldplane ps`");
    cli_call(cli, "ps", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "commands 65 of 64"));
    cli_call(cli, "top", "--once", NULL);
    cli_good(cli);
    while (count < CONTROL_CLIENTS_MAX + CONTROL_CLIENTS_SPARE)
        clients[count++] = connect_and_say_nothing(cli);
    cli_call(cli, "top", "--once", NULL);
    cli_refused(cli, 3, "lets nobody more in");
    for (int i = 0; i < count; i++)
        close(clients[i]);
    while (cli_call(cli, "ps", "--json", NULL) != 0 || cli_number(cli, "commands") > 1)
        /* tidy-allow: wait a client that was dropped has no event */
        poll(NULL, 0, 5);
    cli_call(cli, "run", "a", "-p", "x", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

/* A program of another version gets a word that it can understand. */
static void who_speaks_otherwise_is_told(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    uint8_t head[CONTROL_WIRE_HEAD_BYTES] = {0}, answer[CONTROL_WIRE_ANSWER_BYTES];
    assert_true(daemon_start(cli, &run, NULL, NULL, NULL));
    int client = connect_and_say_nothing(cli);
    kv_put_u32(head, CONTROL_WIRE_MAGIC);
    kv_put_u32(head + 4, CONTROL_WIRE_VERSION + 1);
    assert_true(control_wire_put(client, head, sizeof head));
    assert_true(control_wire_get(client, answer, sizeof answer));
    assert_int_equal(kv_get_u32(answer), CONTROL_WIRE_MAGIC);
    assert_int_equal(kv_get_u32(answer + 4), CONTROL_WIRE_OTHER);
    close(client);
    /* What is no head at all gets nothing. */
    client = connect_and_say_nothing(cli);
    memset(head, 'x', sizeof head);
    assert_true(control_wire_put(client, head, sizeof head));
    assert_false(control_wire_get(client, answer, sizeof answer));
    close(client);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

/* --- questions */

static const char fact[] =
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty, and so on until the gate opens with 4817 at noon";

/* Awake it stays awake and goes on without a wake; asleep it sleeps again, and its next turn wakes
 * it with all of its questions. */
static void who_is_asked_stays_as_he_was(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", "b", NULL};
    start_with(cli, &run, names);
    cli_call(cli, "run", "b", "-p", fact, NULL);
    cli_good(cli);
    /* This model knows nothing: what counts is that it is asked, and says the same each time. */
    cli_call(cli, "needle", "add", "b", "--ask", "what?", "--expect", "4817", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "failed");
    double logp = cli_number(cli, "needles.0.logp");
    assert_true(logp < 0 && logp != cli_number(cli, "needles.0.logp_hole"));
    cli_call(cli, "pin", "b", NULL);
    cli_good(cli);
    cli_call(cli, "unpin", "b", NULL);
    cli_good(cli);
    assert_string_equal(state_of(cli, "b"), "asleep");
    cli_call(cli, "audit", "--json", NULL);
    cli_good(cli);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), 2);
    cli_call(cli, "needle", "check", "b", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "needles.0.key"), "what?");
    assert_string_equal(cli_text(cli, "needles.0.verdict"), "failed");
    assert_true(cli_number(cli, "needles.0.logp") == logp);
    cli_call(cli, "restore", "a", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    assert_string_equal(cli_text(cli, "receipt.name"), "a");
    assert_string_equal(state_of(cli, "a"), "idle");
    assert_string_equal(state_of(cli, "b"), "asleep");
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), 2);
    cli_call(cli, "run", "a", "-p", "go on", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "session"), "resident");
    assert_true(daemon_said(&run, "control command audit exit=0"));
    assert_true(daemon_said(&run, "control command restore exit=0"));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

/* What is damaged on the disk is said; the session that is awake is not touched. */
static void a_proof_that_fails_leaves_the_session_awake(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", NULL};
    start_with(cli, &run, names);
    uint64_t bytes = support_store_segment_bytes(cli->store, 1);
    for (uint64_t off = 0; off < bytes; off += 512)
        support_store_flip(cli->store, "seg/00000001.seg", off, 0x55);
    cli_call(cli, "restore", "a", NULL);
    cli_refused(cli, 4, "session a");
    cli_call(cli, "receipt", "--json", NULL);
    cli_good(cli);
    const cJSON *newest = cJSON_GetArrayItem(cli_member(cli, "receipts"), 0);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(newest, "operation")), "restore");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(newest, "result")), "corrupt");
    assert_string_equal(state_of(cli, "a"), "idle");
    cli_call(cli, "run", "a", "-p", "still here?", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "session"), "resident");
    (void)daemon_end(&run, SIGTERM);
}

/* --- the store under its sessions */

/* Blocks of an answer that is not over belong to no snapshot yet: they are no garbage. */
static void fsck_knows_who_is_at_work(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", "b", NULL};
    int output = -1;
    start_with(cli, &run, names);
    pid_t works = talk_for_long(&output);
    while (number_of(cli, "long", "tokens") < 900)
        /* tidy-allow: wait an answer that grows has no event */
        poll(NULL, 0, 5);
    for (int i = 0; i < 3; i++) {
        static const char *const flags[] = {"--read-data", "--repair", "--rebuild-index"};
        cli_call(cli, "fsck", flags[i], "--json", NULL);
        cli_good(cli);
        assert_int_equal((int)cli_number(cli, "damage"), 0);
        assert_int_equal((int)cli_number(cli, "notes"), 0);
    }
    cli_call(cli, "rm", "b", "--purge", NULL);
    cli_good(cli);
    assert_int_equal(kill(works, SIGINT), 0);
    assert_int_equal(daemon_client_end(works), 3);
    close(output);
    assert_string_equal(state_of(cli, "b"), "nowhere");
    cli_call(cli, "run", "long", "-p", "what was that?", NULL);
    cli_good(cli);
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
    cli_call(cli, "restore", "long", NULL);
    cli_good(cli);
    cli_call(cli, "fsck", "--read-data", "--json", NULL);
    cli_good(cli);
    assert_int_equal((int)cli_number(cli, "notes"), 0);
}

/* A scrub that takes its time lets others save, is ended by its client, and goes on later. */
static void a_slow_scrub_keeps_nobody_waiting(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", "b", "c", NULL};
    start_with(cli, &run, names);
    pid_t slow = daemon_client(NULL, "scrub", "--rate", "4KiB", NULL);
    while (number_of(cli, "a", "tokens") < 200) {
        cli_call(cli, "run", "a", "-p", "go on", NULL);
        cli_good(cli);
    }
    assert_string_equal(state_of(cli, "a"), "idle");
    assert_int_equal((int)cli_number(cli, "commands"), 2); /* it is still at it */
    /* A second one would move its mark. */
    cli_call(cli, "scrub", NULL);
    cli_refused(cli, 3, "a scrub is at work already");
    assert_int_equal(kill(slow, SIGINT), 0);
    (void)daemon_client_end(slow);
    cli_call(cli, "scrub", "--json", NULL);
    cli_good(cli);
    assert_true(cJSON_IsTrue(cli_member(cli, "resumed")));
    assert_true(cJSON_IsTrue(cli_member(cli, "finished")));
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

static void rates_are_measured_in_the_daemon(void **state) {
    struct cli *cli = *state;
    struct daemon_run run = {0};
    static const char *const names[] = {"a", NULL};
    start_with(cli, &run, names);
    cli_call(cli, "bench", "rates", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "read_bytes_per_s") > 0);
    assert_true(daemon_said(&run, "control command bench exit=0"));
    cli_call(cli, "show", "a", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "session.estimate.wake_ns") > 0);
    cli_call(cli, "bench", "restore", "--build", "--tokens", "600", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "saved.name"), "bench-600");
    assert_true(cli_number(cli, "saved.tokens") >= 600 - 16);
    assert_string_equal(cli_text(cli, "restore.fingerprint"), "bits-equal");
    /* The second time it is there already, and nothing is saved. */
    cli_call(cli, "bench", "restore", "--build", "--tokens", "600", "--json", NULL);
    cli_good(cli);
    assert_null(strstr(cli->out, "\"saved\""));
    assert_string_not_equal(state_of(cli, "bench-600"), "nowhere");
    assert_string_equal(state_of(cli, "coldplane-rates"), "nowhere");
    assert_string_equal(state_of(cli, "a"), "idle");
    assert_int_equal(daemon_end(&run, SIGTERM), 0);
}

#define DAEMON(test) cmocka_unit_test_setup_teardown(test, cli_set_up, cli_tear_down)

TESTING_MAIN(DAEMON(ps_tells_who_is_where), DAEMON(ps_names_a_writer_that_tells_nothing),
             DAEMON(ps_repeats_that_the_disk_is_full),
             DAEMON(a_full_disk_under_a_daemon_is_survived), DAEMON(who_comes_last_is_told),
             DAEMON(who_speaks_otherwise_is_told), DAEMON(who_is_asked_stays_as_he_was),
             DAEMON(a_proof_that_fails_leaves_the_session_awake), DAEMON(fsck_knows_who_is_at_work),
             DAEMON(a_slow_scrub_keeps_nobody_waiting), DAEMON(rates_are_measured_in_the_daemon))
