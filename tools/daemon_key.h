/* tools/daemon_key.h - the keys that HTTP clients show.
 *
 * Responsible for: COLDPLANE_HOME/key: made at the first start, refused when others could read it,
 * one key a line; whose sessions are whose.
 * Not responsible for: comparing what a client shows (http_guard.h).
 *
 * Threads: one owner; read-only afterwards.
 * Units: bytes.
 */
#ifndef TOOLS_DAEMON_KEY_H
#define TOOLS_DAEMON_KEY_H

#include "engine/image.h"
#include "store/base/alloc.h"
#include "store/base/diag.h"

#include <stddef.h>

enum { DAEMON_KEYS_MAX = 256, DAEMON_KEY_BYTES_MIN = 16, DAEMON_KEY_BYTES_MAX = 256 };

struct daemon_key {
    char text[DAEMON_KEY_BYTES_MAX + 1];
    uint8_t owner[IMAGE_OWNER_BYTES]; /* prefix_owner */
};
struct daemon_keys {
    const struct kv_alloc *alloc;
    struct daemon_key *items;
    size_t count;
};
/* INVALID (a line, permissions), LIMIT, IO, NOMEM. */
enum kv_err daemon_keys_open(const char *home, const struct kv_alloc *alloc,
                             struct daemon_keys *keys_out, struct kv_diag *diag);
void daemon_keys_close(struct daemon_keys *keys); /* a zeroed one is allowed */

#endif
