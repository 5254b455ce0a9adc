/* engine/model/gguf.h - a model file, whole in memory, checked once and then read in place.
 *
 * Responsible for: the layout of GGUF versions 2 and 3: every offset, count, string and dimension
 * is compared with the real size before it is used, so that what the accessors return is safe.
 * Not responsible for: what keys mean (weights.h, tokenizer.h, template.h) or reading files
 * (tools/ hands the bytes over).
 *
 * The bytes are borrowed and must outlive the handle; they begin on a 64-byte boundary. Nothing is
 * copied but one record per key and per tensor. A name or text is never zero-terminated.
 *
 * Threads: read-only after gguf_parse; any number of threads may read.
 * Units: bytes; elements where it says count or dims.
 */
#ifndef ENGINE_MODEL_GGUF_H
#define ENGINE_MODEL_GGUF_H

#include <stdint.h>

#include "store/base/alloc.h"
#include "store/base/diag.h"
#include "store/base/digest.h"

enum {
    GGUF_KEYS_MAX = 65536,
    GGUF_TENSORS_MAX = 65536,
    GGUF_ARRAY_DEPTH_MAX = 4,
    GGUF_KEY_BYTES_MAX = 65535,
    GGUF_NAME_BYTES_MAX = 64,
    GGUF_DIMS_MAX = 4,
    GGUF_BLOCK_ELEMENTS = 32 /* of the types Q4_0, Q4_1 and Q8_0; the others have 1 */
};

/* The tensor types that are supported, with the numbers that the file uses. */
enum gguf_type {
    GGUF_TYPE_F32 = 0,
    GGUF_TYPE_F16 = 1,
    GGUF_TYPE_Q4_0 = 2,
    GGUF_TYPE_Q4_1 = 3,
    GGUF_TYPE_Q8_0 = 8,
    GGUF_TYPE_BF16 = 30
};

/* The value types of keys, with the numbers that the file uses. */
enum gguf_kind {
    GGUF_KIND_U8,
    GGUF_KIND_I8,
    GGUF_KIND_U16,
    GGUF_KIND_I16,
    GGUF_KIND_U32,
    GGUF_KIND_I32,
    GGUF_KIND_F32,
    GGUF_KIND_BOOL,
    GGUF_KIND_STRING,
    GGUF_KIND_ARRAY,
    GGUF_KIND_U64,
    GGUF_KIND_I64,
    GGUF_KIND_F64,
    GGUF_KIND_COUNT
};

struct gguf_text {
    const char *bytes;
    uint64_t size_bytes;
};

/* A view of an array; reading strings advances it. */
struct gguf_view {
    enum gguf_kind kind;
    uint64_t count; /* elements that are left */
    const uint8_t *bytes;
};

struct gguf_tensor {
    struct gguf_text name;
    enum gguf_type type;
    uint32_t n_dims;
    uint64_t dims[GGUF_DIMS_MAX]; /* dims[0] is contiguous (input features); 1 beyond n_dims */
    const void *data;             /* aligned to 8 bytes at least */
    uint64_t size_bytes;
};

struct gguf;

/* KV_ERR_INVALID: not a GGUF file (magic, or shorter than a header). KV_ERR_VERSION: a version
 * other than 2 and 3. KV_ERR_CORRUPT: cut short or inconsistent. KV_ERR_LIMIT: more keys, tensors
 * or levels than the maxima above. KV_ERR_MISMATCH: a tensor type that is not supported.
 * KV_ERR_NOMEM. The diag names the key or tensor. */
enum kv_err gguf_parse(const void *bytes, uint64_t size_bytes, const struct kv_alloc *alloc,
                       struct gguf **gguf_out, struct kv_diag *diag);
void gguf_drop(struct gguf *gguf); /* NULL is allowed */

/* 1 when the key is there, whatever its kind. */
int gguf_has(const struct gguf *gguf, const char *key);

/* Each: KV_ERR_NOT_FOUND when the key is absent, KV_ERR_MISMATCH when its kind or value does not
 * fit. u32 takes every integer kind, f32 takes both float kinds, bool takes bool. */
enum kv_err gguf_u32(const struct gguf *gguf, const char *key, uint32_t *value_out,
                     struct kv_diag *diag);
enum kv_err gguf_f32(const struct gguf *gguf, const char *key, float *value_out,
                     struct kv_diag *diag);
enum kv_err gguf_bool(const struct gguf *gguf, const char *key, int *value_out,
                      struct kv_diag *diag);
enum kv_err gguf_string(const struct gguf *gguf, const char *key, struct gguf_text *text_out,
                        struct kv_diag *diag);
/* The elements must be of `kind`; for GGUF_KIND_I32 and _U32 either is taken. */
enum kv_err gguf_array(const struct gguf *gguf, const char *key, enum gguf_kind kind,
                       struct gguf_view *view_out, struct kv_diag *diag);
/* Next element of a view of strings, or of 4-byte integers; the caller keeps to view->count. */
struct gguf_text gguf_next_string(struct gguf_view *view);
uint32_t gguf_next_u32(struct gguf_view *view);

/* Tensors in file order, and by name (NULL when absent). */
uint32_t gguf_tensor_count(const struct gguf *gguf);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t index);
const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, const char *name);

const char *gguf_type_name(enum gguf_type type);
/* Bytes of `elements` values (a whole number of blocks). */
uint64_t gguf_type_bytes(enum gguf_type type, uint64_t elements);
int gguf_text_equal(struct gguf_text text, const char *literal);

/* Model identity: digest over all tensors in byte order of their names; for each: name length
 * (u32), name, type (u32), n_dims (u32), dims (u64 each), data. */
struct kv_digest gguf_tensors_digest(const struct gguf *gguf);

#endif
