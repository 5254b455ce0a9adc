/* tests/test_tree.c - forks, tags, going back, names: what lives, what it answers, what it costs.
 *
 * Responsible for: snapshot/snap_tree.h, snapshot_rewind and what removal leaves, over the tiny
 * model: shared blocks and pages, bits of woken forks, records and bytes afterwards.
 * Not responsible for: random orders of these (branches.c), what the disk holds (test_usage.c), the
 * commands (test_cli_tree.c).
 */
#include "snapshot/snap_gc.h"
#include "tests/support_tree.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

static void save_tag(struct tree_life *f, struct session *session, const char *tag) {
    const struct snapshot_options options = {.tag = tag};
    struct receipt receipt;
    struct kv_diag diag = {""};
    if (snapshot_save(f->life.snapshot, session, &options, &receipt, &diag) != KV_OK)
        fail_msg("snapshot_save: %s", diag.text);
}

static void rewind_to(struct tree_life *f, struct session *session, uint64_t n) {
    struct kv_diag diag = {""};
    if (snapshot_rewind(f->life.snapshot, session, n, &diag) != KV_OK)
        fail_msg("snapshot_rewind: %s", diag.text);
    while (session_promoting(session))
        engine_apply(f->life.engine);
    support_engine_run(f->life.engine);
}

static uint64_t records(struct tree_life *f) {
    struct store_stats stats;
    store_stats_get(f->life.store, &stats);
    return stats.records;
}

static uint64_t live_bytes(struct tree_life *f) {
    struct store_stats stats;
    store_stats_get(f->life.store, &stats);
    return stats.live_bytes;
}

static void wake_says(struct tree_life *f, const char *name, uint64_t seed,
                      struct life_turn *turn_out) {
    struct receipt receipt;
    struct session *session = life_wake(&f->life, name, &receipt);
    assert_int_equal(receipt.tokens_prefilled, 0);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    life_say(session, seed, 40, 12, turn_out);
    session_drop(session);
    snapshot_drain(f->life.snapshot);
}

/* --- forks */

/* CASE-30: fork, remove one of both, resume the other. BREAK_KIN forgets who was cut from the
 * lineage that goes, BREAK_SHARED_PAGE that two use a page, BREAK_FORK_CUT cuts a block too early,
 * BREAK_MAP_KIN calls unused what only a fork reads. */
static void one_goes_other_stays(int child_goes) {
    struct tree_life f;
    struct life_turn expected, found;
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "parent", IMAGE_RECIPE_V3);
    life_say(session, 1, 1500, 4, NULL);
    life_sleep(&f.life, session);
    wake_says(&f, "parent", 7, &expected);
    tree_life_fork(&f, "parent", NULL, "child");
    tree_life_check(&f);
    tree_life_remove(&f, child_goes ? "child" : "parent");
    tree_life_check(&f);
    const char *left = child_goes ? "parent" : "child";
    wake_says(&f, left, 7, &found);
    life_same_turn(&expected, &found);
    /* It grows blocks of its own over those that it shares. */
    session = life_wake(&f.life, left, NULL);
    life_say(session, 8, 700, 4, &expected);
    struct kv_digest before = life_resident(session);
    life_sleep(&f.life, session);
    tree_life_check(&f);
    session = life_wake(&f.life, left, NULL);
    struct kv_digest after = life_resident(session);
    assert_memory_equal(before.bytes, after.bytes, KV_DIGEST_BYTES);
    session_drop(session);
    tree_life_remove(&f, left);
    tree_life_check(&f);
    assert_int_equal(records(&f), 0);
    assert_int_equal(live_bytes(&f), 0);
    life_close(&f.life);
}

static void the_child_outlives_the_parent(void **state) {
    (void)state;
    one_goes_other_stays(0);
}

static void the_parent_outlives_the_child(void **state) {
    (void)state;
    one_goes_other_stays(1);
}

/* Both go on from the fork, each with its own text (CASE-06): neither reads the other's blocks. */
static void both_go_on(void **state) {
    (void)state;
    struct tree_life f;
    struct life_turn twin_a, twin_b, a, b;
    tree_life_open(&f, 0);
    struct session *twin = life_session(&f.life, "twin a", IMAGE_RECIPE_V3);
    life_say(twin, 1, 1200, 3, NULL);
    life_say(twin, 2, 900, 12, &twin_a);
    session_drop(twin);
    twin = life_session(&f.life, "twin b", IMAGE_RECIPE_V3);
    life_say(twin, 1, 1200, 3, NULL);
    life_say(twin, 3, 900, 12, &twin_b);
    session_drop(twin);
    snapshot_drain(f.life.snapshot);

    struct session *session = life_session(&f.life, "one", IMAGE_RECIPE_V3);
    life_say(session, 1, 1200, 3, NULL);
    life_sleep(&f.life, session);
    tree_life_fork(&f, "one", NULL, "two");
    struct session *one = life_wake(&f.life, "one", NULL);
    struct session *two = life_wake(&f.life, "two", NULL);
    life_say(one, 2, 900, 12, &a);
    life_say(two, 3, 900, 12, &b);
    life_same_turn(&twin_a, &a);
    life_same_turn(&twin_b, &b);
    struct kv_digest resident_one = life_resident(one), resident_two = life_resident(two);
    life_sleep(&f.life, one);
    life_sleep(&f.life, two);
    life_close(&f.life);
    life_open(&f.options, &f.life);
    one = life_wake(&f.life, "one", NULL);
    two = life_wake(&f.life, "two", NULL);
    struct kv_digest again = life_resident(one);
    assert_memory_equal(resident_one.bytes, again.bytes, KV_DIGEST_BYTES);
    again = life_resident(two);
    assert_memory_equal(resident_two.bytes, again.bytes, KV_DIGEST_BYTES);
    session_drop(one);
    session_drop(two);
    struct restore_check check;
    struct kv_diag diag = {""};
    assert_int_equal(restore_verify(f.life.store, kv_alloc_system(), "two", &check, &diag), KV_OK);
    life_close(&f.life);
}

/* Forks of forks at different lengths; the middle goes first, then the root. */
static void a_line_of_forks(void **state) {
    (void)state;
    struct tree_life f;
    struct life_turn expected, found;
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "root", IMAGE_RECIPE_V3);
    life_say(session, 1, 700, 2, NULL);
    life_sleep(&f.life, session);
    tree_life_fork(&f, "root", NULL, "middle");
    session = life_wake(&f.life, "middle", NULL);
    life_say(session, 2, 600, 2, NULL);
    life_sleep(&f.life, session);
    tree_life_fork(&f, "middle", NULL, "leaf");
    session = life_wake(&f.life, "leaf", NULL);
    life_say(session, 3, 600, 2, NULL);
    life_sleep(&f.life, session);
    /* A fork of a fork that has no block of its own is cut from whose blocks they are. */
    tree_life_fork(&f, "leaf", NULL, "copy");
    tree_life_fork(&f, "copy", NULL, "copy of copy");
    tree_life_check(&f);
    wake_says(&f, "leaf", 9, &expected);
    tree_life_remove(&f, "middle");
    tree_life_check(&f);
    tree_life_remove(&f, "copy");
    tree_life_remove(&f, "root");
    tree_life_check(&f);
    wake_says(&f, "copy of copy", 9, &found);
    life_same_turn(&expected, &found);
    tree_life_remove(&f, "leaf");
    tree_life_check(&f);
    wake_says(&f, "copy of copy", 9, &found);
    life_same_turn(&expected, &found);
    tree_life_remove(&f, "copy of copy");
    tree_life_check(&f);
    assert_int_equal(records(&f), 0);
    life_close(&f.life);
}

/* --- tags */

struct tags {
    char text[512];
};

static int note_tag(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct tags *tags = context;
    (void)snapshot;
    size_t at = strlen(tags->text);
    snprintf(tags->text + at, sizeof tags->text - at, "%s:%llu ",
             record->tag[0] != 0 ? record->tag : "-", (unsigned long long)record->n);
    return 1;
}

static void assert_tags(struct tree_life *f, const char *name, const char *expected) {
    struct tags tags = {""};
    assert_int_equal(snap_tree_walk(f->life.store, name, note_tag, &tags, NULL), KV_OK);
    assert_string_equal(tags.text, expected);
}

/* Each with what only it used. */
static void tags_go_one_by_one(struct tree_life *f) {
    static const char *const tags[] = {"before-restore-1", "draft", "before-restore-2"};
    struct snap_tree_place place = {"chat", NULL};
    for (int i = 0; i < 3; i++) {
        place.tag = tags[i];
        assert_int_equal(snap_tree_untag(&f->tree, &place, NULL), KV_OK);
        assert_int_equal(snap_tree_untag(&f->tree, &place, NULL), KV_ERR_NOT_FOUND);
        tree_life_check(f);
    }
    assert_tags(f, "chat", "-:1954 ");
    session_drop(life_wake(&f->life, "chat", NULL));
    tree_life_remove(f, "chat");
    tree_life_check(f);
    assert_int_equal(records(f), 0);
}

/* CASE-04: a long and a short state of one chat; the head is what wakes, the tag is there. */
static void tags_stay_and_can_be_gone_back_to(void **state) {
    (void)state;
    struct tree_life f;
    struct life_turn at_draft, found;
    struct receipt receipt;
    struct kv_diag diag = {""};
    char kept[RECORD_TAG_BYTES_MAX + 1];
    uint64_t draft = 0, head = 0;
    const struct snap_tree_place place = {"chat", "draft"};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 1000, 1, NULL);
    save_tag(&f, session, "draft");
    const struct snapshot_options again = {.tag = "draft"};
    assert_int_equal(snapshot_save(f.life.snapshot, session, &again, &receipt, &diag),
                     KV_ERR_EXISTS);
    life_say(session, 7, 40, 12, &at_draft);
    life_say(session, 3, 900, 1, NULL);
    life_sleep(&f.life, session);
    assert_tags(&f, "chat", "-:1954 draft:1001 ");
    session = life_wake(&f.life, "chat", &receipt);
    assert_int_equal(receipt.tokens, 1954);
    life_head(&f.life, "chat", &head);
    assert_int_equal(receipt.snapshot, head);
    session_drop(session);
    assert_int_equal(snap_tree_find(f.life.store, &place, &draft, NULL, &diag), KV_OK);
    /* Waking the tag itself changes nothing, and what woke so cannot be saved. */
    const struct restore_options gone = {.snapshot = draft ^ 1};
    assert_int_equal(restore_wake(&f.life.source, "chat", &gone, &session, &receipt, &diag),
                     KV_ERR_NOT_FOUND);
    kv_diag_clear(&diag);
    const struct restore_options older = {.snapshot = draft};
    assert_int_equal(restore_wake(&f.life.source, "chat", &older, &session, &receipt, &diag),
                     KV_OK);
    assert_int_equal(receipt.snapshot, draft);
    assert_int_equal(receipt.tokens, 1001);
    life_say(session, 7, 40, 12, &found);
    life_same_turn(&at_draft, &found);
    const struct snapshot_options plain = {0};
    assert_int_equal(snapshot_save(f.life.snapshot, session, &plain, &receipt, &diag), KV_ERR_BUSY);
    session_drop(session);
    snapshot_drain(f.life.snapshot);

    assert_int_equal(snap_tree_revert(&f.tree, &place, kept, &diag), KV_OK);
    assert_string_equal(kept, "before-restore-1");
    assert_tags(&f, "chat", "-:1001 before-restore-1:1954 draft:1001 ");
    tree_life_check(&f);
    session = life_wake(&f.life, "chat", &receipt);
    life_say(session, 7, 40, 12, &found);
    life_same_turn(&at_draft, &found);
    life_say(session, 9, 600, 1, NULL);
    life_sleep(&f.life, session);
    tree_life_check(&f);
    /* And forward again. */
    const struct snap_tree_place back = {"chat", "before-restore-1"};
    assert_int_equal(snap_tree_revert(&f.tree, &back, kept, &diag), KV_OK);
    assert_string_equal(kept, "before-restore-2");
    assert_int_equal(life_head(&f.life, "chat", NULL).n, 1954);
    struct restore_check check;
    assert_int_equal(restore_verify(f.life.store, kv_alloc_system(), "chat", &check, &diag), KV_OK);
    assert_int_equal(check.snapshots, 4);
    tree_life_check(&f);
    tags_go_one_by_one(&f);
    life_close(&f.life);
}

/* The head's own tag goes, its snapshot stays; the next save replaces it. */
static void the_tag_of_the_head_is_only_a_word(void **state) {
    (void)state;
    struct tree_life f;
    const struct snap_tree_place place = {"chat", "now"};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 100, 1, NULL);
    save_tag(&f, session, "now");
    session_drop(session);
    assert_int_equal(snap_tree_untag(&f.tree, &place, NULL), KV_OK);
    assert_tags(&f, "chat", "-:101 ");
    session = life_wake(&f.life, "chat", NULL);
    life_say(session, 2, 10, 1, NULL);
    life_save(&f.life, session, 0);
    assert_tags(&f, "chat", "-:112 ");
    session_drop(session);
    tree_life_check(&f);
    life_close(&f.life);
}

/* --- going back inside a session */

/* In the window nothing is computed again, and what follows is as if the rest was never said.
 * BREAK_STALE_PAGE lets a page of the old text stand for the new one; BREAK_KEEP_HEAD lets the head
 * that was left go untagged, BREAK_REWIND_FIRST leaves one token pending and nothing to save. */
static void back_within_the_window_is_exact(void **state) {
    (void)state;
    static const uint32_t ends[] = {1, 30, 64, 65, 128, 200, 570, 1100, 1130};
    struct tree_life f;
    uint32_t first[1151], second[301];
    tree_life_open(&f, 0);
    support_engine_ids(1, 256, first, 1151);
    support_engine_ids(2, 256, second, 301);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        struct life_turn expected, found;
        struct session_info info;
        uint32_t whole = ends[i] < 575 ? 575 : 1151; /* the longest with as many blocks */
        struct session *twin = life_session(&f.life, "twin", IMAGE_RECIPE_V3);
        uint32_t kept = ends[i] > 1 ? ends[i] - 1 : 1;
        support_engine_feed(twin, first, kept);
        memcpy(second, first + ends[i] - 1, sizeof *second); /* pending when it went back */
        support_engine_feed(twin, second + (ends[i] == 1), 301 - (ends[i] == 1));
        life_say(twin, 3, 20, 12, &expected);
        struct kv_digest resident = life_resident(twin);
        session_drop(twin);
        snapshot_drain(f.life.snapshot);
        assert_int_equal(snap_gc_unsaved(f.life.store, kv_alloc_system(), NULL), KV_OK);
        struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
        support_engine_feed(session, first, whole);
        life_save(&f.life, session, 0);
        rewind_to(&f, session, ends[i]);
        session_info(session, &info);
        assert_int_equal(info.n, ends[i]);
        /* The last token is pending; the only one of a session is read again. */
        assert_int_equal(info.n_kv, ends[i] == 1 ? 1 : ends[i] - 1);
        assert_int_equal(info.tokens_prefilled, whole + (ends[i] == 1));
        if (ends[i] == 1)
            life_save(&f.life, session, 0);
        support_engine_feed(session, second + 1, 300);
        life_say(session, 3, 20, 12, &found);
        life_same_turn(&expected, &found);
        struct kv_digest again = life_resident(session);
        assert_memory_equal(resident.bytes, again.bytes, KV_DIGEST_BYTES);
        life_sleep(&f.life, session);
        char tags[64];
        session = life_wake(&f.life, "chat", NULL);
        session_info(session, &info);
        snprintf(tags, sizeof tags, "-:%u before-restore-1:%u ", (uint32_t)info.n, whole);
        assert_tags(&f, "chat", tags);
        again = life_resident(session);
        assert_memory_equal(resident.bytes, again.bytes, KV_DIGEST_BYTES);
        session_drop(session);
        tree_life_check(&f);
        tree_life_remove(&f, "chat");
    }
    snapshot_drain(f.life.snapshot);
    life_close(&f.life);
}

/* Behind the window: blocks are kept, 256 to 511 tokens are prefilled, and the count says so.
 * BREAK_REWIND keeps a block too many. */
static void back_into_sealed_text_prefills_a_window(void **state) {
    (void)state;
    static const uint32_t ends[] = {1, 2, 64, 66, 319, 320, 575, 576, 600, 831, 832, 1000};
    struct tree_life f;
    tree_life_open(&f, 0);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        struct session_info info, after;
        struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
        life_say(session, 1, 1800, 0, NULL);
        life_save(&f.life, session, 0);
        session_info(session, &info);
        uint64_t prefilled = info.tokens_prefilled;
        rewind_to(&f, session, ends[i]);
        session_info(session, &after);
        prefilled = after.tokens_prefilled - prefilled;
        uint64_t blocks = ends[i] < 320 ? 0 : (ends[i] - 320) / 256;
        uint64_t behind = 64 + 256 * blocks;
        assert_int_equal(after.blocks, blocks);
        assert_int_equal(after.n, ends[i]);
        if (ends[i] > 65)
            assert_int_equal(prefilled, ends[i] - behind);
        else
            assert_int_equal(prefilled, ends[i] == 1);
        if (blocks > 0)
            assert_true(prefilled >= 256 && prefilled <= 511);
        life_say(session, 4, 400, 5, NULL);
        struct kv_digest before = life_resident(session);
        life_sleep(&f.life, session);
        tree_life_check(&f);
        session = life_wake(&f.life, "chat", NULL);
        struct kv_digest again = life_resident(session);
        assert_memory_equal(before.bytes, again.bytes, KV_DIGEST_BYTES);
        session_drop(session);
        /* What was left behind is whole. */
        const struct snap_tree_place place = {"chat", "before-restore-1"};
        char kept[RECORD_TAG_BYTES_MAX + 1];
        assert_int_equal(snap_tree_revert(&f.tree, &place, kept, NULL), KV_OK);
        session = life_wake(&f.life, "chat", NULL);
        session_info(session, &after);
        assert_int_equal(after.n, 1800);
        session_drop(session);
        tree_life_check(&f);
        tree_life_remove(&f, "chat");
        assert_int_equal(records(&f), 0);
    }
    life_close(&f.life);
}

static void rewinding_is_refused_where_text_would_be_lost(void **state) {
    (void)state;
    struct tree_life f;
    struct kv_diag diag = {""};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 100, 1, NULL);
    assert_int_equal(snapshot_rewind(f.life.snapshot, session, 50, &diag), KV_ERR_BUSY);
    life_save(&f.life, session, 0);
    assert_int_equal(snapshot_rewind(f.life.snapshot, session, 101, &diag), KV_ERR_INVALID);
    life_say(session, 2, 10, 1, NULL);
    assert_int_equal(snapshot_rewind(f.life.snapshot, session, 50, &diag), KV_ERR_BUSY);
    assert_non_null(strstr(diag.text, "save it first"));
    life_close(&f.life);
}

/* --- names */

static void renamed_sessions_are_themselves(void **state) {
    (void)state;
    struct tree_life f;
    struct life_turn expected, found;
    struct kv_diag diag = {""};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "old", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 1, NULL);
    save_tag(&f, session, "draft");
    life_say(session, 2, 500, 1, NULL);
    life_sleep(&f.life, session);
    tree_life_fork(&f, "old", "draft", "fork");
    wake_says(&f, "old", 7, &expected);
    assert_int_equal(snap_tree_rename(&f.tree, "old", "fork", &diag), KV_ERR_EXISTS);
    assert_int_equal(snap_tree_rename(&f.tree, "none", "new", &diag), KV_ERR_NOT_FOUND);
    assert_int_equal(snap_tree_rename(&f.tree, "old", "a/b", &diag), KV_ERR_INVALID);
    assert_int_equal(snap_tree_rename(&f.tree, "old", "new", &diag), KV_OK);
    tree_life_check(&f);
    life_refuse(&f.life, "old", KV_ERR_NOT_FOUND, &diag);
    wake_says(&f, "new", 7, &found);
    life_same_turn(&expected, &found);
    assert_tags(&f, "new", "-:1402 draft:901 ");
    struct restore_check check;
    assert_int_equal(restore_verify(f.life.store, kv_alloc_system(), "new", &check, &diag), KV_OK);
    assert_int_equal(check.snapshots, 2);
    session_drop(life_wake(&f.life, "fork", NULL));
    life_close(&f.life);
}

static void descends(struct tree_life *f, const char *name, const char *parent, int removed) {
    struct snapshot_entry entry;
    struct kv_diag diag = {""};
    assert_int_equal(snapshot_find(f->life.store, kv_alloc_system(), name, &entry, &diag), KV_OK);
    assert_string_equal(entry.parent, parent);
    assert_int_equal(entry.parent_removed, removed);
}

/* The parent is called what it is called now, and said to be gone when it is, also after another
 * session has got its name. */
static void descent_follows_names(void **state) {
    (void)state;
    struct tree_life f;
    struct kv_diag diag = {""};
    char kept[RECORD_TAG_BYTES_MAX + 1];
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "a", IMAGE_RECIPE_V3);
    life_say(session, 1, 800, 2, NULL);
    save_tag(&f, session, "t");
    life_say(session, 2, 800, 2, NULL);
    life_sleep(&f.life, session);
    tree_life_fork(&f, "a", NULL, "child");
    tree_life_fork(&f, "child", NULL, "grandchild");
    descends(&f, "child", "a", 0);
    /* Its head goes back and the one before is given up: the lineage that the child reads has no
     * snapshot of its own any more. */
    const struct snap_tree_place tag = {"a", "t"}, before = {"a", kept};
    assert_int_equal(snap_tree_revert(&f.tree, &tag, kept, &diag), KV_OK);
    descends(&f, "child", "a", 0);
    assert_int_equal(snap_tree_rename(&f.tree, "a", "b", &diag), KV_OK);
    descends(&f, "child", "b", 0);
    assert_int_equal(snap_tree_rename(&f.tree, "b", "a", &diag), KV_OK);
    assert_int_equal(snap_tree_untag(&f.tree, &before, &diag), KV_OK);
    tree_life_check(&f);
    assert_int_equal(snap_tree_rename(&f.tree, "a", "b", &diag), KV_OK);
    descends(&f, "child", "b", 0);
    tree_life_remove(&f, "b");
    descends(&f, "child", "b", 1);
    session = life_session(&f.life, "b", IMAGE_RECIPE_V3);
    life_say(session, 3, 800, 2, NULL);
    life_sleep(&f.life, session);
    descends(&f, "child", "b", 1);
    tree_life_check(&f);
    life_close(&f.life);
}

static void pinned_sessions_stay(void **state) {
    (void)state;
    struct tree_life f;
    struct snapshot_entry entry;
    struct kv_diag diag = {""};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 100, 1, NULL);
    life_sleep(&f.life, session);
    assert_int_equal(snap_tree_pin(&f.tree, "none", 1, &diag), KV_ERR_NOT_FOUND);
    assert_int_equal(snap_tree_pin(&f.tree, "chat", 1, &diag), KV_OK);
    assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag), KV_ERR_BUSY);
    assert_non_null(strstr(diag.text, "unpin"));
    /* A save keeps the pin. */
    session = life_wake(&f.life, "chat", NULL);
    assert_true(transfer_durable(session)->pinned);
    life_say(session, 2, 10, 1, NULL);
    life_sleep(&f.life, session);
    assert_int_equal(snapshot_find(f.life.store, kv_alloc_system(), "chat", &entry, &diag), KV_OK);
    assert_int_equal(entry.pinned, 1);
    assert_int_equal(snap_tree_pin(&f.tree, "chat", 0, &diag), KV_OK);
    tree_life_remove(&f, "chat");
    assert_int_equal(records(&f), 0);
    life_close(&f.life);
}

static void names_with_at_signs_are_names(void **state) {
    (void)state;
    struct tree_life f;
    struct snap_tree_room room;
    struct snap_tree_place place;
    struct kv_diag diag = {""};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "me@home", IMAGE_RECIPE_V3);
    life_say(session, 1, 50, 1, NULL);
    life_sleep(&f.life, session);
    assert_int_equal(snap_tree_parse(f.life.store, "me@home", &room, &place, &diag), KV_OK);
    assert_string_equal(place.name, "me@home");
    assert_null(place.tag);
    assert_int_equal(snap_tree_parse(f.life.store, "me@home@t", &room, &place, &diag), KV_OK);
    assert_string_equal(place.name, "me@home");
    assert_string_equal(place.tag, "t");
    assert_int_equal(snap_tree_parse(f.life.store, "you@home", &room, &place, &diag), KV_OK);
    assert_string_equal(place.name, "you");
    assert_string_equal(place.tag, "home");
    assert_int_equal(snap_tree_parse(f.life.store, "you@", &room, &place, &diag), KV_ERR_INVALID);
    assert_int_equal(snap_tree_parse(f.life.store, "@t", &room, &place, &diag), KV_ERR_INVALID);
    /* Such a name is given no more, but it can be left. */
    const struct snap_tree_place whole = {"me@home", NULL};
    assert_int_equal(snap_tree_fork(&f.tree, &whole, "a@b", &diag), KV_ERR_INVALID);
    assert_int_equal(snap_tree_rename(&f.tree, "me@home", "a@b", &diag), KV_ERR_INVALID);
    assert_non_null(strstr(diag.text, "'@'"));
    char longest[400];
    memset(longest, 'n', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    assert_int_equal(snap_tree_parse(f.life.store, longest, &room, &place, &diag), KV_ERR_INVALID);
    memcpy(longest + 300, "@", 1);
    assert_int_equal(snap_tree_parse(f.life.store, longest, &room, &place, &diag), KV_ERR_INVALID);
    assert_int_equal(snap_tree_rename(&f.tree, "me@home", "me", &diag), KV_OK);
    assert_int_equal(snap_tree_parse(f.life.store, "me@home", &room, &place, &diag), KV_OK);
    assert_string_equal(place.tag, "home");
    life_close(&f.life);
}

/* Answers of an end that is gone must neither make the next image impossible nor be compared with
 * those of another text of the same length: BREAK_REWIND_ASKED keeps them. */
static void going_back_forgets_answers(void **state) {
    (void)state;
    struct tree_life f;
    struct session_info info;
    struct kv_diag diag = {""};
    uint32_t needles = 0, probes = 0;
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 700, 3, NULL);
    session_info(session, &info);
    const struct image_needle needle = {.key = "k",
                                        .ask = "q",
                                        .answer_prefix = "",
                                        .expect = "e",
                                        .span_count = 1,
                                        .spans = {{IMAGE_RAW, 80, 90}},
                                        .kept = 1,
                                        .passed = 1,
                                        .asked_n_kv = info.n_kv};
    const struct image_probe asked[2] = {{100, 116, 119, info.n_kv, -1, -9},
                                         {650, 666, 669, info.n_kv, -1, -9}};
    assert_int_equal(transfer_add_needle(session, &needle, &diag), KV_OK);
    transfer_set_probes(session, asked, 2);
    life_save(&f.life, session, 0);
    rewind_to(&f, session, info.n - 60);
    life_save(&f.life, session, 0);
    session_drop(session);
    snapshot_drain(f.life.snapshot);
    session = life_wake(&f.life, "chat", NULL);
    assert_int_equal(transfer_needles(session, &needles)[0].asked_n_kv, 0);
    assert_int_equal(transfer_probes(session, &probes)[0].asked_n_kv, 0);
    assert_int_equal(needles, 1);
    assert_int_equal(probes, 1);
    session_drop(session);
    tree_life_check(&f);
    life_close(&f.life);
}

TESTING_MAIN(cmocka_unit_test(going_back_forgets_answers),
             cmocka_unit_test(the_child_outlives_the_parent),
             cmocka_unit_test(the_parent_outlives_the_child), cmocka_unit_test(both_go_on),
             cmocka_unit_test(a_line_of_forks), cmocka_unit_test(tags_stay_and_can_be_gone_back_to),
             cmocka_unit_test(the_tag_of_the_head_is_only_a_word),
             cmocka_unit_test(back_within_the_window_is_exact),
             cmocka_unit_test(back_into_sealed_text_prefills_a_window),
             cmocka_unit_test(rewinding_is_refused_where_text_would_be_lost),
             cmocka_unit_test(renamed_sessions_are_themselves),
             cmocka_unit_test(descent_follows_names), cmocka_unit_test(pinned_sessions_stay),
             cmocka_unit_test(names_with_at_signs_are_names))
