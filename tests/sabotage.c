/* tests/sabotage.c - foreign bytes on disk against the product as it is.
 *
 * Responsible for: expecting the digest to refuse them.
 * Not responsible for: the damage (support_sabotage.c).
 */
#include "tests/support_sabotage.h"

int main(int argc, char **argv) {
    return sabotage_run(argc, argv, KV_ERR_CORRUPT);
}
