/* tests/test_service.c - sessions by name, room made by sleep, turns.
 *
 * Responsible for: finding a session wherever it is, least recently used sleep, what a failed save
 * leaves behind, chat turns that were ended in every way, documents cut to a length.
 * Not responsible for: the CLI around it (test_cli.c) or the parts below (their own tests).
 *
 * Fails with BREAK_FOREIGN_NAME (a name is anybody's), BREAK_LEAST_RECENT (the newest sleeps) and
 * BREAK_OPEN_TURN (a cut answer stays open), and where a test says so.
 */
#include "tools/service.h"

#include "engine/model/tokenizer.h"
#include "tests/support_serve.h"
#include "tests/testing.h"
#include "tools/cmd_host.h"
#include "tools/service_inner.h"
#include "tools/turn.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void open_service(struct serving *fixture) {
    enum kv_err err = service_open(&fixture->settings, &fixture->service, &fixture->diag);
    if (err != KV_OK)
        fail_msg("service_open: %s", fixture->diag.text);
}

static int set_up(void **state) {
    serving_set_up(state);
    struct serving *fixture = *state;
    fixture->settings.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {256, 512, 768}};
    open_service(fixture);
    return 0;
}

static struct session *session_of(struct serving *fixture, const char *name, int create,
                                  enum service_found wanted) {
    struct session *session = NULL;
    struct service_opened opened;
    const struct service_lookup lookup = {.create = create};
    enum kv_err err =
        service_session(fixture->service, name, &lookup, &session, &opened, &fixture->diag);
    if (err != KV_OK)
        fail_msg("session %s: %s", name, fixture->diag.text);
    assert_int_equal(opened.found, wanted);
    assert_int_equal(opened.receipt.operation, wanted == SERVICE_WOKEN ? RECEIPT_RESTORE : 0);
    return session;
}

/* The answer is written into `answer` (256 bytes) when that is not NULL. */
static struct receipt say(struct serving *fixture, struct session *session, const char *text,
                          uint32_t tokens_max, char *answer) {
    struct template_message message = {TEMPLATE_USER, text, strlen(text)};
    const struct turn_options options = {
        .messages = &message, .message_count = 1, .tokens_max = tokens_max, .save = 1};
    struct turn_result result;
    enum kv_err err = turn_run(fixture->service, session, &options, &result, &fixture->diag);
    if (err != KV_OK)
        fail_msg("turn: %s", fixture->diag.text);
    assert_true(result.saved);
    assert_true(tokens_max == 0 || result.tokens_generated > 0);
    if (answer != NULL)
        snprintf(answer, 256, "%.250s", result.text != NULL ? result.text : "");
    struct receipt receipt = result.receipt;
    turn_result_release(fixture->service, &result);
    return receipt;
}

static uint64_t feed_document(struct serving *fixture, struct session *session, uint64_t end) {
    static char text[40000];
    struct session_info info;
    for (size_t at = 0; at + 16 < sizeof text;)
        at += (size_t)snprintf(text + at, sizeof text - at, "word%zu ", at * 31 % 997);
    const struct turn_document document = {
        .text = text, .text_bytes = strlen(text), .tokens_end = end};
    enum kv_err err = turn_feed_document(fixture->service, session, &document, &fixture->diag);
    if (err != KV_OK)
        fail_msg("document: %s", fixture->diag.text);
    session_info(session, &info);
    return info.n_kv;
}

static void a_name_is_found_wherever_it_is(void **state) {
    struct serving *fixture = *state;
    struct receipt receipt;
    struct session *session = NULL;
    struct service_opened opened;
    const struct service_lookup only_there = {.create = 0};
    assert_int_equal(
        service_session(fixture->service, "a", &only_there, &session, &opened, &fixture->diag),
        KV_ERR_NOT_FOUND);
    session = session_of(fixture, "a", 1, SERVICE_NEW);
    say(fixture, session, "hello", 4, NULL);
    assert_ptr_equal(session_of(fixture, "a", 0, SERVICE_RESIDENT), session);
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_ERR_EXISTS);
    assert_int_equal(service_sleep(fixture->service, session, &receipt, &fixture->diag), KV_OK);
    assert_int_equal(receipt.operation, RECEIPT_SLEEP);
    assert_null(session_find(service_engine(fixture->service), "a"));
    session_of(fixture, "a", 0, SERVICE_WOKEN);
    service_close(fixture->service);
    open_service(fixture);
    session_of(fixture, "a", 1, SERVICE_WOKEN);
    assert_int_equal(
        service_session(fixture->service, "../a", &only_there, &session, &opened, &fixture->diag),
        KV_ERR_INVALID);
}

static uint32_t residents(struct serving *fixture) {
    uint32_t count = 0;
    while (session_at(service_engine(fixture->service), count) != NULL)
        count++;
    return count;
}

/* More sessions than slots: the least recently used sleep, all come back as themselves. */
static enum kv_err lookup_as(struct serving *fixture, const char *name, const uint8_t *owner) {
    struct session *session = NULL;
    struct service_opened opened;
    const struct service_lookup lookup = {.create = 1, .owner = owner};
    return service_session(fixture->service, name, &lookup, &session, &opened, &fixture->diag);
}

/* Awake, asleep and by whoever asks first: another owner's name is nowhere.
 * Fails with BREAK_FOREIGN_NAME. */
static void names_belong_to_an_owner(void **state) {
    struct serving *fixture = *state;
    static const uint8_t alice[IMAGE_OWNER_BYTES] = {1}, bob[IMAGE_OWNER_BYTES] = {2};
    static const uint8_t nobody[IMAGE_OWNER_BYTES];
    struct receipt receipt;
    assert_int_equal(lookup_as(fixture, "hers", alice), KV_OK);
    struct session *session = session_of(fixture, "hers", 0, SERVICE_RESIDENT);
    assert_int_equal(lookup_as(fixture, "hers", bob), KV_ERR_NOT_FOUND);
    assert_int_equal(lookup_as(fixture, "hers", nobody), KV_ERR_NOT_FOUND);
    say(fixture, session, "hello", 3, NULL);
    assert_int_equal(service_sleep(fixture->service, session, &receipt, &fixture->diag), KV_OK);
    assert_int_equal(lookup_as(fixture, "hers", bob), KV_ERR_NOT_FOUND);
    assert_int_equal(lookup_as(fixture, "hers", nobody), KV_ERR_NOT_FOUND);
    assert_non_null(strstr(fixture->diag.text, "taken, but not by this key"));
    assert_non_null(strstr(fixture->diag.text, "`coldplane chat --session hers`"));
    assert_null(session_find(service_engine(fixture->service), "hers"));
    assert_int_equal(lookup_as(fixture, "hers", alice), KV_OK);
    (void)session_of(fixture, "mine", 1, SERVICE_NEW);
    assert_int_equal(lookup_as(fixture, "mine", bob), KV_ERR_NOT_FOUND);
    assert_int_equal(lookup_as(fixture, "mine", nobody), KV_OK);
}

/* Fails with BREAK_LEAST_RECENT. */
static void room_is_made_by_the_least_recently_used(void **state) {
    struct serving *fixture = *state;
    enum { SESSIONS = 8 };
    uint64_t tokens[SESSIONS];
    char name[8];
    service_close(fixture->service);
    fixture->settings.slot_budget_bytes = 2 << 20;
    open_service(fixture);
    for (int i = 0; i < SESSIONS; i++) {
        snprintf(name, sizeof name, "s%d", i);
        struct session *session = session_of(fixture, name, 1, SERVICE_NEW);
        tokens[i] = feed_document(fixture, session, 600 + 100 * (uint64_t)i);
        say(fixture, session, "and?", 3, NULL);
    }
    assert_true(residents(fixture) < SESSIONS);
    assert_string_equal(service_note(fixture->service), "");
    assert_null(session_find(service_engine(fixture->service), "s0"));
    assert_non_null(session_find(service_engine(fixture->service), "s7"));
    for (int i = 0; i < SESSIONS; i++) {
        struct session *session = NULL;
        struct service_opened opened;
        struct session_info info;
        const struct service_lookup lookup = {.create = 0};
        snprintf(name, sizeof name, "s%d", i);
        assert_int_equal(
            service_session(fixture->service, name, &lookup, &session, &opened, &fixture->diag),
            KV_OK);
        session_info(session, &info);
        assert_true(info.n > tokens[i]);
        assert_true(info.tokens_prefilled == 0 || opened.found == SERVICE_RESIDENT);
        if (opened.found == SERVICE_WOKEN)
            assert_int_equal(opened.receipt.fingerprint, RECEIPT_BITS_EQUAL);
    }
}

static void too_much_room_is_refused_with_need_and_have(void **state) {
    struct serving *fixture = *state;
    struct session *session = session_of(fixture, "a", 1, SERVICE_NEW);
    say(fixture, session, "hello", 4, NULL);
    assert_int_equal(service_make_room(fixture->service, 1000000, session, &fixture->diag),
                     KV_ERR_NO_SLOTS);
    assert_non_null(strstr(fixture->diag.text, "1000000 slots are needed"));
    assert_ptr_equal(session_find(service_engine(fixture->service), "a"), session);
    assert_int_equal(service_make_room(fixture->service, 1, session, &fixture->diag), KV_OK);
    assert_int_equal(residents(fixture), 1);
}

/* A turn that ended by itself, was cut at its length, was stopped, or was only fed: the next user
 * turn must see the same separators that one rendering of the whole chat has. */
static int stop_at_once(void *context) {
    (void)context;
    return 1;
}

/* Fails with BREAK_OPEN_TURN. */
static void turns_are_closed_however_they_ended(void **state) {
    struct serving *fixture = *state;
    struct session *session = session_of(fixture, "a", 1, SERVICE_NEW);
    struct engine *engine = service_engine(fixture->service);
    uint32_t end_id = template_end_id(engine_template(engine));
    struct template_message message = {TEMPLATE_USER, "one two three", 13};
    struct turn_result result;
    struct session_info info;
    say(fixture, session, "first", 2, NULL);
    struct turn_options options = {
        .messages = &message, .message_count = 1, .tokens_max = 50, .cancelled = stop_at_once};
    assert_int_equal(turn_run(fixture->service, session, &options, &result, &fixture->diag), KV_OK);
    assert_true(result.cancelled);
    assert_true(result.tokens_generated < 50);
    turn_result_release(fixture->service, &result);
    say(fixture, session, "fed only", 0, NULL);
    say(fixture, session, "last", 1, NULL);
    session_info(session, &info);
    uint32_t ends = 0, starts = 0;
    int32_t start_id = tokenizer_special(engine_tokenizer(engine), "<|im_start|>");
    for (uint64_t i = 0; i < info.n; i++) {
        ends += info.ids[i] == end_id;
        starts += info.ids[i] == (uint32_t)start_id;
        if (info.ids[i] == (uint32_t)start_id && i > 0)
            assert_true(info.ids[i - 2] == end_id);
    }
    /* system, four user turns, three answers of which the last is open or ended by itself */
    assert_int_equal(starts, 8);
    assert_true(ends == 7 || ends == 8);
}

struct stopping {
    int begun;
    uint64_t seen;
};

static void on_first_part(void *context, uint64_t done, uint64_t all) {
    struct stopping *stopping = context;
    stopping->begun |= done > 0 && done < all;
    stopping->seen = done;
}

static int stop_in_message(void *context) {
    return ((struct stopping *)context)->begun;
}

/* Fails with BREAK_HALF_MESSAGE. */
static void half_a_message_is_taken_back(void **state) {
    struct serving *fixture = *state;
    static char text[20000];
    struct session_info info;
    struct stopping stopping = {0, 0};
    struct session *session = session_of(fixture, "a", 1, SERVICE_NEW);
    struct template_message message = {TEMPLATE_USER, text, 0};
    struct turn_result result;
    struct turn_options options = {.messages = &message,
                                   .message_count = 1,
                                   .tokens_max = 5,
                                   .save = 1,
                                   .take_back = 1,
                                   .prefilled = on_first_part,
                                   .cancelled = stop_in_message,
                                   .context = &stopping};
    for (size_t at = 0; at + 16 < sizeof text;)
        at += (size_t)snprintf(text + at, sizeof text - at, "word%zu ", at * 31 % 997);
    message.text_bytes = 6000;
    say(fixture, session, "first", 2, NULL);
    session_info(session, &info);
    uint64_t stored = info.n_kv;
    assert_int_equal(turn_run(fixture->service, session, &options, &result, &fixture->diag),
                     KV_ERR_CANCELLED);
    assert_true(stopping.begun);
    assert_in_range(result.tokens_unread, 1, result.tokens_fed - 1);
    assert_int_equal(result.receipt.operation, 0);
    assert_non_null(strstr(fixture->diag.text, "nothing of it is kept"));
    turn_result_release(fixture->service, &result);
    service_drop(fixture->service, session);
    session = session_of(fixture, "a", 0, SERVICE_WOKEN);
    session_info(session, &info);
    assert_int_equal(info.n_kv, stored);
    /* Who does not want that keeps what was read, and learns how much is missing. */
    stopping.begun = 0;
    options.take_back = 0;
    assert_int_equal(turn_run(fixture->service, session, &options, &result, &fixture->diag), KV_OK);
    session_info(session, &info);
    assert_true(result.saved && result.tokens_unread > 0);
    assert_true(info.n > stored);
    turn_result_release(fixture->service, &result);
}

static void a_document_is_cut_to_its_length(void **state) {
    struct serving *fixture = *state;
    static const uint64_t ends[] = {64, 320, 321, 777, 2048};
    char name[8];
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        snprintf(name, sizeof name, "d%zu", i);
        struct session *session = session_of(fixture, name, 1, SERVICE_NEW);
        uint64_t n = feed_document(fixture, session, ends[i]);
        assert_true(n <= ends[i] && n + 8 >= ends[i]);
    }
    struct session *session = session_of(fixture, "d0", 0, SERVICE_RESIDENT);
    const struct turn_document none = {.text = "x", .text_bytes = 1, .tokens_end = 10};
    assert_int_equal(turn_feed_document(fixture->service, session, &none, &fixture->diag),
                     KV_ERR_LIMIT);
}

static void sleep_does_not_change_an_answer(void **state) {
    struct serving *fixture = *state;
    char awake[256], asleep[256];
    struct receipt receipt;
    struct session *session = session_of(fixture, "awake", 1, SERVICE_NEW);
    feed_document(fixture, session, 1500);
    say(fixture, session, "what then?", 16, awake);
    session = session_of(fixture, "asleep", 1, SERVICE_NEW);
    feed_document(fixture, session, 1500);
    assert_int_equal(service_sleep(fixture->service, session, &receipt, &fixture->diag), KV_OK);
    session = session_of(fixture, "asleep", 0, SERVICE_WOKEN);
    say(fixture, session, "what then?", 16, asleep);
    assert_string_equal(awake, asleep);
    assert_true(strlen(awake) > 0);
}

/* BREAK_EMPTY_SLEEP refuses: a chat in which nothing was said could not be left by /sleep. */
static void one_without_tokens_sleeps_without_a_trace(void **state) {
    struct serving *fixture = *state;
    struct receipt receipt;
    struct service_opened opened;
    const struct service_lookup only_there = {.create = 0};
    struct session *session = session_of(fixture, "empty", 1, SERVICE_NEW);
    if (service_sleep(fixture->service, session, &receipt, &fixture->diag) != KV_OK)
        fail_msg("sleep: %s", fixture->diag.text);
    assert_int_equal(receipt.operation, 0);
    assert_null(session_find(service_engine(fixture->service), "empty"));
    assert_int_equal(
        service_session(fixture->service, "empty", &only_there, &session, &opened, &fixture->diag),
        KV_ERR_NOT_FOUND);
    /* A save of it was asked for by name: that there is none is said. */
    session = session_of(fixture, "empty", 1, SERVICE_NEW);
    assert_int_equal(service_save(fixture->service, session, 1, &receipt, &fixture->diag),
                     KV_ERR_INVALID);
    assert_non_null(strstr(fixture->diag.text, "no tokens yet"));
}

/* CASE-19: the session stays on the device and says what it said before. */
static void a_save_that_fails_leaves_the_session_whole(void **state) {
    struct serving *fixture = *state;
    struct receipt receipt;
    struct session_info before, after;
    service_close(fixture->service);
    fixture->settings.store_bytes_max = 64 << 10;
    open_service(fixture);
    struct session *session = session_of(fixture, "a", 1, SERVICE_NEW);
    feed_document(fixture, session, 900);
    session_info(session, &before);
    assert_int_equal(service_save(fixture->service, session, 0, &receipt, &fixture->diag),
                     KV_ERR_LIMIT);
    assert_true(receipt.door_bytes == 0);
    assert_int_equal(service_sleep(fixture->service, session, &receipt, &fixture->diag),
                     KV_ERR_LIMIT);
    assert_ptr_equal(session_find(service_engine(fixture->service), "a"), session);
    session_info(session, &after);
    assert_int_equal(after.blocks_durable, 0);
    assert_true(after.n == before.n);
    struct template_message message = {TEMPLATE_USER, "go on", 5};
    const struct turn_options options = {.messages = &message, .message_count = 1, .tokens_max = 3};
    struct turn_result result;
    assert_int_equal(turn_run(fixture->service, session, &options, &result, &fixture->diag), KV_OK);
    assert_true(result.tokens_generated > 0);
    turn_result_release(fixture->service, &result);
}

static void reading_only_wakes_but_never_writes(void **state) {
    struct serving *fixture = *state;
    struct receipt receipt;
    struct service *reader = NULL;
    struct session *session = session_of(fixture, "a", 1, SERVICE_NEW);
    say(fixture, session, "hello", 4, NULL);
    service_close(fixture->service);
    fixture->service = NULL;
    struct service_settings settings = fixture->settings;
    settings.read_only = 1;
    assert_int_equal(service_open(&settings, &reader, &fixture->diag), KV_OK);
    assert_null(service_snapshot(reader));
    assert_int_equal(service_wake(reader, "a", NULL, &session, &receipt, &fixture->diag), KV_OK);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(service_save(reader, session, 0, &receipt, &fixture->diag), KV_ERR_INVALID);
    assert_int_equal(service_sleep(reader, session, &receipt, &fixture->diag), KV_ERR_INVALID);
    service_close(reader);
}

/* --- wakes at less than the tier map */

struct told {
    struct receipt refined;
    int count;
};

static uint64_t on_receipt(void *context, const struct receipt *receipt) {
    struct told *told = context;
    if (receipt->operation != RECEIPT_REFINE)
        return 0;
    told->refined = *receipt;
    told->count++;
    return 0;
}

/* "a" asleep with blocks at every tier. */
static void sleep_long(struct serving *fixture, const char *name) {
    struct receipt receipt;
    struct session *session = session_of(fixture, name, 1, SERVICE_NEW);
    feed_document(fixture, session, 1900);
    say(fixture, session, "and?", 3, NULL);
    assert_int_equal(service_sleep(fixture->service, session, &receipt, &fixture->diag), KV_OK);
}

static void an_eager_turn_is_told_of_twice(void **state) {
    struct serving *fixture = *state;
    struct told told = {.count = 0};
    struct session_info info;
    struct receipt saved;
    sleep_long(fixture, "a");
    service_close(fixture->service);
    fixture->settings.eager = 1;
    fixture->settings.receipt = on_receipt;
    fixture->settings.receipt_context = &told;
    open_service(fixture);
    struct session *session = session_of(fixture, "a", 0, SERVICE_WOKEN);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_PARTIAL);
    uint64_t from = info.n_kv;
    saved = say(fixture, session, "go on", 3, NULL);
    assert_int_equal(told.count, 1);
    assert_int_equal(told.refined.err, KV_OK);
    assert_int_equal(saved.mixed_from, from);
    assert_true(saved.seen_count >= 1);
    assert_int_equal(saved.seen[0].coarsest, LAYOUT_K6V2);
    assert_int_equal(saved.coarse_blocks, 0);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_IDLE);
    /* Nobody types: it comes all the same. */
    assert_int_equal(service_sleep(fixture->service, session, &saved, &fixture->diag), KV_OK);
    session = session_of(fixture, "a", 0, SERVICE_WOKEN);
    for (int i = 0; session_promoting(session); i++) {
        assert_true(i < 100);
        (void)service_tend(fixture->service);
    }
    (void)service_tend(fixture->service);
    assert_int_equal(told.count, 2);
    assert_int_equal(service_refine(fixture->service, session, &saved), 0);
}

/* Slots for so many beside the reserve. */
static void open_with_slots(struct serving *fixture, uint32_t slots) {
    struct engine_slots now;
    engine_slots(service_engine(fixture->service), &now);
    service_close(fixture->service);
    slots += fixture->settings.reserve_slots;
    fixture->settings.slot_budget_bytes =
        (slots + 7) / 8 * (8 * now.slot_bytes + now.meta_frame_bytes);
    open_service(fixture);
}

static void too_few_slots_are_enough_for_the_floor(void **state) {
    struct serving *fixture = *state;
    struct restore_plan plan;
    struct session *session = NULL;
    struct session_info info;
    struct receipt receipt;
    sleep_long(fixture, "a");
    assert_int_equal(restore_plan(&fixture->service->source, "a", 0, &plan, &fixture->diag), KV_OK);
    /* Another session, which may not sleep, takes so much that the floor just fits. */
    open_with_slots(fixture, 72 + plan.floor_slots);
    struct session *other = session_of(fixture, "b", 1, SERVICE_NEW);
    transfer_durable(other)->pinned = 1;
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_ERR_NO_SLOTS);
    service_close(fixture->service);
    fixture->settings.fit = 1;
    open_service(fixture);
    other = session_of(fixture, "b", 1, SERVICE_NEW);
    transfer_durable(other)->pinned = 1;
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_OK);
    assert_int_equal(receipt.tiers, RECEIPT_TIERS_FLOOR);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_true(receipt.fingerprint_floor);
    receipt = say(fixture, session, "go on", 2, NULL);
    assert_int_equal(receipt.coarse_blocks, plan.blocks - plan.tier_blocks[LAYOUT_K6V2]);
    assert_int_equal(receipt.mixed_from, plan.n_kv);
    /* With the other one gone there are slots for all: the next turn takes them. */
    session_drop(other);
    receipt = say(fixture, session, "go on", 2, NULL);
    assert_int_equal(receipt.coarse_blocks, 0);
    session_info(session, &info);
    assert_false(info.held_at_floor);
    assert_int_equal(receipt.mixed_from, plan.n_kv);
    assert_int_equal(service_sleep(fixture->service, session, &receipt, &fixture->diag), KV_OK);
    /* Where everything fits a wake is exact. */
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_OK);
    assert_int_equal(receipt.tiers, RECEIPT_TIERS_EXACT);
    assert_false(receipt.fingerprint_floor);
}

/* Two wakes found one seat left and the other one is done first: not the caller's mistake. */
static int take_the_seat(void *context, uint64_t done, uint64_t all) {
    struct serving *fixture = context;
    struct session *other = NULL;
    const struct session_settings settings = {
        .name = "other", .policy = fixture->settings.policy, .sampler = fixture->settings.sampler};
    (void)done, (void)all;
    if (session_find(service_engine(fixture->service), "other") == NULL)
        assert_int_equal(
            session_create(service_engine(fixture->service), &settings, &other, &fixture->diag),
            KV_OK);
    return 1;
}

static uint64_t count_receipt(void *context, const struct receipt *receipt) {
    (void)receipt;
    return ++*(uint64_t *)context;
}

static void a_seat_taken_during_a_wake_is_waited_for(void **state) {
    struct serving *fixture = *state;
    const struct restore_options options = {.progress = take_the_seat, .progress_context = fixture};
    struct session *session = NULL;
    struct receipt receipt;
    uint64_t kept = 0;
    sleep_long(fixture, "a");
    service_close(fixture->service);
    fixture->settings.sessions_max = 1;
    open_service(fixture);
    service_on_receipt(fixture->service, count_receipt, &kept);
    assert_int_equal(
        service_wake(fixture->service, "a", &options, &session, &receipt, &fixture->diag),
        KV_ERR_NO_SLOTS);
    assert_non_null(strstr(fixture->diag.text, "1 sessions are resident"));
    assert_int_equal(kept, 0);
    session_drop(session_find(service_engine(fixture->service), "other"));
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_OK);
    assert_int_equal(kept, 1);
}

static void a_session_kept_in_memory_wakes_without_the_disk(void **state) {
    struct serving *fixture = *state;
    struct store_read_stats stats;
    struct session *session = NULL;
    struct receipt receipt;
    service_close(fixture->service);
    fixture->settings.ram_bytes = 8 << 20;
    open_service(fixture);
    sleep_long(fixture, "a");
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_OK);
    assert_int_equal(receipt.door_bytes, 0);
    assert_true(receipt.ram_bytes > 0);
    service_close(fixture->service);
    open_service(fixture);
    assert_int_equal(service_prefetch(fixture->service, "a", &stats, &fixture->diag), KV_OK);
    assert_true(stats.read_bytes > 0);
    assert_int_equal(service_wake(fixture->service, "a", NULL, &session, &receipt, &fixture->diag),
                     KV_OK);
    assert_int_equal(receipt.door_bytes, 0);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, set_up, serving_tear_down)

/* --- commands in a daemon */

struct hosted {
    struct config config;
    struct cmd_host host;
    struct cmd cmd;
    char changed[64];
};

static void on_hosted_change(void *context, const char *name) {
    struct hosted *hosted = context;
    snprintf(hosted->changed, sizeof hosted->changed, "%s", name);
}

static void hosted_begin(struct serving *fixture, struct hosted *hosted, const char *name) {
    struct service *service = NULL;
    memset(hosted, 0, sizeof *hosted);
    hosted->config.words[0] = "snapshot";
    hosted->host = (struct cmd_host){.service = fixture->service,
                                     .config = &hosted->config,
                                     .changed = on_hosted_change,
                                     .context = hosted};
    hosted->cmd = (struct cmd){.config = &hosted->config,
                               .host = &hosted->host,
                               .alloc = kv_alloc_system(),
                               .clock = kv_clock_system(),
                               .session_name = name,
                               .signals = -1};
    assert_int_equal(cmd_host_open_service(&hosted->cmd, &service, &fixture->diag), KV_OK);
    assert_int_equal(cmd_host_take_session(&hosted->cmd, &fixture->diag), KV_OK);
}

static void a_command_drops_only_what_it_did_itself(void **state) {
    struct serving *fixture = *state;
    static struct hosted hosted;
    struct engine *engine = service_engine(fixture->service);
    feed_document(fixture, session_of(fixture, "a", 1, SERVICE_NEW), 300);
    hosted_begin(fixture, &hosted, "a");
    cmd_host_close(&hosted.cmd);
    assert_non_null(session_find(engine, "a"));
    /* Its own turn is complete and cannot be saved either. */
    hosted_begin(fixture, &hosted, "a");
    feed_document(fixture, session_find(engine, "a"), 400);
    hosted.cmd.whole = 1;
    cmd_host_close(&hosted.cmd);
    assert_non_null(session_find(engine, "a"));
    hosted_begin(fixture, &hosted, "a");
    feed_document(fixture, session_find(engine, "a"), 500);
    cmd_host_close(&hosted.cmd);
    assert_null(session_find(engine, "a"));
    hosted_begin(fixture, &hosted, "b");
    feed_document(fixture, session_of(fixture, "b", 1, SERVICE_NEW), 300);
    cmd_host_close(&hosted.cmd);
    assert_null(session_find(engine, "b"));
}

static void what_a_command_makes_is_its_own_until_it_is_told(void **state) {
    struct serving *fixture = *state;
    static struct hosted hosted;
    const struct service_patience none = {.deadline_ns = 0};
    struct service_lease lease = {.name = ""};
    hosted_begin(fixture, &hosted, "a");
    assert_int_equal(cmd_make(&hosted.cmd, "a", &fixture->diag), KV_OK);
    assert_int_equal(cmd_make(&hosted.cmd, "b", &fixture->diag), KV_OK);
    assert_int_equal(service_lease(fixture->service, "b", &none, &lease, &fixture->diag),
                     KV_ERR_BUSY);
    cmd_made(&hosted.cmd, "b");
    assert_string_equal(hosted.changed, "b");
    assert_int_equal(service_lease(fixture->service, "b", &none, &lease, &fixture->diag), KV_OK);
    service_lease_end(fixture->service, &lease);
    cmd_host_close(&hosted.cmd);
}

struct branching {
    struct service *service;
    struct session *session;
    uint64_t n;
    sem_t entered, left;
    enum kv_err err;
    struct kv_diag diag;
};

static void *branch_main(void *context) {
    struct branching *branching = context;
    service_enter(branching->service);
    sem_post(&branching->entered);
    branching->err = snapshot_branch(service_snapshot(branching->service), branching->session,
                                     branching->n, &branching->diag);
    service_leave(branching->service);
    sem_post(&branching->left);
    return NULL;
}

/* 1 when the other one has written although the writer was only lent, between two pieces. */
static int lend_until_left(struct branching *branching) {
    enum { TRIES = 200 };
    int left = 0;
    for (int i = 0; i < TRIES && !left; i++) {
        struct timespec until;
        (void)snapshot_writer_lend(service_snapshot(branching->service));
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        left = sem_timedwait(&branching->left, &until) == 0;
    }
    return left;
}

/* While somebody else writes to the store, who waits to write keeps nobody from the engine, and
 * goes between two pieces of a long work. BREAK_WRITER_LEND makes it wait for the last one. */
static void waiting_for_the_writer_holds_nobody_up(void **state) {
    enum { SECONDS_MAX = 60 };
    struct serving *fixture = *state;
    struct branching branching = {.service = fixture->service};
    const struct restore_options wake = {.as = "b"};
    struct session_info info;
    struct receipt receipt;
    pthread_t thread;
    say(fixture, session_of(fixture, "a", 1, SERVICE_NEW), "hello there", 8, NULL);
    assert_int_equal(service_sleep(fixture->service,
                                   session_find(service_engine(fixture->service), "a"), &receipt,
                                   &fixture->diag),
                     KV_OK);
    assert_int_equal(
        service_wake(fixture->service, "a", &wake, &branching.session, &receipt, &fixture->diag),
        KV_OK);
    session_info(branching.session, &info);
    branching.n = info.n;
    assert_int_equal(service_share(fixture->service, &fixture->diag), KV_OK);
    sem_init(&branching.entered, 0, 0);
    sem_init(&branching.left, 0, 0);
    snapshot_writer_take(service_snapshot(fixture->service));
    assert_int_equal(pthread_create(&thread, NULL, branch_main, &branching), 0);
    sem_wait(&branching.entered);
    alarm(SECONDS_MAX);
    service_enter(fixture->service);
    alarm(0);
    service_leave(fixture->service);
    int written = lend_until_left(&branching);
    snapshot_writer_give(service_snapshot(fixture->service));
    pthread_join(thread, NULL);
    service_unshare(fixture->service);
    sem_destroy(&branching.entered);
    sem_destroy(&branching.left);
    assert_true(written);
    if (branching.err != KV_OK)
        fail_msg("branch: %s", branching.diag.text);
}

TESTING_MAIN(TEST(a_name_is_found_wherever_it_is), TEST(names_belong_to_an_owner),
             TEST(room_is_made_by_the_least_recently_used),
             TEST(too_much_room_is_refused_with_need_and_have),
             TEST(turns_are_closed_however_they_ended), TEST(half_a_message_is_taken_back),
             TEST(a_document_is_cut_to_its_length), TEST(sleep_does_not_change_an_answer),
             TEST(one_without_tokens_sleeps_without_a_trace),
             TEST(a_save_that_fails_leaves_the_session_whole),
             TEST(reading_only_wakes_but_never_writes), TEST(an_eager_turn_is_told_of_twice),
             TEST(too_few_slots_are_enough_for_the_floor),
             TEST(a_seat_taken_during_a_wake_is_waited_for),
             TEST(a_session_kept_in_memory_wakes_without_the_disk),
             TEST(a_command_drops_only_what_it_did_itself),
             TEST(what_a_command_makes_is_its_own_until_it_is_told),
             TEST(waiting_for_the_writer_holds_nobody_up))
