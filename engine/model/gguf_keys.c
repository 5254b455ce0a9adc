/* engine/model/gguf_keys.c - values and tensors of a parsed GGUF by name, and its digest.
 *
 * Responsible for: look-up, tolerant integer kinds, views of arrays, the order of the digest.
 * Not responsible for: checking bounds (gguf.c has done it when the handle exists).
 */
#include "engine/model/gguf_inner.h"

#include <assert.h>
#include <string.h>

#include "store/base/bytes.h"

int gguf_names_make(struct gguf_names *names, const struct kv_alloc *alloc, uint32_t count) {
    uint32_t slots = 16;
    while (slots < 2 * count)
        slots *= 2;
    names->slots = kv_alloc_zeroed(alloc, slots, sizeof names->slots[0]);
    names->mask = slots - 1;
    return names->slots != NULL;
}

void gguf_names_release(struct gguf_names *names, const struct kv_alloc *alloc) {
    kv_alloc_release(alloc, names->slots);
    names->slots = NULL;
}

/* The slot that holds the name, or the empty one where it would go. */
static struct gguf_name_slot *slot_of(const struct gguf_names *names, struct gguf_text name) {
    uint32_t at = (uint32_t)kv_digest_short(name.bytes, (size_t)name.size_bytes) & names->mask;
    for (;; at = (at + 1) & names->mask) {
        struct gguf_name_slot *slot = &names->slots[at];
        if (slot->index_plus_one == 0 ||
            (slot->name.size_bytes == name.size_bytes &&
             memcmp(slot->name.bytes, name.bytes, (size_t)name.size_bytes) == 0))
            return slot;
    }
}

int gguf_names_add(struct gguf_names *names, struct gguf_text name, uint32_t index) {
    struct gguf_name_slot *slot = slot_of(names, name);
    if (slot->index_plus_one != 0)
        return 0;
    *slot = (struct gguf_name_slot){.name = name, .index_plus_one = index + 1};
    return 1;
}

/* The index, or -1. */
static int64_t find_name(const struct gguf_names *names, struct gguf_text name) {
    return (int64_t)slot_of(names, name)->index_plus_one - 1;
}

int gguf_shown(struct gguf_text text) {
    return text.size_bytes < GGUF_SHOWN_BYTES_MAX ? (int)text.size_bytes : GGUF_SHOWN_BYTES_MAX;
}

int gguf_text_equal(struct gguf_text text, const char *literal) {
    return text.size_bytes == strlen(literal) && text.size_bytes != 0 &&
           memcmp(text.bytes, literal, (size_t)text.size_bytes) == 0;
}

static const struct gguf_key *find_key(const struct gguf *gguf, const char *key) {
    int64_t index =
        find_name(&gguf->key_names, (struct gguf_text){.bytes = key, .size_bytes = strlen(key)});
    return index < 0 ? NULL : &gguf->keys[index];
}

int gguf_has(const struct gguf *gguf, const char *key) {
    return find_key(gguf, key) != NULL;
}

static enum kv_err absent(const char *key, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_NOT_FOUND, "the model file has no key %s", key);
}

static enum kv_err wrong_kind(const char *key, const char *wanted, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_MISMATCH, "key %s of the model file is not %s", key, wanted);
}

enum kv_err gguf_u32(const struct gguf *gguf, const char *key, uint32_t *value_out,
                     struct kv_diag *diag) {
    const struct gguf_key *found = find_key(gguf, key);
    uint64_t value = UINT64_MAX;
    if (found == NULL)
        return absent(key, diag);
    switch (found->kind) {
    case GGUF_KIND_U8:
        value = found->value[0];
        break;
    case GGUF_KIND_I8:
        value = (uint64_t)(int64_t)(int8_t)found->value[0];
        break;
    case GGUF_KIND_U16:
        value = kv_get_u16(found->value);
        break;
    case GGUF_KIND_I16:
        value = (uint64_t)(int64_t)(int16_t)kv_get_u16(found->value);
        break;
    case GGUF_KIND_U32:
        value = kv_get_u32(found->value);
        break;
    case GGUF_KIND_I32:
        value = (uint64_t)(int64_t)(int32_t)kv_get_u32(found->value);
        break;
    case GGUF_KIND_U64:
    case GGUF_KIND_I64:
        value = kv_get_u64(found->value);
        break;
    default:
        break;
    }
    if (value > UINT32_MAX)
        return wrong_kind(key, "a whole number from 0 to 4294967295", diag);
    *value_out = (uint32_t)value;
    return KV_OK;
}

enum kv_err gguf_f32(const struct gguf *gguf, const char *key, float *value_out,
                     struct kv_diag *diag) {
    const struct gguf_key *found = find_key(gguf, key);
    if (found == NULL)
        return absent(key, diag);
    if (found->kind == GGUF_KIND_F32) {
        uint32_t bits = kv_get_u32(found->value);
        memcpy(value_out, &bits, sizeof bits);
        return KV_OK;
    }
    if (found->kind == GGUF_KIND_F64) {
        uint64_t bits = kv_get_u64(found->value);
        double value;
        memcpy(&value, &bits, sizeof bits);
        /* Beyond the range of a float the conversion would be undefined. */
        if (value >= -3.4e38 && value <= 3.4e38) {
            *value_out = (float)value;
            return KV_OK;
        }
    }
    return wrong_kind(key, "a floating-point number", diag);
}

enum kv_err gguf_bool(const struct gguf *gguf, const char *key, int *value_out,
                      struct kv_diag *diag) {
    const struct gguf_key *found = find_key(gguf, key);
    if (found == NULL)
        return absent(key, diag);
    if (found->kind != GGUF_KIND_BOOL || found->value[0] > 1)
        return wrong_kind(key, "true or false", diag);
    *value_out = found->value[0];
    return KV_OK;
}

enum kv_err gguf_string(const struct gguf *gguf, const char *key, struct gguf_text *text_out,
                        struct kv_diag *diag) {
    const struct gguf_key *found = find_key(gguf, key);
    if (found == NULL)
        return absent(key, diag);
    if (found->kind != GGUF_KIND_STRING)
        return wrong_kind(key, "a text", diag);
    text_out->size_bytes = kv_get_u64(found->value);
    text_out->bytes = (const char *)found->value + 8;
    return KV_OK;
}

enum kv_err gguf_array(const struct gguf *gguf, const char *key, enum gguf_kind kind,
                       struct gguf_view *view_out, struct kv_diag *diag) {
    const struct gguf_key *found = find_key(gguf, key);
    if (found == NULL)
        return absent(key, diag);
    int wanted = found->inner == kind || (kind == GGUF_KIND_I32 && found->inner == GGUF_KIND_U32) ||
                 (kind == GGUF_KIND_U32 && found->inner == GGUF_KIND_I32);
    if (found->kind != GGUF_KIND_ARRAY || !wanted)
        return wrong_kind(key, kind == GGUF_KIND_STRING ? "a list of texts" : "a list of numbers",
                          diag);
    *view_out =
        (struct gguf_view){.kind = found->inner, .count = found->count, .bytes = found->value};
    return KV_OK;
}

struct gguf_text gguf_next_string(struct gguf_view *view) {
    assert(view->count != 0 && view->kind == GGUF_KIND_STRING);
    struct gguf_text text = {.bytes = (const char *)view->bytes + 8,
                             .size_bytes = kv_get_u64(view->bytes)};
    view->bytes += 8 + text.size_bytes;
    view->count--;
    return text;
}

uint32_t gguf_next_u32(struct gguf_view *view) {
    assert(view->count != 0 && (view->kind == GGUF_KIND_U32 || view->kind == GGUF_KIND_I32 ||
                                view->kind == GGUF_KIND_F32));
    uint32_t value = kv_get_u32(view->bytes);
    view->bytes += 4;
    view->count--;
    return value;
}

uint32_t gguf_tensor_count(const struct gguf *gguf) {
    return gguf->tensor_count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t index) {
    assert(index < gguf->tensor_count);
    return &gguf->tensors[index];
}

const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, const char *name) {
    struct gguf_text text = {.bytes = name, .size_bytes = strlen(name)};
    int64_t index = find_name(&gguf->tensor_names, text);
    return index < 0 ? NULL : &gguf->tensors[index];
}

struct kv_digest gguf_tensors_digest(const struct gguf *gguf) {
    struct kv_digest_state state;
    kv_digest_init(&state);
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        const struct gguf_tensor *tensor = gguf->sorted[i];
        uint8_t head[4 + 4 + 4 + 8 * GGUF_DIMS_MAX];
        kv_put_u32(head, (uint32_t)tensor->name.size_bytes);
        kv_digest_update(&state, head, 4);
        kv_digest_update(&state, tensor->name.bytes, (size_t)tensor->name.size_bytes);
        kv_put_u32(head, (uint32_t)tensor->type);
        kv_put_u32(head + 4, tensor->n_dims);
        for (uint32_t d = 0; d < tensor->n_dims; d++)
            kv_put_u64(head + 8 + 8 * d, tensor->dims[d]);
        kv_digest_update(&state, head, 8 + 8 * (size_t)tensor->n_dims);
        kv_digest_update(&state, tensor->data, (size_t)tensor->size_bytes);
    }
    return kv_digest_final(&state);
}
