/* tools/prefix_marks.h - marks of a chat's text at the ends of its messages.
 *
 * Responsible for: one hash for each end, of the last 128 bytes of text before it, so that a chat
 * is found whose answers are cut into other tokens than the tokenizer would cut them. White space,
 * control tokens and what is no character do not count.
 * Not responsible for: whether the text before those bytes agrees (engine/agree.h).
 *
 * Threads: pure.
 * Units: tokens, bytes.
 */
#ifndef TOOLS_PREFIX_MARKS_H
#define TOOLS_PREFIX_MARKS_H

#include "engine/model/tokenizer.h"
#include "snapshot/snap_prefix.h"

struct prefix_marks_args {
    const struct tokenizer *tokenizer;
    const uint8_t *owner;
    const uint32_t *ids; /* of tokens first … n - 1 */
    uint64_t first, n;
    const uint64_t *ends; /* ascending */
    size_t end_count;
};
/* Marks of the newest ends, at most `max`; ends before which too little text is known have none.
 * Returns how many. */
uint32_t prefix_marks_make(const struct prefix_marks_args *args, struct snap_prefix_mark *marks_out,
                           uint32_t max);

#endif
