/* engine/model/utf8.h - one UTF-8 character at a time.
 *
 * Responsible for: telling a whole character, the beginning of one, and bytes that are neither.
 * Not responsible for: classes of characters (pretokenize.c).
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef ENGINE_MODEL_UTF8_H
#define ENGINE_MODEL_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum { UTF8_INVALID = 0, UTF8_UNFINISHED = -1 };

/* The bytes of the character that begins at `at` (1 to 4), UTF8_UNFINISHED when all `left` bytes
 * could begin one, else UTF8_INVALID: surrogates, overlong forms and values beyond U+10FFFF are
 * invalid. `left` is at least 1. */
int utf8_length(const uint8_t *at, size_t left);

#endif
