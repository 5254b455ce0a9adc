/* tests/test_segment.c - segment files: names, the writer, cutting back.
 *
 * Responsible for: placing, packing, crossing segment ends, rollback, faults of single calls, and
 * that the direct flag is what the file says.
 * Not responsible for: batches (test_store_batch.c).
 * Broken twins: BREAK_DIRECT_FLAG; BREAK_ENDED_BESIDE syncs segments when the batch ends and not
 * before.
 */
#include "store/segment.h"

#include "tests/support_faulty_io.h"
#include "tests/testing.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = STORE_PAGE_BYTES, MIB = 1 << 20 };

struct rig {
    struct faulty_io *faulty;
    const struct io_door *door;
    char path[TESTING_PATH_BYTES];
    int dir;
    struct segment_writer *writer;
};

static struct rig make_rig(const struct io_door *under) {
    struct rig rig = {.faulty = faulty_io_make(under)};
    rig.door = faulty_io_door(rig.faulty);
    testing_temp_dir(rig.path);
    rig.dir = open(rig.path, O_RDONLY | O_DIRECTORY);
    assert_true(rig.dir >= 0);
    struct segment_writer_options options = {.door = rig.door,
                                             .alloc = kv_alloc_system(),
                                             .clock = kv_clock_system(),
                                             .dir = rig.dir,
                                             .direct_wanted = 1,
                                             .segment_bytes = 4 * MIB,
                                             .deadline_ns = 10000000000u,
                                             .tail = {1, 0}};
    assert_int_equal(segment_writer_make(&options, &rig.writer, NULL), KV_OK);
    return rig;
}

static void drop_rig(struct rig *rig) {
    assert_true(segment_writer_drop(rig->writer));
    close(rig->dir);
    faulty_io_drop(rig->faulty);
}

static int64_t file_bytes(const struct rig *rig, uint32_t number) {
    char name[SEGMENT_NAME_BYTES];
    struct stat stat;
    segment_name(number, name);
    return fstatat(rig->dir, name, &stat, 0) == 0 ? (int64_t)stat.st_size : -1;
}

static enum kv_err append(struct rig *rig, size_t bytes, uint8_t fill, struct fmt_place *out) {
    uint8_t *memory = malloc(bytes);
    assert_non_null(memory);
    memset(memory, fill, bytes);
    enum kv_err err = segment_reserve(rig->writer, bytes, UINT64_MAX, out, NULL);
    if (err == KV_OK)
        err = segment_fill(rig->writer, memory, bytes, NULL);
    if (err == KV_OK)
        err = segment_pad(rig->writer, NULL);
    free(memory);
    return err;
}

static void expect_bytes(const struct rig *rig, struct fmt_place at, size_t bytes, uint8_t fill) {
    char name[SEGMENT_NAME_BYTES];
    size_t padded = (bytes + PAGE - 1) / PAGE * PAGE;
    uint8_t *memory = malloc(padded);
    assert_non_null(memory);
    segment_name(at.segment, name);
    int file = openat(rig->dir, name, O_RDONLY);
    assert_true(file >= 0);
    assert_int_equal(pread(file, memory, padded, (off_t)at.off), padded);
    for (size_t i = 0; i < padded; i++)
        assert_int_equal(memory[i], i < bytes ? fill : 0);
    close(file);
    free(memory);
}

static void names(void **state) {
    (void)state;
    char name[SEGMENT_NAME_BYTES];
    segment_name(42, name);
    assert_string_equal(name, "00000042.seg");
    assert_int_equal(segment_number(name), 42);
    assert_int_equal(segment_number("0000004x.seg"), 0);
    assert_int_equal(segment_number("00000042.seg~"), 0);
    assert_int_equal(segment_number("42.seg"), 0);
    assert_int_equal(segment_number("00000000.seg"), 0);
    assert_int_equal(segment_number(""), 0);
}

static void appends_and_crosses_segments(void **state) {
    (void)state;
    for (int door = 0; door < 2; door++) {
        struct rig rig = make_rig(door == 0 ? io_uring_door() : io_posix_door());
        struct fmt_place at[40];
        size_t sizes[40];
        for (int i = 0; i < 40; i++) {
            sizes[i] = (size_t)(i * 14983 + 1);
            assert_int_equal(append(&rig, sizes[i], (uint8_t)(i + 1), &at[i]), KV_OK);
            assert_int_equal(at[i].off % PAGE, 0);
        }
        assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
        assert_true(at[39].segment >= 3);
        for (int i = 0; i < 40; i++)
            expect_bytes(&rig, at[i], sizes[i], (uint8_t)(i + 1));
        segment_commit(rig.writer);
        struct segment_counts counts = segment_take_counts(rig.writer);
        assert_true(counts.writes >= 11 && counts.writes <= 24); /* packed into 1 MiB writes */
        drop_rig(&rig);
    }
}

/* A segment whose writes are back is durable before the batch ends, and cut; what is in flight to
 * the open one stays in flight. BREAK_ENDED_BESIDE */
static void written_segments_are_synced_beside_later_writes(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place at;
    for (int i = 0; i < 30; i++)
        assert_int_equal(append(&rig, MIB - PAGE, (uint8_t)(i + 1), &at), KV_OK);
    assert_true(at.segment >= 6);
    struct segment_counts counts = segment_take_counts(rig.writer);
    printf("%u segments, %u synced so far\n", at.segment, (unsigned)counts.syncs);
    assert_true(counts.syncs >= 1 && counts.syncs < at.segment);
    assert_int_equal(file_bytes(&rig, 1), 4 * (MIB - PAGE));
    assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
    assert_int_equal(counts.syncs + segment_take_counts(rig.writer).syncs, at.segment);
    segment_commit(rig.writer);
    expect_bytes(&rig, at, MIB - PAGE, 30);
    drop_rig(&rig);
}

/* A failed sync of such a segment ends the batch, and the writer for good. */
static void a_failed_sync_beside_writes_is_for_ever(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place at;
    enum kv_err err = KV_OK;
    int count = 0;
    faulty_io_arm(rig.faulty,
                  &(struct faulty_io_plan){
                      .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_SYNC, .at = 1, .error = EIO});
    for (; err == KV_OK && count < 30; count++)
        err = append(&rig, MIB, 1, &at);
    assert_int_equal(err, KV_ERR_IO);
    assert_true(count > 4);
    assert_int_equal(segment_sync(rig.writer, NULL), KV_ERR_IO);
    assert_int_equal(segment_rollback(rig.writer, NULL), KV_ERR_IO);
    for (uint32_t number = 2; number <= at.segment; number++)
        assert_int_equal(file_bytes(&rig, number), -1);
    drop_rig(&rig);
}

/* An item larger than a segment gets one of its own. */
static void large_item(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place small;
    struct fmt_place large;
    struct fmt_place next;
    assert_int_equal(append(&rig, 100, 1, &small), KV_OK);
    assert_int_equal(append(&rig, 9 * MIB + 5, 2, &large), KV_OK);
    assert_int_equal(append(&rig, 100, 3, &next), KV_OK);
    assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
    assert_int_equal(large.segment, 2);
    assert_int_equal(large.off, 0);
    assert_int_equal(next.segment, 3);
    expect_bytes(&rig, large, 9 * MIB + 5, 2);
    assert_int_equal(file_bytes(&rig, 1), PAGE);
    assert_int_equal(file_bytes(&rig, 2), 9 * MIB + PAGE);
    assert_int_equal(segment_take_counts(rig.writer).in_flight_max >= 4, 1);
    segment_commit(rig.writer);
    drop_rig(&rig);
}

static void rollback_leaves_nothing(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place kept;
    struct fmt_place gone;
    struct fmt_place after;
    assert_int_equal(append(&rig, 3 * PAGE, 7, &kept), KV_OK);
    assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
    segment_commit(rig.writer);
    for (int i = 0; i < 12; i++)
        assert_int_equal(append(&rig, MIB, 9, &gone), KV_OK);
    assert_true(gone.segment >= 3);
    assert_int_equal(segment_rollback(rig.writer, NULL), KV_OK);
    assert_int_equal(file_bytes(&rig, 1), 3 * PAGE);
    assert_int_equal(file_bytes(&rig, 2), -1);
    assert_int_equal(file_bytes(&rig, 3), -1);
    assert_int_equal(append(&rig, PAGE, 8, &after), KV_OK);
    assert_int_equal(after.segment, 1);
    assert_int_equal(after.off, 3 * PAGE);
    assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
    segment_commit(rig.writer);
    expect_bytes(&rig, kept, 3 * PAGE, 7);
    expect_bytes(&rig, after, PAGE, 8);
    drop_rig(&rig);
}

static void drop_cuts_at_the_tail(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place at;
    int dir = dup(rig.dir);
    assert_int_equal(append(&rig, 2 * PAGE, 7, &at), KV_OK);
    assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
    segment_commit(rig.writer);
    assert_int_equal(append(&rig, 5 * PAGE, 7, &at), KV_OK);
    assert_int_equal(segment_flush(rig.writer, NULL), KV_OK);
    assert_true(file_bytes(&rig, 1) >= 7 * PAGE); /* preallocated */
    assert_int_equal(segment_rollback(rig.writer, NULL), KV_OK);
    drop_rig(&rig);
    rig.dir = dir;
    assert_int_equal(file_bytes(&rig, 1), 2 * PAGE);
    close(dir);
}

/* A tail file that lost bytes is not filled up again: the index counts on what stood there. */
static void short_tail_file_is_left_alone(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place at;
    assert_true(segment_writer_drop(rig.writer));
    int file = openat(rig.dir, "00000001.seg", O_RDWR | O_CREAT, 0600);
    assert_int_equal(ftruncate(file, PAGE), 0);
    close(file);
    struct segment_writer_options options = {.door = rig.door,
                                             .alloc = kv_alloc_system(),
                                             .clock = kv_clock_system(),
                                             .dir = rig.dir,
                                             .segment_bytes = 4 * MIB,
                                             .deadline_ns = 10000000000u,
                                             .tail = {1, 5 * PAGE}};
    assert_int_equal(segment_writer_make(&options, &rig.writer, NULL), KV_OK);
    assert_int_equal(append(&rig, PAGE, 1, &at), KV_OK);
    assert_int_equal(at.segment, 2);
    assert_int_equal(segment_rollback(rig.writer, NULL), KV_OK);
    assert_int_equal(file_bytes(&rig, 1), PAGE);
    drop_rig(&rig);
}

static void write_error_is_kept_until_rollback(void **state) {
    (void)state;
    for (uint64_t k = 1; k <= 3; k++) {
        struct rig rig = make_rig(io_best_door());
        struct fmt_place at;
        faulty_io_arm(rig.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_FAIL,
                                                           .ops = FAULTY_IO_WRITE,
                                                           .at = k,
                                                           .error = ENOSPC});
        enum kv_err err = append(&rig, 2 * MIB + PAGE, 1, &at);
        if (err == KV_OK)
            err = segment_flush(rig.writer, NULL);
        assert_int_equal(err, KV_ERR_NO_SPACE);
        assert_int_equal(append(&rig, PAGE, 1, &at), KV_ERR_NO_SPACE);
        assert_int_equal(segment_sync(rig.writer, NULL), KV_ERR_NO_SPACE);
        assert_int_equal(segment_rollback(rig.writer, NULL), KV_OK);
        assert_int_equal(file_bytes(&rig, 1), 0);
        assert_int_equal(append(&rig, PAGE, 1, &at), KV_OK);
        assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
        segment_commit(rig.writer);
        drop_rig(&rig);
    }
}

static void failed_sync_is_for_ever(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct fmt_place at;
    assert_int_equal(append(&rig, PAGE, 1, &at), KV_OK);
    faulty_io_arm(rig.faulty,
                  &(struct faulty_io_plan){
                      .action = FAULTY_IO_FAIL, .ops = FAULTY_IO_SYNC, .at = 1, .error = EIO});
    assert_int_equal(segment_sync(rig.writer, NULL), KV_ERR_IO);
    assert_int_equal(segment_rollback(rig.writer, NULL), KV_ERR_IO);
    assert_int_equal(append(&rig, PAGE, 1, &at), KV_ERR_IO);
    drop_rig(&rig);
}

/* Preallocation is a wish: without room for it, or without support, writing goes on. */
static void preallocation_gives_way(void **state) {
    (void)state;
    static const int errors[] = {ENOSPC, EOPNOTSUPP};
    for (size_t i = 0; i < 2; i++) {
        struct rig rig = make_rig(io_best_door());
        struct fmt_place at;
        faulty_io_arm(rig.faulty, &(struct faulty_io_plan){.action = FAULTY_IO_FAIL,
                                                           .ops = FAULTY_IO_SPACE,
                                                           .at = 1,
                                                           .error = errors[i]});
        assert_int_equal(append(&rig, 2 * PAGE, 1, &at), KV_OK);
        assert_int_equal(segment_sync(rig.writer, NULL), KV_OK);
        assert_int_equal(faulty_io_counts(rig.faulty).hits, 1);
        assert_int_equal(file_bytes(&rig, 1), 2 * PAGE);
        segment_commit(rig.writer);
        drop_rig(&rig);
    }
}

/* The flag that is reported is the flag of the file, also where direct was asked for and refused.
 */
static int refusing_open(void *context, int dir, const char *name, int flags, int *file_out) {
    (void)context;
    if ((flags & IO_DIRECT) != 0)
        return EINVAL;
    return io_posix_door()->open(NULL, dir, name, flags, file_out);
}

/* Fails with BREAK_DIRECT_FLAG. */
static void direct_flag_is_the_truth(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    int direct = -1;
    assert_int_equal(segment_probe(rig.writer, &direct, NULL), KV_OK);
    int file = openat(rig.dir, "00000001.seg", O_RDWR | O_DIRECT);
    assert_int_equal(direct, file >= 0);
    assert_int_equal(segment_is_direct(rig.writer), direct);
    if (file >= 0)
        close(file);
    drop_rig(&rig);
    struct io_door refusing = *io_posix_door();
    refusing.open = refusing_open;
    rig = make_rig(&refusing);
    assert_int_equal(segment_probe(rig.writer, &direct, NULL), KV_OK);
    assert_int_equal(direct, 0);
    assert_int_equal(segment_is_direct(rig.writer), 0);
    assert_non_null(strstr(segment_fallback(rig.writer), "O_DIRECT is refused"));
    drop_rig(&rig);
}

static void links_are_refused(void **state) {
    (void)state;
    struct rig rig = make_rig(io_best_door());
    struct kv_diag diag = {""};
    struct fmt_place at;
    int file = -1;
    int direct = 0;
    assert_int_equal(symlinkat("/etc/hostname", rig.dir, "00000001.seg"), 0);
    assert_int_equal(segment_reserve(rig.writer, PAGE, UINT64_MAX, &at, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "symbolic link"));
    struct segment_open_args args = {rig.door, rig.dir, 1, 1};
    assert_int_equal(segment_open_read(&args, &file, &direct, &diag), KV_ERR_CORRUPT);
    args.number = 2;
    assert_int_equal(segment_open_read(&args, &file, &direct, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "missing"));
    drop_rig(&rig);
}

TESTING_MAIN(cmocka_unit_test(names), cmocka_unit_test(appends_and_crosses_segments),
             cmocka_unit_test(written_segments_are_synced_beside_later_writes),
             cmocka_unit_test(a_failed_sync_beside_writes_is_for_ever),
             cmocka_unit_test(large_item), cmocka_unit_test(rollback_leaves_nothing),
             cmocka_unit_test(drop_cuts_at_the_tail),
             cmocka_unit_test(short_tail_file_is_left_alone),
             cmocka_unit_test(write_error_is_kept_until_rollback),
             cmocka_unit_test(failed_sync_is_for_ever), cmocka_unit_test(preallocation_gives_way),
             cmocka_unit_test(direct_flag_is_the_truth), cmocka_unit_test(links_are_refused))
