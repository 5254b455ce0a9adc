/* tools/serve.c - one service shared by many threads: open, count, picture, stop.
 *
 * Responsible for: the bounded queue, the picture, the orderly end.
 * Not responsible for: a turn (serve_turn.c), receipts (serve_receipt.c).
 */
#include "tools/serve.h"

#include "tools/serve_inner.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const uint64_t second_ns = 1000000000;
enum { NAMES_BYTES = 256 }; /* of sessions in one line */

void serve_inner_log(struct serve *serve, const char *format, ...) {
    char line[1024];
    va_list arguments;
    if (serve->settings.log == NULL)
        return;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    serve->settings.log(serve->settings.log_context, line);
}

int serve_inner_hurry(struct serve *serve) {
    pthread_mutex_lock(&serve->lock);
    int hurry = serve->hurry;
    pthread_mutex_unlock(&serve->lock);
    return hurry;
}

/* --- opening */

enum kv_err serve_open(struct service *service, const struct serve_settings *settings,
                       struct serve **serve_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = service_alloc(service);
    struct serve *serve = kv_alloc_zeroed(alloc, 1, sizeof *serve);
    if (serve == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to serve");
    serve->service = service;
    serve->settings = *settings;
    serve->alloc = *alloc;
    serve->clock = service_clock(service);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&serve->gone, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&serve->handed, NULL);
    pthread_cond_init(&serve->written, NULL);
    pthread_mutex_init(&serve->lock, NULL);
    enum kv_err err = prefix_open(service, &serve->prefix, diag);
    if (err == KV_OK)
        err = serve_receipt_open(serve, diag);
    if (err == KV_OK)
        err = service_share(service, diag);
    if (err == KV_OK)
        *serve_out = serve;
    else
        serve_close(serve);
    return err;
}

void serve_close(struct serve *serve) {
    if (serve == NULL)
        return;
    serve_receipt_close(serve);
    service_unshare(serve->service);
    service_on_receipt(serve->service, NULL, NULL);
    prefix_close(serve->prefix);
    pthread_cond_destroy(&serve->gone);
    pthread_cond_destroy(&serve->handed);
    pthread_cond_destroy(&serve->written);
    pthread_mutex_destroy(&serve->lock);
    struct kv_alloc alloc = serve->alloc;
    kv_alloc_release(&alloc, serve);
}

enum kv_err serve_refresh(struct serve *serve, struct kv_diag *diag) {
    return prefix_refresh(serve->prefix, diag);
}

enum kv_err serve_note(struct serve *serve, const char *name, struct kv_diag *diag) {
    return prefix_note(serve->prefix, name, diag);
}

int serve_is_ready(struct serve *serve) {
    pthread_mutex_lock(&serve->lock);
    int ready = !serve->stopping;
    pthread_mutex_unlock(&serve->lock);
    return ready;
}

/* --- the picture */

static void picture_session(struct session *session, uint64_t now_ns, struct serve_session *out) {
    struct session_info info;
    session_info(session, &info);
    *out = (struct serve_session){.state = info.state,
                                  .n = info.n,
                                  .n_kv = info.n_kv,
                                  .slots = info.slots,
                                  .blocks = info.blocks,
                                  .blocks_durable = info.blocks_durable};
    memcpy(out->name, info.name, strlen(info.name) + 1);
    memcpy(out->tier_blocks, info.tier_blocks, sizeof out->tier_blocks);
    out->idle_ns = now_ns > info.last_used_ns ? now_ns - info.last_used_ns : 0;
}

static enum kv_err picture_sessions(struct serve *serve, struct serve_picture *picture) {
    struct engine *engine = service_engine(serve->service);
    uint64_t now_ns = kv_clock_now_ns(serve->clock);
    uint32_t count = 0;
    while (session_at(engine, count) != NULL)
        count++;
    picture->sessions = kv_alloc_zeroed(&serve->alloc, count + 1, sizeof *picture->sessions);
    if (picture->sessions == NULL)
        return KV_ERR_NOMEM;
    for (uint32_t i = 0; i < count; i++)
        picture_session(session_at(engine, i), now_ns, &picture->sessions[i]);
    picture->session_count = count;
    return KV_OK;
}

static void picture_receipts(struct serve *serve, struct serve_picture *picture) {
    uint64_t have = serve->receipt_next;
    picture->receipt_count = have < SERVE_RECEIPTS ? (uint32_t)have : SERVE_RECEIPTS;
    for (uint32_t i = 0; i < picture->receipt_count; i++) {
        size_t at = (have - 1 - i) % SERVE_RECEIPTS;
        picture->receipts[i] = serve->receipts[at];
        picture->receipt_ids[i] = serve->receipt_ids[at];
        memcpy(picture->receipt_owners[i], serve->receipt_owners[at], SERVE_OWNER_BYTES);
    }
}

enum kv_err serve_picture(struct serve *serve, struct serve_picture *picture_out,
                          struct kv_diag *diag) {
    struct service *service = serve->service;
    struct store_stats stats;
    memset(picture_out, 0, sizeof *picture_out);
    service_enter(service);
    engine_slots(service_engine(service), &picture_out->slots);
    engine_model(service_engine(service), &picture_out->model);
    enum kv_err err = picture_sessions(serve, picture_out);
    if (service_snapshot(service) != NULL)
        snapshot_backlog(service_snapshot(service), &picture_out->spill_queue,
                         &picture_out->write_budget_wait_ns);
    strncpy(picture_out->note, service_note(service), sizeof picture_out->note - 1);
    service_leave(service);
    if (err != KV_OK)
        return kv_diag_set(diag, err, "no memory for the picture");
    store_stats_get(service_store(service), &stats);
    picture_out->store_bytes = stats.segment_bytes + stats.index_bytes;
    picture_out->store_bytes_max = stats.bytes_max;
    pthread_mutex_lock(&serve->lock);
    picture_out->requests_now = serve->requests;
    picture_out->requests_max = serve->settings.requests_max;
    picture_out->totals = serve->totals;
    picture_out->stopping = serve->stopping;
    picture_receipts(serve, picture_out);
    pthread_mutex_unlock(&serve->lock);
    return KV_OK;
}

void serve_picture_release(struct serve *serve, struct serve_picture *picture) {
    kv_alloc_release(&serve->alloc, picture->sessions);
    picture->sessions = NULL;
}

/* --- the end */

static void await_requests(struct serve *serve, uint64_t grace_ns) {
    uint64_t until_ns = kv_clock_now_ns(kv_clock_system()) + grace_ns;
    const struct timespec until = {(time_t)(until_ns / second_ns), (long)(until_ns % second_ns)};
    pthread_mutex_lock(&serve->lock);
    serve->stopping = 1;
    while (serve->requests > 0 && !serve->hurry)
        if (pthread_cond_timedwait(&serve->gone, &serve->lock, &until) != 0)
            break;
    serve->hurry = 1;
    while (serve->requests > 0)
        pthread_cond_wait(&serve->gone, &serve->lock);
    pthread_mutex_unlock(&serve->lock);
}

void serve_hurry(struct serve *serve) {
    pthread_mutex_lock(&serve->lock);
    serve->hurry = 1;
    pthread_cond_broadcast(&serve->gone);
    pthread_mutex_unlock(&serve->lock);
}

/* A save waits, and what is idle may go to sleep meanwhile: so it is leased, and found again. */
static enum kv_err save_one(struct serve *serve, const char *name, struct kv_diag *diag) {
    const struct service_patience none = {.deadline_ns = 0};
    struct service *service = serve->service;
    struct session *session = session_find(service_engine(service), name);
    struct service_lease lease;
    struct receipt receipt;
    enum kv_err err;
    if (session == NULL || service_is_saved(session))
        return KV_OK;
    if (service_is_leased(service, name))
        return kv_diag_set(
            diag, KV_ERR_BUSY,
            "a command is still at work on session %s: it stays as it was last saved", name);
    err = service_lease(service, name, &none, &lease, diag);
    if (err != KV_OK)
        return err;
    err = service_save(service, session, 0, &receipt, diag);
    service_lease_end(service, &lease);
    return err;
}

/* The sessions that could not be saved, as one line names them. */
struct unsaved {
    char names[NAMES_BYTES];
    uint32_t count, named;
    enum kv_err first;
    struct kv_diag why; /* of the first */
};

static void note_unsaved(struct unsaved *unsaved, const char *name, enum kv_err err,
                         const struct kv_diag *why) {
    size_t used = strlen(unsaved->names);
    if (unsaved->count++ == 0) {
        unsaved->first = err;
        unsaved->why = *why;
    }
    /* In their order: what does not fit ends the list. */
    if (unsaved->named + 1 != unsaved->count || used + strlen(name) + 3 > sizeof unsaved->names)
        return;
    snprintf(unsaved->names + used, sizeof unsaved->names - used, "%s%s", used > 0 ? ", " : "",
             name);
    unsaved->named++;
}

static enum kv_err tell_unsaved(const struct unsaved *unsaved, struct kv_diag *diag) {
    char more[32] = "";
    if (unsaved->count <= 1)
        return unsaved->count == 0 ? KV_OK
                                   : kv_diag_set(diag, unsaved->first, "%s", unsaved->why.text);
    if (unsaved->named < unsaved->count)
        snprintf(more, sizeof more, " and %" PRIu32 " more", unsaved->count - unsaved->named);
    return kv_diag_set(diag, unsaved->first,
                       "%" PRIu32 " sessions stay as they were last saved: %s%s; the first: %s",
                       unsaved->count, unsaved->names, more, unsaved->why.text);
}

/* Every turn that was answered is saved already; what is left was fed by somebody who went away in
 * between, or failed to save before. What a command is still at work on is its own. Nobody makes
 * sessions any more but such a command. */
static enum kv_err save_all(struct serve *serve, struct kv_diag *diag) {
    struct engine *engine = service_engine(serve->service);
    char(*names)[IMAGE_NAME_BYTES_MAX + 1] = NULL;
    struct unsaved unsaved = {.count = 0};
    uint32_t count = 0;
    service_enter(serve->service);
    snapshot_drain(service_snapshot(serve->service));
    service_settle(serve->service, NULL);
    while (session_at(engine, count) != NULL)
        count++;
    names = kv_alloc_zeroed(&serve->alloc, (size_t)count + 1, sizeof *names);
    for (uint32_t i = 0; names != NULL && i < count; i++) {
        struct session_info info;
        session_info(session_at(engine, i), &info);
        memcpy(names[i], info.name, strlen(info.name) + 1);
    }
    for (uint32_t i = 0; names != NULL && i < count; i++) {
        struct kv_diag own = {""};
        enum kv_err err = save_one(serve, names[i], &own);
        if (err == KV_OK)
            continue;
        serve_inner_log(serve, "session=%s is not saved: %s", names[i], own.text);
        note_unsaved(&unsaved, names[i], err, &own);
    }
    service_leave(serve->service);
    if (names == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to save what is awake");
    kv_alloc_release(&serve->alloc, names);
    return tell_unsaved(&unsaved, diag);
}

enum kv_err serve_stop(struct serve *serve, uint64_t grace_ns, struct kv_diag *diag) {
    await_requests(serve, grace_ns);
    return save_all(serve, diag);
}
