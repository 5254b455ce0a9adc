/* tests/support_tally.c - counts the checks of one program.
 *
 * Responsible for: the contract of support_tally.h.
 * Not responsible for: what is checked.
 */
#include "tests/support_tally.h"

#include "store/base/clock.h"

#include <stdio.h>
#include <stdlib.h>

static int passed, failed;

int tally_check(int good, const char *what) {
    good ? passed++ : failed++;
    printf("%s %s\n", good ? "ok  " : "FAIL", what);
    fflush(stdout);
    return good;
}

void tally_need(enum kv_err err, const struct kv_diag *diag, const char *what) {
    if (err == KV_OK)
        return;
    printf("FAIL %s: error %d: %s\n%d passed, %d failed\n", what, (int)err, diag->text, passed,
           failed + 1);
    exit(1);
}

int tally_passed(void) {
    return passed;
}

int tally_failed(void) {
    return failed;
}

int tally_end(void) {
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

double tally_seconds(void) {
    return (double)kv_clock_now_ns(kv_clock_system()) * 1e-9;
}
