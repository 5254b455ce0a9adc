/* snapshot/snap_lower.c - planes out of block records, digests left behind.
 *
 * Responsible for: the contract of snap_lower.h, in agreement with this invariant (6 to 8 stand in
 * snap_commit.c):
 *
 *   9. A plane leaves a block record only if the ladder's floor does not need it, every plane above
 *      it has left before or leaves with it, and its digest stays in the record's value: a session
 *      is never less than its floor, and its block chain never changes.
 *
 * Not responsible for: whose turn it is.
 */
#include "snapshot/snap_lower.h"

#include "store/base/bytes.h"
#include "store/store_read.h"

#include <string.h>

enum { BATCH_BLOCKS = 256 };

/* What leaves first; recipe v2 keeps KL. */
static const uint32_t ladder[] = {1u << LAYOUT_VX, 1u << LAYOUT_KL, 1u << LAYOUT_VR2,
                                  1u << LAYOUT_VR1};
enum { STEPS = sizeof ladder / sizeof ladder[0] };

/* The streams that must leave with `bad` so that a tier of the ladder remains; 0 when there is none
 * (a stream of the floor is bad). */
static uint32_t mask_of(const struct record_block *record, uint32_t bad) {
    uint32_t mask = 0;
    uint32_t all = 0;
    for (size_t i = 0; i < STEPS; i++) {
#ifndef BREAK_LOWER_V2
        if (record->keeps_k && ladder[i] == 1u << LAYOUT_KL)
            continue;
#endif
        all |= ladder[i];
        if (bad & ladder[i])
            mask |= all;
    }
    return (bad & ~mask) == 0 ? mask : 0;
}

/* Keeps the list of what has left in the order of numbers. */
static int add_dropped(struct record_block *record, const struct store_extent *extent) {
    uint32_t at = record->dropped_count;
    if (at == RECORD_DROPPED_MAX)
        return 0;
    for (; at > 0 && record->dropped_kinds[at - 1] > extent->kind; at--) {
        record->dropped_kinds[at] = record->dropped_kinds[at - 1];
        record->dropped[at] = record->dropped[at - 1];
    }
    record->dropped_kinds[at] = extent->kind;
    record->dropped[at] = extent->digest;
#ifdef BREAK_LOWER_DIGEST
    memset(&record->dropped[at], 0, sizeof record->dropped[at]);
#endif
    record->dropped_count++;
    return 1;
}

/* In gc->batch; adds to *sum. */
static enum kv_err lower_block(const struct snap_gc *gc, const struct record_key *key,
                               uint32_t streams, struct snap_lower_sum *sum, struct kv_diag *diag) {
    struct store_record stored;
    struct record_block record;
    uint64_t bytes = 0;
    uint32_t leaves = 0;
    enum kv_err err = store_get(gc->store, key->bytes, key->size, &stored, diag);
    if (err != KV_OK)
        return err;
    err = record_get_block(stored.value, stored.value_bytes, &record, diag);
    if (err == KV_OK)
        streams = mask_of(&record, streams);
    for (uint32_t i = 0; err == KV_OK && i < stored.extent_count; i++) {
        const struct store_extent *extent = &stored.extents[i];
        if (extent->kind >= LAYOUT_STREAM_COUNT || (streams >> extent->kind & 1) == 0)
            continue;
        if (!add_dropped(&record, extent))
            err = kv_diag_set(diag, KV_ERR_CORRUPT, "a block has given up more than it had");
        leaves |= 1u << extent->kind;
        bytes += kv_round_up(extent->stored_bytes, STORE_PAGE_BYTES);
    }
    store_record_release(gc->store, &stored);
    if (err != KV_OK || leaves == 0)
        return err;
    uint8_t value[RECORD_OUT_BYTES];
    const struct store_put put = {.key = key->bytes,
                                  .key_bytes = key->size,
                                  .value = value,
                                  .value_bytes = record_put_block(&record, value)};
    err = store_batch_shrink(gc->batch, &put, leaves, diag);
    if (err == KV_OK) {
        sum->blocks++;
        sum->bytes += bytes;
    }
    return err;
}

/* One batch. A block that cannot be read in the index is not ours to judge: it is left. */
static enum kv_err lower_some(const struct snap_lower_args *args, uint32_t first, uint32_t end,
                              struct snap_lower_sum *sum, struct kv_diag *diag) {
    struct snap_gc gc = {.store = args->store, .alloc = args->alloc};
    struct snap_lower_sum own = {0};
    enum kv_err err = store_batch_begin_removal(args->store, &gc.batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(gc.batch, STORE_CAUSE_REMOVAL);
    for (uint32_t b = first; err == KV_OK && b < end; b++) {
        const struct record_key key = record_key_block(args->lineage, b);
        struct kv_diag why = {""};
        err = lower_block(&gc, &key, args->streams, &own, &why);
        if (err == KV_ERR_NOT_FOUND || err == KV_ERR_CORRUPT || err == KV_ERR_VERSION)
            err = KV_OK;
        else if (err != KV_OK)
            kv_diag_set(diag, err, "%s", why.text);
    }
    if (err != KV_OK) {
        store_batch_abandon(gc.batch);
        return err;
    }
    err = store_batch_commit(gc.batch, NULL, diag);
    if (err == KV_OK) {
        sum->blocks += own.blocks;
        sum->bytes += own.bytes;
    }
    return err;
}

enum kv_err snap_lower_lineage(const struct snap_lower_args *args, struct snap_lower_sum *sum_out,
                               struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    memset(sum_out, 0, sizeof *sum_out);
    for (uint32_t b = 0; err == KV_OK && b < args->blocks; b += BATCH_BLOCKS) {
        uint32_t end = args->blocks - b < BATCH_BLOCKS ? args->blocks : b + BATCH_BLOCKS;
        err = lower_some(args, b, end, sum_out, diag);
    }
    return err;
}

/* --- a block that is damaged */

struct examining {
    const struct snap_lower_look *look;
    struct store_record stored;
    struct store_read reads[RECORD_BLOCK_EXTENTS_MAX];
    struct iovec pieces[RECORD_BLOCK_EXTENTS_MAX];
    struct snap_lower_found *found;
    struct kv_diag *diag;
};

static enum kv_err read_all(struct examining *examining) {
    const struct kv_alloc *alloc = examining->look->alloc;
    uint32_t count = examining->stored.extent_count;
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        const struct store_extent *extent = &examining->stored.extents[i];
        void *bytes = kv_alloc_aligned(alloc, extent->raw_bytes, STORE_PAGE_BYTES);
        examining->pieces[i] = (struct iovec){bytes, extent->raw_bytes};
        examining->reads[i] = (struct store_read){
            .extent = extent, .pieces = &examining->pieces[i], .piece_count = 1, .verify = 1};
        if (bytes == NULL)
            err = kv_diag_set(examining->diag, KV_ERR_NOMEM, "no memory to read a block");
    }
    if (err == KV_OK) {
        const struct store_read_args args = {.reads = examining->reads, .count = count};
        (void)store_read(examining->look->store, &args, NULL, NULL);
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct store_read *read = &examining->reads[i];
        /* What a read that timed out may still write into must not find other owners. */
        if (read->in_doubt && err == KV_OK)
            err = kv_diag_set(examining->diag, KV_ERR_IO, "a read of the block timed out");
        if (!read->in_doubt)
            kv_alloc_release(alloc, examining->pieces[i].iov_base);
        if (err == KV_OK && read->result == KV_ERR_NOMEM)
            err = kv_diag_set(examining->diag, KV_ERR_NOMEM, "no memory to read a block");
    }
    return err;
}

static void judge(struct examining *examining, const struct record_block *record) {
    struct snap_lower_found *found = examining->found;
    uint32_t has_vx = record_dropped(record) >> LAYOUT_VX & 1;
    for (uint32_t i = 0; i < examining->stored.extent_count; i++) {
        uint8_t kind = examining->stored.extents[i].kind;
        has_vx |= kind == LAYOUT_VX;
        if (examining->reads[i].result != KV_OK)
            found->bad |= 1u << (kind < LAYOUT_STREAM_COUNT ? kind : LAYOUT_META);
    }
    const struct image_policy policy = {
        .recipe = record->keeps_k ? IMAGE_RECIPE_V2 : IMAGE_RECIPE_V3, .top_k8v8 = has_vx != 0};
    found->drop = mask_of(record, found->bad) & ~(has_vx ? 0 : 1u << LAYOUT_VX);
    found->top =
        image_tier_without(&policy, image_top(&policy), found->drop | record_dropped(record));
}

enum kv_err snap_lower_examine(const struct snap_lower_look *look,
                               struct snap_lower_found *found_out, struct kv_diag *diag) {
    struct examining examining = {.look = look, .found = found_out, .diag = diag};
    struct record_block record;
    struct record_key key = {.size = (uint32_t)look->key_bytes};
    struct snap_gc gc = {.store = look->store, .alloc = look->alloc};
    struct snap_lower_sum sum = {0};
    memset(found_out, 0, sizeof *found_out);
    if (look->key_bytes != 13 || look->key[0] != 'b')
        return kv_diag_set(diag, KV_ERR_INVALID, "not a block");
    memcpy(key.bytes, look->key, look->key_bytes);
    enum kv_err err = store_get(look->store, key.bytes, key.size, &examining.stored, diag);
    if (err != KV_OK)
        return err;
    err = record_get_block(examining.stored.value, examining.stored.value_bytes, &record, diag);
    if (err == KV_OK && examining.stored.extent_count > RECORD_BLOCK_EXTENTS_MAX)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "%u extents", examining.stored.extent_count);
    if (err == KV_OK) {
        store_hold(look->store);
        err = read_all(&examining);
        store_unhold(look->store);
    }
    if (err == KV_OK)
        judge(&examining, &record);
    store_record_release(look->store, &examining.stored);
    if (err != KV_OK || !look->keep || found_out->drop == 0)
        return err;
    err = store_batch_begin_removal(look->store, &gc.batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(gc.batch, STORE_CAUSE_CARE);
    err = lower_block(&gc, &key, found_out->drop, &sum, diag);
    if (err != KV_OK) {
        store_batch_abandon(gc.batch);
        return err;
    }
    err = store_batch_commit(gc.batch, NULL, diag);
    found_out->kept = err == KV_OK;
    return err;
}
