/* tests/support_harm.c - two sessions of a synth model, stored, woken, harmed and looked at.
 *
 * Responsible for: making, saving and waking them.
 * Not responsible for: looking at them (support_harm_look.c).
 */
#include "tests/support_harm.h"

#include "engine/probe.h"
#include "restore/rest_load.h"
#include "store/base/clock.h"
#include "tests/support_harm_work.h"
#include "tests/support_tally.h"
#include "tools/service.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ABSENT = 4, BEFORE_PROBE = 24, BEHIND_QUESTION = 6, QUEUE = 1024 };

static const char *const layer_names[HARM_LAYERS] = {
    "records", "hash",           "nan guard",    "fingerprint",   "probe",
    "needle",  "needle: graded", "needle: null", "needle: thief", "counters"};

const char *harm_layer_name(enum harm_layer layer) {
    return layer_names[layer];
}

/* --- text */

struct text {
    struct harm *harm;
    struct harm_user *user;
    uint32_t own; /* 0 or 1 */
    uint8_t *used;
};

static void reserve(struct text *text, uint32_t first, uint32_t end) {
    memset(text->used + first, 1, end - first);
}

static uint32_t free_place(const struct text *text, uint32_t at, uint32_t count) {
    for (;; at++)
        if (!memchr(text->used + at, 1, count))
            return at;
}

/* Keys are those of both sessions: the index of the fact. */
static struct support_synth_fact *add(struct text *text, enum support_synth_kind kind,
                                      uint32_t at) {
    struct harm_user *user = text->user;
    const struct synth *synth = &text->harm->synth;
    struct support_synth_fact *fact = &user->facts[user->fact_count];

    *fact = (struct support_synth_fact){.kind = kind, .key = user->fact_count++, .at = at};
    fact->value = kind == SUPPORT_GRADED ? synth->words - synth->families +
                                               text->own * (synth->families / 2) + user->graded++
                                         : text->harm->next_word++;
    if (kind == SUPPORT_SIX)
        fact->other = text->harm->next_word++;
    return fact;
}

static void plant(struct text *text, enum support_synth_kind kind, uint32_t wanted) {
    uint32_t count = kind == SUPPORT_SIX ? SUPPORT_SYNTH_PAIR : SUPPORT_SYNTH_FACT;
    uint32_t at = free_place(text, wanted, count);

    support_synth_plant(add(text, kind, at), text->user->ids);
    reserve(text, at, at + count);
}

/* A fact, and behind it the question with its answer: what a probe asks again. */
static void plant_probes(struct text *text) {
    const struct probe_text where = {text->harm->tokens, &text->harm->policy};
    uint32_t *ids = text->user->ids;

    for (uint32_t i = 0; i < HARM_PROBES; i++) {
        struct image_probe probe;
        if (!probe_place(&where, i, HARM_PROBES, 0, &probe) ||
            probe.answer + BEHIND_QUESTION > text->harm->tokens - HARM_LAST_TOKENS)
            continue;
        uint32_t answer = (uint32_t)probe.answer, at = answer - BEFORE_PROBE;
        const struct support_synth_fact *fact = add(text, SUPPORT_PLAIN, at);
        support_synth_plant(fact, ids);
        ids[answer - 1] = synth_id(SYNTH_QUESTION, fact->key);
        ids[answer] = synth_answer_id(fact->value);
        ids[answer + 1] = ids[answer + 2] = SYNTH_EOT;
        reserve(text, at, answer + BEHIND_QUESTION);
        if (i == 2)
            text->harm->block = (at + 1 - LAYOUT_SINK_TOKENS) / LAYOUT_BLOCK_TOKENS;
    }
}

/* The loop of the last fact ends with the text: without its last token the fact is gone. */
static void plant_end(struct text *text) {
    uint32_t *end = text->user->ids + text->harm->tokens;
    const struct support_synth_fact *fact =
        add(text, SUPPORT_PLAIN, text->harm->tokens - HARM_LAST_TOKENS + 1);

    end[-9] = synth_id(SYNTH_KEY, fact->key);
    end[-8] = end[-1] = synth_id(SYNTH_VALUE, fact->value);
    end[-2] = synth_id(SYNTH_KEY, fact->value);
    for (int i = -7; i < -2; i++)
        end[i] = synth_id(SYNTH_VALUE, text->harm->synth.words / 2 + (uint32_t)(i + 7));
    end[-5] = synth_id(SYNTH_QUESTION, text->user->facts[text->harm->asked].key);
}

static void write_text(struct harm *harm, uint32_t own) {
    struct text text = {harm, &harm->users[own], own, calloc(harm->tokens, 1)};

    text.user->ids = calloc(harm->tokens, sizeof *text.user->ids);
    support_synth_filler(&harm->synth, 31 + own, text.user->ids, harm->tokens);
    reserve(&text, harm->tokens - HARM_LAST_TOKENS, harm->tokens);
    plant_probes(&text);
    for (uint32_t block = 0; block < harm->settings.blocks; block++) {
        uint32_t first = LAYOUT_SINK_TOKENS + block * LAYOUT_BLOCK_TOKENS;
        if (block == harm->block)
            harm->asked = text.user->fact_count;
        plant(&text, SUPPORT_GRADED, first + 100);
        plant(&text, SUPPORT_PLAIN, first + LAYOUT_PAGE_TOKENS - 1);
        /* At another place of its page in each block, so that scales of another block differ. */
        plant(&text, SUPPORT_SIX, first + 2 * LAYOUT_PAGE_TOKENS + 8 * (block % 5) + 2);
    }
    plant_end(&text);
    free(text.used);
    harm->other = image_tier(&harm->policy, harm->block + 1, harm->tokens) ==
                          image_tier(&harm->policy, harm->block, harm->tokens)
                      ? harm->block + 1
                      : harm->block - 1;
}

/* --- a session */

static void step_until_idle(struct harm *harm) {
    struct engine_event events[32];
    struct kv_diag diag = {""};

    for (uint32_t count = 1; count;) {
        tally_need(engine_step(harm->engine, events, &count, &diag), &diag, "engine_step");
        for (uint32_t i = 0; i < count; i++)
            if (events[i].kind == ENGINE_FAILED)
                tally_need(events[i].err, &diag, "a step");
    }
}

struct session *harm_prefill(struct harm *harm, uint32_t user) {
    const struct session_settings settings = {.name = harm->users[user].name,
                                              .policy = harm->policy,
                                              .sampler = {.top_p = 1, .top_k = 1, .seed = 1}};
    struct session *session = NULL;
    struct kv_diag diag = {""};

    tally_need(session_create(harm->engine, &settings, &session, &diag), &diag, "session_create");
    tally_need(session_feed(session, harm->users[user].ids, harm->tokens, IMAGE_RAW, &diag), &diag,
               "session_feed");
    tally_need(session_generate(session, 1, &diag), &diag, "session_generate");
    step_until_idle(harm);
    return session;
}

/* Facts of the two blocks and the last one of all. */
static void register_needles(struct harm *harm, struct session *session) {
    const struct harm_user *user = &harm->users[0];
    const uint32_t which[HARM_NEEDLES] = {
        harm->asked + 1, harm->other > harm->block ? harm->asked + 4 : harm->asked - 2,
        user->fact_count - 1};
    struct kv_diag diag = {""};

    for (uint32_t i = 0; i < HARM_NEEDLES; i++)
        tally_need(support_synth_register(session, &user->facts[which[i]], &diag), &diag,
                   "needle_register");
}

static void make_user(struct harm *harm, uint32_t own) {
    struct harm_user *user = &harm->users[own];
    struct receipt receipt;
    struct kv_diag diag = {""};
    char text[160];

    snprintf(user->name, sizeof user->name, "%s", own ? "thief" : "harmed");
    write_text(harm, own);
    struct session *session = harm_prefill(harm, own);
    if (!own)
        register_needles(harm, session);
    tally_need(snapshot_sleep(harm->snapshot, session, 0, &receipt, &diag), &diag,
               "snapshot_sleep");
    snprintf(text, sizeof text,
             "%s: %u tokens, %u blocks, %u facts, %u of %u needles and %u probes "
             "kept",
             user->name, harm->tokens, harm->settings.blocks, user->fact_count,
             receipt.needles_kept, receipt.needles_recorded, receipt.probes_kept);
    (void)tally_check((own || receipt.needles_kept == HARM_NEEDLES) && receipt.probes_kept >= 3,
                      text);
    tally_need(rest_plan_image(harm->store, kv_alloc_system(), user->name, 0, &user->truth, &diag),
               &diag, "plan");
    tally_need(rest_plan_records(harm->store, &user->truth, &diag), &diag, "plan");
    tally_need(
        snap_image_read(harm->store, kv_alloc_system(), user->truth.snapshot, &user->stored, &diag),
        &diag, "image");
}

/* --- opening */

static void on_block_sealed(void *context, struct session *session, struct block *block) {
    struct harm *harm = context;

    snapshot_block_sealed(harm->snapshot, session, block);
}

static void open_engine(struct harm *harm) {
    const struct harm_settings *settings = &harm->settings;
    const struct engine_settings engine = {
        .alloc = kv_alloc_system(),
        .clock = kv_clock_system(),
        .hooks = {.context = harm, .block_sealed = on_block_sealed},
        .device = settings->device,
        .device_memory_bytes = UINT64_MAX,
        .graphs = 1,
        .threads = settings->threads,
        .sessions_max = 8,
        .slot_budget_bytes = settings->pool_bytes,
        .reserve_slots = 64,
        .poison_free_slots = 1,
        .shuffle_seed = 5};
    uint8_t *bytes = NULL;
    uint64_t size = 0;
    struct kv_diag diag = {""};

    tally_need(service_read_model(settings->model, kv_alloc_system(), &bytes, &size, &diag), &diag,
               settings->model);
    tally_need(engine_open(&engine, bytes, size, &harm->engine, &diag), &diag, "engine_open");
    kv_alloc_release(kv_alloc_system(), bytes);
    engine_model(harm->engine, &harm->model);
    snprintf(harm->device, sizeof harm->device, "%s", harm->model.device_name);
}

static void open_store(struct harm *harm) {
    struct store_options options = store_options_usual(harm->settings.dir, "gpu_harm");
    struct kv_diag diag = {""};

    /* Bytes are changed behind the store's back: through the page cache both see the same. */
    options.direct_wanted = 0;
    tally_need(store_open(&options, &harm->store, &diag), &diag, "store_open");
    harm->source = (struct restore_source){.store = harm->store,
                                           .engine = harm->engine,
                                           .alloc = kv_alloc_system(),
                                           .clock = kv_clock_system()};
    const struct snapshot_settings settings = {.store = harm->store,
                                               .engine = harm->engine,
                                               .alloc = kv_alloc_system(),
                                               .clock = kv_clock_system(),
                                               .queue_max = QUEUE,
                                               .probes = HARM_PROBES};
    tally_need(snapshot_open(&settings, &harm->snapshot, &diag), &diag, "snapshot_open");
}

void harm_open(const struct harm_settings *settings, struct harm *harm_out) {
    struct kv_diag diag = {""};
    double begun = tally_seconds();

    *harm_out = (struct harm){.settings = *settings};
    tally_need(synth_parse(settings->model, &harm_out->synth, &diag), &diag, settings->model);
    /* Sinks, blocks, four full window pages and one that is not. */
    uint32_t tokens = LAYOUT_SINK_TOKENS + settings->blocks * LAYOUT_BLOCK_TOKENS +
                      4 * LAYOUT_PAGE_TOKENS + HARM_LAST_TOKENS;
    harm_out->tokens = tokens;
    harm_out->policy = (struct image_policy){.recipe = IMAGE_RECIPE_V3,
                                             .age_count = 3,
                                             .ages = {tokens / 4, tokens / 2, tokens / 4 * 3}};
    open_engine(harm_out);
    open_store(harm_out);
    harm_out->opened_s = tally_seconds() - begun;
    harm_out->next_word = 3 * settings->blocks + HARM_PROBES + 1;
    for (uint32_t own = 0; own < 2; own++)
        make_user(harm_out, own);
    harm_store_raw(harm_out);
    harm_out->filled_s = tally_seconds() - begun - harm_out->opened_s;
    (void)tally_check(harm_out->next_word + ABSENT <= harm_out->synth.words / 2 &&
                          image_tier(&harm_out->policy, harm_out->block, tokens) == LAYOUT_K6V4 &&
                          image_tier(&harm_out->policy, harm_out->other, tokens) == LAYOUT_K6V4,
                      "words for all facts, and two blocks at four bits");
}

void harm_close(struct harm *harm) {
    for (uint32_t i = 0; i < 2; i++) {
        rest_plan_release(&harm->users[i].truth);
        snap_image_release(&harm->users[i].stored, kv_alloc_system());
        free(harm->users[i].ids);
    }
    snapshot_close(harm->snapshot);
    while (engine_apply(harm->engine))
        ;
    engine_close(harm->engine);
    store_close(harm->store);
}

/* --- waking */

static enum harm_layer layer_of(enum kv_err err, const char *text) {
    static const struct {
        enum kv_err err;
        const char *words;
        enum harm_layer layer;
    } known[] = {{KV_ERR_CORRUPT, "chain over", HARM_RECORDS},
                 {KV_ERR_CORRUPT, "root of", HARM_RECORDS},
                 {KV_ERR_CORRUPT, "digest is", HARM_HASH},
                 {KV_ERR_CORRUPT, "not a positive number", HARM_GUARD},
                 {KV_ERR_CORRUPT, "not a number", HARM_GUARD},
                 {KV_ERR_DEVICE, "not finite", HARM_GUARD},
                 {KV_ERR_PROOF, "fingerprint", HARM_FINGERPRINT},
                 {KV_ERR_PROOF, "best tokens agree", HARM_FINGERPRINT},
                 {KV_ERR_PROOF, "probe", HARM_PROBE},
                 {KV_ERR_PROOF, "needle", HARM_NEEDLE},
                 {KV_ERR_PROOF, "tokens have KV", HARM_COUNTERS}};

    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].err == err && strstr(text, known[i].words))
            return known[i].layer;
    return err == KV_ERR_CORRUPT ? HARM_RECORDS : HARM_LAYERS; /* no layer: it failed otherwise */
}

enum kv_err harm_wake(struct harm *harm, struct session **session_out, enum harm_layer *layer_out,
                      char text_out[HARM_TEXT_BYTES]) {
    const struct restore_options options = {.probes_max = HARM_PROBES};
    struct receipt receipt;
    struct kv_diag diag = {""};
    enum kv_err err =
        restore_wake(&harm->source, harm->users[0].name, &options, session_out, &receipt, &diag);

    text_out[0] = 0;
    if (err != KV_OK) {
        *layer_out = layer_of(err, diag.text);
        snprintf(text_out, HARM_TEXT_BYTES, "%.300s", diag.text);
    } else if (receipt.fingerprint != RECEIPT_BITS_EQUAL || receipt.tokens_prefilled != 0 ||
               receipt.tokens_reused != harm->users[0].truth.image.n_kv ||
               receipt.door_bytes < receipt.raw_bytes[LAYOUT_KH] ||
               receipt.raw_bytes[LAYOUT_KH] !=
                   layout_stream_bytes(&harm->model.geometry, LAYOUT_KH) * harm->settings.blocks ||
               receipt.needles_asked != HARM_NEEDLES || receipt.probes_asked < 3) {
        *layer_out = HARM_COUNTERS;
        snprintf(text_out, HARM_TEXT_BYTES, "it woke, and the receipt does not prove it");
    }
    return err;
}

struct session *harm_load(struct harm *harm) {
    struct rest_plan plan = {.ram = 0};
    const struct restore_options options = {0};
    struct transfer_load *load = NULL;
    struct rest_fetch fetch;
    struct session *session = NULL;
    struct receipt receipt = {0};
    struct kv_diag diag = {""};
    int in_doubt = 0;

    store_hold(harm->store);
    tally_need(
        rest_plan_image(harm->store, kv_alloc_system(), harm->users[0].name, 0, &plan, &diag),
        &diag, "plan");
    tally_need(rest_plan_records(harm->store, &plan, &diag), &diag, "plan");
    tally_need(transfer_load_begin(harm->engine, &plan.image, TRANSFER_EXACT, &load, &diag), &diag,
               "begin");
    const struct rest_load_args args = {&harm->source, &plan, load, &options, &receipt};
    tally_need(rest_fetch_begin(&plan, load, &fetch, &diag), &diag, "list");
    tally_need(rest_fetch_rest(&plan, load, &fetch, &diag), &diag, "list");
    tally_need(rest_load_run(&args, &fetch, &in_doubt, &diag), &diag, "load");
    tally_need(transfer_load_publish(load, &session, &diag), &diag, "publish");
    tally_need(session_move(session, SESSION_IDLE), &diag, "session_move");
    store_unhold(harm->store);
    rest_plan_release(&plan);
    return session;
}
