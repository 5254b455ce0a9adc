/* tools/service_inner.h - what the files of the service share.
 *
 * Responsible for: struct service.
 * Not responsible for: the contract (service.h).
 *
 * Threads: whoever has the baton, but for what stands behind `lock`.
 * Units: as service.h.
 */
#ifndef TOOLS_SERVICE_INNER_H
#define TOOLS_SERVICE_INNER_H

#include "tools/baton.h"
#include "tools/hearing.h"
#include "tools/service.h"

#include <pthread.h>

enum { SERVICE_NOTE_BYTES = 512 };
/* Something that wakes nobody may have changed: a client that went, a deadline. */
enum { SERVICE_LOOK_AGAIN_NS = 50000000 };

struct service {
    struct kv_alloc alloc;
    const struct kv_clock *clock;
    struct store *store;
    struct engine *engine;
    struct snapshot *snapshot;
    struct restore_source source;
    struct image_policy policy;
    struct image_sampler sampler;
    uint32_t probes;
    struct service_wakes wakes;
    service_receipt receipt;
    void *receipt_context;
    void (*lost)(void *context); /* NULL: nobody asks, or was told */
    void *lost_context;
    uint64_t receipt_id;    /* of the newest */
    struct snap_tend *tend; /* NULL when read-only */
    uint32_t sessions_max;
    struct hearing hearing;
    struct service_lease *leases, **leases_end; /* in the order of asking */
    char note[SERVICE_NOTE_BYTES];

    int shared; /* set before any other thread sees the service */
    struct baton baton;
    int staying; /* waits keep the baton: a hook is at work */
    pthread_t stepper;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t work, moved, stepped;
    uint64_t changes, steps;
    uint64_t asked_steps; /* `steps` when the last piece of asking a session began */
    int kicked, stop;
};

/* Who holds the lease of a name, or asked for it first; NULL: nobody. */
struct service_lease *service_inner_lease(const struct service *service, const char *name);
/* Asks for a lease without waiting for it; until service_lease_end. */
void service_inner_line_up(struct service *service, const char *name, const char *who,
                           struct service_lease *lease);

/* As the scheduler thread, before another piece of asking a session: whoever stands in line comes
 * first, and whoever listens has a few steps between any two pieces, or one after a small piece.
 * 1 when somebody listens. */
int service_inner_let_step(struct service *service, int small);

#endif
