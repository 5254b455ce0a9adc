/* tests/fuzz_tokenizer.c - libFuzzer over the tables of a tokenizer, a template, a text.
 *
 * Responsible for: the entry that libFuzzer calls (`make fuzz`).
 * Not responsible for: what is done with the bytes (support_fuzz_tokenizer.c).
 */
#include "tests/support_fuzz_tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    (void)support_fuzz_tokenizer(bytes, count);
    return 0;
}
