/* snapshot/snap_image.c - the image of a stored snapshot, read so that it can be written again.
 *
 * Responsible for: what snap_image.h promises.
 * Not responsible for: pages and blocks.
 */
#include "snapshot/snap_image.h"

#include "store/store_read.h"

#include <string.h>

/* An image grows with tokens, roles, tiers and needles; beyond this it was not written by us. */
static const uint64_t image_bytes_max = (uint64_t)64 << 20;

static enum kv_err read_extent(struct store *store, const struct kv_alloc *alloc,
                               const struct store_extent *extent, uint8_t **bytes_out,
                               struct kv_diag *diag) {
    if (extent->kind != RECORD_KIND_IMAGE || extent->raw_bytes > image_bytes_max)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the snapshot record has no image");
    const struct store_read_whole whole = {
        .extent = extent, .alloc = alloc, .label = "session image"};
    return store_read_whole(store, &whole, bytes_out, diag);
}

enum kv_err snap_image_read(struct store *store, const struct kv_alloc *alloc, uint64_t snapshot,
                            struct snap_image *out, struct kv_diag *diag) {
    struct record_key key = record_key_snapshot(snapshot);
    struct store_record stored = {0};
    uint8_t *bytes = NULL;
    memset(out, 0, sizeof *out);
    image_init(&out->image);
    enum kv_err err = store_get(store, key.bytes, key.size, &stored, diag);
    if (err != KV_OK)
        return err;
    KV_TRY(record_get_snapshot(stored.value, stored.value_bytes, &out->record, diag));
    if (stored.extent_count != 1)
        KV_TRY(kv_diag_set(diag, KV_ERR_CORRUPT, "the snapshot record has no image"));
    KV_TRY(read_extent(store, alloc, &stored.extents[0], &bytes, diag));
    size_t size = stored.extents[0].raw_bytes;
    struct kv_digest root = image_root(bytes, size);
    if (!kv_digest_equal(&root, &out->record.root))
        KV_TRY(kv_diag_set(diag, KV_ERR_CORRUPT, "the image is not the one that was saved"));
    KV_TRY(image_decode(bytes, size, alloc, &out->image, diag));
    if (strcmp(out->image.name, out->record.name) != 0)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "the image is of session %s, its record of %s",
                          out->image.name, out->record.name);
done:
    if (err != KV_OK)
        kv_diag_prefix(diag, "snapshot %016llx", (unsigned long long)snapshot);
    kv_alloc_release(alloc, bytes);
    store_record_release(store, &stored);
    return err;
}

enum kv_err snap_image_encode(struct snap_image *image, const struct kv_alloc *alloc,
                              struct kv_diag *diag) {
    kv_alloc_release(alloc, image->bytes);
    image->bytes = NULL;
    enum kv_err err = image_encode(&image->image, alloc, &image->bytes, &image->size, diag);
    if (err != KV_OK)
        return err;
    memcpy(image->record.name, image->image.name, sizeof image->record.name);
    image->record.lineage = image->image.lineage;
    image->record.created_ns = image->image.created_ns;
    image->record.root = image_root(image->bytes, image->size);
    return KV_OK;
}

enum kv_err snap_image_put(struct store_batch *batch, uint64_t snapshot,
                           const struct snap_image *image, struct kv_diag *diag) {
    const struct iovec piece = {image->bytes, image->size};
    const struct store_part part = {RECORD_KIND_IMAGE, STORE_ZSTD, &piece, 1, 0};
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_snapshot(snapshot);
    const struct store_put put = {.key = key.bytes,
                                  .key_bytes = key.size,
                                  .value = value,
                                  .value_bytes = record_put_snapshot(&image->record, value),
                                  .parts = &part,
                                  .part_count = 1};
    return store_batch_put(batch, &put, diag);
}

void snap_image_release(struct snap_image *image, const struct kv_alloc *alloc) {
    kv_alloc_release(alloc, image->bytes);
    image->bytes = NULL;
    image_release(&image->image, alloc);
}
