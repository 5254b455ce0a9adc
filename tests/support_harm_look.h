/* tests/support_harm_look.h - every layer of the proof asked about one session.
 *
 * Responsible for: what caught it, whether or not another layer did.
 * Not responsible for: how the session came to be what it is.
 *
 * Threads: the main thread.
 * Units: none.
 */
#ifndef TESTS_SUPPORT_HARM_LOOK_H
#define TESTS_SUPPORT_HARM_LOOK_H

#include "tests/support_harm.h"

struct harm_verdict {
    uint32_t caught; /* mask of 1u << enum harm_layer */
    uint32_t asked, wrong;
    char text[HARM_TEXT_BYTES]; /* of the first that something caught */
};
/* Asks every layer about the harmed session. `digests`: also those of what lies in its slots, as
 * its block table has them. */
void harm_look(struct harm *harm, struct session *session, int digests,
               struct harm_verdict *verdict_out);
/* Digests and fingerprint alone: 1 when both are as they were. */
int harm_unharmed(struct harm *harm, struct session *session);

#endif
