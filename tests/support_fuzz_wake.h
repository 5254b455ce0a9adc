/* tests/support_fuzz_wake.h - any bytes in the stored planes, scales, pages and image of a session.
 *
 * Responsible for: putting them over an extent on disk and waking the session, in a program whose
 * digests accept everything (kv_digest_equal is defined by it, or here): nothing ends the process,
 * a number that no encoder writes never reaches attention, and the session wakes as it was when
 * the bytes are put back.
 * Not responsible for: records and segments (support_fuzz.h).
 *
 * Two bytes choose the extent and two the place in it; the rest goes there.
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_FUZZ_WAKE_H
#define TESTS_SUPPORT_FUZZ_WAKE_H

#include <stddef.h>
#include <stdint.h>

/* 1 when the session woke. */
int support_fuzz_wake(const uint8_t *bytes, size_t count);

#endif
