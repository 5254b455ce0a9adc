/* restore/rest_refine.c - planes that are read back behind a live session.
 *
 * Responsible for: reading what a block misses, its digests, an account for each session that was
 * woken eagerly.
 * Not responsible for: which planes are wanted, or at which tier a block is read (engine/).
 *
 * One block is read before each step, so that a long session answers while its planes come. A plane
 * that is not what was saved never reaches attention: its block stays at the tier that it has.
 */
#include "restore/rest_refine.h"

#include "restore/rest_load.h"
#include "restore/rest_plan.h"
#include "store/base/bytes.h"
#include "store/store_read.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* One session's account. A block that was asked for may outlive its session. */
struct refining {
    struct refining *next;
    const struct session *session; /* NULL: gone */
    uint32_t pending;              /* blocks that were asked for and have not come */
    uint64_t begun_ns;
    struct receipt receipt;
};

struct restore_refine {
    const struct kv_alloc *alloc;
    struct refining *first;
};

enum kv_err restore_refine_open(const struct kv_alloc *alloc, struct restore_refine **refine_out) {
    struct restore_refine *refine = kv_alloc_zeroed(alloc, 1, sizeof *refine);
    if (refine == NULL)
        return KV_ERR_NOMEM;
    refine->alloc = alloc;
    *refine_out = refine;
    return KV_OK;
}

void restore_refine_close(struct restore_refine *refine) {
    if (refine == NULL)
        return;
    const struct kv_alloc alloc = *refine->alloc;
    while (refine->first != NULL) {
        struct refining *first = refine->first;
        refine->first = first->next;
        kv_alloc_release(&alloc, first);
    }
    kv_alloc_release(&alloc, refine);
}

static struct refining *account_of(const struct restore_source *source,
                                   const struct session *session) {
    struct refining *at = source->refine != NULL ? source->refine->first : NULL;
    while (at != NULL && at->session != session)
        at = at->next;
    return at;
}

void rest_refine_begin(const struct restore_source *source, const struct session *session,
                       const struct receipt *woken) {
    struct refining *older = account_of(source, session);
    if (older != NULL)
        older->session = NULL; /* of one that was at this address before */
    struct refining *refining =
        source->refine != NULL ? kv_alloc_zeroed(source->alloc, 1, sizeof *refining) : NULL;
    if (refining == NULL)
        return;
    struct receipt *receipt = &refining->receipt;
    receipt->operation = RECEIPT_REFINE;
    receipt->tiers = woken->tiers;
    struct session_info info;
    session_info(session, &info);
    memcpy(receipt->name, info.name, strlen(info.name));
    receipt->snapshot = woken->snapshot;
    receipt->parent = woken->parent;
    receipt->lineage = woken->lineage;
    receipt->root = woken->root;
    memcpy(receipt->architecture, woken->architecture, sizeof receipt->architecture);
    receipt->model = woken->model;
    receipt->numerics = woken->numerics;
    receipt_history(receipt, woken->history, woken->history_count);
    receipt->degraded_blocks = woken->degraded_blocks;
    refining->session = session;
    refining->begun_ns = kv_clock_now_ns(source->clock);
    refining->next = source->refine->first;
    source->refine->first = refining;
}

/* The session as it stands when the last of its planes has come. */
static void describe(const struct restore_source *source, struct refining *refining) {
    struct receipt *receipt = &refining->receipt;
    const struct session *session = session_find(source->engine, receipt->name);
    struct session_info info;
    receipt->wall_ns = kv_clock_now_ns(source->clock) - refining->begun_ns;
    receipt_finish(receipt);
    if (session == NULL || session != refining->session)
        return;
    session_info(session, &info);
    receipt->tokens = info.n;
    receipt->slots = info.slots;
    receipt->mixed_from = info.mixed_from;
    receipt->coarse_blocks = info.coarse_blocks;
    memcpy(receipt->tier_blocks, info.tier_blocks, sizeof receipt->tier_blocks);
    receipt->seen_count = info.seen_count;
    memcpy(receipt->seen, info.seen, sizeof receipt->seen);
}

int restore_refined(const struct restore_source *source, struct receipt *receipt_out) {
    struct refining **at = source->refine != NULL ? &source->refine->first : NULL;
    while (at != NULL && *at != NULL && (*at)->pending != 0)
        at = &(*at)->next;
    if (at == NULL || *at == NULL)
        return 0;
    struct refining *done = *at;
    *at = done->next;
    describe(source, done);
    *receipt_out = done->receipt;
    kv_alloc_release(source->alloc, done);
    return 1;
}

/* --- one block */

/* Asked for inside a step, read between steps. */
struct wanted {
    const struct restore_source *source;
    struct block *block;
    uint64_t lineage;
    struct refining *refining; /* NULL: no account */
};

struct reading {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    uint32_t count;
    struct iovec pieces[LAYOUT_STREAM_COUNT][32];
    struct store_read reads[LAYOUT_STREAM_COUNT];
    char labels[LAYOUT_STREAM_COUNT][48];
    struct rest_plan_block record;
    uint8_t *stage; /* memory on the way to places that the processor cannot reach */
};

static enum kv_err take_stage(struct engine *engine, struct reading *reading) {
    uint64_t bytes = 0;
    if (transfer_mapped(engine) || reading->count == 0)
        return KV_OK;
    for (uint32_t i = 0; i < reading->count; i++)
        bytes += kv_round_up(reading->parts[i].size, LAYOUT_SLOT_UNIT);
    reading->stage = transfer_host_get(engine, bytes);
    return reading->stage != NULL ? KV_OK : KV_ERR_NOMEM;
}

static enum kv_err find_record(const struct wanted *wanted, struct reading *reading,
                               struct kv_diag *diag) {
    struct store *store = wanted->source->store;
    struct engine_model model;
    engine_model(wanted->source->engine, &model);
    struct rest_plan_where where = {.index = (uint32_t)transfer_block_index(wanted->block),
                                    .geometry = &model.geometry};
    for (uint32_t i = 0; i < reading->count; i++)
        where.streams |= 1u << reading->parts[i].stream;
    enum kv_err err = rest_plan_owner(store, wanted->lineage, where.index, &where.lineage, diag);
    if (err == KV_OK)
        err = rest_plan_read_block(store, &where, &reading->record, diag);
    if (err == KV_OK && (where.streams & record_dropped(&reading->record.record)) != 0)
        err = kv_diag_set(diag, KV_ERR_NOT_FOUND, "block %u has given up planes", where.index);
    return err;
}

static void aim(struct reading *reading, uint64_t index) {
    uint8_t *landing = reading->stage;
    for (uint32_t i = 0; i < reading->count; i++) {
        const struct transfer_part *part = &reading->parts[i];
        struct iovec *pieces = reading->pieces[i];
        snprintf(reading->labels[i], sizeof reading->labels[i], "block %llu, stream %s",
                 (unsigned long long)index, layout_stream_name(part->stream));
        for (uint32_t k = 0; k < part->piece_count; k++)
            pieces[k] = (struct iovec){part->pieces[k].bytes, part->pieces[k].size};
        reading->reads[i] =
            (struct store_read){.extent = rest_plan_extent(&reading->record, part->stream),
                                .pieces = pieces,
                                .piece_count = part->piece_count,
                                .label = reading->labels[i]};
        if (landing != NULL) {
            pieces[0] = (struct iovec){landing, part->size};
            reading->reads[i].piece_count = 1;
            landing += kv_round_up(part->size, LAYOUT_SLOT_UNIT);
        }
        assert(reading->reads[i].extent != NULL);
    }
}

/* To their places, and digests there. */
static enum kv_err place(const struct wanted *wanted, struct reading *reading,
                         struct receipt *receipt, struct kv_diag *diag) {
    struct engine *engine = wanted->source->engine;
    struct kv_digest found[LAYOUT_STREAM_COUNT];
    uint64_t begun = kv_clock_now_ns(wanted->source->clock);
    const void *landed[LAYOUT_STREAM_COUNT];
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; reading->stage != NULL && i < reading->count; i++)
        landed[i] = reading->pieces[i][0].iov_base;
    if (reading->stage != NULL)
        err = transfer_parts_write(engine, reading->parts, landed, reading->count);
    if (err == KV_OK)
        err = transfer_digests(engine, reading->parts, reading->count, found);
    if (err != KV_OK)
        return kv_diag_set(diag, err, "the device failed");
    receipt->stage_ns[RECEIPT_DIGEST] += kv_clock_now_ns(wanted->source->clock) - begun;
    for (uint32_t i = 0; i < reading->count; i++) {
        const struct store_extent *extent = reading->reads[i].extent;
        enum kv_err same = rest_plan_check(reading->labels[i], &extent->digest, &found[i],
                                           err == KV_OK ? diag : NULL);
#ifdef BREAK_REFINE_DIGEST
        same = KV_OK;
#endif
        receipt->digests_checked++;
        receipt->digests_failed += same != KV_OK;
        receipt->raw_bytes[extent->kind] += extent->raw_bytes;
        receipt->stored_bytes[extent->kind] += extent->stored_bytes;
        err = err == KV_OK ? same : err;
    }
    return err;
}

static enum kv_err read_planes(const struct wanted *wanted, struct receipt *receipt,
                               int *in_doubt_out, struct kv_diag *diag) {
    const struct restore_source *source = wanted->source;
    struct reading reading = {.count = 0};
    struct store_read_stats stats = {0};
    reading.count = transfer_block_missing(wanted->block, reading.parts);
    if (reading.count == 0)
        return kv_diag_set(diag, KV_ERR_CANCELLED, "the session went before its planes had come");
    enum kv_err err = find_record(wanted, &reading, diag);
    if (err == KV_OK)
        err = take_stage(source->engine, &reading);
    if (err == KV_OK)
        aim(&reading, transfer_block_index(wanted->block));
    enum kv_err found = err;
    for (int ram = 1; found == KV_OK && ram >= 0; ram--) {
        const struct store_read_args args = {
            .reads = reading.reads, .count = reading.count, .ram = ram};
        err = store_read(source->store, &args, &stats, diag);
        for (uint32_t i = 0; i < reading.count; i++)
            *in_doubt_out |= reading.reads[i].in_doubt;
        rest_load_stats(receipt, &stats);
        if (err == KV_OK)
            err = place(wanted, &reading, receipt, diag);
        /* Damage in memory is not damage on disk: once more from there. */
        if (err != KV_ERR_CORRUPT || stats.ram_bytes == 0)
            break;
    }
    if (!*in_doubt_out)
        transfer_host_put(source->engine, reading.stage);
    return err;
}

static void account(struct refining *refining, enum kv_err err, const struct kv_diag *diag) {
    if (refining == NULL)
        return;
    struct receipt *receipt = &refining->receipt;
    refining->pending--;
    receipt->blocks += err == KV_OK;
    if (err == KV_OK || receipt->err != KV_OK)
        return;
    receipt->err = err;
    snprintf(receipt->reason, sizeof receipt->reason, "%.250s", diag->text);
}

static void bring_planes(void *context) {
    struct wanted *wanted = context;
    struct receipt unseen, *receipt = wanted->refining ? &wanted->refining->receipt : &unseen;
    struct kv_diag diag = {""};
    int in_doubt = 0;
    if (wanted->refining == NULL)
        memset(&unseen, 0, sizeof unseen);
    store_hold(wanted->source->store);
    enum kv_err err = read_planes(wanted, receipt, &in_doubt, &diag);
    store_unhold(wanted->source->store);
#ifdef BREAK_PROMOTION_DOUBT
    in_doubt = 0;
#endif
    account(wanted->refining, err, &diag);
    /* Slots that a late read may still write are never given back: the block stays held. */
    if (in_doubt)
        transfer_planes_lost(wanted->block);
    else
        transfer_planes_arrived(NULL, wanted->block, err);
    kv_alloc_release(wanted->source->alloc, wanted);
}

void restore_planes_wanted(void *context, struct session *session, struct block *block) {
    const struct restore_source *source = context;
    struct wanted *wanted = kv_alloc_zeroed(source->alloc, 1, sizeof *wanted);
    struct refining *refining = account_of(source, session);
    const struct kv_diag no_memory = {"no memory to read planes back"};
    enum kv_err err = KV_ERR_NOMEM;
    if (refining != NULL)
        refining->pending++;
    if (wanted != NULL) {
        const struct transfer_durable *durable = transfer_durable(session);
        uint64_t index = transfer_block_index(block);
        /* A lineage that is not recorded yet has blocks of its own behind its cut only. */
        *wanted = (struct wanted){
            source, block, index < durable->cut ? durable->parent : durable->lineage, refining};
#ifdef BREAK_READ_IN_STEP
        bring_planes(wanted);
        return;
#endif
        err = engine_post_behind(source->engine, bring_planes, wanted);
    }
    if (err != KV_OK) {
        kv_alloc_release(source->alloc, wanted);
        account(refining, err, &no_memory);
        transfer_planes_arrived(session, block, err);
    }
}
