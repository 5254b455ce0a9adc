/* tests/test_codec.c - extents made smaller and back.
 *
 * Responsible for: round trips, try-and-keep by kind, bounded output, damage, allocation failure.
 * Not responsible for: digests (test_store.c).
 * Broken twins: BREAK_FRAME_SIZE.
 */
#include "store/codec.h"

#include "tests/testing.h"

#include <stdlib.h>
#include <string.h>

static struct store_part part_of(uint8_t kind, enum store_codec_hint hint,
                                 const struct iovec *pieces, uint32_t count) {
    return (struct store_part){kind, hint, pieces, count, 0};
}

static void fill_text(uint8_t *bytes, size_t count) {
    static const char text[] = "the quick brown fox jumps over the lazy dog, ";
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)text[(i * 7 + i / 97) % (sizeof text - 1)];
}

/* Like BF16 values near 1: a quiet high byte and a noisy low one. */
static void fill_bf16(struct testing_random *random, uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = i % 2 == 0 ? (uint8_t)testing_random_u64(random)
                              : (uint8_t)(0x3f + (testing_random_u64(random) % 3 == 0));
}

static void round_trip_of(struct codec *codec, enum store_codec_hint hint, enum codec_id expected,
                          const uint8_t *bytes, size_t count, size_t cut) {
    struct iovec pieces[2] = {{(void *)(uintptr_t)bytes, cut},
                              {(void *)(uintptr_t)(bytes + cut), count - cut}};
    struct store_part part = part_of(3, hint, pieces, 2);
    struct codec_packed packed;
    assert_int_equal(codec_pack(codec, &part, count, &packed), KV_OK);
    assert_int_equal(packed.id, expected);
    assert_true(packed.count * 100 <= count * CODEC_KEEP_PERCENT);
    uint8_t *frame = malloc(packed.count);
    uint8_t *back = malloc(count);
    assert_non_null(frame);
    assert_non_null(back);
    memcpy(frame, packed.bytes, packed.count);
    memset(back, 0xee, count);
    assert_int_equal(codec_unpack(codec, packed.id, frame, packed.count, back, count), KV_OK);
    assert_memory_equal(back, bytes, count);
    free(back);
    free(frame);
}

static void round_trips(void **state) {
    (void)state;
    struct testing_alloc alloc;
    struct testing_random random;
    struct codec *codec = NULL;
    enum { BYTES = 200001 };
    uint8_t *bytes = malloc(BYTES);
    assert_non_null(bytes);
    testing_alloc_init(&alloc, 0);
    testing_random_init(&random, testing_seed("bf16", 77));
    assert_int_equal(codec_make(&alloc.alloc, &codec), KV_OK);
    static const size_t cuts[] = {0, 1, 2, 4096, 99999, 200000};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        fill_text(bytes, BYTES);
        round_trip_of(codec, STORE_ZSTD, CODEC_ZSTD, bytes, BYTES, cuts[i]);
        fill_bf16(&random, bytes, BYTES);
        round_trip_of(codec, STORE_SHUFFLE_ZSTD, CODEC_SHUFFLE_ZSTD, bytes, BYTES, cuts[i]);
        round_trip_of(codec, STORE_SHUFFLE_ZSTD, CODEC_SHUFFLE_ZSTD, bytes, BYTES - 1, cuts[i] / 2);
    }
    codec_drop(codec);
    free(bytes);
    assert_int_equal(alloc.live_count, 0);
}

/* The shuffle must be worth its name: it beats plain zstd on BF16-like bytes. */
static void shuffle_pays_on_bf16(void **state) {
    (void)state;
    struct testing_random random;
    struct codec *codec = NULL;
    enum { BYTES = 1 << 18 };
    uint8_t *bytes = malloc(BYTES);
    struct iovec piece = {bytes, BYTES};
    struct codec_packed plain;
    struct codec_packed shuffled;
    assert_non_null(bytes);
    testing_random_init(&random, testing_seed("bf16", 78));
    fill_bf16(&random, bytes, BYTES);
    assert_int_equal(codec_make(kv_alloc_system(), &codec), KV_OK);
    struct store_part part = part_of(0, STORE_ZSTD, &piece, 1);
    assert_int_equal(codec_pack(codec, &part, BYTES, &plain), KV_OK);
    part = part_of(1, STORE_SHUFFLE_ZSTD, &piece, 1);
    assert_int_equal(codec_pack(codec, &part, BYTES, &shuffled), KV_OK);
    assert_int_equal(shuffled.id, CODEC_SHUFFLE_ZSTD);
    assert_true(shuffled.count < plain.count);
    codec_drop(codec);
    free(bytes);
}

/* Noise is tried once, then 1 in 16; once it pays again every extent is tried. */
static void sampling_follows_the_kind(void **state) {
    (void)state;
    struct testing_random random;
    struct codec *codec = NULL;
    enum { BYTES = 65536 };
    uint8_t *noise = malloc(BYTES);
    uint8_t *text = malloc(BYTES);
    struct codec_packed packed;
    assert_non_null(noise);
    assert_non_null(text);
    testing_random_init(&random, testing_seed("noise", 5));
    testing_random_bytes(&random, noise, BYTES);
    fill_text(text, BYTES);
    struct iovec noise_piece = {noise, BYTES};
    struct iovec text_piece = {text, BYTES};
    struct store_part noise_part = part_of(9, STORE_ZSTD, &noise_piece, 1);
    struct store_part text_part = part_of(9, STORE_ZSTD, &text_piece, 1);
    struct store_part other_part = part_of(10, STORE_ZSTD, &text_piece, 1);
    assert_int_equal(codec_make(kv_alloc_system(), &codec), KV_OK);
    assert_int_equal(codec_pack(codec, &noise_part, BYTES, &packed), KV_OK);
    assert_int_equal(packed.id, CODEC_RAW);
    for (int i = 1; i < CODEC_SAMPLE; i++) {
        assert_int_equal(codec_pack(codec, &text_part, BYTES, &packed), KV_OK);
        assert_int_equal(packed.id, CODEC_RAW);
        assert_int_equal(codec_pack(codec, &other_part, BYTES, &packed), KV_OK);
        assert_int_equal(packed.id, CODEC_ZSTD);
    }
    for (int i = 0; i < 5; i++) {
        assert_int_equal(codec_pack(codec, &text_part, BYTES, &packed), KV_OK);
        assert_int_equal(packed.id, CODEC_ZSTD);
    }
    struct store_part raw_part = part_of(9, STORE_RAW, &text_piece, 1);
    assert_int_equal(codec_pack(codec, &raw_part, BYTES, &packed), KV_OK);
    assert_int_equal(packed.id, CODEC_RAW);
    codec_drop(codec);
    free(noise);
    free(text);
}

/* A frame that says another size than the referrer is refused before it is unzipped; damaged and
 * cut frames never give other bytes with KV_OK.
 * Fails with BREAK_FRAME_SIZE. */
static void damage_is_refused(void **state) {
    (void)state;
    struct codec *codec = NULL;
    enum { BYTES = 20000 };
    uint8_t *bytes = malloc(BYTES);
    uint8_t *back = malloc(2 * BYTES);
    struct iovec piece = {bytes, BYTES};
    struct codec_packed packed;
    assert_non_null(bytes);
    assert_non_null(back);
    fill_text(bytes, BYTES);
    assert_int_equal(codec_make(kv_alloc_system(), &codec), KV_OK);
    struct store_part part = part_of(0, STORE_ZSTD, &piece, 1);
    assert_int_equal(codec_pack(codec, &part, BYTES, &packed), KV_OK);
    size_t count = packed.count;
    uint8_t *frame = malloc(count + 1);
    assert_non_null(frame);
    memcpy(frame, packed.bytes, count);
    frame[count] = 0;
    assert_int_equal(codec_unpack(codec, CODEC_ZSTD, frame, count, back, BYTES - 1),
                     KV_ERR_CORRUPT);
    assert_int_equal(codec_unpack(codec, CODEC_ZSTD, frame, count, back, BYTES + 1),
                     KV_ERR_CORRUPT);
    assert_int_equal(codec_unpack(codec, CODEC_ZSTD, frame, count + 1, back, BYTES),
                     KV_ERR_CORRUPT);
    for (size_t cut = 0; cut < count; cut++)
        assert_int_equal(codec_unpack(codec, CODEC_ZSTD, frame, cut, back, BYTES), KV_ERR_CORRUPT);
    size_t refused = 0;
    for (size_t i = 0; i < count; i++) {
        frame[i] ^= 0x20;
        memset(back + BYTES, 0x77, BYTES);
        enum kv_err err = codec_unpack(codec, CODEC_ZSTD, frame, count, back, BYTES);
        refused += err == KV_ERR_CORRUPT;
        assert_true(err == KV_OK || err == KV_ERR_CORRUPT);
        for (size_t j = 0; j < BYTES; j++)
            assert_int_equal(back[BYTES + j], 0x77);
        frame[i] ^= 0x20;
    }
    assert_true(refused > 0);
    codec_drop(codec);
    free(frame);
    free(back);
    free(bytes);
}

static void allocation_failures(void **state) {
    (void)state;
    enum { BYTES = 50000 };
    static uint8_t bytes[BYTES];
    static uint8_t back[BYTES];
    struct iovec piece = {bytes, BYTES};
    struct store_part part = part_of(0, STORE_SHUFFLE_ZSTD, &piece, 1);
    uint64_t k = 1;
    fill_text(bytes, BYTES);
    for (;; k++) {
        struct testing_alloc alloc;
        struct codec *codec = NULL;
        struct codec_packed packed = {0};
        testing_alloc_init(&alloc, k);
        enum kv_err err = codec_make(&alloc.alloc, &codec);
        if (err == KV_OK)
            err = codec_pack(codec, &part, BYTES, &packed);
        if (err == KV_OK) {
            static uint8_t frame[BYTES];
            memcpy(frame, packed.bytes, packed.count);
            err = codec_unpack(codec, packed.id, frame, packed.count, back, BYTES);
        }
        codec_drop(codec);
        assert_int_equal(alloc.live_count, 0);
        assert_int_equal(err, alloc.failed_count == 0 ? KV_OK : KV_ERR_NOMEM);
        if (alloc.failed_count == 0)
            break;
    }
    assert_true(k > 4);
}

TESTING_MAIN(cmocka_unit_test(round_trips), cmocka_unit_test(shuffle_pays_on_bf16),
             cmocka_unit_test(sampling_follows_the_kind), cmocka_unit_test(damage_is_refused),
             cmocka_unit_test(allocation_failures))
