/* engine/scales.c - stored numbers, checked as numbers.
 *
 * Responsible for: the contract of scales.h.
 * Not responsible for: where scales stand in a frame (kernels/layout.h): it holds nothing else.
 */
#include "engine/scales.h"

enum { SCALE_BITS_MIN = 0x0400, SCALE_BITS_MAX = 0x7bff };

enum kv_err scales_check(const char *what, const struct transfer_part *part, struct kv_diag *diag) {
    if (part->stream != LAYOUT_META)
        return KV_OK;
    for (uint32_t i = 0; i < part->piece_count; i++) {
        const uint8_t *bytes = part->pieces[i].bytes;
        for (size_t at = 0; at + 2 <= part->pieces[i].size; at += 2) {
            unsigned bits = (unsigned)bytes[at] | (unsigned)bytes[at + 1] << 8;
#ifdef BREAK_SCALES
            bits = SCALE_BITS_MIN;
#endif
            if (bits < SCALE_BITS_MIN || bits > SCALE_BITS_MAX)
                return kv_diag_set(diag, KV_ERR_CORRUPT,
                                   "%s: scale %zu is 0x%04x, not a positive number", what, at / 2,
                                   bits);
        }
    }
    return KV_OK;
}

enum kv_err scales_check_bf16(const char *what, const void *bytes, size_t size,
                              struct kv_diag *diag) {
    const uint8_t *values = bytes;
    for (size_t at = 0; at + 2 <= size; at += 2) {
        unsigned bits = (unsigned)values[at] | (unsigned)values[at + 1] << 8;
#ifdef BREAK_SCALES_BF16
        bits = 0;
#endif
        if ((bits & 0x7f80) == 0x7f80)
            return kv_diag_set(diag, KV_ERR_CORRUPT, "%s: value %zu is 0x%04x, not a number", what,
                               at / 2, bits);
    }
    return KV_OK;
}
