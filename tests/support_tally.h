/* tests/support_tally.h - checks of a program that goes on behind a failed one and counts both.
 *
 * Responsible for: `ok` or `FAIL` a line, the closing `N passed, N failed`, seconds.
 * Not responsible for: cmocka's tests (testing.h).
 *
 * Threads: the main thread.
 * Units: seconds.
 */
#ifndef TESTS_SUPPORT_TALLY_H
#define TESTS_SUPPORT_TALLY_H

#include "store/base/diag.h"

/* Returns `good`. */
int tally_check(int good, const char *what);
/* Without it nothing can go on: the program ends with 1 unless err is KV_OK. */
void tally_need(enum kv_err err, const struct kv_diag *diag, const char *what);
int tally_passed(void);
int tally_failed(void);
/* The closing line; returns the exit code, 1 when a check has failed. */
int tally_end(void);
double tally_seconds(void);

#endif
