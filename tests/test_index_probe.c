/* tests/test_index_probe.c - a child that dies, hangs, finds damage or is well.
 *
 * Responsible for: that the process which asked goes on, and what it is told; a store whose index
 * kills its reader is rebuilt.
 * Not responsible for: damaged pages (test_index_pages.c).
 * Broken twins: BREAK_PROBE.
 */
#include "store/index_probe.h"

#include "tests/support_store.h"
#include "tests/testing.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static enum kv_err is_well(void *context, struct kv_diag *diag) {
    (void)context;
    (void)diag;
    return KV_OK;
}

static enum kv_err finds_damage(void *context, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_CORRUPT, "found %s", (const char *)context);
}

static enum kv_err dies(void *context, struct kv_diag *diag) {
    (void)diag;
    signal(*(int *)context, SIG_DFL);
    raise(*(int *)context);
    return KV_OK;
}

static enum kv_err hangs(void *context, struct kv_diag *diag) {
    (void)context;
    (void)diag;
    while (pause() != 0)
        ;
    return KV_OK;
}

/* Fails unless all of it could be taken. */
static enum kv_err takes_memory(void *context, struct kv_diag *diag) {
    (void)context;
    for (size_t size = 1; size < 1 << 20; size *= 3) {
        void *memory = malloc(size);
        if (memory == NULL)
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory");
        free(memory);
    }
    return KV_OK;
}

/* Fails with BREAK_PROBE. */
static void every_end_is_told(void **state) {
    (void)state;
    static const int signals[3] = {SIGSEGV, SIGBUS, SIGABRT};
    struct kv_diag diag = {""};
    int ran = 0;
    assert_int_equal(index_probe_run(is_well, NULL, 10000000000u, &ran, &diag), KV_OK);
    assert_int_equal(ran, 1);
    assert_string_equal(diag.text, "");
    char what[] = "a page";
    assert_int_equal(index_probe_run(finds_damage, what, 10000000000u, &ran, &diag),
                     KV_ERR_CORRUPT);
    assert_string_equal(diag.text, "found a page");
    for (int i = 0; i < 3; i++) {
        int number = signals[i];
        assert_int_equal(index_probe_run(dies, &number, 10000000000u, &ran, &diag), KV_ERR_CORRUPT);
        char expected[32];
        snprintf(expected, sizeof expected, "signal %d", number);
        assert_non_null(strstr(diag.text, expected));
    }
    assert_int_equal(index_probe_run(hangs, NULL, 20000000u, &ran, &diag), KV_ERR_CORRUPT);
    assert_non_null(strstr(diag.text, "does not come to an end"));
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
}

struct busy {
    pthread_t thread;
    atomic_int stop;
};

/* Takes and gives back memory without end: whoever forks meanwhile meets its locks. */
static void *be_busy(void *context) {
    struct busy *busy = context;
    for (size_t size = 1; !atomic_load(&busy->stop); size = size % 100000 + 977) {
        char *memory = malloc(size);
        char text[64];
        if (memory != NULL)
            memory[0] = (char)snprintf(text, sizeof text, "%zu", size);
        free(memory);
    }
    return NULL;
}

/* A process with threads forks as well: its child dies for it, walks, and does not hang. */
static void threads_do_not_matter(void **state) {
    (void)state;
    enum { BUSY = 3 };
    struct busy busy[BUSY];
    struct kv_diag diag = {""};
    char dir[TESTING_PATH_BYTES];
    int number = SIGSEGV, ran = 0;
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 20, 1, NULL), KV_OK);
    store_close(store);
    for (int i = 0; i < BUSY; i++) {
        atomic_init(&busy[i].stop, 0);
        assert_int_equal(pthread_create(&busy[i].thread, NULL, be_busy, &busy[i]), 0);
    }
    assert_int_equal(index_probe_run(dies, &number, 10000000000u, &ran, &diag), KV_ERR_CORRUPT);
    assert_int_equal(ran, 1);
    for (int i = 0; i < 100; i++) {
        ran = 0;
        assert_int_equal(index_probe_run(takes_memory, NULL, 10000000000u, &ran, &diag), KV_OK);
        assert_int_equal(ran, 1);
    }
    options.read_only = 1;
    for (int i = 0; i < 20; i++)
        store_close(support_store_open(&options));
    /* No answer is no damage here. */
    assert_int_equal(index_probe_run(hangs, NULL, 20000000u, &ran, &diag), KV_OK);
    for (int i = 0; i < BUSY; i++) {
        atomic_store(&busy[i].stop, 1);
        pthread_join(busy[i].thread, NULL);
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

/* The store opens as before, and a child that walks it leaves no reader slot behind. */
static void a_store_is_walked_at_open(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    testing_temp_dir(dir);
    struct store_options options = support_store_options(dir);
    struct store *store = support_store_open(&options);
    assert_int_equal(support_store_commit(store, 0, 20, 1, NULL), KV_OK);
    store_close(store);
    for (unsigned i = 0; i < 200; i++) { /* more than LMDB has reader slots */
        options.read_only = i != 199;
        store = support_store_open(&options);
        if (i % 50 == 0 || i == 199)
            assert_true(support_store_matches(store, 7, 1, 1));
        store_close(store);
    }
    support_store_flip(dir, "index/data.mdb", 10, 0xff); /* a meta page */
    store = support_store_open(&options);
    struct store_stats stats;
    store_stats_get(store, &stats);
    assert_non_null(strstr(stats.opened, "rebuilt"));
    for (unsigned i = 0; i < 20; i++)
        assert_true(support_store_matches(store, i, 1, 0));
    store_close(store);
}

TESTING_MAIN(cmocka_unit_test(every_end_is_told), cmocka_unit_test(threads_do_not_matter),
             cmocka_unit_test(a_store_is_walked_at_open))
