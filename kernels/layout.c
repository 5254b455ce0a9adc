/* kernels/layout.c - where every stored byte of K and V lies, in slots and on disk.
 *
 * Responsible for: the sizes, places and bit maps that layout.h promises, as pure functions.
 * Not responsible for: speed; the SIMD twins know the maps by heart and are tested against these.
 */
#include "kernels/layout.h"

#include <assert.h>
#include <string.h>

#define MASK(stream) (1u << (stream))
#define K8 (MASK(LAYOUT_KH) | MASK(LAYOUT_KM) | MASK(LAYOUT_KL))
#define K6 (MASK(LAYOUT_KH) | MASK(LAYOUT_KM))
#define V2 MASK(LAYOUT_VB)
#define V3 (V2 | MASK(LAYOUT_VR1))
#define V4 (V3 | MASK(LAYOUT_VR2))
#define V8 (V4 | MASK(LAYOUT_VX))

struct stream_fact {
    const char *name;
    uint8_t slots;
    uint8_t table; /* first entry in a block's slot table */
    uint8_t width; /* bits of a value */
    uint8_t shift; /* of these bits in the code */
};

static const struct stream_fact stream_facts[LAYOUT_STREAM_COUNT] = {
    [LAYOUT_KH] = {"KH", 4, 0, 4, 4},
    [LAYOUT_KM] = {"KM", 2, 4, 2, 2},
    [LAYOUT_KL] = {"KL", 2, 6, 2, 0},
    [LAYOUT_VB] = {"VB", 2, 8, 2, 6},
    [LAYOUT_VR1] = {"VR1", 1, 10, 1, 5},
    [LAYOUT_VR2] = {"VR2", 1, 11, 1, 4},
    [LAYOUT_VX] = {"VX", 4, 12, 4, 0},
    [LAYOUT_META] = {"META", 0, 0, 0, 0},
    [LAYOUT_BF16] = {"BF16", LAYOUT_BLOCK_SLOTS, 0, 0, 0},
    [LAYOUT_PAGE] = {"PAGE", LAYOUT_PAGE_SLOTS, 0, 0, 0},
    [LAYOUT_SINKS] = {"SINKS", LAYOUT_PAGE_SLOTS, 0, 0, 0},
    [LAYOUT_FP8] = {"FP8", 16, 0, 0, 0},
    [LAYOUT_K8I4] = {"K8I4", 13, 0, 0, 0},
};

struct tier_fact {
    const char *name;
    uint32_t streams;
    uint8_t k_bits;
    uint8_t v_bits;
};

static const struct tier_fact tier_facts[LAYOUT_TIER_COUNT] = {
    [LAYOUT_K8V8] = {"K8V8", K8 | V8 | MASK(LAYOUT_META), 8, 8},
    [LAYOUT_K8V4] = {"K8V4", K8 | V4 | MASK(LAYOUT_META), 8, 4},
    [LAYOUT_K6V4] = {"K6V4", K6 | V4 | MASK(LAYOUT_META), 6, 4},
    [LAYOUT_K6V3] = {"K6V3", K6 | V3 | MASK(LAYOUT_META), 6, 3},
    [LAYOUT_K6V2] = {"K6V2", K6 | V2 | MASK(LAYOUT_META), 6, 2},
    [LAYOUT_K8V3] = {"K8V3", K8 | V3 | MASK(LAYOUT_META), 8, 3},
    [LAYOUT_K8V2] = {"K8V2", K8 | V2 | MASK(LAYOUT_META), 8, 2},
    [LAYOUT_TIER_BF16] = {"BF16", MASK(LAYOUT_BF16), 16, 16},
    [LAYOUT_TIER_FP8] = {"FP8", MASK(LAYOUT_FP8), 8, 8},
    [LAYOUT_TIER_K8I4] = {"K8I4", MASK(LAYOUT_K8I4), 8, 4},
};

static const struct stream_fact *stream_fact(enum layout_stream stream) {
    assert(stream < LAYOUT_STREAM_COUNT);
    return &stream_facts[stream];
}

static const struct tier_fact *tier_fact(enum layout_tier tier) {
    assert(tier < LAYOUT_TIER_COUNT);
    return &tier_facts[tier];
}

int layout_geometry_valid(const struct layout_geometry *geometry) {
    return geometry->layers >= 1 && geometry->layers <= LAYOUT_LAYERS_MAX &&
           geometry->kv_heads >= 1 && geometry->kv_heads <= LAYOUT_KV_HEADS_MAX &&
           (geometry->head_dim == 64 || geometry->head_dim == 128);
}

const char *layout_stream_name(enum layout_stream stream) {
    return (unsigned)stream < LAYOUT_STREAM_COUNT ? stream_facts[stream].name : "unknown";
}

const char *layout_tier_name(enum layout_tier tier) {
    return (unsigned)tier < LAYOUT_TIER_COUNT ? tier_facts[tier].name : "unknown";
}

int layout_stream_of_block(uint32_t stream) {
    return stream < LAYOUT_STREAM_COUNT && stream != LAYOUT_PAGE && stream != LAYOUT_SINKS;
}

uint32_t layout_stream_slots(enum layout_stream stream) {
    return stream_fact(stream)->slots;
}

uint32_t layout_tier_streams(enum layout_tier tier) {
    return tier_fact(tier)->streams;
}

uint32_t layout_tier_slots(enum layout_tier tier) {
    uint32_t slots = 0;

    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (tier_fact(tier)->streams & MASK(stream))
            slots += stream_facts[stream].slots;
    return slots;
}

uint32_t layout_stream_table(enum layout_stream stream) {
    return stream_fact(stream)->table;
}

uint32_t layout_tier_k_bits(enum layout_tier tier) {
    return tier_fact(tier)->k_bits;
}

uint32_t layout_tier_v_bits(enum layout_tier tier) {
    return tier_fact(tier)->v_bits;
}

int layout_tier_is_control(enum layout_tier tier) {
    return tier == LAYOUT_TIER_FP8 || tier == LAYOUT_TIER_K8I4;
}

static uint64_t layers_heads(const struct layout_geometry *geometry) {
    return (uint64_t)geometry->layers * geometry->kv_heads;
}

uint64_t layout_slot_raw_bytes(const struct layout_geometry *geometry) {
    return layers_heads(geometry) * (LAYOUT_BLOCK_TOKENS / 8) * geometry->head_dim;
}

uint64_t layout_slot_bytes(const struct layout_geometry *geometry) {
    return (layout_slot_raw_bytes(geometry) + LAYOUT_SLOT_UNIT - 1) / LAYOUT_SLOT_UNIT *
           LAYOUT_SLOT_UNIT;
}

uint64_t layout_meta_frame_bytes(const struct layout_geometry *geometry) {
    return layers_heads(geometry) * LAYOUT_BLOCK_PAGES * LAYOUT_META_TILE_BYTES;
}

uint64_t layout_stream_bytes(const struct layout_geometry *geometry, enum layout_stream stream) {
    if (stream == LAYOUT_META)
        return layout_meta_frame_bytes(geometry);
    return layout_slot_raw_bytes(geometry) * layout_stream_slots(stream);
}

uint32_t layout_tile_bytes(const struct layout_geometry *geometry, enum layout_stream stream) {
    if (stream == LAYOUT_META)
        return LAYOUT_META_TILE_BYTES;
    return LAYOUT_PAGE_TOKENS * geometry->head_dim * layout_plane_width(stream) / 8;
}

struct layout_place layout_tile(const struct layout_geometry *geometry, enum layout_stream stream,
                                struct layout_at at) {
    const struct stream_fact *fact = stream_fact(stream);
    uint32_t rows = geometry->layers * geometry->kv_heads;
    uint32_t tile = (at.layer * geometry->kv_heads + at.head) * LAYOUT_BLOCK_PAGES + at.page;

    assert(at.layer < geometry->layers && at.head < geometry->kv_heads);
    assert(at.page < LAYOUT_BLOCK_PAGES && stream <= LAYOUT_META);
    if (stream == LAYOUT_META)
        return (struct layout_place){0, (uint64_t)tile * LAYOUT_META_TILE_BYTES};
    uint32_t per_slot = rows * (LAYOUT_BLOCK_PAGES / fact->slots);
    uint32_t slot = tile / per_slot;
    uint64_t tile_bytes = (uint64_t)geometry->head_dim * fact->width * (LAYOUT_PAGE_TOKENS / 8);
    return (struct layout_place){slot, (tile - slot * per_slot) * tile_bytes};
}

struct layout_place layout_run(const struct layout_geometry *geometry, struct layout_at at,
                               uint32_t value, uint32_t run) {
    uint64_t per_slot = layers_heads(geometry);
    uint64_t row = (uint64_t)at.layer * geometry->kv_heads + at.head;
    uint64_t ordinal = (row * 2 + value) * (LAYOUT_PAGE_TOKENS / LAYOUT_RUN_TOKENS) + run;
    struct layout_place place;

    assert(at.layer < geometry->layers && at.head < geometry->kv_heads && value < 2);
    assert(run < LAYOUT_PAGE_TOKENS / LAYOUT_RUN_TOKENS);
    place.slot = (uint32_t)(ordinal / per_slot);
    place.off = ordinal % per_slot * LAYOUT_RUN_TOKENS * 2 * geometry->head_dim;
    return place;
}

/* The `per_page` parts of row (layer, head) of page `at.page`, part `part`: parts of one slot's
 * share of a row, page after page. */
static struct layout_place part_of_page(const struct layout_geometry *geometry, struct layout_at at,
                                        uint32_t per_page, uint32_t part) {
    uint64_t rows = layers_heads(geometry);
    uint64_t row = (uint64_t)at.layer * geometry->kv_heads + at.head;
    uint64_t ordinal = (at.page * rows + row) * per_page + part;

    assert(at.layer < geometry->layers && at.head < geometry->kv_heads);
    assert(at.page < LAYOUT_BLOCK_PAGES && part < per_page);
    return (struct layout_place){(uint32_t)(ordinal / rows),
                                 ordinal % rows * LAYOUT_HALF_TOKENS * geometry->head_dim};
}

struct layout_place layout_half(const struct layout_geometry *geometry, struct layout_at at,
                                uint32_t half) {
    return part_of_page(geometry, at, LAYOUT_PAGE_TOKENS / LAYOUT_HALF_TOKENS, half);
}

struct layout_place layout_nibbles(const struct layout_geometry *geometry, struct layout_at at) {
    return part_of_page(geometry, at, 1, 0);
}

struct layout_place layout_groups(const struct layout_geometry *geometry, struct layout_at at) {
    uint64_t row = (uint64_t)at.layer * geometry->kv_heads + at.head;

    assert(at.layer < geometry->layers && at.head < geometry->kv_heads);
    assert(at.page < LAYOUT_BLOCK_PAGES);
    return (struct layout_place){0,
                                 (at.page * layers_heads(geometry) + row) * 8 * geometry->head_dim};
}

uint32_t layout_plane_width(enum layout_stream stream) {
    assert(stream_fact(stream)->width > 0);
    return stream_fact(stream)->width;
}

uint32_t layout_plane_shift(enum layout_stream stream) {
    assert(stream_fact(stream)->width > 0);
    return stream_fact(stream)->shift;
}

static struct layout_bits k_bits(enum layout_stream stream, uint32_t head_dim, uint32_t t,
                                 uint32_t d) {
    uint32_t g = t >> 3, mt = (t >> 1) & 3, hf = t & 1;
    uint32_t ks = d >> 5, i = (d >> 4) & 1, e = d & 3, row = 4 * g + ((d >> 2) & 3);
    uint32_t unit = (mt * 32 + row) * (head_dim / 8) + 4 * ks;

    if (stream == LAYOUT_KH)
        return (struct layout_bits){((mt * (head_dim / 64) + (ks >> 1)) * 32 + row) * 16 +
                                        8 * (ks & 1) + 4 * i + e,
                                    4 - 4 * hf};
    if (stream == LAYOUT_KM)
        return (struct layout_bits){unit + ((e - hf) & 3), 2 + 4 * hf - 2 * i};
    return (struct layout_bits){unit + ((e - (hf | i)) & 3), i ? 6 - 4 * hf : 4 * hf};
}

static struct layout_bits v_bits(enum layout_stream stream, uint32_t t, uint32_t d) {
    uint32_t row = 4 * (d & 7) + (t >> 4), dt = d >> 4, hi = (d >> 3) & 1;
    uint32_t b = 2 * ((t >> 3) & 1) + (t & 1), kv = (t >> 2) & 1, mh = (t >> 1) & 1;
    uint32_t w = 2 * dt + kv, plane = ((dt >> 2) * 32 + row) * 16 + 4 * (dt & 3) + b;

    switch (stream) {
    case LAYOUT_VB:
        return (struct layout_bits){((w >> 2) * 32 + row) * 16 + 4 * (w & 3) + b,
                                    4 * hi + 2 - 2 * mh};
    case LAYOUT_VR1:
        return (struct layout_bits){plane, 4 * hi + 1 - kv + 2 * mh};
    case LAYOUT_VR2:
        return (struct layout_bits){plane, 4 * hi + kv + 2 * mh};
    default:
        return (struct layout_bits){(dt * 32 + row) * 16 + 4 * (2 * kv + mh) + ((b - 1 + hi) & 3),
                                    4 - 4 * hi};
    }
}

struct layout_bits layout_bits(enum layout_stream stream, uint32_t head_dim, uint32_t t,
                               uint32_t d) {
    assert(stream <= LAYOUT_VX && t < LAYOUT_PAGE_TOKENS && d < head_dim);
    return stream <= LAYOUT_KL ? k_bits(stream, head_dim, t, d) : v_bits(stream, t, d);
}

uint64_t layout_dense_bytes(const struct layout_geometry *geometry, uint32_t tokens) {
    return layers_heads(geometry) * 4 * tokens * geometry->head_dim;
}

/* Where run `run` of row (layer, head, value) lies densely, and how many of its bytes are valid. */
static uint64_t run_valid_bytes(const struct layout_geometry *geometry, uint32_t tokens,
                                uint32_t run) {
    uint32_t first = run * LAYOUT_RUN_TOKENS;
    uint32_t count = tokens > first ? tokens - first : 0;

    if (count > LAYOUT_RUN_TOKENS)
        count = LAYOUT_RUN_TOKENS;
    return (uint64_t)count * 2 * geometry->head_dim;
}

void layout_pack(const struct layout_geometry *geometry, const uint8_t *const slots[8],
                 uint32_t tokens, uint8_t *dense) {
    uint64_t rows = layers_heads(geometry) * 2;

    assert(tokens >= 1 && tokens <= LAYOUT_PAGE_TOKENS);
    for (uint64_t row = 0; row < rows; row++) {
        for (uint32_t run = 0; run * LAYOUT_RUN_TOKENS < tokens; run++) {
            struct layout_at at = {(uint32_t)(row / 2 / geometry->kv_heads),
                                   (uint32_t)(row / 2 % geometry->kv_heads), 0};
            struct layout_place place = layout_run(geometry, at, row & 1, run);
            uint64_t valid = run_valid_bytes(geometry, tokens, run);
            memcpy(dense, slots[place.slot] + place.off, valid);
            dense += valid;
        }
    }
}

void layout_unpack(const struct layout_geometry *geometry, const uint8_t *dense, uint32_t tokens,
                   uint8_t *const slots[8]) {
    uint64_t rows = layers_heads(geometry) * 2;

    assert(tokens >= 1 && tokens <= LAYOUT_PAGE_TOKENS);
    for (uint64_t row = 0; row < rows; row++) {
        for (uint32_t run = 0; run * LAYOUT_RUN_TOKENS < tokens; run++) {
            struct layout_at at = {(uint32_t)(row / 2 / geometry->kv_heads),
                                   (uint32_t)(row / 2 % geometry->kv_heads), 0};
            struct layout_place place = layout_run(geometry, at, row & 1, run);
            uint64_t valid = run_valid_bytes(geometry, tokens, run);
            memcpy(slots[place.slot] + place.off, dense, valid);
            dense += valid;
        }
    }
}

uint32_t layout_sink_tokens(uint64_t n_kv) {
    return n_kv < LAYOUT_SINK_TOKENS ? (uint32_t)n_kv : LAYOUT_SINK_TOKENS;
}

uint64_t layout_sealed_blocks(uint64_t n_kv) {
    const uint64_t kept = LAYOUT_SINK_TOKENS + LAYOUT_WINDOW_TOKENS_MIN;

    return n_kv < kept ? 0 : (n_kv - kept) / LAYOUT_BLOCK_TOKENS;
}

uint32_t layout_window_tokens(uint64_t n_kv) {
    return (uint32_t)(n_kv - layout_sink_tokens(n_kv) -
                      layout_sealed_blocks(n_kv) * LAYOUT_BLOCK_TOKENS);
}

uint32_t layout_window_pages(uint64_t n_kv) {
    return (layout_window_tokens(n_kv) + LAYOUT_PAGE_TOKENS - 1) / LAYOUT_PAGE_TOKENS;
}
