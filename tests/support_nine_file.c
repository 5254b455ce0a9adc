/* tests/support_nine_file.c - what the demonstration was asked for and has found, and its files.
 *
 * Responsible for: what support_nine_file.h says.
 * Not responsible for: measuring.
 */
#include "tests/support_nine_file.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>

const char *nine_part_name(enum nine_part part) {
    static const char *const names[NINE_PARTS] = {"fit",  "prefill", "curves", "saves",
                                                  "disk", "memory",  "life"};

    return names[part];
}

static void add_parts(cJSON *root, uint32_t wanted) {
    cJSON *parts;

    cJSON_AddBoolToObject(root, "whole", wanted == NINE_PARTS_ALL);
    parts = cJSON_AddArrayToObject(root, "parts");
    for (uint32_t i = 0; i < NINE_PARTS; i++)
        if (wanted >> i & 1)
            cJSON_AddItemToArray(parts, cJSON_CreateString(nine_part_name((enum nine_part)i)));
}

static cJSON *begin_file(const struct nine_results *results, const struct nine *nine) {
    const struct nine_wish *wish = results->wish;
    cJSON *root = cJSON_CreateObject();
    char date[32];
    time_t now = time(NULL);
    struct tm utc;

    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    cJSON_AddStringToObject(root, "commit", wish->commit);
    cJSON_AddStringToObject(root, "date", date);
    add_parts(root, wish->parts);
    cJSON_AddStringToObject(root, "device", nine->model.device_name);
    cJSON_AddStringToObject(root, "model", wish->settings.model);
    cJSON_AddNumberToObject(root, "tokens", (double)wish->settings.tokens);
    cJSON_AddNumberToObject(root, "seed", (double)wish->settings.seed);
    cJSON_AddNumberToObject(root, "weight_bytes", (double)nine->model.weight_bytes);
    cJSON_AddNumberToObject(root, "pool_bytes", (double)results->slots.pool_bytes);
    cJSON_AddNumberToObject(root, "pool_slots", results->slots.total);
    cJSON_AddNumberToObject(root, "copy_bytes_per_s", results->copy_rate);
    if (wish->settings.device_memory_bytes != UINT64_MAX)
        cJSON_AddNumberToObject(root, "device_memory_bytes",
                                (double)wish->settings.device_memory_bytes);
    return root;
}

static int end_file(const struct nine_results *results, const char *name, cJSON *root) {
    char path[600];
    char *text = cJSON_Print(root);

    snprintf(path, sizeof path, "%.400s/nine_%.100s.json", results->wish->out, name);
    FILE *file = text ? fopen(path, "we") : NULL;
    int good = file && fprintf(file, "%s\n", text) > 0;
    if (file && fclose(file) != 0)
        good = 0;
    cJSON_free(text);
    cJSON_Delete(root);
    if (!good)
        fprintf(stderr, "nine: %s cannot be written\n", path);
    return good;
}

/* By tier and by depth; `right` and `margin` are what they are called. */
static void add_tallies(cJSON *to, const struct nine_tally tiers[LAYOUT_TIER_COUNT],
                        const struct nine_tally depths[NINE_DEPTHS], const char *right,
                        const char *margin) {
    cJSON *by_tier = cJSON_AddObjectToObject(to, "by_tier");
    cJSON *by_depth = cJSON_AddArrayToObject(to, "by_depth");

    for (uint32_t i = 0; i < LAYOUT_TIER_COUNT; i++) {
        if (!tiers[i].asked)
            continue;
        cJSON *tier = cJSON_AddObjectToObject(by_tier, layout_tier_name((enum layout_tier)i));
        cJSON_AddNumberToObject(tier, "asked", tiers[i].asked);
        cJSON_AddNumberToObject(tier, right, tiers[i].right);
        cJSON_AddNumberToObject(tier, margin, (double)tiers[i].margin);
    }
    for (uint32_t i = 0; i < NINE_DEPTHS; i++) {
        cJSON *depth = cJSON_CreateObject();
        cJSON_AddNumberToObject(depth, "asked", depths[i].asked);
        cJSON_AddNumberToObject(depth, right, depths[i].right);
        cJSON_AddItemToArray(by_depth, depth);
    }
}

static void add_score(cJSON *to, const struct nine_score *score) {
    cJSON *own = cJSON_AddObjectToObject(to, "needles");

    cJSON_AddNumberToObject(own, "users", score->users);
    cJSON_AddNumberToObject(own, "asked", score->asked);
    cJSON_AddNumberToObject(own, "right", score->right);
    cJSON_AddNumberToObject(own, "thief", score->thief);
    cJSON_AddNumberToObject(own, "invented", score->invented);
    cJSON_AddNumberToObject(own, "graded", score->graded);
    cJSON_AddNumberToObject(own, "tiers_named", score->named);
    add_tallies(own, score->tiers, score->depths, "right", "margin_least");
}

static void add_kept(cJSON *to, const struct nine_kept *kept) {
    cJSON *own = cJSON_AddObjectToObject(to, "needles_kept");

    cJSON_AddNumberToObject(own, "users", kept->users);
    cJSON_AddNumberToObject(own, "asked", kept->asked);
    cJSON_AddNumberToObject(own, "kept", kept->kept);
    cJSON_AddNumberToObject(own, "least_of_a_user", kept->least);
    add_tallies(own, kept->tiers, kept->depths, "kept", "hole_nats_least");
}

static void add_pool(cJSON *to, const struct nine_curve *curve) {
    cJSON *tiers = cJSON_AddObjectToObject(to, "blocks_by_tier");
    cJSON *streams = cJSON_AddObjectToObject(to, "slots_by_stream");

    cJSON_AddNumberToObject(to, "slots_predicted", (double)curve->predicted.slots);
    cJSON_AddNumberToObject(to, "slots_counted", (double)curve->counted.slots);
    cJSON_AddNumberToObject(to, "slots_used", (double)curve->used);
    cJSON_AddBoolToObject(to, "equal", curve->equal);
    for (uint32_t i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (curve->counted.blocks[i])
            cJSON_AddNumberToObject(tiers, layout_tier_name((enum layout_tier)i),
                                    (double)curve->counted.blocks[i]);
    for (uint32_t i = 0; i < LAYOUT_STREAM_COUNT; i++)
        if (curve->counted.streams[i])
            cJSON_AddNumberToObject(streams, layout_stream_name((enum layout_stream)i),
                                    (double)curve->counted.streams[i]);
}

static void add_curve(cJSON *to, const struct nine_curve *curve, uint64_t weight_bytes,
                      double copy_rate) {
    cJSON *points = cJSON_CreateArray();

    cJSON_AddStringToObject(to, "recipe", curve->recipe->name);
    cJSON_AddNumberToObject(to, "users_wanted", curve->wanted);
    cJSON_AddNumberToObject(to, "users_largest", curve->largest);
    if (curve->full[0])
        cJSON_AddStringToObject(to, "full", curve->full);
    for (uint32_t i = 0; i < curve->point_count; i++) {
        const struct nine_point *point = &curve->points[i];
        cJSON *own = cJSON_CreateObject();
        cJSON_AddStringToObject(own, "recipe", curve->recipe->name);
        cJSON_AddNumberToObject(own, "users", point->users);
        cJSON_AddNumberToObject(own, "steps", point->steps);
        cJSON_AddNumberToObject(own, "p50_ms", point->p50_ms);
        cJSON_AddNumberToObject(own, "p99_ms", point->p99_ms);
        cJSON_AddNumberToObject(own, "tokens_s", point->tokens_s);
        cJSON_AddNumberToObject(own, "tokens_s_user", point->tokens_s / point->users);
        cJSON_AddNumberToObject(own, "slots", (double)point->slots);
        cJSON_AddNumberToObject(own, "step_bytes", (double)point->step_bytes);
        cJSON_AddNumberToObject(own, "kv_bytes", (double)(point->step_bytes - weight_bytes));
        if (copy_rate > 0)
            cJSON_AddNumberToObject(own, "floor_ms", (double)point->step_bytes / copy_rate * 1e3);
        cJSON *tiers = cJSON_AddObjectToObject(own, "blocks_by_tier");
        for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
            if (point->pool.blocks[tier])
                cJSON_AddNumberToObject(tiers, layout_tier_name((enum layout_tier)tier),
                                        (double)point->pool.blocks[tier]);
        cJSON_AddItemToArray(points, own);
    }
    cJSON_AddItemToObject(to, "points", points);
    add_pool(to, curve);
    add_score(to, &curve->score);
    add_kept(to, &curve->kept);
}

static void add_life(cJSON *to, struct nine_results *results) {
    struct nine_life *life = &results->life;
    cJSON *own = cJSON_AddObjectToObject(to, "life");

    cJSON_AddStringToObject(own, "recipe", results->curves[results->curve_count - 1].recipe->name);
    cJSON_AddNumberToObject(own, "sessions", results->wish->sessions);
    cJSON_AddNumberToObject(own, "seconds", results->wish->seconds);
    cJSON_AddNumberToObject(own, "disk_free_bytes", (double)results->disk_free);
    cJSON_AddNumberToObject(own, "disk_need_bytes", (double)results->disk_need);
    cJSON_AddNumberToObject(own, "wakes", life->wakes);
    cJSON_AddNumberToObject(own, "proven", life->proven);
    cJSON_AddNumberToObject(own, "exchanges_beside_decoding", life->move_count);
    cJSON_AddNumberToObject(own, "quiet_p50_ms", nine_gaps_ms(&life->seen.quiet, 0.5));
    cJSON_AddNumberToObject(own, "quiet_p99_ms", nine_gaps_ms(&life->seen.quiet, 0.99));
    cJSON_AddNumberToObject(own, "quiet_steps", life->seen.quiet.count);
    cJSON_AddNumberToObject(own, "moving_p50_ms", nine_gaps_ms(&life->seen.moving, 0.5));
    cJSON_AddNumberToObject(own, "moving_p99_ms", nine_gaps_ms(&life->seen.moving, 0.99));
    cJSON_AddNumberToObject(own, "moving_steps", life->seen.moving.count);
    cJSON_AddNumberToObject(own, "quiet_p99_part", nine_gaps_part(&life->seen.quiet, 0.99));
    cJSON_AddNumberToObject(own, "moving_p50_part", nine_gaps_part(&life->seen.moving, 0.5));
    cJSON_AddNumberToObject(own, "moving_p99_part", nine_gaps_part(&life->seen.moving, 0.99));
    cJSON_AddNumberToObject(own, "short_steps", life->seen.short_steps);
    cJSON_AddStringToObject(own, "bound_by", receipt_stage_name(life->last.bound_by));
    add_score(own, &life->score);
}

static void add_prefill(cJSON *to, const struct nine_prefill *prefill) {
    cJSON *own = cJSON_AddObjectToObject(to, "prefill");
    cJSON *depths = cJSON_AddArrayToObject(own, "measured");

    cJSON_AddNumberToObject(own, "chunks_each", prefill->chunks);
    cJSON_AddNumberToObject(own, "seconds_between_by_straight_lines", prefill->seconds);
    for (int i = 0; i < NINE_PREFILL_DEPTHS; i++) {
        cJSON *depth = cJSON_CreateObject();
        cJSON_AddNumberToObject(depth, "depth_tokens", (double)prefill->depths[i]);
        cJSON_AddNumberToObject(depth, "chunk_ms", prefill->chunk_ms[i]);
        cJSON_AddItemToArray(depths, depth);
    }
}

static void add_times(cJSON *to, const struct receipt_layers *layers) {
    cJSON *own = cJSON_AddObjectToObject(to, "since_begin_ms");
    const struct {
        const char *name;
        uint64_t ns;
    } times[] = {{"published", layers->published_ns}, {"first_copy_sent", layers->sent_ns},
                 {"first_layers", layers->first_ns},  {"copied", layers->copied_ns},
                 {"proof_begun", layers->proof_ns},   {"last_layers_begun", layers->last_ns},
                 {"proof_ended", layers->proven_ns},  {"digested", layers->digested_ns}};

    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++)
        cJSON_AddNumberToObject(own, times[i].name, (double)times[i].ns * 1e-6);
}

static void add_wakes(cJSON *to, const struct nine_results *results) {
    static const char *const names[NINE_WAKE_KINDS] = {"disk", "eager", "memory"};
    cJSON *wakes = cJSON_AddObjectToObject(to, "wakes_alone");
    for (int kind = 0; kind < NINE_WAKE_KINDS; kind++) {
        cJSON *rounds = cJSON_AddArrayToObject(wakes, names[kind]);
        for (int i = 0; i < NINE_PAIRS; i++) {
            const struct nine_wake *wake = &results->wakes.kinds[kind][i];
            if (wake->wake_ns == 0)
                continue;
            cJSON *round = cJSON_CreateObject();
            cJSON_AddNumberToObject(round, "wake_ms", (double)wake->wake_ns * 1e-6);
            cJSON_AddNumberToObject(round, "first_token_ms", (double)wake->first_ns * 1e-6);
            cJSON_AddNumberToObject(round, "disk_bytes", (double)wake->door_bytes);
            cJSON_AddNumberToObject(round, "memory_bytes", (double)wake->ram_bytes);
            if (kind == NINE_RAM)
                add_times(round, &results->wakes.layers[i]);
            cJSON_AddItemToArray(rounds, round);
        }
    }
    cJSON *plains = cJSON_AddArrayToObject(wakes, "plain_reader");
    for (int i = 0; i < NINE_PAIRS && results->wakes.plain[i].ns; i++) {
        const struct nine_plain *plain = &results->wakes.plain[i];
        cJSON *own_plain = cJSON_CreateObject();
        cJSON_AddNumberToObject(own_plain, "ms", (double)plain->ns * 1e-6);
        cJSON_AddNumberToObject(own_plain, "bytes", (double)plain->bytes);
        cJSON_AddBoolToObject(own_plain, "direct", plain->direct);
        cJSON_AddItemToArray(plains, own_plain);
    }
    cJSON *copies = cJSON_AddArrayToObject(wakes, "pinned_copy_ms");
    for (int i = 0; i < NINE_PAIRS && results->wakes.copy_ns[i]; i++)
        cJSON_AddItemToArray(copies, cJSON_CreateNumber((double)results->wakes.copy_ns[i] * 1e-6));
    cJSON_AddNumberToObject(wakes, "pinned_copy_bytes", (double)results->wakes.copy_bytes);
}

static void add_goals(cJSON *to, const struct nine_results *results) {
    cJSON *goals = cJSON_AddArrayToObject(to, "goals");

    for (uint32_t i = 0; i < results->goal_count; i++) {
        const struct nine_goal *goal = &results->goals[i];
        cJSON *own = cJSON_CreateObject();
        cJSON_AddStringToObject(own, "what", goal->what);
        cJSON_AddStringToObject(own, "sense", goal->sense == NINE_AT_LEAST ? ">=" : "<=");
        cJSON_AddNumberToObject(own, "goal", goal->goal);
        cJSON_AddNumberToObject(own, "value", goal->value);
        cJSON_AddBoolToObject(own, "hit", goal->hit);
        cJSON_AddItemToArray(goals, own);
    }
}

static void add_stages(cJSON *to, const struct receipt *receipt) {
    cJSON *stages = cJSON_AddObjectToObject(to, "stage_ms");

    for (uint32_t i = 0; i < RECEIPT_STAGE_COUNT; i++)
        if (receipt->stage_ns[i])
            cJSON_AddNumberToObject(stages, receipt_stage_name((enum receipt_stage)i),
                                    (double)receipt->stage_ns[i] * 1e-6);
    cJSON_AddNumberToObject(to, "wall_ms", (double)receipt->wall_ns * 1e-6);
    cJSON_AddNumberToObject(to, "blocked_ms", (double)receipt->blocked_ns * 1e-6);
    cJSON_AddStringToObject(to, "bound_by", receipt_stage_name(receipt->bound_by));
}

static void add_save_step(cJSON *to, uint64_t length, const struct nine_save_step *step) {
    cJSON *own = cJSON_CreateObject();

    cJSON_AddNumberToObject(own, "length", (double)length);
    cJSON_AddNumberToObject(own, "tokens", step->tokens);
    cJSON_AddNumberToObject(own, "bytes", (double)step->bytes);
    cJSON_AddNumberToObject(own, "allowed_bytes", (double)step->allowed_bytes);
    cJSON_AddNumberToObject(own, "record_bytes", (double)step->record_bytes);
    cJSON_AddNumberToObject(own, "image_bytes", (double)step->image_bytes);
    cJSON_AddNumberToObject(own, "least_ms", (double)step->least_ns * 1e-6);
    cJSON_AddNumberToObject(own, "most_ms", (double)step->most_ns * 1e-6);
    add_stages(own, &step->receipt);
    cJSON_AddItemToArray(to, own);
}

static void add_saves(cJSON *to, struct nine_saves *saves) {
    cJSON *own = cJSON_AddObjectToObject(to, "saves");
    cJSON *full = cJSON_AddObjectToObject(own, "full");
    cJSON *steps = cJSON_AddArrayToObject(own, "incremental");
    cJSON *pairs = cJSON_AddArrayToObject(full, "over_plain");
    const struct nine_save_pair *median = nine_save_full(saves);

    cJSON_AddNumberToObject(full, "length", (double)median->receipt.tokens);
    cJSON_AddNumberToObject(full, "bytes", (double)median->receipt.door_bytes);
    cJSON_AddNumberToObject(full, "others", saves->others);
    cJSON_AddNumberToObject(full, "held_ms", (double)saves->held_ns * 1e-6);
    cJSON_AddNumberToObject(full, "held_most_ms", (double)saves->held_most_ns * 1e-6);
    add_stages(full, &median->receipt);
    cJSON_AddNumberToObject(full, "plain_ms", (double)median->plain.ns * 1e-6);
    cJSON_AddNumberToObject(full, "plain_bytes", (double)median->plain.bytes);
    cJSON_AddBoolToObject(full, "plain_direct", median->plain.direct);
    for (uint32_t i = 0; i < NINE_SAVE_PAIRS; i++)
        cJSON_AddItemToArray(pairs, cJSON_CreateNumber(nine_save_over_plain(&saves->pairs[i])));
    cJSON_AddNumberToObject(full, "quiet_p50_ms", nine_gaps_ms(&saves->seen.quiet, 0.5));
    cJSON_AddNumberToObject(full, "quiet_p99_ms", nine_gaps_ms(&saves->seen.quiet, 0.99));
    cJSON_AddNumberToObject(full, "saving_p50_ms", nine_gaps_ms(&saves->seen.moving, 0.5));
    cJSON_AddNumberToObject(full, "saving_p99_ms", nine_gaps_ms(&saves->seen.moving, 0.99));
    cJSON_AddNumberToObject(full, "saving_steps", saves->seen.moving.count);
    for (uint32_t i = 0; i < NINE_SAVE_USERS; i++)
        for (uint32_t k = 0; k < NINE_SAVE_STEPS; k++)
            add_save_step(steps, saves->lengths[i].tokens, &saves->lengths[i].steps[k]);
}

int nine_write_files(struct nine_results *results, const struct nine *nine) {
    cJSON *root;
    int good = 1;

    (void)mkdir(results->wish->out, 0755);
    for (uint32_t i = 0; i < results->curve_count && good; i++) {
        root = begin_file(results, nine);
        add_curve(root, &results->curves[i], nine->model.weight_bytes, results->copy_rate);
        good = end_file(results, results->curves[i].recipe->name, root);
    }
    if (!good)
        return 0;
    root = begin_file(results, nine);
    cJSON *fits = cJSON_AddObjectToObject(root, "fit");
    for (uint32_t i = 0; i < NINE_RECIPES; i++) {
        if (!results->fits[i].predicted)
            continue;
        cJSON *fit = cJSON_AddObjectToObject(fits, nine_recipe_at(i)->name);
        cJSON_AddNumberToObject(fit, "predicted", results->fits[i].predicted);
        cJSON_AddNumberToObject(fit, "counted", results->fits[i].counted);
    }
    if (results->saved)
        add_saves(root, &results->saves);
    if (results->prefill.seconds > 0)
        add_prefill(root, &results->prefill);
    if (results->woken)
        add_wakes(root, results);
    if (results->lived)
        add_life(root, results);
    add_goals(root, results);
    cJSON_AddNumberToObject(root, "seconds", nine_seconds() - results->begun);
    cJSON_AddNumberToObject(root, "wrong", results->wrong);
    cJSON_AddNumberToObject(root, "missed", results->missed);
    return end_file(results, "overview", root);
}
