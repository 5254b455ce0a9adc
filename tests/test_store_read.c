/* tests/test_store_read.c - reading many extents, whole, damaged, cut and stalled.
 *
 * Responsible for: order, depth, placing without a copy, callbacks, every kind of damage being
 * reported and never served, deadlines.
 * Not responsible for: damage to the index (test_rebuild.c).
 * Broken twins: BREAK_CLOSE_UNDER_READ, BREAK_DIGEST.
 */
#include "store/store_read.h"

#include "tests/support_faulty_io.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MIB = 1 << 20, BIG_COUNT = 24, BIG_BYTES = 3 * MIB };

static void fill_noise(unsigned seed, uint8_t mask, uint8_t *bytes, size_t count) {
    struct testing_random random;
    testing_random_init(&random, seed);
    testing_random_bytes(&random, bytes, count);
    for (size_t i = 0; i < count; i++)
        bytes[i] &= mask;
}

/* Records "big<i>" of one extent each, filled with noise of seed i. */
static void put_noise(struct store *store, unsigned count, size_t bytes, uint8_t mask,
                      enum store_codec_hint hint) {
    struct store_batch *batch = NULL;
    uint8_t *memory = malloc(bytes);
    assert_non_null(memory);
    assert_int_equal(store_batch_begin(store, 0, &batch, NULL), KV_OK);
    for (unsigned i = 0; i < count; i++) {
        char key[16];
        fill_noise(i, mask, memory, bytes);
        snprintf(key, sizeof key, "big%u", i);
        struct iovec piece = {memory, bytes};
        struct store_part part = {0, hint, &piece, 1, 0};
        struct store_put put = {key, strlen(key), "", 0, &part, 1};
        assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    }
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    free(memory);
}

static void put_big(struct store *store, unsigned count, size_t bytes) {
    put_noise(store, count, bytes, 0xff, STORE_RAW);
}

struct big {
    struct store_record record;
    struct iovec pieces[BIG_BYTES / MIB];
};

struct seen {
    size_t order[BIG_COUNT];
    size_t count;
};

static void note(void *context, size_t read_index) {
    struct seen *seen = context;
    assert_true(seen->count < BIG_COUNT);
    seen->order[seen->count++] = read_index;
}

static void get_big(struct store *store, struct big *big, struct store_read *reads,
                    uint8_t *memory) {
    for (unsigned i = 0; i < BIG_COUNT; i++) {
        char key[16];
        snprintf(key, sizeof key, "big%u", i);
        assert_int_equal(store_get(store, key, strlen(key), &big[i].record, NULL), KV_OK);
        for (size_t j = 0; j < BIG_BYTES / MIB; j++)
            big[i].pieces[j] = (struct iovec){memory + (size_t)i * BIG_BYTES + j * MIB, MIB};
        reads[i] = (struct store_read){.extent = big[i].record.extents,
                                       .pieces = big[i].pieces,
                                       .piece_count = BIG_BYTES / MIB,
                                       .verify = 1};
    }
}

/* 54 MiB of compressed extents, of which 24 may wait for their unzipping at once: all arrive,
 * without, with one and with four helpers, through both doors. */
static void compressed_extents_wait_for_room(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.segment_bytes = 16 * MIB;
    struct store *store = support_store_open(&options);
    put_noise(store, BIG_COUNT, BIG_BYTES, 0x3f, STORE_ZSTD);
    store_close(store);
    uint8_t *memory = kv_alloc_aligned(kv_alloc_system(), (size_t)BIG_COUNT * BIG_BYTES, 4096);
    uint8_t *expected = malloc(BIG_BYTES);
    assert_non_null(memory);
    assert_non_null(expected);
    for (int way = 0; way < 6; way++) {
        struct big big[BIG_COUNT];
        struct store_read reads[BIG_COUNT];
        struct store_read_stats stats;
        options.helpers = way < 4 ? 1 : 4;
        options.door = way % 2 == 0 ? io_uring_door() : io_posix_door();
        store = support_store_open(&options);
        get_big(store, big, reads, memory);
        memset(memory, 0xff, (size_t)BIG_COUNT * BIG_BYTES);
        const struct store_read_args args = {
            .reads = reads, .count = BIG_COUNT, .helper = way >= 2};
        assert_int_equal(store_read(store, &args, &stats, NULL), KV_OK);
        assert_in_range(stats.read_bytes, 25 * MIB, (uint64_t)BIG_COUNT * BIG_BYTES - 1);
        for (unsigned i = 0; i < BIG_COUNT; i++) {
            fill_noise(i, 0x3f, expected, BIG_BYTES);
            assert_memory_equal(memory + (size_t)i * BIG_BYTES, expected, BIG_BYTES);
            store_record_release(store, &big[i].record);
        }
        store_close(store);
    }
    kv_alloc_release(kv_alloc_system(), memory);
    free(expected);
}

/* Copied once where there are helpers, else not at all.
 * BREAK_STAGING: two requests have the same place of the staging. */
static void deep_queue(void **state) {
    (void)state;
    for (int way = 0; way < 6; way++) {
        int door = way % 2;
        char dir[TESTING_PATH_BYTES];
        struct big big[BIG_COUNT];
        struct store_read reads[BIG_COUNT];
        struct store_read_stats stats;
        struct seen seen = {.count = 0};
        testing_temp_dir(dir);
        struct store_options options = support_store_options(dir);
        options.segment_bytes = 16 * MIB;
        options.helpers = way < 4 ? 1 : 4;
        options.door = door == 0 ? io_uring_door() : io_posix_door();
        struct store *store = support_store_open(&options);
        put_big(store, BIG_COUNT, BIG_BYTES);
        uint8_t *memory = kv_alloc_aligned(kv_alloc_system(), (size_t)BIG_COUNT * BIG_BYTES, 4096);
        uint8_t *expected = malloc(BIG_BYTES);
        assert_non_null(memory);
        assert_non_null(expected);
        get_big(store, big, reads, memory);
        struct store_read_args args = {
            .reads = reads, .count = BIG_COUNT, .done = note, .context = &seen, .helper = way >= 2};
        assert_int_equal(store_read(store, &args, &stats, NULL), KV_OK);
        assert_int_equal(seen.count, BIG_COUNT);
        uint8_t called[BIG_COUNT] = {0};
        for (size_t i = 0; i < BIG_COUNT; i++)
            called[seen.order[i]]++;
        for (unsigned i = 0; i < BIG_COUNT; i++) {
            struct testing_random random;
            assert_int_equal(called[i], 1);
            testing_random_init(&random, i);
            testing_random_bytes(&random, expected, BIG_BYTES);
            assert_memory_equal(memory + (size_t)i * BIG_BYTES, expected, BIG_BYTES);
            store_record_release(store, &big[i].record);
        }
        assert_true(stats.in_flight_max >= 16);
        assert_int_equal(stats.read_bytes, (uint64_t)BIG_COUNT * BIG_BYTES);
        assert_int_equal(stats.placed_bytes, way < 2 ? stats.read_bytes : 0);
        assert_int_equal(stats.digests, BIG_COUNT);
        assert_int_equal(stats.helpers, way < 2 ? 0 : options.helpers);
        assert_string_equal(stats.door_name, options.door->name);
        free(expected);
        kv_alloc_release(kv_alloc_system(), memory);
        store_close(store);
    }
}

static void pieces_must_fit(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_record record;
    static uint8_t memory[40000];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 1, 1, NULL), KV_OK);
    assert_int_equal(store_get(store, "r00000", 6, &record, NULL), KV_OK);
    size_t raw = (size_t)record.extents[0].raw_bytes;
    size_t sizes[] = {0, 1, raw - 1, raw + 1};
    for (size_t i = 0; i < 4; i++) {
        struct iovec piece = {memory, sizes[i]};
        struct store_read read = {.extent = record.extents, .pieces = &piece, .piece_count = 1};
        struct store_read_args args = {.reads = &read, .count = 1};
        assert_int_equal(store_read(store, &args, NULL, NULL), KV_ERR_INVALID);
    }
    store_record_release(store, &record);
    store_close(store);
}

/* One damaged extent among many: only that one is refused, by its name.
 * Fails with BREAK_DIGEST. */
static void damage_is_named(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct store_record record;
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 10, 1, NULL), KV_OK);
    assert_int_equal(store_get(store, "r00004", 6, &record, NULL), KV_OK);
    struct store_extent hit = record.extents[0];
    store_record_release(store, &record);
    char name[64];
    snprintf(name, sizeof name, "seg/%08u.seg", hit.segment);
    support_store_flip(dir, name, hit.off + 12345, 0x08);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(support_store_matches(store, i, 1, 1), i != 4);
    assert_int_equal(store_read_check(store, "r00004", 6, NULL, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "kind 0"));
    assert_non_null(strstr(diag.text, name));
    support_store_flip(dir, name, hit.off + 12345, 0x08);
    assert_int_equal(store_read_check(store, "r00004", 6, NULL, NULL), KV_OK);
    /* Padding behind the extent must be zero too. */
    support_store_flip(dir, name, hit.off + 30000 + 5, 0x01);
    assert_int_equal(store_read_check(store, "r00004", 6, NULL, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "padding"));
    store_close(store);
}

/* Any byte of any segment flipped: each record reads as itself or not at all. */
static void no_flip_is_served(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct testing_random random;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 6, 1, NULL), KV_OK);
    struct store_stats stats;
    store_stats_get(store, &stats);
    uint64_t bytes = stats.segment_bytes;
    testing_random_init(&random, testing_seed("flips", 4242));
    unsigned detected = 0;
    unsigned rounds = testing_quick() ? 60 : 200;
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t off = testing_random_below(&random, bytes);
        unsigned char bits = (unsigned char)(1u << testing_random_below(&random, 8));
        support_store_flip(dir, "seg/00000001.seg", off, bits);
        for (unsigned i = 0; i < 6; i++) {
            char key[16];
            snprintf(key, sizeof key, "r%05u", i);
            enum kv_err err = store_read_check(store, key, 6, NULL, NULL);
            assert_true(err == KV_OK || err == KV_ERR_CORRUPT);
            assert_int_equal(support_store_matches(store, i, 1, round % 2), err == KV_OK);
            detected += err != KV_OK;
        }
        support_store_flip(dir, "seg/00000001.seg", off, bits);
    }
    /* All but the flips in the batch record, which reads do not touch, hit exactly one record. */
    assert_true(detected >= rounds * 9 / 10 && detected <= rounds);
    store_close(store);
}

static void truncated_segment(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 10, 1, NULL), KV_OK);
    store_close(store);
    uint64_t bytes = support_store_segment_bytes(dir, 1);
    uint64_t whole = 10;
    uint64_t cut = bytes;
    for (;;) {
        support_store_truncate(dir, "seg/00000001.seg", cut);
        options.read_only = 1;
        store = support_store_open(&options);
        uint64_t good = 0;
        for (unsigned i = 0; i < 10; i++) {
            char key[16];
            struct kv_diag diag = {""};
            snprintf(key, sizeof key, "r%05u", i);
            enum kv_err err = store_read_check(store, key, 6, NULL, &diag);
            assert_true(err == KV_OK || err == KV_ERR_CORRUPT);
            assert_int_equal(support_store_matches(store, i, 1, 1), err == KV_OK);
            if (err != KV_OK)
                assert_non_null(strstr(diag.text, "ends before"));
            good += err == KV_OK;
        }
        assert_true(good <= whole);
        whole = good;
        store_close(store);
        if (cut == 0)
            break;
        cut -= cut < 9 * 4096 ? cut : 9 * 4096;
    }
    assert_int_equal(whole, 0);
    /* A writer goes on in a new segment: the lost bytes are not replaced by others. */
    options.read_only = 0;
    store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 20, 22, 1, NULL), KV_OK);
    assert_true(support_store_matches(store, 20, 1, 1));
    assert_false(support_store_matches(store, 0, 1, 1));
    assert_int_equal(support_store_segment_bytes(dir, 1), 0);
    store_close(store);
}

static void missing_segment(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    char path[400];
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 2, 1, NULL), KV_OK);
    store_close(store);
    snprintf(path, sizeof path, "%s/seg/00000001.seg", dir);
    assert_int_equal(unlink(path), 0);
    options.read_only = 1;
    store = support_store_open(&options);
    assert_int_equal(store_read_check(store, "r00001", 6, NULL, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "missing"));
    store_close(store);
}

static void io_error_is_not_corruption(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct kv_diag diag = {""};
    struct faulty_io *faulty = faulty_io_make(io_best_door());
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    options.door = faulty_io_door(faulty);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 3, 1, NULL), KV_OK);
    faulty_io_arm(faulty,
                  &(struct faulty_io_plan){
                      .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_READ, .at = 2, .error = EIO});
    assert_int_equal(store_read_check(store, "r00001", 6, NULL, &diag), KV_ERR_IO);
    assert_non_null(strstr(diag.text, "Input/output error"));
    assert_int_equal(store_read_check(store, "r00001", 6, NULL, NULL), KV_OK);
    store_close(store);
    faulty_io_drop(faulty);
}

static unsigned open_segments(const char *dir_path) {
    unsigned count = 0;
    DIR *list = opendir("/proc/self/fd");
    assert_non_null(list);
    for (struct dirent *entry = readdir(list); entry != NULL; entry = readdir(list)) {
        char target[512] = "";
        ssize_t got = readlinkat(dirfd(list), entry->d_name, target, sizeof target - 1);
        count += got > 0 && strstr(target, dir_path) != NULL && strstr(target, ".seg") != NULL;
    }
    closedir(list);
    return count;
}

/* What was not answered keeps its file: by its number another one would be read.
 * Fails with BREAK_CLOSE_UNDER_READ. */
static void stalled_read_times_out(void **state) {
    (void)state;
    for (int way = 0; way < 6; way++) {
        int door = way % 2;
        char dir[TESTING_PATH_BYTES];
        struct big big[BIG_COUNT];
        struct store_read reads[BIG_COUNT];
        struct kv_diag diag = {""};
        struct faulty_io *faulty = faulty_io_make(door == 0 ? io_uring_door() : io_posix_door());
        testing_temp_dir(dir);
        struct store_options options = support_store_options(dir);
        options.segment_bytes = 128 * MIB;
        options.deadline_ns = 1000000000; /* also for what is not held, on a busy machine */
        options.door = faulty_io_door(faulty);
        options.helpers = way < 4 ? 1 : 4;
        struct store *store = support_store_open(&options);
        put_big(store, BIG_COUNT, BIG_BYTES);
        unsigned open_before = open_segments(dir);
        uint8_t *memory = kv_alloc_aligned(kv_alloc_system(), (size_t)BIG_COUNT * BIG_BYTES, 4096);
        assert_non_null(memory);
        get_big(store, big, reads, memory);
        faulty_io_arm(faulty, &(struct faulty_io_plan){.action = FAULTY_IO_STALL,
                                                       .ops = FAULTY_IO_READ,
                                                       .at = way < 2 ? 4 : 16});
        struct store_read_args args = {.reads = reads, .count = BIG_COUNT, .helper = way >= 2};
        assert_int_equal(store_read(store, &args, NULL, &diag), KV_ERR_IO);
        assert_non_null(strstr(diag.text, "timed out"));
        assert_int_equal(reads[0].result, KV_OK);
        assert_int_equal(reads[1].result, KV_ERR_IO);
        /* Beside helpers all comes by way of the reader's own memory. */
        assert_int_equal(reads[1].in_doubt, way < 2);
        for (size_t i = 2; i < BIG_COUNT; i++)
            assert_int_equal(reads[i].in_doubt, 0);
        assert_int_equal(open_segments(dir), open_before + 1);
        /* The store goes on with another queue. */
        faulty_io_release(faulty);
        assert_int_equal(store_read_check(store, "big1", 4, NULL, NULL), KV_OK);
        for (unsigned i = 0; i < BIG_COUNT; i++)
            store_record_release(store, &big[i].record);
        store_close(store);
        assert_int_equal(open_segments(dir), 0);
        kv_alloc_release(kv_alloc_system(), memory);
        faulty_io_drop(faulty);
    }
}

/* Says once of every read that the queue is full, as long as something is under way. */
struct full {
    unsigned refusals;
    uint32_t in_flight;
    int refused; /* the last one was */
};

static int submit_full(void *context, struct io_queue *queue, const struct io_request *request) {
    struct full *full = context;
    const struct io_door *under = io_posix_door();
    full->refused = !request->write && full->in_flight != 0 && !full->refused;
    full->refusals += (unsigned)full->refused;
    if (full->refused)
        return EAGAIN;
    int error = under->submit(under->context, queue, request);
    full->in_flight += error == 0;
    return error;
}

static int wait_full(void *context, struct io_queue *queue, uint64_t timeout_ns,
                     struct io_completion *done, uint32_t room, uint32_t *taken_out) {
    struct full *full = context;
    const struct io_door *under = io_posix_door();
    int error = under->wait(under->context, queue, timeout_ns, done, room, taken_out);
    full->in_flight -= *taken_out;
    return error;
}

static void a_full_queue_begins_nothing_twice(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct testing_alloc alloc;
    struct io_door door = *io_posix_door();
    struct full full = {0};
    door.context = &full;
    door.submit = submit_full;
    door.wait = wait_full;
    testing_temp_dir(dir);
    testing_alloc_init(&alloc, 0);
    struct store_options options = support_store_options(dir);
    options.door = &door;
    options.alloc = &alloc.alloc;
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 4, 1, NULL), KV_OK);
    for (unsigned i = 0; i < 4; i++)
        assert_true(support_store_matches(store, i, 1, 1));
    assert_true(full.refusals >= 4);
    store_close(store);
    assert_int_equal(alloc.live_count, 0);
}

/* More segments than are held open at once. */
static void many_segments(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    enum { COUNT = 300 };
    static struct store_record records[COUNT];
    static struct store_read reads[COUNT];
    static struct iovec pieces[COUNT];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    put_big(store, COUNT, 600000);
    struct store_stats stats;
    store_stats_get(store, &stats);
    assert_int_equal(stats.segments, COUNT);
    uint8_t *memory = malloc(600000);
    uint8_t *expected = malloc(600000);
    assert_non_null(memory);
    assert_non_null(expected);
    for (unsigned i = 0; i < COUNT; i++) {
        char key[16];
        snprintf(key, sizeof key, "big%u", i);
        assert_int_equal(store_get(store, key, strlen(key), &records[i], NULL), KV_OK);
        pieces[i] = (struct iovec){memory, 600000};
        reads[i] = (struct store_read){
            .extent = records[i].extents, .pieces = &pieces[i], .piece_count = 1, .verify = 0};
    }
    struct store_read_args args = {.reads = reads, .count = COUNT};
    assert_int_equal(store_read(store, &args, NULL, NULL), KV_OK);
    for (unsigned i = 0; i < COUNT; i += 37) {
        char key[16];
        snprintf(key, sizeof key, "big%u", i);
        assert_int_equal(store_read_check(store, key, strlen(key), NULL, NULL), KV_OK);
    }
    for (unsigned i = 0; i < COUNT; i++)
        store_record_release(store, &records[i]);
    free(memory);
    free(expected);
    store_close(store);
}

static void allocation_failures(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 2, 1, NULL), KV_OK);
    store_close(store);
    uint64_t k = 1;
    for (;; k++) {
        struct testing_alloc alloc;
        testing_alloc_init(&alloc, 0);
        options.alloc = &alloc.alloc;
        options.read_only = 1;
        store = support_store_open(&options);
        alloc.request_count = 0;
        alloc.fail_at = k;
        enum kv_err err = store_read_check(store, "r00001", 6, NULL, NULL);
        assert_int_equal(err, alloc.failed_count == 0 ? KV_OK : KV_ERR_NOMEM);
        alloc.fail_at = 0;
        assert_int_equal(store_read_check(store, "r00001", 6, NULL, NULL), KV_OK);
        store_close(store);
        assert_int_equal(alloc.live_count, 0);
        if (alloc.failed_count == 0)
            break;
    }
    assert_true(k > 8);
}

TESTING_MAIN(cmocka_unit_test(deep_queue), cmocka_unit_test(compressed_extents_wait_for_room),
             cmocka_unit_test(a_full_queue_begins_nothing_twice), cmocka_unit_test(pieces_must_fit),
             cmocka_unit_test(damage_is_named), cmocka_unit_test(no_flip_is_served),
             cmocka_unit_test(truncated_segment), cmocka_unit_test(missing_segment),
             cmocka_unit_test(io_error_is_not_corruption), cmocka_unit_test(stalled_read_times_out),
             cmocka_unit_test(many_segments), cmocka_unit_test(allocation_failures))
