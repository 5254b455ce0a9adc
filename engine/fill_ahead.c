/* engine/fill_ahead.c - chunks of fill.h, made ahead of the thread that seals them.
 *
 * Responsible for: what fill_ahead.h says.
 * Not responsible for: rows (fill->rows).
 *
 * Chunk i lies in buffer i % 2. `made` and `taken` only grow: chunks that are whole, and those that
 * the caller is done with, which it says by asking for the next one.
 */
#include "engine/fill_ahead.h"

#include "engine/device/workers.h"
#include "engine/engine_inner.h"

#include <string.h>

enum { BUFFERS = 2, PARTS = 32 };

struct fill_ahead {
    struct engine *engine;
    struct fill fill;
    struct fill_stretch stretch; /* of the chunk that is made next */
    uint64_t end;
    uint16_t *buffers[BUFFERS];
    struct workers *workers;
    pthread_t thread;
    int started;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t made, taken; /* these and the rest: under the lock */
    int given, stop;      /* given: the caller has chunk `taken` */
    enum kv_err err;
    struct kv_diag diag;
};

/* --- the thread that makes */

static void make_part(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    struct fill_ahead *ahead = context;

    (void)thread;
    ahead->fill.rows(ahead->fill.context, &ahead->stretch, first, end,
                     ahead->buffers[ahead->made % BUFFERS]);
}

/* 1 once a buffer is free; 0: nobody wants more. */
static int wait_for_buffer(struct fill_ahead *ahead) {
    pthread_mutex_lock(&ahead->lock);
    while (!ahead->stop && ahead->made - ahead->taken >= BUFFERS)
        pthread_cond_wait(&ahead->changed, &ahead->lock);
    int wanted = !ahead->stop;
    pthread_mutex_unlock(&ahead->lock);
    return wanted;
}

static void *make_all(void *context) {
    struct fill_ahead *ahead = context;
    const struct layout_geometry *g = &ahead->engine->model.geometry;
    struct fill_stretch *stretch = &ahead->stretch;
    uint32_t heads = g->layers * g->kv_heads;
    enum kv_err err = KV_OK;

    while (err == KV_OK && stretch->position < ahead->end && wait_for_buffer(ahead)) {
        uint64_t next = (stretch->position / FORWARD_CHUNK_ROWS + 1) * FORWARD_CHUNK_ROWS;
        stretch->count = (uint32_t)((next < ahead->end ? next : ahead->end) - stretch->position);
        err = ahead->fill.ready(ahead->fill.context, stretch, &ahead->diag);
        if (err == KV_OK)
            workers_run(ahead->workers, heads, (heads + PARTS - 1) / PARTS, make_part, ahead);
        stretch->ids += stretch->count;
        stretch->position += stretch->count;
        pthread_mutex_lock(&ahead->lock);
        ahead->made += err == KV_OK;
        ahead->err = err;
        pthread_cond_signal(&ahead->changed);
        pthread_mutex_unlock(&ahead->lock);
    }
    return NULL;
}

/* --- the caller */

enum kv_err fill_ahead_make(struct session *session, const struct fill *fill,
                            struct fill_ahead **ahead_out, struct kv_diag *diag) {
    struct engine *engine = session->engine;
    const struct kv_alloc *alloc = engine->settings.alloc;
    uint64_t bytes = fill_chunk_bytes(engine);
    struct fill_ahead *ahead = kv_alloc_zeroed(alloc, 1, sizeof *ahead);
    enum kv_err err = KV_OK;

    if (!ahead)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for rows of session '%s'", session->name);
    *ahead = (struct fill_ahead){.engine = engine,
                                 .fill = *fill,
                                 .stretch = {.ids = session->ids + session->n_kv,
                                             .position = session->n_kv,
                                             .chunk_rows = fill_chunk_rows(engine)},
                                 .end = session->fed_end};
    pthread_mutex_init(&ahead->lock, NULL);
    pthread_cond_init(&ahead->changed, NULL);
    for (int i = 0; i < BUFFERS; i++) {
        ahead->buffers[i] = device_host_get(engine->device, bytes);
        if (!ahead->buffers[i])
            KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for rows of session '%s'",
                               session->name));
        memset(ahead->buffers[i], 0, bytes);
    }
    KV_TRY(workers_make(alloc, fill->threads, &ahead->workers, diag));
    if (pthread_create(&ahead->thread, NULL, make_all, ahead) != 0)
        KV_TRY(
            kv_diag_set(diag, KV_ERR_NOMEM, "no thread for rows of session '%s'", session->name));
    ahead->started = 1;
    *ahead_out = ahead;
done:
    if (err != KV_OK)
        fill_ahead_drop(ahead);
    return err;
}

enum kv_err fill_ahead_next(struct fill_ahead *ahead, const uint16_t **chunk_out,
                            struct kv_diag *diag) {
    enum kv_err err = KV_OK;

    pthread_mutex_lock(&ahead->lock);
    ahead->taken += ahead->given; /* the caller is done with the one before */
    pthread_cond_signal(&ahead->changed);
    while (ahead->made == ahead->taken && ahead->err == KV_OK)
        pthread_cond_wait(&ahead->changed, &ahead->lock);
    ahead->given = ahead->made > ahead->taken;
    if (!ahead->given) {
        err = ahead->err;
        *diag = ahead->diag;
    }
    *chunk_out = ahead->buffers[ahead->taken % BUFFERS];
    pthread_mutex_unlock(&ahead->lock);
    return err;
}

void fill_ahead_drop(struct fill_ahead *ahead) {
    if (!ahead)
        return;
    pthread_mutex_lock(&ahead->lock);
    ahead->stop = 1;
    pthread_cond_signal(&ahead->changed);
    pthread_mutex_unlock(&ahead->lock);
    if (ahead->started)
        pthread_join(ahead->thread, NULL);
    workers_drop(ahead->workers);
    for (int i = 0; i < BUFFERS; i++)
        device_host_put(ahead->engine->device, ahead->buffers[i]);
    pthread_cond_destroy(&ahead->changed);
    pthread_mutex_destroy(&ahead->lock);
    kv_alloc_release(ahead->engine->settings.alloc, ahead);
}
