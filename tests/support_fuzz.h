/* tests/support_fuzz.h - what is done with bytes from outside, one function for each kind.
 *
 * Responsible for: reading any bytes as a GGUF file, batch record, segment, session image, index
 * entry with its record, FORMAT file or exported session; checks and digests are made right first,
 * so that what stands behind them is reached: a writer with a bug is a user too.
 * Not responsible for: where bytes come from (fuzz_*.c, test_corpus.c).
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_FUZZ_H
#define TESTS_SUPPORT_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Each returns 1 when the bytes were taken for what they claim to be. */
int support_fuzz_gguf(const uint8_t *bytes, size_t count);
int support_fuzz_batch(const uint8_t *bytes, size_t count);
int support_fuzz_segment(const uint8_t *bytes, size_t count);
int support_fuzz_image(const uint8_t *bytes, size_t count);
int support_fuzz_entry(const uint8_t *bytes, size_t count);
int support_fuzz_format(const uint8_t *bytes, size_t count);
int support_fuzz_export(const uint8_t *bytes, size_t count);

/* Makes digests and checks of an export right, as far as its frames can be followed. */
void support_fuzz_mend_export(uint8_t *bytes, size_t count);

#endif
