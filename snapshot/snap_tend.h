/* snapshot/snap_tend.h - sessions that go to sleep by themselves.
 *
 * Responsible for: putting sessions to sleep that nobody has used for a while, and the least
 * recently used ones while slots are short, without ever waiting for the disk: whoever runs the
 * scheduler thread calls snap_tend_step between its steps.
 * Not responsible for: room for one session that needs it now (engine_hooks.slots_low), waking.
 *
 * A session that is used, or read at other tiers, while it is being saved stays. One that cannot be
 * saved stays whole, and nothing is tried for SNAP_TEND_RETRY_NS. What the write budget lacks puts
 * off sleep for idleness, never sleep for slots. Pinned sessions are left alone; one that was just
 * woken runs before it may go for slots.
 *
 * Threads: the scheduler thread; snap_tend_choose is pure.
 * Units: nanoseconds of the monotonic clock, slots.
 */
#ifndef SNAPSHOT_SNAP_TEND_H
#define SNAPSHOT_SNAP_TEND_H

#include "snapshot/snapshot.h"

#define SNAP_TEND_RETRY_NS ((uint64_t)10000000000)
#define SNAP_TEND_NEVER UINT64_MAX

struct snap_tend_settings {
    uint64_t idle_ns;    /* asleep after so long without use; 0: never */
    uint32_t slots_low;  /* with fewer free slots the least recently used go … */
    uint32_t slots_high; /* … until so many are free; at least slots_low */
    /* 1: somebody is at work on the session, it stays. NULL: nobody ever is. */
    int (*is_busy)(void *context, const struct session *session);
    void *busy_context;
    /* Sees the receipt of each save, also of one that failed. NULL is allowed. */
    void (*receipt)(void *context, const struct receipt *receipt);
    void *receipt_context;
};

/* --- the policy: state in, one move out */

enum snap_tend_cause { SNAP_TEND_NOBODY, SNAP_TEND_IDLE, SNAP_TEND_SLOTS };
struct snap_tend_view {
    uint64_t last_used_ns;
    int may_sleep;  /* idle and not pinned */
    int just_woken; /* and has not run since: goes for idleness only */
};
struct snap_tend_state {
    uint64_t now_ns, budget_wait_ns; /* until the write budget allows something again */
    uint32_t slots_free;
    int filling; /* as the last choice left it: on the way from low to high */
};
struct snap_tend_pick {
    enum snap_tend_cause cause;
    uint32_t index;   /* of the session, unless NOBODY */
    uint64_t wait_ns; /* NOBODY: nothing changes by itself before */
    int filling;
};
struct snap_tend_pick snap_tend_choose(const struct snap_tend_settings *settings,
                                       const struct snap_tend_state *state,
                                       const struct snap_tend_view *views, uint32_t count);

/* --- the loop */

struct snap_tend;
struct snap_tend_report {
    uint64_t slept_idle, slept_slots; /* sessions put to sleep, by cause */
    uint64_t kept;                    /* saved, but used meanwhile */
    uint64_t failed;
    char note[256]; /* why the last one failed; "" when none did */
};

/* INVALID, NOMEM. */
enum kv_err snap_tend_open(struct snapshot *snapshot, const struct snap_tend_settings *settings,
                           struct snap_tend **tend_out, struct kv_diag *diag);
void snap_tend_close(struct snap_tend *tend); /* settles first; NULL is allowed */
/* Begins or ends at most one sleep. Returns after how long to call again at the latest: 0 at once,
 * SNAP_TEND_NEVER when only new work changes anything. Sessions may be gone afterwards. */
uint64_t snap_tend_step(struct snap_tend *tend);
/* The session of the save under way, NULL: none. Good until the next call. Others see it from its
 * first question on: it is theirs when this is NULL again. */
const char *snap_tend_under_way(const struct snap_tend *tend);
/* Waits for a save under way; its session stays. Before anything that saves. */
void snap_tend_settle(struct snap_tend *tend);
const struct snap_tend_report *snap_tend_report(const struct snap_tend *tend);

#endif
