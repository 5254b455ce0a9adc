/* tests/support_sabotage.h - one session's plane replaced on disk by another session's.
 *
 * Responsible for: finding a stored VR1 plane that a wake reads, overwriting it, waking everybody,
 * and putting the bytes back.
 * Not responsible for: accepting digests: sabotage.c links the product's comparison, and
 * sabotage_blind.c one that accepts everything.
 *
 * Threads: one.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_SABOTAGE_H
#define TESTS_SUPPORT_SABOTAGE_H

#include "store/base/err.h"

/* main() of both programs; `expected` is how the damaged session must be refused. */
int sabotage_run(int argc, char **argv, enum kv_err expected);

#endif
