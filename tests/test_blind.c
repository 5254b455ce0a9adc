/* tests/test_blind.c - the same damage with digest comparison taken out of this program.
 *
 * Responsible for: showing that a plane of another session is caught by the fingerprint when every
 * digest is accepted, so that the proof is more than the digests once more.
 * Not responsible for: digests that work (test_restore.c).
 *
 * kv_digest_equal is defined here, so the product's object file is not linked.
 */
#include "tests/support_life.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b) {
    (void)a;
    (void)b;
    return 1;
}

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
        testing_temp_dir(dir);
        struct life_options options = life_default(dir);
        life_open(&options, &life);
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

TESTING_MAIN(cmocka_unit_test(a_foreign_plane_is_caught_by_the_fingerprint))
