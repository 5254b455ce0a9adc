/* store/store_pack.c - extents made ready before the batch that puts them.
 *
 * Responsible for: what store_pack.h says.
 * Not responsible for: the put (store_batch.c).
 */
#include "store/store_pack.h"

#include "store/store_inner.h"

struct store_packer {
    struct store *store;
    struct codec *codec;
};

enum kv_err store_packer_make(struct store *store, struct store_packer **out) {
    const struct kv_alloc *alloc = store->options.alloc;
    struct store_packer *packer = kv_alloc_zeroed(alloc, 1, sizeof *packer);
    if (packer == NULL)
        return KV_ERR_NOMEM;
    packer->store = store;
    if (codec_make(alloc, &packer->codec) != KV_OK) {
        kv_alloc_release(alloc, packer);
        return KV_ERR_NOMEM;
    }
    *out = packer;
    return KV_OK;
}

void store_packer_drop(struct store_packer *packer) {
    if (packer == NULL)
        return;
    codec_drop(packer->codec);
    kv_alloc_release(packer->store->options.alloc, packer);
}

static size_t raw_bytes_of(const struct store_part *part) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < part->piece_count; i++)
        bytes += part->pieces[i].iov_len;
    return bytes;
}

size_t store_pack_room(const struct store_part *part) {
    return part->hint == STORE_RAW ? 0 : codec_bound(raw_bytes_of(part));
}

enum kv_err store_pack(struct store_packer *packer, const struct store_part *part, uint8_t *room,
                       struct store_packed *out, size_t *used_out) {
    struct kv_digest_state state;
    struct codec_packed packed;
    size_t raw_bytes = raw_bytes_of(part);
    *out = (struct store_packed){.count = raw_bytes};
    *used_out = 0;
    kv_digest_init(&state);
    for (uint32_t i = 0; i < part->piece_count; i++)
        kv_digest_update(&state, part->pieces[i].iov_base, part->pieces[i].iov_len);
    out->digest = kv_digest_final(&state);
    if (!codec_likely(packer->store->codec, part, raw_bytes))
        return KV_OK;
    enum kv_err err = codec_try(packer->codec, part, raw_bytes, room, &packed);
    if (err != KV_OK)
        return err;
    out->tried = 1;
    out->codec = (uint8_t)packed.id;
    out->bytes = packed.bytes;
    out->count = packed.count;
    *used_out = packed.id == CODEC_RAW ? 0 : packed.count;
    return KV_OK;
}
