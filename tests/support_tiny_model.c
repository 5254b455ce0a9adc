/* tests/support_tiny_model.c - writes a small random GGUF into memory.
 *
 * Responsible for: its vocabulary, merges, template, keys and random tensors.
 * Not responsible for: reading it back (engine/model).
 */
#include "tests/support_tiny_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "store/base/bytes.h"
#include "tests/testing.h"

enum {
    BYTE_TOKENS = 256,
    CONTROL_TOKENS = 3,
    LLAMA3_TOKENS = 4,
    REASONING_TOKENS = 2,
    VALUE_NORMAL = 1,
    VALUE_CONTROL = 3,
    VALUE_USER_DEFINED = 4
};

static const char *const controls[CONTROL_TOKENS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

/* Among the fillers at the end of the vocabulary, so that Llama-3 templates can be tried. */
static const char *const llama3_controls[LLAMA3_TOKENS] = {
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};

/* Behind those, when asked for. */
static const char *const reasoning_marks[REASONING_TOKENS] = {"<think>", "</think>"};

/* Each merge makes one token; both halves are single bytes or earlier merges. `_` is a space. */
static const char *const merges[][2] = {
    {"_", "t"},   {"h", "e"},   {"_t", "he"}, {"i", "n"},  {"e", "r"}, {"_", "a"},  {"o", "n"},
    {"r", "e"},   {"a", "t"},   {"e", "n"},   {"_", "s"},  {"o", "r"}, {"i", "t"},  {"e", "s"},
    {"a", "n"},   {"_", "w"},   {"_", "c"},   {"in", "g"}, {"e", "d"}, {"_", "o"},  {"i", "s"},
    {"_a", "n"},  {"_an", "d"}, {"_", "b"},   {"_", "m"},  {"_", "p"}, {"o", "u"},  {"a", "l"},
    {"_", "f"},   {"_", "in"},  {"_o", "f"},  {"_", "d"},  {"l", "l"}, {"i", "on"}, {"_t", "o"},
    {"_", "h"},   {"u", "s"},   {"e", "m"},   {"a", "s"},  {"s", "t"}, {"v", "er"}, {"y", "s"},
    {"us", "er"}, {"ys", "t"},  {"yst", "em"}};

static const char chatml[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny random model<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

struct build {
    const struct tiny_model_options *options;
    struct kv_writer writer;
    uint32_t key_count;
    uint32_t tensor_count;
    uint64_t data_bytes; /* of the tensors listed so far, padded */
    struct testing_random random;
    int data_pass; /* 0: tensor records, 1: tensor data */
};

struct tiny_model_options tiny_model_default(void) {
    return (struct tiny_model_options){.seed = 1,
                                       .layers = 2,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .head_dim = 64,
                                       .ffn = 512,
                                       .context_tokens = 8192,
                                       .matrix_type = GGUF_TYPE_Q4_1,
                                       .embd_type = GGUF_TYPE_Q8_0,
                                       .pre = "smollm",
                                       .template = chatml,
                                       .architecture = "llama"};
}

static void put_text(struct build *build, const char *text, size_t bytes) {
    kv_write_u64(&build->writer, bytes);
    kv_write_bytes(&build->writer, text, bytes);
}

static void put_key(struct build *build, const char *key, enum gguf_kind kind) {
    put_text(build, key, strlen(key));
    kv_write_u32(&build->writer, (uint32_t)kind);
    build->key_count++;
}

static void put_string(struct build *build, const char *key, const char *value) {
    put_key(build, key, GGUF_KIND_STRING);
    put_text(build, value, strlen(value));
}

/* The architecture's name goes in front of a key that begins with a full stop. */
static void put_u32(struct build *build, const char *key, uint32_t value) {
    char full[128];
    snprintf(full, sizeof full, "%s%s", key[0] == '.' ? build->options->architecture : "", key);
    put_key(build, full, GGUF_KIND_U32);
    kv_write_u32(&build->writer, value);
}

static void put_f32(struct build *build, const char *key, float value) {
    char full[128];
    snprintf(full, sizeof full, "%s%s", key[0] == '.' ? build->options->architecture : "", key);
    put_key(build, full, GGUF_KIND_F32);
    kv_write_f32(&build->writer, value);
}

/* GPT-2's alphabet: printable bytes stand for themselves, the other 68 for U+0100 onwards. */
static size_t put_byte_letter(char *at, unsigned byte) {
    unsigned code = 0;
    for (unsigned other = 0; other < byte; other++)
        code += !((other >= 33 && other <= 126) || (other >= 161 && other != 173));
    code = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173) ? byte : 256 + code;
    if (code < 128) {
        at[0] = (char)code;
        return 1;
    }
    at[0] = (char)(0xc0 | code >> 6);
    at[1] = (char)(0x80 | (code & 63));
    return 2;
}

static size_t put_letters(char *at, const char *text) {
    size_t used = 0;
    for (; *text != 0; text++)
        used += put_byte_letter(at + used, *text == '_' ? ' ' : (unsigned char)*text);
    return used;
}

static uint32_t merge_count(void) {
    return (uint32_t)(sizeof merges / sizeof merges[0]);
}

/* Both halves of merge `index` must exist before it does. */
static int merge_possible(uint32_t index, const char *half) {
    if (half[1] == 0)
        return 1;
    for (uint32_t i = 0; i < index; i++) {
        char made[16];
        snprintf(made, sizeof made, "%s%s", merges[i][0], merges[i][1]);
        if (strcmp(made, half) == 0 && merge_possible(i, merges[i][0]) &&
            merge_possible(i, merges[i][1]))
            return 1;
    }
    return 0;
}

static int merge_used(uint32_t index) {
    return merge_possible(index, merges[index][0]) && merge_possible(index, merges[index][1]);
}

static uint32_t merges_used(void) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < merge_count(); i++)
        used += (uint32_t)merge_used(i);
    return used;
}

/* A multiple of 32, as the rows of a real output matrix are. */
static uint32_t vocab_count(void) {
    return (uint32_t)kv_round_up(CONTROL_TOKENS + BYTE_TOKENS + merges_used() + LLAMA3_TOKENS, 32);
}

static const char *filler_text(const struct tiny_model_options *options, uint32_t i,
                               char text[32]) {
    if (i < LLAMA3_TOKENS)
        return llama3_controls[i];
    if (options->reasoning && i < LLAMA3_TOKENS + REASONING_TOKENS)
        return reasoning_marks[i - LLAMA3_TOKENS];
    snprintf(text, 32, "<|filler_%u|>", i);
    return text;
}

static uint32_t filler_kind(const struct tiny_model_options *options, uint32_t i) {
    return options->reasoning == 1 && i >= LLAMA3_TOKENS && i < LLAMA3_TOKENS + REASONING_TOKENS
               ? VALUE_USER_DEFINED
               : VALUE_CONTROL;
}

static void put_vocabulary(struct build *build, const struct tiny_model_options *options) {
    char text[64];
    uint32_t filler = vocab_count() - CONTROL_TOKENS - BYTE_TOKENS - merges_used();
    put_key(build, "tokenizer.ggml.tokens", GGUF_KIND_ARRAY);
    kv_write_u32(&build->writer, GGUF_KIND_STRING);
    kv_write_u64(&build->writer, vocab_count());
    for (int i = 0; i < CONTROL_TOKENS; i++)
        put_text(build, controls[i], strlen(controls[i]));
    for (unsigned byte = 0; byte < BYTE_TOKENS; byte++)
        put_text(build, text, put_byte_letter(text, byte));
    for (uint32_t i = 0; i < merge_count(); i++) {
        if (!merge_used(i))
            continue;
        size_t used = put_letters(text, merges[i][0]);
        used += put_letters(text + used, merges[i][1]);
        put_text(build, text, used);
    }
    for (uint32_t i = 0; i < filler; i++) {
        char room[32];
        const char *word = filler_text(options, i, room);
        put_text(build, word, strlen(word));
    }
    put_key(build, "tokenizer.ggml.token_type", GGUF_KIND_ARRAY);
    kv_write_u32(&build->writer, GGUF_KIND_I32);
    kv_write_u64(&build->writer, vocab_count());
    for (uint32_t i = 0; i < vocab_count(); i++)
        kv_write_u32(&build->writer, i < CONTROL_TOKENS ? VALUE_CONTROL
                                     : i < vocab_count() - filler
                                         ? VALUE_NORMAL
                                         : filler_kind(options, i + filler - vocab_count()));
    put_key(build, "tokenizer.ggml.merges", GGUF_KIND_ARRAY);
    kv_write_u32(&build->writer, GGUF_KIND_STRING);
    kv_write_u64(&build->writer, merges_used());
    for (uint32_t i = 0; i < merge_count(); i++) {
        if (!merge_used(i))
            continue;
        size_t used = put_letters(text, merges[i][0]);
        text[used++] = ' ';
        used += put_letters(text + used, merges[i][1]);
        put_text(build, text, used);
    }
}

static void put_keys(struct build *build) {
    const struct tiny_model_options *options = build->options;
    put_string(build, "general.architecture", options->architecture);
    put_string(build, "general.type", "model");
    put_string(build, "general.name", "tiny random model");
    put_u32(build, ".block_count", options->layers);
    put_u32(build, ".context_length", options->context_tokens);
    put_u32(build, ".embedding_length", options->heads * options->head_dim);
    put_u32(build, ".feed_forward_length", options->ffn);
    put_u32(build, ".attention.head_count", options->heads);
    put_u32(build, ".attention.head_count_kv", options->kv_heads);
    put_u32(build, ".rope.dimension_count", options->head_dim);
    put_u32(build, ".vocab_size", vocab_count());
    put_f32(build, ".rope.freq_base", 10000.0f);
    put_f32(build, ".attention.layer_norm_rms_epsilon", 1e-5f);
    put_string(build, "tokenizer.ggml.model", "gpt2");
    put_string(build, "tokenizer.ggml.pre", options->pre);
    put_vocabulary(build, options);
    put_u32(build, "tokenizer.ggml.bos_token_id", 1);
    put_u32(build, "tokenizer.ggml.eos_token_id", 2);
    put_u32(build, "tokenizer.ggml.unknown_token_id", 0);
    put_key(build, "tokenizer.ggml.add_bos_token", GGUF_KIND_BOOL);
    kv_write_u8(&build->writer, 0);
    if (options->extra_key != NULL && options->extra_text != NULL)
        put_string(build, options->extra_key, options->extra_text);
    else if (options->extra_key != NULL)
        put_u32(build, options->extra_key, options->extra_number);
    if (options->template != NULL)
        put_string(build, "tokenizer.chat_template", options->template);
}

static uint16_t half_of(float value) {
    /* Normal numbers only, rounded towards zero: scales need no more. */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    int exponent = (int)(bits >> 23 & 255) - 127 + 15;
    if (exponent <= 0)
        return (uint16_t)(bits >> 16 & 0x8000);
    return (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)exponent << 10 | (bits >> 13 & 0x3ff));
}

static void write_u16(struct kv_writer *writer, uint16_t value) {
    uint8_t bytes[2];
    kv_put_u16(bytes, value);
    kv_write_bytes(writer, bytes, sizeof bytes);
}

/* `size` values of deviation about `scale` (norms: near 1), one block at a time. */
static void put_values(struct build *build, enum gguf_type type, uint64_t size, float scale) {
    struct kv_writer *writer = &build->writer;
    struct testing_random *random = &build->random;
    for (uint64_t i = 0; i < size;) {
        if (type == GGUF_TYPE_F32 || type == GGUF_TYPE_F16 || type == GGUF_TYPE_BF16) {
            float value = scale == 0.0f ? 1.0f + 0.1f * testing_random_f32(random)
                                        : 1.7f * scale * testing_random_f32(random);
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (type == GGUF_TYPE_F32)
                kv_write_u32(writer, bits);
            else
                write_u16(writer, type == GGUF_TYPE_F16 ? half_of(value) : (uint16_t)(bits >> 16));
            i++;
            continue;
        }
        /* Levels lie evenly between -1.7 and 1.7 deviations, block scales vary by a half. */
        float span = 3.4f * scale * (1.0f + 0.5f * testing_random_f32(random));
        float step = span / (type == GGUF_TYPE_Q8_0 ? 254.0f : 15.0f);
        write_u16(writer, half_of(step));
        if (type == GGUF_TYPE_Q4_1)
            write_u16(writer, half_of(-0.5f * span));
        uint32_t bytes = type == GGUF_TYPE_Q8_0 ? 32 : 16;
        for (uint32_t b = 0; b < bytes; b++) {
            uint8_t value = (uint8_t)(testing_random_u64(random) >> 56);
            kv_write_u8(writer, type == GGUF_TYPE_Q8_0 && value == 128 ? 127 : value);
        }
        i += GGUF_BLOCK_ELEMENTS;
    }
}

/* Pass 0 lists the tensor, pass 1 writes its values. rows 0 is a vector; scale 0 a norm. */
static void put_tensor(struct build *build, const char *name, enum gguf_type type, uint64_t columns,
                       uint64_t rows) {
    uint64_t elements = rows == 0 ? columns : columns * rows;
    if (build->data_pass) {
        put_values(build, type, elements, rows == 0 ? 0.0f : 1.0f / sqrtf((float)columns));
        while (build->writer.off % 32 != 0)
            kv_write_u8(&build->writer, 0);
        return;
    }
    put_text(build, name, strlen(name));
    kv_write_u32(&build->writer, rows == 0 ? 1 : 2);
    kv_write_u64(&build->writer, columns);
    if (rows != 0)
        kv_write_u64(&build->writer, rows);
    kv_write_u32(&build->writer, (uint32_t)type);
    kv_write_u64(&build->writer, build->data_bytes);
    build->data_bytes += kv_round_up(gguf_type_bytes(type, elements), 32);
    build->tensor_count++;
}

static void put_layer(struct build *build, uint32_t layer) {
    const struct tiny_model_options *options = build->options;
    uint64_t hidden = (uint64_t)options->heads * options->head_dim;
    uint64_t kv = (uint64_t)options->kv_heads * options->head_dim;
    const struct {
        const char *name;
        uint64_t columns, rows;
    } tensors[] = {{"attn_norm", hidden, 0},
                   {"attn_q", hidden, hidden},
                   {"attn_k", hidden, kv},
                   {"attn_v", hidden, kv},
                   {"attn_output", hidden, hidden},
                   {"ffn_norm", hidden, 0},
                   {"ffn_gate", hidden, options->ffn},
                   {"ffn_up", hidden, options->ffn},
                   {"ffn_down", options->ffn, hidden}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, tensors[i].name);
        put_tensor(build, name, tensors[i].rows == 0 ? GGUF_TYPE_F32 : options->matrix_type,
                   tensors[i].columns, tensors[i].rows);
    }
}

static void put_tensors(struct build *build) {
    const struct tiny_model_options *options = build->options;
    uint64_t hidden = (uint64_t)options->heads * options->head_dim;
    put_tensor(build, "token_embd.weight", options->embd_type, hidden, vocab_count());
    put_tensor(build, "output_norm.weight", GGUF_TYPE_F32, hidden, 0);
    if (options->untied)
        put_tensor(build, "output.weight", options->embd_type, hidden, vocab_count());
    if (options->rope_freqs)
        put_tensor(build, "rope_freqs.weight", GGUF_TYPE_F32, options->head_dim / 2, 0);
    for (uint32_t layer = 0; layer < options->layers; layer++)
        put_layer(build, layer);
}

/* Writes the file, or only counts when the writer has no room. */
static void put_file(struct build *build, uint32_t tensor_count, uint32_t key_count) {
    testing_random_init(&build->random, build->options->seed);
    kv_write_bytes(&build->writer, "GGUF", 4);
    kv_write_u32(&build->writer, 3);
    kv_write_u64(&build->writer, tensor_count);
    kv_write_u64(&build->writer, key_count);
    put_keys(build);
    put_tensors(build);
    while (build->writer.off % 32 != 0)
        kv_write_u8(&build->writer, 0);
    build->data_pass = 1;
    put_tensors(build);
}

uint8_t *tiny_model_make(const struct tiny_model_options *options, size_t *size_bytes_out) {
    struct build build = {.options = options};
    if (options->heads == 0 || options->kv_heads == 0 || options->head_dim % 32 != 0 ||
        options->ffn % 32 != 0 || options->layers == 0)
        return NULL;
    kv_writer_init(&build.writer, NULL, 0);
    put_file(&build, 0, 0);
    size_t size_bytes = build.writer.off;
    uint32_t tensor_count = build.tensor_count, key_count = build.key_count;
    uint8_t *file = kv_alloc_aligned(kv_alloc_system(), size_bytes, 64);
    if (file == NULL)
        return NULL;
    build = (struct build){.options = options};
    kv_writer_init(&build.writer, file, size_bytes);
    put_file(&build, tensor_count, key_count);
    *size_bytes_out = size_bytes;
    return file;
}

void tiny_model_drop(uint8_t *file) {
    kv_alloc_release(kv_alloc_system(), file);
}

void tiny_model_write(const struct tiny_model_options *options, const char *path) {
    size_t size = 0;
    uint8_t *bytes = tiny_model_make(options, &size);
    FILE *file = fopen(path, "wb");
    assert_non_null(bytes);
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    tiny_model_drop(bytes);
}

uint8_t *tiny_model_read_real(size_t *size_bytes_out) {
    const char *path = testing_model_path();
    struct stat info;
    FILE *stream = path == NULL ? NULL : fopen(path, "rb");
    if (stream == NULL)
        return NULL;
    uint8_t *file = NULL;
    if (fstat(fileno(stream), &info) == 0)
        file = kv_alloc_aligned(kv_alloc_system(), (size_t)info.st_size, 64);
    if (file != NULL && fread(file, 1, (size_t)info.st_size, stream) != (size_t)info.st_size) {
        tiny_model_drop(file);
        file = NULL;
    }
    fclose(stream);
    *size_bytes_out = (size_t)info.st_size;
    return file;
}
