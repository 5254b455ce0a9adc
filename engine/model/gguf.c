/* engine/model/gguf.c - parsing of a GGUF file in memory.
 *
 * Responsible for: walking keys and tensor records with every length checked first, then the
 * relations between tensors: place, overlap, names.
 * Not responsible for: values by key (gguf_keys.c).
 */
#include "engine/model/gguf.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/gguf_inner.h"
#include "store/base/bytes.h"

enum {
    HEADER_BYTES = 24,
    KEY_BYTES_MIN = 8 + 4 + 1,
    TENSOR_BYTES_MIN = 8 + 4 + 8 + 4 + 8,
    ALIGN_DEFAULT_BYTES = 32,
    ALIGN_BYTES_MAX = 1 << 20
};

struct parse {
    struct kv_reader reader;
    struct gguf *gguf;
    struct kv_diag *diag;
    uint64_t align_bytes;
};

/* Bytes of one value, 0 for the kinds without a fixed size. */
static uint64_t kind_bytes(enum gguf_kind kind) {
    static const uint8_t bytes[GGUF_KIND_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return bytes[kind];
}

const char *gguf_type_name(enum gguf_type type) {
    static const char *const names[] = {
        "F32",     "F16",    "Q4_0",    "Q4_1",  "Q4_2",   "Q4_3",  "Q5_0",  "Q5_1",
        "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
        "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
        "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16"};
    unsigned index = (unsigned)type;
    return index < sizeof names / sizeof names[0] ? names[index] : "unknown";
}

static uint64_t block_elements(enum gguf_type type) {
    return type == GGUF_TYPE_Q4_0 || type == GGUF_TYPE_Q4_1 || type == GGUF_TYPE_Q8_0
               ? GGUF_BLOCK_ELEMENTS
               : 1;
}

/* Bytes of one block, 0 for a type that is not supported. */
static uint64_t block_bytes(enum gguf_type type) {
    switch (type) {
    case GGUF_TYPE_F32:
        return 4;
    case GGUF_TYPE_F16:
    case GGUF_TYPE_BF16:
        return 2;
    case GGUF_TYPE_Q4_0:
        return 18;
    case GGUF_TYPE_Q4_1:
        return 20;
    case GGUF_TYPE_Q8_0:
        return 34;
    }
    return 0;
}

uint64_t gguf_type_bytes(enum gguf_type type, uint64_t elements) {
    return elements / block_elements(type) * block_bytes(type);
}

static enum kv_err cut_short(const struct parse *parse, const char *where) {
    return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                       "the model file is cut short or damaged: %s does not fit its %zu bytes; "
                       "fetch it again",
                       where, parse->reader.size_bytes);
}

/* A length and that many bytes, inside the file. */
static int read_text(struct parse *parse, uint64_t bytes_max, struct gguf_text *text_out) {
    uint64_t size = kv_read_u64(&parse->reader);
    if (parse->reader.failed || size > bytes_max || size > kv_reader_left(&parse->reader))
        return 0;
    text_out->bytes = (const char *)kv_read_bytes(&parse->reader, (size_t)size);
    text_out->size_bytes = size;
    return 1;
}

/* Moves over `count` values of a kind. The loops end with the file: each turn takes bytes. */
static int skip_values(struct parse *parse, enum gguf_kind kind, uint64_t count, int depth) {
    struct kv_reader *reader = &parse->reader;
    uint64_t total;
    if (kind_bytes(kind) != 0)
        return kv_mul_u64(kind_bytes(kind), count, &total) && total <= kv_reader_left(reader) &&
               (total == 0 || kv_read_bytes(reader, (size_t)total) != NULL);
    if (count > kv_reader_left(reader) / 8)
        return 0;
    for (uint64_t i = 0; i < count; i++) {
        struct gguf_text text;
        if (kind == GGUF_KIND_STRING) {
            if (!read_text(parse, UINT64_MAX, &text))
                return 0;
            continue;
        }
        uint32_t inner = kv_read_u32(reader);
        uint64_t inner_count = kv_read_u64(reader);
        if (reader->failed || inner >= GGUF_KIND_COUNT || depth >= GGUF_ARRAY_DEPTH_MAX ||
            !skip_values(parse, (enum gguf_kind)inner, inner_count, depth + 1))
            return 0;
    }
    return 1;
}

static enum kv_err parse_key(struct parse *parse, uint32_t index) {
    struct gguf_key *key = &parse->gguf->keys[index];
    struct kv_reader *reader = &parse->reader;
    if (!read_text(parse, GGUF_KEY_BYTES_MAX, &key->name))
        return cut_short(parse, index == 0 ? "the first key" : "a key");
    uint32_t kind = kv_read_u32(reader);
    if (reader->failed || kind >= GGUF_KIND_COUNT)
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is damaged: key %.*s has value type %u",
                           gguf_shown(key->name), key->name.bytes, kind);
    key->kind = (enum gguf_kind)kind;
    key->count = 1;
    if (key->kind == GGUF_KIND_ARRAY) {
        uint32_t inner = kv_read_u32(reader);
        key->count = kv_read_u64(reader);
        if (reader->failed || inner >= GGUF_KIND_COUNT)
            return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                               "the model file is damaged: array %.*s has value type %u",
                               gguf_shown(key->name), key->name.bytes, inner);
        key->inner = (enum gguf_kind)inner;
    }
    key->value = reader->bytes + reader->off;
    if (!skip_values(parse, key->kind == GGUF_KIND_ARRAY ? key->inner : key->kind, key->count,
                     key->kind == GGUF_KIND_ARRAY ? 1 : 0))
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is cut short or damaged: the value of key %.*s does "
                           "not fit; fetch it again",
                           gguf_shown(key->name), key->name.bytes);
    if (!gguf_names_add(&parse->gguf->key_names, key->name, index))
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is damaged: key %.*s stands there twice",
                           gguf_shown(key->name), key->name.bytes);
    return KV_OK;
}

static enum kv_err parse_alignment(struct parse *parse) {
    uint32_t align = ALIGN_DEFAULT_BYTES;
    if (gguf_has(parse->gguf, "general.alignment")) {
        enum kv_err err = gguf_u32(parse->gguf, "general.alignment", &align, parse->diag);
        if (err != KV_OK)
            return err;
    }
    if (align < 8 || align > ALIGN_BYTES_MAX || (align & (align - 1)) != 0)
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "general.alignment is %u; a power of two from 8 to %d was expected",
                           align, ALIGN_BYTES_MAX);
    parse->align_bytes = align;
    return KV_OK;
}

/* Name, dims and type; `offset_out` counts from the data area. */
static enum kv_err parse_tensor(struct parse *parse, uint32_t index, uint64_t *offset_out) {
    struct gguf_tensor *tensor = &parse->gguf->tensors[index];
    struct kv_reader *reader = &parse->reader;
    uint64_t elements = 1;
    if (!read_text(parse, GGUF_NAME_BYTES_MAX, &tensor->name) || tensor->name.size_bytes == 0)
        return cut_short(parse, "a tensor's name");
    int shown = gguf_shown(tensor->name);
    const char *name = tensor->name.bytes;
    tensor->n_dims = kv_read_u32(reader);
    if (reader->failed || tensor->n_dims == 0 || tensor->n_dims > GGUF_DIMS_MAX)
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is damaged: tensor %.*s has %u dimensions", shown, name,
                           tensor->n_dims);
    for (uint32_t i = 0; i < GGUF_DIMS_MAX; i++) {
        tensor->dims[i] = i < tensor->n_dims ? kv_read_u64(reader) : 1;
        if (tensor->dims[i] == 0 || !kv_mul_u64(elements, tensor->dims[i], &elements) ||
            elements > UINT64_MAX / 8)
            return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                               "the model file is damaged: tensor %.*s has an impossible size",
                               shown, name);
    }
    uint32_t type = kv_read_u32(reader);
    *offset_out = kv_read_u64(reader);
    if (reader->failed)
        return cut_short(parse, "the list of tensors");
    tensor->type = (enum gguf_type)type;
    if (block_bytes(tensor->type) == 0)
        return kv_diag_set(parse->diag, KV_ERR_MISMATCH,
                           "tensor %.*s has type %s (%u), which is not supported; use F32, F16, "
                           "BF16, Q8_0, Q4_0 or Q4_1",
                           shown, name, gguf_type_name(tensor->type), type);
    if (tensor->dims[0] % block_elements(tensor->type) != 0)
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is damaged: tensor %.*s has rows of %llu values, no "
                           "whole number of %s blocks",
                           shown, name, (unsigned long long)tensor->dims[0],
                           gguf_type_name(tensor->type));
    tensor->size_bytes = gguf_type_bytes(tensor->type, elements);
    if (!gguf_names_add(&parse->gguf->tensor_names, tensor->name, index))
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is damaged: tensor %.*s stands there twice", shown,
                           name);
    return KV_OK;
}

static enum kv_err place_tensor(struct parse *parse, uint32_t index, uint64_t data_off) {
    struct gguf_tensor *tensor = &parse->gguf->tensors[index];
    uint64_t offset = parse->gguf->offsets[index];
    uint64_t first, end;
    if (offset % parse->align_bytes != 0)
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is damaged: tensor %.*s is not aligned to %llu bytes",
                           gguf_shown(tensor->name), tensor->name.bytes,
                           (unsigned long long)parse->align_bytes);
    if (!kv_add_u64(data_off, offset, &first) || !kv_add_u64(first, tensor->size_bytes, &end) ||
        end > parse->reader.size_bytes)
        return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                           "the model file is cut short: tensor %.*s lies beyond its %zu bytes; "
                           "fetch it again",
                           gguf_shown(tensor->name), tensor->name.bytes, parse->reader.size_bytes);
    tensor->data = parse->reader.bytes + first;
    return KV_OK;
}

static int by_place(const void *a, const void *b) {
    const struct gguf_tensor *left = *(const struct gguf_tensor *const *)a;
    const struct gguf_tensor *right = *(const struct gguf_tensor *const *)b;
    return ((const char *)left->data > (const char *)right->data) -
           ((const char *)left->data < (const char *)right->data);
}

static int by_name(const void *a, const void *b) {
    struct gguf_text left = (*(const struct gguf_tensor *const *)a)->name;
    struct gguf_text right = (*(const struct gguf_tensor *const *)b)->name;
    uint64_t common = left.size_bytes < right.size_bytes ? left.size_bytes : right.size_bytes;
    int order = memcmp(left.bytes, right.bytes, (size_t)common);
    if (order != 0)
        return order;
    return (left.size_bytes > right.size_bytes) - (left.size_bytes < right.size_bytes);
}

static enum kv_err check_overlap(struct parse *parse) {
    struct gguf *gguf = parse->gguf;
    for (uint32_t i = 0; i < gguf->tensor_count; i++)
        gguf->sorted[i] = &gguf->tensors[i];
    qsort(gguf->sorted, gguf->tensor_count, sizeof gguf->sorted[0], by_place);
    for (uint32_t i = 1; i < gguf->tensor_count; i++) {
        const struct gguf_tensor *left = gguf->sorted[i - 1], *right = gguf->sorted[i];
#ifdef BREAK_TENSOR_OVERLAP
        continue;
#endif
        if ((const char *)left->data + left->size_bytes > (const char *)right->data)
            return kv_diag_set(parse->diag, KV_ERR_CORRUPT,
                               "the model file is damaged: tensors %.*s and %.*s overlap",
                               gguf_shown(left->name), left->name.bytes, gguf_shown(right->name),
                               right->name.bytes);
    }
    qsort(gguf->sorted, gguf->tensor_count, sizeof gguf->sorted[0], by_name);
    return KV_OK;
}

static enum kv_err parse_header(struct parse *parse) {
    struct kv_reader *reader = &parse->reader;
    const uint8_t *magic = reader->size_bytes < HEADER_BYTES ? NULL : kv_read_bytes(reader, 4);
    if (magic == NULL || memcmp(magic, "GGUF", 4) != 0)
        return kv_diag_set(parse->diag, KV_ERR_INVALID, "not a GGUF model file: it %s",
                           magic == NULL ? "is shorter than a header"
                                         : "does not begin with the letters GGUF");
    uint32_t version = kv_read_u32(reader);
    if (version != 2 && version != 3)
        return kv_diag_set(parse->diag, KV_ERR_VERSION,
                           "the model file has GGUF version %u; versions 2 and 3 are supported",
                           version);
    uint64_t tensors = kv_read_u64(reader), keys = kv_read_u64(reader);
    if (tensors > GGUF_TENSORS_MAX || keys > GGUF_KEYS_MAX)
        return kv_diag_set(parse->diag, KV_ERR_LIMIT,
                           "the model file names %llu tensors and %llu keys; at most %d and %d "
                           "are supported",
                           (unsigned long long)tensors, (unsigned long long)keys, GGUF_TENSORS_MAX,
                           GGUF_KEYS_MAX);
    if (keys > kv_reader_left(reader) / KEY_BYTES_MIN ||
        tensors > kv_reader_left(reader) / TENSOR_BYTES_MIN)
        return cut_short(parse, "the number of keys and tensors");
    parse->gguf->tensor_count = (uint32_t)tensors;
    parse->gguf->key_count = (uint32_t)keys;
    return KV_OK;
}

static enum kv_err make_tables(struct gguf *gguf) {
    gguf->keys = kv_alloc_zeroed(gguf->alloc, gguf->key_count + 1u, sizeof gguf->keys[0]);
    gguf->tensors = kv_alloc_zeroed(gguf->alloc, gguf->tensor_count + 1u, sizeof gguf->tensors[0]);
    gguf->offsets = kv_alloc_zeroed(gguf->alloc, gguf->tensor_count + 1u, sizeof(uint64_t));
    gguf->sorted = kv_alloc_zeroed(gguf->alloc, gguf->tensor_count + 1u, sizeof(void *));
    if (gguf->keys == NULL || gguf->tensors == NULL || gguf->offsets == NULL ||
        gguf->sorted == NULL || !gguf_names_make(&gguf->key_names, gguf->alloc, gguf->key_count) ||
        !gguf_names_make(&gguf->tensor_names, gguf->alloc, gguf->tensor_count))
        return KV_ERR_NOMEM;
    return KV_OK;
}

enum kv_err gguf_parse(const void *bytes, uint64_t size_bytes, const struct kv_alloc *alloc,
                       struct gguf **gguf_out, struct kv_diag *diag) {
    enum kv_err err = KV_ERR_NOMEM;
    struct parse parse = {.diag = diag};
    assert((uintptr_t)bytes % 64 == 0);
    kv_reader_init(&parse.reader, bytes, (size_t)size_bytes);
    parse.gguf = kv_alloc_zeroed(alloc, 1, sizeof *parse.gguf);
    if (parse.gguf == NULL)
        goto done;
    parse.gguf->alloc = alloc;
    KV_TRY(parse_header(&parse));
    KV_TRY(make_tables(parse.gguf));
    for (uint32_t i = 0; i < parse.gguf->key_count; i++)
        KV_TRY(parse_key(&parse, i));
    KV_TRY(parse_alignment(&parse));
    for (uint32_t i = 0; i < parse.gguf->tensor_count; i++)
        KV_TRY(parse_tensor(&parse, i, &parse.gguf->offsets[i]));
    uint64_t data_off = kv_round_up(parse.reader.off, parse.align_bytes);
    for (uint32_t i = 0; i < parse.gguf->tensor_count; i++)
        KV_TRY(place_tensor(&parse, i, data_off));
    KV_TRY(check_overlap(&parse));
    *gguf_out = parse.gguf;
    parse.gguf = NULL;
done:
    if (err == KV_ERR_NOMEM)
        kv_diag_set(diag, err, "no memory for the tables of the model file");
    gguf_drop(parse.gguf);
    return err;
}

void gguf_drop(struct gguf *gguf) {
    if (gguf == NULL)
        return;
    gguf_names_release(&gguf->key_names, gguf->alloc);
    gguf_names_release(&gguf->tensor_names, gguf->alloc);
    kv_alloc_release(gguf->alloc, gguf->keys);
    kv_alloc_release(gguf->alloc, gguf->tensors);
    kv_alloc_release(gguf->alloc, gguf->offsets);
    kv_alloc_release(gguf->alloc, gguf->sorted);
    kv_alloc_release(gguf->alloc, gguf);
}
