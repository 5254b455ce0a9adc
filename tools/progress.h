/* tools/progress.h - one line on standard error for what takes longer than a second.
 *
 * Responsible for: showing how far something is, at most five times a second, only on a terminal;
 * removing the line when it is over.
 * Not responsible for: measuring the work.
 *
 * Threads: one owner.
 * Units: whatever the caller counts.
 */
#ifndef TOOLS_PROGRESS_H
#define TOOLS_PROGRESS_H

#include "store/base/clock.h"

#include <stdint.h>
#include <stdio.h>

struct progress {
    FILE *out; /* NULL: shows nothing */
    const struct kv_clock *clock;
    const char *what; /* "reading", borrowed */
    const char *unit; /* "tokens" */
    uint64_t started_ns, shown_ns;
    int shown;
};

/* `out` NULL, or not a terminal: every later call does nothing. */
void progress_begin(struct progress *progress, FILE *out, const struct kv_clock *clock,
                    const char *what, const char *unit);
void progress_update(struct progress *progress, uint64_t done, uint64_t all);
void progress_end(struct progress *progress);

#endif
