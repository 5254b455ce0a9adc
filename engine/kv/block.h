/* engine/kv/block.h - sealed blocks: which planes they hold, who reads them, who holds them.
 *
 * Responsible for: the table of blocks (block i owns META frame i), their slots, counts and states.
 * Not responsible for: deciding which planes go or come (policy.h), bytes (kernels/).
 *
 * A block lives while a session refers to it or a writer or reader holds it. Its bytes never
 * change while it lives; planes may go and come back.
 *
 * Threads: the scheduler thread.
 * Units: streams are masks of 1u << enum layout_stream.
 */
#ifndef ENGINE_KV_BLOCK_H
#define ENGINE_KV_BLOCK_H

#include "engine/kv/posts.h"
#include "engine/kv/slots.h"
#include "kernels/kvops.h"

enum block_state {
    BLOCK_VOLATILE, /* nowhere but here */
    BLOCK_WRITING,  /* a writer holds it */
    BLOCK_DURABLE   /* the index commit that names it has returned */
};

struct engine;
struct block_table;
struct block {
    struct block_table *table;
    struct block *next_free;
    uint64_t index;         /* in its lineage */
    struct kvops_block map; /* slots of the streams in resident | arriving; tier is not used */
    uint32_t resident;      /* streams with valid bytes */
    uint32_t arriving;      /* slots reserved, bytes on their way */
    uint32_t lost;          /* of these, such as never come: a late read may write the slots */
    uint32_t unavailable;   /* could not be read back; cleared by a change of policy */
    enum block_state state;
    uint32_t readers[LAYOUT_TIER_COUNT]; /* sessions by the tier they read at */
    uint32_t references, holds;
    uint32_t idle_slots;                  /* of this block, counted in slots.waiting */
    uint8_t ids[4 * LAYOUT_BLOCK_TOKENS]; /* of its tokens, u32 little-endian, if sealed here */
    struct post written, arrived;         /* what a writer and a reader say */
    enum kv_err written_err, arrived_err;
};

struct block_table {
    const struct kv_alloc *alloc;
    struct slots *slots;
    struct engine *engine; /* whom a writer's word reaches */
    struct block *blocks;  /* [slots->frames] */
    struct block *first_free;
    uint32_t free_count;
};

/* NOMEM. */
enum kv_err block_table_init(const struct kv_alloc *alloc, struct slots *slots,
                             struct engine *engine, struct block_table *table_out);
void block_table_release(struct block_table *table);

/* A block with one reference and the slots of `streams` (META and planes, or BF16 without slots,
 * which the caller fills in), volatile. The caller has seen that slots and a frame are free. */
struct block *block_make(struct block_table *table, uint64_t index, uint32_t streams);
/* Slots for planes that will be read back; they are arriving. */
void block_expect(struct block *block, uint32_t streams);
/* The arriving planes are there (KV_OK), or are given up. */
void block_settle(struct block *block, enum kv_err err);
void block_free(struct block *block, uint32_t streams);
void block_read_at(struct block *block, enum layout_tier from, enum layout_tier to);
void block_reader(struct block *block, enum layout_tier tier, int change); /* +1 or -1 */
/* Streams that are read at any tier, one reader at `except` not counted. */
uint32_t block_read_by_others(const struct block *block, enum layout_tier except);
void block_set_idle(struct block *block, uint32_t slots);

void block_hold(struct block *block);
void block_let_go(struct block *block); /* a holder */
/* A session; what a writer still holds waits for its write. */
void block_drop(struct block *block);

#endif
