/* restore/rest_wake.c - plan, reserve, load, publish, prove, receipt.
 *
 * Responsible for: the order of these, what is undone when one fails, the receipt; reading back
 * planes of a live block.
 * Not responsible for: any of the steps themselves.
 */
#include "restore/restore.h"

#include "restore/rest_load.h"
#include "restore/rest_plan.h"
#include "restore/rest_prove.h"
#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

/* Another process may move what was looked up here; then it is looked up again. */
enum { ATTEMPTS = 3 };

struct wake {
    const struct restore_source *source;
    const struct restore_options *options;
    struct rest_plan plan;
    struct engine_model model;
    struct transfer_load *load;
    struct session *session;
    struct receipt *receipt;
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
    receipt->policy = *rest_plan_policy(&wake->plan);
    receipt->tokens = image->n;
    receipt->image_bytes = wake->plan.image_stored_bytes;
}

static void describe_tiers(struct wake *wake) {
    for (uint32_t b = 0; b < wake->plan.image.block_count; b++)
        wake->receipt->tier_blocks[rest_plan_tier(&wake->plan, b)]++;
    wake->receipt->degraded_blocks = rest_plan_degraded(&wake->plan);
}

static enum kv_err plan_and_reserve(struct wake *wake, const char *name, struct kv_diag *diag) {
    const struct restore_source *source = wake->source;
    enum kv_err err = rest_plan_image(source->store, source->alloc, name, wake->options->snapshot,
                                      &wake->plan, diag);
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
    KV_TRY(rest_plan_records(source->store, &wake->plan, diag));
    describe_tiers(wake);
    wake->receipt->door_bytes = wake->plan.read.read_bytes;
    wake->receipt->digests_checked = wake->plan.digests_checked;
    KV_TRY(transfer_load_begin(source->engine, &wake->plan.image, 0, &wake->load, diag));
    return KV_OK;
done:
    /* Records name the session themselves. */
    if (strncmp(diag->text, "session ", 8) != 0)
        kv_diag_prefix(diag, "session %s", name);
    return err;
}

static enum kv_err load(struct wake *wake, struct kv_diag *diag) {
    const struct rest_load_args args = {wake->source, &wake->plan, wake->load, wake->options,
                                        wake->receipt};
    int in_doubt = 0;
    enum kv_err err = rest_load_run(&args, &in_doubt, diag);
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
        transfer_load_abandon(wake->load);
        wake->load = NULL;
        return err;
    }
    wake->load = NULL;
    remember(wake);
    return KV_OK;
}

static enum kv_err prove(struct wake *wake, struct kv_diag *diag) {
    const struct rest_prove_args args = {.session = wake->session,
                                         .image = &wake->plan.image,
                                         .here = &wake->model.identity,
                                         .skip_needles = wake->options->skip_needles,
                                         .degraded = wake->receipt->degraded_blocks != 0,
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
    if (err == KV_OK && info.n_kv != wake->plan.image.n_kv)
        err = kv_diag_set(diag, KV_ERR_PROOF, "%llu tokens have KV, saved were %llu",
                          (unsigned long long)info.n_kv, (unsigned long long)wake->plan.image.n_kv);
    if (err == KV_OK)
        err = session_move(wake->session, SESSION_IDLE);
    if (err != KV_OK)
        kv_diag_prefix(diag, "session %s", wake->plan.image.name);
    return err;
}

static enum kv_err run(struct wake *wake, const char *name, struct kv_diag *diag) {
    const struct kv_clock *clock = wake->source->clock;
    uint64_t *stage_ns = wake->receipt->stage_ns;
    enum kv_err err = KV_OK;
    uint64_t at = kv_clock_now_ns(clock);
    KV_TRY(plan_and_reserve(wake, name, diag));
    stage_ns[RECEIPT_PLAN] = kv_clock_now_ns(clock) - at;
    KV_TRY(load(wake, diag));
    at = kv_clock_now_ns(clock);
    KV_TRY(publish(wake, diag));
    uint64_t published = kv_clock_now_ns(clock);
    stage_ns[RECEIPT_PUBLISH] = published - at;
    err = prove(wake, diag);
    stage_ns[RECEIPT_PROVE] = kv_clock_now_ns(clock) - published;
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
    enum kv_err err = KV_ERR_CORRUPT;
    int moved = 1;
    for (int attempt = 0; err == KV_ERR_CORRUPT && moved && attempt < ATTEMPTS; attempt++) {
        uint64_t sequence = store_sequence(source->store);
        wake = (struct wake){.source = source, .options = options, .receipt = receipt_out};
        kv_diag_clear(&own);
        memset(receipt_out, 0, sizeof *receipt_out);
        receipt_out->operation = RECEIPT_RESTORE;
        copy_text(receipt_out->name, sizeof receipt_out->name, name);
        engine_model(source->engine, &wake.model);
        store_hold(source->store);
        err = run(&wake, name, &own);
        store_unhold(source->store);
        rest_plan_release(&wake.plan);
        moved = store_sequence(source->store) != sequence;
    }
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

/* --- planes of a live block */

/* Asked for inside a step, read when the engine applies what was posted. */
struct wanted {
    const struct restore_source *source;
    struct block *block;
    uint64_t lineage;
};

/* Memory on the way to places that the processor cannot reach. */
static enum kv_err take_stage(struct engine *engine, const struct transfer_part *parts,
                              uint32_t count, uint8_t **stage_out) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += kv_round_up(parts[i].size, LAYOUT_SLOT_UNIT);
    *stage_out = transfer_host_get(engine, bytes);
    return *stage_out != NULL ? KV_OK : KV_ERR_NOMEM;
}

static enum kv_err read_planes(const struct wanted *wanted, int *in_doubt_out) {
    const struct restore_source *source = wanted->source;
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    struct iovec pieces[LAYOUT_STREAM_COUNT][32];
    struct store_read reads[LAYOUT_STREAM_COUNT] = {{0}};
    struct kv_digest found[LAYOUT_STREAM_COUNT];
    struct rest_plan_block record;
    struct engine_model model;
    uint32_t count = transfer_block_missing(wanted->block, parts);
    uint8_t *stage = NULL;
    engine_model(source->engine, &model);
    struct rest_plan_where where = {.index = (uint32_t)transfer_block_index(wanted->block),
                                    .geometry = &model.geometry};
    for (uint32_t i = 0; i < count; i++)
        where.streams |= 1u << parts[i].stream;
    enum kv_err err =
        rest_plan_owner(source->store, wanted->lineage, where.index, &where.lineage, NULL);
    if (err == KV_OK)
        err = rest_plan_read_block(source->store, &where, &record, NULL);
    if (err == KV_OK && (where.streams & record_dropped(&record.record)) != 0)
        err = KV_ERR_NOT_FOUND;
    if (err == KV_OK && !transfer_mapped(source->engine))
        err = take_stage(source->engine, parts, count, &stage);
    uint8_t *landing = stage;
    for (uint32_t i = 0; i < count && err == KV_OK; i++) {
        for (uint32_t k = 0; k < parts[i].piece_count; k++)
            pieces[i][k] = (struct iovec){parts[i].pieces[k].bytes, parts[i].pieces[k].size};
        reads[i] = (struct store_read){.extent = rest_plan_extent(&record, parts[i].stream),
                                       .pieces = pieces[i],
                                       .piece_count = parts[i].piece_count};
        if (stage != NULL) {
            pieces[i][0] = (struct iovec){landing, parts[i].size};
            reads[i].piece_count = 1;
            landing += kv_round_up(parts[i].size, LAYOUT_SLOT_UNIT);
        }
        assert(reads[i].extent != NULL);
    }
    const struct store_read_args args = {.reads = reads, .count = count};
    if (err == KV_OK)
        err = store_read(source->store, &args, NULL, NULL);
    for (uint32_t i = 0; i < count; i++)
        *in_doubt_out |= reads[i].in_doubt;
    for (uint32_t i = 0; stage != NULL && i < count && err == KV_OK; i++)
        err = transfer_part_write(source->engine, &parts[i], pieces[i][0].iov_base);
    if (err == KV_OK)
        err = transfer_digests(source->engine, parts, count, found);
    for (uint32_t i = 0; i < count && err == KV_OK; i++)
        err = rest_load_check("plane", &reads[i].extent->digest, &found[i], NULL);
    if (!*in_doubt_out)
        transfer_host_put(source->engine, stage);
    return err;
}

static void bring_planes(void *context) {
    struct wanted *wanted = context;
    int in_doubt = 0;
    store_hold(wanted->source->store);
    enum kv_err err = read_planes(wanted, &in_doubt);
    store_unhold(wanted->source->store);
#ifdef BREAK_PROMOTION_DOUBT
    in_doubt = 0;
#endif
    /* Slots that a late read may still write are never given back: the block stays held. */
    if (!in_doubt)
        transfer_planes_arrived(NULL, wanted->block, err);
    kv_alloc_release(wanted->source->alloc, wanted);
}

void restore_planes_wanted(void *context, struct session *session, struct block *block) {
    const struct restore_source *source = context;
    struct wanted *wanted = kv_alloc_zeroed(source->alloc, 1, sizeof *wanted);
    enum kv_err err = KV_ERR_NOMEM;
    if (wanted != NULL) {
        const struct transfer_durable *durable = transfer_durable(session);
        uint64_t index = transfer_block_index(block);
        /* A lineage that is not recorded yet has blocks of its own behind its cut only. */
        *wanted = (struct wanted){source, block,
                                  index < durable->cut ? durable->parent : durable->lineage};
#ifdef BREAK_READ_IN_STEP
        bring_planes(wanted);
        return;
#endif
        err = engine_post(source->engine, bring_planes, wanted);
    }
    if (err != KV_OK) {
        kv_alloc_release(source->alloc, wanted);
        transfer_planes_arrived(session, block, err);
    }
}
