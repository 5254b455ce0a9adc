/* store/base/bytes.c - bounded cursors over stored bytes.
 *
 * Responsible for: never reading or writing past the end, whatever the lengths inside say.
 * Not responsible for: what the fields mean.
 */
#include "store/base/bytes.h"

void kv_reader_init(struct kv_reader *reader, const void *bytes, size_t size_bytes) {
    *reader = (struct kv_reader){.bytes = bytes, .size_bytes = size_bytes, .off = 0, .failed = 0};
}

size_t kv_reader_left(const struct kv_reader *reader) {
    return reader->size_bytes - reader->off;
}

const uint8_t *kv_read_bytes(struct kv_reader *reader, size_t count) {
    if (reader->failed || count > kv_reader_left(reader)) {
        reader->failed = 1;
        return NULL;
    }
    const uint8_t *at = reader->bytes + reader->off;
    reader->off += count;
    return at;
}

uint8_t kv_read_u8(struct kv_reader *reader) {
    const uint8_t *at = kv_read_bytes(reader, 1);
    return at == NULL ? 0 : at[0];
}

uint32_t kv_read_u32(struct kv_reader *reader) {
    const uint8_t *at = kv_read_bytes(reader, 4);
    return at == NULL ? 0 : kv_get_u32(at);
}

uint64_t kv_read_u64(struct kv_reader *reader) {
    const uint8_t *at = kv_read_bytes(reader, 8);
    return at == NULL ? 0 : kv_get_u64(at);
}

float kv_read_f32(struct kv_reader *reader) {
    uint32_t bits = kv_read_u32(reader);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void kv_writer_init(struct kv_writer *writer, void *bytes, size_t capacity_bytes) {
    *writer =
        (struct kv_writer){.bytes = bytes, .capacity_bytes = capacity_bytes, .off = 0, .failed = 0};
}

void kv_write_bytes(struct kv_writer *writer, const void *bytes, size_t count) {
    size_t room = writer->off <= writer->capacity_bytes ? writer->capacity_bytes - writer->off : 0;
    if (count > room) {
        if (writer->bytes != NULL)
            writer->failed = 1;
    } else if (count != 0) {
        memcpy(writer->bytes + writer->off, bytes, count);
    }
    writer->off += count;
}

void kv_write_u8(struct kv_writer *writer, uint8_t value) {
    kv_write_bytes(writer, &value, 1);
}

void kv_write_u32(struct kv_writer *writer, uint32_t value) {
    uint8_t bytes[4];
    kv_put_u32(bytes, value);
    kv_write_bytes(writer, bytes, sizeof bytes);
}

void kv_write_u64(struct kv_writer *writer, uint64_t value) {
    uint8_t bytes[8];
    kv_put_u64(bytes, value);
    kv_write_bytes(writer, bytes, sizeof bytes);
}

void kv_write_f32(struct kv_writer *writer, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    kv_write_u32(writer, bits);
}
