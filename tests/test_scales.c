/* tests/test_scales.c - every bit pattern as a scale and as a BF16 value.
 *
 * Responsible for: what scales_check takes and refuses; that its place in a wake is reached
 * is seen by flips.c without digests.
 * Not responsible for: digests (test_restore.c).
 * Broken twins: BREAK_SCALES, BREAK_SCALES_BF16, BREAK_SCALES_CONTROL.
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

/* Fails with BREAK_SCALES_CONTROL. */
static void nan_does_not_pass_in_a_whole_block(void **state) {
    (void)state;
    enum { SLOT = 16, BYTES = 16 * SLOT };
    uint8_t bytes[BYTES];
    uint32_t taken = 0;
    struct transfer_part fp8 = {.stream = LAYOUT_FP8, .size = BYTES, .piece_count = 2};
    fp8.pieces[0] = (struct transfer_piece){bytes, SLOT};
    fp8.pieces[1] = (struct transfer_piece){bytes + SLOT, BYTES - SLOT};
    for (uint32_t code = 0; code < 256; code++) {
        struct kv_diag diag = {""};
        memset(bytes, 0x80, BYTES);
        bytes[code] = (uint8_t)code;
        int good = (code & 0x7f) != 0x7f;
        assert_int_equal(scales_check("block 3, FP8", &fp8, &diag), good ? KV_OK : KV_ERR_CORRUPT);
        assert_int_equal(strstr(diag.text, "block 3, FP8: NaN") != NULL, !good);
        taken += good;
    }
    assert_int_equal(taken, 254);
    struct transfer_part groups = {.stream = LAYOUT_K8I4, .size = 13 * SLOT, .piece_count = 2};
    groups.pieces[0] = (struct transfer_piece){bytes, 12 * SLOT + 4};
    groups.pieces[1] = (struct transfer_piece){bytes + 12 * SLOT + 4, SLOT - 4};
    memset(bytes, 0xff, 12 * SLOT); /* codes are any bits at all */
    taken = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        struct kv_diag diag = {""};
        uint8_t *place = bytes + 12 * SLOT + 2 * (bits % (SLOT / 2));
        memset(bytes + 12 * SLOT, 0, SLOT);
        place[0] = (uint8_t)bits;
        place[1] = (uint8_t)(bits >> 8);
        int good = (bits & 0x7c00) != 0x7c00;
        assert_int_equal(scales_check("block 3, K8I4", &groups, &diag),
                         good ? KV_OK : KV_ERR_CORRUPT);
        taken += good;
    }
    assert_int_equal(taken, 2 * 31 * 1024);
}

TESTING_MAIN(cmocka_unit_test(only_positive_normal_numbers_pass),
             cmocka_unit_test(only_finite_bf16_passes),
             cmocka_unit_test(nan_does_not_pass_in_a_whole_block))
