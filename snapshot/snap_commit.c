/* snapshot/snap_commit.c - what stands in the batches of blocks and saves.
 *
 * Responsible for: the records and extents of each batch, in agreement with these invariants
 * (1 to 5 stand in store/store.c, 9 in snap_lower.c, 10 in snap_retain.c, 11
 * in snap_remove.c):
 *
 *   6. A snapshot never refers to an extent without a record: its pages and image are put in the
 *      batch that adds it, every block it counts was committed before, and a page or block record
 *      is deleted only in a batch after which no snapshot refers to it.
 *   7. A session's head moves only in the batch that adds its snapshot. That batch, and the first
 *      one after a wake, is built only while the stored head is the one that the session knows.
 *   8. Sealed blocks are recorded under the session's open lineage by the write-through batch
 *      itself and count as live; the first batch after a wake deletes block records of that
 *      lineage beyond every snapshot's count, so that a block never survives from a life of the
 *      session that was not saved. (No fork's cut lies there: it was the count of a head, and
 *      heads of an open lineage only grow.)
 *  12. A lineage is cut where committed blocks end, from the lineage that owns the last of them: a
 *      session that went back is saved under a new lineage, never over the blocks of the old one.
 *  13. A head that is left behind, by going back, gets its tag in the batch that moves the head.
 *
 * Not responsible for: which records die (snap_gc.c), order between batches (snap_spill.c).
 */
#include "snapshot/snap_commit.h"

#include "snapshot/snap_ahead.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_path.h"
#include "snapshot/snap_retain.h"
#include "snapshot/snap_room.h"
#include "snapshot/snap_tree.h"
#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

uint64_t snap_commit_extent_bytes(uint64_t raw_bytes) {
    return kv_round_up(raw_bytes, STORE_PAGE_BYTES);
}

static enum kv_err put_record(struct store_batch *batch, const struct record_key *key,
                              const uint8_t *value, uint32_t size, struct kv_diag *diag) {
    const struct store_put put = {
        .key = key->bytes, .key_bytes = key->size, .value = value, .value_bytes = size};
    return store_batch_put(batch, &put, diag);
}

static enum kv_err trim(const struct snap_gc *gc, const struct snap_line *line,
                        struct kv_diag *diag) {
    const struct snap_gc_trim_args args = {line->name, line->lineage, line->head};
    return snap_gc_trim(gc, &args, diag);
}

static struct record_lineage new_lineage(const struct snap_line *line) {
    struct record_lineage record = {.parent = line->parent, .cut = line->cut};
    memcpy(record.name, line->name, sizeof record.name);
    return record;
}

static enum kv_err put_lineage(struct store_batch *batch, uint64_t lineage,
                               const struct record_lineage *record, struct kv_diag *diag) {
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_lineage(lineage);
    return put_record(batch, &key, value, record_put_lineage(record, value), diag);
}

enum kv_err snap_commit_branch(struct snapshot *snapshot, const struct transfer_durable *durable,
                               const char *name, const char *source, struct kv_diag *diag) {
    struct record_lineage record = {.parent = durable->parent, .cut = durable->cut};
    const struct snap_retain_leave leave = snapshot_leave(snapshot);
    const struct snap_retain_writer writer = {snapshot->store, snapshot->alloc, snapshot->clock,
                                              &leave,          source,          "the branch"};
    struct store_batch *batch = NULL;
    if (durable->cut == 0)
        return KV_OK;
    memcpy(record.name, name, strnlen(name, IMAGE_NAME_BYTES_MAX));
    enum kv_err err = snap_retain_begin(&writer, 2 * SNAP_COMMIT_RECORD_BYTES, &batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(batch, STORE_CAUSE_SAVE);
#ifndef BREAK_BRANCH_RECORD
    err = put_lineage(batch, durable->lineage, &record, diag);
#endif
    if (err == KV_OK)
        return store_batch_commit(batch, NULL, diag);
    store_batch_abandon(batch);
    return err;
}

/* --- blocks */

/* What comes before the first block of a line. */
static enum kv_err begin_line(const struct snap_gc *gc, struct snap_line *line,
                              struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    if (line->pending != 0)
        return KV_OK;
    if (line->trim)
        err = trim(gc, line, diag);
    if (err == KV_OK && !line->recorded) {
        const struct record_lineage record = new_lineage(line);
        err = put_lineage(gc->batch, line->lineage, &record, diag);
    }
    return err;
}

static enum kv_err put_parts(const struct snap_gc *gc, struct snap_item *item,
                             const struct snap_parts *parts, const struct store_packed *packed,
                             struct kv_diag *diag) {
    struct snap_line *line = item->line;
    const struct record_block record = {
        .code_id = record_code_of(parts->streams),
        .layout_id = RECORD_LAYOUT_ID,
        .keeps_k = line->keeps_k,
        .first_position = LAYOUT_SINK_TOKENS + (uint64_t)item->index * LAYOUT_BLOCK_TOKENS};
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_block(line->lineage, item->index);
    const struct store_put put = {.key = key.bytes,
                                  .key_bytes = key.size,
                                  .value = value,
                                  .value_bytes = record_put_block(&record, value),
                                  .parts = parts->parts,
                                  .part_count = parts->count};
    return store_batch_put_packed(gc->batch, &put, packed, diag);
}

static void count_help(struct snap_account *account, const struct snap_ready *ready) {
    account->helped_ns += ready->zip_ns;
    if (ready->zip_most_ns > account->helped_most_ns)
        account->helped_most_ns = ready->zip_most_ns;
}

/* One extent is one helper's, however many there are. */
static uint64_t zip_ns(const struct snapshot *snapshot, const struct snap_account *account) {
    uint32_t helpers = snap_ahead_helpers(snapshot->ahead);
    uint64_t share_ns = helpers ? account->helped_ns / helpers : 0;
#ifdef BREAK_HELP_SHARED
    return account->zip_ns + share_ns;
#endif
    return account->zip_ns +
           (share_ns > account->helped_most_ns ? share_ns : account->helped_most_ns);
}

static enum kv_err put_block(struct snapshot *snapshot, const struct snap_gc *gc,
                             struct snap_item *item, struct kv_diag *diag) {
    struct snap_account *account = &item->line->account;
    struct snap_parts own;
    struct snap_ready *ready = snap_ahead_take(snapshot->ahead, &item->jobs[0]);
    enum kv_err err = begin_line(gc, item->line, diag);
    if (err != KV_OK)
        return err;
    if (ready != NULL) {
        account->copy_ns += ready->parts.copy_ns;
        count_help(account, ready);
        err = put_parts(gc, item, &ready->parts, ready->packed, diag);
        snap_ahead_end(snapshot->ahead, item);
        return err;
    }
    err = snap_parts_take(snapshot, item, &own, diag);
    if (err != KV_OK)
        return err;
    account->copy_ns += own.copy_ns;
    err = put_parts(gc, item, &own, NULL, diag);
    snap_parts_drop(snapshot, &own);
    return err;
}

/* Blocks that follow what is committed go into the batch; the others fail: block records are
 * written in index order. Returns how many go, and their worst case. */
static uint32_t choose(struct snap_item **items, uint32_t count, uint64_t *worst_out) {
    uint32_t chosen = 0;
    *worst_out = 0;
    for (uint32_t i = 0; i < count; i++)
        items[i]->line->pending = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct snap_line *line = items[i]->line;
        if (items[i]->index != line->block_count + line->pending) {
            items[i]->err = KV_ERR_BUSY;
            continue;
        }
        items[i]->err = KV_OK;
        line->pending++;
        chosen++;
        *worst_out += 2 * SNAP_COMMIT_RECORD_BYTES + snap_commit_extent_bytes(RECORD_IDS_BYTES);
        for (uint32_t k = 0; k < items[i]->part_count; k++)
            *worst_out += snap_commit_extent_bytes(items[i]->parts[k].size);
    }
    for (uint32_t i = 0; i < count; i++)
        items[i]->line->pending = 0;
    return chosen;
}

/* Adds the digests that the index now holds to the line's chain. */
static enum kv_err follow_chain(struct snapshot *snapshot, struct snap_item *item,
                                struct kv_diag *diag) {
    struct snap_line *line = item->line;
    struct record_key key = record_key_block(line->lineage, item->index);
    struct store_record record;
    uint8_t kinds[RECORD_BLOCK_EXTENTS_MAX];
    struct kv_digest digests[RECORD_BLOCK_EXTENTS_MAX];
    enum kv_err err = store_get(snapshot->store, key.bytes, key.size, &record, diag);
    if (err != KV_OK)
        return err;
    for (uint32_t i = 0; i < record.extent_count && i < RECORD_BLOCK_EXTENTS_MAX; i++) {
        const struct store_extent *extent = &record.extents[i];
        kinds[i] = extent->kind;
        digests[i] = extent->digest;
        line->account.door_bytes += snap_commit_extent_bytes(extent->stored_bytes);
        if (extent->kind >= LAYOUT_STREAM_COUNT)
            continue;
        line->account.raw_bytes[extent->kind] += extent->raw_bytes;
        line->account.stored_bytes[extent->kind] += extent->stored_bytes;
    }
    line->chain = record_chain(&line->chain, line->lineage, item->index, kinds, digests,
                               1 + item->part_count);
    line->block_count = item->index + 1;
    line->account.blocks++;
    item->chain = line->chain;
    store_record_release(snapshot->store, &record);
    return KV_OK;
}

static enum kv_err commit_chosen(struct snapshot *snapshot, struct snap_item **items,
                                 uint32_t count, uint64_t worst_bytes, struct kv_diag *diag) {
    struct snap_gc gc = {.store = snapshot->store, .alloc = snapshot->alloc};
    struct store_commit_stats stats = {0};
    struct snap_line *payer = NULL; /* the batch record is put to one line's account */
    enum kv_err err = store_batch_begin(snapshot->store, worst_bytes, &gc.batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(gc.batch, STORE_CAUSE_BLOCKS);
    for (uint32_t i = 0; i < count && err == KV_OK; i++) {
        if (items[i]->err != KV_OK)
            continue;
        err = put_block(snapshot, &gc, items[i], diag);
        items[i]->line->pending++;
        payer = items[i]->line;
    }
    if (err != KV_OK) {
        store_batch_abandon(gc.batch);
        return err;
    }
    err = store_batch_commit(gc.batch, &stats, diag);
    if (err != KV_OK)
        return err;
    payer->account.record_bytes += stats.record_bytes;
    payer->account.door_bytes += stats.record_bytes;
    payer->account.zip_ns += stats.pack_ns;
    payer->account.write_ns += stats.write_ns;
    payer->account.sync_ns += stats.sync_ns + stats.index_ns;
    if (stats.in_flight_max > payer->account.in_flight_most)
        payer->account.in_flight_most = (uint32_t)stats.in_flight_max;
    for (uint32_t i = 0; i < count; i++) {
        if (items[i]->err != KV_OK)
            continue;
        items[i]->line->trim = 0;
        items[i]->line->recorded = 1;
        items[i]->line->trouble.text[0] = 0;
        if (err == KV_OK)
            err = follow_chain(snapshot, items[i], diag);
        if (err != KV_OK)
            items[i]->err = err;
    }
    return err;
}

/* Commits what can be of these blocks, in one batch; the others get their error. */
static void commit_blocks(struct snapshot *snapshot, struct snap_item **items, uint32_t count) {
    uint64_t worst_bytes;
    struct kv_diag diag = {""};
    if (choose(items, count, &worst_bytes) == 0)
        return;
    enum kv_err err = commit_chosen(snapshot, items, count, worst_bytes, &diag);
    if (err == KV_ERR_NO_SPACE && snap_room_make(snapshot->store)) {
        (void)choose(items, count, &worst_bytes);
        err = commit_chosen(snapshot, items, count, worst_bytes, &diag);
    }
    if (err == KV_OK)
        return;
    for (uint32_t i = 0; i < count; i++) {
        struct snap_line *line = items[i]->line;
        /* Blocks that follow_chain has counted are durable, whatever failed behind them. */
        if (items[i]->err == KV_ERR_BUSY || items[i]->index < line->block_count)
            continue;
        items[i]->err = err;
        if (items[i]->index != line->block_count)
            continue;
        line->trouble = diag;
        line->trouble_err = err;
        kv_diag_prefix(&line->trouble, "session %s, block %u could not be written", line->name,
                       items[i]->index);
    }
}

static int any_failed(struct snap_item **items, uint32_t count) {
    int failed = 0;
    for (uint32_t i = 0; i < count; i++)
        failed |= items[i]->err != KV_OK && items[i]->err != KV_ERR_BUSY;
    return failed;
}

/* A line that cannot be written must not hold up the others: when nothing was committed, each gets
 * a batch of its own. */
void snap_commit_blocks(struct snapshot *snapshot, struct snap_item **items, uint32_t count) {
    struct snap_item *own[SNAP_BATCH_BLOCKS_MAX];
    uint64_t sequence = store_sequence(snapshot->store);
    uint32_t others = 0; /* blocks of other lines than the first */
    assert(count <= SNAP_BATCH_BLOCKS_MAX);
    for (uint32_t i = 0; i < count; i++)
        others += items[i]->line != items[0]->line;
    commit_blocks(snapshot, items, count);
    if (others == 0 || !any_failed(items, count) || store_sequence(snapshot->store) != sequence)
        return;
#ifdef BREAK_ONE_FOR_ALL
    return;
#endif
    for (uint32_t i = 0; i < count; i++) {
        uint32_t own_count = 0, first = 0;
        while (items[first]->line != items[i]->line)
            first++;
        for (uint32_t k = i; first == i && k < count; k++)
            if (items[k]->line == items[i]->line)
                own[own_count++] = items[k];
        if (own_count != 0)
            commit_blocks(snapshot, own, own_count);
    }
}

/* --- saves */

/* Everything that one save works with; lives on the spill thread's stack. */
struct save {
    struct snapshot *snapshot;
    struct snap_item *item;
    struct snapshot_ticket *ticket;
    struct snap_line *line;
    struct snap_gc gc;
    uint64_t id;
    uint64_t parent; /* the newest older snapshot that stays */
    int replaces;    /* the head before goes in this batch */
    int keeps;       /* the head before gets a tag in this batch */
    int pinned;
    uint8_t owner[IMAGE_OWNER_BYTES];
    struct record_snapshot kept; /* with its tag */
    uint8_t *image_bytes;
    size_t image_size;
    uint64_t reused_tokens;
    struct record_lineage lineage;            /* as stored */
    struct snap_ready *ready[SNAP_SAVE_JOBS]; /* by page, NULL: not made ready ahead */
    struct kv_diag *diag;
};

static enum kv_err check_line(const struct save *save) {
    const struct image *image = &save->ticket->frozen.image;
#ifdef BREAK_LOST_BLOCK
    return KV_OK;
#endif
    if (save->line->block_count == image->block_count)
        return KV_OK;
    if (save->line->trouble.text[0] != 0)
        return kv_diag_set(save->diag, save->line->trouble_err, "%s", save->line->trouble.text);
    return kv_diag_set(save->diag, KV_ERR_IO, "session %s: %u of %u blocks are durable: save again",
                       image->name, save->line->block_count, image->block_count);
}

/* Until its first save a branch has nothing but its lineage to hold what it shares: where the
 * session that it came from was removed and gc has run, there is nothing to be saved on. */
static enum kv_err check_shared(const struct save *save) {
    const struct snap_line *line = save->line;
    struct record_key key = record_key_block(line->parent, (uint32_t)line->cut - 1);
    int exists = 0;
    if (save->ticket->before.snapshot != 0 || line->cut == 0)
        return KV_OK;
    enum kv_err err = store_exists(save->snapshot->store, key.bytes, key.size, &exists, save->diag);
    if (err == KV_OK && !exists)
        err = kv_diag_set(save->diag, KV_ERR_NOT_FOUND,
                          "session %s shares blocks of one that was removed before this was saved",
                          line->name);
    return err;
}

/* Invariant 7. */
static enum kv_err check_head(struct save *save) {
    const struct transfer_durable *before = &save->ticket->before;
    struct record_name head = {0};
    enum kv_err err = snap_gc_name(save->snapshot->store, save->line->name, &head, save->diag);
    if (err != KV_OK && err != KV_ERR_NOT_FOUND)
        return err;
    save->pinned = head.pinned;
#ifdef BREAK_OWNER_SAVE
    memcpy(save->owner, before->snapshot == 0 ? before->owner : save->owner, sizeof save->owner);
#else
    memcpy(save->owner, before->snapshot != 0 ? head.owner : before->owner, sizeof save->owner);
#endif
#ifdef BREAK_HEAD
    return KV_OK;
#endif
    if (head.snapshot == before->snapshot)
        return KV_OK;
    if (before->snapshot == 0)
        return kv_diag_set(save->diag, KV_ERR_EXISTS,
                           "a stored session has the name %s: wake it, or remove it first",
                           save->line->name);
    if (head.snapshot == 0)
        return kv_diag_set(save->diag, KV_ERR_NOT_FOUND,
                           "session %s was removed from the store while it was resident",
                           save->line->name);
    return kv_diag_set(save->diag, KV_ERR_BUSY,
                       "session %s was saved by somebody else since it was woken: wake it again",
                       save->line->name);
}

/* Invariant 13: the head that is left behind, as it stands from this batch on. */
static enum kv_err keep_head(struct save *save, const struct record_snapshot *head) {
    save->kept = *head;
    save->kept.is_explicit = 1;
    save->keeps = 1;
    if (head->tag[0] != 0)
        return KV_OK;
    return snap_tree_kept_tag(save->snapshot->store, save->line->name, save->kept.tag, save->diag);
}

static enum kv_err read_lineage(struct save *save) {
    const struct transfer_durable *before = &save->ticket->before;
    struct record_snapshot head;
    enum kv_err err = KV_OK;
    save->lineage = new_lineage(save->line);
    if (before->snapshot != 0) {
        err = snap_gc_snapshot(save->snapshot->store, before->snapshot, &head, save->diag);
        if (err != KV_OK)
            return err;
        save->replaces = !before->head_explicit && !before->head_kept;
        save->parent = save->replaces ? head.parent : before->snapshot;
    }
#ifndef BREAK_KEEP_HEAD
    if (before->head_kept)
        err = keep_head(save, &head);
#endif
    if (err == KV_OK && save->line->recorded)
        err = snap_path_get(save->snapshot->store, save->line->lineage, &save->lineage, save->diag);
    return err;
}

/* By its number among the jobs of a save. */
static struct image_page *image_page_at(struct save *save, uint32_t page) {
    struct image *image = &save->ticket->frozen.image;
    return page == 0 ? &image->sinks : &image->pages[page - 1];
}

static const struct transfer_frozen_page *frozen_page_at(const struct save *save, uint32_t page) {
    const struct transfer_frozen *frozen = &save->ticket->frozen;
    return page == 0 ? &frozen->sinks : &frozen->pages[page - 1];
}

static enum kv_err name_page(struct save *save, uint32_t number) {
    const struct transfer_frozen_page *frozen = frozen_page_at(save, number);
    struct image_page *page = image_page_at(save, number);
    page->first = frozen->first;
    page->tokens = frozen->tokens;
    if (frozen->bytes == NULL) {
        const struct image_page *stored =
            snap_line_page(&save->ticket->before, page->first, page->tokens);
        assert(stored != NULL);
        *page = *stored;
        save->reused_tokens += page->tokens;
        return KV_OK;
    }
    struct snap_ready *ready = snap_ahead_take(save->snapshot->ahead, &save->item->jobs[number]);
    save->ready[number] = ready;
    page->digest =
        ready != NULL ? ready->packed[0].digest : kv_digest_of(frozen->bytes, frozen->size);
    return snap_line_fresh_id(save->snapshot->store, record_key_page, &page->page_id, save->diag);
}

static enum kv_err make_image(struct save *save) {
    struct transfer_frozen *frozen = &save->ticket->frozen;
    struct image *image = &frozen->image;
    enum kv_err err = KV_OK;
    image->lineage = save->line->lineage;
    image->block_chain = save->line->chain;
    image->parent = save->ticket->before.root;
    image->page_count = frozen->page_count;
    for (uint32_t i = 0; i <= frozen->page_count; i++)
        KV_TRY(name_page(save, i));
    KV_TRY(snap_line_fresh_id(save->snapshot->store, record_key_snapshot, &save->id, save->diag));
    KV_TRY(image_encode(image, save->snapshot->alloc, &save->image_bytes, &save->image_size,
                        save->diag));
done:
    return err;
}

static uint64_t worst_bytes(const struct save *save) {
    const struct transfer_frozen *frozen = &save->ticket->frozen;
    uint64_t records = 8 + 2 * (IMAGE_PAGES_MAX + 1);
    uint64_t bytes = snap_commit_extent_bytes(save->image_size);
    if (frozen->sinks.bytes != NULL)
        bytes += snap_commit_extent_bytes(frozen->sinks.size);
    for (uint32_t i = 0; i < frozen->page_count; i++)
        if (frozen->pages[i].bytes != NULL)
            bytes += snap_commit_extent_bytes(frozen->pages[i].size);
    return bytes + records * SNAP_COMMIT_RECORD_BYTES;
}

static enum kv_err put_page(struct save *save, uint32_t number) {
    const struct transfer_frozen *frozen = &save->ticket->frozen;
    const struct image_page *page = image_page_at(save, number);
    struct snap_ready *ready = save->ready[number];
    if (!snap_parts_has_page(frozen, number))
        return save->replaces ? KV_OK : snap_gc_page_uses(&save->gc, page->page_id, 1, save->diag);
    struct snap_parts parts;
    snap_parts_page(frozen, number, &parts);
    if (ready != NULL)
        count_help(&save->line->account, ready);
    const struct record_page record = {save->line->lineage, page->first, page->tokens, 1};
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_page(page->page_id);
    const struct store_put put = {.key = key.bytes,
                                  .key_bytes = key.size,
                                  .value = value,
                                  .value_bytes = record_put_page(&record, value),
                                  .parts = parts.parts,
                                  .part_count = parts.count};
    save->ticket->receipt.pages++;
    return store_batch_put_packed(save->gc.batch, &put, ready != NULL ? ready->packed : NULL,
                                  save->diag);
}

static int image_has_page(const struct image *image, uint64_t page_id) {
    int has = image->sinks.page_id == page_id;
    for (uint32_t i = 0; i < image->page_count && !has; i++)
        has = image->pages[i].page_id == page_id;
    return has;
}

/* The head that this batch replaces, and its uses of pages that the new one does not have. */
static enum kv_err drop_head(struct save *save) {
    const struct transfer_durable *before = &save->ticket->before;
    const struct image *image = &save->ticket->frozen.image;
    struct record_key key = record_key_snapshot(before->snapshot);
    enum kv_err err = store_batch_delete(save->gc.batch, key.bytes, key.size, save->diag);
    if (err == KV_OK && before->sinks.page_id != 0 && !image_has_page(image, before->sinks.page_id))
        err = snap_gc_page_uses(&save->gc, before->sinks.page_id, -1, save->diag);
    for (uint32_t i = 0; err == KV_OK && i < before->page_count; i++)
        if (!image_has_page(image, before->pages[i].page_id))
            err = snap_gc_page_uses(&save->gc, before->pages[i].page_id, -1, save->diag);
    return err;
}

static enum kv_err put_snapshot(struct save *save, const struct kv_digest *root) {
    const struct image *image = &save->ticket->frozen.image;
    struct record_snapshot record = {.lineage = image->lineage,
                                     .parent = save->parent,
                                     .block_count = image->block_count,
                                     .is_explicit = save->ticket->options.is_explicit,
                                     .asleep = save->ticket->options.asleep,
                                     .n = image->n,
                                     .n_kv = image->n_kv,
                                     .created_ns = image->created_ns,
                                     .root = *root,
                                     .sinks_page = image->sinks.page_id,
                                     .page_count = image->page_count};
    memcpy(record.name, image->name, sizeof record.name);
    memcpy(record.tag, save->ticket->tag, sizeof record.tag);
    for (uint32_t i = 0; i < image->page_count; i++)
        record.page_ids[i] = image->pages[i].page_id;
    const struct iovec piece = {save->image_bytes, save->image_size};
    const struct store_part part = {RECORD_KIND_IMAGE, STORE_ZSTD, &piece, 1, 0};
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_snapshot(save->id);
    const struct store_put put = {.key = key.bytes,
                                  .key_bytes = key.size,
                                  .value = value,
                                  .value_bytes = record_put_snapshot(&record, value),
                                  .parts = &part,
                                  .part_count = 1};
    enum kv_err err = store_batch_put(save->gc.batch, &put, save->diag);
    if (err != KV_OK)
        return err;
    struct record_name head = {.snapshot = save->id,
                               .lineage = image->lineage,
                               .updated_ns = image->created_ns,
                               .pinned = save->pinned};
    memcpy(head.owner, save->owner, sizeof head.owner);
    key = record_key_name(image->name);
    uint32_t size = record_put_name(&head, value);
    err = put_record(save->gc.batch, &key, value, size, save->diag);
    if (err != KV_OK)
        return err;
    struct record_lineage lineage = save->lineage;
    lineage.snapshot_count += !save->replaces;
#ifdef BREAK_COUNT
    lineage.snapshot_count++;
#endif
    return put_lineage(save->gc.batch, image->lineage, &lineage, save->diag);
}

static enum kv_err put_kept(struct save *save) {
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_snapshot(save->ticket->before.snapshot);
    uint32_t size = record_put_snapshot(&save->kept, value);
    return store_batch_update(save->gc.batch, key.bytes, key.size, value, size, save->diag);
}

static enum kv_err fill_batch(struct save *save, const struct kv_digest *root) {
    const struct transfer_frozen *frozen = &save->ticket->frozen;
    enum kv_err err = KV_OK;
    if (save->line->trim)
        KV_TRY(trim(&save->gc, save->line, save->diag));
    for (uint32_t i = 0; i <= frozen->page_count; i++)
        KV_TRY(put_page(save, i));
    if (save->replaces)
        KV_TRY(drop_head(save));
    if (save->keeps)
        KV_TRY(put_kept(save));
    KV_TRY(put_snapshot(save, root));
done:
    return err;
}

static void account_save(struct save *save, const struct store_commit_stats *stats) {
    struct receipt *receipt = &save->ticket->receipt;
    const struct snap_account *account = &save->line->account;
    receipt->blocks = account->blocks;
    receipt->record_bytes = account->record_bytes + stats->record_bytes;
    receipt->door_bytes = account->door_bytes + stats->written_bytes;
    receipt->stage_ns[RECEIPT_COPY] = account->copy_ns;
    receipt->stage_ns[RECEIPT_ZIP] = zip_ns(save->snapshot, account) + stats->pack_ns;
    receipt->stage_ns[RECEIPT_WRITE] = account->write_ns + stats->write_ns;
    receipt->stage_ns[RECEIPT_SYNC] = account->sync_ns + stats->sync_ns + stats->index_ns;
    receipt->in_flight_most = account->in_flight_most > stats->in_flight_max
                                  ? account->in_flight_most
                                  : (uint32_t)stats->in_flight_max;
    for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++) {
        receipt->raw_bytes[s] = account->raw_bytes[s] + stats->raw_by_kind[s];
        receipt->stored_bytes[s] = account->stored_bytes[s] + stats->stored_by_kind[s];
    }
    receipt->image_bytes = stats->stored_by_kind[RECORD_KIND_IMAGE];
    receipt->direct = stats->direct;
    size_t length = strnlen(stats->door_name, sizeof receipt->door - 1);
    memcpy(receipt->door, stats->door_name, length);
    receipt->door[length] = 0;
    memset(&save->line->account, 0, sizeof save->line->account);
}

static void finish_save(struct save *save, const struct kv_digest *root) {
    struct snapshot_ticket *ticket = save->ticket;
    const struct image *image = &ticket->frozen.image;
    struct transfer_durable *after = &ticket->after;
    *after = ticket->before;
    after->lineage = image->lineage;
    after->snapshot = save->id;
    after->n_kv = image->n_kv;
    after->head_explicit = ticket->options.is_explicit;
    after->head_kept = 0;
    after->trim_pending = 0;
    after->root = *root;
    after->sinks = image->sinks;
    after->page_count = image->page_count;
    memcpy(after->pages, image->pages, sizeof after->pages);
    save->line->trim = 0;
    save->line->recorded = 1;
    ticket->receipt.snapshot = save->id;
    ticket->receipt.parent = ticket->before.snapshot;
    ticket->receipt.lineage = image->lineage;
    ticket->receipt.root = *root;
    ticket->receipt.tokens_reused += save->reused_tokens;
}

static enum kv_err run_save(struct save *save) {
    struct store_commit_stats stats = {0};
    enum kv_err err = KV_OK;
    KV_TRY(check_line(save));
    KV_TRY(check_shared(save));
    KV_TRY(check_head(save));
    KV_TRY(read_lineage(save));
    KV_TRY(make_image(save));
    struct kv_digest root = image_root(save->image_bytes, save->image_size);
    KV_TRY(
        store_batch_begin(save->snapshot->store, worst_bytes(save), &save->gc.batch, save->diag));
    store_batch_cause(save->gc.batch, STORE_CAUSE_SAVE);
    err = fill_batch(save, &root);
    if (err != KV_OK) {
        store_batch_abandon(save->gc.batch);
        return err;
    }
    KV_TRY(store_batch_commit(save->gc.batch, &stats, save->diag));
    account_save(save, &stats);
    finish_save(save, &root);
done:
    return err;
}

/* One whole try. */
static enum kv_err try_save(struct snapshot *snapshot, struct snap_item *item) {
    struct save save = {.snapshot = snapshot,
                        .item = item,
                        .ticket = item->ticket,
                        .line = item->line,
                        .gc = {.store = snapshot->store, .alloc = snapshot->alloc},
                        .diag = &item->ticket->diag};
    item->ticket->receipt.pages = 0;
    enum kv_err err = run_save(&save);
    kv_alloc_release(snapshot->alloc, save.image_bytes);
    return err;
}

void snap_commit_save(struct snapshot *snapshot, struct snap_item *item) {
    item->ticket->err = try_save(snapshot, item);
    if (item->ticket->err == KV_ERR_NO_SPACE && snap_room_make(snapshot->store)) {
        kv_diag_clear(&item->ticket->diag);
        item->ticket->err = try_save(snapshot, item);
    }
    if (item->ticket->err != KV_OK && item->ticket->diag.text[0] != 0)
        kv_diag_prefix(&item->ticket->diag, "session %s was not saved", item->line->name);
    item->err = item->ticket->err;
}
