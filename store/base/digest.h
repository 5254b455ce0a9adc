/* store/base/digest.h - the digest of stored bytes, the same on every device.
 *
 * Responsible for: the definition below and its host implementation (libxxhash).
 * Not responsible for: comparing (digest_equal.c, alone in its object file so that a test program
 * can show what happens without it) or where digests are kept (store/, snapshot/).
 *
 * Definition: XXH3-64 (seed 0) of each 4,096-byte piece, a short last piece at its own length;
 * then XXH3-128 (seed 0) over the list of those, each little-endian. The list of an empty input is
 * empty. Stored as low 64 bits then high 64 bits, little-endian. It detects accidents, not
 * attackers.
 *
 * Threads: pure; a state has one owner.
 * Units: bytes.
 */
#ifndef STORE_BASE_DIGEST_H
#define STORE_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

enum { KV_DIGEST_PIECE_BYTES = 4096, KV_DIGEST_BYTES = 16, KV_DIGEST_HEX_BYTES = 33 };

struct kv_digest {
    uint8_t bytes[KV_DIGEST_BYTES];
};

/* Opaque, fixed size, no allocation; feed any amounts in order. 64-byte alignment. */
struct kv_digest_state {
    _Alignas(64) uint8_t opaque[KV_DIGEST_PIECE_BYTES + 1024];
};

struct kv_digest kv_digest_of(const void *bytes, size_t count);

void kv_digest_init(struct kv_digest_state *state);
void kv_digest_update(struct kv_digest_state *state, const void *bytes, size_t count);
struct kv_digest kv_digest_final(struct kv_digest_state *state);

/* XXH3-64 of the whole range: for short index values and hash tables, not for extents. */
uint64_t kv_digest_short(const void *bytes, size_t count);

/* 1 when equal. The one place where a digest is accepted or refused. */
int kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b);

/* 32 lower-case hex digits and a zero byte. */
void kv_digest_hex(const struct kv_digest *digest, char text_out[KV_DIGEST_HEX_BYTES]);

#endif
