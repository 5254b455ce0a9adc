/* tests/gpu_bench.cu - times the CUDA kernels at the geometry of Llama-3.1-8B, outputs checked.
 *
 * Responsible for: this card's read and copy rate, decode attention of 32 layers in one graph over
 * slots scattered at random, digest, seal, slot uploads; the answers of the same run against the
 * host twin and against each sequence alone; JSON.
 * Not responsible for: comparing with other programs, parity over shapes (gpu_parity.cu).
 *
 * Usage: gpu_bench COMMIT FILE [FILTER]: what has FILTER in its name. Times are medians and 99th
 * percentiles of REPEATS graph launches, between events. Stored bytes are those of the tiers read,
 * META, window and sinks.
 */
#include "tests/gpu_scene.cuh"

#include <algorithm>
#include <ctime>

enum {
    LAYERS = 32,
    KV_HEADS = 8,
    Q_HEADS = 32,
    DIM = 128,
    TOKENS = 131072,
    SEQS = 9,
    REPEATS = 41,
    BLOCKS = 510,
    WARM_UP = 3
};

static const struct layout_geometry geometry = {LAYERS, KV_HEADS, DIM};
static const uint64_t slot_bytes = 1 << 20;

struct timing {
    double median_ms;
    double p99_ms;
};

static FILE *json;
static int json_items, wrong;
static struct cuda_kvops_device device;
static double read_rate, copy_rate; /* bytes per second */

template <class T> static T *take(size_t count) {
    void *memory;
    GPU_TRY(cudaMalloc(&memory, count * sizeof(T)));
    return (T *)memory;
}

static timing timing_of(std::vector<float> &ms) {
    std::sort(ms.begin(), ms.end());
    return {ms[ms.size() / 2], ms[(ms.size() * 99 + 99) / 100 - 1]};
}

template <class F> static timing time_it(cudaStream_t stream, F &&run) {
    std::vector<float> ms(REPEATS);
    cudaEvent_t begin, end;

    GPU_TRY(cudaEventCreate(&begin));
    GPU_TRY(cudaEventCreate(&end));
    for (int i = -WARM_UP; i < REPEATS; i++) {
        float last;
        GPU_TRY(cudaEventRecord(begin, stream));
        run();
        GPU_TRY(cudaEventRecord(end, stream));
        GPU_TRY(cudaEventSynchronize(end));
        GPU_TRY(cudaEventElapsedTime(&last, begin, end));
        if (i >= 0)
            ms[i] = last;
    }
    GPU_TRY(cudaEventDestroy(begin));
    GPU_TRY(cudaEventDestroy(end));
    return timing_of(ms);
}

static bool wanted(const char *name, const char *filter) {
    return strstr(name, filter) != NULL;
}

/* --- content */

static __device__ uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

/* kind 0: any bytes; 1: fp16 scales near 2^-7; 2: BF16 numbers below 2 in size. */
static __global__ void fill_kernel(uint64_t *words, size_t count, int kind, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t bits = mixed(seed + (i + 1) * 0x9E3779B97F4A7C15ull);
        if (kind == 1) /* exponents 2^-8 and 2^-7 */
            bits = (bits & 0x07FF07FF07FF07FFull) + 0x1C001C001C001C00ull;
        if (kind == 2) /* exponents 2^-3 to 2^0 */
            bits = (bits & 0x81FF81FF81FF81FFull) | 0x3E003E003E003E00ull;
        words[i] = bits;
    }
}

static void fill(void *at, size_t bytes, int kind, uint64_t seed) {
    fill_kernel<<<1056, 256>>>((uint64_t *)at, bytes / 8, kind, seed);
    GPU_TRY(cudaGetLastError());
}

static __global__ void __launch_bounds__(512)
    read_kernel(const uint4 *from, size_t count, uint32_t *out) {
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

struct pool {
    struct kvops_pool kv;
    uint32_t slot_count;
    std::vector<uint32_t> order;
    uint32_t used;
    std::vector<struct kvops_block> planes[SEQS]; /* every stream of K8V4 */
    std::vector<struct kvops_block> plain;        /* BF16, one sequence */
    struct kvops_page pages[SEQS][1 + LAYOUT_WINDOW_PAGES_MAX];
};

static uint32_t next_slot(pool &pool) {
    return pool.order[pool.used++];
}

static void make_pool(pool &pool) {
    gpu_random random = {2026};

    pool.slot_count = SEQS * (BLOCKS * 12 + 9 * 8) + BLOCKS * 32;
    pool.used = 0;
    pool.order.resize(pool.slot_count);
    for (uint32_t i = 0; i < pool.slot_count; i++) {
        uint32_t at = random.below(i + 1);
        pool.order[i] = pool.order[at];
        pool.order[at] = i;
    }
    pool.kv.geometry = geometry;
    pool.kv.slots = take<uint8_t>(pool.slot_count * slot_bytes);
    pool.kv.meta = take<uint8_t>((size_t)SEQS * BLOCKS * layout_meta_frame_bytes(&geometry));
    fill(pool.kv.slots, pool.slot_count * slot_bytes, 0, 1);
    fill(pool.kv.meta, (size_t)SEQS * BLOCKS * layout_meta_frame_bytes(&geometry), 1, 2);
    for (uint32_t s = 0; s < SEQS; s++) {
        for (uint32_t b = 0; b < BLOCKS; b++) {
            struct kvops_block block;
            memset(&block, 0xFF, sizeof block);
            for (uint32_t i = 0; i < 12; i++)
                block.slot[i] = next_slot(pool);
            block.meta_frame = s * BLOCKS + b;
            block.tier = LAYOUT_K8V4;
            pool.planes[s].push_back(block);
        }
        for (struct kvops_page &page : pool.pages[s])
            for (uint32_t &slot : page.slot) {
                slot = next_slot(pool);
                fill(pool.kv.slots + slot * slot_bytes, slot_bytes, 2, 3 + slot);
            }
    }
    for (uint32_t b = 0; b < BLOCKS; b++) {
        struct kvops_block block = {};
        for (uint32_t &slot : block.slot) {
            slot = next_slot(pool);
            fill(pool.kv.slots + slot * slot_bytes, slot_bytes, 2, 3 + slot);
        }
        block.tier = LAYOUT_TIER_BF16;
        pool.plain.push_back(block);
    }
    GPU_TRY(cudaDeviceSynchronize());
}

/* --- one configuration of decode attention */

enum { BY_AGE = 100, QUARTERS };

struct config {
    const char *name;
    std::vector<uint32_t> lengths;
    int tier; /* enum layout_tier, BY_AGE or QUARTERS */
    int overlap;
    uint32_t grain;
    uint32_t q_heads;
};

static enum layout_tier tier_of(int tier, uint32_t block, uint32_t count) {
    static const enum layout_tier ladder[] = {LAYOUT_K6V2, LAYOUT_K6V3, LAYOUT_K6V4, LAYOUT_K8V4};

    if (tier == QUARTERS)
        return ladder[(uint64_t)block * 4 / count];
    if (tier == BY_AGE)
        return (count - block) * 256 > 32768 ? LAYOUT_K6V4 : LAYOUT_K8V4;
    return (enum layout_tier)tier;
}

struct scene {
    std::vector<std::vector<struct kvops_block>> blocks;
    std::vector<struct kvops_seq> host;   /* host pointers */
    std::vector<struct kvops_seq> mirror; /* device pointers */
    std::vector<void *> owned;
    struct kvops_attend args;
    struct cuda_kvops_plan plan;
    double layer_bytes;
};

template <class T> static T *upload(scene &scene, const T *from, size_t count) {
    T *to = take<T>(count + 1);
    GPU_TRY(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyHostToDevice));
    scene.owned.push_back(to);
    return to;
}

static void make_scene(scene &scene, pool &pool, const config &config) {
    scene.layer_bytes = 0;
    for (uint32_t s = 0; s < config.lengths.size(); s++) {
        uint32_t count = (uint32_t)layout_sealed_blocks(config.lengths[s]);
        const struct kvops_block *from =
            config.tier == LAYOUT_TIER_BF16 ? pool.plain.data() : pool.planes[s].data();
        std::vector<struct kvops_block> blocks(from, from + count);
        struct kvops_seq seq = {};
        for (uint32_t b = 0; b < count; b++) {
            blocks[b].tier = (uint8_t)tier_of(config.tier, b, count);
            uint32_t slots = layout_tier_slots((enum layout_tier)blocks[b].tier);
            scene.layer_bytes += slots * (double)slot_bytes / LAYERS;
            scene.layer_bytes += slots < 32 ? KV_HEADS * 4 * LAYOUT_META_TILE_BYTES : 0;
        }
        scene.blocks.push_back(blocks);
        seq.block_count = count;
        seq.sink_tokens = layout_sink_tokens(config.lengths[s]);
        seq.window_tokens = layout_window_tokens(config.lengths[s]);
        seq.sinks = pool.pages[s][0];
        seq.first_row = s;
        seq.row_count = 1;
        scene.layer_bytes += (seq.sink_tokens + seq.window_tokens) * 4.0 * DIM * KV_HEADS;
        scene.host.push_back(seq);
    }
    for (uint32_t s = 0; s < config.lengths.size(); s++) {
        struct kvops_seq seq = scene.host[s];
        seq.blocks = upload(scene, scene.blocks[s].data(), scene.blocks[s].size());
        seq.window = upload(scene, pool.pages[s] + 1, LAYOUT_WINDOW_PAGES_MAX);
        scene.mirror.push_back(seq);
        scene.host[s].blocks = scene.blocks[s].data();
        scene.host[s].window = pool.pages[s] + 1;
    }
    struct kvops_attend host = {};
    host.pool = pool.kv;
    host.q_heads = config.q_heads;
    host.seqs = scene.host.data();
    host.seq_count = (uint32_t)scene.host.size();
    size_t plan_bytes = cuda_kvops_plan_bytes(&host, &device);
    std::vector<uint64_t> plan(plan_bytes / 8 + 2);
    void *at = take<uint8_t>(plan_bytes);
    scene.owned.push_back(at);
    size_t used = cuda_kvops_plan_make(&host, &device, config.grain, plan.data(), at, &scene.plan);
    GPU_TRY(cudaMemcpy(at, plan.data(), used, cudaMemcpyHostToDevice));
    scene.args = host;
    scene.args.seqs = upload(scene, scene.mirror.data(), scene.mirror.size());
    scene.args.partials = take<float>(kvops_partial_bytes(&host) / 4);
    scene.owned.push_back(scene.args.partials);
}

static void drop_scene(scene &scene) {
    for (void *memory : scene.owned)
        GPU_TRY(cudaFree(memory));
}

/* All layers of a step as one graph; q and out are [layer][seq][head][dim]. */
static cudaGraphExec_t capture(scene &scene, const config &config, const float *q, float *out,
                               cudaStream_t stream) {
    size_t row = (size_t)scene.args.seq_count * config.q_heads * DIM;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    GPU_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct kvops_attend args = scene.args;
        struct cuda_kvops_launch launch = {&args, &scene.plan, stream, config.overlap && layer > 0};
        args.layer = layer;
        args.q = q + layer * row;
        args.out = out + layer * row;
        GPU_TRY(cuda_kvops_decode(&launch));
        launch.overlap = config.overlap;
        GPU_TRY(cuda_kvops_combine(&launch));
    }
    GPU_TRY(cudaStreamEndCapture(stream, &graph));
    GPU_TRY(cudaGraphInstantiate(&exec, graph, 0));
    GPU_TRY(cudaGraphDestroy(graph));
    return exec;
}

/* --- checks of the same run */

/* Sequence 0 of one layer through the host twin: only the slots that hold the layer are fetched. */
static double host_error(pool &pool, scene &scene, uint32_t layer, const float *q,
                         const float *out) {
    struct kvops_attend args = scene.args;
    struct kvops_seq seq = scene.host[0];
    std::vector<struct kvops_block> blocks = scene.blocks[0];
    struct kvops_page window[LAYOUT_WINDOW_PAGES_MAX];
    std::vector<uint32_t *> wanted;
    std::vector<float> host_out(scene.args.q_heads * DIM);
    double errors = 0, norms = 0;

    memcpy(window, pool.pages[0] + 1, sizeof window);
    for (struct kvops_block &block : blocks) {
        for (uint32_t s = LAYOUT_KH; s <= LAYOUT_VX; s++) {
            enum layout_stream stream = (enum layout_stream)s;
            if (!(layout_tier_streams((enum layout_tier)block.tier) & 0x7f) ||
                !(layout_tier_streams((enum layout_tier)block.tier) >> s & 1))
                continue;
            uint32_t slot = layout_tile(&geometry, stream, {layer, 0, 0}).slot;
            wanted.push_back(&block.slot[layout_stream_table(stream) + slot]);
        }
        for (uint32_t p = 0; block.tier == LAYOUT_TIER_BF16 && p < 4; p++)
            wanted.push_back(&block.slot[p * 8 + layer / 4]);
    }
    for (struct kvops_page &page : window)
        wanted.push_back(&page.slot[layer / 4]);
    wanted.push_back(&seq.sinks.slot[layer / 4]);
    args.pool.slots = gpu_host_bytes(wanted.size() * slot_bytes, 0xFF);
    for (uint32_t i = 0; i < wanted.size(); i++) {
        GPU_TRY(cudaMemcpy(args.pool.slots + i * slot_bytes,
                           pool.kv.slots + *wanted[i] * slot_bytes, slot_bytes,
                           cudaMemcpyDeviceToHost));
        *wanted[i] = i;
    }
    size_t meta = BLOCKS * layout_meta_frame_bytes(&geometry);
    args.pool.meta = gpu_host_bytes(meta, 0xFF);
    GPU_TRY(cudaMemcpy(args.pool.meta, pool.kv.meta, meta, cudaMemcpyDeviceToHost));
    seq.blocks = blocks.data();
    seq.window = window;
    args.layer = layer;
    args.seqs = &seq;
    args.seq_count = 1;
    args.q = q;
    args.out = host_out.data();
    args.partials = (float *)gpu_host_bytes(kvops_partial_bytes(&args), 0xFF);
    uint8_t *scratch = gpu_host_bytes(kvops_decode_scratch_bytes(&args), 0xFF);
    gpu_host_table()->decode(&args, 0, kvops_decode_items(&args), scratch);
    gpu_host_table()->combine(&args, 0, kvops_combine_items(&args), scratch);
    for (size_t i = 0; i < host_out.size(); i++) {
        errors += pow((double)host_out[i] - out[i], 2);
        norms += pow((double)host_out[i], 2);
    }
    free(scratch);
    free(args.partials);
    free(args.pool.slots);
    free(args.pool.meta);
    return sqrt(errors / norms);
}

/* Every sequence of the batch alone, with another plan: number of differing floats. */
static size_t alone_differences(pool &pool, const config &config, const float *q,
                                const std::vector<float> &batch, cudaStream_t stream) {
    size_t count = config.lengths.size(), row = config.q_heads * DIM, differences = 0;
    float *out = take<float>(LAYERS * row), *own_q = take<float>(LAYERS * row);

    for (size_t s = 0; s < count; s++) {
        struct config alone = config;
        scene scene;
        alone.lengths = {config.lengths[s]};
        alone.overlap = s % 2;
        std::swap(pool.planes[0], pool.planes[s]);
        std::swap(pool.pages[0], pool.pages[s]);
        make_scene(scene, pool, alone);
        std::swap(pool.planes[0], pool.planes[s]);
        std::swap(pool.pages[0], pool.pages[s]);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            GPU_TRY(cudaMemcpy(own_q + layer * row, q + (layer * count + s) * row,
                               row * sizeof(float), cudaMemcpyDeviceToDevice));
        cudaGraphExec_t exec = capture(scene, alone, own_q, out, stream);
        GPU_TRY(cudaGraphLaunch(exec, stream));
        GPU_TRY(cudaStreamSynchronize(stream));
        std::vector<float> back(LAYERS * row);
        GPU_TRY(cudaMemcpy(back.data(), out, back.size() * sizeof(float), cudaMemcpyDeviceToHost));
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (size_t i = 0; i < row; i++)
                differences += memcmp(&back[layer * row + i], &batch[(layer * count + s) * row + i],
                                      sizeof(float)) != 0;
        GPU_TRY(cudaGraphExecDestroy(exec));
        drop_scene(scene);
    }
    GPU_TRY(cudaFree(out));
    GPU_TRY(cudaFree(own_q));
    return differences;
}

static void run_config(pool &pool, const config &config, const char *checks) {
    size_t row = config.lengths.size() * config.q_heads * DIM;
    std::vector<float> q(LAYERS * row), back(LAYERS * row, NAN);
    gpu_random random = {config.lengths.size()};
    double error = -1;
    long differences = -1;
    cudaStream_t stream;
    scene scene;

    GPU_TRY(cudaStreamCreate(&stream));
    for (float &x : q)
        x = random.normal();
    make_scene(scene, pool, config);
    float *device_q = upload(scene, q.data(), q.size());
    float *out = upload(scene, back.data(), back.size());
    cudaGraphExec_t exec = capture(scene, config, device_q, out, stream);
    timing time = time_it(stream, [&] { GPU_TRY(cudaGraphLaunch(exec, stream)); });
    GPU_TRY(cudaMemcpy(back.data(), out, back.size() * sizeof(float), cudaMemcpyDeviceToHost));
    if (strchr(checks, 'h')) {
        uint32_t layer = config.tier % 2 ? 31 : 9;
        error = host_error(pool, scene, layer, &q[layer * row], &back[layer * row]);
        wrong += !(error < 5e-4);
    }
    if (strchr(checks, 'b')) {
        differences = (long)alone_differences(pool, config, device_q, back, stream);
        wrong += differences != 0;
    }
    double bytes = scene.layer_bytes * LAYERS, rate = bytes / (time.median_ms * 1e-3);
    printf("%-30s %8.3f ms p99 %8.3f  %7.1f GB/s  %.3f /read %.3f /copy  us/layer %7.2f"
           "  error %.1e  bit differences %ld\n",
           config.name, time.median_ms, time.p99_ms, rate * 1e-9, rate / read_rate,
           rate / copy_rate, time.median_ms * 1000 / LAYERS, error, differences);
    fprintf(json,
            "%s\n  {\"name\": \"%s\", \"batch\": %zu, \"overlap\": %d, \"bytes\": %.0f, "
            "\"median_ms\": %.4f, \"p99_ms\": %.4f, \"bytes_per_s\": %.4g, \"of_read\": %.4f, "
            "\"of_copy\": %.4f, \"error_to_twin\": %.3g, \"bit_differences_alone\": %ld}",
            json_items++ ? "," : "", config.name, config.lengths.size(), config.overlap, bytes,
            time.median_ms, time.p99_ms, rate, rate / read_rate, rate / copy_rate, error,
            differences);
    GPU_TRY(cudaGraphExecDestroy(exec));
    GPU_TRY(cudaStreamDestroy(stream));
    drop_scene(scene);
}

/* --- rates and the smaller kernels */

static void put(const char *name, timing time, double bytes) {
    double rate = bytes / (time.median_ms * 1e-3);

    printf("%-30s %8.3f ms p99 %8.3f  %7.1f GB/s  %.3f /read\n", name, time.median_ms, time.p99_ms,
           rate * 1e-9, read_rate > 0 ? rate / read_rate : 1.0);
    fprintf(json,
            "%s\n  {\"name\": \"%s\", \"bytes\": %.0f, \"median_ms\": %.4f, \"p99_ms\": %.4f, "
            "\"bytes_per_s\": %.4g, \"of_read\": %.4f}",
            json_items++ ? "," : "", name, bytes, time.median_ms, time.p99_ms, rate,
            read_rate > 0 ? rate / read_rate : 1.0);
}

static void measure_rates(pool &pool) {
    size_t bytes = 8ull << 30;
    uint32_t *out = take<uint32_t>(1);

    for (uint32_t ctas = 1; ctas <= 4; ctas++) { /* the best of four shapes */
        timing time = time_it(0, [&] {
            read_kernel<<<132 * ctas, 512>>>((const uint4 *)pool.kv.slots, bytes / 16, out);
        });
        read_rate = std::max(read_rate, bytes / (time.median_ms * 1e-3));
    }
    uint8_t *to = take<uint8_t>(bytes);
    timing time = time_it(
        0, [&] { GPU_TRY(cudaMemcpyAsync(to, pool.kv.slots, bytes, cudaMemcpyDeviceToDevice)); });
    copy_rate = 2 * bytes / (time.median_ms * 1e-3);
    GPU_TRY(cudaFree(to));
    GPU_TRY(cudaFree(out));
    printf("read %.1f GB/s, copy %.1f GB/s (both directions)\n", read_rate * 1e-9,
           copy_rate * 1e-9);
    fprintf(json, "%s\n  {\"name\": \"rates\", \"read\": %.5g, \"copy\": %.5g}",
            json_items++ ? "," : "", read_rate, copy_rate);
}

static void bench_digest(pool &pool, uint32_t slots, const char *name) {
    uint32_t per_slot = (uint32_t)(slot_bytes / CUDA_KVOPS_PIECE_BYTES);
    std::vector<struct cuda_kvops_extent> extents(slots / 4);
    std::vector<uint32_t> owner(slots * per_slot);
    struct cuda_kvops_digest args = {};
    scene scene;

    for (uint32_t e = 0; e < slots / 4; e++) {
        extents[e].first_piece = (uint64_t)e * 4 * per_slot;
        extents[e].bytes = 4 * slot_bytes;
        extents[e].part_bytes = slot_bytes;
        for (uint32_t i = 0; i < 4; i++)
            extents[e].part[i] = pool.kv.slots + pool.order[e * 4 + i] * slot_bytes;
        std::fill_n(owner.begin() + e * 4 * per_slot, 4 * per_slot, e);
    }
    args.extents = upload(scene, extents.data(), extents.size());
    args.owner = upload(scene, owner.data(), owner.size());
    args.extent_count = slots / 4;
    args.piece_count = slots * per_slot;
    args.pieces = take<uint64_t>(args.piece_count);
    args.digests = take<uint8_t>(16 * args.extent_count);
    scene.owned.push_back(args.pieces);
    scene.owned.push_back(args.digests);
    put(name, time_it(0, [&] { GPU_TRY(cuda_kvops_digest(&args, 0)); }),
        slots * (double)slot_bytes);
    drop_scene(scene);
}

static void bench_seal(pool &pool) {
    struct kvops_seal args = {};

    args.pool = pool.kv;
    args.block = pool.planes[8][0];
    memcpy(args.pages, pool.pages[0] + 1, sizeof args.pages);
    args.bad_token = take<int32_t>(LAYERS * KV_HEADS);
    put("seal one block K8V4, 32 layers", time_it(0, [&] { GPU_TRY(cuda_kvops_seal(&args, 0)); }),
        (32 + 12.25) * slot_bytes);
    GPU_TRY(cudaFree(args.bad_token));
}

/* Slots from pinned memory into scattered places against one big copy. */
static void bench_upload(pool &pool) {
    enum { SLOTS = 1024, PER_CALL = 64 };
    uint8_t *pinned, *to = take<uint8_t>(SLOTS * slot_bytes);
    cudaStream_t stream;

    GPU_TRY(cudaMallocHost((void **)&pinned, SLOTS * slot_bytes));
    memset(pinned, 1, SLOTS * slot_bytes);
    GPU_TRY(cudaStreamCreate(&stream));
    put("host to device, one copy",
        time_it(stream,
                [&] {
                    GPU_TRY(cudaMemcpyAsync(to, pinned, SLOTS * slot_bytes, cudaMemcpyHostToDevice,
                                            stream));
                }),
        SLOTS * (double)slot_bytes);
    std::vector<void *> dst(SLOTS);
    std::vector<const void *> src(SLOTS);
    std::vector<size_t> sizes(SLOTS, slot_bytes);
    for (uint32_t i = 0; i < SLOTS; i++) {
        dst[i] = to + (i * 389 % SLOTS) * slot_bytes;
        src[i] = pinned + i * slot_bytes;
    }
    struct cudaMemcpyAttributes attributes = {};
    size_t first = 0;
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    put("host to device, slots batched",
        time_it(stream,
                [&] {
                    for (uint32_t i = 0; i < SLOTS; i += PER_CALL)
                        GPU_TRY(cudaMemcpyBatchAsync(&dst[i], &src[i], &sizes[i], PER_CALL,
                                                     &attributes, &first, 1, stream));
                }),
        SLOTS * (double)slot_bytes);
    (void)pool;
    GPU_TRY(cudaStreamDestroy(stream));
    GPU_TRY(cudaFreeHost(pinned));
    GPU_TRY(cudaFree(to));
}

/* A chunk of 256 rows behind `n_kv` tokens at K8V4, 32 layers one after the other. */
static void bench_prefill(pool &pool, uint32_t n_kv, int tier, const char *name) {
    enum { ROWS = 256 };
    config config = {name, {n_kv}, tier, 0, 0, Q_HEADS};
    size_t row = Q_HEADS * DIM, chunk = 2ull * KV_HEADS * ROWS * DIM;
    std::vector<float> q(ROWS * row);
    gpu_random random = {5};
    scene scene;

    make_scene(scene, pool, config);
    struct kvops_seq seq = scene.mirror[0];
    uint16_t *own = take<uint16_t>(chunk);
    scene.owned.push_back(own);
    fill(own, chunk * 2, 2, 77);
    seq.chunk_k = own;
    seq.chunk_v = own + chunk / 2;
    seq.chunk_head_stride = ROWS * DIM;
    seq.row_count = ROWS;
    for (float &x : q)
        x = random.normal();
    scene.args.seqs = upload(scene, &seq, 1);
    scene.args.q = upload(scene, q.data(), q.size());
    scene.args.out = upload(scene, q.data(), q.size());
    timing time = time_it(0, [&] {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            scene.args.layer = layer;
            GPU_TRY(cuda_kvops_prefill(&scene.args, ROWS, 0));
        }
    });
    double operations = 4.0 * LAYERS * Q_HEADS * ROWS * (n_kv + ROWS / 2.0) * DIM;
    printf("%-30s %8.3f ms p99 %8.3f  %7.1f us/layer  %.1f TFLOP/s\n", name, time.median_ms,
           time.p99_ms, time.median_ms * 1000 / LAYERS, operations / time.median_ms * 1e-9);
    fprintf(json,
            "%s\n  {\"name\": \"%s\", \"rows\": %d, \"median_ms\": %.4f, \"p99_ms\": %.4f, "
            "\"operations\": %.4g, \"operations_per_s\": %.4g}",
            json_items++ ? "," : "", name, ROWS, time.median_ms, time.p99_ms, operations,
            operations / (time.median_ms * 1e-3));
    drop_scene(scene);
}

static void bench_decode(pool &pool, const char *filter) {
    std::vector<uint32_t> one = {TOKENS}, nine(SEQS, TOKENS);
    std::vector<uint32_t> ragged = {4096, 8192, 16384, 32768, 49152, 65536, 98304, 114688, 131072};
    std::vector<std::pair<config, const char *>> all = {
        {{"1 x 128K K8V4", one, LAYOUT_K8V4, 1, 0, Q_HEADS}, "h"},
        {{"1 x 128K K8V4 no overlap", one, LAYOUT_K8V4, 0, 0, Q_HEADS}, ""},
        {{"1 x 128K K8V4 single runs", one, LAYOUT_K8V4, 1, 2, Q_HEADS}, "h"},
        {{"1 x 128K K6V4", one, LAYOUT_K6V4, 1, 0, Q_HEADS}, "h"},
        {{"1 x 128K K6V4 no overlap", one, LAYOUT_K6V4, 0, 0, Q_HEADS}, ""},
        {{"1 x 128K K6V2", one, LAYOUT_K6V2, 1, 0, Q_HEADS}, "h"},
        {{"1 x 128K K6V2 no overlap", one, LAYOUT_K6V2, 0, 0, Q_HEADS}, ""},
        {{"1 x 128K by age", one, BY_AGE, 1, 0, Q_HEADS}, "h"},
        {{"1 x 128K four quarters", one, QUARTERS, 1, 0, Q_HEADS}, "h"},
        {{"1 x 128K BF16", one, LAYOUT_TIER_BF16, 1, 0, Q_HEADS}, "h"},
        {{"1 x 128K BF16 no overlap", one, LAYOUT_TIER_BF16, 0, 0, Q_HEADS}, ""},
        {{"2 x 128K K8V4", {TOKENS, TOKENS}, LAYOUT_K8V4, 1, 0, Q_HEADS}, "b"},
        {{"4 x 128K K8V4", {TOKENS, TOKENS, TOKENS, TOKENS}, LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
        {{"9 x 128K K8V4", nine, LAYOUT_K8V4, 1, 0, Q_HEADS}, "bh"},
        {{"9 x 128K K8V4 no overlap", nine, LAYOUT_K8V4, 0, 0, Q_HEADS}, ""},
        {{"9 x 128K K8V4 single runs", nine, LAYOUT_K8V4, 1, 2, Q_HEADS}, "b"},
        {{"9 x 128K K6V4", nine, LAYOUT_K6V4, 1, 0, Q_HEADS}, "bh"},
        {{"9 x 128K K6V2", nine, LAYOUT_K6V2, 1, 0, Q_HEADS}, "b"},
        {{"9 x 128K by age", nine, BY_AGE, 1, 0, Q_HEADS}, "b"},
        {{"9 x 128K four quarters", nine, QUARTERS, 1, 0, Q_HEADS}, "b"},
        {{"9 ragged 4K to 128K by age", ragged, BY_AGE, 1, 0, Q_HEADS}, "b"},
        {{"9 ragged four quarters", ragged, QUARTERS, 1, 0, Q_HEADS}, ""},
        {{"1 x 128K K8V4 64 heads", one, LAYOUT_K8V4, 1, 0, 2 * Q_HEADS}, "h"},
        {{"9 x 128K K8V4 64 heads", nine, LAYOUT_K8V4, 1, 0, 2 * Q_HEADS}, "b"},
        {{"1 x 4K K8V4 long form", {4096}, LAYOUT_K8V4, 1, 3, Q_HEADS}, ""},
        {{"1 x 12K K8V4", {12288}, LAYOUT_K8V4, 1, 0, Q_HEADS}, "b"},
        {{"1 x 12K K8V4 long form", {12288}, LAYOUT_K8V4, 1, 3, Q_HEADS}, ""},
        {{"1 x 4K K8V4", {4096}, LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
        {{"1 x 8K K8V4", {8192}, LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
        {{"1 x 32K K8V4", {32768}, LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
        {{"1 x 64K K8V4", {65536}, LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
        {{"9 x 4K K8V4", std::vector<uint32_t>(9, 4096), LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
        {{"9 x 32K K8V4", std::vector<uint32_t>(9, 32768), LAYOUT_K8V4, 1, 0, Q_HEADS}, ""},
    };
    for (const auto &each : all)
        if (wanted(each.first.name, filter))
            run_config(pool, each.first, each.second);
}

int main(int argc, char **argv) {
    struct cudaDeviceProp properties;
    const char *filter = argc > 3 ? argv[3] : "";
    time_t now = time(NULL);
    int clock_khz, memory_khz;
    char date[16];
    pool pool;

    if (argc < 3 || !(json = fopen(argv[2], "w"))) {
        fprintf(stderr, "usage: gpu_bench COMMIT FILE [FILTER]\n");
        return 1;
    }
    GPU_TRY(cudaGetDeviceProperties(&properties, 0));
    GPU_TRY(cuda_kvops_open(&device));
    GPU_TRY(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0));
    GPU_TRY(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, 0));
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(json, "{\"commit\": \"%s\", \"date\": \"%s\", \"gpu\": \"%s\", ", argv[1], date,
            properties.name);
    fprintf(json, "\"multiprocessors\": %d, \"clock_khz_max\": %d, \"memory_clock_khz\": %d, ",
            properties.multiProcessorCount, clock_khz, memory_khz);
    fprintf(json, "\"repeats\": %d, \"tokens\": %d, \"results\": [", REPEATS, TOKENS);
    make_pool(pool);
    measure_rates(pool);
    bench_decode(pool, filter);
    static const struct {
        uint32_t n_kv;
        int tier;
        const char *name;
    } chunks[] = {{7936, LAYOUT_K8V4, "prefill 256 rows at 8K K8V4"},
                  {7936, LAYOUT_K6V4, "prefill 256 rows at 8K K6V4"},
                  {7936, LAYOUT_TIER_BF16, "prefill 256 rows at 8K BF16"},
                  {130816, LAYOUT_K8V4, "prefill 256 rows at 128K K8V4"}};
    for (const auto &chunk : chunks)
        if (wanted(chunk.name, filter))
            bench_prefill(pool, chunk.n_kv, chunk.tier, chunk.name);
    if (wanted("digest of slots", filter)) {
        bench_digest(pool, 8192, "digest of 8 GiB");
        bench_digest(pool, 12, "digest of one block, 12 MiB");
    }
    if (wanted("seal", filter))
        bench_seal(pool);
    if (wanted("host to device", filter))
        bench_upload(pool);
    measure_rates(pool);
    fprintf(json, "\n]}\n");
    fclose(json);
    printf("%d wrong answers\n", wrong);
    return wrong != 0;
}
