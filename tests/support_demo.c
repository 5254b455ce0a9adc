/* tests/support_demo.c - sessions, turns and references of the demo.
 *
 * Responsible for: doing the same thing in every process of the demo, so that only sleep, death and
 * wake can make a difference.
 * Not responsible for: the order of the acts.
 */
#include "tests/support_demo.h"

#include "engine/model/tokenizer.h"
#include "engine/needle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char *const questions[] = {"", "Name one thing that the text allows or forbids.",
                                        "Who is the text written for?"};

int demo_from_args(int argc, char **argv, struct demo *demo_out) {
    if (argc < 6)
        return 0;
    demo_out->dir = argv[2];
    demo_out->model_path = argv[3];
    demo_out->tokens = strtoull(argv[4], NULL, 10);
    demo_out->threads = (uint32_t)strtoul(argv[5], NULL, 10);
    return demo_out->tokens >= DEMO_TOKENS_MIN && demo_out->tokens <= DEMO_TOKENS_MAX &&
           demo_out->threads >= 1;
}

static struct image_policy demo_policy(void) {
    return (struct image_policy){
        .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};
}

static enum kv_err open_with(const struct demo *demo, const struct demo_opening *opening,
                             const struct demo_budget *budget, struct service **service_out,
                             struct kv_diag *diag) {
    char store[512];
    snprintf(store, sizeof store, "%s/%s", demo->dir, opening->store);
    struct service_settings settings;
    service_settings_usual(&settings);
    settings.model_path = demo->model_path;
    settings.store_dir = store;
    settings.program = "demo";
    settings.door = opening->door;
    settings.threads = demo->threads;
    settings.sessions_max = 2 * DEMO_SESSIONS;
    settings.slot_budget_bytes = budget->bytes;
    settings.reserve_slots = budget->reserve_slots;
    settings.poison_free_slots = 1;
    settings.shuffle_seed = 20261129;
    settings.policy = demo_policy();
    settings.sampler = (struct image_sampler){.temperature = 0, .top_p = 1, .top_k = 1, .seed = 1};
    return service_open(&settings, service_out, diag);
}

enum kv_err demo_plan(const struct demo *demo, struct demo_budget *budget_out,
                      struct kv_diag *diag) {
    struct demo_budget probe = {.bytes = 64u << 20};
    struct demo_opening opening = {DEMO_ROOM_NINE, "plan", NULL};
    struct service *service = NULL;
    enum kv_err err = open_with(demo, &opening, &probe, &service, diag);
    if (err != KV_OK)
        return err;
    struct image_policy policy = demo_policy();
    struct engine_slots slots;
    engine_slots(service_engine(service), &slots);
    struct demo_budget budget = {.slot_bytes = slots.slot_bytes,
                                 .meta_frame_bytes = slots.meta_frame_bytes};
    budget.session_slots =
        engine_plan_slots(service_engine(service), &policy, demo->tokens + DEMO_GROWTH_TOKENS);
    uint32_t fork_slots = engine_plan_slots(service_engine(service), &policy, 0);
    budget.reserve_slots = budget.session_slots + fork_slots;
    budget.slots = DEMO_RESIDENT * budget.session_slots + budget.reserve_slots;
    /* The engine turns bytes into slots with one META frame to eight slots. */
    budget.bytes = (uint64_t)(budget.slots + 8) * slots.slot_bytes +
                   (uint64_t)(budget.slots / 8 + 1) * slots.meta_frame_bytes;
    service_close(service);
    *budget_out = budget;
    return KV_OK;
}

enum kv_err demo_open(const struct demo *demo, const struct demo_opening *opening,
                      struct service **service_out, struct kv_diag *diag) {
    struct demo_budget budget;
    enum kv_err err = demo_plan(demo, &budget, diag);
    if (err != KV_OK)
        return err;
    if (opening->room == DEMO_ROOM_ALL)
        budget.bytes *= 2;
    return open_with(demo, opening, &budget, service_out, diag);
}

void demo_name(uint32_t index, char name_out[16]) {
    snprintf(name_out, 16, "chat-%02u", index + 1);
}

void demo_value(uint32_t index, char value_out[8]) {
    /* A multiplicative walk through seven digits: well apart, and the same in every process. */
    uint64_t value = 1000000 + (uint64_t)(index + 1) * 7393913 % 9000000;
    snprintf(value_out, 8, "%llu", (unsigned long long)value);
}

static enum kv_err count_tokens(struct service *service, const char *text, uint64_t *tokens_out,
                                struct kv_diag *diag) {
    struct tokenizer_ids ids = {NULL, 0, 0, 0};
    enum kv_err err = tokenizer_encode(engine_tokenizer(service_engine(service)), text,
                                       strlen(text), 0, &ids, diag);
    *tokens_out = ids.count;
    return err == KV_ERR_LIMIT ? KV_OK : err; /* no room was given: only the count is wanted */
}

/* The longest document that leaves the session's prompt within the wanted tokens. */
static enum kv_err fit_document(const struct demo *demo, struct service *service, uint32_t index,
                                const char *statement, char **text_out, struct kv_diag *diag) {
    const struct kv_alloc *alloc = service_alloc(service);
    /* The default system message and the turn's frame take about 40. */
    uint64_t wanted = demo->tokens - 40 - DEMO_REPLY_TOKENS;
    struct licences *licences = NULL;
    enum kv_err err = licences_load(alloc, &licences, diag);
    if (err != KV_OK)
        return err;
    struct licences_document document = {.index = index,
                                         .count = DEMO_SESSIONS,
                                         .bytes = wanted * 6,
                                         .insert = statement,
                                         .depth = 0.3 + 0.6 * index / (DEMO_SESSIONS - 1)};
    char *text = NULL;
    for (;;) {
        uint64_t tokens = 0;
        err = licences_document(licences, &document, &text, diag);
        if (err == KV_OK)
            err = count_tokens(service, text, &tokens, diag);
        if (err != KV_OK || tokens <= wanted)
            break;
        kv_alloc_release(alloc, text);
        text = NULL;
        document.bytes -= 1 + 3 * (tokens - wanted);
    }
    licences_drop(licences);
    if (err == KV_OK)
        *text_out = text;
    else
        kv_alloc_release(alloc, text);
    return err;
}

enum kv_err demo_first_turn(const struct demo *demo, struct service *service, uint32_t index,
                            struct session **session_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    char name[16], value[8];
    char *text = NULL;
    struct session *session = NULL;
    struct turn_result result = {0};
    struct needle_form form;
    demo_name(index, name);
    demo_value(index, value);
    KV_TRY(needle_house_form(DEMO_KEY, value, &form, diag));
    KV_TRY(fit_document(demo, service, index, form.statement, &text, diag));
    struct service_lookup lookup = {.create = 1};
    struct service_opened opened;
    KV_TRY(service_session(service, name, &lookup, &session, &opened, diag));
    struct template_message message = {TEMPLATE_USER, text, strlen(text)};
    struct turn_options options = {
        .messages = &message, .message_count = 1, .tokens_max = DEMO_REPLY_TOKENS};
    KV_TRY(turn_run(service, session, &options, &result, diag));
    struct needle_text needle = {form.key, form.ask, form.answer_prefix, form.expect};
    KV_TRY(needle_register(session, &needle, diag));
    *session_out = session;
done:
    turn_result_release(service, &result);
    kv_alloc_release(service_alloc(service), text);
    return err;
}

struct row_digest {
    struct kv_digest_state state;
    size_t row_bytes;
};

static void digest_row(void *context, uint64_t position, const float *logits) {
    (void)position;
    struct row_digest *rows = context;
    kv_digest_update(&rows->state, logits, rows->row_bytes);
}

/* One user turn; adds the answer's ids. */
static enum kv_err take_turn(struct service *service, struct session *session, const char *question,
                             struct demo_answer *answer, struct kv_diag *diag) {
    struct template_message message = {TEMPLATE_USER, question, strlen(question)};
    struct turn_options options = {.messages = &message,
                                   .message_count = 1,
                                   .tokens_max = DEMO_GREEDY_TOKENS - answer->id_count};
    struct turn_result result = {0};
    enum kv_err err = turn_run(service, session, &options, &result, diag);
    if (err == KV_OK) {
        struct session_info info;
        session_info(session, &info);
        for (uint64_t i = 0; i < result.tokens_generated; i++)
            answer->ids[answer->id_count++] = info.ids[info.n - result.tokens_generated + i];
    }
    turn_result_release(service, &result);
    return err;
}

enum kv_err demo_answer_turn(struct service *service, struct session *session, uint32_t turn,
                             struct demo_answer *answer_out, struct kv_diag *diag) {
    struct demo_answer answer = {0};
    struct image_fingerprint fingerprint;
    struct engine_model model;
    struct session_info info;
    engine_model(service_engine(service), &model);
    session_info(session, &info);
    answer.n_kv = info.n_kv;
    enum kv_err err = session_fingerprint(session, 0, &fingerprint, diag);
    if (err != KV_OK)
        return err;
    answer.fingerprint = fingerprint.logits;
    struct row_digest rows = {.row_bytes = model.vocab_count * sizeof(float)};
    kv_digest_init(&rows.state);
    session_observe(session, digest_row, &rows);
    /* A short answer is followed by "Go on.", so that every session decodes all its tokens. */
    const char *question = questions[turn];
    while (err == KV_OK && answer.id_count < DEMO_GREEDY_TOKENS) {
        err = take_turn(service, session, question, &answer, diag);
        question = "Go on.";
    }
    session_observe(session, NULL, NULL);
    if (err != KV_OK)
        return err;
    answer.logits = kv_digest_final(&rows.state);
    *answer_out = answer;
    return KV_OK;
}

/* memcmp and not kv_digest_equal: the blind sabotage replaces that one. */
int demo_answer_equal(const struct demo_answer *a, const struct demo_answer *b) {
    return a->n_kv == b->n_kv && a->id_count == b->id_count &&
           memcmp(a->ids, b->ids, sizeof a->ids) == 0 &&
           memcmp(&a->fingerprint, &b->fingerprint, sizeof a->fingerprint) == 0 &&
           memcmp(&a->logits, &b->logits, sizeof a->logits) == 0;
}

static FILE *open_file(const struct demo *demo, const char *name, const char *mode) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", demo->dir, name);
    return fopen(path, mode);
}

int demo_write_file(const struct demo *demo, const char *name, const void *bytes, size_t size) {
    FILE *file = open_file(demo, name, "wb");
    if (file == NULL)
        return 0;
    size_t wrote = fwrite(bytes, size, 1, file);
    return fclose(file) == 0 && wrote == 1;
}

int demo_read_file(const struct demo *demo, const char *name, void *bytes, size_t size) {
    FILE *file = open_file(demo, name, "rb");
    if (file == NULL)
        return 0;
    size_t got = fread(bytes, size, 1, file);
    fclose(file);
    return got == 1;
}

int demo_check_rss(struct service *service, const char *who) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    struct engine_model model;
    struct engine_slots slots;
    engine_model(service_engine(service), &model);
    engine_slots(service_engine(service), &slots);
    double mib = 1024.0 * 1024.0;
    double peak = (double)usage.ru_maxrss / 1024.0;
    double bound =
        ((double)model.weight_bytes + (double)slots.pool_bytes) / mib + DEMO_RSS_MARGIN_MIB;
    printf("  %s: peak RSS %.0f MiB, allowed %.0f (weights %.0f + slots %.0f + %d)%s\n", who, peak,
           bound, (double)model.weight_bytes / mib, (double)slots.pool_bytes / mib,
           DEMO_RSS_MARGIN_MIB, peak <= bound ? "" : "  TOO MUCH");
    return peak <= bound;
}
