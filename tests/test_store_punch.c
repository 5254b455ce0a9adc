/* tests/test_store_punch.c - holes where dead extents were, and nowhere else.
 *
 * Responsible for: a store smaller than a segment that gives space back, what a rebuild, fsck and
 * scrub make of holes, the last batch, holds, file systems without holes, a disk without a free
 * block.
 * Not responsible for: moving (test_store_gc.c), cuts at every change (the same, sweep.c).
 * Broken twins: BREAK_PUNCH_LAST, BREAK_PUNCH_RECORDS, BREAK_PUNCH_HOLD, BREAK_PUNCH_LIVE,
 * BREAK_PUNCH_FILLED, BREAK_PUNCH_EVERY, BREAK_RESERVE.
 */
#include "store/store_gc.h"

#include "store/store_fsck.h"
#include "store/store_scrub.h"
#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>

enum { RECORDS = 24, MIB = 1 << 20 };

/* One open segment, larger than everything in it. */
static struct store *make(const char *dir, const struct io_door *door) {
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 64 << 20;
    options.door = door != NULL ? door : options.door;
    return support_store_open(&options);
}

static void fill(struct store *store) {
    for (unsigned i = 0; i < RECORDS; i += 2)
        assert_int_equal(support_store_commit(store, i, i + 2, 1, NULL), KV_OK);
}

static void delete_most(struct store *store) {
    struct store_batch *batch = NULL;
    struct kv_diag diag = {""};
    if (store_batch_begin_removal(store, &batch, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    for (unsigned i = 0; i < RECORDS; i++) {
        char key[16];
        snprintf(key, sizeof key, "r%05u", i);
        if (i % 6 != 0 && store_batch_delete(batch, key, strlen(key), &diag) != KV_OK)
            fail_msg("%s", diag.text);
    }
    if (store_batch_commit(batch, NULL, &diag) != KV_OK)
        fail_msg("%s", diag.text);
}

static void check_right(struct store *store) {
    for (unsigned i = 0; i < RECORDS; i++)
        assert_true(i % 6 == 0 ? support_store_matches(store, i, 1, i % 2)
                               : support_store_absent(store, i));
}

static struct store_gc_report punch(struct store *store, int dry_run) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct kv_diag diag = {""};
    options.punch_only = 1;
    options.dry_run = dry_run;
    if (store_gc(store, &options, &report, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    return report;
}

static void on_finding(void *context, const struct store_fsck_finding *finding) {
    (void)context;
    fail_msg("%s", finding->text);
}

/* Nothing is called damage, and the index made anew says the same. */
static void check_whole(const char *dir) {
    struct store *store = make(dir, NULL);
    const struct store_fsck_args fsck = {.store = store, .read_data = 1, .each = on_finding};
    struct store_fsck_report found;
    struct store_scrub_report scrubbed;
    struct store_stats stats;
    assert_int_equal(store_fsck(&fsck, &found, NULL), KV_OK);
    char *before = support_store_dump(store);
    store_close(store);
    support_store_remove_index(dir);
    store = make(dir, NULL);
    const struct store_scrub_args scrub = {.store = store, .bad = on_finding};
    char *after = support_store_dump(store);
    store_stats_get(store, &stats);
    assert_string_equal(before, after);
    assert_non_null(strstr(stats.opened, "rebuilt"));
    assert_null(strstr(stats.opened, "missing"));
    assert_null(strstr(stats.opened, "dropped"));
    check_right(store);
    assert_int_equal(store_scrub(&scrub, &scrubbed, NULL), KV_OK);
    assert_int_equal(scrubbed.bad, 0);
    store_close(store);
    free(before);
    free(after);
}

/* Fails with BREAK_PUNCH_FILLED, BREAK_PUNCH_LIVE, BREAK_PUNCH_RECORDS. */
static void a_small_store_gives_space_back(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_stats stats;
    testing_temp_dir(dir);
    struct store *store = make(dir, NULL);
    fill(store);
    delete_most(store);
    store_close(store);
    store = make(dir, NULL);
    uint64_t before = support_store_segments_disk_bytes(dir);
    uint64_t size = support_store_segment_bytes(dir, 1);
    struct store_gc_report planned = punch(store, 1);
    assert_int_equal(support_store_segments_disk_bytes(dir), before);
    struct store_gc_report report = punch(store, 0);
    uint64_t after = support_store_segments_disk_bytes(dir);
    print_message("%llu bytes before, %llu after, %llu live\n", (unsigned long long)before,
                  (unsigned long long)after, (unsigned long long)report.live_bytes);
    assert_int_equal(before - after, report.punched_bytes);
    assert_in_range(planned.punched_bytes, report.punched_bytes,
                    report.punched_bytes + 2 * STORE_PAGE_BYTES);
    assert_int_equal(support_store_segment_bytes(dir, 1), size);
    assert_int_equal(report.written_bytes, 0);
    /* What lives, a page of batch record for each of 13 batches, and no more. */
    assert_true(after <= report.live_bytes + 16 * STORE_PAGE_BYTES);
    store_stats_get(store, &stats);
    assert_in_range(stats.segment_bytes, after - STORE_PAGE_BYTES, after);
    check_right(store);
    store_close(store);
    check_whole(dir);
    /* Once more: nothing is left to give. */
    store = make(dir, NULL);
    report = punch(store, 0);
    assert_int_equal(report.punched_bytes, 0);
    store_close(store);
}

/* One small record of many: not worth a look by itself, but nothing of it stays when asked so.
 * Fails with BREAK_PUNCH_EVERY. */
static void every_dead_page_on_request(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    uint8_t page[STORE_PAGE_BYTES];
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct store_record record;
    testing_temp_dir(dir);
    struct store *store = make(dir, NULL);
    for (unsigned i = 0; i < 300; i += 10)
        assert_int_equal(support_store_commit(store, i, i + 10, 1, NULL), KV_OK);
    assert_int_equal(store_get(store, "r00050", 6, &record, NULL), KV_OK);
    struct store_batch *batch = NULL;
    assert_int_equal(store_batch_begin_removal(store, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_delete(batch, "r00050", 6, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    assert_int_equal(punch(store, 0).punched_bytes, 0);
    options.punch_only = options.punch_every = 1;
    assert_int_equal(store_gc(store, &options, &report, NULL), KV_OK);
    assert_true(report.punched_bytes >= 8 * STORE_PAGE_BYTES);
    store_close(store);
    char path[TESTING_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/seg/%08u.seg", dir, record.extents[0].segment);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    for (uint32_t i = 0; i < record.extent_count; i++) {
        assert_int_equal(fseek(file, (long)record.extents[i].off, SEEK_SET), 0);
        assert_int_equal(fread(page, sizeof page, 1, file), 1);
        for (size_t at = 0; at < sizeof page; at++)
            assert_int_equal(page[at], 0);
    }
    fclose(file);
    store = make(dir, NULL);
    for (unsigned i = 0; i < 300; i++)
        assert_true(i == 50 ? support_store_absent(store, i)
                            : support_store_matches(store, i, 1, 0));
    store_record_release(store, &record);
    store_close(store);
}

/* The last batch replaces a record of its own: when the index is lost, a rebuild still finds that
 * batch whole.
 * Fails with BREAK_PUNCH_LAST. */
static void the_last_batch_stays_whole(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_batch *batch = NULL;
    testing_temp_dir(dir);
    struct store *store = make(dir, NULL);
    fill(store);
    delete_most(store);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(support_store_put(batch, 100, 1, NULL), KV_OK);
    assert_int_equal(support_store_put(batch, 100, 2, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    assert_true(punch(store, 0).punched_bytes > MIB / 2);
    store_close(store);
    support_store_remove_index(dir);
    store = make(dir, NULL);
    assert_true(support_store_matches(store, 100, 2, 1));
    store_close(store);
    check_whole(dir);
    /* Behind the next batch it is as dead as everything else. */
    store = make(dir, NULL);
    assert_int_equal(support_store_commit(store, 200, 202, 1, NULL), KV_OK);
    assert_true(punch(store, 0).punched_bytes > 0);
    assert_true(support_store_matches(store, 100, 2, 1));
    store_close(store);
    check_whole(dir);
}

/* A record looked up under a hold can be read although it was deleted and gc has run.
 * Fails with BREAK_PUNCH_HOLD. */
static void holds_keep_bytes(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    static uint8_t bytes[32768];
    struct store_record record;
    testing_temp_dir(dir);
    struct store *store = make(dir, NULL);
    fill(store);
    store_hold(store);
    assert_int_equal(store_get(store, "r00001", 6, &record, NULL), KV_OK);
    delete_most(store);
    assert_int_equal(punch(store, 0).punched_bytes, 0);
    struct iovec piece = {bytes, (size_t)record.extents[0].raw_bytes};
    struct store_read read = {
        .extent = &record.extents[0], .pieces = &piece, .piece_count = 1, .verify = 1};
    struct store_read_args args = {.reads = &read, .count = 1};
    assert_int_equal(store_read(store, &args, NULL, NULL), KV_OK);
    store_unhold(store);
    assert_true(punch(store, 0).punched_bytes > 0);
    /* Now it is gone, and says so. */
    assert_int_equal(store_read(store, &args, NULL, NULL), KV_ERR_CORRUPT);
    store_record_release(store, &record);
    store_close(store);
}

/* Refused: said once, and everything goes on as before there were holes. Failed: an error. */
static void file_systems_without_holes(void **state) {
    (void)state;
    static const int errors[2] = {EOPNOTSUPP, EIO};
    for (int i = 0; i < 2; i++) {
        char dir[TESTING_PATH_BYTES];
        struct faulty_io *faulty = faulty_io_make(io_posix_door());
        struct store_gc_options options = store_gc_options_usual();
        struct store_gc_report report;
        struct store_stats stats;
        struct kv_diag diag = {""};
        testing_temp_dir(dir);
        struct store *store = make(dir, faulty_io_door(faulty));
        fill(store);
        delete_most(store);
        struct faulty_io_plan plan = {.action = FAULTY_IO_FAIL,
                                      .ops = FAULTY_IO_SPACE,
                                      .at = 1,
                                      .error = errors[i],
                                      .lasting = 1};
        faulty_io_arm(faulty, &plan);
        options.punch_only = 1;
        enum kv_err err = store_gc(store, &options, &report, &diag);
        faulty_io_release(faulty);
        assert_int_equal(err, i == 0 ? KV_OK : KV_ERR_IO);
        assert_int_equal(report.no_holes, i == 0);
        assert_int_equal(report.punched_bytes, 0);
        store_stats_get(store, &stats);
        assert_true((strstr(stats.fallback, "no holes") != NULL) == (i == 0));
        assert_true((diag.text[0] != 0) == (i == 1));
        check_right(store);
        store_close(store);
        faulty_io_drop(faulty);
        check_whole(dir);
    }
}

/* A tmpfs filled to the last block: removal goes through, gc frees, the next save works; again and
 * again.
 * Fails with BREAK_RESERVE. */
static void a_full_disk_empties(void **state) {
    (void)state;
    char mount_dir[TESTING_PATH_BYTES];
    char dir[TESTING_PATH_BYTES + 16];
    struct kv_diag diag = {""};
    testing_temp_dir(mount_dir);
    if (mount("tmpfs", mount_dir, "tmpfs", 0, "size=6m") != 0)
        testing_skip("mounting needs root");
    snprintf(dir, sizeof dir, "%s/store", mount_dir);
    struct store *store = make(dir, NULL);
    fill(store);
    for (unsigned round = 0; round < 5; round++) {
        enum kv_err err = KV_OK;
        unsigned end = 1000;
        for (; err == KV_OK && end < 2000; end++)
            err = support_store_commit(store, end, end + 1, 1, &diag);
        assert_int_equal(err, KV_ERR_NO_SPACE);
        assert_true(end > 1010);
        support_store_fill_disk(mount_dir);
        /* Half of the rounds by a fresh handle, which must open without room. */
        if (round % 2 == 1) {
            store_close(store);
            store = make(dir, NULL);
        }
        if (round == 0)
            delete_most(store);
        struct store_batch *batch = NULL;
        err = store_batch_begin_removal(store, &batch, &diag);
        for (unsigned i = 1000; i < end && err == KV_OK; i++) {
            char key[16];
            snprintf(key, sizeof key, "r%05u", i);
            err = store_batch_delete(batch, key, strlen(key), &diag);
        }
        if (err == KV_OK)
            err = store_batch_commit(batch, NULL, &diag);
        if (err != KV_OK)
            fail_msg("round %u, removal on a full disk: %s", round, diag.text);
        assert_true(punch(store, 0).punched_bytes > MIB);
        support_store_unfill_disk(mount_dir);
        check_right(store);
    }
    store_close(store);
    check_whole(dir);
    assert_int_equal(umount(mount_dir), 0);
}

TESTING_MAIN(cmocka_unit_test(a_small_store_gives_space_back),
             cmocka_unit_test(every_dead_page_on_request),
             cmocka_unit_test(the_last_batch_stays_whole), cmocka_unit_test(holds_keep_bytes),
             cmocka_unit_test(file_systems_without_holes), cmocka_unit_test(a_full_disk_empties))
