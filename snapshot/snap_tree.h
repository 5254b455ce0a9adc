/* snapshot/snap_tree.h - stored sessions as names, tags and branches.
 *
 * Responsible for: forking, going back to a tag, renaming, pinning, listing and removing snapshots;
 * all from records and images alone, so no model is needed.
 * Not responsible for: live sessions: none of these names may be resident. Tags are given by
 * saving (snapshot_options), going back inside a live session is snapshot_rewind.
 *
 * A fork is a new lineage with the source as parent, cut at its block count: it owns nothing but
 * its records and one image, and shares blocks and pages until it grows.
 *
 * Each call is one batch: after a power cut all of it has happened or nothing.
 *
 * Threads: the one that owns batches, with none open.
 * Units: nanoseconds of wall clock.
 * Errors: NOT_FOUND (session or tag), EXISTS (the new name, or a tag), INVALID (names), BUSY (it is
 * pinned), CORRUPT, VERSION, LIMIT (also the byte budget), IO, NO_SPACE, NOMEM; nothing has
 * changed then but what gave room.
 */
#ifndef SNAPSHOT_SNAP_TREE_H
#define SNAPSHOT_SNAP_TREE_H

#include "engine/record.h"
#include "snapshot/snap_retain.h"

struct snap_tree {
    struct store *store;
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    const struct snap_retain_leave *leave; /* for fork, revert, rename; may be NULL */
};
/* One session's snapshots: its head (tag NULL) or the one with that tag. */
struct snap_tree_place {
    const char *name, *tag;
};

/* `text` is NAME or NAME@TAG. A stored session whose whole name is `text` goes before a tag. The
 * memory behind place_out is `room`. INVALID. */
struct snap_tree_room {
    char name[IMAGE_NAME_BYTES_MAX + 1], tag[RECORD_TAG_BYTES_MAX + 1];
};
enum kv_err snap_tree_parse(struct store *store, const char *text, struct snap_tree_room *room,
                            struct snap_tree_place *place_out, struct kv_diag *diag);
/* INVALID when `text` can be neither a name nor a name with a tag; before anything is opened. */
enum kv_err snap_tree_check(const char *text, struct kv_diag *diag);
/* The id of the snapshot; record_out may be NULL. */
enum kv_err snap_tree_find(struct store *store, const struct snap_tree_place *place,
                           uint64_t *snapshot_out, struct record_snapshot *record_out,
                           struct kv_diag *diag);
/* EXISTS when the stored session has the tag; one that is not stored has none. */
enum kv_err snap_tree_tag_free(struct store *store, const struct snap_tree_place *place,
                               struct kv_diag *diag);
/* From the head down; 0 stops. A chain that breaks is CORRUPT, what stands before it was told. */
typedef int (*snap_tree_each)(void *context, uint64_t snapshot,
                              const struct record_snapshot *record);
enum kv_err snap_tree_walk(struct store *store, const char *name, snap_tree_each each,
                           void *context, struct kv_diag *diag);

/* A new session with the text, memory and needles of that snapshot, and its proofs. */
enum kv_err snap_tree_fork(const struct snap_tree *tree, const struct snap_tree_place *place,
                           const char *new_name, struct kv_diag *diag);
/* The session goes on from its tag. The head before stays under a tag of its own, written to
 * kept_out: before-restore-N unless it has one; "" when the tag is the head already. */
enum kv_err snap_tree_revert(const struct snap_tree *tree, const struct snap_tree_place *place,
                             char kept_out[RECORD_TAG_BYTES_MAX + 1], struct kv_diag *diag);
enum kv_err snap_tree_rename(const struct snap_tree *tree, const char *name, const char *new_name,
                             struct kv_diag *diag);
enum kv_err snap_tree_pin(const struct snap_tree *tree, const char *name, int pinned,
                          struct kv_diag *diag);
/* Takes a tag away and with it its snapshot; of the head only the tag, since later turns stand on
 * it. The whole session: snapshot_remove. */
enum kv_err snap_tree_untag(const struct snap_tree *tree, const struct snap_tree_place *place,
                            struct kv_diag *diag);

/* For the save that keeps a head: "before-restore-N", N one above those that are there. */
enum kv_err snap_tree_kept_tag(struct store *store, const char *name,
                               char tag_out[RECORD_TAG_BYTES_MAX + 1], struct kv_diag *diag);

#endif
