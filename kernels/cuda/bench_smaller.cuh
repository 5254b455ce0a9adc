/* kernels/cuda/bench_smaller.cuh - digest, seal, copies of slots and prefill attention, alone.
 *
 * Responsible for: timing them, and checks of what they did in the same run: a known digest, seal
 * bit for bit and prefill within a bound against the host twin, copied bytes.
 * Not responsible for: decode and the step (bench_attention.cu).
 *
 * Threads: one owner.
 * Units: bytes, slots, rows.
 */
#ifndef KERNELS_CUDA_BENCH_SMALLER_CUH
#define KERNELS_CUDA_BENCH_SMALLER_CUH

#include "kernels/cuda/bench_twin.cuh"

enum {
    SMALLER_EXTENT_SLOTS = 4,
    SMALLER_DIGEST_SLOTS = 8192, /* at most; 8 GiB */
    SMALLER_COPIED_SLOTS = 512,
    SMALLER_ROWS = 256,    /* of a chunk */
    SMALLER_CONTEXT = 8192 /* the chunk is its end */
};

#define SMALLER_PREFILL_ERROR_MAX 4e-3

/* What store/base/digest.h gives for four slots of BENCH_BYTES, seeds SMALLER_SEED .. + 3. */
static const uint64_t smaller_seed = 4242;
static const uint8_t smaller_digest[16] = {0x04, 0xe2, 0x93, 0x6c, 0x32, 0x8d, 0x72, 0xc7,
                                           0xa6, 0xc5, 0xfc, 0x52, 0x03, 0x4d, 0x6d, 0x8e};

static inline void smaller_digests(bench &bench, uint32_t slots, enum cuda_bench_kind kind) {
    uint32_t per_slot = (uint32_t)(bench_slot_bytes / CUDA_KVOPS_PIECE_BYTES);
    uint32_t each = SMALLER_EXTENT_SLOTS, count = slots / each;
    std::vector<struct cuda_kvops_extent> extents(count);
    std::vector<uint32_t> owner(slots * per_slot);
    struct cuda_kvops_digest args = {};
    struct cuda_bench_result result = {};
    std::vector<uint8_t> first(16);
    size_t mark = bench.owned.size();

    for (uint32_t e = 0; e < count; e++) {
        extents[e].first_piece = (uint64_t)e * each * per_slot;
        extents[e].bytes = each * bench_slot_bytes;
        extents[e].part_bytes = bench_slot_bytes;
        for (uint32_t i = 0; i < each; i++)
            extents[e].part[i] = bench.pool.slots + bench.order[e * each + i] * bench_slot_bytes;
        std::fill_n(owner.begin() + e * each * per_slot, each * per_slot, e);
    }
    for (uint32_t i = 0; i < each; i++)
        bench_fill(bench, bench.pool.slots + bench.order[i] * bench_slot_bytes, bench_slot_bytes,
                   BENCH_BYTES, smaller_seed + i);
    args.extents = bench_upload(bench, extents);
    args.owner = bench_upload(bench, owner);
    args.extent_count = count;
    args.piece_count = slots * per_slot;
    args.pieces = bench_take<uint64_t>(bench, args.piece_count);
    args.digests = bench_take<uint8_t>(bench, 16 * count);
    bench_time time =
        bench_measure(bench, [&] { bench_ok(bench, cuda_kvops_digest(&args, bench.stream)); });
    bench_fetch(bench, first, args.digests);
    if (!bench.error && memcmp(first.data(), smaller_digest, 16) != 0)
        bench_fail(bench, "wrong answer: a digest");
    result.kind = kind;
    result.all_bytes = result.kv_bytes = slots * (double)bench_slot_bytes;
    bench_report(bench, result, time);
    bench_drop(bench, mark);
}

/* The planes of one layer and head as the twin writes them over what the device wrote: nothing may
 * change. */
static inline void smaller_check_seal(bench &bench, const struct kvops_seal &device) {
    uint64_t frame = layout_meta_frame_bytes(&bench.pool.geometry);
    struct kvops_seal args = device;
    std::vector<uint32_t *> wanted;

    for (uint32_t i = 0; i < BENCH_PLANE_SLOTS; i++)
        wanted.push_back(&args.block.slot[i]);
    for (struct kvops_page &page : args.pages)
        for (uint32_t &slot : page.slot)
            wanted.push_back(&slot);
    bench_aligned slots(wanted.size() * bench_slot_bytes), meta(frame);
    bench_fetch_slots(bench, wanted, slots.at);
    if (bench.error ||
        !bench_ok(bench, cudaMemcpy(meta.at, bench.pool.meta + args.block.meta_frame * frame, frame,
                                    cudaMemcpyDeviceToHost)))
        return;
    args.block.meta_frame = 0;
    args.pool.slots = slots.at;
    args.pool.meta = meta.at;
    std::vector<uint8_t> before(slots.at, slots.at + wanted.size() * bench_slot_bytes);
    std::vector<uint8_t> meta_before(meta.at, meta.at + frame);
    std::vector<int32_t> bad(kvops_seal_items(&args));
    bench_aligned scratch(kvops_seal_scratch_bytes(&args));
    args.bad_token = bad.data();
    for (uint32_t item : {0u, 77u, kvops_seal_items(&args) - 1})
        bench_host()->seal(&args, item, item + 1, scratch.at);
    if (memcmp(before.data(), slots.at, before.size()) != 0 ||
        memcmp(meta_before.data(), meta.at, frame) != 0)
        bench_fail(bench, "wrong answer: seal");
}

/* Block index / others of sequence 1 + index % others (0: the first block of the second), from the
 * first one's window: what step and seal do. */
static inline struct kvops_seal smaller_seal_of(const bench &bench, uint32_t index, int32_t *bad) {
    uint32_t others = bench.batch_max > 1 ? bench.batch_max - 1 : 1;
    struct kvops_seal args = {};

    args.pool = bench.pool;
    args.block = bench.planes[(1 + index % others) % bench.batch_max][index / others];
    memcpy(args.pages, bench.pages[0] + 1, sizeof args.pages);
    args.bad_token = bad;
    return args;
}

static inline void smaller_seal(bench &bench) {
    struct cuda_bench_result result = {};
    size_t mark = bench.owned.size();
    struct kvops_seal args =
        smaller_seal_of(bench, 0, bench_take<int32_t>(bench, BENCH_LAYERS * BENCH_KV_HEADS));
    bench_time time =
        bench_measure(bench, [&] { bench_ok(bench, cuda_kvops_seal(&args, bench.stream)); });

    if (!bench.error)
        smaller_check_seal(bench, args);
    result.kind = CUDA_BENCH_SEAL;
    result.tier = "K8V4";
    result.batch = 1;
    result.all_bytes = result.kv_bytes =
        (LAYOUT_BLOCK_SLOTS + BENCH_PLANE_SLOTS) * (double)bench_slot_bytes +
        layout_meta_frame_bytes(&bench.pool.geometry);
    bench_report(bench, result, time);
    bench_drop(bench, mark);
}

/* Slots from pinned memory to scattered places, as a wake copies them, against one large copy. */
static inline void smaller_copies(bench &bench) {
    enum { SLOTS = SMALLER_COPIED_SLOTS };
    size_t bytes = SLOTS * bench_slot_bytes, mark = bench.owned.size();
    struct cuda_bench_result result = {};
    std::vector<uint64_t> word(1);
    uint8_t *pinned = NULL, *to = bench_take<uint8_t>(bench, bytes);

    if (bench.error || !bench_ok(bench, cudaMallocHost((void **)&pinned, bytes)))
        return;
    for (uint32_t i = 0; i < SLOTS; i++)
        memset(pinned + i * bench_slot_bytes, (int)(i % 251), bench_slot_bytes);
    result.all_bytes = result.kv_bytes = (double)bytes;
    result.kind = CUDA_BENCH_COPY_WHOLE;
    bench_report(bench, result, bench_measure(bench, [&] {
                     bench_ok(bench, cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice,
                                                     bench.stream));
                 }));
    result.kind = CUDA_BENCH_COPY_SLOTS;
    bench_time time = bench_measure(bench, [&] {
        for (uint32_t first = 0; first < SLOTS; first += CUDA_OPS_COPIES_MAX) {
            struct cuda_ops_copies copies = {};
            for (uint32_t i = first; i < first + CUDA_OPS_COPIES_MAX; i++) {
                copies.to[copies.count] = to + (size_t)(i * 389 % SLOTS) * bench_slot_bytes;
                copies.from[copies.count] = pinned + i * bench_slot_bytes;
                copies.bytes[copies.count++] = bench_slot_bytes;
            }
            bench_ok(bench, cuda_ops_copy(&copies, bench.stream));
        }
    });
    for (uint32_t i = 0; i < SLOTS; i += 7) {
        bench_fetch(
            bench, word,
            (const uint64_t *)(to + (i * 389 % SLOTS + 1) * bench_slot_bytes - sizeof(uint64_t)));
        if (!bench.error && word[0] != i % 251 * 0x0101010101010101ull)
            bench_fail(bench, "wrong answer: a copied slot");
    }
    bench_report(bench, result, time);
    (void)cudaFreeHost(pinned);
    bench_drop(bench, mark);
}

/* The first and the last tile of rows and heads of the last layer, against the twin. */
static inline double smaller_prefill_error(bench &bench, const bench_scene &scene,
                                           const struct kvops_seq &device, const float *q,
                                           const float *out) {
    size_t floats = (size_t)SMALLER_ROWS * STEP_HIDDEN, own = (size_t)SMALLER_ROWS * STEP_KV;
    std::vector<float> host_q(floats), host_out(floats);
    std::vector<uint16_t> chunk(2 * own);
    bench_aligned query(floats * 4), answer(floats * 4);
    bench_mirror mirror;

    bench_mirror_make(bench, scene, BENCH_LAYERS - 1, mirror);
    bench_fetch(bench, host_q, q);
    bench_fetch(bench, host_out, out);
    bench_fetch(bench, chunk, device.chunk_k);
    if (bench.error)
        return 1;
    memcpy(query.at, host_q.data(), floats * 4);
    mirror.seq.row_count = SMALLER_ROWS;
    mirror.seq.chunk_k = chunk.data();
    mirror.seq.chunk_v = chunk.data() + own;
    mirror.seq.chunk_head_stride = (size_t)SMALLER_ROWS * BENCH_DIM;
    mirror.args.q = (const float *)query.at;
    mirror.args.out = (float *)answer.at;
    uint32_t items = kvops_prefill_items(&mirror.args);
    bench_aligned scratch(kvops_prefill_scratch_bytes(&mirror.args));
    bench_host()->prefill(&mirror.args, 0, 1, scratch.at);
    bench_host()->prefill(&mirror.args, items - 1, items, scratch.at);
    return bench_distance(mirror.args.out, host_out.data(), floats);
}

/* A chunk of 256 rows that ends at 8,192 tokens, all layers one behind the other. */
static inline void smaller_prefill(bench &bench, const char *name, int tier) {
    bench_case what = {name, tier, 1, SMALLER_CONTEXT - SMALLER_ROWS, 0, 0};
    size_t floats = (size_t)SMALLER_ROWS * STEP_HIDDEN, own = (size_t)SMALLER_ROWS * STEP_KV;
    struct cuda_bench_result result = {};
    size_t mark = bench.owned.size();
    bench_scene scene;

    bench_make_scene(bench, scene, what, false);
    uint16_t *chunk = bench_take<uint16_t>(bench, 2 * own);
    float *q = bench_take<float>(bench, floats), *out = bench_take<float>(bench, floats);
    bench_fill(bench, chunk, 2 * own * 2, BENCH_VALUES, 77);
    bench_fill(bench, q, floats * 4, BENCH_FLOATS, 5);
    struct kvops_seq seq = scene.mirror[0];
    seq.chunk_k = chunk;
    seq.chunk_v = chunk + own;
    seq.chunk_head_stride = (size_t)SMALLER_ROWS * BENCH_DIM;
    seq.row_count = SMALLER_ROWS;
    scene.args.seqs = bench_upload(bench, std::vector<struct kvops_seq>(1, seq));
    scene.args.q = q;
    scene.args.out = out;
    bench_time time = bench_measure(bench, [&] {
        for (uint32_t layer = 0; layer < BENCH_LAYERS; layer++) {
            scene.args.layer = layer;
            bench_ok(bench, cuda_kvops_prefill(&scene.args, SMALLER_ROWS, (enum layout_tier)tier,
                                               bench.stream));
        }
    });
    result.error = smaller_prefill_error(bench, scene, seq, q, out);
    if (!(result.error < SMALLER_PREFILL_ERROR_MAX))
        bench_fail(bench, "wrong answer: attention of a chunk differs from the host twin");
    result.kind = CUDA_BENCH_PREFILL;
    result.tier = name;
    result.batch = 1;
    result.tokens = SMALLER_CONTEXT;
    result.kv_bytes = result.all_bytes = scene.layer_bytes * BENCH_LAYERS;
    bench_report(bench, result, time);
    bench_drop(bench, mark);
}

#endif
