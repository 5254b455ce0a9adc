/* tests/support_nine_save.h - what saves cost, beside a plain writer, while others decode.
 *
 * Responsible for: a store of its own; a full save of a session none of which was written before,
 * and a plain writer of as many bytes, three times in turns; saves after a few more tokens of a
 * long session and of a short one; how long nobody could step; what others see of it.
 * Not responsible for: who decodes meanwhile (support_nine_decode.h), goals
 * (support_nine_goals.h).
 *
 * Threads: the scheduler thread; it makes one that decodes while it runs.
 * Units: tokens, bytes, nanoseconds.
 */
#ifndef TESTS_SUPPORT_NINE_SAVE_H
#define TESTS_SUPPORT_NINE_SAVE_H

#include "tests/support_nine_life.h"

enum { NINE_SAVE_SHORT = NINE_SAVERS, NINE_SAVE_LONG, NINE_SAVE_USERS = 2 };
enum { NINE_SAVE_STEPS = 3, NINE_SAVE_TURNS = 31, NINE_SAVE_PAIRS = 3 };

/* A save of some more tokens. */
struct nine_save_step {
    uint32_t tokens;
    uint64_t bytes, record_bytes, image_bytes; /* through the door, and of these */
    uint64_t allowed_bytes; /* 1.05 × (planes of new blocks + changed pages, raw) + one record */
    struct receipt receipt; /* of the median wall: of 15, 9 and 5, of fewer at the small geometry */
    uint64_t least_ns, most_ns; /* of the walls */
};
struct nine_save_length {
    uint64_t tokens; /* before the steps */
    struct nine_save_step steps[NINE_SAVE_STEPS];
};
/* A full save of the long session, and the plain writer behind it. */
struct nine_save_pair {
    struct receipt receipt;
    struct nine_plain plain;
};
struct nine_saves {
    struct nine_save_pair pairs[NINE_SAVE_PAIRS]; /* in the order of nine_save_over_plain */
    uint64_t held_ns, held_most_ns; /* nobody could step while all of them ran; at one time */
    uint32_t others;                /* who decode meanwhile */
    struct nine_seen seen;          /* of them: quiet, and beside the full saves */
    struct nine_save_length lengths[NINE_SAVE_USERS]; /* short, long */
};

/* Under nine->policy, with no store open; users are dropped from the last one on until there is
 * room, and all of them before sessions grow. The disk has room for two full saves at a time.
 * Afterwards its store in `dir` is gone. */
enum kv_err nine_save_run(struct nine *nine, const char *dir, struct nine_saves *saves_out,
                          struct kv_diag *diag);
/* How fast the save was, the plain writer being 1. */
double nine_save_over_plain(const struct nine_save_pair *pair);
/* The median of them. */
const struct nine_save_pair *nine_save_full(const struct nine_saves *saves);
/* Everything of it in lines on stdout. */
void nine_save_tell(struct nine_saves *saves);
void nine_save_release(struct nine_saves *saves);

#endif
