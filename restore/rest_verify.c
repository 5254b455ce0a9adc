/* restore/rest_verify.c - every byte of a stored session, read and compared, without an engine.
 *
 * Responsible for: image, root, block chain and the digest of every extent of a head snapshot.
 * Not responsible for: logits (restore_wake proves those), or repairing anything.
 */
#include "restore/rest_plan.h"
#include "restore/restore.h"

static enum kv_err check_record(struct store *store, const struct record_key *key,
                                struct store_read_stats *stats, struct kv_diag *diag) {
    return store_read_check(store, key->bytes, key->size, stats, diag);
}

static enum kv_err check_all(struct store *store, const struct rest_plan *plan,
                             struct store_read_stats *stats, struct kv_diag *diag) {
    const struct image *image = &plan->image;
    struct record_key key = record_key_snapshot(plan->snapshot);
    enum kv_err err = check_record(store, &key, stats, diag);
    for (uint32_t b = 0; err == KV_OK && b < image->block_count; b++) {
        key = record_key_block(image->lineage, b);
        err = check_record(store, &key, stats, diag);
        if (err != KV_OK)
            kv_diag_prefix(diag, "session %s, block %u", image->name, b);
    }
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
    return err;
}

enum kv_err restore_verify(struct store *store, const struct kv_alloc *alloc, const char *name,
                           struct restore_check *check_out, struct kv_diag *diag) {
    struct rest_plan plan = {0};
    struct store_read_stats stats = {0};
    struct restore_check check = {0};
    enum kv_err err = KV_OK;
    store_hold(store);
    KV_TRY(rest_plan_image(store, alloc, name, &plan, diag));
    KV_TRY(rest_plan_records(store, &plan, diag));
    KV_TRY(check_all(store, &plan, &stats, diag));
    check.extents = (uint32_t)stats.digests;
    check.blocks = plan.image.block_count;
    check.pages = plan.image.page_count + 1;
    check.stored_bytes = stats.read_bytes;
    *check_out = check;
done:
    store_unhold(store);
    rest_plan_release(&plan);
    return err;
}
