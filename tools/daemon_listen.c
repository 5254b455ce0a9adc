/* tools/daemon_listen.c - ADDRESS:PORT as the daemon understands it.
 *
 * Responsible for: the contract of daemon_listen.h. Names are not looked up: what a name means may
 * change between the check and the listening.
 * Not responsible for: listening.
 */
#include "tools/daemon_listen.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <string.h>

static int parse_port(const char *text, uint16_t *port_out) {
    unsigned long port = 0;
    if (text[0] == 0)
        return 0;
    for (; isdigit((unsigned char)*text) && port <= UINT16_MAX; text++)
        port = port * 10 + (unsigned long)(*text - '0');
    *port_out = (uint16_t)port;
    return *text == 0 && port <= UINT16_MAX;
}

static int is_local(const char *address, int *local_out) {
    struct in_addr four;
    struct in6_addr six;
    if (inet_pton(AF_INET, address, &four) == 1) {
        *local_out = ntohl(four.s_addr) >> 24 == 127;
        return 1;
    }
    if (inet_pton(AF_INET6, address, &six) != 1)
        return 0;
    *local_out = IN6_IS_ADDR_LOOPBACK(&six);
    return 1;
}

enum kv_err daemon_listen_parse(const char *text, struct daemon_listen *listen_out,
                                struct kv_diag *diag) {
    struct daemon_listen found = {.address = ""};
    const char *colon = strrchr(text, ':');
    size_t length = colon != NULL ? (size_t)(colon - text) : 0;
    if (length > 2 && text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    } else if (memchr(text, ':', length) != NULL) {
        length = 0;
    }
    if (length > 0 && length < sizeof found.address)
        memcpy(found.address, text, length);
    if (!is_local(found.address, &found.is_local) || !parse_port(colon + 1, &found.port))
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "--listen: write a numeric address and a port, as 127.0.0.1:8080 or "
                           "[::1]:8080");
    *listen_out = found;
    return KV_OK;
}
