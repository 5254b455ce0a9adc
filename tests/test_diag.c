/* tests/test_diag.c - error text and the names of error codes.
 *
 * Responsible for: cutting, cleaning, prefixes, NULL diags, and a distinct name for every code.
 * Not responsible for: what each module writes into its diag.
 */
#include "store/base/diag.h"

#include "tests/testing.h"

#include <errno.h>
#include <string.h>

static void set_returns_the_error_and_writes_the_text(void **state) {
    (void)state;
    struct kv_diag diag;
    assert_int_equal(kv_diag_set(&diag, KV_ERR_LIMIT, "%s has %d", "chat", 7), KV_ERR_LIMIT);
    assert_string_equal(diag.text, "chat has 7");
    kv_diag_clear(&diag);
    assert_string_equal(diag.text, "");
}

static void errno_text_follows(void **state) {
    (void)state;
    struct kv_diag diag;
    assert_int_equal(kv_diag_errno(&diag, KV_ERR_IO, ENOENT, "open %s", "x.seg"), KV_ERR_IO);
    assert_string_equal(diag.text, "open x.seg: No such file or directory");
}

static void prefix_goes_in_front(void **state) {
    (void)state;
    struct kv_diag diag;
    kv_diag_set(&diag, KV_ERR_IO, "short read");
    kv_diag_prefix(&diag, "session %s", "tea");
    assert_string_equal(diag.text, "session tea: short read");
}

static void controls_become_question_marks(void **state) {
    (void)state;
    struct kv_diag diag;
    kv_diag_set(&diag, KV_ERR_INVALID, "a%cb%cc\xc3\xa9", 27, 127);
    assert_string_equal(diag.text, "a?b?c\xc3\xa9");
    kv_diag_prefix(&diag, "x\ny");
    assert_string_equal(diag.text, "x?y: a?b?c\xc3\xa9");
    kv_diag_errno(&diag, KV_ERR_IO, EIO, "\t");
    assert_int_equal(diag.text[0], '?');
}

static void long_text_is_cut_and_terminated(void **state) {
    (void)state;
    struct {
        struct kv_diag diag;
        char guard[16];
    } box;
    char name[2 * KV_DIAG_BYTES];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = 0;
    memset(&box, 'G', sizeof box);
    kv_diag_set(&box.diag, KV_ERR_LIMIT, "%s", name);
    assert_int_equal(strlen(box.diag.text), KV_DIAG_BYTES - 1);
    kv_diag_prefix(&box.diag, "%s", name);
    assert_int_equal(strlen(box.diag.text), KV_DIAG_BYTES - 1);
    kv_diag_errno(&box.diag, KV_ERR_IO, EIO, "%s", name);
    assert_int_equal(strlen(box.diag.text), KV_DIAG_BYTES - 1);
    for (size_t i = 0; i < sizeof box.guard; i++)
        assert_int_equal(box.guard[i], 'G');
}

static void null_diag_keeps_the_error(void **state) {
    (void)state;
    assert_int_equal(kv_diag_set(NULL, KV_ERR_CORRUPT, "x"), KV_ERR_CORRUPT);
    assert_int_equal(kv_diag_errno(NULL, KV_ERR_IO, EIO, "x"), KV_ERR_IO);
    kv_diag_prefix(NULL, "x");
    kv_diag_clear(NULL);
}

static void every_code_has_its_own_name(void **state) {
    (void)state;
    for (int i = 0; i < KV_ERR_COUNT; i++) {
        const char *name = kv_err_name((enum kv_err)i);
        assert_non_null(name);
        assert_string_not_equal(name, "");
        assert_string_not_equal(name, "unknown");
        for (int j = 0; j < i; j++)
            assert_string_not_equal(name, kv_err_name((enum kv_err)j));
    }
    assert_string_equal(kv_err_name(KV_ERR_COUNT), "unknown");
    assert_string_equal(kv_err_name((enum kv_err) - 1), "unknown");
}

TESTING_MAIN(cmocka_unit_test(set_returns_the_error_and_writes_the_text),
             cmocka_unit_test(errno_text_follows), cmocka_unit_test(prefix_goes_in_front),
             cmocka_unit_test(controls_become_question_marks),
             cmocka_unit_test(long_text_is_cut_and_terminated),
             cmocka_unit_test(null_diag_keeps_the_error),
             cmocka_unit_test(every_code_has_its_own_name))
