/* store/store_gc.c - live extents out of sparse segments, then the segments go.
 *
 * Responsible for: choosing segments, moving, the checkpoint batch, removal.
 * Not responsible for: the order inside a batch (store_batch.c), what a rebuild makes of a chain
 * with holes (rebuild.c).
 *
 * One segment after the other, the sparsest first: its live extents are copied as they are stored;
 * then one batch restates every live record that a batch record in the segment put, and every
 * deletion there whose key is not live, because a put of that key may stand in an older segment;
 * the same batch notes the sequences that go (store_gone.h). Only then is the file removed, and
 * its name synced away before the next segment is looked at: the oldest segment's deletions need
 * no restating, and that holds only while no older one can come back.
 */
#include "store/store_gc.h"

#include "store/store_gone.h"
#include "store/store_inner.h"
#include "store/store_punch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Moved bytes per batch, so that space is needed for little more than that. */
enum { BATCH_BYTES = 8 << 20 };

/* Records and growth of the index, beside what a batch may need (store_batch.c). */
enum { RECORD_BYTES = 256 << 10 };

struct segment_use {
    uint32_t number;
    uint64_t bytes, taken_bytes; /* its size, and of that on the disk */
    uint64_t live_bytes, live_extents, punched_bytes;
};

struct mover { /* one record with an extent in a segment */
    uint32_t segment;
    uint32_t key_bytes;
    size_t key_off;
};

struct gc {
    struct store *store;
    const struct kv_alloc *alloc;
    const struct store_gc_options *options;
    struct store_gc_report *report;
    struct kv_diag *diag;
    struct segment_use *uses; /* ascending numbers, then the sparsest first */
    size_t use_count;
    struct mover *movers; /* by segment */
    size_t mover_count, mover_capacity;
    uint8_t *keys;
    size_t keys_bytes, keys_capacity;
    uint32_t *tried; /* segments that are gone or were left */
    size_t tried_count, tried_capacity;
    uint32_t end_segment; /* no later one is looked at: what is written meanwhile */
    uint64_t begin_ns, paced_bytes, moved_all;
    struct store_batch *batch;
    uint64_t batch_bytes;
    struct index_copy copy;
};

struct store_gc_options store_gc_options_usual(void) {
    return (struct store_gc_options){.live_percent = STORE_GC_LIVE_PERCENT};
}

/* --- looking */

static struct segment_use *use_of(struct gc *gc, uint32_t number) {
    for (size_t low = 0, high = gc->use_count; low < high;) {
        size_t middle = (low + high) / 2;
        if (gc->uses[middle].number == number)
            return &gc->uses[middle];
        if (gc->uses[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static enum kv_err list_segments(struct gc *gc) {
    struct store *store = gc->store;
    const struct io_door *door = store->options.door;
    uint32_t *numbers = NULL;
    size_t count = 0;
    enum kv_err err = recover_segments(store, &numbers, &count, gc->diag);
    if (err != KV_OK)
        return err;
    gc->uses = kv_alloc_zeroed(gc->alloc, count + 1, sizeof *gc->uses);
    if (gc->uses == NULL)
        KV_TRY(kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory for the list of segments"));
    for (size_t i = 0; i < count; i++) {
        char name[SEGMENT_NAME_BYTES];
        struct io_file_info info = {0};
        if (numbers[i] > store->state.tail.segment)
            continue;
        segment_name(numbers[i], name);
        int error = door->info_at(door->context, store->seg_dir, name, &info);
        if (error != 0)
            KV_TRY(segment_error(gc->diag, error, "look at", numbers[i]));
        gc->uses[gc->use_count++] =
            (struct segment_use){.number = numbers[i],
                                 .bytes = info.size_bytes,
                                 .taken_bytes = store_inner_taken(store, &info, info.size_bytes)};
    }
done:
    kv_alloc_release(gc->alloc, numbers);
    return err;
}

static enum kv_err add_mover(struct gc *gc, uint32_t segment) {
    void *movers = gc->movers;
    void *keys = gc->keys;
    if (!kv_alloc_grow(gc->alloc, &movers, &gc->mover_capacity, gc->mover_count + 1,
                       sizeof *gc->movers))
        return kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory for the list of moves");
    gc->movers = movers;
    if (!kv_alloc_grow(gc->alloc, &keys, &gc->keys_capacity, gc->keys_bytes + gc->copy.key_bytes,
                       1))
        return kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory for the list of moves");
    gc->keys = keys;
    memcpy(gc->keys + gc->keys_bytes, gc->copy.bytes, gc->copy.key_bytes);
    gc->movers[gc->mover_count++] =
        (struct mover){segment, (uint32_t)gc->copy.key_bytes, gc->keys_bytes};
    gc->keys_bytes += gc->copy.key_bytes;
    return KV_OK;
}

/* Which segments hold how much of what is live. */
static enum kv_err count_live(struct gc *gc) {
    uint8_t after[STORE_KEY_BYTES_MAX];
    struct index_range range = {.after = after};
    for (;;) {
        struct fmt_entry entry;
        enum kv_err err = index_next(gc->store->index, &range, &gc->copy, gc->diag);
        if (err == KV_ERR_NOT_FOUND)
            return KV_OK;
        if (err == KV_OK)
            err =
                fmt_entry_decode(gc->copy.bytes, gc->copy.key_bytes, gc->copy.total_bytes, &entry);
        if (err != KV_OK)
            return kv_diag_set(gc->diag, err,
                               "an index entry cannot be read, so nothing is moved: run fsck");
        uint32_t last = 0;
        for (uint32_t i = 0; i < entry.extent_count; i++) {
            struct store_extent extent = fmt_entry_extent(&entry, i);
            struct segment_use *use = use_of(gc, extent.segment);
            if (use == NULL)
                continue; /* missing: reading it says so, and there is nothing to move */
            use->live_bytes += fmt_extent_padded(&extent);
            use->live_extents++;
            if (extent.segment == last)
                continue;
            last = extent.segment;
            err = add_mover(gc, last);
            if (err != KV_OK)
                return err;
        }
        memcpy(after, gc->copy.bytes, gc->copy.key_bytes);
        range.after_bytes = gc->copy.key_bytes;
    }
}

static int by_live(const void *a, const void *b) {
    const struct segment_use *x = a;
    const struct segment_use *y = b;
    if (x->live_bytes != y->live_bytes)
        return x->live_bytes < y->live_bytes ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

static int by_segment(const void *a, const void *b) {
    const struct mover *x = a;
    const struct mover *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return x->key_off < y->key_off ? -1 : x->key_off > y->key_off;
}

static int was_tried(const struct gc *gc, uint32_t number) {
    for (size_t i = 0; i < gc->tried_count; i++)
        if (gc->tried[i] == number)
            return 1;
    return number > gc->end_segment;
}

static enum kv_err try_once(struct gc *gc, uint32_t number) {
    void *tried = gc->tried;
    if (!kv_alloc_grow(gc->alloc, &tried, &gc->tried_capacity, gc->tried_count + 1,
                       sizeof *gc->tried))
        return kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory for the list of segments");
    gc->tried = tried;
    gc->tried[gc->tried_count++] = number;
    return KV_OK;
}

/* Keeps the sparse ones; the open segment is one on request only. */
static void choose(struct gc *gc) {
    size_t kept = 0;
    gc->moved_all = gc->report->moved_bytes;
    for (size_t i = 0; i < gc->use_count; i++) {
        const struct segment_use *use = &gc->uses[i];
        int is_open = use->number == gc->store->state.tail.segment;
        int stays = is_open && (!gc->options->with_open || gc->store->state.tail.off == 0);
#ifdef BREAK_GC_OPEN
        stays = is_open;
#endif
        if (stays || was_tried(gc, use->number) ||
            use->live_bytes >= use->bytes / 100 * gc->options->live_percent +
                                   use->bytes % 100 * gc->options->live_percent / 100)
            continue;
        gc->moved_all += use->live_bytes;
        gc->uses[kept++] = *use;
    }
    gc->use_count = kept;
    if (kept != 0)
        qsort(gc->uses, kept, sizeof *gc->uses, by_live);
    if (gc->mover_count != 0)
        qsort(gc->movers, gc->mover_count, sizeof *gc->movers, by_segment);
    gc->report->sparse = (uint32_t)(kept + gc->tried_count);
}

/* --- moving */

static enum kv_err begin(struct gc *gc) {
    gc->batch_bytes = 0;
    if (gc->batch != NULL)
        return KV_OK;
    enum kv_err err = store_inner_begin_reserve(gc->store, &gc->batch, gc->diag);
    if (err == KV_OK)
        store_batch_cause(gc->batch, STORE_CAUSE_GC);
    return err;
}

static enum kv_err commit(struct gc *gc) {
    struct store_commit_stats stats = {0};
    struct store_batch *batch = gc->batch;
    if (batch == NULL)
        return KV_OK;
    gc->batch = NULL;
    enum kv_err err = store_batch_commit(batch, &stats, gc->diag);
    gc->report->written_bytes += stats.written_bytes;
    return err;
}

/* Waits until what was moved is no more than the rate allows. 1: the caller wants to end. */
static int pace(struct gc *gc, uint64_t bytes) {
    const struct store_gc_options *options = gc->options;
    gc->paced_bytes += bytes;
    if (options->progress != NULL)
        options->progress(options->context, gc->report->moved_bytes, gc->moved_all);
    if (options->pause == NULL)
        return 0;
    uint64_t wait_ns = 0;
    if (options->bytes_per_second != 0) {
        uint64_t due_ns =
            (uint64_t)((double)gc->paced_bytes * 1e9 / (double)options->bytes_per_second);
        uint64_t spent_ns = kv_clock_now_ns(gc->store->options.clock) - gc->begin_ns;
        wait_ns = due_ns > spent_ns ? due_ns - spent_ns : 0;
    }
    return options->pause(options->context, wait_ns) != 0;
}

/* The stored bytes, proven to unpack to what the digest says; released by the caller. */
static enum kv_err read_stored(struct gc *gc, const struct store_extent *extent,
                               uint8_t **bytes_out) {
    struct store *store = gc->store;
    uint8_t *raw = NULL;
    enum kv_err err = KV_OK;
    /* As if it had been put raw: the bytes in the file, with the padding looked at. */
    struct store_extent plain = *extent;
    plain.codec = CODEC_RAW;
    plain.raw_bytes = extent->stored_bytes;
    uint64_t room = kv_round_up(extent->stored_bytes, STORE_PAGE_BYTES);
    uint8_t *bytes = kv_alloc_aligned(gc->alloc, (size_t)room, STORE_PAGE_BYTES);
    struct iovec piece = {bytes, (size_t)extent->stored_bytes};
    struct store_read read = {.extent = &plain, .pieces = &piece, .piece_count = 1};
    const struct store_read_args args = {.reads = &read, .count = 1};
    if (bytes == NULL)
        return kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory to move an extent");
    KV_TRY(store_read(store, &args, NULL, gc->diag));
    struct kv_digest digest;
    if (extent->codec == CODEC_RAW) {
        digest = kv_digest_of(bytes, (size_t)extent->stored_bytes);
    } else {
        raw = kv_alloc_aligned(gc->alloc, (size_t)extent->raw_bytes, 64);
        if (raw == NULL)
            KV_TRY(kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory to check an extent"));
        KV_TRY(codec_unpack(store->codec, extent->codec, bytes, (size_t)extent->stored_bytes, raw,
                            (size_t)extent->raw_bytes));
        digest = kv_digest_of(raw, (size_t)extent->raw_bytes);
    }
    if (!kv_digest_equal(&digest, &extent->digest))
        KV_TRY(kv_diag_set(gc->diag, KV_ERR_CORRUPT, "extent %llu does not match its digest",
                           (unsigned long long)extent->id));
    *bytes_out = bytes;
    bytes = NULL;
done:
    kv_alloc_release(gc->alloc, raw);
    /* A read that timed out may still land there. */
    if (!read.in_doubt)
        kv_alloc_release(gc->alloc, bytes);
    return err;
}

/* Writes one extent into the open batch; *extent becomes the new place. */
static enum kv_err move_extent(struct gc *gc, struct store_extent *extent) {
    uint8_t *bytes = NULL;
    struct fmt_place place = {0};
    enum kv_err err = read_stored(gc, extent, &bytes);
    if (err == KV_OK)
        err =
            store_inner_put_bytes(gc->batch, bytes, (size_t)extent->stored_bytes, &place, gc->diag);
    kv_alloc_release(gc->alloc, bytes);
    if (err != KV_OK)
        return err;
    extent->id = gc->batch->extent_id_next++;
    extent->segment = place.segment;
    extent->off = place.off;
    gc->report->moved_extents++;
    gc->report->moved_bytes += fmt_extent_padded(extent);
    gc->batch_bytes += fmt_extent_padded(extent);
    return KV_OK;
}

/* The next in this segment from `off` on; extent_count: none. */
static uint32_t next_place(const struct fmt_entry *entry, uint32_t segment, uint64_t off) {
    uint32_t next = entry->extent_count;
    for (uint32_t i = 0; i < entry->extent_count; i++) {
        struct store_extent extent = fmt_entry_extent(entry, i);
        if (extent.segment == segment && extent.off >= off &&
            (next == entry->extent_count || extent.off < fmt_entry_extent(entry, next).off))
            next = i;
    }
    return next;
}

/* In the order in which they lie: what is read together stays together. */
static enum kv_err move_record(struct gc *gc, const struct mover *mover) {
    const uint8_t *key = gc->keys + mover->key_off;
    struct fmt_entry entry;
    uint64_t bytes = 0;
    enum kv_err err = KV_OK;
    uint8_t *extents = NULL;
    KV_TRY(begin(gc));
    KV_TRY(index_get(gc->store->index, key, mover->key_bytes, &gc->copy, gc->diag));
    KV_TRY(fmt_entry_decode(gc->copy.bytes, gc->copy.key_bytes, gc->copy.total_bytes, &entry));
    extents = kv_alloc_aligned(gc->alloc, (size_t)entry.extent_count * FMT_EXTENT_BYTES, 16);
    if (extents == NULL)
        KV_TRY(kv_diag_set(gc->diag, KV_ERR_NOMEM, "no memory to move a record"));
    for (uint32_t i = 0; i < entry.extent_count; i++) {
        struct store_extent extent = fmt_entry_extent(&entry, i);
        fmt_extent_encode(&extent, extents + (size_t)i * FMT_EXTENT_BYTES);
    }
    uint64_t off = 0;
    for (uint32_t i; (i = next_place(&entry, mover->segment, off)) < entry.extent_count;) {
        struct store_extent extent = fmt_entry_extent(&entry, i);
        off = extent.off + 1;
        bytes += fmt_extent_padded(&extent);
        KV_TRY(move_extent(gc, &extent));
        fmt_extent_encode(&extent, extents + (size_t)i * FMT_EXTENT_BYTES);
    }
    entry.extents = extents;
    KV_TRY(store_inner_put_entry(gc->batch, key, mover->key_bytes, &entry, gc->diag));
    if (gc->batch_bytes >= BATCH_BYTES)
        KV_TRY(commit(gc));
    gc->report->stopped |= pace(gc, bytes);
done:
    kv_alloc_release(gc->alloc, extents);
    return err;
}

/* --- the checkpoint */

/* 1 when the operation must be said again once its batch record is gone. */
static enum kv_err must_restate(struct gc *gc, const struct fmt_op *op, int oldest, int *must_out) {
    enum kv_err err = index_get(gc->store->index, op->key, op->key_bytes, &gc->copy, gc->diag);
    *must_out = 0;
    if (err == KV_ERR_NOT_FOUND) {
#ifndef BREAK_GC_TOMBSTONE
        *must_out = op->type == FMT_OP_DELETE && !oldest;
#endif
        return KV_OK;
    }
    if (err != KV_OK)
        return err;
    /* A later batch has put something else: that one says it. */
    *must_out = op->type == FMT_OP_PUT &&
                gc->copy.total_bytes - gc->copy.key_bytes == op->entry_bytes &&
                memcmp(gc->copy.bytes + gc->copy.key_bytes, op->entry_at, op->entry_bytes) == 0;
#ifdef BREAK_GC_CHECKPOINT
    *must_out = 0;
#endif
    return KV_OK;
}

static enum kv_err restate_batch(struct gc *gc, const struct fmt_batch *head, int oldest) {
    uint8_t *record = NULL;
    struct kv_digest digest;
    struct kv_reader reader;
    enum kv_err err = recover_load(gc->store, head, &record, &digest, gc->diag);
    if (err != KV_OK)
        return err;
    kv_reader_init(&reader, record + FMT_BATCH_HEAD_BYTES,
                   (size_t)head->record_bytes - FMT_BATCH_HEAD_BYTES - KV_DIGEST_BYTES);
    for (uint32_t i = 0; i < head->op_count && err == KV_OK; i++) {
        struct fmt_op op;
        int must = 0;
        err = fmt_op_decode(&reader, &op);
        if (err == KV_OK)
            err = must_restate(gc, &op, oldest, &must);
        if (err != KV_OK || !must)
            continue;
        gc->report->restated++;
        if (op.type == FMT_OP_PUT)
            err = store_inner_put_entry(gc->batch, op.key, op.key_bytes, &op.entry, gc->diag);
        else
            err = store_batch_delete(gc->batch, op.key, op.key_bytes, gc->diag);
    }
    kv_alloc_release(gc->alloc, record);
    return err;
}

static int is_oldest(struct gc *gc, uint32_t number) {
    uint32_t *numbers = NULL;
    size_t count = 0;
    int oldest = 0;
    if (recover_segments(gc->store, &numbers, &count, NULL) == KV_OK)
        oldest = count != 0 && numbers[0] == number;
    kv_alloc_release(gc->alloc, numbers);
    return oldest;
}

/* Everything that only this segment's batch records say, and that they are about to go. */
static enum kv_err checkpoint(struct gc *gc, uint32_t number) {
    struct recover_list list = {0};
    struct store_gone gone = {0};
    uint64_t nonzero_end = 0;
    struct fmt_place from = {number, 0};
    enum kv_err err = KV_OK;
    int oldest = is_oldest(gc, number);
    KV_TRY(begin(gc));
    KV_TRY(recover_scan(gc->store, from, &list, &nonzero_end, gc->diag));
    KV_TRY(store_gone_load(gc->store->index, gc->alloc, &gone, gc->diag));
    for (size_t i = 0; i < list.count; i++) {
        /* What a damaged record in between said is in the index only: its place must stay. */
        if (i != 0 && list.items[i].sequence > list.items[i - 1].sequence + 1)
            KV_TRY(kv_diag_set(gc->diag, KV_ERR_CORRUPT, "a batch record in it is damaged"));
        KV_TRY(restate_batch(gc, &list.items[i], oldest));
        KV_TRY(store_gone_add(&gone, list.items[i].sequence, gc->diag));
    }
    if (list.count != 0)
        KV_TRY(store_gone_put(&gone, gc->batch, gc->diag));
    KV_TRY(commit(gc));
done:
    store_gone_release(&gone);
    kv_alloc_release(gc->alloc, list.items);
    return err;
}

/* --- removal */

static enum kv_err remove_segment(struct gc *gc, const struct segment_use *use) {
    struct store *store = gc->store;
    const struct io_door *door = store->options.door;
    char name[SEGMENT_NAME_BYTES];
    uint64_t taken = use->taken_bytes - use->punched_bytes;
    segment_name(use->number, name);
    pthread_mutex_lock(&store->lock);
    int held = store->hold_count != 0;
    pthread_mutex_unlock(&store->lock);
#ifdef BREAK_GC_HOLD
    held = 0;
#endif
    /* Whoever looks a record up from here on finds its new place. A segment that is open still has
     * not been left: nothing stood in it. */
    if (held || use->number == store->state.tail.segment) {
        gc->report->held++;
        return KV_OK;
    }
    int error = door->remove(door->context, store->seg_dir, name);
    if (error != 0)
        return segment_error(gc->diag, error, "remove", use->number);
    error = door->sync(door->context, store->seg_dir);
    pthread_mutex_lock(&store->lock);
    store->segment_bytes -= taken < store->segment_bytes ? taken : store->segment_bytes;
    store->segment_count -= store->segment_count != 0;
    pthread_mutex_unlock(&store->lock);
    gc->report->removed++;
    gc->report->freed_bytes += taken;
    return segment_error(gc->diag, error, "remove", use->number);
}

/* A live extent or a batch record of the segment cannot be read: it stays for whoever repairs. */
static void leave(struct gc *gc, const struct segment_use *use) {
    gc->report->damaged++;
    if (gc->report->trouble[0] != 0)
        return;
    snprintf(gc->report->trouble, sizeof gc->report->trouble, "segment %u stays: %.150s",
             use->number, gc->diag->text[0] != 0 ? gc->diag->text : "it cannot be read");
}

/* All that the segment keeps stands twice until it goes; what is freed then is more. The reserve of
 * the budget is there for this. */
static enum kv_err check_room(const struct gc *gc, const struct segment_use *use) {
    const struct store_options *options = &gc->store->options;
    uint64_t need = use->live_bytes + use->live_bytes / 32 + RECORD_BYTES;
    if (options->bytes_max == STORE_BYTES_UNLIMITED || use->live_bytes == 0)
        return KV_OK;
    uint64_t used = store_inner_used(gc->store);
#ifdef BREAK_GC_ROOM
    used = 0;
#endif
    if (used + need <= options->bytes_max)
        return KV_OK;
    /* The store keeps back a part of what is added (store_reserve.h). */
    uint64_t more = (used + need - options->bytes_max) / 31 * 32 + STORE_PAGE_BYTES;
    return kv_diag_set(gc->diag, KV_ERR_LIMIT,
                       "segment %u can go only when the %llu bytes that it keeps have moved: that "
                       "needs %llu beside the %llu in use, of %llu (store-max): raise it by %llu "
                       "for this run, or remove sessions",
                       use->number, (unsigned long long)use->live_bytes, (unsigned long long)need,
                       (unsigned long long)used, (unsigned long long)options->bytes_max,
                       (unsigned long long)more);
}

static enum kv_err empty_segment(struct gc *gc, const struct segment_use *use) {
    enum kv_err err = check_room(gc, use);
    size_t at = 0;
    if (err != KV_OK)
        return err;
    if (use->number == gc->store->state.tail.segment)
        segment_end(gc->store->writer);
    while (at < gc->mover_count && gc->movers[at].segment < use->number)
        at++;
#ifdef BREAK_GC_MOVE
    at = gc->mover_count;
#endif
    for (; at < gc->mover_count && gc->movers[at].segment == use->number; at++) {
        KV_TRY(move_record(gc, &gc->movers[at]));
        if (gc->report->stopped)
            break;
    }
    KV_TRY(commit(gc));
    if (gc->report->stopped)
        return KV_OK;
#ifdef BREAK_GC_EARLY
    KV_TRY(remove_segment(gc, use));
#endif
    KV_TRY(checkpoint(gc, use->number));
#ifndef BREAK_GC_EARLY
    KV_TRY(remove_segment(gc, use));
#endif
done:
    if (gc->batch != NULL)
        store_batch_abandon(gc->batch);
    gc->batch = NULL;
    if (err == KV_ERR_CORRUPT) {
        leave(gc, use);
        kv_diag_clear(gc->diag);
        return KV_OK;
    }
    return err;
}

static void dry_run(struct gc *gc) {
    for (size_t i = 0; i < gc->use_count; i++) {
        gc->report->moved_bytes += gc->uses[i].live_bytes;
        gc->report->moved_extents += gc->uses[i].live_extents;
        gc->report->freed_bytes += gc->uses[i].taken_bytes - gc->uses[i].punched_bytes;
        gc->report->removed++;
    }
}

static void report_store(const struct gc *gc, uint32_t *segments, uint64_t *bytes) {
    struct store_stats stats;
    store_stats_get(gc->store, &stats);
    *segments = stats.segments;
    *bytes = stats.segment_bytes;
    gc->report->live_bytes = stats.live_bytes;
}

static void on_punched(void *context, uint32_t segment, uint64_t bytes) {
    struct gc *gc = context;
    struct segment_use *use = use_of(gc, segment);
    if (use != NULL)
        use->punched_bytes = bytes < use->taken_bytes ? bytes : use->taken_bytes;
}

/* First what needs no room, so that a full disk has some for what is moved. */
static enum kv_err punch(struct gc *gc) {
    struct store_gc_report *report = gc->report;
    struct store_punch_report holes;
    const struct store_punch_args args = {gc->store, gc->options->dry_run, gc->options->punch_every,
                                          on_punched, gc};
    enum kv_err err = store_punch(&args, &holes, gc->diag);
    report->punched_bytes = holes.punched_bytes;
    report->freed_bytes += holes.punched_bytes;
    report->no_holes = holes.refused;
    report->held += holes.held;
    report->damaged += holes.damaged;
    memcpy(report->trouble, holes.trouble, sizeof report->trouble);
    return err;
}

/* Others have written: which records stand where, and what is live, is another thing now. */
static enum kv_err look_again(struct gc *gc) {
    kv_alloc_release(gc->alloc, gc->uses);
    gc->uses = NULL;
    gc->use_count = gc->mover_count = gc->keys_bytes = 0;
    enum kv_err err = list_segments(gc);
    if (err == KV_OK)
        err = count_live(gc);
    if (err == KV_OK)
        choose(gc);
    return err;
}

/* 1: others have written meanwhile. */
static int lend(struct gc *gc) {
    uint64_t sequence = store_sequence(gc->store);
    if (gc->options->lend != NULL)
        gc->options->lend(gc->options->context);
#ifdef BREAK_GC_LENT
    return 0;
#endif
    return store_sequence(gc->store) != sequence;
}

static enum kv_err run(struct gc *gc) {
    enum kv_err err = KV_OK;
    gc->end_segment = gc->store->state.tail.segment;
    KV_TRY(list_segments(gc));
    KV_TRY(punch(gc));
    if (gc->options->punch_only)
        return KV_OK;
    KV_TRY(count_live(gc));
    choose(gc);
    if (gc->options->dry_run)
        dry_run(gc);
    for (size_t i = 0; i < gc->use_count && !gc->options->dry_run;) {
        KV_TRY(try_once(gc, gc->uses[i].number));
        KV_TRY(empty_segment(gc, &gc->uses[i++]));
        gc->report->stopped |= pace(gc, 0);
        if (gc->report->stopped)
            break;
        if (lend(gc)) {
            KV_TRY(look_again(gc));
            i = 0;
        }
    }
done:
    return err;
}

enum kv_err store_gc(struct store *store, const struct store_gc_options *options,
                     struct store_gc_report *report_out, struct kv_diag *diag) {
    struct kv_diag own = {""};
    struct gc gc = {.store = store,
                    .alloc = store->options.alloc,
                    .options = options,
                    .report = report_out,
                    .diag = diag != NULL ? diag : &own};
    memset(report_out, 0, sizeof *report_out);
    if (options->live_percent == 0 || options->live_percent > 100 ||
        (options->bytes_per_second != 0 && options->pause == NULL))
        return kv_diag_set(diag, KV_ERR_INVALID, "gc of segments below %u %% live: use 1 to 100",
                           options->live_percent);
    if (store->writer == NULL && !options->dry_run)
        return kv_diag_set(diag, KV_ERR_INVALID, "the store is open for reading only");
    if (store->batch.open)
        return kv_diag_set(diag, KV_ERR_BUSY, "a batch is open already");
    gc.begin_ns = kv_clock_now_ns(store->options.clock);
    report_store(&gc, &report_out->segments_before, &report_out->segment_bytes_before);
    enum kv_err err = run(&gc);
    report_store(&gc, &report_out->segments_after, &report_out->segment_bytes_after);
    index_copy_release(gc.alloc, &gc.copy);
    kv_alloc_release(gc.alloc, gc.uses);
    kv_alloc_release(gc.alloc, gc.tried);
    kv_alloc_release(gc.alloc, gc.movers);
    kv_alloc_release(gc.alloc, gc.keys);
    return err;
}
