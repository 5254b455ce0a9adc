/* tests/demo.c - `make demo`: twelve chats, room for nine, a killed save, and everybody wakes.
 *
 * Responsible for: the acts, each in a process of its own, the table and the verdict.
 *   control   never sleeps: room for all twelve; writes the reference answers
 *   life      room for nine; three are forced to sleep; dies inside the last save
 *   wake      opens the store that is left, wakes and proves every session, goes on chatting
 *   sabotage, sabotage_blind   programs of their own: foreign bytes on the disk
 * Not responsible for: what the sessions say (support_demo.c). The product has no switch for any of
 * this: the fault door and the sabotage live in tests/.
 */
#include "engine/needle.h"
#include "store/io.h"
#include "tests/support_demo.h"
#include "tests/support_faulty_io.h"
#include "tests/testing.h"

#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define REFERENCE "reference.bin"
#define VERDICT "verdict.bin"
#define CHAT_STORE "store"

struct verdict {
    uint32_t woken, equal, kept, passed, foreign, prefilled;
    uint64_t bytes_read;
    int rss_ok;
};

static double seconds_now(void) {
    return (double)kv_clock_now_ns(kv_clock_system()) * 1e-9;
}

static int report(const char *what, const struct kv_diag *diag) {
    fflush(stdout);
    fprintf(stderr, "demo: %s: %s\n", what, diag->text);
    return 1;
}

/* Act 1. Everything the later acts must reproduce, by sessions that never left the device. */
static enum kv_err control_victim(struct service *service, struct session *session,
                                  struct faulty_io *faulty, struct demo_reference *reference,
                                  struct kv_diag *diag) {
    struct receipt receipt;
    enum kv_err err = service_save(service, session, 1, &receipt, diag);
    if (err == KV_OK)
        err = demo_answer_turn(service, session, 1, &reference->answers[DEMO_VICTIM], diag);
    if (err != KV_OK)
        return err;
    snapshot_drain(service_snapshot(service));
    struct faulty_io_plan count = {.action = FAULTY_IO_COUNT, .ops = FAULTY_IO_WRITE};
    faulty_io_arm(faulty, &count);
    err = service_save(service, session, 0, &receipt, diag);
    reference->save_writes = faulty_io_counts(faulty).ops;
    if (err == KV_OK)
        err = demo_answer_turn(service, session, 2, &reference->victim_later, diag);
    return err;
}

static int run_control(const struct demo *demo) {
    struct kv_diag diag = {""};
    struct demo_reference reference;
    memset(&reference, 0, sizeof reference);
    struct faulty_io *faulty = faulty_io_make(io_best_door());
    struct service *service = NULL;
    struct demo_opening opening = {DEMO_ROOM_ALL, "control", faulty_io_door(faulty)};
    if (demo_open(demo, &opening, &service, &diag) != KV_OK)
        return report("control", &diag);
    double start = seconds_now();
    for (uint32_t i = 0; i < DEMO_SESSIONS; i++) {
        struct session *session = NULL;
        struct session_info info;
        enum kv_err err = demo_first_turn(demo, service, i, &session, &diag);
        if (err == KV_OK && i == DEMO_VICTIM)
            err = control_victim(service, session, faulty, &reference, &diag);
        else if (err == KV_OK)
            err = demo_answer_turn(service, session, 1, &reference.answers[i], &diag);
        if (err != KV_OK)
            return report("control", &diag);
        session_info(session, &info);
        printf("  control %2u/%d: %llu tokens, %.0f s\n", i + 1, DEMO_SESSIONS,
               (unsigned long long)info.n_kv, seconds_now() - start);
        fflush(stdout);
    }
    int wrote = demo_write_file(demo, REFERENCE, &reference, sizeof reference);
    service_close(service);
    faulty_io_drop(faulty);
    return wrote ? 0 : 1;
}

/* Act 2. */
struct death {
    const struct demo_reference *reference;
    uint64_t sequence;
};

static void before_death(void *context, uint64_t k) {
    const struct death *death = context;
    printf("  the process dies at write k = %llu of m = %llu; batch %llu stays uncommitted\n",
           (unsigned long long)k, (unsigned long long)death->reference->save_writes,
           (unsigned long long)death->sequence);
    fflush(stdout);
}

static uint32_t count_resident(struct service *service) {
    uint32_t count = 0;
    while (session_at(service_engine(service), count) != NULL)
        count++;
    return count;
}

static int die_while_saving(struct service *service, struct faulty_io *faulty,
                            const struct demo_reference *reference, struct kv_diag *diag) {
    char name[16];
    demo_name(DEMO_VICTIM, name);
    struct session *session = session_find(service_engine(service), name);
    struct demo_answer answer;
    struct receipt receipt;
    if (session == NULL || demo_answer_turn(service, session, 1, &answer, diag) != KV_OK)
        return report(name, diag);
    if (!demo_answer_equal(&answer, &reference->answers[DEMO_VICTIM])) {
        printf("  %s answered differently from the control before anything happened\n", name);
        return 1;
    }
    snapshot_drain(service_snapshot(service));
    struct store_stats stats;
    store_stats_get(service_store(service), &stats);
    struct death death = {reference, stats.batches + 1};
    struct faulty_io_plan plan = {.action = FAULTY_IO_DIE,
                                  .ops = FAULTY_IO_WRITE,
                                  .at = (reference->save_writes + 1) / 2,
                                  .before_exit = before_death,
                                  .context = &death};
    printf("  %s has %llu tokens and is saved in the background ...\n", name,
           (unsigned long long)(answer.n_kv + answer.id_count));
    faulty_io_arm(faulty, &plan);
    enum kv_err err = service_save(service, session, 0, &receipt, diag);
    printf("  the save returned (%s): the fault was never reached\n", kv_err_name(err));
    return 1;
}

static int run_life(const struct demo *demo) {
    struct kv_diag diag = {""};
    struct demo_reference reference;
    if (!demo_read_file(demo, REFERENCE, &reference, sizeof reference))
        return 1;
    struct faulty_io *faulty = faulty_io_make(io_best_door());
    struct service *service = NULL;
    struct demo_opening opening = {DEMO_ROOM_NINE, CHAT_STORE, faulty_io_door(faulty)};
    if (demo_open(demo, &opening, &service, &diag) != KV_OK)
        return report("life", &diag);
    double start = seconds_now();
    for (uint32_t i = 0; i < DEMO_SESSIONS; i++) {
        struct session *session = NULL;
        struct receipt receipt;
        enum kv_err err = demo_first_turn(demo, service, i, &session, &diag);
        if (err == KV_OK)
            err = service_save(service, session, 1, &receipt, &diag);
        if (err != KV_OK)
            return report("life", &diag);
        printf("  chat-%02u: %llu tokens saved, %u sessions awake, %.0f s\n", i + 1,
               (unsigned long long)receipt.tokens, count_resident(service), seconds_now() - start);
        fflush(stdout);
    }
    if (count_resident(service) != DEMO_RESIDENT) {
        printf("  %u sessions are awake: the budget is not that of nine\n",
               count_resident(service));
        return 1;
    }
    if (!demo_check_rss(service, "life"))
        return 1;
    return die_while_saving(service, faulty, &reference, &diag);
}

/* Act 3. */
struct wake_row {
    struct session *session;
    struct service_opened opened;
    struct demo_answer answer;
    int equal, kept, passed;
    float margin; /* own value above the best foreign one, nats */
};

static enum kv_err ask_identity(struct wake_row *row, uint32_t index, struct kv_diag *diag) {
    struct needle_question question = {.with_hole = 1};
    struct needle_result result;
    enum kv_err err = needle_check(row->session, 0, &question, &result, diag);
    if (err != KV_OK)
        return err;
    row->kept = result.kept;
    row->passed = result.passed;
    row->margin = INFINITY;
    for (uint32_t other = 0; other < DEMO_SESSIONS; other++) {
        char value[8];
        float logp = 0;
        demo_value(other, value);
        if (other == index)
            continue;
        err = needle_score(row->session, 0, value, &logp, diag);
        if (err != KV_OK)
            return err;
        row->margin = fminf(row->margin, result.logp - logp);
    }
    return KV_OK;
}

static enum kv_err wake_one(struct service *service, uint32_t index,
                            const struct demo_reference *reference, struct wake_row *row,
                            struct kv_diag *diag) {
    char name[16];
    demo_name(index, name);
    struct service_lookup lookup = {.create = 0};
    enum kv_err err = service_session(service, name, &lookup, &row->session, &row->opened, diag);
    if (err == KV_OK)
        err = ask_identity(row, index, diag);
    if (err != KV_OK)
        return err;
    /* The killed save may have become whole on the disk without being acknowledged. */
    const struct demo_answer *expected = &reference->answers[index];
    int later = index == DEMO_VICTIM && row->opened.receipt.tokens_reused != expected->n_kv;
    if (later)
        expected = &reference->victim_later;
    err = demo_answer_turn(service, row->session, later ? 2 : 1, &row->answer, diag);
    row->equal = err == KV_OK && demo_answer_equal(&row->answer, expected);
    return err;
}

static void print_row(struct service *service, uint32_t index, const struct wake_row *row) {
    const struct receipt *receipt = &row->opened.receipt;
    struct snapshot_entry entry = {0};
    char name[16], tiers[64] = "";
    demo_name(index, name);
    snapshot_find(service_store(service), service_alloc(service), name, &entry, NULL);
    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++) {
        size_t used = strlen(tiers);
        if (receipt->tier_blocks[tier] != 0)
            snprintf(tiers + used, sizeof tiers - used, "%s%u %s", used == 0 ? "" : ", ",
                     receipt->tier_blocks[tier], layout_tier_name((enum layout_tier)tier));
    }
    printf("  %-8s %6llu  %-34s %5u %8.2f %8.2f %7.0f %7llu %9llu  %-10s %d/%d %6.1f  %s\n", name,
           (unsigned long long)receipt->tokens, tiers, receipt->slots,
           (double)entry.stored_bytes / 1e6, (double)receipt->door_bytes / 1e6,
           (double)receipt->wall_ns / 1e6, (unsigned long long)receipt->tokens_reused,
           (unsigned long long)receipt->tokens_prefilled, receipt_proof_name(receipt->fingerprint),
           row->kept, row->passed, (double)row->margin, row->equal ? "equal" : "DIFFERENT");
    fflush(stdout);
}

static int run_wake(const struct demo *demo) {
    struct kv_diag diag = {""};
    struct demo_reference reference;
    struct verdict verdict = {0};
    struct service *service = NULL;
    struct demo_opening opening = {DEMO_ROOM_NINE, CHAT_STORE, NULL};
    if (!demo_read_file(demo, REFERENCE, &reference, sizeof reference))
        return 1;
    if (demo_open(demo, &opening, &service, &diag) != KV_OK)
        return report("wake", &diag);
    struct store_stats stats;
    store_stats_get(service_store(service), &stats);
    printf("  store opened through %s%s: %s\n", stats.door_name,
           stats.direct ? ", O_DIRECT" : ", buffered",
           stats.opened[0] == 0 ? "nothing to repair" : stats.opened);
    printf("  %-8s %6s  %-34s %5s %8s %8s %7s %7s %9s  %-10s %s %s  %s\n", "session", "tokens",
           "tiers (blocks)", "slots", "stored", "read MB", "ms", "reused", "prefilled", "fingerpr.",
           "kept/passed", "margin", "answer vs control");
    for (uint32_t step = 0; step < DEMO_SESSIONS; step++) {
        uint32_t index = (step * 5 + 3) % DEMO_SESSIONS;
        struct wake_row row;
        memset(&row, 0, sizeof row);
        if (wake_one(service, index, &reference, &row, &diag) != KV_OK)
            return report("wake", &diag);
        print_row(service, index, &row);
        verdict.woken += row.opened.found == SERVICE_WOKEN &&
                         row.opened.receipt.fingerprint == RECEIPT_BITS_EQUAL &&
                         row.opened.receipt.door_bytes > 0;
        verdict.equal += row.equal;
        verdict.kept += row.kept;
        verdict.passed += row.kept && row.passed;
        verdict.foreign += row.margin <= 0;
        verdict.prefilled += row.opened.receipt.tokens_prefilled != 0;
        verdict.bytes_read += row.opened.receipt.door_bytes;
    }
    verdict.rss_ok = demo_check_rss(service, "wake");
    int wrote = demo_write_file(demo, VERDICT, &verdict, sizeof verdict);
    service_close(service);
    return wrote ? 0 : 1;
}

/* The acts in order. */
static int run_act(const char *program, const char *act, const struct demo *demo) {
    char tokens[24], threads[24];
    snprintf(tokens, sizeof tokens, "%llu", (unsigned long long)demo->tokens);
    snprintf(threads, sizeof threads, "%u", demo->threads);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, act, demo->dir, demo->model_path, tokens, threads, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The program `name` in the folder of `program`. */
static void beside(const char *program, const char *name, char out[512]) {
    const char *slash = strrchr(program, '/');
    int folder = slash == NULL ? 0 : (int)(slash + 1 - program);
    snprintf(out, 512, "%.*s%s", folder, program, name);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

static int print_plan(const struct demo *demo) {
    struct demo_budget budget;
    struct kv_diag diag = {""};
    if (demo_plan(demo, &budget, &diag) != KV_OK)
        return report("plan", &diag);
    printf("%d chats of about %llu tokens, tiers by age 512, 1,024, 1,536\n"
           "slot budget: %d sessions x %u slots + reserve %u (one shadow, one fork) = %u slots of "
           "%.0f KiB = %.0f MiB; a tenth session does not fit\n",
           DEMO_SESSIONS, (unsigned long long)demo->tokens, DEMO_RESIDENT, budget.session_slots,
           budget.reserve_slots, budget.slots, (double)budget.slot_bytes / 1024,
           (double)budget.bytes / 1048576);
    return 0;
}

static int run_acts(const char *program, const struct demo *demo) {
    char path[512];
    printf("\n1. Control: never evicted, room for all %d\n", DEMO_SESSIONS);
    if (run_act(program, "control", demo) != 0)
        return 1;
    printf("\n2. Life: room for %d; the others sleep; then a save is killed\n", DEMO_RESIDENT);
    int status = run_act(program, "life", demo);
    if (status != FAULTY_IO_EXIT_STATUS) {
        printf("  the life process ended with %d instead of dying in the save\n", status);
        return 1;
    }
    printf("\n3. Wake: a new process, every session from its last acknowledged snapshot\n");
    if (run_act(program, "wake", demo) != 0)
        return 1;
    printf("\n4. Sabotage: a block's VR1 plane overwritten on disk with another session's\n");
    beside(program, "sabotage", path);
    if (run_act(path, "checked", demo) != 0)
        return 1;
    printf("\n5. The same with digest checking compiled out of the test program\n");
    beside(program, "sabotage_blind", path);
    return run_act(path, "blind", demo) != 0;
}

static int conclude(const struct demo *demo, double seconds) {
    struct verdict verdict;
    if (!demo_read_file(demo, VERDICT, &verdict, sizeof verdict))
        return 1;
    int ok = verdict.woken == DEMO_SESSIONS && verdict.equal == DEMO_SESSIONS &&
             verdict.kept >= DEMO_SESSIONS - 1 && verdict.passed == verdict.kept &&
             verdict.foreign == 0 && verdict.prefilled == 0 && verdict.rss_ok;
    printf("\n%.0f s. %s: %u of %d sessions woke with equal fingerprints, %u of %d answers of %d "
           "greedy tokens equal to never evicted bit for bit, %.1f MB read, %u prefilled anything, "
           "%u needles kept and %u of them passed, %u preferred a foreign value; both sabotages "
           "were caught.\n",
           seconds, ok ? "Proven" : "NOT PROVEN", verdict.woken, DEMO_SESSIONS, verdict.equal,
           DEMO_SESSIONS, DEMO_GREEDY_TOKENS, (double)verdict.bytes_read / 1e6, verdict.prefilled,
           verdict.kept, verdict.passed, verdict.foreign);
    return ok ? 0 : 1;
}

static int run_all(const char *program) {
    const char *tokens = getenv("DEMO_TOKENS");
    const char *model = testing_model_path();
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    char dir[] = "build/demo-XXXXXX";
    struct demo demo = {.model_path = model,
                        .tokens =
                            tokens == NULL || *tokens == 0 ? 2048 : strtoull(tokens, NULL, 10),
                        .threads = online > 0 ? (uint32_t)online : 1};
    if (model == NULL) {
        fprintf(stderr, "demo: no model; run tools/setup.sh --model or set MODEL=path\n");
        return 1;
    }
    if (demo.tokens < DEMO_TOKENS_MIN || demo.tokens > DEMO_TOKENS_MAX) {
        fprintf(stderr, "demo: DEMO_TOKENS must be %d to %d\n", DEMO_TOKENS_MIN, DEMO_TOKENS_MAX);
        return 1;
    }
    demo.dir = mkdtemp(dir);
    if (demo.dir == NULL) {
        perror("demo: cannot make a folder in build/");
        return 1;
    }
    double start = seconds_now();
    int status = print_plan(&demo) != 0 || run_acts(program, &demo) != 0;
    status |= conclude(&demo, seconds_now() - start);
    nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return status;
}

int main(int argc, char **argv) {
    struct demo demo;
    if (argc == 1)
        return run_all(argv[0]);
    if (!demo_from_args(argc, argv, &demo)) {
        fprintf(stderr, "usage: demo (settings: MODEL=path DEMO_TOKENS=%d..%d)\n", DEMO_TOKENS_MIN,
                DEMO_TOKENS_MAX);
        return 1;
    }
    if (strcmp(argv[1], "control") == 0)
        return run_control(&demo);
    if (strcmp(argv[1], "life") == 0)
        return run_life(&demo);
    return run_wake(&demo);
}
