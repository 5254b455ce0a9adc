/* snapshot/snap_take.h - an export file read front to back and believed in nothing.
 *
 * Responsible for: the order, counts, sizes, digests, scales and token ids of snapshot/EXPORT.md;
 * each part is handed on when it has been checked.
 * Not responsible for: what becomes of the parts (snap_import.c), the bytes' source.
 *
 * Memory is bounded by the image and one block, and is taken only as bytes arrive.
 *
 * Threads: one owner.
 * Units: bytes.
 * Errors: CORRUPT naming the part, also for a file that is cut or goes on behind its end; VERSION;
 * MISMATCH (model, code, layout); NOMEM; what the source and the visitor return.
 */
#ifndef SNAPSHOT_SNAP_TAKE_H
#define SNAPSHOT_SNAP_TAKE_H

#include "engine/record.h"

struct snap_take_extent {
    uint8_t kind;
    const uint8_t *bytes; /* good for the call */
    uint64_t count;
    struct kv_digest digest;
};

struct snap_take_block {
    uint32_t index;
    const struct record_block *record;
    const struct snap_take_extent *extents; /* token ids first */
    uint32_t extent_count;
};

/* Each may be NULL. The image keeps the ids of the store it came from; the ids of its sealed blocks
 * are 0. */
struct snap_take_visitor {
    void *context;
    enum kv_err (*image)(void *context, const struct image *image, uint32_t flags,
                         const struct kv_digest *root, struct kv_diag *diag);
    enum kv_err (*block)(void *context, const struct snap_take_block *block, struct kv_diag *diag);
    /* 0: the sinks, then the window pages of the image. */
    enum kv_err (*page)(void *context, uint32_t index, const struct snap_take_extent *extent,
                        struct kv_diag *diag);
    /* The whole file was right. */
    enum kv_err (*end)(void *context, struct kv_diag *diag);
};

/* Fills `bytes`; fewer than `count` only at the end of the file. */
typedef enum kv_err (*snap_take_get)(void *context, void *bytes, size_t count, size_t *got_out,
                                     struct kv_diag *diag);
/* 0 cancels. */
typedef int (*snap_take_progress)(void *context, uint64_t done, uint64_t all);

struct snap_take_args {
    const struct kv_alloc *alloc;
    snap_take_get get;
    void *get_context;
    const struct image_model *here; /* NULL: whatever model */
    uint32_t vocab_count;           /* 0: whatever ids */
    snap_take_progress progress;    /* may be NULL */
    void *progress_context;
    struct snap_take_visitor visitor;
};

/* KV_OK when the whole file is right; the visitor may have seen parts of one that is not. */
enum kv_err snap_take(const struct snap_take_args *args, uint64_t *bytes_out, struct kv_diag *diag);

#endif
