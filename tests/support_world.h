/* tests/support_world.h - one engine, many stores: lives that can fail at every step.
 *
 * Responsible for: an engine over the tiny model that outlives the stores tried under it; steps
 * of a life that return what happened instead of failing the test; what was acknowledged, and
 * whether a store still has it, bit for bit.
 * Not responsible for: faults (support_disk.h, support_faulty_index.h).
 *
 * Every step that seals blocks waits for the background writer, so that a life repeats exactly.
 *
 * Threads: the main thread.
 * Units: tokens, entries of a disk's log.
 */
#ifndef TESTS_SUPPORT_WORLD_H
#define TESTS_SUPPORT_WORLD_H

#include "engine/engine.h"
#include "restore/restore.h"
#include "snapshot/snapshot.h"
#include "store/store.h"
#include "tests/support_disk.h"

enum { WORLD_SESSIONS = 4, WORLD_FACTS_MAX = 1024, WORLD_TEXT_BYTES = 600 };

/* One save or removal: what the head of a session may be while it is under way and after it. */
struct world_fact {
    uint32_t session;
    int is_removal;
    int acknowledged;    /* 0: it failed or never ended */
    uint64_t begin, end; /* of the disk's log */
    uint64_t n;
    struct kv_digest resident;
    int coarse; /* planes could not be read back behind an eager wake: it wakes with finer ones */
};

struct world {
    struct engine *engine;
    struct store *store;       /* NULL when closed */
    struct snapshot *snapshot; /* the same */
    struct restore_source source;
    struct disk *disk;            /* of the steps; may be NULL */
    const struct kv_alloc *alloc; /* of store, snapshot and restore */
    const struct kv_clock *clock;
    const struct io_door *door; /* of the checks, and of an opening that names none */
    struct world_fact facts[WORLD_FACTS_MAX];
    uint32_t fact_count;
    int eagerly;    /* set after world_begin: every second wake of a life is eager */
    uint64_t wakes; /* of lives */
    int eager[WORLD_SESSIONS];
    uint64_t gc_removed;                     /* segments, by world_gc */
    struct world_fact found[WORLD_SESSIONS]; /* by the last check */
    /* Marked by `expire`, or maybe: a full disk may take it; and by the last check. */
    int may_go[WORLD_SESSIONS], found_may_go[WORLD_SESSIONS];
};

/* A store of which nothing is known yet. */
void world_forget_facts(struct world *world);

/* Opens the engine; alloc and clock are the system's, the door is the best. Ends the program on an
 * error. */
void world_begin(struct world *world);
void world_end(struct world *world);

/* Store and background writer; after an error both are closed. `door` NULL: the world's. */
enum kv_err world_open(struct world *world, const char *dir, const struct io_door *door,
                       struct kv_diag *diag);
/* Drops every session and closes what is open. */
void world_close(struct world *world);

const char *world_name(uint32_t session);
struct session *world_find(struct world *world, uint32_t session); /* NULL: not resident */
/* Creates when neither resident nor stored, wakes when stored, then feeds and generates. */
enum kv_err world_say(struct world *world, uint32_t session, uint32_t feed, uint64_t seed,
                      struct kv_diag *diag);
enum kv_err world_wake(struct world *world, uint32_t session, struct kv_diag *diag);
/* A fact begins and, when all went well, is acknowledged. NOT_FOUND when not resident. */
enum kv_err world_save(struct world *world, uint32_t session, int is_explicit,
                       struct kv_diag *diag);
enum kv_err world_tag(struct world *world, uint32_t session, const char *tag, struct kv_diag *diag);
enum kv_err world_sleep(struct world *world, uint32_t session, struct kv_diag *diag);
enum kv_err world_remove(struct world *world, uint32_t session, struct kv_diag *diag);
/* Whatever is not saved is gone, as by an end of the program; not resident afterwards. */
void world_forget(struct world *world, uint32_t session);
/* Coarser tiers, or finer ones again. */
enum kv_err world_demote(struct world *world, uint32_t session, int coarse, struct kv_diag *diag);

/* Back to `percent` of what is saved, and saved so; resident afterwards. */
enum kv_err world_back(struct world *world, uint32_t session, uint32_t percent,
                       struct kv_diag *diag);
/* These begin with the session as it is stored; `to` must be nowhere (else nothing happens). With a
 * tag (may be NULL) the fork begins there. */
enum kv_err world_fork(struct world *world, uint32_t session, const char *tag, uint32_t to,
                       struct kv_diag *diag);
enum kv_err world_rename(struct world *world, uint32_t session, uint32_t to, struct kv_diag *diag);
/* Goes on from the tag, or takes it away; NOT_FOUND without it. */
enum kv_err world_revert(struct world *world, uint32_t session, const char *tag,
                         struct kv_diag *diag);
enum kv_err world_untag(struct world *world, uint32_t session, const char *tag,
                        struct kv_diag *diag);

/* Deletes what no session uses, beside those that are resident, and gives back the space of
 * segments that are less than 95 % live. */
enum kv_err world_gc(struct world *world, struct kv_diag *diag);
/* The byte budget reached, and everything allowed: whatever is asleep gives up its planes in the
 * order of the ladder, older snapshots go. What a session may be on the way are facts. */
enum kv_err world_retain(struct world *world, struct kv_diag *diag);
/* Named to expire, then the budget reached with nothing else allowed. */
enum kv_err world_expire(struct world *world, uint32_t session, struct kv_diag *diag);
/* Seeds the ids of snapshots, pages and lineages (getrandom comes here: --wrap, see Makefile). */
void world_seed(uint64_t seed);

/* Opens `dir` through the world's door, compares invariants and sessions with the facts as they
 * stood at `entries` of the log (UINT64_MAX: all), and asks fsck, which must find nothing. With
 * `go_on` one session also goes on: wakes, chats, saves. 1 when right; else `text_out` says what is
 * wrong. The world must be closed. */
struct world_check {
    const char *dir;
    uint64_t entries;
    int go_on;
    int rebuild; /* 1: also removes the index, opens again and compares again */
    int rebase;  /* 1: when right, what was found becomes the only facts */
};
int world_right(struct world *world, const struct world_check *check,
                char text_out[WORLD_TEXT_BYTES]);

#endif
