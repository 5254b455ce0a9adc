/* tests/test_resident.c - the store kept in order while sessions are at work, as the daemon does.
 *
 * Responsible for: gc and fsck --repair beside resident sessions with blocks beyond their stored
 * heads, what is left in the store of sessions that were never saved, commands that are stopped or
 * that ask sessions at work.
 * Not responsible for: the daemon as a process (test_daemon.c), which records gc deletes
 * (test_snap_care.c).
 */
#include "engine/engine_inner.h"
#include "engine/needle.h"
#include "snapshot/snap_care.h"
#include "tests/support_life.h"
#include "tests/support_serve.h"
#include "tests/testing.h"
#include "tools/cmd.h"
#include "tools/turn.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void must(const struct serving *serving, enum kv_err err) {
    if (err != KV_OK)
        fail_msg("%s: %s", kv_err_name(err), serving->diag.text);
}

static void on_change(void *context, const char *name) {
    (void)context, (void)name;
}

typedef enum kv_err (*command)(struct cmd *cmd, struct kv_diag *diag);

/* Of the daemon that this is: a gc, a scrub is at work. */
static atomic_flag serving_flags[2] = {ATOMIC_FLAG_INIT, ATOMIC_FLAG_INIT};

/* As the daemon runs it for a client, who presses ctrl-C before that where `stopped`. `session` may
 * be NULL. */
static enum kv_err hosted_of(struct serving *serving, const char *const words[2], int stopped,
                             command run) {
    struct config *config = calloc(1, sizeof *config);
    const struct cmd_host host = {.service = serving->service,
                                  .config = config,
                                  .changed = on_change,
                                  .collecting = &serving_flags[0],
                                  .scrubbing = &serving_flags[1]};
    int ends[2];
    config->words[0] = words[0];
    config->words[1] = words[1];
    config->repair = config->rebuild_index = config->purge = 1;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    if (stopped)
        assert_int_equal(write(ends[1], "I", 1), 1);
    struct cmd cmd = {.config = config,
                      .host = &host,
                      .alloc = kv_alloc_system(),
                      .clock = kv_clock_system(),
                      .in = stdin,
                      .out = stdout,
                      .err = stdout,
                      .session_name = words[1],
                      .home = serving->home,
                      .signals = ends[0]};
    enum kv_err err = run(&cmd, &serving->diag);
    close(ends[0]);
    close(ends[1]);
    free(config);
    return err;
}

static void hosted(struct serving *serving, const char *name, command run) {
    const char *const words[2] = {name, NULL};
    must(serving, hosted_of(serving, words, 0, run));
}

static struct session *find(struct serving *serving, const char *name, int create) {
    const struct service_lookup lookup = {.create = create};
    struct service_opened opened;
    struct session *session = NULL;
    must(serving,
         service_session(serving->service, name, &lookup, &session, &opened, &serving->diag));
    return session;
}

/* Until it has `end` tokens. */
static void feed_only(struct serving *serving, struct session *session, uint64_t end) {
    static char text[40000];
    for (size_t at = 0; at + 16 < sizeof text;)
        at += (size_t)snprintf(text + at, sizeof text - at, "word%zu ", at * 31 % 997);
    const struct turn_document document = {
        .text = text, .text_bytes = strlen(text), .tokens_end = end};
    must(serving, turn_feed_document(serving->service, session, &document, &serving->diag));
}

/* And until its blocks are in the store. */
static void feed(struct serving *serving, struct session *session, uint64_t end) {
    feed_only(serving, session, end);
    snapshot_drain(service_snapshot(serving->service));
}

static void save(struct serving *serving, struct session *session) {
    struct receipt receipt;
    must(serving, service_save(serving->service, session, 0, &receipt, &serving->diag));
}

static struct session *branch(struct serving *serving, const char *name, const char *as,
                              uint64_t n) {
    const struct restore_options options = {.as = as};
    struct receipt receipt;
    struct session *session = NULL;
    must(serving,
         service_wake(serving->service, name, &options, &session, &receipt, &serving->diag));
    must(serving, turn_branch(serving->service, session, n, &serving->diag));
    return session;
}

static void sleep_and_wake(struct serving *serving, const char *name) {
    struct session *session = session_find(service_engine(serving->service), name);
    struct receipt receipt;
    assert_non_null(session);
    save(serving, session);
    service_settle(serving->service, NULL);
    struct kv_digest before = life_resident(session);
    must(serving, service_sleep(serving->service, session, &receipt, &serving->diag));
    session = find(serving, name, 0);
    struct kv_digest after = life_resident(session);
    assert_memory_equal(before.bytes, after.bytes, KV_DIGEST_BYTES);
}

static void on_finding(void *context, const struct snap_care_finding *finding) {
    (void)context;
    fail_msg("fsck: %s|%s|%s", finding->kind, finding->session, finding->text);
}

static void all_is_well(struct serving *serving) {
    const struct snap_care_check_args args = {
        .store = service_store(serving->service), .alloc = kv_alloc_system(), .each = on_finding};
    struct snap_care_report report;
    snapshot_drain(service_snapshot(serving->service));
    must(serving, snap_care_check(&args, &report, &serving->diag));
}

static uint64_t records(struct serving *serving) {
    struct store_stats stats;
    snapshot_drain(service_snapshot(serving->service));
    store_stats_get(service_store(serving->service), &stats);
    return stats.records;
}

/* The lease of the thread is given back meanwhile: a test that fails can be torn down. */
static void same_records(struct serving *serving, uint64_t before) {
    uint64_t after = records(serving);
    service_leave(serving->service);
    assert_int_equal(after, before);
    service_enter(serving->service);
}

static int has_writes_waiting(struct serving *serving) {
    uint32_t queued = 0;
    uint64_t wait_ns = 0;
    snapshot_backlog(service_snapshot(serving->service), &queued, &wait_ns);
    return queued > 0;
}

/* One that has gone on since its save, one that was never saved, one that went back and one that
 * is a branch, whose source is removed; then one whose blocks wait for the write budget.
 * BREAK_GC_RESIDENT and BREAK_FSCK_RESIDENT delete what they have in the store, BREAK_OPEN_KIN what
 * the branch shares, BREAK_FORGET_SOURCE what the source of a branch that came to nothing has. */
static void gc_leaves_what_sessions_at_work_have(void **state) {
    struct serving *serving = *state;
    uint64_t prefilled = 0;
    serving->settings.ram_bytes = 0;
    serving_open(serving);
    service_enter(serving->service);
    struct session *gone_on = find(serving, "gone-on", 1);
    feed(serving, gone_on, 900);
    save(serving, gone_on);
    feed(serving, gone_on, 2600);
    const struct restore_options failed = {.as = "failed"};
    struct receipt receipt;
    struct session *session = NULL;
    must(serving,
         service_wake(serving->service, "gone-on", &failed, &session, &receipt, &serving->diag));
    service_drop(serving->service, session);
    feed(serving, find(serving, "new", 1), 1700);
    struct session *back = find(serving, "back", 1);
    feed(serving, back, 1700);
    save(serving, back);
    must(serving, turn_rewind(serving->service, back, 1400, &prefilled, &serving->diag));
    feed(serving, back, 2600);
    struct session *source = find(serving, "source", 1);
    feed(serving, source, 1700);
    must(serving, service_sleep(serving->service, source, &receipt, &serving->diag));
    feed(serving, branch(serving, "source", "branch", 1400), 2600);
    must(serving, snapshot_remove(service_store(serving->service), kv_alloc_system(), "source",
                                  &serving->diag));
    uint64_t before = records(serving);
    service_leave(serving->service);
    hosted(serving, "gc", cmd_gc);
    /* Mends what it takes for unused. */
    hosted(serving, "fsck", cmd_fsck);
    service_enter(serving->service);
    same_records(serving, before);
    sleep_and_wake(serving, "gone-on");
    sleep_and_wake(serving, "new");
    sleep_and_wake(serving, "back");
    sleep_and_wake(serving, "branch");
    all_is_well(serving);
    /* The budget lets the first batch through at most. */
    snapshot_write_budget(service_snapshot(serving->service), 1, 0);
    feed_only(serving, find(serving, "ahead", 1), 1700);
    feed_only(serving, find(serving, "waiting", 1), 1700);
    assert_true(has_writes_waiting(serving));
    service_leave(serving->service);
    hosted(serving, "gc", cmd_gc);
    /* Mends what it takes for unused. */
    hosted(serving, "fsck", cmd_fsck);
    service_enter(serving->service);
    assert_true(has_writes_waiting(serving));
    snapshot_write_budget(service_snapshot(serving->service), 0, 0);
    sleep_and_wake(serving, "ahead");
    sleep_and_wake(serving, "waiting");
    all_is_well(serving);
    service_leave(serving->service);
}

/* BREAK_DROP_UNSAVED leaves lineages of nobody, which keep the blocks that they were cut from. */
static void what_was_never_saved_leaves_nothing(void **state) {
    struct serving *serving = *state;
    struct receipt receipt;
    uint64_t prefilled = 0;
    serving->settings.ram_bytes = 0;
    serving_open(serving);
    service_enter(serving->service);
    struct session *session = find(serving, "source", 1);
    feed(serving, session, 1700);
    must(serving, service_sleep(serving->service, session, &receipt, &serving->diag));
    uint64_t before = records(serving);
    service_drop(serving->service, branch(serving, "source", "branch", 1400));
    same_records(serving, before);
    session = branch(serving, "source", "branch", 1400);
    feed(serving, session, 2600);
    assert_true(records(serving) > before);
    service_drop(serving->service, session);
    same_records(serving, before);
    session = find(serving, "new", 1);
    feed(serving, session, 1700);
    assert_true(records(serving) > before);
    service_drop(serving->service, session);
    same_records(serving, before);
    session = find(serving, "source", 0);
    must(serving, turn_rewind(serving->service, session, 900, &prefilled, &serving->diag));
    feed(serving, session, 2600);
    assert_true(records(serving) > before);
    service_drop(serving->service, session);
    same_records(serving, before);
    all_is_well(serving);
    find(serving, "source", 0);
    sleep_and_wake(serving, "source");
    service_leave(serving->service);
}

/* Questions leave the one awake and the other asleep. BREAK_ASKED_STAYS drops both. */
static void who_is_asked_stays_as_he_was(void **state) {
    struct serving *serving = *state;
    struct receipt receipt;
    serving_open(serving);
    service_enter(serving->service);
    feed(serving, find(serving, "awake", 1), 900);
    save(serving, find(serving, "awake", 0));
    feed(serving, find(serving, "asleep", 1), 900);
    must(serving,
         service_sleep(serving->service, find(serving, "asleep", 0), &receipt, &serving->diag));
    service_leave(serving->service);
    hosted(serving, "audit", cmd_audit);
    service_enter(serving->service);
    struct engine *engine = service_engine(serving->service);
    int awake = session_find(engine, "awake") != NULL;
    int asleep = session_find(engine, "asleep") == NULL;
    service_leave(serving->service);
    assert_true(awake);
    assert_true(asleep);
}

/* Words, and `value` among them behind the sinks. */
static void feed_value(struct serving *serving, struct session *session, const char *value) {
    char text[6000];
    size_t at = 0, said = 0;
    while (at + 32 < sizeof text) {
        const char *word = at > 500 && said++ == 0 ? value : "word";
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%zu ", word, at * 31 % 997);
    }
    const struct turn_document document = {
        .text = text, .text_bytes = strlen(text), .tokens_end = 900};
    must(serving, turn_feed_document(serving->service, session, &document, &serving->diag));
    snapshot_drain(service_snapshot(serving->service));
}

/* The needle counts as one that can fail: this model knows nothing. */
static void plant(struct serving *serving, const char *name, const char *value) {
    struct session *session = find(serving, name, 1);
    const struct needle_text text = {"gate", "what?", "", value};
    uint32_t count = 0;
    feed_value(serving, session, value);
    must(serving, needle_register(session, &text, &serving->diag));
    transfer_needles(session, &count)[0].kept = 1;
    assert_int_equal(count, 1);
    save(serving, session);
}

/* How often others could have stepped, and how often a session that is at work could have become
 * another one there. */
static struct {
    struct service *service;
    int breaths, free;
} breathing;

static int on_breath(void *context, int small) {
    (void)small;
    struct session *session;
    (void)context;
    breathing.breaths++;
    for (uint32_t i = 0; (session = session_at(service_engine(breathing.service), i)) != NULL; i++)
        breathing.free +=
            service_is_leased(breathing.service, session->name) && session->asked == 0;
    return 1;
}

/* Fails with BREAK_AUDIT_STILL. */
static void who_is_audited_is_held_still(void **state) {
    struct serving *serving = *state;
    serving_open(serving);
    service_enter(serving->service);
    plant(serving, "a", "amber");
    plant(serving, "b", "ochre");
    breathing.service = serving->service;
    breathing.breaths = breathing.free = 0;
    service_engine(serving->service)->settings.hooks.breathe = on_breath;
    service_leave(serving->service);
    static const char *const audit[2] = {"audit", NULL};
    assert_int_equal(hosted_of(serving, audit, 0, cmd_audit), KV_ERR_PROOF);
    assert_true(breathing.breaths >= 2);
    assert_int_equal(breathing.free, 0);
}

/* Whoever asked for fsck can end it, in the middle of what it reads. Fails with
 * BREAK_FSCK_STOP. */
static void a_fsck_that_is_stopped_says_so(void **state) {
    struct serving *serving = *state;
    static const char *const fsck[2] = {"fsck", NULL};
    serving_open(serving);
    service_enter(serving->service);
    feed(serving, find(serving, "a", 1), 900);
    save(serving, find(serving, "a", 0));
    service_leave(serving->service);
    assert_int_equal(hosted_of(serving, fsck, 1, cmd_fsck), KV_ERR_CANCELLED);
    assert_non_null(strstr(serving->diag.text, "fsck was stopped"));
    assert_int_equal(hosted_of(serving, fsck, 0, cmd_fsck), KV_OK);
}

static void no_second_one_of_a_kind(void **state) {
    struct serving *serving = *state;
    static const char *const words[2][2] = {{"gc", NULL}, {"scrub", NULL}};
    static const command runs[2] = {cmd_gc, cmd_scrub};
    serving_open(serving);
    for (int i = 0; i < 2; i++) {
        char said[64];
        assert_false(atomic_flag_test_and_set(&serving_flags[i]));
        assert_int_equal(hosted_of(serving, words[i], 0, runs[i]), KV_ERR_BUSY);
        snprintf(said, sizeof said, "a %s is at work already", words[i][0]);
        assert_non_null(strstr(serving->diag.text, said));
        /* The other kind goes beside it, and so does the next once it is over. */
        assert_int_equal(hosted_of(serving, words[1 - i], 0, runs[1 - i]), KV_OK);
        atomic_flag_clear(&serving_flags[i]);
        assert_int_equal(hosted_of(serving, words[i], 0, runs[i]), KV_OK);
    }
}

/* What a purge could not take back is said, with the remedy, and that does it. */
static void a_purge_beside_readers_names_the_remedy(void **state) {
    struct serving *serving = *state;
    static const char *const rm[2][2] = {{"rm", "gone"}, {"rm", "other"}};
    struct receipt receipt;
    struct store_stats stats;
    serving_open(serving);
    struct store *store = service_store(serving->service);
    service_enter(serving->service);
    for (int i = 0; i < 2; i++) {
        feed(serving, find(serving, rm[i][1], 1), 900);
        must(serving,
             service_sleep(serving->service, find(serving, rm[i][1], 0), &receipt, &serving->diag));
    }
    service_leave(serving->service);
    store_hold(store);
    assert_int_equal(hosted_of(serving, rm[0], 1, cmd_rm), KV_ERR_BUSY);
    assert_non_null(strstr(serving->diag.text, "removed, but others read in 1 segments"));
    assert_non_null(strstr(serving->diag.text, "the next `rm --purge`, of any session"));
    store_unhold(store);
    store_stats_get(store, &stats);
    uint64_t before = stats.segment_bytes;
    must(serving, hosted_of(serving, rm[1], 0, cmd_rm));
    store_stats_get(store, &stats);
    print_message("%llu bytes of segments, %llu behind a purge\n", (unsigned long long)before,
                  (unsigned long long)stats.segment_bytes);
    assert_true(stats.segment_bytes < before / 4);
}

/* --- dropped while it falls asleep */

/* An assertion of the engine is a failed test, too. */
static void on_abort(int signal) {
    static const char said[] = "an assertion failed\n0 passed, 1 failed\n";
    (void)signal;
    (void)!write(STDOUT_FILENO, said, sizeof said - 1);
    _exit(1);
}

/* The engine thread asks it then, and lets others go between two questions. BREAK_DROP_ASKED */
static void who_falls_asleep_can_be_dropped(void **state) {
    struct serving *serving = *state;
    struct session *session = NULL;
    int dropped = 0;
    signal(SIGABRT, on_abort);
    serving->settings.idle_ns = 1;
    serving_open(serving);
    for (int i = 0; i < 20 && !dropped; i++) {
        service_enter(serving->service);
        feed(serving, find(serving, "a", 1), 900 + 20 * (uint64_t)i);
        save(serving, find(serving, "a", 0));
        service_changed(serving->service);
        while ((session = session_find(service_engine(serving->service), "a")) != NULL &&
               !(dropped = session->asked != 0)) {
            service_leave(serving->service);
            service_enter(serving->service);
        }
        if (dropped)
            service_drop(serving->service, session);
        assert_null(session_find(service_engine(serving->service), "a"));
        service_leave(serving->service);
    }
    assert_true(dropped);
    signal(SIGABRT, SIG_DFL);
}

/* --- slots of an answer under way */

struct newcomer {
    struct serving *serving;
    enum kv_err err;
    struct engine_slots slots;
};

/* At the first word of the answer; no more of it is wanted. */
static int come(void *context, const struct serve_piece *piece) {
    struct newcomer *newcomer = context;
    struct service *service = newcomer->serving->service;
    const struct service_settings *settings = &newcomer->serving->settings;
    const struct session_settings session_settings = {
        .name = "b", .policy = settings->policy, .sampler = settings->sampler};
    struct session *session = NULL;
    (void)piece;
    service_enter(service);
    engine_slots(service_engine(service), &newcomer->slots);
    newcomer->err = session_create(service_engine(service), &session_settings, &session, NULL);
    service_leave(service);
    return 0;
}

/* Free slots that an answer will need are for nobody who comes after it: it would end in the
 * middle. BREAK_PROMISE */
static void slots_of_an_answer_under_way_are_no_newcomers(void **state) {
    struct serving *serving = *state;
    struct serving_chat chat = {.texts = {"tell me a long story"}, .count = 1};
    struct serve_request request = serving_request(&chat, "a", 6000);
    struct newcomer newcomer = {.serving = serving};
    struct serve_answer answer;
    struct engine_slots slots;
    serving_open(serving);
    engine_slots(service_engine(serving->service), &slots);
    uint32_t planned =
        engine_plan_slots(service_engine(serving->service), &serving->settings.policy, 6200);
    serving_close(serving);
    /* Beside the answer there is less than a new session's window. */
    serving->settings.slot_budget_bytes = (uint64_t)(planned + slots.reserve + 40) / 8 *
                                          (8 * slots.slot_bytes + slots.meta_frame_bytes);
    serving_open(serving);
    request.piece = come;
    request.context = &newcomer;
    must(serving, serve_turn(serving->serve, &request, &answer, &serving->diag));
    serve_answer_release(serving->serve, &answer);
    assert_true(newcomer.slots.free > slots.reserve + 72);
    assert_int_equal(newcomer.err, KV_ERR_NO_SLOTS);
    /* When it is over they are. */
    (void)come(&newcomer, NULL);
    assert_int_equal(newcomer.err, KV_OK);
}

#define SERVED(test) cmocka_unit_test_setup_teardown(test, serving_set_up, serving_tear_down)

TESTING_MAIN(SERVED(gc_leaves_what_sessions_at_work_have),
             SERVED(what_was_never_saved_leaves_nothing), SERVED(who_is_asked_stays_as_he_was),
             SERVED(who_is_audited_is_held_still), SERVED(no_second_one_of_a_kind),
             SERVED(a_fsck_that_is_stopped_says_so),
             SERVED(a_purge_beside_readers_names_the_remedy),
             SERVED(slots_of_an_answer_under_way_are_no_newcomers),
             SERVED(who_falls_asleep_can_be_dropped))
