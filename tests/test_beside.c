/* tests/test_beside.c - others work on while a session is asked and while receipts are written.
 *
 * Responsible for: steps of others between two questions, whichever thread asks; the session that
 * is asked stays as it is; receipts are written down by nobody who holds the engine.
 * Not responsible for: how long a question takes (bench_serve.c), answers (test_serve.c).
 */
#include "engine/engine_inner.h"
#include "engine/probe.h"
#include "snapshot/snap_tend.h"
#include "tests/support_engine.h"
#include "tests/support_serve.h"
#include "tests/testing.h"
#include "tools/receipt_keep.h"
#include "tools/service_inner.h"

#include <cjson/cJSON.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROBES = 8, TOKENS = 1100, TURNS = 6, TRIES = 200 };
static const uint64_t look_again_ns = 50000000;
static const struct service_patience for_ever = {.deadline_ns = UINT64_MAX};

/* --- two sessions, as the scheduler thread */

struct scene {
    struct serving *serving;
    struct service *service;
    struct service_lease leases[2];
    struct session *asked, *talking;
    struct hearing_ear ear; /* of the one that talks: somebody listens, so the engine steps */
    void (*meddle)(struct scene *scene);
    int breaths, refused, changed;
    int patient, waits, patient_still; /* the questions to `asked` … once somebody waits for it */
};

static void on_token(void *context, struct session *session, uint32_t token) {
    struct scene *scene = context;
    (void)session, (void)token;
    if (scene->meddle != NULL)
        scene->meddle(scene);
}

static struct session *make(struct scene *scene, int index, const char *name) {
    struct kv_diag *diag = &scene->serving->diag;
    const struct service_lookup lookup = {.create = 1};
    struct service_opened opened;
    struct session *session = NULL;
    enum kv_err err = service_lease(scene->service, name, &for_ever, &scene->leases[index], diag);
    if (err == KV_OK)
        err = service_session(scene->service, name, &lookup, &session, &opened, diag);
    if (err != KV_OK)
        fail_msg("session %s: %s", name, diag->text);
    return session;
}

/* `asked` has some blocks, all of them durable, and does nothing; `talking` begins to. What is
 * found out is asserted behind end_scene: until then others wait for this thread. */
static void begin_scene(struct scene *scene, struct serving *serving) {
    static uint32_t ids[TOKENS];
    serving->settings.policy = (struct image_policy){.recipe = IMAGE_RECIPE_V3, .pressure = 1};
    serving->settings.probes = PROBES;
    serving_open(serving);
    *scene = (struct scene){.serving = serving, .service = serving->service};
    service_enter(scene->service);
    scene->asked = make(scene, 0, "asked");
    support_engine_ids(testing_seed("ids", 11), 256, ids, TOKENS);
    support_engine_feed(scene->asked, ids, TOKENS);
    snapshot_drain(service_snapshot(scene->service));
    engine_apply(service_engine(scene->service));
    scene->talking = make(scene, 1, "talking");
    assert_int_equal(session_feed(scene->talking, ids, 20, IMAGE_USER, &serving->diag), KV_OK);
    assert_int_equal(session_generate(scene->talking, 8000, &serving->diag), KV_OK);
    scene->ear =
        (struct hearing_ear){.session = scene->talking, .token = on_token, .context = scene};
    service_listen(scene->service, &scene->ear);
}

static void end_scene(struct scene *scene) {
    struct hearing_heard heard = {0};
    session_cancel(scene->talking);
    service_leave(scene->service);
    while (!heard.over)
        service_hear(scene->service, &scene->ear, look_again_ns, &heard);
    service_enter(scene->service);
    service_deafen(scene->service, &scene->ear);
    for (int i = 0; i < 2; i++)
        service_lease_end(scene->service, &scene->leases[i]);
    service_leave(scene->service);
}

/* What somebody who works between two questions could do to the session. */
static void feed_and_lower(struct scene *scene) {
    const uint32_t id = 5;
    struct session_info before, after;
    struct kv_diag diag = {""};
    session_info(scene->asked, &before);
    enum kv_err err = session_feed(scene->asked, &id, 1, IMAGE_USER, &diag);
    scene->refused += err == KV_ERR_BUSY && strstr(diag.text, "being asked") != NULL;
    engine_relieve(service_engine(scene->service), UINT32_MAX / 2);
    session_info(scene->asked, &after);
    scene->changed += after.n != before.n || !image_policy_equal(&before.policy, &after.policy) ||
                      memcmp(before.tier_blocks, after.tier_blocks, sizeof before.tier_blocks) != 0;
    scene->breaths++;
}

/* BREAK_ASK_BREATHE keeps the engine from the first question to the last, BREAK_PRESSURE_ASKED
 * lowers the blocks that the questions are about, BREAK_FED_WHILE_ASKED adds to them. */
static void others_step_between_two_questions(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    struct probe_report report = {0};
    struct session_info before, after;
    begin_scene(&scene, serving);
    session_info(scene.asked, &before);
    scene.meddle = feed_and_lower;
    enum kv_err err = probe_choose(scene.asked, PROBES, &report, &serving->diag);
    scene.meddle = NULL;
    session_info(scene.asked, &after);
    /* Once nobody asks it is lowered like any other. */
    uint32_t freed = engine_relieve(service_engine(scene.service), UINT32_MAX / 2);
    end_scene(&scene);
    assert_true(before.blocks >= 2 && before.blocks_durable == before.blocks);
    assert_int_equal(err, KV_OK);
    assert_true(report.tried > 0);
    assert_true(scene.breaths > 0);
    assert_int_equal(scene.refused, scene.breaths);
    assert_int_equal(scene.changed, 0);
    assert_int_equal(after.n, before.n);
    assert_true(freed > 0);
}

/* Nothing to feed: refused as such unless the session is being asked. */
static void see_asked(struct scene *scene) {
    struct kv_diag diag = {""};
    struct session *session = session_find(service_engine(scene->service), "asked");
    const char *saved = snap_tend_under_way(scene->service->tend);
    if (session == NULL || session_feed(session, NULL, 0, IMAGE_USER, &diag) != KV_ERR_BUSY ||
        strstr(diag.text, "being asked") == NULL)
        return;
    scene->breaths++;
    scene->changed += saved == NULL || strcmp(saved, "asked") != 0;
}

/* The one that steps asks too, where a session goes to sleep by itself. BREAK_OWN_BREATH lets it
 * ask to the end. */
static void the_engine_thread_steps_between_its_questions(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    serving->settings.idle_ns = 1;
    begin_scene(&scene, serving);
    scene.meddle = see_asked;
    service_lease_end(scene.service, &scene.leases[0]);
    int awake = 1;
    for (int i = 0; i < TRIES && awake; i++) {
        service_await(scene.service, look_again_ns);
        awake = session_find(service_engine(scene.service), "asked") != NULL;
    }
    scene.meddle = NULL;
    end_scene(&scene);
    assert_false(awake);
    assert_true(scene.breaths > 0);
    assert_int_equal(scene.changed, 0);
}

static void see_patience(struct scene *scene) {
    struct session *session = session_find(service_engine(scene->service), "asked");
    if (session == NULL || session->asked == 0)
        return;
    scene->breaths += scene->waits;
    *(scene->waits ? &scene->patient_still : &scene->patient) += session->patient;
}

/* BREAK_HURRY: others step as often as while nobody waits. */
static void it_is_asked_at_once_when_somebody_waits(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    serving->settings.idle_ns = 1;
    begin_scene(&scene, serving);
    scene.meddle = see_patience;
    service_lease_end(scene.service, &scene.leases[0]);
    while (scene.patient == 0 && session_find(service_engine(scene.service), "asked") != NULL) {
        service_leave(scene.service);
        service_enter(scene.service);
    }
    scene.waits = 1;
    service_settle(scene.service, "asked");
    scene.meddle = NULL;
    end_scene(&scene);
    assert_true(scene.patient > 0);
    assert_true(scene.breaths > 0);
    assert_int_equal(scene.patient_still, 0);
}

/* Who puts it to sleep waits for that: for its slots, or for the end of a command.
 * BREAK_WAITED_SLEEP */
static void a_sleep_that_is_waited_for_is_not_patient(void **state) {
    struct serving *serving = *state;
    static struct scene scene;
    struct receipt receipt;
    begin_scene(&scene, serving);
    scene.meddle = see_patience;
    scene.waits = 1;
    enum kv_err err = service_sleep(scene.service, scene.asked, &receipt, &serving->diag);
    scene.meddle = NULL;
    end_scene(&scene);
    assert_int_equal(err, KV_OK);
    assert_true(scene.breaths > 0);
    assert_int_equal(scene.patient_still, 0);
}

/* --- whole turns */

struct talker {
    struct serving *serving;
    pthread_t thread;
    atomic_int over;
    enum kv_err err;
    struct kv_diag diag;
};

static int is_over(void *context) {
    return atomic_load(&((struct talker *)context)->over);
}

static void *talk_main(void *context) {
    struct talker *talker = context;
    for (int i = 0; !is_over(talker) && talker->err == KV_OK; i++) {
        struct serving_chat chat = {.texts = {"tell me a long story"}, .count = 1};
        struct serve_answer answer;
        char name[32];
        snprintf(name, sizeof name, "talk-%d", i);
        struct serve_request request = serving_request(&chat, name, 8000);
        request.cancelled = is_over;
        request.context = talker;
        talker->err = serve_turn(talker->serving->serve, &request, &answer, &talker->diag);
        serve_answer_release(talker->serving->serve, &answer);
    }
    return NULL;
}

static struct serve_answer say(struct serving *serving, const char *name) {
    static char text[2048];
    size_t used = 0;
    for (int i = 0; used + 16 < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "word%d ", i * 31 % 97);
    struct serving_chat chat = {.texts = {text}, .count = 1};
    const struct serve_request request = serving_request(&chat, name, 4);
    struct serve_answer answer;
    if (serve_turn(serving->serve, &request, &answer, &serving->diag) != KV_OK)
        fail_msg("say: %s", serving->diag.text);
    return answer;
}

/* A request for a session that goes to sleep waits until it has gone, and wakes it. */
static void a_request_waits_for_what_is_asked(void **state) {
    struct serving *serving = *state;
    struct talker talker = {.serving = serving};
    serving->settings.idle_ns = 1;
    serving->settings.probes = PROBES;
    serving_open(serving);
    assert_int_equal(pthread_create(&talker.thread, NULL, talk_main, &talker), 0);
    for (int i = 0; i < TURNS; i++) {
        struct serve_answer answer = say(serving, "asked");
        assert_true(answer.tokens_completion > 0);
        serve_answer_release(serving->serve, &answer);
    }
    atomic_store(&talker.over, 1);
    pthread_join(talker.thread, NULL);
    if (talker.err != KV_OK && talker.err != KV_ERR_CANCELLED)
        fail_msg("talk: %s", talker.diag.text);
}

struct watched {
    struct serving *serving;
    atomic_int lines, held;
};

/* The line stands behind the receipt, on the thread that wrote it. */
static void on_log(void *context, const char *line) {
    struct watched *watched = context;
    if (strncmp(line, "save ", 5) != 0)
        return;
    atomic_fetch_add(&watched->lines, 1);
    atomic_fetch_add(&watched->held, baton_is_mine(&watched->serving->service->baton));
}

/* BREAK_RECEIPT_QUEUE writes them where they come: nobody steps meanwhile. */
static void receipts_are_written_beside_the_engine(void **state) {
    struct serving *serving = *state;
    struct watched watched = {.serving = serving};
    char dir[TESTING_PATH_BYTES + 16];
    snprintf(dir, sizeof dir, "%s/receipts", serving->home);
    const struct receipt_keep keep = {dir, kv_clock_system(), kv_alloc_system()};
    uint64_t last = 0;
    serving->serve_settings.keep = &keep;
    serving->serve_settings.log = on_log;
    serving->serve_settings.log_context = &watched;
    serving_open(serving);
    for (int i = 0; i < TURNS; i++) {
        cJSON *document = NULL;
        struct serve_answer answer = say(serving, "kept");
        /* Whoever is answered finds the receipt, in the order of the answers. */
        assert_true(answer.receipt_id > last);
        last = answer.receipt_id;
        assert_int_equal(receipt_keep_read(&keep, last, &document, &serving->diag), KV_OK);
        assert_string_equal(cJSON_GetObjectItem(document, "name")->valuestring, "kept");
        cJSON_Delete(document);
        assert_int_equal(atomic_load(&watched.lines), i + 1);
        serve_answer_release(serving->serve, &answer);
    }
    assert_int_equal(atomic_load(&watched.held), 0);
}

#define SERVING(test) cmocka_unit_test_setup_teardown(test, serving_set_up, serving_tear_down)

TESTING_MAIN(SERVING(others_step_between_two_questions),
             SERVING(the_engine_thread_steps_between_its_questions),
             SERVING(it_is_asked_at_once_when_somebody_waits),
             SERVING(a_sleep_that_is_waited_for_is_not_patient),
             SERVING(a_request_waits_for_what_is_asked),
             SERVING(receipts_are_written_beside_the_engine))
