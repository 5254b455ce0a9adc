/* restore/rest_refine.h - the account of planes that come behind a session.
 *
 * Responsible for: its beginning; the rest is in restore.h.
 * Not responsible for: asking for planes (session_refine).
 *
 * Threads: the scheduler thread.
 * Units: as restore.h.
 */
#ifndef RESTORE_REST_REFINE_H
#define RESTORE_REST_REFINE_H

#include "restore/restore.h"

/* From now on what is read for `session` is counted; `woken` says whose it is. Without memory for
 * it there is no account, and the planes come all the same. */
void rest_refine_begin(const struct restore_source *source, const struct session *session,
                       const struct receipt *woken);

#endif
