/* snapshot/snap_map.c - from names to everything they use.
 *
 * Responsible for: the contract of snap_map.h.
 * Not responsible for: extents.
 */
#include "snapshot/snap_map.h"

#include "snapshot/snap_gc.h"
#include "snapshot/snap_path.h"
#include "store/base/bytes.h"

#include <stdlib.h>
#include <string.h>

enum { CHAIN_MAX = 1 << 20 };

struct making {
    struct store *store;
    struct snap_map *map;
    snap_map_broken broken;
    void *context;
    struct kv_diag *diag;
};

static enum kv_err add_use(struct making *making, struct snap_map_use use) {
    struct snap_map *map = making->map;
    void *uses = map->uses;
    if (!kv_alloc_grow(map->alloc, &uses, &map->use_capacity, map->use_count + 1,
                       sizeof *map->uses))
        return kv_diag_set(making->diag, KV_ERR_NOMEM, "no memory for the uses of records");
    map->uses = uses;
    map->uses[map->use_count++] = use;
    return KV_OK;
}

static void tell(struct making *making, const char *name, const struct record_key *key,
                 const char *text) {
    if (making->broken != NULL)
        making->broken(making->context, name, key, text);
}

/* The snapshot's lineage, and those whose blocks it reads. */
static enum kv_err add_lineages(struct making *making, uint32_t name,
                                const struct record_snapshot *record) {
    struct record_path path = {.next = record->lineage, .first = record->block_count};
    enum kv_err err =
        add_use(making, (struct snap_map_use){'l', record->lineage, name, record->block_count, 1});
#ifdef BREAK_MAP_KIN
    return err;
#endif
    while (err == KV_OK && path.first > 0) {
        struct kv_diag own = {""};
        struct record_key key = record_key_lineage(path.next);
        err = record_path_next(&path, snap_path_get, making->store, &own);
        if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
            return kv_diag_set(making->diag, err, "%s", own.text);
        if (err != KV_OK) {
            tell(making, making->map->names[name].text, &key, own.text);
            return KV_OK;
        }
        if (path.lineage != record->lineage)
            err = add_use(making, (struct snap_map_use){'l', path.lineage, name, path.end, 0});
    }
    return err;
}

static enum kv_err add_snapshot(struct making *making, uint64_t id, uint32_t name,
                                const struct record_snapshot *record) {
    enum kv_err err = add_use(making, (struct snap_map_use){'s', id, name, 0, 0});
    if (err == KV_OK)
        err = add_lineages(making, name, record);
    for (uint32_t i = 0; err == KV_OK && i < record->page_count; i++)
        err = add_use(making, (struct snap_map_use){'p', record->page_ids[i], name, 0, 0});
    if (err == KV_OK && record->sinks_page != 0)
        err = add_use(making, (struct snap_map_use){'p', record->sinks_page, name, 0, 0});
    return err;
}

static enum kv_err follow(struct making *making, uint32_t name, uint64_t snapshot) {
    for (int i = 0; snapshot != 0; i++) {
        struct record_snapshot record;
        struct kv_diag own = {""};
        struct record_key key = record_key_snapshot(snapshot);
        enum kv_err err = snap_gc_snapshot(making->store, snapshot, &record, &own);
        if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
            return kv_diag_set(making->diag, err, "%s", own.text);
        if (err != KV_OK || i == CHAIN_MAX) {
            tell(making, making->map->names[name].text, &key,
                 i == CHAIN_MAX ? "its snapshots go round in a circle" : own.text);
            return KV_OK;
        }
        err = add_snapshot(making, snapshot, name, &record);
        if (err != KV_OK)
            return err;
        snapshot = record.parent;
    }
    return KV_OK;
}

static enum kv_err add_name(struct making *making, const struct store_record *stored) {
    struct snap_map *map = making->map;
    struct record_name record;
    struct record_key key = {.size = 0};
    struct kv_diag own = {""};
    struct snap_map_name name = {.text = ""};
    void *names = map->names;
    if (stored->key_bytes - 1 <= IMAGE_NAME_BYTES_MAX)
        memcpy(name.text, stored->key + 1, stored->key_bytes - 1);
    key = record_key_name(name.text);
    enum kv_err err = record_get_name(stored->value, stored->value_bytes, &record, &own);
    if (err != KV_OK) {
        tell(making, name.text, &key, own.text);
        return KV_OK;
    }
    name.lineage = record.lineage;
    name.snapshot = record.snapshot;
    name.updated_ns = record.updated_ns;
    name.may_expire = record.may_expire;
    name.pinned = record.pinned;
    if (!kv_alloc_grow(map->alloc, &names, &map->name_capacity, map->name_count + 1,
                       sizeof *map->names))
        return kv_diag_set(making->diag, KV_ERR_NOMEM, "no memory for the names of sessions");
    map->names = names;
    map->names[map->name_count++] = name;
    return follow(making, (uint32_t)map->name_count - 1, record.snapshot);
}

static int by_id(const void *a, const void *b) {
    const struct snap_map_use *x = a;
    const struct snap_map_use *y = b;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    if (x->id != y->id)
        return x->id < y->id ? -1 : 1;
    return x->name < y->name ? -1 : x->name > y->name;
}

enum kv_err snap_map_make(struct store *store, const struct kv_alloc *alloc, snap_map_broken broken,
                          void *context, struct snap_map *out, struct kv_diag *diag) {
    struct making making = {store, out, broken, context, diag};
    struct store_walk walk = {.prefix = "n", .prefix_bytes = 1};
    *out = (struct snap_map){.alloc = alloc};
    for (;;) {
        struct store_record stored;
        struct kv_diag own = {""};
        enum kv_err err = store_next(store, &walk, &stored, &own);
        if (err == KV_ERR_NOT_FOUND)
            break;
        if (err == KV_ERR_CORRUPT) {
            struct record_key key = {.size = 0};
            if (walk.after_bytes <= RECORD_KEY_BYTES_MAX) {
                memcpy(key.bytes, walk.after, walk.after_bytes);
                key.size = (uint32_t)walk.after_bytes;
            }
            tell(&making, "", &key, own.text);
            continue;
        }
        if (err == KV_OK) {
            err = add_name(&making, &stored);
            store_record_release(store, &stored);
        } else {
            kv_diag_set(diag, err, "%s", own.text);
        }
        if (err != KV_OK)
            return err;
    }
    if (out->use_count != 0)
        qsort(out->uses, out->use_count, sizeof *out->uses, by_id);
    return KV_OK;
}

void snap_map_release(struct snap_map *map) {
    if (map->alloc == NULL)
        return;
    kv_alloc_release(map->alloc, map->names);
    kv_alloc_release(map->alloc, map->uses);
    *map = (struct snap_map){0};
}

const struct snap_map_use *snap_map_find(const struct snap_map *map, uint8_t kind, uint64_t id,
                                         size_t *count_out) {
    size_t low = 0;
    size_t high = map->use_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const struct snap_map_use *use = &map->uses[middle];
        if (use->kind < kind || (use->kind == kind && use->id < id))
            low = middle + 1;
        else
            high = middle;
    }
    size_t end = low;
    while (end < map->use_count && map->uses[end].kind == kind && map->uses[end].id == id)
        end++;
    *count_out = end - low;
    return end > low ? &map->uses[low] : NULL;
}

uint32_t snap_map_blocks(const struct snap_map *map, uint64_t lineage) {
    size_t count = 0;
    uint32_t blocks = 0;
    const struct snap_map_use *use = snap_map_find(map, 'l', lineage, &count);
    for (size_t i = 0; i < count; i++)
        if (use[i].blocks > blocks)
            blocks = use[i].blocks;
    return blocks;
}

int snap_map_key(const uint8_t *key, size_t bytes, uint8_t *kind_out, uint64_t *id_out,
                 uint32_t *block_out) {
    size_t wanted = bytes != 0 && key[0] == 'b' ? 13 : 9;
    if (bytes != wanted || (key[0] != 's' && key[0] != 'p' && key[0] != 'l' && key[0] != 'b'))
        return 0;
    *kind_out = key[0];
    *id_out = kv_get_u64_be(key + 1);
    *block_out = 0;
    for (size_t i = 9; i < bytes; i++)
        *block_out = *block_out << 8 | key[i];
    return 1;
}
