/* tools/relay.h - what a command prints, on its way to a reader who may not read.
 *
 * Responsible for: two streams whose writes never wait, a thread that hands on what was written in
 * the order of writing.
 * Not responsible for: what is printed (the commands).
 *
 * Threads: the streams and these calls belong to one thread.
 * Units: bytes.
 */
#ifndef TOOLS_RELAY_H
#define TOOLS_RELAY_H

#include "store/base/alloc.h"

#include <stdio.h>

/* More than this is never kept for a reader: a write beyond it fails with ENOBUFS. */
#define RELAY_BYTES_MAX (16U << 20)

struct relay;

/* `output` and `error` are written to, and not closed. When the socket `asker` hangs up, what was
 * not taken is dropped; when it is shut down for reading, a reader has a second for each piece.
 * NULL when there is no memory or no thread. */
struct relay *relay_open(const struct kv_alloc *alloc, int output, int error, int asker);
/* Until relay_close. */
FILE *relay_output(struct relay *relay);
FILE *relay_error(struct relay *relay);
/* Waits until all is handed on or dropped; returns the errno of the first write to `output` that
 * failed, or 0. Not for a thread that others wait for. */
int relay_settle(struct relay *relay);
/* Settles; NULL is allowed. */
void relay_close(struct relay *relay);

#endif
