/* tests/gpu_prompts.c - a prompt beside decoding sessions on a GPU: each has the bits it has alone.
 *
 * Responsible for: chunks beside 0, 1, 2 and 9 single rows, every logit of the prompt and of one of
 * the sessions compared, on a model whose chunks go through cuBLASLt and on one too small for it.
 * Not responsible for: whether the bits are right (gpu_dense.cu, gpu_engine.c).
 *
 * Both models are random and made in memory. Where there is no GPU the processor computes.
 */
#include "engine/engine_inner.h"
#include "tests/support_engine.h"
#include "tests/support_tiny_model.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { SESSIONS = 9, PROMPT = 1200, CHUNKS = 5, TOKENS = 24 };

static struct engine *open_engine(const struct tiny_model_options *model) {
    struct engine_settings settings = {.alloc = kv_alloc_system(),
                                       .clock = kv_clock_system(),
                                       .device = ENGINE_DEVICE_AUTO,
                                       .device_memory_bytes = UINT64_MAX,
                                       .graphs = 1,
                                       .threads = 2,
                                       .sessions_max = SESSIONS + 1,
                                       .slot_budget_bytes = UINT64_C(512) << 20,
                                       .poison_free_slots = 1,
                                       .shuffle_seed = testing_seed("shuffle", 4711)};
    struct engine *engine = NULL;
    struct kv_diag diag = {""};
    size_t size;
    uint8_t *file = tiny_model_make(model, &size);

    assert_non_null(file);
    support_wall_set(0);
    if (engine_open(&settings, file, size, &engine, &diag) != KV_OK)
        fail_msg("engine_open: %s", diag.text);
    tiny_model_drop(file);
    return engine;
}

/* Digest of the logits of every row. */
struct trace {
    uint32_t vocab, rows;
    struct kv_digest_state state;
};

static void take_row(void *context, uint64_t position, const float *logits) {
    struct trace *trace = context;

    (void)position;
    kv_digest_update(&trace->state, logits, trace->vocab * sizeof *logits);
    trace->rows++;
}

static void watch(struct session *session, struct trace *trace) {
    struct engine_model model;

    engine_model(session_engine(session), &model);
    *trace = (struct trace){.vocab = model.vocab_count};
    kv_digest_init(&trace->state);
    session_observe(session, take_row, trace);
}

/* Down the ladder to its last tier within a prompt. */
static struct session *make_session(struct engine *engine, const char *name) {
    struct session_settings settings = support_engine_greedy(name, IMAGE_RECIPE_V3);
    struct session *session = NULL;
    struct kv_diag diag = {""};

    settings.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {300, 400, 500}};
    if (session_create(engine, &settings, &session, &diag) != KV_OK)
        fail_msg("session_create: %s", diag.text);
    return session;
}

static void feed(struct session *session, uint64_t seed, uint32_t count, int wait) {
    struct engine_model model;
    uint32_t ids[PROMPT];

    engine_model(session_engine(session), &model);
    support_engine_ids(seed, model.vocab_count, ids, count);
    assert_int_equal(session_feed(session, ids, count, IMAGE_USER, NULL), KV_OK);
    if (wait)
        support_engine_run(session_engine(session));
}

struct beside {
    struct kv_digest prompt, decoded;
};

static struct beside run_beside(struct engine *engine, uint32_t count) {
    struct session *sessions[SESSIONS] = {NULL}, *prompt;
    struct trace prompts = {0}, decoded = {0};

    for (uint32_t i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%u", i);
        sessions[i] = make_session(engine, name);
        feed(sessions[i], 100 + i, 900 - 90 * i, 1);
    }
    prompt = make_session(engine, "prompt");
    watch(prompt, &prompts);
    if (count)
        watch(sessions[0], &decoded);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(session_generate(sessions[i], TOKENS, NULL), KV_OK);
    feed(prompt, 99, PROMPT, 1);
    /* An end token stops a session early, but at the same place every time. */
    assert_int_equal(prompts.rows, PROMPT);
    assert_true(count == 0 || decoded.rows >= CHUNKS);
    session_drop(prompt);
    for (uint32_t i = 0; i < count; i++)
        session_drop(sessions[i]);
    return (struct beside){kv_digest_final(&prompts.state),
                           count ? kv_digest_final(&decoded.state) : (struct kv_digest){{0}}};
}

static void same(const struct kv_digest *a, const struct kv_digest *b) {
    assert_memory_equal(a->bytes, b->bytes, sizeof a->bytes);
}

static void compare(struct engine *engine) {
    struct beside none = run_beside(engine, 0), one = run_beside(engine, 1);

    same(&none.prompt, &one.prompt);
    for (uint32_t count = 2; count <= SESSIONS; count += SESSIONS - 2) {
        struct beside more = run_beside(engine, count);
        same(&none.prompt, &more.prompt);
        same(&one.decoded, &more.decoded);
    }
    engine_close(engine);
}

/* 4.2 million weights and more in every launch. */
static void prompts_through_the_library(void **state) {
    struct tiny_model_options model = tiny_model_default();
    char reason[DEVICE_TEXT_BYTES + 32] = "";
    struct engine *engine;
    const char *details;

    (void)state;
    model.heads = 16, model.kv_heads = 4, model.head_dim = 128;
    model.ffn = 2048;
    model.matrix_type = GGUF_TYPE_Q8_0;
    engine = open_engine(&model);
    details = engine->device->details;
    printf("%s%s\n%s", engine->device->name, engine->device->note, details);
    if (engine->device->note[0] != 0)
        snprintf(reason, sizeof reason, "chunks by cuBLASLt: %s", engine->device->note);
    else if (strcmp(engine->device->simd_name, "cuda") == 0) {
        assert_non_null(strstr(details, "cublaslt "));
        assert_non_null(strstr(details, "2048 x 2048: "));
        assert_null(strstr(details, "none"));
    }
    compare(engine);
    if (reason[0] != 0) /* our own kernels have read the prompts */
        testing_skip(reason);
}

static void prompts_through_our_kernels(void **state) {
    struct tiny_model_options model = tiny_model_default();

    (void)state;
    compare(open_engine(&model));
}

TESTING_MAIN(cmocka_unit_test(prompts_through_the_library),
             cmocka_unit_test(prompts_through_our_kernels))
