/* snapshot/snap_spill.c - the background thread, its queue, and how results come back.
 *
 * Responsible for: order, bounds, waking, opening and closing.
 * Not responsible for: bytes and records (snap_commit.c).
 *
 * A block whose write fails, or that finds the queue full, stays volatile in its session. Its line
 * then refuses the blocks behind it, because block records are written in index order, until they
 * are all queued again: by the next save after a failure, or as soon as there is room.
 */
#include "snapshot/snap_spill.h"

#include "snapshot/snap_ahead.h"
#include "snapshot/snap_commit.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_path.h"

#include <assert.h>
#include <string.h>

enum { QUEUE_MAX = 65536, DRAIN_POLITE = 4 };
static const uint64_t second_ns = 1000000000u;

static void push(struct snap_list *list, struct snap_item *item) {
    item->next = NULL;
    if (list->last != NULL)
        list->last->next = item;
    else
        list->first = item;
    list->last = item;
}

static struct snap_item *pop(struct snap_list *list) {
    struct snap_item *item = list->first;
    if (item != NULL) {
        list->first = item->next;
        if (list->first == NULL)
            list->last = NULL;
    }
    return item;
}

static void item_drop(struct snapshot *snapshot, struct snap_item *item) {
    kv_alloc_release(snapshot->alloc, item->parts);
    kv_alloc_release(snapshot->alloc, item->jobs);
    kv_alloc_release(snapshot->alloc, item);
}

/* --- scheduler side */

/* The lock is held. */
static void hurry(struct snapshot *snapshot, int change) {
    snapshot->hurry += (uint32_t)change;
    pthread_cond_signal(&snapshot->work);
}

static struct snap_item *new_item(struct snapshot *snapshot, struct snap_line *line,
                                  uint32_t jobs) {
    struct snap_item *item = kv_alloc_zeroed(snapshot->alloc, 1, sizeof *item);
    if (item == NULL)
        return NULL;
    item->line = line;
    item->jobs = kv_alloc_zeroed(snapshot->alloc, jobs, sizeof *item->jobs);
    if (item->jobs == NULL) {
        item_drop(snapshot, item);
        return NULL;
    }
    item->job_count = jobs;
    for (uint32_t i = 0; i < jobs; i++)
        item->jobs[i] = (struct snap_job){.item = item, .page = i};
    return item;
}

/* 1 when the item is queued. Without `wait` a full queue takes nothing. */
static int enqueue(struct snapshot *snapshot, struct snap_item *item, int wait) {
    int taken = 0;
    pthread_mutex_lock(&snapshot->lock);
    hurry(snapshot, 1);
    while (wait && snapshot->queue_count >= snapshot->queue_max)
        pthread_cond_wait(&snapshot->rest, &snapshot->lock);
    hurry(snapshot, -1);
    if (snapshot->queue_count < snapshot->queue_max) {
        item->line->holds++;
        push(&snapshot->queue, item);
        snapshot->queue_count++;
        if (item->block != NULL)
            snap_ahead_add(snapshot->ahead, item);
        pthread_cond_signal(&snapshot->work);
        taken = 1;
    }
    pthread_mutex_unlock(&snapshot->lock);
    return taken;
}

static struct snap_item *block_item(struct snapshot *snapshot, struct snap_line *line,
                                    struct block *block) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    struct snap_item *item = new_item(snapshot, line, 1);
    if (item == NULL)
        return NULL;
    item->block = block;
    item->index = (uint32_t)transfer_block_index(block);
    item->part_count = transfer_block_parts(block, parts);
    item->parts = kv_alloc_zeroed(snapshot->alloc, item->part_count, sizeof *item->parts);
    if (item->parts == NULL) {
        item_drop(snapshot, item);
        return NULL;
    }
    memcpy(item->parts, parts, item->part_count * sizeof *item->parts);
    return item;
}

static void queue_block(struct snapshot *snapshot, struct snap_line *line, struct block *block,
                        int wait) {
    struct snap_item *item = NULL;
    if (!line->refusing)
        item = block_item(snapshot, line, block);
    if (item != NULL && enqueue(snapshot, item, wait))
        return;
    if (item != NULL) {
        line->overflow = 1;
        item_drop(snapshot, item);
    }
    line->refusing = 1;
    transfer_block_failed(block);
}

struct requeue {
    struct snapshot *snapshot;
    struct snap_line *line;
    int wait;
    uint32_t taken;
};

static void requeue_block(void *context, struct block *block) {
    struct requeue *requeue = context;
    requeue->taken++;
    queue_block(requeue->snapshot, requeue->line, block, requeue->wait);
}

static void requeue(struct snapshot *snapshot, struct snap_line *line, struct session *session,
                    int wait) {
    struct requeue context = {snapshot, line, wait, 0};
    int overflow = line->overflow && !wait;
    line->refusing = line->overflow = 0;
    transfer_blocks_volatile(session, requeue_block, &context);
    /* The engine has not heard yet that the refused blocks are volatile again: try later. */
    if (overflow && context.taken == 0)
        line->refusing = line->overflow = 1;
}

void snap_spill_requeue(struct snapshot *snapshot, struct snap_line *line,
                        struct session *session) {
    requeue(snapshot, line, session, 1);
}

void snapshot_block_sealed(void *context, struct session *session, struct block *block) {
    struct snapshot *snapshot = context;
    struct snap_line *line = NULL;
    if (snap_line_of(&snapshot->lines, session, &line, NULL) != KV_OK) {
        transfer_block_failed(block);
        return;
    }
    if (line->overflow)
        requeue(snapshot, line, session, 0);
    queue_block(snapshot, line, block, 0);
}

enum kv_err snap_spill_pages(struct snapshot *snapshot, struct snap_line *line,
                             struct snapshot_ticket *ticket, struct kv_diag *diag) {
    struct snap_item *item = new_item(snapshot, line, SNAP_SAVE_JOBS);
    if (item == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to queue a save");
    item->ticket = ticket;
    ticket->item = item;
#ifndef BREAK_PAGES_LATE
    snap_ahead_add(snapshot->ahead, item);
#endif
    return KV_OK;
}

void snap_spill_save(struct snapshot *snapshot, struct snapshot_ticket *ticket) {
    struct snap_item *item = ticket->item;
    ticket->item = NULL;
#ifdef BREAK_PAGES_LATE
    snap_ahead_add(snapshot->ahead, item);
#endif
    item->line->saving = 1;
    (void)enqueue(snapshot, item, 1);
}

void snap_spill_unsave(struct snapshot *snapshot, struct snapshot_ticket *ticket) {
    if (ticket->item == NULL)
        return;
    snap_ahead_end(snapshot->ahead, ticket->item);
    item_drop(snapshot, ticket->item);
    ticket->item = NULL;
}

void snap_spill_wait(struct snapshot *snapshot, const struct snapshot_ticket *ticket) {
    if (atomic_load(&ticket->done))
        return;
    engine_away(snapshot->engine);
    pthread_mutex_lock(&snapshot->lock);
    hurry(snapshot, 1);
    while (!atomic_load(&ticket->done))
        pthread_cond_wait(&snapshot->rest, &snapshot->lock);
    hurry(snapshot, -1);
    pthread_mutex_unlock(&snapshot->lock);
    engine_back(snapshot->engine);
}

static void apply_block(struct snapshot *snapshot, struct snap_item *item) {
    struct session *session = snap_line_session(&snapshot->lines, item->line);
    if (item->err != KV_OK) {
        item->line->refusing = 1;
        transfer_block_failed(item->block);
        return;
    }
    if (session != NULL) {
        struct transfer_durable *durable = transfer_durable(session);
        durable->block_count = item->index + 1;
        durable->block_chain = item->chain;
    }
    transfer_block_durable(item->block);
}

static void apply_save(struct snapshot *snapshot, struct snap_item *item) {
    struct snapshot_ticket *ticket = item->ticket;
    struct session *session = snap_line_session(&snapshot->lines, item->line);
    struct session_info info;
    item->line->saving = 0;
    ticket->applied = 1;
    if (session != NULL)
        session_brief(session, &info);
    /* The session may have gone on meanwhile: then the engine makes it active again. */
    if (session != NULL && info.state == SESSION_SAVING)
        (void)session_move(session, SESSION_IDLE);
    if (session != NULL && ticket->err == KV_OK) {
        struct transfer_durable *durable = transfer_durable(session);
        /* Blocks committed since belong to the session, not to the snapshot. */
        ticket->after.block_count = durable->block_count;
        ticket->after.block_chain = durable->block_chain;
        *durable = ticket->after;
    }
}

void snap_spill_apply(struct snapshot *snapshot) {
    pthread_mutex_lock(&snapshot->lock);
    struct snap_list done = snapshot->done;
    snapshot->done = (struct snap_list){NULL, NULL};
    snapshot->posted = 0;
    pthread_mutex_unlock(&snapshot->lock);
    struct snap_item *item;
    while ((item = pop(&done)) != NULL) {
        struct snap_line *line = item->line;
        if (item->block != NULL)
            apply_block(snapshot, item);
        else
            apply_save(snapshot, item);
        struct session *session = line->overflow ? snap_line_session(&snapshot->lines, line) : NULL;
        if (session != NULL)
            requeue(snapshot, line, session, 0);
        item_drop(snapshot, item);
        snap_line_release(&snapshot->lines, line);
    }
}

static void apply_posted(void *context) {
    snap_spill_apply(context);
}

/* --- spill thread */

/* Takes what goes into one batch: a save, or consecutive blocks. The lock is held. */
static uint32_t take(struct snapshot *snapshot, struct snap_item *items[SNAP_BATCH_BLOCKS_MAX]) {
    uint32_t count = 0, most = SNAP_BATCH_BLOCKS_MAX;
    if (snapshot->per_second.per_ns > 0 || snapshot->per_day.per_ns > 0)
        most = SNAP_BATCH_BLOCKS_BUDGET;
    while (count < most && snapshot->queue.first != NULL) {
        int save = snapshot->queue.first->ticket != NULL;
        if (save && count > 0)
            break;
        items[count++] = pop(&snapshot->queue);
        if (save)
            break;
    }
    return count;
}

static void commit(struct snapshot *snapshot, struct snap_item **items, uint32_t count) {
    if (items[0]->ticket != NULL)
        snap_commit_save(snapshot, items[0]);
    else
        snap_commit_blocks(snapshot, items, count);
}

static uint64_t budget_wait(struct snapshot *snapshot) {
    uint64_t now_ns = kv_clock_now_ns(snapshot->clock);
    uint64_t second = snap_room_bucket_wait(&snapshot->per_second, now_ns);
    uint64_t day = snap_room_bucket_wait(&snapshot->per_day, now_ns);
    return second > day ? second : day;
}

uint64_t snap_spill_budget_wait(struct snapshot *snapshot) {
    pthread_mutex_lock(&snapshot->lock);
    uint64_t wait_ns = budget_wait(snapshot);
    pthread_mutex_unlock(&snapshot->lock);
    return wait_ns;
}

static int has_save(const struct snapshot *snapshot) {
    const struct snap_item *item = snapshot->queue.first;
    while (item != NULL && item->ticket == NULL)
        item = item->next;
    return item != NULL;
}

/* Until there is something that may be written now. The lock is held. */
static void await_work(struct snapshot *snapshot) {
    for (;;) {
        uint64_t wait_ns = 0;
        if (snapshot->queue.first != NULL)
            wait_ns = budget_wait(snapshot);
        if (snapshot->stop || (snapshot->queue.first != NULL &&
                               (wait_ns == 0 || snapshot->hurry != 0 || has_save(snapshot))))
            return;
        if (wait_ns == 0) {
            pthread_cond_wait(&snapshot->work, &snapshot->lock);
            continue;
        }
        uint64_t until_ns = kv_clock_now_ns(kv_clock_system()) + wait_ns;
        const struct timespec until = {(time_t)(until_ns / second_ns),
                                       (long)(until_ns % second_ns)};
        pthread_cond_timedwait(&snapshot->work, &snapshot->lock, &until);
    }
}

void snapshot_backlog(struct snapshot *snapshot, uint32_t *queued_out,
                      uint64_t *budget_wait_ns_out) {
    pthread_mutex_lock(&snapshot->lock);
    *queued_out = snapshot->queue_count;
    *budget_wait_ns_out = budget_wait(snapshot);
    pthread_mutex_unlock(&snapshot->lock);
}

void snapshot_writer_take(struct snapshot *snapshot) {
    snap_writer_take(&snapshot->writer);
}

void snapshot_writer_give(struct snapshot *snapshot) {
    snap_writer_give(&snapshot->writer);
}

int snapshot_writer_lend(struct snapshot *snapshot) {
    return snap_writer_lend(&snapshot->writer);
}

/* Whoever holds the writer never waits to be the scheduler thread: the one that is it would wait
 * for the writer. So the wait and the taking are two things. */
void snap_spill_writer_take(struct snapshot *snapshot) {
    if (snap_writer_try(&snapshot->writer))
        return;
    snap_writer_want(&snapshot->writer, 1);
    do {
        engine_away(snapshot->engine);
        snapshot_writer_take(snapshot);
        snapshot_writer_give(snapshot);
        engine_back(snapshot->engine);
    } while (!snap_writer_try(&snapshot->writer));
    snap_writer_want(&snapshot->writer, -1);
}

static void *spill_main(void *context) {
    struct snapshot *snapshot = context;
    struct snap_item *items[SNAP_BATCH_BLOCKS_MAX];
    pthread_mutex_lock(&snapshot->lock);
    for (;;) {
        await_work(snapshot);
        uint32_t count = take(snapshot, items);
        if (count == 0)
            break;
        pthread_mutex_unlock(&snapshot->lock);
        snapshot_writer_take(snapshot);
        uint64_t before = store_written(snapshot->store);
        commit(snapshot, items, count);
        uint64_t now_ns = kv_clock_now_ns(snapshot->clock);
        uint64_t bytes = store_written(snapshot->store) - before;
        snapshot_writer_give(snapshot);
        for (uint32_t i = 0; i < count; i++)
            snap_ahead_end(snapshot->ahead, items[i]);
        pthread_mutex_lock(&snapshot->lock);
        snap_room_bucket_take(&snapshot->per_second, bytes, now_ns);
        snap_room_bucket_take(&snapshot->per_day, bytes, now_ns);
        for (uint32_t i = 0; i < count; i++) {
            struct snapshot_ticket *ticket = items[i]->ticket;
            push(&snapshot->done, items[i]);
            if (ticket != NULL)
                atomic_store(&ticket->done, 1);
        }
        snapshot->queue_count -= count;
        /* Without memory for the call the next function of the scheduler takes the list. */
        if (!snapshot->posted)
            snapshot->posted = engine_post(snapshot->engine, apply_posted, snapshot) == KV_OK;
        pthread_cond_broadcast(&snapshot->rest);
    }
    pthread_mutex_unlock(&snapshot->lock);
    return NULL;
}

/* --- open, drain, close */

enum kv_err snapshot_open(const struct snapshot_settings *settings, struct snapshot **snapshot_out,
                          struct kv_diag *diag) {
    if (settings->probes > IMAGE_PROBES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "%u probes: use at most %d", settings->probes,
                           IMAGE_PROBES_MAX);
    if (settings->queue_max == 0 || settings->queue_max > QUEUE_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "queue_max is %u: use 1 to %d",
                           settings->queue_max, QUEUE_MAX);
    if (settings->helpers > SNAP_AHEAD_HELPERS_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "%u helpers of the writer: use at most %d",
                           settings->helpers, SNAP_AHEAD_HELPERS_MAX);
    enum kv_err err = snap_gc_unsaved(settings->store, settings->alloc, diag);
    if (err != KV_OK)
        return err;
    struct snapshot *snapshot = kv_alloc_zeroed(settings->alloc, 1, sizeof *snapshot);
    if (snapshot == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the background writer");
    snapshot->store = settings->store;
    snapshot->engine = settings->engine;
    snapshot->alloc = settings->alloc;
    snapshot->clock = settings->clock;
    snapshot->queue_max = settings->queue_max;
    snapshot->probes = settings->probes;
    snapshot->leaving = settings->leaving;
    snapshot->leaving_context = settings->leaving_context;
    pthread_mutex_init(&snapshot->copying, NULL);
    err = snap_ahead_open(snapshot, settings->helpers, &snapshot->ahead, diag);
    if (err != KV_OK) {
        kv_alloc_release(settings->alloc, snapshot);
        return err;
    }
    snap_lines_init(&snapshot->lines, settings->alloc, settings->store, settings->engine);
    pthread_mutex_init(&snapshot->lock, NULL);
    snap_writer_init(&snapshot->writer);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&snapshot->work, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&snapshot->rest, NULL);
    int error = pthread_create(&snapshot->thread, NULL, spill_main, snapshot);
    if (error != 0) {
        snap_ahead_close(snapshot->ahead);
        kv_alloc_release(settings->alloc, snapshot);
        return kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot start the background writer");
    }
    *snapshot_out = snapshot;
    return KV_OK;
}

void snapshot_write_budget(struct snapshot *snapshot, uint64_t bytes_per_second,
                           uint64_t bytes_per_day) {
    uint64_t now_ns = kv_clock_now_ns(snapshot->clock);
    pthread_mutex_lock(&snapshot->lock);
    snap_room_bucket_init(&snapshot->per_second, bytes_per_second, second_ns, now_ns);
    snap_room_bucket_init(&snapshot->per_day, bytes_per_day, 86400 * second_ns, now_ns);
    pthread_cond_signal(&snapshot->work);
    pthread_mutex_unlock(&snapshot->lock);
}

static void await_empty(struct snapshot *snapshot) {
    pthread_mutex_lock(&snapshot->lock);
    hurry(snapshot, 1);
    while (snapshot->queue_count > 0)
        pthread_cond_wait(&snapshot->rest, &snapshot->lock);
    hurry(snapshot, -1);
    pthread_mutex_unlock(&snapshot->lock);
}

static int is_empty(struct snapshot *snapshot) {
    pthread_mutex_lock(&snapshot->lock);
    int empty = snapshot->queue_count == 0;
    pthread_mutex_unlock(&snapshot->lock);
    return empty;
}

/* Others may step and queue more while this waits, but not for ever. */
void snapshot_drain(struct snapshot *snapshot) {
    for (int polite = DRAIN_POLITE; !is_empty(snapshot); polite--) {
        if (polite > 0)
            engine_away(snapshot->engine);
        await_empty(snapshot);
        if (polite > 0)
            engine_back(snapshot->engine);
        snap_spill_apply(snapshot);
    }
    snap_spill_apply(snapshot);
}

void snapshot_close(struct snapshot *snapshot) {
    if (snapshot == NULL)
        return;
    snapshot_drain(snapshot);
    pthread_mutex_lock(&snapshot->lock);
    snapshot->stop = 1;
    pthread_cond_signal(&snapshot->work);
    pthread_mutex_unlock(&snapshot->lock);
    pthread_join(snapshot->thread, NULL);
    snap_ahead_close(snapshot->ahead);
    /* Calls that were posted must not find the handle gone. */
    engine_apply(snapshot->engine);
    snap_spill_apply(snapshot);
    snap_lines_end(&snapshot->lines);
    pthread_cond_destroy(&snapshot->work);
    pthread_cond_destroy(&snapshot->rest);
    pthread_mutex_destroy(&snapshot->lock);
    pthread_mutex_destroy(&snapshot->copying);
    snap_writer_release(&snapshot->writer);
    kv_alloc_release(snapshot->alloc, snapshot);
}

/* A session that was woken and has written nothing has no line of its own: one of its lineage then
 * belongs to the session that it is a branch of, which may be at work. */
static void forget(struct snapshot *snapshot, struct session *session) {
    struct snap_line *line = NULL;
#ifndef BREAK_FORGET_SOURCE
    if (transfer_durable(session)->trim_pending)
        return;
#endif
    if (snap_line_of(&snapshot->lines, session, &line, NULL) == KV_OK)
        snap_line_forget(&snapshot->lines, line);
}

void snap_spill_leave(struct snapshot *snapshot, struct session *session) {
    forget(snapshot, session);
    if (snapshot->leaving != NULL)
        snapshot->leaving(snapshot->leaving_context, session);
    session_drop(session);
}

/* What a lineage holds that no snapshot is of, its own blocks and those it shares, nobody will ever
 * read. Where that fails the next opening or gc does it. */
static void drop_unsaved(struct snapshot *snapshot, uint64_t lineage) {
    struct snap_gc gc = {.store = snapshot->store, .alloc = snapshot->alloc};
    struct record_lineage record;
    snap_spill_writer_take(snapshot);
#ifndef BREAK_DROP_UNSAVED
    if (snap_path_get(snapshot->store, lineage, &record, NULL) == KV_OK &&
        record.snapshot_count == 0)
        (void)snap_gc_drop_lineage(&gc, lineage, NULL);
#endif
    snapshot_writer_give(snapshot);
}

/* 1 when no save has moved a head to the session's lineage, as far as the session knows. */
static int is_unsaved(struct session *session) {
    const struct transfer_durable *durable = transfer_durable(session);
    return durable->lineage != 0 && (durable->snapshot == 0 || durable->head_kept);
}

void snapshot_drop(struct snapshot *snapshot, struct session *session) {
    uint64_t lineage = 0;
    if (is_unsaved(session)) {
        /* Its blocks and saves under way come first. */
        snapshot_drain(snapshot);
        lineage = is_unsaved(session) ? transfer_durable(session)->lineage : 0;
    }
    forget(snapshot, session);
    session_drop(session);
    if (lineage != 0)
        drop_unsaved(snapshot, lineage);
}
