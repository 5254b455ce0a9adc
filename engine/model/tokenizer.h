/* engine/model/tokenizer.h - text to token ids and back, as the model file says.
 *
 * Responsible for: byte-level BPE with the pre-tokenizers smollm, llama-bpe, qwen2 and gpt-2,
 * special tokens, exact decoding, and whole characters while streaming.
 * Not responsible for: chat turns (template.h).
 *
 * Rule for bytes that are not UTF-8 (surrogates, overlong forms and values beyond U+10FFFF
 * included): each such byte is a piece of its own with the token of that byte; it joins no letter,
 * number or space class and no merge. So decode(encode(x)) is x for every byte string whose bytes
 * have tokens. A vocabulary may lack some (SmolLM2 lacks 04 06 13 14 16 1d c0 c1 f1 f2 f5-ff): such
 * a byte is never dropped; the token of U+FFFD (else the unknown token) stands in for it, and
 * `replaced_bytes` counts it, so that a caller can warn.
 *
 * Special tokens are found leftmost first, the longest at one place: user-defined ones always,
 * control tokens only with TOKENIZER_PARSE_SPECIAL.
 *
 * Threads: read-only after tokenizer_make; any number of threads may encode at once (scratch is
 * per call, out of the allocator that the tokenizer was made with).
 * Units: bytes, token ids.
 */
#ifndef ENGINE_MODEL_TOKENIZER_H
#define ENGINE_MODEL_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/model/gguf.h"

enum {
    TOKENIZER_TEXT_BYTES_MAX = 1 << 26,
    TOKENIZER_VOCAB_MAX = 1 << 20,
    TOKENIZER_NONE = -1, /* an id that the file does not have */

    /* flags of tokenizer_encode */
    TOKENIZER_PARSE_SPECIAL = 1, /* control tokens in the text become their ids */
    TOKENIZER_ADD_BOS = 2        /* the first-token id in front, if the file wants one */
};

struct tokenizer;

/* Ids are appended at items[count]. A text of n bytes never gives more than n ids (n + 1 with
 * TOKENIZER_ADD_BOS). */
struct tokenizer_ids {
    uint32_t *items;
    size_t capacity;
    size_t count;
    size_t replaced_bytes; /* bytes without a token so far; added to, never reset */
};

struct tokenizer_info {
    uint32_t vocab_count;
    int32_t bos_id, eos_id, unknown_id, pad_id; /* TOKENIZER_NONE when absent */
    int add_bos;
};

/* KV_ERR_MISMATCH: a tokenizer model or pre-tokenizer that is not supported, or a byte without a
 * token and nothing to stand in. KV_ERR_CORRUPT: missing or inconsistent tables. KV_ERR_LIMIT,
 * KV_ERR_NOMEM. The gguf may be dropped afterwards, its bytes too. */
enum kv_err tokenizer_make(const struct gguf *gguf, const struct kv_alloc *alloc,
                           struct tokenizer **tokenizer_out, struct kv_diag *diag);
void tokenizer_drop(struct tokenizer *tokenizer); /* NULL is allowed */

/* KV_ERR_LIMIT: the ids do not fit; nothing beyond `capacity` is written and `count` is what would
 * have been needed. KV_ERR_INVALID: the text is longer than TOKENIZER_TEXT_BYTES_MAX.
 * KV_ERR_NOMEM. On an error other than LIMIT, `count` is as before. */
enum kv_err tokenizer_encode(const struct tokenizer *tokenizer, const void *text, size_t text_bytes,
                             unsigned flags, struct tokenizer_ids *ids, struct kv_diag *diag);

/* The exact bytes of one token; empty for an id outside the vocabulary. Lives as long as the
 * tokenizer. */
struct gguf_text tokenizer_piece(const struct tokenizer *tokenizer, uint32_t id);
int tokenizer_is_control(const struct tokenizer *tokenizer, uint32_t id);
/* 1 for the ids that end a turn or a text: eos, eot and their usual names. */
int tokenizer_is_stop(const struct tokenizer *tokenizer, uint32_t id);
/* The id of a control or user-defined token by its text, else TOKENIZER_NONE. */
int32_t tokenizer_special(const struct tokenizer *tokenizer, const char *text);

struct tokenizer_info tokenizer_info(const struct tokenizer *tokenizer);
/* Digest over everything that decides ids: model, pre, tokens, kinds, merges, special ids. */
struct kv_digest tokenizer_digest(const struct tokenizer *tokenizer);

/* Whole characters while tokens arrive. What comes out is always valid UTF-8: an unfinished
 * character is held back, a byte that cannot belong to one becomes U+FFFD. Zero it to begin. */
enum { TOKENIZER_STREAM_GROWTH = 3 };
struct tokenizer_stream {
    uint8_t held[4];
    uint32_t held_count;
};
/* `out` has room for TOKENIZER_STREAM_GROWTH × (bytes + 4); returns the bytes written. */
size_t tokenizer_stream_push(struct tokenizer_stream *stream, const void *bytes, size_t count,
                             char *out);
/* The end: what is still held comes out as U+FFFD. `out` has room for 12 bytes. */
size_t tokenizer_stream_end(struct tokenizer_stream *stream, char *out);

#endif
