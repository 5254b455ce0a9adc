/* tests/test_restore.c - waking: every part that is missing, damaged or foreign is refused by name.
 *
 * Responsible for: restore/ over the tiny model, with records and bytes changed behind its back.
 * Not responsible for: the bits of woken sessions (test_life.c), saving (test_snapshot.c).
 */
#include "restore/rest_fetch.h"
#include "restore/restore.h"

#include "store/base/bytes.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fixture {
    struct life_rig rig;
    struct record_snapshot head;
    uint64_t snapshot;
};

/* One sleeping session "chat" with blocks at K8V4, K6V4 and K6V3, and a page that is not full. */
static void open_fixture(struct fixture *f) {
    life_rig_open(&f->rig);
    struct session *session = life_session(&f->rig.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 64 + 256 * 6 + 30, 3, NULL);
    life_sleep(&f->rig.life, session);
    f->head = life_head(&f->rig.life, "chat", &f->snapshot);
}

static void close_fixture(struct fixture *f) {
    life_rig_close(&f->rig);
}

static void refuse(struct fixture *f, enum kv_err expected, const char *word) {
    struct kv_diag diag = {""};
    struct engine_slots before, after;
    engine_slots(f->rig.life.engine, &before);
    life_refuse(&f->rig.life, "chat", expected, &diag);
    engine_slots(f->rig.life.engine, &after);
    if (strstr(diag.text, word) == NULL || strstr(diag.text, "chat") == NULL)
        fail_msg("'%s' or the session is not named in: %s", word, diag.text);
    assert_int_equal(before.free, after.free);
}

/* --- CASE-02, CASE-03: parts that are missing */

struct drop {
    uint8_t kind;
};

static uint32_t drop_kind(void *context, struct store_record *record) {
    const struct drop *drop = context;
    uint32_t keep = 0;
    for (uint32_t i = 0; i < record->extent_count; i++)
        if (record->extents[i].kind != drop->kind)
            keep |= 1u << i;
    return keep;
}

static void a_missing_stream_is_named(void **state) {
    (void)state;
    static const enum layout_stream streams[] = {LAYOUT_META, LAYOUT_KH,  LAYOUT_KM, LAYOUT_KL,
                                                 LAYOUT_VB,   LAYOUT_VR1, LAYOUT_VR2};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        struct fixture f;
        open_fixture(&f);
        struct drop drop = {(uint8_t)streams[i]};
        struct record_key key = record_key_block(f.head.lineage, 1);
        life_rewrite(&f.rig.life, &key, drop_kind, &drop);
        refuse(&f, KV_ERR_CORRUPT, layout_stream_name(streams[i]));
        close_fixture(&f);
    }
}

static void a_missing_record_is_named(void **state) {
    (void)state;
    struct fixture f;
    static const char *const words[] = {"block 2", "sinks", "page at position", "snapshot"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        open_fixture(&f);
        struct record_key keys[] = {
            record_key_block(f.head.lineage, 2), record_key_page(f.head.sinks_page),
            record_key_page(f.head.page_ids[1]), record_key_snapshot(f.snapshot)};
        life_delete(&f.rig.life, &keys[i]);
        refuse(&f, KV_ERR_CORRUPT, words[i]);
        close_fixture(&f);
    }
}

/* Parts of the image: position, ids, sampler, tier map and so on, with a root that agrees. */
static uint8_t *image_bytes(struct fixture *f, size_t *size_out) {
    struct image image;
    struct kv_diag diag = {""};
    uint8_t *bytes = NULL;
    assert_int_equal(restore_image(f->rig.life.store, kv_alloc_system(), "chat", &image, &diag),
                     KV_OK);
    assert_int_equal(image_encode(&image, kv_alloc_system(), &bytes, size_out, &diag), KV_OK);
    image_release(&image, kv_alloc_system());
    return bytes;
}

static void a_missing_part_of_the_image_is_named(void **state) {
    (void)state;
    static const char *const names[] = {"model identity", "session name", "sampler settings",
                                        "tier history",   "position",     "blocks",
                                        "token ids",      "roles",        "tier map",
                                        "sinks",          "window pages", "fingerprint",
                                        "fingerprint",    "needles",      "origin"};
    struct fixture f;
    size_t size;
    open_fixture(&f);
    uint8_t *whole = image_bytes(&f, &size);
    uint8_t *cut = malloc(size);
    assert_non_null(cut);
    size_t at = 12;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t part = 12 + (size_t)kv_get_u64(whole + at + 4);
        memcpy(cut, whole, at);
        memcpy(cut + at, whole + at + part, size - at - part);
        struct kv_digest root = image_root(cut, size - part);
        life_replace_image(&f.rig.life, f.snapshot, cut, size - part, &root);
        refuse(&f, KV_ERR_CORRUPT, names[i]);
        at += part;
    }
    assert_int_equal(at, size);
    struct kv_digest root = image_root(whole, size);
    life_replace_image(&f.rig.life, f.snapshot, whole, size, &root);
    life_wake(&f.rig.life, "chat", NULL);
    free(cut);
    kv_alloc_release(kv_alloc_system(), whole);
    close_fixture(&f);
}

/* CASE-12: the image cut at many places, and with absurd numbers, under a root that agrees. */
static void cuts_and_absurd_numbers_are_refused(void **state) {
    (void)state;
    static const uint64_t values[] = {UINT32_MAX, (uint64_t)1 << 63, UINT64_MAX};
    struct fixture f;
    size_t size;
    struct kv_diag diag = {""};
    open_fixture(&f);
    uint8_t *whole = image_bytes(&f, &size);
    for (size_t end = 1; end < size; end += 1 + size / 61) {
        struct kv_digest root = image_root(whole, end);
        life_replace_image(&f.rig.life, f.snapshot, whole, end, &root);
        life_refuse(&f.rig.life, "chat", KV_ERR_CORRUPT, &diag);
    }
    size_t at = 12;
    for (int part = 0; part < 15; part++) {
        uint64_t length = kv_get_u64(whole + at + 4);
        for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
            kv_put_u64(whole + at + 4, values[v]);
            struct kv_digest root = image_root(whole, size);
            life_replace_image(&f.rig.life, f.snapshot, whole, size, &root);
            life_refuse(&f.rig.life, "chat", KV_ERR_CORRUPT, &diag);
        }
        kv_put_u64(whole + at + 4, length);
        at += 12 + (size_t)length;
    }
    /* Without a root that agrees nothing of it is even looked at. */
    struct kv_digest root = image_root(whole, size);
    whole[size / 2] ^= 1;
    life_replace_image(&f.rig.life, f.snapshot, whole, size, &root);
    refuse(&f, KV_ERR_CORRUPT, "root");
    kv_alloc_release(kv_alloc_system(), whole);
    close_fixture(&f);
}

static uint32_t other_position(void *context, struct store_record *record) {
    struct record_block block;
    (void)context;
    assert_int_equal(record_get_block(record->value, record->value_bytes, &block, NULL), KV_OK);
    block.first_position = UINT64_MAX - 63;
    assert_int_equal(record_put_block(&block, record->value), record->value_bytes);
    return UINT32_MAX;
}

static uint32_t newer_version(void *context, struct store_record *record) {
    (void)context;
    record->value[0] = 9;
    return UINT32_MAX;
}

static void foreign_records_are_refused(void **state) {
    (void)state;
    struct fixture f;
    open_fixture(&f);
    struct record_key key = record_key_block(f.head.lineage, 0);
    life_rewrite(&f.rig.life, &key, other_position, NULL);
    refuse(&f, KV_ERR_CORRUPT, "block 0");
    close_fixture(&f);
    open_fixture(&f);
    key = record_key_block(f.head.lineage, 3);
    life_rewrite(&f.rig.life, &key, newer_version, NULL);
    refuse(&f, KV_ERR_VERSION, "needs version 9");
    close_fixture(&f);
}

/* A block record of another session in the place of this one's: right shape, wrong memory.
 * BREAK_CHAIN takes it. */
static void another_sessions_block_breaks_the_chain(void **state) {
    (void)state;
    struct fixture f;
    open_fixture(&f);
    struct session *other = life_session(&f.rig.life, "other", IMAGE_RECIPE_V3);
    life_say(other, 77, 900, 2, NULL);
    life_sleep(&f.rig.life, other);
    struct record_snapshot head = life_head(&f.rig.life, "other", NULL);
    struct record_key mine = record_key_block(f.head.lineage, 1);
    struct record_key theirs = record_key_block(head.lineage, 1);
    life_copy(&f.rig.life, &theirs, &mine);
    refuse(&f, KV_ERR_CORRUPT, "chain");
    life_wake(&f.rig.life, "other", NULL);
    close_fixture(&f);
}

/* --- CASE-08: damage in the last plane touches nobody. BREAK_PLANE_DIGEST does not look,
 * BREAK_SHADOW keeps the slots of a wake that failed. */

static void a_flipped_byte_harms_nobody(void **state) {
    (void)state;
    struct fixture f;
    struct life control;
    struct life_options alone;
    char dir[TESTING_PATH_BYTES];
    struct life_turn kept, after;
    struct store_extent extent;
    open_fixture(&f);
    struct session *near = life_session(&f.rig.life, "near", IMAGE_RECIPE_V3);
    life_say(near, 5, 1000, 2, NULL);
    struct record_key key = record_key_block(f.head.lineage, f.head.block_count - 1);
    life_extent(&f.rig.life, &key, LAYOUT_KL, &extent);
    uint8_t *bytes = malloc(extent.stored_bytes);
    assert_non_null(bytes);
    life_disk(f.rig.dir, &extent, bytes, 0);
    bytes[extent.stored_bytes - 1] ^= 0x10;
    life_disk(f.rig.dir, &extent, bytes, 1);
    struct kv_digest before = life_resident(near);
    refuse(&f, KV_ERR_CORRUPT, "stream KL");
    struct kv_digest resident = life_resident(near);
    assert_memory_equal(before.bytes, resident.bytes, KV_DIGEST_BYTES);
    life_say(near, 6, 100, 12, &after);
    /* Beside a run without the attempt. */
    testing_temp_dir(dir);
    alone = life_default(dir);
    life_open(&alone, &control);
    struct session *undisturbed = life_session(&control, "near", IMAGE_RECIPE_V3);
    life_say(undisturbed, 5, 1000, 2, NULL);
    life_say(undisturbed, 6, 100, 12, &kept);
    life_same_turn(&kept, &after);
    life_close(&control);
    struct restore_check check;
    struct kv_diag diag = {""};
    assert_int_equal(restore_verify(f.rig.life.store, kv_alloc_system(), "chat", &check, &diag),
                     KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "chat"));
    bytes[extent.stored_bytes - 1] ^= 0x10;
    life_disk(f.rig.dir, &extent, bytes, 1);
    assert_int_equal(restore_verify(f.rig.life.store, kv_alloc_system(), "chat", &check, &diag),
                     KV_OK);
    assert_int_equal(check.blocks, f.head.block_count);
    assert_int_equal(check.extents, 1 + check.pages + 8 * check.blocks);
    struct receipt receipt;
    life_wake(&f.rig.life, "chat", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    free(bytes);
    close_fixture(&f);
}

/* Every extent of the head: one bit flipped somewhere in it is found and named. */
static void damage_anywhere_is_found(void **state) {
    (void)state;
    struct fixture f;
    struct testing_random random;
    open_fixture(&f);
    testing_random_init(&random, testing_seed("flip", 11));
    struct record_key keys[] = {record_key_snapshot(f.snapshot), record_key_page(f.head.sinks_page),
                                record_key_page(f.head.page_ids[0]),
                                record_key_block(f.head.lineage, 0),
                                record_key_block(f.head.lineage, 4)};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        struct store_record record;
        assert_int_equal(store_get(f.rig.life.store, keys[i].bytes, keys[i].size, &record, NULL),
                         KV_OK);
        for (uint32_t e = 0; e < record.extent_count; e++) {
            const struct store_extent *extent = &record.extents[e];
            uint8_t *bytes = malloc(extent->stored_bytes);
            assert_non_null(bytes);
            life_disk(f.rig.dir, extent, bytes, 0);
            size_t at = testing_random_below(&random, extent->stored_bytes);
            uint8_t bit = (uint8_t)(1u << testing_random_below(&random, 8));
            bytes[at] ^= bit;
            life_disk(f.rig.dir, extent, bytes, 1);
            struct restore_check check;
            struct kv_diag diag = {""};
            assert_int_equal(
                restore_verify(f.rig.life.store, kv_alloc_system(), "chat", &check, &diag),
                KV_ERR_CORRUPT);
            /* A wake reads what its tiers need, and refuses if this is among them. */
            struct session *session = NULL;
            struct receipt receipt;
            const struct restore_options options = {0};
            enum kv_err err =
                restore_wake(&f.rig.life.source, "chat", &options, &session, &receipt, &diag);
            if (err == KV_OK) {
                enum layout_stream kind = extent->kind;
                assert_true(kind == LAYOUT_KL || kind == LAYOUT_VR2 || kind == LAYOUT_VR1);
                session_drop(session);
            } else {
                assert_int_equal(err, KV_ERR_CORRUPT);
                assert_true(extent->kind != RECORD_KIND_IDS || strstr(diag.text, "token ids"));
            }
            bytes[at] ^= bit;
            life_disk(f.rig.dir, extent, bytes, 1);
            free(bytes);
        }
        store_record_release(f.rig.life.store, &record);
    }
    life_wake(&f.rig.life, "chat", NULL);
    close_fixture(&f);
}

/* They are read beside the planes and lie in no slot. BREAK_IDS_LATE leaves them where they
 * landed. */
static void token_ids_come_with_the_planes(void **state) {
    (void)state;
    struct fixture f;
    struct image image;
    struct receipt receipt;
    struct session_info info;
    struct kv_diag diag = {""};
    open_fixture(&f);
    assert_int_equal(restore_image(f.rig.life.store, kv_alloc_system(), "chat", &image, &diag),
                     KV_OK);
    session_info(life_wake(&f.rig.life, "chat", &receipt), &info);
    assert_int_equal(info.n, image.n);
    assert_memory_equal(info.ids, image.ids, image.n * sizeof *image.ids);
    assert_int_equal(receipt.ram_bytes, 0);
    image_release(&image, kv_alloc_system());
    close_fixture(&f);
}

/* They take longest to unzip, and at the end nothing is read meanwhile. BREAK_PAGES_FIRST reads
 * everything as it lies. */
static void pages_are_read_first(void **state) {
    (void)state;
    struct fixture f;
    struct rest_plan plan = {0};
    struct rest_fetch fetch;
    struct transfer_load *load = NULL;
    struct kv_diag diag = {""};
    open_fixture(&f);
    struct life *life = &f.rig.life;
    assert_int_equal(rest_plan_image(life->store, kv_alloc_system(), "chat", 0, &plan, &diag),
                     KV_OK);
    assert_int_equal(rest_plan_records(life->store, &plan, &diag), KV_OK);
    assert_int_equal(transfer_load_begin(life->engine, &plan.image, TRANSFER_EXACT, &load, &diag),
                     KV_OK);
    assert_int_equal(rest_fetch_begin(&plan, load, &fetch, &diag), KV_OK);
    assert_int_equal(rest_fetch_rest(&plan, load, &fetch, &diag), KV_OK);
    rest_fetch_sort(&fetch);
    size_t pages = 1 + plan.image.page_count;
    assert_true(pages > 2 && fetch.count > pages);
    for (size_t i = 0; i < fetch.count; i++) {
        const struct rest_fetch_item *item = &fetch.items[i];
        assert_int_equal(item->stream == LAYOUT_PAGE || item->stream == LAYOUT_SINKS, i < pages);
        if (i == 0 || i == pages || item->extent->segment != item[-1].extent->segment)
            continue;
        assert_true(item->extent->off > item[-1].extent->off);
    }
    rest_fetch_release(&fetch);
    transfer_load_abandon(load);
    rest_plan_release(&plan);
    close_fixture(&f);
}

/* An older snapshot that stays is read as well: a page that only it has. BREAK_OLDER looks at the
 * head alone. */
static void damage_in_an_older_snapshot_is_found(void **state) {
    (void)state;
    struct fixture f;
    struct store_extent extent;
    struct restore_check check;
    struct kv_diag diag = {""};
    open_fixture(&f);
    struct session *session = life_wake(&f.rig.life, "chat", NULL);
    life_save(&f.rig.life, session, 1);
    struct record_snapshot kept = life_head(&f.rig.life, "chat", NULL);
    life_say(session, 2, 256 * 3, 2, NULL);
    life_save(&f.rig.life, session, 0);
    assert_int_equal(restore_verify(f.rig.life.store, kv_alloc_system(), "chat", &check, &diag),
                     KV_OK);
    assert_int_equal(check.snapshots, 2);
    struct record_snapshot head = life_head(&f.rig.life, "chat", NULL);
    assert_int_equal(check.blocks, head.block_count);
    struct record_key key = record_key_page(kept.page_ids[kept.page_count - 1]);
    life_extent(&f.rig.life, &key, LAYOUT_PAGE, &extent);
    uint8_t *bytes = malloc(extent.stored_bytes);
    assert_non_null(bytes);
    life_disk(f.rig.dir, &extent, bytes, 0);
    bytes[extent.stored_bytes / 2] ^= 4;
    life_disk(f.rig.dir, &extent, bytes, 1);
    assert_int_equal(restore_verify(f.rig.life.store, kv_alloc_system(), "chat", &check, &diag),
                     KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "older snapshot"));
    free(bytes);
    close_fixture(&f);
}

/* --- CASE-09, CASE-14: another model */

static void another_layer_count_names_both(void **state) {
    (void)state;
    struct fixture f;
    open_fixture(&f);
    life_close(&f.rig.life);
    f.rig.options.model_layers = 3;
    life_open(&f.rig.options, &f.rig.life);
    refuse(&f, KV_ERR_MISMATCH, "layer count 2, this model has 3");
    struct session *other = life_session(&f.rig.life, "other", IMAGE_RECIPE_V3);
    life_say(other, 1, 100, 4, NULL);
    close_fixture(&f);
}

static void other_weights_are_refused(void **state) {
    (void)state;
    struct fixture f;
    open_fixture(&f);
    life_close(&f.rig.life);
    f.rig.options.change_tensor_byte = 1;
    life_open(&f.rig.options, &f.rig.life);
    refuse(&f, KV_ERR_MISMATCH, "weights");
    life_close(&f.rig.life);
    f.rig.options.change_tensor_byte = 0;
    life_open(&f.rig.options, &f.rig.life);
    life_wake(&f.rig.life, "chat", NULL);
    close_fixture(&f);
}

/* --- proof */

/* Saves "chat" with a needle that the record calls kept, though nothing answers it. */
static void plant_unanswered(struct fixture *f, int asked_now) {
    struct kv_diag diag = {""};
    struct session_info info;
    struct session *session = life_wake(&f->rig.life, "chat", NULL);
    session_info(session, &info);
    struct image_needle needle = {.key = "key",
                                  .ask = "What is it?",
                                  .answer_prefix = "It is",
                                  .expect = " nothing that noise would say",
                                  .span_count = 1,
                                  .spans = {{IMAGE_USER, 400, 420}},
                                  .kept = 1,
                                  .passed = 1,
                                  .asked_n_kv = asked_now ? info.n_kv : info.n_kv - 1};
    assert_int_equal(transfer_add_needle(session, &needle, &diag), KV_OK);
    life_save(&f->rig.life, session, 0);
    session_drop(session);
}

/* A needle that the record of this very snapshot calls kept must be answered. */
static void an_unanswered_needle_drops_the_session(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    struct session *session = NULL;
    open_fixture(&f);
    plant_unanswered(&f, 1);
    refuse(&f, KV_ERR_PROOF, "needle key");
    /* Without needles the fingerprint alone is asked, and the receipt says so. */
    const struct restore_options options = {.skip_needles = 1};
    struct receipt receipt;
    assert_int_equal(restore_wake(&f.rig.life.source, "chat", &options, &session, &receipt, &diag),
                     KV_OK);
    assert_int_equal(receipt.needles_recorded, 1);
    assert_int_equal(receipt.needles_kept, 1);
    assert_int_equal(receipt.needles_asked, 0);
    close_fixture(&f);
}

/* A record of a shorter session: the longer one may not answer any more, asleep or not. It wakes,
 * and the receipt says that the needle did not pass. */
static void a_needle_outgrown_by_the_session_does_not_lock_it_away(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    struct session *session = NULL;
    struct receipt receipt;
    const struct restore_options options = {0};
    open_fixture(&f);
    plant_unanswered(&f, 0);
    enum kv_err err = restore_wake(&f.rig.life.source, "chat", &options, &session, &receipt, &diag);
    if (err != KV_OK)
        fail_msg("%s", diag.text);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.needles_kept, 1);
    assert_int_equal(receipt.needles_asked, 1);
    assert_int_equal(receipt.needles_passed, 0);
    close_fixture(&f);
}

/* A fingerprint of another memory, under a root that agrees: bytes are right, the proof is not. */
static void another_fingerprint_drops_the_session(void **state) {
    (void)state;
    struct fixture f;
    struct image image;
    struct kv_diag diag = {""};
    uint8_t *bytes = NULL;
    size_t size;
    open_fixture(&f);
    assert_int_equal(restore_image(f.rig.life.store, kv_alloc_system(), "chat", &image, &diag),
                     KV_OK);
    image.fingerprint.logits.bytes[0] ^= 1;
    assert_int_equal(image_encode(&image, kv_alloc_system(), &bytes, &size, &diag), KV_OK);
    struct kv_digest root = image_root(bytes, size);
    life_replace_image(&f.rig.life, f.snapshot, bytes, size, &root);
    refuse(&f, KV_ERR_PROOF, "fingerprint");
    image_release(&image, kv_alloc_system());
    kv_alloc_release(kv_alloc_system(), bytes);
    close_fixture(&f);
}

/* --- the rest of the contract */

static int stop(void *context, uint64_t done, uint64_t all) {
    uint64_t *calls = context;
    assert_true(done > 0 && done <= all);
    return ++*calls < 3;
}

static void refusals_leave_the_engine_as_it_was(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    uint64_t calls = 0;
    open_fixture(&f);
    const struct restore_options stopped = {.progress = stop, .progress_context = &calls};
    struct session *session = NULL;
    struct receipt receipt;
    struct engine_slots before, after;
    engine_slots(f.rig.life.engine, &before);
    assert_int_equal(restore_wake(&f.rig.life.source, "chat", &stopped, &session, &receipt, &diag),
                     KV_ERR_CANCELLED);
    assert_true(calls >= 3);
    const struct faulty_io_plan plan = {
        .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_READ, .at = 5, .error = EIO, .lasting = 1};
    faulty_io_arm(f.rig.faulty, &plan);
    assert_int_equal(restore_wake(&f.rig.life.source, "chat", &(struct restore_options){0},
                                  &session, &receipt, &diag),
                     KV_ERR_IO);
    assert_non_null(strstr(diag.text, strerror(EIO)));
    faulty_io_release(f.rig.faulty);
    engine_slots(f.rig.life.engine, &after);
    assert_int_equal(before.free, after.free);
    life_wake(&f.rig.life, "chat", &receipt);
    assert_int_equal(restore_wake(&f.rig.life.source, "chat", &(struct restore_options){0},
                                  &session, &receipt, &diag),
                     KV_ERR_EXISTS);
    close_fixture(&f);
}

/* CASE-28 in small: the k-th allocation fails, for every k. */
static void no_memory_changes_nothing(void **state) {
    (void)state;
    struct fixture f;
    struct receipt receipt;
    open_fixture(&f);
    struct engine_slots before, after;
    engine_slots(f.rig.life.engine, &before);
    for (uint64_t k = 1; !life_wake_short(&f.rig.life, k, &receipt); k++) {
        engine_slots(f.rig.life.engine, &after);
        assert_int_equal(before.free, after.free);
    }
    close_fixture(&f);
}

static void too_few_slots_say_need_and_have(void **state) {
    (void)state;
    struct fixture f;
    struct restore_plan plan;
    struct kv_diag diag = {""};
    open_fixture(&f);
    assert_int_equal(restore_plan(&f.rig.life.source, "chat", 0, &plan, &diag), KV_OK);
    struct receipt receipt;
    life_wake(&f.rig.life, "chat", &receipt);
    assert_int_equal(plan.slots, receipt.slots);
    assert_int_equal(plan.blocks, receipt.blocks);
    assert_int_equal(plan.pages + 1, receipt.pages);
    uint64_t raw = (uint64_t)plan.blocks * RECORD_IDS_BYTES;
    for (int s = 0; s < LAYOUT_STREAM_COUNT; s++)
        raw += receipt.raw_bytes[s];
    assert_int_equal(plan.raw_bytes, raw);
    life_close(&f.rig.life);
    f.rig.options.engine.slots = 96;
    life_open(&f.rig.options, &f.rig.life);
    refuse(&f, KV_ERR_NO_SLOTS, "slots are needed");
    close_fixture(&f);
}

/* --- promotion. BREAK_READ_IN_STEP reads in the hook, BREAK_PROMOTION_DOUBT gives slots back that
 * the kernel may still write. */

static void promote(struct session *session) {
    const struct image_policy fine = {
        .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {8000, 8000, 8000}};
    struct kv_diag diag = {""};
    if (session_set_policy(session, &fine, &diag) != KV_OK)
        fail_msg("session_set_policy: %s", diag.text);
}

static void promotion_reads_between_steps(void **state) {
    (void)state;
    struct fixture f;
    open_fixture(&f);
    struct session *session = life_wake(&f.rig.life, "chat", NULL);
    faulty_io_arm(f.rig.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_COUNT});
    promote(session);
    assert_true(session_promoting(session));
    assert_int_equal(faulty_io_counts(f.rig.faulty).reads, 0);
    while (engine_apply(f.rig.life.engine))
        ;
    assert_false(session_promoting(session));
    assert_true(faulty_io_counts(f.rig.faulty).reads > 0);
    /* Nothing is left over of what was asked for by a session that is gone. */
    struct engine_slots before, after;
    session_drop(session);
    engine_slots(f.rig.life.engine, &before);
    session = life_wake(&f.rig.life, "chat", NULL);
    promote(session);
    session_drop(session);
    while (engine_apply(f.rig.life.engine))
        ;
    engine_slots(f.rig.life.engine, &after);
    assert_int_equal(before.free, after.free);
    close_fixture(&f);
}

/* Of the leak sanitizer, where it is linked in. */
void __lsan_disable(void) __attribute__((weak));
void __lsan_enable(void) __attribute__((weak));

/* What a late read lands in, slots or memory on the way to them, is kept for ever on purpose. */
static void slots_in_doubt_are_never_given_back(void **state) {
    (void)state;
    struct fixture f;
    struct engine_slots before, after;
    open_fixture(&f);
    life_close(&f.rig.life);
    f.rig.options.deadline_ns = 200000000;
    life_open(&f.rig.options, &f.rig.life);
    engine_slots(f.rig.life.engine, &before);
    struct session *session = life_wake(&f.rig.life, "chat", NULL);
    faulty_io_arm(f.rig.faulty, &(struct faulty_io_plan){
                                    .action = FAULTY_IO_STALL, .ops = FAULTY_IO_READ, .at = 1});
    promote(session);
    if (__lsan_disable != NULL)
        __lsan_disable();
    engine_apply(f.rig.life.engine);
    if (__lsan_enable != NULL)
        __lsan_enable();
    assert_int_equal(faulty_io_counts(f.rig.faulty).stalled, 1);
    assert_true(session_promoting(session));
    session_drop(session);
    while (engine_apply(f.rig.life.engine))
        ;
    engine_slots(f.rig.life.engine, &after);
    assert_true(after.free < before.free);
    faulty_io_release(f.rig.faulty);
    close_fixture(&f);
}

/* --- reading beside a writer */

/* The session goes on and is saved at the k-th allocation of whoever reads. */
struct meddler {
    struct life *life;
    struct session *session;
    uint64_t left, turns;
};

static void *meddle(void *context, size_t bytes, size_t align_bytes) {
    struct meddler *meddler = context;
    const struct kv_alloc *system = kv_alloc_system();
    if (meddler->left != 0 && --meddler->left == 0) {
        life_say(meddler->session, 100 + meddler->turns++, 70, 1, NULL);
        (void)life_save(meddler->life, meddler->session, 0);
    }
    return system->get(system->context, bytes, align_bytes);
}

static void put_back(void *context, void *memory) {
    const struct kv_alloc *system = kv_alloc_system();
    (void)context;
    system->put(system->context, memory);
}

static enum kv_err look_at(struct meddler *meddler, int how, struct kv_diag *diag) {
    const struct kv_alloc alloc = {meddle, put_back, meddler};
    struct restore_source source = meddler->life->source;
    struct restore_check check;
    struct restore_plan plan;
    struct image image;
    source.alloc = &alloc;
    if (how == 0)
        return restore_plan(&source, "chat", 0, &plan, diag);
    if (how == 1)
        return restore_verify(source.store, &alloc, "chat", &check, diag);
    enum kv_err err = restore_image(source.store, &alloc, "chat", &image, diag);
    if (err == KV_OK)
        image_release(&image, &alloc);
    return err;
}

/* A save takes pages away that the head before it had: that is not damage. BREAK_LOOK */
static void a_save_beside_a_reader_is_no_damage(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    struct receipt receipt;
    open_fixture(&f);
    struct meddler meddler = {.life = &f.rig.life,
                              .session = life_wake(&f.rig.life, "chat", &receipt)};
    for (int how = 0; how < 3; how++)
        for (uint64_t k = 1;; k++) {
            meddler.left = k;
            if (look_at(&meddler, how, &diag) != KV_OK)
                fail_msg("reader %d, allocation %llu: %s", how, (unsigned long long)k, diag.text);
            if (meddler.left != 0) {
                meddler.left = 0;
                break;
            }
        }
    assert_true(meddler.turns > 20);
    close_fixture(&f);
}

TESTING_MAIN(
    cmocka_unit_test(a_save_beside_a_reader_is_no_damage),
    cmocka_unit_test(promotion_reads_between_steps),
    cmocka_unit_test(slots_in_doubt_are_never_given_back),
    cmocka_unit_test(a_missing_stream_is_named), cmocka_unit_test(a_missing_record_is_named),
    cmocka_unit_test(a_missing_part_of_the_image_is_named),
    cmocka_unit_test(cuts_and_absurd_numbers_are_refused),
    cmocka_unit_test(foreign_records_are_refused),
    cmocka_unit_test(another_sessions_block_breaks_the_chain),
    cmocka_unit_test(a_flipped_byte_harms_nobody), cmocka_unit_test(damage_anywhere_is_found),
    cmocka_unit_test(pages_are_read_first), cmocka_unit_test(token_ids_come_with_the_planes),
    cmocka_unit_test(damage_in_an_older_snapshot_is_found),
    cmocka_unit_test(another_layer_count_names_both), cmocka_unit_test(other_weights_are_refused),
    cmocka_unit_test(an_unanswered_needle_drops_the_session),
    cmocka_unit_test(a_needle_outgrown_by_the_session_does_not_lock_it_away),
    cmocka_unit_test(another_fingerprint_drops_the_session),
    cmocka_unit_test(refusals_leave_the_engine_as_it_was),
    cmocka_unit_test(no_memory_changes_nothing), cmocka_unit_test(too_few_slots_say_need_and_have))
