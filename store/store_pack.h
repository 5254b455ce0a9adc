/* store/store_pack.h - extents made ready before the batch that puts them.
 *
 * Responsible for: digest and zip of a part on a thread of the caller's, as its put would do both.
 * Not responsible for: whether the put keeps the zipped bytes: it decides in the order of puts, so
 * what is stored does not depend on threads.
 *
 * Threads: a packer has one owner; several may work at once, also beside an open batch.
 * Units: bytes.
 */
#ifndef STORE_STORE_PACK_H
#define STORE_STORE_PACK_H

#include "store/store_batch.h"

struct store_packer;

/* `store` must outlive it. KV_ERR_NOMEM. */
enum kv_err store_packer_make(struct store *store, struct store_packer **out);
void store_packer_drop(struct store_packer *packer); /* NULL is allowed */

struct store_packed {
    struct kv_digest digest; /* of the raw bytes */
    int tried;               /* `codec`, `bytes` and `count` are what a try came to */
    uint8_t codec;           /* enum codec_id */
    const uint8_t *bytes;    /* inside the room; NULL when the raw bytes are stored */
    uint64_t count;
};

/* Most bytes of room that a part wants. */
size_t store_pack_room(const struct store_part *part);
/* `room` and the part's bytes must stay until the put has returned. *used_out of the room are taken
 * by what was zipped. KV_ERR_NOMEM. */
enum kv_err store_pack(struct store_packer *packer, const struct store_part *part, uint8_t *room,
                       struct store_packed *out, size_t *used_out);

#endif
