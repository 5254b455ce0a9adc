/* tests/support_nine_tell.c - lines of the table that the demonstration prints.
 *
 * Responsible for: what support_nine_tell.h says.
 * Not responsible for: what is measured.
 */
#include "tests/support_nine_tell.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>

void nine_wrong(struct nine_results *results, const char *what, const char *why) {
    results->wrong++;
    printf("WRONG %s: %s\n", what, why);
}

void nine_tell_act(struct nine_results *results, const char *what) {
    printf("\n%s (%.0f s)\n", what, nine_seconds() - results->begun);
    fflush(stdout);
}

void nine_row(struct nine_results *results, const char *what, double goal, enum nine_sense sense,
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

static const char *const depths[NINE_DEPTHS] = {"sinks",       "1st quarter", "2nd quarter",
                                                "3rd quarter", "4th quarter", "window"};

void nine_tell_score(struct nine_results *results, const char *what,
                     const struct nine_score *score) {
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
        nine_wrong(results, what, score->first_wrong);
}

static void tell_kept(struct nine_results *results, const char *what,
                      const struct nine_kept *kept) {
    float drop = INFINITY;

    printf("    needles that can fail, kept %u of %u x %u users:", kept->kept, NINE_NEEDLES,
           kept->users);
    for (uint32_t i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (kept->tiers[i].asked) {
            printf(" %s %u/%u", layout_tier_name((enum layout_tier)i), kept->tiers[i].right,
                   kept->tiers[i].asked);
            drop = kept->tiers[i].margin < drop ? kept->tiers[i].margin : drop;
        }
    printf(";");
    for (uint32_t i = 0; i < NINE_DEPTHS; i++)
        if (kept->depths[i].asked)
            printf(" %s %u/%u", depths[i], kept->depths[i].right, kept->depths[i].asked);
    printf("; a hole costs at least %.1f nats\n", (double)drop);
    if (kept->kept != kept->asked)
        nine_wrong(results, what, kept->first_unkept);
}

/* Weights and resident KV at the rate of a copy. */
double nine_floor_ms(const struct nine_results *results, const struct nine_point *point) {
    return results->copy_rate > 0 ? (double)point->step_bytes / results->copy_rate * 1e3 : 0;
}

void nine_tell_curve(struct nine_results *results, const struct nine_curve *curve) {
    printf("%s%s: %llu tokens filled in %.2f s\n", curve->recipe->name,
           curve->largest < curve->wanted ? ", the pool is full" : "",
           (unsigned long long)curve->filled_tokens, curve->filled_s);
    for (uint32_t i = 0; i < curve->point_count; i++) {
        const struct nine_point *point = &curve->points[i];
        printf("  %2u users: step p50 %9.3f ms, p99 %9.3f; %8.1f tok/s each, %8.1f in all; %6llu "
               "slots; %.2f GB a step, %.1f GB/s, floor %.3f ms\n",
               point->users, point->p50_ms, point->p99_ms, point->tokens_s / point->users,
               point->tokens_s, (unsigned long long)point->slots, (double)point->step_bytes * 1e-9,
               (double)point->step_bytes / point->p50_ms * 1e-6, nine_floor_ms(results, point));
    }
    if (curve->full[0])
        printf("  %u of %u users: %s\n", curve->largest, curve->wanted, curve->full);
    tell_pool(curve);
    if (!curve->equal) {
        nine_wrong(results, curve->recipe->name, curve->differs);
    } else {
        nine_tell_score(results, curve->recipe->name, &curve->score);
        tell_kept(results, curve->recipe->name, &curve->kept);
    }
    fflush(stdout);
}

/* Loading is read, unzip, copy and digest beside each other; the rest comes before or after it. */
void nine_tell_stages(const struct receipt *wake) {
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
    printf(" ms; loading %.2f, unnamed %.2f ms; %s, %u in flight, "
           "%u unzip; bound by %s\n",
           (double)wake->load_ns * 1e-6, ((double)wake->wall_ns - (double)(known - beside)) * 1e-6,
           wake->door, wake->in_flight_most, wake->unzip_threads,
           receipt_stage_name(wake->bound_by));
}

static double ms_of(const uint64_t *ns, uint32_t count, double share) {
    struct nine_gaps gaps = {.ns = (uint64_t *)ns, .count = count};

    return nine_gaps_ms(&gaps, share);
}

/* Pieces of one question. */
static int are_alike(const struct nine_place *one, const struct nine_place *two) {
    double a = one->count ? (double)one->sum_ns / one->count : 0;
    double b = two->count ? (double)two->sum_ns / two->count : 0;

    return one->count && two->count && a < 1.25 * b && b < 1.25 * a;
}

static void add_place(struct nine_place *sum, const struct nine_place *place) {
    sum->count += place->count;
    sum->gaps += place->gaps;
    sum->sum_ns += place->sum_ns;
    sum->most_ns = place->most_ns > sum->most_ns ? place->most_ns : sum->most_ns;
}

/* Stretches in the order of the move, those alike together, then gaps. */
void nine_tell_holds(const struct nine_holds *holds) {
    for (uint32_t kind = 0; kind < NINE_MOVE_KINDS; kind++) {
        const struct nine_steps *steps = &holds->steps[kind];
        if (!steps->count)
            continue;
        printf("  a step, %-7s: p50 %.3f ms, p99 %.3f, of it not waiting for the device p50 %.3f, "
               "p99 %.3f (%u steps)\n",
               nine_move_name((enum nine_move_kind)kind), ms_of(steps->step_ns, steps->count, 0.5),
               ms_of(steps->step_ns, steps->count, 0.99), ms_of(steps->host_ns, steps->count, 0.5),
               ms_of(steps->host_ns, steps->count, 0.99), steps->count);
    }
    for (uint32_t kind = NINE_SLEEPS; kind < NINE_MOVE_KINDS; kind++)
        for (uint32_t i = 0, end; i < NINE_PLACES; i = end) {
            struct nine_place sum = holds->places[kind][i];
            for (end = i + 1;
                 end < NINE_PLACES && are_alike(&holds->places[kind][i], &holds->places[kind][end]);
                 end++)
                add_place(&sum, &holds->places[kind][end]);
            if (sum.gaps || sum.most_ns > NINE_TOLD_NS)
                printf("  %s, stretch %3u to %3u: %5u times, mean %8.3f ms, most %8.3f, %u long "
                       "gaps\n",
                       nine_move_name((enum nine_move_kind)kind), i + 1, end, sum.count,
                       (double)sum.sum_ns / sum.count * 1e-6, (double)sum.most_ns * 1e-6, sum.gaps);
        }
    if (holds->slow_steps || holds->longest[0].ns)
        printf(
            "  long gaps (over 1.5 x quiet p50) that were steps themselves: %u; longest of all:\n",
            holds->slow_steps);
    for (uint32_t i = 0; i < NINE_LONGEST && holds->longest[i].ns; i++)
        printf("    %8.3f ms: step %8.3f, %s stretch %u %8.3f\n",
               (double)holds->longest[i].ns * 1e-6, (double)holds->longest[i].step_ns * 1e-6,
               nine_move_name(holds->longest[i].kind), holds->longest[i].place + 1,
               (double)holds->longest[i].hold_ns * 1e-6);
}
