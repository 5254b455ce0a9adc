/* store/store_fsck.c - the chain replayed beside the index.
 *
 * Responsible for: the contract of store_fsck.h.
 * Not responsible for: changing anything but putting records into the chain again.
 */
#include "store/store_fsck.h"

#include "store/store_gone.h"
#include "store/store_inner.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_BYTES = 320 };

/* What the last operation on a key said. */
struct said {
    size_t key_off;
    uint32_t key_bytes;
    uint32_t is_put;
    uint64_t order;
    uint64_t entry_hash;
};

struct place {
    uint32_t segment;
    uint32_t key_bytes;
    uint64_t off, end;
    size_t key_off;
};

struct fsck {
    const struct store_fsck_args *args;
    struct store *store;
    const struct kv_alloc *alloc;
    struct store_fsck_report *report;
    struct kv_diag *diag;
    uint8_t *arena; /* keys */
    size_t arena_bytes, arena_capacity;
    struct said *said;
    size_t said_count, said_capacity;
    struct place *places;
    size_t place_count, place_capacity;
    uint32_t *numbers;
    uint64_t *ends; /* file sizes, beside numbers */
    size_t segment_count;
    struct recover_list list;
    struct index_copy copy;
    struct store_batch *batch;
    uint64_t all_bytes, live_bytes;
    uint64_t holes;       /* batches that are missing: then the index may know better */
    uint64_t own_records; /* of the index: the store's, which stats do not count */
};

const char *store_fsck_name(enum store_fsck_kind kind) {
    static const char *const names[STORE_FSCK_KINDS] = {
        "entry",        "extent-place",    "extent-overlap", "extent-data", "batch",
        "not-in-index", "not-in-segments", "counts",         "tail",        "batch-padding"};
    return kind < STORE_FSCK_KINDS ? names[kind] : "?";
}

struct about {
    enum store_fsck_kind kind;
    const uint8_t *key;
    size_t key_bytes;
};

static void say(struct fsck *fsck, struct about about, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void say(struct fsck *fsck, struct about about, const char *format, ...) {
    char text[TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    int is_note = about.kind == STORE_FSCK_TAIL || about.kind == STORE_FSCK_PADDING;
    const struct store_fsck_finding finding = {about.kind, is_note, about.key, about.key_bytes,
                                               text};
    if (finding.is_note)
        fsck->report->notes++;
    else
        fsck->report->damage++;
    fsck->args->each(fsck->args->context, &finding);
}

static enum kv_err no_memory(struct fsck *fsck) {
    return kv_diag_set(fsck->diag, KV_ERR_NOMEM, "no memory to compare segments and index");
}

static int keep_key(struct fsck *fsck, const uint8_t *key, size_t bytes, size_t *off_out) {
    void *arena = fsck->arena;
    if (!kv_alloc_grow(fsck->alloc, &arena, &fsck->arena_capacity, fsck->arena_bytes + bytes, 1))
        return 0;
    fsck->arena = arena;
    memcpy(fsck->arena + fsck->arena_bytes, key, bytes);
    *off_out = fsck->arena_bytes;
    fsck->arena_bytes += bytes;
    return 1;
}

static enum kv_err pause(struct fsck *fsck, uint64_t read_bytes) {
    const struct store_fsck_args *args = fsck->args;
    return args->pause == NULL || args->pause(args->context, read_bytes) == 0
               ? KV_OK
               : kv_diag_set(fsck->diag, KV_ERR_BUSY, "ended before all was read");
}

/* --- the chain */

static enum kv_err scan(struct fsck *fsck) {
    struct store *store = fsck->store;
    const struct io_door *door = store->options.door;
    struct fmt_place tail = store->state.tail;
    enum kv_err err = recover_segments(store, &fsck->numbers, &fsck->segment_count, fsck->diag);
    if (err != KV_OK)
        return err;
    fsck->ends = kv_alloc_zeroed(fsck->alloc, fsck->segment_count + 1, sizeof *fsck->ends);
    if (fsck->ends == NULL)
        return no_memory(fsck);
    for (size_t i = 0; i < fsck->segment_count && err == KV_OK; i++) {
        uint32_t number = fsck->numbers[i];
        char name[SEGMENT_NAME_BYTES];
        struct io_file_info info = {0};
        uint64_t nonzero_end = 0;
        struct fmt_place from = {number, 0};
        segment_name(number, name);
        int error = door->info_at(door->context, store->seg_dir, name, &info);
        if (error != 0)
            return segment_error(fsck->diag, error, "look at", number);
        fsck->ends[i] = info.size_bytes;
        err = recover_scan(store, from, &fsck->list, &nonzero_end, fsck->diag);
        fsck->report->read_bytes += info.size_bytes;
        uint64_t tail_off = number == tail.segment ? tail.off : number > tail.segment ? 0 : ~0ull;
        if (err == KV_OK && nonzero_end > tail_off)
            say(fsck, (struct about){STORE_FSCK_TAIL, NULL, 0},
                "segment %u: %llu bytes behind the last batch were never acknowledged", number,
                (unsigned long long)(nonzero_end - tail_off));
        if (err == KV_OK)
            err = pause(fsck, info.size_bytes);
    }
    fsck->report->segments = fsck->segment_count;
    return err;
}

static enum kv_err add_said(struct fsck *fsck, const struct fmt_op *op, uint64_t order) {
    void *said = fsck->said;
    if (!kv_alloc_grow(fsck->alloc, &said, &fsck->said_capacity, fsck->said_count + 1,
                       sizeof *fsck->said))
        return no_memory(fsck);
    fsck->said = said;
    struct said *one = &fsck->said[fsck->said_count];
    *one = (struct said){
        .key_bytes = (uint32_t)op->key_bytes, .is_put = op->type == FMT_OP_PUT, .order = order};
    if (one->is_put)
        one->entry_hash = kv_digest_short(op->entry_at, op->entry_bytes);
    if (!keep_key(fsck, op->key, op->key_bytes, &one->key_off))
        return no_memory(fsck);
    fsck->said_count++;
    return KV_OK;
}

/* 1 when the batch is whole; its operations are taken. */
static enum kv_err take_batch(struct fsck *fsck, const struct fmt_batch *head, int *whole_out,
                              struct kv_digest *last_out) {
    uint8_t *record = NULL;
    struct kv_digest digest;
    struct kv_diag own = {""};
    struct kv_reader reader;
    *whole_out = 0;
    enum kv_err err = recover_load(fsck->store, head, &record, &digest, &own);
    if (err == KV_ERR_CORRUPT)
        return KV_OK;
    if (err != KV_OK)
        return kv_diag_set(fsck->diag, err, "%s", own.text);
    kv_reader_init(&reader, record + FMT_BATCH_HEAD_BYTES,
                   (size_t)head->record_bytes - FMT_BATCH_HEAD_BYTES - KV_DIGEST_BYTES);
    for (uint32_t i = 0; i < head->op_count && err == KV_OK; i++) {
        struct fmt_op op;
        err = fmt_op_decode(&reader, &op);
        if (err == KV_OK)
            err = add_said(fsck, &op, head->sequence);
    }
    memcpy(last_out->bytes, record + head->record_bytes - KV_DIGEST_BYTES, KV_DIGEST_BYTES);
    if (err == KV_OK && recover_padding(fsck->store, head, &own) == KV_ERR_CORRUPT)
        say(fsck, (struct about){STORE_FSCK_PADDING, NULL, 0}, "%s; nothing is lost by it",
            own.text);
    *whole_out = err == KV_OK;
    fsck->report->batches += err == KV_OK;
    kv_alloc_release(fsck->alloc, record);
    return err;
}

static int by_sequence(const void *a, const void *b) {
    const struct fmt_batch *x = a;
    const struct fmt_batch *y = b;
    if (x->sequence != y->sequence)
        return x->sequence < y->sequence ? -1 : 1;
    return x->epoch > y->epoch ? -1 : x->epoch < y->epoch;
}

static void say_hole(struct fsck *fsck, const struct store_gone *gone, uint64_t first,
                     uint64_t end) {
    uint64_t missing = store_gone_missing(gone, first, end);
#ifdef BREAK_FSCK_CHAIN
    missing = 0;
#endif
    fsck->holes += missing;
    if (missing != 0)
        say(fsck, (struct about){STORE_FSCK_BATCH, NULL, 0},
            "%llu batch records between sequences %llu and %llu are missing or damaged",
            (unsigned long long)missing, (unsigned long long)first, (unsigned long long)(end - 1));
}

/* As a rebuild would choose them, up to the last that the index knows. */
static enum kv_err replay(struct fsck *fsck) {
    struct store_gone gone = {0};
    struct kv_digest last = {{0}};
    uint64_t expected = 1;
    uint64_t end = fsck->store->state.sequence + 1;
    enum kv_err err = store_gone_load(fsck->store->index, fsck->alloc, &gone, fsck->diag);
    if (err == KV_ERR_CORRUPT)
        err = KV_OK; /* the walk of the entries says it */
    if (fsck->list.count != 0)
        qsort(fsck->list.items, fsck->list.count, sizeof *fsck->list.items, by_sequence);
    for (size_t i = 0; err == KV_OK && i < fsck->list.count; i++) {
        const struct fmt_batch *head = &fsck->list.items[i];
        int whole = 0;
        if (head->sequence < expected || head->sequence >= end)
            continue;
        if (head->sequence == expected &&
            memcmp(head->previous.bytes, last.bytes, KV_DIGEST_BYTES) != 0)
            continue;
        err = take_batch(fsck, head, &whole, &last);
        if (err != KV_OK || !whole)
            continue;
        say_hole(fsck, &gone, expected, head->sequence);
        expected = head->sequence + 1;
    }
    if (err == KV_OK)
        say_hole(fsck, &gone, expected, end);
    store_gone_release(&gone);
    return err;
}

/* --- both ways */

static int compare_keys(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes) {
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    if (order != 0)
        return order;
    return a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

static int by_key(const void *a, const void *b, void *context) {
    const struct said *x = a;
    const struct said *y = b;
    const uint8_t *arena = context;
    int order = compare_keys(arena + x->key_off, x->key_bytes, arena + y->key_off, y->key_bytes);
    if (order != 0)
        return order;
    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    return x->key_off < y->key_off ? -1 : 1; /* within one batch: as they stand */
}

/* Keeps what lives at the end, ascending. */
static void settle(struct fsck *fsck) {
    size_t kept = 0;
    if (fsck->said_count != 0)
        qsort_r(fsck->said, fsck->said_count, sizeof *fsck->said, by_key, fsck->arena);
    for (size_t i = 0; i < fsck->said_count; i++) {
        const struct said *one = &fsck->said[i];
        const struct said *next = i + 1 < fsck->said_count ? one + 1 : NULL;
        if (next != NULL && compare_keys(fsck->arena + one->key_off, one->key_bytes,
                                         fsck->arena + next->key_off, next->key_bytes) == 0)
            continue;
        if (one->is_put)
            fsck->said[kept++] = *one;
    }
    fsck->said_count = kept;
}

static enum kv_err begin_repair(struct fsck *fsck) {
    if (fsck->batch != NULL)
        return KV_OK;
    enum kv_err err = store_inner_begin_reserve(fsck->store, &fsck->batch, fsck->diag);
    if (err == KV_OK)
        store_batch_cause(fsck->batch, STORE_CAUSE_CARE);
    return err;
}

static enum kv_err restate(struct fsck *fsck, const uint8_t *key, size_t key_bytes,
                           const struct fmt_entry *entry) {
    if (!fsck->args->repair)
        return KV_OK;
    enum kv_err err = begin_repair(fsck);
    if (err == KV_OK)
        err = store_inner_put_entry(fsck->batch, key, key_bytes, entry, fsck->diag);
    fsck->report->restated += err == KV_OK;
    return err;
}

/* With a hole in the chain the record may have been deleted there: repair says so again, so that no
 * rebuild brings it back. */
static enum kv_err not_in_index(struct fsck *fsck, const struct said *one) {
    const uint8_t *key = fsck->arena + one->key_off;
    const struct about about = {STORE_FSCK_NOT_IN_INDEX, key, one->key_bytes};
    enum kv_err err = KV_OK;
    if (fsck->holes == 0) {
        fsck->report->index_wrong = 1;
        say(fsck, about,
            "the segments hold a record that the index has not: --rebuild-index brings it back");
        return KV_OK;
    }
    say(fsck, about,
        "the segments hold a record that the index has not, a missing batch may have deleted it: "
        "--repair deletes it there too, --rebuild-index brings it back");
    if (!fsck->args->repair)
        return KV_OK;
    err = begin_repair(fsck);
    if (err == KV_OK)
        err = store_batch_delete(fsck->batch, key, one->key_bytes, fsck->diag);
    fsck->report->restated += err == KV_OK;
    return err;
}

static enum kv_err add_places(struct fsck *fsck, const struct fmt_entry *entry, struct place of,
                              int *readable_out) {
    for (uint32_t i = 0; i < entry->extent_count; i++) {
        struct store_extent extent = fmt_entry_extent(entry, i);
        uint64_t end = extent.off + fmt_extent_padded(&extent);
        void *places = fsck->places;
        size_t at = 0;
        while (at < fsck->segment_count && fsck->numbers[at] != extent.segment)
            at++;
        struct about about = {STORE_FSCK_PLACE, fsck->arena + of.key_off, of.key_bytes};
        *readable_out &= at < fsck->segment_count && end <= fsck->ends[at];
        if (at == fsck->segment_count)
            say(fsck, about, "extent %u of kind %u stands in segment %u, which is missing", i,
                extent.kind, extent.segment);
        else if (end > fsck->ends[at])
            say(fsck, about, "extent %u of kind %u ends behind the end of segment %u", i,
                extent.kind, extent.segment);
        if (!kv_alloc_grow(fsck->alloc, &places, &fsck->place_capacity, fsck->place_count + 1,
                           sizeof *fsck->places))
            return no_memory(fsck);
        fsck->places = places;
        fsck->places[fsck->place_count++] =
            (struct place){extent.segment, of.key_bytes, extent.off, end, of.key_off};
        fsck->report->extents++;
    }
    return KV_OK;
}

static enum kv_err check_data(struct fsck *fsck, const uint8_t *key, size_t key_bytes,
                              const struct fmt_entry *entry) {
    struct store_read_stats stats = {0};
    struct kv_diag own = {""};
    if (!fsck->args->read_data)
        return KV_OK;
    const struct store_read_entry_args args = {key, key_bytes, entry, 0};
    enum kv_err err = store_read_entry(fsck->store, &args, &stats, &own);
    fsck->report->read_bytes += stats.read_bytes;
    if (fsck->args->progress != NULL)
        fsck->args->progress(fsck->args->context, fsck->report->read_bytes, fsck->all_bytes);
    if (err == KV_ERR_NOMEM)
        return kv_diag_set(fsck->diag, err, "%s", own.text);
    if (err != KV_OK)
        say(fsck, (struct about){STORE_FSCK_DATA, key, key_bytes}, "%s", own.text);
    return pause(fsck, stats.read_bytes);
}

/* One entry of the index beside what the chain says; `at` is the next of the said ones. */
static enum kv_err compare(struct fsck *fsck, size_t *at) {
    const uint8_t *key = fsck->copy.bytes;
    size_t key_bytes = fsck->copy.key_bytes;
    struct fmt_entry entry;
    size_t key_off = 0;
    int order = 1;
    while (*at < fsck->said_count) {
        const struct said *one = &fsck->said[*at];
        order = compare_keys(fsck->arena + one->key_off, one->key_bytes, key, key_bytes);
        if (order >= 0)
            break;
        enum kv_err err = not_in_index(fsck, one);
        if (err != KV_OK)
            return err;
        ++*at;
    }
    const struct said *one = *at < fsck->said_count && order == 0 ? &fsck->said[(*at)++] : NULL;
    fsck->report->records++;
    fsck->own_records += key_bytes >= STORE_GONE_OWN_BYTES &&
                         memcmp(key, STORE_GONE_OWN_PREFIX, STORE_GONE_OWN_BYTES) == 0;
    if (fmt_entry_decode(key, key_bytes, fsck->copy.total_bytes, &entry) != KV_OK) {
        fsck->report->index_wrong = 1;
        say(fsck, (struct about){STORE_FSCK_ENTRY, key, key_bytes},
            "an index entry fails its check: --rebuild-index takes it from the segments");
        return KV_OK;
    }
    fsck->live_bytes += fmt_entry_live_bytes(&entry);
    enum kv_err err = KV_OK;
    if (one == NULL ||
        one->entry_hash != kv_digest_short(key + key_bytes, fsck->copy.total_bytes - key_bytes)) {
        say(fsck, (struct about){STORE_FSCK_NOT_IN_CHAIN, key, key_bytes},
            "only the index has this record as it is: a rebuild would lose it, --repair writes it "
            "to the segments again");
        err = restate(fsck, key, key_bytes, &entry);
    }
    if (err == KV_OK && !keep_key(fsck, key, key_bytes, &key_off))
        err = no_memory(fsck);
    int readable = 1;
    if (err == KV_OK)
        err = add_places(fsck, &entry,
                         (struct place){.key_off = key_off, .key_bytes = (uint32_t)key_bytes},
                         &readable);
    if (err == KV_OK && readable)
        err = check_data(fsck, key, key_bytes, &entry);
    return err;
}

static enum kv_err walk(struct fsck *fsck) {
    uint8_t after[STORE_KEY_BYTES_MAX];
    struct index_range range = {.after = after};
    const struct fmt_state *state = &fsck->store->state;
    size_t at = 0;
    for (;;) {
        enum kv_err err = index_next(fsck->store->index, &range, &fsck->copy, fsck->diag);
        if (err == KV_ERR_NOT_FOUND)
            break;
        if (err != KV_OK)
            return err;
        memcpy(after, fsck->copy.bytes, fsck->copy.key_bytes);
        range.after_bytes = fsck->copy.key_bytes;
        err = compare(fsck, &at);
        if (err != KV_OK)
            return err;
    }
    for (; at < fsck->said_count; at++) {
        enum kv_err err = not_in_index(fsck, &fsck->said[at]);
        if (err != KV_OK)
            return err;
    }
    if (fsck->report->records != state->record_count || fsck->live_bytes != state->live_bytes) {
        fsck->report->index_wrong = 1;
        say(fsck, (struct about){STORE_FSCK_COUNTS, NULL, 0},
            "the index counts %llu records and %llu live bytes, its entries are %llu and %llu",
            (unsigned long long)state->record_count, (unsigned long long)state->live_bytes,
            (unsigned long long)fsck->report->records, (unsigned long long)fsck->live_bytes);
    }
    /* As store_stats counts: without the store's own. */
    fsck->report->records -= fsck->own_records;
    return KV_OK;
}

static int by_place(const void *a, const void *b) {
    const struct place *x = a;
    const struct place *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return x->off < y->off ? -1 : x->off > y->off;
}

static void check_overlap(struct fsck *fsck) {
    if (fsck->place_count != 0)
        qsort(fsck->places, fsck->place_count, sizeof *fsck->places, by_place);
    for (size_t i = 1; i < fsck->place_count; i++) {
        const struct place *one = &fsck->places[i];
        if (one->segment == one[-1].segment && one->off < one[-1].end)
            say(fsck,
                (struct about){STORE_FSCK_OVERLAP, fsck->arena + one->key_off, one->key_bytes},
                "segment %u: two extents share the bytes at %llu", one->segment,
                (unsigned long long)one->off);
    }
}

static enum kv_err run(struct fsck *fsck) {
    struct store_stats stats;
    enum kv_err err = KV_OK;
    store_stats_get(fsck->store, &stats);
    fsck->all_bytes = stats.segment_bytes + (fsck->args->read_data ? stats.live_bytes : 0);
    KV_TRY(scan(fsck));
    KV_TRY(replay(fsck));
    settle(fsck);
    KV_TRY(walk(fsck));
    check_overlap(fsck);
    if (fsck->batch != NULL) {
        struct store_batch *batch = fsck->batch;
        fsck->batch = NULL;
        KV_TRY(store_batch_commit(batch, NULL, fsck->diag));
    }
done:
    if (fsck->batch != NULL)
        store_batch_abandon(fsck->batch);
    return err;
}

enum kv_err store_fsck(const struct store_fsck_args *args, struct store_fsck_report *report_out,
                       struct kv_diag *diag) {
    struct store *store = args->store;
    struct fsck fsck = {.args = args,
                        .store = store,
                        .alloc = store->options.alloc,
                        .report = report_out,
                        .diag = diag};
    memset(report_out, 0, sizeof *report_out);
    if (args->repair && store->writer == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "the store is open for reading only");
    enum kv_err err = run(&fsck);
    index_copy_release(fsck.alloc, &fsck.copy);
    kv_alloc_release(fsck.alloc, fsck.list.items);
    kv_alloc_release(fsck.alloc, fsck.arena);
    kv_alloc_release(fsck.alloc, fsck.said);
    kv_alloc_release(fsck.alloc, fsck.places);
    kv_alloc_release(fsck.alloc, fsck.numbers);
    kv_alloc_release(fsck.alloc, fsck.ends);
    return err;
}
