/* kernels/ops.h - dense operations: one argument struct each, and the table that runs them.
 *
 * Responsible for: packed weights, matrix product, embedding, RMS norm, RoPE with the BF16 write of
 * K and V, SwiGLU, add, finite. Attention and seal stand in kvops.h.
 * Not responsible for: memory (the caller's), threads (the caller splits items), checking files.
 *
 * An operation is a set of items that do not depend on each other: ops_x_items(args) says how many,
 * a call does items [first_item, end_item). Splitting them in any way gives the same bits; so do
 * other rows in the batch. `scratch` has ops_matmul_scratch_bytes(), 64-byte aligned, one per
 * thread, content meaningless before and after. Rules of numerics:
 * - a weight is widened to fp32 exactly as its format says (the same bits in every twin);
 * - one accumulator per output, k ascending from 0; the AVX2 twin fuses each step
 *   (acc = fma(x, w, acc)), plain C rounds product and sum: |difference| of the two is at most
 *   (2k + 2) * 2^-24 * sum|x w|. All other operations are equal bits in every twin.
 *
 * Threads: pure on their arguments; items of one call may run on any threads at once.
 * Units: strides and sizes in elements unless named _bytes; shapes [slowest]..[fastest].
 */
#ifndef KERNELS_OPS_H
#define KERNELS_OPS_H

#include <stddef.h>
#include <stdint.h>

/* The numbers are those of the GGUF format. */
enum ops_type { OPS_F32 = 0, OPS_F16 = 1, OPS_Q4_0 = 2, OPS_Q4_1 = 3, OPS_Q8_0 = 8, OPS_BF16 = 30 };

enum { OPS_PANEL = 16, OPS_K_UNIT = 32, OPS_ROWS_MAX = 512, OPS_HEAD_DIM_MAX = 256 };

/* W[n outputs][k inputs] packed in panels of 16 outputs, quantised types as they are held. */
struct ops_weight {
    enum ops_type type;
    uint32_t n;
    uint32_t k;
    const uint8_t *bytes; /* 64-byte aligned, ops_weight_bytes long; borrowed */
};

/* Bytes of the packed form, or 0 when it cannot be held: unknown type, n or k zero or above 2^24,
 * k not a multiple of 32. */
uint64_t ops_weight_bytes(enum ops_type type, uint32_t n, uint32_t k);
/* Bytes of the same tensor in a GGUF file (rows of k, n of them), or 0 as above. */
uint64_t ops_tensor_bytes(enum ops_type type, uint32_t n, uint32_t k);
/* Packs outputs of panels [first_panel, end_panel) of ceil(n / 16); `weight->bytes` = packed. */
void ops_weight_pack(const struct ops_weight *weight, const uint8_t *tensor, uint8_t *packed,
                     uint32_t first_panel, uint32_t end_panel);

/* rows[n][k] = the packed weights of those panels as BF16, nearest even; `rows` is the whole
 * matrix, `scratch` has k * 16 floats. Exact for BF16 weights; what a device multiplies with. */
void ops_weight_rows(const struct ops_weight *packed, uint16_t *rows, uint32_t first_panel,
                     uint32_t end_panel, float *scratch);

/* y[rows][n] = residual[rows][n] + x[rows][k] * W^T. `residual` NULL means none; it has y's stride
 * and may be y itself. x must not overlap y. rows 1..OPS_ROWS_MAX. */
struct ops_matmul {
    struct ops_weight weight;
    const float *x;
    const float *residual;
    float *y;
    size_t x_stride;
    size_t y_stride;
    uint32_t rows;
};

/* out[rows][k] = row ids[r] of the table; every id < table.n. Item: a row. */
struct ops_embed {
    struct ops_weight table;
    const uint32_t *ids;
    float *out;
    size_t out_stride;
    uint32_t rows;
};

/* y[r][i] = x[r][i] / sqrt(mean(x[r]^2) + eps) * gain[i]; y may be x. Item: a row. */
struct ops_rmsnorm {
    const float *x;
    const float *gain;
    float *y;
    size_t x_stride;
    size_t y_stride;
    uint32_t rows;
    uint32_t width;
    float eps;
};

enum ops_pairing { OPS_PAIR_ADJACENT, OPS_PAIR_HALVES }; /* (2i, 2i+1) or (i, i + dim/2) */

/* Where the K and V of one row go as BF16: head h at k + h * head_stride, head_dim values each. In
 * a chunk workspace [K, V][kv_head][token][dim] of T tokens, head_stride = T * head_dim. */
struct ops_kv_dest {
    uint16_t *k;
    uint16_t *v;
    size_t head_stride;
};

/* Rotates q[rows][q_head][dim] in place; writes rotated k and plain v, both [rows][kv_head][dim],
 * as BF16 (nearest even; NaN stays NaN). head_dim is a multiple of 16, at most
 * OPS_HEAD_DIM_MAX; all of it is rotated. Item: a row. */
struct ops_rope {
    float *q;
    const float *k;
    const float *v;
    size_t q_stride;
    size_t kv_stride;
    const struct ops_kv_dest *dest; /* [rows] */
    const uint32_t *positions;      /* [rows]; an index into the tables */
    const float *cos_table;         /* [position][head_dim / 2] */
    const float *sin_table;
    uint32_t rows;
    uint32_t q_heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    enum ops_pairing pairing;
};

/* Fills both tables for positions [0, positions) in double precision, rounded once. Angle i of
 * position p is p * base^(-2i / head_dim) / freq_factors[i] (NULL: all ones). */
struct ops_rope_table {
    double base;
    const float *freq_factors;
    uint32_t head_dim;
    uint32_t positions;
    float *cos_table;
    float *sin_table;
};
void ops_rope_table_fill(const struct ops_rope_table *args);

/* y[i] = gate[i] / (1 + exp(-gate[i])) * up[i] over `count` contiguous values; y may be either. */
struct ops_swiglu {
    const float *gate;
    const float *up;
    float *y;
    size_t count;
};

/* y[i] = a[i] + b[i]; y may be either. */
struct ops_add {
    const float *a;
    const float *b;
    float *y;
    size_t count;
};

/* bad[r] = mark where bad[r] was negative and row r of x holds a value that is not finite. Item: a
 * row. */
struct ops_finite {
    const float *x;
    int32_t *bad;
    size_t x_stride;
    uint32_t rows;
    uint32_t width;
    int32_t mark;
};

/* top[row][k] = the k best of logits[row][count] in the sampler's order: larger first, equal ones
 * by lower id. Values that are not finite come before all others, lowest id first, so that
 * top[row][0] tells. k is 1..OPS_TOP_MAX and at most count. The same bits on every device. */
enum { OPS_TOP_MAX = 64 };
struct ops_candidate {
    float logit;
    uint32_t id;
};
struct ops_top {
    const float *logits;
    struct ops_candidate *top;
    size_t stride;
    uint32_t rows;
    uint32_t count;
    uint32_t k;
};
void ops_top_select(const struct ops_top *args, uint32_t first_row, uint32_t end_row);

uint32_t ops_matmul_items(const struct ops_matmul *args);
uint32_t ops_embed_items(const struct ops_embed *args);
uint32_t ops_rmsnorm_items(const struct ops_rmsnorm *args);
uint32_t ops_rope_items(const struct ops_rope *args);
uint32_t ops_swiglu_items(const struct ops_swiglu *args);
uint32_t ops_add_items(const struct ops_add *args);
uint32_t ops_finite_items(const struct ops_finite *args);
/* Only the matrix product needs scratch; the others take NULL. */
size_t ops_matmul_scratch_bytes(const struct ops_matmul *args);

struct ops_table {
    const char *name; /* "host-c" or "host-avx2": part of the numerics id */
    void (*matmul)(const struct ops_matmul *args, uint32_t first_item, uint32_t end_item,
                   void *scratch);
    void (*embed)(const struct ops_embed *args, uint32_t first_item, uint32_t end_item,
                  void *scratch);
    void (*rmsnorm)(const struct ops_rmsnorm *args, uint32_t first_item, uint32_t end_item,
                    void *scratch);
    void (*rope)(const struct ops_rope *args, uint32_t first_item, uint32_t end_item,
                 void *scratch);
    void (*swiglu)(const struct ops_swiglu *args, uint32_t first_item, uint32_t end_item,
                   void *scratch);
    void (*add)(const struct ops_add *args, uint32_t first_item, uint32_t end_item, void *scratch);
    void (*finite)(const struct ops_finite *args, uint32_t first_item, uint32_t end_item,
                   void *scratch);
    /* Runs `iterations` rounds, each of the order of 0.1 us, of multiply-adds on registers alone;
     * returns the floating-point operations done (an FMA counts 2). The caller times it. */
    uint64_t (*fma_rate)(uint64_t iterations);
};

const struct ops_table *ops_host_c(void);
/* Only to be called into when ops_cpu_has_avx2() (AVX2, FMA and F16C) says 1. */
const struct ops_table *ops_host_avx2(void);
int ops_cpu_has_avx2(void);

#endif
