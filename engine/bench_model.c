/* engine/bench_model.c - how fast prefill and decode run, and where the time goes.
 *
 * Responsible for: driving one session and reading clock and profile around it.
 * Not responsible for: printing.
 */
#include "engine/bench_model.h"

#include "engine/engine_inner.h"

#include <assert.h>
#include <string.h>

_Static_assert((int)DEVICE_CLASS_COUNT <= (int)BENCH_MODEL_CLASSES_MAX, "room for every class");

/* Per row at a depth: every weight once, and q·k and p·v over all tokens before it. */
static uint64_t flops_of(const struct engine_model *model, uint64_t first, uint64_t count,
                         int logits) {
    const struct layout_geometry *g = &model->geometry;
    uint64_t q_width = (uint64_t)model->q_heads * g->head_dim;
    uint64_t kv_width = (uint64_t)g->kv_heads * g->head_dim;
    uint64_t layer = model->hidden * (2 * q_width + 2 * kv_width + 3ull * model->ffn);
    uint64_t head = (uint64_t)model->hidden * model->vocab_count;
    uint64_t seen = count * first + count * (count + 1) / 2;

    return 2 * (count * layer * g->layers + (logits ? count * head : 0)) +
           4 * seen * q_width * g->layers;
}

struct timing {
    struct session *session;
    struct engine_event *events;
    const uint32_t *ids;
    const struct bench_model_options *options;
};

/* What stands at the last depth, its decoded tokens included, is all. */
static void tell(const struct timing *timing) {
    const struct bench_model_options *options = timing->options;
    uint32_t all = options->depths[options->depth_count - 1] + options->decode_tokens;

    if (options->progress)
        options->progress(options->context, (uint32_t)timing->session->n_kv, all);
}

static enum kv_err run_until_idle(const struct timing *timing, struct kv_diag *diag) {
    uint32_t count = 1;

    while (count) {
        enum kv_err err = engine_step(timing->session->engine, timing->events, &count, diag);
        if (err != KV_OK)
            return err;
        for (uint32_t i = 0; i < count; i++)
            if (timing->events[i].session == timing->session &&
                timing->events[i].kind == ENGINE_FAILED)
                return timing->events[i].err;
        tell(timing);
    }
    return KV_OK;
}

/* Feeds `count` tokens, `each` at a time. */
static enum kv_err drive(const struct timing *timing, uint32_t count, uint32_t each,
                         struct bench_model_phase *phase, struct kv_diag *diag) {
    struct session *session = timing->session;
    struct engine *engine = session->engine;
    const struct kv_clock *clock = engine->settings.clock;
    uint64_t first = session->n_kv, begin_ns;
    enum kv_err err = KV_OK;

    device_profile_reset(engine->device);
    begin_ns = kv_clock_now_ns(clock);
    for (uint32_t done = 0, part; done < count && err == KV_OK; done += part) {
        part = count - done < each ? count - done : each;
        err = session_feed(session, timing->ids + first + done, part, IMAGE_RAW, diag);
        if (err == KV_OK)
            err = run_until_idle(timing, diag);
    }
    phase->ns = kv_clock_now_ns(clock) - begin_ns;
    phase->tokens = session->n_kv - first;
    phase->flops = flops_of(&engine->model, first, phase->tokens, each == 1);
    memcpy(phase->class_ns, engine->device->busy_ns, sizeof engine->device->busy_ns);
    return err;
}

static void measure_rate(struct engine *engine, uint64_t iterations,
                         struct bench_model_result *result) {
    uint64_t begin_ns = kv_clock_now_ns(engine->settings.clock);

    result->rate_flops = device_fma_rate(engine->device, iterations);
    result->rate_ns = kv_clock_now_ns(engine->settings.clock) - begin_ns;
}

static enum kv_err check(const struct bench_model_options *options, struct kv_diag *diag) {
    uint64_t needed = (uint64_t)options->depths[options->depth_count - 1] + options->decode_tokens;

    for (uint32_t i = 1; i < options->depth_count; i++)
        if (options->depths[i] < options->depths[i - 1] + options->decode_tokens)
            return kv_diag_set(diag, KV_ERR_INVALID, "depth %u is too near to the one before",
                               options->depths[i]);
    if (options->id_count < needed + 1)
        return kv_diag_set(diag, KV_ERR_INVALID, "%llu tokens of text are needed, %u are there",
                           (unsigned long long)needed + 1, options->id_count);
    return KV_OK;
}

enum kv_err bench_model(struct engine *engine, const struct bench_model_options *options,
                        struct bench_model_result *result_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = engine->settings.alloc;
    struct session_settings settings = {
        .name = "bench model", .policy = options->policy, .sampler = {.top_p = 1, .top_k = 1}};
    struct timing timing = {.ids = options->ids, .options = options};
    struct bench_model_result result = {.depth_count = options->depth_count,
                                        .class_count = DEVICE_CLASS_COUNT,
                                        .threads = engine->settings.threads};
    enum kv_err err;

    assert(options->depth_count >= 1 && options->depth_count <= BENCH_MODEL_DEPTHS_MAX);
    KV_TRY(check(options, diag));
    timing.events =
        kv_alloc_zeroed(alloc, 2 * engine->settings.sessions_max + 1, sizeof *timing.events);
    if (!timing.events)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for events");
    KV_TRY(session_create(engine, &settings, &timing.session, diag));
    for (uint32_t i = 0; i < options->depth_count; i++) {
        struct bench_model_depth *depth = &result.depths[i];
        uint64_t target = options->depths[i] ? options->depths[i] : 1;
        depth->depth = options->depths[i];
        KV_TRY(drive(&timing, (uint32_t)(target - timing.session->n_kv), UINT32_MAX,
                     &depth->prefill, diag));
        KV_TRY(drive(&timing, options->decode_tokens, 1, &depth->decode, diag));
    }
    for (uint32_t i = 0; i < DEVICE_CLASS_COUNT; i++)
        result.class_names[i] = device_class_name((enum device_class)i);
    measure_rate(engine, options->rate_iterations, &result);
    *result_out = result;
done:
    if (timing.session)
        session_drop(timing.session);
    kv_alloc_release(alloc, timing.events);
    return err;
}
