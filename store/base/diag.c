/* store/base/diag.c - bounded error text.
 *
 * Responsible for: formatting, cutting and cleaning the line.
 * Not responsible for: what the line says.
 */
#include "store/base/diag.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Names come from users and files: a terminal must not obey what is inside them. */
static void strip_controls(char *text) {
    for (unsigned char *at = (unsigned char *)text; *at != 0; at++) {
        if (*at < 0x20 || *at == 0x7f)
            *at = '?';
    }
}

void kv_diag_clear(struct kv_diag *diag) {
    if (diag != NULL)
        diag->text[0] = 0;
}

enum kv_err kv_diag_set(struct kv_diag *diag, enum kv_err err, const char *format, ...) {
    if (diag == NULL)
        return err;
    va_list args;
    va_start(args, format);
    vsnprintf(diag->text, sizeof diag->text, format, args);
    va_end(args);
    strip_controls(diag->text);
    return err;
}

/* What the user can do about it; "" where the reason says all. */
static const char *remedy(int errno_value) {
    switch (errno_value) {
    case ENOSPC:
        return " (bytes or inodes: free some there, or remove sessions and run gc)";
    case EDQUOT:
        return " (raise the quota, or remove sessions and run gc)";
    case EFBIG:
        return " (raise the limit, see ulimit -f)";
    case EMFILE:
    case ENFILE:
        return " (raise the limit, see ulimit -n)";
    case EROFS:
        return " (mount it writable)";
    case EACCES:
        return " (this user may not)";
    default:
        return "";
    }
}

enum kv_err kv_diag_errno(struct kv_diag *diag, enum kv_err err, int errno_value,
                          const char *format, ...) {
    if (diag == NULL)
        return err;
    va_list args;
    va_start(args, format);
    vsnprintf(diag->text, sizeof diag->text, format, args);
    va_end(args);
    size_t used = strlen(diag->text);
    char reason[128] = "";
    const char *text = strerror_r(errno_value, reason, sizeof reason);
    snprintf(diag->text + used, sizeof diag->text - used, ": %s%s", text, remedy(errno_value));
    strip_controls(diag->text);
    return err;
}

void kv_diag_prefix(struct kv_diag *diag, const char *format, ...) {
    if (diag == NULL)
        return;
    char old[KV_DIAG_BYTES];
    memcpy(old, diag->text, sizeof old);
    va_list args;
    va_start(args, format);
    vsnprintf(diag->text, sizeof diag->text, format, args);
    va_end(args);
    size_t used = strlen(diag->text);
    snprintf(diag->text + used, sizeof diag->text - used, ": %s", old);
    strip_controls(diag->text);
}
