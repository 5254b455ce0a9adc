/* engine/kv/block.c - sealed blocks: which planes they hold, who reads them, who holds them.
 *
 * Responsible for: slots per stream, reference counts, giving everything back at the end.
 * Not responsible for: deciding which planes go or come.
 */
#include "engine/kv/block.h"

#include <assert.h>

enum { SLOTLESS = 1u << LAYOUT_META };

enum kv_err block_table_init(const struct kv_alloc *alloc, struct slots *slots,
                             struct engine *engine, struct block_table *table_out) {
    *table_out = (struct block_table){.alloc = alloc, .slots = slots, .engine = engine};
    table_out->blocks = kv_alloc_zeroed(alloc, slots->frames, sizeof *table_out->blocks);
    if (!table_out->blocks)
        return KV_ERR_NOMEM;
    for (uint32_t i = slots->frames; i-- > 0;) {
        table_out->blocks[i].next_free = table_out->first_free;
        table_out->first_free = &table_out->blocks[i];
    }
    table_out->free_count = slots->frames;
    return KV_OK;
}

void block_table_release(struct block_table *table) {
    kv_alloc_release(table->alloc, table->blocks);
    *table = (struct block_table){0};
}

static void take_streams(struct block *block, uint32_t streams) {
    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (streams & 1u << stream & ~SLOTLESS)
            slots_take(block->table->slots, layout_stream_slots(stream),
                       block->map.slot + layout_stream_table(stream));
}

struct block *block_make(struct block_table *table, uint64_t index, uint32_t streams) {
    struct block *block = table->first_free;

    assert(block);
    table->first_free = block->next_free;
    table->free_count--;
    *block = (struct block){.table = table, .index = index, .references = 1, .resident = streams};
    block->map.meta_frame = (uint32_t)(block - table->blocks);
    if (!(streams & 1u << LAYOUT_BF16))
        take_streams(block, streams);
    return block;
}

void block_expect(struct block *block, uint32_t streams) {
    assert(!(streams & (block->resident | block->arriving)));
    take_streams(block, streams);
    block->arriving |= streams;
}

static void put_streams(struct block *block, uint32_t streams) {
    uint32_t given[LAYOUT_BLOCK_SLOTS], count = 0;

    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (streams & 1u << stream & ~SLOTLESS)
            for (uint32_t i = 0; i < layout_stream_slots(stream); i++)
                given[count++] = block->map.slot[layout_stream_table(stream) + i];
    slots_put(block->table->slots, given, count);
}

void block_settle(struct block *block, enum kv_err err) {
    if (err == KV_OK) {
        block->resident |= block->arriving;
    } else {
        put_streams(block, block->arriving);
        block->unavailable |= block->arriving;
    }
    block->arriving = 0;
}

void block_free(struct block *block, uint32_t streams) {
    assert((streams & block->resident) == streams);
    put_streams(block, streams);
    block->resident &= ~streams;
}

void block_reader(struct block *block, enum layout_tier tier, int change) {
    assert(change > 0 || block->readers[tier] > 0);
    block->readers[tier] += (uint32_t)change;
}

void block_read_at(struct block *block, enum layout_tier from, enum layout_tier to) {
    block_reader(block, from, -1);
    block_reader(block, to, 1);
}

uint32_t block_read_by_others(const struct block *block, enum layout_tier except) {
    uint32_t streams = 0;

    for (uint32_t tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
        if (block->readers[tier] > (tier == except ? 1u : 0u))
            streams |= layout_tier_streams(tier);
    return streams;
}

void block_set_idle(struct block *block, uint32_t slots) {
    block->table->slots->waiting += slots - block->idle_slots;
    block->idle_slots = slots;
}

static void release_if_unused(struct block *block) {
    struct block_table *table = block->table;

#ifdef BREAK_HELD_BLOCK
    if (block->references)
        return;
#else
    if (block->references || block->holds)
        return;
#endif
    block_set_idle(block, 0);
    put_streams(block, block->resident | block->arriving);
    slots_spoil_frame(table->slots, block->map.meta_frame);
    block->next_free = table->first_free;
    table->first_free = block;
    table->free_count++;
}

void block_hold(struct block *block) {
    block->holds++;
}

void block_let_go(struct block *block) {
    assert(block->holds > 0);
    block->holds--;
    release_if_unused(block);
}

void block_drop(struct block *block) {
    assert(block->references > 0);
    block->references--;
    if (block->references == 0)
        block_set_idle(block, slots_of(block->resident | block->arriving));
    release_if_unused(block);
}
