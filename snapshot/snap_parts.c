/* snapshot/snap_parts.c - a sealed block, or a frozen page, as the parts of its record.
 *
 * Responsible for: what snap_parts.h says.
 * Not responsible for: who asks, and when.
 */
#include "snapshot/snap_parts.h"

#include <assert.h>

enum store_codec_hint snap_parts_hint(uint8_t kind) {
    switch (kind) {
    case LAYOUT_KH:
    case LAYOUT_VB:
    case LAYOUT_META:
    case LAYOUT_FP8:
    case LAYOUT_K8I4:
        return STORE_ZSTD;
    case LAYOUT_BF16:
    case LAYOUT_PAGE:
    case LAYOUT_SINKS:
        return STORE_SHUFFLE_ZSTD;
    default:
        return STORE_RAW;
    }
}

int snap_parts_behind(uint8_t kind) {
#ifdef BREAK_PARTS_BEHIND
    return 0;
#endif
    return kind == LAYOUT_KL || kind == LAYOUT_VR1 || kind == LAYOUT_VR2 || kind == LAYOUT_VX;
}

/* The block's bytes in memory of the processor, where they are not there already: the store takes
 * them during the put. */
static enum kv_err copy_out(struct snapshot *snapshot, const struct snap_item *item,
                            struct snap_parts *parts, struct kv_diag *diag) {
    uint64_t bytes = 0;
    if (transfer_mapped(snapshot->engine))
        return KV_OK;
    for (uint32_t i = 0; i < item->part_count; i++)
        bytes += item->parts[i].size;
    uint8_t *copy = transfer_host_get(snapshot->engine, bytes);
    if (copy == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to write a block");
    /* One after the other, so that what is counted is copying and not waiting. */
    pthread_mutex_lock(&snapshot->copying);
    uint64_t begun = kv_clock_now_ns(snapshot->clock);
    enum kv_err err = transfer_parts_read(snapshot->engine, item->parts, item->part_count, copy);
    parts->copy_ns = kv_clock_now_ns(snapshot->clock) - begun;
    pthread_mutex_unlock(&snapshot->copying);
    if (err != KV_OK) {
        transfer_host_put(snapshot->engine, copy);
        return kv_diag_set(diag, KV_ERR_DEVICE, "the device failed while a block was copied");
    }
    parts->copy = copy;
    return KV_OK;
}

enum kv_err snap_parts_take(struct snapshot *snapshot, const struct snap_item *item,
                            struct snap_parts *parts_out, struct kv_diag *diag) {
    struct snap_parts *parts = parts_out;
    assert(item->part_count <= LAYOUT_STREAM_COUNT);
    parts->copy = NULL;
    parts->copy_ns = 0;
    parts->streams = 0;
    parts->count = 1 + item->part_count;
    enum kv_err err = copy_out(snapshot, item, parts, diag);
    if (err != KV_OK)
        return err;
    parts->pieces[0][0] = (struct iovec){(void *)transfer_block_ids(item->block), RECORD_IDS_BYTES};
    parts->parts[0] = (struct store_part){RECORD_KIND_IDS, STORE_RAW, parts->pieces[0], 1, 0};
    uint64_t off = 0;
    for (uint32_t i = 1; i < parts->count; i++) {
        const struct transfer_part *from = &item->parts[i - 1];
        struct iovec *pieces = parts->pieces[i];
        parts->streams |= 1u << from->stream;
        for (uint32_t k = 0; k < from->piece_count; k++)
            pieces[k] = (struct iovec){from->pieces[k].bytes, from->pieces[k].size};
        if (parts->copy != NULL)
            pieces[0] = (struct iovec){parts->copy + off, from->size};
        off += from->size;
        parts->parts[i] =
            (struct store_part){.kind = (uint8_t)from->stream,
                                .hint = snap_parts_hint((uint8_t)from->stream),
                                .pieces = pieces,
                                .piece_count = parts->copy != NULL ? 1 : from->piece_count,
                                .behind = (uint8_t)snap_parts_behind((uint8_t)from->stream)};
    }
    return KV_OK;
}

static const struct transfer_frozen_page *page_of(const struct transfer_frozen *frozen,
                                                  uint32_t page) {
    return page == 0 ? &frozen->sinks : &frozen->pages[page - 1];
}

int snap_parts_has_page(const struct transfer_frozen *frozen, uint32_t page) {
    return page <= frozen->page_count && page_of(frozen, page)->bytes != NULL;
}

void snap_parts_page(const struct transfer_frozen *frozen, uint32_t page,
                     struct snap_parts *parts_out) {
    const struct transfer_frozen_page *from = page_of(frozen, page);
    const uint8_t kind = page == 0 ? LAYOUT_SINKS : LAYOUT_PAGE;
    struct snap_parts *parts = parts_out;
    parts->pieces[0][0] = (struct iovec){from->bytes, from->size};
    parts->parts[0] = (struct store_part){kind, snap_parts_hint(kind), parts->pieces[0], 1, 0};
    parts->count = 1;
    parts->streams = 0;
    parts->copy = NULL;
    parts->copy_ns = 0;
}

void snap_parts_drop(struct snapshot *snapshot, struct snap_parts *parts) {
    transfer_host_put(snapshot->engine, parts->copy);
    parts->copy = NULL;
}
