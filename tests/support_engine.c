/* tests/support_engine.c - an engine with a model, and the small loops that tests of it repeat.
 *
 * Responsible for: what support_engine.h says.
 * Not responsible for: what is compared.
 */
#include "tests/support_engine.h"

#include "engine/model/synth.h"
#include "engine/model/tokenizer.h"
#include "kernels/ops.h"
#include "tests/support_tiny_model.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdlib.h>

struct support_engine_options support_engine_default(void) {
    return (struct support_engine_options){
        .simd = ENGINE_SIMD_AUTO, .threads = 1, .sessions_max = 8, .slots = 2000};
}

static struct engine *open_engine(const struct support_engine_options *options,
                                  const struct layout_geometry *geometry, const uint8_t *file,
                                  size_t size) {
    struct engine_settings settings = {.alloc = options->alloc ? options->alloc : kv_alloc_system(),
                                       .clock = kv_clock_system(),
                                       .hooks = options->hooks,
                                       .simd = options->simd,
                                       .threads = options->threads,
                                       .sessions_max = options->sessions_max,
                                       .reserve_slots = options->reserve,
                                       .poison_free_slots = options->poison,
                                       .shuffle_seed = options->shuffle_seed};
    struct engine *engine = NULL;
    struct kv_diag diag = {""};

    settings.slot_budget_bytes =
        options->slots / 8 * (8 * layout_slot_bytes(geometry) + layout_meta_frame_bytes(geometry));
    if (engine_open(&settings, file, size, &engine, &diag) != KV_OK)
        fail_msg("engine_open: %s", diag.text);
    return engine;
}

struct engine *support_engine_tiny(const struct support_engine_options *options) {
    struct tiny_model_options model = tiny_model_default();
    struct layout_geometry geometry = {model.layers, model.kv_heads, model.head_dim};
    size_t size;
    uint8_t *file = tiny_model_make(&model, &size);
    struct engine *engine;

    assert_non_null(file);
    engine = open_engine(options, &geometry, file, size);
    tiny_model_drop(file);
    return engine;
}

struct engine *support_engine_real(const struct support_engine_options *options) {
    const struct layout_geometry geometry = {30, 3, 64};
    size_t size;
    uint8_t *file;
    struct engine *engine;

    testing_need_model();
    file = tiny_model_read_real(&size);
    assert_non_null(file);
    engine = open_engine(options, &geometry, file, size);
    tiny_model_drop(file);
    return engine;
}

struct engine *support_engine_synth(const struct support_engine_options *options,
                                    const char *name) {
    struct layout_geometry geometry;
    struct kv_diag diag = {""};
    struct engine *engine;
    struct synth synth;
    uint8_t *file = NULL;
    uint64_t size = 0;

    if (synth_parse(name, &synth, &diag) != KV_OK ||
        synth_make(&synth, kv_alloc_system(), &file, &size, &diag) != KV_OK)
        fail_msg("%s: %s", name, diag.text);
    geometry = (struct layout_geometry){synth.layers, synth.kv_heads, 128};
    engine = open_engine(options, &geometry, file, size);
    kv_alloc_release(kv_alloc_system(), file);
    return engine;
}

struct session_settings support_engine_greedy(const char *name, enum image_recipe recipe) {
    struct image_policy policy = {.recipe = recipe, .age_count = 1, .ages = {32768}};

    if (recipe == IMAGE_RECIPE_FP8 || recipe == IMAGE_RECIPE_V1)
        policy = (struct image_policy){.recipe = recipe};
    return (struct session_settings){
        .name = name,
        .policy = policy,
        .sampler = {.temperature = 0, .top_p = 1, .top_k = 1 << 30, .seed = 1}};
}

struct session *support_engine_session(struct engine *engine, const char *name,
                                       enum image_recipe recipe) {
    struct session_settings settings = support_engine_greedy(name, recipe);
    struct session *session = NULL;
    struct kv_diag diag = {""};

    if (session_create(engine, &settings, &session, &diag) != KV_OK)
        fail_msg("session_create: %s", diag.text);
    return session;
}

void support_engine_ids(uint64_t seed, uint32_t vocab, uint32_t *ids_out, uint32_t count) {
    struct testing_random random;

    testing_random_init(&random, seed);
    for (uint32_t i = 0; i < count; i++)
        ids_out[i] = (uint32_t)testing_random_below(&random, vocab);
}

void support_engine_run(struct engine *engine) {
    static struct engine_event events[2 * 1024 + 1];
    uint32_t count = 1;

    while (count) {
        struct kv_diag diag = {""};
        assert_int_equal(engine_step(engine, events, &count, &diag), KV_OK);
        for (uint32_t i = 0; i < count; i++)
            if (events[i].kind == ENGINE_FAILED)
                fail_msg("step: %s", diag.text);
    }
}

void support_engine_feed(struct session *session, const uint32_t *ids, uint32_t count) {
    struct kv_diag diag = {""};

    if (session_feed(session, ids, count, IMAGE_USER, &diag) != KV_OK)
        fail_msg("session_feed: %s", diag.text);
    support_engine_run(session_engine(session));
}

void support_engine_generate(struct session *session, uint32_t count) {
    struct kv_diag diag = {""};

    if (session_generate(session, count, &diag) != KV_OK)
        fail_msg("session_generate: %s", diag.text);
    support_engine_run(session_engine(session));
}
