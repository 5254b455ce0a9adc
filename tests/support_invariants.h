/* tests/support_invariants.h - the numbered invariants, looked for in an open store.
 *
 * Responsible for: what can be seen of invariants 1 to 5 (store/store.c) and 6 to 8
 * (snapshot/snap_commit.c) by walking every record and reading every byte.
 * Not responsible for: whether the right sessions are there (the caller knows them).
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_INVARIANTS_H
#define TESTS_SUPPORT_INVARIANTS_H

#include "store/store.h"

enum { SUPPORT_INVARIANTS_TEXT_BYTES = 400 };

/* 0 when all hold, else the number of the one that does not; `text_out` then says what was seen.
 * Call it before anything is written: blocks that no snapshot counts yet are allowed. */
int support_invariants_check(struct store *store, char text_out[SUPPORT_INVARIANTS_TEXT_BYTES]);

#endif
