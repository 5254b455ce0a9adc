/* tests/bench_attention.c - speed of seal and attention on one core.
 *
 * Responsible for: ms, GB/s of stored bytes and share of the FMA rate for the default model's
 * geometry (30 layers, 3 KV heads, 9 query heads, dim 64) at several depths and tiers.
 * Not responsible for: correctness (test_attention.c).
 */
#include "kernels/kvops.h"

#include "kernels/ops.h"
#include "store/base/clock.h"
#include "tests/support_kv.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum {
    LAYERS = 30,
    HEADS = 3,
    GROUP = 3,
    DIM = 64,
    DEPTH = 7680,
    CHUNK = 256,
    REPEAT = 3,
    DECODE_REPEAT = 30
};

static const struct support_kv_split together = {1000000, 0};

static void *take(size_t bytes) {
    void *memory = kv_alloc_aligned(kv_alloc_system(), bytes, 64);

    assert_non_null(memory);
    memset(memory, 0, bytes);
    return memory;
}

struct bench {
    struct support_kv kv;
    struct kvops_seq seq;
    struct kvops_attend args;
    uint16_t *chunk;
    void *scratch;
    double fma_per_ns; /* fused products of one lane */
};

static double now_ms(void) {
    return (double)kv_clock_now_ns(kv_clock_system()) / 1e6;
}

static double fma_rate(const struct ops_table *ops) {
    double best = 0;

    for (int i = 0; i < REPEAT; i++) {
        double start = now_ms();
        uint64_t operations = ops->fma_rate(2000000);
        double rate = (double)operations / 2 / ((now_ms() - start) * 1e6);
        best = rate > best ? rate : best;
    }
    return best;
}

static uint64_t tail_bytes(const struct kvops_seq *seq) {
    return (uint64_t)(seq->sink_tokens + seq->window_tokens) * LAYERS * HEADS * DIM * 4;
}

/* One call per layer over memory that is there, as the engine does. */
static void run_layer(const struct kvops_table *table, struct bench *bench, int decode) {
    const struct kvops_attend *args = &bench->args;

    if (decode) {
        table->decode(args, 0, kvops_decode_items(args), bench->scratch);
        table->combine(args, 0, kvops_combine_items(args), bench->scratch);
    } else {
        table->prefill(args, 0, kvops_prefill_items(args), bench->scratch);
    }
}

/* All layers once; the fastest of several. */
static double time_layers(const struct kvops_table *table, struct bench *bench, int decode) {
    double best = 1e30;

    for (int i = 0; i < (decode ? DECODE_REPEAT : REPEAT); i++) {
        double start = now_ms();
        for (bench->args.layer = 0; bench->args.layer < LAYERS; bench->args.layer++)
            run_layer(table, bench, decode);
        double ms = now_ms() - start;
        best = ms < best ? ms : best;
    }
    return best;
}

static void report(const struct kvops_table *table, struct bench *bench, enum layout_tier tier) {
    uint64_t block_bytes =
        layout_tier_slots(tier) * layout_slot_raw_bytes(&bench->kv.pool.geometry);
    uint32_t rows = bench->seq.row_count, n = DEPTH;
    int decode = rows == 1;

    if (tier != LAYOUT_TIER_BF16)
        block_bytes += layout_meta_frame_bytes(&bench->kv.pool.geometry);
    double ms = time_layers(table, bench, decode);
    uint64_t bytes = block_bytes * bench->seq.block_count + tail_bytes(&bench->seq);
    double fma = (double)LAYERS * HEADS * GROUP * 2 * DIM * rows * (n + (rows + 1) / 2.0);
    printf("%-9s %-7s %-5s %8.2f ms  %6.2f GB/s stored  %5.1f %% of FMA rate\n", table->name,
           decode ? "decode" : "prefill", layout_tier_name(tier), ms, (double)bytes / ms / 1e6,
           100 * fma / (ms * 1e6) / bench->fma_per_ns);
}

static void bench_seal(const struct kvops_table *table, struct bench *bench) {
    struct kvops_seal seal = {.pool = bench->kv.pool, .block = bench->seq.blocks[0]};
    double best = 1e30;

    for (uint32_t page = 0; page < 4; page++)
        seal.pages[page] = bench->kv.window[page];
    for (uint32_t i = 0; i < 12; i++)
        seal.block.slot[i] = bench->kv.order[bench->kv.slots_used + i];
    seal.block.tier = LAYOUT_K8V4;
    seal.bad_token = take(LAYERS * HEADS * sizeof *seal.bad_token);
    for (int i = 0; i < REPEAT; i++) {
        double start = now_ms();
        support_kv_seal(table, &seal, together);
        double ms = now_ms() - start;
        best = ms < best ? ms : best;
    }
    printf("%-9s seal    K8V4  %8.2f ms for 256 tokens of all layers\n", table->name, best);
    kv_alloc_release(kv_alloc_system(), seal.bad_token);
}

static void bench_tier(enum layout_tier tier) {
    const struct kvops_table *fast = ops_cpu_has_avx2() ? kvops_host_avx2() : kvops_host_c();
    const struct ops_table *ops = ops_cpu_has_avx2() ? ops_host_avx2() : ops_host_c();
    size_t chunk_values = (size_t)HEADS * CHUNK * DIM;
    struct bench bench = {.fma_per_ns = fma_rate(ops)};
    struct testing_random random;
    float *q = take(sizeof(float) * CHUNK * HEADS * GROUP * DIM);
    float *out = take(sizeof(float) * CHUNK * HEADS * GROUP * DIM);

    testing_random_init(&random, 3);
    support_kv_init(&bench.kv, (struct layout_geometry){LAYERS, HEADS, DIM}, DEPTH, 9);
    bench.seq = support_kv_seq(&bench.kv, fast, DEPTH, &tier, 1);
    bench.chunk = take(2 * chunk_values * sizeof *bench.chunk);
    for (size_t i = 0; i < 2 * chunk_values; i++)
        bench.chunk[i] = support_kv_bf16(testing_random_f32(&random));
    for (uint32_t i = 0; i < CHUNK * HEADS * GROUP * DIM; i++)
        q[i] = testing_random_normal(&random);
    bench.seq.chunk_k = bench.chunk;
    bench.seq.chunk_v = bench.chunk + chunk_values;
    bench.seq.chunk_head_stride = (size_t)CHUNK * DIM;
    bench.args = (struct kvops_attend){.pool = bench.kv.pool,
                                       .q_heads = HEADS * GROUP,
                                       .q = q,
                                       .out = out,
                                       .seqs = &bench.seq,
                                       .seq_count = 1};
    bench.args.partials = take(kvops_partial_bytes(&bench.args));
    bench.scratch = take(kvops_prefill_scratch_bytes(&bench.args));
    report(fast, &bench, tier);
    bench.seq.row_count = CHUNK;
    report(fast, &bench, tier);
    if (tier == LAYOUT_K8V4) {
        printf("FMA rate %.2f lanes per ns\n", bench.fma_per_ns);
        bench_seal(fast, &bench);
    }
    support_kv_release(&bench.kv);
    kv_alloc_release(kv_alloc_system(), bench.chunk);
    kv_alloc_release(kv_alloc_system(), bench.args.partials);
    kv_alloc_release(kv_alloc_system(), bench.scratch);
    kv_alloc_release(kv_alloc_system(), q);
    kv_alloc_release(kv_alloc_system(), out);
}

static void speed_at_full_depth(void **state) {
    (void)state;
    for (uint32_t tier = LAYOUT_K8V8; tier < LAYOUT_TIER_COUNT; tier++)
        bench_tier(tier);
}

TESTING_MAIN(cmocka_unit_test(speed_at_full_depth))
