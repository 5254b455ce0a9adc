/* tests/test_retain.c - what goes when the byte budget is reached, and what stays.
 *
 * Responsible for: nothing goes without permission; planes go in the order of the ladder, from the
 * longest unused session on, never from a resident one; a degraded session wakes proven at the
 * floor and carries its mark; older snapshots go last and newest ones never; expire; the log; a
 * damaged refinement plane is given up and the session stays.
 * Not responsible for: the commands (test_cli_care.c), gc (test_store_gc.c).
 * Broken twins: BREAK_MIXED, BREAK_LOWER_DIGEST, BREAK_LAST_SNAPSHOT, BREAK_RESIDENT.
 */
#include "snapshot/snap_retain.h"

#include "snapshot/snap_care.h"
#include "snapshot/snap_lower.h"
#include "snapshot/snap_tree.h"
#include "store/store_fsck.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum kv_err try_sleep(struct life *life, struct session *session, struct receipt *receipt,
                             struct kv_diag *diag) {
    return snapshot_sleep(life->snapshot, session, 0, receipt, diag);
}

static struct snapshot_entry entry_of(struct life *life, const char *name) {
    struct snapshot_entry entry;
    struct kv_diag diag = {""};
    if (snapshot_find(life->store, kv_alloc_system(), name, &entry, &diag) != KV_OK)
        fail_msg("%s: %s", name, diag.text);
    return entry;
}

static struct snap_retain_log log_of(struct life *life) {
    struct snap_retain_log log;
    assert_int_equal(snap_retain_read(life->store, &log, NULL), KV_OK);
    return log;
}

static void on_finding(void *context, const struct snap_care_finding *finding) {
    (void)context;
    fail_msg("%s, session %s: %s", finding->kind, finding->session, finding->text);
}

static void on_store_finding(void *context, const struct store_fsck_finding *finding) {
    (void)context;
    if (!finding->is_note)
        fail_msg("%s: %s", store_fsck_name(finding->kind), finding->text);
}

/* Records, counts, segments and every digest; with nobody resident. */
static void all_is_sound(struct life *life) {
    struct snap_care_report sessions;
    struct store_fsck_report report;
    const struct snap_care_check_args halves = {life->store, kv_alloc_system(), NULL,
                                                0,           on_finding,        NULL};
    const struct store_fsck_args args = {
        .store = life->store, .read_data = 1, .each = on_store_finding};
    assert_int_equal(snap_care_check(&halves, &sessions, NULL), KV_OK);
    assert_int_equal(store_fsck(&args, &report, NULL), KV_OK);
    assert_int_equal(report.damage, 0);
}

static struct snap_retain_sum give_up(struct life *life, uint64_t need, int may_degrade) {
    struct snap_retain_sum sum = {0};
    struct kv_diag diag = {""};
    int changed = 0;
    const struct snap_retain_args args = {.store = life->store,
                                          .alloc = kv_alloc_system(),
                                          .clock = kv_clock_system(),
                                          .may_degrade = may_degrade,
                                          .need_bytes = need};
    if (snap_retain_make_room(&args, &sum, &changed, &diag) != KV_OK)
        fail_msg("make room: %s", diag.text);
    assert_int_equal(changed, sum.lowered + sum.snapshots + sum.sessions != 0);
    return sum;
}

static void make_asleep(struct life *life, const char *name, unsigned seed) {
    struct session *session = life_session(life, name, IMAGE_RECIPE_V3);
    life_say(session, seed, 1500, 2, NULL);
    life_sleep(life, session);
}

/* BREAK_MIXED forgets the mark. BREAK_LOWER_DIGEST leaves no digest behind. */
static void a_degraded_session_is_proven_at_its_floor(void **state) {
    (void)state;
    static const uint32_t steps[] = {1u << LAYOUT_KL, 1u << LAYOUT_KL | 1u << LAYOUT_VR2,
                                     1u << LAYOUT_KL | 1u << LAYOUT_VR2 | 1u << LAYOUT_VR1};
    static const enum layout_tier best[] = {LAYOUT_K6V4, LAYOUT_K6V3, LAYOUT_K6V2};
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    life_open(&options, &life);
    make_asleep(&life, "chat", 7);
    uint64_t full = entry_of(&life, "chat").stored_bytes;
    for (int step = 0; step < 3; step++) {
        struct record_snapshot head = life_head(&life, "chat", NULL);
        const struct snap_lower_args args = {.store = life.store,
                                             .alloc = kv_alloc_system(),
                                             .lineage = head.lineage,
                                             .blocks = head.block_count,
                                             .streams = steps[step]};
        struct snap_lower_sum sum;
        assert_int_equal(snap_lower_lineage(&args, &sum, NULL), KV_OK);
        assert_true(sum.blocks == head.block_count && sum.bytes > 0);
        struct snapshot_entry entry = entry_of(&life, "chat");
        assert_int_equal(entry.dropped, steps[step]);
        assert_int_equal(entry.lowered_blocks, head.block_count);
        assert_true(entry.stored_bytes < full);
        all_is_sound(&life);
        struct session *session = life_wake(&life, "chat", &receipt);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
        assert_int_equal(receipt.fingerprint_floor, 1);
        assert_true(receipt.degraded_blocks > 0);
        assert_int_equal(receipt.mixed_from, head.n_kv);
        for (int tier = LAYOUT_K8V4; tier < (int)best[step]; tier++)
            assert_int_equal(receipt.tier_blocks[tier], 0);
        assert_true(receipt.tier_blocks[best[step]] > 0);
        assert_int_equal(receipt.tokens_prefilled, 0);
        session_drop(session);
    }
    /* It goes on, is saved, and the mark stays with it. */
    struct session *session = life_wake(&life, "chat", &receipt);
    uint64_t mixed_from = receipt.mixed_from;
    life_say(session, 8, 700, 4, NULL);
    receipt = life_save(&life, session, 0);
    assert_int_equal(receipt.mixed_from, mixed_from);
    struct life_turn never, woken;
    life_close(&life);
    life_open(&options, &life);
    session = life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.mixed_from, mixed_from);
    life_say(session, 9, 40, 6, &woken);
    life_close(&life);
    /* Waking is repeatable, and what was not degraded is as it was. */
    life_open(&options, &life);
    session = life_wake(&life, "chat", &receipt);
    life_say(session, 9, 40, 6, &never);
    life_same_turn(&never, &woken);
    life_close(&life);
    support_store_remove_index(dir);
    life_open(&options, &life);
    all_is_sound(&life);
    life_wake(&life, "chat", &receipt);
    assert_int_equal(receipt.mixed_from, mixed_from);
    life_close(&life);
}

/* BREAK_LAST_SNAPSHOT lets the newest of all snapshots be the oldest. */
static void the_order_is_kept(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.bytes_max = 16 << 20;
    options.limited = 1;
    life_open(&options, &life);
    make_asleep(&life, "old", 1);
    struct session *session = life_session(&life, "young", IMAGE_RECIPE_V3);
    life_say(session, 2, 700, 2, NULL);
    life_save(&life, session, 1);
    life_say(session, 3, 500, 2, NULL);
    life_sleep(&life, session);
    /* Without permission nothing goes. */
    struct snap_retain_sum sum = give_up(&life, UINT64_MAX, 0);
    assert_int_equal(sum.bytes, 0);
    assert_int_equal(log_of(&life).count, 0);
    uint64_t blocks = entry_of(&life, "young").head.block_count;
    /* A little: KL of the one that was used first. */
    struct store_stats stats;
    store_stats_get(life.store, &stats);
    sum = give_up(&life, stats.room_bytes + 1, 1);
    assert_int_equal(sum.lowered, 1);
    assert_int_equal(sum.snapshots, 0);
    assert_int_equal(entry_of(&life, "old").dropped, 1u << LAYOUT_KL);
    assert_int_equal(entry_of(&life, "young").dropped, 0);
    struct store_stats after;
    store_stats_get(life.store, &after);
    assert_true(after.room_bytes > stats.room_bytes);
    /* Everything: five more planes, one older snapshot, and that is all. */
    sum = give_up(&life, UINT64_MAX, 1);
    assert_int_equal(sum.lowered, 5);
    assert_int_equal(sum.snapshots, 1);
    assert_int_equal(sum.sessions, 0);
    assert_int_equal(entry_of(&life, "young").lowered_blocks, blocks);
    assert_int_equal(entry_of(&life, "young").snapshot_count, 1);
    assert_int_equal(entry_of(&life, "young").head.parent, 0);
    struct snap_retain_log log = log_of(&life);
    assert_int_equal(log.count, 7);
    assert_int_equal(log.newest[0].kind, SNAP_RETAIN_SNAPSHOT);
    assert_string_equal(log.newest[0].name, "young");
    static const uint8_t streams[] = {LAYOUT_VR1, LAYOUT_VR1, LAYOUT_VR2,
                                      LAYOUT_VR2, LAYOUT_KL,  LAYOUT_KL};
    for (int i = 0; i < 6; i++) {
        assert_int_equal(log.newest[1 + i].kind, SNAP_RETAIN_PLANES);
        assert_int_equal(log.newest[1 + i].stream, streams[i]);
        assert_string_equal(log.newest[1 + i].name, i % 2 == 0 ? "young" : "old");
    }
    assert_int_equal(log.actions[SNAP_RETAIN_PLANES], 6);
    all_is_sound(&life);
    sum = give_up(&life, UINT64_MAX, 1);
    assert_int_equal(sum.bytes, 0);
    session_drop(life_wake(&life, "old", NULL));
    session_drop(life_wake(&life, "young", NULL));
    /* What is removed is forgotten by the log as well. */
    assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "old", NULL), KV_OK);
    log = log_of(&life);
    assert_int_equal(log.count, 4);
    for (uint32_t i = 0; i < log.count; i++)
        assert_string_equal(log.newest[i].name, "young");
    life_close(&life);
}

/* Saves that find the budget reached: refused without permission, the session whole; with it, they
 * go on, and the session that is resident keeps what it has.
 * Fails with BREAK_RESIDENT. */
static void a_full_budget_gives_way_with_permission(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char name[32];
    struct life life;
    struct receipt receipt = {0};
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.bytes_max = 20 << 20;
    options.limited = 1;
    life_open(&options, &life);
    make_asleep(&life, "resident", 99);
    struct session *resident = life_wake(&life, "resident", NULL);
    struct session *session = NULL;
    enum kv_err err = KV_OK;
    unsigned count = 0;
    for (; err == KV_OK && count < 60; count++) {
        snprintf(name, sizeof name, "s%u", count);
        session = life_session(&life, name, IMAGE_RECIPE_V3);
        life_say(session, count + 1, 1500, 2, NULL);
        err = try_sleep(&life, session, &receipt, &diag);
    }
    assert_int_equal(err, KV_ERR_LIMIT);
    assert_non_null(strstr(diag.text, "--may-degrade"));
    assert_non_null(strstr(diag.text, "store-max"));
    assert_int_equal(receipt.err, KV_ERR_LIMIT);
    assert_int_equal(receipt.door_bytes, 0);
    assert_int_equal(log_of(&life).count, 0);
    assert_true(count > 3);
    /* The session keeps running, and the same save works once it is allowed. */
    life_say(session, 77, 20, 4, NULL);
    struct kv_digest before = life_resident(session);
    snapshot_may_degrade(life.snapshot, 1);
    kv_diag_clear(&diag);
    if (try_sleep(&life, session, &receipt, &diag) != KV_OK)
        fail_msg("with permission: %s", diag.text);
    assert_true(receipt.lowered_sessions > 0);
    assert_true(receipt.given_bytes > 0);
    assert_int_equal(entry_of(&life, "s0").dropped & 1u << LAYOUT_KL, 1u << LAYOUT_KL);
    assert_int_equal(entry_of(&life, "resident").dropped, 0);
    assert_true(support_store_disk_bytes(dir) <= options.bytes_max + (64 << 10));
    life_say(resident, 5, 20, 4, NULL);
    session = life_wake(&life, name, &receipt);
    struct kv_digest after = life_resident(session);
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(receipt.degraded_blocks, 0);
    session_drop(session);
    session_drop(life_wake(&life, "s0", &receipt));
    assert_true(receipt.degraded_blocks > 0);
    assert_int_equal(receipt.fingerprint_floor, 1);
    /* Until nothing more can go: then it is refused again, and every session is still there. */
    err = KV_OK;
    for (; err == KV_OK && count < 90; count++) {
        snprintf(name, sizeof name, "s%u", count);
        session = life_session(&life, name, IMAGE_RECIPE_V3);
        life_say(session, count + 1, 1500, 2, NULL);
        err = try_sleep(&life, session, &receipt, &diag);
    }
    assert_int_equal(err, KV_ERR_LIMIT);
    print_message("%u sessions in %llu bytes\n", count, (unsigned long long)options.bytes_max);
    session_drop(session);
    session_drop(resident);
    for (unsigned i = 0; i + 1 < count; i++) {
        snprintf(name, sizeof name, "s%u", i);
        session_drop(life_wake(&life, name, &receipt));
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    }
    life_close(&life);
}

static int is_called(void *context, const char *name) {
    return strcmp(context, name) == 0;
}

/* Writers that are no saves: refused as a save is, and let in by the same permission; what they
 * begin with, and what is busy, stays whole. BREAK_WRITER_ROOM asks for no room. */
static void other_writers_find_room_as_saves_do(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char name[32];
    struct life life;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    life_open(&options, &life);
    make_asleep(&life, "source", 1);
    make_asleep(&life, "busy", 2);
    make_asleep(&life, "cold", 3);
    struct session *session = life_wake(&life, "source", NULL);
    life_save(&life, session, 1);
    life_say(session, 4, 20, 2, NULL);
    life_save(&life, session, 0);
    session_drop(session);
    life_close(&life);
    /* Nothing is left of the budget. */
    options.bytes_max = 3 << 20;
    options.limited = 1;
    life_open(&options, &life);
    struct snap_retain_leave leave = {0, is_called, "busy"};
    const struct snap_tree tree = {life.store, kv_alloc_system(), kv_clock_system(), &leave};
    const struct snap_tree_place place = {"source", NULL};
    assert_int_equal(snap_tree_fork(&tree, &place, "fork", &diag), KV_ERR_LIMIT);
    assert_non_null(strstr(diag.text, "store-max"));
    assert_non_null(strstr(diag.text, "--may-degrade"));
    assert_int_equal(snap_tree_rename(&tree, "source", "other", &diag), KV_ERR_LIMIT);
    assert_int_equal(entry_of(&life, "cold").dropped, 0);
    life_close(&life);
    /* As much as cold gives up is enough for records and an image. */
    struct store_stats stats;
    options.limited = 0;
    options.bytes_max = STORE_BYTES_UNLIMITED;
    life_open(&options, &life);
    store_stats_get(life.store, &stats);
    life_close(&life);
    options.limited = 1;
    options.bytes_max = stats.segment_bytes + stats.index_bytes;
    options.bytes_max += options.bytes_max / 4 + (1 << 20);
    life_open(&options, &life);
    const struct snap_tree roomy = {life.store, kv_alloc_system(), kv_clock_system(), &leave};
    enum kv_err err = KV_OK;
    unsigned count = 0;
    for (; err == KV_OK && count < 200; count++) {
        snprintf(name, sizeof name, "f%u", count);
        err = snap_tree_fork(&roomy, &place, name, &diag);
    }
    if (err != KV_ERR_LIMIT)
        fail_msg("%s: %s", kv_err_name(err), diag.text);
    leave.may_degrade = 1;
    if (snap_tree_fork(&roomy, &place, name, &diag) != KV_OK)
        fail_msg("with permission: %s", diag.text);
    assert_true(entry_of(&life, "cold").dropped != 0);
    assert_int_equal(entry_of(&life, "source").dropped, 0);
    assert_int_equal(entry_of(&life, "busy").dropped, 0);
    all_is_sound(&life);
    session_drop(life_wake(&life, name, NULL));
    life_close(&life);
}

/* Only expire lets the last snapshot go, and a save takes the permission away. */
static void expire_lets_a_whole_session_go(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct kv_diag diag = {""};
    life_begin(dir, &life);
    make_asleep(&life, "a", 1);
    make_asleep(&life, "b", 2);
    make_asleep(&life, "c", 3);
    assert_int_equal(snap_retain_expire(life.store, "nobody", 1, &diag), KV_ERR_NOT_FOUND);
    assert_int_equal(snap_retain_expire(life.store, "b", 1, &diag), KV_OK);
    assert_int_equal(snap_retain_expire(life.store, "c", 1, &diag), KV_OK);
    assert_int_equal(entry_of(&life, "b").may_expire, 1);
    struct session *session = life_wake(&life, "c", NULL);
    life_say(session, 9, 20, 4, NULL);
    life_sleep(&life, session);
    assert_int_equal(entry_of(&life, "c").may_expire, 0);
    struct snap_retain_sum sum = give_up(&life, UINT64_MAX, 0);
    assert_int_equal(sum.sessions, 1);
    assert_int_equal(sum.lowered + sum.snapshots, 0);
    struct snapshot_entry entry;
    assert_int_equal(snapshot_find(life.store, kv_alloc_system(), "b", &entry, NULL),
                     KV_ERR_NOT_FOUND);
    struct snap_retain_log log = log_of(&life);
    assert_int_equal(log.count, 1);
    assert_int_equal(log.newest[0].kind, SNAP_RETAIN_SESSION);
    all_is_sound(&life);
    session_drop(life_wake(&life, "a", NULL));
    session_drop(life_wake(&life, "c", NULL));
    assert_int_equal(snap_retain_expire(life.store, "a", 1, &diag), KV_OK);
    assert_int_equal(snap_retain_expire(life.store, "a", 0, &diag), KV_OK);
    assert_int_equal(give_up(&life, UINT64_MAX, 0).sessions, 0);
    life_close(&life);
}

/* A fork shares its parent's blocks: they are given up once, for both, and both are proven. What is
 * pinned, or tagged, stays. */
static void forks_give_up_together(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    options.bytes_max = 24 << 20;
    options.limited = 1;
    life_open(&options, &life);
    make_asleep(&life, "parent", 1);
    make_asleep(&life, "pinned", 2);
    const struct snap_tree tree = {life.store, kv_alloc_system(), kv_clock_system(), NULL};
    const struct snap_tree_place place = {"parent", NULL};
    assert_int_equal(snap_tree_fork(&tree, &place, "child", &diag), KV_OK);
    assert_int_equal(snap_tree_pin(&tree, "pinned", 1, &diag), KV_OK);
    assert_int_equal(snap_retain_expire(life.store, "pinned", 1, &diag), KV_ERR_BUSY);
    struct session *session = life_wake(&life, "child", NULL);
    life_say(session, 5, 600, 2, NULL);
    life_sleep(&life, session);
    struct snap_retain_sum sum = give_up(&life, UINT64_MAX, 1);
    assert_int_equal(sum.lowered, 6); /* three planes of two lineages */
    assert_int_equal(entry_of(&life, "pinned").dropped, 0);
    assert_true(entry_of(&life, "child").lowered_blocks ==
                entry_of(&life, "child").head.block_count);
    all_is_sound(&life);
    session_drop(life_wake(&life, "parent", &receipt));
    assert_true(receipt.degraded_blocks > 0);
    session_drop(life_wake(&life, "child", &receipt));
    assert_true(receipt.degraded_blocks > 0);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    session_drop(life_wake(&life, "pinned", &receipt));
    assert_int_equal(receipt.degraded_blocks, 0);
    life_close(&life);
}

/* CASE-24: what fails to wake does not count as used: the order of giving up is by saves alone. */
static void a_failed_wake_is_no_use(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct store_extent extent;
    struct kv_diag diag = {""};
    life_begin(dir, &life);
    make_asleep(&life, "old", 1);
    make_asleep(&life, "young", 2);
    struct record_snapshot head = life_head(&life, "old", NULL);
    struct record_key key = record_key_page(head.page_ids[0]);
    life_extent(&life, &key, LAYOUT_PAGE, &extent);
    uint64_t used_ns = entry_of(&life, "old").used_ns;
    uint8_t *bytes = malloc(extent.stored_bytes);
    assert_non_null(bytes);
    life_disk(dir, &extent, bytes, 0);
    bytes[0] ^= 1;
    life_disk(dir, &extent, bytes, 1);
    for (int i = 0; i < 3; i++)
        life_refuse(&life, "old", KV_ERR_CORRUPT, &diag);
    free(bytes);
    assert_int_equal(entry_of(&life, "old").used_ns, used_ns);
    (void)give_up(&life, 0, 1); /* without a budget one thing goes at a time */
    assert_int_equal(entry_of(&life, "old").dropped, 1u << LAYOUT_KL);
    assert_int_equal(entry_of(&life, "young").dropped, 0);
    life_close(&life);
}

static void flip(const char *dir, const struct store_extent *extent) {
    uint8_t *bytes = malloc(extent->stored_bytes);
    assert_non_null(bytes);
    life_disk(dir, extent, bytes, 0);
    bytes[extent->stored_bytes / 2] ^= 0x20;
    life_disk(dir, extent, bytes, 1);
    free(bytes);
}

/* A wake that meets it names the remedy; the remedy keeps the session. */
static void a_bad_refinement_plane_is_given_up(void **state) {
    (void)state;
    static const uint8_t streams[] = {LAYOUT_KL, LAYOUT_VR2, LAYOUT_VR1};
    static const enum layout_tier tops[] = {LAYOUT_K6V4, LAYOUT_K6V3, LAYOUT_K6V2};
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    struct kv_diag diag = {""};
    life_begin(dir, &life);
    make_asleep(&life, "chat", 4);
    make_asleep(&life, "other", 5);
    struct record_snapshot head = life_head(&life, "chat", NULL);
    for (uint32_t i = 0; i < 3; i++) {
        /* The newest blocks are read at the top of the ladder. */
        struct record_key key = record_key_block(head.lineage, head.block_count - 1);
        struct store_extent extent;
        struct snap_lower_found found;
        struct snap_lower_look look = {life.store, kv_alloc_system(), key.bytes, key.size, 0};
        life_extent(&life, &key, streams[i], &extent);
        flip(dir, &extent);
        if (i == 0) {
            life_refuse(&life, "chat", KV_ERR_CORRUPT, &diag);
            assert_non_null(strstr(diag.text, "scrub --keep-lower"));
        }
        assert_int_equal(snap_lower_examine(&look, &found, &diag), KV_OK);
        assert_int_equal(found.bad, 1u << streams[i]);
        assert_int_equal(found.top, tops[i]);
        assert_int_equal(found.kept, 0);
        look.keep = 1;
        assert_int_equal(snap_lower_examine(&look, &found, &diag), KV_OK);
        assert_int_equal(found.kept, 1);
        session_drop(life_wake(&life, "chat", &receipt));
        assert_int_equal(receipt.degraded_blocks, 1);
        assert_int_equal(receipt.fingerprint_floor, 1);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
        all_is_sound(&life);
    }
    /* What the floor needs is not given up. */
    struct record_key key = record_key_block(head.lineage, 0);
    struct store_extent extent;
    struct snap_lower_found found;
    const struct snap_lower_look look = {life.store, kv_alloc_system(), key.bytes, key.size, 1};
    life_extent(&life, &key, LAYOUT_VB, &extent);
    flip(dir, &extent);
    assert_int_equal(snap_lower_examine(&look, &found, &diag), KV_OK);
    assert_int_equal(found.bad, 1u << LAYOUT_VB);
    assert_int_equal(found.drop, 0);
    assert_int_equal(found.kept, 0);
    life_refuse(&life, "chat", KV_ERR_CORRUPT, &diag);
    assert_non_null(strstr(diag.text, "older snapshots"));
    session_drop(life_wake(&life, "other", NULL));
    life_close(&life);
}

TESTING_MAIN(cmocka_unit_test(a_degraded_session_is_proven_at_its_floor),
             cmocka_unit_test(the_order_is_kept),
             cmocka_unit_test(a_full_budget_gives_way_with_permission),
             cmocka_unit_test(other_writers_find_room_as_saves_do),
             cmocka_unit_test(expire_lets_a_whole_session_go),
             cmocka_unit_test(forks_give_up_together), cmocka_unit_test(a_failed_wake_is_no_use),
             cmocka_unit_test(a_bad_refinement_plane_is_given_up))
