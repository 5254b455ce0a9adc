/* tools/progress.c - one line on standard error for what takes longer than a second.
 *
 * Responsible for: see progress.h.
 * Not responsible for: measuring the work.
 */
#include "tools/progress.h"

#include "tools/text.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#define QUIET_NS UINT64_C(1000000000)
#define BETWEEN_NS UINT64_C(200000000)

void progress_begin(struct progress *progress, FILE *out, const struct kv_clock *clock,
                    const char *what, const char *unit) {
    uint64_t now_ns = kv_clock_now_ns(clock);
    *progress = (struct progress){.out = out != NULL && isatty(fileno(out)) ? out : NULL,
                                  .clock = clock,
                                  .what = what,
                                  .unit = unit,
                                  .started_ns = now_ns,
                                  .shown_ns = now_ns};
}

void progress_update(struct progress *progress, uint64_t done, uint64_t all) {
    char part[TEXT_SHORT_BYTES], whole[TEXT_SHORT_BYTES];
    if (progress->out == NULL || all == 0)
        return;
    uint64_t now_ns = kv_clock_now_ns(progress->clock);
    if (now_ns - progress->started_ns < QUIET_NS || now_ns - progress->shown_ns < BETWEEN_NS)
        return;
    progress->shown_ns = now_ns;
    progress->shown = 1;
    double percent = 100.0 * (double)done / (double)all;
    if (strcmp(progress->unit, "bytes") == 0)
        fprintf(progress->out, "\r\033[K%s: %s of %s, %.0f %%", progress->what,
                text_size(done, part), text_size(all, whole), percent);
    else
        fprintf(progress->out, "\r\033[K%s: %" PRIu64 " of %" PRIu64 " %s, %.0f %%", progress->what,
                done, all, progress->unit, percent);
    fflush(progress->out);
}

void progress_end(struct progress *progress) {
    if (progress->out == NULL || !progress->shown)
        return;
    fprintf(progress->out, "\r\033[K");
    fflush(progress->out);
    progress->shown = 0;
}
