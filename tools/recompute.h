/* tools/recompute.h - a stored session made again from its tokens instead of its memory.
 *
 * Responsible for: prefilling all tokens of a stored session under the same name and settings; the
 * next save gives the head that it came from a tag and makes a lineage of its own.
 * Not responsible for: deciding for it: that is the operator's setting (--wake), and is always
 * said.
 *
 * Its KV is never bit-equal to what was stored: answers were computed token by token, and are
 * prefilled here. So no fingerprint, needle or probe of the store is compared; needles stay and
 * count as not asked.
 *
 * Threads: as service.h.
 * Units: tokens.
 * Errors: those of restore_image and the engine; MISMATCH for another model, NO_SLOTS, CANCELLED.
 */
#ifndef TOOLS_RECOMPUTE_H
#define TOOLS_RECOMPUTE_H

#include "tools/service.h"

/* 0 cancels; nothing has changed then. */
typedef int (*recompute_progress)(void *context, uint64_t tokens_done, uint64_t tokens_all);
struct recompute_args {
    const char *name; /* stored, not resident */
    recompute_progress progress;
    void *context;
};
/* The receipt says what was prefilled, and that nothing was reused or proven. */
enum kv_err recompute_session(struct service *service, const struct recompute_args *args,
                              struct session **session_out, struct receipt *receipt_out,
                              struct kv_diag *diag);

#endif
