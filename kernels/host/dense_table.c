/* kernels/host/dense_table.c - which function stands behind each operation on the host.
 *
 * Responsible for: the two tables and the question whether this processor can run the second.
 * Not responsible for: choosing one (engine/device).
 */
#include "kernels/host/dense.h"

static const struct ops_table table_c = {
    .name = "host-c",
    .matmul = dense_matmul_c,
    .embed = dense_embed_c,
    .rmsnorm = dense_rmsnorm_c,
    .rope = dense_rope_c,
    .swiglu = dense_swiglu_c,
    .add = dense_add_c,
    .finite = dense_finite_c,
    .fma_rate = dense_fma_rate_c,
};

/* Embedding and addition move few bytes once a step: plain C is as fast. */
static const struct ops_table table_avx2 = {
    .name = "host-avx2",
    .matmul = dense_matmul_avx2,
    .embed = dense_embed_c,
    .rmsnorm = dense_rmsnorm_avx2,
    .rope = dense_rope_avx2,
    .swiglu = dense_swiglu_avx2,
    .add = dense_add_c,
    .finite = dense_finite_c,
    .fma_rate = dense_fma_rate_avx2,
};

const struct ops_table *ops_host_c(void) {
    return &table_c;
}

const struct ops_table *ops_host_avx2(void) {
    return &table_avx2;
}

int ops_cpu_has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
