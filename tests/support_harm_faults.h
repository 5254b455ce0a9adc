/* tests/support_harm_faults.h - the faults that a restore can have, and who must find each.
 *
 * Responsible for: the list, injecting one in one place, what caught it.
 * Not responsible for: tables and files (gpu_harm.c).
 *
 * Threads: the main thread.
 * Units: none.
 */
#ifndef TESTS_SUPPORT_HARM_FAULTS_H
#define TESTS_SUPPORT_HARM_FAULTS_H

#include "tests/support_harm_work.h"

enum { HARM_EXPECTED_MAX = 2, HARM_RESULTS_MAX = 96 };
#define HARM_ANY_NEEDLE (1u << HARM_NEEDLE | 1u << HARM_GRADED | 1u << HARM_NULL | 1u << HARM_THIEF)

struct harm_result {
    const char *fault;
    enum harm_place place;
    uint32_t expected[HARM_EXPECTED_MAX]; /* one layer of each mask must catch it; 0: none */
    uint32_t caught;                      /* mask of layers */
    int injected;                         /* something differed */
    int woken;                            /* stored places: the wake did not refuse it */
    enum harm_layer refused;              /* … else which layer did */
    int good;
    uint64_t changed_bytes;
    uint32_t asked, wrong; /* facts */
    char text[HARM_TEXT_BYTES];
};
/* All faults in all their places, the controls first. Returns how many results there are. */
uint32_t harm_run(struct harm *harm, struct harm_result results_out[HARM_RESULTS_MAX]);

#endif
