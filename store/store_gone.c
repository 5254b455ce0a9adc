/* store/store_gone.c - ranges of sequences in one record.
 *
 * Responsible for: the contract of store_gone.h.
 * Not responsible for: segments.
 */
#include "store/store_gone.h"

#include <string.h>

enum { RANGE_BYTES = 16 };

static const char gone_key[] = STORE_GONE_OWN_PREFIX "gone";
enum { GONE_KEY_BYTES = sizeof gone_key - 1 };

static enum kv_err decode(struct store_gone *gone, const uint8_t *value, size_t bytes) {
    uint64_t end = 0;
    if (bytes % RANGE_BYTES != 0 || bytes / RANGE_BYTES > STORE_GONE_RANGES_MAX)
        return KV_ERR_CORRUPT;
    for (size_t i = 0; i < bytes / RANGE_BYTES; i++) {
        struct store_gone_range range = {kv_get_u64(value + i * RANGE_BYTES),
                                         kv_get_u64(value + i * RANGE_BYTES + 8)};
        if (range.first <= end || range.end <= range.first)
            return KV_ERR_CORRUPT;
        end = range.end;
        gone->ranges[gone->count++] = range;
    }
    return KV_OK;
}

enum kv_err store_gone_load(struct index *index, const struct kv_alloc *alloc,
                            struct store_gone *out, struct kv_diag *diag) {
    struct index_copy copy = {0};
    struct fmt_entry entry;
    out->alloc = alloc;
    out->count = 0;
    out->ranges = kv_alloc_zeroed(alloc, STORE_GONE_RANGES_MAX, sizeof *out->ranges);
    if (out->ranges == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the list of removed batches");
    enum kv_err err = index_get(index, gone_key, GONE_KEY_BYTES, &copy, diag);
    if (err == KV_OK)
        err = fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry);
    if (err == KV_OK)
        err = decode(out, entry.value, entry.value_bytes);
    if (err == KV_ERR_CORRUPT)
        kv_diag_set(diag, err, "the list of removed batches is damaged: rebuild the index");
    index_copy_release(alloc, &copy);
    return err == KV_ERR_NOT_FOUND ? KV_OK : err;
}

void store_gone_release(struct store_gone *gone) {
    if (gone->alloc != NULL)
        kv_alloc_release(gone->alloc, gone->ranges);
    *gone = (struct store_gone){0};
}

enum kv_err store_gone_add(struct store_gone *gone, uint64_t sequence, struct kv_diag *diag) {
    struct store_gone_range *ranges = gone->ranges;
    size_t at = 0;
    while (at < gone->count && ranges[at].end < sequence)
        at++;
    if (at < gone->count && ranges[at].first <= sequence && sequence < ranges[at].end)
        return KV_OK;
    if (at < gone->count && ranges[at].end == sequence) {
        ranges[at].end++;
        if (at + 1 < gone->count && ranges[at + 1].first == ranges[at].end) {
            ranges[at].end = ranges[at + 1].end;
            memmove(ranges + at + 1, ranges + at + 2, (gone->count - at - 2) * sizeof *ranges);
            gone->count--;
        }
        return KV_OK;
    }
    if (at < gone->count && ranges[at].first == sequence + 1) {
        ranges[at].first--;
        return KV_OK;
    }
    if (gone->count == STORE_GONE_RANGES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "the segments left are too scattered: gc with a larger live percentage");
    memmove(ranges + at + 1, ranges + at, (gone->count - at) * sizeof *ranges);
    ranges[at] = (struct store_gone_range){sequence, sequence + 1};
    gone->count++;
    return KV_OK;
}

uint64_t store_gone_missing(const struct store_gone *gone, uint64_t first, uint64_t end) {
    uint64_t missing = end > first ? end - first : 0;
    for (size_t i = 0; i < gone->count; i++) {
        uint64_t from = gone->ranges[i].first > first ? gone->ranges[i].first : first;
        uint64_t to = gone->ranges[i].end < end ? gone->ranges[i].end : end;
        if (to > from)
            missing -= to - from;
    }
    return missing;
}

enum kv_err store_gone_put(const struct store_gone *gone, struct store_batch *batch,
                           struct kv_diag *diag) {
    size_t bytes = gone->count * RANGE_BYTES;
    uint8_t *value = kv_alloc_aligned(gone->alloc, bytes + 1, 16);
    if (value == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the list of removed batches");
    for (size_t i = 0; i < gone->count; i++) {
        kv_put_u64(value + i * RANGE_BYTES, gone->ranges[i].first);
        kv_put_u64(value + i * RANGE_BYTES + 8, gone->ranges[i].end);
    }
    const struct store_put put = {
        .key = gone_key, .key_bytes = GONE_KEY_BYTES, .value = value, .value_bytes = bytes};
    enum kv_err err = store_batch_put(batch, &put, diag);
    kv_alloc_release(gone->alloc, value);
    return err;
}
