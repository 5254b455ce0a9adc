/* store/store_scrub.c - one record after the other, and a mark where it stopped.
 *
 * Responsible for: the contract of store_scrub.h.
 * Not responsible for: reading (store_read.c).
 */
#include "store/store_scrub.h"

#include "store/store_gone.h"
#include "store/store_inner.h"

#include <string.h>

/* The mark: pass, bytes of the pass, wall time of the last end, length of the key, the key. */
enum { MARK_HEAD_BYTES = 26, MARK_EVERY_BYTES = 256 << 20 };

static const char mark_key[] = STORE_GONE_OWN_PREFIX "scrub";
enum { MARK_KEY_BYTES = sizeof mark_key - 1 };

struct scrub {
    const struct store_scrub_args *args;
    struct store *store;
    struct store_scrub_report *report;
    struct kv_diag *diag;
    struct store_walk walk;
    uint64_t begin_ns, marked_bytes, all_bytes;
};

/* A mark that cannot be read is no mark. */
static enum kv_err load_mark(struct scrub *scrub) {
    struct store_record record;
    enum kv_err err = store_get(scrub->store, mark_key, MARK_KEY_BYTES, &record, NULL);
    scrub->report->pass = 1;
    if (err == KV_ERR_NOT_FOUND || err == KV_ERR_CORRUPT)
        return KV_OK;
    if (err != KV_OK)
        return kv_diag_set(scrub->diag, err, "cannot read how far scrub has come");
    const uint8_t *value = record.value;
    if (record.value_bytes >= MARK_HEAD_BYTES &&
        record.value_bytes == MARK_HEAD_BYTES + (size_t)kv_get_u16(value + 24) &&
        kv_get_u16(value + 24) <= STORE_KEY_BYTES_MAX) {
        scrub->report->pass = kv_get_u64(value);
        scrub->report->pass_bytes = kv_get_u64(value + 8);
        scrub->report->last_end_ns = kv_get_u64(value + 16);
        scrub->walk.after_bytes = kv_get_u16(value + 24);
        memcpy(scrub->walk.after, value + MARK_HEAD_BYTES, scrub->walk.after_bytes);
    }
    store_record_release(scrub->store, &record);
    return KV_OK;
}

static enum kv_err save_mark(struct scrub *scrub) {
    uint8_t value[MARK_HEAD_BYTES + STORE_KEY_BYTES_MAX];
    struct store_batch *batch = NULL;
    if (scrub->store->writer == NULL)
        return KV_OK;
    scrub->marked_bytes = scrub->report->read_bytes;
#ifdef BREAK_SCRUB_MARK
    return KV_OK;
#endif
    kv_put_u64(value, scrub->report->pass + (uint64_t)scrub->report->finished);
    kv_put_u64(value + 8, scrub->report->finished ? 0 : scrub->report->pass_bytes);
    kv_put_u64(value + 16, scrub->report->last_end_ns);
    size_t key_bytes = scrub->report->finished ? 0 : scrub->walk.after_bytes;
    kv_put_u16(value + 24, (uint16_t)key_bytes);
    memcpy(value + MARK_HEAD_BYTES, scrub->walk.after, key_bytes);
    enum kv_err err = store_inner_begin_reserve(scrub->store, &batch, scrub->diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(batch, STORE_CAUSE_CARE);
    const struct store_put put = {.key = mark_key,
                                  .key_bytes = MARK_KEY_BYTES,
                                  .value = value,
                                  .value_bytes = MARK_HEAD_BYTES + key_bytes};
    err = store_batch_put(batch, &put, scrub->diag);
    if (err != KV_OK) {
        store_batch_abandon(batch);
        return err;
    }
    return store_batch_commit(batch, NULL, scrub->diag);
}

/* 1: the caller wants to end. */
static int pace(struct scrub *scrub) {
    const struct store_scrub_args *args = scrub->args;
    uint64_t wait_ns = 0;
    if (args->progress != NULL)
        args->progress(args->context, scrub->report->pass_bytes, scrub->all_bytes);
    if (args->pause == NULL)
        return 0;
    if (args->bytes_per_second != 0) {
        uint64_t due_ns =
            (uint64_t)((double)scrub->report->read_bytes * 1e9 / (double)args->bytes_per_second);
        uint64_t spent_ns = kv_clock_now_ns(scrub->store->options.clock) - scrub->begin_ns;
        wait_ns = due_ns > spent_ns ? due_ns - spent_ns : 0;
    }
    return args->pause(args->context, wait_ns) != 0;
}

static enum kv_err check_one(struct scrub *scrub) {
    struct store *store = scrub->store;
    struct store_read_stats stats = {0};
    struct kv_diag own = {""};
    store_hold(store);
    enum kv_err err =
        store_read_check(store, scrub->walk.after, scrub->walk.after_bytes, &stats, &own);
    store_unhold(store);
    scrub->report->read_bytes += stats.read_bytes;
    scrub->report->pass_bytes += stats.read_bytes;
    if (err == KV_ERR_NOT_FOUND) /* deleted since it was named */
        return KV_OK;
    if (err == KV_ERR_NOMEM)
        return kv_diag_set(scrub->diag, err, "%s", own.text);
    scrub->report->records++;
    if (err == KV_OK)
        return KV_OK;
    scrub->report->bad++;
    const struct store_fsck_finding finding = {STORE_FSCK_DATA, 0, scrub->walk.after,
                                               scrub->walk.after_bytes, own.text};
    scrub->args->bad(scrub->args->context, &finding);
    return KV_OK;
}

/* --- batch records */

static void on_chain(void *context, const struct store_fsck_finding *finding) {
    struct scrub *scrub = context;
    switch (finding->kind) {
    case STORE_FSCK_BATCH:
    case STORE_FSCK_PADDING:
    case STORE_FSCK_NOT_IN_INDEX:
    case STORE_FSCK_NOT_IN_CHAIN:
        scrub->report->bad++;
        scrub->args->bad(scrub->args->context, finding);
        break;
    default: /* what the records have shown already */
        break;
    }
}

static int on_segment(void *context, uint64_t segment_bytes) {
    struct scrub *scrub = context;
    scrub->report->read_bytes += segment_bytes;
    return pace(scrub);
}

/* Behind the last record of a pass; a run that is ended here begins here again. Beside a writer the
 * segments say more than was known at open, so only who may write looks. */
static enum kv_err check_chain(struct scrub *scrub, int *ended_out) {
    struct store_fsck_report report;
    struct kv_diag own = {""};
#ifdef BREAK_SCRUB_CHAIN
    *ended_out = 0;
    return KV_OK;
#endif
    const struct store_fsck_args args = {
        .store = scrub->store, .each = on_chain, .pause = on_segment, .context = scrub};
    store_hold(scrub->store);
    enum kv_err err = store_fsck(&args, &report, &own);
    store_unhold(scrub->store);
    *ended_out = err == KV_ERR_BUSY;
    return err == KV_OK || *ended_out ? KV_OK : kv_diag_set(scrub->diag, err, "%s", own.text);
}

static enum kv_err run(struct scrub *scrub) {
    for (;;) {
        struct store_record record;
        struct kv_diag own = {""};
        enum kv_err err = store_next(scrub->store, &scrub->walk, &record, &own);
        if (err == KV_ERR_NOT_FOUND)
            break;
        if (err == KV_OK)
            store_record_release(scrub->store, &record);
        else if (err != KV_ERR_CORRUPT)
            return kv_diag_set(scrub->diag, err, "%s", own.text);
        err = check_one(scrub);
        if (err == KV_OK && scrub->report->read_bytes - scrub->marked_bytes >= MARK_EVERY_BYTES)
            err = save_mark(scrub);
        if (err != KV_OK)
            return err;
        if (pace(scrub))
            return save_mark(scrub);
        if (scrub->args->lend != NULL)
            scrub->args->lend(scrub->args->context);
    }
    int ended = 0;
    enum kv_err err = scrub->store->writer != NULL ? check_chain(scrub, &ended) : KV_OK;
    if (err != KV_OK)
        return err;
    if (ended)
        return save_mark(scrub);
    scrub->report->finished = 1;
    scrub->report->last_end_ns = kv_clock_wall_ns(scrub->store->options.clock);
    return save_mark(scrub);
}

enum kv_err store_scrub(const struct store_scrub_args *args, struct store_scrub_report *report_out,
                        struct kv_diag *diag) {
    struct scrub scrub = {.args = args, .store = args->store, .report = report_out, .diag = diag};
    struct store_stats stats;
    memset(report_out, 0, sizeof *report_out);
    if (args->bytes_per_second != 0 && args->pause == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "a rate needs a way to wait");
    store_stats_get(args->store, &stats);
    scrub.all_bytes = stats.live_bytes;
    enum kv_err err = load_mark(&scrub);
    if (err != KV_OK)
        return err;
    if (args->restart) {
        scrub.walk.after_bytes = 0;
        report_out->pass_bytes = 0;
    }
    report_out->resumed = scrub.walk.after_bytes != 0;
    scrub.begin_ns = kv_clock_now_ns(args->store->options.clock);
    return run(&scrub);
}
