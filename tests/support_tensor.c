/* tests/support_tensor.c - random GGUF tensors and the exact value of each of their weights.
 *
 * Responsible for: see the header.
 * Not responsible for: malformed blocks.
 */
#include "tests/support_tensor.h"

#include "store/base/bytes.h"

#include <math.h>
#include <string.h>

enum { UNIT = 32 };

const enum ops_type support_tensor_types[SUPPORT_TENSOR_TYPES] = {OPS_F32,  OPS_F16,  OPS_BF16,
                                                                  OPS_Q8_0, OPS_Q4_0, OPS_Q4_1};

static uint32_t unit_bytes(enum ops_type type) {
    switch (type) {
    case OPS_F32:
        return 128;
    case OPS_F16:
    case OPS_BF16:
        return 64;
    case OPS_Q8_0:
        return 34;
    case OPS_Q4_0:
        return 18;
    case OPS_Q4_1:
        return 20;
    }
    return 0;
}

static double half_value(uint16_t half) {
    int exponent = half >> 10 & 31;
    int fraction = half & 1023;
    double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

/* Exponents 2^-9 .. 2^0 either sign; one in sixteen is subnormal or zero. */
static uint16_t random_half(struct testing_random *random) {
    uint16_t sign = (uint16_t)(testing_random_below(random, 2) << 15);
    uint16_t fraction = (uint16_t)testing_random_below(random, 1024);
    if (testing_random_below(random, 16) == 0)
        return sign | fraction;
    return (uint16_t)(sign | (6 + testing_random_below(random, 10)) << 10 | fraction);
}

static void fill_unit(enum ops_type type, uint8_t *unit, struct testing_random *random) {
    testing_random_bytes(random, unit, unit_bytes(type));
    if (type == OPS_F32 || type == OPS_BF16) {
        for (uint32_t i = 0; i < UNIT; i++) {
            float value = testing_random_f32(random);
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (type == OPS_F32)
                kv_put_u32(unit + 4 * i, bits);
            else
                kv_put_u16(unit + 2 * i, (uint16_t)(bits >> 16));
        }
        return;
    }
    for (uint32_t i = 0; i < (type == OPS_F16 ? UNIT : type == OPS_Q4_1 ? 2 : 1); i++)
        kv_put_u16(unit + 2 * i, random_half(random));
}

struct support_tensor support_tensor_make(enum ops_type type, uint32_t n, uint32_t k,
                                          struct testing_random *random) {
    struct support_tensor tensor = {.type = type, .n = n, .k = k};
    size_t source_bytes = (size_t)n * (k / UNIT) * unit_bytes(type);
    uint64_t packed_bytes = ops_weight_bytes(type, n, k);
    uint8_t *packed = kv_alloc_aligned(kv_alloc_system(), packed_bytes, 64);

    tensor.source = kv_alloc_aligned(kv_alloc_system(), source_bytes, 64);
    assert_non_null(packed);
    assert_non_null(tensor.source);
    assert_int_equal(ops_tensor_bytes(type, n, k), source_bytes);
    for (size_t at = 0; at < source_bytes; at += unit_bytes(type))
        fill_unit(type, tensor.source + at, random);
    tensor.weight = (struct ops_weight){type, n, k, packed};
    memset(packed, 0xa5, packed_bytes);
    ops_weight_pack(&tensor.weight, tensor.source, packed, 0, (n + 15) / 16);
    return tensor;
}

void support_tensor_drop(struct support_tensor *tensor) {
    kv_alloc_release(kv_alloc_system(), tensor->source);
    kv_alloc_release(kv_alloc_system(), (void *)(uintptr_t)tensor->weight.bytes);
    memset(tensor, 0, sizeof *tensor);
}

double support_tensor_value(const struct support_tensor *tensor, uint32_t row, uint32_t column) {
    const uint8_t *unit = tensor->source + ((size_t)row * (tensor->k / UNIT) + column / UNIT) *
                                               unit_bytes(tensor->type);
    uint32_t at = column % UNIT;
    int nibble = 0;
    float value;
    uint32_t bits;

    if (tensor->type == OPS_Q4_0 || tensor->type == OPS_Q4_1) {
        const uint8_t *codes = unit + (tensor->type == OPS_Q4_1 ? 4 : 2);
        nibble = at < 16 ? codes[at] & 15 : codes[at - 16] >> 4;
    }
    switch (tensor->type) {
    case OPS_F16:
        return half_value(kv_get_u16(unit + 2 * at));
    case OPS_Q8_0:
        return (int8_t)unit[2 + at] * half_value(kv_get_u16(unit));
    case OPS_Q4_0:
        return (nibble - 8) * half_value(kv_get_u16(unit));
    case OPS_Q4_1:
        /* Both terms are exact in double, so is the sum; the format's value is it in fp32. */
        return (float)(nibble * half_value(kv_get_u16(unit)) + half_value(kv_get_u16(unit + 2)));
    case OPS_F32:
    case OPS_BF16:
        bits = tensor->type == OPS_F32 ? kv_get_u32(unit + 4 * at)
                                       : (uint32_t)kv_get_u16(unit + 2 * at) << 16;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    return 0;
}
