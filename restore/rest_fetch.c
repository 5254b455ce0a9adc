/* restore/rest_fetch.c - which extent goes where, in order of need.
 *
 * Responsible for: the list of reads of one wake.
 * Not responsible for: running it.
 */
#include "restore/rest_fetch.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const enum layout_stream needed_first[] = {LAYOUT_META, LAYOUT_KH,  LAYOUT_KM,  LAYOUT_VB,
                                                  LAYOUT_BF16, LAYOUT_FP8, LAYOUT_K8I4};
static const enum layout_stream refinement[] = {LAYOUT_VR1, LAYOUT_VR2, LAYOUT_KL, LAYOUT_VX};

static enum kv_err add(struct rest_fetch *fetch, const struct store_extent *extent,
                       const struct transfer_part *part, struct kv_diag *diag) {
    struct rest_fetch_item *item = &fetch->items[fetch->count];
    item->extent = extent;
    item->stream = part->stream;
    item->place = *part;
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

static enum kv_err add_streams(const struct rest_plan *plan, struct transfer_load *load,
                               const enum layout_stream *streams, size_t stream_count,
                               struct rest_fetch *fetch, struct kv_diag *diag) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    for (uint32_t b = 0; b < plan->image.block_count; b++) {
        uint32_t part_count = transfer_load_block(load, b, parts);
        for (uint32_t i = 0; i < part_count; i++) {
            size_t s = 0;
            while (s < stream_count && streams[s] != parts[i].stream)
                s++;
            if (s == stream_count)
                continue;
            const struct store_extent *extent = rest_plan_extent(&plan->blocks[b], parts[i].stream);
            char *label = fetch->items[fetch->count].label;
            snprintf(label, REST_FETCH_LABEL_BYTES, "block %u, stream %s", b,
                     layout_stream_name(parts[i].stream));
            if (extent == NULL)
                return kv_diag_set(diag, KV_ERR_CORRUPT, "%s is missing", label);
            enum kv_err err = add(fetch, extent, &parts[i], diag);
            if (err != KV_OK)
                return err;
        }
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

/* Room for every part that the load can name. */
static int make_room(const struct rest_plan *plan, struct transfer_load *load,
                     struct rest_fetch *fetch) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    size_t items = 0;
    size_t pieces = 0;
    for (uint32_t b = 0; b < plan->image.block_count; b++) {
        uint32_t part_count = transfer_load_block(load, b, parts);
        items += part_count;
        for (uint32_t i = 0; i < part_count; i++)
            pieces += parts[i].piece_count;
    }
    transfer_load_sinks(load, &parts[0]);
    items += 1 + plan->image.page_count;
    pieces += parts[0].piece_count;
    for (uint32_t i = 0; i < plan->image.page_count; i++) {
        transfer_load_page(load, i, &parts[0]);
        pieces += parts[0].piece_count;
    }
    fetch->items = kv_alloc_zeroed(fetch->alloc, items, sizeof *fetch->items);
    fetch->pieces = kv_alloc_zeroed(fetch->alloc, pieces, sizeof *fetch->pieces);
    return fetch->items != NULL && fetch->pieces != NULL;
}

/* Everything on the list is wanted before the session answers, so it comes in the order in which it
 * lies on the disk. */
static int by_place(const void *left, const void *right) {
    const struct store_extent *a = ((const struct rest_fetch_item *)left)->extent;
    const struct store_extent *b = ((const struct rest_fetch_item *)right)->extent;
    if (a->segment != b->segment)
        return a->segment < b->segment ? -1 : 1;
    return a->off < b->off ? -1 : a->off > b->off;
}

enum kv_err rest_fetch_list(const struct rest_plan *plan, struct transfer_load *load,
                            struct rest_fetch *fetch_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    memset(fetch_out, 0, sizeof *fetch_out);
    fetch_out->alloc = plan->alloc;
    if (!make_room(plan, load, fetch_out))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the list of reads");
    KV_TRY(add_streams(plan, load, needed_first, sizeof needed_first / sizeof needed_first[0],
                       fetch_out, diag));
    KV_TRY(add_pages(plan, load, fetch_out, diag));
    KV_TRY(add_streams(plan, load, refinement, sizeof refinement / sizeof refinement[0], fetch_out,
                       diag));
    qsort(fetch_out->items, fetch_out->count, sizeof *fetch_out->items, by_place);
done:
    return err;
}

void rest_fetch_release(struct rest_fetch *fetch) {
    if (fetch->alloc == NULL)
        return;
    kv_alloc_release(fetch->alloc, fetch->items);
    kv_alloc_release(fetch->alloc, fetch->pieces);
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
