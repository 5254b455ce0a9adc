/* tests/bench_serve.c - what wakes and sleeps of others cost a session that answers.
 *
 * Responsible for: gaps between the tokens of one answer, in turns while nothing else happens,
 * while a second thread wakes a session with needles, proves it and drops it again, over and over,
 * and while it puts it to sleep instead, which asks for probes and needles; all on one computing
 * thread.
 * Not responsible for: correctness (test_serve.c).
 *
 * Arguments: rounds (default 6).
 */
#include "engine/needle.h"
#include "tests/support_serve.h"
#include "tests/testing.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLEEPERS = 2, SENTENCES = 50, NEEDLES = 4, GAPS = 400, ROUNDS_MOST = 64, ARMS = 3 };
static const char *const arm_names[ARMS] = {"alone", "beside wakes", "beside sleeps"};

struct bench {
    struct serving *serving;
    atomic_int over;
    int times[ARMS]; /* of the wakes or sleeps */
    uint64_t gaps[ARMS][ROUNDS_MOST * GAPS];
    size_t count[ARMS];
    int arm;
    uint64_t last_ns;
    int failed;
};

static uint64_t now(void) {
    return kv_clock_now_ns(kv_clock_system());
}

static void must(enum kv_err err, const struct kv_diag *diag, const char *what) {
    if (err == KV_OK)
        return;
    fprintf(stderr, "bench_serve: %s: %s\n", what, diag->text);
    exit(1);
}

static void sleeper_name(int index, char name[16]) {
    snprintf(name, 16, "sleeper-%d", index);
}

static void turn(struct serving *serving, const char *session, struct serving_chat *chat,
                 uint32_t tokens_max) {
    struct serve_answer answer;
    const struct serve_request request = serving_request(chat, session, tokens_max);
    must(serve_turn(serving->serve, &request, &answer, &serving->diag), &serving->diag, session);
    serve_answer_release(serving->serve, &answer);
}

static struct needle_form needle_of(int sleeper, int index) {
    struct needle_form form;
    struct kv_diag diag = {""};
    char key[32], value[16];
    snprintf(key, sizeof key, "river-%d-%d", sleeper, index);
    snprintf(value, sizeof value, "%d", 10000 + 7919 * (sleeper * NEEDLES + index) % 90000);
    must(needle_house_form(key, value, &form, &diag), &diag, "needle");
    return form;
}

static void register_needles(struct serving *serving, int sleeper) {
    char name[16];
    sleeper_name(sleeper, name);
    service_enter(serving->service);
    for (int i = 0; i < NEEDLES; i++) {
        struct needle_form form = needle_of(sleeper, i);
        const struct needle_text text = {form.key, form.ask, form.answer_prefix, form.expect};
        must(needle_register(session_find(service_engine(serving->service), name), &text,
                             &serving->diag),
             &serving->diag, "needle");
    }
    service_leave(serving->service);
}

static void make_sleepers(struct serving *serving) {
    static char text[SENTENCES * 64 + NEEDLES * 512];
    for (int i = 0; i < SLEEPERS; i++) {
        char name[16];
        size_t used = 0;
        sleeper_name(i, name);
        for (int k = 0; k < SENTENCES; k++) {
            used += (size_t)snprintf(text + used, sizeof text - used,
                                     "In year %d the river rose %d feet. ", 1000 + k, k * 7 % 31);
            if (k % (SENTENCES / NEEDLES) == 10) {
                struct needle_form form = needle_of(i, k / (SENTENCES / NEEDLES));
                used += (size_t)snprintf(text + used, sizeof text - used, "%s ", form.statement);
            }
        }
        struct serving_chat chat = {.texts = {text}, .count = 1};
        turn(serving, name, &chat, 4);
        register_needles(serving, i);
    }
}

/* Wakes one, as a command would; `sleeps` 0: and drops it, for it is saved as it is. */
static void wake(struct serving *serving, const char *name, int sleeps) {
    struct service *service = serving->service;
    const struct service_patience patience = {.deadline_ns = UINT64_MAX};
    const struct service_lookup lookup = {.create = 0};
    struct service_lease lease;
    struct service_opened opened;
    struct session *session = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    service_enter(service);
    must(service_lease(service, name, &patience, &lease, &diag), &diag, "lease");
    must(service_session(service, name, &lookup, &session, &opened, &diag), &diag, "wake");
    if (sleeps)
        must(service_sleep(service, session, &receipt, &diag), &diag, "sleep");
    else
        service_drop(service, session);
    service_lease_end(service, &lease);
    service_leave(service);
}

static void *wake_main(void *context) {
    struct bench *bench = context;
    for (int i = 0; !atomic_load(&bench->over); i++) {
        char name[16];
        sleeper_name(i % SLEEPERS, name);
        wake(bench->serving, name, bench->arm == 2);
        bench->times[bench->arm]++;
    }
    return NULL;
}

static int on_piece(void *context, const struct serve_piece *piece) {
    struct bench *bench = context;
    uint64_t at = now();
    if (!piece->has_token)
        return 1;
    if (bench->last_ns != 0 && bench->count[bench->arm] < ROUNDS_MOST * GAPS)
        bench->gaps[bench->arm][bench->count[bench->arm]++] = at - bench->last_ns;
    bench->last_ns = at;
    return 1;
}

static void measure(struct bench *bench, int arm, int round) {
    struct serving_chat chat = {.texts = {"Write a very long story about a river."}, .count = 1};
    struct serve_answer answer;
    char name[32];
    pthread_t thread;
    snprintf(name, sizeof name, "talk-%d-%d", arm, round);
    struct serve_request request = serving_request(&chat, name, GAPS + 1);
    request.piece = on_piece;
    request.context = bench;
    bench->arm = arm;
    bench->last_ns = 0;
    atomic_store(&bench->over, 0);
    if (arm != 0 && pthread_create(&thread, NULL, wake_main, bench) != 0)
        exit(1);
    must(serve_turn(bench->serving->serve, &request, &answer, &bench->serving->diag),
         &bench->serving->diag, name);
    atomic_store(&bench->over, 1);
    if (arm != 0)
        pthread_join(thread, NULL);
    serve_answer_release(bench->serving->serve, &answer);
}

static int by_size(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static double percentile(struct bench *bench, int arm, double share) {
    size_t count = bench->count[arm];
    return (double)bench->gaps[arm][(size_t)(share * (double)(count - 1))] / 1e6;
}

int main(int argc, char **argv) {
    static struct bench bench;
    void *state = NULL;
    int rounds = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 6;
    const char *model = testing_model_path();
    if (model == NULL) {
        printf("bench_serve: no model; `make setup` fetches it\n");
        return 77;
    }
    rounds = rounds < 1 ? 1 : rounds > ROUNDS_MOST ? ROUNDS_MOST : rounds;
    serving_set_up(&state);
    bench.serving = state;
    bench.serving->settings.model_path = model;
    bench.serving->settings.poison_free_slots = 0;
    bench.serving->settings.slot_budget_bytes = (uint64_t)1 << 30;
    serving_open(bench.serving);
    make_sleepers(bench.serving);
    for (int i = 0; i < SLEEPERS; i++) {
        char name[16];
        sleeper_name(i, name);
        wake(bench.serving, name, 1);
    }
    for (int i = 0; i < rounds; i++)
        for (int arm = 0; arm < ARMS; arm++)
            measure(&bench, arm, i);
    for (int arm = 0; arm < ARMS; arm++)
        qsort(bench.gaps[arm], bench.count[arm], sizeof bench.gaps[arm][0], by_size);
    for (int arm = 0; arm < ARMS; arm++)
        printf("%-14s tokens %5zu   gap p50 %7.2f ms (x %.2f)   p90 %7.2f   p99 %7.2f   most "
               "%7.2f; %d of them\n",
               arm_names[arm], bench.count[arm], percentile(&bench, arm, 0.5),
               percentile(&bench, arm, 0.5) / percentile(&bench, 0, 0.5),
               percentile(&bench, arm, 0.9), percentile(&bench, arm, 0.99),
               percentile(&bench, arm, 1), bench.times[arm]);
    serving_tear_down(&state);
    return 0;
}
