/* snapshot/snap_ahead.c - blocks and pages made ready by helpers before their batch takes them.
 *
 * Responsible for: what snap_ahead.h says.
 * Not responsible for: copying (snap_parts.c) or zip (store/store_pack.c) themselves.
 */
#include "snapshot/snap_ahead.h"

#include "store/base/polite.h"

#include <assert.h>
#include <unistd.h>

enum { HELPERS_USUAL = 14, OTHERS = 2 };

/* Ready or in work: enough that helpers need not stop while a batch is synced. */
enum { SLOTS_MAX = SNAP_AHEAD_HELPERS_MAX + SNAP_AHEAD_MORE };

struct helper {
    struct snap_ahead *ahead;
    struct store_packer *packer;
    pthread_t thread;
};

struct snap_ahead {
    struct snapshot *snapshot;
    uint32_t helper_count, slot_count;
    struct helper helpers[SNAP_AHEAD_HELPERS_MAX];
    struct snap_ready slots[SLOTS_MAX];

    pthread_mutex_t lock; /* guards the list, states of jobs, what slots say of them, `stop` */
    pthread_cond_t work, rest;
    struct snap_job *first, *last; /* not begun, as queued */
    uint64_t begun;                /* jobs, so far */
    int stop;
};

/* --- the list; the lock is held */

static void unlist(struct snap_ahead *ahead, struct snap_job *job) {
    struct snap_job **before = job->before != NULL ? &job->before->next : &ahead->first;
    struct snap_job **behind = job->next != NULL ? &job->next->before : &ahead->last;
    *before = job->next;
    *behind = job->before;
    job->next = job->before = NULL;
}

static struct snap_ready *free_slot(struct snap_ahead *ahead) {
    for (uint32_t i = 0; i < ahead->slot_count; i++)
        if (!ahead->slots[i].taken)
            return &ahead->slots[i];
    return NULL;
}

/* --- helpers */

/* Places for all extents, and the order in which helpers begin with them: what is to be zipped in
 * front, the largest first, so that nobody begins with much when the others have ended. */
static enum kv_err lay_out(struct snap_ahead *ahead, struct snap_ready *ready) {
    const struct kv_alloc *alloc = ahead->snapshot->alloc;
    size_t rooms[RECORD_BLOCK_EXTENTS_MAX], bytes = 0;
    for (uint32_t i = 0; i < ready->parts.count; i++) {
        uint32_t at = i;
        rooms[i] = store_pack_room(&ready->parts.parts[i]);
        ready->room_at[i] = bytes;
        bytes += rooms[i];
        for (; at > 0 && rooms[ready->order[at - 1]] < rooms[i]; at--)
            ready->order[at] = ready->order[at - 1];
        ready->order[at] = (uint8_t)i;
    }
    if (bytes <= ready->room_bytes)
        return KV_OK;
    kv_alloc_release(alloc, ready->room);
    ready->room = kv_alloc_large(alloc, bytes);
    ready->room_bytes = ready->room != NULL ? bytes : 0;
    return ready->room != NULL ? KV_OK : KV_ERR_NOMEM;
}

/* The bytes of a job where the processor reaches them. */
static enum kv_err fetch(struct snap_ahead *ahead, const struct snap_job *job,
                         struct snap_ready *ready) {
    struct snapshot *snapshot = ahead->snapshot;
    enum kv_err err = KV_OK;
    if (job->item->block != NULL)
        err = snap_parts_take(snapshot, job->item, &ready->parts, NULL);
    else
        snap_parts_page(&job->item->ticket->frozen, job->page, &ready->parts);
    if (err != KV_OK)
        return err;
    err = lay_out(ahead, ready);
    if (err != KV_OK)
        snap_parts_drop(snapshot, &ready->parts);
    return err;
}

/* The lock is held. */
static void end_job(struct snap_ahead *ahead, struct snap_ready *ready) {
    ready->job->state = SNAP_JOB_READY;
    pthread_cond_broadcast(&ahead->rest);
}

/* The lock is held, and given back meanwhile. */
static void begin_job(struct snap_ahead *ahead, struct snap_job *job, struct snap_ready *ready) {
    unlist(ahead, job);
    job->state = SNAP_JOB_BEGUN;
    job->ready = ready;
    ready->taken = 1;
    ready->job = job;
    ready->number = ahead->begun++;
    ready->extents = ready->begun = ready->ended = 0;
    ready->zip_ns = ready->zip_most_ns = 0;
    pthread_mutex_unlock(&ahead->lock);
    enum kv_err err = fetch(ahead, job, ready);
    pthread_mutex_lock(&ahead->lock);
    ready->err = err;
    if (err != KV_OK) {
        end_job(ahead, ready);
        return;
    }
    ready->extents = ready->parts.count;
    if (ready->extents > 1)
        pthread_cond_broadcast(&ahead->work);
}

/* The oldest job with an extent that nobody has begun with; the lock is held. */
static struct snap_ready *open_job(struct snap_ahead *ahead) {
    struct snap_ready *oldest = NULL;
    for (uint32_t i = 0; i < ahead->slot_count; i++) {
        struct snap_ready *ready = &ahead->slots[i];
        int open = ready->taken && ready->begun < ready->extents;
#ifdef BREAK_AHEAD_ALONE
        open = open && ready->begun == ready->ended;
#endif
        if (open && (oldest == NULL || ready->number < oldest->number))
            oldest = ready;
    }
    return oldest;
}

/* The lock is held, and given back meanwhile. */
static void zip_extent(struct helper *helper, struct snap_ready *ready) {
    struct snap_ahead *ahead = helper->ahead;
    const struct kv_clock *clock = ahead->snapshot->clock;
    uint32_t which = ready->order[ready->begun++];
    size_t used = 0;
    pthread_mutex_unlock(&ahead->lock);
    uint64_t begun = kv_clock_now_ns(clock);
    enum kv_err err = store_pack(helper->packer, &ready->parts.parts[which],
                                 ready->room + ready->room_at[which], &ready->packed[which], &used);
    uint64_t zip_ns = kv_clock_now_ns(clock) - begun;
    pthread_mutex_lock(&ahead->lock);
    if (err != KV_OK)
        ready->err = err;
    ready->zip_ns += zip_ns;
    if (zip_ns > ready->zip_most_ns)
        ready->zip_most_ns = zip_ns;
    if (++ready->ended < ready->extents)
        return;
    if (ready->err != KV_OK)
        snap_parts_drop(ahead->snapshot, &ready->parts);
    end_job(ahead, ready);
}

static void *helper_main(void *argument) {
    struct helper *helper = argument;
    struct snap_ahead *ahead = helper->ahead;
    kv_polite();
    pthread_mutex_lock(&ahead->lock);
    while (!ahead->stop) {
        struct snap_ready *ready = open_job(ahead);
        if (ready != NULL)
            zip_extent(helper, ready);
        else if (ahead->first != NULL && (ready = free_slot(ahead)) != NULL)
            begin_job(ahead, ahead->first, ready);
        else
            pthread_cond_wait(&ahead->work, &ahead->lock);
    }
    pthread_mutex_unlock(&ahead->lock);
    return NULL;
}

/* --- open and close */

uint32_t snapshot_helpers_usual(void) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (cores <= OTHERS)
        return 0; /* zip would take turns with whoever computes */
    return cores > HELPERS_USUAL + OTHERS ? HELPERS_USUAL : (uint32_t)cores - OTHERS;
}

static int start(struct snap_ahead *ahead, struct helper *helper) {
    helper->ahead = ahead;
    if (store_packer_make(ahead->snapshot->store, &helper->packer) != KV_OK)
        return 0;
    if (pthread_create(&helper->thread, NULL, helper_main, helper) == 0)
        return 1;
    store_packer_drop(helper->packer);
    return 0;
}

/* Memory that a device copies to is dear to get, and others wait for the device meanwhile: it is
 * got before anybody works. What it is for is a block as it is usually sealed. */
static void warm(struct snap_ahead *ahead) {
    struct engine *engine = ahead->snapshot->engine;
    const uint32_t streams = layout_tier_streams(LAYOUT_K8V4);
    struct engine_model model;
    void *memory[SLOTS_MAX];
    uint64_t bytes = 0;
    if (transfer_mapped(engine))
        return;
    engine_model(engine, &model);
    for (uint32_t i = 0; i < LAYOUT_STREAM_COUNT; i++)
        if (streams & 1u << i)
            bytes += layout_stream_bytes(&model.geometry, (enum layout_stream)i);
    for (uint32_t i = 0; i < ahead->slot_count; i++)
        memory[i] = transfer_host_get(engine, bytes);
    for (uint32_t i = 0; i < ahead->slot_count; i++)
        transfer_host_put(engine, memory[i]);
}

enum kv_err snap_ahead_open(struct snapshot *snapshot, uint32_t helpers,
                            struct snap_ahead **ahead_out, struct kv_diag *diag) {
    *ahead_out = NULL;
    if (helpers == 0)
        return KV_OK;
    struct snap_ahead *ahead = kv_alloc_zeroed(snapshot->alloc, 1, sizeof *ahead);
    if (ahead == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the background writer's helpers");
    ahead->snapshot = snapshot;
    ahead->slot_count = helpers + SNAP_AHEAD_MORE;
    pthread_mutex_init(&ahead->lock, NULL);
    pthread_cond_init(&ahead->work, NULL);
    pthread_cond_init(&ahead->rest, NULL);
    warm(ahead);
    while (ahead->helper_count < helpers && start(ahead, &ahead->helpers[ahead->helper_count]))
        ahead->helper_count++;
    *ahead_out = ahead;
    return KV_OK;
}

void snap_ahead_close(struct snap_ahead *ahead) {
    if (ahead == NULL)
        return;
    pthread_mutex_lock(&ahead->lock);
    assert(ahead->first == NULL);
    ahead->stop = 1;
    pthread_cond_broadcast(&ahead->work);
    pthread_mutex_unlock(&ahead->lock);
    for (uint32_t i = 0; i < ahead->helper_count; i++) {
        pthread_join(ahead->helpers[i].thread, NULL);
        store_packer_drop(ahead->helpers[i].packer);
    }
    for (uint32_t i = 0; i < ahead->slot_count; i++)
        kv_alloc_release(ahead->snapshot->alloc, ahead->slots[i].room);
    pthread_cond_destroy(&ahead->work);
    pthread_cond_destroy(&ahead->rest);
    pthread_mutex_destroy(&ahead->lock);
    kv_alloc_release(ahead->snapshot->alloc, ahead);
}

uint32_t snap_ahead_helpers(const struct snap_ahead *ahead) {
    return ahead != NULL ? ahead->helper_count : 0;
}

uint32_t snap_ahead_held(struct snap_ahead *ahead) {
    uint32_t held = 0;
    pthread_mutex_lock(&ahead->lock);
    for (uint32_t i = 0; i < ahead->slot_count; i++)
        held += ahead->slots[i].taken != 0;
    pthread_mutex_unlock(&ahead->lock);
    return held;
}

/* --- from the queue to the batch */

static void enlist(struct snap_ahead *ahead, struct snap_job *job) {
    job->state = SNAP_JOB_LISTED;
    job->next = NULL;
    job->before = ahead->last;
    if (ahead->last != NULL)
        ahead->last->next = job;
    else
        ahead->first = job;
    ahead->last = job;
}

void snap_ahead_add(struct snap_ahead *ahead, struct snap_item *item) {
    if (ahead == NULL)
        return;
    pthread_mutex_lock(&ahead->lock);
    for (uint32_t i = 0; i < item->job_count; i++)
        if (item->block != NULL || snap_parts_has_page(&item->ticket->frozen, i))
            enlist(ahead, &item->jobs[i]);
    /* Whoever is woken without a place only goes to sleep again. */
    if (free_slot(ahead) != NULL)
        pthread_cond_broadcast(&ahead->work);
    pthread_mutex_unlock(&ahead->lock);
}

/* Nobody begins with it any more, and who has begun has ended. The lock is held. */
static void settle(struct snap_ahead *ahead, struct snap_job *job) {
    if (job->state == SNAP_JOB_LISTED) {
        unlist(ahead, job);
        job->state = SNAP_JOB_NOBODY;
    }
    while (job->state == SNAP_JOB_BEGUN)
        pthread_cond_wait(&ahead->rest, &ahead->lock);
}

struct snap_ready *snap_ahead_take(struct snap_ahead *ahead, struct snap_job *job) {
    struct snap_ready *ready = NULL;
    if (ahead == NULL)
        return NULL;
    pthread_mutex_lock(&ahead->lock);
    settle(ahead, job);
    if (job->state == SNAP_JOB_READY && job->ready->err == KV_OK)
        ready = job->ready;
    pthread_mutex_unlock(&ahead->lock);
    return ready;
}

void snap_ahead_end(struct snap_ahead *ahead, struct snap_item *item) {
    if (ahead == NULL)
        return;
    pthread_mutex_lock(&ahead->lock);
    for (uint32_t i = 0; i < item->job_count; i++) {
        struct snap_job *job = &item->jobs[i];
        settle(ahead, job);
        if (job->state == SNAP_JOB_READY) {
            if (job->ready->err == KV_OK)
                snap_parts_drop(ahead->snapshot, &job->ready->parts);
            job->ready->taken = 0;
            job->ready = NULL;
            pthread_cond_signal(&ahead->work);
        }
        job->state = SNAP_JOB_NOBODY;
    }
    pthread_mutex_unlock(&ahead->lock);
}
