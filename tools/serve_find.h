/* tools/serve_find.h - which session a request goes on in, and from which token.
 *
 * Responsible for: the place of a request: the session that the client named, or a new one.
 * Not responsible for: leases, waking, feeding (serve_turn.c).
 *
 * Threads: the scheduler thread (service.h); it may let others in, so the place is looked at again
 * under the session's lease.
 * Units: tokens.
 */
#ifndef TOOLS_SERVE_FIND_H
#define TOOLS_SERVE_FIND_H

#include "tools/serve.h"

struct serve_place {
    char session[IMAGE_NAME_BYTES_MAX + 1];
    int create; /* it is new when it is nowhere; 0: NOT_FOUND then */
};
/* `ids` are the whole request, rendered from its beginning. */
struct serve_find {
    const struct serve_request *request;
    const uint32_t *ids;
    size_t id_count;
};
enum kv_err serve_find_place(struct serve *serve, const struct serve_find *find,
                             struct serve_place *place_out, struct kv_diag *diag);

#endif
