/* restore/rest_plan.h - what a wake needs, from records and image alone.
 *
 * Responsible for: finding every record of a session's head snapshot and checking that they are
 * the ones the image speaks of, before any slot is reserved or any plane is read.
 * Not responsible for: planes and pages themselves (rest_load.h).
 *
 * Threads: any; one owner.
 * Units: bytes, tokens.
 * Errors: NOT_FOUND (no such session), VERSION, CORRUPT naming record and stream, IO, NOMEM.
 */
#ifndef RESTORE_REST_PLAN_H
#define RESTORE_REST_PLAN_H

#include "engine/record.h"
#include "store/store.h"
#include "store/store_read.h"

struct rest_plan_block {
    uint64_t lineage; /* that owns it: the session's, or one that it was cut from */
    uint32_t extent_count;
    struct store_extent extents[RECORD_BLOCK_EXTENTS_MAX]; /* in stored order, ids first */
    struct record_block record;
};

struct rest_plan {
    const struct kv_alloc *alloc;
    int ram; /* set before: what is kept in memory is taken from there */
    uint64_t snapshot;
    int pinned;
    uint8_t owner[IMAGE_OWNER_BYTES];
    struct record_snapshot record;
    struct image image;
    struct rest_plan_block *blocks; /* [image.block_count] */
    struct store_extent image_extent, sinks, pages[IMAGE_PAGES_MAX];
    uint64_t image_stored_bytes;
    int has_ids; /* the image has the blocks' token ids, too */
    /* Of the image; read_bytes and ram_bytes with the blocks' token ids. */
    struct store_read_stats read;
    uint32_t digests_checked;
};

/* The image alone: name -> snapshot -> image, root digest checked. Release in every case.
 * `snapshot` is one of that session's, or 0 for its head. */
enum kv_err rest_plan_image(struct store *store, const struct kv_alloc *alloc, const char *name,
                            uint64_t snapshot, struct rest_plan *plan_out, struct kv_diag *diag);
/* The same of the older snapshot that the record of `newer` names as its parent. */
enum kv_err rest_plan_older(struct store *store, const struct rest_plan *newer,
                            struct rest_plan *plan_out, struct kv_diag *diag);
/* Adds blocks and pages to a plan that has its image: nothing but the index is asked. */
enum kv_err rest_plan_places(struct store *store, struct rest_plan *plan, struct kv_diag *diag);
/* And the blocks' token ids to the image, which are many small reads (rest_load.h does without). */
enum kv_err rest_plan_ids(struct store *store, struct rest_plan *plan, struct kv_diag *diag);
/* Both. */
enum kv_err rest_plan_records(struct store *store, struct rest_plan *plan, struct kv_diag *diag);
void rest_plan_release(struct rest_plan *plan);

/* The one place where restore accepts or refuses a digest, of a record or of bytes: CORRUPT naming
 * `what` and both. Any thread. */
enum kv_err rest_plan_check(const char *what, const struct kv_digest *expected,
                            const struct kv_digest *found, struct kv_diag *diag);

/* The policy in force and the tier that block `index` is read at: what the policy gives, or less
 * where planes have left the store. */
const struct image_policy *rest_plan_policy(const struct rest_plan *plan);
enum layout_tier rest_plan_tier(const struct rest_plan *plan, uint32_t index);
/* Blocks that are read at less than their policy gives; known once the records are. */
uint32_t rest_plan_degraded(const struct rest_plan *plan);
/* The extent of `stream` in a block, NULL when it has none. */
const struct store_extent *rest_plan_extent(const struct rest_plan_block *block,
                                            enum layout_stream stream);

/* Which lineage owns block `index` of `lineage`. CORRUPT, VERSION, IO, NOMEM. */
enum kv_err rest_plan_owner(struct store *store, uint64_t lineage, uint32_t index,
                            uint64_t *owner_out, struct kv_diag *diag);
/* One block record, checked against layout: kinds, sizes, position. */
struct rest_plan_where {
    uint64_t lineage;
    uint32_t index;
    const struct layout_geometry *geometry;
    uint32_t streams; /* that must be there, or must have been dropped in order; mask */
};
enum kv_err rest_plan_read_block(struct store *store, const struct rest_plan_where *where,
                                 struct rest_plan_block *block_out, struct kv_diag *diag);

#endif
