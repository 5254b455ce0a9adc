/* tools/prefix.c - which stored session a request goes on in, and from which token.
 *
 * Responsible for: what prefix.h promises.
 * Not responsible for: the table (snapshot/snap_prefix.c), comparing (engine/agree.c).
 */
#include "tools/prefix.h"

#include "engine/record.h"
#include "snapshot/snap_prefix.h"
#include "store/base/bytes.h"
#include "tools/prefix_marks.h"
#include "tools/turn.h"

#include <sodium.h>
#include <string.h>

/* A branch costs reading the whole session, so what it keeps must be worth that: at least a page,
 * and a share of the session that takes longer to prefill than the session to read. On two cores a
 * token is read 370 times as fast as it is prefilled (README); a GPU prefills faster, so that a
 * sixteenth is a careful choice. */
enum { KEPT_MIN = LAYOUT_PAGE_TOKENS, KEPT_SHARE = 16 };
enum { REQUEST_MARKS = 256, FINDS_MAX = 3 };

struct prefix {
    struct service *service;
    struct engine_model model;
    struct snap_prefix *table;
};

/* --- opening */

static uint32_t stored_marks(void *context, const struct snap_prefix_text *text,
                             uint64_t marks_out[SNAP_PREFIX_MARKS_MAX]) {
    const struct prefix *prefix = context;
    struct snap_prefix_mark marks[SNAP_PREFIX_MARKS_MAX];
    uint64_t ends[SNAP_PREFIX_MARKS_MAX];
    uint32_t left =
        text->role_count < SNAP_PREFIX_MARKS_MAX ? 0 : text->role_count - SNAP_PREFIX_MARKS_MAX;
    struct prefix_marks_args args = {.tokenizer = engine_tokenizer(service_engine(prefix->service)),
                                     .owner = text->owner,
                                     .ids = text->ids,
                                     .first = text->first,
                                     .n = text->n,
                                     .ends = ends};
    for (uint32_t i = left; i < text->role_count; i++)
        ends[args.end_count++] = text->roles[i].end;
    uint32_t count = prefix_marks_make(&args, marks, SNAP_PREFIX_MARKS_MAX);
    for (uint32_t i = 0; i < count; i++)
        marks_out[i] = marks[i].hash;
    return count;
}

static void on_away(void *context) {
    const struct prefix *prefix = context;
    engine_away(service_engine(prefix->service));
}

static void on_back(void *context) {
    const struct prefix *prefix = context;
    engine_back(service_engine(prefix->service));
}

enum kv_err prefix_open(struct service *service, struct prefix **prefix_out, struct kv_diag *diag) {
    struct prefix *prefix = kv_alloc_zeroed(service_alloc(service), 1, sizeof *prefix);
    if (prefix == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the beginnings of sessions");
    prefix->service = service;
    engine_model(service_engine(service), &prefix->model);
    const struct snap_prefix_settings settings = {.store = service_store(service),
                                                  .alloc = service_alloc(service),
                                                  .model = &prefix->model.identity,
                                                  .marks = stored_marks,
                                                  .away = on_away,
                                                  .back = on_back,
                                                  .context = prefix,
                                                  .hash_mask = UINT64_MAX};
    enum kv_err err = snap_prefix_open(&settings, &prefix->table, diag);
    if (err == KV_OK)
        *prefix_out = prefix;
    else
        kv_alloc_release(service_alloc(service), prefix);
    return err;
}

void prefix_close(struct prefix *prefix) {
    if (prefix == NULL)
        return;
    snap_prefix_close(prefix->table);
    kv_alloc_release(service_alloc(prefix->service), prefix);
}

void prefix_owner(const char *key, uint8_t owner_out[IMAGE_OWNER_BYTES]) {
    static const char personal[] = "coldplane owner";
    _Static_assert(IMAGE_OWNER_BYTES >= crypto_generichash_BYTES_MIN, "a short BLAKE2b");
    crypto_generichash(owner_out, IMAGE_OWNER_BYTES, (const unsigned char *)key, strlen(key),
                       (const unsigned char *)personal, sizeof personal - 1);
    if (sodium_is_zero(owner_out, IMAGE_OWNER_BYTES))
        owner_out[0] = 1;
}

enum kv_err prefix_note(struct prefix *prefix, const char *name, struct kv_diag *diag) {
    return snap_prefix_note(prefix->table, name, diag);
}

enum kv_err prefix_refresh(struct prefix *prefix, struct kv_diag *diag) {
    return snap_prefix_refresh(prefix->table, diag);
}

struct snap_prefix *prefix_table(struct prefix *prefix) {
    return prefix->table;
}

/* --- finding */

/* Candidates are compared in the order of their claims. */
struct finding {
    struct prefix *prefix;
    const struct prefix_wish *wish;
    struct prefix_place best;
    int moved; /* one of them was not in the store any more */
};

static uint32_t search(struct finding *finding, struct snap_prefix_found *found,
                       struct kv_diag *diag, enum kv_err *err_out) {
    const struct prefix_wish *wish = finding->wish;
    const struct kv_alloc *alloc = service_alloc(finding->prefix->service);
    struct snap_prefix_mark marks[REQUEST_MARKS];
    uint64_t *ends = kv_alloc_zeroed(alloc, wish->span_count + 1, sizeof *ends);
    *err_out = KV_OK;
    if (ends == NULL) {
        *err_out = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the ends of the messages");
        return 0;
    }
    for (size_t i = 0; i < wish->span_count; i++)
        ends[i] = wish->spans[i].end;
    const struct prefix_marks_args args = {
        .tokenizer = engine_tokenizer(service_engine(finding->prefix->service)),
        .owner = wish->owner,
        .ids = wish->ids,
        .n = wish->count,
        .ends = ends,
        .end_count = wish->span_count};
    const struct snap_prefix_wish asked = {.owner = wish->owner,
                                           .ids = wish->ids,
                                           .count = wish->count,
                                           .marks = marks,
                                           .mark_count =
                                               prefix_marks_make(&args, marks, REQUEST_MARKS)};
    uint32_t count = snap_prefix_find(finding->prefix->table, &asked, found);
    kv_alloc_release(alloc, ends);
    return count;
}

/* What keeps its KV when the session goes back to its first `n` tokens (session_rewind). */
static uint64_t kept(const struct snap_prefix_found *found, uint64_t n) {
    uint64_t pending = n > 0 ? n - 1 : 0;
    if (n >= found->n)
        return found->n_kv;
    if (layout_sealed_blocks(pending) == found->blocks)
        return pending;
    uint64_t stays = LAYOUT_SINK_TOKENS + layout_sealed_blocks(n) * LAYOUT_BLOCK_TOKENS;
    return stays < pending ? stays : pending;
}

static int is_worth_it(const struct snap_prefix_found *found, const struct prefix_place *place) {
    return !place->forks ||
           (place->kept_tokens >= KEPT_MIN && place->kept_tokens >= found->n_kv / KEPT_SHARE);
}

/* What would be prefilled. */
static uint64_t cost(const struct finding *finding, const struct prefix_place *place) {
    return finding->wish->count - place->request_tokens + place->stored_tokens - place->kept_tokens;
}

static int is_better(const struct finding *finding, const struct prefix_place *place) {
    const struct prefix_place *best = &finding->best;
    uint64_t mine = cost(finding, place), other = cost(finding, best);
    return !best->found || mine < other || (mine == other && place->forks < best->forks);
}

static void consider(struct finding *finding, const struct snap_prefix_found *found,
                     const struct agree *agree) {
    const struct prefix_wish *wish = finding->wish;
    struct prefix_place place = {.found = 1,
                                 .snapshot = found->snapshot,
                                 .stored_tokens = agree->stored_tokens,
                                 .request_tokens = agree->request_tokens,
                                 .differ_token = agree->differ_token,
                                 .end = agree->end};
    memcpy(place.name, found->name, sizeof place.name);
    if (place.stored_tokens == 0)
        return;
    place.forks = place.stored_tokens < found->n || !found->is_head ||
                  (wish->is_busy != NULL && wish->is_busy(wish->context, found->name));
#ifdef BREAK_FORK_NOT
    place.forks = 0;
#endif
    place.kept_tokens = kept(found, place.stored_tokens);
    if (is_worth_it(found, &place) && is_better(finding, &place))
        finding->best = place;
}

/* The ids of an idle session that is awake and saved are at hand. */
static struct session *resident(const struct finding *finding,
                                const struct snap_prefix_found *found, struct session_info *info) {
    struct session *session = session_find(service_engine(finding->prefix->service), found->name);
    if (session == NULL || transfer_durable(session)->snapshot != found->snapshot)
        return NULL;
    session_info(session, info);
    return info->n == found->n && info->n_kv == found->n_kv ? session : NULL;
}

static enum kv_err compare(struct finding *finding, const struct snap_prefix_found *found,
                           struct kv_diag *diag) {
    struct prefix *prefix = finding->prefix;
    struct engine *engine = service_engine(prefix->service);
    /* The last token is always fed, since logits are not stored. */
    struct snap_prefix_ids read = {.ids = NULL};
    struct session_info info;
    struct agree agree;
    struct agree_args args = {.tokenizer = engine_tokenizer(engine),
                              .tmpl = engine_template(engine),
                              .request = finding->wish->ids,
                              .request_count = finding->wish->count - 1,
                              .flags = AGREE_DROPPED_REASONING};
    if (resident(finding, found, &info) != NULL) {
        args.stored = info.ids;
        args.stored_count = info.n;
        args.roles = info.roles;
        args.role_count = info.role_count;
    } else {
        struct kv_diag own = {""};
        enum kv_err err = snap_prefix_read(prefix->table, found, &read, &own);
        if (err == KV_ERR_NOMEM)
            return kv_diag_set(diag, err, "%s", own.text);
        if (err != KV_OK) {
            /* It has moved on, or cannot be read: whoever asks for it by name is told why. */
            finding->moved = 1;
            return snap_prefix_note(prefix->table, found->name, diag);
        }
        args.stored = read.ids;
        args.stored_count = read.n;
        args.roles = read.roles;
        args.role_count = read.role_count;
    }
    agree_find(&args, &agree);
#ifdef BREAK_CLAIM
    agree.stored_tokens = agree.request_tokens =
        found->claim < args.stored_count ? found->claim : args.stored_count;
#endif
    consider(finding, found, &agree);
    if (read.ids != NULL)
        snap_prefix_ids_release(prefix->table, &read);
    return KV_OK;
}

enum kv_err prefix_find(struct prefix *prefix, const struct prefix_wish *wish,
                        struct prefix_place *place_out, struct kv_diag *diag) {
    struct finding finding = {.prefix = prefix, .wish = wish, .moved = 1};
    enum kv_err err = KV_OK;
    for (int i = 0; err == KV_OK && finding.moved && i < FINDS_MAX; i++) {
        struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
        uint32_t count = search(&finding, found, diag, &err);
        finding.moved = 0;
        memset(&finding.best, 0, sizeof finding.best);
        for (uint32_t k = 0; err == KV_OK && k < count; k++) {
            /* A session that goes on itself is as good as those behind it claim to be. What only
             * branches may be beaten by any of them: claims are small where answers are cut into
             * other tokens. */
            if (finding.best.found && !finding.best.forks &&
                finding.best.request_tokens >= found[k].claim)
                break;
            err = compare(&finding, &found[k], diag);
        }
    }
    if (err == KV_OK)
        *place_out = finding.best;
    return err;
}

int prefix_is_there(const struct prefix *prefix, const struct prefix_place *place) {
    struct record_key key = record_key_snapshot(place->snapshot);
    int exists = 1;
    enum kv_err err =
        store_exists(service_store(prefix->service), key.bytes, key.size, &exists, NULL);
    return err != KV_OK || exists;
}

/* --- branching */

enum kv_err prefix_fork(struct prefix *prefix, const struct prefix_fork *fork,
                        struct session **session_out, struct service_opened *opened_out,
                        struct kv_diag *diag) {
    const struct prefix_place *place = fork->place;
    const struct restore_options options = {.skip_needles = 1,
                                            .snapshot = place->snapshot,
                                            .as = fork->new_name,
                                            .progress = fork->progress,
                                            .progress_context = fork->progress_context};
    struct session *session = NULL;
    memset(opened_out, 0, sizeof *opened_out);
    opened_out->found = SERVICE_WOKEN;
    enum kv_err err =
        service_wake(prefix->service, place->name, &options, &session, &opened_out->receipt, diag);
    if (err != KV_OK)
        return err;
    err = turn_branch(prefix->service, session, place->stored_tokens, diag);
    if (err == KV_OK)
        *session_out = session;
    else
        service_drop(prefix->service, session);
    return err;
}
