/* store/fmt.c - FORMAT.md as code: pure encoding and decoding.
 *
 * Responsible for: every offset and bound of the store's records.
 * Not responsible for: I/O, or accepting a batch into a chain (rebuild.c).
 */
#include "store/fmt.h"

#include "store/codec.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static const char batch_magic[8] = {'C', 'P', 'B', 'A', 'T', 'C', 'H', '1'};
static const char state_magic[8] = {'C', 'P', 'S', 'T', 'A', 'T', 'E', '1'};

enum { HEAD_CHECKED_BYTES = 120, STATE_CHECKED_BYTES = 120, TEXT_CHECK_BYTES = 23 };

size_t fmt_text_encode(const uint8_t id[FMT_ID_BYTES], char text_out[FMT_TEXT_BYTES_MAX]) {
    struct kv_digest digest;
    char hex[KV_DIGEST_HEX_BYTES];
    memcpy(digest.bytes, id, FMT_ID_BYTES);
    kv_digest_hex(&digest, hex);
    int used = snprintf(text_out, FMT_TEXT_BYTES_MAX, "coldplane store\nversion %d\nid %s\n",
                        STORE_FORMAT_VERSION, hex);
    assert(used > 0 && used < FMT_TEXT_BYTES_MAX);
    int more = snprintf(text_out + used, (size_t)(FMT_TEXT_BYTES_MAX - used), "check %016llx\n",
                        (unsigned long long)kv_digest_short(text_out, (size_t)used));
    assert(more == TEXT_CHECK_BYTES && used + more < FMT_TEXT_BYTES_MAX);
    return (size_t)(used + more);
}

static int hex_value(char digit) {
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    return -1;
}

static enum kv_err text_version(const char *text, size_t bytes, size_t *off, struct kv_diag *diag) {
    uint64_t version = 0;
    size_t digits = 0;
    while (*off < bytes && text[*off] >= '0' && text[*off] <= '9' && digits < 9) {
        version = version * 10 + (uint64_t)(text[*off] - '0');
        (*off)++;
        digits++;
    }
    if (digits == 0 || *off >= bytes || text[*off] != '\n' || version == 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "FORMAT has no version: put it back from a copy of the store");
    if (version > STORE_FORMAT_VERSION)
        return kv_diag_set(diag, KV_ERR_VERSION,
                           "the store needs version %llu of the format, this program knows "
                           "version %d: use a newer coldplane",
                           (unsigned long long)version, STORE_FORMAT_VERSION);
    return KV_OK;
}

enum kv_err fmt_text_decode(const char *text, size_t bytes, uint8_t id_out[FMT_ID_BYTES],
                            struct kv_diag *diag) {
    static const char head[] = "coldplane store\nversion ";
    static const char middle[] = "\nid ";
    size_t off = sizeof head - 1;
    if (bytes < off || memcmp(text, head, off) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "FORMAT is not that of a coldplane store: put it back from a copy of "
                           "the store, or use another directory");
    enum kv_err err = text_version(text, bytes, &off, diag);
    if (err != KV_OK)
        return err;
    uint8_t id[FMT_ID_BYTES] = {0};
    size_t id_off = off + sizeof middle - 1;
    int whole = bytes == id_off + 2 * FMT_ID_BYTES + 1 + TEXT_CHECK_BYTES &&
                memcmp(text + off, middle, sizeof middle - 1) == 0;
    for (size_t i = 0; i < FMT_ID_BYTES && whole; i++) {
        int high = hex_value(text[id_off + 2 * i]);
        int low = hex_value(text[id_off + 2 * i + 1]);
        whole = high >= 0 && low >= 0;
        id[i] = whole ? (uint8_t)(high << 4 | low) : 0;
    }
    /* There is one text for each id, so it is made again and compared, check and all. */
    char expected[FMT_TEXT_BYTES_MAX];
    if (!whole || fmt_text_encode(id, expected) != bytes || memcmp(text, expected, bytes) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "FORMAT is damaged: put it back from a copy of the store");
    memcpy(id_out, id, FMT_ID_BYTES);
    return KV_OK;
}

static int extent_fits(const struct store_extent *extent) {
    if (extent->id == 0 || extent->kind >= STORE_KINDS_MAX || extent->codec >= CODEC_COUNT ||
        extent->segment == 0 || extent->off % STORE_PAGE_BYTES != 0 || extent->off >= FMT_OFF_END ||
        extent->raw_bytes == 0 || extent->raw_bytes > STORE_EXTENT_BYTES_MAX)
        return 0;
    if (extent->codec == CODEC_RAW)
        return extent->stored_bytes == extent->raw_bytes;
    return extent->stored_bytes != 0 && extent->stored_bytes < extent->raw_bytes;
}

void fmt_extent_encode(const struct store_extent *extent, uint8_t out[FMT_EXTENT_BYTES]) {
    assert(extent_fits(extent));
    kv_put_u64(out, extent->id);
    out[8] = extent->kind;
    out[9] = extent->codec;
    kv_put_u16(out + 10, 0);
    kv_put_u32(out + 12, extent->segment);
    kv_put_u64(out + 16, extent->off);
    kv_put_u64(out + 24, extent->raw_bytes);
    kv_put_u64(out + 32, extent->stored_bytes);
    memcpy(out + 40, extent->digest.bytes, KV_DIGEST_BYTES);
}

static struct store_extent extent_load(const uint8_t bytes[FMT_EXTENT_BYTES]) {
    struct store_extent extent = {
        .id = kv_get_u64(bytes),
        .kind = bytes[8],
        .codec = bytes[9],
        .segment = kv_get_u32(bytes + 12),
        .off = kv_get_u64(bytes + 16),
        .raw_bytes = kv_get_u64(bytes + 24),
        .stored_bytes = kv_get_u64(bytes + 32),
    };
    memcpy(extent.digest.bytes, bytes + 40, KV_DIGEST_BYTES);
    return extent;
}

enum kv_err fmt_extent_decode(const uint8_t bytes[FMT_EXTENT_BYTES], struct store_extent *out) {
    struct store_extent extent = extent_load(bytes);
    if (kv_get_u16(bytes + 10) != 0 || !extent_fits(&extent))
        return KV_ERR_CORRUPT;
    *out = extent;
    return KV_OK;
}

size_t fmt_entry_bytes(size_t value_bytes, size_t extent_count) {
    assert(value_bytes <= STORE_VALUE_BYTES_MAX && extent_count <= STORE_EXTENTS_MAX);
    return FMT_ENTRY_HEAD_BYTES + value_bytes + extent_count * FMT_EXTENT_BYTES + 8;
}

void fmt_entry_encode(uint8_t *key_then_entry, size_t key_bytes, const struct fmt_entry *entry) {
    uint8_t *at = key_then_entry + key_bytes;
    size_t total = key_bytes + fmt_entry_bytes(entry->value_bytes, entry->extent_count);
    kv_put_u32(at, entry->value_bytes);
    kv_put_u16(at + 4, (uint16_t)entry->extent_count);
    kv_put_u16(at + 6, 0);
    at += FMT_ENTRY_HEAD_BYTES;
    if (entry->value_bytes != 0)
        memcpy(at, entry->value, entry->value_bytes);
    at += entry->value_bytes;
    if (entry->extent_count != 0)
        memcpy(at, entry->extents, (size_t)entry->extent_count * FMT_EXTENT_BYTES);
    kv_put_u64(key_then_entry + total - 8, kv_digest_short(key_then_entry, total - 8));
}

enum kv_err fmt_entry_decode(const uint8_t *key_then_entry, size_t key_bytes, size_t total_bytes,
                             struct fmt_entry *out) {
    if (key_bytes == 0 || key_bytes > STORE_KEY_BYTES_MAX ||
        total_bytes < key_bytes + FMT_ENTRY_HEAD_BYTES + 8)
        return KV_ERR_CORRUPT;
    const uint8_t *at = key_then_entry + key_bytes;
    struct fmt_entry entry = {.value_bytes = kv_get_u32(at), .extent_count = kv_get_u16(at + 4)};
    if (kv_get_u16(at + 6) != 0 || entry.value_bytes > STORE_VALUE_BYTES_MAX ||
        entry.extent_count > STORE_EXTENTS_MAX ||
        total_bytes != key_bytes + fmt_entry_bytes(entry.value_bytes, entry.extent_count))
        return KV_ERR_CORRUPT;
#ifndef BREAK_ENTRY_CHECK
    if (kv_get_u64(key_then_entry + total_bytes - 8) !=
        kv_digest_short(key_then_entry, total_bytes - 8))
        return KV_ERR_CORRUPT;
#endif
    entry.value = at + FMT_ENTRY_HEAD_BYTES;
    entry.extents = entry.value + entry.value_bytes;
    for (uint32_t i = 0; i < entry.extent_count; i++) {
        struct store_extent extent;
        if (fmt_extent_decode(entry.extents + (size_t)i * FMT_EXTENT_BYTES, &extent) != KV_OK)
            return KV_ERR_CORRUPT;
    }
    *out = entry;
    return KV_OK;
}

struct store_extent fmt_entry_extent(const struct fmt_entry *entry, uint32_t index) {
    assert(index < entry->extent_count);
    return extent_load(entry->extents + (size_t)index * FMT_EXTENT_BYTES);
}

uint64_t fmt_entry_live_bytes(const struct fmt_entry *entry) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < entry->extent_count; i++) {
        struct store_extent extent = fmt_entry_extent(entry, i);
        sum += fmt_extent_padded(&extent);
    }
    return sum;
}

void fmt_batch_encode(uint8_t *record, const struct fmt_batch *batch) {
    assert(batch->record_bytes >= FMT_BATCH_HEAD_BYTES + KV_DIGEST_BYTES);
    memcpy(record, batch_magic, sizeof batch_magic);
    kv_put_u32(record + 8, STORE_FORMAT_VERSION);
    kv_put_u32(record + 12, 0);
    memcpy(record + 16, batch->store_id, FMT_ID_BYTES);
    kv_put_u64(record + 32, batch->epoch);
    kv_put_u64(record + 40, batch->sequence);
    kv_put_u32(record + 48, batch->at.segment);
    kv_put_u32(record + 52, batch->op_count);
    kv_put_u64(record + 56, batch->at.off);
    kv_put_u64(record + 64, batch->record_bytes);
    kv_put_u64(record + 72, batch->extent_id_first);
    kv_put_u64(record + 80, batch->extent_id_count);
    kv_put_u32(record + 88, batch->begin.segment);
    kv_put_u32(record + 92, 0);
    kv_put_u64(record + 96, batch->begin.off);
    memcpy(record + 104, batch->previous.bytes, KV_DIGEST_BYTES);
    kv_put_u64(record + HEAD_CHECKED_BYTES, kv_digest_short(record, HEAD_CHECKED_BYTES));
    size_t body = (size_t)batch->record_bytes - KV_DIGEST_BYTES;
    struct kv_digest digest = kv_digest_of(record, body);
    memcpy(record + body, digest.bytes, KV_DIGEST_BYTES);
}

static int batch_fits(const struct fmt_batch *batch) {
    uint64_t ids_end = 0;
    return batch->sequence != 0 && batch->at.segment != 0 && batch->begin.segment != 0 &&
           batch->at.off % STORE_PAGE_BYTES == 0 && batch->at.off < FMT_OFF_END &&
           batch->begin.off % STORE_PAGE_BYTES == 0 && batch->begin.off < FMT_OFF_END &&
           batch->record_bytes >= FMT_BATCH_HEAD_BYTES + KV_DIGEST_BYTES &&
           batch->record_bytes <= FMT_BATCH_BYTES_MAX && batch->extent_id_first != 0 &&
           kv_add_u64(batch->extent_id_first, batch->extent_id_count, &ids_end);
}

enum kv_err fmt_batch_decode_head(const uint8_t *page, size_t bytes, struct fmt_batch *out) {
    if (bytes < FMT_BATCH_HEAD_BYTES || memcmp(page, batch_magic, sizeof batch_magic) != 0 ||
        kv_get_u64(page + HEAD_CHECKED_BYTES) != kv_digest_short(page, HEAD_CHECKED_BYTES))
        return KV_ERR_CORRUPT;
    if (kv_get_u32(page + 8) > STORE_FORMAT_VERSION)
        return KV_ERR_VERSION;
    struct fmt_batch batch = {
        .epoch = kv_get_u64(page + 32),
        .sequence = kv_get_u64(page + 40),
        .at = {kv_get_u32(page + 48), kv_get_u64(page + 56)},
        .begin = {kv_get_u32(page + 88), kv_get_u64(page + 96)},
        .op_count = kv_get_u32(page + 52),
        .record_bytes = kv_get_u64(page + 64),
        .extent_id_first = kv_get_u64(page + 72),
        .extent_id_count = kv_get_u64(page + 80),
    };
    memcpy(batch.store_id, page + 16, FMT_ID_BYTES);
    memcpy(batch.previous.bytes, page + 104, KV_DIGEST_BYTES);
    if (kv_get_u32(page + 8) != STORE_FORMAT_VERSION || kv_get_u32(page + 12) != 0 ||
        kv_get_u32(page + 92) != 0 || !batch_fits(&batch))
        return KV_ERR_CORRUPT;
    *out = batch;
    return KV_OK;
}

/* An extent of a put is either one of this batch or older; an id from the future is damage. */
static int op_ids_fit(const struct fmt_op *op, uint64_t ids_end) {
    for (uint32_t i = 0; op->type == FMT_OP_PUT && i < op->entry.extent_count; i++) {
        if (fmt_entry_extent(&op->entry, i).id >= ids_end)
            return 0;
    }
    return 1;
}

enum kv_err fmt_batch_decode(const uint8_t *record, size_t bytes, struct fmt_batch *out,
                             struct kv_digest *digest_out) {
    struct fmt_batch batch;
    enum kv_err err = fmt_batch_decode_head(record, bytes, &batch);
    if (err != KV_OK)
        return err;
    if (bytes < batch.record_bytes)
        return KV_ERR_CORRUPT;
    size_t body = (size_t)batch.record_bytes - KV_DIGEST_BYTES;
    struct kv_digest stored;
    struct kv_digest computed = kv_digest_of(record, body);
    memcpy(stored.bytes, record + body, KV_DIGEST_BYTES);
    if (memcmp(stored.bytes, computed.bytes, KV_DIGEST_BYTES) != 0)
        return KV_ERR_CORRUPT;
    struct kv_reader reader;
    kv_reader_init(&reader, record + FMT_BATCH_HEAD_BYTES, body - FMT_BATCH_HEAD_BYTES);
    for (uint32_t i = 0; i < batch.op_count; i++) {
        struct fmt_op op;
        if (fmt_op_decode(&reader, &op) != KV_OK ||
            !op_ids_fit(&op, batch.extent_id_first + batch.extent_id_count))
            return KV_ERR_CORRUPT;
    }
    if (kv_reader_left(&reader) != 0)
        return KV_ERR_CORRUPT;
    *out = batch;
    *digest_out = stored;
    return KV_OK;
}

void fmt_op_encode_head(uint8_t out[FMT_OP_HEAD_BYTES], enum fmt_op_type type, size_t key_bytes,
                        size_t entry_bytes) {
    assert(key_bytes != 0 && key_bytes <= STORE_KEY_BYTES_MAX);
    assert(entry_bytes <= FMT_ENTRY_BYTES_MAX && (entry_bytes == 0) == (type == FMT_OP_DELETE));
    out[0] = (uint8_t)type;
    out[1] = 0;
    kv_put_u16(out + 2, (uint16_t)key_bytes);
    kv_put_u32(out + 4, (uint32_t)entry_bytes);
}

enum kv_err fmt_op_decode(struct kv_reader *reader, struct fmt_op *out) {
    const uint8_t *head = kv_read_bytes(reader, FMT_OP_HEAD_BYTES);
    if (head == NULL)
        return KV_ERR_CORRUPT;
    struct fmt_op op = {.key_bytes = kv_get_u16(head + 2), .entry_bytes = kv_get_u32(head + 4)};
    if (head[1] != 0 || op.key_bytes == 0 || op.key_bytes > STORE_KEY_BYTES_MAX ||
        op.entry_bytes > FMT_ENTRY_BYTES_MAX)
        return KV_ERR_CORRUPT;
    op.key = kv_read_bytes(reader, op.key_bytes + op.entry_bytes);
    if (op.key == NULL)
        return KV_ERR_CORRUPT;
    op.entry_at = op.key + op.key_bytes;
    if (head[0] == FMT_OP_DELETE) {
        op.type = FMT_OP_DELETE;
        if (op.entry_bytes != 0)
            return KV_ERR_CORRUPT;
    } else if (head[0] == FMT_OP_PUT) {
        op.type = FMT_OP_PUT;
        if (fmt_entry_decode(op.key, op.key_bytes, op.key_bytes + op.entry_bytes, &op.entry) !=
            KV_OK)
            return KV_ERR_CORRUPT;
    } else {
        return KV_ERR_CORRUPT;
    }
    *out = op;
    return KV_OK;
}

void fmt_state_encode(const struct fmt_state *state, uint8_t out[FMT_STATE_BYTES]) {
    memset(out, 0, FMT_STATE_BYTES);
    memcpy(out, state_magic, sizeof state_magic);
    kv_put_u32(out + 8, STORE_FORMAT_VERSION);
    kv_put_u32(out + 12, state->tail.segment);
    memcpy(out + 16, state->store_id, FMT_ID_BYTES);
    kv_put_u64(out + 32, state->epoch);
    kv_put_u64(out + 40, state->sequence);
    memcpy(out + 48, state->last.bytes, KV_DIGEST_BYTES);
    kv_put_u64(out + 64, state->tail.off);
    kv_put_u64(out + 72, state->extent_id_next);
    kv_put_u64(out + 80, state->record_count);
    kv_put_u64(out + 88, state->live_bytes);
    kv_put_u64(out + STATE_CHECKED_BYTES, kv_digest_short(out, STATE_CHECKED_BYTES));
}

enum kv_err fmt_state_decode(const uint8_t *bytes, size_t count, struct fmt_state *out) {
    if (count != FMT_STATE_BYTES || memcmp(bytes, state_magic, sizeof state_magic) != 0 ||
        kv_get_u64(bytes + STATE_CHECKED_BYTES) != kv_digest_short(bytes, STATE_CHECKED_BYTES))
        return KV_ERR_CORRUPT;
    if (kv_get_u32(bytes + 8) > STORE_FORMAT_VERSION)
        return KV_ERR_VERSION;
    struct fmt_state state = {
        .epoch = kv_get_u64(bytes + 32),
        .sequence = kv_get_u64(bytes + 40),
        .tail = {kv_get_u32(bytes + 12), kv_get_u64(bytes + 64)},
        .extent_id_next = kv_get_u64(bytes + 72),
        .record_count = kv_get_u64(bytes + 80),
        .live_bytes = kv_get_u64(bytes + 88),
    };
    memcpy(state.store_id, bytes + 16, FMT_ID_BYTES);
    memcpy(state.last.bytes, bytes + 48, KV_DIGEST_BYTES);
    if (kv_get_u32(bytes + 8) != STORE_FORMAT_VERSION || state.tail.segment == 0 ||
        state.tail.off % STORE_PAGE_BYTES != 0 || state.tail.off > FMT_OFF_END ||
        state.extent_id_next == 0)
        return KV_ERR_CORRUPT;
    for (size_t i = 96; i < STATE_CHECKED_BYTES; i++) {
        if (bytes[i] != 0)
            return KV_ERR_CORRUPT;
    }
    *out = state;
    return KV_OK;
}
