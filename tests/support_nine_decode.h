/* tests/support_nine_decode.h - a thread that decodes everybody who is awake, and its gaps.
 *
 * Responsible for: steps one after the other, each with the baton; gaps between them, sorted by
 * what goes on beside them; rests, in which nobody else does anything.
 * Not responsible for: what goes on beside it (support_nine_life.h, support_nine_save.h).
 *
 * A gap is what a user sees: from the end of one step to the end of the next, whoever had the
 * device meanwhile. It counts only where both steps gave everybody a token who is awake and not
 * away. Whoever decodes grows, and its steps with it, by more than a move costs; so every gap is
 * also told in parts of the median of the rest that it belongs to, or of the last one before it,
 * in which the same sessions decoded.
 *
 * Threads: the caller's, which moves sessions with the baton, and one more.
 * Units: nanoseconds; quantiles as their names say; rests in seconds.
 */
#ifndef TESTS_SUPPORT_NINE_DECODE_H
#define TESTS_SUPPORT_NINE_DECODE_H

#include "tests/support_nine.h"

#include <pthread.h>
#include <stdatomic.h>

enum { NINE_GAPS_MAX = 1 << 18 };

struct nine_gaps {
    uint64_t *ns;    /* [NINE_GAPS_MAX] */
    uint64_t *parts; /* the same in millionths of that median, in an order of their own */
    uint32_t count;
};
/* The value that `share` (0 to 1) of them do not pass, in milliseconds and in parts of that median
 * (1: as long); 0 when there are none. Both sort what they look at, after the thread has ended. */
double nine_gaps_ms(struct nine_gaps *gaps, double share);
double nine_gaps_part(struct nine_gaps *gaps, double share);

/* What was seen; it outlives the thread. */
struct nine_seen {
    struct nine_gaps quiet, moving;
    struct nine_holds *holds;
    uint32_t short_steps; /* that somebody had no context left for */
};
void nine_seen_release(struct nine_seen *seen);

enum nine_beside { NINE_QUIET, NINE_MOVING, NINE_NOT_LOOKED_AT };
struct nine_decoder {
    struct nine *nine;
    struct nine_seen *seen;
    atomic_int stop, beside; /* enum nine_beside, changed with the baton */
    uint64_t quiet_ns;       /* the median of the last rest */
    pthread_t thread;
    pthread_mutex_t lock; /* of the next four */
    pthread_cond_t rested;
    double rest_until; /* as nine_seconds says it; 0: nobody rests */
    uint32_t rest_gaps;
    int over; /* it has failed: nobody would end a rest */
    /* With the baton. */
    enum kv_err err;
    struct kv_diag diag;
};

/* The baton is nobody's. `seen` is zeroed and stays until the end; what it has is got here and goes
 * with nine_seen_release, also after an error. NOMEM. */
enum kv_err nine_decoder_begin(struct nine *nine, struct nine_seen *seen,
                               struct nine_decoder *decoder, struct kv_diag *diag);
/* `err`, or else the thread's own. One that was never begun is allowed, when zeroed. */
enum kv_err nine_decoder_end(struct nine_decoder *decoder, enum kv_err err, struct kv_diag *diag);
/* With the baton, which the decoder has meanwhile: for `seconds` and until there are `least` quiet
 * gaps in all, or it has failed. Somebody is awake. Afterwards it is NINE_MOVING. */
void nine_decoder_rest(struct nine_decoder *decoder, double seconds, uint32_t least);

#endif
