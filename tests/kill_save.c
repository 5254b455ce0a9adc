/* tests/kill_save.c - `make test-kill KILLS=n`: real SIGKILLs while sessions chat, save, wake, go.
 *
 * Responsible for: a life process that three sessions share, killed at a random moment; a fresh
 * process that wakes every session and compares it with a life that was never killed.
 * Not responsible for: faults at chosen writes (test_store*.c, demo.c) or power cuts.
 *
 * What must hold after every kill: a session that was acknowledged at n tokens is there with at
 * least n, woken with an equal fingerprint, its ids are those of the undisturbed life, and fsck
 * with every extent read finds no damage.
 */
#include "snapshot/snap_care.h"
#include "store/store_fsck.h"
#include "store/store_gc.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"
#include "tools/service.h"
#include "tools/turn.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SESSIONS = 3, TURNS = 5, IDS_MAX = 8192, REPLY_TOKENS = 6, TEXT_BYTES = 420, KILL_MS = 700 };

struct life {
    char model[TESTING_PATH_BYTES + 32], store[TESTING_PATH_BYTES + 32];
    /* The undisturbed life: ids after the last turn, and how many there are after each. */
    uint32_t ids[SESSIONS][IDS_MAX];
    uint64_t n[SESSIONS][TURNS + 1];
};

/* From the life process to the test: session `session` is durable at `n` tokens (0: being removed,
 * so that any state is right until the next word). */
struct word {
    uint32_t session;
    uint64_t n;
};

static enum kv_err open_life(const struct life *life, const char *store, struct service **out,
                             struct kv_diag *diag) {
    struct service_settings settings;
    service_settings_usual(&settings);
    settings.model_path = life->model;
    settings.store_dir = store;
    settings.program = "kill_save";
    settings.threads = 1;
    settings.sessions_max = SESSIONS;
    settings.slot_budget_bytes = 48u << 20;
    settings.reserve_slots = 0;
    settings.poison_free_slots = 1;
    settings.shuffle_seed = 7;
    settings.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {256, 512, 768}};
    settings.sampler = (struct image_sampler){.temperature = 0, .top_p = 1, .top_k = 1, .seed = 1};
    return service_open(&settings, out, diag);
}

static void session_name_of(uint32_t index, char name_out[8]) {
    snprintf(name_out, 8, "kill-%u", index);
}

static enum kv_err take_turn(struct service *service, uint32_t index, uint32_t turn, int save,
                             struct kv_diag *diag) {
    char name[8], text[TEXT_BYTES + 1];
    session_name_of(index, name);
    struct testing_random random;
    testing_random_init(&random, 1000 * index + turn);
    for (uint32_t i = 0; i < TEXT_BYTES; i++)
        text[i] = (char)('a' + testing_random_below(&random, 26));
    text[TEXT_BYTES] = 0;
    struct service_lookup lookup = {.create = 1};
    struct service_opened opened;
    struct session *session = NULL;
    enum kv_err err = service_session(service, name, &lookup, &session, &opened, diag);
    if (err != KV_OK)
        return err;
    struct template_message message = {TEMPLATE_USER, text, TEXT_BYTES};
    struct turn_options options = {
        .messages = &message, .message_count = 1, .tokens_max = REPLY_TOKENS, .save = save};
    struct turn_result result = {0};
    err = turn_run(service, session, &options, &result, diag);
    turn_result_release(service, &result);
    return err;
}

static void record_life(struct life *life, const char *dir) {
    struct service *service = NULL;
    struct kv_diag diag = {""};
    char store[TESTING_PATH_BYTES + 32];
    snprintf(store, sizeof store, "%s/undisturbed", dir);
    if (open_life(life, store, &service, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    for (uint32_t index = 0; index < SESSIONS; index++) {
        char name[8];
        session_name_of(index, name);
        for (uint32_t turn = 0; turn < TURNS; turn++) {
            if (take_turn(service, index, turn, 0, &diag) != KV_OK)
                fail_msg("%s", diag.text);
            struct session_info info;
            session_info(session_find(service_engine(service), name), &info);
            assert_true(info.n <= IDS_MAX);
            life->n[index][turn + 1] = info.n;
            memcpy(life->ids[index], info.ids, info.n * sizeof life->ids[index][0]);
        }
    }
    service_close(service);
}

static void tell(int pipe_end, uint32_t session, uint64_t n) {
    struct word word = {session, n};
    if (write(pipe_end, &word, sizeof word) != sizeof word)
        _exit(3);
}

/* Now and then what is dead goes, with sessions resident: holes and small segments. */
static enum kv_err give_back(struct service *service, struct kv_diag *diag) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct snap_care_report records;
    const struct snap_care_collect_args collect = {.store = service_store(service),
                                                   .alloc = service_alloc(service),
                                                   .open = service_snapshot(service)};
    options.live_percent = 80;
    snapshot_drain(service_snapshot(service));
    engine_apply(service_engine(service));
    enum kv_err err = snap_care_collect(&collect, &records, diag);
    return err == KV_OK ? store_gc(service_store(service), &options, &report, diag) : err;
}

/* The next turn wakes it. */
static void let_go(struct service *service, const char *name) {
    struct session *session = session_find(service_engine(service), name);
    if (session != NULL)
        session_drop(session);
}

/* The killed process: chats round and round; a session that is through its turns is removed and
 * begins again, others are let go and woken, and gc runs. */
static void live(const struct life *life, int pipe_end, uint32_t first) {
    struct service *service = NULL;
    struct kv_diag diag = {""};
    enum kv_err err = open_life(life, life->store, &service, &diag);
    for (uint32_t step = first; err == KV_OK; step++) {
        uint32_t index = step % SESSIONS, turn = 0;
        char name[8];
        struct snapshot_entry entry;
        session_name_of(index, name);
        const struct kv_alloc *alloc = service_alloc(service);
        err = snapshot_find(service_store(service), alloc, name, &entry, &diag);
        while (err == KV_OK && turn < TURNS && life->n[index][turn] != entry.head.n)
            turn++;
        if (err == KV_OK && turn == TURNS) {
            tell(pipe_end, index, 0);
            let_go(service, name);
            err = snapshot_remove(service_store(service), alloc, name, &diag);
            turn = 0;
        } else if (err == KV_ERR_NOT_FOUND) {
            err = KV_OK;
        }
        if (err == KV_OK)
            err = take_turn(service, index, turn, 1, &diag);
        if (err == KV_OK)
            tell(pipe_end, index, life->n[index][turn + 1]);
        if (step % 7 == 3)
            let_go(service, name);
        if (err == KV_OK && step % 4 == 1)
            err = give_back(service, &diag);
    }
    fprintf(stderr, "life process: %s\n", diag.text);
    _exit(4);
}

static void on_finding(void *context, const struct store_fsck_finding *finding) {
    if (!finding->is_note) {
        fprintf(stderr, "fsck: %s\n", finding->text);
        *(int *)context = 1;
    }
}

/* Wakes every session in a fresh process, which exits 0 when all is as it must be. */
static void check_alive(const struct life *life, const uint64_t acknowledged[SESSIONS]) {
    struct service *service = NULL;
    struct kv_diag diag = {""};
    int bad = 0;
    if (open_life(life, life->store, &service, &diag) != KV_OK) {
        fprintf(stderr, "after the kill: %s\n", diag.text);
        _exit(1);
    }
    struct store_fsck_report found;
    const struct store_fsck_args fsck = {
        .store = service_store(service), .read_data = 1, .each = on_finding, .context = &bad};
    if (store_fsck(&fsck, &found, &diag) != KV_OK) {
        fprintf(stderr, "fsck: %s\n", diag.text);
        bad = 1;
    }
    for (uint32_t index = 0; index < SESSIONS; index++) {
        char name[8];
        session_name_of(index, name);
        struct session *session = NULL;
        struct receipt receipt;
        enum kv_err err = service_wake(service, name, NULL, &session, &receipt, &diag);
        if (err == KV_ERR_NOT_FOUND && acknowledged[index] == 0)
            continue;
        if (err != KV_OK) {
            fprintf(stderr, "%s, acknowledged at %llu: %s\n", name,
                    (unsigned long long)acknowledged[index], diag.text);
            bad = 1;
            continue;
        }
        struct session_info info;
        session_info(session, &info);
        int same = memcmp(info.ids, life->ids[index], info.n * sizeof info.ids[0]) == 0;
        if (info.n < acknowledged[index] || !same || receipt.fingerprint != RECEIPT_BITS_EQUAL ||
            receipt.tokens_prefilled != 0) {
            fprintf(stderr, "%s: %llu tokens, acknowledged %llu, ids %s, fingerprint %s\n", name,
                    (unsigned long long)info.n, (unsigned long long)acknowledged[index],
                    same ? "equal" : "DIFFERENT", receipt_proof_name(receipt.fingerprint));
            bad = 1;
        }
    }
    service_close(service);
    _exit(bad);
}

static int wait_for(pid_t child) {
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Reads what was acknowledged until the child is dead; kills it after `delay_ms`. */
static void kill_after(pid_t child, int pipe_end, int delay_ms, uint64_t acknowledged[SESSIONS]) {
    const struct kv_clock *clock = kv_clock_system();
    uint64_t end_ns = kv_clock_now_ns(clock) + (uint64_t)delay_ms * 1000000u;
    int killed = 0;
    struct word word;
    for (;;) {
        uint64_t now_ns = kv_clock_now_ns(clock);
        int left_ms = now_ns >= end_ns ? 0 : (int)((end_ns - now_ns + 999999) / 1000000u);
        struct pollfd poll_in = {.fd = pipe_end, .events = POLLIN};
        if (!killed && (left_ms == 0 || poll(&poll_in, 1, left_ms) == 0)) {
            kill(child, SIGKILL);
            killed = 1;
        }
        if (!killed && poll_in.revents == 0)
            continue;
        if (read(pipe_end, &word, sizeof word) != sizeof word)
            break;
        acknowledged[word.session] = word.n;
    }
}

static uint32_t kills_wanted = 20;

static void test_kills(void **state) {
    (void)state;
    static struct life life;
    char dir[TESTING_PATH_BYTES];
    struct testing_random random;
    testing_temp_dir(dir);
    testing_random_init(&random, testing_seed("kill times", 20261129));
    snprintf(life.model, sizeof life.model, "%s/tiny.gguf", dir);
    snprintf(life.store, sizeof life.store, "%s/store", dir);
    struct tiny_model_options options = tiny_model_default();
    tiny_model_write(&options, life.model);
    record_life(&life, dir);
    uint64_t acknowledged[SESSIONS] = {0};
    uint32_t words = 0;
    for (uint32_t kill_index = 0; kill_index < kills_wanted; kill_index++) {
        int ends[2];
        assert_int_equal(pipe(ends), 0);
        uint64_t before[SESSIONS];
        memcpy(before, acknowledged, sizeof before);
        pid_t child = fork();
        if (child == 0) {
            close(ends[0]);
            live(&life, ends[1], kill_index);
        }
        close(ends[1]);
        kill_after(child, ends[0], 20 + (int)testing_random_below(&random, KILL_MS), acknowledged);
        close(ends[0]);
        assert_int_equal(wait_for(child), 128 + SIGKILL);
        words += memcmp(before, acknowledged, sizeof before) != 0;
        child = fork();
        if (child == 0)
            check_alive(&life, acknowledged);
        assert_int_equal(wait_for(child), 0);
    }
    printf("%u kills, %u of them after something new was acknowledged\n", kills_wanted, words);
    assert_true(words > 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kills)};
    if (argc > 1)
        kills_wanted = (uint32_t)strtoul(argv[1], NULL, 10);
    return testing_run(1, argv, tests, 1);
}
