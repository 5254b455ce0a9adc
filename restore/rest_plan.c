/* restore/rest_plan.c - records and image of a head snapshot, found and checked.
 *
 * Responsible for: what rest_plan.h promises, and restore_plan and restore_image.
 * Not responsible for: reading planes or pages.
 *
 * Nothing is taken from a record that the image does not confirm: the snapshot record holds the
 * image's root, the image holds the block chain and the pages' digests, so a record of another
 * session, block or time is found here, before any slot is reserved.
 */
#include "restore/rest_plan.h"

#include "restore/restore.h"
#include "store/base/bytes.h"

#include <stdio.h>
#include <string.h>

/* An image grows with tokens, roles, tiers and needles; beyond this it was not written by us. */
static const uint64_t image_bytes_max = (uint64_t)64 << 20;

enum kv_err rest_plan_check(const char *what, const struct kv_digest *expected,
                            const struct kv_digest *found, struct kv_diag *diag) {
    char expected_text[KV_DIGEST_HEX_BYTES];
    char found_text[KV_DIGEST_HEX_BYTES];
    if (kv_digest_equal(expected, found))
        return KV_OK;
    kv_digest_hex(expected, expected_text);
    kv_digest_hex(found, found_text);
    return kv_diag_set(diag, KV_ERR_CORRUPT, "%s: digest is %s, saved was %s", what, found_text,
                       expected_text);
}

const struct image_policy *rest_plan_policy(const struct rest_plan *plan) {
    return &plan->image.policies[plan->image.policy_count - 1].policy;
}

enum layout_tier rest_plan_tier(const struct rest_plan *plan, uint32_t index) {
    const struct image *image = &plan->image;
    return image_tier_without(rest_plan_policy(plan),
                              image_tier(rest_plan_policy(plan), index, image->n_kv),
                              image->absent != NULL ? image->absent[index] : 0);
}

uint32_t rest_plan_degraded(const struct rest_plan *plan) {
    uint32_t count = 0;
    for (uint32_t b = 0; b < plan->image.block_count; b++)
        count += rest_plan_tier(plan, b) != image_tier(rest_plan_policy(plan), b, plan->image.n_kv);
    return count;
}

const struct store_extent *rest_plan_extent(const struct rest_plan_block *block,
                                            enum layout_stream stream) {
    for (uint32_t i = 0; i < block->extent_count; i++)
        if (block->extents[i].kind == (uint8_t)stream)
            return &block->extents[i];
    return NULL;
}

/* --- name, snapshot, image */

static enum kv_err read_name(struct store *store, const char *name, struct record_name *out,
                             struct kv_diag *diag) {
    struct record_key key = record_key_name(name);
    struct store_record stored;
    enum kv_err err = session_check_name(name, diag);
    if (err != KV_OK)
        return err;
    err = store_get(store, key.bytes, key.size, &stored, diag);
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, err, "there is no stored session %s", name);
    if (err != KV_OK)
        return err;
    err = record_get_name(stored.value, stored.value_bytes, out, diag);
    store_record_release(store, &stored);
    return err;
}

/* Missing behind a name that exists is damage, not absence. */
static enum kv_err must_exist(struct store *store, const struct record_key *key, const char *what,
                              struct store_record *out, struct kv_diag *diag) {
    enum kv_err err = store_get(store, key->bytes, key->size, out, diag);
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s is missing from the index", what);
    if (err != KV_OK)
        kv_diag_prefix(diag, "%s", what);
    return err;
}

static enum kv_err read_image_bytes(struct store *store, const struct store_record *stored,
                                    struct rest_plan *plan, uint8_t **bytes_out,
                                    struct kv_diag *diag) {
    if (stored->extent_count != 1 || stored->extents[0].kind != RECORD_KIND_IMAGE)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the snapshot record has no image");
    const struct store_extent *extent = &stored->extents[0];
    if (extent->raw_bytes > image_bytes_max)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the image claims %llu bytes",
                           (unsigned long long)extent->raw_bytes);
    const struct store_read_whole whole = {extent, plan->alloc, "session image", &plan->read,
                                           plan->ram};
    enum kv_err err = store_read_whole(store, &whole, bytes_out, diag);
    if (err != KV_OK)
        return err;
    plan->image_extent = *extent;
    plan->image_stored_bytes = extent->stored_bytes;
    plan->digests_checked++;
    return KV_OK;
}

static enum kv_err same_as_record(const struct rest_plan *plan, const char *name,
                                  struct kv_diag *diag) {
    const struct image *image = &plan->image;
    const struct record_snapshot *record = &plan->record;
    int pages_equal = image->page_count == record->page_count;
    for (uint32_t i = 0; pages_equal && i < image->page_count; i++)
        pages_equal = image->pages[i].page_id == record->page_ids[i];
    if (strcmp(image->name, name) != 0 || strcmp(record->name, name) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "the stored head is a snapshot of session %s (record: %s)", image->name,
                           record->name);
    if (image->lineage != record->lineage || image->n_kv != record->n_kv || image->n != record->n ||
        image->block_count != record->block_count || image->sinks.page_id != record->sinks_page ||
        !pages_equal)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "snapshot record and image differ in position, lineage or pages");
    return KV_OK;
}

static enum kv_err read_snapshot(struct store *store, const char *name, struct rest_plan *plan,
                                 struct kv_diag *diag) {
    struct record_key key = record_key_snapshot(plan->snapshot);
    struct store_record stored;
    uint8_t *bytes = NULL;
    enum kv_err err = must_exist(store, &key, "the snapshot record", &stored, diag);
    if (err != KV_OK)
        return err;
    KV_TRY(record_get_snapshot(stored.value, stored.value_bytes, &plan->record, diag));
    KV_TRY(read_image_bytes(store, &stored, plan, &bytes, diag));
    size_t size = stored.extents[0].raw_bytes;
    struct kv_digest root = image_root(bytes, size);
    KV_TRY(rest_plan_check("root of the image", &plan->record.root, &root, diag));
    KV_TRY(image_decode(bytes, size, plan->alloc, &plan->image, diag));
    err = same_as_record(plan, name, diag);
done:
    kv_alloc_release(plan->alloc, bytes);
    store_record_release(store, &stored);
    return err;
}

/* An older one may go while somebody looks for it: its session went on. */
static enum kv_err check_kept(struct store *store, uint64_t snapshot, struct kv_diag *diag) {
    struct record_key key = record_key_snapshot(snapshot);
    struct store_record stored;
    enum kv_err err = store_get(store, key.bytes, key.size, &stored, diag);
    if (err == KV_OK)
        store_record_release(store, &stored);
    return err != KV_ERR_NOT_FOUND ? err
                                   : kv_diag_set(diag, err, "its snapshot %016llx is kept no more",
                                                 (unsigned long long)snapshot);
}

enum kv_err rest_plan_image(struct store *store, const struct kv_alloc *alloc, const char *name,
                            uint64_t snapshot, struct rest_plan *plan_out, struct kv_diag *diag) {
    struct record_name head;
    *plan_out = (struct rest_plan){.alloc = alloc, .ram = plan_out->ram};
    enum kv_err err = read_name(store, name, &head, diag);
    if (err != KV_OK)
        return err;
    plan_out->pinned = head.pinned;
    memcpy(plan_out->owner, head.owner, sizeof head.owner);
    plan_out->snapshot = snapshot != 0 ? snapshot : head.snapshot;
    if (plan_out->snapshot != head.snapshot)
        err = check_kept(store, snapshot, diag);
    if (err == KV_OK)
        err = read_snapshot(store, name, plan_out, diag);
    if (err == KV_OK && plan_out->snapshot == head.snapshot &&
        plan_out->image.lineage != head.lineage)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "the name record points at another lineage");
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s", name);
    return err;
}

enum kv_err rest_plan_older(struct store *store, const struct rest_plan *newer,
                            struct rest_plan *plan_out, struct kv_diag *diag) {
    const char *name = newer->record.name;
    memset(plan_out, 0, sizeof *plan_out);
    plan_out->alloc = newer->alloc;
    plan_out->snapshot = newer->record.parent;
    enum kv_err err = read_snapshot(store, name, plan_out, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s, older snapshot %016llx", name,
                       (unsigned long long)plan_out->snapshot);
    return err;
}

void rest_plan_release(struct rest_plan *plan) {
    if (plan->alloc == NULL)
        return;
    image_release(&plan->image, plan->alloc);
    kv_alloc_release(plan->alloc, plan->blocks);
    plan->blocks = NULL;
}

/* --- blocks and pages */

static enum kv_err check_block(const struct rest_plan_where *where,
                               const struct store_record *stored, struct record_block *record_out,
                               struct kv_diag *diag) {
    struct record_block record;
    uint32_t seen = 0;
    enum kv_err err = record_get_block(stored->value, stored->value_bytes, &record, diag);
    if (err != KV_OK)
        return err;
    err = record_check_code(&record, where->streams, diag);
    if (err != KV_OK)
        return err;
    if (record.first_position != LAYOUT_SINK_TOKENS + (uint64_t)where->index * LAYOUT_BLOCK_TOKENS)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the record is of position %llu",
                           (unsigned long long)record.first_position);
    if (stored->extent_count == 0 || stored->extent_count > RECORD_BLOCK_EXTENTS_MAX)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%u extents", stored->extent_count);
    if (stored->extents[0].kind != RECORD_KIND_IDS ||
        stored->extents[0].raw_bytes != RECORD_IDS_BYTES)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the token ids are missing");
    for (uint32_t i = 1; i < stored->extent_count; i++) {
        const struct store_extent *extent = &stored->extents[i];
        if (!layout_stream_of_block(extent->kind) || seen & 1u << extent->kind)
            return kv_diag_set(diag, KV_ERR_CORRUPT, "extent %u is no stream or is there twice", i);
        seen |= 1u << extent->kind;
        uint64_t expected = layout_stream_bytes(where->geometry, extent->kind);
        if (extent->raw_bytes != expected)
            return kv_diag_set(diag, KV_ERR_CORRUPT,
                               "stream %s claims %llu bytes, the layout has %llu",
                               layout_stream_name(extent->kind),
                               (unsigned long long)extent->raw_bytes, (unsigned long long)expected);
    }
    uint32_t dropped = record_dropped(&record);
    if (dropped & seen)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "a stream is there although it was dropped");
    for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++)
        if (where->streams & ~seen & ~dropped & 1u << s)
            return kv_diag_set(diag, KV_ERR_CORRUPT, "stream %s is missing", layout_stream_name(s));
    *record_out = record;
    return KV_OK;
}

enum kv_err rest_plan_read_block(struct store *store, const struct rest_plan_where *where,
                                 struct rest_plan_block *block_out, struct kv_diag *diag) {
    struct record_key key = record_key_block(where->lineage, where->index);
    struct store_record stored;
    char what[32];
    snprintf(what, sizeof what, "block %u", where->index);
    enum kv_err err = must_exist(store, &key, what, &stored, diag);
    if (err != KV_OK)
        return err;
    err = check_block(where, &stored, &block_out->record, diag);
    if (err == KV_OK) {
        block_out->extent_count = stored.extent_count;
        memcpy(block_out->extents, stored.extents, stored.extent_count * sizeof *stored.extents);
    } else {
        kv_diag_prefix(diag, "%s", what);
    }
    store_record_release(store, &stored);
    return err;
}

/* A record_get; context is the store. */
static enum kv_err get_lineage(void *store, uint64_t lineage, struct record_lineage *out,
                               struct kv_diag *diag) {
    struct record_key key = record_key_lineage(lineage);
    struct store_record stored;
    enum kv_err err = must_exist(store, &key, "the lineage record", &stored, diag);
    if (err != KV_OK)
        return err;
    err = record_get_lineage(stored.value, stored.value_bytes, out, diag);
    store_record_release(store, &stored);
    return err;
}

enum kv_err rest_plan_owner(struct store *store, uint64_t lineage, uint32_t index,
                            uint64_t *owner_out, struct kv_diag *diag) {
    struct record_path path = {.next = lineage, .first = index + 1};
    enum kv_err err = record_path_next(&path, get_lineage, store, diag);
    *owner_out = path.lineage;
    return err;
}

static enum kv_err find_owners(struct store *store, struct rest_plan *plan, struct kv_diag *diag) {
    struct record_path path = {.next = plan->image.lineage, .first = plan->image.block_count};
    while (path.first > 0) {
        enum kv_err err = record_path_next(&path, get_lineage, store, diag);
        if (err != KV_OK)
            return err;
        for (uint32_t b = path.first; b < path.end; b++)
            plan->blocks[b].lineage = path.lineage;
    }
    return KV_OK;
}

static enum kv_err read_blocks(struct store *store, struct rest_plan *plan, struct kv_diag *diag) {
    const struct image *image = &plan->image;
    /* Every block is written at the top of its ladder, so all of that must be there, or have left
     * in order: then its digest has stayed in the record and the chain is the same. */
    const struct rest_plan_where top = {.geometry = &image->model.geometry,
                                        .streams =
                                            layout_tier_streams(image_top(rest_plan_policy(plan)))};
    struct kv_digest chain = {{0}};
    if (image->block_count == 0)
        return rest_plan_check("block chain", &image->block_chain, &chain, diag);
    plan->blocks = kv_alloc_zeroed(plan->alloc, image->block_count, sizeof *plan->blocks);
    plan->image.absent = kv_alloc_zeroed(plan->alloc, image->block_count, sizeof *image->absent);
    if (plan->blocks == NULL || plan->image.absent == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the places of %u blocks",
                           image->block_count);
    enum kv_err err = find_owners(store, plan, diag);
    for (uint32_t b = 0; err == KV_OK && b < image->block_count; b++) {
        struct rest_plan_block *block = &plan->blocks[b];
        struct rest_plan_where where = top;
        uint8_t kinds[RECORD_BLOCK_EXTENTS_MAX];
        struct kv_digest digests[RECORD_BLOCK_EXTENTS_MAX];
        where.lineage = block->lineage;
        where.index = b;
        err = rest_plan_read_block(store, &where, block, diag);
        if (err != KV_OK)
            return err;
        for (uint32_t i = 0; i < block->extent_count; i++) {
            kinds[i] = block->extents[i].kind;
            digests[i] = block->extents[i].digest;
        }
        const struct record_key key = record_key_block(block->lineage, b);
        chain =
            record_chain_block(&chain, &key, &block->record, kinds, digests, block->extent_count);
        plan->image.absent[b] = record_dropped(&block->record);
    }
    if (err != KV_OK)
        return err;
#ifdef BREAK_CHAIN
    return KV_OK;
#endif
    return rest_plan_check("chain over all block records", &image->block_chain, &chain, diag);
}

static enum kv_err read_page(struct store *store, const struct rest_plan *plan,
                             const struct image_page *page, struct store_extent *extent_out,
                             struct kv_diag *diag) {
    struct record_key key = record_key_page(page->page_id);
    struct store_record stored;
    struct record_page record;
    char what[64];
    snprintf(what, sizeof what, page->first == 0 ? "the sinks" : "the page at position %llu",
             (unsigned long long)page->first);
    enum kv_err err = must_exist(store, &key, what, &stored, diag);
    if (err != KV_OK)
        return err;
    KV_TRY(record_get_page(stored.value, stored.value_bytes, &record, diag));
    uint64_t bytes = layout_dense_bytes(&plan->image.model.geometry, page->tokens);
    uint8_t kind = page->first == 0 ? LAYOUT_SINKS : LAYOUT_PAGE;
    /* Whose page it is says its digest: forks share pages with the lineage that wrote them. */
    if (record.first != page->first || record.tokens != page->tokens || stored.extent_count != 1 ||
        stored.extents[0].kind != kind || stored.extents[0].raw_bytes != bytes)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "its record has another place or length");
    else
        err =
            rest_plan_check("digest in the index", &page->digest, &stored.extents[0].digest, diag);
    if (err == KV_OK)
        *extent_out = stored.extents[0];
done:
    if (err != KV_OK)
        kv_diag_prefix(diag, "%s", what);
    store_record_release(store, &stored);
    return err;
}

/* The blocks' token ids, into the place that the image has for them. */
static enum kv_err read_ids(struct store *store, struct rest_plan *plan, struct kv_diag *diag) {
    struct image *image = &plan->image;
    uint32_t count = image->block_count;
    if (count == 0)
        return KV_OK;
    enum kv_err err = KV_ERR_NOMEM;
    struct store_read *reads = kv_alloc_zeroed(plan->alloc, count, sizeof *reads);
    struct iovec *pieces = kv_alloc_zeroed(plan->alloc, count, sizeof *pieces);
    uint8_t *bytes = kv_alloc_zeroed(plan->alloc, count, RECORD_IDS_BYTES);
    int in_doubt = 0;
    if (reads == NULL || pieces == NULL || bytes == NULL)
        goto done;
    for (uint32_t b = 0; b < count; b++) {
        pieces[b] = (struct iovec){bytes + (size_t)b * RECORD_IDS_BYTES, RECORD_IDS_BYTES};
        reads[b] = (struct store_read){.extent = &plan->blocks[b].extents[0],
                                       .pieces = &pieces[b],
                                       .piece_count = 1,
                                       .verify = 1,
                                       .label = "token ids of a block"};
    }
    const struct store_read_args args = {.reads = reads, .count = count, .ram = plan->ram};
    struct store_read_stats stats;
    err = store_read(store, &args, &stats, diag);
    plan->read.read_bytes += stats.read_bytes;
    plan->read.ram_bytes += stats.ram_bytes;
    for (uint32_t b = 0; b < count; b++)
        in_doubt |= reads[b].in_doubt;
    KV_TRY(err);
    plan->digests_checked += count;
    for (uint64_t i = 0; i < (uint64_t)count * LAYOUT_BLOCK_TOKENS; i++)
        image->ids[LAYOUT_SINK_TOKENS + i] = kv_get_u32(bytes + 4 * i);
done:
    kv_alloc_release(plan->alloc, reads);
    kv_alloc_release(plan->alloc, pieces);
    /* A read that may still come must not find its memory in other hands. */
    if (!in_doubt)
        kv_alloc_release(plan->alloc, bytes);
    return err;
}

enum kv_err rest_plan_places(struct store *store, struct rest_plan *plan, struct kv_diag *diag) {
    enum kv_err err = read_blocks(store, plan, diag);
    if (err == KV_OK)
        err = read_page(store, plan, &plan->image.sinks, &plan->sinks, diag);
    for (uint32_t i = 0; err == KV_OK && i < plan->image.page_count; i++)
        err = read_page(store, plan, &plan->image.pages[i], &plan->pages[i], diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s", plan->image.name);
    return err;
}

enum kv_err rest_plan_ids(struct store *store, struct rest_plan *plan, struct kv_diag *diag) {
    enum kv_err err = read_ids(store, plan, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s", plan->image.name);
    plan->has_ids = err == KV_OK;
    return err;
}

enum kv_err rest_plan_records(struct store *store, struct rest_plan *plan, struct kv_diag *diag) {
    enum kv_err err = rest_plan_places(store, plan, diag);
    return err == KV_OK ? rest_plan_ids(store, plan, diag) : err;
}

/* --- public */

static void add_extent(const struct store_extent *extent, struct restore_plan *plan) {
    plan->raw_bytes += extent->raw_bytes;
    plan->stored_bytes += extent->stored_bytes;
}

static enum kv_err plan_once(const struct restore_source *source, const char *name,
                             uint64_t snapshot, struct restore_plan *plan_out,
                             struct kv_diag *diag) {
    struct rest_plan plan = {.ram = 1};
    struct restore_plan out = {0};
    enum kv_err err = KV_OK;
    store_hold(source->store); /* what is looked up is read where it was found */
    KV_TRY(rest_plan_image(source->store, source->alloc, name, snapshot, &plan, diag));
    KV_TRY(rest_plan_places(source->store, &plan, diag));
    out.snapshot = plan.snapshot;
    out.n = plan.image.n;
    out.n_kv = plan.image.n_kv;
    out.blocks = plan.image.block_count;
    out.pages = plan.image.page_count;
    out.slots = engine_plan_slots(source->engine, rest_plan_policy(&plan), 0);
    out.floor_slots = out.slots;
    for (uint32_t b = 0; b < plan.image.block_count; b++) {
        enum layout_tier tier = rest_plan_tier(&plan, b);
        out.slots += layout_tier_slots(tier);
        out.floor_slots += layout_tier_slots(image_floor(rest_plan_policy(&plan)));
        out.tier_blocks[tier]++;
        for (uint32_t i = 0; i < plan.blocks[b].extent_count; i++)
            if (i == 0 || layout_tier_streams(tier) & 1u << plan.blocks[b].extents[i].kind)
                add_extent(&plan.blocks[b].extents[i], &out);
    }
    add_extent(&plan.sinks, &out);
    for (uint32_t i = 0; i < plan.image.page_count; i++)
        add_extent(&plan.pages[i], &out);
    *plan_out = out;
done:
    store_unhold(source->store);
    rest_plan_release(&plan);
    return err;
}

enum kv_err restore_plan(const struct restore_source *source, const char *name, uint64_t snapshot,
                         struct restore_plan *plan_out, struct kv_diag *diag) {
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    while (store_look(source->store, &look, err, diag))
        err = plan_once(source, name, snapshot, plan_out, diag);
    return err;
}

static enum kv_err image_once(struct store *store, const struct kv_alloc *alloc, const char *name,
                              struct image *image_out, struct kv_diag *diag) {
    struct rest_plan plan = {0};
    store_hold(store);
    enum kv_err err = rest_plan_image(store, alloc, name, 0, &plan, diag);
    if (err == KV_OK)
        err = rest_plan_records(store, &plan, diag);
    store_unhold(store);
    if (err == KV_OK) {
        *image_out = plan.image;
        image_init(&plan.image);
    }
    rest_plan_release(&plan);
    return err;
}

enum kv_err restore_image(struct store *store, const struct kv_alloc *alloc, const char *name,
                          struct image *image_out, struct kv_diag *diag) {
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    while (store_look(store, &look, err, diag))
        err = image_once(store, alloc, name, image_out, diag);
    return err;
}
