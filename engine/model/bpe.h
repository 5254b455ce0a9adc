/* engine/model/bpe.h - merging neighbouring symbols, lowest rank first.
 *
 * Responsible for: the table of merges and their order: lowest rank, then leftmost. Short pieces
 * by scanning, long ones by a heap: n log n, whatever the piece.
 * Not responsible for: what the symbols stand for (tokenizer.c).
 *
 * Threads: a table is read-only once filled; a scratch has one owner.
 * Units: symbols (token ids).
 */
#ifndef ENGINE_MODEL_BPE_H
#define ENGINE_MODEL_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "store/base/alloc.h"
#include "store/base/err.h"

/* A symbol that no merge takes. */
#define BPE_NONE UINT32_MAX

struct bpe_merge {
    uint64_t pair; /* left in the upper half; all ones is an empty slot */
    uint32_t rank;
    uint32_t made;
};

struct bpe {
    struct bpe_merge *slots;
    uint32_t mask;
};

struct bpe_scratch {
    const struct kv_alloc *alloc;
    struct bpe_node *nodes;
    size_t node_capacity;
    struct bpe_item *heap;
    size_t heap_capacity;
    size_t heap_count;
};

/* Room for `count` merges; 0 when there is no memory. */
int bpe_make(struct bpe *bpe, const struct kv_alloc *alloc, uint32_t count);
void bpe_release(struct bpe *bpe, const struct kv_alloc *alloc);
/* The first merge of a pair stays; symbols are below BPE_NONE. */
void bpe_add(struct bpe *bpe, uint32_t left, uint32_t right, struct bpe_merge merge);

/* Merges symbols[0..*count) in place. KV_ERR_NOMEM. `scratch` grows and is kept for the next. */
enum kv_err bpe_run(const struct bpe *bpe, struct bpe_scratch *scratch, uint32_t *symbols,
                    size_t *count);
void bpe_scratch_release(struct bpe_scratch *scratch);

#endif
