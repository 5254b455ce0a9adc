/* engine/export.c - heads of an export file: pure encode and decode.
 *
 * Responsible for: the contract of export.h.
 * Not responsible for: the order of frames (snapshot/snap_take.c).
 */
#include "engine/export.h"

#include "store/base/bytes.h"

#include <string.h>

static const char magic[8] = {'C', 'P', 'E', 'X', 'P', 'O', 'R', 'T'};
static const char tags[EXPORT_TAGS][4] = {
    {'I', 'M', 'A', 'G'}, {'B', 'L', 'C', 'K'}, {'E', 'X', 'T', 'N'},
    {'P', 'A', 'G', 'E'}, {'D', 'O', 'N', 'E'},
};

enum { START_CHECKED_BYTES = 16, FRAME_CHECKED_BYTES = 32 };

void export_put_start(uint8_t out[EXPORT_START_BYTES], uint64_t *check_out) {
    memcpy(out, magic, sizeof magic);
    kv_put_u32(out + 8, EXPORT_VERSION);
    kv_put_u32(out + 12, 0);
    *check_out = kv_digest_short(out, START_CHECKED_BYTES);
    kv_put_u64(out + START_CHECKED_BYTES, *check_out);
}

enum kv_err export_get_start(const uint8_t bytes[EXPORT_START_BYTES], uint64_t *check_out,
                             struct kv_diag *diag) {
    if (memcmp(bytes, magic, sizeof magic) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "this is not an export of coldplane");
    uint32_t version = kv_get_u32(bytes + 8);
    uint64_t check = kv_digest_short(bytes, START_CHECKED_BYTES);
    if (check != kv_get_u64(bytes + START_CHECKED_BYTES))
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the start of the export is damaged");
    if (version > EXPORT_VERSION)
        return kv_diag_set(diag, KV_ERR_VERSION,
                           "the export needs version %u, this program reads up to %d: use a newer "
                           "coldplane",
                           version, EXPORT_VERSION);
    if (version == 0 || kv_get_u32(bytes + 12) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the start of the export is impossible");
    *check_out = check;
    return KV_OK;
}

/* XXH3-64 of the check before and the head's own bytes. */
static uint64_t chained(uint64_t before, const uint8_t *head) {
    uint8_t bytes[8 + FRAME_CHECKED_BYTES];
    kv_put_u64(bytes, before);
    memcpy(bytes + 8, head, FRAME_CHECKED_BYTES);
#ifdef BREAK_EXPORT_CHAIN
    kv_put_u64(bytes, 0);
#endif
    return kv_digest_short(bytes, sizeof bytes);
}

void export_put_frame(const struct export_frame *frame, uint64_t *check,
                      uint8_t out[EXPORT_FRAME_BYTES]) {
    memcpy(out, tags[frame->tag], 4);
    kv_put_u32(out + 4, frame->number);
    kv_put_u64(out + 8, frame->bytes);
    memcpy(out + 16, frame->digest.bytes, KV_DIGEST_BYTES);
    *check = chained(*check, out);
    kv_put_u64(out + FRAME_CHECKED_BYTES, *check);
}

enum kv_err export_get_frame(const uint8_t bytes[EXPORT_FRAME_BYTES], uint64_t *check,
                             struct export_frame *frame_out, struct kv_diag *diag) {
    uint64_t expected = chained(*check, bytes);
    if (expected != kv_get_u64(bytes + FRAME_CHECKED_BYTES))
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "the head of a frame is damaged, or does not follow the one before");
    for (int i = 0; i < EXPORT_TAGS; i++) {
        if (memcmp(bytes, tags[i], 4) != 0)
            continue;
        frame_out->tag = (enum export_tag)i;
        frame_out->number = kv_get_u32(bytes + 4);
        frame_out->bytes = kv_get_u64(bytes + 8);
        memcpy(frame_out->digest.bytes, bytes + 16, KV_DIGEST_BYTES);
        *check = expected;
        return KV_OK;
    }
    return kv_diag_set(diag, KV_ERR_CORRUPT, "a frame of an unknown kind");
}

size_t export_put_block(const struct export_block *block, uint8_t out[EXPORT_BLOCK_BYTES_MAX]) {
    kv_put_u32(out, block->extent_count);
    kv_put_u32(out + 4, 0);
    return EXPORT_BLOCK_BYTES + record_put_block(&block->record, out + EXPORT_BLOCK_BYTES);
}

enum kv_err export_get_block(const uint8_t *bytes, size_t count, struct export_block *block_out,
                             struct kv_diag *diag) {
    if (count <= EXPORT_BLOCK_BYTES || kv_get_u32(bytes + 4) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the description of a block is impossible");
    block_out->extent_count = kv_get_u32(bytes);
    return record_get_block(bytes + EXPORT_BLOCK_BYTES, count - EXPORT_BLOCK_BYTES,
                            &block_out->record, diag);
}

void export_put_done(const struct export_done *done, uint8_t out[EXPORT_DONE_BYTES]) {
    kv_put_u32(out, done->blocks);
    kv_put_u32(out + 4, done->extents);
    kv_put_u32(out + 8, done->pages);
    kv_put_u32(out + 12, 0);
    kv_put_u64(out + 16, done->bytes);
}

enum kv_err export_get_done(const uint8_t bytes[EXPORT_DONE_BYTES], struct export_done *done_out,
                            struct kv_diag *diag) {
    if (kv_get_u32(bytes + 12) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the end of the export is impossible");
    *done_out = (struct export_done){kv_get_u32(bytes), kv_get_u32(bytes + 4),
                                     kv_get_u32(bytes + 8), kv_get_u64(bytes + 16)};
    return KV_OK;
}
