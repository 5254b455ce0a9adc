/* tests/test_cases.c - failures that users of other systems met, where no other test has them.
 *
 * Responsible for: CASE-07 (everything is found again, usage is what the disk says), CASE-24 (what
 * failed does not count as used), CASE-36 (direct I/O where it is claimed).
 * Not responsible for: the other cases, which stand beside what they concern (grep CASE-).
 */
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEN = 10, LIST_BYTES = 4096 };

static void name_of(char out[16], unsigned index) {
    snprintf(out, 16, "session %u", index);
}

static struct life_options small(const char *dir) {
    struct life_options options = life_default(dir);
    options.model_layers = options.model_heads = 1;
    options.engine.sessions_max = 16;
    return options;
}

static void make_ten(struct life *life) {
    for (unsigned i = 0; i < TEN; i++) {
        char name[16];
        name_of(name, i);
        struct session *session = life_session(life, name, IMAGE_RECIPE_V3);
        life_say(session, 100 + i, i == 3 ? 600 : 40 + i, 2, NULL);
        life_sleep(life, session);
    }
}

static int on_entry(void *context, const struct snapshot_entry *entry) {
    char *list = context;
    size_t used = strlen(list);
    snprintf(list + used, LIST_BYTES - used, "%s %llu %llu %016llx\n", entry->head.name,
             (unsigned long long)entry->head.n, (unsigned long long)entry->stored_bytes,
             (unsigned long long)entry->snapshot);
    return 1;
}

static void list_all(struct life *life, char list_out[LIST_BYTES]) {
    list_out[0] = 0;
    assert_int_equal(snapshot_list(life->store, kv_alloc_system(), on_entry, list_out, NULL),
                     KV_OK);
}

static void wake_ten(struct life *life) {
    for (unsigned i = 0; i < TEN; i++) {
        char name[16];
        struct receipt receipt;
        name_of(name, i);
        session_drop(life_wake(life, name, &receipt));
        engine_apply(life->engine);
        assert_int_equal(receipt.tokens_prefilled, 0);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    }
}

/* Bytes of the segment files, as `du --apparent-size` adds them up. */
static uint64_t segment_files(const char *dir) {
    uint64_t bytes = 0;
    for (unsigned number = 1; number < 100; number++)
        bytes += support_store_segment_bytes(dir, number);
    return bytes;
}

static void ten_of_ten(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char before[LIST_BYTES], after[LIST_BYTES];
    struct life life;
    struct store_stats stats;
    testing_temp_dir(dir);
    struct life_options options = small(dir);
    life_open(&options, &life);
    make_ten(&life);
    list_all(&life, before);
    life_close(&life);
    for (int without_index = 0; without_index < 2; without_index++) {
        if (without_index)
            support_store_remove_index(dir);
        uint64_t there = segment_files(dir);
        life_open(&options, &life);
        store_stats_get(life.store, &stats);
        assert_int_equal(stats.segment_bytes, there);
        list_all(&life, after);
        assert_string_equal(before, after);
        wake_ten(&life);
        list_all(&life, after);
        assert_string_equal(before, after);
        life_close(&life);
    }
    printf("%u of %u, twice\n", TEN, TEN);
}

/* Wakes and checks that fail leave the store as it was: nobody is younger for them. */
static void a_failure_is_no_use(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct kv_diag diag = {""};
    struct record_snapshot head;
    struct store_extent extent;
    struct snapshot_entry entry_before, entry_after;
    struct restore_check check;
    uint64_t snapshot = 0;
    uint8_t *bytes;
    testing_temp_dir(dir);
    struct life_options options = small(dir);
    life_open(&options, &life);
    make_ten(&life);
    head = life_head(&life, "session 2", &snapshot);
    struct record_key key = record_key_snapshot(snapshot);
    life_extent(&life, &key, RECORD_KIND_IMAGE, &extent);
    bytes = malloc(extent.stored_bytes);
    assert_non_null(bytes);
    life_disk(dir, &extent, bytes, 0);
    bytes[extent.stored_bytes / 2] ^= 4;
    life_disk(dir, &extent, bytes, 1);
    assert_int_equal(snapshot_find(life.store, kv_alloc_system(), head.name, &entry_before, NULL),
                     KV_OK);
    uint64_t sequence = store_sequence(life.store);
    for (int i = 0; i < 3; i++) {
        life_refuse(&life, "session 2", KV_ERR_CORRUPT, &diag);
        assert_int_equal(restore_verify(life.store, kv_alloc_system(), "session 2", &check, &diag),
                         KV_ERR_CORRUPT);
    }
    assert_int_equal(store_sequence(life.store), sequence);
    assert_int_equal(snapshot_find(life.store, kv_alloc_system(), head.name, &entry_after, NULL),
                     KV_OK);
    assert_memory_equal(&entry_before, &entry_after, sizeof entry_before);
    free(bytes);
    life_close(&life);
}

static size_t pages_in_cache(const char *path) {
    unsigned char there[4096];
    size_t count = 0;
    struct stat info;
    int file = open(path, O_RDONLY);
    assert_true(file >= 0);
    assert_int_equal(fstat(file, &info), 0);
    size_t pages = ((size_t)info.st_size + 4095) / 4096;
    assert_true(pages <= sizeof there);
    void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, file, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mincore(map, (size_t)info.st_size, there), 0);
    for (size_t i = 0; i < pages; i++)
        count += there[i] & 1;
    munmap(map, (size_t)info.st_size);
    close(file);
    return count;
}

/* A receipt that says direct leaves nothing of the segment in the page cache. */
static void direct_is_direct(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    struct life life;
    struct receipt receipt;
    testing_temp_dir(dir);
    struct life_options options = small(dir);
    life_open(&options, &life);
    make_ten(&life);
    life_close(&life);
    life_open(&options, &life); /* looks for batches through the cache */
    snprintf(path, sizeof path, "%s/seg/00000001.seg", dir);
    int file = open(path, O_RDONLY);
    assert_true(file >= 0);
    assert_int_equal(fdatasync(file), 0);
    assert_int_equal(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(file);
    size_t before = pages_in_cache(path);
    session_drop(life_wake(&life, "session 3", &receipt));
    engine_apply(life.engine);
    size_t after = pages_in_cache(path);
    printf("%s: %zu pages in the cache before, %zu after\n", receipt.direct ? "direct" : "buffered",
           before, after);
    if (receipt.direct)
        assert_int_equal(after, before);
    else
        assert_true(after > 0);
    life_close(&life);
}

TESTING_MAIN(cmocka_unit_test(ten_of_ten), cmocka_unit_test(a_failure_is_no_use),
             cmocka_unit_test(direct_is_direct))
