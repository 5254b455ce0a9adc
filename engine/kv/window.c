/* engine/kv/window.c - the BF16 part of a session: sinks and window pages.
 *
 * Responsible for: slots of the pages and the page that each position lies in.
 * Not responsible for: sealing or reading.
 */
#include "engine/kv/window.h"

#include <assert.h>
#include <string.h>

void window_take(struct window *window, struct slots *slots) {
    slots_take(slots, LAYOUT_PAGE_SLOTS, window->sinks.slot);
    for (uint32_t page = 0; page < LAYOUT_WINDOW_PAGES_MAX; page++)
        slots_take(slots, LAYOUT_PAGE_SLOTS, window->pages[page].slot);
}

void window_put(struct window *window, struct slots *slots) {
    slots_gather(slots);
    slots_put(slots, window->sinks.slot, LAYOUT_PAGE_SLOTS);
    for (uint32_t page = 0; page < LAYOUT_WINDOW_PAGES_MAX; page++)
        slots_put(slots, window->pages[page].slot, LAYOUT_PAGE_SLOTS);
    slots_gather_end(slots);
}

void window_turn(struct window *window, struct slots *slots, const uint32_t *fresh) {
    struct kvops_page oldest[LAYOUT_BLOCK_PAGES];
    uint32_t spoiled[LAYOUT_BLOCK_SLOTS];
    struct kvops_page *end = window->pages + LAYOUT_WINDOW_PAGES_MAX - LAYOUT_BLOCK_PAGES;

    memcpy(oldest, window->pages, sizeof oldest);
    memmove(window->pages, window->pages + LAYOUT_BLOCK_PAGES,
            sizeof window->pages - sizeof oldest);
    memcpy(end, oldest, sizeof oldest);
    for (uint32_t i = 0; i < LAYOUT_BLOCK_SLOTS; i++) {
        uint32_t *slot = &end[i / LAYOUT_PAGE_SLOTS].slot[i % LAYOUT_PAGE_SLOTS];
        if (fresh)
            *slot = fresh[i];
        spoiled[i] = *slot;
    }
    if (!fresh)
        slots_spoil(slots, spoiled, LAYOUT_BLOCK_SLOTS);
}

enum kv_err window_append(struct window *window, struct device *device, const struct slots *slots,
                          const struct window_rows *rows) {
    for (uint32_t done = 0; done < rows->count;) {
        uint64_t position = rows->position + done;
        struct kvops_append append = {.pool = slots->pool,
                                      .chunk = rows->chunk,
                                      .chunk_rows = rows->chunk_rows,
                                      .first_row = rows->first_row + done};
        if (position < LAYOUT_SINK_TOKENS) {
            append.page = window->sinks;
        } else {
            uint64_t offset =
                position - LAYOUT_SINK_TOKENS - rows->sealed_blocks * LAYOUT_BLOCK_TOKENS;
            assert(offset / LAYOUT_PAGE_TOKENS < LAYOUT_WINDOW_PAGES_MAX);
            append.page = window->pages[offset / LAYOUT_PAGE_TOKENS];
        }
        append.page_token = (uint32_t)(position % LAYOUT_PAGE_TOKENS);
        append.count = LAYOUT_PAGE_TOKENS - append.page_token;
        if (append.count > rows->count - done)
            append.count = rows->count - done;
        enum kv_err err = device_append(device, &append);
        if (err != KV_OK)
            return err;
        done += append.count;
    }
    return KV_OK;
}
