/* store/store_check.c - reading an entry only to see whether it is whole.
 *
 * Responsible for: memory for the extents of one entry, a few MiB at a time, and adding up the
 * account.
 * Not responsible for: how bytes are read (store_read.c).
 */
#include "store/store_inner.h"

#include <stdio.h>

/* Extents are checked in runs of about this many bytes, a larger one alone. */
enum { RUN_BYTES = 32 << 20 };

struct run {
    struct store_extent extents[STORE_EXTENTS_MAX];
    struct iovec pieces[STORE_EXTENTS_MAX];
    struct store_read reads[STORE_EXTENTS_MAX];
    char labels[STORE_EXTENTS_MAX][40];
    size_t count;
    uint64_t bytes;
};

static void add_stats(struct store_read_stats *sum, const struct store_read_stats *stats) {
    if (sum == NULL)
        return;
    sum->direct = sum->reads == 0 ? stats->direct : sum->direct & stats->direct;
    sum->door_name = stats->door_name;
    sum->read_bytes += stats->read_bytes;
    sum->raw_bytes += stats->raw_bytes;
    sum->placed_bytes += stats->placed_bytes;
    sum->reads += stats->reads;
    if (stats->in_flight_max > sum->in_flight_max)
        sum->in_flight_max = stats->in_flight_max;
    sum->wait_ns += stats->wait_ns;
    sum->unzip_ns += stats->unzip_ns;
    sum->digest_ns += stats->digest_ns;
    sum->digests += stats->digests;
}

static enum kv_err check_run(struct store *store, struct run *run, struct store_read_stats *sum,
                             struct kv_diag *diag) {
    const struct kv_alloc *alloc = store->options.alloc;
    struct store_read_stats stats = {0};
    uint8_t *memory = kv_alloc_aligned(alloc, (size_t)run->bytes, STORE_PAGE_BYTES);
    if (memory == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to check %llu bytes",
                           (unsigned long long)run->bytes);
    uint64_t off = 0;
    int in_doubt = 0;
    for (size_t i = 0; i < run->count; i++) {
        run->pieces[i] = (struct iovec){memory + off, (size_t)run->extents[i].raw_bytes};
        off += kv_round_up(run->extents[i].raw_bytes, STORE_PAGE_BYTES);
    }
    struct store_read_args args = {.reads = run->reads, .count = run->count};
    enum kv_err err = store_read(store, &args, &stats, diag);
    for (size_t i = 0; i < run->count; i++)
        in_doubt |= run->reads[i].in_doubt;
    /* A read that timed out may still land there, so that memory is never used again. */
    if (!in_doubt)
        kv_alloc_release(alloc, memory);
    add_stats(sum, &stats);
    run->count = 0;
    run->bytes = 0;
    return err;
}

static void add_extent(struct run *run, const struct store_extent *extent, uint32_t index) {
    size_t at = run->count++;
    run->extents[at] = *extent;
    run->bytes += kv_round_up(extent->raw_bytes, STORE_PAGE_BYTES);
    snprintf(run->labels[at], sizeof run->labels[at], "extent %u of kind %u", index, extent->kind);
    run->reads[at] = (struct store_read){.extent = &run->extents[at],
                                         .pieces = &run->pieces[at],
                                         .piece_count = 1,
                                         .verify = 1,
                                         .label = run->labels[at]};
}

enum kv_err store_read_entry(struct store *store, const struct store_read_entry_args *args,
                             struct store_read_stats *stats, struct kv_diag *diag) {
    struct run *run = kv_alloc_zeroed(store->options.alloc, 1, sizeof *run);
    enum kv_err err = KV_OK;
    if (run == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to check a record");
    for (uint32_t i = 0; i < args->entry->extent_count && err == KV_OK; i++) {
        struct store_extent extent = fmt_entry_extent(args->entry, i);
        if (extent.id < args->id_min)
            continue;
        if (run->count != 0 && run->bytes + extent.raw_bytes > RUN_BYTES)
            err = check_run(store, run, stats, diag);
        if (err == KV_OK)
            add_extent(run, &extent, i);
    }
    if (err == KV_OK && run->count != 0)
        err = check_run(store, run, stats, diag);
    kv_alloc_release(store->options.alloc, run);
    return err;
}

enum kv_err store_read_check(struct store *store, const void *key, size_t key_bytes,
                             struct store_read_stats *stats, struct kv_diag *diag) {
    struct index_copy copy = {0};
    struct fmt_entry entry;
    enum kv_err err = KV_OK;
    if (key_bytes == 0 || key_bytes > STORE_KEY_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "a key of %zu bytes", key_bytes);
    err = index_get(store->index, key, key_bytes, &copy, diag);
    if (err == KV_ERR_NOT_FOUND)
        kv_diag_set(diag, err, "no such record");
    if (err == KV_OK) {
        err = fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry);
        if (err != KV_OK)
            kv_diag_set(diag, err, "an index entry fails its check");
    }
    if (err == KV_OK) {
        struct store_read_entry_args args = {key, key_bytes, &entry, 0};
        err = store_read_entry(store, &args, stats, diag);
    }
    index_copy_release(store->options.alloc, &copy);
    return err;
}
