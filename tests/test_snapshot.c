/* tests/test_snapshot.c - saving: what is written, what a failure leaves, what dies.
 *
 * Responsible for: snapshot/ over the tiny model with a door that fails, stalls and dies.
 * Not responsible for: the bits of woken sessions (test_life.c), refusals (test_restore.c).
 */
#include "snapshot/snapshot.h"

#include "store/store_batch.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void arm(struct life_rig *f, enum faulty_io_action action, unsigned ops, uint64_t at) {
    const struct faulty_io_plan plan = {
        .action = action, .ops = ops, .at = at, .error = EIO, .lasting = 1, .seed = 1};
    faulty_io_arm(f->faulty, &plan);
}

static uint64_t count_records(struct life *life, const char *prefix, struct kv_digest *all_out) {
    struct store_walk walk = {.prefix = prefix, .prefix_bytes = strlen(prefix)};
    struct kv_digest_state state;
    struct store_record record;
    uint64_t count = 0;
    kv_digest_init(&state);
    while (store_next(life->store, &walk, &record, NULL) == KV_OK) {
        kv_digest_update(&state, record.key, record.key_bytes);
        kv_digest_update(&state, record.value, record.value_bytes);
        for (uint32_t i = 0; i < record.extent_count; i++) {
            const struct store_extent *extent = &record.extents[i];
            const uint64_t numbers[] = {extent->id,          extent->kind, extent->codec,
                                        extent->segment,     extent->off,  extent->raw_bytes,
                                        extent->stored_bytes};
            kv_digest_update(&state, numbers, sizeof numbers);
            kv_digest_update(&state, extent->digest.bytes, KV_DIGEST_BYTES);
        }
        store_record_release(life->store, &record);
        count++;
    }
    if (all_out != NULL)
        *all_out = kv_digest_final(&state);
    return count;
}

static enum kv_err try_save(struct life_rig *f, struct session *session, struct receipt *receipt,
                            struct kv_diag *diag) {
    const struct snapshot_options options = {0};
    return snapshot_save(f->life.snapshot, session, &options, receipt, diag);
}

/* --- bytes */

static uint64_t incremental_bytes_at(uint32_t length) {
    struct life_rig f;
    struct engine_model model;
    struct snapshot_plan plan;
    life_rig_open(&f);
    engine_model(f.life.engine, &model);
    struct session *session = life_session(&f.life, "grow", IMAGE_RECIPE_V3);
    life_say(session, 1, length, 0, NULL);
    life_save(&f.life, session, 0);
    faulty_io_arm(f.faulty, &(struct faulty_io_plan){.ops = FAULTY_IO_CHANGES});
    life_say(session, 2, 256, 0, NULL);
    assert_int_equal(snapshot_plan_save(f.life.snapshot, session, &plan, NULL), KV_OK);
    struct receipt receipt = life_save(&f.life, session, 0);
    struct faulty_io_counts counts = faulty_io_counts(f.faulty);
    uint64_t parts = 12 * layout_slot_bytes(&model.geometry) +
                     layout_meta_frame_bytes(&model.geometry) +
                     4 * layout_dense_bytes(&model.geometry, LAYOUT_PAGE_TOKENS);
    printf("at %u tokens: %llu bytes at the door, receipt %llu, parts %llu, records %llu\n", length,
           (unsigned long long)counts.write_bytes, (unsigned long long)receipt.door_bytes,
           (unsigned long long)parts, (unsigned long long)receipt.record_bytes);
    assert_int_equal(counts.write_bytes, receipt.door_bytes);
    assert_true(receipt.door_bytes <= parts + parts / 20 + receipt.record_bytes);
    assert_true(receipt.door_bytes > parts / 4);
    assert_true(receipt.door_bytes <= plan.bytes_max);
    assert_int_equal(receipt.blocks, 1);
    assert_int_equal(receipt.pages, 4);
    uint64_t bytes = receipt.door_bytes;
    faulty_io_arm(f.faulty, &(struct faulty_io_plan){.ops = FAULTY_IO_CHANGES});
    receipt = life_save(&f.life, session, 0);
    counts = faulty_io_counts(f.faulty);
    printf("without new tokens: %llu bytes\n", (unsigned long long)counts.write_bytes);
    assert_true(counts.write_bytes > 0 && counts.write_bytes <= 65536);
    assert_int_equal(receipt.blocks + receipt.pages, 0);
    life_rig_close(&f);
    return bytes;
}

/* 320 + 256k tokens, so that a turn of 256 seals one block and fills four pages. */
static void a_save_costs_new_tokens_only(void **state) {
    (void)state;
    assert_int_equal(incremental_bytes_at(320 + 256 * 3), incremental_bytes_at(320 + 256 * 27));
}

/* --- failures */

/* BREAK_LOST_BLOCK saves although a block is not durable. */
static void a_failed_write_fails_the_save_and_a_retry_works(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct session_info info;
    struct kv_diag diag = {""};
    struct life_turn kept, woken;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    arm(&f, FAULTY_IO_FAIL, FAULTY_IO_WRITE, 1);
    life_say(session, 1, 900, 0, NULL);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_IO);
    printf("%s\n", diag.text);
    assert_int_equal(receipt.err, KV_ERR_IO);
    assert_non_null(strstr(receipt.reason, strerror(EIO)));
    assert_non_null(strstr(receipt.reason, "chat"));
    assert_int_equal(receipt.door_bytes, 0);
    assert_int_equal(receipt.stored_bytes[LAYOUT_KH], 0);
    session_info(session, &info);
    assert_int_equal(info.blocks_durable, 0);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(transfer_durable(session)->snapshot, 0);
    /* Now only the blocks fail, behind which the save alone would succeed. */
    const struct faulty_io_plan once = {
        .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_WRITE, .at = 1, .error = EIO};
    faulty_io_arm(f.faulty, &once);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_IO);
    assert_non_null(strstr(receipt.reason, "block 0"));
    faulty_io_release(f.faulty);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_OK);
    session_info(session, &info);
    assert_int_equal(info.blocks_durable, info.blocks);
    assert_int_equal(receipt.blocks, info.blocks);
    life_say(session, 2, 40, 8, &kept);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    life_say(session, 2, 40, 8, &woken);
    life_same_turn(&kept, &woken);
    life_rig_close(&f);
}

/* CASE-19: a sync that fails. The store takes nothing more; what was saved before is there. */
static void a_failed_sync_keeps_the_snapshot_before(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 400, 4, NULL);
    struct receipt first = life_save(&f.life, session, 0);
    life_say(session, 2, 50, 0, NULL);
    arm(&f, FAULTY_IO_FAIL, FAULTY_IO_SYNC, 1);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_IO);
    assert_int_equal(receipt.door_bytes, 0);
    assert_int_equal(transfer_durable(session)->snapshot, first.snapshot);
    faulty_io_release(f.faulty);
    life_rig_reopen(&f);
    struct receipt woken;
    life_wake(&f.life, "chat", &woken);
    assert_int_equal(woken.snapshot, first.snapshot);
    assert_int_equal(woken.tokens, first.tokens);
    life_rig_close(&f);
}

static void a_full_budget_fails_the_save_and_nothing_else(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    life_rig_open(&f);
    f.options.bytes_max = 3 << 20;
    life_rig_reopen(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 400, 4, NULL);
    struct receipt first = life_save(&f.life, session, 0);
    enum kv_err err = KV_OK;
    for (int turn = 0; turn < 40 && err == KV_OK; turn++) {
        life_say(session, 10 + (uint64_t)turn, 150, 2, NULL);
        err = try_save(&f, session, &receipt, &diag);
        if (err == KV_OK)
            first = receipt;
    }
    printf("%s\n", diag.text);
    assert_true(err == KV_ERR_LIMIT || err == KV_ERR_NO_SPACE || err == KV_ERR_IO);
    assert_non_null(strstr(diag.text, "need"));
    assert_int_equal(receipt.door_bytes, 0);
    life_say(session, 3, 20, 5, NULL);
    session_drop(session);
    struct receipt woken;
    life_wake(&f.life, "chat", &woken);
    assert_int_equal(woken.snapshot, first.snapshot);
    assert_int_equal(woken.tokens, first.tokens);
    life_rig_close(&f);
}

/* CASE-25 and the stalled disk: decode goes on, a second save is refused, a wake elsewhere sees the
 * last committed version. */
static void a_stalled_write_holds_the_save_only(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    const struct snapshot_options options = {0};
    struct snapshot_ticket *ticket = NULL, *second = NULL;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 4, NULL);
    struct receipt first = life_save(&f.life, session, 0);
    life_say(session, 2, 100, 0, NULL);
    arm(&f, FAULTY_IO_STALL, FAULTY_IO_WRITE, 1);
    assert_int_equal(snapshot_begin(f.life.snapshot, session, &options, &ticket, &diag), KV_OK);
    faulty_io_await_stall(f.faulty);
    struct session_info before, after;
    session_info(session, &before);
    assert_int_equal(before.state, SESSION_SAVING);
    life_say(session, 3, 10, 12, NULL);
    session_info(session, &after);
    assert_true(after.tokens_decoded >= before.tokens_decoded + 11);
    assert_int_equal(snapshot_done(ticket), 0);
    assert_int_equal(snapshot_begin(f.life.snapshot, session, &options, &second, &diag),
                     KV_ERR_BUSY);
    assert_non_null(strstr(diag.text, "chat"));

    /* Removed while a batch is on its way: refused, and the save goes through. */
    assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag), KV_ERR_BUSY);

    struct support_engine_options plain = support_engine_default();
    struct engine *elsewhere = support_engine_tiny(&plain);
    struct restore_source source = f.life.source;
    const struct restore_options wake = {0};
    struct session *old = NULL;
    source.engine = elsewhere;
    assert_int_equal(restore_wake(&source, "chat", &wake, &old, &receipt, &diag), KV_OK);
    assert_int_equal(receipt.snapshot, first.snapshot);
    assert_int_equal(receipt.tokens, first.tokens);
    engine_close(elsewhere);

    faulty_io_release(f.faulty);
    assert_int_equal(snapshot_finish(f.life.snapshot, ticket, &receipt, &diag), KV_OK);
    assert_int_equal(receipt.tokens, before.n);
    session_info(session, &after);
    assert_int_equal(after.state, SESSION_IDLE);
    life_save(&f.life, session, 0);
    struct record_snapshot head = life_head(&f.life, "chat", NULL);
    assert_int_equal(head.n, after.n);
    life_rig_close(&f);
}

/* CASE-18: blocks that find the queue full stay in their session until there is room. */
static void a_full_queue_delays(void **state) {
    (void)state;
    struct life_rig f;
    struct session_info info;
    struct life_turn kept, woken;
    life_rig_open(&f);
    f.options.queue_max = 1;
    life_rig_reopen(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    arm(&f, FAULTY_IO_STALL, FAULTY_IO_WRITE, 1);
    life_say(session, 1, 576, 0, NULL);
    faulty_io_await_stall(f.faulty);
    life_say(session, 2, 256 * 5, 0, NULL);
    session_info(session, &info);
    assert_int_equal(info.blocks, 6);
    assert_int_equal(info.blocks_durable, 0);
    faulty_io_release(f.faulty);
    struct receipt receipt = life_save(&f.life, session, 0);
    session_info(session, &info);
    assert_int_equal(info.blocks_durable, info.blocks);
    assert_int_equal(receipt.blocks, info.blocks);
    life_say(session, 3, 30, 6, &kept);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    life_say(session, 3, 30, 6, &woken);
    life_same_turn(&kept, &woken);
    life_rig_close(&f);
}

/* CASE-26 in small: a session that goes away while it is being saved. */
static void a_session_may_leave_while_it_is_saved(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    const struct snapshot_options options = {0};
    struct snapshot_ticket *ticket = NULL;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    arm(&f, FAULTY_IO_STALL, FAULTY_IO_WRITE, 1);
    life_say(session, 1, 900, 3, NULL);
    struct kv_digest resident = life_resident(session);
    assert_int_equal(snapshot_begin(f.life.snapshot, session, &options, &ticket, &diag), KV_OK);
    faulty_io_await_stall(f.faulty);
    /* It goes on, its request is cancelled in the middle of a prefill, and then it leaves. */
    uint32_t ids[700], count = 0;
    struct engine_event events[8];
    support_engine_ids(9, 200, ids, 700);
    assert_int_equal(session_feed(session, ids, 700, IMAGE_USER, &diag), KV_OK);
    assert_int_equal(engine_step(f.life.engine, events, &count, &diag), KV_OK);
    session_cancel(session);
    support_engine_run(f.life.engine);
    session_drop(session);
    /* Slots are asked for at once: blocks under way must not be among them. */
    struct session *other = life_session(&f.life, "other", IMAGE_RECIPE_V3);
    life_say(other, 2, 900, 3, NULL);
    faulty_io_release(f.faulty);
    assert_int_equal(snapshot_finish(f.life.snapshot, ticket, &receipt, &diag), KV_OK);
    session = life_wake(&f.life, "chat", NULL);
    struct kv_digest woken = life_resident(session);
    assert_memory_equal(resident.bytes, woken.bytes, KV_DIGEST_BYTES);
    life_rig_close(&f);
}

/* --- which records live */

static void removal_leaves_nothing(void **state) {
    (void)state;
    struct life_rig f;
    struct kv_diag diag = {""};
    struct kv_digest before, after;
    life_rig_open(&f);
    struct session *keep = life_session(&f.life, "keep", IMAGE_RECIPE_V3);
    life_say(keep, 1, 700, 2, NULL);
    life_sleep(&f.life, keep);
    uint64_t records = count_records(&f.life, "", &before);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 2, NULL);
    life_save(&f.life, session, 1);
    life_say(session, 2, 300, 2, NULL);
    life_save(&f.life, session, 0);
    life_say(session, 3, 20, 2, NULL);
    life_save(&f.life, session, 1);
    struct snapshot_entry entry;
    assert_int_equal(snapshot_find(f.life.store, kv_alloc_system(), "chat", &entry, &diag), KV_OK);
    assert_int_equal(entry.snapshot_count, 2);
    assert_int_equal(count_records(&f.life, "s", NULL), 3);
    /* Rebuilt from the segments alone, the index is the same record for record. */
    uint64_t all = count_records(&f.life, "", &after);
    struct kv_digest rebuilt;
    char command[TESTING_PATH_BYTES + 32];
    life_close(&f.life);
    snprintf(command, sizeof command, "rm -r '%s/index'", f.dir);
    assert_int_equal(system(command), 0);
    life_open(&f.options, &f.life);
    assert_int_equal(count_records(&f.life, "", &rebuilt), all);
    assert_memory_equal(after.bytes, rebuilt.bytes, KV_DIGEST_BYTES);

    assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag), KV_OK);
    assert_int_equal(count_records(&f.life, "", &after), records);
    assert_memory_equal(before.bytes, after.bytes, KV_DIGEST_BYTES);
    assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag),
                     KV_ERR_NOT_FOUND);
    life_refuse(&f.life, "chat", KV_ERR_NOT_FOUND, &diag);
    life_close(&f.life);
    assert_int_equal(system(command), 0);
    life_open(&f.options, &f.life);
    assert_int_equal(count_records(&f.life, "", &rebuilt), records);
    assert_memory_equal(before.bytes, rebuilt.bytes, KV_DIGEST_BYTES);
    life_wake(&f.life, "keep", NULL);
    life_rig_close(&f);
}

/* Pages that an explicit snapshot shares with later ones live until nothing uses them.
 * BREAK_PAGE_USES does not count. */
static void pages_are_counted(void **state) {
    (void)state;
    struct life_rig f;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 64 + 150, 0, NULL); /* sinks, two full pages, one of 22 tokens */
    life_save(&f.life, session, 1);
    assert_int_equal(count_records(&f.life, "p", NULL), 4);
    life_say(session, 2, 10, 0, NULL); /* the last page grows: one new page */
    life_save(&f.life, session, 0);
    assert_int_equal(count_records(&f.life, "p", NULL), 5);
    life_say(session, 3, 10, 0, NULL); /* the turn's own page is replaced */
    life_save(&f.life, session, 0);
    assert_int_equal(count_records(&f.life, "p", NULL), 5);
    assert_int_equal(count_records(&f.life, "s", NULL), 2);
    life_save(&f.life, session, 0);
    assert_int_equal(count_records(&f.life, "p", NULL), 5);
    /* The window moves on; what the explicit snapshot shows is still all there. */
    life_say(session, 4, 256 * 2, 0, NULL);
    life_save(&f.life, session, 0);
    struct record_snapshot head = life_head(&f.life, "chat", NULL);
    assert_int_equal(count_records(&f.life, "p", NULL), 4 + head.page_count);
    life_rig_close(&f);
}

/* Invariant 8: blocks written through in a life that was not saved are gone after the next.
 * BREAK_TRIM leaves them. */
static void blocks_of_an_unsaved_life_are_trimmed(void **state) {
    (void)state;
    struct life_rig f;
    struct life_turn kept, woken;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 0, NULL);
    life_save(&f.life, session, 0);
    assert_int_equal(count_records(&f.life, "b", NULL), 2);
    life_say(session, 2, 256 * 4, 0, NULL);
    snapshot_drain(f.life.snapshot);
    assert_int_equal(count_records(&f.life, "b", NULL), 6);
    session_drop(session);
    life_rig_reopen(&f);
    session = life_wake(&f.life, "chat", NULL);
    life_say(session, 3, 256, 0, NULL);
    snapshot_drain(f.life.snapshot);
    assert_int_equal(count_records(&f.life, "b", NULL), 3);
    life_save(&f.life, session, 0);
    life_say(session, 4, 30, 6, &kept);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    life_say(session, 4, 30, 6, &woken);
    life_same_turn(&kept, &woken);
    /* A save without a new block trims as well. */
    life_say(session, 5, 256 * 2, 0, NULL);
    snapshot_drain(f.life.snapshot);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    life_save(&f.life, session, 0);
    assert_int_equal(count_records(&f.life, "b", NULL), 3);
    life_rig_close(&f);
}

/* Blocks of a life that was dropped become durable after the session was woken again: they are the
 * earlier life's, and the woken one must not count them as its own. BREAK_EARLIER_LIFE does. */
static void late_blocks_of_an_earlier_life_are_not_counted(void **state) {
    (void)state;
    struct life_rig f;
    struct life_turn kept, woken;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 320 + 256 * 2, 0, NULL);
    life_save(&f.life, session, 0);
    arm(&f, FAULTY_IO_STALL, FAULTY_IO_WRITE, 1);
    life_say(session, 2, 256 * 2, 0, NULL);
    faulty_io_await_stall(f.faulty);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    faulty_io_release(f.faulty);
    snapshot_drain(f.life.snapshot);
    assert_int_equal(count_records(&f.life, "b", NULL), 4);
    assert_int_equal(transfer_durable(session)->block_count, 2);
    life_say(session, 3, 256 * 2, 0, NULL);
    life_save(&f.life, session, 0);
    assert_int_equal(transfer_durable(session)->block_count, 4);
    life_say(session, 4, 30, 6, &kept);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    life_say(session, 4, 30, 6, &woken);
    life_same_turn(&kept, &woken);
    life_rig_close(&f);
}

/* A save that was under way when its session was dropped and woken again moves the head all the
 * same. The woken session is then of the past: it must write nothing over blocks of that head.
 * BREAK_PAST does. */
static void a_session_of_the_past_writes_nothing(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    const struct snapshot_options options = {0};
    struct snapshot_ticket *ticket = NULL;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 320 + 256 * 2, 0, NULL);
    life_save(&f.life, session, 0);
    life_say(session, 2, 256 * 2, 0, NULL);
    snapshot_drain(f.life.snapshot);
    arm(&f, FAULTY_IO_STALL, FAULTY_IO_WRITE, 1);
    assert_int_equal(snapshot_begin(f.life.snapshot, session, &options, &ticket, &diag), KV_OK);
    faulty_io_await_stall(f.faulty);
    session_drop(session);
    session = life_wake(&f.life, "chat", NULL);
    faulty_io_release(f.faulty);
    assert_int_equal(snapshot_finish(f.life.snapshot, ticket, &receipt, &diag), KV_OK);
    life_say(session, 3, 256 * 3, 0, NULL);
    snapshot_drain(f.life.snapshot);
    struct receipt late;
    assert_int_equal(try_save(&f, session, &late, &diag), KV_ERR_BUSY);
    assert_non_null(strstr(diag.text, "wake it again"));
    session_drop(session);
    struct receipt woken;
    life_wake(&f.life, "chat", &woken);
    assert_int_equal(woken.snapshot, receipt.snapshot);
    assert_int_equal(woken.blocks, 4);
    life_rig_close(&f);
}

/* Blocks of two sessions in one batch, and one of them was removed from the store: the other's are
 * written all the same. BREAK_ONE_FOR_ALL gives up both. */
static void one_session_does_not_hold_up_another(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    life_rig_open(&f);
    struct session *gone = life_session(&f.life, "gone", IMAGE_RECIPE_V3);
    life_say(gone, 1, 320 + 256, 0, NULL);
    life_sleep(&f.life, gone);
    gone = life_wake(&f.life, "gone", NULL);
    struct session *stays = life_session(&f.life, "stays", IMAGE_RECIPE_V3);
    struct session *plug = life_session(&f.life, "plug", IMAGE_RECIPE_V3);
    assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), "gone", &diag), KV_OK);
    arm(&f, FAULTY_IO_STALL, FAULTY_IO_WRITE, 1);
    life_say(plug, 2, 320 + 256, 0, NULL);
    faulty_io_await_stall(f.faulty);
    life_say(gone, 3, 256 * 2, 0, NULL);
    life_say(stays, 4, 320 + 256 * 2, 0, NULL);
    faulty_io_release(f.faulty);
    snapshot_drain(f.life.snapshot);
    engine_apply(f.life.engine);
    struct session_info info;
    session_info(stays, &info);
    assert_int_equal(info.blocks, 2);
    assert_int_equal(info.blocks_durable, 2);
    assert_int_equal(try_save(&f, gone, &receipt, &diag), KV_ERR_NOT_FOUND);
    assert_non_null(strstr(diag.text, "gone"));
    life_save(&f.life, stays, 0);
    life_save(&f.life, plug, 0);
    life_rig_close(&f);
}

static void what_was_never_saved_goes_at_the_next_open(void **state) {
    (void)state;
    struct life_rig f;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 900, 0, NULL);
    snapshot_drain(f.life.snapshot);
    assert_int_equal(count_records(&f.life, "b", NULL), 2);
    life_rig_reopen(&f);
    assert_int_equal(count_records(&f.life, "", NULL), 0);
    life_rig_close(&f);
}

/* BREAK_FULL_STORE cannot be opened, so that not even what was saved can be woken. */
static void a_full_store_opens_with_what_was_never_saved(void **state) {
    (void)state;
    struct life_rig f;
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 100, 0, NULL);
    life_save(&f.life, session, 0);
    session = life_session(&f.life, "unsaved", IMAGE_RECIPE_V3);
    life_say(session, 2, 900, 0, NULL);
    snapshot_drain(f.life.snapshot);
    struct faulty_io_plan full = {
        .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_WRITE, .at = 1, .error = ENOSPC, .lasting = 1};
    faulty_io_arm(f.faulty, &full);
    life_rig_reopen(&f);
    assert_true(faulty_io_counts(f.faulty).hits > 0);
    assert_int_equal(count_records(&f.life, "b", NULL), 2);
    life_wake(&f.life, "chat", NULL);
    faulty_io_release(f.faulty);
    life_rig_reopen(&f);
    assert_int_equal(count_records(&f.life, "b", NULL), 0);
    life_rig_close(&f);
}

/* Invariant 7. BREAK_HEAD moves whatever head is stored. */
static void a_name_is_not_taken_over(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 100, 2, NULL);
    struct receipt first = life_sleep(&f.life, session);
    session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 2, 100, 2, NULL);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_EXISTS);
    session_drop(session);
    struct receipt woken;
    session = life_wake(&f.life, "chat", &woken);
    assert_int_equal(woken.snapshot, first.snapshot);
    /* Removed while resident: the save must not bring half of it back. */
    life_say(session, 3, 30, 0, NULL);
    assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), "chat", &diag), KV_OK);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_NOT_FOUND);
    assert_int_equal(count_records(&f.life, "", NULL), 0);
    life_rig_close(&f);
}

static void nothing_and_half_read_prompts_are_not_saved(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    uint32_t ids[300];
    life_rig_open(&f);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_INVALID);
    support_engine_ids(1, 256, ids, 300);
    assert_int_equal(session_feed(session, ids, 300, IMAGE_USER, &diag), KV_OK);
    assert_int_equal(try_save(&f, session, &receipt, &diag), KV_ERR_BUSY);
    assert_int_equal(receipt.err, KV_ERR_BUSY);
    life_rig_close(&f);
}

/* CASE-31, CASE-32: names come back byte for byte; the rest is refused before any open. */
static int collect(void *context, const struct snapshot_entry *entry) {
    char *all = context;
    size_t used = strlen(all);
    snprintf(all + used, 1024 - used, "%s\n", entry->head.name);
    return 1;
}

static void names_round_trip(void **state) {
    (void)state;
    static const char *const good[] = {"Привет",    "会話",       "محادثة", "☕🙂",
                                       "n\xc3\xa9", "ne\xcc\x81", "a.b"};
    static const char *const bad[] = {"", "../x", "/etc/x", "a/b", "tab\there", "\xff\xfe"};
    struct life_rig f;
    struct kv_diag diag = {""};
    struct snapshot_entry entry;
    char longest[IMAGE_NAME_BYTES_MAX + 2];
    life_rig_open(&f);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct session *session = life_session(&f.life, good[i], IMAGE_RECIPE_V3);
        life_say(session, i, 40, 0, NULL);
        life_sleep(&f.life, session);
    }
    char all[1024] = "";
    assert_int_equal(snapshot_list(f.life.store, kv_alloc_system(), collect, all, &diag), KV_OK);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct session_info info;
        assert_non_null(strstr(all, good[i]));
        session_info(life_wake(&f.life, good[i], NULL), &info);
        assert_string_equal(info.name, good[i]);
        assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), good[i], &diag), KV_OK);
    }
    memset(longest, 'x', sizeof longest);
    longest[IMAGE_NAME_BYTES_MAX + 1] = 0;
    for (size_t i = 0; i <= sizeof bad / sizeof bad[0]; i++) {
        const char *name = i == sizeof bad / sizeof bad[0] ? longest : bad[i];
        assert_int_equal(snapshot_find(f.life.store, kv_alloc_system(), name, &entry, &diag),
                         KV_ERR_INVALID);
        assert_int_equal(snapshot_remove(f.life.store, kv_alloc_system(), name, &diag),
                         KV_ERR_INVALID);
        life_refuse(&f.life, name, KV_ERR_INVALID, &diag);
        assert_true(diag.text[0] != 0);
    }
    assert_int_equal(count_records(&f.life, "", NULL), 0);
    life_rig_close(&f);
}

/* --- CASE-16: killed at every write of a save */

struct killed {
    uint64_t at; /* 0 only counts */
    int pipe;
};

static void save_and_die(struct life_rig *f, const struct killed *killed) {
    f->faulty = faulty_io_make(io_best_door());
    f->options.door = faulty_io_door(f->faulty);
    life_open(&f->options, &f->life);
    struct session *session = life_wake(&f->life, "chat", NULL);
    const struct faulty_io_plan plan = {.action = killed->at == 0 ? FAULTY_IO_COUNT
                                                                  : FAULTY_IO_TEAR_AND_DIE,
                                        .ops = FAULTY_IO_CHANGES,
                                        .at = killed->at,
                                        .seed = killed->at};
    faulty_io_arm(f->faulty, &plan);
    life_say(session, 2, 200, 3, NULL);
    life_save(&f->life, session, 0);
    uint64_t ops = faulty_io_counts(f->faulty).ops;
    if (write(killed->pipe, &ops, sizeof ops) != sizeof ops)
        _exit(1);
    _exit(0);
}

static uint64_t run_killed(const char *base, uint64_t at, struct life_rig *f) {
    char command[2 * TESTING_PATH_BYTES + 32];
    uint64_t ops = 0;
    int ends[2];
    testing_temp_dir(f->dir);
    f->options = life_default(f->dir);
    snprintf(command, sizeof command, "cp -a '%s/.' '%s'", base, f->dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const struct killed killed = {at, ends[1]};
        save_and_die(f, &killed);
    }
    close(ends[1]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), at == 0 ? 0 : FAULTY_IO_EXIT_STATUS);
    if (at == 0)
        assert_int_equal(read(ends[0], &ops, sizeof ops), sizeof ops);
    close(ends[0]);
    return ops;
}

static void killed_anywhere_it_is_old_or_new(void **state) {
    (void)state;
    struct life_rig base, f;
    struct receipt old, woken;
    struct kv_diag diag = {""};
    uint64_t olds = 0, news = 0;
    life_rig_open(&base);
    struct session *session = life_session(&base.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 420, 3, NULL);
    old = life_save(&base.life, session, 0);
    life_rig_close(&base);
    uint64_t ops = run_killed(base.dir, 0, &f);
    life_open(&f.options, &f.life);
    life_wake(&f.life, "chat", &woken);
    uint64_t new_tokens = woken.tokens;
    life_close(&f.life);
    assert_int_equal(new_tokens, old.tokens + 203);
    printf("%llu changes in one turn and its save\n", (unsigned long long)ops);
    assert_true(ops >= 5);
    for (uint64_t at = 1; at <= ops; at++) {
        (void)run_killed(base.dir, at, &f);
        struct restore_check check;
        life_open(&f.options, &f.life);
        life_wake(&f.life, "chat", &woken);
        assert_int_equal(woken.fingerprint, RECEIPT_BITS_EQUAL);
        assert_true(woken.tokens == old.tokens || woken.tokens == new_tokens);
        olds += woken.tokens == old.tokens;
        news += woken.tokens == new_tokens;
        assert_int_equal(restore_verify(f.life.store, kv_alloc_system(), "chat", &check, &diag),
                         KV_OK);
        life_close(&f.life);
    }
    printf("%llu old, %llu new\n", (unsigned long long)olds, (unsigned long long)news);
    assert_true(olds > 0);
}

TESTING_MAIN(cmocka_unit_test(a_save_costs_new_tokens_only),
             cmocka_unit_test(a_failed_write_fails_the_save_and_a_retry_works),
             cmocka_unit_test(a_failed_sync_keeps_the_snapshot_before),
             cmocka_unit_test(a_full_budget_fails_the_save_and_nothing_else),
             cmocka_unit_test(a_stalled_write_holds_the_save_only),
             cmocka_unit_test(a_full_queue_delays),
             cmocka_unit_test(a_session_may_leave_while_it_is_saved),
             cmocka_unit_test(removal_leaves_nothing), cmocka_unit_test(pages_are_counted),
             cmocka_unit_test(blocks_of_an_unsaved_life_are_trimmed),
             cmocka_unit_test(late_blocks_of_an_earlier_life_are_not_counted),
             cmocka_unit_test(a_session_of_the_past_writes_nothing),
             cmocka_unit_test(one_session_does_not_hold_up_another),
             cmocka_unit_test(what_was_never_saved_goes_at_the_next_open),
             cmocka_unit_test(a_full_store_opens_with_what_was_never_saved),
             cmocka_unit_test(a_name_is_not_taken_over),
             cmocka_unit_test(nothing_and_half_read_prompts_are_not_saved),
             cmocka_unit_test(names_round_trip), cmocka_unit_test(killed_anywhere_it_is_old_or_new))
