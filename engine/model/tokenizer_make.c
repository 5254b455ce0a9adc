/* engine/model/tokenizer_make.c - the tables of a tokenizer out of a model file.
 *
 * Responsible for: GPT-2's alphabet of bytes, vocabulary, merges, special and stop tokens, each
 * checked before it is believed; the digest.
 * Not responsible for: using them (tokenizer.c, tokenizer_decode.c).
 */
#include "engine/model/tokenizer_inner.h"

#include <stdlib.h>
#include <string.h>

#include "engine/model/utf8.h"
#include "store/base/bytes.h"

enum {
    MERGES_MAX = 1 << 22,
    MERGE_BYTES_MAX = 4096,
    ALPHABET_END = 256 + 68, /* code points that stand for bytes lie below */
    NO_BYTE = -1
};

struct making {
    struct tokenizer *tokenizer;
    const struct gguf *gguf;
    struct kv_diag *diag;
    struct kv_digest_state digest;
    int16_t alphabet[ALPHABET_END]; /* code point -> byte or NO_BYTE */
};

static enum kv_err no_memory(struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the tokenizer's tables");
}

/* An absent key is a damaged file here. */
static enum kv_err need(enum kv_err err) {
    return err == KV_ERR_NOT_FOUND ? KV_ERR_CORRUPT : err;
}

static void digest_u32(struct making *making, uint32_t value) {
    uint8_t bytes[4];
    kv_put_u32(bytes, value);
    kv_digest_update(&making->digest, bytes, sizeof bytes);
}

static void digest_text(struct making *making, struct gguf_text text) {
    digest_u32(making, (uint32_t)text.size_bytes);
    kv_digest_update(&making->digest, text.bytes, (size_t)text.size_bytes);
}

/* Printable bytes stand for themselves; the other 68, in order, for U+0100 onwards. */
static void make_alphabet(struct making *making) {
    int16_t next = 256;
    for (int code = 0; code < ALPHABET_END; code++)
        making->alphabet[code] = NO_BYTE;
    for (int byte = 0; byte < TOKENIZER_BYTES; byte++) {
        int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
        making->alphabet[printable ? byte : next++] = (int16_t)byte;
    }
}

/* The bytes that a token's letters stand for; 0 when some letter stands for none. */
static int unletter(const struct making *making, struct gguf_text text, char *bytes_out,
                    size_t *count_out) {
    const uint8_t *at = (const uint8_t *)text.bytes;
    size_t used = 0;
    for (uint64_t i = 0; i < text.size_bytes;) {
        int length = utf8_length(at + i, (size_t)(text.size_bytes - i));
        int code = length == 1 ? at[i] : length == 2 ? (at[i] & 31) << 6 | (at[i + 1] & 63) : 9999;
        if (length <= 0 || code >= ALPHABET_END || making->alphabet[code] == NO_BYTE)
            return 0;
        bytes_out[used++] = (char)(uint8_t)making->alphabet[code];
        i += (uint64_t)length;
    }
    *count_out = used;
    return 1;
}

static uint32_t *piece_slot(const struct tokenizer *tokenizer, const void *bytes, size_t count) {
    uint32_t at = (uint32_t)kv_digest_short(bytes, count) & tokenizer->pieces_mask;
    for (;; at = (at + 1) & tokenizer->pieces_mask) {
        uint32_t found = tokenizer->pieces[at];
        if (found == 0)
            break;
        uint32_t first = tokenizer->starts[found - 1];
        if (tokenizer->starts[found] - first == count &&
            memcmp(tokenizer->blob + first, bytes, count) == 0)
            break;
    }
    return &tokenizer->pieces[at];
}

uint32_t tokenizer_find_piece(const struct tokenizer *tokenizer, const void *bytes, size_t count) {
    uint32_t found = *piece_slot(tokenizer, bytes, count);
    return found == 0 ? BPE_NONE : found - 1;
}

/* Sizes are known before anything is allocated. */
static enum kv_err make_tables(struct making *making, struct gguf_view tokens) {
    struct tokenizer *t = making->tokenizer;
    uint64_t blob_bytes = 1, slots = 16;
    uint64_t count = tokens.count;
    if (count == 0 || count > TOKENIZER_VOCAB_MAX)
        return kv_diag_set(making->diag, count == 0 ? KV_ERR_CORRUPT : KV_ERR_LIMIT,
                           "the tokenizer has %llu tokens; 1 to %d are supported",
                           (unsigned long long)count, TOKENIZER_VOCAB_MAX);
    while (tokens.count != 0)
        blob_bytes += gguf_next_string(&tokens).size_bytes;
    if (blob_bytes > UINT32_MAX)
        return kv_diag_set(making->diag, KV_ERR_LIMIT,
                           "the tokenizer's tokens have %llu bytes together; at most 4 GiB are "
                           "supported",
                           (unsigned long long)blob_bytes);
    while (slots < 2 * count)
        slots *= 2;
    t->info.vocab_count = (uint32_t)count;
    t->pieces_mask = (uint32_t)(slots - 1);
    t->blob = kv_alloc_zeroed(t->alloc, (size_t)blob_bytes, 1);
    t->starts = kv_alloc_zeroed(t->alloc, (size_t)count + 1, sizeof t->starts[0]);
    t->kinds = kv_alloc_zeroed(t->alloc, (size_t)count, sizeof t->kinds[0]);
    t->pieces = kv_alloc_zeroed(t->alloc, (size_t)slots, sizeof t->pieces[0]);
    t->specials = kv_alloc_zeroed(t->alloc, (size_t)count, sizeof t->specials[0]);
    if (t->blob == NULL || t->starts == NULL || t->kinds == NULL || t->pieces == NULL ||
        t->specials == NULL)
        return no_memory(making->diag);
    return KV_OK;
}

static enum kv_err read_kinds(struct making *making) {
    struct tokenizer *t = making->tokenizer;
    struct gguf_view kinds;
    enum kv_err err =
        gguf_array(making->gguf, "tokenizer.ggml.token_type", GGUF_KIND_I32, &kinds, making->diag);
    if (err == KV_ERR_NOT_FOUND) {
        memset(t->kinds, TOKEN_NORMAL, t->info.vocab_count);
        return KV_OK;
    }
    if (err != KV_OK)
        return err;
    if (kinds.count != t->info.vocab_count)
        return kv_diag_set(making->diag, KV_ERR_CORRUPT,
                           "the tokenizer has %u tokens but %llu token types", t->info.vocab_count,
                           (unsigned long long)kinds.count);
    for (uint32_t id = 0; id < t->info.vocab_count; id++) {
        uint32_t kind = gguf_next_u32(&kinds);
        if (kind < TOKEN_NORMAL || kind > TOKEN_BYTE)
            return kv_diag_set(making->diag, KV_ERR_CORRUPT,
                               "token %u of the tokenizer has the unknown type %u", id, kind);
        t->kinds[id] = (uint8_t)kind;
    }
    return KV_OK;
}

/* A normal token is spelled in the alphabet; any other, and one that is not, is taken literally. */
static enum kv_err read_tokens(struct making *making) {
    struct tokenizer *t = making->tokenizer;
    struct gguf_view tokens;
    enum kv_err err = KV_OK;
    uint32_t used = 0;
    KV_TRY(need(gguf_array(making->gguf, "tokenizer.ggml.tokens", GGUF_KIND_STRING, &tokens,
                           making->diag)));
    KV_TRY(make_tables(making, tokens));
    KV_TRY(read_kinds(making));
    for (uint32_t id = 0; id < t->info.vocab_count; id++) {
        struct gguf_text text = gguf_next_string(&tokens);
        size_t bytes = 0;
        digest_u32(making, t->kinds[id]);
        digest_text(making, text);
        int spelled = t->kinds[id] == TOKEN_NORMAL &&
                      unletter(making, text, t->blob + used, &bytes) && bytes != 0;
        if (!spelled) {
            bytes = (size_t)text.size_bytes;
            memcpy(t->blob + used, text.bytes, bytes);
        }
        t->starts[id] = used;
        used += (uint32_t)bytes;
        t->starts[id + 1] = used;
        if (!spelled)
            continue;
        uint32_t *slot = piece_slot(t, t->blob + t->starts[id], bytes);
        if (*slot == 0)
            *slot = id + 1;
    }
    for (int byte = 0; byte < TOKENIZER_BYTES; byte++) {
        uint8_t one = (uint8_t)byte;
        t->byte_ids[byte] = tokenizer_find_piece(t, &one, 1);
    }
done:
    return err;
}

/* "A B": both and their join must be normal tokens. */
static enum kv_err read_merge(struct making *making, uint32_t rank, struct gguf_text text) {
    struct tokenizer *t = making->tokenizer;
    char bytes[MERGE_BYTES_MAX];
    size_t left = 0, right = 0;
    const char *space = text.size_bytes > MERGE_BYTES_MAX || text.size_bytes == 0
                            ? NULL
                            : memchr(text.bytes, ' ', (size_t)text.size_bytes);
    if (space != NULL) {
        struct gguf_text first = {text.bytes, (uint64_t)(space - text.bytes)};
        struct gguf_text second = {space + 1, text.size_bytes - first.size_bytes - 1};
        if (unletter(making, first, bytes, &left) &&
            unletter(making, second, bytes + left, &right) && left != 0 && right != 0) {
            uint32_t a = tokenizer_find_piece(t, bytes, left);
            uint32_t b = tokenizer_find_piece(t, bytes + left, right);
            uint32_t made = tokenizer_find_piece(t, bytes, left + right);
            if (a != BPE_NONE && b != BPE_NONE && made != BPE_NONE) {
                bpe_add(&t->bpe, a, b, (struct bpe_merge){.rank = rank, .made = made});
                return KV_OK;
            }
        }
    }
    return kv_diag_set(making->diag, KV_ERR_CORRUPT,
                       "merge %u of the tokenizer does not join two tokens into a third", rank);
}

static enum kv_err read_merges(struct making *making) {
    struct tokenizer *t = making->tokenizer;
    struct gguf_view merges;
    enum kv_err err = KV_OK;
    KV_TRY(need(gguf_array(making->gguf, "tokenizer.ggml.merges", GGUF_KIND_STRING, &merges,
                           making->diag)));
    if (merges.count > MERGES_MAX) {
        err = kv_diag_set(making->diag, KV_ERR_LIMIT,
                          "the tokenizer has %llu merges; at most %d are supported",
                          (unsigned long long)merges.count, MERGES_MAX);
        goto done;
    }
    if (!bpe_make(&t->bpe, t->alloc, (uint32_t)merges.count)) {
        err = no_memory(making->diag);
        goto done;
    }
    digest_u32(making, (uint32_t)merges.count);
    for (uint32_t rank = 0; merges.count != 0; rank++) {
        struct gguf_text text = gguf_next_string(&merges);
        digest_text(making, text);
        KV_TRY(read_merge(making, rank, text));
    }
done:
    return err;
}

/* An id key: absent gives TOKENIZER_NONE. */
static enum kv_err read_id(struct making *making, const char *key, int32_t *id_out) {
    uint32_t id = 0;
    *id_out = TOKENIZER_NONE;
    enum kv_err err = gguf_u32(making->gguf, key, &id, making->diag);
    if (err == KV_OK && id >= making->tokenizer->info.vocab_count)
        return kv_diag_set(making->diag, KV_ERR_CORRUPT,
                           "%s is %u, but the tokenizer has %u tokens", key, id,
                           making->tokenizer->info.vocab_count);
    if (err == KV_OK)
        *id_out = (int32_t)id;
    digest_u32(making, (uint32_t)*id_out);
    return err == KV_ERR_NOT_FOUND ? KV_OK : err;
}

static void add_stop(struct tokenizer *t, int32_t id) {
    if (id != TOKENIZER_NONE && !tokenizer_is_stop(t, (uint32_t)id) &&
        t->stop_count < TOKENIZER_STOPS_MAX)
        t->stops[t->stop_count++] = (uint32_t)id;
}

static enum kv_err read_special_ids(struct making *making) {
    static const char *const stop_names[] = {"<|endoftext|>", "<|im_end|>",      "<|eot_id|>",
                                             "<|eom_id|>",    "<|end_of_text|>", "<|end|>"};
    struct tokenizer *t = making->tokenizer;
    enum kv_err err = KV_OK;
    int32_t eot = TOKENIZER_NONE, eom = TOKENIZER_NONE;
    KV_TRY(read_id(making, "tokenizer.ggml.bos_token_id", &t->info.bos_id));
    KV_TRY(read_id(making, "tokenizer.ggml.eos_token_id", &t->info.eos_id));
    KV_TRY(read_id(making, "tokenizer.ggml.unknown_token_id", &t->info.unknown_id));
    KV_TRY(read_id(making, "tokenizer.ggml.padding_token_id", &t->info.pad_id));
    KV_TRY(read_id(making, "tokenizer.ggml.eot_token_id", &eot));
    KV_TRY(read_id(making, "tokenizer.ggml.eom_token_id", &eom));
    t->info.add_bos = pretokenize_adds_bos(t->pretokenize);
    err = gguf_bool(making->gguf, "tokenizer.ggml.add_bos_token", &t->info.add_bos, making->diag);
    if (err != KV_OK && err != KV_ERR_NOT_FOUND)
        goto done;
    err = KV_OK;
    t->info.add_bos = t->info.add_bos && t->info.bos_id != TOKENIZER_NONE;
    digest_u32(making, (uint32_t)t->info.add_bos);
    add_stop(t, t->info.eos_id);
    add_stop(t, eot);
    add_stop(t, eom);
    for (size_t i = 0; i < sizeof stop_names / sizeof stop_names[0]; i++) {
        int32_t id = tokenizer_special(t, stop_names[i]);
        if (id != TOKENIZER_NONE && tokenizer_is_control(t, (uint32_t)id))
            add_stop(t, id);
    }
done:
    return err;
}

struct special {
    uint32_t id;
    uint32_t bytes;
    uint8_t first;
};

static int by_first_then_longest(const void *a, const void *b) {
    const struct special *left = a, *right = b;
    if (left->first != right->first)
        return left->first < right->first ? -1 : 1;
    if (left->bytes != right->bytes)
        return left->bytes > right->bytes ? -1 : 1;
    return (left->id > right->id) - (left->id < right->id);
}

static enum kv_err sort_specials(struct making *making) {
    struct tokenizer *t = making->tokenizer;
    uint32_t count = 0, at = 0;
    struct special *list = kv_alloc_zeroed(t->alloc, t->info.vocab_count, sizeof *list);
    if (list == NULL)
        return no_memory(making->diag);
    for (uint32_t id = 0; id < t->info.vocab_count; id++) {
        uint32_t bytes = t->starts[id + 1] - t->starts[id];
        if (bytes != 0 && (t->kinds[id] == TOKEN_CONTROL || t->kinds[id] == TOKEN_UNKNOWN ||
                           t->kinds[id] == TOKEN_USER_DEFINED))
            list[count++] = (struct special){
                .id = id, .bytes = bytes, .first = (uint8_t)t->blob[t->starts[id]]};
    }
    qsort(list, count, sizeof list[0], by_first_then_longest);
    for (unsigned first = 0; first <= TOKENIZER_BYTES; first++) {
        while (at < count && list[at].first < first)
            at++;
        t->specials_first[first] = first == TOKENIZER_BYTES ? count : at;
    }
    for (uint32_t i = 0; i < count; i++)
        t->specials[i] = list[i].id;
    kv_alloc_release(t->alloc, list);
    return KV_OK;
}

static enum kv_err choose_stand_in(struct making *making) {
    struct tokenizer *t = making->tokenizer;
    t->stand_in_id = tokenizer_find_piece(t, "\xef\xbf\xbd", 3);
    if (t->stand_in_id == BPE_NONE && t->info.unknown_id != TOKENIZER_NONE)
        t->stand_in_id = (uint32_t)t->info.unknown_id;
    for (int byte = 0; byte < TOKENIZER_BYTES && t->stand_in_id == BPE_NONE; byte++) {
        if (t->byte_ids[byte] == BPE_NONE)
            return kv_diag_set(making->diag, KV_ERR_MISMATCH,
                               "the tokenizer has no token for byte 0x%02x, none for U+FFFD and "
                               "no unknown token to stand in for it",
                               (unsigned)byte);
    }
    return KV_OK;
}

enum kv_err tokenizer_make(const struct gguf *gguf, const struct kv_alloc *alloc,
                           struct tokenizer **tokenizer_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct gguf_text model = {0}, pre = {0};
    struct making making = {.gguf = gguf, .diag = diag};
    making.tokenizer = kv_alloc_zeroed(alloc, 1, sizeof *making.tokenizer);
    if (making.tokenizer == NULL)
        return no_memory(diag);
    making.tokenizer->alloc = alloc;
    kv_digest_init(&making.digest);
    make_alphabet(&making);
    KV_TRY(need(gguf_string(gguf, "tokenizer.ggml.model", &model, diag)));
    if (!gguf_text_equal(model, "gpt2")) {
        err = kv_diag_set(diag, KV_ERR_MISMATCH,
                          "the model's tokenizer \"%.*s\" is not supported; byte-level BPE "
                          "(\"gpt2\") is",
                          (int)(model.size_bytes < 40 ? model.size_bytes : 40), model.bytes);
        goto done;
    }
    KV_TRY(need(gguf_string(gguf, "tokenizer.ggml.pre", &pre, diag)));
    KV_TRY(pretokenize_make(pre, alloc, &making.tokenizer->pretokenize, diag));
    digest_text(&making, pre);
    KV_TRY(read_tokens(&making));
    KV_TRY(read_merges(&making));
    KV_TRY(sort_specials(&making));
    KV_TRY(read_special_ids(&making));
    KV_TRY(choose_stand_in(&making));
    making.tokenizer->digest = kv_digest_final(&making.digest);
    *tokenizer_out = making.tokenizer;
    making.tokenizer = NULL;
done:
    tokenizer_drop(making.tokenizer);
    return err;
}

void tokenizer_drop(struct tokenizer *tokenizer) {
    if (tokenizer == NULL)
        return;
    const struct kv_alloc *alloc = tokenizer->alloc;
    pretokenize_drop(tokenizer->pretokenize);
    bpe_release(&tokenizer->bpe, alloc);
    kv_alloc_release(alloc, tokenizer->blob);
    kv_alloc_release(alloc, tokenizer->starts);
    kv_alloc_release(alloc, tokenizer->kinds);
    kv_alloc_release(alloc, tokenizer->pieces);
    kv_alloc_release(alloc, tokenizer->specials);
    kv_alloc_release(alloc, tokenizer);
}
