/* restore/rest_ram.c - what of a session stays in memory, or is brought there before it is needed.
 *
 * Responsible for: the list of extents that a wake of a session's head reads, copying them from the
 * device when the session leaves it, bringing them from the disk.
 * Not responsible for: the budget and who goes for whom (store/store_ram.h), or digests: they are
 * compared when a wake reads these bytes.
 */
#include "restore/restore.h"

#include "restore/rest_plan.h"
#include "store/store_ram.h"

#include <string.h>

static void *lie_get(void *engine, uint64_t bytes) {
    return transfer_host_keep(engine, bytes);
}

static void lie_put(void *engine, void *at) {
    transfer_host_put(engine, at);
}

void restore_lie(struct store *store, struct engine *engine) {
    const struct store_ram_memory memory = {lie_get, lie_put, engine};
    if (!transfer_mapped(engine))
        store_ram_lie(store, &memory);
}

/* All that a wake reads, and the number that stands for it. */
struct rest_ram {
    const struct restore_source *source;
    struct rest_plan plan;
    const struct store_extent **extents;
    size_t count, first_live; /* image and ids come first: they are on no device */
};

static void add(struct rest_ram *ram, const struct store_extent *extent) {
    ram->extents[ram->count++] = extent;
}

static enum kv_err list(struct rest_ram *ram, struct kv_diag *diag) {
    const struct rest_plan *plan = &ram->plan;
    const struct image *image = &plan->image;
    size_t most = 2 + IMAGE_PAGES_MAX + (size_t)image->block_count * RECORD_BLOCK_EXTENTS_MAX;
    ram->extents = kv_alloc_zeroed(ram->source->alloc, most, sizeof *ram->extents);
    if (ram->extents == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a list of extents");
    add(ram, &plan->image_extent);
    for (uint32_t b = 0; b < image->block_count; b++)
        add(ram, &plan->blocks[b].extents[0]);
    ram->first_live = ram->count;
    for (uint32_t b = 0; b < image->block_count; b++) {
        uint32_t streams = layout_tier_streams(rest_plan_tier(plan, b));
        for (uint32_t i = 1; i < plan->blocks[b].extent_count; i++)
            if (streams >> plan->blocks[b].extents[i].kind & 1)
                add(ram, &plan->blocks[b].extents[i]);
    }
    add(ram, &plan->sinks);
    for (uint32_t i = 0; i < image->page_count; i++)
        add(ram, &plan->pages[i]);
    return KV_OK;
}

static enum kv_err open_list(struct rest_ram *ram, const char *name, struct kv_diag *diag) {
    const struct restore_source *source = ram->source;
    ram->plan.ram = 1;
    enum kv_err err = rest_plan_image(source->store, source->alloc, name, 0, &ram->plan, diag);
    if (err == KV_OK)
        err = rest_plan_records(source->store, &ram->plan, diag);
    return err == KV_OK ? list(ram, diag) : err;
}

static void close_list(struct rest_ram *ram) {
    kv_alloc_release(ram->source->alloc, ram->extents);
    rest_plan_release(&ram->plan);
}

/* `count` of them from `first` on. */
static struct store_ram_set set_of(const struct rest_ram *ram, size_t first, size_t count) {
    return (struct store_ram_set){ram->plan.image.lineage, ram->extents + first, count};
}

static int is_on(const struct restore_source *source) {
    struct store_ram_stats stats;
    store_ram_stats(source->store, &stats);
    return stats.bytes_max != 0;
}

/* --- from the device */

struct reading {
    struct engine *engine;
    const struct transfer_part *part;
};

static enum kv_err read_part(void *context, uint8_t *bytes) {
    const struct reading *reading = context;
    return transfer_part_read(reading->engine, reading->part, bytes);
}

static enum kv_err keep_part(const struct rest_ram *ram, const struct store_extent *extent,
                             const struct transfer_part *part) {
    struct store *store = ram->source->store;
    const uint64_t owner = ram->plan.image.lineage;
    struct iovec pieces[32];
    if (!transfer_mapped(ram->source->engine)) {
        struct reading reading = {ram->source->engine, part};
        const struct store_ram_fill fill = {owner, extent, read_part, &reading};
        return part->size == extent->raw_bytes ? store_ram_fill(store, &fill) : KV_ERR_INVALID;
    }
    for (uint32_t k = 0; k < part->piece_count; k++)
        pieces[k] = (struct iovec){part->pieces[k].bytes, part->pieces[k].size};
    return store_ram_keep(store, owner, extent, pieces, part->piece_count);
}

static enum kv_err keep_blocks(const struct rest_ram *ram, struct session *session) {
    enum kv_err err = KV_OK;
    for (uint32_t b = 0; b < ram->plan.image.block_count && err == KV_OK; b++) {
        struct transfer_part parts[LAYOUT_STREAM_COUNT];
        uint32_t streams = layout_tier_streams(rest_plan_tier(&ram->plan, b));
        uint32_t count = transfer_block_parts(transfer_session_block(session, b), parts);
        for (uint32_t i = 0; i < count && err == KV_OK; i++) {
            const struct store_extent *extent =
                rest_plan_extent(&ram->plan.blocks[b], parts[i].stream);
            if (streams >> parts[i].stream & 1 && extent != NULL)
                err = keep_part(ram, extent, &parts[i]);
        }
    }
    return err;
}

static int every_page(void *context, uint64_t first, uint32_t tokens) {
    (void)context, (void)first, (void)tokens;
    return 1;
}

static enum kv_err keep_pages(const struct rest_ram *ram, struct session *session) {
    const uint64_t owner = ram->plan.image.lineage;
    struct store *store = ram->source->store;
    struct transfer_frozen frozen;
    enum kv_err err = transfer_freeze(session, every_page, NULL, &frozen, NULL);
    if (err != KV_OK)
        return err;
    struct iovec piece = {frozen.sinks.bytes, frozen.sinks.size};
    if (frozen.sinks.bytes != NULL)
        err = store_ram_keep(store, owner, &ram->plan.sinks, &piece, 1);
    for (uint32_t i = 0; i < frozen.page_count && err == KV_OK; i++) {
        piece = (struct iovec){frozen.pages[i].bytes, frozen.pages[i].size};
        err = store_ram_keep(store, owner, &ram->plan.pages[i], &piece, 1);
    }
    transfer_frozen_release(ram->source->engine, &frozen);
    return err;
}

void restore_keep(const struct restore_source *source, struct session *session) {
    struct rest_ram ram = {.source = source};
    struct session_info info;
    session_info(session, &info);
    if (!is_on(source))
        return;
    store_hold(source->store);
    enum kv_err err = open_list(&ram, info.name, NULL);
    const struct store_ram_set all = set_of(&ram, 0, ram.count);
    const struct store_ram_set small = set_of(&ram, 0, ram.first_live);
    /* Only what is the head: blocks and pages of the session as it was saved. */
    if (err == KV_OK &&
        (ram.plan.image.n != info.n || ram.plan.image.n_kv != info.n_kv ||
         ram.plan.image.block_count != info.blocks || !store_ram_room(source->store, &all)))
        err = KV_ERR_LIMIT;
    int begun = err == KV_OK;
    if (err == KV_OK)
        err = store_ram_bring(source->store, &small, NULL, NULL);
    if (err == KV_OK)
        err = keep_blocks(&ram, session);
    if (err == KV_OK)
        err = keep_pages(&ram, session);
    if (err == KV_OK)
        store_ram_touch(source->store, all.owner);
    else if (begun) /* a part of it saves no wake a read and takes the place of others */
        store_ram_forget(source->store, all.owner);
    store_unhold(source->store);
    close_list(&ram);
}

/* --- from the disk */

/* 1 when the session is no longer what was read: it was removed, lowered or saved meanwhile. Its
 * extents may have come after the batch that takes them away. */
static int has_changed(const struct rest_ram *ram, const char *name) {
    struct rest_ram again = {.source = ram->source};
#ifdef BREAK_RAM_CHANGED
    return 0;
#endif
    enum kv_err err = open_list(&again, name, NULL);
    int changed = err != KV_OK || again.count != ram->count;
    for (size_t i = 0; i < ram->count && !changed; i++)
        changed = again.extents[i]->id != ram->extents[i]->id;
    close_list(&again);
    return changed;
}

enum kv_err restore_prefetch(const struct restore_source *source, const char *name,
                             struct store_read_stats *stats_out, struct kv_diag *diag) {
    struct rest_ram ram = {.source = source};
    memset(stats_out, 0, sizeof *stats_out);
    if (!is_on(source))
        return kv_diag_set(diag, KV_ERR_LIMIT, "nothing is kept in memory: give --ram-tier");
    store_hold(source->store);
    uint64_t sequence = store_sequence(source->store);
    enum kv_err err = open_list(&ram, name, diag);
    const struct store_ram_set all = set_of(&ram, 0, ram.count);
    if (err == KV_OK && !store_ram_room(source->store, &all))
        err = kv_diag_set(diag, KV_ERR_LIMIT,
                          "session %s is larger than the RAM tier: raise --ram-tier", name);
    /* Nothing here belongs to a session, so others may step meanwhile. */
    engine_away(source->engine);
    if (err == KV_OK && (err = store_ram_bring(source->store, &all, stats_out, diag)) != KV_OK)
        store_ram_forget(source->store, all.owner);
    store_ram_settle(source->store);
    if (err == KV_OK && store_sequence(source->store) != sequence && has_changed(&ram, name)) {
        store_ram_forget(source->store, all.owner);
        err = kv_diag_set(diag, KV_ERR_NOT_FOUND,
                          "session %s was removed or saved while it was read into memory", name);
    }
    engine_back(source->engine);
    stats_out->read_bytes += ram.plan.read.read_bytes;
    store_unhold(source->store);
    close_list(&ram);
    return err;
}
