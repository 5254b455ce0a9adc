/* tests/support_fuzz_tokenizer.c - tables of a tokenizer from any bytes.
 *
 * Responsible for: the contract of support_fuzz_tokenizer.h.
 * Not responsible for: choosing bytes.
 */
#include "tests/support_fuzz_tokenizer.h"

#include "engine/model/gguf.h"
#include "engine/model/template.h"
#include "engine/model/tokenizer.h"
#include "store/base/alloc.h"
#include "store/base/bytes.h"

#include <stdlib.h>
#include <string.h>

enum {
    WITHOUT_BYTES = 1, /* the 256 tokens that stand for one byte each */
    WITHOUT_TYPES = 2,
    WITH_UNKNOWN = 4,
    TYPES_AS_GIVEN = 8, /* else brought into range */
    PRE_SHIFT = 4,      /* two bits */
    FAR_ID = 64,
    SECTIONS = 5,
    ITEMS_MAX = 4096,
    IDS_MAX = 4096
};

struct section {
    const uint8_t *bytes;
    size_t count;
};

struct line_walk {
    struct section rest;
};

static int next_line(struct line_walk *walk, struct section *line_out) {
    if (walk->rest.count == 0)
        return 0;
    const uint8_t *end = memchr(walk->rest.bytes, '\n', walk->rest.count);
    size_t count = end != NULL ? (size_t)(end - walk->rest.bytes) : walk->rest.count;
    size_t step = end != NULL ? count + 1 : count;
    *line_out = (struct section){walk->rest.bytes, count};
    walk->rest.bytes += step;
    walk->rest.count -= step;
    return 1;
}

static uint32_t lines_of(struct section section) {
    struct line_walk walk = {section};
    struct section line;
    uint32_t count = 0;
    while (count < ITEMS_MAX && next_line(&walk, &line))
        count++;
    return count;
}

static void put_text(struct kv_writer *writer, const void *text, size_t count) {
    kv_write_u64(writer, count);
    kv_write_bytes(writer, text, count);
}

static void put_key(struct kv_writer *writer, const char *key, enum gguf_kind kind) {
    put_text(writer, key, strlen(key));
    kv_write_u32(writer, (uint32_t)kind);
}

static void put_string(struct kv_writer *writer, const char *key, const void *text, size_t count) {
    put_key(writer, key, GGUF_KIND_STRING);
    put_text(writer, text, count);
}

static void put_array(struct kv_writer *writer, const char *key, enum gguf_kind kind,
                      uint64_t count) {
    put_key(writer, key, GGUF_KIND_ARRAY);
    kv_write_u32(writer, (uint32_t)kind);
    kv_write_u64(writer, count);
}

/* GPT-2's alphabet, as tests/support_tiny_model.c writes it. */
static void put_byte_token(struct kv_writer *writer, unsigned byte) {
    unsigned code = 256;
    char text[2];
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173))
        code = byte;
    for (unsigned other = 0; code >= 256 && other < byte; other++)
        code += !((other >= 33 && other <= 126) || (other >= 161 && other != 173));
    text[0] = (char)(code < 128 ? code : 0xc0 | code >> 6);
    text[1] = (char)(0x80 | (code & 63));
    put_text(writer, text, code < 128 ? 1 : 2);
}

static void put_lines(struct kv_writer *writer, struct section section, uint32_t count) {
    struct line_walk walk = {section};
    struct section line;
    for (uint32_t i = 0; i < count && next_line(&walk, &line); i++)
        put_text(writer, line.bytes, line.count);
}

static void put_types(struct kv_writer *writer, unsigned flags, struct section types,
                      uint32_t count, uint32_t bytes_count) {
    put_array(writer, "tokenizer.ggml.token_type", GGUF_KIND_I32, count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t type = 1; /* normal */
        if (i >= bytes_count && i - bytes_count < types.count)
            type = types.bytes[i - bytes_count];
        if ((flags & TYPES_AS_GIVEN) == 0)
            type = (type + 5) % 6 + 1;
        kv_write_u32(writer, type);
    }
}

static void put_file(struct kv_writer *writer, unsigned flags, const struct section *sections) {
    static const char *const pres[4] = {"smollm", "llama-bpe", "qwen2", "gpt-2"};
    const char *pre = pres[flags >> PRE_SHIFT & 3];
    uint32_t bytes_count = (flags & WITHOUT_BYTES) != 0 ? 0 : 256;
    uint32_t extra = lines_of(sections[0]), merges = lines_of(sections[1]);
    uint32_t count = bytes_count + extra;
    unsigned keys = 7 + ((flags & WITHOUT_TYPES) == 0) + ((flags & WITH_UNKNOWN) != 0);
    kv_write_bytes(writer, "GGUF", 4);
    kv_write_u32(writer, 3);
    kv_write_u64(writer, 0);
    kv_write_u64(writer, keys);
    put_string(writer, "general.architecture", "llama", 5);
    put_string(writer, "tokenizer.ggml.model", "gpt2", 4);
    put_string(writer, "tokenizer.ggml.pre", pre, strlen(pre));
    put_string(writer, "tokenizer.chat_template", sections[3].bytes, sections[3].count);
    put_array(writer, "tokenizer.ggml.tokens", GGUF_KIND_STRING, count);
    for (uint32_t byte = 0; byte < bytes_count; byte++)
        put_byte_token(writer, byte);
    put_lines(writer, sections[0], extra);
    if ((flags & WITHOUT_TYPES) == 0)
        put_types(writer, flags, sections[2], count, bytes_count);
    put_array(writer, "tokenizer.ggml.merges", GGUF_KIND_STRING, merges);
    put_lines(writer, sections[1], merges);
    put_key(writer, "tokenizer.ggml.eos_token_id", GGUF_KIND_U32);
    kv_write_u32(writer, (flags & FAR_ID) != 0 ? count : 0);
    if ((flags & WITH_UNKNOWN) != 0) {
        put_key(writer, "tokenizer.ggml.unknown_token_id", GGUF_KIND_U32);
        kv_write_u32(writer, 0);
    }
    while (writer->off % 32 != 0)
        kv_write_u8(writer, 0);
}

/* What has been encoded must come back, except bytes that have no token. */
static void use_tokenizer(const struct tokenizer *tokenizer, struct section text) {
    static uint32_t ids[IDS_MAX];
    static char back[1 << 16];
    struct tokenizer_ids list = {.items = ids, .capacity = IDS_MAX};
    struct kv_diag diag = {""};
    for (unsigned flags = 0; flags < 4; flags++) {
        size_t size = 0, count = 0;
        list.count = list.replaced_bytes = 0;
        if (tokenizer_encode(tokenizer, text.bytes, text.count, flags, &list, &diag) != KV_OK)
            continue;
        for (; count < list.count; count++) {
            struct gguf_text piece = tokenizer_piece(tokenizer, ids[count]);
            if (piece.size_bytes > sizeof back - size)
                break;
            memcpy(back + size, piece.bytes, (size_t)piece.size_bytes);
            size += (size_t)piece.size_bytes;
        }
        if (flags == 0 && count == list.count && list.replaced_bytes == 0 &&
            (size != text.count || (size != 0 && memcmp(back, text.bytes, size) != 0)))
            abort();
    }
}

static void use_template(const struct template *tmpl, struct section text) {
    static uint32_t ids[IDS_MAX];
    struct tokenizer_ids list = {.items = ids, .capacity = IDS_MAX};
    struct kv_diag diag = {""};
    const struct template_message messages[2] = {
        {TEMPLATE_USER, (const char *)text.bytes, text.count}, {TEMPLATE_ASSISTANT, "b", 1}};
    const struct template_turns turns = {messages, 2, TEMPLATE_FIRST | TEMPLATE_ASK};
    char out[4096];
    size_t size = 0;
    (void)template_text(tmpl, &turns, out, sizeof out, &size, &diag);
    (void)template_ids(tmpl, &turns, &list, NULL, &diag);
}

static int use_file(const uint8_t *file, size_t size, struct section text) {
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    struct template *tmpl = NULL;
    struct kv_diag diag = {""};
    enum kv_err err = gguf_parse(file, size, kv_alloc_system(), &gguf, &diag);
    if (err == KV_OK)
        err = tokenizer_make(gguf, kv_alloc_system(), &tokenizer, &diag);
    int taken = err == KV_OK;
    if (taken) {
        const struct template_make_args args = {gguf, tokenizer, NULL};
        use_tokenizer(tokenizer, text);
        err = template_make(&args, kv_alloc_system(), &tmpl, &diag);
    }
    if (err == KV_OK)
        use_template(tmpl, text);
    else if (diag.text[0] == 0)
        abort(); /* refused without a word */
    template_drop(tmpl);
    tokenizer_drop(tokenizer);
    gguf_drop(gguf);
    return taken;
}

int support_fuzz_tokenizer(const uint8_t *bytes, size_t count) {
    struct section sections[SECTIONS] = {
        {bytes, 0}, {bytes, 0}, {bytes, 0}, {bytes, 0}, {bytes, 0}};
    struct kv_writer writer;
    if (count == 0 || count > 1 << 14)
        return 0;
    unsigned flags = bytes[0];
    struct section rest = {bytes + 1, count - 1};
    for (int i = 0; i < SECTIONS; i++) {
        const uint8_t *end =
            rest.count != 0 && i < SECTIONS - 1 ? memchr(rest.bytes, 0, rest.count) : NULL;
        size_t length = end != NULL ? (size_t)(end - rest.bytes) : rest.count;
        size_t step = end != NULL ? length + 1 : length;
        sections[i] = (struct section){rest.bytes, length};
        rest.bytes += step;
        rest.count -= step;
    }
    kv_writer_init(&writer, NULL, 0);
    put_file(&writer, flags, sections);
    size_t size = writer.off;
    uint8_t *file = kv_alloc_aligned(kv_alloc_system(), size, 64);
    if (file == NULL)
        abort();
    kv_writer_init(&writer, file, size);
    put_file(&writer, flags, sections);
    int taken = use_file(file, size, sections[4]);
    kv_alloc_release(kv_alloc_system(), file);
    return taken;
}
