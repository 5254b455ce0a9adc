/* engine/model/gguf_inner.h - the records behind a struct gguf, and its tables of names.
 *
 * Responsible for: what gguf.c fills and gguf_keys.c reads.
 * Not responsible for: anything outside these two files.
 *
 * Threads: as gguf.h.
 * Units: bytes; elements.
 */
#ifndef ENGINE_MODEL_GGUF_INNER_H
#define ENGINE_MODEL_GGUF_INNER_H

#include <stdint.h>

#include "engine/model/gguf.h"

enum { GGUF_SHOWN_BYTES_MAX = 100 };

struct gguf_key {
    struct gguf_text name;
    enum gguf_kind kind;
    enum gguf_kind inner; /* of an array's elements */
    uint64_t count;       /* elements; 1 for a single value */
    const uint8_t *value;
};

/* Open addressing over a power of two of slots, each empty (0) or index + 1. */
struct gguf_name_slot {
    struct gguf_text name;
    uint32_t index_plus_one;
};

struct gguf_names {
    struct gguf_name_slot *slots;
    uint32_t mask;
};

struct gguf {
    const struct kv_alloc *alloc;
    struct gguf_key *keys;
    struct gguf_tensor *tensors;
    uint64_t *offsets;                 /* as the file states them */
    const struct gguf_tensor **sorted; /* by name */
    struct gguf_names key_names;
    struct gguf_names tensor_names;
    uint32_t key_count;
    uint32_t tensor_count;
};

/* 0 when there is no memory. */
int gguf_names_make(struct gguf_names *names, const struct kv_alloc *alloc, uint32_t count);
void gguf_names_release(struct gguf_names *names, const struct kv_alloc *alloc);
/* 0 when the name is there already. */
int gguf_names_add(struct gguf_names *names, struct gguf_text name, uint32_t index);

/* How many bytes of a name an error line shows. */
int gguf_shown(struct gguf_text text);

#endif
