/* tools/text.h - text for people: clean, short, with units.
 *
 * Responsible for: taking control characters out of text that came from a model or a file before it
 * reaches a terminal, text as valid UTF-8, sizes and durations with units, reading a whole stream.
 * Not responsible for: JSON (json_text.h; cJSON escapes for itself).
 *
 * Threads: pure but for text_read_all.
 * Units: bytes, nanoseconds.
 */
#ifndef TOOLS_TEXT_H
#define TOOLS_TEXT_H

#include "store/base/alloc.h"
#include "store/base/diag.h"

#include <stdint.h>
#include <stdio.h>

enum { TEXT_SHORT_BYTES = 32, TEXT_STREAM_BYTES_MAX = 64 << 20, TEXT_VALID_GROWTH = 3 };

/* Writes `text` without control characters other than line feed and tab, and without
 * the marks that turn the direction of writing. */
void text_print_clean(FILE *out, const char *text, size_t bytes);

/* Writes `text` with U+FFFD for each byte that is no part of a UTF-8 character, and a 0 behind it.
 * `out` has room for TEXT_VALID_GROWTH * bytes + 1. Returns the bytes without the 0. */
size_t text_valid(const char *text, size_t bytes, char *out);
/* 1 when `text` is UTF-8 without control characters and marks that turn the direction. */
int text_is_plain(const char *text);

/* "12.3 MiB", "1.5 s", "340 ms", "85 µs". These return `out`. */
const char *text_size(uint64_t bytes, char out[TEXT_SHORT_BYTES]);
const char *text_duration(uint64_t ns, char out[TEXT_SHORT_BYTES]);
/* "5 s", "12 min", "30 h", "3 d". */
const char *text_age(uint64_t ns, char out[TEXT_SHORT_BYTES]);
/* "1 session", "3 sessions", "2 batches"; `noun` of at most 10 letters. */
const char *text_count(uint64_t count, const char *noun, char out[TEXT_SHORT_BYTES]);
/* "2026-11-29 17:04:05" in UTC. */
const char *text_when(uint64_t wall_ns, char out[TEXT_SHORT_BYTES]);

/* Everything up to the end of `in`, terminated; the caller releases it. LIMIT beyond
 * TEXT_STREAM_BYTES_MAX, IO, NOMEM. */
enum kv_err text_read_all(FILE *in, const struct kv_alloc *alloc, char **text_out,
                          size_t *bytes_out, struct kv_diag *diag);

#endif
