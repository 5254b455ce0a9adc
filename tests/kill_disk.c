/* tests/kill_disk.c - `make test-kill`: real disks that fill up, turn read-only or go away.
 *
 * Responsible for: sessions that chat on while their store cannot be written, saves that say why,
 * and everything that was acknowledged after the disk is well again.
 * Not responsible for: killed processes (kill_save.c), faults at chosen calls (sweep.c).
 */
#include "tests/support_store.h"
#include "tests/support_world.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

enum { SAVES_MAX = 100 };

static struct world world;
static char mount_dir[TESTING_PATH_BYTES], dir[TESTING_PATH_BYTES + 16];

static void begin_world(void) {
    struct kv_diag diag = {""};
    snprintf(dir, sizeof dir, "%s/store", mount_dir);
    world_forget_facts(&world);
    if (world_open(&world, dir, NULL, &diag) != KV_OK)
        fail_msg("%s", diag.text);
}

static void begin(const char *options) {
    testing_temp_dir(mount_dir);
    if (mount("tmpfs", mount_dir, "tmpfs", 0, options) != 0)
        testing_skip("mounting needs root");
    begin_world();
}

/* A file system in a file, smaller than one segment. */
static void begin_ext4(uint32_t mib) {
    char image[TESTING_PATH_BYTES], command[2 * TESTING_PATH_BYTES + 160];
    testing_temp_dir(image);
    testing_temp_dir(mount_dir);
    snprintf(command, sizeof command,
             "truncate -s %uM '%s/disk' && mkfs.ext4 -q -F -m 0 '%s/disk' >/dev/null 2>&1 && "
             "mount -o loop '%s/disk' '%s' 2>/dev/null",
             mib, image, image, image, mount_dir);
    if (system(command) != 0)
        testing_skip("mounting ext4 in a file needs root, mkfs.ext4 and loop devices");
    begin_world();
}

static void end(void) {
    char text[WORLD_TEXT_BYTES];
    const struct world_check check = {.dir = dir, .entries = UINT64_MAX, .go_on = 1};
    world_close(&world);
    int right = world_right(&world, &check, text);
    assert_int_equal(umount(mount_dir), 0);
    if (!right)
        fail_msg("%s", text);
}

static void say(uint64_t seed) {
    struct kv_diag diag = {""};
    if (world_say(&world, (uint32_t)(seed % 3), 150, seed, &diag) != KV_OK)
        fail_msg("the chat stops: %s", diag.text);
}

/* A save that must work, if need be by a fresh handle: sessions then begin where they were saved.
 */
static void save_works(uint32_t session) {
    struct kv_diag diag = {""};
    struct store_stats stats;
    store_stats_get(world.store, &stats);
    if (stats.refuses_writes) {
        world_close(&world);
        if (world_open(&world, dir, NULL, &diag) != KV_OK)
            fail_msg("%s", diag.text);
        say(session);
    }
    if (world_save(&world, session, 0, &diag) != KV_OK)
        fail_msg("the disk is well, but: %s", diag.text);
}

static void a_disk_that_fills_up(void **state) {
    (void)state;
    struct kv_diag diag = {""};
    enum kv_err err = KV_OK;
    uint32_t saves = 0;
    begin("size=4m");
    for (uint64_t i = 0; err == KV_OK && i < SAVES_MAX; i++) {
        say(i);
        err = world_save(&world, (uint32_t)(i % 3), 1, &diag);
        saves += err == KV_OK;
    }
    printf("full after %u saves: %s\n", saves, diag.text);
    assert_int_equal(err, KV_ERR_NO_SPACE);
    assert_true(saves >= 3);
    for (uint64_t i = 0; i < 3; i++) {
        say(i);
        assert_int_not_equal(world_save(&world, (uint32_t)i, 0, NULL), KV_OK);
    }
    assert_int_equal(mount(NULL, mount_dir, NULL, MS_REMOUNT, "size=64m"), 0);
    save_works(0);
    end();
}

/* Filled to the last block, a session removed, gc, saved again; over and over, on ext4. */
static void a_full_disk_empties(void **state) {
    (void)state;
    struct kv_diag diag = {""};
    uint32_t saves = 0, rounds = 0;
    begin_ext4(8);
    for (; rounds < 6; rounds++) {
        enum kv_err err = KV_OK;
        uint32_t before = saves;
        for (uint64_t i = 0; err == KV_OK && i < SAVES_MAX; i++) {
            say(rounds * 1000 + i);
            err = world_save(&world, (uint32_t)((rounds * 1000 + i) % 3), 1, &diag);
            saves += err == KV_OK;
        }
        assert_int_equal(err, KV_ERR_NO_SPACE);
        assert_true(saves > before);
        support_store_fill_disk(mount_dir);
        /* Every other round by a fresh handle, which opens without a free block. */
        if (rounds % 2 == 1) {
            world_close(&world);
            if (world_open(&world, dir, NULL, &diag) != KV_OK)
                fail_msg("opening on a full disk: %s", diag.text);
        }
        uint32_t gone = rounds % 3;
        if (world_remove(&world, gone, &diag) != KV_OK)
            fail_msg("removing on a full disk: %s", diag.text);
        uint64_t taken = support_store_disk_bytes(dir);
        if (world_gc(&world, &diag) != KV_OK && diag.text[0] == 0)
            fail_msg("gc fails without a word");
        assert_true(support_store_disk_bytes(dir) + (256 << 10) < taken);
        support_store_unfill_disk(mount_dir);
        say(gone);
        save_works(gone);
    }
    printf("ext4 of 8 MiB: full %u times, %u saves\n", rounds, saves);
    end();
}

/* The file system has room and no inode: what needs a new file says so, the rest goes on. */
static void a_disk_without_inodes(void **state) {
    (void)state;
    struct kv_diag diag = {""};
    char path[TESTING_PATH_BYTES + 64];
    uint32_t files = 0;
    begin("size=64m,nr_inodes=40");
    say(0);
    assert_int_equal(world_save(&world, 0, 0, &diag), KV_OK);
    for (FILE *file = stdout; file != NULL; files++) {
        snprintf(path, sizeof path, "%s/f%u", mount_dir, files);
        file = fopen(path, "w");
        if (file != NULL)
            fclose(file);
    }
    for (uint64_t i = 1; i < 6; i++) {
        say(i);
        /* The open segment and the index are there already. */
        if (world_save(&world, (uint32_t)(i % 3), 0, &diag) != KV_OK)
            assert_non_null(strstr(diag.text, "inodes"));
    }
    char command[TESTING_PATH_BYTES + 32];
    snprintf(command, sizeof command, "rm -f '%s'/f*", mount_dir);
    assert_int_equal(system(command), 0);
    say(1);
    save_works(1);
    end();
}

static void a_disk_that_turns_read_only(void **state) {
    (void)state;
    struct kv_diag diag = {""};
    begin("size=64m");
    for (uint64_t i = 0; i < 3; i++) {
        say(i);
        assert_int_equal(world_save(&world, (uint32_t)i, 0, &diag), KV_OK);
    }
    world_close(&world);
    assert_int_equal(mount(NULL, mount_dir, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    enum kv_err err = world_open(&world, dir, NULL, &diag);
    printf("read-only disk: %s: %s\n", kv_err_name(err), diag.text);
    assert_int_not_equal(err, KV_OK);
    assert_true(diag.text[0] != 0);
    /* Reading needs no writing. */
    struct store_options options = store_options_usual(dir, "reader");
    struct store *store = NULL;
    struct snapshot_entry entry;
    options.read_only = 1;
    assert_int_equal(store_open(&options, &store, &diag), KV_OK);
    assert_int_equal(snapshot_find(store, kv_alloc_system(), world_name(1), &entry, &diag), KV_OK);
    store_close(store);
    assert_int_equal(mount(NULL, mount_dir, NULL, MS_REMOUNT, NULL), 0);
    assert_int_equal(world_open(&world, dir, NULL, &diag), KV_OK);
    say(1);
    save_works(1);
    end();
}

/* What is written to files that have no name any more must not be acknowledged. */
static void a_store_that_goes_away(void **state) {
    (void)state;
    struct kv_diag diag = {""};
    char command[TESTING_PATH_BYTES + 64], moved[TESTING_PATH_BYTES + 16];
    begin("size=64m");
    say(0);
    assert_int_equal(world_save(&world, 0, 0, &diag), KV_OK);
    snprintf(command, sizeof command, "cp -r '%s' '%s/copy' && rm -r '%s'", dir, mount_dir, dir);
    assert_int_equal(system(command), 0);
    say(0);
    enum kv_err err = world_save(&world, 0, 0, &diag);
    printf("removed store: %s: %s\n", kv_err_name(err), diag.text);
    assert_int_not_equal(err, KV_OK);
    say(0);
    world_close(&world);
    snprintf(moved, sizeof moved, "%s/copy", mount_dir);
    assert_int_equal(rename(moved, dir), 0);
    end();
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_disk_that_fills_up), cmocka_unit_test(a_full_disk_empties),
        cmocka_unit_test(a_disk_without_inodes), cmocka_unit_test(a_disk_that_turns_read_only),
        cmocka_unit_test(a_store_that_goes_away)};
    (void)argc;
    world_begin(&world);
    int status = testing_run(1, argv, tests, sizeof tests / sizeof tests[0]);
    world_end(&world);
    return status;
}
