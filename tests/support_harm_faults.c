/* tests/support_harm_faults.c - the faults that a restore can have, and who must find each.
 *
 * Responsible for: what support_harm_faults.h says.
 * Not responsible for: writing what is changed (support_harm_work.c).
 *
 * Where the list of expectations says "hash", a recorded fault has nobody: its digest was made from
 * the wrong bytes. What the other layers see of it all the same is reported.
 */
#include "tests/support_harm_faults.h"

#include "engine/engine_inner.h"
#include "engine/model/synth_inner.h"
#include "store/base/bytes.h"
#include "tests/support_harm_look.h"
#include "tests/support_tally.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUIET_BLOCK = 1, QUIET_TOKEN = 40, SCALE_STEP = 128, POISON_BYTE_LOW = SLOTS_POISON & 255 };

/* --- tiles */

static const struct layout_geometry *geometry_of(const struct harm_work *work) {
    return &work->harm->model.geometry;
}

static uint8_t *tile(const struct harm_work *work, uint8_t *stream_bytes, enum layout_stream stream,
                     struct layout_at at) {
    struct layout_place place = layout_tile(geometry_of(work), stream, at);

    return stream_bytes + place.slot * layout_slot_raw_bytes(geometry_of(work)) + place.off;
}

enum { K_PLANES = 1u << LAYOUT_KH | 1u << LAYOUT_KM | 1u << LAYOUT_KL };
enum { V_PLANES = 1u << LAYOUT_VB | 1u << LAYOUT_VR1 | 1u << LAYOUT_VR2 };
enum { ALL_STREAMS = K_PLANES | V_PLANES | 1u << LAYOUT_META };

static void exchange(uint8_t *a, uint8_t *b, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint8_t byte = a[i];
        a[i] = b[i];
        b[i] = byte;
    }
}

/* From one page of a block to one of another, all layers and heads: copied, or exchanged. */
struct move {
    uint32_t from_block, from_page, to_block, to_page, streams;
    int both;
};
static void move(struct harm_work *work, const struct move *move) {
    const struct layout_geometry *g = geometry_of(work);

    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_META; stream++) {
        if (!(move->streams >> stream & 1))
            continue;
        uint8_t *from = harm_stream(work, move->from_block, stream);
        uint8_t *to = harm_stream(work, move->to_block, stream);
        if (!from || !to)
            continue;
        for (uint32_t i = 0; i < g->layers * g->kv_heads; i++) {
            struct layout_at there = {i / g->kv_heads, i % g->kv_heads, move->from_page};
            struct layout_at here = {i / g->kv_heads, i % g->kv_heads, move->to_page};
            uint8_t *a = tile(work, from, stream, there), *b = tile(work, to, stream, here);
            if (move->both)
                exchange(a, b, layout_tile_bytes(g, stream));
            else
                memcpy(b, a, layout_tile_bytes(g, stream));
        }
    }
}

/* Where the fingerprint's fact is read. */
static uint32_t asked_off(const struct harm_work *work) {
    const struct harm *harm = work->harm;

    return (uint32_t)(harm->users[0].facts[harm->asked].at + 1 - LAYOUT_SINK_TOKENS) %
           LAYOUT_BLOCK_TOKENS;
}

static uint32_t asked_page(const struct harm_work *work) {
    return asked_off(work) / LAYOUT_PAGE_TOKENS;
}

/* --- bytes of blocks */

/* V's highest bit of one value. */
static void flip(struct harm_work *work, uint32_t block, uint32_t off) {
    uint8_t *bytes = harm_stream(work, block, LAYOUT_VB);
    struct layout_at at = {geometry_of(work)->layers - 1, 0, off / LAYOUT_PAGE_TOKENS};
    struct layout_bits bits = layout_bits(LAYOUT_VB, geometry_of(work)->head_dim,
                                          off % LAYOUT_PAGE_TOKENS, SYNTH_CODE + 6);

    tile(work, bytes, LAYOUT_VB, at)[bits.byte] ^= (uint8_t)(2u << bits.bit);
}

/* Behind its second hop every layer reads the loop of a fact. */
static void flip_asked(struct harm_work *work) {
    flip(work, work->harm->block, asked_off(work) + 2);
}

static void flip_quiet(struct harm_work *work) {
    flip(work, QUIET_BLOCK, QUIET_TOKEN);
}

static void from_other(struct harm_work *work, uint32_t page, uint32_t streams, int both) {
    const struct harm *harm = work->harm;
    const struct move moved = {harm->other, page, harm->block, page, streams, both};

    move(work, &moved);
}

static void low_plane(struct harm_work *work) {
    from_other(work, asked_page(work), 1u << LAYOUT_VR2, 0);
}

static void high_plane(struct harm_work *work) {
    from_other(work, asked_page(work), 1u << LAYOUT_VB, 0);
}

static void plane_order(struct harm_work *work) {
    uint8_t *one = harm_stream(work, work->harm->block, LAYOUT_VR1);
    uint8_t *two = harm_stream(work, work->harm->block, LAYOUT_VR2);

    exchange(one, two, (uint32_t)work->streams[work->harm->block][LAYOUT_VR1].size);
}

/* An older page's scales: an eighth of their size larger, of V alone. */
static void old_scales(struct harm_work *work) {
    const struct layout_geometry *g = geometry_of(work);
    uint8_t *bytes = harm_stream(work, work->harm->block, LAYOUT_META);

    for (uint32_t i = 0; i < g->layers * g->kv_heads * LAYOUT_BLOCK_PAGES; i++) {
        uint8_t *scales = bytes + (size_t)i * LAYOUT_META_TILE_BYTES + 2 * LAYOUT_PAGE_TOKENS;
        for (uint32_t t = 0; t < LAYOUT_PAGE_TOKENS; t++)
            kv_put_u16(scales + 2 * t, (uint16_t)(kv_get_u16(scales + 2 * t) + SCALE_STEP));
    }
}

/* Two facts share that page; the second key of one has a scale of its own. */
static void other_scales(struct harm_work *work) {
    const struct harm *harm = work->harm;
    const struct support_synth_fact *six = &harm->users[0].facts[harm->asked + 2];
    uint32_t off =
        (uint32_t)(six->at + SUPPORT_SYNTH_FACT + 1 - LAYOUT_SINK_TOKENS) % LAYOUT_BLOCK_TOKENS;

    from_other(work, off / LAYOUT_PAGE_TOKENS, 1u << LAYOUT_META, 0);
}

static void k_only(struct harm_work *work) {
    from_other(work, asked_page(work), K_PLANES, 1);
}

static void v_only(struct harm_work *work) {
    from_other(work, asked_page(work), V_PLANES, 1);
}

static void whole_page(struct harm_work *work) {
    from_other(work, asked_page(work), ALL_STREAMS, 1);
}

static void exchange_places(struct harm_work *work, struct layout_at a, struct layout_at b) {
    a.page = b.page = asked_page(work);
    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_META; stream++) {
        uint8_t *bytes =
            ALL_STREAMS >> stream & 1 ? harm_stream(work, work->harm->block, stream) : NULL;
        if (bytes)
            exchange(tile(work, bytes, stream, a), tile(work, bytes, stream, b),
                     layout_tile_bytes(geometry_of(work), stream));
    }
}

static void other_layer(struct harm_work *work) {
    exchange_places(work, (struct layout_at){1, 0, 0}, (struct layout_at){2, 0, 0});
}

static void other_head(struct harm_work *work) {
    exchange_places(work, (struct layout_at){1, 0, 0}, (struct layout_at){1, 1, 0});
}

static void thief_block(struct harm_work *work) {
    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_META; stream++) {
        const uint8_t *theirs = harm_thief(work, work->harm->block, stream);
        uint8_t *ours = theirs ? harm_stream(work, work->harm->block, stream) : NULL;
        if (ours)
            memcpy(ours, theirs, work->streams[work->harm->block][stream].size);
    }
}

static void thief_record(struct harm_work *work) {
    thief_block(work);
    work->keep_chain = 1;
}

/* From the second page on, each page stands where the one before it belongs. */
static void pages_off_by_one(struct harm_work *work) {
    const uint32_t block = work->harm->block;
    const struct move moves[] = {{block, 2, block, 1, ALL_STREAMS, 0},
                                 {block, 3, block, 2, ALL_STREAMS, 0},
                                 {block + 1, 0, block, 3, ALL_STREAMS, 0}};

    for (size_t i = 0; i < sizeof moves / sizeof moves[0]; i++)
        move(work, &moves[i]);
}

static void table_off_by_one(struct harm_work *work) {
    struct kvops_block *views = work->session->views;

    memmove(views, views + 1, (work->session->block_count - 1) * sizeof *views);
    work->changed = 1;
}

/* --- length, position, tiers */

static void cut_span(struct image_span *span, uint64_t n) {
    span->end = span->end < n ? span->end : n;
    span->first = span->first < span->end ? span->first : span->end - 1;
}

/* The pending token follows at once, and all of the image agrees on the length. */
static void cut_image(struct image *image, uint32_t tokens) {
    uint32_t kept = 0;

    image->n_kv -= tokens;
    image->fingerprint.n_kv = image->fingerprint_floor.n_kv = image->n_kv;
    for (uint32_t i = 0; i < image->probe_count; i++)
        image->probes[i].asked_n_kv = image->n_kv;
    for (uint32_t i = 0; i < image->needle_count; i++)
        image->needles[i].asked_n_kv = image->n_kv;
    image->ids[image->n_kv] = image->ids[image->n - 1];
    image->n -= tokens;
    for (uint32_t i = 0; i < image->role_count; i++)
        if (image->roles[i].first < image->n) {
            cut_span(&image->roles[i], image->n);
            image->roles[kept++] = image->roles[i];
        }
    image->role_count = kept;
    for (uint32_t i = 0; i < image->needle_count; i++)
        for (uint32_t k = 0; k < image->needles[i].span_count; k++)
            cut_span(&image->needles[i].spans[k], image->n);
}

static void cut(struct harm_work *work, uint32_t tokens) {
    struct session *session = work->session;

    work->changed = 1;
    if (work->place == HARM_RECORDED) {
        cut_image(&work->image.image, tokens);
        return;
    }
    session->n_kv -= tokens;
    session->ids[session->n_kv] = session->ids[session->n - 1];
    session->n -= tokens;
}

/* Rows [0, count - 1) of each vector of a dense page, close together. */
static void drop_row(struct harm_work *work, uint32_t page, uint32_t count) {
    const struct layout_geometry *g = geometry_of(work);
    uint64_t row = 2 * (uint64_t)g->head_dim;
    uint8_t *bytes = harm_page(work, page);

    for (uint64_t i = 0; i < 2 * (uint64_t)g->layers * g->kv_heads; i++)
        memmove(bytes + i * (count - 1) * row, bytes + i * count * row, (count - 1) * row);
    work->page_tokens[page] = count - 1;
}

static uint32_t last_page(const struct harm_work *work) {
    return work->harm->users[0].truth.image.page_count - 1;
}

static void length_off_by_one(struct harm_work *work) {
    if (work->place == HARM_RECORDED)
        drop_row(work, last_page(work), HARM_LAST_TOKENS);
    cut(work, 1);
}

static void tail_cut(struct harm_work *work) {
    if (work->place == HARM_DISK) {
        uint8_t *bytes = harm_page(work, last_page(work));
        uint64_t half = work->pages[last_page(work)].size / 2;
        memset(bytes + half, 0, half);
        return;
    }
    if (work->place == HARM_RECORDED)
        work->image.image.page_count--;
    cut(work, HARM_LAST_TOKENS);
}

/* K of the window as if it stood one position further on. */
static void turn_row(uint8_t *row) {
    for (uint32_t i = 0; i < SYNTH_PAIRS; i++) {
        double angle = pow((double)SYNTH_ROPE_BASE, -2.0 * i / SYNTH_DIM);
        float x = synth_bf16_f32(kv_get_u16(row + 4 * i));
        float y = synth_bf16_f32(kv_get_u16(row + 4 * i + 2));
        kv_put_u16(row + 4 * i, synth_f32_bf16((float)(x * cos(angle) - y * sin(angle))));
        kv_put_u16(row + 4 * i + 2, synth_f32_bf16((float)(x * sin(angle) + y * cos(angle))));
    }
}

static void position_off(struct harm_work *work) {
    const struct layout_geometry *g = geometry_of(work);
    uint64_t row = 2 * (uint64_t)g->head_dim;

    for (uint32_t page = 0; page <= last_page(work); page++) {
        uint8_t *bytes = harm_page(work, page);
        uint32_t tokens = work->harm->users[0].truth.image.pages[page].tokens;
        for (uint64_t i = 0; i < (uint64_t)g->layers * g->kv_heads; i++)
            for (uint32_t t = 0; t < tokens; t++)
                turn_row(bytes + (2 * i * tokens + t) * row);
    }
}

/* What is read at four bits is read at three. */
static void tier_map(struct harm_work *work) {
    struct image *image = &work->image.image;

    work->changed = 1;
    if (work->place == HARM_RECORDED) {
        struct image_policy *policy = &image->policies[image->policy_count - 1].policy;
        policy->ages[1] = policy->ages[0] + 1;
        return;
    }
    for (uint32_t block = 0; block < work->session->block_count; block++)
        if (work->session->views[block].tier == LAYOUT_K6V4)
            work->session->views[block].tier = LAYOUT_K6V3;
}

/* --- poison */

static void poison(uint8_t *bytes, uint64_t size) {
    for (uint64_t i = 0; i < size; i++)
        bytes[i] = i & 1 ? SLOTS_POISON >> 8 : POISON_BYTE_LOW;
}

static void poison_stream(struct harm_work *work, enum layout_stream stream) {
    uint8_t *bytes = harm_stream(work, work->harm->block, stream);

    poison(bytes, work->streams[work->harm->block][stream].size);
}

static void poison_scales(struct harm_work *work) {
    poison_stream(work, LAYOUT_META);
}

static void poison_plane(struct harm_work *work) {
    poison_stream(work, LAYOUT_VB);
}

static void poison_page(struct harm_work *work) {
    uint8_t *bytes = harm_page(work, 0);

    poison(bytes, work->pages[0].size);
}

static void nothing(struct harm_work *work) {
    work->changed = 1;
}

/* --- the list */

enum {
    ON_DISK = 1u << HARM_DISK,
    ON_RECORD = 1u << HARM_RECORDED,
    ON_DEVICE = 1u << HARM_PUBLISHED
};
enum { EVERYWHERE = ON_DISK | ON_RECORD | ON_DEVICE };
enum {
    HASH = 1u << HARM_HASH,
    PRINT = 1u << HARM_FINGERPRINT,
    GRADED = 1u << HARM_GRADED,
    NEEDLE = HARM_ANY_NEEDLE,
    WHOSE = 1u << HARM_NULL | 1u << HARM_THIEF
};

/* `expected` of what is recorded or published; on the disk a digest must say it, and in the device
 * so must one that is taken again through the block table where bytes differ. */
static const struct fault {
    const char *name;
    void (*inject)(struct harm_work *work);
    uint32_t places, expected[HARM_EXPECTED_MAX];
    int digests; /* published: bytes or block table are wrong */
} faults[] = {
    {"control: nothing is changed", nothing, ON_RECORD | ON_DEVICE, {0}, 0},
    {"bit flip in a plane, asked page", flip_asked, EVERYWHERE, {0}, 1},
    {"bit flip in a plane, page nobody asks", flip_quiet, EVERYWHERE, {0}, 1},
    {"plane of another page: VR2", low_plane, EVERYWHERE, {0}, 1},
    {"plane of another page: VB", high_plane, EVERYWHERE, {NEEDLE}, 1},
    {"plane order: VR1 and VR2", plane_order, EVERYWHERE, {GRADED}, 1},
    {"stale scales: V a step larger", old_scales, EVERYWHERE, {GRADED, PRINT}, 1},
    {"stale scales: of another block", other_scales, EVERYWHERE, {NEEDLE}, 1},
    {"K-only page swap", k_only, EVERYWHERE, {NEEDLE}, 1},
    {"V-only page swap", v_only, EVERYWHERE, {NEEDLE}, 1},
    {"whole-page swap", whole_page, EVERYWHERE, {0}, 1},
    {"page of another layer", other_layer, EVERYWHERE, {WHOSE}, 1},
    {"page of another head", other_head, EVERYWHERE, {WHOSE}, 1},
    {"block of another session", thief_block, EVERYWHERE, {1u << HARM_THIEF}, 1},
    {"block of another session, old image", thief_record, ON_RECORD, {1u << HARM_RECORDS}, 0},
    {"length off by one", length_off_by_one, ON_RECORD | ON_DEVICE, {PRINT, NEEDLE}, 0},
    {"pages of a block off by one", pages_off_by_one, EVERYWHERE, {NEEDLE}, 1},
    {"block table off by one", table_off_by_one, ON_DEVICE, {NEEDLE}, 1},
    {"window positions off by one", position_off, EVERYWHERE, {PRINT, NEEDLE}, 1},
    {"wrong tier map", tier_map, ON_RECORD | ON_DEVICE, {GRADED, PRINT}, 0},
    {"truncated tail", tail_cut, EVERYWHERE, {NEEDLE}, 0},
    {"poison left in place: scales", poison_scales, EVERYWHERE, {1u << HARM_GUARD}, 1},
    {"poison left in place: window page", poison_page, EVERYWHERE, {1u << HARM_GUARD}, 1},
    {"poison left in place: plane VB", poison_plane, EVERYWHERE, {NEEDLE}, 1},
};

/* --- running */

static void expect(const struct fault *fault, enum harm_place place, struct harm_result *result) {
    memcpy(result->expected, fault->expected, sizeof result->expected);
    if (place == HARM_DISK)
        memset(result->expected, 0, sizeof result->expected);
    for (uint32_t i = 0; i < HARM_EXPECTED_MAX; i++)
        if (result->expected[i] == 0 &&
            (place == HARM_DISK || (place == HARM_PUBLISHED && fault->digests))) {
            result->expected[i] = HASH;
            break;
        }
}

static void settle_result(const struct fault *fault, struct harm_result *result) {
    int must = fault->inject != nothing;

    result->good = result->injected && (must || result->caught == 0);
    for (uint32_t i = 0; i < HARM_EXPECTED_MAX; i++)
        if (result->expected[i])
            result->good &= (result->caught & result->expected[i]) != 0;
}

/* A real wake; where the proof refuses it, or nothing does, every layer is asked as well. */
static void run_stored(struct harm *harm, struct harm_result *result) {
    struct session *session = NULL;
    struct harm_verdict verdict;
    char text[HARM_TEXT_BYTES];
    enum kv_err err = harm_wake(harm, &session, &result->refused, text);

    result->woken = err == KV_OK;
    snprintf(result->text, sizeof result->text, "%s", text);
    if (text[0] != 0)
        result->caught = 1u << result->refused;
    if (err != KV_OK && err != KV_ERR_PROOF)
        return;
    if (err != KV_OK)
        session = harm_load(harm);
    harm_look(harm, session, 0, &verdict);
    session_drop(session);
    result->caught |= verdict.caught;
    result->asked = verdict.asked;
    result->wrong = verdict.wrong;
    if (result->text[0] == 0)
        snprintf(result->text, sizeof result->text, "%s", verdict.text);
}

static void run_one(struct harm *harm, const struct fault *fault, enum harm_place place,
                    struct session *session, struct harm_result *result) {
    struct harm_work *work = malloc(sizeof *work);
    struct harm_verdict verdict = {0};

    *result = (struct harm_result){.fault = fault->name, .place = place, .woken = 1};
    expect(fault, place, result);
    harm_begin(harm, place, session, work);
    fault->inject(work);
    result->injected = harm_apply(work);
    result->changed_bytes = work->changed_bytes;
    if (place == HARM_PUBLISHED) {
        harm_look(harm, session, 1, &verdict);
        result->caught = verdict.caught;
        result->asked = verdict.asked;
        result->wrong = verdict.wrong;
        snprintf(result->text, sizeof result->text, "%s", verdict.text);
    } else {
        run_stored(harm, result);
    }
    harm_undo(work);
    free(work);
    settle_result(fault, result);
    /* What was undone is as it was: the next fault is alone. */
    if (place == HARM_PUBLISHED)
        result->good &= harm_unharmed(harm, session);
}

/* A session of the same name that was computed again: only the counters know. */
static void run_prefilled(struct harm *harm, struct harm_result *result) {
    struct harm_verdict verdict;
    struct session *session = harm_prefill(harm, 0);

    *result = (struct harm_result){.fault = "silent re-prefill",
                                   .place = HARM_PUBLISHED,
                                   .expected = {1u << HARM_COUNTERS},
                                   .injected = 1};
    harm_look(harm, session, 1, &verdict);
    session_drop(session);
    result->caught = verdict.caught;
    result->asked = verdict.asked;
    result->wrong = verdict.wrong;
    snprintf(result->text, sizeof result->text, "%s", verdict.text);
    result->good = (verdict.caught & result->expected[0]) != 0;
}

uint32_t harm_run(struct harm *harm, struct harm_result results_out[HARM_RESULTS_MAX]) {
    enum harm_layer refused = HARM_LAYERS;
    struct session *session = NULL;
    char text[HARM_TEXT_BYTES];
    uint32_t count = 0;

    for (uint32_t place = 0; place < HARM_PLACES; place++) {
        if (place == HARM_PUBLISHED &&
            (harm_wake(harm, &session, &refused, text) != KV_OK || text[0] != 0)) {
            (void)tally_check(0, text);
            return count;
        }
        for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
            if (faults[i].places >> place & 1)
                run_one(harm, &faults[i], place, session, &results_out[count++]);
    }
    session_drop(session);
    run_prefilled(harm, &results_out[count++]);
    return count;
}
