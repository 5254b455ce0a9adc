/* tests/support_fuzz_request.h - any bytes as the body of a completion request.
 *
 * Responsible for: reading them as http_request_parse does, and that what it says holds: texts are
 * terminated and in the request's own memory, ranges are kept, a refusal says why.
 * Not responsible for: where bytes come from (fuzz_request.c, test_corpus.c).
 *
 * The first byte chooses the form: even a chat, odd a completion.
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_FUZZ_REQUEST_H
#define TESTS_SUPPORT_FUZZ_REQUEST_H

#include <stddef.h>
#include <stdint.h>

/* 1 when a request came of it. */
int support_fuzz_request(const uint8_t *bytes, size_t count);

#endif
