/* engine/model/sampler.c - from logits to the next token.
 *
 * Responsible for: filters, the choice, random numbers, exp and log of its own.
 * Not responsible for: who asks when (the scheduler).
 */
#include "engine/model/sampler.h"

#include <math.h>
#include <string.h>

#define TEMPERATURE_MAX 100.0f

enum { LANES = 16, SPANS = 2048, NEAR = 64 };

/* So far below the best all of a vocabulary adds nothing to its 1. */
#define FAR 51.0f

static double from_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp(x) for x ≤ 0: 2^k times a Taylor sum on |r| ≤ ln(2) / 2, relative error below 1e-15; 0 below
 * -50, where a whole vocabulary adds less than a double can tell from 1. The C library's exp may
 * differ between versions, and with it a sampled token. */
static double exp_of(double x) {
    static const double inverse[] = {1.0 / 14, 1.0 / 13, 1.0 / 12, 1.0 / 11, 1.0 / 10,
                                     1.0 / 9,  1.0 / 8,  1.0 / 7,  1.0 / 6,  1.0 / 5,
                                     1.0 / 4,  1.0 / 3,  1.0 / 2,  1.0};
    if (x < -50.0)
        return 0.0;
    double k = floor(x * 1.4426950408889634 + 0.5);
    /* ln 2 in two parts, so that k × ln 2 loses nothing. */
    double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double sum = 1.0;
    for (size_t i = 0; i < sizeof inverse / sizeof inverse[0]; i++)
        sum = 1.0 + sum * r * inverse[i];
    return sum * from_bits((uint64_t)(int64_t)(k + 1023.0) << 52);
}

/* log(x) for x ≥ 1: exponent and the series of artanh on the mantissa in [√½, √2). */
static double log_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    double mantissa = from_bits((bits & 0xfffffffffffffu) | (uint64_t)1023 << 52);
    if (mantissa > 1.4142135623730951) {
        mantissa *= 0.5;
        exponent++;
    }
    double z = (mantissa - 1.0) / (mantissa + 1.0), square = z * z, sum = 0.0;
    for (int i = 25; i >= 1; i -= 2)
        sum = sum * square + 1.0 / i;
    return exponent * 0.6931471805599453 + 2.0 * z * sum;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

double sampler_random(uint64_t seed, uint64_t position) {
#ifdef BREAK_RANDOM_POSITION
    position = 0;
#endif
    uint64_t bits = mix(mix(seed + 0x9e3779b97f4a7c15u) + position * 0x9e3779b97f4a7c15u);
    return (double)(bits >> 11) * 0x1p-53;
}

enum kv_err sampler_check(const struct sampler_settings *settings, struct kv_diag *diag) {
    if (!(settings->temperature >= 0.0f && settings->temperature <= TEMPERATURE_MAX))
        return kv_diag_set(diag, KV_ERR_INVALID, "temperature is %g; 0 (greedy) to %g is possible",
                           (double)settings->temperature, (double)TEMPERATURE_MAX);
    if (!(settings->top_p > 0.0f && settings->top_p <= 1.0f))
        return kv_diag_set(diag, KV_ERR_INVALID, "top-p is %g; above 0 and at most 1 is possible",
                           (double)settings->top_p);
    if (settings->top_k == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "top-k is 0; 1 or more is possible");
    return KV_OK;
}

/* Larger for a larger logit, equal for both zeros; a loop over a fixed count of these becomes
 * vector instructions, which a comparison of floats does not. */
static int32_t rank_of(float logit) {
    float value = logit + 0.0f;
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static int all_below(const float logits[LANES], float limit) {
    int32_t above = 0, from = rank_of(limit);
    for (uint32_t lane = 0; lane < LANES; lane++)
        above |= rank_of(logits[lane]) >= from;
    return !above;
}

/* 1 when all are finite: so they nearly always are, and then nothing is looked at twice. */
static int all_finite(const struct sampler_row *row) {
    int32_t bad[LANES] = {0}, any = 0;
    uint32_t whole = row->count / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint32_t bits;
            memcpy(&bits, row->logits + i + lane, sizeof bits);
            bad[lane] |= (bits & 0x7f800000u) == 0x7f800000u;
        }
    for (uint32_t lane = 0; lane < LANES; lane++)
        any |= bad[lane];
    for (uint32_t i = whole; i < row->count; i++)
        any |= !isfinite(row->logits[i]);
    return !any;
}

static enum kv_err check_row(const struct sampler_row *row, struct kv_diag *diag) {
    if (row->count == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "there are no logits to choose from");
    if (all_finite(row))
        return KV_OK;
    for (uint32_t i = 0; i < row->count; i++) {
        if (!isfinite(row->logits[i]))
            return kv_diag_set(diag, KV_ERR_DEVICE,
                               "the logit of token %u at position %llu is not finite", i,
                               (unsigned long long)row->position);
    }
    return KV_OK;
}

/* The order of choice: larger logit first, then lower id. */
static int before(struct sampler_candidate a, struct sampler_candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

static void sift_down(struct sampler_candidate *heap, uint32_t count, uint32_t at) {
    struct sampler_candidate moved = heap[at];
    for (;;) {
        uint64_t child = 2 * (uint64_t)at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && before(heap[child + 1], heap[child]))
            child++;
        if (!before(heap[child], moved))
            break;
        heap[at] = heap[child];
        at = (uint32_t)child;
    }
    heap[at] = moved;
}

/* One look at every value: the largest rank of each span of them, the largest and the smallest of
 * all. A span is as many lanes as make at most SPANS of them. */
struct ranks {
    uint32_t span;
    int32_t most, least, of[SPANS];
};

/* Values of the span that begins at `first`. */
static uint32_t count_at(const struct sampler_row *row, const struct ranks *ranks, uint32_t first) {
    uint32_t left = row->count - first;
    return left < ranks->span ? left : ranks->span;
}

static void ranks_of(const struct sampler_row *row, struct ranks *ranks) {
    ranks->span = (row->count / SPANS / LANES + 1) * LANES;
    ranks->most = INT32_MIN;
    ranks->least = INT32_MAX;
    for (uint32_t first = 0; first < row->count; first += ranks->span) {
        uint32_t count = count_at(row, ranks, first), whole = count / LANES * LANES;
        const float *logits = row->logits + first;
        int32_t most[LANES], least[LANES], top = INT32_MIN;
        for (uint32_t lane = 0; lane < LANES; lane++) {
            most[lane] = INT32_MIN;
            least[lane] = INT32_MAX;
        }
        for (uint32_t i = 0; i < whole; i += LANES)
            for (uint32_t lane = 0; lane < LANES; lane++) {
                int32_t rank = rank_of(logits[i + lane]);
                most[lane] = rank > most[lane] ? rank : most[lane];
                least[lane] = rank < least[lane] ? rank : least[lane];
            }
        for (uint32_t i = whole; i < count; i++) {
            int32_t rank = rank_of(logits[i]);
            most[0] = rank > most[0] ? rank : most[0];
            least[0] = rank < least[0] ? rank : least[0];
        }
        for (uint32_t lane = 0; lane < LANES; lane++) {
            top = most[lane] > top ? most[lane] : top;
            ranks->least = least[lane] < ranks->least ? least[lane] : ranks->least;
        }
        ranks->of[first / ranks->span] = top;
        ranks->most = top > ranks->most ? top : ranks->most;
    }
}

/* The first of the largest: the first span that has the largest rank, and in it who has it. */
static uint32_t best_in(const struct sampler_row *row, const struct ranks *ranks) {
    uint32_t at = 0;
    while (ranks->of[at / ranks->span] != ranks->most)
        at += ranks->span;
    while (rank_of(row->logits[at]) != ranks->most)
        at++;
    return at;
}

/* The ranks of a row that can be chosen from, or what is wrong with it. */
static enum kv_err look_at(const struct sampler_row *row, struct ranks *ranks,
                           struct kv_diag *diag) {
    ranks_of(row, ranks);
    int finite = ranks->most < rank_of(INFINITY) && ranks->least > rank_of(-INFINITY);
    return row->count != 0 && finite ? KV_OK : check_row(row, diag);
}

/* Adds exp((logit - best) * scale), at least exp(-FAR), to each lane: 2^k times a Taylor sum in
 * float on |r| ≤ ln(2) / 2, relative error below 2^-22. Fixed lanes and no call become vector
 * instructions, and the bits are those of plain C either way. */
static void add_weights(const float *restrict logits, float best, float scale,
                        float *restrict sum) {
    const float whole = 0x1.8p23f; /* beside it a float has no fraction */
    int32_t far = rank_of(FAR);
    for (uint32_t lane = 0; lane < LANES; lane++) {
        float below = (best - logits[lane]) * scale;
        int32_t bits;
        memcpy(&bits, &below, sizeof bits);
        bits = bits < far ? bits : far;
        memcpy(&below, &bits, sizeof below);
        float shifted = whole - below * 1.44269504f, k = shifted - whole;
        /* ln 2 in two parts, so that k × ln 2 loses nothing. */
        float r = (-below - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f;
        float value = 1.0f / 5040;
        value = value * r + 1.0f / 720;
        value = value * r + 1.0f / 120;
        value = value * r + 1.0f / 24;
        value = value * r + 1.0f / 6;
        value = value * r + 0.5f;
        value = value * r + 1.0f;
        value = value * r + 1.0f;
        uint32_t power;
        memcpy(&power, &shifted, sizeof power);
        power = (power + 127) << 23;
        float of_two;
        memcpy(&of_two, &power, sizeof of_two);
        sum[lane] += value * of_two;
    }
}

/* The sum of exp((logit - best) * scale) over a span. */
static double weight_of(const float *logits, uint32_t count, float best, float scale) {
    float sum[LANES] = {0}, last[LANES];
    uint32_t whole = count / LANES * LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        add_weights(logits + i, best, scale, sum);
    if (whole < count) {
        for (uint32_t lane = 0; lane < LANES; lane++)
            last[lane] = whole + lane < count ? logits[whole + lane] : best - FAR / scale;
        add_weights(last, best, scale, sum);
    }
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t lane = 0; lane < half; lane++)
            sum[lane] += sum[lane + half];
    return (double)sum[0];
}

/* The same of a whole row; spans that add nothing at all are not looked at. */
static double weight_of_all(const struct sampler_row *row, const struct ranks *ranks, float best,
                            float scale) {
    int32_t limit = rank_of(best - FAR / scale);
    double sum = 0.0;
    for (uint32_t first = 0; first < row->count; first += ranks->span)
        if (ranks->of[first / ranks->span] >= limit)
            sum += weight_of(row->logits + first, count_at(row, ranks, first), best, scale);
    return sum;
}

/* Candidates in falling order, sorted only as far as somebody looks: the heap is in front, what
 * was taken off it stands behind it, the best one last. At first those that are as good as the best
 * of some spans, which nearly always are enough; more of them where somebody looks further. */
struct falling {
    const struct sampler_row *row;
    const struct ranks *ranks;
    struct sampler_candidate *items;
    uint32_t near; /* spans: more than there are make it all of them */
    uint32_t count;
    uint32_t taken;
    double best;
    double scale;
};

/* The largest rank that so many spans have in them, or the least of all. */
static int32_t rank_of_near(const struct falling *falling) {
    const struct ranks *ranks = falling->ranks;
    uint32_t spans = (falling->row->count + ranks->span - 1) / ranks->span;
    int64_t low = ranks->least, high = ranks->most;
    while (low < high) {
        int32_t middle = (int32_t)(low + (high - low + 1) / 2);
        uint32_t reached = 0;
        for (uint32_t i = 0; i < spans; i++)
            reached += ranks->of[i] >= middle;
        if (reached >= falling->near)
            low = middle;
        else
            high = (int64_t)middle - 1;
    }
    return (int32_t)low;
}

/* More of them, from the first one on: those of the rank that `near` spans have, or of a better. */
static void fill(struct falling *falling) {
    const struct sampler_row *row = falling->row;
    const struct ranks *ranks = falling->ranks;
    falling->near = falling->near == 0 ? NEAR : falling->near * 8;
    int32_t least = rank_of_near(falling);
    falling->count = falling->taken = 0;
    for (uint32_t first = 0; first < row->count; first += ranks->span) {
        uint32_t end = first + count_at(row, ranks, first);
        for (uint32_t i = first; i < end && ranks->of[first / ranks->span] >= least; i++)
            if (rank_of(row->logits[i]) >= least)
                falling->items[falling->count++] =
                    (struct sampler_candidate){.logit = row->logits[i], .id = i};
    }
    for (uint32_t i = falling->count / 2; i-- > 0;)
        sift_down(falling->items, falling->count, i);
}

static struct sampler_candidate falling_at(struct falling *falling, uint32_t index) {
#ifdef BREAK_FALLING_FAR
    if (falling->near != 0 && index >= falling->count)
        index = falling->count - 1;
#endif
    while (index >= falling->count)
        fill(falling);
    while (falling->taken <= index) {
        uint32_t last = falling->count - ++falling->taken;
        struct sampler_candidate best = falling->items[0];
        falling->items[0] = falling->items[last];
        falling->items[last] = best;
        if (last > 1)
            sift_down(falling->items, last, 0);
    }
    return falling->items[falling->count - 1 - index];
}

/* Probability of the index-th best, in units of that of the best. */
static double weight_at(struct falling *falling, uint32_t index) {
    return exp_of(((double)falling_at(falling, index).logit - falling->best) * falling->scale);
}

enum kv_err sampler_pick(const struct sampler_settings *settings, const struct sampler_row *row,
                         struct sampler_candidate *scratch, uint32_t *id_out,
                         struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct ranks ranks;
    KV_TRY(sampler_check(settings, diag));
    KV_TRY(look_at(row, &ranks, diag));
    uint32_t best = best_in(row, &ranks);
    if (settings->temperature == 0.0f) {
        *id_out = best;
        goto done;
    }
    struct falling falling = {.row = row,
                              .ranks = &ranks,
                              .items = scratch,
                              .best = (double)row->logits[best],
                              .scale = 1.0 / (double)settings->temperature};
    uint32_t kept = settings->top_k < row->count ? settings->top_k : row->count;
    double total = 0.0, sum = 0.0;
    /* The order of a sum is part of its bits: by id when all are kept, else by falling logit, which
     * is one order where a device has sent the best. */
    if (kept == row->count && kept > SAMPLER_TOP_MAX)
        total = weight_of_all(row, &ranks, row->logits[best], (float)fmin(falling.scale, 1e30));
    else
        for (uint32_t i = 0; i < kept; i++)
            total += weight_at(&falling, i);
    if (settings->top_p < 1.0f) {
        /* The fewest whose sum reaches the share of top-p. */
        double share = 0.0;
        uint32_t nucleus = 0;
        while (nucleus < kept && (nucleus == 0 || share < (double)settings->top_p * total))
            share += weight_at(&falling, nucleus++);
        kept = nucleus;
        total = share;
    }
    double wanted = sampler_random(settings->seed, row->position) * total;
    uint32_t chosen = 0;
    while ((sum += weight_at(&falling, chosen)) <= wanted && chosen + 1 < kept)
        chosen++;
    *id_out = falling_at(&falling, chosen).id;
done:
    return err;
}

uint32_t sampler_wanted(const struct sampler_settings *settings, uint32_t count) {
    if (settings->temperature == 0.0f)
        return 1;
    return settings->top_k < count && settings->top_k <= SAMPLER_TOP_MAX ? settings->top_k : 0;
}

/* The candidates are a row of their own, in which falling logit and rising index are one order: the
 * sums of sampler_pick then add the same numbers in the same order. */
enum kv_err sampler_pick_best(const struct sampler_settings *settings,
                              const struct sampler_best *best, uint32_t *id_out,
                              struct kv_diag *diag) {
    struct sampler_candidate scratch[SAMPLER_TOP_MAX];
    float logits[SAMPLER_TOP_MAX];
    struct sampler_row row = {logits, best->count, best->position};
    uint32_t wanted, index = 0;
    enum kv_err err = KV_OK;

    KV_TRY(sampler_check(settings, diag));
    wanted = sampler_wanted(settings, UINT32_MAX);
    if (wanted == 0 || best->count != wanted)
        KV_TRY(kv_diag_set(diag, KV_ERR_INVALID, "%u candidates were given, %u are wanted",
                           best->count, wanted));
    for (uint32_t i = 0; i < best->count; i++) {
        logits[i] = best->top[i].logit;
        if (!isfinite(logits[i]))
            KV_TRY(kv_diag_set(diag, KV_ERR_DEVICE,
                               "the logit of token %u at position %llu is not finite",
                               best->top[i].id, (unsigned long long)best->position));
    }
    KV_TRY(sampler_pick(settings, &row, scratch, &index, diag));
    *id_out = best->top[index].id;
done:
    return err;
}

enum kv_err sampler_top(const struct sampler_row *row, uint32_t k,
                        struct sampler_candidate *top_out, struct kv_diag *diag) {
    enum kv_err err = check_row(row, diag);
    if (err != KV_OK)
        return err;
    if (k == 0 || k > row->count)
        return kv_diag_set(diag, KV_ERR_INVALID, "the best %u of %u logits do not exist", k,
                           row->count);
    uint32_t count = 0;
    for (uint32_t i = 0; i < row->count; i++) {
        /* Few of a vocabulary are among the best. */
        while (count == k && row->count - i >= LANES &&
               all_below(row->logits + i, top_out[k - 1].logit))
            i += LANES;
        if (i == row->count)
            break;
        struct sampler_candidate candidate = {.logit = row->logits[i], .id = i};
        if (count == k && !before(candidate, top_out[k - 1]))
            continue;
        uint32_t at = count < k ? count++ : k - 1;
        for (; at > 0 && before(candidate, top_out[at - 1]); at--)
            top_out[at] = top_out[at - 1];
        top_out[at] = candidate;
    }
    return KV_OK;
}

enum kv_err sampler_expect(const struct sampler_row *row, uint32_t id,
                           struct sampler_expected *expected_out, struct kv_diag *diag) {
    struct ranks ranks;
    enum kv_err err = look_at(row, &ranks, diag);
    if (err != KV_OK)
        return err;
    if (id >= row->count)
        return kv_diag_set(diag, KV_ERR_INVALID, "token %u is beyond the %u logits", id,
                           row->count);
    uint32_t best_id = best_in(row, &ranks);
    float best = row->logits[best_id];
    double above = (double)row->logits[id] - (double)best;
    double sum = weight_of_all(row, &ranks, best, 1.0f);
    *expected_out = (struct sampler_expected){best_id, above - log_of(sum)};
    return KV_OK;
}

enum kv_err sampler_log_prob(const struct sampler_row *row, uint32_t id, double *log_prob_out,
                             struct kv_diag *diag) {
    struct sampler_expected expected;
    enum kv_err err = sampler_expect(row, id, &expected, diag);
    if (err == KV_OK)
        *log_prob_out = expected.log_prob;
    return err;
}
