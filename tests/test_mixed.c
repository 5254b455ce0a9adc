/* tests/test_mixed.c - many sessions that take turns on too few slots.
 *
 * Responsible for: CASE-29 at small size with the real model (40 sessions with a value each under
 * keys that they share, sleep and wake in random order, short requests between), CASE-10 (one of
 * four wakes is refused) with the tiny model.
 * Not responsible for: bits of one session (test_life.c), hours.
 */
#include "engine/needle.h"
#include "tests/support_life.h"
#include "tests/testing.h"
#include "tools/licences.h"
#include "tools/service.h"
#include "tools/turn.h"

#include <stdio.h>
#include <string.h>

enum { SESSIONS = 40, KEYS = 2, QUICK_SESSIONS = 6, OTHERS = 3 };

static const char *const keys[KEYS] = {"red lamp", "stone bridge"};

struct fixture {
    struct service *service;
    struct licences *licences;
    uint32_t sessions;
    char values[SESSIONS][8]; /* session i has it under key i % KEYS */
};

static void name_of(uint32_t index, char name[8]) {
    snprintf(name, 8, "s%u", index);
}

/* Room for three of them. */
static void open_service(struct fixture *f, const char *dir) {
    struct service_settings settings;
    struct kv_diag diag = {""};
    service_settings_usual(&settings);
    settings.model_path = testing_need_model();
    settings.store_dir = dir;
    settings.program = "test";
    settings.poison_free_slots = 1;
    settings.shuffle_seed = 29;
    settings.probes = 0;
    settings.reserve_slots = 80;
    settings.slot_budget_bytes = 64u << 20;
    if (service_open(&settings, &f->service, &diag) != KV_OK)
        fail_msg("service_open: %s", diag.text);
}

static struct session *awake(struct fixture *f, uint32_t index, struct service_opened *opened) {
    struct service_lookup lookup = {.create = 1};
    struct session *session = NULL;
    struct kv_diag diag = {""};
    char name[8];
    name_of(index, name);
    if (service_session(f->service, name, &lookup, &session, opened, &diag) != KV_OK)
        fail_msg("%s: %s", name, diag.text);
    return session;
}

static struct session *say(struct fixture *f, uint32_t index, const char *text, uint32_t tokens) {
    struct service_opened opened;
    struct turn_result result;
    struct kv_diag diag = {""};
    struct session *session = awake(f, index, &opened);
    struct template_message message = {TEMPLATE_USER, text, strlen(text)};
    const struct turn_options options = {
        .messages = &message, .message_count = 1, .tokens_max = tokens, .save = 1};
    if (turn_run(f->service, session, &options, &result, &diag) != KV_OK)
        fail_msg("turn of s%u: %s", index, diag.text);
    turn_result_release(f->service, &result);
    return session;
}

static void plant(struct fixture *f, uint32_t index) {
    const struct licences_document document = {.index = index, .count = f->sessions, .bytes = 200};
    const struct needle_question question = {.with_hole = 1, .update = 1};
    struct needle_form form;
    struct needle_result result;
    struct kv_diag diag = {""};
    char *text = NULL;
    if (licences_document(f->licences, &document, &text, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    say(f, index, text, 0);
    kv_alloc_release(kv_alloc_system(), text);
    snprintf(f->values[index], 8, "%u", 2017 + 191 * index);
    assert_int_equal(needle_house_form(keys[index % KEYS], f->values[index], &form, &diag), KV_OK);
    struct session *session = say(f, index, form.statement, 0);
    const struct needle_text needle = {form.key, form.ask, form.answer_prefix, form.expect};
    if (needle_register(session, &needle, &diag) != KV_OK ||
        needle_check(session, 0, &question, &result, &diag) != KV_OK)
        fail_msg("%s", diag.text);
}

/* Its own value before those of a few others under the same key; counts what is likelier and is not
 * its own. */
static uint32_t foreign(struct fixture *f, struct session *session, uint32_t index,
                        struct testing_random *random, float *margin_least) {
    struct kv_diag diag = {""};
    struct needle_text texts[OTHERS + 1];
    struct needle_result results[OTHERS + 1];
    uint32_t count = 0, worse = 0;
    const struct image_needle *needle = transfer_needles(session, &count);
    assert_int_equal(count, 1);
    if (!needle->kept)
        return 0;
    for (uint32_t i = 0; i <= OTHERS; i++) {
        uint32_t step = 1 + (uint32_t)testing_random_below(random, f->sessions / KEYS - 1);
        uint32_t other = i == 0 ? index : (index + KEYS * step) % f->sessions;
        texts[i] =
            (struct needle_text){needle->key, needle->ask, needle->answer_prefix, f->values[other]};
    }
    if (needle_ask_all(session, texts, OTHERS + 1, results, &diag) != KV_OK)
        fail_msg("s%u: %s", index, diag.text);
    for (uint32_t i = 1; i <= OTHERS; i++) {
        float margin = results[0].logp - results[i].logp;
        worse += !(margin > 0);
        *margin_least = margin < *margin_least ? margin : *margin_least;
    }
    return worse;
}

static void no_value_crosses_sessions(void **state) {
    (void)state;
    struct fixture f = {0};
    char dir[TESTING_PATH_BYTES], store[TESTING_PATH_BYTES + 8];
    struct kv_diag diag = {""};
    struct testing_random random;
    uint32_t woken = 0, kept = 0, asked = 0, passed = 0, worse = 0;
    uint32_t rounds = testing_quick() ? 8 : 30;
    float margin = 1e9f;
    testing_need_model();
    testing_temp_dir(dir);
    snprintf(store, sizeof store, "%s/s", dir);
    testing_random_init(&random, testing_seed("order", 29));
    if (licences_load(kv_alloc_system(), &f.licences, &diag) != KV_OK)
        testing_skip(diag.text);
    open_service(&f, store);
    f.sessions = testing_quick() ? QUICK_SESSIONS : SESSIONS;
    for (uint32_t i = 0; i < f.sessions; i++)
        plant(&f, i);
    for (uint32_t i = 0; i < rounds; i++) {
        struct service_opened opened;
        uint32_t index = (uint32_t)testing_random_below(&random, f.sessions);
        struct session *session = awake(&f, index, &opened);
        if (opened.found == SERVICE_WOKEN) {
            woken++;
            assert_int_equal(opened.receipt.tokens_prefilled, 0);
            assert_int_equal(opened.receipt.fingerprint, RECEIPT_BITS_EQUAL);
            kept += opened.receipt.needles_kept;
            asked += opened.receipt.needles_asked;
            passed += opened.receipt.needles_passed;
        }
        if (i % 3 == 0)
            worse += foreign(&f, session, index, &random, &margin);
        if (testing_random_below(&random, 4) == 0)
            say(&f, index, "Go on, please.", 3);
    }
    printf("%u sessions, %u wakes, %u of %u kept needles passed, own value ahead by %.2f nats or "
           "more\n",
           f.sessions, woken, passed, asked, (double)margin);
    assert_true(woken >= (testing_quick() ? 1 : rounds / 3));
    assert_true(kept > 0 && asked == kept);
    assert_int_equal(worse, 0);
    assert_true(margin >= NEEDLE_DROP_NATS);
    /* Short turns may lead one or the other astray, as they would without sleep. */
    assert_true(passed * 10 >= asked * 9);
    service_close(f.service);
    licences_drop(f.licences);
}

/* CASE-10: the refused one changes nothing for the others, and comes back when its bytes do. */
static void one_of_four_is_refused(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct kv_digest resident[4];
    struct store_extent extent;
    struct kv_diag diag = {""};
    uint8_t page[4096];
    life_begin(dir, &life);
    for (uint32_t i = 0; i < 4; i++) {
        char name[8];
        name_of(i, name);
        struct session *session = life_session(&life, name, IMAGE_RECIPE_V3);
        life_say(session, 10 + i, 64 + 256 * 4 + 20 * i, 3, NULL);
        resident[i] = life_resident(session);
        life_sleep(&life, session);
    }
    struct record_snapshot head = life_head(&life, "s2", NULL);
    struct record_key key = record_key_block(head.lineage, 1);
    life_extent(&life, &key, LAYOUT_KH, &extent);
    extent.stored_bytes = extent.stored_bytes < sizeof page ? extent.stored_bytes : sizeof page;
    life_disk(dir, &extent, page, 0);
    page[100] ^= 4;
    life_disk(dir, &extent, page, 1);
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t index = i == 4 ? 2 : i; /* once more, mended */
        char name[8];
        struct receipt receipt;
        name_of(index, name);
        if (i == 2) {
            life_refuse(&life, name, KV_ERR_CORRUPT, &diag);
            page[100] ^= 4;
            life_disk(dir, &extent, page, 1);
            continue;
        }
        struct session *session = life_wake(&life, name, &receipt);
        assert_int_equal(receipt.tokens_prefilled, 0);
        assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
        struct kv_digest found = life_resident(session);
        assert_memory_equal(&found, &resident[index], sizeof found);
    }
    for (uint32_t i = 0; i < 4; i++) {
        char name[8];
        name_of(i, name);
        struct kv_digest found = life_resident(session_find(life.engine, name));
        assert_memory_equal(&found, &resident[i], sizeof found);
    }
    life_close(&life);
}

TESTING_MAIN(cmocka_unit_test(one_of_four_is_refused), cmocka_unit_test(no_value_crosses_sessions))
