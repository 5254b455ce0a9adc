/* store/recover.c - batch records read back from the segments.
 *
 * Responsible for: finding them page by page, loading and checking one with its extents, and taking
 * over at open what a crash left between sync and index commit.
 * Not responsible for: building an index from nothing (rebuild.c).
 */
#include "store/store_inner.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { SCAN_BYTES = 1 << 20 };

struct numbers {
    const struct kv_alloc *alloc;
    uint32_t *items;
    size_t count;
    size_t capacity;
    int no_memory;
};

static int add_number(void *argument, const char *name) {
    struct numbers *numbers = argument;
    uint32_t number = segment_number(name);
    if (number == 0)
        return 0;
    void *items = numbers->items;
    if (!kv_alloc_grow(numbers->alloc, &items, &numbers->capacity, numbers->count + 1,
                       sizeof *numbers->items)) {
        numbers->no_memory = 1;
        return 1;
    }
    numbers->items = items;
    size_t at = numbers->count++;
    for (; at > 0 && numbers->items[at - 1] > number; at--)
        numbers->items[at] = numbers->items[at - 1];
    numbers->items[at] = number;
    return 0;
}

enum kv_err recover_segments(struct store *store, uint32_t **numbers_out, size_t *count_out,
                             struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    struct numbers numbers = {.alloc = store->options.alloc};
    int error = door->list(door->context, store->seg_dir, add_number, &numbers);
    if (error != 0 || numbers.no_memory) {
        kv_alloc_release(numbers.alloc, numbers.items);
        if (numbers.no_memory)
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the list of segments");
        return kv_diag_errno(diag, KV_ERR_IO, error, "cannot list seg/");
    }
    *numbers_out = numbers.items;
    *count_out = numbers.count;
    return KV_OK;
}

static enum kv_err open_for_scan(struct store *store, uint32_t number, int *file_out,
                                 struct kv_diag *diag) {
    int direct = 0;
    struct segment_open_args args = {
        .door = store->options.door, .dir = store->seg_dir, .number = number};
    return segment_open_read(&args, file_out, &direct, diag);
}

static int is_zero(const uint8_t *bytes, size_t count) {
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0;
}

/* A record is ours when it names this store and its own place; a copy elsewhere is only bytes. */
static enum kv_err look_at_page(struct store *store, const uint8_t *page, struct fmt_place at,
                                struct recover_list *list, struct kv_diag *diag) {
    struct fmt_batch batch;
    enum kv_err err = fmt_batch_decode_head(page, STORE_PAGE_BYTES, &batch);
    if (err == KV_ERR_VERSION)
        return kv_diag_set(diag, err,
                           "a batch record needs version %u of the format, this program knows "
                           "version %d: use a newer coldplane",
                           kv_get_u32(page + 8), STORE_FORMAT_VERSION);
    int ours = list->any_store || memcmp(batch.store_id, store->id, FMT_ID_BYTES) == 0;
    if (err != KV_OK || !ours || batch.at.segment != at.segment || batch.at.off != at.off)
        return KV_OK;
    void *items = list->items;
    if (!kv_alloc_grow(store->options.alloc, &items, &list->capacity, list->count + 1,
                       sizeof *list->items))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the list of batches");
    list->items = items;
    list->items[list->count++] = batch;
    return KV_OK;
}

enum kv_err recover_scan(struct store *store, struct fmt_place from, struct recover_list *list,
                         uint64_t *nonzero_end_out, struct kv_diag *diag) {
    const struct recover_range range = {from, UINT64_MAX};
    return recover_scan_range(store, &range, list, nonzero_end_out, diag);
}

enum kv_err recover_scan_range(struct store *store, const struct recover_range *range,
                               struct recover_list *list, uint64_t *nonzero_end_out,
                               struct kv_diag *diag) {
    struct fmt_place from = range->from;
    const struct io_door *door = store->options.door;
    enum kv_err err = KV_OK;
    uint64_t nonzero_end = from.off;
    int file = -1;
    uint8_t *buffer = kv_alloc_aligned(store->options.alloc, SCAN_BYTES, STORE_PAGE_BYTES);
    if (buffer == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to read segments");
    KV_TRY(open_for_scan(store, from.segment, &file, diag));
    for (uint64_t off = from.off; off < range->end; off += SCAN_BYTES) {
        size_t got = 0;
        size_t want = range->end - off < SCAN_BYTES ? (size_t)(range->end - off) : SCAN_BYTES;
        int error = door->read(door->context, file, buffer, want, off, &got);
        if (error != 0)
            KV_TRY(segment_error(diag, error, "read", from.segment));
        memset(buffer + got, 0, SCAN_BYTES - got);
        for (size_t at = 0; at < got; at += STORE_PAGE_BYTES) {
            if (is_zero(buffer + at, STORE_PAGE_BYTES))
                continue;
            nonzero_end = off + at + STORE_PAGE_BYTES;
            struct fmt_place place = {from.segment, off + at};
            KV_TRY(look_at_page(store, buffer + at, place, list, diag));
        }
        if (got < SCAN_BYTES)
            break;
    }
    *nonzero_end_out = nonzero_end;
done:
    if (file >= 0)
        door->close(door->context, file);
    kv_alloc_release(store->options.alloc, buffer);
    return err;
}

enum kv_err recover_id(struct store *store, uint8_t id_out[FMT_ID_BYTES], struct kv_diag *diag) {
    struct recover_list list = {.any_store = 1};
    uint32_t *numbers = NULL;
    size_t count = 0;
    enum kv_err err = recover_segments(store, &numbers, &count, diag);
    for (size_t i = 0; i < count && err == KV_OK; i++) {
        const struct fmt_place from = {numbers[i], 0};
        uint64_t nonzero_end = 0;
        err = recover_scan(store, from, &list, &nonzero_end, diag);
    }
    if (err == KV_OK && list.count == 0)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "no batch record in seg/ names a store");
#ifndef BREAK_TWO_STORES
    for (size_t i = 1; i < list.count && err == KV_OK; i++)
        if (memcmp(list.items[i].store_id, list.items[0].store_id, FMT_ID_BYTES) != 0)
            err = kv_diag_set(diag, KV_ERR_CORRUPT,
                              "seg/ holds batch records of two stores: part them first");
#endif
    if (err == KV_OK)
        memcpy(id_out, list.items[0].store_id, FMT_ID_BYTES);
    kv_alloc_release(store->options.alloc, list.items);
    kv_alloc_release(store->options.alloc, numbers);
    return err;
}

enum kv_err recover_load(struct store *store, const struct fmt_batch *batch, uint8_t **record_out,
                         struct kv_digest *digest_out, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    enum kv_err err = KV_OK;
    int file = -1;
    size_t bytes = (size_t)batch->record_bytes;
    uint8_t *record = kv_alloc_aligned(store->options.alloc, bytes, 64);
    if (record == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a batch record");
    KV_TRY(open_for_scan(store, batch->at.segment, &file, diag));
    size_t got = 0;
    int error = door->read(door->context, file, record, bytes, batch->at.off, &got);
    if (error != 0)
        KV_TRY(segment_error(diag, error, "read", batch->at.segment));
    struct fmt_batch whole;
    err = fmt_batch_decode(record, got, &whole, digest_out);
    if (err != KV_OK)
        KV_TRY(kv_diag_set(diag, err, "the record of batch %llu is damaged",
                           (unsigned long long)batch->sequence));
    *record_out = record;
    record = NULL;
done:
    if (file >= 0)
        door->close(door->context, file);
    kv_alloc_release(store->options.alloc, record);
    return err;
}

enum kv_err recover_padding(struct store *store, const struct fmt_batch *batch,
                            struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    uint8_t padding[STORE_PAGE_BYTES];
    size_t got = 0;
    size_t bytes =
        (size_t)(kv_round_up(batch->record_bytes, STORE_PAGE_BYTES) - batch->record_bytes);
    int file = -1;
    enum kv_err err = open_for_scan(store, batch->at.segment, &file, diag);
    if (err != KV_OK)
        return err;
    int error =
        door->read(door->context, file, padding, bytes, batch->at.off + batch->record_bytes, &got);
    door->close(door->context, file);
    if (error != 0)
        return segment_error(diag, error, "read", batch->at.segment);
    for (size_t i = 0; i < got; i++)
        if (padding[i] != 0)
            return kv_diag_set(diag, KV_ERR_CORRUPT,
                               "the padding behind the record of batch %llu is damaged",
                               (unsigned long long)batch->sequence);
    return KV_OK;
}

static struct kv_reader operations(const struct fmt_batch *batch, const uint8_t *record) {
    struct kv_reader reader;
    kv_reader_init(&reader, record + FMT_BATCH_HEAD_BYTES,
                   (size_t)batch->record_bytes - FMT_BATCH_HEAD_BYTES - KV_DIGEST_BYTES);
    return reader;
}

enum kv_err recover_verify(struct store *store, const struct fmt_batch *batch,
                           const uint8_t *record, struct kv_diag *diag) {
    struct kv_reader reader = operations(batch, record);
    for (uint32_t i = 0; i < batch->op_count; i++) {
        struct fmt_op op;
        enum kv_err err = fmt_op_decode(&reader, &op);
        assert(err == KV_OK); /* recover_load has decoded them all */
#ifdef BREAK_TORN_BATCH
        continue;
#endif
        if (op.type != FMT_OP_PUT)
            continue;
        struct store_read_entry_args args = {.key = op.key,
                                             .key_bytes = op.key_bytes,
                                             .entry = &op.entry,
                                             .id_min = batch->extent_id_first};
        err = store_read_entry(store, &args, NULL, diag);
        if (err != KV_OK)
            return err;
    }
    return KV_OK;
}

enum kv_err recover_apply(struct index *index, const struct fmt_batch *batch, const uint8_t *record,
                          struct fmt_state *state, struct kv_diag *diag) {
    struct kv_reader reader = operations(batch, record);
    struct fmt_state next = *state;
    uint64_t ids_end = batch->extent_id_first + batch->extent_id_count;
    next.epoch = batch->epoch;
    next.sequence = batch->sequence;
    next.tail = (struct fmt_place){
        batch->at.segment, batch->at.off + kv_round_up(batch->record_bytes, STORE_PAGE_BYTES)};
    if (ids_end > next.extent_id_next)
        next.extent_id_next = ids_end;
    memcpy(next.last.bytes, record + batch->record_bytes - KV_DIGEST_BYTES, KV_DIGEST_BYTES);
    enum kv_err err = index_apply(index, reader.bytes, reader.size_bytes, &next, diag);
    if (err == KV_OK)
        *state = next;
    return err;
}

static int continues(const struct fmt_batch *batch, const struct fmt_state *state) {
    return batch->sequence == state->sequence + 1 &&
           memcmp(batch->previous.bytes, state->last.bytes, KV_DIGEST_BYTES) == 0;
}

/* Where the batch's bytes in segment `n` end, which begin behind `from`. */
static uint64_t end_in(const struct fmt_batch *batch, const uint8_t *record, uint32_t n,
                       uint64_t from) {
    struct kv_reader reader = operations(batch, record);
    uint64_t end = from;
    for (uint32_t i = 0; i < batch->op_count; i++) {
        struct fmt_op op;
        enum kv_err err = fmt_op_decode(&reader, &op);
        assert(err == KV_OK); /* recover_load has decoded them all */
        for (uint32_t e = 0; op.type == FMT_OP_PUT && e < op.entry.extent_count; e++) {
            const struct store_extent extent = fmt_entry_extent(&op.entry, e);
            uint64_t behind = extent.off + kv_round_up(extent.stored_bytes, STORE_PAGE_BYTES);
            end = extent.segment == n && behind > end ? behind : end;
        }
    }
    return end;
}

/* What was allocated ahead for more of the batch. */
static int cut_ended(const struct io_door *door, int file, uint64_t end) {
    struct io_file_info info = {0};
    int error = door->info(door->context, file, &info);
#ifdef BREAK_ENDED_CUT
    return 0;
#endif
    return error == 0 && info.size_bytes > end ? door->truncate(door->context, file, end) : error;
}

/* Its bytes may be nowhere but in the page cache: whoever wrote them was killed before it synced
 * them, and nobody opens an ended segment again. */
static enum kv_err sync_batch(struct store *store, const struct fmt_batch *batch,
                              const uint8_t *record, struct kv_diag *diag) {
    const struct fmt_place tail = store->state.tail;
    const struct io_door *door = store->options.door;
    int error = 0;
#ifdef BREAK_RECOVER_SYNC
    return KV_OK;
#endif
    for (uint32_t n = tail.segment; n <= batch->at.segment && error == 0; n++) {
        char name[SEGMENT_NAME_BYTES];
        int file = -1;
        segment_name(n, name);
        error = door->open(door->context, store->seg_dir, name, IO_WRITE, &file);
        if (error == ENOENT) { /* the tail ended just before a segment that gc has removed */
            error = 0;
            continue;
        }
        uint64_t from = n == tail.segment ? tail.off : 0;
        if (error == 0 && n < batch->at.segment)
            error = cut_ended(door, file, end_in(batch, record, n, from));
        if (error == 0)
            error = door->sync(door->context, file);
        if (file >= 0)
            door->close(door->context, file);
        if (error != 0)
            return segment_error(diag, error, "sync", n);
    }
    return segment_error(diag, door->sync(door->context, store->seg_dir), "sync", 0);
}

/* Takes over the batch that continues the state, if one of the list does and is whole. */
static enum kv_err take_next(struct store *store, const struct recover_list *list, int *taken_out,
                             struct kv_diag *diag) {
    *taken_out = 0;
    for (size_t i = list->count; i-- > 0 && !*taken_out;) {
        const struct fmt_batch *batch = &list->items[i];
        uint8_t *record = NULL;
        struct kv_digest digest;
        if (!continues(batch, &store->state))
            continue;
        enum kv_err err = recover_load(store, batch, &record, &digest, diag);
        if (err == KV_OK)
            err = recover_verify(store, batch, record, diag);
        if (err == KV_OK)
            err = sync_batch(store, batch, record, diag);
        if (err == KV_OK) {
            err = recover_apply(store->index, batch, record, &store->state, diag);
            *taken_out = err == KV_OK;
        }
        kv_alloc_release(store->options.alloc, record);
        if (err != KV_OK && err != KV_ERR_CORRUPT)
            return err;
    }
    if (*taken_out)
        store_inner_note(store, "batch %llu was synced but not in the index: taken over. ",
                         (unsigned long long)store->state.sequence);
    return KV_OK;
}

/* Cuts what stands behind the tail: nobody was told that it is safe. */
static enum kv_err cut(struct store *store, const uint32_t *numbers, size_t count,
                       uint64_t dropped_bytes, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    struct fmt_place tail = store->state.tail;
    for (size_t i = count; i-- > 0 && numbers[i] > tail.segment;) {
        char name[SEGMENT_NAME_BYTES];
        segment_name(numbers[i], name);
        int error = door->remove(door->context, store->seg_dir, name);
        if (error != 0)
            return segment_error(diag, error, "remove", numbers[i]);
    }
    char name[SEGMENT_NAME_BYTES];
    struct io_file_info info = {0};
    int file = -1;
    segment_name(tail.segment, name);
    int error = door->open(door->context, store->seg_dir, name, IO_WRITE, &file);
    if (error == ENOENT)
        return KV_OK;
    if (error == 0)
        error = door->info(door->context, file, &info);
    if (error == 0 && info.size_bytes > tail.off)
        error = door->truncate(door->context, file, tail.off);
    if (file >= 0)
        door->close(door->context, file);
    if (error == 0 && dropped_bytes != 0)
        store_inner_note(store, "%llu bytes of a batch that was never committed were cut off. ",
                         (unsigned long long)dropped_bytes);
    return segment_error(diag, error, "cut", tail.segment);
}

/* Scans everything behind the tail; *dirty_out counts bytes that are not zero. */
static enum kv_err scan_behind(struct store *store, const uint32_t *numbers, size_t count,
                               struct recover_list *list, uint64_t *dirty_out,
                               struct kv_diag *diag) {
    struct fmt_place tail = store->state.tail;
    list->count = 0;
    *dirty_out = 0;
    for (size_t i = 0; i < count; i++) {
        struct fmt_place from = {numbers[i], numbers[i] == tail.segment ? tail.off : 0};
        uint64_t nonzero_end = 0;
        if (numbers[i] < tail.segment)
            continue;
        enum kv_err err = recover_scan(store, from, list, &nonzero_end, diag);
        if (err != KV_OK)
            return err;
        *dirty_out += nonzero_end - from.off;
    }
    return KV_OK;
}

enum kv_err recover_forward(struct store *store, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    uint32_t *numbers = NULL;
    size_t count = 0;
    struct recover_list list = {0};
    uint64_t dirty_bytes = 0;
    int taken = 1;
    KV_TRY(recover_segments(store, &numbers, &count, diag));
    while (taken) {
        KV_TRY(scan_behind(store, numbers, count, &list, &dirty_bytes, diag));
        KV_TRY(take_next(store, &list, &taken, diag));
    }
    KV_TRY(cut(store, numbers, count, dirty_bytes, diag));
done:
    kv_alloc_release(store->options.alloc, list.items);
    kv_alloc_release(store->options.alloc, numbers);
    return err;
}
