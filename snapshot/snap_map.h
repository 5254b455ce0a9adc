/* snapshot/snap_map.h - which records the stored sessions use, all at once.
 *
 * Responsible for: following every name through its snapshots to pages, blocks and lineage, and
 * answering who uses a record.
 * Not responsible for: deleting (snap_care.c), judging (snap_fsck.c).
 *
 * Threads: one owner; batches must not commit while it is made.
 * Units: counts.
 */
#ifndef SNAPSHOT_SNAP_MAP_H
#define SNAPSHOT_SNAP_MAP_H

#include "engine/record.h"
#include "store/store.h"

/* One use of a record by a snapshot. */
struct snap_map_use {
    uint8_t kind; /* first byte of the key: 's', 'p' or 'l' */
    uint64_t id;
    uint32_t name;   /* index into names */
    uint32_t blocks; /* of an 'l' use: blocks that the snapshot counts */
    int direct;      /* of an 'l' use: the snapshot's own lineage, not one that it was cut from */
};
struct snap_map_name {
    char text[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t lineage; /* open */
    uint64_t snapshot, updated_ns;
    int pinned;
    int may_expire;
};
struct snap_map {
    const struct kv_alloc *alloc;
    struct snap_map_name *names;
    size_t name_count, name_capacity;
    struct snap_map_use *uses; /* by kind, then id */
    size_t use_count, use_capacity;
};

/* A chain that cannot be followed to its end; `record` is the key at which it breaks. */
typedef void (*snap_map_broken)(void *context, const char *name, const struct record_key *record,
                                const char *text);

/* Chains that break are told and left where they break. IO, NOMEM. Released in every case. */
enum kv_err snap_map_make(struct store *store, const struct kv_alloc *alloc, snap_map_broken broken,
                          void *context, struct snap_map *out, struct kv_diag *diag);
void snap_map_release(struct snap_map *map);

/* The first use of (kind, id) and how many follow; NULL with 0. */
const struct snap_map_use *snap_map_find(const struct snap_map *map, uint8_t kind, uint64_t id,
                                         size_t *count_out);
/* Largest number of blocks of this lineage that a snapshot reads. */
uint32_t snap_map_blocks(const struct snap_map *map, uint64_t lineage);

/* Kind, id and block of a key; 0 when it is not one of a session's. */
int snap_map_key(const uint8_t *key, size_t bytes, uint8_t *kind_out, uint64_t *id_out,
                 uint32_t *block_out);

#endif
