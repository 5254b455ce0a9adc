/* kernels/host/leaf.h - what the host twins of attention and seal share.
 *
 * Responsible for: one page as a twin sees it, the running softmax state of some query rows, the
 * table of page-sized steps that a twin implements, small number rules used by all twins.
 * Not responsible for: the order in which pages are visited (kv_attend.c, one file for all twins).
 *
 * A logit is (start + sum over d of q_d * c_d) * k_scale with start = k_half * sum(q); an output is
 * start + sum over t of w_t * u_t with w_t = p_t * v_scale and start = v_half * sum(w), both sums
 * ascending: codes enter as whole numbers with the missing bits zero, and the half step of the tier
 * through start. AVX2 fuses each step and plain C rounds product and sum, so for a logit of n terms
 * |difference| <= (2n + 4) * 2^-24 * scale * (sum|q_d c_d| + |start|), and for an output of n
 * tokens <= (2n + 16) * 2^-24 * sum|w_t u_t| + 2 * max|logit difference| * max|value|, sums
 * relative to their row; each fold adds 4 * 2^-24. A token beyond the count has weight 0 and is
 * not read. NaN in q reaches the row's result.
 *
 * Threads: pure.
 * Units: floats, tokens; shapes [slowest]..[fastest].
 */
#ifndef KERNELS_HOST_LEAF_H
#define KERNELS_HOST_LEAF_H

#include "kernels/host/dense.h"
#include "kernels/kvops.h"

enum {
    LEAF_DIM_MAX = 128,
    LEAF_RUNS = LAYOUT_PAGE_TOKENS / LAYOUT_RUN_TOKENS,
    LEAF_ALIGN_FLOATS = 16
};

/* fp16 bounds of a scale, and the largest |y| that a scale can hold: 65504 * 128. */
#define LEAF_SCALE_MIN_BITS 0x0400
#define LEAF_ABSMAX_LIMIT 8384512.0f

/* A sealed page; planes that the tier does not read are NULL. Only seal writes through it. */
struct leaf_planes {
    uint8_t *plane[LAYOUT_VX + 1];
    uint8_t *meta;
    uint32_t dim;
    enum layout_tier tier;
};

/* A BF16 page in runs of 16 tokens [token][dim]; nothing beyond `tokens` is read. `wide`, if not
 * NULL, is V of the whole page instead of v, 64-byte aligned. */
struct leaf_runs {
    const uint16_t *k[LEAF_RUNS];
    const uint16_t *v[LEAF_RUNS];
    const float *wide;
    uint32_t dim;
    uint32_t tokens;
};

/* Scratch for one page at a time; order inside k, v and bytes is the twin's own. */
struct leaf_tile {
    _Alignas(64) float k[LEAF_DIM_MAX * LAYOUT_PAGE_TOKENS];
    _Alignas(64) float v[LEAF_DIM_MAX * LAYOUT_PAGE_TOKENS];
    _Alignas(64) float k_scale[LAYOUT_PAGE_TOKENS]; /* times 1/sqrt(dim) */
    _Alignas(64) float v_scale[LAYOUT_PAGE_TOKENS]; /* times the unbiasing factor */
    float k_half;
    float v_half;
    uint32_t dim;
    uint32_t tokens;
};

/* Query rows [rows][dim] and their sums. seen[row]: tokens of this page that the row may see, NULL:
 * all of them. */
struct leaf_queries {
    const float *q;
    const float *sums;
    const uint8_t *seen;
    uint32_t rows;
    uint32_t dim;
};

/* Softmax so far: maximum, sum of exp(logit - max), weighted values [rows][dim]. sum 0: nothing. */
struct leaf_state {
    float *max;
    float *sum;
    float *acc;
};

struct leaf_table {
    void (*widen_planes)(const struct leaf_planes *page, struct leaf_tile *tile);
    void (*widen_runs)(const struct leaf_runs *page, struct leaf_tile *tile);
    /* out = the state of one page alone. */
    void (*attend)(const struct leaf_tile *tile, const struct leaf_queries *queries,
                   struct leaf_state out);
    /* The same bits as widen_planes and attend, for few rows; `work` is scratch. pages[1] is
     * the page that comes next (or the same again): its bytes may be fetched early. */
    void (*attend_planes)(const struct leaf_planes pages[2], const struct leaf_queries *queries,
                          struct leaf_tile *work, struct leaf_state out);
    /* into = into then from, row by row. */
    void (*fold)(struct leaf_state into, struct leaf_state from, uint32_t rows, uint32_t dim);
    /* Normalised Walsh-Hadamard of each row in place: strides 1, 2, 4 .., then one product. */
    void (*rotate)(float *values, uint32_t rows, uint32_t dim);
};

extern const struct leaf_table leaf_table_c;
extern const struct leaf_table leaf_table_avx2;

/* 1/sqrt(dim), rounded once: the softmax scale and the Hadamard factor. */
static inline float leaf_root(uint32_t dim) {
    return dim == 64 ? 0.125f : 0x1.6a09e6p-4f;
}

/* DESIGN section 4 step 4: the half step in units of the scale, and the unbiasing factor. */
static inline float leaf_k_half(enum layout_tier tier) {
    return layout_tier_k_bits(tier) == 8 ? 0.5f : 2.0f;
}

static inline float leaf_v_half(enum layout_tier tier) {
    switch (layout_tier_v_bits(tier)) {
    case 8:
        return 0.5f;
    case 4:
        return 8.0f;
    case 3:
        return 16.0f;
    default:
        return 32.0f;
    }
}

static inline float leaf_v_factor(enum layout_tier tier) {
    switch (layout_tier_v_bits(tier)) {
    case 8:
        return 1.0f;
    case 4:
        return 1.0073f;
    case 3:
        return 1.0161f;
    default:
        return 1.0372f;
    }
}

/* exp(x) for x <= 0, to 2 ulp, in the steps of dense_exp; exactly 1 at 0, NaN stays NaN. */
static inline float leaf_exp(float x) {
    float clamped = x < DENSE_EXP_MIN ? DENSE_EXP_MIN : x;
    float shifted = clamped * DENSE_EXP_LOG2E + DENSE_EXP_ROUND;
    float n = shifted - DENSE_EXP_ROUND;
    float r = clamped - n * DENSE_EXP_LN2_HIGH;
    r = r - n * DENSE_EXP_LN2_LOW;
    float p = DENSE_EXP_C6;
    p = p * r + DENSE_EXP_C5;
    p = p * r + DENSE_EXP_C4;
    p = p * r + DENSE_EXP_C3;
    p = p * r + DENSE_EXP_C2;
    p = p * (r * r) + r;
    p = p + 1.0f;
    return p * dense_bits_f32((dense_f32_bits(shifted) + 127) << 23);
}

/* Tokens of a page that row `row` sees. */
static inline uint32_t leaf_seen(const struct leaf_queries *queries, uint32_t row,
                                 uint32_t tokens) {
    return queries->seen && queries->seen[row] < tokens ? queries->seen[row] : tokens;
}

static inline size_t leaf_round(size_t floats) {
    return (floats + LEAF_ALIGN_FLOATS - 1) / LEAF_ALIGN_FLOATS * LEAF_ALIGN_FLOATS;
}

static inline size_t leaf_state_floats(uint32_t rows, uint32_t dim) {
    return 2 * leaf_round(rows) + (size_t)rows * dim;
}

static inline struct leaf_state leaf_state_at(float *floats, uint32_t rows) {
    struct leaf_state state = {floats, floats + leaf_round(rows), floats + 2 * leaf_round(rows)};
    return state;
}

/* Addresses of one page. */
struct leaf_planes leaf_planes_at(const struct kvops_pool *pool, const struct kvops_block *block,
                                  struct layout_at at);
struct leaf_runs leaf_runs_at(const struct kvops_pool *pool, const uint32_t slots[8],
                              struct layout_at at, uint32_t tokens);

/* The schedules, one code for all twins (kv_attend.c). */
struct leaf_range {
    uint32_t first;
    uint32_t end;
};
void leaf_prefill(const struct leaf_table *leaf, const struct kvops_attend *args,
                  struct leaf_range items, void *scratch);
void leaf_decode(const struct leaf_table *leaf, const struct kvops_attend *args,
                 struct leaf_range items, void *scratch);
void leaf_combine(const struct leaf_table *leaf, const struct kvops_attend *args,
                  struct leaf_range items, void *scratch);

/* What a twin of seal implements; kv_seal.c has the loop. encode gives 0, zero codes and the
 * smallest scale when no scale can hold the vector; write fills the planes that are not NULL from
 * codes [64][dim]. */
struct leaf_coder {
    int (*encode)(const uint16_t *x, uint32_t dim, int8_t *codes, uint16_t *scale_out);
    void (*write)(const struct leaf_planes *page, const int8_t *k_codes, const int8_t *v_codes);
};
extern const struct leaf_coder leaf_coder_c;
extern const struct leaf_coder leaf_coder_avx2;

void leaf_seal(const struct leaf_coder *coder, const struct kvops_seal *args,
               struct leaf_range items, void *scratch);
/* Blocks of the control codes (kv_control.c): seal, a page widened as BF16 tokens, page decode. */
void leaf_seal_control(const struct leaf_coder *coder, const struct kvops_seal *args,
                       struct leaf_range items);
void leaf_widen_control(const struct leaf_table *leaf, const struct kvops_pool *pool,
                        const struct kvops_block *block, struct layout_at at,
                        struct leaf_tile *tile);
void leaf_decode_control(const struct kvops_decode_page *args);
void leaf_append(const struct kvops_append *args, uint32_t first_item, uint32_t end_item);

#endif
