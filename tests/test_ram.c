/* tests/test_ram.c - extents and sessions that stay in memory within a byte budget.
 *
 * Responsible for: CASE-20 (the budget holds for the memory really taken, also with one thing
 * larger than it), CASE-24 (recency after a wake that worked), who goes first, what removals take
 * along, wakes that read nothing from the disk, damage in memory.
 * Not responsible for: reading from the disk (test_store_read.c).
 *
 * Fails with BREAK_RAM_BUDGET (memory is taken beyond the budget), BREAK_RAM_LARGE (others go for
 * what does not fit), BREAK_RAM_LRU (the newest goes first), BREAK_RAM_DELETE (what is removed
 * stays), BREAK_RAM_UNKNOWN (what cannot be looked up stays), BREAK_RAM_CHANGED (what goes while it
 * is brought stays) and BREAK_PLANE_DIGEST (what lies in memory is believed).
 */
#include "store/store_ram.h"

#include "engine/engine_inner.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KIB = 1024, EXTENT_BYTES = 100 * KIB, BUDGET = 1024 * KIB };

/* --- memory that is counted as the allocator really has it */

struct counting {
    pthread_mutex_t lock;
    size_t bytes, peak;
    uint64_t until_failure; /* 0: none; 1: the next one fails */
};

static void *counted_get(void *context, size_t bytes, size_t align_bytes) {
    struct counting *counting = context;
    pthread_mutex_lock(&counting->lock);
    int fails = counting->until_failure != 0 && --counting->until_failure == 0;
    void *memory = fails ? NULL : kv_alloc_aligned(kv_alloc_system(), bytes, align_bytes);
    counting->bytes += malloc_usable_size(memory);
    counting->peak = counting->bytes > counting->peak ? counting->bytes : counting->peak;
    pthread_mutex_unlock(&counting->lock);
    return memory;
}

static void counted_put(void *context, void *memory) {
    struct counting *counting = context;
    pthread_mutex_lock(&counting->lock);
    counting->bytes -= malloc_usable_size(memory);
    pthread_mutex_unlock(&counting->lock);
    kv_alloc_release(kv_alloc_system(), memory);
}

/* --- extents */

struct shelf {
    char dir[TESTING_PATH_BYTES];
    struct counting counting;
    struct kv_alloc alloc;
    struct store *store;
    uint8_t bytes[BUDGET * 2];
};

/* Record i has one raw extent of `bytes`, filled with i. */
static struct store_extent put(struct shelf *shelf, unsigned i, size_t bytes) {
    struct store_batch *batch = NULL;
    struct store_record record;
    char key[16];
    snprintf(key, sizeof key, "r%u", i);
    memset(shelf->bytes, (int)i, bytes);
    struct iovec piece = {shelf->bytes, bytes};
    const struct store_part part = {0, STORE_RAW, &piece, 1, 0};
    const struct store_put put = {key, strlen(key), "", 0, &part, 1};
    assert_int_equal(store_batch_begin(shelf->store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    assert_int_equal(store_get(shelf->store, key, strlen(key), &record, NULL), KV_OK);
    struct store_extent extent = record.extents[0];
    store_record_release(shelf->store, &record);
    return extent;
}

static struct shelf *open_shelf(uint64_t budget) {
    struct shelf *shelf = calloc(1, sizeof *shelf);
    assert_non_null(shelf);
    testing_temp_dir(shelf->dir);
    pthread_mutex_init(&shelf->counting.lock, NULL);
    shelf->alloc = (struct kv_alloc){counted_get, counted_put, &shelf->counting};
    struct store_options options = support_store_options(shelf->dir);
    options.alloc = &shelf->alloc;
    shelf->store = support_store_open(&options);
    (void)put(shelf, 255, EXTENT_BYTES); /* what batches keep for themselves */
    shelf->counting.peak = shelf->counting.bytes;
    assert_int_equal(store_ram_open(shelf->store, budget, NULL), KV_OK);
    return shelf;
}

static void close_shelf(struct shelf *shelf) {
    store_close(shelf->store);
    assert_int_equal(shelf->counting.bytes, 0);
    free(shelf);
}

static enum kv_err keep(struct shelf *shelf, uint64_t owner, const struct store_extent *extent,
                        unsigned i) {
    const struct store_ram_set set = {owner, &extent, 1};
    const struct iovec piece = {shelf->bytes, extent->raw_bytes};
    memset(shelf->bytes, (int)i, extent->raw_bytes);
    if (!store_ram_room(shelf->store, &set))
        return KV_ERR_LIMIT;
    return store_ram_keep(shelf->store, owner, extent, &piece, 1);
}

/* Bytes of the disk that reading it takes; the right ones come in every case. */
static uint64_t disk_bytes(struct shelf *shelf, const struct store_extent *extent, unsigned i) {
    const struct iovec piece = {shelf->bytes, extent->raw_bytes};
    struct store_read read = {.extent = extent, .pieces = &piece, .piece_count = 1, .verify = 1};
    const struct store_read_args args = {.reads = &read, .count = 1, .ram = 1};
    struct store_read_stats stats;
    memset(shelf->bytes, 0xff, extent->raw_bytes);
    assert_int_equal(store_read(shelf->store, &args, &stats, NULL), KV_OK);
    for (size_t at = 0; at < extent->raw_bytes; at++)
        assert_int_equal(shelf->bytes[at], (uint8_t)i);
    assert_int_equal(stats.ram_bytes, stats.read_bytes == 0 ? extent->raw_bytes : 0);
    assert_int_equal(stats.digests, 1);
    return stats.read_bytes;
}

static struct store_ram_stats stats_of(struct store *store) {
    struct store_ram_stats stats;
    store_ram_stats(store, &stats);
    return stats;
}

/* BREAK_RAM_LENT: what is lent goes while somebody copies from it. */
static void what_is_lent_stays(void **state) {
    struct store_ram_loan loan, again;
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    struct store_extent extent = put(shelf, 3, EXTENT_BYTES);
    assert_int_equal(store_ram_borrow(shelf->store, &extent, &loan), 0);
    store_ram_return(shelf->store, &loan);
    uint64_t before = stats_of(shelf->store).bytes;
    assert_int_equal(keep(shelf, 1, &extent, 3), KV_OK);
    assert_int_equal(store_ram_borrow(shelf->store, &extent, &loan), 1);
    assert_int_equal(store_ram_borrow(shelf->store, &extent, &again), 1);
    store_ram_forget(shelf->store, 1);
    assert_true(disk_bytes(shelf, &extent, 3) > 0);
    assert_true(stats_of(shelf->store).bytes > before + EXTENT_BYTES);
    store_ram_return(shelf->store, &again);
    for (size_t at = 0; at < extent.raw_bytes; at++)
        assert_int_equal(((const uint8_t *)loan.bytes)[at], 3);
    store_ram_return(shelf->store, &loan);
    assert_null(loan.bytes);
    assert_int_equal(stats_of(shelf->store).bytes, before);
    close_shelf(shelf);
}

static void the_budget_is_never_passed(void **state) {
    enum { COUNT = 40 };
    struct store_extent extents[COUNT], large;
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    large = put(shelf, 200, BUDGET + KIB);
    for (unsigned i = 0; i < COUNT; i++)
        extents[i] = put(shelf, i, EXTENT_BYTES + i);
    size_t before = shelf->counting.bytes - stats_of(shelf->store).bytes;
    shelf->counting.peak = shelf->counting.bytes;
    for (unsigned i = 0; i < COUNT; i++) {
        assert_int_equal(keep(shelf, i / 2, &extents[i], i), KV_OK);
        /* CASE-20: one that is larger than all of it, with others there and without. */
        struct store_ram_stats with = stats_of(shelf->store);
        assert_int_equal(keep(shelf, 1000, &large, 200), KV_ERR_LIMIT);
        assert_int_equal(store_ram_keep(shelf->store, 1000, &large,
                                        &(struct iovec){shelf->bytes, large.raw_bytes}, 1),
                         KV_ERR_LIMIT);
        assert_int_equal(stats_of(shelf->store).extents, with.extents);
        assert_int_equal(stats_of(shelf->store).evicted, with.evicted);
    }
    struct store_ram_stats stats = stats_of(shelf->store);
    assert_true(stats.bytes_peak <= BUDGET);
    assert_true(stats.extents >= 7 && stats.extents < COUNT);
    assert_true(shelf->counting.peak - before <= BUDGET);
    assert_true(shelf->counting.peak - before > BUDGET / 2);
    /* What fits not is read from the disk as ever. */
    assert_true(disk_bytes(shelf, &large, 200) > 0);
    assert_int_equal(disk_bytes(shelf, &extents[COUNT - 1], COUNT - 1), 0);
    close_shelf(shelf);
}

static void who_was_used_longest_ago_goes_first(void **state) {
    struct store_extent extents[10];
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    for (unsigned i = 0; i < 10; i++)
        extents[i] = put(shelf, i, EXTENT_BYTES);
    /* Owners 1, 2 and 3 of three extents each fill it; 1 is used again. */
    for (unsigned i = 0; i < 9; i++)
        assert_int_equal(keep(shelf, 1 + i / 3, &extents[i], i), KV_OK);
    store_ram_touch(shelf->store, 1);
    assert_int_equal(keep(shelf, 4, &extents[9], 9), KV_OK);
    assert_int_equal(stats_of(shelf->store).evicted, 1);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(disk_bytes(shelf, &extents[i], i) == 0, i < 3 || i >= 6);
    /* An owner's own go last. */
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(keep(shelf, 1, &extents[i], i), KV_OK);
    assert_int_equal(stats_of(shelf->store).owners, 2);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(disk_bytes(shelf, &extents[i], i) == 0, i < 6 || i == 9);
    assert_true(store_ram_has(shelf->store, 1));
    store_ram_forget(shelf->store, 1);
    assert_false(store_ram_has(shelf->store, 1));
    assert_int_equal(stats_of(shelf->store).extents, 1);
    close_shelf(shelf);
}

static void what_a_batch_takes_away_goes(void **state) {
    struct store_extent extents[3];
    struct store_batch *batch = NULL;
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    for (unsigned i = 0; i < 3; i++) {
        extents[i] = put(shelf, i, EXTENT_BYTES);
        assert_int_equal(keep(shelf, 1, &extents[i], i), KV_OK);
    }
    uint64_t one = (stats_of(shelf->store).bytes - stats_of(shelf->store).bytes % KIB) / 4;
    assert_int_equal(store_batch_begin(shelf->store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_delete(batch, "r0", 2, NULL), KV_OK);
    assert_int_equal(store_batch_update(batch, "r1", 2, "value", 5, NULL), KV_OK);
    assert_int_equal(stats_of(shelf->store).extents, 3);
    uint64_t before = stats_of(shelf->store).bytes;
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    /* The value of r1 is another, its extent the same. */
    assert_int_equal(stats_of(shelf->store).extents, 2);
    assert_true(before - stats_of(shelf->store).bytes >= EXTENT_BYTES && one > 0);
    assert_int_equal(disk_bytes(shelf, &extents[1], 1), 0);
    struct store_extent newer = put(shelf, 2, EXTENT_BYTES);
    assert_int_equal(stats_of(shelf->store).extents, 1);
    assert_true(disk_bytes(shelf, &newer, 2) > 0);
    close_shelf(shelf);
}

/* Whichever allocation fails during a removal: what was removed is not in memory any more. */
static void what_is_removed_without_memory_goes_too(void **state) {
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    uint64_t failures = 0;
    for (uint64_t k = 1;; k++) {
        struct store_extent removed = put(shelf, 0, EXTENT_BYTES);
        struct store_extent other = put(shelf, 1, EXTENT_BYTES);
        struct store_batch *batch = NULL;
        assert_int_equal(keep(shelf, 1, &removed, 0), KV_OK);
        assert_int_equal(keep(shelf, 2, &other, 1), KV_OK);
        assert_int_equal(store_batch_begin(shelf->store, 0, &batch, NULL), KV_OK);
        assert_int_equal(store_batch_delete(batch, "r0", 2, NULL), KV_OK);
        shelf->counting.until_failure = k;
        enum kv_err err = store_batch_commit(batch, NULL, NULL);
        int failed = shelf->counting.until_failure == 0;
        shelf->counting.until_failure = 0;
        failures += (uint64_t)failed;
        if (err == KV_OK)
            assert_false(store_ram_has(shelf->store, 1));
        store_ram_forget(shelf->store, 1);
        store_ram_forget(shelf->store, 2);
        if (!failed)
            break;
    }
    assert_true(failures > 0);
    close_shelf(shelf);
}

static void bringing_reads_once(void **state) {
    enum { COUNT = 5 };
    struct store_extent extents[COUNT];
    const struct store_extent *list[COUNT];
    struct store_read_stats stats;
    struct kv_diag diag = {""};
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    for (unsigned i = 0; i < COUNT; i++) {
        extents[i] = put(shelf, i, EXTENT_BYTES);
        list[i] = &extents[i];
    }
    const struct store_ram_set set = {7, list, COUNT};
    assert_int_equal(store_ram_bring(shelf->store, &set, &stats, &diag), KV_OK);
    assert_int_equal(stats.digests, COUNT);
    assert_true(stats.read_bytes >= COUNT * EXTENT_BYTES);
    assert_int_equal(store_ram_bring(shelf->store, &set, &stats, &diag), KV_OK);
    assert_int_equal(stats.read_bytes, 0);
    for (unsigned i = 0; i < COUNT; i++)
        assert_int_equal(disk_bytes(shelf, &extents[i], i), 0);
    assert_int_equal(stats_of(shelf->store).owners, 1);
    close_shelf(shelf);
}

/* Whichever allocation fails: what is kept is right, what is not is not counted. */
static void no_memory_keeps_less(void **state) {
    enum { COUNT = 4 };
    struct store_extent extents[COUNT];
    const struct store_extent *list[COUNT];
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    uint64_t empty = stats_of(shelf->store).bytes;
    for (unsigned i = 0; i < COUNT; i++) {
        extents[i] = put(shelf, i, EXTENT_BYTES);
        list[i] = &extents[i];
    }
    const struct store_ram_set set = {7, list, COUNT};
    for (uint64_t k = 1;; k++) {
        shelf->counting.until_failure = k;
        enum kv_err kept = keep(shelf, 8, &extents[0], 0);
        enum kv_err brought = store_ram_bring(shelf->store, &set, NULL, NULL);
        int failed = shelf->counting.until_failure == 0;
        shelf->counting.until_failure = 0;
        assert_true(kept == KV_OK || kept == KV_ERR_NOMEM);
        assert_true(brought == KV_OK || brought == KV_ERR_NOMEM);
        assert_int_equal(failed, kept != KV_OK || brought != KV_OK);
        for (unsigned i = 0; i < COUNT; i++)
            (void)disk_bytes(shelf, &extents[i], i);
        store_ram_forget(shelf->store, 7);
        store_ram_forget(shelf->store, 8);
        assert_int_equal(stats_of(shelf->store).bytes, empty);
        assert_int_equal(stats_of(shelf->store).extents, 0);
        if (!failed) {
            assert_true(k > 8);
            break;
        }
    }
    close_shelf(shelf);
}

/* One thread puts and deletes, as the background writer does, while others keep, read and forget:
 * what is read is right, the budget holds, and in the end nothing is left. */
struct racing {
    struct shelf *shelf;
    const struct store_extent *extents;
    unsigned count, owner;
    uint64_t from_memory;
};

static void *keep_and_read(void *context) {
    struct racing *racing = context;
    struct store *store = racing->shelf->store;
    uint8_t *bytes = malloc(EXTENT_BYTES);
    struct testing_random random;
    testing_random_init(&random, racing->owner);
    for (unsigned round = 0; bytes != NULL && round < 200; round++) {
        unsigned i = (unsigned)testing_random_below(&random, racing->count);
        const struct store_extent *extent = &racing->extents[i];
        const struct store_ram_set set = {racing->owner, &extent, 1};
        const struct iovec piece = {bytes, EXTENT_BYTES};
        struct store_read read = {.extent = extent, .pieces = &piece, .piece_count = 1};
        const struct store_read_args args = {.reads = &read, .count = 1, .ram = 1};
        struct store_read_stats stats = {0};
        memset(bytes, (int)i, EXTENT_BYTES);
        if (store_ram_room(store, &set))
            (void)store_ram_keep(store, racing->owner, extent, &piece, 1);
        memset(bytes, 0xff, EXTENT_BYTES);
        if (store_read(store, &args, &stats, NULL) != KV_OK || bytes[0] != (uint8_t)i ||
            memcmp(bytes, bytes + 1, EXTENT_BYTES - 1) != 0)
            racing->count = 0; /* wrong: told to the test by this */
        if (racing->count == 0)
            break;
        racing->from_memory += stats.ram_bytes;
        if (round % 16 == 0)
            store_ram_forget(store, racing->owner);
        store_ram_touch(store, racing->owner);
    }
    free(bytes);
    return NULL;
}

static void threads_share_it(void **state) {
    enum { COUNT = 24, READERS = 3 };
    struct store_extent extents[COUNT];
    struct racing racing[READERS];
    pthread_t threads[READERS];
    (void)state;
    struct shelf *shelf = open_shelf(BUDGET);
    uint64_t empty = stats_of(shelf->store).bytes;
    for (unsigned i = 0; i < COUNT; i++)
        extents[i] = put(shelf, i, EXTENT_BYTES);
    for (unsigned t = 0; t < READERS; t++) {
        racing[t] = (struct racing){shelf, extents, COUNT, t + 1, 0};
        assert_int_equal(pthread_create(&threads[t], NULL, keep_and_read, &racing[t]), 0);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        struct store_batch *batch = NULL;
        char key[16];
        snprintf(key, sizeof key, "r%u", i);
        assert_int_equal(store_batch_begin(shelf->store, 0, &batch, NULL), KV_OK);
        assert_int_equal(store_batch_delete(batch, key, strlen(key), NULL), KV_OK);
        assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    }
    for (unsigned t = 0; t < READERS; t++) {
        pthread_join(threads[t], NULL);
        assert_int_equal(racing[t].count, COUNT);
        assert_true(racing[t].from_memory > 0);
        store_ram_forget(shelf->store, t + 1);
    }
    assert_true(stats_of(shelf->store).bytes_peak <= BUDGET);
    assert_int_equal(stats_of(shelf->store).bytes, empty);
    close_shelf(shelf);
}

/* With a budget of 0 there is nothing: no memory, no answer. */
static void off_is_off(void **state) {
    (void)state;
    struct shelf *shelf = open_shelf(0);
    struct store_extent extent = put(shelf, 1, EXTENT_BYTES);
    const struct store_extent *one = &extent;
    const struct store_ram_set set = {1, &one, 1};
    struct kv_diag diag = {""};
    size_t before = shelf->counting.bytes;
    assert_int_equal(keep(shelf, 1, &extent, 1), KV_ERR_LIMIT);
    assert_int_equal(store_ram_bring(shelf->store, &set, NULL, &diag), KV_ERR_LIMIT);
    assert_int_equal(stats_of(shelf->store).bytes, 0);
    assert_int_equal(shelf->counting.bytes, before);
    assert_true(disk_bytes(shelf, &extent, 1) > 0);
    assert_int_equal(store_ram_open(shelf->store, 5000, &diag), KV_ERR_LIMIT);
    close_shelf(shelf);
}

/* --- sessions */

enum { TOKENS = 64 + 256 * 7 + 30 };

static void open_rig(struct life_rig *rig, uint64_t ram_bytes) {
    life_rig_open(rig);
    rig->options.ram_bytes = ram_bytes;
    life_rig_reopen(rig);
}

static void make_asleep(struct life *life, const char *name, uint64_t seed) {
    struct session *session = life_session(life, name, IMAGE_RECIPE_V3);
    life_say(session, seed, TOKENS, 3, NULL);
    life_sleep(life, session);
}

/* Wakes and drops it: without sleep, so that nothing is kept anew. */
static struct receipt wake_once(struct life *life, const char *name) {
    struct receipt receipt;
    session_drop(life_wake(life, name, &receipt));
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.digests_failed, 0);
    return receipt;
}

static uint64_t raw_of(const struct receipt *receipt) {
    uint64_t bytes = 0;
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        bytes += receipt->raw_bytes[i];
    return bytes;
}

/* `wall`: the processor cannot reach the device's memory. */
static void sleep_and_wake(int wall) {
    struct life_rig rig;
    support_wall_set(wall);
    open_rig(&rig, 16 << 20);
    make_asleep(&rig.life, "chat", 1);
    faulty_io_arm(rig.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_COUNT});
    struct receipt receipt = wake_once(&rig.life, "chat");
    assert_int_equal(faulty_io_counts(rig.faulty).reads, 0);
    assert_int_equal(receipt.door_bytes, 0);
    assert_true(receipt.ram_bytes > raw_of(&receipt));
    assert_int_equal(stats_of(rig.life.store).apart_bytes != 0, wall);
    /* A saved turn replaces pages: the old ones go, the rest is read as before. */
    struct store_ram_stats before = stats_of(rig.life.store);
    struct session *session = life_wake(&rig.life, "chat", NULL);
    life_say(session, 2, 40, 2, NULL);
    life_save(&rig.life, session, 0);
    assert_true(stats_of(rig.life.store).extents < before.extents);
    session_drop(session);
    receipt = wake_once(&rig.life, "chat");
    assert_true(receipt.ram_bytes > 0 && receipt.door_bytes > 0);
    /* Eager: what comes behind comes from memory too. */
    const struct restore_options eager = {.tiers = RECEIPT_TIERS_EAGER};
    session = life_wake(&rig.life, "chat", NULL);
    life_sleep(&rig.life, session);
    struct kv_diag diag = {""};
    assert_int_equal(restore_wake(&rig.life.source, "chat", &eager, &session, &receipt, &diag),
                     KV_OK);
    while (session_promoting(session))
        engine_apply(rig.life.engine);
    assert_true(restore_refined(&rig.life.source, &receipt));
    assert_int_equal(receipt.door_bytes, 0);
    assert_int_equal(receipt.ram_bytes, raw_of(&receipt));
    life_rig_close(&rig);
}

static void a_wake_after_sleep_reads_no_disk(void **state) {
    (void)state;
    sleep_and_wake(0);
    sleep_and_wake(1);
}

/* Three of a size where two fit; a session larger than all of it is read past it. */
static void sessions_go_as_wholes(void **state) {
    struct life_rig rig;
    struct kv_diag diag = {""};
    (void)state;
    open_rig(&rig, 64 << 20);
    make_asleep(&rig.life, "a", 1);
    struct store_ram_stats stats = stats_of(rig.life.store);
    uint64_t one = stats.bytes;
    rig.options.ram_bytes = one * 5 / 2;
    life_rig_reopen(&rig);
    make_asleep(&rig.life, "b", 2);
    life_sleep(&rig.life, life_wake(&rig.life, "a", NULL));
    assert_int_equal(wake_once(&rig.life, "b").door_bytes, 0); /* b is the newer one now */
    /* CASE-24: a wake that fails makes nobody newer. */
    const struct restore_options older = {.snapshot = 12345};
    struct receipt receipt;
    struct session *session = NULL;
    assert_int_not_equal(restore_wake(&rig.life.source, "a", &older, &session, &receipt, &diag),
                         KV_OK);
    make_asleep(&rig.life, "c", 3);
    assert_true(wake_once(&rig.life, "a").ram_bytes == 0);
    assert_int_equal(wake_once(&rig.life, "b").door_bytes, 0);
    assert_int_equal(wake_once(&rig.life, "c").door_bytes, 0);
    stats = stats_of(rig.life.store);
    assert_int_equal(stats.owners, 2);
    assert_true(stats.bytes_peak <= stats.bytes_max);
    /* Larger than the budget. */
    session = life_session(&rig.life, "large", IMAGE_RECIPE_BF16);
    life_say(session, 4, TOKENS + 1024, 3, NULL);
    life_sleep(&rig.life, session);
    receipt = wake_once(&rig.life, "large");
    assert_int_equal(receipt.ram_bytes, 0);
    assert_true(raw_of(&receipt) > stats.bytes_max);
    assert_int_equal(stats_of(rig.life.store).owners, 2);
    assert_true(stats_of(rig.life.store).bytes_peak <= stats.bytes_max);
    life_rig_close(&rig);
}

static void removing_takes_it_along(void **state) {
    struct life_rig rig;
    struct kv_diag diag = {""};
    (void)state;
    open_rig(&rig, 16 << 20);
    uint64_t empty = stats_of(rig.life.store).bytes;
    make_asleep(&rig.life, "a", 1);
    assert_true(stats_of(rig.life.store).bytes > empty);
    assert_int_equal(snapshot_remove(rig.life.store, kv_alloc_system(), "a", &diag), KV_OK);
    assert_int_equal(stats_of(rig.life.store).extents, 0);
    assert_int_equal(stats_of(rig.life.store).bytes, empty);
    life_rig_close(&rig);
}

static void prefetch_brings_what_a_wake_reads(void **state) {
    struct life_rig rig;
    struct store_read_stats stats;
    struct kv_diag diag = {""};
    (void)state;
    open_rig(&rig, 0);
    make_asleep(&rig.life, "a", 1);
    assert_int_equal(restore_prefetch(&rig.life.source, "a", &stats, &diag), KV_ERR_LIMIT);
    rig.options.ram_bytes = 16 << 20;
    life_rig_reopen(&rig);
    assert_int_equal(restore_prefetch(&rig.life.source, "nobody", &stats, &diag), KV_ERR_NOT_FOUND);
    assert_int_equal(restore_prefetch(&rig.life.source, "a", &stats, &diag), KV_OK);
    struct receipt receipt = wake_once(&rig.life, "a");
    assert_int_equal(receipt.door_bytes, 0);
    assert_true(stats.read_bytes > 0);
    /* Checking is of the disk, whatever lies in memory. */
    struct restore_check check;
    assert_int_equal(restore_verify(rig.life.store, kv_alloc_system(), "a", &check, &diag), KV_OK);
    struct record_snapshot head = life_head(&rig.life, "a", NULL);
    const struct record_key key = record_key_block(head.lineage, 1);
    struct store_extent extent;
    life_extent(&rig.life, &key, LAYOUT_KH, &extent);
    uint8_t *bytes = malloc(extent.stored_bytes);
    assert_non_null(bytes);
    life_disk(rig.dir, &extent, bytes, 0);
    bytes[9] ^= 1;
    life_disk(rig.dir, &extent, bytes, 1);
    assert_int_equal(restore_verify(rig.life.store, kv_alloc_system(), "a", &check, &diag),
                     KV_ERR_CORRUPT);
    assert_int_equal(wake_once(&rig.life, "a").door_bytes, 0);
    free(bytes);
    /* One that cannot be brought whole leaves no part of it behind. */
    life_rig_reopen(&rig);
    assert_int_not_equal(restore_prefetch(&rig.life.source, "a", &stats, &diag), KV_OK);
    assert_int_equal(stats_of(rig.life.store).extents, 0);
    rig.options.ram_bytes = 300 << 10;
    life_rig_reopen(&rig);
    assert_int_equal(restore_prefetch(&rig.life.source, "a", &stats, &diag), KV_ERR_LIMIT);
    assert_non_null(strstr(diag.text, "larger than the RAM tier"));
    assert_int_equal(stats_of(rig.life.store).extents, 0);
    life_rig_close(&rig);
}

static void remove_a(void *context) {
    struct kv_diag diag = {""};
    assert_int_equal(snapshot_remove(context, kv_alloc_system(), "a", &diag), KV_OK);
}

/* Its extents are read after the batch that takes them away. BREAK_RAM_CHANGED */
static void what_goes_while_it_is_brought_does_not_stay(void **state) {
    struct life_rig rig;
    struct store_read_stats stats;
    struct kv_diag diag = {""};
    (void)state;
    open_rig(&rig, 16 << 20);
    make_asleep(&rig.life, "a", 1);
    make_asleep(&rig.life, "b", 2);
    life_rig_reopen(&rig);
    struct engine_hooks *hooks = &rig.life.engine->settings.hooks;
    const struct engine_hooks before = *hooks;
    hooks->context = rig.life.store;
    hooks->away = remove_a;
    assert_int_equal(restore_prefetch(&rig.life.source, "a", &stats, &diag), KV_ERR_NOT_FOUND);
    printf("%s\n", diag.text);
    *hooks = before;
    assert_true(stats.read_bytes > 0);
    assert_int_equal(stats_of(rig.life.store).extents, 0);
    assert_int_equal(restore_prefetch(&rig.life.source, "b", &stats, &diag), KV_OK);
    assert_true(stats_of(rig.life.store).extents > 0);
    life_rig_close(&rig);
}

/* A bit that turns in memory is seen where the bytes land, and the disk is read. */
static void damage_in_memory_is_not_believed(void **state) {
    struct life_rig rig;
    (void)state;
    open_rig(&rig, 16 << 20);
    struct session *session = life_session(&rig.life, "a", IMAGE_RECIPE_V3);
    life_say(session, 1, TOKENS, 3, NULL);
    life_save(&rig.life, session, 0);
    struct kv_digest resident = life_resident(session);
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    (void)transfer_block_parts(session->blocks[2], parts);
    uint8_t *bytes = malloc(parts[1].size);
    assert_non_null(bytes);
    assert_int_equal(transfer_part_read(rig.life.engine, &parts[1], bytes), KV_OK);
    bytes[5] ^= 2;
    assert_int_equal(transfer_part_write(rig.life.engine, &parts[1], bytes), KV_OK);
    restore_keep(&rig.life.source, session);
    session_drop(session);
    assert_true(stats_of(rig.life.store).extents > 0);
    struct receipt receipt;
    session = life_wake(&rig.life, "a", &receipt);
    struct kv_digest found = life_resident(session);
    assert_memory_equal(&found, &resident, sizeof found);
    assert_int_equal(receipt.ram_bytes, 0);
    assert_true(receipt.door_bytes > 0);
    assert_int_equal(stats_of(rig.life.store).extents, 0);
    free(bytes);
    life_rig_close(&rig);
}

TESTING_MAIN(cmocka_unit_test(what_is_lent_stays), cmocka_unit_test(the_budget_is_never_passed),
             cmocka_unit_test(who_was_used_longest_ago_goes_first),
             cmocka_unit_test(what_a_batch_takes_away_goes),
             cmocka_unit_test(what_goes_while_it_is_brought_does_not_stay),
             cmocka_unit_test(what_is_removed_without_memory_goes_too),
             cmocka_unit_test(bringing_reads_once), cmocka_unit_test(no_memory_keeps_less),
             cmocka_unit_test(threads_share_it), cmocka_unit_test(off_is_off),
             cmocka_unit_test(a_wake_after_sleep_reads_no_disk),
             cmocka_unit_test(sessions_go_as_wholes), cmocka_unit_test(removing_takes_it_along),
             cmocka_unit_test(prefetch_brings_what_a_wake_reads),
             cmocka_unit_test(damage_in_memory_is_not_believed))
