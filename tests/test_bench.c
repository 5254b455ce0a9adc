/* tests/test_bench.c - the measurements measure: quality falls with the tier, a spoilt page shows.
 *
 * Responsible for: bench_quality and bench_model on the tiny model: order, counts, refusals.
 * Not responsible for: the figures of the real model (`coldplane bench`).
 */
#include "engine/bench_model.h"
#include "engine/bench_quality.h"
#include "tests/support_engine.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { TOKENS = 1500, FIRST = 576 };

static void quality_of(enum image_recipe recipe, int top_k8v8, uint32_t tiers) {
    struct support_engine_options options = support_engine_default();
    struct bench_quality_result result;
    uint32_t ids[TOKENS];
    struct bench_quality_options bench = {.ids = ids,
                                          .id_count = TOKENS,
                                          .recipe = recipe,
                                          .top_k8v8 = top_k8v8,
                                          .first_position = FIRST,
                                          .spoil = 1};
    struct kv_diag diag = {""};

    options.slots = (uint32_t)bench_quality_slots(&bench) + 8;
    struct engine *engine = support_engine_tiny(&options);
    struct engine_model model;
    engine_model(engine, &model);
    support_engine_ids(testing_seed("ids", 3), model.vocab_count, ids, TOKENS);
    if (bench_quality(engine, &bench, &result, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    assert_int_equal(result.row_count, tiers + 1);
    for (uint32_t i = 0; i < result.row_count; i++) {
        const struct bench_quality_row *row = &result.rows[i];
        printf("%s%s: KL %.3e, 99.9 %% %.3e, same top %.4f, perplexity ratio %.5f\n",
               layout_tier_name(row->tier), row->spoilt ? " spoilt" : "", row->kl_mean, row->kl_999,
               row->same_top, row->perplexity_ratio);
        assert_int_equal(row->positions, TOKENS - FIRST - 1);
        assert_true(row->kl_mean > 0);
        assert_true(row->kl_999 >= row->kl_mean);
        if (i > 0 && !row->spoilt) {
            assert_true(row->kl_mean > result.rows[i - 1].kl_mean);
            assert_true(row->bytes_per_token < result.rows[i - 1].bytes_per_token);
        }
    }
    assert_true(result.rows[tiers].spoilt);
    assert_true(result.rows[tiers].kl_mean > 3 * result.rows[0].kl_mean);
    assert_true(result.rows[0].bytes_per_token < result.bf16_bytes_per_token * 0.6);
    assert_null(session_at(engine, 0));
    bench.id_count = FIRST;
    assert_int_equal(bench_quality(engine, &bench, &result, &diag), KV_ERR_INVALID);
    bench.id_count = 3000;
    assert_int_equal(bench_quality(engine, &bench, &result, &diag), KV_ERR_INVALID);
    assert_non_null(strstr(diag.text, "slots"));
    engine_close(engine);
}

static void quality_falls_with_the_tier(void **state) {
    (void)state;
    quality_of(IMAGE_RECIPE_V3, 0, 4);
    quality_of(IMAGE_RECIPE_V2, 1, 4);
    quality_of(IMAGE_RECIPE_FP8, 0, 1);
    quality_of(IMAGE_RECIPE_V1, 0, 1);
}

static void speed_is_of_the_tokens_asked_for(void **state) {
    struct support_engine_options options = support_engine_default();
    static uint32_t ids[1000];
    struct bench_model_options bench = {
        .ids = ids,
        .id_count = 1000,
        .policy = {.recipe = IMAGE_RECIPE_V3, .age_count = 0, .ages = {0}},
        .depths = {0, 700},
        .depth_count = 2,
        .decode_tokens = 8,
        .rate_iterations = 10000};
    struct bench_model_result result;
    struct kv_diag diag = {""};

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    assert_int_equal(bench_model(engine, &bench, &result, NULL), KV_OK);
    assert_int_equal(result.depths[0].prefill.tokens, 1);
    assert_int_equal(result.depths[1].prefill.tokens, 700 - 9);
    assert_int_equal(result.depths[1].decode.tokens, 8);
    for (uint32_t i = 0; i < 2; i++) {
        const struct bench_model_phase *phase = &result.depths[i].decode;
        uint64_t busy = 0;
        for (uint32_t k = 0; k < result.class_count; k++)
            busy += phase->class_ns[k];
        assert_true(busy > 0 && busy <= phase->ns);
    }
    assert_true(result.rate_flops > 0 && result.rate_ns > 0);
    bench.id_count = 700;
    assert_int_equal(bench_model(engine, &bench, &result, &diag), KV_ERR_INVALID);
    assert_null(session_at(engine, 0));
    engine_close(engine);
}

TESTING_MAIN(cmocka_unit_test(quality_falls_with_the_tier),
             cmocka_unit_test(speed_is_of_the_tokens_asked_for))
