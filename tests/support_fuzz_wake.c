/* tests/support_fuzz_wake.c - wakes over bytes that nobody has checked.
 *
 * Responsible for: the contract of support_fuzz_wake.h.
 * Not responsible for: choosing bytes.
 */
#include "tests/support_fuzz_wake.h"

#include "engine/record.h"
#include "restore/restore.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b) {
    (void)a;
    (void)b;
    return 1;
}

enum { EXTENTS_MAX = 64, PATCH_BYTES_MAX = 4096, EVERY = 256 };

static const char name[] = "planes";
static struct life life;
static struct store_extent extents[EXTENTS_MAX];
static uint32_t extent_count;
static int segment = -1;
static struct kv_digest resident;

static uint32_t keep_all(void *context, struct store_record *record) {
    (void)context;
    (void)record;
    return UINT32_MAX;
}

/* Everything is stored again without compression, so that bytes are what attention would read. */
static void store_raw(void) {
    struct store_walk walk = {0};
    struct store_record record;
    struct record_key keys[EXTENTS_MAX];
    size_t count = 0;
    while (store_next(life.store, &walk, &record, NULL) == KV_OK) {
        if (record.extent_count != 0 && count < EXTENTS_MAX) {
            memcpy(keys[count].bytes, record.key, record.key_bytes);
            keys[count++].size = record.key_bytes;
        }
        store_record_release(life.store, &record);
    }
    for (size_t i = 0; i < count; i++)
        life_rewrite(&life, &keys[i], keep_all, NULL);
}

static void list_extents(void) {
    struct store_walk walk = {0};
    struct store_record record;
    while (store_next(life.store, &walk, &record, NULL) == KV_OK) {
        for (uint32_t i = 0; i < record.extent_count && extent_count < EXTENTS_MAX; i++)
            if (record.extents[i].segment == 1)
                extents[extent_count++] = record.extents[i];
        store_record_release(life.store, &record);
    }
}

static enum kv_err try_wake(struct kv_diag *diag) {
    const struct restore_options options = {.skip_needles = 1};
    struct session *woken = NULL;
    struct receipt receipt;
    return restore_wake(&life.source, name, &options, &woken, &receipt, diag);
}

static void leave(void) {
    if (session_find(life.engine, name) != NULL)
        session_drop(session_find(life.engine, name));
    while (engine_apply(life.engine))
        ;
}

/* The golden sessions: nothing has to be computed before the first wake. */
static void begin(void) {
    static char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    struct kv_diag diag = {""};
    testing_temp_dir(dir);
    support_store_copy("tests/golden/v1/sessions", dir);
    struct life_options options = life_default(dir);
    options.model_layers = options.model_heads = 1;
    life_open(&options, &life);
    if (try_wake(&diag) != KV_OK) {
        fprintf(stderr, "%s\n", diag.text);
        abort();
    }
    resident = life_resident(session_find(life.engine, name));
    leave();
    store_raw();
    list_extents();
    snprintf(path, sizeof path, "%s/seg/00000001.seg", dir);
    segment = open(path, O_RDWR);
    if (segment < 0 || extent_count < 8)
        abort();
}

static void put_bytes(const void *bytes, size_t count, uint64_t off) {
    if (pwrite(segment, bytes, count, (off_t)off) != (ssize_t)count || fdatasync(segment) != 0)
        abort();
}

static int wake(const struct store_extent *over) {
    struct kv_diag diag = {""};
    enum kv_err err = try_wake(&diag);
    if (err != KV_OK && strstr(diag.text, name) == NULL)
        abort(); /* refused without its name */
    if (over != NULL && over->kind == LAYOUT_META && strstr(diag.text, "not finite") != NULL)
        abort(); /* a scale that is no number went as far as attention */
    if (err == KV_OK && over == NULL) {
        struct kv_digest now = life_resident(session_find(life.engine, name));
        if (memcmp(now.bytes, resident.bytes, sizeof now.bytes) != 0)
            abort(); /* something of an earlier attempt is left */
    }
    leave();
    return err == KV_OK;
}

int support_fuzz_wake(const uint8_t *bytes, size_t count) {
    static uint64_t calls;
    uint8_t before[PATCH_BYTES_MAX];
    if (segment < 0)
        begin();
    if (count < 5)
        return 0;
    const struct store_extent *extent = &extents[(bytes[0] | bytes[1] << 8) % extent_count];
    uint64_t place = (uint64_t)(bytes[2] | bytes[3] << 8) % extent->stored_bytes;
    size_t patch = count - 4 < sizeof before ? count - 4 : sizeof before;
    if (patch > extent->stored_bytes - place)
        patch = (size_t)(extent->stored_bytes - place);
    uint64_t off = extent->off + place;
    if (pread(segment, before, patch, (off_t)off) != (ssize_t)patch)
        abort();
    put_bytes(bytes + 4, patch, off);
    int woke = wake(extent);
    put_bytes(before, patch, off);
    if (calls++ % EVERY == 0 && !wake(NULL))
        abort(); /* the bytes are back, the session is not */
    return woke;
}
