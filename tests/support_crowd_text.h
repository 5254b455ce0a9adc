/* tests/support_crowd_text.h - what the chats of the crowd are about.
 *
 * Responsible for: a document for each with its facts in it at places of their own, values that no
 * two chats share, small talk.
 * Not responsible for: who asks when.
 *
 * Threads: one.
 * Units: as support_crowd.h.
 */
#ifndef TESTS_SUPPORT_CROWD_TEXT_H
#define TESTS_SUPPORT_CROWD_TEXT_H

#include "tests/support_crowd_inner.h"

/* Fills the chats; 0 with the reason noted. */
int support_crowd_text(struct crowd *crowd);
const char *support_crowd_text_key(uint32_t fact); /* "red lamp" */
const char *support_crowd_text_talk(uint64_t number);

#endif
