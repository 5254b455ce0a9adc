/* store/codec.c - zstd and the byte shuffle.
 *
 * Responsible for: packing and unpacking one extent in scratch memory that grows to the largest.
 * Not responsible for: which hint a kind gets (snapshot/ measured that).
 */
#include "store/codec.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

/* What is kept here is codes and halves of floats: nearly all that zstd gains is that some bytes
 * are more frequent. So matches are looked for in few places and only long ones, and literals are
 * always entropy-coded. Against level 1 (2-core EPYC, MB/s zip and unzip): planes of a real model
 * the same bytes and rate; its window pages 0.8 % more, 786 -> 1753 and 2938 -> 4784. */
static const struct {
    ZSTD_cParameter parameter;
    int value;
} settings[] = {{ZSTD_c_compressionLevel, 1}, {ZSTD_c_strategy, ZSTD_fast},
                {ZSTD_c_minMatch, 7},         {ZSTD_c_hashLog, 12},
                {ZSTD_c_targetLength, 24},    {ZSTD_c_literalCompressionMode, ZSTD_ps_enable}};

struct buffer {
    uint8_t *bytes;
    size_t capacity;
};

struct kind_state {
    uint8_t tried;
    uint8_t pays;
    uint8_t skipped; /* extents since the last try */
};

struct codec {
    const struct kv_alloc *alloc;
    ZSTD_CCtx *zip;
    ZSTD_DCtx *unzip;
    struct buffer gathered;
    struct buffer packed;
    struct kind_state kinds[STORE_KINDS_MAX];
    atomic_uchar quiet[STORE_KINDS_MAX]; /* the last try did not pay; for codec_likely */
};

static void *zstd_get(void *opaque, size_t bytes) {
    return kv_alloc_aligned(opaque, bytes, 64);
}

static void zstd_put(void *opaque, void *memory) {
    kv_alloc_release(opaque, memory);
}

enum kv_err codec_make(const struct kv_alloc *alloc, struct codec **out) {
    struct codec *codec = kv_alloc_zeroed(alloc, 1, sizeof *codec);
    if (codec == NULL)
        return KV_ERR_NOMEM;
    codec->alloc = alloc;
    *out = codec;
    return KV_OK;
}

void codec_drop(struct codec *codec) {
    if (codec == NULL)
        return;
    ZSTD_freeCCtx(codec->zip);
    ZSTD_freeDCtx(codec->unzip);
    kv_alloc_release(codec->alloc, codec->gathered.bytes);
    kv_alloc_release(codec->alloc, codec->packed.bytes);
    kv_alloc_release(codec->alloc, codec);
}

/* The contexts are made at first use: a reader of raw extents never needs them. */
static ZSTD_customMem memory_of(struct codec *codec) {
    return (ZSTD_customMem){zstd_get, zstd_put, (void *)(uintptr_t)codec->alloc};
}

static enum kv_err make_zip(struct codec *codec) {
    codec->zip = ZSTD_createCCtx_advanced(memory_of(codec));
    if (codec->zip == NULL)
        return KV_ERR_NOMEM;
    /* A library that does not know one of them goes without. */
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        (void)ZSTD_CCtx_setParameter(codec->zip, settings[i].parameter, settings[i].value);
    return KV_OK;
}

static enum kv_err buffer_fit(struct codec *codec, struct buffer *buffer, size_t count) {
    if (count <= buffer->capacity)
        return KV_OK;
    size_t capacity = (size_t)kv_round_up(count, (size_t)64 << 10);
    uint8_t *bytes = kv_alloc_aligned(codec->alloc, capacity, STORE_PAGE_BYTES);
    if (bytes == NULL)
        return KV_ERR_NOMEM;
    kv_alloc_release(codec->alloc, buffer->bytes);
    *buffer = (struct buffer){bytes, capacity};
    return KV_OK;
}

enum kv_err codec_room(struct codec *codec, size_t count, uint8_t **out) {
    enum kv_err err = buffer_fit(codec, &codec->packed, count);
    if (err == KV_OK)
        *out = codec->packed.bytes;
    return err;
}

enum kv_err codec_prepare(struct codec *codec, size_t shuffled, size_t apart) {
    enum kv_err err = buffer_fit(codec, &codec->gathered, shuffled);
    if (err == KV_OK)
        err = buffer_fit(codec, &codec->packed, apart);
    if (err == KV_OK && codec->unzip == NULL &&
        (codec->unzip = ZSTD_createDCtx_advanced(memory_of(codec))) == NULL)
        err = KV_ERR_NOMEM;
    return err;
}

static int is_due(struct kind_state *kind) {
    if (!kind->tried || kind->pays || kind->skipped + 1 >= CODEC_SAMPLE) {
        kind->skipped = 0;
        return 1;
    }
    kind->skipped++;
    return 0;
}

static void gather_plain(const struct store_part *part, uint8_t *out) {
    for (uint32_t i = 0; i < part->piece_count; i++) {
        memcpy(out, part->pieces[i].iov_base, part->pieces[i].iov_len);
        out += part->pieces[i].iov_len;
    }
}

static void gather_shuffled(const struct store_part *part, uint8_t *out, size_t raw_bytes) {
    uint8_t *half[2] = {out, out + (raw_bytes + 1) / 2};
    unsigned odd = 0;
    for (uint32_t i = 0; i < part->piece_count; i++) {
        const uint8_t *from = part->pieces[i].iov_base;
        size_t count = part->pieces[i].iov_len;
        uint8_t *restrict first = half[odd];
        uint8_t *restrict second = half[odd ^ 1];
        for (size_t j = 0; j < count / 2; j++) {
            first[j] = from[2 * j];
            second[j] = from[2 * j + 1];
        }
        half[odd] += count / 2;
        half[odd ^ 1] += count / 2;
        if (count % 2 != 0) {
            *half[odd]++ = from[count - 1];
            odd ^= 1;
        }
    }
}

size_t codec_bound(size_t raw_bytes) {
    return ZSTD_compressBound(raw_bytes);
}

/* What zstd reads: the extent's bytes in one piece, gathered where they are not. */
static enum kv_err source_of(struct codec *codec, const struct store_part *part, size_t raw_bytes,
                             const uint8_t **from_out) {
    int plain = part->hint != STORE_SHUFFLE_ZSTD;
    if (plain && part->piece_count == 1) {
        *from_out = part->pieces[0].iov_base;
        return KV_OK;
    }
    enum kv_err err = buffer_fit(codec, &codec->gathered, raw_bytes);
    if (err != KV_OK)
        return err;
    if (plain)
        gather_plain(part, codec->gathered.bytes);
    else
        gather_shuffled(part, codec->gathered.bytes, raw_bytes);
    *from_out = codec->gathered.bytes;
    return KV_OK;
}

enum kv_err codec_try(struct codec *codec, const struct store_part *part, size_t raw_bytes,
                      uint8_t *room, struct codec_packed *out) {
    const uint8_t *from = NULL;
    size_t bound = codec_bound(raw_bytes);
    *out = (struct codec_packed){CODEC_RAW, NULL, raw_bytes};
    enum kv_err err = source_of(codec, part, raw_bytes, &from);
    if (err == KV_OK && room == NULL)
        err = buffer_fit(codec, &codec->packed, bound);
    if (err == KV_OK && codec->zip == NULL)
        err = make_zip(codec);
    if (err != KV_OK)
        return err;
    uint8_t *to = room != NULL ? room : codec->packed.bytes;
    size_t packed = ZSTD_compress2(codec->zip, to, bound, from, raw_bytes);
    if (ZSTD_isError(packed))
        return KV_ERR_NOMEM; /* with room for the bound, memory is all that zstd can lack */
    if (packed * 100 > raw_bytes * CODEC_KEEP_PERCENT)
        return KV_OK;
    *out = (struct codec_packed){part->hint == STORE_SHUFFLE_ZSTD ? CODEC_SHUFFLE_ZSTD : CODEC_ZSTD,
                                 to, packed};
    return KV_OK;
}

/* What fits in one page takes a page either way. */
static int can_pay(const struct store_part *part, size_t raw_bytes) {
    return part->hint != STORE_RAW && raw_bytes <= CODEC_BYTES_MAX && raw_bytes > STORE_PAGE_BYTES;
}

int codec_due(struct codec *codec, const struct store_part *part, size_t raw_bytes) {
    assert(part->kind < STORE_KINDS_MAX);
    return can_pay(part, raw_bytes) && is_due(&codec->kinds[part->kind]);
}

void codec_learn(struct codec *codec, const struct store_part *part,
                 const struct codec_packed *packed) {
    struct kind_state *kind = &codec->kinds[part->kind];
    kind->tried = 1;
    kind->pays = packed->id != CODEC_RAW;
    atomic_store(&codec->quiet[part->kind], !kind->pays);
}

int codec_likely(struct codec *codec, const struct store_part *part, size_t raw_bytes) {
    assert(part->kind < STORE_KINDS_MAX);
    return can_pay(part, raw_bytes) && !atomic_load(&codec->quiet[part->kind]);
}

enum kv_err codec_pack(struct codec *codec, const struct store_part *part, size_t raw_bytes,
                       struct codec_packed *out) {
    *out = (struct codec_packed){CODEC_RAW, NULL, raw_bytes};
    if (!codec_due(codec, part, raw_bytes))
        return KV_OK;
    enum kv_err err = codec_try(codec, part, raw_bytes, NULL, out);
    if (err == KV_OK)
        codec_learn(codec, part, out);
    return err;
}

enum kv_err codec_unpack(struct codec *codec, enum codec_id id, const uint8_t *packed,
                         size_t packed_bytes, uint8_t *raw_out, size_t raw_bytes) {
    assert(id == CODEC_ZSTD || id == CODEC_SHUFFLE_ZSTD);
    uint8_t *to = raw_out;
#ifdef BREAK_FRAME_SIZE
    raw_bytes = ZSTD_getFrameContentSize(packed, packed_bytes);
#endif
    if (raw_bytes > CODEC_BYTES_MAX ||
        ZSTD_findFrameCompressedSize(packed, packed_bytes) != packed_bytes ||
        ZSTD_getFrameContentSize(packed, packed_bytes) != raw_bytes)
        return KV_ERR_CORRUPT;
    if (codec->unzip == NULL && (codec->unzip = ZSTD_createDCtx_advanced(memory_of(codec))) == NULL)
        return KV_ERR_NOMEM;
    if (id == CODEC_SHUFFLE_ZSTD) {
        enum kv_err err = buffer_fit(codec, &codec->gathered, raw_bytes);
        if (err != KV_OK)
            return err;
        to = codec->gathered.bytes;
    }
    size_t done = ZSTD_decompressDCtx(codec->unzip, to, raw_bytes, packed, packed_bytes);
    if (ZSTD_isError(done) || done != raw_bytes)
        return KV_ERR_CORRUPT;
    if (id == CODEC_SHUFFLE_ZSTD) {
        const uint8_t *even = to;
        const uint8_t *odd = to + (raw_bytes + 1) / 2;
        for (size_t i = 0; i < raw_bytes / 2; i++) {
            raw_out[2 * i] = even[i];
            raw_out[2 * i + 1] = odd[i];
        }
        if (raw_bytes % 2 != 0)
            raw_out[raw_bytes - 1] = even[raw_bytes / 2];
    }
    return KV_OK;
}
