/* snapshot/snap_import.c - an export file becomes a stored session.
 *
 * Responsible for: the contract of snap_import.h.
 * Not responsible for: what is believed of the file (snap_take.c).
 *
 * Blocks are recorded under a lineage that no snapshot uses, exactly as write-through does before a
 * first save, so every rule for what such a lineage may leave behind holds here too. The image is
 * encoded again with the ids of this store.
 */
#include "snapshot/snap_import.h"

#include "snapshot/snap_commit.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_line.h"
#include "snapshot/snap_parts.h"
#include "snapshot/snap_retain.h"
#include "store/base/bytes.h"
#include "store/store_batch.h"

#include <string.h>

enum { LAST_RECORDS = 8 + 2 * (IMAGE_PAGES_MAX + 1) };

struct importing {
    const struct snap_import_args *args;
    struct snap_import_result *result;
    struct snap_gc gc;
    struct image image; /* a view of the file's, with the ids of this store */
    uint32_t flags;
    uint64_t batch_raw; /* put into the open batch */
    struct kv_digest chain;
    int staged; /* the lineage record is, or may be, in the store */
};

static const struct kv_alloc *alloc_of(const struct importing *importing) {
    return importing->args->take.alloc;
}

static enum kv_err begin(struct importing *importing, uint64_t worst_bytes, struct kv_diag *diag) {
    const struct snap_retain_writer writer = {.store = importing->args->store,
                                              .alloc = alloc_of(importing),
                                              .clock = importing->args->clock,
                                              .leave = importing->args->leave,
                                              .what = "the next part"};
    enum kv_err err = snap_retain_begin(&writer, worst_bytes, &importing->gc.batch, diag);
    importing->batch_raw = 0;
    return err;
}

static enum kv_err commit(struct importing *importing, enum store_cause cause,
                          struct kv_diag *diag) {
    struct store_commit_stats stats = {0};
    struct store_batch *batch = importing->gc.batch;
    if (batch == NULL)
        return KV_OK;
    store_batch_cause(batch, cause);
    importing->gc.batch = NULL;
    importing->staged = 1;
    enum kv_err err = store_batch_commit(batch, &stats, diag);
    importing->result->batches++;
    importing->result->raw_bytes += stats.raw_bytes;
    importing->result->stored_bytes += stats.stored_bytes;
    return err;
}

static enum kv_err put(struct importing *importing, const struct record_key *key,
                       const struct store_put *put, struct kv_diag *diag) {
    struct store_put whole = *put;
    whole.key = key->bytes;
    whole.key_bytes = key->size;
    return store_batch_put(importing->gc.batch, &whole, diag);
}

static enum kv_err put_lineage(struct importing *importing, uint32_t snapshot_count,
                               struct kv_diag *diag) {
    struct record_lineage record = {.snapshot_count = snapshot_count};
    uint8_t value[RECORD_OUT_BYTES];
    memcpy(record.name, importing->image.name, sizeof record.name);
    struct record_key key = record_key_lineage(importing->image.lineage);
    const struct store_put lineage = {.value = value,
                                      .value_bytes = record_put_lineage(&record, value)};
    return put(importing, &key, &lineage, diag);
}

static enum kv_err put_name(struct importing *importing, uint64_t snapshot, struct kv_diag *diag) {
    const struct image *image = &importing->image;
    struct record_name head = {
        .snapshot = snapshot, .lineage = image->lineage, .updated_ns = image->created_ns};
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_name(image->name);
    if (importing->args->owner != NULL)
        memcpy(head.owner, importing->args->owner, sizeof head.owner);
    const struct store_put name = {.value = value, .value_bytes = record_put_name(&head, value)};
    return put(importing, &key, &name, diag);
}

/* --- what snap_take hands on */

static enum kv_err on_image(void *context, const struct image *image, uint32_t flags,
                            const struct kv_digest *root, struct kv_diag *diag) {
    struct importing *importing = context;
    struct store *store = importing->args->store;
    struct image *own = &importing->image;
    int exists = 0;
    enum kv_err err = KV_OK;
    *own = *image;
    importing->flags = flags;
    own->parent = *root;
    if (importing->args->name != NULL) {
        size_t length = strlen(importing->args->name);
        KV_TRY(session_check_new_name(importing->args->name, diag));
        memcpy(own->name, importing->args->name, length + 1);
    }
    struct record_key key = record_key_name(own->name);
    KV_TRY(store_exists(store, key.bytes, key.size, &exists, diag));
#ifndef BREAK_IMPORT_EXISTS
    if (exists)
        KV_TRY(kv_diag_set(diag, KV_ERR_EXISTS,
                           "a stored session has the name %s: import --as gives it another",
                           own->name));
#endif
    KV_TRY(snap_line_fresh_id(store, record_key_lineage, &own->lineage, diag));
done:
    return err;
}

static uint64_t worst_of(const struct snap_take_block *block) {
    uint64_t bytes = 2 * SNAP_COMMIT_RECORD_BYTES;
    for (uint32_t i = 0; i < block->extent_count; i++)
        bytes += snap_commit_extent_bytes(block->extents[i].count);
    return bytes;
}

static enum kv_err put_block(struct importing *importing, const struct snap_take_block *block,
                             struct kv_diag *diag) {
    struct iovec pieces[RECORD_BLOCK_EXTENTS_MAX];
    struct store_part parts[RECORD_BLOCK_EXTENTS_MAX];
    uint8_t kinds[RECORD_BLOCK_EXTENTS_MAX], value[RECORD_OUT_BYTES];
    struct kv_digest digests[RECORD_BLOCK_EXTENTS_MAX];
    uint64_t lineage = importing->image.lineage;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const struct snap_take_extent *extent = &block->extents[i];
        pieces[i] = (struct iovec){(void *)extent->bytes, (size_t)extent->count};
        parts[i] = (struct store_part){extent->kind, snap_parts_hint(extent->kind), &pieces[i], 1,
                                       (uint8_t)snap_parts_behind(extent->kind)};
        kinds[i] = extent->kind;
        digests[i] = extent->digest;
        importing->batch_raw += extent->count;
    }
    struct record_key key = record_key_block(lineage, block->index);
    const struct store_put stored = {.value = value,
                                     .value_bytes = record_put_block(block->record, value),
                                     .parts = parts,
                                     .part_count = block->extent_count};
    importing->chain = record_chain_block(&importing->chain, &key, block->record, kinds, digests,
                                          block->extent_count);
    importing->result->blocks++;
    return put(importing, &key, &stored, diag);
}

static enum kv_err on_block(void *context, const struct snap_take_block *block,
                            struct kv_diag *diag) {
    struct importing *importing = context;
    enum kv_err err = KV_OK;
    if (importing->gc.batch == NULL) {
        uint64_t worst = worst_of(block);
        uint64_t left = importing->image.block_count - block->index;
        uint64_t fit = 1 + importing->args->batch_bytes / worst;
        KV_TRY(
            begin(importing, SNAP_COMMIT_RECORD_BYTES + worst * (fit < left ? fit : left), diag));
        if (block->index == 0)
            KV_TRY(put_lineage(importing, 0, diag));
#ifdef BREAK_IMPORT_EARLY
        KV_TRY(put_name(importing, importing->image.lineage, diag));
#endif
    }
    KV_TRY(put_block(importing, block, diag));
    if (importing->batch_raw >= importing->args->batch_bytes)
        err = commit(importing, STORE_CAUSE_BLOCKS, diag);
done:
    return err;
}

/* Before the first page everything else is durable: the last batch is then a small one. */
static enum kv_err begin_last(struct importing *importing, struct kv_diag *diag) {
    const struct image *image = &importing->image;
    const uint64_t image_bytes = (uint64_t)image->n * 4 + (1 << 20);
    uint64_t worst = image_bytes + LAST_RECORDS * (uint64_t)SNAP_COMMIT_RECORD_BYTES;
    for (uint32_t i = 0; i <= image->page_count; i++)
        worst += snap_commit_extent_bytes(layout_dense_bytes(
            &image->model.geometry, i == 0 ? image->sinks.tokens : image->pages[i - 1].tokens));
    enum kv_err err = commit(importing, STORE_CAUSE_BLOCKS, diag);
    return err != KV_OK ? err : begin(importing, worst, diag);
}

static enum kv_err on_page(void *context, uint32_t index, const struct snap_take_extent *extent,
                           struct kv_diag *diag) {
    struct importing *importing = context;
    struct image *image = &importing->image;
    struct image_page *page = index == 0 ? &image->sinks : &image->pages[index - 1];
    uint8_t value[RECORD_OUT_BYTES];
    enum kv_err err = KV_OK;
    if (index == 0)
        KV_TRY(begin_last(importing, diag));
    KV_TRY(snap_line_fresh_id(importing->args->store, record_key_page, &page->page_id, diag));
    const struct iovec piece = {(void *)extent->bytes, (size_t)extent->count};
    const struct store_part part = {extent->kind, snap_parts_hint(extent->kind), &piece, 1, 0};
    const struct record_page record = {image->lineage, page->first, page->tokens, 1};
    struct record_key key = record_key_page(page->page_id);
    const struct store_put stored = {.value = value,
                                     .value_bytes = record_put_page(&record, value),
                                     .parts = &part,
                                     .part_count = 1};
    importing->result->pages++;
    err = put(importing, &key, &stored, diag);
done:
    return err;
}

/* --- the end */

static enum kv_err put_snapshot(struct importing *importing, const uint8_t *bytes, size_t size,
                                uint64_t id, struct kv_diag *diag) {
    const struct image *image = &importing->image;
    struct record_snapshot record = {.lineage = image->lineage,
                                     .block_count = image->block_count,
                                     .is_explicit = (importing->flags & 1) != 0,
                                     .asleep = (importing->flags & 2) != 0,
                                     .n = image->n,
                                     .n_kv = image->n_kv,
                                     .created_ns = image->created_ns,
                                     .root = image_root(bytes, size),
                                     .sinks_page = image->sinks.page_id,
                                     .page_count = image->page_count};
    memcpy(record.name, image->name, sizeof record.name);
    for (uint32_t i = 0; i < image->page_count; i++)
        record.page_ids[i] = image->pages[i].page_id;
    const struct iovec piece = {(void *)bytes, size};
    const struct store_part part = {RECORD_KIND_IMAGE, STORE_ZSTD, &piece, 1, 0};
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_snapshot(id);
    const struct store_put snapshot = {.value = value,
                                       .value_bytes = record_put_snapshot(&record, value),
                                       .parts = &part,
                                       .part_count = 1};
    enum kv_err err = put(importing, &key, &snapshot, diag);
    if (err != KV_OK)
        return err;
    return put_name(importing, id, diag);
}

/* The batch that makes the session visible. */
static enum kv_err show(struct importing *importing, struct kv_diag *diag) {
    struct image *image = &importing->image;
    struct snap_import_result *result = importing->result;
    uint8_t *bytes = NULL;
    size_t size = 0;
    enum kv_err err = KV_OK;
    image->block_chain = importing->chain;
    KV_TRY(
        snap_line_fresh_id(importing->args->store, record_key_snapshot, &result->snapshot, diag));
    KV_TRY(image_encode(image, alloc_of(importing), &bytes, &size, diag));
    KV_TRY(put_snapshot(importing, bytes, size, result->snapshot, diag));
    KV_TRY(put_lineage(importing, 1, diag));
    err = commit(importing, STORE_CAUSE_SAVE, diag);
    /* A commit whose end is not known may have shown the session: its blocks must stay. */
    importing->staged = 0;
    KV_TRY(err);
    memcpy(result->name, image->name, sizeof result->name);
    result->lineage = image->lineage;
    result->n = image->n;
    result->n_kv = image->n_kv;
done:
    kv_alloc_release(alloc_of(importing), bytes);
    return err;
}

/* A visit and not what follows snap_take: the image is gone once that has returned. */
static enum kv_err on_end(void *context, struct kv_diag *diag) {
    return show(context, diag);
}

enum kv_err snap_import(const struct snap_import_args *args, struct snap_import_result *result_out,
                        struct kv_diag *diag) {
    struct snap_import_result result = {.name = ""};
    struct importing importing = {
        .args = args, .result = &result, .gc = {.store = args->store, .alloc = args->take.alloc}};
    struct snap_take_args take = args->take;
    take.visitor = (struct snap_take_visitor){&importing, on_image, on_block, on_page, on_end};
    enum kv_err err = snap_take(&take, &result.file_bytes, diag);
    if (err == KV_OK) {
        *result_out = result;
        return KV_OK;
    }
    store_batch_abandon(importing.gc.batch);
    importing.gc.batch = NULL;
#ifndef BREAK_IMPORT_STAGED
    if (importing.staged)
        (void)snap_gc_drop_lineage(&importing.gc, importing.image.lineage, NULL);
#endif
    return err;
}
