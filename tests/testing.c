/* tests/testing.c - the runner and small doors that every test program shares.
 *
 * Responsible for: counting, closing line, folders removed at exit, seeds, the failing allocator.
 * Not responsible for: assertions (cmocka) or adding up programs (tools/run_tests.sh).
 */
#include "tests/testing.h"

#include <assert.h>
#include <fnmatch.h>
#include <ftw.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEMP_DIRS_MAX = 1024, TESTS_MAX = 256 };

static struct {
    size_t skipped_count;
    size_t dir_count;
    pid_t owner;
    char dirs[TEMP_DIRS_MAX][TESTING_PATH_BYTES];
} state;

int testing_run(int argc, char **argv, const struct CMUnitTest *tests, size_t count) {
    struct CMUnitTest chosen[TESTS_MAX];
    size_t chosen_count = 0;
    assert(count <= TESTS_MAX);
    for (size_t i = 0; i < count; i++) {
        if (argc < 2 || fnmatch(argv[1], tests[i].name, 0) == 0)
            chosen[chosen_count++] = tests[i];
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    state.skipped_count = 0;
    const char *slash = strrchr(argv[0], '/');
    int result = _cmocka_run_group_tests(slash == NULL ? argv[0] : slash + 1, chosen, chosen_count,
                                         NULL, NULL);
    size_t failed = result < 0 ? chosen_count : (size_t)result;
    /* A skip in a set-up fails its test as well: skips belong into tests. */
    size_t others = failed + state.skipped_count;
    size_t passed = others < chosen_count ? chosen_count - others : 0;
    if (state.skipped_count != 0)
        printf("%zu skipped\n", state.skipped_count);
    printf("%zu passed, %zu failed\n", passed, failed);
    fflush(stdout);
    if (failed != 0 || chosen_count == 0)
        return 1;
    return passed == 0 ? 77 : 0;
}

_Noreturn void testing_skip(const char *reason) {
    state.skipped_count++;
    printf("skipped: %s\n", reason);
    skip();
    abort();
}

int testing_quick(void) {
    const char *value = getenv("QUICK");
    return value != NULL && strcmp(value, "") != 0 && strcmp(value, "0") != 0;
}

const char *testing_model_path(void) {
    static char path[4096];
    const char *model = getenv("MODEL");
    const char *own = getenv("COLDPLANE_HOME");
    const char *home = getenv("HOME");
    if (model != NULL && model[0] != 0)
        snprintf(path, sizeof path, "%s", model);
    else
        snprintf(path, sizeof path, "%s%s/models/SmolLM2-135M-Instruct.Q4_1.gguf",
                 own != NULL ? own : (home != NULL ? home : ""), own != NULL ? "" : "/.coldplane");
    return access(path, R_OK) == 0 ? path : NULL;
}

const char *testing_need_model(void) {
    const char *path = testing_model_path();
    if (path == NULL)
        testing_skip("the model is not here; tools/setup.sh --model fetches it");
    return path;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

static void remove_dirs(void) {
    if (getpid() != state.owner)
        return;
    for (size_t i = 0; i < state.dir_count; i++)
        nftw(state.dirs[i], remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void make_dir(const char *base, char path_out[TESTING_PATH_BYTES]) {
    assert(state.dir_count < TEMP_DIRS_MAX);
    int used = snprintf(path_out, TESTING_PATH_BYTES, "%s/coldplane-test-XXXXXX", base);
    if (used < 0 || used >= TESTING_PATH_BYTES || mkdtemp(path_out) == NULL) {
        perror(path_out);
        fail();
    }
    if (state.dir_count == 0) {
        state.owner = getpid();
        atexit(remove_dirs);
    }
    memcpy(state.dirs[state.dir_count++], path_out, TESTING_PATH_BYTES);
}

void testing_temp_dir(char path_out[TESTING_PATH_BYTES]) {
    const char *base = getenv("TMPDIR");
    make_dir(base != NULL ? base : "/tmp", path_out);
}

void testing_ram_dir(char path_out[TESTING_PATH_BYTES]) {
    if (getenv("TMPDIR") == NULL && access("/dev/shm", W_OK) == 0)
        make_dir("/dev/shm", path_out);
    else
        testing_temp_dir(path_out);
}

uint64_t testing_seed(const char *name, uint64_t seed) {
    printf("seed %s %#llx\n", name, (unsigned long long)seed);
    return seed;
}

void testing_random_init(struct testing_random *random, uint64_t seed) {
    random->state = seed;
}

uint64_t testing_random_u64(struct testing_random *random) {
    /* splitmix64: every seed is a good one and the period is 2^64. */
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint64_t testing_random_below(struct testing_random *random, uint64_t end) {
    assert(end != 0);
    return (uint64_t)((unsigned __int128)testing_random_u64(random) * end >> 64);
}

float testing_random_f32(struct testing_random *random) {
    return (float)((int64_t)(testing_random_u64(random) >> 40) - (1 << 23)) / (float)(1 << 23);
}

float testing_random_normal(struct testing_random *random) {
    double radius = 1.0 - (double)(testing_random_u64(random) >> 11) * 0x1p-53; /* never 0 */
    double angle = (double)(testing_random_u64(random) >> 11) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(radius)) * cos(6.283185307179586 * angle));
}

void testing_random_bytes(struct testing_random *random, void *bytes, size_t count) {
    uint8_t *at = bytes;
    for (size_t i = 0; i < count; i++)
        at[i] = (uint8_t)(testing_random_u64(random) >> 56);
}

/* Of a large buffer both ends: whoever reads what was never written begins at one of them. */
static void fill(void *memory, int byte) {
    const size_t end = 256 << 10;
    size_t size = malloc_usable_size(memory);
    memset(memory, byte, size < 2 * end ? size : end);
    if (size >= 2 * end)
        memset((uint8_t *)memory + size - end, byte, end);
}

static void *testing_get(void *context, size_t bytes, size_t align_bytes) {
    struct testing_alloc *testing = context;
    void *memory = NULL;
    pthread_mutex_lock(&testing->lock);
    testing->request_count++;
    if (testing->request_count == testing->fail_at) {
        testing->failed_count++;
    } else {
        memory = kv_alloc_aligned(kv_alloc_system(), bytes, align_bytes);
        assert(memory != NULL);
        fill(memory, 0xa5);
        testing->live_count++;
    }
    pthread_mutex_unlock(&testing->lock);
    return memory;
}

static void testing_put(void *context, void *memory) {
    struct testing_alloc *testing = context;
    pthread_mutex_lock(&testing->lock);
    testing->live_count--;
    pthread_mutex_unlock(&testing->lock);
    fill(memory, 0x5a);
    kv_alloc_release(kv_alloc_system(), memory);
}

void testing_alloc_init(struct testing_alloc *testing, uint64_t fail_at) {
    *testing =
        (struct testing_alloc){.alloc = {testing_get, testing_put, testing}, .fail_at = fail_at};
    pthread_mutex_init(&testing->lock, NULL);
}
