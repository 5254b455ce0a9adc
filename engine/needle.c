/* engine/needle.c - asking a session for a fact that it must still know.
 *
 * Responsible for: where a fact stands in the session's text, the chunk that asks for it, and the
 * two numbers that decide: do all argmaxes agree, and what does the hole cost.
 * Not responsible for: throwaway forwards (session_ask) or choosing which facts to keep.
 */
#include "engine/needle.h"

#include "engine/model/sampler.h"
#include "engine/model/template.h"
#include "engine/model/tokenizer.h"
#include "store/base/bytes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Questions that are built before they are asked together. */
enum { ASK_IDS_MAX = 255, ASK_TEXT_BYTES_MAX = 2 * IMAGE_TEXT_BYTES_MAX, TOGETHER = 16 };

enum kv_err needle_house_form(const char *key, const char *value, struct needle_form *form_out,
                              struct kv_diag *diag) {
    if (key[0] == 0 || strlen(key) >= 100 || value[0] == 0 || strlen(value) >= 60)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "a needle's key has 1 to 99 bytes and its value 1 to 59");
    struct needle_form *form = form_out;
    snprintf(form->key, sizeof form->key, "%s", key);
    snprintf(form->expect, sizeof form->expect, "%s", value);
    snprintf(form->statement, sizeof form->statement,
             "One of the special magic numbers for %s is: %s. "
             "The special magic number for %s is: %s.",
             key, value, key, value);
    snprintf(form->ask, sizeof form->ask,
             "What is the special magic number for %s mentioned in the text?", key);
    snprintf(form->answer_prefix, sizeof form->answer_prefix,
             "The special magic number for %s is: ", key);
    return KV_OK;
}

/* Tokens of a session seen as one byte string. */
struct text_view {
    const struct tokenizer *tokenizer;
    const uint32_t *ids;
    uint64_t count;
};

/* 1 when `want` begins at byte `byte` of token `token`; *end_out is the token behind its end. */
static int stands_at(const struct text_view *view, uint64_t token, size_t byte, const char *want,
                     uint64_t *end_out) {
    size_t left = strlen(want);
    for (uint64_t at = token; at < view->count; at++) {
        struct gguf_text piece = tokenizer_piece(view->tokenizer, view->ids[at]);
        size_t take = piece.size_bytes - byte < left ? piece.size_bytes - byte : left;
        if (memcmp(piece.bytes + byte, want, take) != 0)
            return 0;
        want += take;
        left -= take;
        if (left == 0) {
            *end_out = at + 1;
            return 1;
        }
        byte = 0;
    }
    return 0;
}

/* Every statement in its own span; two that share a page share a span, since the hole is a page. */
static enum kv_err find_spans(const struct text_view *view, struct image_needle *needle,
                              struct kv_diag *diag) {
    for (uint64_t token = 0; token < view->count; token++) {
        struct gguf_text piece = tokenizer_piece(view->tokenizer, view->ids[token]);
        for (size_t byte = 0; byte < piece.size_bytes; byte++) {
            uint64_t end = 0;
            if (!stands_at(view, token, byte, needle->expect, &end))
                continue;
            if (token < LAYOUT_SINK_TOKENS)
                return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                                   "'%s' stands in the first %d tokens, which always stay as they "
                                   "are: a needle there cannot fail; state it further on",
                                   needle->expect, LAYOUT_SINK_TOKENS);
            struct image_span *last =
                needle->span_count == 0 ? NULL : &needle->spans[needle->span_count - 1];
            if (last != NULL && token < last->end + LAYOUT_PAGE_TOKENS) {
                last->end = end;
            } else if (needle->span_count == IMAGE_SPANS_MAX) {
                return kv_diag_set(diag, KV_ERR_LIMIT,
                                   "'%s' stands in more than %d places of the session; choose a "
                                   "value that is rarer",
                                   needle->expect, IMAGE_SPANS_MAX);
            } else {
                needle->spans[needle->span_count++] =
                    (struct image_span){.role = IMAGE_RAW, .first = token, .end = end};
            }
        }
    }
    if (needle->span_count == 0)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                           "'%s' does not stand in this session, so it cannot be remembered; say "
                           "it in the chat first",
                           needle->expect);
    return KV_OK;
}

int needle_stands(struct session *session, const char *value) {
    struct session_info info;
    session_brief(session, &info);
    struct text_view view = {engine_tokenizer(session_engine(session)), info.ids, info.n};
    for (uint64_t token = 0; token < view.count; token++) {
        struct gguf_text piece = tokenizer_piece(view.tokenizer, view.ids[token]);
        uint64_t end = 0;
        for (size_t byte = 0; byte < piece.size_bytes; byte++)
            if (stands_at(&view, token, byte, value, &end))
                return 1;
    }
    return 0;
}

static enum kv_err check_texts(const struct needle_text *text, struct kv_diag *diag) {
    const char *const parts[] = {text->key, text->ask, text->answer_prefix, text->expect};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (strlen(parts[i]) > IMAGE_TEXT_BYTES_MAX)
            return kv_diag_set(diag, KV_ERR_LIMIT, "a needle's texts have at most %d bytes each",
                               IMAGE_TEXT_BYTES_MAX);
    }
    if (text->key[0] == 0 || text->ask[0] == 0 || text->expect[0] == 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "a needle needs a key, a question and an expected answer");
    return KV_OK;
}

enum kv_err needle_register(struct session *session, const struct needle_text *text,
                            struct kv_diag *diag) {
    enum kv_err err = check_texts(text, diag);
    if (err != KV_OK)
        return err;
    struct session_info info;
    session_brief(session, &info);
    struct image_needle needle = {.key = (char *)text->key,
                                  .ask = (char *)text->ask,
                                  .answer_prefix = (char *)text->answer_prefix,
                                  .expect = (char *)text->expect};
    struct text_view view = {engine_tokenizer(session_engine(session)), info.ids, info.n_kv};
    err = find_spans(&view, &needle, diag);
    if (err != KV_OK)
        return err;
    return transfer_add_needle(session, &needle, diag);
}

/* The chunk that is asked: ids, and where the answer's tokens begin. */
struct question {
    uint32_t ids[ASK_IDS_MAX + 1];
    uint32_t count, answer_first;
};

/* What has to come before a new user turn, from how the session's ids end. */
static unsigned turn_flags(const struct session_info *info, const struct template *tmpl) {
    uint32_t end_id = template_end_id(tmpl);
    if (info->n == 0)
        return TEMPLATE_FIRST;
    if (info->ids[info->n - 1] == end_id)
        return TEMPLATE_AFTER_END;
    if (info->n >= 2 && info->ids[info->n - 2] == end_id)
        return 0;
    return TEMPLATE_END_TURN | TEMPLATE_AFTER_END;
}

static enum kv_err render(struct session *session, const struct image_needle *needle,
                          const char *value, struct tokenizer_ids *ids, struct kv_diag *diag) {
    char answer[ASK_TEXT_BYTES_MAX + 1];
    snprintf(answer, sizeof answer, "%s%s", needle->answer_prefix, value);
    struct session_info info;
    session_brief(session, &info);
    const struct template *tmpl = engine_template(session_engine(session));
    struct template_message messages[2] = {
        {TEMPLATE_USER, needle->ask, strlen(needle->ask)},
        {TEMPLATE_ASSISTANT, answer, strlen(answer)},
    };
    struct template_turns turns = {messages, 2, turn_flags(&info, tmpl) | TEMPLATE_OPEN_LAST};
    return template_ids(tmpl, &turns, ids, NULL, diag);
}

static enum kv_err build_question(struct session *session, const struct image_needle *needle,
                                  const char *value, struct question *out, struct kv_diag *diag) {
    uint32_t prefix_ids[ASK_IDS_MAX + 1];
    struct tokenizer_ids prefix = {prefix_ids, ASK_IDS_MAX, 0, 0};
    struct tokenizer_ids whole = {out->ids, ASK_IDS_MAX, 0, 0};
    enum kv_err err = render(session, needle, "", &prefix, diag);
    if (err == KV_OK)
        err = render(session, needle, value, &whole, diag);
    if (err == KV_ERR_LIMIT)
        return kv_diag_set(diag, err,
                           "the question and answer of needle '%s' are longer than %d tokens; "
                           "shorten them",
                           needle->key, ASK_IDS_MAX);
    if (err != KV_OK)
        return err;
    uint32_t common = 0;
    while (common < prefix.count && common < whole.count && prefix_ids[common] == out->ids[common])
        common++;
    if (common == 0 || common >= whole.count)
        return kv_diag_set(diag, KV_ERR_INVALID, "the expected answer of needle '%s' has no tokens",
                           needle->key);
    out->count = (uint32_t)whole.count;
    out->answer_first = common;
    return KV_OK;
}

struct score {
    int agrees;
    double logp;
    enum kv_err err;
};

/* A fact, the value that is asked for, and how. */
struct asking {
    const struct image_needle *needle;
    const char *value;
    int hole, floor;
};

struct together {
    uint32_t vocab_count;
    struct score *scores;
    struct question questions[TOGETHER];
    struct session_range hide[TOGETHER][IMAGE_SPANS_MAX];
    struct session_ask asks[TOGETHER];
};

static void score_row(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct together *together = context;
    const struct question *question = &together->questions[ask];
    struct score *score = &together->scores[ask];
    uint64_t next = row + 1;
    if (score->err != KV_OK || next < question->answer_first || next >= question->count)
        return;
    struct sampler_row sampled = {logits, together->vocab_count, next};
    struct sampler_expected expected;
    uint32_t id = question->ids[next];
    score->err = sampler_expect(&sampled, id, &expected, NULL);
    if (score->err != KV_OK)
        return;
    score->agrees &= expected.best == id;
    score->logp += expected.log_prob;
}

/* At most TOGETHER of them. */
static enum kv_err ask_together(struct session *session, const struct asking *askings,
                                uint32_t count, struct score *scores, struct kv_diag *diag) {
    struct engine_model model;
    engine_model(session_engine(session), &model);
    struct together together = {.vocab_count = model.vocab_count, .scores = scores};
    for (uint32_t i = 0; i < count; i++) {
        const struct image_needle *needle = askings[i].needle;
        struct question *question = &together.questions[i];
        enum kv_err err = build_question(session, needle, askings[i].value, question, diag);
        if (err != KV_OK)
            return err;
        scores[i] = (struct score){1, 0.0, KV_OK};
        for (uint32_t k = 0; k < needle->span_count; k++)
            together.hide[i][k] =
                (struct session_range){needle->spans[k].first, needle->spans[k].end};
        /* The answer's last token is predicted, never fed. */
        together.asks[i] =
            (struct session_ask){.ids = question->ids,
                                 .count = question->count - 1,
                                 .hide = together.hide[i],
                                 .hide_count = askings[i].hole ? needle->span_count : 0,
                                 .floor = askings[i].floor,
                                 .rows_first = question->answer_first - 1};
    }
    enum kv_err err = session_ask_all(session, together.asks, count, score_row, &together, diag);
    for (uint32_t i = 0; err == KV_OK && i < count; i++)
        if (scores[i].err != KV_OK)
            err = kv_diag_set(diag, scores[i].err,
                              "the answer to needle '%s' has no probability: its logits are not "
                              "finite, or the model is another one",
                              askings[i].needle->key);
    return err;
}

static enum kv_err find_needle(struct session *session, uint32_t index,
                               struct image_needle **needle_out, struct kv_diag *diag) {
    uint32_t count = 0;
    struct image_needle *needles = transfer_needles(session, &count);
    if (index >= count)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "the session has %u needles, none has index %u",
                           count, index);
    *needle_out = &needles[index];
    return KV_OK;
}

static void update(struct session *session, struct image_needle *needle,
                   const struct needle_result *result) {
    struct session_info info;
    session_brief(session, &info);
    needle->kept = result->kept;
    needle->passed = result->passed;
    needle->logp = result->logp;
    needle->logp_hole = result->logp_hole;
    needle->asked_n_kv = info.n_kv;
}

/* At most half of TOGETHER: each is asked plain and with the hole. */
static enum kv_err check_some(struct session *session, const struct needle_list *list,
                              const struct needle_question *question, struct needle_result *results,
                              struct kv_diag *diag) {
    struct asking askings[TOGETHER];
    struct score scores[TOGETHER];
    uint32_t each = question->with_hole ? 2 : 1;
    for (uint32_t i = 0; i < list->count; i++) {
        struct image_needle *needle = NULL;
        enum kv_err err = find_needle(session, list->indices[i], &needle, diag);
        if (err != KV_OK)
            return err;
        for (uint32_t k = 0; k < each; k++)
            askings[each * i + k] =
                (struct asking){needle, needle->expect, k == 1, question->floor};
    }
    enum kv_err err = ask_together(session, askings, each * list->count, scores, diag);
    for (uint32_t i = 0; err == KV_OK && i < list->count; i++) {
        const struct image_needle *needle = askings[each * i].needle;
        const struct score *score = &scores[each * i];
        struct needle_result result = {1, score->agrees, needle->kept, (float)score->logp,
                                       needle->logp_hole};
        if (question->with_hole) {
            result.logp_hole = (float)score[1].logp;
            result.kept = result.passed && result.logp - result.logp_hole >= NEEDLE_DROP_NATS;
        }
        results[i] = result;
    }
    return err;
}

/* Where one has no room the others are asked alone. */
static enum kv_err check_alone(struct session *session, const struct needle_list *list,
                               const struct needle_question *question,
                               struct needle_result *results, struct kv_diag *diag) {
    for (uint32_t i = 0; i < list->count; i++) {
        const struct needle_list one = {&list->indices[i], 1};
        struct image_needle *needle = NULL;
        session_ask_breathe(session);
        enum kv_err err = check_some(session, &one, question, &results[i], diag);
        if (err == KV_ERR_LIMIT)
            err = find_needle(session, list->indices[i], &needle, diag);
        if (err != KV_OK)
            return err;
        if (needle != NULL)
            results[i] = (struct needle_result){0, needle->passed, needle->kept, needle->logp,
                                                needle->logp_hole};
    }
    kv_diag_clear(diag);
    return KV_OK;
}

enum kv_err needle_check_all(struct session *session, const struct needle_list *list,
                             const struct needle_question *question,
                             struct needle_result *results_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    session_ask_begin(session);
    for (uint32_t first = 0; err == KV_OK && first < list->count; first += TOGETHER / 2) {
        uint32_t left = list->count - first;
        const struct needle_list some = {list->indices + first,
                                         left < TOGETHER / 2 ? left : TOGETHER / 2};
        if (first > 0)
            session_ask_breathe(session);
        err = check_some(session, &some, question, results_out + first, diag);
        if (err == KV_ERR_LIMIT)
            err = check_alone(session, &some, question, results_out + first, diag);
    }
    for (uint32_t i = 0; err == KV_OK && question->update && i < list->count; i++) {
        struct image_needle *needle = NULL;
        if (results_out[i].asked && find_needle(session, list->indices[i], &needle, diag) == KV_OK)
            update(session, needle, &results_out[i]);
    }
    session_ask_end(session);
    return err;
}

enum kv_err needle_check(struct session *session, uint32_t index,
                         const struct needle_question *question, struct needle_result *result_out,
                         struct kv_diag *diag) {
    const struct needle_list list = {&index, 1};
    struct image_needle *needle = NULL;
    struct needle_result result;
    enum kv_err err = check_some(session, &list, question, &result, diag);
    if (err == KV_OK && question->update)
        err = find_needle(session, index, &needle, diag);
    if (err != KV_OK)
        return err;
    if (needle != NULL)
        update(session, needle, &result);
    *result_out = result;
    return KV_OK;
}

static enum kv_err ask_some(struct session *session, const struct needle_text *texts,
                            uint32_t count, struct needle_result *results, struct kv_diag *diag) {
    struct image_needle needles[TOGETHER];
    struct asking askings[TOGETHER] = {{0}};
    struct score scores[TOGETHER];
    for (uint32_t i = 0; i < count; i++) {
        enum kv_err err = check_texts(&texts[i], diag);
        if (err != KV_OK)
            return err;
        needles[i] = (struct image_needle){.key = (char *)texts[i].key,
                                           .ask = (char *)texts[i].ask,
                                           .answer_prefix = (char *)texts[i].answer_prefix,
                                           .expect = (char *)texts[i].expect};
        askings[i] = (struct asking){&needles[i], texts[i].expect, 0, 0};
    }
    enum kv_err err = ask_together(session, askings, count, scores, diag);
    for (uint32_t i = 0; err == KV_OK && i < count; i++)
        results[i] = (struct needle_result){1, scores[i].agrees, 0, (float)scores[i].logp, 0};
    return err;
}

enum kv_err needle_ask_all(struct session *session, const struct needle_text *texts, uint32_t count,
                           struct needle_result *results_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    session_ask_begin(session);
    for (uint32_t first = 0; err == KV_OK && first < count; first += TOGETHER) {
        uint32_t left = count - first;
        if (first > 0)
            session_ask_breathe(session);
        err = ask_some(session, texts + first, left < TOGETHER ? left : TOGETHER,
                       results_out + first, diag);
    }
    session_ask_end(session);
    return err;
}

enum kv_err needle_ask(struct session *session, const struct needle_text *text,
                       struct needle_result *result_out, struct kv_diag *diag) {
    return needle_ask_all(session, text, 1, result_out, diag);
}

enum kv_err needle_score(struct session *session, uint32_t index, const char *value,
                         float *logp_out, struct kv_diag *diag) {
    if (value[0] == 0 || strlen(value) > IMAGE_TEXT_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "a value has 1 to %d bytes", IMAGE_TEXT_BYTES_MAX);
    struct image_needle *needle = NULL;
    enum kv_err err = find_needle(session, index, &needle, diag);
    if (err != KV_OK)
        return err;
    const struct asking asking = {needle, value, 0, 0};
    struct score score;
    err = ask_together(session, &asking, 1, &score, diag);
    if (err == KV_OK)
        *logp_out = (float)score.logp;
    return err;
}
