/* tests/test_store_batch.c - batches under a full disk, failing calls, stalls, budgets, no memory.
 *
 * Responsible for: a failed batch leaves the store as it was, usable where it can be, refusing
 * where it cannot; readers go on while a writer hangs.
 * Not responsible for: crashes (test_recover.c).
 * Broken twins: BREAK_BUDGET, BREAK_LOOSE_ROLLBACK, BREAK_REMOVAL_OVER, BREAK_REMOVAL_ROOM,
 * BREAK_REMOVED_STORE.
 */
#include "store/store_batch.h"

#include "tests/support_disk.h"
#include "tests/support_faulty_index.h"
#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST = 0, END = 40 }; /* more than one segment */

struct rig {
    char dir[TESTING_PATH_BYTES];
    struct faulty_io *faulty;
    struct store_options options;
    struct store *store;
};

static void make_rig(struct rig *rig, const struct io_door *door) {
    testing_temp_dir(rig->dir);
    rig->faulty = faulty_io_make(door);
    rig->options = support_store_options(rig->dir);
    rig->options.door = faulty_io_door(rig->faulty);
    rig->store = support_store_open(&rig->options);
    assert_int_equal(support_store_commit(rig->store, FIRST, 3, 1, NULL), KV_OK);
}

static void drop_rig(struct rig *rig) {
    store_close(rig->store);
    faulty_io_drop(rig->faulty);
}

static void holds_old(struct store *store) {
    for (unsigned i = FIRST; i < 3; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    assert_true(support_store_absent(store, 3));
}

/* Every write, preallocation and truncation of a batch meets a full disk: clean refusal, then the
 * batch succeeds when there is room again. */
static void no_space_anywhere(void **state) {
    (void)state;
    for (int lasting = 0; lasting < 2; lasting++) {
        uint64_t k = 1;
        unsigned refused = 0;
        for (;; k++) {
            struct rig rig;
            struct kv_diag diag = {""};
            make_rig(&rig, k % 2 ? io_uring_door() : io_posix_door());
            uint64_t before = support_store_segment_bytes(rig.dir, 1);
            /* Removing a name never lacks space, and that is all a lasting fault would add. */
            unsigned ops = lasting ? FAULTY_IO_WRITE : FAULTY_IO_WRITE | FAULTY_IO_NAME;
            struct faulty_io_plan plan = {
                .action = FAULTY_IO_FAIL, .ops = ops, .at = k, .lasting = lasting, .error = ENOSPC};
            faulty_io_arm(rig.faulty, &plan);
            enum kv_err err = support_store_commit(rig.store, FIRST, END, 2, &diag);
            struct faulty_io_counts counts = faulty_io_counts(rig.faulty);
            faulty_io_release(rig.faulty);
            if (counts.hits != 0) {
                struct store_stats stats;
                assert_int_equal(err, KV_ERR_NO_SPACE);
                assert_non_null(strstr(diag.text, "No space left"));
                holds_old(rig.store);
                store_stats_get(rig.store, &stats);
                assert_true(support_store_segment_bytes(rig.dir, 1) <= before);
                assert_int_equal(support_store_segment_bytes(rig.dir, 2), 0);
                assert_int_equal(stats.refuses_writes, 0);
                assert_int_equal(support_store_commit(rig.store, FIRST, END, 2, NULL), KV_OK);
                refused++;
            } else {
                assert_int_equal(err, KV_OK);
            }
            drop_rig(&rig);
            if (counts.hits == 0)
                break;
        }
        assert_true(refused >= 4);
    }
}

/* The batch is synced when the index has no room for it: what was reported as failed must not come
 * back with the power.
 * Fails with BREAK_LOOSE_ROLLBACK. */
static void failed_index_commit_stays_failed(void **state) {
    (void)state;
    static const enum kv_err reasons[] = {KV_ERR_NO_SPACE, KV_ERR_NOMEM};
    for (unsigned way = 0; way < 4; way++) {
        char root[TESTING_PATH_BYTES], dir[TESTING_PATH_BYTES + 8], after[TESTING_PATH_BYTES + 8];
        struct store_stats stats;
        testing_temp_dir(root);
        snprintf(dir, sizeof dir, "%s/store", root);
        snprintf(after, sizeof after, "%s/cut", root);
        struct disk *disk = disk_make(io_best_door(), dir);
        struct store_options options = support_store_options(dir);
        options.door = disk_door(disk);
        struct store *store = support_store_open(&options);
        assert_int_equal(support_store_commit(store, FIRST, 3, 1, NULL), KV_OK);
        faulty_index_arm(&(struct faulty_index_plan){
            .at = 1, .err = reasons[way % 2], .only_changes = 1, .after_effect = 0});
        unsigned end = way < 2 ? 4 : END; /* in the open segment, and over its end */
        assert_int_equal(support_store_commit(store, FIRST, end, 2, NULL), reasons[way % 2]);
        assert_int_equal(faulty_index_hits(), 1);
        faulty_index_arm(&(struct faulty_index_plan){0});
        holds_old(store);
        uint64_t entries = disk_entries(disk);
        store_stats_get(store, &stats);
        assert_int_equal(stats.refuses_writes, 0);
        assert_int_equal(support_store_commit(store, FIRST, end, 2, NULL), KV_OK);
        store_close(store);
        disk_build(disk, entries, &(struct disk_policy){.unsynced = DISK_LOST}, after);
        disk_drop(disk);
        options = support_store_options(after);
        store = support_store_open(&options);
        holds_old(store);
        store_close(store);
    }
}

static void failed_sync_refuses_until_reopened(void **state) {
    (void)state;
    uint64_t k = 1;
    for (;; k++) {
        struct rig rig;
        struct kv_diag diag = {""};
        struct store_stats stats;
        make_rig(&rig, io_best_door());
        faulty_io_arm(rig.faulty,
                      &(struct faulty_io_plan){
                          .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_SYNC, .at = k, .error = EIO});
        enum kv_err err = support_store_commit(rig.store, FIRST, END, 2, &diag);
        uint64_t hits = faulty_io_counts(rig.faulty).hits;
        if (hits == 0) {
            assert_int_equal(err, KV_OK);
            drop_rig(&rig);
            break;
        }
        assert_int_equal(err, KV_ERR_IO);
        holds_old(rig.store);
        store_stats_get(rig.store, &stats);
        assert_int_equal(stats.refuses_writes, 1);
        assert_int_equal(support_store_commit(rig.store, 5, 6, 2, &diag), KV_ERR_IO);
        assert_non_null(strstr(diag.text, "open it again"));
        store_close(rig.store);
        rig.store = support_store_open(&rig.options);
        holds_old(rig.store);
        assert_int_equal(support_store_commit(rig.store, FIRST, END, 2, NULL), KV_OK);
        drop_rig(&rig);
    }
    assert_true(k >= 4); /* two segment ends, the tail, the directory */
}

static void torn_write_fails_the_batch(void **state) {
    (void)state;
    struct rig rig;
    make_rig(&rig, io_best_door());
    faulty_io_arm(rig.faulty,
                  &(struct faulty_io_plan){
                      .action = FAULTY_IO_TEAR, .ops = FAULTY_IO_WRITE, .at = 2, .error = EIO});
    assert_int_equal(support_store_commit(rig.store, FIRST, END, 2, NULL), KV_ERR_IO);
    holds_old(rig.store);
    assert_int_equal(support_store_commit(rig.store, FIRST, END, 2, NULL), KV_OK);
    assert_true(support_store_matches(rig.store, END - 1, 2, 1));
    drop_rig(&rig);
}

struct save {
    struct store *store;
    enum kv_err err;
};

static void *save_in_thread(void *argument) {
    struct save *save = argument;
    save->err = support_store_commit(save->store, FIRST, END, 2, NULL);
    return NULL;
}

/* While a write of a save hangs in the device, other threads read at their usual pace. */
static void reads_go_on_while_a_save_hangs(void **state) {
    (void)state;
    for (int door = 0; door < 2; door++) {
        struct rig rig;
        pthread_t thread;
        make_rig(&rig, door == 0 ? io_uring_door() : io_posix_door());
        struct save save = {rig.store, KV_ERR_COUNT};
        faulty_io_arm(rig.faulty, &(struct faulty_io_plan){
                                      .action = FAULTY_IO_STALL, .ops = FAULTY_IO_WRITE, .at = 2});
        assert_int_equal(pthread_create(&thread, NULL, save_in_thread, &save), 0);
        faulty_io_await_stall(rig.faulty);
        for (int i = 0; i < 20; i++)
            holds_old(rig.store);
        assert_int_equal(faulty_io_counts(rig.faulty).stalled, 1);
        faulty_io_release(rig.faulty);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(save.err, KV_OK);
        for (unsigned i = FIRST; i < END; i++)
            assert_true(support_store_matches(rig.store, i, 2, 0));
        drop_rig(&rig);
    }
}

/* A write that never comes back: the save fails at its deadline and says so, the store reads on. */
static void stalled_write_times_out(void **state) {
    (void)state;
    struct rig rig;
    struct kv_diag diag = {""};
    struct store_stats stats;
    make_rig(&rig, io_best_door());
    store_close(rig.store);
    rig.options.deadline_ns = 200000000;
    rig.store = support_store_open(&rig.options);
    faulty_io_arm(rig.faulty, &(struct faulty_io_plan){
                                  .action = FAULTY_IO_STALL, .ops = FAULTY_IO_WRITE, .at = 1});
    assert_int_equal(support_store_commit(rig.store, FIRST, END, 2, &diag), KV_ERR_IO);
    assert_non_null(strstr(diag.text, "timed out"));
    holds_old(rig.store);
    store_stats_get(rig.store, &stats);
    assert_int_equal(stats.refuses_writes, 1);
    faulty_io_release(rig.faulty);
    store_close(rig.store);
    rig.store = support_store_open(&rig.options);
    holds_old(rig.store);
    drop_rig(&rig);
}

/* Fails with BREAK_BUDGET, BREAK_REMOVAL_ROOM. */
static void budget_is_hard(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.bytes_max = 3 << 20;
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    unsigned count = 0;
    enum kv_err err = KV_OK;
    assert_int_equal(store_batch_begin(store, 4 << 20, &batch, &diag), KV_ERR_NO_SPACE);
    assert_non_null(strstr(diag.text, "byte budget of 3145728"));
    while (err == KV_OK && count < 1000) {
        err = support_store_commit(store, count, count + 1, 1, &diag);
        count += err == KV_OK;
        assert_true(support_store_disk_bytes(dir) <= options.bytes_max + 65536);
    }
    assert_int_equal(err, KV_ERR_NO_SPACE);
    assert_true(count >= 35 && count <= 70);
    for (unsigned i = 0; i < count; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    /* Small changes still fit, and so does deleting. */
    assert_int_equal(store_batch_begin(store, 0, &batch, &diag), KV_OK);
    assert_int_equal(store_batch_delete(batch, "r00000", 6, &diag), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, &diag), KV_OK);
    /* Filled to the last byte with small records, it can still be emptied. */
    for (unsigned i = 0; err == KV_OK || i == 0; i++) {
        char key[16];
        const struct store_put put = {.key = key, .key_bytes = 6, .value = "v", .value_bytes = 1};
        snprintf(key, sizeof key, "s%05u", i % 1000);
        assert_int_equal(store_batch_begin(store, 0, &batch, &diag), KV_OK);
        err = store_batch_put(batch, &put, &diag);
        assert_int_equal(store_batch_commit(batch, NULL, &diag), err);
    }
    assert_int_equal(err, KV_ERR_NO_SPACE);
    for (unsigned i = 1; i < 9; i++) {
        char key[16];
        snprintf(key, sizeof key, "r%05u", i);
        assert_int_equal(store_batch_begin(store, 0, &batch, &diag), KV_OK);
        assert_int_equal(store_batch_delete(batch, key, 6, &diag), KV_OK);
        assert_int_equal(store_batch_commit(batch, NULL, &diag), KV_OK);
        assert_true(support_store_disk_bytes(dir) <= options.bytes_max + 65536);
    }
    store_close(store);
    store = support_store_open(&options);
    for (unsigned i = 0; i < 9; i++)
        assert_true(support_store_absent(store, i));
    assert_true(support_store_matches(store, count - 1, 1, 1));
    store_close(store);
}

/* The budget of a full store is lowered: what makes room is still let in, nothing else is.
 * Fails with BREAK_REMOVAL_OVER. */
static void removes_over_a_lowered_budget(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct kv_diag diag = {""};
    struct store_batch *batch = NULL;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    for (unsigned i = 0; i < 40; i++)
        assert_int_equal(support_store_commit(store, i, i + 1, 1, &diag), KV_OK);
    store_close(store);
    store_options_limit(&options, 1 << 20);
    uint64_t before = support_store_disk_bytes(dir);
    assert_true(before > options.bytes_max);
    store = support_store_open(&options);
    assert_int_equal(store_batch_begin(store, 0, &batch, &diag), KV_ERR_NO_SPACE);
    assert_int_equal(store_batch_begin_removal(store, &batch, &diag), KV_OK);
    assert_int_equal(store_batch_delete(batch, "r00000", 6, &diag), KV_OK);
    assert_int_equal(store_batch_update(batch, "r00001", 6, "new", 3, &diag), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, &diag), KV_OK);
    assert_true(support_store_absent(store, 0));
    assert_true(support_store_disk_bytes(dir) <= before + 65536);
    /* An extent is no removal, whoever brings it. */
    struct iovec piece = {dir, 5};
    const struct store_part part = {.kind = 1, .pieces = &piece, .piece_count = 1};
    const struct store_put put = {.key = "x",
                                  .key_bytes = 1,
                                  .value = "v",
                                  .value_bytes = 1,
                                  .parts = &part,
                                  .part_count = 1};
    assert_int_equal(store_batch_begin_removal(store, &batch, &diag), KV_OK);
    assert_int_equal(store_batch_put(batch, &put, &diag), KV_ERR_NO_SPACE);
    store_batch_abandon(batch);
    store_close(store);
}

/* A real full disk: a tmpfs of 6 MiB, filled to the brim, then given room again. */
static void full_tmpfs(void **state) {
    (void)state;
    char mount_dir[TESTING_PATH_BYTES];
    char dir[400];
    struct kv_diag diag = {""};
    testing_temp_dir(mount_dir);
    if (mount("tmpfs", mount_dir, "tmpfs", 0, "size=6m") != 0)
        testing_skip("mounting needs root");
    snprintf(dir, sizeof dir, "%s/store", mount_dir);
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 64 << 20; /* preallocation must not need what is not there */
    struct store *store = support_store_open(&options);
    enum kv_err err = KV_OK;
    unsigned count = 0;
    while (err == KV_OK && count < 1000) {
        err = support_store_commit(store, count, count + 1, 1, &diag);
        count += err == KV_OK;
    }
    assert_int_equal(err, KV_ERR_NO_SPACE);
    assert_true(count >= 60);
    for (unsigned i = 0; i < count; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    for (int i = 0; i < 3; i++)
        assert_int_equal(support_store_commit(store, count, count + 20, 1, NULL), KV_ERR_NO_SPACE);
    assert_int_equal(mount(NULL, mount_dir, NULL, MS_REMOUNT, "size=16m"), 0);
    struct store_stats stats;
    store_stats_get(store, &stats);
    if (!stats.refuses_writes)
        assert_int_equal(support_store_commit(store, count, count + 20, 1, &diag), KV_OK);
    store_close(store);
    store = support_store_open(&options);
    for (unsigned i = 0; i < count; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    assert_int_equal(support_store_commit(store, count, count + 20, 1, &diag), KV_OK);
    store_close(store);
    assert_int_equal(umount(mount_dir), 0);
}

/* Writes to files without a name succeed, and nobody would ever find them.
 * Fails with BREAK_REMOVED_STORE. */
static void removed_store_acknowledges_nothing(void **state) {
    (void)state;
    for (int whole = 0; whole < 2; whole++) {
        char dir[TESTING_PATH_BYTES];
        char command[TESTING_PATH_BYTES + 64];
        struct kv_diag diag = {""};
        testing_temp_dir(dir);
        struct store_options options = support_store_options(dir);
        struct store *store = support_store_open(&options);
        assert_int_equal(support_store_commit(store, 0, 4, 1, NULL), KV_OK);
        snprintf(command, sizeof command, whole ? "rm -r '%s'" : "rm '%s'/seg/*", dir);
        assert_int_equal(system(command), 0);
        assert_int_equal(support_store_commit(store, 4, 8, 1, &diag), KV_ERR_IO);
        assert_non_null(strstr(diag.text, "removed"));
        store_close(store);
    }
}

static void allocation_failures(void **state) {
    (void)state;
    uint64_t k = 1;
    for (;; k++) {
        char dir[TESTING_PATH_BYTES];
        struct testing_alloc alloc;
        struct kv_diag diag = {""};
        testing_temp_dir(dir);
        testing_alloc_init(&alloc, 0);
        struct store_options options = support_store_options(dir);
        options.alloc = &alloc.alloc;
        struct store *store = support_store_open(&options);
        assert_int_equal(support_store_commit(store, FIRST, 1, 1, NULL), KV_OK);
        struct store_batch *batch = NULL;
        alloc.request_count = 0;
        alloc.fail_at = k;
        enum kv_err err = store_batch_begin(store, 0, &batch, &diag);
        if (err == KV_OK) {
            static uint8_t big[300000];
            struct iovec piece = {big, sizeof big};
            struct store_part part = {5, STORE_SHUFFLE_ZSTD, &piece, 1, 0};
            static uint8_t value[40000];
            struct store_put put = {"big", 3, value, sizeof value, &part, 1};
            err = store_batch_put(batch, &put, &diag);
            if (err == KV_OK)
                err = store_batch_update(batch, "r00000", 6, "new", 3, &diag);
            if (err == KV_OK)
                err = store_batch_commit(batch, NULL, &diag);
            else
                store_batch_abandon(batch);
        }
        alloc.fail_at = 0;
        assert_int_equal(err, alloc.failed_count == 0 ? KV_OK : KV_ERR_NOMEM);
        int exists = 2;
        assert_int_equal(store_exists(store, "big", 3, &exists, NULL), KV_OK);
        assert_int_equal(exists, err == KV_OK);
        assert_int_equal(support_store_matches(store, 0, 1, 1), err != KV_OK);
        assert_int_equal(support_store_commit(store, 9, 10, 1, NULL), KV_OK);
        assert_true(support_store_matches(store, 9, 1, 1));
        store_close(store);
        assert_int_equal(alloc.live_count, 0);
        if (alloc.failed_count == 0)
            break;
    }
    assert_true(k >= 4);
}

static int no_space_left(void *context, int file, uint64_t *bytes_out) {
    (void)context, (void)file;
    *bytes_out = 0;
    return 0;
}

/* A batch of records that have next to nothing but their keys: the index grows faster than the
 * segments, which end at 1 MiB. */
static enum kv_err commit_small(struct store *store, unsigned first, unsigned count,
                                struct kv_diag *diag) {
    struct store_batch *batch = NULL;
    enum kv_err err = store_batch_begin(store, 0, &batch, diag);
    for (unsigned i = first; i < first + count && err == KV_OK; i++) {
        char key[200];
        int length = snprintf(key, sizeof key, "small%0190u", i * 7919u % 100003u);
        const struct store_put put = {
            .key = key, .key_bytes = (size_t)length, .value = "v", .value_bytes = 1};
        err = store_batch_put(batch, &put, diag);
    }
    return err == KV_OK ? store_batch_commit(batch, NULL, diag) : err;
}

/* The disk is full in the middle of a write of the index itself, which LMDB calls an I/O error: the
 * store refuses this batch and takes the next one. BREAK_SHORT_COMMIT */
static void an_index_that_is_cut_short_is_a_full_disk(void **state) {
    struct rig rig;
    struct kv_diag diag = {""};
    struct rlimit before, cut;
    struct stat data;
    char path[TESTING_PATH_BYTES + 32];
    enum kv_err err = KV_OK;
    (void)state;
    make_rig(&rig, io_posix_door());
    store_close(rig.store);
    struct io_door door = *faulty_io_door(rig.faulty);
    door.free_space = no_space_left;
    rig.options.door = &door;
    rig.store = support_store_open(&rig.options);
    for (unsigned i = 0; i < 12; i++)
        assert_int_equal(commit_small(rig.store, i * 1000, 1000, &diag), KV_OK);
    snprintf(path, sizeof path, "%s/index/data.mdb", rig.dir);
    assert_int_equal(stat(path, &data), 0);
    assert_true(data.st_size > 2 << 20);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    cut = (struct rlimit){(rlim_t)data.st_size + 2048, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &cut), 0);
    unsigned next = 12000;
    for (unsigned i = 0; i < 12 && err == KV_OK; i++, next += err == KV_OK ? 1000 : 0)
        err = commit_small(rig.store, next, 1000, &diag);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    if (err != KV_ERR_NO_SPACE)
        fail_msg("%s: %s", kv_err_name(err), diag.text);
    assert_non_null(strstr(diag.text, "index: cannot commit"));
    holds_old(rig.store);
    if (commit_small(rig.store, next, 1000, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    drop_rig(&rig);
}

TESTING_MAIN(cmocka_unit_test(an_index_that_is_cut_short_is_a_full_disk),
             cmocka_unit_test(removed_store_acknowledges_nothing),
             cmocka_unit_test(no_space_anywhere),
             cmocka_unit_test(failed_index_commit_stays_failed),
             cmocka_unit_test(failed_sync_refuses_until_reopened),
             cmocka_unit_test(torn_write_fails_the_batch),
             cmocka_unit_test(reads_go_on_while_a_save_hangs),
             cmocka_unit_test(stalled_write_times_out), cmocka_unit_test(budget_is_hard),
             cmocka_unit_test(removes_over_a_lowered_budget), cmocka_unit_test(full_tmpfs),
             cmocka_unit_test(allocation_failures))
