/* tests/sim.c - `make sim SECONDS=`: random lives from one seed, one process, a virtual clock.
 *
 * Responsible for: episodes of random steps (chat, save, tag, sleep, wake, demote, fork, roll back,
 * rename, rm, gc, what the byte budget makes go, reopen) with random faults (I/O errors, full
 * disks, index calls, allocations), power cuts that lose, keep or tear what was not synced, lost
 * indexes and a clock that jumps; after every cut and at the end the invariants and every
 * acknowledged session, bit for bit.
 * Not responsible for: every point of one life (sweep.c).
 *
 * Arguments: seconds, first seed, steps of an episode. An episode depends on its seed alone, so a
 * failure prints seed and step, and `sim 0 SEED` replays it with a line for each step.
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

enum { STEPS_USUAL = 40, FAULTS = 5, DEAD_STEPS_MAX = 12 };

static uint64_t seconds = 5, seed_first = 1, steps_max = STEPS_USUAL;
static struct world world;
static char base[TESTING_PATH_BYTES];

/* --- a clock that moves by itself and jumps */

static uint64_t clock_now = 1000000000u, clock_wall = 1700000000000000000u;

static uint64_t tick(void *context) {
    (void)context;
    return __atomic_add_fetch(&clock_now, 1000, __ATOMIC_RELAXED);
}

static uint64_t wall(void *context) {
    (void)context;
    return __atomic_add_fetch(&clock_wall, 1000, __ATOMIC_RELAXED);
}

static int verbose;
static char last_step[80]; /* in words */

static const struct kv_clock virtual_clock = {tick, wall, NULL};

/* --- an episode */

struct tally {
    uint64_t episodes, steps, cuts, faults, failed_steps, rebuilds, reopened;
};

struct episode {
    uint64_t seed, step;
    struct testing_random random;
    struct testing_alloc alloc;
    struct disk *disk;
    char dir[TESTING_PATH_BYTES + 32];
    uint32_t dirs;
    int has_forks;
    int doubtful; /* a step has failed since the last opening: later ones may be refused */
    struct tally *tally;
    char text[WORLD_TEXT_BYTES];
};

static uint64_t below(struct episode *episode, uint64_t end) {
    return testing_random_below(&episode->random, end);
}

static void remove_tree(const char *path) {
    char command[TESTING_PATH_BYTES + 64];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0)
        fail_msg("cannot remove %s", path);
}

static void wrong(const struct episode *episode, const char *what, const char *text) {
    fail_msg("seed %llu, step %llu, %s: %s (replay: sim 0 %llu)", (unsigned long long)episode->seed,
             (unsigned long long)episode->step, what, text, (unsigned long long)episode->seed);
}

static void disarm(struct episode *episode) {
    const struct faulty_index_plan none = {0};
    disk_fail_at(episode->disk, 0, 0);
    faulty_index_arm(&none);
    pthread_mutex_lock(&episode->alloc.lock);
    episode->alloc.fail_at = 0;
    episode->alloc.request_count = episode->alloc.failed_count = 0;
    pthread_mutex_unlock(&episode->alloc.lock);
}

/* One fault somewhere in the next calls. */
static void arm(struct episode *episode) {
    static const int errors[3] = {EIO, ENOSPC, EDQUOT};
    struct faulty_index_plan plan = {.at = 1 + below(episode, 12), .err = KV_ERR_IO};
    disarm(episode);
    episode->tally->faults++;
    switch (below(episode, FAULTS)) {
    case 0:
    case 1:
        disk_fail_at(episode->disk, 1 + below(episode, 8), errors[below(episode, 3)]);
        break;
    case 2:
        faulty_index_arm(&plan);
        break;
    case 3:
        plan.only_changes = plan.after_effect = 1;
        plan.at = 1 + below(episode, 3);
        faulty_index_arm(&plan);
        break;
    default:
        episode->alloc.fail_at = 1 + below(episode, 30);
        break;
    }
}

static int has_struck(const struct episode *episode) {
    return disk_has_failed(episode->disk) || faulty_index_hits() != 0 ||
           episode->alloc.failed_count != 0;
}

static enum kv_err open_world(struct episode *episode, struct kv_diag *diag) {
    return world_open(&world, episode->dir, disk_door(episode->disk), diag);
}

/* Closes and opens as a fresh process does; without a fault it must work. */
static void reopen(struct episode *episode) {
    struct kv_diag diag = {""};
    disarm(episode);
    world_close(&world);
    episode->tally->reopened++;
    episode->doubtful = 0;
    if (below(episode, 6) == 0 && !disk_is_dead(episode->disk)) {
        /* What the recorder has seen of the index is no longer there. */
        support_store_remove_index(episode->dir);
        disk_drop(episode->disk);
        episode->disk = world.disk = disk_make(world.door, episode->dir);
        for (uint32_t i = 0; i < world.fact_count; i++)
            world.facts[i].begin = world.facts[i].end = 0;
        episode->tally->rebuilds++;
    }
    if (open_world(episode, &diag) != KV_OK)
        wrong(episode, "opening", diag.text);
}

static void compare(struct episode *episode, const struct world_check *check, const char *what) {
    const struct kv_alloc *alloc = world.alloc;
    int right = world_right(&world, check, episode->text);
    world.alloc = alloc;
    if (!right)
        wrong(episode, what, episode->text);
}

/* What the power cut leaves becomes the store that the episode goes on with. */
static void after_cut(struct episode *episode) {
    struct disk_policy policy = {.unsynced = (enum disk_unsynced)below(episode, 3),
                                 .seed = testing_random_u64(&episode->random),
                                 .grain_bytes = below(episode, 2) ? 512 : 4096};
    char old[sizeof episode->dir];
    struct kv_diag diag = {""};
    disarm(episode);
    world_close(&world);
    uint64_t entries = disk_entries(episode->disk);
    memcpy(old, episode->dir, sizeof old);
    snprintf(episode->dir, sizeof episode->dir, "%s/%u", base, ++episode->dirs);
    remove_tree(episode->dir);
    disk_build(episode->disk, entries, &policy, episode->dir);
    disk_drop(episode->disk);
    world.disk = NULL;
    remove_tree(old);
    const struct world_check check = {.dir = episode->dir, .entries = entries, .rebase = 1};
    episode->tally->cuts++;
    compare(episode, &check, "after a power cut");
    episode->disk = world.disk = disk_make(world.door, episode->dir);
    episode->doubtful = 0;
    if (open_world(episode, &diag) != KV_OK)
        wrong(episode, "opening after a power cut", diag.text);
}

enum { CHOICES = 28, TAGS = 3 };
static const char *const step_names[CHOICES] = {
    "say",  "say",  "say",    "say",    "save", "save",   "save",   "save", "sleep", "sleep",
    "wake", "wake", "demote", "remove", "gc",   "retain", "expire", "back", "back",  "revert",
    "fork", "fork", "tag",    "tag",    "tag",  "untag",  "rename", "clock"};
static const char *const tags[TAGS] = {"before-restore-1", "red", "green"};

/* What the last save or removal left, as far as the facts know. */
static int is_stored(uint32_t session) {
    for (uint32_t i = world.fact_count; i-- > 0;)
        if (world.facts[i].session == session && world.facts[i].acknowledged)
            return !world.facts[i].is_removal;
    return 0;
}

/* A session of which the step can be expected to do something; now and then any other. */
static uint32_t pick_session(struct episode *episode, const char *name) {
    static const char of_resident[] = "save tag sleep demote";
    static const char of_stored[] = "wake remove expire back revert fork untag rename";
    uint32_t session = (uint32_t)below(episode, WORLD_SESSIONS);
    if (below(episode, 5) == 0)
        return session;
    for (uint32_t i = 0; i < WORLD_SESSIONS; i++) {
        uint32_t next = (session + i) % WORLD_SESSIONS;
        if ((strstr(of_resident, name) == NULL || world_find(&world, next) != NULL) &&
            (strstr(of_stored, name) == NULL || is_stored(next)))
            return next;
    }
    return session;
}

/* A fork that is resident keeps the planes it shares; what the others then are is not among the
 * facts, so after the first fork all are put away. */
static void put_away(struct episode *episode) {
    for (uint32_t i = 0; episode->has_forks && i < WORLD_SESSIONS; i++)
        world_forget(&world, i);
}

static enum kv_err take_step(struct episode *episode, struct kv_diag *diag) {
    uint64_t choice = below(episode, CHOICES);
    uint32_t session = pick_session(episode, step_names[choice]);
    uint32_t feed = 1 + (uint32_t)below(episode, below(episode, 3) == 0 ? 640 : 120);
    uint32_t to = (session + 1 + (uint32_t)below(episode, WORLD_SESSIONS - 1)) % WORLD_SESSIONS;
    uint64_t tag = below(episode, TAGS);
    snprintf(last_step, sizeof last_step, "%s %s %u, %s, %s", step_names[choice],
             world_name(session), feed, world_name(to), tags[tag]);
    switch (choice) {
    case 0:
    case 1:
    case 2:
    case 3:
        return world_say(&world, session, feed, testing_random_u64(&episode->random), diag);
    case 4:
    case 5:
    case 6:
    case 7:
        return world_save(&world, session, below(episode, 5) == 0, diag);
    case 8:
    case 9:
        return world_sleep(&world, session, diag);
    case 10:
    case 11:
        return world_wake(&world, session, diag);
    case 12:
        return world_demote(&world, session, (int)below(episode, 2), diag);
    case 13:
        return world_remove(&world, session, diag);
    case 14:
        return world_gc(&world, diag);
    case 15:
        put_away(episode);
        return world_retain(&world, diag);
    case 16:
        put_away(episode);
        return world_expire(&world, session, diag);
    case 17:
    case 18:
        return world_back(&world, session, (uint32_t)below(episode, 100), diag);
    case 19:
        return world_revert(&world, session, tags[tag], diag);
    case 20:
        episode->has_forks = 1;
        return world_fork(&world, session, NULL, to, diag);
    case 21:
        episode->has_forks = 1;
        return world_fork(&world, session, tags[tag], to, diag);
    case 22:
    case 23:
    case 24:
        return world_tag(&world, session, tags[1 + tag % (TAGS - 1)], diag);
    case 25:
        return world_untag(&world, session, tags[tag], diag);
    case 26:
        return world_rename(&world, session, to, diag);
    default:
        clock_wall += testing_random_u64(&episode->random) >> 12;
        clock_wall -= testing_random_u64(&episode->random) >> 12;
        clock_now += below(episode, 1000000000);
        return KV_OK;
    }
}

/* Codes that say no more than that there is nothing to do. */
static int is_idle(enum kv_err err) {
    return err == KV_OK || err == KV_ERR_NOT_FOUND || err == KV_ERR_EXISTS ||
           err == KV_ERR_NO_SLOTS;
}

static void run_steps(struct episode *episode) {
    uint64_t dead_steps = 0;
    for (episode->step = 1; episode->step <= steps_max; episode->step++) {
        struct kv_diag diag = {""};
        int cut = dead_steps == 0 && below(episode, 8) == 0;
        int faulty = !cut && dead_steps == 0 && below(episode, 4) == 0;
        episode->tally->steps++;
        if (cut) {
            disk_die_at(episode->disk, disk_entries(episode->disk) + below(episode, 14));
            dead_steps = 1;
        }
        if (faulty)
            arm(episode);
        enum kv_err err = take_step(episode, &diag);
        if (verbose)
            printf("step %llu: %s%s%s: %s %s\n", (unsigned long long)episode->step, last_step,
                   cut ? " cut" : "", faulty ? " fault" : "", kv_err_name(err), diag.text);
        if (!is_idle(err) && !episode->doubtful && dead_steps == 0 && !has_struck(episode))
            wrong(episode, "a step without a fault", diag.text);
        if (!is_idle(err)) {
            episode->tally->failed_steps++;
            episode->doubtful = 1;
        }
        episode->doubtful |= faulty && has_struck(episode);
        disarm(episode);
        if (dead_steps != 0 && (disk_is_dead(episode->disk) || ++dead_steps > DEAD_STEPS_MAX)) {
            after_cut(episode);
            dead_steps = 0;
        } else if (dead_steps == 0 && below(episode, episode->doubtful ? 2 : 12) == 0) {
            reopen(episode);
        }
    }
}

/* Static, and closed before a failed test ends: the threads of a store use the allocator. */
static struct episode episode;
static struct tally tally;

static int close_episode(void **state) {
    (void)state;
    if (world.disk != NULL)
        disarm(&episode);
    world_close(&world);
    world.alloc = kv_alloc_system();
    return 0;
}

static void run_episode(uint64_t seed) {
    struct kv_diag diag = {""};
    episode = (struct episode){.seed = seed, .tally = &tally};
    tally.episodes++;
    testing_random_init(&episode.random, seed);
    testing_alloc_init(&episode.alloc, 0);
    world_seed(seed);
    clock_now = 1000000000u;
    clock_wall = 1700000000000000000u;
    snprintf(episode.dir, sizeof episode.dir, "%s/0", base);
    remove_tree(episode.dir);
    world.alloc = &episode.alloc.alloc;
    world.clock = &virtual_clock;
    world.door = seed % 2 == 0 ? io_posix_door() : io_uring_door();
    world_forget_facts(&world);
    episode.disk = world.disk = disk_make(world.door, episode.dir);
    disarm(&episode);
    if (open_world(&episode, &diag) != KV_OK)
        wrong(&episode, "opening", diag.text);
    run_steps(&episode);
    disk_die_at(episode.disk, 0);
    disarm(&episode);
    world_close(&world);
    disk_drop(episode.disk);
    world.disk = NULL;
    if (episode.alloc.live_count != 0)
        wrong(&episode, "the end", "allocations are left");
    world.alloc = kv_alloc_system();
    const struct world_check check = {
        .dir = episode.dir, .entries = UINT64_MAX, .go_on = 1, .rebuild = 1};
    compare(&episode, &check, "the end");
    remove_tree(episode.dir);
}

static void random_lives(void **state) {
    (void)state;
    const struct kv_clock *clock = kv_clock_system();
    uint64_t end_ns = kv_clock_now_ns(clock) + seconds * 1000000000u;
    uint64_t seed = seed_first;
    testing_temp_dir(base);
    do
        run_episode(seed++);
    while (kv_clock_now_ns(clock) < end_ns);
    printf("seeds %llu to %llu: %llu steps, %llu power cuts, %llu faults armed, %llu steps "
           "failed, %llu openings, %llu rebuilds: 0 lost, 0 torn\n",
           (unsigned long long)seed_first, (unsigned long long)seed - 1,
           (unsigned long long)tally.steps, (unsigned long long)tally.cuts,
           (unsigned long long)tally.faults, (unsigned long long)tally.failed_steps,
           (unsigned long long)tally.reopened, (unsigned long long)tally.rebuilds);
    assert_true(tally.steps > 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(random_lives, close_episode)};
    if (argc > 1)
        seconds = strtoull(argv[1], NULL, 10);
    if (argc > 2)
        seed_first = strtoull(argv[2], NULL, 10);
    verbose = argc > 2 && seconds == 0;
    if (argc > 3)
        steps_max = strtoull(argv[3], NULL, 10);
    if (access("/dev/shm", W_OK) == 0)
        setenv("TMPDIR", "/dev/shm", 0);
    world_begin(&world);
    world.eagerly = 1;
    int status = testing_run(1, argv, tests, 1);
    world_end(&world);
    return status;
}
