/* tests/test_receipt_print.c - receipts as JSON and as tables.
 *
 * Responsible for: the names and values of the published schema, ids that do not lose digits, text
 * that cannot harm a terminal.
 * Not responsible for: receipts of real operations (test_cli.c).
 *
 * Fails with BREAK_CLEAN_TEXT (control characters pass).
 */
#include "tools/receipt_print.h"

#include "tests/testing.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct receipt example(void) {
    struct receipt receipt;
    memset(&receipt, 0, sizeof receipt);
    receipt.operation = RECEIPT_RESTORE;
    snprintf(receipt.name, sizeof receipt.name, "d\xc3\xa9j\xc3\xa0 \xf0\x9f\x98\x80");
    receipt.snapshot = UINT64_C(0xfedcba9876543210);
    receipt.lineage = 3;
    receipt.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};
    receipt.tokens = receipt.tokens_reused = 2048;
    receipt.blocks = 6;
    receipt.pages = 7;
    receipt.tier_blocks[LAYOUT_K8V4] = 2;
    receipt.tier_blocks[LAYOUT_K6V2] = 4;
    receipt.raw_bytes[LAYOUT_KH] = 1000;
    receipt.stored_bytes[LAYOUT_KH] = 800;
    receipt.stored_bytes[LAYOUT_VX] = 50;
    receipt.door_bytes = UINT64_C(5) << 32;
    receipt.digests_checked = 44;
    receipt.fingerprint = RECEIPT_BITS_EQUAL;
    receipt.needles_recorded = receipt.needles_asked = receipt.needles_passed = 1;
    receipt.needles_kept = 1;
    receipt.stage_ns[RECEIPT_READ] = 3000000;
    receipt.stage_ns[RECEIPT_PROVE] = 9000000;
    receipt.load_ns = 4000000;
    receipt.unzip_threads = 3;
    receipt.wall_ns = 10000000;
    receipt.direct = 1;
    snprintf(receipt.door, sizeof receipt.door, "io_uring");
    receipt_finish(&receipt);
    return receipt;
}

static const cJSON *member(const cJSON *from, const char *name) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(from, name);
    if (found == NULL)
        fail_msg("the schema lost %s", name);
    return found;
}

static double number(const cJSON *from, const char *name) {
    assert_true(cJSON_IsNumber(member(from, name)));
    return cJSON_GetNumberValue(member(from, name));
}

static void assert_text(const cJSON *from, const char *name, const char *text) {
    assert_true(cJSON_IsString(member(from, name)));
    assert_string_equal(cJSON_GetStringValue(member(from, name)), text);
}

static void json_has_every_field(void **state) {
    (void)state;
    struct receipt receipt = example();
    cJSON *made = receipt_print_json(&receipt);
    char *text = cJSON_Print(made);
    cJSON *json = cJSON_Parse(text);
    assert_non_null(json);
    assert_text(json, "schema", "coldplane-receipt");
    assert_true(number(json, "version") == RECEIPT_VERSION);
    assert_text(json, "operation", "restore");
    assert_text(json, "result", "ok");
    assert_text(json, "name", receipt.name);
    assert_text(json, "snapshot", "fedcba9876543210");
    assert_text(json, "lineage", "0000000000000003");
    assert_text(json, "recipe", "v3");
    assert_int_equal(cJSON_GetArraySize(member(json, "ages")), 3);
    assert_true(number(json, "tokens_reused") == 2048);
    assert_true(number(json, "tokens_prefilled") == 0);
    assert_true(number(member(json, "tier_blocks"), "K6V2") == 4);
    assert_true(number(json, "raw_bytes") == 1000);
    assert_true(number(json, "stored_bytes") == 850);
    assert_true(number(member(member(json, "streams"), "KH"), "stored_bytes") == 800);
    assert_true(number(member(member(json, "streams"), "VX"), "stored_bytes") == 50);
    assert_true(number(json, "door_bytes") == 21474836480.0);
    assert_text(json, "fingerprint", "bits-equal");
    assert_true(number(member(json, "needles"), "kept") == 1);
    assert_true(number(member(json, "stage_ns"), "read") == 3000000);
    assert_true(number(json, "load_ns") == 4000000);
    assert_true(number(json, "unzip_threads") == 3);
    assert_text(json, "bound_by", "prove");
    assert_true(cJSON_IsTrue(member(json, "direct")));
    cJSON_Delete(json);
    cJSON_free(text);
    cJSON_Delete(made);
}

static char *printed(void (*print)(const struct receipt *, FILE *), const struct receipt *receipt) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    print(receipt, out);
    fclose(out);
    return text;
}

static void table_says_what_a_person_needs(void **state) {
    static const char *const parts[] = {
        "restore of session d\xc3\xa9j\xc3\xa0 \xf0\x9f\x98\x80: ok",
        "2048, reused 2048, prefilled 0",
        "K6V2 × 4",
        "44 checked, 0 failed",
        "bits-equal",
        "1 kept, 1 asked, 1 passed",
        "bound by prove",
        "io_uring, O_DIRECT",
        "through the door 20.0 GiB"};
    (void)state;
    struct receipt receipt = example();
    char *text = printed(receipt_print_table, &receipt);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (strstr(text, parts[i]) == NULL)
            fail_msg("the table lacks `%s`:\n%s", parts[i], text);
    free(text);
    text = printed(receipt_print_line, &receipt);
    assert_non_null(strstr(text, "2048 tokens reused, 0 prefilled"));
    free(text);
}

/* Fails with BREAK_CLEAN_TEXT. */
static void a_refused_one_gives_the_reason(void **state) {
    (void)state;
    struct receipt receipt = example();
    receipt.err = KV_ERR_CORRUPT;
    snprintf(receipt.reason, sizeof receipt.reason, "block 3, VR1: digest \x1b[2Jdiffers");
    char *text = printed(receipt_print_table, &receipt);
    assert_non_null(strstr(text, ": corrupt\n"));
    assert_non_null(strstr(text, "block 3, VR1: digest [2Jdiffers"));
    free(text);
    cJSON *json = receipt_print_json(&receipt);
    assert_text(json, "result", "corrupt");
    assert_text(json, "reason", receipt.reason);
    cJSON_Delete(json);
}

static void an_empty_one_prints(void **state) {
    (void)state;
    struct receipt receipt;
    memset(&receipt, 0, sizeof receipt);
    char *text = printed(receipt_print_table, &receipt);
    assert_true(strlen(text) > 0);
    free(text);
    cJSON *json = receipt_print_json(&receipt);
    assert_text(json, "operation", "unknown");
    cJSON_Delete(json);
}

static void terminals_get_no_control_characters(void **state) {
    static const char dirty[] = "a\x1b[31mb\x07\tc\nd\x7f\xc2\x9b"
                                "e\xe2\x80\xae"
                                "f\xff\xc0\x80"
                                "\xf0\x9f\x98\x80\xe2\x80";
    char *text = NULL;
    size_t bytes = 0;
    (void)state;
    FILE *out = open_memstream(&text, &bytes);
    text_print_clean(out, dirty, sizeof dirty - 1);
    fclose(out);
    assert_string_equal(text, "a[31mb\tc\ndef???\xf0\x9f\x98\x80??");
    free(text);
}

TESTING_MAIN(cmocka_unit_test(json_has_every_field),
             cmocka_unit_test(table_says_what_a_person_needs),
             cmocka_unit_test(a_refused_one_gives_the_reason),
             cmocka_unit_test(an_empty_one_prints),
             cmocka_unit_test(terminals_get_no_control_characters))
