/* tests/test_lost.c - a service whose device is lost tells whoever runs it, once.
 *
 * Responsible for: who is told and when; that what was asleep wakes in the next service.
 * Not responsible for: a real device (gpu_faults.c), what a failed call costs whom (test_device.c).
 */
#include "tools/service.h"

#include "tests/support_serve.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

static struct service *open_service(struct serving *serving) {
    if (service_open(&serving->settings, &serving->service, &serving->diag) != KV_OK)
        fail_msg("service_open: %s", serving->diag.text);
    return serving->service;
}

static struct session *session_of(struct service *service, const char *name) {
    const struct service_lookup lookup = {.create = 1};
    struct session *session = NULL;
    struct service_opened opened;
    struct kv_diag diag = {""};

    if (service_session(service, name, &lookup, &session, &opened, &diag) != KV_OK)
        fail_msg("session %s: %s", name, diag.text);
    return session;
}

/* One step of 20 tokens. */
static enum kv_err step(struct service *service, struct session *session) {
    static struct engine_event events[2 * 1024 + 1];
    const uint32_t ids[20] = {7, 8, 9};
    struct kv_diag diag = {""};
    uint32_t count = 0;

    assert_int_equal(session_feed(session, ids, 20, IMAGE_USER, &diag), KV_OK);
    return engine_step(service_engine(service), events, &count, &diag);
}

static void on_lost(void *context) {
    ++*(uint32_t *)context;
}

/* BREAK_LOST_UNTOLD */
static void who_runs_it_is_told_once(void **state) {
    struct serving *serving = *state;
    struct service *service;
    struct session *session;
    struct session_info info;
    struct receipt receipt;
    struct kv_diag diag = {""};
    uint32_t told = 0;

    serving->settings.device = ENGINE_DEVICE_CPU;
    service = open_service(serving);
    session = session_of(service, "safe");
    assert_int_equal(step(service, session), KV_OK);
    assert_int_equal(service_sleep(service, session, &receipt, &diag), KV_OK);
    service_on_lost(service, on_lost, &told);
    assert_int_equal(service_share(service, &diag), KV_OK);
    service_enter(service);
    session = session_of(service, "talks");
    assert_int_equal(step(service, session), KV_OK);
    service_leave(service);
    assert_int_equal(told, 0);
    support_wall_break(SUPPORT_WALL_LOST);
    service_enter(service);
    assert_int_equal(step(service, session), KV_ERR_DEVICE);
    assert_int_equal(told, 0);
    service_leave(service);
    uint32_t told_first = told;
    service_enter(service);
    assert_int_not_equal(service_sleep(service, session, &receipt, &diag), KV_OK);
    service_leave(service);
    service_unshare(service); /* a case that fails beside its threads could end in anything */
    assert_int_equal(told_first, 1);
    assert_int_equal(told, 1);
    serving_close(serving);
    service = open_service(serving);
    session_info(session_of(service, "safe"), &info);
    assert_int_equal(info.n, 20);
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(who_runs_it_is_told_once, serving_set_up,
                                             serving_tear_down))
