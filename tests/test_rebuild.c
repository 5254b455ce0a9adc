/* tests/test_rebuild.c - the index lost, damaged, foreign; segments with holes.
 *
 * Responsible for: a rebuilt index equals the lost one record for record, what cannot be rebuilt is
 * said, and an empty list is never the answer to damage.
 * Not responsible for: crashes (test_recover.c).
 * Broken twins: BREAK_LAST_REPLAY, BREAK_REINDEX_AGREE,
 * BREAK_REPLACED_UNSEEN, BREAK_BETWEEN (who_opens_between_two_indexes_waits).
 */
#include "store/store.h"

#include "tests/support_store.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Puts, replacements, renames and deletions over several segments and three openings. */
static void make_history(const char *dir) {
    struct store_options options = support_store_options(dir);
    for (unsigned opening = 0; opening < 3; opening++) {
        struct store *store = support_store_open(&options);
        struct store_batch *batch = NULL;
        unsigned base = opening * 20;
        assert_int_equal(support_store_commit(store, base, base + 20, 1, NULL), KV_OK);
        assert_int_equal(support_store_commit(store, base + 5, base + 10, 2, NULL), KV_OK);
        assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
        for (unsigned i = base + 10; i < base + 15; i++) {
            char key[16];
            snprintf(key, sizeof key, "r%05u", i);
            assert_int_equal(store_batch_delete(batch, key, strlen(key), NULL), KV_OK);
        }
        char key[16];
        snprintf(key, sizeof key, "r%05u", base);
        assert_int_equal(store_batch_update(batch, key, strlen(key), "renamed", 7, NULL), KV_OK);
        struct store_put put = {"empty", 5, "", 0, NULL, 0};
        assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
        assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
        store_close(store);
    }
}

static char *dump_of(const char *dir, char *opened_out) {
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_stats stats;
    store_stats_get(store, &stats);
    if (opened_out != NULL)
        memcpy(opened_out, stats.opened, sizeof stats.opened);
    char *dump = support_store_dump(store);
    store_close(store);
    return dump;
}

static void lost_index_comes_back_equal(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char opened[320];
    testing_temp_dir(dir);
    make_history(dir);
    char *before = dump_of(dir, opened);
    assert_string_equal(opened, "");
    assert_true(strlen(before) > 5000);
    support_store_remove_index(dir);
    char *after = dump_of(dir, opened);
    assert_string_equal(before, after);
    assert_non_null(strstr(opened, "rebuilt from 9 batches: 46 records"));
    free(after);
    /* And once more after writing on top of a rebuilt index. */
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 70, 75, 1, NULL), KV_OK);
    store_close(store);
    free(before);
    before = dump_of(dir, NULL);
    support_store_remove_index(dir);
    after = dump_of(dir, NULL);
    assert_string_equal(before, after);
    free(before);
    free(after);
}

/* A reader rebuilds too, when nobody holds the lock; beside a holder it says who that is. */
static void reader_rebuilds_under_the_lock(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct kv_diag diag = {""};
    int to_parent[2];
    char byte = 0;
    testing_temp_dir(dir);
    make_history(dir);
    char *before = dump_of(dir, NULL);
    support_store_remove_index(dir);
    struct store_options options = support_store_options(dir);
    options.read_only = 1;
    struct store *store = support_store_open(&options);
    char *after = support_store_dump(store);
    assert_string_equal(before, after);
    store_close(store);
    free(before);
    free(after);
    assert_int_equal(pipe(to_parent), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        options.read_only = 0;
        options.program = "holder";
        if (store_open(&options, &store, NULL) != KV_OK || write(to_parent[1], "x", 1) != 1)
            _exit(1);
        pause();
        _exit(0);
    }
    assert_int_equal(read(to_parent[0], &byte, 1), 1);
    support_store_remove_index(dir);
    assert_int_equal(store_open(&options, &store, &diag), KV_ERR_BUSY);
    assert_non_null(strstr(diag.text, "holder"));
    assert_non_null(strstr(diag.text, "index is missing"));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(to_parent[0]);
    close(to_parent[1]);
}

static uint64_t index_file_bytes(const char *dir) {
    char path[400];
    struct stat info;
    snprintf(path, sizeof path, "%s/index/data.mdb", dir);
    assert_int_equal(stat(path, &info), 0);
    return (uint64_t)info.st_size;
}

/* The index file cut anywhere or replaced by noise: always the same list. */
static void damaged_index_file(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES];
    testing_temp_dir(base);
    make_history(base);
    char *before = dump_of(base, NULL);
    uint64_t bytes = index_file_bytes(base);
    for (uint64_t cut = 0; cut < bytes; cut += bytes / 9 & ~(uint64_t)511) {
        char dir[TESTING_PATH_BYTES];
        testing_temp_dir(dir);
        support_store_copy(base, dir);
        support_store_truncate(dir, "index/data.mdb", cut);
        char *after = dump_of(dir, NULL);
        assert_string_equal(before, after);
        free(after);
    }
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    support_store_copy(base, dir);
    for (uint64_t off = 0; off < 8192; off += 64)
        support_store_flip(dir, "index/data.mdb", off, 0xff);
    char *after = dump_of(dir, NULL);
    assert_string_equal(before, after);
    free(after);
    free(before);
}

/* One byte of the index flipped: the right list or a refusal, in a child because LMDB itself may
 * end the process on damage that its own checks meet.
 * Fails with BREAK_LAST_REPLAY. */
static void flipped_index_byte(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES];
    char dir[TESTING_PATH_BYTES];
    struct testing_random random;
    testing_temp_dir(base);
    testing_temp_dir(dir);
    make_history(base);
    char *before = dump_of(base, NULL);
    uint64_t bytes = index_file_bytes(base);
    testing_random_init(&random, testing_seed("index flips", 99));
    unsigned right = 0;
    unsigned rounds = testing_quick() ? 30 : 120;
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t off = testing_random_below(&random, bytes);
        support_store_copy(base, dir);
        support_store_flip(dir, "index/data.mdb", off, (unsigned char)(1u << (round % 8)));
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct store_options options = support_store_options(dir);
            struct store *store = NULL;
            if (store_open(&options, &store, NULL) != KV_OK)
                _exit(2);
            char *after = support_store_dump(store);
            _exit(strcmp(before, after) == 0 ? 0 : 1);
        }
        int status = 0;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("flip at %llu: status %x", (unsigned long long)off, (unsigned)status);
        right++;
    }
    assert_int_equal(right, rounds);
    free(before);
}

static void index_of_another_store(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char other[TESTING_PATH_BYTES];
    char command[1200];
    testing_temp_dir(dir);
    testing_temp_dir(other);
    make_history(dir);
    struct store_options options = support_store_options(other);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 2, 7, NULL), KV_OK);
    store_close(store);
    char *before = dump_of(dir, NULL);
    snprintf(command, sizeof command, "cp '%s/index/data.mdb' '%s/index/'", other, dir);
    assert_int_equal(system(command), 0);
    char *after = dump_of(dir, NULL);
    assert_string_equal(before, after);
    free(before);
    free(after);
    /* With FORMAT of another store nothing in seg/ is ours: refused, never an empty list. */
    snprintf(command, sizeof command, "cp '%s/FORMAT' '%s/'", other, dir);
    assert_int_equal(system(command), 0);
    struct kv_diag diag = {""};
    options = support_store_options(dir);
    assert_int_equal(store_open(&options, &store, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "no batch of this store"));
}

/* The last batch damaged and the index lost: that batch is dropped whole and said, the rest is
 * equal, and its bytes are not overwritten. */
static void damaged_last_batch(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char opened[320];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 64 << 20;
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 5, 1, NULL), KV_OK);
    struct store_stats stats;
    store_stats_get(store, &stats);
    uint64_t first_bytes = stats.segment_bytes;
    assert_int_equal(support_store_commit(store, 3, 9, 2, NULL), KV_OK);
    store_close(store);
    uint64_t bytes = support_store_segment_bytes(dir, 1);
    for (int where = 0; where < 2; where++) {
        uint64_t off = where == 0 ? first_bytes + 100 : bytes - 4096 + 300;
        support_store_flip(dir, "seg/00000001.seg", off, 2);
        support_store_remove_index(dir);
        store = support_store_open(&options);
        store_stats_get(store, &stats);
        memcpy(opened, stats.opened, sizeof opened);
        assert_non_null(strstr(opened, "dropped"));
        for (unsigned i = 0; i < 5; i++)
            assert_true(support_store_matches(store, i, 1, 1));
        for (unsigned i = 5; i < 9; i++)
            assert_true(support_store_absent(store, i));
        assert_int_equal(support_store_commit(store, 20, 22, (unsigned)where, NULL), KV_OK);
        store_close(store);
        assert_true(support_store_segment_bytes(dir, 1) >= bytes);
        /* What was written since takes the place of the dropped batch in every later rebuild. */
        support_store_remove_index(dir);
        store = support_store_open(&options);
        assert_true(support_store_matches(store, 20, (unsigned)where, 1));
        assert_true(support_store_matches(store, 4, 1, 1));
        assert_true(support_store_absent(store, 5));
        store_close(store);
        if (where == 0) {
            /* Start over from a store with both batches whole. */
            char command[400];
            snprintf(command, sizeof command, "rm '%s'/seg/*", dir);
            assert_int_equal(system(command), 0);
            support_store_remove_index(dir);
            store = support_store_open(&options);
            assert_int_equal(support_store_commit(store, 0, 5, 1, NULL), KV_OK);
            assert_int_equal(support_store_commit(store, 3, 9, 2, NULL), KV_OK);
            store_close(store);
        }
    }
}

/* A batch in the middle is gone: said, and everything that the others put is there. */
static void hole_in_the_chain(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char opened[320];
    uint64_t ends[4];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 64 << 20;
    struct store *store = support_store_open(&options);
    for (unsigned i = 0; i < 4; i++) {
        struct store_stats stats;
        assert_int_equal(support_store_commit(store, i * 5, i * 5 + 5, 1, NULL), KV_OK);
        store_stats_get(store, &stats);
        ends[i] = stats.segment_bytes;
    }
    store_close(store);
    support_store_flip(dir, "seg/00000001.seg", ends[1] - 4096 + 60, 1);
    support_store_remove_index(dir);
    store = support_store_open(&options);
    struct store_stats stats;
    store_stats_get(store, &stats);
    memcpy(opened, stats.opened, sizeof opened);
    assert_non_null(strstr(opened, "1 batches are missing"));
    for (unsigned i = 0; i < 20; i++) {
        if (i >= 5 && i < 10)
            assert_true(support_store_absent(store, i));
        else
            assert_true(support_store_matches(store, i, 1, 1));
    }
    assert_int_equal(stats.batches, 4);
    assert_int_equal(support_store_commit(store, 30, 31, 1, NULL), KV_OK);
    store_close(store);
    /* A damaged extent in an earlier batch condemns nothing but itself. */
    support_store_flip(dir, "seg/00000001.seg", ends[1] + 50, 1);
    support_store_remove_index(dir);
    store = support_store_open(&options);
    assert_false(support_store_matches(store, 10, 1, 1));
    assert_false(support_store_absent(store, 10));
    assert_true(support_store_matches(store, 11, 1, 1));
    assert_true(support_store_matches(store, 30, 1, 1));
    store_close(store);
}

/* A segment in the middle removed: its records are lost or refused, the others are there. */
static void missing_segment(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[400];
    testing_temp_dir(dir);
    make_history(dir);
    snprintf(path, sizeof path, "%s/seg/00000002.seg", dir);
    assert_int_equal(unlink(path), 0);
    support_store_remove_index(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_stats stats;
    unsigned good = 0;
    store_stats_get(store, &stats);
    assert_true(stats.records > 0 && stats.records <= 61); /* deleted ones may come back */
    for (unsigned i = 0; i < 60; i++)
        good += (unsigned)support_store_matches(store, i, 1 + (i % 20 >= 5 && i % 20 < 10), 1);
    assert_true(good >= 10);
    store_close(store);
}

/* --- made anew while the store is open */

struct looking {
    struct store *store;
    atomic_int stop, wrong;
    atomic_uint looks;
};

static void *look_all_the_while(void *context) {
    struct looking *looking = context;
    while (!atomic_load(&looking->stop)) {
        if (!support_store_matches(looking->store, 16, 1, 1) ||
            !support_store_absent(looking->store, 12))
            atomic_store(&looking->wrong, 1);
        atomic_fetch_add(&looking->looks, 1);
    }
    return NULL;
}

static ino_t index_of(const char *dir) {
    char path[TESTING_PATH_BYTES + 32];
    struct stat info;
    snprintf(path, sizeof path, "%s/index/data.mdb", dir);
    assert_int_equal(stat(path, &info), 0);
    return info.st_ino;
}

static void only_while_it_opens(void *context, uint64_t done, uint64_t all) {
    (void)done, (void)all;
    assert_false(*(int *)context);
}

/* BREAK_PROGRESS_STAYS tells whoever opened the store, long after that. */
static void an_open_store_gets_a_new_index(void **state) {
    int is_open = 0;
    (void)state;
    char dir[TESTING_PATH_BYTES], note[STORE_NOTE_BYTES];
    struct looking looking = {.looks = 0};
    pthread_t thread;
    testing_temp_dir(dir);
    make_history(dir);
    struct store_options options = support_store_options(dir);
    options.progress = only_while_it_opens;
    options.progress_context = &is_open;
    struct store *store = looking.store = support_store_open(&options);
    is_open = 1;
    char *before = support_store_dump(store);
    ino_t file = index_of(dir);
    assert_int_equal(pthread_create(&thread, NULL, look_all_the_while, &looking), 0);
    for (int i = 0; i < 5; i++) {
        unsigned seen = atomic_load(&looking.looks);
        assert_int_equal(store_reindex(store, note, NULL), KV_OK);
        assert_non_null(strstr(note, "46 records"));
        while (atomic_load(&looking.looks) < seen + 2)
            sched_yield();
    }
    atomic_store(&looking.stop, 1);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&looking.wrong), 0);
    assert_true(index_of(dir) != file);
    char *after = support_store_dump(store);
    assert_string_equal(before, after);
    free(after);
    struct store_stats stats;
    store_stats_get(store, &stats);
    assert_string_equal(stats.opened, "");
    /* What is written behind it is durable, in the index and in the segments. */
    assert_int_equal(support_store_commit(store, 70, 75, 1, NULL), KV_OK);
    free(before);
    before = support_store_dump(store);
    store_close(store);
    for (int i = 0; i < 2; i++) {
        after = dump_of(dir, NULL);
        assert_string_equal(before, after);
        free(after);
        support_store_remove_index(dir);
    }
    free(before);
}

/* A process that reads is told, and never led to where something was before. */
static void a_reader_of_the_old_index_is_told(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], note[STORE_NOTE_BYTES], word;
    int to_child[2], to_parent[2], status = 0;
    testing_temp_dir(dir);
    make_history(dir);
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(to_parent), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct store_options options = support_store_options(dir);
        struct store_record record;
        struct kv_diag diag = {""};
        options.read_only = 1;
        struct store *store = support_store_open(&options);
        int good = support_store_matches(store, 16, 1, 1);
        good &= write(to_parent[1], "r", 1) == 1 && read(to_child[0], &word, 1) == 1;
        good &= store_get(store, "r00016", 6, &record, &diag) == KV_ERR_IO;
        good &= strstr(diag.text, "run this again") != NULL;
        store_close(store);
        store = support_store_open(&options);
        good &= support_store_matches(store, 16, 1, 1);
        _exit(good ? 0 : 1);
    }
    assert_int_equal(read(to_parent[0], &word, 1), 1);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(store_reindex(store, note, NULL), KV_OK);
    assert_int_equal(write(to_child[1], "g", 1), 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    store_close(store);
    for (int i = 0; i < 2; i++) {
        close(to_child[i]);
        close(to_parent[i]);
    }
}

/* What another process sees of the store, again and again. */
struct opening {
    atomic_int stop, failed;
    atomic_uint opened;
    struct kv_diag diag;
};

static void open_all_the_while(struct opening *opening, const char *dir) {
    struct store_options options = support_store_options(dir);
    struct store *store = NULL;
    options.read_only = options.inspect = 1;
    while (!atomic_load(&opening->stop)) {
        if (store_open(&options, &store, &opening->diag) != KV_OK) {
            atomic_store(&opening->failed, 1);
            return;
        }
        store_close(store);
        atomic_fetch_add(&opening->opened, 1);
    }
}

/* Between the old index and the new one there is a moment without one: whoever opens the store then
 * waits for it, and keeps nobody from going on. Fails with BREAK_BETWEEN. */
static void who_opens_between_two_indexes_waits(void **state) {
    (void)state;
    enum { OPENED = 60, REBUILDS_MAX = 20000 };
    char dir[TESTING_PATH_BYTES], note[STORE_NOTE_BYTES];
    struct kv_diag diag = {""};
    int status = 0;
    testing_temp_dir(dir);
    make_history(dir);
    struct opening *opening =
        mmap(NULL, sizeof *opening, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(opening, MAP_FAILED);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        open_all_the_while(opening, dir);
        _exit(0);
    }
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    enum kv_err err = KV_OK;
    for (int i = 0; i < REBUILDS_MAX && err == KV_OK && !atomic_load(&opening->failed) &&
                    atomic_load(&opening->opened) < OPENED;
         i++)
        err = store_reindex(store, note, &diag);
    atomic_store(&opening->stop, 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (atomic_load(&opening->failed))
        fail_msg("after %u openings: %s", atomic_load(&opening->opened), opening->diag.text);
    if (err != KV_OK)
        fail_msg("%s", diag.text);
    assert_in_range(atomic_load(&opening->opened), OPENED, UINT32_MAX);
    assert_int_equal(status, 0);
    store_close(store);
    munmap(opening, sizeof *opening);
}

/* A batch that the segments have lost is not lost in the index, too. */
static void a_new_index_that_knows_less_is_refused(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], note[STORE_NOTE_BYTES];
    struct kv_diag diag = {""};
    struct store_stats stats;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 3, 1, NULL), KV_OK);
    store_stats_get(store, &stats);
    assert_int_equal(support_store_commit(store, 3, 5, 1, NULL), KV_OK);
    char *before = support_store_dump(store);
    support_store_flip(dir, "seg/00000001.seg", stats.segment_bytes - 4096 + 60, 1);
    assert_int_equal(store_reindex(store, note, &diag), KV_ERR_MISMATCH);
    assert_non_null(strstr(diag.text, "nothing was changed"));
    char *after = support_store_dump(store);
    assert_string_equal(before, after);
    assert_int_equal(support_store_commit(store, 5, 7, 1, NULL), KV_OK);
    store_close(store);
    store = support_store_open(&options);
    for (unsigned i = 0; i < 7; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    store_close(store);
    options.read_only = 1;
    store = support_store_open(&options);
    assert_int_equal(store_reindex(store, note, &diag), KV_ERR_INVALID);
    store_close(store);
    free(before);
    free(after);
}

TESTING_MAIN(cmocka_unit_test(lost_index_comes_back_equal),
             cmocka_unit_test(an_open_store_gets_a_new_index),
             cmocka_unit_test(a_reader_of_the_old_index_is_told),
             cmocka_unit_test(who_opens_between_two_indexes_waits),
             cmocka_unit_test(a_new_index_that_knows_less_is_refused),
             cmocka_unit_test(reader_rebuilds_under_the_lock), cmocka_unit_test(damaged_index_file),
             cmocka_unit_test(flipped_index_byte), cmocka_unit_test(index_of_another_store),
             cmocka_unit_test(damaged_last_batch), cmocka_unit_test(hole_in_the_chain),
             cmocka_unit_test(missing_segment))
