/* tools/hearing.h - what steps of the engine say, each word to whoever listens to its session.
 *
 * Responsible for: running a step, keeping its events for the listener of each session until that
 * thread takes them: no event is lost, whichever thread steps.
 * Not responsible for: who may step when (service.h), what an event means to a turn (turn.h).
 *
 * Threads: hearing_step, _begin and _end on the scheduler thread; hearing_take and hearing_wait on
 * the thread of the ear, without being the scheduler thread.
 * Units: tokens, slots, nanoseconds.
 */
#ifndef TOOLS_HEARING_H
#define TOOLS_HEARING_H

#include "engine/engine.h"

#include <pthread.h>

struct hearing_ear {
    struct session *session; /* these four are set by its thread before hearing_begin */
    uint32_t slots_planned;  /* promised to the session until hearing_end */
    /* On the stepping thread, with the session's logits as the token was sampled; only takes
     * notes. May be NULL. */
    void (*token)(void *context, struct session *session, uint32_t token);
    void *context;
    /* Of hearing.c. */
    struct hearing_ear *next;
    pthread_cond_t word;
    uint32_t *tokens[2]; /* steps append to one, the other is being read */
    size_t token_count, token_capacity[2];
    int filling;
    uint64_t n_kv;
    int news, over;
    enum engine_done done;
    enum kv_err err;
    struct kv_diag diag;
};

struct hearing {
    struct engine *engine;
    const struct kv_alloc *alloc;
    struct engine_event *events;
    pthread_mutex_t lock;
    struct hearing_ear *ears;
};

/* NOMEM. */
enum kv_err hearing_init(struct hearing *hearing, struct engine *engine,
                         const struct kv_alloc *alloc, uint32_t sessions_max);
void hearing_release(struct hearing *hearing); /* nobody listens */

void hearing_begin(struct hearing *hearing, struct hearing_ear *ear);
void hearing_end(struct hearing *hearing, struct hearing_ear *ear);
/* 1 while somebody listens to a session that is not done. */
int hearing_is_wanted(struct hearing *hearing);
/* Slots that are promised to sessions other than `except` and not taken yet. */
uint32_t hearing_promised(struct hearing *hearing, const struct session *except);

/* One step; what it says goes to the ears. When the engine fails or has nothing to do every ear is
 * over. */
void hearing_step(struct hearing *hearing);

/* What was said to the ear since the last call. */
struct hearing_heard {
    const uint32_t *tokens; /* owned by the ear, good until the next call */
    size_t token_count;
    uint64_t n_kv;
    int over;
    enum engine_done done;
    enum kv_err err;
    struct kv_diag diag;
};
void hearing_take(struct hearing *hearing, struct hearing_ear *ear,
                  struct hearing_heard *heard_out);
/* Until something is said or `wait_ns` are over. */
void hearing_wait(struct hearing *hearing, struct hearing_ear *ear, uint64_t wait_ns);

#endif
