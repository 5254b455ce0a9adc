/* store/index.h - the door to the index.
 *
 * Responsible for: key → entry look-up and ordered steps, and applying a batch's operations
 * together with the store's state in one durable transaction. The file grows by itself.
 * Not responsible for: segments, or what to do when the index is damaged (store_open.c,
 * rebuild.c).
 *
 * Threads: one thread applies; any thread looks up meanwhile. No transaction outlives a call.
 * Units: bytes.
 */
#ifndef STORE_INDEX_H
#define STORE_INDEX_H

#include "store/base/alloc.h"
#include "store/base/diag.h"
#include "store/fmt.h"
#include "store/io.h"

struct index;

enum index_mode {
    INDEX_READ,  /* changes nothing, also on a read-only file system */
    INDEX_WRITE, /* must be there */
    INDEX_CREATE /* made empty; `loose` until index_sync */
};

struct index_options {
    enum index_mode mode;
    const struct io_door *door; /* for its names and symbolic links only */
    const struct kv_alloc *alloc;
    int dir;              /* the store's directory */
    const char *dir_path; /* of the same, where /proc is not mounted */
    const char *name;     /* "index" or "index.tmp" */
};

/* KV_ERR_NOT_FOUND not there or empty, KV_ERR_CORRUPT not an index or a symbolic link, KV_ERR_IO,
 * KV_ERR_NO_SPACE, KV_ERR_NOMEM. */
enum kv_err index_open(const struct index_options *options, struct index **out,
                       struct kv_diag *diag);
void index_close(struct index *index); /* NULL is allowed */

/* A key and the entry behind it, copied out; grows as needed, index_copy_release frees it. */
struct index_copy {
    uint8_t *bytes;
    size_t capacity;
    size_t key_bytes;
    size_t total_bytes;
};
void index_copy_release(const struct kv_alloc *alloc, struct index_copy *copy);

/* The raw entry, not yet checked. KV_ERR_NOT_FOUND, KV_ERR_CORRUPT, KV_ERR_IO (also: another
 * process has replaced the index that this one reads), KV_ERR_NOMEM. */
enum kv_err index_get(struct index *index, const void *key, size_t key_bytes,
                      struct index_copy *copy, struct kv_diag *diag);

struct index_range {
    const void *prefix;
    size_t prefix_bytes;
    const void *after; /* NULL with after_bytes 0: from the start */
    size_t after_bytes;
};
/* The first key greater than `after` with the prefix; codes as index_get. */
enum kv_err index_next(struct index *index, const struct index_range *range,
                       struct index_copy *copy, struct kv_diag *diag);

/* KV_ERR_NOT_FOUND none yet; KV_ERR_CORRUPT, KV_ERR_VERSION, KV_ERR_IO. */
enum kv_err index_state(struct index *index, struct fmt_state *out, struct kv_diag *diag);

/* Applies checked operations and the state as one. record_count and live_bytes of *state are those
 * before; they are brought up to date on KV_OK. KV_ERR_NO_SPACE, KV_ERR_NOMEM, KV_ERR_CORRUPT,
 * KV_ERR_IO: nothing changed, unless the commit itself failed, when index_state tells. */
enum kv_err index_apply(struct index *index, const uint8_t *ops, size_t ops_bytes,
                        struct fmt_state *state, struct kv_diag *diag);

/* Makes an index opened with INDEX_CREATE durable. KV_ERR_IO, KV_ERR_NO_SPACE. */
enum kv_err index_sync(struct index *index, struct kv_diag *diag);

/* `fresh`, made with INDEX_CREATE, synced, and by now in the place of the other, becomes what
 * stands behind `index`; look-ups of other threads go on. `fresh` is to be closed afterwards. By
 * the thread that applies. */
void index_replace(struct index *index, struct index *fresh);

uint64_t index_bytes(struct index *index);   /* in use, of its file */
uint64_t index_commits(struct index *index); /* since it was made */

#endif
