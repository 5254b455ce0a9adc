/* tests/crowd.c - `make crowd`: forty chats at one daemon with room for nine, on the real model.
 *
 * Responsible for: sizes, the latency of decoding while others wake, the account as JSON.
 * Not responsible for: the life of the crowd (support_crowd.c).
 *
 * crowd [--out FILE --commit COMMIT]; CROWD_TOKENS, CROWD_CHATS, CROWD_CLIENTS, CROWD_SEED and
 * MODEL from the environment. Latency is measured in turns, quiet and with wakes, with one thread
 * that computes in both: its ratio needs a machine with two cores and nothing else to do.
 */
#include "store/base/clock.h"
#include "tests/support_client.h"
#include "tests/support_crowd.h"
#include "tests/testing.h"

#include <cjson/cJSON.h>
#include <ftw.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PAIRS = 4, TOKENS_EACH = 160, GAPS_MAX = 2 * PAIRS * TOKENS_EACH, CHATS = 40 };
static const double ratio_goal = 1.25;

struct gaps {
    uint64_t ns[GAPS_MAX];
    size_t count;
};

struct latency {
    struct crowd *crowd;
    struct gaps quiet, waking;
    uint64_t wakes, wake_tokens; /* from disk */
    double wake_ms; /* all of them together, with the one token that each says and its save */
    char reason[300];
    /* Of the thread that wakes. */
    pthread_t thread;
    atomic_int stop, begun;
    uint32_t next;
};

/* --- waking */

/* The one that has slept longest: with room for nine it was pushed out since its last turn here. */
static int wake_next(struct latency *latency) {
    enum crowd_found found;
    uint64_t tokens, begun_ns = kv_clock_now_ns(kv_clock_system());
    if (!crowd_wake(latency->crowd, latency->next++, &found, &tokens)) {
        snprintf(latency->reason, sizeof latency->reason, "%.290s", crowd_reason(latency->crowd));
        return 0;
    }
    if (found == CROWD_DISK) {
        latency->wakes++;
        latency->wake_tokens += tokens;
        latency->wake_ms += (double)(kv_clock_now_ns(kv_clock_system()) - begun_ns) * 1e-6;
    }
    return 1;
}

static void *wake_main(void *context) {
    struct latency *latency = context;
    while (!atomic_load(&latency->stop) && wake_next(latency))
        atomic_store(&latency->begun, 1);
    atomic_store(&latency->begun, 1);
    return NULL;
}

/* --- decoding */

static char *story_request(uint64_t number) {
    char question[200];
    cJSON *body = cJSON_CreateObject();
    cJSON *message = cJSON_CreateObject();
    snprintf(question, sizeof question,
             "Write a very long story, number %" PRIu64
             ", about a ship, its captain and all the ports they come to.",
             number);
    cJSON_AddStringToObject(message, "role", "user");
    cJSON_AddStringToObject(message, "content", question);
    cJSON_AddItemToArray(cJSON_AddArrayToObject(body, "messages"), message);
    cJSON_AddBoolToObject(body, "stream", 1);
    cJSON_AddNumberToObject(body, "temperature", 0);
    cJSON_AddNumberToObject(body, "max_tokens", TOKENS_EACH);
    char *text = cJSON_PrintUnformatted(body);
    cJSON_Delete(body);
    return text;
}

/* Each gap between two events of one answer but the first, behind which is the prefill, and the
 * last, which says that it is over. */
static int decode(struct latency *latency, uint64_t number, struct gaps *gaps) {
    struct client_reply reply;
    char *body = story_request(number);
    const struct client_call call = {.port = crowd_served(latency->crowd)->port,
                                     .key = crowd_key(latency->crowd, 0),
                                     .method = "POST",
                                     .path = "/v1/chat/completions",
                                     .body = body};
    int good = client_ask(&call, &reply) && reply.status == 200;
    for (size_t i = 1; good && i + 1 < reply.event_count && gaps->count < GAPS_MAX; i++)
        gaps->ns[gaps->count++] = reply.event_ns[i] - reply.event_ns[i - 1];
    if (!good)
        snprintf(latency->reason, sizeof latency->reason, "the stream ended with status %d",
                 reply.status);
    client_reply_release(&reply);
    cJSON_free(body);
    return good;
}

static int measure(struct latency *latency) {
    uint64_t number = 0;
    for (int pair = 0; pair < PAIRS; pair++) {
        if (!decode(latency, number++, &latency->quiet))
            return 0;
        atomic_store(&latency->stop, 0);
        atomic_store(&latency->begun, 0);
        if (pthread_create(&latency->thread, NULL, wake_main, latency) != 0)
            return 0;
        while (!atomic_load(&latency->begun))
            sched_yield();
        int good = decode(latency, number++, &latency->waking);
        atomic_store(&latency->stop, 1);
        pthread_join(latency->thread, NULL);
        if (!good || latency->reason[0] != 0)
            return 0;
    }
    return 1;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double quantile_ms(struct gaps *gaps, double share) {
    if (gaps->count == 0)
        return 0;
    qsort(gaps->ns, gaps->count, sizeof gaps->ns[0], by_size);
    return (double)gaps->ns[(size_t)(share * (double)(gaps->count - 1))] * 1e-6;
}

static int tell_latency(struct latency *latency) {
    double quiet = quantile_ms(&latency->quiet, 0.5), waking = quantile_ms(&latency->waking, 0.5);
    double ratio = quiet > 0 ? waking / quiet : 0;
    printf("decoding with one thread: quiet p50 %.2f ms, p99 %.2f (%zu tokens); while others wake "
           "p50 %.2f ms, p99 %.2f (%zu tokens; %" PRIu64
           " turns of sessions of %.0f tokens from disk, %.0f ms each): p50 x %.2f, goal %.2f\n",
           quiet, quantile_ms(&latency->quiet, 0.99), latency->quiet.count, waking,
           quantile_ms(&latency->waking, 0.99), latency->waking.count, latency->wakes,
           latency->wakes > 0 ? (double)latency->wake_tokens / (double)latency->wakes : 0,
           latency->wakes > 0 ? latency->wake_ms / (double)latency->wakes : 0, ratio, ratio_goal);
    if (latency->wakes < PAIRS || latency->waking.count < PAIRS * TOKENS_EACH / 4) {
        snprintf(latency->reason, sizeof latency->reason, "too few wakes or tokens to compare");
        return 0;
    }
    return 1;
}

/* --- the account */

static void add_latency(cJSON *to, struct latency *latency) {
    cJSON *own = cJSON_AddObjectToObject(to, "latency");
    double quiet = quantile_ms(&latency->quiet, 0.5), waking = quantile_ms(&latency->waking, 0.5);
    cJSON_AddNumberToObject(own, "threads", 1);
    cJSON_AddNumberToObject(own, "quiet_tokens", (double)latency->quiet.count);
    cJSON_AddNumberToObject(own, "quiet_p50_ms", quiet);
    cJSON_AddNumberToObject(own, "quiet_p99_ms", quantile_ms(&latency->quiet, 0.99));
    cJSON_AddNumberToObject(own, "waking_tokens", (double)latency->waking.count);
    cJSON_AddNumberToObject(own, "waking_p50_ms", waking);
    cJSON_AddNumberToObject(own, "waking_p99_ms", quantile_ms(&latency->waking, 0.99));
    cJSON_AddNumberToObject(own, "p50_ratio", quiet > 0 ? waking / quiet : 0);
    cJSON_AddNumberToObject(own, "p50_ratio_goal", ratio_goal);
    cJSON_AddNumberToObject(own, "wakes_from_disk", (double)latency->wakes);
    cJSON_AddNumberToObject(own, "wake_tokens", (double)latency->wake_tokens);
    cJSON_AddNumberToObject(own, "wake_ms", latency->wake_ms);
}

static void add_counts(cJSON *to, const struct crowd_counts *counts) {
    const struct {
        const char *name;
        uint64_t value;
    } members[] = {{"requests", counts->requests},
                   {"retried", counts->retried},
                   {"asked", counts->asked},
                   {"right", counts->right},
                   {"repeated_equal", counts->repeated_equal},
                   {"asked_again", counts->again},
                   {"again_equal", counts->again_equal},
                   {"again_right", counts->again_right},
                   {"foreign", counts->foreign},
                   {"woken_from_disk", counts->found[CROWD_DISK]},
                   {"woken_from_ram", counts->found[CROWD_RAM]},
                   {"found_awake", counts->found[CROWD_DEVICE]},
                   {"new", counts->found[CROWD_NEW]},
                   {"tokens_prompt", counts->tokens_prompt},
                   {"tokens_reused", counts->tokens_reused},
                   {"tokens_prefilled", counts->tokens_prefilled},
                   {"tokens_completion", counts->tokens_completion},
                   {"receipts", counts->receipts},
                   {"receipts_restore", counts->receipts_restore},
                   {"receipts_sleep", counts->receipts_sleep},
                   {"audit_questions", counts->audit_questions},
                   {"audit_own_needles", counts->audit_own},
                   {"audit_foreign", counts->audit_foreign},
                   {"audit_failed", counts->audit_failed},
                   {"tokens_least", counts->tokens_least},
                   {"tokens_most", counts->tokens_most}};
    for (size_t i = 0; i < sizeof members / sizeof members[0]; i++)
        cJSON_AddNumberToObject(to, members[i].name, (double)members[i].value);
    if (counts->has_margin)
        cJSON_AddNumberToObject(to, "margin_least_nats", counts->margin_least);
    cJSON_AddNumberToObject(to, "start_after_kill_s", counts->killed_start_s);
    cJSON_AddNumberToObject(to, "start_after_term_s", counts->ended_start_s);
    cJSON_AddNumberToObject(to, "term_s", counts->ended_s);
}

static void add_machine(cJSON *to, const char *commit) {
    char line[256] = "", date[32] = "";
    time_t now = time(NULL);
    struct tm utc;
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL &&
           strncmp(line, "model name", 10) != 0)
        line[0] = 0;
    if (file != NULL)
        fclose(file);
    const char *model = strchr(line, ':');
    line[strcspn(line, "\n")] = 0;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    cJSON_AddStringToObject(to, "date", date);
    cJSON_AddStringToObject(to, "commit", commit);
    cJSON_AddStringToObject(to, "cpu", model != NULL ? model + 2 : "unknown");
    cJSON_AddNumberToObject(to, "cores", (double)sysconf(_SC_NPROCESSORS_ONLN));
}

struct wish {
    const char *out, *commit;
    struct crowd_options options;
};

static int write_account(const struct wish *wish, const struct crowd_counts *counts,
                         struct latency *latency, double seconds) {
    const struct crowd_options *options = &wish->options;
    cJSON *root = cJSON_CreateObject();
    add_machine(root, wish->commit);
    cJSON_AddNumberToObject(root, "seconds", seconds);
    cJSON_AddNumberToObject(root, "chats", options->chats);
    cJSON_AddNumberToObject(root, "awake", CROWD_AWAKE);
    cJSON_AddNumberToObject(root, "clients", options->clients);
    cJSON_AddNumberToObject(root, "rounds", CROWD_ROUNDS);
    cJSON_AddNumberToObject(root, "document_tokens", (double)options->tokens);
    cJSON_AddNumberToObject(root, "seed", (double)options->seed);
    add_counts(root, counts);
    add_latency(root, latency);
    char *text = cJSON_Print(root);
    FILE *file = text != NULL ? fopen(wish->out, "we") : NULL;
    int good = file != NULL && fprintf(file, "%s\n", text) > 0;
    if (file != NULL && fclose(file) != 0)
        good = 0;
    cJSON_free(text);
    cJSON_Delete(root);
    if (!good)
        fprintf(stderr, "crowd: %s cannot be written\n", wish->out);
    return good;
}

/* --- main */

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

static uint64_t setting(const char *name, uint64_t usual) {
    const char *text = getenv(name);
    return text != NULL && *text != 0 ? strtoull(text, NULL, 10) : usual;
}

static void tell_life(const struct crowd_counts *counts) {
    printf("%" PRIu64 " requests, %" PRIu64 " foreign values; %" PRIu64 " of %" PRIu64
           " facts right; asked again %" PRIu64 ", %" PRIu64 " from disk, all equal; %" PRIu64
           " tokens reused, %" PRIu64 " prefilled; %" PRIu64 " receipts, all ok; own value ahead "
           "by %.1f nats or more in %" PRIu64 " questions\n",
           counts->requests, counts->foreign, counts->right, counts->asked, counts->again,
           counts->again_found[CROWD_DISK], counts->tokens_reused, counts->tokens_prefilled,
           counts->receipts, counts->margin_least, counts->audit_questions);
}

static int run(const struct wish *wish) {
    uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());
    struct latency *latency = calloc(1, sizeof *latency);
    struct crowd *crowd = crowd_open(&wish->options);
    if (crowd == NULL || latency == NULL)
        return 0;
    const char *reason = crowd_reason(crowd);
    int good = reason[0] == 0 && crowd_live(crowd);
    if (good)
        tell_life(crowd_counts(crowd));
    good = good && crowd_restart(crowd, 1);
    if (good) {
        latency->crowd = crowd;
        good = measure(latency) && tell_latency(latency);
        reason = latency->reason;
    }
    double seconds = (double)(kv_clock_now_ns(kv_clock_system()) - begun_ns) * 1e-9;
    if (!good)
        fprintf(stderr, "crowd: after %.0f s: %s\n", seconds, reason);
    if (good && wish->out != NULL)
        good = write_account(wish, crowd_counts(crowd), latency, seconds);
    printf("%.0f s. %s\n", seconds, good ? "Proven." : "NOT PROVEN.");
    crowd_close(crowd);
    free(latency);
    return good;
}

int main(int argc, char **argv) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    char dir[] = "/tmp/crowd-XXXXXX";
    struct wish wish = {.commit = "unknown"};
    for (int i = 1; i + 1 < argc; i += 2)
        *(strcmp(argv[i], "--out") == 0 ? &wish.out : &wish.commit) = argv[i + 1];
    wish.options = (struct crowd_options){.model_path = testing_model_path(),
                                          .chats = (uint32_t)setting("CROWD_CHATS", CHATS),
                                          .clients = (uint32_t)setting("CROWD_CLIENTS", 4),
                                          .threads = online > 0 ? (uint32_t)online : 1,
                                          .tokens = setting("CROWD_TOKENS", 1536),
                                          .growth_tokens = 512,
                                          .bytes_per_token = 4.2,
                                          .knows = 1,
                                          .seed = setting("CROWD_SEED", 20261130)};
    if (wish.options.model_path == NULL || mkdtemp(dir) == NULL) {
        fprintf(stderr, "crowd: no model or no folder; `make setup` fetches the model\n");
        return 1;
    }
    wish.options.dir = dir;
    int good = run(&wish);
    nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return good ? 0 : 1;
}
