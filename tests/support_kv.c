/* tests/support_kv.c - a pool of KV slots with random content, for kernels' tests and benches.
 *
 * Responsible for: what support_kv.h says.
 * Not responsible for: speed beyond what a sweep needs.
 */
#include "tests/support_kv.h"

#include "tests/testing.h"

#include <string.h>
#include <sys/mman.h>

enum { ALIGN_BYTES = 64, HUGE_BYTES = 1 << 21 };

/* Large pieces ask for huge pages: tiles lie at random in the pool, and page walks would be half
 * of the time that a bench measures. */
static void *take(size_t bytes) {
    size_t align = bytes >= 2 * HUGE_BYTES ? HUGE_BYTES : ALIGN_BYTES;
    void *memory = kv_alloc_aligned(kv_alloc_system(), bytes, align);

    assert_non_null(memory);
    if (align == HUGE_BYTES)
        (void)madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 0xFF, bytes);
    return memory;
}

static void give(void *memory) {
    kv_alloc_release(kv_alloc_system(), memory);
}

uint16_t support_kv_bf16(float value) {
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

float support_kv_f32(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

static size_t row_values(const struct support_kv *kv) {
    return (size_t)kv->tokens * kv->pool.geometry.head_dim;
}

/* K has outlier channels and a mean, V small-norm tokens, as real caches have. */
static void fill(struct support_kv *kv, struct testing_random *random) {
    uint32_t dim = kv->pool.geometry.head_dim;
    size_t rows = (size_t)kv->pool.geometry.layers * kv->pool.geometry.kv_heads * kv->tokens;

    for (size_t row = 0; row < rows; row++) {
        float size = testing_random_below(random, 16) == 0 ? 0.05f : 1.0f;
        for (uint32_t d = 0; d < dim; d++) {
            float k = testing_random_f32(random) * (d % 21 == 5 ? 6.0f : 1.5f);
            kv->k[row * dim + d] = support_kv_bf16(k + (d % 9 == 2 ? 2.0f : 0.0f));
            kv->v[row * dim + d] = support_kv_bf16(testing_random_f32(random) * size);
        }
    }
}

void support_kv_init(struct support_kv *kv, struct layout_geometry geometry, uint32_t tokens,
                     uint64_t seed) {
    size_t rows = (size_t)geometry.layers * geometry.kv_heads;
    uint32_t blocks = tokens / LAYOUT_BLOCK_TOKENS + 1;
    struct testing_random random;

    memset(kv, 0, sizeof *kv);
    testing_random_init(&random, seed);
    kv->pool.geometry = geometry;
    kv->tokens = tokens;
    kv->slot_count = blocks * (16 + 32) + 2 * LAYOUT_BLOCK_SLOTS + 9 * LAYOUT_PAGE_SLOTS;
    kv->frame_count = blocks;
    kv->pool.slots = take(kv->slot_count * layout_slot_bytes(&geometry));
    kv->pool.meta = take(kv->frame_count * layout_meta_frame_bytes(&geometry));
    kv->order = take(kv->slot_count * sizeof *kv->order);
    kv->k = take(rows * row_values(kv) * sizeof *kv->k);
    kv->v = take(rows * row_values(kv) * sizeof *kv->v);
    for (uint32_t i = 0; i < kv->slot_count; i++) {
        uint32_t at = (uint32_t)testing_random_below(&random, i + 1);
        kv->order[i] = kv->order[at];
        kv->order[at] = i;
    }
    fill(kv, &random);
}

void support_kv_release(struct support_kv *kv) {
    give(kv->pool.slots);
    give(kv->pool.meta);
    give(kv->order);
    give(kv->k);
    give(kv->v);
}

static uint32_t take_slot(struct support_kv *kv) {
    assert_true(kv->slots_used < kv->slot_count);
    return kv->order[kv->slots_used++];
}

const uint16_t *support_kv_source(const struct support_kv *kv, uint32_t value, struct layout_at at,
                                  uint32_t token) {
    size_t row = (size_t)at.layer * kv->pool.geometry.kv_heads + at.head;

    return (value ? kv->v : kv->k) + row * row_values(kv) +
           (size_t)token * kv->pool.geometry.head_dim;
}

static void write_page(struct support_kv *kv, const uint32_t *slots, uint32_t first,
                       uint32_t count) {
    const struct layout_geometry *geometry = &kv->pool.geometry;
    uint32_t rows = geometry->layers * geometry->kv_heads;
    uint64_t slot_bytes = layout_slot_bytes(geometry);

    for (uint32_t i = 0; i < rows * 2 * count; i++) {
        uint32_t t = i % count, value = i / count % 2, row = i / count / 2;
        struct layout_at at = {row / geometry->kv_heads, row % geometry->kv_heads, 0};
        struct layout_place place = layout_run(geometry, at, value, t / LAYOUT_RUN_TOKENS);
        uint8_t *to = kv->pool.slots + slots[place.slot] * slot_bytes + place.off +
                      t % LAYOUT_RUN_TOKENS * 2 * geometry->head_dim;
        memcpy(to, support_kv_source(kv, value, at, first + t), 2 * geometry->head_dim);
    }
}

struct kvops_page support_kv_page(struct support_kv *kv, uint32_t first, uint32_t count) {
    struct kvops_page page;

    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++)
        page.slot[i] = take_slot(kv);
    write_page(kv, page.slot, first, count);
    return page;
}

struct kvops_block support_kv_block(struct support_kv *kv, const struct kvops_table *table,
                                    uint32_t first, enum layout_tier tier) {
    struct kvops_seal seal = {.pool = kv->pool};
    uint32_t layer, token, used;

    memset(&seal.block, 0xFF, sizeof seal.block);
    seal.block.tier = tier;
    if (tier == LAYOUT_TIER_BF16) {
        for (uint32_t i = 0; i < LAYOUT_BLOCK_SLOTS; i++)
            seal.block.slot[i] = take_slot(kv);
        for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++)
            write_page(kv, seal.block.slot + page * LAYOUT_PAGE_SLOTS,
                       first + page * LAYOUT_PAGE_TOKENS, LAYOUT_PAGE_TOKENS);
        return seal.block;
    }
    int control = layout_tier_is_control(tier);
    seal.block.tier = control ? tier : LAYOUT_K8V8;
    seal.block.meta_frame = control ? UINT32_MAX : kv->frames_used++;
    for (uint32_t i = 0; i < layout_tier_slots(seal.block.tier); i++)
        seal.block.slot[i] = take_slot(kv);
    used = kv->slots_used;
    for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++)
        seal.pages[page] =
            support_kv_page(kv, first + page * LAYOUT_PAGE_TOKENS, LAYOUT_PAGE_TOKENS);
    seal.bad_token = take(kvops_seal_items(&seal) * sizeof *seal.bad_token);
    support_kv_seal(table, &seal, (struct support_kv_split){3, 0});
    assert_false(kvops_seal_bad(&seal, &layer, &token));
    give(seal.bad_token);
    while (kv->slots_used > used) /* the pages go back, poisoned */
        memset(kv->pool.slots + kv->order[--kv->slots_used] * layout_slot_bytes(&kv->pool.geometry),
               0xFF, layout_slot_bytes(&kv->pool.geometry));
    for (uint32_t stream = LAYOUT_KH; !control && stream <= LAYOUT_VX; stream++)
        for (uint32_t i = 0; i < layout_stream_slots(stream); i++)
            if (!(layout_tier_streams(tier) & 1u << stream))
                seal.block.slot[layout_stream_table(stream) + i] = UINT32_MAX;
    seal.block.tier = tier;
    return seal.block;
}

struct kvops_seq support_kv_seq(struct support_kv *kv, const struct kvops_table *table,
                                uint32_t n_kv, const enum layout_tier *tiers, uint32_t tier_count) {
    struct kvops_seq seq = {.blocks = kv->blocks, .window = kv->window, .row_count = 1};
    uint32_t at;

    seq.sink_tokens = layout_sink_tokens(n_kv);
    seq.block_count = (uint32_t)layout_sealed_blocks(n_kv);
    seq.window_tokens = layout_window_tokens(n_kv);
    assert_true(seq.block_count <= SUPPORT_KV_BLOCKS_MAX);
    seq.sinks = support_kv_page(kv, 0, seq.sink_tokens);
    for (uint32_t b = 0; b < seq.block_count; b++)
        kv->blocks[b] = support_kv_block(kv, table, LAYOUT_SINK_TOKENS + b * LAYOUT_BLOCK_TOKENS,
                                         tiers[b % tier_count]);
    at = LAYOUT_SINK_TOKENS + seq.block_count * LAYOUT_BLOCK_TOKENS;
    for (uint32_t page = 0; page < layout_window_pages(n_kv); page++) {
        uint32_t left = n_kv - at;
        uint32_t count = left < LAYOUT_PAGE_TOKENS ? left : LAYOUT_PAGE_TOKENS;
        kv->window[page] = support_kv_page(kv, at, count);
        at += count;
    }
    return seq;
}

typedef void (*run_fn)(const void *args, uint32_t first, uint32_t end, void *scratch);

struct run {
    run_fn fn;
    const void *args;
    uint32_t items;
    size_t scratch_bytes;
};

static void run_split(const struct run *run, struct support_kv_split split) {
    uint32_t calls = (run->items + split.step - 1) / split.step;
    void *scratch = take(run->scratch_bytes + ALIGN_BYTES);

    for (uint32_t i = 0; i < calls; i++) {
        uint32_t first = (split.backwards ? calls - 1 - i : i) * split.step;
        uint32_t end = first + split.step < run->items ? first + split.step : run->items;
        run->fn(run->args, first, end, scratch);
    }
    give(scratch);
}

/* One shape of function for all, without casting function pointers. */
struct call {
    const struct kvops_table *table;
    const void *args;
};

static void call_seal(const void *args, uint32_t first, uint32_t end, void *scratch) {
    const struct call *call = args;
    call->table->seal(call->args, first, end, scratch);
}

static void call_prefill(const void *args, uint32_t first, uint32_t end, void *scratch) {
    const struct call *call = args;
    call->table->prefill(call->args, first, end, scratch);
}

static void call_decode(const void *args, uint32_t first, uint32_t end, void *scratch) {
    const struct call *call = args;
    call->table->decode(call->args, first, end, scratch);
}

static void call_combine(const void *args, uint32_t first, uint32_t end, void *scratch) {
    const struct call *call = args;
    call->table->combine(call->args, first, end, scratch);
}

void support_kv_seal(const struct kvops_table *table, const struct kvops_seal *args,
                     struct support_kv_split split) {
    struct call call = {table, args};
    struct run run = {call_seal, &call, kvops_seal_items(args), kvops_seal_scratch_bytes(args)};

    run_split(&run, split);
}

void support_kv_prefill(const struct kvops_table *table, const struct kvops_attend *args,
                        struct support_kv_split split) {
    struct call call = {table, args};
    struct run run = {call_prefill, &call, kvops_prefill_items(args),
                      kvops_prefill_scratch_bytes(args)};

    run_split(&run, split);
}

void support_kv_decode(const struct kvops_table *table, struct kvops_attend *args,
                       struct support_kv_split split) {
    struct call call = {table, args};
    struct run run = {call_decode, &call, kvops_decode_items(args),
                      kvops_decode_scratch_bytes(args)};

    args->partials = take(kvops_partial_bytes(args));
    run_split(&run, split);
    run = (struct run){call_combine, &call, kvops_combine_items(args),
                       kvops_combine_scratch_bytes(args)};
    run_split(&run, split);
    give(args->partials);
}
