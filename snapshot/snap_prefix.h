/* snapshot/snap_prefix.h - which stored sessions of an owner begin as these tokens do.
 *
 * Responsible for: a table in memory, made from the store and kept beside it, from the beginnings
 * of sessions to the sessions: SipHash, keyed by the owner, chained over the first 64 tokens and
 * the digests of the blocks' token ids, which the index holds already; the ids behind the last
 * block; marks, which somebody who knows the text makes of it. And the ids of one that was found.
 * Not responsible for: how far they really agree: a claim is a hint until the ids are compared
 * (engine/agree.h). Waking, forking (tools/prefix.h).
 *
 * An entry is the head of a session or one of its tagged snapshots. Sessions of another model, and
 * those whose records are damaged, have none. Each owner has a table of its own: a search looks at
 * no entry of anybody else, and takes as long as the owner's own entries make it.
 *
 * Threads: the scheduler's, which may be another one from `away` to `back`.
 * Units: tokens, blocks.
 * Errors: IO, NOMEM; what the functions say.
 */
#ifndef SNAPSHOT_SNAP_PREFIX_H
#define SNAPSHOT_SNAP_PREFIX_H

#include "engine/record.h"
#include "store/store.h"

enum { SNAP_PREFIX_MARKS_MAX = 64, SNAP_PREFIX_FOUND_MAX = 8 };

struct snap_prefix;

/* What the table knows of a session's text: ids[i] is token first + i. */
struct snap_prefix_text {
    const uint8_t *owner;
    const uint32_t *ids;
    uint64_t first, n;
    const struct image_span *roles;
    uint32_t role_count;
};
/* Returns how many marks it has made. */
typedef uint32_t (*snap_prefix_marks)(void *context, const struct snap_prefix_text *text,
                                      uint64_t marks_out[SNAP_PREFIX_MARKS_MAX]);

struct snap_prefix_settings {
    struct store *store; /* borrowed, as alloc, model and context */
    const struct kv_alloc *alloc;
    const struct image_model *model; /* NULL: sessions of every model */
    snap_prefix_marks marks;         /* NULL: none */
    /* Around reads of the disk: between them others may use the table. NULL: nobody does. */
    void (*away)(void *context);
    void (*back)(void *context);
    void *context;
    uint64_t hash_mask; /* UINT64_MAX; tests leave out bits, so that hashes collide */
};
/* Reads every name, its snapshots' images and the records of its blocks; no planes and no ids of
 * blocks. */
enum kv_err snap_prefix_open(const struct snap_prefix_settings *settings,
                             struct snap_prefix **prefix_out, struct kv_diag *diag);
void snap_prefix_close(struct snap_prefix *prefix); /* NULL is allowed */

/* What stands under the name now takes the place of what stood there: after a save, a removal. */
enum kv_err snap_prefix_note(struct snap_prefix *prefix, const char *name, struct kv_diag *diag);
/* The same for every name whose head is another one: after somebody else has changed the store. */
enum kv_err snap_prefix_refresh(struct snap_prefix *prefix, struct kv_diag *diag);

/* The keyed hash that is used throughout. */
uint64_t snap_prefix_hash(const uint8_t owner[IMAGE_OWNER_BYTES], const void *bytes, size_t count);

struct snap_prefix_wish {
    const uint8_t *owner; /* IMAGE_OWNER_BYTES */
    const uint32_t *ids;
    uint64_t count;
    const struct snap_prefix_mark { /* a session with this mark agrees so far, supposedly */
        uint64_t hash, tokens;
    } * marks;
    uint32_t mark_count;
};
struct snap_prefix_found {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t snapshot;
    int is_head;
    uint64_t n, n_kv, created_ns;
    uint32_t blocks;
    uint64_t claim; /* first tokens of the wish that the session has too, supposedly */
};
/* The largest claims, in falling order; of equal ones those that the session ends with, then the
 * newest. Returns how many. Memory only. */
uint32_t snap_prefix_find(struct snap_prefix *prefix, const struct snap_prefix_wish *wish,
                          struct snap_prefix_found found_out[SNAP_PREFIX_FOUND_MAX]);

/* All ids and roles of a snapshot, digests checked. NOT_FOUND when it has gone since, CORRUPT. */
struct snap_prefix_ids {
    uint32_t *ids; /* owned by `image` */
    uint64_t n;
    const struct image_span *roles;
    uint32_t role_count;
    struct image image;
};
enum kv_err snap_prefix_read(struct snap_prefix *prefix, const struct snap_prefix_found *found,
                             struct snap_prefix_ids *ids_out, struct kv_diag *diag);
void snap_prefix_ids_release(struct snap_prefix *prefix, struct snap_prefix_ids *ids);

struct snap_prefix_counts {
    uint64_t entries;   /* of this owner */
    uint64_t looked_at; /* how often a search has looked at one of them */
    uint64_t bytes;     /* of all owners, about */
};
void snap_prefix_counts(const struct snap_prefix *prefix, const uint8_t *owner,
                        struct snap_prefix_counts *counts_out);

#endif
