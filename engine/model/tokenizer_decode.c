/* engine/model/tokenizer_decode.c - token ids to bytes, and bytes to characters as they arrive.
 *
 * Responsible for: pieces, what tokens are, whole characters while streaming.
 * Not responsible for: encoding (tokenizer.c).
 */
#include "engine/model/tokenizer_inner.h"

#include <string.h>

#include "engine/model/utf8.h"

struct gguf_text tokenizer_piece(const struct tokenizer *tokenizer, uint32_t id) {
    if (id >= tokenizer->info.vocab_count)
        return (struct gguf_text){.bytes = "", .size_bytes = 0};
    uint32_t first = tokenizer->starts[id];
    return (struct gguf_text){.bytes = tokenizer->blob + first,
                              .size_bytes = tokenizer->starts[id + 1] - first};
}

int tokenizer_is_control(const struct tokenizer *tokenizer, uint32_t id) {
    return id < tokenizer->info.vocab_count &&
           (tokenizer->kinds[id] == TOKEN_CONTROL || tokenizer->kinds[id] == TOKEN_UNKNOWN);
}

int tokenizer_is_stop(const struct tokenizer *tokenizer, uint32_t id) {
    for (uint32_t i = 0; i < tokenizer->stop_count; i++) {
        if (tokenizer->stops[i] == id)
            return 1;
    }
    return 0;
}

int32_t tokenizer_special(const struct tokenizer *tokenizer, const char *text) {
    uint8_t first = (uint8_t)text[0];
    for (uint32_t i = tokenizer->specials_first[first]; i < tokenizer->specials_first[first + 1];
         i++) {
        uint32_t id = tokenizer->specials[i];
        if (gguf_text_equal(tokenizer_piece(tokenizer, id), text))
            return (int32_t)id;
    }
    return TOKENIZER_NONE;
}

struct tokenizer_info tokenizer_info(const struct tokenizer *tokenizer) {
    return tokenizer->info;
}

struct kv_digest tokenizer_digest(const struct tokenizer *tokenizer) {
    return tokenizer->digest;
}

static size_t put_replacement(char *out) {
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

/* Forgets the first held byte. */
static void drop_first(struct tokenizer_stream *stream) {
    stream->held_count--;
    memmove(stream->held, stream->held + 1, stream->held_count);
}

size_t tokenizer_stream_push(struct tokenizer_stream *stream, const void *bytes, size_t count,
                             char *out) {
    const uint8_t *at = bytes;
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        stream->held[stream->held_count++] = at[i];
        while (stream->held_count != 0) {
            int length = utf8_length(stream->held, stream->held_count);
            if (length == UTF8_UNFINISHED)
                break;
            if (length == UTF8_INVALID) {
                used += put_replacement(out + used);
                drop_first(stream);
                continue;
            }
            memcpy(out + used, stream->held, (size_t)length);
            used += (size_t)length;
            stream->held_count -= (uint32_t)length;
            memmove(stream->held, stream->held + length, stream->held_count);
        }
    }
    return used;
}

size_t tokenizer_stream_end(struct tokenizer_stream *stream, char *out) {
    size_t used = 0;
    for (; stream->held_count != 0; stream->held_count--)
        used += put_replacement(out + used);
    return used;
}
