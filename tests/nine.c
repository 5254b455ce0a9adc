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
#include "tests/support_nine_curve.h"
#include "tests/support_nine_goals.h"
#include "tests/support_nine_life.h"
#include "tests/support_nine_pool.h"
#include "tests/support_nine_tell.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* v3 comes last in both: the last recipe's users sleep and wake. */
static const char usual_recipes[] = "bf16,fp8,v1,v2-quarters,v3-quarters,v3-pressure-k8v8,v3";
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
    "  --parts A,B,…        of fit,prefill,curves,saves,disk,memory,life; wakes: disk and memory.\n"
    "                       Of a run of some of them only, table and files say which, and nothing\n"
    "                       is called proven\n"
    "  --out DIR            writes nine_RECIPE.json and nine_overview.json\n"
    "  --commit TEXT        written there\n";

static int has(const struct nine_results *results, enum nine_part part) {
    return results->wish->parts >> part & 1;
}

/* --- act 1 */

static int act_fit(struct nine_results *results, struct kv_diag *diag) {
    static const struct layout_geometry large = {32, 8, 128};
    const struct nine_room room = {(uint64_t)(54.8 * 1024) << 20, layout_slot_bytes(&large),
                                   layout_meta_frame_bytes(&large), 0};
    struct nine_settings settings = results->wish->settings;
    struct synth small;

    nine_tell_act(results, "Users that fit");
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
            nine_wrong(results, recipe->name, "users predicted and counted differ");
        if (recipe->users_goal && predicted != recipe->users_goal)
            nine_wrong(results, recipe->name, "arithmetic misses the goal of users");
    }
    return 1;
}

/* Somebody sleeps and wakes. */
static int lives(const struct nine_results *results) {
    return results->wish->sessions > results->wish->users &&
           (has(results, NINE_PART_DISK) || has(results, NINE_PART_MEMORY) ||
            has(results, NINE_PART_LIFE));
}

/* --- act 2 */

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

/* Whatever goes wrong here stays here. */
static void act_saves(struct nine_results *results, struct nine *nine,
                      const struct nine_recipe *recipe) {
    struct kv_diag own = {""};
    char parent[512];

    snprintf(parent, sizeof parent, "%.500s", results->wish->settings.dir);
    *strrchr(parent, '/') = 0;
    nine_tell_act(results, "Saves");
    nine->policy = nine_recipe_policy(recipe, results->wish->settings.tokens);
    /* The first recipe is the last: nobody is awake yet. */
    for (uint32_t i = 0; results->curve_count == 0 && i + 1 < results->wish->users; i++)
        if (nine_add(nine, i, &own) != KV_OK)
            break;
    kv_diag_clear(&own);
    enum kv_err err = nine_save_run(nine, parent, &results->saves, &own);
    if (err == KV_ERR_NO_SLOTS)
        printf("  left out, the pool is too small for it: %s\n", own.text);
    else if (err != KV_OK)
        nine_wrong(results, "saves", own.text);
    if (err != KV_OK)
        return;
    results->saved = 1;
    nine_save_tell(&results->saves);
}

/* --- act 2, all of it */

static int run_curve(struct nine_results *results, struct nine *nine,
                     const struct nine_recipe *recipe, struct kv_diag *diag) {
    struct nine_curve *curve = &results->curves[results->curve_count];

    if (nine_curve_run(nine, recipe, results->wish->users, results->wish->steps, curve, diag) !=
        KV_OK)
        return 0;
    results->curve_count++;
    nine_tell_curve(results, curve);
    return 1;
}

/* Without its curve the last recipe has no users yet: wakes alone need one. */
static int make_one(struct nine_results *results, struct nine *nine,
                    const struct nine_recipe *recipe, struct kv_diag *diag) {
    nine->policy = nine_recipe_policy(recipe, results->wish->settings.tokens);
    return !lives(results) ||
           (nine_add(nine, 0, diag) == KV_OK && nine_register(nine, 0, diag) == KV_OK);
}

static int act_curves(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    const struct nine_wish *wish = results->wish;

    nine_tell_act(results, "Recipes, each a curve of its own");
    for (const char *list = wish->recipes; *list;) {
        const struct nine_recipe *recipe = next_recipe(&list, diag);
        if (!recipe || results->curve_count == NINE_RECIPES)
            return 0;
        if (*list && !has(results, NINE_PART_CURVES))
            continue;
        if (!*list && has(results, NINE_PART_SAVES) && wish->sessions > wish->users)
            act_saves(results, nine, recipe);
        nine_drop_all(nine);
        /* Blocks are written only where somebody will sleep: a full length takes minutes. */
        if (!*list && lives(results) && nine_store(nine, diag) != KV_OK)
            return 0;
        if (has(results, NINE_PART_CURVES) || has(results, NINE_PART_LIFE)
                ? !run_curve(results, nine, recipe, diag)
                : !make_one(results, nine, recipe, diag))
            return 0;
    }
    return 1;
}

/* --- act 3 */

static int disk_free(const struct nine_results *results, uint64_t *bytes_out,
                     struct kv_diag *diag) {
    struct statvfs disk;
    char parent[512];

    snprintf(parent, sizeof parent, "%.500s", results->wish->settings.dir);
    *strrchr(parent, '/') = 0;
    if (statvfs(parent, &disk) != 0)
        return kv_diag_set(diag, KV_ERR_IO, "%s: its disk cannot be asked: %s", parent,
                           strerror(errno)),
               0;
    return *bytes_out = (uint64_t)disk.f_bavail * disk.f_frsize, 1;
}

static int check_disk(struct nine_results *results, const struct nine *nine, struct kv_diag *diag) {
    if (!disk_free(results, &results->disk_free, diag))
        return 0;
    int many = has(results, NINE_PART_CURVES) || has(results, NINE_PART_LIFE);
    uint32_t sessions = many ? results->wish->sessions : 1;
    results->disk_need = nine_store_need(nine, sessions);
    printf("  disk: %.2f GiB free, %u sessions write at most %.2f GiB\n",
           (double)results->disk_free / 1073741824.0, sessions,
           (double)results->disk_need / 1073741824.0);
    if (results->disk_need > results->disk_free)
        return kv_diag_set(diag, KV_ERR_NO_SPACE,
                           "the disk has no room for %u sessions: fewer with --sessions or "
                           "--tokens, or another disk with --store",
                           sessions),
               0;
    return 1;
}

/* Sessions grow while they live: by as many tokens as steps of all of them give, at what a token
 * has taken so far. */
static int check_growth(struct nine_results *results, const struct nine *nine,
                        struct kv_diag *diag) {
    const struct nine_curve *curve = &results->curves[results->curve_count - 1];
    const struct nine_point *most = &curve->points[curve->point_count - 1];
    double tokens = most->tokens_s * results->wish->seconds, stored = 0;
    struct store_stats stats;
    uint64_t free_bytes;

    store_stats_get(nine->store, &stats);
    for (uint32_t i = 0; i < results->wish->sessions; i++)
        stored += nine->users[i].tokens;
    results->disk_growth = (uint64_t)(tokens * (double)stats.segment_bytes / stored);
    if (!disk_free(results, &free_bytes, diag))
        return 0;
    printf("  disk: %.2f GiB written, %.2f free; %.0f s of decoding add %.0f tokens, %.2f GiB\n",
           (double)stats.segment_bytes / 1073741824.0, (double)free_bytes / 1073741824.0,
           results->wish->seconds, tokens, (double)results->disk_growth / 1073741824.0);
    if (results->disk_growth > free_bytes)
        return kv_diag_set(diag, KV_ERR_NO_SPACE,
                           "the disk has no room for what %.0f s of decoding add: fewer --seconds "
                           "or --sessions, or another disk with --store",
                           results->wish->seconds),
               0;
    return 1;
}

/* The users of the last curve are awake; each further one comes in the place of one that goes. */
static int make_sessions(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    struct receipt receipt;

    /* Only one was made. */
    if (results->curve_count == 0)
        return nine_settle(nine), 1;
    uint32_t awake = results->curves[results->curve_count - 1].largest;
    for (uint32_t i = awake; i < results->wish->sessions; i++)
        if (nine_sleep(nine, i - awake, &receipt, diag) != KV_OK ||
            nine_add(nine, i, diag) != KV_OK || nine_register(nine, i, diag) != KV_OK)
            return 0;
    for (uint32_t i = 0; i < nine->user_count; i++)
        nine->users[i].away = 0;
    nine_settle(nine);
    printf("  %u sessions exist, %u are awake (%.0f s)\n", results->wish->sessions, awake,
           nine_seconds() - results->begun);
    return check_growth(results, nine, diag);
}

static void tell_wake(const char *name, const struct nine_wake *wake) {
    if (wake->wake_ns)
        printf("  %-6s awake after %9.2f ms, first token after %9.2f; %.4f GB from the disk, "
               "%.4f GB from memory\n",
               name, (double)wake->wake_ns * 1e-6, (double)wake->first_ns * 1e-6,
               (double)wake->door_bytes * 1e-9, (double)wake->ram_bytes * 1e-9);
}

static void tell_memory_times(const struct receipt_layers *at) {
    printf("    since its begin, ms: published %.2f; copies sent %.2f, first layers %.2f, all "
           "%.2f; proof %.2f, its last layers %.2f, ended %.2f; digested %.2f\n",
           (double)at->published_ns * 1e-6, (double)at->sent_ns * 1e-6, (double)at->first_ns * 1e-6,
           (double)at->copied_ns * 1e-6, (double)at->proof_ns * 1e-6, (double)at->last_ns * 1e-6,
           (double)at->proven_ns * 1e-6, (double)at->digested_ns * 1e-6);
}

static int act_wakes(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    static const char *const names[NINE_WAKE_KINDS] = {"disk", "eager", "memory"};
    struct nine_wakes *wakes = &results->wakes;
    uint32_t of = (has(results, NINE_PART_DISK) ? NINE_WAKES_DISK : 0) |
                  (has(results, NINE_PART_MEMORY) ? NINE_WAKES_MEMORY : 0);

    if (!of)
        return 1;
    nine_tell_act(results, "A wake alone, up to its first token");
    if (nine_wakes_run(nine, of, wakes, diag) != KV_OK)
        return 0;
    results->woken = 1;
    for (int round = 0; round < NINE_PAIRS; round++)
        for (int kind = 0; kind < NINE_WAKE_KINDS; kind++) {
            tell_wake(names[kind], &wakes->kinds[kind][round]);
            if (kind == NINE_RAM && of & NINE_WAKES_MEMORY)
                tell_memory_times(&wakes->layers[round]);
        }
    for (int kind = 0; kind < NINE_WAKE_KINDS; kind++) {
        if (!wakes->kinds[kind][0].wake_ns)
            continue;
        printf("  %s, the last:\n", names[kind]);
        nine_tell_stages(&wakes->receipts[kind]);
    }
    for (int round = 0; round < NINE_PAIRS && wakes->plain[round].ns; round++)
        printf("  plain reader%s of the bytes from the disk %.2f ms, %.3f GB/s\n",
               wakes->plain[round].direct ? "" : " (buffered: O_DIRECT is refused here)",
               (double)wakes->plain[round].ns * 1e-6,
               nine_rate(wakes->plain[round].bytes, wakes->plain[round].ns));
    for (int round = 0; round < NINE_PAIRS && wakes->copy_ns[round]; round++)
        printf("  pinned copy of as many bytes %.2f ms, %.2f GB/s\n",
               (double)wakes->copy_ns[round] * 1e-6,
               nine_rate(wakes->copy_bytes, wakes->copy_ns[round]));
    if (wakes->proven != wakes->wakes || wakes->wakes == 0)
        nine_wrong(results, "a wake is not proven", wakes->first_unproven);
    return 1;
}

static int act_life(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    struct nine_life *life = &results->life;
    struct nine_move sum = {0};

    if (!has(results, NINE_PART_LIFE))
        return 1;
    nine_tell_act(results, "More than are awake");
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
           (double)sum.wake_ns / life->move_count * 1e-6, nine_rate(sum.wake_bytes, sum.wake_ns),
           receipt_stage_name(life->last.bound_by));
    nine_tell_score(results, "all sessions", &life->score);
    if (life->proven != life->wakes || life->wakes == 0)
        nine_wrong(results, "a wake is not proven", life->first_unproven);
    if (nine->sleeps_kept != nine->sleeps)
        nine_wrong(results, "a sleep has not kept all needles", nine->first_unkept);
    return 1;
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
                 {"--parts", &wish->part_names},
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

/* 0: none is called so. */
static uint32_t parts_called(const char *name, size_t bytes) {
    if (bytes == strlen("wakes") && memcmp(name, "wakes", bytes) == 0)
        return 1 << NINE_PART_DISK | 1 << NINE_PART_MEMORY;
    for (uint32_t i = 0; i < NINE_PARTS; i++) {
        const char *known = nine_part_name((enum nine_part)i);
        if (strlen(known) == bytes && memcmp(known, name, bytes) == 0)
            return 1u << i;
    }
    return 0;
}

static int check_parts(struct nine_wish *wish) {
    wish->parts = wish->part_names ? 0 : NINE_PARTS_ALL;
    for (const char *list = wish->part_names; list && *list;) {
        size_t bytes = strcspn(list, ",");
        uint32_t found = parts_called(list, bytes);
        if (!found)
            return fprintf(stderr, "nine: --parts: '%.*s' is none of those in nine --help\n",
                           (int)bytes, list),
                   0;
        wish->parts |= found;
        list += bytes + (list[bytes] == ',');
    }
    if (!wish->parts)
        return fprintf(stderr, "nine: --parts: name one or more of those in nine --help\n"), 0;
    return 1;
}

static int settle_wish(struct nine_wish *wish) {
    struct nine_settings *settings = &wish->settings;

    if (!check_recipes(wish) || !check_parts(wish))
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
    nine_tell_act(results, "A prefill of the same length");
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

static void tell_parts(const struct nine_wish *wish) {
    if (wish->parts == NINE_PARTS_ALL)
        return;
    printf("ONLY PARTS of the story:");
    for (uint32_t i = 0; i < NINE_PARTS; i++)
        if (wish->parts >> i & 1)
            printf(" %s", nine_part_name((enum nine_part)i));
    printf("\n");
}

static int run(struct nine_results *results, struct nine *nine, struct kv_diag *diag) {
    const struct nine_wish *wish = results->wish;

    tell_parts(wish);
    measure_copy(results);
    if (nine_open(&wish->settings, wish->sessions, nine, diag) != KV_OK)
        return 0;
    tell_memory(results, nine);
    if (has(results, NINE_PART_FIT) && !act_fit(results, diag))
        return 0;
    nine_tell_act(results, "The disk");
    /* The longest that any policy writes, before anything is begun. */
    nine->policy = nine_recipe_policy(nine_recipe_find("v3", 2), wish->settings.tokens);
    if ((lives(results) && !check_disk(results, nine, diag)) ||
        (has(results, NINE_PART_PREFILL) && wish->sessions > wish->users &&
         !act_prefill(results, nine, diag)) ||
        !act_curves(results, nine, diag))
        return 0;
    if (results->wrong == 0 && lives(results) &&
        (!make_sessions(results, nine, diag) || !act_wakes(results, nine, diag) ||
         !act_life(results, nine, diag)))
        return 0;
    nine_tell_goals(results, nine);
    return !wish->out || nine_write_files(results, nine);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

/* Of parts alone nothing is called proven, whatever they have shown. */
static void tell_end(const struct nine_results *results, int good) {
    int whole = results->wish->parts == NINE_PARTS_ALL;

    printf("%.0f s, %d missed. ", nine_seconds() - results->begun, results->missed);
    if (whole)
        printf("%s\n", good ? "Proven." : "NOT PROVEN.");
    else
        printf("Only parts of the story were run%s\n", good ? "." : ", and something is wrong.");
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
        return fprintf(stderr,
                       "nine: no folder can be made as %s: %s; --store takes one that exists\n",
                       dir, strerror(errno)),
               1;
    snprintf(store, sizeof store, "%s/store", dir);
    wish.settings.dir = store;
    results.wish = &wish;
    results.begun = nine_seconds();
    int good = run(&results, &nine, &diag);
    if (!good)
        printf("WRONG after %.0f s: %s\n", nine_seconds() - results.begun, diag.text);
    good = good && results.wrong == 0;
    tell_end(&results, good);
    nine_close(&nine);
    nine_life_release(&results.life);
    nine_save_release(&results.saves);
    nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return good ? 0 : 1;
}
