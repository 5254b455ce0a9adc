/* snapshot/snap_list.c - which sessions are stored.
 *
 * Responsible for: listing names with their head snapshots; reading only.
 * Not responsible for: images and bytes (restore/).
 */
#include "snapshot/snapshot.h"

#include "snapshot/snap_gc.h"

#include <string.h>

static enum kv_err add_record(struct store *store, const struct record_key *key,
                              uint64_t *stored_bytes, struct kv_diag *diag) {
    struct store_record record;
    enum kv_err err = store_get(store, key->bytes, key->size, &record, diag);
    if (err != KV_OK)
        return err;
    for (uint32_t i = 0; i < record.extent_count; i++)
        *stored_bytes += record.extents[i].stored_bytes;
    store_record_release(store, &record);
    return KV_OK;
}

static void add_block(struct store *store, const struct record_key *key,
                      struct snapshot_entry *entry) {
    struct store_record stored;
    struct record_block record;
    if (store_get(store, key->bytes, key->size, &stored, NULL) != KV_OK)
        return;
    for (uint32_t i = 0; i < stored.extent_count; i++)
        entry->stored_bytes += stored.extents[i].stored_bytes;
    if (record_get_block(stored.value, stored.value_bytes, &record, NULL) == KV_OK) {
        entry->lowered_blocks += record.dropped_count != 0;
        entry->dropped |= record_dropped(&record);
    }
    store_record_release(store, &stored);
}

/* Damage is the business of verify: a session with a missing record is still listed. */
static void count_bytes(struct store *store, struct snapshot_entry *entry) {
    struct record_key key = record_key_snapshot(entry->snapshot);
    (void)add_record(store, &key, &entry->stored_bytes, NULL);
    for (uint32_t i = 0; i < entry->head.page_count; i++) {
        key = record_key_page(entry->head.page_ids[i]);
        (void)add_record(store, &key, &entry->stored_bytes, NULL);
    }
    if (entry->head.sinks_page != 0) {
        key = record_key_page(entry->head.sinks_page);
        (void)add_record(store, &key, &entry->stored_bytes, NULL);
    }
    for (uint32_t b = 0; b < entry->head.block_count; b++) {
        key = record_key_block(entry->head.lineage, b);
        add_block(store, &key, entry);
    }
}

static void count_snapshots(struct store *store, struct snapshot_entry *entry) {
    struct record_key key = record_key_lineage(entry->head.lineage);
    struct store_record stored;
    struct record_lineage record;
    entry->snapshot_count = 1;
    if (store_get(store, key.bytes, key.size, &stored, NULL) != KV_OK)
        return;
    if (record_get_lineage(stored.value, stored.value_bytes, &record, NULL) == KV_OK)
        entry->snapshot_count = record.snapshot_count;
    store_record_release(store, &stored);
}

enum kv_err snapshot_find(struct store *store, const struct kv_alloc *alloc, const char *name,
                          struct snapshot_entry *entry_out, struct kv_diag *diag) {
    (void)alloc;
    struct snapshot_entry entry = {0};
    struct record_name record;
    enum kv_err err = session_check_name(name, diag);
    if (err == KV_OK)
        err = snap_gc_name(store, name, &record, diag);
    if (err != KV_OK)
        return err;
    err = snap_gc_snapshot(store, record.snapshot, &entry.head, diag);
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "session %s: its snapshot record is missing from the index", name);
    if (err != KV_OK)
        return err;
    entry.snapshot = record.snapshot;
    entry.may_expire = record.may_expire;
    count_bytes(store, &entry);
    count_snapshots(store, &entry);
    *entry_out = entry;
    return KV_OK;
}

enum kv_err snapshot_list(struct store *store, const struct kv_alloc *alloc, snapshot_each each,
                          void *context, struct kv_diag *diag) {
    struct store_walk walk = {.prefix = "n", .prefix_bytes = 1};
    enum kv_err first = KV_OK; /* a damaged name must not hide the others */
    for (;;) {
        struct store_record stored;
        struct snapshot_entry entry;
        struct kv_diag own = {""};
        char name[IMAGE_NAME_BYTES_MAX + 1] = "";
        enum kv_err err = store_next(store, &walk, &stored, &own);
        if (err == KV_ERR_NOT_FOUND)
            return first;
        if (err != KV_OK && err != KV_ERR_CORRUPT)
            return kv_diag_set(diag, err, "%s", own.text);
        if (err == KV_OK) {
            size_t length = stored.key_bytes - 1;
            if (length <= IMAGE_NAME_BYTES_MAX)
                memcpy(name, stored.key + 1, length);
            store_record_release(store, &stored);
            err = snapshot_find(store, alloc, name, &entry, &own);
        }
        if (err == KV_OK) {
            if (each(context, &entry) == 0)
                return first;
        } else if (first == KV_OK) {
            first = kv_diag_set(diag, err, "%s", own.text);
        }
    }
}
