/* tests/support_shelf.h - a store in memory for blocks and sessions.
 *
 * Responsible for: engine hooks that copy the parts of sealed blocks and answer at once or when
 * told, saving a whole session and loading it again.
 * Not responsible for: files, digests, records (store/, snapshot/, restore/).
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_SHELF_H
#define TESTS_SUPPORT_SHELF_H

#include "engine/engine.h"
#include "engine/transfer.h"

enum { SUPPORT_SHELF_BLOCKS_MAX = 256 };

struct support_shelf_block {
    char name[64];
    uint64_t index;
    uint8_t *bytes[LAYOUT_STREAM_COUNT];
};

struct support_shelf {
    struct support_shelf_block blocks[SUPPORT_SHELF_BLOCKS_MAX];
    uint32_t block_count;
    int hold;  /* 1: blocks stay with the writer until support_shelf_answer */
    int deny;  /* 1: planes that are wanted cannot be read */
    int delay; /* 1: planes that are wanted come with support_shelf_answer */
    struct block *held[SUPPORT_SHELF_BLOCKS_MAX];
    uint32_t held_count;
    struct {
        struct session *session;
        struct block *block;
    } wanted[SUPPORT_SHELF_BLOCKS_MAX];
    uint32_t wanted_count;
    uint64_t planes_read;
};

struct engine_hooks support_shelf_hooks(struct support_shelf *shelf);
/* Says `durable` (or failed) for everything held, and brings the planes that are wanted. */
void support_shelf_answer(struct support_shelf *shelf, int durable);
void support_shelf_release(struct support_shelf *shelf);

/* A transfer_want_page: every page. */
int support_shelf_want(void *context, uint64_t first, uint32_t tokens);

/* Everything of a session but its blocks, which the hooks have. */
struct support_shelf_saved {
    struct transfer_frozen frozen;
    struct image_fingerprint fingerprint;
};
void support_shelf_save(struct session *session, struct support_shelf_saved *saved_out);
/* Loads and publishes; `floor` as tiers_floor. */
struct session *support_shelf_load(struct engine *engine, struct support_shelf *shelf,
                                   const struct support_shelf_saved *saved, int floor);
/* Begin and fill, not published. */
struct transfer_load *support_shelf_begin(struct engine *engine, struct support_shelf *shelf,
                                          const struct support_shelf_saved *saved, int floor);

#endif
