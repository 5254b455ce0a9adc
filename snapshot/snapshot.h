/* snapshot/snapshot.h - from a live session to durable bytes.
 *
 * Responsible for: write-through of sealed blocks by a background thread, incremental snapshots,
 * putting sessions to sleep, removing them; which records die.
 * Not responsible for: how bytes are stored (store/), reading them back (restore/), or when idle
 * sessions must go (tools/).
 *
 * Threads: functions are called on the engine's scheduler thread unless noted; the background
 * thread belongs to the handle, never blocks a step, and answers through engine_post.
 * Units: bytes, tokens, nanoseconds.
 * Errors: INVALID, NOT_FOUND, EXISTS (a tag or name), BUSY (a save of this session is under way),
 * CORRUPT and VERSION (a record), IO, NO_SPACE (of the disk), NOMEM, LIMIT (also: the byte budget
 * is reached), DEVICE. After an error the session is whole, resident and not marked durable; the
 * snapshots before are valid.
 */
#ifndef SNAPSHOT_SNAPSHOT_H
#define SNAPSHOT_SNAPSHOT_H

#include "engine/engine.h"
#include "engine/receipt.h"
#include "engine/record.h"
#include "engine/transfer.h"
#include "store/store.h"

struct snap_retain_leave; /* snap_retain.h */

struct snapshot;

struct snapshot_settings {
    struct store *store; /* borrowed, open for writing */
    struct engine *engine;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    uint32_t queue_max; /* blocks and saves waiting, 1 … 65,536; a full queue delays the save */
    uint32_t helpers; /* threads that copy, zip and digest blocks ahead of their batch, 0 … 16 */
    uint32_t probes;  /* to choose where needles are asked, 0 … IMAGE_PROBES_MAX */
    /* A session that is saved as it is goes to sleep now; may be NULL. */
    void (*leaving)(void *context, struct session *session);
    void *leaving_context;
};
enum kv_err snapshot_open(const struct snapshot_settings *settings, struct snapshot **snapshot_out,
                          struct kv_diag *diag);
/* Waits for everything queued, then ends the thread. */
void snapshot_close(struct snapshot *snapshot);
/* As many as this machine has processors for: zip takes several of them to keep a disk busy. */
uint32_t snapshot_helpers_usual(void);

/* The write budget, 0: unbounded. Blocks in the background wait for it; a save never does, and what
 * it writes is waited for afterwards. */
void snapshot_write_budget(struct snapshot *snapshot, uint64_t bytes_per_second,
                           uint64_t bytes_per_day);

/* 1: a save that finds the byte budget reached may take planes of sessions that are not resident,
 * then older snapshots (snap_retain.h). Off at first: it is then refused with LIMIT. */
void snapshot_may_degrade(struct snapshot *snapshot, int may_degrade);
/* The same for other writers beside the sessions of this engine; good until snapshot_close. */
struct snap_retain_leave snapshot_leave(struct snapshot *snapshot);

/* For engine_hooks.block_sealed; context is the struct snapshot. Only enqueues. */
void snapshot_block_sealed(void *context, struct session *session, struct block *block);

/* What a save would write at most; nothing happens. */
struct snapshot_plan {
    uint32_t new_blocks, new_pages;
    uint64_t bytes_max;    /* worst case, uncompressed, with records */
    uint64_t bytes_staged; /* host memory that the frozen pages take meanwhile */
};
enum kv_err snapshot_plan_save(struct snapshot *snapshot, struct session *session,
                               struct snapshot_plan *plan_out, struct kv_diag *diag);

struct snapshot_options {
    int is_explicit; /* stays when later turns are saved */
    int ask;         /* ask needles with and without their hole, record the results, and choose
                        probes anew */
    int asleep;      /* mark it as written for sleep (snapshot_sleep sets it) */
    int patient;     /* nobody waits for it: others step more often between its questions */
    const char *tag; /* NULL: none; a tagged snapshot is explicit. Copied. EXISTS, INVALID */
};
/* Freezes now, commits in the background. The ticket is owned by the caller until
 * snapshot_finish. */
struct snapshot_ticket;
enum kv_err snapshot_begin(struct snapshot *snapshot, struct session *session,
                           const struct snapshot_options *options,
                           struct snapshot_ticket **ticket_out, struct kv_diag *diag);
/* 1 when the commit has returned, with either result. Any thread. */
int snapshot_done(const struct snapshot_ticket *ticket);
/* Waits, applies the result to the session (engine_apply), frees the ticket, fills the receipt. */
enum kv_err snapshot_finish(struct snapshot *snapshot, struct snapshot_ticket *ticket,
                            struct receipt *receipt_out, struct kv_diag *diag);
/* begin and finish. */
enum kv_err snapshot_save(struct snapshot *snapshot, struct session *session,
                          const struct snapshot_options *options, struct receipt *receipt_out,
                          struct kv_diag *diag);
/* Saves with needles asked, then drops the session from the device. On error it stays resident. One
 * without tokens that was never saved is only dropped: a receipt of no operation. `patient` as in
 * the options. */
enum kv_err snapshot_sleep(struct snapshot *snapshot, struct session *session, int patient,
                           struct receipt *receipt_out, struct kv_diag *diag);
/* Off the device without a save; what was not saved is lost, the snapshots stay. A lineage without
 * any is deleted: its session must be nobody else's meanwhile, since others may step. */
void snapshot_drop(struct snapshot *snapshot, struct session *session);
/* Goes back to the first `n` tokens (session_rewind): a new lineage that shares the blocks which
 * stay, and a head that stays under a tag once the next save moves it. The session must be saved as
 * it is: BUSY otherwise. What is to be prefilled again is stepped by the caller. CORRUPT, IO. */
enum kv_err snapshot_rewind(struct snapshot *snapshot, struct session *session, uint64_t n,
                            struct kv_diag *diag);
/* Makes a session that restore_wake gave another name, and that has done nothing since, a new one
 * of its first `n` tokens (1 … all): a lineage of its own that shares the blocks which stay, as
 * snapshot_rewind leaves it. The session that it came from is as it was. It is stored by its first
 * save; until then its lineage alone keeps the shared blocks. EXISTS when its name is stored. */
enum kv_err snapshot_branch(struct snapshot *snapshot, struct session *session, uint64_t n,
                            struct kv_diag *diag);
/* Waits until nothing is queued. */
void snapshot_drain(struct snapshot *snapshot);
/* Items that wait, and until when the write budget holds them back. Any thread. */
void snapshot_backlog(struct snapshot *snapshot, uint32_t *queued_out,
                      uint64_t *budget_wait_ns_out);
/* Any thread that writes to the store by itself holds this meanwhile; what is queued waits. It must
 * not become the scheduler thread before it gives it back. */
void snapshot_writer_take(struct snapshot *snapshot);
void snapshot_writer_give(struct snapshot *snapshot);
/* The holder lets everybody write who waits for it, and has it again; what it knows of the store is
 * old then. 1 when there was anybody. */
int snapshot_writer_lend(struct snapshot *snapshot);

/* Reading and removing need no engine, so the CLI lists and removes without a model. */
struct snapshot_entry {
    struct record_snapshot head;
    uint64_t snapshot;
    uint64_t stored_bytes; /* extents of the head snapshot, shared ones included */
    uint64_t shared_bytes; /* of them, blocks that belong to the lineages it was cut from */
    uint32_t snapshot_count, tag_count;
    uint32_t lowered_blocks; /* that have given up planes */
    uint32_t dropped;        /* these planes, by mask */
    int may_expire;          /* `expire` has named it */
    int pinned;
    uint8_t owner[IMAGE_OWNER_BYTES];      /* zeros: the operator */
    uint64_t used_ns;                      /* when its head last moved */
    char parent[IMAGE_NAME_BYTES_MAX + 1]; /* whose lineage it was cut from; "" when from nobody
                                              else's */
    int parent_removed;                    /* no session has a snapshot on it any more */
    uint64_t cut;                          /* the block at which its own ones begin */
};
typedef int (*snapshot_each)(void *context, const struct snapshot_entry *entry); /* 0 stops */
enum kv_err snapshot_list(struct store *store, const struct kv_alloc *alloc, snapshot_each each,
                          void *context, struct kv_diag *diag);
enum kv_err snapshot_find(struct store *store, const struct kv_alloc *alloc, const char *name,
                          struct snapshot_entry *entry_out, struct kv_diag *diag);
/* Whose it is, from its name's record alone: so asking for another one's takes no longer for a long
 * one. NOT_FOUND. */
enum kv_err snapshot_owner(struct store *store, const char *name,
                           uint8_t owner_out[IMAGE_OWNER_BYTES], struct kv_diag *diag);
/* Deletes the name, its snapshots and what no other session shares of their blocks and pages, in
 * one batch. NOT_FOUND, BUSY (pinned). */
enum kv_err snapshot_remove(struct store *store, const struct kv_alloc *alloc, const char *name,
                            struct kv_diag *diag);

#endif
