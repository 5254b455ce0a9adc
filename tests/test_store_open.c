/* tests/test_store_open.c - opening a store: new, held, foreign, newer, linked, read-only, golden.
 *
 * Responsible for: what store_open refuses and with which words, and that it changes nothing then.
 * Not responsible for: recovery (test_recover.c, test_rebuild.c).
 * Broken twins: BREAK_LOCK, BREAK_SYNC_ABOVE, BREAK_TWO_STORES.
 */
#include "store/store.h"

#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void path_in(char *out, const char *dir, const char *name) {
    assert_true((size_t)snprintf(out, 512, "%s/%s", dir, name) < 512);
}

static void write_text(const char *dir, const char *name, const char *text) {
    char path[512];
    path_in(path, dir, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void is_refused(const struct store_options *options, enum kv_err err, const char *words) {
    struct kv_diag diag = {""};
    struct store *store = (void *)1;
    enum kv_err got = store_open(options, &store, &diag);
    if (got == KV_OK)
        store_close(store);
    if (got != err || strstr(diag.text, words) == NULL)
        fail_msg("got %s: '%s', expected %s: '%s'", kv_err_name(got), diag.text, kv_err_name(err),
                 words);
    assert_ptr_equal(store, (void *)1);
}

static void new_store_is_private(void **state) {
    (void)state;
    char parent[TESTING_PATH_BYTES];
    char dir[512];
    static const char *const names[] = {"", "seg", "index", "FORMAT", "LOCK", "index/data.mdb"};
    testing_temp_dir(parent);
    path_in(dir, parent, "made");
    struct store_options options = support_store_options(dir);
    mode_t old = umask(0);
    struct store *store = support_store_open(&options);
    umask(old);
    assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
    for (size_t i = 0; i < 6; i++) {
        char path[1024];
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        assert_int_equal(stat(path, &info), 0);
        assert_int_equal(info.st_mode & 0777, i < 3 ? 0700 : 0600);
    }
    store_close(store);
    options.read_only = 1;
    store = support_store_open(&options);
    assert_true(support_store_matches(store, 0, 1, 1));
    store_close(store);
}

struct watch {
    ino_t wanted;
    int synced;
};

static int watch_sync(void *context, int file) {
    struct watch *watch = context;
    struct stat info;
    if (fstat(file, &info) != 0)
        return errno;
    watch->synced |= info.st_ino == watch->wanted;
    return fsync(file) == 0 ? 0 : errno;
}

/* What a power cut must not take: the name of the store's own directory.
 * Fails with BREAK_SYNC_ABOVE. */
static void the_directory_above_is_synced(void **state) {
    (void)state;
    char parent[TESTING_PATH_BYTES];
    char dir[512];
    struct stat info;
    testing_temp_dir(parent);
    path_in(dir, parent, "made");
    assert_int_equal(stat(parent, &info), 0);
    struct watch watch = {info.st_ino, 0};
    struct io_door door = *io_posix_door(); /* which looks at no context */
    door.sync = watch_sync;
    door.context = &watch;
    struct store_options options = support_store_options(dir);
    options.door = &door;
    struct store *store = support_store_open(&options);
    assert_int_equal(watch.synced, 1);
    store_close(store);
}

static void options_are_checked(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options("");
    is_refused(&options, KV_ERR_INVALID, "no name");
    options = support_store_options(dir);
    options.segment_bytes = 12345;
    is_refused(&options, KV_ERR_INVALID, "segment size");
    options = support_store_options(dir);
    options.deadline_ns = 0;
    is_refused(&options, KV_ERR_INVALID, "deadline");
}

static void nothing_there(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[512];
    testing_temp_dir(dir);
    path_in(path, dir, "none");
    struct store_options options = support_store_options(path);
    options.read_only = 1;
    is_refused(&options, KV_ERR_NOT_FOUND, "there is none");
    options.dir = dir;
    is_refused(&options, KV_ERR_NOT_FOUND, "there is none");
    options.read_only = options.create = 0;
    is_refused(&options, KV_ERR_NOT_FOUND, "there is none");
    options.dir = path;
    is_refused(&options, KV_ERR_NOT_FOUND, "there is none");
    assert_int_equal(access(path, F_OK), -1);
    path_in(path, dir, "LOCK");
    assert_int_equal(access(path, F_OK), -1);
    options.create = 1;
    path_in(path, dir, "a/b");
    options.dir = path;
    is_refused(&options, KV_ERR_IO, "make the store directory");
}

/* A folder with somebody's files is not turned into a store, and nothing is put there. */
static void foreign_directory(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[512];
    testing_temp_dir(dir);
    write_text(dir, "letter.txt", "dear");
    struct store_options options = support_store_options(dir);
    is_refused(&options, KV_ERR_INVALID, "not a store");
    path_in(path, dir, "LOCK");
    assert_int_equal(access(path, F_OK), -1);
    path_in(path, dir, "seg");
    assert_int_equal(access(path, F_OK), -1);
    write_text(dir, "FORMAT", "something else\n");
    is_refused(&options, KV_ERR_CORRUPT, "not that of a coldplane store");
}

static void fill_two_segments(const char *dir) {
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 1 << 20;
    struct store *store = support_store_open(&options);
    for (unsigned i = 0; support_store_segment_bytes(dir, 2) == 0 && i < 1000; i += 20)
        assert_int_equal(support_store_commit(store, i, i + 20, 1, NULL), KV_OK);
    assert_int_equal(support_store_commit(store, 0, 20, 2, NULL), KV_OK);
    store_close(store);
}

/* Asked to make the index anew, a store that lost FORMAT takes its id from its segments; where they
 * name two, it does not choose. BREAK_TWO_STORES chooses. */
static void lost_format_comes_from_the_segments(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], other[TESTING_PATH_BYTES], path[512], from[512];
    testing_temp_dir(dir);
    testing_temp_dir(other);
    fill_two_segments(dir);
    fill_two_segments(other);
    path_in(path, dir, "FORMAT");
    assert_int_equal(unlink(path), 0);
    struct store_options options = support_store_options(dir);
    is_refused(&options, KV_ERR_CORRUPT, "--rebuild-index");
    options.rebuild_index = 1;
    struct store *store = support_store_open(&options);
    assert_true(support_store_matches(store, 3, 2, 1));
    store_close(store);
    assert_int_equal(unlink(path), 0);
    path_in(path, dir, "seg/00000002.seg");
    path_in(from, other, "seg/00000002.seg");
    assert_int_equal(rename(from, path), 0);
    is_refused(&options, KV_ERR_CORRUPT, "two stores");
}

static void newer_version(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    store_close(support_store_open(&options));
    write_text(dir, "FORMAT", "coldplane store\nversion 9\nshape unknown\n");
    is_refused(&options, KV_ERR_VERSION, "needs version 9");
    options.read_only = 1;
    is_refused(&options, KV_ERR_VERSION, "needs version 9");
}

/* A second writer hears who holds the store; after the first has gone, also by SIGKILL, it opens.

 * Fails with BREAK_LOCK. */
static void one_writer(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    int to_parent[2];
    char byte = 0;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.program = "coldplane chat";
    assert_int_equal(pipe(to_parent), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct store *store = NULL;
        if (store_open(&options, &store, NULL) != KV_OK ||
            support_store_commit(store, 0, 1, 1, NULL) != KV_OK || write(to_parent[1], "x", 1) != 1)
            _exit(1);
        pause();
        _exit(2);
    }
    char words[64];
    snprintf(words, sizeof words, "pid %ld coldplane chat", (long)child);
    assert_int_equal(read(to_parent[0], &byte, 1), 1);
    options.program = "other";
    is_refused(&options, KV_ERR_BUSY, words);
    options.read_only = 1;
    struct store *reader = support_store_open(&options);
    assert_true(support_store_matches(reader, 0, 1, 1));
    store_close(reader);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    options.read_only = 0;
    struct store *store = support_store_open(&options);
    assert_true(support_store_matches(store, 0, 1, 1));
    store_close(store);
    close(to_parent[0]);
    close(to_parent[1]);
}

/* Planted links for every name that the store opens: refused, and what they point at is untouched.
 */
static void links_are_refused(void **state) {
    (void)state;
    static const char *const names[] = {"FORMAT",          "LOCK",           "seg",
                                        "index",           "index/data.mdb", "index/lock.mdb",
                                        "FORMAT.tmp",      "index.tmp",      "seg/00000001.seg",
                                        "seg/00000002.seg"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char dir[TESTING_PATH_BYTES];
        char outside[TESTING_PATH_BYTES];
        char path[512];
        char target[512];
        char moved[512];
        testing_temp_dir(dir);
        testing_temp_dir(outside);
        struct store_options options = support_store_options(dir);
        struct store *store = support_store_open(&options);
        assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
        store_close(store);
        path_in(path, dir, names[i]);
        path_in(target, outside, "target");
        path_in(moved, outside, "moved");
        int there = access(path, F_OK) == 0;
        if (there)
            assert_int_equal(rename(path, moved), 0);
        write_text(outside, "target", "precious");
        /* A link to the real thing is refused like one to anything else. */
        assert_int_equal(symlink(i % 2 == 0 && there ? moved : target, path), 0);
        is_refused(&options, KV_ERR_CORRUPT, "symbolic link");
        options.read_only = 1;
        is_refused(&options, KV_ERR_CORRUPT, "symbolic link");
        struct stat info;
        assert_int_equal(lstat(path, &info), 0);
        assert_true(S_ISLNK(info.st_mode));
        assert_int_equal(stat(target, &info), 0);
        assert_int_equal(info.st_size, 8);
        if (there) {
            options.read_only = 0;
            assert_int_equal(unlink(path), 0);
            assert_int_equal(rename(moved, path), 0);
            store = support_store_open(&options);
            assert_true(support_store_matches(store, 0, 1, 1));
            store_close(store);
        }
    }
}

static void linked_store_directory(void **state) {
    (void)state;
    char parent[TESTING_PATH_BYTES];
    char real[512];
    char linked[512];
    testing_temp_dir(parent);
    path_in(real, parent, "real");
    path_in(linked, parent, "linked");
    struct store_options options = support_store_options(real);
    store_close(support_store_open(&options));
    assert_int_equal(symlink(real, linked), 0);
    options.dir = linked;
    is_refused(&options, KV_ERR_INVALID, "symbolic link");
}

/* Wrong words, not damage. */
static void a_file_is_no_store(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[512];
    testing_temp_dir(dir);
    write_text(dir, "letter.txt", "dear");
    path_in(path, dir, "letter.txt");
    for (int read_only = 0; read_only < 2; read_only++) {
        struct store_options options = support_store_options(path);
        options.read_only = read_only;
        is_refused(&options, KV_ERR_INVALID, "letter.txt: it is no store but a file: give");
        path_in(path, dir, "letter.txt/store");
        is_refused(&options, KV_ERR_INVALID, "a part of this path is a file");
        path_in(path, dir, "letter.txt");
    }
}

/* The directory is swapped for a link while a store is open: everything still goes to the old one.
 */
static void swapped_during_a_save(void **state) {
    (void)state;
    char parent[TESTING_PATH_BYTES];
    char dir[512];
    char away[512];
    char bait[512];
    testing_temp_dir(parent);
    path_in(dir, parent, "store");
    path_in(away, parent, "away");
    path_in(bait, parent, "bait");
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    struct store_batch *batch = NULL;
    assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < 15; i++)
        assert_int_equal(support_store_put(batch, i, 2, NULL), KV_OK);
    assert_int_equal(mkdir(bait, 0700), 0);
    assert_int_equal(rename(dir, away), 0);
    assert_int_equal(symlink(bait, dir), 0);
    for (unsigned i = 15; i < 60; i++)
        assert_int_equal(support_store_put(batch, i, 2, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    assert_true(support_store_matches(store, 59, 2, 1));
    store_close(store);
    assert_int_equal(rmdir(bait), 0); /* still empty */
    options.dir = away;
    store = support_store_open(&options);
    for (unsigned i = 0; i < 60; i++)
        assert_true(support_store_matches(store, i, 2, 1));
    store_close(store);
}

static void names_beyond_ascii(void **state) {
    (void)state;
    static const char *const names[] = {"\xd1\x81\xd0\xbb\xd0\xbe\xd0\xb2\xd0\xbe",
                                        "\xe8\xa8\x98\xe6\x86\xb6",
                                        "\xd8\xb0\xd9\x83",
                                        "\xf0\x9f\xa7\x8a",
                                        "caf\xc3\xa9",
                                        "cafe\xcc\x81"};
    char parent[TESTING_PATH_BYTES];
    testing_temp_dir(parent);
    for (size_t i = 0; i < 6; i++) {
        char dir[512];
        path_in(dir, parent, names[i]);
        struct store_options options = support_store_options(dir);
        struct store *store = support_store_open(&options);
        struct store_batch *batch = NULL;
        struct store_record record;
        assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
        for (size_t j = 0; j < 6; j++) {
            struct store_put put = {.key = names[j],
                                    .key_bytes = strlen(names[j]),
                                    .value = &j,
                                    .value_bytes = sizeof j};
            assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
        }
        assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
        for (size_t j = 0; j < 6; j++) {
            size_t value = 99;
            assert_int_equal(store_get(store, names[j], strlen(names[j]), &record, NULL), KV_OK);
            memcpy(&value, record.value, sizeof value);
            assert_int_equal(value, j);
            store_record_release(store, &record);
        }
        store_close(store);
    }
}

/* As a user without rights: root passes every permission. */
static int as_nobody(int (*run)(const char *dir), const char *dir) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0))
            _exit(100);
        _exit(run(dir));
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int open_unwritable(const char *dir) {
    char path[512];
    struct kv_diag diag = {""};
    struct store *store = NULL;
    struct store_options options = support_store_options(dir);
    if (store_open(&options, &store, &diag) != KV_ERR_IO ||
        strstr(diag.text, "Permission denied") == NULL || strstr(diag.text, "LOCK") == NULL)
        return 1;
    snprintf(path, sizeof path, "%s/new", dir);
    options.dir = path;
    if (store_open(&options, &store, &diag) != KV_ERR_IO ||
        strstr(diag.text, "Permission denied") == NULL)
        return 2;
    options.dir = dir;
    options.read_only = 1;
    if (store_open(&options, &store, &diag) != KV_OK)
        return 3;
    if (!support_store_matches(store, 0, 1, 1))
        return 4;
    store_close(store);
    return 0;
}

static void unwritable_directory(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char command[600];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
    store_close(store);
    snprintf(command, sizeof command, "chmod -R a+rX,a-w '%s'", dir);
    assert_int_equal(system(command), 0);
    int status = as_nobody(open_unwritable, dir);
    snprintf(command, sizeof command, "chmod -R u+w '%s'", dir);
    assert_int_equal(system(command), 0);
    if (status == 100)
        testing_skip("cannot become an ordinary user");
    assert_int_equal(status, 0);
}

/* A file system mounted read-only: reading works, writing says why not. */
static void read_only_file_system(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    if (mount("tmpfs", dir, "tmpfs", 0, "size=32m") != 0)
        testing_skip("mounting needs root");
    char store_dir[512];
    path_in(store_dir, dir, "store");
    struct store_options options = support_store_options(store_dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 3, 1, NULL), KV_OK);
    store_close(store);
    assert_int_equal(mount(NULL, dir, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    is_refused(&options, KV_ERR_IO, "Read-only file system");
    options.read_only = 1;
    store = support_store_open(&options);
    assert_true(support_store_matches(store, 2, 1, 1));
    store_close(store);
    assert_int_equal(mount(NULL, dir, NULL, MS_REMOUNT, NULL), 0);
    support_store_remove_index(store_dir);
    assert_int_equal(mount(NULL, dir, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    is_refused(&options, KV_ERR_IO, "index is missing");
    assert_int_equal(umount(dir), 0);
}

/* Creation dies at every change: the next open makes the store whole. */
static void creation_dies_anywhere(void **state) {
    (void)state;
    uint64_t k = 1;
    for (;; k++) {
        char parent[TESTING_PATH_BYTES];
        char dir[512];
        testing_temp_dir(parent);
        path_in(dir, parent, "store");
        struct store_options options = support_store_options(dir);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct faulty_io *faulty = faulty_io_make(io_posix_door());
            struct store *store = NULL;
            faulty_io_arm(faulty, &(struct faulty_io_plan){
                                      .action = FAULTY_IO_DIE, .ops = FAULTY_IO_CHANGES, .at = k});
            options.door = faulty_io_door(faulty);
            _exit(store_open(&options, &store, NULL) == KV_OK ? 0 : 1);
        }
        int status = 0;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_true(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == FAULTY_IO_EXIT_STATUS);
        struct store *store = support_store_open(&options);
        assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
        store_close(store);
        store = support_store_open(&options);
        assert_true(support_store_matches(store, 0, 1, 1));
        store_close(store);
        if (WEXITSTATUS(status) == 0)
            break;
    }
    assert_true(k > 10);
}

static void allocation_failures(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 3, 1, NULL), KV_OK);
    store_close(store);
    for (int without_index = 0; without_index < 2; without_index++) {
        uint64_t k = 1;
        for (;; k++) {
            struct testing_alloc alloc;
            struct kv_diag diag = {""};
            if (without_index)
                support_store_remove_index(dir);
            testing_alloc_init(&alloc, k);
            options.alloc = &alloc.alloc;
            enum kv_err err = store_open(&options, &store, &diag);
            alloc.fail_at = 0;
            if (err == KV_OK) {
                assert_true(support_store_matches(store, 2, 1, 1));
                store_close(store);
            } else {
                assert_int_equal(err, KV_ERR_NOMEM);
                assert_true(diag.text[0] != 0);
                options.alloc = kv_alloc_system();
                store = support_store_open(&options); /* nothing was harmed */
                assert_true(support_store_matches(store, 2, 1, 1));
                store_close(store);
            }
            assert_int_equal(alloc.live_count, 0);
            if (alloc.failed_count == 0)
                break;
        }
        assert_true(k > 6);
    }
}

/* A store that an earlier build of format version 1 has written still opens, with and without its
 * index; its damaged twin names the damage. */
static void golden_store(void **state) {
    (void)state;
    for (int without_index = 0; without_index < 2; without_index++) {
        char dir[TESTING_PATH_BYTES];
        testing_temp_dir(dir);
        support_store_copy("tests/golden/v1/records", dir);
        struct store_options options = support_store_options(dir);
        if (without_index)
            support_store_remove_index(dir);
        struct store *store = support_store_open(&options);
        struct store_stats stats;
        store_stats_get(store, &stats);
        assert_int_equal(stats.records, 3);
        assert_int_equal(stats.batches, 3);
        assert_true(support_store_matches(store, 1, 1, 1));
        assert_true(support_store_matches(store, 2, 2, 1));
        assert_true(support_store_matches(store, 4, 1, 0));
        assert_true(support_store_absent(store, 3));
        assert_int_equal(support_store_commit(store, 5, 6, 1, NULL), KV_OK);
        assert_true(support_store_matches(store, 5, 1, 1));
        store_close(store);
    }
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    support_store_copy("tests/golden/v1/records_damaged", dir);
    struct store_options options = support_store_options(dir);
    struct kv_diag diag = {""};
    struct store *store = support_store_open(&options);
    assert_int_equal(store_read_check(store, "r00001", 6, NULL, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "kind 0"));
    assert_true(support_store_matches(store, 2, 2, 1));
    assert_true(support_store_matches(store, 4, 1, 1));
    store_close(store);
}

TESTING_MAIN(cmocka_unit_test(new_store_is_private),
             cmocka_unit_test(the_directory_above_is_synced), cmocka_unit_test(options_are_checked),
             cmocka_unit_test(nothing_there), cmocka_unit_test(foreign_directory),
             cmocka_unit_test(newer_version), cmocka_unit_test(one_writer),
             cmocka_unit_test(links_are_refused), cmocka_unit_test(linked_store_directory),
             cmocka_unit_test(a_file_is_no_store), cmocka_unit_test(swapped_during_a_save),
             cmocka_unit_test(names_beyond_ascii), cmocka_unit_test(unwritable_directory),
             cmocka_unit_test(read_only_file_system), cmocka_unit_test(creation_dies_anywhere),
             cmocka_unit_test(allocation_failures),
             cmocka_unit_test(lost_format_comes_from_the_segments), cmocka_unit_test(golden_store))
