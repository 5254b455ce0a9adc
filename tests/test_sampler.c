/* tests/test_sampler.c - choosing tokens: order, filters, distribution, determinism.
 *
 * Responsible for: greedy and ties, top-k, top-p, temperature, random numbers, log-probabilities
 * against libm, bad logits and settings.
 * Not responsible for: logits of a model (the forward pass's test).
 */
#include "engine/model/sampler.h"

#include "kernels/ops.h"
#include "tests/testing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 1000 };

#define RANDOM_1_0 0.97999067437736886
#define RANDOM_1_1 0.18437914565150482

static const struct sampler_settings greedy = {
    .temperature = 0.0f, .top_p = 1.0f, .top_k = SAMPLER_TOP_K_ALL, .seed = 1};

static uint32_t pick(struct sampler_settings settings, const float *logits, uint32_t count,
                     uint64_t position) {
    static struct sampler_candidate scratch[VOCAB];
    struct sampler_row row = {.logits = logits, .count = count, .position = position};
    struct kv_diag diag;
    uint32_t id = UINT32_MAX;
    assert_int_equal(sampler_pick(&settings, &row, scratch, &id, &diag), KV_OK);
    assert_true(id < count);
    return id;
}

static void random_logits(float *logits, uint64_t seed) {
    struct testing_random random;
    testing_random_init(&random, seed);
    for (int i = 0; i < VOCAB; i++)
        logits[i] = 4.0f * testing_random_normal(&random);
}

static void greedy_takes_the_largest_and_the_lower_id(void **state) {
    (void)state;
    const float logits[] = {-1.0f, 3.0f, 2.0f, 3.0f, -0.0f, 0.0f};
    struct sampler_row row = {.logits = logits, .count = 6, .position = 9};
    struct sampler_expected expected = {7, 0.0};
    assert_int_equal(pick(greedy, logits, 6, 9), 1);
    assert_int_equal(sampler_expect(&row, 0, &expected, NULL), KV_OK);
    assert_int_equal(expected.best, 1);
    assert_int_equal(pick(greedy, logits + 4, 2, 0), 0);
}

static void top_k_of_one_is_greedy(void **state) {
    (void)state;
    float logits[VOCAB];
    random_logits(logits, testing_seed("logits", 3));
    logits[77] = logits[500] = 50.0f;
    for (uint64_t position = 0; position < 200; position++) {
        struct sampler_settings settings = {
            .temperature = 5.0f, .top_p = 1.0f, .top_k = 1, .seed = position};
        assert_int_equal(pick(settings, logits, VOCAB, position), 77);
        settings.top_k = SAMPLER_TOP_K_ALL;
        settings.top_p = 1e-6f;
        assert_int_equal(pick(settings, logits, VOCAB, position), 77);
    }
}

static void shares_follow_the_softmax(void **state) {
    (void)state;
    /* Probabilities .5 .25 .125 .125 at temperature 1; squared and renormalised at one half. */
    const float logits[] = {logf(0.125f), logf(0.5f), logf(0.125f), logf(0.25f)};
    const double at_1[] = {0.125, 0.5, 0.125, 0.25};
    const double at_half[] = {1.0 / 22, 16.0 / 22, 1.0 / 22, 4.0 / 22};
    const double top_2[] = {0, 2.0 / 3, 0, 1.0 / 3};
    const double nucleus[] = {1.0 / 7, 4.0 / 7, 0,
                              2.0 /
                                  7}; /* .5 + .25 + .125 reach .8; of the best three, .5 + .25 do */
    const struct {
        struct sampler_settings settings;
        const double *wanted;
    } rows[] = {{{1.0f, 1.0f, SAMPLER_TOP_K_ALL, 5}, at_1},
                {{0.5f, 1.0f, SAMPLER_TOP_K_ALL, 5}, at_half},
                {{1.0f, 1.0f, 2, 5}, top_2},
                {{1.0f, 0.8f, SAMPLER_TOP_K_ALL, 5}, nucleus},
                {{1.0f, 0.8f, 3, 5}, top_2}};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        uint32_t counts[4] = {0};
        for (uint64_t position = 0; position < 40000; position++)
            counts[pick(rows[r].settings, logits, 4, position)]++;
        for (int i = 0; i < 4; i++) {
            double share = counts[i] / 40000.0;
            /* Four deviations of a share are below .0101. */
            if (fabs(share - rows[r].wanted[i]) > 0.0101)
                fail_msg("row %zu token %d: %.4f, wanted %.4f", r, i, share, rows[r].wanted[i]);
            if (rows[r].wanted[i] == 0)
                assert_int_equal(counts[i], 0);
        }
    }
}

static void only_the_filtered_are_chosen(void **state) {
    (void)state;
    float logits[VOCAB];
    struct sampler_candidate top[20];
    random_logits(logits, testing_seed("logits", 4));
    struct sampler_row row = {.logits = logits, .count = VOCAB, .position = 0};
    assert_int_equal(sampler_top(&row, 20, top, NULL), KV_OK);
    uint32_t seen = 0, hit[20] = {0};
    for (uint64_t position = 0; position < 3000; position++) {
        struct sampler_settings settings = {
            .temperature = 8.0f, .top_p = 1.0f, .top_k = 20, .seed = 42};
        uint32_t id = pick(settings, logits, VOCAB, position), k = 0;
        while (k < 20 && top[k].id != id)
            k++;
        assert_true(k < 20);
        seen += hit[k]++ == 0;
    }
    assert_int_equal(seen, 20);
}

static int by_choice(const void *left, const void *right) {
    const struct sampler_candidate *a = left, *b = right;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* The choice by its definition: everything sorted, libm's exp. */
static uint32_t plain_pick(const struct sampler_settings *settings, const struct sampler_row *row,
                           struct sampler_candidate *sorted) {
    uint32_t kept = settings->top_k < row->count ? settings->top_k : row->count, chosen = 0;
    double total = 0.0, share = 0.0, sum = 0.0, scale = 1.0 / (double)settings->temperature;
    for (uint32_t i = 0; i < row->count; i++)
        sorted[i] = (struct sampler_candidate){row->logits[i], i};
    qsort(sorted, row->count, sizeof *sorted, by_choice);
    double best = (double)sorted[0].logit;
    for (uint32_t i = 0; i < kept; i++)
        total += exp(((double)sorted[i].logit - best) * scale);
    if (settings->top_p < 1.0f) {
        uint32_t nucleus = 0;
        while (nucleus < kept && (nucleus == 0 || share < (double)settings->top_p * total))
            share += exp(((double)sorted[nucleus++].logit - best) * scale);
        kept = nucleus;
        total = share;
    }
    double wanted = sampler_random(settings->seed, row->position) * total;
    while ((sum += exp(((double)sorted[chosen].logit - best) * scale)) <= wanted &&
           chosen + 1 < kept)
        chosen++;
    return sorted[chosen].id;
}

/* Of a large vocabulary only what is near the best is sorted, and more of it where a flat
 * distribution is walked further: BREAK_FALLING_FAR stops at the first. */
static void a_large_vocabulary_is_chosen_from_alike(void **state) {
    enum { MANY = 49152 + 7 };
    static float logits[MANY];
    static struct sampler_candidate scratch[MANY], sorted[MANY];
    static const struct sampler_settings settings[] = {{1.0f, 1.0f, SAMPLER_TOP_K_ALL, 3},
                                                       {0.7f, 0.95f, SAMPLER_TOP_K_ALL, 4},
                                                       {1.0f, 1.0f, 40, 5},
                                                       {2.0f, 0.9f, 5000, 6},
                                                       {100.0f, 1.0f, SAMPLER_TOP_K_ALL, 7}};
    struct testing_random random;
    uint32_t far = 0;
    (void)state;
    testing_random_init(&random, testing_seed("many", 7));
    for (uint64_t position = 0; position < 12; position++) {
        int peaked = position % 3 == 0;
        for (uint32_t i = 0; i < MANY; i++)
            logits[i] = (float)(int)testing_random_below(&random, 4096) / 512.0f -
                        (peaked && i % 1021 != 5 ? 9.0f : 0.0f);
        struct sampler_row row = {logits, MANY, position};
        for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
            uint32_t id = 0, wanted = plain_pick(&settings[i], &row, sorted);
            assert_int_equal(sampler_pick(&settings[i], &row, scratch, &id, NULL), KV_OK);
            assert_int_equal(id, wanted);
            for (uint32_t k = 0; k < 1000 && sorted[k].id != id; k++)
                far += k == 999;
        }
    }
    printf("%u of 60 choices lay behind the best thousand\n", far);
    assert_true(far > 5);
}

/* BREAK_RANDOM_POSITION draws the same number everywhere. */
static void choice_depends_on_seed_and_position_alone(void **state) {
    (void)state;
    float logits[VOCAB];
    struct sampler_settings settings = {
        .temperature = 1.0f, .top_p = 0.95f, .top_k = SAMPLER_TOP_K_ALL, .seed = 99};
    uint32_t first[64], other = 0, moved = 0;
    random_logits(logits, testing_seed("logits", 5));
    for (uint64_t position = 0; position < 64; position++)
        first[position] = pick(settings, logits, VOCAB, position);
    for (uint64_t position = 64; position-- > 0;)
        assert_int_equal(pick(settings, logits, VOCAB, position), first[position]);
    settings.seed = 100;
    for (uint64_t position = 0; position < 64; position++) {
        other += pick(settings, logits, VOCAB, position) != first[position];
        moved += position != 0 && first[position] != first[position - 1];
    }
    assert_true(other > 20 && moved > 20);
}

static void random_numbers_are_spread(void **state) {
    (void)state;
    double sum = 0.0, product = 0.0;
    uint32_t tenth[10] = {0};
    for (uint64_t position = 0; position < 100000; position++) {
        double value = sampler_random(7, position);
        assert_true(value >= 0.0 && value < 1.0);
        sum += value;
        product += (value - 0.5) * (sampler_random(7, position + 1) - 0.5) +
                   (value - 0.5) * (sampler_random(8, position) - 0.5);
        tenth[(int)(value * 10.0)]++;
    }
    assert_true(fabs(sum / 100000 - 0.5) < 0.004);
    assert_true(fabs(product / 100000) < 0.002);
    for (int i = 0; i < 10; i++)
        assert_true(tenth[i] > 9600 && tenth[i] < 10400);
    /* A change of these numbers would change stored conversations. */
    printf("random(1, 0) = %.17g, random(1, 1) = %.17g\n", sampler_random(1, 0),
           sampler_random(1, 1));
    assert_true(sampler_random(1, 0) == RANDOM_1_0 && sampler_random(1, 1) == RANDOM_1_1);
}

/* Where most of them add something, and where most are too far below the best. */
static void log_probs_agree(float scale) {
    float logits[VOCAB];
    random_logits(logits, testing_seed("logits", 6));
    for (int i = 0; i < VOCAB; i++)
        logits[i] *= scale;
    struct sampler_row row = {.logits = logits, .count = VOCAB, .position = 0};
    uint32_t best = pick(greedy, logits, VOCAB, 0);
    double sum = 0.0, total = 0.0;
    for (int i = 0; i < VOCAB; i++)
        sum += exp((double)logits[i]);
    for (uint32_t i = 0; i < VOCAB; i++) {
        double value = 1.0;
        struct sampler_expected both;
        assert_int_equal(sampler_log_prob(&row, i, &value, NULL), KV_OK);
        assert_int_equal(sampler_expect(&row, i, &both, NULL), KV_OK);
        assert_true(both.best == best && both.log_prob == value);
        assert_true(fabs(value - ((double)logits[i] - log(sum))) < 1e-7);
        total += exp(value);
    }
    assert_true(fabs(total - 1.0) < 1e-7);
}

static void log_probs_agree_with_libm(void **state) {
    (void)state;
    log_probs_agree(1);
    log_probs_agree(30);
    const float far[] = {300.0f, -300.0f};
    double value = 1.0;
    struct sampler_row row = {.logits = far, .count = 2, .position = 0};
    assert_int_equal(sampler_log_prob(&row, 1, &value, NULL), KV_OK);
    assert_true(value == -600.0);
}

static void the_best_are_sorted(void **state) {
    (void)state;
    const float logits[] = {1.0f, 5.0f, 5.0f, -2.0f, 4.5f};
    const uint32_t wanted[] = {1, 2, 4, 0, 3};
    struct sampler_row row = {.logits = logits, .count = 5, .position = 0};
    struct sampler_candidate top[5];
    for (uint32_t k = 1; k <= 5; k++) {
        assert_int_equal(sampler_top(&row, k, top, NULL), KV_OK);
        for (uint32_t i = 0; i < k; i++)
            assert_true(top[i].id == wanted[i] && top[i].logit == logits[wanted[i]]);
    }
}

/* Also the order of the device's helper, whose specification is ops_top_select. */
static void the_best_decide_as_the_whole_row(void **state) {
    (void)state;
    static const struct sampler_settings cases[] = {{0.0f, 1.0f, SAMPLER_TOP_K_ALL, 5},
                                                    {0.7f, 1.0f, 40, 5},
                                                    {1.3f, 0.8f, 64, 5},
                                                    {2.0f, 0.5f, 7, 5},
                                                    {5.0f, 1.0f, 1, 5}};
    float logits[VOCAB];
    random_logits(logits, testing_seed("best", 8));
    for (int i = 0; i < VOCAB; i += 2)
        logits[i] = roundf(logits[i]);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct ops_candidate top[OPS_TOP_MAX];
        struct sampler_candidate candidates[SAMPLER_TOP_MAX], expected[SAMPLER_TOP_MAX];
        uint32_t wanted = sampler_wanted(&cases[c], VOCAB), id = UINT32_MAX;
        struct ops_top select = {logits, top, VOCAB, 1, VOCAB, wanted};
        struct sampler_row row = {.logits = logits, .count = VOCAB};
        ops_top_select(&select, 0, 1);
        assert_int_equal(sampler_top(&row, wanted, expected, NULL), KV_OK);
        for (uint32_t i = 0; i < wanted; i++) {
            candidates[i] = (struct sampler_candidate){top[i].logit, top[i].id};
            assert_int_equal(top[i].id, expected[i].id);
        }
        for (uint64_t position = 0; position < 300; position++) {
            struct sampler_best best = {candidates, wanted, position};
            assert_int_equal(sampler_pick_best(&cases[c], &best, &id, NULL), KV_OK);
            assert_int_equal(id, pick(cases[c], logits, VOCAB, position));
        }
        struct sampler_best few = {candidates, wanted - 1, 0};
        assert_int_equal(sampler_pick_best(&cases[c], &few, &id, NULL), KV_ERR_INVALID);
    }
    assert_int_equal(sampler_wanted(&(struct sampler_settings){1, 1, 65, 1}, VOCAB), 0);
    assert_int_equal(sampler_wanted(&(struct sampler_settings){1, 1, 10, 1}, 10), 0);
}

static void values_that_are_not_finite_come_first(void **state) {
    (void)state;
    float logits[] = {1.0f, INFINITY, 2.0f, NAN, -INFINITY, 3.0f};
    struct ops_candidate top[4];
    struct ops_top select = {logits, top, 6, 1, 6, 4};
    ops_top_select(&select, 0, 1);
    assert_int_equal(top[0].id, 1);
    assert_int_equal(top[1].id, 3);
    assert_int_equal(top[2].id, 4);
    assert_int_equal(top[3].id, 5);
    struct sampler_candidate bad = {top[1].logit, top[1].id};
    struct sampler_best best = {&bad, 1, 12};
    struct kv_diag diag = {0};
    uint32_t id = 99;
    assert_int_equal(sampler_pick_best(&greedy, &best, &id, &diag), KV_ERR_DEVICE);
    assert_non_null(strstr(diag.text, "token 3 at position 12"));
    assert_int_equal(id, 99);
}

static void bad_logits_name_the_position(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    struct sampler_candidate scratch[3];
    for (int i = 0; i < 3; i++) {
        float logits[] = {1.0f, 2.0f, bad[i]};
        struct sampler_row row = {.logits = logits, .count = 3, .position = 4711};
        struct kv_diag diag = {0};
        uint32_t id = 9;
        double log_prob = 9.0;
        struct sampler_expected expected = {9, 9.0};
        assert_int_equal(sampler_pick(&greedy, &row, scratch, &id, &diag), KV_ERR_DEVICE);
        assert_non_null(strstr(diag.text, "token 2 at position 4711"));
        assert_int_equal(sampler_expect(&row, 0, &expected, &diag), KV_ERR_DEVICE);
        assert_int_equal(sampler_top(&row, 1, scratch, &diag), KV_ERR_DEVICE);
        assert_int_equal(sampler_log_prob(&row, 0, &log_prob, &diag), KV_ERR_DEVICE);
        assert_true(id == 9 && expected.best == 9 && log_prob == 9.0);
    }
}

static void bad_settings_are_named(void **state) {
    (void)state;
    const struct {
        float temperature, top_p;
        uint32_t top_k;
        const char *part;
    } rows[] = {{-0.1f, 1.0f, 1, "temperature"},  {NAN, 1.0f, 1, "temperature"},
                {101.0f, 1.0f, 1, "temperature"}, {1.0f, 0.0f, 1, "top-p"},
                {1.0f, 1.1f, 1, "top-p"},         {1.0f, NAN, 1, "top-p"},
                {1.0f, 1.0f, 0, "top-k"}};
    const float logits[] = {1.0f};
    struct sampler_row row = {.logits = logits, .count = 1, .position = 0};
    struct sampler_candidate top[2];
    double log_prob = 0.0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct kv_diag diag = {0};
        struct sampler_settings settings = {rows[i].temperature, rows[i].top_p, rows[i].top_k, 0};
        assert_int_equal(sampler_check(&settings, &diag), KV_ERR_INVALID);
        assert_non_null(strstr(diag.text, rows[i].part));
    }
    assert_int_equal(sampler_check(&greedy, NULL), KV_OK);
    assert_int_equal(sampler_top(&row, 2, top, NULL), KV_ERR_INVALID);
    assert_int_equal(sampler_top(&row, 0, top, NULL), KV_ERR_INVALID);
    assert_int_equal(sampler_log_prob(&row, 1, &log_prob, NULL), KV_ERR_INVALID);
    row.count = 0;
    assert_int_equal(sampler_log_prob(&row, 0, &log_prob, NULL), KV_ERR_INVALID);
}

TESTING_MAIN(cmocka_unit_test(greedy_takes_the_largest_and_the_lower_id),
             cmocka_unit_test(top_k_of_one_is_greedy), cmocka_unit_test(shares_follow_the_softmax),
             cmocka_unit_test(only_the_filtered_are_chosen),
             cmocka_unit_test(choice_depends_on_seed_and_position_alone),
             cmocka_unit_test(random_numbers_are_spread),
             cmocka_unit_test(a_large_vocabulary_is_chosen_from_alike),
             cmocka_unit_test(log_probs_agree_with_libm), cmocka_unit_test(the_best_are_sorted),
             cmocka_unit_test(the_best_decide_as_the_whole_row),
             cmocka_unit_test(values_that_are_not_finite_come_first),
             cmocka_unit_test(bad_logits_name_the_position),
             cmocka_unit_test(bad_settings_are_named))
