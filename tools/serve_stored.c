/* tools/serve_stored.c - the part of a picture that only the store knows, and the text of a token.
 *
 * Responsible for: sessions that are asleep, whose every session is, which are pinned, what stays
 * in RAM.
 * Not responsible for: what is awake (serve.c).
 *
 * BREAK_ASLEEP_TWICE lists who is awake once more.
 */
#include "tools/serve_inner.h"

#include "engine/model/tokenizer.h"
#include "store/store_ram.h"

#include <stdlib.h>
#include <string.h>

struct stored {
    struct serve *serve;
    struct serve_picture *picture;
    struct asleep {
        struct serve_session session;
        uint64_t used_ns;
    } * items; /* SERVE_ASLEEP_MAX */
    uint32_t count;
    uint64_t more;
};

static struct serve_session *awake_by_name(struct serve_picture *picture, const char *name) {
    for (uint32_t i = 0; i < picture->session_count; i++)
        if (strcmp(picture->sessions[i].name, name) == 0)
            return &picture->sessions[i];
    return NULL;
}

/* Where the next one goes: the end, or over the one that was used longest ago. */
static struct asleep *place(struct stored *stored, uint64_t used_ns) {
    if (stored->count < SERVE_ASLEEP_MAX)
        return &stored->items[stored->count++];
    struct asleep *oldest = &stored->items[0];
    stored->more++;
    for (uint32_t i = 1; i < stored->count; i++)
        if (stored->items[i].used_ns < oldest->used_ns)
            oldest = &stored->items[i];
    return oldest->used_ns < used_ns ? oldest : NULL;
}

static int take_entry(void *context, const struct snapshot_entry *entry) {
    struct stored *stored = context;
    struct serve *serve = stored->serve;
    struct serve_session *awake = awake_by_name(stored->picture, entry->head.name);
    uint64_t wall_ns = kv_clock_wall_ns(serve->clock);
    if (awake != NULL) {
        memcpy(awake->owner, entry->owner, sizeof awake->owner);
        awake->pinned = entry->pinned;
#ifndef BREAK_ASLEEP_TWICE
        return 1;
#endif
    }
    struct asleep *at = place(stored, entry->used_ns);
    if (at == NULL)
        return 1;
    *at = (struct asleep){.used_ns = entry->used_ns};
    at->session = (struct serve_session){
        .state = SESSION_SLEEPING,
        .pinned = entry->pinned,
        .in_ram = store_ram_has(service_store(serve->service), entry->head.lineage),
        .n = entry->head.n,
        .n_kv = entry->head.n_kv,
        .idle_ns = wall_ns > entry->used_ns ? wall_ns - entry->used_ns : 0,
        .blocks = entry->head.block_count,
        .blocks_durable = entry->head.block_count};
    memcpy(at->session.owner, entry->owner, sizeof at->session.owner);
    memcpy(at->session.name, entry->head.name, sizeof at->session.name);
    return 1;
}

static int latest_first(const void *a, const void *b) {
    const struct asleep *x = a, *y = b;
    if (x->used_ns != y->used_ns)
        return x->used_ns > y->used_ns ? -1 : 1;
    return strcmp(x->session.name, y->session.name);
}

/* A damaged image leaves them empty: whoever wakes the session is told. */
static void find_tiers(struct serve *serve, struct serve_session *session) {
    struct image image;
    image_init(&image);
    if (restore_image(service_store(serve->service), &serve->alloc, session->name, &image, NULL) ==
            KV_OK &&
        image.policy_count > 0) {
        const struct image_policy *policy = &image.policies[image.policy_count - 1].policy;
        for (uint32_t block = 0; block < image.block_count; block++)
            session
                ->tier_blocks[image_tier_without(policy, image_tier(policy, block, image.n_kv),
                                                 image.absent != NULL ? image.absent[block] : 0)]++;
    }
    image_release(&image, &serve->alloc);
}

static enum kv_err append(struct stored *stored, int with_tiers) {
    struct serve *serve = stored->serve;
    struct serve_picture *picture = stored->picture;
    void *sessions = picture->sessions;
    size_t capacity = picture->session_count;
    if (!kv_alloc_grow(&serve->alloc, &sessions, &capacity, picture->session_count + stored->count,
                       sizeof *picture->sessions))
        return KV_ERR_NOMEM;
    picture->sessions = sessions;
    for (uint32_t i = 0; i < stored->count; i++) {
        if (with_tiers && i < SERVE_TIERS_MAX)
            find_tiers(serve, &stored->items[i].session);
        picture->sessions[picture->session_count++] = stored->items[i].session;
    }
    picture->asleep_more = stored->more;
    return KV_OK;
}

enum kv_err serve_picture_stored(struct serve *serve, struct serve_picture *picture, int with_tiers,
                                 struct kv_diag *diag) {
    struct stored stored = {.serve = serve, .picture = picture};
    stored.items = kv_alloc_zeroed(&serve->alloc, SERVE_ASLEEP_MAX, sizeof *stored.items);
    if (stored.items == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the picture");
    enum kv_err err =
        snapshot_list(service_store(serve->service), &serve->alloc, take_entry, &stored, diag);
    if (err == KV_OK) {
        qsort(stored.items, stored.count, sizeof *stored.items, latest_first);
        err = append(&stored, with_tiers);
    }
    kv_alloc_release(&serve->alloc, stored.items);
    return err;
}

size_t serve_token_bytes(struct serve *serve, uint32_t token, char *out, size_t capacity) {
    const struct tokenizer *tokenizer = engine_tokenizer(service_engine(serve->service));
    struct gguf_text piece = tokenizer_piece(tokenizer, token);
    size_t count = piece.size_bytes < capacity ? (size_t)piece.size_bytes : capacity;
    if (count > 0)
        memcpy(out, piece.bytes, count);
    return count;
}
