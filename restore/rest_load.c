/* restore/rest_load.c - reads and digests side by side, until every reserved slot is right.
 *
 * Responsible for: running the list of reads, digesting what has landed while later reads are under
 * way, refusing what differs, progress and cancelling.
 * Not responsible for: the order of reads (rest_fetch.c), publishing (rest_wake.c).
 */
#include "restore/rest_load.h"

#include "engine/scales.h"
#include "restore/rest_fetch.h"

#include "store/base/bytes.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* Between rounds a wake can be cancelled; a round is long enough to keep the disk busy. */
static const uint64_t round_bytes_max = (uint64_t)64 << 20;

/* Digests asked for at once. Where bytes land on the way to their places there is room for two
 * rounds: one is read while the other goes on. */
enum { DIGEST_EACH = TRANSFER_PARTS_MAX, STAGES = 2, STAGE_ALIGN_BYTES = 4096 };

enum kv_err rest_load_check(const char *what, const struct kv_digest *expected,
                            const struct kv_digest *found, struct kv_diag *diag) {
    char expected_text[KV_DIGEST_HEX_BYTES];
    char found_text[KV_DIGEST_HEX_BYTES];
    if (kv_digest_equal(expected, found))
        return KV_OK;
    kv_digest_hex(expected, expected_text);
    kv_digest_hex(found, found_text);
    return kv_diag_set(diag, KV_ERR_CORRUPT, "%s: digest is %s, saved was %s", what, found_text,
                       expected_text);
}

/* What can be done about an extent that is not what was saved. */
static void add_remedy(enum layout_stream stream, struct kv_diag *diag) {
    const uint32_t refine = 1u << LAYOUT_KL | 1u << LAYOUT_VR1 | 1u << LAYOUT_VR2 | 1u << LAYOUT_VX;
    size_t length = strnlen(diag->text, sizeof diag->text - 1);
    snprintf(diag->text + length, sizeof diag->text - length, "%s",
             (refine >> stream & 1) != 0
                 ? "; this plane only refines: `coldplane scrub --keep-lower` keeps the session at "
                   "a lower tier"
                 : "; `coldplane scrub` names the older snapshots that do not need it");
}

struct loading {
    const struct rest_load_args *args;
    struct rest_fetch fetch;
    struct store_read *reads; /* one for each item */
    pthread_mutex_t lock;
    pthread_cond_t landed;
    size_t *queue; /* items that have landed, in that order */
    size_t queue_first, queue_end;
    size_t digested; /* items of the queue that are done with */
    int closed;
    int mapped;      /* places are memory of the processor */
    uint8_t *stages; /* [STAGES][stage_bytes], else */
    uint64_t stage_bytes;
    size_t stage_ends[STAGES]; /* of the queue, when the stage's last round was over */
    uint32_t round;
    /* Of the digest thread; read by the caller after the join. */
    uint64_t copy_ns, digest_ns;
    uint32_t checked, failed;
    enum kv_err err;
    struct kv_diag diag;
    /* Of the reading thread. */
    size_t round_first;
    uint64_t bytes_done;
    int cancelled;
};

/* Some of those that have landed, the oldest first; 0 when there will be no more. */
static size_t next_landed(struct loading *loading, size_t *first_out) {
    pthread_mutex_lock(&loading->lock);
    loading->digested = loading->queue_first;
    pthread_cond_broadcast(&loading->landed);
    while (loading->queue_first == loading->queue_end && !loading->closed)
        pthread_cond_wait(&loading->landed, &loading->lock);
    size_t count = loading->queue_end - loading->queue_first;
    count = count < DIGEST_EACH ? count : DIGEST_EACH;
    *first_out = loading->queue_first;
    loading->queue_first += count;
    pthread_mutex_unlock(&loading->lock);
    return count;
}

static void note(struct loading *loading, enum kv_err err, enum layout_stream stream,
                 const struct kv_diag *diag) {
    loading->failed++;
    if (loading->err != KV_OK)
        return;
    loading->err = err;
    loading->diag = *diag;
    if (err == KV_ERR_CORRUPT)
        add_remedy(stream, &loading->diag);
}

/* To their places, then digests there: what is compared is what attention will read. */
static enum kv_err place_and_digest(struct loading *loading, const size_t *items, size_t count,
                                    struct kv_digest *found_out) {
    struct engine *engine = loading->args->source->engine;
    struct transfer_part places[DIGEST_EACH], far[DIGEST_EACH];
    const void *landed[DIGEST_EACH];
    uint32_t far_count = 0;
    for (size_t i = 0; i < count; i++) {
        const struct rest_fetch_item *item = &loading->fetch.items[items[i]];
        places[i] = item->place;
        if (!rest_fetch_is_far(item, loading->mapped))
            continue;
        far[far_count] = item->place;
        landed[far_count++] = item->pieces[0].iov_base;
    }
    uint64_t begun = kv_clock_now_ns(loading->args->source->clock);
    enum kv_err err = transfer_parts_write(engine, far, landed, far_count);
    uint64_t copied = kv_clock_now_ns(loading->args->source->clock);
    loading->copy_ns += far_count != 0 ? copied - begun : 0;
    if (err == KV_OK)
        err = transfer_digests(engine, places, (uint32_t)count, found_out);
    loading->digest_ns += kv_clock_now_ns(loading->args->source->clock) - copied;
    return err;
}

static void *digest_main(void *context) {
    struct loading *loading = context;
    size_t first, count;
    while ((count = next_landed(loading, &first)) != 0) {
        const size_t *items = loading->queue + first;
        struct kv_digest found[DIGEST_EACH];
        enum kv_err placed = place_and_digest(loading, items, count, found);
        for (size_t i = 0; i < count; i++) {
            const struct rest_fetch_item *item = &loading->fetch.items[items[i]];
            struct transfer_part landed = rest_fetch_part(item);
            struct kv_diag diag = {""};
            enum kv_err err = placed;
            if (err != KV_OK)
                kv_diag_set(&diag, err, "%s: the device failed", item->label);
#ifdef BREAK_PLANE_DIGEST
            found[i] = item->extent->digest;
#endif
            if (err == KV_OK)
                err = rest_load_check(item->label, &item->extent->digest, &found[i], &diag);
            if (err == KV_OK)
                err = scales_check(item->label, &landed, &diag);
            loading->checked++;
            if (err != KV_OK)
                note(loading, err, item->stream, &diag);
        }
    }
    return NULL;
}

static void read_done(void *context, size_t read_index) {
    struct loading *loading = context;
    const struct restore_options *options = loading->args->options;
    size_t index = loading->round_first + read_index;
    loading->bytes_done += loading->fetch.items[index].extent->raw_bytes;
    if (loading->reads[index].result == KV_OK) {
        pthread_mutex_lock(&loading->lock);
        loading->queue[loading->queue_end++] = index;
        pthread_cond_broadcast(&loading->landed);
        pthread_mutex_unlock(&loading->lock);
    }
    if (options->progress != NULL && !loading->cancelled &&
        options->progress(options->progress_context, loading->bytes_done,
                          loading->fetch.raw_bytes) == 0)
        loading->cancelled = 1;
}

void rest_load_stats(struct receipt *receipt, const struct store_read_stats *stats) {
    receipt->door_bytes += stats->read_bytes;
    receipt->ram_bytes += stats->ram_bytes;
    receipt->stage_ns[RECEIPT_READ] += stats->wait_ns;
    receipt->stage_ns[RECEIPT_UNZIP] += stats->unzip_ns / (stats->helpers ? stats->helpers : 1);
    if (stats->helpers > receipt->unzip_threads)
        receipt->unzip_threads = stats->helpers;
    if (stats->reads == 0)
        return;
    receipt->direct = stats->direct;
    if (stats->in_flight_max > receipt->in_flight_most)
        receipt->in_flight_most = (uint32_t)stats->in_flight_max;
    size_t length =
        stats->door_name == NULL ? 0 : strnlen(stats->door_name, sizeof receipt->door - 1);
    if (length != 0)
        memcpy(receipt->door, stats->door_name, length);
    receipt->door[length] = 0;
}

static size_t round_end(const struct loading *loading, size_t first) {
    uint64_t bytes = 0;
    size_t end = first;
    while (end < loading->fetch.count && (end == first || bytes < round_bytes_max))
        bytes += loading->fetch.items[end++].extent->raw_bytes;
    return end;
}

/* A frame that cannot be unzipped fails in the read already: the diag is of the first in order. */
static void remedy_of_round(const struct loading *loading, size_t first, size_t end,
                            struct kv_diag *diag) {
    size_t i = first;
    while (i < end && loading->reads[i].result == KV_OK)
        i++;
    if (i < end && diag != NULL)
        add_remedy(loading->fetch.items[i].stream, diag);
}

/* Lands the far items of a round in its stage, once that is free; returns the bytes they take. */
static uint64_t use_stage(struct loading *loading, size_t first, size_t end) {
    uint8_t *stage = loading->stages;
    uint64_t used = 0;
    if (stage != NULL)
        stage += loading->round % STAGES * loading->stage_bytes;
    for (size_t i = first; i < end; i++) {
        struct rest_fetch_item *item = &loading->fetch.items[i];
        if (!rest_fetch_is_far(item, loading->mapped))
            continue;
        if (loading->stages != NULL) {
            item->pieces[0] = (struct iovec){stage + used, item->place.size};
            item->piece_count = loading->reads[i].piece_count = 1;
        }
        used += kv_round_up(item->place.size, STAGE_ALIGN_BYTES);
    }
    pthread_mutex_lock(&loading->lock);
    while (loading->digested < loading->stage_ends[loading->round % STAGES])
        pthread_cond_wait(&loading->landed, &loading->lock);
    pthread_mutex_unlock(&loading->lock);
    return used;
}

static enum kv_err make_stages(struct loading *loading, struct kv_diag *diag) {
    for (size_t first = 0, end; first < loading->fetch.count; first = end) {
        end = round_end(loading, first);
        uint64_t used = use_stage(loading, first, end);
        loading->stage_bytes = used > loading->stage_bytes ? used : loading->stage_bytes;
    }
    if (loading->stage_bytes == 0)
        return KV_OK;
    loading->stages =
        transfer_host_get(loading->args->source->engine, STAGES * loading->stage_bytes);
    return loading->stages != NULL
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_NOMEM, "no memory to read %llu bytes at a time",
                             (unsigned long long)loading->stage_bytes);
}

static enum kv_err read_all(struct loading *loading, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    for (size_t first = 0; first < loading->fetch.count && err == KV_OK;) {
        size_t end = round_end(loading, first);
        const struct store_read_args args = {.reads = loading->reads + first,
                                             .count = end - first,
                                             .done = read_done,
                                             .context = loading,
                                             .ram = loading->args->plan->ram,
                                             .helper = 1};
        struct store_read_stats stats = {0};
        loading->round_first = first;
        (void)use_stage(loading, first, end);
        err = store_read(loading->args->source->store, &args, &stats, diag);
        if (err == KV_ERR_CORRUPT)
            remedy_of_round(loading, first, end, diag);
        rest_load_stats(loading->args->receipt, &stats);
        pthread_mutex_lock(&loading->lock);
        loading->stage_ends[loading->round++ % STAGES] = loading->queue_end;
        pthread_mutex_unlock(&loading->lock);
        first = end;
        if (err == KV_OK && loading->cancelled)
            err = kv_diag_set(diag, KV_ERR_CANCELLED, "stopped while reading");
    }
    return err;
}

static enum kv_err prepare(struct loading *loading, struct kv_diag *diag) {
    const struct rest_load_args *args = loading->args;
    enum kv_err err = rest_fetch_list(args->plan, args->load, &loading->fetch, diag);
    if (err != KV_OK)
        return err;
    size_t count = loading->fetch.count;
    loading->reads = kv_alloc_zeroed(args->source->alloc, count, sizeof *loading->reads);
    loading->queue = kv_alloc_zeroed(args->source->alloc, count, sizeof *loading->queue);
    if (loading->reads == NULL || loading->queue == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu reads", count);
    for (size_t i = 0; i < count; i++) {
        const struct rest_fetch_item *item = &loading->fetch.items[i];
        loading->reads[i] = (struct store_read){.extent = item->extent,
                                                .pieces = item->pieces,
                                                .piece_count = item->piece_count,
                                                .verify = 0,
                                                .label = item->label};
    }
    loading->mapped = transfer_mapped(args->source->engine);
    return make_stages(loading, diag);
}

static void count_streams(const struct loading *loading) {
    struct receipt *receipt = loading->args->receipt;
    for (size_t i = 0; i < loading->fetch.count; i++) {
        const struct rest_fetch_item *item = &loading->fetch.items[i];
        if (loading->reads[i].result != KV_OK)
            continue;
        receipt->raw_bytes[item->stream] += item->extent->raw_bytes;
        receipt->stored_bytes[item->stream] += item->extent->stored_bytes;
        receipt->pages += item->stream == LAYOUT_PAGE || item->stream == LAYOUT_SINKS;
    }
    receipt->blocks = loading->args->plan->image.block_count;
    receipt->digests_checked += loading->checked;
    receipt->digests_failed += loading->failed;
    receipt->stage_ns[RECEIPT_COPY] += loading->copy_ns;
    receipt->stage_ns[RECEIPT_DIGEST] += loading->digest_ns;
}

/* Reads on this thread, digests on another; both have ended when it returns. */
static enum kv_err read_and_digest(struct loading *loading, int *in_doubt_out,
                                   struct kv_diag *diag) {
    pthread_t thread;
    int error = pthread_create(&thread, NULL, digest_main, loading);
    if (error != 0)
        return kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot start the digest thread");
    /* Nobody can see the shadow, so others may step while it fills. */
    engine_away(loading->args->source->engine);
    enum kv_err err = read_all(loading, diag);
    pthread_mutex_lock(&loading->lock);
    loading->closed = 1;
    pthread_cond_broadcast(&loading->landed);
    pthread_mutex_unlock(&loading->lock);
    pthread_join(thread, NULL);
    engine_back(loading->args->source->engine);
    count_streams(loading);
    for (size_t i = 0; i < loading->fetch.count; i++)
        *in_doubt_out |= loading->reads[i].in_doubt;
    if (err == KV_OK && loading->err != KV_OK)
        err = kv_diag_set(diag, loading->err, "%s", loading->diag.text);
    return err;
}

enum kv_err rest_load_run(const struct rest_load_args *args, int *in_doubt_out,
                          struct kv_diag *diag) {
    struct loading loading = {.args = args};
    *in_doubt_out = 0;
    pthread_mutex_init(&loading.lock, NULL);
    pthread_cond_init(&loading.landed, NULL);
    enum kv_err err = prepare(&loading, diag);
    if (err == KV_OK)
        err = read_and_digest(&loading, in_doubt_out, diag);
    if (err == KV_OK && loading.checked != loading.fetch.count)
        err = kv_diag_set(diag, KV_ERR_IO, "%u of %zu extents were digested", loading.checked,
                          loading.fetch.count);
    pthread_cond_destroy(&loading.landed);
    pthread_mutex_destroy(&loading.lock);
    if (*in_doubt_out == 0)
        transfer_host_put(args->source->engine, loading.stages);
    kv_alloc_release(args->source->alloc, loading.reads);
    kv_alloc_release(args->source->alloc, loading.queue);
    rest_fetch_release(&loading.fetch);
    return err;
}
