/* tests/test_read_run.c - extents that lie together come in one request.
 *
 * Responsible for: what is one run and what is not, bytes of every member, damage and failing
 * requests within a run, members that lie in memory, room that is given in order.
 * Not responsible for: extents alone (test_store_read.c).
 */
#include "store/store_read.h"

#include "store/fmt.h"
#include "store/store_ram.h"
#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of five records the first is small and raw, three are compressed, the last is raw and large. */
enum { COUNT = 40, EACH = 5, RUNS = COUNT / EACH, PLACE_BYTES = 1 << 19, SMALL_BYTES = 1000 };

struct fixture {
    char dir[TESTING_PATH_BYTES];
    struct faulty_io *faulty;
    struct store_options options;
    struct store *store;
    struct store_record records[COUNT];
    struct store_read reads[COUNT];
    struct iovec pieces[COUNT];
    uint8_t *memory, *expected;
};

static size_t size_of(unsigned index) {
    return index % EACH == 0 ? SMALL_BYTES : index % EACH == EACH - 1 ? 200 << 10 : 100000 + index;
}

static void make_bytes(unsigned index, uint8_t *bytes) {
    struct testing_random random;
    testing_random_init(&random, 100 + index);
    testing_random_bytes(&random, bytes, size_of(index));
    for (size_t i = 0; i < size_of(index) && index % EACH != EACH - 1; i++)
        bytes[i] &= 0x3f;
}

/* A record of one extent. */
static void put_one(struct store_batch *batch, unsigned index, int raw, struct iovec piece) {
    char key[16];
    snprintf(key, sizeof key, "x%03u", index);
    const struct store_part part = {0, raw ? STORE_RAW : STORE_ZSTD, &piece, 1, 0};
    const struct store_put put = {key, strlen(key), "", 0, &part, 1};
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
}

static void get_one(struct store *store, unsigned index, struct store_record *record_out) {
    char key[16];
    snprintf(key, sizeof key, "x%03u", index);
    assert_int_equal(store_get(store, key, strlen(key), record_out, NULL), KV_OK);
}

static void open_fixture(struct fixture *f, const struct io_door *door, uint32_t helpers) {
    struct store_batch *batch = NULL;
    memset(f, 0, sizeof *f);
    testing_temp_dir(f->dir);
    f->faulty = faulty_io_make(door);
    f->options = support_store_options(f->dir);
    f->options.segment_bytes = 64 << 20;
    f->options.deadline_ns = 1000000000;
    f->options.helpers = helpers;
    f->options.door = faulty_io_door(f->faulty);
    f->store = support_store_open(&f->options);
    f->memory = kv_alloc_aligned(kv_alloc_system(), (size_t)COUNT * PLACE_BYTES, 4096);
    f->expected = malloc(PLACE_BYTES);
    assert_true(f->memory != NULL && f->expected != NULL);
    assert_int_equal(store_batch_begin(f->store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < COUNT; i++) {
        make_bytes(i, f->expected);
        put_one(batch, i, i % EACH == 0 || i % EACH == EACH - 1,
                (struct iovec){f->expected, size_of(i)});
    }
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    for (unsigned i = 0; i < COUNT; i++) {
        get_one(f->store, i, &f->records[i]);
        f->pieces[i] = (struct iovec){f->memory + (size_t)i * PLACE_BYTES, size_of(i)};
        f->reads[i] = (struct store_read){.extent = f->records[i].extents,
                                          .pieces = &f->pieces[i],
                                          .piece_count = 1,
                                          .verify = i % 2,
                                          .label = "one"};
    }
}

static void close_fixture(struct fixture *f) {
    for (unsigned i = 0; i < COUNT; i++)
        store_record_release(f->store, &f->records[i]);
    store_close(f->store);
    faulty_io_drop(f->faulty);
    kv_alloc_release(kv_alloc_system(), f->memory);
    free(f->expected);
}

static enum kv_err read_all(struct fixture *f, struct store_read_args args,
                            struct store_read_stats *stats, struct kv_diag *diag) {
    memset(f->memory, 0xee, (size_t)COUNT * PLACE_BYTES);
    args.reads = f->reads;
    args.count = COUNT;
    return store_read(f->store, &args, stats, diag);
}

static void expect_bytes(struct fixture *f, unsigned index) {
    make_bytes(index, f->expected);
    assert_int_equal(f->reads[index].result, KV_OK);
    assert_memory_equal(f->pieces[index].iov_base, f->expected, size_of(index));
}

static void expect_all_bytes(struct fixture *f) {
    for (unsigned i = 0; i < COUNT; i++)
        expect_bytes(f, i);
}

static const struct io_door *door_of(int way) {
    return way % 2 == 0 ? io_uring_door() : io_posix_door();
}

/* BREAK_RUN: every extent comes alone. */
static void extents_that_lie_together_are_one_request(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        struct fixture f;
        struct store_read_stats stats;
        open_fixture(&f, door_of(way), way < 2 ? 1 : 3);
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, &stats, NULL), KV_OK);
        expect_all_bytes(&f);
        assert_int_equal(stats.reads, 2 * RUNS);
        uint64_t bytes = stats.read_bytes;
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 0}, &stats, NULL), KV_OK);
        expect_all_bytes(&f);
        assert_int_equal(stats.reads, COUNT);
        assert_int_equal(stats.read_bytes, bytes);
        /* The other way round nothing follows on anything. */
        for (unsigned i = 0; i < COUNT / 2; i++) {
            struct store_read read = f.reads[i];
            f.reads[i] = f.reads[COUNT - 1 - i];
            f.reads[COUNT - 1 - i] = read;
        }
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, &stats, NULL), KV_OK);
        assert_int_equal(stats.reads, COUNT);
        close_fixture(&f);
    }
}

/* Each member by itself: a bit of its bytes, or of the zeros behind them. */
static void damage_is_of_one_member(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    open_fixture(&f, io_best_door(), 3);
    for (unsigned hit = 6; hit <= 8; hit++) {
        const struct store_extent *extent = f.reads[hit].extent;
        for (int padding = 0; padding < 2; padding++) {
            uint64_t off =
                extent->off + (padding ? extent->stored_bytes : extent->stored_bytes / 2);
            if (padding && extent->stored_bytes % 4096 == 0)
                continue;
            f.reads[hit].verify = 1;
            support_store_flip(f.dir, "seg/00000001.seg", off, 1);
            assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, NULL, &diag),
                             KV_ERR_CORRUPT);
            for (unsigned i = 0; i < COUNT; i++)
                if (i != hit)
                    expect_bytes(&f, i);
            assert_int_equal(f.reads[hit].result, KV_ERR_CORRUPT);
            assert_true(!padding || strstr(diag.text, "padding") != NULL);
            support_store_flip(f.dir, "seg/00000001.seg", off, 1);
        }
    }
    close_fixture(&f);
}

/* BREAK_RUN_ALONE: all members of a request that fails are given up. */
static void what_fails_together_is_read_alone(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        struct fixture f;
        struct store_read_stats stats;
        struct kv_diag diag = {""};
        open_fixture(&f, door_of(way), way < 2 ? 1 : 3);
        struct faulty_io_plan plan = {
            .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_READ, .at = 2 * RUNS - 1, .error = EIO};
        faulty_io_arm(f.faulty, &plan);
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, &stats, NULL), KV_OK);
        assert_int_equal(faulty_io_counts(f.faulty).hits, 1);
        expect_all_bytes(&f);
        assert_int_equal(stats.reads, 2 * RUNS + EACH - 1);
        /* For good: each is said to be what it is, and there is an end. */
        plan.at = 3;
        plan.lasting = 1;
        faulty_io_arm(f.faulty, &plan);
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, &stats, &diag),
                         KV_ERR_IO);
        assert_non_null(strstr(diag.text, strerror(EIO)));
        for (unsigned i = 0; i < COUNT; i++) {
            assert_int_equal(f.reads[i].in_doubt, 0);
            assert_int_equal(f.reads[i].result, i < EACH ? KV_OK : KV_ERR_IO);
        }
        faulty_io_release(f.faulty);
        close_fixture(&f);
    }
}

struct stopping {
    struct fixture *f;
    int stopped;
};

static void stop_at_failure(void *context, size_t index) {
    struct stopping *stopping = context;
    stopping->stopped |= stopping->f->reads[index].result != KV_OK;
}

static int is_going_on(void *context, size_t index, int wait) {
    (void)index, (void)wait;
    return !((struct stopping *)context)->stopped;
}

/* Every request fails: a large extent alone at once, and members of runs wait for being read alone,
 * which nobody does any more. BREAK_READ_UNREAD: then that is told of, not the one that failed. */
static void what_was_not_read_hides_no_reason(void **state) {
    (void)state;
    for (int way = 0; way < 2; way++) {
        struct fixture f;
        struct kv_diag diag = {""};
        open_fixture(&f, door_of(way), 1);
        struct stopping stopping = {&f, 0};
        const struct faulty_io_plan plan = {
            .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_READ, .at = 1, .error = EIO, .lasting = 1};
        faulty_io_arm(f.faulty, &plan);
        assert_int_equal(read_all(&f,
                                  (struct store_read_args){.done = stop_at_failure,
                                                           .room = is_going_on,
                                                           .context = &stopping,
                                                           .helper = 1},
                                  NULL, &diag),
                         KV_ERR_IO);
        assert_non_null(strstr(diag.text, strerror(EIO)));
        assert_int_equal(f.reads[0].result, KV_ERR_CANCELLED);
        assert_int_equal(f.reads[EACH - 1].result, KV_ERR_IO);
        faulty_io_release(f.faulty);
        close_fixture(&f);
    }
}

static void a_segment_that_ends_within_a_run(void **state) {
    (void)state;
    struct fixture f;
    open_fixture(&f, io_best_door(), 3);
    support_store_truncate(f.dir, "seg/00000001.seg", f.reads[7].extent->off + 8192);
    assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, NULL, NULL),
                     KV_ERR_CORRUPT);
    for (unsigned i = 0; i < COUNT; i++)
        if (i < 7)
            expect_bytes(&f, i);
        else
            assert_int_equal(f.reads[i].result, KV_ERR_CORRUPT);
    close_fixture(&f);
}

/* Of a run that is never answered every member has timed out, and nothing else. A late answer comes
 * into memory of the reader, so nothing is in doubt. */
static void a_stalled_run_is_in_no_doubt(void **state) {
    (void)state;
    for (int way = 0; way < 2; way++) {
        struct fixture f;
        struct kv_diag diag = {""};
        open_fixture(&f, door_of(way), 3);
        faulty_io_arm(f.faulty, &(struct faulty_io_plan){
                                    .action = FAULTY_IO_STALL, .ops = FAULTY_IO_READ, .at = 3});
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, NULL, &diag),
                         KV_ERR_IO);
        assert_non_null(strstr(diag.text, "timed out"));
        for (unsigned i = 0; i < COUNT; i++) {
            int member = i / EACH == 1 && i % EACH < EACH - 1;
            assert_int_equal(f.reads[i].in_doubt, 0);
            assert_int_equal(f.reads[i].result, member ? KV_ERR_IO : KV_OK);
        }
        faulty_io_release(f.faulty);
        assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1}, NULL, NULL), KV_OK);
        expect_all_bytes(&f);
        close_fixture(&f);
    }
}

/* Room for so many that are not over, in order, as a ring has. */
struct ring {
    int over[COUNT];
    size_t low, places;
};

static int ring_room(void *context, size_t index, int wait) {
    const struct ring *ring = context;
    (void)wait;
    return index < ring->low + ring->places;
}

static void ring_done(void *context, size_t index) {
    struct ring *ring = context;
    ring->over[index] = 1;
    while (ring->low < COUNT && ring->over[ring->low])
        ring->low++;
}

/* BREAK_RUN_BACK: what failed is left until everything else is over, which waits for it. */
static void room_is_given_in_order(void **state) {
    (void)state;
    for (size_t places = 1; places < 12; places++) {
        struct fixture f;
        struct ring ring = {.places = places};
        open_fixture(&f, io_best_door(), 3);
        faulty_io_arm(f.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_FAIL,
                                                         .ops = FAULTY_IO_READ,
                                                         .at = places == 1 ? 0 : 1,
                                                         .error = EIO});
        const struct store_read_args args = {
            .helper = 1, .room = ring_room, .done = ring_done, .context = &ring};
        assert_int_equal(read_all(&f, args, NULL, NULL), KV_OK);
        expect_all_bytes(&f);
        assert_int_equal(ring.low, COUNT);
        close_fixture(&f);
    }
}

static void a_member_that_lies_in_memory_ends_a_run(void **state) {
    (void)state;
    struct fixture f;
    struct store_read_stats stats;
    open_fixture(&f, io_best_door(), 3);
    assert_int_equal(store_ram_open(f.store, 32 << 20, NULL), KV_OK);
    make_bytes(7, f.expected);
    const struct iovec piece = {f.expected, size_of(7)};
    assert_int_equal(store_ram_keep(f.store, 1, f.reads[7].extent, &piece, 1), KV_OK);
    assert_int_equal(read_all(&f, (struct store_read_args){.helper = 1, .ram = 1}, &stats, NULL),
                     KV_OK);
    expect_all_bytes(&f);
    assert_int_equal(stats.ram_bytes, size_of(7));
    assert_int_equal(stats.reads, 2 * RUNS + 1);
    close_fixture(&f);
}

/* Room for two more than a run has, in order. */
struct room {
    uint32_t done, most;
};

static void room_done(void *context, size_t index) {
    (void)index;
    ((struct room *)context)->done++;
}

static int has_room(void *context, size_t index, int wait) {
    const struct room *room = context;
    int fits = index < room->done + room->most;
    assert_true(fits || !wait);
    return fits;
}

/* 40 MiB of compressed extents with room for one run and two more: what waits does so until a whole
 * run fits. BREAK_RUN_WAIT fills every gap with a single extent. */
static void runs_wait_for_room(void **state) {
    (void)state;
    enum { PIECES = 180, BYTES = 300000 };
    char dir[TESTING_PATH_BYTES];
    struct store_batch *batch = NULL;
    struct store_record records[PIECES];
    struct store_read reads[PIECES];
    struct iovec pieces[PIECES];
    struct store_read_stats stats;
    struct testing_random random;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 128 << 20;
    options.helpers = 1;
    struct store *store = support_store_open(&options);
    uint8_t *memory = malloc((size_t)PIECES * BYTES), *expected = malloc(BYTES);
    assert_true(memory != NULL && expected != NULL);
    testing_random_init(&random, testing_seed("run", 5));
    testing_random_bytes(&random, expected, BYTES);
    for (size_t i = 0; i < BYTES; i++)
        expected[i] &= 0x3f;
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < PIECES; i++)
        put_one(batch, i, 0, (struct iovec){expected, BYTES});
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    for (unsigned i = 0; i < PIECES; i++) {
        get_one(store, i, &records[i]);
        pieces[i] = (struct iovec){memory + (size_t)i * BYTES, BYTES};
        reads[i] = (struct store_read){
            .extent = records[i].extents, .pieces = &pieces[i], .piece_count = 1, .verify = 1};
    }
    uint64_t one = fmt_extent_padded(reads[0].extent), each = (4 << 20) / one;
    struct room room = {0, (uint32_t)each + 2};
    const struct store_read_args args = {.reads = reads,
                                         .count = PIECES,
                                         .done = room_done,
                                         .room = has_room,
                                         .context = &room,
                                         .helper = 1};
    assert_int_equal(store_read(store, &args, &stats, NULL), KV_OK);
    assert_int_equal(stats.read_bytes, PIECES * one);
    for (unsigned i = 0; i < PIECES; i++) {
        assert_memory_equal(pieces[i].iov_base, expected, BYTES);
        store_record_release(store, &records[i]);
    }
    /* Runs of 4 MiB, in requests of 256 KiB. */
    const uint64_t most = 1 << 18;
    uint64_t last = PIECES % each;
    uint64_t requests =
        PIECES / each * ((each * one + most - 1) / most) + (last * one + most - 1) / most;
    assert_true(stats.read_bytes > 32 << 20 && each > 10);
    assert_int_equal(stats.reads, requests);
    store_close(store);
    free(memory);
    free(expected);
}

TESTING_MAIN(cmocka_unit_test(what_was_not_read_hides_no_reason),
             cmocka_unit_test(extents_that_lie_together_are_one_request),
             cmocka_unit_test(damage_is_of_one_member),
             cmocka_unit_test(what_fails_together_is_read_alone),
             cmocka_unit_test(a_segment_that_ends_within_a_run),
             cmocka_unit_test(a_stalled_run_is_in_no_doubt),
             cmocka_unit_test(room_is_given_in_order), cmocka_unit_test(runs_wait_for_room),
             cmocka_unit_test(a_member_that_lies_in_memory_ends_a_run))
