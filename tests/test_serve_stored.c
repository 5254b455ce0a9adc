/* tests/test_serve_stored.c - sessions that are asleep in the picture, and the text of tokens.
 *
 * Responsible for: serve_stored.c over a real service: who owns what, tiers as when awake, nobody
 * twice, bytes of tokens.
 * Not responsible for: JSON of it (test_http.c).
 *
 * Fails with BREAK_ASLEEP_TWICE (who is awake is listed as asleep, too).
 */
#include "tools/serve.h"

#include "tests/support_serve.h"
#include "tests/testing.h"
#include "tools/serve_inner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Long enough for a sealed block. */
static void talk(struct serving *serving, const char *session, uint8_t owner) {
    static char text[1500];
    struct serving_chat chat = {.count = 1};
    struct serve_answer answer;
    memset(text, 'a', sizeof text - 1);
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = (char)(i % 5 == 0 ? ' ' : 'a' + (i * 7) % 26);
    chat.texts[0] = text;
    struct serve_request request = serving_request(&chat, session, 4);
    request.owner[0] = owner;
    if (serve_turn(serving->serve, &request, &answer, &serving->diag) != KV_OK)
        fail_msg("%s", serving->diag.text);
    serve_answer_release(serving->serve, &answer);
}

static void to_sleep(struct serving *serving, const char *name) {
    struct service *service = serving->serve->service;
    struct receipt receipt;
    service_enter(service);
    struct session *session = session_find(service_engine(service), name);
    assert_non_null(session);
    assert_int_equal(service_sleep(service, session, &receipt, &serving->diag), KV_OK);
    service_leave(service);
}

static const struct serve_session *named(const struct serve_picture *picture, const char *name) {
    const struct serve_session *found = NULL;
    for (uint32_t i = 0; i < picture->session_count; i++) {
        if (strcmp(picture->sessions[i].name, name) != 0)
            continue;
        assert_null(found);
        found = &picture->sessions[i];
    }
    assert_non_null(found);
    return found;
}

/* BREAK_ASLEEP_TWICE. */
static void who_sleeps_is_in_the_picture(void **state) {
    struct serving *serving = *state;
    struct serve_picture before, after;
    serving_open(serving);
    talk(serving, "one", 1);
    talk(serving, "two", 2);
    talk(serving, "three", 1);
    assert_int_equal(serve_picture(serving->serve, &before, NULL), KV_OK);
    assert_int_equal(before.session_count, 3);
    to_sleep(serving, "two");
    to_sleep(serving, "three");
    assert_int_equal(serve_picture(serving->serve, &after, NULL), KV_OK);
    assert_int_equal(after.session_count, 1);
    assert_true(after.receipt_count >= 3);
    for (uint32_t i = 0; i < after.receipt_count; i++)
        assert_int_equal(after.receipt_owners[i][0],
                         strcmp(after.receipts[i].name, "two") == 0 ? 2 : 1);
    assert_int_equal(serve_picture_stored(serving->serve, &after, 1, &serving->diag), KV_OK);
    assert_int_equal(after.session_count, 3);
    assert_int_equal(after.asleep_more, 0);
    const struct serve_session *one = named(&after, "one"), *two = named(&after, "two");
    assert_int_equal(one->owner[0], 1);
    assert_int_equal(one->state, SESSION_IDLE);
    assert_int_equal(two->owner[0], 2);
    assert_int_equal(two->state, SESSION_SLEEPING);
    assert_int_equal(two->slots, 0);
    /* The one used last is first among them, and all is as when it was awake. */
    assert_string_equal(after.sessions[1].name, "three");
    const struct serve_session *was = named(&before, "two");
    assert_true(was->blocks > 0);
    assert_int_equal(two->n, was->n);
    assert_int_equal(two->blocks, was->blocks);
    assert_memory_equal(two->tier_blocks, was->tier_blocks, sizeof was->tier_blocks);
    serve_picture_release(serving->serve, &before);
    serve_picture_release(serving->serve, &after);
    serving_close(serving);
}

static void tokens_have_bytes(void **state) {
    struct serving *serving = *state;
    char text[8];
    uint32_t longest = 0, some = 0;
    serving_open(serving);
    for (uint32_t token = 0; token < 256; token++) {
        size_t bytes = serve_token_bytes(serving->serve, token, text, sizeof text);
        assert_true(bytes <= sizeof text);
        some += bytes > 0;
        if (bytes > serve_token_bytes(serving->serve, longest, text, sizeof text))
            longest = token;
    }
    assert_true(some > 100);
    assert_int_equal(serve_token_bytes(serving->serve, UINT32_MAX, text, sizeof text), 0);
    assert_int_equal(serve_token_bytes(serving->serve, longest, text, 1), 1);
    serving_close(serving);
}

#define SERVED(test) cmocka_unit_test_setup_teardown(test, serving_set_up, serving_tear_down)

TESTING_MAIN(SERVED(who_sleeps_is_in_the_picture), SERVED(tokens_have_bytes))
