/* tests/test_layers.c - wakes from the RAM tier, whose proof follows their layers.
 *
 * Responsible for: no layer is said to be there before all of it is; the bits of such a wake;
 * damage that is named although the proof has passed; wakes that are stopped or fail halfway.
 * Not responsible for: what lies in memory (test_ram.c), the gate in front of a layer (test_ask.c).
 *
 * Fails with BREAK_LAYERS_EARLY (a group of layers is announced before it is copied),
 * BREAK_LAYERS_WAIT (nobody waits for the copies), BREAK_LAYERS_END (what the digests say is not
 * asked for) and BREAK_LAYERS_ABANDON (places are given back while planes are on their way).
 */
#include "restore/rest_layers.h"

#include "engine/engine_inner.h"
#include "store/store_ram_inner.h"
#include "tests/support_life.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 6, BLOCKS = 6, TOKENS = 64 + 256 * (BLOCKS + 1) + 30 };

struct fixture {
    struct life_rig rig;
    struct kv_digest resident;
    uint32_t slots_free;
};

static uint32_t slots_free(const struct life *life) {
    struct engine_slots slots;
    engine_slots(life->engine, &slots);
    return slots.free;
}

/* "chat" asleep in memory; a plane of block 2 is another there if `damaged`. */
static void open_fixture(struct fixture *f, int wall, int damaged) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    support_wall_set(wall);
    life_rig_open(&f->rig);
    f->rig.options.ram_bytes = 32 << 20;
    f->rig.options.model_layers = LAYERS;
    life_rig_reopen(&f->rig);
    f->slots_free = slots_free(&f->rig.life);
    struct session *session = life_session(&f->rig.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, TOKENS, 3, NULL);
    life_save(&f->rig.life, session, 1);
    f->resident = life_resident(session);
    uint32_t count = transfer_block_parts(session->blocks[2], parts);
    assert_true(count > 1 && parts[1].stream == LAYOUT_KH);
    uint8_t *bytes = malloc(parts[1].size);
    assert_non_null(bytes);
    assert_int_equal(transfer_part_read(f->rig.life.engine, &parts[1], bytes), KV_OK);
    bytes[parts[1].size - 5] ^= (uint8_t)(damaged ? 4 : 0);
    assert_int_equal(transfer_part_write(f->rig.life.engine, &parts[1], bytes), KV_OK);
    free(bytes);
    restore_keep(&f->rig.life.source, session);
    session_drop(session);
    engine_apply(f->rig.life.engine);
    assert_int_equal(slots_free(&f->rig.life), f->slots_free);
}

static void close_fixture(struct fixture *f) {
    life_rig_close(&f->rig);
    support_wall_set(1);
}

/* --- step by step */

struct steps {
    struct rest_plan plan;
    struct restore_options options;
    struct transfer_load *load;
    struct rest_load_args args;
    struct rest_fetch fetch;
    struct rest_layers *layers;
    struct session *session;
    struct receipt receipt;
};

/* Everything in front of rest_layers_begin. */
static void open_steps(struct steps *steps, struct life *life) {
    struct kv_diag diag = {""};
    *steps = (struct steps){.plan = {.ram = 1}};
    store_hold(life->store);
    assert_int_equal(
        rest_plan_image(life->store, kv_alloc_system(), "chat", 0, &steps->plan, &diag), KV_OK);
    assert_int_equal(rest_plan_records(life->store, &steps->plan, &diag), KV_OK);
    assert_int_equal(
        transfer_load_begin(life->engine, &steps->plan.image, TRANSFER_EXACT, &steps->load, &diag),
        KV_OK);
    steps->args = (struct rest_load_args){&life->source, &steps->plan, steps->load, &steps->options,
                                          &steps->receipt};
    assert_int_equal(rest_fetch_begin(&steps->plan, steps->load, &steps->fetch, &diag), KV_OK);
}

static void publish(struct steps *steps) {
    struct kv_diag diag = {""};
    assert_int_equal(rest_layers_begin(&steps->args, &steps->fetch, &steps->layers, &diag), KV_OK);
    assert_non_null(steps->layers);
    assert_int_equal(transfer_load_publish(steps->load, &steps->session, &diag), KV_OK);
    assert_int_equal(rest_layers_follow(steps->layers, steps->session, &diag), KV_OK);
}

static void close_steps(struct steps *steps, struct life *life) {
    session_drop(steps->session);
    store_unhold(life->store);
    rest_plan_release(&steps->plan);
}

/* --- the order */

struct watching {
    struct session *session; /* maybe not published yet */
    _Atomic uint32_t copies, early;
};

/* Which of its layers the copy begins with; UINT32_MAX: it is of no plane. */
static uint32_t layer_of(const struct session *session, const uint8_t *to) {
    for (uint32_t b = 0; b < session->block_count; b++) {
        struct transfer_part parts[LAYOUT_STREAM_COUNT];
        uint32_t count = transfer_block_parts(session->blocks[b], parts);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t before = 0;
            for (uint32_t k = 0; k < parts[i].piece_count; before += parts[i].pieces[k++].size) {
                const uint8_t *at = parts[i].pieces[k].bytes;
                if (to >= at && to < at + parts[i].pieces[k].size)
                    return (uint32_t)((before + (uint64_t)(to - at)) / (parts[i].size / LAYERS));
            }
        }
    }
    return UINT32_MAX;
}

static void on_lent(void *context, const void *to, uint64_t bytes) {
    struct watching *watching = context;
    struct session *session = watching->session;
    uint32_t layer = layer_of(session, to);
    (void)bytes;
    if (layer == UINT32_MAX)
        return;
    pthread_mutex_lock(&session->gate.lock);
    watching->early += session->gate.layers > layer;
    pthread_mutex_unlock(&session->gate.lock);
    watching->copies++;
}

/* BREAK_LAYERS_EARLY, BREAK_LAYERS_WAIT */
static void layers_are_there_when_it_is_said(void **state) {
    struct fixture f;
    struct steps steps;
    struct image_fingerprint print;
    struct kv_diag diag = {""};
    (void)state;
    open_fixture(&f, 1, 0);
    open_steps(&steps, &f.rig.life);
    struct watching watching = {.session = transfer_load_session(steps.load)};
    support_wall_watch(on_lent, &watching);
    publish(&steps);
    assert_ptr_equal(steps.session, watching.session);
    assert_int_equal(session_fingerprint(steps.session, 0, &print, &diag), KV_OK);
    assert_memory_equal(&print.logits, &steps.plan.image.fingerprint.logits, sizeof print.logits);
    assert_int_equal(rest_layers_end(steps.layers, &diag), KV_OK);
    support_wall_watch(NULL, NULL);
    assert_int_equal(watching.early, 0);
    /* Six layers in groups of 2, 2, 1, 1, and three planes or more of each block. */
    assert_true(watching.copies >= 4 * 3 * BLOCKS);
    struct kv_digest found = life_resident(steps.session);
    assert_memory_equal(&found, &f.resident, sizeof found);
    close_steps(&steps, &f.rig.life);
    close_fixture(&f);
}

static void the_receipt_has_all_of_it(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f, 1, 0);
    struct session *session = life_wake(&f.rig.life, "chat", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.door_bytes, 0);
    struct kv_digest found = life_resident(session);
    assert_memory_equal(&found, &f.resident, sizeof found);
    uint64_t raw_bytes = 0;
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        raw_bytes += receipt.raw_bytes[i];
    assert_true(receipt.ram_bytes > raw_bytes && raw_bytes > 0);
    assert_true(receipt.stage_ns[RECEIPT_COPY] > 0 && receipt.stage_ns[RECEIPT_DIGEST] > 0);
    assert_true(receipt.load_ns + receipt.stage_ns[RECEIPT_PROVE] <= receipt.wall_ns);
    close_fixture(&f);
}

static void it_is_the_same_where_memory_is_one(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f, 0, 0);
    for (int tiers = RECEIPT_TIERS_EXACT; tiers <= RECEIPT_TIERS_FLOOR; tiers++) {
        const struct restore_options options = {.tiers = (enum receipt_tiers)tiers};
        struct session *session = NULL;
        struct kv_diag diag = {""};
        assert_int_equal(
            restore_wake(&f.rig.life.source, "chat", &options, &session, &receipt, &diag), KV_OK);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
        assert_int_equal(receipt.door_bytes, 0);
        assert_int_equal(receipt.digests_failed, 0);
        session_drop(session);
        while (engine_apply(f.rig.life.engine))
            continue;
        assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    }
    close_fixture(&f);
}

/* --- damage */

/* Step by step: what is asked meanwhile is answered, and all the same it is refused by name. */
static void damage_is_named_whatever_was_answered(void **state) {
    struct fixture f;
    struct steps steps;
    struct image_fingerprint print;
    struct kv_diag diag = {""};
    (void)state;
    open_fixture(&f, 1, 1);
    open_steps(&steps, &f.rig.life);
    publish(&steps);
    assert_int_equal(session_fingerprint(steps.session, 0, &print, &diag), KV_OK);
    assert_int_equal(rest_layers_end(steps.layers, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "block 2, stream KH: digest is "));
    assert_non_null(strstr(diag.text, "coldplane scrub"));
    assert_int_equal(steps.receipt.digests_failed, 1);
    close_steps(&steps, &f.rig.life);
    close_fixture(&f);
}

/* BREAK_LAYERS_END: the wake itself, which then reads the disk. */
static void the_disk_is_read_after_damage(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f, 1, 1);
    struct session *session = life_wake(&f.rig.life, "chat", &receipt);
    struct kv_digest found = life_resident(session);
    assert_memory_equal(&found, &f.resident, sizeof found);
    assert_true(receipt.door_bytes > 0);
    assert_int_equal(receipt.ram_bytes, 0);
    session_drop(session);
    engine_apply(f.rig.life.engine);
    assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    close_fixture(&f);
}

static void forget_one_plane(uint32_t block) {
    struct fixture f;
    struct rest_plan plan = {.ram = 1};
    struct receipt receipt;
    struct kv_diag diag = {""};
    open_fixture(&f, 1, 0);
    struct store *store = f.rig.life.store;
    store_hold(store);
    assert_int_equal(rest_plan_image(store, kv_alloc_system(), "chat", 0, &plan, &diag), KV_OK);
    assert_int_equal(rest_plan_records(store, &plan, &diag), KV_OK);
    const struct store_extent *extent = rest_plan_extent(&plan.blocks[block], LAYOUT_KM);
    assert_non_null(extent);
    store_ram_inner_forget(store, extent);
    rest_plan_release(&plan);
    store_unhold(store);
    struct session *session = life_wake(&f.rig.life, "chat", &receipt);
    struct kv_digest found = life_resident(session);
    assert_memory_equal(&found, &f.resident, sizeof found);
    assert_true(receipt.door_bytes > 0 && receipt.ram_bytes > receipt.door_bytes);
    assert_true(receipt.layers.copied_ns == 0);
    session_drop(session);
    engine_apply(f.rig.life.engine);
    assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    close_fixture(&f);
}

/* Of the first or the last block, which are looked at before anything begins, and of one between,
 * where pages and scales are on their way already when the list of planes ends. */
static void one_plane_that_is_not_in_memory_comes_from_the_disk(void **state) {
    (void)state;
    forget_one_plane(0);
    forget_one_plane(BLOCKS / 2);
    forget_one_plane(BLOCKS - 1);
}

/* Times in the order in which one follows from the other. */
static void the_receipt_says_when(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f, 1, 0);
    struct session *session = life_wake(&f.rig.life, "chat", &receipt);
    const struct receipt_layers *at = &receipt.layers;
    assert_int_equal(receipt.door_bytes, 0);
    assert_true(at->published_ns > receipt.stage_ns[RECEIPT_PUBLISH]);
    assert_true(at->sent_ns > 0 && at->sent_ns < at->first_ns);
    assert_true(at->published_ns <= at->proof_ns);
    assert_true(at->first_ns < at->copied_ns && at->copied_ns < at->digested_ns);
    assert_true(at->first_ns <= at->proof_ns && at->proof_ns < at->last_ns);
    assert_true(at->copied_ns <= at->last_ns && at->last_ns < at->proven_ns);
    assert_true(at->digested_ns < receipt.wall_ns && at->proven_ns < receipt.wall_ns);
    session_drop(session);
    close_fixture(&f);
    open_fixture(&f, 1, 1); /* damaged: it comes from the disk, where nothing follows */
    session = life_wake(&f.rig.life, "chat", &receipt);
    assert_true(receipt.door_bytes > 0);
    assert_int_equal(receipt.layers.sent_ns + receipt.layers.proven_ns, 0);
    session_drop(session);
    close_fixture(&f);
}

/* --- ends halfway */

struct stopping {
    uint32_t calls, at;
};

static int on_progress(void *context, uint64_t done, uint64_t all) {
    struct stopping *stopping = context;
    assert_true(done <= all);
    return ++stopping->calls < stopping->at;
}

/* At the first word of progress, at the next, and so on to the last. */
static void one_that_is_stopped_leaves_nothing(void **state) {
    struct fixture f;
    struct receipt receipt;
    enum kv_err err = KV_ERR_CANCELLED;
    uint32_t cancelled = 0;
    (void)state;
    open_fixture(&f, 1, 0);
    for (uint32_t at = 1; err == KV_ERR_CANCELLED; at++) {
        struct stopping stopping = {0, at};
        const struct restore_options options = {.progress = on_progress,
                                                .progress_context = &stopping};
        struct session *session = NULL;
        struct kv_diag diag = {""};
        err = restore_wake(&f.rig.life.source, "chat", &options, &session, &receipt, &diag);
        if (err == KV_OK)
            session_drop(session);
        else
            assert_non_null(strstr(diag.text, "stopped while reading"));
        cancelled += err == KV_ERR_CANCELLED;
        assert_null(session_find(f.rig.life.engine, "chat"));
        engine_apply(f.rig.life.engine);
        assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    }
    assert_int_equal(err, KV_OK);
    assert_true(cancelled >= 1);
    close_fixture(&f);
}

/* CASE-28 in small: the k-th allocation fails, for every k. */
static void no_memory_leaves_nothing(void **state) {
    struct fixture f;
    struct receipt receipt;
    (void)state;
    open_fixture(&f, 1, 0);
    for (uint64_t k = 1; !life_wake_short(&f.rig.life, k, &receipt); k++) {
        engine_apply(f.rig.life.engine);
        assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    }
    assert_int_equal(receipt.door_bytes, 0);
    close_fixture(&f);
}

/* One turn of a life in memory, each call of which may fail: then all of it is undone or nothing.
 * The session is awake behind it where it was awake before the call that failed. */
static enum kv_err live(struct life *life) {
    static const enum receipt_tiers ways[] = {RECEIPT_TIERS_EXACT, RECEIPT_TIERS_EAGER};
    enum kv_err err = KV_OK;
    for (int way = 0; way < 2 && err == KV_OK; way++) {
        const struct restore_options options = {.tiers = ways[way], .probes_max = 2};
        struct session *session = NULL;
        struct receipt receipt;
        struct kv_diag diag = {""};
        err = restore_wake(&life->source, "chat", &options, &session, &receipt, &diag);
        while (err == KV_OK && session_promoting(session) && engine_apply(life->engine))
            continue;
        if (err == KV_OK)
            err = snapshot_sleep(life->snapshot, session, 0, &receipt, &diag);
        if (err != KV_OK && diag.text[0] == 0)
            fail_msg("%s without a word", kv_err_name(err));
    }
    return err;
}

/* After a call that failed everything works again, and the session is as it was. */
static void is_whole(struct fixture *f) {
    struct life *life = &f->rig.life;
    struct session *session = session_find(life->engine, "chat");
    if (session == NULL)
        session = life_wake(life, "chat", NULL);
    while (session_promoting(session) && engine_apply(life->engine))
        continue;
    struct kv_digest found = life_resident(session);
    assert_memory_equal(&found, &f->resident, sizeof found);
    life_sleep(life, session);
    engine_apply(life->engine);
    assert_int_equal(slots_free(life), f->slots_free);
}

/* The k-th allocation of store, engine, snapshot and restore together fails while a session that
 * lies in memory wakes and sleeps, for every fifth k (every 23rd with QUICK=1). */
static void no_memory_anywhere_loses_nothing(void **state) {
    struct fixture f;
    struct testing_alloc failing;
    uint64_t stride = testing_quick() ? 23 : 5, before = 0;
    (void)state;
    testing_alloc_init(&failing, 0);
    open_fixture(&f, 1, 0);
    f.rig.options.alloc = &failing.alloc;
    life_rig_reopen(&f.rig);
    assert_int_equal(live(&f.rig.life), KV_OK); /* it lies in memory now */
    for (uint64_t k = 1; k == 1 || failing.failed_count != before; k += stride) {
        before = failing.failed_count;
        failing.fail_at = failing.request_count + k;
        (void)live(&f.rig.life);
        failing.fail_at = 0;
        is_whole(&f);
    }
    print_message("%llu allocations failed\n", (unsigned long long)before);
    assert_true(before > 10);
    life_rig_close(&f.rig);
    assert_int_equal(failing.live_count, 0);
    support_wall_set(1);
}

/* The k-th call of each kind to the device fails, for every k (every seventh with QUICK=1). */
static void no_fault_of_the_device_loses_anything(void **state) {
    static const enum support_wall_fault faults[] = {
        SUPPORT_WALL_COPY_IN,   SUPPORT_WALL_COPY_LATE,  SUPPORT_WALL_DIGEST, SUPPORT_WALL_COPY_OUT,
        SUPPORT_WALL_ATTENTION, SUPPORT_WALL_FAILS_ONCE, SUPPORT_WALL_PUBLISH};
    struct fixture f;
    uint32_t stride = testing_quick() ? 7 : 1;
    (void)state;
    open_fixture(&f, 1, 0);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        uint32_t hits = 0;
        for (uint32_t k = 0, armed = 0; !armed; k += stride, hits += !armed) {
            support_wall_break_behind(faults[i], k);
            (void)live(&f.rig.life);
            armed = (uint32_t)support_wall_is_armed();
            support_wall_break(SUPPORT_WALL_SOUND);
            is_whole(&f);
        }
        print_message("fault %d: %u calls failed\n", (int)faults[i], hits);
        assert_true(hits > 0);
    }
    close_fixture(&f);
}

static void a_device_that_fails_leaves_nothing(void **state) {
    struct fixture f;
    struct receipt receipt;
    struct kv_diag diag = {""};
    (void)state;
    static const enum support_wall_fault faults[] = {SUPPORT_WALL_COPY_IN, SUPPORT_WALL_COPY_LATE,
                                                     SUPPORT_WALL_DIGEST, SUPPORT_WALL_ATTENTION,
                                                     SUPPORT_WALL_FAILS_ONCE};
    enum { FAULTS = sizeof faults / sizeof faults[0] };
    uint64_t snapshot;
    open_fixture(&f, 1, 0);
    /* Out of memory, then from the disk. */
    for (size_t i = 0; i < 2 * FAULTS; i++) {
        if (i == FAULTS)
            store_ram_forget(f.rig.life.store, life_head(&f.rig.life, "chat", &snapshot).lineage);
        support_wall_break(faults[i % FAULTS]);
        (void)life_refuse(&f.rig.life, "chat", KV_ERR_DEVICE, &diag);
        assert_null(session_find(f.rig.life.engine, "chat"));
        engine_apply(f.rig.life.engine);
        assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    }
    session_drop(life_wake(&f.rig.life, "chat", &receipt));
    assert_int_not_equal(receipt.door_bytes, 0);
    close_fixture(&f);
}

struct holding {
    const struct fixture *f;
    _Atomic uint32_t copies, held, free;
};

static void pause_ms(uint32_t ms) {
    const struct timespec moment = {0, (long)ms * 1000000};
    /* tidy-allow: wait nobody says that a loader goes on which should have ended */
    nanosleep(&moment, NULL);
}

/* Holds the loader when all pages have been handed over, and then some: until the session could not
 * be published, which waits for that, and some time more, in which no slot is given back. */
static void on_lent_held(void *context, const void *to, uint64_t bytes) {
    enum { HELD_AT = (LAYOUT_WINDOW_PAGES_MAX + 1) * LAYOUT_PAGE_SLOTS + BLOCKS };
    struct holding *holding = context;
    (void)bytes;
    if (to == NULL) {
        for (uint32_t ms = 0; ms < 60000 && holding->copies < HELD_AT; ms += 10)
            pause_ms(10);
        return;
    }
    if (++holding->copies != HELD_AT)
        return;
    for (uint32_t ms = 0; ms < 60000 && support_wall_is_armed(); ms += 10)
        pause_ms(10);
    for (uint32_t ms = 0; ms < 300 && !holding->free; ms += 10) {
        pause_ms(10);
        holding->free = slots_free(&holding->f->rig.life) == holding->f->slots_free;
    }
    holding->held = 1;
}

/* Planes that are on their way have their places until they have come, also where the session
 * cannot be published. BREAK_LAYERS_ABANDON */
static void one_that_cannot_be_published_leaves_nothing(void **state) {
    struct fixture f;
    struct holding holding = {.f = &f};
    struct kv_diag diag = {""};
    (void)state;
    open_fixture(&f, 1, 0);
    support_wall_watch(on_lent_held, &holding);
    support_wall_break(SUPPORT_WALL_PUBLISH);
    (void)life_refuse(&f.rig.life, "chat", KV_ERR_DEVICE, &diag);
    assert_int_equal(holding.held, 1);
    assert_int_equal(holding.free, 0);
    support_wall_watch(NULL, NULL);
    support_wall_break(SUPPORT_WALL_SOUND);
    assert_null(session_find(f.rig.life.engine, "chat"));
    engine_apply(f.rig.life.engine);
    assert_int_equal(slots_free(&f.rig.life), f.slots_free);
    session_drop(life_wake(&f.rig.life, "chat", NULL));
    close_fixture(&f);
}

/* What fails late is told to who sent it, and to nobody else: others who send wait until it is
 * known. BREAK_LANE_TURN */
static void a_failure_is_told_to_whom_it_befell(void **state) {
    struct life_rig rig;
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    const void *bytes;
    (void)state;
    support_wall_set(1);
    life_rig_open(&rig);
    struct engine *engine = rig.life.engine;
    struct session *session = life_session(&rig.life, "chat", IMAGE_RECIPE_V3);
    life_say(session, 1, TOKENS, 3, NULL);
    assert_true(transfer_block_parts(session->blocks[1], parts) > 1);
    void *own = malloc(parts[1].size);
    assert_non_null(own);
    assert_int_equal(transfer_part_read(engine, &parts[1], own), KV_OK);
    bytes = own;
    support_wall_break(SUPPORT_WALL_COPY_LATE);
    transfer_send_begin(engine);
    assert_int_equal(transfer_parts_send(engine, &parts[1], &bytes, 1), KV_OK);
    assert_int_not_equal(pthread_mutex_trylock(&engine->lane_lent), 0);
    assert_int_equal(transfer_send_end(engine), KV_ERR_DEVICE);
    transfer_send_begin(engine);
    assert_int_equal(transfer_send_end(engine), KV_OK);
    support_wall_break(SUPPORT_WALL_COPY_LATE);
    assert_int_equal(transfer_part_write(engine, &parts[1], own), KV_ERR_DEVICE);
    assert_int_equal(device_wait(engine->device, DEVICE_IN), KV_OK);
    assert_int_equal(transfer_part_write(engine, &parts[1], own), KV_OK);
    free(own);
    life_rig_close(&rig);
}

TESTING_MAIN(cmocka_unit_test(a_failure_is_told_to_whom_it_befell),
             cmocka_unit_test(the_receipt_has_all_of_it),
             cmocka_unit_test(one_that_cannot_be_published_leaves_nothing),
             cmocka_unit_test(layers_are_there_when_it_is_said),
             cmocka_unit_test(it_is_the_same_where_memory_is_one),
             cmocka_unit_test(damage_is_named_whatever_was_answered),
             cmocka_unit_test(the_disk_is_read_after_damage),
             cmocka_unit_test(one_plane_that_is_not_in_memory_comes_from_the_disk),
             cmocka_unit_test(the_receipt_says_when),
             cmocka_unit_test(one_that_is_stopped_leaves_nothing),
             cmocka_unit_test(no_memory_leaves_nothing),
             cmocka_unit_test(no_memory_anywhere_loses_nothing),
             cmocka_unit_test(no_fault_of_the_device_loses_anything),
             cmocka_unit_test(a_device_that_fails_leaves_nothing))
