/* tools/service_share.c - one service and many threads.
 *
 * Responsible for: the engine thread, entering and leaving, waiting for changes, listening.
 * Not responsible for: what is done meanwhile (service.c), leases (service_lease.c).
 */
#include "tools/service_inner.h"

#include <time.h>

static const uint64_t second_ns = 1000000000;
enum { BREATH_STEPS = 8 };

void service_changed(struct service *service) {
    if (!service->shared)
        return;
    pthread_mutex_lock(&service->lock);
    service->changes++;
    pthread_cond_broadcast(&service->moved);
#ifndef BREAK_CHANGE_UNSEEN
    /* A session that is free now may be one that goes to sleep: the engine thread looks again. */
    service->kicked = 1;
    pthread_cond_signal(&service->work);
#endif
    pthread_mutex_unlock(&service->lock);
}

/* Gives up waiting after `wait_ns`; the lock is held. */
static int timed_out(struct service *service, pthread_cond_t *cond, uint64_t until_ns) {
    const struct timespec until = {(time_t)(until_ns / second_ns), (long)(until_ns % second_ns)};
    return pthread_cond_timedwait(cond, &service->lock, &until) != 0;
}

static uint64_t after(uint64_t wait_ns) {
    uint64_t now_ns = kv_clock_now_ns(kv_clock_system());
    return wait_ns > 3600 * second_ns ? now_ns + 3600 * second_ns : now_ns + wait_ns;
}

void service_await(struct service *service, uint64_t wait_ns) {
    if (!service->shared)
        return;
    uint64_t until_ns = after(wait_ns);
    int late = 0;
    pthread_mutex_lock(&service->lock);
    uint64_t seen = service->changes;
    pthread_mutex_unlock(&service->lock);
    service_leave(service);
    pthread_mutex_lock(&service->lock);
    while (service->changes == seen && !late)
        late = timed_out(service, &service->moved, until_ns);
    pthread_mutex_unlock(&service->lock);
    service_enter(service);
}

void service_enter(struct service *service) {
    if (service->shared)
        baton_take(&service->baton);
}

void service_leave(struct service *service) {
    if (!service->shared)
        return;
#ifndef BREAK_LOST_UNTOLD
    if (service->lost != NULL && engine_lost(service->engine)) {
        service->lost(service->lost_context);
        service->lost = NULL;
    }
#endif
    baton_give(&service->baton);
}

static void kick(struct service *service) {
    if (!service->shared)
        return;
    pthread_mutex_lock(&service->lock);
    service->kicked = 1;
    pthread_cond_signal(&service->work);
    pthread_mutex_unlock(&service->lock);
}

/* 0 when the thread should end. */
static int rest(struct service *service, uint64_t wait_ns) {
    uint64_t until_ns = after(wait_ns);
    int late = 0;
    pthread_mutex_lock(&service->lock);
    while (!service->kicked && !service->stop && !late)
        late = timed_out(service, &service->work, until_ns);
    service->kicked = 0;
    int goes_on = !service->stop;
    pthread_mutex_unlock(&service->lock);
    return goes_on;
}

static void count_step(struct service *service) {
    pthread_mutex_lock(&service->lock);
    service->steps++;
    pthread_cond_broadcast(&service->stepped);
    pthread_mutex_unlock(&service->lock);
}

static void step(struct service *service) {
    hearing_step(&service->hearing);
    count_step(service);
}

/* Many may ask at a time: it is their pieces together that have steps between them. `wait` 1: until
 * that is so; 0 when it is not. */
static int has_stepped(struct service *service, uint64_t steps, int wait) {
    uint64_t until_ns = after(second_ns);
    int late = !wait, stepped = 0;
    pthread_mutex_lock(&service->lock);
    for (;;) {
        stepped =
            service->steps >= service->asked_steps + steps || !hearing_is_wanted(&service->hearing);
        if (stepped || late)
            break;
        late = timed_out(service, &service->stepped, until_ns);
    }
    pthread_mutex_unlock(&service->lock);
    return stepped;
}

int service_inner_let_step(struct service *service, int small) {
    int own = pthread_equal(pthread_self(), service->stepper), stepped = 0;
    uint64_t steps = small ? 1 : BREATH_STEPS;
#ifdef BREAK_OWN_BREATH
    if (own)
        return 0;
#endif
    /* Nobody waits for ever where steps fail to come. */
    for (uint64_t i = 0; i < steps && !stepped; i++) {
        service_leave(service);
        if (!own)
            (void)has_stepped(service, steps, 1);
        service_enter(service);
        stepped = has_stepped(service, steps, 0);
        if (own && !stepped)
            step(service);
    }
    pthread_mutex_lock(&service->lock);
    service->asked_steps = service->steps;
    pthread_mutex_unlock(&service->lock);
    return hearing_is_wanted(&service->hearing);
}

/* Steps while anybody listens; between steps whoever waits in line comes first. */
static void *step_main(void *context) {
    struct service *service = context;
    uint64_t wait_ns = 0;
    while (rest(service, wait_ns)) {
        service_enter(service);
        const char *under_way = snap_tend_under_way(service->tend);
        wait_ns = service_tend(service);
        if (under_way != NULL && snap_tend_under_way(service->tend) == NULL)
            service_changed(service);
        if (hearing_is_wanted(&service->hearing)) {
            step(service);
            wait_ns = 0;
        }
        service_leave(service);
    }
    return NULL;
}

enum kv_err service_share(struct service *service, struct kv_diag *diag) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&service->work, &monotonic);
    pthread_cond_init(&service->moved, &monotonic);
    pthread_cond_init(&service->stepped, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&service->lock, NULL);
    baton_init(&service->baton);
    service->stop = 0;
    service->shared = 1;
    int error = pthread_create(&service->stepper, NULL, step_main, service);
    if (error == 0)
        return KV_OK;
    service->shared = 0;
    return kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot start the engine thread");
}

void service_unshare(struct service *service) {
    if (!service->shared)
        return;
    pthread_mutex_lock(&service->lock);
    service->stop = 1;
    pthread_cond_signal(&service->work);
    pthread_mutex_unlock(&service->lock);
    pthread_join(service->stepper, NULL);
    service->shared = 0;
    baton_release(&service->baton);
    pthread_cond_destroy(&service->work);
    pthread_cond_destroy(&service->moved);
    pthread_cond_destroy(&service->stepped);
    pthread_mutex_destroy(&service->lock);
}

void service_listen(struct service *service, struct hearing_ear *ear) {
    hearing_begin(&service->hearing, ear);
    kick(service);
}

void service_deafen(struct service *service, struct hearing_ear *ear) {
    hearing_end(&service->hearing, ear);
    service_changed(service);
}

void service_hear(struct service *service, struct hearing_ear *ear, uint64_t wait_ns,
                  struct hearing_heard *heard_out) {
    if (service->shared)
        hearing_wait(&service->hearing, ear, wait_ns);
    else
        hearing_step(&service->hearing);
    hearing_take(&service->hearing, ear, heard_out);
}
