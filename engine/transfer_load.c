/* engine/transfer_load.c - taking a session back in the shadow.
 *
 * Responsible for: checking an image against this engine, reserving every slot, where the bytes go,
 * publishing in one swap.
 * Not responsible for: reading or comparing digests (restore/).
 */
#include "engine/engine_inner.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

struct transfer_load {
    struct engine *engine;
    struct session *session; /* complete, in no list */
    uint8_t *sinks_staging;  /* dense bytes of what is shorter than a page, else NULL */
    uint8_t *page_staging[LAYOUT_WINDOW_PAGES_MAX];
    uint32_t page_count;
};

static enum kv_err corrupt(const struct image *image, const char *what, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_CORRUPT, "the image of session '%.128s' is inconsistent: %s",
                       image->name, what);
}

static enum kv_err check_pages(const struct image *image, struct kv_diag *diag) {
    uint64_t first = LAYOUT_SINK_TOKENS + (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS;
    uint32_t left = layout_window_tokens(image->n_kv);

    if (image->sinks.tokens != layout_sink_tokens(image->n_kv) || image->sinks.first != 0)
        return corrupt(image, "sinks do not match the token count", diag);
    if (image->page_count != layout_window_pages(image->n_kv))
        return corrupt(image, "window pages do not match the token count", diag);
    for (uint32_t i = 0; i < image->page_count; i++) {
        uint32_t tokens = left < LAYOUT_PAGE_TOKENS ? left : LAYOUT_PAGE_TOKENS;
        if (image->pages[i].first != first || image->pages[i].tokens != tokens)
            return corrupt(image, "a window page is not where it must be", diag);
        first += tokens;
        left -= tokens;
    }
    return KV_OK;
}

static enum kv_err check_image(struct engine *engine, const struct image *image,
                               struct kv_diag *diag) {
    enum kv_err err = image_compatible(&image->model, &engine->model.identity, diag);

    if (err != KV_OK)
        return err;
    if (image->n_kv > image->n || image->n - image->n_kv > 1 ||
        image->n > engine->model.context_tokens)
        return corrupt(image, "token counts", diag);
    if (image->block_count != layout_sealed_blocks(image->n_kv))
        return corrupt(image, "blocks do not match the token count", diag);
    if (image->policy_count < 1 || image->policy_count > IMAGE_POLICIES_MAX)
        return corrupt(image, "policies", diag);
    for (uint32_t i = 0; i < image->policy_count; i++)
        if (engine_inner_check_policy(&image->policies[i].policy, NULL) != KV_OK)
            return corrupt(image, "a policy", diag);
    for (uint64_t i = 0; i < image->n; i++)
        if (image->ids[i] >= engine->model.vocab_count)
            return corrupt(image, "a token id is outside the vocabulary", diag);
    for (uint32_t i = 0; i < image->role_count; i++)
        if (image->roles[i].first >= image->roles[i].end || image->roles[i].end > image->n)
            return corrupt(image, "a role", diag);
    err = check_pages(image, diag);
    if (err == KV_OK)
        err = session_check_name(image->name, diag);
    return err == KV_OK ? engine_inner_can_add(engine, image->name, diag) : err;
}

/* Everything but slots: text, settings, what the durable side knows. */
static enum kv_err fill_session(struct session *session, const struct image *image,
                                struct kv_diag *diag) {
    const struct kv_alloc *alloc = session->engine->settings.alloc;
    void *roles = NULL;
    enum kv_err err;

    KV_TRY(engine_inner_reserve(session, image->n, diag));
    roles = session->roles;
    if (!kv_alloc_grow(alloc, &roles, &session->roles_capacity, image->role_count + 2u,
                       sizeof *session->roles))
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for session '%s'", session->name);
    session->roles = roles;
    for (uint64_t i = 0; i < image->n; i++)
        session->ids[i] = image->ids[i];
    for (uint32_t i = 0; i < image->role_count; i++)
        session->roles[i] = image->roles[i];
    for (uint32_t i = 0; i < image->policy_count; i++)
        session->policies[i] = image->policies[i];
    session->role_count = image->role_count;
    session->policy_count = image->policy_count;
    session->sampler = image->sampler;
    session->n = image->n;
    session->n_kv = image->n_kv;
    session->kept_end = image->n;
    session->durable = (struct transfer_durable){.lineage = image->lineage,
                                                 .block_count = image->block_count,
                                                 .block_chain = image->block_chain,
                                                 .sinks = image->sinks,
                                                 .page_count = image->page_count};
    memcpy(session->durable.pages, image->pages, sizeof image->pages);
    transfer_set_probes(session, image->probes, image->probe_count);
    for (uint32_t i = 0; i < image->needle_count; i++)
        KV_TRY(transfer_add_needle(session, &image->needles[i], diag));
done:
    return err;
}

static enum layout_tier load_tier(const struct image *image, uint32_t block,
                                  enum transfer_tiers tiers) {
    const struct image_policy *policy = &image->policies[image->policy_count - 1].policy;

    if (tiers != TRANSFER_EXACT)
        return image_floor(policy);
    return image_tier_without(policy, image_tier(policy, block, image->n_kv),
                              image->absent ? image->absent[block] : 0);
}

/* Mixed history begins where a block is first read at a coarser tier than its policy gives: from
 * then on the tier history repeats its policy. */
static void mark_mixed(struct session *session, const struct image *image) {
    int coarser = 0;

    for (uint32_t i = 0; i < image->block_count; i++)
        coarser |= load_tier(image, i, TRANSFER_EXACT) !=
                   image_tier(engine_inner_policy(session), i, image->n_kv);
    session->watched = coarser;
#ifdef BREAK_MIXED
    return;
#endif
    if (coarser)
        engine_inner_mark_mixed(session);
}

static void reserve_blocks(struct session *session, const struct image *image,
                           enum transfer_tiers tiers) {
    struct engine *engine = session->engine;

    for (uint32_t i = 0; i < image->block_count; i++) {
        enum layout_tier tier = load_tier(image, i, tiers);
        uint32_t streams = layout_tier_streams(tier);
        uint32_t later = layout_tier_streams(load_tier(image, i, TRANSFER_EXACT)) & ~streams;
        struct block *block = block_make(&engine->blocks, i, streams);
        if (streams & 1u << LAYOUT_BF16)
            slots_take(&engine->slots, LAYOUT_BLOCK_SLOTS, block->map.slot);
        block->state = BLOCK_DURABLE;
        block->unavailable = image->absent ? image->absent[i] : 0;
        if (later && tiers == TRANSFER_EAGER) {
            block_expect(block, later);
            session->expecting = 1;
        }
        session->held |= later && tiers == TRANSFER_FLOOR;
        engine_inner_push_block(session, block, tier);
    }
}

/* Under pressure one at its floor has taken every step of the ladder: its history says so, and it
 * goes up again when slots are free. */
static void take_every_step(struct session *session) {
    struct image_policy policy = *engine_inner_policy(session);

    if (!session->held || !policy.pressure)
        return;
    for (uint32_t i = 0; i < image_steps(&policy); i++)
        policy.ends[i] = session->block_count;
    engine_inner_record_policy(session, &policy);
    session->held = 0;
}

static enum kv_err take_staging(struct transfer_load *load, const struct image *image,
                                struct kv_diag *diag) {
    const struct kv_alloc *alloc = load->engine->settings.alloc;
    const struct layout_geometry *geometry = &load->engine->model.geometry;
    int failed = 0;

    load->page_count = image->page_count;
    for (uint32_t i = 0; i <= image->page_count; i++) {
        uint32_t tokens = i < image->page_count ? image->pages[i].tokens : image->sinks.tokens;
        uint8_t **staging = i < image->page_count ? &load->page_staging[i] : &load->sinks_staging;
        if (tokens == 0 || tokens == LAYOUT_PAGE_TOKENS)
            continue;
        *staging = kv_alloc_aligned(alloc, layout_dense_bytes(geometry, tokens), LAYOUT_SLOT_UNIT);
        failed |= *staging == NULL;
    }
    return failed ? kv_diag_set(diag, KV_ERR_NOMEM, "no memory to load session '%s'", image->name)
                  : KV_OK;
}

enum kv_err transfer_load_begin(struct engine *engine, const struct image *image,
                                enum transfer_tiers tiers, struct transfer_load **load_out,
                                struct kv_diag *diag) {
    enum transfer_tiers reserved = tiers == TRANSFER_EAGER ? TRANSFER_EXACT : tiers;
    const struct kv_alloc *alloc = engine->settings.alloc;
    struct engine_inner_need need = {NULL, WINDOW_SLOTS, 0, 0};
    struct transfer_load *load = NULL;
    enum kv_err err;

    KV_TRY(check_image(engine, image, diag));
    load = kv_alloc_zeroed(alloc, 1, sizeof *load);
    if (!load)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to load session '%s'", image->name);
    load->engine = engine;
    KV_TRY(engine_inner_session_make(engine, image->name, &load->session, diag));
    load->session->state = SESSION_WAKING;
    KV_TRY(fill_session(load->session, image, diag));
    KV_TRY(take_staging(load, image, diag));
    need.frames = image->block_count;
    for (uint32_t i = 0; i < image->block_count; i++)
        need.slots += layout_tier_slots(load_tier(image, i, reserved));
    KV_TRY(engine_inner_room(engine, &need, diag));
    /* What was enqueued for the slots' last owners must not come after the bytes that are read. */
    if (device_wait(engine->device, DEVICE_STEP) != KV_OK)
        KV_TRY(engine_inner_device(engine, diag));
    window_take(&load->session->window, &engine->slots);
    load->session->has_window = 1;
    reserve_blocks(load->session, image, tiers);
    mark_mixed(load->session, image);
    take_every_step(load->session);
    load->session->watched |= load->session->held || load->session->expecting;
    *load_out = load;
    load = NULL;
done:
    transfer_load_abandon(load);
    return err;
}

struct session *transfer_load_session(struct transfer_load *load) {
    return load->session;
}

uint32_t transfer_load_block(struct transfer_load *load, uint32_t index,
                             struct transfer_part *parts_out) {
    assert(index < load->session->block_count);
    return transfer_block_parts(load->session->blocks[index], parts_out);
}

enum kv_err transfer_load_ids(struct transfer_load *load, uint64_t first, const uint8_t *ids,
                              uint32_t count, struct kv_diag *diag) {
    struct session *session = load->session;

    assert(first <= session->n && count <= session->n - first);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id = kv_get_u32(ids + 4 * (size_t)i);
#ifndef BREAK_IDS_VOCABULARY
        if (id >= load->engine->model.vocab_count)
            return kv_diag_set(diag, KV_ERR_CORRUPT, "token %llu is outside the vocabulary of %u",
                               (unsigned long long)(first + i), load->engine->model.vocab_count);
#endif
        session->ids[first + i] = id;
    }
    return KV_OK;
}

static void page_part(struct transfer_load *load, const struct kvops_page *page, uint8_t *staging,
                      uint32_t tokens, struct transfer_part *part_out) {
    const struct slots *slots = &load->engine->slots;
    uint64_t raw_bytes = layout_slot_raw_bytes(&slots->pool.geometry);

    part_out->staged = staging != NULL;
    part_out->size = layout_dense_bytes(&slots->pool.geometry, tokens);
    part_out->piece_count = staging ? 1 : tokens ? LAYOUT_PAGE_SLOTS : 0;
    for (uint32_t i = 0; i < part_out->piece_count; i++)
        part_out->pieces[i] = (struct transfer_piece){slots_at(slots, page->slot[i]), raw_bytes};
    if (staging)
        part_out->pieces[0] = (struct transfer_piece){staging, part_out->size};
}

void transfer_load_page(struct transfer_load *load, uint32_t index,
                        struct transfer_part *part_out) {
    uint32_t tokens = load->session->durable.pages[index].tokens;

    assert(index < load->page_count);
    *part_out = (struct transfer_part){.stream = LAYOUT_PAGE};
    page_part(load, &load->session->window.pages[index], load->page_staging[index], tokens,
              part_out);
}

void transfer_load_sinks(struct transfer_load *load, struct transfer_part *part_out) {
    *part_out = (struct transfer_part){.stream = LAYOUT_SINKS};
    page_part(load, &load->session->window.sinks, load->sinks_staging,
              load->session->durable.sinks.tokens, part_out);
}

/* A few at a time, so that none waits for what is lent meanwhile. */
static enum kv_err copy_in_small(struct device *device, const struct device_copy *copies,
                                 uint32_t count) {
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < count; i++)
        for (uint64_t off = 0; off < copies[i].bytes && err == KV_OK; off += DEVICE_SMALL_BYTES) {
            uint64_t left = copies[i].bytes - off;
            const struct device_copy part = {(uint8_t *)copies[i].to + off,
                                             (const uint8_t *)copies[i].from + off,
                                             left < DEVICE_SMALL_BYTES ? left : DEVICE_SMALL_BYTES};
            err = device_copy_in(device, DEVICE_IN, &part, 1);
        }
    return err;
}

/* Staged tokens into their page. Where the processor cannot look the slots make a round trip: what
 * stands behind the tokens must stay as it was. */
static enum kv_err scatter(struct transfer_load *load, const struct kvops_page *page,
                           const uint8_t *staging, uint32_t tokens) {
    const struct slots *slots = &load->engine->slots;
    struct device *device = load->engine->device;
    struct device_copy out[LAYOUT_PAGE_SLOTS], in[LAYOUT_PAGE_SLOTS];
    uint8_t *addresses[LAYOUT_PAGE_SLOTS], *whole = NULL;
    enum kv_err err = KV_OK;

    if (!staging)
        return KV_OK;
#ifdef BREAK_PARTIAL_PAGE
    tokens = tokens > 1 ? tokens - 1 : tokens;
#endif
    if (!transfer_mapped(load->engine)) {
        whole = device_host_get(device, LAYOUT_PAGE_SLOTS * slots->slot_bytes);
        if (!whole)
            return KV_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++) {
        uint8_t *at = slots_at(slots, page->slot[i]);
        addresses[i] = whole ? whole + i * slots->slot_bytes : device_mapped(device, at);
        out[i] = (struct device_copy){addresses[i], at, slots->slot_bytes};
        in[i] = (struct device_copy){at, addresses[i], slots->slot_bytes};
    }
    if (whole)
        err = device_copy_out(device, DEVICE_IN, out, LAYOUT_PAGE_SLOTS);
    if (err == KV_OK)
        layout_unpack(&slots->pool.geometry, staging, tokens, addresses);
    if (err == KV_OK && whole)
        err = copy_in_small(device, in, LAYOUT_PAGE_SLOTS);
    device_host_put(device, whole);
    return err;
}

static void release_load(struct transfer_load *load) {
    const struct kv_alloc *alloc = load->engine->settings.alloc;

    kv_alloc_release(alloc, load->sinks_staging);
    for (uint32_t i = 0; i < LAYOUT_WINDOW_PAGES_MAX; i++)
        kv_alloc_release(alloc, load->page_staging[i]);
    kv_alloc_release(alloc, load);
}

/* Nobody knows the session yet, so others may step; readers take turns in the lane. */
static enum kv_err scatter_all(struct transfer_load *load) {
    struct session *session = load->session;
    enum kv_err err;

    engine_away(load->engine);
    pthread_mutex_lock(&load->engine->lane_in);
    KV_TRY(device_wait(load->engine->device, DEVICE_IN));
    KV_TRY(
        scatter(load, &session->window.sinks, load->sinks_staging, session->durable.sinks.tokens));
    for (uint32_t i = 0; i < load->page_count; i++)
        KV_TRY(scatter(load, &session->window.pages[i], load->page_staging[i],
                       session->durable.pages[i].tokens));
    KV_TRY(device_wait(load->engine->device, DEVICE_IN));
done:
    pthread_mutex_unlock(&load->engine->lane_in);
    engine_back(load->engine);
    return err;
}

enum kv_err transfer_load_publish(struct transfer_load *load, struct session **session_out,
                                  struct kv_diag *diag) {
    struct session *session = load->session;
    enum kv_err err = scatter_all(load);

    if (err == KV_ERR_DEVICE)
        return engine_inner_device(load->engine, diag);
    if (err != KV_OK)
        return kv_diag_set(diag, err, "no memory to load session '%s'", session->name);
    err = engine_inner_can_add(load->engine, session->name, diag);
    if (err != KV_OK)
        return err;
    session->unrun = 1;
    engine_inner_add(load->engine, session);
    *session_out = session;
    release_load(load);
    return KV_OK;
}

void transfer_load_abandon(struct transfer_load *load) {
    if (!load)
        return;
    if (load->session)
        engine_inner_session_release(load->session);
    release_load(load);
}
