/* tests/test_matmul.c - the matrix product: its order bit for bit, and what must not change it.
 *
 * Responsible for: both host twins against the stated order and against double precision, and
 * their indifference to row count, row index, neighbours, split into items, strides and tails.
 * Not responsible for: packing and the other operations (test_ops.c), speed (bench_matmul.c).
 */
#include "kernels/ops.h"

#include "tests/support_tensor.h"
#include "tests/testing.h"

#include <math.h>
#include <string.h>

enum { TABLES = 2, ROWS_MAX = 256 };

static const struct ops_table *table_at(int index) {
    if (index == 0)
        return ops_host_c();
    return ops_cpu_has_avx2() ? ops_host_avx2() : NULL;
}

static float *get_floats(size_t count) {
    float *floats = kv_alloc_aligned(kv_alloc_system(), count * sizeof(float) + 64, 64);
    assert_non_null(floats);
    return floats;
}

static void put_floats(float *floats) {
    kv_alloc_release(kv_alloc_system(), floats);
}

static float *random_floats(size_t count, struct testing_random *random) {
    float *floats = get_floats(count);
    for (size_t i = 0; i < count; i++)
        floats[i] = testing_random_normal(random);
    return floats;
}

static void run_items(const struct ops_table *ops, const struct ops_matmul *call, uint32_t first,
                      uint32_t end) {
    float *scratch = get_floats(ops_matmul_scratch_bytes(call) / sizeof(float));
    memset(scratch, 0xff, ops_matmul_scratch_bytes(call)); /* NaN, should any of it be used */
    ops->matmul(call, first, end, scratch);
    put_floats(scratch);
}

static void run(const struct ops_table *ops, const struct ops_matmul *call) {
    run_items(ops, call, 0, ops_matmul_items(call));
}

static struct ops_matmul dense_call(const struct support_tensor *tensor, const float *x, float *y,
                                    uint32_t rows) {
    return (struct ops_matmul){.weight = tensor->weight,
                               .x = x,
                               .y = y,
                               .x_stride = tensor->k,
                               .y_stride = tensor->n,
                               .rows = rows};
}

static void assert_same_bits(const float *a, const float *b, size_t count) {
    assert_memory_equal(a, b, count * sizeof(float));
}

/* The stated order, one output at a time. */
static float by_the_rule(const struct support_tensor *tensor, uint32_t output, const float *x,
                         int fused) {
    float acc = 0;
    for (uint32_t k = 0; k < tensor->k; k++) {
        float w = (float)support_tensor_value(tensor, output, k);
        if (fused) {
            acc = fmaf(x[k], w, acc);
        } else {
            float product = x[k] * w;
            acc = acc + product;
        }
    }
    return acc;
}

static void check_against_rule_and_double(const struct support_tensor *tensor, const float *x,
                                          uint32_t rows) {
    float *y[TABLES] = {get_floats((size_t)rows * tensor->n), get_floats((size_t)rows * tensor->n)};

    for (int t = 0; t < TABLES; t++) {
        struct ops_matmul call = dense_call(tensor, x, y[t], rows);
        if (table_at(t))
            run(table_at(t), &call);
    }
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t output = 0; output < tensor->n; output++) {
            const float *x_row = x + (size_t)row * tensor->k;
            size_t at = (size_t)row * tensor->n + output;
            double exact = 0, magnitude = 0;
            for (uint32_t k = 0; k < tensor->k; k++) {
                double term = (double)x_row[k] * support_tensor_value(tensor, output, k);
                exact += term;
                magnitude += fabs(term);
            }
            for (int t = 0; t < TABLES && table_at(t); t++) {
                float rule = by_the_rule(tensor, output, x_row, t == 1);
                assert_memory_equal(&y[t][at], &rule, sizeof rule);
                assert_true(fabs((double)y[t][at] - exact) <=
                            (tensor->k + 1) * 0x1p-24 * magnitude);
            }
            if (table_at(1))
                assert_true(fabs((double)y[0][at] - (double)y[1][at]) <=
                            (2 * tensor->k + 2) * 0x1p-24 * magnitude);
        }
    }
    put_floats(y[0]);
    put_floats(y[1]);
}

static void follows_the_stated_order_on_every_type_and_shape(void **state) {
    (void)state;
    static const uint32_t n_of[] = {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 70};
    static const uint32_t k_of[] = {32, 64, 96, 288};
    static const uint32_t rows_of[] = {1, 2, 3, 4, 5, 6, 7, 9, 13};
    struct testing_random random;

    testing_random_init(&random, testing_seed("order", 101));
    for (int type = 0; type < SUPPORT_TENSOR_TYPES; type++) {
        for (uint32_t i = 0; i < sizeof n_of / sizeof n_of[0]; i++) {
            uint32_t k = k_of[i % 4], rows = rows_of[(i + (uint32_t)type) % 9];
            struct support_tensor tensor =
                support_tensor_make(support_tensor_types[type], n_of[i], k, &random);
            float *x = random_floats((size_t)rows * k, &random);
            check_against_rule_and_double(&tensor, x, rows);
            put_floats(x);
            support_tensor_drop(&tensor);
        }
    }
}

/* Every row of a call of `rows` rows against the same row alone. */
static void check_rows(const struct ops_table *ops, const struct support_tensor *tensor,
                       const float *x, const float *alone, uint32_t rows) {
    float *y = get_floats((size_t)rows * tensor->n);
    struct ops_matmul call = dense_call(tensor, x, y, rows);

    run(ops, &call);
    assert_same_bits(y, alone, (size_t)rows * tensor->n);
    put_floats(y);
}

static void rows_do_not_depend_on_their_number(void **state) {
    (void)state;
    static const uint32_t many[] = {41, 95, 96, 97, 101, 192, 193, 256};
    struct testing_random random;

    testing_random_init(&random, testing_seed("rows", 102));
    for (int type = 0; type < SUPPORT_TENSOR_TYPES; type++) {
        struct support_tensor tensor =
            support_tensor_make(support_tensor_types[type], 70, 96, &random);
        float *x = random_floats((size_t)ROWS_MAX * tensor.k, &random);
        float *alone = get_floats((size_t)ROWS_MAX * tensor.n);
        for (int t = 0; t < TABLES && table_at(t); t++) {
            for (uint32_t row = 0; row < ROWS_MAX; row++) {
                struct ops_matmul call =
                    dense_call(&tensor, x + (size_t)row * tensor.k, alone + row * tensor.n, 1);
                run(table_at(t), &call);
            }
            for (uint32_t rows = 1; rows <= 20; rows++)
                check_rows(table_at(t), &tensor, x, alone, rows);
            for (size_t i = 0; i < sizeof many / sizeof many[0]; i++)
                check_rows(table_at(t), &tensor, x, alone, many[i]);
        }
        put_floats(x);
        put_floats(alone);
        support_tensor_drop(&tensor);
    }
}

/* One row at every index of every count, among neighbours that are NaN and infinite. */
static void neighbours_do_not_leak(void **state) {
    (void)state;
    struct testing_random random;

    testing_random_init(&random, testing_seed("neighbours", 103));
    struct support_tensor tensor = support_tensor_make(OPS_Q4_1, 53, 64, &random);
    float *mine = random_floats(tensor.k, &random);
    float *x = get_floats((size_t)20 * tensor.k);
    float *y = get_floats((size_t)20 * tensor.n);
    float *alone = get_floats(tensor.n);
    for (int t = 0; t < TABLES && table_at(t); t++) {
        struct ops_matmul single = dense_call(&tensor, mine, alone, 1);
        run(table_at(t), &single);
        for (uint32_t rows = 1; rows <= 20; rows++) {
            for (uint32_t row = 0; row < rows; row++) {
                struct ops_matmul call = dense_call(&tensor, x, y, rows);
                for (uint32_t i = 0; i < rows * tensor.k; i++)
                    x[i] = i % 3 == 0 ? INFINITY : NAN;
                memcpy(x + (size_t)row * tensor.k, mine, tensor.k * sizeof(float));
                run(table_at(t), &call);
                assert_same_bits(y + (size_t)row * tensor.n, alone, tensor.n);
            }
        }
    }
    put_floats(mine);
    put_floats(x);
    put_floats(y);
    put_floats(alone);
    support_tensor_drop(&tensor);
}

/* A weight row of NaN spoils its own output only, its panel's other lanes and tail included. */
static void a_bad_output_stays_alone(void **state) {
    (void)state;
    struct testing_random random;

    testing_random_init(&random, testing_seed("bad output", 104));
    struct support_tensor good = support_tensor_make(OPS_F32, 19, 32, &random);
    struct support_tensor bad = support_tensor_make(OPS_F32, 19, 32, &random);
    memcpy(bad.source, good.source, 19 * 32 * 4);
    memset(bad.source + 17 * 32 * 4, 0xff, 32 * 4);
    ops_weight_pack(&bad.weight, bad.source, (uint8_t *)(uintptr_t)bad.weight.bytes, 0, 2);
    float *x = random_floats(7 * 32, &random);
    float a[7 * 19], b[7 * 19];
    for (int t = 0; t < TABLES && table_at(t); t++) {
        struct ops_matmul call = dense_call(&good, x, a, 7);
        run(table_at(t), &call);
        call = dense_call(&bad, x, b, 7);
        run(table_at(t), &call);
        for (uint32_t i = 0; i < 7 * 19; i++) {
            if (i % 19 == 17)
                assert_true(isnan(b[i]));
            else
                assert_same_bits(&a[i], &b[i], 1);
        }
    }
    put_floats(x);
    support_tensor_drop(&good);
    support_tensor_drop(&bad);
}

static void any_split_into_items_gives_the_same_bits(void **state) {
    (void)state;
    static const uint32_t rows_of[] = {1, 5, 6, 100, 256};
    struct testing_random random;

    testing_random_init(&random, testing_seed("split", 105));
    struct support_tensor tensor = support_tensor_make(OPS_Q8_0, 200, 64, &random);
    float *x = random_floats((size_t)ROWS_MAX * tensor.k, &random);
    float *whole = get_floats((size_t)ROWS_MAX * tensor.n);
    float *parts = get_floats((size_t)ROWS_MAX * tensor.n);
    for (int t = 0; t < TABLES && table_at(t); t++) {
        for (size_t i = 0; i < sizeof rows_of / sizeof rows_of[0]; i++) {
            size_t count = (size_t)rows_of[i] * tensor.n;
            struct ops_matmul call = dense_call(&tensor, x, whole, rows_of[i]);
            uint32_t items = ops_matmul_items(&call);
            assert_true(items >= 5);
            run(table_at(t), &call);
            memset(parts, 0xff, count * sizeof(float));
            call.y = parts;
            for (uint32_t item = items; item > 0; item--)
                run_items(table_at(t), &call, item - 1, item);
            assert_same_bits(parts, whole, count);
            memset(parts, 0xff, count * sizeof(float));
            uint32_t cut = 1 + (uint32_t)testing_random_below(&random, items - 1);
            run_items(table_at(t), &call, cut, items);
            run_items(table_at(t), &call, 0, cut);
            assert_same_bits(parts, whole, count);
        }
    }
    put_floats(x);
    put_floats(whole);
    put_floats(parts);
    support_tensor_drop(&tensor);
}

/* Strides wider than the matrix: the gaps are neither read into sums nor written. */
static void strides_and_residual(void **state) {
    (void)state;
    enum { N = 37, K = 32, X_STRIDE = 40, Y_STRIDE = 45, ROWS = 14 };
    struct testing_random random;

    testing_random_init(&random, testing_seed("strides", 106));
    struct support_tensor tensor = support_tensor_make(OPS_Q4_0, N, K, &random);
    float *x = random_floats(ROWS * X_STRIDE, &random);
    float *residual = random_floats(ROWS * Y_STRIDE, &random);
    float plain[N], y[ROWS * Y_STRIDE];
    for (int t = 0; t < TABLES && table_at(t); t++) {
        for (int in_place = 0; in_place < 2; in_place++) {
            struct ops_matmul call = dense_call(&tensor, x, y, ROWS);
            call.x_stride = X_STRIDE;
            call.y_stride = Y_STRIDE;
            call.residual = in_place ? y : residual;
            memcpy(y, residual, sizeof y);
            run(table_at(t), &call);
            for (uint32_t row = 0; row < ROWS; row++) {
                struct ops_matmul single = dense_call(&tensor, x + row * X_STRIDE, plain, 1);
                run(table_at(t), &single);
                for (uint32_t i = 0; i < N; i++) {
                    float sum = residual[row * Y_STRIDE + i] + plain[i];
                    assert_same_bits(&y[row * Y_STRIDE + i], &sum, 1);
                }
                assert_same_bits(y + row * Y_STRIDE + N, residual + row * Y_STRIDE + N,
                                 Y_STRIDE - N);
            }
        }
    }
    put_floats(x);
    put_floats(residual);
    support_tensor_drop(&tensor);
}

TESTING_MAIN(cmocka_unit_test(follows_the_stated_order_on_every_type_and_shape),
             cmocka_unit_test(rows_do_not_depend_on_their_number),
             cmocka_unit_test(neighbours_do_not_leak), cmocka_unit_test(a_bad_output_stays_alone),
             cmocka_unit_test(any_split_into_items_gives_the_same_bits),
             cmocka_unit_test(strides_and_residual))
