/* tests/test_snap_prefix.c - sessions found by how they begin.
 *
 * Responsible for: snapshot/snap_prefix.h over the tiny model: claims at every kind of boundary,
 * owners, restarts, collisions, removed and damaged sessions, tags, memory that runs out.
 * Not responsible for: text and templates (test_prefix.c).
 */
#include "snapshot/snap_prefix.h"

#include "snapshot/snap_retain.h"
#include "snapshot/snap_tree.h"
#include "tests/support_engine.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t alice[IMAGE_OWNER_BYTES] = {1, 2, 3}, bob[IMAGE_OWNER_BYTES] = {9};
static const uint8_t nobody[IMAGE_OWNER_BYTES];
enum { TOKENS_MAX = 2048 };

struct fixture {
    struct life_options options;
    struct life life;
    struct snap_tree tree;
    struct snap_prefix_settings settings;
    struct snap_prefix *prefix;
    char dir[TESTING_PATH_BYTES];
};

static void must(enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK)
        fail_msg("%s: %s", kv_err_name(err), diag->text);
}

static void open_all(struct fixture *f) {
    struct kv_diag diag = {""};
    life_open(&f->options, &f->life);
    f->tree = (struct snap_tree){f->life.store, kv_alloc_system(), kv_clock_system(), NULL};
    f->settings = (struct snap_prefix_settings){
        .store = f->life.store, .alloc = kv_alloc_system(), .hash_mask = UINT64_MAX};
    must(snap_prefix_open(&f->settings, &f->prefix, &diag), &diag);
}

static void begin(struct fixture *f) {
    testing_temp_dir(f->dir);
    f->options = life_default(f->dir);
    open_all(f);
}

static void end(struct fixture *f) {
    snap_prefix_close(f->prefix);
    life_close(&f->life);
}

static void note(struct fixture *f, const char *name) {
    struct kv_diag diag = {""};
    must(snap_prefix_note(f->prefix, name, &diag), &diag);
}

/* A stored session of exactly these tokens, all with KV. */
static void store(struct fixture *f, const char *name, const uint8_t *owner, const uint32_t *ids,
                  uint32_t count) {
    struct session *session = life_session(&f->life, name, IMAGE_RECIPE_V3);
    memcpy(transfer_durable(session)->owner, owner, IMAGE_OWNER_BYTES);
    support_engine_feed(session, ids, count);
    life_sleep(&f->life, session);
    note(f, name);
}

static uint32_t find(struct fixture *f, const uint8_t *owner, const uint32_t *ids, uint64_t count,
                     struct snap_prefix_found *found) {
    const struct snap_prefix_wish wish = {.owner = owner, .ids = ids, .count = count};
    return snap_prefix_find(f->prefix, &wish, found);
}

/* What a session of `n` tokens claims for a wish that agrees with its first `agree` tokens: exact
 * where the ids are at hand, else to the block before. */
static uint64_t expected_claim(uint64_t n, uint64_t agree) {
    uint64_t behind = 64 + 256 * layout_sealed_blocks(n);
    if (n < 64)
        return agree;
    if (agree < 64)
        return 0;
    return agree >= behind ? agree : 64 + (agree - 64) / 256 * 256;
}

static const uint32_t lengths[] = {10,  63,  64,  65,  319, 320, 321,
                                   575, 576, 577, 831, 832, 833, 1100};
enum { LENGTHS = sizeof lengths / sizeof lengths[0] };

static void claims_are_right(struct fixture *f, const uint8_t *owner, const uint32_t *ids,
                             uint32_t n) {
    uint32_t wish[TOKENS_MAX];
    for (uint32_t agree = 1; agree <= n; agree++) {
        struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
        int near = agree <= 2 || agree >= n - 2 || (agree + 2) % 64 <= 4;
        if (!near)
            continue;
        memcpy(wish, ids, (n + 20) * sizeof *wish);
        if (agree < n)
            wish[agree] ^= 1;
        uint64_t expected = expected_claim(n, agree);
        uint32_t count = find(f, owner, wish, n + 20, found);
        if (count != (expected > 0) || (count == 1 && found[0].claim != expected))
            fail_msg("%u tokens, %u agree: %u found, claim %llu, expected %llu", n, agree, count,
                     count != 0 ? (unsigned long long)found[0].claim : 0ULL,
                     (unsigned long long)expected);
        /* A wish that ends there, and not one token more. */
        count = find(f, owner, ids, agree, found);
        if (count == 1 && found[0].claim > agree)
            fail_msg("%u tokens: a wish of %u is claimed to %llu", n, agree,
                     (unsigned long long)found[0].claim);
    }
}

/* Every length and every place of the first difference at and beside a boundary, asleep, and again
 * when the table is made from the store, with and without its index. */
static void claims_hold_at_every_boundary(void **state) {
    (void)state;
    static uint32_t ids[LENGTHS][TOKENS_MAX];
    uint8_t owner[IMAGE_OWNER_BYTES] = {0};
    for (int restart = 0; restart < 3; restart++) {
        struct fixture f;
        begin(&f);
        for (uint32_t i = 0; i < LENGTHS; i++) {
            char name[32];
            snprintf(name, sizeof name, "of %u", lengths[i]);
            support_engine_ids(testing_seed("ids", 100 + i), 256, ids[i], TOKENS_MAX);
            owner[0] = (uint8_t)(i + 1);
            store(&f, name, owner, ids[i], lengths[i]);
        }
        if (restart != 0) {
            end(&f);
            if (restart == 2)
                support_store_remove_index(f.dir);
            open_all(&f);
        }
        for (uint32_t i = 0; i < LENGTHS; i++) {
            owner[0] = (uint8_t)(i + 1);
            claims_are_right(&f, owner, ids[i], lengths[i]);
        }
        end(&f);
    }
}

/* The same beginning of several: the largest claim first, then what ends there, then the newest. */
static void the_best_comes_first(void **state) {
    (void)state;
    struct fixture f;
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    uint32_t ids[TOKENS_MAX];
    begin(&f);
    support_engine_ids(5, 256, ids, TOKENS_MAX);
    store(&f, "long", alice, ids, 1500);
    store(&f, "short", alice, ids, 700);
    store(&f, "middle", alice, ids, 1000);
    ids[1200] ^= 1;
    store(&f, "other", alice, ids, 1400);
    assert_int_equal(find(&f, alice, ids, 1450, found), 3); /* the short one could not be better */
    assert_string_equal(found[0].name, "other");
    assert_int_equal(found[0].claim, 1400);
    assert_string_equal(found[1].name, "long"); /* the difference is behind its last block */
    assert_int_equal(found[1].claim, 1200);
    assert_string_equal(found[2].name, "middle");
    assert_int_equal(found[2].claim, 1000);
    /* Blocks 0 to 2 end at 832: claims of those with more of them end there. */
    assert_int_equal(find(&f, alice, ids, 1000, found), 4);
    assert_string_equal(found[0].name, "middle");
    assert_int_equal(found[0].claim, found[0].n);
    for (int i = 0; i < 12; i++) {
        char name[32];
        const struct snap_tree_place place = {"middle", NULL};
        struct kv_diag diag = {""};
        snprintf(name, sizeof name, "fork %d", i);
        must(snap_tree_fork(&f.tree, &place, name, &diag), &diag);
        note(&f, name);
    }
    assert_int_equal(find(&f, alice, ids, 1001, found), SNAP_PREFIX_FOUND_MAX);
    assert_string_equal(found[0].name, "fork 11");
    for (int i = 0; i < SNAP_PREFIX_FOUND_MAX; i++)
        assert_int_equal(found[i].claim, 1000);
    end(&f);
}

/* Two owners with the same text: each finds his own, and looks at nothing else however much there
 * is. BREAK_FOREIGN_PREFIX has one table for all. */
static void owners_do_not_meet(void **state) {
    (void)state;
    struct fixture f;
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    struct snap_prefix_counts before, after, other;
    uint32_t ids[TOKENS_MAX];
    struct kv_diag diag = {""};
    begin(&f);
    support_engine_ids(6, 256, ids, TOKENS_MAX);
    store(&f, "hers", alice, ids, 900);
    store(&f, "her hello", alice, ids, 20);
    assert_int_equal(find(&f, bob, ids, 1000, found), 0);
    assert_int_equal(find(&f, nobody, ids, 1000, found), 0);
    snap_prefix_counts(f.prefix, alice, &before);
    assert_int_equal(before.entries, 2);
    assert_int_equal(before.looked_at, 0);
    assert_int_equal(find(&f, alice, ids, 1000, found), 2);
    snap_prefix_counts(f.prefix, alice, &after);
    uint64_t alone = after.looked_at;
    assert_int_not_equal(alone, 0);
    store(&f, "his", bob, ids, 900);
    store(&f, "the operator's", nobody, ids, 900);
    for (int i = 0; i < 50; i++) {
        char name[32];
        const struct snap_tree_place place = {"his", NULL};
        snprintf(name, sizeof name, "his %d", i);
        must(snap_tree_fork(&f.tree, &place, name, &diag), &diag);
        note(&f, name);
    }
    snap_prefix_counts(f.prefix, bob, &other);
    assert_int_equal(other.entries, 51);
    assert_int_equal(find(&f, alice, ids, 1000, found), 2);
    assert_string_equal(found[0].name, "hers");
    snap_prefix_counts(f.prefix, alice, &after);
    assert_int_equal(after.looked_at, 2 * alone);
    snap_prefix_counts(f.prefix, bob, &after);
    assert_int_equal(after.looked_at, other.looked_at);
    assert_int_equal(find(&f, bob, ids, 1000, found), SNAP_PREFIX_FOUND_MAX);
    assert_memory_equal(found[0].name, "his", 3);
    assert_int_equal(find(&f, nobody, ids, 1000, found), 1);
    assert_string_equal(found[0].name, "the operator's");
    assert_int_not_equal(snap_prefix_hash(alice, ids, 256), snap_prefix_hash(bob, ids, 256));
    end(&f);
}

static void gone(struct fixture *f, const uint32_t *ids, uint64_t count) {
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    assert_int_equal(find(f, alice, ids, count, found), 0);
}

/* Saves, removals, renames and tags, told by name and found by looking through all. */
static void the_table_follows_the_store(void **state) {
    (void)state;
    struct fixture f;
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    struct snap_prefix_ids read;
    struct kv_diag diag = {""};
    uint32_t ids[TOKENS_MAX];
    begin(&f);
    support_engine_ids(7, 256, ids, TOKENS_MAX);
    store(&f, "chat", alice, ids, 700);
    must(snap_tree_rename(&f.tree, "chat", "talk", &diag), &diag);
    must(snap_prefix_refresh(f.prefix, &diag), &diag);
    assert_int_equal(find(&f, alice, ids, 800, found), 1);
    assert_string_equal(found[0].name, "talk");
    must(snap_prefix_read(f.prefix, &found[0], &read, &diag), &diag);
    assert_int_equal(read.n, 700);
    assert_memory_equal(read.ids, ids, 700 * sizeof *ids);
    snap_prefix_ids_release(f.prefix, &read);
    /* A tag stays an entry of its own when the head goes elsewhere. */
    struct session *session = life_wake(&f.life, "talk", NULL);
    const struct snapshot_options tagged = {.tag = "here"};
    struct receipt receipt;
    must(snapshot_save(f.life.snapshot, session, &tagged, &receipt, &diag), &diag);
    must(snapshot_rewind(f.life.snapshot, session, 660, &diag), &diag);
    support_engine_run(f.life.engine);
    ids[660] ^= 1;
    support_engine_feed(session, ids + 660, 100);
    life_sleep(&f.life, session);
    must(snap_prefix_refresh(f.prefix, &diag), &diag);
    assert_int_equal(find(&f, alice, ids, 800, found), 2);
    assert_int_equal(found[0].claim, 760);
    assert_int_equal(found[0].is_head, 1);
    assert_int_equal(found[1].claim, 660);
    ids[660] ^= 1;
    assert_int_equal(find(&f, alice, ids, 800, found), 2);
    assert_int_equal(found[0].claim, 700);
    assert_int_equal(found[0].is_head, 0);
    must(snap_prefix_read(f.prefix, &found[0], &read, &diag), &diag);
    assert_memory_equal(read.ids, ids, 700 * sizeof *ids);
    snap_prefix_ids_release(f.prefix, &read);
    const struct snap_prefix_found stale = found[0];
    must(snapshot_remove(f.life.store, kv_alloc_system(), "talk", &diag), &diag);
    assert_int_equal(snap_prefix_read(f.prefix, &stale, &read, &diag), KV_ERR_NOT_FOUND);
    must(snap_prefix_refresh(f.prefix, &diag), &diag);
    gone(&f, ids, 800);
    struct snap_prefix_counts counts;
    snap_prefix_counts(f.prefix, alice, &counts);
    assert_int_equal(counts.entries, 0);
    assert_int_equal(counts.bytes, 0);
    end(&f);
}

/* All hashes are equal: what is claimed is then wrong, and the ids say so. */
static void colliding_hashes_are_only_hints(void **state) {
    (void)state;
    struct fixture f;
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    struct snap_prefix_ids read;
    struct kv_diag diag = {""};
    uint32_t mine[TOKENS_MAX], other[TOKENS_MAX];
    begin(&f);
    support_engine_ids(8, 256, mine, TOKENS_MAX);
    support_engine_ids(9, 256, other, TOKENS_MAX);
    store(&f, "other", alice, other, 900);
    gone(&f, mine, 1000);
    snap_prefix_close(f.prefix);
    f.settings.hash_mask = 0;
    must(snap_prefix_open(&f.settings, &f.prefix, &diag), &diag);
    assert_int_equal(find(&f, alice, mine, 1000, found), 1);
    assert_true(found[0].claim >= 64 + 256);
    must(snap_prefix_read(f.prefix, &found[0], &read, &diag), &diag);
    assert_memory_equal(read.ids, other, 900 * sizeof *other);
    snap_prefix_ids_release(f.prefix, &read);
    store(&f, "mine", alice, mine, 900);
    assert_int_equal(find(&f, alice, mine, 1000, found), 2);
    assert_string_equal(found[0].name, "mine");
    assert_int_equal(find(&f, bob, mine, 1000, found), 0);
    must(snapshot_remove(f.life.store, kv_alloc_system(), "mine", &diag), &diag);
    note(&f, "mine");
    assert_int_equal(find(&f, alice, mine, 1000, found), 1);
    end(&f);
}

static uint32_t one_mark(void *context, const struct snap_prefix_text *text,
                         uint64_t marks_out[SNAP_PREFIX_MARKS_MAX]) {
    (void)context;
    assert_true(text->first == 0 || text->first % 256 == 64);
    marks_out[0] = snap_prefix_hash(text->owner, &text->ids[text->n - 1 - text->first], 4);
    return 1;
}

/* Marks find what the ids do not. */
static void marks_find_other_ids(void **state) {
    (void)state;
    struct fixture f;
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    struct kv_diag diag = {""};
    uint32_t ids[TOKENS_MAX];
    begin(&f);
    snap_prefix_close(f.prefix);
    f.settings.marks = one_mark;
    must(snap_prefix_open(&f.settings, &f.prefix, &diag), &diag);
    support_engine_ids(10, 256, ids, TOKENS_MAX);
    store(&f, "short", alice, ids, 30);
    store(&f, "long", alice, ids, 800);
    uint32_t none[100] = {0};
    for (int i = 0; i < 2; i++) {
        const struct snap_prefix_mark mark = {snap_prefix_hash(alice, &ids[i == 0 ? 29 : 799], 4),
                                              90};
        const struct snap_prefix_wish wish = {
            .owner = alice, .ids = none, .count = 100, .marks = &mark, .mark_count = 1};
        assert_int_equal(snap_prefix_find(f.prefix, &wish, found), 1);
        assert_string_equal(found[0].name, i == 0 ? "short" : "long");
        assert_int_equal(found[0].claim, 90);
    }
    end(&f);
}

/* A session of another model is no candidate, one whose image is damaged neither. */
static void what_cannot_be_woken_is_not_found(void **state) {
    (void)state;
    struct fixture f;
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    struct kv_diag diag = {""};
    struct engine_model model;
    struct store_extent extent;
    uint32_t ids[TOKENS_MAX];
    begin(&f);
    support_engine_ids(11, 256, ids, TOKENS_MAX);
    store(&f, "chat", alice, ids, 700);
    engine_model(f.life.engine, &model);
    f.settings.model = &model.identity;
    snap_prefix_close(f.prefix);
    must(snap_prefix_open(&f.settings, &f.prefix, &diag), &diag);
    assert_int_equal(find(&f, alice, ids, 800, found), 1);
    model.identity.tensors.bytes[0] ^= 1;
    note(&f, "chat");
    gone(&f, ids, 800);
    model.identity.tensors.bytes[0] ^= 1;
    note(&f, "chat");
    assert_int_equal(find(&f, alice, ids, 800, found), 1);
    struct record_key key = record_key_snapshot(found[0].snapshot);
    life_extent(&f.life, &key, RECORD_KIND_IMAGE, &extent);
    uint8_t page[4096];
    extent.stored_bytes = extent.stored_bytes < sizeof page ? extent.stored_bytes : sizeof page;
    life_disk(f.dir, &extent, page, 0);
    page[9] ^= 4;
    life_disk(f.dir, &extent, page, 1);
    note(&f, "chat");
    gone(&f, ids, 800);
    end(&f);
}

static void memory_may_run_out(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    uint32_t ids[TOKENS_MAX];
    begin(&f);
    support_engine_ids(12, 256, ids, TOKENS_MAX);
    store(&f, "chat", alice, ids, 700);
    store(&f, "hello", bob, ids, 30);
    struct snap_prefix_settings settings = f.settings;
    uint64_t failed = 0;
    for (uint64_t k = 1;; k++) {
        struct testing_alloc memory;
        struct snap_prefix *prefix = NULL;
        testing_alloc_init(&memory, k);
        settings.alloc = &memory.alloc;
        enum kv_err err = snap_prefix_open(&settings, &prefix, &diag);
        int was_refused = memory.failed_count != 0;
        snap_prefix_close(prefix);
        assert_int_equal(memory.live_count, 0);
        if (!was_refused) {
            assert_int_equal(err, KV_OK);
            break;
        }
        assert_int_equal(err, KV_ERR_NOMEM);
        failed++;
    }
    printf("%llu allocations failed in turn\n", (unsigned long long)failed);
    assert_true(failed > 10);
    end(&f);
}

/* --- others while the disk is read */

struct overtaken {
    struct fixture *f;
    int aways, backs;
};

static void on_away(void *context) {
    ((struct overtaken *)context)->aways++;
}

/* What was read first comes back last: the session has gone meanwhile. */
static void on_back(void *context) {
    struct overtaken *overtaken = context;
    struct fixture *f = overtaken->f;
    struct kv_diag diag = {""};
    if (++overtaken->backs > 1)
        return;
    must(snapshot_remove(f->life.store, kv_alloc_system(), "gone", &diag), &diag);
    note(f, "gone");
    note(f, "stays");
}

/* BREAK_STALE_NOTE lets the one that began first have the last word. */
static void who_reads_last_is_right(void **state) {
    (void)state;
    struct fixture f;
    struct overtaken overtaken = {.f = &f};
    struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
    struct snap_prefix_ids read;
    struct kv_diag diag = {""};
    uint32_t ids[TOKENS_MAX];
    begin(&f);
    support_engine_ids(6, 256, ids, TOKENS_MAX);
    store(&f, "gone", alice, ids, 400);
    store(&f, "stays", alice, ids, 400);
    snap_prefix_close(f.prefix);
    f.settings.away = on_away;
    f.settings.back = on_back;
    f.settings.context = &overtaken;
    overtaken.backs = 1; /* not yet */
    must(snap_prefix_open(&f.settings, &f.prefix, &diag), &diag);
    assert_int_equal(find(&f, alice, ids, 410, found), 2);
    assert_int_equal(overtaken.aways, 2);
    overtaken.backs = 0;
    note(&f, "gone");
    assert_int_equal(overtaken.backs, 3);
    assert_int_equal(find(&f, alice, ids, 410, found), 1);
    assert_string_equal(found[0].name, "stays");
    must(snap_prefix_read(f.prefix, &found[0], &read, &diag), &diag);
    assert_int_equal(read.n, 400);
    snap_prefix_ids_release(f.prefix, &read);
    assert_int_equal(overtaken.backs, 4);
    assert_int_equal(overtaken.aways, 6);
    end(&f);
}

TESTING_MAIN(cmocka_unit_test(claims_hold_at_every_boundary),
             cmocka_unit_test(who_reads_last_is_right), cmocka_unit_test(the_best_comes_first),
             cmocka_unit_test(owners_do_not_meet), cmocka_unit_test(the_table_follows_the_store),
             cmocka_unit_test(colliding_hashes_are_only_hints),
             cmocka_unit_test(marks_find_other_ids),
             cmocka_unit_test(what_cannot_be_woken_is_not_found),
             cmocka_unit_test(memory_may_run_out))
