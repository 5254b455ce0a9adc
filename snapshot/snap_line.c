/* snapshot/snap_line.c - lines: which lineage a resident session writes to.
 *
 * Responsible for: what snap_line.h promises.
 * Not responsible for: what is written.
 */
#include "snapshot/snap_line.h"

#include "snapshot/snap_path.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/random.h>

enum { FRESH_TRIES_MAX = 64 };

enum kv_err snap_line_fresh_id(struct store *store, struct record_key (*key_of)(uint64_t id),
                               uint64_t *id_out, struct kv_diag *diag) {
    for (int i = 0; i < FRESH_TRIES_MAX; i++) {
        uint64_t id = 0;
        int exists = 0;
        /* tidy-allow: random ids must differ between processes and machines */
        if (getrandom(&id, sizeof id, 0) != (ssize_t)sizeof id)
            return kv_diag_errno(diag, KV_ERR_IO, errno, "no random numbers for an id");
        if (id == 0)
            continue;
        struct record_key key = key_of(id);
        enum kv_err err = store_exists(store, key.bytes, key.size, &exists, diag);
        if (err != KV_OK)
            return err;
        if (!exists) {
            *id_out = id;
            return KV_OK;
        }
    }
    return kv_diag_set(diag, KV_ERR_IO,
                       "%d random ids were all in use: the random source is broken",
                       FRESH_TRIES_MAX);
}

const struct image_page *snap_line_page(const struct transfer_durable *durable, uint64_t first,
                                        uint32_t tokens) {
    if (durable->snapshot == 0)
        return NULL;
    if (durable->sinks.page_id != 0 && durable->sinks.first == first &&
        durable->sinks.tokens == tokens)
        return &durable->sinks;
    for (uint32_t i = 0; i < durable->page_count; i++)
        if (durable->pages[i].first == first && durable->pages[i].tokens == tokens)
            return &durable->pages[i];
    return NULL;
}

enum kv_err snap_line_go_back(struct store *store, uint32_t keep, struct transfer_durable *durable,
                              struct kv_diag *diag) {
    struct transfer_durable after = *durable;
    enum kv_err err = KV_OK;
    KV_TRY(snap_path_owner(store, durable->lineage, keep, &after.parent, diag));
    KV_TRY(snap_path_chain(store, durable->lineage, keep, &after.block_chain, diag));
    after.cut = keep;
    after.lineage = 0;
    after.block_count = keep;
    after.head_kept = 1;
    after.trim_pending = 0;
    *durable = after;
done:
    return err;
}

void snap_line_forget_pages(struct transfer_durable *durable, uint64_t pages_end,
                            uint64_t sinks_end) {
    uint32_t kept = 0;
#ifdef BREAK_STALE_PAGE
    return;
#endif
    for (uint32_t i = 0; i < durable->page_count; i++)
        if (durable->pages[i].first + durable->pages[i].tokens <= pages_end)
            durable->pages[kept++] = durable->pages[i];
    durable->page_count = kept;
    if (durable->sinks.tokens > sinks_end)
        durable->sinks.page_id = 0;
}

static struct snap_line *find(const struct snap_lines *lines, uint64_t lineage) {
    struct snap_line *line = lines->first;
    while (line != NULL && line->lineage != lineage)
        line = line->next;
    return line;
}

void snap_line_each_open(struct snap_lines *lines, snap_line_each each, void *context) {
    pthread_mutex_lock(&lines->changing);
    for (const struct snap_line *line = lines->first; line != NULL; line = line->next)
        if (!each(context, line->lineage, line->parent, line->cut))
            break;
    pthread_mutex_unlock(&lines->changing);
}

/* A session that was woken has no line before it writes; until then, as after that, a line that is
 * left over from an earlier life of the same lineage is not its own. */
struct session *snap_line_session(const struct snap_lines *lines, const struct snap_line *line) {
    struct session *session = session_find(lines->engine, line->name);
    if (session == NULL)
        return NULL;
    const struct transfer_durable *durable = transfer_durable(session);
#ifdef BREAK_EARLIER_LIFE
    return durable->lineage == line->lineage ? session : NULL;
#endif
    return !durable->trim_pending && find(lines, durable->lineage) == line ? session : NULL;
}

void snap_line_release(struct snap_lines *lines, struct snap_line *line) {
    assert(line->holds > 0);
    if (--line->holds == 0)
        kv_alloc_release(lines->alloc, line);
}

void snap_line_forget(struct snap_lines *lines, struct snap_line *line) {
    for (struct snap_line **at = &lines->first; *at != NULL; at = &(*at)->next) {
        if (*at == line) {
            pthread_mutex_lock(&lines->changing);
            *at = line->next;
            pthread_mutex_unlock(&lines->changing);
            snap_line_release(lines, line);
            return;
        }
    }
}

void snap_lines_init(struct snap_lines *lines, const struct kv_alloc *alloc, struct store *store,
                     struct engine *engine) {
    lines->alloc = alloc;
    lines->store = store;
    lines->engine = engine;
    lines->first = NULL;
    pthread_mutex_init(&lines->changing, NULL);
}

void snap_lines_end(struct snap_lines *lines) {
    while (lines->first != NULL)
        snap_line_forget(lines, lines->first);
    pthread_mutex_destroy(&lines->changing);
}

/* Sessions leave the device in many ways; their lines go when the next one comes. */
static void forget_gone(struct snap_lines *lines) {
    struct snap_line *line = lines->first;
    while (line != NULL) {
        struct snap_line *next = line->next;
        if (line->holds == 1 && snap_line_session(lines, line) == NULL)
            snap_line_forget(lines, line);
        line = next;
    }
}

enum kv_err snap_line_of(struct snap_lines *lines, struct session *session,
                         struct snap_line **line_out, struct kv_diag *diag) {
    struct transfer_durable *durable = transfer_durable(session);
    struct snap_line *line = durable->lineage == 0 ? NULL : find(lines, durable->lineage);
    /* A line that is there although the session was just woken belongs to an earlier life of the
     * same lineage: what it still writes is deleted by the new line's first batch. */
    if (line != NULL && !durable->trim_pending) {
        *line_out = line;
        return KV_OK;
    }
    uint64_t lineage = durable->lineage;
    int is_new = lineage == 0;
    if (is_new) {
        enum kv_err err = snap_line_fresh_id(lines->store, record_key_lineage, &lineage, diag);
        if (err != KV_OK)
            return err;
    }
    struct snap_line *fresh = kv_alloc_zeroed(lines->alloc, 1, sizeof *fresh);
    if (fresh == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to save a session");
    if (line != NULL)
        snap_line_forget(lines, line);
    forget_gone(lines);
    struct session_info info;
    session_brief(session, &info);
    size_t length = strnlen(info.name, IMAGE_NAME_BYTES_MAX);
    memcpy(fresh->name, info.name, length);
    fresh->lineage = lineage;
    fresh->holds = 1;
    fresh->keeps_k = info.policy.recipe == IMAGE_RECIPE_V2;
    fresh->block_count = durable->block_count;
    fresh->chain = durable->block_chain;
    fresh->parent = durable->parent;
    fresh->cut = durable->cut;
    fresh->trim = durable->trim_pending && !is_new;
    fresh->head = durable->snapshot;
    fresh->recorded = durable->snapshot != 0 && !is_new;
    pthread_mutex_lock(&lines->changing);
    fresh->next = lines->first;
    lines->first = fresh;
    pthread_mutex_unlock(&lines->changing);
    durable->lineage = lineage;
    durable->trim_pending = 0;
    *line_out = fresh;
    return KV_OK;
}
