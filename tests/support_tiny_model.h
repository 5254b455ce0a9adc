/* tests/support_tiny_model.h - a small random model file, made in memory.
 *
 * Responsible for: a GGUF (version 3, llama architecture) that every loader of engine/model
 * accepts: byte-level BPE vocabulary with ChatML control tokens and some merges, a chat template
 * with a default system message, random weights from a seed.
 * Not responsible for: sense; its answers are noise, but the same noise for the same options.
 *
 * Threads: pure.
 * Units: elements, bytes.
 */
#ifndef TESTS_SUPPORT_TINY_MODEL_H
#define TESTS_SUPPORT_TINY_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "engine/model/gguf.h"

struct tiny_model_options {
    uint64_t seed;
    uint32_t layers;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim; /* hidden is heads × head_dim */
    uint32_t ffn;      /* a multiple of 32 */
    uint32_t context_tokens;
    enum gguf_type matrix_type;
    enum gguf_type embd_type;
    int untied;           /* adds output.weight in embd_type */
    int rope_freqs;       /* adds rope_freqs.weight */
    const char *pre;      /* pre-tokenizer, such as "smollm" */
    const char *template; /* chat template, or NULL for none */
    const char *architecture;
    int reasoning;         /* adds <think> and </think>: 1 as user-defined tokens, 2 as control */
    const char *extra_key; /* one more key, or NULL: a text, or a u32 when extra_text is NULL */
    const char *extra_text;
    uint32_t extra_number;
};

/* 2 layers, 4 heads, 2 KV heads, head_dim 64, ffn 512, context 8192, Q4_1 matrices, Q8_0
 * token_embd, tied, smollm, the ChatML template; seed 1. */
struct tiny_model_options tiny_model_default(void);

/* The file, 64-byte aligned, out of kv_alloc_system(); drop with tiny_model_drop. NULL when the
 * options make no sense or there is no memory. */
uint8_t *tiny_model_make(const struct tiny_model_options *options, size_t *size_bytes_out);
void tiny_model_drop(uint8_t *file);
/* The same as a file; fails the test on an error. */
void tiny_model_write(const struct tiny_model_options *options, const char *path);

/* Reads the real model at testing_model_path(), as above. NULL when it is absent. */
uint8_t *tiny_model_read_real(size_t *size_bytes_out);

#endif
