/* tests/test_blind.c - the same damage with digest comparison taken out of this program.
 *
 * Responsible for: showing that a plane of another session is caught by the fingerprint when every
 * digest is accepted, so that the proof is more than the digests once more; and that no flipped bit
 * ends the process then: what is not refused can be talked to.
 * Not responsible for: digests that work (test_restore.c).
 *
 * tests/support_fuzz_wake.c defines kv_digest_equal, so the product's object file is not linked.
 */
#include "tests/support_fuzz_wake.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Puts stream `kind` of a block of `from` in the place of the one of `to`, on disk. */
static void swap_plane(const char *dir, struct life *life, const char *from, const char *to,
                       enum layout_stream kind) {
    struct record_snapshot theirs = life_head(life, from, NULL);
    struct record_snapshot mine = life_head(life, to, NULL);
    struct record_key their_key = record_key_block(theirs.lineage, theirs.block_count - 1);
    struct record_key my_key = record_key_block(mine.lineage, mine.block_count - 1);
    struct store_extent source, target;
    life_extent(life, &their_key, (uint8_t)kind, &source);
    life_extent(life, &my_key, (uint8_t)kind, &target);
    assert_int_equal(source.stored_bytes, target.stored_bytes);
    void *bytes = malloc(source.stored_bytes);
    assert_non_null(bytes);
    life_disk(dir, &source, bytes, 0);
    life_disk(dir, &target, bytes, 1);
    free(bytes);
}

static void a_foreign_plane_is_caught_by_the_fingerprint(void **state) {
    (void)state;
    static const enum layout_stream raw_planes[] = {LAYOUT_VR1, LAYOUT_KM};
    for (size_t i = 0; i < sizeof raw_planes / sizeof raw_planes[0]; i++) {
        char dir[TESTING_PATH_BYTES];
        struct life life;
        struct kv_diag diag = {""};
        life_begin(dir, &life);
        struct session *mine = life_session(&life, "mine", IMAGE_RECIPE_V3);
        struct session *theirs = life_session(&life, "theirs", IMAGE_RECIPE_V3);
        life_say(mine, 1, 900, 3, NULL);
        life_say(theirs, 2, 900, 3, NULL);
        life_sleep(&life, mine);
        life_sleep(&life, theirs);
        session_drop(life_wake(&life, "mine", NULL));
        swap_plane(dir, &life, "theirs", "mine", raw_planes[i]);
        life_refuse(&life, "mine", KV_ERR_PROOF, &diag);
        printf("%s\n", diag.text);
        assert_non_null(strstr(diag.text, "fingerprint"));
        assert_non_null(strstr(diag.text, "mine"));
        life_wake(&life, "theirs", NULL);
        life_close(&life);
    }
}

static void flip(int file, uint64_t off, unsigned bit) {
    uint8_t byte = 0;
    assert_int_equal(pread(file, &byte, 1, (off_t)off), 1);
    byte ^= (uint8_t)(1u << bit);
    assert_int_equal(pwrite(file, &byte, 1, (off_t)off), 1);
    assert_int_equal(fsync(file), 0);
}

struct outcomes {
    uint32_t refused, disproved, answered;
};

static void wake_and_talk(struct life *life, const char *name, struct outcomes *outcomes) {
    const struct restore_options options = {.skip_needles = 1};
    struct session *woken = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    struct restore_check check;
    (void)restore_verify(life->store, kv_alloc_system(), name, &check, &diag);
    enum kv_err err = restore_wake(&life->source, name, &options, &woken, &receipt, &diag);
    outcomes->refused += err != KV_OK && err != KV_ERR_PROOF;
    outcomes->disproved += err == KV_ERR_PROOF;
    outcomes->answered += err == KV_OK;
    if (err != KV_OK && strstr(diag.text, name) == NULL)
        fail_msg("%s is not named: %s", name, diag.text);
    if (err == KV_OK) {
        life_say(woken, 5, 3, 2, NULL);
        session_drop(woken);
    }
    while (engine_apply(life->engine))
        ;
}

static void no_flip_ends_the_process(void **state) {
    (void)state;
    const uint32_t flips = testing_quick() ? 60 : 300;
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    struct testing_random random;
    struct outcomes outcomes = {0};
    struct stat info;
    struct life life;
    testing_random_init(&random, testing_seed("blind flips", 411));
    testing_temp_dir(dir);
    struct life_options options = life_default(dir);
    life_open(&options, &life);
    struct session *one = life_session(&life, "planes", IMAGE_RECIPE_V3);
    struct session *two = life_session(&life, "pages", IMAGE_RECIPE_BF16);
    life_say(one, 1, 900, 3, NULL);
    life_say(two, 2, 120, 3, NULL);
    life_sleep(&life, one);
    life_sleep(&life, two);
    life_close(&life); /* cuts the segment at its tail */
    life_open(&options, &life);
    snprintf(path, sizeof path, "%s/seg/00000001.seg", dir);
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    assert_int_equal(fstat(file, &info), 0);
    for (uint32_t i = 0; i < flips; i++) {
        uint64_t off = testing_random_below(&random, (uint64_t)info.st_size);
        unsigned bit = (unsigned)testing_random_below(&random, 8);
        flip(file, off, bit);
        wake_and_talk(&life, "planes", &outcomes);
        wake_and_talk(&life, "pages", &outcomes);
        flip(file, off, bit);
    }
    close(file);
    life_wake(&life, "planes", NULL);
    life_wake(&life, "pages", NULL);
    life_close(&life);
    printf("%u flips without digests: %u wakes refused, %u disproved, %u answered, 0 crashes\n",
           flips, outcomes.refused, outcomes.disproved, outcomes.answered);
    assert_true(outcomes.refused > 0 && outcomes.answered > 0);
}

/* What a fuzzer has found once, and values of a scale that are no positive number. */
static void corpus_of_wakes(void **state) {
    (void)state;
    static uint8_t bytes[8192];
    uint32_t files = 0, woke = 0;
    DIR *dir = opendir("tests/corpus/wake");
    assert_non_null(dir);
    for (struct dirent *item = readdir(dir); item != NULL; item = readdir(dir)) {
        char path[600];
        if (item->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "tests/corpus/wake/%s", item->d_name);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        size_t count = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        woke += (uint32_t)support_fuzz_wake(bytes, count);
        files++;
    }
    closedir(dir);
    for (unsigned extent = 0; extent < 64; extent++) {
        static const uint8_t numbers[][2] = {{0, 0x7e}, {0, 0x7c}, {0, 0xfc}, {1, 0}, {0, 0x80}};
        for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
            const uint8_t input[6] = {(uint8_t)extent, 0, 8, 0, numbers[i][0], numbers[i][1]};
            woke += (uint32_t)support_fuzz_wake(input, sizeof input);
            files++;
        }
    }
    printf("%u inputs, %u woke all the same\n", files, woke);
    assert_true(files > woke);
}

TESTING_MAIN(cmocka_unit_test(corpus_of_wakes),
             cmocka_unit_test(a_foreign_plane_is_caught_by_the_fingerprint),
             cmocka_unit_test(no_flip_ends_the_process))
