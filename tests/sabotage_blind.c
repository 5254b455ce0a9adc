/* tests/sabotage_blind.c - foreign bytes on disk against a product that checks no digest.
 *
 * Responsible for: a comparison of digests that accepts everything, linked in front of the
 * product's own, and expecting the proof to refuse the session all the same.
 * Not responsible for: the damage (support_sabotage.c).
 */
#include "store/base/digest.h"
#include "tests/support_sabotage.h"

int kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b) {
    (void)a;
    (void)b;
    return 1;
}

int main(int argc, char **argv) {
    return sabotage_run(argc, argv, KV_ERR_PROOF);
}
