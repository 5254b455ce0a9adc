/* tools/control_wire.h - the bytes of the control socket.
 *
 * Responsible for: head and answer as words, whole reads and writes, where the socket stands.
 * Not responsible for: who runs what (control.c, control_ask.c).
 *
 * Threads: pure but for reads and writes.
 * Units: bytes.
 */
#ifndef TOOLS_CONTROL_WIRE_H
#define TOOLS_CONTROL_WIRE_H

#include "store/base/bytes.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

enum {
    CONTROL_WIRE_MAGIC = 0x4c505443, /* "CTPL" */
    CONTROL_WIRE_VERSION = 1,
    CONTROL_WIRE_HEAD_BYTES = 16,
    CONTROL_WIRE_ANSWER_BYTES = 8,
    CONTROL_WIRE_FULL = 256,  /* instead of an exit code: nobody more is let in */
    CONTROL_WIRE_OTHER = 257, /* a head of another version */
    CONTROL_WIRE_STREAMS = 4
};

/* A folder of any length: the address goes through the open folder. -1 when it is not there. */
int control_wire_address(const char *store, struct sockaddr_un *address_out);
/* 1 when all of it was read or written. */
int control_wire_get(int socket, void *bytes, size_t count);
int control_wire_put(int socket, const void *bytes, size_t count);

#endif
