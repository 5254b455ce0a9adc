/* engine/agree.c - how far a chat that came back as text is the one that is stored.
 *
 * Responsible for: two cursors over bytes and control tokens, what may be passed over, the last
 * place that is a token boundary in both.
 * Not responsible for: what a byte of a token is (model/tokenizer.h).
 */
#include "engine/agree.h"

#include <string.h>

/* One symbol is a byte, the end, or a control token (its id above SYMBOL_CONTROL). Reasoning marks
 * count as control tokens, since files call them either. */
enum { SYMBOL_END = 256, SYMBOL_CONTROL = 257 };
enum { OUT_BYTES = TOKENIZER_STREAM_GROWTH * (1 + 4) };

struct side {
    const struct tokenizer *tokenizer;
    const uint32_t *ids;
    uint64_t count;
    const struct image_span *roles;
    uint32_t role_count;
    int32_t think, think_end;
};

struct cursor {
    const struct side *side;
    uint64_t at;         /* the next token */
    uint64_t byte;       /* of it that are read */
    uint64_t char_token; /* where the character that comes out began */
    uint32_t role;
    int shown;         /* the bytes that are held belong to an answer */
    int blank;         /* only white space since the last control token */
    uint32_t out_left; /* of out[], from its end */
    uint32_t out_count;
    struct tokenizer_stream stream;
    char out[OUT_BYTES];
};

static int is_space(uint32_t symbol) {
    return symbol == ' ' || (symbol >= '\t' && symbol <= '\r');
}

static int is_mark(const struct side *side, uint32_t id) {
    return tokenizer_is_control(side->tokenizer, id) || (int32_t)id == side->think ||
           (int32_t)id == side->think_end;
}

static int in_answer(struct cursor *cursor) {
    const struct side *side = cursor->side;
    while (cursor->role < side->role_count && side->roles[cursor->role].end <= cursor->at)
        cursor->role++;
    return cursor->role < side->role_count && side->roles[cursor->role].role == IMAGE_ASSISTANT &&
           side->roles[cursor->role].first <= cursor->at;
}

static int at_boundary(const struct cursor *cursor) {
    return cursor->out_left == 0 && cursor->byte == 0 && cursor->stream.held_count == 0;
}

static void put_out(struct cursor *cursor, size_t bytes) {
    cursor->out_count = cursor->out_left = (uint32_t)bytes;
}

/* What is held when text ends: U+FFFD for each byte where it was shown so, else nothing more. */
static void end_text(struct cursor *cursor) {
    if (cursor->shown)
        put_out(cursor, tokenizer_stream_end(&cursor->stream, cursor->out));
    cursor->stream.held_count = 0;
}

static void read_byte(struct cursor *cursor, struct gguf_text piece) {
    char byte = piece.bytes[cursor->byte];
    if (cursor->stream.held_count == 0)
        cursor->char_token = cursor->at;
    size_t bytes = tokenizer_stream_push(&cursor->stream, &byte, 1, cursor->out);
    if (!cursor->shown) {
        cursor->out[0] = byte;
        bytes = 1;
    }
    put_out(cursor, bytes);
    if (++cursor->byte == piece.size_bytes) {
        cursor->byte = 0;
        cursor->at++;
    }
}

static uint32_t next(struct cursor *cursor) {
    const struct side *side = cursor->side;
    while (cursor->out_left == 0) {
        int over = cursor->at == side->count;
        int mark = !over && cursor->byte == 0 && is_mark(side, side->ids[cursor->at]);
        int shown = !over && !mark && in_answer(cursor);
        if (cursor->stream.held_count != 0 && (over || mark || shown != cursor->shown)) {
            end_text(cursor);
            continue;
        }
        if (over || mark)
            cursor->char_token = cursor->at;
        if (over)
            return SYMBOL_END;
        if (mark) {
            cursor->blank = 1;
            return SYMBOL_CONTROL + side->ids[cursor->at++];
        }
        cursor->shown = shown;
        struct gguf_text piece = tokenizer_piece(side->tokenizer, side->ids[cursor->at]);
        if (piece.size_bytes != 0)
            read_byte(cursor, piece);
        else
            cursor->at++;
    }
    uint8_t byte = (uint8_t)cursor->out[cursor->out_count - cursor->out_left--];
    cursor->blank = cursor->blank && is_space(byte);
    return byte;
}

static uint32_t peek(const struct cursor *cursor) {
    struct cursor copy = *cursor;
    return next(&copy);
}

/* --- what may be passed over */

struct walk {
    const struct agree_args *args;
    struct side sides[2];
    struct cursor stored, request;
    struct agree *agree;
};

static int pass(struct walk *walk, struct cursor *cursor, const struct cursor *to, uint64_t count) {
    *cursor = *to;
    walk->agree->passed += count;
    return 1;
}

static int pass_return(struct walk *walk, struct cursor *cursor) {
    struct cursor after = *cursor;
    return next(&after) == '\r' && peek(&after) == '\n' && pass(walk, cursor, &after, 1);
}

static void pass_space(struct walk *walk, struct cursor *cursor) {
    for (struct cursor after = *cursor; is_space(next(&after));)
        pass(walk, cursor, &after, 1);
}

/* A reasoning block from its opening mark on, and the white space behind it on both sides. */
static int pass_reasoning(struct walk *walk, struct cursor *cursor, int any) {
    uint32_t mark = SYMBOL_CONTROL + (uint32_t)cursor->side->think;
    uint32_t mark_end = SYMBOL_CONTROL + (uint32_t)cursor->side->think_end;
    struct cursor after = *cursor;
    uint64_t count = 1;
    if (cursor->side->think == TOKENIZER_NONE || cursor->side->think_end == TOKENIZER_NONE ||
        next(&after) != mark)
        return 0;
    for (uint32_t symbol = next(&after); symbol != mark_end; symbol = next(&after), count++)
        if (symbol >= SYMBOL_END || !(any || is_space(symbol)))
            return 0;
    pass(walk, cursor, &after, count + 1);
    pass_space(walk, &walk->stored);
    pass_space(walk, &walk->request);
    return 1;
}

/* White space that a Llama-3 template takes away from both ends of a message. */
static int pass_trimmed(struct walk *walk, uint32_t request) {
    struct cursor after = walk->stored;
    uint64_t count = 0;
    if (template_kind(walk->args->tmpl) != TEMPLATE_LLAMA3)
        return 0;
    int leading = walk->stored.blank;
    while (is_space(peek(&after)) && next(&after) < SYMBOL_END)
        count++;
    return count > 0 && (leading || (request >= SYMBOL_END && peek(&after) >= SYMBOL_END)) &&
           pass(walk, &walk->stored, &after, count);
}

static int pass_unseen(struct walk *walk, uint32_t stored) {
    struct cursor after = walk->stored;
    uint32_t id = stored - SYMBOL_CONTROL;
    return stored >= SYMBOL_CONTROL && tokenizer_is_control(walk->args->tokenizer, id) &&
           id != template_end_id(walk->args->tmpl) &&
           !tokenizer_is_stop(walk->args->tokenizer, id) && next(&after) == stored &&
           pass(walk, &walk->stored, &after, 1);
}

/* Two symbols differ. 1 when something that is no difference stands there and was passed over. */
static int pass_over(struct walk *walk, uint32_t stored, uint32_t request) {
    if (stored == '\n' ? pass_return(walk, &walk->request)
                       : request == '\n' && pass_return(walk, &walk->stored))
        return 1;
    if (stored == SYMBOL_END || !in_answer(&walk->stored))
        return 0;
    if (pass_reasoning(walk, &walk->stored, walk->args->flags & AGREE_DROPPED_REASONING) ||
        pass_reasoning(walk, &walk->request, 0) || pass_trimmed(walk, request))
        return 1;
    /* At the end of what was shown, too: the answer was cut off behind a token that nobody saw. */
    return (request < SYMBOL_END ||
            request == SYMBOL_CONTROL + template_end_id(walk->args->tmpl)) &&
           pass_unseen(walk, stored);
}

/* --- both together */

static void note(struct walk *walk) {
    walk->agree->stored_tokens = walk->stored.at;
    walk->agree->request_tokens = walk->request.at;
}

/* Equal ids at a boundary of both need no comparison of bytes; a character that is unfinished at
 * the end is left to the cursors. */
static void take_equal_ids(struct walk *walk) {
    const struct side *side = walk->stored.side;
    const uint32_t *ids = side->ids + walk->stored.at;
    const uint32_t *others = walk->request.side->ids + walk->request.at;
    uint64_t left = side->count - walk->stored.at, whole = 0;
    struct tokenizer_stream stream = {{0}, 0};
    int blank = walk->stored.blank, blank_whole = blank;
    int both_end = left == walk->request.side->count - walk->request.at;
    if (left > walk->request.side->count - walk->request.at)
        left = walk->request.side->count - walk->request.at;
    for (uint64_t i = 0; i < left && ids[i] == others[i]; i++) {
        int mark = is_mark(side, ids[i]), blank_before = blank;
        struct gguf_text piece = tokenizer_piece(side->tokenizer, ids[i]);
        char out[OUT_BYTES];
        if (mark)
            stream.held_count = 0; /* what was unfinished stays so in both */
        blank = blank || mark;
        for (uint64_t k = 0; !mark && k < piece.size_bytes; k++) {
            tokenizer_stream_push(&stream, piece.bytes + k, 1, out);
            blank = blank && is_space((uint8_t)piece.bytes[k]);
        }
        /* A boundary behind a whole character, or in front of one that begins with this token. */
        if (stream.held_count == 0 || (both_end && i + 1 == left)) {
            whole = i + 1;
            blank_whole = blank;
        } else if (stream.held_count == piece.size_bytes) {
            whole = i;
            blank_whole = blank_before;
        }
    }
    walk->stored.at += whole;
    walk->request.at += whole;
    walk->stored.blank = blank_whole;
}

static enum agree_end end_of(const struct walk *walk, uint32_t stored, uint32_t request) {
    if (stored == SYMBOL_END)
        return request == SYMBOL_END ? AGREE_SAME : AGREE_STORED_ENDS;
    if (request == SYMBOL_END)
        return AGREE_REQUEST_ENDS;
    if (walk->sides[0].think != TOKENIZER_NONE &&
        stored == SYMBOL_CONTROL + (uint32_t)walk->sides[0].think)
        return AGREE_REASONING;
    return stored > SYMBOL_END || request > SYMBOL_END ? AGREE_CONTROL : AGREE_TEXT;
}

void agree_find(const struct agree_args *args, struct agree *agree_out) {
    struct walk walk = {.args = args, .agree = agree_out};
    int32_t think = tokenizer_special(args->tokenizer, "<think>");
    int32_t think_end = tokenizer_special(args->tokenizer, "</think>");
    walk.sides[0] = (struct side){args->tokenizer,  args->stored, args->stored_count, args->roles,
                                  args->role_count, think,        think_end};
    walk.sides[1] = (struct side){args->tokenizer, args->request, args->request_count, NULL, 0,
                                  think,           think_end};
    walk.stored.side = &walk.sides[0];
    walk.request.side = &walk.sides[1];
    memset(agree_out, 0, sizeof *agree_out);
#ifdef BREAK_SAME_IDS
    take_equal_ids(&walk);
    note(&walk);
    agree_out->differ_token = walk.stored.at;
    return;
#endif
    for (;;) {
        if (at_boundary(&walk.stored) && at_boundary(&walk.request)) {
            take_equal_ids(&walk);
            note(&walk);
        }
        struct cursor stored = walk.stored, request = walk.request;
        uint32_t left = next(&stored), right = next(&request);
        if (left == right && left != SYMBOL_END) {
            walk.stored = stored;
            walk.request = request;
        } else if (left == right || !pass_over(&walk, left, right)) {
            agree_out->end = end_of(&walk, left, right);
            agree_out->differ_token = stored.char_token;
            return;
        }
    }
}
