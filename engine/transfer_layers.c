/* engine/transfer_layers.c - layers of a waking session that arrive one after another.
 *
 * Responsible for: how many layers are in their places, and waiting for more of them.
 * Not responsible for: bringing them (restore/), computing over them (session_ask.c).
 */
#include "engine/engine_inner.h"

#include <assert.h>

void transfer_layers_expect(struct session *session) {
    struct engine_inner_gate *gate = &session->gate;

    assert(session->state == SESSION_WAKING && !gate->closed);
    pthread_mutex_lock(&gate->lock);
    gate->layers = 0;
    gate->err = KV_OK;
    pthread_mutex_unlock(&gate->lock);
    gate->closed = 1;
    gate->waited_ns = gate->last_ns = 0;
}

uint64_t transfer_layers_waited_ns(const struct session *session) {
    return session->gate.waited_ns;
}

uint64_t transfer_layers_last_ns(const struct session *session) {
    return session->gate.last_ns;
}

void transfer_layers_arrived(struct session *session, uint32_t layers) {
    struct engine_inner_gate *gate = &session->gate;

    assert(layers <= session->engine->model.geometry.layers);
    pthread_mutex_lock(&gate->lock);
    if (layers > gate->layers)
        gate->layers = layers;
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->lock);
}

void transfer_layers_failed(struct session *session, enum kv_err err) {
    struct engine_inner_gate *gate = &session->gate;

    assert(err != KV_OK);
    pthread_mutex_lock(&gate->lock);
    gate->err = err;
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->lock);
}

/* 1 when there is nothing to wait for. */
static int is_open(const struct engine_inner_gate *gate, uint32_t first) {
#ifdef BREAK_LAYER_GATE
    return 1;
#endif
    return gate->layers > first || gate->err != KV_OK;
}

enum kv_err engine_inner_layers_wait(struct session *session, uint32_t first, uint32_t *end_out,
                                     struct kv_diag *diag) {
    struct engine_inner_gate *gate = &session->gate;
    uint32_t all = session->engine->model.geometry.layers, layers = all;
    enum kv_err err = KV_OK;
    int open, away;

    if (gate->closed) {
        pthread_mutex_lock(&gate->lock);
        open = is_open(gate, first);
        pthread_mutex_unlock(&gate->lock);
        uint64_t begun = kv_clock_now_ns(session->engine->settings.clock);
        away = !open && !session->engine->stepping;
        if (away)
            engine_away(session->engine);
        pthread_mutex_lock(&gate->lock);
        while (!is_open(gate, first))
            pthread_cond_wait(&gate->moved, &gate->lock);
        layers = gate->layers;
        err = layers > first ? KV_OK : gate->err;
        pthread_mutex_unlock(&gate->lock);
        if (away)
            engine_back(session->engine);
        uint64_t now = kv_clock_now_ns(session->engine->settings.clock);
        gate->waited_ns += now - begun;
        gate->last_ns = layers == all ? now : 0;
#ifdef BREAK_LAYER_GATE
        layers = all;
        err = KV_OK;
#endif
        gate->closed = layers < all;
    }
    *end_out = layers;
    return err == KV_OK
               ? KV_OK
               : kv_diag_set(diag, err, "planes of session '%s' did not arrive (layer %u of %u)",
                             session->name, first, all);
}
