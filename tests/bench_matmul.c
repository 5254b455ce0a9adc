/* tests/bench_matmul.c - how fast the matrix product runs on the shapes of the default model.
 *
 * Responsible for: the FMA peak of registers alone, prefill shapes in GFLOP/s and as a share of
 * that peak, decode shapes in microseconds, and a whole decode step over distinct weights, so that
 * they come from memory as they do in the model. Best of several rounds: others share the machine.
 * Not responsible for: attention, sampling, thread pools (bench model measures the product).
 */
#include "kernels/ops.h"
#include "store/base/clock.h"
#include "tests/testing.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 30, LAYER_MATRICES = 7, MATRICES = LAYERS * LAYER_MATRICES + 1, ROUNDS = 7 };

struct shape {
    const char *name;
    enum ops_type type;
    uint32_t n;
    uint32_t k;
};

static const struct shape shapes[LAYER_MATRICES] = {
    {"q", OPS_Q4_1, 576, 576},     {"k", OPS_Q4_1, 192, 576},     {"v", OPS_Q4_1, 192, 576},
    {"o", OPS_Q4_1, 576, 576},     {"gate", OPS_Q4_1, 1536, 576}, {"up", OPS_Q4_1, 1536, 576},
    {"down", OPS_Q4_1, 576, 1536},
};
static const struct shape head_shape = {"head", OPS_Q8_0, 49152, 576};

struct model {
    struct ops_weight weights[MATRICES];
    float *x;
    float *y;
    uint64_t weight_bytes;
    uint64_t weight_count;
};

struct worker {
    const struct model *model;
    const struct ops_table *ops;
    atomic_uint *arrived;
    uint32_t index;
    uint32_t threads;
    uint32_t rows;
    void *scratch;
};

static void *get(size_t bytes) {
    void *memory = kv_alloc_aligned(kv_alloc_system(), bytes, 64);
    if (!memory)
        exit(1);
    return memory;
}

static uint64_t now_ns(void) {
    return kv_clock_now_ns(kv_clock_system());
}

static struct ops_weight make_weight(const struct shape *shape, struct testing_random *random) {
    uint64_t tensor_bytes = ops_tensor_bytes(shape->type, shape->n, shape->k);
    struct ops_weight weight = {shape->type, shape->n, shape->k, NULL};
    uint8_t *packed = get(ops_weight_bytes(shape->type, shape->n, shape->k));
    uint8_t *tensor = get(tensor_bytes);
    uint32_t unit_bytes = (uint32_t)(tensor_bytes / ((uint64_t)shape->n * (shape->k / 32)));

    testing_random_bytes(random, tensor, tensor_bytes);
    for (uint64_t at = 0; at < tensor_bytes; at += unit_bytes) {
        tensor[at + 1] = 0x20; /* scales of about 2^-7, so that sums stay finite */
        if (shape->type == OPS_Q4_1)
            tensor[at + 3] = 0xa0;
    }
    ops_weight_pack(&weight, tensor, packed, 0, (shape->n + OPS_PANEL - 1) / OPS_PANEL);
    kv_alloc_release(kv_alloc_system(), tensor);
    weight.bytes = packed;
    return weight;
}

static void make_model(struct model *model, struct testing_random *random) {
    size_t x_count = (size_t)OPS_ROWS_MAX * 1536, y_count = (size_t)OPS_ROWS_MAX * 49152;

    memset(model, 0, sizeof *model);
    for (uint32_t i = 0; i < MATRICES; i++) {
        const struct shape *shape = i + 1 == MATRICES ? &head_shape : &shapes[i % LAYER_MATRICES];
        model->weights[i] = make_weight(shape, random);
        model->weight_bytes += ops_weight_bytes(shape->type, shape->n, shape->k);
        model->weight_count += (uint64_t)shape->n * shape->k;
    }
    model->x = get(x_count * sizeof(float));
    model->y = get(y_count * sizeof(float));
    for (size_t i = 0; i < x_count; i++)
        model->x[i] = testing_random_f32(random);
}

static struct ops_matmul call_of(const struct model *model, uint32_t matrix, uint32_t rows) {
    struct ops_matmul call = {.weight = model->weights[matrix], .x = model->x, .y = model->y};
    call.x_stride = call.weight.k;
    call.y_stride = call.weight.n;
    call.rows = rows;
    return call;
}

/* One forward pass over all matrices; the threads meet after each, as in the model. */
static void *run_step(void *context) {
    struct worker *worker = context;

    for (uint32_t i = 0; i < MATRICES; i++) {
        struct ops_matmul call = call_of(worker->model, i, i + 1 == MATRICES ? 1 : worker->rows);
        uint64_t items = ops_matmul_items(&call);
        worker->ops->matmul(&call, (uint32_t)(items * worker->index / worker->threads),
                            (uint32_t)(items * (worker->index + 1) / worker->threads),
                            worker->scratch);
        atomic_fetch_add(worker->arrived, 1);
        while (atomic_load(worker->arrived) < (i + 1) * worker->threads)
            __builtin_ia32_pause();
    }
    return NULL;
}

static double step_ms(const struct model *model, const struct ops_table *ops, uint32_t rows,
                      uint32_t threads, int rounds) {
    double best = 1e30;
    void *scratch[2] = {get(1536 * 64), get(1536 * 64)};

    for (int round = 0; round < rounds; round++) {
        atomic_uint arrived = 0;
        struct worker workers[2];
        pthread_t thread;
        uint64_t start = now_ns();
        for (uint32_t i = 0; i < threads && i < 2; i++)
            workers[i] = (struct worker){model, ops, &arrived, i, threads, rows, scratch[i]};
        if (threads == 2 && pthread_create(&thread, NULL, run_step, &workers[1]) != 0)
            exit(1);
        run_step(&workers[0]);
        if (threads == 2)
            pthread_join(thread, NULL);
        double ms = (double)(now_ns() - start) / 1e6;
        best = ms < best ? ms : best;
    }
    kv_alloc_release(kv_alloc_system(), scratch[0]);
    kv_alloc_release(kv_alloc_system(), scratch[1]);
    return best;
}

static double peak_gflops(const struct ops_table *ops) {
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = now_ns();
        uint64_t flops = ops->fma_rate(200000);
        double rate = (double)flops / (double)(now_ns() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

/* Nanoseconds of one call, the same matrix again and again. */
static double call_ns(const struct model *model, const struct ops_table *ops, uint32_t matrix,
                      uint32_t rows, int rounds) {
    struct ops_matmul call = call_of(model, matrix, rows);
    void *scratch = get(ops_matmul_scratch_bytes(&call));
    double best = 1e30;

    for (int round = 0; round < rounds; round++) {
        uint64_t start = now_ns();
        ops->matmul(&call, 0, ops_matmul_items(&call), scratch);
        double ns = (double)(now_ns() - start);
        best = ns < best ? ns : best;
    }
    kv_alloc_release(kv_alloc_system(), scratch);
    return best;
}

static void report(const struct model *model, const struct ops_table *ops, double peak,
                   int rounds) {
    static const uint32_t rows_of[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 64, 256};

    printf("%s, one thread; each cell us (GFLOP/s)\n%6s", ops->name, "rows");
    for (uint32_t m = 0; m < LAYER_MATRICES; m++)
        printf("%7s %4ux%-4u", shapes[m].name, shapes[m].n, shapes[m].k);
    printf("\n");
    for (size_t i = 0; i < sizeof rows_of / sizeof rows_of[0]; i++) {
        printf("%6u", rows_of[i]);
        for (uint32_t m = 0; m < LAYER_MATRICES; m++) {
            double ns = call_ns(model, ops, m, rows_of[i], rounds);
            double flops = 2.0 * rows_of[i] * shapes[m].n * shapes[m].k;
            printf("%8.1f (%5.1f)", ns / 1e3, flops / ns);
        }
        printf("\n");
    }
    for (uint32_t threads = 1; threads <= 2; threads++) {
        double decode = step_ms(model, ops, 1, threads, rounds);
        double batch = step_ms(model, ops, 8, threads, rounds);
        double prefill = step_ms(model, ops, 256, threads, (rounds + 2) / 3);
        double flops =
            2.0 * 256 * ((double)model->weight_count - 49152.0 * 576) + 2.0 * 49152 * 576;
        printf("%s, %u thread(s), all matrices: decode %.2f ms (%.0f tok/s, %.1f GB/s); "
               "8 rows %.2f ms; 256 rows %.1f ms (%.0f tok/s, %.0f %% of the FMA peak)\n",
               ops->name, threads, decode, 1e3 / decode, (double)model->weight_bytes / decode / 1e6,
               batch, prefill, 256e3 / prefill, flops / prefill / 1e6 / (peak * threads) * 100);
    }
}

int main(void) {
    struct model model;
    struct testing_random random;

    testing_random_init(&random, testing_seed("bench_matmul", 11));
    make_model(&model, &random);
    printf("weights %.1f million in %.1f MB\n", (double)model.weight_count / 1e6,
           (double)model.weight_bytes / 1e6);
    if (ops_cpu_has_avx2()) {
        double peak = peak_gflops(ops_host_avx2());
        printf("FMA peak of registers, one thread: %.1f GFLOP/s\n", peak);
        report(&model, ops_host_avx2(), peak, 2 * ROUNDS);
    }
    double peak = peak_gflops(ops_host_c());
    printf("multiply-add rate of plain C, one thread: %.1f GFLOP/s\n", peak);
    report(&model, ops_host_c(), peak, 1);
    return 0;
}
