/* store/rebuild.c - an index from segments alone.
 *
 * Responsible for: putting the batch records of all segments into their chain, replaying them into
 * index.tmp, and renaming that; the same beside a writer that goes on.
 * Not responsible for: finding and checking one record (recover.c).
 *
 * Nothing in seg/ is changed here. A new store is the rebuild of no segments.
 */
#include "store/store_gone.h"
#include "store/store_inner.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char tmp_name[] = "index.tmp";
static const char index_name[] = "index";
enum { REMOVALS_MAX = 8 };

struct rebuild {
    struct store *store;
    struct index *index;
    struct recover_list list;
    struct fmt_state state;
    uint64_t epoch_max;
    uint64_t id_end;
    uint32_t segment_max;
    uint64_t nonzero_bytes;
    struct store_gone_range *gaps; /* sequences that were not found in front of one that was */
    size_t gap_count, gap_capacity;
    uint64_t missing_count;    /* of these, that gc has not taken out */
    uint64_t dropped_sequence; /* 0 none */
};

static int remove_files(const struct io_door *door, int dir) {
    static const char *const files[2] = {"data.mdb", "lock.mdb"};
    int error = 0;
    for (int i = 0; i < 2 && error == 0; i++) {
        error = door->remove(door->context, dir, files[i]);
        if (error == ENOENT)
            error = 0;
    }
    return error;
}

/* Whoever reads it in this moment may make a lock.mdb there when ours is gone. */
static int remove_folder(struct store *store, int dir, const char *name) {
    const struct io_door *door = store->options.door;
    int error = ENOTEMPTY;
    for (int i = 0; i < REMOVALS_MAX && (error == ENOTEMPTY || error == EEXIST); i++) {
        error = remove_files(door, dir);
        if (error == 0)
            error = door->remove(door->context, store->dir, name);
    }
    return error;
}

static enum kv_err remove_index(struct store *store, const char *name, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    int dir = -1;
    int error = door->open(door->context, store->dir, name, IO_READ | IO_DIRECTORY, &dir);
    if (error == ENOENT)
        return KV_OK;
    if (error == ELOOP || error == ENOTDIR)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "%s is not a directory of its own (a symbolic link or a file): refused",
                           name);
    if (error == 0)
        error = remove_folder(store, dir, name);
    if (dir >= 0)
        door->close(door->context, dir);
    if (error != 0)
        return kv_diag_errno(diag, error == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, error,
                             "cannot remove %s", name);
    return KV_OK;
}

/* Of one sequence the larger epoch first: it was written by the later writer. */
static int by_sequence(const void *a, const void *b) {
    const struct fmt_batch *x = a;
    const struct fmt_batch *y = b;
    if (x->sequence != y->sequence)
        return x->sequence < y->sequence ? -1 : 1;
    if (x->epoch != y->epoch)
        return x->epoch > y->epoch ? -1 : 1;
    return 0;
}

static enum kv_err collect(struct rebuild *rebuild, struct kv_diag *diag) {
    struct store *store = rebuild->store;
    uint32_t *numbers = NULL;
    size_t count = 0;
    enum kv_err err = recover_segments(store, &numbers, &count, diag);
    for (size_t i = 0; i < count && err == KV_OK; i++) {
        struct fmt_place from = {numbers[i], 0};
        uint64_t nonzero_end = 0;
        if (store->options.progress != NULL)
            store->options.progress(store->options.progress_context, i, count);
        err = recover_scan(store, from, &rebuild->list, &nonzero_end, diag);
        rebuild->segment_max = numbers[i];
        rebuild->nonzero_bytes += nonzero_end;
    }
    kv_alloc_release(store->options.alloc, numbers);
    if (err != KV_OK)
        return err;
    if (rebuild->list.count == 0 && rebuild->nonzero_bytes != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "seg/ holds no batch of this store, so its index cannot be rebuilt: "
                           "FORMAT or seg/ is that of another store");
    if (rebuild->list.count != 0)
        qsort(rebuild->list.items, rebuild->list.count, sizeof *rebuild->list.items, by_sequence);
    for (size_t i = 0; i < rebuild->list.count; i++) {
        const struct fmt_batch *batch = &rebuild->list.items[i];
        if (batch->epoch > rebuild->epoch_max)
            rebuild->epoch_max = batch->epoch;
        if (batch->extent_id_first + batch->extent_id_count > rebuild->id_end)
            rebuild->id_end = batch->extent_id_first + batch->extent_id_count;
    }
    return KV_OK;
}

/* Replays one batch; `last` ones count only if every extent is there. */
static enum kv_err replay(struct rebuild *rebuild, const struct fmt_batch *batch, int last,
                          int *applied_out, struct kv_diag *diag) {
    struct store *store = rebuild->store;
    uint8_t *record = NULL;
    struct kv_digest digest;
    *applied_out = 0;
    enum kv_err err = recover_load(store, batch, &record, &digest, diag);
#ifdef BREAK_TOMBSTONE
    struct kv_reader ops;
    kv_reader_init(&ops, record + FMT_BATCH_HEAD_BYTES,
                   record == NULL ? 0 : batch->record_bytes - FMT_BATCH_HEAD_BYTES - 16);
    for (struct fmt_op op; record != NULL && fmt_op_decode(&ops, &op) == KV_OK;)
        if (op.type == FMT_OP_DELETE)
            memset((uint8_t *)(uintptr_t)op.key, 0xff, op.key_bytes);
#endif
    if (err == KV_OK && last)
        err = recover_verify(store, batch, record, diag);
    if (err == KV_OK) {
        err = recover_apply(rebuild->index, batch, record, &rebuild->state, diag);
        *applied_out = err == KV_OK;
    }
    struct kv_diag padding = {""};
    if (*applied_out && recover_padding(store, batch, &padding) == KV_ERR_CORRUPT)
        store_inner_note(store, "Found that %s; nothing is lost by it. ", padding.text);
    kv_alloc_release(store->options.alloc, record);
    if (err == KV_ERR_CORRUPT) {
        kv_diag_clear(diag);
        return KV_OK;
    }
    return err;
}

/* Tries the batches [first, end) of one sequence: those that fit the chain, or, where batches are
 * missing in front, any. */
static enum kv_err replay_sequence(struct rebuild *rebuild, size_t first, size_t end,
                                   struct kv_diag *diag) {
    const struct fmt_batch *items = rebuild->list.items;
    uint64_t sequence = items[first].sequence;
    uint64_t expected = rebuild->state.sequence + 1;
    int gap = sequence != expected;
    int last = end == rebuild->list.count;
    int applied = 0;
    for (size_t i = first; i < end && !applied; i++) {
        int fits = memcmp(items[i].previous.bytes, rebuild->state.last.bytes, KV_DIGEST_BYTES) == 0;
        if (!gap && !fits)
            continue;
        enum kv_err err = replay(rebuild, &items[i], last, &applied, diag);
        if (err != KV_OK)
            return err;
    }
    if (applied && gap) {
        void *gaps = rebuild->gaps;
        if (!kv_alloc_grow(rebuild->store->options.alloc, &gaps, &rebuild->gap_capacity,
                           rebuild->gap_count + 1, sizeof *rebuild->gaps))
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the gaps of the chain");
        rebuild->gaps = gaps;
        rebuild->gaps[rebuild->gap_count++] = (struct store_gone_range){expected, sequence};
    }
    if (!applied && last)
        rebuild->dropped_sequence = sequence;
    return KV_OK;
}

static enum kv_err replay_all(struct rebuild *rebuild, struct kv_diag *diag) {
    size_t first = 0;
#ifdef BREAK_LAST_REPLAY
    rebuild->list.count -= rebuild->list.count != 0;
#endif
    while (first < rebuild->list.count) {
        size_t end = first + 1;
        while (end < rebuild->list.count &&
               rebuild->list.items[end].sequence == rebuild->list.items[first].sequence)
            end++;
        enum kv_err err = replay_sequence(rebuild, first, end, diag);
        if (err != KV_OK)
            return err;
        first = end;
    }
    return KV_OK;
}

/* The last batch that was there may have been acknowledged and then damaged: its bytes stay for
 * whoever wants to look, and writing goes on in a new segment. */
static enum kv_err finish_state(struct rebuild *rebuild, struct kv_diag *diag) {
    struct fmt_state *state = &rebuild->state;
    struct recover_list rest = {0};
    uint64_t nonzero_end = 0;
    enum kv_err err = KV_OK;
    int dirty = rebuild->segment_max > state->tail.segment;
    if (!dirty && rebuild->segment_max == state->tail.segment) {
        err = recover_scan(rebuild->store, state->tail, &rest, &nonzero_end, diag);
        dirty = nonzero_end > state->tail.off;
        kv_alloc_release(rebuild->store->options.alloc, rest.items);
    }
    if (err != KV_OK)
        return err;
    if (dirty)
        state->tail = (struct fmt_place){rebuild->segment_max + 1, 0};
    if (rebuild->epoch_max > state->epoch)
        state->epoch = rebuild->epoch_max;
    if (rebuild->id_end > state->extent_id_next)
        state->extent_id_next = rebuild->id_end;
    return index_apply(rebuild->index, NULL, 0, state, diag);
}

/* Batches that gc has taken out are not missing: what they said was restated behind them. */
static enum kv_err count_missing(struct rebuild *rebuild, struct kv_diag *diag) {
    struct store_gone gone = {0};
    enum kv_err err = store_gone_load(rebuild->index, rebuild->store->options.alloc, &gone, diag);
    for (size_t i = 0; err == KV_OK && i < rebuild->gap_count; i++)
        rebuild->missing_count +=
            store_gone_missing(&gone, rebuild->gaps[i].first, rebuild->gaps[i].end);
    store_gone_release(&gone);
    return err;
}

static void report(const struct rebuild *rebuild) {
    struct store *store = rebuild->store;
    if (rebuild->list.count == 0 && rebuild->segment_max == 0)
        return;
    store_inner_note(store, "The index was rebuilt from %llu batches: %llu records. ",
                     (unsigned long long)rebuild->state.sequence,
                     (unsigned long long)rebuild->state.record_count);
    if (rebuild->missing_count != 0)
        store_inner_note(store, "%llu batches are missing or damaged: what they put is lost. ",
                         (unsigned long long)rebuild->missing_count);
    if (rebuild->dropped_sequence != 0)
        store_inner_note(store, "The last batch (%llu) was not whole and was dropped. ",
                         (unsigned long long)rebuild->dropped_sequence);
}

static enum kv_err put_in_place(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    enum kv_err err = remove_index(store, index_name, diag);
    if (err != KV_OK)
        return err;
    int error = door->rename(door->context, store->dir, tmp_name, index_name);
    if (error == 0)
        error = door->sync(door->context, store->dir);
    if (error != 0)
        return kv_diag_errno(diag, error == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, error,
                             "cannot put the new index in place");
    return KV_OK;
}

/* Everything but the state, into index.tmp. */
static enum kv_err replay_into_tmp(struct rebuild *rebuild, const char *dir_path,
                                   struct kv_diag *diag) {
    struct store *store = rebuild->store;
    enum kv_err err = KV_OK;
    struct index_options options = {.mode = INDEX_CREATE,
                                    .door = store->options.door,
                                    .alloc = store->options.alloc,
                                    .dir = store->dir,
                                    .dir_path = dir_path,
                                    .name = tmp_name};
    memcpy(rebuild->state.store_id, store->id, FMT_ID_BYTES);
    rebuild->state.tail.segment = 1;
    rebuild->state.extent_id_next = 1;
    KV_TRY(remove_index(store, tmp_name, diag));
    KV_TRY(index_open(&options, &rebuild->index, diag));
    KV_TRY(collect(rebuild, diag));
    KV_TRY(replay_all(rebuild, diag));
    KV_TRY(count_missing(rebuild, diag));
done:
    return err;
}

static void release(struct rebuild *rebuild) {
    index_close(rebuild->index);
    kv_alloc_release(rebuild->store->options.alloc, rebuild->gaps);
    kv_alloc_release(rebuild->store->options.alloc, rebuild->list.items);
}

enum kv_err rebuild_index(struct store *store, const char *dir_path, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct rebuild rebuild = {.store = store};
    KV_TRY(replay_into_tmp(&rebuild, dir_path, diag));
    KV_TRY(finish_state(&rebuild, diag));
    KV_TRY(index_sync(rebuild.index, diag));
    index_close(rebuild.index);
    rebuild.index = NULL;
    KV_TRY(put_in_place(store, diag));
    report(&rebuild);
done:
    release(&rebuild);
    return err;
}

/* --- beside a writer that goes on */

/* Whoever has the store open knows what its last batch was: the state stays what it is. */
static enum kv_err agree(struct rebuild *rebuild, struct kv_diag *diag) {
    struct store *store = rebuild->store;
    const struct fmt_state *made = &rebuild->state;
    pthread_mutex_lock(&store->lock);
    struct fmt_state state = store->state;
    pthread_mutex_unlock(&store->lock);
#ifndef BREAK_REINDEX_AGREE
    if (made->sequence != state.sequence || made->record_count != state.record_count ||
        made->live_bytes != state.live_bytes)
        return kv_diag_set(
            diag, KV_ERR_MISMATCH,
            "the segments hold %llu batches and %llu records, the index %llu and "
            "%llu: nothing was changed; end the program that has the store, then "
            "`coldplane fsck` and `coldplane fsck --rebuild-index`",
            (unsigned long long)made->sequence, (unsigned long long)made->record_count,
            (unsigned long long)state.sequence, (unsigned long long)state.record_count);
#endif
    return index_apply(rebuild->index, NULL, 0, &state, diag);
}

/* The sentence stands in `note_out` and not for ever in what the opening found. */
static void report_apart(const struct rebuild *rebuild, char note_out[STORE_NOTE_BYTES]) {
    struct store *store = rebuild->store;
    char opened[STORE_NOTE_BYTES];
    pthread_mutex_lock(&store->lock);
    memcpy(opened, store->opened, sizeof opened);
    store->opened[0] = 0;
    report(rebuild);
    memcpy(note_out, store->opened, sizeof opened);
    memcpy(store->opened, opened, sizeof opened);
    pthread_mutex_unlock(&store->lock);
}

enum kv_err store_reindex(struct store *store, char note_out[STORE_NOTE_BYTES],
                          struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    char path[32];
    struct rebuild rebuild = {.store = store};
    note_out[0] = 0;
    if (store->options.read_only)
        return kv_diag_set(diag, KV_ERR_INVALID, "the store is open for reading only");
    if (store->batch.open)
        return kv_diag_set(diag, KV_ERR_BUSY, "a batch is open");
    snprintf(path, sizeof path, "/proc/self/fd/%d", store->dir);
    KV_TRY(replay_into_tmp(&rebuild, path, diag));
    KV_TRY(agree(&rebuild, diag));
    KV_TRY(index_sync(rebuild.index, diag));
    err = put_in_place(store, diag);
    if (err == KV_OK) {
        index_replace(store->index, rebuild.index);
        report_apart(&rebuild, note_out);
    } else {
        /* The files of the one in use may be gone: the next opening makes it anew. */
        pthread_mutex_lock(&store->lock);
        store->refuses_writes = 1;
        pthread_mutex_unlock(&store->lock);
    }
done:
    release(&rebuild);
    return err;
}
