/* tests/test_agree.c - a chat that comes back as text finds its stored ids again (CASE-05).
 *
 * Responsible for: ids that were cut otherwise, literal control tokens, reasoning blocks, line
 * ends, characters split between tokens, cut-off answers, and where a real difference is; random
 * cuts against a plain comparison of the text.
 * Not responsible for: rendering itself (test_template.c).
 */
#include "engine/agree.h"

#include "tests/support_tiny_model.h"
#include "tests/testing.h"

#include <string.h>

enum { IDS_MAX = 4096, ROLES_MAX = 16 };

static const char llama3[] = "{% <|start_header_id|> %}<|eot_id|>{{ content | trim }}";

/* A stored session: what a chat leaves, byte by byte where an answer says so. */
struct scene {
    uint8_t *file;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct template *tmpl;
    uint32_t stored[IDS_MAX], request[IDS_MAX];
    struct tokenizer_ids ids, asked;
    struct image_span roles[ROLES_MAX];
    uint32_t role_count;
    unsigned flags;
    struct agree found;
};

static void open_scene(struct scene *scene, const char *template, int reasoning) {
    struct tiny_model_options options = tiny_model_default();
    size_t size;
    memset(scene, 0, sizeof *scene);
    options.ffn = 32;
    options.reasoning = reasoning;
    if (template != NULL)
        options.template = template;
    scene->file = tiny_model_make(&options, &size);
    assert_non_null(scene->file);
    assert_int_equal(gguf_parse(scene->file, size, kv_alloc_system(), &scene->gguf, NULL), KV_OK);
    assert_int_equal(tokenizer_make(scene->gguf, kv_alloc_system(), &scene->tokenizer, NULL),
                     KV_OK);
    const struct template_make_args args = {.gguf = scene->gguf, .tokenizer = scene->tokenizer};
    assert_int_equal(template_make(&args, kv_alloc_system(), &scene->tmpl, NULL), KV_OK);
    scene->ids = (struct tokenizer_ids){.items = scene->stored, .capacity = IDS_MAX};
}

static void close_scene(struct scene *scene) {
    template_drop(scene->tmpl);
    tokenizer_drop(scene->tokenizer);
    gguf_drop(scene->gguf);
    tiny_model_drop(scene->file);
}

static void empty(struct scene *scene) {
    scene->ids.count = 0;
    scene->role_count = 0;
}

static void role(struct scene *scene, enum image_role role, size_t first) {
    assert_true(scene->role_count < ROLES_MAX);
    scene->roles[scene->role_count++] = (struct image_span){role, first, scene->ids.count};
}

/* What a turn feeds: the message and the opening of an answer. */
static void say(struct scene *scene, const char *text) {
    const struct template_message message = {TEMPLATE_USER, text, strlen(text)};
    size_t first = scene->ids.count;
    unsigned flags = first == 0 ? TEMPLATE_FIRST : TEMPLATE_AFTER_END;
    if (first != 0 && scene->stored[first - 1] != template_end_id(scene->tmpl))
        flags |= TEMPLATE_END_TURN;
    const struct template_turns turns = {&message, 1, flags | TEMPLATE_ASK};
    struct template_span spans[4];
    struct template_spans list = {spans, 4, 0};
    assert_int_equal(template_ids(scene->tmpl, &turns, &scene->ids, &list, NULL), KV_OK);
    const struct template_span *opening = &spans[list.count - 1];
    scene->roles[scene->role_count++] = (struct image_span){IMAGE_USER, first, opening->first};
    role(scene, IMAGE_ASSISTANT, opening->first);
}

static void put(struct scene *scene, const char *special) {
    int32_t id = tokenizer_special(scene->tokenizer, special);
    assert_int_not_equal(id, TOKENIZER_NONE);
    scene->stored[scene->ids.count++] = (uint32_t)id;
    scene->roles[scene->role_count - 1].end = scene->ids.count;
}

/* An answer that a model cut into pieces of `piece` bytes; 0 as the tokenizer does. */
static void generate(struct scene *scene, const char *text, size_t bytes, size_t piece) {
    for (size_t at = 0; at < bytes; at += piece) {
        piece = piece == 0 || piece > bytes - at ? bytes - at : piece;
        assert_int_equal(tokenizer_encode(scene->tokenizer, text + at, piece, 0, &scene->ids, NULL),
                         KV_OK);
    }
    scene->roles[scene->role_count - 1].end = scene->ids.count;
}

static void answer(struct scene *scene, const char *text, size_t piece) {
    generate(scene, text, strlen(text), piece);
    scene->stored[scene->ids.count++] = template_end_id(scene->tmpl);
    scene->roles[scene->role_count - 1].end = scene->ids.count;
}

/* The chat comes back: user and assistant by turns, then the opening of an answer. */
static void ask(struct scene *scene, const char *const *texts, size_t count) {
    struct template_message messages[8];
    for (size_t i = 0; i < count; i++)
        messages[i] = (struct template_message){i % 2 == 0 ? TEMPLATE_USER : TEMPLATE_ASSISTANT,
                                                texts[i], strlen(texts[i])};
    const struct template_turns turns = {messages, count,
                                         TEMPLATE_FIRST | (count % 2 ? TEMPLATE_ASK : 0)};
    scene->asked = (struct tokenizer_ids){.items = scene->request, .capacity = IDS_MAX};
    assert_int_equal(template_ids(scene->tmpl, &turns, &scene->asked, NULL, NULL), KV_OK);
    const struct agree_args args = {scene->tokenizer, scene->tmpl,        scene->stored,
                                    scene->ids.count, scene->roles,       scene->role_count,
                                    scene->request,   scene->asked.count, scene->flags};
    agree_find(&args, &scene->found);
    assert_true(scene->found.stored_tokens <= scene->found.differ_token);
    assert_true(scene->found.stored_tokens <= scene->ids.count);
    assert_true(scene->found.request_tokens <= scene->asked.count);
}
#define ASK(scene, ...)                                                                            \
    ask(scene, (const char *const[]){__VA_ARGS__},                                                 \
        sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static void expect_all(const struct scene *scene, uint64_t passed) {
    assert_int_equal(scene->found.end, AGREE_STORED_ENDS);
    assert_int_equal(scene->found.stored_tokens, scene->ids.count);
    assert_int_equal(scene->found.differ_token, scene->ids.count);
    assert_int_equal(scene->found.passed, passed);
    assert_true(scene->found.request_tokens < scene->asked.count);
}

/* The ids of a generated answer are not those of its text, and win. BREAK_SAME_IDS compares ids. */
static void another_cut_of_the_same_text_is_reused_whole(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 0);
    for (size_t piece = 0; piece < 4; piece++) {
        empty(&scene);
        say(&scene, "Name the system of the user.");
        answer(&scene, "the user and the system", piece);
        ASK(&scene, "Name the system of the user.", "the user and the system", "And then?");
        expect_all(&scene, 0);
        if (piece == 1)
            assert_int_not_equal(scene.found.request_tokens, scene.found.stored_tokens);
        /* What is left is what a turn of the session itself would feed. */
        uint32_t fed[IDS_MAX];
        size_t end = scene.ids.count;
        say(&scene, "And then?");
        memcpy(fed, scene.stored + end, (scene.ids.count - end) * sizeof *fed);
        assert_int_equal(scene.asked.count - scene.found.request_tokens, scene.ids.count - end);
        assert_memory_equal(fed, scene.request + scene.found.request_tokens,
                            (scene.ids.count - end) * sizeof *fed);
    }
    close_scene(&scene);
}

static void a_real_difference_is_named(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 0);
    say(&scene, "Name it.");
    uint64_t from = scene.ids.count;
    answer(&scene, "xyzzy plugh", 1);
    ASK(&scene, "Name it.", "xyzzy PLUGH", "Go on.");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    assert_int_equal(scene.found.differ_token, from + 6);
    assert_in_range(scene.found.stored_tokens, from, from + 6);
    /* An edit of the first message. */
    ASK(&scene, "Name me.", "xyzzy plugh", "Go on.");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    assert_true(scene.found.differ_token < from);
    /* An earlier state of the chat: all of the request is there already. */
    uint64_t half = scene.ids.count;
    say(&scene, "Go on.");
    ASK(&scene, "Name it.", "xyzzy plugh");
    assert_int_equal(scene.found.end, AGREE_REQUEST_ENDS);
    assert_true(scene.found.stored_tokens >= half);
    assert_int_equal(scene.found.request_tokens, scene.asked.count);
    ASK(&scene, "Name it.", "xyzzy plugh", "Go on.");
    assert_int_equal(scene.found.end, AGREE_SAME);
    assert_int_equal(scene.found.stored_tokens, scene.ids.count);
    close_scene(&scene);
}

/* People may write the text of a control token; it is text on both sides and never the token. */
static void a_literal_control_token_is_text(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 0);
    say(&scene, "What is <|im_end|> for?");
    answer(&scene, "It ends: <|im_end|> a turn.", 3);
    ASK(&scene, "What is <|im_end|> for?", "It ends: <|im_end|> a turn.", "So?");
    expect_all(&scene, 0);
    empty(&scene);
    say(&scene, "Say it.");
    uint64_t from = scene.ids.count;
    generate(&scene, "Yes", 3, 0);
    uint64_t end_at = scene.ids.count;
    put(&scene, "<|im_end|>");
    say(&scene, "More.");
    ASK(&scene, "Say it.", "Yes<|im_end|>\n<|im_start|>user\nMore.", "Go");
    assert_int_equal(scene.found.end, AGREE_CONTROL);
    assert_int_equal(scene.found.differ_token, end_at);
    assert_in_range(scene.found.stored_tokens, from, end_at);
    /* One inside an answer that was never shown cannot come back, and is no difference. */
    empty(&scene);
    say(&scene, "Say it.");
    generate(&scene, "Yes", 3, 0);
    put(&scene, "<|im_start|>");
    answer(&scene, " and no", 0);
    ASK(&scene, "Say it.", "Yes and no", "Go");
    expect_all(&scene, 1);
    /* Nor are some at the end of one that was cut off, or before its end. */
    for (int cut = 0; cut < 2; cut++) {
        empty(&scene);
        say(&scene, "Say it.");
        generate(&scene, "Yes", 3, 0);
        put(&scene, "<|im_start|>");
        put(&scene, "<|im_start|>");
        if (!cut)
            answer(&scene, "", 0);
        ASK(&scene, "Say it.", "Yes", "Go");
        expect_all(&scene, 2);
    }
    close_scene(&scene);
}

static void reasoning_that_is_empty_is_no_difference(void **state) {
    (void)state;
    for (int kind = 1; kind <= 2; kind++) {
        struct scene scene;
        open_scene(&scene, NULL, kind);
        say(&scene, "Is it?");
        put(&scene, "<think>");
        generate(&scene, "\n\n", 2, 1);
        put(&scene, "</think>");
        answer(&scene, "\n\nIt is.", 0);
        ASK(&scene, "Is it?", "It is.", "Is it?");
        expect_all(&scene, 6);
        empty(&scene); /* the other way round: the client puts an empty one in */
        say(&scene, "Is it?");
        answer(&scene, "It is.", 0);
        ASK(&scene, "Is it?", kind == 1 ? "<think>\n\n</think>\n\nIt is." : "It is.", "Is it?");
        expect_all(&scene, kind == 1 ? 6 : 0);
        close_scene(&scene);
    }
}

static void dropped_reasoning_is_where_reuse_ends_unless_allowed(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 1);
    say(&scene, "Is it?");
    uint64_t from = scene.ids.count;
    put(&scene, "<think>");
    generate(&scene, "\nhmm\n", 5, 1);
    put(&scene, "</think>");
    answer(&scene, "\n\nIt is.", 2);
    say(&scene, "Really?");
    generate(&scene, "Yes", 3, 1);
    ASK(&scene, "Is it?", "It is.", "Really?", "Yes", "Good.");
    assert_int_equal(scene.found.end, AGREE_REASONING);
    assert_int_equal(scene.found.differ_token, from);
    assert_int_equal(scene.found.stored_tokens, from);
    scene.flags = AGREE_DROPPED_REASONING;
    ASK(&scene, "Is it?", "It is.", "Really?", "Yes", "Good.");
    expect_all(&scene, 9);
    ASK(&scene, "Is it?", "<think>\nhmm\n</think>\n\nIt is.", "Really?", "Yes", "Good.");
    expect_all(&scene, 0);
    /* Other reasoning is other text, whatever is allowed to be dropped. */
    ASK(&scene, "Is it?", "<think>\nno\n</think>\n\nIt is.", "Really?", "Yes", "Good.");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    close_scene(&scene);
}

static void line_ends_of_either_kind_are_one(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 0);
    say(&scene, "one\r\ntwo\nthree");
    answer(&scene, "four\r\nfive\nsix", 1);
    ASK(&scene, "one\r\ntwo\nthree", "four\r\nfive\nsix", "Go.");
    expect_all(&scene, 0);
    ASK(&scene, "one\ntwo\nthree", "four\nfive\nsix", "Go.");
    expect_all(&scene, 2);
    ASK(&scene, "one\r\ntwo\r\nthree", "four\r\nfive\r\nsix", "Go.");
    expect_all(&scene, 2);
    ASK(&scene, "one\rtwo\nthree", "four", "Go."); /* a lone CR is no line end */
    assert_int_equal(scene.found.end, AGREE_TEXT);
    ASK(&scene, "one\r\n\ntwo\nthree", "four", "Go.");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    close_scene(&scene);
}

static void no_boundary_cuts_a_character(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 0);
    say(&scene, "Draw.");
    answer(&scene, "ab\xf0\x9f\x98\x80 cd", 1);
    ASK(&scene, "Draw.", "ab\xf0\x9f\x98\x80 cd", "Go.");
    expect_all(&scene, 0);
    /* Three of four bytes agree: the character is another, and none of it is reused. */
    empty(&scene);
    say(&scene, "Draw.");
    uint64_t from = scene.ids.count;
    answer(&scene, "\xf0\x9f\x98\x80", 1);
    ASK(&scene, "Draw.", "\xf0\x9f\x98\x81", "Go.");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    assert_int_equal(scene.found.stored_tokens, from);
    assert_int_equal(scene.found.differ_token, from);
    /* An answer cut off inside a character was shown with U+FFFD in its place. */
    empty(&scene);
    say(&scene, "Draw.");
    generate(&scene, "ab\xf0\x9f", 4, 1);
    ASK(&scene, "Draw.", "ab\xef\xbf\xbd\xef\xbf\xbd", "Go.");
    expect_all(&scene, 0);
    /* In a message of the user it is another text. */
    empty(&scene);
    say(&scene, "ab\xf0\x9f");
    ASK(&scene, "ab\xef\xbf\xbd\xef\xbf\xbd");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    close_scene(&scene);
}

static void a_cut_off_answer_goes_on_at_a_common_boundary(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, NULL, 0);
    say(&scene, "Name it.");
    generate(&scene, "the us", 6, 1);
    ASK(&scene, "Name it.", "the us", "Go.");
    expect_all(&scene, 0);
    ASK(&scene, "Name it.", "the user", "Go."); /* the request goes on inside a word */
    assert_int_equal(scene.found.end, AGREE_STORED_ENDS);
    assert_true(scene.found.stored_tokens < scene.ids.count);
    assert_int_equal(scene.found.differ_token, scene.ids.count);
    close_scene(&scene);
}

static void llama_3_trims_what_was_generated(void **state) {
    (void)state;
    struct scene scene;
    open_scene(&scene, llama3, 0);
    assert_int_equal(template_kind(scene.tmpl), TEMPLATE_LLAMA3);
    say(&scene, "Name it.");
    answer(&scene, " the user \n", 1);
    ASK(&scene, "Name it.", " the user \n", "Go.");
    expect_all(&scene, 3);
    ASK(&scene, "Name it.", "the user", "Go.");
    expect_all(&scene, 3);
    ASK(&scene, "Name it.", "the  user", "Go.");
    assert_int_equal(scene.found.end, AGREE_TEXT);
    close_scene(&scene);
}

/* Random words cut at random and changed at one byte, against a comparison of the bytes. */
static void random_cuts_end_where_the_bytes_differ(void **state) {
    (void)state;
    struct scene scene;
    struct testing_random random;
    open_scene(&scene, NULL, 0);
    testing_random_init(&random, testing_seed("cuts", 5));
    for (int round = 0; round < 500; round++) {
        char text[64], other[64];
        size_t bytes = 8 + (size_t)testing_random_below(&random, 50), at = 0;
        for (size_t i = 0; i < bytes; i++)
            text[i] = other[i] = "the user system "[testing_random_below(&random, 16)];
        text[bytes] = other[bytes] = 0;
        size_t change = (size_t)testing_random_below(&random, 2 * bytes);
        if (change < bytes)
            other[change] = '#';
        empty(&scene);
        say(&scene, "Go.");
        uint64_t from = scene.ids.count, differ = 0;
        while (at < bytes) {
            size_t piece = 1 + (size_t)testing_random_below(&random, 6);
            piece = piece > bytes - at ? bytes - at : piece;
            generate(&scene, text + at, piece, 0);
            at += piece;
        }
        answer(&scene, "", 0);
        for (size_t pos = 0; differ + from + 1 < scene.ids.count; differ++) {
            pos += tokenizer_piece(scene.tokenizer, scene.stored[from + differ]).size_bytes;
            if (pos > change)
                break;
        }
        ASK(&scene, "Go.", other, "Next.");
        if (change >= bytes) {
            expect_all(&scene, 0);
            continue;
        }
        assert_int_equal(scene.found.end, AGREE_TEXT);
        assert_int_equal(scene.found.differ_token, from + differ);
        assert_in_range(scene.found.stored_tokens, from, from + differ);
    }
    close_scene(&scene);
}

/* Any ids under any roles: what is called equal is at least the ids that are, and nothing beyond
 * the lists is named. */
static void any_ids_keep_the_bounds(void **state) {
    (void)state;
    struct testing_random random;
    testing_random_init(&random, testing_seed("ids", 17));
    for (int kind = 0; kind <= 2; kind++) {
        struct scene scene;
        open_scene(&scene, kind == 2 ? llama3 : NULL, kind);
        uint32_t vocab = tokenizer_info(scene.tokenizer).vocab_count;
        for (int round = 0; round < 3000; round++) {
            uint64_t count[2], same = testing_random_below(&random, 20);
            uint32_t *lists[2] = {scene.stored, scene.request};
            for (int k = 0; k < 2; k++) {
                count[k] = same + testing_random_below(&random, 20);
                for (uint64_t i = 0; i < count[k]; i++) /* control tokens and marks stand often */
                    lists[k][i] =
                        k == 1 && i < same
                            ? lists[0][i]
                            : (uint32_t)(testing_random_below(&random, 3) == 0
                                             ? vocab - 16 + testing_random_below(&random, 16)
                                             : testing_random_below(&random, vocab));
            }
            uint64_t cut = testing_random_below(&random, count[0] + 1);
            const struct image_span roles[2] = {{IMAGE_USER, 0, cut},
                                                {IMAGE_ASSISTANT, cut, count[0]}};
            const struct agree_args args = {
                scene.tokenizer, scene.tmpl, scene.stored,
                count[0],        roles,      2,
                scene.request,   count[1],   (unsigned)testing_random_below(&random, 2)};
            struct agree found;
            agree_find(&args, &found);
            assert_true(found.stored_tokens <= found.differ_token);
            assert_true(found.differ_token <= count[0]);
            assert_true(found.request_tokens <= count[1]);
            assert_true(found.differ_token + 3 >= same); /* a character of four bytes may be cut */
            assert_true(found.end != AGREE_SAME ||
                        (found.stored_tokens == count[0] && found.request_tokens == count[1]));
        }
        close_scene(&scene);
    }
}

TESTING_MAIN(cmocka_unit_test(any_ids_keep_the_bounds),
             cmocka_unit_test(another_cut_of_the_same_text_is_reused_whole),
             cmocka_unit_test(a_real_difference_is_named),
             cmocka_unit_test(a_literal_control_token_is_text),
             cmocka_unit_test(reasoning_that_is_empty_is_no_difference),
             cmocka_unit_test(dropped_reasoning_is_where_reuse_ends_unless_allowed),
             cmocka_unit_test(line_ends_of_either_kind_are_one),
             cmocka_unit_test(no_boundary_cuts_a_character),
             cmocka_unit_test(a_cut_off_answer_goes_on_at_a_common_boundary),
             cmocka_unit_test(llama_3_trims_what_was_generated),
             cmocka_unit_test(random_cuts_end_where_the_bytes_differ))
