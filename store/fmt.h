/* store/fmt.h - the store's own records, encoded and decoded.
 *
 * Responsible for: the byte layouts of FORMAT.md, pure functions from bytes to structs and back.
 * Decoding accepts exactly what encoding can produce.
 * Not responsible for: reading or writing files, or what a batch means (rebuild.c).
 *
 * Every decoder returns KV_OK, KV_ERR_CORRUPT, or KV_ERR_VERSION where a version field is larger
 * than ours; it writes its result on KV_OK only, and views point into the given bytes.
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef STORE_FMT_H
#define STORE_FMT_H

#include "store/base/bytes.h"
#include "store/store.h"

enum {
    FMT_ID_BYTES = 16,
    FMT_TEXT_BYTES_MAX = 128,
    FMT_EXTENT_BYTES = 56,
    FMT_ENTRY_HEAD_BYTES = 8,
    FMT_ENTRY_BYTES_MAX =
        FMT_ENTRY_HEAD_BYTES + STORE_VALUE_BYTES_MAX + STORE_EXTENTS_MAX * FMT_EXTENT_BYTES + 8,
    FMT_BATCH_HEAD_BYTES = 128,
    FMT_OP_HEAD_BYTES = 8,
    FMT_STATE_BYTES = 128
};
#define FMT_BATCH_BYTES_MAX (((uint64_t)64 << 20) + 8192)
#define FMT_OFF_END ((uint64_t)1 << 40)

/* The FORMAT file. Returns the length written, at most FMT_TEXT_BYTES_MAX. */
size_t fmt_text_encode(const uint8_t id[FMT_ID_BYTES], char text_out[FMT_TEXT_BYTES_MAX]);
enum kv_err fmt_text_decode(const char *text, size_t bytes, uint8_t id_out[FMT_ID_BYTES],
                            struct kv_diag *diag);

/* Bytes that the extent takes in its segment. */
static inline uint64_t fmt_extent_padded(const struct store_extent *extent) {
    return kv_round_up(extent->stored_bytes, STORE_PAGE_BYTES);
}

void fmt_extent_encode(const struct store_extent *extent, uint8_t out[FMT_EXTENT_BYTES]);
enum kv_err fmt_extent_decode(const uint8_t bytes[FMT_EXTENT_BYTES], struct store_extent *out);

/* A decoded entry: a view. */
struct fmt_entry {
    const uint8_t *value;
    uint32_t value_bytes;
    uint32_t extent_count;
    const uint8_t *extents; /* extent_count × FMT_EXTENT_BYTES, each checked */
};

size_t fmt_entry_bytes(size_t value_bytes, size_t extent_count);
/* Writes the entry behind the key, which stands at key_then_entry[0, key_bytes) already. */
void fmt_entry_encode(uint8_t *key_then_entry, size_t key_bytes, const struct fmt_entry *entry);
/* `total_bytes` counts the key and the entry behind it. */
enum kv_err fmt_entry_decode(const uint8_t *key_then_entry, size_t key_bytes, size_t total_bytes,
                             struct fmt_entry *out);
/* Extent `index` of a decoded entry. */
struct store_extent fmt_entry_extent(const struct fmt_entry *entry, uint32_t index);
/* Sum of the padded stored bytes. */
uint64_t fmt_entry_live_bytes(const struct fmt_entry *entry);

struct fmt_place {
    uint32_t segment;
    uint64_t off;
};

struct fmt_batch {
    uint8_t store_id[FMT_ID_BYTES];
    uint64_t epoch;
    uint64_t sequence;
    struct fmt_place at;    /* of the record itself */
    struct fmt_place begin; /* the tail before the batch */
    uint32_t op_count;
    uint64_t record_bytes;
    uint64_t extent_id_first;
    uint64_t extent_id_count;
    struct kv_digest previous;
};

/* Fills in head and digest around operations that stand at record[FMT_BATCH_HEAD_BYTES …). */
void fmt_batch_encode(uint8_t *record, const struct fmt_batch *batch);
/* The head alone, from the first page: enough to know how long the record is. */
enum kv_err fmt_batch_decode_head(const uint8_t *page, size_t bytes, struct fmt_batch *out);
/* The whole record: digest and every operation. */
enum kv_err fmt_batch_decode(const uint8_t *record, size_t bytes, struct fmt_batch *out,
                             struct kv_digest *digest_out);

enum fmt_op_type { FMT_OP_PUT = 1, FMT_OP_DELETE = 2 };

struct fmt_op {
    enum fmt_op_type type;
    const uint8_t *key; /* the entry's bytes follow it */
    size_t key_bytes;
    const uint8_t *entry_at;
    size_t entry_bytes;
    struct fmt_entry entry; /* of a put */
};

/* The next operation of a range of operations. */
enum kv_err fmt_op_decode(struct kv_reader *reader, struct fmt_op *out);
void fmt_op_encode_head(uint8_t out[FMT_OP_HEAD_BYTES], enum fmt_op_type type, size_t key_bytes,
                        size_t entry_bytes);

struct fmt_state {
    uint8_t store_id[FMT_ID_BYTES];
    uint64_t epoch;
    uint64_t sequence;
    struct kv_digest last;
    struct fmt_place tail;
    uint64_t extent_id_next;
    uint64_t record_count;
    uint64_t live_bytes;
};

void fmt_state_encode(const struct fmt_state *state, uint8_t out[FMT_STATE_BYTES]);
enum kv_err fmt_state_decode(const uint8_t *bytes, size_t count, struct fmt_state *out);

#endif
