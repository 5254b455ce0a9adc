/* snapshot/snap_remove.c - snapshots removed, and everything that dies with them.
 *
 * Responsible for: whole sessions, single tags, lineages that were never saved; in agreement with
 * (1 to 5 stand in store/store.c, 6 to 8, 12 and 13 in snap_commit.c, 9 in snap_lower.c, 10 in
 * snap_retain.c):
 *
 *  11. A lineage lives while a snapshot counts its blocks or another lineage is cut from it, and of
 *      its blocks at least those below every such count and every such cut. So a session outlives
 *      the one it was forked from, and the other way round.
 *
 * Not responsible for: the space they took (store/).
 *
 * Which lineages are cut from which is read from their records each time: removing is rare, and a
 * count that is kept would be one more thing that can be wrong.
 */
#include "snapshot/snap_remove.h"

#include "engine/session.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_path.h"
#include "snapshot/snap_retain.h"
#include "snapshot/snap_tree.h"
#include "snapshot/snapshot.h"
#include "store/base/bytes.h"

#include <string.h>

enum { CHAIN_MAX = 1 << 20 }; /* snapshots of one session; a longer chain is a loop */

struct kin { /* one stored lineage */
    uint64_t id;
    struct record_lineage record;
    int touched, dead;
};
struct page_use {
    uint64_t id;
    uint32_t count;
};

struct removing {
    struct snap_gc gc;
    void *kin, *pages;
    size_t kin_count, kin_capacity, page_count, page_capacity;
    uint64_t snapshot; /* that goes alone; 0: none */
    int is_busy;
    uint64_t bytes; /* stored, that are garbage afterwards */
    struct kv_diag *diag;
};

static struct kin *kin_at(struct removing *removing, size_t index) {
    return (struct kin *)removing->kin + index;
}

static enum kv_err no_memory(struct removing *removing) {
    return kv_diag_set(removing->diag, KV_ERR_NOMEM, "no memory to remove snapshots");
}

static enum kv_err add_kin(struct removing *removing, const struct store_record *stored) {
    struct kin kin = {.id = 0};
    if (stored->key_bytes != 9 ||
        record_get_lineage(stored->value, stored->value_bytes, &kin.record, NULL) != KV_OK)
        return KV_OK;
    kin.id = kv_get_u64_be(stored->key + 1);
    if (!kv_alloc_grow(removing->gc.alloc, &removing->kin, &removing->kin_capacity,
                       removing->kin_count + 1, sizeof kin))
        return no_memory(removing);
    *kin_at(removing, removing->kin_count++) = kin;
    return KV_OK;
}

/* In the order of their ids, which is that of their keys. */
static enum kv_err load_kin(struct removing *removing) {
    struct store_walk walk = {.prefix = "l", .prefix_bytes = 1};
    for (;;) {
        struct store_record stored;
        enum kv_err err = store_next(removing->gc.store, &walk, &stored, removing->diag);
        if (err == KV_ERR_NOT_FOUND)
            return KV_OK;
        if (err == KV_ERR_CORRUPT)
            continue;
        if (err == KV_OK) {
            err = add_kin(removing, &stored);
            store_record_release(removing->gc.store, &stored);
        }
        if (err != KV_OK)
            return err;
    }
}

static struct kin *find_kin(struct removing *removing, uint64_t id) {
    size_t low = 0;
    size_t high = removing->kin_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (kin_at(removing, middle)->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < removing->kin_count && kin_at(removing, low)->id == id ? kin_at(removing, low)
                                                                        : NULL;
}

static enum kv_err add_page(struct removing *removing, uint64_t id) {
    struct page_use *uses = removing->pages;
    if (id == 0)
        return KV_OK;
    for (size_t i = 0; i < removing->page_count; i++)
        if (uses[i].id == id) {
            uses[i].count++;
            return KV_OK;
        }
    if (!kv_alloc_grow(removing->gc.alloc, &removing->pages, &removing->page_capacity,
                       removing->page_count + 1, sizeof *uses))
        return no_memory(removing);
    uses = removing->pages;
    uses[removing->page_count++] = (struct page_use){id, 1};
    return KV_OK;
}

static uint64_t stored_of(const struct store_record *stored) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < stored->extent_count; i++)
        bytes += kv_round_up(stored->extents[i].stored_bytes, STORE_PAGE_BYTES);
    return bytes;
}

static void count_bytes(struct removing *removing, const struct record_key *key) {
    struct store_record stored;
    if (store_get(removing->gc.store, key->bytes, key->size, &stored, NULL) != KV_OK)
        return;
    removing->bytes += stored_of(&stored);
    store_record_release(removing->gc.store, &stored);
}

/* Deletes one snapshot record and notes what it used. */
static enum kv_err drop_snapshot(struct removing *removing, uint64_t snapshot,
                                 const struct record_snapshot *record) {
    struct record_key key = record_key_snapshot(snapshot);
    struct kin *kin = find_kin(removing, record->lineage);
    count_bytes(removing, &key);
    enum kv_err err = store_batch_delete(removing->gc.batch, key.bytes, key.size, removing->diag);
    if (kin != NULL) {
        kin->touched = 1;
        kin->record.snapshot_count -= kin->record.snapshot_count > 0;
    }
    if (err == KV_OK)
        err = add_page(removing, record->sinks_page);
    for (uint32_t i = 0; err == KV_OK && i < record->page_count; i++)
        err = add_page(removing, record->page_ids[i]);
    return err;
}

/* --- what follows */

static enum kv_err settle_page(struct removing *removing, const struct page_use *use) {
    struct record_key key = record_key_page(use->id);
    struct store_record stored;
    struct record_page record;
    struct kv_diag own = {""};
    enum kv_err err = store_get(removing->gc.store, key.bytes, key.size, &stored, &own);
    if (err == KV_OK) {
        err = record_get_page(stored.value, stored.value_bytes, &record, &own);
        store_record_release(removing->gc.store, &stored);
    }
    if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
        return kv_diag_set(removing->diag, err, "%s", own.text);
    /* A page whose record means nothing is of no use to anybody. */
    if (err != KV_OK || record.references <= use->count) {
        count_bytes(removing, &key);
        return store_batch_delete(removing->gc.batch, key.bytes, key.size, removing->diag);
    }
    uint8_t value[RECORD_OUT_BYTES];
    record.references -= use->count;
    uint32_t size = record_put_page(&record, value);
    return store_batch_update(removing->gc.batch, key.bytes, key.size, value, size, removing->diag);
}

/* Blocks of `kin` below the largest living cut. */
static uint32_t cut_from(struct removing *removing, const struct kin *kin) {
    uint32_t most = 0;
#ifdef BREAK_KIN
    return 0;
#endif
    for (size_t i = 0; i < removing->kin_count; i++) {
        const struct kin *other = kin_at(removing, i);
        if (other->record.parent == kin->id && !other->dead && other->record.cut > most)
            most = (uint32_t)other->record.cut;
    }
    return most;
}

/* A lineage that dies may have been the last that is cut from its parent. */
static void spread(struct removing *removing) {
    int more = 1;
    while (more) {
        more = 0;
        for (size_t i = 0; i < removing->kin_count; i++) {
            struct kin *kin = kin_at(removing, i);
            if (!kin->touched || kin->dead || kin->record.snapshot_count != 0 ||
                cut_from(removing, kin) != 0)
                continue;
            kin->dead = 1;
            struct kin *parent = find_kin(removing, kin->record.parent);
            if (parent != NULL)
                parent->touched = 1;
            more = 1;
        }
    }
}

struct counting {
    const struct removing *removing;
    uint64_t lineage;
    uint32_t most;
};

static int count_blocks(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct counting *counting = context;
    if (snapshot != counting->removing->snapshot && record->lineage == counting->lineage &&
        record->block_count > counting->most)
        counting->most = record->block_count;
    return 1;
}

static enum kv_err drop_blocks(struct removing *removing, const struct kin *kin, uint32_t first) {
    struct record_key prefix = record_key_block_prefix(kin->id);
    struct record_key from = record_key_block(kin->id, first);
    struct store_walk walk = {.prefix = prefix.bytes, .prefix_bytes = prefix.size};
    struct store_record stored;
    while (store_next(removing->gc.store, &walk, &stored, NULL) == KV_OK) {
        if (memcmp(stored.key, from.bytes, from.size) >= 0)
            removing->bytes += stored_of(&stored);
        store_record_release(removing->gc.store, &stored);
    }
    return snap_gc_blocks_from(&removing->gc, kin->id, first, removing->diag);
}

/* Blocks of a lineage that stays, beyond every count and cut. One that a session still writes to is
 * left to the next wake: what it has written through is not counted yet. */
static enum kv_err trim_kin(struct removing *removing, const struct kin *kin) {
    struct counting counting = {removing, kin->id, cut_from(removing, kin)};
    struct record_name head;
    struct kv_diag own = {""};
    if (removing->is_busy)
        return KV_OK;
    if (kin->record.snapshot_count != 0) {
        enum kv_err err = snap_gc_name(removing->gc.store, kin->record.name, &head, &own);
        if (err == KV_OK && head.lineage != kin->id)
            err =
                snap_tree_walk(removing->gc.store, kin->record.name, count_blocks, &counting, &own);
        else if (err == KV_OK)
            return KV_OK;
        /* What cannot be followed keeps everything. */
        if (err == KV_ERR_CORRUPT || err == KV_ERR_NOT_FOUND || err == KV_ERR_VERSION)
            return KV_OK;
        if (err != KV_OK)
            return kv_diag_set(removing->diag, err, "%s", own.text);
    }
    return drop_blocks(removing, kin, counting.most);
}

static enum kv_err settle_kin(struct removing *removing, const struct kin *kin) {
    struct record_key key = record_key_lineage(kin->id);
    enum kv_err err = KV_OK;
    if (kin->dead) {
        err = drop_blocks(removing, kin, 0);
        if (err == KV_OK)
            err = store_batch_delete(removing->gc.batch, key.bytes, key.size, removing->diag);
        return err;
    }
    uint8_t value[RECORD_OUT_BYTES];
    uint32_t size = record_put_lineage(&kin->record, value);
    err = store_batch_update(removing->gc.batch, key.bytes, key.size, value, size, removing->diag);
    return err == KV_OK ? trim_kin(removing, kin) : err;
}

static enum kv_err settle(struct removing *removing) {
    enum kv_err err = KV_OK;
    spread(removing);
    for (size_t i = 0; err == KV_OK && i < removing->page_count; i++)
        err = settle_page(removing, (const struct page_use *)removing->pages + i);
    for (size_t i = 0; err == KV_OK && i < removing->kin_count; i++)
        if (kin_at(removing, i)->touched)
            err = settle_kin(removing, kin_at(removing, i));
    return err;
}

static enum kv_err begin_batch(struct removing *removing) {
    enum kv_err err =
        store_batch_begin_removal(removing->gc.store, &removing->gc.batch, removing->diag);
    if (err == KV_OK)
        store_batch_cause(removing->gc.batch, STORE_CAUSE_REMOVAL);
    return err;
}

static enum kv_err begin(struct removing *removing) {
    enum kv_err err = load_kin(removing);
    return err == KV_OK ? begin_batch(removing) : err;
}

static enum kv_err release(struct removing *removing, enum kv_err err) {
    kv_alloc_release(removing->gc.alloc, removing->kin);
    kv_alloc_release(removing->gc.alloc, removing->pages);
    return err;
}

/* The batch is over in every case. */
static enum kv_err end(struct removing *removing, enum kv_err err) {
    if (err == KV_OK)
        err = store_batch_commit(removing->gc.batch, NULL, removing->diag);
    else if (removing->gc.batch != NULL)
        store_batch_abandon(removing->gc.batch);
    return release(removing, err);
}

static enum kv_err finish(struct removing *removing, enum kv_err err) {
    return end(removing, err == KV_OK ? settle(removing) : err);
}

/* --- whole sessions */

/* A snapshot record that cannot be read ends the chain: the rest of the session is removed all the
 * same, and what it used is left to gc. */
static enum kv_err remove_snapshots(struct removing *removing, uint64_t snapshot) {
    for (int i = 0; snapshot != 0 && i < CHAIN_MAX; i++) {
        struct record_snapshot record = {0};
        struct kv_diag own = {""};
        enum kv_err err = snap_gc_snapshot(removing->gc.store, snapshot, &record, &own);
        if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
            return kv_diag_set(removing->diag, err, "%s", own.text);
        if (err != KV_OK)
            memset(&record, 0, sizeof record);
        err = drop_snapshot(removing, snapshot, &record);
        if (err != KV_OK)
            return err;
        snapshot = record.parent;
    }
    return KV_OK;
}

enum kv_err snapshot_remove(struct store *store, const struct kv_alloc *alloc, const char *name,
                            struct kv_diag *diag) {
    struct removing removing = {.gc = {.store = store, .alloc = alloc}, .diag = diag};
    struct record_name head;
    struct record_key key = record_key_name(name);
    enum kv_err err = session_check_name(name, diag);
    if (err == KV_OK)
        err = snap_gc_name(store, name, &head, diag);
    if (err == KV_OK && head.pinned)
        err = kv_diag_set(diag, KV_ERR_BUSY,
                          "session %s is pinned: `coldplane unpin` it before it is removed", name);
    if (err == KV_OK)
        err = begin(&removing);
    if (err == KV_OK)
        err = remove_snapshots(&removing, head.snapshot);
    if (err == KV_OK)
        err = store_batch_delete(removing.gc.batch, key.bytes, key.size, diag);
    if (err == KV_OK)
        err = snap_retain_forget(store, removing.gc.batch, name, diag);
    /* Also when the head's record is lost. */
    struct kin *open = err == KV_OK ? find_kin(&removing, head.lineage) : NULL;
    if (open != NULL) {
        open->touched = 1;
        open->record.snapshot_count = 0;
    }
    return finish(&removing, err);
}

/* --- one tag */

struct linking {
    uint64_t wanted, newer; /* the snapshot whose parent is wanted */
    struct record_snapshot newer_record;
};

static int find_newer(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct linking *linking = context;
    if (record->parent != linking->wanted)
        return 1;
    linking->newer = snapshot;
    linking->newer_record = *record;
    return 0;
}

static enum kv_err update_snapshot(struct removing *removing, uint64_t snapshot,
                                   const struct record_snapshot *record) {
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_snapshot(snapshot);
    uint32_t size = record_put_snapshot(record, value);
    return store_batch_update(removing->gc.batch, key.bytes, key.size, value, size, removing->diag);
}

enum kv_err snap_remove_one(const struct snap_remove_args *args, struct kv_diag *diag) {
    struct removing removing = {.gc = {.store = args->store, .alloc = args->alloc},
                                .snapshot = args->snapshot,
                                .is_busy = args->is_busy,
                                .diag = diag};
    struct linking linking = {.wanted = args->snapshot};
    struct record_snapshot record;
    enum kv_err err = KV_OK;
    KV_TRY(snap_gc_snapshot(args->store, args->snapshot, &record, diag));
    KV_TRY(snap_tree_walk(args->store, args->name, find_newer, &linking, diag));
    if (linking.newer == 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "the newest snapshot of session %s goes only with the session",
                           args->name);
    KV_TRY(begin(&removing));
    linking.newer_record.parent = record.parent;
    KV_TRY(update_snapshot(&removing, linking.newer, &linking.newer_record));
    KV_TRY(drop_snapshot(&removing, args->snapshot, &record));
    KV_TRY(settle(&removing));
    if (args->also != NULL)
        err = args->also(args->context, removing.gc.batch, removing.bytes, diag);
done:
    return end(&removing, err);
}

enum kv_err snap_tree_untag(const struct snap_tree *tree, const struct snap_tree_place *place,
                            struct kv_diag *diag) {
    struct snap_remove_args args = {
        .store = tree->store, .alloc = tree->alloc, .name = place->name};
    struct removing removing = {.gc = {.store = tree->store, .alloc = tree->alloc}, .diag = diag};
    struct record_name head;
    struct record_snapshot record;
    enum kv_err err = snap_tree_find(tree->store, place, &args.snapshot, &record, diag);
    if (err == KV_OK)
        err = snap_gc_name(tree->store, place->name, &head, diag);
    if (err != KV_OK)
        return err;
    if (head.snapshot != args.snapshot)
        return snap_remove_one(&args, diag);
    record.tag[0] = 0;
    record.is_explicit = 0;
    err = begin_batch(&removing);
    if (err == KV_OK)
        err = update_snapshot(&removing, args.snapshot, &record);
    return end(&removing, err);
}

/* --- never saved */

enum kv_err snap_gc_unsaved(struct store *store, const struct kv_alloc *alloc,
                            struct kv_diag *diag) {
    struct removing removing = {.gc = {.store = store, .alloc = alloc}, .diag = diag};
    size_t unused = 0;
    enum kv_err err = load_kin(&removing);
    for (size_t i = 0; i < removing.kin_count; i++) {
        struct kin *kin = kin_at(&removing, i);
        kin->touched = kin->record.snapshot_count == 0 && cut_from(&removing, kin) == 0;
        unused += kin->touched;
    }
    if (err == KV_OK && unused != 0)
        err = begin_batch(&removing);
    err = unused != 0 ? finish(&removing, err) : release(&removing, err);
#ifndef BREAK_FULL_STORE
    /* A full store can still be woken from; what is in the way waits for room. */
    if (err == KV_ERR_NO_SPACE) {
        kv_diag_clear(diag);
        return KV_OK;
    }
#endif
    return err;
}
