/* snapshot/snap_gc.c - which records die by a save or a wake.
 *
 * Responsible for: block records beyond every snapshot, pages that no snapshot uses.
 * Not responsible for: removed snapshots and lineages (snap_remove.c), when (snap_commit.c), or the
 * space they took (store/).
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
