/* tests/test_serve.c - many threads, one engine: answers, limits, sleep, the end.
 *
 * Responsible for: the contract of tools/serve.h: answers of concurrent requests are those of the
 * same requests alone, whoever sleeps meanwhile; leases, queue, deadline, cancel, stop.
 * Not responsible for: HTTP, the daemon as a process (test_daemon.c).
 * Broken twins: BREAK_LEASE.
 */
#include "tools/serve.h"

#include "engine/model/template.h"
#include "tests/support_serve.h"
#include "tests/testing.h"

#include <pthread.h>
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

/* In two stores, so that every session is made anew. */
static void answers_do_not_depend_on_neighbours(void **state) {
    struct serving *serving = *state;
    serving_open(serving);
    struct chatter *together = make_chatters(serving), *alone = make_chatters(serving);
    all_at_once(together);
    serving_close(serving);
    serving->store[strlen(serving->store) - 1] = '2';
    serving_open(serving);
    one_by_one(alone);
    for (int i = 0; i < CHATS; i++)
        for (int turn = 0; turn < TURNS; turn++) {
            assert_string_equal(together[i].answers[turn], alone[i].answers[turn]);
            assert_true(together[i].answers[turn][0] != 0);
            assert_int_equal(together[i].prefilled[turn] + together[i].reused[turn] >=
                                 together[i].prompt[turn],
                             1);
        }
    free(together);
    free(alone);
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(answers_do_not_depend_on_neighbours, serving_set_up,
                                             serving_tear_down))
