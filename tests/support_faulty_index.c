/* tests/support_faulty_index.c - the index door that breaks on request.
 *
 * Responsible for: the contract of support_faulty_index.h.
 * Not responsible for: choosing n (the tests sweep it).
 */
#include "tests/support_faulty_index.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { OPEN_MAX_COUNT = 16, PATH_BYTES = 512 };

struct opened {
    struct index *index;
    int loose;
    char dir_path[PATH_BYTES], name[32];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static struct faulty_index_plan plan;
static struct faulty_index_watch watch;
static uint64_t calls, hits;
static struct opened opened[OPEN_MAX_COUNT];

enum kv_err __real_index_open(const struct index_options *options, struct index **out,
                              struct kv_diag *diag);
void __real_index_close(struct index *index);
enum kv_err __real_index_get(struct index *index, const void *key, size_t key_bytes,
                             struct index_copy *copy, struct kv_diag *diag);
enum kv_err __real_index_next(struct index *index, const struct index_range *range,
                              struct index_copy *copy, struct kv_diag *diag);
enum kv_err __real_index_state(struct index *index, struct fmt_state *out, struct kv_diag *diag);
enum kv_err __real_index_apply(struct index *index, const uint8_t *ops, size_t ops_bytes,
                               struct fmt_state *state, struct kv_diag *diag);
enum kv_err __real_index_sync(struct index *index, struct kv_diag *diag);

enum kv_err __wrap_index_open(const struct index_options *options, struct index **out,
                              struct kv_diag *diag);
void __wrap_index_close(struct index *index);
enum kv_err __wrap_index_get(struct index *index, const void *key, size_t key_bytes,
                             struct index_copy *copy, struct kv_diag *diag);
enum kv_err __wrap_index_next(struct index *index, const struct index_range *range,
                              struct index_copy *copy, struct kv_diag *diag);
enum kv_err __wrap_index_state(struct index *index, struct fmt_state *out, struct kv_diag *diag);
enum kv_err __wrap_index_apply(struct index *index, const uint8_t *ops, size_t ops_bytes,
                               struct fmt_state *state, struct kv_diag *diag);
enum kv_err __wrap_index_sync(struct index *index, struct kv_diag *diag);

void faulty_index_arm(const struct faulty_index_plan *wanted) {
    pthread_mutex_lock(&lock);
    plan = *wanted;
    calls = hits = 0;
    pthread_mutex_unlock(&lock);
}

uint64_t faulty_index_hits(void) {
    pthread_mutex_lock(&lock);
    uint64_t count = hits;
    pthread_mutex_unlock(&lock);
    return count;
}

void faulty_index_attach(const struct faulty_index_watch *wanted) {
    pthread_mutex_lock(&lock);
    watch = wanted != NULL ? *wanted : (struct faulty_index_watch){0};
    pthread_mutex_unlock(&lock);
}

/* What the call gets: KV_OK when it may pass. */
static enum kv_err strike(int change, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    pthread_mutex_lock(&lock);
    int dead = watch.is_dead != NULL && watch.is_dead(watch.context);
    if (dead)
        err = KV_ERR_IO;
    if (!dead && (change || !plan.only_changes) && ++calls == plan.at) {
        hits++;
        err = plan.err;
    }
    pthread_mutex_unlock(&lock);
    return err == KV_OK ? KV_OK : kv_diag_set(diag, err, "index: %s", dead ? "no power" : "struck");
}

static struct opened *find(struct index *index) {
    for (int i = 0; i < OPEN_MAX_COUNT; i++)
        if (opened[i].index == index)
            return &opened[i];
    return NULL;
}

static void tell(struct index *index, int synced) {
    pthread_mutex_lock(&lock);
    struct opened *entry = find(index);
    if (entry != NULL && synced)
        entry->loose = 0;
    if (entry != NULL && !entry->loose && watch.committed != NULL)
        watch.committed(watch.context, entry->dir_path, entry->name);
    pthread_mutex_unlock(&lock);
}

enum kv_err __wrap_index_open(const struct index_options *options, struct index **out,
                              struct kv_diag *diag) {
    enum kv_err err = strike(0, diag);
    if (err == KV_OK)
        err = __real_index_open(options, out, diag);
    if (err != KV_OK)
        return err;
    pthread_mutex_lock(&lock);
    struct opened *entry = find(NULL);
    if (entry != NULL) {
        entry->index = *out;
        entry->loose = options->mode == INDEX_CREATE;
        snprintf(entry->dir_path, sizeof entry->dir_path, "%s", options->dir_path);
        snprintf(entry->name, sizeof entry->name, "%s", options->name);
    }
    pthread_mutex_unlock(&lock);
    return KV_OK;
}

void __wrap_index_close(struct index *index) {
    pthread_mutex_lock(&lock);
    struct opened *entry = index != NULL ? find(index) : NULL;
    if (entry != NULL)
        memset(entry, 0, sizeof *entry);
    pthread_mutex_unlock(&lock);
    __real_index_close(index);
}

enum kv_err __wrap_index_get(struct index *index, const void *key, size_t key_bytes,
                             struct index_copy *copy, struct kv_diag *diag) {
    enum kv_err err = strike(0, diag);
    return err != KV_OK ? err : __real_index_get(index, key, key_bytes, copy, diag);
}

enum kv_err __wrap_index_next(struct index *index, const struct index_range *range,
                              struct index_copy *copy, struct kv_diag *diag) {
    enum kv_err err = strike(0, diag);
    return err != KV_OK ? err : __real_index_next(index, range, copy, diag);
}

enum kv_err __wrap_index_state(struct index *index, struct fmt_state *out, struct kv_diag *diag) {
    enum kv_err err = strike(0, diag);
    return err != KV_OK ? err : __real_index_state(index, out, diag);
}

enum kv_err __wrap_index_apply(struct index *index, const uint8_t *ops, size_t ops_bytes,
                               struct fmt_state *state, struct kv_diag *diag) {
    enum kv_err struck = strike(1, diag);
    if (struck != KV_OK && !(plan.after_effect && calls == plan.at))
        return struck;
    struct fmt_state before = *state;
    enum kv_err err = __real_index_apply(index, ops, ops_bytes, state, diag);
    if (err == KV_OK)
        tell(index, 0);
    if (struck != KV_OK)
        *state = before;
    return struck != KV_OK ? struck : err;
}

enum kv_err __wrap_index_sync(struct index *index, struct kv_diag *diag) {
    enum kv_err err = strike(1, diag);
    if (err == KV_OK)
        err = __real_index_sync(index, diag);
    if (err == KV_OK)
        tell(index, 1);
    return err;
}
