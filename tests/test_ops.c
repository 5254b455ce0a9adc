/* tests/test_ops.c - packed weights, embedding, norm, RoPE, SwiGLU, add on the host.
 *
 * Responsible for: packing against an independent reading of the formats, each operation against
 * double precision, equal bits of plain C and AVX2 and of any split into items.
 * Not responsible for: the matrix product (test_matmul.c).
 */
#include "kernels/host/dense.h"

#include "tests/support_tensor.h"
#include "tests/testing.h"

#include <math.h>
#include <string.h>

static int have_avx2(void) {
    return ops_cpu_has_avx2();
}

static float *get_floats(size_t count) {
    float *floats = kv_alloc_aligned(kv_alloc_system(), count * sizeof(float) + 64, 64);
    assert_non_null(floats);
    return floats;
}

static void put_floats(float *floats) {
    kv_alloc_release(kv_alloc_system(), floats);
}

static void assert_same_bits(const float *a, const float *b, size_t count) {
    assert_memory_equal(a, b, count * sizeof(float));
}

static void sizes_are_stated_and_bad_ones_refused(void **state) {
    (void)state;
    assert_int_equal(ops_weight_bytes(OPS_Q4_1, 576, 576), 576 * 576 / 8 * 5);
    assert_int_equal(ops_weight_bytes(OPS_Q4_0, 16, 32), 32 + 256);
    assert_int_equal(ops_weight_bytes(OPS_Q8_0, 17, 32), 2 * (32 + 512));
    assert_int_equal(ops_weight_bytes(OPS_F32, 1, 32), 16 * 32 * 4);
    assert_int_equal(ops_tensor_bytes(OPS_Q4_1, 3, 64), 3 * 2 * 20);
    assert_int_equal(ops_tensor_bytes(OPS_BF16, 3, 64), 3 * 64 * 2);
    assert_int_equal(ops_weight_bytes(OPS_Q4_1, 16, 48), 0);
    assert_int_equal(ops_weight_bytes(OPS_Q4_1, 0, 32), 0);
    assert_int_equal(ops_weight_bytes(OPS_Q4_1, 16, 0), 0);
    assert_int_equal(ops_weight_bytes((enum ops_type)12, 16, 256), 0);
    assert_int_equal(ops_tensor_bytes(OPS_F32, UINT32_MAX, 32), 0);
    assert_int_equal(ops_weight_bytes(OPS_F32, 1 << 24, 1 << 24), (uint64_t)1 << 50);
}

static void halves_convert_exactly(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 65536; half++) {
        float value = dense_f16_f32((uint16_t)half);
        int exponent = half >> 10 & 31, fraction = half & 1023;
        if (exponent == 31) {
            assert_true(fraction == 0 ? isinf(value) : isnan(value));
            continue;
        }
        double exact = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
        assert_true((double)value == (half & 0x8000 ? -exact : exact));
        assert_int_equal(!!signbit(value), half >> 15);
    }
}

static void check_packing(const struct support_tensor *tensor) {
    float *wide_c = get_floats((size_t)tensor->k * OPS_PANEL);
    float *wide_avx2 = get_floats((size_t)tensor->k * OPS_PANEL);

    for (uint32_t panel = 0; panel < (tensor->n + 15) / 16; panel++) {
        dense_widen_c(&tensor->weight, panel, wide_c);
        for (uint32_t k = 0; k < tensor->k; k++) {
            for (uint32_t lane = 0; lane < OPS_PANEL; lane++) {
                uint32_t row = panel * OPS_PANEL + lane;
                double expected = row < tensor->n ? support_tensor_value(tensor, row, k) : 0;
                assert_true((double)wide_c[k * OPS_PANEL + lane] == expected);
            }
        }
        if (have_avx2()) {
            dense_widen_avx2(&tensor->weight, panel, wide_avx2);
            assert_same_bits(wide_c, wide_avx2, (size_t)tensor->k * OPS_PANEL);
        }
    }
    put_floats(wide_c);
    put_floats(wide_avx2);
}

static void packing_keeps_every_weight(void **state) {
    (void)state;
    static const uint32_t n_of[] = {1, 7, 8, 9, 16, 17, 40, 70};
    struct testing_random random;

    testing_random_init(&random, testing_seed("packing", 201));
    for (int type = 0; type < SUPPORT_TENSOR_TYPES; type++) {
        for (size_t i = 0; i < sizeof n_of / sizeof n_of[0]; i++) {
            struct support_tensor tensor =
                support_tensor_make(support_tensor_types[type], n_of[i], i % 2 ? 32 : 96, &random);
            check_packing(&tensor);
            support_tensor_drop(&tensor);
        }
    }
}

/* Rows of other panels and those beyond n keep what they had. */
static void rows_as_bf16_are_the_nearest(void **state) {
    (void)state;
    enum { N = 41, K = 96, SPARE = 16 };
    struct testing_random random;
    uint16_t rows[(N + SPARE) * K];
    float scratch[K * OPS_PANEL];

    testing_random_init(&random, testing_seed("rows", 77));
    for (int i = 0; i < SUPPORT_TENSOR_TYPES; i++) {
        struct support_tensor tensor = support_tensor_make(support_tensor_types[i], N, K, &random);
        memset(rows, 0xee, sizeof rows);
        ops_weight_rows(&tensor.weight, rows, 1, 3, scratch);
        for (uint32_t n = 0; n < N + SPARE; n++)
            for (uint32_t k = 0; k < K; k++) {
                double exact = n < N ? support_tensor_value(&tensor, n, k) : 0;
                double held = (double)dense_bf16_f32(rows[n * K + k]);
                if (n < 16 || n >= N)
                    assert_int_equal(rows[n * K + k], 0xeeee);
                else
                    assert_true(fabs(held - exact) <= fabs(exact) * 0x1p-8 + 0x1p-134);
                if (n >= 16 && n < N && tensor.type == OPS_BF16)
                    assert_true(held == exact);
            }
        support_tensor_drop(&tensor);
    }
}

static void panels_may_be_packed_apart(void **state) {
    (void)state;
    struct testing_random random;

    testing_random_init(&random, testing_seed("apart", 202));
    struct support_tensor tensor = support_tensor_make(OPS_Q4_1, 70, 64, &random);
    uint64_t bytes = ops_weight_bytes(OPS_Q4_1, 70, 64);
    uint8_t apart[5 * 2 * 320];
    assert_int_equal(bytes, sizeof apart);
    memset(apart, 0x77, sizeof apart);
    for (uint32_t panel = 5; panel > 0; panel--)
        ops_weight_pack(&tensor.weight, tensor.source, apart, panel - 1, panel);
    assert_memory_equal(apart, tensor.weight.bytes, sizeof apart);
    support_tensor_drop(&tensor);
}

static void embedding_gathers_exact_rows(void **state) {
    (void)state;
    enum { N = 45, K = 96, ROWS = 60, STRIDE = 100 };
    struct testing_random random;
    uint32_t ids[ROWS];

    testing_random_init(&random, testing_seed("embedding", 203));
    for (int type = 0; type < SUPPORT_TENSOR_TYPES; type++) {
        struct support_tensor tensor =
            support_tensor_make(support_tensor_types[type], N, K, &random);
        float out[ROWS * STRIDE];
        struct ops_embed call = {tensor.weight, ids, out, STRIDE, ROWS};
        for (uint32_t row = 0; row < ROWS; row++)
            ids[row] = row < N ? N - 1 - row : (uint32_t)testing_random_below(&random, N);
        assert_int_equal(ops_embed_items(&call), ROWS);
        for (int t = 0; t < 1 + have_avx2(); t++) {
            memset(out, 0x7b, sizeof out);
            (t ? ops_host_avx2() : ops_host_c())->embed(&call, 0, ROWS, NULL);
            for (uint32_t row = 0; row < ROWS; row++) {
                for (uint32_t k = 0; k < K; k++)
                    assert_true((double)out[row * STRIDE + k] ==
                                support_tensor_value(&tensor, ids[row], k));
                assert_int_equal(dense_f32_bits(out[row * STRIDE + K]), 0x7b7b7b7b);
            }
        }
        support_tensor_drop(&tensor);
    }
}

static void check_norm(uint32_t width, struct testing_random *random) {
    enum { ROWS = 5, STRIDE = 600 };
    static float x[ROWS * STRIDE], gain[STRIDE], y[2][ROWS * STRIDE];

    for (size_t i = 0; i < ROWS * STRIDE; i++)
        x[i] = testing_random_normal(random) * ldexpf(1, (int)(i / STRIDE) * 8 - 16);
    for (size_t i = 0; i < STRIDE; i++)
        gain[i] = testing_random_normal(random);
    for (int t = 0; t < 1 + have_avx2(); t++) {
        struct ops_rmsnorm call = {x, gain, y[t], STRIDE, STRIDE, ROWS, width, 1e-5f};
        memcpy(y[t], x, sizeof x);
        if (t == 1)
            call.x = y[t]; /* in place */
        (t ? ops_host_avx2() : ops_host_c())->rmsnorm(&call, 2, ops_rmsnorm_items(&call), NULL);
        (t ? ops_host_avx2() : ops_host_c())->rmsnorm(&call, 0, 2, NULL);
    }
    for (uint32_t row = 0; row < ROWS; row++) {
        double sum = 0;
        for (uint32_t i = 0; i < width; i++)
            sum += (double)x[row * STRIDE + i] * (double)x[row * STRIDE + i];
        double inverse = 1 / sqrt(sum / width + (double)1e-5f);
        for (uint32_t i = 0; i < width; i++) {
            double exact = (double)x[row * STRIDE + i] * inverse * (double)gain[i];
            /* Half the error of the sum (width / 32 steps, five folds, squares), then six steps. */
            double bound = fabs(exact) * (width / 64.0 + 10) * 0x1p-24;
            assert_true(fabs((double)y[0][row * STRIDE + i] - exact) <= bound);
        }
    }
    if (have_avx2())
        assert_same_bits(y[0], y[1], ROWS * STRIDE);
}

static void norm_is_near_double_and_equal_in_twins(void **state) {
    (void)state;
    struct testing_random random;

    testing_random_init(&random, testing_seed("norm", 204));
    static const uint32_t widths[] = {1, 7, 32, 33, 64, 100, 127, 576, 599};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++)
        check_norm(widths[i], &random);
}

/* Nearest BF16 by search among the neighbours, in double precision. */
static uint16_t nearest_bf16(float value) {
    uint32_t bits = dense_f32_bits(value);
    uint16_t down = (uint16_t)(bits >> 16), up = (uint16_t)(down + 1);
    double below = fabs((double)value - (double)dense_bits_f32((uint32_t)down << 16));
    double above = fabs((double)value - (double)dense_bits_f32((uint32_t)up << 16));
    if (below == above)
        return down % 2 == 0 ? down : up;
    return below < above ? down : up;
}

struct rope_case {
    uint32_t dim;
    enum ops_pairing pairing;
    const float *factors;
};

enum { ROPE_ROWS = 6, ROPE_Q = 3, ROPE_KV = 2, ROPE_POSITIONS = 9000, ROPE_DIM = 128 };

static void rotate_exactly(const struct rope_case *rope, const float *x, uint32_t position,
                           double *y_out) {
    uint32_t half = rope->dim / 2;

    for (uint32_t i = 0; i < half; i++) {
        uint32_t a = rope->pairing == OPS_PAIR_ADJACENT ? 2 * i : i;
        uint32_t b = rope->pairing == OPS_PAIR_ADJACENT ? 2 * i + 1 : i + half;
        double angle = position / pow(10000.0, 2.0 * i / rope->dim);
        if (rope->factors)
            angle /= (double)rope->factors[i];
        y_out[a] = (double)x[a] * cos(angle) - (double)x[b] * sin(angle);
        y_out[b] = (double)x[a] * sin(angle) + (double)x[b] * cos(angle);
    }
}

struct rope_state {
    float q[ROPE_ROWS * ROPE_Q * ROPE_DIM];
    float k[ROPE_ROWS * ROPE_KV * ROPE_DIM];
    float v[ROPE_ROWS * ROPE_KV * ROPE_DIM];
    uint16_t kv[2][ROPE_KV][ROPE_ROWS + 2][ROPE_DIM]; /* one token of guard at either end */
};

static void run_rope(const struct ops_table *ops, const struct rope_case *rope,
                     struct rope_state *at, const float *tables, const uint32_t *positions) {
    struct ops_kv_dest dest[ROPE_ROWS];
    size_t table_count = (size_t)ROPE_POSITIONS * rope->dim / 2;
    struct ops_rope call = {.q = at->q,
                            .k = at->k,
                            .v = at->v,
                            .q_stride = (size_t)ROPE_Q * rope->dim,
                            .kv_stride = (size_t)ROPE_KV * rope->dim,
                            .dest = dest,
                            .positions = positions,
                            .cos_table = tables,
                            .sin_table = tables + table_count,
                            .rows = ROPE_ROWS,
                            .q_heads = ROPE_Q,
                            .kv_heads = ROPE_KV,
                            .head_dim = rope->dim,
                            .pairing = rope->pairing};

    memset(at->kv, 0x5c, sizeof at->kv);
    for (uint32_t row = 0; row < ROPE_ROWS; row++)
        dest[row] = (struct ops_kv_dest){at->kv[0][0][row + 1], at->kv[1][0][row + 1],
                                         (size_t)(ROPE_ROWS + 2) * ROPE_DIM};
    ops->rope(&call, 4, ops_rope_items(&call), NULL);
    ops->rope(&call, 0, 4, NULL);
}

static void check_rope(const struct rope_case *rope, struct testing_random *random) {
    static struct rope_state before, after[2];
    static const uint32_t positions[ROPE_ROWS] = {0, 1, 63, 320, 4097, ROPE_POSITIONS - 1};
    size_t table_count = (size_t)ROPE_POSITIONS * rope->dim / 2;
    float *tables = get_floats(2 * table_count);
    struct ops_rope_table fill = {10000.0,        rope->factors, rope->dim,
                                  ROPE_POSITIONS, tables,        tables + table_count};

    ops_rope_table_fill(&fill);
    for (size_t i = 0; i < sizeof before.q / sizeof(float); i++)
        before.q[i] = testing_random_normal(random);
    for (size_t i = 0; i < sizeof before.k / sizeof(float); i++) {
        before.k[i] = testing_random_normal(random);
        before.v[i] = testing_random_normal(random);
    }
    before.v[5] = NAN;
    for (int t = 0; t < 1 + have_avx2(); t++) {
        after[t] = before;
        run_rope(t ? ops_host_avx2() : ops_host_c(), rope, &after[t], tables, positions);
    }
    for (uint32_t row = 0; row < ROPE_ROWS; row++) {
        double exact[ROPE_DIM];
        for (uint32_t head = 0; head < ROPE_Q; head++) {
            size_t off = (size_t)(row * ROPE_Q + head) * rope->dim;
            rotate_exactly(rope, before.q + off, positions[row], exact);
            for (uint32_t d = 0; d < rope->dim; d++)
                assert_true(fabs((double)after[0].q[off + d] - exact[d]) <= 20 * 0x1p-24);
        }
        for (uint32_t head = 0; head < ROPE_KV; head++) {
            size_t off = (size_t)(row * ROPE_KV + head) * rope->dim;
            rotate_exactly(rope, before.k + off, positions[row], exact);
            for (uint32_t d = 0; d < rope->dim; d++) {
                uint16_t v = after[0].kv[1][head][row + 1][d];
                double k = (double)dense_bf16_f32(after[0].kv[0][head][row + 1][d]);
                assert_true(fabs(k - exact[d]) <= fabs(exact[d]) * 0x1.01p-8 + 20 * 0x1p-24);
                if (isnan(before.v[off + d]))
                    assert_true(isnan(dense_bf16_f32(v)));
                else
                    assert_int_equal(v, nearest_bf16(before.v[off + d]));
            }
        }
    }
    for (int part = 0; part < 2; part++) {
        for (uint32_t head = 0; head < ROPE_KV; head++) {
            assert_int_equal(after[0].kv[part][head][0][rope->dim - 1], 0x5c5c);
            assert_int_equal(after[0].kv[part][head][ROPE_ROWS + 1][0], 0x5c5c);
        }
    }
    if (have_avx2()) {
        assert_memory_equal(after[0].q, after[1].q, sizeof before.q);
        assert_memory_equal(after[0].kv, after[1].kv, sizeof before.kv);
    }
    put_floats(tables);
}

static void rope_is_near_double_and_equal_in_twins(void **state) {
    (void)state;
    float factors[ROPE_DIM / 2];
    struct testing_random random;

    testing_random_init(&random, testing_seed("rope", 205));
    for (uint32_t i = 0; i < ROPE_DIM / 2; i++)
        factors[i] = i < 20 ? 1.0f : 8.0f;
    struct rope_case cases[] = {{64, OPS_PAIR_ADJACENT, NULL},
                                {64, OPS_PAIR_HALVES, NULL},
                                {128, OPS_PAIR_ADJACENT, factors},
                                {16, OPS_PAIR_HALVES, NULL},
                                {16, OPS_PAIR_ADJACENT, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_rope(&cases[i], &random);
}

static void bf16_rounds_to_even_and_keeps_nan(void **state) {
    (void)state;
    struct testing_random random;

    testing_random_init(&random, testing_seed("bf16", 206));
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0x3f808000)), 0x3f80);
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0x3f818000)), 0x3f82);
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0x3f808001)), 0x3f81);
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0x7f7fffff)), 0x7f80);
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0xff800000)), 0xff80);
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0x7f800001)), 0x7fc0);
    assert_int_equal(dense_f32_bf16(dense_bits_f32(0xffffffff)), 0xffff);
    for (int i = 0; i < 100000; i++) {
        float value = dense_bits_f32((uint32_t)testing_random_u64(&random));
        if (isfinite(value) && fabsf(value) < 0x1.fep127f)
            assert_int_equal(dense_f32_bf16(value), nearest_bf16(value));
    }
}

/* Distance in units of the last place of the exact value. */
static double ulps(float value, double exact) {
    int exponent;
    frexp(exact, &exponent);
    double unit = ldexp(1, exponent - 24 < -149 ? -149 : exponent - 24);
    return fabs((double)value - exact) / unit;
}

static void exponential_is_within_two_ulp(void **state) {
    (void)state;
    double worst = 0;

    for (float x = -87; x <= 88; x += 0x1p-13f) {
        double error = ulps(dense_exp(x), exp((double)x));
        worst = error > worst ? error : worst;
    }
    print_message("exp: worst %.2f ulp\n", worst);
    assert_true(worst < 2 && worst > 0);
}

static void swiglu_is_near_double_and_equal_in_twins(void **state) {
    (void)state;
    enum { COUNT = 5 * DENSE_ITEM_VALUES + 37 };
    static float gate[COUNT], up[COUNT], y[2][COUNT];
    struct testing_random random;

    testing_random_init(&random, testing_seed("swiglu", 207));
    for (size_t i = 0; i < COUNT; i++) {
        gate[i] = testing_random_normal(&random) * (i % 3 == 0 ? 30 : 2);
        up[i] = testing_random_normal(&random);
    }
    for (int t = 0; t < 1 + have_avx2(); t++) {
        const struct ops_table *ops = t ? ops_host_avx2() : ops_host_c();
        struct ops_swiglu call = {gate, up, y[t], COUNT};
        assert_int_equal(ops_swiglu_items(&call), 6);
        if (t == 1) { /* in place */
            memcpy(y[t], gate, sizeof gate);
            call.gate = y[t];
        }
        ops->swiglu(&call, 3, 6, NULL);
        ops->swiglu(&call, 0, 3, NULL);
    }
    for (size_t i = 0; i < COUNT; i++) {
        double g = (double)gate[i], exact = g / (1 + exp(-g)) * (double)up[i];
        /* exp 2 ulp, then three roundings; from e^88 on the quotient is zero. */
        assert_true(fabs((double)y[0][i] - exact) <= fabs(exact) * 5 * 0x1p-23 + 1e-35);
    }
    if (have_avx2())
        assert_same_bits(y[0], y[1], COUNT);
}

static void swiglu_keeps_nan_and_limits(void **state) {
    (void)state;
    static const float gates[] = {NAN, INFINITY, -INFINITY, 0, -0.0f, 1e30f, -1e30f, 200};

    for (int t = 0; t < 1 + have_avx2(); t++) {
        float up[8], y[8];
        struct ops_swiglu call = {gates, up, y, 8};
        for (int i = 0; i < 8; i++)
            up[i] = 2;
        (t ? ops_host_avx2() : ops_host_c())->swiglu(&call, 0, 1, NULL);
        assert_true(isnan(y[0]));
        assert_true(y[1] == INFINITY);
        assert_true(isnan(y[2])); /* never a plausible number */
        assert_true(y[3] == 0 && y[4] == 0);
        assert_true(y[5] == 2e30f && y[7] == 400);
        assert_true(y[6] == 0);
    }
}

static void add_adds(void **state) {
    (void)state;
    enum { COUNT = 2 * DENSE_ITEM_VALUES + 3 };
    static float a[COUNT], b[COUNT], y[COUNT];

    for (int t = 0; t < 1 + have_avx2(); t++) {
        struct ops_add call = {a, b, y, COUNT};
        for (size_t i = 0; i < COUNT; i++) {
            a[i] = (float)i;
            b[i] = 0.5f * (float)i;
            y[i] = NAN;
        }
        assert_int_equal(ops_add_items(&call), 3);
        (t ? ops_host_avx2() : ops_host_c())->add(&call, 1, 3, NULL);
        assert_true(isnan(y[DENSE_ITEM_VALUES - 1]));
        (t ? ops_host_avx2() : ops_host_c())->add(&call, 0, 1, NULL);
        for (size_t i = 0; i < COUNT; i++)
            assert_true(y[i] == 1.5f * (float)i);
    }
}

/* Every exponent of all ones at every place of a row; a row marked before keeps its mark. */
static void values_that_are_not_finite_are_marked(void **state) {
    enum { ROWS = 6, WIDTH = 67, STRIDE = 70 };
    static const uint32_t odd[ROWS] = {0x7f800000, 0x7f7fffff, 0xff800000,
                                       0x7f800001, 0x80000001, 0xffffffff};
    const struct ops_table *tables[] = {ops_host_c(), ops_host_avx2()};

    (void)state;
    for (uint32_t at = 0; at < WIDTH; at++) {
        for (uint32_t table = 0; table < (have_avx2() ? 2 : 1); table++) {
            float x[ROWS * STRIDE];
            int32_t bad[ROWS] = {-1, -1, -1, -1, -1, 2};
            struct ops_finite args = {x, bad, STRIDE, ROWS, WIDTH, 9};
            memset(x, 0xff, sizeof x);
            for (uint32_t row = 0; row < ROWS; row++) {
                memset(x + row * STRIDE, 0, WIDTH * sizeof *x);
                memcpy(x + row * STRIDE + at, &odd[row], sizeof odd[row]);
            }
            assert_int_equal(ops_finite_items(&args), ROWS);
            tables[table]->finite(&args, 0, ROWS, NULL);
            const int32_t expected[ROWS] = {9, -1, 9, 9, -1, 2};
            assert_memory_equal(bad, expected, sizeof bad);
        }
    }
}

static void tables_have_names_and_rates(void **state) {
    (void)state;
    assert_string_equal(ops_host_c()->name, "host-c");
    assert_string_equal(ops_host_avx2()->name, "host-avx2");
    assert_true(ops_host_c()->fma_rate(10) > 0);
    assert_int_equal(ops_host_c()->fma_rate(10) * 2, ops_host_c()->fma_rate(20));
    if (have_avx2())
        assert_int_equal(ops_host_avx2()->fma_rate(3), 3 * 64 * 12 * 16);
}

TESTING_MAIN(cmocka_unit_test(sizes_are_stated_and_bad_ones_refused),
             cmocka_unit_test(halves_convert_exactly), cmocka_unit_test(packing_keeps_every_weight),
             cmocka_unit_test(panels_may_be_packed_apart),
             cmocka_unit_test(rows_as_bf16_are_the_nearest),
             cmocka_unit_test(embedding_gathers_exact_rows),
             cmocka_unit_test(norm_is_near_double_and_equal_in_twins),
             cmocka_unit_test(rope_is_near_double_and_equal_in_twins),
             cmocka_unit_test(bf16_rounds_to_even_and_keeps_nan),
             cmocka_unit_test(exponential_is_within_two_ulp),
             cmocka_unit_test(swiglu_is_near_double_and_equal_in_twins),
             cmocka_unit_test(swiglu_keeps_nan_and_limits), cmocka_unit_test(add_adds),
             cmocka_unit_test(values_that_are_not_finite_are_marked),
             cmocka_unit_test(tables_have_names_and_rates))
