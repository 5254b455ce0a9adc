/* snapshot/snap_list.c - which sessions are stored.
 *
 * Responsible for: listing names with their head snapshots; reading only.
 * Not responsible for: images and bytes (restore/).
 */
#include "snapshot/snapshot.h"

#include "snapshot/snap_gc.h"
#include "snapshot/snap_path.h"
#include "snapshot/snap_tree.h"

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

static void add_block(struct store *store, const struct record_key *key, int shared,
                      struct snapshot_entry *entry) {
    struct store_record stored;
    struct record_block record;
    if (store_get(store, key->bytes, key->size, &stored, NULL) != KV_OK)
        return;
    for (uint32_t i = 0; i < stored.extent_count; i++) {
        entry->stored_bytes += stored.extents[i].stored_bytes;
        entry->shared_bytes += shared ? stored.extents[i].stored_bytes : 0;
    }
    if (record_get_block(stored.value, stored.value_bytes, &record, NULL) == KV_OK) {
        entry->lowered_blocks += record.dropped_count != 0;
        entry->dropped |= record_dropped(&record);
    }
    store_record_release(store, &stored);
}

static void count_blocks(struct store *store, struct snapshot_entry *entry) {
    struct record_path path = {.next = entry->head.lineage, .first = entry->head.block_count};
    while (path.first > 0 && record_path_next(&path, snap_path_get, store, NULL) == KV_OK)
        for (uint32_t b = path.first; b < path.end; b++) {
            struct record_key key = record_key_block(path.lineage, b);
            add_block(store, &key, path.lineage != entry->head.lineage, entry);
        }
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
    count_blocks(store, entry);
}

static int count_snapshot(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct snapshot_entry *entry = context;
    (void)snapshot;
    entry->snapshot_count++;
    entry->tag_count += record->tag[0] != 0;
    return 1;
}

struct looking {
    struct store *store;
    uint64_t lineage;
    int found;
};

static int look_for_lineage(void *context, uint64_t snapshot,
                            const struct record_snapshot *record) {
    struct looking *looking = context;
    struct record_path path = {.next = record->lineage, .first = record->block_count};
    (void)snapshot;
    looking->found = record->lineage == looking->lineage;
    while (!looking->found && path.first > 0 &&
           record_path_next(&path, snap_path_get, looking->store, NULL) == KV_OK)
        looking->found = path.lineage == looking->lineage;
    return !looking->found;
}

/* Whether a session of that name has a snapshot on the lineage: another session may have got the
 * name since. */
static int has_lineage(struct store *store, const char *name, uint64_t lineage) {
    struct looking looking = {store, lineage, 0};
    return snap_tree_walk(store, name, look_for_lineage, &looking, NULL) == KV_OK && looking.found;
}

/* Going back and forth inside one session is no descent: the first other name counts. */
static void find_parent(struct store *store, struct snapshot_entry *entry) {
    uint64_t lineage = entry->head.lineage;
    struct record_lineage record;
    if (snap_path_get(store, lineage, &record, NULL) != KV_OK)
        return;
    for (uint64_t cut = UINT64_MAX; record.parent != 0 && record.cut < cut;) {
        uint64_t parent = record.parent;
        cut = record.cut;
        if (snap_path_get(store, record.parent, &record, NULL) != KV_OK)
            return;
        if (strcmp(record.name, entry->head.name) == 0)
            continue;
        memcpy(entry->parent, record.name, sizeof entry->parent);
        entry->cut = cut;
        entry->parent_removed = !has_lineage(store, record.name, parent);
        return;
    }
}

enum kv_err snapshot_owner(struct store *store, const char *name,
                           uint8_t owner_out[IMAGE_OWNER_BYTES], struct kv_diag *diag) {
    struct record_name record;
    enum kv_err err = session_check_name(name, diag);
    if (err == KV_OK)
        err = snap_gc_name(store, name, &record, diag);
    if (err == KV_OK)
        memcpy(owner_out, record.owner, IMAGE_OWNER_BYTES);
    return err;
}

static enum kv_err find_once(struct store *store, const char *name,
                             struct snapshot_entry *entry_out, struct kv_diag *diag) {
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
    entry.pinned = record.pinned;
    memcpy(entry.owner, record.owner, sizeof entry.owner);
    entry.used_ns = record.updated_ns;
    count_bytes(store, &entry);
    (void)snap_tree_walk(store, name, count_snapshot, &entry, NULL);
    find_parent(store, &entry);
    *entry_out = entry;
    return KV_OK;
}

enum kv_err snapshot_find(struct store *store, const struct kv_alloc *alloc, const char *name,
                          struct snapshot_entry *entry_out, struct kv_diag *diag) {
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    (void)alloc;
    while (store_look(store, &look, err, diag))
        err = find_once(store, name, entry_out, diag);
    return err;
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
