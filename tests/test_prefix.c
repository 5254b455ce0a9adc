/* tests/test_prefix.c - clients that name no session go on in the right one.
 *
 * Responsible for: tools/prefix.h through serve_turn over the tiny model, whose answers the
 * tokenizer would nearly never cut as they were generated: going on awake, asleep and after a
 * restart, edits, answers asked for again, earlier states, owners, texts that come back otherwise,
 * two at once.
 * Not responsible for: claims and boundaries (test_snap_prefix.c), what is a difference
 * (test_agree.c), HTTP.
 */
#include "tools/prefix.h"

#include "engine/model/tokenizer.h"
#include "engine/transfer.h"
#include "snapshot/snap_prefix.h"
#include "tests/support_serve.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"
#include "tools/serve_inner.h"
#include "tools/turn.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT = 16384 };

struct asked {
    char session[IMAGE_NAME_BYTES_MAX + 1], text[TEXT];
    struct serve_answer answer; /* without its text */
};

static enum kv_err try_ask(struct serving *serving, const uint8_t *owner, const char *session,
                           struct serving_chat *chat, struct asked *asked_out) {
    struct serve_request request = serving_request(chat, session, 24);
    struct serve_answer answer;
    struct kv_diag diag = {""};
    if (owner != NULL)
        memcpy(request.owner, owner, sizeof request.owner);
    enum kv_err err = serve_turn(serving->serve, &request, &answer, &diag);
    memset(asked_out, 0, sizeof *asked_out);
    if (err == KV_OK)
        snprintf(asked_out->text, TEXT, "%s", answer.text);
    else
        printf("refused: %s\n", diag.text);
    memcpy(asked_out->session, answer.session, sizeof answer.session);
    serve_answer_release(serving->serve, &answer);
    asked_out->answer = answer;
    return err;
}

static struct asked ask(struct serving *serving, const uint8_t *owner, struct serving_chat *chat) {
    struct asked asked;
    assert_int_equal(try_ask(serving, owner, NULL, chat, &asked), KV_OK);
    return asked;
}

static uint64_t stored_tokens(struct serving *serving, const char *name) {
    struct snapshot_entry entry;
    struct kv_diag diag = {""};
    if (snapshot_find(service_store(serving->service), kv_alloc_system(), name, &entry, &diag) !=
        KV_OK)
        fail_msg("%s", diag.text);
    return entry.head.n;
}

static void sleep_session(struct serving *serving, const char *name) {
    struct receipt receipt;
    struct kv_diag diag = {""};
    service_enter(serving->service);
    struct session *session = session_find(service_engine(serving->service), name);
    if (session != NULL && service_sleep(serving->service, session, &receipt, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    service_leave(serving->service);
}

enum between { AWAKE, ASLEEP, RESTARTED, BETWEENS };

static void pass_time(struct serving *serving, enum between between, const char *name) {
    if (between == ASLEEP)
        sleep_session(serving, name);
    if (between != RESTARTED)
        return;
    serving_close(serving);
    serving_open(serving);
}

static void long_text(char *text, size_t bytes, const char *word) {
    size_t at = 0;
    for (int i = 0; at + 32 < bytes; i++)
        at += (size_t)snprintf(text + at, bytes - at, "%s%d ", word, i * 37 % 101);
}

/* --- going on */

/* Three turns, short ones and ones over several blocks: the session of the first turn goes on, only
 * what is new is prefilled, and the answers are the same whatever happened in between. */
static void a_chat_goes_on(void **state) {
    struct serving *serving = *state;
    static char texts[3][TEXT], answers[BETWEENS][3][TEXT];
    for (size_t bytes = 30; bytes <= 3000; bytes *= 10) {
        for (int i = 0; i < 3; i++)
            long_text(texts[i], bytes + 32, i == 0 ? "river" : i == 1 ? "stone" : "bird");
        for (enum between between = AWAKE; between < BETWEENS; between++) {
            struct serving_chat chat = {.count = 1};
            char first[IMAGE_NAME_BYTES_MAX + 1] = "";
            serving->store[strlen(serving->store) - 1] =
                (char)('0' + between + (bytes > 300) * 3 + (bytes > 30) * 3);
            serving_open(serving);
            for (int turn = 0; turn < 3; turn++, chat.count += 2) {
                chat.texts[chat.count - 1] = texts[turn];
                struct asked asked = ask(serving, NULL, &chat);
                const struct serve_answer *answer = &asked.answer;
                printf("%zu bytes, %d, turn %d: %llu of %llu reused\n", bytes, between, turn,
                       (unsigned long long)answer->tokens_reused,
                       (unsigned long long)answer->tokens_prompt);
                if (turn == 0)
                    memcpy(first, asked.session, sizeof first);
                assert_string_equal(asked.session, first);
                assert_int_equal(answer->found, turn == 0          ? SERVE_NEW
                                                : between == AWAKE ? SERVE_DEVICE
                                                                   : SERVE_DISK);
                assert_int_equal(answer->tokens_reused + answer->tokens_prefilled,
                                 answer->tokens_prompt);
                /* All that was stored, but for the pending token. */
                if (turn > 0)
                    assert_true(answer->tokens_reused + 1 >= stored_tokens(serving, first) -
                                                                 answer->tokens_prefilled -
                                                                 answer->tokens_completion);
                memcpy(answers[between][turn], asked.text, TEXT);
                assert_string_equal(answers[between][turn], answers[AWAKE][turn]);
                chat.texts[chat.count] = answers[between][turn];
                pass_time(serving, between, first);
            }
            serving_close(serving);
        }
    }
}

/* What went to sleep a moment ago comes from memory, and an edit of it too. */
static void memory_is_told_from_disk(void **state) {
    struct serving *serving = *state;
    serving->settings.ram_bytes = 64 << 20;
    serving_open(serving);
    static struct asked asked, edited;
    static char text[TEXT], other[TEXT];
    long_text(text, 1500, "lake");
    snprintf(other, TEXT, "%s?", text);
    struct serving_chat chat = {.texts = {text}, .count = 1};
    asked = ask(serving, NULL, &chat);
    chat.texts[1] = asked.text;
    chat.texts[2] = "go on";
    chat.count = 3;
    for (enum between between = ASLEEP; between < BETWEENS; between++) {
        static struct asked next;
        pass_time(serving, between, asked.session);
        edited = ask(serving, NULL, &(struct serving_chat){.texts = {other}, .count = 1});
        next = ask(serving, NULL, &chat);
        assert_int_equal(next.answer.found, between == ASLEEP ? SERVE_RAM : SERVE_DISK);
        assert_string_equal(next.session, asked.session);
        assert_string_not_equal(edited.session, asked.session);
        assert_int_equal(edited.answer.found, next.answer.found);
        chat.texts[3] = next.text;
        chat.texts[4] = "and on";
        chat.count = 5;
    }
}

/* --- forks */

struct scene {
    struct serving *serving;
    struct serving_chat chat;
    char texts[3][TEXT], answers[3][TEXT];
    char session[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t n;
};

/* Two turns, answered; the chat is that of a third. */
static void play(struct scene *scene, struct serving *serving, size_t bytes) {
    memset(scene, 0, sizeof *scene);
    scene->serving = serving;
    for (int i = 0; i < 3; i++)
        long_text(scene->texts[i], bytes + 32, i == 0 ? "river" : i == 1 ? "stone" : "bird");
    for (int turn = 0; turn < 2; turn++) {
        scene->chat.texts[2 * turn] = scene->texts[turn];
        scene->chat.count = 2 * (size_t)turn + 1;
        struct asked asked = ask(serving, NULL, &scene->chat);
        memcpy(scene->answers[turn], asked.text, TEXT);
        scene->chat.texts[2 * turn + 1] = scene->answers[turn];
        memcpy(scene->session, asked.session, sizeof scene->session);
    }
    scene->chat.texts[4] = scene->texts[2];
    scene->chat.count = 5;
    scene->n = stored_tokens(serving, scene->session);
}

/* The same question again and again, awake and asleep: a session of its own each time, that begins
 * as the chat does; the chat itself stays as it was. BREAK_FORK_NOT goes back in the chat. */
static void an_edit_forks(struct scene *scene, enum between between, struct asked *asked_out) {
    pass_time(scene->serving, between, scene->session);
    *asked_out = ask(scene->serving, NULL, &scene->chat);
    const struct serve_answer *answer = &asked_out->answer;
    printf("%llu tokens, %llu asked: differs at %llu, %llu reused, %llu prefilled\n",
           (unsigned long long)scene->n, (unsigned long long)answer->tokens_prompt,
           (unsigned long long)answer->first_difference, (unsigned long long)answer->tokens_reused,
           (unsigned long long)answer->tokens_prefilled);
    assert_string_not_equal(asked_out->session, scene->session);
    assert_int_equal(stored_tokens(scene->serving, scene->session), scene->n);
    assert_int_equal(answer->found, SERVE_DISK);
    assert_int_equal(answer->tokens_reused + answer->tokens_prefilled, answer->tokens_prompt);
    assert_true(answer->tokens_reused > 0);
}

static void edits_fork_at_the_right_token(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    static char edited[TEXT];
    static struct asked asked, again;
    serving_open(serving);
    play(&scene, serving, 1200);
    /* The answer asked for again: the last two tokens are read again, and it is the same. */
    scene.chat.count = 3;
    an_edit_forks(&scene, AWAKE, &asked);
    assert_int_equal(asked.answer.tokens_prefilled, 2);
    assert_string_equal(asked.text, scene.answers[1]);
    /* The newest message edited at its end: within the window nothing else is prefilled. */
    snprintf(edited, sizeof edited, "%s and more", scene.texts[1]);
    scene.chat.texts[2] = edited;
    an_edit_forks(&scene, ASLEEP, &asked);
    assert_true(asked.answer.tokens_prefilled < 40);
    assert_true(asked.answer.first_difference > scene.n - 60);
    /* The first message edited in its middle: its blocks before that stay. */
    snprintf(edited, sizeof edited, "%s", scene.texts[0]);
    edited[900] = '#';
    scene.chat.texts[0] = edited;
    scene.chat.texts[2] = scene.texts[1];
    scene.chat.count = 5;
    an_edit_forks(&scene, AWAKE, &asked);
    an_edit_forks(&scene, RESTARTED, &again);
    assert_string_equal(asked.text, again.text);
    assert_string_not_equal(asked.session, again.session);
    /* Each fork goes on by itself. */
    scene.chat.texts[5] = asked.text;
    scene.chat.texts[6] = "and now?";
    scene.chat.count = 7;
    struct asked next = ask(serving, NULL, &scene.chat);
    assert_true(strcmp(next.session, asked.session) == 0 ||
                strcmp(next.session, again.session) == 0);
    assert_int_equal(next.answer.tokens_reused + 1 >=
                         next.answer.tokens_prompt - next.answer.tokens_prefilled,
                     1);
    /* And so does the chat. */
    scene.chat.texts[0] = scene.texts[0];
    scene.chat.count = 5;
    struct asked chat = ask(serving, NULL, &scene.chat);
    assert_string_equal(chat.session, scene.session);
}

/* What agrees in a few tokens, or not at all, begins anew: nothing is woken for it. */
static void other_chats_begin_anew(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    serving_open(serving);
    play(&scene, serving, 1200);
    struct serving_chat chat = {.texts = {"something else"}, .count = 1};
    struct asked asked = ask(serving, NULL, &chat);
    assert_int_equal(asked.answer.found, SERVE_NEW);
    assert_int_equal(asked.answer.tokens_reused, 0);
    assert_int_equal(stored_tokens(serving, scene.session), scene.n);
}

/* Between finding and waking others are let in: what has gone by then is told from damage. */
static void a_place_that_has_gone_is_known(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    struct prefix_place place;
    struct session *session = NULL;
    struct service_opened opened;
    struct kv_diag diag = {""};
    struct turn_rendered rendered;
    serving_open(serving);
    play(&scene, serving, 1200);
    sleep_session(serving, scene.session);
    scene.chat.texts[2] = "no, wait";
    scene.chat.count = 3;
    const struct serve_request request = serving_request(&scene.chat, NULL, 1);
    const struct template_turns turns = {request.messages, request.message_count,
                                         TEMPLATE_FIRST | TEMPLATE_ASK};
    assert_int_equal(turn_render(serving->service, &turns, &rendered, &diag), KV_OK);
    const struct prefix_wish wish = {
        .owner = request.owner, .ids = rendered.ids.items, .count = rendered.ids.count};
    struct prefix *prefix = serving->serve->prefix;
    service_enter(serving->service);
    assert_int_equal(prefix_find(prefix, &wish, &place, &diag), KV_OK);
    assert_int_equal(place.found && place.forks, 1);
    assert_int_equal(prefix_is_there(prefix, &place), 1);
    assert_int_equal(
        snapshot_remove(service_store(serving->service), kv_alloc_system(), scene.session, &diag),
        KV_OK);
    const struct prefix_fork fork = {&place, "fork", NULL, NULL};
    enum kv_err err = prefix_fork(prefix, &fork, &session, &opened, &diag);
    assert_true(err == KV_ERR_NOT_FOUND || err == KV_ERR_CORRUPT);
    assert_int_equal(prefix_is_there(prefix, &place), 0);
    assert_null(session_find(service_engine(serving->service), "fork"));
    assert_int_equal(prefix_find(prefix, &wish, &place, &diag), KV_OK);
    assert_int_equal(place.found, 0);
    service_leave(serving->service);
    turn_rendered_release(serving->service, &rendered);
}

/* Two chats with other beginnings whose last 128 bytes are the same have the same mark. BREAK_CLAIM
 * takes the mark for the text. */
static void marks_are_only_hints(void **state) {
    struct serving *serving = *state;
    static char texts[2][TEXT], same[1000];
    serving_open(serving);
    long_text(same, sizeof same, "same");
    for (int i = 0; i < 2; i++)
        snprintf(texts[i], TEXT, "%s %s", i == 0 ? "mine is 4711" : "yours is 1147", same);
    struct serving_chat chat = {.texts = {texts[0], same, "what is it?"}, .count = 3};
    struct asked first = ask(serving, NULL, &chat);
    chat.texts[0] = texts[1];
    struct asked second = ask(serving, NULL, &chat);
    assert_string_not_equal(first.session, second.session);
    assert_int_equal(second.answer.tokens_reused, 0);
    chat.texts[0] = texts[0];
    chat.texts[3] = first.text;
    chat.texts[4] = "and?";
    chat.count = 5;
    struct asked third = ask(serving, NULL, &chat);
    assert_string_equal(third.session, first.session);
}

/* --- owners */

/* Two keys with one prompt: no reuse across, none of the other's entries is looked at, the names of
 * one are nowhere for the other. Another program's forks are found after serve_refresh. */
static void owners_have_their_own(void **state) {
    struct serving *serving = *state;
    uint8_t alice[IMAGE_OWNER_BYTES], bob[IMAGE_OWNER_BYTES], again[IMAGE_OWNER_BYTES];
    struct snap_prefix_counts before, after;
    static char text[TEXT];
    prefix_owner("key of alice", alice);
    prefix_owner("key of bob", bob);
    prefix_owner("key of alice", again);
    assert_memory_equal(alice, again, sizeof alice);
    assert_memory_not_equal(alice, bob, sizeof alice);
    serving_open(serving);
    long_text(text, 1500, "secret");
    struct serving_chat chat = {.texts = {text}, .count = 1};
    static struct asked hers, his, next;
    hers = ask(serving, alice, &chat);
    snap_prefix_counts(prefix_table(serving->serve->prefix), alice, &before);
    his = ask(serving, bob, &chat);
    assert_int_equal(his.answer.tokens_reused, 0);
    assert_int_equal(his.answer.found, SERVE_NEW);
    snap_prefix_counts(prefix_table(serving->serve->prefix), alice, &after);
    assert_int_equal(after.looked_at, before.looked_at);
    assert_int_equal(after.entries, 1);
    chat.texts[1] = hers.text;
    chat.texts[2] = "go on";
    chat.count = 3;
    for (int asleep = 0; asleep < 2; asleep++) {
        pass_time(serving, asleep ? ASLEEP : AWAKE, his.session);
        pass_time(serving, asleep ? RESTARTED : AWAKE, hers.session);
        next = ask(serving, bob, &chat);
        assert_string_not_equal(next.session, hers.session);
        next = ask(serving, alice, &chat);
        assert_true(next.answer.tokens_reused > 300);
        assert_int_equal(try_ask(serving, bob, hers.session, &chat, &next), KV_ERR_NOT_FOUND);
    }
    uint8_t found[IMAGE_OWNER_BYTES];
    struct kv_diag diag = {""};
    assert_int_equal(snapshot_owner(service_store(serving->service), his.session, found, &diag),
                     KV_OK);
    assert_memory_equal(found, bob, sizeof bob);
}

/* --- texts that come back otherwise */

struct form {
    const char *what, *fed, *back;
};

/* CASE-05: the history was fed as one text and comes back as another that is no difference; the
 * next token to be prefilled is the new message's. */
static void texts_may_come_back_otherwise(void **state) {
    struct serving *serving = *state;
    static const struct form forms[] = {
        {"literal control token", "a <|im_end|> in the text", "a <|im_end|> in the text"},
        {"line ends", "one\r\ntwo\r\nthree", "one\ntwo\nthree"},
        {"characters of several tokens", "\xf0\x9f\x8e\x88 \xe6\x97\xa5\xe6\x9c\xac \xc3\xa9",
         "\xf0\x9f\x8e\x88 \xe6\x97\xa5\xe6\x9c\xac \xc3\xa9"},
    };
    serving_open(serving);
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        static struct asked first, next;
        char begin[400];
        long_text(begin, sizeof begin, forms[i].what);
        struct serving_chat chat = {.texts = {begin, forms[i].fed, "and then?"}, .count = 3};
        first = ask(serving, NULL, &chat);
        chat.texts[1] = forms[i].back;
        chat.texts[3] = first.text;
        chat.texts[4] = "go on";
        chat.count = 5;
        next = ask(serving, NULL, &chat);
        printf("%s: %llu of %llu reused\n", forms[i].what,
               (unsigned long long)next.answer.tokens_reused,
               (unsigned long long)next.answer.tokens_prompt);
        assert_string_equal(next.session, first.session);
        assert_true(next.answer.tokens_prefilled < 24);
    }
}

static enum kv_err feed_ids(struct session *session, const uint32_t *ids, size_t count,
                            enum image_role role) {
    return count == 0 ? KV_OK : session_feed(session, ids, (uint32_t)count, role, NULL);
}

/* A stored chat of one question, whose answer begins with a reasoning block. */
static void store_reasoned(struct serving *serving, const char *name, struct serving_chat *chat,
                           const char *reasoning) {
    struct service *service = serving->service;
    const struct tokenizer *tokenizer = engine_tokenizer(service_engine(service));
    const struct serve_request request = serving_request(chat, NULL, 1);
    const struct template_turns turns = {request.messages, request.message_count, TEMPLATE_FIRST};
    const struct template_turns opening = {.flags = TEMPLATE_ASK};
    const struct service_lookup lookup = {.create = 1};
    const struct turn_work work = {.prefilled = NULL};
    struct turn_rendered rendered, open;
    uint32_t items[64];
    struct tokenizer_ids inner = {items, 62, 0, 0};
    struct service_opened opened;
    struct session *session = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    service_enter(service);
    enum kv_err err = service_session(service, name, &lookup, &session, &opened, &diag);
    assert_int_equal(
        err | turn_render(service, &turns, &rendered, &diag) |
            turn_render(service, &opening, &open, &diag) |
            tokenizer_encode(tokenizer, reasoning, strlen(reasoning), 0, &inner, &diag),
        KV_OK);
    const struct template_span *span = &rendered.spans.items[rendered.spans.count - 1];
    size_t at = span->first + open.ids.count;
    uint32_t marks[] = {(uint32_t)tokenizer_special(tokenizer, "<think>"),
                        (uint32_t)tokenizer_special(tokenizer, "</think>")};
    err = feed_ids(session, rendered.ids.items, span->first, IMAGE_USER);
    err |= feed_ids(session, rendered.ids.items + span->first, open.ids.count, IMAGE_ASSISTANT);
    err |= feed_ids(session, &marks[0], 1, IMAGE_ASSISTANT);
    err |= feed_ids(session, inner.items, inner.count, IMAGE_ASSISTANT);
    err |= feed_ids(session, &marks[1], 1, IMAGE_ASSISTANT);
    err |= feed_ids(session, rendered.ids.items + at, span->end - at, IMAGE_ASSISTANT);
    assert_int_equal(err | turn_work(service, session, &work, &diag), KV_OK);
    assert_int_equal(service_save(service, session, 0, &receipt, &diag), KV_OK);
    service_leave(service);
    assert_true(serve_settle(serving->serve, UINT64_MAX));
    turn_rendered_release(service, &rendered);
    turn_rendered_release(service, &open);
}

/* Clients leave out what the model thought, also where it thought nothing. */
static void reasoning_may_be_dropped(void **state) {
    struct serving *serving = *state;
    static const char *const thoughts[] = {"\n\n", "hm, well, what is a river"};
    struct tiny_model_options options = tiny_model_default();
    options.reasoning = 1;
    tiny_model_write(&options, serving->model);
    serving_open(serving);
    for (int i = 0; i < 2; i++) {
        char begin[400], name[32];
        snprintf(name, sizeof name, "thought %d", i);
        long_text(begin, sizeof begin, name);
        struct serving_chat chat = {.texts = {begin, "it is long"}, .count = 2};
        store_reasoned(serving, name, &chat, thoughts[i]);
        chat.texts[2] = "go on";
        chat.count = 3;
        struct asked asked = ask(serving, NULL, &chat);
        assert_string_equal(asked.session, name);
        assert_true(asked.answer.tokens_prefilled < 24);
    }
}

/* An answer that ended before a stop goes on where the client saw it end. BREAK_TAKE_BACK leaves
 * the stop in the session. */
static void stops_are_not_in_the_way(void **state) {
    struct serving *serving = *state;
    serving_open(serving);
    for (int i = 0; i < 6; i++) {
        static struct asked whole, cut, next;
        char begin[300], stop[3] = "";
        const char *const stops[] = {stop};
        struct kv_diag diag = {""};
        snprintf(begin, sizeof begin, "tell %d things about rivers and %d about stones", i, i * 77);
        struct serving_chat chat = {.texts = {begin}, .count = 1};
        whole = ask(serving, NULL, &chat);
        size_t at = strlen(whole.text) / 2;
        while (at > 0 && (((unsigned char)whole.text[at] & 0x80) != 0 ||
                          ((unsigned char)whole.text[at + 1] & 0x80) != 0))
            at--;
        memcpy(stop, whole.text + at, 2);
        if (at == 0 || strlen(stop) < 2)
            continue;
        struct serve_request request = serving_request(&chat, "cut", 24);
        struct serve_answer answer;
        char name[32];
        snprintf(name, sizeof name, "cut %d", i);
        request.session = name;
        request.stops = stops;
        request.stop_count = 1;
        if (serve_turn(serving->serve, &request, &answer, &diag) != KV_OK)
            fail_msg("%s", diag.text);
        assert_int_equal(answer.finish, SERVE_STOP);
        assert_null(strstr(answer.text, stop));
        snprintf(cut.text, TEXT, "%s", answer.text);
        serve_answer_release(serving->serve, &answer);
        assert_int_equal(snapshot_remove(service_store(serving->service), kv_alloc_system(),
                                         whole.session, &diag),
                         KV_OK);
        chat.texts[1] = cut.text;
        chat.texts[2] = "go on";
        chat.count = 3;
        next = ask(serving, NULL, &chat);
        printf("%zu of %zu bytes shown: %s\n", strlen(cut.text), strlen(whole.text), next.session);
        assert_string_equal(next.session, name);
    }
}

/* CASE-04: of two snapshots of one session the longer one that agrees is taken, here the one that
 * stayed under a tag when the session went back. */
static void the_longest_snapshot_is_taken(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    static struct asked back, next;
    serving_open(serving);
    play(&scene, serving, 1200);
    struct serving_chat other = {.texts = {scene.texts[0], scene.answers[0], "no, wait"},
                                 .count = 3};
    assert_int_equal(try_ask(serving, NULL, scene.session, &other, &back), KV_OK);
    assert_string_equal(back.session, scene.session);
    for (enum between between = AWAKE; between < BETWEENS; between++) {
        pass_time(serving, between, scene.session);
        next = ask(serving, NULL, &scene.chat);
        printf("%llu of %llu reused\n", (unsigned long long)next.answer.tokens_reused,
               (unsigned long long)next.answer.tokens_prompt);
        assert_true(next.answer.tokens_reused + 1 >= scene.n);
        assert_string_not_equal(next.session, scene.session);
        struct kv_diag diag = {""};
        sleep_session(serving, next.session);
        assert_int_equal(snapshot_remove(service_store(serving->service), kv_alloc_system(),
                                         next.session, &diag),
                         KV_OK);
    }
}

/* --- at once */

struct racer {
    struct serving *serving;
    struct serving_chat chat;
    struct asked asked;
    enum kv_err err;
};

static void *race(void *context) {
    struct racer *racer = context;
    racer->err = try_ask(racer->serving, NULL, NULL, &racer->chat, &racer->asked);
    return NULL;
}

/* Four requests go on in one chat at the same time: one of them at most in the session itself, each
 * answer belongs to its own question, and the chat is still whole. */
static void two_at_once_do_not_meet(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    static struct racer racers[4];
    static const char *const asks[] = {"north?", "south?", "east?", "west?"};
    pthread_t threads[4];
    int same = 0, anew = 0;
    serving_open(serving);
    play(&scene, serving, 600);
    for (int i = 0; i < 4; i++) {
        racers[i] = (struct racer){.serving = serving, .chat = scene.chat};
        racers[i].chat.texts[4] = asks[i];
        assert_int_equal(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(racers[i].err, KV_OK);
        same += strcmp(racers[i].asked.session, scene.session) == 0;
        anew += racers[i].asked.answer.tokens_reused == 0;
        for (int k = 0; k < i; k++)
            assert_string_not_equal(racers[i].asked.session, racers[k].asked.session);
    }
    assert_true(same <= 1);
    /* What is found may have moved on each time that one looks, which is looked at a few times. */
    assert_true(anew <= 1);
    for (int i = 0; i < 4; i++) {
        struct asked asked;
        racers[i].chat.texts[5] = racers[i].asked.text;
        racers[i].chat.texts[6] = "why?";
        racers[i].chat.count = 7;
        asked = ask(serving, NULL, &racers[i].chat);
        assert_string_equal(asked.session, racers[i].asked.session);
    }
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, serving_set_up, serving_tear_down)

TESTING_MAIN(TEST(a_chat_goes_on), TEST(memory_is_told_from_disk),
             TEST(edits_fork_at_the_right_token), TEST(other_chats_begin_anew),
             TEST(a_place_that_has_gone_is_known), TEST(marks_are_only_hints),
             TEST(owners_have_their_own), TEST(texts_may_come_back_otherwise),
             TEST(reasoning_may_be_dropped), TEST(stops_are_not_in_the_way),
             TEST(the_longest_snapshot_is_taken), TEST(two_at_once_do_not_meet))
