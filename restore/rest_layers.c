/* restore/rest_layers.c - a wake from the RAM tier, whose planes are followed by its proof.
 *
 * Responsible for: what rest_layers.h says.
 * Not responsible for: computing the proof.
 *
 * In a plane's extent the layers follow each other, so a group of layers is one stretch of each.
 * Groups are a quarter of the layers, at the end half of those left: most bytes come in long
 * copies, the proof begins early, and little of it is left when the last byte has come. Digests are
 * of whole extents; they follow the last group some hundred extents at a time on another thread,
 * which looks at pages and scales before. Copies begin with pages and scales, while the list of
 * planes is made, and go on without a pause while the session is published and asked.
 */
#include "restore/rest_layers.h"

#include "restore/rest_fetch.h"
#include "store/base/polite.h"
#include "store/store_ram.h"

#include <assert.h>
#include <pthread.h>

enum {
    EACH = TRANSFER_PARTS_MAX,
    WAIT_EACH = 16 * EACH, /* items of the last group that are told of at once */
    CHECK_EACH = TRANSFER_DIGESTS_MAX,
    STREAMS_OF_ALL = 1 << LAYOUT_META | 1 << LAYOUT_PAGE | 1 << LAYOUT_SINKS,
    PLANES = (1 << LAYOUT_META) - 1
};

/* Items, or layers of them, that were handed over and not waited for. */
struct portion {
    uint64_t sent; /* as transfer_sent says */
    uint64_t bytes;
    size_t placed;   /* once it has come: the first items that are whole, 0: as before … */
    uint32_t layers; /* … and layers that are there, likewise */
};

struct rest_layers {
    struct rest_load_args args;
    struct rest_fetch fetch;
    struct store_ram_loan *loans; /* one for each item */
    uint32_t layers;
    struct session *session; /* unseen before it is followed */
    pthread_t loader, checker;
    int loads, checks; /* the thread was started */
    int followed, cancelled;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    /* Under the lock. */
    int listed;          /* planes, too: they may be brought */
    uint32_t there;      /* layers */
    size_t placed;       /* items that are whole, the first ones */
    size_t looked;       /* and that were checked */
    uint64_t bytes_done; /* of the fetch */
    int over, done;      /* no more will come; nor be checked */
    int stop;
    enum kv_err err; /* the first that a check has found */
    struct kv_diag diag;
    enum kv_err err_of_pages;
    /* Of the loader, then of the caller. */
    struct portion portion;
    enum kv_err copy_err;
    uint64_t copy_ns;
    /* Of who checks, then of the caller. */
    uint64_t check_ns;
    uint32_t checked, failed;
    struct receipt_layers at; /* by the clock; each time is of who does what it is of */
};

static uint64_t now_ns(const struct rest_layers *layers) {
    return kv_clock_now_ns(layers->args.source->clock);
}

/* --- copies */

/* Bytes [first, end) of a part. */
static struct transfer_part stretch_of(const struct transfer_part *part, uint64_t first,
                                       uint64_t end) {
    struct transfer_part stretch = {.stream = part->stream, .staged = part->staged};
    uint64_t before = 0;
    for (uint32_t i = 0; i < part->piece_count; before += part->pieces[i++].size) {
        uint64_t size = part->pieces[i].size;
        uint64_t from = first > before ? first - before : 0;
        uint64_t to = end > before ? end - before : 0;
        to = to < size ? to : size;
        if (from >= to)
            continue;
        stretch.pieces[stretch.piece_count++] =
            (struct transfer_piece){(uint8_t *)part->pieces[i].bytes + from, to - from};
        stretch.size += to - from;
    }
    return stretch;
}

/* Layers [first, end) of items from `at` on, handed over. */
static enum kv_err send(struct rest_layers *layers, size_t at, size_t count, uint32_t first,
                        uint32_t end) {
    struct transfer_part parts[EACH];
    const void *bytes[EACH];
    for (size_t i = 0; i < count; i++) {
        const struct transfer_part *place = &layers->fetch.items[at + i].place;
        uint64_t from = place->size / layers->layers * first;
        parts[i] = stretch_of(place, from, place->size / layers->layers * end);
        bytes[i] = (const uint8_t *)layers->loans[at + i].bytes + from;
    }
    return transfer_parts_send(layers->args.source->engine, parts, bytes, (uint32_t)count);
}

static int is_stopped(struct rest_layers *layers) {
    pthread_mutex_lock(&layers->lock);
    int stop = layers->stop;
    pthread_mutex_unlock(&layers->lock);
    return stop;
}

/* Waits for the portion that is on its way, and tells of it. */
static enum kv_err settle(struct rest_layers *layers) {
    struct portion portion = layers->portion;
    layers->portion = (struct portion){0};
    if (portion.bytes == 0)
        return KV_OK;
    enum kv_err err = transfer_send_wait(layers->args.source->engine, portion.sent);
    if (err != KV_OK)
        return err;
    if (portion.layers != 0) {
        layers->at.copied_ns = now_ns(layers);
        layers->at.first_ns = layers->at.first_ns != 0 ? layers->at.first_ns : layers->at.copied_ns;
        transfer_layers_arrived(layers->session, portion.layers);
    }
    pthread_mutex_lock(&layers->lock);
    layers->bytes_done += portion.bytes;
    layers->placed = portion.placed > layers->placed ? portion.placed : layers->placed;
    layers->there = portion.layers > layers->there ? portion.layers : layers->there;
    pthread_cond_broadcast(&layers->moved);
    pthread_mutex_unlock(&layers->lock);
    return KV_OK;
}

/* Layers [first, end) of the items from `at` to `item_end`: handed over, and only what came before
 * is waited for, so that the device always has more to copy. */
static enum kv_err bring(struct rest_layers *layers, size_t at, size_t item_end, uint32_t first,
                         uint32_t end) {
    enum kv_err err = KV_OK;
    int planes = at >= layers->fetch.whole_count, last = end == layers->layers;
    while (at < item_end && err == KV_OK) {
        size_t until = last && item_end - at > WAIT_EACH ? at + WAIT_EACH : item_end;
        struct portion portion = {0};
        for (size_t count; at < until && err == KV_OK; at += count) {
            count = until - at < EACH ? until - at : EACH;
            err = is_stopped(layers) ? KV_ERR_CANCELLED : send(layers, at, count, first, end);
            for (size_t i = 0; i < count; i++)
                portion.bytes +=
                    layers->fetch.items[at + i].place.size / layers->layers * (end - first);
            err = err == KV_OK ? settle(layers) : err;
        }
        portion.sent = transfer_sent(layers->args.source->engine);
        portion.placed = last ? at : 0;
        portion.layers = planes && at == item_end ? end : 0;
        layers->portion = portion;
    }
    return err;
}

/* Half of the layers that are left, a quarter of all at most, a sixteenth at least: copies of one
 * layer of 32 take a fifth longer, and the proof of two takes 3 ms. */
static enum kv_err bring_layers(struct rest_layers *layers) {
    uint32_t all = layers->layers, most = (all + 3) / 4, least = (all + 15) / 16;
    enum kv_err err = KV_OK;
    layers->at.sent_ns = now_ns(layers);
    for (uint32_t first = 0, end; first < all && err == KV_OK; first = end) {
        uint32_t half = (all - first + 1) / 2, wanted = half < most ? half : most;
        end = first + (wanted > least ? wanted : least);
        end = end < all ? end : all;
#ifdef BREAK_LAYERS_EARLY
        transfer_layers_arrived(layers->session, end);
#endif
        err = bring(layers, layers->fetch.whole_count, layers->fetch.count, first, end);
    }
    return err;
}

/* Until planes are listed, too. */
static enum kv_err await_list(struct rest_layers *layers) {
    pthread_mutex_lock(&layers->lock);
    while (!layers->listed && !layers->stop)
        pthread_cond_wait(&layers->moved, &layers->lock);
    int listed = layers->listed;
    pthread_mutex_unlock(&layers->lock);
    return listed ? KV_OK : KV_ERR_CANCELLED;
}

/* What every layer needs comes as a whole and first, pages in front: they are waited for. */
static void *loader_main(void *context) {
    struct rest_layers *layers = context;
    struct engine *engine = layers->args.source->engine;
    transfer_send_begin(engine);
    uint64_t begun = now_ns(layers);
    const struct rest_fetch *fetch = &layers->fetch;
    enum kv_err err = bring(layers, 0, fetch->page_count, 0, layers->layers);
    if (err == KV_OK)
        err = bring(layers, fetch->page_count, fetch->whole_count, 0, layers->layers);
    if (err == KV_OK)
        err = await_list(layers);
    if (err == KV_OK)
        err = bring_layers(layers);
    if (err == KV_OK)
        err = settle(layers);
    layers->copy_ns = now_ns(layers) - begun;
    enum kv_err end = transfer_send_end(engine);
    err = err == KV_OK ? end : err;
    layers->copy_err = err;
    /* Nobody expects layers before. */
    if (err != KV_OK && await_list(layers) == KV_OK)
        transfer_layers_failed(layers->session, err);
    pthread_mutex_lock(&layers->lock);
    layers->over = 1;
    pthread_cond_broadcast(&layers->moved);
    pthread_mutex_unlock(&layers->lock);
    return NULL;
}

/* --- checks */

static void note(struct rest_layers *layers, enum kv_err err, const struct kv_diag *diag) {
    layers->failed++;
    pthread_mutex_lock(&layers->lock);
    if (layers->err == KV_OK) {
        layers->err = err;
        layers->diag = *diag;
    }
    pthread_mutex_unlock(&layers->lock);
}

/* Digests where they lie, numbers where they were lent. */
static void check(struct rest_layers *layers, size_t at, size_t count) {
    struct transfer_part places[CHECK_EACH];
    struct kv_digest found[CHECK_EACH];
    uint64_t begun = now_ns(layers);
    for (size_t i = 0; i < count; i++)
        places[i] = layers->fetch.items[at + i].place;
    enum kv_err here =
        transfer_digests(layers->args.source->engine, places, (uint32_t)count, found);
    for (size_t i = 0; i < count; i++) {
        const struct rest_fetch_item *item = &layers->fetch.items[at + i];
        const struct rest_load_landed landed = {item, layers->loans[at + i].bytes, here, &found[i]};
        struct kv_diag diag = {""};
        enum kv_err err = rest_load_look(&landed, &diag);
        layers->checked++;
        if (err != KV_OK)
            note(layers, err, &diag);
    }
    layers->check_ns += now_ns(layers) - begun;
}

static void *checker_main(void *context) {
    struct rest_layers *layers = context;
    const size_t page_count = layers->fetch.page_count;
    kv_polite();
    pthread_mutex_lock(&layers->lock);
    for (size_t at = 0, count; !layers->listed || at < layers->fetch.count; at += count) {
        while (layers->placed <= at && !layers->over)
            pthread_cond_wait(&layers->moved, &layers->lock);
        count = layers->placed - (at < layers->placed ? at : layers->placed);
        if (count == 0)
            break;
        count = count < CHECK_EACH ? count : CHECK_EACH;
        if (at < page_count && count > page_count - at)
            count = page_count - at;
        pthread_mutex_unlock(&layers->lock);
        check(layers, at, count);
        pthread_mutex_lock(&layers->lock);
        layers->looked = at + count;
        if (at < page_count)
            layers->err_of_pages = layers->err;
        pthread_cond_broadcast(&layers->moved);
    }
    layers->done = 1;
    pthread_cond_broadcast(&layers->moved);
    pthread_mutex_unlock(&layers->lock);
    layers->at.digested_ns = now_ns(layers);
    return NULL;
}

/* --- the caller */

/* 1 when all bytes of the items from `first` on are lent, and they are of these streams. */
static int borrow(struct rest_layers *layers, size_t first, uint32_t streams) {
    int good = 1;
    for (size_t i = first; i < layers->fetch.count && good; i++) {
        const struct rest_fetch_item *item = &layers->fetch.items[i];
        good = streams >> item->stream & 1 &&
               store_ram_borrow(layers->args.source->store, item->extent, &layers->loans[i]);
    }
    return good;
}

static void release(struct rest_layers *layers) {
    const struct restore_source *source = layers->args.source;
    for (size_t i = 0; i < layers->fetch.count && layers->loans != NULL; i++)
        store_ram_return(source->store, &layers->loans[i]);
    pthread_cond_destroy(&layers->moved);
    pthread_mutex_destroy(&layers->lock);
    kv_alloc_release(source->alloc, layers->loans);
    rest_fetch_release(&layers->fetch);
    kv_alloc_release(source->alloc, layers);
}

/* 1 when all planes of a block that are wanted are in memory. */
static int has_planes(const struct rest_layers *layers, uint32_t index) {
    const struct rest_load_args *args = &layers->args;
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    uint32_t count = transfer_load_block(args->load, index, parts);
    int has = 1;
    for (uint32_t i = 0; i < count && has; i++) {
        const struct store_extent *extent =
            rest_plan_extent(&args->plan->blocks[index], parts[i].stream);
        struct store_ram_loan loan = {NULL, NULL};
        has = extent != NULL && store_ram_borrow(args->source->store, extent, &loan);
        store_ram_return(args->source->store, &loan);
    }
    return has;
}

/* *lent_out: what every layer needs is lent, and so may its planes be. One that was kept at its
 * floor lacks planes of its oldest block: it is told here, before it waits for others' copies. */
static enum kv_err prepare(struct rest_layers *layers, int *lent_out, struct kv_diag *diag) {
    const struct rest_load_args *args = &layers->args;
    const struct rest_fetch *fetch = &layers->fetch;
    layers->loans = kv_alloc_zeroed(args->source->alloc, fetch->room, sizeof *layers->loans);
    if (layers->loans == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu copies", fetch->room);
    layers->layers = args->plan->image.model.geometry.layers;
    *lent_out = fetch->whole_count > fetch->page_count &&
                has_planes(layers, args->plan->image.block_count - 1) && has_planes(layers, 0) &&
                borrow(layers, 0, STREAMS_OF_ALL);
    return KV_OK;
}

static void join(struct rest_layers *layers) {
    if (layers->loads)
        pthread_join(layers->loader, NULL);
    if (layers->checks)
        pthread_join(layers->checker, NULL);
    layers->loads = layers->checks = 0;
}

static void stop(struct rest_layers *layers) {
    pthread_mutex_lock(&layers->lock);
    layers->stop = 1;
    pthread_cond_broadcast(&layers->moved);
    pthread_mutex_unlock(&layers->lock);
}

/* Until the pages are whole and as they were saved: those that are staged are not there any more
 * once they are published. */
static enum kv_err await_pages(struct rest_layers *layers, struct kv_diag *diag) {
    pthread_mutex_lock(&layers->lock);
    while (layers->looked < layers->fetch.page_count && !layers->done)
        pthread_cond_wait(&layers->moved, &layers->lock);
    int whole = layers->looked >= layers->fetch.page_count;
    enum kv_err err = layers->err_of_pages;
    if (err != KV_OK)
        kv_diag_set(diag, err, "%s", layers->diag.text);
    pthread_mutex_unlock(&layers->lock);
    return err != KV_OK || whole
               ? err
               : kv_diag_set(diag, KV_ERR_DEVICE, "window and sinks: the device failed");
}

static int start(struct rest_layers *layers) {
    int error = pthread_create(&layers->loader, NULL, loader_main, layers);
    layers->loads = error == 0;
    if (error == 0)
        error = pthread_create(&layers->checker, NULL, checker_main, layers);
    layers->checks = error == 0;
    return error;
}

/* The planes, while pages and scales are copied. *lent_out 0: not all of them are in memory, or
 * there are others than planes. */
static enum kv_err list_planes(struct rest_layers *layers, int *lent_out, struct kv_diag *diag) {
    struct rest_fetch *fetch = &layers->fetch;
    enum kv_err err = rest_fetch_rest(layers->args.plan, layers->args.load, fetch, diag);
    *lent_out = err == KV_OK && fetch->count > fetch->whole_count &&
                borrow(layers, fetch->whole_count, PLANES);
    if (!*lent_out)
        return err;
    const struct store_read_stats stats = {.ram_bytes = fetch->raw_bytes};
    rest_load_stats(layers->args.receipt, &stats);
    transfer_layers_expect(layers->session);
    pthread_mutex_lock(&layers->lock);
    layers->listed = 1;
    pthread_cond_broadcast(&layers->moved);
    pthread_mutex_unlock(&layers->lock);
    return KV_OK;
}

/* Two threads, which go on when everything is lent. */
static enum kv_err bring_all(struct rest_layers *layers, int *lent_out, struct kv_diag *diag) {
    struct receipt *receipt = layers->args.receipt;
    int error = start(layers);
    enum kv_err err = KV_OK;
    if (error != 0)
        err = kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot start a thread to load with");
    if (err == KV_OK)
        err = list_planes(layers, lent_out, diag);
    if (err == KV_OK && *lent_out)
        err = await_pages(layers, diag);
    if (err == KV_OK && *lent_out)
        return KV_OK;
    stop(layers);
    join(layers);
    receipt->digests_checked += err != KV_OK ? layers->checked : 0;
    receipt->digests_failed += err != KV_OK ? layers->failed : 0;
    return err;
}

enum kv_err rest_layers_begin(const struct rest_load_args *args, struct rest_fetch *fetch,
                              struct rest_layers **layers_out, struct kv_diag *diag) {
    const struct rest_plan *plan = args->plan;
    int lent = 0;
    *layers_out = NULL;
    /* Image and ids would have come from there, too. */
    if (!plan->ram || plan->read.read_bytes != 0 || plan->read.ram_bytes == 0)
        return KV_OK;
    struct rest_layers *layers = kv_alloc_zeroed(args->source->alloc, 1, sizeof *layers);
    if (layers == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to load session %s", plan->image.name);
    layers->args = *args;
    layers->fetch = *fetch;
    pthread_mutex_init(&layers->lock, NULL);
    pthread_cond_init(&layers->moved, NULL);
    layers->session = transfer_load_session(args->load);
    /* Nobody can see the shadow yet. */
    engine_away(args->source->engine);
    enum kv_err err = prepare(layers, &lent, diag);
    if (err == KV_OK && lent)
        err = bring_all(layers, &lent, diag);
    engine_back(args->source->engine);
    if (err == KV_OK && lent) {
        *fetch = (struct rest_fetch){0};
        *layers_out = layers;
        return KV_OK;
    }
    *fetch = layers->fetch;
    layers->fetch.alloc = NULL; /* not ours to release */
    release(layers);
    return err;
}

/* Outside the lock. */
static void tell_progress(struct rest_layers *layers, uint64_t done) {
    const struct restore_options *options = layers->args.options;
    if (options->progress != NULL && !layers->cancelled &&
        options->progress(options->progress_context, done, layers->fetch.raw_bytes) == 0)
        layers->cancelled = 1;
}

/* Until the first are there, or no more will come. */
static void watch(struct rest_layers *layers) {
    uint64_t told = 0;
    pthread_mutex_lock(&layers->lock);
    while (layers->there == 0 && !layers->over) {
        uint64_t done = layers->bytes_done;
        if (done == told) {
            pthread_cond_wait(&layers->moved, &layers->lock);
            continue;
        }
        pthread_mutex_unlock(&layers->lock);
        tell_progress(layers, told = done);
        pthread_mutex_lock(&layers->lock);
        layers->stop |= layers->cancelled;
    }
    pthread_mutex_unlock(&layers->lock);
}

enum kv_err rest_layers_follow(struct rest_layers *layers, struct session *session,
                               struct kv_diag *diag) {
    struct engine *engine = layers->args.source->engine;
    assert(session == layers->session);
    session_ask_begin(session);
    layers->followed = 1;
    engine_away(engine);
    watch(layers);
    engine_back(engine);
    return layers->cancelled ? kv_diag_set(diag, KV_ERR_CANCELLED, "stopped while reading") : KV_OK;
}

static void add_to_receipt(const struct rest_layers *layers) {
    struct receipt *receipt = layers->args.receipt;
    for (size_t i = 0; i < layers->fetch.count; i++)
        rest_load_count(receipt, &layers->fetch.items[i]);
    receipt->layers = layers->at;
    receipt->blocks = layers->args.plan->image.block_count;
    receipt->digests_checked += layers->checked;
    receipt->digests_failed += layers->failed;
    receipt->stage_ns[RECEIPT_COPY] += layers->copy_ns;
    receipt->stage_ns[RECEIPT_DIGEST] += layers->check_ns;
}

/* What the two threads have come to. */
static enum kv_err outcome(struct rest_layers *layers, struct kv_diag *diag) {
    if (layers->cancelled)
        return kv_diag_set(diag, KV_ERR_CANCELLED, "stopped while reading");
    if (layers->copy_err != KV_OK)
        return kv_diag_set(diag, layers->copy_err, "planes of %u layers: the device failed",
                           layers->layers - layers->there);
    if (layers->err != KV_OK)
        return kv_diag_set(diag, layers->err, "%s", layers->diag.text);
    return layers->checked == layers->fetch.count
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_IO, "%u of %zu extents were digested", layers->checked,
                             layers->fetch.count);
}

enum kv_err rest_layers_end(struct rest_layers *layers, struct kv_diag *diag) {
    if (layers == NULL)
        return KV_OK;
    enum kv_err err = KV_OK;
    if (!layers->followed)
        stop(layers);
    engine_away(layers->args.source->engine);
    join(layers);
    if (layers->followed && layers->copy_err == KV_OK)
        tell_progress(layers, layers->fetch.raw_bytes);
    engine_back(layers->args.source->engine);
    if (layers->followed) {
        session_ask_end(layers->session);
        add_to_receipt(layers);
        err = outcome(layers, diag);
    }
    release(layers);
    return err;
}
