/* kernels/cuda/bench_scene.cuh - what the benchmark works on: memory, content, sequences, timing.
 *
 * Responsible for: a pool of slots scattered at random, sequences of any tier in it, the card's
 * rates, timing of graph launches.
 * Not responsible for: what is timed (bench_attention.cu, bench_step.cuh).
 *
 * The first error sticks in `bench.error`; every function does nothing from then on.
 *
 * Threads: one owner.
 * Units: bytes, milliseconds.
 */
#ifndef KERNELS_CUDA_BENCH_SCENE_CUH
#define KERNELS_CUDA_BENCH_SCENE_CUH

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda/cuda_bench.h"
#include "kernels/cuda/cuda_kvops.h"
#include "kernels/cuda/cuda_ops.h"

enum {
    BENCH_LAYERS = 32,
    BENCH_KV_HEADS = 8,
    BENCH_Q_HEADS = 32,
    BENCH_DIM = 128,
    BENCH_WARM_UP = 5,
    BENCH_BY_AGE = 100, /* K6V4 beyond the last BENCH_AGE_TOKENS, K8V4 within */
    BENCH_QUARTERS,     /* K6V2, K6V3, K6V4, K8V4, a quarter of the blocks each */
    BENCH_AGE_TOKENS = 32768,
    BENCH_PLANE_SLOTS = 12,
    BENCH_SHORT_TOKENS = 4096
};

static const uint64_t bench_slot_bytes = 1 << 20;

struct bench {
    struct cuda_bench_options options;
    struct cuda_bench_device device;
    struct cuda_ops_device ops;
    struct cuda_kvops_device kvops;
    const char *error;
    std::vector<struct cuda_bench_result> results;
    cudaStream_t stream;
    std::vector<void *> owned;
    uint32_t batch_max;
    uint32_t block_count;
    struct kvops_pool pool;
    uint64_t slot_count;
    std::vector<uint32_t> order;
    uint32_t used;
    uint64_t random;
    std::vector<struct kvops_block> planes[CUDA_BENCH_BATCH_MAX]; /* every stream of K8V4 */
    std::vector<struct kvops_block> plain;                        /* BF16, one sequence */
    struct kvops_page pages[CUDA_BENCH_BATCH_MAX][1 + LAYOUT_WINDOW_PAGES_MAX];
};

static inline void bench_fail(bench &bench, const char *why) {
    if (!bench.error)
        bench.error = why;
}

/* 1 while there was no error; keeps the first. */
static inline bool bench_ok(bench &bench, cudaError_t error) {
    if (error != cudaSuccess)
        bench_fail(bench, cudaGetErrorString(error));
    return !bench.error;
}

static inline uint64_t bench_random(bench &bench) {
    uint64_t z = (bench.random += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

template <class T> static T *bench_take(bench &bench, size_t count) {
    void *memory = NULL;

    if (bench.error || !bench_ok(bench, cudaMalloc(&memory, count * sizeof(T))))
        return NULL;
    bench.owned.push_back(memory);
    return (T *)memory;
}

template <class T> static T *bench_upload(bench &bench, const std::vector<T> &from) {
    T *to = bench_take<T>(bench, from.size() + 1);

    if (to)
        bench_ok(bench,
                 cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
}

template <class T> static void bench_fetch(bench &bench, std::vector<T> &to, const T *from) {
    if (!bench.error)
        bench_ok(bench, cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost));
}

/* Gives back what was taken since `mark` = bench.owned.size(). */
static inline void bench_drop(bench &bench, size_t mark) {
    while (bench.owned.size() > mark) {
        (void)cudaFree(bench.owned.back());
        bench.owned.pop_back();
    }
}

/* --- content */

enum bench_content {
    BENCH_BYTES,   /* any bytes */
    BENCH_SCALES,  /* fp16 near 2^-7 */
    BENCH_VALUES,  /* BF16 of sizes 2^-3 to 2^0 */
    BENCH_WEIGHTS, /* BF16 of sizes 2^-8 to 2^-6, either sign */
    BENCH_FLOATS   /* fp32 of sizes 2^-1 to 2^0 */
};

static __global__ void bench_fill_kernel(uint64_t *words, size_t count, int content,
                                         uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        if (content == BENCH_SCALES)
            z = (z & 0x07FF07FF07FF07FFull) + 0x1C001C001C001C00ull;
        if (content == BENCH_VALUES)
            z = (z & 0x81FF81FF81FF81FFull) | 0x3E003E003E003E00ull;
        if (content == BENCH_WEIGHTS)
            z = (z & 0x80FF80FF80FF80FFull) + 0x3B803B803B803B80ull;
        if (content == BENCH_FLOATS)
            z = (z & 0x00FFFFFF00FFFFFFull) + 0x3F0000003F000000ull;
        words[i] = z;
    }
}

static inline void bench_fill(bench &bench, void *at, size_t bytes, enum bench_content content,
                              uint64_t seed) {
    if (bench.error)
        return;
    bench_fill_kernel<<<1056, 256, 0, bench.stream>>>((uint64_t *)at, bytes / 8, content, seed);
    bench_ok(bench, cudaGetLastError());
}

static inline uint32_t bench_next_slot(bench &bench) {
    return bench.order[bench.used++];
}

static inline void bench_shuffle(bench &bench) {
    bench.order.resize(bench.slot_count);
    for (uint32_t i = 0; i < bench.slot_count; i++) {
        uint32_t at = (uint32_t)(bench_random(bench) % (i + 1));
        bench.order[i] = bench.order[at];
        bench.order[at] = i;
    }
}

static inline void bench_page(bench &bench, uint32_t *slots) {
    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++) {
        slots[i] = bench_next_slot(bench);
        bench_fill(bench, bench.pool.slots + slots[i] * bench_slot_bytes, bench_slot_bytes,
                   BENCH_VALUES, 3 + slots[i]);
    }
}

/* Slots of `batch_max` sequences at K8V4 and of one in BF16, windows, sinks, META. */
static inline uint64_t bench_slots_for(const bench &bench, uint32_t batch) {
    return batch * ((uint64_t)bench.block_count * BENCH_PLANE_SLOTS +
                    (1 + LAYOUT_WINDOW_PAGES_MAX) * LAYOUT_PAGE_SLOTS) +
           (uint64_t)bench.block_count * LAYOUT_BLOCK_SLOTS;
}

static inline void bench_make_pool(bench &bench) {
    uint64_t meta;

    bench.pool.geometry = {BENCH_LAYERS, BENCH_KV_HEADS, BENCH_DIM};
    meta = (uint64_t)bench.batch_max * bench.block_count *
           layout_meta_frame_bytes(&bench.pool.geometry);
    bench.slot_count = bench_slots_for(bench, bench.batch_max);
    bench_shuffle(bench);
    bench.pool.slots = bench_take<uint8_t>(bench, bench.slot_count * bench_slot_bytes);
    bench.pool.meta = bench_take<uint8_t>(bench, meta + 64);
    bench_fill(bench, bench.pool.slots, bench.slot_count * bench_slot_bytes, BENCH_BYTES, 1);
    bench_fill(bench, bench.pool.meta, meta, BENCH_SCALES, 2);
    for (uint32_t s = 0; s < bench.batch_max; s++) {
        for (uint32_t b = 0; b < bench.block_count; b++) {
            struct kvops_block block;
            memset(&block, 0xFF, sizeof block);
            for (uint32_t i = 0; i < BENCH_PLANE_SLOTS; i++)
                block.slot[i] = bench_next_slot(bench);
            block.meta_frame = s * bench.block_count + b;
            block.tier = LAYOUT_K8V4;
            bench.planes[s].push_back(block);
        }
        for (struct kvops_page &page : bench.pages[s])
            bench_page(bench, page.slot);
    }
    for (uint32_t b = 0; b < bench.block_count; b++) {
        struct kvops_block block = {};
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
            bench_page(bench, block.slot + p * LAYOUT_PAGE_SLOTS);
        block.tier = LAYOUT_TIER_BF16;
        bench.plain.push_back(block);
    }
    bench_ok(bench, cudaStreamSynchronize(bench.stream));
}

/* --- sequences */

struct bench_case {
    const char *name;
    int tier; /* enum layout_tier, BENCH_BY_AGE or BENCH_QUARTERS */
    uint32_t batch;
    uint32_t tokens; /* of each sequence; 0: ragged, see bench_tokens */
    uint32_t first;  /* of the pool's sequences */
    uint32_t grain;  /* of the plan, as cuda_kvops_plan_make has it */
};

/* Ragged sequences have these thirty-seconds of the longest, which comes first. */
static inline uint32_t bench_tokens(const bench &bench, const bench_case &what, uint32_t s) {
    static const uint32_t shares[CUDA_BENCH_BATCH_MAX] = {32, 28, 24, 16, 12, 8, 4, 2, 1};

    return what.tokens ? what.tokens : bench.options.tokens / 32 * shares[what.first + s];
}

static inline enum layout_tier bench_tier(int tier, uint32_t block, uint32_t count) {
    static const enum layout_tier ladder[] = {LAYOUT_K6V2, LAYOUT_K6V3, LAYOUT_K6V4, LAYOUT_K8V4};

    if (tier == BENCH_QUARTERS)
        return ladder[(uint64_t)block * 4 / count];
    if (tier == BENCH_BY_AGE)
        return (count - block) * LAYOUT_BLOCK_TOKENS > BENCH_AGE_TOKENS ? LAYOUT_K6V4 : LAYOUT_K8V4;
    return (enum layout_tier)tier;
}

/* Sequences of a case on the host; device copies are made per layer, as chunks differ. */
struct bench_scene {
    std::vector<std::vector<struct kvops_block>> blocks;
    std::vector<struct kvops_seq> host;
    std::vector<struct kvops_seq> mirror; /* device pointers, no chunk */
    struct kvops_attend args;             /* device pointers; seqs, q, out, layer are not set */
    struct cuda_kvops_plan plan;
    double layer_bytes;
};

static inline void bench_add_seq(bench &bench, bench_scene &scene, const bench_case &what,
                                 uint32_t s) {
    uint32_t tokens = bench_tokens(bench, what, s), own = what.first + s;
    uint32_t count = (uint32_t)layout_sealed_blocks(tokens);
    const std::vector<struct kvops_block> &from =
        what.tier == LAYOUT_TIER_BF16 ? bench.plain : bench.planes[own];
    std::vector<struct kvops_block> blocks(from.begin(), from.begin() + count);
    struct kvops_seq seq = {};

    for (uint32_t b = 0; b < count; b++) {
        blocks[b].tier = (uint8_t)bench_tier(what.tier, b, count);
        uint32_t slots = layout_tier_slots((enum layout_tier)blocks[b].tier);
        scene.layer_bytes += slots * (double)bench_slot_bytes / BENCH_LAYERS;
        scene.layer_bytes += slots < LAYOUT_BLOCK_SLOTS
                                 ? BENCH_KV_HEADS * LAYOUT_BLOCK_PAGES * LAYOUT_META_TILE_BYTES
                                 : 0;
    }
    seq.block_count = count;
    seq.sink_tokens = layout_sink_tokens(tokens);
    seq.window_tokens = layout_window_tokens(tokens);
    seq.sinks = bench.pages[own][0];
    seq.first_row = s;
    seq.row_count = 1;
    scene.layer_bytes += (seq.sink_tokens + seq.window_tokens) * 4.0 * BENCH_DIM * BENCH_KV_HEADS;
    scene.blocks.push_back(blocks);
    scene.host.push_back(seq);
    std::vector<struct kvops_page> window(bench.pages[own] + 1,
                                          bench.pages[own] + 1 + LAYOUT_WINDOW_PAGES_MAX);
    seq.blocks = bench_upload(bench, blocks);
    seq.window = bench_upload(bench, window);
    scene.mirror.push_back(seq);
}

/* `chunk` 1: the row's own K and V come as a chunk of one token. */
static inline void bench_make_scene(bench &bench, bench_scene &scene, const bench_case &what,
                                    bool chunk) {
    static const uint16_t some_chunk = 0; /* the plan looks whether there is one, no further */
    struct kvops_attend host = {};

    scene.layer_bytes = 0;
    for (uint32_t s = 0; s < what.batch; s++)
        bench_add_seq(bench, scene, what, s);
    for (uint32_t s = 0; s < what.batch; s++) {
        scene.host[s].blocks = scene.blocks[s].data();
        scene.host[s].window = bench.pages[what.first + s] + 1;
        scene.host[s].chunk_k = chunk ? &some_chunk : NULL;
    }
    host.pool = bench.pool;
    host.q_heads = BENCH_Q_HEADS;
    host.seqs = scene.host.data();
    host.seq_count = what.batch;
    size_t bytes = cuda_kvops_plan_bytes(&host, &bench.kvops);
    std::vector<uint64_t> plan(bytes / 8 + 2);
    uint64_t *at = bench_take<uint64_t>(bench, plan.size());
    if (bench.error)
        return;
    (void)cuda_kvops_plan_make(&host, &bench.kvops, what.grain, plan.data(), at, &scene.plan);
    bench_ok(bench, cudaMemcpy(at, plan.data(), bytes, cudaMemcpyHostToDevice));
    scene.args = host;
    scene.args.partial_bytes = std::max(kvops_partial_bytes(&host), kvops_part_bytes(&host));
    scene.args.partials = bench_take<float>(bench, scene.args.partial_bytes / 4 + 16);
}

static inline void bench_attend(bench &bench, bench_scene &scene, const struct kvops_attend &args,
                                int overlap) {
    struct cuda_kvops_launch launch = {&args, &scene.plan, bench.stream, overlap};

    bench_ok(bench, cuda_kvops_decode(&launch));
    launch.overlap = (int)bench.ops.overlap;
    bench_ok(bench, cuda_kvops_combine(&launch));
}

/* --- timing */

struct bench_time {
    double median_ms;
    double p99_ms;
};

static inline bench_time bench_time_of(std::vector<float> ms) {
    std::sort(ms.begin(), ms.end());
    return {ms[ms.size() / 2], ms[(ms.size() * 99 + 99) / 100 - 1]};
}

/* Times of each run, in turns, so that a card whose clocks wander treats all alike. */
typedef std::vector<std::vector<float>> bench_times;
static inline bench_times bench_turns(bench &bench,
                                      const std::vector<std::function<void()>> &runs) {
    bench_times ms(runs.size(), std::vector<float>(bench.options.repeats));
    cudaEvent_t begin = NULL, end = NULL;

    if (!bench.error && bench_ok(bench, cudaEventCreate(&begin)))
        bench_ok(bench, cudaEventCreate(&end));
    for (int i = -BENCH_WARM_UP; i < (int)bench.options.repeats; i++)
        for (size_t run = 0; run < runs.size() && !bench.error; run++) {
            float last = 0;
            bench_ok(bench, cudaEventRecord(begin, bench.stream));
            runs[run]();
            bench_ok(bench, cudaEventRecord(end, bench.stream));
            bench_ok(bench, cudaEventSynchronize(end));
            bench_ok(bench, cudaEventElapsedTime(&last, begin, end));
            if (i >= 0)
                ms[run][i] = last;
        }
    if (begin)
        (void)cudaEventDestroy(begin);
    if (end)
        (void)cudaEventDestroy(end);
    return ms;
}

template <class F> static bench_time bench_measure(bench &bench, F &&run) {
    return bench_time_of(bench_turns(bench, {run})[0]);
}

/* What the multiprocessors' clock is while they work. */
static __global__ void bench_clock_kernel(double *mhz) {
    uint64_t begun, now;
    long long clocks = clock64();

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begun < 200000);
    *mhz = (double)(clock64() - clocks) * 1e3 / (double)(now - begun);
}

static inline double bench_clock(bench &bench) {
    size_t mark = bench.owned.size();
    std::vector<double> mhz(1);
    double *at = bench_take<double>(bench, 1);

    if (!bench.error) {
        bench_clock_kernel<<<1, 1, 0, bench.stream>>>(at);
        bench_ok(bench, cudaStreamSynchronize(bench.stream));
    }
    bench_fetch(bench, mhz, at);
    bench_drop(bench, mark);
    return mhz[0];
}

/* Hands a case over and keeps it for the goals; nothing after an error. */
static inline void bench_report(bench &bench, struct cuda_bench_result result, bench_time time) {
    result.median_ms = time.median_ms;
    result.p99_ms = time.p99_ms;
    if (time.median_ms > 0) {
        double rate = result.all_bytes / (time.median_ms * 1e-3);
        result.of_copy = rate / bench.device.copy_rate;
        result.of_read = rate / bench.device.read_rate;
        result.repeats = bench.options.repeats;
    }
    result.sm_mhz = bench_clock(bench);
    if (bench.error)
        return;
    bench.results.push_back(result);
    bench.options.result(bench.options.context, &result);
}

/* What `record` enqueues, as a graph; NULL after an error. */
template <class F> static cudaGraphExec_t bench_capture(bench &bench, F &&record) {
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph = NULL;

    if (bench.error ||
        !bench_ok(bench, cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal)))
        return NULL;
    record();
    if (bench_ok(bench, cudaStreamEndCapture(bench.stream, &graph)))
        bench_ok(bench, cudaGraphInstantiate(&exec, graph, 0));
    if (graph)
        (void)cudaGraphDestroy(graph);
    return exec;
}

static inline void bench_launch(bench &bench, cudaGraphExec_t exec) {
    if (!bench.error)
        bench_ok(bench, cudaGraphLaunch(exec, bench.stream));
}

static __global__ void __launch_bounds__(512)
    bench_read_kernel(const uint4 *from, size_t count, uint32_t *out) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;

    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = i + j * step < count ? __ldcs(from + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 0x12345678)
        *out = sum;
}

/* Over the pool's first half, and onto its second: several gigabytes at the usual size. */
static inline void bench_rates(bench &bench) {
    size_t bytes = std::min<size_t>(bench.slot_count * bench_slot_bytes / 2, 8ull << 30);
    uint8_t *to = bench_take<uint8_t>(bench, bytes);
    uint32_t *out = bench_take<uint32_t>(bench, 1);

    for (uint32_t ctas = 1; ctas <= 4; ctas++) { /* the best of four shapes */
        bench_time time = bench_measure(bench, [&] {
            bench_read_kernel<<<bench.device.multiprocessors * ctas, 512, 0, bench.stream>>>(
                (const uint4 *)bench.pool.slots, bytes / 16, out);
            bench_ok(bench, cudaGetLastError());
        });
        bench.device.read_rate = std::max(bench.device.read_rate, bytes / (time.median_ms * 1e-3));
    }
    bench_time time = bench_measure(bench, [&] {
        bench_ok(bench, cudaMemcpyAsync(to, bench.pool.slots, bytes, cudaMemcpyDeviceToDevice,
                                        bench.stream));
    });
    bench.device.copy_rate = 2 * bytes / (time.median_ms * 1e-3);
    bench.device.sm_mhz = bench_clock(bench);
}

#endif
