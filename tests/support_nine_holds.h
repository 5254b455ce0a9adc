/* tests/support_nine_holds.h - who kept those waiting that decode, and for how long.
 *
 * Responsible for: stretches that the thread which sleeps and wakes sessions had the baton without
 * giving it, each named by its place in the move; the decoder's own steps; the longest gaps.
 * Not responsible for: the baton (tools/baton.h), gaps as the users see them
 * (support_nine_decode.h).
 *
 * A move always stops at the same places, so the n-th stretch of a sleep or a wake is always the
 * same work, as near as makes no difference: those over at once, as between two steps of others in
 * a row, do not count.
 *
 * Threads: whoever has the baton.
 * Units: nanoseconds.
 */
#ifndef TESTS_SUPPORT_NINE_HOLDS_H
#define TESTS_SUPPORT_NINE_HOLDS_H

#include <stdint.h>

enum {
    NINE_PLACES = 256,
    NINE_LONGEST = 10,
    NINE_STEPS_KEPT = 1 << 16,
    NINE_NOTHING_NS = 10000,
    NINE_TOLD_NS = 1000000
};
enum nine_move_kind { NINE_NOT_MOVING, NINE_SLEEPS, NINE_WAKES, NINE_SAVES, NINE_MOVE_KINDS };

struct nine_place {       /* the n-th stretch of a move */
    uint32_t count, gaps; /* how often; gaps over 1.5 x a quiet step that it was the most of */
    uint64_t sum_ns, most_ns;
};
struct nine_gap {
    uint64_t ns, step_ns, hold_ns; /* of it: the decoder's own step, the longest stretch */
    enum nine_move_kind kind;
    uint32_t place;
};
struct nine_holds {
    struct nine_place places[NINE_MOVE_KINDS][NINE_PLACES];
    struct nine_gap longest[NINE_LONGEST];
    uint32_t slow_steps; /* long gaps that were the decoder's own step */
    enum nine_move_kind kind;
    uint32_t place;
    int holding;
    uint64_t since_ns;
    struct nine_gap since_step; /* the longest stretch since the last step */
    /* Of each step beside a move of that kind: all of it, and all but waiting for the device. */
    struct nine_steps {
        uint64_t step_ns[NINE_STEPS_KEPT], host_ns[NINE_STEPS_KEPT];
        uint32_t count;
    } steps[NINE_MOVE_KINDS];
};

/* The mover's: a move begins or, as NINE_NOT_MOVING, ends; it gives the baton and has it again. */
void nine_holds_move(struct nine_holds *holds, enum nine_move_kind kind);
void nine_holds_away(struct nine_holds *holds);
void nine_holds_back(struct nine_holds *holds);
/* The decoder's: its step is over. `gap_ns` 0: there was none before; quiet_ns 0: none is long. */
struct nine_stepped {
    uint64_t gap_ns, step_ns, wait_ns, quiet_ns;
};
void nine_holds_stepped(struct nine_holds *holds, const struct nine_stepped *step);
const char *nine_move_name(enum nine_move_kind kind);

#endif
