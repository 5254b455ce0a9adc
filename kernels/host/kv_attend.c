/* kernels/host/kv_attend.c - the fixed order in which attention visits pages.
 *
 * Responsible for: the tree of kvops.h in both schedules, for every twin; items; scratch; which
 * bytes of the pool a page is.
 * Not responsible for: arithmetic inside a page (struct leaf_table).
 *
 * Both schedules call run_sum and tail_page, the only two places that order leaves below the top,
 * and join in the same sequence; that is why their bits are equal.
 */
#include <assert.h>
#include <math.h>

#include "kernels/host/leaf.h"

enum { RUN_BLOCKS = 4, NODE_RUNS = 4, ALIGN_BYTES = 64 };

/* One (sequence, KV head, some rows) on its way through the pages. */
struct walk {
    const struct leaf_table *leaf;
    const struct kvops_attend *args;
    const struct kvops_seq *seq;
    uint32_t head;
    uint32_t first_row; /* within the sequence */
    uint32_t rows;      /* query rows: rows of the sequence times group */
    uint32_t group;
    uint32_t dim;
    int direct; /* few rows: read planes without widening them */
    struct leaf_tile *tile;
    float *q_plain;
    float *q_rotated;
    float *sums_plain;
    float *sums_rotated;
    uint8_t *seen;
    struct leaf_state page;
    struct leaf_state block;
    struct leaf_state run;
    struct leaf_state node;
    struct leaf_state total;
};

static uint32_t group_of(const struct kvops_attend *args) {
    return args->q_heads / args->pool.geometry.kv_heads;
}

static uint32_t pages_of(uint32_t tokens) {
    return (tokens + LAYOUT_PAGE_TOKENS - 1) / LAYOUT_PAGE_TOKENS;
}

static uint32_t runs_of(const struct kvops_seq *seq) {
    return (seq->block_count + RUN_BLOCKS - 1) / RUN_BLOCKS;
}

static uint32_t chunk_pages_of(const struct kvops_seq *seq) {
    return seq->chunk_k ? pages_of(seq->row_count) : 0;
}

static uint32_t tails_of(const struct kvops_seq *seq) {
    return 1 + pages_of(seq->window_tokens) + chunk_pages_of(seq);
}

static uint32_t units_of(const struct kvops_seq *seq) {
    return runs_of(seq) + tails_of(seq);
}

static uint32_t tile_rows(const struct kvops_attend *args) {
    uint32_t rows = KVOPS_TILE_QUERIES / group_of(args);
    return rows ? rows : 1;
}

struct leaf_planes leaf_planes_at(const struct kvops_pool *pool, const struct kvops_block *block,
                                  struct layout_at at) {
    uint64_t slot_bytes = layout_slot_bytes(&pool->geometry);
    uint32_t streams = layout_tier_streams(block->tier);
    struct leaf_planes page = {{0}, NULL, pool->geometry.head_dim, block->tier};

    assert(block->tier < LAYOUT_TIER_BF16);
    for (uint32_t stream = LAYOUT_KH; stream <= LAYOUT_VX; stream++) {
        if (!(streams & 1u << stream))
            continue;
        struct layout_place place = layout_tile(&pool->geometry, stream, at);
        uint64_t slot = block->slot[layout_stream_table(stream) + place.slot];
        page.plane[stream] = pool->slots + slot * slot_bytes + place.off;
    }
    page.meta = pool->meta + block->meta_frame * layout_meta_frame_bytes(&pool->geometry) +
                layout_tile(&pool->geometry, LAYOUT_META, at).off;
    return page;
}

struct leaf_runs leaf_runs_at(const struct kvops_pool *pool, const uint32_t slots[8],
                              struct layout_at at, uint32_t tokens) {
    uint64_t slot_bytes = layout_slot_bytes(&pool->geometry);
    struct leaf_runs page = {.dim = pool->geometry.head_dim, .tokens = tokens};

    for (uint32_t run = 0; run < LEAF_RUNS; run++) {
        struct layout_place k = layout_run(&pool->geometry, at, 0, run);
        struct layout_place v = layout_run(&pool->geometry, at, 1, run);
        page.k[run] = (const uint16_t *)(pool->slots + slots[k.slot] * slot_bytes + k.off);
        page.v[run] = (const uint16_t *)(pool->slots + slots[v.slot] * slot_bytes + v.off);
    }
    return page;
}

static struct leaf_queries queries_plain(const struct walk *walk) {
    struct leaf_queries queries = {walk->q_plain, walk->sums_plain, NULL, walk->rows, walk->dim};
    return queries;
}

static struct leaf_queries queries_rotated(const struct walk *walk) {
    struct leaf_queries queries = {walk->q_rotated, walk->sums_rotated, NULL, walk->rows,
                                   walk->dim};
    return queries;
}

static void clear(const struct walk *walk, struct leaf_state state) {
    for (uint32_t row = 0; row < walk->rows; row++) {
        state.max[row] = -INFINITY;
        state.sum[row] = 0.0f;
    }
}

static void fold(const struct walk *walk, struct leaf_state into, struct leaf_state from) {
    walk->leaf->fold(into, from, walk->rows, walk->dim);
}

static int block_hidden(const struct kvops_seq *seq, uint32_t block) {
    return seq->hidden_blocks && (seq->hidden_blocks[block / 64] >> block % 64 & 1);
}

static struct leaf_planes planes_of(const struct walk *walk, uint32_t block, uint32_t page) {
    struct layout_at at = {walk->args->layer, walk->head, page};

    return leaf_planes_at(&walk->args->pool, &walk->seq->blocks[block], at);
}

static void bf16_page(struct walk *walk, uint32_t index, uint32_t page) {
    const struct kvops_block *block = &walk->seq->blocks[index];
    struct layout_at at = {walk->args->layer, walk->head, page};
    struct leaf_queries queries = queries_plain(walk);
    struct leaf_runs runs = leaf_runs_at(&walk->args->pool, block->slot + page * LAYOUT_PAGE_SLOTS,
                                         at, LAYOUT_PAGE_TOKENS);

    walk->leaf->widen_runs(&runs, walk->tile);
    walk->leaf->attend(walk->tile, &queries, walk->page);
}

/* A page of FP8 or K8I4: as BF16 tokens, K of K8I4 in the rotated domain. */
static void control_page(struct walk *walk, uint32_t index, uint32_t page) {
    const struct kvops_block *block = &walk->seq->blocks[index];
    struct layout_at at = {walk->args->layer, walk->head, page};
    struct leaf_queries queries =
        block->tier == LAYOUT_TIER_K8I4 ? queries_rotated(walk) : queries_plain(walk);

    leaf_widen_control(walk->leaf, &walk->args->pool, block, at, walk->tile);
    walk->leaf->attend(walk->tile, &queries, walk->page);
}

/* Pages[0] by way of the scratch; pages[1] comes next. */
static void sealed_page(struct walk *walk, const struct leaf_planes pages[2]) {
    struct leaf_queries queries = queries_rotated(walk);

    if (walk->direct) {
        walk->leaf->attend_planes(pages, &queries, walk->tile, walk->page);
    } else {
        walk->leaf->widen_planes(&pages[0], walk->tile);
        walk->leaf->attend(walk->tile, &queries, walk->page);
    }
}

/* walk->block = block `index`; `next` is the block that comes next, or this one again. The first
 * page needs no fold: it lands where the sum will be. */
static void block_sum(struct walk *walk, uint32_t index, uint32_t next) {
    const struct leaf_state scratch = walk->page;
    enum layout_tier tier = walk->seq->blocks[index].tier;
    int sealed = tier < LAYOUT_TIER_BF16;
    struct leaf_planes pages[2];

    walk->page = walk->block;
    if (sealed)
        pages[1] = planes_of(walk, index, 0);
    for (uint32_t page = 0; page < LAYOUT_BLOCK_PAGES; page++) {
        if (sealed) {
            int last = page == LAYOUT_BLOCK_PAGES - 1;
            pages[0] = pages[1];
            pages[1] = planes_of(walk, last ? next : index, last ? 0 : page + 1);
            sealed_page(walk, pages);
        } else if (tier == LAYOUT_TIER_BF16) {
            bf16_page(walk, index, page);
        } else {
            control_page(walk, index, page);
        }
        if (page > 0)
            fold(walk, walk->block, walk->page);
        walk->page = scratch;
    }
}

/* walk->run = blocks 4 * run .. of the sequence, hidden ones left out. */
static void run_sum(struct walk *walk, uint32_t run) {
    uint32_t end = (run + 1) * RUN_BLOCKS, next;

    if (end > walk->seq->block_count)
        end = walk->seq->block_count;
    clear(walk, walk->run);
    for (uint32_t block = run * RUN_BLOCKS; block < end; block = next) {
        next = block + 1;
        while (next < end && block_hidden(walk->seq, next))
            next++;
        if (block_hidden(walk->seq, block))
            continue;
        block_sum(walk, block, next < end ? next : block);
        fold(walk, walk->run, walk->block);
    }
}

/* Chunk page `page`: row i of the sequence sees tokens 0..i of the chunk. */
static void chunk_page(struct walk *walk, uint32_t page) {
    const struct kvops_seq *seq = walk->seq;
    struct leaf_queries queries = queries_plain(walk);
    uint32_t first = page * LAYOUT_PAGE_TOKENS;
    uint32_t tokens = seq->row_count - first;
    struct leaf_runs runs = {.dim = walk->dim};

    runs.tokens = tokens < LAYOUT_PAGE_TOKENS ? tokens : LAYOUT_PAGE_TOKENS;
    for (uint32_t run = 0; run * LAYOUT_RUN_TOKENS < runs.tokens; run++) {
        size_t off = walk->head * seq->chunk_head_stride +
                     (size_t)(first + run * LAYOUT_RUN_TOKENS) * walk->dim;
        runs.k[run] = seq->chunk_k + off;
        runs.v[run] = seq->chunk_v + off;
    }
    for (uint32_t row = 0; row < walk->rows; row++) {
        uint32_t position = walk->first_row + row / walk->group;
        uint32_t seen = position < first ? 0 : position - first + 1;
        walk->seen[row] = (uint8_t)(seen < runs.tokens ? seen : runs.tokens);
#ifdef BREAK_CHUNK_FUTURE
        walk->seen[row] = (uint8_t)runs.tokens;
#endif
    }
    queries.seen = walk->seen;
    walk->leaf->widen_runs(&runs, walk->tile);
    walk->leaf->attend(walk->tile, &queries, walk->page);
}

/* walk->page = tail page `index`: the sinks, then the window, then the chunk. */
static void tail_page(struct walk *walk, uint32_t index) {
    const struct kvops_seq *seq = walk->seq;
    struct leaf_queries queries = queries_plain(walk);
    struct layout_at at = {walk->args->layer, walk->head, 0};
    uint32_t window_pages = pages_of(seq->window_tokens);
    uint32_t tokens = seq->sink_tokens;
    const uint32_t *slots = seq->sinks.slot;

    if (index > window_pages) {
        chunk_page(walk, index - 1 - window_pages);
        return;
    }
    if (index > 0) {
        uint32_t page = index - 1;
        tokens = seq->window_tokens - page * LAYOUT_PAGE_TOKENS;
        if (tokens > LAYOUT_PAGE_TOKENS)
            tokens = LAYOUT_PAGE_TOKENS;
        if (seq->hidden_pages >> page & 1)
            tokens = 0;
        slots = seq->window[page].slot;
    }
    if (tokens == 0) {
        clear(walk, walk->page);
        return;
    }
    struct leaf_runs runs = leaf_runs_at(&walk->args->pool, slots, at, tokens);
    walk->leaf->widen_runs(&runs, walk->tile);
    walk->leaf->attend(walk->tile, &queries, walk->page);
}

static float row_sum(const float *row, uint32_t dim) {
    float sum = 0.0f;

    for (uint32_t d = 0; d < dim; d++)
        sum += row[d];
    return sum;
}

/* All blocks of a sequence are of one kind. Sums over planes live in the rotated domain; K does in
 * K8I4 too. */
static int rotated(const struct kvops_seq *seq) {
    return seq->block_count > 0 && seq->blocks[0].tier < LAYOUT_TIER_BF16;
}

static int rotated_keys(const struct kvops_seq *seq) {
    return rotated(seq) || (seq->block_count > 0 && seq->blocks[0].tier == LAYOUT_TIER_K8I4);
}

/* Copies the queries of rows [first_row, first_row + rows) of one KV head. */
static void take_queries(struct walk *walk, uint32_t first_row, uint32_t rows) {
    const struct kvops_attend *args = walk->args;

    walk->first_row = first_row;
    walk->rows = rows * walk->group;
    for (uint32_t row = 0; row < walk->rows; row++) {
        size_t from =
            (size_t)(walk->seq->first_row + first_row + row / walk->group) * args->q_heads +
            walk->head * walk->group + row % walk->group;
        float *to = walk->q_plain + (size_t)row * walk->dim;
        memcpy(to, args->q + from * walk->dim, walk->dim * sizeof *to);
        walk->sums_plain[row] = row_sum(to, walk->dim);
    }
    if (!rotated_keys(walk->seq))
        return;
    memcpy(walk->q_rotated, walk->q_plain, (size_t)walk->rows * walk->dim * sizeof(float));
    walk->leaf->rotate(walk->q_rotated, walk->rows, walk->dim);
    for (uint32_t row = 0; row < walk->rows; row++)
        walk->sums_rotated[row] = row_sum(walk->q_rotated + (size_t)row * walk->dim, walk->dim);
}

static void finish_row(const float *acc, float sum, uint32_t dim, float *out) {
    for (uint32_t d = 0; d < dim; d++)
        out[d] = sum == 0.0f ? 0.0f : acc[d] / sum;
}

static size_t walk_floats(uint32_t rows, uint32_t dim) {
    return 2 * leaf_round((size_t)rows * dim) + 2 * leaf_round(rows) + leaf_round((rows + 3) / 4) +
           5 * leaf_round(leaf_state_floats(rows, dim));
}

static float *take_floats(float **at, size_t count) {
    float *floats = *at;

    *at += leaf_round(count);
    return floats;
}

static void walk_init(struct walk *walk, const struct leaf_table *leaf,
                      const struct kvops_attend *args, uint32_t rows, void *scratch) {
    struct leaf_state *states[] = {&walk->page, &walk->block, &walk->run, &walk->node,
                                   &walk->total};
    uint32_t dim = args->pool.geometry.head_dim;
    float *at;

    assert(layout_geometry_valid(&args->pool.geometry));
    assert(args->q_heads % args->pool.geometry.kv_heads == 0);
    memset(walk, 0, sizeof *walk);
    walk->leaf = leaf;
    walk->args = args;
    walk->dim = dim;
    walk->group = group_of(args);
    walk->tile = scratch;
    at = (float *)((uint8_t *)scratch + sizeof *walk->tile);
    walk->q_plain = take_floats(&at, (size_t)rows * dim);
    walk->q_rotated = take_floats(&at, (size_t)rows * dim);
    walk->sums_plain = take_floats(&at, rows);
    walk->sums_rotated = take_floats(&at, rows);
    walk->seen = (uint8_t *)take_floats(&at, (rows + 3) / 4);
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++)
        *states[i] = leaf_state_at(take_floats(&at, leaf_state_floats(rows, dim)), rows);
}

/* --- prefill: an item walks the whole tree for a tile of rows */

static uint32_t seq_tiles(const struct kvops_attend *args, const struct kvops_seq *seq) {
    return (seq->row_count + tile_rows(args) - 1) / tile_rows(args);
}

uint32_t kvops_prefill_items(const struct kvops_attend *args) {
    uint32_t items = 0;

    for (uint32_t seq = 0; seq < args->seq_count; seq++)
        items += seq_tiles(args, &args->seqs[seq]) * args->pool.geometry.kv_heads;
    return items;
}

size_t kvops_prefill_scratch_bytes(const struct kvops_attend *args) {
    uint32_t rows = tile_rows(args) * group_of(args);

    return sizeof(struct leaf_tile) +
           walk_floats(rows, args->pool.geometry.head_dim) * sizeof(float);
}

static void prefill_tile(struct walk *walk, uint32_t first_row, uint32_t rows) {
    const struct kvops_seq *seq = walk->seq;
    uint32_t runs = runs_of(seq);
    uint32_t tails = tails_of(seq) - chunk_pages_of(seq);

    take_queries(walk, first_row, rows);
    clear(walk, walk->total);
    clear(walk, walk->node);
    for (uint32_t run = 0; run < runs; run++) {
        run_sum(walk, run);
        fold(walk, walk->node, walk->run);
        if (run % NODE_RUNS == NODE_RUNS - 1 || run == runs - 1) {
            fold(walk, walk->total, walk->node);
            clear(walk, walk->node);
        }
    }
    if (rotated(seq))
        walk->leaf->rotate(walk->total.acc, walk->rows, walk->dim);
    if (seq->chunk_k) /* pages beyond the last row of the tile hold nothing that it may see */
        tails += pages_of(first_row + rows);
    for (uint32_t tail = 0; tail < tails; tail++) {
        tail_page(walk, tail);
        fold(walk, walk->total, walk->page);
    }
    for (uint32_t row = 0; row < walk->rows; row++) {
        size_t to = (size_t)(seq->first_row + first_row + row / walk->group) * walk->args->q_heads +
                    walk->head * walk->group + row % walk->group;
        finish_row(walk->total.acc + (size_t)row * walk->dim, walk->total.sum[row], walk->dim,
                   walk->args->out + to * walk->dim);
    }
}

void leaf_prefill(const struct leaf_table *leaf, const struct kvops_attend *args,
                  struct leaf_range items, void *scratch) {
    uint32_t rows_max = tile_rows(args), heads = args->pool.geometry.kv_heads, before = 0;
    struct walk walk;

    walk_init(&walk, leaf, args, rows_max * group_of(args), scratch);
    for (uint32_t seq = 0; seq < args->seq_count && before < items.end; seq++) {
        uint32_t tiles = seq_tiles(args, &args->seqs[seq]);
        walk.seq = &args->seqs[seq];
        for (uint32_t i = 0; i < tiles * heads; i++, before++) {
            if (before < items.first || before >= items.end)
                continue;
            uint32_t first_row = i % tiles * rows_max;
            uint32_t left = walk.seq->row_count - first_row;
            walk.head = i / tiles;
            prefill_tile(&walk, first_row, left < rows_max ? left : rows_max);
        }
    }
}

/* --- decode: an item is a run of blocks or one tail page; combine joins them */

uint32_t kvops_decode_items(const struct kvops_attend *args) {
    uint32_t items = 0;

    for (uint32_t seq = 0; seq < args->seq_count; seq++)
        items += units_of(&args->seqs[seq]) * args->pool.geometry.kv_heads;
    return items;
}

size_t kvops_decode_scratch_bytes(const struct kvops_attend *args) {
    return sizeof(struct leaf_tile) +
           walk_floats(group_of(args), args->pool.geometry.head_dim) * sizeof(float);
}

static size_t partial_floats(const struct kvops_attend *args) {
    return leaf_round(leaf_state_floats(group_of(args), args->pool.geometry.head_dim));
}

uint64_t kvops_partial_bytes(const struct kvops_attend *args) {
    return (uint64_t)kvops_decode_items(args) * partial_floats(args) * sizeof(float);
}

uint64_t kvops_part_bytes(const struct kvops_attend *args) {
    const struct layout_geometry *g = &args->pool.geometry;

    return (uint64_t)g->kv_heads * KVOPS_PARTS * KVOPS_PART_VECTORS * (g->head_dim + 8) *
           sizeof(float);
}

static void decode_unit(struct walk *walk, uint32_t unit, struct leaf_state out) {
    uint32_t runs = runs_of(walk->seq);

    if (unit < runs) {
        walk->run = out;
        run_sum(walk, unit);
    } else {
        struct leaf_state page = walk->page;
        walk->page = out;
        tail_page(walk, unit - runs);
        walk->page = page;
    }
}

void leaf_decode(const struct leaf_table *leaf, const struct kvops_attend *args,
                 struct leaf_range items, void *scratch) {
    uint32_t heads = args->pool.geometry.kv_heads, before = 0;
    struct walk walk;

    walk_init(&walk, leaf, args, group_of(args), scratch);
    walk.direct = 1;
    for (uint32_t seq = 0; seq < args->seq_count && before < items.end; seq++) {
        uint32_t units = units_of(&args->seqs[seq]), taken = UINT32_MAX;
        assert(args->seqs[seq].row_count == 1);
        walk.seq = &args->seqs[seq];
        for (uint32_t i = 0; i < units * heads; i++, before++) {
            if (before < items.first || before >= items.end)
                continue;
            walk.head = i / units;
            if (taken != walk.head)
                take_queries(&walk, 0, 1);
            taken = walk.head;
            decode_unit(&walk, i % units,
                        leaf_state_at(args->partials + before * partial_floats(args), walk.rows));
        }
    }
}

uint32_t kvops_combine_items(const struct kvops_attend *args) {
    return args->seq_count * args->q_heads;
}

size_t kvops_combine_scratch_bytes(const struct kvops_attend *args) {
    return 2 * leaf_round(leaf_state_floats(1, args->pool.geometry.head_dim)) * sizeof(float);
}

/* One query head of unit `unit` of the partials of (sequence, KV head). */
static struct leaf_state partial_row(const struct kvops_attend *args, uint32_t first_item,
                                     uint32_t unit, uint32_t row) {
    uint32_t dim = args->pool.geometry.head_dim;
    struct leaf_state state = leaf_state_at(
        args->partials + (size_t)(first_item + unit) * partial_floats(args), group_of(args));

    state.max += row;
    state.sum += row;
    state.acc += (size_t)row * dim;
    return state;
}

static void combine_row(struct walk *walk, uint32_t first_item, uint32_t row, float *out) {
    const struct kvops_seq *seq = walk->seq;
    uint32_t runs = runs_of(seq), units = units_of(seq);

    clear(walk, walk->total);
    clear(walk, walk->node);
    for (uint32_t run = 0; run < runs; run++) {
#ifdef BREAK_NODE_ORDER
        fold(walk, walk->total, partial_row(walk->args, first_item, run, row));
        continue;
#endif
        fold(walk, walk->node, partial_row(walk->args, first_item, run, row));
        if (run % NODE_RUNS == NODE_RUNS - 1 || run == runs - 1) {
            fold(walk, walk->total, walk->node);
            clear(walk, walk->node);
        }
    }
    if (rotated(seq))
        walk->leaf->rotate(walk->total.acc, 1, walk->dim);
    for (uint32_t unit = runs; unit < units; unit++)
        fold(walk, walk->total, partial_row(walk->args, first_item, unit, row));
    finish_row(walk->total.acc, walk->total.sum[0], walk->dim, out);
}

void leaf_combine(const struct leaf_table *leaf, const struct kvops_attend *args,
                  struct leaf_range items, void *scratch) {
    uint32_t heads = args->q_heads, group = group_of(args), before = 0;
    uint32_t dim = args->pool.geometry.head_dim;
    size_t state = leaf_round(leaf_state_floats(1, dim));
    struct walk walk;

    memset(&walk, 0, sizeof walk);
    walk.leaf = leaf;
    walk.args = args;
    walk.rows = 1;
    walk.dim = dim;
    walk.node = leaf_state_at(scratch, 1);
    walk.total = leaf_state_at((float *)scratch + state, 1);
    for (uint32_t seq = 0; seq < args->seq_count; seq++) {
        walk.seq = &args->seqs[seq];
        uint32_t units = units_of(walk.seq);
        for (uint32_t head = 0; head < heads; head++) {
            uint32_t item = seq * heads + head;
            if (item < items.first || item >= items.end)
                continue;
            float *out = args->out + ((size_t)walk.seq->first_row * heads + head) * dim;
            combine_row(&walk, before + head / group * units, head % group, out);
        }
        before += units * args->pool.geometry.kv_heads;
    }
}
