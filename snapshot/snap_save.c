/* snapshot/snap_save.c - a save from the scheduler's side: plan, freeze, prove, queue, finish.
 *
 * Responsible for: refusing before anything happens, fingerprints and needles, the frozen state,
 * the ticket and its receipt, sleeping.
 * Not responsible for: writing (snap_commit.c) or the queue (snap_spill.c).
 */
#include "snapshot/snapshot.h"

#include "engine/needle.h"
#include "engine/probe.h"
#include "snapshot/snap_commit.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_retain.h"
#include "snapshot/snap_spill.h"
#include "snapshot/snap_tree.h"

#include <string.h>

static uint64_t now(const struct snapshot *snapshot) {
    return kv_clock_now_ns(snapshot->clock);
}

static void copy_text(char *to, size_t room, const char *from) {
    size_t length = strnlen(from, room - 1);
    memcpy(to, from, length);
    to[length] = 0;
}

static void ticket_drop(struct snapshot *snapshot, struct snapshot_ticket *ticket) {
    if (ticket == NULL)
        return;
    snap_spill_unsave(snapshot, ticket);
    transfer_frozen_release(snapshot->engine, &ticket->frozen);
    kv_alloc_release(snapshot->alloc, ticket);
}

/* Asked plain and with the hole, together; the records stay with the session and go into the
 * image. */
static enum kv_err ask_needles(struct session *session, struct receipt *receipt,
                               struct kv_diag *diag) {
    const struct needle_question question = {.with_hole = 1, .floor = 0, .update = 1};
    uint32_t indices[IMAGE_NEEDLES_MAX], count = 0;
    struct needle_result results[IMAGE_NEEDLES_MAX];
    (void)transfer_needles(session, &count);
    for (uint32_t i = 0; i < count; i++)
        indices[i] = i;
    const struct needle_list list = {indices, count};
    enum kv_err err = needle_check_all(session, &list, &question, results, diag);
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        receipt->needles_asked += results[i].asked != 0;
        receipt->needles_passed += results[i].asked && results[i].passed;
    }
    return err;
}

static enum kv_err choose_probes(struct snapshot *snapshot, struct session *session,
                                 struct receipt *receipt, struct kv_diag *diag) {
    struct probe_report report;
    uint64_t begun = now(snapshot);
    enum kv_err err = probe_choose(session, snapshot->probes, &report, diag);
    if (err != KV_OK)
        return err;
    receipt->probes_tried = report.tried;
    receipt->probes_ns = now(snapshot) - begun;
    return KV_OK;
}

static int want_page(void *context, uint64_t first, uint32_t tokens) {
    return snap_line_page(context, first, tokens) == NULL;
}

/* As attention really reads: some blocks have given up planes of the tier that they should have. */
static void describe_degraded(struct receipt *receipt, const struct session_info *info) {
    for (int i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (receipt->tier_blocks[i] > info->tier_blocks[i])
            receipt->degraded_blocks += receipt->tier_blocks[i] - info->tier_blocks[i];
}

static void describe(struct snapshot_ticket *ticket, const struct session_info *info) {
    const struct image *image = &ticket->frozen.image;
    struct receipt *receipt = &ticket->receipt;
    const struct image_policy *policy = &image->policies[image->policy_count - 1].policy;
    copy_text(receipt->architecture, sizeof receipt->architecture, image->model.architecture);
    receipt->model = image->model.tensors;
    receipt->numerics = image->model.numerics;
    receipt_history(receipt, image->policies, image->policy_count);
    receipt->tokens = image->n;
    receipt->tokens_reused = (uint64_t)ticket->found_blocks * LAYOUT_BLOCK_TOKENS;
    receipt->slots = info->slots;
    receipt->fingerprint = RECEIPT_NOT_ASKED;
    for (uint32_t b = 0; b < image->block_count; b++)
        receipt->tier_blocks[image_tier(policy, b, image->n_kv)]++;
    receipt->mixed_from = info->mixed_from;
    receipt->coarse_blocks = info->coarse_blocks;
    receipt->seen_count = info->seen_count;
    memcpy(receipt->seen, info->seen, sizeof receipt->seen);
    if (info->mixed_from != 0 && !info->held_at_floor)
        describe_degraded(receipt, info);
    memcpy(receipt->tier_blocks, info->tier_blocks, sizeof receipt->tier_blocks);
    receipt->probes_kept = image->probe_count;
    receipt->needles_recorded = image->needle_count;
    for (uint32_t i = 0; i < image->needle_count; i++)
        receipt->needles_kept += image->needles[i].kept != 0;
}

/* Others step between two questions; the session stays as it was when the first was asked. */
static enum kv_err ask(struct snapshot *snapshot, struct session *session, struct receipt *receipt,
                       struct kv_diag *diag) {
    session_ask_breathe(session);
    enum kv_err err = ask_needles(session, receipt, diag);
    session_ask_breathe(session);
    return err == KV_OK ? choose_probes(snapshot, session, receipt, diag) : err;
}

/* What is asked, and the fingerprints. */
static enum kv_err prove(struct snapshot *snapshot, struct session *session,
                         struct snapshot_ticket *ticket, struct image_fingerprint *prints_out,
                         uint64_t *asked_ns_out, struct kv_diag *diag) {
    uint64_t begun = now(snapshot);
    enum kv_err err = KV_OK;
    session_fingerprints_along(session);
    if (ticket->options.ask)
        err = ask(snapshot, session, &ticket->receipt, diag);
    *asked_ns_out = now(snapshot) - begun;
    if (err == KV_OK)
        err = session_fingerprints_take(session, prints_out, diag);
    ticket->receipt.stage_ns[RECEIPT_PROVE] = now(snapshot) - begun;
#ifdef BREAK_PROOF_FAILED
    err = KV_OK;
#endif
    return err;
}

/* Bytes first: helpers zip them while the session is asked. */
static enum kv_err freeze(struct snapshot *snapshot, struct session *session,
                          struct snap_line *line, struct snapshot_ticket *ticket,
                          uint64_t *asked_ns_out, struct kv_diag *diag) {
    struct image_fingerprint prints[SESSION_PRINTS];
    struct image *image = &ticket->frozen.image;
    struct session_info info;
    uint64_t begun = now(snapshot);
    ticket->before = *transfer_durable(session);
    enum kv_err err =
        transfer_freeze_pages(session, want_page, &ticket->before, &ticket->frozen, diag);
    if (err == KV_OK)
        err = snap_spill_pages(snapshot, line, ticket, diag);
    ticket->receipt.stage_ns[RECEIPT_FREEZE] = now(snapshot) - begun;
    if (err == KV_OK)
        err = prove(snapshot, session, ticket, prints, asked_ns_out, diag);
    if (err != KV_OK)
        return err;
    begun = now(snapshot);
    err = transfer_freeze_image(session, &ticket->frozen, diag);
    if (err != KV_OK)
        return err;
    session_info(session, &info);
    /* Read at less than its tier map, for planes could not be read back: at that map it cannot be
     * proven later, so both are the floor's, which says just this (restore/). */
#ifndef BREAK_COARSE_SAVE
    if (info.coarse_blocks != 0)
        prints[0] = prints[1];
#endif
    image->fingerprint = prints[0];
    image->fingerprint_floor = prints[1];
    image->created_ns = kv_clock_wall_ns(snapshot->clock);
    describe(ticket, &info);
    ticket->receipt.stage_ns[RECEIPT_FREEZE] += now(snapshot) - begun;
    return KV_OK;
}

static enum kv_err take_tag(struct snapshot *snapshot, struct snapshot_ticket *ticket,
                            const char *name, const char *tag, struct kv_diag *diag) {
    const struct snap_tree_place place = {name, tag};
    enum kv_err err = snap_tree_tag_free(snapshot->store, &place, diag);
    if (err != KV_OK)
        return err;
    copy_text(ticket->tag, sizeof ticket->tag, tag);
    ticket->options.is_explicit = 1;
    return KV_OK;
}

/* Everything that the thread has said so far reaches blocks and sessions. */
static void settle(struct snapshot *snapshot) {
    snap_spill_apply(snapshot);
    engine_apply(snapshot->engine);
}

/* Planes that come behind the session are waited for: a fingerprint is of a whole tier map. */
static void settle_planes(struct snapshot *snapshot, struct session *session) {
    while (session_promoting(session) && engine_apply(snapshot->engine))
        ;
}

/* From the frozen bytes to the last question it is one session: nobody saves it besides, lowers it
 * or puts it to sleep, though others step between two questions. */
static enum kv_err freeze_still(struct snapshot *snapshot, struct session *session,
                                struct snap_line *line, struct snapshot_ticket *ticket,
                                uint64_t *asked_ns_out, struct kv_diag *diag) {
    line->saving = 1;
    (void)session_move(session, SESSION_SAVING);
    session_ask_begin(session);
    session_ask_patiently(session, ticket->options.patient);
    /* What is sealed already stays as it is: it is written while the session is asked. To queue
     * hundreds of blocks takes as long as a piece of a question. */
    snap_spill_requeue(snapshot, line, session);
    session_ask_breathe(session);
    enum kv_err err = freeze(snapshot, session, line, ticket, asked_ns_out, diag);
    session_ask_patiently(session, 0);
    session_ask_end(session);
    return err;
}

static void give_up(struct session *session, struct snap_line *line) {
    struct session_info info;
    session_brief(session, &info);
    line->saving = 0;
    if (info.state == SESSION_SAVING)
        (void)session_move(session, SESSION_IDLE);
}

enum kv_err snapshot_begin(struct snapshot *snapshot, struct session *session,
                           const struct snapshot_options *options,
                           struct snapshot_ticket **ticket_out, struct kv_diag *diag) {
    struct snapshot_ticket *ticket = NULL;
    struct snap_line *line = NULL;
    struct snapshot_plan plan;
    struct session_info info;
    uint64_t begun = now(snapshot), asked_ns = 0;
    enum kv_err err = KV_OK;
    settle(snapshot);
    settle_planes(snapshot, session);
    session_brief(session, &info);
    KV_TRY(snapshot_plan_save(snapshot, session, &plan, diag));
    KV_TRY(snap_line_of(&snapshot->lines, session, &line, diag));
    if (line->saving)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "session %s is being saved already: wait for that save", info.name);
    ticket = kv_alloc_zeroed(snapshot->alloc, 1, sizeof *ticket);
    if (ticket == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to save session %s", info.name);
    ticket->owner = snapshot;
    ticket->options = *options;
    ticket->options.tag = NULL;
    if (options->tag != NULL)
        KV_TRY(take_tag(snapshot, ticket, info.name, options->tag, diag));
    ticket->operation = options->asleep ? RECEIPT_SLEEP : RECEIPT_SAVE;
    ticket->begun_ns = begun;
    ticket->receipt.stage_ns[RECEIPT_PLAN] = now(snapshot) - begun;
    ticket->found_blocks = transfer_durable(session)->block_count;
    KV_TRY(freeze_still(snapshot, session, line, ticket, &asked_ns, diag));
    ticket->receipt.blocked_ns = now(snapshot) - begun - asked_ns;
    snap_spill_requeue(snapshot, line, session);
    snap_spill_save(snapshot, ticket);
    *ticket_out = ticket;
    ticket = NULL;
done:
    if (err != KV_OK && line != NULL)
        give_up(session, line);
    ticket_drop(snapshot, ticket);
    return err;
}

int snapshot_done(const struct snapshot_ticket *ticket) {
    return atomic_load(&ticket->done);
}

/* What was not made durable counts as nothing written. */
static void fail_receipt(struct receipt *receipt, enum kv_err err, const struct kv_diag *diag) {
    receipt->err = err;
    copy_text(receipt->reason, sizeof receipt->reason, diag->text);
    memset(receipt->raw_bytes, 0, sizeof receipt->raw_bytes);
    memset(receipt->stored_bytes, 0, sizeof receipt->stored_bytes);
    receipt->image_bytes = receipt->record_bytes = receipt->door_bytes = 0;
    receipt->blocks = receipt->pages = 0;
    receipt->snapshot = 0;
}

enum kv_err snapshot_finish(struct snapshot *snapshot, struct snapshot_ticket *ticket,
                            struct receipt *receipt_out, struct kv_diag *diag) {
    snap_spill_wait(snapshot, ticket);
    settle(snapshot);
    enum kv_err err = ticket->err;
    ticket->receipt.operation = ticket->operation;
    copy_text(ticket->receipt.name, sizeof ticket->receipt.name, ticket->frozen.image.name);
    if (err != KV_OK) {
        fail_receipt(&ticket->receipt, err, &ticket->diag);
        kv_diag_set(diag, err, "%s", ticket->diag.text);
    }
    ticket->receipt.wall_ns = now(snapshot) - ticket->begun_ns;
    receipt_finish(&ticket->receipt);
    *receipt_out = ticket->receipt;
    ticket_drop(snapshot, ticket);
    return err;
}

static enum kv_err try_save(struct snapshot *snapshot, struct session *session,
                            const struct snapshot_options *options, struct receipt *receipt_out,
                            struct kv_diag *diag) {
    struct snapshot_ticket *ticket = NULL;
    struct session_info info;
    struct kv_diag own = {""};
    memset(receipt_out, 0, sizeof *receipt_out);
    session_brief(session, &info);
    enum kv_err err = snapshot_begin(snapshot, session, options, &ticket, &own);
    if (err == KV_OK)
        return snapshot_finish(snapshot, ticket, receipt_out, diag);
    receipt_out->operation = options->asleep ? RECEIPT_SLEEP : RECEIPT_SAVE;
    copy_text(receipt_out->name, sizeof receipt_out->name, info.name);
    fail_receipt(receipt_out, err, &own);
    return kv_diag_set(diag, err, "%s", own.text);
}

void snapshot_may_degrade(struct snapshot *snapshot, int may_degrade) {
    snapshot->may_degrade = may_degrade != 0;
}

static int is_resident(void *context, const char *name) {
    struct snapshot *snapshot = context;
    return session_find(snapshot->engine, name) != NULL;
}

struct snap_retain_leave snapshot_leave(struct snapshot *snapshot) {
    return (struct snap_retain_leave){snapshot->may_degrade, is_resident, snapshot};
}

/* What the save may take of the budget at most, with what the store keeps back for the growth of
 * its index and for removals. */
static uint64_t need_of(struct snapshot *snapshot, struct session *session) {
    const uint64_t kept_back = (uint64_t)1 << 20;
    struct snapshot_plan plan;
    enum kv_err err = snapshot_plan_save(snapshot, session, &plan, NULL);
    return kept_back + (err == KV_OK ? plan.bytes_max : 0);
}

/* 1 when another try is worth it. */
static int make_room(struct snapshot *snapshot, struct session *session,
                     struct snap_retain_sum *made) {
    int changed = 0;
    snapshot_drain(snapshot);
    const struct snap_retain_args args = {.store = snapshot->store,
                                          .alloc = snapshot->alloc,
                                          .clock = snapshot->clock,
                                          .may_degrade = snapshot->may_degrade,
                                          .need_bytes = need_of(snapshot, session),
                                          .is_busy = is_resident,
                                          .context = snapshot};
    snap_spill_writer_take(snapshot);
    (void)snap_retain_make_room(&args, made, &changed, NULL);
    snapshot_writer_give(snapshot);
    return changed;
}

/* A budget that is reached is a refusal; a disk that is full is a failure of the world. */
static enum kv_err refuse(struct snapshot *snapshot, struct session *session,
                          struct receipt *receipt, struct kv_diag *diag) {
    struct store_stats stats;
    struct session_info info;
    struct kv_diag own = {""};
    store_stats_get(snapshot->store, &stats);
    if (stats.bytes_max == STORE_BYTES_UNLIMITED || stats.room_bytes >= need_of(snapshot, session))
        return KV_ERR_NO_SPACE;
    session_brief(session, &info);
    kv_diag_set(
        &own, KV_ERR_LIMIT,
        "session %s was not saved: it may need %llu bytes, of %llu (store-max) %llu are left; "
        "remove sessions, name one with `coldplane expire`, %sor raise store-max",
        info.name, (unsigned long long)need_of(snapshot, session),
        (unsigned long long)stats.bytes_max, (unsigned long long)stats.room_bytes,
        snapshot->may_degrade ? "" : "allow --may-degrade, ");
    receipt->err = KV_ERR_LIMIT;
    copy_text(receipt->reason, sizeof receipt->reason, own.text);
    return kv_diag_set(diag, KV_ERR_LIMIT, "%s", own.text);
}

static enum kv_err save(struct snapshot *snapshot, struct session *session,
                        const struct snapshot_options *options, struct receipt *receipt_out,
                        struct kv_diag *diag) {
    struct snap_retain_sum made = {0};
    uint64_t begun = now(snapshot);
    enum kv_err err = try_save(snapshot, session, options, receipt_out, diag);
    while (err == KV_ERR_NO_SPACE && make_room(snapshot, session, &made)) {
        kv_diag_clear(diag);
        err = try_save(snapshot, session, options, receipt_out, diag);
    }
    if (err == KV_ERR_NO_SPACE)
        err = refuse(snapshot, session, receipt_out, diag);
    receipt_out->lowered_sessions = made.lowered;
    receipt_out->removed_snapshots = made.snapshots;
    receipt_out->removed_sessions = made.sessions;
    receipt_out->given_bytes = made.bytes;
    receipt_out->wall_ns = now(snapshot) - begun;
    return err;
}

enum kv_err snapshot_save(struct snapshot *snapshot, struct session *session,
                          const struct snapshot_options *options, struct receipt *receipt_out,
                          struct kv_diag *diag) {
    return save(snapshot, session, options, receipt_out, diag);
}

/* --- going back */

/* The head of a session that is saved as it is: BUSY otherwise. */
static enum kv_err read_head(struct snapshot *snapshot, struct session *session,
                             struct record_snapshot *head_out, struct kv_diag *diag) {
    const struct transfer_durable *durable = transfer_durable(session);
    struct session_info info;
    session_brief(session, &info);
    if (durable->snapshot == 0)
        return kv_diag_set(diag, KV_ERR_BUSY, "session %s is not saved yet: save it first",
                           info.name);
    enum kv_err err = snap_gc_snapshot(snapshot->store, durable->snapshot, head_out, diag);
    if (err == KV_OK && (head_out->n != info.n || head_out->n_kv != info.n_kv))
        err = kv_diag_set(diag, KV_ERR_BUSY,
                          "session %s has %llu tokens and %llu of them are saved: save it first",
                          info.name, (unsigned long long)info.n, (unsigned long long)head_out->n);
    return err;
}

/* Blocks that stay when session_rewind goes back to `n`. */
static uint32_t blocks_kept(const struct session_info *info, uint64_t n) {
    uint64_t pending = n > 0 ? n - 1 : 0;
    return layout_sealed_blocks(pending) == info->blocks || n == info->n
               ? info->blocks
               : (uint32_t)layout_sealed_blocks(n);
}

enum kv_err snapshot_rewind(struct snapshot *snapshot, struct session *session, uint64_t n,
                            struct kv_diag *diag) {
    struct transfer_durable *durable = transfer_durable(session);
    struct session_info info;
    struct record_snapshot head;
    struct snap_line *line = NULL;
    struct transfer_durable after = *durable;
    enum kv_err err = KV_OK;
    snapshot_drain(snapshot);
    settle(snapshot);
    settle_planes(snapshot, session);
    session_brief(session, &info);
    KV_TRY(read_head(snapshot, session, &head, diag));
    uint32_t keep = blocks_kept(&info, n);
    /* Everything that can fail comes before the session changes. */
    after.lineage = head.lineage;
    KV_TRY(snap_line_go_back(snapshot->store, keep, &after, diag));
    KV_TRY(snap_line_of(&snapshot->lines, session, &line, diag));
    KV_TRY(session_rewind(session, n, diag));
    snap_line_forget(&snapshot->lines, line);
    session_brief(session, &info);
    snap_line_forget_pages(&after, keep == durable->block_count ? info.n_kv : 0, info.n_kv);
    *durable = after;
done:
    return err;
}

/* The writer is held from before the lineage has a record until its line is there: no gc comes
 * between and finds a lineage of nobody. */
static enum kv_err branch_to(struct snapshot *snapshot, struct session *session, uint64_t n,
                             const struct transfer_durable *after, const char *source,
                             struct kv_diag *diag) {
    struct transfer_durable *durable = transfer_durable(session);
    struct session_info info;
    struct snap_line *line = NULL;
    session_brief(session, &info);
    enum kv_err err = snap_commit_branch(snapshot, after, info.name, source, diag);
    if (err != KV_OK)
        return err;
    if (n < info.n)
        err = session_rewind(session, n, diag);
    if (err != KV_OK) {
        struct snap_gc gc = {.store = snapshot->store, .alloc = snapshot->alloc};
        (void)snap_gc_drop_lineage(&gc, after->lineage, NULL);
        return err;
    }
    *durable = *after;
    durable->snapshot = durable->n_kv = 0;
    durable->head_explicit = durable->head_kept = durable->pinned = 0;
    durable->sinks.page_id = 0;
    durable->page_count = 0;
    memset(&durable->root, 0, sizeof durable->root);
    return snap_line_of(&snapshot->lines, session, &line, diag);
}

enum kv_err snapshot_branch(struct snapshot *snapshot, struct session *session, uint64_t n,
                            struct kv_diag *diag) {
    struct transfer_durable after = *transfer_durable(session);
    struct session_info info;
    struct record_snapshot head;
    int exists = 0;
    enum kv_err err = KV_OK;
    snapshot_drain(snapshot);
    settle(snapshot);
    session_brief(session, &info);
    KV_TRY(read_head(snapshot, session, &head, diag));
    struct record_key key = record_key_name(info.name);
    KV_TRY(store_exists(snapshot->store, key.bytes, key.size, &exists, diag));
    if (exists)
        KV_TRY(kv_diag_set(diag, KV_ERR_EXISTS, "a stored session has the name %s", info.name));
    if (n == 0 || n > info.n)
        KV_TRY(kv_diag_set(diag, KV_ERR_INVALID,
                           "session %s has %llu tokens: none of its own can begin with %llu",
                           info.name, (unsigned long long)info.n, (unsigned long long)n));
    after.lineage = head.lineage;
    KV_TRY(snap_line_go_back(snapshot->store, blocks_kept(&info, n), &after, diag));
    KV_TRY(snap_line_fresh_id(snapshot->store, record_key_lineage, &after.lineage, diag));
    snap_spill_writer_take(snapshot);
    err = branch_to(snapshot, session, n, &after, head.name, diag);
    snapshot_writer_give(snapshot);
done:
    return err;
}

enum kv_err snapshot_sleep(struct snapshot *snapshot, struct session *session, int patient,
                           struct receipt *receipt_out, struct kv_diag *diag) {
#ifdef BREAK_WAITED_SLEEP
    patient = 1;
#endif
    const struct snapshot_options options = {.ask = 1, .asleep = 1, .patient = patient};
    struct session_info info;
    enum kv_err err = KV_OK;
    session_brief(session, &info);
    memset(receipt_out, 0, sizeof *receipt_out);
    /* Nothing was said in it and nothing is stored: there is nothing to lose. */
    int is_empty = info.n == 0 && transfer_durable(session)->snapshot == 0;
#ifdef BREAK_EMPTY_SLEEP
    is_empty = 0;
#endif
    if (!is_empty)
        err = save(snapshot, session, &options, receipt_out, diag);
    if (err == KV_OK)
        snap_spill_leave(snapshot, session);
    return err;
}
