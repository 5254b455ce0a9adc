/* kernels/host/kv_append.c - rows of a chunk into a BF16 page.
 *
 * Responsible for: the copy of struct kvops_append, layer by layer.
 * Not responsible for: which page and token a row belongs to (engine/kv/window.c).
 */
#include "kernels/host/leaf.h"

#include <string.h>

uint32_t kvops_append_items(const struct kvops_append *args) {
    return args->pool.geometry.layers;
}

/* Rows of one head of K or V; a run of the page never straddles a slot. */
static void append_row(const struct kvops_append *args, struct layout_at at, uint32_t value) {
    const struct layout_geometry *geometry = &args->pool.geometry;
    uint64_t slot_bytes = layout_slot_bytes(geometry);
    uint64_t token_bytes = 2ull * geometry->head_dim;
    uint64_t row = ((uint64_t)at.layer * 2 + value) * geometry->kv_heads + at.head;
    const uint16_t *from =
        args->chunk + (row * args->chunk_rows + args->first_row) * geometry->head_dim;

    for (uint32_t done = 0; done < args->count;) {
        uint32_t token = args->page_token + done;
        uint32_t in_run = token % LAYOUT_RUN_TOKENS, n = LAYOUT_RUN_TOKENS - in_run;
        struct layout_place place = layout_run(geometry, at, value, token / LAYOUT_RUN_TOKENS);
        n = n < args->count - done ? n : args->count - done;
        memcpy(args->pool.slots + args->page.slot[place.slot] * slot_bytes + place.off +
                   in_run * token_bytes,
               from + (uint64_t)done * geometry->head_dim, n * token_bytes);
        done += n;
    }
}

void leaf_append(const struct kvops_append *args, uint32_t first_item, uint32_t end_item) {
    for (uint32_t layer = first_item; layer < end_item; layer++)
        for (uint32_t head = 0; head < args->pool.geometry.kv_heads; head++)
            for (uint32_t value = 0; value < 2; value++)
                append_row(args, (struct layout_at){layer, head, 0}, value);
}
