/* engine/kv/pressure.h - which blocks take or give back a step of the ladder when slots are short.
 *
 * Responsible for: the policy `pressure` of DESIGN section 4.3, as a pure function: state in, list
 * of moves out.
 * Not responsible for: carrying moves out (session_pressure.c), sessions under policy `age`.
 *
 * Coldest first: idle sessions before active ones, the least recently used first, old blocks before
 * new, one step of everything before the next step of anything. Promotion is the exact reverse.
 * Only durable blocks are demoted, since only their planes can be freed; while a block waits for
 * its first step because it is still being written, nothing takes a second one.
 *
 * Threads: pure.
 * Units: slots, blocks; steps as struct image_policy counts them.
 */
#ifndef ENGINE_KV_PRESSURE_H
#define ENGINE_KV_PRESSURE_H

#include "engine/image.h"

/* Blocks promoted at once: reading them back holds up the next step. */
enum { PRESSURE_BRING_MAX = 16 };

struct pressure_session {
    uint32_t index;             /* the caller's name for it */
    struct image_policy policy; /* under pressure; its ends are moved along */
    uint32_t blocks;            /* sealed */
    uint32_t durable;           /* leading blocks whose planes are in the store */
    uint32_t stuck;             /* leading blocks that are not promoted: planes cannot be read */
    int active;                 /* works, or was just woken for it */
    uint64_t last_used_ns;
};

struct pressure_state {
    uint32_t free;      /* slots beyond the reserve */
    uint32_t low, high; /* with fewer free ones than low blocks are demoted until high are */
    uint32_t wanted;    /* more than are free, for a request that waits; 0: none */
};

/* Step `step` is taken, or given back, by blocks [first, end) of session `index`. */
struct pressure_move {
    uint32_t index, step, first, end;
    int promote;
};

/* Returns how many moves: all demote or all promote. `moves_out` has room for IMAGE_AGES_MAX for
 * each session; `sessions` is sorted, coldest first. */
uint32_t pressure_moves(const struct pressure_state *state, struct pressure_session *sessions,
                        uint32_t count, struct pressure_move *moves_out);

#endif
