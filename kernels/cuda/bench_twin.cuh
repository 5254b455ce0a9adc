/* kernels/cuda/bench_twin.cuh - what the benchmark computed, once more by the host twin.
 *
 * Responsible for: bringing the slots that one layer of a sequence needs to the processor, the twin
 * of decode over them.
 * Not responsible for: which cases are compared, how far apart answers may be.
 *
 * Threads: one owner.
 * Units: bytes, slots.
 */
#ifndef KERNELS_CUDA_BENCH_TWIN_CUH
#define KERNELS_CUDA_BENCH_TWIN_CUH

#include "kernels/cuda/bench_step.cuh"

static inline void bench_fetch_slots(bench &bench, std::vector<uint32_t *> &wanted, uint8_t *to) {
    for (uint32_t i = 0; i < wanted.size() && !bench.error; i++) {
        bench_ok(bench, cudaMemcpy(to + i * bench_slot_bytes,
                                   bench.pool.slots + *wanted[i] * bench_slot_bytes,
                                   bench_slot_bytes, cudaMemcpyDeviceToHost));
        *wanted[i] = i;
    }
}

static inline void bench_want_block(struct kvops_block &block, uint32_t layer,
                                    std::vector<uint32_t *> &wanted) {
    static const struct layout_geometry geometry = {BENCH_LAYERS, BENCH_KV_HEADS, BENCH_DIM};
    uint32_t streams = layout_tier_streams((enum layout_tier)block.tier);

    if (block.tier == LAYOUT_TIER_BF16) {
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
            wanted.push_back(&block.slot[p * LAYOUT_PAGE_SLOTS + layer / 4]);
        return;
    }
    for (uint32_t s = LAYOUT_KH; s <= LAYOUT_VX; s++)
        if (streams >> s & 1)
            wanted.push_back(
                &block.slot[layout_stream_table((enum layout_stream)s) +
                            layout_tile(&geometry, (enum layout_stream)s, {layer, 0, 0}).slot]);
}

/* Memory of the host aligned as the twins want it. */
struct bench_aligned {
    std::vector<uint64_t> words;
    uint8_t *at;

    explicit bench_aligned(size_t bytes) : words(bytes / 8 + 16, ~0ull) {
        at = (uint8_t *)(((uintptr_t)words.data() + 63) / 64 * 64);
    }
};

static inline const struct kvops_table *bench_host() {
    return ops_cpu_has_avx2() ? kvops_host_avx2() : kvops_host_c();
}

/* One layer of the scene's first sequence in memory of the processor. */
struct bench_mirror {
    std::vector<struct kvops_block> blocks;
    struct kvops_page window[LAYOUT_WINDOW_PAGES_MAX];
    struct kvops_seq seq;
    std::unique_ptr<bench_aligned> slots, meta;
    struct kvops_attend args; /* one sequence; q, out and partials are not set */
};

static inline void bench_mirror_make(bench &bench, const bench_scene &scene, uint32_t layer,
                                     bench_mirror &mirror) {
    size_t meta = bench.block_count * layout_meta_frame_bytes(&bench.pool.geometry);
    std::vector<uint32_t *> wanted;

    mirror.blocks = scene.blocks[0];
    mirror.seq = scene.host[0];
    memcpy(mirror.window, bench.pages[0] + 1, sizeof mirror.window);
    for (struct kvops_block &block : mirror.blocks)
        bench_want_block(block, layer, wanted);
    for (struct kvops_page &page : mirror.window)
        wanted.push_back(&page.slot[layer / 4]);
    wanted.push_back(&mirror.seq.sinks.slot[layer / 4]);
    mirror.slots.reset(new bench_aligned(wanted.size() * bench_slot_bytes));
    mirror.meta.reset(new bench_aligned(meta));
    bench_fetch_slots(bench, wanted, mirror.slots->at);
    if (!bench.error)
        bench_ok(bench, cudaMemcpy(mirror.meta->at, bench.pool.meta, meta, cudaMemcpyDeviceToHost));
    mirror.seq.blocks = mirror.blocks.data();
    mirror.seq.window = mirror.window;
    mirror.seq.chunk_k = mirror.seq.chunk_v = NULL;
    mirror.args = scene.args;
    mirror.args.pool.slots = mirror.slots->at;
    mirror.args.pool.meta = mirror.meta->at;
    mirror.args.layer = layer;
    mirror.args.seqs = &mirror.seq;
    mirror.args.seq_count = 1;
}

/* |a - b| over |a|, as vectors; what was not written to `a` (bench_aligned) is left out. */
static inline double bench_distance(const float *a, const float *b, size_t count) {
    static const uint32_t unwritten = UINT32_MAX;
    double errors = 0, norms = 0;

    for (size_t i = 0; i < count; i++) {
        if (memcmp(&a[i], &unwritten, sizeof unwritten) == 0)
            continue;
        errors += pow((double)a[i] - b[i], 2);
        norms += pow((double)a[i], 2);
    }
    return norms > 0 ? sqrt(errors / norms) : 1;
}

/* `chunk` is the K and V of the row itself, [2][kv head][dim], or empty. */
static inline double bench_twin_error(bench &bench, const bench_scene &scene, uint32_t layer,
                                      const float *q, const float *out,
                                      const std::vector<uint16_t> &chunk) {
    bench_aligned query(STEP_HIDDEN * 4), answer(STEP_HIDDEN * 4), own(2 * STEP_KV * 2);
    bench_mirror mirror;

    bench_mirror_make(bench, scene, layer, mirror);
    if (bench.error)
        return 1;
    memcpy(query.at, q, STEP_HIDDEN * 4);
    if (!chunk.empty()) {
        memcpy(own.at, chunk.data(), chunk.size() * 2);
        mirror.seq.chunk_k = (const uint16_t *)own.at;
        mirror.seq.chunk_v = mirror.seq.chunk_k + STEP_KV;
        mirror.seq.chunk_head_stride = BENCH_DIM;
    }
    struct kvops_attend &args = mirror.args;
    args.q = (const float *)query.at;
    args.out = (float *)answer.at;
    bench_aligned partials(kvops_partial_bytes(&args));
    args.partials = (float *)partials.at;
    bench_aligned scratch(kvops_decode_scratch_bytes(&args) + kvops_combine_scratch_bytes(&args));
    bench_host()->decode(&args, 0, kvops_decode_items(&args), scratch.at);
    bench_host()->combine(&args, 0, kvops_combine_items(&args), scratch.at);
    return bench_distance(args.out, out, STEP_HIDDEN);
}

#endif
