/* engine/export.h - heads of an export file: pure encode and decode.
 *
 * Responsible for: the byte layout of snapshot/EXPORT.md's heads and their chain of checks.
 * Not responsible for: what frames hold (image.h, record.h), reading or writing a file
 * (restore/, snapshot/).
 *
 * Each frame's check covers the check before it, so a frame that is missing, doubled, moved or of
 * another file is found at its head, before its content is read.
 *
 * Threads: pure.
 * Units: bytes.
 * Errors: CORRUPT; VERSION (named) for a newer file.
 */
#ifndef ENGINE_EXPORT_H
#define ENGINE_EXPORT_H

#include "engine/record.h"
#include "store/base/diag.h"
#include "store/base/digest.h"

#include <stdint.h>

enum {
    EXPORT_VERSION = 1,
    EXPORT_START_BYTES = 24,
    EXPORT_FRAME_BYTES = 40,
    EXPORT_BLOCK_BYTES = 8, /* in front of the block's record */
    EXPORT_BLOCK_BYTES_MAX = EXPORT_BLOCK_BYTES + RECORD_OUT_BYTES,
    EXPORT_DONE_BYTES = 24
};

enum export_tag {
    EXPORT_IMAGE,  /* number: EXPORT_EXPLICIT | EXPORT_ASLEEP; content: the image */
    EXPORT_BLOCK,  /* number: its index; content: struct export_block */
    EXPORT_EXTENT, /* number: its kind; content: its bytes */
    EXPORT_PAGE,   /* number: its kind; content: dense bytes */
    EXPORT_DONE,   /* number: 0; content: struct export_done */
    EXPORT_TAGS
};
enum { EXPORT_EXPLICIT = 1, EXPORT_ASLEEP = 2 };

struct export_frame {
    enum export_tag tag;
    uint32_t number;
    uint64_t bytes; /* of the content */
    struct kv_digest digest;
};
struct export_block {
    uint32_t extent_count;
    struct record_block record;
};
struct export_done {
    uint32_t blocks, extents, pages;
    uint64_t bytes; /* of all contents before this one */
};

/* The file's first bytes; *check_out is what the first frame is chained to. */
void export_put_start(uint8_t out[EXPORT_START_BYTES], uint64_t *check_out);
enum kv_err export_get_start(const uint8_t bytes[EXPORT_START_BYTES], uint64_t *check_out,
                             struct kv_diag *diag);

/* *check is that of the head before and becomes this one's. */
void export_put_frame(const struct export_frame *frame, uint64_t *check,
                      uint8_t out[EXPORT_FRAME_BYTES]);
enum kv_err export_get_frame(const uint8_t bytes[EXPORT_FRAME_BYTES], uint64_t *check,
                             struct export_frame *frame_out, struct kv_diag *diag);

/* Returns the bytes written. */
size_t export_put_block(const struct export_block *block, uint8_t out[EXPORT_BLOCK_BYTES_MAX]);
enum kv_err export_get_block(const uint8_t *bytes, size_t count, struct export_block *block_out,
                             struct kv_diag *diag);
void export_put_done(const struct export_done *done, uint8_t out[EXPORT_DONE_BYTES]);
enum kv_err export_get_done(const uint8_t bytes[EXPORT_DONE_BYTES], struct export_done *done_out,
                            struct kv_diag *diag);

#endif
