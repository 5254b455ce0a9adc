/* tests/test_export.c - one session as one file, and what is refused of such a file.
 *
 * Responsible for: round trips into stores with other settings, bit for bit; cuts, damage, numbers
 * that nobody writes, foreign models; that nothing is visible and nothing stays after a refusal.
 * Not responsible for: the commands (test_cli_move.c), random bytes (fuzz_export.c).
 * Broken twins: BREAK_EXPORT_CHAIN, BREAK_EXPORT_DIGEST, BREAK_EXPORT_IDS, BREAK_EXPORT_TAIL,
 * BREAK_IMPORT_EARLY, BREAK_IMPORT_EXISTS, BREAK_IMPORT_STAGED.
 */
#include "engine/export.h"
#include "snapshot/snap_gc.h"
#include "snapshot/snap_import.h"
#include "snapshot/snap_lower.h"
#include "snapshot/snap_tree.h"
#include "store/base/bytes.h"
#include "store/io.h"
#include "tests/support_disk.h"
#include "tests/support_fuzz.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct bytes {
    uint8_t *at;
    size_t count, capacity;
};

static enum kv_err put_bytes(void *context, const void *bytes, size_t count, struct kv_diag *diag) {
    struct bytes *out = context;
    (void)diag;
    if (out->count + count > out->capacity) {
        out->capacity = 2 * (out->count + count);
        out->at = realloc(out->at, out->capacity);
        assert_non_null(out->at);
    }
    memcpy(out->at + out->count, bytes, count);
    out->count += count;
    return KV_OK;
}

struct source {
    const uint8_t *at;
    size_t count;
    int file; /* with at NULL */
};

static enum kv_err get_bytes(void *context, void *bytes, size_t count, size_t *got_out,
                             struct kv_diag *diag) {
    struct source *source = context;
    (void)diag;
    *got_out = 0;
    while (source->at == NULL && *got_out < count) {
        ssize_t got = read(source->file, (char *)bytes + *got_out, count - *got_out);
        if (got <= 0)
            break;
        *got_out += (size_t)got;
    }
    if (source->at == NULL)
        return KV_OK;
    *got_out = count < source->count ? count : source->count;
    if (*got_out != 0)
        memcpy(bytes, source->at, *got_out);
    source->at += *got_out;
    source->count -= *got_out;
    return KV_OK;
}

static struct bytes export_of(struct life *life, const char *name) {
    struct bytes out = {0};
    struct restore_exported exported;
    struct kv_diag diag = {""};
    const struct restore_export_args args = {.store = life->store,
                                             .alloc = kv_alloc_system(),
                                             .name = name,
                                             .put = put_bytes,
                                             .context = &out};
    if (restore_export(&args, &exported, &diag) != KV_OK)
        fail_msg("export: %s", diag.text);
    assert_int_equal(exported.bytes, out.count);
    return out;
}

struct importing {
    const char *name;
    const struct kv_alloc *alloc; /* NULL: the system's */
    int any_model;
};

static enum kv_err import_into(struct life *life, const struct bytes *file,
                               const struct importing *how, struct snap_import_result *result_out,
                               struct kv_diag *diag) {
    struct engine_model model;
    struct source source = {file->at, file->count, -1};
    engine_model(life->engine, &model);
    struct snap_import_args args = {
        .store = life->store,
        .clock = kv_clock_system(),
        .name = how->name,
        .batch_bytes = 300000, /* two blocks */
        .take = {.alloc = how->alloc != NULL ? how->alloc : kv_alloc_system(),
                 .get = get_bytes,
                 .get_context = &source}};
    if (!how->any_model) {
        args.take.here = &model.identity;
        args.take.vocab_count = model.vocab_count;
    }
    return snap_import(&args, result_out, diag);
}

static void import_good(struct life *life, const struct bytes *file, const char *name) {
    const struct importing how = {.name = name};
    struct snap_import_result result;
    struct kv_diag diag = {""};
    if (import_into(life, file, &how, &result, &diag) != KV_OK)
        fail_msg("import: %s", diag.text);
    assert_string_equal(result.name, name);
    assert_int_equal(result.file_bytes, file->count);
}

static uint64_t records(struct store *store) {
    struct store_stats stats;
    store_stats_get(store, &stats);
    return stats.records;
}

/* Nothing of the attempt is left, not even where no name leads. */
static void refused(struct life *life, const struct bytes *file, enum kv_err expected,
                    const char *word) {
    const struct importing how = {.name = "other"};
    struct snap_import_result result;
    struct kv_diag diag = {""};
    uint64_t before = records(life->store);
    enum kv_err err = import_into(life, file, &how, &result, &diag);
    if (err != expected || strstr(diag.text, word) == NULL)
        fail_msg("%s: %s, wanted %s with '%s'", kv_err_name(err), diag.text, kv_err_name(expected),
                 word);
    assert_int_equal(records(life->store), before);
    struct snapshot_entry entry;
    assert_int_equal(snapshot_find(life->store, kv_alloc_system(), "other", &entry, NULL),
                     KV_ERR_NOT_FOUND);
}

/* --- round trips */

struct fixture {
    char dir[TESTING_PATH_BYTES], other_dir[TESTING_PATH_BYTES];
    struct life life, other;
    struct bytes file;
    struct kv_digest resident;
};

static void open_other(struct fixture *f, const struct io_door *door, uint64_t seed) {
    struct life_options options;
    testing_temp_dir(f->other_dir);
    options = life_default(f->other_dir);
    options.door = door;
    options.model_seed = seed;
    life_open(&options, &f->other);
}

static void make_file(struct fixture *f, enum image_recipe recipe, uint32_t tokens) {
    testing_temp_dir(f->dir);
    struct life_options options = life_default(f->dir);
    life_open(&options, &f->life);
    struct session *session = life_session(&f->life, "chat", recipe);
    life_say(session, 1, tokens, 3, NULL);
    f->resident = life_resident(session);
    life_save(&f->life, session, 1);
    f->file = export_of(&f->life, "chat");
}

static void close_fixture(struct fixture *f) {
    free(f->file.at);
    if (f->other.store != NULL)
        life_close(&f->other);
    life_close(&f->life);
}

/* The other store has the POSIX door; both go on with the same turn. */
static void round_trip(enum image_recipe recipe, uint32_t tokens) {
    struct fixture f = {0};
    struct life_turn here, there;
    struct receipt receipt;
    make_file(&f, recipe, tokens);
    open_other(&f, io_posix_door(), 1);
    import_good(&f.other, &f.file, "моё");
    struct restore_check check;
    struct kv_diag diag = {""};
    assert_int_equal(restore_verify(f.other.store, kv_alloc_system(), "моё", &check, &diag), KV_OK);
    struct session *woken = life_wake(&f.other, "моё", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    assert_int_equal(receipt.tokens_prefilled, 0);
    struct kv_digest resident = life_resident(woken);
    assert_memory_equal(&resident, &f.resident, sizeof resident);
    life_say(session_find(f.life.engine, "chat"), 9, 300, 8, &here);
    life_say(woken, 9, 300, 8, &there);
    life_same_turn(&here, &there);
    /* It is a session like any other: saved, asleep, awake. */
    life_sleep(&f.other, woken);
    life_wake(&f.other, "моё", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    close_fixture(&f);
}

static void every_kind_of_session_comes_back(void **state) {
    (void)state;
    round_trip(IMAGE_RECIPE_V3, 64 + 256 * 7 + 30);
    round_trip(IMAGE_RECIPE_BF16, 64 + 256 * 3 + 70);
    round_trip(IMAGE_RECIPE_FP8, 64 + 256 * 3 + 70);
    round_trip(IMAGE_RECIPE_V1, 64 + 256 * 3 + 70);
    round_trip(IMAGE_RECIPE_V3, 5);
    round_trip(IMAGE_RECIPE_V3, 64 + 300);
}

/* Buffered files, other segments; then out of there and back under another name: equal files but
 * for what names the store. */
static void a_store_with_other_settings_takes_it(void **state) {
    (void)state;
    struct fixture f = {0};
    char dir[TESTING_PATH_BYTES + 8];
    struct store *store = NULL;
    struct kv_diag diag = {""};
    struct snap_import_result result;
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 4 + 30);
    testing_temp_dir(f.other_dir);
    snprintf(dir, sizeof dir, "%s/s", f.other_dir);
    struct store_options options = store_options_usual(dir, "test");
    options.door = io_posix_door();
    options.direct_wanted = 0;
    options.segment_bytes = 1 << 20;
    assert_int_equal(store_open(&options, &store, &diag), KV_OK);
    struct source source = {f.file.at, f.file.count, -1};
    const struct snap_import_args args = {
        .store = store,
        .clock = kv_clock_system(),
        .batch_bytes = SNAP_IMPORT_BATCH_BYTES,
        .take = {.alloc = kv_alloc_system(), .get = get_bytes, .get_context = &source}};
    assert_int_equal(snap_import(&args, &result, &diag), KV_OK);
    assert_string_equal(result.name, "chat");
    struct life there = {.store = store};
    struct bytes again = export_of(&there, "chat");
    assert_int_equal(again.count, f.file.count);
    store_close(store);
    import_good(&f.life, &again, "back");
    struct receipt receipt;
    struct session *woken = life_wake(&f.life, "back", &receipt);
    struct kv_digest resident = life_resident(woken);
    assert_memory_equal(&resident, &f.resident, sizeof resident);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    free(again.at);
    close_fixture(&f);
}

/* A fork owns a few blocks and reads the others from its parent: all go into the file. */
static void a_fork_takes_along_what_it_shares(void **state) {
    (void)state;
    struct fixture f = {0};
    struct receipt receipt;
    struct kv_diag diag = {""};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 4 + 30);
    const struct snap_tree tree = {f.life.store, kv_alloc_system(), kv_clock_system(), NULL};
    const struct snap_tree_place place = {"chat", NULL};
    if (snap_tree_fork(&tree, &place, "kid", &diag) != KV_OK)
        fail_msg("fork: %s", diag.text);
    struct session *kid = life_wake(&f.life, "kid", &receipt);
    life_say(kid, 4, 600, 3, NULL);
    f.resident = life_resident(kid);
    life_sleep(&f.life, kid);
    free(f.file.at);
    f.file = export_of(&f.life, "kid");
    open_other(&f, NULL, 1);
    import_good(&f.other, &f.file, "kid");
    kid = life_wake(&f.other, "kid", &receipt);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    struct kv_digest resident = life_resident(kid);
    assert_memory_equal(&resident, &f.resident, sizeof resident);
    close_fixture(&f);
}

/* Planes that a session has given up are neither there nor missed. */
static void a_degraded_session_goes_as_it_is(void **state) {
    (void)state;
    struct fixture f = {0};
    struct receipt receipt;
    struct snap_lower_sum sum;
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 7 + 30);
    struct session *session = session_find(f.life.engine, "chat");
    life_sleep(&f.life, session);
    struct record_snapshot head = life_head(&f.life, "chat", NULL);
    const struct snap_lower_args args = {.store = f.life.store,
                                         .alloc = kv_alloc_system(),
                                         .lineage = head.lineage,
                                         .blocks = head.block_count,
                                         .streams = 1u << LAYOUT_KL | 1u << LAYOUT_VR2};
    assert_int_equal(snap_lower_lineage(&args, &sum, NULL), KV_OK);
    uint64_t whole = f.file.count;
    free(f.file.at);
    f.file = export_of(&f.life, "chat");
    assert_true(f.file.count < whole * 9 / 10);
    struct kv_digest resident = life_resident(life_wake(&f.life, "chat", &receipt));
    uint32_t degraded = receipt.degraded_blocks;
    open_other(&f, NULL, 1);
    import_good(&f.other, &f.file, "chat");
    struct kv_digest found = life_resident(life_wake(&f.other, "chat", &receipt));
    assert_memory_equal(&resident, &found, sizeof resident);
    assert_int_equal(receipt.degraded_blocks, degraded);
    assert_true(degraded > 0 && receipt.fingerprint_floor);
    assert_int_equal(receipt.fingerprint, RECEIPT_BITS_EQUAL);
    close_fixture(&f);
}

/* --- what is refused */

/* The head of frame `number` of a kind. */
static size_t frame_at(const struct bytes *file, const char *tag, uint32_t number) {
    size_t at = EXPORT_START_BYTES;
    while (at + EXPORT_FRAME_BYTES <= file->count) {
        if (memcmp(file->at + at, tag, 4) == 0 && number-- == 0)
            return at;
        at += EXPORT_FRAME_BYTES + (size_t)kv_get_u64(file->at + at + 8);
    }
    fail_msg("no frame %s", tag);
    return 0;
}

/* Fails with BREAK_EXPORT_TAIL, BREAK_IMPORT_STAGED. */
static void a_cut_file_leaves_nothing(void **state) {
    (void)state;
    struct fixture f = {0};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 3 + 30);
    open_other(&f, NULL, 1);
    size_t step = testing_quick() ? 65536 : 16384;
    for (size_t count = 0; count < f.file.count; count += step) {
        const struct bytes cut = {f.file.at, count, 0};
        refused(&f.other, &cut, KV_ERR_CORRUPT, "cut");
    }
    for (size_t at = EXPORT_START_BYTES; at < f.file.count;) {
        const struct bytes cut = {f.file.at, at, 0};
        refused(&f.other, &cut, KV_ERR_CORRUPT, "cut");
        at += EXPORT_FRAME_BYTES + (size_t)kv_get_u64(f.file.at + at + 8);
    }
    uint8_t *longer = malloc(f.file.count + 1);
    assert_non_null(longer);
    memcpy(longer, f.file.at, f.file.count);
    longer[f.file.count] = 0;
    const struct bytes more = {longer, f.file.count + 1, 0};
    refused(&f.other, &more, KV_ERR_CORRUPT, "behind its end");
    free(longer);
    import_good(&f.other, &f.file, "other");
    close_fixture(&f);
}

/* Fails with BREAK_EXPORT_DIGEST. */
static void any_changed_byte_is_found(void **state) {
    (void)state;
    struct fixture f = {0};
    struct testing_random random;
    uint32_t places = testing_quick() ? 40 : 300;
    testing_random_init(&random, testing_seed("places", 5));
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 3 + 30);
    open_other(&f, NULL, 1);
    for (uint32_t i = 0; i < places; i++) {
        /* Every byte of the first heads, then anywhere. */
        size_t at = i < 64 ? i : (size_t)testing_random_below(&random, f.file.count);
        uint8_t bit = (uint8_t)(1u << testing_random_below(&random, 8));
        f.file.at[at] ^= bit;
        refused(&f.other, &f.file, KV_ERR_CORRUPT, "");
        f.file.at[at] ^= bit;
    }
    close_fixture(&f);
}

/* Frames that are all sound, in another order or from another file.
 * Fails with BREAK_EXPORT_CHAIN. */
static void frames_cannot_be_moved(void **state) {
    (void)state;
    struct fixture f = {0};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 3 + 30);
    open_other(&f, NULL, 1);
    size_t first = frame_at(&f.file, "EXTN", 3), second = frame_at(&f.file, "EXTN", 4);
    size_t size = second - first;
    assert_int_equal(kv_get_u64(f.file.at + first + 8), kv_get_u64(f.file.at + second + 8));
    uint8_t *keep = malloc(2 * size);
    assert_non_null(keep);
    memcpy(keep, f.file.at + first, 2 * size);
    memcpy(f.file.at + first, keep + size, size);
    memcpy(f.file.at + second, keep, size);
    refused(&f.other, &f.file, KV_ERR_CORRUPT, "does not follow");
    memcpy(f.file.at + first, keep, 2 * size);
    free(keep);
    close_fixture(&f);
}

/* A writer with a bug: digests and checks are right, the numbers are not. */
static void changed_and_mended(struct fixture *f, size_t at, uint32_t value, enum kv_err expected,
                               const char *word) {
    struct bytes copy = {malloc(f->file.count), f->file.count, 0};
    assert_non_null(copy.at);
    memcpy(copy.at, f->file.at, copy.count);
    kv_put_u32(copy.at + at, value);
    support_fuzz_mend_export(copy.at, copy.count);
    refused(&f->other, &copy, expected, word);
    free(copy.at);
}

/* Fails with BREAK_EXPORT_IDS. */
static void impossible_numbers_are_named(void **state) {
    (void)state;
    struct fixture f = {0};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 3 + 30);
    open_other(&f, NULL, 1);
    enum { HEAD = EXPORT_FRAME_BYTES };
    size_t ids = frame_at(&f.file, "EXTN", 0), meta = frame_at(&f.file, "EXTN", 1);
    size_t block = frame_at(&f.file, "BLCK", 1), page = frame_at(&f.file, "PAGE", 2);
    size_t done = frame_at(&f.file, "DONE", 0);
    changed_and_mended(&f, 8, 2, KV_ERR_VERSION, "needs version 2");
    changed_and_mended(&f, 0, 0, KV_ERR_CORRUPT, "not an export");
    changed_and_mended(&f, ids + HEAD + 8, 0x7fffffff, KV_ERR_CORRUPT, "vocabulary");
    changed_and_mended(&f, meta + HEAD + 40, 0x3c007c00, KV_ERR_CORRUPT, "not a positive number");
    changed_and_mended(&f, meta + HEAD + 40, 0x3c000001, KV_ERR_CORRUPT, "not a positive number");
    changed_and_mended(&f, meta + 4, LAYOUT_VX, KV_ERR_CORRUPT, "extent 1");
    changed_and_mended(&f, page + HEAD + 4, 0x7f800000, KV_ERR_CORRUPT, "digest is not the image");
    changed_and_mended(&f, block + 4, 2, KV_ERR_CORRUPT, "another block");
    changed_and_mended(&f, block + HEAD, 3, KV_ERR_CORRUPT, "block 1");
    changed_and_mended(&f, block + HEAD, 0x40000000, KV_ERR_CORRUPT, "extents");
    changed_and_mended(&f, done + HEAD, 3, KV_ERR_CORRUPT, "counts");
    changed_and_mended(&f, done + HEAD + 16, 2, KV_ERR_CORRUPT, "counts");
    close_fixture(&f);
}

static void another_model_is_refused_by_name(void **state) {
    (void)state;
    struct fixture f = {0};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 + 30);
    open_other(&f, NULL, 2);
    refused(&f.other, &f.file, KV_ERR_MISMATCH, "weights");
    const struct importing any = {.name = "any", .any_model = 1};
    struct snap_import_result result;
    struct kv_diag diag = {""};
    assert_int_equal(import_into(&f.other, &f.file, &any, &result, &diag), KV_OK);
    life_refuse(&f.other, "any", KV_ERR_MISMATCH, &diag);
    close_fixture(&f);
}

/* Fails with BREAK_IMPORT_EXISTS. */
static void a_taken_name_is_refused(void **state) {
    (void)state;
    struct fixture f = {0};
    struct snap_import_result result;
    struct kv_diag diag = {""};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 + 30);
    uint64_t before = records(f.life.store);
    const struct importing own = {.name = NULL};
    assert_int_equal(import_into(&f.life, &f.file, &own, &result, &diag), KV_ERR_EXISTS);
    assert_non_null(strstr(diag.text, "chat"));
    const struct importing bad = {.name = "a/b"};
    assert_int_equal(import_into(&f.life, &f.file, &bad, &result, &diag), KV_ERR_INVALID);
    assert_int_equal(records(f.life.store), before);
    close_fixture(&f);
}

static void no_memory_leaves_nothing(void **state) {
    (void)state;
    struct fixture f = {0};
    uint64_t refusals = 0;
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 2 + 30);
    open_other(&f, NULL, 1);
    uint64_t before = records(f.other.store);
    for (uint64_t k = 1;; k++) {
        struct testing_alloc testing;
        struct snap_import_result result;
        struct kv_diag diag = {""};
        testing_alloc_init(&testing, k);
        const struct importing how = {.name = "other", .alloc = &testing.alloc};
        enum kv_err err = import_into(&f.other, &f.file, &how, &result, &diag);
        assert_int_equal(testing.live_count, 0);
        if (testing.failed_count == 0) {
            assert_int_equal(err, KV_OK);
            break;
        }
        assert_int_equal(err, KV_ERR_NOMEM);
        assert_int_equal(records(f.other.store), before);
        refusals++;
    }
    assert_true(refusals >= 5);
    close_fixture(&f);
}

/* --- killed in the middle */

/* A process of its own reads the file from a pipe that ends it after so many bytes. */
static void killed_after(struct fixture *f, size_t count) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct store *store = NULL;
        struct source source = {NULL, 0, ends[0]};
        struct snap_import_result result;
        struct store_options options = store_options_usual(f->other_dir, "child");
        options.segment_bytes = 1 << 20;
        close(ends[1]);
        const struct snap_import_args args = {
            .name = "other",
            .batch_bytes = 1,
            .take = {.alloc = kv_alloc_system(), .get = get_bytes, .get_context = &source}};
        struct snap_import_args with_store = args;
        if (store_open(&options, &store, NULL) != KV_OK)
            _exit(1);
        with_store.store = store;
        _exit(snap_import(&with_store, &result, NULL) == KV_OK ? 2 : 3);
    }
    close(ends[0]);
    for (size_t at = 0; at < count;) {
        ssize_t wrote = write(ends[1], f->file.at + at, count - at);
        assert_true(wrote > 0);
        at += (size_t)wrote;
    }
    /* The pipe holds what is not read yet, so the child has taken all but its last 64 KiB. */
    kill(child, SIGKILL);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    close(ends[1]);
}

static int count_name(void *context, const struct snapshot_entry *entry) {
    (void)entry;
    ++*(uint32_t *)context;
    return 1;
}

static void a_kill_leaves_nothing_visible(void **state) {
    (void)state;
    struct fixture f = {0};
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 7 + 30);
    testing_temp_dir(f.other_dir);
    uint32_t kills = testing_quick() ? 3 : 12;
    for (uint32_t i = 0; i < kills; i++) {
        struct life_options options = life_default(f.other_dir);
        uint32_t names = 0;
        killed_after(&f, f.file.count / kills * (i + 1) - 1);
        life_open(&options, &f.other);
        assert_int_equal(snapshot_list(f.other.store, kv_alloc_system(), count_name, &names, NULL),
                         KV_OK);
        assert_int_equal(names, 0);
        assert_int_equal(records(f.other.store), 0);
        life_close(&f.other);
    }
    close_fixture(&f);
}

/* --- power cuts */

/* What a cut leaves: all of the session or nothing of it, and nothing that stays for ever. Returns
 * whether it is there. */
static int whole_or_nothing(const char *dir, uint64_t n, uint64_t cut) {
    struct store *store = NULL;
    struct snapshot_entry entry;
    struct restore_check check;
    struct kv_diag diag = {""};
    struct store_options options = store_options_usual(dir, "test");
    options.segment_bytes = 1 << 20;
    if (store_open(&options, &store, &diag) != KV_OK)
        fail_msg("cut %llu: %s", (unsigned long long)cut, diag.text);
    enum kv_err err = snapshot_find(store, kv_alloc_system(), "other", &entry, &diag);
    if (err == KV_OK) {
        assert_int_equal(entry.head.n, n);
        err = restore_verify(store, kv_alloc_system(), "other", &check, &diag);
        if (err != KV_OK)
            fail_msg("cut %llu: %s", (unsigned long long)cut, diag.text);
    } else {
        if (err != KV_ERR_NOT_FOUND)
            fail_msg("cut %llu: %s", (unsigned long long)cut, diag.text);
        assert_int_equal(snap_gc_unsaved(store, kv_alloc_system(), &diag), KV_OK);
        assert_int_equal(records(store), 0);
    }
    store_close(store);
    return err == KV_OK;
}

/* Fails with BREAK_IMPORT_EARLY. */
static void a_power_cut_leaves_all_or_nothing(void **state) {
    (void)state;
    struct fixture f = {0};
    char root[TESTING_PATH_BYTES + 8], copy[TESTING_PATH_BYTES + 32];
    struct store *store = NULL;
    struct snap_import_result result;
    struct kv_diag diag = {""};
    uint32_t whole = 0, cuts = 0;
    make_file(&f, IMAGE_RECIPE_V3, 64 + 256 * 3 + 30);
    testing_temp_dir(f.other_dir);
    snprintf(root, sizeof root, "%s/s", f.other_dir);
    struct disk *disk = disk_make(io_posix_door(), root);
    struct store_options options = store_options_usual(root, "test");
    options.door = disk_door(disk);
    options.segment_bytes = 1 << 20;
    assert_int_equal(store_open(&options, &store, &diag), KV_OK);
    uint64_t first = disk_entries(disk);
    struct source source = {f.file.at, f.file.count, -1};
    const struct snap_import_args args = {
        .store = store,
        .clock = kv_clock_system(),
        .name = "other",
        .batch_bytes = 1,
        .take = {.alloc = kv_alloc_system(), .get = get_bytes, .get_context = &source}};
    assert_int_equal(snap_import(&args, &result, &diag), KV_OK);
    uint64_t acknowledged = disk_entries(disk);
    for (uint64_t cut = first; cut <= acknowledged; cut++)
        for (uint32_t k = 0; k < 3; k++) {
            static const struct disk_policy policies[] = {
                {.unsynced = DISK_LOST},
                {.unsynced = DISK_KEPT},
                {.unsynced = DISK_RANDOM, .seed = 11, .grain_bytes = 4096}};
            snprintf(copy, sizeof copy, "%s/%llu-%u", f.other_dir, (unsigned long long)cut, k);
            disk_build(disk, cut, &policies[k], copy);
            int there = whole_or_nothing(copy, result.n, cut);
            assert_true(there || cut < acknowledged);
            whole += there != 0;
            cuts++;
        }
    printf("%u cuts, the session was there after %u\n", cuts, whole);
    assert_true(whole >= 3 && whole < cuts / 2);
    store_close(store);
    disk_drop(disk);
    close_fixture(&f);
}

TESTING_MAIN(cmocka_unit_test(a_power_cut_leaves_all_or_nothing),
             cmocka_unit_test(every_kind_of_session_comes_back),
             cmocka_unit_test(a_store_with_other_settings_takes_it),
             cmocka_unit_test(a_fork_takes_along_what_it_shares),
             cmocka_unit_test(a_degraded_session_goes_as_it_is),
             cmocka_unit_test(a_cut_file_leaves_nothing),
             cmocka_unit_test(any_changed_byte_is_found), cmocka_unit_test(frames_cannot_be_moved),
             cmocka_unit_test(impossible_numbers_are_named),
             cmocka_unit_test(another_model_is_refused_by_name),
             cmocka_unit_test(a_taken_name_is_refused), cmocka_unit_test(no_memory_leaves_nothing),
             cmocka_unit_test(a_kill_leaves_nothing_visible))
