/* tests/test_gguf.c - parsing of model files, good and bad.
 *
 * Responsible for: a whole tiny model, the real one, every cut, random damage, each refusal with
 * its name, and allocation failures.
 * Not responsible for: what the values mean (test_weights.c, test_tokenizer.c).
 */
#include "engine/model/gguf.h"

#include "store/base/bytes.h"
#include "tests/support_tiny_model.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

static enum kv_err parse(const uint8_t *file, size_t size, struct gguf **gguf_out,
                         struct kv_diag *diag) {
    kv_diag_clear(diag);
    return gguf_parse(file, size, kv_alloc_system(), gguf_out, diag);
}

static uint8_t *tiny(size_t *size_out) {
    struct tiny_model_options options = tiny_model_default();
    options.ffn = 64;
    uint8_t *file = tiny_model_make(&options, size_out);
    assert_non_null(file);
    return file;
}

/* The place behind the first occurrence of `text` in the file. */
static uint8_t *behind(uint8_t *file, size_t size, const char *text) {
    uint8_t *at = memmem(file, size, text, strlen(text));
    assert_non_null(at);
    return at + strlen(text);
}

static void expect(const uint8_t *file, size_t size, enum kv_err wanted, const char *part) {
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    assert_int_equal(parse(file, size, &gguf, &diag), wanted);
    assert_null(gguf);
    if (strstr(diag.text, part) == NULL)
        fail_msg("\"%s\" does not name \"%s\"", diag.text, part);
    assert_null(strchr(diag.text, '\n'));
}

static void a_whole_file_parses(void **state) {
    (void)state;
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    struct gguf_text text;
    struct gguf_view view;
    uint32_t value;
    float number;
    int flag = 7;
    size_t size;
    uint8_t *file = tiny(&size);
    assert_int_equal(parse(file, size, &gguf, &diag), KV_OK);
    assert_int_equal(gguf_tensor_count(gguf), 2 + 2 * 9);
    assert_int_equal(gguf_u32(gguf, "llama.block_count", &value, &diag), KV_OK);
    assert_int_equal(value, 2);
    assert_int_equal(gguf_f32(gguf, "llama.rope.freq_base", &number, &diag), KV_OK);
    assert_true(number == 10000.0f);
    assert_int_equal(gguf_bool(gguf, "tokenizer.ggml.add_bos_token", &flag, &diag), KV_OK);
    assert_int_equal(flag, 0);
    assert_int_equal(gguf_string(gguf, "general.architecture", &text, &diag), KV_OK);
    assert_true(gguf_text_equal(text, "llama"));
    assert_int_equal(gguf_array(gguf, "tokenizer.ggml.tokens", GGUF_KIND_STRING, &view, &diag),
                     KV_OK);
    assert_true(gguf_text_equal(gguf_next_string(&view), "<|endoftext|>"));
    assert_true(gguf_text_equal(gguf_next_string(&view), "<|im_start|>"));
    assert_int_equal(gguf_array(gguf, "tokenizer.ggml.token_type", GGUF_KIND_U32, &view, &diag),
                     KV_OK);
    assert_int_equal(gguf_next_u32(&view), 3);
    const struct gguf_tensor *tensor = gguf_tensor(gguf, "blk.1.ffn_down.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->type, GGUF_TYPE_Q4_1);
    assert_int_equal(tensor->dims[0], 64);
    assert_int_equal(tensor->dims[1], 256);
    assert_int_equal(tensor->size_bytes, 64 * 256 / 32 * 20);
    assert_true((const uint8_t *)tensor->data + tensor->size_bytes == file + size);
    assert_null(gguf_tensor(gguf, "blk.2.ffn_down.weight"));
    gguf_drop(gguf);
    tiny_model_drop(file);
}

static void accessors_refuse_by_name(void **state) {
    (void)state;
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    struct gguf_text text;
    struct gguf_view view;
    uint32_t value = 5;
    float number = 5.0f;
    int flag = 5;
    size_t size;
    uint8_t *file = tiny(&size);
    assert_int_equal(parse(file, size, &gguf, &diag), KV_OK);
    assert_int_equal(gguf_u32(gguf, "llama.nothing", &value, &diag), KV_ERR_NOT_FOUND);
    assert_non_null(strstr(diag.text, "llama.nothing"));
    assert_int_equal(gguf_u32(gguf, "general.type", &value, &diag), KV_ERR_MISMATCH);
    assert_non_null(strstr(diag.text, "general.type"));
    assert_int_equal(gguf_f32(gguf, "llama.block_count", &number, &diag), KV_ERR_MISMATCH);
    assert_int_equal(gguf_bool(gguf, "llama.block_count", &flag, &diag), KV_ERR_MISMATCH);
    assert_int_equal(gguf_string(gguf, "llama.block_count", &text, &diag), KV_ERR_MISMATCH);
    assert_int_equal(gguf_array(gguf, "tokenizer.ggml.tokens", GGUF_KIND_I32, &view, &diag),
                     KV_ERR_MISMATCH);
    assert_int_equal(gguf_array(gguf, "general.type", GGUF_KIND_STRING, &view, &diag),
                     KV_ERR_MISMATCH);
    assert_true(value == 5 && number == 5.0f && flag == 5);
    gguf_drop(gguf);
    tiny_model_drop(file);
}

static void u64_counts_are_taken(void **state) {
    (void)state;
    /* One key and no tensor: "k" as u64 3, then as u64 2^32, then as i32 -1. */
    _Alignas(64) uint8_t file[24 + 8 + 1 + 4 + 8] = "GGUF";
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    uint32_t value = 0;
    kv_put_u32(file + 4, 3);
    kv_put_u64(file + 8, 0);
    kv_put_u64(file + 16, 1);
    kv_put_u64(file + 24, 1);
    file[32] = 'k';
    kv_put_u32(file + 33, GGUF_KIND_U64);
    kv_put_u64(file + 37, 3);
    assert_int_equal(parse(file, sizeof file, &gguf, &diag), KV_OK);
    assert_int_equal(gguf_u32(gguf, "k", &value, &diag), KV_OK);
    assert_int_equal(value, 3);
    kv_put_u64(file + 37, (uint64_t)1 << 32);
    assert_int_equal(gguf_u32(gguf, "k", &value, &diag), KV_ERR_MISMATCH);
    gguf_drop(gguf);
    kv_put_u32(file + 33, GGUF_KIND_I32);
    kv_put_u32(file + 37, (uint32_t)-1);
    assert_int_equal(parse(file, sizeof file, &gguf, &diag), KV_OK);
    assert_int_equal(gguf_u32(gguf, "k", &value, &diag), KV_ERR_MISMATCH);
    gguf_drop(gguf);
}

static void every_cut_is_refused(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    size_t head = (size_t)(behind(file, size, "blk.1.ffn_down.weight") - file) + 64;
    for (size_t cut = 0; cut < size; cut += cut < head ? 1 : 4093) {
        struct gguf *gguf = NULL;
        struct kv_diag diag;
        /* A copy of exactly that size, so that ASan sees a read behind the end. */
        uint8_t *part = kv_alloc_aligned(kv_alloc_system(), cut == 0 ? 1 : cut, 64);
        assert_non_null(part);
        memcpy(part, file, cut);
        enum kv_err err = parse(part, cut, &gguf, &diag);
        if (err != (cut < 24 ? KV_ERR_INVALID : KV_ERR_CORRUPT) || diag.text[0] == 0)
            fail_msg("cut at %zu gives %s: %s", cut, kv_err_name(err), diag.text);
        kv_alloc_release(kv_alloc_system(), part);
    }
    tiny_model_drop(file);
}

static void bad_headers_are_named(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    file[0] = 'X';
    expect(file, size, KV_ERR_INVALID, "not a GGUF model file");
    file[0] = 'G';
    kv_put_u32(file + 4, 4);
    expect(file, size, KV_ERR_VERSION, "version 4");
    kv_put_u32(file + 4, 1);
    expect(file, size, KV_ERR_VERSION, "version 1");
    kv_put_u32(file + 4, 3);
    const uint64_t counts[] = {65537, (uint64_t)1 << 32, UINT64_MAX, (uint64_t)1 << 63};
    for (size_t i = 0; i < 4; i++) {
        uint64_t tensors = kv_get_u64(file + 8), keys = kv_get_u64(file + 16);
        kv_put_u64(file + 8, counts[i]);
        expect(file, size, KV_ERR_LIMIT, "tensors");
        kv_put_u64(file + 8, tensors);
        kv_put_u64(file + 16, counts[i]);
        expect(file, size, KV_ERR_LIMIT, "keys");
        kv_put_u64(file + 16, keys);
    }
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    kv_put_u32(file + 4, 2);
    assert_int_equal(parse(file, size, &gguf, &diag), KV_OK);
    gguf_drop(gguf);
    tiny_model_drop(file);
}

static void bad_keys_are_named(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    uint8_t *kind = behind(file, size, "llama.block_count");
    kv_put_u32(kind, 13);
    expect(file, size, KV_ERR_CORRUPT, "llama.block_count has value type 13");
    kv_put_u32(kind, GGUF_KIND_U32);
    uint8_t *array = behind(file, size, "tokenizer.ggml.tokens") + 4;
    kv_put_u32(array, 99);
    expect(file, size, KV_ERR_CORRUPT, "tokenizer.ggml.tokens");
    kv_put_u32(array, GGUF_KIND_STRING);
    const uint64_t lengths[] = {UINT64_MAX, (uint64_t)1 << 61, (uint64_t)1 << 32};
    uint64_t count = kv_get_u64(array + 4);
    for (size_t i = 0; i < 3; i++) {
        kv_put_u64(array + 4, lengths[i]);
        expect(file, size, KV_ERR_CORRUPT, "tokenizer.ggml.tokens");
        kv_put_u64(array + 4, count);
        uint8_t *text = behind(file, size, "general.name") + 4;
        uint64_t length = kv_get_u64(text);
        kv_put_u64(text, lengths[i]);
        expect(file, size, KV_ERR_CORRUPT, "general.name");
        kv_put_u64(text, length);
    }
    /* general.type becomes general.name: twice the same. */
    memcpy(behind(file, size, "general.t") - 1, "name", 4);
    expect(file, size, KV_ERR_CORRUPT, "general.name stands there twice");
    tiny_model_drop(file);
}

/* BREAK_TENSOR_OVERLAP lets two tensors share bytes. */
static void bad_tensors_are_named(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    uint8_t *at = behind(file, size, "blk.0.attn_q.weight");
    uint8_t saved[4 + 16 + 4 + 8];
    memcpy(saved, at, sizeof saved);
    const uint32_t types[] = {12, 14, 6, 4, 31, UINT32_MAX};
    const char *const names[] = {"Q4_K", "Q6_K", "Q5_0", "Q4_2", "unknown", "unknown"};
    for (size_t i = 0; i < 6; i++) {
        char line[128];
        kv_put_u32(at + 20, types[i]);
        snprintf(line, sizeof line,
                 "tensor blk.0.attn_q.weight has type %s (%u), which is not supported; use F32, "
                 "F16, BF16, Q8_0, Q4_0 or Q4_1",
                 names[i], types[i]);
        expect(file, size, KV_ERR_MISMATCH, line);
        memcpy(at, saved, sizeof saved);
    }
    const uint64_t dims[] = {0, 255, UINT64_MAX, (uint64_t)1 << 62, (uint64_t)1 << 40};
    for (size_t i = 0; i < 5; i++) {
        kv_put_u64(at + 4, dims[i]);
        expect(file, size, KV_ERR_CORRUPT, "blk.0.attn_q.weight");
        memcpy(at, saved, sizeof saved);
    }
    const uint32_t n_dims[] = {0, 5, UINT32_MAX};
    for (size_t i = 0; i < 3; i++) {
        kv_put_u32(at, n_dims[i]);
        expect(file, size, KV_ERR_CORRUPT, "blk.0.attn_q.weight");
        memcpy(at, saved, sizeof saved);
    }
    const uint64_t offsets[] = {1, UINT64_MAX - 31, (uint64_t)1 << 62, kv_round_up(size, 32)};
    const char *const parts[] = {"not aligned", "beyond", "beyond", "beyond"};
    for (size_t i = 0; i < 4; i++) {
        kv_put_u64(at + 24, offsets[i]);
        expect(file, size, KV_ERR_CORRUPT, "blk.0.attn_q.weight");
        expect(file, size, KV_ERR_CORRUPT, parts[i]);
        memcpy(at, saved, sizeof saved);
    }
    kv_put_u64(at + 24, kv_get_u64(at + 24) + 32);
    expect(file, size, KV_ERR_CORRUPT, "overlap");
    memcpy(at, saved, sizeof saved);
    memcpy(at - strlen("q.weight"), "k", 1);
    expect(file, size, KV_ERR_CORRUPT, "blk.0.attn_k.weight stands there twice");
    tiny_model_drop(file);
}

static void random_damage_never_crashes(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    uint8_t *work = kv_alloc_aligned(kv_alloc_system(), size, 64);
    struct testing_random random;
    size_t head = (size_t)(behind(file, size, "blk.1.ffn_down.weight") - file) + 64;
    uint32_t refused = 0;
    assert_non_null(work);
    testing_random_init(&random, testing_seed("damage", 20261129));
    for (int round = 0; round < 2000; round++) {
        struct gguf *gguf = NULL;
        struct kv_diag diag;
        size_t kept = size;
        memcpy(work, file, size);
        if (round % 4 == 0)
            kept = (size_t)testing_random_below(&random, size);
        for (uint64_t flips = 1 + testing_random_below(&random, 4); flips != 0; flips--) {
            size_t at = (size_t)testing_random_below(&random, head);
            if (testing_random_below(&random, 2) == 0)
                work[at] = (uint8_t)testing_random_u64(&random);
            else
                work[at] ^= (uint8_t)(1u << testing_random_below(&random, 8));
        }
        enum kv_err err = parse(work, kept, &gguf, &diag);
        if (err == KV_OK) {
            gguf_tensors_digest(gguf);
            gguf_drop(gguf);
        } else {
            assert_string_not_equal(diag.text, "");
            refused++;
        }
    }
    printf("%u of 2000 damaged files refused\n", refused);
    assert_true(refused > 500);
    kv_alloc_release(kv_alloc_system(), work);
    tiny_model_drop(file);
}

static void allocation_failures_leave_nothing(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    for (uint64_t k = 1;; k++) {
        struct testing_alloc testing;
        struct gguf *gguf = NULL;
        struct kv_diag diag;
        testing_alloc_init(&testing, k);
        enum kv_err err = gguf_parse(file, size, &testing.alloc, &gguf, &diag);
        assert_int_equal(err, testing.failed_count != 0 ? KV_ERR_NOMEM : KV_OK);
        gguf_drop(gguf);
        assert_int_equal(testing.live_count, 0);
        if (testing.failed_count == 0) {
            assert_true(k > 5);
            break;
        }
    }
    tiny_model_drop(file);
}

static struct kv_digest digest_of(const uint8_t *file, size_t size) {
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    assert_int_equal(parse(file, size, &gguf, &diag), KV_OK);
    struct kv_digest digest = gguf_tensors_digest(gguf);
    gguf_drop(gguf);
    return digest;
}

static void the_digest_sees_one_byte(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = tiny(&size);
    struct kv_digest before = digest_of(file, size), after;
    file[size - 1] ^= 1;
    after = digest_of(file, size);
    assert_memory_not_equal(&before, &after, sizeof before);
    file[size - 1] ^= 1;
    after = digest_of(file, size);
    assert_memory_equal(&before, &after, sizeof before);
    /* A key is not a tensor byte: the identity of the weights stays. */
    *behind(file, size, "tiny random mode") = 'L';
    after = digest_of(file, size);
    assert_memory_equal(&before, &after, sizeof before);
    tiny_model_drop(file);
}

static void the_real_model_parses(void **state) {
    (void)state;
    testing_need_model();
    struct gguf *gguf = NULL;
    struct kv_diag diag;
    size_t size;
    uint8_t *file = tiny_model_read_real(&size);
    assert_non_null(file);
    assert_int_equal(parse(file, size, &gguf, &diag), KV_OK);
    assert_int_equal(gguf_tensor_count(gguf), 272);
    assert_int_equal(gguf_tensor(gguf, "token_embd.weight")->type, GGUF_TYPE_Q8_0);
    assert_int_equal(gguf_tensor(gguf, "token_embd.weight")->dims[1], 49152);
    gguf_drop(gguf);
    tiny_model_drop(file);
}

TESTING_MAIN(cmocka_unit_test(a_whole_file_parses), cmocka_unit_test(accessors_refuse_by_name),
             cmocka_unit_test(u64_counts_are_taken), cmocka_unit_test(every_cut_is_refused),
             cmocka_unit_test(bad_headers_are_named), cmocka_unit_test(bad_keys_are_named),
             cmocka_unit_test(bad_tensors_are_named), cmocka_unit_test(random_damage_never_crashes),
             cmocka_unit_test(allocation_failures_leave_nothing),
             cmocka_unit_test(the_digest_sees_one_byte), cmocka_unit_test(the_real_model_parses))
