/* tools/http_guard.c - who may ask: the key, and the name that the client believes to talk to.
 *
 * Responsible for: see http_guard.h.
 * Not responsible for: what a refusal says (http.c).
 *
 * BREAK_KEY_PREFIX takes the beginning of a key for the key. BREAK_HOST_SUFFIX takes a host that
 * only begins with a name of ours.
 */
#include "tools/http_guard.h"

#include <string.h>
#include <strings.h>

/* Both padded to the longest key, so that neither length nor content decides how long it takes. */
static int equal_padded(const uint8_t a[HTTP_KEY_BYTES_MAX], const char *key) {
    uint8_t b[HTTP_KEY_BYTES_MAX] = {0};
    size_t bytes = strnlen(key, HTTP_KEY_BYTES_MAX);
    volatile uint8_t different = 0;
    memcpy(b, key, bytes);
    for (size_t i = 0; i < HTTP_KEY_BYTES_MAX; i++) {
#ifdef BREAK_KEY_PREFIX
        if (a[i] == 0)
            break;
#endif
        different |= a[i] ^ b[i];
    }
    return different == 0;
}

int http_guard_key(const struct http_key *keys, size_t count, const char *authorization,
                   uint8_t owner_out[HTTP_OWNER_BYTES]) {
    static const char scheme[] = "Bearer ";
    uint8_t sent[HTTP_KEY_BYTES_MAX] = {0};
    int found = 0;
    memset(owner_out, 0, HTTP_OWNER_BYTES);
    if (authorization == NULL || strncasecmp(authorization, scheme, sizeof scheme - 1) != 0)
        return 0;
    authorization += sizeof scheme - 1;
    authorization += strspn(authorization, " ");
    size_t bytes = strlen(authorization);
    if (bytes == 0 || bytes > HTTP_KEY_BYTES_MAX)
        return 0;
    memcpy(sent, authorization, bytes);
    for (size_t i = 0; i < count; i++) {
        int equal = equal_padded(sent, keys[i].text);
        uint8_t mask = (uint8_t)-equal;
        for (size_t at = 0; at < HTTP_OWNER_BYTES; at++)
            owner_out[at] = (uint8_t)((owner_out[at] & ~mask) | (keys[i].owner[at] & mask));
        found |= equal;
    }
    return found;
}

/* Where the port begins, or the end: behind the last colon outside of brackets. */
static size_t name_bytes(const char *host) {
    const char *close = host[0] == '[' ? strchr(host, ']') : NULL;
    if (host[0] == '[')
        return close != NULL ? (size_t)(close - host) + 1 : 0;
    return strcspn(host, ":");
}

static int same_name(const char *host, size_t bytes, const char *name) {
#ifdef BREAK_HOST_SUFFIX
    bytes = bytes < strlen(name) ? bytes : strlen(name);
#endif
    return strlen(name) == bytes && strncasecmp(host, name, bytes) == 0;
}

int http_guard_host(const char *host, const char *const *names, size_t count) {
    static const char *const ours[] = {"localhost", "127.0.0.1", "[::1]"};
    int found = 0;
    if (host == NULL || strnlen(host, HTTP_HOST_BYTES) == HTTP_HOST_BYTES)
        return 0;
    size_t bytes = name_bytes(host);
    if (bytes == 0)
        return 0;
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        found |= same_name(host, bytes, ours[i]);
    for (size_t i = 0; i < count; i++)
        found |= same_name(host, bytes, names[i]);
    const char *port = host + bytes;
    return found && (*port == 0 || (*port == ':' && strspn(port + 1, "0123456789") > 0 &&
                                    port[1 + strspn(port + 1, "0123456789")] == 0));
}
