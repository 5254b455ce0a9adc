/* tests/test_tokenizer.c - token ids against reference answers, and exact ways back.
 *
 * Responsible for: the reference cases (tests/oracle), round trips of any bytes, speed on long
 * pieces, streaming, refusals, threads, allocation failures.
 * Not responsible for: cutting rules and merge order by themselves (test_pretokenize.c,
 * test_bpe.c) or chat turns (test_template.c).
 */
#include "engine/model/tokenizer.h"

#include "store/base/bytes.h"
#include "store/base/clock.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

enum { IDS_MAX = 1 << 22 };

static uint32_t ids_memory[IDS_MAX];

struct opened {
    uint8_t *file;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct kv_diag diag;
};

static enum kv_err open_bytes(struct opened *opened, uint8_t *file, size_t size) {
    memset(opened, 0, sizeof *opened);
    assert_non_null(file);
    opened->file = file;
    assert_int_equal(gguf_parse(file, size, kv_alloc_system(), &opened->gguf, &opened->diag),
                     KV_OK);
    return tokenizer_make(opened->gguf, kv_alloc_system(), &opened->tokenizer, &opened->diag);
}

static void open_tiny(struct opened *opened, const char *pre) {
    struct tiny_model_options options = tiny_model_default();
    size_t size;
    options.pre = pre;
    options.ffn = 32;
    uint8_t *file = tiny_model_make(&options, &size);
    assert_int_equal(open_bytes(opened, file, size), KV_OK);
}

static void open_real(struct opened *opened) {
    size_t size;
    testing_need_model();
    uint8_t *file = tiny_model_read_real(&size);
    assert_int_equal(open_bytes(opened, file, size), KV_OK);
    /* The tables are the tokenizer's own: file and gguf may go. */
    gguf_drop(opened->gguf);
    tiny_model_drop(opened->file);
    opened->gguf = NULL;
    opened->file = NULL;
}

static void close_all(struct opened *opened) {
    tokenizer_drop(opened->tokenizer);
    gguf_drop(opened->gguf);
    tiny_model_drop(opened->file);
}

static struct tokenizer_ids encode(struct opened *opened, const void *text, size_t bytes,
                                   unsigned flags) {
    struct tokenizer_ids ids = {.items = ids_memory, .capacity = IDS_MAX};
    assert_int_equal(tokenizer_encode(opened->tokenizer, text, bytes, flags, &ids, &opened->diag),
                     KV_OK);
    return ids;
}

static void expect_ids(const struct tokenizer_ids *ids, const cJSON *wanted, const char *what) {
    size_t at = 0;
    const cJSON *id;
    cJSON_ArrayForEach(id, wanted) {
        if (at >= ids->count || ids->items[at] != (uint32_t)id->valuedouble)
            fail_msg("%s: token %zu is %u, wanted %u", what, at,
                     at < ids->count ? ids->items[at] : 0, (uint32_t)id->valuedouble);
        at++;
    }
    if (at != ids->count)
        fail_msg("%s: %zu tokens, wanted %zu", what, ids->count, at);
}

static void expect_text(struct opened *opened, const struct tokenizer_ids *ids, const void *text,
                        size_t bytes) {
    static char back[IDS_MAX];
    size_t size = 0;
    for (size_t i = 0; i < ids->count; i++) {
        struct gguf_text piece = tokenizer_piece(opened->tokenizer, ids->items[i]);
        assert_true(piece.size_bytes <= sizeof back - size);
        memcpy(back + size, piece.bytes, (size_t)piece.size_bytes);
        size += (size_t)piece.size_bytes;
    }
    assert_int_equal(size, bytes);
    if (bytes != 0)
        assert_memory_equal(back, text, bytes);
}

static cJSON *read_json(const char *path) {
    static char text[1 << 20];
    FILE *stream = fopen(path, "rb");
    if (stream == NULL)
        fail_msg("%s is missing: run from the root of the tree", path);
    size_t size = fread(text, 1, sizeof text - 1, stream);
    fclose(stream);
    text[size] = 0;
    /* A C string ends at U+0000, so U+E0FF carries it; unescape_nul turns it back. */
    for (char *at = text; (at = strstr(at, "\\u0000")) != NULL;)
        memcpy(at, "\\ue0ff", 6);
    cJSON *json = cJSON_Parse(text);
    assert_non_null(json);
    return json;
}

static size_t unescape_nul(char *text) {
    size_t used = 0;
    for (const char *at = text; *at != 0; used++) {
        int nul = strncmp(at, "\xee\x83\xbf", 3) == 0;
        text[used] = nul ? (char)0 : *at;
        at += nul ? 3 : 1;
    }
    return used;
}

static void reference_ids_are_equal(void **state) {
    (void)state;
    struct opened opened;
    uint32_t valid = 0, special = 0;
    open_real(&opened);
    cJSON *json = read_json("tests/oracle/tokenizer_cases.json");
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "cases")) {
        const cJSON *text = cJSON_GetObjectItem(item, "text");
        const cJSON *parsed = cJSON_GetObjectItem(item, "ids_parse_special");
        if (text == NULL)
            continue;
        char *string = text->valuestring;
        size_t bytes = unescape_nul(string);
        struct tokenizer_ids ids = encode(&opened, string, bytes, 0);
        expect_ids(&ids, cJSON_GetObjectItem(item, "ids"), string);
        expect_text(&opened, &ids, string, bytes);
        ids = encode(&opened, string, bytes, TOKENIZER_PARSE_SPECIAL);
        expect_ids(&ids, parsed != NULL ? parsed : cJSON_GetObjectItem(item, "ids"), string);
        expect_text(&opened, &ids, string, bytes);
        valid++;
        special += parsed != NULL;
    }
    printf("%u reference strings, %u of them with control tokens\n", valid, special);
    assert_int_equal(valid, 213);
    assert_true(special >= 3);
    cJSON_Delete(json);
    close_all(&opened);
}

static void reference_prompts_are_equal(void **state) {
    (void)state;
    struct opened opened;
    uint32_t count = 0;
    open_real(&opened);
    cJSON *json = read_json("tests/oracle/oracle.json");
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "prompts")) {
        const char *text = cJSON_GetObjectItem(item, "text")->valuestring;
        struct tokenizer_ids ids =
            encode(&opened, text, strlen(text), TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_BOS);
        expect_ids(&ids, cJSON_GetObjectItem(item, "prompt_ids"),
                   cJSON_GetObjectItem(item, "name")->valuestring);
        count++;
    }
    assert_int_equal(count, 16);
    cJSON_Delete(json);
    close_all(&opened);
}

static void the_real_file_says_what_is_special(void **state) {
    (void)state;
    struct opened opened;
    open_real(&opened);
    struct tokenizer_info info = tokenizer_info(opened.tokenizer);
    assert_int_equal(info.vocab_count, 49152);
    assert_int_equal(info.bos_id, 1);
    assert_int_equal(info.eos_id, 2);
    assert_int_equal(info.unknown_id, 0);
    assert_int_equal(info.add_bos, 0);
    assert_true(tokenizer_is_stop(opened.tokenizer, 0) && tokenizer_is_stop(opened.tokenizer, 2));
    assert_false(tokenizer_is_stop(opened.tokenizer, 1));
    assert_true(tokenizer_is_control(opened.tokenizer, 16));
    assert_false(tokenizer_is_control(opened.tokenizer, 17));
    assert_int_equal(tokenizer_special(opened.tokenizer, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_special(opened.tokenizer, "<|im_"), TOKENIZER_NONE);
    close_all(&opened);
}

static void bytes_without_a_token_are_counted(void **state) {
    (void)state;
    struct opened opened;
    open_real(&opened);
    /* 04 and ff have no token; e4 has one, also where it begins no character. */
    struct tokenizer_ids ids = encode(&opened,
                                      "a\x04"
                                      "b\xff\xe4z",
                                      6, 0);
    assert_int_equal(ids.replaced_bytes, 2);
    assert_int_equal(ids.count, 6);
    expect_text(&opened, &ids,
                "a\xef\xbf\xbd"
                "b\xef\xbf\xbd\xe4z",
                10);
    close_all(&opened);
}

/* Bytes that often form characters, words and broken characters. */
static size_t random_text(struct testing_random *random, uint8_t *text, size_t bytes_max) {
    static const char *const parts[] = {
        " the",     "and", "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x98\x80", "<|im_end|>", "12",
        "\n",       "  ",  "'s",       "\xff",         "\xed\xa0\x80",     "<|im_",      "\xc0\xaf",
        "\xf0\x9f", "user"};
    size_t used = 0;
    size_t wanted = (size_t)testing_random_below(random, bytes_max - 16);
    while (used < wanted) {
        uint64_t choice = testing_random_below(random, 24);
        if (choice >= 16) {
            text[used++] = (uint8_t)testing_random_u64(random);
            continue;
        }
        memcpy(text + used, parts[choice], strlen(parts[choice]));
        used += strlen(parts[choice]);
    }
    return used;
}

static void any_bytes_come_back(void **state) {
    (void)state;
    static const char *const names[] = {"smollm", "llama-bpe", "qwen2", "gpt-2"};
    struct testing_random random;
    uint8_t text[512];
    testing_random_init(&random, testing_seed("round trip", 7));
    for (int i = 0; i < 4; i++) {
        struct opened opened;
        open_tiny(&opened, names[i]);
        for (int round = 0; round < 500; round++) {
            size_t bytes = random_text(&random, text, sizeof text);
            struct tokenizer_ids ids = encode(&opened, text, bytes, 0);
            assert_int_equal(ids.replaced_bytes, 0);
            assert_true(ids.count <= bytes);
            for (size_t k = 0; k < ids.count; k++)
                assert_false(tokenizer_is_control(opened.tokenizer, ids.items[k]));
            expect_text(&opened, &ids, text, bytes);
            ids = encode(&opened, text, bytes, TOKENIZER_PARSE_SPECIAL);
            expect_text(&opened, &ids, text, bytes);
        }
        close_all(&opened);
    }
}

static void the_real_vocabulary_gives_bytes_back(void **state) {
    (void)state;
    struct opened opened;
    struct testing_random random;
    uint8_t text[512];
    uint32_t exact = 0;
    open_real(&opened);
    testing_random_init(&random, testing_seed("round trip", 8));
    for (int round = 0; round < 1000; round++) {
        size_t bytes = random_text(&random, text, 64);
        struct tokenizer_ids ids = encode(&opened, text, bytes, 0);
        assert_true(ids.count <= bytes);
        if (ids.replaced_bytes != 0)
            continue;
        expect_text(&opened, &ids, text, bytes);
        exact++;
    }
    assert_true(exact > 100);
    close_all(&opened);
}

static void long_text_takes_no_square(void **state) {
    (void)state;
    static char text[1 << 20];
    static const char *const names[] = {"prose",  "one letter", "two letters",
                                        "spaces", "digits",     "marks"};
    static const char *const units[] = {
        "The quick brown fox jumps over 12 lazy dogs. ", "a", "ab", " ", "1", "=-"};
    struct opened opened;
    const struct kv_clock *clock = kv_clock_system();
    open_real(&opened);
    for (size_t i = 0; i < 6; i++) {
        size_t unit = strlen(units[i]);
        for (size_t at = 0; at < sizeof text; at++)
            text[at] = units[i][at % unit];
        uint64_t start = kv_clock_now_ns(clock);
        struct tokenizer_ids ids = encode(&opened, text, sizeof text, TOKENIZER_PARSE_SPECIAL);
        double seconds = (double)(kv_clock_now_ns(clock) - start) * 1e-9;
        printf("1 MiB of %s: %.2f s, %zu tokens\n", names[i], seconds, ids.count);
        expect_text(&opened, &ids, text, sizeof text);
        /* A square would be 10^12 steps; the bound leaves room for sanitizers and neighbours. */
        assert_true(seconds < 20.0);
    }
    close_all(&opened);
}

static void a_short_buffer_tells_the_need(void **state) {
    (void)state;
    struct opened opened;
    uint32_t few[4] = {9, 9, 9, 9};
    struct tokenizer_ids ids = {.items = few, .capacity = 3, .count = 1};
    open_tiny(&opened, "smollm");
    assert_int_equal(tokenizer_encode(opened.tokenizer, "zzzzz", 5, 0, &ids, &opened.diag),
                     KV_ERR_LIMIT);
    assert_int_equal(ids.count, 6);
    assert_non_null(strstr(opened.diag.text, "6 tokens"));
    assert_true(few[0] == 9 && few[1] != 9 && few[2] != 9 && few[3] == 9);
    uint32_t vocab_count = tokenizer_info(opened.tokenizer).vocab_count;
    assert_int_equal(tokenizer_piece(opened.tokenizer, vocab_count).size_bytes, 0);
    assert_int_not_equal(tokenizer_piece(opened.tokenizer, vocab_count - 1).size_bytes, 0);
    ids.count = 0;
    assert_int_equal(tokenizer_encode(opened.tokenizer, few, (size_t)TOKENIZER_TEXT_BYTES_MAX + 1,
                                      0, &ids, &opened.diag),
                     KV_ERR_INVALID);
    close_all(&opened);
}

static void control_tokens_are_known(void **state) {
    (void)state;
    struct opened opened;
    open_tiny(&opened, "smollm");
    struct tokenizer_ids ids =
        encode(&opened, "<|im_start|>the<|im_end|>", 25, TOKENIZER_PARSE_SPECIAL);
    assert_int_equal(ids.items[0], 1);
    assert_int_equal(ids.items[ids.count - 1], 2);
    for (size_t i = 0; i < ids.count; i++)
        assert_int_equal(tokenizer_is_control(opened.tokenizer, ids.items[i]),
                         i == 0 || i == ids.count - 1);
    close_all(&opened);
}

static void streams_give_whole_characters(void **state) {
    (void)state;
    static const uint8_t text[] = "a\xf0\x9f\x98\x80\xff\xe4\xb8z\xed\xa0\x80\xc3";
    static const char wanted[] = "a\xf0\x9f\x98\x80\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdz"
                                 "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd";
    for (size_t step = 1; step <= sizeof text - 1; step++) {
        struct tokenizer_stream stream = {0};
        char out[256];
        size_t used = 0;
        for (size_t at = 0; at < sizeof text - 1; at += step) {
            size_t count = at + step < sizeof text - 1 ? step : sizeof text - 1 - at;
            used += tokenizer_stream_push(&stream, text + at, count, out + used);
            if (step == 1 && at >= 1 && at < 4)
                assert_int_equal(used, 1); /* the face is held until its last byte */
        }
        used += tokenizer_stream_end(&stream, out + used);
        assert_int_equal(used, sizeof wanted - 1);
        assert_memory_equal(out, wanted, used);
    }
}

struct worker {
    const struct tokenizer *tokenizer;
    const char *text;
    uint32_t items[4096];
    size_t count;
};

static void *encode_often(void *argument) {
    struct worker *worker = argument;
    for (int i = 0; i < 50; i++) {
        struct tokenizer_ids ids = {.items = worker->items, .capacity = 4096};
        if (tokenizer_encode(worker->tokenizer, worker->text, strlen(worker->text), 0, &ids,
                             NULL) != KV_OK)
            return NULL;
        worker->count = ids.count;
    }
    return NULL;
}

static void threads_agree(void **state) {
    (void)state;
    static struct worker workers[4];
    static const char text[] = "the anderings of the system, in the rain and on the river: 1234 "
                               "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    struct opened opened;
    pthread_t threads[4];
    open_tiny(&opened, "smollm");
    struct tokenizer_ids ids = encode(&opened, text, strlen(text), 0);
    for (int i = 0; i < 4; i++) {
        workers[i] = (struct worker){.tokenizer = opened.tokenizer, .text = text};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].count, ids.count);
        assert_memory_equal(workers[i].items, ids.items, ids.count * sizeof ids.items[0]);
    }
    close_all(&opened);
}

static void expect_refused(uint8_t *file, size_t size, enum kv_err wanted, const char *part) {
    struct opened opened;
    enum kv_err err = open_bytes(&opened, file, size);
    if (err != wanted || strstr(opened.diag.text, part) == NULL)
        fail_msg("%s: \"%s\"; wanted %s: \"%s\"", kv_err_name(err), opened.diag.text,
                 kv_err_name(wanted), part);
    assert_null(opened.tokenizer);
    close_all(&opened);
}

static void foreign_tokenizers_are_refused_by_name(void **state) {
    (void)state;
    /* Each row changes bytes at a distance behind a text that stands once in the file. */
    static const struct {
        const char *text;
        size_t behind;
        const char *bytes;
        enum kv_err err;
        const char *part;
    } rows[] = {{"tokenizer.ggml.model", 12, "bert", KV_ERR_MISMATCH, "\"bert\""},
                {"tokenizer.ggml.pre", 12, "tekken", KV_ERR_MISMATCH, "\"tekken\""},
                {"tokenizer.ggml.token_type", 16, "\7", KV_ERR_CORRUPT, "token 0"},
                {"tokenizer.ggml.merges", 16 + 8, "q", KV_ERR_CORRUPT, "merge 0"},
                {"tokenizer.ggml.bos_token_id", 4, "\xff\xff", KV_ERR_CORRUPT, "bos_token_id"},
                {"tokenizer.ggml.toke", 0, "x", KV_ERR_CORRUPT, "tokenizer.ggml.tokens"},
                {"tokenizer.ggml.merge", 0, "x", KV_ERR_CORRUPT, "tokenizer.ggml.merges"},
                {"tokenizer.ggml.pr", 0, "x", KV_ERR_CORRUPT, "tokenizer.ggml.pre"},
                {"tokenizer.ggml.mode", 0, "x", KV_ERR_CORRUPT, "tokenizer.ggml.model"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct tiny_model_options options = tiny_model_default();
        size_t size;
        options.ffn = 32;
        uint8_t *file = tiny_model_make(&options, &size);
        uint8_t *at = memmem(file, size, rows[i].text, strlen(rows[i].text));
        assert_non_null(at);
        memcpy(at + strlen(rows[i].text) + rows[i].behind, rows[i].bytes, strlen(rows[i].bytes));
        expect_refused(file, size, rows[i].err, rows[i].part);
    }
}

static void the_digest_sees_order(void **state) {
    (void)state;
    struct opened one, two;
    open_tiny(&one, "smollm");
    open_tiny(&two, "qwen2");
    struct kv_digest a = tokenizer_digest(one.tokenizer), b = tokenizer_digest(two.tokenizer);
    assert_memory_not_equal(&a, &b, sizeof a);
    close_all(&two);
    open_tiny(&two, "smollm");
    b = tokenizer_digest(two.tokenizer);
    assert_memory_equal(&a, &b, sizeof a);
    close_all(&two);
    close_all(&one);
}

static void allocation_failures_leave_nothing(void **state) {
    (void)state;
    struct opened opened;
    uint64_t refused = 0;
    open_tiny(&opened, "smollm");
    for (uint64_t k = 1;; k++) {
        struct testing_alloc testing;
        struct tokenizer *tokenizer = NULL;
        struct tokenizer_ids ids = {.items = ids_memory, .capacity = 4096, .count = 3};
        static const char text[] = "the aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
        testing_alloc_init(&testing, k);
        enum kv_err err = tokenizer_make(opened.gguf, &testing.alloc, &tokenizer, &opened.diag);
        if (err == KV_OK)
            err = tokenizer_encode(tokenizer, text, strlen(text), 0, &ids, &opened.diag);
        /* Only machine code for the expressions may be missing without an error. */
        assert_true(err == KV_OK || (err == KV_ERR_NOMEM && testing.failed_count != 0));
        if (err != KV_OK)
            assert_int_equal(ids.count, 3);
        refused += err != KV_OK;
        tokenizer_drop(tokenizer);
        assert_int_equal(testing.live_count, 0);
        if (testing.failed_count == 0)
            break;
    }
    assert_true(refused > 15);
    close_all(&opened);
}

TESTING_MAIN(
    cmocka_unit_test(reference_ids_are_equal), cmocka_unit_test(reference_prompts_are_equal),
    cmocka_unit_test(the_real_file_says_what_is_special),
    cmocka_unit_test(bytes_without_a_token_are_counted), cmocka_unit_test(any_bytes_come_back),
    cmocka_unit_test(the_real_vocabulary_gives_bytes_back),
    cmocka_unit_test(long_text_takes_no_square), cmocka_unit_test(a_short_buffer_tells_the_need),
    cmocka_unit_test(control_tokens_are_known), cmocka_unit_test(streams_give_whole_characters),
    cmocka_unit_test(threads_agree), cmocka_unit_test(foreign_tokenizers_are_refused_by_name),
    cmocka_unit_test(the_digest_sees_order), cmocka_unit_test(allocation_failures_leave_nothing))
