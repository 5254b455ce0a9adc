/* tests/fuzz_request.c - libFuzzer over the bodies of completion requests.
 *
 * Responsible for: the entry that libFuzzer calls (`make fuzz`).
 * Not responsible for: what is done with the bytes (support_fuzz_request.c).
 */
#include "tests/support_fuzz_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    (void)support_fuzz_request(bytes, count);
    return 0;
}
