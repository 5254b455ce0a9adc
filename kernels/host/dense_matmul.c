/* kernels/host/dense_matmul.c - the matrix product in plain C, and its split into items.
 *
 * Responsible for: the specification: per output one accumulator, k ascending, product and sum
 * each rounded to fp32; widened weights live in scratch for one panel only.
 * Not responsible for: speed beyond what a compiler makes of 16 independent lanes.
 */
#include "kernels/host/dense.h"

#include <assert.h>

uint32_t ops_matmul_items(const struct ops_matmul *args) {
    uint32_t panels = dense_panels(&args->weight);

    assert(args->rows >= 1 && args->rows <= OPS_ROWS_MAX);
    return (panels + DENSE_PANEL_GROUP - 1) / DENSE_PANEL_GROUP * dense_row_blocks(args->rows);
}

size_t ops_matmul_scratch_bytes(const struct ops_matmul *args) {
    return (size_t)args->weight.k * OPS_PANEL * sizeof(float);
}

static void multiply_row(const float *wide, const float *x, uint32_t k_count, float *sums) {
    float acc[OPS_PANEL] = {0};

    for (uint32_t k = 0; k < k_count; k++) {
        for (uint32_t lane = 0; lane < OPS_PANEL; lane++)
            acc[lane] += x[k] * wide[(size_t)k * OPS_PANEL + lane];
    }
    memcpy(sums, acc, sizeof acc);
}

void dense_matmul_c(const struct ops_matmul *args, uint32_t first_item, uint32_t end_item,
                    void *scratch) {
    float *wide = scratch;

    for (uint32_t item = first_item; item < end_item; item++) {
        struct dense_tile tile = dense_tile_of(args, item);
        for (uint32_t panel = tile.first_panel; panel < tile.end_panel; panel++) {
            dense_widen_c(&args->weight, panel, wide);
            for (uint32_t row = tile.first_row; row < tile.end_row; row++) {
                float sums[OPS_PANEL];
                multiply_row(wide, args->x + row * args->x_stride, args->weight.k, sums);
                dense_store(args, panel, row, sums);
            }
        }
    }
}

/* 32 independent chains in registers; the result goes to memory once a round. */
uint64_t dense_fma_rate_c(uint64_t iterations) {
    enum { LANES = 32, STEPS = 64 };
    float acc[LANES] = {0};

    for (uint64_t i = 0; i < iterations; i++) {
        for (uint32_t step = 0; step < STEPS; step++) {
            for (uint32_t lane = 0; lane < LANES; lane++)
                acc[lane] = acc[lane] * 0.5f + 1.0f;
        }
        __asm__ volatile("" : : "r"(acc) : "memory");
    }
    return iterations * STEPS * LANES * 2;
}
