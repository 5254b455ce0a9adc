/* kernels/host/dense_rows.c - row operations in plain C: norm, RoPE, SwiGLU, add, finite.
 *
 * Responsible for: the specification of each, and the RoPE tables.
 * Not responsible for: the AVX2 twins, which must give the same bits (dense_rows_avx2.c).
 */
#include "kernels/host/dense.h"

#include <assert.h>
#include <math.h>
#include <string.h>

uint32_t ops_embed_items(const struct ops_embed *args) {
    return args->rows;
}

uint32_t ops_rmsnorm_items(const struct ops_rmsnorm *args) {
    return args->rows;
}

uint32_t ops_rope_items(const struct ops_rope *args) {
    return args->rows;
}

uint32_t ops_finite_items(const struct ops_finite *args) {
    return args->rows;
}

static uint32_t value_items(size_t count) {
    assert(count <= (size_t)UINT32_MAX * DENSE_ITEM_VALUES);
    return (uint32_t)((count + DENSE_ITEM_VALUES - 1) / DENSE_ITEM_VALUES);
}

uint32_t ops_swiglu_items(const struct ops_swiglu *args) {
    return value_items(args->count);
}

uint32_t ops_add_items(const struct ops_add *args) {
    return value_items(args->count);
}

/* Element i adds to lane i % 32; lanes then fold in halves: 16, 8, 4, 2, 1. */
void dense_rmsnorm_c(const struct ops_rmsnorm *args, uint32_t first_item, uint32_t end_item,
                     void *scratch) {
    (void)scratch;
    for (uint32_t row = first_item; row < end_item; row++) {
        const float *x = args->x + row * args->x_stride;
        float *y = args->y + row * args->y_stride;
        float lanes[DENSE_NORM_LANES] = {0};

        for (uint32_t i = 0; i < args->width; i++)
            lanes[i % DENSE_NORM_LANES] += x[i] * x[i];
        for (uint32_t half = DENSE_NORM_LANES / 2; half > 0; half /= 2) {
            for (uint32_t lane = 0; lane < half; lane++)
                lanes[lane] += lanes[lane + half];
        }
        float inverse = 1.0f / sqrtf(lanes[0] / (float)args->width + args->eps);
        for (uint32_t i = 0; i < args->width; i++)
            y[i] = x[i] * inverse * args->gain[i];
    }
}

static void rotate_head(const struct ops_rope *args, const float *x, uint32_t position, float *y) {
    uint32_t half = args->head_dim / 2;
    const float *cosines = args->cos_table + (size_t)position * half;
    const float *sines = args->sin_table + (size_t)position * half;
    uint32_t step = args->pairing == OPS_PAIR_ADJACENT ? 2 : 1;
    uint32_t other = args->pairing == OPS_PAIR_ADJACENT ? 1 : half;

    for (uint32_t i = 0; i < half; i++) {
        float a = x[i * step], b = x[i * step + other];
        y[i * step] = a * cosines[i] - b * sines[i];
        y[i * step + other] = b * cosines[i] + a * sines[i];
    }
}

void dense_rope_c(const struct ops_rope *args, uint32_t first_item, uint32_t end_item,
                  void *scratch) {
    uint32_t dim = args->head_dim;

    (void)scratch;
    assert(dim % 16 == 0 && dim <= OPS_HEAD_DIM_MAX);
    for (uint32_t row = first_item; row < end_item; row++) {
        const struct ops_kv_dest *dest = args->dest + row;
        for (uint32_t head = 0; head < args->q_heads; head++) {
            float *q = args->q + row * args->q_stride + (size_t)head * dim;
            rotate_head(args, q, args->positions[row], q);
        }
        for (uint32_t head = 0; head < args->kv_heads; head++) {
            size_t off = row * args->kv_stride + (size_t)head * dim;
            float rotated[OPS_HEAD_DIM_MAX];
            rotate_head(args, args->k + off, args->positions[row], rotated);
            for (uint32_t d = 0; d < dim; d++) {
                dest->k[head * dest->head_stride + d] = dense_f32_bf16(rotated[d]);
                dest->v[head * dest->head_stride + d] = dense_f32_bf16(args->v[off + d]);
            }
        }
    }
}

void ops_rope_table_fill(const struct ops_rope_table *args) {
    uint32_t half = args->head_dim / 2;

    for (uint32_t i = 0; i < half; i++) {
        double frequency = pow(args->base, -2.0 * i / args->head_dim);
        if (args->freq_factors)
            frequency /= (double)args->freq_factors[i];
        for (uint32_t position = 0; position < args->positions; position++) {
            size_t at = (size_t)position * half + i;
            args->cos_table[at] = (float)cos(position * frequency);
            args->sin_table[at] = (float)sin(position * frequency);
        }
    }
}

void dense_swiglu_c(const struct ops_swiglu *args, uint32_t first_item, uint32_t end_item,
                    void *scratch) {
    (void)scratch;
    for (uint32_t item = first_item; item < end_item; item++) {
        size_t end = dense_item_end(item, args->count);
        for (size_t i = dense_item_first(item); i < end; i++)
            args->y[i] = dense_swiglu(args->gate[i], args->up[i]);
    }
}

void dense_add_c(const struct ops_add *args, uint32_t first_item, uint32_t end_item,
                 void *scratch) {
    (void)scratch;
    for (uint32_t item = first_item; item < end_item; item++) {
        size_t end = dense_item_end(item, args->count);
        for (size_t i = dense_item_first(item); i < end; i++)
            args->y[i] = args->a[i] + args->b[i];
    }
}

void dense_finite_c(const struct ops_finite *args, uint32_t first_item, uint32_t end_item,
                    void *scratch) {
    (void)scratch;
    for (uint32_t row = first_item; row < end_item; row++) {
        const float *x = args->x + row * args->x_stride;
        uint32_t bad = 0;
        for (uint32_t i = 0; i < args->width; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            bad |= (bits & 0x7f800000u) == 0x7f800000u;
        }
        if (bad && args->bad[row] < 0)
            args->bad[row] = args->mark;
    }
}
