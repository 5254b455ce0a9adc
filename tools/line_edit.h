/* tools/line_edit.h - one line from the person at the terminal, or from a pipe.
 *
 * Responsible for: editing and history with libedit on a terminal, plain lines otherwise, noticing
 * ctrl-C while a line is being typed.
 * Not responsible for: what a line means.
 *
 * Threads: one owner, the thread that took the signals.
 * Units: bytes; a line is UTF-8 or whatever the pipe held.
 */
#ifndef TOOLS_LINE_EDIT_H
#define TOOLS_LINE_EDIT_H

#include "tools/cmd.h"

enum { LINE_EDIT_BYTES_MAX = 1 << 20, LINE_EDIT_HISTORY = 200 };

enum line_edit_got {
    LINE_EDIT_LINE,
    LINE_EDIT_END,         /* end of input, or a signal to leave */
    LINE_EDIT_INTERRUPTED, /* ctrl-C; what was typed is gone */
    LINE_EDIT_TOO_LONG
};
/* Called while nothing is typed; returns after how many nanoseconds it wants to be called again. */
typedef uint64_t (*line_edit_idle)(void *context);

struct line_edit;

/* NOMEM. `cmd` is borrowed until close; its signals end a line. */
enum kv_err line_edit_open(struct cmd *cmd, struct line_edit **edit_out, struct kv_diag *diag);
void line_edit_close(struct line_edit *edit); /* NULL is allowed */
void line_edit_while_idle(struct line_edit *edit, line_edit_idle idle, void *context);
/* Without the line feed, terminated; borrowed until the next call. */
enum line_edit_got line_edit_read(struct line_edit *edit, const char **line_out, size_t *bytes_out);

#endif
