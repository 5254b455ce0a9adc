/* restore/rest_load.c - reads and digests side by side, until every reserved slot is right.
 *
 * Responsible for: running the list of reads, digesting what has landed while later reads are under
 * way, refusing what differs, progress and cancelling.
 * Not responsible for: the order of reads (rest_fetch.c), publishing (rest_wake.c).
 */
#include "restore/rest_load.h"

#include "engine/scales.h"

#include "store/base/bytes.h"
#include "store/base/polite.h"
#include "store/store_ram.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* Where bytes land on the way to their places, compressed ones larger than they were: what a fast
 * disk gives in the time that a request is under way, waits for its unzipping and is copied on,
 * twice over, since one that is late holds up those behind it. */
static const uint64_t ring_bytes_max = (uint64_t)256 << 20;

/* Digests asked for at once. */
enum { DIGEST_EACH = TRANSFER_PARTS_MAX, RING_ALIGN_BYTES = 4096 };

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

enum kv_err rest_load_look(const struct rest_load_landed *landed, struct kv_diag *diag) {
    const struct rest_fetch_item *item = landed->item;
    const struct kv_digest *found = landed->found;
    if (landed->err != KV_OK)
        return kv_diag_set(diag, landed->err, "%s: the device failed", item->label);
#ifdef BREAK_PLANE_DIGEST
    found = &item->extent->digest;
#endif
    enum kv_err err = rest_plan_check(item->label, &item->extent->digest, found, diag);
    struct transfer_part part = rest_fetch_part(item);
    if (landed->bytes != NULL)
        part =
            (struct transfer_part){.stream = item->stream,
                                   .piece_count = 1,
                                   .pieces = {{(void *)(uintptr_t)landed->bytes, item->place.size}},
                                   .size = item->place.size};
    if (err == KV_OK)
        err = scales_check(item->label, &part, diag);
    if (err == KV_ERR_CORRUPT)
        add_remedy(item->stream, diag);
    return err;
}

/* What becomes of an item of the list. */
struct going {
    uint64_t at;        /* in the ring, if it were endless */
    const void *landed; /* memory of the processor that its place is copied from; NULL: none */
    struct store_ram_loan loan;
    uint8_t here, over; /* over: its place is right, or will never be */
};

struct loading {
    const struct rest_load_args *args;
    struct rest_fetch fetch;
    struct going *going; /* one for each item */
    struct store_read *reads;
    size_t *of_read; /* items */
    size_t read_count;
    pthread_mutex_t lock;
    pthread_cond_t landed;
    size_t *queue; /* items that have landed, in that order */
    size_t queue_first, queue_end;
    size_t low; /* items before it are all over */
    int closed;
    int mapped;     /* places are memory of the processor */
    uint8_t *ring;  /* else */
    int is_landing; /* the ring is kept from wake to wake */
    uint64_t ring_bytes;
    /* Of the digest thread; read by the caller after the join. */
    uint64_t copy_ns, digest_ns;
    uint32_t checked, failed;
    enum kv_err err;
    struct kv_diag diag;
    /* Of the reading thread. */
    uint64_t bytes_done, loan_bytes;
    int cancelled, stopped;
};

/* Some of those that have landed, the oldest first; 0 when there will be no more. */
static size_t next_landed(struct loading *loading, size_t *first_out) {
    pthread_mutex_lock(&loading->lock);
    while (loading->queue_first == loading->queue_end && !loading->closed)
        pthread_cond_wait(&loading->landed, &loading->lock);
    size_t count = loading->queue_end - loading->queue_first;
    count = count < DIGEST_EACH ? count : DIGEST_EACH;
    *first_out = loading->queue_first;
    loading->queue_first += count;
    pthread_mutex_unlock(&loading->lock);
    return count;
}

/* Items have come to their end: what they took of the ring is free again. */
static void end_items(struct loading *loading, const size_t *items, size_t count) {
    for (size_t i = 0; i < count; i++)
        store_ram_return(loading->args->source->store, &loading->going[items[i]].loan);
    pthread_mutex_lock(&loading->lock);
    for (size_t i = 0; i < count; i++)
        loading->going[items[i]].over = 1;
    while (loading->low < loading->fetch.count && loading->going[loading->low].over)
        loading->low++;
    pthread_cond_broadcast(&loading->landed);
    pthread_mutex_unlock(&loading->lock);
}

static void note(struct loading *loading, enum kv_err err, const struct kv_diag *diag) {
    loading->failed++;
    if (loading->err != KV_OK)
        return;
    loading->err = err;
    loading->diag = *diag;
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
        if (loading->going[items[i]].landed == NULL)
            continue;
        far[far_count] = item->place;
        landed[far_count++] = loading->going[items[i]].landed;
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
    kv_polite();
    while ((count = next_landed(loading, &first)) != 0) {
        const size_t *items = loading->queue + first;
        struct kv_digest found[DIGEST_EACH];
        enum kv_err placed = place_and_digest(loading, items, count, found);
        for (size_t i = 0; i < count; i++) {
            const struct rest_load_landed landed = {&loading->fetch.items[items[i]],
                                                    loading->going[items[i]].landed, placed,
                                                    &found[i]};
            struct kv_diag diag = {""};
            enum kv_err err = rest_load_look(&landed, &diag);
            loading->checked++;
            if (err != KV_OK)
                note(loading, err, &diag);
        }
        end_items(loading, items, count);
    }
    return NULL;
}

static void tell_progress(struct loading *loading, size_t index) {
    const struct restore_options *options = loading->args->options;
    loading->bytes_done += loading->fetch.items[index].extent->raw_bytes;
    if (options->progress != NULL && !loading->cancelled &&
        options->progress(options->progress_context, loading->bytes_done,
                          loading->fetch.raw_bytes) == 0)
        loading->cancelled = 1;
}

static void put_landed(struct loading *loading, size_t index) {
    loading->going[index].here = 1;
    pthread_mutex_lock(&loading->lock);
    loading->queue[loading->queue_end++] = index;
    pthread_cond_broadcast(&loading->landed);
    pthread_mutex_unlock(&loading->lock);
}

static void read_done(void *context, size_t read_index) {
    struct loading *loading = context;
    size_t index = loading->of_read[read_index];
    if (loading->reads[read_index].result == KV_OK) {
        put_landed(loading, index);
    } else {
        loading->stopped = 1;
        end_items(loading, &index, 1);
    }
    tell_progress(loading, index);
}

/* Also when it does not lie there: nothing that comes later may pass it. */
static uint64_t ring_end(const struct loading *loading, size_t index) {
    const struct going *going = &loading->going[index];
    return going->at + (going->landed != NULL ? loading->fetch.items[index].place.size : 0);
}

/* 1 when the ring has room for an item, or it needs none. After a failed read, or when cancelled,
 * nothing more is begun. */
static int may_begin(void *context, size_t read_index, int wait) {
    struct loading *loading = context;
    size_t index = loading->of_read[read_index];
    if (loading->stopped || loading->cancelled)
        return 0;
    pthread_mutex_lock(&loading->lock);
    int fits;
    while (!(fits = loading->low >= index ||
                    ring_end(loading, index) <=
                        loading->going[loading->low].at + loading->ring_bytes) &&
           wait)
        pthread_cond_wait(&loading->landed, &loading->lock);
    pthread_mutex_unlock(&loading->lock);
    return fits;
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

void rest_load_count(struct receipt *receipt, const struct rest_fetch_item *item) {
    if (item->stream == REST_FETCH_IDS)
        return;
    receipt->raw_bytes[item->stream] += item->extent->raw_bytes;
    receipt->stored_bytes[item->stream] += item->extent->stored_bytes;
    receipt->pages += item->stream == LAYOUT_PAGE || item->stream == LAYOUT_SINKS;
}

/* A frame that cannot be unzipped fails in the read already: the diag is of the first in order. */
static void add_read_remedy(const struct loading *loading, struct kv_diag *diag) {
    size_t i = 0;
    while (i < loading->read_count && loading->reads[i].result == KV_OK)
        i++;
    if (i < loading->read_count && diag != NULL)
        add_remedy(loading->fetch.items[loading->of_read[i]].stream, diag);
}

/* What is far and kept in memory is copied to the device from where it lies. */
static void lend(struct loading *loading) {
    struct store *store = loading->args->source->store;
    for (size_t i = 0; i < loading->fetch.count && loading->args->plan->ram; i++) {
        const struct rest_fetch_item *item = &loading->fetch.items[i];
        if (rest_fetch_is_far(item, loading->mapped) &&
            store_ram_borrow(store, item->extent, &loading->going[i].loan)) {
            loading->going[i].landed = loading->going[i].loan.bytes;
            loading->loan_bytes += item->extent->raw_bytes;
        }
    }
}

/* The ring, and where in it every far item lands that is not lent. */
static enum kv_err make_ring(struct loading *loading, struct kv_diag *diag) {
    uint64_t most = 0, sum = 0, at = 0;
    for (size_t i = 0; i < loading->fetch.count; i++) {
        const struct rest_fetch_item *item = &loading->fetch.items[i];
        if (!rest_fetch_is_far(item, loading->mapped) || loading->going[i].landed != NULL)
            continue;
        uint64_t bytes = kv_round_up(item->place.size, RING_ALIGN_BYTES);
        most = bytes > most ? bytes : most;
        sum += bytes;
    }
    loading->ring_bytes = sum < ring_bytes_max    ? sum
                          : most > ring_bytes_max ? most
                                                  : ring_bytes_max;
    if (sum == 0)
        return KV_OK;
    struct engine *engine = loading->args->source->engine;
    if (loading->ring_bytes == ring_bytes_max)
        loading->ring = transfer_landing_take(engine, ring_bytes_max);
    loading->is_landing = loading->ring != NULL;
    if (loading->ring == NULL)
        loading->ring = transfer_host_get(engine, loading->ring_bytes);
    while (loading->ring == NULL && loading->ring_bytes / 2 >= most) { /* others wake, too */
        loading->ring_bytes = kv_round_up(loading->ring_bytes / 2, RING_ALIGN_BYTES);
        loading->ring = transfer_host_get(engine, loading->ring_bytes);
    }
    if (loading->ring == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to read %llu bytes at a time",
                           (unsigned long long)loading->ring_bytes);
    for (size_t i = 0; i < loading->fetch.count; i++) {
        struct rest_fetch_item *item = &loading->fetch.items[i];
        uint64_t bytes = kv_round_up(item->place.size, RING_ALIGN_BYTES);
        loading->going[i].at = at;
        if (!rest_fetch_is_far(item, loading->mapped) || loading->going[i].landed != NULL)
            continue;
        if (at % loading->ring_bytes + bytes > loading->ring_bytes)
            at += loading->ring_bytes - at % loading->ring_bytes;
        loading->going[i].at = at;
        loading->going[i].landed = loading->ring + at % loading->ring_bytes;
        item->pieces[0] =
            (struct iovec){loading->ring + at % loading->ring_bytes, item->place.size};
        item->piece_count = 1;
        at += bytes;
    }
    return KV_OK;
}

static void list_reads(struct loading *loading) {
    for (size_t i = 0; i < loading->fetch.count; i++) {
        const struct rest_fetch_item *item = &loading->fetch.items[i];
        if (loading->going[i].loan.bytes != NULL)
            continue;
        loading->of_read[loading->read_count] = i;
        loading->reads[loading->read_count++] =
            (struct store_read){.extent = item->extent,
                                .pieces = item->pieces,
                                .piece_count = item->piece_count,
                                .verify = 0,
                                .label = item->label};
    }
}

static enum kv_err read_all(struct loading *loading, struct kv_diag *diag) {
    const struct store_read_args args = {.reads = loading->reads,
                                         .count = loading->read_count,
                                         .done = read_done,
                                         .room = may_begin,
                                         .context = loading,
                                         .ram = loading->args->plan->ram,
                                         .helper = 1};
    struct store_read_stats stats = {0};
    for (size_t i = 0; i < loading->fetch.count; i++) {
        if (loading->going[i].loan.bytes == NULL)
            continue;
        put_landed(loading, i);
        tell_progress(loading, i);
    }
    enum kv_err err = store_read(loading->args->source->store, &args, &stats, diag);
    if (err == KV_ERR_CORRUPT)
        add_read_remedy(loading, diag);
    stats.ram_bytes += loading->loan_bytes;
    rest_load_stats(loading->args->receipt, &stats);
    return loading->cancelled && (err == KV_OK || err == KV_ERR_CANCELLED)
               ? kv_diag_set(diag, KV_ERR_CANCELLED, "stopped while reading")
               : err;
}

static enum kv_err prepare(struct loading *loading, struct kv_diag *diag) {
    const struct rest_load_args *args = loading->args;
    rest_fetch_sort(&loading->fetch);
    const struct kv_alloc *alloc = args->source->alloc;
    size_t count = loading->fetch.count;
    loading->going = kv_alloc_zeroed(alloc, count, sizeof *loading->going);
    loading->reads = kv_alloc_zeroed(alloc, count, sizeof *loading->reads);
    loading->of_read = kv_alloc_zeroed(alloc, count, sizeof *loading->of_read);
    loading->queue = kv_alloc_zeroed(alloc, count, sizeof *loading->queue);
    if (loading->going == NULL || loading->reads == NULL || loading->of_read == NULL ||
        loading->queue == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu reads", count);
    loading->mapped = transfer_mapped(args->source->engine);
    lend(loading);
    enum kv_err err = make_ring(loading, diag);
    if (err == KV_OK)
        list_reads(loading);
    return err;
}

static void count_streams(const struct loading *loading) {
    struct receipt *receipt = loading->args->receipt;
    for (size_t i = 0; i < loading->fetch.count; i++)
        if (loading->going[i].here)
            rest_load_count(receipt, &loading->fetch.items[i]);
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
    enum kv_err err = read_all(loading, diag);
    pthread_mutex_lock(&loading->lock);
    loading->closed = 1;
    pthread_cond_broadcast(&loading->landed);
    pthread_mutex_unlock(&loading->lock);
    pthread_join(thread, NULL);
    count_streams(loading);
    for (size_t i = 0; i < loading->read_count; i++)
        *in_doubt_out |= loading->reads[i].in_doubt;
    if (err == KV_OK && loading->err != KV_OK)
        err = kv_diag_set(diag, loading->err, "%s", loading->diag.text);
    return err;
}

static void end_loading(struct loading *loading, int in_doubt) {
    const struct restore_source *source = loading->args->source;
    pthread_cond_destroy(&loading->landed);
    pthread_mutex_destroy(&loading->lock);
    for (size_t i = 0; i < loading->fetch.count && loading->going != NULL; i++)
        store_ram_return(source->store, &loading->going[i].loan);
    if (!in_doubt && loading->is_landing)
        transfer_landing_give(source->engine);
    else if (!in_doubt)
        transfer_host_put(source->engine, loading->ring);
    kv_alloc_release(source->alloc, loading->going);
    kv_alloc_release(source->alloc, loading->reads);
    kv_alloc_release(source->alloc, loading->of_read);
    kv_alloc_release(source->alloc, loading->queue);
    if (in_doubt) /* a read that may still come must not find its memory in other hands */
        loading->fetch.ids = NULL;
    rest_fetch_release(&loading->fetch);
}

/* What came with the planes is the session's text. */
static enum kv_err give_ids(const struct loading *loading, struct kv_diag *diag) {
    const struct rest_load_args *args = loading->args;
    uint32_t count = args->plan->image.block_count * LAYOUT_BLOCK_TOKENS;
#ifdef BREAK_IDS_LATE
    return KV_OK;
#endif
    return loading->fetch.ids == NULL
               ? KV_OK
               : transfer_load_ids(args->load, LAYOUT_SINK_TOKENS, loading->fetch.ids, count, diag);
}

/* Nobody can see the shadow, so others may step while it fills. */
enum kv_err rest_load_run(const struct rest_load_args *args, struct rest_fetch *fetch,
                          int *in_doubt_out, struct kv_diag *diag) {
    struct loading loading = {.args = args, .fetch = *fetch};
    *fetch = (struct rest_fetch){0};
    *in_doubt_out = 0;
    pthread_mutex_init(&loading.lock, NULL);
    pthread_cond_init(&loading.landed, NULL);
    engine_away(args->source->engine);
    enum kv_err err = prepare(&loading, diag);
    if (err == KV_OK)
        err = read_and_digest(&loading, in_doubt_out, diag);
    if (err == KV_OK && loading.checked != loading.fetch.count)
        err = kv_diag_set(diag, KV_ERR_IO, "%u of %zu extents were digested", loading.checked,
                          loading.fetch.count);
    if (err == KV_OK)
        err = give_ids(&loading, diag);
    end_loading(&loading, *in_doubt_out);
    engine_back(args->source->engine);
    return err;
}
