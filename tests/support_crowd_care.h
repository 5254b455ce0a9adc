/* tests/support_crowd_care.h - what the operator of the crowd asks, over the daemon's socket.
 *
 * Responsible for: registering facts, reading receipts, counting sessions, removing branches that
 * nobody goes on with, the audit by margin.
 * Not responsible for: the chats.
 *
 * Threads: any for support_crowd_care_register; the others while no client is at work.
 * Units: as support_crowd.h.
 */
#ifndef TESTS_SUPPORT_CROWD_CARE_H
#define TESTS_SUPPORT_CROWD_CARE_H

#include "tests/support_crowd_inner.h"

/* Each returns 1 when all is well, 0 with the reason noted. */
int support_crowd_care_register(struct crowd *crowd, const struct crowd_chat *chat);
/* Every receipt that is still kept; called often enough to see all of them. */
int support_crowd_care_receipts(struct crowd *crowd);
/* Each chat is stored with all that was acknowledged. */
int support_crowd_care_lost(struct crowd *crowd);
int support_crowd_care_audit(struct crowd *crowd);

#endif
