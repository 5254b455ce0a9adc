/* tests/test_corpus.c - every file of the fuzz corpora, read once more.
 *
 * Responsible for: what a fuzzer has found once is tried by every build, without a fuzzer; the
 * first seed of each kind is taken for what it is. `test_corpus make DIR` writes the seeds anew.
 * Not responsible for: new inputs (fuzz_*.c), the corpus of wakes (test_blind.c).
 */
#include "engine/record.h"
#include "store/base/bytes.h"
#include "store/fmt.h"
#include "store/store_read.h"
#include "tests/support_fuzz.h"
#include "tests/support_fuzz_request.h"
#include "tests/support_fuzz_tokenizer.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/support_tiny_model.h"
#include "tests/support_world.h"
#include "tests/testing.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const struct target {
    const char *name;
    int (*call)(const uint8_t *bytes, size_t count);
} targets[] = {{"gguf", support_fuzz_gguf},       {"batch", support_fuzz_batch},
               {"segment", support_fuzz_segment}, {"image", support_fuzz_image},
               {"entry", support_fuzz_entry},     {"format", support_fuzz_format},
               {"export", support_fuzz_export},   {"tokenizer", support_fuzz_tokenizer},
               {"request", support_fuzz_request}};
enum { TARGETS = sizeof targets / sizeof targets[0] };

static void corpora(void **state) {
    (void)state;
    for (size_t i = 0; i < TARGETS; i++) {
        char path[600];
        uint32_t files = 0, taken = 0;
        snprintf(path, sizeof path, "tests/corpus/%s", targets[i].name);
        DIR *dir = opendir(path);
        assert_non_null(dir);
        struct dirent *item;
        while ((item = readdir(dir)) != NULL) {
            size_t count = 0;
            if (item->d_name[0] == '.')
                continue;
            snprintf(path, sizeof path, "tests/corpus/%s/%s", targets[i].name, item->d_name);
            uint8_t *bytes = malloc(1 << 20);
            FILE *file = fopen(path, "rb");
            assert_true(bytes != NULL && file != NULL);
            count = fread(bytes, 1, 1 << 20, file);
            fclose(file);
            int is_taken = targets[i].call(bytes, count);
            if (strncmp(item->d_name, "seed", 4) == 0)
                assert_int_equal(is_taken, 1);
            free(bytes);
            taken += is_taken != 0;
            files++;
        }
        closedir(dir);
        printf("%s: %u files, %u taken\n", targets[i].name, files, taken);
        assert_true(taken > 0);
    }
}

/* --- making seeds */

static void put_seed(const char *base, const char *target, uint32_t number, const void *bytes,
                     size_t count) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", base, target);
    (void)mkdir(base, 0755);
    (void)mkdir(path, 0755);
    snprintf(path, sizeof path, "%s/%s/seed%u", base, target, number);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, count, file) != count)
        abort();
    fclose(file);
}

static void make_entries(struct store *store, const char *base) {
    struct store_walk walk = {0};
    struct store_record record;
    uint32_t number = 0, images = 0;
    char last = 0;
    while (store_next(store, &walk, &record, NULL) == KV_OK) {
        uint8_t out[4096];
        struct fmt_entry entry = {record.value, record.value_bytes, 0, NULL};
        uint8_t extents[32 * FMT_EXTENT_BYTES];
        entry.extent_count = record.extent_count < 32 ? record.extent_count : 32;
        for (uint32_t i = 0; i < entry.extent_count; i++)
            fmt_extent_encode(&record.extents[i], extents + i * FMT_EXTENT_BYTES);
        entry.extents = extents;
        out[0] = (uint8_t)record.key_bytes;
        memcpy(out + 1, record.key, record.key_bytes);
        fmt_entry_encode(out + 1, record.key_bytes, &entry);
        if ((char)record.key[0] != last)
            put_seed(base, "entry", number++, out,
                     1 + record.key_bytes + fmt_entry_bytes(entry.value_bytes, entry.extent_count));
        last = (char)record.key[0];
        if (last == 's') {
            uint64_t size = record.extents[0].raw_bytes;
            struct iovec piece = {malloc((size_t)size), (size_t)size};
            struct store_read read = {
                .extent = &record.extents[0], .pieces = &piece, .piece_count = 1, .verify = 1};
            const struct store_read_args args = {.reads = &read, .count = 1};
            if (store_read(store, &args, NULL, NULL) != KV_OK)
                abort();
            put_seed(base, "image", images++, piece.iov_base, (size_t)size);
            free(piece.iov_base);
        }
        store_record_release(store, &record);
    }
}

static void make_segments(const char *dir, const char *base) {
    char path[600];
    uint8_t *bytes = malloc(1 << 20);
    uint32_t number = 0;
    snprintf(path, sizeof path, "%s/seg/00000001.seg", dir);
    FILE *file = fopen(path, "rb");
    if (bytes == NULL || file == NULL)
        abort();
    size_t count = fread(bytes, 1, 1 << 20, file);
    fclose(file);
    put_seed(base, "segment", 0, bytes, count);
    for (size_t at = 0; at + STORE_PAGE_BYTES <= count; at += STORE_PAGE_BYTES)
        if (memcmp(bytes + at, "CPBATCH1", 8) == 0)
            put_seed(base, "batch", number++, bytes + at, (size_t)kv_get_u64(bytes + at + 64));
    free(bytes);
}

static void make_small_store(const char *base) {
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    struct store_batch *batch = NULL;
    static const char text[] = "text that is kept";
    struct iovec piece = {(void *)(uintptr_t)text, sizeof text};
    struct store_part part = {3, STORE_RAW, &piece, 1, 0};
    struct store_put put = {"key", 3, "value", 5, &part, 1};
    testing_temp_dir(dir);
    snprintf(path, sizeof path, "%s/s", dir);
    struct store_options options = support_store_options(path);
    struct store *store = support_store_open(&options);
    for (int i = 0; i < 3; i++) {
        put.key = i == 1 ? "yek" : "key";
        if (store_batch_begin(store, 0, &batch, NULL) != KV_OK ||
            store_batch_put(batch, &put, NULL) != KV_OK ||
            store_batch_commit(batch, NULL, NULL) != KV_OK)
            abort();
    }
    store_close(store);
    make_segments(path, base);
    char format[FMT_TEXT_BYTES_MAX];
    const uint8_t id[FMT_ID_BYTES] = {1, 2, 3};
    put_seed(base, "format", 0, format, fmt_text_encode(id, format));
}

static enum kv_err put_export(void *context, const void *bytes, size_t count,
                              struct kv_diag *diag) {
    (void)diag;
    return fwrite(bytes, 1, count, context) == count ? KV_OK : KV_ERR_IO;
}

/* A geometry as small as it can be: a block and its window are 110 KB. */
static void make_exports(const char *base) {
    static const uint32_t tokens[2] = {20, 580};
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    struct life life;
    struct restore_exported exported;
    testing_temp_dir(dir);
    snprintf(path, sizeof path, "%s/s", dir);
    struct life_options options = life_default(path);
    options.model_layers = options.model_heads = 1;
    life_open(&options, &life);
    for (uint32_t i = 0; i < 2; i++) {
        char name[8], *bytes = NULL;
        size_t count = 0;
        FILE *file = open_memstream(&bytes, &count);
        snprintf(name, sizeof name, "s%u", i);
        struct session *session = life_session(&life, name, IMAGE_RECIPE_V3);
        life_say(session, 1, tokens[i], 1, NULL);
        life_save(&life, session, 0);
        const struct restore_export_args args = {.store = life.store,
                                                 .alloc = kv_alloc_system(),
                                                 .name = name,
                                                 .put = put_export,
                                                 .context = file};
        if (file == NULL || restore_export(&args, &exported, NULL) != KV_OK || fclose(file) != 0)
            abort();
        put_seed(base, "export", i, bytes, count);
        free(bytes);
    }
    life_close(&life);
}

static int make_seeds(const char *base) {
    static struct world world;
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    struct kv_diag diag = {""};
    struct tiny_model_options model = tiny_model_default();
    size_t size = 0;
    model.layers = 1;
    model.heads = model.kv_heads = 1;
    model.head_dim = 32;
    model.ffn = 32;
    uint8_t *file = tiny_model_make(&model, &size);
    if (file == NULL)
        abort();
    put_seed(base, "gguf", 0, file, size);
    tiny_model_drop(file);
    make_small_store(base);
    testing_temp_dir(dir);
    snprintf(path, sizeof path, "%s/s", dir);
    world_begin(&world);
    if (world_open(&world, path, NULL, &diag) != KV_OK ||
        world_say(&world, 0, 580, 1, &diag) != KV_OK || world_save(&world, 0, 1, &diag) != KV_OK ||
        world_say(&world, 1, 20, 1, &diag) != KV_OK || world_save(&world, 1, 0, &diag) != KV_OK)
        abort();
    make_entries(world.store, base);
    world_end(&world);
    make_exports(base);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(corpora)};
    if (argc == 3 && strcmp(argv[1], "make") == 0)
        return make_seeds(argv[2]);
    return testing_run(argc, argv, tests, 1);
}
