/* snapshot/snap_tend.c - sessions that go to sleep by themselves.
 *
 * Responsible for: the contract of snap_tend.h.
 * Not responsible for: how a session is saved (snap_save.c).
 */
#include "snapshot/snap_tend.h"

#include "snapshot/snap_spill.h"

#include <string.h>

/* While a commit is under way; it wakes nobody. */
static const uint64_t look_again_ns = 5000000;

struct snap_tend {
    struct snapshot *snapshot;
    struct snap_tend_settings settings;
    struct snap_tend_view *views; /* [view_capacity] */
    size_t view_capacity;
    int filling;
    uint64_t hold_off_ns; /* nothing is tried before; 0: no failure */
    struct snap_tend_report report;

    int beginning;                  /* the session is asked: no ticket yet, and others may step */
    struct snapshot_ticket *ticket; /* NULL: none under way */
    char name[IMAGE_NAME_BYTES_MAX + 1];
    enum snap_tend_cause cause;
    uint64_t n, last_used_ns;   /* of that session when it was frozen … */
    struct image_policy policy; /* … and what its tiers were by */
};

/* --- the policy */

/* The least recently used that may sleep; `count` for none. For slots one that was just woken may
 * not: it runs first. */
static uint32_t oldest(const struct snap_tend_view *views, uint32_t count, int for_slots) {
    uint32_t found = count;
    for (uint32_t i = 0; i < count; i++)
        if (views[i].may_sleep && !(for_slots && views[i].just_woken) &&
            (found == count || views[i].last_used_ns < views[found].last_used_ns))
            found = i;
    return found;
}

struct snap_tend_pick snap_tend_choose(const struct snap_tend_settings *settings,
                                       const struct snap_tend_state *state,
                                       const struct snap_tend_view *views, uint32_t count) {
    struct snap_tend_pick pick = {SNAP_TEND_NOBODY, 0, SNAP_TEND_NEVER, 0};
    pick.filling = state->slots_free < settings->slots_low ||
                   (state->filling && state->slots_free < settings->slots_high);
#ifdef BREAK_TEND_HIGH
    pick.filling = state->slots_free < settings->slots_low;
#endif
    uint32_t first = oldest(views, count, pick.filling);
    if (first == count)
        return pick;
    pick.index = first;
    uint64_t used_ns = views[first].last_used_ns;
    uint64_t idle_ns = state->now_ns > used_ns ? state->now_ns - used_ns : 0;
    if (pick.filling) {
        pick.cause = SNAP_TEND_SLOTS;
        pick.wait_ns = 0;
    } else if (settings->idle_ns != 0 && idle_ns < settings->idle_ns) {
        pick.wait_ns = settings->idle_ns - idle_ns;
    } else if (settings->idle_ns != 0 && state->budget_wait_ns != 0) {
        pick.wait_ns = state->budget_wait_ns;
    } else if (settings->idle_ns != 0) {
        pick.cause = SNAP_TEND_IDLE;
        pick.wait_ns = 0;
    }
    return pick;
}

/* --- the loop */

enum kv_err snap_tend_open(struct snapshot *snapshot, const struct snap_tend_settings *settings,
                           struct snap_tend **tend_out, struct kv_diag *diag) {
    if (settings->slots_high < settings->slots_low)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "the high watermark of %u slots is below the low one of %u",
                           settings->slots_high, settings->slots_low);
    struct snap_tend *tend = kv_alloc_zeroed(snapshot->alloc, 1, sizeof *tend);
    if (tend == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to look after idle sessions");
    tend->snapshot = snapshot;
    tend->settings = *settings;
    *tend_out = tend;
    return KV_OK;
}

void snap_tend_close(struct snap_tend *tend) {
    if (tend == NULL)
        return;
    snap_tend_settle(tend);
    kv_alloc_release(tend->snapshot->alloc, tend->views);
    kv_alloc_release(tend->snapshot->alloc, tend);
}

const struct snap_tend_report *snap_tend_report(const struct snap_tend *tend) {
    return &tend->report;
}

static uint64_t now(const struct snap_tend *tend) {
    return kv_clock_now_ns(tend->snapshot->clock);
}

static void note_failure(struct snap_tend *tend, const struct kv_diag *diag) {
    size_t length = strnlen(diag->text, sizeof tend->report.note - 1);
    memcpy(tend->report.note, diag->text, length);
    tend->report.note[length] = 0;
    tend->report.failed++;
    tend->hold_off_ns = now(tend) + SNAP_TEND_RETRY_NS;
}

static int is_busy(const struct snap_tend *tend, const struct session *session) {
    const struct snap_tend_settings *settings = &tend->settings;
    return settings->is_busy != NULL && settings->is_busy(settings->busy_context, session);
}

const char *snap_tend_under_way(const struct snap_tend *tend) {
    return tend->beginning || tend->ticket != NULL ? tend->name : NULL;
}

/* The save's result reaches its session. The session when it is still as it was frozen. */
static struct session *finish(struct snap_tend *tend) {
    struct receipt receipt;
    struct kv_diag diag = {""};
    struct session_info info;
    enum kv_err err = snapshot_finish(tend->snapshot, tend->ticket, &receipt, &diag);
    tend->ticket = NULL;
    if (tend->settings.receipt != NULL)
        tend->settings.receipt(tend->settings.receipt_context, &receipt);
    struct session *session = session_find(tend->snapshot->engine, tend->name);
    if (err != KV_OK) {
        note_failure(tend, &diag);
        return NULL;
    }
    if (session == NULL)
        return NULL;
    session_brief(session, &info);
#ifndef BREAK_TEND_USED
    if (info.state != SESSION_IDLE || info.n != tend->n ||
        info.last_used_ns != tend->last_used_ns || is_busy(tend, session) ||
        !image_policy_equal(&info.policy, &tend->policy)) {
        tend->report.kept++;
        return NULL;
    }
#endif
    return session;
}

static void put_to_sleep(struct snap_tend *tend, struct session *session) {
    snap_spill_leave(tend->snapshot, session);
    if (tend->cause == SNAP_TEND_IDLE)
        tend->report.slept_idle++;
    else
        tend->report.slept_slots++;
}

void snap_tend_settle(struct snap_tend *tend) {
    if (tend != NULL && tend->ticket != NULL)
        (void)finish(tend);
}

static uint32_t look(struct snap_tend *tend) {
    struct session *session;
    uint32_t count = 0;
    for (; (session = session_at(tend->snapshot->engine, count)) != NULL; count++) {
        struct session_info info;
        void *views = tend->views;
        if (!kv_alloc_grow(tend->snapshot->alloc, &views, &tend->view_capacity, count + 1,
                           sizeof *tend->views))
            break; /* the others wait for memory */
        tend->views = views;
        session_brief(session, &info);
        tend->views[count] = (struct snap_tend_view){
            .last_used_ns = info.last_used_ns,
            .may_sleep = info.state == SESSION_IDLE && info.n_kv > 0 &&
                         !transfer_durable(session)->pinned && !is_busy(tend, session),
            .just_woken = info.unrun};
    }
    return count;
}

static enum kv_err begin(struct snap_tend *tend, struct session *session, struct kv_diag *diag) {
    const struct snapshot_options options = {.ask = 1, .asleep = 1, .patient = 1};
    struct session_info info;
    session_brief(session, &info);
    memcpy(tend->name, info.name, strlen(info.name) + 1);
    tend->n = info.n;
    tend->last_used_ns = info.last_used_ns;
    tend->policy = info.policy;
    tend->beginning = 1;
    enum kv_err err = snapshot_begin(tend->snapshot, session, &options, &tend->ticket, diag);
    tend->beginning = 0;
    return err;
}

static uint64_t begin_next(struct snap_tend *tend) {
    struct engine_slots slots;
    struct kv_diag diag = {""};
    uint64_t now_ns = now(tend);
    if (now_ns < tend->hold_off_ns)
        return tend->hold_off_ns - now_ns;
    uint32_t count = look(tend);
    engine_slots(tend->snapshot->engine, &slots);
    const struct snap_tend_state state = {.now_ns = now_ns,
                                          .budget_wait_ns = snap_spill_budget_wait(tend->snapshot),
#ifdef BREAK_TEND_LEAVING
                                          .slots_free = slots.free,
#else
                                          .slots_free = slots.free + slots.leaving,
#endif
                                          .filling = tend->filling};
    const struct snap_tend_pick pick =
        snap_tend_choose(&tend->settings, &state, tend->views, count);
    tend->filling = pick.filling;
    if (pick.cause == SNAP_TEND_NOBODY)
        return pick.wait_ns;
    tend->cause = pick.cause;
    if (begin(tend, session_at(tend->snapshot->engine, pick.index), &diag) == KV_OK)
        return look_again_ns;
    note_failure(tend, &diag);
    return SNAP_TEND_RETRY_NS;
}

uint64_t snap_tend_step(struct snap_tend *tend) {
    if (tend->ticket == NULL && !tend->beginning)
        return begin_next(tend);
    if (tend->ticket == NULL || !snapshot_done(tend->ticket))
        return look_again_ns;
    struct session *session = finish(tend);
    if (session != NULL)
        put_to_sleep(tend, session);
    return 0;
}
