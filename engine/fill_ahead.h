/* engine/fill_ahead.h - chunks of fill.h, made ahead of the thread that seals them.
 *
 * Responsible for: two chunks in memory that copies to the device are fastest from, one being made
 * by several threads while the other is taken.
 * Not responsible for: what becomes of the rows (scheduler.c).
 *
 * Threads: the scheduler thread; it has a thread of its own that owns the others.
 * Units: tokens.
 */
#ifndef ENGINE_FILL_AHEAD_H
#define ENGINE_FILL_AHEAD_H

#include "engine/fill.h"

struct fill_ahead;
/* Begins to make the chunks of what `session` was fed. INVALID (threads), NOMEM. */
enum kv_err fill_ahead_make(struct session *session, const struct fill *fill,
                            struct fill_ahead **ahead_out, struct kv_diag *diag);
/* The next chunk, valid until the next call. Errors of fill->ready. */
enum kv_err fill_ahead_next(struct fill_ahead *ahead, const uint16_t **chunk_out,
                            struct kv_diag *diag);
/* Whatever is not made yet stays unmade. NULL is allowed. */
void fill_ahead_drop(struct fill_ahead *ahead);

#endif
