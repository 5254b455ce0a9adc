/* tests/test_probe.c - probes: where they stand, that they can fail, that a wake changes none.
 *
 * Responsible for: places as a function of length and policy; with the real model the choice,
 * holes, sleep and wake, and needles of sessions that share their keys.
 * Not responsible for: the bits of woken sessions (test_life.c), commands (test_cli_needle.c).
 * Broken twins: BREAK_PROBE_DEPTH, BREAK_PROBE_KEEP.
 */
#include "engine/probe.h"

#include "engine/needle.h"
#include "tests/testing.h"
#include "tools/licences.h"
#include "tools/service.h"
#include "tools/turn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- places */

static int block_of(uint64_t token, uint64_t n_kv) {
    uint64_t blocks = layout_sealed_blocks(n_kv);
    uint64_t block = (token - LAYOUT_SINK_TOKENS) / LAYOUT_BLOCK_TOKENS;
    return block < blocks ? (int)block : -1;
}

static void check_places(uint64_t n_kv, const struct image_policy *policy, uint32_t count) {
    const struct probe_text text = {n_kv, policy};
    uint32_t tiers = 0, seen = 0, crossing = 0, placed = 0, in_window = 0;
    uint64_t least = UINT64_MAX, most = 0;
    for (uint64_t b = 0; b < layout_sealed_blocks(n_kv); b++)
        tiers |= 1u << image_tier(policy, b, n_kv);
    for (uint32_t i = 0; i < count; i++) {
        struct image_probe probe;
        for (uint32_t t = 0; t < PROBE_TRIES; t++) {
            assert_true(probe_place(&text, i, count, t, &probe));
            assert_true(probe.first >= LAYOUT_SINK_TOKENS && probe.end <= n_kv);
            assert_int_equal(probe.answer - probe.first, PROBE_QUESTION);
            assert_int_equal(probe.end - probe.answer, PROBE_ANSWER);
        }
        assert_true(probe_place(&text, i, count, 0, &probe));
        int block = block_of(probe.answer, n_kv);
        if (block >= 0)
            seen |= 1u << image_tier(policy, (uint64_t)block, n_kv);
        in_window += block < 0;
        crossing += block_of(probe.end - 1, n_kv) != block;
        least = probe.answer < least ? probe.answer : least;
        most = probe.answer > most ? probe.answer : most;
        placed++;
    }
    assert_int_equal(placed, count);
    uint32_t zones = (uint32_t)__builtin_popcount(tiers) + 1;
    if (count >= 2 * zones) {
        /* A probe at an edge may stand in the neighbouring zone, so twice as many are wanted. */
        assert_int_equal(seen, tiers);
        assert_true(in_window > 0);
        assert_true(layout_sealed_blocks(n_kv) < 2 || crossing > 0);
        assert_true(least < LAYOUT_SINK_TOKENS + n_kv / 3);
        assert_true(most > n_kv - n_kv / 3);
    }
}

/* Fails with BREAK_PROBE_DEPTH. */
static void places_are_spread(void **state) {
    (void)state;
    static const struct image_policy policies[] = {
        {.recipe = IMAGE_RECIPE_V3, .age_count = 0, .ages = {0, 0, 0}},
        {.recipe = IMAGE_RECIPE_V3, .age_count = 1, .ages = {1024, 0, 0}},
        {.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}},
        {.recipe = IMAGE_RECIPE_BF16, .age_count = 0, .ages = {0, 0, 0}}};
    static const uint32_t counts[] = {1, 2, 3, 4, 7, 8, 16, 64};
    for (size_t p = 0; p < sizeof policies / sizeof policies[0]; p++)
        for (uint64_t n_kv = 90; n_kv < 9000; n_kv += n_kv < 700 ? 1 : 97)
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
                check_places(n_kv, &policies[p], counts[c]);
    struct image_probe probe;
    const struct probe_text tiny = {64 + 18, &policies[0]};
    assert_false(probe_place(&tiny, 0, 4, 0, &probe));
}

/* --- the real model */

struct fixture {
    char dir[TESTING_PATH_BYTES];
    struct service *service;
    struct licences *licences;
};

static void open_service(struct fixture *f, uint32_t probes) {
    char store[TESTING_PATH_BYTES + 8];
    struct service_settings settings;
    struct kv_diag diag = {""};
    snprintf(store, sizeof store, "%s/s", f->dir);
    service_settings_usual(&settings);
    settings.model_path = testing_need_model();
    settings.store_dir = store;
    settings.program = "test";
    settings.poison_free_slots = 1;
    settings.probes = probes;
    settings.slot_budget_bytes = 512u << 20;
    settings.policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};
    if (service_open(&settings, &f->service, &diag) != KV_OK)
        fail_msg("service_open: %s", diag.text);
}

static void begin(struct fixture *f, uint32_t probes) {
    struct kv_diag diag = {""};
    testing_need_model();
    testing_temp_dir(f->dir);
    if (licences_load(kv_alloc_system(), &f->licences, &diag) != KV_OK)
        testing_skip(diag.text);
    open_service(f, probes);
}

static void end(struct fixture *f) {
    service_close(f->service);
    licences_drop(f->licences);
}

static struct session *say(struct fixture *f, const char *name, const char *text) {
    struct service_lookup lookup = {.create = 1};
    struct service_opened opened;
    struct turn_result result;
    struct session *session = NULL;
    struct kv_diag diag = {""};
    struct template_message message = {TEMPLATE_USER, text, strlen(text)};
    const struct turn_options options = {.messages = &message, .message_count = 1};
    if (service_session(f->service, name, &lookup, &session, &opened, &diag) != KV_OK ||
        turn_run(f->service, session, &options, &result, &diag) != KV_OK)
        fail_msg("%s: %s", name, diag.text);
    turn_result_release(f->service, &result);
    return session;
}

static struct session *say_document(struct fixture *f, uint32_t index, uint64_t bytes) {
    const struct licences_document document = {.index = index, .count = 4, .bytes = bytes};
    char name[8], *text = NULL;
    struct kv_diag diag = {""};
    snprintf(name, sizeof name, "s%u", index);
    if (licences_document(f->licences, &document, &text, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    struct session *session = say(f, name, text);
    kv_alloc_release(kv_alloc_system(), text);
    return session;
}

static struct session *wake(struct fixture *f, const char *name, uint32_t probes,
                            struct receipt *receipt_out) {
    const struct restore_options options = {.probes_max = probes};
    struct session *session = NULL;
    struct kv_diag diag = {""};
    if (service_wake(f->service, name, &options, &session, receipt_out, &diag) != KV_OK)
        fail_msg("wake of %s: %s", name, diag.text);
    return session;
}

/* Every kept probe was right before sleep, is right after it with the same bits, and is wrong with
 * a hole where it stands. */
static void kept_probes_can_fail_and_come_back(void **state) {
    (void)state;
    uint32_t wanted = testing_quick() ? 4 : 8;
    struct fixture f;
    struct kv_diag diag = {""};
    struct image_probe before[IMAGE_PROBES_MAX];
    struct probe_result plain[IMAGE_PROBES_MAX], hole[IMAGE_PROBES_MAX];
    struct image_fingerprint print, again;
    struct receipt receipt;
    begin(&f, wanted);
    struct session *session = say_document(&f, 0, testing_quick() ? 2200 : 4500);
    assert_int_equal(session_fingerprint(session, 0, &print, &diag), KV_OK);
    if (service_sleep(f.service, session, &receipt, &diag) != KV_OK)
        fail_msg("sleep: %s", diag.text);
    printf("tried %u, kept %u, %.0f ms\n", receipt.probes_tried, receipt.probes_kept,
           (double)receipt.probes_ns / 1e6);
    assert_true(receipt.probes_kept >= wanted / 2 && receipt.probes_ns > 0);
    uint32_t kept = receipt.probes_kept;
    service_close(f.service);
    open_service(&f, wanted);
    session = wake(&f, "s0", wanted, &receipt);
    assert_int_equal(receipt.probes_kept, kept);
    assert_int_equal(receipt.probes_asked, kept);
    assert_int_equal(receipt.probes_passed, kept);
    uint32_t count = 0, crossing = 0;
    memcpy(before, transfer_probes(session, &count), sizeof before);
    assert_int_equal(count, kept);
    const struct probe_asking ask = {0, count, 0}, masked = {0, count, 1};
    assert_int_equal(probe_ask(session, &ask, plain, &diag), KV_OK);
    assert_int_equal(probe_ask(session, &masked, hole, &diag), KV_OK);
    for (uint32_t i = 0; i < count; i++) {
        assert_true(plain[i].passed);
        assert_memory_equal(&plain[i].logp, &before[i].logp, sizeof plain[i].logp);
        assert_false(hole[i].passed);
        assert_true(plain[i].logp - hole[i].logp >= NEEDLE_DROP_NATS);
        crossing += (before[i].answer - 1) / 64 != (before[i].end - 1) / 64;
    }
    assert_true(crossing > 0);
    /* Asking leaves no trace. */
    assert_int_equal(session_fingerprint(session, 0, &again, &diag), KV_OK);
    assert_memory_equal(&again.logits, &print.logits, sizeof again.logits);
    session_drop(session);
    wake(&f, "s0", 0, &receipt);
    assert_int_equal(receipt.probes_asked, 0);
    end(&f);
}

/* A text that goes on by itself passes without any memory of it, so nothing of it is kept.
 * Fails with BREAK_PROBE_KEEP. */
static void what_cannot_fail_is_not_kept(void **state) {
    (void)state;
    struct fixture f;
    struct kv_diag diag = {""};
    struct probe_report report;
    char text[2600];
    size_t at = 0, room = testing_quick() ? 700 : sizeof text;
    uint32_t wanted = testing_quick() ? 4 : 8;
    begin(&f, wanted);
    for (uint32_t i = 101; at + 8 < room && i < 420; i++)
        at += (size_t)snprintf(text + at, room - at, "%u, ", i);
    struct session *session = say(&f, "count", text);
    if (probe_choose(session, wanted, &report, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    printf("tried %u, passed %u, kept %u\n", report.tried, report.passed, report.kept);
    assert_true(report.passed >= wanted / 2);
    assert_true(report.kept < report.passed / 2);
    end(&f);
}

/* Sessions with the same keys and their own values: no value comes from another session, before
 * sleep or after it, and the own one leads by a margin. */
static void the_same_keys_give_no_foreign_value(void **state) {
    (void)state;
    enum { SESSIONS = 2, KEYS = 2 };
    static const char *const keys[KEYS] = {"red lamp", "stone bridge"};
    static const char *const values[SESSIONS][KEYS] = {{"4817", "2953"}, {"9062", "7348"}};
    struct fixture f;
    struct kv_diag diag = {""};
    struct receipt receipt;
    uint32_t kept = 0;
    begin(&f, 0);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        char name[8];
        struct session *session = say_document(&f, i, testing_quick() ? 500 : 1500);
        snprintf(name, sizeof name, "s%u", i);
        for (uint32_t k = 0; k < KEYS; k++) {
            struct needle_form form;
            assert_int_equal(needle_house_form(keys[k], values[i][k], &form, &diag), KV_OK);
            session = say(&f, name, form.statement);
            const struct needle_text text = {form.key, form.ask, form.answer_prefix, form.expect};
            if (needle_register(session, &text, &diag) != KV_OK)
                fail_msg("%s", diag.text);
        }
        if (service_sleep(f.service, session, &receipt, &diag) != KV_OK)
            fail_msg("%s", diag.text);
        kept += receipt.needles_kept;
    }
    printf("kept %u of %u\n", kept, SESSIONS * KEYS);
    assert_true(kept >= SESSIONS * KEYS - 1);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%u", i);
        struct session *session = wake(&f, name, 0, &receipt);
        assert_int_equal(receipt.needles_passed, receipt.needles_kept);
        /* Asked together, plain and with holes, they are answered bit for bit as alone. */
        const uint32_t both[KEYS] = {1, 0};
        const struct needle_list list = {both, KEYS};
        const struct needle_question holes = {.with_hole = 1};
        struct needle_result together[KEYS], alone;
        if (i == 0)
            assert_int_equal(needle_check_all(session, &list, &holes, together, &diag), KV_OK);
        for (uint32_t k = 0; i == 0 && k < KEYS; k++) {
            assert_int_equal(needle_check(session, both[k], &holes, &alone, &diag), KV_OK);
            assert_memory_equal(&together[k], &alone, sizeof alone);
        }
        for (uint32_t k = 0; k < KEYS; k++) {
            float own = 0, other = 0;
            assert_int_equal(needle_score(session, k, values[i][k], &own, &diag), KV_OK);
            assert_int_equal(needle_score(session, k, values[1 - i][k], &other, &diag), KV_OK);
            printf("%s, %s: own %.2f, foreign %.2f\n", name, keys[k], (double)own, (double)other);
            assert_true(own - other >= NEEDLE_DROP_NATS);
        }
    }
    end(&f);
}

TESTING_MAIN(cmocka_unit_test(places_are_spread),
             cmocka_unit_test(kept_probes_can_fail_and_come_back),
             cmocka_unit_test(what_cannot_fail_is_not_kept),
             cmocka_unit_test(the_same_keys_give_no_foreign_value))
