/* tools/control_wire.c - the bytes of the control socket.
 *
 * Responsible for: the contract of control_wire.h.
 * Not responsible for: descriptors that travel with them.
 */
#include "tools/control_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

int control_wire_address(const char *store, struct sockaddr_un *address_out) {
    int folder = open(store, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return -1;
    memset(address_out, 0, sizeof *address_out);
    address_out->sun_family = AF_UNIX;
    snprintf(address_out->sun_path, sizeof address_out->sun_path, "/proc/self/fd/%d/control",
             folder);
    return folder;
}

int control_wire_get(int socket, void *bytes, size_t count) {
    uint8_t *at = bytes;
    while (count > 0) {
        ssize_t got = recv(socket, at, count, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return 0;
        at += got;
        count -= (size_t)got;
    }
    return 1;
}

int control_wire_put(int socket, const void *bytes, size_t count) {
    const uint8_t *at = bytes;
    while (count > 0) {
        ssize_t put = send(socket, at, count, MSG_NOSIGNAL);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return 0;
        at += put;
        count -= (size_t)put;
    }
    return 1;
}
