/* engine/session_state.c - the one table of legal moves between session states.
 *
 * Responsible for: names of states and which state may follow which.
 * Not responsible for: why a session moves (scheduler.c, snapshot/, restore/).
 */
#include "engine/engine_inner.h"

#define TO(state) (1u << SESSION_##state)

static const unsigned moves[SESSION_STATE_COUNT] = {
    [SESSION_IDLE] = TO(ACTIVE) | TO(SAVING) | TO(SLEEPING) | TO(FAILED),
    [SESSION_ACTIVE] = TO(IDLE) | TO(SAVING) | TO(FAILED),
    [SESSION_SAVING] = TO(IDLE) | TO(ACTIVE) | TO(SLEEPING) | TO(FAILED),
    [SESSION_SLEEPING] = TO(WAKING) | TO(FAILED),
    [SESSION_WAKING] = TO(IDLE) | TO(PARTIAL) | TO(SLEEPING) | TO(FAILED),
    [SESSION_PARTIAL] = TO(IDLE) | TO(ACTIVE) | TO(SAVING) | TO(FAILED),
    [SESSION_FAILED] = TO(SLEEPING),
};

const char *session_state_name(enum session_state state) {
    static const char *const names[SESSION_STATE_COUNT] = {
        [SESSION_IDLE] = "idle",         [SESSION_ACTIVE] = "active", [SESSION_SAVING] = "saving",
        [SESSION_SLEEPING] = "sleeping", [SESSION_WAKING] = "waking", [SESSION_PARTIAL] = "partial",
        [SESSION_FAILED] = "failed"};

    return (unsigned)state < SESSION_STATE_COUNT ? names[state] : "unknown";
}

enum kv_err session_move(struct session *session, enum session_state to) {
    if ((unsigned)to >= SESSION_STATE_COUNT || !(moves[session->state] & 1u << to))
        return KV_ERR_BUSY;
    /* A save ends while the session has gone on. */
    if (to == SESSION_IDLE && engine_inner_has_work(session))
        to = SESSION_ACTIVE;
    session->state = to;
    return KV_OK;
}
