/* tests/test_text.c - sizes, durations, stamps, whole streams, and the one mapping to exit codes.
 *
 * Responsible for: text.h but for text_print_clean (test_receipt_print.c), licences.h, and
 * cmd_exit_code.
 * Not responsible for: where the texts appear.
 */
#include "tools/text.h"

#include "tests/testing.h"
#include "tools/cmd.h"
#include "tools/licences.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void sizes_and_durations_have_units(void **state) {
    char text[TEXT_SHORT_BYTES];
    (void)state;
    assert_string_equal(text_size(0, text), "0 B");
    assert_string_equal(text_size(1023, text), "1023 B");
    assert_string_equal(text_size(1536, text), "1.5 KiB");
    assert_string_equal(text_size(UINT64_C(9) << 30, text), "9.0 GiB");
    assert_string_equal(text_size(UINT64_MAX, text), "16777216.0 TiB");
    assert_string_equal(text_duration(0, text), "0 µs");
    assert_string_equal(text_duration(85400, text), "85 µs");
    assert_string_equal(text_duration(34500000, text), "34.5 ms");
    assert_string_equal(text_duration(340000000, text), "340 ms");
    assert_string_equal(text_duration(1500000000, text), "1.50 s");
    assert_string_equal(text_duration(UINT64_C(93400000000), text), "93.4 s");
    assert_string_equal(text_when(UINT64_C(1700000000123456789), text), "2023-11-14 22:13:20");
    assert_string_equal(text_when(0, text), "1970-01-01 00:00:00");
}

static void bad_bytes_become_the_replacement_character(void **state) {
    static const struct {
        const char *given, *valid;
    } cases[] = {{"", ""},
                 {"caf\xc3\xa9 \xf0\x9f\x98\x80", "caf\xc3\xa9 \xf0\x9f\x98\x80"},
                 {"a\xff"
                  "b",
                  "a\xef\xbf\xbd"
                  "b"},
                 {"\xc3", "\xef\xbf\xbd"},
                 {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xe0\x9f\xbf", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xe2\x82\xac\xe2\x82", "\xe2\x82\xac\xef\xbf\xbd\xef\xbf\xbd"}};
    char out[64];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t bytes = text_valid(cases[i].given, strlen(cases[i].given), out);
        assert_string_equal(out, cases[i].valid);
        assert_int_equal(bytes, strlen(out));
        assert_int_equal(text_is_plain(cases[i].given), strcmp(cases[i].given, out) == 0);
    }
    assert_false(text_is_plain("a\nb"));
    assert_false(text_is_plain("a\x1b[2J"));
    assert_false(text_is_plain("a\xe2\x80\xae"
                               "b"));
}

static FILE *stream_of(size_t bytes) {
    FILE *file = tmpfile();
    for (size_t i = 0; i < bytes; i++)
        putc((int)(i % 251), file);
    rewind(file);
    return file;
}

static void a_stream_is_read_to_its_end(void **state) {
    static const size_t sizes[] = {0, 1, 65534, 65535, 65536, 300001};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *text = NULL;
        size_t bytes = 0;
        FILE *file = stream_of(sizes[i]);
        assert_int_equal(text_read_all(file, kv_alloc_system(), &text, &bytes, NULL), KV_OK);
        assert_int_equal(bytes, sizes[i]);
        assert_int_equal(text[bytes], 0);
        for (size_t at = 0; at < bytes; at += 997)
            assert_int_equal((unsigned char)text[at], at % 251);
        kv_alloc_release(kv_alloc_system(), text);
        fclose(file);
    }
}

static void a_stream_that_cannot_be_read_is_an_error(void **state) {
    struct testing_alloc testing;
    struct kv_diag diag = {""};
    char *text = NULL;
    size_t bytes = 0;
    (void)state;
    for (uint64_t k = 1;; k++) {
        FILE *file = stream_of(300000);
        testing_alloc_init(&testing, k);
        enum kv_err err = text_read_all(file, &testing.alloc, &text, &bytes, &diag);
        fclose(file);
        if (err == KV_OK)
            kv_alloc_release(&testing.alloc, text);
        assert_int_equal(testing.live_count, 0);
        assert_int_equal(err, testing.failed_count > 0 ? KV_ERR_NOMEM : KV_OK);
        if (err == KV_OK)
            break;
    }
    FILE *folder = fopen("/", "re");
    assert_non_null(folder);
    assert_int_equal(text_read_all(folder, kv_alloc_system(), &text, &bytes, &diag), KV_ERR_IO);
    assert_non_null(strstr(diag.text, "standard input"));
    fclose(folder);
}

static void documents_are_cut_and_differ(void **state) {
    (void)state;
    const struct kv_alloc *alloc = kv_alloc_system();
    struct licences *licences = NULL;
    char *texts[3] = {NULL, NULL, NULL};
    enum kv_err err = licences_load(alloc, &licences, NULL);
    if (err == KV_ERR_NOT_FOUND)
        testing_skip("no licence texts on this machine");
    assert_int_equal(err, KV_OK);
    for (uint32_t i = 0; i < 3; i++) {
        /* The third is longer than its slice, so it takes all paragraphs in its own order. */
        struct licences_document document = {i, 3, i == 2 ? 200000 : 9000, "The fact.", 0.5};
        assert_int_equal(licences_document(licences, &document, &texts[i], NULL), KV_OK);
        const char *fact = strstr(texts[i], "The fact.");
        assert_non_null(fact);
        assert_in_range(fact - texts[i], document.bytes / 3, document.bytes * 2 / 3);
        assert_in_range(strlen(texts[i]), document.bytes - 100, document.bytes + 100);
        assert_null(strpbrk(texts[i], "0123456789"));
    }
    assert_string_not_equal(texts[0], texts[1]);
    for (uint32_t i = 0; i < 3; i++)
        kv_alloc_release(alloc, texts[i]);
    licences_drop(licences);
}

static void every_error_has_its_exit_code(void **state) {
    static const int codes[KV_ERR_COUNT] = {[KV_OK] = 0,
                                            [KV_ERR_INVALID] = 1,
                                            [KV_ERR_NOT_FOUND] = 2,
                                            [KV_ERR_EXISTS] = 3,
                                            [KV_ERR_BUSY] = 3,
                                            [KV_ERR_LIMIT] = 3,
                                            [KV_ERR_NO_SLOTS] = 3,
                                            [KV_ERR_MISMATCH] = 3,
                                            [KV_ERR_VERSION] = 3,
                                            [KV_ERR_CANCELLED] = 3,
                                            [KV_ERR_CORRUPT] = 4,
                                            [KV_ERR_IO] = 5,
                                            [KV_ERR_NO_SPACE] = 5,
                                            [KV_ERR_NOMEM] = 6,
                                            [KV_ERR_DEVICE] = 6,
                                            [KV_ERR_PROOF] = 7};
    (void)state;
    for (int err = 0; err < KV_ERR_COUNT; err++)
        assert_int_equal(cmd_exit_code((enum kv_err)err), codes[err]);
}

TESTING_MAIN(cmocka_unit_test(sizes_and_durations_have_units),
             cmocka_unit_test(bad_bytes_become_the_replacement_character),
             cmocka_unit_test(a_stream_is_read_to_its_end),
             cmocka_unit_test(a_stream_that_cannot_be_read_is_an_error),
             cmocka_unit_test(documents_are_cut_and_differ),
             cmocka_unit_test(every_error_has_its_exit_code))
