/* tools/prefix.h - which stored session a request goes on in, and from which token.
 *
 * Responsible for: owners made of keys; finding, for a chat or prompt that came without a session's
 * name, the owner's session that agrees longest with it, awake or asleep, by ids or by text;
 * whether that session goes on itself or a new one branches off it; waking the branch.
 * Not responsible for: hashes (snapshot/snap_prefix.h), what agrees (engine/agree.h), leases,
 * feeding and generating (serve_turn.c).
 *
 * A session goes on itself when the request holds all of it. Else it stays as it is, and a new one
 * of a made-up name begins with what both have, where that saves prefilling. Nothing is stored of
 * the table: opening it reads the store (0.7 s for 10,000 sessions).
 *
 * Threads: as service.h; prefix_owner any.
 * Units: tokens.
 * Errors: of service.h.
 */
#ifndef TOOLS_PREFIX_H
#define TOOLS_PREFIX_H

#include "engine/agree.h"
#include "tools/service.h"

struct prefix;
/* `service` is the caller's and outlives the result. NOMEM, IO. */
enum kv_err prefix_open(struct service *service, struct prefix **prefix_out, struct kv_diag *diag);
void prefix_close(struct prefix *prefix); /* NULL is allowed */

/* Whose requests with this key are; never the operator's zeros. */
void prefix_owner(const char *key, uint8_t owner_out[IMAGE_OWNER_BYTES]);

struct prefix_wish {
    const uint8_t *owner;              /* IMAGE_OWNER_BYTES; zeros: the operator */
    const uint32_t *ids;               /* the whole request, rendered from its beginning */
    uint64_t count;                    /* at least 1 */
    const struct template_span *spans; /* its messages; none for a prompt */
    size_t span_count;
    /* 1: somebody works in the session, so that it cannot go on itself now. May be NULL. */
    int (*is_busy)(void *context, const char *name);
    void *context;
};
struct prefix_place {
    int found;                           /* 0: nothing is worth it, the rest is zero */
    char name[IMAGE_NAME_BYTES_MAX + 1]; /* whose beginning it is */
    uint64_t snapshot;
    int forks; /* 1: for prefix_fork; 0: the session itself goes on, at its end */
    /* The first stored tokens stand for the first request tokens; what is behind is to be fed. It
     * is never the whole request: logits are not stored. */
    uint64_t stored_tokens, request_tokens;
    uint64_t kept_tokens;  /* of the stored ones, that keep their KV */
    uint64_t differ_token; /* where the first difference is, in the session's tokens */
    enum agree_end end;
};
enum kv_err prefix_find(struct prefix *prefix, const struct prefix_wish *wish,
                        struct prefix_place *place_out, struct kv_diag *diag);

/* Wakes the beginning of place->name as a new session `new_name` (EXISTS) and prefills what has no
 * KV any more. `opened_out` as of service_session. NOT_FOUND or CORRUPT also when the place has
 * gone meanwhile: look again. */
struct prefix_fork {
    const struct prefix_place *place;
    const char *new_name;
    restore_progress progress; /* may be NULL */
    void *progress_context;
};
enum kv_err prefix_fork(struct prefix *prefix, const struct prefix_fork *fork,
                        struct session **session_out, struct service_opened *opened_out,
                        struct kv_diag *diag);

/* 0: the snapshot of the place has gone, because the session has moved on or was removed. */
int prefix_is_there(const struct prefix *prefix, const struct prefix_place *place);

/* After every save, removal or renaming of `name`. */
enum kv_err prefix_note(struct prefix *prefix, const char *name, struct kv_diag *diag);
/* After a command that may have changed any session. */
enum kv_err prefix_refresh(struct prefix *prefix, struct kv_diag *diag);
/* For tests. */
struct snap_prefix;
struct snap_prefix *prefix_table(struct prefix *prefix);

#endif
