/* tests/test_ahead.c - blocks made ready ahead of their batch, by helpers of the background writer.
 *
 * Responsible for: what is stored is the same however many helpers there are, on both sides of the
 * wall; several of them at one block, and pages beside the proof; what fails in a helper or behind
 * it; zip decided in the order of the puts.
 * Not responsible for: saves and faults without helpers (test_snapshot.c).
 * Broken twins: BREAK_AHEAD_ORDER keeps whatever was zipped ahead; BREAK_HELP_SHARED shares out one
 * helper's time among all; BREAK_AHEAD_ALONE leaves a block to one helper; BREAK_PAGES_LATE
 * gives pages to helpers behind the proof; BREAK_PROOF_FAILED saves what could not be proven.
 */
#include "engine/engine_inner.h"
#include "snapshot/snap_ahead.h"
#include "store/codec.h"
#include "store/store_pack.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* --- the order of puts */

enum { EXTENTS = 64, GROUP = 8, BYTES = 20000 };

/* Runs of text between runs of noise, of one kind. */
static void fill(unsigned index, uint8_t bytes[BYTES]) {
    struct testing_random random;
    testing_random_init(&random, 900 + index);
    for (size_t i = 0; i < BYTES; i++)
        bytes[i] = (uint8_t)(index / 5 % 2 ? testing_random_u64(&random) : i / 64 + index);
}

/* Puts extents [first, first + GROUP) in a batch; with a packer all of them are made ready first.
 */
static void put_group(struct store *store, struct store_packer *packer, unsigned first) {
    static uint8_t bytes[GROUP][BYTES];
    static uint8_t room[GROUP][2 * BYTES];
    struct iovec pieces[GROUP];
    struct store_part parts[GROUP];
    struct store_packed packed[GROUP];
    struct store_batch *batch = NULL;
    struct kv_diag diag = {""};
    for (unsigned i = 0; i < GROUP; i++) {
        size_t used = 0;
        fill(first + i, bytes[i]);
        pieces[i] = (struct iovec){bytes[i], BYTES};
        parts[i] = (struct store_part){2, STORE_ZSTD, &pieces[i], 1, 0};
        assert_true(store_pack_room(&parts[i]) <= sizeof room[i]);
        if (packer != NULL)
            assert_int_equal(store_pack(packer, &parts[i], room[i], &packed[i], &used), KV_OK);
        assert_true(used < BYTES);
    }
    assert_int_equal(store_batch_begin(store, 0, &batch, &diag), KV_OK);
    for (unsigned i = 0; i < GROUP; i++) {
        char key[16];
        snprintf(key, sizeof key, "e%03u", first + i);
        const struct store_put put = {
            .key = key, .key_bytes = 4, .value = "", .parts = &parts[i], .part_count = 1};
        assert_int_equal(
            store_batch_put_packed(batch, &put, packer != NULL ? &packed[i] : NULL, &diag), KV_OK);
    }
    assert_int_equal(store_batch_commit(batch, NULL, &diag), KV_OK);
}

static char *store_of(int ahead) {
    char dir[TESTING_PATH_BYTES];
    struct store_packer *packer = NULL;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    if (ahead)
        assert_int_equal(store_packer_make(store, &packer), KV_OK);
    for (unsigned first = 0; first < EXTENTS; first += GROUP)
        put_group(store, packer, first);
    char *dump = support_store_dump(store);
    unsigned zipped = 0;
    for (unsigned i = 0; i < EXTENTS; i++) {
        char key[16];
        struct store_record record;
        snprintf(key, sizeof key, "e%03u", i);
        assert_int_equal(store_get(store, key, 4, &record, NULL), KV_OK);
        zipped += record.extents[0].codec == CODEC_ZSTD;
        store_record_release(store, &record);
    }
    printf("%s: %u of %u zipped\n", ahead ? "ahead" : "in the put", zipped, EXTENTS);
    assert_true(zipped > 4 && zipped < EXTENTS / 2);
    store_packer_drop(packer);
    store_close(store);
    return dump;
}

/* BREAK_AHEAD_ORDER */
static void zip_is_decided_in_the_order_of_puts(void **state) {
    (void)state;
    char *plain = store_of(0);
    char *ahead = store_of(1);
    assert_string_equal(plain, ahead);
    free(plain);
    free(ahead);
}

/* --- sessions */

enum { HELPERS = 3, TOKENS = 320 + 256 * 12, MANY = 320 + 256 * (HELPERS + SNAP_AHEAD_MORE + 3) };

static void open_rig(struct life_rig *f, uint32_t helpers, int wall) {
    support_wall_set(wall);
    life_rig_open(f);
    f->options.helpers = helpers;
    f->options.queue_max = 128;
    life_rig_reopen(f);
    assert_int_equal(transfer_mapped(f->life.engine), !wall);
}

/* Over kind, codec, lengths and digest of every extent of every block, in order. */
static struct kv_digest blocks_of(struct life *life, uint32_t *zipped_out) {
    struct store_walk walk = {.prefix = "b", .prefix_bytes = 1};
    struct kv_digest_state state;
    struct store_record record;
    uint32_t blocks = 0;
    *zipped_out = 0;
    kv_digest_init(&state);
    while (store_next(life->store, &walk, &record, NULL) == KV_OK) {
        for (uint32_t i = 0; i < record.extent_count; i++) {
            const struct store_extent *extent = &record.extents[i];
            const uint64_t numbers[] = {extent->kind, extent->codec, extent->raw_bytes,
                                        extent->stored_bytes};
            kv_digest_update(&state, numbers, sizeof numbers);
            kv_digest_update(&state, extent->digest.bytes, KV_DIGEST_BYTES);
            *zipped_out += extent->codec != CODEC_RAW;
        }
        store_record_release(life->store, &record);
        blocks++;
    }
    assert_int_equal(blocks, (TOKENS - 320) / 256);
    return kv_digest_final(&state);
}

static void helpers_change_nothing(void **state) {
    (void)state;
    struct kv_digest first = {{0}};
    for (int way = 0; way < 4; way++) {
        struct life_rig f;
        struct life_turn kept, woken;
        struct receipt receipt;
        uint32_t zipped;
        open_rig(&f, way % 2 ? HELPERS : 0, way / 2);
        struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
        life_say(session, 1, TOKENS, 0, NULL);
        receipt = life_sleep(&f.life, session);
        assert_int_equal(receipt.blocks, (TOKENS - 320) / 256);
        assert_true(receipt.stage_ns[RECEIPT_ZIP] > 0);
        assert_true(receipt.blocked_ns > 0 && receipt.blocked_ns < receipt.wall_ns);
        assert_int_equal(receipt.stage_ns[RECEIPT_COPY] != 0, way / 2);
        struct kv_digest digest = blocks_of(&f.life, &zipped);
        assert_true(zipped > 0);
        if (way == 0)
            first = digest;
        assert_memory_equal(&digest, &first, sizeof digest);
        session = life_wake(&f.life, "chat", &receipt);
        life_say(session, 2, 40, 3, &woken);
        session_drop(session);
        session = life_session(&f.life, "other", IMAGE_RECIPE_V3);
        life_say(session, 1, TOKENS, 0, NULL);
        life_say(session, 2, 40, 3, &kept);
        life_same_turn(&kept, &woken);
        life_rig_close(&f);
    }
}

/* While another has the writer, helpers make blocks ready, and no more than they may hold. */
static void helpers_run_ahead_and_stop(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    open_rig(&f, HELPERS, 1);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    snapshot_writer_take(f.life.snapshot);
    life_say(session, 1, MANY, 0, NULL);
    uint64_t end_ns = kv_clock_now_ns(kv_clock_system()) + 20000000000u;
    while (snap_ahead_held(f.life.snapshot->ahead) < HELPERS + SNAP_AHEAD_MORE)
        assert_true(kv_clock_now_ns(kv_clock_system()) < end_ns);
    snapshot_writer_give(f.life.snapshot);
    receipt = life_sleep(&f.life, session);
    assert_int_equal(receipt.blocks, (MANY - 320) / 256);
    assert_int_equal(snap_ahead_held(f.life.snapshot->ahead), 0);
    life_rig_close(&f);
}

/* A helper whose copy fails leaves the block to the spill thread. */
static void a_failed_copy_is_done_again(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    open_rig(&f, HELPERS, 1);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    support_wall_break(SUPPORT_WALL_COPY_OUT);
    life_say(session, 1, TOKENS, 0, NULL);
    receipt = life_sleep(&f.life, session);
    assert_int_equal(receipt.blocks, (TOKENS - 320) / 256);
    assert_non_null(life_wake(&f.life, "chat", &receipt));
    life_rig_close(&f);
}

/* Blocks that were ready when the disk refused them are written later all the same. */
static void a_failed_write_leaves_nothing_behind(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    const struct snapshot_options options = {0};
    const struct faulty_io_plan plan = {
        .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_WRITE, .at = 3, .error = ENOSPC, .lasting = 1};
    open_rig(&f, HELPERS, 1);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    faulty_io_arm(f.faulty, &plan);
    life_say(session, 1, TOKENS, 0, NULL);
    assert_int_not_equal(snapshot_save(f.life.snapshot, session, &options, &receipt, &diag), KV_OK);
    printf("%s\n", diag.text);
    faulty_io_release(f.faulty);
    receipt = life_sleep(&f.life, session);
    assert_int_equal(receipt.blocks, (TOKENS - 320) / 256);
    assert_non_null(life_wake(&f.life, "chat", &receipt));
    life_rig_close(&f);
}

/* Goes on by a millisecond whenever it is looked at. */
static uint64_t tick(void *context) {
    return atomic_fetch_add((_Atomic uint64_t *)context, 1000000) + 1000000;
}

/* A page that is zipped by one helper takes its time, not a third of it. BREAK_HELP_SHARED */
static void the_time_of_one_helper_is_not_shared_out(void **state) {
    (void)state;
    struct life_rig f;
    _Atomic uint64_t ticks = 0;
    const struct kv_clock clock = {tick, tick, &ticks};
    const struct snapshot_options options = {0};
    struct snapshot_ticket *ticket = NULL;
    struct kv_diag diag = {""};
    struct receipt receipt;
    open_rig(&f, HELPERS, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 400, 0, NULL);
    assert_int_equal(snapshot_save(f.life.snapshot, session, &options, &receipt, &diag), KV_OK);
    life_say(session, 2, 1, 0, NULL);
    snapshot_writer_take(f.life.snapshot);
    f.life.snapshot->clock = &clock;
    assert_int_equal(snapshot_begin(f.life.snapshot, session, &options, &ticket, &diag), KV_OK);
    uint64_t end_ns = kv_clock_now_ns(kv_clock_system()) + 20000000000u;
    while (snap_ahead_held(f.life.snapshot->ahead) == 0)
        assert_true(kv_clock_now_ns(kv_clock_system()) < end_ns);
    snapshot_writer_give(f.life.snapshot);
    assert_int_equal(snapshot_finish(f.life.snapshot, ticket, &receipt, &diag), KV_OK);
    f.life.snapshot->clock = kv_clock_system();
    assert_int_equal(receipt.pages, 1);
    assert_true(receipt.stage_ns[RECEIPT_ZIP] >= 1000000);
    life_rig_close(&f);
}

/* --- several helpers at one block */

/* A clock at which helpers wait until two of them have looked at it at the same time. */
struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t come;
    pthread_t main, spill, first;
    int count; /* of helpers that were there */
};

/* At most 10 s; the lock is held. */
static void await_two(struct meeting *meeting) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    while (meeting->count < 2 &&
           pthread_cond_timedwait(&meeting->come, &meeting->lock, &until) == 0)
        ;
}

static uint64_t meet(void *context) {
    struct meeting *meeting = context;
    const pthread_t self = pthread_self();
    if (!pthread_equal(self, meeting->main) && !pthread_equal(self, meeting->spill)) {
        pthread_mutex_lock(&meeting->lock);
        if (meeting->count == 0)
            meeting->first = self;
        if (meeting->count == 0 || (meeting->count == 1 && !pthread_equal(self, meeting->first)))
            meeting->count++;
        pthread_cond_broadcast(&meeting->come);
        await_two(meeting);
        pthread_mutex_unlock(&meeting->lock);
    }
    return kv_clock_now_ns(kv_clock_system());
}

/* One block alone, and more than one helper has a part in it. BREAK_AHEAD_ALONE */
static void helpers_share_one_block(void **state) {
    (void)state;
    struct life_rig f;
    struct meeting meeting = {.lock = PTHREAD_MUTEX_INITIALIZER,
                              .come = PTHREAD_COND_INITIALIZER,
                              .main = pthread_self()};
    const struct kv_clock clock = {meet, meet, &meeting};
    struct receipt receipt;
    open_rig(&f, HELPERS, 0);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    meeting.spill = f.life.snapshot->thread;
    f.life.snapshot->clock = &clock;
    snapshot_writer_take(f.life.snapshot);
    life_say(session, 1, 320 + 256, 0, NULL);
    pthread_mutex_lock(&meeting.lock);
    await_two(&meeting);
    pthread_mutex_unlock(&meeting.lock);
    assert_int_equal(snap_ahead_held(f.life.snapshot->ahead), 1);
    snapshot_writer_give(f.life.snapshot);
    assert_int_equal(meeting.count, 2);
    receipt = life_sleep(&f.life, session);
    f.life.snapshot->clock = kv_clock_system();
    assert_int_equal(receipt.blocks, 1);
    assert_non_null(life_wake(&f.life, "chat", &receipt));
    life_rig_close(&f);
}

/* --- pages, beside the proof */

/* What the hook of the engine knows, which has another context. */
static struct snapshot *between;
static uint32_t between_held;

/* Between two pieces of the proof: until helpers have begun with a page, at most 10 s. */
static int look_at_helpers(void *context, int small) {
    uint64_t end_ns = kv_clock_now_ns(kv_clock_system()) + 10000000000u;
    (void)context;
    while (small && between_held == 0 && kv_clock_now_ns(kv_clock_system()) < end_ns)
        between_held = snap_ahead_held(between->ahead);
    return 0;
}

/* Helpers zip pages while the session is asked. When it cannot be proven it is not saved, and
 * nothing is left of what was made ready: as the store was, so it stays. BREAK_PAGES_LATE,
 * BREAK_PROOF_FAILED */
static void pages_are_zipped_beside_the_proof(void **state) {
    (void)state;
    struct life_rig f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    const struct snapshot_options options = {0};
    open_rig(&f, HELPERS, 1);
    struct session *session = life_session(&f.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, 300, 0, NULL);
    receipt = life_save(&f.life, session, 0);
    uint64_t head = receipt.snapshot;
    life_say(session, 2, 5, 0, NULL);
    for (int fails = 1; fails >= 0; fails--) {
        uint64_t written = store_written(f.life.store);
        between = f.life.snapshot;
        between_held = 0;
        f.life.engine->settings.hooks.breathe = look_at_helpers;
        support_wall_break(fails ? SUPPORT_WALL_ATTENTION : SUPPORT_WALL_SOUND);
        enum kv_err err = snapshot_save(f.life.snapshot, session, &options, &receipt, &diag);
        f.life.engine->settings.hooks.breathe = NULL;
        assert_true(between_held > 0);
        assert_int_equal(err, fails ? KV_ERR_DEVICE : KV_OK);
        assert_int_equal(snap_ahead_held(f.life.snapshot->ahead), 0);
        assert_int_equal(store_written(f.life.store) == written, fails);
        assert_int_equal(transfer_durable(session)->snapshot == head, fails);
    }
    printf("%s\n", diag.text);
    assert_int_equal(receipt.parent, head);
    assert_true(receipt.pages > 0 && receipt.stage_ns[RECEIPT_ZIP] > 0);
    assert_true(receipt.stage_ns[RECEIPT_PROVE] > 0 && receipt.stage_ns[RECEIPT_FREEZE] > 0);
    life_rig_close(&f);
}

TESTING_MAIN(cmocka_unit_test(zip_is_decided_in_the_order_of_puts),
             cmocka_unit_test(helpers_change_nothing), cmocka_unit_test(helpers_run_ahead_and_stop),
             cmocka_unit_test(a_failed_copy_is_done_again),
             cmocka_unit_test(a_failed_write_leaves_nothing_behind),
             cmocka_unit_test(the_time_of_one_helper_is_not_shared_out),
             cmocka_unit_test(helpers_share_one_block),
             cmocka_unit_test(pages_are_zipped_beside_the_proof))
