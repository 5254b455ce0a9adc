/* engine/model/tokenizer_inner.h - the tables behind a struct tokenizer.
 *
 * Responsible for: what tokenizer_make.c fills, tokenizer.c and tokenizer_decode.c read.
 * Not responsible for: anything outside these files.
 *
 * Threads: as tokenizer.h.
 * Units: bytes; token ids.
 */
#ifndef ENGINE_MODEL_TOKENIZER_INNER_H
#define ENGINE_MODEL_TOKENIZER_INNER_H

#include "engine/model/bpe.h"
#include "engine/model/pretokenize.h"
#include "engine/model/tokenizer.h"

/* Kinds of tokens, with the numbers that the file uses. */
enum {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER_DEFINED = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6
};

enum { TOKENIZER_STOPS_MAX = 16, TOKENIZER_BYTES = 256 };

struct tokenizer {
    const struct kv_alloc *alloc;
    struct tokenizer_info info;
    char *blob;       /* the bytes of all tokens */
    uint32_t *starts; /* [vocab + 1] places in the blob */
    uint8_t *kinds;   /* [vocab] */
    uint32_t *pieces; /* hash of the bytes of normal tokens: id + 1, 0 is empty */
    uint32_t pieces_mask;
    uint32_t *specials; /* ids to look for in text, by first byte, then longest first */
    uint32_t specials_first[TOKENIZER_BYTES + 1];
    uint32_t byte_ids[TOKENIZER_BYTES]; /* BPE_NONE where the vocabulary has none */
    uint32_t stand_in_id;               /* for those bytes */
    uint32_t stops[TOKENIZER_STOPS_MAX];
    uint32_t stop_count;
    struct bpe bpe;
    struct pretokenize *pretokenize;
    struct kv_digest digest;
};

/* The normal token with these bytes, or BPE_NONE. */
uint32_t tokenizer_find_piece(const struct tokenizer *tokenizer, const void *bytes, size_t count);

#endif
