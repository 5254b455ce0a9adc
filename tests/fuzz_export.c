/* tests/fuzz_export.c - libFuzzer over exported sessions.
 *
 * Responsible for: the entry that libFuzzer calls (`make fuzz`).
 * Not responsible for: what is done with the bytes (support_fuzz.c).
 */
#include "tests/support_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    (void)support_fuzz_export(bytes, count);
    return 0;
}
