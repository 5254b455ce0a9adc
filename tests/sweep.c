/* tests/sweep.c - `make sweep`: every cut point, every failing call of one scripted life.
 *
 * Responsible for: one life (create, chat, seal, write-through, snapshot, sleep, wake, demote, rm,
 * gc beside open sessions, a second writer, what the byte budget makes go, going back, forks, new
 * names, reopen) recorded once: the power cut behind every change, sync and index commit under
 * eight policies for what was not synced; the n-th failing change, index call and allocation until
 * a run passes clean. After each: the numbered invariants, fsck, and every acknowledged session,
 * bit for bit (CASE-17). All through both doors.
 * Not responsible for: random lives (sim.c), real kills (kill_save.c).
 *
 * An argument n takes one point in n (20 without one, 80 with QUICK=1), a second one chooses tests
 * by pattern.
 * Broken twins: BREAK_SYNC, BREAK_SYNC_ABOVE, BREAK_SYNC_NAMES, BREAK_ORDER, BREAK_TORN_BATCH,
 * BREAK_TOMBSTONE, BREAK_TRIM, BREAK_PAGE_USES, BREAK_COUNT, BREAK_LIVE_BYTES, BREAK_OPEN_LINEAGE,
 * BREAK_LOCK, BREAK_GC_EARLY, BREAK_GC_CHECKPOINT, BREAK_GC_MOVE, BREAK_HALF_KNOWN, BREAK_KIN,
 * BREAK_FORK_CUT.
 */
#include "tests/support_faulty_index.h"
#include "tests/support_store.h"
#include "tests/support_world.h"
#include "tests/testing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STEPS = 47, STEP_REOPEN = 14, POLICIES = 8, IO_MAX = 400 };

static uint64_t stride = 20;
static struct world world;
static char base[TESTING_PATH_BYTES];

static void path_of(char out[TESTING_PATH_BYTES + 32], const char *name) {
    snprintf(out, TESTING_PATH_BYTES + 32, "%s/%s", base, name);
}

static void remove_tree(const char *path) {
    char command[TESTING_PATH_BYTES + 64];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0)
        fail_msg("cannot remove %s", path);
}

/* Close and open again, as a fresh process does. */
static enum kv_err reopen(struct disk *disk, const char *dir, struct kv_diag *diag) {
    world_close(&world);
    return world_open(&world, dir, disk_door(disk), diag);
}

/* Sealed and written through, never saved: by a session that has a snapshot and by one without. */
static enum kv_err seal_unsaved(struct kv_diag *diag) {
    enum kv_err err = world_say(&world, 0, 560, 5, diag);
    return err != KV_OK ? err : world_say(&world, 2, 580, 5, diag);
}

/* While one writer has the store there is no other. */
static enum kv_err second_writer(const char *dir, struct kv_diag *diag) {
    struct store_options options = store_options_usual(dir, "second");
    struct store *store = NULL;
    struct kv_diag refused = {""};
    options.door = world.door;
    options.alloc = world.alloc;
    enum kv_err err = store_open(&options, &store, &refused);
    if (err == KV_OK)
        store_close(store);
    if (err == KV_OK || err == KV_ERR_CORRUPT)
        fail_msg("a second writer: %s", err == KV_OK ? "let in" : refused.text);
    return err == KV_ERR_BUSY ? KV_OK : kv_diag_set(diag, err, "%s", refused.text);
}

/* A long session goes back into its sealed text and on; forks of it, one of which goes on, outlive
 * it; it returns to where it was; names change. */
static enum kv_err branch_step(uint32_t number, struct kv_diag *diag) {
    switch (number) {
    case 37:
        return world_say(&world, 0, 900, 11, diag);
    case 38:
        return world_save(&world, 0, 0, diag);
    case 39:
        return world_fork(&world, 0, NULL, 2, diag);
    case 40:
        return world_back(&world, 0, 55, diag);
    case 41:
        return world_say(&world, 2, 300, 12, diag);
    case 42:
        return world_save(&world, 2, 0, diag);
    case 43:
        return world_revert(&world, 0, "before-restore-1", diag);
    case 44:
        return world_rename(&world, 2, 3, diag);
    case 45:
        return world_remove(&world, 0, diag);
    default:
        return world_gc(&world, diag);
    }
}

/* The byte budget reached: planes and an older snapshot of what sleeps, beside a session that is
 * resident; then a whole session. What was lowered goes on. */
static enum kv_err budget_step(uint32_t number, struct kv_diag *diag) {
    switch (number) {
    case 31:
        return world_retain(&world, diag);
    case 32:
        return world_say(&world, 1, 200, 10, diag);
    case 33:
        return world_save(&world, 1, 0, diag);
    case 34:
        return world_sleep(&world, 3, diag);
    case 35:
        return world_expire(&world, 3, diag);
    case 36:
        return world_retain(&world, diag);
    default:
        return branch_step(number, diag);
    }
}

/* Blocks written through and not yet saved, of a session that was never saved and of one that was;
 * gc beside them; then both are saved. */
static enum kv_err late_step(uint32_t number, const char *dir, struct kv_diag *diag) {
    switch (number) {
    case 25:
        return second_writer(dir, diag);
    case 26:
        return world_say(&world, 3, 600, 8, diag);
    case 27:
        return world_say(&world, 1, 540, 9, diag);
    case 28:
        return world_gc(&world, diag);
    case 29:
        return world_save(&world, 3, 0, diag);
    case 30:
        return world_sleep(&world, 1, diag);
    default:
        return budget_step(number, diag);
    }
}

/* Step 0 is the opening. */
static enum kv_err step(uint32_t number, struct disk *disk, const char *dir, struct kv_diag *diag) {
    switch (number) {
    case 0:
        return world_open(&world, dir, disk_door(disk), diag);
    case 1:
        return world_say(&world, 0, 600, 1, diag);
    case 2:
        return world_save(&world, 0, 0, diag);
    case 3:
        return world_say(&world, 1, 40, 2, diag);
    case 4:
        return world_save(&world, 1, 1, diag);
    case 5:
        return world_say(&world, 0, 260, 3, diag);
    case 6:
        return world_save(&world, 0, 1, diag);
    case 7:
        return world_say(&world, 1, 30, 4, diag);
    case 8:
        return world_sleep(&world, 1, diag);
    case 9:
        return world_demote(&world, 0, 1, diag);
    case 10:
        return world_sleep(&world, 0, diag);
    case 11:
        return world_wake(&world, 1, diag);
    case 12:
        return world_remove(&world, 1, diag);
    case 13:
        return seal_unsaved(diag);
    case STEP_REOPEN:
        return reopen(disk, dir, diag);
    case 15:
        return world_wake(&world, 0, diag);
    case 16:
        return world_say(&world, 0, 250, 6, diag);
    case 17:
        return world_save(&world, 0, 0, diag);
    case 18:
        return world_say(&world, 1, 70, 7, diag);
    case 19:
        return world_save(&world, 1, 0, diag);
    case 20:
        return world_gc(&world, diag);
    case 21:
        return world_remove(&world, 0, diag);
    case 22:
        return world_gc(&world, diag);
    case 23:
        return world_sleep(&world, 1, diag);
    case 24:
        return world_gc(&world, diag);
    default:
        return late_step(number, dir, diag);
    }
}

static struct disk_policy policy_of(uint32_t number) {
    if (number < 2)
        return (struct disk_policy){.unsynced = number == 0 ? DISK_LOST : DISK_KEPT};
    return (struct disk_policy){
        .unsynced = DISK_RANDOM, .seed = number, .grain_bytes = number % 2 == 0 ? 512 : 4096};
}

static void check_cut(struct disk *disk, uint64_t cut, uint32_t number) {
    char dir[TESTING_PATH_BYTES + 32], text[WORLD_TEXT_BYTES];
    struct disk_policy policy = policy_of(number);
    path_of(dir, "cut");
    remove_tree(dir);
    disk_build(disk, cut, &policy, dir);
    const struct world_check check = {
        .dir = dir, .entries = cut, .go_on = number == 0, .rebuild = number == 1};
    if (!world_right(&world, &check, text))
        fail_msg("power cut behind entry %llu, policy %u: %s", (unsigned long long)cut, number,
                 text);
}

static void power_cuts(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES + 32];
    struct kv_diag diag = {""};
    uint64_t cases = 0;
    path_of(dir, "power");
    struct disk *disk = disk_make(world.door, dir);
    world.disk = disk;
    world_forget_facts(&world);
    faulty_index_arm(&(struct faulty_index_plan){0});
    for (uint32_t i = 0; i < STEPS; i++)
        if (step(i, disk, dir, &diag) != KV_OK)
            fail_msg("step %u: %s", i, diag.text);
    world_close(&world);
    uint64_t entries = disk_entries(disk);
    uint64_t changes = disk_changes(disk);
    disk_die_at(disk, 0);
    faulty_index_attach(NULL);
    assert_in_range(changes, 50, IO_MAX);
    assert_true(world.gc_removed > 0);
    for (uint64_t cut = 0; cut <= entries; cut++)
        for (uint32_t number = 0; number < POLICIES; number++)
            if ((cut * POLICIES + number) % stride == 0) {
                check_cut(disk, cut, number);
                cases++;
            }
    disk_drop(disk);
    world.disk = NULL;
    remove_tree(dir);
    printf("power cuts, %s: %llu changes and %llu entries of the log, %u policies, %llu cases: "
           "0 lost, 0 torn\n",
           world.door->name, (unsigned long long)changes, (unsigned long long)entries, POLICIES,
           (unsigned long long)cases);
}

/* --- the n-th failing call */

enum door { DOOR_IO, DOOR_FULL, DOOR_QUOTA, DOOR_INDEX, DOOR_INDEX_LATE, DOOR_ALLOC, DOORS };
static const char *const door_names[DOORS] = {
    "I/O error", "no space", "quota", "index call", "half-known index commit", "allocation"};

static int is_of_disk(enum door door) {
    return door == DOOR_IO || door == DOOR_FULL || door == DOOR_QUOTA;
}

static void arm(enum door door, uint64_t at, struct disk *disk, struct testing_alloc *alloc) {
    struct faulty_index_plan plan = {.err = KV_ERR_IO};
    static const int errors[DOORS + 1] = {
        [DOOR_IO] = EIO, [DOOR_FULL] = ENOSPC, [DOOR_QUOTA] = EDQUOT};
    disk_fail_at(disk, is_of_disk(door) ? at : 0, errors[door]);
    plan.at = door == DOOR_INDEX || door == DOOR_INDEX_LATE ? at : 0;
    plan.only_changes = plan.after_effect = door == DOOR_INDEX_LATE;
    faulty_index_arm(&plan);
    pthread_mutex_lock(&alloc->lock);
    alloc->fail_at = door == DOOR_ALLOC ? at : 0;
    alloc->request_count = alloc->failed_count = 0;
    pthread_mutex_unlock(&alloc->lock);
}

static int has_struck(enum door door, struct disk *disk, const struct testing_alloc *alloc) {
    if (is_of_disk(door))
        return disk_has_failed(disk);
    return door == DOOR_ALLOC ? alloc->failed_count != 0 : faulty_index_hits() != 0;
}

/* A step that fails is tried again, the second time with a fresh handle; then it must work. */
static int retry(uint32_t number, struct disk *disk, const char *dir, struct kv_diag *diag) {
    if (step(number, disk, dir, diag) == KV_OK)
        return 1;
    for (int i = 0; i < 2; i++) {
        struct kv_diag again = {""};
        enum kv_err err =
            number == STEP_REOPEN || number == 0 ? KV_ERR_IO : step(number, disk, dir, &again);
        if (err == KV_OK)
            return 1;
        if (err == KV_ERR_EXISTS || err == KV_ERR_NOT_FOUND)
            return 1; /* the first try had its effect and then failed */
        err = reopen(disk, dir, &again);
        if (err != KV_OK)
            fail_msg("after step %u (%s): the store does not open: %s", number, diag->text,
                     again.text);
        if (number == STEP_REOPEN || number == 0)
            return 1;
    }
    return 0;
}

/* Static: a failed test leaves a store whose threads use it (close_world). */
static struct testing_alloc alloc;

/* Returns 1 when the fault struck. What was resident only is lost with a handle that gave up: the
 * rest of the life may then find less, but never anything wrong. */
static int life_with_fault(enum door door, uint64_t at) {
    char dir[TESTING_PATH_BYTES + 32], text[WORLD_TEXT_BYTES];
    testing_alloc_init(&alloc, 0);
    path_of(dir, "fault");
    remove_tree(dir);
    struct disk *disk = disk_make(world.door, dir);
    world.disk = disk;
    world.alloc = &alloc.alloc;
    world_forget_facts(&world);
    arm(door, at, disk, &alloc);
    for (uint32_t i = 0; i < STEPS; i++) {
        struct kv_diag diag = {""};
        if (!retry(i, disk, dir, &diag) && diag.text[0] == 0)
            fail_msg("%s %llu: step %u failed without a word", door_names[door],
                     (unsigned long long)at, i);
    }
    int struck = has_struck(door, disk, &alloc);
    world_close(&world);
    arm(DOORS, 0, disk, &alloc);
    if (alloc.live_count != 0)
        fail_msg("%s %llu: %lld allocations are left", door_names[door], (unsigned long long)at,
                 (long long)alloc.live_count);
    const struct world_check check = {.dir = dir, .entries = UINT64_MAX, .go_on = 1, .rebuild = 1};
    world.alloc = kv_alloc_system();
    if (!world_right(&world, &check, text))
        fail_msg("%s %llu: %s", door_names[door], (unsigned long long)at, text);
    disk_drop(disk);
    world.disk = NULL;
    return struck;
}

static void sweep_door(enum door door) {
    /* Index calls and allocations are many: a part of them sees fewer. */
    uint64_t step = stride == 1 || is_of_disk(door) ? stride : 4 * stride;
    uint64_t at = 1, cases = 0;
    for (int more = 1; more; at += step) {
        more = life_with_fault(door, at);
        cases++;
    }
    printf("failing %s, %s: %llu cases, the last at %llu and clean: 0 lost, 0 torn\n",
           door_names[door], world.door->name, (unsigned long long)cases,
           (unsigned long long)(at - step));
    assert_true(cases > 1);
}

static void failing_io(void **state) {
    (void)state;
    sweep_door(DOOR_IO);
}

static void failing_space(void **state) {
    (void)state;
    sweep_door(DOOR_FULL);
}

static void failing_quota(void **state) {
    (void)state;
    sweep_door(DOOR_QUOTA);
}

static void failing_index(void **state) {
    (void)state;
    sweep_door(DOOR_INDEX);
}

static void failing_index_after_its_effect(void **state) {
    (void)state;
    sweep_door(DOOR_INDEX_LATE);
}

static void failing_allocation(void **state) {
    (void)state;
    sweep_door(DOOR_ALLOC);
}

/* --- a disk that is full from the n-th write on, until there is room again */

/* A chat that seals blocks, with saves in between; 1 when the disk was full for one of them. */
static int chat_on_full_disk(uint64_t at) {
    char dir[TESTING_PATH_BYTES + 32], text[WORLD_TEXT_BYTES];
    struct kv_diag diag = {""};
    path_of(dir, "full");
    remove_tree(dir);
    struct disk *disk = disk_make(world.door, dir);
    world.disk = disk;
    world_forget_facts(&world);
    if (world_open(&world, dir, disk_door(disk), &diag) != KV_OK ||
        world_say(&world, 0, 100, 1, &diag) != KV_OK || world_save(&world, 0, 0, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    disk_fill_at(disk, at);
    int struck = 0;
    for (uint32_t turn = 0; turn < 4; turn++) {
        kv_diag_clear(&diag);
        /* The chat goes on, also while sealed blocks cannot be written. */
        if (world_say(&world, 0, 280, turn, &diag) != KV_OK)
            fail_msg("no space at write %llu: the chat stops: %s", (unsigned long long)at,
                     diag.text);
        enum kv_err err = world_save(&world, 0, turn == 1, &diag);
        if (disk_has_failed(disk) && err != KV_OK) {
            struck = 1;
            if (err != KV_ERR_NO_SPACE || strstr(diag.text, "ant") == NULL)
                fail_msg("no space at write %llu: %s: %s", (unsigned long long)at, kv_err_name(err),
                         diag.text);
            if (turn % 2 == 0)
                continue; /* the next save meets the same full disk */
            disk_fill_at(disk, 0);
            err = world_save(&world, 0, 0, &diag);
        }
        if (err != KV_OK)
            fail_msg("there is room, but: %s", diag.text);
    }
    disk_fill_at(disk, 0);
    if (world_save(&world, 0, 0, &diag) != KV_OK)
        fail_msg("there is room at the end, but: %s", diag.text);
    world_close(&world);
    disk_drop(disk);
    world.disk = NULL;
    const struct world_check check = {.dir = dir, .entries = UINT64_MAX, .go_on = 1, .rebuild = 1};
    if (!world_right(&world, &check, text))
        fail_msg("no space at write %llu: %s", (unsigned long long)at, text);
    return struck;
}

static void full_disk(void **state) {
    (void)state;
    uint64_t cases = 0, at = 1;
    uint64_t few = stride < 8 ? 1 : stride < 40 ? stride / 8 : 5;
    for (int more = 1; more; at += few) {
        more = chat_on_full_disk(at);
        cases++;
    }
    printf("full disk, %s: from each of %llu writes on: the chat goes on, the save says so, room "
           "makes "
           "the next one work\n",
           world.door->name, (unsigned long long)cases - 1);
    assert_true(cases > 3);
}

static int take_uring(void **state) {
    (void)state;
    world.door = io_uring_door();
    return 0;
}

static int take_posix(void **state) {
    (void)state;
    world.door = io_posix_door();
    return 0;
}

/* Closes what a failed test has left open. */
static int close_world(void **state) {
    (void)state;
    if (world.disk != NULL)
        arm(DOORS, 0, world.disk, &alloc);
    world_close(&world);
    world.disk = NULL;
    world.alloc = kv_alloc_system();
    return 0;
}

/* Both doors, one after the other. */
#define BOTH(test)                                                                                 \
    {#test, test, take_uring, close_world, NULL}, {                                                \
#test " posix", test, take_posix, close_world, NULL                                        \
    }

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        BOTH(power_cuts),         BOTH(failing_io),    BOTH(failing_space),
        BOTH(failing_quota),      BOTH(failing_index), BOTH(failing_index_after_its_effect),
        BOTH(failing_allocation), BOTH(full_disk)};
    if (testing_quick())
        stride *= 4;
    if (argc > 1)
        stride = strtoull(argv[1], NULL, 10);
    if (stride == 0)
        stride = 1;
    /* What a power cut leaves is built by hand, so the disk under it need not be a slow one. */
    if (access("/dev/shm", W_OK) == 0)
        setenv("TMPDIR", "/dev/shm", 0);
    testing_temp_dir(base);
    world_begin(&world);
    world.eagerly = 1;
    int status = testing_run(argc > 2 ? 2 : 1, argc > 2 ? argv + 1 : argv, tests,
                             sizeof tests / sizeof tests[0]);
    world_end(&world);
    return status;
}
