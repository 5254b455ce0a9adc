/* tests/gpu_engine.c - the whole engine on a GPU beside the same engine on the processor.
 *
 * Responsible for: append and the check of values byte for byte, the reference prompts teacher-
 * forced on both devices, equal bits whatever the batch and with recorded steps or without, sleep
 * and wake on the GPU against a session that stayed, snapshots that change the device; times as
 * JSON. Freed slots are poisoned and slots shuffled throughout.
 * Not responsible for: single kernels (gpu_parity.cu, gpu_dense.cu), prompts beside other sessions
 * (gpu_prompts.c). Ends with `N passed, N failed`.
 *
 * Usage: gpu_engine MODEL ORACLE.json OUT.json COMMIT [cpu|quick], from any folder; `cpu` puts the
 * processor in the GPU's place, to try the program itself; `quick` does a little of each, for
 * compute-sanitizer.
 */
#include "engine/engine_inner.h"
#include "engine/model/sampler.h"
#include "tests/support_gpu.h"
#include "tests/support_tally.h"
#include "tools/service.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { IDS_MAX = 8192, EVENTS_MAX = 256, SESSIONS = 9, ROWS_MAX = 4096, LONG_TOKENS = 6000 };

static FILE *results;
static const char *model_path;
static int quick;
static enum engine_device the_gpu = ENGINE_DEVICE_CUDA;
static struct engine_event events[EVENTS_MAX];

/* --- engines */

struct opening {
    enum engine_device device;
    int graphs;
    uint64_t shuffle;
};

static struct engine *open_engine(struct opening opening) {
    struct engine_settings settings = {.alloc = kv_alloc_system(),
                                       .clock = kv_clock_system(),
                                       .device = opening.device,
                                       .device_memory_bytes = UINT64_MAX,
                                       .graphs = opening.graphs,
                                       .simd = ENGINE_SIMD_AUTO,
                                       .threads = 16,
                                       .sessions_max = 64,
                                       .slot_budget_bytes = UINT64_C(1500) << 20,
                                       .poison_free_slots = 1,
                                       .shuffle_seed = opening.shuffle};
    struct kv_diag diag = {""};
    struct engine *engine = NULL;
    uint8_t *model = NULL;
    uint64_t bytes = 0;
    double begun = tally_seconds();

    tally_need(service_read_model(model_path, kv_alloc_system(), &model, &bytes, &diag), &diag,
               "model");
    tally_need(engine_open(&settings, model, bytes, &engine, &diag), &diag, "engine_open");
    kv_alloc_release(kv_alloc_system(), model);
    struct engine_model info;
    engine_model(engine, &info);
    printf("     opened on %s in %.2f s, graphs %d\n", info.device_name, tally_seconds() - begun,
           opening.graphs);
    return engine;
}

/* How a session keeps its KV: as it is, at K8V4 throughout (the default within this context), down
 * the ladder to K6V2, or in the control codes. */
enum keeping { KEEP_BF16, KEEP_K8V4, KEEP_LADDER, KEEP_FP8, KEEP_V1, KEEP_COUNT };
static const char *const keeping_names[] = {"bf16", "k8v4", "ladder", "fp8", "v1"};
static const enum image_recipe keeping_recipes[] = {
    IMAGE_RECIPE_BF16, IMAGE_RECIPE_V3, IMAGE_RECIPE_V3, IMAGE_RECIPE_FP8, IMAGE_RECIPE_V1};

static struct session *make_session(struct engine *engine, const char *name, enum keeping keeping) {
    struct session_settings settings = {
        .name = name,
        .policy = {.recipe = keeping_recipes[keeping], .age_count = keeping == KEEP_LADDER ? 3 : 0},
        .sampler = {.temperature = 0, .top_p = 1, .top_k = 1, .seed = 1}};
    const uint64_t ages[] = {512, 1024, 1536};
    struct session *session = NULL;
    struct kv_diag diag = {""};

    memcpy(settings.policy.ages, ages, settings.policy.age_count * sizeof ages[0]);
    tally_need(session_create(engine, &settings, &session, &diag), &diag, "session_create");
    return session;
}

/* Until nothing is to do; the steps that did something. */
static uint32_t run(struct engine *engine) {
    struct kv_diag diag = {""};
    uint32_t count = 1, steps = 0;

    while (count) {
        tally_need(engine_step(engine, events, &count, &diag), &diag, "engine_step");
        steps += count > 0;
        for (uint32_t i = 0; i < count; i++)
            if (events[i].kind == ENGINE_FAILED)
                tally_need(events[i].err, &diag, "a step");
    }
    return steps;
}

static void feed(struct session *session, const uint32_t *ids, uint32_t count) {
    struct kv_diag diag = {""};

    tally_need(session_feed(session, ids, count, IMAGE_USER, &diag), &diag, "session_feed");
    (void)run(session_engine(session));
}

/* --- single operations behind the door */

static struct device *open_device(enum engine_device kind) {
    struct device_host_settings host = {kv_alloc_system(), kv_clock_system(), DEVICE_SIMD_AUTO, 4};
    struct device_cuda_settings cuda = {kv_alloc_system(), kv_clock_system(), 0,
                                        UINT64_MAX,        (uint64_t)1 << 30, 1};
    struct device *device = NULL;
    struct kv_diag diag = {""};

    tally_need(kind == ENGINE_DEVICE_CUDA ? device_cuda_open(&cuda, &device, &diag)
                                          : device_host_open(&host, &device, &diag),
               &diag, "device");
    return device;
}

static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* Appends of random rows into one page; the digest of all slots. */
static struct kv_digest try_append(enum engine_device kind, struct layout_geometry geometry) {
    enum { SLOTS = 32, ROWS = 300 };
    struct device *device = open_device(kind);
    uint64_t slots_bytes = SLOTS * layout_slot_bytes(&geometry), random = 5;
    uint64_t chunk_bytes =
        2ull * geometry.layers * geometry.kv_heads * ROWS * geometry.head_dim * sizeof(uint16_t);
    uint16_t *chunk = malloc(chunk_bytes);
    uint8_t *slots = malloc(slots_bytes);
    uint8_t *chunk_at = device_get(device, chunk_bytes), *at = device_get(device, slots_bytes);
    struct device_copy in = {chunk_at, chunk, chunk_bytes}, out = {slots, at, slots_bytes};
    struct kvops_append args = {
        .pool = {geometry, at, at}, .chunk = (const uint16_t *)chunk_at, .chunk_rows = ROWS};

    for (uint64_t i = 0; i < chunk_bytes / 2; i++)
        chunk[i] = (uint16_t)next_random(&random);
    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++)
        args.page.slot[i] = (i * 5 + 3) % SLOTS;
    void *const parts[] = {at};
    const struct device_fill all = {parts, 1, 0x7fff, slots_bytes};
    device_fill(device, &all);
    tally_check(device_copy_in(device, DEVICE_STEP, &in, 1) == KV_OK, "copy in");
    for (uint32_t i = 0; i < 20; i++) {
        args.page_token = next_random(&random) % LAYOUT_PAGE_TOKENS;
        args.count = 1 + next_random(&random) % (LAYOUT_PAGE_TOKENS - args.page_token);
        args.first_row = next_random(&random) % (ROWS - args.count);
        (void)device_append(device, &args);
    }
    tally_check(device_copy_out(device, DEVICE_STEP, &out, 1) == KV_OK, "copy out");
    struct kv_digest digest = kv_digest_of(slots, slots_bytes);
    struct device_extent extent = {.part_bytes = layout_slot_raw_bytes(&geometry), .part_count = 8};
    struct kv_digest_state state;
    struct kv_digest here, there;
    kv_digest_init(&state);
    for (uint32_t i = 0; i < 8; i++) {
        extent.part[i] = at + i * layout_slot_bytes(&geometry);
        kv_digest_update(&state, slots + i * layout_slot_bytes(&geometry), extent.part_bytes);
    }
    here = kv_digest_final(&state);
    tally_check(device_digest(device, DEVICE_CHECK, &extent, 1, &there) == KV_OK &&
                    kv_digest_equal(&here, &there),
                "digest where the bytes lie");
    device_put(device, chunk_at);
    device_put(device, at);
    device_close(device);
    free(chunk);
    free(slots);
    return digest;
}

static void test_finite(void) {
    enum { ROWS = 64, WIDTH = 577 };
    static float x[ROWS][WIDTH];
    static int32_t marks[ROWS];
    static const uint32_t odd[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0, 0x7f800001};
    struct device *device = open_device(the_gpu);
    uint8_t *x_at = device_get(device, sizeof x), *marks_at = device_get(device, sizeof marks);
    struct device_copy in[2] = {{x_at, x, sizeof x}, {marks_at, marks, sizeof marks}};
    struct device_copy out = {marks, marks_at, sizeof marks};
    struct ops_finite args = {(float *)x_at, (int32_t *)marks_at, WIDTH, ROWS, WIDTH, 7};
    int good = 1;

    for (uint32_t i = 0; i < ROWS; i++) {
        marks[i] = i % 5 == 4 ? 3 : -1;
        memcpy(&x[i][(i * 41) % WIDTH], &odd[i % 6], 4);
    }
    (void)device_copy_in(device, DEVICE_STEP, in, 2);
    device_finite(device, &args);
    (void)device_copy_out(device, DEVICE_STEP, &out, 1);
    for (uint32_t i = 0; i < ROWS; i++) {
        int bad = i % 6 != 3 && i % 6 != 4;
        good &= marks[i] == (i % 5 == 4 ? 3 : bad ? 7 : -1);
    }
    tally_check(good, "values that are not finite are marked once");
    device_close(device);
}

static void test_operations(void) {
    static const struct layout_geometry geometries[] = {{30, 3, 64}, {4, 8, 128}, {5, 1, 64}};

    for (size_t i = 0; i < sizeof geometries / sizeof geometries[0]; i++) {
        struct kv_digest host = try_append(ENGINE_DEVICE_CPU, geometries[i]);
        struct kv_digest gpu = try_append(the_gpu, geometries[i]);
        tally_check(kv_digest_equal(&host, &gpu), "append has the bytes of the host twin");
    }
    test_finite();
}

/* --- teacher-forced */

struct forced {
    uint32_t vocab;
    uint32_t *best; /* [row] of the host */
    float *margin;  /* [row] of the host */
    float *kept;    /* [row][KEPT] logits of the host, for the largest difference */
    uint32_t count, same, bad;
    double worst, worst_margin;
    float bound;
    int gpu;
};
enum { KEPT = 64 };

static void take_forced(void *context, uint64_t position, const float *logits) {
    struct forced *forced = context;
    struct sampler_row row = {logits, forced->vocab, position};
    struct sampler_candidate top[2] = {{0}};
    uint32_t at = forced->count++;

    if (at >= ROWS_MAX)
        exit(2);
    (void)sampler_top(&row, 2, top, NULL);
    for (uint32_t i = 0; i < KEPT; i++) {
        float value = logits[i * (forced->vocab / KEPT)];
        double difference = fabs((double)value - (double)forced->kept[at * KEPT + i]);
        if (forced->gpu && !(difference <= forced->worst))
            forced->worst = difference;
        if (!forced->gpu)
            forced->kept[at * KEPT + i] = value;
    }
    if (!forced->gpu) {
        forced->best[at] = top[0].id;
        forced->margin[at] = top[0].logit - top[1].logit;
        return;
    }
    forced->same += top[0].id == forced->best[at];
    if (top[0].id != forced->best[at]) {
        forced->bad += !(forced->margin[at] < forced->bound);
        if ((double)forced->margin[at] > forced->worst_margin)
            forced->worst_margin = (double)forced->margin[at];
    }
}

static uint32_t read_ids(const cJSON *array, uint32_t *ids) {
    uint32_t count = 0;
    const cJSON *id;

    cJSON_ArrayForEach(id, array) ids[count++] = (uint32_t)id->valueint;
    return count;
}

static void force(struct engine *engine, const cJSON *prompt, enum keeping keeping,
                  struct forced *forced) {
    static uint32_t ids[IDS_MAX];
    uint32_t count = read_ids(cJSON_GetObjectItem(prompt, "prompt_ids"), ids);
    uint32_t more = read_ids(cJSON_GetObjectItem(prompt, "gen_ids"), ids + count);
    struct session *session = make_session(engine, "forced", keeping);

    forced->count = 0;
    session_observe(session, take_forced, forced);
    feed(session, ids, count);
    for (uint32_t i = 0; i < more; i++)
        feed(session, ids + count + i, 1); /* a row of its own, as decode has it */
    session_drop(session);
}

static void test_forced(struct engine *host, struct engine *gpu, const cJSON *oracle,
                        enum keeping keeping) {
    const char *name = keeping_names[keeping];
    struct engine_model model;
    /* Where codes are coarse both devices are far from BF16 in directions of their own. */
    struct forced forced = {.bound = keeping >= KEEP_LADDER ? 0.5f : 0.3f};
    uint64_t rows = 0, same = 0, bad = 0;
    double host_s = 0, gpu_s = 0;
    const cJSON *prompt;
    char what[160];

    engine_model(host, &model);
    forced.vocab = model.vocab_count;
    forced.best = calloc(ROWS_MAX, sizeof *forced.best);
    forced.margin = calloc(ROWS_MAX, sizeof *forced.margin);
    forced.kept = calloc((size_t)ROWS_MAX * KEPT, sizeof *forced.kept);
    cJSON_ArrayForEach(prompt, cJSON_GetObjectItem(oracle, "prompts")) {
        double begun = tally_seconds();
        int tokens = cJSON_GetArraySize(cJSON_GetObjectItem(prompt, "prompt_ids"));
        /* Below 576 tokens no block is sealed. */
        if ((keeping != KEEP_BF16 && tokens < 576) || (quick && (tokens < 1000 || tokens > 1100)))
            continue;
        forced.gpu = 0;
        force(host, prompt, keeping, &forced);
        host_s += tally_seconds() - begun;
        begun = tally_seconds();
        forced.gpu = 1;
        forced.same = forced.bad = 0;
        force(gpu, prompt, keeping, &forced);
        gpu_s += tally_seconds() - begun;
        rows += forced.count;
        same += forced.same;
        bad += forced.bad;
    }
    double share = (double)same / (double)rows;
    printf("     %s: %llu rows, top-1 equal %.3f %%, largest margin of a difference %.4f, largest "
           "difference of a logit %.4f, host %.1f s, GPU %.1f s\n",
           name, (unsigned long long)rows, 100 * share, forced.worst_margin, forced.worst, host_s,
           gpu_s);
    fprintf(results,
            " \"forced_%s\": {\"rows\": %llu, \"top1_equal\": %.5f, \"margin_of_differences_max\": "
            "%.4f, \"logit_difference_max\": %.4f, \"host_s\": %.2f, \"gpu_s\": %.2f},\n",
            name, (unsigned long long)rows, share, forced.worst_margin, forced.worst, host_s,
            gpu_s);
    snprintf(what, sizeof what, "%s: top-1 equal in at least 98 %% of rows", name);
    tally_check(share >= 0.98, what);
    snprintf(what, sizeof what, "%s: every difference has a margin below %s", name,
             keeping >= KEEP_LADDER ? "0.5" : "0.3");
    tally_check(bad == 0, what);
    free(forced.best);
    free(forced.margin);
    free(forced.kept);
}

/* --- equal bits */

struct trace {
    uint32_t vocab;
    struct kv_digest_state state;
    uint32_t rows;
};

static void take_trace(void *context, uint64_t position, const float *logits) {
    struct trace *trace = context;

    (void)position;
    kv_digest_update(&trace->state, logits, trace->vocab * sizeof *logits);
    trace->rows++;
}

static void begin_trace(struct trace *trace, struct engine *engine) {
    struct engine_model model;

    engine_model(engine, &model);
    trace->vocab = model.vocab_count;
    trace->rows = 0;
    kv_digest_init(&trace->state);
}

static uint32_t text_ids[IDS_MAX];

static double tell_steps(const struct engine *engine, uint32_t count, uint32_t steps, double took) {
    const uint64_t *busy_ns = engine->device->busy_ns;
    double enqueued = 0;

    for (uint32_t i = 0; i < DEVICE_WAIT; i++)
        enqueued += (double)busy_ns[i] * 1e-3 / steps;
    printf("     batch %u: %u steps of %.0f us: waiting %.0f, enqueuing %.0f, the rest is the "
           "processor's\n",
           count, steps, took * 1e6 / steps, (double)busy_ns[DEVICE_WAIT] * 1e-3 / steps, enqueued);
    return steps / took;
}

/* `count` sessions of different lengths prefilled, then all decode beside each other; the digest of
 * every decoded row of the first, and of its tokens when nobody looks: then they are chosen from
 * the best few that the device sends, or from whole rows in an engine that records nothing. */
static struct kv_digest decode_beside(struct engine *engine, uint32_t count, uint32_t tokens,
                                      double *rate_out) {
    struct session *sessions[SESSIONS];
    struct kv_diag diag = {""};
    struct trace trace;
    double begun, took = 0;
    uint32_t steps = 0;

    for (uint32_t i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%u", i);
        sessions[i] = make_session(engine, name, KEEP_LADDER);
        feed(sessions[i], text_ids + 37 * i, 1900 - 190 * i);
    }
    begin_trace(&trace, engine);
    session_observe(sessions[0], take_trace, &trace);
    /* Sessions end at different steps, and the first times some forms are recorded. */
    for (uint32_t round = 0; round < 4; round++) {
        if (round == 2)
            session_observe(sessions[0], NULL, NULL);
        for (uint32_t i = 0; i < count; i++) {
            session_whole_rows(sessions[i], !engine->settings.graphs);
            if (round)
                feed(sessions[i], text_ids + 4000 + 16 * i, 16);
        }
        for (uint32_t i = 0; i < count; i++)
            tally_need(session_generate(sessions[i], tokens, &diag), &diag, "session_generate");
        device_profile_reset(engine->device);
        begun = tally_seconds();
        steps = run(engine);
        took = tally_seconds() - begun;
    }
    kv_digest_update(&trace.state, sessions[0]->ids, sessions[0]->n * sizeof(uint32_t));
    if (rate_out)
        *rate_out = tell_steps(engine, count, steps, took);
    for (uint32_t i = 0; i < count; i++)
        session_drop(sessions[i]);
    return kv_digest_final(&trace.state);
}

static void test_bits(struct engine *gpu) {
    double rate[4] = {0};
    uint32_t tokens = quick ? 8 : 64;
    struct kv_digest alone = decode_beside(gpu, 1, tokens, &rate[0]);
    struct kv_digest two = decode_beside(gpu, 2, tokens, &rate[1]);
    struct kv_digest nine = decode_beside(gpu, 9, tokens, &rate[2]);
    struct engine *calls = open_engine((struct opening){the_gpu, 0, 99});
    struct kv_digest called = decode_beside(calls, 1, tokens, &rate[3]);
    struct kv_digest called_nine = decode_beside(calls, 9, tokens, NULL);

    engine_close(calls);
    tally_check(kv_digest_equal(&alone, &two), "batch of 2: the bits of batch 1");
    tally_check(kv_digest_equal(&alone, &nine), "batch of 9: the bits of batch 1");
    tally_check(kv_digest_equal(&alone, &called), "without recorded steps: the same bits");
    tally_check(kv_digest_equal(&alone, &called_nine),
                "without recorded steps, batch of 9: the same");
    printf("     steps per second: batch 1 %.0f, 2 %.0f, 9 %.0f; batch 1 call by call %.0f\n",
           rate[0], rate[1], rate[2], rate[3]);
    fprintf(results,
            " \"decode_steps_per_second\": {\"batch_1\": %.1f, \"batch_2\": %.1f, \"batch_9\": "
            "%.1f, \"batch_1_call_by_call\": %.1f},\n",
            rate[0], rate[1], rate[2], rate[3]);
}

/* --- questions in pieces, between which others step */

struct pieces {
    struct session *talking;
    _Atomic uint64_t rows; /* the sum of their digests: those of different questions come at once */
    _Atomic uint32_t count;
    uint32_t steps;
};

static int step_beside(void *context, int small) {
    struct pieces *pieces = context;
    struct engine *engine = session_engine(pieces->talking);
    struct kv_diag diag = {""};
    uint32_t count = 0;

    (void)small;
    if (pieces->talking->state == SESSION_IDLE)
        tally_need(session_generate(pieces->talking, 40, &diag), &diag, "session_generate");
    tally_need(engine_step(engine, events, &count, &diag), &diag, "engine_step");
    pieces->steps++;
    return 1;
}

static void take_answer(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct pieces *pieces = context;
    uint32_t vocab = session_engine(pieces->talking)->model.vocab_count;
    const uint64_t of[3] = {ask, row, kv_digest_short(logits, vocab * sizeof *logits)};

    pieces->rows += kv_digest_short(of, sizeof of);
    pieces->count++;
}

/* Chunks and single rows, with a hole and at the floor: more rows than a tile of logits has. */
static uint64_t ask_many(struct pieces *pieces, struct session *asked) {
    const struct session_range hole = {400, 700};
    struct session_ask asks[10];
    struct kv_diag diag = {""};

    for (uint32_t i = 0; i < 10; i++)
        asks[i] = (struct session_ask){.ids = text_ids + 50 * i,
                                       .count = i < 2 ? 1 : 10,
                                       .hide = &hole,
                                       .hide_count = i % 3 == 2,
                                       .floor = i % 4 == 1};
    pieces->rows = pieces->count = 0;
    tally_need(session_ask_all(asked, asks, 10, take_answer, pieces, &diag), &diag, "questions");
    return pieces->rows;
}

static void test_pieces(struct engine *gpu) {
    struct session *asked = make_session(gpu, "asked", KEEP_LADDER);
    struct pieces pieces = {.talking = make_session(gpu, "talking", KEEP_LADDER)};

    feed(asked, text_ids, 1900);
    feed(pieces.talking, text_ids + 100, 900);
    uint64_t whole = ask_many(&pieces, asked);
    gpu->settings.hooks = (struct engine_hooks){.context = &pieces, .breathe = step_beside};
    uint64_t beside = ask_many(&pieces, asked);
    gpu->settings.hooks = (struct engine_hooks){.context = NULL};
    tally_check(whole == beside && pieces.count == 82 && pieces.steps > gpu->model.geometry.layers,
                "questions in pieces, others stepping: the bits of those in one");
    (void)run(gpu);
    session_drop(asked);
    session_drop(pieces.talking);
}

static void time_prefill(struct engine *gpu) {
    struct session *session = make_session(gpu, "long", KEEP_K8V4);
    double begun = tally_seconds(), first;

    feed(session, text_ids, LONG_TOKENS);
    first = tally_seconds() - begun;
    printf("     prefill of %d tokens: %.0f tokens/s\n", LONG_TOKENS, LONG_TOKENS / first);
    fprintf(results, " \"prefill_tokens_per_second\": %.0f,\n", LONG_TOKENS / first);
    session_drop(session);
}

/* --- sleep and wake */

static struct service *open_service(enum engine_device device, const char *dir) {
    struct service_settings settings;
    struct service *service = NULL;
    struct kv_diag diag = {""};

    support_gpu_settings(&settings);
    settings.model_path = model_path;
    settings.store_dir = dir;
    settings.program = "gpu_engine";
    settings.device = device;
    tally_need(service_open(&settings, &service, &diag), &diag, "service_open");
    return service;
}

static int want_all(void *context, uint64_t first, uint32_t tokens) {
    (void)context;
    (void)first;
    (void)tokens;
    return 1;
}

/* Bytes of sinks and window; the blocks' digests are compared by every wake. */
static struct kv_digest window_of(struct session *session) {
    struct transfer_frozen frozen;
    struct kv_digest_state state;
    struct kv_diag diag = {""};

    tally_need(transfer_freeze(session, want_all, NULL, &frozen, &diag), &diag, "transfer_freeze");
    kv_digest_init(&state);
    kv_digest_update(&state, frozen.sinks.bytes, frozen.sinks.size);
    for (uint32_t i = 0; i < frozen.page_count; i++)
        kv_digest_update(&state, frozen.pages[i].bytes, frozen.pages[i].size);
    transfer_frozen_release(session_engine(session), &frozen);
    return kv_digest_final(&state);
}

static struct kv_digest say(struct session *session, uint32_t first, uint32_t count) {
    struct kv_diag diag = {""};
    struct trace trace;

    begin_trace(&trace, session_engine(session));
    session_observe(session, take_trace, &trace);
    feed(session, text_ids + first, count);
    tally_need(session_generate(session, 24, &diag), &diag, "session_generate");
    (void)run(session_engine(session));
    session_observe(session, NULL, NULL);
    return kv_digest_final(&trace.state);
}

static void fall_asleep(struct service *service, struct session *session) {
    struct receipt receipt;
    struct kv_diag diag = {""};

    tally_need(service_sleep(service, session, &receipt, &diag), &diag, "service_sleep");
}

static struct session *wake(struct service *service, const char *name, struct receipt *receipt) {
    struct session *session = NULL;
    struct kv_diag diag = {""};

    tally_need(service_wake(service, name, NULL, &session, receipt, &diag), &diag, "service_wake");
    return session;
}

/* One session sleeps and wakes between turns, its twin never leaves. */
static void test_restored(const char *dir) {
    struct service *service = open_service(the_gpu, dir);
    struct session *woken = support_gpu_session(service, "woken"),
                   *stays = support_gpu_session(service, "stays");
    int bits = 1, proven = 1, windows = 1;
    double wakes = 0, longest = 0;

    for (uint32_t turn = 0; turn < (quick ? 2 : 5); turn++) {
        uint32_t first = 700 * turn, count = 520 + 90 * turn;
        struct kv_digest a = say(woken, first, count), b = say(stays, first, count), before, after;
        struct receipt receipt;
        bits &= kv_digest_equal(&a, &b);
        before = window_of(woken);
        fall_asleep(service, woken);
        double begun = tally_seconds();
        woken = wake(service, "woken", &receipt);
        double took = tally_seconds() - begun;
        wakes += took;
        longest = took > longest ? took : longest;
        after = window_of(woken);
        windows &= kv_digest_equal(&before, &after);
        if (turn == 4) /* the longest */
            for (uint32_t i = 0; i < RECEIPT_STAGE_COUNT; i++)
                printf("     wake of %llu tokens, stage %u: %.2f ms\n",
                       (unsigned long long)receipt.tokens, i, (double)receipt.stage_ns[i] * 1e-6);
        proven &= receipt.fingerprint == RECEIPT_BITS_EQUAL && receipt.tokens_prefilled == 0 &&
                  receipt.digests_failed == 0 && receipt.digests_checked > 0;
    }
    struct kv_digest a = say(woken, 4000, 300), b = say(stays, 4000, 300);
    tally_check(bits && kv_digest_equal(&a, &b),
                "restored on the GPU = never evicted, bit for bit");
    tally_check(proven, "every wake is proven bit for bit, nothing prefilled");
    tally_check(windows, "sinks and window come back byte for byte");
    printf("     wake: mean %.1f ms, longest %.1f ms\n", wakes * (quick ? 500 : 200),
           longest * 1e3);
    fprintf(results, " \"wake_ms\": {\"mean\": %.1f, \"longest\": %.1f},\n",
            wakes * (quick ? 500 : 200), longest * 1e3);
    service_close(service);
}

/* Saved on one device, woken on the other and back again. */
static void test_crossing(const char *dir, enum engine_device from, enum engine_device to) {
    struct service *service = open_service(from, dir);
    struct session *session = support_gpu_session(service, "crosses");
    struct kv_digest before, after, back;
    struct receipt there, home;
    char what[96];

    (void)say(session, 0, 2300);
    before = window_of(session);
    fall_asleep(service, session);
    service_close(service);
    service = open_service(to, dir);
    session = wake(service, "crosses", &there);
    after = window_of(session);
    fall_asleep(service, session);
    service_close(service);
    service = open_service(from, dir);
    session = wake(service, "crosses", &home);
    back = window_of(session);
    (void)say(session, 2400, 100);
    service_close(service);
    const char *direction = from == ENGINE_DEVICE_CPU ? "CPU to GPU" : "GPU to CPU";
    snprintf(what, sizeof what, "%s: every stored byte arrives", direction);
    tally_check(kv_digest_equal(&before, &after) && there.digests_failed == 0 &&
                    there.digests_checked > 20 && there.tokens_prefilled == 0,
                what);
    snprintf(what, sizeof what, "%s: proven by top-10 and bound", direction);
    tally_check(there.fingerprint == (from == to ? RECEIPT_BITS_EQUAL : RECEIPT_TOP_EQUAL), what);
    snprintf(what, sizeof what, "%s and home again: the same bytes", direction);
    tally_check(kv_digest_equal(&before, &back) && home.digests_failed == 0, what);
}

/* --- */

static cJSON *read_oracle(const char *path) {
    static char text[1 << 20];
    FILE *file = fopen(path, "rb");
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    cJSON *oracle = cJSON_ParseWithLength(text, size);
    const cJSON *prompt;
    uint32_t count = 0;

    if (!oracle)
        exit((printf("FAIL %s is not to be read\n0 passed, 1 failed\n", path), 1));
    fclose(file);
    cJSON_ArrayForEach(prompt, cJSON_GetObjectItem(oracle, "prompts")) {
        const cJSON *ids = cJSON_GetObjectItem(prompt, "prompt_ids");
        if (count + (uint32_t)cJSON_GetArraySize(ids) <= IDS_MAX)
            count += read_ids(ids, text_ids + count);
    }
    for (uint32_t i = count; i < IDS_MAX; i++)
        text_ids[i] = text_ids[i - count];
    return oracle;
}

int main(int argc, char **argv) {
    if (argc < 5)
        return printf("usage: gpu_engine MODEL ORACLE.json OUT.json COMMIT [cpu]\n"), 2;
    model_path = argv[1];
    results = fopen(argv[3], "w");
    if (argc > 5 && strcmp(argv[5], "cpu") == 0)
        the_gpu = ENGINE_DEVICE_CPU;
    quick = argc > 5 && strcmp(argv[5], "quick") == 0;
    cJSON *oracle = read_oracle(argv[2]);
    char dir[3][64];
    for (int i = 0; i < 3; i++) {
        snprintf(dir[i], sizeof dir[i], "/tmp/gpu_engine_XXXXXX");
        if (!results || !mkdtemp(dir[i]))
            return 2;
    }
    test_operations();
    struct engine *host = open_engine((struct opening){ENGINE_DEVICE_CPU, 0, 7});
    struct engine *gpu = open_engine((struct opening){the_gpu, 1, 8});
    struct engine_model model;
    engine_model(gpu, &model);
    fprintf(results, "{\"commit\": \"%s\", \"device\": \"%s\",\n", argv[4], model.device_name);
    for (enum keeping keeping = KEEP_BF16; keeping < KEEP_COUNT; keeping++)
        test_forced(host, gpu, oracle, keeping);
    engine_close(host);
    time_prefill(gpu);
    test_bits(gpu);
    test_pieces(gpu);
    engine_close(gpu);
    test_restored(dir[0]);
    test_crossing(dir[1], ENGINE_DEVICE_CPU, the_gpu);
    test_crossing(dir[2], the_gpu, ENGINE_DEVICE_CPU);
    fprintf(results, " \"passed\": %d, \"failed\": %d}\n", tally_passed(), tally_failed());
    fclose(results);
    cJSON_Delete(oracle);
    return tally_end();
}
