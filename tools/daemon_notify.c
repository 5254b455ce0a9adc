/* tools/daemon_notify.c - telling the service manager how far the daemon is.
 *
 * Responsible for: the protocol of sd_notify(3): an address that is a path, or abstract with '@'.
 * Not responsible for: where the address comes from (config.h).
 */
#include "tools/daemon_notify.h"

#include "tools/config.h"

#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void daemon_notify(const char *state) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *name = config_notify_socket();
    size_t length = name != NULL ? strlen(name) : 0;
    if (length < 2 || length >= sizeof address.sun_path || (name[0] != '/' && name[0] != '@'))
        return;
    memcpy(address.sun_path, name, length);
    if (name[0] == '@')
        address.sun_path[0] = 0;
    int to = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (to < 0)
        return;
    (void)sendto(to, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)&address,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length));
    close(to);
}
