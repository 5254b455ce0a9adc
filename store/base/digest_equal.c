/* store/base/digest_equal.c - the one comparison of digests.
 *
 * Responsible for: accepting or refusing bytes by their digest.
 * Not responsible for: computing digests. It is alone in its object file so that the sabotage demo
 * can link a twin that accepts everything and show which later check then catches the damage.
 */
#include "store/base/digest.h"

#include <string.h>

int kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b) {
    return memcmp(a->bytes, b->bytes, KV_DIGEST_BYTES) == 0;
}
