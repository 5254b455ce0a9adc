/* tests/test_serve.c - many threads, one engine: answers, limits, sleep, the end.
 *
 * Responsible for: the contract of tools/serve.h: answers of concurrent requests are those of the
 * same requests alone, whoever sleeps meanwhile; leases, queue, deadline, cancel, stop.
 * Not responsible for: HTTP, the daemon as a process (test_daemon.c).
 * Broken twins: BREAK_LEASE; BREAK_CHANGE_UNSEEN (a_session_that_nobody_uses_goes_to_sleep).
 */
#include "tools/serve.h"

#include "engine/model/template.h"
#include "store/store_ram.h"
#include "tests/support_faulty_io.h"
#include "tests/support_serve.h"
#include "tests/testing.h"
#include "tools/service_inner.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHATS = 8, TURNS = 3, TEXT = 256 };

struct chatter {
    struct serving *serving;
    int index;
    char asks[TURNS][TEXT], answers[TURNS][4096];
    enum kv_err err;
    struct kv_diag diag;
    uint64_t prefilled[TURNS], prompt[TURNS], reused[TURNS];
};

static void turn_of(struct chatter *chatter, int turn) {
    struct serving_chat chat = {.count = 2 * (size_t)turn + 1};
    struct serve_answer answer;
    char session[32];
    for (int i = 0; i <= turn; i++) {
        chat.texts[2 * i] = chatter->asks[i];
        if (i < turn)
            chat.texts[2 * i + 1] = chatter->answers[i];
    }
    snprintf(session, sizeof session, "chat-%d", chatter->index);
    const struct serve_request request =
        serving_request(&chat, session, 10 + 3 * (uint32_t)chatter->index);
    chatter->err = serve_turn(chatter->serving->serve, &request, &answer, &chatter->diag);
    if (chatter->err == KV_OK) {
        snprintf(chatter->answers[turn], sizeof chatter->answers[turn], "%s", answer.text);
        chatter->prefilled[turn] = answer.tokens_prefilled;
        chatter->prompt[turn] = answer.tokens_prompt;
        chatter->reused[turn] = answer.tokens_reused;
    }
    serve_answer_release(chatter->serving->serve, &answer);
}

static void *chat_main(void *context) {
    struct chatter *chatter = context;
    for (int turn = 0; turn < TURNS && chatter->err == KV_OK; turn++)
        turn_of(chatter, turn);
    return NULL;
}

static struct chatter *make_chatters(struct serving *serving) {
    struct chatter *chatters = calloc(CHATS, sizeof *chatters);
    for (int i = 0; i < CHATS; i++) {
        chatters[i].serving = serving;
        chatters[i].index = i;
        for (int turn = 0; turn < TURNS; turn++)
            snprintf(chatters[i].asks[turn], TEXT, "chat %d says %d things about %s and %d", i,
                     turn * 7 + 1, i % 2 == 0 ? "rivers" : "the long winter in the north",
                     i * 131 + turn);
    }
    return chatters;
}

static void all_at_once(struct chatter *chatters) {
    pthread_t threads[CHATS];
    for (int i = 0; i < CHATS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, chat_main, &chatters[i]), 0);
    for (int i = 0; i < CHATS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < CHATS; i++)
        if (chatters[i].err != KV_OK)
            fail_msg("chat %d: %s", i, chatters[i].diag.text);
}

static void one_by_one(struct chatter *chatters) {
    for (int i = 0; i < CHATS; i++) {
        chat_main(&chatters[i]);
        if (chatters[i].err != KV_OK)
            fail_msg("chat %d: %s", i, chatters[i].diag.text);
    }
}

static void compare(const struct chatter *together, const struct chatter *alone) {
    for (int i = 0; i < CHATS; i++)
        for (int turn = 0; turn < TURNS; turn++) {
            assert_string_equal(together[i].answers[turn], alone[i].answers[turn]);
            assert_true(together[i].answers[turn][0] != 0);
        }
}

static void other_store(struct serving *serving) {
    serving_close(serving);
    serving->store[strlen(serving->store) - 1] = '2';
    serving_open(serving);
}

/* In two stores, so that every session is made anew. */
static void answers_do_not_depend_on_neighbours(void **state) {
    struct serving *serving = *state;
    serving_open(serving);
    struct chatter *together = make_chatters(serving), *alone = make_chatters(serving);
    all_at_once(together);
    other_store(serving);
    one_by_one(alone);
    compare(together, alone);
    /* Only what is new was prefilled, and nothing was lost between turns. */
    for (int i = 0; i < CHATS; i++)
        for (int turn = 1; turn < TURNS; turn++)
            assert_true(together[i].reused[turn] > together[i].prompt[turn - 1]);
    free(together);
    free(alone);
}

/* Fewer slots than the sessions want together: they sleep and wake beside those that answer. */
static void sessions_sleep_and_wake_beside_others(void **state) {
    struct serving *serving = *state;
    struct serve_picture picture;
    serving->settings.slot_budget_bytes = 5 << 19;
    serving->settings.ram_bytes = 1 << 20; /* for some of them: the others read the disk */
    serving_open(serving);
    struct chatter *together = make_chatters(serving), *alone = make_chatters(serving);
    all_at_once(together);
    assert_int_equal(serve_picture(serving->serve, &picture, &serving->diag), KV_OK);
    assert_true(picture.session_count < CHATS);
    assert_true(picture.totals.wakes > 0);
    assert_true(picture.totals.sleeps > 0);
    assert_int_equal(picture.totals.wakes_refused, 0);
    assert_int_equal(picture.totals.fingerprints_different, 0);
    assert_int_equal(picture.totals.requests, CHATS * TURNS);
    assert_int_equal(picture.totals.failed + picture.totals.refused, 0);
    assert_int_equal(picture.requests_now, 0);
    assert_int_equal(picture.receipt_count, SERVE_RECEIPTS);
    serve_picture_release(serving->serve, &picture);
    struct store_ram_stats kept;
    store_ram_stats(service_store(serving->service), &kept);
    assert_true(kept.extents > 0);
    assert_true(kept.bytes_peak <= kept.bytes_max);
    serving->settings.slot_budget_bytes = 16 << 20;
    other_store(serving);
    one_by_one(alone);
    compare(together, alone);
    free(together);
    free(alone);
}

/* --- one request at a time in a session */

struct asker {
    struct serving *serving;
    char text[64];
    enum kv_err err;
    struct kv_diag diag;
};

static void *ask_main(void *context) {
    struct asker *asker = context;
    struct serving_chat chat = {.texts = {asker->text}, .count = 1};
    struct serve_answer answer;
    const struct serve_request request = serving_request(&chat, "shared", 40);
    for (int i = 0; i < 4 && asker->err == KV_OK; i++) {
        asker->err = serve_turn(asker->serving->serve, &request, &answer, &asker->diag);
        serve_answer_release(asker->serving->serve, &answer);
    }
    return NULL;
}

static void requests_for_one_session_stand_in_line(void **state) {
    struct serving *serving = *state;
    struct asker askers[4];
    pthread_t threads[4];
    serving_open(serving);
    memset(askers, 0, sizeof askers);
    for (int i = 0; i < 4; i++) {
        askers[i].serving = serving;
        snprintf(askers[i].text, sizeof askers[i].text, "asker %d wants to know %d", i, i * 77);
        assert_int_equal(pthread_create(&threads[i], NULL, ask_main, &askers[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++)
        if (askers[i].err != KV_OK)
            fail_msg("asker %d: %s", i, askers[i].diag.text);
}

/* --- limits */

/* Holds the request at its first token until it is let go. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int there, open;
    atomic_int cancel;
};

static int hold(void *context, const struct serve_piece *piece) {
    struct gate *gate = context;
    (void)piece;
    pthread_mutex_lock(&gate->lock);
    gate->there = 1;
    pthread_cond_broadcast(&gate->moved);
    while (!gate->open)
        pthread_cond_wait(&gate->moved, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
    return 1;
}

static int is_cancelled(void *context) {
    return atomic_load(&((struct gate *)context)->cancel);
}

static void set_gate(struct gate *gate, int open) {
    pthread_mutex_lock(&gate->lock);
    gate->open = open;
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->lock);
}

static void await_gate(struct gate *gate) {
    pthread_mutex_lock(&gate->lock);
    while (!gate->there)
        pthread_cond_wait(&gate->moved, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

struct held {
    struct serving *serving;
    struct gate *gate;
    const char *session;
    uint32_t tokens_max;
    enum kv_err err;
    struct kv_diag diag;
    struct serve_answer answer;
};

static void *held_main(void *context) {
    struct held *held = context;
    struct serving_chat chat = {.texts = {"tell me a long story"}, .count = 1};
    struct serve_request request = serving_request(&chat, held->session, held->tokens_max);
    request.piece = hold;
    request.cancelled = is_cancelled;
    request.context = held->gate;
    held->err = serve_turn(held->serving->serve, &request, &held->answer, &held->diag);
    return NULL;
}

static enum kv_err ask_once(struct serving *serving, const char *session, uint64_t wait_ns,
                            struct serve_answer *answer) {
    struct serving_chat chat = {.texts = {"tell me a long story"}, .count = 1};
    struct serve_request request = serving_request(&chat, session, 8);
    if (wait_ns != UINT64_MAX)
        request.deadline_ns = kv_clock_now_ns(kv_clock_system()) + wait_ns;
    return serve_turn(serving->serve, &request, answer, &serving->diag);
}

/* A client that does not read holds up nobody but those behind it. */
static void queue_and_line_are_bounded(void **state) {
    struct serving *serving = *state;
    struct gate gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
    struct held held = {.serving = serving, .gate = &gate, .session = "a", .tokens_max = 20};
    struct serve_answer answer;
    pthread_t thread;
    serving->serve_settings.requests_max = 2;
    serving->serve_settings.wait_ns = 200000000;
    serving_open(serving);
    assert_int_equal(pthread_create(&thread, NULL, held_main, &held), 0);
    await_gate(&gate);
    /* Another session is answered meanwhile. */
    assert_int_equal(ask_once(serving, "b", UINT64_MAX, &answer), KV_OK);
    serve_answer_release(serving->serve, &answer);
    /* The same one is at work too long. */
    assert_int_equal(ask_once(serving, "a", UINT64_MAX, &answer), KV_ERR_BUSY);
    assert_non_null(strstr(serving->diag.text, "session a"));
    assert_true(answer.retry_after_seconds > 0);
    serve_answer_release(serving->serve, &answer);
    /* Two at work are all that may be. */
    struct gate second_gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
    struct held second = {
        .serving = serving, .gate = &second_gate, .session = "c", .tokens_max = 9};
    pthread_t second_thread;
    assert_int_equal(pthread_create(&second_thread, NULL, held_main, &second), 0);
    await_gate(&second_gate);
    assert_int_equal(ask_once(serving, "d", UINT64_MAX, &answer), KV_ERR_BUSY);
    assert_non_null(strstr(serving->diag.text, "2 requests"));
    serve_answer_release(serving->serve, &answer);
    set_gate(&gate, 1);
    set_gate(&second_gate, 1);
    pthread_join(thread, NULL);
    pthread_join(second_thread, NULL);
    assert_int_equal(held.err, KV_OK);
    assert_int_equal(second.err, KV_OK);
    serve_answer_release(serving->serve, &held.answer);
    serve_answer_release(serving->serve, &second.answer);
    assert_int_equal(ask_once(serving, "d", UINT64_MAX, &answer), KV_OK);
    serve_answer_release(serving->serve, &answer);
}

/* What was made until then is saved, and the session goes on. */
static void deadline_and_a_client_that_left_end_an_answer(void **state) {
    struct serving *serving = *state;
    struct gate gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
    struct held held = {.serving = serving, .gate = &gate, .session = "a", .tokens_max = 8000};
    struct serve_answer answer;
    pthread_t thread;
    serving_open(serving);
    assert_int_equal(pthread_create(&thread, NULL, held_main, &held), 0);
    await_gate(&gate);
    atomic_store(&gate.cancel, 1);
    set_gate(&gate, 1);
    pthread_join(thread, NULL);
    assert_int_equal(held.err, KV_OK);
    assert_int_equal(held.answer.finish, SERVE_CANCELLED);
    assert_in_range(held.answer.tokens_completion, 1, 7999);
    serve_answer_release(serving->serve, &held.answer);
    struct serving_chat chat = {.texts = {"count for ever"}, .count = 1};
    struct serve_request request = serving_request(&chat, "b", 8000);
    request.deadline_ns = kv_clock_now_ns(kv_clock_system()) + 100000000;
    assert_int_equal(serve_turn(serving->serve, &request, &answer, &serving->diag), KV_OK);
    assert_int_equal(answer.finish, SERVE_DEADLINE);
    assert_in_range(answer.tokens_completion, 1, 7999);
    serve_answer_release(serving->serve, &answer);
    serving_close(serving);
    serving_open(serving);
    assert_int_equal(ask_once(serving, "a", UINT64_MAX, &answer), KV_OK);
    assert_int_equal(answer.found, SERVE_DISK);
    serve_answer_release(serving->serve, &answer);
}

static int refuse_second(void *context, const struct serve_piece *piece) {
    int *calls = context;
    (void)piece;
    return ++*calls != 2;
}

/* Text that a stop could still need is held back then: it must not be offered afterwards. */
static void a_piece_that_was_refused_is_the_last(void **state) {
    struct serving *serving = *state;
    struct serving_chat chat = {.texts = {"tell me a long story"}, .count = 1};
    struct serve_request request = serving_request(&chat, "refused", 60);
    static const char *const stops[] = {"a text of many letters that is never said"};
    struct serve_answer answer;
    int calls = 0;
    request.piece = refuse_second;
    request.context = &calls;
    request.stops = stops;
    request.stop_count = 1;
    serving_open(serving);
    assert_int_equal(serve_turn(serving->serve, &request, &answer, &serving->diag), KV_OK);
    assert_int_equal(answer.finish, SERVE_CANCELLED);
    assert_int_equal(calls, 2);
    serve_answer_release(serving->serve, &answer);
}

/* --- what one client learns of another */

static void room_that_is_missing_names_nobody(void **state) {
    struct serving *serving = *state;
    struct serve_answer answer;
    serving_open(serving);
    snprintf(serving->service->note, sizeof serving->service->note, "session theirs: full");
    service_enter(serving->service);
    assert_int_equal(service_make_room(serving->service, 1000000, NULL, &serving->diag),
                     KV_ERR_NO_SLOTS);
    service_leave(serving->service);
    assert_non_null(strstr(serving->diag.text, "1000000 slots are needed"));
    assert_null(strstr(serving->diag.text, "theirs"));
    /* Whoever sleeps takes the note along: what it told of is over. */
    assert_string_not_equal(service_note(serving->service), "");
    assert_int_equal(ask_once(serving, "mine", UINT64_MAX, &answer), KV_OK);
    serve_answer_release(serving->serve, &answer);
    service_enter(serving->service);
    assert_int_equal(service_make_room(serving->service, 1000000, NULL, &serving->diag),
                     KV_ERR_NO_SLOTS);
    assert_string_equal(service_note(serving->service), "");
    service_leave(serving->service);
}

/* --- stop texts, log-probabilities */

struct seen {
    char text[8192];
    size_t used;
    uint64_t tokens;
    int wrong;
};

static int see(void *context, const struct serve_piece *piece) {
    struct seen *seen = context;
    memcpy(seen->text + seen->used, piece->text, piece->text_bytes);
    seen->used += piece->text_bytes;
    seen->text[seen->used] = 0;
    seen->tokens += piece->has_token != 0;
    if (piece->has_token && piece->top_count == 3)
        seen->wrong |= piece->logprob > 0 || piece->top[0].token != piece->token ||
                       piece->top[0].logprob != piece->logprob ||
                       piece->top[1].logprob > piece->top[0].logprob;
    else
        seen->wrong |= piece->has_token;
    return 1;
}

static void stops_cut_and_pieces_add_up(void **state) {
    struct serving *serving = *state;
    struct serving_chat chat = {.texts = {"say something long"}, .count = 1};
    struct serve_request request = serving_request(&chat, "whole", 120);
    struct serve_answer whole, cut;
    static struct seen seen;
    char stop[8];
    const char *const stops[] = {"never said at all", stop};
    serving_open(serving);
    memset(&seen, 0, sizeof seen);
    request.piece = see;
    request.context = &seen;
    request.logprobs = 1;
    request.top_logprobs = 3;
    assert_int_equal(serve_turn(serving->serve, &request, &whole, &serving->diag), KV_OK);
    assert_int_equal(seen.wrong, 0);
    assert_string_equal(seen.text, whole.text);
    assert_true(seen.tokens > 0 && seen.tokens <= whole.tokens_completion);
    assert_true(whole.text_bytes > 40);
    /* Three bytes in the middle, at the beginning of a character. */
    size_t at = whole.text_bytes / 2;
    while (((unsigned char)whole.text[at] & 0xc0) == 0x80)
        at++;
    snprintf(stop, sizeof stop, "%.3s", whole.text + at);
    size_t first = (size_t)(strstr(whole.text, stop) - whole.text);
    memset(&seen, 0, sizeof seen);
    request.session = "cut";
    request.stops = stops;
    request.stop_count = 2;
    assert_int_equal(serve_turn(serving->serve, &request, &cut, &serving->diag), KV_OK);
    assert_int_equal(cut.finish, SERVE_STOP);
    assert_int_equal(cut.text_bytes, first);
    assert_memory_equal(cut.text, whole.text, first);
    assert_string_equal(seen.text, cut.text);
    serve_answer_release(serving->serve, &whole);
    serve_answer_release(serving->serve, &cut);
    request.top_logprobs = SERVE_LOGPROBS_MAX + 1;
    assert_int_equal(serve_turn(serving->serve, &request, &cut, &serving->diag), KV_ERR_INVALID);
    serve_answer_release(serving->serve, &cut);
}

/* --- the end */

static void stopping_saves_what_was_acknowledged(void **state) {
    struct serving *serving = *state;
    struct gate gates[3];
    struct held held[3];
    struct serve_answer answer;
    pthread_t threads[3];
    static const char *const names[] = {"a", "b", "c"};
    serving_open(serving);
    for (int i = 0; i < 3; i++) {
        gates[i] = (struct gate){PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
        held[i] = (struct held){
            .serving = serving, .gate = &gates[i], .session = names[i], .tokens_max = 8000};
        assert_int_equal(pthread_create(&threads[i], NULL, held_main, &held[i]), 0);
    }
    for (int i = 0; i < 3; i++)
        await_gate(&gates[i]);
    for (int i = 0; i < 3; i++)
        set_gate(&gates[i], 1);
    assert_int_equal(serve_stop(serving->serve, 0, &serving->diag), KV_OK);
    assert_int_equal(serve_is_ready(serving->serve), 0);
    assert_int_equal(ask_once(serving, "d", UINT64_MAX, &answer), KV_ERR_CANCELLED);
    serve_answer_release(serving->serve, &answer);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(held[i].err, KV_OK);
        assert_int_equal(held[i].answer.finish, SERVE_CANCELLED);
    }
    serving_close(serving);
    serving_open(serving);
    for (int i = 0; i < 3; i++) {
        struct snapshot_entry entry;
        assert_int_equal(snapshot_find(service_store(serving->service), kv_alloc_system(), names[i],
                                       &entry, &serving->diag),
                         KV_OK);
        /* Tokens that the client has not seen may be taken back. */
        assert_in_range(entry.head.n, held[i].answer.tokens_prompt,
                        held[i].answer.tokens_prompt + held[i].answer.tokens_completion);
        serve_answer_release(serving->serve, &held[i].answer);
    }
}

/* --- a full store */

static void a_full_store_is_named_and_takes_again(void **state) {
    struct serving *serving = *state;
    struct serve_answer answer;
    enum kv_err err = KV_OK;
    int count = 0;
    serving->settings.store_bytes_max = 5 << 20;
    serving_open(serving);
    for (; err == KV_OK && count < 100; count++) {
        char name[16];
        snprintf(name, sizeof name, "f%d", count);
        err = ask_once(serving, name, UINT64_MAX, &answer);
        assert_true(err != KV_OK || answer.text[0] != 0);
        serve_answer_release(serving->serve, &answer);
    }
    assert_int_equal(err, KV_ERR_NO_SPACE);
    assert_non_null(strstr(serving->diag.text, "store-max"));
    assert_in_range(count, 2, 99);
    serving_close(serving);
    serving->settings.store_bytes_max = 50 << 20;
    serving_open(serving);
    assert_int_equal(ask_once(serving, "f0", UINT64_MAX, &answer), KV_OK);
    assert_int_equal(answer.found, SERVE_DISK);
    serve_answer_release(serving->serve, &answer);
}

/* --- a disk that takes nothing for a while */

static uint32_t awake(struct serving *serving) {
    struct serve_picture picture;
    assert_int_equal(serve_picture(serving->serve, &picture, &serving->diag), KV_OK);
    uint32_t count = picture.session_count;
    serve_picture_release(serving->serve, &picture);
    return count;
}

static enum kv_err say(struct serving *serving, const char *first, const char *then,
                       struct serve_answer *answer) {
    struct serving_chat chat = {.texts = {first, then, "and then?"}, .count = then ? 3 : 1};
    const struct serve_request request = serving_request(&chat, NULL, 8);
    return serve_turn(serving->serve, &request, answer, &serving->diag);
}

static void an_answer_that_was_not_saved_is_had_again(void **state) {
    static const struct faulty_io_plan full = {
        .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_WRITE, .at = 1, .error = ENOSPC, .lasting = 1};
    struct serving *serving = *state;
    struct faulty_io *faulty = faulty_io_make(io_best_door());
    struct serve_answer first, answer;
    serving->settings.door = faulty_io_door(faulty);
    serving_open(serving);
    assert_int_equal(say(serving, "tell me a story", NULL, &first), KV_OK);
    assert_int_equal(awake(serving), 1);
    faulty_io_arm(faulty, &full);
    /* The session goes on and cannot be saved, and nobody says that others change it. */
    for (int i = 0; i < 3; i++) {
        enum kv_err err = say(serving, "tell me a story", first.text, &answer);
        assert_true(err == KV_ERR_NO_SPACE || err == KV_ERR_IO);
        assert_string_equal(answer.session, first.session);
        serve_answer_release(serving->serve, &answer);
    }
    /* One that is new and has no name would never be found again. */
    for (int i = 0; i < 3; i++) {
        enum kv_err err = say(serving, "what is a kiln?", NULL, &answer);
        assert_true(err == KV_ERR_NO_SPACE || err == KV_ERR_IO);
        serve_answer_release(serving->serve, &answer);
        assert_int_equal(awake(serving), 1);
    }
    assert_true(faulty_io_counts(faulty).hits > 0);
    faulty_io_release(faulty);
    assert_int_equal(say(serving, "tell me a story", first.text, &answer), KV_OK);
    assert_true(answer.text[0] != 0);
    serve_answer_release(serving->serve, &answer);
    assert_int_equal(say(serving, "what is a kiln?", NULL, &answer), KV_OK);
    serve_answer_release(serving->serve, &answer);
    serve_answer_release(serving->serve, &first);
    serving_close(serving);
    faulty_io_drop(faulty);
}

/* --- the end, while idle sessions go to sleep */

enum { UNSAVED = 6, ENDS = 10 };

static void feed_unsaved(struct serving *serving, const char *name) {
    const struct service_lookup lookup = {.create = 1};
    const uint32_t ids[] = {5, 6, 7, 8, 9, 10, 11, 12};
    struct engine_event events[64];
    struct service_opened opened;
    struct session_info info;
    struct session *session = NULL;
    uint32_t count = 0;
    struct kv_diag *diag = &serving->diag;
    struct service *service = serving->service;
    assert_int_equal(service_session(service, name, &lookup, &session, &opened, diag), KV_OK);
    assert_int_equal(session_feed(session, ids, 8, IMAGE_RAW, diag), KV_OK);
    for (session_info(session, &info); info.n_kv < info.n; session_info(session, &info))
        assert_int_equal(engine_step(service_engine(service), events, &count, diag), KV_OK);
}

/* Without another request: the lease was the engine thread's last word on it. */
static void a_session_that_nobody_uses_goes_to_sleep(void **state) {
    struct serving *serving = *state;
    struct serving_chat chat = {.texts = {"rest now"}, .count = 1};
    const struct serve_request request = serving_request(&chat, "idle", 4);
    struct serve_answer answer;
    int awake = 1;
    serving->settings.idle_ns = 1;
    serving_open(serving);
    if (serve_turn(serving->serve, &request, &answer, &serving->diag) != KV_OK)
        fail_msg("serve_turn: %s", serving->diag.text);
    serve_answer_release(serving->serve, &answer);
    service_enter(serving->service);
    for (int i = 0; i < 100 && awake; i++) {
        service_await(serving->service, 50000000);
        awake = session_find(service_engine(serving->service), "idle") != NULL;
    }
    service_leave(serving->service);
    assert_false(awake);
    serving_close(serving);
}

static void stopping_saves_beside_sessions_that_go_to_sleep(void **state) {
    struct serving *serving = *state;
    const struct service_patience patience = {.deadline_ns = UINT64_MAX};
    serving->settings.idle_ns = 1;
    for (int end = 0; end < ENDS; end++) {
        struct service_lease leases[UNSAVED];
        serving_open(serving);
        service_enter(serving->service);
        for (int i = 0; i < UNSAVED; i++) {
            char name[16];
            snprintf(name, sizeof name, "u%d-%d", end, i);
            assert_int_equal(
                service_lease(serving->service, name, &patience, &leases[i], &serving->diag),
                KV_OK);
            feed_unsaved(serving, name);
        }
        for (int i = 0; i < UNSAVED; i++)
            service_lease_end(serving->service, &leases[i]);
        service_tend(serving->service); /* the first goes to sleep: its save is under way */
        service_leave(serving->service);
        assert_int_equal(serve_stop(serving->serve, 0, &serving->diag), KV_OK);
        for (int i = 0; i < UNSAVED; i++) {
            struct snapshot_entry entry;
            char name[16];
            snprintf(name, sizeof name, "u%d-%d", end, i);
            assert_int_equal(snapshot_find(service_store(serving->service), kv_alloc_system(), name,
                                           &entry, &serving->diag),
                             KV_OK);
            assert_int_equal(entry.head.n, 8);
        }
        serving_close(serving);
    }
}

/* What somebody holds is not saved behind their back, and the end says so. */
static void stopping_names_what_is_still_at_work(void **state) {
    struct serving *serving = *state;
    const struct service_patience patience = {.deadline_ns = UINT64_MAX};
    struct service_lease leases[4];
    static const char *const said[] = {
        "a command is still at work on session held-0:",
        "2 sessions stay as they were last saved: held-0, held-1; the first: a command",
        "3 sessions stay as they were last saved: held-0, held-1, xxx",
        "4 sessions stay as they were last saved: held-0, held-1, xxx"};
    serving_open(serving);
    for (int i = 0; i < 4; i++) {
        char name[IMAGE_NAME_BYTES_MAX + 1] = "";
        memset(name, i == 2 ? 'x' : 'y', i < 2 ? 0 : IMAGE_NAME_BYTES_MAX);
        if (i < 2)
            snprintf(name, sizeof name, "held-%d", i);
        service_enter(serving->service);
        assert_int_equal(
            service_lease(serving->service, name, &patience, &leases[i], &serving->diag), KV_OK);
        feed_unsaved(serving, name);
        service_leave(serving->service);
        assert_int_equal(serve_stop(serving->serve, 0, &serving->diag), KV_ERR_BUSY);
        assert_ptr_equal(strstr(serving->diag.text, said[i]), serving->diag.text);
    }
    assert_non_null(strstr(serving->diag.text, "xxx and 1 more; the first: a command is still"));
    service_enter(serving->service);
    for (int i = 0; i < 4; i++)
        service_lease_end(serving->service, &leases[i]);
    service_leave(serving->service);
    assert_int_equal(serve_stop(serving->serve, 0, &serving->diag), KV_OK);
}

/* --- the log */

struct logged {
    pthread_mutex_t lock;
    int lines, with_text;
};

static void on_log(void *context, const char *line) {
    struct logged *logged = context;
    pthread_mutex_lock(&logged->lock);
    logged->lines++;
    logged->with_text += strstr(line, "a long story") != NULL;
    pthread_mutex_unlock(&logged->lock);
}

/* Holds up whoever writes a receipt down, until it is let go. */
static void on_receipt_line(void *context, const char *line) {
    struct gate *gate = context;
    if (strstr(line, " receipt=") != NULL)
        (void)hold(gate, NULL);
}

/* A disk that does not answer must not keep a daemon from its end. */
static void waiting_for_receipts_has_an_end(void **state) {
    struct serving *serving = *state;
    struct gate gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
    struct receipt receipt;
    serving->serve_settings.log = on_receipt_line;
    serving->serve_settings.log_context = &gate;
    serving_open(serving);
    assert_true(serve_settle(serving->serve, 0));
    service_enter(serving->service);
    feed_unsaved(serving, "a");
    struct session *session = session_find(service_engine(serving->service), "a");
    assert_int_equal(service_save(serving->service, session, 0, &receipt, &serving->diag), KV_OK);
    service_leave(serving->service);
    await_gate(&gate);
    assert_false(serve_settle(serving->serve, 20000000));
    set_gate(&gate, 1);
    assert_true(serve_settle(serving->serve, UINT64_MAX));
}

static void text_is_logged_only_when_asked(void **state) {
    struct serving *serving = *state;
    static struct logged logged = {PTHREAD_MUTEX_INITIALIZER, 0, 0};
    struct serve_answer answer;
    serving->serve_settings.log = on_log;
    serving->serve_settings.log_context = &logged;
    for (int with = 0; with < 2; with++) {
        serving->serve_settings.log_text = with;
        logged.lines = logged.with_text = 0;
        serving_open(serving);
        assert_int_equal(ask_once(serving, "a", UINT64_MAX, &answer), KV_OK);
        serve_answer_release(serving->serve, &answer);
        serving_close(serving);
        assert_true(logged.lines >= 2); /* the turn and its save */
        assert_int_equal(logged.with_text, with);
    }
}

/* --- time */

struct skewed {
    uint64_t calls;
};

static uint64_t steady(void *context) {
    (void)context;
    return kv_clock_now_ns(kv_clock_system());
}

/* Every look at the wall finds it an hour earlier. */
static uint64_t backwards(void *context) {
    struct skewed *skewed = context;
    return (uint64_t)1700000000 * 1000000000 - 3600000000000 * skewed->calls++;
}

static void a_wall_clock_that_jumps_changes_nothing(void **state) {
    struct serving *serving = *state;
    struct skewed skewed = {0};
    const struct kv_clock clock = {steady, backwards, &skewed};
    struct serve_answer first, second;
    serving->settings.clock = &clock;
    serving_open(serving);
    assert_int_equal(ask_once(serving, NULL, UINT64_MAX, &first), KV_OK);
    struct serving_chat chat = {.texts = {"another thing"}, .count = 1};
    const struct serve_request request = serving_request(&chat, NULL, 8);
    assert_int_equal(serve_turn(serving->serve, &request, &second, &serving->diag), KV_OK);
    assert_string_not_equal(first.session, second.session);
    serve_answer_release(serving->serve, &first);
    serve_answer_release(serving->serve, &second);
    serving_close(serving);
}

#define SERVING(test) cmocka_unit_test_setup_teardown(test, serving_set_up, serving_tear_down)

TESTING_MAIN(SERVING(answers_do_not_depend_on_neighbours),
             SERVING(sessions_sleep_and_wake_beside_others),
             SERVING(requests_for_one_session_stand_in_line), SERVING(queue_and_line_are_bounded),
             SERVING(deadline_and_a_client_that_left_end_an_answer),
             SERVING(a_piece_that_was_refused_is_the_last),
             SERVING(room_that_is_missing_names_nobody), SERVING(stops_cut_and_pieces_add_up),
             SERVING(stopping_saves_what_was_acknowledged),
             SERVING(a_full_store_is_named_and_takes_again),
             SERVING(an_answer_that_was_not_saved_is_had_again),
             SERVING(a_session_that_nobody_uses_goes_to_sleep),
             SERVING(stopping_saves_beside_sessions_that_go_to_sleep),
             SERVING(stopping_names_what_is_still_at_work),
             SERVING(waiting_for_receipts_has_an_end), SERVING(text_is_logged_only_when_asked),
             SERVING(a_wall_clock_that_jumps_changes_nothing))
