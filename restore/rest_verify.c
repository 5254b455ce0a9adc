/* restore/rest_verify.c - every byte of a stored session, read and compared, without an engine.
 *
 * Responsible for: image, root, block chain and the digest of every extent of a session's head and
 * of the older snapshots that stay.
 * Not responsible for: logits (restore_wake proves those), or repairing anything.
 */
#include "restore/rest_plan.h"
#include "restore/restore.h"

#include <string.h>

/* A chain of parents that is longer is a circle. */
enum { SNAPSHOTS_MAX = 1 << 20 };

static enum kv_err check_record(struct store *store, const struct record_key *key,
                                struct store_read_stats *stats, struct kv_diag *diag) {
    enum kv_err err = store_read_check(store, key->bytes, key->size, stats, diag);
    /* It was there when its snapshot was looked up. */
    return err == KV_ERR_NOT_FOUND
               ? kv_diag_set(diag, KV_ERR_CORRUPT, "its record is missing from the index")
               : err;
}

/* Pages first: a save beside this takes them away, and blocks stay. Blocks below `first_block` have
 * been read for a newer snapshot. */
static enum kv_err check_all(struct store *store, const struct rest_plan *plan,
                             uint32_t first_block, struct store_read_stats *stats,
                             struct kv_diag *diag) {
    const struct image *image = &plan->image;
    struct record_key key = record_key_snapshot(plan->snapshot);
    enum kv_err err = check_record(store, &key, stats, diag);
    for (uint32_t i = 0; err == KV_OK && i <= image->page_count; i++) {
        const struct image_page *page = i == 0 ? &image->sinks : &image->pages[i - 1];
        key = record_key_page(page->page_id);
        err = check_record(store, &key, stats, diag);
        if (err != KV_OK)
            kv_diag_prefix(diag,
                           i == 0 ? "session %s, the sinks%.0llu"
                                  : "session %s, the page at position %llu",
                           image->name, (unsigned long long)page->first);
    }
    for (uint32_t b = first_block; err == KV_OK && b < image->block_count; b++) {
        key = record_key_block(plan->blocks[b].lineage, b);
        err = check_record(store, &key, stats, diag);
        if (err != KV_OK)
            kv_diag_prefix(diag, "session %s, block %u", image->name, b);
    }
    return err;
}

/* Snapshots share the first blocks that the same lineages own. */
static uint32_t blocks_done(const struct rest_plan *plan, const struct rest_plan *newer) {
    uint32_t b = 0;
    while (b < newer->image.block_count && b < plan->image.block_count &&
           newer->blocks[b].lineage == plan->blocks[b].lineage)
        b++;
    return b;
}

static enum kv_err check_snapshot(struct store *store, struct rest_plan *plan,
                                  const struct rest_plan *newer, struct restore_check *check,
                                  struct kv_diag *diag) {
    struct store_read_stats stats = {0};
    enum kv_err err = rest_plan_records(store, plan, diag);
    uint32_t first_block = err == KV_OK && newer != NULL ? blocks_done(plan, newer) : 0;
    if (err == KV_OK)
        err = check_all(store, plan, first_block, &stats, diag);
    if (err != KV_OK)
        return err;
    check->snapshots++;
    check->extents += (uint32_t)stats.digests;
    check->blocks += plan->image.block_count - first_block;
    check->pages += plan->image.page_count + 1;
    check->stored_bytes += stats.read_bytes;
    return KV_OK;
}

static enum kv_err verify_once(struct store *store, const struct kv_alloc *alloc, const char *name,
                               struct restore_check *check_out, struct kv_diag *diag) {
    struct rest_plan plan = {0}, older = {0};
    struct restore_check check = {0};
    enum kv_err err = KV_OK;
    store_hold(store);
    KV_TRY(rest_plan_image(store, alloc, name, 0, &plan, diag));
    KV_TRY(check_snapshot(store, &plan, NULL, &check, diag));
#ifndef BREAK_OLDER
    while (plan.record.parent != 0 && check.snapshots < SNAPSHOTS_MAX) {
        KV_TRY(rest_plan_older(store, &plan, &older, diag));
        err = check_snapshot(store, &older, &plan, &check, diag);
        if (err != KV_OK)
            kv_diag_prefix(diag, "older snapshot %016llx", (unsigned long long)older.snapshot);
        KV_TRY(err);
        rest_plan_release(&plan);
        plan = older;
        memset(&older, 0, sizeof older);
    }
#endif
    *check_out = check;
done:
    store_unhold(store);
    rest_plan_release(&older);
    rest_plan_release(&plan);
    return err;
}

enum kv_err restore_verify(struct store *store, const struct kv_alloc *alloc, const char *name,
                           struct restore_check *check_out, struct kv_diag *diag) {
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    while (store_look(store, &look, err, diag))
        err = verify_once(store, alloc, name, check_out, diag);
    return err;
}
