/* tests/test_fmt.c - the store's records, encoded, decoded, cut short and damaged.
 *
 * Responsible for: round trips, every shorter length and every flipped byte being refused, bounds.
 * Not responsible for: files.
 * Broken twins: BREAK_ENTRY_CHECK.
 */
#include "store/fmt.h"

#include "tests/testing.h"

#include <stdlib.h>
#include <string.h>

static struct store_extent sample_extent(uint64_t id) {
    struct store_extent extent = {.id = id,
                                  .kind = 7,
                                  .codec = 1,
                                  .segment = 3,
                                  .off = 5 * STORE_PAGE_BYTES,
                                  .raw_bytes = 1000000,
                                  .stored_bytes = 65536 + id};
    for (size_t i = 0; i < KV_DIGEST_BYTES; i++)
        extent.digest.bytes[i] = (uint8_t)(id * 31 + i);
    return extent;
}

/* key then entry; returns the total length. */
static size_t sample_entry(uint8_t *out, const char *key, const char *value, uint64_t id,
                           uint32_t extents) {
    uint8_t bytes[8 * FMT_EXTENT_BYTES];
    for (uint32_t i = 0; i < extents; i++) {
        struct store_extent extent = sample_extent(id + i);
        fmt_extent_encode(&extent, bytes + i * FMT_EXTENT_BYTES);
    }
    struct fmt_entry entry = {.value = (const uint8_t *)value,
                              .value_bytes = (uint32_t)strlen(value),
                              .extent_count = extents,
                              .extents = bytes};
    memcpy(out, key, strlen(key));
    fmt_entry_encode(out, strlen(key), &entry);
    return strlen(key) + fmt_entry_bytes(entry.value_bytes, extents);
}

static void text_round_trip(void **state) {
    (void)state;
    uint8_t id[FMT_ID_BYTES];
    uint8_t back[FMT_ID_BYTES] = {0};
    char text[FMT_TEXT_BYTES_MAX];
    for (size_t i = 0; i < sizeof id; i++)
        id[i] = (uint8_t)(i * 17 + 3);
    size_t bytes = fmt_text_encode(id, text);
    assert_int_equal(fmt_text_decode(text, bytes, back, NULL), KV_OK);
    assert_memory_equal(id, back, sizeof id);
    for (size_t cut = 0; cut < bytes; cut++)
        assert_int_equal(fmt_text_decode(text, cut, back, NULL), KV_ERR_CORRUPT);
    for (size_t i = 0; i < bytes; i++) {
        for (int bit = 0; bit < 8; bit++) {
            text[i] ^= (char)(1 << bit);
            enum kv_err err = fmt_text_decode(text, bytes, back, NULL);
            /* A changed version digit is a newer version, anything else is damage. */
            assert_true(err == KV_ERR_CORRUPT || (err == KV_ERR_VERSION && i == 24));
            text[i] ^= (char)(1 << bit);
        }
    }
}

static void newer_version_is_named(void **state) {
    (void)state;
    static const char text[] = "coldplane store\nversion 17\nsomething else entirely\n";
    uint8_t id[FMT_ID_BYTES];
    struct kv_diag diag = {""};
    assert_int_equal(fmt_text_decode(text, sizeof text - 1, id, &diag), KV_ERR_VERSION);
    assert_non_null(strstr(diag.text, "needs version 17"));
}

static void extent_bounds(void **state) {
    (void)state;
    uint8_t bytes[FMT_EXTENT_BYTES];
    struct store_extent good = sample_extent(9);
    struct store_extent out;
    fmt_extent_encode(&good, bytes);
    assert_int_equal(fmt_extent_decode(bytes, &out), KV_OK);
    assert_int_equal(out.id, 9);
    assert_int_equal(out.off, good.off);
    assert_int_equal(out.stored_bytes, good.stored_bytes);
    static const struct {
        size_t off;
        uint64_t value;
    } bad[] = {{0, 0},
               {16, 4095},
               {16, (uint64_t)1 << 40},
               {24, 0},
               {24, ((uint64_t)1 << 30) + 1},
               {24, UINT64_MAX},
               {32, 0},
               {32, 1000000},
               {32, UINT64_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t copy[FMT_EXTENT_BYTES];
        memcpy(copy, bytes, sizeof copy);
        kv_put_u64(copy + bad[i].off, bad[i].value);
        assert_int_equal(fmt_extent_decode(copy, &out), KV_ERR_CORRUPT);
    }
    bytes[8] = STORE_KINDS_MAX;
    assert_int_equal(fmt_extent_decode(bytes, &out), KV_ERR_CORRUPT);
    bytes[8] = 0;
    bytes[9] = 3;
    assert_int_equal(fmt_extent_decode(bytes, &out), KV_ERR_CORRUPT);
}

/* Fails with BREAK_ENTRY_CHECK. */
static void entry_round_trip(void **state) {
    (void)state;
    uint8_t bytes[2048];
    struct fmt_entry entry;
    size_t total = sample_entry(bytes, "key", "a value", 100, 3);
    assert_int_equal(fmt_entry_decode(bytes, 3, total, &entry), KV_OK);
    assert_int_equal(entry.value_bytes, 7);
    assert_memory_equal(entry.value, "a value", 7);
    assert_int_equal(entry.extent_count, 3);
    assert_int_equal(fmt_entry_extent(&entry, 2).id, 102);
    assert_int_equal(fmt_entry_live_bytes(&entry), 3 * 17 * STORE_PAGE_BYTES);
    for (size_t cut = 0; cut < total; cut++)
        assert_int_equal(fmt_entry_decode(bytes, 3, cut, &entry), KV_ERR_CORRUPT);
    assert_int_equal(fmt_entry_decode(bytes, 3, total + 1, &entry), KV_ERR_CORRUPT);
    for (size_t i = 0; i < total; i++) {
        bytes[i] ^= 0x10;
        assert_int_equal(fmt_entry_decode(bytes, 3, total, &entry), KV_ERR_CORRUPT);
        bytes[i] ^= 0x10;
    }
    assert_int_equal(fmt_entry_decode(bytes, 3, total, &entry), KV_OK);
}

/* A record with a put, a delete and a put without extents. */
static size_t sample_batch(uint8_t *record, struct fmt_batch *batch) {
    size_t off = FMT_BATCH_HEAD_BYTES;
    uint8_t entry[2048];
    size_t total = sample_entry(entry, "alpha", "one", 40, 2);
    fmt_op_encode_head(record + off, FMT_OP_PUT, 5, total - 5);
    memcpy(record + off + FMT_OP_HEAD_BYTES, entry, total);
    off += FMT_OP_HEAD_BYTES + total;
    fmt_op_encode_head(record + off, FMT_OP_DELETE, 4, 0);
    memcpy(record + off + FMT_OP_HEAD_BYTES, "beta", 4);
    off += FMT_OP_HEAD_BYTES + 4;
    total = sample_entry(entry, "gamma", "", 0, 0);
    fmt_op_encode_head(record + off, FMT_OP_PUT, 5, total - 5);
    memcpy(record + off + FMT_OP_HEAD_BYTES, entry, total);
    off += FMT_OP_HEAD_BYTES + total;
    *batch = (struct fmt_batch){.epoch = 4,
                                .sequence = 12,
                                .at = {2, 8 * STORE_PAGE_BYTES},
                                .begin = {2, STORE_PAGE_BYTES},
                                .op_count = 3,
                                .record_bytes = off + KV_DIGEST_BYTES,
                                .extent_id_first = 40,
                                .extent_id_count = 2};
    memset(batch->store_id, 0x3c, FMT_ID_BYTES);
    fmt_batch_encode(record, batch);
    return (size_t)batch->record_bytes;
}

static void batch_round_trip(void **state) {
    (void)state;
    uint8_t record[8192];
    struct fmt_batch batch;
    struct fmt_batch back;
    struct kv_digest digest;
    size_t total = sample_batch(record, &batch);
    assert_int_equal(fmt_batch_decode(record, total, &back, &digest), KV_OK);
    assert_int_equal(back.sequence, 12);
    assert_int_equal(back.at.off, batch.at.off);
    assert_int_equal(back.record_bytes, total);
    struct kv_reader reader;
    struct fmt_op op;
    kv_reader_init(&reader, record + FMT_BATCH_HEAD_BYTES,
                   total - FMT_BATCH_HEAD_BYTES - KV_DIGEST_BYTES);
    assert_int_equal(fmt_op_decode(&reader, &op), KV_OK);
    assert_int_equal(op.type, FMT_OP_PUT);
    assert_int_equal(op.entry.extent_count, 2);
    assert_int_equal(fmt_op_decode(&reader, &op), KV_OK);
    assert_int_equal(op.type, FMT_OP_DELETE);
    assert_memory_equal(op.key, "beta", 4);
    assert_int_equal(fmt_op_decode(&reader, &op), KV_OK);
    assert_int_equal(kv_reader_left(&reader), 0);
    for (size_t cut = 0; cut < total; cut++) {
        uint8_t *exact = malloc(cut == 0 ? 1 : cut); /* so that ASan sees a read past the end */
        assert_non_null(exact);
        memcpy(exact, record, cut);
        assert_int_equal(fmt_batch_decode(exact, cut, &back, &digest), KV_ERR_CORRUPT);
        free(exact);
    }
    for (size_t i = 0; i < total; i++) {
        record[i] ^= 0x01;
        assert_int_equal(fmt_batch_decode(record, total, &back, &digest), KV_ERR_CORRUPT);
        record[i] ^= 0x81;
        assert_int_equal(fmt_batch_decode(record, total, &back, &digest), KV_ERR_CORRUPT);
        record[i] ^= 0x80;
    }
    assert_int_equal(fmt_batch_decode(record, total, &back, &digest), KV_OK);
}

/* Correct checks around wrong content: the structure itself must be refused. */
static void batch_structure_is_checked(void **state) {
    (void)state;
    uint8_t record[8192];
    struct fmt_batch batch;
    struct fmt_batch back;
    struct kv_digest digest;
    sample_batch(record, &batch);
    batch.extent_id_count = 1; /* the second extent's id is now from the future */
    fmt_batch_encode(record, &batch);
    assert_int_equal(fmt_batch_decode(record, sizeof record, &back, &digest), KV_ERR_CORRUPT);
    batch.extent_id_count = 2;
    batch.op_count = 2;
    fmt_batch_encode(record, &batch);
    assert_int_equal(fmt_batch_decode(record, sizeof record, &back, &digest), KV_ERR_CORRUPT);
    batch.op_count = 4;
    fmt_batch_encode(record, &batch);
    assert_int_equal(fmt_batch_decode(record, sizeof record, &back, &digest), KV_ERR_CORRUPT);
    batch.op_count = 3;
    fmt_batch_encode(record, &batch);
    assert_int_equal(fmt_batch_decode(record, sizeof record, &back, &digest), KV_OK);
    static const struct {
        size_t off;
        uint64_t value;
    } bad[] = {
        {40, 0}, {56, 100},        {64, 100}, {64, UINT64_MAX}, {64, FMT_BATCH_BYTES_MAX + 1},
        {72, 0}, {80, UINT64_MAX}, {96, 4097}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t copy[8192];
        memcpy(copy, record, sizeof copy);
        kv_put_u64(copy + bad[i].off, bad[i].value);
        kv_put_u64(copy + 120, kv_digest_short(copy, 120));
        assert_int_equal(fmt_batch_decode_head(copy, sizeof copy, &back), KV_ERR_CORRUPT);
    }
    kv_put_u32(record + 8, STORE_FORMAT_VERSION + 1);
    kv_put_u64(record + 120, kv_digest_short(record, 120));
    assert_int_equal(fmt_batch_decode_head(record, sizeof record, &back), KV_ERR_VERSION);
}

static void state_round_trip(void **state) {
    (void)state;
    uint8_t bytes[FMT_STATE_BYTES];
    struct fmt_state back;
    struct fmt_state good = {.epoch = 3,
                             .sequence = 99,
                             .tail = {4, 12 * STORE_PAGE_BYTES},
                             .extent_id_next = 1000,
                             .record_count = 7,
                             .live_bytes = 4096 * 30};
    memset(good.last.bytes, 0x42, KV_DIGEST_BYTES);
    fmt_state_encode(&good, bytes);
    assert_int_equal(fmt_state_decode(bytes, sizeof bytes, &back), KV_OK);
    assert_int_equal(back.sequence, 99);
    assert_int_equal(back.tail.segment, 4);
    assert_int_equal(back.tail.off, good.tail.off);
    assert_int_equal(back.live_bytes, good.live_bytes);
    for (size_t cut = 0; cut < sizeof bytes; cut++)
        assert_int_equal(fmt_state_decode(bytes, cut, &back), KV_ERR_CORRUPT);
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] ^= 0x04;
        assert_int_equal(fmt_state_decode(bytes, sizeof bytes, &back), KV_ERR_CORRUPT);
        bytes[i] ^= 0x04;
    }
}

/* Random bytes with a valid check must never be read past their end or accepted with bad counts. */
static void random_entries_do_no_harm(void **state) {
    (void)state;
    struct testing_random random;
    testing_random_init(&random, testing_seed("entries", 20240511));
    for (int round = 0; round < 20000; round++) {
        size_t total = 20 + (size_t)testing_random_below(&random, 300);
        uint8_t *bytes = malloc(total);
        struct fmt_entry entry;
        assert_non_null(bytes);
        testing_random_bytes(&random, bytes, total);
        size_t key_bytes = 1 + (size_t)testing_random_below(&random, 4);
        kv_put_u32(bytes + key_bytes, (uint32_t)testing_random_below(&random, 64));
        kv_put_u16(bytes + key_bytes + 4, (uint16_t)testing_random_below(&random, 4));
        kv_put_u16(bytes + key_bytes + 6, 0);
        kv_put_u64(bytes + total - 8, kv_digest_short(bytes, total - 8));
        if (fmt_entry_decode(bytes, key_bytes, total, &entry) == KV_OK) {
            assert_int_equal(entry.extent_count, 0);
            assert_int_equal(total, key_bytes + 16 + entry.value_bytes);
        }
        free(bytes);
    }
}

TESTING_MAIN(cmocka_unit_test(text_round_trip), cmocka_unit_test(newer_version_is_named),
             cmocka_unit_test(extent_bounds), cmocka_unit_test(entry_round_trip),
             cmocka_unit_test(batch_round_trip), cmocka_unit_test(batch_structure_is_checked),
             cmocka_unit_test(state_round_trip), cmocka_unit_test(random_entries_do_no_harm))
