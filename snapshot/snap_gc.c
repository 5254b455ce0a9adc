/* snapshot/snap_gc.c - which records die, and the removal of a session.
 *
 * Responsible for: block records beyond every snapshot, pages that no snapshot uses, unsaved
 * lineages, all records of a removed session.
 * Not responsible for: when (snap_commit.c), or the space they took (store/).
 */
#include "snapshot/snap_gc.h"

#include "snapshot/snap_retain.h"
#include "snapshot/snapshot.h"

#include <string.h>

enum { CHAIN_MAX = 1 << 20 }; /* snapshots of one session; a longer chain is a loop */

enum kv_err snap_gc_snapshot(struct store *store, uint64_t snapshot,
                             struct record_snapshot *record_out, struct kv_diag *diag) {
    struct record_key key = record_key_snapshot(snapshot);
    struct store_record record;
    enum kv_err err = store_get(store, key.bytes, key.size, &record, diag);
    if (err != KV_OK) {
        kv_diag_prefix(diag, "snapshot %016llx", (unsigned long long)snapshot);
        return err;
    }
    err = record_get_snapshot(record.value, record.value_bytes, record_out, diag);
    store_record_release(store, &record);
    return err;
}

enum kv_err snap_gc_name(struct store *store, const char *name, struct record_name *record_out,
                         struct kv_diag *diag) {
    struct record_key key = record_key_name(name);
    struct store_record record;
    enum kv_err err = store_get(store, key.bytes, key.size, &record, diag);
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, err, "there is no stored session %s", name);
    if (err != KV_OK)
        return err;
    err = record_get_name(record.value, record.value_bytes, record_out, diag);
    store_record_release(store, &record);
    return err;
}

enum kv_err snap_gc_blocks_from(const struct snap_gc *gc, uint64_t lineage, uint32_t first,
                                struct kv_diag *diag) {
    struct record_key prefix = record_key_block_prefix(lineage);
    struct store_walk walk = {.prefix = prefix.bytes, .prefix_bytes = prefix.size};
    if (first > 0) {
        struct record_key before = record_key_block(lineage, first - 1);
        memcpy(walk.after, before.bytes, before.size);
        walk.after_bytes = before.size;
    }
    for (;;) {
        struct store_record record;
        enum kv_err err = store_next(gc->store, &walk, &record, diag);
        if (err == KV_ERR_NOT_FOUND)
            return KV_OK;
        if (err == KV_ERR_CORRUPT) {
            /* The walk stands behind it; what it was is not needed to delete it. */
            err = store_batch_delete(gc->batch, walk.after, walk.after_bytes, diag);
        } else if (err == KV_OK) {
            err = store_batch_delete(gc->batch, record.key, record.key_bytes, diag);
            store_record_release(gc->store, &record);
        }
        if (err != KV_OK)
            return err;
    }
}

enum kv_err snap_gc_trim(const struct snap_gc *gc, const struct snap_gc_trim_args *args,
                         struct kv_diag *diag) {
    struct record_name head;
    enum kv_err err = snap_gc_name(gc->store, args->name, &head, diag);
    if (err != KV_OK)
        return err;
#ifndef BREAK_PAST
    if (head.snapshot != args->head)
        return kv_diag_set(
            diag, KV_ERR_BUSY,
            "session %s was saved by somebody else since it was woken: wake it again", args->name);
#endif
    uint32_t keep = 0;
    uint64_t snapshot = head.snapshot;
    for (int i = 0; snapshot != 0 && i < CHAIN_MAX; i++) {
        struct record_snapshot record;
        err = snap_gc_snapshot(gc->store, snapshot, &record, diag);
        if (err != KV_OK)
            return err;
        if (record.lineage == args->lineage && record.block_count > keep)
            keep = record.block_count;
        snapshot = record.parent;
    }
#ifdef BREAK_TRIM
    return KV_OK;
#endif
    return snap_gc_blocks_from(gc, args->lineage, keep, diag);
}

enum kv_err snap_gc_page_uses(const struct snap_gc *gc, uint64_t page, int change,
                              struct kv_diag *diag) {
    struct record_key key = record_key_page(page);
    struct store_record stored;
    struct record_page record;
    enum kv_err err = store_get(gc->store, key.bytes, key.size, &stored, diag);
    if (err == KV_OK) {
        err = record_get_page(stored.value, stored.value_bytes, &record, diag);
        store_record_release(gc->store, &stored);
    }
    if (err != KV_OK) {
        kv_diag_prefix(diag, "page %016llx", (unsigned long long)page);
        return err;
    }
    if (change < 0 && record.references <= 1)
        return store_batch_delete(gc->batch, key.bytes, key.size, diag);
#ifndef BREAK_PAGE_USES
    record.references = change < 0 ? record.references - 1 : record.references + 1;
#endif
    uint8_t value[RECORD_OUT_BYTES];
    uint32_t size = record_put_page(&record, value);
    return store_batch_update(gc->batch, key.bytes, key.size, value, size, diag);
}

enum kv_err snap_gc_drop_lineage(struct snap_gc *gc, uint64_t lineage, struct kv_diag *diag) {
    enum kv_err err = store_batch_begin_removal(gc->store, &gc->batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(gc->batch, STORE_CAUSE_REMOVAL);
    struct record_key key = record_key_lineage(lineage);
    err = snap_gc_blocks_from(gc, lineage, 0, diag);
    if (err == KV_OK)
        err = store_batch_delete(gc->batch, key.bytes, key.size, diag);
    if (err != KV_OK) {
        store_batch_abandon(gc->batch);
        return err;
    }
    return store_batch_commit(gc->batch, NULL, diag);
}

enum kv_err snap_gc_unsaved(struct store *store, const struct kv_alloc *alloc,
                            struct kv_diag *diag) {
    struct snap_gc gc = {.store = store, .alloc = alloc};
    struct store_walk walk = {.prefix = "l", .prefix_bytes = 1};
    for (;;) {
        struct store_record stored;
        struct record_lineage record;
        enum kv_err err = store_next(store, &walk, &stored, diag);
        if (err == KV_ERR_NOT_FOUND)
            return KV_OK;
        if (err == KV_ERR_CORRUPT)
            continue;
        if (err != KV_OK)
            return err;
        uint64_t lineage = 0;
        if (stored.key_bytes == 9)
            for (int i = 1; i < 9; i++)
                lineage = lineage << 8 | stored.key[i];
        err = record_get_lineage(stored.value, stored.value_bytes, &record, NULL);
        store_record_release(store, &stored);
        if (err != KV_OK || lineage == 0 || record.snapshot_count != 0)
            continue;
        err = snap_gc_drop_lineage(&gc, lineage, diag);
#ifndef BREAK_FULL_STORE
        /* A full store can still be woken from; what is in the way waits for room. */
        if (err == KV_ERR_NO_SPACE)
            return KV_OK;
#endif
        if (err != KV_OK)
            return err;
    }
}

/* All snapshots of a session die together and nothing else shares their pages, so pages are
 * deleted without counting. A snapshot record that cannot be read ends the chain: the rest of the
 * session is removed all the same. */
static enum kv_err remove_snapshots(const struct snap_gc *gc, uint64_t snapshot,
                                    struct kv_diag *diag) {
    for (int i = 0; snapshot != 0 && i < CHAIN_MAX; i++) {
        struct record_snapshot record = {0};
        struct record_key key = record_key_snapshot(snapshot);
        enum kv_err err = snap_gc_snapshot(gc->store, snapshot, &record, diag);
        if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
            return err;
        if (err != KV_OK)
            memset(&record, 0, sizeof record);
        err = store_batch_delete(gc->batch, key.bytes, key.size, diag);
        for (uint32_t k = 0; err == KV_OK && k <= record.page_count; k++) {
            uint64_t page = k < record.page_count ? record.page_ids[k] : record.sinks_page;
            struct record_key page_key = record_key_page(page);
            if (page != 0)
                err = store_batch_delete(gc->batch, page_key.bytes, page_key.size, diag);
        }
        if (err == KV_OK && record.lineage != 0) {
            struct record_key lineage = record_key_lineage(record.lineage);
            err = store_batch_delete(gc->batch, lineage.bytes, lineage.size, diag);
        }
        if (err != KV_OK)
            return err;
        snapshot = record.parent;
    }
    return KV_OK;
}

enum kv_err snapshot_remove(struct store *store, const struct kv_alloc *alloc, const char *name,
                            struct kv_diag *diag) {
    struct snap_gc gc = {.store = store, .alloc = alloc};
    struct record_name head;
    enum kv_err err = session_check_name(name, diag);
    if (err != KV_OK)
        return err;
    err = snap_gc_name(store, name, &head, diag);
    if (err != KV_OK)
        return err;
    err = store_batch_begin_removal(store, &gc.batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(gc.batch, STORE_CAUSE_REMOVAL);
    struct record_key key = record_key_name(name);
    struct record_key lineage = record_key_lineage(head.lineage);
    err = remove_snapshots(&gc, head.snapshot, diag);
    if (err == KV_OK)
        err = snap_gc_blocks_from(&gc, head.lineage, 0, diag);
    if (err == KV_OK)
        err = store_batch_delete(gc.batch, lineage.bytes, lineage.size, diag);
    if (err == KV_OK)
        err = store_batch_delete(gc.batch, key.bytes, key.size, diag);
    if (err == KV_OK)
        err = snap_retain_forget(store, gc.batch, name, diag);
    if (err != KV_OK) {
        store_batch_abandon(gc.batch);
        return err;
    }
    return store_batch_commit(gc.batch, NULL, diag);
}
