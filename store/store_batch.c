/* store/store_batch.c - batches: extents, the batch record, sync, index commit, in that order.
 *
 * Responsible for: the order that makes a batch whole or absent, the byte budget, the account.
 * Not responsible for: placing and writing bytes (segment_writer.c), layouts (fmt.c).
 */
#include "store/store_batch.h"

#include "store/store_inner.h"
#include "store/store_pack.h"
#include "store/store_ram_inner.h"
#include "store/store_reserve.h"
#include "store/store_written.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

/* What an index commit may add beside twice the entries: LMDB copies the pages on the way to a leaf
 * before it gives the old ones back. */
enum { INDEX_GROWTH_BYTES = 128 * 1024 };

enum { SLICE_BYTES = 32 * 1024 }; /* stays in the first-level cache */

/* What no put may use up, so that records can still be removed from a full store. */
#ifdef BREAK_REMOVAL_ROOM
enum { REMOVAL_BYTES = 0 };
#else
enum { REMOVAL_BYTES = 2 * INDEX_GROWTH_BYTES };
#endif

static uint64_t padded(uint64_t bytes) {
    return kv_round_up(bytes, STORE_PAGE_BYTES);
}

/* The first failure is what commit will say. */
static enum kv_err fail(struct store_batch *batch, enum kv_err err, struct kv_diag *diag) {
    if (batch->err == KV_OK) {
        batch->err = err;
        if (diag != NULL)
            batch->diag = *diag;
    }
    return err;
}

uint64_t store_inner_used(struct store *store) {
    uint64_t used = index_bytes(store->index) + store_reserve_bytes(store);
    pthread_mutex_lock(&store->lock);
    used += store->segment_bytes;
    pthread_mutex_unlock(&store->lock);
    return used;
}

/* Bytes that the store's files may still grow by, after what this batch has written and its record
 * so far, when another `extent_bytes` and `op_bytes` are added. 0 when they do not fit. */
static uint64_t room_after(struct store_batch *batch, uint64_t extent_bytes, uint64_t op_bytes,
                           uint64_t *need_out, uint64_t *have_out) {
    struct store *store = batch->store;
    uint64_t ops = batch->record_bytes + op_bytes;
    uint64_t need = extent_bytes + padded(ops + KV_DIGEST_BYTES) + 2 * ops + INDEX_GROWTH_BYTES;
    uint64_t used =
        store_inner_used(store) + segment_uncommitted_bytes(store->writer) + batch->spare;
    uint64_t max = store->options.bytes_max;
    *need_out = need;
    *have_out = used < max ? max - used : 0;
    return *have_out >= need ? *have_out - need + extent_bytes : 0;
}

static enum kv_err check_budget(struct store_batch *batch, uint64_t extent_bytes, uint64_t op_bytes,
                                uint64_t *room_out, struct kv_diag *diag) {
    uint64_t need = 0;
    uint64_t have = 0;
    uint64_t room = room_after(batch, extent_bytes, op_bytes, &need, &have);
#ifdef BREAK_BUDGET
    have = need;
#endif
    /* A budget set below what is stored, or eaten up, must not keep out what makes room: such a
     * batch adds its record, and gc takes that back. */
    int only_removes = batch->removes && extent_bytes == 0 && batch->stats.stored_bytes == 0;
#ifdef BREAK_REMOVAL_OVER
    only_removes = 0;
#endif
    if (!only_removes && have < need)
        return kv_diag_set(
            diag, KV_ERR_NO_SPACE,
            "the store's byte budget of %llu has %llu left and the batch needs %llu: "
            "remove something and run gc, or raise the budget",
            (unsigned long long)batch->store->options.bytes_max, (unsigned long long)have,
            (unsigned long long)need);
    /* On a disk that is short, space taken ahead would be missing in the index. */
    if (room_out != NULL)
        *room_out = batch->removes ? 0 : room;
    return KV_OK;
}

static enum kv_err grow_record(struct store_batch *batch, size_t more, struct kv_diag *diag) {
    void *record = batch->record;
    uint64_t needed = batch->record_bytes + more + KV_DIGEST_BYTES;
    if (needed > STORE_BATCH_RECORD_BYTES_MAX || batch->op_count >= STORE_BATCH_OPS_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "a batch of more than %llu bytes of keys and values or %d changes: "
                           "commit in smaller batches",
                           (unsigned long long)STORE_BATCH_RECORD_BYTES_MAX, STORE_BATCH_OPS_MAX);
    /* Only the bytes in use are copied, and they are all of the capacity that matters. */
    if (!kv_alloc_grow(batch->store->options.alloc, &record, &batch->record_capacity,
                       (size_t)needed, 1))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a batch record");
    batch->record = record;
    return KV_OK;
}

static enum kv_err begin(struct store *store, uint64_t worst_bytes, int removes,
                         struct store_batch **out, struct kv_diag *diag) {
    struct store_batch *batch = &store->batch;
    if (store->writer == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "the store is open for reading only");
    if (batch->open)
        return kv_diag_set(diag, KV_ERR_BUSY, "a batch is open already");
    pthread_mutex_lock(&store->lock);
    int refuses = store->refuses_writes;
    struct fmt_state state = store->state;
    pthread_mutex_unlock(&store->lock);
    if (refuses)
        return kv_diag_set(diag, KV_ERR_IO,
                           "the store takes no more writes since a sync or commit failed: open it "
                           "again, which finds out what is safe");
    batch->store = store;
    batch->removes = removes;
    batch->spare = removes ? 0 : store->options.reserve_bytes;
    batch->cause = STORE_CAUSE_OTHER;
    batch->err = KV_OK;
    batch->record_bytes = FMT_BATCH_HEAD_BYTES;
    batch->op_count = 0;
    batch->extent_id_first = state.extent_id_next;
    batch->extent_id_next = state.extent_id_next;
    batch->begin = state.tail;
    memset(&batch->stats, 0, sizeof batch->stats);
    enum kv_err err = KV_OK;
    if (store->options.bytes_max != STORE_BYTES_UNLIMITED) {
        uint64_t worst =
            worst_bytes < STORE_BYTES_UNLIMITED / 4 ? worst_bytes : STORE_BYTES_UNLIMITED / 4;
        /* What every put will ask for as well, so that a batch whose bound is true is never cut
         * short. One without puts needs none. */
        if (worst != 0 && !removes)
            worst += REMOVAL_BYTES;
        err = check_budget(batch, worst, 0, NULL, diag);
    }
    if (err == KV_OK)
        err = grow_record(batch, 0, diag);
    if (err != KV_OK)
        return err;
    (void)segment_take_counts(store->writer);
    if (!removes)
        store_reserve_take(store);
    batch->open = 1;
    *out = batch;
    return KV_OK;
}

enum kv_err store_batch_begin(struct store *store, uint64_t worst_bytes, struct store_batch **out,
                              struct kv_diag *diag) {
    return begin(store, worst_bytes, 0, out, diag);
}

enum kv_err store_inner_begin_reserve(struct store *store, struct store_batch **out,
                                      struct kv_diag *diag) {
    return begin(store, 0, 1, out, diag);
}

enum kv_err store_batch_begin_removal(struct store *store, struct store_batch **out,
                                      struct kv_diag *diag) {
    enum kv_err err = store_inner_begin_reserve(store, out, diag);
    /* Not for gc: what it moves would use the reserve up and give nothing back for it. */
    if (err == KV_OK)
        store_reserve_give(store);
    return err;
}

static enum kv_err check_sizes(size_t key_bytes, size_t value_bytes, struct kv_diag *diag) {
    if (key_bytes == 0 || key_bytes > STORE_KEY_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "a key has %zu bytes: it must have 1 to %d",
                           key_bytes, STORE_KEY_BYTES_MAX);
    if (value_bytes > STORE_VALUE_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "a value has %zu bytes: more than %d belong in an extent", value_bytes,
                           STORE_VALUE_BYTES_MAX);
    return KV_OK;
}

static enum kv_err part_bytes(const struct store_part *part, uint64_t *bytes_out,
                              struct kv_diag *diag) {
    uint64_t bytes = 0;
    if (part->kind >= STORE_KINDS_MAX || part->piece_count == 0 ||
        part->piece_count > STORE_PIECES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "an extent of kind %u in %u pieces", part->kind,
                           part->piece_count);
    for (uint32_t i = 0; i < part->piece_count; i++) {
        if (!kv_add_u64(bytes, part->pieces[i].iov_len, &bytes))
            return kv_diag_set(diag, KV_ERR_LIMIT, "an extent of more than 2^64 bytes");
    }
    if (bytes == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "an extent of kind %u is empty", part->kind);
    if (bytes > STORE_EXTENT_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "an extent of %llu bytes: at most %llu are possible",
                           (unsigned long long)bytes, (unsigned long long)STORE_EXTENT_BYTES_MAX);
    *bytes_out = bytes;
    return KV_OK;
}

static struct kv_digest digest_pieces(const struct store_part *part) {
    struct kv_digest_state state;
    kv_digest_init(&state);
    for (uint32_t i = 0; i < part->piece_count; i++)
        kv_digest_update(&state, part->pieces[i].iov_base, part->pieces[i].iov_len);
    return kv_digest_final(&state);
}

/* Digests and copies slice by slice, so that the copy finds its bytes in the cache. */
static enum kv_err fill_raw(struct segment_writer *writer, const struct store_part *part,
                            struct kv_digest *digest_out, struct kv_diag *diag) {
    struct kv_digest_state state;
    kv_digest_init(&state);
    for (uint32_t i = 0; i < part->piece_count; i++) {
        const uint8_t *at = part->pieces[i].iov_base;
        for (size_t left = part->pieces[i].iov_len, take; left != 0; left -= take, at += take) {
            take = left < SLICE_BYTES ? left : SLICE_BYTES;
            kv_digest_update(&state, at, take);
            enum kv_err err = segment_fill(writer, at, take, diag);
            if (err != KV_OK)
                return err;
        }
    }
    *digest_out = kv_digest_final(&state);
    return KV_OK;
}

static enum kv_err fill_pieces(struct segment_writer *writer, const struct store_part *part,
                               struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; i < part->piece_count && err == KV_OK; i++)
        err = segment_fill(writer, part->pieces[i].iov_base, part->pieces[i].iov_len, diag);
    return err;
}

/* As codec_pack, but the try itself may have been made ahead. */
static enum kv_err pack_part(struct codec *codec, const struct store_part *part, size_t raw_bytes,
                             const struct store_packed *ahead, struct codec_packed *out) {
    if (ahead == NULL || !ahead->tried)
        return codec_pack(codec, part, raw_bytes, out);
    *out = (struct codec_packed){CODEC_RAW, NULL, raw_bytes};
#ifndef BREAK_AHEAD_ORDER
    if (!codec_due(codec, part, raw_bytes))
        return KV_OK;
#endif
    *out = (struct codec_packed){(enum codec_id)ahead->codec, ahead->bytes, (size_t)ahead->count};
    codec_learn(codec, part, out);
    return KV_OK;
}

/* Fills in what was reserved for the part. */
static enum kv_err fill_part(struct segment_writer *writer, const struct store_part *part,
                             const struct store_packed *ahead, const struct codec_packed *packed,
                             struct kv_digest *digest_out, struct kv_diag *diag) {
    if (packed->id == CODEC_RAW && ahead == NULL)
        return fill_raw(writer, part, digest_out, diag);
    *digest_out = ahead != NULL ? ahead->digest : digest_pieces(part);
    if (packed->id == CODEC_RAW)
        return fill_pieces(writer, part, diag);
    return segment_fill(writer, packed->bytes, packed->count, diag);
}

/* Writes one extent into the staging and says where it is. */
static enum kv_err put_part(struct store_batch *batch, const struct store_part *part,
                            const struct store_packed *ahead, struct store_extent *out,
                            struct kv_diag *diag) {
    struct store *store = batch->store;
    struct codec_packed packed = {0};
    struct fmt_place place = {0};
    uint64_t raw_bytes = 0, room = 0;
    enum kv_err err = KV_OK;
    struct store_extent extent = {.id = batch->extent_id_next++, .kind = part->kind};
    KV_TRY(part_bytes(part, &raw_bytes, diag));
    extent.raw_bytes = raw_bytes;
    uint64_t begin_ns = kv_clock_now_ns(store->options.clock);
    err = pack_part(store->codec, part, (size_t)raw_bytes, ahead, &packed);
    batch->stats.pack_ns += kv_clock_now_ns(store->options.clock) - begin_ns;
    if (err != KV_OK)
        KV_TRY(kv_diag_set(diag, err, "no memory to compress an extent"));
    KV_TRY(check_budget(batch, padded(packed.count), 0, &room, diag));
    KV_TRY(segment_reserve(store->writer, packed.count, room, &place, diag));
    KV_TRY(fill_part(store->writer, part, ahead, &packed, &extent.digest, diag));
    KV_TRY(segment_pad(store->writer, diag));
    extent.codec = (uint8_t)packed.id;
    extent.segment = place.segment;
    extent.off = place.off;
    extent.stored_bytes = packed.count;
    batch->stats.raw_bytes += raw_bytes;
    batch->stats.stored_bytes += padded(packed.count);
    batch->stats.raw_by_kind[part->kind] += raw_bytes;
    batch->stats.stored_by_kind[part->kind] += padded(packed.count);
    *out = extent;
done:
    return err;
}

/* Appends a put whose extents stand encoded in entry->extents. */
static enum kv_err add_put(struct store_batch *batch, const void *key, size_t key_bytes,
                           const struct fmt_entry *entry, struct kv_diag *diag) {
    size_t entry_bytes = fmt_entry_bytes(entry->value_bytes, entry->extent_count);
    size_t op_bytes = FMT_OP_HEAD_BYTES + key_bytes + entry_bytes;
    enum kv_err err = grow_record(batch, op_bytes, diag);
    if (err != KV_OK)
        return err;
    uint8_t *at = batch->record + batch->record_bytes;
    fmt_op_encode_head(at, FMT_OP_PUT, key_bytes, entry_bytes);
    memcpy(at + FMT_OP_HEAD_BYTES, key, key_bytes);
    fmt_entry_encode(at + FMT_OP_HEAD_BYTES, key_bytes, entry);
    batch->record_bytes += op_bytes;
    batch->op_count++;
    return KV_OK;
}

enum kv_err store_batch_put(struct store_batch *batch, const struct store_put *put,
                            struct kv_diag *diag) {
    return store_batch_put_packed(batch, put, NULL, diag);
}

enum kv_err store_batch_put_packed(struct store_batch *batch, const struct store_put *put,
                                   const struct store_packed *packed, struct kv_diag *diag) {
    assert(batch->open);
    enum kv_err err = batch->err;
    uint64_t worst_bytes = 0;
    if (err != KV_OK)
        return kv_diag_set(diag, err, "the batch has failed before: %s", batch->diag.text);
    KV_TRY(check_sizes(put->key_bytes, put->value_bytes, diag));
    if (put->part_count > STORE_EXTENTS_MAX)
        KV_TRY(kv_diag_set(diag, KV_ERR_LIMIT, "a record of %zu extents: at most %d are possible",
                           put->part_count, STORE_EXTENTS_MAX));
    for (size_t i = 0; i < put->part_count; i++) {
        uint64_t bytes = 0;
        KV_TRY(part_bytes(&put->parts[i], &bytes, diag));
        worst_bytes += padded(bytes);
    }
    size_t op_bytes =
        FMT_OP_HEAD_BYTES + put->key_bytes + fmt_entry_bytes(put->value_bytes, put->part_count);
    KV_TRY(check_budget(batch, worst_bytes + (batch->removes ? 0 : REMOVAL_BYTES), op_bytes, NULL,
                        diag));
    for (size_t n = 0; n < 2 * put->part_count; n++) {
        size_t i = n % put->part_count;
        struct store_extent extent;
        if (put->parts[i].behind != (n >= put->part_count))
            continue;
        KV_TRY(put_part(batch, &put->parts[i], packed != NULL ? &packed[i] : NULL, &extent, diag));
        fmt_extent_encode(&extent, batch->extents + i * FMT_EXTENT_BYTES);
    }
    struct fmt_entry entry = {.value = put->value,
                              .value_bytes = (uint32_t)put->value_bytes,
                              .extent_count = (uint32_t)put->part_count,
                              .extents = batch->extents};
    KV_TRY(add_put(batch, put->key, put->key_bytes, &entry, diag));
    return KV_OK;
done:
    return fail(batch, err, diag);
}

enum kv_err store_inner_put_bytes(struct store_batch *batch, const void *bytes, size_t count,
                                  struct fmt_place *place_out, struct kv_diag *diag) {
    struct segment_writer *writer = batch->store->writer;
    uint64_t room = 0;
    enum kv_err err = batch->err;
    if (err != KV_OK)
        return kv_diag_set(diag, err, "the batch has failed before: %s", batch->diag.text);
    KV_TRY(check_budget(batch, padded(count), 0, &room, diag));
    KV_TRY(segment_reserve(writer, count, room, place_out, diag));
    KV_TRY(segment_fill(writer, bytes, count, diag));
    KV_TRY(segment_pad(writer, diag));
    batch->stats.stored_bytes += padded(count);
done:
    return err == KV_OK ? KV_OK : fail(batch, err, diag);
}

enum kv_err store_inner_put_entry(struct store_batch *batch, const void *key, size_t key_bytes,
                                  const struct fmt_entry *entry, struct kv_diag *diag) {
    enum kv_err err = batch->err;
    if (err == KV_OK)
        err = check_budget(batch, 0,
                           FMT_OP_HEAD_BYTES + key_bytes +
                               fmt_entry_bytes(entry->value_bytes, entry->extent_count),
                           NULL, diag);
    if (err == KV_OK)
        err = add_put(batch, key, key_bytes, entry, diag);
    return err == KV_OK ? KV_OK : fail(batch, err, diag);
}

/* What this batch has last done to the key: 1 put, -1 deleted, 0 nothing. */
static int find_in_batch(const struct store_batch *batch, const void *key, size_t key_bytes,
                         struct fmt_entry *entry_out) {
    struct kv_reader reader;
    int found = 0;
    kv_reader_init(&reader, batch->record + FMT_BATCH_HEAD_BYTES,
                   batch->record_bytes - FMT_BATCH_HEAD_BYTES);
    for (uint32_t i = 0; i < batch->op_count; i++) {
        struct fmt_op op;
        enum kv_err err = fmt_op_decode(&reader, &op);
        assert(err == KV_OK);
        if (op.key_bytes != key_bytes || memcmp(op.key, key, key_bytes) != 0)
            continue;
        found = op.type == FMT_OP_PUT ? 1 : -1;
        *entry_out = op.entry;
    }
    return found;
}

/* Leaves out the extents of the kinds in `drop`; the others move up. */
static void drop_extents(struct store_batch *batch, struct fmt_entry *entry, uint32_t drop) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < entry->extent_count; i++) {
        struct store_extent extent = fmt_entry_extent(entry, i);
        if (drop >> extent.kind & 1)
            continue;
        memmove(batch->extents + (size_t)kept * FMT_EXTENT_BYTES,
                batch->extents + (size_t)i * FMT_EXTENT_BYTES, FMT_EXTENT_BYTES);
        kept++;
    }
    entry->extent_count = kept;
}

enum kv_err store_batch_shrink(struct store_batch *batch, const struct store_put *put,
                               uint32_t drop_kinds, struct kv_diag *diag) {
    assert(batch->open);
    struct store *store = batch->store;
    struct index_copy copy = {0};
    struct fmt_entry entry = {0};
    enum kv_err err = batch->err;
    if (err != KV_OK)
        return kv_diag_set(diag, err, "the batch has failed before: %s", batch->diag.text);
    KV_TRY(check_sizes(put->key_bytes, put->value_bytes, diag));
    KV_TRY(check_budget(batch, 0, put->key_bytes + FMT_ENTRY_BYTES_MAX, NULL, diag));
    int found = find_in_batch(batch, put->key, put->key_bytes, &entry);
    if (found == 0) {
        err = index_get(store->index, put->key, put->key_bytes, &copy, diag);
        if (err == KV_OK)
            err = fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry);
        if (err == KV_ERR_CORRUPT)
            kv_diag_set(diag, err, "the entry to be changed fails its check");
    }
    if (found < 0 || err == KV_ERR_NOT_FOUND) {
        index_copy_release(store->options.alloc, &copy);
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "no such record to be changed");
    }
    if (err != KV_OK)
        goto done;
    /* The operations may move when the record grows, so the extents are taken out first. */
    memcpy(batch->extents, entry.extents, (size_t)entry.extent_count * FMT_EXTENT_BYTES);
    entry.extents = batch->extents;
#ifdef BREAK_UPDATE
    entry.extent_count = 0;
#endif
    drop_extents(batch, &entry, drop_kinds);
    entry.value = put->value;
    entry.value_bytes = (uint32_t)put->value_bytes;
    KV_TRY(add_put(batch, put->key, put->key_bytes, &entry, diag));
done:
    index_copy_release(store->options.alloc, &copy);
    return err == KV_OK ? KV_OK : fail(batch, err, diag);
}

enum kv_err store_batch_update(struct store_batch *batch, const void *key, size_t key_bytes,
                               const void *value, size_t value_bytes, struct kv_diag *diag) {
    const struct store_put put = {
        .key = key, .key_bytes = key_bytes, .value = value, .value_bytes = value_bytes};
    return store_batch_shrink(batch, &put, 0, diag);
}

enum kv_err store_batch_delete(struct store_batch *batch, const void *key, size_t key_bytes,
                               struct kv_diag *diag) {
    assert(batch->open);
    enum kv_err err = batch->err;
    if (err != KV_OK)
        return kv_diag_set(diag, err, "the batch has failed before: %s", batch->diag.text);
    KV_TRY(check_sizes(key_bytes, 0, diag));
    KV_TRY(check_budget(batch, 0, FMT_OP_HEAD_BYTES + key_bytes, NULL, diag));
    KV_TRY(grow_record(batch, FMT_OP_HEAD_BYTES + key_bytes, diag));
    uint8_t *at = batch->record + batch->record_bytes;
    fmt_op_encode_head(at, FMT_OP_DELETE, key_bytes, 0);
    memcpy(at + FMT_OP_HEAD_BYTES, key, key_bytes);
    batch->record_bytes += FMT_OP_HEAD_BYTES + key_bytes;
    batch->op_count++;
    return KV_OK;
done:
    return fail(batch, err, diag);
}

/* The record goes behind its extents, when all of those have been written. */
static enum kv_err write_record(struct store_batch *batch, const struct fmt_state *old,
                                struct fmt_batch *head, struct kv_diag *diag) {
    struct store *store = batch->store;
    uint64_t room = 0;
    enum kv_err err = KV_OK;
    *head = (struct fmt_batch){.epoch = old->epoch,
                               .sequence = old->sequence + 1,
                               .begin = batch->begin,
                               .op_count = batch->op_count,
                               .record_bytes = batch->record_bytes + KV_DIGEST_BYTES,
                               .extent_id_first = batch->extent_id_first,
                               .extent_id_count = batch->extent_id_next - batch->extent_id_first,
                               .previous = old->last};
    memcpy(head->store_id, store->id, FMT_ID_BYTES);
    KV_TRY(check_budget(batch, 0, 0, &room, diag));
    KV_TRY(segment_flush(store->writer, diag));
    KV_TRY(segment_reserve(store->writer, head->record_bytes, room, &head->at, diag));
    fmt_batch_encode(batch->record, head);
    KV_TRY(segment_fill(store->writer, batch->record, (size_t)head->record_bytes, diag));
    KV_TRY(segment_pad(store->writer, diag));
    KV_TRY(segment_flush(store->writer, diag));
    batch->stats.record_bytes = padded(head->record_bytes);
    batch->stats.sequence = head->sequence;
done:
    return err;
}

/* Fails for good after a failed sync: the kernel may believe clean what never reached the disk. */
static int roll_back(struct store *store) {
    if (segment_rollback(store->writer, NULL) == KV_OK)
        return 1;
    pthread_mutex_lock(&store->lock);
    store->refuses_writes = 1;
    pthread_mutex_unlock(&store->lock);
    return 0;
}

/* As roll_back, for a batch of which everything may have reached the disk: until the cut has, too,
 * a power failure would bring back what was reported as failed. */
static int roll_back_durably(struct store *store) {
    if (!roll_back(store))
        return 0;
#ifdef BREAK_LOOSE_ROLLBACK
    return 1;
#endif
    if (segment_sync(store->writer, NULL) == KV_OK)
        return 1;
    pthread_mutex_lock(&store->lock);
    store->refuses_writes = 1;
    pthread_mutex_unlock(&store->lock);
    return 0;
}

/* After a failed index commit the index itself says whether it happened. */
static enum kv_err settle(struct store *store, const struct fmt_state *old, enum kv_err err,
                          struct kv_diag *diag) {
    struct fmt_state now;
    if ((err == KV_ERR_NO_SPACE || err == KV_ERR_NOMEM) &&
        index_state(store->index, &now, NULL) == KV_OK && now.sequence == old->sequence &&
        roll_back_durably(store))
        return err;
    segment_leave(store->writer);
    pthread_mutex_lock(&store->lock);
    store->refuses_writes = 1;
    pthread_mutex_unlock(&store->lock);
    kv_diag_prefix(diag, "the batch may or may not be durable, open the store again");
    return KV_ERR_IO;
}

static void account(struct store_batch *batch, struct store_commit_stats *stats_out) {
    struct segment_counts counts = segment_take_counts(batch->store->writer);
    batch->stats.door_name = segment_door_name(batch->store->writer);
    batch->stats.direct = segment_is_direct(batch->store->writer);
    batch->stats.written_bytes = counts.written_bytes;
    batch->stats.writes = counts.writes;
    batch->stats.in_flight_max = counts.in_flight_max;
    batch->stats.write_ns = counts.wait_ns;
    batch->stats.sync_ns = counts.sync_ns;
    batch->stats.syncs = counts.syncs;
    struct store *store = batch->store;
    pthread_mutex_lock(&store->lock);
    store->written[batch->cause].batches++;
    store->written[batch->cause].user_bytes += batch->stats.raw_bytes;
    store->written[batch->cause].device_bytes += counts.written_bytes;
    store->written_bytes += counts.written_bytes;
    pthread_mutex_unlock(&store->lock);
    if (stats_out != NULL)
        *stats_out = batch->stats;
}

static void publish(struct store *store, const struct fmt_state *old, const struct fmt_state *now,
                    uint64_t written_bytes) {
    pthread_mutex_lock(&store->lock);
    store->state = *now;
    store->segment_bytes += written_bytes;
    store->segment_count += now->tail.segment - old->tail.segment;
    store->direct = segment_is_direct(store->writer);
    pthread_mutex_unlock(&store->lock);
}

/* Files that have lost their names take writes and syncs all the same; what is in them is gone when
 * this process ends. A directory that was only moved still has them. */
static enum kv_err check_names(struct store *store, struct kv_diag *diag) {
#ifndef BREAK_REMOVED_STORE
    const struct io_door *door = store->options.door;
    struct io_file_info info;
    char name[SEGMENT_NAME_BYTES];
    if (door->info_at(door->context, store->dir, "FORMAT", &info) == ENOENT)
        return kv_diag_set(diag, KV_ERR_IO,
                           "the store was removed while it was open: nothing can be saved there");
    segment_name(segment_tail(store->writer).segment, name);
    if (door->info_at(door->context, store->seg_dir, name, &info) == ENOENT)
        return kv_diag_set(diag, KV_ERR_IO,
                           "seg/%s was removed while it was open: nothing can be saved there",
                           name);
#endif
    return KV_OK;
}

static enum kv_err commit(struct store_batch *batch, struct kv_diag *diag) {
    struct store *store = batch->store;
    struct fmt_state old = store->state; /* only this thread changes it */
    struct fmt_batch head;
    enum kv_err err = KV_OK;
    KV_TRY(write_record(batch, &old, &head, diag));
    struct fmt_state now = old;
#ifdef BREAK_ORDER
    KV_TRY(recover_apply(store->index, &head, batch->record, &now, diag));
    now = old;
#endif
    KV_TRY(segment_sync(store->writer, diag));
    KV_TRY(check_names(store, diag));
    store_ram_inner_batch(store, batch->record + FMT_BATCH_HEAD_BYTES,
                          head.record_bytes - FMT_BATCH_HEAD_BYTES - KV_DIGEST_BYTES,
                          batch->op_count);
    uint64_t begin_ns = kv_clock_now_ns(store->options.clock);
    uint64_t commits = index_commits(store->index);
    err = recover_apply(store->index, &head, batch->record, &now, diag);
    batch->stats.index_ns = kv_clock_now_ns(store->options.clock) - begin_ns;
    batch->stats.index_commits = index_commits(store->index) - commits;
    batch->stats.segments = now.tail.segment - old.tail.segment + 1;
    if (err == KV_OK)
        publish(store, &old, &now, segment_uncommitted_bytes(store->writer));
    store_ram_inner_batch_over(store);
    if (err != KV_OK)
        return settle(store, &old, err, diag);
    segment_commit(store->writer);
    return KV_OK;
done:
    /* A write that was reported as failed may have happened all the same. */
    roll_back_durably(store);
    return err;
}

void store_batch_cause(struct store_batch *batch, enum store_cause cause) {
    assert(batch->open && cause < STORE_CAUSES);
    batch->cause = cause;
}

/* The account goes along, this batch included; what fails here is only a count. */
static void keep_account(struct store_batch *batch) {
    struct store_written_sum sums[STORE_CAUSES];
    uint8_t value[STORE_WRITTEN_BYTES];
    struct store *store = batch->store;
    const size_t op_bytes =
        FMT_OP_HEAD_BYTES + STORE_WRITTEN_KEY_BYTES + fmt_entry_bytes(sizeof value, 0);
    if (batch->op_count == 0 || batch->cause == STORE_CAUSE_OTHER ||
        batch->cause == STORE_CAUSE_BLOCKS)
        return;
    pthread_mutex_lock(&store->lock);
    memcpy(sums, store->written, sizeof sums);
    pthread_mutex_unlock(&store->lock);
    sums[batch->cause].batches++;
    sums[batch->cause].user_bytes += batch->stats.raw_bytes;
    sums[batch->cause].device_bytes += segment_uncommitted_bytes(store->writer) +
                                       padded(batch->record_bytes + op_bytes + KV_DIGEST_BYTES);
    store_written_encode(sums, value);
    const struct fmt_entry entry = {.value = value, .value_bytes = sizeof value};
    (void)add_put(batch, store_written_key, STORE_WRITTEN_KEY_BYTES, &entry, NULL);
}

enum kv_err store_batch_commit(struct store_batch *batch, struct store_commit_stats *stats_out,
                               struct kv_diag *diag) {
    assert(batch->open);
    enum kv_err err = batch->err;
    if (err == KV_OK)
        keep_account(batch);
    if (err != KV_OK) {
        if (diag != NULL)
            *diag = batch->diag;
        roll_back(batch->store);
    } else if (batch->op_count != 0) {
        err = commit(batch, diag);
    }
    account(batch, stats_out);
    batch->open = 0;
    return err;
}

void store_batch_abandon(struct store_batch *batch) {
    if (batch == NULL)
        return;
    assert(batch->open);
    roll_back(batch->store);
    batch->open = 0;
}
