/* tests/gpu_parity.cu - the CUDA kernels against their host twins.
 *
 * Responsible for: seal bit for bit over the whole pool, digests against known answers, decode
 * and prefill attention against the host twin within their bounds, bits equal whatever the batch
 * and the plan, holes, NaN in everything that must not be read.
 * Not responsible for: speed (gpu_bench.cu). Ends with `N passed, N failed`. `gpu_parity quick`
 * does a few cases of each.
 */
#include "tests/gpu_scene.cuh"

#include "kernels/cuda/cuda_ops.h"
#include "tests/gpu_digests.h"

static int passed, failed;

static void check(int good, const char *what, const char *detail) {
    good ? passed++ : failed++;
    if (!good || getenv("GPU_VERBOSE"))
        printf("%s %s: %s\n", good ? "ok  " : "FAIL", what, detail);
}

/* --- seal */

static void spoil(gpu_scene &scene, const struct kvops_page *pages) {
    uint32_t dim = scene.geometry.head_dim;
    static const float odd[] = {0.0f, 1e-40f, 1e-6f, 3e38f, 65504.0f * 11.0f, 0.0078125f};

    for (uint32_t i = 0; i < 40; i++) {
        struct layout_at at = {scene.random.below(scene.geometry.layers),
                               scene.random.below(scene.geometry.kv_heads), 0};
        struct layout_place place = layout_run(&scene.geometry, at, i % 2, scene.random.below(4));
        uint16_t *x =
            (uint16_t *)(scene.host.slots +
                         pages[scene.random.below(4)].slot[place.slot] * scene.slot_bytes() +
                         place.off) +
            scene.random.below(16) * dim;
        for (uint32_t d = 0; d < dim; d++)
            x[d] = i < 30 ? gpu_bf16(odd[i % 6] * (scene.random.below(3) - 1.0f)) : x[d];
        if (i >= 30)
            x[scene.random.below(dim)] = i % 3 ? 0x7FC0 : 0xFF80;
    }
}

static void test_seal(struct layout_geometry geometry, enum layout_tier tier, int bad) {
    gpu_scene scene;
    struct kvops_seal host = {}, device;
    char what[96];

    scene.init(geometry, 60, 3, 11 + tier);
    host.pool = scene.host;
    host.block.tier = (uint8_t)tier;
    host.block.meta_frame = 1;
    for (uint32_t i = 0; i < LAYOUT_BLOCK_SLOTS; i++)
        host.block.slot[i] = i < 16 ? scene.take_slot() : UINT32_MAX;
    for (uint32_t p = 0; p < LAYOUT_BLOCK_PAGES; p++)
        host.pages[p] = scene.page(LAYOUT_PAGE_TOKENS);
    if (bad)
        spoil(scene, host.pages);
    scene.upload_pool();
    uint32_t items = kvops_seal_items(&host);
    std::vector<int32_t> marks(items), marks_back(items);
    device = host;
    device.pool = scene.device;
    device.bad_token = scene.upload(marks.data(), items);
    GPU_TRY(cuda_kvops_seal(&device, 0));
    host.bad_token = marks.data();
    uint8_t *scratch = gpu_host_bytes(kvops_seal_scratch_bytes(&host), 0xFF);
    gpu_host_table()->seal(&host, 0, items, scratch);
    free(scratch);
    size_t slots = scene.slot_count * scene.slot_bytes();
    size_t meta = scene.frame_count * layout_meta_frame_bytes(&geometry);
    std::vector<uint8_t> back(slots), meta_back(meta);
    GPU_TRY(cudaMemcpy(back.data(), scene.device.slots, slots, cudaMemcpyDeviceToHost));
    GPU_TRY(cudaMemcpy(meta_back.data(), scene.device.meta, meta, cudaMemcpyDeviceToHost));
    GPU_TRY(cudaMemcpy(marks_back.data(), device.bad_token, items * sizeof(int32_t),
                       cudaMemcpyDeviceToHost));
    snprintf(what, sizeof what, "seal %s layers %u heads %u dim %u spoiled %d",
             layout_tier_name(tier), geometry.layers, geometry.kv_heads, geometry.head_dim, bad);
    check(memcmp(back.data(), scene.host.slots, slots) == 0, what, "slots");
    check(memcmp(meta_back.data(), scene.host.meta, meta) == 0, what, "META");
    check(marks == marks_back, what, "bad tokens");
    uint32_t layer, token;
    check(kvops_seal_bad(&host, &layer, &token) == bad, what, "spoiling is seen");
    scene.release();
}

/* --- small copies from pinned memory */

static void test_reads(void) {
    static const size_t sizes[] = {1, 15, 16, 17, 4096, 65539, (1 << 20) + 16, 9 << 20};
    enum { ROOM = 16 << 20, AROUND = 64 };
    std::vector<uint8_t> found(ROOM);
    uint8_t *pinned, *to;
    char what[64];

    GPU_TRY(cudaMallocHost((void **)&pinned, ROOM));
    GPU_TRY(cudaMalloc((void **)&to, ROOM));
    for (size_t i = 0; i < ROOM; i++)
        pinned[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t off = 0; off < 2; off++) {
            GPU_TRY(cudaMemset(to, 0xA5, ROOM));
            GPU_TRY(cuda_ops_read(to + AROUND + off, pinned + 32, sizes[i], 0));
            GPU_TRY(cudaMemcpy(found.data(), to, ROOM, cudaMemcpyDeviceToHost));
            size_t end = AROUND + off + sizes[i], wrong = 0;
            for (size_t k = 0; k < ROOM; k++)
                wrong += found[k] !=
                         (k >= AROUND + off && k < end ? pinned[k - AROUND - off + 32] : 0xA5);
            snprintf(what, sizeof what, "%zu bytes read to an address off by %zu", sizes[i], off);
            check(wrong == 0, what, "every byte, and none around them");
        }
    GPU_TRY(cudaFree(to));
    GPU_TRY(cudaFreeHost(pinned));
}

/* --- digest */

static void test_digests(void) {
    uint32_t count = sizeof gpu_digest_cases / sizeof gpu_digest_cases[0], pieces = 0;
    std::vector<struct cuda_kvops_extent> extents(count);
    std::vector<uint32_t> owner;
    std::vector<uint8_t *> owned;
    struct cuda_kvops_digest args = {};
    char what[64];

    for (uint32_t i = 0; i < count; i++) {
        const struct gpu_digest_case &one = gpu_digest_cases[i];
        gpu_random random = {one.seed};
        std::vector<uint64_t> words(one.bytes / 8 + 8);
        for (size_t w = 0; w < one.bytes / 8; w++)
            words[w] = random.next();
        extents[i].first_piece = pieces;
        extents[i].bytes = one.bytes;
        extents[i].part_bytes = one.bytes / one.parts;
        for (uint32_t p = 0; p < one.parts; p++) {
            uint8_t *part;
            GPU_TRY(cudaMalloc((void **)&part, extents[i].part_bytes + 64));
            GPU_TRY(cudaMemcpy(part, (uint8_t *)words.data() + p * extents[i].part_bytes,
                               extents[i].part_bytes, cudaMemcpyHostToDevice));
            extents[i].part[p] = part;
            owned.push_back(part);
        }
        for (uint64_t at = 0; at < one.bytes; at += 4096, pieces++)
            owner.push_back(i);
    }
    gpu_scene scene;
    args.extents = scene.upload(extents.data(), count);
    args.owner = scene.upload(owner.data(), owner.size());
    args.extent_count = count;
    args.piece_count = pieces;
    std::vector<uint8_t> digests(16 * count, 0xFF);
    args.digests = scene.upload(digests.data(), digests.size());
    GPU_TRY(cudaMalloc((void **)&args.pieces, 8 * pieces));
    GPU_TRY(cuda_kvops_digest(&args, 0));
    GPU_TRY(cudaMemcpy(digests.data(), args.digests, 16 * count, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < count; i++) {
        snprintf(what, sizeof what, "digest of %u bytes in %u parts", gpu_digest_cases[i].bytes,
                 gpu_digest_cases[i].parts);
        check(memcmp(&digests[16 * i], gpu_digest_cases[i].digest, 16) == 0, what, "known answer");
    }
    for (uint8_t *part : owned)
        GPU_TRY(cudaFree(part));
    for (void *memory : scene.owned)
        GPU_TRY(cudaFree(memory));
    GPU_TRY(cudaFree(args.pieces));
}

/* --- decode */

static struct cuda_kvops_device device;

static std::vector<float> run_host(gpu_scene &scene, const std::vector<struct kvops_seq> &seqs,
                                   const float *q, uint32_t layer, uint32_t q_heads) {
    const struct kvops_table *table = gpu_host_table();
    struct kvops_attend args = {};
    std::vector<float> out(seqs.size() * q_heads * scene.geometry.head_dim);

    args.pool = scene.host;
    args.layer = layer;
    args.q_heads = q_heads;
    args.q = q;
    args.out = out.data();
    args.seqs = seqs.data();
    args.seq_count = (uint32_t)seqs.size();
    args.partials = (float *)gpu_host_bytes(kvops_partial_bytes(&args), 0xFF);
    uint8_t *scratch = gpu_host_bytes(kvops_decode_scratch_bytes(&args), 0xFF);
    table->decode(&args, 0, kvops_decode_items(&args), scratch);
    table->combine(&args, 0, kvops_combine_items(&args), scratch);
    free(scratch);
    free(args.partials);
    return out;
}

static std::vector<float> run_device(gpu_scene &scene, const std::vector<struct kvops_seq> &seqs,
                                     const float *q, uint32_t layer, uint32_t q_heads,
                                     uint32_t grain) {
    gpu_step step = gpu_step_of(scene, seqs, device, q_heads, grain);
    std::vector<float> out(step.out_count, NAN);

    step.args.layer = layer;
    step.args.q = scene.upload(q, step.out_count);
    step.args.out = scene.upload(out.data(), step.out_count);
    step.launch = {&step.args, &step.plan, 0, (int)(grain % 2)};
    GPU_TRY(cuda_kvops_decode(&step.launch));
    GPU_TRY(cuda_kvops_combine(&step.launch));
    GPU_TRY(
        cudaMemcpy(out.data(), step.args.out, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
    return out;
}

/* Bound of kv_decode.cu with the norms of this scene: sum_d |Hk_d| <= sqrt(dim) |k|. */
static double bound_of(const gpu_scene &scene, const float *q, size_t count) {
    double norm = 0, largest = 0;
    for (size_t i = 0; i < count; i++) {
        norm = i % scene.geometry.head_dim ? norm + (double)q[i] * q[i] : (double)q[i] * q[i];
        largest = fmax(largest, sqrt(norm)); /* |Hq| is at most the norm of q */
    }
    double logit = 1.1 * scene.k_norm_max * largest / 65278 +
                   scene.k_norm_max * largest / sqrt(scene.geometry.head_dim) * 0x1p-20;
    return (2 * logit + 0x1p-15) * scene.v_max * 1.5;
}

static double worst_error, worst_prefill;

static void compare(const std::vector<float> &a, const std::vector<float> &b, double bound,
                    double relative_max, const char *what) {
    double worst = 0, errors = 0, norms = 0;
    char detail[96];

    for (size_t i = 0; i < a.size(); i++) {
        double error = fabs((double)a[i] - b[i]);
        worst = error <= worst ? worst : error; /* NaN counts as worst */
        errors += error * error;
        norms += (double)a[i] * a[i];
    }
    double relative = sqrt(errors / (norms > 0 ? norms : 1));
    double &largest = relative_max > 1e-3 ? worst_prefill : worst_error;
    largest = relative <= largest ? largest : relative;
    snprintf(detail, sizeof detail, "worst %.2e, bound %.2e, |error|/|out| %.2e", worst, bound,
             relative);
    check(worst <= bound && relative < relative_max, what, detail);
}

static std::vector<float> random_q(gpu_scene &scene, size_t count) {
    std::vector<float> q(count + 16);
    for (float &x : q)
        x = scene.random.normal();
    return q;
}

typedef std::vector<enum layout_tier> tier_list;

/* Lengths as one ragged batch; then every sequence alone and every plan: equal bits. */
static void test_decode(struct layout_geometry geometry, uint32_t group,
                        const std::vector<uint32_t> &lengths, const tier_list &tiers,
                        const char *name) {
    gpu_scene scene;
    uint32_t slots = 0, frames = 1, q_heads = geometry.kv_heads * group;
    uint32_t layer = geometry.layers - 1;
    size_t row = (size_t)q_heads * geometry.head_dim;
    char what[128];

    for (uint32_t length : lengths) {
        frames += length / 256 + 1;
        slots += (length / 256 + 1) * (tiers[0] == LAYOUT_TIER_BF16 ? 32 : 16) + 9 * 8;
    }
    scene.init(geometry, slots + 40, frames, 77 + group);
    for (size_t i = 0; i < lengths.size(); i++)
        scene.add(lengths[i], tiers, i % 3 == 1 ? 1 : 0);
    for (size_t i = 0; i < lengths.size(); i++) { /* holes in every second sequence */
        for (uint32_t b = 0; i % 2 && b < scene.seqs[i].block_count; b += 3)
            scene.data[i].hidden[b / 64] |= 1ull << b % 64;
        scene.seqs[i].hidden_pages = i % 2 ? 2 : 0;
        if (i % 3 == 0)
            scene.seqs[i].hidden_blocks = NULL;
    }
    scene.upload_pool();
    std::vector<float> q = random_q(scene, row * lengths.size());
    std::vector<float> host = run_host(scene, scene.seqs, q.data(), layer, q_heads);
    std::vector<float> batch = run_device(scene, scene.seqs, q.data(), layer, q_heads, 0);
    snprintf(what, sizeof what, "decode %s dim %u heads %u group %u", name, geometry.head_dim,
             geometry.kv_heads, group);
    compare(host, batch, bound_of(scene, q.data(), row * lengths.size()), 1e-3, what);
    static const char *const grains[] = {"", "whole nodes: equal bits", "single runs: equal bits",
                                         "by load, not brief: equal bits"};
    for (uint32_t grain = 1; grain <= 3; grain++)
        check(run_device(scene, scene.seqs, q.data(), layer, q_heads, grain) == batch, what,
              grains[grain]);
    for (size_t i = 0; i < lengths.size(); i++) {
        std::vector<struct kvops_seq> alone = {scene.seqs[i]};
        alone[0].first_row = 0;
        std::vector<float> out =
            run_device(scene, alone, q.data() + i * row, layer, q_heads, i % 4);
        check(memcmp(out.data(), &batch[i * row], row * sizeof(float)) == 0, what,
              "alone: equal bits");
    }
    q[5] = NAN; /* poisons its own head only */
    std::vector<float> with = run_device(scene, scene.seqs, q.data(), layer, q_heads, 0);
    int good = 1;
    for (size_t i = 0; i < with.size(); i++)
        good &= i < geometry.head_dim ? with[i] != with[i]
                                      : memcmp(&with[i], &batch[i], sizeof(float)) == 0;
    check(good, what, "NaN in q stays in its head");
    scene.release();
}

/* Sequences of every kind of block in one batch, then every one alone: equal bits. */
static void test_kinds(struct layout_geometry geometry, uint32_t group) {
    static const enum layout_tier kinds[] = {LAYOUT_TIER_FP8,  LAYOUT_K8V4,     LAYOUT_TIER_K8I4,
                                             LAYOUT_TIER_BF16, LAYOUT_TIER_FP8, LAYOUT_K6V2};
    static const uint32_t lengths[] = {5200, 2000, 700, 1900, 1, 4500};
    uint32_t q_heads = geometry.kv_heads * group, layer = geometry.layers - 1;
    size_t row = (size_t)q_heads * geometry.head_dim;
    gpu_scene scene;
    char what[128];

    scene.init(geometry, 1500, 64, 55 + group);
    for (uint32_t i = 0; i < 6; i++)
        scene.add(lengths[i], {kinds[i]}, i % 2);
    scene.upload_pool();
    std::vector<float> q = random_q(scene, row * 6);
    std::vector<float> host = run_host(scene, scene.seqs, q.data(), layer, q_heads);
    std::vector<float> batch = run_device(scene, scene.seqs, q.data(), layer, q_heads, 0);
    snprintf(what, sizeof what, "decode of all kinds dim %u group %u", geometry.head_dim, group);
    compare(host, batch, bound_of(scene, q.data(), row * 6), 1e-3, what);
    for (uint32_t grain = 1; grain <= 3; grain++)
        check(run_device(scene, scene.seqs, q.data(), layer, q_heads, grain) == batch, what,
              "another plan: equal bits");
    for (size_t i = 0; i < 6; i++) {
        std::vector<struct kvops_seq> alone = {scene.seqs[i]};
        alone[0].first_row = 0;
        std::vector<float> out =
            run_device(scene, alone, q.data() + i * row, layer, q_heads, i % 4);
        check(memcmp(out.data(), &batch[i * row], row * sizeof(float)) == 0, what,
              "alone: equal bits");
    }
    scene.release();
}

/* --- prefill */

static std::vector<float> prefill_host(gpu_scene &scene, const std::vector<struct kvops_seq> &seqs,
                                       const float *q, uint32_t q_heads, size_t count) {
    struct kvops_attend args = {};
    std::vector<float> out(count);

    args.pool = scene.host;
    args.layer = scene.geometry.layers - 1;
    args.q_heads = q_heads;
    args.q = q;
    args.out = out.data();
    args.seqs = seqs.data();
    args.seq_count = (uint32_t)seqs.size();
    uint8_t *scratch = gpu_host_bytes(kvops_prefill_scratch_bytes(&args), 0xFF);
    gpu_host_table()->prefill(&args, 0, kvops_prefill_items(&args), scratch);
    free(scratch);
    return out;
}

static std::vector<float> prefill_device(gpu_scene &scene,
                                         const std::vector<struct kvops_seq> &seqs, const float *q,
                                         uint32_t q_heads) {
    gpu_step step = gpu_step_of(scene, seqs, device, q_heads, 0);
    std::vector<float> out(step.out_count, NAN);
    uint32_t rows = 0;
    enum layout_tier tier = LAYOUT_TIER_BF16;

    for (const struct kvops_seq &seq : seqs) {
        rows = seq.row_count > rows ? seq.row_count : rows;
        tier = seq.block_count ? (enum layout_tier)seq.blocks[0].tier : tier;
    }
    step.args.layer = scene.geometry.layers - 1;
    step.args.q = scene.upload(q, step.out_count);
    step.args.out = scene.upload(out.data(), step.out_count);
    GPU_TRY(cuda_kvops_prefill(&step.args, rows, tier, 0));
    GPU_TRY(
        cudaMemcpy(out.data(), step.args.out, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
    return out;
}

/* A ragged batch of chunks against the twin; every sequence alone: equal bits. */
static void test_prefill(struct layout_geometry geometry, uint32_t group,
                         const std::vector<std::pair<uint32_t, uint32_t>> &shapes,
                         const tier_list &tiers, const char *name) {
    gpu_scene scene;
    uint32_t slots = 0, frames = 1, q_heads = geometry.kv_heads * group;
    size_t row = (size_t)q_heads * geometry.head_dim, count = 0;
    char what[128];

    for (const auto &shape : shapes) {
        frames += shape.first / 256 + 1;
        slots += (shape.first / 256 + 1) * (tiers[0] == LAYOUT_TIER_BF16 ? 32 : 16) + 9 * 8;
        count += shape.second * row;
    }
    scene.init(geometry, slots + 40, frames, 99 + group);
    for (const auto &shape : shapes)
        scene.add(shape.first, tiers, shape.second);
    for (size_t i = 1; i < shapes.size(); i += 2) {
        for (uint32_t b = 0; b < scene.seqs[i].block_count; b += 3)
            scene.data[i].hidden[b / 64] |= 1ull << b % 64;
        scene.seqs[i].hidden_pages = 2;
    }
    scene.upload_pool();
    std::vector<float> q = random_q(scene, count);
    std::vector<float> host = prefill_host(scene, scene.seqs, q.data(), q_heads, count);
    std::vector<float> batch = prefill_device(scene, scene.seqs, q.data(), q_heads);
    snprintf(what, sizeof what, "prefill %s dim %u group %u", name, geometry.head_dim, group);
    /* Both roundings of kv_prefill.cu are 2^5 coarser than those of decode, at most. */
    compare(host, batch, 32 * bound_of(scene, q.data(), count), 4e-3, what);
    for (const struct kvops_seq &seq : scene.seqs) {
        std::vector<struct kvops_seq> alone = {seq};
        alone[0].first_row = 0;
        std::vector<float> out =
            prefill_device(scene, alone, q.data() + seq.first_row * row, q_heads);
        check(memcmp(out.data(), &batch[seq.first_row * row], out.size() * sizeof(float)) == 0,
              what, "alone: equal bits");
    }
    q[3] = NAN;
    std::vector<float> with = prefill_device(scene, scene.seqs, q.data(), q_heads);
    int good = 1;
    for (size_t i = 0; i < with.size(); i++)
        good &= i < geometry.head_dim ? with[i] != with[i]
                                      : memcmp(&with[i], &batch[i], sizeof(float)) == 0;
    check(good, what, "NaN in q stays in its row and head");
    scene.release();
}

/* Rows of heads that differ by more than a twentieth of their length. */
static size_t rows_off(const std::vector<float> &a, const std::vector<float> &b, uint32_t dim) {
    size_t off = 0;

    for (size_t row = 0; row < a.size(); row += dim) {
        double errors = 0, norms = 0;
        for (size_t i = row; i < row + dim; i++) {
            errors += pow((double)a[i] - b[i], 2);
            norms += pow((double)a[i], 2);
        }
        off += !(errors <= norms / 400);
    }
    return off;
}

/* Logits in the thousands, more than models have that look for one token: an answer is one token's
 * value. Few rows may be off, where two tokens are nearly as likely. */
static void test_sharp(uint32_t dim, const tier_list &tiers) {
    struct layout_geometry geometry = {2, 2, dim};
    uint32_t q_heads = 8, chunk_rows = 12;
    size_t row = (size_t)q_heads * dim;
    char what[96], detail[96];

    for (uint32_t rows = 1; rows <= chunk_rows; rows += chunk_rows - 1) {
        gpu_scene scene;
        scene.init(geometry, 1200, 40, 41 + rows);
        for (uint32_t length : {700u, 2000u, 2600u})
            scene.add(length, tiers, rows);
        scene.upload_pool();
        std::vector<float> q = random_q(scene, 3 * rows * row);
        for (float &x : q)
            x *= 2000.0f;
        std::vector<float> host =
            rows == 1 ? run_host(scene, scene.seqs, q.data(), 1, q_heads)
                      : prefill_host(scene, scene.seqs, q.data(), q_heads, 3 * rows * row);
        std::vector<float> here = rows == 1 ? run_device(scene, scene.seqs, q.data(), 1, q_heads, 0)
                                            : prefill_device(scene, scene.seqs, q.data(), q_heads);
        size_t off = rows_off(host, here, dim), all = host.size() / dim;
        snprintf(what, sizeof what, "%s of large logits, dim %u, %s",
                 rows == 1 ? "decode" : "prefill", dim, layout_tier_name(tiers[0]));
        snprintf(detail, sizeof detail, "%zu of %zu rows off", off, all);
        check(off <= 1 + all / 8, what, detail);
        scene.release();
    }
}

static void test_prefills(uint32_t dim) {
    struct layout_geometry geometry = {2, 2, dim}, odd = {3, 3, dim};
    tier_list narrow = {LAYOUT_K8V4, LAYOUT_K6V2, LAYOUT_K6V4, LAYOUT_K8V3, LAYOUT_K6V3};

    test_prefill(geometry, 4, {{0, 256}, {1, 63}, {64, 64}, {320, 5}, {700, 256}, {2000, 130}},
                 narrow, "mixed tiers");
    test_prefill(geometry, 4, {{5000, 13}, {5000, 13}, {300, 16}, {2000, 9}, {3100, 2}}, narrow,
                 "questions");
    test_prefill(odd, 3, {{1500, 100}, {900, 256}, {5500, 1}}, narrow, "odd slots");
    test_prefill(geometry, 1, {{800, 70}, {1200, 256}}, {LAYOUT_K8V8, LAYOUT_K6V2}, "with V8");
    test_prefill(geometry, 8, {{1500, 40}, {900, 33}}, {LAYOUT_TIER_BF16}, "BF16");
    test_prefill(geometry, 16, {{1500, 40}}, {LAYOUT_K8V4}, "large group");
    for (enum layout_tier tier : {LAYOUT_TIER_FP8, LAYOUT_TIER_K8I4}) {
        test_prefill(geometry, 4, {{64, 64}, {320, 5}, {700, 256}, {2000, 130}}, {tier},
                     layout_tier_name(tier));
        test_prefill(odd, 3, {{1500, 100}, {5500, 1}}, {tier}, layout_tier_name(tier));
    }
}

static void test_tiers(uint32_t dim, uint32_t group) {
    static const enum layout_tier all[] = {
        LAYOUT_K8V8, LAYOUT_K8V4, LAYOUT_K6V4,      LAYOUT_K6V3,     LAYOUT_K6V2,
        LAYOUT_K8V3, LAYOUT_K8V2, LAYOUT_TIER_BF16, LAYOUT_TIER_FP8, LAYOUT_TIER_K8I4};
    struct layout_geometry geometry = {2, 2, dim}, odd = {3, 3, dim};
    tier_list narrow = {LAYOUT_K8V4, LAYOUT_K6V2, LAYOUT_K6V4, LAYOUT_K8V3, LAYOUT_K6V3};
    tier_list wide = {LAYOUT_K6V2, LAYOUT_K8V8, LAYOUT_K8V2};

    for (enum layout_tier tier : all)
        test_decode(geometry, group, {700, 1900}, {tier}, layout_tier_name(tier));
    test_decode(geometry, group, {1, 63, 64, 65, 319, 320, 576, 2000, 5500}, narrow, "mixed");
    test_decode(odd, group, {17000, 577, 4416, 4500}, narrow, "long mixed");
    test_decode(odd, group, {3000, 600}, wide, "mixed with V8");
    for (enum layout_tier tier : {LAYOUT_TIER_FP8, LAYOUT_TIER_K8I4})
        test_decode(odd, group, {1, 64, 576, 17000, 4416, 900}, {tier}, layout_tier_name(tier));
    test_kinds(odd, group);
}

/* From one token to 131,072, in batches that end at every place of a page, run and node. */
static void test_lengths(uint32_t dim, uint32_t group) {
    tier_list narrow = {LAYOUT_K8V4, LAYOUT_K6V2, LAYOUT_K6V4, LAYOUT_K8V3, LAYOUT_K6V3};
    struct layout_geometry geometry = {1, 1, dim};

    test_decode(geometry, group, {131072, 1, 64, 131071, 66000}, narrow, "long");
    test_decode(geometry, group, {131000}, {LAYOUT_K6V2, LAYOUT_K8V4}, "one, long");
    for (uint32_t first = 1; first < 6; first++) {
        std::vector<uint32_t> lengths;
        for (uint32_t length = first; length < 1700; length += 31 + first)
            lengths.push_back(length);
        test_decode(geometry, group, lengths, narrow, "every length");
    }
    test_prefill(geometry, group, {{131066, 6}, {3, 61}, {40000, 2}}, narrow, "long");
}

/* A few cases of everything, for tools that make kernels a thousand times slower. */
static void test_quickly(void) {
    tier_list tiers = {LAYOUT_K8V4, LAYOUT_K6V2, LAYOUT_K6V3};

    test_seal({2, 2, 128}, LAYOUT_K8V8, 1);
    test_reads();
    test_digests();
    test_decode({1, 3, 128}, 3, {4700, 600}, tiers, "quick");
    test_decode({1, 1, 128}, 8, {900}, tiers, "quick");
    test_decode({1, 1, 64}, 4, {700}, {LAYOUT_TIER_BF16}, "quick BF16");
    test_seal({1, 1, 128}, LAYOUT_TIER_FP8, 1);
    test_seal({1, 1, 128}, LAYOUT_TIER_K8I4, 1);
    test_decode({1, 1, 128}, 4, {900}, {LAYOUT_TIER_FP8}, "quick FP8");
    test_decode({1, 1, 128}, 4, {900}, {LAYOUT_TIER_K8I4}, "quick K8I4");
    test_prefill({1, 1, 128}, 4, {{900, 20}}, {LAYOUT_TIER_FP8}, "quick FP8");
    test_prefill({1, 1, 128}, 4, {{900, 20}}, {LAYOUT_TIER_K8I4}, "quick K8I4");
    test_prefill({1, 2, 128}, 4, {{900, 40}, {330, 20}}, tiers, "quick");
}

int main(int argc, char **argv) {
    static const enum layout_tier tiers[] = {LAYOUT_K8V8, LAYOUT_K8V4,     LAYOUT_K6V2,
                                             LAYOUT_K8V2, LAYOUT_TIER_FP8, LAYOUT_TIER_K8I4};

    GPU_TRY(cuda_kvops_open(&device));
    if (argc > 1 && strcmp(argv[1], "quick") == 0) {
        test_quickly();
        printf("%d passed, %d failed\n", passed, failed);
        return failed != 0;
    }
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        for (enum layout_tier tier : tiers)
            for (int bad = 0; bad < 2; bad++) {
                test_seal({2, 2, dim}, tier, bad);
                test_seal({3, 3, dim}, tier, bad);
            }
        test_seal({1, 1, dim}, LAYOUT_K8V8, 0);
        test_decode({1, 1, dim}, 2, {3000}, {LAYOUT_K8V4}, "one head, planes across slots");
    }
    test_reads();
    test_digests();
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        test_tiers(dim, 4);
        static const uint32_t groups[] = {1, 3, 8, 16};
        test_lengths(dim, dim == 64 ? 3 : 4);
        for (uint32_t group : groups) {
            test_decode({2, 2, dim}, group, {2000, 700, 5500}, {LAYOUT_K8V4, LAYOUT_K6V3}, "tiers");
            test_decode({2, 2, dim}, group, {1500}, {LAYOUT_TIER_BF16}, "BF16");
            test_decode({2, 2, dim}, group, {9000, 320}, {LAYOUT_K8V8, LAYOUT_K6V2}, "with V8");
        }
    }
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        test_prefills(dim);
        test_sharp(dim, {LAYOUT_K8V4, LAYOUT_K6V4, LAYOUT_K6V2});
        test_sharp(dim, {LAYOUT_K8V8});
        test_sharp(dim, {LAYOUT_TIER_BF16});
        test_sharp(dim, {LAYOUT_TIER_FP8});
        test_sharp(dim, {LAYOUT_TIER_K8I4});
    }
    GPU_TRY(cudaDeviceSynchronize());
    printf("largest |error|/|out| against the host twin: decode %.2e, prefill %.2e\n", worst_error,
           worst_prefill);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
