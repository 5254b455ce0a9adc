/* tests/test_store.c - records put, found, walked, changed and deleted.
 *
 * Responsible for: the round trip on both doors and on tmpfs, update and delete semantics, walks,
 * sizes, counts, the account of a commit, reading beside a writer in another process, what is said
 * of direct I/O.
 * Not responsible for: faults (test_store_batch.c), opening (test_store_open.c).
 * Broken twins: BREAK_UPDATE, BREAK_STALE_READERS, BREAK_READERS.
 */
#include "store/store.h"

#include "store/io.h"
#include "store/store_batch.h"
#include "store/store_read.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <lmdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void round_trip_in(const char *dir, const struct io_door *door) {
    struct store_options options = support_store_options(dir);
    options.door = door;
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 40, 1, NULL), KV_OK);
    assert_int_equal(support_store_commit(store, 10, 20, 2, NULL), KV_OK);
    for (int pass = 0; pass < 2; pass++) {
        for (unsigned i = 0; i < 40; i++) {
            unsigned version = i >= 10 && i < 20 ? 2 : 1;
            assert_true(support_store_matches(store, i, version, 1));
            assert_true(support_store_matches(store, i, version, 0));
            assert_false(support_store_matches(store, i, 3 - version, 1));
        }
        struct store_stats stats;
        store_stats_get(store, &stats);
        assert_int_equal(stats.records, 40);
        assert_int_equal(stats.batches, 2);
        assert_true(stats.segments >= 3);
        assert_string_equal(stats.door_name, door->name);
        assert_true(stats.garbage_bytes > 10 * 40000);
        assert_true(stats.live_bytes + stats.garbage_bytes == stats.segment_bytes);
        uint64_t on_disk = 0;
        for (unsigned n = 1; n <= stats.segments; n++)
            on_disk += support_store_segment_bytes(dir, n);
        store_close(store);
        uint64_t closed = 0;
        for (unsigned n = 1; n <= stats.segments; n++)
            closed += support_store_segment_bytes(dir, n);
        assert_true(on_disk >= stats.segment_bytes);
        assert_int_equal(closed, stats.segment_bytes);
        store = support_store_open(&options);
    }
    store_close(store);
}

static void round_trip(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        char dir[TESTING_PATH_BYTES];
        testing_temp_dir(dir);
        round_trip_in(dir, i == 0 ? io_uring_door() : io_posix_door());
    }
}

static void round_trip_on_tmpfs(void **state) {
    (void)state;
    char dir[64] = "/dev/shm/store_test_XXXXXX";
    char command[128];
    if (mkdtemp(dir) == NULL)
        testing_skip("no tmpfs at /dev/shm");
    round_trip_in(dir, io_best_door());
    snprintf(command, sizeof command, "rm -r '%s'", dir);
    assert_int_equal(system(command), 0);
}

static enum kv_err put_value(struct store_batch *batch, const char *key, const char *value) {
    struct store_put put = {
        .key = key, .key_bytes = strlen(key), .value = value, .value_bytes = strlen(value)};
    return store_batch_put(batch, &put, NULL);
}

static void has_value(struct store *store, const char *key, const char *value) {
    struct store_record record;
    enum kv_err err = store_get(store, key, strlen(key), &record, NULL);
    if (value == NULL) {
        assert_int_equal(err, KV_ERR_NOT_FOUND);
        return;
    }
    assert_int_equal(err, KV_OK);
    assert_string_equal((const char *)record.value, value);
    assert_int_equal(record.value_bytes, strlen(value));
    store_record_release(store, &record);
}

static void update_keeps_extents(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    assert_int_equal(support_store_commit(store, 1, 2, 5, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_update(batch, "r00001", 6, "other", 5, NULL), KV_OK);
    assert_int_equal(store_batch_update(batch, "r00002", 6, "other", 5, NULL), KV_ERR_NOT_FOUND);
    /* The batch sees its own work: put then update, delete then update. */
    assert_int_equal(support_store_put(batch, 3, 1, NULL), KV_OK);
    assert_int_equal(store_batch_update(batch, "r00003", 6, "v3.1", 4, NULL), KV_OK);
    assert_int_equal(put_value(batch, "gone", "x"), KV_OK);
    assert_int_equal(store_batch_delete(batch, "gone", 4, NULL), KV_OK);
    assert_int_equal(store_batch_update(batch, "gone", 4, "y", 1, NULL), KV_ERR_NOT_FOUND);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    has_value(store, "r00001", "other");
    has_value(store, "gone", NULL);
    assert_true(support_store_matches(store, 3, 1, 1));
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_update(batch, "r00001", 6, "v1.5", 4, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    assert_true(support_store_matches(store, 1, 5, 1));
    store_close(store);
}

static void delete_makes_garbage(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    struct store_stats stats;
    assert_int_equal(support_store_commit(store, 0, 4, 1, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < 4; i++) {
        char key[16];
        snprintf(key, sizeof key, "r%05u", i);
        assert_int_equal(store_batch_delete(batch, key, strlen(key), NULL), KV_OK);
    }
    assert_int_equal(store_batch_delete(batch, "never", 5, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    store_stats_get(store, &stats);
    assert_int_equal(stats.records, 0);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.garbage_bytes, stats.segment_bytes);
    assert_true(support_store_absent(store, 2));
    store_close(store);
}

static void walks_are_ordered_and_bounded(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    struct store_record record;
    static const char *const keys[] = {"a", "b", "b\xff", "ba", "bb", "c", "\xd0\xb6"};
    static const char *const with_b[] = {"b", "ba", "bb", "b\xff"};
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        assert_int_equal(put_value(batch, keys[i], keys[i]), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    struct store_walk walk = {.prefix = "b", .prefix_bytes = 1};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(store_next(store, &walk, &record, NULL), KV_OK);
        assert_int_equal(record.key_bytes, strlen(with_b[i]));
        assert_memory_equal(record.key, with_b[i], record.key_bytes);
        store_record_release(store, &record);
    }
    assert_int_equal(store_next(store, &walk, &record, NULL), KV_ERR_NOT_FOUND);
    struct store_walk all = {0};
    size_t count = 0;
    while (store_next(store, &all, &record, NULL) == KV_OK) {
        count++;
        store_record_release(store, &record);
    }
    assert_int_equal(count, 7);
    struct store_walk none = {.prefix = "zz", .prefix_bytes = 2};
    assert_int_equal(store_next(store, &none, &record, NULL), KV_ERR_NOT_FOUND);
    store_close(store);
}

static void sizes_are_checked(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    static char big[STORE_VALUE_BYTES_MAX + 1];
    struct iovec empty = {big, 0};
    struct iovec some = {big, 10};
    struct iovec huge = {big, (size_t)STORE_EXTENT_BYTES_MAX + 1};
    struct iovec wrap[2] = {{big, SIZE_MAX}, {big, 2}};
    struct store_part parts[] = {{0, STORE_RAW, &empty, 1, 0},
                                 {0, STORE_RAW, &some, 0, 0},
                                 {0, STORE_RAW, &some, STORE_PIECES_MAX + 1, 0},
                                 {STORE_KINDS_MAX, STORE_RAW, &some, 1, 0},
                                 {0, STORE_RAW, &huge, 1, 0},
                                 {0, STORE_RAW, wrap, 2, 0}};
    static const enum kv_err part_errs[] = {KV_ERR_INVALID, KV_ERR_INVALID, KV_ERR_INVALID,
                                            KV_ERR_INVALID, KV_ERR_LIMIT,   KV_ERR_LIMIT};
    struct store_put puts[] = {{big, 0, big, 1, NULL, 0},
                               {big, STORE_KEY_BYTES_MAX + 1, big, 1, NULL, 0},
                               {big, 1, big, STORE_VALUE_BYTES_MAX + 1, NULL, 0},
                               {big, 1, big, 1, parts, STORE_EXTENTS_MAX + 1}};
    static const enum kv_err put_errs[] = {KV_ERR_INVALID, KV_ERR_INVALID, KV_ERR_LIMIT,
                                           KV_ERR_LIMIT};
    for (size_t i = 0; i < 10; i++) {
        struct store_put one = {"k", 1, "v", 1, &parts[i % 6], 1};
        const struct store_put *put = i < 6 ? &one : &puts[i - 6];
        struct kv_diag diag = {""};
        assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
        assert_int_equal(store_batch_put(batch, put, &diag),
                         i < 6 ? part_errs[i] : put_errs[i - 6]);
        assert_true(diag.text[0] != 0);
        /* A failed put fails the batch: nothing half done can be committed. */
        assert_int_equal(store_batch_commit(batch, NULL, NULL),
                         i < 6 ? part_errs[i] : put_errs[i - 6]);
    }
    struct store_record record;
    assert_int_equal(store_get(store, big, 0, &record, NULL), KV_ERR_INVALID);
    assert_int_equal(store_get(store, big, STORE_KEY_BYTES_MAX + 1, &record, NULL), KV_ERR_INVALID);
    /* The largest of everything that is allowed. */
    struct store_put most = {big, STORE_KEY_BYTES_MAX, big, STORE_VALUE_BYTES_MAX, NULL, 0};
    struct store_part all[STORE_EXTENTS_MAX];
    for (size_t i = 0; i < STORE_EXTENTS_MAX; i++)
        all[i] = (struct store_part){(uint8_t)(i % STORE_KINDS_MAX), STORE_RAW, &some, 1, 0};
    most.parts = all;
    most.part_count = STORE_EXTENTS_MAX;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_put(batch, &most, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    assert_int_equal(store_get(store, big, STORE_KEY_BYTES_MAX, &record, NULL), KV_OK);
    assert_int_equal(record.extent_count, STORE_EXTENTS_MAX);
    assert_int_equal(record.value_bytes, STORE_VALUE_BYTES_MAX);
    store_record_release(store, &record);
    assert_int_equal(store_read_check(store, big, STORE_KEY_BYTES_MAX, NULL, NULL), KV_OK);
    store_close(store);
}

static void batches_come_one_at_a_time(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    struct store_batch *second = NULL;
    struct store_commit_stats stats;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &second, NULL), KV_ERR_BUSY);
    assert_int_equal(support_store_put(batch, 1, 1, NULL), KV_OK);
    assert_true(support_store_absent(store, 1));
    store_batch_abandon(batch);
    assert_true(support_store_absent(store, 1));
    assert_int_equal(support_store_segment_bytes(dir, 1), 0);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, &stats, NULL), KV_OK);
    assert_int_equal(stats.written_bytes, 0); /* an empty batch writes nothing */
    store_batch_abandon(NULL);
    store_close(store);
}

static void commit_gives_its_account(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    struct store_commit_stats stats;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < 30; i++)
        assert_int_equal(support_store_put(batch, i, 1, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, &stats, NULL), KV_OK);
    assert_int_equal(stats.raw_by_kind[0], 30 * 30000);
    assert_int_equal(stats.stored_by_kind[0], 30 * 32768);
    assert_int_equal(stats.raw_by_kind[1], 30 * 20000);
    assert_int_equal(stats.stored_by_kind[1], 30 * 4096);
    assert_true(stats.stored_by_kind[2] < stats.raw_by_kind[2] * 92 / 100);
    assert_int_equal(stats.raw_bytes,
                     stats.raw_by_kind[0] + stats.raw_by_kind[1] + stats.raw_by_kind[2]);
    assert_int_equal(stats.stored_bytes,
                     stats.stored_by_kind[0] + stats.stored_by_kind[1] + stats.stored_by_kind[2]);
    assert_int_equal(stats.written_bytes, stats.stored_bytes + stats.record_bytes);
    assert_int_equal(stats.sequence, 1);
    assert_true(stats.writes >= 2 && stats.writes <= 6);
    store_close(store);
}

/* A reader in another process sees each commit whole, and takes no lock. */
static void readers_beside_a_writer(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    int to_child[2];
    int from_child[2];
    char byte = 0;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(from_child), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct store *store = NULL;
        options.read_only = 1;
        if (read(to_child[0], &byte, 1) != 1 || store_open(&options, &store, NULL) != KV_OK)
            _exit(1);
        if (!support_store_matches(store, 0, 1, 1) || !support_store_absent(store, 1))
            _exit(2);
        struct store_batch *batch = NULL;
        if (store_batch_begin(store, 0, &batch, NULL) != KV_ERR_INVALID)
            _exit(3);
        if (write(from_child[1], "x", 1) != 1 || read(to_child[0], &byte, 1) != 1)
            _exit(4);
        if (!support_store_matches(store, 0, 2, 1) || !support_store_matches(store, 1, 2, 0) ||
            !support_store_matches(store, 29, 2, 1))
            _exit(5);
        store_close(store);
        _exit(0);
    }
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
    assert_int_equal(write(to_child[1], "x", 1), 1);
    assert_int_equal(read(from_child[0], &byte, 1), 1);
    assert_int_equal(support_store_commit(store, 0, 30, 2, NULL), KV_OK);
    assert_int_equal(write(to_child[1], "x", 1), 1);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    store_close(store);
    for (int i = 0; i < 2; i++) {
        close(to_child[i]);
        close(from_child[i]);
    }
}

/* The index outgrows its first map of 16 MiB, also under a reader that has the old one. */
static void index_grows_by_itself(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    static char value[STORE_VALUE_BYTES_MAX];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_stats stats;
    unsigned count = 0;
    for (unsigned round = 0; round < 10; round++) {
        struct store_batch *batch = NULL;
        assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
        for (unsigned i = 0; i < 50; i++) {
            char key[32];
            snprintf(key, sizeof key, "big%u", count++);
            memset(value, (int)count, sizeof value);
            struct store_put put = {key, strlen(key), value, sizeof value, NULL, 0};
            assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
        }
        assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    }
    store_stats_get(store, &stats);
    assert_int_equal(stats.records, 500);
    assert_true(stats.index_bytes > (uint64_t)20 << 20);
    store_close(store);
    store = support_store_open(&options);
    struct store_record record;
    assert_int_equal(store_get(store, "big499", 6, &record, NULL), KV_OK);
    assert_int_equal(record.value[17], (uint8_t)500);
    store_record_release(store, &record);
    store_close(store);
}

/* A program that takes so many readers' slots, 0: every one, each in the middle of a look-up. */
static pid_t slots_taken_by(const char *dir, int count) {
    int ends[2];
    char word = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        char path[TESTING_PATH_BYTES + 16];
        MDB_env *env = NULL;
        MDB_txn *txn = NULL;
        snprintf(path, sizeof path, "%s/index", dir);
        if (mdb_env_create(&env) != 0 || mdb_env_open(env, path, MDB_RDONLY | MDB_NOTLS, 0600) != 0)
            _exit(1);
        int rc = 0;
        for (int i = 0; rc == 0 && (count == 0 || i < count); i++)
            rc = mdb_txn_begin(env, NULL, MDB_RDONLY, &txn);
        if (rc != (count == 0 ? MDB_READERS_FULL : 0) || write(ends[1], "x", 1) != 1)
            _exit(2);
        pause();
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &word, 1), 1);
    close(ends[0]);
    return child;
}

static void end_of(pid_t child) {
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

static void killed_reader(const char *dir) {
    end_of(slots_taken_by(dir, 0));
}

/* Fails with BREAK_READERS. */
static void many_readers_find_a_slot(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_record record;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 3, 1, NULL), KV_OK);
    pid_t child = slots_taken_by(dir, 500);
    assert_true(support_store_matches(store, 1, 1, 1));
    assert_int_equal(support_store_commit(store, 3, 5, 1, NULL), KV_OK);
    /* As long as they live nobody takes the slots of others. */
    pid_t second = slots_taken_by(dir, 0);
    assert_int_equal(store_get(store, "r00001", 6, &record, &diag), KV_ERR_IO);
    assert_non_null(strstr(diag.text, "end some of them"));
    end_of(second);
    assert_true(support_store_matches(store, 1, 1, 1));
    end_of(child);
    store_close(store);
}

/* Look-ups find a slot, and what is written over and over does not grow the index.
 * Fails with BREAK_STALE_READERS. */
static void killed_readers_are_cleared(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    static char value[STORE_VALUE_BYTES_MAX];
    struct store_stats stats;
    struct store_record record;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    for (unsigned round = 0; round < 300; round++) {
        struct store_batch *batch = NULL;
        struct store_put put = {"big", 3, value, sizeof value, NULL, 0};
        memset(value, (int)round, sizeof value);
        assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
        assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
        assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
        if (round == 0)
            killed_reader(dir);
    }
    store_stats_get(store, &stats);
    print_message("%llu bytes of index\n", (unsigned long long)stats.index_bytes);
    assert_true(stats.index_bytes < (uint64_t)8 << 20);
    killed_reader(dir);
    struct kv_diag diag = {""};
    if (store_get(store, "big", 3, &record, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    store_record_release(store, &record);
    store_close(store);
}

/* Extents leave a record and are garbage at once; the others and the new value stand, also when the
 * index is made anew, and when the record was put in the same batch.
 * Fails with BREAK_UPDATE. */
static void shrinking_drops_kinds(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    struct store_record before, after;
    const struct store_put put = {.key = "r00001", .key_bytes = 6, .value = "x", .value_bytes = 1};
    assert_int_equal(support_store_commit(store, 0, 3, 1, NULL), KV_OK);
    assert_int_equal(store_get(store, "r00001", 6, &before, NULL), KV_OK);
    assert_int_equal(before.extent_count, 3);
    uint32_t drop = 1u << before.extents[1].kind;
    struct store_stats was, is;
    store_stats_get(store, &was);
    assert_int_equal(store_batch_begin_removal(store, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_shrink(batch, &put, drop, NULL), KV_OK);
    assert_int_equal(support_store_put(batch, 7, 1, NULL), KV_OK);
    const struct store_put fresh = {
        .key = "r00007", .key_bytes = 6, .value = "y", .value_bytes = 1};
    assert_int_equal(store_batch_shrink(batch, &fresh, drop, NULL), KV_OK);
    const struct store_put none = {.key = "absent", .key_bytes = 6, .value = "", .value_bytes = 0};
    assert_int_equal(store_batch_shrink(batch, &none, drop, NULL), KV_ERR_NOT_FOUND);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    store_stats_get(store, &is);
    assert_true(is.garbage_bytes > was.garbage_bytes);
    for (int pass = 0; pass < 2; pass++) {
        assert_int_equal(store_get(store, "r00001", 6, &after, NULL), KV_OK);
        assert_int_equal(after.extent_count, 2);
        assert_int_equal(after.value_bytes, 1);
        assert_memory_equal(&after.extents[0], &before.extents[0], sizeof after.extents[0]);
        assert_memory_equal(&after.extents[1], &before.extents[2], sizeof after.extents[0]);
        store_record_release(store, &after);
        assert_int_equal(store_read_check(store, "r00001", 6, NULL, NULL), KV_OK);
        assert_int_equal(store_get(store, "r00007", 6, &after, NULL), KV_OK);
        assert_int_equal(after.extent_count, 2);
        store_record_release(store, &after);
        assert_true(support_store_matches(store, 0, 1, 1));
        store_close(store);
        support_store_remove_index(dir);
        store = support_store_open(&options);
    }
    store_record_release(store, &before);
    store_close(store);
}

/* Flags of every open descriptor on a segment: how many have O_DIRECT, how many have not. */
static void count_flags(unsigned *direct_out, unsigned *buffered_out) {
    *direct_out = *buffered_out = 0;
    for (int fd = 3; fd < 256; fd++) {
        char path[64], target[512], line[128];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length <= 0)
            continue;
        target[length] = 0;
        if (strstr(target, ".seg") == NULL)
            continue;
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
        FILE *file = fopen(path, "r");
        assert_non_null(file);
        while (fgets(line, sizeof line, file) != NULL)
            if (strncmp(line, "flags:", 6) == 0)
                ++*(strtoul(line + 6, NULL, 8) & O_DIRECT ? direct_out : buffered_out);
        fclose(file);
    }
}

/* Pages of a segment that the page cache holds. */
static size_t cached_pages(const char *dir, unsigned number) {
    char path[TESTING_PATH_BYTES + 32];
    unsigned char resident[4096];
    size_t bytes = (size_t)support_store_segment_bytes(dir, number), count = 0;
    snprintf(path, sizeof path, "%s/seg/%08u.seg", dir, number);
    int file = open(path, O_RDONLY);
    assert_true(file >= 0 && bytes != 0 && bytes / 4096 < sizeof resident);
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
    assert_true(map != MAP_FAILED);
    assert_int_equal(mincore(map, bytes, resident), 0);
    for (size_t i = 0; i < (bytes + 4095) / 4096; i++)
        count += resident[i] & 1;
    munmap(map, bytes);
    close(file);
    return count;
}

/* CASE-36: what stats say of direct I/O is what the files are opened with, and what the page cache
 * shows; through both doors, asked for and not. */
static void the_log_equals_reality(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        char dir[TESTING_PATH_BYTES];
        struct store_stats stats;
        unsigned direct = 0, buffered = 0;
        testing_temp_dir(dir);
        struct store_options options = support_store_options(dir);
        options.door = i % 2 == 0 ? io_uring_door() : io_posix_door();
        options.direct_wanted = i < 2;
        struct store *store = support_store_open(&options);
        assert_int_equal(support_store_commit(store, 0, 20, 1, NULL), KV_OK);
        assert_true(support_store_matches(store, 3, 1, 1));
        store_stats_get(store, &stats);
        count_flags(&direct, &buffered);
        if (!options.direct_wanted)
            assert_false(stats.direct);
        assert_true(direct + buffered > 0);
        assert_int_equal(stats.direct ? buffered : direct, 0);
        assert_int_equal(cached_pages(dir, 1) == 0, stats.direct);
        print_message("%s: %s, %zu pages cached\n", stats.door_name,
                      stats.direct ? "O_DIRECT" : "buffered", cached_pages(dir, 1));
        store_close(store);
    }
}

TESTING_MAIN(cmocka_unit_test(shrinking_drops_kinds), cmocka_unit_test(the_log_equals_reality),
             cmocka_unit_test(round_trip), cmocka_unit_test(round_trip_on_tmpfs),
             cmocka_unit_test(update_keeps_extents), cmocka_unit_test(delete_makes_garbage),
             cmocka_unit_test(walks_are_ordered_and_bounded), cmocka_unit_test(sizes_are_checked),
             cmocka_unit_test(batches_come_one_at_a_time),
             cmocka_unit_test(commit_gives_its_account), cmocka_unit_test(readers_beside_a_writer),
             cmocka_unit_test(index_grows_by_itself), cmocka_unit_test(killed_readers_are_cleared),
             cmocka_unit_test(many_readers_find_a_slot))
