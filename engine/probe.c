/* engine/probe.c - spans of a session's own text, asked to see that its memory is reachable.
 *
 * Responsible for: the contract of probe.h.
 * Not responsible for: throwaway forwards (session_ask.c).
 */
#include "engine/probe.h"

#include "engine/model/sampler.h"
#include "engine/needle.h"

#include <assert.h>
#include <string.h>

enum { TAIL = 8, ZONES_MAX = 8, SHIFT = 37 };

/* --- places */

struct zone {
    uint64_t first, end;
};

/* Runs of blocks of one tier, oldest first, then the window. */
static uint32_t zones_of(const struct probe_text *text, struct zone zones[ZONES_MAX]) {
    uint64_t blocks = layout_sealed_blocks(text->n_kv);
    uint32_t count = 0;
    enum layout_tier last = LAYOUT_TIER_COUNT;
    for (uint64_t b = 0; b < blocks; b++) {
        enum layout_tier tier = image_tier(text->policy, b, text->n_kv);
        uint64_t first = LAYOUT_SINK_TOKENS + b * LAYOUT_BLOCK_TOKENS;
        if (tier != last && count < ZONES_MAX - 1)
            zones[count++] = (struct zone){first, first};
        zones[count - 1].end = first + LAYOUT_BLOCK_TOKENS;
        last = tier;
    }
    uint64_t window = LAYOUT_SINK_TOKENS + blocks * LAYOUT_BLOCK_TOKENS;
    if (text->n_kv > window)
        zones[count++] = (struct zone){window, text->n_kv};
    return count;
}

/* The nearest boundary of blocks, or of pages in the window, to `at`. */
static uint64_t boundary(const struct probe_text *text, uint64_t at) {
    uint64_t sealed = LAYOUT_SINK_TOKENS + layout_sealed_blocks(text->n_kv) * LAYOUT_BLOCK_TOKENS;
    uint64_t step = at < sealed ? LAYOUT_BLOCK_TOKENS : LAYOUT_PAGE_TOKENS;
    uint64_t steps = (at - LAYOUT_SINK_TOKENS + step / 2) / step;
    return LAYOUT_SINK_TOKENS + (steps == 0 ? 1 : steps) * step;
}

int probe_place(const struct probe_text *text, uint32_t index, uint32_t count, uint32_t try_index,
                struct image_probe *probe_out) {
    enum { SPAN = PROBE_QUESTION + PROBE_ANSWER };
    struct zone zones[ZONES_MAX];
    uint32_t zone_count = zones_of(text, zones);
    if (zone_count == 0 || index >= count || text->n_kv < LAYOUT_SINK_TOKENS + SPAN)
        return 0;
    const struct zone *zone = &zones[index % zone_count];
    uint64_t share = count / zone_count + (index % zone_count < count % zone_count);
    uint64_t place = index / zone_count;
    uint64_t answer = zone->first + (zone->end - zone->first) * (2 * place + 1) / (2 * share);
#ifdef BREAK_PROBE_DEPTH
    answer = zone->first;
#endif
    /* Neighbouring zones, and neighbouring places of one zone, take turns. */
    if ((index + place) % 2 == 1)
        answer = boundary(text, answer) - PROBE_ANSWER / 2 + try_index * LAYOUT_BLOCK_TOKENS;
    else
        answer += try_index * SHIFT;
    uint64_t least = LAYOUT_SINK_TOKENS + PROBE_QUESTION;
    uint64_t most = text->n_kv - PROBE_ANSWER;
    answer = answer < least ? least : answer > most ? most - try_index : answer;
    if (answer < least)
        return 0;
    *probe_out = (struct image_probe){
        .first = answer - PROBE_QUESTION, .answer = answer, .end = answer + PROBE_ANSWER};
    return 1;
}

/* What the question ends with stands nowhere else: a text that is there twice is no proof of one
 * of its places. */
static int is_unique(const struct session_info *info, const struct image_probe *probe) {
    const uint32_t *tail = info->ids + probe->answer - TAIL;
    for (uint64_t at = 0; at + TAIL <= info->n_kv; at++)
        if (at != probe->answer - TAIL && memcmp(info->ids + at, tail, TAIL * sizeof *tail) == 0)
            return 0;
    return 1;
}

/* --- asking */

struct scores {
    const struct session_info *info;
    const struct image_probe *probes;
    struct probe_result *results;
    uint32_t vocab_count;
    enum kv_err errs[IMAGE_PROBES_MAX];
};

static void score_row(void *context, uint32_t ask, uint64_t row, const float *logits) {
    struct scores *scores = context;
    const struct image_probe *probe = &scores->probes[ask];
    uint64_t next = probe->first + row + 1;
    if (scores->errs[ask] != KV_OK || next < probe->answer || next >= probe->end)
        return;
    const struct sampler_row sampled = {logits, scores->vocab_count, next};
    struct sampler_expected expected = {0, 0};
    uint32_t id = scores->info->ids[next];
    scores->errs[ask] = sampler_expect(&sampled, id, &expected, NULL);
    scores->results[ask].passed &= expected.best == id;
    scores->results[ask].logp += (float)expected.log_prob;
}

/* The last token of the answer is predicted, never fed. */
static enum kv_err ask_spans(struct session *session, const struct image_probe *probes,
                             uint32_t count, int hole, struct probe_result *results,
                             struct kv_diag *diag) {
    struct session_ask asks[IMAGE_PROBES_MAX];
    struct session_range holes[IMAGE_PROBES_MAX];
    struct session_info info;
    struct engine_model model;
    session_brief(session, &info);
    engine_model(session_engine(session), &model);
    assert(count <= IMAGE_PROBES_MAX);
    for (uint32_t i = 0; i < count; i++) {
        holes[i] = (struct session_range){probes[i].first, probes[i].end};
        asks[i] = (struct session_ask){.ids = info.ids + probes[i].first,
                                       .count = (uint32_t)(probes[i].end - probes[i].first - 1),
                                       .hide = &holes[i],
                                       .hide_count = hole != 0,
                                       .rows_first = PROBE_QUESTION - 1};
        results[i] = (struct probe_result){1, 0};
    }
    struct scores scores = {&info, probes, results, model.vocab_count, {KV_OK}};
    enum kv_err err = session_ask_all(session, asks, count, score_row, &scores, diag);
    for (uint32_t i = 0; err == KV_OK && i < count; i++)
        if (scores.errs[i] != KV_OK)
            err = kv_diag_set(
                diag, scores.errs[i], "the probe of tokens %llu to %llu has no probability",
                (unsigned long long)probes[i].first, (unsigned long long)probes[i].end);
    return err;
}

enum kv_err probe_ask(struct session *session, const struct probe_asking *asking,
                      struct probe_result *results_out, struct kv_diag *diag) {
    uint32_t count = 0;
    const struct image_probe *probes = transfer_probes(session, &count);
    assert(asking->first <= asking->end && asking->end <= count);
    return ask_spans(session, probes + asking->first, asking->end - asking->first, asking->hole,
                     results_out, diag);
}

/* --- choosing */

struct choice {
    struct session *session;
    struct image_probe probes[IMAGE_PROBES_MAX]; /* by place */
    uint8_t kept[IMAGE_PROBES_MAX];
    uint32_t count;
    struct probe_report report;
};

/* One try of every place that has none yet, all plain and then those that passed with the hole. */
static enum kv_err one_round(struct choice *choice, uint32_t try_index, struct kv_diag *diag) {
    struct image_probe spans[IMAGE_PROBES_MAX];
    struct probe_result plain[IMAGE_PROBES_MAX], hole[IMAGE_PROBES_MAX];
    uint32_t places[IMAGE_PROBES_MAX], count = 0, passed = 0;
    struct session_info info;
    session_brief(choice->session, &info);
    const struct probe_text text = {info.n_kv, &info.policy};
    for (uint32_t i = 0; i < choice->count; i++) {
        if (choice->kept[i] || !probe_place(&text, i, choice->count, try_index, &spans[count]) ||
            !is_unique(&info, &spans[count]))
            continue;
        places[count++] = i;
    }
    enum kv_err err = ask_spans(choice->session, spans, count, 0, plain, diag);
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        choice->report.tried++;
        choice->report.rows += (uint32_t)(spans[i].end - spans[i].first);
        if (!plain[i].passed)
            continue;
        spans[passed] = spans[i];
        places[passed] = places[i];
        plain[passed++] = plain[i];
    }
    if (err == KV_OK && passed > 0) {
        session_ask_breathe(choice->session);
        err = ask_spans(choice->session, spans, passed, 1, hole, diag);
    }
    for (uint32_t i = 0; err == KV_OK && i < passed; i++) {
        choice->report.passed++;
        choice->report.rows += (uint32_t)(spans[i].end - spans[i].first);
#ifndef BREAK_PROBE_KEEP
        if (hole[i].passed || !(plain[i].logp - hole[i].logp >= NEEDLE_DROP_NATS))
            continue;
#endif
        spans[i].asked_n_kv = info.n_kv;
        spans[i].logp = plain[i].logp;
        spans[i].logp_hole = hole[i].logp;
        choice->probes[places[i]] = spans[i];
        choice->kept[places[i]] = 1;
        choice->report.kept++;
    }
    return err;
}

enum kv_err probe_choose(struct session *session, uint32_t count, struct probe_report *report_out,
                         struct kv_diag *diag) {
    struct choice choice = {.session = session, .count = count};
    uint32_t kept = 0;
    enum kv_err err = KV_OK;
    assert(count <= IMAGE_PROBES_MAX);
    session_ask_begin(session);
    for (uint32_t i = 0; err == KV_OK && i < PROBE_TRIES && choice.report.kept < count; i++) {
        if (i > 0)
            session_ask_breathe(session);
        err = one_round(&choice, i, diag);
    }
    session_ask_end(session);
    if (err != KV_OK)
        return err;
    for (uint32_t i = 0; i < count; i++)
        if (choice.kept[i])
            choice.probes[kept++] = choice.probes[i];
    transfer_set_probes(session, choice.probes, kept);
    *report_out = choice.report;
    return KV_OK;
}
