/* tools/recompute.c - a stored session made again from its tokens instead of its memory.
 *
 * Responsible for: the contract of recompute.h.
 * Not responsible for: what the next save does with the head before (snapshot/snap_commit.c).
 */
#include "tools/recompute.h"

#include "tools/turn.h"

#include <string.h>

struct recomputing {
    struct service *service;
    const struct recompute_args *args;
    struct image image;
    struct session *session;
    int stopped;
};

static void on_prefilled(void *context, uint64_t n_kv, uint64_t all) {
    struct recomputing *recomputing = context;
    (void)all;
    recomputing->stopped =
        recomputing->args->progress != NULL &&
        !recomputing->args->progress(recomputing->args->context, n_kv, recomputing->image.n);
}

static int is_stopped(void *context) {
    const struct recomputing *recomputing = context;
    return recomputing->stopped;
}

static const struct image_policy *policy_of(const struct image *image) {
    return &image->policies[image->policy_count - 1].policy;
}

static enum kv_err make(struct recomputing *recomputing, struct kv_diag *diag) {
    struct engine *engine = service_engine(recomputing->service);
    const struct image *image = &recomputing->image;
    struct engine_model model;
    struct session_settings settings = {
        .name = image->name, .policy = *policy_of(image), .sampler = image->sampler};
    /* What it had given up under pressure is made anew. */
    memset(settings.policy.ends, 0, sizeof settings.policy.ends);
    engine_model(engine, &model);
    enum kv_err err = image_compatible(&image->model, &model.identity, diag);
    if (err == KV_OK)
        err = service_make_room(recomputing->service,
                                engine_plan_slots(engine, &settings.policy, image->n), NULL, diag);
    if (err == KV_OK)
        err = session_create(engine, &settings, &recomputing->session, diag);
    return err;
}

/* Span by span, so that the roles are the same and turns end where they ended. */
static enum kv_err prefill(struct recomputing *recomputing, struct kv_diag *diag) {
    const struct image *image = &recomputing->image;
    const struct turn_work work = {on_prefilled, is_stopped, recomputing};
    uint64_t at = 0;
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; i <= image->role_count && err == KV_OK && at < image->n; i++) {
        struct image_span span = {IMAGE_RAW, image->n, image->n};
        if (i < image->role_count)
            span = image->roles[i];
        if (span.first > at)
            err = session_feed(recomputing->session, image->ids + at, (uint32_t)(span.first - at),
                               IMAGE_RAW, diag);
        if (err == KV_OK && span.end > span.first)
            err = session_feed(recomputing->session, image->ids + span.first,
                               (uint32_t)(span.end - span.first), span.role, diag);
        at = span.end;
        if (err == KV_OK)
            err = turn_work(recomputing->service, recomputing->session, &work, diag);
    }
    return err;
}

static enum kv_err keep_needles(struct recomputing *recomputing, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; err == KV_OK && i < recomputing->image.needle_count; i++) {
        struct image_needle needle = recomputing->image.needles[i];
        needle.asked_n_kv = 0;
        err = transfer_add_needle(recomputing->session, &needle, diag);
    }
    return err;
}

/* As after going back to the beginning: the head stays under a tag once the next save moves it.
 * Blocks that were sealed meanwhile stand under a lineage without a parent, as they should. */
static void stand_behind(struct recomputing *recomputing, const struct snapshot_entry *entry) {
    struct transfer_durable *durable = transfer_durable(recomputing->session);
    durable->snapshot = entry->snapshot;
    durable->root = entry->head.root;
    durable->head_explicit = entry->head.is_explicit;
    durable->head_kept = 1;
}

static void fill_receipt(const struct recomputing *recomputing, struct receipt *receipt) {
    struct session_info info;
    const struct image *image = &recomputing->image;
    session_info(recomputing->session, &info);
    memcpy(receipt->architecture, image->model.architecture, sizeof receipt->architecture);
    receipt->model = image->model.tensors;
    receipt->numerics = image->model.numerics;
    receipt_history(receipt, info.policies, info.policy_count);
    receipt->tokens = info.n;
    receipt->tokens_prefilled = info.tokens_prefilled;
    receipt->slots = info.slots;
    receipt->needles_recorded = image->needle_count;
    memcpy(receipt->tier_blocks, info.tier_blocks, sizeof receipt->tier_blocks);
}

enum kv_err recompute_session(struct service *service, const struct recompute_args *args,
                              struct session **session_out, struct receipt *receipt_out,
                              struct kv_diag *diag) {
    struct recomputing recomputing = {.service = service, .args = args};
    struct store *store = service_store(service);
    const struct kv_alloc *alloc = service_alloc(service);
    struct snapshot_entry entry;
    uint64_t begun = kv_clock_now_ns(service_clock(service));
    enum kv_err err = KV_OK;
    image_init(&recomputing.image);
    memset(receipt_out, 0, sizeof *receipt_out);
    receipt_out->operation = RECEIPT_RESTORE;
    memcpy(receipt_out->name, args->name, strnlen(args->name, IMAGE_NAME_BYTES_MAX));
    KV_TRY(snapshot_find(store, alloc, args->name, &entry, diag));
    KV_TRY(restore_image(store, alloc, args->name, &recomputing.image, diag));
    KV_TRY(make(&recomputing, diag));
    stand_behind(&recomputing, &entry);
    KV_TRY(prefill(&recomputing, diag));
    KV_TRY(keep_needles(&recomputing, diag));
    fill_receipt(&recomputing, receipt_out);
    *session_out = recomputing.session;
    recomputing.session = NULL;
done:
    if (recomputing.session != NULL)
        service_drop(service, recomputing.session);
    image_release(&recomputing.image, alloc);
    receipt_out->err = err;
    receipt_out->wall_ns = kv_clock_now_ns(service_clock(service)) - begun;
    receipt_finish(receipt_out);
    return err;
}
