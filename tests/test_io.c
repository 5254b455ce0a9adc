/* tests/test_io.c - both doors to the file system behave the same.
 *
 * Responsible for: file calls, queues, depth, deadlines, short reads, symbolic links, fallbacks.
 * Not responsible for: what the store does with them.
 * Broken twins: BREAK_LINKS.
 */
#include "store/io.h"

#include "store/base/alloc.h"
#include "tests/support_faulty_io.h"
#include "tests/testing.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, MIB = 1 << 20 };

struct place {
    char path[TESTING_PATH_BYTES];
    int dir;
};

static struct place open_place(const struct io_door *door) {
    struct place place;
    testing_temp_dir(place.path);
    assert_int_equal(
        door->open(door->context, AT_FDCWD, place.path, IO_READ | IO_DIRECTORY, &place.dir), 0);
    return place;
}

static const struct io_door *door_at(int index) {
    return index == 0 ? io_uring_door() : io_posix_door();
}

static void file_calls(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct io_door *door = door_at(i);
        struct place place = open_place(door);
        struct io_file_info info;
        char back[16] = "";
        size_t got = 0;
        int file = -1;
        assert_int_equal(door->open(door->context, place.dir, "a", IO_READ, &file), ENOENT);
        assert_int_equal(
            door->open(door->context, place.dir, "a", IO_WRITE | IO_CREATE | IO_EXCLUSIVE, &file),
            0);
        assert_int_equal(door->write(door->context, file, "hello", 5, 3), 0);
        assert_int_equal(door->read(door->context, file, back, sizeof back, 0, &got), 0);
        assert_int_equal(got, 8);
        assert_memory_equal(back, "\0\0\0hello", 8);
        assert_int_equal(door->sync(door->context, file), 0);
        assert_int_equal(door->truncate(door->context, file, 5), 0);
        assert_int_equal(door->info(door->context, file, &info), 0);
        assert_int_equal(info.size_bytes, 5);
        assert_true(info.is_regular && !info.is_direct);
        assert_int_equal(door->close(door->context, file), 0);
        assert_int_equal(door->rename(door->context, place.dir, "a", "b"), 0);
        assert_int_equal(door->sync(door->context, place.dir), 0);
        assert_int_equal(
            door->open(door->context, place.dir, "b", IO_WRITE | IO_CREATE | IO_EXCLUSIVE, &file),
            EEXIST);
        assert_int_equal(door->make_dir(door->context, place.dir, "d"), 0);
        assert_int_equal(door->info_at(door->context, place.dir, "d", &info), 0);
        assert_true(!info.is_regular && !info.is_symlink);
        assert_int_equal(door->remove(door->context, place.dir, "d"), 0);
        assert_int_equal(door->remove(door->context, place.dir, "b"), 0);
        assert_int_equal(door->remove(door->context, place.dir, "b"), ENOENT);
        struct stat stat;
        assert_int_equal(fstatat(place.dir, "b", &stat, 0), -1);
        door->close(door->context, place.dir);
    }
}

/* Whole pages in the middle of a file go; its size, its other bytes and its neighbours stay. */
static void holes(void **state) {
    (void)state;
    static uint8_t bytes[64 * PAGE], back[64 * PAGE];
    memset(bytes, 0x5a, sizeof bytes);
    for (int i = 0; i < 2; i++) {
        const struct io_door *door = door_at(i);
        struct place place = open_place(door);
        struct io_file_info before, after;
        uint64_t space = 0;
        size_t got = 0;
        int file = -1;
        assert_int_equal(door->open(door->context, place.dir, "a", IO_WRITE | IO_CREATE, &file), 0);
        assert_int_equal(door->write(door->context, file, bytes, sizeof bytes, 0), 0);
        assert_int_equal(door->sync(door->context, file), 0);
        assert_int_equal(door->info(door->context, file, &before), 0);
        assert_true(before.stored_bytes >= sizeof bytes);
        assert_int_equal(door->free_space(door->context, file, &space), 0);
        assert_true(space > 0);
        int error = door->punch(door->context, file, 8 * PAGE, 32 * PAGE);
        if (error == EOPNOTSUPP)
            testing_skip("this file system makes no holes");
        assert_int_equal(error, 0);
        assert_int_equal(door->info(door->context, file, &after), 0);
        assert_int_equal(after.size_bytes, before.size_bytes);
        assert_true(after.stored_bytes + 31 * PAGE <= before.stored_bytes);
        assert_int_equal(door->read(door->context, file, back, sizeof back, 0, &got), 0);
        assert_int_equal(got, sizeof back);
        for (size_t at = 0; at < sizeof back; at++)
            assert_int_equal(back[at], at >= 8 * PAGE && at < 40 * PAGE ? 0 : 0x5a);
        door->close(door->context, file);
        door->close(door->context, place.dir);
    }
}

static void modes_are_private(void **state) {
    (void)state;
    const struct io_door *door = io_best_door();
    struct place place = open_place(door);
    struct stat stat;
    int file = -1;
    mode_t old = umask(0);
    assert_int_equal(door->open(door->context, place.dir, "f", IO_WRITE | IO_CREATE, &file), 0);
    assert_int_equal(door->make_dir(door->context, place.dir, "d"), 0);
    umask(old);
    assert_int_equal(fstat(file, &stat), 0);
    assert_int_equal(stat.st_mode & 0777, 0600);
    assert_int_equal(fstatat(place.dir, "d", &stat, 0), 0);
    assert_int_equal(stat.st_mode & 0777, 0700);
    door->close(door->context, file);
    door->close(door->context, place.dir);
}

/* Fails with BREAK_LINKS. */
static void links_are_not_followed(void **state) {
    (void)state;
    const struct io_door *door = io_best_door();
    struct place place = open_place(door);
    struct io_file_info info;
    int file = -1;
    assert_int_equal(symlinkat("/etc/hostname", place.dir, "link"), 0);
    assert_int_equal(symlinkat("/tmp", place.dir, "dirlink"), 0);
    assert_int_equal(door->open(door->context, place.dir, "link", IO_READ, &file), ELOOP);
    assert_int_equal(door->open(door->context, place.dir, "link", IO_WRITE | IO_CREATE, &file),
                     ELOOP);
    int error = door->open(door->context, place.dir, "dirlink", IO_READ | IO_DIRECTORY, &file);
    assert_true(error == ELOOP || error == ENOTDIR);
    assert_int_equal(door->info_at(door->context, place.dir, "link", &info), 0);
    assert_true(info.is_symlink);
    door->close(door->context, place.dir);
}

struct queue_rig {
    const struct io_door *door;
    struct io_queue *queue;
    uint8_t *buffers;
};

static struct queue_rig open_queue(const struct io_door *door, uint32_t depth) {
    struct queue_rig rig = {.door = door};
    rig.buffers = kv_alloc_aligned(kv_alloc_system(), 16 * MIB, PAGE);
    assert_non_null(rig.buffers);
    struct io_queue_options options = {.depth = depth,
                                       .buffers = rig.buffers,
                                       .buffer_count = 16,
                                       .buffer_bytes = MIB,
                                       .alloc = kv_alloc_system()};
    assert_int_equal(door->queue_open(door->context, &options, &rig.queue), 0);
    return rig;
}

static void close_queue(struct queue_rig *rig) {
    assert_int_equal(rig->door->queue_close(rig->door->context, rig->queue, 1000000000u), 0);
    kv_alloc_release(kv_alloc_system(), rig->buffers);
}

static void drain(struct queue_rig *rig, uint32_t expected, uint64_t bytes_each) {
    struct io_completion done[16];
    uint32_t total = 0;
    while (total < expected) {
        uint32_t taken = 0;
        assert_int_equal(
            rig->door->wait(rig->door->context, rig->queue, 10000000000u, done, 16, &taken), 0);
        assert_true(taken > 0);
        for (uint32_t i = 0; i < taken; i++) {
            assert_int_equal(done[i].error, 0);
            assert_int_equal(done[i].done_bytes, bytes_each);
        }
        total += taken;
    }
}

static void queue_moves_bytes(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const struct io_door *door = door_at(i / 2);
        struct place place = open_place(door);
        struct queue_rig rig = open_queue(door, 16);
        struct testing_random random;
        int direct = i % 2 ? IO_DIRECT : 0;
        int file = -1;
        if (door->open(door->context, place.dir, "f", IO_WRITE | IO_CREATE | direct, &file) ==
            EINVAL) {
            print_message("O_DIRECT is refused here\n");
            assert_int_equal(door->open(door->context, place.dir, "f", IO_WRITE | IO_CREATE, &file),
                             0);
        }
        testing_random_init(&random, testing_seed("queue", (uint64_t)i));
        testing_random_bytes(&random, rig.buffers, 16 * MIB);
        uint8_t *copy = malloc(16 * MIB);
        assert_non_null(copy);
        memcpy(copy, rig.buffers, 16 * MIB);
        struct io_request request = {.file = file, .write = 1, .count = MIB};
        for (int j = 0; j < 16; j++) {
            request.buffer = j % 3 == 0 ? IO_BUFFER_NONE : j;
            request.bytes = rig.buffers + (size_t)j * MIB;
            request.off = (uint64_t)j * MIB;
            request.tag = (uint64_t)j;
            assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        }
        assert_int_equal(door->submit(door->context, rig.queue, &request), EAGAIN);
        drain(&rig, 16, MIB);
        memset(rig.buffers, 0, 16 * MIB);
        request.write = 0;
        for (int j = 0; j < 16; j++) {
            request.buffer = j;
            request.bytes = rig.buffers + (size_t)j * MIB;
            request.off = (uint64_t)j * MIB;
            assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        }
        drain(&rig, 16, MIB);
        assert_memory_equal(copy, rig.buffers, 16 * MIB);
        free(copy);
        close_queue(&rig);
        door->close(door->context, file);
        door->close(door->context, place.dir);
    }
}

static void end_of_file_is_a_short_read(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct io_door *door = door_at(i);
        struct place place = open_place(door);
        struct queue_rig rig = open_queue(door, 4);
        struct io_completion done;
        uint32_t taken = 0;
        int file = -1;
        assert_int_equal(door->open(door->context, place.dir, "f", IO_WRITE | IO_CREATE, &file), 0);
        assert_int_equal(door->truncate(door->context, file, 5000), 0);
        struct io_request request = {
            .file = file, .buffer = IO_BUFFER_NONE, .bytes = rig.buffers, .count = 8192, .tag = 7};
        assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        assert_int_equal(door->wait(door->context, rig.queue, 10000000000u, &done, 1, &taken), 0);
        assert_int_equal(taken, 1);
        assert_int_equal(done.error, 0);
        assert_int_equal(done.done_bytes, 5000);
        assert_int_equal(done.tag, 7);
        request.off = 1 << 20;
        assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        assert_int_equal(door->wait(door->context, rig.queue, 10000000000u, &done, 1, &taken), 0);
        assert_int_equal(done.done_bytes, 0);
        request.file = -1;
        assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        assert_int_equal(door->wait(door->context, rig.queue, 10000000000u, &done, 1, &taken), 0);
        assert_int_equal(done.error, EBADF);
        assert_int_equal(door->wait(door->context, rig.queue, 1000, &done, 1, &taken), 0);
        assert_int_equal(taken, 0);
        close_queue(&rig);
        door->close(door->context, file);
        door->close(door->context, place.dir);
    }
}

/* A pipe without a writer never answers: the wait must end at its deadline, and the queue can be
 * left behind. */
static void wait_has_a_deadline(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct faulty_io *faulty = faulty_io_make(door_at(i));
        const struct io_door *door = faulty_io_door(faulty);
        struct place place = open_place(door);
        struct queue_rig rig = open_queue(door, 4);
        struct io_completion done;
        uint32_t taken = 9;
        int file = -1;
        assert_int_equal(door->open(door->context, place.dir, "f", IO_WRITE | IO_CREATE, &file), 0);
        faulty_io_arm(faulty, &(struct faulty_io_plan){
                                  .action = FAULTY_IO_STALL, .ops = FAULTY_IO_WRITE, .at = 1});
        struct io_request request = {
            .file = file, .write = 1, .buffer = 0, .bytes = rig.buffers, .count = PAGE};
        assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        assert_int_equal(door->wait(door->context, rig.queue, 20000000, &done, 1, &taken),
                         ETIMEDOUT);
        assert_int_equal(taken, 0);
        assert_int_equal(door->queue_close(door->context, rig.queue, 1000), ETIMEDOUT);
        faulty_io_release(faulty);
        assert_int_equal(door->wait(door->context, rig.queue, 10000000000u, &done, 1, &taken), 0);
        assert_int_equal(taken, 1);
        assert_int_equal(done.error, 0);
        close_queue(&rig);
        door->close(door->context, file);
        door->close(door->context, place.dir);
        faulty_io_drop(faulty);
    }
}

/* In a child without the right to make rings the POSIX queue takes over and says so. */
static void refused_ring_falls_back(void **state) {
    (void)state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct rlimit none = {3, 3}; /* no descriptor left for a ring */
        setrlimit(RLIMIT_NOFILE, &none);
        const struct io_door *door = io_uring_door();
        struct io_queue *queue = NULL;
        struct io_queue_options options = {.depth = 4, .alloc = kv_alloc_system()};
        if (door->queue_open(door->context, &options, &queue) != 0)
            _exit(1);
        if (strcmp(door->queue_name(door->context, queue), "posix") != 0)
            _exit(2);
        if (strstr(door->queue_fallback(door->context, queue), "io_uring is refused") == NULL)
            _exit(3);
        _exit(door->queue_close(door->context, queue, 1000000000u) == 0 ? 0 : 4);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* One transfer above 0x7ffff000 bytes, which the kernel cuts short (sparse: no bytes on disk). */
static void transfer_beyond_the_kernel_limit(void **state) {
    (void)state;
    const size_t count = (size_t)0x7ffff000 + 3 * PAGE;
    if (testing_quick())
        testing_skip("2 GiB of memory, left out by QUICK=1");
    uint8_t *bytes = kv_alloc_aligned(kv_alloc_system(), count, PAGE);
    if (bytes == NULL)
        testing_skip("not enough memory for one 2 GiB transfer");
    for (int i = 0; i < 2; i++) {
        const struct io_door *door = door_at(i);
        struct place place = open_place(door);
        struct queue_rig rig = open_queue(door, 2);
        struct io_completion done;
        uint32_t taken = 0;
        int file = -1;
        /* Direct where possible, so that 2 GiB of holes do not pass through the page cache. */
        if (door->open(door->context, place.dir, "f", IO_WRITE | IO_CREATE | IO_DIRECT, &file) != 0)
            assert_int_equal(door->open(door->context, place.dir, "f", IO_WRITE, &file), 0);
        assert_int_equal(door->truncate(door->context, file, count), 0);
        memset(bytes + count - PAGE, 0x5c, PAGE);
        assert_int_equal(door->write(door->context, file, bytes + count - PAGE, PAGE, count - PAGE),
                         0);
        memset(bytes + count - PAGE, 0, PAGE);
        struct io_request request = {
            .file = file, .buffer = IO_BUFFER_NONE, .bytes = bytes, .count = count};
        assert_int_equal(door->submit(door->context, rig.queue, &request), 0);
        assert_int_equal(door->wait(door->context, rig.queue, 60000000000u, &done, 1, &taken), 0);
        assert_int_equal(done.error, 0);
        assert_int_equal(done.done_bytes, count);
        for (size_t j = count - PAGE; j < count; j++)
            assert_int_equal(bytes[j], 0x5c);
        close_queue(&rig);
        door->close(door->context, file);
        door->close(door->context, place.dir);
    }
    kv_alloc_release(kv_alloc_system(), bytes);
}

static void allocation_failures(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct io_door *door = door_at(i);
        for (uint64_t k = 1;; k++) {
            struct testing_alloc alloc;
            struct io_queue *queue = NULL;
            testing_alloc_init(&alloc, k);
            struct io_queue_options options = {.depth = 4, .alloc = &alloc.alloc};
            int error = door->queue_open(door->context, &options, &queue);
            if (error == 0)
                door->queue_close(door->context, queue, 1000000000u);
            assert_int_equal(alloc.live_count, 0);
            assert_int_equal(error, alloc.failed_count == 0 ? 0 : ENOMEM);
            if (alloc.failed_count == 0)
                break;
        }
    }
}

TESTING_MAIN(cmocka_unit_test(file_calls), cmocka_unit_test(holes),
             cmocka_unit_test(modes_are_private), cmocka_unit_test(links_are_not_followed),
             cmocka_unit_test(queue_moves_bytes), cmocka_unit_test(end_of_file_is_a_short_read),
             cmocka_unit_test(wait_has_a_deadline), cmocka_unit_test(refused_ring_falls_back),
             cmocka_unit_test(transfer_beyond_the_kernel_limit),
             cmocka_unit_test(allocation_failures))
