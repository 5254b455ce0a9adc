/* snapshot/snap_care.c - records that nobody uses, and who uses which.
 *
 * Responsible for: snap_care_collect and the owners.
 * Not responsible for: what a check says (snap_fsck.c).
 */
#include "snapshot/snap_care.h"

#include "snapshot/snap_gc.h"
#include "snapshot/snap_map.h"
#include "snapshot/snap_path.h"
#include "snapshot/snap_spill.h"
#include "store/store_batch.h"

#include <stdio.h>
#include <string.h>

/* Deletions per batch. */
enum { BATCH_OPS = 4096, CHAIN_MAX = 1 << 20 };

/* Blocks of a lineage that a resident session has or was cut from. */
struct held {
    uint64_t lineage, blocks;
};

struct collecting {
    struct held *held;
    size_t held_count, held_capacity;
    const struct snap_care_collect_args *args;
    const struct snap_map *map;
    struct snap_care_report *report;
    struct kv_diag *diag;
    struct store_batch *batch;
    uint32_t ops;
};

static void on_broken(void *context, const char *name, const struct record_key *record,
                      const char *text) {
    struct snap_care_report *report = context;
    (void)record;
    if (report->trouble[0] == 0)
        snprintf(report->trouble, sizeof report->trouble, "session %.64s: %.160s", name, text);
}

/* Invariant 8: what a resident session has written through counts as live. */
static int is_held(const struct collecting *collecting, uint8_t kind, uint64_t id, uint32_t block) {
#ifdef BREAK_OPEN_LINEAGE
    return 0;
#endif
    for (size_t i = 0; i < collecting->held_count; i++)
        if (collecting->held[i].lineage == id &&
            (kind == 'l' || (kind == 'b' && block < collecting->held[i].blocks)))
            return 1;
    return 0;
}

static enum kv_err hold(struct collecting *collecting, uint64_t lineage, uint64_t blocks) {
    void *held = collecting->held;
    if (!kv_alloc_grow(collecting->args->alloc, &held, &collecting->held_capacity,
                       collecting->held_count + 1, sizeof *collecting->held))
        return kv_diag_set(collecting->diag, KV_ERR_NOMEM, "no memory for the sessions at work");
    collecting->held = held;
    collecting->held[collecting->held_count++] = (struct held){lineage, blocks};
    return KV_OK;
}

struct opening {
    struct collecting *collecting;
    enum kv_err err;
};

/* A lineage and those that it was cut from: a branch not saved yet has no snapshot to say so. */
static int on_open(void *context, uint64_t lineage, uint64_t parent, uint64_t cut) {
    struct opening *opening = context;
    struct collecting *collecting = opening->collecting;
    uint64_t blocks = UINT64_MAX;
    do {
        struct record_lineage record = {.parent = parent, .cut = cut};
        struct record_key key = record_key_lineage(lineage);
        struct store *store = collecting->args->store;
        int exists = 0;
        opening->err = hold(collecting, lineage, blocks);
        if (opening->err == KV_OK)
            opening->err = store_exists(store, key.bytes, key.size, &exists, collecting->diag);
        /* One without a record yet is known by its line alone. */
        if (opening->err == KV_OK && exists)
            opening->err = snap_path_get(store, lineage, &record, collecting->diag);
#ifdef BREAK_OPEN_KIN
        record.parent = 0;
#endif
        /* Cuts fall on the way down, so that a circle ends. */
        if (opening->err != KV_OK || record.parent == 0 || record.cut >= blocks)
            break;
        lineage = record.parent;
        blocks = record.cut;
        parent = cut = 0;
    } while (blocks > 0);
    return opening->err == KV_OK;
}

/* 1 when a stored session uses the record. */
static int is_used(const struct snap_map *map, uint8_t kind, uint64_t id, uint32_t block) {
    size_t count = 0;
    if (kind == 'b')
        return block < snap_map_blocks(map, id);
    return snap_map_find(map, kind, id, &count) != NULL;
}

static void count_dead(struct snap_care_report *report, uint8_t kind) {
    report->dead_snapshots += kind == 's';
    report->dead_pages += kind == 'p';
    report->dead_blocks += kind == 'b';
    report->dead_lineages += kind == 'l';
}

static enum kv_err commit(struct collecting *collecting) {
    struct store_batch *batch = collecting->batch;
    collecting->batch = NULL;
    collecting->ops = 0;
    return batch != NULL ? store_batch_commit(batch, NULL, collecting->diag) : KV_OK;
}

static enum kv_err drop(struct collecting *collecting, const struct store_walk *walk) {
    enum kv_err err = KV_OK;
    if (collecting->args->dry_run)
        return KV_OK;
    if (collecting->batch == NULL)
        err = store_batch_begin_removal(collecting->args->store, &collecting->batch,
                                        collecting->diag);
    if (err == KV_OK)
        err =
            store_batch_delete(collecting->batch, walk->after, walk->after_bytes, collecting->diag);
    if (err == KV_OK && ++collecting->ops == BATCH_OPS)
        err = commit(collecting);
    return err;
}

static enum kv_err collect_kind(struct collecting *collecting, const char *prefix) {
    struct store_walk walk = {.prefix = prefix, .prefix_bytes = 1};
    for (;;) {
        struct store_record stored;
        uint8_t kind = 0;
        uint64_t id = 0;
        uint32_t block = 0;
        enum kv_err err = store_next(collecting->args->store, &walk, &stored, collecting->diag);
        if (err == KV_ERR_NOT_FOUND)
            return KV_OK;
        if (err == KV_OK)
            store_record_release(collecting->args->store, &stored);
        else if (err != KV_ERR_CORRUPT)
            return err;
        if (!snap_map_key(walk.after, walk.after_bytes, &kind, &id, &block) ||
            is_used(collecting->map, kind, id, block) || is_held(collecting, kind, id, block))
            continue;
        count_dead(collecting->report, kind);
        err = drop(collecting, &walk);
        if (err != KV_OK)
            return err;
    }
}

enum kv_err snap_care_collect(const struct snap_care_collect_args *args,
                              struct snap_care_report *report_out, struct kv_diag *diag) {
    struct snap_map map = {0};
    struct collecting collecting = {.args = args, .map = &map, .report = report_out, .diag = diag};
    size_t snapshots = 0;
    memset(report_out, 0, sizeof *report_out);
    enum kv_err err = KV_OK;
    KV_TRY(snap_map_make(args->store, args->alloc, on_broken, report_out, &map, diag));
    for (size_t i = 0; i < map.use_count; i++)
        snapshots += map.uses[i].kind == 's';
    report_out->sessions = map.name_count;
    report_out->snapshots = snapshots;
#ifndef BREAK_COLLECT_DAMAGED
    if (report_out->trouble[0] != 0)
        goto done;
#endif
    if (args->open != NULL) {
        struct opening opening = {&collecting, KV_OK};
        snap_line_each_open(&args->open->lines, on_open, &opening);
        if (opening.err == KV_ERR_CORRUPT || opening.err == KV_ERR_VERSION) {
            snprintf(report_out->trouble, sizeof report_out->trouble, "a session at work: %s",
                     diag != NULL ? diag->text : "its lineage cannot be read");
            goto done;
        }
        KV_TRY(opening.err);
    }
    KV_TRY(collect_kind(&collecting, "s"));
    KV_TRY(collect_kind(&collecting, "p"));
    KV_TRY(collect_kind(&collecting, "b"));
    KV_TRY(collect_kind(&collecting, "l"));
    KV_TRY(commit(&collecting));
done:
    if (collecting.batch != NULL)
        store_batch_abandon(collecting.batch);
    kv_alloc_release(args->alloc, collecting.held);
    snap_map_release(&map);
    return err;
}

/* --- owners */

struct snap_care_owners {
    const struct kv_alloc *alloc;
    struct snap_map map;
};

enum kv_err snap_care_owners_make(struct store *store, const struct kv_alloc *alloc,
                                  struct snap_care_owners **out, struct kv_diag *diag) {
    struct snap_care_owners *owners = kv_alloc_zeroed(alloc, 1, sizeof *owners);
    if (owners == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the owners of records");
    owners->alloc = alloc;
    enum kv_err err = snap_map_make(store, alloc, NULL, NULL, &owners->map, diag);
    if (err != KV_OK) {
        snap_care_owners_drop(owners);
        return err;
    }
    *out = owners;
    return KV_OK;
}

void snap_care_owners_drop(struct snap_care_owners *owners) {
    if (owners == NULL)
        return;
    snap_map_release(&owners->map);
    kv_alloc_release(owners->alloc, owners);
}

uint32_t snap_care_owners_of(const struct snap_care_owners *owners, const void *key,
                             size_t key_bytes, snap_care_owner each, void *context) {
    const struct snap_map *map = &owners->map;
    uint8_t kind = 0;
    uint64_t id = 0;
    uint32_t block = 0;
    uint32_t told = 0;
    size_t count = 0;
    uint32_t last = UINT32_MAX;
    if (!snap_map_key(key, key_bytes, &kind, &id, &block))
        return 0;
    const struct snap_map_use *use = snap_map_find(map, kind == 'b' ? 'l' : kind, id, &count);
    /* Uses of one record stand by name. */
    for (size_t i = 0; i < count; i++) {
        if ((kind == 'b' && use[i].blocks <= block) || use[i].name == last)
            continue;
        last = use[i].name;
        told++;
        each(context, map->names[last].text);
    }
    return told;
}

/* --- what is left */

struct surviving {
    struct store *store;
    const uint8_t *key;
    uint64_t id;
    uint32_t block;
    snap_care_survivor each;
    void *context;
    enum kv_err err;
};

/* Whether the snapshot reads a block of that lineage, or any of its blocks with UINT32_MAX: its own
 * or one that it was cut from. A path that breaks is used as far as it goes. */
static int reads_blocks(const struct surviving *surviving, const struct record_snapshot *record) {
    struct record_path path = {.next = record->lineage, .first = record->block_count};
    int reads = surviving->block == UINT32_MAX && record->lineage == surviving->id;
    while (!reads && path.first > 0 &&
           record_path_next(&path, snap_path_get, surviving->store, NULL) == KV_OK)
        reads = path.lineage == surviving->id &&
                (surviving->block == UINT32_MAX ||
                 (surviving->block >= path.first && surviving->block < path.end));
    return reads;
}

static int uses_record(const struct surviving *surviving, uint64_t id,
                       const struct record_snapshot *record) {
    int uses = record->sinks_page == surviving->id;
    switch (surviving->key[0]) {
    case 's':
        return id == surviving->id;
    case 'b':
    case 'l':
        return reads_blocks(surviving, record);
    default:
        for (uint32_t i = 0; i < record->page_count; i++)
            uses |= record->page_ids[i] == surviving->id;
        return uses;
    }
}

static void follow_survivors(void *context, const char *session) {
    struct surviving *surviving = context;
    struct record_name name;
    enum kv_err err = snap_gc_name(surviving->store, session, &name, NULL);
    uint64_t at = err == KV_OK ? name.snapshot : 0;
    for (int i = 0; at != 0 && i < CHAIN_MAX; i++) {
        struct record_snapshot record;
        err = snap_gc_snapshot(surviving->store, at, &record, NULL);
        if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
            surviving->err = err;
        if (err != KV_OK)
            return;
        if (!uses_record(surviving, at, &record))
            surviving->each(surviving->context, session, &record);
        at = record.parent;
    }
}

enum kv_err snap_care_survivors(const struct snap_care_owners *owners, struct store *store,
                                const uint8_t *key, size_t key_bytes, snap_care_survivor each,
                                void *context) {
    struct surviving surviving = {.store = store, .key = key, .each = each, .context = context};
    uint8_t kind = 0;
    if (!snap_map_key(key, key_bytes, &kind, &surviving.id, &surviving.block))
        return KV_OK;
    if (kind == 'l')
        surviving.block = UINT32_MAX;
    (void)snap_care_owners_of(owners, key, key_bytes, follow_survivors, &surviving);
    return surviving.err;
}
