/* snapshot/snap_retain.h - what goes when the byte budget is reached, and the log of it.
 *
 * Responsible for: the order in which stored sessions give up bytes for a save that finds no room,
 * doing it, the same for every other writer, the mark of `expire`, the log.
 * Not responsible for: taking planes out of blocks (snap_lower.h), giving the space of segments
 * back (snap_room.h), or when (snap_save.c).
 *
 * The order: sessions that `expire` named, whole, the longest unused first. Then, with may_degrade
 * only: the planes of the ladder (KL, then VR2, then VR1), each from the longest unused session to
 * the latest before the next plane is touched; then snapshots that are no session's newest, the
 * oldest first; tagged ones stay. The newest snapshot of a session never goes unless `expire` named
 * it. Sessions that are busy (resident) keep planes and newest snapshot; pinned ones keep all.
 *
 * Threads: the one that owns batches, with none open.
 * Units: bytes, nanoseconds of wall time.
 * Errors: NOT_FOUND, CORRUPT, IO, NO_SPACE, NOMEM.
 */
#ifndef SNAPSHOT_SNAP_RETAIN_H
#define SNAPSHOT_SNAP_RETAIN_H

#include "engine/record.h"
#include "store/store_batch.h"

enum snap_retain_kind {
    SNAP_RETAIN_PLANES = 1, /* a session's blocks gave up a plane */
    SNAP_RETAIN_SNAPSHOT,   /* an older snapshot went */
    SNAP_RETAIN_SESSION,    /* a session that `expire` named went whole */
    SNAP_RETAIN_KINDS
};
const char *snap_retain_name(enum snap_retain_kind kind); /* a constant word */

struct snap_retain_action {
    enum snap_retain_kind kind;
    uint64_t at_ns;
    uint64_t bytes; /* stored bytes that are garbage now */
    uint64_t tokens;
    uint32_t blocks;
    uint8_t stream; /* of PLANES */
    char name[IMAGE_NAME_BYTES_MAX + 1];
};

struct snap_retain_args {
    struct store *store;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    int may_degrade;
    uint64_t need_bytes; /* of the byte budget, for the save that waits */
    int (*is_busy)(void *context, const char *session); /* NULL: none is */
    void *context;
};
struct snap_retain_sum {
    uint32_t lowered, snapshots, sessions; /* actions of each kind */
    uint64_t bytes;
};
/* Gives up what the order says until need_bytes are free or nothing is left; adds to *sum.
 * *changed_out 1: another try is worth it. */
enum kv_err snap_retain_make_room(const struct snap_retain_args *args, struct snap_retain_sum *sum,
                                  int *changed_out, struct kv_diag *diag);

/* What may go for a writer without room: NULL is what `expire` has named, and none is busy. */
struct snap_retain_leave {
    int may_degrade;
    int (*is_busy)(void *context, const char *session); /* NULL: none is */
    void *context;
};
/* A batch of `worst_bytes` for something that is no save. Where the budget has no room, gc and then
 * what may go make some; `session` (may be NULL) is as if busy. LIMIT: there is none, and the text
 * says how much `what` needs. Otherwise as store_batch_begin. */
struct snap_retain_writer {
    struct store *store;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    const struct snap_retain_leave *leave; /* may be NULL */
    const char *session, *what;
};
enum kv_err snap_retain_begin(const struct snap_retain_writer *writer, uint64_t worst_bytes,
                              struct store_batch **out, struct kv_diag *diag);

/* Allows (or forbids again) that the session goes whole when the budget is reached. A later save
 * forbids it again. NOT_FOUND, BUSY (pinned). */
enum kv_err snap_retain_expire(struct store *store, const char *name, int may_expire,
                               struct kv_diag *diag);

/* The totals ever, and the newest actions, newest first. */
enum { SNAP_RETAIN_LOG_MAX = 32 };
struct snap_retain_log {
    uint64_t actions[SNAP_RETAIN_KINDS], bytes[SNAP_RETAIN_KINDS];
    uint32_t count;
    struct snap_retain_action newest[SNAP_RETAIN_LOG_MAX];
};
/* Empty when nothing has ever gone. */
enum kv_err snap_retain_read(struct store *store, struct snap_retain_log *log_out,
                             struct kv_diag *diag);
struct store_batch;
/* Puts a log without the actions of `name` into the batch: of a session that is removed. */
enum kv_err snap_retain_forget(struct store *store, struct store_batch *batch, const char *name,
                               struct kv_diag *diag);

#endif
