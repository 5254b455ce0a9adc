/* tests/test_scales.c - every bit pattern as a scale and as a BF16 value.
 *
 * Responsible for: what scales_check takes and refuses; that its place in a wake is reached
 * is seen by flips.c without digests.
 * Not responsible for: digests (test_restore.c).
 * Broken twins: BREAK_SCALES, BREAK_SCALES_BF16.
 */
#include "engine/scales.h"

#include "tests/testing.h"

#include <string.h>

/* Fails with BREAK_SCALES. */
static void only_positive_normal_numbers_pass(void **state) {
    (void)state;
    uint8_t bytes[64];
    uint32_t taken = 0;
    struct transfer_part part = {.stream = LAYOUT_META, .size = 64, .piece_count = 2};
    part.pieces[0] = (struct transfer_piece){bytes, 30};
    part.pieces[1] = (struct transfer_piece){bytes + 30, 34};
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        struct kv_diag diag = {""};
        size_t place = bits % 32;
        for (size_t i = 0; i < 32; i++) {
            bytes[2 * i] = 0;
            bytes[2 * i + 1] = 0x3c; /* 1.0 */
        }
        bytes[2 * place] = (uint8_t)bits;
        bytes[2 * place + 1] = (uint8_t)(bits >> 8);
        uint32_t exponent = bits >> 10 & 31;
        int good = exponent != 0 && exponent != 31 && bits < 0x8000;
        assert_int_equal(scales_check("block 3, META", &part, &diag),
                         good ? KV_OK : KV_ERR_CORRUPT);
        assert_int_equal(strstr(diag.text, "block 3, META") != NULL, !good);
        taken += good;
    }
    assert_int_equal(taken, 30 * 1024);
    /* A plane is any bits at all. */
    memset(bytes, 0xff, sizeof bytes);
    part.stream = LAYOUT_KH;
    assert_int_equal(scales_check("block 3, KH", &part, NULL), KV_OK);
}

/* Fails with BREAK_SCALES_BF16. */
static void only_finite_bf16_passes(void **state) {
    (void)state;
    uint8_t bytes[64] = {0};
    uint32_t taken = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        struct kv_diag diag = {""};
        size_t place = bits % 32;
        memset(bytes, 0, sizeof bytes);
        bytes[2 * place] = (uint8_t)bits;
        bytes[2 * place + 1] = (uint8_t)(bits >> 8);
        int good = (bits >> 7 & 255) != 255;
        assert_int_equal(scales_check_bf16("the sinks", bytes, sizeof bytes, &diag),
                         good ? KV_OK : KV_ERR_CORRUPT);
        assert_int_equal(strstr(diag.text, "the sinks") != NULL, !good);
        taken += good;
    }
    assert_int_equal(taken, 2 * 255 * 128);
}

TESTING_MAIN(cmocka_unit_test(only_positive_normal_numbers_pass),
             cmocka_unit_test(only_finite_bf16_passes))
