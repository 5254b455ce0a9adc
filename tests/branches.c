/* tests/branches.c - random saves, forks, tags, removals against a plain model of them.
 *
 * Responsible for: 200 random operations for each seed (save, go back, fork also of forks, restore
 * a tag, untag, rename, pin, rm, rm with purge, gc, lives that were never saved); after each the
 * names, tags, pins, lengths and token ids of the store are those of the model, every count is
 * right and nothing is unused; at the end of a seed every byte is read, and removing everything
 * leaves no record.
 * Not responsible for: what the bytes mean: no model computes here. Blocks and pages are filled
 * from the tokens that they stand for, and go through the batches of snap_commit.c as they do in
 * the product, so that a block or page of another text is seen.
 *
 * An argument n runs n seeds (1,000 without one, 100 with QUICK=1). Each broken twin must be seen:
 * BREAK_KIN, BREAK_FORK_CUT, BREAK_SHARED_PAGE, BREAK_STALE_PAGE, BREAK_KEEP_HEAD, BREAK_MAP_KIN,
 * BREAK_TRIM, BREAK_COUNT, BREAK_PAGE_USES.
 */
#include "engine/kv/block.h"
#include "restore/restore.h"
#include "snapshot/snap_care.h"
#include "snapshot/snap_commit.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_image.h"
#include "snapshot/snap_path.h"
#include "snapshot/snap_tree.h"
#include "store/base/bytes.h"

#include "store/store_gc.h"
#include "store/store_read.h"
#include "tests/support_engine.h"
#include "tests/support_plain_io.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAMES = 6, TAGS = 3, SNAPS_MAX = 24, OPS = 200, TOKENS_MAX = 2200, OP_KINDS_MAX = 16 };
enum { SNAPSHOT_TOKENS = TOKENS_MAX };

static const struct layout_geometry geometry = {1, 1, 64};
static const char *const tag_words[TAGS] = {"red", "green", "blue"};
static uint64_t seeds_wanted; /* 0: as many as there is time for */

/* What must be there. */
struct snap {
    char tag[RECORD_TAG_BYTES_MAX + 1];
    int is_explicit;
    uint32_t n, n_kv;
    uint32_t ids[SNAPSHOT_TOKENS];
};
struct session_model {
    int exists, pinned;
    uint32_t count; /* snaps[0] is the head */
    struct snap *snaps[SNAPS_MAX];
};

struct run {
    struct testing_random random;
    struct store *store;
    struct engine *engine;
    struct snapshot writer; /* no thread: batches are made here */
    struct snap_tree tree;
    struct session_model sessions[NAMES];
    uint64_t seed, op;
    uint64_t sequence; /* of the last batch that was compared */
    char dir[TESTING_PATH_BYTES];
    uint32_t done[OP_KINDS_MAX + 1]; /* operations by kind that changed something */
};

static const char *name_of(uint32_t index) {
    static const char *const names[NAMES] = {"ash", "birch", "cedar home", "dogwood", "elm", "fir"};
    return names[index];
}

static uint32_t below(struct run *run, uint32_t end) {
    return (uint32_t)testing_random_below(&run->random, end);
}

#define CHECK(run, condition, ...)                                                                 \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("seed %llu, operation %llu: ", (unsigned long long)(run)->seed,                 \
                   (unsigned long long)(run)->op);                                                 \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

static void expect(struct run *run, enum kv_err found, enum kv_err expected, const char *what,
                   const struct kv_diag *diag) {
    CHECK(run, found == expected, "%s: %s instead of %s: %s", what, kv_err_name(found),
          kv_err_name(expected), diag->text);
}

/* --- the model's chain */

static struct snap *push(struct run *run, struct session_model *session) {
    CHECK(run, session->count < SNAPS_MAX, "the model is full");
    memmove(session->snaps + 1, session->snaps, session->count * sizeof *session->snaps);
    session->snaps[0] = calloc(1, sizeof **session->snaps);
    assert_non_null(session->snaps[0]);
    session->count++;
    session->exists = 1;
    return session->snaps[0];
}

static void drop(struct session_model *session, uint32_t index) {
    free(session->snaps[index]);
    session->count--;
    memmove(session->snaps + index, session->snaps + index + 1,
            (session->count - index) * sizeof *session->snaps);
}

static uint32_t find_tag(const struct session_model *session, const char *tag) {
    uint32_t i = 0;
    while (i < session->count && strcmp(session->snaps[i]->tag, tag) != 0)
        i++;
    return i;
}

static void keep_head(struct session_model *session) {
    unsigned long most = 0;
    for (uint32_t i = 0; i < session->count; i++)
        if (strncmp(session->snaps[i]->tag, "before-restore-", 15) == 0) {
            unsigned long number = strtoul(session->snaps[i]->tag + 15, NULL, 10);
            most = number > most ? number : most;
        }
    struct snap *head = session->snaps[0];
    head->is_explicit = 1;
    if (head->tag[0] == 0)
        snprintf(head->tag, sizeof head->tag, "before-restore-%lu", most + 1);
}

/* --- writing without a model */

static void fill_page(const uint32_t *ids, uint64_t first, uint32_t tokens, uint8_t *bytes) {
    size_t each = layout_dense_bytes(&geometry, tokens) / tokens;
    for (uint32_t t = 0; t < tokens; t++)
        for (size_t at = 0; at + 4 <= each; at += 4)
            kv_put_u32(bytes + t * each + at, ids[first + t]);
}

static void freeze_page(struct run *run, const struct transfer_durable *before,
                        const struct snap *snap, uint64_t first, uint32_t tokens,
                        struct transfer_frozen_page *page) {
    *page = (struct transfer_frozen_page){.first = first, .tokens = tokens};
    page->size = layout_dense_bytes(&geometry, tokens);
    if (tokens == 0 || snap_line_page(before, first, tokens) != NULL)
        return;
    page->bytes = kv_alloc_aligned(run->writer.alloc, page->size, LAYOUT_SLOT_UNIT);
    assert_non_null(page->bytes);
    fill_page(snap->ids, first, tokens, page->bytes);
}

static void describe(struct run *run, const char *name, const struct snap *snap,
                     struct image *image) {
    const struct kv_alloc *alloc = run->writer.alloc;
    image_init(image);
    memcpy(image->model.architecture, "none", 5);
    image->model.geometry = geometry;
    image->model.q_heads = 1;
    image->model.context_tokens = 8192;
    image->model.code_id = RECORD_CODE_PLANES;
    image->model.layout_id = RECORD_LAYOUT_ID;
    memcpy(image->name, name, strlen(name) + 1);
    image->sampler = (struct image_sampler){0, 1, 1, 1};
    image->policies = kv_alloc_zeroed(alloc, 1, sizeof *image->policies);
    image->policies[0].policy.recipe = IMAGE_RECIPE_V3;
    image->policy_count = 1;
    image->ids = kv_alloc_copy(alloc, snap->ids, snap->n * sizeof *snap->ids);
    image->n = snap->n;
    image->n_kv = snap->n_kv;
    image->roles = kv_alloc_zeroed(alloc, 1, sizeof *image->roles);
    image->needles = kv_alloc_zeroed(alloc, 1, sizeof *image->needles);
    image->block_count = (uint32_t)layout_sealed_blocks(snap->n_kv);
    image->created_ns = run->op + 1;
    image->fingerprint.n_kv = image->fingerprint_floor.n_kv = snap->n_kv;
    image->sinks.tokens = layout_sink_tokens(snap->n_kv);
}

static void freeze(struct run *run, const char *name, const struct snap *snap,
                   struct snapshot_ticket *ticket) {
    struct transfer_frozen *frozen = &ticket->frozen;
    uint32_t left = layout_window_tokens(snap->n_kv);
    describe(run, name, snap, &frozen->image);
    uint64_t first = LAYOUT_SINK_TOKENS + (uint64_t)frozen->image.block_count * LAYOUT_BLOCK_TOKENS;
    freeze_page(run, &ticket->before, snap, 0, frozen->image.sinks.tokens, &frozen->sinks);
    while (left > 0) {
        uint32_t tokens = left < LAYOUT_PAGE_TOKENS ? left : LAYOUT_PAGE_TOKENS;
        struct image_page *page = &frozen->image.pages[frozen->page_count];
        page->first = first;
        page->tokens = tokens;
        freeze_page(run, &ticket->before, snap, first, tokens,
                    &frozen->pages[frozen->page_count++]);
        first += tokens;
        left -= tokens;
    }
}

/* What a wake leaves with a session: restore's own rest_wake.c does the same. */
static void wake(struct run *run, const char *name, struct transfer_durable *durable) {
    const struct snap_tree_place place = {name, NULL};
    struct snap_image image;
    struct kv_diag diag = {""};
    memset(durable, 0, sizeof *durable);
    enum kv_err err = snap_tree_find(run->store, &place, &durable->snapshot, NULL, &diag);
    if (err == KV_OK)
        err = snap_image_read(run->store, run->writer.alloc, durable->snapshot, &image, &diag);
    expect(run, err, KV_OK, "wake", &diag);
    durable->lineage = image.image.lineage;
    durable->head_explicit = image.record.is_explicit;
    durable->trim_pending = 1;
    durable->block_count = image.image.block_count;
    durable->block_chain = image.image.block_chain;
    durable->root = image.record.root;
    durable->sinks = image.image.sinks;
    durable->page_count = image.image.page_count;
    memcpy(durable->pages, image.image.pages, sizeof durable->pages);
    snap_image_release(&image, run->writer.alloc);
}

/* As snap_line_of does for a resident session. */
static void begin_line(struct run *run, const char *name, struct transfer_durable *durable,
                       struct snap_line *line) {
    int is_new = durable->lineage == 0;
    memset(line, 0, sizeof *line);
    if (is_new)
        assert_int_equal(
            snap_line_fresh_id(run->store, record_key_lineage, &durable->lineage, NULL), KV_OK);
    memcpy(line->name, name, strlen(name) + 1);
    line->lineage = durable->lineage;
    line->parent = durable->parent;
    line->cut = durable->cut;
    line->block_count = durable->block_count;
    line->chain = durable->block_chain;
    line->trim = durable->trim_pending && !is_new;
    line->head = durable->snapshot;
    line->recorded = durable->snapshot != 0 && !is_new;
    durable->trim_pending = 0;
}

static void write_blocks(struct run *run, struct snap_line *line, const struct snap *snap) {
    static uint8_t bytes[4 * LAYOUT_SLOT_UNIT] __attribute__((aligned(4096)));
    uint32_t end = (uint32_t)layout_sealed_blocks(snap->n_kv);
    while (line->block_count < end) {
        struct transfer_part parts[LAYOUT_STREAM_COUNT];
        struct block block = {.index = line->block_count};
        struct snap_item item = {
            .line = line, .block = &block, .index = line->block_count, .parts = parts};
        struct snap_item *items[1] = {&item};
        const uint32_t *ids =
            snap->ids + LAYOUT_SINK_TOKENS + (size_t)item.index * LAYOUT_BLOCK_TOKENS;
        for (uint32_t i = 0; i < LAYOUT_BLOCK_TOKENS; i++)
            kv_put_u32(block.ids + 4 * (size_t)i, ids[i]);
        memset(bytes, (int)ids[0], layout_stream_bytes(&geometry, LAYOUT_KH));
        kv_put_u64(bytes, kv_digest_of(snap->ids, (size_t)(ids - snap->ids + 256) * 4).bytes[0]);
        uint32_t streams = layout_tier_streams(LAYOUT_K8V4);
        for (int pass = 0; pass < 2; pass++) /* META first */
            for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++) {
                if (!(streams >> s & 1) || (s == LAYOUT_META) != (pass == 0))
                    continue;
                struct transfer_part *part = &parts[item.part_count++];
                *part = (struct transfer_part){.stream = (enum layout_stream)s, .piece_count = 1};
                part->size = layout_stream_bytes(&geometry, part->stream);
                assert_true(part->size <= sizeof bytes);
                part->pieces[0] = (struct transfer_piece){bytes, part->size};
            }
        snap_commit_blocks(&run->writer, items, 1);
        CHECK(run, item.err == KV_OK, "a block: %s", line->trouble.text);
    }
}

static void save(struct run *run, uint32_t index, const struct snap *snap,
                 struct transfer_durable *durable) {
    struct snapshot_ticket *ticket = calloc(1, sizeof *ticket);
    struct snap_line line;
    assert_non_null(ticket);
    begin_line(run, name_of(index), durable, &line);
    write_blocks(run, &line, snap);
    ticket->owner = &run->writer;
    ticket->before = *durable;
    ticket->options.is_explicit = snap->is_explicit;
    memcpy(ticket->tag, snap->tag, sizeof ticket->tag);
    freeze(run, name_of(index), snap, ticket);
    struct snap_item item = {.line = &line, .ticket = ticket};
    snap_commit_save(&run->writer, &item);
    expect(run, ticket->err, KV_OK, "save", &ticket->diag);
    transfer_frozen_release(run->engine, &ticket->frozen);
    free(ticket);
}

/* --- operations; each returns 1 when something changed */

static void grow(struct run *run, struct snap *snap, uint32_t from, uint32_t most) {
    uint32_t more = 1 + below(run, most);
    snap->n = from + more < TOKENS_MAX ? from + more : TOKENS_MAX;
    for (uint32_t i = from; i < snap->n; i++)
        snap->ids[i] = below(run, 1 << 20);
    snap->n_kv = snap->n - (snap->n > 1 && below(run, 2) == 0);
}

static int op_say(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct transfer_durable durable = {0};
    const struct snap *before = session->exists ? session->snaps[0] : NULL;
    if (session->count >= SNAPS_MAX - 1 || (before != NULL && before->n >= TOKENS_MAX))
        return 0;
    if (session->exists)
        wake(run, name_of(index), &durable);
    uint32_t from = before != NULL ? before->n : 0;
    int replaces = before != NULL && !before->is_explicit;
    struct snap *snap = push(run, session);
    if (from != 0)
        memcpy(snap->ids, before->ids, from * sizeof *snap->ids);
    /* A life whose blocks were written and never saved goes before some. */
    if (session->exists && from != 0 && below(run, 4) == 0) {
        struct transfer_durable lost = durable;
        struct snap_line line;
        grow(run, snap, from, 600);
        begin_line(run, name_of(index), &lost, &line);
        write_blocks(run, &line, snap);
    }
    grow(run, snap, from, 500);
    const char *tag = tag_words[below(run, TAGS)];
    snap->is_explicit = below(run, 3) == 0;
    if (snap->is_explicit && find_tag(session, tag) == session->count)
        memcpy(snap->tag, tag, strlen(tag) + 1);
    save(run, index, snap, &durable);
    if (replaces)
        drop(session, 1);
    return 1;
}

static int op_rewind(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct transfer_durable durable;
    struct kv_diag diag = {""};
    if (!session->exists || session->count >= SNAPS_MAX - 1 || session->snaps[0]->n < 2)
        return 0;
    const struct snap *before = session->snaps[0];
    wake(run, name_of(index), &durable);
    uint32_t n = 1 + below(run, before->n - 1);
    uint32_t keep = (uint32_t)layout_sealed_blocks(n - 1) == durable.block_count
                        ? durable.block_count
                        : (uint32_t)layout_sealed_blocks(n);
    int exact = keep == durable.block_count;
    expect(run, snap_line_go_back(run->store, keep, &durable, &diag), KV_OK, "go back", &diag);
    snap_line_forget_pages(&durable, exact ? n - 1 : 0, n - 1 < 64 ? n - 1 : 64);
    keep_head(session);
    struct snap *snap = push(run, session);
    memcpy(snap->ids, before->ids, n * sizeof *snap->ids);
    grow(run, snap, n, 300);
    save(run, index, snap, &durable);
    return 1;
}

static int op_fork(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    uint32_t to = below(run, NAMES);
    struct kv_diag diag = {""};
    uint32_t at = session->exists ? below(run, session->count) : 0;
    const struct snap *source = session->exists ? session->snaps[at] : NULL;
    const struct snap_tree_place place = {name_of(index),
                                          source != NULL && at > 0 ? source->tag : NULL};
    if (source != NULL && at > 0 && source->tag[0] == 0)
        return 0;
    enum kv_err expected = run->sessions[to].exists ? KV_ERR_EXISTS
                           : session->exists        ? KV_OK
                                                    : KV_ERR_NOT_FOUND;
    expect(run, snap_tree_fork(&run->tree, &place, name_of(to), &diag), expected, "fork", &diag);
    if (expected != KV_OK)
        return 0;
    struct snap *snap = push(run, &run->sessions[to]);
    *snap = *source;
    snap->tag[0] = 0;
    snap->is_explicit = 0;
    run->sessions[to].pinned = 0;
    return 1;
}

static int op_revert(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct kv_diag diag = {""};
    char kept[RECORD_TAG_BYTES_MAX + 1];
    if (!session->exists || session->count >= SNAPS_MAX - 1)
        return 0;
    const struct snap *source = session->snaps[below(run, session->count)];
    if (source->tag[0] == 0)
        return 0;
    const struct snap_tree_place place = {name_of(index), source->tag};
    expect(run, snap_tree_revert(&run->tree, &place, kept, &diag), KV_OK, "revert", &diag);
    if (source == session->snaps[0]) {
        CHECK(run, kept[0] == 0, "reverting to the head kept %s", kept);
        return 0;
    }
    keep_head(session);
    CHECK(run, strcmp(kept, session->snaps[0]->tag) == 0, "kept %s, expected %s", kept,
          session->snaps[0]->tag);
    struct snap *snap = push(run, session);
    *snap = *source;
    snap->tag[0] = 0;
    snap->is_explicit = 0;
    return 1;
}

static int op_untag(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct kv_diag diag = {""};
    if (!session->exists)
        return 0;
    uint32_t at = below(run, session->count);
    char tag[RECORD_TAG_BYTES_MAX + 1];
    snprintf(tag, sizeof tag, "%s",
             session->snaps[at]->tag[0] != 0 ? session->snaps[at]->tag : "no such tag");
    const struct snap_tree_place place = {name_of(index), tag};
    enum kv_err expected = session->snaps[at]->tag[0] != 0 ? KV_OK : KV_ERR_NOT_FOUND;
    expect(run, snap_tree_untag(&run->tree, &place, &diag), expected, "untag", &diag);
    if (expected != KV_OK)
        return 0;
    session->snaps[at]->tag[0] = 0;
    session->snaps[at]->is_explicit = 0;
    if (at > 0)
        drop(session, at);
    return 1;
}

static int op_rename(struct run *run, uint32_t index) {
    uint32_t to = below(run, NAMES);
    struct kv_diag diag = {""};
    enum kv_err expected = !run->sessions[index].exists ? KV_ERR_NOT_FOUND
                           : run->sessions[to].exists   ? KV_ERR_EXISTS
                                                        : KV_OK;
    expect(run, snap_tree_rename(&run->tree, name_of(index), name_of(to), &diag), expected,
           "rename", &diag);
    if (expected != KV_OK)
        return 0;
    run->sessions[to] = run->sessions[index];
    memset(&run->sessions[index], 0, sizeof run->sessions[index]);
    return 1;
}

static int op_pin(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct kv_diag diag = {""};
    int pinned = below(run, 3) == 0;
    enum kv_err expected = session->exists ? KV_OK : KV_ERR_NOT_FOUND;
    expect(run, snap_tree_pin(&run->tree, name_of(index), pinned, &diag), expected, "pin", &diag);
    session->pinned = session->exists && pinned;
    return session->exists;
}

static int op_remove(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct kv_diag diag = {""};
    enum kv_err expected = !session->exists  ? KV_ERR_NOT_FOUND
                           : session->pinned ? KV_ERR_BUSY
                                             : KV_OK;
    expect(run, snapshot_remove(run->store, run->writer.alloc, name_of(index), &diag), expected,
           "remove", &diag);
    if (expected != KV_OK)
        return 0;
    while (session->count > 0)
        drop(session, 0);
    session->exists = 0;
    return 1;
}

/* A life that went back, wrote blocks and was never saved: nothing of it may stay. */
static int op_lost_branch(struct run *run, uint32_t index) {
    struct session_model *session = &run->sessions[index];
    struct transfer_durable durable;
    struct snap_line line;
    if (!session->exists)
        return 0;
    struct snap snap = *session->snaps[0];
    wake(run, name_of(index), &durable);
    uint32_t keep = (uint32_t)layout_sealed_blocks(snap.n / 2);
    assert_int_equal(snap_line_go_back(run->store, keep, &durable, NULL), KV_OK);
    grow(run, &snap, snap.n / 2, 900);
    begin_line(run, name_of(index), &durable, &line);
    write_blocks(run, &line, &snap);
    assert_int_equal(snap_gc_unsaved(run->store, run->writer.alloc, NULL), KV_OK);
    return 1;
}

/* Space given back by moving, or by holes. */
static int op_gc(struct run *run, uint32_t index) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct kv_diag diag = {""};
    (void)index;
    if (below(run, 6) != 0)
        return 0;
    options.live_percent = 95;
    options.punch_only = below(run, 2) == 0;
    expect(run, store_gc(run->store, &options, &report, &diag), KV_OK, "gc", &diag);
    CHECK(run, report.held == 0 && report.damaged == 0, "gc: %s", report.trouble);
    return report.freed_bytes > 0;
}

static void open_store(struct run *run, int rebuild_index) {
    struct store_options options = store_options_usual(run->dir, "branches");
    struct kv_diag diag = {""};
    options.segment_bytes = 1 << 20;
    options.door = support_plain_io_door();
    options.rebuild_index = rebuild_index;
    expect(run, store_open(&options, &run->store, &diag), KV_OK, "open", &diag);
    run->writer.store = run->tree.store = run->store;
}

/* As `rm --purge`: the session, every byte of it, and the index made anew from what is left. */
static int op_purge(struct run *run, uint32_t index) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report;
    struct kv_diag diag = {""};
    if (below(run, 16) != 0 || !op_remove(run, index))
        return 0;
    options.punch_only = options.punch_every = 1;
    expect(run, store_gc(run->store, &options, &report, &diag), KV_OK, "purge", &diag);
    char note[STORE_NOTE_BYTES];
    expect(run, store_reindex(run->store, note, &diag), KV_OK, "reindex", &diag);
    run->sequence = 0;
    return 1;
}

/* --- the same? */

static void on_finding(void *context, const struct snap_care_finding *finding) {
    struct run *run = context;
    CHECK(run, 0, "fsck: %s|%s|%s", finding->kind, finding->session, finding->text);
}

struct walking {
    struct run *run;
    const struct session_model *session;
    uint32_t at;
};

static int compare_snapshot(void *context, uint64_t snapshot,
                            const struct record_snapshot *record) {
    struct walking *walking = context;
    (void)snapshot;
    CHECK(walking->run, walking->at < walking->session->count, "%s: too many snapshots",
          record->name);
    const struct snap *snap = walking->session->snaps[walking->at++];
    CHECK(walking->run,
          record->n == snap->n && record->n_kv == snap->n_kv &&
              record->is_explicit == snap->is_explicit && strcmp(record->tag, snap->tag) == 0,
          "%s: %llu tokens, tag '%s' where %u, '%s' should be", record->name,
          (unsigned long long)record->n, record->tag, snap->n, snap->tag);
    return 1;
}

static int compare_entry(void *context, const struct snapshot_entry *entry) {
    struct run *run = context;
    uint32_t i = 0;
    while (i < NAMES && strcmp(name_of(i), entry->head.name) != 0)
        i++;
    CHECK(run, i < NAMES && run->sessions[i].exists, "%s is listed", entry->head.name);
    CHECK(run, entry->pinned == run->sessions[i].pinned, "%s: pinned %d", entry->head.name,
          entry->pinned);
    CHECK(run, entry->snapshot_count == run->sessions[i].count, "%s: %u snapshots",
          entry->head.name, entry->snapshot_count);
    run->done[OP_KINDS_MAX]++;
    return 1;
}

/* Every window page of the head holds the tokens of the head: by digest, whose bytes are read when
 * the seed ends. */
static void compare_pages(struct run *run, const struct image *image, const struct snap *snap) {
    static uint8_t expected[LAYOUT_SLOT_UNIT * 16];
    for (uint32_t i = 0; i <= image->page_count; i++) {
        const struct image_page *page = i == 0 ? &image->sinks : &image->pages[i - 1];
        struct record_key key = record_key_page(page->page_id);
        struct store_record stored;
        struct kv_diag diag = {""};
        if (page->tokens == 0)
            continue;
        expect(run, store_get(run->store, key.bytes, key.size, &stored, &diag), KV_OK, "page",
               &diag);
        CHECK(run, stored.extents[0].raw_bytes <= sizeof expected, "a page is too long");
        fill_page(snap->ids, page->first, page->tokens, expected);
        struct kv_digest digest = kv_digest_of(expected, stored.extents[0].raw_bytes);
        CHECK(run, memcmp(&digest, &stored.extents[0].digest, sizeof digest) == 0,
              "%s: the page at %llu is of another text", image->name,
              (unsigned long long)page->first);
        store_record_release(run->store, &stored);
    }
}

static void compare_text(struct run *run, uint32_t index) {
    const struct session_model *session = &run->sessions[index];
    struct image image;
    struct kv_diag diag = {""};
    if (!session->exists)
        return;
    image_init(&image);
    expect(run, restore_image(run->store, run->writer.alloc, name_of(index), &image, &diag), KV_OK,
           "image", &diag);
    const struct snap *head = session->snaps[0];
    CHECK(run, image.n == head->n && memcmp(image.ids, head->ids, head->n * 4) == 0,
          "%s has other tokens", name_of(index));
    compare_pages(run, &image, head);
    image_release(&image, run->writer.alloc);
}

static void compare(struct run *run) {
    const struct snap_care_check_args args = {
        .store = run->store, .alloc = run->writer.alloc, .each = on_finding, .context = run};
    struct snap_care_report report;
    struct kv_diag diag = {""};
    uint32_t there = 0;
    /* Where no batch was committed nothing that is stored has changed. */
    if (store_sequence(run->store) == run->sequence)
        return;
    run->sequence = store_sequence(run->store);
    expect(run, snap_care_check(&args, &report, &diag), KV_OK, "fsck", &diag);
    run->done[OP_KINDS_MAX] = 0;
    expect(run, snapshot_list(run->store, run->writer.alloc, compare_entry, run, &diag), KV_OK,
           "list", &diag);
    for (uint32_t i = 0; i < NAMES; i++) {
        struct walking walking = {run, &run->sessions[i], 0};
        if (!run->sessions[i].exists)
            continue;
        there++;
        expect(run, snap_tree_walk(run->store, name_of(i), compare_snapshot, &walking, &diag),
               KV_OK, "walk", &diag);
        CHECK(run, walking.at == run->sessions[i].count, "%s: %u snapshots", name_of(i),
              walking.at);
    }
    CHECK(run, run->done[OP_KINDS_MAX] == there, "%u sessions are listed, %u are there",
          run->done[OP_KINDS_MAX], there);
    compare_text(run, below(run, NAMES));
}

/* --- a seed */

static int (*const ops[])(struct run *run, uint32_t index) = {
    op_say,   op_say,   op_say,    op_rewind, op_rewind,      op_fork,   op_fork, op_revert,
    op_untag, op_untag, op_rename, op_pin,    op_lost_branch, op_remove, op_gc,   op_purge,
};
enum { OP_KINDS = sizeof ops / sizeof ops[0] };

static void end_seed(struct run *run) {
    struct kv_diag diag = {""};
    struct store_stats stats;
    for (uint32_t i = 0; i < NAMES; i++) {
        struct restore_check check;
        if (!run->sessions[i].exists)
            continue;
        expect(run, restore_verify(run->store, run->writer.alloc, name_of(i), &check, &diag), KV_OK,
               "verify", &diag);
        compare_text(run, i);
        run->sessions[i].pinned = 0;
        expect(run, snap_tree_pin(&run->tree, name_of(i), 0, &diag), KV_OK, "unpin", &diag);
        CHECK(run, op_remove(run, i), "%s stays", name_of(i));
        compare(run);
    }
    store_stats_get(run->store, &stats);
    CHECK(run, stats.records == 0 && stats.live_bytes == 0, "%llu records are left",
          (unsigned long long)stats.records);
}

static void one_seed(struct run *run, uint64_t seed) {
    run->seed = seed;
    testing_random_init(&run->random, seed);
    for (run->op = 0; run->op < OPS; run->op++) {
        uint32_t kind = below(run, OP_KINDS);
        run->done[kind] += ops[kind](run, below(run, NAMES)) != 0;
        compare(run);
    }
    end_seed(run);
}

static void operations_against_a_model(void **state) {
    (void)state;
    static struct run run;
    struct support_engine_options engine = support_engine_default();
    if (seeds_wanted == 0)
        seeds_wanted = testing_quick() ? 100 : 1000;
    engine.slots = 72; /* one session needs as many; nothing computes here */
    engine.sessions_max = 1;
    testing_temp_dir(run.dir);
    support_wall_set(0); /* the bytes written here lie in plain memory */
    run.engine = support_engine_tiny(&engine);
    open_store(&run, 0);
    run.writer.engine = run.engine;
    run.writer.alloc = run.tree.alloc = kv_alloc_system();
    run.writer.clock = run.tree.clock = kv_clock_system();
    uint64_t first = testing_seed("operations", 20261129);
    for (uint64_t i = 0; i < seeds_wanted; i++)
        one_seed(&run, first + i);
    uint32_t changed = 0;
    for (uint32_t i = 0; i < OP_KINDS; i++) {
        changed += run.done[i];
        assert_true(8 * run.done[i] > seeds_wanted);
    }
    printf("%llu seeds of %d operations, %u changed something: all as the model says\n",
           (unsigned long long)seeds_wanted, OPS, changed);
    store_close(run.store);
    engine_close(run.engine);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(operations_against_a_model)};
    if (argc > 1)
        seeds_wanted = strtoull(argv[1], NULL, 10);
    if (access("/dev/shm", W_OK) == 0)
        setenv("TMPDIR", "/dev/shm", 0);
    return testing_run(1, argv, tests, sizeof tests / sizeof tests[0]);
}
