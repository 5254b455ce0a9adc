/* restore/rest_fetch.c - which extent goes where.
 *
 * Responsible for: the list of reads of one wake.
 * Not responsible for: running it.
 */
#include "restore/rest_fetch.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ITEM_ALIGN_BYTES = 64 };

/* Without the pieces that it does not have. */
static void copy_part(struct transfer_part *to, const struct transfer_part *from) {
    memcpy(to, from,
           offsetof(struct transfer_part, pieces) + from->piece_count * sizeof from->pieces[0]);
}

static enum kv_err add(struct rest_fetch *fetch, const struct store_extent *extent,
                       const struct transfer_part *part, struct kv_diag *diag) {
    struct rest_fetch_item *item = &fetch->items[fetch->count];
    item->extent = extent;
    item->stream = part->stream;
    copy_part(&item->place, part);
    item->piece_count = part->piece_count;
    item->pieces = fetch->pieces + fetch->piece_count;
    if (extent->raw_bytes != part->size)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s: stored with %llu bytes, its place has %llu",
                           item->label, (unsigned long long)extent->raw_bytes,
                           (unsigned long long)part->size);
    for (uint32_t i = 0; i < part->piece_count; i++)
        item->pieces[i] = (struct iovec){part->pieces[i].bytes, part->pieces[i].size};
    fetch->piece_count += part->piece_count;
    fetch->raw_bytes += part->size;
    fetch->count++;
    return KV_OK;
}

/* "block 12, stream KH", or its token ids: some thousand times before anything is read. */
static void put_label(char *label, uint32_t block, enum layout_stream stream) {
    static const char before[] = "block ", between[] = ", stream ", ids[] = ", token ids";
    char digits[10];
    size_t count = 0, at = sizeof before - 1;
    memcpy(label, before, at);
    do
        digits[count++] = (char)('0' + block % 10);
    while ((block /= 10) != 0);
    while (count != 0)
        label[at++] = digits[--count];
    if (stream == REST_FETCH_IDS) {
        memcpy(label + at, ids, sizeof ids);
        return;
    }
    memcpy(label + at, between, sizeof between - 1);
    const char *name = layout_stream_name(stream);
    memcpy(label + at + sizeof between - 1, name, strlen(name) + 1);
}

static enum kv_err add_ids(const struct rest_plan *plan, uint32_t block, struct rest_fetch *fetch,
                           struct kv_diag *diag) {
    uint8_t *at = fetch->ids + (size_t)block * RECORD_IDS_BYTES;
    const struct transfer_part part = {.stream = REST_FETCH_IDS,
                                       .piece_count = 1,
                                       .pieces = {{at, RECORD_IDS_BYTES}},
                                       .size = RECORD_IDS_BYTES,
                                       .staged = 1};
    put_label(fetch->items[fetch->count].label, block, REST_FETCH_IDS);
    return add(fetch, &plan->blocks[block].extents[0], &part, diag);
}

/* The parts of a block that are scales, or the others. */
static enum kv_err add_block(const struct rest_plan *plan, struct transfer_load *load, uint32_t b,
                             int scales, struct rest_fetch *fetch, struct kv_diag *diag) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    uint32_t part_count = transfer_load_block(load, b, parts);
    for (uint32_t i = 0; i < part_count; i++) {
        if ((parts[i].stream == LAYOUT_META) != scales)
            continue;
        const struct store_extent *extent = rest_plan_extent(&plan->blocks[b], parts[i].stream);
        char *label = fetch->items[fetch->count].label;
        put_label(label, b, parts[i].stream);
        if (extent == NULL)
            return kv_diag_set(diag, KV_ERR_CORRUPT, "%s is missing", label);
        enum kv_err err = add(fetch, extent, &parts[i], diag);
        if (err != KV_OK)
            return err;
    }
    return KV_OK;
}

static enum kv_err add_pages(const struct rest_plan *plan, struct transfer_load *load,
                             struct rest_fetch *fetch, struct kv_diag *diag) {
    struct transfer_part part;
    transfer_load_sinks(load, &part);
    part.stream = LAYOUT_SINKS;
    snprintf(fetch->items[fetch->count].label, REST_FETCH_LABEL_BYTES, "the sinks");
    enum kv_err err = add(fetch, &plan->sinks, &part, diag);
    for (uint32_t i = 0; err == KV_OK && i < plan->image.page_count; i++) {
        transfer_load_page(load, i, &part);
        part.stream = LAYOUT_PAGE;
        snprintf(fetch->items[fetch->count].label, REST_FETCH_LABEL_BYTES,
                 "the page at position %llu", (unsigned long long)plan->image.pages[i].first);
        err = add(fetch, &plan->pages[i], &part, diag);
    }
    return err;
}

/* Room for every part that a load can name; what is not used is not touched, and what is used add
 * has written. */
static int make_room(const struct rest_plan *plan, struct rest_fetch *fetch) {
    size_t pages = 1 + (size_t)plan->image.page_count, blocks = plan->image.block_count;
    size_t items = pages + blocks * LAYOUT_STREAM_COUNT;
    size_t pieces = pages * LAYOUT_PAGE_SLOTS + blocks * (LAYOUT_BLOCK_SLOTS + 2);
    int wants_ids = !plan->has_ids && blocks != 0;
    fetch->room = items;
    fetch->items = kv_alloc_aligned(fetch->alloc, items * sizeof *fetch->items, ITEM_ALIGN_BYTES);
    fetch->pieces =
        kv_alloc_aligned(fetch->alloc, pieces * sizeof *fetch->pieces, ITEM_ALIGN_BYTES);
    if (wants_ids)
        fetch->ids = kv_alloc_zeroed(fetch->alloc, blocks, RECORD_IDS_BYTES);
    return fetch->items != NULL && fetch->pieces != NULL && (fetch->ids != NULL || !wants_ids);
}

static int is_page(const struct rest_fetch_item *item) {
    return item->stream == LAYOUT_PAGE || item->stream == LAYOUT_SINKS;
}

/* Everything on the list is wanted before the session answers, so it comes in the order in which it
 * lies on the disk. But pages, which are written last, take longest to unzip: nothing is read any
 * more while the last one is, so they come first. */
static int by_place(const void *left, const void *right) {
    const struct store_extent *a = ((const struct rest_fetch_item *)left)->extent;
    const struct store_extent *b = ((const struct rest_fetch_item *)right)->extent;
    int pages = is_page(right) - is_page(left);
#ifndef BREAK_PAGES_FIRST
    if (pages != 0)
        return pages;
#endif
    if (a->segment != b->segment)
        return a->segment < b->segment ? -1 : 1;
    return a->off < b->off ? -1 : a->off > b->off;
}

enum kv_err rest_fetch_begin(const struct rest_plan *plan, struct transfer_load *load,
                             struct rest_fetch *fetch_out, struct kv_diag *diag) {
    struct rest_fetch *fetch = fetch_out;
    memset(fetch, 0, sizeof *fetch);
    fetch->alloc = plan->alloc;
    if (!make_room(plan, fetch))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the list of reads");
    enum kv_err err = add_pages(plan, load, fetch, diag);
    fetch->page_count = fetch->count;
    for (uint32_t b = 0; err == KV_OK && b < plan->image.block_count; b++)
        err = add_block(plan, load, b, 1, fetch, diag);
    fetch->whole_count = fetch->count;
    return err;
}

enum kv_err rest_fetch_rest(const struct rest_plan *plan, struct transfer_load *load,
                            struct rest_fetch *fetch, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    for (uint32_t b = 0; err == KV_OK && !fetch->listed && b < plan->image.block_count; b++) {
        err = fetch->ids != NULL ? add_ids(plan, b, fetch, diag) : KV_OK;
        if (err == KV_OK)
            err = add_block(plan, load, b, 0, fetch, diag);
    }
    fetch->listed = err == KV_OK;
    return err;
}

void rest_fetch_sort(struct rest_fetch *fetch) {
    qsort(fetch->items, fetch->count, sizeof *fetch->items, by_place);
}

void rest_fetch_release(struct rest_fetch *fetch) {
    if (fetch->alloc == NULL)
        return;
    kv_alloc_release(fetch->alloc, fetch->items);
    kv_alloc_release(fetch->alloc, fetch->pieces);
    kv_alloc_release(fetch->alloc, fetch->ids);
    fetch->ids = NULL;
    fetch->items = NULL;
    fetch->pieces = NULL;
}

int rest_fetch_is_far(const struct rest_fetch_item *item, int mapped) {
    return !mapped && !item->place.staged && item->piece_count > 0;
}

struct transfer_part rest_fetch_part(const struct rest_fetch_item *item) {
    struct transfer_part part = {.stream = item->stream, .piece_count = item->piece_count};
    assert(item->piece_count <= sizeof part.pieces / sizeof part.pieces[0]);
    for (uint32_t i = 0; i < item->piece_count; i++) {
        part.pieces[i] = (struct transfer_piece){item->pieces[i].iov_base, item->pieces[i].iov_len};
        part.size += item->pieces[i].iov_len;
    }
    return part;
}
