/* tests/test_store_fsck.c - broken stores and what is said about them.
 *
 * Responsible for: golden broken stores with the expected report word for word, repair that loses
 * nothing more, an index that inspection leaves alone.
 * Not responsible for: sessions (test_snap_care.c).
 * Broken twins: BREAK_FSCK_CHAIN, BREAK_INSPECT.
 */
#include "store/store_fsck.h"

#include "store/store_batch.h"
#include "tests/support_golden.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

static const char golden[] = "tests/golden/v1/records_fsck";

struct report {
    char text[8192];
    size_t used;
};

static void on_finding(void *context, const struct store_fsck_finding *finding) {
    struct report *report = context;
    report->used +=
        (size_t)snprintf(report->text + report->used, sizeof report->text - report->used,
                         "%s %s %.*s: %s\n", finding->is_note ? "note" : "damage",
                         store_fsck_name(finding->kind), (int)finding->key_bytes,
                         finding->key != NULL ? (const char *)finding->key : "", finding->text);
    assert_true(report->used < sizeof report->text);
}

static struct store_fsck_report look(struct store *store, int repair, struct report *report) {
    struct store_fsck_report result;
    struct kv_diag diag = {""};
    memset(report, 0, sizeof *report);
    const struct store_fsck_args args = {
        .store = store, .read_data = 1, .repair = repair, .each = on_finding, .context = report};
    if (store_fsck(&args, &result, &diag) != KV_OK)
        fail_msg("fsck: %s", diag.text);
    return result;
}

static void one_case(const char *file_path) {
    char dir[TESTING_PATH_BYTES];
    char expected[SUPPORT_GOLDEN_TEXT_BYTES];
    static struct report report;
    struct kv_diag diag = {""};
    struct store *store = NULL;
    testing_temp_dir(dir);
    support_store_copy("tests/golden/v1/records", dir);
    support_golden_break(file_path, dir, expected);
    struct store_options options = support_store_options(dir);
    options.read_only = 1;
    options.inspect = 1;
    uint64_t before = support_store_segment_bytes(dir, 1);
    memset(&report, 0, sizeof report);
    enum kv_err err = store_open(&options, &store, &diag);
    if (err == KV_OK) {
        look(store, 0, &report);
        store_close(store);
    } else {
        const char *text = strstr(diag.text, ": ");
        snprintf(report.text, sizeof report.text, "%s%s\n", kv_err_name(err),
                 text != NULL ? text : "");
    }
    if (strcmp(expected, report.text) != 0) {
        printf("%s: expected\n%sgot\n%send\n", file_path, expected, report.text);
        fail();
    }
    assert_int_equal(support_store_segment_bytes(dir, 1), before);
}

/* Fails with BREAK_FSCK_CHAIN, BREAK_INSPECT. */
static void golden_reports(void **state) {
    (void)state;
    unsigned count = support_golden_each(golden, one_case);
    print_message("%u golden reports\n", count);
    assert_true(count >= 13);
}

/* A damaged batch record: what only the index knows is put into the chain again, and then a
 * rebuild loses nothing. */
static void repair_saves_what_the_chain_lost(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char name[32];
    static struct report report;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_commit_stats stats;
    struct store_batch *batch = NULL;
    assert_int_equal(support_store_commit(store, 0, 5, 1, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 5; i < 8; i++)
        assert_int_equal(support_store_put(batch, i, 1, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, &stats, NULL), KV_OK);
    struct store_stats there;
    store_stats_get(store, &there);
    uint64_t record_off = there.segment_bytes - stats.record_bytes;
    assert_int_equal(support_store_commit(store, 8, 10, 1, NULL), KV_OK);
    assert_int_equal(look(store, 0, &report).damage, 0);
    store_close(store);
    snprintf(name, sizeof name, "seg/%08u.seg", 1u);
    support_store_flip(dir, name, record_off + 200, 1);
    store = support_store_open(&options);
    struct store_fsck_report found = look(store, 0, &report);
    assert_int_equal(found.damage, 4); /* the batch and its three records */
    assert_non_null(strstr(report.text, "damage batch"));
    assert_non_null(strstr(report.text, "damage not-in-segments r00006"));
    found = look(store, 1, &report);
    assert_int_equal(found.restated, 3);
    found = look(store, 0, &report);
    assert_int_equal(found.damage, 1); /* the hole stays, nothing hangs on it */
    assert_non_null(strstr(report.text, "damage batch"));
    store_close(store);
    options.rebuild_index = 1;
    store = support_store_open(&options);
    for (unsigned i = 0; i < 10; i++)
        assert_true(support_store_matches(store, i, 1, i % 2));
    assert_int_equal(look(store, 0, &report).index_wrong, 0);
    store_close(store);
}

/* The batch that deleted a record is lost: repair keeps it deleted. */
static void repair_keeps_deletions(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    static struct report report;
    testing_temp_dir(dir);
    support_store_copy("tests/golden/v1/records", dir);
    support_store_flip(dir, "seg/00000001.seg", 253990, 2);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_true(support_store_absent(store, 3));
    assert_int_equal(look(store, 1, &report).restated, 1);
    assert_int_equal(look(store, 0, &report).index_wrong, 0);
    assert_null(strstr(report.text, "not-in-index"));
    store_close(store);
    options.rebuild_index = 1;
    store = support_store_open(&options);
    assert_true(support_store_absent(store, 3));
    assert_false(support_store_absent(store, 1));
    store_close(store);
}

/* Deleted records stay deleted when the index is made anew, and inspection changes no byte. */
static void rebuild_on_request(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_batch *batch = NULL;
    struct kv_diag diag = {""};
    struct store_stats stats;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 6, 1, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_delete(batch, "r00002", 6, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    store_close(store);
    support_store_flip(dir, "index/data.mdb", 8192 + 3, 0x40);
    struct store_options inspect = options;
    inspect.read_only = inspect.inspect = 1;
    enum kv_err err = store_open(&inspect, &store, &diag);
    if (err == KV_OK) {
        static struct report report;
        look(store, 0, &report);
        store_close(store);
    }
    assert_true(err == KV_ERR_CORRUPT);
    err = store_open(&inspect, &store, &diag);
    assert_int_equal(err, KV_ERR_CORRUPT); /* still damaged: nobody has mended it */
    options.rebuild_index = 1;
    store = support_store_open(&options);
    store_stats_get(store, &stats);
    assert_non_null(strstr(stats.opened, "rebuilt"));
    assert_true(support_store_absent(store, 2));
    for (unsigned i = 0; i < 6; i++)
        assert_true(i == 2 || support_store_matches(store, i, 1, 1));
    store_close(store);
}

TESTING_MAIN(cmocka_unit_test(golden_reports), cmocka_unit_test(repair_saves_what_the_chain_lost),
             cmocka_unit_test(repair_keeps_deletions), cmocka_unit_test(rebuild_on_request))
