/* engine/model/weights.h - which tensors a model consists of, and their shapes.
 *
 * Responsible for: reading the hyperparameters of a llama model, checking that every tensor is
 * there with the right shape and that there is none the forward pass would ignore, and handing out
 * pointers to the raw data.
 * Not responsible for: unpacking or packing values (the forward pass does that for its matrix
 * product) or the bytes (they stay the caller's, see gguf.h).
 *
 * A matrix with `rows` outputs and `columns` inputs lies row by row; a row is columns values of
 * its type. Everything that would change an answer without being computed (adapters, experts,
 * biases, RoPE scaling, partial rotation, split files) is refused by name.
 *
 * Threads: read-only after weights_make.
 * Units: elements.
 */
#ifndef ENGINE_MODEL_WEIGHTS_H
#define ENGINE_MODEL_WEIGHTS_H

#include <stdint.h>

#include "engine/model/gguf.h"

enum {
    WEIGHTS_LAYERS_MAX = 512,
    WEIGHTS_HIDDEN_MAX = 65536,
    WEIGHTS_FFN_MAX = 262144,
    WEIGHTS_HEADS_MAX = 1024,
    WEIGHTS_VOCAB_MAX = 1048576,
    WEIGHTS_CONTEXT_MAX = 1048576 /* tokens per session, DESIGN section 14 */
};

/* Which elements of a head turn together. It belongs to a snapshot: K is cached after RoPE. */
enum weights_rope { WEIGHTS_ROPE_ADJACENT = 0, WEIGHTS_ROPE_HALF = 1 };

struct weights_matrix {
    const void *data;
    enum gguf_type type;
    uint32_t rows;
    uint32_t columns;
};

struct weights_geometry {
    uint32_t layers;
    uint32_t hidden;
    uint32_t ffn;
    uint32_t heads;
    uint32_t kv_heads; /* divides heads */
    uint32_t head_dim; /* 64 or 128 */
    uint32_t vocab;
    uint32_t context_tokens;
    float rms_eps;
    float rope_base;
    enum weights_rope rope;
    int tied; /* output is token_embd */
};

struct weights_layer {
    const float *attn_norm;            /* [hidden] */
    const float *ffn_norm;             /* [hidden] */
    struct weights_matrix attn_q;      /* [heads × head_dim][hidden] */
    struct weights_matrix attn_k;      /* [kv_heads × head_dim][hidden] */
    struct weights_matrix attn_v;      /* [kv_heads × head_dim][hidden] */
    struct weights_matrix attn_output; /* [hidden][heads × head_dim] */
    struct weights_matrix ffn_gate;    /* [ffn][hidden] */
    struct weights_matrix ffn_up;      /* [ffn][hidden] */
    struct weights_matrix ffn_down;    /* [hidden][ffn] */
};

struct weights {
    struct weights_geometry geometry;
    struct weights_matrix token_embd; /* [vocab][hidden] */
    struct weights_matrix output;     /* [vocab][hidden]; token_embd again when tied */
    const float *output_norm;         /* [hidden] */
    const float *rope_freqs;          /* [head_dim / 2] divisors of the angle, or NULL */
    struct weights_layer *layer;      /* [layers] */
    const struct kv_alloc *alloc;
};

/* KV_ERR_MISMATCH: an architecture, adapter, scaling or shape that is not supported.
 * KV_ERR_CORRUPT: a key or tensor is missing, has the wrong shape or an impossible value.
 * KV_ERR_LIMIT: beyond the maxima above. KV_ERR_NOMEM. The gguf's bytes must outlive the result. */
enum kv_err weights_make(const struct gguf *gguf, const struct kv_alloc *alloc,
                         struct weights **weights_out, struct kv_diag *diag);
void weights_drop(struct weights *weights); /* NULL is allowed */

/* Digest of the geometry and RoPE parameters, rope_freqs included: part of the model's identity
 * beside gguf_tensors_digest. */
struct kv_digest weights_geometry_digest(const struct weights *weights);

#endif
