/* tests/test_space.c - sessions inside a byte budget and a write budget.
 *
 * Responsible for: a budget that many saves pass several times over, gc by itself and one more try,
 * what a long chat costs in bytes, the buckets of the write budget, the account by cause.
 * Not responsible for: gc itself (test_store_gc.c).
 * Broken twins: BREAK_ROOM, BREAK_BUCKET, BREAK_BUDGET.
 */
#include "snapshot/snap_room.h"

#include "store/store_gc.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLANE_BYTES = 64 << 10 }; /* more than one plane of the tiny model with its padding */

static enum kv_err try_sleep(struct life *life, struct session *session, struct kv_diag *diag) {
    struct receipt receipt;
    return snapshot_sleep(life->snapshot, session, 0, &receipt, diag);
}

/* CASE-22: sessions come and go until three times the quota has been written and more; the
 * directory never passes the quota, and gc makes room without being asked.
 * Fails with BREAK_BUDGET, BREAK_ROOM. */
static void three_times_the_quota(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct kv_diag diag = {""};
    uint64_t written = 0;
    uint64_t most = 0;
    unsigned rounds = 0;
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.bytes_max = testing_quick() ? 12 << 20 : 24 << 20;
    options.limited = 1;
    life_open(&options, &life);
    struct session *kept = life_session(&life, "kept", IMAGE_RECIPE_V3);
    life_say(kept, 5, 900, 4, NULL);
    struct kv_digest before = life_resident(kept);
    life_sleep(&life, kept);
    for (; written < 3 * options.bytes_max; rounds++) {
        char name[32];
        snprintf(name, sizeof name, "s%u", rounds);
        struct session *session = life_session(&life, name, IMAGE_RECIPE_V3);
        life_say(session, rounds + 100, 1500, 2, NULL);
        if (try_sleep(&life, session, &diag) != KV_OK)
            fail_msg("round %u: %s", rounds, diag.text);
        /* Two stay at a time. */
        if (rounds >= 2) {
            snprintf(name, sizeof name, "s%u", rounds - 2);
            assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), name, &diag), KV_OK);
        }
        written = store_written(life.store);
        uint64_t disk = support_store_disk_bytes(dir);
        most = disk > most ? disk : most;
        assert_true(disk <= options.bytes_max + PLANE_BYTES);
    }
    struct receipt receipt;
    struct session *woken = life_wake(&life, "kept", &receipt);
    struct kv_digest after = life_resident(woken);
    assert_memory_equal(&before, &after, sizeof before);
    struct store_stats stats;
    store_stats_get(life.store, &stats);
    print_message(
        "%u sessions, %llu bytes written under a quota of %llu; du at most %llu; gc moved "
        "%llu in %llu batches\n",
        rounds, (unsigned long long)written, (unsigned long long)options.bytes_max,
        (unsigned long long)most, (unsigned long long)stats.written[STORE_CAUSE_GC].device_bytes,
        (unsigned long long)stats.written[STORE_CAUSE_GC].batches);
    life_close(&life);
}

/* CASE-21: no room and nothing to give back: refused, resident, and space makes it work. */
static void nothing_to_give_back(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.bytes_max = testing_quick() ? 8 << 20 : 12 << 20;
    options.limited = 1;
    life_open(&options, &life);
    enum kv_err err = KV_OK;
    unsigned count = 0;
    struct session *session = NULL;
    for (; err == KV_OK && count < 40; count++) {
        char name[32];
        snprintf(name, sizeof name, "s%u", count);
        session = life_session(&life, name, IMAGE_RECIPE_BF16);
        life_say(session, count + 1, 1200, 2, NULL);
        err = try_sleep(&life, session, &diag);
    }
    assert_int_equal(err, KV_ERR_LIMIT);
    assert_true(count > 2);
    assert_true(support_store_disk_bytes(dir) <= options.bytes_max + PLANE_BYTES);
    struct kv_digest resident = life_resident(session);
    /* Removing needs the reserve, and what it frees is enough for the next try. */
    assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "s0", &diag), KV_OK);
    assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "s1", &diag), KV_OK);
    if (try_sleep(&life, session, &diag) != KV_OK)
        fail_msg("after removals: %s", diag.text);
    char name[32];
    snprintf(name, sizeof name, "s%u", count - 1);
    session = life_wake(&life, name, &receipt);
    struct kv_digest woken = life_resident(session);
    assert_memory_equal(&woken, &resident, sizeof woken);
    life_close(&life);
}

/* CASE-23 in small: a chat saved on every turn writes what is new, one open window, image and
 * record per save. */
static void a_long_chat_writes_what_is_new(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    uint64_t written = 0;
    uint64_t overhead = 0;
    struct receipt receipt = {0};
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    life_open(&options, &life);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    uint64_t window = 0;
    for (unsigned turn = 0; turn < 20; turn++) {
        life_say(session, turn + 1, 120, 4, NULL);
        receipt = life_save(&life, session, 0);
        written += receipt.door_bytes;
        window = receipt.stored_bytes[9];
        overhead += receipt.stored_bytes[9] + receipt.stored_bytes[10] + receipt.image_bytes +
                    receipt.record_bytes;
    }
    struct snapshot_entry entry;
    assert_int_equal(snapshot_find(life.store, kv_alloc_system(), "chat", &entry, NULL), KV_OK);
    struct store_stats stats;
    store_stats_get(life.store, &stats);
    uint64_t allowed = entry.stored_bytes + stats.index_bytes + overhead;
    print_message("20 turns: %llu bytes written, %llu stored, %llu of pages, images and records\n",
                  (unsigned long long)written, (unsigned long long)entry.stored_bytes,
                  (unsigned long long)overhead);
    assert_true(window > 0);
    assert_true(written * 10 <= allowed * 11);
    /* The account knows the same bytes, and gives them their cause. */
    uint64_t blocks = stats.written[STORE_CAUSE_BLOCKS].device_bytes;
    uint64_t saves = stats.written[STORE_CAUSE_SAVE].device_bytes;
    assert_true(blocks > 0 && saves > 0);
    assert_int_equal(blocks + saves, store_written(life.store));
    assert_int_equal(stats.written[STORE_CAUSE_SAVE].batches, 20);
    assert_true(stats.written[STORE_CAUSE_BLOCKS].user_bytes > 0);
    life_close(&life);
    /* It outlives the process up to the last save. */
    life_open(&options, &life);
    struct store_stats again;
    store_stats_get(life.store, &again);
    assert_memory_equal(again.written, stats.written, sizeof stats.written);
    life_close(&life);
}

/* Fails with BREAK_BUCKET. */
static void buckets(void **state) {
    (void)state;
    const uint64_t second = 1000000000u;
    struct snap_room_bucket bucket;
    snap_room_bucket_init(&bucket, 1000, second, 5 * second);
    assert_int_equal(snap_room_bucket_wait(&bucket, 5 * second), 0);
    snap_room_bucket_take(&bucket, 3000, 5 * second);
    assert_in_range(snap_room_bucket_wait(&bucket, 5 * second), 2 * second, 2 * second + 10);
    assert_in_range(snap_room_bucket_wait(&bucket, 6 * second), second, second + 10);
    assert_int_equal(snap_room_bucket_wait(&bucket, 7 * second + 1000), 0);
    /* It never holds more than its capacity, and a clock that stands still gives nothing. */
    snap_room_bucket_take(&bucket, 1001, 1000 * second);
    assert_true(snap_room_bucket_wait(&bucket, 1000 * second) > 0);
    snap_room_bucket_init(&bucket, 0, second, 0);
    snap_room_bucket_take(&bucket, UINT64_MAX, 0);
    assert_int_equal(snap_room_bucket_wait(&bucket, 0), 0);
}

/* A write budget that blocks would need years for: they wait, a save does not. */
static void a_save_does_not_wait_for_the_budget(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.bytes_per_second = 1;
    life_open(&options, &life);
    struct session *session = life_session(&life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 2, NULL); /* the first batch may go, it puts the bucket below zero */
    life_save(&life, session, 0);
    uint64_t saved = store_written(life.store);
    life_say(session, 2, 900, 2, NULL);
    assert_int_equal(store_written(life.store), saved);
    struct kv_digest before = life_resident(session);
    life_sleep(&life, session);
    assert_true(store_written(life.store) > saved);
    session = life_wake(&life, "chat", &receipt);
    struct kv_digest after = life_resident(session);
    assert_memory_equal(&before, &after, sizeof before);
    life_close(&life);
}

TESTING_MAIN(cmocka_unit_test(three_times_the_quota), cmocka_unit_test(nothing_to_give_back),
             cmocka_unit_test(a_long_chat_writes_what_is_new), cmocka_unit_test(buckets),
             cmocka_unit_test(a_save_does_not_wait_for_the_budget))
