/* engine/engine.c - opening and closing an engine, and what it says about itself.
 *
 * Responsible for: reading the model file once, its identity, the pool, the queue of posts, making
 * room when slots run out.
 * Not responsible for: stepping (scheduler.c), sessions (session.c).
 */
#include "engine/engine.h"

#include "engine/engine_inner.h"
#include "engine/model/gguf.h"
#include "engine/model/weights.h"
#include "engine/record.h"
#include "store/base/bytes.h"

#include "build_id.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum { SESSIONS_MAX = 1024 };

/* Left for plans and scratch that grow later, when the slots take what there is. */
static const uint64_t left_bytes = (uint64_t)128 << 20;

static const char code_constants[] = "half step, f_v 1 1.0073 1.0161 1.0372";

/* Sources and compiler do not say which C library made the RoPE tables, so their bits do. */
static struct kv_digest numerics_id(const struct device *device, const struct forward *forward) {
    char text[4096];
    char tables[KV_DIGEST_HEX_BYTES];
    struct kv_digest digest = forward_tables_digest(forward);

    kv_digest_hex(&digest, tables);
#ifdef BREAK_TABLES_ID
    tables[0] = 0;
#endif
    int bytes = snprintf(text, sizeof text, "%s\n%s\n%s\n%s\n%s\n%s\n%s", device->kind,
                         BUILD_SOURCES_DIGEST, BUILD_COMPILER, device->weight_path, code_constants,
                         tables, device->details);

    assert(bytes > 0 && (size_t)bytes < sizeof text);
    return kv_digest_of(text, (size_t)bytes);
}

/* RMS epsilon and RoPE divisors change every K and V, so they are part of the weights' digest. */
static struct kv_digest tensors_id(const struct gguf *gguf, const struct weights *weights) {
    struct kv_digest both[2] = {gguf_tensors_digest(gguf), weights_geometry_digest(weights)};

    return kv_digest_of(both, sizeof both);
}

static void describe(struct engine *engine, const struct gguf *gguf,
                     const struct weights *weights) {
    const struct weights_geometry *g = &weights->geometry;
    struct engine_model *model = &engine->model;
    struct image_model *identity = &model->identity;

    char note[sizeof model->device_note];

    memcpy(note, model->device_note, sizeof note);
    *model = (struct engine_model){.geometry = {g->layers, g->kv_heads, g->head_dim},
                                   .vocab_count = g->vocab,
                                   .context_tokens = g->context_tokens,
                                   .q_heads = g->heads,
                                   .hidden = g->hidden,
                                   .ffn = g->ffn,
                                   .simd_name = engine->device->simd_name,
                                   .architecture = "llama"};
    memcpy(model->device_note, note, sizeof note);
    snprintf(model->device_name, sizeof model->device_name, "%.95s", engine->device->name);
    memcpy(identity->architecture, "llama", sizeof "llama");
    identity->geometry = model->geometry;
    identity->q_heads = g->heads;
    identity->context_tokens = g->context_tokens;
    identity->rope_pairing = g->rope == WEIGHTS_ROPE_ADJACENT ? 1 : 2;
    identity->rope_base = g->rope_base;
    identity->tensors = tensors_id(gguf, weights);
    identity->tokenizer = tokenizer_digest(engine->tokenizer);
    identity->chat_template = template_digest(engine->template);
    identity->code_id = RECORD_CODE_PLANES;
    identity->layout_id = RECORD_LAYOUT_ID;
}

static enum kv_err open_model(struct engine *engine, const void *model_bytes, size_t model_size,
                              struct kv_diag *diag) {
    const struct kv_alloc *alloc = engine->settings.alloc;
    struct forward_settings forward = {alloc, engine->device, engine->singles_max};
    struct template_make_args template = {.name = NULL};
    struct weights *weights = NULL;
    struct gguf *gguf = NULL;
    enum kv_err err;

    KV_TRY(gguf_parse(model_bytes, model_size, alloc, &gguf, diag));
    KV_TRY(weights_make(gguf, alloc, &weights, diag));
    KV_TRY(tokenizer_make(gguf, alloc, &engine->tokenizer, diag));
    template.gguf = gguf;
    template.tokenizer = engine->tokenizer;
    KV_TRY(template_make(&template, alloc, &engine->template, diag));
    if (tokenizer_info(engine->tokenizer).vocab_count > weights->geometry.vocab)
        KV_TRY(kv_diag_set(diag, KV_ERR_CORRUPT,
                           "the model file has more tokens than rows of token_embd"));
    describe(engine, gguf, weights);
    KV_TRY(forward_make(&forward, weights, &engine->forward, diag));
    engine->model.weight_bytes = forward_weight_bytes(engine->forward);
    engine->model.identity.numerics = numerics_id(engine->device, engine->forward);
done:
    weights_drop(weights);
    gguf_drop(gguf);
    return err;
}

static enum kv_err open_tables(struct engine *engine, struct kv_diag *diag) {
    const struct kv_alloc *alloc = engine->settings.alloc;
    const struct layout_geometry *g = &engine->model.geometry;

    engine->sessions = kv_alloc_zeroed(alloc, engine->settings.sessions_max, sizeof(void *));
    engine->batch = kv_alloc_zeroed(alloc, engine->settings.sessions_max, sizeof(void *));
    engine->seqs = kv_alloc_zeroed(alloc, engine->singles_max + 1, sizeof *engine->seqs);
    engine->pressed =
        kv_alloc_zeroed(alloc, engine->settings.sessions_max, sizeof *engine->pressed);
    engine->moves = kv_alloc_zeroed(alloc, engine->settings.sessions_max,
                                    IMAGE_AGES_MAX * sizeof *engine->moves);
    engine->candidates =
        kv_alloc_zeroed(alloc, engine->model.vocab_count, sizeof *engine->candidates);
    engine->bad_tokens =
        device_get(engine->device, (uint64_t)g->layers * g->kv_heads * sizeof(int32_t));
    engine->bad_host = kv_alloc_zeroed(alloc, (size_t)g->layers * g->kv_heads, sizeof(int32_t));
    if (!engine->sessions || !engine->batch || !engine->seqs || !engine->pressed ||
        !engine->moves || !engine->candidates || !engine->bad_tokens || !engine->bad_host ||
        block_table_init(alloc, &engine->slots, engine, &engine->blocks) != KV_OK)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the engine's tables");
    return KV_OK;
}

static enum kv_err open_pool(struct engine *engine, struct kv_diag *diag) {
    const struct engine_settings *settings = &engine->settings;
    struct slots_settings pool = {.alloc = settings->alloc,
                                  .device = engine->device,
                                  .geometry = engine->model.geometry,
                                  .budget_bytes = settings->slot_budget_bytes,
                                  .reserve = settings->reserve_slots,
                                  .poison = settings->poison_free_slots,
                                  .shuffle_seed = settings->shuffle_seed};
    uint64_t room = device_room(engine->device);

    if (pool.budget_bytes == UINT64_MAX && room != UINT64_MAX)
        pool.budget_bytes = room > left_bytes ? room - left_bytes : 0;
    return slots_init(&pool, &engine->slots, diag);
}

/* More than weights of any type as BF16, a table and a workspace beside the slots take. */
static uint64_t enough_bytes(const struct engine_settings *settings, size_t model_size) {
    uint64_t model = 0, bytes = UINT64_MAX;

    if (settings->slot_budget_bytes == UINT64_MAX || !kv_mul_u64(model_size, 5, &model) ||
        !kv_add_u64(model, (uint64_t)2 << 30, &model) ||
        !kv_add_u64(model, settings->slot_budget_bytes, &bytes))
        return UINT64_MAX;
    return bytes;
}

static enum kv_err open_device(struct engine *engine, size_t model_size, struct kv_diag *diag) {
    const struct engine_settings *settings = &engine->settings;
    struct device_host_settings host = {settings->alloc, settings->clock,
                                        (enum device_simd)settings->simd, settings->threads};
    struct device_cuda_settings cuda = {settings->alloc,
                                        settings->clock,
                                        settings->cuda_index,
                                        settings->device_memory_bytes,
                                        enough_bytes(settings, model_size),
                                        settings->graphs};
    struct kv_diag own = {""};
    enum kv_err err;

    if (settings->device == ENGINE_DEVICE_CPU)
        return device_host_open(&host, &engine->device, diag);
    err = device_cuda_open(&cuda, &engine->device, &own);
    if (err == KV_OK) {
        memcpy(engine->model.device_note, engine->device->note, sizeof engine->device->note);
        return KV_OK;
    }
    if (settings->device == ENGINE_DEVICE_CUDA || err != KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, KV_ERR_DEVICE, "%s", own.text);
    if (device_cuda_built())
        snprintf(engine->model.device_note, sizeof engine->model.device_note,
                 "%.120s: computing on the processor", own.text);
    return device_host_open(&host, &engine->device, diag);
}

enum kv_err engine_open(const struct engine_settings *settings, const void *model_bytes,
                        size_t model_size, struct engine **engine_out, struct kv_diag *diag) {
    struct engine *engine;
    enum kv_err err;

    if (settings->sessions_max < 1 || settings->sessions_max > SESSIONS_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "sessions_max is %u: use 1 to %d",
                           settings->sessions_max, SESSIONS_MAX);
    if (settings->slots_low_percent > settings->slots_high_percent ||
        settings->slots_high_percent > 100)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "watermarks of %u and %u percent: use 0 to 100, the low one first",
                           settings->slots_low_percent, settings->slots_high_percent);
    engine = kv_alloc_zeroed(settings->alloc, 1, sizeof *engine);
    if (!engine)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the engine");
    engine->settings = *settings;
    engine->singles_max =
        settings->sessions_max < FORWARD_SINGLES_MAX ? settings->sessions_max : FORWARD_SINGLES_MAX;
    posts_init(&engine->posts);
    posts_init(&engine->behind);
    pthread_mutex_init(&engine->landing.lock, NULL);
    pthread_mutex_init(&engine->lane_in, NULL);
    pthread_mutex_init(&engine->lane_lent, NULL);
    pthread_mutex_init(&engine->lane_check, NULL);
    KV_TRY(open_device(engine, model_size, diag));
    KV_TRY(open_model(engine, model_bytes, model_size, diag));
    KV_TRY(open_pool(engine, diag));
    KV_TRY(open_tables(engine, diag));
    *engine_out = engine;
    engine = NULL;
done:
    engine_close(engine);
    return err;
}

void engine_close(struct engine *engine) {
    const struct kv_alloc *alloc;

    if (!engine)
        return;
    alloc = engine->settings.alloc;
    while (engine_apply(engine))
        ;
    while (engine->session_count)
        session_drop(engine->sessions[engine->session_count - 1]);
    block_table_release(&engine->blocks);
    slots_release(&engine->slots);
    forward_drop(engine->forward);
    template_drop(engine->template);
    tokenizer_drop(engine->tokenizer);
    if (engine->bad_tokens)
        device_put(engine->device, engine->bad_tokens);
    if (engine->landing.at)
        device_host_put(engine->device, engine->landing.at);
    device_close(engine->device);
    posts_release(&engine->posts);
    posts_release(&engine->behind);
    pthread_mutex_destroy(&engine->landing.lock);
    pthread_mutex_destroy(&engine->lane_in);
    pthread_mutex_destroy(&engine->lane_lent);
    pthread_mutex_destroy(&engine->lane_check);
    kv_alloc_release(alloc, engine->sessions);
    kv_alloc_release(alloc, engine->batch);
    kv_alloc_release(alloc, engine->seqs);
    kv_alloc_release(alloc, engine->pressed);
    kv_alloc_release(alloc, engine->moves);
    kv_alloc_release(alloc, engine->candidates);
    kv_alloc_release(alloc, engine->bad_host);
    kv_alloc_release(alloc, engine);
}

void engine_model(const struct engine *engine, struct engine_model *model_out) {
    *model_out = engine->model;
}

const struct tokenizer *engine_tokenizer(const struct engine *engine) {
    return engine->tokenizer;
}

const struct template *engine_template(const struct engine *engine) {
    return engine->template;
}

void engine_slots(const struct engine *engine, struct engine_slots *slots_out) {
    const struct slots *slots = &engine->slots;

    *slots_out = (struct engine_slots){.total = slots->total,
                                       .free = slots->free_count,
                                       .reserve = slots->settings.reserve,
                                       .used = slots->total - slots->free_count,
                                       .peak_used = slots->peak_used,
                                       .leaving = engine_inner_leaving(engine),
                                       .slot_bytes = slots->slot_bytes,
                                       .meta_frame_bytes = slots->frame_bytes,
                                       .pool_bytes = slots->pool_bytes};
}

uint32_t engine_plan_slots(const struct engine *engine, const struct image_policy *policy,
                           uint64_t n_kv) {
    uint64_t slots = policy_plan(policy, n_kv);

    (void)engine;
    return slots > UINT32_MAX ? UINT32_MAX : (uint32_t)slots;
}

struct engine_post {
    struct post post;
    struct engine *engine;
    void (*call)(void *context);
    void *context;
};

static void run_post(void *argument) {
    struct engine_post *post = argument;

    post->call(post->context);
    kv_alloc_release(post->engine->settings.alloc, post);
}

static enum kv_err post_to(struct posts *posts, struct engine *engine, void (*call)(void *context),
                           void *context) {
    struct engine_post *post = kv_alloc_zeroed(engine->settings.alloc, 1, sizeof *post);

    if (!post)
        return KV_ERR_NOMEM;
    *post =
        (struct engine_post){.post = {.call = run_post, .context = post}, engine, call, context};
    posts_push(posts, &post->post);
    return KV_OK;
}

enum kv_err engine_post(struct engine *engine, void (*call)(void *context), void *context) {
    return post_to(&engine->posts, engine, call, context);
}

enum kv_err engine_post_behind(struct engine *engine, void (*call)(void *context), void *context) {
    return post_to(&engine->behind, engine, call, context);
}

int engine_apply(struct engine *engine) {
    /* A batch of blocks that have become durable gives up planes of each. */
    slots_gather(&engine->slots);
    unsigned count = posts_apply(&engine->posts) + posts_apply_one(&engine->behind);

    /* What the piece has brought is seen by the next step already. */
    count += posts_apply(&engine->posts);
    slots_gather_end(&engine->slots);
    return count > 0;
}

void engine_away(struct engine *engine) {
    const struct engine_hooks *hooks = &engine->settings.hooks;

    if (!engine->stepping && hooks->away)
        hooks->away(hooks->context);
}

void engine_back(struct engine *engine) {
    const struct engine_hooks *hooks = &engine->settings.hooks;

    /* Whoever steps meanwhile has ended its step when this one is back. */
    if (hooks->back)
        hooks->back(hooks->context);
}

int engine_breathe(struct engine *engine, int small) {
    const struct engine_hooks *hooks = &engine->settings.hooks;

    return !engine->stepping && hooks->breathe ? hooks->breathe(hooks->context, small) : 0;
}

int engine_lost(const struct engine *engine) {
    return engine->device->lost;
}

enum kv_err engine_inner_device(struct engine *engine, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_DEVICE, "%s: %s%s", engine->device->name,
                       engine->device->trouble,
                       engine->device->lost ? "; what was saved is safe: start again" : "");
}

/* Of the free slots beyond the reserve. */
static uint32_t room_of(const struct engine *engine, const struct engine_inner_need *need) {
    const struct engine_hooks *hooks = &engine->settings.hooks;
    uint32_t have = slots_available(&engine->slots, need->allowance), promised = 0;

#ifndef BREAK_PROMISE
    if (!need->session && hooks->slots_promised)
        promised = hooks->slots_promised(hooks->context);
#endif
    return have > promised ? have - promised : 0;
}

enum kv_err engine_inner_room(struct engine *engine, const struct engine_inner_need *need,
                              struct kv_diag *diag) {
    const struct engine_hooks *hooks = &engine->settings.hooks;
    /* Each try ends a write or a session, so there are not more of them than of those. */
    uint32_t tries = engine->settings.sessions_max + engine->slots.frames + 1;

    for (;;) {
        uint32_t have = room_of(engine, need);
        if (have >= need->slots && engine->blocks.free_count >= need->frames)
            return KV_OK;
        if (posts_apply(&engine->posts) || engine_inner_leave(engine))
            continue;
        if (have < need->slots && engine_inner_relieve(engine, need->slots - have) > 0)
            continue;
        if (tries-- == 0 || !hooks->slots_low ||
            !hooks->slots_low(hooks->context, need->session, need->slots))
            break;
    }
    return kv_diag_set(diag, KV_ERR_NO_SLOTS,
                       "%u slots are needed and %u are free beyond the reserve of %u: put a "
                       "session to sleep or use a larger slot budget",
                       need->slots, room_of(engine, need), engine->slots.settings.reserve);
}
