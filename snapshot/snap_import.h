/* snapshot/snap_import.h - an export file becomes a stored session.
 *
 * Responsible for: writing what snap_take.h has checked under a lineage of its own, and one last
 * batch that makes it visible; nothing is visible before the whole file was right.
 * Not responsible for: the file (tools/), proving the session (restore_wake).
 *
 * Threads: the one that writes to the store; no other batch meanwhile.
 * Units: bytes, tokens.
 * Errors: those of snap_take.h; EXISTS (a session has the name), INVALID (the name), LIMIT (the
 * byte budget), NO_SPACE, IO.
 * After an error, and after a kill at any point, the store has the sessions that it had before;
 * what was staged is deleted at once, or when the store is next opened for saving.
 */
#ifndef SNAPSHOT_SNAP_IMPORT_H
#define SNAPSHOT_SNAP_IMPORT_H

#include "snapshot/snap_retain.h"
#include "snapshot/snap_take.h"
#include "store/store.h"

struct snap_import_args {
    struct store *store;
    struct snap_take_args take; /* without visitor */
    const char *name;           /* NULL: the one in the file */
    const uint8_t *owner;       /* whose it becomes, IMAGE_OWNER_BYTES; NULL: the operator's */
    const struct kv_clock *clock;
    const struct snap_retain_leave *leave; /* what may go for it; may be NULL */
    uint64_t batch_bytes;                  /* a batch of blocks ends when it has so many */
};
/* The usual size: few syncs, and little to write again after a kill. */
#define SNAP_IMPORT_BATCH_BYTES ((uint64_t)64 << 20)
struct snap_import_result {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t snapshot, lineage, n, n_kv;
    uint32_t blocks, pages, batches;
    uint64_t file_bytes, raw_bytes, stored_bytes; /* raw and stored: of the extents written */
};
enum kv_err snap_import(const struct snap_import_args *args, struct snap_import_result *result_out,
                        struct kv_diag *diag);

#endif
