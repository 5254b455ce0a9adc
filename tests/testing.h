/* tests/testing.h - what every test program shares: the runner, seeds, folders, allocators.
 *
 * Responsible for: running cmocka tests and ending with `N passed, N failed`, a fresh folder per
 * call, a printed seed and its generator, an allocator that fails on request, the model's path.
 * Not responsible for: fault doors and fixtures of one folder (tests/support_*.c).
 *
 * A program is a list of tests and one line:
 *     TESTING_MAIN(cmocka_unit_test(first), cmocka_unit_test(second))
 * An argument selects tests by shell pattern: test_bytes 'reader_*'.
 *
 * Threads: testing_alloc may be used from any thread; everything else from the main thread.
 * Units: bytes.
 */
#ifndef TESTS_TESTING_H
#define TESTS_TESTING_H

#include "store/base/alloc.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define TESTING_MAIN(...)                                                                          \
    int main(int argc, char **argv) {                                                              \
        const struct CMUnitTest tests[] = {__VA_ARGS__};                                           \
        return testing_run(argc, argv, tests, sizeof tests / sizeof tests[0]);                     \
    }

/* Runs the tests, prints the closing line and returns the exit status: 0, 1, or 77 when every
 * test was skipped. */
int testing_run(int argc, char **argv, const struct CMUnitTest *tests, size_t count);

/* Leaves the running test and counts it as skipped: what cannot run here is never "passed". */
_Noreturn void testing_skip(const char *reason);

/* 1 when make was given QUICK=1: sweeps and sizes may shrink, nothing may be left out. */
int testing_quick(void);

/* The value of MODEL, else the default model in COLDPLANE_HOME; NULL when there is none. */
const char *testing_model_path(void);
/* As above, but skips the running test when there is no model. */
const char *testing_need_model(void);

enum { TESTING_PATH_BYTES = 256 };

/* Makes a folder under TMPDIR or /tmp that is removed when the program ends, also after a failed
 * test. A child made by fork leaves it alone. */
void testing_temp_dir(char path_out[TESTING_PATH_BYTES]);

/* The same in memory where that can be (and TMPDIR does not say otherwise): for many cases whose
 * power cuts are made by hand, so that a real disk adds nothing but its syncs. */
void testing_ram_dir(char path_out[TESTING_PATH_BYTES]);

/* Prints the seed under a name and returns it. */
uint64_t testing_seed(const char *name, uint64_t seed);

struct testing_random {
    uint64_t state;
};

void testing_random_init(struct testing_random *random, uint64_t seed);
uint64_t testing_random_u64(struct testing_random *random);
uint64_t testing_random_below(struct testing_random *random, uint64_t end); /* [0, end) */
float testing_random_f32(struct testing_random *random);                    /* [-1, 1) */
float testing_random_normal(struct testing_random *random); /* mean 0 and deviation 1 */
void testing_random_bytes(struct testing_random *random, void *bytes, size_t count);

/* Fresh memory is filled with 0xA5 and released memory with 0x5A (of more than half a MiB, both
 * ends), so nothing reads either by luck.
 * A sweep: for (k = 1;; k++) { init; fail_at = k; run; live_count == 0; stop when !failed }. */
struct testing_alloc {
    struct kv_alloc alloc;  /* hand out &t.alloc */
    uint64_t fail_at;       /* the request that gets NULL, counted from 1; 0 is none */
    uint64_t request_count; /* requests so far */
    uint64_t failed_count;  /* requests refused so far */
    int64_t live_count;     /* got and not yet put */
    pthread_mutex_t lock;
};

void testing_alloc_init(struct testing_alloc *testing, uint64_t fail_at);

#endif
