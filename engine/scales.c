/* engine/scales.c - stored numbers, checked as numbers.
 *
 * Responsible for: the contract of scales.h.
 * Not responsible for: where scales stand in a frame or a slot (kernels/layout.h): it holds nothing
 * else.
 */
#include "engine/scales.h"

#include <string.h>

enum { SCALE_BITS_MIN = 0x0400, SCALE_BITS_MAX = 0x7bff };

/* From byte `first` of the stream on every fp16 number is finite. */
static enum kv_err check_halves(const char *what, const struct transfer_part *part, uint64_t first,
                                struct kv_diag *diag) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < part->piece_count; before += part->pieces[i++].size) {
        const uint8_t *bytes = part->pieces[i].bytes;
        uint64_t at = first > before ? first - before : 0;
        for (; at + 2 <= part->pieces[i].size; at += 2)
            if ((bytes[at + 1] & 0x7c) == 0x7c)
                return kv_diag_set(diag, KV_ERR_CORRUPT, "%s: number %llu is not finite", what,
                                   (unsigned long long)((before + at - first) / 2));
    }
    return KV_OK;
}

/* Scales of one run, four in a word: 1 when one is negative, infinite, no number, zero or too small
 * to be normal. Adding to the exponent carries into the sign's place. */
enum { RUN_WORDS = 32 };
static int odd_scale_among(const uint8_t *bytes) {
    uint64_t odd = 0;
    for (int i = 0; i < RUN_WORDS; i++) {
        uint64_t word, exponents;
        memcpy(&word, bytes + 8 * (size_t)i, sizeof word);
        exponents = word & UINT64_C(0x7c007c007c007c00);
        odd |= word | (exponents + UINT64_C(0x0400040004000400)) |
               ~(exponents + UINT64_C(0x7c007c007c007c00));
    }
    return (odd & UINT64_C(0x8000800080008000)) != 0;
}

/* One of eight e4m3 values is NaN: adding 1 to its low seven bits carries. */
static int nan_among(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    word = (word & UINT64_C(0x7f7f7f7f7f7f7f7f)) + UINT64_C(0x0101010101010101);
    return (word & UINT64_C(0x8080808080808080)) != 0;
}

static enum kv_err check_e4m3(const char *what, const struct transfer_part *part,
                              struct kv_diag *diag) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < part->piece_count; before += part->pieces[i++].size) {
        const uint8_t *bytes = part->pieces[i].bytes;
        for (uint64_t at = 0; at + 8 <= part->pieces[i].size; at += 8)
            if (nan_among(bytes + at))
                return kv_diag_set(diag, KV_ERR_CORRUPT, "%s: NaN among values %llu to %llu", what,
                                   (unsigned long long)(before + at),
                                   (unsigned long long)(before + at + 7));
    }
    return KV_OK;
}

enum kv_err scales_check(const char *what, const struct transfer_part *part, struct kv_diag *diag) {
#ifndef BREAK_SCALES_CONTROL
    if (part->stream == LAYOUT_FP8)
        return check_e4m3(what, part, diag);
    if (part->stream == LAYOUT_K8I4) {
        uint64_t slot_bytes = part->size / layout_stream_slots(LAYOUT_K8I4);
        return check_halves(what, part, LAYOUT_GROUP_ENTRY * slot_bytes, diag);
    }
#endif
    if (part->stream != LAYOUT_META)
        return KV_OK;
    for (uint32_t i = 0; i < part->piece_count; i++) {
        const uint8_t *bytes = part->pieces[i].bytes;
        size_t at = 0;
        while (at + 8 * RUN_WORDS <= part->pieces[i].size && !odd_scale_among(bytes + at))
            at += 8 * RUN_WORDS;
        for (; at + 2 <= part->pieces[i].size; at += 2) {
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
