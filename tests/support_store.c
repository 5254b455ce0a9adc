/* tests/support_store.c - records for store tests.
 *
 * Responsible for: the contract of support_store.h.
 * Not responsible for: what a test concludes.
 */
#include "tests/support_store.h"

#include "tests/testing.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOISE_BYTES = 30000, TEXT_BYTES = 20000, BF16_BYTES = 16384, EXTENT_ROOM = 32768 };

static const size_t extent_bytes[SUPPORT_STORE_EXTENTS] = {NOISE_BYTES, TEXT_BYTES, BF16_BYTES};

struct store_options support_store_options(const char *dir) {
    struct store_options options = store_options_usual(dir, "test");
    options.segment_bytes = 1 << 20;
    return options;
}

struct store *support_store_open(const struct store_options *options) {
    struct kv_diag diag = {""};
    struct store *store = NULL;
    enum kv_err err = store_open(options, &store, &diag);
    if (err != KV_OK)
        fail_msg("store_open: %s: %s", kv_err_name(err), diag.text);
    return store;
}

static void make_extent(unsigned index, unsigned version, int extent, uint8_t *out) {
    struct testing_random random;
    testing_random_init(&random, index * 1000003u + version * 101u + (unsigned)extent);
    if (extent == 0) {
        testing_random_bytes(&random, out, NOISE_BYTES);
    } else if (extent == 1) {
        char line[64];
        int bytes = snprintf(line, sizeof line, "record %u of version %u.\n", index, version);
        for (size_t i = 0; i < TEXT_BYTES; i++)
            out[i] = (uint8_t)line[i % (size_t)bytes];
    } else {
        testing_random_bytes(&random, out, BF16_BYTES);
        for (size_t i = 1; i < BF16_BYTES; i += 2)
            out[i] = (uint8_t)(0x3f + out[i] % 2);
    }
}

enum kv_err support_store_put(struct store_batch *batch, unsigned index, unsigned version,
                              struct kv_diag *diag) {
    static const enum store_codec_hint hints[SUPPORT_STORE_EXTENTS] = {STORE_RAW, STORE_ZSTD,
                                                                       STORE_SHUFFLE_ZSTD};
    static _Thread_local _Alignas(4096) uint8_t bytes[SUPPORT_STORE_EXTENTS][EXTENT_ROOM];
    struct iovec pieces[SUPPORT_STORE_EXTENTS][2];
    struct store_part parts[SUPPORT_STORE_EXTENTS];
    char key[32];
    char value[32];
    snprintf(key, sizeof key, "r%05u", index);
    snprintf(value, sizeof value, "v%u.%u", index, version);
    for (int i = 0; i < SUPPORT_STORE_EXTENTS; i++) {
        make_extent(index, version, i, bytes[i]);
        pieces[i][0] = (struct iovec){bytes[i], 4096};
        pieces[i][1] = (struct iovec){bytes[i] + 4096, extent_bytes[i] - 4096};
        parts[i] = (struct store_part){(uint8_t)i, hints[i], pieces[i], 2, 0};
    }
    struct store_put put = {key, strlen(key), value, strlen(value), parts, SUPPORT_STORE_EXTENTS};
    enum kv_err err = store_batch_put(batch, &put, diag);
    /* The store has taken the bytes: what happens to them now must not matter. */
    memset(bytes, 0xdd, sizeof bytes);
    return err;
}

enum kv_err support_store_commit(struct store *store, unsigned first, unsigned end,
                                 unsigned version, struct kv_diag *diag) {
    struct store_batch *batch = NULL;
    enum kv_err err = store_batch_begin(store, 0, &batch, diag);
    if (err != KV_OK)
        return err;
    for (unsigned i = first; i < end && err == KV_OK; i++)
        err = support_store_put(batch, i, version, diag);
    if (err != KV_OK) {
        store_batch_abandon(batch);
        return err;
    }
    return store_batch_commit(batch, NULL, diag);
}

static int read_matches(struct store *store, const struct store_record *record, unsigned index,
                        unsigned version, int aligned) {
    const struct kv_alloc *alloc = kv_alloc_system();
    uint8_t *memory = kv_alloc_aligned(alloc, SUPPORT_STORE_EXTENTS * 2 * EXTENT_ROOM, 4096);
    uint8_t *expected = kv_alloc_aligned(alloc, EXTENT_ROOM, 4096);
    struct iovec pieces[SUPPORT_STORE_EXTENTS][2];
    struct store_read reads[SUPPORT_STORE_EXTENTS];
    int same = memory != NULL && expected != NULL;
    size_t first = aligned ? 8192 : 777;
    size_t shift = aligned ? 0 : 3;
    for (int i = 0; i < SUPPORT_STORE_EXTENTS && same; i++) {
        uint8_t *at = memory + (size_t)i * 2 * EXTENT_ROOM + shift;
        memset(at, 0xee, EXTENT_ROOM);
        pieces[i][0] = (struct iovec){at, first};
        pieces[i][1] = (struct iovec){at + first, extent_bytes[i] - first};
        reads[i] = (struct store_read){
            .extent = &record->extents[i], .pieces = pieces[i], .piece_count = 2, .verify = 1};
    }
    struct store_read_args args = {
        .reads = reads, .count = SUPPORT_STORE_EXTENTS, .helper = (int)(index + version) % 2};
    same = same && store_read(store, &args, NULL, NULL) == KV_OK;
    for (int i = 0; i < SUPPORT_STORE_EXTENTS && same; i++) {
        make_extent(index, version, i, expected);
        same = memcmp(expected, pieces[i][0].iov_base, extent_bytes[i]) == 0;
    }
    kv_alloc_release(alloc, expected);
    kv_alloc_release(alloc, memory);
    return same;
}

int support_store_matches(struct store *store, unsigned index, unsigned version, int aligned) {
    struct store_record record;
    char key[32];
    char value[32];
    snprintf(key, sizeof key, "r%05u", index);
    snprintf(value, sizeof value, "v%u.%u", index, version);
    if (store_get(store, key, strlen(key), &record, NULL) != KV_OK)
        return 0;
    int same = record.value_bytes == strlen(value) &&
               memcmp(record.value, value, record.value_bytes) == 0 &&
               record.extent_count == SUPPORT_STORE_EXTENTS;
    for (int i = 0; i < SUPPORT_STORE_EXTENTS && same; i++)
        same = record.extents[i].raw_bytes == extent_bytes[i] && record.extents[i].kind == i;
    same = same && read_matches(store, &record, index, version, aligned);
    store_record_release(store, &record);
    return same;
}

int support_store_absent(struct store *store, unsigned index) {
    char key[32];
    int exists = 1;
    snprintf(key, sizeof key, "r%05u", index);
    return store_exists(store, key, strlen(key), &exists, NULL) == KV_OK && !exists;
}

char *support_store_dump(struct store *store) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    struct store_walk walk = {0};
    struct store_record record;
    enum kv_err err;
    assert_non_null(out);
    while ((err = store_next(store, &walk, &record, NULL)) == KV_OK) {
        fprintf(out, "%.*s = %.*s\n", (int)record.key_bytes, (const char *)record.key,
                (int)record.value_bytes, (const char *)record.value);
        for (uint32_t i = 0; i < record.extent_count; i++) {
            const struct store_extent *extent = &record.extents[i];
            char hex[KV_DIGEST_HEX_BYTES];
            kv_digest_hex(&extent->digest, hex);
            fprintf(out, "  %llu kind %u codec %u at %u+%llu raw %llu stored %llu %s\n",
                    (unsigned long long)extent->id, extent->kind, extent->codec, extent->segment,
                    (unsigned long long)extent->off, (unsigned long long)extent->raw_bytes,
                    (unsigned long long)extent->stored_bytes, hex);
        }
        store_record_release(store, &record);
    }
    struct store_stats stats;
    store_stats_get(store, &stats);
    fprintf(out, "%s: records %llu live %llu segments %llu batches %llu\n", kv_err_name(err),
            (unsigned long long)stats.records, (unsigned long long)stats.live_bytes,
            (unsigned long long)stats.segment_bytes, (unsigned long long)stats.batches);
    fclose(out);
    return text;
}

static void join(char *out, size_t room, const char *dir, const char *name) {
    assert_true((size_t)snprintf(out, room, "%s/%s", dir, name) < room);
}

void support_store_remove_index(const char *dir) {
    char path[512];
    join(path, sizeof path, dir, "index/data.mdb");
    unlink(path);
    join(path, sizeof path, dir, "index/lock.mdb");
    unlink(path);
    join(path, sizeof path, dir, "index");
    assert_int_equal(rmdir(path), 0);
}

void support_store_copy(const char *from_dir, const char *to_dir) {
    char command[1200];
    assert_true((size_t)snprintf(command, sizeof command, "cp -a '%s/.' '%s/'", from_dir, to_dir) <
                sizeof command);
    assert_int_equal(system(command), 0);
}

uint64_t support_store_segment_bytes(const char *dir, unsigned number) {
    char path[512];
    char name[64];
    struct stat stat_buffer;
    snprintf(name, sizeof name, "seg/%08u.seg", number);
    join(path, sizeof path, dir, name);
    return stat(path, &stat_buffer) == 0 ? (uint64_t)stat_buffer.st_size : 0;
}

void support_store_flip(const char *dir, const char *name, uint64_t off, unsigned char bits) {
    char path[512];
    unsigned char byte;
    join(path, sizeof path, dir, name);
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    assert_int_equal(pread(file, &byte, 1, (off_t)off), 1);
    byte ^= bits;
    assert_int_equal(pwrite(file, &byte, 1, (off_t)off), 1);
    close(file);
}

void support_store_truncate(const char *dir, const char *name, uint64_t bytes) {
    char path[512];
    join(path, sizeof path, dir, name);
    assert_int_equal(truncate(path, (off_t)bytes), 0);
}

uint64_t support_store_segments_disk_bytes(const char *dir) {
    char path[600];
    uint64_t bytes = 0;
    snprintf(path, sizeof path, "%s/seg", dir);
    DIR *list = opendir(path);
    assert_non_null(list);
    for (struct dirent *item; (item = readdir(list)) != NULL;) {
        struct stat info;
        if (item->d_name[0] != '.' && fstatat(dirfd(list), item->d_name, &info, 0) == 0)
            bytes += (uint64_t)info.st_blocks * 512;
    }
    closedir(list);
    return bytes;
}

void support_store_fill_disk(const char *mount_dir) {
    static const uint8_t zeros[1 << 16];
    char path[600];
    join(path, sizeof path, mount_dir, "brim");
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(file >= 0);
    for (size_t take = sizeof zeros; take != 0;) {
        ssize_t done = write(file, zeros, take);
        if (done <= 0)
            take /= 2;
    }
    fsync(file);
    close(file);
}

void support_store_unfill_disk(const char *mount_dir) {
    char path[600];
    join(path, sizeof path, mount_dir, "brim");
    assert_int_equal(unlink(path), 0);
}

uint64_t support_store_disk_bytes(const char *dir) {
    char command[600];
    unsigned long long kib = 0;
    snprintf(command, sizeof command, "du -sk '%s'", dir);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_int_equal(fscanf(pipe, "%llu", &kib), 1);
    pclose(pipe);
    return kib * 1024;
}
