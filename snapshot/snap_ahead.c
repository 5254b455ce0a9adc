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

    pthread_mutex_t lock; /* guards the list, states of jobs, `taken` of slots and `stop` */
    pthread_cond_t work, rest;
    struct snap_job *first, *last; /* not begun, as queued */
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

static enum kv_err fit_room(struct snap_ahead *ahead, struct snap_ready *ready) {
    const struct kv_alloc *alloc = ahead->snapshot->alloc;
    size_t bytes = 0;
    for (uint32_t i = 0; i < ready->parts.count; i++)
        bytes += store_pack_room(&ready->parts.parts[i]);
    if (bytes <= ready->room_bytes)
        return KV_OK;
    kv_alloc_release(alloc, ready->room);
    ready->room = kv_alloc_aligned(alloc, bytes, STORE_PAGE_BYTES);
    ready->room_bytes = ready->room != NULL ? bytes : 0;
    return ready->room != NULL ? KV_OK : KV_ERR_NOMEM;
}

static void make_ready(struct helper *helper, const struct snap_job *job,
                       struct snap_ready *ready) {
    struct snapshot *snapshot = helper->ahead->snapshot;
    size_t at = 0;
    if (job->item->block != NULL) {
        ready->err = snap_parts_take(snapshot, job->item, &ready->parts, NULL);
    } else {
        snap_parts_page(&job->item->ticket->frozen, job->page, &ready->parts);
        ready->err = KV_OK;
    }
    if (ready->err != KV_OK)
        return;
    uint64_t begun = kv_clock_now_ns(snapshot->clock);
    ready->err = fit_room(helper->ahead, ready);
    for (uint32_t i = 0; i < ready->parts.count && ready->err == KV_OK; i++) {
        size_t used = 0;
        ready->err = store_pack(helper->packer, &ready->parts.parts[i], ready->room + at,
                                &ready->packed[i], &used);
        at += used;
    }
    ready->zip_ns = kv_clock_now_ns(snapshot->clock) - begun;
    if (ready->err != KV_OK)
        snap_parts_drop(snapshot, &ready->parts);
}

static void *helper_main(void *argument) {
    struct helper *helper = argument;
    struct snap_ahead *ahead = helper->ahead;
    kv_polite();
    pthread_mutex_lock(&ahead->lock);
    for (;;) {
        struct snap_ready *ready = NULL;
        while (!ahead->stop && (ahead->first == NULL || (ready = free_slot(ahead)) == NULL))
            pthread_cond_wait(&ahead->work, &ahead->lock);
        if (ahead->stop)
            break;
        struct snap_job *job = ahead->first;
        unlist(ahead, job);
        job->state = SNAP_JOB_BEGUN;
        job->ready = ready;
        ready->taken = 1;
        pthread_mutex_unlock(&ahead->lock);
        make_ready(helper, job, ready);
        pthread_mutex_lock(&ahead->lock);
        job->state = SNAP_JOB_READY;
        pthread_cond_broadcast(&ahead->rest);
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
