/* tests/test_weights.c - hyperparameters and tensors of a model, accepted or refused by name.
 *
 * Responsible for: geometry, shapes, pointers, every refusal, the geometry digest.
 * Not responsible for: the file's layout (test_gguf.c) or arithmetic (the forward pass).
 */
#include "engine/model/weights.h"

#include "store/base/bytes.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"

#include <string.h>

struct opened {
    uint8_t *file;
    size_t size;
    struct gguf *gguf;
    struct weights *weights;
    struct kv_diag diag;
};

static void open_file(struct opened *opened, const struct tiny_model_options *options) {
    memset(opened, 0, sizeof *opened);
    opened->file = tiny_model_make(options, &opened->size);
    assert_non_null(opened->file);
}

static enum kv_err load(struct opened *opened) {
    assert_int_equal(
        gguf_parse(opened->file, opened->size, kv_alloc_system(), &opened->gguf, &opened->diag),
        KV_OK);
    return weights_make(opened->gguf, kv_alloc_system(), &opened->weights, &opened->diag);
}

static void close_file(struct opened *opened) {
    weights_drop(opened->weights);
    gguf_drop(opened->gguf);
    tiny_model_drop(opened->file);
}

static void expect(struct opened *opened, enum kv_err wanted, const char *part) {
    enum kv_err err = load(opened);
    if (err != wanted || strstr(opened->diag.text, part) == NULL)
        fail_msg("%s: \"%s\"; wanted %s: \"%s\"", kv_err_name(err), opened->diag.text,
                 kv_err_name(wanted), part);
    assert_null(opened->weights);
    close_file(opened);
}

static void expect_options(const struct tiny_model_options *options, enum kv_err wanted,
                           const char *part) {
    struct opened opened;
    open_file(&opened, options);
    expect(&opened, wanted, part);
}

static uint8_t *behind(struct opened *opened, const char *text) {
    uint8_t *at = memmem(opened->file, opened->size, text, strlen(text));
    assert_non_null(at);
    return at + strlen(text);
}

static void a_tiny_model_loads(void **state) {
    (void)state;
    struct tiny_model_options options = tiny_model_default();
    struct opened opened;
    open_file(&opened, &options);
    assert_int_equal(load(&opened), KV_OK);
    const struct weights *w = opened.weights;
    const struct weights_geometry *g = &w->geometry;
    assert_int_equal(g->layers, 2);
    assert_int_equal(g->hidden, 256);
    assert_int_equal(g->ffn, 512);
    assert_int_equal(g->heads, 4);
    assert_int_equal(g->kv_heads, 2);
    assert_int_equal(g->head_dim, 64);
    assert_int_equal(g->context_tokens, 8192);
    assert_int_equal(g->vocab, w->token_embd.rows);
    assert_true(g->tied && w->output.data == w->token_embd.data && w->rope_freqs == NULL);
    assert_int_equal(w->layer[1].attn_k.rows, 128);
    assert_int_equal(w->layer[1].attn_k.columns, 256);
    assert_int_equal(w->layer[1].ffn_down.columns, 512);
    assert_int_equal(w->layer[1].ffn_down.type, GGUF_TYPE_Q4_1);
    for (int i = 0; i < 256; i++)
        assert_true(w->layer[0].attn_norm[i] > 0.89f && w->layer[0].attn_norm[i] < 1.11f);
    close_file(&opened);
}

static void every_variant_loads(void **state) {
    (void)state;
    const enum gguf_type types[] = {GGUF_TYPE_F32,  GGUF_TYPE_F16,  GGUF_TYPE_BF16,
                                    GGUF_TYPE_Q8_0, GGUF_TYPE_Q4_0, GGUF_TYPE_Q4_1};
    for (size_t i = 0; i < 6; i++) {
        struct tiny_model_options options = tiny_model_default();
        struct opened opened;
        options.matrix_type = types[i];
        options.embd_type = types[5 - i];
        options.untied = i % 2 == 0;
        options.rope_freqs = 1;
        options.head_dim = 128;
        options.heads = 3;
        options.kv_heads = 1;
        open_file(&opened, &options);
        assert_int_equal(load(&opened), KV_OK);
        assert_int_equal(opened.weights->layer[0].ffn_up.type, types[i]);
        assert_int_equal(opened.weights->output.type, types[5 - i]);
        assert_int_equal(opened.weights->geometry.tied, i % 2 != 0);
        assert_int_equal(opened.weights->output.data == opened.weights->token_embd.data,
                         i % 2 != 0);
        assert_non_null(opened.weights->rope_freqs);
        close_file(&opened);
    }
}

static void foreign_models_are_refused_by_name(void **state) {
    (void)state;
    const struct tiny_model_options base = tiny_model_default();
    struct tiny_model_options options = base;
    options.architecture = "qwen3";
    expect_options(&options, KV_ERR_MISMATCH, "\"qwen3\"");
    options = base;
    options.head_dim = 96;
    expect_options(&options, KV_ERR_MISMATCH, "96");
    options = base;
    options.kv_heads = 3;
    expect_options(&options, KV_ERR_CORRUPT, "3 KV heads");
    const struct {
        const char *key, *text;
        uint32_t number;
        const char *part;
    } extras[] = {{"llama.rope.scaling.type", "yarn", 0, "\"yarn\""},
                  {"llama.rope.scaling.type", "linear", 0, "\"linear\""},
                  {"adapter.type", "lora", 0, "adapter"},
                  {"split.count", NULL, 3, "3 parts"},
                  {"llama.expert_count", NULL, 8, "experts"},
                  {"llama.attention.sliding_window", NULL, 4096, "sliding"},
                  {"llama.attention.value_length", NULL, 128, "128 (V)"}};
    for (size_t i = 0; i < sizeof extras / sizeof extras[0]; i++) {
        options = base;
        options.extra_key = extras[i].key;
        options.extra_text = extras[i].text;
        options.extra_number = extras[i].number;
        expect_options(&options, KV_ERR_MISMATCH, extras[i].part);
    }
    struct opened opened;
    options = base;
    options.extra_key = "llama.rope.scaling.type";
    options.extra_text = "none";
    open_file(&opened, &options);
    assert_int_equal(load(&opened), KV_OK);
    close_file(&opened);
    open_file(&opened, &base);
    memcpy(behind(&opened, "general.type") + 12, "adapt", 5);
    expect(&opened, KV_ERR_MISMATCH, "\"adapt\"");
}

static void wrong_tensors_are_named(void **state) {
    (void)state;
    struct tiny_model_options options = tiny_model_default();
    struct opened opened;
    open_file(&opened, &options);
    memcpy(behind(&opened, "blk.1.attn_q") - 1, "x", 1);
    expect(&opened, KV_ERR_CORRUPT, "blk.1.attn_q.weight");
    open_file(&opened, &options);
    kv_put_u32(behind(&opened, "llama.feed_forward_length") + 4, 480);
    expect(&opened, KV_ERR_CORRUPT, "tensor blk.0.ffn_gate.weight has the shape 256 × 512");
    open_file(&opened, &options);
    kv_put_u32(behind(&opened, "llama.vocab_size") + 4, 7);
    expect(&opened, KV_ERR_CORRUPT, "vocab_size is 7");
    open_file(&opened, &options);
    kv_put_u32(behind(&opened, "llama.block_count") + 4, 1);
    expect(&opened, KV_ERR_MISMATCH, "tensor blk.1.");
    open_file(&opened, &options);
    kv_put_u32(behind(&opened, "llama.block_count") + 4, 3);
    expect(&opened, KV_ERR_CORRUPT, "no tensor blk.2.");
    options.rope_freqs = 1;
    open_file(&opened, &options);
    memcpy(behind(&opened, "rope_freqs.") - 2, "x", 1);
    expect(&opened, KV_ERR_MISMATCH, "tensor rope_freqx.weight is not part");
}

static void impossible_numbers_are_refused(void **state) {
    (void)state;
    static const char *const keys[] = {
        "llama.block_count",         "llama.context_length",       "llama.embedding_length",
        "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.head_count_kv",
        "llama.rope.dimension_count"};
    struct tiny_model_options options = tiny_model_default();
    struct opened opened;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        open_file(&opened, &options);
        kv_put_u32(behind(&opened, keys[i]) + 4, 0);
        expect(&opened, KV_ERR_CORRUPT, keys[i]);
        open_file(&opened, &options);
        kv_put_u32(behind(&opened, keys[i]) + 4, UINT32_MAX);
        expect(&opened, KV_ERR_LIMIT, keys[i]);
        open_file(&opened, &options);
        kv_put_u32(behind(&opened, keys[i]), GGUF_KIND_F32);
        expect(&opened, KV_ERR_MISMATCH, keys[i]);
        open_file(&opened, &options);
        if (i < 5) {
            *(behind(&opened, keys[i]) - 1) = 'X';
            expect(&opened, KV_ERR_CORRUPT, keys[i]);
        } else {
            close_file(&opened);
        }
    }
    /* More heads than attention can hold would end in one of its asserts. */
    open_file(&opened, &options);
    kv_put_u32(behind(&opened, "llama.attention.head_count_kv") + 4, 257);
    expect(&opened, KV_ERR_LIMIT, "head_count_kv of the model file is 257");
    open_file(&opened, &options);
    kv_put_u32(behind(&opened, "llama.attention.head_count") + 4, 34);
    expect(&opened, KV_ERR_LIMIT, "34 heads for 2 KV heads");
    const uint32_t floats[] = {0, 0x80000000u, 0x7fc00000u, 0x7f800000u, 0xbf800000u};
    for (size_t i = 0; i < 5; i++) {
        open_file(&opened, &options);
        kv_put_u32(behind(&opened, "llama.attention.layer_norm_rms_epsilon") + 4, floats[i]);
        expect(&opened, KV_ERR_CORRUPT, "layer_norm_rms_epsilon");
        open_file(&opened, &options);
        kv_put_u32(behind(&opened, "llama.rope.freq_base") + 4, floats[i]);
        expect(&opened, KV_ERR_CORRUPT, "freq_base");
    }
}

static void the_geometry_digest_sees_rope(void **state) {
    (void)state;
    struct tiny_model_options options = tiny_model_default();
    struct opened one, two;
    open_file(&one, &options);
    open_file(&two, &options);
    /* 10000 becomes 10000.001: the lowest bit of the float. */
    behind(&two, "llama.rope.freq_base")[4] ^= 1;
    assert_int_equal(load(&one), KV_OK);
    assert_int_equal(load(&two), KV_OK);
    struct kv_digest a = weights_geometry_digest(one.weights);
    struct kv_digest b = weights_geometry_digest(two.weights);
    assert_memory_not_equal(&a, &b, sizeof a);
    a = gguf_tensors_digest(one.gguf);
    b = gguf_tensors_digest(two.gguf);
    assert_memory_equal(&a, &b, sizeof a);
    close_file(&one);
    close_file(&two);
}

static void allocation_failures_leave_nothing(void **state) {
    (void)state;
    struct tiny_model_options options = tiny_model_default();
    struct opened opened;
    open_file(&opened, &options);
    assert_int_equal(load(&opened), KV_OK);
    for (uint64_t k = 1; k <= 3; k++) {
        struct testing_alloc testing;
        struct weights *weights = NULL;
        testing_alloc_init(&testing, k);
        assert_int_equal(weights_make(opened.gguf, &testing.alloc, &weights, &opened.diag),
                         k <= 2 ? KV_ERR_NOMEM : KV_OK);
        weights_drop(weights);
        assert_int_equal(testing.live_count, 0);
    }
    close_file(&opened);
}

static void the_real_model_loads(void **state) {
    (void)state;
    testing_need_model();
    struct opened opened = {0};
    opened.file = tiny_model_read_real(&opened.size);
    assert_non_null(opened.file);
    assert_int_equal(load(&opened), KV_OK);
    const struct weights_geometry *g = &opened.weights->geometry;
    assert_int_equal(g->layers, 30);
    assert_int_equal(g->hidden, 576);
    assert_int_equal(g->heads, 9);
    assert_int_equal(g->kv_heads, 3);
    assert_int_equal(g->head_dim, 64);
    assert_int_equal(g->ffn, 1536);
    assert_int_equal(g->vocab, 49152);
    assert_int_equal(g->context_tokens, 8192);
    assert_true(g->rope_base == 100000.0f && g->rms_eps == 1e-5f && g->tied);
    close_file(&opened);
}

TESTING_MAIN(cmocka_unit_test(a_tiny_model_loads), cmocka_unit_test(every_variant_loads),
             cmocka_unit_test(foreign_models_are_refused_by_name),
             cmocka_unit_test(wrong_tensors_are_named),
             cmocka_unit_test(impossible_numbers_are_refused),
             cmocka_unit_test(the_geometry_digest_sees_rope),
             cmocka_unit_test(allocation_failures_leave_nothing),
             cmocka_unit_test(the_real_model_loads))
