/* snapshot/snap_line.h - what saving knows about one resident session's lineage.
 *
 * Responsible for: finding or making the line of a session, its count of holders, fresh ids.
 * Not responsible for: the session's own durable state (transfer_durable) or any record.
 *
 * A line outlives its session while blocks or a save are queued, so nothing here points at one.
 *
 * Threads: the scheduler owns the list and the first half; the spill thread owns the second half.
 * The queue's lock hands a line over. Others may ask which lineages are open (`changing`).
 * Units: counts of blocks; bytes.
 */
#ifndef SNAPSHOT_SNAP_LINE_H
#define SNAPSHOT_SNAP_LINE_H

#include "engine/record.h"
#include "engine/transfer.h"
#include "store/store.h"

#include <pthread.h>

/* Written for a line since its last save; becomes part of that save's receipt. */
struct snap_account {
    uint32_t blocks;
    uint64_t raw_bytes[LAYOUT_STREAM_COUNT], stored_bytes[LAYOUT_STREAM_COUNT];
    uint64_t record_bytes, door_bytes;
    uint64_t copy_ns, write_ns, sync_ns;
    uint64_t zip_ns;                    /* in the batches themselves */
    uint64_t helped_ns, helped_most_ns; /* of all helpers together; the longest extent */
    uint32_t in_flight_most;
};

struct snap_line {
    struct snap_line *next;
    char name[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t lineage;
    uint64_t parent, cut; /* of a lineage that is not recorded yet */
    uint32_t holds;       /* the list's and one for each item under way */
    int saving;
    int refusing; /* a block was not taken or not written: later ones wait for a re-queue */
    int overflow; /* refusing only because the queue was full */

    uint32_t block_count;   /* committed, in order */
    struct kv_digest chain; /* over these */
    int trim;               /* block records beyond every snapshot are to be deleted first */
    uint64_t head;          /* with trim: the snapshot that the session was woken from */
    int recorded;           /* the lineage record exists */
    int keeps_k;            /* as in its blocks' records */
    uint32_t pending;       /* blocks of this line in the batch being made */
    struct snap_account account;
    struct kv_diag trouble; /* why the last block was not written; "" when nothing */
    enum kv_err trouble_err;
};

struct snap_lines {
    const struct kv_alloc *alloc;
    struct store *store;
    struct engine *engine;
    struct snap_line *first;
    pthread_mutex_t changing; /* the scheduler while it changes the list, others while they read */
};
/* No lines. */
void snap_lines_init(struct snap_lines *lines, const struct kv_alloc *alloc, struct store *store,
                     struct engine *engine);
void snap_lines_end(struct snap_lines *lines); /* forgets all */

/* The line of `session`; a new one, with an id of its own when the session has none, after a
 * create or a wake. IO (no random numbers), NOMEM. */
enum kv_err snap_line_of(struct snap_lines *lines, struct session *session,
                         struct snap_line **line_out, struct kv_diag *diag);
/* The resident session that the line belongs to; NULL when it has gone, also when it has been woken
 * again since. */
struct session *snap_line_session(const struct snap_lines *lines, const struct snap_line *line);
/* Calls `each` for every lineage that a resident session writes to, with what it was cut from when
 * it is not recorded yet; not 1 ends it. Any thread. For one that holds the writer
 * (snapshot_writer_take) nobody is missing: a line is there before its first record is. */
typedef int (*snap_line_each)(void *context, uint64_t lineage, uint64_t parent, uint64_t cut);
void snap_line_each_open(struct snap_lines *lines, snap_line_each each, void *context);
void snap_line_release(struct snap_lines *lines, struct snap_line *line);
/* Takes the line from the list: the session has left the device. */
void snap_line_forget(struct snap_lines *lines, struct snap_line *line);

/* The page of the head snapshot with this place and length; its bytes never change. NULL: none. */
const struct image_page *snap_line_page(const struct transfer_durable *durable, uint64_t first,
                                        uint32_t tokens);

/* What a session of lineage `durable->lineage` that went back to `keep` blocks has durable: a
 * lineage that is not assigned yet, cut there, and a head that stays (invariants 12 and 13).
 * CORRUPT, IO. */
enum kv_err snap_line_go_back(struct store *store, uint32_t keep, struct transfer_durable *durable,
                              struct kv_diag *diag);
/* Forgets pages of the head that hold tokens at or behind these positions: they must never stand
 * for other tokens at their place. */
void snap_line_forget_pages(struct transfer_durable *durable, uint64_t pages_end,
                            uint64_t sinks_end);

/* A random id under which no key made by `key_of` exists. Any thread. */
enum kv_err snap_line_fresh_id(struct store *store, struct record_key (*key_of)(uint64_t id),
                               uint64_t *id_out, struct kv_diag *diag);

#endif
