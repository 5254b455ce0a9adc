/* tests/test_usage.c - what the disk holds is what live records need, and nothing else.
 *
 * Responsible for: allocated blocks of all files (as du counts them) after forks, removals and gc,
 * against the extents of live records; named slack is batch records, one block of the file system
 * for the extents of each segment, the index, the reserve and the small files beside them.
 * Not responsible for: which records live (test_tree.c), what gc moves (test_store_gc.c).
 * Broken twin: BREAK_KIN.
 *
 * With the argument `real` the model is the real one; its figures stand in the README.
 */
#include "snapshot/snap_care.h"
#include "store/fmt.h"
#include "store/store_gc.h"
#include "tests/support_tree.h"
#include "tests/testing.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FORKS = 50, PAGE = 4096, SMALL_FILES_BYTES = 64 << 10 };

static int real_model;

struct usage {
    uint64_t segments, index, reserve, all; /* as allocated */
    uint64_t segment_count;
    uint64_t live;    /* extents of records in the index, padded */
    uint64_t batches; /* pages of batch records */
};

static uint64_t allocated(const char *path) {
    struct stat info;
    assert_int_equal(lstat(path, &info), 0);
    return (uint64_t)info.st_blocks * 512;
}

/* Pages of a segment that belong to a batch record, found by reading all of it. */
static uint64_t batch_bytes(const char *path) {
    FILE *file = fopen(path, "rb");
    uint64_t found = 0;
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size_t size = (size_t)ftell(file);
    uint8_t *bytes = malloc(size + 1);
    assert_non_null(bytes);
    rewind(file);
    assert_int_equal(fread(bytes, 1, size, file), size);
    fclose(file);
    for (size_t at = 0; at + PAGE <= size; at += PAGE) {
        struct fmt_batch batch;
        struct kv_digest digest;
        if (fmt_batch_decode_head(bytes + at, PAGE, &batch) != KV_OK ||
            batch.record_bytes > size - at ||
            fmt_batch_decode(bytes + at, (size_t)batch.record_bytes, &batch, &digest) != KV_OK)
            continue;
        found += kv_round_up(batch.record_bytes, PAGE);
    }
    free(bytes);
    return found;
}

static void walk_files(const char *dir, struct usage *usage) {
    DIR *folder = opendir(dir);
    assert_non_null(folder);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char path[TESTING_PATH_BYTES + 300];
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (entry->d_name[0] == '.')
            continue;
        assert_int_equal(lstat(path, &info), 0);
        usage->all += allocated(path);
        if (S_ISDIR(info.st_mode))
            walk_files(path, usage);
        if (strstr(entry->d_name, ".seg") != NULL) {
            usage->segments += allocated(path);
            usage->batches += batch_bytes(path);
            usage->segment_count++;
        }
        if (strcmp(entry->d_name, "data.mdb") == 0)
            usage->index = allocated(path);
        if (strcmp(entry->d_name, "RESERVE") == 0)
            usage->reserve = allocated(path);
    }
    closedir(folder);
}

/* From the index, record for record; the store's own sum must be the same. */
static uint64_t live_extents(struct store *store) {
    struct store_walk walk = {.prefix = "", .prefix_bytes = 0};
    struct store_record record;
    struct store_stats stats;
    uint64_t live = 0;
    while (store_next(store, &walk, &record, NULL) == KV_OK) {
        for (uint32_t i = 0; i < record.extent_count; i++)
            live += fmt_extent_padded(&record.extents[i]);
        store_record_release(store, &record);
    }
    store_stats_get(store, &stats);
    assert_int_equal(stats.live_bytes, live);
    return live;
}

/* Closes, since the open segment has space taken ahead until then, and opens again. */
static struct usage usage_of(struct tree_life *f) {
    struct usage usage = {0};
    snapshot_drain(f->life.snapshot);
    usage.live = live_extents(f->life.store);
    life_close(&f->life);
    usage.all = allocated(f->dir);
    walk_files(f->dir, &usage);
    life_open(&f->options, &f->life);
    f->tree.store = f->life.store;
    return usage;
}

/* What `gc` deletes and moves, and every hole that can be made. */
static void collect(struct tree_life *f) {
    const struct snap_care_collect_args args = {.store = f->life.store, .alloc = kv_alloc_system()};
    struct snap_care_report records;
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct kv_diag diag = {""};
    snapshot_drain(f->life.snapshot);
    assert_int_equal(snap_care_collect(&args, &records, &diag), KV_OK);
    assert_int_equal(records.dead_snapshots + records.dead_pages + records.dead_blocks +
                         records.dead_lineages,
                     0); /* removal leaves nothing for gc to find out */
    options.punch_every = 1;
    assert_int_equal(store_gc(f->life.store, &options, &report, &diag), KV_OK);
    assert_int_equal(report.held + report.damaged, 0);
    if (report.no_holes)
        testing_skip("the file system makes no holes");
}

/* Nothing that is allocated has no owner. */
static struct usage expect_exact(struct tree_life *f, const char *what) {
    struct usage usage = usage_of(f);
    printf("%s: du %llu = live extents %llu + batch records %llu + index %llu + reserve %llu + "
           "rest %lld, of which segments %lld\n",
           what, (unsigned long long)usage.all, (unsigned long long)usage.live,
           (unsigned long long)usage.batches, (unsigned long long)usage.index,
           (unsigned long long)usage.reserve,
           (long long)(usage.all - usage.live - usage.batches - usage.index - usage.reserve),
           (long long)(usage.segments - usage.live - usage.batches));
    assert_true(usage.segments >= usage.live + usage.batches);
    assert_true(usage.segments <= usage.live + usage.batches + usage.segment_count * PAGE);
    assert_true(usage.all <=
                usage.segments + usage.index + usage.reserve + (uint64_t)SMALL_FILES_BYTES);
    return usage;
}

static void say_and_sleep(struct tree_life *f, const char *name, uint32_t turns) {
    struct session *session = life_session(&f->life, name, IMAGE_RECIPE_V3);
    for (uint32_t turn = 0; turn < turns; turn++)
        life_say(session, turn + 1, 495, 5, NULL);
    life_sleep(&f->life, session);
}

static void wakes_as_itself(struct tree_life *f, const char *name) {
    struct receipt receipt;
    struct session *session = life_wake(&f->life, name, &receipt);
    assert_int_equal(receipt.tokens_prefilled, 0);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    session_drop(session);
    snapshot_drain(f->life.snapshot);
}

/* CASE-30 and its reverse, counted: a fork shares all, so either may go and little comes back; the
 * last one gives everything back. */
static void either_may_go(int child_goes) {
    struct tree_life f;
    tree_life_open(&f, real_model);
    say_and_sleep(&f, "parent", 3);
    collect(&f);
    struct usage alone = expect_exact(&f, "one session");
    tree_life_fork(&f, "parent", NULL, "child");
    tree_life_remove(&f, child_goes ? "child" : "parent");
    const char *left = child_goes ? "parent" : "child";
    collect(&f);
    struct usage again = expect_exact(&f, "its fork and it, one of them removed");
    assert_int_equal(again.live, alone.live);
    wakes_as_itself(&f, left);
    tree_life_remove(&f, left);
    collect(&f);
    struct usage none = expect_exact(&f, "no session");
    assert_int_equal(none.live, 0);
    life_close(&f.life);
}

/* Fails with BREAK_KIN. */
static void the_child_outlives_the_parent(void **state) {
    (void)state;
    either_may_go(0);
}

static void the_parent_outlives_the_child(void **state) {
    (void)state;
    either_may_go(1);
}

static uint64_t window_page_bytes(struct tree_life *f, const char *name) {
    struct store_extent extent;
    struct record_snapshot head = life_head(&f->life, name, NULL);
    struct record_key key = record_key_page(head.page_ids[0]);
    life_extent(&f->life, &key, LAYOUT_PAGE, &extent);
    return fmt_extent_padded(&extent);
}

/* 50 forks of 7,500 tokens cost less than 51 window pages on the disk, records and index included;
 * what they and their source alone used comes back, to the block. */
static void fifty_forks_cost_records(void **state) {
    (void)state;
    struct tree_life f;
    char name[16];
    tree_life_open(&f, real_model);
    say_and_sleep(&f, "long", 15);
    collect(&f);
    uint64_t page = window_page_bytes(&f, "long");
    struct usage one = expect_exact(&f, "one session of 7,500 tokens");
    for (int i = 0; i < FORKS; i++) {
        snprintf(name, sizeof name, "fork %d", i);
        tree_life_fork(&f, "long", NULL, name);
    }
    struct usage all = usage_of(&f);
    printf("50 forks: du grew by %llu, live extents by %llu, batch records by %llu, index by %lld; "
           "51 window pages are %llu\n",
           (unsigned long long)(all.segments - one.segments),
           (unsigned long long)(all.live - one.live),
           (unsigned long long)(all.batches - one.batches), (long long)(all.index - one.index),
           (unsigned long long)(51 * page));
    /* The sum of an image and a batch record for each is all, and is not even the pages. */
    assert_int_equal(all.segments - one.segments,
                     (all.live - one.live) + (all.batches - one.batches));
    assert_true(all.all - one.all < 51 * page);
    tree_life_remove(&f, "long");
    for (int i = 1; i < FORKS; i++) {
        snprintf(name, sizeof name, "fork %d", i);
        tree_life_remove(&f, name);
    }
    collect(&f);
    struct usage left = expect_exact(&f, "one of 51 left");
    assert_int_equal(left.live, one.live);
    wakes_as_itself(&f, "fork 0");
    life_close(&f.life);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_child_outlives_the_parent),
                                       cmocka_unit_test(the_parent_outlives_the_child),
                                       cmocka_unit_test(fifty_forks_cost_records)};
    real_model = argc > 1 && strcmp(argv[1], "real") == 0;
    return testing_run(real_model ? 1 : argc, argv, tests, sizeof tests / sizeof tests[0]);
}
