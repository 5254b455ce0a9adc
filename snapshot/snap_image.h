/* snapshot/snap_image.h - the image of a stored snapshot, read so that it can be written again.
 *
 * Responsible for: finding, reading and checking one image; putting one with its record.
 * Not responsible for: what is changed in between (snap_tree.c).
 *
 * Threads: the one that owns batches.
 * Units: bytes.
 */
#ifndef SNAPSHOT_SNAP_IMAGE_H
#define SNAPSHOT_SNAP_IMAGE_H

#include "engine/record.h"
#include "store/store.h"
#include "store/store_batch.h"

struct snap_image {
    struct record_snapshot record;
    struct image image; /* ids of sealed blocks are left zero: their own records have them */
    uint8_t *bytes;     /* encoded by snap_image_encode */
    size_t size;
};
/* NOT_FOUND, CORRUPT (also a root that differs), VERSION, IO, NOMEM. Release in every case. */
enum kv_err snap_image_read(struct store *store, const struct kv_alloc *alloc, uint64_t snapshot,
                            struct snap_image *out, struct kv_diag *diag);
/* Image and record as they are now become bytes and root; the record's name and place follow the
 * image. NOMEM. */
enum kv_err snap_image_encode(struct snap_image *image, const struct kv_alloc *alloc,
                              struct kv_diag *diag);
/* Puts record and bytes under `snapshot`. */
enum kv_err snap_image_put(struct store_batch *batch, uint64_t snapshot,
                           const struct snap_image *image, struct kv_diag *diag);
void snap_image_release(struct snap_image *image, const struct kv_alloc *alloc);

#endif
