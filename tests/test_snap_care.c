/* tests/test_snap_care.c - stored sessions checked, cleaned and named.
 *
 * Responsible for: unused records go and used ones stay, nothing goes while a session cannot be
 * followed, every kind of disagreement is found and named, repair writes counts right, a bad extent
 * names every session that uses it, gc beside restores.
 * Not responsible for: segments (test_store_gc.c, test_store_fsck.c).
 * Broken twins: BREAK_COLLECT_DAMAGED, BREAK_SCRUB_MARK.
 */
#include "snapshot/snap_care.h"

#include "store/store_batch.h"
#include "store/store_gc.h"
#include "store/store_scrub.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct found {
    char text[4096];
    unsigned damage, notes;
};

static void on_finding(void *context, const struct snap_care_finding *finding) {
    struct found *found = context;
    size_t used = strlen(found->text);
    found->damage += !finding->is_note;
    found->notes += finding->is_note != 0;
    snprintf(found->text + used, sizeof found->text - used, "%s|%s|%s\n", finding->kind,
             finding->session, finding->text);
}

static struct found check(struct life *life, int repair) {
    static struct found found;
    struct snap_care_report report;
    struct kv_diag diag = {""};
    memset(&found, 0, sizeof found);
    const struct snap_care_check_args args = {life->store, kv_alloc_system(), NULL,
                                              repair,      on_finding,        &found};
    if (snap_care_check(&args, &report, &diag) != KV_OK)
        fail_msg("check: %s", diag.text);
    return found;
}

static struct snap_care_report collect(struct life *life, int dry_run) {
    struct snap_care_report report;
    struct kv_diag diag = {""};
    const struct snap_care_collect_args args = {
        .store = life->store, .alloc = kv_alloc_system(), .dry_run = dry_run};
    if (snap_care_collect(&args, &report, &diag) != KV_OK)
        fail_msg("collect: %s", diag.text);
    return report;
}

/* Two sessions asleep, one of them with an explicit snapshot that shares pages with its head. */
static void make_sessions(struct life *life) {
    struct life_turn turn;
    struct session *session = life_session(life, "first", IMAGE_RECIPE_V3);
    life_say(session, 11, 700, 8, &turn);
    life_save(life, session, 1);
    life_say(session, 12, 20, 4, &turn);
    life_sleep(life, session);
    session = life_session(life, "second", IMAGE_RECIPE_BF16);
    life_say(session, 21, 600, 8, &turn);
    life_sleep(life, session);
}

static void wake_both(struct life *life) {
    struct receipt receipt;
    session_drop(life_wake(life, "first", &receipt));
    session_drop(life_wake(life, "second", &receipt));
}

static void put_bare(struct life *life, const struct record_key *key) {
    struct store_batch *batch = NULL;
    const uint8_t value[4] = {1, 2, 3, 4};
    const struct store_put put = {key->bytes, key->size, value, sizeof value, NULL, 0};
    assert_int_equal(store_batch_begin(life->store, 0, &batch, NULL), KV_OK);
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

static void unused_records_go(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    life_begin(dir, &life);
    make_sessions(&life);
    struct snap_care_report report = collect(&life, 0);
    assert_int_equal(report.sessions, 2);
    assert_int_equal(report.snapshots, 3);
    assert_int_equal(
        report.dead_pages + report.dead_blocks + report.dead_snapshots + report.dead_lineages, 0);
    assert_int_equal(check(&life, 0).damage, 0);
    assert_string_equal(check(&life, 0).text, "");
    uint64_t snapshot = 0;
    struct record_snapshot head = life_head(&life, "first", &snapshot);
    /* What no session uses: a page, a block beyond the count, a block and a lineage of nobody. */
    struct record_key page = record_key_page(77);
    struct record_key beyond = record_key_block(head.lineage, head.block_count);
    struct record_key stray = record_key_block(99, 0);
    struct record_key lineage = record_key_lineage(99);
    struct record_key lost = record_key_snapshot(55);
    put_bare(&life, &page);
    put_bare(&life, &beyond);
    put_bare(&life, &stray);
    put_bare(&life, &lineage);
    put_bare(&life, &lost);
    struct found found = check(&life, 0);
    assert_int_equal(found.damage, 0);
    assert_non_null(strstr(found.text, "unused||1 snapshots, 1 pages, 2 blocks, 1 lineages"));
    report = collect(&life, 1);
    assert_int_equal(report.dead_blocks, 2);
    assert_int_equal(check(&life, 0).notes, 1); /* a dry run deleted nothing */
    report = collect(&life, 0);
    assert_int_equal(report.dead_pages, 1);
    assert_int_equal(report.dead_blocks, 2);
    assert_int_equal(report.dead_lineages, 1);
    assert_int_equal(report.dead_snapshots, 1);
    assert_string_equal(check(&life, 0).text, "");
    wake_both(&life);
    life_close(&life);
}

static uint32_t wrong_page(void *context, struct store_record *record) {
    struct record_page page;
    (void)context;
    assert_int_equal(record_get_page(record->value, record->value_bytes, &page, NULL), KV_OK);
    page.references = 9;
    record_put_page(&page, record->value);
    return ~0u;
}

static uint32_t wrong_lineage(void *context, struct store_record *record) {
    struct record_lineage lineage;
    (void)context;
    assert_int_equal(record_get_lineage(record->value, record->value_bytes, &lineage, NULL), KV_OK);
    lineage.snapshot_count = 5;
    record_put_lineage(&lineage, record->value);
    return ~0u;
}

static void wrong_counts_are_mended(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    life_begin(dir, &life);
    make_sessions(&life);
    uint64_t snapshot = 0;
    struct record_snapshot head = life_head(&life, "second", &snapshot);
    struct record_key key = record_key_page(head.page_ids[0]);
    life_rewrite(&life, &key, wrong_page, NULL);
    key = record_key_lineage(head.lineage);
    life_rewrite(&life, &key, wrong_lineage, NULL);
    struct found found = check(&life, 0);
    assert_int_equal(found.damage, 0);
    assert_non_null(strstr(found.text, "page-count|second|page at position"));
    assert_non_null(strstr(found.text, "counted 9 times, used 1 times"));
    assert_non_null(strstr(found.text, "lineage-count|second|its lineage counts 5 snapshots"));
    assert_int_equal(check(&life, 1).notes, 2);
    assert_string_equal(check(&life, 0).text, "");
    wake_both(&life);
    life_close(&life);
}

/* A missing snapshot record: named, and nothing may be deleted, whatever looks unused.
 * Fails with BREAK_COLLECT_DAMAGED. */
static void damage_stops_deleting(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    life_begin(dir, &life);
    make_sessions(&life);
    uint64_t snapshot = 0;
    struct store_stats before;
    struct store_stats after;
    struct record_snapshot head = life_head(&life, "second", &snapshot);
    struct record_key key = record_key_snapshot(snapshot);
    life_delete(&life, &key);
    store_stats_get(life.store, &before);
    struct found found = check(&life, 1);
    assert_true(found.damage >= 1);
    assert_non_null(strstr(found.text, "snapshot|second|"));
    struct snap_care_report report = collect(&life, 0);
    assert_non_null(strstr(report.trouble, "second"));
    store_stats_get(life.store, &after);
    assert_int_equal(before.records, after.records);
    /* The other session is whole, and a missing block or page of it is named. */
    session_drop(life_wake(&life, "first", &receipt));
    head = life_head(&life, "first", &snapshot);
    key = record_key_block(head.lineage, 0);
    life_delete(&life, &key);
    key = record_key_page(head.page_ids[0]);
    life_delete(&life, &key);
    found = check(&life, 0);
    assert_non_null(strstr(found.text, "block|first|block 0 of"));
    assert_non_null(strstr(found.text, "page|first|page is missing"));
    life_close(&life);
}

struct bad {
    struct snap_care_owners *owners;
    char sessions[256], text[256];
    unsigned count;
};

static void on_owner(void *context, const char *session) {
    struct bad *bad = context;
    size_t used = strlen(bad->sessions);
    snprintf(bad->sessions + used, sizeof bad->sessions - used, "%s,", session);
}

static void on_bad(void *context, const struct store_fsck_finding *finding) {
    struct bad *bad = context;
    bad->count++;
    snprintf(bad->text, sizeof bad->text, "%s", finding->text);
    snap_care_owners_of(bad->owners, finding->key, finding->key_bytes, on_owner, bad);
}

/* A copy of "second" under another name shares its blocks and pages, as a fork will. */
static void share(struct life *life, const char *name) {
    struct record_snapshot head;
    struct record_name entry;
    struct store_record stored;
    struct store_batch *batch = NULL;
    uint8_t value[RECORD_OUT_BYTES];
    uint64_t snapshot = 0;
    head = life_head(life, "second", &snapshot);
    struct record_key key = record_key_name("second");
    assert_int_equal(store_get(life->store, key.bytes, key.size, &stored, NULL), KV_OK);
    assert_int_equal(record_get_name(stored.value, stored.value_bytes, &entry, NULL), KV_OK);
    store_record_release(life->store, &stored);
    snprintf(head.name, sizeof head.name, "%s", name);
    entry.snapshot = 4242;
    assert_int_equal(store_batch_begin(life->store, 0, &batch, NULL), KV_OK);
    key = record_key_snapshot(4242);
    struct store_put put = {key.bytes, key.size, value, record_put_snapshot(&head, value), NULL, 0};
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    struct record_key name_key = record_key_name(name);
    put = (struct store_put){
        name_key.bytes, name_key.size, value, record_put_name(&entry, value), NULL, 0};
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

static void scrub_names_every_session(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    life_begin(dir, &life);
    make_sessions(&life);
    share(&life, "third");
    uint64_t snapshot = 0;
    struct bad bad = {.count = 0};
    struct store_scrub_report report;
    struct record_snapshot head = life_head(&life, "second", &snapshot);
    const struct store_scrub_args args = {.store = life.store, .bad = on_bad, .context = &bad};
    assert_int_equal(snap_care_owners_make(life.store, kv_alloc_system(), &bad.owners, NULL),
                     KV_OK);
    assert_int_equal(store_scrub(&args, &report, NULL), KV_OK);
    assert_int_equal(report.bad, 0);
    assert_true(report.finished && report.records > 8);
    for (unsigned kind = 0; kind < 2; kind++) {
        struct store_extent extent;
        uint8_t page[4096];
        struct record_key key =
            kind == 0 ? record_key_page(head.page_ids[0]) : record_key_block(head.lineage, 0);
        life_extent(&life, &key, kind == 0 ? 9 : LAYOUT_BF16, &extent);
        extent.stored_bytes = extent.raw_bytes = sizeof page;
        life_disk(dir, &extent, page, 0);
        page[17] ^= 32;
        life_disk(dir, &extent, page, 1);
        memset(bad.sessions, 0, sizeof bad.sessions);
        bad.count = 0;
        assert_int_equal(store_scrub(&args, &report, NULL), KV_OK);
        assert_int_equal(bad.count, 1);
        assert_string_equal(bad.sessions, "second,third,");
        assert_non_null(strstr(bad.text, " of kind "));
        page[17] ^= 32;
        life_disk(dir, &extent, page, 1);
    }
    snap_care_owners_drop(bad.owners);
    life_close(&life);
}

/* Stops in the middle, goes on there, and a finished pass begins the next. */
static int stop_after(void *context, uint64_t ns) {
    unsigned *left = context;
    (void)ns;
    return *left != 0 && --*left == 0;
}

static void never_bad(void *context, const struct store_fsck_finding *finding) {
    (void)context;
    fail_msg("bad: %s", finding->text);
}

/* Fails with BREAK_SCRUB_MARK. */
static void scrub_goes_on(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    life_open(&options, &life);
    make_sessions(&life);
    unsigned left = 0;
    struct store_scrub_report whole;
    struct store_scrub_report part;
    struct store_scrub_args args = {
        .store = life.store, .pause = stop_after, .bad = never_bad, .context = &left};
    assert_int_equal(store_scrub(&args, &whole, NULL), KV_OK);
    assert_int_equal(whole.pass, 1);
    assert_true(whole.finished && whole.last_end_ns != 0);
    uint64_t records = 0;
    uint64_t bytes = 0;
    for (unsigned run = 0;; run++) {
        left = 3;
        args.store = life.store;
        assert_int_equal(store_scrub(&args, &part, NULL), KV_OK);
        assert_int_equal(part.pass, 2);
        assert_int_equal(part.resumed, run != 0);
        records += part.records;
        bytes = part.pass_bytes;
        if (part.finished)
            break;
        assert_int_equal(part.records, 3);
        life_close(&life); /* the mark outlives the process */
        life_open(&options, &life);
    }
    assert_int_equal(records, whole.records);
    assert_int_equal(bytes, whole.pass_bytes);
    assert_true(whole.read_bytes > whole.pass_bytes); /* batch records were read behind them */
    life_close(&life);
}

/* CASE-27: large and small restores by turns while the segments under them are emptied. */
static void restores_beside_gc(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct life_turn turn;
    struct receipt receipt;
    unsigned removed = 0;
    life_begin(dir, &life);
    make_sessions(&life);
    struct session *session = life_wake(&life, "first", &receipt);
    struct kv_digest large = life_resident(session);
    session_drop(session);
    session = life_wake(&life, "second", &receipt);
    struct kv_digest small = life_resident(session);
    session_drop(session);
    for (unsigned round = 0; round < 24; round++) {
        struct store_gc_options usual = store_gc_options_usual();
        struct store_gc_report report;
        usual.live_percent = 100;
        session = life_session(&life, "noise", IMAGE_RECIPE_V3);
        life_say(session, round + 1, 900, 2, &turn);
        life_sleep(&life, session);
        assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "noise", NULL), KV_OK);
        assert_int_equal(store_gc(life.store, &usual, &report, NULL), KV_OK);
        assert_int_equal(report.held, 0);
        removed += report.removed;
        session = life_wake(&life, "first", &receipt);
        struct kv_digest now = life_resident(session);
        assert_memory_equal(&now, &large, sizeof now);
        session_drop(session);
        session = life_wake(&life, "second", &receipt);
        now = life_resident(session);
        assert_memory_equal(&now, &small, sizeof now);
        session_drop(session);
    }
    print_message("%u segments removed beside 48 restores\n", removed);
    assert_true(removed > 2);
    assert_string_equal(check(&life, 0).text, "");
    life_close(&life);
}

static int collect_and_move(const char *dir, const struct faulty_io_plan *plan) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct faulty_io *faulty = faulty_io_make(io_posix_door());
        struct store_options options = store_options_usual(dir, "test");
        struct store_gc_options usual = store_gc_options_usual();
        struct snap_care_report records;
        struct store_gc_report space;
        struct store *store = NULL;
        options.segment_bytes = 4 << 20;
        options.door = faulty_io_door(faulty);
        if (store_open(&options, &store, NULL) != KV_OK)
            _exit(1);
        faulty_io_arm(faulty, plan);
        usual.live_percent = 100;
        const struct snap_care_collect_args args = {.store = store, .alloc = kv_alloc_system()};
        if (snap_care_collect(&args, &records, NULL) != KV_OK ||
            store_gc(store, &usual, &space, NULL) != KV_OK || space.removed == 0)
            _exit(2);
        faulty_io_cut_power(faulty);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* The power fails at every change of a gc: every session wakes bit-equal, removed ones stay away,
 * and a rebuilt index says the same. */
static void power_cuts_in_gc(void **state) {
    (void)state;
    char base[TESTING_PATH_BYTES];
    struct life life;
    struct receipt receipt;
    testing_ram_dir(base);
    struct life_options options = life_default(base);
    life_open(&options, &life);
    struct session *session = life_session(&life, "noise", IMAGE_RECIPE_V3);
    life_say(session, 77, 1500, 2, NULL);
    life_sleep(&life, session);
    make_sessions(&life);
    for (unsigned i = 0; i < 6; i++) {
        session = life_session(&life, "more", IMAGE_RECIPE_V3);
        life_say(session, 80 + i, 1500, 2, NULL);
        life_sleep(&life, session);
        assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "more", NULL), KV_OK);
    }
    assert_int_equal(snapshot_remove(life.store, kv_alloc_system(), "noise", NULL), KV_OK);
    session = life_wake(&life, "first", &receipt);
    struct kv_digest first = life_resident(session);
    session_drop(session);
    session = life_wake(&life, "second", &receipt);
    struct kv_digest second = life_resident(session);
    life_close(&life);
    unsigned cuts = 0;
    for (int done = 0; !done; cuts++) {
        char dir[TESTING_PATH_BYTES];
        testing_ram_dir(dir);
        support_store_copy(base, dir);
        const struct faulty_io_plan plan = {.action = FAULTY_IO_DIE,
                                            .ops = FAULTY_IO_CHANGES,
                                            .at = cuts + 1,
                                            .power_cut = 1,
                                            .seed = cuts * 31 + 3};
        int status = collect_and_move(dir, &plan);
        assert_true(status == 0 || status == FAULTY_IO_EXIT_STATUS);
        done = status == 0;
        if (cuts % 2 == 1)
            support_store_remove_index(dir);
        options.dir = dir;
        life_open(&options, &life);
        session = life_wake(&life, "first", &receipt);
        struct kv_digest now = life_resident(session);
        assert_memory_equal(&now, &first, sizeof now);
        session = life_wake(&life, "second", &receipt);
        now = life_resident(session);
        assert_memory_equal(&now, &second, sizeof now);
        struct snapshot_entry entry;
        assert_int_equal(snapshot_find(life.store, kv_alloc_system(), "noise", &entry, NULL),
                         KV_ERR_NOT_FOUND);
        assert_int_equal(check(&life, 0).damage, 0);
        life_close(&life);
    }
    print_message("%u power cuts in gc: every session woke\n", cuts - 1);
    assert_true(cuts > 5);
}

TESTING_MAIN(cmocka_unit_test(unused_records_go), cmocka_unit_test(wrong_counts_are_mended),
             cmocka_unit_test(damage_stops_deleting), cmocka_unit_test(scrub_names_every_session),
             cmocka_unit_test(scrub_goes_on), cmocka_unit_test(restores_beside_gc),
             cmocka_unit_test(power_cuts_in_gc))
