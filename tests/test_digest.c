/* tests/test_digest.c - the digest against values that another implementation computed.
 *
 * Responsible for: the definition in digest.h, whole and streamed in any pieces, one flipped bit.
 * Not responsible for: XXH3 itself, or where digests are kept.
 */
#include "store/base/digest.h"

#include "tests/testing.h"

#include <string.h>

enum { PATTERN_BYTES = 1048577 };

static uint8_t pattern[PATTERN_BYTES];

static int fill_pattern(void **state) {
    (void)state;
    for (uint32_t i = 0; i < PATTERN_BYTES; i++)
        pattern[i] = (uint8_t)(i * 131 + (i >> 8) * 7);
    return 0;
}

/* Computed with Python's xxhash 4.1.0 (libxxhash 0.8.4) from the definition, not with our code. */
static const struct {
    size_t count;
    const char *digest;
    uint64_t short_digest;
} vectors[] = {
    {0, "7f498d4624c30160d8984701d306aa99", 0x2d06800538d394c2u},
    {1, "66d8bc1cb5f765fd58d8467e6c9cfde7", 0xc44bdff4074eecdbu},
    {100, "ef1276d0e7a498d3ed04e2f3c2a3ed30", 0x387363ce0e6084aau},
    {4095, "b646a5410786253486622607cb2e633d", 0xcc34d12bd8882905u},
    {4096, "895388aa5e43feda5022a5a327cc00da", 0x9f544112e3e91bb5u},
    {4097, "8ebbf7ddba404a0f8b1444e2c159ed65", 0x1908d046110f25d3u},
    {8192, "c08a7ba50535e07b88d2fbe21f15649c", 0xbb32ead5cb00c5d1u},
    {12289, "05caf97d98d83b72d3c25317f2a670fa", 0xadc6c9e3111a1dd6u},
    {1048577, "42a65c0fc6cc4b31c2b1d0d223443c58", 0xc2c5b5ac4ddf2209u},
};
enum { VECTOR_COUNT = sizeof vectors / sizeof vectors[0] };

static void whole_ranges_match_the_vectors(void **state) {
    (void)state;
    for (int i = 0; i < VECTOR_COUNT; i++) {
        struct kv_digest digest = kv_digest_of(pattern, vectors[i].count);
        char text[KV_DIGEST_HEX_BYTES];
        kv_digest_hex(&digest, text);
        assert_string_equal(text, vectors[i].digest);
        assert_true(kv_digest_short(pattern, vectors[i].count) == vectors[i].short_digest);
    }
}

static void streams_match_whole_ranges(void **state) {
    (void)state;
    struct testing_random random;
    testing_random_init(&random, testing_seed("stream", 3));
    for (int i = 0; i < VECTOR_COUNT; i++) {
        for (int round = 0; round < 20; round++) {
            uint64_t step_end = UINT64_C(2) << testing_random_below(&random, 16);
            struct kv_digest_state stream;
            kv_digest_init(&stream);
            for (size_t at = 0; at < vectors[i].count;) {
                size_t step = testing_random_below(&random, step_end);
                size_t left = vectors[i].count - at;
                step = step < left ? step : left;
                kv_digest_update(&stream, pattern + at, step);
                at += step;
            }
            struct kv_digest digest = kv_digest_final(&stream);
            char text[KV_DIGEST_HEX_BYTES];
            kv_digest_hex(&digest, text);
            assert_string_equal(text, vectors[i].digest);
        }
    }
}

static void a_flipped_bit_changes_it(void **state) {
    (void)state;
    enum { COUNT = 3 * KV_DIGEST_PIECE_BYTES + 5 };
    static uint8_t bytes[COUNT];
    memcpy(bytes, pattern, COUNT);
    struct kv_digest before = kv_digest_of(bytes, COUNT);
    for (size_t bit = 0; bit < 8 * COUNT; bit += 61) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        struct kv_digest after = kv_digest_of(bytes, COUNT);
        assert_false(kv_digest_equal(&before, &after));
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    struct kv_digest again = kv_digest_of(bytes, COUNT);
    assert_true(kv_digest_equal(&before, &again));
}

static void every_byte_counts_in_equal(void **state) {
    (void)state;
    struct kv_digest a = kv_digest_of("a", 1);
    for (int i = 0; i < KV_DIGEST_BYTES; i++) {
        struct kv_digest b = a;
        b.bytes[i] ^= 0x10;
        assert_false(kv_digest_equal(&a, &b));
    }
    struct kv_digest same = a;
    assert_true(kv_digest_equal(&a, &same));
}

static void swapped_pieces_change_it(void **state) {
    (void)state;
    static uint8_t swapped[2 * KV_DIGEST_PIECE_BYTES];
    memcpy(swapped, pattern + KV_DIGEST_PIECE_BYTES, KV_DIGEST_PIECE_BYTES);
    memcpy(swapped + KV_DIGEST_PIECE_BYTES, pattern, KV_DIGEST_PIECE_BYTES);
    struct kv_digest a = kv_digest_of(pattern, sizeof swapped);
    struct kv_digest b = kv_digest_of(swapped, sizeof swapped);
    assert_false(kv_digest_equal(&a, &b));
}

TESTING_MAIN(cmocka_unit_test_setup(whole_ranges_match_the_vectors, fill_pattern),
             cmocka_unit_test_setup(streams_match_whole_ranges, fill_pattern),
             cmocka_unit_test_setup(a_flipped_bit_changes_it, fill_pattern),
             cmocka_unit_test_setup(every_byte_counts_in_equal, fill_pattern),
             cmocka_unit_test_setup(swapped_pieces_change_it, fill_pattern))
