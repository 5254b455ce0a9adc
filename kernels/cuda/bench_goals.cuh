/* kernels/cuda/bench_goals.cuh - what was aimed at, beside what a run has measured.
 *
 * Responsible for: the goals and how each figure is made from the cases.
 * Not responsible for: measuring, printing.
 *
 * Threads: one owner.
 * Units: ratios, microseconds where a goal says so.
 */
#ifndef KERNELS_CUDA_BENCH_GOALS_CUH
#define KERNELS_CUDA_BENCH_GOALS_CUH

#include "kernels/cuda/bench_scene.cuh"

struct goal_case {
    enum cuda_bench_kind kind;
    const char *tier = NULL; /* NULL: any */
    uint32_t batch = 0;      /* 0: any, of any length */
    int ragged = 0;
    uint32_t tokens = 0; /* 0: the run's */
};

/* NULL when this run has no such case. */
static inline const struct cuda_bench_result *goal_find(const bench &bench, const goal_case &what) {
    uint32_t tokens = what.tokens ? what.tokens : bench.options.tokens;

    for (const struct cuda_bench_result &one : bench.results)
        if (one.kind == what.kind && (!what.tier || strcmp(one.tier, what.tier) == 0) &&
            (!what.batch || (one.batch == what.batch && one.tokens == tokens)) &&
            one.ragged == what.ragged)
            return &one;
    return NULL;
}

static inline double goal_of_read(const bench &bench, const goal_case &what) {
    const struct cuda_bench_result *found = goal_find(bench, what);

    return found ? found->of_read : NAN;
}

static inline double goal_ms(const bench &bench, const goal_case &what) {
    const struct cuda_bench_result *found = goal_find(bench, what);

    return found ? found->median_ms : NAN;
}

/* Speed over our BF16 kernel as a share of what the bytes would give. */
static inline double goal_gain(const bench &bench, const char *tier) {
    const struct cuda_bench_result *plain = goal_find(bench, {CUDA_BENCH_ATTENTION, "BF16", 1});
    const struct cuda_bench_result *own = goal_find(bench, {CUDA_BENCH_ATTENTION, tier, 1});

    return plain && own ? plain->median_ms / own->median_ms / (plain->kv_bytes / own->kv_bytes)
                        : NAN;
}

/* The fastest of the peers called `name` (NULL: of all) over our time of a layer. */
static inline double goal_peer(const bench &bench, const char *name, uint32_t rows, uint32_t tokens,
                               double own_ms) {
    double best = NAN;

    for (uint32_t i = 0; i < bench.options.peer_count; i++) {
        const struct cuda_bench_peer &peer = bench.options.peers[i];
        if (peer.rows == rows && peer.tokens == tokens && (!name || strcmp(peer.name, name) == 0) &&
            !(peer.median_us >= best))
            best = peer.median_us;
    }
    return best / (own_ms * 1e3 / BENCH_LAYERS);
}

/* Of the step's time: a block is sealed once in 256 steps of each sequence. */
static inline double goal_seal_share(const bench &bench, uint32_t batch) {
    double step = goal_ms(bench, {CUDA_BENCH_STEP, "K8V4", batch});

    return (goal_ms(bench, {CUDA_BENCH_STEP_SEAL, "K8V4", batch}) - step) / step /
           LAYOUT_BLOCK_TOKENS;
}

static inline double goal_different(const bench &bench) {
    double sum = NAN;

    for (const struct cuda_bench_result &one : bench.results)
        if (one.kind == CUDA_BENCH_BITS)
            sum = (sum == sum ? sum : 0) + (double)one.different;
    return sum;
}

static inline void goal_tell(const bench &bench, const char *what, double goal, double stretch,
                             double value, int at_most) {
    struct cuda_bench_goal told = {what, goal, stretch, at_most, value == value, 0, 0};

    if (told.measured) {
        told.value = value;
        told.hit = at_most ? value <= goal : value >= goal;
    }
    bench.options.goal(bench.options.context, &told);
}

static inline void goal_tell_attention(const bench &bench, uint32_t nine) {
    enum cuda_bench_kind in = CUDA_BENCH_IN_STEP;

    goal_tell(bench, "attention in a step / read rate, K8V4, 1 session", 0.85, 0.90,
              goal_of_read(bench, {in, "K8V4", 1}), 0);
    goal_tell(bench, "attention in a step / read rate, K6V4, 1 session", 0.85, 0.90,
              goal_of_read(bench, {in, "K6V4", 1}), 0);
    goal_tell(bench, "attention in a step / read rate, K8V4, 9 sessions", 0.91, 0.94,
              goal_of_read(bench, {in, "K8V4", nine}), 0);
    goal_tell(bench, "attention in a step / read rate, K6V4, 9 sessions", 0.91, 0.94,
              goal_of_read(bench, {in, "K6V4", nine}), 0);
    goal_tell(bench, "the same, 9 ragged sessions (4K to 128K), four tiers", 0.87, 0.91,
              goal_of_read(bench, {in, "mixed", nine, 1}), 0);
    goal_tell(bench, "the same, 9 sessions by age", 0.87, 0.91,
              goal_of_read(bench, {in, "by age", nine}), 0);
    goal_tell(bench, "speed over own BF16 kernel / ratio of bytes, K8V4", 0.90, 0.95,
              goal_gain(bench, "K8V4"), 0);
    goal_tell(bench, "speed over own BF16 kernel / ratio of bytes, K6V4", 0.90, 0.95,
              goal_gain(bench, "K6V4"), 0);
    goal_tell(bench, "speed over own BF16 kernel / ratio of bytes, K6V2", 0.90, 0.95,
              goal_gain(bench, "K6V2"), 0);
    goal_tell(bench, "speed over torch's attention (the faster one), K8V4", 2.3, 2.6,
              goal_peer(bench, NULL, 1, CUDA_BENCH_TOKENS_MAX,
                        goal_ms(bench, {CUDA_BENCH_ATTENTION, "K8V4", 1})),
              0);
    goal_tell(bench, "floats that differ: batch, units, graph or calls", 0, 0,
              goal_different(bench), 1);
    goal_tell(bench, "4K tokens, 1 session, K8V4: us a layer", 9, 6,
              goal_ms(bench, {CUDA_BENCH_ATTENTION, "K8V4", 1, 0, BENCH_SHORT_TOKENS}) * 1e3 /
                  BENCH_LAYERS,
              1);
}

static inline void goal_tell_rest(const bench &bench, uint32_t nine) {
    double one = goal_ms(bench, {CUDA_BENCH_STEP, "K8V4", 1});
    double many = goal_ms(bench, {CUDA_BENCH_STEP, "K8V4", nine});
    const struct cuda_bench_result *step = goal_find(bench, {CUDA_BENCH_STEP, "K8V4", 1});
    const struct cuda_bench_result *steps = goal_find(bench, {CUDA_BENCH_STEP, "K8V4", nine});

    goal_tell(bench, "seal, average share of a step, 1 session", 0.02, 0.02,
              goal_seal_share(bench, 1), 1);
    goal_tell(bench, "step that seals / step, 1 session", 1.10, 1.10,
              goal_ms(bench, {CUDA_BENCH_STEP_SEAL, "K8V4", 1}) / one, 1);
    goal_tell(bench, "step in which all 9 seal / step", 1.10, 1.10,
              goal_ms(bench, {CUDA_BENCH_STEP_SEAL, "K8V4", nine}) / many, 1);
    goal_tell(bench, "digest / read rate", 0.90, 0.90, goal_of_read(bench, {CUDA_BENCH_DIGEST}), 0);
    goal_tell(bench, "1 MiB slots host to device / one copy", 0.97, 0.97,
              goal_ms(bench, {CUDA_BENCH_COPY_WHOLE}) / goal_ms(bench, {CUDA_BENCH_COPY_SLOTS}), 0);
    goal_tell(bench, "prefill at 8K, K8V4, speed / torch flash", 0.5, 0.8,
              goal_peer(bench, "flash", 256, 8192, goal_ms(bench, {CUDA_BENCH_PREFILL, "K8V4"})),
              0);
    goal_tell(bench, "step / (weights and KV at copy rate), 1 session", 1.20, 1.10,
              step ? 1 / step->of_copy : NAN, 1);
    goal_tell(bench, "step / (weights and KV at copy rate), 9 sessions", 1.15, 1.10,
              steps ? 1 / steps->of_copy : NAN, 1);
}

/* All of them, in the same order, whatever was measured. */
static inline void bench_goals(const bench &bench) {
    bool full = bench.options.tokens == CUDA_BENCH_TOKENS_MAX &&
                bench.batch_max == CUDA_BENCH_BATCH_MAX && !bench.error;
    struct bench none = {};

    none.options = bench.options;
    goal_tell_attention(full ? bench : none, CUDA_BENCH_BATCH_MAX);
    goal_tell_rest(full ? bench : none, CUDA_BENCH_BATCH_MAX);
}

#endif
