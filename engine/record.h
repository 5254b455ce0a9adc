/* engine/record.h - keys and values under which snapshot writes and restore finds.
 *
 * Responsible for: pure encoding and decoding of the kinds of records; the key order; whose
 * block a session reads at which index.
 * Not responsible for: when they are written (snapshot/) or how they are stored (store/).
 *
 *   'n' name                          head of a session: snapshot id, lineage
 *   's' snapshot id (8, big-endian)   one snapshot; extent 0 is its image
 *   'b' lineage (8, BE) block (4, BE) one sealed block; its token ids, then its streams, META first
 *   'p' page id (8, BE)               one window page or the sinks of a lineage; one extent
 *   'l' lineage (8, BE)               counts of a lineage: so a save touches O(new) records
 *
 * Every value starts with a version byte; a newer one is KV_ERR_VERSION. A value is written in the
 * oldest version that can say it; version 2 says a tag, a pin, a parent, planes that have left, or
 * that it may expire; version 3 says an owner, or of a block a ladder that is not that of recipe
 * v3. Ids are random 64-bit numbers that are not in use, never 0.
 *
 * A lineage with a parent and a cut has blocks of its own from the cut on; those below are the
 * parent's, which owns at least the block before the cut. So cuts fall from a lineage to its
 * parent, and nobody's path is longer than its blocks.
 *
 * The block chain: chain(-1) = zero; chain(b) = digest of chain(b-1), lineage, block, code id,
 * then kind and digest of every extent of the block in stored order. It binds session, block,
 * stream and bytes, so a misdirected read cannot pass. A plane that has left the record leaves its
 * digest in the value, so the chain stays what it was.
 *
 * Threads: pure.
 * Units: bytes; keys at most RECORD_KEY_BYTES_MAX.
 */
#ifndef ENGINE_RECORD_H
#define ENGINE_RECORD_H

#include "engine/image.h"
#include "store/base/diag.h"
#include "store/base/digest.h"

enum { RECORD_VERSION = 3, RECORD_KEY_BYTES_MAX = 160, RECORD_VALUE_BYTES_MAX = 384 };
enum { RECORD_TAG_BYTES_MAX = 64 };
/* Kinds of extents that are not streams: an image; the ids of a block's tokens (u32 each). */
enum { RECORD_KIND_IMAGE = 16, RECORD_KIND_IDS = 17, RECORD_IDS_BYTES = 4 * LAYOUT_BLOCK_TOKENS };
enum { RECORD_BLOCK_EXTENTS_MAX = LAYOUT_STREAM_COUNT + 1 };
enum { RECORD_DROPPED_MAX = 4 }; /* KL, VR1, VR2, VX: never what the ladder's floor needs */
/* What a block's bytes mean: the code of DESIGN section 4, or BF16; the codes of recipes fp8, v1.
 * And where they stand (kernels/layout.h). */
enum { RECORD_CODE_PLANES = 1, RECORD_CODE_FP8 = 2, RECORD_CODE_V1 = 3, RECORD_LAYOUT_ID = 1 };
/* The code of a block that has these streams (mask of 1u << stream). */
uint32_t record_code_of(uint32_t streams);
/* MISMATCH, saying both, when a block's record has another code or layout than such a block. */
struct record_block;
enum kv_err record_check_code(const struct record_block *record, uint32_t streams,
                              struct kv_diag *diag);

struct record_key {
    uint8_t bytes[RECORD_KEY_BYTES_MAX];
    uint32_t size;
};
struct record_key record_key_name(const char *name);
struct record_key record_key_snapshot(uint64_t snapshot);
struct record_key record_key_block(uint64_t lineage, uint32_t block);
struct record_key record_key_block_prefix(uint64_t lineage);
struct record_key record_key_page(uint64_t page);
struct record_key record_key_lineage(uint64_t lineage);

struct record_name {
    uint64_t snapshot, lineage;
    uint64_t updated_ns;
    int may_expire; /* its last snapshot may go when the budget is reached; a save takes it away */
    int pinned;     /* stays on the device, and is not removed, degraded or expired */
    uint8_t owner[IMAGE_OWNER_BYTES]; /* zeros: the operator */
};
struct record_snapshot {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t lineage, parent; /* the newest older snapshot that is kept, 0: none */
    uint32_t block_count;
    int is_explicit; /* stays when the next turn is saved */
    int asleep;      /* written when the session went to sleep */
    uint64_t n, n_kv, created_ns;
    struct kv_digest root;
    uint64_t sinks_page; /* page id, 0: none */
    uint32_t page_count;
    uint64_t page_ids[IMAGE_PAGES_MAX];
    char tag[RECORD_TAG_BYTES_MAX + 1]; /* "" without one; a tagged one is explicit */
};
struct record_block {
    uint32_t code_id, layout_id;
    uint64_t first_position;
    int keeps_k;            /* recipe v2: its ladder never gives up KL */
    uint32_t dropped_count; /* planes that have left the record, by number */
    uint8_t dropped_kinds[RECORD_DROPPED_MAX];
    struct kv_digest dropped[RECORD_DROPPED_MAX];
};
struct record_page {
    uint64_t lineage, first;
    uint32_t tokens, references; /* snapshots that use it */
};
struct record_lineage {
    uint64_t parent, cut;    /* cut in blocks; 0, 0: no parent */
    uint32_t snapshot_count; /* of this lineage; lineages cut from it are not counted */
    char name[IMAGE_NAME_BYTES_MAX + 1];
};

/* Each returns the value's size; `out` has RECORD_VALUE_BYTES_MAX + IMAGE_NAME_BYTES_MAX bytes. */
enum { RECORD_OUT_BYTES = RECORD_VALUE_BYTES_MAX + IMAGE_NAME_BYTES_MAX };
uint32_t record_put_name(const struct record_name *record, uint8_t *out);
uint32_t record_put_snapshot(const struct record_snapshot *record, uint8_t *out);
uint32_t record_put_block(const struct record_block *record, uint8_t *out);
uint32_t record_put_page(const struct record_page *record, uint8_t *out);
uint32_t record_put_lineage(const struct record_lineage *record, uint8_t *out);
/* CORRUPT or VERSION. */
enum kv_err record_get_name(const void *value, size_t size, struct record_name *out,
                            struct kv_diag *diag);
enum kv_err record_get_snapshot(const void *value, size_t size, struct record_snapshot *out,
                                struct kv_diag *diag);
enum kv_err record_get_block(const void *value, size_t size, struct record_block *out,
                             struct kv_diag *diag);
enum kv_err record_get_page(const void *value, size_t size, struct record_page *out,
                            struct kv_diag *diag);
enum kv_err record_get_lineage(const void *value, size_t size, struct record_lineage *out,
                               struct kv_diag *diag);

/* Whose blocks a session reads: begin with {.next = lineage, .first = block count}; while `first`
 * is above 0, record_path_next gives the next range below: blocks [first, end) are of `lineage`.
 * CORRUPT when cuts do not fall, and what `get` returns. */
typedef enum kv_err (*record_get)(void *context, uint64_t lineage, struct record_lineage *out,
                                  struct kv_diag *diag);
struct record_path {
    uint64_t lineage, next, cut; /* cut of the last one, 0 before the first */
    uint32_t first, end;
};
enum kv_err record_path_next(struct record_path *path, record_get get, void *context,
                             struct kv_diag *diag);
/* INVALID, saying why `tag` cannot be one: 1 to 64 bytes as a session's name has, and no '@'. */
enum kv_err record_check_tag(const char *tag, struct kv_diag *diag);

/* One link of the block chain. kinds[] are enum layout_stream in stored order. */
struct kv_digest record_chain(const struct kv_digest *before, uint64_t lineage, uint32_t block,
                              const uint8_t *kinds, const struct kv_digest *digests,
                              uint32_t count);
/* The same for a stored block, with the planes that have left it in their old places. */
struct kv_digest record_chain_block(const struct kv_digest *before, const struct record_key *key,
                                    const struct record_block *record, const uint8_t *kinds,
                                    const struct kv_digest *digests, uint32_t count);
uint32_t record_dropped(const struct record_block *record); /* mask of 1u << stream */

#endif
