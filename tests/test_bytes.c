/* tests/test_bytes.c - little-endian access, checked sums, bounded cursors.
 *
 * Responsible for: byte order against literal bytes, overflow at its edge, every truncation of a
 * record, writers that count, cut and never pass their end.
 * Not responsible for: any record's meaning.
 */
#include "store/base/bytes.h"

#include "tests/testing.h"

static void put_and_get_use_the_stated_order(void **state) {
    (void)state;
    static const uint8_t little[] = {0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x81};
    static const uint8_t big[] = {0x81, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08};
    uint8_t bytes[8];
    kv_put_u64(bytes, 0x8102030405060708u);
    assert_memory_equal(bytes, little, 8);
    assert_true(kv_get_u64(little) == 0x8102030405060708u);
    kv_put_u32(bytes, 0x85060708u);
    assert_memory_equal(bytes, "\x08\x07\x06\x85", 4);
    assert_true(kv_get_u32(bytes) == 0x85060708u);
    kv_put_u16(bytes, 0x8708);
    assert_memory_equal(bytes, "\x08\x87", 2);
    assert_int_equal(kv_get_u16(bytes), 0x8708);
    kv_put_u64_be(bytes, 0x8102030405060708u);
    assert_memory_equal(bytes, big, 8);
    assert_true(kv_get_u64_be(big) == 0x8102030405060708u);
}

static void big_endian_keys_sort_as_numbers(void **state) {
    (void)state;
    struct testing_random random;
    testing_random_init(&random, testing_seed("keys", 11));
    for (int i = 0; i < 1000; i++) {
        uint64_t a = testing_random_u64(&random) >> testing_random_below(&random, 64);
        uint64_t b = testing_random_u64(&random) >> testing_random_below(&random, 64);
        uint8_t key_a[8], key_b[8];
        kv_put_u64_be(key_a, a);
        kv_put_u64_be(key_b, b);
        int order = memcmp(key_a, key_b, 8);
        assert_int_equal(order < 0, a < b);
        assert_int_equal(order == 0, a == b);
    }
}

static void sums_and_products_stop_at_the_edge(void **state) {
    (void)state;
    uint64_t result = 77;
    assert_true(kv_add_u64(UINT64_MAX - 5, 5, &result));
    assert_true(result == UINT64_MAX);
    assert_true(kv_mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &result));
    assert_true(result == 0xffffffff00000000u);
    assert_false(kv_add_u64(UINT64_MAX - 5, 6, &(uint64_t){0}));
    assert_false(kv_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &(uint64_t){0}));
    assert_true(kv_mul_u64(0, UINT64_MAX, &result));
    assert_true(result == 0);
}

static void round_up_goes_to_the_next_multiple(void **state) {
    (void)state;
    assert_true(kv_round_up(0, 4096) == 0);
    assert_true(kv_round_up(1, 4096) == 4096);
    assert_true(kv_round_up(4096, 4096) == 4096);
    assert_true(kv_round_up(4097, 4096) == 8192);
    assert_true(kv_round_up(9, 1) == 9);
}

enum { RECORD_BYTES = 1 + 4 + 8 + 4 + 3 };

static void write_record(struct kv_writer *writer) {
    kv_write_u8(writer, 0x91);
    kv_write_u32(writer, 0x94959697u);
    kv_write_u64(writer, 0x98999a9b9c9d9e9fu);
    kv_write_f32(writer, -1.5f);
    kv_write_bytes(writer, "xyz", 3);
}

static void a_record_comes_back(void **state) {
    (void)state;
    static const uint8_t wanted[RECORD_BYTES] = {0x91, 0x97, 0x96, 0x95, 0x94, 0x9f, 0x9e,
                                                 0x9d, 0x9c, 0x9b, 0x9a, 0x99, 0x98, 0x00,
                                                 0x00, 0xc0, 0xbf, 'x',  'y',  'z'};
    uint8_t bytes[RECORD_BYTES];
    struct kv_writer writer;
    kv_writer_init(&writer, bytes, sizeof bytes);
    write_record(&writer);
    assert_false(writer.failed);
    assert_int_equal(writer.off, RECORD_BYTES);
    assert_memory_equal(bytes, wanted, RECORD_BYTES);

    struct kv_reader reader;
    kv_reader_init(&reader, bytes, sizeof bytes);
    assert_int_equal(kv_read_u8(&reader), 0x91);
    assert_true(kv_read_u32(&reader) == 0x94959697u);
    assert_true(kv_read_u64(&reader) == 0x98999a9b9c9d9e9fu);
    assert_true(kv_read_f32(&reader) == -1.5f);
    assert_int_equal(kv_reader_left(&reader), 3);
    const uint8_t *text = kv_read_bytes(&reader, 3);
    assert_ptr_equal(text, bytes + RECORD_BYTES - 3);
    assert_int_equal(kv_reader_left(&reader), 0);
    assert_false(reader.failed);
    assert_int_equal(kv_read_u8(&reader), 0);
    assert_true(reader.failed);
}

static void every_truncation_is_seen(void **state) {
    (void)state;
    uint8_t bytes[RECORD_BYTES];
    struct kv_writer writer;
    kv_writer_init(&writer, bytes, sizeof bytes);
    write_record(&writer);
    for (size_t size = 0; size < RECORD_BYTES; size++) {
        struct kv_reader reader;
        kv_reader_init(&reader, bytes, size);
        kv_read_u8(&reader);
        kv_read_u32(&reader);
        kv_read_u64(&reader);
        kv_read_f32(&reader);
        assert_null(kv_read_bytes(&reader, 3));
        assert_true(reader.failed);
    }
}

static void a_failed_reader_stays_failed(void **state) {
    (void)state;
    static const uint8_t bytes[4] = {1, 2, 3, 4};
    struct kv_reader reader;
    kv_reader_init(&reader, bytes, sizeof bytes);
    assert_null(kv_read_bytes(&reader, SIZE_MAX));
    assert_int_equal(kv_read_u8(&reader), 0);
    assert_true(kv_read_u32(&reader) == 0);
    assert_true(reader.failed);
}

static void a_short_writer_fails_and_keeps_its_end(void **state) {
    (void)state;
    for (size_t size = 0; size < RECORD_BYTES; size++) {
        uint8_t bytes[RECORD_BYTES + 8];
        struct kv_writer writer;
        memset(bytes, 'G', sizeof bytes);
        kv_writer_init(&writer, bytes, size);
        write_record(&writer);
        assert_true(writer.failed);
        assert_int_equal(writer.off, RECORD_BYTES);
        for (size_t i = size; i < sizeof bytes; i++)
            assert_int_equal(bytes[i], 'G');
    }
}

static void a_writer_without_bytes_counts(void **state) {
    (void)state;
    struct kv_writer writer;
    kv_writer_init(&writer, NULL, 0);
    write_record(&writer);
    assert_int_equal(writer.off, RECORD_BYTES);
    assert_false(writer.failed);
}

TESTING_MAIN(cmocka_unit_test(put_and_get_use_the_stated_order),
             cmocka_unit_test(big_endian_keys_sort_as_numbers),
             cmocka_unit_test(sums_and_products_stop_at_the_edge),
             cmocka_unit_test(round_up_goes_to_the_next_multiple),
             cmocka_unit_test(a_record_comes_back), cmocka_unit_test(every_truncation_is_seen),
             cmocka_unit_test(a_failed_reader_stays_failed),
             cmocka_unit_test(a_short_writer_fails_and_keeps_its_end),
             cmocka_unit_test(a_writer_without_bytes_counts))
