/* tests/test_session.c - the life of a session: names, states, feeding, generating, cancelling.
 *
 * Responsible for: every refusal and its words, the table of moves, what a cancelled or failed
 * request leaves, exact accounting after random lives, every allocation failing once.
 * Not responsible for: bits (test_engine, test_transfer).
 */
#include "engine/session.h"

#include "engine/engine_inner.h"
#include "engine/model/tokenizer.h"
#include "engine/needle.h"
#include "tests/support_engine.h"
#include "tests/support_shelf.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { EVENTS = 64 };

static uint32_t vocab_of(struct engine *engine) {
    struct engine_model model;

    engine_model(engine, &model);
    return model.vocab_count;
}

static uint32_t used(struct engine *engine) {
    struct engine_slots slots;

    engine_slots(engine, &slots);
    return slots.used;
}

static void names_are_checked(void **state) {
    char name[IMAGE_NAME_BYTES_MAX + 2];
    static const char *const good[] = {
        "a",  "привет",    "名前",         "\xf0\x9f\x90\xa7", "a b",
        ".a", "e\xcc\x81", "\xe2\x80\x90", "\xe2\x81\x9f",     "\xe2\x82\xac"};
    static const struct {
        const char *name, *word;
    } bad[] = {{"", "empty"},
               {"..", "ends with"},
               {"a/b", "'/'"},
               {"../x", "'/'"},
               {"a\nb", "control"},
               {"\x7f", "control"},
               {"\xc2\x80", "control"},
               {"\xc0\xaf", "UTF-8"},
               {"\xed\xa0\x80", "UTF-8"},
               {"a\xff", "UTF-8"},
               {"\xf4\x90\x80\x80", "UTF-8"},
               {"\xe2\x82", "UTF-8"},
               {"a\xe2\x80\x8b", "unseen"},
               {"a\xe2\x80\x8f", "unseen"},
               {"a\xe2\x80\xaa", "unseen"},
               {"a\xe2\x80\xae", "unseen"},
               {"a\xe2\x81\xa6", "unseen"},
               {"a\xe2\x81\xa9", "unseen"},
               {"\xef\xbb\xbf"
                "a",
                "unseen"},
               {"a\xe2\x81\xa0"
                "b",
                "unseen"},
               {"a\xc2\xad"
                "b",
                "unseen"},
               {"a\xd8\x9c", "unseen"}};
    struct kv_diag diag = {""};

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        if (session_check_name(good[i], &diag) != KV_OK)
            fail_msg("%s", diag.text);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(session_check_name(bad[i].name, &diag), KV_ERR_INVALID);
        if (!strstr(diag.text, bad[i].word))
            fail_msg("'%s' does not say %s", diag.text, bad[i].word);
    }
    /* Names that stores of before may hold, and that nobody gives any more. */
    static const char *const old[] = {"a@b", "@", "a@", " ", "   "};
    for (size_t i = 0; i < sizeof old / sizeof old[0]; i++) {
        assert_int_equal(session_check_name(old[i], &diag), KV_OK);
        assert_int_equal(session_check_new_name(old[i], &diag), KV_ERR_INVALID);
    }
    assert_int_equal(session_check_new_name("a b", &diag), KV_OK);
    assert_int_equal(session_check_new_name("a/b", &diag), KV_ERR_INVALID);
    memset(name, 'x', sizeof name);
    name[IMAGE_NAME_BYTES_MAX] = 0;
    assert_int_equal(session_check_name(name, &diag), KV_OK);
    name[IMAGE_NAME_BYTES_MAX] = 'x';
    name[IMAGE_NAME_BYTES_MAX + 1] = 0;
    assert_int_equal(session_check_name(name, &diag), KV_ERR_INVALID);
}

static void settings_are_checked(void **state) {
    struct support_engine_options options = support_engine_default();
    struct session_settings settings = support_engine_greedy("s", IMAGE_RECIPE_V3);
    struct session *session = NULL;
    struct kv_diag diag = {""};

    (void)state;
    options.sessions_max = 2;
    struct engine *engine = support_engine_tiny(&options);
    settings.sampler.top_p = 2;
    assert_int_equal(session_create(engine, &settings, &session, &diag), KV_ERR_INVALID);
    settings = support_engine_greedy("s", (enum image_recipe)9);
    assert_int_equal(session_create(engine, &settings, &session, &diag), KV_ERR_INVALID);
    settings = support_engine_greedy("s", IMAGE_RECIPE_V3);
    settings.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 2, .ages = {500, 400}};
    assert_int_equal(session_create(engine, &settings, &session, &diag), KV_ERR_INVALID);
    assert_non_null(strstr(diag.text, "rise"));
    assert_int_equal(used(engine), 0);
    support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    settings = support_engine_greedy("s", IMAGE_RECIPE_V3);
    assert_int_equal(session_create(engine, &settings, &session, &diag), KV_ERR_EXISTS);
    support_engine_session(engine, "t", IMAGE_RECIPE_V3);
    settings = support_engine_greedy("u", IMAGE_RECIPE_V3);
    assert_int_equal(session_create(engine, &settings, &session, &diag), KV_ERR_NO_SLOTS);
    assert_int_equal(used(engine), 2 * 72);
    assert_ptr_equal(session_find(engine, "t"), session_at(engine, 1));
    assert_null(session_at(engine, 2));
    engine_close(engine);
}

static void moves_follow_the_table(void **state) {
    struct support_engine_options options = support_engine_default();
    struct session_info info;
    uint32_t ids[4] = {1, 2, 3, 4};

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    assert_int_equal(session_move(session, SESSION_WAKING), KV_ERR_BUSY);
    assert_int_equal(session_move(session, SESSION_STATE_COUNT), KV_ERR_BUSY);
    assert_int_equal(session_move(session, SESSION_SAVING), KV_OK);
    /* The session goes on while it is saved, and is active when the save ends first. */
    assert_int_equal(session_feed(session, ids, 4, IMAGE_USER, NULL), KV_OK);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_SAVING);
    assert_int_equal(session_move(session, SESSION_IDLE), KV_OK);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_ACTIVE);
    support_engine_run(engine);
    session_info(session, &info);
    assert_int_equal(info.state, SESSION_IDLE);
    assert_int_equal(info.n_kv, 4);
    assert_int_equal(session_move(session, SESSION_FAILED), KV_OK);
    assert_int_equal(session_feed(session, ids, 4, IMAGE_USER, NULL), KV_ERR_BUSY);
    for (int i = 0; i < SESSION_STATE_COUNT; i++)
        assert_string_not_equal(session_state_name((enum session_state)i), "unknown");
    engine_close(engine);
}

static void feeding_is_checked(void **state) {
    struct support_engine_options options = support_engine_default();
    static uint32_t ids[8193];
    struct session_info info;
    struct kv_diag diag = {""};

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    assert_int_equal(session_generate(session, 5, &diag), KV_ERR_INVALID);
    assert_int_equal(session_feed(session, ids, 8193, IMAGE_USER, &diag), KV_ERR_LIMIT);
    assert_non_null(strstr(diag.text, "8192"));
    assert_int_equal(session_feed(session, ids, 0, IMAGE_USER, &diag), KV_ERR_INVALID);
    ids[0] = vocab_of(engine);
    assert_int_equal(session_feed(session, ids, 1, IMAGE_USER, &diag), KV_ERR_INVALID);
    session_info(session, &info);
    assert_int_equal(info.n, 0);
    support_engine_ids(1, vocab_of(engine), ids, 300);
    support_engine_feed(session, ids, 300);
    assert_int_equal(session_generate(session, 0, &diag), KV_ERR_INVALID);
    assert_int_equal(session_generate(session, 5, &diag), KV_OK);
    assert_int_equal(session_generate(session, 5, &diag), KV_ERR_BUSY);
    assert_int_equal(session_feed(session, ids, 5, IMAGE_USER, &diag), KV_ERR_BUSY);
    support_engine_run(engine);
    session_info(session, &info);
    assert_true(info.n > 300);
    assert_int_equal(info.n - info.n_kv, 1);
    engine_close(engine);
}

/* Generation stops where the context ends, with the last token pending. CASE-35: more is refused;
 * no token moves to another position to make room, so what the session knows stays as it is. */
static void the_context_ends(void **state) {
    struct support_engine_options options = support_engine_default();
    static uint32_t ids[8192];
    struct engine_event events[EVENTS];
    struct session_info info;
    uint32_t count = 1;
    enum engine_done done = ENGINE_DONE_FED;
    struct kv_diag diag = {""};

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    support_engine_ids(1, vocab_of(engine), ids, 8192);
    support_engine_feed(session, ids, 8190);
    assert_int_equal(session_generate(session, 100, NULL), KV_OK);
    while (count) {
        assert_int_equal(engine_step(engine, events, &count, NULL), KV_OK);
        for (uint32_t i = 0; i < count; i++)
            done = events[i].kind == ENGINE_DONE ? events[i].done : done;
    }
    session_info(session, &info);
    assert_true(done == ENGINE_DONE_CONTEXT || done == ENGINE_DONE_STOP);
    if (done == ENGINE_DONE_CONTEXT)
        assert_int_equal(info.n, 8192);
    struct image_fingerprint before, after;
    assert_int_equal(session_fingerprint(session, 0, &before, &diag), KV_OK);
    assert_int_equal(session_feed(session, ids, 100, IMAGE_USER, &diag), KV_ERR_LIMIT);
    assert_int_equal(session_generate(session, 1, &diag), KV_ERR_LIMIT);
    uint64_t n = info.n;
    session_info(session, &info);
    assert_int_equal(info.n, n);
    assert_memory_equal(info.ids, ids, 8190 * sizeof *ids);
    assert_int_equal(session_fingerprint(session, 0, &after, &diag), KV_OK);
    assert_memory_equal(&before.logits, &after.logits, sizeof before.logits);
    engine_close(engine);
}

/* BREAK_CANCEL keeps tokens that were never prefilled. */
static void a_cancelled_request_leaves_the_session_whole(void **state) {
    struct support_engine_options options = support_engine_default();
    struct engine_event events[EVENTS];
    struct session_info info;
    uint32_t ids[1000], count;

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    support_engine_ids(1, vocab_of(engine), ids, 1000);
    support_engine_feed(session, ids, 100);
    /* In the middle of a prefill: what has no KV is taken back. */
    assert_int_equal(session_feed(session, ids, 1000, IMAGE_USER, NULL), KV_OK);
    assert_int_equal(engine_step(engine, events, &count, NULL), KV_OK);
    session_cancel(session);
    assert_int_equal(engine_step(engine, events, &count, NULL), KV_OK);
    assert_int_equal(count, 1);
    assert_int_equal(events[0].kind, ENGINE_DONE);
    assert_int_equal(events[0].done, ENGINE_DONE_CANCELLED);
    session_info(session, &info);
    assert_int_equal(info.n_kv, 256);
    assert_int_equal(info.n, 256);
    assert_int_equal(info.state, SESSION_IDLE);
    /* In the middle of an answer: the sampled token stays, pending. */
    support_engine_feed(session, ids, 3);
    assert_int_equal(session_generate(session, 50, NULL), KV_OK);
    assert_int_equal(engine_step(engine, events, &count, NULL), KV_OK);
    session_cancel(session);
    assert_int_equal(engine_step(engine, events, &count, NULL), KV_OK);
    session_info(session, &info);
    assert_int_equal(info.n, 260);
    assert_int_equal(info.n_kv, 259);
    /* A feed on top of a pending token, cancelled before its first step: the pending one stays. */
    assert_int_equal(session_feed(session, ids, 9, IMAGE_USER, NULL), KV_OK);
    session_cancel(session);
    support_engine_run(engine);
    session_info(session, &info);
    assert_int_equal(info.n, 260);
    assert_int_equal(info.n_kv, 259);
    support_engine_feed(session, ids, 9);
    session_info(session, &info);
    assert_int_equal(info.n_kv, 269);
    engine_close(engine);
}

/* --- questions leave no trace */

static void count_row(void *context, uint64_t position, const float *logits) {
    uint32_t *count = context;

    (void)logits;
    assert_int_equal(position, *count);
    ++*count;
}

static void a_question_leaves_no_trace(void **state) {
    struct support_engine_options options = support_engine_default();
    struct image_fingerprint before, hidden_not, after;
    struct session_info info, later;
    uint32_t ids[1500], rows = 0;
    struct session_range hole = {400, 420};
    struct session_ask ask = {.ids = ids, .count = 30, .hide = &hole, .hide_count = 1};
    struct kv_diag diag = {""};

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    assert_int_equal(session_fingerprint(session, 0, &before, &diag), KV_ERR_INVALID);
    support_engine_ids(1, vocab_of(engine), ids, 1500);
    support_engine_feed(session, ids, 1500);
    session_info(session, &info);
    assert_int_equal(session_fingerprint(session, 0, &before, NULL), KV_OK);
    assert_int_equal(session_ask(session, &ask, count_row, &rows, NULL), KV_OK);
    assert_int_equal(rows, 30);
    assert_int_equal(session_fingerprint(session, 0, &hidden_not, NULL), KV_OK);
    assert_memory_equal(&before, &hidden_not, sizeof before);
    session_info(session, &later);
    assert_int_equal(later.n, info.n);
    assert_int_equal(later.slots, info.slots);
    assert_int_equal(later.tokens_prefilled, info.tokens_prefilled);
    /* The pending token stands in front: one row more inside, the same number outside. */
    support_engine_generate(session, 1);
    rows = 0;
    assert_int_equal(session_ask(session, &ask, count_row, &rows, NULL), KV_OK);
    assert_int_equal(rows, 30);
    ask.count = 0;
    rows = 0;
    assert_int_equal(session_ask(session, &ask, count_row, &rows, NULL), KV_OK);
    assert_int_equal(rows, 1);
    ask.count = 256;
    assert_int_equal(session_ask(session, &ask, count_row, &rows, &diag), KV_ERR_LIMIT);
    assert_int_equal(session_feed(session, ids, 2, IMAGE_USER, NULL), KV_OK);
    assert_int_equal(session_fingerprint(session, 0, &after, &diag), KV_ERR_BUSY);
    engine_close(engine);
}

struct answer {
    struct kv_digest digest;
    uint32_t vocab;
};

static void keep_row(void *context, uint64_t position, const float *logits) {
    struct answer *answer = context;

    (void)position;
    answer->digest = kv_digest_of(logits, answer->vocab * sizeof *logits);
}

static struct kv_digest ask_with_hole(struct session *session, uint64_t first, uint64_t end) {
    uint32_t id = 5;
    struct session_range hole = {first, end};
    struct session_ask ask = {.ids = &id, .count = 1, .hide = &hole, .hide_count = first < end};
    struct answer answer = {.vocab = vocab_of(session_engine(session))};

    assert_int_equal(session_ask(session, &ask, keep_row, &answer, NULL), KV_OK);
    return answer.digest;
}

enum { ASKS = 40, ASK_ROWS = 255 };

/* Digests of rows by question; context of both callbacks. */
struct asked {
    struct kv_digest rows[ASKS][ASK_ROWS + 1];
    uint32_t counts[ASKS];
    uint32_t alone, vocab; /* the question that is asked alone */
};

static void keep_one(void *context, uint64_t row, const float *logits) {
    struct asked *asked = context;

    asked->rows[asked->alone][row] = kv_digest_of(logits, asked->vocab * sizeof *logits);
    asked->counts[asked->alone]++;
}

static void keep_many(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct asked *asked = context;

    asked->rows[ask][row] = kv_digest_of(logits, asked->vocab * sizeof *logits);
    asked->counts[ask]++;
}

/* Many questions in few batches have the bits of each alone, and only the rows that were wanted:
 * BREAK_MANY_CHUNKS takes all questions of a batch for its first. */
static void questions_in_one_batch_are_independent(void **state) {
    static struct asked alone, together;
    struct support_engine_options options = support_engine_default();
    struct session_ask asks[ASKS] = {{0}};
    struct session_range holes[ASKS];
    struct testing_random random;
    uint32_t ids[1500], wanted = 0;

    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    alone.vocab = together.vocab = vocab_of(engine);
    support_engine_ids(1, alone.vocab, ids, 1500);
    support_engine_feed(session, ids, 1500);
    testing_random_init(&random, testing_seed("questions", 3));
    for (uint32_t round = 0; round < 2; round++) {
        memset(alone.counts, 0, sizeof alone.counts);
        memset(together.counts, 0, sizeof together.counts);
        for (uint32_t i = 0; i < ASKS; i++) {
            uint64_t at = 64 + testing_random_below(&random, 1400);
            holes[i] = (struct session_range){at, at + 20};
            asks[i].ids = ids + testing_random_below(&random, 1200);
            asks[i].count = i == 7 ? ASK_ROWS : 1 + (uint32_t)testing_random_below(&random, 40);
            asks[i].hide = &holes[i];
            asks[i].hide_count = i % 3 == 0;
            asks[i].floor = i % 5 == 0;
            asks[i].rows_first = i % 2 == 0 ? 0 : asks[i].count - 1;
            alone.alone = i;
            assert_int_equal(session_ask(session, &asks[i], keep_one, &alone, NULL), KV_OK);
            wanted += asks[i].count - asks[i].rows_first;
        }
        assert_int_equal(session_ask_all(session, asks, ASKS, keep_many, &together, NULL), KV_OK);
        for (uint32_t i = 0; i < ASKS; i++) {
            assert_int_equal(alone.counts[i], asks[i].count - asks[i].rows_first);
            assert_int_equal(together.counts[i], alone.counts[i]);
            for (uint32_t row = asks[i].rows_first; row < asks[i].count; row++)
                assert_memory_equal(&alone.rows[i][row], &together.rows[i][row],
                                    sizeof alone.rows[i][row]);
        }
        support_engine_generate(session, 1); /* a pending token stands in front of each */
    }
    printf("%u rows compared\n", wanted);
    engine_close(engine);
}

/* Of 1000 tokens, alone in an engine, which is the caller's to close. */
static struct session *open_session(void) {
    struct support_engine_options options = support_engine_default();
    uint32_t ids[1000];
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);

    support_engine_ids(1, vocab_of(engine), ids, 1000);
    support_engine_feed(session, ids, 1000);
    return session;
}

/* BREAK_HOLE hides nothing. */
static void a_hole_covers_whole_blocks_and_pages(void **state) {
    struct session *session = open_session();

    (void)state;
    struct kv_digest whole = ask_with_hole(session, 0, 0);
    struct kv_digest sinks = ask_with_hole(session, 10, 20);
    struct kv_digest one = ask_with_hole(session, 100, 101);
    struct kv_digest block = ask_with_hole(session, 64, 320);
    struct kv_digest two = ask_with_hole(session, 319, 321);
    struct kv_digest page = ask_with_hole(session, 64 + 512 + 3, 64 + 512 + 4);
    assert_memory_equal(&whole, &sinks, sizeof whole);
    assert_memory_not_equal(&whole, &one, sizeof whole);
    assert_memory_equal(&one, &block, sizeof whole);
    assert_memory_not_equal(&one, &two, sizeof whole);
    assert_memory_not_equal(&whole, &page, sizeof whole);
    engine_close(session_engine(session));
}

static void what_is_brief_is_the_same(void **state) {
    struct session_info info, brief;
    struct session *session = open_session();

    (void)state;
    session_info(session, &info);
    memset(&brief, 0xA5, sizeof brief);
    session_brief(session, &brief);
    assert_int_equal(info.tier_blocks[LAYOUT_K8V4], info.blocks);
    assert_true(info.blocks > 0 && info.slots > 0 && brief.slots == 0);
    assert_int_equal(brief.tier_blocks[LAYOUT_K8V4], 0);
    assert_true(brief.blocks_durable == 0 && brief.coarse_blocks == 0);
    assert_string_equal(brief.name, info.name);
    assert_int_equal(brief.state, info.state);
    assert_true(brief.n == info.n && brief.n_kv == info.n_kv && brief.blocks == info.blocks);
    assert_int_equal(brief.window_tokens, info.window_tokens);
    assert_ptr_equal(brief.ids, info.ids);
    assert_true(image_policy_equal(&brief.policy, &info.policy));
    assert_int_equal(brief.policy_count, info.policy_count);
    assert_true(brief.last_used_ns == info.last_used_ns);
    engine_close(session_engine(session));
}

/* --- accounting */

/* BREAK_LEAK forgets one slot of a page. */
static void random_lives_leak_nothing(void **state) {
    struct support_engine_options options = support_engine_default();
    struct support_shelf shelf = {.hold = 0};
    struct engine_event events[EVENTS];
    struct testing_random random;
    static uint32_t ids[600];
    uint32_t made = 0;

    (void)state;
    options.slots = 72 * 5 + 100;
    options.reserve = 24;
    options.poison = 1;
    options.shuffle_seed = 5;
    options.hooks = support_shelf_hooks(&shelf);
    struct engine *engine = support_engine_tiny(&options);
    testing_random_init(&random, testing_seed("lives", 21));
    support_engine_ids(1, vocab_of(engine), ids, 600);
    for (uint32_t round = 0; round < 400; round++) {
        uint32_t sessions = 0, sum = 0, count, held = 0;
        while (session_at(engine, sessions))
            sessions++;
        struct session *session =
            session_at(engine, (uint32_t)testing_random_below(&random, sessions + 1));
        struct session_settings settings = support_engine_greedy("", IMAGE_RECIPE_V3);
        char name[32];
        snprintf(name, sizeof name, "s%u", made++);
        settings.name = name;
        settings.policy =
            (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 2, .ages = {256, 512}};
        if (testing_random_below(&random, 2))
            settings.policy.recipe = IMAGE_RECIPE_BF16;
        shelf.hold = testing_random_below(&random, 3) == 0;
        if (!session)
            (void)session_create(engine, &settings, &session, NULL);
        else if (testing_random_below(&random, 8) == 0)
            session_drop(session);
        else if (testing_random_below(&random, 4) == 0)
            (void)session_generate(session, 3, NULL);
        else
            (void)session_feed(session, ids, 1 + (uint32_t)testing_random_below(&random, 600),
                               IMAGE_USER, NULL);
        assert_int_equal(engine_step(engine, events, &count, NULL), KV_OK);
        if (testing_random_below(&random, 4) == 0)
            support_shelf_answer(&shelf, testing_random_below(&random, 4) != 0);
        engine_apply(engine);
        held = shelf.held_count;
        for (uint32_t i = 0; session_at(engine, i); i++) {
            struct session_info info;
            session_info(session_at(engine, i), &info);
            sum += info.slots;
        }
        /* What is used and in no session is held by the writer. */
        assert_true(used(engine) >= sum);
        assert_true(used(engine) - sum <= held * 32);
        if (!held)
            assert_int_equal(used(engine), sum);
        /* The shelf keeps bytes per name and index; they are not needed here. */
        if (shelf.block_count > SUPPORT_SHELF_BLOCKS_MAX / 2 && !held)
            support_shelf_release(&shelf);
    }
    support_shelf_answer(&shelf, 1);
    while (session_at(engine, 0))
        session_drop(session_at(engine, 0));
    engine_apply(engine);
    assert_int_equal(used(engine), 0);
    engine_close(engine);
    support_shelf_release(&shelf);
}

/* A life with every allocation failing once: NOMEM, nothing lost, nothing left behind. */
static enum kv_err short_life(struct engine *engine) {
    struct session_settings settings = support_engine_greedy("s", IMAGE_RECIPE_V3);
    struct support_shelf_saved saved = {.frozen = {.page_count = 0}};
    struct transfer_load *load = NULL;
    struct session *session = NULL;
    uint32_t ids[700];
    struct kv_diag diag = {""};
    enum kv_err err;

    support_engine_ids(1, vocab_of(engine), ids, 700);
    KV_TRY(session_create(engine, &settings, &session, &diag));
    KV_TRY(session_feed(session, ids, 700, IMAGE_USER, &diag));
    support_engine_run(engine);
    KV_TRY(session_generate(session, 3, &diag));
    support_engine_run(engine);
    KV_TRY(session_fingerprint(session, 1, &saved.fingerprint, &diag));
    KV_TRY(transfer_freeze(session, support_shelf_want, NULL, &saved.frozen, &diag));
    session_drop(session);
    session = NULL;
    KV_TRY(transfer_load_begin(engine, &saved.frozen.image, 0, &load, &diag));
    KV_TRY(transfer_load_publish(load, &session, &diag));
    load = NULL;
done:
    transfer_load_abandon(load);
    transfer_frozen_release(engine, &saved.frozen);
    if (session)
        session_drop(session);
    return err;
}

static void every_allocation_may_fail(void **state) {
    struct testing_alloc alloc;
    struct support_engine_options options = support_engine_default();
    struct support_shelf shelf = {.hold = 0};
    uint64_t failures = 0;

    (void)state;
    testing_alloc_init(&alloc, 0);
    options.alloc = &alloc.alloc;
    options.slots = 400;
    options.hooks = support_shelf_hooks(&shelf);
    struct engine *engine = support_engine_tiny(&options);
    int64_t live = alloc.live_count;
    for (uint64_t k = 1;; k++) {
        uint64_t failed = alloc.failed_count;
        alloc.fail_at = alloc.request_count + k;
        enum kv_err err = short_life(engine);
        alloc.fail_at = 0;
        engine_apply(engine);
        assert_int_equal(used(engine), 0);
        assert_int_equal(alloc.live_count, live);
        assert_null(session_at(engine, 0));
        if (alloc.failed_count == failed) {
            assert_int_equal(err, KV_OK);
            break;
        }
        assert_int_equal(err, KV_ERR_NOMEM);
        failures++;
    }
    printf("%llu allocations of a life failed once\n", (unsigned long long)failures);
    assert_true(failures > 15);
    engine_close(engine);
    assert_int_equal(alloc.live_count, 0);
    support_shelf_release(&shelf);
}

/* A question that has become too long for one chunk is passed over; those beside it are answered,
 * with the bits that they have alone. */
static void a_question_without_room_is_passed_over(void **state) {
    struct support_engine_options options = support_engine_default();
    struct kv_diag diag = {""};
    static uint32_t ids[600];
    static char text[IMAGE_TEXT_BYTES_MAX + 1];
    struct tokenizer_ids words = {ids, 600, 0, 0};
    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    memset(text, 'z', 300);
    memcpy(text + 290, " 4817 0123", 10);
    assert_int_equal(tokenizer_encode(engine_tokenizer(engine), text, 300, 0, &words, &diag),
                     KV_OK);
    support_engine_feed(session, ids, (uint32_t)words.count);
    const struct needle_text fits = {"fits", "which?", "", "4817"};
    const struct needle_text too_long = {"long", text, "", "4817"};
    assert_int_equal(needle_register(session, &fits, &diag), KV_OK);
    assert_int_equal(needle_register(session, &too_long, &diag), KV_OK);
    const uint32_t indices[3] = {1, 0, 1};
    const struct needle_list list = {indices, 3};
    const struct needle_question question = {.with_hole = 1, .update = 1};
    struct needle_result alone, results[3];
    assert_int_equal(needle_check(session, 1, &question, &alone, &diag), KV_ERR_LIMIT);
    assert_int_equal(needle_check(session, 0, &question, &alone, &diag), KV_OK);
    assert_int_equal(needle_check_all(session, &list, &question, results, &diag), KV_OK);
    assert_memory_equal(&results[1], &alone, sizeof alone);
    assert_true(alone.asked && alone.logp < 0);
    assert_false(results[0].asked || results[2].asked);
    uint32_t count = 0;
    assert_true(transfer_needles(session, &count)[0].asked_n_kv > 0);
    assert_int_equal(transfer_needles(session, &count)[1].asked_n_kv, 0);
    engine_close(engine);
}

struct rows {
    struct kv_digest of[2];
    uint32_t count;
};

static void take_row(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct rows *rows = context;
    (void)row;
    rows->of[ask] = kv_digest_of(logits, rows->count * sizeof *logits);
}

/* BREAK_NEEDLE_ASKED: its texts go while a question is under way. */
static void needles_stay_while_a_session_is_asked(void **state) {
    struct support_engine_options options = support_engine_default();
    struct image_needle needle = {.key = "k", .ask = "a", .answer_prefix = "", .expect = "e"};
    struct kv_diag diag = {""};
    uint32_t count = 0;
    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    assert_int_equal(transfer_add_needle(session, &needle, &diag), KV_OK);
    session_ask_begin(session);
    needle.key = "other";
    assert_int_equal(transfer_add_needle(session, &needle, &diag), KV_ERR_BUSY);
    assert_int_equal(transfer_drop_needle(session, 0, &diag), KV_ERR_BUSY);
    assert_non_null(strstr(diag.text, "being asked"));
    (void)transfer_needles(session, &count);
    assert_int_equal(count, 1);
    session_ask_end(session);
    assert_int_equal(transfer_drop_needle(session, 0, &diag), KV_OK);
    (void)transfer_needles(session, &count);
    assert_int_equal(count, 0);
    engine_close(engine);
}

/* With a pending token and without, at both tiers; BREAK_ALONG: it has gone with no question. */
static void a_fingerprint_goes_along(void **state) {
    struct support_engine_options options = support_engine_default();
    struct kv_diag diag = {""};
    uint32_t ids[900];
    (void)state;
    struct engine *engine = support_engine_tiny(&options);
    struct session *session = support_engine_session(engine, "s", IMAGE_RECIPE_V3);
    support_engine_ids(testing_seed("ids", 21), vocab_of(engine), ids, 900);
    support_engine_feed(session, ids, 900);
    const struct session_ask asks[2] = {{.ids = ids, .count = 7}, {.ids = ids + 9, .count = 1}};
    for (int turn = 0; turn < 4; turn++) {
        struct image_fingerprint alone, along, unasked, both[SESSION_PRINTS];
        struct rows without = {.count = vocab_of(engine)}, with = without;
        const int floor = turn % 2;
        if (turn == 2)
            support_engine_generate(session, 3);
        assert_int_equal(session_fingerprint(session, floor, &alone, &diag), KV_OK);
        assert_int_equal(session_ask_all(session, asks, 2, take_row, &without, &diag), KV_OK);
        session_ask_begin(session);
        session_fingerprint_along(session, floor);
        assert_int_equal(session_ask_all(session, asks, 2, take_row, &with, &diag), KV_OK);
        assert_int_equal(session->along, 0);
        assert_int_equal(session_fingerprint_take(session, &along, &diag), KV_OK);
        session_fingerprint_along(session, floor);
        assert_int_equal(session_fingerprint_take(session, &unasked, &diag), KV_OK);
        session_fingerprints_along(session);
        assert_int_equal(session_ask_all(session, asks, 2, take_row, &with, &diag), KV_OK);
        assert_int_equal(session->along, 0);
        assert_int_equal(session_fingerprints_take(session, both, &diag), KV_OK);
        session_ask_end(session);
        assert_memory_equal(&both[floor], &alone, sizeof alone);
        assert_memory_equal(&with, &without, sizeof with);
        assert_memory_equal(&along, &alone, sizeof along);
        assert_memory_equal(&unasked, &alone, sizeof unasked);
    }
    engine_close(engine);
}

TESTING_MAIN(cmocka_unit_test(a_question_without_room_is_passed_over),
             cmocka_unit_test(a_fingerprint_goes_along),
             cmocka_unit_test(needles_stay_while_a_session_is_asked),
             cmocka_unit_test(names_are_checked), cmocka_unit_test(settings_are_checked),
             cmocka_unit_test(moves_follow_the_table), cmocka_unit_test(feeding_is_checked),
             cmocka_unit_test(the_context_ends),
             cmocka_unit_test(a_cancelled_request_leaves_the_session_whole),
             cmocka_unit_test(a_question_leaves_no_trace),
             cmocka_unit_test(questions_in_one_batch_are_independent),
             cmocka_unit_test(a_hole_covers_whole_blocks_and_pages),
             cmocka_unit_test(what_is_brief_is_the_same),
             cmocka_unit_test(random_lives_leak_nothing),
             cmocka_unit_test(every_allocation_may_fail))
