/* tests/test_pretokenize.c - where the pre-tokenizers cut.
 *
 * Responsible for: each scheme on cases written by hand, bytes that are not UTF-8, and that every
 * byte is in exactly one piece.
 * Not responsible for: ids (test_tokenizer.c).
 */
#include "engine/model/pretokenize.h"

#include "tests/testing.h"

#include <string.h>

struct cut {
    char text[4096];
    size_t used;
};

/* Joins the pieces with a bar between them. */
static enum kv_err join(void *context, const uint8_t *piece, size_t bytes) {
    struct cut *cut = context;
    if (cut->used != 0)
        cut->text[cut->used++] = '|';
    assert_true(bytes != 0 && cut->used + bytes + 1 < sizeof cut->text);
    memcpy(cut->text + cut->used, piece, bytes);
    cut->used += bytes;
    return KV_OK;
}

static void expect(const char *name, const char *text, const char *wanted) {
    struct pretokenize *pretokenize = NULL;
    struct kv_diag diag;
    struct cut cut = {.used = 0};
    struct gguf_text scheme = {.bytes = name, .size_bytes = strlen(name)};
    assert_int_equal(pretokenize_make(scheme, kv_alloc_system(), &pretokenize, &diag), KV_OK);
    assert_int_equal(pretokenize_split(pretokenize, text, strlen(text), join, &cut), KV_OK);
    cut.text[cut.used] = 0;
    if (strcmp(cut.text, wanted) != 0)
        fail_msg("%s cuts \"%s\" as \"%s\", wanted \"%s\"", name, text, cut.text, wanted);
    pretokenize_drop(pretokenize);
}

static void gpt_2_cuts(void **state) {
    (void)state;
    expect("gpt-2", "Hello world! 123", "Hello| world|!| 123");
    expect("gpt-2", "I'll don't DON'T", "I|'ll| don|'t| DON|'|T");
    expect("gpt-2", "a  b\t\tc\n", "a| | b|\t|\t|c|\n");
    expect("gpt-2", "x\xc2\xa0y", "x|\xc2\xa0|y");
    expect("gpt-2", "", "");
}

static void smollm_cuts_single_digits(void **state) {
    (void)state;
    expect("smollm", "Hello world! 123", "Hello| world|!| |1|2|3");
    expect("smollm", "a1b", "a|1|b");
    expect("smollm", "  12", "  |1|2");
    expect("smollm", "\xd9\xa3\xc2\xbd", "\xd9\xa3|\xc2\xbd");
}

static void llama_bpe_cuts_three_digits(void **state) {
    (void)state;
    expect("llama-bpe", "Hello world! 1234", "Hello| world|!| |123|4");
    expect("llama-bpe", "DON'T don't I'LL", "DON|'T| don|'t| I|'LL");
    expect("llama-bpe", "a\n\nb  c", "a|\n\n|b| | c");
    expect("llama-bpe", "(x) !!\n\n y", "(x|)| !!\n\n| y");
    expect("llama-bpe", "x  \n  z", "x|  \n| | z");
    expect("llama-bpe", "end   ", "end|   ");
}

static void qwen2_cuts_single_digits(void **state) {
    (void)state;
    expect("qwen2", "Hello 123", "Hello| |1|2|3");
    expect("qwen2", "don'T\r\nx", "don|'T|\r\n|x");
}

static void white_space_is_unicodes(void **state) {
    (void)state;
    /* U+180E is no white space, U+0085 and U+3000 are. */
    expect("gpt-2",
           "a\xe1\xa0\x8e"
           "b",
           "a|\xe1\xa0\x8e|b");
    expect("gpt-2", "!\xe3\x80\x80!", "!|\xe3\x80\x80|!");
    expect("gpt-2", "!\xc2\x85!", "!|\xc2\x85|!");
    expect("gpt-2", "!\xe1\xa0\x8e!", "!\xe1\xa0\x8e!");
}

static void bytes_that_are_not_utf8_stand_alone(void **state) {
    (void)state;
    expect("gpt-2",
           "ab\xff"
           "cd",
           "ab|\xff|cd");
    expect("gpt-2",
           "ab\xe4\xb8"
           "cd",
           "ab|\xe4|\xb8|cd");
    expect("gpt-2", "ab  \xff", "ab|  |\xff");
    expect("llama-bpe", "\xed\xa0\x80x\xc3", "\xed|\xa0|\x80|x|\xc3");
    expect("smollm", "\xf4\x90\x80\x80\xc0\xaf", "\xf4|\x90|\x80|\x80|\xc0|\xaf");
}

static enum kv_err refuse(void *context, const uint8_t *piece, size_t bytes) {
    (void)piece;
    (void)bytes;
    return ++*(int *)context == 2 ? KV_ERR_CANCELLED : KV_OK;
}

static void an_error_ends_the_split(void **state) {
    (void)state;
    struct pretokenize *pretokenize = NULL;
    struct gguf_text scheme = {.bytes = "smollm", .size_bytes = 6};
    int pieces = 0;
    assert_int_equal(pretokenize_make(scheme, kv_alloc_system(), &pretokenize, NULL), KV_OK);
    assert_int_equal(pretokenize_split(pretokenize, "a b c d", 7, refuse, &pieces),
                     KV_ERR_CANCELLED);
    assert_int_equal(pieces, 2);
    pretokenize_drop(pretokenize);
}

TESTING_MAIN(cmocka_unit_test(gpt_2_cuts), cmocka_unit_test(smollm_cuts_single_digits),
             cmocka_unit_test(llama_bpe_cuts_three_digits),
             cmocka_unit_test(qwen2_cuts_single_digits), cmocka_unit_test(white_space_is_unicodes),
             cmocka_unit_test(bytes_that_are_not_utf8_stand_alone),
             cmocka_unit_test(an_error_ends_the_split))
