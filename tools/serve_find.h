/* tools/serve_find.h - which session a request goes on in.
 *
 * Responsible for: the place of a request: the session that the client named, one of the owner's
 * that begins as the request does (prefix.h), a branch of one, or a new one.
 * Not responsible for: leases, waking, feeding (serve_turn.c).
 *
 * Threads: the scheduler thread (service.h); it may let others in, so the place is looked at again
 * under the session's lease.
 * Units: tokens.
 */
#ifndef TOOLS_SERVE_FIND_H
#define TOOLS_SERVE_FIND_H

#include "tools/prefix.h"
#include "tools/serve.h"
#include "tools/turn.h"

struct serve_place {
    char session[IMAGE_NAME_BYTES_MAX + 1];
    int create; /* it is new when it is nowhere; 0: NOT_FOUND then */
    /* Of a session that nobody named: where it agrees. With from.forks the session is new, and
     * begins as from.name does. from.found 0: named, or new. */
    struct prefix_place from;
};
/* `rendered` is the whole request from its beginning. */
struct serve_find {
    const struct serve_request *request;
    const struct turn_rendered *rendered;
};
enum kv_err serve_find_place(struct serve *serve, const struct serve_find *find,
                             struct serve_place *place_out, struct kv_diag *diag);

#endif
