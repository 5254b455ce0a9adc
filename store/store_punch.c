/* store/store_punch.c - holes where dead extents were.
 *
 * Responsible for: the contract of store_punch.h.
 * Not responsible for: whole segments (store_gc.c).
 *
 * Only the gaps between live extents are read, and only in segments whose files take noticeably
 * more than what lives in them.
 */
#include "store/store_punch.h"

#include "store/store_gone.h"
#include "store/store_inner.h"
#include "store/store_reserve.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A segment is looked at when more than one part in this many may be dead, and more than a batch
 * record or two. */
enum { DEAD_SHARE = 64, DEAD_BYTES = 16 * STORE_PAGE_BYTES };

struct live { /* one extent */
    uint32_t segment;
    uint64_t off, end;
};

struct punch {
    struct store *store;
    const struct store_punch_args *args;
    struct store_punch_report *report;
    struct kv_diag *diag;
    struct live *live; /* by place */
    size_t live_count, live_capacity;
    struct recover_list records; /* of the segment at hand, by place */
    size_t next_record;
    uint64_t dead_bytes;    /* of the same; what is a hole already may be counted */
    struct fmt_place limit; /* where the last batch begins */
    struct store_gone gone;
};

struct segment_at {
    uint32_t number;
    uint64_t end;         /* of what counts: the file's, or the tail */
    size_t first, behind; /* of its live extents */
    int file;             /* -1: not open */
};

static int by_place(const void *a, const void *b) {
    const struct live *x = a;
    const struct live *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return x->off < y->off ? -1 : x->off > y->off;
}

static enum kv_err add_live(struct punch *punch, const struct store_extent *extent) {
    void *live = punch->live;
    if (!kv_alloc_grow(punch->store->options.alloc, &live, &punch->live_capacity,
                       punch->live_count + 1, sizeof *punch->live))
        return kv_diag_set(punch->diag, KV_ERR_NOMEM, "no memory for the list of extents");
    uint64_t bytes = fmt_extent_padded(extent);
#ifdef BREAK_PUNCH_LIVE
    bytes = STORE_PAGE_BYTES;
#endif
    punch->live = live;
    punch->live[punch->live_count++] =
        (struct live){extent->segment, extent->off, extent->off + bytes};
    return KV_OK;
}

static enum kv_err list_live(struct punch *punch) {
    uint8_t after[STORE_KEY_BYTES_MAX];
    struct index_range range = {.after = after};
    struct index_copy copy = {0};
    enum kv_err err = KV_OK;
    while ((err = index_next(punch->store->index, &range, &copy, punch->diag)) == KV_OK) {
        struct fmt_entry entry;
        err = fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry);
        if (err != KV_OK)
            KV_TRY(kv_diag_set(punch->diag, err,
                               "an index entry cannot be read, so nothing is punched: run fsck"));
        for (uint32_t i = 0; i < entry.extent_count; i++) {
            struct store_extent extent = fmt_entry_extent(&entry, i);
            KV_TRY(add_live(punch, &extent));
        }
        memcpy(after, copy.bytes, copy.key_bytes);
        range.after_bytes = copy.key_bytes;
    }
    if (err == KV_ERR_NOT_FOUND)
        err = KV_OK;
    if (punch->live_count != 0)
        qsort(punch->live, punch->live_count, sizeof *punch->live, by_place);
done:
    index_copy_release(punch->store->options.alloc, &copy);
    return err;
}

/* The live extents of a segment stand together. */
static struct segment_at segment_of(const struct punch *punch, uint32_t number, uint64_t end) {
    struct segment_at at = {.number = number, .end = end, .file = -1};
    size_t high = punch->live_count;
    while (at.first < high) {
        size_t middle = (at.first + high) / 2;
        if (punch->live[middle].segment < number)
            at.first = middle + 1;
        else
            high = middle;
    }
    at.behind = at.first;
    while (at.behind < punch->live_count && punch->live[at.behind].segment == number)
        at.behind++;
    return at;
}

/* Calls `each` for every gap between live extents, and the one behind them. */
typedef enum kv_err (*each_gap)(struct punch *punch, struct segment_at *at, uint64_t off,
                                uint64_t end);

static enum kv_err walk_gaps(struct punch *punch, struct segment_at *at, each_gap each) {
    uint64_t off = 0;
    for (size_t i = at->first; i <= at->behind; i++) {
        uint64_t end = i < at->behind ? punch->live[i].off : at->end;
        if (end > at->end)
            end = at->end;
        enum kv_err err = end > off ? each(punch, at, off, end) : KV_OK;
        if (err != KV_OK)
            return err;
        if (i < at->behind && punch->live[i].end > off)
            off = punch->live[i].end;
    }
    return KV_OK;
}

static enum kv_err find_records(struct punch *punch, struct segment_at *at, uint64_t off,
                                uint64_t end) {
    uint64_t nonzero_end = 0;
    const struct recover_range range = {{at->number, off}, end};
    return recover_scan_range(punch->store, &range, &punch->records, &nonzero_end, punch->diag);
}

/* What a damaged record said is in the index only; it stays for whoever wants to look. */
static enum kv_err check_records(struct punch *punch) {
    const struct fmt_batch *items = punch->records.items;
    for (size_t i = 1; i < punch->records.count; i++)
        if (items[i].sequence > items[i - 1].sequence + 1 &&
            store_gone_missing(&punch->gone, items[i - 1].sequence + 1, items[i].sequence) != 0)
            return kv_diag_set(punch->diag, KV_ERR_CORRUPT, "a batch record in it is damaged");
    return KV_OK;
}

static enum kv_err punch_range(struct punch *punch, struct segment_at *at, uint64_t off,
                               uint64_t end) {
    const struct io_door *door = punch->store->options.door;
    struct fmt_place limit = punch->limit;
    if (at->number > limit.segment)
        return KV_OK;
#ifndef BREAK_PUNCH_LAST
    if (at->number == limit.segment && end > limit.off)
        end = limit.off;
#endif
    if (end <= off)
        return KV_OK;
    punch->dead_bytes += end - off;
    if (punch->args->dry_run)
        return KV_OK;
    int error = door->punch(door->context, at->file, off, end - off);
    if (error == EOPNOTSUPP || error == ENOSYS || error == EINVAL)
        punch->report->refused = 1;
    else if (error != 0)
        return segment_error(punch->diag, error, "punch", at->number);
    return KV_OK;
}

/* A gap without the batch records in it. */
static enum kv_err punch_gap(struct punch *punch, struct segment_at *at, uint64_t off,
                             uint64_t end) {
    enum kv_err err = KV_OK;
    for (; punch->next_record < punch->records.count && err == KV_OK; punch->next_record++) {
        const struct fmt_batch *record = &punch->records.items[punch->next_record];
        uint64_t bytes = kv_round_up(record->record_bytes, STORE_PAGE_BYTES);
#ifdef BREAK_PUNCH_RECORDS
        bytes = 0;
#endif
        if (record->at.off >= end)
            break;
        err = punch_range(punch, at, off, record->at.off);
        off = record->at.off + bytes;
    }
    return err == KV_OK ? punch_range(punch, at, off, end) : err;
}

static uint64_t live_bytes(const struct punch *punch, const struct segment_at *at) {
    uint64_t bytes = 0;
    for (size_t i = at->first; i < at->behind; i++)
        bytes += punch->live[i].end - punch->live[i].off;
    return bytes;
}

static int is_held(struct store *store) {
    pthread_mutex_lock(&store->lock);
    int held = store->hold_count != 0;
    pthread_mutex_unlock(&store->lock);
#ifdef BREAK_PUNCH_HOLD
    held = 0;
#endif
    return held;
}

static void account(struct punch *punch, uint32_t segment, uint64_t less) {
    struct store *store = punch->store;
    punch->report->punched_bytes += less;
    punch->report->segments += less != 0;
    if (less != 0 && punch->args->each != NULL)
        punch->args->each(punch->args->context, segment, less);
    if (punch->args->dry_run)
        return;
    pthread_mutex_lock(&store->lock);
    store->segment_bytes -= less < store->segment_bytes ? less : store->segment_bytes;
    pthread_mutex_unlock(&store->lock);
}

static enum kv_err punch_open(struct punch *punch, struct segment_at *at, uint64_t most_bytes) {
    const struct io_door *door = punch->store->options.door;
    struct io_file_info before = {0}, after = {0};
    enum kv_err err = KV_OK;
    int error = door->info(door->context, at->file, &before);
    if (error != 0)
        return segment_error(punch->diag, error, "look at", at->number);
    punch->records.count = 0;
    punch->next_record = 0;
    punch->dead_bytes = 0;
    KV_TRY(walk_gaps(punch, at, find_records));
    KV_TRY(check_records(punch));
    err = walk_gaps(punch, at, punch_gap);
    error = door->info(door->context, at->file, &after);
    uint64_t less = before.stored_bytes > after.stored_bytes && error == 0
                        ? before.stored_bytes - after.stored_bytes
                        : 0;
    if (punch->args->dry_run)
        less = punch->dead_bytes < most_bytes ? punch->dead_bytes : most_bytes;
    account(punch, at->number, less);
done:
    return err;
}

static enum kv_err punch_segment(struct punch *punch, uint32_t number) {
    struct store *store = punch->store;
    const struct io_door *door = store->options.door;
    struct fmt_place tail = store->state.tail;
    struct io_file_info info = {0};
    char name[SEGMENT_NAME_BYTES];
    segment_name(number, name);
    int error = door->info_at(door->context, store->seg_dir, name, &info);
    if (error != 0)
        return segment_error(punch->diag, error, "look at", number);
    struct segment_at at =
        segment_of(punch, number, number == tail.segment ? tail.off : info.size_bytes);
    uint64_t taken = store_inner_taken(store, &info, at.end);
    uint64_t live = live_bytes(punch, &at);
    int worth = taken >= live + DEAD_BYTES && taken - live >= at.end / DEAD_SHARE;
#ifndef BREAK_PUNCH_EVERY
    worth |= punch->args->every && taken > live;
#endif
    if (!worth)
        return KV_OK;
    if (!punch->args->dry_run && is_held(store)) {
        punch->report->held++;
        return KV_OK;
    }
    int how = punch->args->dry_run ? IO_READ : IO_WRITE;
    error = door->open(door->context, store->seg_dir, name, how, &at.file);
    if (error != 0)
        return segment_error(punch->diag, error, "open", number);
    enum kv_err err = punch_open(punch, &at, taken - live);
    door->close(door->context, at.file);
    return err;
}

/* The last batch stands in the newest segment that has a record at all. */
static enum kv_err find_limit(struct punch *punch, const uint32_t *numbers, size_t count) {
    const struct fmt_state *state = &punch->store->state;
    for (size_t i = count; i-- > 0 && punch->records.count == 0;) {
        uint64_t end = numbers[i] == state->tail.segment ? state->tail.off : UINT64_MAX;
        struct segment_at at = segment_of(punch, numbers[i], end);
        if (numbers[i] > state->tail.segment)
            continue;
        enum kv_err err = walk_gaps(punch, &at, find_records);
        if (err != KV_OK)
            return err;
    }
    for (size_t i = 0; i < punch->records.count; i++)
        if (punch->records.items[i].sequence == state->sequence) {
            punch->limit = punch->records.items[i].begin;
            return KV_OK;
        }
    return kv_diag_set(punch->diag, KV_ERR_CORRUPT, "the record of the last batch is damaged");
}

static void leave(struct punch *punch, uint32_t number) {
    punch->report->damaged++;
    if (punch->report->trouble[0] == 0)
        snprintf(punch->report->trouble, sizeof punch->report->trouble,
                 "segment %u is not punched: %.150s", number, punch->diag->text);
    kv_diag_clear(punch->diag);
}

static enum kv_err run(struct punch *punch) {
    uint32_t *numbers = NULL;
    size_t count = 0;
    enum kv_err err = KV_OK;
    KV_TRY(recover_segments(punch->store, &numbers, &count, punch->diag));
    KV_TRY(list_live(punch));
    KV_TRY(store_gone_load(punch->store->index, punch->store->options.alloc, &punch->gone,
                           punch->diag));
    err = find_limit(punch, numbers, count);
    if (err == KV_ERR_CORRUPT) {
        leave(punch, punch->store->state.tail.segment);
        err = KV_OK;
        goto done;
    }
    for (size_t i = 0; i < count && err == KV_OK && !punch->report->refused; i++) {
        if (numbers[i] > punch->limit.segment)
            break;
        err = punch_segment(punch, numbers[i]);
        if (err == KV_ERR_CORRUPT) {
            leave(punch, numbers[i]);
            err = KV_OK;
        }
    }
done:
    kv_alloc_release(punch->store->options.alloc, numbers);
    return err;
}

enum kv_err store_punch(const struct store_punch_args *args, struct store_punch_report *report_out,
                        struct kv_diag *diag) {
    struct store *store = args->store;
    struct kv_diag own = {""};
    struct punch punch = {
        .store = store, .args = args, .report = report_out, .diag = diag != NULL ? diag : &own};
    memset(report_out, 0, sizeof *report_out);
    if (store->state.sequence == 0)
        return KV_OK;
    enum kv_err err = run(&punch);
    store_gone_release(&punch.gone);
    kv_alloc_release(store->options.alloc, punch.live);
    kv_alloc_release(store->options.alloc, punch.records.items);
    /* Before anybody else takes what has come free. */
    if (!args->dry_run && report_out->punched_bytes != 0)
        store_reserve_take(store);
    pthread_mutex_lock(&store->lock);
    if (report_out->refused)
        snprintf(store->fallback, sizeof store->fallback,
                 "this file system makes no holes: gc frees whole segments only");
    pthread_mutex_unlock(&store->lock);
    return err;
}
