/* tests/fuzz_wake.c - libFuzzer over stored bytes of a session that no digest guards.
 *
 * Responsible for: the entry that libFuzzer calls (`make fuzz`).
 * Not responsible for: what is done with the bytes (support_fuzz_wake.c).
 */
#include "tests/support_fuzz_wake.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    (void)support_fuzz_wake(bytes, count);
    return 0;
}
