/* store/store_bench.c - the store's speed beside plain I/O.
 *
 * Responsible for: a fresh store and a plain file on the same file system, the same bytes through
 * both, nothing left behind.
 * Not responsible for: printing.
 */
#include "store/store_bench.h"

#include "store/base/bytes.h"
#include "store/io.h"
#include "store/store_batch.h"
#include "store/store_read.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

enum { PLAIN_BYTES = 1 << 20, RUN_BYTES = 64 << 20 };

struct bench {
    const struct store_bench_options *options;
    struct store_bench_result *result;
    const struct io_door *door;
    const struct kv_clock *clock;
    struct store *store;
    uint8_t *memory; /* RUN_BYTES or one extent, page-aligned */
    size_t memory_bytes;
    uint64_t extents;
};

static uint64_t next_random(uint64_t *state) {
    uint64_t value = *state += 0x9e3779b97f4a7c15u;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

static void fill_noise(uint8_t *bytes, size_t count, uint64_t seed) {
    for (size_t i = 0; i + 8 <= count; i += 8) {
        uint64_t value = next_random(&seed);
        memcpy(bytes + i, &value, 8);
    }
}

static enum kv_err check_options(const struct store_bench_options *options, struct kv_diag *diag) {
    if (options->total_bytes < (uint64_t)16 << 20 || options->total_bytes > (uint64_t)64 << 30 ||
        options->extent_bytes == 0 || options->extent_bytes % STORE_PAGE_BYTES != 0 ||
        options->extent_bytes > (uint64_t)16 << 20 || options->batch_bytes < options->extent_bytes)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "bench store: 16 MiB to 64 GiB in extents of pages up to 16 MiB, and "
                           "batches of at least one extent");
    return KV_OK;
}

static void make_key(uint64_t index, uint8_t key_out[8]) {
    kv_put_u64_be(key_out, index);
}

/* Each extent differs from every other in each page, so that nothing can be shared or guessed. */
static void stamp(uint8_t *extent, size_t bytes, uint64_t index) {
    for (size_t off = 0; off < bytes; off += STORE_PAGE_BYTES)
        kv_put_u64(extent + off, index * 0x9e3779b97f4a7c15u + off);
}

static enum kv_err write_batch(struct bench *bench, uint64_t first, uint64_t end,
                               struct kv_diag *diag) {
    size_t bytes = (size_t)bench->options->extent_bytes;
    struct store_bench_rate *rate = &bench->result->write;
    struct store_batch *batch = NULL;
    struct store_commit_stats stats;
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    enum kv_err err = store_batch_begin(bench->store, (end - first) * (bytes + 1024), &batch, diag);
    for (uint64_t i = first; i < end && err == KV_OK; i++) {
        uint8_t key[8];
        make_key(i, key);
        stamp(bench->memory, bytes, i);
        struct iovec piece = {bench->memory, bytes};
        struct store_part part = {0, STORE_RAW, &piece, 1};
        struct store_put put = {key, sizeof key, "", 0, &part, 1};
        err = store_batch_put(batch, &put, diag);
    }
    if (err != KV_OK) {
        store_batch_abandon(batch);
        return err;
    }
    err = store_batch_commit(batch, &stats, diag);
    if (err != KV_OK)
        return err;
    rate->ns += kv_clock_now_ns(bench->clock) - begin_ns;
    rate->bytes += (end - first) * bytes;
    rate->operations += stats.writes;
    if (stats.in_flight_max > rate->in_flight_max)
        rate->in_flight_max = stats.in_flight_max;
    bench->result->direct = stats.direct;
    bench->result->door_name = stats.door_name;
    return KV_OK;
}

static enum kv_err write_all(struct bench *bench, struct kv_diag *diag) {
#ifdef BREAK_BENCH_RANGE
    bench->extents /= 2;
#endif
    uint64_t per_batch = bench->options->batch_bytes / bench->options->extent_bytes;
    enum kv_err err = KV_OK;
    for (uint64_t first = 0; first < bench->extents && err == KV_OK; first += per_batch) {
        uint64_t end = first + per_batch < bench->extents ? first + per_batch : bench->extents;
        err = write_batch(bench, first, end, diag);
    }
    return err;
}

/* Extents [first, first + count) side by side into memory. */
static enum kv_err read_run(struct bench *bench, uint64_t first, uint64_t count, uint8_t verify,
                            struct store_bench_rate *rate, struct kv_diag *diag) {
    enum { RUN_EXTENTS = 64 };
    struct store_record records[RUN_EXTENTS] = {0};
    struct iovec pieces[RUN_EXTENTS];
    struct store_read reads[RUN_EXTENTS];
    struct store_read_stats stats;
    size_t bytes = (size_t)bench->options->extent_bytes;
    enum kv_err err = KV_OK;
    for (uint64_t i = 0; i < count; i++) {
        uint8_t key[8];
        make_key(first + i, key);
        KV_TRY(store_get(bench->store, key, sizeof key, &records[i], diag));
        pieces[i] = (struct iovec){bench->memory + i * bytes, bytes};
        reads[i] = (struct store_read){
            .extent = records[i].extents, .pieces = &pieces[i], .piece_count = 1, .verify = verify};
    }
    struct store_read_args args = {.reads = reads, .count = (size_t)count};
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    KV_TRY(store_read(bench->store, &args, &stats, diag));
    rate->ns += kv_clock_now_ns(bench->clock) - begin_ns;
    rate->bytes += stats.raw_bytes;
    rate->operations += stats.reads;
    if (stats.in_flight_max > rate->in_flight_max)
        rate->in_flight_max = stats.in_flight_max;
    for (uint64_t i = 0; i < count; i++) {
        if (kv_get_u64(bench->memory + i * bytes) != (first + i) * 0x9e3779b97f4a7c15u)
            KV_TRY(kv_diag_set(diag, KV_ERR_CORRUPT, "bench store: read back other bytes"));
    }
done:
    for (uint64_t i = 0; i < count; i++)
        store_record_release(bench->store, &records[i]);
    return err;
}

static enum kv_err read_all(struct bench *bench, uint8_t verify, struct store_bench_rate *rate,
                            struct kv_diag *diag) {
    uint64_t per_run = bench->memory_bytes / bench->options->extent_bytes;
    enum kv_err err = KV_OK;
    if (per_run > 64)
        per_run = 64;
    for (uint64_t first = 0; first < bench->extents && err == KV_OK; first += per_run) {
        uint64_t left = bench->extents - first;
        err = read_run(bench, first, left < per_run ? left : per_run, verify, rate, diag);
    }
    return err;
}

static int open_plain(struct bench *bench, int dir, int *file_out, struct kv_diag *diag) {
    struct io_file_info info = {0};
    int how = IO_WRITE | IO_CREATE | IO_EXCLUSIVE;
    int error = EINVAL;
    if (bench->options->store.direct_wanted)
        error = bench->door->open(bench->door->context, dir, "plain", how | IO_DIRECT, file_out);
    if (error == EINVAL)
        error = bench->door->open(bench->door->context, dir, "plain", how, file_out);
    if (error == 0)
        error = bench->door->info(bench->door->context, *file_out, &info);
    bench->result->plain_direct = info.is_direct;
    if (error != 0)
        kv_diag_errno(diag, KV_ERR_IO, error, "bench store: cannot make a plain file");
    return error;
}

/* The same bytes, 1 MiB at a time, one after the other, on a preallocated file. */
static enum kv_err plain(struct bench *bench, int dir, struct kv_diag *diag) {
    const struct io_door *door = bench->door;
    struct store_bench_rate *write = &bench->result->plain_write;
    struct store_bench_rate *read = &bench->result->plain_read;
    uint64_t total = bench->extents * bench->options->extent_bytes & ~(uint64_t)(PLAIN_BYTES - 1);
    int file = -1;
    int error = open_plain(bench, dir, &file, diag);
    if (error != 0)
        return KV_ERR_IO;
    error = door->allocate(door->context, file, total);
    if (error == EOPNOTSUPP)
        error = 0;
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    for (uint64_t off = 0; off < total && error == 0; off += PLAIN_BYTES) {
        stamp(bench->memory, PLAIN_BYTES, off);
        error = door->write(door->context, file, bench->memory, PLAIN_BYTES, off);
    }
    if (error == 0)
        error = door->sync(door->context, file);
    *write = (struct store_bench_rate){total, kv_clock_now_ns(bench->clock) - begin_ns,
                                       total / PLAIN_BYTES, 1};
    begin_ns = kv_clock_now_ns(bench->clock);
    for (uint64_t off = 0; off < total && error == 0; off += PLAIN_BYTES) {
        size_t got = 0;
        error = door->read(door->context, file, bench->memory, PLAIN_BYTES, off, &got);
        if (error == 0 && got != PLAIN_BYTES)
            error = EIO;
    }
    *read = (struct store_bench_rate){total, kv_clock_now_ns(bench->clock) - begin_ns,
                                      total / PLAIN_BYTES, 1};
    door->close(door->context, file);
    return error == 0 ? KV_OK
                      : kv_diag_errno(diag, error == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, error,
                                      "bench store: plain file");
}

struct removal {
    const struct io_door *door;
    int dir;
};

static int remove_each(void *argument, const char *name) {
    struct removal *removal = argument;
    removal->door->remove(removal->door->context, removal->dir, name);
    return 0;
}

static void remove_all_in(const struct io_door *door, int dir, const char *name) {
    struct removal removal = {.door = door};
    if (door->open(door->context, dir, name, IO_READ | IO_DIRECTORY, &removal.dir) != 0)
        return;
    door->list(door->context, removal.dir, remove_each, &removal);
    door->close(door->context, removal.dir);
}

static void remove_store(struct bench *bench) {
    const struct io_door *door = bench->door;
    const char *path = bench->options->store.dir;
    int dir = -1;
    if (door->open(door->context, AT_FDCWD, path, IO_READ | IO_DIRECTORY, &dir) != 0)
        return;
    remove_all_in(door, dir, "seg");
    remove_all_in(door, dir, "index");
    struct removal removal = {door, dir};
    door->list(door->context, dir, remove_each, &removal);
    door->close(door->context, dir);
    door->remove(door->context, AT_FDCWD, path);
}

static enum kv_err measure_plain(struct bench *bench, struct kv_diag *diag) {
    const struct io_door *door = bench->door;
    int dir = -1;
    int error = door->open(door->context, AT_FDCWD, bench->options->store.dir,
                           IO_READ | IO_DIRECTORY, &dir);
    if (error != 0)
        return kv_diag_errno(diag, KV_ERR_IO, error, "bench store: cannot open its directory");
    enum kv_err err = plain(bench, dir, diag);
    door->remove(door->context, dir, "plain");
    door->close(door->context, dir);
    return err;
}

static int is_empty(const struct store_bench_rate *rate) {
    return rate->bytes == 0 || rate->ns == 0 || rate->operations == 0;
}

static enum kv_err run(struct bench *bench, struct kv_diag *diag) {
    struct store_bench_result *result = bench->result;
    struct store_stats stats;
    enum kv_err err = KV_OK;
    KV_TRY(store_open(&bench->options->store, &bench->store, diag));
    KV_TRY(write_all(bench, diag));
    KV_TRY(read_all(bench, 0, &result->read, diag));
    KV_TRY(read_all(bench, 1, &result->read_check, diag));
    store_stats_get(bench->store, &stats);
    memcpy(result->fallback, stats.fallback, sizeof result->fallback);
    KV_TRY(measure_plain(bench, diag));
    if (is_empty(&result->write) || is_empty(&result->read) || is_empty(&result->read_check) ||
        is_empty(&result->plain_write) || is_empty(&result->plain_read) ||
        result->read.bytes != result->write.bytes || stats.records != bench->extents)
        KV_TRY(kv_diag_set(diag, KV_ERR_PROOF, "bench store: nothing was measured"));
done:
    store_close(bench->store);
    return err;
}

enum kv_err store_bench(const struct store_bench_options *options, struct store_bench_result *out,
                        struct kv_diag *diag) {
    struct store_bench_result result = {0};
    struct bench bench = {.options = options,
                          .result = &result,
                          .door = options->store.door,
                          .clock = options->store.clock};
    struct io_file_info info;
    enum kv_err err = check_options(options, diag);
    if (err != KV_OK)
        return err;
    if (bench.door->info_at(bench.door->context, AT_FDCWD, options->store.dir, &info) == 0)
        return kv_diag_set(diag, KV_ERR_EXISTS, "bench store: %s is there already: name a new one",
                           options->store.dir);
    bench.extents = options->total_bytes / options->extent_bytes;
    bench.memory_bytes = RUN_BYTES;
    bench.memory = kv_alloc_aligned(options->store.alloc, bench.memory_bytes, STORE_PAGE_BYTES);
    if (bench.memory == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "bench store: no memory");
    fill_noise(bench.memory, bench.memory_bytes, options->seed);
    err = run(&bench, diag);
    remove_store(&bench);
    kv_alloc_release(options->store.alloc, bench.memory);
    if (err == KV_OK)
        *out = result;
    return err;
}
