/* restore/rest_export.c - one snapshot from the store into one file.
 *
 * Responsible for: the frames of snapshot/EXPORT.md in their order, every byte read back and its
 * digest compared with what the plan has checked.
 * Not responsible for: files and pipes (tools/), reading such a file (snapshot/).
 *
 * Memory is bounded by one block: its extents are read together and written one by one.
 */
#include "restore/restore.h"

#include "engine/export.h"
#include "restore/rest_plan.h"
#include "store/base/bytes.h"

#include <stdio.h>
#include <string.h>

struct exporting {
    const struct restore_export_args *args;
    struct rest_plan plan;
    uint64_t check; /* of the last head */
    struct export_done done;
    uint64_t written, all; /* bytes of the file, and what is expected */
    uint8_t *buffer;
    size_t buffer_bytes;
    int in_doubt; /* a late read may still come into the buffer: it is never released */
    struct kv_diag *diag;
};

static enum kv_err put(struct exporting *out, const void *bytes, size_t count) {
    enum kv_err err = out->args->put(out->args->context, bytes, count, out->diag);
    out->written += count;
    if (err == KV_OK && out->args->progress != NULL &&
        !out->args->progress(out->args->progress_context, out->written, out->all))
        err = kv_diag_set(out->diag, KV_ERR_CANCELLED, "the export was stopped");
    return err;
}

static enum kv_err put_frame(struct exporting *out, const struct export_frame *frame,
                             const void *content) {
    uint8_t head[EXPORT_FRAME_BYTES];
    export_put_frame(frame, &out->check, head);
    enum kv_err err = put(out, head, sizeof head);
    if (err == KV_OK)
        err = put(out, content, (size_t)frame->bytes);
    out->done.bytes += frame->bytes;
    return err;
}

static enum kv_err put_own(struct exporting *out, enum export_tag tag, uint32_t number,
                           const void *content, size_t count) {
    const struct export_frame frame = {tag, number, count, kv_digest_of(content, count)};
    return put_frame(out, &frame, content);
}

/* --- extents */

static enum kv_err room(struct exporting *out, uint64_t bytes) {
    if (bytes <= out->buffer_bytes)
        return KV_OK;
    if (!out->in_doubt)
        kv_alloc_release(out->args->alloc, out->buffer);
    out->buffer_bytes = 0;
    out->buffer = kv_alloc_aligned(out->args->alloc, (size_t)bytes, STORE_PAGE_BYTES);
    if (out->buffer == NULL)
        return kv_diag_set(out->diag, KV_ERR_NOMEM, "no memory for a block of %llu bytes",
                           (unsigned long long)bytes);
    out->buffer_bytes = (size_t)bytes;
    out->in_doubt = 0;
    return KV_OK;
}

/* All extents side by side into the buffer, each on a page boundary. */
static enum kv_err read_extents(struct exporting *out, const struct store_extent *extents,
                                uint32_t count, const char *label) {
    struct store_read reads[RECORD_BLOCK_EXTENTS_MAX];
    struct iovec pieces[RECORD_BLOCK_EXTENTS_MAX];
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += kv_round_up(extents[i].raw_bytes, STORE_PAGE_BYTES);
    enum kv_err err = room(out, bytes);
    if (err != KV_OK)
        return err;
    bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        pieces[i] = (struct iovec){out->buffer + bytes, (size_t)extents[i].raw_bytes};
        reads[i] = (struct store_read){.extent = &extents[i],
                                       .pieces = &pieces[i],
                                       .piece_count = 1,
                                       .verify = 1,
                                       .label = label};
        bytes += kv_round_up(extents[i].raw_bytes, STORE_PAGE_BYTES);
    }
    const struct store_read_args args = {.reads = reads, .count = count};
    err = store_read(out->args->store, &args, NULL, out->diag);
    for (uint32_t i = 0; i < count; i++)
        out->in_doubt |= reads[i].in_doubt;
    return err;
}

/* The same extents wherever they lie by now. */
static enum kv_err find_again(struct exporting *out, const struct record_key *key,
                              struct store_extent *extents, uint32_t count) {
    struct store_record stored;
    enum kv_err err = store_get(out->args->store, key->bytes, key->size, &stored, out->diag);
    if (err != KV_OK)
        return err;
    if (stored.extent_count != count)
        err = kv_diag_set(out->diag, KV_ERR_CORRUPT, "the record has changed");
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        err = rest_plan_check("digest in the index", &extents[i].digest, &stored.extents[i].digest,
                              out->diag);
        extents[i] = stored.extents[i];
    }
    store_record_release(out->args->store, &stored);
    return err;
}

static enum kv_err read_record(struct exporting *out, const struct record_key *key,
                               struct store_extent *extents, uint32_t count, const char *label) {
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    while (store_look(out->args->store, &look, err, out->diag)) {
        err = look.count == 1 ? KV_OK : find_again(out, key, extents, count);
        if (err == KV_OK)
            err = read_extents(out, extents, count, label);
    }
    return err;
}

/* --- parts of the file */

static enum kv_err put_image(struct exporting *out) {
    const struct rest_plan *plan = &out->plan;
    uint8_t *bytes = NULL;
    size_t size = 0;
    uint32_t flags = (plan->record.is_explicit ? EXPORT_EXPLICIT : 0) |
                     (plan->record.asleep ? EXPORT_ASLEEP : 0);
    enum kv_err err = image_encode(&plan->image, out->args->alloc, &bytes, &size, out->diag);
    if (err != KV_OK)
        return err;
    struct kv_digest root = image_root(bytes, size);
    err = rest_plan_check("root of the image", &plan->record.root, &root, out->diag);
    if (err == KV_OK)
        err = put_own(out, EXPORT_IMAGE, flags, bytes, size);
    kv_alloc_release(out->args->alloc, bytes);
    return err;
}

static enum kv_err put_extents(struct exporting *out, enum export_tag tag,
                               const struct store_extent *extents, uint32_t count) {
    uint64_t at = 0;
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        const struct export_frame frame = {tag, extents[i].kind, extents[i].raw_bytes,
                                           extents[i].digest};
        err = put_frame(out, &frame, out->buffer + at);
        at += kv_round_up(extents[i].raw_bytes, STORE_PAGE_BYTES);
    }
    return err;
}

static enum kv_err put_block(struct exporting *out, uint32_t index) {
    struct rest_plan_block *block = &out->plan.blocks[index];
    const struct export_block head = {.extent_count = block->extent_count, .record = block->record};
    struct record_key key = record_key_block(block->lineage, index);
    uint8_t content[EXPORT_BLOCK_BYTES_MAX];
    char label[32];
    snprintf(label, sizeof label, "block %u", index);
    size_t count = export_put_block(&head, content);
    enum kv_err err = read_record(out, &key, block->extents, block->extent_count, label);
    if (err == KV_OK)
        err = put_own(out, EXPORT_BLOCK, index, content, count);
    if (err == KV_OK)
        err = put_extents(out, EXPORT_EXTENT, block->extents, block->extent_count);
    out->done.blocks++;
    out->done.extents += block->extent_count;
    return err;
}

static enum kv_err put_page(struct exporting *out, const struct image_page *page,
                            struct store_extent *extent) {
    struct record_key key = record_key_page(page->page_id);
    enum kv_err err = read_record(out, &key, extent, 1, "a window page");
    if (err == KV_OK)
        err = put_extents(out, EXPORT_PAGE, extent, 1);
    out->done.pages++;
    return err;
}

static enum kv_err put_all(struct exporting *out) {
    uint8_t start[EXPORT_START_BYTES], done[EXPORT_DONE_BYTES];
    struct rest_plan *plan = &out->plan;
    enum kv_err err = KV_OK;
    export_put_start(start, &out->check);
    KV_TRY(put(out, start, sizeof start));
    KV_TRY(put_image(out));
    for (uint32_t b = 0; b < plan->image.block_count; b++)
        KV_TRY(put_block(out, b));
    KV_TRY(put_page(out, &plan->image.sinks, &plan->sinks));
    for (uint32_t i = 0; i < plan->image.page_count; i++)
        KV_TRY(put_page(out, &plan->image.pages[i], &plan->pages[i]));
    export_put_done(&out->done, done);
    KV_TRY(put_own(out, EXPORT_DONE, 0, done, sizeof done));
done:
    return err;
}

static uint64_t expected_bytes(const struct rest_plan *plan) {
    uint64_t bytes = plan->sinks.raw_bytes;
    for (uint32_t b = 0; b < plan->image.block_count; b++)
        for (uint32_t i = 0; i < plan->blocks[b].extent_count; i++)
            bytes += EXPORT_FRAME_BYTES + plan->blocks[b].extents[i].raw_bytes;
    for (uint32_t i = 0; i < plan->image.page_count; i++)
        bytes += EXPORT_FRAME_BYTES + plan->pages[i].raw_bytes;
    return bytes;
}

static enum kv_err plan(struct exporting *out) {
    const struct restore_export_args *args = out->args;
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    while (store_look(args->store, &look, err, out->diag)) {
        rest_plan_release(&out->plan);
        out->plan = (struct rest_plan){0};
        err = rest_plan_image(args->store, args->alloc, args->name, args->snapshot, &out->plan,
                              out->diag);
        if (err == KV_OK)
            err = rest_plan_records(args->store, &out->plan, out->diag);
    }
    return err;
}

enum kv_err restore_export(const struct restore_export_args *args,
                           struct restore_exported *exported_out, struct kv_diag *diag) {
    struct exporting out = {.args = args, .diag = diag};
    enum kv_err err = KV_OK;
    store_hold(args->store);
    KV_TRY(plan(&out));
    out.all = expected_bytes(&out.plan);
    err = put_all(&out);
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s", args->name);
    *exported_out = (struct restore_exported){.snapshot = out.plan.snapshot,
                                              .n = out.plan.image.n,
                                              .n_kv = out.plan.image.n_kv,
                                              .bytes = out.written,
                                              .blocks = out.done.blocks,
                                              .pages = out.done.pages};
done:
    store_unhold(args->store);
    rest_plan_release(&out.plan);
    if (!out.in_doubt)
        kv_alloc_release(args->alloc, out.buffer);
    return err;
}
