/* engine/transfer.c - the states of a session that leave the device.
 *
 * Responsible for: parts of blocks, what writers and readers of planes say, freezing a session.
 * Not responsible for: taking sessions back (transfer_load.c).
 */
#include "engine/transfer.h"

#include "engine/engine_inner.h"

#include <assert.h>
#include <string.h>

/* --- parts */

static struct transfer_part part_of(const struct block *block, enum layout_stream stream) {
    struct slots *slots = block->table->slots;
    struct transfer_part part = {.stream = stream, .piece_count = layout_stream_slots(stream)};
    uint64_t raw_bytes = layout_slot_raw_bytes(&slots->pool.geometry);

    for (uint32_t i = 0; i < part.piece_count; i++)
        part.pieces[i] = (struct transfer_piece){
            slots_at(slots, block->map.slot[layout_stream_table(stream) + i]), raw_bytes};
    if (stream == LAYOUT_META) {
        part.piece_count = 1;
        part.pieces[0] =
            (struct transfer_piece){slots_frame(slots, block->map.meta_frame), slots->frame_bytes};
    }
    part.size = layout_stream_bytes(&slots->pool.geometry, stream);
    return part;
}

static uint32_t parts_in(const struct block *block, uint32_t streams,
                         struct transfer_part *parts_out) {
    uint32_t count = 0;

    if (streams & 1u << LAYOUT_META)
        parts_out[count++] = part_of(block, LAYOUT_META);
    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (stream != LAYOUT_META && streams & 1u << stream)
            parts_out[count++] = part_of(block, (enum layout_stream)stream);
    return count;
}

uint64_t transfer_block_index(const struct block *block) {
    return block->index;
}

const uint8_t *transfer_block_ids(const struct block *block) {
    return block->ids;
}

uint32_t transfer_block_parts(const struct block *block, struct transfer_part *parts_out) {
    return parts_in(block, block->resident, parts_out);
}

uint32_t transfer_block_missing(struct block *block, struct transfer_part *parts_out) {
    return block->references ? parts_in(block, block->arriving, parts_out) : 0;
}

const struct block *transfer_session_block(const struct session *session, uint32_t index) {
    assert(index < session->block_count);
    return session->blocks[index];
}

/* --- bytes */

int transfer_mapped(const struct engine *engine) {
#ifdef BREAK_REACH
    return engine != NULL;
#else
    return device_mapped(engine->device, engine->slots.pool.slots) != NULL;
#endif
}

void *transfer_host_get(struct engine *engine, uint64_t bytes) {
    return device_host_get(engine->device, bytes);
}

void *transfer_host_keep(struct engine *engine, uint64_t bytes) {
    return device_host_keep(engine->device, bytes);
}

void transfer_host_put(struct engine *engine, void *memory) {
    device_host_put(engine->device, memory);
}

void *transfer_landing_take(struct engine *engine, uint64_t bytes) {
    struct engine_inner_landing *landing = &engine->landing;
    void *at = NULL;

    pthread_mutex_lock(&landing->lock);
    if (!landing->at) {
        landing->at = device_host_get(engine->device, bytes);
        landing->bytes = landing->at ? bytes : 0;
    }
    if (!landing->taken && landing->bytes >= bytes)
        at = landing->at;
    landing->taken |= at != NULL;
    pthread_mutex_unlock(&landing->lock);
    return at;
}

void transfer_landing_give(struct engine *engine) {
    pthread_mutex_lock(&engine->landing.lock);
    engine->landing.taken = 0;
    pthread_mutex_unlock(&engine->landing.lock);
}

enum kv_err transfer_parts_read(struct engine *engine, const struct transfer_part *parts,
                                uint32_t count, void *bytes_out) {
    struct device_copy copies[TRANSFER_PARTS_MAX * sizeof parts->pieces / sizeof parts->pieces[0]];
    uint32_t copy_count = 0;
    uint8_t *to = bytes_out;

    assert(count <= TRANSFER_PARTS_MAX);
    for (uint32_t part = 0; part < count; part++)
        for (uint32_t i = 0; i < parts[part].piece_count; i++) {
            const struct transfer_piece *piece = &parts[part].pieces[i];
            if (parts[part].staged)
                memcpy(to, piece->bytes, piece->size);
            else
                copies[copy_count++] = (struct device_copy){to, piece->bytes, piece->size};
            to += piece->size;
        }
    return copy_count ? device_copy_out(engine->device, DEVICE_OUT, copies, copy_count) : KV_OK;
}

enum kv_err transfer_part_read(struct engine *engine, const struct transfer_part *part,
                               void *bytes_out) {
    return transfer_parts_read(engine, part, 1, bytes_out);
}

static enum kv_err write_parts(struct engine *engine, const struct transfer_part *parts,
                               const void *const *bytes, uint32_t count, enum device_lane lane) {
    struct device_copy copies[TRANSFER_PARTS_MAX * sizeof parts->pieces / sizeof parts->pieces[0]];
    uint32_t copy_count = 0;

    assert(count <= TRANSFER_PARTS_MAX);
    for (uint32_t part = 0; part < count; part++) {
        const uint8_t *from = bytes[part];
        for (uint32_t i = 0; i < parts[part].piece_count; i++) {
            const struct transfer_piece *piece = &parts[part].pieces[i];
            if (parts[part].staged)
                memcpy(piece->bytes, from, piece->size);
            else
                copies[copy_count++] = (struct device_copy){piece->bytes, from, piece->size};
            from += piece->size;
        }
    }
    return copy_count ? device_copy_in(engine->device, lane, copies, copy_count) : KV_OK;
}

enum kv_err transfer_parts_write(struct engine *engine, const struct transfer_part *parts,
                                 const void *const *bytes, uint32_t count) {
    pthread_mutex_lock(&engine->lane_in);
    enum kv_err err = write_parts(engine, parts, bytes, count, DEVICE_IN);
#ifndef BREAK_LANE_TURN
    /* What fails late is told to whoever waits next: that is this thread. */
    enum kv_err came = device_wait(engine->device, DEVICE_IN);
    err = err == KV_OK ? came : err;
#endif
    pthread_mutex_unlock(&engine->lane_in);
    return err;
}

void transfer_send_begin(struct engine *engine) {
    pthread_mutex_lock(&engine->lane_lent);
}

enum kv_err transfer_parts_send(struct engine *engine, const struct transfer_part *parts,
                                const void *const *bytes, uint32_t count) {
    return write_parts(engine, parts, bytes, count, DEVICE_LENT);
}

uint64_t transfer_sent(struct engine *engine) {
    return device_sent(engine->device, DEVICE_LENT);
}

enum kv_err transfer_send_wait(struct engine *engine, uint64_t sent) {
#ifdef BREAK_LAYERS_WAIT
    return KV_OK;
#endif
    return device_wait_sent(engine->device, DEVICE_LENT, sent);
}

enum kv_err transfer_send_end(struct engine *engine) {
    enum kv_err err = KV_OK;
#ifndef BREAK_LAYERS_WAIT
    err = device_wait(engine->device, DEVICE_LENT);
#endif
    pthread_mutex_unlock(&engine->lane_lent);
    return err;
}

enum kv_err transfer_part_write(struct engine *engine, const struct transfer_part *part,
                                const void *bytes) {
    return transfer_parts_write(engine, part, &bytes, 1);
}

/* As many at a time as go to the device together: 70 KiB of the stack. */
enum kv_err transfer_digests(struct engine *engine, const struct transfer_part *parts,
                             uint32_t count, struct kv_digest *digests_out) {
    enum { EACH = TRANSFER_DIGESTS_MAX };
    struct device_extent extents[EACH];
    struct kv_digest digests[EACH];
    uint32_t of[EACH], filled = 0;
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < count && err == KV_OK; i++) {
        const struct transfer_part *part = &parts[i];
        if (part->staged) {
            assert(part->piece_count == 1);
            digests_out[i] = kv_digest_of(part->pieces[0].bytes, part->pieces[0].size);
        } else {
            struct device_extent *extent = &extents[filled];
            extent->part_count = part->piece_count;
            extent->part_bytes = part->piece_count ? part->pieces[0].size : 0;
            for (uint32_t k = 0; k < part->piece_count; k++)
                extent->part[k] = part->pieces[k].bytes;
            of[filled++] = i;
        }
        if (filled == EACH || (filled && i + 1 == count)) {
            pthread_mutex_lock(&engine->lane_check);
            err = device_digest(engine->device, DEVICE_CHECK, extents, filled, digests);
            pthread_mutex_unlock(&engine->lane_check);
            for (uint32_t k = 0; k < filled && err == KV_OK; k++)
                digests_out[of[k]] = digests[k];
            filled = 0;
        }
    }
    return err;
}

/* --- what writers and readers say */

static void review(struct block *block) {
    struct engine *engine = block->table->engine;

    for (uint32_t i = 0; i < engine->session_count; i++) {
        struct session *session = engine->sessions[i];
        if (block->index >= session->block_count || session->blocks[block->index] != block)
            continue;
        engine_inner_review_block(session, (uint32_t)block->index);
        engine_inner_partial_over(session);
    }
}

static void apply_written(void *context) {
    struct block *block = context;

    assert(block->state == BLOCK_WRITING);
    block->state = block->written_err == KV_OK ? BLOCK_DURABLE : BLOCK_VOLATILE;
    review(block);
    block_let_go(block);
}

static void say_written(struct block *block, enum kv_err err) {
    block->written_err = err;
    block->written.call = apply_written;
    block->written.context = block;
    posts_push(&block->table->engine->posts, &block->written);
}

void transfer_block_durable(struct block *block) {
    say_written(block, KV_OK);
}

void transfer_block_failed(struct block *block) {
    say_written(block, KV_ERR_IO);
}

static void apply_arrived(void *context) {
    struct block *block = context;

    block_settle(block, block->arrived_err);
    review(block);
    block_let_go(block);
}

void transfer_planes_arrived(struct session *session, struct block *block, enum kv_err err) {
    /* The session may be gone; the block is held, and knows who refers to it. */
    (void)session;
    block->arrived_err = err;
    block->arrived.call = apply_arrived;
    block->arrived.context = block;
    posts_push(&block->table->engine->posts, &block->arrived);
}

void transfer_planes_lost(struct block *block) {
    block->lost = block->arriving;
    review(block);
}

void transfer_blocks_volatile(struct session *session,
                              void (*take)(void *context, struct block *block), void *context) {
    for (uint32_t i = 0; i < session->block_count; i++) {
        struct block *block = session->blocks[i];
        if (block->state != BLOCK_VOLATILE)
            continue;
        block->state = BLOCK_WRITING;
        block_hold(block);
        take(context, block);
    }
}

/* --- what stays with the session */

struct transfer_durable *transfer_durable(struct session *session) {
    return &session->durable;
}

struct image_needle *transfer_needles(struct session *session, uint32_t *count_out) {
    *count_out = session->needle_count;
    return session->needles;
}

static char *copy_text(const struct kv_alloc *alloc, const char *text, int *failed) {
    char *copy = kv_alloc_copy(alloc, text ? text : "", text ? strlen(text) : 0);

    *failed |= copy == NULL;
    return copy;
}

static int copy_needle(const struct kv_alloc *alloc, const struct image_needle *from,
                       struct image_needle *to) {
    int failed = 0;

    *to = *from;
    to->key = copy_text(alloc, from->key, &failed);
    to->ask = copy_text(alloc, from->ask, &failed);
    to->answer_prefix = copy_text(alloc, from->answer_prefix, &failed);
    to->expect = copy_text(alloc, from->expect, &failed);
    if (!failed)
        return 1;
    kv_alloc_release(alloc, to->key);
    kv_alloc_release(alloc, to->ask);
    kv_alloc_release(alloc, to->answer_prefix);
    kv_alloc_release(alloc, to->expect);
    return 0;
}

enum kv_err transfer_add_needle(struct session *session, const struct image_needle *needle,
                                struct kv_diag *diag) {
    const struct kv_alloc *alloc = session->engine->settings.alloc;
    void *needles = session->needles;
    int grown;

    if (session->asked)
        return kv_diag_set(diag, KV_ERR_BUSY, "session '%s' is being asked: try again later",
                           session->name);
    if (session->needle_count >= IMAGE_NEEDLES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "session '%s' has %d needles, which is the maximum",
                           session->name, IMAGE_NEEDLES_MAX);
    for (uint32_t i = 0; i < session->needle_count; i++)
        if (strcmp(session->needles[i].key, needle->key) == 0)
            return kv_diag_set(diag, KV_ERR_EXISTS, "session '%s' has a needle '%s' already",
                               session->name, needle->key);
    grown = kv_alloc_grow(alloc, &needles, &session->needles_capacity, session->needle_count + 1u,
                          sizeof *needle);
    session->needles = needles;
    if (!grown || !copy_needle(alloc, needle, &session->needles[session->needle_count]))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a needle of session '%s'",
                           session->name);
    session->needle_count++;
    return KV_OK;
}

enum kv_err transfer_drop_needle(struct session *session, uint32_t index, struct kv_diag *diag) {
    struct image_needle *needle = &session->needles[index];

    assert(index < session->needle_count);
#ifndef BREAK_NEEDLE_ASKED
    if (session->asked)
        return kv_diag_set(diag, KV_ERR_BUSY, "session '%s' is being asked: try again later",
                           session->name);
#endif
    engine_inner_needle_release(session->engine, needle);
    session->needle_count--;
    memmove(needle, needle + 1, (session->needle_count - index) * sizeof *needle);
    return KV_OK;
}

const struct image_probe *transfer_probes(const struct session *session, uint32_t *count_out) {
    *count_out = session->probe_count;
    return session->probes;
}

void transfer_set_probes(struct session *session, const struct image_probe *probes,
                         uint32_t count) {
    assert(count <= IMAGE_PROBES_MAX);
    for (uint32_t i = 0; i < count; i++)
        session->probes[i] = probes[i];
    session->probe_count = count;
}

/* --- freeze */

static void *copy_array(const struct kv_alloc *alloc, const void *from, size_t count,
                        size_t bytes) {
    return kv_alloc_copy(alloc, count ? from : "", count * bytes);
}

static enum kv_err freeze_image(struct session *session, struct image *image) {
    struct engine *engine = session->engine;
    const struct kv_alloc *alloc = engine->settings.alloc;

    image->model = engine->model.identity;
    memcpy(image->name, session->name, sizeof image->name);
    image->sampler = session->sampler;
    image->n = session->n;
    image->n_kv = session->n_kv;
    image->block_count = session->block_count;
    image->created_ns = kv_clock_wall_ns(engine->settings.clock);
    image->policies =
        copy_array(alloc, session->policies, session->policy_count, sizeof *session->policies);
    image->policy_count = session->policy_count;
    image->ids = copy_array(alloc, session->ids, session->n, sizeof *session->ids);
    image->roles = copy_array(alloc, session->roles, session->role_count, sizeof *session->roles);
    image->role_count = session->role_count;
    /* A session that went back has lost the text of some. */
    for (uint32_t i = 0; i < session->probe_count; i++)
        if (session->probes[i].end <= session->n_kv &&
            session->probes[i].asked_n_kv <= session->n_kv)
            image->probes[image->probe_count++] = session->probes[i];
    image->needles = kv_alloc_zeroed(alloc, session->needle_count + 1u, sizeof *image->needles);
    if (!image->policies || !image->ids || !image->roles || !image->needles)
        return KV_ERR_NOMEM;
    for (; image->needle_count < session->needle_count; image->needle_count++)
        if (!copy_needle(alloc, &session->needles[image->needle_count],
                         &image->needles[image->needle_count]))
            return KV_ERR_NOMEM;
    return KV_OK;
}

/* The page's tokens one after the other; by way of whole slots where the processor cannot look. The
 * lane is not that of steps: others may step meanwhile. */
static enum kv_err pack_page(struct engine *engine, const struct kvops_page *page, uint32_t tokens,
                             uint8_t *dense) {
    const struct slots *slots = &engine->slots;
    const uint8_t *addresses[LAYOUT_PAGE_SLOTS];
    struct device_copy copies[LAYOUT_PAGE_SLOTS];
    uint8_t *whole = NULL;
    enum kv_err err = KV_OK;

    if (!transfer_mapped(engine)) {
        whole = device_host_get(engine->device, LAYOUT_PAGE_SLOTS * slots->slot_bytes);
        if (!whole)
            return KV_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++) {
        uint8_t *at = slots_at(slots, page->slot[i]);
        addresses[i] = whole ? whole + i * slots->slot_bytes : device_mapped(engine->device, at);
        copies[i] = (struct device_copy){(void *)addresses[i], at, slots->slot_bytes};
    }
    if (whole)
        err = device_copy_out(engine->device, DEVICE_OUT, copies, LAYOUT_PAGE_SLOTS);
    if (err == KV_OK)
        layout_pack(&slots->pool.geometry, addresses, tokens, dense);
    device_host_put(engine->device, whole);
    return err;
}

static enum kv_err freeze_page(struct session *session, const struct kvops_page *page, int wanted,
                               struct transfer_frozen_page *frozen) {
    struct engine *engine = session->engine;

    frozen->size = layout_dense_bytes(&engine->model.geometry, frozen->tokens);
    if (!wanted)
        return KV_OK;
    frozen->bytes = kv_alloc_aligned(engine->settings.alloc, frozen->size, LAYOUT_SLOT_UNIT);
    if (!frozen->bytes)
        return KV_ERR_NOMEM;
    return pack_page(engine, page, frozen->tokens, frozen->bytes);
}

static enum kv_err freeze_pages(struct session *session, transfer_want_page want, void *context,
                                struct transfer_frozen *frozen) {
    uint32_t left = layout_window_tokens(session->n_kv);
    uint64_t first = LAYOUT_SINK_TOKENS + (uint64_t)session->block_count * LAYOUT_BLOCK_TOKENS;
    enum kv_err err = KV_OK;

    frozen->sinks.tokens = layout_sink_tokens(session->n_kv);
    frozen->image.sinks.tokens = frozen->sinks.tokens;
    if (frozen->sinks.tokens)
        err = freeze_page(session, &session->window.sinks, want(context, 0, frozen->sinks.tokens),
                          &frozen->sinks);
    while (err == KV_OK && left) {
        uint32_t index = frozen->page_count++;
        struct transfer_frozen_page *page = &frozen->pages[index];
        page->first = first;
        page->tokens = left < LAYOUT_PAGE_TOKENS ? left : LAYOUT_PAGE_TOKENS;
        frozen->image.pages[index].first = page->first;
        frozen->image.pages[index].tokens = page->tokens;
        err = freeze_page(session, &session->window.pages[index],
                          want(context, page->first, page->tokens), page);
        first += page->tokens;
        left -= page->tokens;
    }
    frozen->image.page_count = frozen->page_count;
    return err;
}

/* One that is being asked stays as it is while others step. */
static enum kv_err freeze_pages_away(struct session *session, transfer_want_page want,
                                     void *context, struct transfer_frozen *frozen) {
    int away = session->asked && !engine_inner_has_work(session);
    enum kv_err err = device_wait(session->engine->device, DEVICE_STEP);

#ifdef BREAK_FREEZE_AWAY
    away = 0;
#endif
    if (err != KV_OK)
        return err;
    if (away)
        engine_away(session->engine);
    err = freeze_pages(session, want, context, frozen);
    if (away)
        engine_back(session->engine);
    return err;
}

static enum kv_err not_frozen(struct session *session, enum kv_err err, struct kv_diag *diag) {
    if (err == KV_ERR_DEVICE)
        return engine_inner_device(session->engine, diag);
    return kv_diag_set(diag, err, "no memory to freeze session '%s'", session->name);
}

enum kv_err transfer_freeze_pages(struct session *session, transfer_want_page want, void *context,
                                  struct transfer_frozen *frozen_out, struct kv_diag *diag) {
    struct transfer_frozen frozen = {.page_count = 0};

    if (session->n - session->n_kv > 1 || session->fed_end > session->n_kv)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "session '%s' has fed tokens that are not prefilled yet: step first",
                           session->name);
    image_init(&frozen.image);
    enum kv_err err = freeze_pages_away(session, want, context, &frozen);
    if (err == KV_OK) {
        *frozen_out = frozen;
        return KV_OK;
    }
    transfer_frozen_release(session->engine, &frozen);
    return not_frozen(session, err, diag);
}

enum kv_err transfer_freeze_image(struct session *session, struct transfer_frozen *frozen,
                                  struct kv_diag *diag) {
    enum kv_err err = freeze_image(session, &frozen->image);

    return err == KV_OK ? KV_OK : not_frozen(session, err, diag);
}

enum kv_err transfer_freeze(struct session *session, transfer_want_page want, void *context,
                            struct transfer_frozen *frozen_out, struct kv_diag *diag) {
    struct transfer_frozen frozen;
    enum kv_err err = transfer_freeze_pages(session, want, context, &frozen, diag);

    if (err != KV_OK)
        return err;
    err = transfer_freeze_image(session, &frozen, diag);
    if (err == KV_OK)
        *frozen_out = frozen;
    else
        transfer_frozen_release(session->engine, &frozen);
    return err;
}

void transfer_frozen_release(struct engine *engine, struct transfer_frozen *frozen) {
    const struct kv_alloc *alloc = engine->settings.alloc;

    kv_alloc_release(alloc, frozen->sinks.bytes);
    for (uint32_t i = 0; i < frozen->page_count; i++)
        kv_alloc_release(alloc, frozen->pages[i].bytes);
    image_release(&frozen->image, alloc);
    *frozen = (struct transfer_frozen){.page_count = 0};
}
