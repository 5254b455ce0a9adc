/* snapshot/snap_tree.c - stored sessions as names, tags and branches.
 *
 * Responsible for: what snap_tree.h promises, but for removing (snap_remove.c).
 * Not responsible for: which records die.
 */
#include "snapshot/snap_tree.h"

#include "engine/session.h"
#include "snapshot/snap_commit.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_image.h"
#include "snapshot/snap_line.h"
#include "snapshot/snap_path.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHAIN_MAX = 1 << 20 }; /* snapshots of one session; a longer chain is a loop */
static const char kept_prefix[] = "before-restore-";

/* --- finding */

static enum kv_err name_exists(struct store *store, const char *name, int *exists_out,
                               struct kv_diag *diag) {
    struct record_key key = record_key_name(name);
    *exists_out = 0;
    if (strlen(name) > IMAGE_NAME_BYTES_MAX)
        return KV_OK;
    return store_exists(store, key.bytes, key.size, exists_out, diag);
}

enum kv_err snap_tree_parse(struct store *store, const char *text, struct snap_tree_room *room,
                            struct snap_tree_place *place_out, struct kv_diag *diag) {
    const char *at = strrchr(text, '@');
    int exists = 0;
    enum kv_err err = name_exists(store, text, &exists, diag);
    if (err != KV_OK)
        return err;
    *place_out = (struct snap_tree_place){room->name, NULL};
    size_t length = exists || at == NULL ? strlen(text) : (size_t)(at - text);
    if (length > IMAGE_NAME_BYTES_MAX)
        return session_check_name(text, diag);
    memcpy(room->name, text, length);
    room->name[length] = 0;
    err = session_check_name(room->name, diag);
    if (err != KV_OK || text[length] == 0)
        return err;
    err = record_check_tag(at + 1, diag);
    if (err != KV_OK)
        return err;
    memcpy(room->tag, at + 1, strlen(at + 1) + 1);
    place_out->tag = room->tag;
    return KV_OK;
}

enum kv_err snap_tree_check(const char *text, struct kv_diag *diag) {
    const char *at = strrchr(text, '@');
    char name[IMAGE_NAME_BYTES_MAX + 1];
    if (at == NULL || (size_t)(at - text) > IMAGE_NAME_BYTES_MAX)
        return session_check_name(text, diag);
    if (session_check_name(text, NULL) == KV_OK)
        return KV_OK;
    memcpy(name, text, (size_t)(at - text));
    name[at - text] = 0;
    enum kv_err err = session_check_name(name, diag);
    return err == KV_OK ? record_check_tag(at + 1, diag) : err;
}

enum kv_err snap_tree_walk(struct store *store, const char *name, snap_tree_each each,
                           void *context, struct kv_diag *diag) {
    struct record_name head;
    enum kv_err err = snap_gc_name(store, name, &head, diag);
    uint64_t snapshot = head.snapshot;
    for (int i = 0; err == KV_OK && snapshot != 0; i++) {
        struct record_snapshot record;
        if (i == CHAIN_MAX)
            return kv_diag_set(diag, KV_ERR_CORRUPT,
                               "session %s: its snapshots go round in a circle", name);
        err = snap_gc_snapshot(store, snapshot, &record, diag);
        if (err == KV_ERR_NOT_FOUND)
            err = KV_ERR_CORRUPT;
        if (err != KV_OK || each(context, snapshot, &record) == 0)
            break;
        snapshot = record.parent;
    }
    return err;
}

struct finding {
    const char *tag;
    uint64_t snapshot;
    struct record_snapshot record;
};

static int is_it(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct finding *finding = context;
    if (finding->tag != NULL && strcmp(record->tag, finding->tag) != 0)
        return 1;
    finding->snapshot = snapshot;
    finding->record = *record;
    return 0;
}

enum kv_err snap_tree_find(struct store *store, const struct snap_tree_place *place,
                           uint64_t *snapshot_out, struct record_snapshot *record_out,
                           struct kv_diag *diag) {
    struct finding finding = {.tag = place->tag};
    enum kv_err err = snap_tree_walk(store, place->name, is_it, &finding, diag);
    if (err != KV_OK)
        return err;
    if (finding.snapshot == 0)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                           "session %s has no tag %s; `coldplane show %s` lists its tags",
                           place->name, place->tag, place->name);
    *snapshot_out = finding.snapshot;
    if (record_out != NULL)
        *record_out = finding.record;
    return KV_OK;
}

enum kv_err snap_tree_tag_free(struct store *store, const struct snap_tree_place *place,
                               struct kv_diag *diag) {
    struct kv_diag own = {""};
    uint64_t found = 0;
    enum kv_err err = record_check_tag(place->tag, diag);
    if (err != KV_OK)
        return err;
    err = snap_tree_find(store, place, &found, NULL, &own);
    if (err == KV_OK)
        return kv_diag_set(diag, KV_ERR_EXISTS,
                           "session %s has a tag %s already: take another, or `coldplane rm %s@%s`",
                           place->name, place->tag, place->name, place->tag);
    return err == KV_ERR_NOT_FOUND ? KV_OK : kv_diag_set(diag, err, "%s", own.text);
}

static int count_kept(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    unsigned long *most = context;
    (void)snapshot;
    if (strncmp(record->tag, kept_prefix, sizeof kept_prefix - 1) == 0) {
        unsigned long number = strtoul(record->tag + sizeof kept_prefix - 1, NULL, 10);
        if (number > *most && number < UINT32_MAX)
            *most = number;
    }
    return 1;
}

enum kv_err snap_tree_kept_tag(struct store *store, const char *name,
                               char tag_out[RECORD_TAG_BYTES_MAX + 1], struct kv_diag *diag) {
    unsigned long most = 0;
    enum kv_err err = snap_tree_walk(store, name, count_kept, &most, diag);
    snprintf(tag_out, RECORD_TAG_BYTES_MAX + 1, "%s%lu", kept_prefix, most + 1);
    return err;
}

/* --- one batch */

struct change {
    const struct snap_tree *tree;
    struct snap_gc gc;
    struct kv_diag *diag;
};

static enum kv_err begin(struct change *change, const char *session, const char *what,
                         uint64_t worst_bytes) {
    const struct snap_tree *tree = change->tree;
    const struct snap_retain_writer writer = {tree->store, tree->alloc, tree->clock,
                                              tree->leave, session,     what};
    enum kv_err err = snap_retain_begin(&writer, worst_bytes, &change->gc.batch, change->diag);
    if (err == KV_OK)
        store_batch_cause(change->gc.batch, STORE_CAUSE_SAVE);
    return err;
}

static enum kv_err put(struct change *change, const struct record_key *key, const uint8_t *value,
                       uint32_t size) {
    const struct store_put record = {
        .key = key->bytes, .key_bytes = key->size, .value = value, .value_bytes = size};
    return store_batch_put(change->gc.batch, &record, change->diag);
}

static enum kv_err put_name(struct change *change, const char *name,
                            const struct record_name *record) {
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_name(name);
    return put(change, &key, value, record_put_name(record, value));
}

static enum kv_err put_lineage(struct change *change, uint64_t lineage,
                               const struct record_lineage *record) {
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_lineage(lineage);
    return put(change, &key, value, record_put_lineage(record, value));
}

static enum kv_err update_snapshot(struct change *change, uint64_t snapshot,
                                   const struct record_snapshot *record) {
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_snapshot(snapshot);
    uint32_t size = record_put_snapshot(record, value);
    return store_batch_update(change->gc.batch, key.bytes, key.size, value, size, change->diag);
}

/* Commits what `err` says went well; the batch is over in every case. */
static enum kv_err finish(struct change *change, enum kv_err err) {
    if (err == KV_OK)
        return store_batch_commit(change->gc.batch, NULL, change->diag);
    store_batch_abandon(change->gc.batch);
    return err;
}

static struct change change_of(const struct snap_tree *tree, struct kv_diag *diag) {
    return (struct change){tree, {.store = tree->store, .alloc = tree->alloc}, diag};
}

static uint64_t worst_of(const struct snap_image *image) {
    return snap_commit_extent_bytes(image->size) +
           (uint64_t)(IMAGE_PAGES_MAX + 8) * SNAP_COMMIT_RECORD_BYTES;
}

/* --- branches */

static enum kv_err new_place(const struct snap_tree *tree, const char *name, struct kv_diag *diag) {
    int exists = 0;
    enum kv_err err = session_check_new_name(name, diag);
    if (err == KV_OK)
        err = name_exists(tree->store, name, &exists, diag);
    if (err == KV_OK && exists)
        err = kv_diag_set(diag, KV_ERR_EXISTS,
                          "there is a stored session %s already: take another name, or remove it",
                          name);
    return err;
}

/* A snapshot of its own under a new lineage, made from a stored one. */
struct branch {
    struct snap_image image;
    uint64_t snapshot;
    struct record_lineage lineage;
    struct record_name source; /* as it stands; whose it is goes with the text */
};

static enum kv_err make_branch(const struct snap_tree *tree, const struct snap_tree_place *place,
                               const char *name, struct branch *branch, struct kv_diag *diag) {
    struct snap_image *image = &branch->image;
    uint64_t source = 0;
    enum kv_err err = KV_OK;
    KV_TRY(snap_gc_name(tree->store, place->name, &branch->source, diag));
    KV_TRY(snap_tree_find(tree->store, place, &source, NULL, diag));
    KV_TRY(snap_image_read(tree->store, tree->alloc, source, image, diag));
    uint32_t cut = image->record.block_count;
    KV_TRY(snap_path_owner(tree->store, image->record.lineage, cut, &branch->lineage.parent, diag));
#ifdef BREAK_FORK_CUT
    cut = cut > 0 ? cut - 1 : 0;
    branch->lineage.parent = cut > 0 ? branch->lineage.parent : 0;
#endif
    branch->lineage.cut = cut;
    branch->lineage.snapshot_count = 1;
    memset(image->image.name, 0, sizeof image->image.name);
    memcpy(image->image.name, name, strlen(name));
    memcpy(branch->lineage.name, image->image.name, sizeof branch->lineage.name);
    image->image.parent = image->record.root;
    image->image.created_ns = kv_clock_wall_ns(tree->clock);
    KV_TRY(snap_line_fresh_id(tree->store, record_key_lineage, &image->image.lineage, diag));
    KV_TRY(snap_line_fresh_id(tree->store, record_key_snapshot, &branch->snapshot, diag));
    KV_TRY(snap_image_encode(image, tree->alloc, diag));
    image->record.parent = 0;
    image->record.is_explicit = 0;
    image->record.tag[0] = 0;
done:
    return err;
}

static enum kv_err put_branch(struct change *change, const struct branch *branch, int pinned) {
    const struct record_snapshot *record = &branch->image.record;
    struct record_name head = {.snapshot = branch->snapshot,
                               .lineage = record->lineage,
                               .updated_ns = record->created_ns,
                               .pinned = pinned};
    enum kv_err err = KV_OK;
    memcpy(head.owner, branch->source.owner, sizeof head.owner);
    KV_TRY(snap_image_put(change->gc.batch, branch->snapshot, &branch->image, change->diag));
    KV_TRY(put_name(change, record->name, &head));
    KV_TRY(put_lineage(change, record->lineage, &branch->lineage));
#ifdef BREAK_SHARED_PAGE
    return KV_OK;
#endif
    if (record->sinks_page != 0)
        KV_TRY(snap_gc_page_uses(&change->gc, record->sinks_page, 1, change->diag));
    for (uint32_t i = 0; i < record->page_count; i++)
        KV_TRY(snap_gc_page_uses(&change->gc, record->page_ids[i], 1, change->diag));
done:
    return err;
}

enum kv_err snap_tree_fork(const struct snap_tree *tree, const struct snap_tree_place *place,
                           const char *new_name, struct kv_diag *diag) {
    struct branch branch = {.snapshot = 0};
    struct change change = change_of(tree, diag);
    enum kv_err err = KV_OK;
    KV_TRY(new_place(tree, new_name, diag));
    KV_TRY(make_branch(tree, place, new_name, &branch, diag));
    KV_TRY(begin(&change, place->name, "the fork", worst_of(&branch.image)));
    err = finish(&change, put_branch(&change, &branch, 0));
done:
    snap_image_release(&branch.image, tree->alloc);
    return err;
}

enum kv_err snap_tree_revert(const struct snap_tree *tree, const struct snap_tree_place *place,
                             char kept_out[RECORD_TAG_BYTES_MAX + 1], struct kv_diag *diag) {
    struct branch branch = {.snapshot = 0};
    struct change change = change_of(tree, diag);
    struct record_name head;
    struct record_snapshot before;
    uint64_t wanted = 0;
    enum kv_err err = KV_OK;
    kept_out[0] = 0;
    KV_TRY(snap_gc_name(tree->store, place->name, &head, diag));
    KV_TRY(snap_tree_find(tree->store, place, &wanted, NULL, diag));
    if (wanted == head.snapshot)
        return KV_OK;
    KV_TRY(snap_gc_snapshot(tree->store, head.snapshot, &before, diag));
    if (before.tag[0] == 0)
        KV_TRY(snap_tree_kept_tag(tree->store, place->name, before.tag, diag));
    before.is_explicit = 1;
    KV_TRY(make_branch(tree, place, place->name, &branch, diag));
    branch.image.record.parent = head.snapshot;
    KV_TRY(begin(&change, place->name, "going back", worst_of(&branch.image)));
    err = update_snapshot(&change, head.snapshot, &before);
    if (err == KV_OK)
        err = put_branch(&change, &branch, head.pinned);
    KV_TRY(finish(&change, err));
    memcpy(kept_out, before.tag, sizeof before.tag);
done:
    snap_image_release(&branch.image, tree->alloc);
    return err;
}

/* --- names */

struct ids {
    const struct kv_alloc *alloc;
    void *items; /* u64 each, from the head down */
    size_t count, capacity;
    int failed;
};

static int add_id(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct ids *ids = context;
    (void)record;
    ids->failed =
        !kv_alloc_grow(ids->alloc, &ids->items, &ids->capacity, ids->count + 1, sizeof(uint64_t));
    if (!ids->failed)
        ((uint64_t *)ids->items)[ids->count++] = snapshot;
    return !ids->failed;
}

/* The lineage and those of the same session that it was cut from, which snapshots may have left. */
static enum kv_err rename_lineages(struct change *change, uint64_t lineage, const char *name,
                                   const char *new_name) {
    uint64_t cut = UINT64_MAX;
    for (;;) {
        struct record_lineage record;
        enum kv_err err = snap_path_get(change->tree->store, lineage, &record, change->diag);
        if (err != KV_OK)
            return err;
        if (cut != UINT64_MAX && strcmp(record.name, name) != 0)
            return KV_OK;
        memset(record.name, 0, sizeof record.name);
        memcpy(record.name, new_name, strlen(new_name));
        err = put_lineage(change, lineage, &record);
        if (err != KV_OK || record.parent == 0 || record.cut >= cut)
            return err;
        lineage = record.parent;
        cut = record.cut;
    }
}

/* What all images together may need. */
static enum kv_err worst_of_all(const struct snap_tree *tree, const struct ids *ids,
                                uint64_t *worst_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    *worst_out = 0;
    for (size_t i = 0; i < ids->count && err == KV_OK; i++) {
        struct snap_image image;
        err = snap_image_read(tree->store, tree->alloc, ((const uint64_t *)ids->items)[i], &image,
                              diag);
        if (err == KV_OK)
            *worst_out += worst_of(&image);
        snap_image_release(&image, tree->alloc);
    }
    return err;
}

/* Images hold the name, so each is written again; what refers to an older root follows. */
static enum kv_err rename_snapshots(struct change *change, const struct ids *ids, const char *name,
                                    const char *new_name) {
    struct kv_digest root_before = {{0}}, root_after = {{0}};
    enum kv_err err = KV_OK;
    for (size_t i = ids->count; i-- > 0 && err == KV_OK;) {
        uint64_t snapshot = ((const uint64_t *)ids->items)[i];
        struct snap_image image;
        err = snap_image_read(change->tree->store, change->tree->alloc, snapshot, &image,
                              change->diag);
        if (err == KV_OK) {
            struct kv_digest before = image.record.root;
            memset(image.image.name, 0, sizeof image.image.name);
            memcpy(image.image.name, new_name, strlen(new_name));
            if (i + 1 < ids->count && kv_digest_equal(&image.image.parent, &root_before))
                image.image.parent = root_after;
            err = snap_image_encode(&image, change->tree->alloc, change->diag);
            root_before = before;
            root_after = image.record.root;
        }
        if (err == KV_OK)
            err = snap_image_put(change->gc.batch, snapshot, &image, change->diag);
        if (err == KV_OK)
            err = rename_lineages(change, image.record.lineage, name, new_name);
        snap_image_release(&image, change->tree->alloc);
    }
    return err;
}

enum kv_err snap_tree_rename(const struct snap_tree *tree, const char *name, const char *new_name,
                             struct kv_diag *diag) {
    struct change change = change_of(tree, diag);
    struct ids ids = {.alloc = tree->alloc};
    struct record_name head;
    struct record_key key = record_key_name(name);
    uint64_t worst_bytes = 0;
    enum kv_err err = KV_OK;
    KV_TRY(session_check_name(name, diag));
    KV_TRY(snap_gc_name(tree->store, name, &head, diag));
    KV_TRY(new_place(tree, new_name, diag));
    KV_TRY(snap_tree_walk(tree->store, name, add_id, &ids, diag));
    if (ids.failed)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the snapshots of %s", name));
    KV_TRY(worst_of_all(tree, &ids, &worst_bytes, diag));
    KV_TRY(begin(&change, name, "the new name", worst_bytes));
    err = rename_snapshots(&change, &ids, name, new_name);
    if (err == KV_OK)
        err = put_name(&change, new_name, &head);
    if (err == KV_OK)
        err = store_batch_delete(change.gc.batch, key.bytes, key.size, diag);
    err = finish(&change, err);
done:
    kv_alloc_release(tree->alloc, ids.items);
    return err;
}

enum kv_err snap_tree_pin(const struct snap_tree *tree, const char *name, int pinned,
                          struct kv_diag *diag) {
    struct change change = change_of(tree, diag);
    struct record_name head;
    enum kv_err err = KV_OK;
    KV_TRY(session_check_name(name, diag));
    KV_TRY(snap_gc_name(tree->store, name, &head, diag));
    head.pinned = pinned != 0;
    KV_TRY(store_batch_begin_removal(tree->store, &change.gc.batch, diag));
    uint8_t value[RECORD_OUT_BYTES];
    struct record_key key = record_key_name(name);
    uint32_t size = record_put_name(&head, value);
    err = finish(&change,
                 store_batch_update(change.gc.batch, key.bytes, key.size, value, size, diag));
done:
    return err;
}
