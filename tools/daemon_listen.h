/* tools/daemon_listen.h - ADDRESS:PORT as the daemon understands it.
 *
 * Responsible for: numeric IPv4 and [IPv6] addresses, the port, whether others can reach it.
 * Not responsible for: listening (http.h).
 *
 * Threads: pure.
 * Units: none.
 */
#ifndef TOOLS_DAEMON_LISTEN_H
#define TOOLS_DAEMON_LISTEN_H

#include "store/base/diag.h"

#include <stdint.h>

enum { DAEMON_LISTEN_BYTES = 64 };

struct daemon_listen {
    char address[DAEMON_LISTEN_BYTES];
    uint16_t port;
    int is_local; /* 127.0.0.0/8 or ::1 */
};
/* INVALID. Port 0 is any free one. */
enum kv_err daemon_listen_parse(const char *text, struct daemon_listen *listen_out,
                                struct kv_diag *diag);

#endif
