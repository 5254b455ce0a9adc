/* tests/support_invariants.c - the numbered invariants, looked for in an open store.
 *
 * Responsible for: what support_invariants.h says.
 * Not responsible for: which sessions there must be.
 */
#include "tests/support_invariants.h"

#include "engine/record.h"
#include "store/store_read.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ITEMS_MAX = 4096 };

struct place {
    uint32_t segment;
    uint64_t off, end;
};

struct seen {
    struct store *store;
    char *text;
    int broken; /* number of the first invariant that does not hold */
    struct place places[ITEMS_MAX];
    struct {
        uint64_t id;
        struct record_snapshot record;
        int reached;
    } snapshots[256];
    struct {
        char name[IMAGE_NAME_BYTES_MAX + 1];
        struct record_name record;
    } names[64];
    struct {
        uint64_t id;
        struct record_page record;
        uint32_t used;
    } pages[1024];
    struct {
        uint64_t id;
        struct record_lineage record;
        uint32_t first, blocks, used; /* own blocks from `first` on; up to `blocks` with others' */
        int has_own;
    } lineages[256];
    uint32_t place_count, snapshot_count, name_count, page_count, lineage_count;
    uint64_t records, live_bytes;
};

static void broken(struct seen *seen, int number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void broken(struct seen *seen, int number, const char *format, ...) {
    va_list arguments;
    if (seen->broken != 0)
        return;
    seen->broken = number;
    va_start(arguments, format);
    vsnprintf(seen->text, SUPPORT_INVARIANTS_TEXT_BYTES, format, arguments);
    va_end(arguments);
}

static uint64_t id_of(const struct store_record *record) {
    uint64_t id = 0;
    for (uint32_t i = 1; i < 9 && i < record->key_bytes; i++)
        id = id << 8 | record->key[i];
    return id;
}

static void take_extents(struct seen *seen, const struct store_record *record) {
    struct kv_diag diag = {""};
    for (uint32_t i = 0; i < record->extent_count && seen->place_count < ITEMS_MAX; i++) {
        const struct store_extent *extent = &record->extents[i];
        uint64_t padded = (extent->stored_bytes + 4095) & ~(uint64_t)4095;
        seen->places[seen->place_count++] =
            (struct place){extent->segment, extent->off, extent->off + padded};
        seen->live_bytes += padded;
    }
    enum kv_err err = store_read_check(seen->store, record->key, record->key_bytes, NULL, &diag);
    if (err != KV_OK)
        broken(seen, err == KV_ERR_CORRUPT ? 2 : 1, "record %c: %s", record->key[0], diag.text);
}

static void take_block(struct seen *seen, const struct store_record *record) {
    struct record_block block;
    uint32_t index = 0;
    if (record_get_block(record->value, record->value_bytes, &block, NULL) != KV_OK)
        broken(seen, 5, "a block record cannot be read");
    for (uint32_t i = 9; i < record->key_bytes; i++)
        index = index << 8 | record->key[i];
    /* Blocks come before lineages in the walk: 'b' < 'l'. */
    uint32_t i = 0;
    while (i < seen->lineage_count && seen->lineages[i].id != id_of(record))
        i++;
    if (i == seen->lineage_count)
        seen->lineages[seen->lineage_count++].id = id_of(record);
    if (!seen->lineages[i].has_own)
        seen->lineages[i].first = seen->lineages[i].blocks = index;
    seen->lineages[i].has_own = 1;
    if (index != seen->lineages[i].blocks)
        broken(seen, 8, "lineage %llx: block %u follows %u blocks",
               (unsigned long long)id_of(record), index, seen->lineages[i].blocks);
    seen->lineages[i].blocks++;
}

static void take_lineage(struct seen *seen, const struct store_record *record) {
    uint32_t i = 0;
    while (i < seen->lineage_count && seen->lineages[i].id != id_of(record))
        i++;
    if (i == seen->lineage_count)
        seen->lineages[seen->lineage_count++].id = id_of(record);
    if (record_get_lineage(record->value, record->value_bytes, &seen->lineages[i].record, NULL) !=
        KV_OK)
        broken(seen, 5, "a lineage record cannot be read");
    if (seen->lineages[i].record.name[0] == 0)
        broken(seen, 8, "a lineage without a name");
    if (!seen->lineages[i].has_own)
        seen->lineages[i].first = seen->lineages[i].blocks = (uint32_t)seen->lineages[i].record.cut;
    if (seen->lineages[i].first != seen->lineages[i].record.cut)
        broken(seen, 12, "a lineage is cut at block %u and begins at %u",
               (uint32_t)seen->lineages[i].record.cut, seen->lineages[i].first);
}

/* 11 and 12: what a lineage was cut from is there, with the blocks below the cut. */
static void check_parent(struct seen *seen, uint32_t at) {
    const struct record_lineage *record = &seen->lineages[at].record;
    uint32_t i = 0;
    if (record->parent == 0)
        return;
    while (i < seen->lineage_count && seen->lineages[i].id != record->parent)
        i++;
    if (i == seen->lineage_count || seen->lineages[i].blocks < record->cut)
        broken(seen, 11, "lineage of %s is cut at block %u from one that has %u", record->name,
               (uint32_t)record->cut, i < seen->lineage_count ? seen->lineages[i].blocks : 0);
    else if (seen->lineages[i].record.cut >= record->cut)
        broken(seen, 12, "lineage of %s is not cut from the owner of its last block", record->name);
}

static void take(struct seen *seen, const struct store_record *record) {
    enum kv_err err = KV_OK;
    switch (record->key[0]) {
    case 'n':
        memcpy(seen->names[seen->name_count].name, record->key + 1, record->key_bytes - 1);
        err = record_get_name(record->value, record->value_bytes,
                              &seen->names[seen->name_count++].record, NULL);
        break;
    case 's':
        seen->snapshots[seen->snapshot_count].id = id_of(record);
        err = record_get_snapshot(record->value, record->value_bytes,
                                  &seen->snapshots[seen->snapshot_count++].record, NULL);
        if (record->extent_count != 1)
            broken(seen, 6, "a snapshot has %u extents instead of its image", record->extent_count);
        break;
    case 'p':
        seen->pages[seen->page_count].id = id_of(record);
        err = record_get_page(record->value, record->value_bytes,
                              &seen->pages[seen->page_count++].record, NULL);
        break;
    case 'b':
        take_block(seen, record);
        break;
    case 'l':
        take_lineage(seen, record);
        break;
    default:
        break;
    }
    if (err != KV_OK)
        broken(seen, 5, "the value of a record %c cannot be read", record->key[0]);
}

static int by_place(const void *a, const void *b) {
    const struct place *x = a, *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return x->off < y->off ? -1 : x->off > y->off;
}

static void check_space(struct seen *seen) {
    struct store_stats stats;
    store_stats_get(seen->store, &stats);
    qsort(seen->places, seen->place_count, sizeof seen->places[0], by_place);
    for (uint32_t i = 1; i < seen->place_count; i++)
        if (seen->places[i].segment == seen->places[i - 1].segment &&
            seen->places[i].off < seen->places[i - 1].end)
            broken(seen, 3, "two extents overlap in segment %u", seen->places[i].segment);
    if (stats.records != seen->records || stats.live_bytes != seen->live_bytes ||
        stats.live_bytes + stats.garbage_bytes != stats.segment_bytes)
        broken(seen, 3, "counted %llu records and %llu live bytes, found %llu and %llu",
               (unsigned long long)stats.records, (unsigned long long)stats.live_bytes,
               (unsigned long long)seen->records, (unsigned long long)seen->live_bytes);
}

static void use_page(struct seen *seen, uint64_t page, const char *name) {
    for (uint32_t i = 0; i < seen->page_count && page != 0; i++)
        if (seen->pages[i].id == page) {
            seen->pages[i].used++;
            return;
        }
    if (page != 0)
        broken(seen, 6, "a snapshot of %s uses a page that is not there", name);
}

static void check_snapshot(struct seen *seen, uint32_t at) {
    const struct record_snapshot *record = &seen->snapshots[at].record;
    uint32_t i = 0;
    use_page(seen, record->sinks_page, record->name);
    for (uint32_t k = 0; k < record->page_count; k++)
        use_page(seen, record->page_ids[k], record->name);
    while (i < seen->lineage_count && seen->lineages[i].id != record->lineage)
        i++;
    if (i == seen->lineage_count) {
        broken(seen, 6, "a snapshot of %s has no lineage", record->name);
        return;
    }
    seen->lineages[i].used++;
    if (seen->lineages[i].blocks < record->block_count)
        broken(seen, 6, "a snapshot of %s counts %u blocks, %u are there", record->name,
               record->block_count, seen->lineages[i].blocks);
}

static void check_heads(struct seen *seen) {
    for (uint32_t i = 0; i < seen->name_count; i++) {
        uint64_t id = seen->names[i].record.snapshot;
        for (int hops = 0; id != 0 && hops < 300; hops++) {
            uint32_t k = 0;
            while (k < seen->snapshot_count && seen->snapshots[k].id != id)
                k++;
            if (k == seen->snapshot_count) {
                broken(seen, 7, "%s leads to a snapshot that is not there", seen->names[i].name);
                break;
            }
            if (strcmp(seen->snapshots[k].record.name, seen->names[i].name) != 0 ||
                (hops == 0 && seen->snapshots[k].record.lineage != seen->names[i].record.lineage))
                broken(seen, 7, "%s leads to a snapshot of %s", seen->names[i].name,
                       seen->snapshots[k].record.name);
            seen->snapshots[k].reached = 1;
            id = seen->snapshots[k].record.parent;
        }
    }
    for (uint32_t k = 0; k < seen->snapshot_count; k++)
        if (!seen->snapshots[k].reached)
            broken(seen, 7, "a snapshot of %s that no head leads to",
                   seen->snapshots[k].record.name);
}

static void check_counts(struct seen *seen) {
    for (uint32_t i = 0; i < seen->page_count; i++)
        if (seen->pages[i].used != seen->pages[i].record.references)
            broken(seen, 6, "a page counts %u snapshots, %u use it",
                   seen->pages[i].record.references, seen->pages[i].used);
    for (uint32_t i = 0; i < seen->lineage_count; i++) {
        check_parent(seen, i);
        if (seen->lineages[i].record.name[0] == 0)
            broken(seen, 8, "%u blocks without their lineage", seen->lineages[i].blocks);
        if (seen->lineages[i].used != seen->lineages[i].record.snapshot_count)
            broken(seen, 6, "lineage of %s counts %u snapshots, %u are there",
                   seen->lineages[i].record.name, seen->lineages[i].record.snapshot_count,
                   seen->lineages[i].used);
    }
}

int support_invariants_check(struct store *store, char text_out[SUPPORT_INVARIANTS_TEXT_BYTES]) {
    struct seen *seen = calloc(1, sizeof *seen);
    struct store_walk walk = {0};
    struct store_record record;
    struct kv_diag diag = {""};
    enum kv_err err;
    if (seen == NULL)
        abort();
    seen->store = store;
    seen->text = text_out;
    text_out[0] = 0;
    while ((err = store_next(store, &walk, &record, &diag)) == KV_OK) {
        seen->records++;
        take_extents(seen, &record);
        take(seen, &record);
        store_record_release(store, &record);
        if (seen->name_count == 64 || seen->snapshot_count == 256 || seen->page_count == 1024 ||
            seen->lineage_count == 255)
            abort();
    }
    if (err != KV_ERR_NOT_FOUND)
        broken(seen, err == KV_ERR_CORRUPT ? 5 : 4, "%s", diag.text);
    check_space(seen);
    for (uint32_t i = 0; i < seen->snapshot_count; i++)
        check_snapshot(seen, i);
    check_heads(seen);
    check_counts(seen);
    int number = seen->broken;
    free(seen);
    return number;
}
