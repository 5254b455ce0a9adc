/* snapshot/snap_take.c - an export file read front to back and believed in nothing.
 *
 * Responsible for: the contract of snap_take.h.
 * Not responsible for: heads as bytes (engine/export.c), the image's own parts (image_decode).
 */
#include "snapshot/snap_take.h"

#include "engine/export.h"
#include "engine/scales.h"
#include "engine/transfer.h"
#include "store/base/bytes.h"

#include <stdio.h>
#include <string.h>

enum { STEP_BYTES = 1 << 20 };
static const uint64_t image_bytes_max = (uint64_t)64 << 20;

struct taking {
    const struct snap_take_args *args;
    uint64_t check;
    uint64_t taken, all; /* bytes of the file, and what is expected */
    struct image image;
    struct export_done done; /* as counted here */
    void *buffer;
    size_t buffer_bytes, used;
    char what[48]; /* the part that is being read */
    struct kv_diag *diag;
};

static enum kv_err cut(const struct taking *taking) {
    return kv_diag_set(
        taking->diag, KV_ERR_CORRUPT,
        "the file ends after %llu bytes, in %s: it was cut, export the session again",
        (unsigned long long)taking->taken, taking->what);
}

static enum kv_err broken(const struct taking *taking, const char *text) {
    return kv_diag_set(taking->diag, KV_ERR_CORRUPT, "%s: %s", taking->what, text);
}

static enum kv_err get(struct taking *taking, void *bytes, size_t count) {
    size_t got = 0;
    enum kv_err err =
        taking->args->get(taking->args->get_context, bytes, count, &got, taking->diag);
    taking->taken += got;
    if (err == KV_OK && got != count)
        err = cut(taking);
    if (err == KV_OK && taking->args->progress != NULL &&
        !taking->args->progress(taking->args->progress_context, taking->taken, taking->all))
        err = kv_diag_set(taking->diag, KV_ERR_CANCELLED, "the import was stopped");
    return err;
}

/* Adds the content of a frame to the buffer. A length is believed only as far as bytes come. */
static enum kv_err get_content(struct taking *taking, const struct export_frame *frame) {
    size_t first = taking->used;
    for (uint64_t left = frame->bytes; left > 0;) {
        size_t step = left < STEP_BYTES ? (size_t)left : STEP_BYTES;
        if (!kv_alloc_grow(taking->args->alloc, &taking->buffer, &taking->buffer_bytes,
                           taking->used + step, 1))
            return kv_diag_set(taking->diag, KV_ERR_NOMEM, "no memory for %s", taking->what);
        enum kv_err err = get(taking, (uint8_t *)taking->buffer + taking->used, step);
        if (err != KV_OK)
            return err;
        taking->used += step;
        left -= step;
    }
    if (frame->bytes == 0)
        return broken(taking, "it is empty");
    struct kv_digest digest = kv_digest_of((uint8_t *)taking->buffer + first, (size_t)frame->bytes);
#ifndef BREAK_EXPORT_DIGEST
    if (!kv_digest_equal(&digest, &frame->digest))
        return broken(taking, "its bytes do not have the digest that stands with them");
#endif
    taking->done.bytes += frame->bytes;
    return KV_OK;
}

static enum kv_err get_frame(struct taking *taking, enum export_tag tag,
                             struct export_frame *frame_out) {
    uint8_t head[EXPORT_FRAME_BYTES];
    enum kv_err err = get(taking, head, sizeof head);
    if (err == KV_OK) {
        err = export_get_frame(head, &taking->check, frame_out, taking->diag);
        if (err != KV_OK)
            kv_diag_prefix(taking->diag, "%s", taking->what);
    }
    if (err == KV_OK && frame_out->tag != tag)
        err = broken(taking, "another part stands in its place");
    return err;
}

/* --- the image */

static const struct image_policy *policy_of(const struct image *image) {
    return &image->policies[image->policy_count - 1].policy;
}

/* What is still to come, for the progress line. */
static uint64_t expected_bytes(const struct image *image) {
    uint64_t block = RECORD_IDS_BYTES;
    uint32_t streams = layout_tier_streams(image_top(policy_of(image)));
    for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++)
        if (streams & 1u << s)
            block += layout_stream_bytes(&image->model.geometry, s);
    uint64_t bytes = image->block_count * block;
    for (uint32_t i = 0; i < image->page_count; i++)
        bytes += layout_dense_bytes(&image->model.geometry, image->pages[i].tokens);
    return bytes + layout_dense_bytes(&image->model.geometry, image->sinks.tokens);
}

static enum kv_err check_ids(const struct taking *taking, const uint8_t *bytes, uint64_t count) {
    uint32_t vocab = taking->args->vocab_count;
#ifdef BREAK_EXPORT_IDS
    vocab = 0;
#endif
    for (uint64_t i = 0; vocab != 0 && i < count; i++)
        if (kv_get_u32(bytes + 4 * i) >= vocab)
            return kv_diag_set(taking->diag, KV_ERR_CORRUPT,
                               "%s: token id %u is outside the vocabulary of %u", taking->what,
                               kv_get_u32(bytes + 4 * i), vocab);
    return KV_OK;
}

static enum kv_err check_image(const struct taking *taking) {
    const struct image *image = &taking->image;
    const struct image_model *here = taking->args->here;
    struct image_model own = image->model;
    if (here == NULL) {
        own.code_id = RECORD_CODE_PLANES;
        own.layout_id = RECORD_LAYOUT_ID;
        here = &own;
    }
    enum kv_err err = session_check_name(image->name, taking->diag);
    if (err == KV_OK)
        err = image_compatible(&image->model, here, taking->diag);
    for (uint64_t i = 0; err == KV_OK && i < image->n; i++) {
        uint8_t id[4];
        kv_put_u32(id, image->ids[i]);
        err = check_ids(taking, id, 1);
    }
    return err;
}

static enum kv_err take_image(struct taking *taking) {
    struct export_frame frame;
    enum kv_err err = KV_OK;
    snprintf(taking->what, sizeof taking->what, "the session image");
    KV_TRY(get_frame(taking, EXPORT_IMAGE, &frame));
    if (frame.bytes > image_bytes_max || (frame.number & ~3u) != 0)
        KV_TRY(broken(taking, "its length or its flags are impossible"));
    taking->used = 0;
    KV_TRY(get_content(taking, &frame));
    KV_TRY(image_decode(taking->buffer, taking->used, taking->args->alloc, &taking->image,
                        taking->diag));
    KV_TRY(check_image(taking));
    taking->all = taking->taken + expected_bytes(&taking->image);
    struct kv_digest root = image_root(taking->buffer, taking->used);
    if (taking->args->visitor.image != NULL)
        err = taking->args->visitor.image(taking->args->visitor.context, &taking->image,
                                          frame.number, &root, taking->diag);
done:
    return err;
}

/* --- blocks */

static enum kv_err check_extent(const struct taking *taking, const struct export_frame *frame,
                                uint32_t index, uint32_t seen) {
    uint32_t kind = frame->number;
    uint64_t expected = RECORD_IDS_BYTES;
    if (index == 0 && kind != RECORD_KIND_IDS)
        return broken(taking, "its token ids do not stand first");
    if (index > 0) {
        if (!layout_stream_of_block(kind) || seen & 1u << kind)
            return broken(taking, "an extent is no stream or is there twice");
        expected = layout_stream_bytes(&taking->image.model.geometry, (enum layout_stream)kind);
    }
    if (frame->bytes != expected)
        return kv_diag_set(taking->diag, KV_ERR_CORRUPT,
                           "%s: extent %u has %llu bytes, the layout %llu", taking->what, index,
                           (unsigned long long)frame->bytes, (unsigned long long)expected);
    return KV_OK;
}

/* Numbers that no encoder writes, although the digest is right. */
static enum kv_err check_numbers(const struct taking *taking,
                                 const struct snap_take_extent *extent) {
    struct transfer_part part = {
        .stream = (enum layout_stream)extent->kind, .piece_count = 1, .size = extent->count};
    if (extent->kind == RECORD_KIND_IDS)
        return check_ids(taking, extent->bytes, extent->count / 4);
    if (extent->kind == LAYOUT_BF16 || extent->kind == LAYOUT_PAGE || extent->kind == LAYOUT_SINKS)
        return scales_check_bf16(taking->what, extent->bytes, (size_t)extent->count, taking->diag);
    part.pieces[0] = (struct transfer_piece){(void *)extent->bytes, extent->count};
    return scales_check(taking->what, &part, taking->diag);
}

static enum kv_err get_description(struct taking *taking, uint32_t index,
                                   struct export_block *block_out) {
    struct export_frame frame;
    uint64_t first = LAYOUT_SINK_TOKENS + (uint64_t)index * LAYOUT_BLOCK_TOKENS;
    enum kv_err err = get_frame(taking, EXPORT_BLOCK, &frame);
    if (err == KV_OK && (frame.number != index || frame.bytes > EXPORT_BLOCK_BYTES_MAX))
        err = broken(taking, "another block stands in its place");
    taking->used = 0;
    if (err == KV_OK)
        err = get_content(taking, &frame);
    if (err == KV_OK)
        err = export_get_block(taking->buffer, taking->used, block_out, taking->diag);
    if (err != KV_OK)
        return err;
    err =
        record_check_code(&block_out->record,
                          layout_tier_streams(image_top(policy_of(&taking->image))), taking->diag);
    if (err != KV_OK) {
        kv_diag_prefix(taking->diag, "%s", taking->what);
        return err;
    }
    if (block_out->record.first_position != first || block_out->extent_count < 2 ||
        block_out->extent_count > RECORD_BLOCK_EXTENTS_MAX)
        return broken(taking, "its position or its number of extents is impossible");
    return KV_OK;
}

static enum kv_err check_streams(const struct taking *taking, uint32_t seen) {
    uint32_t wanted = layout_tier_streams(image_top(policy_of(&taking->image)));
    for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++)
        if (wanted & ~seen & 1u << s)
            return kv_diag_set(taking->diag, KV_ERR_CORRUPT, "%s: stream %s is missing",
                               taking->what, layout_stream_name(s));
    return KV_OK;
}

static enum kv_err take_block(struct taking *taking, uint32_t index) {
    struct export_block block;
    struct snap_take_extent extents[RECORD_BLOCK_EXTENTS_MAX];
    size_t places[RECORD_BLOCK_EXTENTS_MAX];
    uint32_t seen = 0;
    enum kv_err err = KV_OK;
    snprintf(taking->what, sizeof taking->what, "block %u", index);
    KV_TRY(get_description(taking, index, &block));
    taking->used = 0;
    for (uint32_t i = 0; i < block.extent_count; i++) {
        struct export_frame frame;
        KV_TRY(get_frame(taking, EXPORT_EXTENT, &frame));
        KV_TRY(check_extent(taking, &frame, i, seen));
        places[i] = taking->used;
        KV_TRY(get_content(taking, &frame));
        extents[i] =
            (struct snap_take_extent){(uint8_t)frame.number, NULL, frame.bytes, frame.digest};
        seen |= i > 0 ? 1u << frame.number : 0;
    }
    if (block.record.keeps_k != (policy_of(&taking->image)->recipe == IMAGE_RECIPE_V2))
        KV_TRY(broken(taking, "its ladder is not that of the image's recipe"));
    /* Planes that the session has given up stand by their digests. */
    if (seen & record_dropped(&block.record))
        KV_TRY(broken(taking, "a stream is there although it was given up"));
    KV_TRY(check_streams(taking, seen | record_dropped(&block.record)));
    for (uint32_t i = 0; i < block.extent_count; i++) {
        extents[i].bytes = (const uint8_t *)taking->buffer + places[i];
        KV_TRY(check_numbers(taking, &extents[i]));
    }
    const struct snap_take_block part = {index, &block.record, extents, block.extent_count};
    taking->done.blocks++;
    taking->done.extents += block.extent_count;
    if (taking->args->visitor.block != NULL)
        err = taking->args->visitor.block(taking->args->visitor.context, &part, taking->diag);
done:
    return err;
}

/* --- pages and the end */

static enum kv_err take_page(struct taking *taking, uint32_t index) {
    const struct image *image = &taking->image;
    const struct image_page *page = index == 0 ? &image->sinks : &image->pages[index - 1];
    struct export_frame frame;
    enum kv_err err = KV_OK;
    if (index == 0)
        snprintf(taking->what, sizeof taking->what, "the sinks");
    else
        snprintf(taking->what, sizeof taking->what, "the page at position %llu",
                 (unsigned long long)page->first);
    KV_TRY(get_frame(taking, EXPORT_PAGE, &frame));
    if (frame.number != (index == 0 ? LAYOUT_SINKS : LAYOUT_PAGE) ||
        frame.bytes != layout_dense_bytes(&image->model.geometry, page->tokens))
        KV_TRY(broken(taking, "its kind or its length is not the image's"));
    if (!kv_digest_equal(&frame.digest, &page->digest))
        KV_TRY(broken(taking, "its digest is not the image's"));
    taking->used = 0;
    KV_TRY(get_content(taking, &frame));
    const struct snap_take_extent extent = {(uint8_t)frame.number, taking->buffer, frame.bytes,
                                            frame.digest};
    KV_TRY(check_numbers(taking, &extent));
    taking->done.pages++;
    if (taking->args->visitor.page != NULL)
        err =
            taking->args->visitor.page(taking->args->visitor.context, index, &extent, taking->diag);
done:
    return err;
}

static enum kv_err take_end(struct taking *taking) {
    struct export_frame frame;
    struct export_done expected = taking->done, found;
    uint8_t more;
    size_t got = 0;
    enum kv_err err = KV_OK;
    snprintf(taking->what, sizeof taking->what, "the end of the export");
    KV_TRY(get_frame(taking, EXPORT_DONE, &frame));
    if (frame.number != 0 || frame.bytes != EXPORT_DONE_BYTES)
        KV_TRY(broken(taking, "it is impossible"));
    taking->used = 0;
    KV_TRY(get_content(taking, &frame));
    KV_TRY(export_get_done(taking->buffer, &found, taking->diag));
    if (found.blocks != expected.blocks || found.extents != expected.extents ||
        found.pages != expected.pages || found.bytes != expected.bytes)
        KV_TRY(broken(taking, "its counts are not those of what stands before it"));
    KV_TRY(taking->args->get(taking->args->get_context, &more, 1, &got, taking->diag));
#ifdef BREAK_EXPORT_TAIL
    got = 0;
#endif
    if (got != 0)
        err = kv_diag_set(taking->diag, KV_ERR_CORRUPT,
                          "the file goes on behind its end, at byte %llu: it is not as it was "
                          "exported",
                          (unsigned long long)taking->taken);
done:
    return err;
}

static enum kv_err take_start(struct taking *taking) {
    uint8_t start[EXPORT_START_BYTES];
    snprintf(taking->what, sizeof taking->what, "its start");
    enum kv_err err = get(taking, start, sizeof start);
    return err != KV_OK ? err : export_get_start(start, &taking->check, taking->diag);
}

enum kv_err snap_take(const struct snap_take_args *args, uint64_t *bytes_out,
                      struct kv_diag *diag) {
    struct taking taking = {.args = args, .diag = diag};
    enum kv_err err = KV_OK;
    image_init(&taking.image);
    KV_TRY(take_start(&taking));
    KV_TRY(take_image(&taking));
    for (uint32_t b = 0; b < taking.image.block_count; b++)
        KV_TRY(take_block(&taking, b));
    for (uint32_t i = 0; i <= taking.image.page_count; i++)
        KV_TRY(take_page(&taking, i));
    KV_TRY(take_end(&taking));
    *bytes_out = taking.taken;
    if (args->visitor.end != NULL)
        err = args->visitor.end(args->visitor.context, diag);
done:
    image_release(&taking.image, args->alloc);
    kv_alloc_release(args->alloc, taking.buffer);
    return err;
}
