/* store/store_bench.c - the store's speed beside plain I/O.
 *
 * Responsible for: a fresh store and plain files on the same file system, the same bytes through
 * both in turns, ratios pair by pair, nothing left behind.
 * Not responsible for: printing.
 */
#include "store/store_bench.h"

#include "store/base/bytes.h"
#include "store/io.h"
#include "store/store_batch.h"
#include "store/store_read.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { PLAIN_BYTES = 1 << 20, RUN_BYTES = 64 << 20, TURN_BYTES = 64 << 10, BLOCK_BYTES = 2 << 20 };

/* What one pair took. */
struct times {
    uint64_t write_ns, plain_write_ns, read_ns, read_check_ns, plain_read_ns;
    uint64_t one_turn_ns, nine_turns_ns, one_block_ns, nine_blocks_ns;
    uint64_t plain_blocks_ns; /* a plain file of as many bytes as the nine */
};

struct bench {
    const struct store_bench_options *options;
    struct store_bench_result *result;
    const struct io_door *door;
    const struct kv_clock *clock;
    struct store *store;
    uint8_t *memory; /* RUN_BYTES or one extent, page-aligned */
    size_t memory_bytes;
    uint64_t extents_per_batch;
    uint64_t next_key; /* of the batches that only their wall time counts of */
    uint32_t pairs;
    struct times times[STORE_BENCH_PAIRS_MAX];
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

/* `count` records from `first` on, each one extent of `bytes`, in one batch. */
static enum kv_err write_batch(struct bench *bench, uint64_t first, uint64_t count, size_t bytes,
                               struct store_commit_stats *stats_out, struct kv_diag *diag) {
    struct store_batch *batch = NULL;
    enum kv_err err = store_batch_begin(bench->store, count * (bytes + 1024), &batch, diag);
    for (uint64_t i = first; i < first + count && err == KV_OK; i++) {
        uint8_t key[8];
        make_key(i, key);
        stamp(bench->memory, bytes, i);
        struct iovec piece = {bench->memory, bytes};
        struct store_part part = {0, STORE_RAW, &piece, 1, 0};
        struct store_put put = {key, sizeof key, "", 0, &part, 1};
        err = store_batch_put(batch, &put, diag);
    }
    if (err != KV_OK) {
        store_batch_abandon(batch);
        return err;
    }
    err = store_batch_commit(batch, stats_out, diag);
    if (err != KV_OK)
        return err;
    bench->result->batches++;
    bench->result->index_commits += stats_out->index_commits;
    bench->result->segments += stats_out->segments;
    bench->result->syncs += stats_out->syncs;
    return KV_OK;
}

static enum kv_err write_pair(struct bench *bench, uint32_t pair, struct kv_diag *diag) {
    struct store_bench_rate *rate = &bench->result->write;
    struct store_commit_stats stats;
    uint64_t count = bench->extents_per_batch;
    size_t bytes = (size_t)bench->options->extent_bytes;
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    enum kv_err err = write_batch(bench, pair * count, count, bytes, &stats, diag);
    if (err != KV_OK)
        return err;
    bench->times[pair].write_ns = kv_clock_now_ns(bench->clock) - begin_ns;
#ifdef BREAK_BENCH_RANGE
    count /= 2;
#endif
    rate->ns += bench->times[pair].write_ns;
    rate->bytes += count * bytes;
    rate->operations += stats.writes;
    bench->result->write_wait_ns += stats.write_ns;
    bench->result->write_sync_ns += stats.sync_ns;
    bench->result->write_index_ns += stats.index_ns;
    if (stats.in_flight_max > rate->in_flight_max)
        rate->in_flight_max = stats.in_flight_max;
    bench->result->direct = stats.direct;
    bench->result->door_name = stats.door_name;
    return KV_OK;
}

/* A batch of `count` sessions' changes, timed. */
static enum kv_err write_sessions(struct bench *bench, uint64_t count, size_t bytes,
                                  uint64_t *ns_out, struct kv_diag *diag) {
    struct store_commit_stats stats;
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    enum kv_err err = write_batch(bench, bench->next_key, count, bytes, &stats, diag);
    *ns_out = kv_clock_now_ns(bench->clock) - begin_ns;
    bench->next_key += count;
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

static enum kv_err plain_failed(int error, struct kv_diag *diag) {
    return error == 0 ? KV_OK
                      : kv_diag_errno(diag, error == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, error,
                                      "bench store: plain file");
}

/* A new file, its space taken at once, 1 MiB at a time, one after the other, one fdatasync. */
static enum kv_err plain_file(struct bench *bench, int dir, uint64_t total, uint64_t *ns_out,
                              struct kv_diag *diag) {
    const struct io_door *door = bench->door;
    int file = -1;
    door->remove(door->context, dir, "plain");
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    int error = open_plain(bench, dir, &file, diag);
    if (error != 0)
        return KV_ERR_IO;
    error = door->allocate(door->context, file, total);
    if (error == EOPNOTSUPP)
        error = 0;
    for (uint64_t off = 0; off < total && error == 0; off += PLAIN_BYTES) {
        size_t left = total - off < PLAIN_BYTES ? (size_t)(total - off) : PLAIN_BYTES;
        stamp(bench->memory, left, off);
        error = door->write(door->context, file, bench->memory, left, off);
    }
    if (error == 0)
        error = door->sync(door->context, file);
    *ns_out = kv_clock_now_ns(bench->clock) - begin_ns;
    door->close(door->context, file);
    return plain_failed(error, diag);
}

static enum kv_err plain_write(struct bench *bench, uint32_t pair, int dir, struct kv_diag *diag) {
    struct store_bench_rate *rate = &bench->result->plain_write;
    uint64_t total = bench->result->batch_bytes;
    enum kv_err err = plain_file(bench, dir, total, &bench->times[pair].plain_write_ns, diag);
    rate->ns += bench->times[pair].plain_write_ns;
    rate->bytes += total;
    rate->operations += (total + PLAIN_BYTES - 1) / PLAIN_BYTES;
    rate->in_flight_max = 1;
    return err;
}

static enum kv_err nine_pair(struct bench *bench, uint32_t pair, int dir, struct kv_diag *diag) {
    struct times *times = &bench->times[pair];
    uint64_t nine = STORE_BENCH_SESSIONS;
    enum kv_err err = KV_OK;
    KV_TRY(write_sessions(bench, 1, TURN_BYTES, &times->one_turn_ns, diag));
    KV_TRY(write_sessions(bench, nine, TURN_BYTES, &times->nine_turns_ns, diag));
    KV_TRY(write_sessions(bench, 1, BLOCK_BYTES, &times->one_block_ns, diag));
    if (pair % 2 == 0)
        KV_TRY(write_sessions(bench, nine, BLOCK_BYTES, &times->nine_blocks_ns, diag));
    KV_TRY(plain_file(bench, dir, nine * BLOCK_BYTES, &times->plain_blocks_ns, diag));
    if (pair % 2 != 0)
        KV_TRY(write_sessions(bench, nine, BLOCK_BYTES, &times->nine_blocks_ns, diag));
done:
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
    struct store_read_args args = {.reads = reads, .count = (size_t)count, .helper = verify};
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

static enum kv_err read_batch(struct bench *bench, uint32_t pair, uint8_t verify,
                              struct kv_diag *diag) {
    struct store_bench_rate *rate = verify ? &bench->result->read_check : &bench->result->read;
    struct times *times = &bench->times[pair];
    uint64_t per_run = bench->memory_bytes / bench->options->extent_bytes;
    uint64_t first = pair * bench->extents_per_batch;
    uint64_t end = first + bench->extents_per_batch;
    uint64_t before_ns = rate->ns;
    enum kv_err err = KV_OK;
    if (per_run > 64)
        per_run = 64;
    for (; first < end && err == KV_OK; first += per_run)
        err = read_run(bench, first, end - first < per_run ? end - first : per_run, verify, rate,
                       diag);
    *(verify ? &times->read_check_ns : &times->read_ns) = rate->ns - before_ns;
    return err;
}

static enum kv_err plain_read(struct bench *bench, uint32_t pair, int dir, struct kv_diag *diag) {
    const struct io_door *door = bench->door;
    struct store_bench_rate *rate = &bench->result->plain_read;
    uint64_t total = bench->result->batch_bytes;
    int file = -1;
    int how = IO_READ | (bench->result->plain_direct ? IO_DIRECT : 0);
    uint64_t begin_ns = kv_clock_now_ns(bench->clock);
    int error = door->open(door->context, dir, "plain", how, &file);
    for (uint64_t off = 0; off < total && error == 0; off += PLAIN_BYTES) {
        size_t left = total - off < PLAIN_BYTES ? (size_t)(total - off) : PLAIN_BYTES;
        size_t got = 0;
        error = door->read(door->context, file, bench->memory, left, off, &got);
        if (error == 0 && got != left)
            error = EIO;
        rate->operations++;
    }
    bench->times[pair].plain_read_ns = kv_clock_now_ns(bench->clock) - begin_ns;
    rate->ns += bench->times[pair].plain_read_ns;
    rate->bytes += total;
    rate->in_flight_max = 1;
    if (file >= 0)
        door->close(door->context, file);
    return plain_failed(error, diag);
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

/* The order changes from pair to pair: what is warm or busy then falls on both sides alike. */
static enum kv_err measure_pair(struct bench *bench, uint32_t pair, int dir, struct kv_diag *diag) {
    int store_first = pair % 2 == 0;
    enum kv_err err = KV_OK;
    if (store_first)
        KV_TRY(write_pair(bench, pair, diag));
    KV_TRY(plain_write(bench, pair, dir, diag));
    if (!store_first)
        KV_TRY(write_pair(bench, pair, diag));
    if (store_first)
        KV_TRY(read_batch(bench, pair, 0, diag));
    KV_TRY(read_batch(bench, pair, 1, diag));
    KV_TRY(plain_read(bench, pair, dir, diag));
    if (!store_first)
        KV_TRY(read_batch(bench, pair, 0, diag));
    KV_TRY(nine_pair(bench, pair, dir, diag));
done:
    return err;
}

static enum kv_err measure_all(struct bench *bench, struct kv_diag *diag) {
    const struct io_door *door = bench->door;
    int dir = -1;
    int error = door->open(door->context, AT_FDCWD, bench->options->store.dir,
                           IO_READ | IO_DIRECTORY, &dir);
    if (error != 0)
        return kv_diag_errno(diag, KV_ERR_IO, error, "bench store: cannot open its directory");
    enum kv_err err = KV_OK;
    for (uint32_t pair = 0; pair < bench->pairs && err == KV_OK; pair++) {
        if (bench->options->progress != NULL)
            bench->options->progress(bench->options->context, pair, bench->pairs);
        err = measure_pair(bench, pair, dir, diag);
    }
    door->remove(door->context, dir, "plain");
    door->close(door->context, dir);
    return err;
}

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left;
    double b = *(const double *)right;
    return a < b ? -1 : a > b;
}

/* `above` and `below` are offsets of members of struct times. */
static struct store_bench_ratio ratio_of(const struct bench *bench, size_t above, size_t below,
                                         int more_is_better) {
    double all[STORE_BENCH_PAIRS_MAX];
    uint32_t count = bench->pairs;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *times = (const uint8_t *)&bench->times[i];
        uint64_t over = *(const uint64_t *)(const void *)(times + above);
        uint64_t under = *(const uint64_t *)(const void *)(times + below);
        all[i] = (double)over / (double)(under == 0 ? 1 : under);
    }
    qsort(all, count, sizeof all[0], by_value);
    double median = count % 2 != 0 ? all[count / 2] : (all[count / 2 - 1] + all[count / 2]) / 2;
    uint32_t bad = count / 100;
    return (struct store_bench_ratio){median, more_is_better ? all[bad] : all[count - 1 - bad]};
}

static void tell_ratios(struct bench *bench) {
    struct store_bench_result *result = bench->result;
    size_t plain_write_at = offsetof(struct times, plain_write_ns);
    size_t plain_read_at = offsetof(struct times, plain_read_ns);
    result->pairs = bench->pairs;
    result->write_speed = ratio_of(bench, plain_write_at, offsetof(struct times, write_ns), 1);
    result->read_speed = ratio_of(bench, plain_read_at, offsetof(struct times, read_ns), 1);
    result->read_check_speed =
        ratio_of(bench, plain_read_at, offsetof(struct times, read_check_ns), 1);
    result->nine_turns = ratio_of(bench, offsetof(struct times, nine_turns_ns),
                                  offsetof(struct times, one_turn_ns), 0);
    result->nine_blocks = ratio_of(bench, offsetof(struct times, nine_blocks_ns),
                                   offsetof(struct times, one_block_ns), 0);
    result->nine_blocks_plain = ratio_of(bench, offsetof(struct times, nine_blocks_ns),
                                         offsetof(struct times, plain_blocks_ns), 0);
}

/* The batches of nine come behind those of the pairs. */
static uint64_t keys_end(const struct bench *bench) {
    return bench->pairs * bench->extents_per_batch;
}

static int is_empty(const struct store_bench_rate *rate) {
    return rate->bytes == 0 || rate->ns == 0 || rate->operations == 0;
}

static enum kv_err run(struct bench *bench, struct kv_diag *diag) {
    struct store_bench_result *result = bench->result;
    struct store_stats stats;
    enum kv_err err = KV_OK;
    KV_TRY(store_open(&bench->options->store, &bench->store, diag));
    KV_TRY(measure_all(bench, diag));
    store_stats_get(bench->store, &stats);
    memcpy(result->fallback, stats.fallback, sizeof result->fallback);
    if (is_empty(&result->write) || is_empty(&result->read) || is_empty(&result->read_check) ||
        is_empty(&result->plain_write) || is_empty(&result->plain_read) ||
        result->read.bytes != result->write.bytes || stats.records != bench->next_key)
        KV_TRY(kv_diag_set(diag, KV_ERR_PROOF, "bench store: nothing was measured"));
    if (result->index_commits != result->batches || result->syncs != result->segments)
        KV_TRY(kv_diag_set(diag, KV_ERR_PROOF,
                           "bench store: a batch took more than one fdatasync for each segment or "
                           "more than one index commit"));
    tell_ratios(bench);
done:
    store_close(bench->store);
    return err;
}

/* The batch as wanted where the total holds enough of them, else as large as the total. */
static void choose_pairs(struct bench *bench) {
    const struct store_bench_options *options = bench->options;
    uint64_t batch = options->batch_bytes;
    batch = batch < options->total_bytes ? batch : options->total_bytes;
    if (options->total_bytes / batch > STORE_BENCH_PAIRS_MAX)
        batch = options->total_bytes / STORE_BENCH_PAIRS_MAX;
    bench->extents_per_batch = batch / options->extent_bytes;
    bench->result->batch_bytes = bench->extents_per_batch * options->extent_bytes;
    uint64_t pairs = options->total_bytes / bench->result->batch_bytes;
    pairs = pairs < STORE_BENCH_PAIRS_MIN ? STORE_BENCH_PAIRS_MIN : pairs;
    pairs = pairs > STORE_BENCH_PAIRS_MAX ? STORE_BENCH_PAIRS_MAX : pairs;
    bench->pairs = (uint32_t)pairs;
    bench->next_key = keys_end(bench);
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
    choose_pairs(&bench);
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
