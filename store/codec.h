/* store/codec.h - one extent smaller and back.
 *
 * Responsible for: zstd with and without parting the bytes of 2-byte elements, try-and-keep
 * by kind, output bounded by a size that is known before unzipping starts.
 * Not responsible for: digests or places.
 *
 * Threads: a codec has one owner thread; codec_likely from any.
 * Units: bytes.
 */
#ifndef STORE_CODEC_H
#define STORE_CODEC_H

#include "store/base/alloc.h"
#include "store/base/err.h"
#include "store/store_batch.h"

#include <stddef.h>
#include <stdint.h>

/* Stored values, FORMAT.md. */
enum codec_id { CODEC_RAW = 0, CODEC_ZSTD = 1, CODEC_SHUFFLE_ZSTD = 2, CODEC_COUNT };

enum { CODEC_SAMPLE = 16, CODEC_KEEP_PERCENT = 92 };
/* Larger extents stay raw: the frame and its source must fit in memory twice. */
#define CODEC_BYTES_MAX ((size_t)64 << 20)

struct codec; /* owns its zstd contexts and scratch */

/* KV_ERR_NOMEM. */
enum kv_err codec_make(const struct kv_alloc *alloc, struct codec **out);
void codec_drop(struct codec *codec); /* NULL is allowed */

struct codec_packed {
    enum codec_id id;
    const uint8_t *bytes; /* inside the codec until its next call; NULL for CODEC_RAW */
    size_t count;
};

/* Tries what `part` hints at when its kind is due; CODEC_RAW when it does not pay. A kind pays
 * while its last try did; after one that did not, 1 in CODEC_SAMPLE is tried. KV_ERR_NOMEM. */
enum kv_err codec_pack(struct codec *codec, const struct store_part *part, size_t raw_bytes,
                       struct codec_packed *out);

/* The three steps of codec_pack, for a try that another codec has made ahead: whether this extent
 * is due, which counts it; the try itself, into `room` of codec_bound bytes or, where that is NULL,
 * into the codec; and what it came to. KV_ERR_NOMEM. */
int codec_due(struct codec *codec, const struct store_part *part, size_t raw_bytes);
size_t codec_bound(size_t raw_bytes);
enum kv_err codec_try(struct codec *codec, const struct store_part *part, size_t raw_bytes,
                      uint8_t *room, struct codec_packed *out);
void codec_learn(struct codec *codec, const struct store_part *part,
                 const struct codec_packed *packed);
/* Whether an extent that is put soon is likely to be due; changes nothing. */
int codec_likely(struct codec *codec, const struct store_part *part, size_t raw_bytes);

/* Room for `count` bytes, valid until the next codec call; KV_ERR_NOMEM. */
enum kv_err codec_room(struct codec *codec, size_t count, uint8_t **out);

/* Takes all memory that unzipping can want, of extents of up to `shuffled` raw bytes where they are
 * shuffled, and that codec_room will for up to `apart` bytes; KV_ERR_NOMEM. */
enum kv_err codec_prepare(struct codec *codec, size_t shuffled, size_t apart);

/* Unzips `packed` to exactly `raw_bytes` bytes at `raw_out`: KV_ERR_CORRUPT when the frame is
 * damaged, longer or shorter than that. KV_ERR_NOMEM. */
enum kv_err codec_unpack(struct codec *codec, enum codec_id id, const uint8_t *packed,
                         size_t packed_bytes, uint8_t *raw_out, size_t raw_bytes);

#endif
