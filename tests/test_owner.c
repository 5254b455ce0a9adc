/* tests/test_owner.c - whose a session is, and sessions that begin as another one does.
 *
 * Responsible for: the owner through saves, forks, renames, going back, pins, export and import and
 * a lost index; snapshot_branch: what it shares, what it answers, what is left when either goes.
 * Not responsible for: finding a session by its tokens (test_snap_prefix.c).
 */
#include "snapshot/snap_care.h"
#include "snapshot/snap_import.h"
#include "snapshot/snap_retain.h"
#include "tests/support_store.h"
#include "tests/support_tree.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t alice[IMAGE_OWNER_BYTES] = {1, 2, 3};
static const uint8_t nobody[IMAGE_OWNER_BYTES];

static void is_owned(struct tree_life *f, const char *name, const uint8_t *owner) {
    struct snapshot_entry entry;
    struct kv_diag diag = {""};
    if (snapshot_find(f->life.store, kv_alloc_system(), name, &entry, &diag) != KV_OK)
        fail_msg("snapshot_find: %s", diag.text);
    assert_memory_equal(entry.owner, owner, IMAGE_OWNER_BYTES);
}

static void must(enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK)
        fail_msg("%s: %s", kv_err_name(err), diag->text);
}

/* --- the owner */

struct file {
    uint8_t *bytes;
    size_t size, capacity, at;
};

static enum kv_err put_file(void *context, const void *bytes, size_t count, struct kv_diag *diag) {
    struct file *file = context;
    void *items = file->bytes;
    (void)diag;
    assert_true(kv_alloc_grow(kv_alloc_system(), &items, &file->capacity, file->size + count, 1));
    file->bytes = items;
    memcpy(file->bytes + file->size, bytes, count);
    file->size += count;
    return KV_OK;
}

static enum kv_err get_file(void *context, void *bytes, size_t count, size_t *got_out,
                            struct kv_diag *diag) {
    struct file *file = context;
    size_t left = file->size - file->at;
    (void)diag;
    *got_out = count < left ? count : left;
    memcpy(bytes, file->bytes + file->at, *got_out);
    file->at += *got_out;
    return KV_OK;
}

/* Out of the store and into it again, for somebody else. */
static void move(struct tree_life *f, const char *name, const char *as, const uint8_t *owner) {
    struct file file = {.bytes = NULL};
    struct restore_exported exported;
    struct snap_import_result result;
    struct kv_diag diag = {""};
    const struct restore_export_args out = {.store = f->life.store,
                                            .alloc = kv_alloc_system(),
                                            .name = name,
                                            .put = put_file,
                                            .context = &file};
    must(restore_export(&out, &exported, &diag), &diag);
    const struct snap_import_args in = {
        .store = f->life.store,
        .clock = kv_clock_system(),
        .take = {.alloc = kv_alloc_system(), .get = get_file, .get_context = &file},
        .name = as,
        .owner = owner,
        .batch_bytes = SNAP_IMPORT_BATCH_BYTES};
    must(snap_import(&in, &result, &diag), &diag);
    kv_alloc_release(kv_alloc_system(), file.bytes);
}

static void save_tag(struct tree_life *f, struct session *session, const char *tag) {
    const struct snapshot_options options = {.tag = tag};
    struct receipt receipt;
    struct kv_diag diag = {""};
    must(snapshot_save(f->life.snapshot, session, &options, &receipt, &diag), &diag);
}

/* BREAK_OWNER_SAVE forgets it with the second save. */
static void an_owner_stays(void **state) {
    (void)state;
    struct tree_life f;
    struct kv_diag diag = {""};
    char kept[RECORD_TAG_BYTES_MAX + 1];
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    memcpy(transfer_durable(session)->owner, alice, sizeof alice);
    life_say(session, 1, 700, 4, NULL);
    save_tag(&f, session, "draft");
    is_owned(&f, "chat", alice);
    life_say(session, 2, 40, 4, NULL);
    life_sleep(&f.life, session);
    is_owned(&f, "chat", alice);
    session = life_wake(&f.life, "chat", NULL);
    assert_memory_equal(transfer_durable(session)->owner, alice, sizeof alice);
    session_drop(session);
    const struct snap_tree_place head = {"chat", NULL}, draft = {"chat", "draft"};
    must(snap_tree_fork(&f.tree, &head, "child", &diag), &diag);
    is_owned(&f, "child", alice);
    must(snap_tree_pin(&f.tree, "child", 1, &diag), &diag);
    is_owned(&f, "child", alice);
    must(snap_tree_pin(&f.tree, "child", 0, &diag), &diag);
    must(snap_retain_expire(f.life.store, "child", 1, &diag), &diag);
    must(snap_tree_rename(&f.tree, "child", "kid", &diag), &diag);
    is_owned(&f, "kid", alice);
    must(snap_tree_revert(&f.tree, &draft, kept, &diag), &diag);
    is_owned(&f, "chat", alice);
    move(&f, "chat", "copy", NULL);
    is_owned(&f, "copy", nobody);
    move(&f, "copy", "hers", alice);
    is_owned(&f, "hers", alice);
    tree_life_check(&f);
    life_close(&f.life);
    support_store_remove_index(f.dir);
    life_open(&f.options, &f.life);
    is_owned(&f, "chat", alice);
    is_owned(&f, "copy", nobody);
    life_close(&f.life);
}

/* --- branches */

static struct session *wake_as(struct tree_life *f, const char *name, const char *as) {
    const struct restore_options options = {.as = as};
    struct session *session = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    must(restore_wake(&f->life.source, name, &options, &session, &receipt, &diag), &diag);
    assert_ptr_equal(session_find(f->life.engine, as), session);
    return session;
}

static struct session *branch(struct tree_life *f, const char *name, const char *as, uint64_t n) {
    struct session *session = wake_as(f, name, as);
    struct kv_diag diag = {""};
    must(snapshot_branch(f->life.snapshot, session, n, &diag), &diag);
    while (session_promoting(session))
        engine_apply(f->life.engine);
    support_engine_run(f->life.engine);
    return session;
}

static uint64_t tokens_of(struct tree_life *f, const char *name) {
    return life_head(&f->life, name, NULL).n;
}

/* A branch at the end of a session answers as the session itself does; one inside it as the session
 * that went back does. The source stays as it was. BREAK_OWNER_SAVE as above. */
static void a_branch_answers_as_its_source(void **state) {
    (void)state;
    struct tree_life f;
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    memcpy(transfer_durable(session)->owner, alice, sizeof alice);
    life_say(session, 1, 1500, 4, NULL);
    life_sleep(&f.life, session);
    uint64_t n = tokens_of(&f, "chat");
    static const uint64_t back[] = {0, 1, 100, 300, 600, 1400};
    for (size_t i = 0; i < sizeof back / sizeof back[0]; i++) {
        struct life_turn expected, found;
        struct kv_diag diag = {""};
        struct session_info info;
        session = life_wake(&f.life, "chat", NULL);
        if (back[i] != 0)
            must(snapshot_rewind(f.life.snapshot, session, n - back[i], &diag), &diag);
        while (session_promoting(session))
            engine_apply(f.life.engine);
        support_engine_run(f.life.engine);
        life_say(session, 5, 60, 12, &expected);
        session_drop(session);
        session = branch(&f, "chat", "fork", n - back[i]);
        session_info(session, &info);
        printf("%llu tokens back: %llu prefilled\n", (unsigned long long)back[i],
               (unsigned long long)info.tokens_prefilled);
        assert_true(info.tokens_prefilled < 512);
        life_say(session, 5, 60, 12, &found);
        life_same_turn(&expected, &found);
        life_sleep(&f.life, session);
        is_owned(&f, "fork", alice);
        assert_int_equal(tokens_of(&f, "fork"), n - back[i] + 72);
        assert_int_equal(tokens_of(&f, "chat"), n);
        tree_life_check(&f);
        session_drop(life_wake(&f.life, "fork", NULL));
        must(snapshot_remove(f.life.store, kv_alloc_system(), "fork", &diag), &diag);
        tree_life_check(&f);
    }
    life_close(&f.life);
}

/* The source goes before the branch is saved for the first time. BREAK_BRANCH_RECORD leaves nothing
 * in the store that would hold the shared blocks. */
static void a_branch_outlives_its_source(void **state) {
    (void)state;
    struct tree_life f;
    struct kv_diag diag = {""};
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 1500, 4, NULL);
    life_sleep(&f.life, session);
    session = branch(&f, "chat", "fork", 1400);
    must(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag), &diag);
    life_say(session, 2, 600, 4, NULL);
    struct kv_digest before = life_resident(session);
    life_sleep(&f.life, session);
    tree_life_check(&f);
    session = life_wake(&f.life, "fork", NULL);
    struct kv_digest after = life_resident(session);
    assert_memory_equal(before.bytes, after.bytes, KV_DIGEST_BYTES);
    session_drop(session);
    must(snapshot_remove(f.life.store, kv_alloc_system(), "fork", &diag), &diag);
    struct store_stats stats;
    store_stats_get(f.life.store, &stats);
    assert_int_equal(stats.records, 0);
    life_close(&f.life);
}

/* What cannot be a branch is refused, and a session under another name cannot be saved as it is. */
static void what_is_no_branch_is_refused(void **state) {
    (void)state;
    struct tree_life f;
    struct kv_diag diag = {""};
    struct receipt receipt;
    tree_life_open(&f, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 300, 4, NULL);
    assert_int_equal(snapshot_branch(f.life.snapshot, session, 100, &diag), KV_ERR_BUSY);
    life_save(&f.life, session, 0);
    assert_int_equal(snapshot_branch(f.life.snapshot, session, 100, &diag), KV_ERR_EXISTS);
    session_drop(session);
    session = wake_as(&f, "chat", "fork");
    assert_int_equal(snapshot_branch(f.life.snapshot, session, 0, &diag), KV_ERR_INVALID);
    assert_int_equal(snapshot_branch(f.life.snapshot, session, 305, &diag), KV_ERR_INVALID);
    const struct snapshot_options options = {0};
    assert_int_equal(snapshot_save(f.life.snapshot, session, &options, &receipt, &diag),
                     KV_ERR_NOT_FOUND);
    assert_int_equal(tokens_of(&f, "chat"), 304);
    session_drop(session);
    /* One that was removed, collected and only then to be saved: refused, nothing half. */
    life_say(session = life_wake(&f.life, "chat", NULL), 2, 900, 4, NULL);
    life_sleep(&f.life, session);
    session = branch(&f, "chat", "fork", 1200);
    must(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag), &diag);
    const struct snap_care_collect_args collect = {.store = f.life.store,
                                                   .alloc = kv_alloc_system()};
    struct snap_care_report report;
    must(snap_care_collect(&collect, &report, &diag), &diag);
    life_say(session, 3, 20, 4, NULL);
    assert_int_equal(snapshot_save(f.life.snapshot, session, &options, &receipt, &diag),
                     KV_ERR_NOT_FOUND);
    printf("%s\n", diag.text);
    session_drop(session);
    tree_life_check(&f);
    life_close(&f.life);
}

TESTING_MAIN(cmocka_unit_test(an_owner_stays), cmocka_unit_test(a_branch_answers_as_its_source),
             cmocka_unit_test(a_branch_outlives_its_source),
             cmocka_unit_test(what_is_no_branch_is_refused))
