/* tests/nine.c - `make gpu-demo`: nine users in one batch, more of them asleep, each proven.
 *
 * Responsible for: the acts, goal and value side by side, one JSON file per recipe and an overview.
 *   fit       users that fit into a pool: arithmetic at 8B, counted at the small geometry
 *   prefill   what a prefill of the same length would cost
 *   curves    each recipe with 1, 2, 4, 5 … users: steps, slots, needles
 *   wakes     one user's, from the disk, eagerly and from memory, while nobody else works
 *   life      the last recipe's users go to sleep and wake by lot while the others decode
 * Not responsible for: users (support_nine.h), slots (support_nine_pool.h), sleep and wake
 * (support_nine_life.h), the files themselves (support_nine_file.h).
 *
 * Exit status: 0, 1 something is wrong, 2 usage. A speed goal that is missed is said as MISSED and
 * is no error.
 */
#include "tests/support_nine_file.h"

#include <assert.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* v3 comes last in both: the last recipe's users sleep and wake. */
static const char usual_recipes[] =
    "bf16,fp8,v1,v2-quarters,v3-quarters,v3-pressure,v3-pressure-k8v8,v3";
static const char all_recipes[] = "bf16,fp8,v1,v2,v2-quarters,v2-pressure,v2-k8v8,v2-quarters-k8v8,"
                                  "v2-pressure-k8v8,v3-quarters,v3-pressure,v3-k8v8,"
                                  "v3-quarters-k8v8,v3-pressure-k8v8,v3";

static const char help[] =
    "usage: nine [options]\n"
    "  --quick              a few seconds at the small geometry\n"
    "  --model NAME         synth:small (default) or synth:8b\n"
    "  --tokens N --users N --sessions N   of a user; awake; that exist\n"
    "  --seconds S          how long sessions sleep and wake (300; 3 with --quick)\n"
    "  --steps N            measured at every count of users\n"
    "  --recipes A,B,…|all  the last one goes on sleeping and waking\n"
    "  --mixed              every second and third session has a half and a quarter\n"
    "  --device cpu|cuda    --device-memory 78.6GiB   --pool 2GiB\n"
    "  --store DIR          a folder for the store, which is made and removed in it\n"
    "  --threads N --seed N --fit-tokens N\n"
    "  --out DIR            writes nine_RECIPE.json and nine_overview.json\n"
    "  --commit TEXT        written there\n";

/* --- the table */

static void wrong(struct nine_results *results, const char *what, const char *why) {
    results->wrong++;
    printf("WRONG %s: %s\n", what, why);
}

static void tell_act(struct nine_results *results, const char *what) {
    printf("\n%s (%.0f s)\n", what, nine_seconds() - results->begun);
    fflush(stdout);
}

static void row(struct nine_results *results, const char *what, double goal, enum nine_sense sense,
                double value) {
    int hit = sense == NINE_AT_LEAST ? value >= goal : value <= goal;

    assert(results->goal_count < NINE_GOALS_MAX);
    struct nine_goal *kept = &results->goals[results->goal_count++];
    *kept = (struct nine_goal){.goal = goal, .value = value, .sense = sense, .hit = hit};
    snprintf(kept->what, sizeof kept->what, "%s", what);
    results->missed += !hit;
    printf("  %-58s %s %8.2f %10.2f  %s\n", what, sense == NINE_AT_LEAST ? ">=" : "<=", goal, value,
           hit ? "" : "MISSED");
}

/* --- act 1 */

static int act_fit(struct nine_results *results, struct kv_diag *diag) {
    static const struct layout_geometry large = {32, 8, 128};
    const struct nine_room room = {(uint64_t)(54.8 * 1024) << 20, layout_slot_bytes(&large),
                                   layout_meta_frame_bytes(&large), 0};
    struct nine_settings settings = results->wish->settings;
    struct synth small;

    tell_act(results, "Users that fit");
    settings.model = "synth:small";
    settings.device = ENGINE_DEVICE_CPU;
    settings.device_memory_bytes = UINT64_MAX;
    settings.tokens = results->wish->fit_tokens;
    settings.reserve_slots = 0;
    settings.mixed = 0;
    if (synth_parse(settings.model, &small, diag) != KV_OK)
        return 0;
    const struct layout_geometry geometry = {small.layers, small.kv_heads, 128};
    uint64_t slots = room.bytes / (8 * room.slot_bytes + room.frame_bytes) * 8;
    settings.pool_bytes = slots * settings.tokens / 131072 / 8 *
                          (8 * layout_slot_bytes(&geometry) + layout_meta_frame_bytes(&geometry));
    if (nine_fit_run(&settings, results->fits, diag) != KV_OK)
        return 0;
    printf("  recipe         131,072 tokens, 8B, 54.8 GiB: goal  predicted    %llu tokens, small, "
           "%.1f MiB: predicted  counted\n",
           (unsigned long long)settings.tokens, (double)settings.pool_bytes / 1048576.0);
    for (uint32_t i = 0; i < NINE_RECIPES; i++) {
        const struct nine_recipe *recipe = nine_recipe_at(i);
        struct image_policy policy = nine_recipe_policy(recipe, 131072);
        uint32_t predicted = nine_pool_fit(&room, &policy, 131072);
        if (!recipe->users_goal && !recipe->best_goal)
            continue;
        char goal[16] = "-";
        if (recipe->users_goal)
            snprintf(goal, sizeof goal, "%u", recipe->users_goal);
        printf("  %-14s %38s %10u %40u %8u\n", recipe->name, goal, predicted,
               results->fits[i].predicted, results->fits[i].counted);
        if (results->fits[i].predicted != results->fits[i].counted)
            wrong(results, recipe->name, "users predicted and counted differ");
        if (recipe->users_goal && predicted != recipe->users_goal)
            wrong(results, recipe->name, "arithmetic misses the goal of users");
    }
    return 1;
}

/* --- act 2 */

static void tell_pool(const struct nine_curve *curve) {
    printf("  slots: %llu predicted, %llu counted, %llu used in the pool\n    by tier (blocks):",
           (unsigned long long)curve->predicted.slots, (unsigned long long)curve->counted.slots,
           (unsigned long long)curve->used);
    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        if (curve->predicted.blocks[tier] || curve->counted.blocks[tier])
            printf(" %s %llu/%llu", layout_tier_name((enum layout_tier)tier),
                   (unsigned long long)curve->predicted.blocks[tier],
                   (unsigned long long)curve->counted.blocks[tier]);
    printf("\n    by stream (slots):");
    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (curve->predicted.streams[stream] || curve->counted.streams[stream])
            printf(" %s %llu/%llu", layout_stream_name((enum layout_stream)stream),
                   (unsigned long long)curve->predicted.streams[stream],
                   (unsigned long long)curve->counted.streams[stream]);
    printf("\n");
}

static void tell_score(struct nine_results *results, const char *what,
                       const struct nine_score *score) {
    static const char *const depths[NINE_DEPTHS] = {"sinks",       "1st quarter", "2nd quarter",
                                                    "3rd quarter", "4th quarter", "window"};

    printf("  needles of %u: right %u of %u (foreign keys %u, absent %u), thief %u, invented %u, "
           "tiers named %u of %u\n   ",
           score->users, score->right, score->asked, score->foreign, score->absent, score->thief,
           score->invented, score->named, score->graded);
    for (uint32_t i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (score->tiers[i].asked)
            printf(" %s %u/%u", layout_tier_name((enum layout_tier)i), score->tiers[i].right,
                   score->tiers[i].asked);
    printf(";");
    for (uint32_t i = 0; i < NINE_DEPTHS; i++)
        printf(" %s %u/%u", depths[i], score->depths[i].right, score->depths[i].asked);
    printf("\n");
    if (!nine_score_good(score))
        wrong(results, what, score->first_wrong);
}

/* Weights and resident KV at the rate of a copy. */
static double floor_ms(const struct nine_results *results, const struct nine_point *point) {
    return results->copy_rate > 0 ? (double)point->step_bytes / results->copy_rate * 1e3 : 0;
}

static void tell_curve(struct nine_results *results, const struct nine_curve *curve) {
    printf("%s%s: %llu tokens filled in %.2f s\n", curve->recipe->name,
           curve->largest < curve->wanted ? ", the pool is full" : "",
           (unsigned long long)curve->filled_tokens, curve->filled_s);
    for (uint32_t i = 0; i < curve->point_count; i++) {
        const struct nine_point *point = &curve->points[i];
        printf("  %2u users: step p50 %9.3f ms, p99 %9.3f; %8.1f tok/s each, %8.1f in all; %6llu "
               "slots; %.2f GB a step, %.1f GB/s, floor %.3f ms\n",
               point->users, point->p50_ms, point->p99_ms, point->tokens_s / point->users,
               point->tokens_s, (unsigned long long)point->slots, (double)point->step_bytes * 1e-9,
               (double)point->step_bytes / point->p50_ms * 1e-6, floor_ms(results, point));
    }
    if (curve->full[0])
        printf("  %u of %u users: %s\n", curve->largest, curve->wanted, curve->full);
    tell_pool(curve);
    if (!curve->equal)
        wrong(results, curve->recipe->name, curve->differs);
    else
        tell_score(results, curve->recipe->name, &curve->score);
    fflush(stdout);
}

static const struct nine_recipe *next_recipe(const char **list, struct kv_diag *diag) {
    size_t bytes = strcspn(*list, ",");
    const struct nine_recipe *recipe = nine_recipe_find(*list, bytes);

    if (!recipe)
        kv_diag_set(diag, KV_ERR_INVALID, "--recipes: '%.*s' is none of those in nine --help",
                    (int)bytes, *list);
    *list += bytes;
    *list += **list == ',';
    return recipe;
}

/* --- saves, in front of the last recipe, under its policy */

static double rate(uint64_t bytes, uint64_t ns) {
    return ns ? (double)bytes / (double)ns : 0;
}

/* Whatever goes wrong here stays here. */
static void act_saves(struct nine_results *results, struct nine *nine,
                      const struct nine_recipe *recipe) {
    struct kv_diag own = {""};
    char parent[512];

    snprintf(parent, sizeof parent, "%.500s", results->wish->settings.dir);
    *strrchr(parent, '/') = 0;
    tell_act(results, "Saves");
    nine->policy = nine_recipe_policy(recipe, results->wish->settings.tokens);
    /* The first recipe is the last: nobody is awake yet. */
    for (uint32_t i = 0; results->curve_count == 0 && i + 1 < results->wish->users; i++)
        if (nine_add(nine, i, &own) != KV_OK)
            break;
    kv_diag_clear(&own);
    if (nine_save_run(nine, parent, &results->saves, &own) != KV_OK) {
        wrong(results, "saves", own.text);
        return;
    }
    results->saved = 1;
    nine_save_tell(&results->saves);
}

/* --- act 2, all of it */

static int act_curves(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    const struct nine_wish *wish = results->wish;

    tell_act(results, "Recipes, each a curve of its own");
    for (const char *list = wish->recipes; *list;) {
        struct nine_curve *curve = &results->curves[results->curve_count];
        const struct nine_recipe *recipe = next_recipe(&list, diag);
        if (!recipe || results->curve_count == NINE_RECIPES)
            return 0;
        if (!*list && wish->sessions > wish->users)
            act_saves(results, nine, recipe);
        nine_drop_all(nine);
        /* Blocks are written only where somebody will sleep: a full length takes minutes. */
        if (!*list && wish->sessions > wish->users && nine_store(nine, diag) != KV_OK)
            return 0;
        if (nine_curve_run(nine, recipe, wish->users, wish->steps, curve, diag) != KV_OK)
            return 0;
        results->curve_count++;
        tell_curve(results, curve);
    }
    return 1;
}

/* --- act 3 */

static int check_disk(struct nine_results *results, const struct nine *nine, struct kv_diag *diag) {
    struct statvfs disk;
    char parent[512];

    snprintf(parent, sizeof parent, "%.500s", results->wish->settings.dir);
    *strrchr(parent, '/') = 0;
    if (statvfs(parent, &disk) != 0)
        return kv_diag_set(diag, KV_ERR_IO, "%s: its disk cannot be asked", parent), 0;
    results->disk_free = (uint64_t)disk.f_bavail * disk.f_frsize;
    results->disk_need = nine_store_need(nine, results->wish->sessions);
    printf("  disk: %.2f GiB free, %u sessions write at most %.2f GiB\n",
           (double)results->disk_free / 1073741824.0, results->wish->sessions,
           (double)results->disk_need / 1073741824.0);
    if (results->disk_need > results->disk_free)
        return kv_diag_set(diag, KV_ERR_NO_SPACE,
                           "the disk has no room for %u sessions: fewer with --sessions or "
                           "--tokens, or another disk with --store",
                           results->wish->sessions),
               0;
    return 1;
}

/* The users of the last curve are awake; each further one comes in the place of one that goes. */
static int make_sessions(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    uint32_t awake = results->curves[results->curve_count - 1].largest;
    struct receipt receipt;

    for (uint32_t i = 0; i < awake; i++)
        if (nine_register(nine, i, diag) != KV_OK)
            return 0;
    for (uint32_t i = awake; i < results->wish->sessions; i++)
        if (nine_sleep(nine, i - awake, &receipt, diag) != KV_OK ||
            nine_add(nine, i, diag) != KV_OK || nine_register(nine, i, diag) != KV_OK)
            return 0;
    for (uint32_t i = 0; i < nine->user_count; i++)
        nine->users[i].away = 0;
    nine_settle(nine);
    printf("  %u sessions exist, %u are awake (%.0f s)\n", results->wish->sessions, awake,
           nine_seconds() - results->begun);
    return 1;
}

static int act_wakes(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    static const char *const names[NINE_WAKE_KINDS] = {"disk", "eager", "memory"};
    struct nine_wakes *wakes = &results->wakes;

    tell_act(results, "A wake alone, up to its first token");
    if (nine_wakes_run(nine, wakes, diag) != KV_OK)
        return 0;
    for (int round = 0; round < NINE_PAIRS; round++)
        for (int kind = 0; kind < NINE_WAKE_KINDS; kind++) {
            const struct nine_wake *wake = &wakes->kinds[kind][round];
            printf("  %-6s awake after %9.2f ms, first token after %9.2f; %.4f GB from the disk, "
                   "%.4f GB from memory\n",
                   names[kind], (double)wake->wake_ns * 1e-6, (double)wake->first_ns * 1e-6,
                   (double)wake->door_bytes * 1e-9, (double)wake->ram_bytes * 1e-9);
        }
    for (int round = 0; round < NINE_PAIRS; round++)
        printf("  pinned copy of as many bytes %.2f ms, %.2f GB/s\n",
               (double)wakes->copy_ns[round] * 1e-6,
               rate(wakes->copy_bytes, wakes->copy_ns[round]));
    if (wakes->proven != wakes->wakes || wakes->wakes == 0)
        wrong(results, "a wake is not proven", wakes->first_unproven);
    return 1;
}

/* Loading is read, unzip, copy and digest beside each other; the rest comes before or after it. */
static void tell_stages(const struct receipt *wake) {
    uint64_t beside = wake->stage_ns[RECEIPT_READ] + wake->stage_ns[RECEIPT_UNZIP] +
                      wake->stage_ns[RECEIPT_COPY] + wake->stage_ns[RECEIPT_DIGEST];
    uint64_t known = wake->load_ns;

    printf("   ");
    for (uint32_t i = 0; i < RECEIPT_STAGE_COUNT; i++) {
        if (wake->stage_ns[i])
            printf(" %s %.2f", receipt_stage_name((enum receipt_stage)i),
                   (double)wake->stage_ns[i] * 1e-6);
        known += wake->stage_ns[i];
    }
    printf(" ms; loading %.2f, unnamed %.2f ms; %s, %u in flight, %u unzip; bound by %s\n",
           (double)wake->load_ns * 1e-6, ((double)wake->wall_ns - (double)(known - beside)) * 1e-6,
           wake->door, wake->in_flight_most, wake->unzip_threads,
           receipt_stage_name(wake->bound_by));
}

static int act_life(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    struct nine_life *life = &results->life;
    struct nine_move sum = {0};

    tell_act(results, "More than are awake");
    if (nine_live(nine, results->wish->seconds, life, diag) != KV_OK)
        return 0;
    results->lived = 1;
    for (uint32_t i = 0; i < life->move_count; i++) {
        sum.sleep_ns += life->moves[i].sleep_ns;
        sum.wake_ns += life->moves[i].wake_ns;
        sum.sleep_bytes += life->moves[i].sleep_bytes;
        sum.wake_bytes += life->moves[i].wake_bytes;
    }
    printf("  %u exchanges while others decode: sleep %.1f ms, wake %.1f ms, %.3f GB/s read; bound "
           "by %s\n",
           life->move_count, (double)sum.sleep_ns / life->move_count * 1e-6,
           (double)sum.wake_ns / life->move_count * 1e-6, rate(sum.wake_bytes, sum.wake_ns),
           receipt_stage_name(life->last.bound_by));
    for (uint32_t i = 0; i < life->alone_count; i++) {
        printf("  wake alone %.1f ms, %.3f GB at %.3f GB/s; plain reader%s %.3f GB/s\n",
               (double)life->alone[i].wake_ns * 1e-6, (double)life->alone[i].wake_bytes * 1e-9,
               rate(life->alone[i].wake_bytes, life->alone[i].wake_ns),
               life->plain[i].direct ? "" : " (buffered: O_DIRECT is refused here)",
               rate(life->plain[i].bytes, life->plain[i].ns));
        tell_stages(&life->alone_receipts[i]);
    }
    tell_score(results, "all sessions", &life->score);
    if (life->proven != life->wakes || life->wakes == 0)
        wrong(results, "a wake is not proven", life->first_unproven);
    return 1;
}

/* --- goal and value */

static int by_ratio(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median of the pairs. */
static double of_plain(const struct nine_life *life) {
    double ratios[NINE_PAIRS] = {0};

    for (uint32_t i = 0; i < life->alone_count; i++)
        ratios[i] = rate(life->alone[i].wake_bytes, life->alone[i].wake_ns) /
                    rate(life->plain[i].bytes, life->plain[i].ns);
    qsort(ratios, life->alone_count, sizeof ratios[0], by_ratio);
    return life->alone_count ? ratios[life->alone_count / 2] : 0;
}

static void tell_best_use(struct nine_results *results, const struct nine *nine) {
    char what[96];

    for (uint32_t i = 0; i < NINE_RECIPES; i++) {
        const struct nine_recipe *recipe = nine_recipe_at(i);
        struct image_policy policy = nine_recipe_policy(recipe, 131072);
        const struct nine_room room = {results->slots.pool_bytes, results->slots.slot_bytes,
                                       results->slots.meta_frame_bytes, results->slots.reserve};
        if (!recipe->best_goal || nine->synth.layers != 32)
            continue;
        snprintf(what, sizeof what, "users of 131,072 tokens in our own pool, %s", recipe->name);
        row(results, what, recipe->best_goal, NINE_AT_LEAST, nine_pool_fit(&room, &policy, 131072));
    }
}

static double ms_of(const uint64_t *ns, uint32_t count, double share) {
    struct nine_gaps gaps = {(uint64_t *)ns, count};

    return nine_gaps_ms(&gaps, share);
}

/* Who kept the others waiting: stretches in the order of a sleep and of a wake, then gaps. */
static void tell_holds(struct nine_holds *holds) {
    printf("  a step: p50 %.3f ms, of it not waiting for the device %.3f (p99 %.3f)\n",
           ms_of(holds->step_ns, holds->steps, 0.5), ms_of(holds->host_ns, holds->steps, 0.5),
           ms_of(holds->host_ns, holds->steps, 0.99));
    for (uint32_t kind = NINE_SLEEPS; kind < NINE_MOVE_KINDS; kind++)
        for (uint32_t i = 0; i < NINE_PLACES; i++) {
            const struct nine_place *place = &holds->places[kind][i];
            if (place->count)
                printf("  %s, stretch %2u: %4u times, mean %8.3f ms, most %8.3f, %u long gaps\n",
                       nine_move_name((enum nine_move_kind)kind), i + 1, place->count,
                       (double)place->sum_ns / place->count * 1e-6, (double)place->most_ns * 1e-6,
                       place->gaps);
        }
    printf("  long gaps (over 1.5 x quiet p50) that were steps themselves: %u; longest of all:\n",
           holds->slow_steps);
    for (uint32_t i = 0; i < NINE_LONGEST && holds->longest[i].ns; i++)
        printf("    %8.3f ms: step %8.3f, %s stretch %u %8.3f\n",
               (double)holds->longest[i].ns * 1e-6, (double)holds->longest[i].step_ns * 1e-6,
               nine_move_name(holds->longest[i].kind), holds->longest[i].place + 1,
               (double)holds->longest[i].hold_ns * 1e-6);
}

static uint64_t middle(const uint64_t ns[NINE_PAIRS]) {
    double sorted[NINE_PAIRS];

    for (int i = 0; i < NINE_PAIRS; i++)
        sorted[i] = (double)ns[i];
    qsort(sorted, NINE_PAIRS, sizeof sorted[0], by_ratio);
    return (uint64_t)sorted[NINE_PAIRS / 2];
}

/* A resume against a prefill of as many tokens, and wakes against what bounds them. */
static void tell_wakes(struct nine_results *results, const struct nine *nine) {
    struct nine_wakes *wakes = &results->wakes;
    const struct nine_life *life = &results->life;
    uint64_t plain_ns[NINE_PAIRS], plain_bytes = life->plain[0].bytes;
    double tokens = nine->users[wakes->user].tokens;
    double prefill_s = results->prefill.seconds * tokens / (double)nine->settings.tokens;
    struct nine_wake disk = *nine_wakes_median(wakes, NINE_EXACT, 0);
    struct nine_wake memory = *nine_wakes_median(wakes, NINE_RAM, 0);
    struct nine_wake exact = *nine_wakes_median(wakes, NINE_EXACT, 1);
    struct nine_wake eager = *nine_wakes_median(wakes, NINE_EAGER, 1);

    for (int i = 0; i < NINE_PAIRS; i++)
        plain_ns[i] = (uint64_t)((double)life->plain[i].ns * (double)plain_bytes /
                                 (double)life->plain[i].bytes);
    double floor_s = (double)disk.door_bytes / rate(plain_bytes, middle(plain_ns)) * 1e-9;
    row(results, "resume from the disk over a prefill, times as fast", 0.9 * prefill_s / floor_s,
        NINE_AT_LEAST, prefill_s / ((double)disk.wake_ns * 1e-9));
    row(results, "resume from memory over a prefill, times as fast", 60, NINE_AT_LEAST,
        prefill_s / ((double)memory.wake_ns * 1e-9));
    row(results, "wake from memory over a pinned copy of the same bytes", 0.90, NINE_AT_LEAST,
        (double)middle(wakes->copy_ns) / (double)memory.wake_ns);
    row(results, "eager wake's first token over the exact one's",
        1.05 * (double)eager.door_bytes / (double)exact.door_bytes, NINE_AT_MOST,
        (double)eager.first_ns / (double)exact.first_ns);
    row(results, "wakes alone proven", wakes->wakes, NINE_AT_LEAST, wakes->proven);
}

static void save_rows(struct nine_results *results) {
    struct nine_saves *saves = &results->saves;
    const struct receipt *full = &saves->full;
    const struct nine_save_step *of_short = saves->lengths[0].steps;
    const struct nine_save_step *of_long = saves->lengths[1].steps;
    double most = 0;

    row(results, "full save over a plain writer of the same bytes", 0.90, NINE_AT_LEAST,
        rate(full->door_bytes, full->wall_ns) / rate(saves->plain.bytes, saves->plain.ns));
    if (full->stage_ns[RECEIPT_COPY])
        row(results, "decoding blocked by a full save over its copy-out", 1.10, NINE_AT_MOST,
            (double)saves->held_ns / (double)full->stage_ns[RECEIPT_COPY]);
    if (saves->others) {
        row(results, "decode p50 of the others while it saves over quiet", 1.02, NINE_AT_MOST,
            nine_gaps_ms(&saves->saving, 0.5) / nine_gaps_ms(&saves->quiet, 0.5));
        row(results, "decode p99 of the others while it saves over quiet", 1.10, NINE_AT_MOST,
            nine_gaps_ms(&saves->saving, 0.99) / nine_gaps_ms(&saves->quiet, 0.99));
    }
    for (uint32_t i = 0; i < NINE_SAVE_STEPS; i++) {
        char what[96];
        for (uint32_t k = 0; k < NINE_SAVE_USERS; k++) {
            const struct nine_save_step *step = &saves->lengths[k].steps[i];
            double share = (double)step->bytes / (double)step->allowed_bytes;
            most = share > most ? share : most;
        }
        snprintf(what, sizeof what, "save of %u tokens, long over short, without the proof",
                 of_long[i].tokens);
        row(results, what, 1.10, NINE_AT_MOST,
            (double)of_long[i].after_proof_ns / (double)of_short[i].after_proof_ns);
    }
    row(results, "bytes of a save over those allowed, the most", 1, NINE_AT_MOST, most);
}

static void tell_goals(struct nine_results *results, const struct nine *nine) {
    struct nine_life *life = &results->life;
    uint32_t unequal = 0, asked = 0, right = 0, thief = 0, invented = 0;

    tell_act(results, "Goal and value");
    for (uint32_t i = 0; i < results->curve_count; i++) {
        const struct nine_curve *curve = &results->curves[i];
        unequal += !curve->equal;
        asked += curve->score.asked;
        right += curve->score.right;
        thief += curve->score.thief;
        invented += curve->score.invented;
    }
    row(results, "recipes whose slots predicted and counted differ", 0, NINE_AT_MOST, unequal);
    row(results, "needles right", asked, NINE_AT_LEAST, right);
    row(results, "needles answered with another user's value", 0, NINE_AT_MOST, thief);
    row(results, "values invented for absent keys", 0, NINE_AT_MOST, invented);
    tell_best_use(results, nine);
    for (uint32_t i = 0; i < results->curve_count && results->copy_rate > 0; i++) {
        const struct nine_curve *curve = &results->curves[i];
        const struct nine_point *most = &curve->points[curve->point_count - 1];
        char what[96];
        snprintf(what, sizeof what, "step of %u users over floor, %s", most->users,
                 curve->recipe->name);
        row(results, what, 1.15, NINE_AT_MOST, most->p50_ms / floor_ms(results, most));
    }
    if (results->saved)
        save_rows(results);
    if (!results->lived)
        return;
    tell_wakes(results, nine);
    double quiet = nine_gaps_ms(&life->quiet, 0.5), quiet_p99 = nine_gaps_ms(&life->quiet, 0.99);
    row(results, "wakes proven (digests, equal bits, 0 prefilled, needles)", life->wakes,
        NINE_AT_LEAST, life->proven);
    row(results, "needles right of all sessions at the end", life->score.asked, NINE_AT_LEAST,
        life->score.right);
    row(results, "wake over a plain reader of the same bytes (median of 3)", 0.90, NINE_AT_LEAST,
        of_plain(life));
    printf("  decoding of the others: quiet p50 %.3f ms, p99 %.3f (%u steps); meanwhile p50 %.3f, "
           "p99 %.3f, most %.3f (%u steps)\n",
           quiet, quiet_p99, life->quiet.count, nine_gaps_ms(&life->moving, 0.5),
           nine_gaps_ms(&life->moving, 0.99), nine_gaps_ms(&life->moving, 1), life->moving.count);
    tell_holds(life->holds);
    row(results, "decode p50 of the others over quiet", 1.02, NINE_AT_MOST,
        nine_gaps_ms(&life->moving, 0.5) / quiet);
    row(results, "decode p99 of the others over quiet", 1.10, NINE_AT_MOST,
        nine_gaps_ms(&life->moving, 0.99) / quiet_p99);
}

/* --- main */

/* "2GiB", "78.6GiB", "512MiB" or bytes; 0: none of these. */
static uint64_t size_of(const char *text) {
    char *unit;
    double value = strtod(text, &unit);

    if (strcmp(unit, "GiB") == 0)
        value *= 1073741824.0;
    else if (strcmp(unit, "MiB") == 0)
        value *= 1048576.0;
    else if (*unit != 0)
        return 0;
    return value >= 1 && value < 1e18 ? (uint64_t)value : 0;
}

static int number_option(struct nine_wish *wish, const char *name, const char *text) {
    struct nine_settings *settings = &wish->settings;
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    const struct {
        const char *name;
        uint32_t *at;
    } small[] = {{"--users", &wish->users},
                 {"--sessions", &wish->sessions},
                 {"--steps", &wish->steps},
                 {"--fit-tokens", &wish->fit_tokens},
                 {"--threads", &settings->threads}};

    if (*text < '0' || *text > '9' || *end != 0 || value > UINT32_MAX)
        return 0;
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++)
        if (strcmp(name, small[i].name) == 0)
            return *small[i].at = (uint32_t)value, 1;
    if (strcmp(name, "--tokens") == 0)
        return settings->tokens = value, 1;
    if (strcmp(name, "--seed") == 0)
        return settings->seed = value, 1;
    if (strcmp(name, "--seconds") == 0)
        return wish->seconds = (double)value, 1;
    return 0;
}

static int text_option(struct nine_wish *wish, const char *name, const char *text) {
    const struct {
        const char *name;
        const char **at;
    } texts[] = {{"--model", &wish->settings.model},
                 {"--recipes", &wish->recipes},
                 {"--device", &wish->device},
                 {"--device-memory", &wish->memory},
                 {"--pool", &wish->pool},
                 {"--store", &wish->settings.dir},
                 {"--out", &wish->out},
                 {"--commit", &wish->commit}};

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (strcmp(name, texts[i].name) == 0)
            return *texts[i].at = text, 1;
    return number_option(wish, name, text);
}

/* Room for everybody at 16 bits, where nobody says how much. */
static uint64_t usual_pool(const struct nine_wish *wish) {
    const struct layout_geometry small = {4, 2, 128};
    const struct image_policy plain = {.recipe = IMAGE_RECIPE_BF16};
    struct nine_pool pool = {0};

    nine_pool_predict(&plain, wish->settings.tokens + 2048, &pool);
    return (wish->users * pool.slots + 256) *
           (layout_slot_bytes(&small) + layout_meta_frame_bytes(&small));
}

static int check_recipes(struct nine_wish *wish) {
    struct kv_diag diag = {""};

    if (strcmp(wish->recipes, "all") == 0)
        wish->recipes = all_recipes;
    for (const char *list = wish->recipes; *list;)
        if (!next_recipe(&list, &diag))
            return fprintf(stderr, "nine: %s\n", diag.text), 0;
    return 1;
}

static int settle_wish(struct nine_wish *wish) {
    struct nine_settings *settings = &wish->settings;

    if (!check_recipes(wish))
        return 0;

    wish->gpu = strcmp(wish->device, "cuda") == 0;
    if (!wish->gpu && strcmp(wish->device, "cpu") != 0)
        return fprintf(stderr, "nine: --device is cpu or cuda\n"), 0;
    settings->device = wish->gpu ? ENGINE_DEVICE_CUDA : ENGINE_DEVICE_CPU;
    settings->device_memory_bytes = wish->memory ? size_of(wish->memory) : UINT64_MAX;
    settings->pool_bytes =
        wish->pool ? size_of(wish->pool) : (wish->gpu ? UINT64_MAX : usual_pool(wish));
    if (settings->pool_bytes == 0 || settings->device_memory_bytes == 0)
        return fprintf(stderr, "nine: a size is a number with MiB, GiB or nothing behind it\n"), 0;
    if (wish->users < 1 || wish->sessions < wish->users || wish->sessions > NINE_SESSIONS_MAX)
        return fprintf(stderr, "nine: users are 1 or more, sessions as many or more, at most %d\n",
                       NINE_SESSIONS_MAX),
               0;
    return 1;
}

static int parse(int argc, char **argv, struct nine_wish *wish) {
    *wish = (struct nine_wish){.settings = {.model = "synth:small",
                                            .tokens = 4096,
                                            .seed = 1,
                                            .threads = 1,
                                            .reserve_slots = 64,
                                            .ram_wanted = 1},
                               .users = 4,
                               .sessions = 6,
                               .steps = 50,
                               .fit_tokens = 4096,
                               .seconds = 300,
                               .recipes = usual_recipes,
                               .commit = "unknown",
                               .device = "cpu"};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            wish->quick = 1;
            wish->users = 3;
            wish->sessions = 5;
            wish->steps = 8;
            wish->seconds = 1;
            wish->settings.tokens = wish->fit_tokens = NINE_TOKENS_MIN;
            wish->recipes = "bf16,v3-pressure-k8v8,v3-quarters";
        } else if (strcmp(argv[i], "--mixed") == 0) {
            wish->settings.mixed = 1;
        } else if (strcmp(argv[i], "--help") == 0) {
            printf("%s  recipes:", help);
            for (uint32_t k = 0; k < NINE_RECIPES; k++)
                printf(" %s", nine_recipe_at(k)->name);
            printf("\n");
            return 0;
        } else if (i + 1 == argc || !text_option(wish, argv[i], argv[i + 1])) {
            fprintf(stderr, "nine: %s: not understood\n%s", argv[i], help);
            return 2;
        } else {
            i++;
        }
    }
    return settle_wish(wish) ? -1 : 2;
}

static void tell_memory(struct nine_results *results, const struct nine *nine) {
    const struct nine_settings *settings = &nine->settings;

    engine_slots(nine->engine, &results->slots);
    printf("%s on %s, opened in %.1f s: weights %.2f GiB, pool %.2f GiB (%u slots of %llu KiB)",
           settings->model, nine->model.device_name, nine->opened_s,
           (double)nine->model.weight_bytes / 1073741824.0,
           (double)results->slots.pool_bytes / 1073741824.0, results->slots.total,
           (unsigned long long)results->slots.slot_bytes / 1024);
    if (settings->device_memory_bytes != UINT64_MAX)
        printf(", workspace and the rest %.2f of %.2f GiB",
               (double)(settings->device_memory_bytes - nine->model.weight_bytes -
                        results->slots.pool_bytes) /
                   1073741824.0,
               (double)settings->device_memory_bytes / 1073741824.0);
    printf("\n");
}

/* In the policy of the last recipe, whose users sleep and wake. */
static int act_prefill(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    const char *last = strrchr(results->wish->recipes, ',');
    struct nine_prefill *prefill = &results->prefill;

    last = last ? last + 1 : results->wish->recipes;
    const struct nine_recipe *recipe = next_recipe(&last, diag);
    if (!recipe)
        return 0;
    tell_act(results, "A prefill of the same length");
    nine->policy = nine_recipe_policy(recipe, nine->settings.tokens);
    if (nine_prefill_run(nine, prefill, diag) != KV_OK)
        return 0;
    printf("  %s: %u chunks of 256 tokens each at", recipe->name, prefill->chunks);
    for (int i = 0; i < NINE_PREFILL_DEPTHS; i++)
        printf(" %llu: %.3f ms%s", (unsigned long long)prefill->depths[i], prefill->chunk_ms[i],
               i + 1 < NINE_PREFILL_DEPTHS ? "," : "");
    printf("; along straight lines between them %llu tokens take %.2f s, %.0f tok/s\n",
           (unsigned long long)nine->settings.tokens, prefill->seconds,
           (double)nine->settings.tokens / prefill->seconds);
    return 1;
}

static void measure_copy(struct nine_results *results) {
    const char *why;

    results->copy_rate = nine_copy_rate(results->wish->settings.device, &why);
    if (results->copy_rate > 0)
        printf("a copy on this device moves %.1f GB/s\n", results->copy_rate * 1e-9);
    else
        printf("no copy rate, so no floors: %s\n", why ? why : "no memory");
}

static int run(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    const struct nine_wish *wish = results->wish;

    measure_copy(results);
    if (nine_open(&wish->settings, wish->sessions, nine, diag) != KV_OK)
        return 0;
    tell_memory(results, nine);
    if (!act_fit(results, diag))
        return 0;
    tell_act(results, "The disk");
    /* The longest that any policy writes, before anything is begun. */
    nine->policy = nine_recipe_policy(nine_recipe_find("v3", 2), wish->settings.tokens);
    int lives = wish->sessions > wish->users;
    if ((lives && (!check_disk(results, nine, diag) || !act_prefill(results, nine, diag))) ||
        !act_curves(results, nine, diag))
        return 0;
    if (results->wrong == 0 && lives &&
        (!make_sessions(results, nine, diag) || !act_wakes(results, nine, diag) ||
         !act_life(results, nine, diag)))
        return 0;
    tell_goals(results, nine);
    return !wish->out || nine_write_files(results, nine);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

int main(int argc, char **argv) {
    static struct nine_results results;
    static struct nine nine;
    static struct nine_wish wish;
    struct kv_diag diag = {""};
    char dir[400], store[420];
    int status = parse(argc, argv, &wish);

    if (status >= 0)
        return status;
    snprintf(dir, sizeof dir, "%.300s/nine-XXXXXX", wish.settings.dir ? wish.settings.dir : "/tmp");
    if (!mkdtemp(dir))
        return fprintf(stderr, "nine: no folder can be made as %s\n", dir), 1;
    snprintf(store, sizeof store, "%s/store", dir);
    wish.settings.dir = store;
    results.wish = &wish;
    results.begun = nine_seconds();
    int good = run(&results, &nine, &diag);
    if (!good)
        printf("WRONG after %.0f s: %s\n", nine_seconds() - results.begun, diag.text);
    good = good && results.wrong == 0;
    printf("%.0f s, %d missed. %s\n", nine_seconds() - results.begun, results.missed,
           good ? "Proven." : "NOT PROVEN.");
    nine_close(&nine);
    nine_life_release(&results.life);
    nine_save_release(&results.saves);
    nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return good ? 0 : 1;
}
