/* tests/test_image.c - the image's bytes: round trip, every missing part, cuts, absurd numbers.
 *
 * Responsible for: engine/image.c, engine/image_code.c and engine/receipt.c.
 * Not responsible for: images of live sessions (test_life.c).
 */
#include "engine/image.h"
#include "engine/receipt.h"
#include "store/base/bytes.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { N = 1500, HEAD = 12, PART_HEAD = 12 };

static char *text(const char *from) {
    return kv_alloc_copy(kv_alloc_system(), from, strlen(from));
}

static struct kv_digest digest_of_number(uint32_t number) {
    return kv_digest_of(&number, sizeof number);
}

static void fill_needle(struct image_needle *needle) {
    *needle = (struct image_needle){.key = text("colour"),
                                    .ask = text("Which colour?"),
                                    .answer_prefix = text(""),
                                    .expect = text("teal"),
                                    .span_count = 2,
                                    .spans = {{IMAGE_USER, 300, 320}, {IMAGE_USER, 700, 720}},
                                    .kept = 1,
                                    .passed = 1,
                                    .asked_n_kv = 1400,
                                    .logp = -0.25f,
                                    .logp_hole = -9.5f};
}

static void fill_pages(struct image *image) {
    uint64_t at = LAYOUT_SINK_TOKENS + (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS;
    image->sinks = (struct image_page){0, LAYOUT_SINK_TOKENS, 77, digest_of_number(8)};
    image->page_count = layout_window_pages(image->n_kv);
    for (uint32_t i = 0; i < image->page_count; i++) {
        uint64_t left = image->n_kv - at;
        uint32_t tokens = left < LAYOUT_PAGE_TOKENS ? (uint32_t)left : LAYOUT_PAGE_TOKENS;
        image->pages[i] = (struct image_page){at, tokens, 100 + i, digest_of_number(20 + i)};
        at += tokens;
    }
}

static void make_image(struct image *image) {
    const struct kv_alloc *alloc = kv_alloc_system();
    image_init(image);
    memcpy(image->model.architecture, "llama", 5);
    image->model.geometry = (struct layout_geometry){2, 2, 64};
    image->model.q_heads = 4;
    image->model.context_tokens = 8192;
    image->model.rope_pairing = 1;
    image->model.rope_base = 10000.0f;
    image->model.tensors = digest_of_number(1);
    image->model.tokenizer = digest_of_number(2);
    image->model.chat_template = digest_of_number(3);
    image->model.numerics = digest_of_number(4);
    image->model.code_id = image->model.layout_id = 1;
    snprintf(image->name, sizeof image->name, "über/☕");
    image->sampler = (struct image_sampler){0.7f, 0.9f, 40, 12345};
    image->policy_count = 2;
    image->policies = kv_alloc_zeroed(alloc, 2, sizeof *image->policies);
    image->policies[0].policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 1, .ages = {32768}};
    image->policies[1] = (struct image_policy_change){
        900, {.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {256, 512, 768}}};
    image->n = N;
    image->n_kv = N - 1;
    image->ids = kv_alloc_zeroed(alloc, N, sizeof *image->ids);
    for (int i = 0; i < N; i++)
        image->ids[i] = i * 3;
    image->role_count = 2;
    image->roles = kv_alloc_zeroed(alloc, 2, sizeof *image->roles);
    image->roles[0] = (struct image_span){IMAGE_USER, 0, 1200};
    image->roles[1] = (struct image_span){IMAGE_ASSISTANT, 1200, N};
    image->lineage = 0xabcdef0123456789u;
    image->block_count = (uint32_t)layout_sealed_blocks(image->n_kv);
    image->block_chain = digest_of_number(9);
    fill_pages(image);
    image->fingerprint.n_kv = image->fingerprint_floor.n_kv = image->n_kv;
    image->fingerprint.logits = digest_of_number(10);
    image->fingerprint_floor.logits = digest_of_number(11);
    for (int i = 0; i < IMAGE_TOP; i++) {
        image->fingerprint.top_ids[i] = i;
        image->fingerprint.top_logits[i] = 5.0f - (float)i;
    }
    image->needle_count = 1;
    image->needles = kv_alloc_zeroed(alloc, 1, sizeof *image->needles);
    fill_needle(&image->needles[0]);
    image->parent = digest_of_number(12);
    image->created_ns = 1700000000000000000u;
}

struct encoded {
    uint8_t *bytes;
    size_t size;
};

static struct encoded encode(const struct image *image) {
    struct encoded encoded = {0};
    struct kv_diag diag = {""};
    assert_int_equal(image_encode(image, kv_alloc_system(), &encoded.bytes, &encoded.size, &diag),
                     KV_OK);
    return encoded;
}

static struct encoded encode_example(void) {
    struct image image;
    make_image(&image);
    struct encoded encoded = encode(&image);
    image_release(&image, kv_alloc_system());
    return encoded;
}

static void drop(struct encoded *encoded) {
    kv_alloc_release(kv_alloc_system(), encoded->bytes);
}

/* Decodes an exact-size copy, so that a read past the end is seen by the sanitizer. */
static enum kv_err decode(const uint8_t *bytes, size_t size, struct kv_diag *diag) {
    struct testing_alloc counting;
    struct image image;
    testing_alloc_init(&counting, 0);
    uint8_t *copy = kv_alloc_aligned(kv_alloc_system(), size, 1);
    if (size != 0)
        memcpy(copy, bytes, size);
    enum kv_err err = image_decode(copy, size, &counting.alloc, &image, diag);
    if (err == KV_OK)
        image_release(&image, &counting.alloc);
    assert_int_equal(counting.live_count, 0);
    assert_null(image.ids);
    kv_alloc_release(kv_alloc_system(), copy);
    return err;
}

static void round_trip_is_canonical(void **state) {
    (void)state;
    struct encoded first = encode_example();
    struct image back;
    struct kv_diag diag = {""};
    assert_int_equal(image_decode(first.bytes, first.size, kv_alloc_system(), &back, &diag), KV_OK);
    assert_string_equal(back.name, "über/☕");
    assert_int_equal(back.n, N);
    /* Ids of sealed blocks stand in their records. */
    for (uint32_t i = 0, end = LAYOUT_SINK_TOKENS + back.block_count * LAYOUT_BLOCK_TOKENS; i < N;
         i++)
        assert_int_equal(back.ids[i], i >= LAYOUT_SINK_TOKENS && i < end ? 0 : i * 3);
    assert_int_equal(back.policies[1].policy.ages[2], 768);
    assert_int_equal(back.pages[back.page_count - 1].page_id, 100 + back.page_count - 1);
    assert_string_equal(back.needles[0].expect, "teal");
    assert_true(back.needles[0].logp_hole == -9.5f);
    struct encoded second = encode(&back);
    assert_int_equal(first.size, second.size);
    assert_memory_equal(first.bytes, second.bytes, first.size);
    struct kv_digest a = image_root(first.bytes, first.size);
    first.bytes[first.size - 1] ^= 1;
    struct kv_digest b = image_root(first.bytes, first.size);
    assert_memory_not_equal(a.bytes, b.bytes, KV_DIGEST_BYTES);
    image_release(&back, kv_alloc_system());
    drop(&first);
    drop(&second);
}

/* Version 1 never changes: these bytes are in people's stores. */
static void version_1_stays_what_it_is(void **state) {
    (void)state;
    struct encoded whole = encode_example();
    struct kv_digest root = image_root(whole.bytes, whole.size);
    char text[KV_DIGEST_HEX_BYTES];
    kv_digest_hex(&root, text);
    assert_int_equal(whole.size, 3050);
    assert_string_equal(text, "0ab0dd240e6fcb302dcd752a2f2a5cf0");
    drop(&whole);
}

/* Probes are what version 2 has more, and it is written only with them. */
static void probes_make_version_2(void **state) {
    (void)state;
    static const struct image_probe wrong[] = {
        {63, 80, 83, 1400, -1, -9},       {100, 100, 103, 1400, -1, -9},
        {100, 116, 116, 1400, -1, -9},    {100, 116, 165, 1400, -1, -9},
        {1480, 1497, 1500, 1400, -1, -9}, {100, 116, 119, N, -1, -9}};
    struct image image, back;
    struct kv_diag diag = {""};
    make_image(&image);
    image.probe_count = 2;
    image.probes[0] = (struct image_probe){100, 116, 119, 1400, -0.5f, -8.25f};
    image.probes[1] = (struct image_probe){1480, 1496, 1499, 1499, -0.25f, -7.5f};
    struct encoded whole = encode(&image);
    assert_int_equal(kv_get_u32(whole.bytes + 4), 2);
    assert_int_equal(image_decode(whole.bytes, whole.size, kv_alloc_system(), &back, &diag), KV_OK);
    assert_int_equal(back.probe_count, 2);
    assert_memory_equal(back.probes, image.probes, 2 * sizeof *back.probes);
    image_release(&back, kv_alloc_system());
    /* Without its last part, with version 1 for it, and with too many. */
    enum { PROBES_BYTES = PART_HEAD + 4 + 2 * 40 };
    assert_int_equal(decode(whole.bytes, whole.size - PROBES_BYTES, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "probes"));
    kv_put_u32(whole.bytes + 4, 1);
    assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_CORRUPT);
    drop(&whole);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        image.probes[1] = wrong[i];
        whole = encode(&image);
        assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_CORRUPT);
        assert_non_null(strstr(diag.text, "probe"));
        drop(&whole);
    }
    image.probe_count = IMAGE_PROBES_MAX + 1;
    assert_int_equal(image_encode(&image, kv_alloc_system(), &whole.bytes, &whole.size, &diag),
                     KV_ERR_LIMIT);
    image.probe_count = 0;
    image_release(&image, kv_alloc_system());
}

/* Other ladders and policy pressure are what version 3 has more, written only for them. */
static void other_policies_make_version_3(void **state) {
    (void)state;
    struct image image, back;
    struct kv_diag diag = {""};
    make_image(&image);
    struct image_policy *last = &image.policies[1].policy;
    *last = (struct image_policy){
        .recipe = IMAGE_RECIPE_V2, .pressure = 1, .top_k8v8 = 1, .ends = {4, 3, 1}};
    struct encoded whole = encode(&image);
    assert_int_equal(kv_get_u32(whole.bytes + 4), 3);
    assert_int_equal(image_decode(whole.bytes, whole.size, kv_alloc_system(), &back, &diag), KV_OK);
    assert_true(image_policy_equal(&back.policies[1].policy, last));
    assert_true(image_policy_equal(&back.policies[0].policy, &image.policies[0].policy));
    assert_int_equal(image_tier(last, 0, N), LAYOUT_K8V2);
    assert_int_equal(image_tier(last, 2, N), LAYOUT_K8V3);
    assert_int_equal(image_tier(last, 3, N), LAYOUT_K8V4);
    assert_int_equal(image_tier(last, 4, N), LAYOUT_K8V8);
    struct encoded again = encode(&back);
    assert_int_equal(again.size, whole.size);
    assert_memory_equal(again.bytes, whole.bytes, whole.size);
    image_release(&back, kv_alloc_system());
    drop(&again);
    /* Its bytes never change either. */
    struct kv_digest root = image_root(whole.bytes, whole.size);
    char text[KV_DIGEST_HEX_BYTES];
    kv_digest_hex(&root, text);
    assert_string_equal(text, "113d528a662f5ca963ab62bb1e5c163b");
    for (size_t size = 0; size < whole.size; size++)
        assert_int_equal(decode(whole.bytes, size, NULL), KV_ERR_CORRUPT);
    for (uint32_t version = 1; version < 3; version++) {
        kv_put_u32(whole.bytes + 4, version);
        assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_CORRUPT);
    }
    drop(&whole);
    const struct image_policy wrong[] = {
        {.recipe = IMAGE_RECIPE_V2, .pressure = 1, .ends = {1, 2}},
        {.recipe = IMAGE_RECIPE_V2, .pressure = 1, .ends = {3, 2, 1}},
        {.recipe = IMAGE_RECIPE_V3, .pressure = 1, .ends = {1u << 13}},
        {.recipe = IMAGE_RECIPE_V2, .age_count = 3, .ages = {1, 2, 3}},
        {.recipe = IMAGE_RECIPE_BF16, .top_k8v8 = 1},
        {.recipe = IMAGE_RECIPE_BF16, .pressure = 1},
        {.recipe = IMAGE_RECIPE_FP8, .age_count = 1, .ages = {1}},
        {.recipe = IMAGE_RECIPE_FP8, .top_k8v8 = 1},
        {.recipe = IMAGE_RECIPE_V1, .pressure = 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        *last = wrong[i];
        whole = encode(&image);
        assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_CORRUPT);
        assert_non_null(strstr(diag.text, "tier history"));
        drop(&whole);
    }
    image_release(&image, kv_alloc_system());
}

/* Recipes fp8 and v1 are what version 4 has more: a program that does not know them says so. */
static void control_recipes_make_version_4(void **state) {
    (void)state;
    static const struct {
        enum image_recipe recipe;
        enum layout_tier tier;
    } cases[] = {{IMAGE_RECIPE_FP8, LAYOUT_TIER_FP8}, {IMAGE_RECIPE_V1, LAYOUT_TIER_K8I4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct image image, back;
        struct kv_diag diag = {""};
        make_image(&image);
        image.policies[0].policy = image.policies[1].policy =
            (struct image_policy){.recipe = cases[i].recipe};
        struct encoded whole = encode(&image);
        assert_int_equal(kv_get_u32(whole.bytes + 4), 4);
        assert_int_equal(image_decode(whole.bytes, whole.size, kv_alloc_system(), &back, &diag),
                         KV_OK);
        assert_int_equal(back.policies[1].policy.recipe, cases[i].recipe);
        assert_int_equal(image_tier(&back.policies[1].policy, 0, N), cases[i].tier);
        assert_int_equal(image_steps(&back.policies[1].policy), 0);
        assert_int_equal(image_recipe_of(image_recipe_name(cases[i].recipe)), cases[i].recipe);
        image_release(&back, kv_alloc_system());
        for (uint32_t version = 1; version < 4; version++) {
            kv_put_u32(whole.bytes + 4, version);
            assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_CORRUPT);
        }
        drop(&whole);
        /* What an older version can say is not said in this one. */
        image.policies[0].policy = image.policies[1].policy =
            (struct image_policy){.recipe = IMAGE_RECIPE_V2};
        whole = encode(&image);
        kv_put_u32(whole.bytes + 4, 4);
        assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_CORRUPT);
        drop(&whole);
        image_release(&image, kv_alloc_system());
    }
    assert_int_equal(image_recipe_of("v4"), 0);
}

/* CASE-02: no part is optional. */
static void a_missing_part_is_named(void **state) {
    (void)state;
    static const char *const names[] = {"model identity",
                                        "session name",
                                        "sampler settings",
                                        "tier history",
                                        "position",
                                        "blocks",
                                        "token ids",
                                        "roles",
                                        "tier map",
                                        "sinks",
                                        "window pages",
                                        "fingerprint at the tier map",
                                        "fingerprint at the floor",
                                        "needles",
                                        "origin"};
    struct encoded whole = encode_example();
    uint8_t *cut = kv_alloc_zeroed(kv_alloc_system(), 1, whole.size);
    uint32_t count = kv_get_u32(whole.bytes + 8);
    assert_int_equal(count, sizeof names / sizeof names[0]);
    size_t at = HEAD;
    for (uint32_t part = 0; part < count; part++) {
        size_t size = PART_HEAD + (size_t)kv_get_u64(whole.bytes + at + 4);
        struct kv_diag diag = {""};
        memcpy(cut, whole.bytes, at);
        memcpy(cut + at, whole.bytes + at + size, whole.size - at - size);
        kv_put_u32(cut + 8, count - 1);
        assert_int_equal(decode(cut, whole.size - size, &diag), KV_ERR_CORRUPT);
        assert_non_null(strstr(diag.text, names[part]));
        assert_non_null(strstr(diag.text, "missing"));
        at += size;
    }
    assert_int_equal(at, whole.size);
    kv_alloc_release(kv_alloc_system(), cut);
    drop(&whole);
}

/* CASE-12: a file that ends early, at every byte. */
static void every_cut_is_refused(void **state) {
    (void)state;
    struct encoded whole = encode_example();
    for (size_t size = 0; size < whole.size; size++) {
        struct kv_diag diag = {""};
        assert_int_equal(decode(whole.bytes, size, &diag), KV_ERR_CORRUPT);
        assert_true(diag.text[0] != 0);
    }
    assert_int_equal(decode(whole.bytes, whole.size, NULL), KV_OK);
    drop(&whole);
}

/* CASE-12: lengths and counts that are too large, negative or near 2^64, at every place. A value
 * that happens to be legal there (a seed, a digest) may pass; nothing may break. */
static void absurd_numbers_break_nothing(void **state) {
    (void)state;
    static const uint64_t values[] = {
        0, 1u << 20, UINT32_MAX, (uint64_t)1 << 31, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 11};
    struct encoded whole = encode_example();
    int refused = 0;
    for (size_t at = 0; at + 8 <= whole.size; at += at < 1000 ? 1 : 37) {
        uint8_t keep[8];
        memcpy(keep, whole.bytes + at, 8);
        for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
            kv_put_u64(whole.bytes + at, values[v]);
            refused += decode(whole.bytes, whole.size, NULL) != KV_OK;
        }
        memcpy(whole.bytes + at, keep, 8);
    }
    printf("refused %d\n", refused);
    assert_true(refused > 1000);
    drop(&whole);
}

static void part_lengths_are_checked(void **state) {
    (void)state;
    static const uint64_t values[] = {0, UINT32_MAX, (uint64_t)1 << 63, UINT64_MAX};
    struct encoded whole = encode_example();
    size_t at = HEAD;
    while (at < whole.size) {
        uint64_t size = kv_get_u64(whole.bytes + at + 4);
        for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
            kv_put_u64(whole.bytes + at + 4, values[v]);
            assert_int_equal(decode(whole.bytes, whole.size, NULL), KV_ERR_CORRUPT);
        }
        kv_put_u64(whole.bytes + at + 4, size);
        at += PART_HEAD + size;
    }
    drop(&whole);
}

static void newer_version_says_which(void **state) {
    (void)state;
    struct encoded whole = encode_example();
    struct kv_diag diag = {""};
    kv_put_u32(whole.bytes + 4, 7);
    assert_int_equal(decode(whole.bytes, whole.size, &diag), KV_ERR_VERSION);
    assert_non_null(strstr(diag.text, "needs version 7"));
    drop(&whole);
}

static void no_memory_releases_all(void **state) {
    (void)state;
    struct encoded whole = encode_example();
    for (uint64_t k = 1;; k++) {
        struct testing_alloc failing;
        struct image image;
        testing_alloc_init(&failing, k);
        enum kv_err err = image_decode(whole.bytes, whole.size, &failing.alloc, &image, NULL);
        if (err == KV_OK)
            image_release(&image, &failing.alloc);
        else
            assert_int_equal(err, KV_ERR_NOMEM);
        assert_int_equal(failing.live_count, 0);
        if (failing.failed_count == 0) {
            assert_true(k > 5);
            break;
        }
    }
    drop(&whole);
}

static void tiers_follow_age(void **state) {
    (void)state;
    struct image_policy v3 = {.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};
    struct image_policy plain = {.recipe = IMAGE_RECIPE_V3, .age_count = 1, .ages = {32768}};
    struct image_policy bf16 = {.recipe = IMAGE_RECIPE_BF16};
    assert_int_equal(image_tier(&v3, 0, 320 + 511), LAYOUT_K8V4);
    assert_int_equal(image_tier(&v3, 0, 320 + 512), LAYOUT_K6V4);
    assert_int_equal(image_tier(&v3, 0, 320 + 1024), LAYOUT_K6V3);
    assert_int_equal(image_tier(&v3, 0, 320 + 1536), LAYOUT_K6V2);
    assert_int_equal(image_tier(&v3, 1, 320 + 1536), LAYOUT_K6V3);
    assert_int_equal(image_tier(&plain, 0, 320 + 32768), LAYOUT_K6V4);
    assert_int_equal(image_tier(&plain, 0, 1000000), LAYOUT_K6V4);
    assert_int_equal(image_tier(&v3, 9, 100), LAYOUT_K8V4);
    assert_int_equal(image_tier(&bf16, 0, 100000), LAYOUT_TIER_BF16);
    assert_int_equal(image_floor(&v3), LAYOUT_K6V2);
    assert_int_equal(image_floor(&bf16), LAYOUT_TIER_BF16);
}

/* CASE-09 and CASE-14 at the level of the description: both values are named. */
static void another_model_is_named(void **state) {
    (void)state;
    struct image image;
    struct kv_diag diag = {""};
    make_image(&image);
    struct image_model here = image.model;
    assert_int_equal(image_compatible(&image.model, &here, &diag), KV_OK);
    here.geometry.layers = 3;
    assert_int_equal(image_compatible(&image.model, &here, &diag), KV_ERR_MISMATCH);
    assert_non_null(strstr(diag.text, "layer count 2"));
    assert_non_null(strstr(diag.text, "has 3"));
    here = image.model;
    here.tensors = digest_of_number(99);
    char text_here[KV_DIGEST_HEX_BYTES];
    kv_digest_hex(&here.tensors, text_here);
    assert_int_equal(image_compatible(&image.model, &here, &diag), KV_ERR_MISMATCH);
    assert_non_null(strstr(diag.text, "weights"));
    assert_non_null(strstr(diag.text, text_here));
    here = image.model;
    here.numerics = digest_of_number(98);
    assert_int_equal(image_compatible(&image.model, &here, &diag), KV_OK);
    here = image.model;
    here.context_tokens = 4096;
    assert_int_equal(image_compatible(&image.model, &here, &diag), KV_ERR_MISMATCH);
    here = image.model;
    here.rope_base = 500000.0f;
    assert_int_equal(image_compatible(&image.model, &here, &diag), KV_ERR_MISMATCH);
    image_release(&image, kv_alloc_system());
}

static void too_much_is_not_encoded(void **state) {
    (void)state;
    struct image image;
    struct encoded none = {0};
    struct kv_diag diag = {""};
    make_image(&image);
    image.policy_count = IMAGE_POLICIES_MAX + 1;
    assert_int_equal(image_encode(&image, kv_alloc_system(), &none.bytes, &none.size, &diag),
                     KV_ERR_LIMIT);
    assert_non_null(strstr(diag.text, "tier policy"));
    image.policy_count = 2;
    image.n = IMAGE_TOKENS_MAX + 1;
    assert_int_equal(image_encode(&image, kv_alloc_system(), &none.bytes, &none.size, &diag),
                     KV_ERR_LIMIT);
    image.n = N;
    image_release(&image, kv_alloc_system());
}

static void receipt_names_the_busiest_stage(void **state) {
    (void)state;
    struct receipt receipt = {0};
    receipt.stage_ns[RECEIPT_READ] = 5;
    receipt.stage_ns[RECEIPT_DIGEST] = 9;
    receipt_finish(&receipt);
    assert_int_equal(receipt.bound_by, RECEIPT_DIGEST);
    assert_string_equal(receipt_stage_name(receipt.bound_by), "digest");
    assert_string_equal(receipt_operation_name(RECEIPT_SLEEP), "sleep");
    assert_string_equal(receipt_proof_name(RECEIPT_BITS_EQUAL), "bits-equal");
    for (int stage = 0; stage < RECEIPT_STAGE_COUNT; stage++)
        assert_string_not_equal(receipt_stage_name((enum receipt_stage)stage), "unknown");
}

TESTING_MAIN(cmocka_unit_test(round_trip_is_canonical),
             cmocka_unit_test(version_1_stays_what_it_is), cmocka_unit_test(probes_make_version_2),
             cmocka_unit_test(other_policies_make_version_3),
             cmocka_unit_test(control_recipes_make_version_4),
             cmocka_unit_test(a_missing_part_is_named), cmocka_unit_test(every_cut_is_refused),
             cmocka_unit_test(absurd_numbers_break_nothing),
             cmocka_unit_test(part_lengths_are_checked), cmocka_unit_test(newer_version_says_which),
             cmocka_unit_test(no_memory_releases_all), cmocka_unit_test(tiers_follow_age),
             cmocka_unit_test(another_model_is_named), cmocka_unit_test(too_much_is_not_encoded),
             cmocka_unit_test(receipt_names_the_busiest_stage))
