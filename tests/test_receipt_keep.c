/* tests/test_receipt_keep.c - receipts kept, listed, found and forgotten.
 *
 * Responsible for: tools/receipt_keep.h, and `coldplane receipt`.
 * Not responsible for: the fields of a receipt (test_receipt_print.c).
 */
#include "tools/receipt_keep.h"

#include "tests/support_cli.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void the_newest_are_kept(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES], dir[TESTING_PATH_BYTES + 16], file[TESTING_PATH_BYTES + 64];
    static uint64_t ids[RECEIPT_KEEP_MAX];
    uint64_t first = 0, last = 0;
    uint32_t count = 7;
    struct stat info;
    struct kv_diag diag = {""};
    cJSON *document = NULL;
    testing_temp_dir(base);
    snprintf(dir, sizeof dir, "%s/receipts", base);
    const struct receipt_keep keep = {dir, kv_clock_system(), kv_alloc_system()};
    assert_int_equal(receipt_keep_list(&keep, ids, &count, &diag), KV_OK);
    assert_int_equal(count, 0);
    struct receipt receipt = {.operation = RECEIPT_SAVE, .tokens = 12};
    for (int i = 0; i < RECEIPT_KEEP_MAX + 3; i++) {
        snprintf(receipt.name, sizeof receipt.name, i % 2 ? "odd" : "even");
        last = receipt_keep_add(&keep, &receipt);
        assert_true(last != 0);
        first = first != 0 ? first : last;
    }
    assert_int_equal(receipt_keep_list(&keep, ids, &count, &diag), KV_OK);
    assert_int_equal(count, RECEIPT_KEEP_MAX);
    assert_true(ids[0] == last && ids[count - 1] > first);
    assert_int_equal(receipt_keep_read(&keep, first, &document, &diag), KV_ERR_NOT_FOUND);
    assert_int_equal(receipt_keep_read(&keep, last, &document, &diag), KV_OK);
    assert_int_equal(cJSON_GetObjectItem(document, "tokens")->valueint, 12);
    cJSON_Delete(document);
    snprintf(file, sizeof file, "%s/%016" PRIx64 ".json", dir, last);
    assert_int_equal(stat(file, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(stat(dir, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0700);
    assert_int_equal(truncate(file, 5), 0);
    assert_int_equal(receipt_keep_read(&keep, last, &document, &diag), KV_ERR_CORRUPT);
    receipt_keep_forget(&keep, "odd");
    assert_int_equal(receipt_keep_list(&keep, ids, &count, &diag), KV_OK);
    assert_int_equal(count, RECEIPT_KEEP_MAX / 2 + (RECEIPT_KEEP_MAX + 2) % 2);
}

/* A folder that is a symbolic link leads nowhere, and nothing fails of it. */
static void links_are_not_followed(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES], dir[TESTING_PATH_BYTES + 16];
    testing_temp_dir(base);
    snprintf(dir, sizeof dir, "%s/receipts", base);
    assert_int_equal(symlink("/tmp", dir), 0);
    const struct receipt_keep keep = {dir, kv_clock_system(), kv_alloc_system()};
    const struct receipt receipt = {.operation = RECEIPT_SAVE};
    assert_true(receipt_keep_add(&keep, &receipt) == 0);
}

static void receipts_are_shown(void **state) {
    struct cli *cli = *state;
    char id[32];
    cli_call(cli, "receipt", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "no receipts"));
    cli_call(cli, "run", "trip", "--prompt", "words", "--max-tokens", "4", NULL);
    cli_good(cli);
    cli_call(cli, "restore", "trip", "--json", NULL);
    cli_good(cli);
    double read = cli_number(cli, "receipt.tokens_reused");
    cli_call(cli, "receipt", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipts.0.operation"), "restore");
    assert_string_equal(cli_text(cli, "receipts.1.operation"), "save");
    snprintf(id, sizeof id, "%s", cli_text(cli, "receipts.0.id"));
    cli_call(cli, "receipt", id, "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.tokens_reused") == read);
    cli_call(cli, "receipt", id, NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "fingerprint "));
    assert_non_null(strstr(cli->out, "bits-equal"));
    cli_call(cli, "receipt", "zz", NULL);
    cli_refused(cli, 1, "16 hex digits");
    cli_call(cli, "receipt", "1", NULL);
    cli_refused(cli, 2, "none is kept");
    /* They follow their session to another name, and go with it. */
    cli_call(cli, "rename", "trip", "oslo", NULL);
    cli_good(cli);
    cli_call(cli, "receipt", "--json", NULL);
    assert_string_equal(cli_text(cli, "receipts.0.name"), "oslo");
    assert_string_equal(cli_text(cli, "receipts.1.name"), "oslo");
    cli_call(cli, "rename", "oslo", "rome", NULL);
    cli_call(cli, "receipt", id, "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.name"), "rome");
    assert_string_equal(cli_text(cli, "receipt.former_name"), "trip");
    assert_true(cli_number(cli, "receipt.tokens_reused") == read);
    cli_call(cli, "rm", "rome", "--purge", NULL);
    cli_good(cli);
    cli_call(cli, "receipt", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "no receipts"));
}

TESTING_MAIN(cmocka_unit_test(the_newest_are_kept), cmocka_unit_test(links_are_not_followed),
             cmocka_unit_test_setup_teardown(receipts_are_shown, cli_set_up, cli_tear_down))
