/* tests/test_eager.c - sessions that answer on coarse planes while finer ones come behind.
 *
 * Responsible for: eager wakes (what is read first, what tokens saw, what the session is
 * afterwards), planes that cannot be read back behind it, wakes at the floor for want of slots.
 * Not responsible for: exact wakes (test_restore.c), the RAM tier (test_ram.c), times (bench).
 *
 * Fails with BREAK_EAGER_MARK (history is not marked), BREAK_PARTS_BEHIND (planes lie by number),
 * BREAK_REFINE_DIGEST (a damaged plane is read) and BREAK_COARSE_SAVE (a session saved coarse is
 * proven at a map that it never had).
 */
#include "restore/restore.h"

#include "restore/rest_plan.h"
#include "snapshot/snap_lower.h"
#include "store/fmt.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 6, TOKENS = 64 + 256 * (BLOCKS + 1) + 30 };

struct fixture {
    struct life_rig rig;
    struct record_snapshot head;
    struct receipt exact; /* of an exact wake */
    struct kv_digest resident;
    uint32_t tier_blocks[16];
    uint64_t n_kv;
};

static enum kv_err wake_as(struct life *life, enum receipt_tiers tiers, struct session **session,
                           struct receipt *receipt, struct kv_diag *diag) {
    const struct restore_options options = {.tiers = tiers, .probes_max = 2};
    return restore_wake(&life->source, "chat", &options, session, receipt, diag);
}

static struct session *woken(struct life *life, enum receipt_tiers tiers, struct receipt *receipt) {
    struct session *session = NULL;
    struct kv_diag diag = {""};
    if (wake_as(life, tiers, &session, receipt, &diag) != KV_OK)
        fail_msg("restore_wake: %s", diag.text);
    return session;
}

/* "chat" asleep, with blocks at K8V4, K6V4, K6V3 and K6V2. */
static void open_fixture(struct fixture *f) {
    struct session_info info;
    memset(f, 0, sizeof *f);
    life_rig_open(&f->rig);
    struct session *session = life_session(&f->rig.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, TOKENS, 3, NULL);
    life_sleep(&f->rig.life, session);
    f->head = life_head(&f->rig.life, "chat", NULL);
    session = woken(&f->rig.life, RECEIPT_TIERS_EXACT, &f->exact);
    session_info(session, &info);
    f->n_kv = info.n_kv;
    f->resident = life_resident(session);
    memcpy(f->tier_blocks, info.tier_blocks, sizeof f->tier_blocks);
    assert_int_equal(info.blocks, BLOCKS);
    assert_true(info.tier_blocks[LAYOUT_K6V2] < BLOCKS);
    session_drop(session);
}

static void settle(struct session *session) {
    while (session_promoting(session))
        assert_true(engine_apply(session_engine(session)));
}

static uint32_t used(struct fixture *f) {
    struct engine_slots slots;
    engine_slots(f->rig.life.engine, &slots);
    return slots.used;
}

static uint64_t bytes_of(const struct receipt *receipt) {
    uint64_t bytes = 0;
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        bytes += receipt->stored_bytes[i];
    return bytes;
}

static void an_eager_wake_ends_as_an_exact_one(void **state) {
    struct fixture f;
    struct receipt receipt, refined;
    struct session_info info;
    (void)state;
    open_fixture(&f);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_PARTIAL);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], BLOCKS);
    assert_int_equal(info.slots, f.exact.slots); /* its planes find their slots reserved */
    assert_int_equal(receipt.tiers, RECEIPT_TIERS_EAGER);
    assert_int_equal(receipt.tier_blocks[LAYOUT_K6V2], BLOCKS);
    assert_int_equal(receipt.coarse_blocks, BLOCKS - f.tier_blocks[LAYOUT_K6V2]);
    assert_int_equal(receipt.degraded_blocks, 0);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_true(receipt.fingerprint_floor);
    assert_int_equal(receipt.raw_bytes[LAYOUT_VR1] + receipt.raw_bytes[LAYOUT_VR2] +
                         receipt.raw_bytes[LAYOUT_KL],
                     0);
    assert_true(bytes_of(&receipt) < bytes_of(&f.exact));
    assert_false(restore_refined(&f.rig.life.source, &refined));
    settle(session);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(info.coarse_blocks, 0);
    assert_int_equal(info.mixed_from, 0); /* nothing was computed meanwhile */
    assert_memory_equal(info.tier_blocks, f.tier_blocks, sizeof f.tier_blocks);
    struct kv_digest resident = life_resident(session);
    assert_memory_equal(&resident, &f.resident, sizeof resident);
    assert_true(restore_refined(&f.rig.life.source, &refined));
    assert_false(restore_refined(&f.rig.life.source, &refined));
    assert_int_equal(refined.operation, RECEIPT_REFINE);
    assert_string_equal(refined.name, "chat");
    assert_int_equal(refined.err, KV_OK);
    assert_int_equal(refined.blocks, receipt.coarse_blocks);
    assert_int_equal(refined.coarse_blocks, 0);
    assert_int_equal(refined.digests_failed, 0);
    assert_int_equal(bytes_of(&refined) + bytes_of(&receipt), bytes_of(&f.exact));
    life_rig_close(&f.rig);
}

/* Few tokens: the first of them come while blocks are coarse, one more of which is read before
 * each step.
 * Fails with BREAK_EAGER_MARK. */
static void tokens_are_marked_with_what_they_saw(void **state) {
    struct fixture f;
    struct receipt receipt, refined, again;
    struct session_info info;
    (void)state;
    open_fixture(&f);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    uint32_t behind = receipt.coarse_blocks;
    life_say(session, 9, 5, 12, NULL);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(info.mixed_from, f.n_kv);
    assert_memory_equal(info.tier_blocks, f.tier_blocks, sizeof f.tier_blocks);
    assert_true(restore_refined(&f.rig.life.source, &refined));
    assert_int_equal(refined.mixed_from, f.n_kv);
    struct receipt saved = life_save(&f.rig.life, session, 0);
    assert_int_equal(saved.mixed_from, f.n_kv);
    assert_int_equal(saved.coarse_blocks, 0);
    /* What was fed took blocks along; then one comes with each token. */
    uint64_t coarse = saved.seen[0].end - saved.seen[0].first;
    assert_int_equal(saved.seen_count, 2);
    assert_true(coarse > 0 && coarse < behind);
    assert_int_equal(saved.seen[0].coarsest, LAYOUT_K6V2);
    assert_int_equal(saved.seen[0].coarse_blocks, behind - 1);
    assert_int_equal(saved.seen[1].first, saved.seen[0].end);
    assert_int_equal(saved.seen[1].end, info.n);
    assert_int_equal(saved.seen[1].end - saved.seen[0].first, 12);
    assert_int_equal(saved.seen[1].coarse_blocks, 0);
    struct kv_digest resident = life_resident(session);
    session_drop(session);
    session = woken(&f.rig.life, RECEIPT_TIERS_EXACT, &again);
    assert_int_equal(again.fingerprint, RECEIPT_BITS_EQUAL);
    assert_false(again.fingerprint_floor);
    assert_int_equal(again.mixed_from, f.n_kv);
    struct kv_digest found = life_resident(session);
    assert_memory_equal(&found, &resident, sizeof found);
    life_rig_close(&f.rig);
}

/* A save waits for what comes behind, so that its fingerprint is of the whole tier map. */
static void a_save_in_between_is_of_the_whole_map(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    life_say(session, 9, 2, 1, NULL);
    assert_true(session_promoting(session));
    struct receipt saved = life_sleep(&f.rig.life, session);
    assert_int_equal(saved.coarse_blocks, 0);
    woken(&f.rig.life, RECEIPT_TIERS_EXACT, &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_false(receipt.fingerprint_floor);
    assert_int_equal(receipt.mixed_from, f.n_kv);
    life_rig_close(&f.rig);
}

/* --- what cannot be read back */

/* Fails with BREAK_COARSE_SAVE, BREAK_REFINE_DIGEST. */
static void a_damaged_plane_leaves_the_session_whole(void **state) {
    struct fixture f;
    struct store_extent extent;
    struct receipt receipt, refined;
    struct session_info info;
    struct kv_diag diag = {""};
    struct session *session = NULL;
    (void)state;
    open_fixture(&f);
    const struct record_key key = record_key_block(f.head.lineage, BLOCKS - 1);
    life_extent(&f.rig.life, &key, LAYOUT_VR2, &extent);
    uint8_t *bytes = malloc(extent.stored_bytes);
    assert_non_null(bytes);
    life_disk(f.rig.dir, &extent, bytes, 0);
    bytes[extent.stored_bytes / 2] ^= 4;
    life_disk(f.rig.dir, &extent, bytes, 1);
    uint32_t before = used(&f);
    assert_int_equal(wake_as(&f.rig.life, RECEIPT_TIERS_EXACT, &session, &receipt, &diag),
                     KV_ERR_CORRUPT);
    session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    settle(session);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(info.coarse_blocks, 1);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], f.tier_blocks[LAYOUT_K6V2] + 1);
    assert_true(restore_refined(&f.rig.life.source, &refined));
    assert_int_equal(refined.err, KV_ERR_CORRUPT);
    assert_non_null(strstr(refined.reason, "block 5, stream VR2"));
    assert_int_equal(refined.digests_failed, 1);
    assert_int_equal(refined.coarse_blocks, 1);
    /* It goes on, marked, and is saved as what it is. */
    life_say(session, 4, 3, 4, NULL);
    struct receipt saved = life_sleep(&f.rig.life, session);
    assert_int_equal(saved.coarse_blocks, 1);
    assert_int_equal(saved.mixed_from, f.n_kv);
    assert_int_equal(saved.seen_count, 1);
    assert_int_equal(saved.seen[0].coarsest, LAYOUT_K6V2);
    /* Mended, it wakes at its tier map again: proven at the floor, since it was saved below it. */
    bytes[extent.stored_bytes / 2] ^= 4;
    life_disk(f.rig.dir, &extent, bytes, 1);
    session = woken(&f.rig.life, RECEIPT_TIERS_EXACT, &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_true(receipt.fingerprint_floor);
    assert_int_equal(receipt.coarse_blocks, 0);
    assert_int_equal(receipt.mixed_from, f.n_kv);
    session_drop(session);
    assert_int_equal(used(&f), before);
    free(bytes);
    life_rig_close(&f.rig);
}

/* A read that never comes back is waited for once; its slots stay in nobody's hands. */
void __lsan_disable(void) __attribute__((weak));
void __lsan_enable(void) __attribute__((weak));

static void a_lost_read_ends_the_waiting(void **state) {
    struct fixture f;
    struct receipt receipt, refined;
    struct session_info info;
    (void)state;
    open_fixture(&f);
    f.rig.options.deadline_ns = 1000000000; /* which no other read takes on a busy machine */
    life_rig_reopen(&f.rig);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    faulty_io_arm(f.rig.faulty, &(struct faulty_io_plan){
                                    .action = FAULTY_IO_STALL, .ops = FAULTY_IO_READ, .at = 1});
    if (__lsan_disable != NULL)
        __lsan_disable();
    settle(session);
    if (__lsan_enable != NULL)
        __lsan_enable();
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(info.coarse_blocks, 1);
    assert_true(restore_refined(&f.rig.life.source, &refined));
    assert_int_equal(refined.err, KV_ERR_IO);
    faulty_io_release(f.rig.faulty);
    life_rig_close(&f.rig);
}

/* Of a session that goes meanwhile nothing more is read, and everything is given back. */
static void a_session_may_go_before_its_planes(void **state) {
    struct fixture f;
    struct receipt receipt, refined;
    (void)state;
    open_fixture(&f);
    uint32_t before = used(&f);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    assert_true(engine_apply(f.rig.life.engine));
    session_drop(session);
    faulty_io_arm(f.rig.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_COUNT});
    while (engine_apply(f.rig.life.engine))
        ;
    assert_int_equal(faulty_io_counts(f.rig.faulty).reads, 0);
    assert_int_equal(used(&f), before);
    assert_true(restore_refined(&f.rig.life.source, &refined));
    assert_int_equal(refined.err, KV_ERR_CANCELLED);
    assert_int_equal(refined.blocks, 1);
    life_rig_close(&f.rig);
}

/* Planes that the byte budget has taken do not come behind, and are no failure. */
static void what_was_given_up_does_not_come(void **state) {
    struct fixture f;
    struct receipt receipt, refined;
    struct session_info info;
    struct snap_lower_sum sum;
    (void)state;
    open_fixture(&f);
    const struct snap_lower_args args = {.store = f.rig.life.store,
                                         .alloc = kv_alloc_system(),
                                         .lineage = f.head.lineage,
                                         .blocks = BLOCKS,
                                         .streams = 1u << LAYOUT_KL};
    assert_int_equal(snap_lower_lineage(&args, &sum, NULL), KV_OK);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt);
    assert_true(receipt.degraded_blocks > 0);
    settle(session);
    session_info(session, &info);
    assert_int_equal(info.coarse_blocks, receipt.degraded_blocks);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], 0);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], f.tier_blocks[LAYOUT_K6V2]);
    assert_true(restore_refined(&f.rig.life.source, &refined));
    assert_int_equal(refined.err, KV_OK);
    assert_int_equal(refined.raw_bytes[LAYOUT_KL], 0);
    life_rig_close(&f.rig);
}

/* Whichever allocation of an eager wake fails: nothing changes, or only its account is missing. */
static void no_memory_changes_nothing(void **state) {
    struct fixture f;
    (void)state;
    open_fixture(&f);
    struct restore_source source = f.rig.life.source;
    const struct restore_options options = {.tiers = RECEIPT_TIERS_EAGER};
    uint32_t before = used(&f);
    for (uint64_t k = 1;; k++) {
        struct testing_alloc failing;
        struct session *session = NULL;
        struct receipt receipt;
        struct kv_diag diag = {""};
        testing_alloc_init(&failing, k);
        source.alloc = &failing.alloc;
        enum kv_err err = restore_wake(&source, "chat", &options, &session, &receipt, &diag);
        if (err == KV_OK) {
            settle(session);
            (void)restore_refined(&source, &receipt);
            struct kv_digest resident = life_resident(session);
            assert_memory_equal(&resident, &f.resident, sizeof resident);
            session_drop(session);
        } else {
            assert_int_equal(err, KV_ERR_NOMEM);
        }
        assert_int_equal(failing.live_count, 0);
        assert_int_equal(used(&f), before);
        if (failing.failed_count == 0)
            break;
    }
    life_rig_close(&f.rig);
}

/* --- the durable side */

static void nothing_is_written_behind(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f);
    uint64_t sequence = store_sequence(f.rig.life.store);
    faulty_io_arm(f.rig.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_COUNT});
    settle(woken(&f.rig.life, RECEIPT_TIERS_EAGER, &receipt));
    assert_int_equal(faulty_io_counts(f.rig.faulty).writes, 0);
    assert_int_equal(store_sequence(f.rig.life.store), sequence);
    life_rig_close(&f.rig);
}

static void die_behind_a_wake(struct fixture *f) {
    struct receipt receipt;
    struct session *session = woken(&f->rig.life, RECEIPT_TIERS_EAGER, &receipt);
    life_say(session, 9, 2, 1, NULL);
    faulty_io_arm(f->rig.faulty, &(struct faulty_io_plan){
                                     .action = FAULTY_IO_DIE, .ops = FAULTY_IO_READ, .at = 2});
    settle(session);
    _exit(0);
}

static void a_kill_behind_changes_nothing(void **state) {
    struct fixture f;
    struct receipt receipt;
    int status = 0;
    (void)state;
    open_fixture(&f);
    life_close(&f.rig.life);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        life_open(&f.rig.options, &f.rig.life);
        die_behind_a_wake(&f);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == FAULTY_IO_EXIT_STATUS);
    life_open(&f.rig.options, &f.rig.life);
    struct session *session = woken(&f.rig.life, RECEIPT_TIERS_EXACT, &receipt);
    assert_int_equal(receipt.snapshot, f.exact.snapshot);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.mixed_from, 0);
    struct kv_digest resident = life_resident(session);
    assert_memory_equal(&resident, &f.resident, sizeof resident);
    life_rig_close(&f.rig);
}

/* --- at the floor */

static void a_floor_wake_stays_there_until_it_is_told(void **state) {
    struct fixture f;
    struct restore_plan plan;
    struct receipt receipt;
    struct session_info info;
    struct session *session = NULL;
    struct kv_diag diag = {""};
    (void)state;
    open_fixture(&f);
    assert_int_equal(restore_plan(&f.rig.life.source, "chat", 0, &plan, &diag), KV_OK);
    assert_true(plan.floor_slots < plan.slots);
    life_close(&f.rig.life);
    f.rig.options.engine.slots = (plan.floor_slots + 8) / 8 * 8; /* one more token needs none */
    assert_true(f.rig.options.engine.slots < plan.slots);
    life_open(&f.rig.options, &f.rig.life);
    assert_int_equal(wake_as(&f.rig.life, RECEIPT_TIERS_EXACT, &session, &receipt, &diag),
                     KV_ERR_NO_SLOTS);
    assert_int_equal(wake_as(&f.rig.life, RECEIPT_TIERS_EAGER, &session, &receipt, &diag),
                     KV_ERR_NO_SLOTS);
    session = woken(&f.rig.life, RECEIPT_TIERS_FLOOR, &receipt);
    session_info(session, &info);
    assert_int_equal(info.slots, plan.floor_slots);
    assert_true(info.held_at_floor);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(receipt.tiers, RECEIPT_TIERS_FLOOR);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_true(receipt.fingerprint_floor);
    /* It answers, grows no plane, and says that its history is mixed. */
    life_say(session, 4, 3, 4, NULL);
    session_info(session, &info);
    assert_int_equal(info.slots, plan.floor_slots);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], BLOCKS);
    struct receipt saved = life_sleep(&f.rig.life, session);
    assert_int_equal(saved.mixed_from, f.n_kv);
    assert_int_equal(saved.degraded_blocks, 0);
    assert_int_equal(saved.seen[0].coarsest, LAYOUT_K6V2);
    life_close(&f.rig.life);
    f.rig.options = life_default(f.rig.dir);
    f.rig.options.door = faulty_io_door(f.rig.faulty);
    life_open(&f.rig.options, &f.rig.life);
    session = woken(&f.rig.life, RECEIPT_TIERS_FLOOR, &receipt);
    assert_int_equal(receipt.mixed_from, f.n_kv);
    life_say(session, 5, 2, 2, NULL);
    session_info(session, &info);
    assert_int_equal(info.tier_blocks[LAYOUT_K6V2], BLOCKS); /* free slots alone change nothing */
    session_refine(session);
    settle(session);
    session_info(session, &info);
    assert_int_equal(info.coarse_blocks, 0);
    life_rig_close(&f.rig);
}

/* A block's extents, in the order in which they lie. */
static int by_off(const void *left, const void *right) {
    const struct store_extent *a = left, *b = right;
    return (a->off > b->off) - (a->off < b->off);
}

static void is_in_one_piece(const struct rest_plan_block *block) {
    struct store_extent extents[RECORD_BLOCK_EXTENTS_MAX];
    uint32_t wanted = layout_tier_streams(LAYOUT_K6V2), found = 0;
    uint64_t end = 0;
    memcpy(extents, block->extents, block->extent_count * sizeof extents[0]);
    qsort(extents, block->extent_count, sizeof extents[0], by_off);
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (extents[i].kind >= LAYOUT_STREAM_COUNT || !(wanted >> extents[i].kind & 1))
            continue;
        if (found > 0)
            assert_int_equal(extents[i].off, end);
        end = extents[i].off + fmt_extent_padded(&extents[i]);
        found++;
    }
    assert_int_equal(found, 4);
    /* So does all of it: an exact wake leaves nothing out. */
    for (uint32_t i = 1; i < block->extent_count; i++)
        assert_int_equal(extents[i].off, extents[i - 1].off + fmt_extent_padded(&extents[i - 1]));
}

/* BREAK_PARTS_BEHIND: of a block as it was saved. */
static void what_is_read_first_lies_together(void **state) {
    struct fixture f;
    struct rest_plan plan = {.ram = 0};
    struct kv_diag diag = {""};
    (void)state;
    open_fixture(&f);
    struct store *store = f.rig.life.store;
    store_hold(store);
    assert_int_equal(rest_plan_image(store, kv_alloc_system(), "chat", 0, &plan, &diag), KV_OK);
    assert_int_equal(rest_plan_records(store, &plan, &diag), KV_OK);
    assert_int_equal(plan.image.block_count, BLOCKS);
    for (uint32_t b = 0; b < BLOCKS; b++)
        is_in_one_piece(&plan.blocks[b]);
    rest_plan_release(&plan);
    store_unhold(store);
    life_rig_close(&f.rig);
}

TESTING_MAIN(cmocka_unit_test(what_is_read_first_lies_together),
             cmocka_unit_test(an_eager_wake_ends_as_an_exact_one),
             cmocka_unit_test(tokens_are_marked_with_what_they_saw),
             cmocka_unit_test(a_save_in_between_is_of_the_whole_map),
             cmocka_unit_test(a_damaged_plane_leaves_the_session_whole),
             cmocka_unit_test(a_lost_read_ends_the_waiting),
             cmocka_unit_test(a_session_may_go_before_its_planes),
             cmocka_unit_test(what_was_given_up_does_not_come),
             cmocka_unit_test(no_memory_changes_nothing),
             cmocka_unit_test(nothing_is_written_behind),
             cmocka_unit_test(a_kill_behind_changes_nothing),
             cmocka_unit_test(a_floor_wake_stays_there_until_it_is_told))
