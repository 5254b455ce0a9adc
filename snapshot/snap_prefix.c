/* snapshot/snap_prefix.c - the table of beginnings, read from the store.
 *
 * Responsible for: which snapshots have an entry and what is known of them; the ids of one.
 * Not responsible for: searching (snap_prefix_table.c).
 *
 * Nothing of this is stored: the digest of a block's token ids stands in its record, and the image
 * has the ids that are in no block, so that a table of any store is made by reading records and
 * images. What cannot be read has no entry; whoever names the session is told why.
 */
#include "snapshot/snap_prefix.h"

#include "snapshot/snap_gc.h"
#include "snapshot/snap_image.h"
#include "snapshot/snap_path.h"
#include "snapshot/snap_prefix_table.h"
#include "snapshot/snap_tree.h"
#include "store/base/bytes.h"
#include "store/store_read.h"

#include <string.h>

struct noting;
struct snap_prefix {
    struct snap_prefix_settings settings;
    struct snap_prefix_table table;
    struct noting *noting; /* who reads what stands under a name */
};

static void go_away(const struct snap_prefix *prefix) {
    if (prefix->settings.away != NULL)
        prefix->settings.away(prefix->settings.context);
}

static void come_back(const struct snap_prefix *prefix) {
    if (prefix->settings.back != NULL)
        prefix->settings.back(prefix->settings.context);
}

/* --- one entry */

static enum kv_err no_memory(struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the beginnings of sessions");
}

/* Digests of the ids of every block that the snapshot reads, in order. */
static enum kv_err read_digests(struct snap_prefix *prefix, const struct record_snapshot *record,
                                struct kv_digest *digests, struct kv_diag *diag) {
    struct store *store = prefix->settings.store;
    struct record_path path = {.next = record->lineage, .first = record->block_count};
    while (path.first > 0) {
        enum kv_err err = record_path_next(&path, snap_path_get, store, diag);
        for (uint32_t b = path.first; err == KV_OK && b < path.end; b++) {
            struct record_key key = record_key_block(path.lineage, b);
            struct store_record stored;
            err = store_get(store, key.bytes, key.size, &stored, diag);
            if (err != KV_OK)
                break;
            if (stored.extent_count == 0 || stored.extents[0].kind != RECORD_KIND_IDS)
                err = kv_diag_set(diag, KV_ERR_CORRUPT, "block %u has no token ids", b);
            else
                digests[b] = stored.extents[0].digest;
            store_record_release(store, &stored);
        }
        if (err != KV_OK)
            return err;
    }
    return KV_OK;
}

static enum kv_err fill_ids(struct snap_prefix *prefix, const struct image *image,
                            struct snap_prefix_entry *entry, struct kv_diag *diag) {
    uint64_t behind = LAYOUT_SINK_TOKENS + (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS;
    uint64_t first = image->n < LAYOUT_SINK_TOKENS ? image->n : LAYOUT_SINK_TOKENS;
    uint64_t tail = image->n > behind ? image->n - behind : 0;
    entry->id_count = (uint32_t)(first + tail);
    entry->ids = kv_alloc_zeroed(prefix->settings.alloc, entry->id_count + 1, sizeof *entry->ids);
    if (entry->ids == NULL)
        return no_memory(diag);
    memcpy(entry->ids, image->ids, first * sizeof *entry->ids);
    memcpy(entry->ids + first, image->ids + image->n - tail, tail * sizeof *entry->ids);
    return KV_OK;
}

static uint32_t make_marks(struct snap_prefix *prefix, const struct image *image,
                           const uint8_t *owner, uint64_t *marks) {
    uint64_t behind = LAYOUT_SINK_TOKENS + (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS;
    uint64_t first = image->block_count == 0 ? 0 : behind;
    const struct snap_prefix_text text = {.owner = owner,
                                          .ids = image->ids + first,
                                          .first = first,
                                          .n = image->n,
                                          .roles = image->roles,
                                          .role_count = image->role_count};
    if (prefix->settings.marks == NULL)
        return 0;
    return prefix->settings.marks(prefix->settings.context, &text, marks);
}

static enum kv_err fill_hashes(struct snap_prefix *prefix, const struct snap_image *image,
                               struct snap_prefix_entry *entry, struct kv_diag *diag) {
    const struct kv_alloc *alloc = prefix->settings.alloc;
    uint32_t blocks = image->record.block_count;
    uint64_t marks[SNAP_PREFIX_MARKS_MAX];
    struct kv_digest *digests = kv_alloc_zeroed(alloc, (size_t)blocks + 1, sizeof *digests);
    entry->mark_count = make_marks(prefix, &image->image, entry->owner, marks);
    entry->chain_count = image->image.n < LAYOUT_SINK_TOKENS ? 0 : blocks + 1;
    entry->hashes = kv_alloc_zeroed(alloc, (size_t)entry->chain_count + entry->mark_count + 1,
                                    sizeof *entry->hashes);
    enum kv_err err = digests == NULL || entry->hashes == NULL
                          ? no_memory(diag)
                          : read_digests(prefix, &image->record, digests, diag);
    if (err == KV_OK && entry->chain_count != 0) {
        uint64_t *chain = entry->hashes;
        chain[0] = snap_prefix_table_first(&prefix->table, entry->owner, entry->ids);
        for (uint32_t b = 0; b < blocks; b++)
            chain[b + 1] =
                snap_prefix_table_link(&prefix->table, entry->owner, chain[b], &digests[b]);
    }
    for (uint32_t i = 0; err == KV_OK && i < entry->mark_count; i++)
        entry->hashes[entry->chain_count + i] = marks[i] & prefix->settings.hash_mask;
    kv_alloc_release(alloc, digests);
    return err;
}

static void entry_release(const struct snap_prefix *prefix, struct snap_prefix_entry *entry) {
    kv_alloc_release(prefix->settings.alloc, entry->ids);
    kv_alloc_release(prefix->settings.alloc, entry->hashes);
}

static enum kv_err read_snapshot(struct snap_prefix *prefix, const struct record_name *name,
                                 uint64_t snapshot, struct snap_prefix_entry *entry_out,
                                 struct kv_diag *diag) {
    struct snap_prefix_entry entry = {.used = 0};
    struct snap_image image;
    enum kv_err err = KV_OK;
    KV_TRY(snap_image_read(prefix->settings.store, prefix->settings.alloc, snapshot, &image, diag));
    if (prefix->settings.model != NULL)
        KV_TRY(image_compatible(&image.image.model, prefix->settings.model, diag));
    memcpy(entry.owner, name->owner, sizeof entry.owner);
    memcpy(entry.known.name, image.record.name, sizeof entry.known.name);
    entry.known.snapshot = snapshot;
    entry.known.is_head = snapshot == name->snapshot;
    entry.known.n = image.record.n;
    entry.known.n_kv = image.record.n_kv;
    entry.known.created_ns = image.record.created_ns;
    entry.known.blocks = image.record.block_count;
    KV_TRY(fill_ids(prefix, &image.image, &entry, diag));
    KV_TRY(fill_hashes(prefix, &image, &entry, diag));
    *entry_out = entry;
    entry = (struct snap_prefix_entry){.used = 0};
done:
    entry_release(prefix, &entry);
    snap_image_release(&image, prefix->settings.alloc);
    return err;
}

/* --- what stands under a name */

struct noting {
    struct noting *next;
    struct snap_prefix *prefix;
    const char *name;
    int stale; /* somebody has begun to read the name since: that one sees all that this one does */
    struct record_name record;
    void *entries; /* of struct snap_prefix_entry */
    size_t count, capacity;
    enum kv_err err;
    struct kv_diag *diag;
};

/* What is damaged or cannot be read has no entry, and says so when it is asked for by name. */
static int read_each(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct noting *noting = context;
    struct kv_diag own = {""};
    if (snapshot != noting->record.snapshot && record->tag[0] == 0)
        return 1;
    if (!kv_alloc_grow(noting->prefix->settings.alloc, &noting->entries, &noting->capacity,
                       noting->count + 1, sizeof(struct snap_prefix_entry))) {
        noting->err = no_memory(noting->diag);
        return 0;
    }
    enum kv_err err =
        read_snapshot(noting->prefix, &noting->record, snapshot,
                      (struct snap_prefix_entry *)noting->entries + noting->count, &own);
    noting->count += err == KV_OK;
    if (err == KV_ERR_NOMEM)
        noting->err = kv_diag_set(noting->diag, err, "%s", own.text);
    return noting->err == KV_OK;
}

static void begin_noting(struct snap_prefix *prefix, struct noting *noting) {
#ifndef BREAK_STALE_NOTE
    for (struct noting *other = prefix->noting; other != NULL; other = other->next)
        other->stale |= strcmp(other->name, noting->name) == 0;
#endif
    noting->next = prefix->noting;
    prefix->noting = noting;
}

static void end_noting(struct snap_prefix *prefix, struct noting *noting) {
    struct noting **at = &prefix->noting;
    while (*at != noting)
        at = &(*at)->next;
    *at = noting->next;
    if (!noting->stale)
        snap_prefix_table_remove(&prefix->table, noting->name);
    for (size_t i = 0; i < noting->count; i++) {
        struct snap_prefix_entry *entry = (struct snap_prefix_entry *)noting->entries + i;
        if (noting->stale)
            entry_release(prefix, entry);
        else if (snap_prefix_table_add(&prefix->table, entry, noting->diag) != KV_OK)
            noting->err = KV_ERR_NOMEM;
    }
    kv_alloc_release(prefix->settings.alloc, noting->entries);
}

enum kv_err snap_prefix_note(struct snap_prefix *prefix, const char *name, struct kv_diag *diag) {
    struct noting noting = {.prefix = prefix, .name = name, .diag = diag};
    struct kv_diag own = {""};
    begin_noting(prefix, &noting);
    go_away(prefix);
    store_hold(prefix->settings.store);
    enum kv_err err = snap_gc_name(prefix->settings.store, name, &noting.record, &own);
    if (err == KV_OK)
        err = snap_tree_walk(prefix->settings.store, name, read_each, &noting, &own);
    store_unhold(prefix->settings.store);
    come_back(prefix);
    end_noting(prefix, &noting);
    if (noting.err != KV_OK)
        return noting.err;
    return err == KV_ERR_NOMEM ? kv_diag_set(diag, err, "%s", own.text) : KV_OK;
}

/* --- all */

/* 1: the table has the head that the record names. */
static int is_known(const struct snap_prefix *prefix, const char *name,
                    const struct store_record *stored) {
    struct record_name record;
    const struct snap_prefix_entry *entry = snap_prefix_table_head(&prefix->table, name);
    return entry != NULL &&
           record_get_name(stored->value, stored->value_bytes, &record, NULL) == KV_OK &&
           record.snapshot == entry->known.snapshot &&
           memcmp(record.owner, entry->owner, sizeof record.owner) == 0;
}

/* Names that have gone since. */
static enum kv_err drop_gone(struct snap_prefix *prefix, struct kv_diag *diag) {
    for (size_t i = 0; i < prefix->table.entry_count; i++) {
        const struct snap_prefix_entry *entry =
            (const struct snap_prefix_entry *)prefix->table.entries + i;
        char name[IMAGE_NAME_BYTES_MAX + 1];
        int exists = 1;
        if (!entry->used)
            continue;
        memcpy(name, entry->known.name, sizeof name);
        struct record_key key = record_key_name(name);
        enum kv_err err = store_exists(prefix->settings.store, key.bytes, key.size, &exists, diag);
        if (err != KV_OK)
            return err;
        if (!exists)
            snap_prefix_table_remove(&prefix->table, name);
    }
    return KV_OK;
}

enum kv_err snap_prefix_refresh(struct snap_prefix *prefix, struct kv_diag *diag) {
    struct store_walk walk = {.prefix = "n", .prefix_bytes = 1};
    enum kv_err err = drop_gone(prefix, diag);
    while (err == KV_OK) {
        struct store_record stored;
        char name[IMAGE_NAME_BYTES_MAX + 1] = "";
        int known = 0;
        err = store_next(prefix->settings.store, &walk, &stored, diag);
        if (err == KV_ERR_NOT_FOUND)
            return KV_OK;
        if (err == KV_ERR_CORRUPT) {
            err = KV_OK;
            continue;
        }
        if (err != KV_OK)
            break;
        if (stored.key_bytes - 1 <= IMAGE_NAME_BYTES_MAX)
            memcpy(name, stored.key + 1, stored.key_bytes - 1);
        known = is_known(prefix, name, &stored);
        store_record_release(prefix->settings.store, &stored);
        if (!known)
            err = snap_prefix_note(prefix, name, diag);
    }
    return err;
}

enum kv_err snap_prefix_open(const struct snap_prefix_settings *settings,
                             struct snap_prefix **prefix_out, struct kv_diag *diag) {
    struct snap_prefix *prefix = kv_alloc_zeroed(settings->alloc, 1, sizeof *prefix);
    if (prefix == NULL)
        return no_memory(diag);
    prefix->settings = *settings;
    prefix->table.alloc = settings->alloc;
    prefix->table.hash_mask = settings->hash_mask;
    enum kv_err err = snap_prefix_refresh(prefix, diag);
    if (err == KV_OK)
        *prefix_out = prefix;
    else
        snap_prefix_close(prefix);
    return err;
}

void snap_prefix_close(struct snap_prefix *prefix) {
    if (prefix == NULL)
        return;
    snap_prefix_table_release(&prefix->table);
    kv_alloc_release(prefix->settings.alloc, prefix);
}

uint32_t snap_prefix_find(struct snap_prefix *prefix, const struct snap_prefix_wish *wish,
                          struct snap_prefix_found found_out[SNAP_PREFIX_FOUND_MAX]) {
    return snap_prefix_table_find(&prefix->table, wish, found_out);
}

void snap_prefix_counts(const struct snap_prefix *prefix, const uint8_t *owner,
                        struct snap_prefix_counts *counts_out) {
    const struct snap_prefix_owner *found = snap_prefix_table_owner(&prefix->table, owner);
    *counts_out = (struct snap_prefix_counts){
        .entries = found != NULL ? found->entries : 0,
        .looked_at = found != NULL ? found->looked_at : 0,
        .bytes = prefix->table.bytes,
    };
}

/* --- ids */

enum { READ_AT_ONCE = 64 };

struct reading {
    struct store *store;
    struct store_record records[READ_AT_ONCE];
    struct iovec pieces[READ_AT_ONCE];
    struct store_read reads[READ_AT_ONCE];
    uint32_t count;
    int in_doubt;
};

/* What a late read may still write to is never used again: the caller keeps the memory. */
static enum kv_err flush(struct reading *reading, struct kv_diag *diag) {
    const struct store_read_args args = {.reads = reading->reads, .count = reading->count};
    enum kv_err err = reading->count != 0 ? store_read(reading->store, &args, NULL, diag) : KV_OK;
    for (uint32_t i = 0; i < reading->count; i++) {
        reading->in_doubt |= reading->reads[i].in_doubt;
        store_record_release(reading->store, &reading->records[i]);
    }
    reading->count = 0;
    return err;
}

static enum kv_err read_block(struct reading *reading, const struct record_key *key, uint8_t *bytes,
                              struct kv_diag *diag) {
    uint32_t at = reading->count;
    struct store_record *record = &reading->records[at];
    enum kv_err err = store_get(reading->store, key->bytes, key->size, record, diag);
    if (err != KV_OK)
        return err;
    reading->count++;
    if (record->extent_count == 0 || record->extents[0].kind != RECORD_KIND_IDS ||
        record->extents[0].raw_bytes != RECORD_IDS_BYTES) {
        store_record_release(reading->store, record);
        reading->count--;
        return kv_diag_set(diag, KV_ERR_CORRUPT, "a block has no token ids");
    }
    reading->pieces[at] = (struct iovec){bytes, RECORD_IDS_BYTES};
    reading->reads[at] = (struct store_read){.extent = &record->extents[0],
                                             .pieces = &reading->pieces[at],
                                             .piece_count = 1,
                                             .verify = 1,
                                             .label = "token ids"};
    return reading->count == READ_AT_ONCE ? flush(reading, diag) : KV_OK;
}

static enum kv_err read_blocks(struct reading *reading, const struct record_snapshot *record,
                               uint8_t *bytes, struct kv_diag *diag) {
    struct record_path path = {.next = record->lineage, .first = record->block_count};
    enum kv_err err = KV_OK;
    while (err == KV_OK && path.first > 0) {
        err = record_path_next(&path, snap_path_get, reading->store, diag);
        for (uint32_t b = path.first; err == KV_OK && b < path.end; b++) {
            struct record_key key = record_key_block(path.lineage, b);
            err = read_block(reading, &key, bytes + (size_t)b * RECORD_IDS_BYTES, diag);
        }
    }
    enum kv_err last = flush(reading, err == KV_OK ? diag : NULL);
    return err != KV_OK ? err : last;
}

enum kv_err snap_prefix_read(struct snap_prefix *prefix, const struct snap_prefix_found *found,
                             struct snap_prefix_ids *ids_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = prefix->settings.alloc;
    struct reading reading = {.store = prefix->settings.store};
    struct snap_image image;
    uint8_t *bytes = NULL;
    enum kv_err err = KV_OK;
    go_away(prefix);
    store_hold(reading.store);
    KV_TRY(snap_image_read(reading.store, alloc, found->snapshot, &image, diag));
    uint32_t blocks = image.record.block_count;
    bytes = kv_alloc_aligned(alloc, (size_t)(blocks + 1) * RECORD_IDS_BYTES, STORE_PAGE_BYTES);
    if (bytes == NULL)
        KV_TRY(no_memory(diag));
    KV_TRY(read_blocks(&reading, &image.record, bytes, diag));
    for (size_t i = 0; i < (size_t)blocks * LAYOUT_BLOCK_TOKENS; i++)
        image.image.ids[LAYOUT_SINK_TOKENS + i] = kv_get_u32(bytes + 4 * i);
    *ids_out = (struct snap_prefix_ids){.ids = image.image.ids,
                                        .n = image.image.n,
                                        .roles = image.image.roles,
                                        .role_count = image.image.role_count,
                                        .image = image.image};
    image_init(&image.image);
done:
    store_unhold(reading.store);
    come_back(prefix);
    if (!reading.in_doubt)
        kv_alloc_release(alloc, bytes);
    snap_image_release(&image, alloc);
    return err;
}

void snap_prefix_ids_release(struct snap_prefix *prefix, struct snap_prefix_ids *ids) {
    image_release(&ids->image, prefix->settings.alloc);
    *ids = (struct snap_prefix_ids){.ids = NULL};
}
