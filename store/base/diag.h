/* store/base/diag.h - the sentence behind an error code.
 *
 * Responsible for: one bounded line of text that names the thing and the remedy, written where the
 * error is found and read where it is shown.
 * Not responsible for: printing (tools/) or deciding (the code decides).
 *
 * A function that takes a `struct kv_diag *` writes it only when it returns an error. The pointer
 * may be NULL when the caller does not want the text. The first writer is the most precise, so
 * callers add context with kv_diag_prefix instead of writing over it.
 *
 * Threads: one owner; a diag is never shared between threads.
 * Units: bytes of UTF-8 text, always terminated.
 */
#ifndef STORE_BASE_DIAG_H
#define STORE_BASE_DIAG_H

#include "store/base/err.h"

enum { KV_DIAG_BYTES = 768 };

struct kv_diag {
    char text[KV_DIAG_BYTES];
};

void kv_diag_clear(struct kv_diag *diag);

/* Writes the text and returns `err`, so that `return kv_diag_set(diag, KV_ERR_IO, "…", …);` reads
 * as one statement. Long text is cut; control characters become '?'. */
enum kv_err kv_diag_set(struct kv_diag *diag, enum kv_err err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* As kv_diag_set, with ": " and the text of errno value `errno_value` appended. */
enum kv_err kv_diag_errno(struct kv_diag *diag, enum kv_err err, int errno_value,
                          const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Puts "format: " in front of the text that is there. */
void kv_diag_prefix(struct kv_diag *diag, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
