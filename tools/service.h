/* tools/service.h - store, engine, snapshot and restore put together behind session names.
 *
 * Responsible for: opening and closing them in order, filling in struct engine_hooks, finding a
 * session by name wherever it is, putting sessions to sleep when slots are needed; sharing all of
 * it between threads.
 * Not responsible for: chat turns (turn.h), flags (config.h), printing.
 *
 * A service owns its store, engine, snapshot thread and every resident session. A session pointer
 * is borrowed: it is good until the session is dropped, put to sleep or the service is closed.
 * service_sleep, service_wake, service_session, service_make_room and turn_* may put any idle
 * session to sleep other than the one they work on; look a session up again by name afterwards.
 *
 * A service that is not shared belongs to one thread, which steps the engine itself. After
 * service_share an engine thread of its own steps, and any thread may work between service_enter
 * and service_leave: it is the scheduler thread then. What waits (for the disk, for tokens, for a
 * lease) lets others in meanwhile, so whoever works on a session holds its lease: nobody else
 * touches a leased session, and it never goes to sleep by itself. In a service that is not shared
 * all of this does nothing and costs nothing.
 *
 * Threads: the scheduler thread, as said above, calls everything here and in turn.h, but for what
 * says otherwise.
 * Units: bytes, slots, tokens.
 * Errors: those of engine.h, store.h, snapshot.h and restore.h, unchanged; the diag has the remedy.
 */
#ifndef TOOLS_SERVICE_H
#define TOOLS_SERVICE_H

#include "engine/engine.h"
#include "engine/receipt.h"
#include "restore/restore.h"
#include "snapshot/snap_tend.h"
#include "snapshot/snapshot.h"
#include "store/store.h"

struct service;

typedef uint64_t (*service_receipt)(void *context, const struct receipt *receipt);
/* What the store alone says of what is wanted; NULL: it is still to be made. */
typedef enum kv_err (*service_look)(void *context, struct store *store, struct kv_diag *diag);

/* Every field is set by the caller; service_settings_usual fills all but the paths. Strings are
 * borrowed for the call, alloc, clock and door until service_close. */
struct service_settings {
    const char *model_path; /* a GGUF file: read into memory, freed once the engine has it */
    const char *store_dir;
    const char *program; /* written into the store's LOCK for whoever finds it held */
    /* 1: the store is opened beside a running writer and nothing is ever written; sessions can be
     * woken and asked, saving and sleeping are refused with INVALID. */
    int read_only;
    int create;        /* 1: a store that is not there is made, once the model is had */
    service_look look; /* before the model is read; its error ends the opening; or NULL */
    void *look_context;
    const struct io_door *door; /* NULL: the best of this machine */
    int direct_wanted;
    uint64_t store_bytes_max;                     /* or STORE_BYTES_UNLIMITED */
    int may_degrade;                              /* snapshot_may_degrade */
    uint64_t write_second_bytes, write_day_bytes; /* snapshot_write_budget */
    enum engine_device device;
    uint32_t cuda_index;
    uint64_t device_memory_bytes; /* as in struct engine_settings */
    enum engine_simd simd;
    uint32_t threads;
    uint32_t sessions_max;
    uint64_t slot_budget_bytes;
    uint32_t reserve_slots; /* never given to a session; for the shadow of a wake and for planes
                               that wait for their write */
    int poison_free_slots;
    uint64_t shuffle_seed;
    uint32_t queue_max; /* blocks and saves waiting for the writer */
    uint32_t probes;    /* chosen before sleep, asked at a wake; 0: none */
    int eager;          /* wakes answer at the ladder's floor, the rest comes behind */
    uint64_t ram_bytes; /* for sessions that went to sleep, 0: none */
    int fit;            /* wakes that find too few slots stay at the ladder's floor, and say so */
    /* When sessions go to sleep by themselves: unused for idle_ns (0: never), or fewer than low
     * percent of the slots free, until high percent are; sessions under policy `pressure` give up
     * planes first. */
    uint64_t idle_ns;
    uint32_t slots_low_percent, slots_high_percent;
    /* Sees every receipt of a save, a sleep, a wake and what came behind it, and returns the id it
     * is kept under, or a number to ask whoever keeps it by; 0: it is not kept. May be NULL. */
    service_receipt receipt;
    void *receipt_context;
    struct image_policy policy;   /* of new sessions */
    struct image_sampler sampler; /* of new sessions */
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
};
void service_settings_usual(struct service_settings *settings_out);

/* NOT_FOUND model, or store that is not to be made; BUSY another writer (named). On errors nothing
 * is open. */
enum kv_err service_open(const struct service_settings *settings, struct service **service_out,
                         struct kv_diag *diag);
/* Waits for everything queued; what was not saved is not saved. NULL is allowed. */
void service_close(struct service *service);

/* The model file as service_open reads it: NOT_FOUND, INVALID (not a file), CORRUPT (empty), IO,
 * NOMEM. The caller releases the bytes. */
enum kv_err service_read_model(const char *path, const struct kv_alloc *alloc, uint8_t **bytes_out,
                               uint64_t *size_out, struct kv_diag *diag);

/* From now on many threads: starts the engine thread. The caller is not the scheduler thread
 * afterwards. NOMEM. */
enum kv_err service_share(struct service *service, struct kv_diag *diag);
/* The engine thread ends; the caller is the only thread again. Nobody else is at work. */
void service_unshare(struct service *service);
void service_enter(struct service *service);
void service_leave(struct service *service);
/* Lets others in until something changed (a session, a lease, slots) or so long. */
void service_await(struct service *service, uint64_t wait_ns);
/* After a change that service_await is for and that was not made through this header. */
void service_changed(struct service *service);

/* How long somebody waits, and who may end it. */
struct service_patience {
    uint64_t deadline_ns;            /* monotonic; UINT64_MAX: for ever */
    int (*cancelled)(void *context); /* looked at while waiting; may be NULL */
    void *context;
    const char *who; /* for people; copied, cut to SERVICE_WHO_BYTES - 1; may be NULL */
};
/* On the stack of whoever holds it; first come, first served. */
enum { SERVICE_WHO_BYTES = 64 };
struct service_lease {
    char name[IMAGE_NAME_BYTES_MAX + 1]; /* "" when not held */
    char who[SERVICE_WHO_BYTES];
    uint64_t since_ns; /* asked for, then held; monotonic */
    int to_sleep;      /* of service.c: goes to sleep */
    struct service_lease *next;
};
/* BUSY when the deadline passes, CANCELLED. The name need not exist. */
enum kv_err service_lease(struct service *service, const char *name,
                          const struct service_patience *patience, struct service_lease *lease_out,
                          struct kv_diag *diag);
void service_lease_end(struct service *service, struct service_lease *lease);
int service_is_leased(struct service *service, const char *name);
/* All of them in the order of asking: the first with a name holds it, the others wait. NULL: none
 * further. */
const struct service_lease *service_lease_at(struct service *service, uint32_t index);
/* 1 when somebody else holds a lease or waits for one: what is used up now may come free. */
int service_has_others(struct service *service, const struct service_lease *lease);

/* Listening to the work of one session (hearing.h), from service_listen to service_deafen. */
struct hearing_ear;
struct hearing_heard;
void service_listen(struct service *service, struct hearing_ear *ear);
void service_deafen(struct service *service, struct hearing_ear *ear);
/* Not as the scheduler thread, unless the service is not shared: waits until the session has said
 * something, for at most `wait_ns`, and takes it. */
void service_hear(struct service *service, struct hearing_ear *ear, uint64_t wait_ns,
                  struct hearing_heard *heard_out);

struct engine *service_engine(struct service *service);
struct store *service_store(struct service *service);
struct snapshot *service_snapshot(struct service *service); /* NULL when read-only */
const struct kv_alloc *service_alloc(struct service *service);
const struct kv_clock *service_clock(struct service *service);
/* Another one for receipts from now on. */
void service_on_receipt(struct service *service, service_receipt receipt, void *context);
/* Told once when the device is lost, by whichever thread has found out as it leaves the service: to
 * be set before service_share. Whoever uses a service that is not shared is told by every call. */
void service_on_lost(struct service *service, void (*lost)(void *context), void *context);
/* What was returned for the newest receipt. */
uint64_t service_receipt_id(const struct service *service);
/* What the hooks could not report by a code, such as an idle session that could not be put to
 * sleep; "" when nothing. Cleared by service_open only. */
const char *service_note(const struct service *service);

/* Between steps and while waiting for the user: sessions go to sleep by themselves. Returns after
 * how many nanoseconds to call again at the latest. Look sessions up by name afterwards. */
uint64_t service_tend(struct service *service);
/* Waits for what service_tend has begun on this session, NULL: on any; it does not go. Before a
 * turn. */
void service_settle(struct service *service, const char *name);

enum service_found { SERVICE_RESIDENT, SERVICE_WOKEN, SERVICE_NEW };
struct service_lookup {
    int create; /* 1: a name that is nowhere becomes a new session; 0: NOT_FOUND */
    int skip_needles;
    uint64_t snapshot; /* an older one of the session, 0: its head */
    /* What a new session is made with; NULL: as the settings say. */
    const struct image_policy *policy;
    const struct image_sampler *sampler;
    /* IMAGE_OWNER_BYTES: only a session of this owner is found, another's is NOT_FOUND, a new one
     * becomes this owner's. NULL: anybody's, and a new one is the operator's. */
    const uint8_t *owner;
    const struct service_wakes {
        int eager, fit;        /* as in struct service_settings */
    } * wakes;                 /* NULL: as the settings say */
    restore_progress progress; /* may be NULL */
    void *progress_context;
};
struct service_opened {
    enum service_found found;
    struct receipt receipt; /* of the wake, also a refused one; operation 0 when nothing woke */
};
/* The resident session, or the stored one woken and proven, or a new one. `opened_out` is written
 * in every case. */
enum kv_err service_session(struct service *service, const char *name,
                            const struct service_lookup *lookup, struct session **session_out,
                            struct service_opened *opened_out, struct kv_diag *diag);

/* Makes room for the plan of `name`, then wakes it. EXISTS when it is resident. `options` NULL:
 * needles and probes asked, no progress. Eager also where the settings say so; fit as
 * they say. */
enum kv_err service_wake(struct service *service, const char *name,
                         const struct restore_options *options, struct session **session_out,
                         struct receipt *receipt_out, struct kv_diag *diag);
/* Brings a sleeping session's bytes into memory before it is asked for, so that its wake reads
 * nothing from the disk. LIMIT: larger than ram_bytes. */
enum kv_err service_prefetch(struct service *service, const char *name,
                             struct store_read_stats *stats_out, struct kv_diag *diag);
/* Waits for what comes behind `session`; 1 and its receipt when that was anything. */
int service_refine(struct service *service, struct session *session, struct receipt *receipt_out);
/* Needles asked, everything durable, then off the device. On an error it stays resident. */
enum kv_err service_sleep(struct service *service, struct session *session,
                          struct receipt *receipt_out, struct kv_diag *diag);
/* 1 when what the session has is what its newest snapshot has, or nothing. */
int service_is_saved(struct session *session);
/* Off the device without a save: what is stored stays. */
void service_drop(struct service *service, struct session *session);
enum kv_err service_save(struct service *service, struct session *session, int is_explicit,
                         struct receipt *receipt_out, struct kv_diag *diag);
/* An explicit save with a tag; `tag` NULL: without. */
enum kv_err service_save_tag(struct service *service, struct session *session, const char *tag,
                             struct receipt *receipt_out, struct kv_diag *diag);
/* Until `slots` beyond the reserve are free: waits for pending writes, then puts the least recently
 * used idle sessions to sleep, never `except` (may be NULL). NO_SLOTS with need and have. */
enum kv_err service_make_room(struct service *service, uint32_t slots, struct session *except,
                              struct kv_diag *diag);

#endif
