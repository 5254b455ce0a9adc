/* kernels/host/dense.h - what the host twins of ops.h share.
 *
 * Responsible for: the packed form of a panel, number conversions, the split into items, the
 * exponential that every twin evaluates in the same steps.
 * Not responsible for: anything a caller outside kernels/host may use.
 *
 * Packed panel of 16 outputs (lanes): for F32, F16, BF16 [k][16 values]. For quantised types
 * [k / 32] blocks of [16 scales fp16][Q4_1: 16 minimums fp16][32 k][Q8_0: 16 int8; Q4_x: 8 bytes,
 * byte i holds lane i in its low and lane i + 8 in its high nibble]. Weight = code * scale + add,
 * where add is 0 (Q8_0), -8 * scale (Q4_0) or the minimum (Q4_1): code * scale is exact in fp32, so
 * a fused and an unfused evaluation agree. Lanes beyond n are zero.
 *
 * Threads: pure.
 * Units: bytes where named; codes and lanes otherwise.
 */
#ifndef KERNELS_HOST_DENSE_H
#define KERNELS_HOST_DENSE_H

#include <string.h>

#include "kernels/ops.h"

enum {
    DENSE_PANEL_GROUP = 3, /* panels per item: 1 row x 48 outputs fill the registers of AVX2 */
    DENSE_ROW_BLOCK = 96,  /* rows per item at most; a multiple of the 6-row tile */
    DENSE_ROW_TILE = 6,
    DENSE_DIRECT_ROWS = 5,   /* up to here weights are widened in registers, never stored */
    DENSE_ITEM_VALUES = 512, /* elementwise operations: values per item */
    DENSE_NORM_LANES = 32
};

/* Bytes of `OPS_K_UNIT` inputs of one panel; 0 for a type we do not hold. */
static inline uint32_t dense_unit_bytes(enum ops_type type) {
    switch (type) {
    case OPS_F32:
        return OPS_K_UNIT * OPS_PANEL * 4;
    case OPS_F16:
    case OPS_BF16:
        return OPS_K_UNIT * OPS_PANEL * 2;
    case OPS_Q8_0:
        return OPS_PANEL * 2 + OPS_K_UNIT * OPS_PANEL;
    case OPS_Q4_0:
        return OPS_PANEL * 2 + OPS_K_UNIT * OPS_PANEL / 2;
    case OPS_Q4_1:
        return OPS_PANEL * 4 + OPS_K_UNIT * OPS_PANEL / 2;
    }
    return 0;
}

static inline uint32_t dense_panels(const struct ops_weight *weight) {
    return (weight->n + OPS_PANEL - 1) / OPS_PANEL;
}

static inline const uint8_t *dense_panel(const struct ops_weight *weight, uint32_t panel) {
    uint64_t panel_bytes = (uint64_t)(weight->k / OPS_K_UNIT) * dense_unit_bytes(weight->type);
    return weight->bytes + panel * panel_bytes;
}

/* The part of a matrix product that one item stands for. */
struct dense_tile {
    uint32_t first_panel;
    uint32_t end_panel;
    uint32_t first_row;
    uint32_t end_row;
};

static inline uint32_t dense_row_blocks(uint32_t rows) {
    return (rows + DENSE_ROW_BLOCK - 1) / DENSE_ROW_BLOCK;
}

/* Neighbouring items share their rows, so that x stays in the cache of the thread. */
static inline struct dense_tile dense_tile_of(const struct ops_matmul *args, uint32_t item) {
    uint32_t panels = dense_panels(&args->weight);
    uint32_t groups = (panels + DENSE_PANEL_GROUP - 1) / DENSE_PANEL_GROUP;
    uint32_t blocks = dense_row_blocks(args->rows);
    uint32_t tiles = (args->rows + DENSE_ROW_TILE - 1) / DENSE_ROW_TILE;
    uint32_t block = item / groups;
    struct dense_tile tile;

    tile.first_panel = item % groups * DENSE_PANEL_GROUP;
    tile.end_panel = tile.first_panel + DENSE_PANEL_GROUP;
    if (tile.end_panel > panels)
        tile.end_panel = panels;
    tile.first_row = tiles * block / blocks * DENSE_ROW_TILE;
    tile.end_row = tiles * (block + 1) / blocks * DENSE_ROW_TILE;
    if (tile.end_row > args->rows)
        tile.end_row = args->rows;
    return tile;
}

static inline size_t dense_item_first(uint32_t item) {
    return (size_t)item * DENSE_ITEM_VALUES;
}

static inline size_t dense_item_end(uint32_t item, size_t count) {
    size_t end = dense_item_first(item) + DENSE_ITEM_VALUES;
    return end < count ? end : count;
}

static inline uint16_t dense_get_u16(const uint8_t *at) {
    return (uint16_t)(at[0] | (unsigned)at[1] << 8);
}

static inline float dense_bits_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t dense_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Exact, subnormals too: the exponent is rebuilt by a multiplication that cannot round. */
static inline float dense_f16_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t magnitude = (uint32_t)(half & 0x7fff);

    if (magnitude >= 0x7c00)
        return dense_bits_f32(sign | 0x7f800000 | magnitude << 13 |
                              (magnitude > 0x7c00 ? 0x00400000 : 0));
    return dense_bits_f32(sign | dense_f32_bits(dense_bits_f32(magnitude << 13) * 0x1p112f));
}

static inline float dense_bf16_f32(uint16_t bits) {
    return dense_bits_f32((uint32_t)bits << 16);
}

/* Nearest, ties to even; a NaN keeps its sign and high bits and becomes quiet. */
static inline uint16_t dense_f32_bf16(float value) {
    uint32_t bits = dense_f32_bits(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* exp(x) = 2^n * p(r), n = nearest(x / ln 2), r = x - n * ln 2 in two steps, every operation
 * rounded alone; above 88 it is infinite, below -87 it stays there. dense_exp is the one-lane
 * form; the AVX2 twin repeats the same steps. */
#define DENSE_EXP_MIN -87.0f
#define DENSE_EXP_MAX 88.0f
#define DENSE_EXP_LOG2E 0x1.715476p+0f
#define DENSE_EXP_ROUND 0x1.8p+23f    /* adding and subtracting it rounds to an integer */
#define DENSE_EXP_LN2_HIGH 0x1.63p-1f /* nine bits: n times it is exact */
#define DENSE_EXP_LN2_LOW -0x1.bd0106p-13f
#define DENSE_EXP_C2 0.5f
#define DENSE_EXP_C3 0x1.5554dcp-3f
#define DENSE_EXP_C4 0x1.555518p-5f
#define DENSE_EXP_C5 0x1.120c62p-7f
#define DENSE_EXP_C6 0x1.6d11fep-10f

static inline float dense_exp(float x) {
    float clamped = x < DENSE_EXP_MAX ? x : DENSE_EXP_MAX;
    clamped = clamped > DENSE_EXP_MIN ? clamped : DENSE_EXP_MIN;
    float shifted = clamped * DENSE_EXP_LOG2E + DENSE_EXP_ROUND;
    float n = shifted - DENSE_EXP_ROUND;
    float r = clamped - n * DENSE_EXP_LN2_HIGH;
    r = r - n * DENSE_EXP_LN2_LOW;
    float p = DENSE_EXP_C6;
    p = p * r + DENSE_EXP_C5;
    p = p * r + DENSE_EXP_C4;
    p = p * r + DENSE_EXP_C3;
    p = p * r + DENSE_EXP_C2;
    p = p * (r * r) + r;
    p = p + 1.0f;
    p = p * dense_bits_f32((dense_f32_bits(shifted) + 127) << 23);
    return x > DENSE_EXP_MAX ? dense_bits_f32(0x7f800000) : p;
}

static inline float dense_swiglu(float gate, float up) {
    return gate / (1.0f + dense_exp(-gate)) * up;
}

/* Writes outputs [panel * 16 ...) of one row: y = residual + sum, or sum alone. */
static inline void dense_store(const struct ops_matmul *args, uint32_t panel, uint32_t row,
                               const float *sums) {
    uint32_t first = panel * OPS_PANEL;
    uint32_t count = args->weight.n - first < OPS_PANEL ? args->weight.n - first : OPS_PANEL;
    float *y = args->y + row * args->y_stride + first;

    if (args->residual) {
        const float *residual = args->residual + row * args->y_stride + first;
        for (uint32_t lane = 0; lane < count; lane++)
            y[lane] = residual[lane] + sums[lane];
    } else {
        for (uint32_t lane = 0; lane < count; lane++)
            y[lane] = sums[lane];
    }
}

/* The twins. One panel widened to fp32 [k][16], in plain C and AVX2, equal bits. */
void dense_widen_c(const struct ops_weight *weight, uint32_t panel, float *wide_out);
void dense_widen_avx2(const struct ops_weight *weight, uint32_t panel, float *wide_out);

void dense_matmul_c(const struct ops_matmul *args, uint32_t first_item, uint32_t end_item,
                    void *scratch);
void dense_matmul_avx2(const struct ops_matmul *args, uint32_t first_item, uint32_t end_item,
                       void *scratch);
void dense_embed_c(const struct ops_embed *args, uint32_t first_item, uint32_t end_item,
                   void *scratch);
void dense_rmsnorm_c(const struct ops_rmsnorm *args, uint32_t first_item, uint32_t end_item,
                     void *scratch);
void dense_rmsnorm_avx2(const struct ops_rmsnorm *args, uint32_t first_item, uint32_t end_item,
                        void *scratch);
void dense_rope_c(const struct ops_rope *args, uint32_t first_item, uint32_t end_item,
                  void *scratch);
void dense_rope_avx2(const struct ops_rope *args, uint32_t first_item, uint32_t end_item,
                     void *scratch);
void dense_swiglu_c(const struct ops_swiglu *args, uint32_t first_item, uint32_t end_item,
                    void *scratch);
void dense_swiglu_avx2(const struct ops_swiglu *args, uint32_t first_item, uint32_t end_item,
                       void *scratch);
void dense_add_c(const struct ops_add *args, uint32_t first_item, uint32_t end_item, void *scratch);
void dense_finite_c(const struct ops_finite *args, uint32_t first_item, uint32_t end_item,
                    void *scratch);
uint64_t dense_fma_rate_c(uint64_t iterations);
uint64_t dense_fma_rate_avx2(uint64_t iterations);

#endif
