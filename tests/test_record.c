/* tests/test_record.c - keys, values and the block chain.
 *
 * Responsible for: engine/record.c: key order, round trips, cuts, versions, what the chain binds.
 * Not responsible for: when records are written (test_snapshot.c).
 */
#include "engine/record.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

static void keys_sort_by_number(void **state) {
    (void)state;
    struct record_key a = record_key_block(7, 255);
    struct record_key b = record_key_block(7, 256);
    struct record_key c = record_key_block(8, 0);
    struct record_key prefix = record_key_block_prefix(7);
    assert_int_equal(a.size, 13);
    assert_true(memcmp(a.bytes, b.bytes, a.size) < 0);
    assert_true(memcmp(b.bytes, c.bytes, b.size) < 0);
    assert_memory_equal(prefix.bytes, a.bytes, prefix.size);
    assert_memory_not_equal(prefix.bytes, c.bytes, prefix.size);
    assert_int_equal(record_key_snapshot(1).bytes[0], 's');
    assert_int_equal(record_key_page(1).bytes[0], 'p');
    assert_int_equal(record_key_lineage(1).bytes[0], 'l');
    struct record_key name = record_key_name("naïve");
    assert_int_equal(name.size, 1 + strlen("naïve"));
    assert_memory_equal(name.bytes, "nnaïve", name.size);
}

static struct record_snapshot example_snapshot(void) {
    struct record_snapshot record = {.lineage = 5,
                                     .parent = 6,
                                     .is_explicit = 1,
                                     .n = 1001,
                                     .n_kv = 1000,
                                     .created_ns = 9,
                                     .sinks_page = 10,
                                     .page_count = 3,
                                     .page_ids = {11, 12, 13}};
    snprintf(record.name, sizeof record.name, "日本");
    record.block_count = (uint32_t)layout_sealed_blocks(record.n_kv);
    record.root = kv_digest_of("root", 4);
    return record;
}

static void values_round_trip(void **state) {
    (void)state;
    uint8_t value[RECORD_OUT_BYTES];
    struct record_snapshot snapshot = example_snapshot(), snapshot_back;
    uint32_t size = record_put_snapshot(&snapshot, value);
    assert_int_equal(record_get_snapshot(value, size, &snapshot_back, NULL), KV_OK);
    assert_string_equal(snapshot_back.name, snapshot.name);
    assert_int_equal(snapshot_back.page_ids[2], 13);
    assert_int_equal(snapshot_back.is_explicit, 1);
    assert_int_equal(snapshot_back.asleep, 0);
    assert_memory_equal(snapshot_back.root.bytes, snapshot.root.bytes, KV_DIGEST_BYTES);

    struct record_name name = {.snapshot = 1, .lineage = 2, .updated_ns = 3}, name_back;
    size = record_put_name(&name, value);
    assert_int_equal(record_get_name(value, size, &name_back, NULL), KV_OK);
    assert_int_equal(name_back.snapshot, 1);
    assert_int_equal(name_back.lineage, 2);
    assert_int_equal(name_back.updated_ns, 3);
    assert_int_equal(name_back.pinned, 0);
    assert_int_equal(value[0], 1); /* as programs before version 2 can read it */
    name.may_expire = 1;
    size = record_put_name(&name, value);
    assert_int_equal(value[0], 2);
    assert_int_equal(record_get_name(value, size, &name_back, NULL), KV_OK);
    assert_int_equal(name_back.may_expire, 1);
    assert_int_equal(name_back.pinned, 0);

    struct record_block block = {.code_id = 1, .layout_id = 1, .first_position = 64 + 256};
    struct record_block block_back;
    size = record_put_block(&block, value);
    assert_int_equal(value[0], 1);
    assert_int_equal(record_get_block(value, size, &block_back, NULL), KV_OK);
    assert_int_equal(block_back.first_position, 320);
    assert_int_equal(record_dropped(&block_back), 0);
    assert_int_equal(block_back.keeps_k, 0);

    struct record_page page = {4, 320, 64, 2}, page_back;
    size = record_put_page(&page, value);
    assert_int_equal(record_get_page(value, size, &page_back, NULL), KV_OK);
    assert_int_equal(page_back.references, 2);

    struct record_lineage lineage = {0, 0, 3, "chat"}, lineage_back;
    size = record_put_lineage(&lineage, value);
    assert_int_equal(record_get_lineage(value, size, &lineage_back, NULL), KV_OK);
    assert_string_equal(lineage_back.name, "chat");
    assert_int_equal(lineage_back.snapshot_count, 3);
}

/* What version 1 cannot say is version 2, and only that: an older program reads what it can. */
static void versions_say_what_is_needed(void **state) {
    (void)state;
    struct record_snapshot snapshot = example_snapshot(), back;
    struct record_name name = {.snapshot = 1, .lineage = 2, .updated_ns = 3, .pinned = 1};
    struct record_name name_back;
    struct record_lineage lineage = {5, 2, 1, "chat"}, lineage_back;
    uint8_t value[RECORD_OUT_BYTES] = {0};
    record_put_snapshot(&snapshot, value);
    assert_int_equal(value[0], 1);
    snapshot.is_explicit = 1;
    memcpy(snapshot.tag, "draft", 6);
    uint32_t size = record_put_snapshot(&snapshot, value);
    assert_int_equal(value[0], 2);
    assert_int_equal(record_get_snapshot(value, size, &back, NULL), KV_OK);
    assert_string_equal(back.tag, "draft");
    snapshot.is_explicit = 0; /* a tag alone keeps nothing */
    size = record_put_snapshot(&snapshot, value);
    assert_int_equal(record_get_snapshot(value, size, &back, NULL), KV_ERR_CORRUPT);
    size = record_put_name(&name, value);
    assert_int_equal(value[0], 2);
    assert_int_equal(record_get_name(value, size, &name_back, NULL), KV_OK);
    assert_int_equal(name_back.pinned, 1);
    assert_int_equal(name_back.may_expire, 0);
    for (int pinned = 0; pinned < 2; pinned++) {
        name.pinned = pinned;
        name.owner[IMAGE_OWNER_BYTES - 1] = 7;
        size = record_put_name(&name, value);
        assert_int_equal(value[0], 3);
        assert_int_equal(record_get_name(value, size, &name_back, NULL), KV_OK);
        assert_int_equal(name_back.pinned, pinned);
        assert_memory_equal(name_back.owner, name.owner, IMAGE_OWNER_BYTES);
        value[size - 1] = 0; /* nobody's is version 1 or 2 */
        assert_int_equal(record_get_name(value, size, &name_back, NULL), KV_ERR_CORRUPT);
        assert_int_equal(record_get_name(value, size - 1, &name_back, NULL), KV_ERR_CORRUPT);
    }
    size = record_put_lineage(&lineage, value);
    assert_int_equal(value[0], 2);
    assert_int_equal(record_get_lineage(value, size, &lineage_back, NULL), KV_OK);
    assert_int_equal(lineage_back.parent, 5);
    assert_int_equal(lineage_back.cut, 2);
    lineage.cut = 0;
    size = record_put_lineage(&lineage, value);
    assert_int_equal(record_get_lineage(value, size, &lineage_back, NULL), KV_ERR_CORRUPT);
    const struct record_page page = {4, 320, 64, 2};
    struct record_page page_back;
    size = record_put_page(&page, value);
    value[0] = 2;
    assert_int_equal(record_get_page(value, size, &page_back, NULL), KV_ERR_CORRUPT);
    value[0] = 3; /* only names have one */
    assert_int_equal(record_get_page(value, size, &page_back, NULL), KV_ERR_VERSION);
}

/* Version 3 is of blocks of recipe v2 only; KL never leaves them. */
static void a_block_that_keeps_k_is_version_3(void **state) {
    (void)state;
    struct record_block block = {.code_id = 1, .layout_id = 1, .first_position = 64, .keeps_k = 1};
    struct record_block back;
    uint8_t value[RECORD_OUT_BYTES] = {0};
    uint32_t size = record_put_block(&block, value);
    assert_int_equal(value[0], 3);
    assert_int_equal(record_get_block(value, size, &back, NULL), KV_OK);
    assert_int_equal(back.keeps_k, 1);
    assert_int_equal(record_dropped(&back), 0);
    block.dropped_count = 2;
    block.dropped_kinds[0] = LAYOUT_VR2;
    block.dropped_kinds[1] = LAYOUT_VX;
    size = record_put_block(&block, value);
    assert_int_equal(record_get_block(value, size, &back, NULL), KV_OK);
    assert_int_equal(record_dropped(&back), 1u << LAYOUT_VR2 | 1u << LAYOUT_VX);
    for (uint32_t cut = 0; cut < size; cut++)
        assert_int_equal(record_get_block(value, cut, &back, NULL), KV_ERR_CORRUPT);
    block.dropped_kinds[0] = LAYOUT_KL;
    size = record_put_block(&block, value);
    assert_int_equal(record_get_block(value, size, &back, NULL), KV_ERR_CORRUPT);
    const struct record_page page = {4, 320, 64, 2};
    struct record_page page_back;
    size = record_put_page(&page, value);
    value[0] = 3;
    assert_int_equal(record_get_page(value, size, &page_back, NULL), KV_ERR_VERSION);
}

/* Lineage 9 is cut at block 7 from 8, that at 3 from 7, which has no parent. */
static enum kv_err three_lineages(void *context, uint64_t lineage, struct record_lineage *out,
                                  struct kv_diag *diag) {
    const uint64_t *cuts = context;
    (void)diag;
    *out =
        (struct record_lineage){.parent = lineage > 7 ? lineage - 1 : 0, .cut = cuts[lineage - 7]};
    return KV_OK;
}

static void paths_go_down(void **state) {
    (void)state;
    uint64_t cuts[] = {0, 3, 7};
    struct record_path path = {.next = 9, .first = 10};
    const uint64_t expected[][3] = {{9, 7, 10}, {8, 3, 7}, {7, 0, 3}};
    for (int i = 0; i < 3; i++) {
        assert_true(path.first > 0);
        assert_int_equal(record_path_next(&path, three_lineages, cuts, NULL), KV_OK);
        assert_int_equal(path.lineage, expected[i][0]);
        assert_int_equal(path.first, expected[i][1]);
        assert_int_equal(path.end, expected[i][2]);
    }
    assert_int_equal(path.first, 0);
    /* A session that has not grown since it was cut, and one that reads less than the cut. */
    path = (struct record_path){.next = 9, .first = 2};
    assert_int_equal(record_path_next(&path, three_lineages, cuts, NULL), KV_OK);
    assert_int_equal(path.lineage, 7);
    assert_int_equal(path.first, 0);
    cuts[1] = 7; /* cuts that do not fall could go round for ever */
    path = (struct record_path){.next = 9, .first = 5};
    assert_int_equal(record_path_next(&path, three_lineages, cuts, NULL), KV_ERR_CORRUPT);
}

static void tags_have_rules(void **state) {
    (void)state;
    struct kv_diag diag = {""};
    char text[80];
    memset(text, 'a', sizeof text);
    text[RECORD_TAG_BYTES_MAX] = 0;
    assert_int_equal(record_check_tag(text, &diag), KV_OK);
    text[RECORD_TAG_BYTES_MAX] = 'a';
    text[RECORD_TAG_BYTES_MAX + 1] = 0;
    assert_int_equal(record_check_tag(text, &diag), KV_ERR_INVALID);
    assert_int_equal(record_check_tag("a@b", &diag), KV_ERR_INVALID);
    assert_int_equal(record_check_tag("", &diag), KV_ERR_INVALID);
    assert_int_equal(record_check_tag("a/b", &diag), KV_ERR_INVALID);
}

static void longest_name_fits(void **state) {
    (void)state;
    struct record_snapshot snapshot = example_snapshot(), back;
    uint8_t value[RECORD_OUT_BYTES];
    memset(snapshot.name, 'x', IMAGE_NAME_BYTES_MAX);
    snapshot.name[IMAGE_NAME_BYTES_MAX] = 0;
    snapshot.page_count = IMAGE_PAGES_MAX;
    snapshot.is_explicit = 1;
    memset(snapshot.tag, 'y', RECORD_TAG_BYTES_MAX);
    uint32_t size = record_put_snapshot(&snapshot, value);
    assert_int_equal(record_get_snapshot(value, size, &back, NULL), KV_OK);
    assert_int_equal(strlen(back.name), IMAGE_NAME_BYTES_MAX);
}

/* CASE-12 for index values: cut anywhere, one byte too many, every byte changed. */
static void damaged_values_are_refused(void **state) {
    (void)state;
    struct record_snapshot snapshot = example_snapshot(), back;
    uint8_t value[RECORD_OUT_BYTES + 1] = {0};
    struct kv_diag diag = {""};
    uint32_t size = record_put_snapshot(&snapshot, value);
    for (uint32_t cut = 0; cut < size; cut++) {
        uint8_t *copy = kv_alloc_aligned(kv_alloc_system(), cut, 1);
        memcpy(copy, value, cut);
        assert_int_equal(record_get_snapshot(copy, cut, &back, &diag), KV_ERR_CORRUPT);
        kv_alloc_release(kv_alloc_system(), copy);
    }
    assert_int_equal(record_get_snapshot(value, size + 1, &back, &diag), KV_ERR_CORRUPT);
    snapshot.n_kv = UINT64_MAX;
    size = record_put_snapshot(&snapshot, value);
    assert_int_equal(record_get_snapshot(value, size, &back, &diag), KV_ERR_CORRUPT);
    snapshot = example_snapshot();
    snapshot.n = UINT64_MAX - 1;
    size = record_put_snapshot(&snapshot, value);
    assert_int_equal(record_get_snapshot(value, size, &back, &diag), KV_ERR_CORRUPT);
    snapshot = example_snapshot();
    snapshot.block_count = UINT32_MAX;
    size = record_put_snapshot(&snapshot, value);
    assert_int_equal(record_get_snapshot(value, size, &back, &diag), KV_ERR_CORRUPT);
    struct record_page page = {4, 320, 65, 2}, page_back;
    size = record_put_page(&page, value);
    assert_int_equal(record_get_page(value, size, &page_back, &diag), KV_ERR_CORRUPT);
    struct record_name name = {.lineage = 2, .updated_ns = 3}, name_back;
    size = record_put_name(&name, value);
    assert_int_equal(record_get_name(value, size, &name_back, &diag), KV_ERR_CORRUPT);
    value[0] = 9;
    assert_int_equal(record_get_name(value, size, &name_back, &diag), KV_ERR_VERSION);
    assert_non_null(strstr(diag.text, "needs version 9"));
}

/* Planes that have left a block: their list comes back, nothing else is accepted, and the block
 * chain is the one of the whole block. */
static void planes_that_left_are_remembered(void **state) {
    (void)state;
    static const uint8_t kinds[] = {RECORD_KIND_IDS, LAYOUT_META, LAYOUT_KH,  LAYOUT_KM,
                                    LAYOUT_KL,       LAYOUT_VB,   LAYOUT_VR1, LAYOUT_VR2};
    enum { ALL = sizeof kinds };
    struct kv_digest zero = {{0}};
    struct kv_digest digests[ALL];
    uint8_t value[RECORD_OUT_BYTES];
    struct record_block back;
    for (uint32_t i = 0; i < ALL; i++)
        digests[i] = kv_digest_of(&kinds[i], 1);
    struct kv_digest whole = record_chain(&zero, 5, 3, kinds, digests, ALL);
    const struct record_key key = record_key_block(5, 3);
    static const uint32_t masks[] = {1u << LAYOUT_KL, 1u << LAYOUT_KL | 1u << LAYOUT_VR2,
                                     1u << LAYOUT_KL | 1u << LAYOUT_VR1 | 1u << LAYOUT_VR2};
    for (size_t m = 0; m < sizeof masks / sizeof masks[0]; m++) {
        struct record_block block = {.code_id = 1, .layout_id = 1, .first_position = 832};
        uint8_t left_kinds[ALL];
        struct kv_digest left[ALL];
        uint32_t count = 0;
        for (uint32_t i = 0; i < ALL; i++) {
            if (masks[m] >> kinds[i] & 1) {
                block.dropped_kinds[block.dropped_count] = kinds[i];
                block.dropped[block.dropped_count++] = digests[i];
            } else {
                left_kinds[count] = kinds[i];
                left[count++] = digests[i];
            }
        }
        uint32_t size = record_put_block(&block, value);
        assert_int_equal(value[0], 2);
        assert_int_equal(record_get_block(value, size, &back, NULL), KV_OK);
        assert_int_equal(record_dropped(&back), masks[m]);
        struct kv_digest chain = record_chain_block(&zero, &key, &back, left_kinds, left, count);
        assert_memory_equal(&chain, &whole, sizeof chain);
        /* Without its digest it is another chain. */
        back.dropped[0].bytes[0] ^= 1;
        chain = record_chain_block(&zero, &key, &back, left_kinds, left, count);
        assert_memory_not_equal(&chain, &whole, sizeof chain);
        for (uint32_t cut = 0; cut < size; cut++)
            assert_int_equal(record_get_block(value, cut, &back, NULL), KV_ERR_CORRUPT);
        value[18] = LAYOUT_KH; /* the floor's plane cannot have left */
        assert_int_equal(record_get_block(value, size, &back, NULL), KV_ERR_CORRUPT);
    }
}

static void the_chain_binds_everything(void **state) {
    (void)state;
    struct kv_digest zero = {{0}};
    uint8_t kinds[2] = {LAYOUT_META, LAYOUT_KH};
    struct kv_digest digests[2] = {kv_digest_of("a", 1), kv_digest_of("b", 1)};
    struct kv_digest base = record_chain(&zero, 5, 0, kinds, digests, 2);
    struct kv_digest again = record_chain(&zero, 5, 0, kinds, digests, 2);
    assert_memory_equal(base.bytes, again.bytes, KV_DIGEST_BYTES);
    struct kv_digest swapped[2] = {digests[1], digests[0]};
    uint8_t other_kinds[2] = {LAYOUT_META, LAYOUT_VR1};
    struct kv_digest others[] = {
        record_chain(&base, 5, 0, kinds, digests, 2),
        record_chain(&zero, 6, 0, kinds, digests, 2),
        record_chain(&zero, 5, 1, kinds, digests, 2),
        record_chain(&zero, 5, 0, other_kinds, digests, 2),
        record_chain(&zero, 5, 0, kinds, swapped, 2),
        record_chain(&zero, 5, 0, kinds, digests, 1),
    };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        assert_memory_not_equal(base.bytes, others[i].bytes, KV_DIGEST_BYTES);
}

/* A block says its code, and only that of its session's recipe will do. */
static void every_recipe_has_its_code(void **state) {
    (void)state;
    static const struct {
        enum layout_tier tier;
        uint32_t code;
    } cases[] = {{LAYOUT_K8V4, RECORD_CODE_PLANES},
                 {LAYOUT_TIER_BF16, RECORD_CODE_PLANES},
                 {LAYOUT_TIER_FP8, RECORD_CODE_FP8},
                 {LAYOUT_TIER_K8I4, RECORD_CODE_V1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t streams = layout_tier_streams(cases[i].tier);
        assert_int_equal(record_code_of(streams), cases[i].code);
        for (uint32_t code = 0; code < 5; code++) {
            struct record_block block = {.code_id = code, .layout_id = RECORD_LAYOUT_ID};
            struct kv_diag diag = {""};
            enum kv_err err = record_check_code(&block, streams, &diag);
            assert_int_equal(err, code == cases[i].code ? KV_OK : KV_ERR_MISMATCH);
            assert_int_equal(strstr(diag.text, "code") != NULL, code != cases[i].code);
        }
        struct record_block other = {.code_id = cases[i].code, .layout_id = RECORD_LAYOUT_ID + 1};
        assert_int_equal(record_check_code(&other, streams, NULL), KV_ERR_MISMATCH);
    }
}

TESTING_MAIN(cmocka_unit_test(planes_that_left_are_remembered),
             cmocka_unit_test(keys_sort_by_number), cmocka_unit_test(values_round_trip),
             cmocka_unit_test(longest_name_fits), cmocka_unit_test(versions_say_what_is_needed),
             cmocka_unit_test(a_block_that_keeps_k_is_version_3), cmocka_unit_test(paths_go_down),
             cmocka_unit_test(tags_have_rules), cmocka_unit_test(damaged_values_are_refused),
             cmocka_unit_test(the_chain_binds_everything),
             cmocka_unit_test(every_recipe_has_its_code))
