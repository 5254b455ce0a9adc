/* tests/support_crowd.c - many chats at one coldplaned: clients, rounds, ends in the middle.
 *
 * Responsible for: the daemon's settings, the client threads, what is said in which order, the
 * order of a whole life.
 * Not responsible for: one request (support_crowd_ask.c), texts (support_crowd_text.c), commands
 * (support_crowd_care.c).
 */
#include "tests/support_crowd_inner.h"

#include "kernels/layout.h"
#include "store/base/clock.h"
#include "tests/support_crowd_ask.h"
#include "tests/support_crowd_care.h"
#include "tests/support_crowd_text.h"
#include "tests/support_demo.h"
#include "tests/testing.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* FIRST: the document and its facts; ROUND: a turn of each kind; LAST: only the question again. */
enum phase { PHASE_FIRST, PHASE_ROUND, PHASE_LAST };

static double seconds_since(uint64_t begun_ns) {
    return (double)(kv_clock_now_ns(kv_clock_system()) - begun_ns) * 1e-9;
}

int support_crowd_inner_failed(struct crowd *crowd) {
    pthread_mutex_lock(&crowd->lock);
    int failed = crowd->reason[0] != 0;
    pthread_mutex_unlock(&crowd->lock);
    return failed;
}

int support_crowd_inner_fail(struct crowd *crowd, const char *format, ...) {
    va_list list;
    pthread_mutex_lock(&crowd->lock);
    va_start(list, format);
    if (crowd->reason[0] == 0)
        vsnprintf(crowd->reason, sizeof crowd->reason, format, list);
    va_end(list);
    pthread_cond_broadcast(&crowd->moved);
    pthread_mutex_unlock(&crowd->lock);
    return 0;
}

const char *crowd_reason(const struct crowd *crowd) {
    return crowd->reason;
}

const struct crowd_counts *crowd_counts(const struct crowd *crowd) {
    return &crowd->counts;
}

struct served *crowd_served(struct crowd *crowd) {
    return &crowd->served;
}

const char *crowd_key(const struct crowd *crowd, uint32_t chat) {
    return crowd->chats[chat].key;
}

/* --- one chat */

static void say(cJSON *messages, const char *role, const char *text) {
    cJSON *message = cJSON_CreateObject();
    cJSON_AddStringToObject(message, "role", role);
    cJSON_AddStringToObject(message, "content", text);
    cJSON_AddItemToArray(messages, message);
}

static void note_session(struct crowd_chat *chat, const struct crowd_answer *answer) {
    int known = chat->session[0] == 0 || strcmp(chat->session, answer->session) == 0;
    for (uint32_t i = 0; i < chat->branch_count; i++)
        known |= strcmp(chat->branches[i], chat->session) == 0;
    if (!known && chat->branch_count < CROWD_NAMES_MAX)
        memcpy(chat->branches[chat->branch_count++], chat->session, sizeof chat->session);
    memcpy(chat->session, answer->session, sizeof chat->session);
    chat->tokens = answer->tokens_prompt + answer->tokens_completion;
}

/* All but the last token that was stored is there, and nothing else is computed again. */
static int reused_all(struct crowd *crowd, const struct crowd_chat *chat,
                      const struct crowd_answer *answer) {
    if (answer->tokens_reused + 1 >= chat->tokens &&
        answer->tokens_prefilled == answer->tokens_prompt - answer->tokens_reused)
        return 1;
    return support_crowd_inner_fail(crowd,
                                    "chat %u had %" PRIu64 " tokens; of a prompt of %" PRIu64
                                    " %" PRIu64 " were reused and %" PRIu64 " prefilled",
                                    chat->index, chat->tokens, answer->tokens_prompt,
                                    answer->tokens_reused, answer->tokens_prefilled);
}

static int take_turn(struct crowd *crowd, struct crowd_chat *chat, const char *question,
                     struct crowd_answer *answer) {
    say(chat->messages, "user", question);
    if (!support_crowd_ask(crowd, chat, chat->messages, answer) || !reused_all(crowd, chat, answer))
        return 0;
    say(chat->messages, "assistant", answer->text);
    note_session(chat, answer);
    return 1;
}

/* 1 when a block was sealed since the turn began. Whoever goes back behind that, asleep in between
 * or not, reads over other planes than the first time, so such a turn is no measure of a sleep. */
static int sealed_since(uint64_t before, const struct crowd_answer *answer) {
    uint64_t end = answer->tokens_prompt + answer->tokens_completion + 1;
    return layout_sealed_blocks(before - 2) != layout_sealed_blocks(end);
}

/* The last question once more, behind the same history. Nothing is computed again but the two
 * tokens that are always fed. */
static int repeat_last(struct crowd *crowd, struct crowd_chat *chat, struct crowd_answer *answer) {
    int last = cJSON_GetArraySize(chat->messages) - 1;
    cJSON *said = cJSON_DetachItemFromArray(chat->messages, last);
    int asked = support_crowd_ask(crowd, chat, chat->messages, answer);
    if (asked) {
        cJSON_Delete(said);
        say(chat->messages, "assistant", answer->text);
        note_session(chat, answer);
    } else {
        cJSON_AddItemToArray(chat->messages, said);
    }
    return asked;
}

/* A question that comes as one chunk and its last two tokens behind kept ones round differently, so
 * two values that are as likely may change places: what must not change by a sleep is the answer to
 * a question that was repeated before. All of it again when a block was sealed: the second turn is
 * far too short to seal the next one. */
static int ask_fact(struct crowd *crowd, struct crowd_chat *chat, uint32_t fact) {
    struct crowd_answer first, answer;
    char question[128];
    uint64_t before;
    snprintf(question, sizeof question,
             "What is the special magic number for %s mentioned in the text?",
             support_crowd_text_key(fact));
    do {
        before = chat->tokens;
        if (!take_turn(crowd, chat, question, &first) || !repeat_last(crowd, chat, &answer))
            return 0;
    } while (sealed_since(before, &first) || sealed_since(before, &answer));
    memcpy(chat->answer, answer.text, sizeof chat->answer);
    chat->was_right = strstr(answer.text, chat->values[fact]) != NULL;
    pthread_mutex_lock(&crowd->lock);
    crowd->counts.asked++;
    crowd->counts.right += (uint64_t)chat->was_right;
    crowd->counts.repeated_equal += (uint64_t)(strcmp(first.text, answer.text) == 0);
    pthread_mutex_unlock(&crowd->lock);
    return 1;
}

/* The answer from before it slept, once more. */
static int ask_again(struct crowd *crowd, struct crowd_chat *chat) {
    struct crowd_answer answer;
    if (!repeat_last(crowd, chat, &answer))
        return 0;
    int equal = strcmp(answer.text, chat->answer) == 0;
    pthread_mutex_lock(&crowd->lock);
    crowd->counts.again++;
    crowd->counts.again_equal += (uint64_t)equal;
    crowd->counts.again_right += (uint64_t)(equal && chat->was_right);
    crowd->counts.again_found[answer.found]++;
    pthread_mutex_unlock(&crowd->lock);
    if (equal && answer.tokens_prefilled <= 2)
        return 1;
    return support_crowd_inner_fail(
        crowd,
        "chat %u, session %s, answered `%.100s` before it slept and `%.100s` now, with %" PRIu64
        " of %" PRIu64 " tokens prefilled",
        chat->index, chat->session, chat->answer, answer.text, answer.tokens_prefilled,
        answer.tokens_prompt);
}

/* The document, with the first question behind it. */
static int begin_chat(struct crowd *crowd, struct crowd_chat *chat) {
    struct crowd_answer answer;
    if (!support_crowd_ask(crowd, chat, chat->messages, &answer))
        return 0;
    say(chat->messages, "assistant", answer.text);
    note_session(chat, &answer);
    return support_crowd_care_register(crowd, chat);
}

struct client {
    struct crowd *crowd;
    enum phase phase;
    uint32_t round;
    uint64_t seed;
    pthread_t thread;
};

static int live_phase(const struct client *client, struct crowd_chat *chat, uint64_t random) {
    struct crowd *crowd = client->crowd;
    struct crowd_answer answer;
    if (client->phase == PHASE_FIRST)
        return begin_chat(crowd, chat) && ask_fact(crowd, chat, 0);
    if (!ask_again(crowd, chat) || client->phase == PHASE_LAST)
        return client->phase == PHASE_LAST && !support_crowd_inner_failed(crowd);
    return take_turn(crowd, chat, support_crowd_text_talk(random), &answer) &&
           ask_fact(crowd, chat, client->round);
}

/* --- clients at the same time */

static struct crowd_chat *next_chat(struct crowd *crowd) {
    struct crowd_chat *chat = NULL;
    pthread_mutex_lock(&crowd->lock);
    if (crowd->reason[0] == 0 && crowd->next < crowd->options.chats)
        chat = &crowd->chats[crowd->order[crowd->next++]];
    pthread_mutex_unlock(&crowd->lock);
    return chat;
}

static void *client_main(void *context) {
    struct client *client = context;
    struct crowd *crowd = client->crowd;
    struct crowd_chat *chat;
    struct testing_random random;
    testing_random_init(&random, client->seed);
    while ((chat = next_chat(crowd)) != NULL) {
        if (!live_phase(client, chat, testing_random_u64(&random)))
            break;
        pthread_mutex_lock(&crowd->lock);
        crowd->done++;
        pthread_cond_broadcast(&crowd->moved);
        pthread_mutex_unlock(&crowd->lock);
    }
    return NULL;
}

static void shuffle(struct crowd *crowd, uint64_t seed) {
    struct testing_random random;
    testing_random_init(&random, seed);
    for (uint32_t i = 0; i < crowd->options.chats; i++)
        crowd->order[i] = i;
    for (uint32_t i = crowd->options.chats - 1; i > 0; i--) {
        uint32_t other = (uint32_t)testing_random_below(&random, i + 1);
        uint32_t moved = crowd->order[i];
        crowd->order[i] = crowd->order[other];
        crowd->order[other] = moved;
    }
    crowd->next = crowd->done = 0;
}

static void say_progress(const struct crowd *crowd, const char *what) {
    const struct crowd_counts *counts = &crowd->counts;
    if (crowd->options.quiet)
        return;
    printf("  %4.0f s  %-28s %4" PRIu64 " requests; from disk %" PRIu64 ", RAM %" PRIu64
           ", awake %" PRIu64 "; again %" PRIu64 " of %" PRIu64 " equal; right %" PRIu64
           " of %" PRIu64 "\n",
           seconds_since(crowd->begun_ns), what, counts->requests, counts->found[CROWD_DISK],
           counts->found[CROWD_RAM], counts->found[CROWD_DEVICE], counts->again_equal,
           counts->again, counts->right, counts->asked);
    fflush(stdout);
}

/* The daemon ends and starts under clients that are at work, when half of the chats are through. */
static void end_in_the_middle(struct crowd *crowd) {
    pthread_mutex_lock(&crowd->lock);
    while (crowd->done < crowd->options.chats / 2 && crowd->reason[0] == 0)
        pthread_cond_wait(&crowd->moved, &crowd->lock);
    crowd->ending = crowd->reason[0] == 0;
    int ending = crowd->ending;
    pthread_mutex_unlock(&crowd->lock);
    if (!ending)
        return;
    uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());
    int code = served_end(&crowd->served, SIGTERM);
    crowd->counts.ended_s = seconds_since(begun_ns);
    if (code != 0)
        support_crowd_inner_fail(crowd, "SIGTERM under load: coldplaned ended with %d", code);
    begun_ns = kv_clock_now_ns(kv_clock_system());
    if (!served_start(&crowd->served))
        support_crowd_inner_fail(crowd, "after SIGTERM: %.300s", crowd->served.said);
    crowd->counts.ended_start_s = seconds_since(begun_ns);
    pthread_mutex_lock(&crowd->lock);
    crowd->ending = 0;
    crowd->generation++;
    pthread_cond_broadcast(&crowd->moved);
    pthread_mutex_unlock(&crowd->lock);
}

static int run_phase(struct crowd *crowd, enum phase phase, uint32_t round, int ends) {
    struct client clients[CROWD_CHATS_MAX];
    uint32_t started = 0;
    shuffle(crowd, crowd->options.seed + 100 + 10 * round + (uint64_t)phase);
    for (; started < crowd->options.clients; started++) {
        struct client *client = &clients[started];
        *client = (struct client){.crowd = crowd,
                                  .phase = phase,
                                  .round = round,
                                  .seed = crowd->options.seed + 1000 * round + started};
        if (pthread_create(&client->thread, NULL, client_main, client) != 0)
            break;
    }
    if (started < crowd->options.clients)
        support_crowd_inner_fail(crowd, "cannot start a client");
    if (ends)
        end_in_the_middle(crowd);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(clients[i].thread, NULL);
    return !support_crowd_inner_failed(crowd);
}

/* --- two owners */

static int is_fresh(struct crowd *crowd, const char *key, const cJSON *messages, int wanted) {
    struct crowd_answer answer;
    int status = support_crowd_ask_alone(crowd, key, NULL, messages, &answer);
    if (status == 200 && (answer.tokens_reused == 0) == wanted)
        return 1;
    return support_crowd_inner_fail(
        crowd, "the same prompt with %s key: status %d, %" PRIu64 " reused",
        wanted ? "another" : "the same", status, status == 200 ? answer.tokens_reused : 0);
}

/* Long enough for a branch, and without any chat's fact: the audit asks these sessions, too. */
static cJSON *common_messages(void) {
    char text[4096] = "";
    cJSON *messages = cJSON_CreateArray();
    for (uint64_t i = 0; i < 36; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%" PRIu64 ". %s\n", i,
                 support_crowd_text_talk(i));
    say(messages, "user", text);
    return messages;
}

static int two_owners(struct crowd *crowd) {
    struct crowd_answer answer;
    int good = 1;
    cJSON *messages = common_messages();
    for (int k = 0; k < 2 && good; k++)
#ifdef BREAK_CROWD_OWNER
        good = is_fresh(crowd, crowd->keys[0], messages, 1);
#else
        good = is_fresh(crowd, crowd->keys[k], messages, 1);
#endif
    for (int k = 0; k < 2 && good; k++)
        good = is_fresh(crowd, crowd->keys[k], messages, 0);
    if (good && support_crowd_ask_alone(crowd, crowd->keys[0], "owned", messages, &answer) != 200)
        good = support_crowd_inner_fail(crowd, "a session could not be made by its name");
    int status =
        good ? support_crowd_ask_alone(crowd, crowd->keys[1], "owned", messages, &answer) : 404;
    if (status != 404)
        good = support_crowd_inner_fail(crowd, "another owner's session by its name: status %d",
                                        status);
    cJSON_Delete(messages);
    return good;
}

/* --- a whole life */

static int kill_between_turns(struct crowd *crowd) {
    served_end(&crowd->served, SIGKILL);
    uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());
    if (!served_start(&crowd->served))
        return support_crowd_inner_fail(crowd, "after kill -9: %.300s", crowd->served.said);
    crowd->counts.killed_start_s = seconds_since(begun_ns);
    return 1;
}

/* What must be so although no single answer shows it. */
static int conclude(struct crowd *crowd) {
    struct crowd_counts *counts = &crowd->counts;
    uint64_t chats = crowd->options.chats;
    counts->tokens_least = UINT64_MAX;
    for (uint32_t i = 0; i < chats; i++) {
        uint64_t tokens = crowd->chats[i].tokens;
        counts->tokens_most = tokens > counts->tokens_most ? tokens : counts->tokens_most;
        counts->tokens_least = tokens < counts->tokens_least ? tokens : counts->tokens_least;
    }
    uint64_t asleep = counts->again_found[CROWD_DISK] + counts->again_found[CROWD_RAM];
    if (counts->again != CROWD_ROUNDS * chats || counts->asked != CROWD_ROUNDS * chats)
        return support_crowd_inner_fail(crowd, "%" PRIu64 " questions and %" PRIu64 " again",
                                        counts->asked, counts->again);
    if (asleep < (CROWD_ROUNDS - 1) * (chats - CROWD_AWAKE))
        return support_crowd_inner_fail(crowd, "only %" PRIu64 " were asked again after a sleep",
                                        asleep);
    if (crowd->options.knows && 2 * counts->right < counts->asked)
        return support_crowd_inner_fail(
            crowd, "the model found %" PRIu64 " of %" PRIu64 " facts: too few to show anything",
            counts->right, counts->asked);
    return 1;
}

int crowd_live(struct crowd *crowd) {
    static const char *const done[] = {"first turns", "round 2", "round 3 with a SIGTERM"};
    if (!two_owners(crowd))
        return 0;
    say_progress(crowd, "two owners");
    for (uint32_t round = 0; round < CROWD_ROUNDS; round++) {
        int ends = round + 1 == CROWD_ROUNDS;
        if (!run_phase(crowd, round == 0 ? PHASE_FIRST : PHASE_ROUND, round, ends) ||
            !support_crowd_care_receipts(crowd))
            return 0;
        say_progress(crowd, done[round]);
        if (round == 0 && !kill_between_turns(crowd))
            return 0;
        if (round == 0)
            say_progress(crowd, "killed and started");
    }
    if (!run_phase(crowd, PHASE_LAST, CROWD_ROUNDS, 0) || !support_crowd_care_receipts(crowd) ||
        !support_crowd_care_lost(crowd))
        return 0;
    say_progress(crowd, "everybody once more");
    if (!support_crowd_care_audit(crowd))
        return 0;
    say_progress(crowd, "audit");
    return conclude(crowd);
}

/* --- opening */

static int write_keys(struct crowd *crowd) {
    char path[SERVED_PATH_BYTES];
    snprintf(path, sizeof path, "%.480s/key", crowd->served.home);
    FILE *file = fopen(path, "wx");
    if (file == NULL || fchmod(fileno(file), 0600) != 0)
        return support_crowd_inner_fail(crowd, "%s cannot be written", path);
    for (int k = 0; k < 2; k++) {
        snprintf(crowd->keys[k], sizeof crowd->keys[k], "crowd-key-of-the-%s-owner",
                 k == 0 ? "first" : "second");
        fprintf(file, "%s\n", crowd->keys[k]);
    }
    return fclose(file) == 0;
}

/* For the daemon, and for commands that read beside it. */
static int write_config(struct crowd *crowd, const struct demo_budget *budget) {
    char path[SERVED_PATH_BYTES];
    snprintf(path, sizeof path, "%.480s/config", crowd->served.home);
    FILE *file = fopen(path, "w");
    if (file == NULL)
        return support_crowd_inner_fail(crowd, "%s cannot be written", path);
    fprintf(file,
            "model = %s\nslots-memory = %" PRIu64 "\nreserve-slots = %" PRIu32
            "\nages = 512,1024,1536\ntemperature = 0\n",
            crowd->options.model_path, budget->bytes, budget->reserve_slots);
    return fclose(file) == 0;
}

/* Slots for nine sessions at their longest, and a reserve. */
static int plan(struct crowd *crowd) {
    const struct crowd_options *options = &crowd->options;
    const struct demo demo = {options->model_path, options->dir,
                              options->tokens + options->growth_tokens, options->threads};
    struct demo_budget budget;
    struct kv_diag diag = {""};
    if (demo_plan(&demo, &budget, &diag) != KV_OK)
        return support_crowd_inner_fail(crowd, "%s", diag.text);
    snprintf(crowd->threads_flag, sizeof crowd->threads_flag, "%" PRIu32, options->threads);
    crowd->served.flags[0] = "--threads";
    crowd->served.flags[1] = crowd->threads_flag;
    if (!options->quiet)
        printf("%u chats of about %" PRIu64 " tokens, %u clients, seed %" PRIu64
               "; slots for nine: %u of %.0f KiB\n",
               options->chats, options->tokens, options->clients, options->seed, budget.slots,
               (double)budget.slot_bytes / 1024);
    return write_config(crowd, &budget);
}

struct crowd *crowd_open(const struct crowd_options *options) {
    struct crowd *crowd = calloc(1, sizeof *crowd);
    if (crowd == NULL)
        return NULL;
    crowd->options = *options;
    crowd->begun_ns = kv_clock_now_ns(kv_clock_system());
    pthread_mutex_init(&crowd->lock, NULL);
    pthread_cond_init(&crowd->moved, NULL);
    snprintf(crowd->served.home, sizeof crowd->served.home, "%s", options->dir);
    if (options->chats <= CROWD_AWAKE || options->chats > CROWD_CHATS_MAX ||
        options->clients == 0 || options->clients > CROWD_AWAKE)
        support_crowd_inner_fail(crowd, "10 to %d chats and 1 to %d clients", CROWD_CHATS_MAX,
                                 CROWD_AWAKE);
    else if (write_keys(crowd) && support_crowd_text(crowd) && plan(crowd) &&
             !served_start(&crowd->served))
        support_crowd_inner_fail(crowd, "coldplaned does not start: %.300s", crowd->served.said);
    return crowd;
}

int crowd_restart(struct crowd *crowd, uint32_t threads) {
    snprintf(crowd->threads_flag, sizeof crowd->threads_flag, "%" PRIu32, threads);
    int code = served_end(&crowd->served, SIGTERM);
    if (code != 0)
        return support_crowd_inner_fail(crowd, "SIGTERM: coldplaned ended with %d", code);
    return served_start(&crowd->served) ||
           support_crowd_inner_fail(crowd, "coldplaned does not start: %.300s", crowd->served.said);
}

int crowd_wake(struct crowd *crowd, uint32_t number, enum crowd_found *found_out,
               uint64_t *tokens_out) {
    struct crowd_answer answer = {.found = CROWD_NEW};
    const struct crowd_chat *chat =
        &crowd->chats[(2 * number + 1) % (crowd->options.chats / 2 * 2)];
    int last = cJSON_GetArraySize(chat->messages) - 1;
    cJSON *said = cJSON_DetachItemFromArray(chat->messages, last);
    int woken = support_crowd_ask_briefly(crowd, chat, chat->messages, &answer);
    cJSON_AddItemToArray(chat->messages, said);
    *found_out = answer.found;
    *tokens_out = answer.tokens_prompt;
    return woken;
}

void crowd_close(struct crowd *crowd) {
    if (crowd == NULL)
        return;
    if (crowd->served.pid > 0)
        served_end(&crowd->served, SIGTERM);
    for (uint32_t i = 0; i < CROWD_CHATS_MAX; i++)
        cJSON_Delete(crowd->chats[i].messages);
    pthread_cond_destroy(&crowd->moved);
    pthread_mutex_destroy(&crowd->lock);
    free(crowd);
}
