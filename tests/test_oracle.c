/* tests/test_oracle.c - the default model against the reference answers of another engine.
 *
 * Responsible for: recipe bf16 against f32 weights and f16 KV: the ten largest logits after each
 * prompt, and greedy sequences up to the first near tie.
 * Not responsible for: speed or tiers (bench kv-quality).
 */
#include "engine/model/sampler.h"
#include "tests/support_engine.h"
#include "tests/testing.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Between two settings of the reference engine the logits differ by up to 0.018; a margin below
 * this may turn over. */
#define LOGIT_BOUND 0.1f
#define MARGIN_BOUND 0.1

enum { IDS_MAX = 8192, QUICK_TOKENS = 256 };

struct answer {
    const char *name;
    const cJSON *top, *ids, *margins;
    uint32_t count;
};

static cJSON *read_oracle(void) {
    FILE *stream = fopen("tests/oracle/oracle.json", "rb");
    long size;
    char *text;
    cJSON *json;

    if (!stream)
        testing_skip("run from the root of the tree");
    fseek(stream, 0, SEEK_END);
    size = ftell(stream);
    rewind(stream);
    text = malloc((size_t)size + 1);
    assert_int_equal(fread(text, 1, (size_t)size, stream), size);
    text[size] = 0;
    fclose(stream);
    json = cJSON_Parse(text);
    free(text);
    assert_non_null(json);
    return json;
}

static uint32_t read_ids(const cJSON *array, uint32_t *ids) {
    uint32_t count = 0;
    const cJSON *id;

    cJSON_ArrayForEach(id, array) {
        assert_true(count < IDS_MAX);
        ids[count++] = (uint32_t)id->valueint;
    }
    return count;
}

static float compare_top(const cJSON *top, const float *logits) {
    float worst = 0;
    const cJSON *pair;
    int count = 0;

    cJSON_ArrayForEach(pair, top) {
        const cJSON *id = cJSON_GetArrayItem(pair, 0), *logit = cJSON_GetArrayItem(pair, 1);
        float difference = fabsf(logits[id->valueint] - (float)logit->valuedouble);
        worst = difference > worst ? difference : worst;
        count++;
    }
    assert_int_equal(count, 10);
    return worst;
}

/* Our own margins, step by step: the reference lists its own only where its ids differ from those
 * of its other settings. */
struct margins {
    float margin[64];
    uint32_t count;
};

static void take_margin(void *context, uint64_t position, const float *logits) {
    struct margins *margins = context;
    struct sampler_row row = {logits, 49152, position};
    struct sampler_candidate top[2];

    assert_true(margins->count < 64);
    assert_int_equal(sampler_top(&row, 2, top, NULL), KV_OK);
    margins->margin[margins->count++] = top[0].logit - top[1].logit;
}

/* Greedy ids equal up to the first step whose margin is small; returns how many were compared. */
static uint32_t compare_greedy(const struct answer *answer, const uint32_t *ids,
                               const struct margins *margins) {
    uint32_t step = 0;
    const cJSON *id;

    cJSON_ArrayForEach(id, answer->ids) {
        double margin = answer->margins
                            ? cJSON_GetArrayItem(answer->margins, (int)step)->valuedouble
                            : (double)margins->margin[step];
        if (margin < MARGIN_BOUND)
            break;
        if (ids[step] != (uint32_t)id->valueint)
            fail_msg("%s: step %u gives %u, the reference %d", answer->name, step, ids[step],
                     id->valueint);
        step++;
    }
    return step;
}

static struct answer read_answer(const cJSON *prompt) {
    const cJSON *run = cJSON_GetObjectItem(cJSON_GetObjectItem(prompt, "runs"), "f32w_f16kv_fa");
    struct answer answer = {.name = cJSON_GetObjectItem(prompt, "name")->valuestring,
                            .top = cJSON_GetObjectItem(run, "top10"),
                            .ids = cJSON_GetObjectItem(run, "gen_ids"),
                            .margins = cJSON_GetObjectItem(run, "margin")};

    if (!answer.ids)
        answer.ids = cJSON_GetObjectItem(prompt, "gen_ids");
    answer.count = (uint32_t)cJSON_GetArraySize(answer.ids);
    return answer;
}

static void check_prompt(struct engine *engine, const cJSON *prompt, float *worst,
                         uint32_t *steps) {
    static uint32_t ids[IDS_MAX];
    struct answer answer = read_answer(prompt);
    uint32_t count = read_ids(cJSON_GetObjectItem(prompt, "prompt_ids"), ids);
    struct session *session = support_engine_session(engine, answer.name, IMAGE_RECIPE_BF16);
    struct margins margins = {.count = 0};
    struct session_info info;
    float difference;
    uint32_t compared;

    support_engine_feed(session, ids, count);
    difference = compare_top(answer.top, session_logits(session));
    take_margin(&margins, count - 1, session_logits(session));
    session_observe(session, take_margin, &margins);
    support_engine_generate(session, answer.count);
    session_info(session, &info);
    compared = compare_greedy(&answer, info.ids + count, &margins);
    printf("%-16s %5u tokens: top-10 logits within %.4f, %u of %u greedy steps equal\n",
           answer.name, count, (double)difference, compared, answer.count);
    if (difference > LOGIT_BOUND)
        fail_msg("%s: a top-10 logit differs by %f", answer.name, (double)difference);
    *worst = difference > *worst ? difference : *worst;
    *steps += compared;
    session_drop(session);
}

static void answers_equal_the_reference(void **state) {
    struct support_engine_options options = support_engine_default();
    struct engine *engine;
    cJSON *oracle;
    const cJSON *prompt;
    float worst = 0;
    uint32_t steps = 0, prompts = 0;

    (void)state;
    options.threads = 2;
    options.slots = 1600;
    engine = support_engine_real(&options);
    oracle = read_oracle();
    cJSON_ArrayForEach(prompt, cJSON_GetObjectItem(oracle, "prompts")) {
        if (testing_quick() &&
            cJSON_GetArraySize(cJSON_GetObjectItem(prompt, "prompt_ids")) > QUICK_TOKENS)
            continue;
        check_prompt(engine, prompt, &worst, &steps);
        prompts++;
    }
    printf("%u prompts: top-10 logits within %.4f, %u greedy steps equal\n", prompts, (double)worst,
           steps);
    assert_true(prompts >= (testing_quick() ? 12 : 16));
    assert_true(steps >= 100);
    cJSON_Delete(oracle);
    engine_close(engine);
}

TESTING_MAIN(cmocka_unit_test(answers_equal_the_reference))
