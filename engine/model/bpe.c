/* engine/model/bpe.c - merging neighbouring symbols, lowest rank first.
 *
 * Responsible for: a hash table of pairs, a scan for short pieces, a heap for long ones.
 * Not responsible for: cutting text into pieces (pretokenize.c).
 */
#include "engine/model/bpe.h"

#include <assert.h>
#include <string.h>

enum { SCAN_SYMBOLS_MAX = 48, END = -1 };

#define EMPTY_PAIR UINT64_MAX

struct bpe_node {
    uint32_t symbol;
    int32_t left; /* END at the edges */
    int32_t right;
};

/* A merge that was possible when it was put in; `pair` tells whether it still is. */
struct bpe_item {
    uint64_t order; /* rank, then place of the left symbol */
    uint64_t pair;
};

static uint64_t pair_of(uint32_t left, uint32_t right) {
    return (uint64_t)left << 32 | right;
}

int bpe_make(struct bpe *bpe, const struct kv_alloc *alloc, uint32_t count) {
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    bpe->slots = kv_alloc_zeroed(alloc, (size_t)slots, sizeof bpe->slots[0]);
    if (bpe->slots == NULL)
        return 0;
    for (uint64_t i = 0; i < slots; i++)
        bpe->slots[i].pair = EMPTY_PAIR;
    bpe->mask = (uint32_t)(slots - 1);
    return 1;
}

void bpe_release(struct bpe *bpe, const struct kv_alloc *alloc) {
    kv_alloc_release(alloc, bpe->slots);
    bpe->slots = NULL;
}

static struct bpe_merge *slot_of(const struct bpe *bpe, uint64_t pair) {
    uint64_t mixed = pair * 0x9e3779b97f4a7c15u;
    uint32_t at = (uint32_t)(mixed >> 32) & bpe->mask;
    while (bpe->slots[at].pair != pair && bpe->slots[at].pair != EMPTY_PAIR)
        at = (at + 1) & bpe->mask;
    return &bpe->slots[at];
}

void bpe_add(struct bpe *bpe, uint32_t left, uint32_t right, struct bpe_merge merge) {
    assert(left != BPE_NONE && right != BPE_NONE);
    struct bpe_merge *slot = slot_of(bpe, pair_of(left, right));
    if (slot->pair != EMPTY_PAIR)
        return;
    *slot = merge;
    slot->pair = pair_of(left, right);
}

/* NULL when the two never merge. */
static const struct bpe_merge *merge_of(const struct bpe *bpe, uint32_t left, uint32_t right) {
    if (left == BPE_NONE || right == BPE_NONE)
        return NULL;
    const struct bpe_merge *slot = slot_of(bpe, pair_of(left, right));
    return slot->pair == EMPTY_PAIR ? NULL : slot;
}

static void run_scan(const struct bpe *bpe, uint32_t *symbols, size_t *count) {
    const struct bpe_merge *merges[SCAN_SYMBOLS_MAX];
    size_t n = *count;
    for (size_t i = 0; i + 1 < n; i++)
        merges[i] = merge_of(bpe, symbols[i], symbols[i + 1]);
    while (n > 1) {
        size_t best = n;
        for (size_t i = 0; i + 1 < n; i++) {
            if (merges[i] != NULL && (best == n || merges[i]->rank < merges[best]->rank))
                best = i;
        }
        if (best == n)
            break;
        symbols[best] = merges[best]->made;
        n--;
        size_t behind = n - best - 1; /* symbols that move one place to the left */
        memmove(&symbols[best + 1], &symbols[best + 2], behind * sizeof symbols[0]);
        if (behind > 1)
            memmove(&merges[best + 1], &merges[best + 2], (behind - 1) * sizeof(void *));
        if (best > 0)
            merges[best - 1] = merge_of(bpe, symbols[best - 1], symbols[best]);
        if (best + 1 < n)
            merges[best] = merge_of(bpe, symbols[best], symbols[best + 1]);
    }
    *count = n;
}

static int item_before(const struct bpe_item *a, const struct bpe_item *b) {
#ifdef BREAK_MERGE_ORDER
    return a->order >> 32 < b->order >> 32;
#endif
    return a->order < b->order;
}

static void heap_put(struct bpe_scratch *scratch, struct bpe_item item) {
    assert(scratch->heap_count < scratch->heap_capacity);
    size_t at = scratch->heap_count++;
    while (at > 0 && item_before(&item, &scratch->heap[(at - 1) / 2])) {
        scratch->heap[at] = scratch->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    scratch->heap[at] = item;
}

static struct bpe_item heap_get(struct bpe_scratch *scratch) {
    struct bpe_item first = scratch->heap[0], last = scratch->heap[--scratch->heap_count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= scratch->heap_count)
            break;
        if (child + 1 < scratch->heap_count &&
            item_before(&scratch->heap[child + 1], &scratch->heap[child]))
            child++;
        if (!item_before(&scratch->heap[child], &last))
            break;
        scratch->heap[at] = scratch->heap[child];
        at = child;
    }
    scratch->heap[at] = last;
    return first;
}

/* Puts in the merge of the node at `left` with the one on its right, if there is one. */
static void consider(const struct bpe *bpe, struct bpe_scratch *scratch, int32_t left) {
    const struct bpe_node *nodes = scratch->nodes;
    if (left == END || nodes[left].right == END)
        return;
    uint32_t right_symbol = nodes[nodes[left].right].symbol;
    const struct bpe_merge *merge = merge_of(bpe, nodes[left].symbol, right_symbol);
    if (merge != NULL)
        heap_put(scratch, (struct bpe_item){.order = (uint64_t)merge->rank << 32 | (uint32_t)left,
                                            .pair = merge->pair});
}

static enum kv_err run_heap(const struct bpe *bpe, struct bpe_scratch *scratch, uint32_t *symbols,
                            size_t *count) {
    size_t n = *count;
    assert(n < INT32_MAX);
    /* Every merge puts in two more at most, and there are fewer merges than symbols. */
    if (!kv_alloc_grow(scratch->alloc, (void **)&scratch->nodes, &scratch->node_capacity, n,
                       sizeof scratch->nodes[0]) ||
        !kv_alloc_grow(scratch->alloc, (void **)&scratch->heap, &scratch->heap_capacity, 3 * n,
                       sizeof scratch->heap[0]))
        return KV_ERR_NOMEM;
    struct bpe_node *nodes = scratch->nodes;
    scratch->heap_count = 0;
    for (size_t i = 0; i < n; i++)
        nodes[i] = (struct bpe_node){.symbol = symbols[i],
                                     .left = (int32_t)i - 1,
                                     .right = i + 1 < n ? (int32_t)i + 1 : END};
    for (size_t i = 0; i < n; i++)
        consider(bpe, scratch, (int32_t)i);
    while (scratch->heap_count != 0) {
        struct bpe_item item = heap_get(scratch);
        int32_t left = (int32_t)(uint32_t)item.order;
        int32_t right = nodes[left].right;
        if (right == END || nodes[left].symbol == BPE_NONE ||
            pair_of(nodes[left].symbol, nodes[right].symbol) != item.pair)
            continue;
        nodes[left].symbol = slot_of(bpe, item.pair)->made;
        nodes[left].right = nodes[right].right;
        nodes[right].symbol = BPE_NONE; /* gone: no item about it is true any more */
        if (nodes[left].right != END)
            nodes[nodes[left].right].left = left;
        consider(bpe, scratch, nodes[left].left);
        consider(bpe, scratch, left);
    }
    size_t kept = 0;
    for (int32_t at = 0; at != END; at = nodes[at].right)
        symbols[kept++] = nodes[at].symbol;
    *count = kept;
    return KV_OK;
}

enum kv_err bpe_run(const struct bpe *bpe, struct bpe_scratch *scratch, uint32_t *symbols,
                    size_t *count) {
    if (*count > SCAN_SYMBOLS_MAX)
        return run_heap(bpe, scratch, symbols, count);
    run_scan(bpe, symbols, count);
    return KV_OK;
}

void bpe_scratch_release(struct bpe_scratch *scratch) {
    kv_alloc_release(scratch->alloc, scratch->nodes);
    kv_alloc_release(scratch->alloc, scratch->heap);
}
