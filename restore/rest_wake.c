/* restore/rest_wake.c - plan, reserve, load, publish, prove, receipt.
 *
 * Responsible for: the order of these, what is undone when one fails, the receipt.
 * Not responsible for: any of the steps themselves, or what comes behind (rest_refine.c).
 */
#include "restore/restore.h"

#include "restore/rest_layers.h"
#include "restore/rest_load.h"
#include "restore/rest_plan.h"
#include "restore/rest_prove.h"
#include "restore/rest_refine.h"
#include "store/store_ram.h"

#include <string.h>

struct wake {
    const struct restore_source *source;
    const struct restore_options *options;
    struct rest_plan plan;
    struct engine_model model;
    struct transfer_load *load;
    struct rest_layers *layers; /* that follow the session's publishing; or NULL */
    struct session *session;
    struct receipt *receipt;
    uint64_t begun; /* the first attempt */
};

static void copy_text(char *to, size_t room, const char *from) {
    size_t length = strnlen(from, room - 1);
    memcpy(to, from, length);
    to[length] = 0;
}

static void describe(struct wake *wake) {
    struct receipt *receipt = wake->receipt;
    const struct image *image = &wake->plan.image;
    receipt->snapshot = wake->plan.snapshot;
    receipt->parent = wake->plan.record.parent;
    receipt->lineage = image->lineage;
    receipt->root = wake->plan.record.root;
    copy_text(receipt->architecture, sizeof receipt->architecture, image->model.architecture);
    receipt->model = image->model.tensors;
    receipt->numerics = image->model.numerics;
    receipt_history(receipt, image->policies, image->policy_count);
    receipt->tokens = image->n;
    receipt->image_bytes = wake->plan.image_stored_bytes;
}

static void describe_tiers(struct wake *wake) {
    for (uint32_t b = 0; b < wake->plan.image.block_count; b++) {
        enum layout_tier map = rest_plan_tier(&wake->plan, b);
        enum layout_tier tier = wake->options->tiers == RECEIPT_TIERS_EXACT
                                    ? map
                                    : image_floor(rest_plan_policy(&wake->plan));
        wake->receipt->tier_blocks[tier]++;
        wake->receipt->coarse_blocks += tier != map;
    }
    wake->receipt->degraded_blocks = rest_plan_degraded(&wake->plan);
}

static const enum transfer_tiers transfer_tiers[] = {[RECEIPT_TIERS_EXACT] = TRANSFER_EXACT,
                                                     [RECEIPT_TIERS_EAGER] = TRANSFER_EAGER,
                                                     [RECEIPT_TIERS_FLOOR] = TRANSFER_FLOOR};

/* Index and disk only: others step meanwhile. */
static enum kv_err plan_image(struct wake *wake, const char *name, struct kv_diag *diag) {
    const struct restore_source *source = wake->source;
    engine_away(source->engine);
    enum kv_err err = rest_plan_image(source->store, source->alloc, name, wake->options->snapshot,
                                      &wake->plan, diag);
    engine_back(source->engine);
    return err;
}

/* A record for every block. Token ids come at once where they are in memory, as the image was, and
 * with everything else from a disk. */
static enum kv_err plan_records(struct wake *wake, struct kv_diag *diag) {
    engine_away(wake->source->engine);
    enum kv_err err = rest_plan_places(wake->source->store, &wake->plan, diag);
    if (err == KV_OK && wake->plan.read.ram_bytes != 0)
        err = rest_plan_ids(wake->source->store, &wake->plan, diag);
    engine_back(wake->source->engine);
    return err;
}

static enum kv_err plan_and_reserve(struct wake *wake, const char *name, struct kv_diag *diag) {
    const struct restore_source *source = wake->source;
    uint64_t begun = kv_clock_now_ns(source->clock);
    enum kv_err err = plan_image(wake, name, diag);
    if (err != KV_OK)
        return err;
    describe(wake);
    if (wake->options->as != NULL) {
        memset(wake->plan.image.name, 0, sizeof wake->plan.image.name);
        copy_text(wake->plan.image.name, sizeof wake->plan.image.name, wake->options->as);
    }
    if (session_find(source->engine, wake->plan.image.name) != NULL)
        return kv_diag_set(diag, KV_ERR_EXISTS, "session %s is awake already",
                           wake->plan.image.name);
    KV_TRY(image_compatible(&wake->plan.image.model, &wake->model.identity, diag));
    KV_TRY(plan_records(wake, diag));
    describe_tiers(wake);
    wake->receipt->door_bytes = wake->plan.read.read_bytes;
    wake->receipt->ram_bytes = wake->plan.read.ram_bytes;
    wake->receipt->digests_checked = wake->plan.digests_checked;
    uint64_t planned = kv_clock_now_ns(source->clock);
    wake->receipt->stage_ns[RECEIPT_PLAN] = planned - begun;
    err = transfer_load_begin(source->engine, &wake->plan.image,
                              transfer_tiers[wake->options->tiers], &wake->load, diag);
    wake->receipt->stage_ns[RECEIPT_RESERVE] = kv_clock_now_ns(source->clock) - planned;
    if (err == KV_OK)
        return KV_OK;
done:
    /* Records name the session themselves. */
    if (strncmp(diag->text, "session ", 8) != 0)
        kv_diag_prefix(diag, "session %s", name);
    return err;
}

/* What every layer needs, or the rest. Nobody can see the shadow yet: others step meanwhile. */
static enum kv_err list(struct wake *wake, int rest, struct rest_fetch *fetch,
                        struct kv_diag *diag) {
    engine_away(wake->source->engine);
    enum kv_err err = rest ? rest_fetch_rest(&wake->plan, wake->load, fetch, diag)
                           : rest_fetch_begin(&wake->plan, wake->load, fetch, diag);
    engine_back(wake->source->engine);
    return err;
}

/* All of it, or what must be there before the session is published. */
static enum kv_err load(struct wake *wake, struct kv_diag *diag) {
    const struct rest_load_args args = {wake->source, &wake->plan, wake->load, wake->options,
                                        wake->receipt};
    struct rest_fetch fetch;
    int in_doubt = 0;
    enum kv_err err = list(wake, 0, &fetch, diag);
    if (err == KV_OK)
        err = rest_layers_begin(&args, &fetch, &wake->layers, diag);
    if (err == KV_OK && wake->layers == NULL)
        err = list(wake, 1, &fetch, diag);
    if (err == KV_OK && wake->layers == NULL)
        err = rest_load_run(&args, &fetch, &in_doubt, diag);
    rest_fetch_release(&fetch);
    if (err == KV_OK)
        return KV_OK;
        /* Slots that a late read may still write stay reserved for good. */
#ifndef BREAK_SHADOW
    if (!in_doubt)
        transfer_load_abandon(wake->load);
#endif
    wake->load = NULL;
    kv_diag_prefix(diag, "session %s", wake->plan.image.name);
    return err;
}

/* From now on the session knows what is durable of it. */
static void remember(const struct wake *wake) {
    const struct image *image = &wake->plan.image;
    struct transfer_durable *durable = transfer_durable(wake->session);
    memset(durable, 0, sizeof *durable);
    durable->lineage = image->lineage;
    durable->snapshot = wake->plan.snapshot;
    durable->n_kv = image->n_kv;
    durable->head_explicit = wake->plan.record.is_explicit;
    durable->trim_pending = 1;
    durable->pinned = wake->plan.pinned;
    memcpy(durable->owner, wake->plan.owner, sizeof durable->owner);
    durable->block_count = image->block_count;
    durable->block_chain = image->block_chain;
    durable->root = wake->plan.record.root;
    durable->sinks = image->sinks;
    durable->page_count = image->page_count;
    memcpy(durable->pages, image->pages, sizeof durable->pages);
}

static enum kv_err publish(struct wake *wake, struct kv_diag *diag) {
    enum kv_err err = transfer_load_publish(wake->load, &wake->session, diag);
    if (err != KV_OK) {
        /* What still comes has its place until it was waited for. */
#ifndef BREAK_LAYERS_ABANDON
        (void)rest_layers_end(wake->layers, NULL);
        wake->layers = NULL;
#endif
        transfer_load_abandon(wake->load);
        wake->load = NULL;
        return err;
    }
    wake->load = NULL;
    remember(wake);
    return KV_OK;
}

/* The two fingerprints of a snapshot are one where its session read less than its tier map when it
 * was saved (snapshot/): it was never seen at that map, only at the floor. */
static int saved_coarse(const struct image *image) {
    return memcmp(&image->fingerprint, &image->fingerprint_floor, sizeof image->fingerprint) == 0;
}

static int above_floor(const struct wake *wake) {
    for (uint32_t b = 0; b < wake->plan.image.block_count; b++)
        if (rest_plan_tier(&wake->plan, b) != image_floor(rest_plan_policy(&wake->plan)))
            return 1;
    return 0;
}

/* Planes come behind only now, when everything before them is proven. */
static enum kv_err let_go_on(struct wake *wake) {
    if (wake->options->tiers != RECEIPT_TIERS_EAGER)
        return session_move(wake->session, SESSION_IDLE);
    if (wake->receipt->coarse_blocks != 0)
        rest_refine_begin(wake->source, wake->session, wake->receipt);
    session_refine(wake->session);
    return KV_OK;
}

static enum kv_err prove(struct wake *wake, struct kv_diag *diag) {
    const struct rest_prove_args args = {
        .session = wake->session,
        .image = &wake->plan.image,
        .here = &wake->model.identity,
        .skip_needles = wake->options->skip_needles,
        .at_floor = wake->receipt->degraded_blocks != 0 || wake->receipt->coarse_blocks != 0 ||
                    (saved_coarse(&wake->plan.image) && above_floor(wake)),
        .probes_max = wake->options->probes_max,
        .clock = wake->source->clock,
        .receipt = wake->receipt};
    struct session_info info;
    enum kv_err err = rest_prove(&args, diag);
    session_info(wake->session, &info);
    wake->receipt->tokens_reused = info.n_kv;
    wake->receipt->tokens_prefilled = info.tokens_prefilled;
    wake->receipt->slots = info.slots;
    wake->receipt->mixed_from = info.mixed_from;
    receipt_history(wake->receipt, info.policies, info.policy_count);
    if (err == KV_OK && info.n_kv != wake->plan.image.n_kv)
        err = kv_diag_set(diag, KV_ERR_PROOF, "%llu tokens have KV, saved were %llu",
                          (unsigned long long)info.n_kv, (unsigned long long)wake->plan.image.n_kv);
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s", wake->plan.image.name);
    return err;
}

/* What came of the layers is in the receipt already. */
static void describe_layers(struct wake *wake, const struct receipt_layers *at) {
    struct receipt_layers *layers = &wake->receipt->layers;
    layers->published_ns = at->published_ns;
    layers->proof_ns = at->proof_ns;
    layers->proven_ns = at->proven_ns;
    layers->last_ns = transfer_layers_last_ns(wake->session);
    uint64_t *const times[] = {&layers->published_ns, &layers->sent_ns,    &layers->first_ns,
                               &layers->copied_ns,    &layers->proof_ns,   &layers->last_ns,
                               &layers->proven_ns,    &layers->digested_ns};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++)
        *times[i] -= *times[i] != 0 ? wake->begun : 0;
}

/* Publishes and proves; where layers follow, beside them. What they come to is what counts, since
 * it names what is wrong. */
static enum kv_err publish_and_prove(struct wake *wake, struct kv_diag *diag) {
    const struct kv_clock *clock = wake->source->clock;
    uint64_t *stage_ns = wake->receipt->stage_ns;
    struct receipt_layers at = {0};
    struct kv_diag late = {""};
    uint64_t begun = kv_clock_now_ns(clock);
    enum kv_err err = publish(wake, diag);
    struct rest_layers *layers = wake->layers;
    at.published_ns = kv_clock_now_ns(clock);
    stage_ns[RECEIPT_PUBLISH] = at.published_ns - begun;
    int followed = err == KV_OK && layers != NULL;
    if (followed)
        err = rest_layers_follow(layers, wake->session, diag);
    at.proof_ns = kv_clock_now_ns(clock);
    if (err == KV_OK) {
        err = prove(wake, diag);
        at.proven_ns = kv_clock_now_ns(clock);
        stage_ns[RECEIPT_PROVE] = at.proven_ns - at.proof_ns;
        if (followed)
            stage_ns[RECEIPT_PROVE] -= transfer_layers_waited_ns(wake->session);
    }
    wake->layers = NULL;
    enum kv_err end = rest_layers_end(layers, &late);
    if (followed)
        describe_layers(wake, &at);
#ifdef BREAK_LAYERS_END
    end = KV_OK;
#endif
    if (end == KV_OK)
        return err;
    kv_diag_set(diag, end, "session %s: %s", wake->plan.image.name, late.text);
    return end;
}

static enum kv_err run(struct wake *wake, const char *name, struct kv_diag *diag) {
    const struct kv_clock *clock = wake->source->clock;
    struct receipt *receipt = wake->receipt;
    enum kv_err err = KV_OK;
    KV_TRY(plan_and_reserve(wake, name, diag));
    uint64_t at = kv_clock_now_ns(clock);
    err = load(wake, diag);
    receipt->load_ns = kv_clock_now_ns(clock) - at;
    if (err != KV_OK)
        return err;
    int follows = wake->layers != NULL;
    err = publish_and_prove(wake, diag);
    if (follows)
        receipt->load_ns = kv_clock_now_ns(clock) - at - receipt->stage_ns[RECEIPT_PUBLISH] -
                           receipt->stage_ns[RECEIPT_PROVE];
    if (err == KV_OK)
        err = let_go_on(wake);
done:
    if (err != KV_OK && wake->session != NULL) {
        session_drop(wake->session);
        wake->session = NULL;
    }
    return err;
}

enum kv_err restore_wake(const struct restore_source *source, const char *name,
                         const struct restore_options *options, struct session **session_out,
                         struct receipt *receipt_out, struct kv_diag *diag) {
    struct wake wake = {0};
    struct kv_diag own = {""};
    uint64_t begun = kv_clock_now_ns(source->clock);
    struct store_look look = {0};
    enum kv_err err = KV_OK;
    int again = 0, ram = 1;
    while (again || store_look(source->store, &look, err, &own)) {
        wake = (struct wake){.source = source, .options = options, .receipt = receipt_out};
        wake.begun = begun;
        wake.plan.ram = ram;
        memset(receipt_out, 0, sizeof *receipt_out);
        receipt_out->operation = RECEIPT_RESTORE;
        receipt_out->tiers = options->tiers;
        copy_text(receipt_out->name, sizeof receipt_out->name, name);
        engine_model(source->engine, &wake.model);
        store_hold(source->store);
        err = run(&wake, name, &own);
        store_unhold(source->store);
        rest_plan_release(&wake.plan);
        /* Damage in memory is not damage on disk: once more from there. */
        again = err == KV_ERR_CORRUPT && receipt_out->ram_bytes != 0;
        if (again) {
            store_ram_forget(source->store, receipt_out->lineage);
            kv_diag_clear(&own);
            ram = 0;
        }
    }
    /* Recency is of sessions that woke; one that cannot be woken pushes nobody out. */
    if (err == KV_OK)
        store_ram_touch(source->store, receipt_out->lineage);
    receipt_out->wall_ns = kv_clock_now_ns(source->clock) - begun;
    receipt_finish(receipt_out);
    if (err != KV_OK) {
        receipt_out->err = err;
        copy_text(receipt_out->reason, sizeof receipt_out->reason, own.text);
        return kv_diag_set(diag, err, "%s", own.text);
    }
    *session_out = wake.session;
    return KV_OK;
}
