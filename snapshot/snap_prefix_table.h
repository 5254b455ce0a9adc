/* snapshot/snap_prefix_table.h - entries, and the hashes under which an owner finds his own.
 *
 * Responsible for: one table for each owner and one for names; adding, removing, searching.
 * Not responsible for: the store (snap_prefix.c).
 *
 * Threads: one.
 * Units: tokens, blocks.
 */
#ifndef SNAPSHOT_SNAP_PREFIX_TABLE_H
#define SNAPSHOT_SNAP_PREFIX_TABLE_H

#include "snapshot/snap_prefix.h"

/* One snapshot. `ids` are the first 64 tokens (or all, where there are fewer) and those behind the
 * last block; hashes are the chain over 0 … blocks blocks, then the marks. */
struct snap_prefix_entry {
    struct snap_prefix_found known; /* but for the claim */
    uint8_t owner[IMAGE_OWNER_BYTES];
    uint32_t *ids;
    uint32_t id_count;
    uint64_t *hashes;
    uint32_t chain_count, mark_count; /* of hashes; no chain with fewer than 64 tokens */
    uint32_t owner_index;
    int used;
};

/* Nodes of one hash table: which entry has this hash at this depth. */
struct snap_prefix_node {
    uint64_t hash;
    uint32_t depth, entry, next; /* next: a node's index + 1, 0 for none */
};
struct snap_prefix_nodes {
    void *nodes, *buckets; /* of struct snap_prefix_node, of u32: index + 1 of the first */
    size_t capacity, count, bucket_count;
    uint32_t free; /* index + 1 of the first node that is not in use */
};
struct snap_prefix_owner {
    uint8_t id[IMAGE_OWNER_BYTES];
    struct snap_prefix_nodes nodes;
    uint64_t entries, looked_at;
};
struct snap_prefix_table {
    const struct kv_alloc *alloc;
    uint64_t hash_mask;
    void *entries; /* of struct snap_prefix_entry */
    size_t entry_count, entry_capacity;
    uint32_t free; /* index + 1 of the first entry that is not in use, through owner_index */
    void *owners;  /* of struct snap_prefix_owner */
    size_t owner_count, owner_capacity;
    struct snap_prefix_nodes names;
    uint64_t bytes;
};

/* Takes over what `entry` owns, also on NOMEM, when it is freed. */
enum kv_err snap_prefix_table_add(struct snap_prefix_table *table, struct snap_prefix_entry *entry,
                                  struct kv_diag *diag);
/* Every entry with the name goes. */
void snap_prefix_table_remove(struct snap_prefix_table *table, const char *name);
/* The entry of a name's head; NULL for none. */
const struct snap_prefix_entry *snap_prefix_table_head(const struct snap_prefix_table *table,
                                                       const char *name);
uint32_t snap_prefix_table_find(struct snap_prefix_table *table,
                                const struct snap_prefix_wish *wish,
                                struct snap_prefix_found found_out[SNAP_PREFIX_FOUND_MAX]);
struct snap_prefix_owner *snap_prefix_table_owner(const struct snap_prefix_table *table,
                                                  const uint8_t *owner);
void snap_prefix_table_release(struct snap_prefix_table *table);

/* The chain: over the first 64 tokens, then over one block's ids more. */
uint64_t snap_prefix_table_first(const struct snap_prefix_table *table, const uint8_t *owner,
                                 const uint32_t *ids);
uint64_t snap_prefix_table_link(const struct snap_prefix_table *table, const uint8_t *owner,
                                uint64_t before, const struct kv_digest *ids);

#endif
