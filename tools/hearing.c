/* tools/hearing.c - what steps of the engine say, each word to whoever listens to its session.
 *
 * Responsible for: the contract of hearing.h.
 * Not responsible for: callbacks of requests: a slow reader never holds a step.
 *
 * Tokens wait in the ear in two halves: one that steps append to, one that its thread reads.
 */
#include "tools/hearing.h"

#include "store/base/clock.h"

#include <string.h>

static const uint64_t second_ns = 1000000000u;

enum kv_err hearing_init(struct hearing *hearing, struct engine *engine,
                         const struct kv_alloc *alloc, uint32_t sessions_max) {
    *hearing = (struct hearing){.engine = engine, .alloc = alloc};
    hearing->events = kv_alloc_zeroed(alloc, 2 * (size_t)sessions_max + 1, sizeof *hearing->events);
    if (hearing->events == NULL)
        return KV_ERR_NOMEM;
    pthread_mutex_init(&hearing->lock, NULL);
    return KV_OK;
}

void hearing_release(struct hearing *hearing) {
    if (hearing->events == NULL)
        return;
    pthread_mutex_destroy(&hearing->lock);
    kv_alloc_release(hearing->alloc, hearing->events);
}

void hearing_begin(struct hearing *hearing, struct hearing_ear *ear) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&ear->word, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_lock(&hearing->lock);
    ear->next = hearing->ears;
    hearing->ears = ear;
    pthread_mutex_unlock(&hearing->lock);
}

void hearing_end(struct hearing *hearing, struct hearing_ear *ear) {
    pthread_mutex_lock(&hearing->lock);
    struct hearing_ear **at = &hearing->ears;
    while (*at != ear)
        at = &(*at)->next;
    *at = ear->next;
    pthread_mutex_unlock(&hearing->lock);
    pthread_cond_destroy(&ear->word);
    for (int i = 0; i < 2; i++)
        kv_alloc_release(hearing->alloc, ear->tokens[i]);
}

int hearing_is_wanted(struct hearing *hearing) {
    int wanted = 0;
    pthread_mutex_lock(&hearing->lock);
    for (const struct hearing_ear *ear = hearing->ears; ear != NULL; ear = ear->next)
        wanted |= !ear->over;
    pthread_mutex_unlock(&hearing->lock);
    return wanted;
}

uint32_t hearing_promised(struct hearing *hearing, const struct session *except) {
    uint32_t promised = 0;
    pthread_mutex_lock(&hearing->lock);
    for (const struct hearing_ear *ear = hearing->ears; ear != NULL; ear = ear->next) {
        struct session_info info;
        if (ear->over || ear->session == except)
            continue;
        session_info(ear->session, &info);
        if (ear->slots_planned > info.slots)
            promised += ear->slots_planned - info.slots;
    }
    pthread_mutex_unlock(&hearing->lock);
    return promised;
}

static void end_ear(struct hearing_ear *ear, enum kv_err err, const struct kv_diag *diag) {
    ear->over = ear->news = 1;
    ear->err = err;
    if (err != KV_OK)
        ear->diag = *diag;
    pthread_cond_signal(&ear->word);
}

/* A token that cannot be kept for want of memory ends the ear; the session goes on to its end. */
static void keep_token(struct hearing *hearing, struct hearing_ear *ear, uint32_t token) {
    const struct kv_diag full = {"no memory for the tokens of the answer"};
    void *tokens = ear->tokens[ear->filling];
    if (!kv_alloc_grow(hearing->alloc, &tokens, &ear->token_capacity[ear->filling],
                       ear->token_count + 1, sizeof token)) {
        end_ear(ear, KV_ERR_NOMEM, &full);
        return;
    }
    ear->tokens[ear->filling] = tokens;
    ear->tokens[ear->filling][ear->token_count++] = token;
    if (ear->token != NULL)
        ear->token(ear->context, ear->session, token);
}

/* The lock is held. */
static void tell(struct hearing *hearing, const struct engine_event *event,
                 const struct kv_diag *diag) {
    for (struct hearing_ear *ear = hearing->ears; ear != NULL; ear = ear->next) {
        if (ear->session != event->session || ear->over)
            continue;
        ear->news = 1;
        ear->n_kv = event->n_kv;
        ear->done = event->done;
        if (event->kind == ENGINE_TOKEN)
            keep_token(hearing, ear, event->token);
        if (event->kind == ENGINE_FAILED)
            end_ear(ear, event->err, diag);
        if (event->kind == ENGINE_DONE)
            end_ear(ear, KV_OK, NULL);
        pthread_cond_signal(&ear->word);
    }
}

void hearing_step(struct hearing *hearing) {
    struct kv_diag own = {""};
    uint32_t count = 0;
    enum kv_err err = engine_step(hearing->engine, hearing->events, &count, &own);
    pthread_mutex_lock(&hearing->lock);
    for (uint32_t i = 0; i < count; i++)
        tell(hearing, &hearing->events[i], &own);
    for (struct hearing_ear *ear = hearing->ears; ear != NULL; ear = ear->next)
        if ((err != KV_OK || count == 0) && !ear->over) {
            ear->done = ENGINE_DONE_FED;
            end_ear(ear, err, &own);
        }
    pthread_mutex_unlock(&hearing->lock);
}

void hearing_take(struct hearing *hearing, struct hearing_ear *ear,
                  struct hearing_heard *heard_out) {
    pthread_mutex_lock(&hearing->lock);
    *heard_out = (struct hearing_heard){.tokens = ear->tokens[ear->filling],
                                        .token_count = ear->token_count,
                                        .n_kv = ear->n_kv,
                                        .over = ear->over,
                                        .done = ear->done,
                                        .err = ear->err};
    if (ear->err != KV_OK)
        heard_out->diag = ear->diag;
    ear->filling = !ear->filling;
    ear->token_count = 0;
    ear->news = 0;
    pthread_mutex_unlock(&hearing->lock);
}

void hearing_wait(struct hearing *hearing, struct hearing_ear *ear, uint64_t wait_ns) {
    uint64_t until_ns = kv_clock_now_ns(kv_clock_system()) + wait_ns;
    const struct timespec until = {(time_t)(until_ns / second_ns), (long)(until_ns % second_ns)};
    int late = 0;
    pthread_mutex_lock(&hearing->lock);
    while (!ear->news && !late)
        late = pthread_cond_timedwait(&ear->word, &hearing->lock, &until) != 0;
    pthread_mutex_unlock(&hearing->lock);
}
