/* tests/support_nine.c - users of a synth model, their facts, and who answers with whose.
 *
 * Responsible for: what support_nine.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine.h"

#include "engine/engine_inner.h"
#include "engine/model/tokenizer.h"
#include "store/base/clock.h"
#include "store/store_ram.h"
#include "tools/service.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tokens of context that questions take, and those of one with its template. */
enum { ROOM = 320, EVENTS = 2 * NINE_SESSIONS_MAX + 1, QUEUE = 65536, RAM_TABLES = 8 << 20 };

double nine_seconds(void) {
    return (double)kv_clock_now_ns(kv_clock_system()) * 1e-9;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

void nine_sort(uint64_t *ns, uint32_t count) {
    qsort(ns, count, sizeof *ns, by_size);
}

double nine_rate(uint64_t bytes, uint64_t ns) {
    return ns ? (double)bytes / (double)ns : 0;
}

/* --- hooks; the context is the struct nine */

static void say_durable(void *context) {
    transfer_block_durable(context);
}

static int is_saver(const struct nine *nine, const struct session *session) {
    int found = 0;

    for (uint32_t i = NINE_SAVERS; i < NINE_USERS_MAX; i++)
        found |= nine->users[i].session == session;
    return found;
}

/* Where nothing is ever put to sleep there is no store: the block counts as written, so that planes
 * go as they do beside one. */
static void on_block_sealed(void *context, struct session *session, struct block *block) {
    struct nine *nine = context;

    if (nine->saves && is_saver(nine, session))
        transfer_block_failed(block);
    else if (nine->snapshot && !nine->saves)
        snapshot_block_sealed(nine->snapshot, session, block);
    else if (engine_post(nine->engine, say_durable, block) != KV_OK)
        transfer_block_failed(block);
}

static void on_planes_wanted(void *context, struct session *session, struct block *block) {
    struct nine *nine = context;

    if (nine->store)
        restore_planes_wanted(&nine->source, session, block);
    else
        transfer_planes_arrived(session, block, KV_ERR_NOT_FOUND);
}

static int on_slots_low(void *context, struct session *session, uint32_t slots) {
    struct nine *nine = context;

    (void)session;
    (void)slots;
    if (nine->snapshot)
        snapshot_drain(nine->snapshot);
    return engine_apply(nine->engine);
}

static void on_away(void *context) {
    struct nine *nine = context;

    if (!nine->shared)
        return;
    if (nine->holds)
        nine_holds_away(nine->holds);
    baton_give(&nine->baton);
}

static void on_back(void *context) {
    struct nine *nine = context;

    if (!nine->shared || baton_is_mine(&nine->baton))
        return;
    baton_take(&nine->baton);
    if (nine->holds)
        nine_holds_back(nine->holds);
}

/* Until the decoder is in a step, then behind it. Between two steps it looks at the first before it
 * asks for its turn again, so that the baton alone would come back at once. */
static int on_breathe(void *context, int small) {
    struct nine *nine = context;
    uint64_t before = nine->steps;

    (void)small;
    if (!nine->shared)
        return 0;
    on_away(context);
    pthread_mutex_lock(&nine->lock);
    while (nine->steps == before && nine->decoding)
        pthread_cond_wait(&nine->stepping, &nine->lock);
    pthread_mutex_unlock(&nine->lock);
    on_back(context);
    return nine->steps != before;
}

/* --- opening */

static enum kv_err open_engine(struct nine *nine, struct kv_diag *diag) {
    const struct nine_settings *settings = &nine->settings;
    struct engine_settings engine = {.alloc = kv_alloc_system(),
                                     .clock = kv_clock_system(),
                                     .hooks = {.context = nine,
                                               .block_sealed = on_block_sealed,
                                               .planes_wanted = on_planes_wanted,
                                               .slots_low = on_slots_low,
                                               .away = on_away,
                                               .back = on_back,
                                               .breathe = on_breathe},
                                     .device = settings->device,
                                     .cuda_index = settings->cuda_index,
                                     .device_memory_bytes = settings->device_memory_bytes,
                                     .graphs = 1,
                                     .threads = settings->threads,
                                     .sessions_max = NINE_SESSIONS_MAX,
                                     .slot_budget_bytes = settings->pool_bytes,
                                     .slots_low_percent = NINE_LOW_PERCENT,
                                     .slots_high_percent = NINE_HIGH_PERCENT,
                                     .reserve_slots = settings->reserve_slots,
                                     .poison_free_slots = 1,
                                     .shuffle_seed = settings->seed | 1};
    uint8_t *bytes = NULL;
    uint64_t size = 0;
    enum kv_err err = service_read_model(settings->model, kv_alloc_system(), &bytes, &size, diag);

    if (err == KV_OK)
        err = engine_open(&engine, bytes, size, &nine->engine, diag);
    kv_alloc_release(kv_alloc_system(), bytes);
    return err;
}

enum kv_err nine_open(const struct nine_settings *settings, uint32_t users, struct nine *nine_out,
                      struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    double begun = nine_seconds();
    uint64_t words;

    memset(nine_out, 0, sizeof *nine_out);
    nine_out->settings = *settings;
    nine_out->user_count = users;
    baton_init(&nine_out->baton);
    pthread_mutex_init(&nine_out->lock, NULL);
    pthread_cond_init(&nine_out->stepping, NULL);
    KV_TRY(synth_parse(settings->model, &nine_out->synth, diag));
    words = NINE_SHARED + NINE_ABSENT + (uint64_t)users * NINE_WORDS;
    if (users < 1 || users > NINE_SESSIONS_MAX ||
        (!settings->blank && words > nine_out->synth.words / 2))
        KV_TRY(kv_diag_set(diag, KV_ERR_INVALID, "%s has no words for %u sessions: ask for fewer",
                           settings->model, users));
    if (settings->tokens < NINE_TOKENS_MIN ||
        settings->tokens + ROOM + 256 > nine_out->synth.context_tokens)
        KV_TRY(kv_diag_set(diag, KV_ERR_INVALID, "%llu tokens: %s allows %u to %u here",
                           (unsigned long long)settings->tokens, settings->model, NINE_TOKENS_MIN,
                           nine_out->synth.context_tokens - ROOM - 256));
    KV_TRY(open_engine(nine_out, diag));
    KV_TRY(synth_rows_make(&nine_out->synth, kv_alloc_system(), &nine_out->rows, diag));
    engine_model(nine_out->engine, &nine_out->model);
    nine_out->opened_s = nine_seconds() - begun;
done:
    if (err != KV_OK)
        nine_close(nine_out);
    return err;
}

enum kv_err nine_store(struct nine *nine, struct kv_diag *diag) {
    struct store_options options = store_options_usual(nine->settings.dir, "nine");

    if (nine->settings.store_bytes)
        store_options_limit(&options, nine->settings.store_bytes);
    options.direct_wanted = 1;
    enum kv_err err = store_open(&options, &nine->store, diag);
    if (err != KV_OK)
        return err;
    /* A wake from memory is of one session. */
    if (nine->settings.ram_wanted) {
        uint64_t bytes = nine_store_need(nine, 1);
        err = store_ram_open(nine->store, bytes + bytes / 8 + RAM_TABLES, diag);
        if (err != KV_OK)
            return err;
        restore_lie(nine->store, nine->engine);
    }
    nine->source = (struct restore_source){.store = nine->store,
                                           .engine = nine->engine,
                                           .alloc = kv_alloc_system(),
                                           .clock = kv_clock_system()};
    const struct snapshot_settings settings = {.store = nine->store,
                                               .engine = nine->engine,
                                               .alloc = kv_alloc_system(),
                                               .clock = kv_clock_system(),
                                               .queue_max = QUEUE,
                                               .helpers = snapshot_helpers_usual()};
    return snapshot_open(&settings, &nine->snapshot, diag);
}

void nine_store_end(struct nine *nine) {
    if (nine->snapshot)
        snapshot_close(nine->snapshot);
    nine->snapshot = NULL;
    if (nine->engine)
        while (engine_apply(nine->engine))
            ;
    store_close(nine->store);
    nine->store = NULL;
}

void nine_close(struct nine *nine) {
    nine_drop_all(nine);
    if (nine->snapshot)
        snapshot_close(nine->snapshot);
    if (nine->engine)
        while (engine_apply(nine->engine))
            ;
    store_close(nine->store);
    engine_close(nine->engine);
    synth_rows_drop(nine->rows);
    for (uint32_t i = 0; i < NINE_USERS_MAX; i++)
        free(nine->users[i].ids);
    baton_release(&nine->baton);
    pthread_cond_destroy(&nine->stepping);
    pthread_mutex_destroy(&nine->lock);
    memset(nine, 0, sizeof *nine);
}

void nine_settle(struct nine *nine) {
    if (nine->snapshot)
        snapshot_drain(nine->snapshot);
    while (engine_apply(nine->engine))
        ;
}

static uint32_t tokens_of(const struct nine *nine, uint32_t index) {
    uint64_t tokens = nine->settings.tokens >> (nine->settings.mixed ? index % 3 : 0);

    return (uint32_t)(tokens < NINE_TOKENS_MIN ? NINE_TOKENS_MIN : tokens);
}

uint64_t nine_store_need(const struct nine *nine, uint32_t sessions) {
    const struct layout_geometry *geometry = &nine->model.geometry;
    struct image_policy top = nine->policy;
    uint64_t bytes = 0;

    /* Everything is written at the top of the ladder. */
    top.age_count = 0;
    for (uint32_t i = 0; i < sessions; i++) {
        struct nine_pool pool = {0};
        nine_pool_predict(&top, tokens_of(nine, i) + 512, &pool);
        bytes += pool.slots * layout_slot_bytes(geometry) +
                 pool.streams[LAYOUT_META] * layout_meta_frame_bytes(geometry);
    }
    return bytes + bytes / 128;
}

/* --- a user's text */

/* Words: shared keys, absent keys, then those of each user: its own key, and eleven values. */
static uint32_t word_of(uint32_t index, uint32_t which) {
    return NINE_SHARED + NINE_ABSENT + index * NINE_WORDS + which;
}

static const uint32_t needle_facts[NINE_NEEDLES] = {6, 7, 8, 9, 10, 11, 12, 13};

static void plant(struct nine *nine, uint32_t index, uint32_t which, uint64_t at) {
    static const enum support_synth_kind kinds[NINE_FACTS] = {
        SUPPORT_GRADED, SUPPORT_GRADED, SUPPORT_GRADED, SUPPORT_GRADED, SUPPORT_SIX,
        SUPPORT_PLAIN,  SUPPORT_PLAIN,  SUPPORT_PLAIN,  SUPPORT_PLAIN,  SUPPORT_PLAIN,
        SUPPORT_PLAIN,  SUPPORT_PLAIN,  SUPPORT_PLAIN,  SUPPORT_PLAIN};
    struct nine_user *user = &nine->users[index];
    struct support_synth_fact *fact = &user->facts[which];

    *fact = (struct support_synth_fact){.kind = kinds[which], .key = which, .at = at};
    /* FP8 and INT4 have not the grid that words for so many bits are made for. */
    if (nine->policy.recipe == IMAGE_RECIPE_FP8 || nine->policy.recipe == IMAGE_RECIPE_V1)
        fact->kind = fact->kind == SUPPORT_GRADED ? SUPPORT_ABSENT : SUPPORT_PLAIN;
    if (which == NINE_FACTS - 1)
        fact->key = word_of(index, 0);
    if (kinds[which] == SUPPORT_GRADED)
        fact->value =
            nine->synth.words - nine->synth.families + (4 * index + which) % nine->synth.families;
    else
        fact->value = word_of(index, 1 + which - 4);
    if (fact->kind == SUPPORT_SIX)
        fact->other = word_of(index, NINE_WORDS - 1);
    support_synth_plant(fact, user->ids);
}

/* One graded word in each quarter of the blocks, the oldest first; the others on edges. */
static void write_text(struct nine *nine, uint32_t index) {
    struct nine_user *user = &nine->users[index];
    uint64_t blocks = layout_sealed_blocks(user->tokens), first = LAYOUT_SINK_TOKENS;
    uint64_t window = first + blocks * LAYOUT_BLOCK_TOKENS;

    support_synth_filler(&nine->synth, nine->settings.seed * 1000 + index, user->ids, user->tokens);
    /* The model's end token follows, and a key must not be followed by one. */
    user->ids[user->tokens - 1] = synth_id(SYNTH_VALUE, nine->synth.words / 2);
    if (nine->settings.blank)
        return;
    for (uint32_t quarter = 0; quarter < 4; quarter++)
        plant(nine, index, quarter,
              first + (2 * quarter + 1) * blocks / 8 * LAYOUT_BLOCK_TOKENS + 100 + index % 16);
    plant(nine, index, 4, first + blocks / 2 * LAYOUT_BLOCK_TOKENS + 2 * LAYOUT_PAGE_TOKENS - 3);
    plant(nine, index, 5, 20);
    plant(nine, index, 6, first - 1);                              /* sinks and block 0 */
    plant(nine, index, 7, first + LAYOUT_BLOCK_TOKENS - 1);        /* blocks 0 and 1 */
    plant(nine, index, 8, first + (blocks * 5 / 8 + 1) * 256 - 1); /* two blocks in the middle */
    plant(nine, index, 9, first + blocks / 3 * LAYOUT_BLOCK_TOKENS + LAYOUT_PAGE_TOKENS - 1);
    plant(nine, index, 10, window - 1); /* the last block and the window */
    plant(nine, index, 11, first + blocks / 4 * LAYOUT_BLOCK_TOKENS + 2 * LAYOUT_PAGE_TOKENS - 1);
    plant(nine, index, 12, first + blocks * 7 / 8 * LAYOUT_BLOCK_TOKENS + 200);
    plant(nine, index, 13, user->tokens - 2 * SUPPORT_SYNTH_FACT);
}

enum kv_err nine_add(struct nine *nine, uint32_t index, struct kv_diag *diag) {
    struct nine_user *user = &nine->users[index];
    const struct session_settings settings = {
        .name = user->name, .policy = nine->policy, .sampler = {.top_p = 1, .top_k = 1, .seed = 1}};
    double begun = nine_seconds();
    enum kv_err err = KV_OK;

    snprintf(user->name, sizeof user->name, "user-%02u", index + 1);
    user->tokens = tokens_of(nine, index);
    if (!user->ids)
        user->ids = calloc(user->tokens, sizeof *user->ids);
    if (!user->ids)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the text of %s", user->name);
    write_text(nine, index);
    KV_TRY(session_create(nine->engine, &settings, &user->session, diag));
    const struct fill fill =
        support_synth_fill(nine->rows, user->ids, user->tokens - 1, nine->settings.threads);
    KV_TRY(fill_session(user->session, &fill, diag));
    /* The last token is computed; what is sampled from it is pending from now on. */
    KV_TRY(session_feed(user->session, user->ids + user->tokens - 1, 1, IMAGE_USER, diag));
    KV_TRY(session_generate(user->session, 1, diag));
    for (uint32_t count = 1; count;) {
        struct engine_event events[EVENTS];
        KV_TRY(engine_step(nine->engine, events, &count, diag));
        for (uint32_t i = 0; i < count; i++)
            if (events[i].kind == ENGINE_FAILED)
                KV_TRY(events[i].err);
    }
    user->exists = 1;
    nine->filled_tokens += user->tokens;
    nine->filled_s += nine_seconds() - begun;
done:
    if (err != KV_OK)
        nine_drop(nine, index);
    return err;
}

void nine_drop(struct nine *nine, uint32_t index) {
    struct nine_user *user = &nine->users[index];

    if (user->session)
        session_drop(user->session);
    user->session = NULL;
    user->exists = 0;
}

void nine_drop_all(struct nine *nine) {
    for (uint32_t i = 0; i < NINE_USERS_MAX; i++)
        nine_drop(nine, i);
    if (nine->engine)
        nine_settle(nine);
}

enum kv_err nine_register(struct nine *nine, uint32_t index, struct kv_diag *diag) {
    const struct nine_user *user = &nine->users[index];
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; err == KV_OK && i < NINE_NEEDLES; i++)
        err = support_synth_register(user->session, &user->facts[needle_facts[i]], diag);
    return err;
}

/* --- decoding */

enum kv_err nine_step(struct nine *nine, uint32_t *tokens_out, struct kv_diag *diag) {
    struct engine_event events[EVENTS];
    uint32_t count = 0;

    *tokens_out = 0;
    pthread_mutex_lock(&nine->lock);
    nine->steps++;
    pthread_cond_broadcast(&nine->stepping);
    pthread_mutex_unlock(&nine->lock);
    for (uint32_t i = 0; i < NINE_SESSIONS_MAX; i++) {
        struct nine_user *user = &nine->users[i];
        if (!user->session || user->away)
            continue;
        if (user->session->n + ROOM >= nine->synth.context_tokens ||
            user->session->state == SESSION_ACTIVE)
            continue;
        enum kv_err err = session_generate(user->session, 1, diag);
        if (err != KV_OK)
            return err;
    }
    enum kv_err err = engine_step(nine->engine, events, &count, diag);
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        *tokens_out += events[i].kind == ENGINE_TOKEN;
        if (events[i].kind == ENGINE_FAILED)
            err = events[i].err;
    }
    return err;
}

/* --- questions */

static uint32_t stranger(const struct nine *nine, uint32_t index, uint32_t which) {
    return (index + 1 + which) % nine->user_count;
}

void nine_questions(const struct nine *nine, uint32_t index,
                    struct support_synth_fact questions[NINE_ASKS]) {
    struct support_synth_fact *next = questions + NINE_FACTS;

    memcpy(questions, nine->users[index].facts, sizeof nine->users[index].facts);
    for (uint32_t i = 0; i < NINE_FOREIGN; i++)
        *next++ = (struct support_synth_fact){.kind = SUPPORT_ABSENT,
                                              .key = stranger(nine, index, i) == index
                                                         ? NINE_SHARED
                                                         : word_of(stranger(nine, index, i), 0)};
    for (uint32_t i = 0; i < NINE_ABSENT; i++)
        *next++ = (struct support_synth_fact){.kind = SUPPORT_ABSENT, .key = NINE_SHARED + i};
}

enum kv_err nine_ask(struct nine *nine, uint32_t index,
                     struct support_synth_answer answers[NINE_ASKS], struct kv_diag *diag) {
    struct support_synth_fact questions[NINE_ASKS];
    struct session_info info;

    session_info(nine->users[index].session, &info);
    nine->users[index].policy = nine->policy.pressure ? info.policy : nine->policy;
    nine_questions(nine, index, questions);
    memset(answers, 0, NINE_ASKS * sizeof *answers);
    return support_synth_try(nine->users[index].session, questions, NINE_ASKS, answers, diag);
}

/* --- judging */

static enum layout_tier tier_at(const struct image_policy *policy, uint64_t position, uint64_t n_kv,
                                uint32_t *depth_out) {
    uint64_t blocks = layout_sealed_blocks(n_kv), block;

    *depth_out = 0;
    if (position < LAYOUT_SINK_TOKENS)
        return LAYOUT_TIER_BF16;
    block = (position - LAYOUT_SINK_TOKENS) / LAYOUT_BLOCK_TOKENS;
    *depth_out = block < blocks ? 1 + (uint32_t)(block * 4 / blocks) : NINE_DEPTHS - 1;
    return block < blocks ? image_tier(policy, block, n_kv) : LAYOUT_TIER_BF16;
}

/* 1 when `id` is a value of that user's fact, however it was read. */
static int says_value_of(const struct nine *nine, uint32_t id,
                         const struct support_synth_fact *fact) {
    if (fact->kind == SUPPORT_ABSENT)
        return 0;
    if (id == synth_answer_id(fact->value))
        return 1;
    if (fact->kind == SUPPORT_SIX && id == synth_answer_id(fact->other))
        return 1;
    for (uint32_t i = 0; fact->kind == SUPPORT_GRADED && i < SYNTH_READINGS; i++)
        if (id == synth_reading_id(&nine->synth, fact->value, i))
            return 1;
    return 0;
}

/* A graded word may stand in two users' texts: what is also one's own value was not stolen. */
static int is_stolen(const struct nine *nine, uint32_t index, uint32_t which, uint32_t id) {
#ifdef BREAK_NINE_THIEF
    (void)nine, (void)index, (void)which, (void)id;
    return 0;
#endif
    if (which < NINE_FACTS && says_value_of(nine, id, &nine->users[index].facts[which]))
        return 0;
    for (uint32_t other = 0; other < nine->user_count; other++)
        for (uint32_t i = 0; other != index && i < NINE_FACTS; i++)
            if (nine->users[other].ids && says_value_of(nine, id, &nine->users[other].facts[i]))
                return 1;
    return 0;
}

static void add_tally(struct nine_tally *tally, int right, float margin) {
    if (tally->asked == 0 || margin < tally->margin)
        tally->margin = margin;
    tally->asked++;
    tally->right += (uint32_t)right;
}

void nine_judge(const struct nine *nine, uint32_t index, uint64_t n_kv,
                const struct support_synth_answer answers[NINE_ASKS], struct nine_score *score) {
    struct support_synth_fact questions[NINE_ASKS];

    nine_questions(nine, index, questions);
    score->users++;
    for (uint32_t i = 0; i < NINE_ASKS; i++) {
        uint32_t depth;
        enum layout_tier tier =
            tier_at(&nine->users[index].policy, questions[i].at + 1, n_kv, &depth);
        uint32_t expected = support_synth_expect(&nine->synth, &questions[i], tier);
        int right = answers[i].id == expected;
        score->asked++;
        score->right += (uint32_t)right;
        int stolen = !right && is_stolen(nine, index, i, answers[i].id);
        score->thief += (uint32_t)stolen;
        if (questions[i].kind == SUPPORT_ABSENT) {
            score->invented += (uint32_t)(!right && !stolen);
            *(i >= NINE_FACTS && i < NINE_FACTS + NINE_FOREIGN ? &score->foreign
                                                               : &score->absent) += 1;
        } else {
            add_tally(&score->tiers[tier], right, answers[i].margin);
            add_tally(&score->depths[depth], right, answers[i].margin);
            score->graded += questions[i].kind == SUPPORT_GRADED;
            score->named += questions[i].kind == SUPPORT_GRADED && right;
        }
        if (!right && score->first_wrong[0] == 0)
            snprintf(score->first_wrong, sizeof score->first_wrong,
                     "%s, question %u (kind %d at %llu, %s): token %u by %.1f, not %u",
                     nine->users[index].name, i, (int)questions[i].kind,
                     (unsigned long long)questions[i].at, layout_tier_name(tier), answers[i].id,
                     (double)answers[i].margin, expected);
    }
}

enum kv_err nine_prove(struct nine *nine, uint32_t index, struct nine_score *score,
                       struct kv_diag *diag) {
    struct support_synth_answer answers[NINE_ASKS];
    struct session_info info;
    enum kv_err err = nine_ask(nine, index, answers, diag);

    if (err != KV_OK)
        return err;
    session_info(nine->users[index].session, &info);
    nine_judge(nine, index, info.n_kv, answers, score);
    return KV_OK;
}

int nine_score_good(const struct nine_score *score) {
    return score->asked > 0 && score->right == score->asked && score->thief == 0 &&
           score->invented == 0 && score->named == score->graded;
}

/* --- needles that can fail */

void nine_count_kept(const struct nine *nine, uint32_t index, uint64_t n_kv,
                     const struct needle_result results[NINE_NEEDLES], struct nine_kept *kept) {
    const struct nine_user *user = &nine->users[index];
    uint32_t own = 0;

    for (uint32_t i = 0; i < NINE_NEEDLES; i++) {
        const struct needle_result *result = &results[i];
        uint32_t depth;
        enum layout_tier tier =
            tier_at(&user->policy, user->facts[needle_facts[i]].at + 1, n_kv, &depth);
        int is_kept = result->asked && result->passed && result->kept;
#ifdef BREAK_NINE_KEPT
        is_kept = result->passed;
#endif
        own += (uint32_t)is_kept;
        add_tally(&kept->tiers[tier], is_kept, result->logp - result->logp_hole);
        add_tally(&kept->depths[depth], is_kept, result->logp - result->logp_hole);
        if (!is_kept && kept->first_unkept[0] == 0)
            snprintf(kept->first_unkept, sizeof kept->first_unkept,
                     "%s, needle %u at %llu, %s: %s, log-probability %.2f, with the hole %.2f",
                     user->name, i, (unsigned long long)user->facts[needle_facts[i]].at,
                     layout_tier_name(tier),
                     !result->asked    ? "not asked"
                     : !result->passed ? "not answered"
                                       : "not kept",
                     (double)result->logp, (double)result->logp_hole);
    }
    kept->least = kept->users++ == 0 || own < kept->least ? own : kept->least;
    kept->asked += NINE_NEEDLES;
    kept->kept += own;
}

enum kv_err nine_keep(struct nine *nine, uint32_t index, struct nine_kept *kept,
                      struct kv_diag *diag) {
    const struct needle_question question = {.with_hole = 1, .update = 1};
    struct session *session = nine->users[index].session;
    struct needle_result results[NINE_NEEDLES];
    uint32_t indices[NINE_NEEDLES];
    const struct needle_list list = {indices, NINE_NEEDLES};
    struct session_info info;
    enum kv_err err = nine_register(nine, index, diag);

    for (uint32_t i = 0; i < NINE_NEEDLES; i++)
        indices[i] = i;
    if (err == KV_OK)
        err = needle_check_all(session, &list, &question, results, diag);
    if (err != KV_OK)
        return err;
    session_info(session, &info);
    nine->users[index].policy = nine->policy.pressure ? info.policy : nine->policy;
    nine_count_kept(nine, index, info.n_kv, results, kept);
    return KV_OK;
}
