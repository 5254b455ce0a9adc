/* tests/test_store_gc.c - sparse segments go and nothing else does.
 *
 * Responsible for: the same records after gc, after a rebuild and after a cut at any point; deleted
 * ones stay deleted; what is freed against the sizes of files; budget, rate, holds, damage.
 * Not responsible for: which records die (test_snap_care.c).
 * Broken twins: BREAK_GC_TOMBSTONE, BREAK_GC_CHECKPOINT, BREAK_GC_EARLY, BREAK_GC_MOVE,
 * BREAK_GC_HOLD.
 */
#include "store/store_gc.h"

#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RECORDS = 60 };

static void delete_range(struct store *store, unsigned first, unsigned end, unsigned step) {
    struct store_batch *batch = NULL;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = first; i < end; i += step) {
        char key[16];
        snprintf(key, sizeof key, "r%05u", i);
        assert_int_equal(store_batch_delete(batch, key, strlen(key), NULL), KV_OK);
    }
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

/* Of 60 records, 5 in 6 die: the first ten at once, the others in a later segment than their put.
 * A record without extents stands early and is never written again. */
static void make_garbage(const char *dir) {
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    const struct store_put bare = {"bare", 4, "kept", 4, NULL, 0};
    assert_int_equal(support_store_commit(store, 0, 10, 1, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_put(batch, &bare, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    for (unsigned i = 10; i < RECORDS; i += 5)
        assert_int_equal(support_store_commit(store, i, i + 5, 1, NULL), KV_OK);
    /* The last third stays, so that an older segment outlives the deletions. */
    assert_int_equal(support_store_commit(store, 100, 118, 1, NULL), KV_OK);
    for (unsigned i = 0; i < RECORDS; i++)
        if (i % 6 != 0)
            delete_range(store, i, i + 1, 1);
    assert_int_equal(support_store_commit(store, 200, 240, 1, NULL), KV_OK);
    delete_range(store, 200, 240, 1);
    assert_int_equal(support_store_commit(store, 300, 320, 1, NULL), KV_OK);
    store_close(store);
}

static int all_right(struct store *store) {
    struct store_record record;
    if (store_get(store, "bare", 4, &record, NULL) != KV_OK)
        return 0;
    int same = record.value_bytes == 4 && memcmp(record.value, "kept", 4) == 0;
    store_record_release(store, &record);
    for (unsigned i = 0; i < RECORDS && same; i++)
        same =
            i % 6 == 0 ? support_store_matches(store, i, 1, i % 2) : support_store_absent(store, i);
    for (unsigned i = 100; i < 118 && same; i++)
        same = support_store_matches(store, i, 1, 1);
    for (unsigned i = 200; i < 240 && same; i++)
        same = support_store_absent(store, i);
    for (unsigned i = 300; i < 320 && same; i++)
        same = support_store_matches(store, i, 1, 0);
    return same;
}

static uint64_t file_bytes(const char *dir) {
    return support_store_segments_disk_bytes(dir);
}

static struct store_gc_report run_gc(struct store *store) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct kv_diag diag = {""};
    if (store_gc(store, &options, &report, &diag) != KV_OK)
        fail_msg("gc: %s", diag.text);
    return report;
}

/* The index lost after gc: the same records, and nothing is called missing. */
static void check_rebuilt(const char *dir) {
    struct store_options options = support_store_options(dir);
    struct store_stats stats;
    struct store *store = support_store_open(&options);
    char *before = support_store_dump(store);
    store_close(store);
    support_store_remove_index(dir);
    store = support_store_open(&options);
    char *after = support_store_dump(store);
    store_stats_get(store, &stats);
    assert_string_equal(before, after);
    assert_non_null(strstr(stats.opened, "rebuilt"));
    assert_null(strstr(stats.opened, "missing"));
    assert_true(all_right(store));
    store_close(store);
    free(before);
    free(after);
}

/* Fails with BREAK_GC_CHECKPOINT, BREAK_GC_MOVE. */
static void frees_what_nobody_uses(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_stats stats;
    testing_temp_dir(dir);
    make_garbage(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    store_stats_get(store, &stats);
    assert_true(stats.live_bytes * 2 < stats.segment_bytes);
    struct store_gc_options dry = store_gc_options_usual();
    struct store_gc_report planned;
    char *untouched = support_store_dump(store);
    dry.dry_run = 1;
    uint64_t files = file_bytes(dir);
    assert_int_equal(store_gc(store, &dry, &planned, NULL), KV_OK);
    char *still = support_store_dump(store);
    assert_string_equal(untouched, still);
    assert_int_equal(file_bytes(dir), files);
    struct store_gc_report report = run_gc(store);
    assert_true(report.removed > 2 && report.removed == report.sparse);
    assert_int_equal(report.removed, planned.removed);
    assert_int_equal(report.moved_bytes, planned.moved_bytes);
    assert_int_equal(report.freed_bytes, planned.freed_bytes);
    /* A file with holes may take a block more to describe them. */
    const uint64_t more = planned.segments_before * STORE_PAGE_BYTES;
    assert_in_range(report.punched_bytes, planned.punched_bytes - more, planned.punched_bytes);
    assert_int_equal(report.live_bytes, stats.live_bytes);
    assert_true(all_right(store));
    store_stats_get(store, &stats);
    assert_int_equal(stats.segment_bytes, report.segment_bytes_after);
    uint64_t live = stats.live_bytes;
    store_close(store);
    /* The files say the same as the report, and no segment but the open one is below half. */
    assert_in_range(file_bytes(dir), report.segment_bytes_after, report.segment_bytes_after + more);
    assert_in_range(file_bytes(dir), files - report.freed_bytes + report.written_bytes - more,
                    files - report.freed_bytes + report.written_bytes + more);
    print_message("%llu bytes of files before, %llu after, %llu live\n", (unsigned long long)files,
                  (unsigned long long)file_bytes(dir), (unsigned long long)live);
    assert_true(file_bytes(dir) <= 2 * live + (2 << 20));
    assert_true(support_store_disk_bytes(dir) <= file_bytes(dir) + (1 << 20));
    check_rebuilt(dir);
    /* A second run has nothing to do but what the first one wrote. */
    store = support_store_open(&options);
    report = run_gc(store);
    assert_int_equal(report.moved_extents, 0);
    store_close(store);
    free(untouched);
    free(still);
}

/* Repeated rounds: restated deletions of restated deletions, and everything still right. */
static void many_rounds(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    make_garbage(dir);
    struct store_options options = support_store_options(dir);
    for (unsigned round = 0; round < 6; round++) {
        struct store *store = support_store_open(&options);
        run_gc(store);
        assert_int_equal(support_store_commit(store, 400, 430, round + 1, NULL), KV_OK);
        delete_range(store, 400, 430, 2);
        run_gc(store);
        assert_true(all_right(store));
        for (unsigned i = 400; i < 430; i++)
            assert_true(i % 2 == 0 ? support_store_absent(store, i)
                                   : support_store_matches(store, i, round + 1, 0));
        store_close(store);
        check_rebuilt(dir);
        assert_true(file_bytes(dir) < 10 << 20);
    }
}

struct lent {
    struct store *store;
    unsigned calls;
};

/* Records that are to be moved yet go, others get other extents. */
static void write_meanwhile(void *context) {
    struct lent *lent = context;
    if (lent->calls++ != 0)
        return;
    delete_range(lent->store, 0, RECORDS / 2, 6);
    for (unsigned i = RECORDS / 2; i < RECORDS; i += 6)
        assert_int_equal(support_store_commit(lent->store, i, i + 1, 2, NULL), KV_OK);
}

static void lent_right(struct store *store) {
    for (unsigned i = 0; i < RECORDS; i += 6)
        assert_true(i < RECORDS / 2 ? support_store_absent(store, i)
                                    : support_store_matches(store, i, 2, 1));
    for (unsigned i = 100; i < 118; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    for (unsigned i = 300; i < 320; i++)
        assert_true(support_store_matches(store, i, 1, 1));
}

/* BREAK_GC_LENT goes on with what it knew before others wrote. */
static void others_write_between_segments(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    make_garbage(dir);
    struct store_options options = support_store_options(dir);
    struct lent lent = {.store = support_store_open(&options)};
    struct store_gc_options gc = store_gc_options_usual();
    struct store_gc_report report;
    struct kv_diag diag = {""};
    gc.lend = write_meanwhile;
    gc.context = &lent;
    if (store_gc(lent.store, &gc, &report, &diag) != KV_OK)
        fail_msg("gc: %s", diag.text);
    assert_true(lent.calls > 2);
    assert_int_equal(report.removed, lent.calls);
    assert_int_equal(report.removed, report.sparse);
    lent_right(lent.store);
    char *before = support_store_dump(lent.store);
    store_close(lent.store);
    support_store_remove_index(dir);
    lent.store = support_store_open(&options);
    char *after = support_store_dump(lent.store);
    assert_string_equal(before, after);
    lent_right(lent.store);
    store_close(lent.store);
    free(before);
    free(after);
}

/* One batch with one record of incompressible bytes. */
static void put_bytes(struct store *store, const char *key, size_t size) {
    struct testing_random random;
    struct store_batch *batch = NULL;
    uint8_t *bytes = malloc(size);
    assert_non_null(bytes);
    testing_random_init(&random, size);
    testing_random_bytes(&random, bytes, size);
    const struct iovec piece = {bytes, size};
    const struct store_part part = {0, STORE_RAW, &piece, 1, 0};
    const struct store_put put = {key, strlen(key), "v", 1, &part, 1};
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    free(bytes);
}

static void delete_key(struct store *store, const char *key) {
    struct store_batch *batch = NULL;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_delete(batch, key, strlen(key), NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

/* The put stands in a segment that stays, its deletion in one that gc removes: a rebuild must not
 * bring the record back.
 * Fails with BREAK_GC_EARLY, BREAK_GC_TOMBSTONE. */
static void a_deletion_outlives_its_segment(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    int exists = 1;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    size_t most = options.segment_bytes * 2 / 3;
    struct store *store = support_store_open(&options);
    put_bytes(store, "gone", 4096);
    put_bytes(store, "stays", most);
    put_bytes(store, "filler", most);
    delete_key(store, "gone");
    put_bytes(store, "later", most);
    delete_key(store, "filler");
    assert_true(support_store_segment_bytes(dir, 2) > 0);
    run_gc(store);
    assert_true(support_store_segment_bytes(dir, 1) > 0);
    assert_int_equal(support_store_segment_bytes(dir, 2), 0);
    store_close(store);
    support_store_remove_index(dir);
    store = support_store_open(&options);
    assert_int_equal(store_exists(store, "gone", 4, &exists, NULL), KV_OK);
    assert_false(exists);
    assert_int_equal(store_exists(store, "stays", 5, &exists, NULL), KV_OK);
    assert_true(exists);
    store_close(store);
}

static int run_child(const char *dir, const struct faulty_io_plan *plan) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct faulty_io *faulty = faulty_io_make(io_posix_door());
        struct store_options options = support_store_options(dir);
        struct store_gc_options usual = store_gc_options_usual();
        struct store_gc_report report;
        struct store *store = NULL;
        options.door = faulty_io_door(faulty);
        if (store_open(&options, &store, NULL) != KV_OK)
            _exit(1);
        faulty_io_arm(faulty, plan);
        if (store_gc(store, &usual, &report, NULL) != KV_OK)
            _exit(2);
        faulty_io_cut_power(faulty);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* One change in five: torn writes and power cuts begin at different ones; `make sweep` has a gc in
 * its life and takes all. */
static unsigned sweep(const char *base, enum faulty_io_action action, int power_cut) {
    unsigned cases = 0;
    for (unsigned k = 1 + (unsigned)power_cut;; k += testing_quick() ? 9 : 5) {
        char dir[TESTING_PATH_BYTES];
        testing_ram_dir(dir);
        support_store_copy(base, dir);
        struct faulty_io_plan plan = {.action = action,
                                      .ops = FAULTY_IO_CHANGES,
                                      .at = k,
                                      .power_cut = power_cut,
                                      .seed = k * 131 + 7};
        int status = run_child(dir, &plan);
        assert_true(status == 0 || status == FAULTY_IO_EXIT_STATUS);
        struct store_options options = support_store_options(dir);
        struct store *store = support_store_open(&options);
        assert_true(all_right(store));
        store_close(store);
        check_rebuilt(dir);
        /* And the next run ends what this one began. */
        store = support_store_open(&options);
        run_gc(store);
        assert_true(all_right(store));
        store_close(store);
        char command[TESTING_PATH_BYTES + 16];
        snprintf(command, sizeof command, "rm -rf '%s'", dir);
        assert_int_equal(system(command), 0);
        if (status == 0)
            return cases;
        cases++;
    }
}

static void cut_along_the_way(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES];
    testing_ram_dir(base);
    make_garbage(base);
    unsigned torn = sweep(base, FAULTY_IO_TEAR_AND_DIE, 0);
    unsigned cuts = sweep(base, FAULTY_IO_DIE, 1);
    print_message("gc: %u torn writes, %u power cuts: 0 lost, 0 resurrected\n", torn, cuts);
    assert_true(torn > 5 && cuts > 5);
}

/* Failing I/O instead of death: an error, the same records, and the next run goes through. */
static void failing_at_every_change(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES];
    unsigned failures = 0;
    testing_ram_dir(base);
    make_garbage(base);
    for (unsigned k = 1;; k += testing_quick() ? 5 : 2) {
        char dir[TESTING_PATH_BYTES];
        struct faulty_io *faulty = faulty_io_make(io_posix_door());
        struct store_gc_options usual = store_gc_options_usual();
        struct store_gc_report report;
        struct kv_diag diag = {""};
        testing_ram_dir(dir);
        support_store_copy(base, dir);
        struct store_options options = support_store_options(dir);
        options.door = faulty_io_door(faulty);
        struct store *store = support_store_open(&options);
        struct faulty_io_plan plan = {
            .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_CHANGES, .at = k, .error = 28};
        faulty_io_arm(faulty, &plan);
        enum kv_err err = store_gc(store, &usual, &report, &diag);
        int struck = faulty_io_counts(faulty).hits != 0;
        assert_true(err == KV_OK || diag.text[0] != 0);
        faulty_io_release(faulty);
        assert_true(all_right(store));
        store_close(store);
        faulty_io_drop(faulty);
        options.door = io_posix_door();
        store = support_store_open(&options);
        run_gc(store);
        assert_true(all_right(store));
        store_close(store);
        char command[TESTING_PATH_BYTES + 16];
        snprintf(command, sizeof command, "rm -rf '%s'", dir);
        assert_int_equal(system(command), 0);
        failures += err != KV_OK;
        if (!struck)
            break;
    }
    assert_true(failures > 5);
}

/* A full budget: the reserve lets gc work, and what it frees can be written. */
static void full_budget_empties(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.bytes_max = 10 << 20;
    options.reserve_bytes = 2 << 20;
    struct store *store = support_store_open(&options);
    enum kv_err err = KV_OK;
    unsigned refused = 0;
    unsigned runs = 0;
    /* Thirty records written over and over: three times the budget of them and more. */
    for (unsigned version = 1; version <= 20; version++) {
        for (unsigned i = 0; i < 30; i += 3) {
            err = support_store_commit(store, i, i + 3, version, &diag);
            if (err == KV_ERR_NO_SPACE) {
                refused++;
                runs += run_gc(store).freed_bytes != 0;
                err = support_store_commit(store, i, i + 3, version, &diag);
            }
            if (err != KV_OK)
                fail_msg("%s", diag.text);
            assert_true(support_store_disk_bytes(dir) <= options.bytes_max + 65536);
        }
    }
    print_message("%u refused, %u runs freed space\n", refused, runs);
    assert_true(refused > 2 && runs == refused);
    for (unsigned i = 0; i < 30; i++)
        assert_true(support_store_matches(store, i, 20, i % 2));
    store_close(store);
}

struct pauses {
    uint64_t now_ns, slept_ns;
    unsigned calls, stop_at;
};

static uint64_t virtual_now(void *context) {
    return ((struct pauses *)context)->now_ns;
}

static int virtual_pause(void *context, uint64_t ns) {
    struct pauses *pauses = context;
    pauses->now_ns += ns;
    pauses->slept_ns += ns;
    return ++pauses->calls == pauses->stop_at;
}

static void rate_and_stop(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    make_garbage(dir);
    struct pauses pauses = {.stop_at = 3};
    const struct kv_clock clock = {virtual_now, virtual_now, &pauses};
    struct store_options options = support_store_options(dir);
    options.clock = &clock;
    options.door = io_posix_door();
    struct store *store = support_store_open(&options);
    struct store_gc_options slow = store_gc_options_usual();
    struct store_gc_report report;
    slow.bytes_per_second = 100000;
    slow.pause = virtual_pause;
    slow.context = &pauses;
    assert_int_equal(store_gc(store, &slow, &report, NULL), KV_OK);
    assert_true(report.stopped);
    assert_true(all_right(store));
    pauses.stop_at = 0;
    pauses.slept_ns = 0;
    assert_int_equal(store_gc(store, &slow, &report, NULL), KV_OK);
    assert_true(!report.stopped && report.moved_bytes > 100000);
    /* The clock moves only while it pauses, so the rate is exact. */
    assert_in_range(pauses.slept_ns, report.moved_bytes * 9900, report.moved_bytes * 10100);
    assert_true(all_right(store));
    store_close(store);
}

/* A record looked up under a hold can be read after gc has moved it.
 * Fails with BREAK_GC_HOLD. */
static void holds_keep_segments(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    static uint8_t bytes[32768];
    struct store_record record;
    testing_temp_dir(dir);
    make_garbage(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    store_hold(store);
    assert_int_equal(store_get(store, "r00006", 6, &record, NULL), KV_OK);
    struct store_gc_report report = run_gc(store);
    assert_true(report.held > 0 && report.removed == 0);
    struct iovec piece = {bytes, (size_t)record.extents[0].raw_bytes};
    struct store_read read = {
        .extent = &record.extents[0], .pieces = &piece, .piece_count = 1, .verify = 1};
    struct store_read_args args = {.reads = &read, .count = 1};
    assert_int_equal(store_read(store, &args, NULL, NULL), KV_OK);
    store_unhold(store);
    report = run_gc(store);
    assert_true(report.held == 0 && report.removed > 2);
    assert_true(all_right(store));
    store_record_release(store, &record);
    store_close(store);
}

/* A flipped bit in a live extent of a sparse segment: that segment stays, the others go. */
static void damage_is_left_in_place(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_record record;
    testing_temp_dir(dir);
    make_garbage(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(store_get(store, "r00006", 6, &record, NULL), KV_OK);
    uint32_t segment = record.extents[0].segment;
    char name[32];
    snprintf(name, sizeof name, "seg/%08u.seg", segment);
    support_store_flip(dir, name, record.extents[0].off + 100, 4);
    struct store_gc_report report = run_gc(store);
    assert_int_equal(report.damaged, 1);
    assert_non_null(strstr(report.trouble, "stays"));
    assert_true(report.removed > 1);
    assert_true(support_store_segment_bytes(dir, segment) != 0);
    assert_false(support_store_matches(store, 6, 1, 0));
    support_store_flip(dir, name, record.extents[0].off + 100, 4);
    assert_true(all_right(store));
    store_record_release(store, &record);
    store_close(store);
}

/* The n-th allocation fails, for every n: an error or nothing, never a wrong record. */
static void failing_at_every_allocation(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES];
    unsigned failures = 0;
    testing_ram_dir(base);
    make_garbage(base);
    for (uint64_t n = 1;; n += testing_quick() ? 17 : 7) {
        char dir[TESTING_PATH_BYTES];
        char command[TESTING_PATH_BYTES + 16];
        struct store_gc_options usual = store_gc_options_usual();
        struct store_gc_report report;
        struct testing_alloc alloc;
        struct kv_diag diag = {""};
        testing_ram_dir(dir);
        support_store_copy(base, dir);
        testing_alloc_init(&alloc, 0);
        struct store_options options = support_store_options(dir);
        options.alloc = &alloc.alloc;
        options.door = io_posix_door();
        struct store *store = support_store_open(&options);
        alloc.fail_at = alloc.request_count + n;
        enum kv_err err = store_gc(store, &usual, &report, &diag);
        int struck = alloc.failed_count != 0;
        alloc.fail_at = 0;
        assert_true(err == KV_OK || err == KV_ERR_NOMEM || err == KV_ERR_IO);
        failures += err != KV_OK;
        store_close(store);
        assert_int_equal(alloc.live_count, 0);
        options.alloc = kv_alloc_system();
        store = support_store_open(&options);
        assert_true(all_right(store));
        run_gc(store);
        assert_true(all_right(store));
        store_close(store);
        snprintf(command, sizeof command, "rm -rf '%s'", dir);
        assert_int_equal(system(command), 0);
        if (!struck)
            break;
        if (n > 200) /* what follows repeats itself record by record */
            break;
    }
    print_message("%u failed allocations\n", failures);
    assert_true(failures > 10);
}

/* BREAK_GC_OPEN leaves the open segment, so that what was deleted last stays readable where there
 * are no holes. */
static void the_open_segment_goes_on_request(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_gc_options gc = store_gc_options_usual();
    struct store_gc_report report;
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(support_store_commit(store, i, i + 1, 1, NULL), KV_OK);
    delete_range(store, 0, 6, 2);
    gc.live_percent = 100;
    assert_int_equal(store_gc(store, &gc, &report, NULL), KV_OK);
    assert_int_equal(report.removed, 0);
    gc.with_open = 1;
    assert_int_equal(store_gc(store, &gc, &report, NULL), KV_OK);
    assert_int_equal(report.removed, 1);
    assert_int_equal(report.held, 0);
    assert_int_equal(support_store_segment_bytes(dir, 1), 0);
    for (int rebuilt = 0; rebuilt < 2; rebuilt++) {
        for (unsigned i = 0; i < 6; i++)
            assert_true(i % 2 == 0 ? support_store_absent(store, i)
                                   : support_store_matches(store, i, 1, 0));
        store_close(store);
        support_store_remove_index(dir);
        store = support_store_open(&options);
    }
    /* And goes on: another one, and an empty store has none to end. */
    assert_int_equal(support_store_commit(store, 7, 8, 1, NULL), KV_OK);
    assert_int_equal(store_gc(store, &gc, &report, NULL), KV_OK);
    assert_true(support_store_matches(store, 7, 1, 1));
    store_close(store);
    testing_temp_dir(dir);
    options = support_store_options(dir);
    store = support_store_open(&options);
    assert_int_equal(store_gc(store, &gc, &report, NULL), KV_OK);
    assert_int_equal(report.removed, 0);
    store_close(store);
}

/* A budget below what is stored: what cannot be moved is refused with what it needs, nothing is
 * lost, and so much more lets it through. BREAK_GC_ROOM begins without looking. */
static void a_move_fits_or_is_refused(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_stats stats;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    make_garbage(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_gc_options gc = store_gc_options_usual();
    struct store_gc_report report;
    gc.live_percent = 100;
    gc.punch_only = 1;
    assert_int_equal(store_gc(store, &gc, &report, NULL), KV_OK);
    gc.punch_only = 0;
    store_stats_get(store, &stats);
    store_close(store);
    options.bytes_max = stats.segment_bytes + stats.index_bytes - 65536;
    options.reserve_bytes = 0;
    store = support_store_open(&options);
    assert_int_equal(store_gc(store, &gc, &report, &diag), KV_ERR_LIMIT);
    const char *raise = strstr(diag.text, "raise it by ");
    assert_non_null(raise);
    assert_true(all_right(store));
    store_close(store);
    options.bytes_max += strtoull(raise + strlen("raise it by "), NULL, 10);
    store = support_store_open(&options);
    struct store_gc_report more;
    enum kv_err err = store_gc(store, &gc, &more, &diag);
    assert_true(err == KV_OK || err == KV_ERR_LIMIT); /* a larger one may be next */
    assert_true(more.removed > 0);
    assert_true(all_right(store));
    store_close(store);
    check_rebuilt(dir);
}

TESTING_MAIN(cmocka_unit_test(frees_what_nobody_uses),
             cmocka_unit_test(others_write_between_segments), cmocka_unit_test(many_rounds),
             cmocka_unit_test(a_deletion_outlives_its_segment), cmocka_unit_test(cut_along_the_way),
             cmocka_unit_test(failing_at_every_change),
             cmocka_unit_test(failing_at_every_allocation), cmocka_unit_test(full_budget_empties),
             cmocka_unit_test(rate_and_stop), cmocka_unit_test(holds_keep_segments),
             cmocka_unit_test(damage_is_left_in_place),
             cmocka_unit_test(the_open_segment_goes_on_request),
             cmocka_unit_test(a_move_fits_or_is_refused))
