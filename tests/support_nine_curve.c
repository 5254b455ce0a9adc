/* tests/support_nine_curve.c - one recipe with more and more users, and users that fit into a pool.
 *
 * Responsible for: what support_nine_curve.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine_curve.h"

#include "store/base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t bytes_read(const struct nine *nine, const struct nine_pool *pool) {
    const struct layout_geometry *geometry = &nine->model.geometry;

    return nine->model.weight_bytes + pool->slots * layout_slot_bytes(geometry) +
           pool->streams[LAYOUT_META] * layout_meta_frame_bytes(geometry);
}

/* Under pressure: below the low watermark only once nothing is left to take. */
static int watermark_kept(const struct nine_curve *curve, const struct engine_slots *slots) {
    uint64_t low = (uint64_t)slots->total * NINE_LOW_PERCENT / 100, blocks = 0;

    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        blocks += curve->counted.blocks[tier];
    return slots->free >= low + slots->reserve ||
           curve->counted.blocks[image_floor(&curve->policy)] == blocks;
}

/* Slots of everybody who is awake; 0 when arithmetic, sessions and pool do not agree. */
static void compare_pool(struct nine *nine, struct nine_curve *curve) {
    struct engine_slots slots;

    nine_settle(nine);
    (void)engine_balance(nine->engine);
    memset(&curve->predicted, 0, sizeof curve->predicted);
    memset(&curve->counted, 0, sizeof curve->counted);
    for (uint32_t i = 0; i < nine->user_count; i++) {
        struct session_info info;
        if (!nine->users[i].session)
            continue;
        session_info(nine->users[i].session, &info);
        nine_pool_predict(nine->policy.pressure ? &info.policy : &nine->policy, info.n_kv,
                          &curve->predicted);
        nine_pool_count(nine->users[i].session, &curve->counted);
    }
    engine_slots(nine->engine, &slots);
    curve->used = slots.used;
    curve->equal = nine_pool_equal(&curve->predicted, &curve->counted, slots.used, curve->differs);
    if (curve->equal && curve->policy.pressure && !watermark_kept(curve, &slots)) {
        curve->equal = 0;
        snprintf(curve->differs, sizeof curve->differs,
                 "%u slots free of %u, below the watermark, and planes left to take", slots.free,
                 slots.total);
    }
}

static enum kv_err measure(struct nine *nine, struct nine_curve *curve, uint32_t steps,
                           struct kv_diag *diag) {
    struct nine_point *point = &curve->points[curve->point_count++];
    uint64_t ns[NINE_STEPS_MAX], all_ns = 0, all_tokens = 0;
    uint32_t tokens = 0;

    *point = (struct nine_point){.users = curve->largest};
    for (uint32_t i = 0; i < NINE_WARM + steps; i++) {
        uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());
        enum kv_err err = nine_step(nine, &tokens, diag);
        uint64_t took_ns = kv_clock_now_ns(kv_clock_system()) - begun_ns;
        if (err != KV_OK)
            return err;
        if (i < NINE_WARM)
            continue;
        if (tokens != curve->largest)
            return kv_diag_set(diag, KV_ERR_PROOF, "a step of %u users gave %u tokens",
                               curve->largest, tokens);
        ns[point->steps++] = took_ns;
        all_ns += took_ns;
        all_tokens += tokens;
    }
    nine_sort(ns, point->steps);
    point->p50_ms = (double)ns[(point->steps - 1) / 2] * 1e-6;
    point->p99_ms = (double)ns[(point->steps - 1) * 99 / 100] * 1e-6;
    point->tokens_s = (double)all_tokens / ((double)all_ns * 1e-9);
    compare_pool(nine, curve);
    point->slots = curve->counted.slots;
    point->pool = curve->counted;
    point->step_bytes = bytes_read(nine, &curve->counted);
    return KV_OK;
}

static int is_measured(uint32_t users, uint32_t wanted) {
    return users == 1 || users == 2 || users == 4 || users == 5 || users == wanted;
}

enum kv_err nine_curve_run(struct nine *nine, const struct nine_recipe *recipe, uint32_t users,
                           uint32_t steps, struct nine_curve *curve_out, struct kv_diag *diag) {
    struct nine_curve *curve = curve_out;
    enum kv_err err = KV_OK;
    double filled_s = nine->filled_s;
    uint64_t filled_tokens = nine->filled_tokens;

    memset(curve, 0, sizeof *curve);
    curve->recipe = recipe;
    curve->wanted = users;
    curve->policy = nine_recipe_policy(recipe, nine->settings.tokens);
    nine->policy = curve->policy;
    steps = steps < NINE_STEPS_MAX ? steps : NINE_STEPS_MAX;
    while (err == KV_OK && curve->largest < users) {
        err = nine_add(nine, curve->largest, diag);
        if (err == KV_ERR_NO_SLOTS && curve->largest > 0) {
            snprintf(curve->full, sizeof curve->full, "%s", diag->text);
            err = KV_OK;
            break;
        }
        if (err != KV_OK)
            return err;
        curve->largest++;
        if (is_measured(curve->largest, users))
            err = measure(nine, curve, steps, diag);
        if (err == KV_OK && curve->differs[0])
            return KV_OK;
    }
    curve->filled_s = nine->filled_s - filled_s;
    curve->filled_tokens = nine->filled_tokens - filled_tokens;
    if (err == KV_OK && curve->points[curve->point_count - 1].users != curve->largest)
        err = measure(nine, curve, steps, diag);
    for (uint32_t i = 0; i < curve->largest && err == KV_OK; i++)
        err = nine_prove(nine, i, &curve->score, diag);
    for (uint32_t i = 0; i < curve->largest && err == KV_OK; i++)
        err = nine_keep(nine, i, &curve->kept, diag);
    return err;
}

static enum kv_err count_users(struct nine *nine, uint32_t *count_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;

    for (*count_out = 0; err == KV_OK && *count_out < nine->user_count;) {
        err = nine_add(nine, *count_out, diag);
        *count_out += err == KV_OK;
        nine_settle(nine);
    }
    nine_drop_all(nine);
    return err == KV_ERR_NO_SLOTS ? KV_OK : err;
}

enum kv_err nine_fit_run(const struct nine_settings *settings, struct nine_fit fits[NINE_RECIPES],
                         struct kv_diag *diag) {
    struct nine_settings blank = *settings;
    struct engine_slots slots;
    struct nine nine;

    blank.blank = 1;
    blank.dir = NULL;
    enum kv_err err = nine_open(&blank, NINE_SESSIONS_MAX, &nine, diag);
    if (err != KV_OK)
        return err;
    engine_slots(nine.engine, &slots);
    const struct nine_room room = {settings->pool_bytes, slots.slot_bytes, slots.meta_frame_bytes,
                                   settings->reserve_slots};
    for (uint32_t i = 0; i < NINE_RECIPES && err == KV_OK; i++) {
        const struct nine_recipe *recipe = nine_recipe_at(i);
        if (!recipe->users_goal && !recipe->best_goal)
            continue;
        nine.policy = nine_recipe_policy(recipe, settings->tokens);
        fits[i].predicted = nine_pool_fit(&room, &nine.policy, settings->tokens);
        err = count_users(&nine, &fits[i].counted, diag);
    }
    nine_close(&nine);
    return err;
}
