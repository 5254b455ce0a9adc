/* snapshot/snap_fsck.c - do names, snapshots, pages, blocks and counts agree?
 *
 * Responsible for: snap_care_check: both ways, from names down to records and from records up.
 * Not responsible for: images, roots and block chains, which need the image (restore_verify).
 */
#include "snapshot/snap_care.h"

#include "snapshot/snap_map.h"
#include "store/store_batch.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 320 };

struct check {
    const struct snap_care_check_args *args;
    struct snap_map map;
    struct kv_diag *diag;
    uint64_t mended;
    int broken; /* a session could not be followed */
};

static void say(struct check *check, const char *kind, const char *session, int is_note,
                const char *format, ...) __attribute__((format(printf, 5, 6)));

static void say(struct check *check, const char *kind, const char *session, int is_note,
                const char *format, ...) {
    char text[TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    const struct snap_care_finding finding = {kind, session, is_note, text};
    check->args->each(check->args->context, &finding);
}

static void on_broken(void *context, const char *name, const struct record_key *record,
                      const char *text) {
    struct check *check = context;
    check->broken = 1;
    char kind = record->size != 0 ? (char)record->bytes[0] : 'n';
    say(check, kind == 's' ? "snapshot" : kind == 'l' ? "lineage" : "name", name, 0, "%s", text);
}

static enum kv_err mend(struct check *check, const struct record_key *key, const uint8_t *value,
                        uint32_t size) {
    struct store_batch *batch = NULL;
    if (!check->args->repair)
        return KV_OK;
    enum kv_err err = store_batch_begin_removal(check->args->store, &batch, check->diag);
    if (err != KV_OK)
        return err;
    err = store_batch_update(batch, key->bytes, key->size, value, size, check->diag);
    if (err != KV_OK) {
        store_batch_abandon(batch);
        return err;
    }
    check->mended++;
    return store_batch_commit(batch, NULL, check->diag);
}

/* The record under a key that a session uses. KV_ERR_NOT_FOUND: it has been said. */
static enum kv_err need(struct check *check, const struct record_key *key, const char *session,
                        const char *what, struct store_record *out) {
    struct kv_diag own = {""};
    enum kv_err err = store_get(check->args->store, key->bytes, key->size, out, &own);
    if (err != KV_ERR_NOT_FOUND && err != KV_ERR_CORRUPT) {
        if (err != KV_OK)
            kv_diag_set(check->diag, err, "%s", own.text);
        return err;
    }
    say(check, what, session, 0, "%s is %s", what,
        err == KV_ERR_NOT_FOUND ? "missing" : "damaged in the index");
    return KV_ERR_NOT_FOUND;
}

static enum kv_err check_page(struct check *check, const struct snap_map_use *use, size_t count) {
    const char *name = check->map.names[use->name].text;
    struct record_key key = record_key_page(use->id);
    struct store_record stored;
    struct record_page page;
    enum kv_err err = need(check, &key, name, "page", &stored);
    if (err != KV_OK)
        return err == KV_ERR_NOT_FOUND ? KV_OK : err;
    err = record_get_page(stored.value, stored.value_bytes, &page, NULL);
    uint32_t extents = stored.extent_count;
    store_record_release(check->args->store, &stored);
    if (err != KV_OK || extents != 1) {
        say(check, "page", name, 0, "page %016llx has a value that means nothing",
            (unsigned long long)use->id);
        return KV_OK;
    }
    if (page.references == count)
        return KV_OK;
    say(check, "page-count", name, 1, "page at position %llu is counted %u times, used %zu times",
        (unsigned long long)page.first, page.references, count);
    uint8_t value[RECORD_OUT_BYTES];
    page.references = (uint32_t)count;
    return mend(check, &key, value, record_put_page(&page, value));
}

static enum kv_err check_blocks(struct check *check, const struct snap_map_use *use, uint32_t first,
                                uint32_t blocks) {
    const char *name = check->map.names[use->name].text;
    for (uint32_t b = first; b < blocks; b++) {
        struct record_key key = record_key_block(use->id, b);
        struct store_record stored;
        struct record_block block;
        struct kv_diag own = {""};
        enum kv_err err = need(check, &key, name, "block", &stored);
        if (err == KV_ERR_NOT_FOUND) {
            say(check, "block", name, 0, "block %u of %u cannot be used", b, blocks);
            continue;
        }
        if (err != KV_OK)
            return err;
        err = record_get_block(stored.value, stored.value_bytes, &block, &own);
        if (err != KV_OK || stored.extent_count == 0)
            say(check, "block", name, 0, "block %u has a value that means nothing", b);
        else if (block.first_position != 64 + 256 * (uint64_t)b)
            say(check, "block", name, 0, "block %u says that it begins at position %llu", b,
                (unsigned long long)block.first_position);
        store_record_release(check->args->store, &stored);
    }
    return KV_OK;
}

static enum kv_err check_lineage(struct check *check, const struct snap_map_use *use,
                                 size_t count) {
    const char *name = check->map.names[use->name].text;
    struct record_key key = record_key_lineage(use->id);
    struct store_record stored;
    struct record_lineage lineage = {.cut = 0};
    size_t direct = 0;
    for (size_t i = 0; i < count; i++)
        direct += use[i].direct != 0;
    enum kv_err err = need(check, &key, name, "lineage", &stored);
    if (err == KV_OK) {
        err = record_get_lineage(stored.value, stored.value_bytes, &lineage, NULL);
        store_record_release(check->args->store, &stored);
        if (err != KV_OK) {
            say(check, "lineage", name, 0, "its lineage has a value that means nothing");
            err = KV_OK;
        } else if (lineage.snapshot_count != direct) {
            say(check, "lineage-count", name, 1, "its lineage counts %u snapshots, there are %zu",
                lineage.snapshot_count, direct);
            uint8_t value[RECORD_OUT_BYTES];
            lineage.snapshot_count = (uint32_t)direct;
            err = mend(check, &key, value, record_put_lineage(&lineage, value));
        }
    }
    if (err != KV_OK && err != KV_ERR_NOT_FOUND)
        return err;
    return check_blocks(check, use, (uint32_t)lineage.cut, snap_map_blocks(&check->map, use->id));
}

static enum kv_err check_uses(struct check *check) {
    enum kv_err err = KV_OK;
    for (size_t i = 0; i < check->map.use_count && err == KV_OK;) {
        const struct snap_map_use *use = &check->map.uses[i];
        size_t count = 0;
        snap_map_find(&check->map, use->kind, use->id, &count);
        if (use->kind == 'p')
            err = check_page(check, use, count);
        else if (use->kind == 'l')
            err = check_lineage(check, use, count);
        else if (count > 1)
            say(check, "snapshot", check->map.names[use->name].text, 0,
                "snapshot %016llx belongs to more than one place", (unsigned long long)use->id);
        i += count;
    }
    return err;
}

static enum kv_err check_unused(struct check *check, struct snap_care_report *report) {
    const struct snap_care_collect_args args = {.store = check->args->store,
                                                .alloc = check->args->alloc,
                                                .open = check->args->open,
                                                .dry_run = !check->args->repair};
    enum kv_err err = snap_care_collect(&args, report, check->diag);
    uint64_t dead =
        report->dead_snapshots + report->dead_pages + report->dead_blocks + report->dead_lineages;
    if (err == KV_OK && dead != 0)
        say(check, "unused", "", 1,
            "%llu snapshots, %llu pages, %llu blocks, %llu lineages belong to no session",
            (unsigned long long)report->dead_snapshots, (unsigned long long)report->dead_pages,
            (unsigned long long)report->dead_blocks, (unsigned long long)report->dead_lineages);
    return err;
}

enum kv_err snap_care_check(const struct snap_care_check_args *args,
                            struct snap_care_report *report_out, struct kv_diag *diag) {
    struct check check = {.args = args, .diag = diag};
    enum kv_err err = KV_OK;
    memset(report_out, 0, sizeof *report_out);
    KV_TRY(snap_map_make(args->store, args->alloc, on_broken, &check, &check.map, diag));
    KV_TRY(check_uses(&check));
    KV_TRY(check_unused(&check, report_out));
    report_out->counts_mended = check.mended;
done:
    snap_map_release(&check.map);
    return err;
}
