/* tests/test_index_pages.c - sound index files pass the walk, damaged ones do not.
 *
 * Responsible for: no false alarm over a long random history with small, large and deleted values,
 * and alarms for damage of each kind of page.
 * Not responsible for: what is done about damage (test_rebuild.c).
 * Broken twins: BREAK_FREE_LIST.
 */
#include "store/index_pages.h"

#include "store/base/bytes.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static enum kv_err check(const char *dir) {
    char path[400];
    snprintf(path, sizeof path, "%s/index", dir);
    int file = open(path, O_RDONLY | O_DIRECTORY);
    assert_true(file >= 0);
    enum kv_err err = index_pages_check(io_posix_door(), file, kv_alloc_system(), NULL);
    close(file);
    return err;
}

static void change_at_random(struct store *store, struct testing_random *random) {
    static uint8_t value[STORE_VALUE_BYTES_MAX];
    struct store_batch *batch = NULL;
    unsigned count = 1 + (unsigned)testing_random_below(random, 60);
    int deleting = testing_random_below(random, 4) == 0;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < count; i++) {
        char key[300];
        int key_bytes = snprintf(key, sizeof key, "k%0*u", 3 + (int)(i % 3) * 80,
                                 (unsigned)testing_random_below(random, 700));
        if (deleting || testing_random_below(random, 3) == 0) {
            assert_int_equal(store_batch_delete(batch, key, (size_t)key_bytes, NULL), KV_OK);
            continue;
        }
        size_t bytes = (size_t)testing_random_below(random, i % 7 == 0 ? 30000 : 900);
        memset(value, (int)i, bytes);
        struct store_put put = {key, (size_t)key_bytes, value, bytes, NULL, 0};
        assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    }
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

static void no_false_alarm(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct testing_random random;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 64 << 20;
    struct store *store = support_store_open(&options);
    testing_random_init(&random, testing_seed("history", 808));
    unsigned rounds = testing_quick() ? 60 : 250;
    for (unsigned i = 0; i < rounds; i++) {
        change_at_random(store, &random);
        assert_int_equal(check(dir), KV_OK);
        if (i % 50 == 49) {
            struct store_stats stats;
            store_close(store);
            store = support_store_open(&options);
            store_stats_get(store, &stats);
            assert_string_equal(stats.opened, "");
        }
    }
    store_close(store);
}

static void grow_index(const char *dir) {
    struct testing_random random;
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    testing_random_init(&random, 11);
    for (unsigned i = 0; i < 12; i++)
        change_at_random(store, &random);
    store_close(store);
    assert_int_equal(check(dir), KV_OK);
}

struct image {
    char path[400];
    uint8_t *bytes;
    size_t count;
};

static struct image load(const char *dir) {
    struct image image;
    snprintf(image.path, sizeof image.path, "%s/index/data.mdb", dir);
    FILE *file = fopen(image.path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    image.count = (size_t)ftell(file);
    rewind(file);
    image.bytes = malloc(image.count);
    assert_non_null(image.bytes);
    assert_int_equal(fread(image.bytes, 1, image.count, file), image.count);
    fclose(file);
    return image;
}

static void save(const struct image *image) {
    FILE *file = fopen(image->path, "r+b");
    assert_non_null(file);
    assert_int_equal(fwrite(image->bytes, 1, image->count, file), image->count);
    fclose(file);
}

/* Every page in use: its number, its kind and its bounds changed one at a time. */
static void damaged_pages(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    grow_index(dir);
    struct image image = load(dir);
    unsigned alarms = 0;
    unsigned pages = 0;
    for (size_t page = 2; page < image.count / 4096; page++) {
        uint8_t *at = image.bytes + page * 4096;
        uint8_t before[16];
        unsigned here = 0;
        memcpy(before, at, sizeof before);
        for (int field = 0; field < 3; field++) {
            if (field == 0)
                at[0] ^= 1;
            else if (field == 1)
                at[10] ^= 3;
            else
                kv_put_u16(at + 12, 0xfff0);
            save(&image);
            here += check(dir) == KV_ERR_CORRUPT;
            memcpy(at, before, sizeof before);
        }
        /* A page is in use, and then each field matters, or it is free, and then none does; of an
         * overflow run only the first has a head, and its count may be larger than needed. */
        alarms += here;
        pages += here != 0;
    }
    save(&image);
    assert_int_equal(check(dir), KV_OK);
    assert_true(pages >= 20);
    assert_true(alarms >= pages * 2);
    free(image.bytes);
}

/* The newest free list names a page that the records use: LMDB would write over it.
 * Fails with BREAK_FREE_LIST. */
static void free_list_names_a_used_page(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    grow_index(dir);
    struct image image = load(dir);
    size_t newest = kv_get_u64(image.bytes + 4096 + 16 + 128) > kv_get_u64(image.bytes + 16 + 128);
    const uint8_t *meta = image.bytes + newest * 4096 + 16;
    uint64_t free_root = kv_get_u64(meta + 24 + 40);
    uint64_t databases_root = kv_get_u64(meta + 24 + 48 + 40);
    uint8_t *page = image.bytes + free_root * 4096;
    assert_int_equal(kv_get_u16(page + 10), 2);
    uint8_t *node = page + kv_get_u16(page + 16);
    uint8_t *ids = node + 8 + kv_get_u16(node + 6);
    assert_int_equal(kv_get_u16(node + 4), 0);
    assert_true(kv_get_u64(ids) >= 1);
    kv_put_u64(ids, 1);
    kv_put_u64(ids + 8, databases_root);
    save(&image);
    assert_int_equal(check(dir), KV_ERR_CORRUPT);
    free(image.bytes);
}

static void allocation_failures(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[400];
    testing_temp_dir(dir);
    grow_index(dir);
    snprintf(path, sizeof path, "%s/index", dir);
    int file = open(path, O_RDONLY | O_DIRECTORY);
    for (uint64_t k = 1;; k++) {
        struct testing_alloc alloc;
        testing_alloc_init(&alloc, k);
        enum kv_err err = index_pages_check(io_posix_door(), file, &alloc.alloc, NULL);
        assert_int_equal(err, alloc.failed_count == 0 ? KV_OK : KV_ERR_NOMEM);
        assert_int_equal(alloc.live_count, 0);
        if (alloc.failed_count == 0)
            break;
    }
    close(file);
}

TESTING_MAIN(cmocka_unit_test(no_false_alarm), cmocka_unit_test(damaged_pages),
             cmocka_unit_test(free_list_names_a_used_page), cmocka_unit_test(allocation_failures))
