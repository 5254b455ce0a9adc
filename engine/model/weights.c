/* engine/model/weights.c - hyperparameters and tensors of a llama model, checked.
 *
 * Responsible for: refusing what the forward pass would not compute, shapes, pointers.
 * Not responsible for: values of the tensors.
 */
#include "engine/model/weights.h"

#include <stdio.h>
#include <string.h>

#include "kernels/kvops.h"
#include "store/base/bytes.h"

enum { NAME_BYTES = 96 };

_Static_assert((int)WEIGHTS_LAYERS_MAX <= (int)LAYOUT_LAYERS_MAX, "attention holds every layer");

struct load {
    const struct gguf *gguf;
    struct weights *weights;
    struct kv_diag *diag;
    uint32_t used; /* tensors of the file that the model takes */
};

/* Reads "llama.<key>"; an absent key gives `fallback`, or an error when that is negative. */
static enum kv_err read_count(struct load *load, const char *key, int64_t fallback,
                              uint32_t *value_out) {
    char full[NAME_BYTES];
    snprintf(full, sizeof full, "llama.%s", key);
    if (fallback >= 0 && !gguf_has(load->gguf, full)) {
        *value_out = (uint32_t)fallback;
        return KV_OK;
    }
    enum kv_err err = gguf_u32(load->gguf, full, value_out, load->diag);
    return err == KV_ERR_NOT_FOUND ? KV_ERR_CORRUPT : err;
}

/* As read_count, within [1, max]. */
static enum kv_err read_size(struct load *load, const char *key, int64_t fallback, uint32_t max,
                             uint32_t *value_out) {
    uint32_t value = 0;
    enum kv_err err = read_count(load, key, fallback, &value);
    if (err != KV_OK)
        return err;
    if (value == 0)
        return kv_diag_set(load->diag, KV_ERR_CORRUPT, "llama.%s of the model file is 0", key);
    if (value > max)
        return kv_diag_set(load->diag, KV_ERR_LIMIT,
                           "llama.%s of the model file is %u; at most %u is supported", key, value,
                           max);
    *value_out = value;
    return KV_OK;
}

static enum kv_err read_float(struct load *load, const char *key, float fallback,
                              float *value_out) {
    char full[NAME_BYTES];
    snprintf(full, sizeof full, "llama.%s", key);
    *value_out = fallback;
    if (fallback > 0.0f && !gguf_has(load->gguf, full))
        return KV_OK;
    enum kv_err err = gguf_f32(load->gguf, full, value_out, load->diag);
    if (err != KV_OK)
        return err == KV_ERR_NOT_FOUND ? KV_ERR_CORRUPT : err;
    if (!(*value_out > 0.0f && *value_out < 1e30f))
        return kv_diag_set(load->diag, KV_ERR_CORRUPT,
                           "%s of the model file is %g; a positive number was expected", full,
                           (double)*value_out);
    return KV_OK;
}

static enum kv_err check_architecture(struct load *load) {
    struct gguf_text text;
    if (gguf_string(load->gguf, "general.type", &text, NULL) == KV_OK &&
        !gguf_text_equal(text, "model"))
        return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                           "this file is of type \"%.*s\", not a whole model; adapters are not "
                           "supported: merge it into its base model first",
                           (int)(text.size_bytes < 40 ? text.size_bytes : 40), text.bytes);
    if (gguf_has(load->gguf, "adapter.type"))
        return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                           "this file is an adapter, not a whole model; merge it into its base "
                           "model first");
    uint32_t parts = 1;
    if (gguf_u32(load->gguf, "split.count", &parts, NULL) == KV_OK && parts > 1)
        return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                           "this file is one of %u parts of a model; join them into one file "
                           "first",
                           parts);
    enum kv_err err = gguf_string(load->gguf, "general.architecture", &text, load->diag);
    if (err != KV_OK)
        return err == KV_ERR_NOT_FOUND ? KV_ERR_CORRUPT : err;
    if (!gguf_text_equal(text, "llama"))
        return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                           "the model has architecture \"%.*s\", which is not supported; use a "
                           "llama model",
                           (int)(text.size_bytes < 40 ? text.size_bytes : 40), text.bytes);
    return KV_OK;
}

/* Keys that change the arithmetic in ways that the forward pass does not know. */
static enum kv_err check_features(struct load *load) {
    static const struct {
        const char *key;
        const char *what;
    } absent_or_zero[] = {{"expert_count", "a mixture of experts"},
                          {"attention.sliding_window", "sliding-window attention"}};
    struct gguf_text text;
    for (size_t i = 0; i < sizeof absent_or_zero / sizeof absent_or_zero[0]; i++) {
        uint32_t value = 0;
        enum kv_err err = read_count(load, absent_or_zero[i].key, 0, &value);
        if (err != KV_OK)
            return err;
        if (value != 0)
            return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                               "the model is %s (llama.%s = %u), which is not supported",
                               absent_or_zero[i].what, absent_or_zero[i].key, value);
    }
    if (gguf_string(load->gguf, "llama.rope.scaling.type", &text, NULL) == KV_OK &&
        !gguf_text_equal(text, "none"))
        return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                           "the model scales its positions by \"%.*s\" (llama.rope.scaling.type), "
                           "which is not supported; use a model without scaling or with "
                           "rope_freqs",
                           (int)(text.size_bytes < 40 ? text.size_bytes : 40), text.bytes);
    static const char *const factors[] = {"rope.scale_linear", "rope.scaling.factor"};
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
        float factor = 1.0f;
        char full[NAME_BYTES];
        snprintf(full, sizeof full, "llama.%s", factors[i]);
        if (!gguf_has(load->gguf, full))
            continue;
        enum kv_err err = gguf_f32(load->gguf, full, &factor, load->diag);
        if (err != KV_OK)
            return err;
        if (factor != 1.0f && factor != 0.0f)
            return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                               "the model scales its positions by %g (%s), which is not supported",
                               (double)factor, full);
    }
    return KV_OK;
}

static enum kv_err read_heads(struct load *load) {
    struct weights_geometry *g = &load->weights->geometry;
    uint32_t value_dim = 0, rope_dim = 0;
    enum kv_err err = KV_OK;
    KV_TRY(read_size(load, "attention.head_count", -1, WEIGHTS_HEADS_MAX, &g->heads));
    KV_TRY(read_size(load, "attention.head_count_kv", g->heads, LAYOUT_KV_HEADS_MAX, &g->kv_heads));
    if (g->heads % g->kv_heads != 0) {
        err = kv_diag_set(load->diag, KV_ERR_CORRUPT,
                          "the model has %u heads and %u KV heads; the second must divide the "
                          "first",
                          g->heads, g->kv_heads);
        goto done;
    }
    if (g->heads / g->kv_heads > KVOPS_GROUP_MAX) {
        err =
            kv_diag_set(load->diag, KV_ERR_LIMIT,
                        "the model has %u heads for %u KV heads; at most %d for each is supported",
                        g->heads, g->kv_heads, KVOPS_GROUP_MAX);
        goto done;
    }
    KV_TRY(read_size(load, "attention.key_length", g->hidden / g->heads, WEIGHTS_HIDDEN_MAX,
                     &g->head_dim));
    KV_TRY(read_size(load, "attention.value_length", g->head_dim, WEIGHTS_HIDDEN_MAX, &value_dim));
    KV_TRY(read_size(load, "rope.dimension_count", g->head_dim, WEIGHTS_HIDDEN_MAX, &rope_dim));
    if ((g->head_dim != 64 && g->head_dim != 128) || value_dim != g->head_dim)
        err = kv_diag_set(load->diag, KV_ERR_MISMATCH,
                          "the model has heads of %u (K) and %u (V) values; 64 or 128 for both is "
                          "supported",
                          g->head_dim, value_dim);
    else if (rope_dim != g->head_dim)
        err = kv_diag_set(load->diag, KV_ERR_MISMATCH,
                          "the model turns %u of %u values of a head (llama.rope.dimension_count); "
                          "only whole heads are supported",
                          rope_dim, g->head_dim);
done:
    return err;
}

static enum kv_err read_geometry(struct load *load) {
    struct weights_geometry *g = &load->weights->geometry;
    enum kv_err err = KV_OK;
    KV_TRY(read_size(load, "block_count", -1, WEIGHTS_LAYERS_MAX, &g->layers));
    KV_TRY(read_size(load, "context_length", -1, WEIGHTS_CONTEXT_MAX, &g->context_tokens));
    KV_TRY(read_size(load, "embedding_length", -1, WEIGHTS_HIDDEN_MAX, &g->hidden));
    KV_TRY(read_size(load, "feed_forward_length", -1, WEIGHTS_FFN_MAX, &g->ffn));
    KV_TRY(read_heads(load));
    KV_TRY(read_float(load, "attention.layer_norm_rms_epsilon", 0.0f, &g->rms_eps));
    KV_TRY(read_float(load, "rope.freq_base", 10000.0f, &g->rope_base));
    g->rope = WEIGHTS_ROPE_ADJACENT;
done:
    return err;
}

/* A tensor that must have rows × columns values (rows 0: a vector). */
static enum kv_err take(struct load *load, const char *name, uint64_t rows, uint64_t columns,
                        const struct gguf_tensor **tensor_out) {
    const struct gguf_tensor *tensor = gguf_tensor(load->gguf, name);
    if (tensor == NULL)
        return kv_diag_set(load->diag, KV_ERR_CORRUPT, "the model file has no tensor %s", name);
    uint64_t second = rows == 0 ? 1 : rows;
    if (tensor->dims[0] != columns || tensor->dims[1] != second || tensor->dims[2] != 1 ||
        tensor->dims[3] != 1)
        return kv_diag_set(load->diag, KV_ERR_CORRUPT,
                           "tensor %s has the shape %llu × %llu × %llu; %llu × %llu was expected",
                           name, (unsigned long long)tensor->dims[0],
                           (unsigned long long)tensor->dims[1],
                           (unsigned long long)(tensor->dims[2] * tensor->dims[3]),
                           (unsigned long long)columns, (unsigned long long)second);
    load->used++;
    *tensor_out = tensor;
    return KV_OK;
}

static enum kv_err take_matrix(struct load *load, const char *name, uint32_t rows, uint32_t columns,
                               struct weights_matrix *matrix_out) {
    const struct gguf_tensor *tensor = NULL;
    enum kv_err err = take(load, name, rows, columns, &tensor);
    if (err != KV_OK)
        return err;
    *matrix_out = (struct weights_matrix){
        .data = tensor->data, .type = tensor->type, .rows = rows, .columns = columns};
    return KV_OK;
}

static enum kv_err take_vector(struct load *load, const char *name, uint32_t count,
                               const float **values_out) {
    const struct gguf_tensor *tensor = NULL;
    enum kv_err err = take(load, name, 0, count, &tensor);
    if (err != KV_OK)
        return err;
    if (tensor->type != GGUF_TYPE_F32)
        return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                           "tensor %s has type %s; vectors must be F32", name,
                           gguf_type_name(tensor->type));
    *values_out = tensor->data;
    return KV_OK;
}

static enum kv_err take_layer(struct load *load, uint32_t index) {
    const struct weights_geometry *g = &load->weights->geometry;
    struct weights_layer *layer = &load->weights->layer[index];
    uint32_t q = g->heads * g->head_dim, kv = g->kv_heads * g->head_dim;
    const struct {
        const char *name;
        uint32_t rows, columns;
        struct weights_matrix *matrix;
    } matrices[] = {{"attn_q", q, g->hidden, &layer->attn_q},
                    {"attn_k", kv, g->hidden, &layer->attn_k},
                    {"attn_v", kv, g->hidden, &layer->attn_v},
                    {"attn_output", g->hidden, q, &layer->attn_output},
                    {"ffn_gate", g->ffn, g->hidden, &layer->ffn_gate},
                    {"ffn_up", g->ffn, g->hidden, &layer->ffn_up},
                    {"ffn_down", g->hidden, g->ffn, &layer->ffn_down}};
    char name[NAME_BYTES];
    enum kv_err err = KV_OK;
    snprintf(name, sizeof name, "blk.%u.attn_norm.weight", index);
    KV_TRY(take_vector(load, name, g->hidden, &layer->attn_norm));
    snprintf(name, sizeof name, "blk.%u.ffn_norm.weight", index);
    KV_TRY(take_vector(load, name, g->hidden, &layer->ffn_norm));
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", index, matrices[i].name);
        KV_TRY(take_matrix(load, name, matrices[i].rows, matrices[i].columns, matrices[i].matrix));
    }
done:
    return err;
}

/* The vocabulary's size is that of token_embd; key and tokenizer must agree with it. */
static enum kv_err read_vocab(struct load *load) {
    struct weights_geometry *g = &load->weights->geometry;
    const struct gguf_tensor *embd = gguf_tensor(load->gguf, "token_embd.weight");
    struct gguf_view tokens;
    uint32_t stated = 0;
    if (embd == NULL)
        return kv_diag_set(load->diag, KV_ERR_CORRUPT,
                           "the model file has no tensor token_embd.weight");
    if (embd->dims[1] > WEIGHTS_VOCAB_MAX)
        return kv_diag_set(load->diag, KV_ERR_LIMIT,
                           "the model has %llu tokens; at most %d are supported",
                           (unsigned long long)embd->dims[1], WEIGHTS_VOCAB_MAX);
    g->vocab = (uint32_t)embd->dims[1];
    enum kv_err err = read_count(load, "vocab_size", g->vocab, &stated);
    if (err != KV_OK)
        return err;
    if (stated != g->vocab)
        return kv_diag_set(load->diag, KV_ERR_CORRUPT,
                           "llama.vocab_size is %u, but token_embd.weight has %u rows", stated,
                           g->vocab);
    if (gguf_array(load->gguf, "tokenizer.ggml.tokens", GGUF_KIND_STRING, &tokens, NULL) == KV_OK &&
        tokens.count != g->vocab)
        return kv_diag_set(load->diag, KV_ERR_CORRUPT,
                           "the tokenizer has %llu tokens, but token_embd.weight has %u rows",
                           (unsigned long long)tokens.count, g->vocab);
    return KV_OK;
}

static enum kv_err take_tensors(struct load *load) {
    struct weights *weights = load->weights;
    struct weights_geometry *g = &weights->geometry;
    enum kv_err err = KV_OK;
    KV_TRY(read_vocab(load));
    KV_TRY(take_matrix(load, "token_embd.weight", g->vocab, g->hidden, &weights->token_embd));
    KV_TRY(take_vector(load, "output_norm.weight", g->hidden, &weights->output_norm));
    g->tied = gguf_tensor(load->gguf, "output.weight") == NULL;
    weights->output = weights->token_embd;
    if (!g->tied)
        KV_TRY(take_matrix(load, "output.weight", g->vocab, g->hidden, &weights->output));
    if (gguf_tensor(load->gguf, "rope_freqs.weight") != NULL) {
        KV_TRY(take_vector(load, "rope_freqs.weight", g->head_dim / 2, &weights->rope_freqs));
        for (uint32_t i = 0; i < g->head_dim / 2; i++) {
            if (!(weights->rope_freqs[i] > 0.0f && weights->rope_freqs[i] < 1e38f)) {
                err = kv_diag_set(load->diag, KV_ERR_CORRUPT,
                                  "value %u of rope_freqs.weight is not a positive number", i);
                goto done;
            }
        }
    }
    for (uint32_t i = 0; i < g->layers; i++)
        KV_TRY(take_layer(load, i));
done:
    return err;
}

/* 1 when the name is one of those that take_tensors has taken. */
static int is_known(const struct weights_geometry *g, struct gguf_text name) {
    static const char *const single[] = {"token_embd.weight", "output_norm.weight", "output.weight",
                                         "rope_freqs.weight"};
    static const char *const per_layer[] = {"attn_norm", "ffn_norm", "attn_q",
                                            "attn_k",    "attn_v",   "attn_output",
                                            "ffn_gate",  "ffn_up",   "ffn_down"};
    char text[GGUF_NAME_BYTES_MAX + 1], again[NAME_BYTES];
    uint32_t layer = 0;
    for (size_t i = 0; i < sizeof single / sizeof single[0]; i++) {
        if (gguf_text_equal(name, single[i]))
            return 1;
    }
    memcpy(text, name.bytes, (size_t)name.size_bytes);
    text[name.size_bytes] = 0;
    if (sscanf(text, "blk.%9u", &layer) != 1 || layer >= g->layers)
        return 0;
    for (size_t i = 0; i < sizeof per_layer / sizeof per_layer[0]; i++) {
        snprintf(again, sizeof again, "blk.%u.%s.weight", layer, per_layer[i]);
        if (gguf_text_equal(name, again))
            return 1;
    }
    return 0;
}

/* A tensor that nothing reads would be a part of the model that is silently left out. */
static enum kv_err check_all_used(struct load *load) {
    uint32_t count = gguf_tensor_count(load->gguf);
    if (load->used == count)
        return KV_OK;
    for (uint32_t i = 0; i < count; i++) {
        struct gguf_text name = gguf_tensor_at(load->gguf, i)->name;
        if (!is_known(&load->weights->geometry, name))
            return kv_diag_set(load->diag, KV_ERR_MISMATCH,
                               "tensor %.*s is not part of a llama model as it is computed here; "
                               "biases, adapters and further layers are not supported",
                               (int)name.size_bytes, name.bytes);
    }
    return kv_diag_set(load->diag, KV_ERR_CORRUPT, "the model file has %u tensors, %u are used",
                       count, load->used);
}

enum kv_err weights_make(const struct gguf *gguf, const struct kv_alloc *alloc,
                         struct weights **weights_out, struct kv_diag *diag) {
    enum kv_err err = KV_ERR_NOMEM;
    struct load load = {.gguf = gguf, .diag = diag};
    load.weights = kv_alloc_zeroed(alloc, 1, sizeof *load.weights);
    if (load.weights == NULL) {
        kv_diag_set(diag, err, "no memory for the table of weights");
        goto done;
    }
    load.weights->alloc = alloc;
    KV_TRY(check_architecture(&load));
    KV_TRY(check_features(&load));
    KV_TRY(read_geometry(&load));
    load.weights->layer =
        kv_alloc_zeroed(alloc, load.weights->geometry.layers, sizeof(struct weights_layer));
    if (load.weights->layer == NULL) {
        err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the table of weights");
        goto done;
    }
    KV_TRY(take_tensors(&load));
    KV_TRY(check_all_used(&load));
    *weights_out = load.weights;
    load.weights = NULL;
done:
    weights_drop(load.weights);
    return err;
}

void weights_drop(struct weights *weights) {
    if (weights == NULL)
        return;
    kv_alloc_release(weights->alloc, weights->layer);
    kv_alloc_release(weights->alloc, weights);
}

struct kv_digest weights_geometry_digest(const struct weights *weights) {
    const struct weights_geometry *g = &weights->geometry;
    const uint32_t counts[] = {g->layers,
                               g->hidden,
                               g->ffn,
                               g->heads,
                               g->kv_heads,
                               g->head_dim,
                               g->vocab,
                               g->context_tokens,
                               (uint32_t)g->rope,
                               (uint32_t)g->tied,
                               weights->rope_freqs != NULL};
    uint8_t bytes[4 * (sizeof counts / sizeof counts[0] + 2)];
    struct kv_writer writer;
    struct kv_digest_state state;
    kv_writer_init(&writer, bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        kv_write_u32(&writer, counts[i]);
    kv_write_f32(&writer, g->rms_eps);
    kv_write_f32(&writer, g->rope_base);
    kv_digest_init(&state);
    kv_digest_update(&state, bytes, writer.off);
    if (weights->rope_freqs != NULL)
        kv_digest_update(&state, weights->rope_freqs, (size_t)g->head_dim / 2 * sizeof(float));
    return kv_digest_final(&state);
}
