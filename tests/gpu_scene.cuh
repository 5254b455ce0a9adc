/* tests/gpu_scene.cuh - sequences on the host and their mirror on the device, for gpu_*.cu.
 *
 * Responsible for: a pool filled with NaN patterns, shuffled slots, random sequences sealed by the
 * host twin, the same argument structs with device addresses.
 * Not responsible for: checking or timing anything.
 *
 * Threads: one.
 * Units: tokens, slots, bytes.
 */
#ifndef TESTS_GPU_SCENE_CUH
#define TESTS_GPU_SCENE_CUH

#include "kernels/cuda/cuda_kvops.h"

extern "C" {
#include "kernels/ops.h"
}

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define GPU_TRY(call)                                                                              \
    do {                                                                                           \
        cudaError_t try_error = (call);                                                            \
        if (try_error != cudaSuccess) {                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                          \
                    cudaGetErrorString(try_error));                                                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

struct gpu_random {
    uint64_t state;
    uint64_t next() {
        uint64_t z = (state += 0x9E3779B97F4A7C15ull);
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t end) {
        return (uint32_t)(next() % end);
    }
    float normal() { /* near enough: a sum of uniform numbers with variance 1 */
        float sum = 0;
        for (int i = 0; i < 3; i++) {
            uint64_t bits = next();
            for (int part = 0; part < 4; part++)
                sum += (float)(bits >> (16 * part) & 0xffff) / 65536.0f - 0.5f;
        }
        return sum;
    }
};

static inline uint16_t gpu_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static inline const struct kvops_table *gpu_host_table() {
    return ops_cpu_has_avx2() ? kvops_host_avx2() : kvops_host_c();
}

/* 64-byte aligned host memory, freed with the process. */
static inline uint8_t *gpu_host_bytes(size_t bytes, int fill) {
    uint8_t *memory = (uint8_t *)aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!memory) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    memset(memory, fill, bytes);
    return memory;
}

struct gpu_seq {
    std::vector<struct kvops_block> blocks;
    std::vector<struct kvops_page> window;
    std::vector<uint64_t> hidden;
    std::vector<uint16_t> chunk;
};

struct gpu_scene {
    struct layout_geometry geometry;
    struct kvops_pool host;
    struct kvops_pool device;
    uint32_t slot_count, frame_count, slots_used, frames_used;
    std::vector<uint32_t> order;
    std::vector<gpu_seq> data;
    std::vector<struct kvops_seq> seqs;
    std::vector<void *> owned; /* device memory */
    gpu_random random;
    double k_norm_max; /* of any token's K */
    double v_max;

    void init(struct layout_geometry shape, uint32_t slots, uint32_t frames, uint64_t seed);
    void release();
    uint64_t slot_bytes() const {
        return layout_slot_bytes(&geometry);
    }
    uint32_t take_slot() {
        if (slots_used == slot_count)
            exit((fprintf(stderr, "scene is too small\n"), 1));
        return order[slots_used++];
    }
    struct kvops_page page(uint32_t tokens);
    void fill_page(const uint32_t *slots, uint32_t tokens);
    struct kvops_block block(enum layout_tier tier);
    void add(uint32_t n_kv, const std::vector<enum layout_tier> &tiers, uint32_t chunk_rows);
    template <class T> T *upload(const T *from, size_t count) {
        void *to;
        GPU_TRY(cudaMalloc(&to, count * sizeof(T) + 16));
        GPU_TRY(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyHostToDevice));
        owned.push_back(to);
        return (T *)to;
    }
    void upload_pool();
    struct kvops_seq seq_on_device(const struct kvops_seq &seq);
};

inline void gpu_scene::init(struct layout_geometry shape, uint32_t slots, uint32_t frames,
                            uint64_t seed) {
    geometry = shape;
    slot_count = slots;
    frame_count = frames;
    slots_used = frames_used = 0;
    random.state = seed;
    k_norm_max = v_max = 0;
    order.resize(slots);
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t at = random.below(i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    host.geometry = device.geometry = shape;
    host.slots = gpu_host_bytes(slots * slot_bytes(), 0xFF);
    host.meta = gpu_host_bytes(frames * layout_meta_frame_bytes(&shape), 0xFF);
    GPU_TRY(cudaMalloc((void **)&device.slots, slots * slot_bytes()));
    GPU_TRY(cudaMalloc((void **)&device.meta, frames * layout_meta_frame_bytes(&shape)));
    owned.push_back(device.slots);
    owned.push_back(device.meta);
    data.reserve(64); /* seqs point into it */
}

inline void gpu_scene::release() {
    for (void *memory : owned)
        GPU_TRY(cudaFree(memory));
    free(host.slots);
    free(host.meta);
}

/* Random tokens; K has outlier channels and a mean, V small-norm tokens, as real caches have. */
inline void gpu_scene::fill_page(const uint32_t *slots, uint32_t tokens) {
    uint32_t dim = geometry.head_dim;

    for (uint32_t i = 0; i < geometry.layers * geometry.kv_heads * tokens; i++) {
        uint32_t t = i % tokens, row = i / tokens;
        struct layout_at at = {row / geometry.kv_heads, row % geometry.kv_heads, 0};
        float size = random.below(16) == 0 ? 0.05f : 1.0f;
        double norm = 0;
        for (uint32_t value = 0; value < 2; value++) {
            struct layout_place place = layout_run(&geometry, at, value, t / LAYOUT_RUN_TOKENS);
            uint16_t *to = (uint16_t *)(host.slots + slots[place.slot] * slot_bytes() + place.off) +
                           t % LAYOUT_RUN_TOKENS * dim;
            for (uint32_t d = 0; d < dim; d++) {
                float x = random.normal();
                x = value ? x * size : x * (d % 21 == 5 ? 3.0f : 0.7f) + (d % 9 == 2 ? 1.0f : 0.0f);
                to[d] = gpu_bf16(x);
                norm += value ? 0 : (double)x * x;
                v_max = value ? fmax(v_max, fabs(x)) : v_max;
            }
        }
        k_norm_max = fmax(k_norm_max, sqrt(norm));
    }
}

inline struct kvops_page gpu_scene::page(uint32_t tokens) {
    struct kvops_page page;

    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++)
        page.slot[i] = take_slot();
    fill_page(page.slot, tokens);
    return page;
}

inline struct kvops_block gpu_scene::block(enum layout_tier tier) {
    struct kvops_seal seal = {};
    uint32_t used;

    seal.pool = host;
    memset(&seal.block, 0xFF, sizeof seal.block);
    seal.block.tier = (uint8_t)tier;
    if (tier == LAYOUT_TIER_BF16) {
        for (uint32_t i = 0; i < LAYOUT_BLOCK_SLOTS; i++)
            seal.block.slot[i] = take_slot();
        for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
            fill_page(seal.block.slot + p * LAYOUT_PAGE_SLOTS, LAYOUT_PAGE_TOKENS);
        return seal.block;
    }
    if (layout_tier_is_control(tier)) {
        for (uint32_t i = 0; i < layout_tier_slots(tier); i++)
            seal.block.slot[i] = take_slot();
    } else {
        seal.block.meta_frame = frames_used++;
    }
    for (uint32_t s = LAYOUT_KH; s <= LAYOUT_VX; s++)
        for (uint32_t i = 0; i < layout_stream_slots((enum layout_stream)s); i++)
            if (layout_tier_streams(tier) >> s & 1)
                seal.block.slot[layout_stream_table((enum layout_stream)s) + i] = take_slot();
    used = slots_used;
    for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
        seal.pages[p] = page(LAYOUT_PAGE_TOKENS);
    std::vector<int32_t> bad(kvops_seal_items(&seal));
    uint8_t *scratch = gpu_host_bytes(kvops_seal_scratch_bytes(&seal), 0xFF);
    seal.bad_token = bad.data();
    gpu_host_table()->seal(&seal, 0, kvops_seal_items(&seal), scratch);
    free(scratch);
    while (slots_used > used) /* the pages go back, poisoned */
        memset(host.slots + order[--slots_used] * slot_bytes(), 0xFF, slot_bytes());
    return seal.block;
}

/* Sinks, blocks (tier of block b = tiers[b % count]), window; a chunk of so many rows. */
inline void gpu_scene::add(uint32_t n_kv, const std::vector<enum layout_tier> &tiers,
                           uint32_t chunk_rows) {
    struct kvops_seq seq = {};
    uint32_t dim = geometry.head_dim, heads = geometry.kv_heads, room = chunk_rows + 8;

    data.emplace_back();
    gpu_seq &own = data.back();
    seq.sink_tokens = layout_sink_tokens(n_kv);
    seq.sinks = page(seq.sink_tokens);
    seq.block_count = (uint32_t)layout_sealed_blocks(n_kv);
    seq.window_tokens = layout_window_tokens(n_kv);
    for (uint32_t b = 0; b < seq.block_count; b++)
        own.blocks.push_back(block(tiers[b % tiers.size()]));
    for (uint32_t t = 0; t < seq.window_tokens; t += LAYOUT_PAGE_TOKENS)
        own.window.push_back(page(seq.window_tokens - t < 64 ? seq.window_tokens - t : 64));
    own.hidden.assign(seq.block_count / 64 + 1, 0);
    if (chunk_rows) { /* capacity beyond the rows stays NaN */
        own.chunk.assign(2 * heads * room * dim, 0xFFFF);
        for (uint32_t i = 0; i < 2 * heads * chunk_rows * dim; i++)
            own.chunk[i / (chunk_rows * dim) * room * dim + i % (chunk_rows * dim)] =
                gpu_bf16(random.normal());
        seq.chunk_k = own.chunk.data();
        seq.chunk_v = own.chunk.data() + heads * room * dim;
        seq.chunk_head_stride = room * dim;
    }
    seq.blocks = own.blocks.data();
    seq.window = own.window.data();
    seq.hidden_blocks = own.hidden.data();
    seq.first_row = seqs.empty() ? 0 : seqs.back().first_row + seqs.back().row_count;
    seq.row_count = chunk_rows ? chunk_rows : 1;
    seqs.push_back(seq);
}

inline void gpu_scene::upload_pool() {
    GPU_TRY(
        cudaMemcpy(device.slots, host.slots, slot_count * slot_bytes(), cudaMemcpyHostToDevice));
    GPU_TRY(cudaMemcpy(device.meta, host.meta, frame_count * layout_meta_frame_bytes(&geometry),
                       cudaMemcpyHostToDevice));
}

inline struct kvops_seq gpu_scene::seq_on_device(const struct kvops_seq &seq) {
    struct kvops_seq out = seq;
    size_t chunk = 2 * geometry.kv_heads * seq.chunk_head_stride;

    out.blocks = upload(seq.blocks, seq.block_count);
    out.window = upload(seq.window, (seq.window_tokens + 63) / 64);
    if (seq.hidden_blocks)
        out.hidden_blocks = upload(seq.hidden_blocks, seq.block_count / 64 + 1);
    if (seq.chunk_k) {
        out.chunk_k = upload(seq.chunk_k, chunk);
        out.chunk_v = out.chunk_k + (seq.chunk_v - seq.chunk_k);
    }
    return out;
}

/* One decode step of a batch on the device, with its plan, partials and output. */
struct gpu_step {
    struct kvops_attend args;
    struct cuda_kvops_plan plan;
    struct cuda_kvops_launch launch;
    size_t out_count;
};

static inline gpu_step gpu_step_of(gpu_scene &scene, const std::vector<struct kvops_seq> &seqs,
                                   const struct cuda_kvops_device &device, uint32_t q_heads,
                                   uint32_t grain) {
    gpu_step step = {};
    std::vector<struct kvops_seq> mirror;
    struct kvops_attend host = {};

    host.pool = scene.host;
    host.q_heads = q_heads;
    host.seqs = seqs.data();
    host.seq_count = (uint32_t)seqs.size();
    for (const struct kvops_seq &seq : seqs)
        mirror.push_back(scene.seq_on_device(seq));
    step.args = host;
    step.args.pool = scene.device;
    step.args.seqs = scene.upload(mirror.data(), mirror.size());
    uint64_t bytes = kvops_partial_bytes(&host);
    step.args.partial_bytes = bytes > kvops_part_bytes(&host) ? bytes : kvops_part_bytes(&host);
    std::vector<uint8_t> partials(step.args.partial_bytes, 0xFF);
    step.args.partials = (float *)scene.upload(partials.data(), partials.size());
    uint8_t *plan = gpu_host_bytes(cuda_kvops_plan_bytes(&host, &device), 0xFF);
    void *at;
    GPU_TRY(cudaMalloc(&at, cuda_kvops_plan_bytes(&host, &device)));
    scene.owned.push_back(at);
    size_t used = cuda_kvops_plan_make(&host, &device, grain, plan, at, &step.plan);
    GPU_TRY(cudaMemcpy(at, plan, used, cudaMemcpyHostToDevice));
    free(plan);
    for (const struct kvops_seq &seq : seqs)
        step.out_count += (size_t)seq.row_count * q_heads * scene.geometry.head_dim;
    return step;
}

#endif
