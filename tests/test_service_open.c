/* tests/test_service_open.c - a service that opens, and one that cannot.
 *
 * Responsible for: the order of store and model, what is left behind, failing allocations.
 * Not responsible for: sessions (test_service.c).
 */
#include "tests/support_serve.h"
#include "tools/service.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What has nothing in it yet is made once all else is there, and only for who may make it.
 * Fails with BREAK_STORE_EARLY. */
static void a_model_that_cannot_be_had_leaves_no_store(void **state) {
    struct serving *fixture = *state;
    struct service *service = NULL;
    char store[TESTING_PATH_BYTES + 16];
    struct service_settings settings = fixture->settings;
    snprintf(store, sizeof store, "%s/other", fixture->home);
    settings.store_dir = store;
    settings.create = 0;
    assert_int_equal(service_open(&settings, &service, &fixture->diag), KV_ERR_NOT_FOUND);
    assert_non_null(strstr(fixture->diag.text, "other: there is none"));
    settings.create = 1;
    settings.model_path = "/nowhere/model.gguf";
    assert_int_equal(service_open(&settings, &service, &fixture->diag), KV_ERR_NOT_FOUND);
    assert_non_null(strstr(fixture->diag.text, "/nowhere/model.gguf"));
    assert_int_equal(access(store, F_OK), -1);
    settings.model_path = fixture->settings.model_path;
    assert_int_equal(service_open(&settings, &service, &fixture->diag), KV_OK);
    service_close(service);
    assert_int_equal(access(store, F_OK), 0);
}

static enum kv_err refuse(void *context, struct store *store, struct kv_diag *diag) {
    struct store **seen = context;
    *seen = store;
    return kv_diag_set(diag, KV_ERR_EXISTS, "refused");
}

/* What the store alone says is said in front of the model, also where there is no store yet.
 * Fails with BREAK_LATE_LOOK. */
static void the_store_is_looked_at_before_the_model(void **state) {
    struct serving *fixture = *state;
    struct service *service = NULL;
    struct store *seen = NULL;
    char store[TESTING_PATH_BYTES + 16];
    struct service_settings settings = fixture->settings;
    snprintf(store, sizeof store, "%s/other", fixture->home);
    assert_int_equal(service_open(&settings, &service, &fixture->diag), KV_OK);
    service_close(service);
    settings.model_path = "/nowhere/model.gguf";
    settings.read_only = 1;
    settings.look = refuse;
    settings.look_context = &seen;
    assert_int_equal(service_open(&settings, &service, &fixture->diag), KV_ERR_EXISTS);
    assert_string_equal(fixture->diag.text, "refused");
    assert_non_null(seen);
    settings.read_only = 0;
    settings.store_dir = store;
    assert_int_equal(service_open(&settings, &service, &fixture->diag), KV_ERR_EXISTS);
    assert_null(seen);
    assert_int_equal(access(store, F_OK), -1);
}

/* Every allocation of opening fails once: nothing stays behind, and the store opens afterwards. */
static void opening_survives_every_failed_allocation(void **state) {
    struct serving *fixture = *state;
    struct testing_alloc testing;
    uint64_t step = testing_quick() ? 17 : 3;
    for (uint64_t k = 1;; k += step) {
        struct service *service = NULL;
        struct service_settings settings = fixture->settings;
        testing_alloc_init(&testing, k);
        settings.alloc = &testing.alloc;
        enum kv_err err = service_open(&settings, &service, &fixture->diag);
        assert_int_equal(err == KV_OK, service != NULL);
        assert_true(err == KV_OK || err == KV_ERR_NOMEM);
        service_close(service);
        assert_int_equal(testing.live_count, 0);
        if (testing.failed_count == 0)
            break;
    }
    assert_int_equal(service_open(&fixture->settings, &fixture->service, &fixture->diag), KV_OK);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, serving_set_up, serving_tear_down)

TESTING_MAIN(TEST(a_model_that_cannot_be_had_leaves_no_store),
             TEST(the_store_is_looked_at_before_the_model),
             TEST(opening_survives_every_failed_allocation))
