/* tests/support_crowd_ask.h - one request of a chat to the daemon, and what its answer says.
 *
 * Responsible for: the body, the answer's members, values that belong to others, asking again when
 * the daemon ended meanwhile.
 * Not responsible for: what is asked.
 *
 * Threads: any; a chat has one at a time.
 * Units: as support_crowd.h.
 */
#ifndef TESTS_SUPPORT_CROWD_ASK_H
#define TESTS_SUPPORT_CROWD_ASK_H

#include "tests/support_crowd_inner.h"

enum { CROWD_ANSWER_TOKENS = 24 };

/* Messages as one request of `chat`. 1 with the answer, which was counted and holds no other chat's
 * value; 0 with the reason noted. */
int support_crowd_ask(struct crowd *crowd, const struct crowd_chat *chat,
                      const struct cJSON *messages, struct crowd_answer *answer_out);
/* One request with no chat: the status, 0 without a whole answer; the answer is there with 200. */
int support_crowd_ask_alone(struct crowd *crowd, const char *key, const char *session,
                            const struct cJSON *messages, struct crowd_answer *answer_out);
/* One token, not counted. */
int support_crowd_ask_briefly(struct crowd *crowd, const struct crowd_chat *chat,
                              const struct cJSON *messages, struct crowd_answer *answer_out);

#endif
