/* snapshot/snap_prefix_table.c - entries, and the hashes under which an owner finds his own.
 *
 * Responsible for: what snap_prefix_table.h promises.
 * Not responsible for: what is stored, or whether a claim holds.
 *
 * A session with blocks is found by the chain at each of them. Where a wish leaves the chain it may
 * still agree with the ids behind the last block of a session that ends there or up to two blocks
 * earlier, since these are at most 512.
 */
#include "snapshot/snap_prefix_table.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <sodium.h>
#include <string.h>

/* Where no chain has a depth. */
static const uint32_t depth_mark = UINT32_MAX, depth_short = UINT32_MAX - 1,
                      depth_name = UINT32_MAX - 2;
enum { TAIL_BLOCKS = 2, BUCKETS_FIRST = 64 };

uint64_t snap_prefix_hash(const uint8_t owner[IMAGE_OWNER_BYTES], const void *bytes, size_t count) {
    uint8_t hash[crypto_shorthash_BYTES];
    _Static_assert(crypto_shorthash_KEYBYTES == IMAGE_OWNER_BYTES, "an owner is a SipHash key");
#ifdef BREAK_FOREIGN_PREFIX
    owner = (const uint8_t[IMAGE_OWNER_BYTES]){0};
#endif
    crypto_shorthash(hash, bytes, count, owner);
    return kv_get_u64(hash);
}

uint64_t snap_prefix_table_first(const struct snap_prefix_table *table, const uint8_t *owner,
                                 const uint32_t *ids) {
    uint8_t bytes[4 * LAYOUT_SINK_TOKENS];
    for (uint32_t i = 0; i < LAYOUT_SINK_TOKENS; i++)
        kv_put_u32(bytes + 4 * i, ids[i]);
    return snap_prefix_hash(owner, bytes, sizeof bytes) & table->hash_mask;
}

uint64_t snap_prefix_table_link(const struct snap_prefix_table *table, const uint8_t *owner,
                                uint64_t before, const struct kv_digest *ids) {
    uint8_t bytes[8 + KV_DIGEST_BYTES];
    kv_put_u64(bytes, before);
    memcpy(bytes + 8, ids->bytes, KV_DIGEST_BYTES);
    return snap_prefix_hash(owner, bytes, sizeof bytes) & table->hash_mask;
}

/* --- nodes */

static struct snap_prefix_node *node_at(const struct snap_prefix_nodes *nodes, uint32_t index) {
    return (struct snap_prefix_node *)nodes->nodes + index;
}

static uint32_t *bucket_of(const struct snap_prefix_nodes *nodes, uint64_t hash, uint32_t depth) {
    uint64_t mixed = (hash ^ depth) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t *)nodes->buckets + (mixed >> 32) % nodes->bucket_count;
}

static void link_node(struct snap_prefix_nodes *nodes, uint32_t index) {
    struct snap_prefix_node *node = node_at(nodes, index);
    uint32_t *bucket = bucket_of(nodes, node->hash, node->depth);
    node->next = *bucket;
    *bucket = index + 1;
}

/* Room for `more` nodes, so that adding them cannot fail. */
static int make_room(const struct kv_alloc *alloc, struct snap_prefix_nodes *nodes, size_t more) {
    size_t before = nodes->capacity;
    if (nodes->count + more > nodes->capacity) {
        if (!kv_alloc_grow(alloc, &nodes->nodes, &nodes->capacity, nodes->count + more,
                           sizeof(struct snap_prefix_node)))
            return 0;
        for (size_t i = nodes->capacity; i-- > before;) {
            *node_at(nodes, (uint32_t)i) = (struct snap_prefix_node){.next = nodes->free};
            nodes->free = (uint32_t)i + 1;
        }
    }
    if (nodes->bucket_count != 0 && nodes->count + more <= 2 * nodes->bucket_count)
        return 1;
    size_t wanted = nodes->bucket_count != 0 ? nodes->bucket_count : BUCKETS_FIRST;
    while (wanted < nodes->count + more)
        wanted *= 2;
    uint32_t *buckets = kv_alloc_zeroed(alloc, wanted, sizeof *buckets);
    if (buckets == NULL)
        return 0;
    const struct snap_prefix_nodes old = *nodes;
    nodes->buckets = buckets;
    nodes->bucket_count = wanted;
    for (size_t b = 0; b < old.bucket_count; b++)
        for (uint32_t at = ((uint32_t *)old.buckets)[b]; at != 0;) {
            uint32_t next = node_at(nodes, at - 1)->next;
            link_node(nodes, at - 1);
            at = next;
        }
    kv_alloc_release(alloc, old.buckets);
    return 1;
}

static void add_node(struct snap_prefix_nodes *nodes, uint64_t hash, uint32_t depth,
                     uint32_t entry) {
    uint32_t index = nodes->free - 1;
    assert(nodes->free != 0);
    nodes->free = node_at(nodes, index)->next;
    *node_at(nodes, index) = (struct snap_prefix_node){hash, depth, entry, 0};
    link_node(nodes, index);
    nodes->count++;
}

static void remove_node(struct snap_prefix_nodes *nodes, uint64_t hash, uint32_t depth,
                        uint32_t entry) {
    for (uint32_t *at = bucket_of(nodes, hash, depth); *at != 0;
         at = &node_at(nodes, *at - 1)->next) {
        struct snap_prefix_node *node = node_at(nodes, *at - 1);
        if (node->hash != hash || node->depth != depth || node->entry != entry)
            continue;
        uint32_t index = *at - 1;
        *at = node->next;
        node->next = nodes->free;
        nodes->free = index + 1;
        nodes->count--;
        return;
    }
}

/* The next node with this hash and depth behind `at` (0: the first); 0 for none. */
static uint32_t next_node(const struct snap_prefix_nodes *nodes, uint64_t hash, uint32_t depth,
                          uint32_t at) {
    if (nodes->bucket_count == 0)
        return 0;
    at = at == 0 ? *bucket_of(nodes, hash, depth) : node_at(nodes, at - 1)->next;
    while (at != 0 &&
           (node_at(nodes, at - 1)->hash != hash || node_at(nodes, at - 1)->depth != depth))
        at = node_at(nodes, at - 1)->next;
    return at;
}

/* --- entries */

static struct snap_prefix_entry *entry_at(const struct snap_prefix_table *table, uint32_t index) {
    return (struct snap_prefix_entry *)table->entries + index;
}

static struct snap_prefix_owner *owner_at(const struct snap_prefix_table *table, uint32_t index) {
    return (struct snap_prefix_owner *)table->owners + index;
}

struct snap_prefix_owner *snap_prefix_table_owner(const struct snap_prefix_table *table,
                                                  const uint8_t *owner) {
#ifdef BREAK_FOREIGN_PREFIX
    return table->owner_count != 0 ? owner_at(table, 0) : NULL;
#endif
    for (size_t i = 0; i < table->owner_count; i++)
        if (sodium_memcmp(owner_at(table, (uint32_t)i)->id, owner, IMAGE_OWNER_BYTES) == 0)
            return owner_at(table, (uint32_t)i);
    return NULL;
}

static uint64_t name_hash(const char *name) {
    static const uint8_t key[IMAGE_OWNER_BYTES];
    return snap_prefix_hash(key, name, strlen(name));
}

static uint64_t bytes_of(const struct snap_prefix_entry *entry) {
    return sizeof *entry + entry->id_count * sizeof *entry->ids +
           (entry->chain_count + entry->mark_count + 1) *
               (sizeof *entry->hashes + sizeof(struct snap_prefix_node) + sizeof(uint32_t));
}

static void release_entry(const struct snap_prefix_table *table, struct snap_prefix_entry *entry) {
    kv_alloc_release(table->alloc, entry->ids);
    kv_alloc_release(table->alloc, entry->hashes);
    *entry = (struct snap_prefix_entry){.used = 0};
}

static struct snap_prefix_owner *need_owner(struct snap_prefix_table *table, const uint8_t *id) {
    struct snap_prefix_owner *owner = snap_prefix_table_owner(table, id);
    if (owner != NULL)
        return owner;
    if (!kv_alloc_grow(table->alloc, &table->owners, &table->owner_capacity, table->owner_count + 1,
                       sizeof *owner))
        return NULL;
    owner = owner_at(table, (uint32_t)table->owner_count++);
    *owner = (struct snap_prefix_owner){.entries = 0};
    memcpy(owner->id, id, sizeof owner->id);
    return owner;
}

static enum kv_err reserve(struct snap_prefix_table *table, const struct snap_prefix_entry *entry,
                           struct snap_prefix_owner **owner_out, struct kv_diag *diag) {
    size_t more = (size_t)entry->chain_count + entry->mark_count + 1;
    struct snap_prefix_owner *owner = need_owner(table, entry->owner);
    if (owner == NULL || !make_room(table->alloc, &owner->nodes, more) ||
        !make_room(table->alloc, &table->names, 1) ||
        (table->free == 0 && !kv_alloc_grow(table->alloc, &table->entries, &table->entry_capacity,
                                            table->entry_count + 1, sizeof *entry)))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the table of beginnings");
    *owner_out = owner;
    return KV_OK;
}

enum kv_err snap_prefix_table_add(struct snap_prefix_table *table, struct snap_prefix_entry *entry,
                                  struct kv_diag *diag) {
    struct snap_prefix_owner *owner = NULL;
    uint32_t index = 0;
    enum kv_err err = reserve(table, entry, &owner, diag);
    if (err != KV_OK) {
        release_entry(table, entry);
        return err;
    }
    if (table->free != 0) {
        index = table->free - 1;
        table->free = entry_at(table, index)->owner_index;
    } else {
        index = (uint32_t)table->entry_count++;
    }
    entry->used = 1;
    entry->owner_index = (uint32_t)(owner - owner_at(table, 0));
    *entry_at(table, index) = *entry;
    for (uint32_t i = 0; i < entry->chain_count; i++)
        add_node(&owner->nodes, entry->hashes[i], i, index);
    for (uint32_t i = 0; i < entry->mark_count; i++)
        add_node(&owner->nodes, entry->hashes[entry->chain_count + i], depth_mark, index);
    if (entry->chain_count == 0)
        add_node(&owner->nodes, 0, depth_short, index);
    add_node(&table->names, name_hash(entry->known.name), depth_name, index);
    owner->entries++;
    table->bytes += bytes_of(entry);
    *entry = (struct snap_prefix_entry){.used = 0};
    return KV_OK;
}

static void remove_entry(struct snap_prefix_table *table, uint32_t index) {
    struct snap_prefix_entry *entry = entry_at(table, index);
    struct snap_prefix_owner *owner = owner_at(table, entry->owner_index);
    for (uint32_t i = 0; i < entry->chain_count; i++)
        remove_node(&owner->nodes, entry->hashes[i], i, index);
    for (uint32_t i = 0; i < entry->mark_count; i++)
        remove_node(&owner->nodes, entry->hashes[entry->chain_count + i], depth_mark, index);
    if (entry->chain_count == 0)
        remove_node(&owner->nodes, 0, depth_short, index);
    remove_node(&table->names, name_hash(entry->known.name), depth_name, index);
    owner->entries--;
    table->bytes -= bytes_of(entry);
    release_entry(table, entry);
    entry->owner_index = table->free;
    table->free = index + 1;
}

void snap_prefix_table_remove(struct snap_prefix_table *table, const char *name) {
    uint64_t hash = name_hash(name);
    for (uint32_t at = 0; (at = next_node(&table->names, hash, depth_name, at)) != 0;) {
        uint32_t index = node_at(&table->names, at - 1)->entry;
        if (strcmp(entry_at(table, index)->known.name, name) != 0)
            continue;
        remove_entry(table, index);
        at = 0; /* the list has changed */
    }
}

const struct snap_prefix_entry *snap_prefix_table_head(const struct snap_prefix_table *table,
                                                       const char *name) {
    uint64_t hash = name_hash(name);
    for (uint32_t at = 0; (at = next_node(&table->names, hash, depth_name, at)) != 0;) {
        const struct snap_prefix_entry *entry =
            entry_at(table, node_at(&table->names, at - 1)->entry);
        if (entry->known.is_head && strcmp(entry->known.name, name) == 0)
            return entry;
    }
    return NULL;
}

void snap_prefix_table_release(struct snap_prefix_table *table) {
    for (size_t i = 0; i < table->entry_count; i++)
        release_entry(table, entry_at(table, (uint32_t)i));
    for (size_t i = 0; i < table->owner_count; i++) {
        kv_alloc_release(table->alloc, owner_at(table, (uint32_t)i)->nodes.nodes);
        kv_alloc_release(table->alloc, owner_at(table, (uint32_t)i)->nodes.buckets);
    }
    kv_alloc_release(table->alloc, table->names.nodes);
    kv_alloc_release(table->alloc, table->names.buckets);
    kv_alloc_release(table->alloc, table->entries);
    kv_alloc_release(table->alloc, table->owners);
}

/* --- searching */

struct search {
    struct snap_prefix_table *table;
    struct snap_prefix_owner *owner;
    const struct snap_prefix_wish *wish;
    struct snap_prefix_found *found;
    uint32_t count;
};

/* 1 when `a` comes before `b`. */
static int is_better(const struct snap_prefix_found *a, const struct snap_prefix_found *b) {
    int ends_a = a->is_head && a->n == a->claim;
    int ends_b = b->is_head && b->n == b->claim;
    if (a->claim != b->claim)
        return a->claim > b->claim;
    if (ends_a != ends_b)
        return ends_a;
    return a->created_ns > b->created_ns;
}

static void offer(struct search *search, const struct snap_prefix_entry *entry, uint64_t claim) {
    struct snap_prefix_found offered = entry->known;
    offered.claim = claim;
    for (uint32_t i = 0; i < search->count; i++)
        if (search->found[i].snapshot == offered.snapshot) {
            if (search->found[i].claim >= claim)
                return;
            memmove(&search->found[i], &search->found[i + 1],
                    (search->count - i - 1) * sizeof offered);
            search->count--;
            break;
        }
    uint32_t at = search->count;
    while (at > 0 && is_better(&offered, &search->found[at - 1]))
        at--;
    if (at == SNAP_PREFIX_FOUND_MAX)
        return;
    if (search->count < SNAP_PREFIX_FOUND_MAX)
        search->count++;
    memmove(&search->found[at + 1], &search->found[at], (search->count - at - 1) * sizeof offered);
    search->found[at] = offered;
}

static const struct snap_prefix_entry *look_at(struct search *search, uint32_t node) {
    search->owner->looked_at++;
    return entry_at(search->table, node_at(&search->owner->nodes, node - 1)->entry);
}

/* From token `at` on, which is ids[skip] of the entry. */
static uint64_t agree_from(const struct search *search, const struct snap_prefix_entry *entry,
                           uint64_t at, uint32_t skip) {
    while (skip < entry->id_count && at < search->wish->count &&
           search->wish->ids[at] == entry->ids[skip]) {
        skip++;
        at++;
    }
    return at;
}

static void search_depth(struct search *search, uint64_t hash, uint32_t depth, int deepest) {
    uint64_t at = LAYOUT_SINK_TOKENS + (uint64_t)depth * LAYOUT_BLOCK_TOKENS;
    for (uint32_t node = 0; (node = next_node(&search->owner->nodes, hash, depth, node)) != 0;) {
        const struct snap_prefix_entry *entry = look_at(search, node);
        if (entry->known.blocks == depth)
            offer(search, entry, agree_from(search, entry, at, LAYOUT_SINK_TOKENS));
        else if (deepest)
            offer(search, entry, at);
    }
}

static void search_chain(struct search *search) {
    const struct snap_prefix_wish *wish = search->wish;
    uint64_t chain[TAIL_BLOCKS + 1] = {0}; /* of the newest depths, by depth modulo their number */
    uint32_t depth = 0;
    if (wish->count < LAYOUT_SINK_TOKENS)
        return;
    uint64_t hash = snap_prefix_table_first(search->table, wish->owner, wish->ids);
    while (next_node(&search->owner->nodes, hash, depth, 0) != 0) {
        chain[depth % (TAIL_BLOCKS + 1)] = hash;
        uint64_t at = LAYOUT_SINK_TOKENS + (uint64_t)depth++ * LAYOUT_BLOCK_TOKENS;
        if (at + LAYOUT_BLOCK_TOKENS > wish->count)
            break;
        uint8_t bytes[RECORD_IDS_BYTES];
        for (uint32_t i = 0; i < LAYOUT_BLOCK_TOKENS; i++)
            kv_put_u32(bytes + 4 * i, wish->ids[at + i]);
        const struct kv_digest digest = kv_digest_of(bytes, sizeof bytes);
        hash = snap_prefix_table_link(search->table, wish->owner, hash, &digest);
    }
    for (uint32_t back = 1; back <= TAIL_BLOCKS + 1 && back <= depth; back++)
        search_depth(search, chain[(depth - back) % (TAIL_BLOCKS + 1)], depth - back, back == 1);
}

uint32_t snap_prefix_table_find(struct snap_prefix_table *table,
                                const struct snap_prefix_wish *wish,
                                struct snap_prefix_found found_out[SNAP_PREFIX_FOUND_MAX]) {
    struct search search = {.table = table, .wish = wish, .found = found_out};
    search.owner = snap_prefix_table_owner(table, wish->owner);
    if (search.owner == NULL)
        return 0;
    search_chain(&search);
    for (uint32_t node = 0; (node = next_node(&search.owner->nodes, 0, depth_short, node)) != 0;) {
        const struct snap_prefix_entry *entry = look_at(&search, node);
        uint64_t claim = agree_from(&search, entry, 0, 0);
        if (claim > 0)
            offer(&search, entry, claim);
    }
    for (uint32_t i = 0; i < wish->mark_count; i++)
        for (uint32_t node = 0;
             (node = next_node(&search.owner->nodes, wish->marks[i].hash & table->hash_mask,
                               depth_mark, node)) != 0;)
            offer(&search, look_at(&search, node), wish->marks[i].tokens);
    return search.count;
}
