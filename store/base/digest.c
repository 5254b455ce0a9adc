/* store/base/digest.c - XXH3 over 4 KiB pieces, then XXH3-128 over the list.
 *
 * Responsible for: the host implementation, whole and streamed, bit-equal to each other.
 * Not responsible for: the device kernel (kernels/), which follows the same definition.
 */
#include "store/base/digest.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

struct state {
    XXH3_state_t list; /* XXH3-128 over the piece hashes */
    uint32_t piece_used;
    uint8_t piece[KV_DIGEST_PIECE_BYTES];
};

static_assert(sizeof(struct state) <= sizeof(struct kv_digest_state), "state fits its opaque form");

static struct state *inner(struct kv_digest_state *state) {
    return (struct state *)(void *)state->opaque;
}

static void add_piece(struct state *state, const uint8_t *piece, size_t count) {
    uint8_t item[8];
    kv_put_u64(item, XXH3_64bits(piece, count));
    XXH3_128bits_update(&state->list, item, sizeof item);
}

void kv_digest_init(struct kv_digest_state *opaque) {
    struct state *state = inner(opaque);
    XXH3_INITSTATE(&state->list);
    XXH3_128bits_reset(&state->list);
    state->piece_used = 0;
}

void kv_digest_update(struct kv_digest_state *opaque, const void *bytes, size_t count) {
    struct state *state = inner(opaque);
    const uint8_t *at = bytes;
    while (count != 0) {
        if (state->piece_used == 0 && count >= KV_DIGEST_PIECE_BYTES) {
            add_piece(state, at, KV_DIGEST_PIECE_BYTES);
            at += KV_DIGEST_PIECE_BYTES;
            count -= KV_DIGEST_PIECE_BYTES;
            continue;
        }
        size_t room = KV_DIGEST_PIECE_BYTES - state->piece_used;
        size_t take = count < room ? count : room;
        memcpy(state->piece + state->piece_used, at, take);
        state->piece_used += (uint32_t)take;
        at += take;
        count -= take;
        if (state->piece_used == KV_DIGEST_PIECE_BYTES) {
            add_piece(state, state->piece, KV_DIGEST_PIECE_BYTES);
            state->piece_used = 0;
        }
    }
}

struct kv_digest kv_digest_final(struct kv_digest_state *opaque) {
    struct state *state = inner(opaque);
    if (state->piece_used != 0)
        add_piece(state, state->piece, state->piece_used);
    XXH128_hash_t hash = XXH3_128bits_digest(&state->list);
    struct kv_digest digest;
    kv_put_u64(digest.bytes, hash.low64);
    kv_put_u64(digest.bytes + 8, hash.high64);
    return digest;
}

struct kv_digest kv_digest_of(const void *bytes, size_t count) {
    struct kv_digest_state state;
    kv_digest_init(&state);
    kv_digest_update(&state, bytes, count);
    return kv_digest_final(&state);
}

uint64_t kv_digest_short(const void *bytes, size_t count) {
    return XXH3_64bits(bytes, count);
}

void kv_digest_hex(const struct kv_digest *digest, char text_out[KV_DIGEST_HEX_BYTES]) {
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < KV_DIGEST_BYTES; i++) {
        text_out[2 * i] = digits[digest->bytes[i] >> 4];
        text_out[2 * i + 1] = digits[digest->bytes[i] & 15];
    }
    text_out[2 * KV_DIGEST_BYTES] = 0;
}
