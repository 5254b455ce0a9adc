/* tests/support_nine_goals.h - the goals of the demonstration beside what was measured.
 *
 * Responsible for: ratios of figures of the same run, each with its goal.
 * Not responsible for: measuring; the figures themselves (support_nine_tell.h).
 *
 * Threads: one.
 * Units: counts and ratios.
 */
#ifndef TESTS_SUPPORT_NINE_GOALS_H
#define TESTS_SUPPORT_NINE_GOALS_H

#include "tests/support_nine_file.h"

/* Those of acts that did not run are left out. */
void nine_tell_goals(struct nine_results *results, const struct nine *nine);

#endif
