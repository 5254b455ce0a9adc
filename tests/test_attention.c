/* tests/test_attention.c - attention over sinks, blocks of any tier, window and chunk.
 *
 * Responsible for: both twins against a plain double softmax, both schedules bit for bit, any split
 * into calls, any place in a batch, holes, NaN in everything that must not be read.
 * Not responsible for: the code itself (test_seal.c), speed (bench_attention.c).
 */
#include "kernels/kvops.h"

#include "kernels/ops.h"
#include "tests/support_kv.h"
#include "tests/testing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Worst |error| of an output relative to the largest |value| of its sequence. Measured over this
 * file: 5e-7 for either twin; the bound in kernels/host/leaf.h lies far above. */
#define ERROR_MAX 3e-6

enum { LAYER = 1, LAYERS = 2, HEADS = 2, ROWS_MAX = 256 };

static const struct support_kv_split together = {100000, 0};

struct scene {
    struct support_kv kv;
    struct kvops_seq seq;
    struct kvops_attend args;
    uint32_t dim;
    uint32_t n_kv; /* tokens before the chunk */
    uint16_t *chunk;
    float *q;
    float *out;
    float *out_other;
    double *values; /* [2][n_kv + rows][dim] of one head, scratch of the reference */
};

static void *take(size_t bytes) {
    void *memory = kv_alloc_aligned(kv_alloc_system(), bytes, 64);

    assert_non_null(memory);
    memset(memory, 0xFF, bytes);
    return memory;
}

struct shape {
    uint32_t dim;
    uint32_t group;
    uint32_t n_kv;
    uint32_t rows; /* of the chunk */
    enum layout_tier tiers[4];
    uint32_t tier_count;
};

/* Tokens [0, n_kv) in the cache, then `rows` rows whose K and V are the chunk; the chunk's tail up
 * to its capacity stays NaN. */
static void scene_init(struct scene *scene, const struct shape *shape, uint64_t seed) {
    const struct kvops_table *table = ops_cpu_has_avx2() ? kvops_host_avx2() : kvops_host_c();
    struct layout_geometry geometry = {LAYERS, HEADS, shape->dim};
    size_t q_count = (size_t)shape->rows * HEADS * shape->group * shape->dim;
    size_t stride = (size_t)(shape->rows + 3) * shape->dim;
    struct testing_random random;

    memset(scene, 0, sizeof *scene);
    testing_random_init(&random, seed);
    scene->dim = shape->dim;
    scene->n_kv = shape->n_kv;
    support_kv_init(&scene->kv, geometry, shape->n_kv + shape->rows, seed);
    scene->seq = support_kv_seq(&scene->kv, table, shape->n_kv, shape->tiers, shape->tier_count);
    scene->chunk = take(2 * HEADS * stride * sizeof *scene->chunk);
    for (uint32_t i = 0; i < 2 * HEADS; i++) {
        struct layout_at at = {LAYER, i % HEADS, 0};
        memcpy(scene->chunk + i * stride, support_kv_source(&scene->kv, i / HEADS, at, shape->n_kv),
               (size_t)shape->rows * shape->dim * sizeof *scene->chunk);
    }
    scene->seq.chunk_k = scene->chunk;
    scene->seq.chunk_v = scene->chunk + HEADS * stride;
    scene->seq.chunk_head_stride = stride;
    scene->seq.row_count = shape->rows;
    scene->q = take(q_count * sizeof(float));
    scene->out = take(q_count * sizeof(float));
    scene->out_other = take(q_count * sizeof(float));
    scene->values = take(2 * (size_t)(shape->n_kv + shape->rows) * shape->dim * sizeof(double));
    for (size_t i = 0; i < q_count; i++)
        scene->q[i] = testing_random_normal(&random);
    scene->args = (struct kvops_attend){.pool = scene->kv.pool,
                                        .layer = LAYER,
                                        .q_heads = HEADS * shape->group,
                                        .q = scene->q,
                                        .out = scene->out,
                                        .seqs = &scene->seq,
                                        .seq_count = 1};
}

static void scene_release(struct scene *scene) {
    support_kv_release(&scene->kv);
    kv_alloc_release(kv_alloc_system(), scene->chunk);
    kv_alloc_release(kv_alloc_system(), scene->q);
    kv_alloc_release(kv_alloc_system(), scene->out);
    kv_alloc_release(kv_alloc_system(), scene->out_other);
    kv_alloc_release(kv_alloc_system(), scene->values);
}

static size_t out_count(const struct scene *scene) {
    return (size_t)scene->seq.row_count * scene->args.q_heads * scene->dim;
}

/* --- the reference: values in double, one softmax over everything */

static double *value_at(const struct scene *scene, uint32_t value, uint32_t token) {
    size_t tokens = scene->n_kv + scene->seq.row_count;

    return scene->values + (value * tokens + token) * scene->dim;
}

static void unrotate(const float *y, uint32_t dim, double *x) {
    for (uint32_t d = 0; d < dim; d++)
        x[d] = y[d] / sqrt(dim);
    for (uint32_t stride = 1; stride < dim; stride *= 2) {
        for (uint32_t d = 0; d < dim; d++) {
            double a = x[d], b = x[d ^ stride];
            if (d & stride)
                continue;
            x[d] = a + b;
            x[d ^ stride] = a - b;
        }
    }
}

/* What page decode gives, out of the rotated domain where it is there. */
static void stored_value(enum layout_tier tier, uint32_t value, const float *y, uint32_t dim,
                         double *x) {
    if (tier < LAYOUT_TIER_BF16 || (tier == LAYOUT_TIER_K8I4 && value == 0)) {
        unrotate(y, dim, x);
        return;
    }
    for (uint32_t d = 0; d < dim; d++)
        x[d] = (double)y[d];
}

static void reference_values(const struct scene *scene, uint32_t head) {
    static float page[2][64 * 128];
    static int8_t codes[2][64 * 128];
    struct layout_at at = {LAYER, head, 0};

    for (uint32_t token = 0; token < scene->n_kv + scene->seq.row_count; token++)
        for (uint32_t value = 0; value < 2; value++)
            for (uint32_t d = 0; d < scene->dim; d++)
                value_at(scene, value, token)[d] =
                    support_kv_f32(support_kv_source(&scene->kv, value, at, token)[d]);
    for (uint32_t i = 0; i < scene->seq.block_count * LAYOUT_BLOCK_PAGES; i++) {
        const struct kvops_block *block = &scene->seq.blocks[i / 4];
        struct kvops_decode_page decode = {
            scene->kv.pool, block, {LAYER, head, i % 4}, page[0], page[1], codes[0], codes[1]};
        if (block->tier == LAYOUT_TIER_BF16)
            continue;
        kvops_host_c()->decode_page(&decode);
        for (uint32_t t = 0; t < 64; t++)
            for (uint32_t value = 0; value < 2; value++)
                stored_value(block->tier, value, page[value] + t * scene->dim, scene->dim,
                             value_at(scene, value, LAYOUT_SINK_TOKENS + i * 64 + t));
    }
}

static int hidden(const struct scene *scene, uint32_t token) {
    const struct kvops_seq *seq = &scene->seq;
    uint32_t window = LAYOUT_SINK_TOKENS + seq->block_count * LAYOUT_BLOCK_TOKENS;

    if (token < LAYOUT_SINK_TOKENS || token >= scene->n_kv)
        return 0;
    if (token >= window)
        return seq->hidden_pages >> (token - window) / 64 & 1;
    uint32_t block = (token - LAYOUT_SINK_TOKENS) / LAYOUT_BLOCK_TOKENS;
    return seq->hidden_blocks && (seq->hidden_blocks[block / 64] >> block % 64 & 1);
}

/* Worst error of `out` over some rows of one KV head, relative to the largest |value|. */
static double worst_error(const struct scene *scene, uint32_t head, uint32_t row_step,
                          const float *out) {
    uint32_t group = scene->args.q_heads / HEADS, dim = scene->dim;
    double worst = 0, largest = 0;

    reference_values(scene, head);
    for (uint32_t i = 0; i < scene->seq.row_count * group; i += row_step) {
        size_t at = ((size_t)(i / group) * scene->args.q_heads + head * group + i % group) * dim;
        uint32_t end = scene->n_kv + i / group + 1;
        double sum = 0, acc[128] = {0}, max = -1e300;
        double *logits = malloc(end * sizeof *logits);
        assert_non_null(logits);
        for (uint32_t t = 0; t < end; t++) {
            logits[t] = 0;
            for (uint32_t d = 0; d < dim; d++)
                logits[t] += scene->q[at + d] * value_at(scene, 0, t)[d] / sqrt(dim);
            max = hidden(scene, t) ? max : fmax(max, logits[t]);
        }
        for (uint32_t t = 0; t < end; t++) {
            double p = hidden(scene, t) ? 0 : exp(logits[t] - max);
            sum += p;
            for (uint32_t d = 0; d < dim; d++) {
                acc[d] += p * value_at(scene, 1, t)[d];
                largest = fmax(largest, fabs(value_at(scene, 1, t)[d]));
            }
        }
        for (uint32_t d = 0; d < dim; d++) {
            double error = fabs(acc[d] / sum - out[at + d]);
            worst = error <= worst ? worst : error; /* NaN counts as worst */
        }
        free(logits);
    }
    return worst / largest;
}

/* --- tests */

static uint32_t table_count(void) {
    return ops_cpu_has_avx2() ? 2 : 1;
}

static const struct kvops_table *table_at(uint32_t i) {
    return i ? kvops_host_avx2() : kvops_host_c();
}

/* Prefill of every twin against the reference; where there is one row, decode gives its bits. */
static double check_scene(struct scene *scene, uint32_t row_step) {
    double worst = 0;

    for (uint32_t i = 0; i < table_count(); i++) {
        support_kv_prefill(table_at(i), &scene->args, together);
        for (uint32_t head = 0; head < HEADS; head++) {
            double error = worst_error(scene, head, row_step, scene->out);
            assert_true(error <= ERROR_MAX);
            worst = error > worst ? error : worst;
        }
        if (scene->seq.row_count > 1)
            continue;
        scene->args.out = scene->out_other;
        support_kv_decode(table_at(i), &scene->args, together);
        scene->args.out = scene->out;
        assert_memory_equal(scene->out, scene->out_other, out_count(scene) * sizeof(float));
    }
    return worst;
}

static double check_shape(const struct shape *shape, uint64_t seed, uint32_t row_step) {
    struct scene scene;
    double worst;

    scene_init(&scene, shape, seed);
    worst = check_scene(&scene, row_step);
    scene_release(&scene);
    return worst;
}

/* BREAK_NODE_ORDER folds runs straight into the total, in decode alone. */
static void every_length_and_tier(void **state) {
    static const uint32_t lengths[] = {1, 63, 64, 65, 319, 320, 576, 2000, 8191};
    uint64_t seed = testing_seed("lengths", 31);
    double worst = 0;

    (void)state;
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        for (uint32_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++) {
                struct shape shape = {dim, 3, lengths[i], 1, {tier}, 1};
                if (lengths[i] < 576 && tier != LAYOUT_K8V4)
                    continue; /* no block, so no tier */
                if (lengths[i] == 8191 && tier != LAYOUT_K6V3 && testing_quick())
                    continue;
                double error = check_shape(&shape, seed + i, 1);
                worst = error > worst ? error : worst;
            }
        }
    }
    printf("worst error %.2g of the largest value\n", worst);
}

/* BREAK_CHUNK_FUTURE lets a row see the tokens after it. */
static void every_group_and_chunk(void **state) {
    static const uint32_t groups[] = {1, 3, 4, 8, 5, 2};
    static const uint32_t rows[] = {1, 2, 7, 64, 65, 200, 256};
    uint64_t seed = testing_seed("groups", 32);
    double worst = 0;

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        for (uint32_t j = 0; j < 7; j++) {
            struct shape shape = {(i + j) % 2 ? 64 : 128,
                                  groups[i],
                                  j % 3 ? 64 + 256 * j + 13 : j * 20,
                                  rows[j],
                                  {LAYOUT_K8V4, LAYOUT_K6V4, LAYOUT_K6V3, LAYOUT_K6V2},
                                  4};
            double error = check_shape(&shape, seed + 10 * i + j, rows[j] > 64 ? 37 : 5);
            worst = error > worst ? error : worst;
        }
    }
    printf("worst error %.2g of the largest value\n", worst);
}

/* Calls of any size in any order over scratch that holds NaN: what a thread pool may do. */
static void splits_change_no_bit(void **state) {
    static const struct support_kv_split splits[] = {{1, 0}, {1, 1}, {2, 1}, {5, 0}, {7, 1}};
    struct shape shape = {64, 3, 2500, 100, {LAYOUT_K8V4, LAYOUT_K6V2, LAYOUT_K6V3}, 3};
    struct scene scene;

    (void)state;
    scene_init(&scene, &shape, testing_seed("splits", 33));
    for (uint32_t i = 0; i < table_count(); i++) {
        support_kv_prefill(table_at(i), &scene.args, together);
        for (uint32_t j = 0; j < sizeof splits / sizeof splits[0]; j++) {
            scene.args.out = scene.out_other;
            support_kv_prefill(table_at(i), &scene.args, splits[j]);
            assert_memory_equal(scene.out, scene.out_other, out_count(&scene) * sizeof(float));
            scene.args.out = scene.out;
        }
    }
    scene_release(&scene);
    shape.rows = 1;
    scene_init(&scene, &shape, 34);
    for (uint32_t i = 0; i < table_count(); i++) {
        support_kv_decode(table_at(i), &scene.args, together);
        for (uint32_t j = 0; j < sizeof splits / sizeof splits[0]; j++) {
            scene.args.out = scene.out_other;
            support_kv_decode(table_at(i), &scene.args, splits[j]);
            assert_memory_equal(scene.out, scene.out_other, out_count(&scene) * sizeof(float));
            scene.args.out = scene.out;
        }
    }
    scene_release(&scene);
}

/* Four sequences over one pool, in any order and at any row, each equal to itself alone. */
static void neighbours_change_no_bit(void **state) {
    struct shape shape = {64, 3, 2700, 4, {LAYOUT_K8V4, LAYOUT_K6V3}, 2};
    struct scene scene;
    struct kvops_seq seqs[4], alone;
    size_t row_floats;

    (void)state;
    scene_init(&scene, &shape, testing_seed("neighbours", 35));
    row_floats = scene.args.q_heads * scene.dim;
    for (uint32_t i = 0; i < 4; i++) {
        seqs[i] = scene.seq;
        seqs[i].row_count = 1;
        seqs[i].block_count -= 2 * i;
        seqs[i].window_tokens -= 50 * i;
        seqs[i].first_row = 3 - i;
        if (i == 2)
            seqs[i].chunk_k = NULL;
    }
    for (uint32_t t = 0; t < table_count(); t++) {
        for (uint32_t i = 0; i < 4; i++) {
            struct kvops_attend args = scene.args;
            alone = seqs[i];
            alone.first_row = 0;
            args.seqs = &alone;
            args.q = scene.q + seqs[i].first_row * row_floats;
            args.out = scene.out_other + seqs[i].first_row * row_floats;
            support_kv_decode(table_at(t), &args, together);
        }
        struct kvops_attend args = scene.args;
        args.seqs = seqs;
        args.seq_count = 4;
        support_kv_decode(table_at(t), &args, (struct support_kv_split){3, 1});
        assert_memory_equal(scene.out, scene.out_other, 4 * row_floats * sizeof(float));
        support_kv_prefill(table_at(t), &args, (struct support_kv_split){2, 1});
        assert_memory_equal(scene.out, scene.out_other, 4 * row_floats * sizeof(float));
    }
    scene_release(&scene);
}

static void holes_are_not_read(void **state) {
    struct shape shape = {64, 3, 2400, 1, {LAYOUT_K8V4, LAYOUT_K6V4}, 2};
    uint64_t blocks[1] = {1u << 2 | 1u << 5};
    struct scene scene;

    (void)state;
    scene_init(&scene, &shape, testing_seed("holes", 36));
    scene.seq.hidden_blocks = blocks;
    scene.seq.hidden_pages = 1u << 1;
    scene.kv.blocks[2].slot[0] = UINT32_MAX; /* reading it would crash */
    scene.kv.blocks[2].meta_frame = UINT32_MAX;
    scene.kv.blocks[2].tier = LAYOUT_TIER_BF16;
    memset(scene.kv.blocks[2].slot, 0xFF, sizeof scene.kv.blocks[2].slot);
    memset(&scene.kv.window[1], 0xFF, sizeof scene.kv.window[1]);
    for (uint32_t i = 0; i < table_count(); i++) {
        /* The reference needs no values of a hidden block; it only skips BF16 ones. */
        support_kv_prefill(table_at(i), &scene.args, together);
        assert_true(worst_error(&scene, 1, 1, scene.out) <= ERROR_MAX);
        scene.args.out = scene.out_other;
        support_kv_decode(table_at(i), &scene.args, together);
        scene.args.out = scene.out;
        assert_memory_equal(scene.out, scene.out_other, out_count(&scene) * sizeof(float));
        blocks[0] = 1u << 2;
        support_kv_prefill(table_at(i), &scene.args, together);
        assert_true(memcmp(scene.out, scene.out_other, out_count(&scene) * sizeof(float)) != 0);
        blocks[0] = 1u << 2 | 1u << 5;
    }
    scene_release(&scene);
}

static void nothing_visible_gives_zeros(void **state) {
    struct shape shape = {64, 4, 600, 1, {LAYOUT_K8V4}, 1};
    uint64_t blocks[1] = {1};
    struct scene scene;

    (void)state;
    scene_init(&scene, &shape, testing_seed("nothing", 37));
    scene.seq.hidden_blocks = blocks;
    scene.seq.hidden_pages = 0xFF;
    scene.seq.sink_tokens = 0;
    scene.seq.chunk_k = NULL;
    for (uint32_t i = 0; i < table_count(); i++) {
        support_kv_prefill(table_at(i), &scene.args, together);
        for (size_t j = 0; j < out_count(&scene); j++)
            assert_true(scene.out[j] == 0.0f);
        support_kv_decode(table_at(i), &scene.args, together);
        for (size_t j = 0; j < out_count(&scene); j++)
            assert_true(scene.out[j] == 0.0f);
    }
    scene_release(&scene);
}

/* A wrong scale page must show: without this, "equal" above could mean "ignored". */
static void a_wrong_scale_page_shows(void **state) {
    struct shape shape = {64, 3, 900, 1, {LAYOUT_K6V4}, 1};
    struct scene scene;

    (void)state;
    scene_init(&scene, &shape, testing_seed("scales", 38));
    for (uint32_t i = 0; i < table_count(); i++) {
        for (uint32_t value = 0; value < 2; value++) {
            struct layout_at at = {LAYER, 1, 3};
            struct layout_place place = layout_tile(&scene.kv.pool.geometry, LAYOUT_META, at);
            uint8_t *scales =
                scene.kv.pool.meta +
                scene.seq.blocks[1].meta_frame * layout_meta_frame_bytes(&scene.kv.pool.geometry) +
                place.off + 128 * value;
            uint8_t kept[128];
            memcpy(kept, scales, sizeof kept);
            for (uint32_t t = 0; t < 64; t++) /* four times as large */
                scales[2 * t + 1] = (uint8_t)(scales[2 * t + 1] + 8);
            support_kv_decode(table_at(i), &scene.args, together);
            memcpy(scales, kept, sizeof kept);
            assert_true(worst_error(&scene, 1, 1, scene.out) > 100 * ERROR_MAX);
            assert_true(worst_error(&scene, 0, 1, scene.out) <= ERROR_MAX);
        }
    }
    scene_release(&scene);
}

static void nan_in_q_stays_in_its_head(void **state) {
    struct shape shape = {64, 3, 900, 2, {LAYOUT_K8V4}, 1};
    struct scene scene;

    (void)state;
    scene_init(&scene, &shape, testing_seed("nan", 39));
    scene.q[(1 * 6 + 4) * 64 + 9] = NAN; /* row 1, query head 4 */
    for (uint32_t i = 0; i < table_count(); i++) {
        support_kv_prefill(table_at(i), &scene.args, together);
        for (uint32_t j = 0; j < out_count(&scene); j++)
            assert_int_equal(isnan(scene.out[j]) != 0, j / 64 == 10);
    }
    scene_release(&scene);
}

TESTING_MAIN(cmocka_unit_test(every_length_and_tier), cmocka_unit_test(every_group_and_chunk),
             cmocka_unit_test(splits_change_no_bit), cmocka_unit_test(neighbours_change_no_bit),
             cmocka_unit_test(holes_are_not_read), cmocka_unit_test(nothing_visible_gives_zeros),
             cmocka_unit_test(a_wrong_scale_page_shows),
             cmocka_unit_test(nan_in_q_stays_in_its_head))
