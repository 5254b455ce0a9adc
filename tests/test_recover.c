/* tests/test_recover.c - the process dies or the power fails at every point of a batch.
 *
 * Responsible for: after any death the store opens with the old state or the new one, never a
 * mixture, and what was acknowledged is there; what a crash left behind the tail is gone.
 * Not responsible for: lost or damaged indexes (test_rebuild.c).
 * Broken twins: BREAK_SYNC, BREAK_ENDED_SYNC, BREAK_ORDER, BREAK_RECOVER_SYNC,
 * BREAK_TORN_BATCH.
 */
#include "store/store.h"

#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { END = 30 };

static void path_of(char *out, const char *dir, const char *name) {
    assert_true((size_t)snprintf(out, 512, "%s/%s", dir, name) < 512);
}

/* The batch that dies: changes 0…9, adds 10…29 (crossing segments), deletes one, renames a value.
 */
static enum kv_err second_batch(struct store *store) {
    struct store_batch *batch = NULL;
    enum kv_err err = store_batch_begin(store, 0, &batch, NULL);
    if (err != KV_OK)
        return err;
    for (unsigned i = 0; i < END && err == KV_OK; i++)
        err = support_store_put(batch, i, 2, NULL);
    if (err == KV_OK)
        err = store_batch_delete(batch, "r00100", 6, NULL);
    if (err == KV_OK)
        err = store_batch_update(batch, "r00101", 6, "renamed", 7, NULL);
    if (err == KV_OK)
        return store_batch_commit(batch, NULL, NULL);
    store_batch_abandon(batch);
    return err;
}

/* -1 neither, 0 old, 1 new: of the whole store. */
static int which_state(struct store *store) {
    struct store_record record;
    int is_new = support_store_absent(store, 100);
    for (unsigned i = 0; i < END; i++) {
        int good = is_new   ? support_store_matches(store, i, 2, i % 2)
                   : i < 10 ? support_store_matches(store, i, 1, i % 2)
                            : support_store_absent(store, i);
        if (!good)
            return -1;
    }
    if (!is_new && !support_store_matches(store, 100, 1, 1))
        return -1;
    if (store_get(store, "r00101", 6, &record, NULL) != KV_OK)
        return -1;
    int renamed = record.value_bytes == 7 && memcmp(record.value, "renamed", 7) == 0;
    store_record_release(store, &record);
    return renamed == is_new ? is_new : -1;
}

static void prepare(const char *dir) {
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 10, 1, NULL), KV_OK);
    assert_int_equal(support_store_commit(store, 100, 102, 1, NULL), KV_OK);
    store_close(store);
}

/* Runs the second batch in a child under a plan. Returns its exit status: 0 acknowledged. */
static int run_child(const char *dir, const struct faulty_io_plan *plan,
                     const struct io_door *door) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct faulty_io *faulty = faulty_io_make(door);
        struct store_options options = support_store_options(dir);
        struct store *store = NULL;
        options.door = faulty_io_door(faulty);
        if (store_open(&options, &store, NULL) != KV_OK)
            _exit(1);
        faulty_io_arm(faulty, plan);
        if (second_batch(store) != KV_OK)
            _exit(2);
        faulty_io_cut_power(faulty);
        _exit(0); /* acknowledged, but never closed */
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* After a death: old or new, clean files, usable, and the same again after a rebuild. */
static int check_after(const char *dir, int acknowledged) {
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_stats stats;
    int now = which_state(store);
    assert_int_not_equal(now, -1);
    if (acknowledged)
        assert_int_equal(now, 1);
    store_stats_get(store, &stats);
    char *before = support_store_dump(store);
    store_close(store);
    uint64_t bytes = 0;
    for (unsigned n = 1; n <= 64; n++)
        bytes += support_store_segment_bytes(dir, n);
    assert_int_equal(bytes, stats.segment_bytes); /* nothing stands behind the tail */
    support_store_remove_index(dir);
    store = support_store_open(&options);
    char *after = support_store_dump(store);
    assert_string_equal(before, after);
    assert_int_equal(support_store_commit(store, 200, 203, 1, NULL), KV_OK);
    assert_int_equal(which_state(store), now);
    store_close(store);
    free(before);
    free(after);
    return now;
}

static void sweep(enum faulty_io_action action, int power_cut, const struct io_door *door) {
    uint64_t k = 1;
    unsigned seen[2] = {0, 0};
    char base[TESTING_PATH_BYTES];
    testing_temp_dir(base);
    prepare(base);
    for (;; k++) {
        char dir[TESTING_PATH_BYTES];
        testing_temp_dir(dir);
        support_store_copy(base, dir);
        struct faulty_io_plan plan = {.action = action,
                                      .ops = FAULTY_IO_CHANGES,
                                      .at = k,
                                      .power_cut = power_cut,
                                      .seed = k * 77 + 5};
        int status = run_child(dir, &plan, door);
        assert_true(status == 0 || status == FAULTY_IO_EXIT_STATUS);
        seen[check_after(dir, status == 0)]++;
        if (status == 0)
            break;
    }
    print_message("%llu deaths: %u old, %u new\n", (unsigned long long)k - 1, seen[0], seen[1]);
    assert_true(k > 8);
    assert_true(seen[0] > 4 && seen[1] >= 1);
}

static void killed_at_every_change(void **state) {
    (void)state;
    sweep(FAULTY_IO_DIE, 0, io_posix_door());
    sweep(FAULTY_IO_DIE, 0, io_uring_door());
}

static void torn_at_every_write(void **state) {
    (void)state;
    sweep(FAULTY_IO_TEAR_AND_DIE, 0, io_posix_door());
}

/* Fails with BREAK_ORDER, BREAK_SYNC, BREAK_ENDED_SYNC. */
static void power_cut_at_every_change(void **state) {
    (void)state;
    sweep(FAULTY_IO_DIE, 1, io_posix_door());
}

/* All of the batch is written and nothing synced: the page cache has it, so it is taken over, and
 * must then be synced, every segment of it, before the index says so: nobody would do it later.
 * Fails with BREAK_RECOVER_SYNC. */
static void what_is_taken_over_is_synced(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    prepare(dir);
    unsigned first = 1, last = 1;
    while (support_store_segment_bytes(dir, first + 1) != 0)
        first++;
    const struct faulty_io_plan plan = {.action = FAULTY_IO_DIE, .ops = FAULTY_IO_SYNC, .at = 1};
    assert_int_equal(run_child(dir, &plan, io_posix_door()), FAULTY_IO_EXIT_STATUS);
    for (last = first; support_store_segment_bytes(dir, last + 1) != 0;)
        last++;
    assert_true(last > first);
    struct faulty_io *faulty = faulty_io_make(io_posix_door());
    struct store_options options = support_store_options(dir);
    struct store *store = NULL;
    const struct faulty_io_plan count = {.action = FAULTY_IO_COUNT, .ops = FAULTY_IO_SYNC};
    options.door = faulty_io_door(faulty);
    faulty_io_arm(faulty, &count);
    assert_int_equal(store_open(&options, &store, NULL), KV_OK);
    assert_int_equal(which_state(store), 1);
    assert_true(faulty_io_counts(faulty).syncs >= last - first + 1 + 1);
    store_close(store);
    faulty_io_drop(faulty);
}

/* Ended segments of a batch that is taken over have no more in them than if nobody had died. Fails
 * with BREAK_ENDED_CUT. */
static void what_was_allocated_ahead_goes(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES], whole[TESTING_PATH_BYTES];
    unsigned ahead = 0;
    int status = FAULTY_IO_EXIT_STATUS;
    testing_temp_dir(base);
    testing_temp_dir(whole);
    prepare(base);
    support_store_copy(base, whole);
    const struct faulty_io_plan lives = {.action = FAULTY_IO_COUNT, .ops = FAULTY_IO_SPACE};
    assert_int_equal(run_child(whole, &lives, io_posix_door()), 0);
    for (uint64_t k = 1; status != 0; k++) {
        char dir[TESTING_PATH_BYTES];
        uint64_t more = 0;
        testing_temp_dir(dir);
        support_store_copy(base, dir);
        const struct faulty_io_plan dies = {
            .action = FAULTY_IO_DIE, .ops = FAULTY_IO_SPACE, .at = k};
        status = run_child(dir, &dies, io_posix_door());
        for (unsigned n = 1; support_store_segment_bytes(dir, n + 1) != 0; n++)
            more += support_store_segment_bytes(dir, n) > support_store_segment_bytes(whole, n);
        struct store_options options = support_store_options(dir);
        struct store *store = support_store_open(&options);
        int taken = which_state(store) == 1;
        store_close(store);
        ahead += taken && more != 0;
        for (unsigned n = 1; taken && support_store_segment_bytes(dir, n + 1) != 0; n++)
            assert_int_equal(support_store_segment_bytes(dir, n),
                             support_store_segment_bytes(whole, n));
    }
    assert_true(ahead > 0);
}

/* The moment that the sweep cannot reach: all is synced, the index does not know yet. The index is
 * put back to what it was before the batch.
 * Fails with BREAK_TORN_BATCH. */
static void index_behind_the_segments(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char saved[TESTING_PATH_BYTES];
    char command[1200];
    struct store_stats stats;
    testing_temp_dir(dir);
    testing_temp_dir(saved);
    prepare(dir);
    snprintf(command, sizeof command, "cp -a '%s/index/.' '%s/'", dir, saved);
    assert_int_equal(system(command), 0);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(second_batch(store), KV_OK);
    assert_int_equal(support_store_commit(store, 50, 52, 1, NULL), KV_OK);
    char *expected = support_store_dump(store);
    store_close(store);
    snprintf(command, sizeof command, "cp -a '%s/.' '%s/index/'", saved, dir);
    assert_int_equal(system(command), 0);
    store = support_store_open(&options);
    char *got = support_store_dump(store);
    assert_string_equal(expected, got);
    store_stats_get(store, &stats);
    assert_non_null(strstr(stats.opened, "taken over"));
    store_close(store);
    free(expected);
    free(got);
    /* The same with the last batch damaged: it was never acknowledged as far as the index knows. */
    snprintf(command, sizeof command, "cp -a '%s/.' '%s/index/'", saved, dir);
    assert_int_equal(system(command), 0);
    unsigned last = 1;
    while (support_store_segment_bytes(dir, last + 1) != 0)
        last++;
    char name[64];
    snprintf(name, sizeof name, "seg/%08u.seg", last);
    support_store_flip(dir, name, support_store_segment_bytes(dir, last) - 4096 - 30000, 1);
    store = support_store_open(&options);
    assert_int_equal(which_state(store), 1);
    assert_true(support_store_absent(store, 50));
    store_stats_get(store, &stats);
    assert_non_null(strstr(stats.opened, "cut off"));
    store_close(store);
}

/* Garbage behind the tail, also a copy of an old batch record, is cut and never believed. */
static void garbage_behind_the_tail(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[512];
    testing_temp_dir(dir);
    prepare(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    char *expected = support_store_dump(store);
    store_close(store);
    unsigned last = 1;
    while (support_store_segment_bytes(dir, last + 1) != 0)
        last++;
    uint64_t bytes = support_store_segment_bytes(dir, last);
    char name[64];
    snprintf(name, sizeof name, "seg/%08u.seg", last);
    path_of(path, dir, name);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    static uint8_t page[4096];
    assert_int_equal(fseek(file, (long)bytes - 4096, SEEK_SET), 0);
    assert_int_equal(fread(page, 1, sizeof page, file), sizeof page);
    assert_memory_equal(page, "CPBATCH1", 8);
    assert_int_equal(fseek(file, (long)bytes + 8192, SEEK_SET), 0);
    assert_int_equal(fwrite(page, 1, sizeof page, file), sizeof page);
    fclose(file);
    snprintf(name, sizeof name, "seg/%08u.seg", last + 1);
    path_of(path, dir, name);
    file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(page, 1, sizeof page, file), sizeof page);
    fclose(file);
    store = support_store_open(&options);
    char *got = support_store_dump(store);
    assert_string_equal(expected, got);
    store_close(store);
    assert_int_equal(support_store_segment_bytes(dir, last), bytes);
    assert_int_equal(support_store_segment_bytes(dir, last + 1), 0);
    free(expected);
    free(got);
}

/* A real SIGKILL at random moments of a stream of batches: every acknowledged one is there. */
static void killed_at_random(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct testing_random random;
    testing_temp_dir(dir);
    testing_random_init(&random, testing_seed("kills", 31));
    unsigned next = 0;
    for (int kill_count = 0; kill_count < 20; kill_count++) {
        int acknowledged[2];
        assert_int_equal(pipe(acknowledged), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct store_options options = support_store_options(dir);
            struct store *store = NULL;
            if (store_open(&options, &store, NULL) != KV_OK)
                _exit(1);
            for (unsigned i = next;; i++) {
                if (support_store_commit(store, i * 4, i * 4 + 4, 1, NULL) != KV_OK ||
                    write(acknowledged[1], &i, sizeof i) != sizeof i)
                    _exit(2);
            }
        }
        close(acknowledged[1]);
        unsigned stop = next + (unsigned)testing_random_below(&random, 6);
        unsigned seen = next;
        int any = 0;
        while (read(acknowledged[0], &seen, sizeof seen) == sizeof seen) {
            any = 1;
            if (seen >= stop)
                kill(child, SIGKILL);
        }
        int status = 0;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        assert_true(any);
        close(acknowledged[0]);
        struct store_options options = support_store_options(dir);
        struct store *store = support_store_open(&options);
        for (unsigned i = 0; i <= seen * 4 + 3; i++)
            assert_true(support_store_matches(store, i, 1, i % 2));
        /* The one after the last acknowledged batch is whole or absent. */
        int there = !support_store_absent(store, seen * 4 + 4);
        for (unsigned i = seen * 4 + 4; i < seen * 4 + 8; i++)
            assert_int_equal(support_store_matches(store, i, 1, 1), there);
        store_close(store);
        next = seen + 1;
    }
}

/* Death while the store repairs itself: the next open repairs it again. */
static void killed_during_recovery(void **state) {
    (void)state;
    for (int without_index = 0; without_index < 2; without_index++) {
        char base[TESTING_PATH_BYTES];
        testing_temp_dir(base);
        prepare(base);
        struct faulty_io_plan first = {.action = FAULTY_IO_DIE, .ops = FAULTY_IO_SYNC, .at = 2};
        assert_int_equal(run_child(base, &first, io_posix_door()), FAULTY_IO_EXIT_STATUS);
        if (without_index)
            support_store_remove_index(base);
        uint64_t k = 1;
        for (;; k++) {
            char dir[TESTING_PATH_BYTES];
            testing_temp_dir(dir);
            support_store_copy(base, dir);
            struct faulty_io_plan plan = {
                .action = FAULTY_IO_DIE, .ops = FAULTY_IO_CHANGES, .at = k};
            pid_t child = fork();
            assert_true(child >= 0);
            if (child == 0) {
                struct faulty_io *faulty = faulty_io_make(io_posix_door());
                struct store_options options = support_store_options(dir);
                struct store *store = NULL;
                options.door = faulty_io_door(faulty);
                faulty_io_arm(faulty, &plan);
                _exit(store_open(&options, &store, NULL) == KV_OK ? 0 : 1);
            }
            int status = 0;
            assert_int_equal(waitpid(child, &status, 0), child);
            assert_true(WIFEXITED(status));
            assert_true(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == FAULTY_IO_EXIT_STATUS);
            struct store_options options = support_store_options(dir);
            struct store *store = support_store_open(&options);
            assert_int_not_equal(which_state(store), -1);
            store_close(store);
            if (WEXITSTATUS(status) == 0)
                break;
        }
        assert_true(k > 3);
    }
}

TESTING_MAIN(cmocka_unit_test(killed_at_every_change), cmocka_unit_test(torn_at_every_write),
             cmocka_unit_test(power_cut_at_every_change),
             cmocka_unit_test(what_is_taken_over_is_synced),
             cmocka_unit_test(what_was_allocated_ahead_goes),
             cmocka_unit_test(index_behind_the_segments), cmocka_unit_test(garbage_behind_the_tail),
             cmocka_unit_test(killed_at_random), cmocka_unit_test(killed_during_recovery))
