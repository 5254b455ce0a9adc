/* tests/support_fuzz_tokenizer.h - any bytes as the tables of a tokenizer, a template and a text.
 *
 * Responsible for: writing them into a model file that is otherwise right, so that what stands
 * behind the header is reached, and using what comes of it: encode, decode, a turn of a chat.
 * Not responsible for: the header itself (support_fuzz_gguf).
 *
 * The first byte says which parts are left out or wrong; five sections end with a zero byte each:
 * tokens, merges (one a line), types (one a byte), the template, the text.
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_FUZZ_TOKENIZER_H
#define TESTS_SUPPORT_FUZZ_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

/* 1 when a tokenizer came of it. */
int support_fuzz_tokenizer(const uint8_t *bytes, size_t count);

#endif
