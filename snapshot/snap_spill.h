/* snapshot/snap_spill.h - the background thread and its queue.
 *
 * Responsible for: taking sealed blocks and frozen sessions in order, committing them one batch at
 * a time, and bringing the results back to the scheduler.
 * Not responsible for: what a batch holds (snap_commit.h) or what a save is made of (snap_save.c).
 *
 * Threads: each function says which; the lock guards the queue and the list of what is done.
 * Units: items; bytes.
 */
#ifndef SNAPSHOT_SNAP_SPILL_H
#define SNAPSHOT_SNAP_SPILL_H

#include "snapshot/snap_line.h"
#include "snapshot/snap_room.h"
#include "snapshot/snap_writer.h"
#include "snapshot/snapshot.h"

#include <pthread.h>
#include <stdatomic.h>

/* A long queue makes large batches, which cost fewer syncs; under a write budget they are small. */
enum { SNAP_BATCH_BLOCKS_MAX = 128, SNAP_BATCH_BLOCKS_BUDGET = 16 };

struct snapshot_ticket {
    struct snapshot *owner;
    struct transfer_frozen frozen;
    struct snap_item *item; /* helpers are at its pages, and it is not queued yet */
    struct transfer_durable before, after;
    uint32_t found_blocks; /* durable when the save began */
    struct snapshot_options options;
    char tag[RECORD_TAG_BYTES_MAX + 1];
    enum receipt_operation operation;
    struct receipt receipt; /* filled as work is done; begun at begun_ns */
    uint64_t begun_ns;
    enum kv_err err;
    struct kv_diag diag;
    atomic_int done; /* the commit has returned */
    int applied;     /* the scheduler has taken the result */
};

/* How far helpers have come with a job (snap_ahead.h). */
enum snap_job_state { SNAP_JOB_NOBODY, SNAP_JOB_LISTED, SNAP_JOB_BEGUN, SNAP_JOB_READY };
struct snap_ahead;
struct snap_ready;
struct snap_item;

/* What one helper makes ready at a time: a block, or a page of a save. */
struct snap_job {
    struct snap_item *item;
    uint32_t page; /* of a save: 0 the sinks, then the window's; nothing where it is not written */
    enum snap_job_state state; /* these four are snap_ahead.c's */
    struct snap_ready *ready;
    struct snap_job *next, *before;
};
enum { SNAP_SAVE_JOBS = 1 + IMAGE_PAGES_MAX };

/* A block or a save under way. The parts of a block are read by the spill thread and its helpers
 * while the block is held. */
struct snap_item {
    struct snap_item *next;
    struct snap_line *line;
    struct block *block; /* NULL for a save */
    uint32_t index;
    uint32_t part_count;
    struct transfer_part *parts;
    struct snapshot_ticket *ticket; /* NULL for a block */
    enum kv_err err;
    struct kv_digest chain; /* over the blocks up to this one, once committed */
    struct snap_job *jobs;  /* one of a block, SNAP_SAVE_JOBS of a save */
    uint32_t job_count;
};

struct snap_list {
    struct snap_item *first, *last;
};

struct snapshot {
    struct store *store;
    struct engine *engine;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    uint32_t queue_max;
    uint32_t probes;
    void (*leaving)(void *context, struct session *session);
    void *leaving_context;
    struct snap_lines lines;
    struct snap_ahead *ahead; /* NULL: the spill thread does everything */
    pthread_mutex_t copying;  /* held by whoever copies a block from the device */

    struct snap_writer writer; /* held by whoever writes to the store; taken before `lock` */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, rest; /* something to do; something was done */
    struct snap_list queue, done;
    uint32_t queue_count;                        /* queued and being committed */
    struct snap_room_bucket per_second, per_day; /* of bytes that may be written */
    uint32_t hurry;  /* somebody waits for the queue: no bucket holds it back */
    int may_degrade; /* the scheduler's */
    int stop;
    int posted; /* a call that takes the done list is on its way */
};

/* Scheduler: queues every volatile block that no writer holds, waiting for room. */
void snap_spill_requeue(struct snapshot *snapshot, struct snap_line *line, struct session *session);
/* Scheduler: helpers may begin with the pages that are frozen in the ticket. NOMEM. */
enum kv_err snap_spill_pages(struct snapshot *snapshot, struct snap_line *line,
                             struct snapshot_ticket *ticket, struct kv_diag *diag);
/* Scheduler: queues the save whose pages those are, waiting for room. The ticket's result comes
 * with `done`. */
void snap_spill_save(struct snapshot *snapshot, struct snapshot_ticket *ticket);
/* Scheduler: or else it is not saved, and no helper has anything of it afterwards; nothing is done
 * where there are no such pages. */
void snap_spill_unsave(struct snapshot *snapshot, struct snapshot_ticket *ticket);
/* Scheduler: waits for the ticket's commit. */
void snap_spill_wait(struct snapshot *snapshot, const struct snapshot_ticket *ticket);
/* snapshot_writer_take for the scheduler thread: while another writes, others may be it. */
void snap_spill_writer_take(struct snapshot *snapshot);
/* Until the write budget allows something again. Any thread. */
uint64_t snap_spill_budget_wait(struct snapshot *snapshot);
/* Scheduler: hands what is done to the engine and to the sessions. */
void snap_spill_apply(struct snapshot *snapshot);
/* Scheduler: drops a session that is saved as it is, after whoever wants to see it last. */
void snap_spill_leave(struct snapshot *snapshot, struct session *session);

#endif
