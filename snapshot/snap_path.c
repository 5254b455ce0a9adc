/* snapshot/snap_path.c - whose blocks a lineage reads.
 *
 * Responsible for: what snap_path.h promises.
 * Not responsible for: writing anything.
 */
#include "snapshot/snap_path.h"

enum kv_err snap_path_get(void *store, uint64_t lineage, struct record_lineage *out,
                          struct kv_diag *diag) {
    struct record_key key = record_key_lineage(lineage);
    struct store_record stored;
    enum kv_err err = store_get(store, key.bytes, key.size, &stored, diag);
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "lineage %016llx is missing from the index",
                           (unsigned long long)lineage);
    if (err != KV_OK)
        return err;
    err = record_get_lineage(stored.value, stored.value_bytes, out, diag);
    store_record_release(store, &stored);
    return err;
}

enum kv_err snap_path_owner(struct store *store, uint64_t lineage, uint32_t count,
                            uint64_t *owner_out, struct kv_diag *diag) {
    struct record_path path = {.next = lineage, .first = count};
    *owner_out = 0;
    if (count == 0)
        return KV_OK;
    enum kv_err err = record_path_next(&path, snap_path_get, store, diag);
    if (err == KV_OK)
        *owner_out = path.lineage;
    return err;
}

/* One block's link of the chain. */
static enum kv_err add_link(struct store *store, uint64_t owner, uint32_t block,
                            struct kv_digest *chain, struct kv_diag *diag) {
    struct record_key key = record_key_block(owner, block);
    struct store_record stored;
    uint8_t kinds[RECORD_BLOCK_EXTENTS_MAX];
    struct kv_digest digests[RECORD_BLOCK_EXTENTS_MAX];
    enum kv_err err = store_get(store, key.bytes, key.size, &stored, diag);
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "block %u is missing from the index", block);
    if (err != KV_OK)
        return err;
    struct record_block record;
    uint32_t count = stored.extent_count;
    err = record_get_block(stored.value, stored.value_bytes, &record, diag);
    for (uint32_t i = 0; i < count && i < RECORD_BLOCK_EXTENTS_MAX; i++) {
        kinds[i] = stored.extents[i].kind;
        digests[i] = stored.extents[i].digest;
    }
    store_record_release(store, &stored);
    if (err != KV_OK)
        return err;
    if (count > RECORD_BLOCK_EXTENTS_MAX)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "block %u has %u extents", block, count);
    *chain = record_chain_block(chain, &key, &record, kinds, digests, count);
    return KV_OK;
}

enum kv_err snap_path_chain(struct store *store, uint64_t lineage, uint32_t count,
                            struct kv_digest *chain_out, struct kv_diag *diag) {
    struct kv_digest chain = {{0}};
    /* The path goes down and the chain goes up; a path is short. */
    for (uint32_t at = 0; at < count;) {
        struct record_path path = {.next = lineage, .first = count};
        enum kv_err err = KV_OK;
        do
            err = record_path_next(&path, snap_path_get, store, diag);
        while (err == KV_OK && path.first > at);
        for (; err == KV_OK && at < path.end; at++)
            err = add_link(store, path.lineage, at, &chain, diag);
        if (err != KV_OK)
            return err;
    }
    *chain_out = chain;
    return KV_OK;
}
