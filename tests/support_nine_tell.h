/* tests/support_nine_tell.h - lines of the table that the demonstration prints.
 *
 * Responsible for: acts with the time, what is wrong, a goal beside its value (kept for the files),
 * curves, scores, the stages of a wake, rates.
 * Not responsible for: the order of the story (nine.c), which goals there are
 * (support_nine_goals.h).
 *
 * Threads: one.
 * Units: as printed.
 */
#ifndef TESTS_SUPPORT_NINE_TELL_H
#define TESTS_SUPPORT_NINE_TELL_H

#include "tests/support_nine_file.h"

void nine_tell_act(struct nine_results *results, const char *what);
/* Counts: the demonstration ends with 1. */
void nine_wrong(struct nine_results *results, const char *what, const char *why);
/* A goal that is missed is said, and is nothing wrong. */
void nine_row(struct nine_results *results, const char *what, double goal, enum nine_sense sense,
              double value);
void nine_tell_curve(struct nine_results *results, const struct nine_curve *curve);
void nine_tell_score(struct nine_results *results, const char *what,
                     const struct nine_score *score);
void nine_tell_stages(const struct receipt *wake);

/* Weights and resident KV at the rate of a copy; 0: no rate was measured. */
double nine_floor_ms(const struct nine_results *results, const struct nine_point *point);
/* Steps by what went on beside them, and who kept those waiting that decode. */
void nine_tell_holds(const struct nine_holds *holds);

#endif
