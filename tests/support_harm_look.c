/* tests/support_harm_look.c - every layer of the proof asked about one session.
 *
 * Responsible for: what support_harm_look.h says.
 * Not responsible for: how the session came to be what it is.
 */
#include "tests/support_harm_look.h"

#include "engine/engine_inner.h"
#include "engine/needle.h"
#include "engine/probe.h"
#include "tests/support_tally.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct looking {
    struct harm *harm;
    struct session *session;
    const struct image *image;
    struct harm_verdict *verdict;
};

static void caught(const struct looking *looking, enum harm_layer layer, const char *text) {
    if (looking->verdict->caught == 0)
        snprintf(looking->verdict->text, sizeof looking->verdict->text, "%s", text);
    looking->verdict->caught |= 1u << layer;
}

/* 1 when an answer can be judged. What is not finite is refused by the engine itself. */
static int went(const struct looking *looking, enum kv_err err, const struct kv_diag *diag) {
    if (err == KV_OK)
        return 1;
    if (err != KV_ERR_DEVICE || engine_lost(looking->harm->engine) ||
        !strstr(diag->text, "not finite"))
        tally_need(err, diag, "a question");
    caught(looking, HARM_GUARD, diag->text);
    return 0;
}

/* --- digests through the block table */

static void check_block(const struct looking *looking, uint32_t index) {
    const struct slots *slots = &looking->harm->engine->slots;
    const struct kvops_block *view = &looking->session->views[index];
    const struct rest_plan_block *stored = &looking->harm->users[0].truth.blocks[index];
    const struct image_policy *policy = &looking->harm->policy;
    uint32_t streams = layout_tier_streams(image_tier(policy, index, looking->image->n_kv));
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    struct kv_digest found[LAYOUT_STREAM_COUNT];
    struct kv_diag diag = {"no digest"};
    uint32_t count = 0;
    char text[64];

    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_META; stream++) {
        struct transfer_part *part = &parts[count];
        uint32_t entry = layout_stream_table(stream), pieces = layout_stream_slots(stream);
        if (!(streams >> stream & 1))
            continue;
        *part = (struct transfer_part){.stream = stream, .piece_count = pieces};
        for (uint32_t i = 0; i < pieces; i++)
            part->pieces[i] = (struct transfer_piece){slots_at(slots, view->slot[entry + i]),
                                                      layout_slot_raw_bytes(&slots->pool.geometry)};
        if (stream == LAYOUT_META) {
            part->piece_count = 1;
            part->pieces[0] =
                (struct transfer_piece){slots_frame(slots, view->meta_frame), slots->frame_bytes};
        }
        part->size = layout_stream_bytes(&slots->pool.geometry, stream);
        count++;
    }
    tally_need(transfer_digests(looking->harm->engine, parts, count, found), &diag, "digests");
    for (uint32_t i = 0; i < count; i++) {
        snprintf(text, sizeof text, "block %u, stream %s: another digest", index,
                 layout_stream_name(parts[i].stream));
        if (!kv_digest_equal(&found[i], &rest_plan_extent(stored, parts[i].stream)->digest))
            caught(looking, HARM_HASH, text);
    }
}

static void check_pages(const struct looking *looking) {
    const struct slots *slots = &looking->harm->engine->slots;
    uint64_t bytes = slots->slot_bytes;
    uint8_t *whole = malloc((size_t)LAYOUT_PAGE_SLOTS * bytes);
    uint8_t *dense = malloc(layout_dense_bytes(&slots->pool.geometry, LAYOUT_PAGE_TOKENS));
    struct kv_diag diag = {"no copy"};
    char text[64];

    for (uint32_t page = 0; page <= looking->image->page_count; page++) {
        int sinks = page == looking->image->page_count;
        const struct image_page *saved =
            sinks ? &looking->image->sinks : &looking->image->pages[page];
        const struct kvops_page *map =
            sinks ? &looking->session->window.sinks : &looking->session->window.pages[page];
        struct device_copy copies[LAYOUT_PAGE_SLOTS];
        const uint8_t *from[LAYOUT_PAGE_SLOTS];
        for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++) {
            from[i] = whole + i * bytes;
            copies[i] =
                (struct device_copy){whole + i * bytes, slots_at(slots, map->slot[i]), bytes};
        }
        tally_need(
            device_copy_out(looking->harm->engine->device, DEVICE_STEP, copies, LAYOUT_PAGE_SLOTS),
            &diag, "device_copy_out");
        layout_pack(&slots->pool.geometry, from, saved->tokens, dense);
        struct kv_digest found =
            kv_digest_of(dense, layout_dense_bytes(&slots->pool.geometry, saved->tokens));
        snprintf(text, sizeof text, "the page at %llu: another digest",
                 (unsigned long long)saved->first);
        if (!kv_digest_equal(&found, &saved->digest))
            caught(looking, HARM_HASH, text);
    }
    free(whole);
    free(dense);
}

/* --- fingerprint, probes, needles: as a wake compares them */

static void ask_fingerprint(const struct looking *looking) {
    struct image_fingerprint found;
    struct kv_diag diag = {""};

    if (went(looking, session_fingerprint(looking->session, 0, &found, &diag), &diag) &&
        memcmp(&found.logits, &looking->image->fingerprint.logits, sizeof found.logits) != 0)
        caught(looking, HARM_FINGERPRINT, "another fingerprint");
}

static void ask_probes(const struct looking *looking) {
    const struct probe_asking asking = {0, looking->image->probe_count, 0};
    struct probe_result results[IMAGE_PROBES_MAX];
    struct kv_diag diag = {""};
    char text[96];

    transfer_set_probes(looking->session, looking->image->probes, looking->image->probe_count);
    if (!went(looking, probe_ask(looking->session, &asking, results, &diag), &diag))
        return;
    for (uint32_t i = 0; i < asking.end; i++) {
        const struct image_probe *probe = &looking->image->probes[i];
        snprintf(text, sizeof text, "the probe of tokens %llu to %llu",
                 (unsigned long long)probe->first, (unsigned long long)probe->end);
        if (!results[i].passed || memcmp(&results[i].logp, &probe->logp, sizeof probe->logp) != 0)
            caught(looking, HARM_PROBE, text);
    }
}

static void ask_needles(const struct looking *looking) {
    static const uint32_t indices[HARM_NEEDLES] = {0, 1, 2};
    const struct needle_list list = {indices, looking->image->needle_count};
    const struct needle_question question = {.with_hole = 0, .floor = 0, .update = 0};
    struct needle_result results[HARM_NEEDLES];
    struct kv_diag diag = {""};
    uint32_t count = 0;
    char text[96];

    /* One that was prefilled again knows of none. */
    (void)transfer_needles(looking->session, &count);
    for (uint32_t i = count; i < looking->image->needle_count; i++)
        tally_need(transfer_add_needle(looking->session, &looking->image->needles[i], &diag), &diag,
                   "needle");
    if (!went(looking, needle_check_all(looking->session, &list, &question, results, &diag), &diag))
        return;
    for (uint32_t i = 0; i < list.count; i++) {
        const struct image_needle *needle = &looking->image->needles[i];
        snprintf(text, sizeof text, "needle %.60s", needle->key);
        if (!results[i].passed || memcmp(&results[i].logp, &needle->logp, sizeof needle->logp) != 0)
            caught(looking, HARM_NEEDLE, text);
    }
}

/* --- facts */

static enum layout_tier tier_of(const struct looking *looking,
                                const struct support_synth_fact *fact) {
    uint64_t at = fact->at + 1;
    uint64_t window =
        LAYOUT_SINK_TOKENS + (uint64_t)looking->image->block_count * LAYOUT_BLOCK_TOKENS;

    return at < LAYOUT_SINK_TOKENS || at >= window
               ? LAYOUT_TIER_BF16
               : image_tier(&looking->harm->policy, (at - LAYOUT_SINK_TOKENS) / LAYOUT_BLOCK_TOKENS,
                            looking->image->n_kv);
}

/* However it was read. */
static int is_value_of(const struct synth *synth, uint32_t id,
                       const struct support_synth_fact *fact) {
    int is = id == synth_answer_id(fact->value) ||
             (fact->kind == SUPPORT_SIX && id == synth_answer_id(fact->other));

    for (uint32_t i = 0; fact->kind == SUPPORT_GRADED && i < SYNTH_READINGS; i++)
        is |= id == synth_reading_id(synth, fact->value, i);
    return is;
}

static void judge(const struct looking *looking, uint32_t index, uint32_t id) {
    const struct harm *harm = looking->harm;
    const struct support_synth_fact *fact = &harm->users[0].facts[index];
    enum layout_tier tier = tier_of(looking, fact);
    int thief = 0;
    char text[128];

    looking->verdict->asked++;
#ifdef BREAK_HARM_JUDGE
    return;
#endif
    if (id == support_synth_expect(&harm->synth, fact, tier))
        return;
    looking->verdict->wrong++;
    for (uint32_t i = 0; i < harm->users[1].fact_count; i++)
        thief |= is_value_of(&harm->synth, id, &harm->users[1].facts[i]);
    snprintf(text, sizeof text, "the fact at %llu, read at %s: token %u instead of %u",
             (unsigned long long)fact->at, layout_tier_name(tier), id,
             support_synth_expect(&harm->synth, fact, tier));
    caught(looking,
           id == SYNTH_NOTHING                   ? HARM_NULL
           : thief                               ? HARM_THIEF
           : is_value_of(&harm->synth, id, fact) ? HARM_GRADED
                                                 : HARM_NEEDLE,
           text);
}

static void ask_facts(const struct looking *looking) {
    const struct harm_user *user = &looking->harm->users[0];
    struct support_synth_answer answers[HARM_FACTS_MAX];
    struct kv_diag diag = {""};

    if (!went(looking,
              support_synth_try(looking->session, user->facts, user->fact_count, answers, &diag),
              &diag))
        return;
    for (uint32_t i = 0; i < user->fact_count; i++)
        judge(looking, i, answers[i].id);
}

static void take_best(void *context, uint64_t row, const float *logits) {
    struct support_synth_answer *best = context;
    (void)row;
    best->margin = -INFINITY;
    for (uint32_t id = 0; id < best->id; id++)
        best->margin = logits[id] > best->margin ? logits[id] : best->margin;
    for (uint32_t id = 0; id < best->id; id++)
        if (logits[id] == best->margin)
            best->id = id;
}

/* What stands behind the pending token: the question five tokens before it is found by position. */
static void ask_position(const struct looking *looking) {
    struct support_synth_answer best = {looking->harm->model.vocab_count, 0};
    const struct session_ask ask = {.count = 0};
    struct kv_diag diag = {""};

    if (went(looking, session_ask(looking->session, &ask, take_best, &best, &diag), &diag))
        judge(looking, looking->harm->asked, best.id);
}

static void take_digests(const struct looking *looking) {
    for (uint32_t block = 0; block < looking->image->block_count; block++)
        check_block(looking, block);
    check_pages(looking);
}

void harm_look(struct harm *harm, struct session *session, int digests,
               struct harm_verdict *verdict_out) {
    const struct looking looking = {harm, session, &harm->users[0].truth.image, verdict_out};
    struct session_info info;

    *verdict_out = (struct harm_verdict){0};
    session_info(session, &info);
    if (digests)
        take_digests(&looking);
    ask_fingerprint(&looking);
    ask_probes(&looking);
    ask_needles(&looking);
    ask_facts(&looking);
    ask_position(&looking);
    if (info.tokens_prefilled != 0)
        caught(&looking, HARM_COUNTERS, "tokens were prefilled since it came");
}

int harm_unharmed(struct harm *harm, struct session *session) {
    struct harm_verdict verdict = {0};
    const struct looking looking = {harm, session, &harm->users[0].truth.image, &verdict};

    take_digests(&looking);
    ask_fingerprint(&looking);
    return verdict.caught == 0;
}
