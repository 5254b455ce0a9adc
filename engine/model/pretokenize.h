/* engine/model/pretokenize.h - cuts text into the pieces within which merges may happen.
 *
 * Responsible for: the expressions of the pre-tokenizers smollm, llama-bpe, qwen2 and gpt-2, run by
 * PCRE2 one after another, each over the pieces that the one before left.
 * Not responsible for: special tokens (tokenizer.c) or merges (bpe.c).
 *
 * Bytes that are not UTF-8 come out as pieces of one byte, and the text on either side is cut as
 * if it stood alone.
 *
 * Threads: read-only after pretokenize_make; pretokenize_split may run on any number of threads.
 * Units: bytes.
 */
#ifndef ENGINE_MODEL_PRETOKENIZE_H
#define ENGINE_MODEL_PRETOKENIZE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/model/gguf.h"

struct pretokenize;

/* Takes one piece; an error ends the split and is returned from it. */
typedef enum kv_err (*pretokenize_take)(void *context, const uint8_t *piece, size_t bytes);

/* KV_ERR_MISMATCH: an unknown name. KV_ERR_NOMEM. */
enum kv_err pretokenize_make(struct gguf_text name, const struct kv_alloc *alloc,
                             struct pretokenize **pretokenize_out, struct kv_diag *diag);
void pretokenize_drop(struct pretokenize *pretokenize); /* NULL is allowed */

/* 1 when a piece that is a token as a whole is taken without merging. */
int pretokenize_whole_pieces(const struct pretokenize *pretokenize);
/* 1 when a file that does not say wants the first-token id in front. */
int pretokenize_adds_bos(const struct pretokenize *pretokenize);

/* Every byte of the text is in exactly one piece, in order. KV_ERR_NOMEM, or what `take` says. */
enum kv_err pretokenize_split(const struct pretokenize *pretokenize, const void *text,
                              size_t text_bytes, pretokenize_take take, void *context);

#endif
