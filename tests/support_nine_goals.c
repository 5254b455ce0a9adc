/* tests/support_nine_goals.c - the goals of the demonstration beside what was measured.
 *
 * Responsible for: what support_nine_goals.h says.
 * Not responsible for: measuring.
 */
#include "tests/support_nine_goals.h"

#include "tests/support_nine_tell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_ratio(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median of the pairs. */
static double of_plain(const struct nine_wakes *wakes) {
    double ratios[NINE_PAIRS];

    for (uint32_t i = 0; i < NINE_PAIRS; i++)
        ratios[i] =
            nine_rate(wakes->kinds[NINE_EXACT][i].door_bytes, wakes->kinds[NINE_EXACT][i].wake_ns) /
            nine_rate(wakes->plain[i].bytes, wakes->plain[i].ns);
    qsort(ratios, NINE_PAIRS, sizeof ratios[0], by_ratio);
    return ratios[NINE_PAIRS / 2];
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
        nine_row(results, what, recipe->best_goal, NINE_AT_LEAST,
                 nine_pool_fit(&room, &policy, 131072));
    }
}

static uint64_t middle(const uint64_t ns[NINE_PAIRS]) {
    uint64_t sorted[NINE_PAIRS];

    memcpy(sorted, ns, sizeof sorted);
    nine_sort(sorted, NINE_PAIRS);
    return sorted[NINE_PAIRS / 2];
}

static void tell_disk(struct nine_results *results, double prefill_s) {
    const struct nine_wakes *wakes = &results->wakes;
    uint64_t plain_ns[NINE_PAIRS], plain_bytes = wakes->plain[0].bytes;
    char what[96];
    struct nine_wake disk = nine_wakes_median(wakes, NINE_EXACT);
    const struct nine_wake *exact = wakes->kinds[NINE_EXACT], *eager = wakes->kinds[NINE_EAGER];
    uint64_t exact_ns = 0, eager_ns = 0, exact_bytes = 0, eager_bytes = 0;

    for (int i = 0; i < NINE_PAIRS; i++) {
        plain_ns[i] = (uint64_t)((double)wakes->plain[i].ns * (double)plain_bytes /
                                 (double)wakes->plain[i].bytes);
        exact_ns += exact[i].first_ns;
        eager_ns += eager[i].first_ns;
        exact_bytes += exact[i].door_bytes;
        eager_bytes += eager[i].door_bytes;
    }
    double floor_s = (double)disk.door_bytes / nine_rate(plain_bytes, middle(plain_ns)) * 1e-9;
    snprintf(what, sizeof what, "wake over a plain reader of the same bytes (median of %d)",
             NINE_PAIRS);
    nine_row(results, what, 0.90, NINE_AT_LEAST, of_plain(wakes));
    if (prefill_s > 0)
        nine_row(results, "resume from the disk over a prefill, times as fast",
                 0.9 * prefill_s / floor_s, NINE_AT_LEAST,
                 prefill_s / ((double)disk.wake_ns * 1e-9));
    /* Of all pairs together: from pair to pair a disk differs by more than the goal allows. */
    snprintf(what, sizeof what, "eager wakes' first tokens over the exact ones' (%d pairs)",
             NINE_PAIRS);
    nine_row(results, what, 1.05 * (double)eager_bytes / (double)exact_bytes, NINE_AT_MOST,
             (double)eager_ns / (double)exact_ns);
}

/* Wakes against what bounds them, and a resume against a prefill of as many tokens. */
static void tell_wakes(struct nine_results *results, const struct nine *nine) {
    const struct nine_wakes *wakes = &results->wakes;
    double tokens = nine->users[wakes->user].tokens;
    double prefill_s = results->prefill.seconds * tokens / (double)nine->settings.tokens;

    if (results->wish->parts >> NINE_PART_DISK & 1)
        tell_disk(results, prefill_s);
    if (results->wish->parts >> NINE_PART_MEMORY & 1) {
        struct nine_wake memory = nine_wakes_median(wakes, NINE_RAM);
        if (prefill_s > 0)
            nine_row(results, "resume from memory over a prefill, times as fast", 60, NINE_AT_LEAST,
                     prefill_s / ((double)memory.wake_ns * 1e-9));
        nine_row(results, "wake from memory over a pinned copy of the same bytes", 0.90,
                 NINE_AT_LEAST, (double)middle(wakes->copy_ns) / (double)memory.wake_ns);
    }
    nine_row(results, "wakes alone proven", wakes->wakes, NINE_AT_LEAST, wakes->proven);
}

/* Gaps beside a move over those of the rests, each in parts of what its sessions take. */
static double over_quiet(struct nine_seen *seen, double share) {
    return nine_gaps_part(&seen->moving, share) / nine_gaps_part(&seen->quiet, share);
}

static void save_rows(struct nine_results *results) {
    struct nine_saves *saves = &results->saves;
    uint64_t copy_ns = 0;
    const struct nine_save_step *of_short = saves->lengths[0].steps;
    const struct nine_save_step *of_long = saves->lengths[1].steps;
    double most = 0;

    for (uint32_t i = 0; i < NINE_SAVE_PAIRS; i++)
        copy_ns += saves->pairs[i].receipt.stage_ns[RECEIPT_COPY];
    nine_row(results, "full save over a plain writer of the same bytes (median of 3)", 0.90,
             NINE_AT_LEAST, nine_save_over_plain(nine_save_full(saves)));
    if (copy_ns)
        nine_row(results, "decoding blocked by full saves over their copy-out", 1.10, NINE_AT_MOST,
                 (double)saves->held_ns / (double)copy_ns);
    if (saves->others) {
        nine_row(results, "decode p50 of the others while it saves over quiet", 1.02, NINE_AT_MOST,
                 over_quiet(&saves->seen, 0.5));
        nine_row(results, "decode p99 of the others while it saves over quiet", 1.10, NINE_AT_MOST,
                 over_quiet(&saves->seen, 0.99));
    }
    for (uint32_t i = 0; i < NINE_SAVE_STEPS; i++) {
        char what[96];
        for (uint32_t k = 0; k < NINE_SAVE_USERS; k++) {
            const struct nine_save_step *step = &saves->lengths[k].steps[i];
            double share = (double)step->bytes / (double)step->allowed_bytes;
            most = share > most ? share : most;
        }
        snprintf(what, sizeof what, "save of %u tokens, long over short", of_long[i].tokens);
        nine_row(results, what, 1.10, NINE_AT_MOST,
                 (double)of_long[i].receipt.wall_ns / (double)of_short[i].receipt.wall_ns);
    }
    nine_row(results, "bytes of a save over those allowed, the most", 1, NINE_AT_MOST, most);
}

static void tell_curves(struct nine_results *results) {
    uint32_t unequal = 0, asked = 0, right = 0, thief = 0, invented = 0, kept = UINT32_MAX;

    for (uint32_t i = 0; i < results->curve_count; i++) {
        const struct nine_curve *curve = &results->curves[i];
        unequal += !curve->equal;
        asked += curve->score.asked;
        right += curve->score.right;
        thief += curve->score.thief;
        invented += curve->score.invented;
        kept = curve->kept.least < kept ? curve->kept.least : kept;
    }
    nine_row(results, "recipes whose slots predicted and counted differ", 0, NINE_AT_MOST, unequal);
    nine_row(results, "needles right", asked, NINE_AT_LEAST, right);
    nine_row(results, "needles answered with another user's value", 0, NINE_AT_MOST, thief);
    nine_row(results, "values invented for absent keys", 0, NINE_AT_MOST, invented);
    nine_row(results, "needles kept (they can fail) of a user, the fewest", NINE_NEEDLES,
             NINE_AT_LEAST, kept);
}

static void tell_steps(struct nine_results *results) {
    for (uint32_t i = 0; i < results->curve_count && results->copy_rate > 0; i++) {
        const struct nine_curve *curve = &results->curves[i];
        const struct nine_point *most = &curve->points[curve->point_count - 1];
        char what[96];
        snprintf(what, sizeof what, "step of %u users over floor, %s", most->users,
                 curve->recipe->name);
        nine_row(results, what, 1.15, NINE_AT_MOST, most->p50_ms / nine_floor_ms(results, most));
    }
}

static void tell_life(struct nine_results *results, const struct nine *nine) {
    struct nine_life *life = &results->life;
    double quiet = nine_gaps_ms(&life->seen.quiet, 0.5),
           quiet_p99 = nine_gaps_ms(&life->seen.quiet, 0.99);

    nine_row(results, "wakes proven (digests, equal bits, 0 prefilled, needles)", life->wakes,
             NINE_AT_LEAST, life->proven);
    nine_row(results, "steps that somebody had no context left for", 0, NINE_AT_MOST,
             life->seen.short_steps);
    nine_row(results, "sleeps that kept 8 needles (asked plain and with the hole)", nine->sleeps,
             NINE_AT_LEAST, nine->sleeps_kept);
    nine_row(results, "needles right of all sessions at the end", life->score.asked, NINE_AT_LEAST,
             life->score.right);
    printf("  decoding of the others: quiet p50 %.3f ms, p99 %.3f (%u steps); meanwhile p50 %.3f, "
           "p99 %.3f, most %.3f (%u steps)\n",
           quiet, quiet_p99, life->seen.quiet.count, nine_gaps_ms(&life->seen.moving, 0.5),
           nine_gaps_ms(&life->seen.moving, 0.99), nine_gaps_ms(&life->seen.moving, 1),
           life->seen.moving.count);
    nine_tell_holds(life->seen.holds);
    nine_row(results, "decode p50 of the others over quiet", 1.02, NINE_AT_MOST,
             over_quiet(&life->seen, 0.5));
    nine_row(results, "decode p99 of the others over quiet", 1.10, NINE_AT_MOST,
             over_quiet(&life->seen, 0.99));
}

void nine_tell_goals(struct nine_results *results, const struct nine *nine) {
    nine_tell_act(results, "Goal and value");
    if (results->curve_count)
        tell_curves(results);
    tell_best_use(results, nine);
    tell_steps(results);
    if (results->saved)
        save_rows(results);
    if (results->woken)
        tell_wakes(results, nine);
    if (results->lived)
        tell_life(results, nine);
}
