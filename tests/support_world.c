/* tests/support_world.c - lives that can fail at every step, and what must be left of them.
 *
 * Responsible for: what support_world.h says.
 * Not responsible for: choosing steps and faults.
 */
#include "tests/support_world.h"

#include "snapshot/snap_care.h"
#include "snapshot/snap_retain.h"
#include "snapshot/snap_spill.h"
#include "snapshot/snap_tree.h"
#include "store/store_fsck.h"
#include "store/store_gc.h"
#include "tests/support_invariants.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/support_tiny_model.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- ids that repeat */

static uint64_t id_state = 1;
ssize_t __wrap_getrandom(void *bytes, size_t count, unsigned flags);

ssize_t __wrap_getrandom(void *bytes, size_t count, unsigned flags) {
    uint8_t *out = bytes;
    (void)flags;
    for (size_t i = 0; i < count; i++) {
        id_state = id_state * 6364136223846793005u + 1442695040888963407u;
        out[i] = (uint8_t)(id_state >> 56);
    }
    return (ssize_t)count;
}

void world_seed(uint64_t seed) {
    id_state = seed;
}

/* --- hooks; the context is the world */

/* Waits for the block, so that a batch holds one block and a life repeats exactly. */
static void block_sealed(void *context, struct session *session, struct block *block) {
    struct world *world = context;
    if (world->snapshot == NULL) {
        transfer_block_failed(block);
        return;
    }
    struct snapshot *snapshot = world->snapshot;
    snapshot_block_sealed(snapshot, session, block);
    pthread_mutex_lock(&snapshot->lock);
    while (snapshot->queue_count > 0)
        pthread_cond_wait(&snapshot->rest, &snapshot->lock);
    pthread_mutex_unlock(&snapshot->lock);
}

static void planes_wanted(void *context, struct session *session, struct block *block) {
    struct world *world = context;
    restore_planes_wanted(&world->source, session, block);
}

static int slots_low(void *context, struct session *session, uint32_t slots) {
    (void)context;
    (void)session;
    (void)slots;
    return 0;
}

void world_begin(struct world *world) {
    struct tiny_model_options model = tiny_model_default();
    /* What is tried thousands of times is the store: a block of one page a slot will do. */
    model.heads = 2;
    model.kv_heads = 1;
    model.ffn = 32;
    struct layout_geometry geometry = {model.layers, model.kv_heads, model.head_dim};
    struct kv_diag diag = {""};
    size_t size = 0;
    memset(world, 0, sizeof *world);
    world->alloc = kv_alloc_system();
    world->clock = kv_clock_system();
    world->door = io_best_door();
    struct engine_settings settings = {
        .alloc = kv_alloc_system(),
        .clock = kv_clock_system(),
        .hooks = {.context = world,
                  .block_sealed = block_sealed,
                  .planes_wanted = planes_wanted,
                  .slots_low = slots_low},
        .simd = ENGINE_SIMD_AUTO,
        .threads = 1,
        .sessions_max = WORLD_SESSIONS,
        .slot_budget_bytes =
            250 * (8 * layout_slot_bytes(&geometry) + layout_meta_frame_bytes(&geometry)),
        .poison_free_slots = 1,
        .shuffle_seed = 7};
    uint8_t *file = tiny_model_make(&model, &size);
    if (file == NULL || engine_open(&settings, file, size, &world->engine, &diag) != KV_OK) {
        fprintf(stderr, "world: %s\n", diag.text);
        abort();
    }
    tiny_model_drop(file);
}

void world_end(struct world *world) {
    world_close(world);
    engine_close(world->engine);
}

enum kv_err world_open(struct world *world, const char *dir, const struct io_door *door,
                       struct kv_diag *diag) {
    struct store_options options = store_options_usual(dir, "world");
    options.segment_bytes = 1 << 20;
    options.alloc = world->alloc;
    options.clock = world->clock;
    options.door = door != NULL ? door : world->door;
    enum kv_err err = store_open(&options, &world->store, diag);
    if (err != KV_OK) {
        world->store = NULL;
        return err;
    }
    world->source = (struct restore_source){.store = world->store,
                                            .engine = world->engine,
                                            .alloc = world->alloc,
                                            .clock = world->clock};
    const struct snapshot_settings settings = {.store = world->store,
                                               .engine = world->engine,
                                               .alloc = world->alloc,
                                               .clock = world->clock,
                                               .queue_max = 64};
    struct snapshot *snapshot = NULL;
    err = snapshot_open(&settings, &snapshot, diag);
    world->snapshot = snapshot;
    if (err != KV_OK) {
        world->snapshot = NULL;
        world_close(world);
    }
    return err;
}

void world_close(struct world *world) {
    struct snapshot *snapshot = world->snapshot;
    if (snapshot != NULL)
        snapshot_drain(snapshot);
    for (uint32_t i = 0; i < WORLD_SESSIONS; i++) {
        struct session *session = world_find(world, i);
        if (session != NULL)
            session_drop(session);
    }
    world->snapshot = NULL;
    snapshot_close(snapshot);
    while (engine_apply(world->engine))
        ;
    store_close(world->store);
    world->store = NULL;
}

const char *world_name(uint32_t session) {
    static const char *const names[WORLD_SESSIONS] = {"ant", "bee", "cat", "dog"};
    return names[session % WORLD_SESSIONS];
}

struct session *world_find(struct world *world, uint32_t session) {
    return session_find(world->engine, world_name(session));
}

/* --- steps */

/* A step of its ladder every 512 tokens. */
static struct image_policy policy_of(enum image_recipe recipe, int top_k8v8) {
    struct image_policy policy = {.recipe = recipe, .top_k8v8 = top_k8v8};
    policy.age_count = image_steps(&policy);
    for (uint32_t i = 0; i < policy.age_count; i++)
        policy.ages[i] = 512 * (uint64_t)(i + 1);
    return policy;
}

static enum kv_err set_ages(struct session *session, int coarse, struct kv_diag *diag) {
    static const uint64_t coarse_ages[IMAGE_AGES_MAX] = {0, 256, 512, 768};
    struct session_info info;
    session_info(session, &info);
    struct image_policy policy = policy_of(info.policy.recipe, info.policy.top_k8v8);
    if (coarse)
        memcpy(policy.ages, coarse_ages, policy.age_count * sizeof coarse_ages[0]);
    enum kv_err err = session_set_policy(session, &policy, diag);
    /* A promotion that cannot be read stays under way; the answer does not depend on it. */
    for (int i = 0; err == KV_OK && session_promoting(session) && i < 100; i++)
        engine_apply(session_engine(session));
    return err;
}

static enum kv_err wake_as(struct world *world, uint32_t session, enum receipt_tiers tiers,
                           struct kv_diag *diag) {
    const struct restore_options options = {.skip_needles = 1, .tiers = tiers};
    struct receipt receipt;
    struct session *woken = NULL;
    return restore_wake(&world->source, world_name(session), &options, &woken, &receipt, diag);
}

enum kv_err world_wake(struct world *world, uint32_t session, struct kv_diag *diag) {
    world->eager[session] = world->eagerly && world->wakes++ % 2 == 1;
    return wake_as(world, session,
                   world->eager[session] ? RECEIPT_TIERS_EAGER : RECEIPT_TIERS_EXACT, diag);
}

enum kv_err world_say(struct world *world, uint32_t session, uint32_t feed, uint64_t seed,
                      struct kv_diag *diag) {
    struct session *found = world_find(world, session);
    if (found == NULL) {
        enum kv_err err = world_wake(world, session, diag);
        if (err == KV_ERR_NOT_FOUND) {
            struct session_settings settings =
                support_engine_greedy(world_name(session), IMAGE_RECIPE_V3);
            /* Every third of each kind: v3, v2, v3 with K8V8 in front. */
            settings.policy =
                policy_of(session % 3 == 1 ? IMAGE_RECIPE_V2 : IMAGE_RECIPE_V3, session % 3 == 2);
            err = session_create(world->engine, &settings, &found, diag);
        }
        if (err != KV_OK)
            return err;
        found = world_find(world, session);
    }
    life_say(found, seed, feed, 2, NULL);
    if (world->snapshot != NULL)
        snapshot_drain(world->snapshot);
    engine_apply(world->engine);
    return KV_OK;
}

static struct world_fact *begin_fact(struct world *world, uint32_t session, int is_removal) {
    if (world->fact_count == WORLD_FACTS_MAX)
        abort();
    struct world_fact *fact = &world->facts[world->fact_count++];
    *fact = (struct world_fact){.session = session,
                                .is_removal = is_removal,
                                .begin = world->disk != NULL ? disk_entries(world->disk) : 0,
                                .end = UINT64_MAX};
    struct session *found = is_removal ? NULL : world_find(world, session);
    if (found != NULL) {
        struct session_info info;
        while (session_promoting(found) && engine_apply(world->engine))
            ;
        session_info(found, &info);
        fact->n = info.n;
        fact->resident = life_resident(found);
        fact->coarse = world->eager[session] && info.coarse_blocks != 0;
    }
    return fact;
}

void world_forget_facts(struct world *world) {
    world->fact_count = 0;
    memset(world->may_go, 0, sizeof world->may_go);
}

static enum kv_err end_fact(struct world *world, struct world_fact *fact, enum kv_err err) {
    fact->end = world->disk != NULL ? disk_entries(world->disk) : world->fact_count;
    fact->acknowledged = err == KV_OK;
    return err;
}

static enum kv_err save(struct world *world, uint32_t session,
                        const struct snapshot_options *options, struct kv_diag *diag) {
    struct receipt receipt;
    struct session *found = world_find(world, session);
    if (found == NULL)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "not resident");
    struct world_fact *fact = begin_fact(world, session, 0);
    return end_fact(world, fact, snapshot_save(world->snapshot, found, options, &receipt, diag));
}

enum kv_err world_save(struct world *world, uint32_t session, int is_explicit,
                       struct kv_diag *diag) {
    const struct snapshot_options options = {.is_explicit = is_explicit};
    return save(world, session, &options, diag);
}

enum kv_err world_tag(struct world *world, uint32_t session, const char *tag,
                      struct kv_diag *diag) {
    const struct snapshot_options options = {.is_explicit = 1, .tag = tag};
    return save(world, session, &options, diag);
}

enum kv_err world_sleep(struct world *world, uint32_t session, struct kv_diag *diag) {
    struct receipt receipt;
    struct session *found = world_find(world, session);
    if (found == NULL)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "not resident");
    struct world_fact *fact = begin_fact(world, session, 0);
    return end_fact(world, fact, snapshot_sleep(world->snapshot, found, 0, &receipt, diag));
}

enum kv_err world_remove(struct world *world, uint32_t session, struct kv_diag *diag) {
    struct session *found = world_find(world, session);
    snapshot_drain(world->snapshot);
    if (found != NULL)
        session_drop(found);
    snapshot_drain(world->snapshot);
    struct world_fact *fact = begin_fact(world, session, 1);
    enum kv_err err = snapshot_remove(world->store, world->alloc, world_name(session), diag);
    /* What was never saved is not there to be removed. */
    if (err == KV_ERR_NOT_FOUND)
        world->fact_count--;
    return err == KV_ERR_NOT_FOUND ? err : end_fact(world, fact, err);
}

enum kv_err world_demote(struct world *world, uint32_t session, int coarse, struct kv_diag *diag) {
    struct session *found = world_find(world, session);
    if (found == NULL)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "not resident");
    return set_ages(found, coarse, diag);
}

enum kv_err world_gc(struct world *world, struct kv_diag *diag) {
    struct store_gc_options options = store_gc_options_usual();
    struct store_gc_report report = {0};
    struct snap_care_report records;
    const struct snap_care_collect_args collect = {
        .store = world->store, .alloc = world->alloc, .open = world->snapshot};
    options.live_percent = 95;
    snapshot_drain(world->snapshot);
    engine_apply(world->engine);
    enum kv_err err = snap_care_collect(&collect, &records, diag);
    if (err == KV_OK)
        err = store_gc(world->store, &options, &report, diag);
    world->gc_removed += report.removed;
    return err;
}

/* --- branches */

void world_forget(struct world *world, uint32_t session) {
    struct session *found = world_find(world, session);
    snapshot_drain(world->snapshot);
    if (found != NULL)
        session_drop(found);
    snapshot_drain(world->snapshot);
    engine_apply(world->engine);
}

/* A fact of `to`: that it is what `session` (its tag, or its head) is now. */
static enum kv_err begin_copy(struct world *world, const struct snap_tree_place *place, uint32_t to,
                              struct world_fact **fact_out, struct kv_diag *diag) {
    struct restore_options options = {.skip_needles = 1};
    struct receipt receipt;
    struct session *woken = NULL;
    struct session_info info;
    enum kv_err err = snap_tree_find(world->store, place, &options.snapshot, NULL, diag);
    if (err == KV_OK)
        err = restore_wake(&world->source, place->name, &options, &woken, &receipt, diag);
    if (err != KV_OK)
        return err;
    session_info(woken, &info);
    struct world_fact *fact = begin_fact(world, to, 0);
    fact->n = info.n;
    fact->resident = life_resident(woken);
    session_drop(woken);
    *fact_out = fact;
    return KV_OK;
}

static int is_nowhere(struct world *world, uint32_t session) {
    struct snapshot_entry entry;
    return world_find(world, session) == NULL &&
           snapshot_find(world->store, world->alloc, world_name(session), &entry, NULL) ==
               KV_ERR_NOT_FOUND;
}

enum kv_err world_back(struct world *world, uint32_t session, uint32_t percent,
                       struct kv_diag *diag) {
    struct session_info info;
    world_forget(world, session);
    enum kv_err err = world_wake(world, session, diag);
    if (err != KV_OK)
        return err;
    struct session *found = world_find(world, session);
    session_info(found, &info);
    if (info.n < 2)
        return KV_OK;
    err = snapshot_rewind(world->snapshot, found, 1 + (info.n - 1) * percent / 100, diag);
    if (err != KV_OK)
        return err;
    for (int i = 0; session_promoting(found) && i < 100; i++)
        engine_apply(world->engine);
    support_engine_run(world->engine);
    return world_save(world, session, 0, diag);
}

enum kv_err world_fork(struct world *world, uint32_t session, const char *tag, uint32_t to,
                       struct kv_diag *diag) {
    const struct snap_tree tree = {world->store, world->alloc, world->clock, NULL};
    const struct snap_tree_place place = {world_name(session), tag};
    struct world_fact *fact = NULL;
    world_forget(world, session);
    if (!is_nowhere(world, to))
        return KV_OK;
    enum kv_err err = begin_copy(world, &place, to, &fact, diag);
    return err != KV_OK
               ? err
               : end_fact(world, fact, snap_tree_fork(&tree, &place, world_name(to), diag));
}

enum kv_err world_rename(struct world *world, uint32_t session, uint32_t to, struct kv_diag *diag) {
    const struct snap_tree tree = {world->store, world->alloc, world->clock, NULL};
    const struct snap_tree_place place = {world_name(session), NULL};
    struct world_fact *fact = NULL;
    world_forget(world, session);
    if (!is_nowhere(world, to))
        return KV_OK;
    enum kv_err err = begin_copy(world, &place, to, &fact, diag);
    if (err != KV_OK)
        return err;
    struct world_fact *gone = begin_fact(world, session, 1);
    world->may_go[to] |= world->may_go[session];
    err = snap_tree_rename(&tree, place.name, world_name(to), diag);
    (void)end_fact(world, gone, err);
    return end_fact(world, fact, err);
}

enum kv_err world_revert(struct world *world, uint32_t session, const char *tag,
                         struct kv_diag *diag) {
    const struct snap_tree tree = {world->store, world->alloc, world->clock, NULL};
    const struct snap_tree_place place = {world_name(session), tag};
    char kept[RECORD_TAG_BYTES_MAX + 1];
    struct world_fact *fact = NULL;
    world_forget(world, session);
    enum kv_err err = begin_copy(world, &place, session, &fact, diag);
    return err != KV_OK ? err : end_fact(world, fact, snap_tree_revert(&tree, &place, kept, diag));
}

enum kv_err world_untag(struct world *world, uint32_t session, const char *tag,
                        struct kv_diag *diag) {
    const struct snap_tree tree = {world->store, world->alloc, world->clock, NULL};
    const struct snap_tree_place place = {world_name(session), tag};
    world_forget(world, session);
    return snap_tree_untag(&tree, &place, diag);
}

/* --- what the byte budget makes go */

static int is_resident(void *context, const char *name) {
    const struct world *world = context;
    return session_find(world->engine, name) != NULL;
}

/* Without a budget one thing goes at a time: until nothing more may. */
static enum kv_err make_room(struct world *world, int may_degrade, struct kv_diag *diag) {
    struct snap_retain_sum sum = {0};
    enum kv_err err = KV_OK;
    int changed = 1;
    const struct snap_retain_args args = {.store = world->store,
                                          .alloc = world->alloc,
                                          .clock = world->clock,
                                          .may_degrade = may_degrade,
                                          .need_bytes = UINT64_MAX,
                                          .is_busy = is_resident,
                                          .context = world};
    while (err == KV_OK && changed)
        err = snap_retain_make_room(&args, &sum, &changed, diag);
    return err;
}

/* What the session reads once it has given up its planes one after the other: its own policy with
 * as many distances at their smallest. */
static enum kv_err add_lowered(struct world *world, uint32_t session, struct kv_diag *diag) {
    enum kv_err err = world_wake(world, session, diag);
    struct session *found = world_find(world, session);
    for (uint32_t steps = 1; err == KV_OK && steps <= IMAGE_AGES_MAX; steps++) {
        struct session_info info;
        session_info(found, &info);
        if (steps > image_steps(&info.policy))
            break;
        if (info.policy.age_count < steps)
            info.policy.age_count = steps;
        memset(info.policy.ages, 0, steps * sizeof info.policy.ages[0]);
        err = session_set_policy(found, &info.policy, diag);
        if (err == KV_OK)
            (void)begin_fact(world, session, 0);
    }
    if (found != NULL)
        session_drop(found);
    return err;
}

/* What stored sessions that are not resident may become: those that `expire` has named go, the
 * others, with `lower`, give up their planes. last[i] is behind the last fact of session i. */
static enum kv_err begin_facts(struct world *world, int lower, uint32_t last[WORLD_SESSIONS],
                               struct kv_diag *diag) {
    for (uint32_t i = 0; i < WORLD_SESSIONS; i++) {
        struct snapshot_entry entry;
        if (world_find(world, i) != NULL)
            continue;
        enum kv_err err = snapshot_find(world->store, world->alloc, world_name(i), &entry, diag);
        if (err == KV_ERR_NOT_FOUND)
            continue;
        if (err == KV_OK && entry.may_expire)
            (void)begin_fact(world, i, 1);
        else if (err == KV_OK && lower)
            err = add_lowered(world, i, diag);
        else if (err == KV_OK)
            continue;
        if (err != KV_OK)
            return err;
        last[i] = world->fact_count;
    }
    return KV_OK;
}

static enum kv_err give_up(struct world *world, int may_degrade, struct kv_diag *diag) {
    uint32_t last[WORLD_SESSIONS] = {0};
    uint32_t first = world->fact_count;
    enum kv_err err = begin_facts(world, may_degrade, last, diag);
    if (err != KV_OK) {
        world->fact_count = first; /* nothing has gone yet */
        return err;
    }
    err = make_room(world, may_degrade, diag);
    for (uint32_t i = 0; i < WORLD_SESSIONS; i++) {
        if (last[i] == 0)
            continue;
        struct world_fact *fact = &world->facts[last[i] - 1];
        (void)end_fact(world, fact, err);
        if (fact->is_removal && err == KV_OK)
            world->may_go[i] = 0;
    }
    return err;
}

enum kv_err world_retain(struct world *world, struct kv_diag *diag) {
    snapshot_drain(world->snapshot);
    return give_up(world, 1, diag);
}

enum kv_err world_expire(struct world *world, uint32_t session, struct kv_diag *diag) {
    struct session *found = world_find(world, session);
    snapshot_drain(world->snapshot);
    if (found != NULL)
        session_drop(found);
    snapshot_drain(world->snapshot);
    world->may_go[session] = 1;
    enum kv_err err = snap_retain_expire(world->store, world_name(session), 1, diag);
    return err == KV_OK ? give_up(world, 0, diag) : err;
}

/* --- what must be left */

/* What a session may be at a moment of the log. */
struct seen_session {
    int present;
    uint64_t n;
    const struct kv_digest *resident; /* NULL: not yet known */
};

static int is_allowed(const struct world *world, uint32_t session, uint64_t entries,
                      const struct seen_session *seen) {
    int absent_allowed = 1, allowed = 0;
    for (uint32_t i = 0; i < world->fact_count; i++) {
        const struct world_fact *fact = &world->facts[i];
        if (fact->session != session || fact->begin >= entries)
            continue;
        /* Acknowledged before this moment: everything earlier is history. */
        if (fact->acknowledged && fact->end <= entries)
            absent_allowed = allowed = 0;
        if (fact->is_removal)
            absent_allowed = 1;
        else if (seen->present && fact->n == seen->n &&
                 (seen->resident == NULL || fact->coarse ||
                  kv_digest_equal(seen->resident, &fact->resident)))
            allowed = 1;
    }
    return seen->present ? allowed : absent_allowed || world->may_go[session];
}

static int check_session(struct world *world, uint32_t session, uint64_t entries,
                         char text_out[WORLD_TEXT_BYTES]) {
    struct snapshot_entry entry = {.snapshot = 0};
    struct kv_diag diag = {""};
    const char *name = world_name(session);
    enum kv_err err = snapshot_find(world->store, world->alloc, name, &entry, &diag);
    if (err != KV_OK && err != KV_ERR_NOT_FOUND) {
        snprintf(text_out, WORLD_TEXT_BYTES, "%s: %s", name, diag.text);
        return 0;
    }
    struct seen_session seen = {err == KV_OK, entry.head.n, NULL};
    if (!is_allowed(world, session, entries, &seen)) {
        snprintf(text_out, WORLD_TEXT_BYTES, "%s is %s at %llu tokens: not what was acknowledged",
                 name, err == KV_OK ? "there" : "lost", (unsigned long long)entry.head.n);
        return 0;
    }
    if (err != KV_OK)
        return 1;
    if (wake_as(world, session, RECEIPT_TIERS_EXACT, &diag) != KV_OK) {
        snprintf(text_out, WORLD_TEXT_BYTES, "%s does not wake: %s", name, diag.text);
        return 0;
    }
    struct kv_digest resident = life_resident(world_find(world, session));
    seen.resident = &resident;
    if (!is_allowed(world, session, entries, &seen)) {
        snprintf(text_out, WORLD_TEXT_BYTES, "%s woke with other bytes than it was saved with",
                 name);
        return 0;
    }
    world->found[session] = (struct world_fact){
        .session = session, .acknowledged = 1, .n = entry.head.n, .resident = resident};
    world->found_may_go[session] = entry.may_expire;
    return 1;
}

/* What was found is all there is. */
static void rebase(struct world *world) {
    world->fact_count = 0;
    for (uint32_t i = 0; i < WORLD_SESSIONS; i++)
        if (world->found[i].acknowledged)
            world->facts[world->fact_count++] = world->found[i];
    memcpy(world->may_go, world->found_may_go, sizeof world->may_go);
}

/* Invariant 8 needs a first batch after a wake to be seen. */
static int goes_on(struct world *world, char text_out[WORLD_TEXT_BYTES]) {
    char text[SUPPORT_INVARIANTS_TEXT_BYTES];
    struct kv_diag diag = {""};
    enum kv_err err = world_say(world, 0, 300, 4711, &diag);
    uint32_t kept = world->fact_count;
    if (err == KV_OK)
        err = world_save(world, 0, 0, &diag);
    world->fact_count = kept;
    if (err != KV_OK) {
        snprintf(text_out, WORLD_TEXT_BYTES, "does not go on: %s", diag.text);
        return 0;
    }
    int number = support_invariants_check(world->store, text);
    if (number != 0)
        snprintf(text_out, WORLD_TEXT_BYTES, "after going on, invariant %d: %s", number, text);
    struct snapshot_entry entry = {.snapshot = 0};
    int beyond = 1;
    err = snapshot_find(world->store, world->alloc, world_name(0), &entry, &diag);
    struct record_key key = record_key_block(entry.head.lineage, entry.head.block_count);
    if (err == KV_OK)
        err = store_exists(world->store, key.bytes, key.size, &beyond, &diag);
    if (number == 0 && (err != KV_OK || beyond))
        snprintf(text_out, WORLD_TEXT_BYTES, "after going on, invariant 8: %s",
                 err != KV_OK ? diag.text : "a block of a life that was not saved is left");
    return number == 0 && err == KV_OK && !beyond;
}

static void on_store_finding(void *context, const struct store_fsck_finding *finding) {
    char *text = context;
    if (!finding->is_note && text[0] == 0)
        snprintf(text, WORLD_TEXT_BYTES, "fsck, %s: %s", store_fsck_name(finding->kind),
                 finding->text);
}

static void on_care_finding(void *context, const struct snap_care_finding *finding) {
    char *text = context;
    if (!finding->is_note && text[0] == 0)
        snprintf(text, WORLD_TEXT_BYTES, "fsck, %s of %s: %s", finding->kind, finding->session,
                 finding->text);
}

/* A store that no fault of ours has damaged gives fsck nothing to say. */
static int check_fsck(struct world *world, char text_out[WORLD_TEXT_BYTES]) {
    struct kv_diag diag = {""};
    struct store_fsck_report report;
    struct snap_care_report records;
    const struct store_fsck_args store = {
        .store = world->store, .read_data = 1, .each = on_store_finding, .context = text_out};
    const struct snap_care_check_args care = {
        .store = world->store, .alloc = world->alloc, .each = on_care_finding, .context = text_out};
    if (store_fsck(&store, &report, &diag) != KV_OK ||
        snap_care_check(&care, &records, &diag) != KV_OK)
        snprintf(text_out, WORLD_TEXT_BYTES, "fsck: %s", diag.text);
    return text_out[0] == 0;
}

static int check_open(struct world *world, const struct world_check *check,
                      char text_out[WORLD_TEXT_BYTES]) {
    char text[SUPPORT_INVARIANTS_TEXT_BYTES];
    struct kv_diag diag = {""};
    if (world_open(world, check->dir, NULL, &diag) != KV_OK) {
        snprintf(text_out, WORLD_TEXT_BYTES, "does not open: %s", diag.text);
        return 0;
    }
    memset(world->found, 0, sizeof world->found);
    memset(world->found_may_go, 0, sizeof world->found_may_go);
    int number = support_invariants_check(world->store, text);
    int right = number == 0;
    if (!right)
        snprintf(text_out, WORLD_TEXT_BYTES, "invariant %d: %s", number, text);
    for (uint32_t i = 0; right && i < WORLD_SESSIONS; i++)
        right = check_session(world, i, check->entries, text_out);
    return right && check_fsck(world, text_out);
}

int world_right(struct world *world, const struct world_check *check,
                char text_out[WORLD_TEXT_BYTES]) {
    struct disk *disk = world->disk;
    world->disk = NULL;
    text_out[0] = 0;
    int right = check_open(world, check, text_out);
    if (right && check->rebuild) {
        world_close(world);
        support_store_remove_index(check->dir);
        right = check_open(world, check, text_out);
    }
    if (right && check->rebase)
        rebase(world);
    if (right && check->go_on)
        right = goes_on(world, text_out);
    world_close(world);
    world->disk = disk;
    return right;
}
