/* engine/model/tokenizer.c - text to token ids.
 *
 * Responsible for: finding special tokens, then merging within the pieces of what lies between.
 * Not responsible for: tables (tokenizer_make.c), the way back (tokenizer_decode.c).
 */
#include "engine/model/tokenizer_inner.h"

#include <string.h>

struct encoding {
    const struct tokenizer *tokenizer;
    struct tokenizer_ids *ids;
    struct bpe_scratch scratch;
    uint32_t *symbols;
    size_t symbol_capacity;
};

static void put_id(struct tokenizer_ids *ids, uint32_t id) {
    if (ids->count < ids->capacity)
        ids->items[ids->count] = id;
    ids->count++;
}

static enum kv_err encode_piece(void *context, const uint8_t *piece, size_t bytes) {
    struct encoding *encoding = context;
    const struct tokenizer *t = encoding->tokenizer;
    if (pretokenize_whole_pieces(t->pretokenize)) {
        uint32_t whole = tokenizer_find_piece(t, piece, bytes);
        if (whole != BPE_NONE) {
            put_id(encoding->ids, whole);
            return KV_OK;
        }
    }
    if (!kv_alloc_grow(t->alloc, (void **)&encoding->symbols, &encoding->symbol_capacity, bytes,
                       sizeof encoding->symbols[0]))
        return KV_ERR_NOMEM;
    for (size_t i = 0; i < bytes; i++) {
        encoding->symbols[i] = t->byte_ids[piece[i]];
        encoding->ids->replaced_bytes += encoding->symbols[i] == BPE_NONE;
    }
    size_t count = bytes;
    enum kv_err err = bpe_run(&t->bpe, &encoding->scratch, encoding->symbols, &count);
    if (err != KV_OK)
        return err;
    for (size_t i = 0; i < count; i++)
        put_id(encoding->ids,
               encoding->symbols[i] == BPE_NONE ? t->stand_in_id : encoding->symbols[i]);
    return KV_OK;
}

/* The longest special token at this place, or BPE_NONE. */
static uint32_t special_at(const struct tokenizer *t, const uint8_t *at, size_t left,
                           unsigned flags) {
    for (uint32_t i = t->specials_first[at[0]]; i < t->specials_first[at[0] + 1]; i++) {
        uint32_t id = t->specials[i];
        uint32_t bytes = t->starts[id + 1] - t->starts[id];
        if (t->kinds[id] != TOKEN_USER_DEFINED && !(flags & TOKENIZER_PARSE_SPECIAL))
            continue;
        if (bytes <= left && memcmp(t->blob + t->starts[id], at, bytes) == 0)
            return id;
    }
    return BPE_NONE;
}

static enum kv_err encode_text(struct encoding *encoding, const uint8_t *text, size_t text_bytes,
                               unsigned flags) {
    const struct tokenizer *t = encoding->tokenizer;
    enum kv_err err = KV_OK;
    size_t first = 0; /* of the plain text that is not encoded yet */
    for (size_t at = 0; at < text_bytes;) {
        uint32_t id = special_at(t, text + at, text_bytes - at, flags);
        if (id == BPE_NONE) {
            at++;
            continue;
        }
        KV_TRY(pretokenize_split(t->pretokenize, text + first, at - first, encode_piece, encoding));
        put_id(encoding->ids, id);
        at += t->starts[id + 1] - t->starts[id];
        first = at;
    }
    KV_TRY(pretokenize_split(t->pretokenize, text + first, text_bytes - first, encode_piece,
                             encoding));
done:
    return err;
}

enum kv_err tokenizer_encode(const struct tokenizer *tokenizer, const void *text, size_t text_bytes,
                             unsigned flags, struct tokenizer_ids *ids, struct kv_diag *diag) {
    size_t count_before = ids->count, replaced_before = ids->replaced_bytes;
    struct encoding encoding = {
        .tokenizer = tokenizer, .ids = ids, .scratch = {.alloc = tokenizer->alloc}};
    if (text_bytes > TOKENIZER_TEXT_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "the text has %zu bytes; at most %d can be tokenized at once",
                           text_bytes, TOKENIZER_TEXT_BYTES_MAX);
    if ((flags & TOKENIZER_ADD_BOS) && tokenizer->info.add_bos)
        put_id(ids, (uint32_t)tokenizer->info.bos_id);
    enum kv_err err = text_bytes == 0 ? KV_OK : encode_text(&encoding, text, text_bytes, flags);
    bpe_scratch_release(&encoding.scratch);
    kv_alloc_release(tokenizer->alloc, encoding.symbols);
    if (err != KV_OK) {
        ids->count = count_before;
        ids->replaced_bytes = replaced_before;
        return kv_diag_set(diag, err, "no memory to tokenize %zu bytes of text", text_bytes);
    }
    if (ids->count > ids->capacity)
        return kv_diag_set(diag, KV_ERR_LIMIT, "the text needs %zu tokens; there is room for %zu",
                           ids->count, ids->capacity);
    return KV_OK;
}
