/* tools/prefix_marks.c - marks of a chat's text at the ends of its messages.
 *
 * Responsible for: what prefix_marks.h promises.
 * Not responsible for: where messages end.
 */
#include "tools/prefix_marks.h"

#include <string.h>

enum { WINDOW_BYTES = 128, PIECE_BYTES = 64 };
/* Where the text before is not known, what is left of a cut character may have come out wrong. */
enum { CUT_BYTES = 4 };

struct reader {
    struct tokenizer_stream stream;
    char window[WINDOW_BYTES]; /* a ring */
    uint64_t bytes;            /* that went through it */
};

static void push(struct reader *reader, const char *text, size_t count) {
    static const char replaced[] = "\xef\xbf\xbd";
    for (size_t i = 0; i < count; i++) {
        if ((unsigned char)text[i] <= ' ')
            continue;
        if (i + 3 <= count && memcmp(text + i, replaced, 3) == 0) {
            i += 2;
            continue;
        }
        reader->window[reader->bytes++ % WINDOW_BYTES] = text[i];
    }
}

static void read_token(struct reader *reader, const struct tokenizer *tokenizer, uint32_t id) {
    char text[TOKENIZER_STREAM_GROWTH * (PIECE_BYTES + 4)];
    if (tokenizer_is_control(tokenizer, id)) {
        reader->stream.held_count = 0;
        return;
    }
    struct gguf_text piece = tokenizer_piece(tokenizer, id);
    for (uint64_t at = 0; at < piece.size_bytes; at += PIECE_BYTES) {
        size_t part = piece.size_bytes - at < PIECE_BYTES ? (size_t)(piece.size_bytes - at)
                                                          : (size_t)PIECE_BYTES;
        push(reader, text, tokenizer_stream_push(&reader->stream, piece.bytes + at, part, text));
    }
}

static uint64_t mark(const struct reader *reader, const uint8_t *owner) {
    char text[WINDOW_BYTES];
    uint64_t count = reader->bytes < WINDOW_BYTES ? reader->bytes : WINDOW_BYTES;
    for (uint64_t i = 0; i < count; i++)
        text[i] = reader->window[(reader->bytes - count + i) % WINDOW_BYTES];
    return snap_prefix_hash(owner, text, count);
}

static int is_known(const struct reader *reader, uint64_t first) {
    return first == 0 ? reader->bytes > 0 : reader->bytes >= WINDOW_BYTES + CUT_BYTES;
}

uint32_t prefix_marks_make(const struct prefix_marks_args *args, struct snap_prefix_mark *marks_out,
                           uint32_t max) {
    struct reader reader = {.bytes = 0};
    size_t end = 0;
    uint32_t count = 0;
    for (uint64_t at = args->first; at <= args->n && max > 0; at++) {
        while (end < args->end_count && args->ends[end] < at)
            end++;
        if (end < args->end_count && args->ends[end] == at && is_known(&reader, args->first)) {
            if (count == max)
                memmove(marks_out, marks_out + 1, --count * sizeof *marks_out);
            marks_out[count++] = (struct snap_prefix_mark){mark(&reader, args->owner), at};
        }
        if (at < args->n)
            read_token(&reader, args->tokenizer, args->ids[at - args->first]);
    }
    return count;
}
