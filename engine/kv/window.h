/* engine/kv/window.h - the BF16 part of a session: sinks and window pages.
 *
 * Responsible for: taking their 72 slots, writing rows of a chunk into them, turning the oldest
 * four pages over when a block is sealed, and where a position lies.
 * Not responsible for: sealing (the scheduler) or reading (kernels/).
 *
 * Threads: the scheduler thread.
 * Units: positions are absolute; pages and slots are counts and indices.
 */
#ifndef ENGINE_KV_WINDOW_H
#define ENGINE_KV_WINDOW_H

#include "engine/device/device.h"
#include "engine/kv/slots.h"
#include "kernels/kvops.h"

enum { WINDOW_SLOTS = LAYOUT_PAGE_SLOTS * (LAYOUT_WINDOW_PAGES_MAX + 1) };

struct window {
    struct kvops_page sinks;
    struct kvops_page pages[LAYOUT_WINDOW_PAGES_MAX]; /* in order of position */
};

/* The caller has seen that WINDOW_SLOTS are free. */
void window_take(struct window *window, struct slots *slots);
void window_put(struct window *window, struct slots *slots);

/* The oldest four pages go behind the others: their tokens are sealed. With `fresh` the slots of
 * those pages belong to a BF16 block now and the 32 of `fresh` take their place. */
void window_turn(struct window *window, struct slots *slots, const uint32_t *fresh);

struct window_rows {
    const uint16_t *chunk; /* [layer][K, V][kv_head][chunk_rows][dim] */
    uint32_t chunk_rows, first_row, count;
    uint64_t position;      /* of the first row */
    uint64_t sealed_blocks; /* after this step */
};
/* DEVICE. */
enum kv_err window_append(struct window *window, struct device *device, const struct slots *slots,
                          const struct window_rows *rows);

#endif
