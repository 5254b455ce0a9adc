/* store/base/bytes.h - little-endian bytes, checked sums, bounded reading and writing.
 *
 * Responsible for: the only way that a number reaches or leaves stored bytes, and arithmetic on
 * sizes that we did not choose.
 * Not responsible for: what the bytes mean.
 *
 * A reader or writer that runs past its end sets `failed` and goes on with zeros or without
 * writing; the caller checks once at the end.
 *
 * Threads: pure; a reader or writer has one owner.
 * Units: bytes.
 */
#ifndef STORE_BASE_BYTES_H
#define STORE_BASE_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 1 and the result on success, 0 (result untouched) on overflow. */
static inline int kv_add_u64(uint64_t a, uint64_t b, uint64_t *sum_out) {
    return !__builtin_add_overflow(a, b, sum_out);
}

static inline int kv_mul_u64(uint64_t a, uint64_t b, uint64_t *product_out) {
    return !__builtin_mul_overflow(a, b, product_out);
}

/* Next multiple of `unit` (a power of two); the caller has bounded `value`. */
static inline uint64_t kv_round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) & ~(unit - 1);
}

static inline uint16_t kv_get_u16(const uint8_t *at) {
    return (uint16_t)(at[0] | (unsigned)at[1] << 8);
}

static inline uint32_t kv_get_u32(const uint8_t *at) {
    return (uint32_t)kv_get_u16(at) | (uint32_t)kv_get_u16(at + 2) << 16;
}

static inline uint64_t kv_get_u64(const uint8_t *at) {
    return (uint64_t)kv_get_u32(at) | (uint64_t)kv_get_u32(at + 4) << 32;
}

static inline void kv_put_u16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

static inline void kv_put_u32(uint8_t *at, uint32_t value) {
    kv_put_u16(at, (uint16_t)value);
    kv_put_u16(at + 2, (uint16_t)(value >> 16));
}

static inline void kv_put_u64(uint8_t *at, uint64_t value) {
    kv_put_u32(at, (uint32_t)value);
    kv_put_u32(at + 4, (uint32_t)(value >> 32));
}

/* Big-endian, for index keys whose byte order must be numeric order. */
static inline void kv_put_u64_be(uint8_t *at, uint64_t value) {
    for (int i = 0; i < 8; i++)
        at[i] = (uint8_t)(value >> (56 - 8 * i));
}

static inline uint64_t kv_get_u64_be(const uint8_t *at) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | at[i];
    return value;
}

struct kv_reader {
    const uint8_t *bytes;
    size_t size_bytes;
    size_t off;
    int failed;
};

struct kv_writer {
    uint8_t *bytes;
    size_t capacity_bytes;
    size_t off; /* bytes written, or that would have been written had there been room */
    int failed;
};

void kv_reader_init(struct kv_reader *reader, const void *bytes, size_t size_bytes);
uint8_t kv_read_u8(struct kv_reader *reader);
uint32_t kv_read_u32(struct kv_reader *reader);
uint64_t kv_read_u64(struct kv_reader *reader);
float kv_read_f32(struct kv_reader *reader);
/* A pointer into the reader's bytes, or NULL (and failed) when fewer than `count` are left. */
const uint8_t *kv_read_bytes(struct kv_reader *reader, size_t count);
size_t kv_reader_left(const struct kv_reader *reader);

/* A writer with NULL bytes and capacity 0 only counts: `off` is the size needed. */
void kv_writer_init(struct kv_writer *writer, void *bytes, size_t capacity_bytes);
void kv_write_u8(struct kv_writer *writer, uint8_t value);
void kv_write_u32(struct kv_writer *writer, uint32_t value);
void kv_write_u64(struct kv_writer *writer, uint64_t value);
void kv_write_f32(struct kv_writer *writer, float value);
void kv_write_bytes(struct kv_writer *writer, const void *bytes, size_t count);

#endif
