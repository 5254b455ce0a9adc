/* tests/test_forward.c - the forward pass against a plain one in double precision.
 *
 * Responsible for: logits of prefilled and decoded rows under recipe bf16, through sinks, window
 * and sealed BF16 blocks; both SIMD paths; both RoPE scales of the tiny model.
 * Not responsible for: sealed tiers (test_attention), equality of bits (test_engine).
 */
#include "engine/model/gguf.h"
#include "engine/model/weights.h"
#include "tests/support_engine.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 640, DECODED = 24, ALL = TOKENS + DECODED };

/* --- the plain forward pass */

struct plain {
    const struct weights *weights;
    double *k, *v; /* [layer][token][kv_head][dim], rounded to BF16 */
    uint32_t count;
};

static double half_to_double(const uint8_t *at) {
    uint32_t bits = at[0] | (uint32_t)at[1] << 8;
    int exponent = (bits >> 10) & 31;
    double fraction = bits & 1023;
    double value = exponent ? ldexp(1 + fraction / 1024, exponent - 15) : ldexp(fraction, -24);

    return bits & 0x8000 ? -value : value;
}

static double element(const struct weights_matrix *matrix, uint32_t row, uint32_t column) {
    uint64_t index = (uint64_t)row * matrix->columns + column;
    const uint8_t *at = matrix->data;
    uint32_t in_block = column % 32;

    if (matrix->type == GGUF_TYPE_Q8_0) {
        at += index / 32 * 34;
        return half_to_double(at) * (int8_t)at[2 + in_block];
    }
    assert_int_equal(matrix->type, GGUF_TYPE_Q4_1);
    at += index / 32 * 20;
    uint8_t byte = at[4 + in_block % 16];
    return half_to_double(at) * (in_block < 16 ? byte & 15 : byte >> 4) + half_to_double(at + 2);
}

static double *widen(const struct weights_matrix *matrix) {
    double *wide = malloc((size_t)matrix->rows * matrix->columns * sizeof *wide);

    for (uint32_t row = 0; row < matrix->rows; row++)
        for (uint32_t column = 0; column < matrix->columns; column++)
            wide[(size_t)row * matrix->columns + column] = element(matrix, row, column);
    return wide;
}

static void multiply(const double *wide, uint32_t rows, uint32_t columns, const double *x,
                     double *y) {
    for (uint32_t row = 0; row < rows; row++) {
        double sum = 0;
        for (uint32_t column = 0; column < columns; column++)
            sum += wide[(size_t)row * columns + column] * x[column];
        y[row] = sum;
    }
}

static void plain_norm(const double *x, const float *gain, double eps, uint32_t n, double *y) {
    double square = 0;

    for (uint32_t i = 0; i < n; i++)
        square += x[i] * x[i];
    for (uint32_t i = 0; i < n; i++)
        y[i] = x[i] / sqrt(square / n + eps) * (double)gain[i];
}

static double round_bf16(double value) {
    float single = (float)value;
    uint32_t bits;

    memcpy(&bits, &single, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&single, &bits, sizeof bits);
    return (double)single;
}

static void rotate(const struct weights_geometry *g, double *head, uint32_t position) {
    for (uint32_t i = 0; i < g->head_dim / 2; i++) {
        double angle = position * pow((double)g->rope_base, -2.0 * i / g->head_dim);
        uint32_t a = g->rope == WEIGHTS_ROPE_ADJACENT ? 2 * i : i;
        uint32_t b = g->rope == WEIGHTS_ROPE_ADJACENT ? 2 * i + 1 : i + g->head_dim / 2;
        double x = head[a], y = head[b];
        head[a] = x * cos(angle) - y * sin(angle);
        head[b] = x * sin(angle) + y * cos(angle);
    }
}

struct wide_layer {
    double *q, *k, *v, *o, *gate, *up, *down;
};

static void attend(const struct weights_geometry *g, const double *q, const double *k,
                   const double *v, uint32_t count, double *out) {
    static double p[ALL];
    uint32_t kv_width = g->kv_heads * g->head_dim;

    for (uint32_t head = 0; head < g->heads; head++) {
        uint32_t kv = head / (g->heads / g->kv_heads) * g->head_dim;
        double most = -1e300, sum = 0;
        for (uint32_t t = 0; t < count; t++) {
            p[t] = 0;
            for (uint32_t d = 0; d < g->head_dim; d++)
                p[t] += q[head * g->head_dim + d] * k[t * kv_width + kv + d];
            p[t] /= sqrt(g->head_dim);
            most = p[t] > most ? p[t] : most;
        }
        for (uint32_t t = 0; t < count; t++)
            sum += p[t] = exp(p[t] - most);
        for (uint32_t d = 0; d < g->head_dim; d++) {
            double value = 0;
            for (uint32_t t = 0; t < count; t++)
                value += p[t] * v[t * kv_width + kv + d];
            out[head * g->head_dim + d] = value / sum;
        }
    }
}

static void plain_layer(struct plain *plain, const struct wide_layer *wide, uint32_t layer,
                        double *x) {
    const struct weights_geometry *g = &plain->weights->geometry;
    const struct weights_layer *w = &plain->weights->layer[layer];
    uint32_t kv_width = g->kv_heads * g->head_dim, position = plain->count;
    double *k = plain->k + (size_t)layer * ALL * kv_width, *k_now = k + position * kv_width;
    double *v = plain->v + (size_t)layer * ALL * kv_width, *v_now = v + position * kv_width;
    double y[512], q[512], out[512], gate[1024], up[1024];

    plain_norm(x, w->attn_norm, (double)g->rms_eps, g->hidden, y);
    multiply(wide->q, g->heads * g->head_dim, g->hidden, y, q);
    multiply(wide->k, kv_width, g->hidden, y, k_now);
    multiply(wide->v, kv_width, g->hidden, y, v_now);
    for (uint32_t head = 0; head < g->heads; head++)
        rotate(g, q + head * g->head_dim, position);
    for (uint32_t head = 0; head < g->kv_heads; head++)
        rotate(g, k_now + head * g->head_dim, position);
    for (uint32_t i = 0; i < kv_width; i++) {
        k_now[i] = round_bf16(k_now[i]);
        v_now[i] = round_bf16(v_now[i]);
    }
    attend(g, q, k, v, position + 1, out);
    multiply(wide->o, g->hidden, g->heads * g->head_dim, out, y);
    for (uint32_t i = 0; i < g->hidden; i++)
        x[i] += y[i];
    plain_norm(x, w->ffn_norm, (double)g->rms_eps, g->hidden, y);
    multiply(wide->gate, g->ffn, g->hidden, y, gate);
    multiply(wide->up, g->ffn, g->hidden, y, up);
    for (uint32_t i = 0; i < g->ffn; i++)
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    multiply(wide->down, g->hidden, g->ffn, gate, y);
    for (uint32_t i = 0; i < g->hidden; i++)
        x[i] += y[i];
}

/* --- the comparison */

struct rows {
    uint32_t vocab;
    float *logits; /* [ALL][vocab] */
};

static void take_row(void *context, uint64_t position, const float *logits) {
    struct rows *rows = context;

    assert_true(position < ALL);
    memcpy(rows->logits + position * rows->vocab, logits, rows->vocab * sizeof *logits);
}

static struct wide_layer *widen_all(const struct weights *weights) {
    struct wide_layer *wide = malloc(weights->geometry.layers * sizeof *wide);

    for (uint32_t i = 0; i < weights->geometry.layers; i++) {
        const struct weights_layer *w = &weights->layer[i];
        wide[i] = (struct wide_layer){
            widen(&w->attn_q),   widen(&w->attn_k), widen(&w->attn_v),  widen(&w->attn_output),
            widen(&w->ffn_gate), widen(&w->ffn_up), widen(&w->ffn_down)};
    }
    return wide;
}

static void free_wide(struct wide_layer *wide, uint32_t layers) {
    for (uint32_t i = 0; i < layers; i++) {
        double *all[] = {wide[i].q,    wide[i].k,  wide[i].v,   wide[i].o,
                         wide[i].gate, wide[i].up, wide[i].down};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            free(all[k]);
    }
    free(wide);
}

/* Largest difference of a logit, relative to the largest logit of its row. */
static double compare(const struct weights *weights, const uint32_t *ids, const struct rows *rows) {
    const struct weights_geometry *g = &weights->geometry;
    size_t kv = (size_t)g->layers * ALL * g->kv_heads * g->head_dim;
    struct plain plain = {weights, malloc(kv * sizeof(double)), malloc(kv * sizeof(double)), 0};
    struct wide_layer *wide = widen_all(weights);
    double *head = widen(&weights->output), *logits = malloc(g->vocab * sizeof(double));
    double worst = 0, x[512], y[512];

    for (; plain.count < ALL; plain.count++) {
        double most = 0, difference = 0;
        for (uint32_t i = 0; i < g->hidden; i++)
            x[i] = element(&weights->token_embd, ids[plain.count], i);
        for (uint32_t layer = 0; layer < g->layers; layer++)
            plain_layer(&plain, &wide[layer], layer, x);
        plain_norm(x, weights->output_norm, (double)g->rms_eps, g->hidden, y);
        multiply(head, g->vocab, g->hidden, y, logits);
        for (uint32_t i = 0; i < g->vocab; i++) {
            double ours = (double)rows->logits[(size_t)plain.count * g->vocab + i];
            most = fabs(logits[i]) > most ? fabs(logits[i]) : most;
            difference = fabs(logits[i] - ours) > difference ? fabs(logits[i] - ours) : difference;
        }
        worst = difference / most > worst ? difference / most : worst;
    }
    free_wide(wide, g->layers);
    free(head);
    free(logits);
    free(plain.k);
    free(plain.v);
    return worst;
}

/* BREAK_POSITION turns every chunk as if it stood at the beginning. */
static void compare_with_plain(enum engine_simd simd) {
    struct support_engine_options options = support_engine_default();
    struct tiny_model_options model = tiny_model_default();
    size_t size;
    uint8_t *file = tiny_model_make(&model, &size);
    struct gguf *gguf = NULL;
    struct weights *weights = NULL;
    struct session_info info;
    struct session *session;
    struct rows rows;
    uint32_t ids[TOKENS];
    double worst;

    assert_int_equal(gguf_parse(file, size, kv_alloc_system(), &gguf, NULL), KV_OK);
    assert_int_equal(weights_make(gguf, kv_alloc_system(), &weights, NULL), KV_OK);
    options.simd = simd;
    struct engine *engine = support_engine_tiny(&options);
    rows.vocab = weights->geometry.vocab;
    rows.logits = malloc((size_t)ALL * rows.vocab * sizeof(float));
    session = support_engine_session(engine, "s", IMAGE_RECIPE_BF16);
    session_observe(session, take_row, &rows);
    support_engine_ids(testing_seed("ids", 7), rows.vocab, ids, TOKENS);
    support_engine_feed(session, ids, TOKENS);
    for (uint32_t i = 0; i < DECODED; i++) {
        /* One id at a time, not sampled, so that an early end token does not end the test. */
        uint32_t id = ids[(i * 37) % TOKENS];
        support_engine_feed(session, &id, 1);
    }
    session_info(session, &info);
    assert_int_equal(info.n_kv, ALL);
    assert_int_equal(info.blocks, 1);
    worst = compare(weights, info.ids, &rows);
    printf("largest difference of a logit, relative to its row's largest: %.2e\n", worst);
    assert_true(worst < 2e-3);
    assert_true(worst > 0);
    free(rows.logits);
    engine_close(engine);
    weights_drop(weights);
    gguf_drop(gguf);
    tiny_model_drop(file);
}

static void plain_c_equals_double(void **state) {
    (void)state;
    compare_with_plain(ENGINE_SIMD_C);
}

static void avx2_equals_double(void **state) {
    (void)state;
    compare_with_plain(ENGINE_SIMD_AUTO);
}

static struct kv_digest numerics_of(uint32_t context_tokens) {
    struct tiny_model_options options = tiny_model_default();
    struct engine_settings settings = {.alloc = kv_alloc_system(),
                                       .clock = kv_clock_system(),
                                       .simd = ENGINE_SIMD_C,
                                       .threads = 1,
                                       .sessions_max = 1,
                                       .slot_budget_bytes = 8 << 20};
    struct engine *engine = NULL;
    struct engine_model model;
    size_t size = 0;

    options.context_tokens = context_tokens;
    uint8_t *file = tiny_model_make(&options, &size);
    assert_int_equal(engine_open(&settings, file, size, &engine, NULL), KV_OK);
    engine_model(engine, &model);
    engine_close(engine);
    tiny_model_drop(file);
    return model.identity.numerics;
}

/* Other tables, here longer ones, are another numerics id. BREAK_TABLES_ID leaves them out. */
static void the_numerics_id_sees_the_tables(void **state) {
    (void)state;
    struct kv_digest first = numerics_of(8192), again = numerics_of(8192);
    struct kv_digest other = numerics_of(4096);

    assert_memory_equal(first.bytes, again.bytes, KV_DIGEST_BYTES);
    assert_memory_not_equal(first.bytes, other.bytes, KV_DIGEST_BYTES);
}

TESTING_MAIN(cmocka_unit_test(plain_c_equals_double), cmocka_unit_test(avx2_equals_double),
             cmocka_unit_test(the_numerics_id_sees_the_tables))
