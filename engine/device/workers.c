/* engine/device/workers.c - a fixed set of threads that share out the items of one operation.
 *
 * Responsible for: the ticket that hands out parts, spinning shortly and then sleeping.
 * Not responsible for: what an item does.
 *
 * The ticket is one word: round, next part, number of parts. A thread claims a part by raising
 * `next` with compare-and-swap. The owner starts a new round only after every part of the last one
 * is done, so the job's fields cannot change under a thread that has claimed a part, and a late
 * thread finds either nothing left or the new round.
 */
#include "engine/device/workers.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { SPINS_BEFORE_SLEEP = 3000, SPINS_BEFORE_YIELD = 400, NEXT_BITS = 16 };

struct worker {
    struct workers *pool;
    pthread_t thread;
    uint32_t index;
};

struct workers {
    const struct kv_alloc *alloc;
    uint32_t threads;
    uint32_t started; /* threads to join, the owner not counted */
    struct worker *worker;

    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic int stop;
    pthread_mutex_t mutex;
    pthread_cond_t wake;

    workers_call call;
    void *context;
    uint32_t items, part_items;
};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static uint32_t ticket_next(uint64_t ticket) {
    return (uint32_t)(ticket >> NEXT_BITS) & 0xffff;
}

static uint32_t ticket_parts(uint64_t ticket) {
    return (uint32_t)ticket & 0xffff;
}

/* Claims and does parts until none is left. */
static void work(struct workers *pool, uint32_t thread) {
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);

    while (ticket_next(ticket) < ticket_parts(ticket)) {
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket,
                                                   ticket + (1u << NEXT_BITS), memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        uint32_t first = ticket_next(ticket) * pool->part_items;
        uint32_t left = pool->items - first;
        pool->call(pool->context, first,
                   first + (left < pool->part_items ? left : pool->part_items), thread);
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_acq_rel);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
}

static int has_work(struct workers *pool) {
    uint64_t ticket = atomic_load(&pool->ticket);

    return ticket_next(ticket) < ticket_parts(ticket) || atomic_load(&pool->stop);
}

static void wait_for_work(struct workers *pool) {
    for (uint32_t spin = 0; spin < SPINS_BEFORE_SLEEP; spin++) {
        if (has_work(pool))
            return;
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!has_work(pool))
        pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;

    while (!atomic_load(&worker->pool->stop)) {
        work(worker->pool, worker->index);
        wait_for_work(worker->pool);
    }
    return NULL;
}

static void wake_sleepers(struct workers *pool) {
    if (atomic_load(&pool->sleepers) == 0)
        return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

enum kv_err workers_make(const struct kv_alloc *alloc, uint32_t threads,
                         struct workers **workers_out, struct kv_diag *diag) {
    struct workers *pool;

    if (threads < 1 || threads > WORKERS_THREADS_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "threads is %u: use 1 to %d", threads,
                           WORKERS_THREADS_MAX);
    pool = kv_alloc_aligned(alloc, sizeof *pool, 64);
    if (!pool)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the worker threads");
    *pool = (struct workers){.alloc = alloc, .threads = threads};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->worker = kv_alloc_zeroed(alloc, threads, sizeof *pool->worker);
    if (!pool->worker) {
        workers_drop(pool);
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the worker threads");
    }
    for (uint32_t i = 1; i < threads; i++) {
        struct worker *worker = &pool->worker[i];
        *worker = (struct worker){.pool = pool, .index = i};
        if (pthread_create(&worker->thread, NULL, worker_main, worker) != 0) {
            workers_drop(pool);
            return kv_diag_set(diag, KV_ERR_NOMEM,
                               "the system refused thread %u of %u: use fewer threads", i + 1,
                               threads);
        }
        pool->started++;
    }
    *workers_out = pool;
    return KV_OK;
}

void workers_drop(struct workers *pool) {
    if (!pool)
        return;
    atomic_store(&pool->stop, 1);
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 1; i <= pool->started; i++)
        pthread_join(pool->worker[i].thread, NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    kv_alloc_release(pool->alloc, pool->worker);
    kv_alloc_release(pool->alloc, pool);
}

void workers_run(struct workers *pool, uint32_t items, uint32_t grain, workers_call call,
                 void *context) {
    uint32_t part_items = items / (pool->threads * 8);
    uint32_t parts;
    uint64_t round;

    if (items == 0)
        return;
    part_items = part_items < grain ? grain : part_items;
    parts = (items - 1) / part_items + 1;
#ifdef BREAK_LAST_PART
    parts = parts > 1 ? parts - 1 : parts;
#endif
    if (pool->threads == 1 || parts == 1) {
        call(context, 0, items, 0);
        return;
    }
    assert(parts <= WORKERS_PARTS_MAX);
    pool->call = call;
    pool->context = context;
    pool->items = items;
    pool->part_items = part_items;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    round = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool->ticket, round << 32 | parts);
    wake_sleepers(pool);
    work(pool, 0);
    for (uint32_t spin = 0; atomic_load_explicit(&pool->done, memory_order_acquire) < parts;
         spin++) {
        relax();
        if (spin > SPINS_BEFORE_YIELD)
            sched_yield();
    }
}
