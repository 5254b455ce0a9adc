/* tests/support_shelf.c - a store in memory for blocks and sessions.
 *
 * Responsible for: what support_shelf.h says.
 * Not responsible for: files.
 */
#include "tests/support_shelf.h"

#include "tests/testing.h"

#include <stdlib.h>
#include <string.h>

static struct support_shelf_block *find(struct support_shelf *shelf, const char *name,
                                        uint64_t index) {
    for (uint32_t i = 0; i < shelf->block_count; i++)
        if (shelf->blocks[i].index == index && strcmp(shelf->blocks[i].name, name) == 0)
            return &shelf->blocks[i];
    return NULL;
}

static void copy_out(struct engine *engine, struct support_shelf_block *block,
                     const struct transfer_part *part) {
    free(block->bytes[part->stream]);
    block->bytes[part->stream] = malloc(part->size);
    assert_int_equal(transfer_part_read(engine, part, block->bytes[part->stream]), KV_OK);
}

static void copy_in(struct engine *engine, const uint8_t *from, const struct transfer_part *part) {
    assert_non_null(from);
    assert_int_equal(transfer_part_write(engine, part, from), KV_OK);
}

static void on_sealed(void *context, struct session *session, struct block *block) {
    struct support_shelf *shelf = context;
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    uint32_t count = transfer_block_parts(block, parts);
    struct session_info info;
    struct support_shelf_block *kept;

    session_info(session, &info);
    kept = find(shelf, info.name, transfer_block_index(block));
    if (!kept) {
        assert_true(shelf->block_count < SUPPORT_SHELF_BLOCKS_MAX);
        kept = &shelf->blocks[shelf->block_count++];
        memset(kept, 0, sizeof *kept);
        strncpy(kept->name, info.name, sizeof kept->name - 1);
        kept->index = transfer_block_index(block);
    }
    for (uint32_t i = 0; i < count; i++)
        copy_out(session_engine(session), kept, &parts[i]);
    if (shelf->hold)
        shelf->held[shelf->held_count++] = block;
    else
        transfer_block_durable(block);
}

static void bring(struct support_shelf *shelf, struct session *session, struct block *block) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    uint32_t count = transfer_block_missing(block, parts);
    struct session_info info;
    struct support_shelf_block *kept;

    if (shelf->deny) {
        transfer_planes_arrived(session, block, KV_ERR_CORRUPT);
        return;
    }
    session_info(session, &info);
    kept = find(shelf, info.name, transfer_block_index(block));
    assert_non_null(kept);
    for (uint32_t i = 0; i < count; i++, shelf->planes_read++)
        copy_in(session_engine(session), kept->bytes[parts[i].stream], &parts[i]);
    transfer_planes_arrived(session, block, KV_OK);
}

static void on_wanted(void *context, struct session *session, struct block *block) {
    struct support_shelf *shelf = context;

    if (!shelf->delay) {
        bring(shelf, session, block);
        return;
    }
    shelf->wanted[shelf->wanted_count].session = session;
    shelf->wanted[shelf->wanted_count++].block = block;
}

struct engine_hooks support_shelf_hooks(struct support_shelf *shelf) {
    return (struct engine_hooks){
        .context = shelf, .block_sealed = on_sealed, .planes_wanted = on_wanted};
}

void support_shelf_answer(struct support_shelf *shelf, int durable) {
    for (uint32_t i = 0; i < shelf->held_count; i++) {
        if (durable)
            transfer_block_durable(shelf->held[i]);
        else
            transfer_block_failed(shelf->held[i]);
    }
    shelf->held_count = 0;
    for (uint32_t i = 0; i < shelf->wanted_count; i++)
        bring(shelf, shelf->wanted[i].session, shelf->wanted[i].block);
    shelf->wanted_count = 0;
}

void support_shelf_release(struct support_shelf *shelf) {
    for (uint32_t i = 0; i < shelf->block_count; i++)
        for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
            free(shelf->blocks[i].bytes[stream]);
    memset(shelf, 0, sizeof *shelf);
}

int support_shelf_want(void *context, uint64_t first, uint32_t tokens) {
    (void)context;
    (void)first;
    (void)tokens;
    return 1;
}

void support_shelf_save(struct session *session, struct support_shelf_saved *saved_out) {
    struct kv_diag diag = {""};

    if (transfer_freeze(session, support_shelf_want, NULL, &saved_out->frozen, &diag) != KV_OK)
        fail_msg("transfer_freeze: %s", diag.text);
    assert_int_equal(session_fingerprint(session, 0, &saved_out->fingerprint, &diag), KV_OK);
}

struct transfer_load *support_shelf_begin(struct engine *engine, struct support_shelf *shelf,
                                          const struct support_shelf_saved *saved, int floor) {
    const struct image *image = &saved->frozen.image;
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    struct transfer_load *load = NULL;
    struct kv_diag diag = {""};

    if (transfer_load_begin(engine, image, floor, &load, &diag) != KV_OK)
        fail_msg("transfer_load_begin: %s", diag.text);
    for (uint32_t i = 0; i < image->block_count; i++) {
        struct support_shelf_block *kept = find(shelf, image->name, i);
        uint32_t count = transfer_load_block(load, i, parts);
        assert_non_null(kept);
        for (uint32_t k = 0; k < count; k++) {
            copy_in(engine, kept->bytes[parts[k].stream], &parts[k]);
            shelf->planes_read++;
        }
    }
    for (uint32_t i = 0; i < image->page_count; i++) {
        transfer_load_page(load, i, &parts[0]);
        copy_in(engine, saved->frozen.pages[i].bytes, &parts[0]);
    }
    transfer_load_sinks(load, &parts[0]);
    if (parts[0].size)
        copy_in(engine, saved->frozen.sinks.bytes, &parts[0]);
    return load;
}

struct session *support_shelf_load(struct engine *engine, struct support_shelf *shelf,
                                   const struct support_shelf_saved *saved, int floor) {
    struct transfer_load *load = support_shelf_begin(engine, shelf, saved, floor);
    struct session *session = NULL;
    struct kv_diag diag = {""};

    if (transfer_load_publish(load, &session, &diag) != KV_OK)
        fail_msg("transfer_load_publish: %s", diag.text);
    assert_int_equal(session_move(session, SESSION_IDLE), KV_OK);
    return session;
}
