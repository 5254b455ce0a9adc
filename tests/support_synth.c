/* tests/support_synth.c - texts for a synth model, and what it must answer about them.
 *
 * Responsible for: what support_synth.h says.
 * Not responsible for: engines and sessions.
 */
#include "tests/support_synth.h"

#include "engine/engine_inner.h"
#include "engine/model/tokenizer.h"
#include "engine/needle.h"
#include "tests/testing.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ASK_MAX = 256 };

void support_synth_filler(const struct synth *synth, uint64_t seed, uint32_t *ids, uint32_t count) {
    uint32_t first = synth->words / 2, words = synth->words - synth->families - first;
    struct testing_random random;

    words = words < 128 ? words : 128;
    testing_random_init(&random, seed);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word = first + (uint32_t)testing_random_below(&random, words);
        ids[i] = synth_id(testing_random_below(&random, 2) ? SYNTH_VALUE : SYNTH_KEY, word);
    }
    ids[0] = SYNTH_BOS;
}

static void put(uint32_t *ids, uint32_t key, uint32_t value, enum synth_kind kind) {
    ids[0] = synth_id(kind, key);
    ids[1] = synth_id(SYNTH_VALUE, value);
    ids[2] = synth_id(SYNTH_KEY, value);
    ids[3] = synth_id(SYNTH_VALUE, value);
}

void support_synth_plant(const struct support_synth_fact *fact, uint32_t *ids) {
    if (fact->kind == SUPPORT_ABSENT)
        return;
    put(ids + fact->at, fact->key, fact->value, SYNTH_KEY);
    if (fact->kind == SUPPORT_SIX)
        put(ids + fact->at + SUPPORT_SYNTH_FACT, fact->key, fact->other, SYNTH_SIX);
}

uint32_t support_synth_expect(const struct synth *synth, const struct support_synth_fact *fact,
                              enum layout_tier tier) {
    uint32_t k_bits = layout_tier_k_bits(tier), v_bits = layout_tier_v_bits(tier);

    if (fact->kind == SUPPORT_ABSENT)
        return SYNTH_NOTHING;
    if (fact->kind == SUPPORT_SIX && k_bits == 6)
        return synth_answer_id(fact->other);
    if (fact->kind == SUPPORT_GRADED && v_bits <= 4)
        return synth_reading_id(synth, fact->value, 4 - v_bits);
    return synth_answer_id(fact->value);
}

struct asking {
    struct support_synth_answer *answers;
    uint32_t vocab;
};

static void take(void *context, uint32_t ask, uint64_t row, const float *logits) {
    const struct asking *asking = context;
    float best = -INFINITY, second = -INFINITY;

    (void)row;
    for (uint32_t id = 0; id < asking->vocab; id++) {
        if (logits[id] > best) {
            second = best;
            best = logits[id];
            asking->answers[ask].id = id;
        } else if (logits[id] > second) {
            second = logits[id];
        }
    }
    asking->answers[ask].margin = best - second;
}

enum kv_err support_synth_try(struct session *session, const struct support_synth_fact *facts,
                              uint32_t count, struct support_synth_answer *answers_out,
                              struct kv_diag *diag) {
    struct engine_model model;
    struct asking asking = {.answers = answers_out};
    struct session_ask asks[ASK_MAX];
    uint32_t ids[ASK_MAX];

    assert(count <= ASK_MAX);
    engine_model(session_engine(session), &model);
    asking.vocab = model.vocab_count;
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = synth_id(SYNTH_QUESTION, facts[i].key);
        asks[i] = (struct session_ask){.ids = &ids[i], .count = 1};
    }
    return session_ask_all(session, asks, count, take, &asking, diag);
}

void support_synth_ask(struct session *session, const struct support_synth_fact *facts,
                       uint32_t count, struct support_synth_answer *answers_out) {
    struct kv_diag diag = {""};

    assert_true(count <= ASK_MAX);
    if (support_synth_try(session, facts, count, answers_out, &diag) != KV_OK)
        fail_msg("session_ask_all: %s", diag.text);
}

enum kv_err support_synth_register(struct session *session, const struct support_synth_fact *fact,
                                   struct kv_diag *diag) {
    const struct tokenizer *tokenizer = engine_tokenizer(session_engine(session));
    struct gguf_text question = tokenizer_piece(tokenizer, synth_id(SYNTH_QUESTION, fact->key));
    struct gguf_text value = tokenizer_piece(tokenizer, synth_id(SYNTH_VALUE, fact->value));
    char ask[64], expect[64];
    const struct needle_text text = {expect, ask, "", expect};

    /* The vocabulary spells it letter by letter: a short one, so that a question has as few tokens
     * as in a vocabulary of words. */
    snprintf(ask, sizeof ask, "Say%.*s", (int)question.size_bytes, question.bytes);
    snprintf(expect, sizeof expect, "%.*s", (int)value.size_bytes, value.bytes);
    return needle_register(session, &text, diag);
}

static struct synth_stretch stretch_of(const struct fill_stretch *stretch) {
    return (struct synth_stretch){stretch->ids, stretch->position, stretch->count,
                                  stretch->chunk_rows};
}

static enum kv_err rows_ready(void *context, const struct fill_stretch *stretch,
                              struct kv_diag *diag) {
    const struct synth_stretch rows = stretch_of(stretch);

    return synth_rows_ready(context, &rows, diag);
}

static void rows_part(void *context, const struct fill_stretch *stretch, uint32_t first,
                      uint32_t end, uint16_t *chunk) {
    const struct synth_stretch rows = stretch_of(stretch);

    synth_rows_part(context, &rows, first, end, chunk);
}

struct fill support_synth_fill(struct synth_rows *rows, const uint32_t *ids, uint32_t count,
                               uint32_t threads) {
    return (struct fill){ids, count, rows_ready, rows_part, rows, threads};
}

enum kv_err support_synth_last(struct engine *engine, uint16_t *chunk, struct kv_diag *diag) {
    const struct device_copy copy = {chunk, forward_chunk(engine->forward),
                                     fill_chunk_bytes(engine)};

    return device_copy_out(engine->device, DEVICE_STEP, &copy, 1) == KV_OK
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_DEVICE, "the last chunk cannot be read");
}

enum kv_err support_synth_rows(struct synth_rows *rows, const struct fill_stretch *stretch,
                               uint16_t *chunk, struct kv_diag *diag) {
    const struct synth_stretch all = stretch_of(stretch);

    return synth_rows_fill(rows, &all, chunk, diag);
}

static float value_of(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

/* BF16 values from zero on, with their sign. */
static int32_t step_of(uint16_t bits) {
    return bits & 0x8000 ? -(bits & 0x7fff) : bits;
}

static void compare(uint16_t real, uint16_t closed, int behind_six,
                    struct support_synth_difference *difference) {
    uint32_t steps = (uint32_t)abs(step_of(real) - step_of(closed));

    if (value_of(closed) == 0 && fabsf(value_of(real)) <= SYNTH_ZERO_MAX) {
        difference->nearly_zero++;
    } else if (behind_six && steps == 1) {
        difference->rounded++;
    } else {
        difference->wrong++;
        difference->steps_max = steps > difference->steps_max ? steps : difference->steps_max;
    }
}

static int is_six(const struct synth *synth, uint32_t id) {
    uint32_t first = synth_id(SYNTH_KEY, 0), each = synth_id(SYNTH_KEY, 1) - first;

    return id >= first && id < synth_id(SYNTH_KEY, synth->words) &&
           (id - first) % each >= synth_id(SYNTH_SIX, 0) - first;
}

void support_synth_compare(const struct synth *synth, const struct fill_stretch *stretch,
                           const uint16_t *real, const uint16_t *closed,
                           struct support_synth_difference *difference) {
    size_t planes = (size_t)synth->layers * 2 * synth->kv_heads, dim = 128;

    for (uint32_t row = 0; row < stretch->count; row++) {
        int behind_six =
            stretch->position + row > 0 && is_six(synth, stretch->ids[(int64_t)row - 1]);
        for (size_t plane = 0; plane < planes; plane++)
            for (size_t i = 0; i < dim; i++) {
                size_t at = (plane * stretch->chunk_rows + row) * dim + i;
                difference->elements++;
                if (real[at] != closed[at])
                    compare(real[at], closed[at], behind_six, difference);
            }
    }
}
